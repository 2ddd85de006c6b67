//! The server's side of CURVE (ZeroMQ RFC 26), without sockets.
//!
//! Below, C and S are the permanent key pairs of client and server; C' and S' are their key pairs for
//! one connection. `X->Y` is a box: bytes encrypted with the secret key of X and the public key of Y.
//!
//! ```text
//! HELLO      C', proof that the client knows S (C'->S)
//! WELCOME    S', cookie (S->C')
//! INITIATE   cookie; C, a vouch for C' (C->S'), metadata (C'->S')
//! READY      metadata (S'->C'), or ERROR
//! MESSAGE    flags, a frame (C'->S' or S'->C')
//! ```
//!
//! Each side numbers its messages, so that a replayed or delayed message is rejected. As in libzmq, each
//! connection has its own random key for the cookie. The RFC allows one key for all connections
//! within some minutes, but then a recorded connection could be replayed while that key is valid.

use crate::curve::{
    array, long_box, open_long, Session, COOKIE_BYTES, COUNT_BYTES, DENIED, HELLO, HELLO_BYTES, INITIATE,
    VOUCH_BYTES,
};
use crate::framing::fault;
use crate::raw::sodium::{self, Key, Pair, PROOF_BYTES};
use std::io;

/// The client's last command, and the data for its next command.
enum Step {
    None,
    /// The public key of C', and the key that encrypts the cookie.
    Hello(Key, Key),
    /// INITIATE, or an invalid command.
    Over,
}

/// What to do after a handshake command.
#[derive(Debug)]
pub enum Answer {
    /// Send this command, and wait for the client's next command.
    Command(Vec<u8>),
    /// The client has proved that it owns this public key, and has sent this metadata: admit or refuse
    /// the client.
    Initiated(Key, Vec<u8>),
}

/// The server's side of one connection.
pub struct Curve {
    step: Step,
    session: Session,
}

impl Curve {
    pub fn new() -> Curve {
        Curve { step: Step::None, session: Session::new(*b"CurveZMQMESSAGES", *b"CurveZMQMESSAGEC") }
    }

    /// Handles the client's next handshake command; `own` is the publisher's key pair.
    pub fn handle(&mut self, own: &Pair, command: &[u8]) -> io::Result<Answer> {
        match std::mem::replace(&mut self.step, Step::Over) {
            Step::None if command.starts_with(HELLO) => self.welcome(own, command).map(Answer::Command),
            Step::Hello(client, cookie_key) if command.starts_with(INITIATE) => {
                self.initiate(own, &client, &cookie_key, &command[INITIATE.len()..])
            }
            _ => fault("an unexpected command in the handshake"),
        }
    }

    fn welcome(&mut self, own: &Pair, hello: &[u8]) -> io::Result<Vec<u8>> {
        if hello.len() != HELLO_BYTES || hello[HELLO.len()..HELLO.len() + 2] != [1, 0] {
            return fault("a malformed HELLO");
        }
        let client: Key = array(&hello[80..112]);
        let shared = sodium::shared(&client, &own.secret);
        let proof = shared
            .and_then(|shared| self.session.open_with(&shared, b"CurveZMQHELLO---", &hello[112..]).ok());
        let shared = match (shared, proof) {
            (Some(shared), Some(zeros)) if zeros == [0; 64] => shared,
            _ => return fault("a HELLO of a peer that does not know this publisher's key"),
        };
        let (its, mut cookie_key) = (sodium::pair(), [0; 32]);
        sodium::draw(&mut cookie_key);
        let mut plain = its.public.to_vec();
        plain.extend(long_box(&cookie_key, b"COOKIE--", &[client, its.secret].concat()));
        let mut welcome = b"\x07WELCOME".to_vec();
        welcome.extend(long_box(&shared, b"WELCOME-", &plain));
        self.step = Step::Hello(client, cookie_key);
        Ok(welcome)
    }

    fn initiate(&mut self, own: &Pair, client: &Key, cookie_key: &Key, message: &[u8]) -> io::Result<Answer> {
        if message.len() < COOKIE_BYTES + COUNT_BYTES + PROOF_BYTES + 32 + VOUCH_BYTES {
            return fault("a malformed INITIATE");
        }
        let (cookie, rest) = message.split_at(COOKIE_BYTES);
        let secret: Key = match open_long(cookie_key, b"COOKIE--", cookie) {
            Some(plain) if plain[..32] == client[..] => array(&plain[32..]),
            _ => return fault("an INITIATE with a cookie that is not of this connection"),
        };
        self.session.shared = match sodium::shared(client, &secret) {
            Some(shared) => shared,
            None => return fault("an INITIATE of an invalid key"),
        };
        let plain = self.session.open(b"CurveZMQINITIATE", rest)?;
        let key: Key = array(&plain[..32]);
        let (vouch, metadata) = plain[32..].split_at(VOUCH_BYTES);
        let between = sodium::shared(&key, &secret);
        match between.and_then(|between| open_long(&between, b"VOUCH---", vouch)) {
            Some(vouched) if vouched[..] == [client, &own.public].map(|key| &key[..]).concat() => {}
            _ => return fault("an INITIATE of a peer that does not own the key that it shows"),
        }
        Ok(Answer::Initiated(key, metadata.to_vec()))
    }

    /// Returns the READY command with this metadata, which admits the client.
    pub fn ready(&mut self, metadata: &[u8]) -> Vec<u8> {
        let mut ready = b"\x05READY".to_vec();
        self.session.seal(b"CurveZMQREADY---", metadata, &mut ready);
        ready
    }

    /// Returns the ERROR command for a client whose key is not allowed.
    pub fn denied() -> &'static [u8] {
        DENIED
    }

    /// Returns the session, which encrypts and decrypts the messages after the handshake.
    pub fn session(&mut self) -> &mut Session {
        &mut self.session
    }
}

#[cfg(all(test, feature = "keys"))]
mod tests {
    use super::*;
    use crate::curve::{Client, FRAME_BYTES};
    use crate::framing::{COMMAND, MORE};
    use std::sync::Arc;

    const METADATA: &[u8] = b"\x0bSocket-Type\0\0\0\x06DEALER";

    fn client(server: &Key) -> Client {
        Client::new(Arc::new(sodium::pair()), *server)
    }

    /// A frame as it is sent, without its head.
    fn message(client: &mut Client, flags: u8, body: &[u8]) -> Vec<u8> {
        let mut message = Vec::new();
        client.session().carry(flags, &[body], &mut message);
        message
    }

    fn said(answer: io::Result<Answer>) -> Vec<u8> {
        match answer {
            Ok(Answer::Command(command)) => command,
            other => panic!("{:?}", other),
        }
    }

    /// A client that was admitted.
    fn met() -> (Curve, Client) {
        let own = sodium::pair();
        let (mut curve, mut client) = (Curve::new(), client(&own.public));
        let welcome = said(curve.handle(&own, &client.hello().unwrap()));
        let initiate = client.initiate(&welcome[8..], METADATA).unwrap();
        match curve.handle(&own, &initiate) {
            Ok(Answer::Initiated(key, metadata)) => {
                assert_eq!((key, &metadata[..]), (client.public(), METADATA));
            }
            other => panic!("{:?}", other),
        }
        (curve, client)
    }

    #[test]
    fn both_sides_understand_each_other() {
        let (mut curve, mut client) = met();
        assert!(curve.ready(b"metadata").starts_with(b"\x05READY"));
        let body = message(&mut client, MORE, b"header");
        let (flags, body) = curve.session().carried(&body).unwrap();
        assert_eq!((flags, &body[..]), (MORE, &b"header"[..]));
        let mut answer = Vec::new();
        curve.session().carry(COMMAND, &[b"a", b"b"], &mut answer);
        assert_eq!(answer.len(), FRAME_BYTES + 2);
        let (flags, body) = client.session().carried(&answer).unwrap();
        assert_eq!((flags, &body[..]), (COMMAND, &b"ab"[..]));
    }

    #[test]
    fn nothing_counts_twice_or_late_and_nothing_that_was_altered() {
        let (mut curve, mut client) = met();
        let (first, second) = (message(&mut client, 0, b"1"), message(&mut client, 0, b"2"));
        curve.session().carried(&second).unwrap();
        assert!(curve.session().carried(&second).is_err() && curve.session().carried(&first).is_err());
        let third = message(&mut client, 0, b"3");
        for at in 0..third.len() {
            let mut altered = third.clone();
            altered[at] ^= 1;
            assert!(curve.session().carried(&altered).is_err(), "byte {}", at);
        }
        curve.session().carried(&third).unwrap();
        assert!(curve.session().carried(&message(&mut client, MORE | COMMAND, b"odd flags")).is_err());
        assert!((0..third.len()).all(|end| curve.session().carried(&third[..end]).is_err()));
    }

    #[test]
    fn a_key_is_believed_of_its_owner_alone() {
        let own = sodium::pair();
        let other = sodium::pair();
        let tried = |by: &dyn Fn(&mut Client, &[u8]) -> Vec<u8>| {
            let (mut curve, mut client) = (Curve::new(), client(&own.public));
            let welcome = said(curve.handle(&own, &client.hello().unwrap()));
            let initiate = by(&mut client, &welcome);
            curve.handle(&own, &initiate).is_ok()
        };
        type Vouched = (Key, [Key; 2]); // the secret key that vouches, and the vouched keys
        let tried = |vouch: &dyn Fn(Vouched) -> Vouched| {
            tried(&|client, welcome| client.initiate_with_vouch(&welcome[8..], METADATA, vouch).unwrap())
        };
        assert!(tried(&|vouched| vouched));
        assert!(!tried(&|(_, vouched)| (other.secret, vouched)), "it owns another key");
        assert!(!tried(&|(secret, [_, server])| (secret, [other.public, server])), "of another connection");
        assert!(!tried(&|(secret, [its, _])| (secret, [its, other.public])), "for another server");
    }

    #[test]
    fn a_connection_cannot_be_said_again() {
        let own = sodium::pair();
        let (mut curve, mut client) = (Curve::new(), client(&own.public));
        let hello = client.hello().unwrap();
        let welcome = said(curve.handle(&own, &hello));
        let initiate = client.initiate(&welcome[8..], METADATA).unwrap();
        assert!(curve.handle(&own, &initiate).is_ok());
        assert!(curve.handle(&own, &initiate).is_err() && curve.handle(&own, &hello).is_err());
        let mut again = Curve::new();
        said(again.handle(&own, &hello));
        assert!(again.handle(&own, &initiate).is_err(), "the cookie is another connection's");
    }

    #[test]
    fn who_does_not_know_the_publishers_key_gets_no_answer() {
        let own = sodium::pair();
        for altered in 0..HELLO_BYTES {
            let mut hello = client(&own.public).hello().unwrap();
            hello[altered] ^= 1;
            let padding = (8..80).contains(&altered);
            assert_eq!(Curve::new().handle(&own, &hello).is_ok(), padding, "byte {}", altered);
        }
        let mut zeros = client(&own.public).hello().unwrap();
        zeros[80..112].fill(0); // a key whose shared secret is always the same
        assert!(Curve::new().handle(&own, &zeros).is_err());
        assert!(Curve::new().handle(&own, &client(&sodium::pair().public).hello().unwrap()).is_err());
        assert!(Curve::new().handle(&own, &client(&own.public).hello().unwrap()[..199]).is_err());
    }
}
