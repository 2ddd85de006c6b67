//! What libzmq knows of CURVE and its crate does not offer.

use std::ffi::CString;
use std::mem::size_of_val;
use std::os::raw::{c_char, c_int, c_void};

const ZAP_ENFORCE_DOMAIN: c_int = 93; // since libzmq 4.3

extern "C" {
    // Of the libzmq that zmq-sys links.
    fn zmq_curve_public(public: *mut c_char, secret: *const c_char) -> c_int;
    fn zmq_setsockopt(socket: *mut c_void, option: c_int, value: *const c_void, size: usize) -> c_int;
}

/// Has a socket that will be bound let nobody in whom there is nobody to ask about; tells whether libzmq could.
pub fn enforce_domain(socket: &mut zmq::Socket) -> bool {
    let on: c_int = 1;
    let value: *const c_void = (&on as *const c_int).cast();
    // SAFETY: the socket is open, and libzmq reads as many bytes of `on` as are told.
    unsafe { zmq_setsockopt(socket.as_mut_ptr(), ZAP_ENFORCE_DOMAIN, value, size_of_val(&on)) == 0 }
}

/// Returns the public key of a secret one, 40 characters of Z85 each; nothing if libzmq has no CURVE.
pub fn public_of(secret: &str) -> Option<String> {
    let mut public = [0u8; 41];
    let secret = CString::new(secret).ok().filter(|secret| secret.as_bytes().len() == 40)?;
    // SAFETY: it reads 40 characters and a zero, and writes as many.
    let done = unsafe { zmq_curve_public(public.as_mut_ptr().cast(), secret.as_ptr()) };
    String::from_utf8(public[..40].to_vec()).ok().filter(|_| done == 0)
}
