//! AES-256-GCM by OpenSSL's libcrypto: opened in place, in as many pieces as one likes, and sealed at once.
//!
//! The crate `ring` opens a payload whole alone, with its tag behind it: here it comes in pieces, its tag in a
//! header, and what lies behind it belongs to the next. And of libcrypto ten functions are not worth a crate
//! that brings a compiler with it.

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
    fn EVP_CIPHER_CTX_ctrl(context: *mut Context, what: c_int, size: c_int, with: *mut c_void) -> c_int;
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

/// One text that is being opened. What it makes of a piece proves nothing before its tag was found right.
pub struct Gcm(NonNull<Context>);

// SAFETY: a context belongs to no thread, and each of its functions has it alone.
unsafe impl Send for Gcm {}

impl Gcm {
    /// Begins to open what is bound to these bytes; nothing if libcrypto cannot.
    pub fn new(key: &[u8; 32], nonce: &[u8; 12], associated: &[u8]) -> Option<Gcm> {
        // SAFETY: it takes nothing, and what it returns is ours to free.
        let gcm = Gcm(NonNull::new(unsafe { EVP_CIPHER_CTX_new() })?);
        let (mut count, size) = (0, c_int::try_from(associated.len()).ok()?);
        // SAFETY: key and nonce have as many bytes as this cipher takes, and `associated` as many as are told; without
        // a place for the output none is written.
        let begun = unsafe {
            let context = gcm.0.as_ptr();
            let (key, nonce) = (key.as_ptr(), nonce.as_ptr());
            EVP_DecryptInit_ex(context, EVP_aes_256_gcm(), null_mut(), key, nonce) == 1
                && EVP_DecryptUpdate(context, null_mut(), &mut count, associated.as_ptr(), size) == 1
        };
        begun.then_some(gcm)
    }

    /// Opens the next piece where it lies; tells whether it could.
    pub fn in_place(&mut self, piece: &mut [u8]) -> bool {
        let (begin, size) = (piece.as_mut_ptr(), piece.len());
        // SAFETY: as many bytes as are read are written, to the same place, which this cipher permits.
        unsafe { self.update(begin, begin, size) }
    }

    /// Opens the next piece into as many other bytes; tells whether it could.
    pub fn copy(&mut self, piece: &[u8], to: &mut [u8]) -> bool {
        // SAFETY: as many bytes as are read are written, and there is room for them.
        piece.len() == to.len() && unsafe { self.update(piece.as_ptr(), to.as_mut_ptr(), piece.len()) }
    }

    /// # Safety
    ///
    /// There must be so many bytes at either place, which are the same or apart.
    unsafe fn update(&mut self, from: *const u8, to: *mut u8, size: usize) -> bool {
        let mut count = 0;
        // SAFETY: the caller says so; this cipher holds nothing back, and writes as many bytes as it reads.
        c_int::try_from(size).map_or(false, |size| unsafe {
            EVP_DecryptUpdate(self.0.as_ptr(), to, &mut count, from, size) == 1 && count == size
        })
    }

    /// Whether all pieces together are what was sealed with this tag. It is the end of them.
    pub fn proves(self, tag: &[u8; 16]) -> bool {
        let (mut tag, mut rest, mut count) = (*tag, [0u8; 16], 0);
        let context = self.0.as_ptr();
        // SAFETY: the tag is copied out of its 16 bytes, and there is room for a block, of which this cipher has none.
        unsafe {
            let (set, place) = (SET_TAG, tag.as_mut_ptr().cast());
            EVP_CIPHER_CTX_ctrl(context, set, tag.len() as c_int, place) == 1
                && EVP_DecryptFinal_ex(context, rest.as_mut_ptr(), &mut count) == 1
        }
    }
}

/// Seals bytes into as many others, bound to what is associated; returns the tag, nothing if libcrypto cannot.
pub fn seal(
    key: &[u8; 32],
    nonce: &[u8; 12],
    associated: &[u8],
    plain: &[u8],
    to: &mut [u8],
) -> Option<[u8; 16]> {
    let (bound, size) = (c_int::try_from(associated.len()).ok()?, c_int::try_from(plain.len()).ok()?);
    // SAFETY: it takes nothing, and what it returns is ours to free.
    let gcm = Gcm(NonNull::new(unsafe { EVP_CIPHER_CTX_new() })?);
    let (context, mut tag, mut rest, mut count) = (gcm.0.as_ptr(), [0u8; 16], [0u8; 16], 0);
    // SAFETY: key and nonce have as many bytes as this cipher takes, `associated` and `plain` as many as are told, and
    // there is room for as many as `plain` has, which is what this cipher writes; without a place for the output none
    // is written. At the end there is room for a block, of which this cipher has none, and for the tag.
    let sealed = unsafe {
        plain.len() == to.len()
            && EVP_EncryptInit_ex(context, EVP_aes_256_gcm(), null_mut(), key.as_ptr(), nonce.as_ptr()) == 1
            && EVP_EncryptUpdate(context, null_mut(), &mut count, associated.as_ptr(), bound) == 1
            && EVP_EncryptUpdate(context, to.as_mut_ptr(), &mut count, plain.as_ptr(), size) == 1
            && count == size
            && EVP_EncryptFinal_ex(context, rest.as_mut_ptr(), &mut count) == 1
            && EVP_CIPHER_CTX_ctrl(context, GET_TAG, tag.len() as c_int, tag.as_mut_ptr().cast()) == 1
    };
    sealed.then_some(tag)
}

impl Drop for Gcm {
    fn drop(&mut self) {
        // SAFETY: it is ours, and nobody uses it any more.
        unsafe { EVP_CIPHER_CTX_free(self.0.as_ptr()) }
    }
}
