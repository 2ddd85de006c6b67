//! Who may come in: ZeroMQ asks for each newcomer, at an address of its context, whether its key may (RFC 27).
//!
//! Every publisher has a context of its own, and so a list of its own (K2). The question waits for an answer, and is
//! answered by the publisher's thread between other work.

const ASK_AT: &str = "inproc://zeromq.zap.01";
const DOMAIN: &str = "weightbus";
const QUESTIONS: usize = 64; // answered before others have a turn

use crate::raw::curve;

/// Has a socket that will be bound take connections of allowed keys alone (K1).
pub fn serve(socket: &mut zmq::Socket, secret: &str) -> zmq::Result<()> {
    socket.set_zap_domain(DOMAIN)?;
    if !curve::enforce_domain(socket) {
        return Err(zmq::Error::EINVAL); // nobody to ask: nobody comes in
    }
    socket.set_curve_server(true)?;
    socket.set_curve_secretkey(secret.as_bytes())
}

/// Answers ZeroMQ's questions.
pub struct Gate {
    asked: zmq::Socket,
}

impl Gate {
    /// Is there to be asked, before there is a socket that others can connect to.
    pub fn open(context: &zmq::Context) -> zmq::Result<Gate> {
        let asked = context.socket(zmq::REP)?;
        asked.set_linger(0)?;
        asked.bind(ASK_AT)?;
        Ok(Gate { asked })
    }

    pub fn poll_item(&self) -> zmq::PollItem<'_> {
        self.asked.as_poll_item(zmq::POLLIN)
    }

    /// Answers what is asked.
    pub fn answer(&self, may_come: impl Fn(&str) -> bool) {
        for _ in 0..QUESTIONS {
            let frames = match self.asked.recv_multipart(zmq::DONTWAIT) {
                Ok(frames) => frames,
                Err(_) => return,
            };
            let question = frames.get(1).cloned().unwrap_or_default();
            let key = key_of(&frames).filter(|key| may_come(key));
            let (status, user) = key.as_ref().map_or(("400", ""), |key| ("200", key));
            let answer: [&[u8]; 6] = [b"1.0", &question, status.as_bytes(), b"", user.as_bytes(), b""];
            let _ = self.asked.send_multipart(answer, zmq::DONTWAIT); // whoever asked may be gone
        }
    }
}

/// The public key that a question is about; nothing if it is about something else.
fn key_of(frames: &[Vec<u8>]) -> Option<String> {
    match frames {
        [_, _, domain, _, _, mechanism, key] if domain == DOMAIN.as_bytes() && mechanism == b"CURVE" => {
            zmq::z85_encode(key).ok().filter(|key| key.len() == 40)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(gate: &Gate, context: &zmq::Context, frames: &[&[u8]]) -> (Vec<u8>, String) {
        let asks = context.socket(zmq::REQ).unwrap();
        asks.connect(ASK_AT).unwrap();
        asks.send_multipart(frames, 0).unwrap();
        gate.asked.poll(zmq::POLLIN, 10_000).unwrap();
        gate.answer(|key| key == zmq::z85_encode(&[7; 32]).unwrap());
        assert_eq!(asks.poll(zmq::POLLIN, 10_000), Ok(1));
        let answer = asks.recv_multipart(0).unwrap();
        assert_eq!((answer.len(), &answer[0][..], &answer[1][..]), (6, &b"1.0"[..], &b"1"[..]));
        (answer[2].clone(), String::from_utf8(answer[4].clone()).unwrap())
    }

    #[test]
    fn only_a_key_that_may_come_is_let_in() {
        let context = zmq::Context::new();
        let gate = Gate::open(&context).unwrap();
        let (domain, key) = (DOMAIN.as_bytes(), [7u8; 32]);
        fn question<'a>(domain: &'a [u8], mechanism: &'a [u8], key: &'a [u8]) -> [&'a [u8]; 7] {
            [b"1.0", b"1", domain, b"127.0.0.1", b"", mechanism, key]
        }
        let answer = |frames: [&[u8]; 7]| asked(&gate, &context, &frames);
        assert_eq!(
            answer(question(domain, b"CURVE", &key)),
            (b"200".to_vec(), zmq::z85_encode(&key).unwrap())
        );
        let no = (b"400".to_vec(), String::new());
        assert_eq!(answer(question(domain, b"CURVE", &[8; 32])), no);
        assert_eq!(answer(question(domain, b"CURVE", &key[..28])), no);
        assert_eq!(answer(question(domain, b"PLAIN", &key)), no);
        assert_eq!(answer(question(b"other", b"CURVE", &key)), no);
        assert_eq!(asked(&gate, &context, &[b"1.0", b"1", domain, b"", b"", b"NULL"]), no);
    }
}
