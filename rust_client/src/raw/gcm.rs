//! AES-256-GCM by OpenSSL's libcrypto: decrypts payloads piece by piece, and encrypts whole
//! payloads.
//!
//! The crate `ring` decrypts only a whole payload with the tag at its end. Here a payload arrives
//! in pieces, its tag is in a header, and the next payload follows it in memory. A few functions of
//! libcrypto do not justify another crate that needs a C compiler.

use std::convert::TryFrom;
use std::os::raw::{c_int, c_uchar, c_void};
use std::ptr::{null_mut, NonNull};

#[repr(C)]
struct Context {
    _opaque: [u8; 0],
}

const GET_TAG: c_int = 0x10; // EVP_CTRL_AEAD_GET_TAG
const SET_TAG: c_int = 0x11; // EVP_CTRL_AEAD_SET_TAG

#[link(name = "crypto")] // 1.1 or 3
extern "C" {
    fn EVP_aes_256_gcm() -> *const c_void;
    fn EVP_CIPHER_CTX_new() -> *mut Context;
    fn EVP_CIPHER_CTX_free(context: *mut Context);
    fn EVP_CIPHER_CTX_ctrl(context: *mut Context, what: c_int, size: c_int, data: *mut c_void) -> c_int;
    fn EVP_DecryptInit_ex(
        context: *mut Context,
        cipher: *const c_void,
        engine: *mut c_void,
        key: *const c_uchar,
        nonce: *const c_uchar,
    ) -> c_int;
    fn EVP_DecryptUpdate(
        context: *mut Context,
        to: *mut c_uchar,
        count: *mut c_int,
        from: *const c_uchar,
        size: c_int,
    ) -> c_int;
    fn EVP_DecryptFinal_ex(context: *mut Context, to: *mut c_uchar, count: *mut c_int) -> c_int;
    fn EVP_EncryptInit_ex(
        context: *mut Context,
        cipher: *const c_void,
        engine: *mut c_void,
        key: *const c_uchar,
        nonce: *const c_uchar,
    ) -> c_int;
    fn EVP_EncryptUpdate(
        context: *mut Context,
        to: *mut c_uchar,
        count: *mut c_int,
        from: *const c_uchar,
        size: c_int,
    ) -> c_int;
    fn EVP_EncryptFinal_ex(context: *mut Context, to: *mut c_uchar, count: *mut c_int) -> c_int;
}

/// A ciphertext that is being decrypted. Its plain text is authentic only once `verify` returns true.
pub struct Gcm(NonNull<Context>);

// SAFETY: a context belongs to no thread, and each call has exclusive access to it.
unsafe impl Send for Gcm {}

impl Gcm {
    /// Begins to decrypt a ciphertext with this associated data. Returns `None` if libcrypto fails.
    pub fn new(key: &[u8; 32], nonce: &[u8; 12], associated: &[u8]) -> Option<Gcm> {
        // SAFETY: `EVP_CIPHER_CTX_new` has no arguments. We own the context that it returns.
        let gcm = Gcm(NonNull::new(unsafe { EVP_CIPHER_CTX_new() })?);
        let (mut count, size) = (0, c_int::try_from(associated.len()).ok()?);
        // SAFETY: `key` and `nonce` have the sizes that this cipher needs. `size` is the length of
        // `associated`. A call with a null output writes nothing.
        let started = unsafe {
            let context = gcm.0.as_ptr();
            let (key, nonce) = (key.as_ptr(), nonce.as_ptr());
            EVP_DecryptInit_ex(context, EVP_aes_256_gcm(), null_mut(), key, nonce) == 1
                && EVP_DecryptUpdate(context, null_mut(), &mut count, associated.as_ptr(), size) == 1
        };
        started.then_some(gcm)
    }

    /// Decrypts the next piece in place. Returns true on success.
    pub fn decrypt_in_place(&mut self, piece: &mut [u8]) -> bool {
        let (begin, size) = (piece.as_mut_ptr(), piece.len());
        // SAFETY: the call writes as many bytes as it reads, to the same place. This cipher permits
        // that.
        unsafe { self.update(begin, begin, size) }
    }

    /// Decrypts the next piece into `to`, which must have the same length. Returns true on success.
    pub fn decrypt_to(&mut self, piece: &[u8], to: &mut [u8]) -> bool {
        // SAFETY: the call writes as many bytes as it reads, and `to` has that length.
        piece.len() == to.len() && unsafe { self.update(piece.as_ptr(), to.as_mut_ptr(), piece.len()) }
    }

    /// # Safety
    ///
    /// `from` and `to` must have `size` bytes each, and must be the same or disjoint.
    unsafe fn update(&mut self, from: *const u8, to: *mut u8, size: usize) -> bool {
        let mut count = 0;
        // SAFETY: the caller guarantees both places. This cipher buffers nothing, and writes as
        // many bytes as it reads.
        c_int::try_from(size).map_or(false, |size| unsafe {
            EVP_DecryptUpdate(self.0.as_ptr(), to, &mut count, from, size) == 1 && count == size
        })
    }

    /// Ends the ciphertext. Returns true if all pieces together are authentic by this tag.
    pub fn verify(self, tag: &[u8; 16]) -> bool {
        let (mut tag, mut rest, mut count) = (*tag, [0u8; 16], 0);
        let context = self.0.as_ptr();
        // SAFETY: the call copies the 16 bytes of the tag. The last call writes at most one block,
        // for which `rest` has room.
        unsafe {
            let (set, place) = (SET_TAG, tag.as_mut_ptr().cast());
            EVP_CIPHER_CTX_ctrl(context, set, tag.len() as c_int, place) == 1
                && EVP_DecryptFinal_ex(context, rest.as_mut_ptr(), &mut count) == 1
        }
    }
}

/// Encrypts `plain` into `to`, which must have the same length, and authenticates `associated`.
/// Returns the tag, or `None` if libcrypto fails.
pub fn seal(
    key: &[u8; 32],
    nonce: &[u8; 12],
    associated: &[u8],
    plain: &[u8],
    to: &mut [u8],
) -> Option<[u8; 16]> {
    let (associated_size, size) =
        (c_int::try_from(associated.len()).ok()?, c_int::try_from(plain.len()).ok()?);
    // SAFETY: `EVP_CIPHER_CTX_new` has no arguments. We own the context that it returns.
    let gcm = Gcm(NonNull::new(unsafe { EVP_CIPHER_CTX_new() })?);
    let (context, mut tag, mut rest, mut count) = (gcm.0.as_ptr(), [0u8; 16], [0u8; 16], 0);
    // SAFETY: `key` and `nonce` have the sizes that this cipher needs. `associated_size` and `size`
    // are the lengths of `associated` and `plain`. The call with a null output writes nothing. The
    // call with `plain` writes `size` bytes, for which `to` has room. `EVP_EncryptFinal_ex` writes
    // at most one block, for which `rest` has room. `tag` has room for the tag.
    let sealed = unsafe {
        plain.len() == to.len()
            && EVP_EncryptInit_ex(context, EVP_aes_256_gcm(), null_mut(), key.as_ptr(), nonce.as_ptr()) == 1
            && EVP_EncryptUpdate(context, null_mut(), &mut count, associated.as_ptr(), associated_size) == 1
            && EVP_EncryptUpdate(context, to.as_mut_ptr(), &mut count, plain.as_ptr(), size) == 1
            && count == size
            && EVP_EncryptFinal_ex(context, rest.as_mut_ptr(), &mut count) == 1
            && EVP_CIPHER_CTX_ctrl(context, GET_TAG, tag.len() as c_int, tag.as_mut_ptr().cast()) == 1
    };
    sealed.then_some(tag)
}

impl Drop for Gcm {
    fn drop(&mut self) {
        // SAFETY: `self` owns the context, which is not used any more.
        unsafe { EVP_CIPHER_CTX_free(self.0.as_ptr()) }
    }
}
