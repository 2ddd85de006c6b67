//! NaCl boxes by libsodium, which libzmq also uses for CURVE. No crate in Debian has XSalsa20.

use std::os::raw::{c_int, c_uchar, c_ulonglong, c_void};
use std::sync::Once;

pub const PROOF_BYTES: usize = 16; // size of a box's authentication tag (its proof)

#[link(name = "sodium")]
extern "C" {
    fn sodium_init() -> c_int;
    fn randombytes_buf(to: *mut c_void, size: usize);
    fn crypto_box_keypair(public: *mut c_uchar, secret: *mut c_uchar) -> c_int;
    fn crypto_scalarmult_base(public: *mut c_uchar, secret: *const c_uchar) -> c_int;
    fn crypto_box_beforenm(shared: *mut c_uchar, public: *const c_uchar, secret: *const c_uchar) -> c_int;
    fn crypto_secretbox_easy(
        to: *mut c_uchar,
        plain: *const c_uchar,
        size: c_ulonglong,
        nonce: *const c_uchar,
        key: *const c_uchar,
    ) -> c_int;
    fn crypto_secretbox_open_easy(
        to: *mut c_uchar,
        sealed: *const c_uchar,
        size: c_ulonglong,
        nonce: *const c_uchar,
        key: *const c_uchar,
    ) -> c_int;
    fn crypto_secretbox_detached(
        to: *mut c_uchar,
        proof: *mut c_uchar,
        plain: *const c_uchar,
        size: c_ulonglong,
        nonce: *const c_uchar,
        key: *const c_uchar,
    ) -> c_int;
}

pub type Key = [u8; 32];
pub type Nonce = [u8; 24];

/// A public and a secret key.
pub struct Pair {
    pub public: Key,
    pub secret: Key,
}

/// Initialises libsodium. Before that, its functions are not safe in several threads.
fn ready() {
    static READY: Once = Once::new();
    READY.call_once(|| {
        // SAFETY: `sodium_init` may be called at any time, by any thread. It fails if there are no
        // random numbers. Then no key can be made, so a panic is the only safe result.
        assert!(unsafe { sodium_init() } >= 0, "libsodium has no random numbers");
    });
}

/// Fills memory with secure random numbers.
pub fn draw(to: &mut [u8]) {
    ready();
    // SAFETY: `randombytes_buf` writes as many bytes as `to` has.
    unsafe { randombytes_buf(to.as_mut_ptr().cast(), to.len()) };
}

/// Generates a pair of keys.
pub fn pair() -> Pair {
    ready();
    let mut pair = Pair { public: [0; 32], secret: [0; 32] };
    // SAFETY: the call writes 32 bytes to each key.
    unsafe { crypto_box_keypair(pair.public.as_mut_ptr(), pair.secret.as_mut_ptr()) };
    pair
}

/// Returns the public key that belongs to a secret key.
pub fn public_of(secret: &Key) -> Key {
    ready();
    let mut public = [0; 32];
    // SAFETY: the call reads 32 bytes, and writes 32.
    unsafe { crypto_scalarmult_base(public.as_mut_ptr(), secret.as_ptr()) };
    public
}

/// Returns the key that the owners of two key pairs share; `None` if the public key is invalid.
pub fn shared(public: &Key, secret: &Key) -> Option<Key> {
    ready();
    let mut key = [0; 32];
    // SAFETY: the call reads 32 bytes of each key, and writes 32.
    let done = unsafe { crypto_box_beforenm(key.as_mut_ptr(), public.as_ptr(), secret.as_ptr()) };
    Some(key).filter(|_| done == 0)
}

/// Appends to `to` a box of `plain`: a proof of `PROOF_BYTES`, and the encrypted text.
pub fn seal(key: &Key, nonce: &Nonce, plain: &[u8], to: &mut Vec<u8>) {
    let begin = to.len();
    to.resize(begin + PROOF_BYTES + plain.len(), 0);
    let size = plain.len() as c_ulonglong;
    // SAFETY: there is room for proof and plain text; key and nonce have the required sizes.
    unsafe {
        crypto_secretbox_easy(to[begin..].as_mut_ptr(), plain.as_ptr(), size, nonce.as_ptr(), key.as_ptr())
    };
}

/// Encrypts the bytes after the first `PROOF_BYTES` in place, and writes the proof into those first
/// bytes.
pub fn seal_in_place(key: &Key, nonce: &Nonce, bytes: &mut [u8]) {
    let (proof, plain) = bytes.split_at_mut(PROOF_BYTES);
    let (at, size) = (plain.as_mut_ptr(), plain.len() as c_ulonglong);
    // SAFETY: the call writes as many bytes as it reads, to the same address. libsodium permits
    // that. The call also writes 16 bytes to the proof.
    unsafe { crypto_secretbox_detached(at, proof.as_mut_ptr(), at, size, nonce.as_ptr(), key.as_ptr()) };
}

/// Returns the content of a box, or `None` if the box is not authentic.
pub fn open(key: &Key, nonce: &Nonce, sealed: &[u8]) -> Option<Vec<u8>> {
    let mut plain = vec![0; sealed.len().checked_sub(PROOF_BYTES)?];
    let size = sealed.len() as c_ulonglong;
    // SAFETY: the call reads `size` bytes, and writes `PROOF_BYTES` fewer, for which `plain` has
    // room.
    let done = unsafe {
        crypto_secretbox_open_easy(plain.as_mut_ptr(), sealed.as_ptr(), size, nonce.as_ptr(), key.as_ptr())
    };
    Some(plain).filter(|_| done == 0)
}
