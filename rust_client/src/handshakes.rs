//! Detects handshakes that fail because of keys. ZMTP itself gives no reason.

use crate::transfer::Time;
use std::time::Duration;

/// Number of handshakes in a row that must end without a reason, before keys are the likely cause.
/// A publisher that stops may cause one such failure, and many workers that dial at once may cause
/// several. So the failures must also go on for a while (`patience`).
const BROKEN_MIN: u32 = 3;

const NOT_ALLOWED: &str =
    "the publisher does not allow this worker's key: add the file allowed/NAME.json that \
    `weightbus keygen` made for it to the publisher's folder of keys";
const ANOTHER_KEY: &str =
    "the other side closes the connection in the handshake: most likely the publisher has another key than \
    the one that this worker's file names, or speaks without keys; or a proxy answers in its place";
const NO_KEYS_THERE: &str =
    "the publisher speaks without keys, and this worker has some, which it does not give up: \
    start the publisher with keys, or the worker without";
const NO_KEYS_HERE: &str = "the publisher asks for keys, and this worker has none: give it a file that \
    `weightbus keygen` makes, by its option `keys` or by WEIGHTBUS_KEYS";

/// An event of a control connection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    /// An attempt to connect began or succeeded.
    Dialled,
    /// An attempt to connect failed.
    Unreachable,
    /// The handshake succeeded.
    HandshakeDone,
    /// The peer's greeting names another security mechanism.
    OtherMechanism,
    /// The peer reports that our key is not allowed.
    Denied,
    BrokenInHandshake,
    Broken,
}

impl Event {
    /// True if there is no connection after this event, until the next attempt.
    pub fn is_end(self) -> bool {
        !matches!(self, Event::Dialled | Event::HandshakeDone)
    }
}

/// Counts the failed handshakes of a control connection that keys may have caused.
pub struct HandshakeFailures {
    keyed: bool,
    broken: u32, // handshakes in a row that ended without a reason
    broken_since: Time,
}

impl HandshakeFailures {
    /// Returns a record without failures. `keyed` is true if the worker has keys.
    pub fn new(keyed: bool) -> HandshakeFailures {
        HandshakeFailures { keyed, broken: 0, broken_since: Time::ZERO }
    }

    /// Returns the error message if an event shows that a handshake failed because of keys. Several
    /// handshakes that end without a reason also show that, once they have gone on for `patience`.
    pub fn reason(&mut self, event: Event, now: Time, patience: Duration) -> Option<&'static str> {
        match event {
            Event::Denied => Some(NOT_ALLOWED), // K5
            Event::OtherMechanism => Some(if self.keyed { NO_KEYS_THERE } else { NO_KEYS_HERE }),
            Event::BrokenInHandshake if self.keyed => {
                self.broken_since = if self.broken == 0 { now } else { self.broken_since };
                self.broken += 1;
                let lasting = now.saturating_sub(self.broken_since) >= patience;
                (self.broken >= BROKEN_MIN && lasting).then_some(ANOTHER_KEY)
            }
            Event::HandshakeDone => {
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
        let mut failures = HandshakeFailures::new(true);
        let mut broken = |at| failures.reason(Event::BrokenInHandshake, seconds(at), PATIENCE);
        assert!((0..5).all(|at| broken(100.0 + f64::from(at)).is_none()));
        assert!(broken(105.0).unwrap().contains("another key"));
        assert_eq!(failures.reason(Event::HandshakeDone, seconds(106.0), PATIENCE), None);
        let mut broken = |at| failures.reason(Event::BrokenInHandshake, seconds(at), PATIENCE);
        assert!(broken(107.0).is_none() && broken(112.5).is_none(), "too few, and since then");
        assert!(broken(112.6).is_some());
        let event = Event::BrokenInHandshake;
        let mut keyless = HandshakeFailures::new(false);
        assert!((0..9).all(|at| keyless.reason(event, seconds(9.0 * f64::from(at)), PATIENCE).is_none()));
    }

    #[test]
    fn a_side_without_keys_is_named() {
        let why = |keyed, event| HandshakeFailures::new(keyed).reason(event, Time::ZERO, PATIENCE);
        assert!(why(true, Event::OtherMechanism).unwrap().contains("speaks without keys"));
        assert!(why(false, Event::OtherMechanism).unwrap().contains("asks for keys"));
        assert_eq!(why(true, Event::Broken), None);
        assert!(why(true, Event::Denied).unwrap().contains("does not allow"));
    }
}
