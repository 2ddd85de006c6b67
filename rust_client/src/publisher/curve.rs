//! The server's side of CURVE (ZeroMQ RFC 26), without sockets.
//!
//! A box is sealed from one key pair to another; C and S are the sides' own keys, C' and S' those of one connection.
//!
//! ```text
//! HELLO      C', proof that the client knows S (C'->S)
//! WELCOME    S', cookie (S->C')
//! INITIATE   cookie; C, a vouch for C' (C->S'), metadata (C'->S')
//! READY      metadata (S'->C'), or ERROR
//! MESSAGE    flags, a frame (C'->S' or S'->C')
//! ```
//!
//! Each side counts what it says, so that nothing counts twice or late. The key of a cookie is drawn for one connection,
//! as libzmq does it, and not for some minutes, as the RFC permits: else whoever has recorded a connection could say all
//! of it again on another one while that key lasts.

use super::pipe::{fault, COMMAND, MORE};
use crate::raw::sodium::{self, Key, Nonce, Pair, PROOF_BYTES};
use std::io;

const HELLO: &[u8] = b"\x05HELLO";
const INITIATE: &[u8] = b"\x08INITIATE";
const MESSAGE: &[u8] = b"\x07MESSAGE";
const HELLO_BYTES: usize = 200;
const COOKIE_BYTES: usize = 96;
const COUNT_BYTES: usize = 8;
const VOUCH_BYTES: usize = 96;
/// Bytes of a frame beyond those of what it carries.
pub const FRAME_BYTES: usize = 7 + 1 + COUNT_BYTES + PROOF_BYTES + 1;
const DENIED: &[u8] = b"\x05ERROR\x03400"; // as the refusal of a key reads everywhere: K2, K5

/// What the client has said last, and what that leaves.
enum Step {
    Nothing,
    /// With C', and the key of the cookie, in which S' is.
    Hello(Key, Key),
    Over,
}

/// What a command of a handshake leads to.
#[derive(Debug)]
pub enum Answer {
    /// Say this, and wait.
    Command(Vec<u8>),
    /// The owner of this key has come, with this metadata: let it in, or do not.
    Came(Key, Vec<u8>),
}

/// One connection.
pub struct Curve {
    step: Step,
    shared: Key, // of both sides, from INITIATE on
    said: u64,
    heard: u64,
}

impl Curve {
    pub fn new() -> Curve {
        Curve { step: Step::Nothing, shared: [0; 32], said: 0, heard: 0 }
    }

    /// Takes a command of the handshake; `own` are the publisher's keys.
    pub fn take(&mut self, own: &Pair, command: &[u8]) -> io::Result<Answer> {
        match std::mem::replace(&mut self.step, Step::Over) {
            Step::Nothing if command.starts_with(HELLO) => self.welcome(own, command).map(Answer::Command),
            Step::Hello(client, cookie_key) if command.starts_with(INITIATE) => {
                self.initiated(own, &client, &cookie_key, &command[INITIATE.len()..])
            }
            _ => fault("a command that has no place in a handshake"),
        }
    }

    fn welcome(&mut self, own: &Pair, hello: &[u8]) -> io::Result<Vec<u8>> {
        if hello.len() != HELLO_BYTES || hello[HELLO.len()..HELLO.len() + 2] != [1, 0] {
            return fault("a HELLO that is none");
        }
        let client: Key = array(&hello[80..112]);
        let shared = sodium::shared(&client, &own.secret);
        let proof = shared.and_then(|shared| self.open(&shared, b"CurveZMQHELLO---", &hello[112..]).ok());
        let shared = match (shared, proof) {
            (Some(shared), Some(zeros)) if zeros == [0; 64] => shared,
            _ => return fault("a HELLO of somebody who does not know our key"),
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

    fn initiated(&mut self, own: &Pair, client: &Key, cookie_key: &Key, said: &[u8]) -> io::Result<Answer> {
        if said.len() < COOKIE_BYTES + COUNT_BYTES + PROOF_BYTES + 32 + VOUCH_BYTES {
            return fault("an INITIATE that is none");
        }
        let (cookie, rest) = said.split_at(COOKIE_BYTES);
        let secret: Key = match open_long(cookie_key, b"COOKIE--", cookie) {
            Some(plain) if plain[..32] == client[..] => array(&plain[32..]),
            _ => return fault("an INITIATE with a cookie that is not of this connection"),
        };
        self.shared = match sodium::shared(client, &secret) {
            Some(shared) => shared,
            None => return fault("a key that is none"),
        };
        let plain = self.open(&self.shared.clone(), b"CurveZMQINITIATE", rest)?;
        let key: Key = array(&plain[..32]);
        let (vouch, metadata) = plain[32..].split_at(VOUCH_BYTES);
        let between = sodium::shared(&key, &secret);
        match between.and_then(|between| open_long(&between, b"VOUCH---", vouch)) {
            Some(vouched) if vouched[..] == [client, &own.public].map(|key| &key[..]).concat() => {}
            _ => return fault("an INITIATE of somebody who does not own the key that it shows"),
        }
        Ok(Answer::Came(key, metadata.to_vec()))
    }

    /// Lets the client in, who is told this metadata.
    pub fn ready(&mut self, metadata: &[u8]) -> Vec<u8> {
        let mut ready = b"\x05READY".to_vec();
        let nonce = self.count(b"CurveZMQREADY---", &mut ready);
        sodium::seal(&self.shared, &nonce, metadata, &mut ready);
        ready
    }

    /// Tells the client that its key is not allowed.
    pub fn denied() -> &'static [u8] {
        DENIED
    }

    /// Appends the body of the frame that carries a frame of ours.
    pub fn carry(&mut self, flags: u8, parts: &[&[u8]], to: &mut Vec<u8>) {
        to.extend_from_slice(MESSAGE);
        let nonce = self.count(b"CurveZMQMESSAGES", to);
        let begin = to.len();
        to.extend_from_slice(&[0; PROOF_BYTES]);
        to.push(if flags & COMMAND != 0 { 2 } else { flags & MORE });
        parts.iter().for_each(|part| to.extend_from_slice(part));
        sodium::seal_in_place(&self.shared, &nonce, &mut to[begin..]);
    }

    /// Opens a frame of the client's: the flags and the body of the frame that it carries.
    pub fn carried(&mut self, body: &[u8]) -> io::Result<(u8, Vec<u8>)> {
        let sealed = match body.strip_prefix(MESSAGE) {
            Some(sealed) => sealed,
            None => return fault("a frame that is not encrypted, on a connection that is"),
        };
        let mut plain = self.open(&self.shared.clone(), b"CurveZMQMESSAGEC", sealed)?;
        let flags = match plain.first() {
            Some(&more @ (0 | 1)) => more * MORE,
            Some(2) => COMMAND,
            _ => return fault("an encrypted frame that ZMTP 3 does not have"),
        };
        plain.remove(0);
        Ok((flags, plain))
    }

    /// Counts one more, and says so.
    fn count(&mut self, prefix: &[u8; 16], to: &mut Vec<u8>) -> Nonce {
        self.said += 1;
        to.extend_from_slice(&self.said.to_be_bytes());
        short_nonce(prefix, self.said)
    }

    /// Opens a box of the client's behind its count.
    fn open(&mut self, shared: &Key, prefix: &[u8; 16], counted: &[u8]) -> io::Result<Vec<u8>> {
        let count = match counted.get(..COUNT_BYTES) {
            Some(count) => u64::from_be_bytes(array(count)),
            None => return fault("a command that was cut short"),
        };
        if count <= self.heard {
            return fault("an encrypted frame that came before: somebody repeats it");
        }
        match sodium::open(shared, &short_nonce(prefix, count), &counted[COUNT_BYTES..]) {
            Some(plain) => {
                self.heard = count;
                Ok(plain)
            }
            None => fault("an encrypted frame that was damaged or forged"),
        }
    }
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(bytes);
    array
}

fn short_nonce(prefix: &[u8; 16], count: u64) -> Nonce {
    let mut nonce = [0; 24];
    nonce[..16].copy_from_slice(prefix);
    nonce[16..].copy_from_slice(&count.to_be_bytes());
    nonce
}

fn long_nonce(prefix: &[u8; 8], random: &[u8]) -> Nonce {
    let mut nonce = [0; 24];
    nonce[..8].copy_from_slice(prefix);
    nonce[8..].copy_from_slice(random);
    nonce
}

/// A box behind what was drawn for it.
fn long_box(key: &Key, prefix: &[u8; 8], plain: &[u8]) -> Vec<u8> {
    let mut sealed = vec![0; 16];
    sodium::draw(&mut sealed);
    sodium::seal(key, &long_nonce(prefix, &sealed), plain, &mut sealed);
    sealed
}

fn open_long(key: &Key, prefix: &[u8; 8], sealed: &[u8]) -> Option<Vec<u8>> {
    let (random, sealed) = sealed.split_at(16);
    sodium::open(key, &long_nonce(prefix, random), sealed)
}

#[cfg(all(test, feature = "keys"))]
pub mod tests {
    use super::*;

    /// The client's side, as far as tests need it.
    pub struct Client {
        pub own: Pair,
        server: Key,
        its: Pair,
        shared: Key,
        said: u64,
    }

    impl Client {
        pub fn new(server: &Key) -> Client {
            Client { own: sodium::pair(), server: *server, its: sodium::pair(), shared: [0; 32], said: 0 }
        }

        fn counted(&mut self, prefix: &[u8; 16], key: &Key, plain: &[u8], to: &mut Vec<u8>) {
            self.said += 1;
            to.extend_from_slice(&self.said.to_be_bytes());
            sodium::seal(key, &short_nonce(prefix, self.said), plain, to);
        }

        pub fn hello(&mut self) -> Vec<u8> {
            let mut hello = HELLO.to_vec();
            hello.extend_from_slice(&[1, 0]);
            hello.extend_from_slice(&[0; 72]);
            hello.extend_from_slice(&self.its.public);
            let key = sodium::shared(&self.server, &self.its.secret).unwrap();
            self.counted(b"CurveZMQHELLO---", &key, &[0; 64], &mut hello);
            hello
        }

        /// With a vouch by this secret key, for this key of the connection and this server.
        pub fn vouching(&mut self, welcome: &[u8], secret: &Key, vouched: [&Key; 2]) -> Vec<u8> {
            let key = sodium::shared(&self.server, &self.its.secret).unwrap();
            let plain = open_long(&key, b"WELCOME-", &welcome[8..]).unwrap();
            let (server, cookie) = plain.split_at(32);
            let server: Key = array(server);
            self.shared = sodium::shared(&server, &self.its.secret).unwrap();
            let between = sodium::shared(&server, secret).unwrap();
            let mut plain = self.own.public.to_vec();
            plain.extend(long_box(&between, b"VOUCH---", &vouched.map(|key| &key[..]).concat()));
            plain.extend_from_slice(b"\x0bSocket-Type\0\0\0\x06DEALER");
            let mut initiate = [INITIATE, cookie].concat();
            let shared = self.shared;
            self.counted(b"CurveZMQINITIATE", &shared, &plain, &mut initiate);
            initiate
        }

        pub fn initiate(&mut self, welcome: &[u8]) -> Vec<u8> {
            let (secret, its, server) = (self.own.secret, self.its.public, self.server);
            self.vouching(welcome, &secret, [&its, &server])
        }

        pub fn message(&mut self, flags: u8, body: &[u8]) -> Vec<u8> {
            let mut message = MESSAGE.to_vec();
            let shared = self.shared;
            self.counted(b"CurveZMQMESSAGEC", &shared, &[&[flags], body].concat(), &mut message);
            message
        }

        pub fn opened(&self, body: &[u8]) -> Vec<u8> {
            let count = u64::from_be_bytes(array(&body[8..16]));
            sodium::open(&self.shared, &short_nonce(b"CurveZMQMESSAGES", count), &body[16..]).unwrap()
        }
    }

    fn said(answer: io::Result<Answer>) -> Vec<u8> {
        match answer {
            Ok(Answer::Command(command)) => command,
            other => panic!("{:?}", other),
        }
    }

    /// A client that is let in.
    fn met() -> (Curve, Client) {
        let own = sodium::pair();
        let (mut curve, mut client) = (Curve::new(), Client::new(&own.public));
        let welcome = said(curve.take(&own, &client.hello()));
        let initiate = client.initiate(&welcome);
        match curve.take(&own, &initiate) {
            Ok(Answer::Came(key, metadata)) => {
                assert_eq!((key, &metadata[..12]), (client.own.public, &b"\x0bSocket-Type"[..]));
            }
            other => panic!("{:?}", other),
        }
        (curve, client)
    }

    #[test]
    fn both_sides_understand_each_other() {
        let (mut curve, mut client) = met();
        assert!(curve.ready(b"metadata").starts_with(b"\x05READY"));
        let body = client.message(1, b"header");
        assert_eq!(curve.carried(&body).unwrap(), (MORE, b"header".to_vec()));
        let mut answer = Vec::new();
        curve.carry(COMMAND, &[b"a", b"b"], &mut answer);
        assert_eq!((client.opened(&answer), answer.len()), (b"\x02ab".to_vec(), FRAME_BYTES + 2));
    }

    #[test]
    fn nothing_counts_twice_or_late_and_nothing_that_was_altered() {
        let (mut curve, mut client) = met();
        let (first, second) = (client.message(0, b"1"), client.message(0, b"2"));
        curve.carried(&second).unwrap();
        assert!(curve.carried(&second).is_err() && curve.carried(&first).is_err());
        let third = client.message(0, b"3");
        for at in 0..third.len() {
            let mut altered = third.clone();
            altered[at] ^= 1;
            assert!(curve.carried(&altered).is_err(), "byte {}", at);
        }
        curve.carried(&third).unwrap();
        assert!(curve.carried(&client.message(3, b"odd flags")).is_err());
        assert!((0..third.len()).all(|end| curve.carried(&third[..end]).is_err()));
    }

    #[test]
    fn a_key_is_believed_of_its_owner_alone() {
        let own = sodium::pair();
        let other = sodium::pair();
        let tried = |by: &dyn Fn(&mut Client, &[u8]) -> Vec<u8>| {
            let (mut curve, mut client) = (Curve::new(), Client::new(&own.public));
            let welcome = said(curve.take(&own, &client.hello()));
            let initiate = by(&mut client, &welcome);
            curve.take(&own, &initiate).is_ok()
        };
        assert!(tried(&|client, welcome| client.initiate(welcome)));
        assert!(!tried(&|client, welcome| {
            let (its, server) = (client.its.public, client.server);
            client.vouching(welcome, &other.secret, [&its, &server]) // it owns another key
        }));
        assert!(!tried(&|client, welcome| {
            let (secret, server) = (client.own.secret, client.server);
            client.vouching(welcome, &secret, [&other.public, &server]) // of another connection
        }));
        assert!(!tried(&|client, welcome| {
            let (secret, its) = (client.own.secret, client.its.public);
            client.vouching(welcome, &secret, [&its, &other.public]) // for another server
        }));
    }

    #[test]
    fn a_connection_cannot_be_said_again() {
        let own = sodium::pair();
        let (mut curve, mut client) = (Curve::new(), Client::new(&own.public));
        let hello = client.hello();
        let welcome = said(curve.take(&own, &hello));
        let initiate = client.initiate(&welcome);
        assert!(curve.take(&own, &initiate).is_ok());
        assert!(curve.take(&own, &initiate).is_err() && curve.take(&own, &hello).is_err());
        let mut again = Curve::new();
        said(again.take(&own, &hello));
        assert!(again.take(&own, &initiate).is_err(), "the cookie is another connection's");
    }

    #[test]
    fn who_does_not_know_the_publishers_key_gets_no_answer() {
        let own = sodium::pair();
        for altered in 0..HELLO_BYTES {
            let mut hello = Client::new(&own.public).hello();
            hello[altered] ^= 1;
            let padding = (8..80).contains(&altered);
            assert_eq!(Curve::new().take(&own, &hello).is_ok(), padding, "byte {}", altered);
        }
        let mut zeros = Client::new(&own.public).hello();
        zeros[80..112].fill(0); // a key with which everybody shares the same
        assert!(Curve::new().take(&own, &zeros).is_err());
        assert!(Curve::new().take(&own, &Client::new(&sodium::pair().public).hello()).is_err());
        assert!(Curve::new().take(&own, &Client::new(&own.public).hello()[..199]).is_err());
    }
}
