//! What libzmq knows of CURVE and its crate does not offer.

use std::ffi::CString;
use std::os::raw::{c_char, c_int};

extern "C" {
    // Of the libzmq that zmq-sys links.
    fn zmq_curve_public(public: *mut c_char, secret: *const c_char) -> c_int;
}

/// Returns the public key of a secret one, 40 characters of Z85 each; nothing if libzmq has no CURVE.
pub fn public_of(secret: &str) -> Option<String> {
    let mut public = [0u8; 41];
    let secret = CString::new(secret).ok().filter(|secret| secret.as_bytes().len() == 40)?;
    // SAFETY: it reads 40 characters and a zero, and writes as many.
    let done = unsafe { zmq_curve_public(public.as_mut_ptr().cast(), secret.as_ptr()) };
    String::from_utf8(public[..40].to_vec()).ok().filter(|_| done == 0)
}
