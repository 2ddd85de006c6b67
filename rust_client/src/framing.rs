//! Frames of ZMTP 3, which both sides of the control and the data connection write and read.
//!
//! ```text
//! ┌───────┬────────────────────┬─ ··· ─┐   flags: 1 more frames follow, 2 the size has 8 bytes,
//! │ flags │ size, 1 or 8 bytes │ body  │          4 the frame is a command
//! └───────┴────────────────────┴─ ··· ─┘
//! ```

use std::io;

pub const MORE: u8 = 1;
const LONG: u8 = 2;
pub const COMMAND: u8 = 4;
pub const GREETING_BYTES: usize = 64;
const PING_CONTEXT_MAX: usize = 16; // bytes of a PING that are sent back, by RFC 37

/// Returns a ZMTP 3.0 greeting. `keyed` is true for CURVE, and `server` for the side that binds.
pub fn greeting(keyed: bool, server: bool) -> Vec<u8> {
    let mut greeting = vec![0; GREETING_BYTES];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..32].copy_from_slice(&mechanism(keyed));
    greeting[32] = u8::from(keyed && server);
    greeting
}

/// Returns the name of the security mechanism: CURVE if `keyed`, else NULL.
pub fn mechanism(keyed: bool) -> [u8; 20] {
    let (mut mechanism, name): (_, &[u8]) = ([0; 20], if keyed { b"CURVE" } else { b"NULL" });
    mechanism[..name.len()].copy_from_slice(name);
    mechanism
}

/// Returns the security mechanism in the peer's greeting; `None` if the greeting is incomplete.
/// Returns an error at the first byte that cannot belong to a greeting of ZMTP 3.
pub fn greeted(bytes: &[u8]) -> io::Result<Option<&[u8]>> {
    let invalid = |at: usize, valid: fn(u8) -> bool| bytes.get(at).map_or(false, |&byte| !valid(byte));
    if invalid(0, |byte| byte == 0xff) || invalid(9, |byte| byte == 0x7f) || invalid(10, |byte| byte >= 3) {
        return fault("it does not speak ZMTP 3");
    }
    Ok(bytes.get(..GREETING_BYTES).map(|greeting| &greeting[12..32]))
}

pub fn frame_head(to: &mut Vec<u8>, flags: u8, size: usize) {
    if size > 255 {
        to.push(flags | LONG);
        to.extend_from_slice(&(size as u64).to_be_bytes());
    } else {
        to.extend_from_slice(&[flags, size as u8]);
    }
}

pub fn frame(to: &mut Vec<u8>, flags: u8, body: &[u8]) {
    frame_head(to, flags, body.len());
    to.extend_from_slice(body);
}

/// The head of a frame.
pub struct FrameHead {
    pub flags: u8,
    pub head: usize, // bytes before the body
    pub size: usize, // bytes of the body
}

/// Returns the head of a frame; `None` if it is incomplete. Fails if the body exceeds `size_max`.
pub fn read_head(bytes: &[u8], size_max: usize) -> io::Result<Option<FrameHead>> {
    let flags = match bytes.first() {
        Some(&flags) if flags > MORE | LONG | COMMAND || flags & (MORE | COMMAND) == MORE | COMMAND => {
            return fault("a frame with flags that ZMTP 3 does not define");
        }
        Some(&flags) => flags,
        None => return Ok(None),
    };
    let (head, size) = if flags & LONG == 0 {
        (2, bytes.get(1).map(|&size| u64::from(size)))
    } else {
        let mut size = [0; 8];
        (9, bytes.get(1..9).map(|bytes| size.copy_from_slice(bytes)).map(|_| u64::from_be_bytes(size)))
    };
    match size {
        Some(size) if size > size_max as u64 => {
            fault(&format!("a frame of {} bytes; at most {} are allowed", size, size_max))
        }
        Some(size) => Ok(Some(FrameHead { flags, head, size: size as usize })),
        None => Ok(None),
    }
}

/// Returns an error. The caller closes the connection.
pub fn fault<T>(text: &str) -> io::Result<T> {
    Err(io::Error::new(io::ErrorKind::InvalidData, text))
}

/// Returns the PONG that answers a command; `None` if the command is not a PING.
pub fn pong(command: &[u8]) -> Option<Vec<u8>> {
    let ping = command.strip_prefix(b"\x04PING")?;
    let context = ping.get(2..ping.len().min(2 + PING_CONTEXT_MAX)).unwrap_or_default();
    Some([b"\x04PONG", context].concat())
}

/// Returns the peer's socket type from the metadata of a handshake; `None` if the metadata is
/// malformed or has no socket type.
pub fn socket_type(mut metadata: &[u8]) -> Option<&[u8]> {
    let mut found = None;
    while let Some((&size, rest)) = metadata.split_first() {
        let name = rest.get(..usize::from(size))?;
        let rest = &rest[name.len()..];
        let mut size = [0; 4];
        size.copy_from_slice(rest.get(..4)?);
        let value = rest[4..].get(..usize::try_from(u32::from_be_bytes(size)).ok()?)?;
        metadata = &rest[4 + value.len()..];
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            found = Some(value);
        }
    }
    found
}
