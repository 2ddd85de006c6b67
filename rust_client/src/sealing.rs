//! Encrypts and decrypts sealed payloads and messages (`docs/protocol/keys.md`, "Sealing"), for
//! `publisher/sealer.rs` and a worker's `keyring.rs`. A nonce is a purpose and a number:
//!
//! ```text
//! group key ──> id                              names the group key in messages
//!           ├─> key of messages ──> nonce: MESSAGE, count
//!           └─> key of a version ─> nonce: CHUNK, index | LAYOUT, 0
//! ```

use crate::checksum::crc32c_append;
use crate::digest::{bytes_of_hex, hex};
use crate::messages::{Announce, Patch};
pub use crate::raw::gcm::seal;
use crate::raw::gcm::Gcm;
use sha2::{Digest, Sha256};
use std::convert::TryInto;
use std::fmt;

/// The name of the cipher in an announcement.
pub const AES_256_GCM: &str = "aes-256-gcm";
/// True if this crate was built with the feature `keys`.
pub const AVAILABLE: bool = cfg!(feature = "keys");

// Purposes of a nonce.
pub const CHUNK: u32 = 1;
pub const LAYOUT: u32 = 2;
pub const MESSAGE: u32 = 3;

const TAG_BYTES: usize = 16;
const PIECE_BYTES: usize = 1 << 15; // decrypted at once: still in the cache for the checksum

/// A secret key.
pub type Secret = [u8; 32];

/// Returns the HMAC-SHA256 of the concatenated parts. The key must not be longer than a block.
fn hmac(key: &[u8], parts: &[&[u8]]) -> Secret {
    let padded = |pad: u8| {
        let mut block = [pad; 64];
        block.iter_mut().zip(key).for_each(|(byte, key)| *byte ^= key);
        Sha256::new_with_prefix(block)
    };
    let inner = parts.iter().fold(padded(0x36), |hash, part| hash.chain_update(part)).finalize();
    padded(0x5c).chain_update(inner).finalize().into()
}

/// Returns a key: one block of HKDF-Expand (RFC 5869) with SHA-256.
fn expand(secret: &Secret, info: &[&[u8]]) -> Secret {
    hmac(secret, &[info, &[&[1]]].concat())
}

/// A key that only a publisher and its workers have.
pub struct GroupKey {
    pub id: String,
    pub message_key: Secret,
    secret: Secret,
}

impl fmt::Debug for GroupKey {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "GroupKey({})", self.id)
    }
}

impl GroupKey {
    /// Derives the keys and the id of a group key from its 64 hexadecimal digits.
    pub fn of_hex(key: &str) -> GroupKey {
        let secret = hmac(b"weightbus 1", &[&bytes_of_hex(key)]); // HKDF-Extract
        let id = hex(&expand(&secret, &[b"id"])[..8]);
        GroupKey { id, message_key: expand(&secret, &[b"messages"]), secret }
    }

    /// Returns the key that encrypts the chunks and the layout of a version.
    pub fn version_key(&self, subject: &Subject) -> Secret {
        expand(&self.secret, &[b"version", &subject.names()])
    }

    /// Returns an encrypted message with its tag at the end; `None` if this build cannot encrypt.
    pub fn seal_message(&self, count: u64, plain: &[u8]) -> Option<Vec<u8>> {
        let bound = bound_to_message(count, plain.len()); // E5
        let mut sealed = Vec::with_capacity(plain.len() + TAG_BYTES);
        sealed.resize(plain.len(), 0);
        let tag = seal(&self.message_key, &nonce_of(MESSAGE, count), &bound, plain, &mut sealed)?;
        sealed.extend_from_slice(&tag);
        Some(sealed)
    }

    /// Decrypts the message with this sequence number (`count`). Returns `None` if the message is
    /// not authentic.
    pub fn open_message(&self, count: u64, sealed: &[u8]) -> Option<Vec<u8>> {
        let (sealed, tag) = sealed.split_at(sealed.len().checked_sub(TAG_BYTES)?); // E5
        let bound = bound_to_message(count, sealed.len());
        let opening =
            Opening::new(&self.message_key, &nonce_of(MESSAGE, count), &bound, tag.try_into().ok()?)?;
        let mut plain = vec![0; sealed.len()];
        opening.decrypt(sealed, &mut plain).map(|_| plain)
    }
}

fn bound_to_message(count: u64, size: usize) -> Vec<u8> {
    [&MESSAGE.to_le_bytes()[..], &count.to_le_bytes(), &(size as u64).to_le_bytes()].concat()
}

/// Identifies a version in one encoding, or a patch, in keys and associated data.
#[derive(Clone, Debug, PartialEq)]
pub struct Subject {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    pub nbytes: u64,
    pub chunk_bytes: u64,
    pub encoding: String,
    /// Epoch and number of the version that the encoding builds on; zeros if there is none.
    pub base: (u64, u64),
}

impl Subject {
    /// Returns the `Subject` that identifies an announced version in keys and associated data.
    pub fn of(announce: &Announce) -> Subject {
        Subject {
            model: announce.model.clone(),
            epoch: announce.epoch,
            version: announce.version,
            nbytes: announce.nbytes,
            chunk_bytes: announce.chunk_bytes,
            encoding: announce.encoding.clone(),
            base: (0, 0),
        }
    }

    /// Returns the subject of a patch whose result is the announced version (D12).
    pub fn of_patch(announce: &Announce, patch: &Patch) -> Subject {
        Subject {
            nbytes: patch.nbytes,
            encoding: patch.encoding.clone(),
            base: (patch.epoch, patch.version),
            ..Subject::of(announce)
        }
    }

    /// Returns the bytes from which the key of this subject is derived.
    pub fn names(&self) -> Vec<u8> {
        let mut names = Vec::new();
        for text in [&self.model, &self.encoding] {
            names.push(text.len() as u8); // names have at most 128 bytes
            names.extend_from_slice(text.as_bytes());
        }
        for number in [self.epoch, self.version, self.base.0, self.base.1] {
            names.extend_from_slice(&number.to_le_bytes());
        }
        names
    }

    /// Returns the associated data of a payload of `size` bytes. `purpose` is `CHUNK` or `LAYOUT`.
    pub fn associated(&self, purpose: u32, index: u64, size: u64) -> Vec<u8> {
        let mut bound = self.names();
        bound.extend_from_slice(&purpose.to_le_bytes());
        for number in [index, size, self.nbytes, self.chunk_bytes] {
            bound.extend_from_slice(&number.to_le_bytes());
        }
        bound
    }
}

/// Returns the nonce for a purpose and an index or count. A key uses each nonce once.
pub fn nonce_of(purpose: u32, index: u64) -> [u8; 12] {
    let mut nonce = [0; 12];
    nonce[..4].copy_from_slice(&purpose.to_le_bytes());
    nonce[4..].copy_from_slice(&index.to_le_bytes());
    nonce
}

/// The decryption of a payload, piece by piece as the payload arrives.
///
/// The decrypted bytes are not authentic before `verify` has returned their checksum.
pub struct Opening {
    gcm: Gcm,
    tag: [u8; TAG_BYTES],
    crc: u32, // of the decrypted bytes, computed while these are in the cache
    failed: bool,
}

impl Opening {
    /// Begins to decrypt a payload. Returns `None` if this build cannot decrypt.
    pub fn new(key: &Secret, nonce: &[u8; 12], associated: &[u8], tag: [u8; TAG_BYTES]) -> Option<Opening> {
        Some(Opening { gcm: Gcm::new(key, nonce, associated)?, tag, crc: 0, failed: false })
    }

    /// Decrypts the next bytes in place.
    pub fn decrypt_next(&mut self, bytes: &mut [u8]) {
        for piece in bytes.chunks_mut(PIECE_BYTES) {
            self.failed |= !self.gcm.decrypt_in_place(piece);
            self.crc = crc32c_append(self.crc, piece);
        }
    }

    /// Returns the CRC-32C of the decrypted bytes; `None` if they are not authentic.
    pub fn verify(self) -> Option<u32> {
        let sound = self.gcm.verify(&self.tag) && !self.failed;
        sound.then_some(self.crc)
    }

    /// Decrypts a whole payload into `to`, which must have the same length. Returns the CRC-32C of
    /// the decrypted bytes, or `None` if they are not authentic.
    pub fn decrypt(mut self, sealed: &[u8], to: &mut [u8]) -> Option<u32> {
        for (piece, to) in sealed.chunks(PIECE_BYTES).zip(to.chunks_mut(PIECE_BYTES)) {
            self.failed |= !self.gcm.decrypt_to(piece, to);
            self.crc = crc32c_append(self.crc, to);
        }
        self.verify()
    }
}
