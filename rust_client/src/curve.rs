//! CURVE (ZeroMQ RFC 26), without sockets: the code that client and server share, and the client.
//! The server is in `publisher/curve.rs`.
//!
//! C and S are the permanent key pairs of client and server; C' and S' are their key pairs for one
//! connection. `X->Y` is a box: bytes encrypted with the secret key of X and the public key of Y.
//!
//! ```text
//! HELLO      C', proof that the client knows S (C'->S)
//! WELCOME    S', cookie (S->C')
//! INITIATE   cookie; box C'->S' of: C, box C->S' of a vouch for C', metadata
//! READY      metadata (S'->C'), or ERROR
//! MESSAGE    flags, a frame (C'->S' or S'->C')
//! ```

use crate::framing::{fault, COMMAND, MORE};
use crate::raw::sodium::{self, Key, Nonce, Pair, PROOF_BYTES};
use std::io;
use std::ops::Deref;
use std::sync::Arc;

pub const HELLO: &[u8] = b"\x05HELLO";
pub const INITIATE: &[u8] = b"\x08INITIATE";
const MESSAGE: &[u8] = b"\x07MESSAGE";
pub const DENIED: &[u8] = b"\x05ERROR\x03400"; // the same for every refused key: K2, K5
pub const HELLO_BYTES: usize = 200;
pub const COOKIE_BYTES: usize = 96;
pub const COUNT_BYTES: usize = 8;
pub const VOUCH_BYTES: usize = 96;
const WELCOME_BYTES: usize = 16 + PROOF_BYTES + 32 + COOKIE_BYTES;
/// Bytes that encryption adds to a frame.
pub const FRAME_BYTES: usize = 7 + 1 + COUNT_BYTES + PROOF_BYTES + 1;

/// A decrypted body, without the flags before it.
#[derive(Debug)]
pub struct Carried(Vec<u8>);

impl Deref for Carried {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0[1..]
    }
}

/// The state of a connection's encrypted frames. Each side counts its frames, so that the other
/// side accepts no frame twice or out of order.
pub struct Session {
    pub shared: Key, // from the keys of this connection, once known
    sent: u64,
    received: u64,
    ours: [u8; 16], // prefix of our frames' nonces
    theirs: [u8; 16],
}

impl Session {
    pub fn new(ours: [u8; 16], theirs: [u8; 16]) -> Session {
        Session { shared: [0; 32], sent: 0, received: 0, ours, theirs }
    }

    /// Appends to `to` the body of a MESSAGE: a frame with these flags and parts, encrypted.
    pub fn carry(&mut self, flags: u8, parts: &[&[u8]], to: &mut Vec<u8>) {
        to.extend_from_slice(MESSAGE);
        let nonce = self.count(&self.ours.clone(), to);
        let begin = to.len();
        to.extend_from_slice(&[0; PROOF_BYTES]);
        to.push(flags & MORE | (flags & COMMAND) >> 1);
        parts.iter().for_each(|part| to.extend_from_slice(part));
        sodium::seal_in_place(&self.shared, &nonce, &mut to[begin..]);
    }

    /// Decrypts the body of a MESSAGE of the peer. Returns the flags and the body of the frame in
    /// it.
    pub fn carried(&mut self, body: &[u8]) -> io::Result<(u8, Carried)> {
        let sealed = match body.strip_prefix(MESSAGE) {
            Some(sealed) => sealed,
            None => return fault("an unencrypted frame on an encrypted connection"),
        };
        let plain = self.open(&self.theirs.clone(), sealed)?;
        match plain.first() {
            Some(&more @ (0 | 1)) => Ok((more * MORE, Carried(plain))),
            Some(2) => Ok((COMMAND, Carried(plain))),
            _ => fault("an encrypted frame with flags that ZMTP 3 does not define"),
        }
    }

    /// Counts one more frame, and appends the count. Returns the nonce for this count.
    fn count(&mut self, prefix: &[u8; 16], to: &mut Vec<u8>) -> Nonce {
        self.sent += 1;
        to.extend_from_slice(&self.sent.to_be_bytes());
        short_nonce(prefix, self.sent)
    }

    /// Appends the count of the next frame, and a box of `plain`.
    pub fn seal(&mut self, prefix: &[u8; 16], plain: &[u8], to: &mut Vec<u8>) {
        self.seal_with(&self.shared.clone(), prefix, plain, to);
    }

    fn seal_with(&mut self, shared: &Key, prefix: &[u8; 16], plain: &[u8], to: &mut Vec<u8>) {
        let nonce = self.count(prefix, to);
        sodium::seal(shared, &nonce, plain, to);
    }

    /// Decrypts a box of the peer. `counted` is the count of its frame, followed by the box.
    pub fn open(&mut self, prefix: &[u8; 16], counted: &[u8]) -> io::Result<Vec<u8>> {
        self.open_with(&self.shared.clone(), prefix, counted)
    }

    /// Decrypts like `open`, but with the key `shared`: before the keys of the connection are
    /// known.
    pub fn open_with(&mut self, shared: &Key, prefix: &[u8; 16], counted: &[u8]) -> io::Result<Vec<u8>> {
        let count = match counted.get(..COUNT_BYTES) {
            Some(count) => u64::from_be_bytes(array(count)),
            None => return fault("a truncated encrypted frame"),
        };
        if count <= self.received {
            return fault("a replayed encrypted frame");
        }
        match sodium::open(shared, &short_nonce(prefix, count), &counted[COUNT_BYTES..]) {
            Some(plain) => {
                self.received = count;
                Ok(plain)
            }
            None => fault("an encrypted frame that was damaged or forged"),
        }
    }
}

/// The client's side of one connection.
pub struct Client {
    permanent: Arc<Pair>,
    server: Key,
    transient: Pair, // for this connection only
    session: Session,
    welcomed: bool,
}

impl Client {
    pub fn new(permanent: Arc<Pair>, server: Key) -> Client {
        let session = Session::new(*b"CurveZMQMESSAGEC", *b"CurveZMQMESSAGES");
        Client { permanent, server, transient: sodium::pair(), session, welcomed: false }
    }

    /// Returns the first command, HELLO.
    pub fn hello(&mut self) -> io::Result<Vec<u8>> {
        let mut hello = HELLO.to_vec();
        hello.extend_from_slice(&[1, 0]);
        hello.extend_from_slice(&[0; 72]);
        hello.extend_from_slice(&self.transient.public);
        let shared = shared_key(&self.server, &self.transient.secret)?;
        self.session.seal_with(&shared, b"CurveZMQHELLO---", &[0; 64], &mut hello);
        Ok(hello)
    }

    /// Handles a WELCOME command without its name. Returns the INITIATE command.
    pub fn initiate(&mut self, welcome: &[u8], metadata: &[u8]) -> io::Result<Vec<u8>> {
        self.initiate_with_vouch(welcome, metadata, &|vouched| vouched)
    }

    /// Does what `initiate` does. A test can make `vouch` return another secret key, or other
    /// vouched keys.
    pub fn initiate_with_vouch(
        &mut self,
        welcome: &[u8],
        metadata: &[u8],
        vouch: &dyn Fn((Key, [Key; 2])) -> (Key, [Key; 2]),
    ) -> io::Result<Vec<u8>> {
        if std::mem::replace(&mut self.welcomed, true) || welcome.len() != WELCOME_BYTES {
            return fault("an invalid WELCOME, or a second one");
        }
        let shared = shared_key(&self.server, &self.transient.secret)?;
        let plain = match open_long(&shared, b"WELCOME-", welcome) {
            Some(plain) => plain,
            None => return fault("a WELCOME that does not come from the owner of the pinned key"),
        };
        let (server, cookie) = plain.split_at(32);
        let server: Key = array(server);
        self.session.shared = shared_key(&server, &self.transient.secret)?;
        let (secret, vouched) = vouch((self.permanent.secret, [self.transient.public, self.server]));
        let mut plain = self.permanent.public.to_vec();
        plain.extend(long_box(&shared_key(&server, &secret)?, b"VOUCH---", &vouched.concat()));
        plain.extend_from_slice(metadata);
        let mut initiate = [INITIATE, cookie].concat();
        self.session.seal(b"CurveZMQINITIATE", &plain, &mut initiate);
        Ok(initiate)
    }

    /// Handles a READY command without its name. Returns the server's metadata.
    pub fn ready(&mut self, ready: &[u8]) -> io::Result<Vec<u8>> {
        if !self.welcomed {
            return fault("READY before WELCOME");
        }
        self.session.open(b"CurveZMQREADY---", ready)
    }

    /// Returns the keys and counters that encrypt and decrypt frames after the handshake.
    pub fn session(&mut self) -> &mut Session {
        &mut self.session
    }

    #[cfg(test)]
    pub fn public(&self) -> Key {
        self.permanent.public
    }
}

fn shared_key(public: &Key, secret: &Key) -> io::Result<Key> {
    sodium::shared(public, secret).map_or_else(|| fault("an invalid public key"), Ok)
}

/// Returns the public key that belongs to a secret key, both in 40 characters of Z85. Returns
/// `None` if `secret` is not a key.
pub fn public_of(secret: &str) -> Option<String> {
    zmq::z85_encode(&sodium::public_of(&key_of(secret)?)).ok()
}

/// Decodes Z85 (ZeroMQ RFC 32). (The decoder of the crate `zmq` leaks its input.)
fn z85_decode(text: &str) -> Option<Vec<u8>> {
    const DIGITS: &[u8; 85] =
        b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#";
    if text.len() % 5 != 0 {
        return None;
    }
    let mut bytes = Vec::with_capacity(text.len() / 5 * 4);
    for group in text.as_bytes().chunks_exact(5) {
        let mut value = 0_u64;
        for digit in group {
            value = value * 85 + DIGITS.iter().position(|each| each == digit)? as u64;
        }
        bytes.extend(u32::try_from(value).ok()?.to_be_bytes());
    }
    Some(bytes)
}

/// Parses a key of 40 characters of Z85.
pub fn key_of(text: &str) -> Option<Key> {
    z85_decode(text)?.try_into().ok()
}

pub fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
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

/// Encrypts `plain` with a random nonce. Returns the random part of the nonce, followed by the box.
pub fn long_box(key: &Key, prefix: &[u8; 8], plain: &[u8]) -> Vec<u8> {
    let mut sealed = vec![0; 16];
    sodium::draw(&mut sealed);
    sodium::seal(key, &long_nonce(prefix, &sealed), plain, &mut sealed);
    sealed
}

pub fn open_long(key: &Key, prefix: &[u8; 8], sealed: &[u8]) -> Option<Vec<u8>> {
    let (random, sealed) = sealed.split_at(16);
    sodium::open(key, &long_nonce(prefix, random), sealed)
}
