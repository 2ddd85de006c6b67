//! What a worker makes of being refused at the door: ZMTP says it without words.

use crate::transfer::Time;
use std::time::Duration;
use zmq::SocketEvent;

/// Handshakes in a row without a word. A publisher that stops may cause one, and one to which many workers dial
/// at once several: so they must have gone on for a while as well.
const BROKEN: u32 = 3;
const MECHANISM_MISMATCH: u32 = 0x1100_0002; // ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH

const NOT_ALLOWED: &str =
    "the publisher does not allow this worker's key: add the file allowed/NAME.json that \
    `weightbus keygen` made for it to the publisher's folder of keys";
const ANOTHER_KEY: &str =
    "the other side hangs up in the handshake: most likely the publisher has another key than \
    the one that this worker's file names, or speaks without keys; or a proxy answers in its place";
const NO_KEYS_THERE: &str =
    "the publisher speaks without keys, and this worker has some, which it does not give up: \
    start the publisher with keys, or the worker without";
const NO_KEYS_HERE: &str = "the publisher asks for keys, and this worker has none: give it a file that \
    `weightbus keygen` makes, by its option `keys` or by WEIGHTBUS_KEYS";

/// The events of a control connection, as far as keys have to do with them.
pub struct Door {
    keyed: bool,
    broken: u32, // handshakes in a row that have ended without a word
    broken_since: Time,
}

impl Door {
    /// Of a worker that has keys, or none.
    pub fn new(keyed: bool) -> Door {
        Door { keyed, broken: 0, broken_since: Time::ZERO }
    }

    /// Says why a handshake has failed, if that is a matter of keys. That handshakes end without a word is a reason once
    /// it has gone on for `patience`.
    pub fn why(
        &mut self,
        event: SocketEvent,
        value: u32,
        now: Time,
        patience: Duration,
    ) -> Option<&'static str> {
        match event {
            SocketEvent::HANDSHAKE_FAILED_AUTH => Some(NOT_ALLOWED), // K5
            SocketEvent::HANDSHAKE_FAILED_PROTOCOL if value == MECHANISM_MISMATCH => {
                Some(if self.keyed { NO_KEYS_THERE } else { NO_KEYS_HERE })
            }
            SocketEvent::HANDSHAKE_FAILED_NO_DETAIL if self.keyed => {
                self.broken_since = if self.broken == 0 { now } else { self.broken_since };
                self.broken += 1;
                let lasting = now.saturating_sub(self.broken_since) >= patience;
                (self.broken >= BROKEN && lasting).then_some(ANOTHER_KEY)
            }
            SocketEvent::HANDSHAKE_SUCCEEDED => {
                self.broken = 0;
                None
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(5);

    fn seconds(count: f64) -> Time {
        Duration::from_secs_f64(count)
    }

    #[test]
    fn handshakes_that_break_while_many_dial_at_once_say_nothing_of_keys() {
        let mut door = Door::new(true);
        let mut broken = |at| door.why(SocketEvent::HANDSHAKE_FAILED_NO_DETAIL, 0, seconds(at), PATIENCE);
        assert!((0..5).all(|at| broken(100.0 + f64::from(at)).is_none()));
        assert!(broken(105.0).unwrap().contains("another key"));
        assert_eq!(door.why(SocketEvent::HANDSHAKE_SUCCEEDED, 0, seconds(106.0), PATIENCE), None);
        let mut broken = |at| door.why(SocketEvent::HANDSHAKE_FAILED_NO_DETAIL, 0, seconds(at), PATIENCE);
        assert!(broken(107.0).is_none() && broken(112.5).is_none(), "too few, and since then");
        assert!(broken(112.6).is_some());
        let event = SocketEvent::HANDSHAKE_FAILED_NO_DETAIL;
        let mut keyless = Door::new(false);
        assert!((0..9).all(|at| keyless.why(event, 0, seconds(9.0 * f64::from(at)), PATIENCE).is_none()));
    }

    #[test]
    fn a_side_without_keys_is_named() {
        let event = SocketEvent::HANDSHAKE_FAILED_PROTOCOL;
        let why = |keyed, value| Door::new(keyed).why(event, value, Time::ZERO, PATIENCE);
        assert!(why(true, MECHANISM_MISMATCH).unwrap().contains("speaks without keys"));
        assert!(why(false, MECHANISM_MISMATCH).unwrap().contains("asks for keys"));
        assert_eq!(why(true, 0x1000_0000), None);
    }
}
