//! Socket functions, and a clock of the C library.

use super::os::check;
use std::io::{self, IoSlice};
use std::os::raw::c_void;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::io::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::Duration;

/// Sets how many unsent bytes the kernel buffers for a connection.
pub fn set_send_buffer(socket: RawFd, bytes: libc::c_int) -> io::Result<()> {
    let size = std::mem::size_of_val(&bytes) as libc::socklen_t;
    let value: *const c_void = (&bytes as *const libc::c_int).cast();
    // SAFETY: the kernel reads `size` bytes of `value`; an invalid descriptor gives an error.
    check(unsafe { libc::setsockopt(socket, libc::SOL_SOCKET, libc::SO_SNDBUF, value, size) }).map(drop)
}

/// Returns a Unix socket that listens at, or is connected to, a name in Linux's abstract namespace,
/// which ZeroMQ writes as `@name`.
#[cfg(target_os = "linux")]
pub fn unix_by_name(name: &Path, listens: bool) -> io::Result<OwnedFd> {
    const FAMILY_BYTES: usize = std::mem::size_of::<libc::sa_family_t>();
    const BACKLOG: libc::c_int = 128;
    let name = name.as_os_str().as_bytes().get(1..).unwrap_or_default();
    // SAFETY: zeros are a valid, empty address.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    if name.is_empty() || name.len() + 1 > address.sun_path.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, &byte) in address.sun_path[1..].iter_mut().zip(name) {
        *to = byte as libc::c_char;
    }
    let size = (FAMILY_BYTES + 1 + name.len()) as libc::socklen_t;
    let at: *const libc::sockaddr = (&address as *const libc::sockaddr_un).cast();
    // SAFETY: `socket` takes no pointer, and returns a new descriptor.
    let socket = check(unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) })?;
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    // SAFETY: the kernel reads `size` bytes of an address that is longer.
    check(unsafe {
        if listens {
            libc::bind(socket.as_raw_fd(), at, size)
        } else {
            libc::connect(socket.as_raw_fd(), at, size)
        }
    })?;
    if listens {
        // SAFETY: `listen` takes no pointer.
        check(unsafe { libc::listen(socket.as_raw_fd(), BACKLOG) })?;
    }
    Ok(socket)
}

#[cfg(not(target_os = "linux"))]
pub fn unix_by_name(_name: &Path, _listens: bool) -> io::Result<OwnedFd> {
    Err(io::ErrorKind::Unsupported.into())
}

/// True if a path is a name in the abstract namespace.
pub fn is_name(path: &Path) -> bool {
    path.as_os_str().as_bytes().starts_with(b"@")
}

/// Sends as many bytes as the kernel accepts now. Returns their number. A closed connection causes
/// an error instead of a signal, which would end a C program that does not ignore it.
pub fn send(socket: RawFd, parts: &[IoSlice]) -> io::Result<usize> {
    // SAFETY: zeros are a valid, empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_ptr() as *mut libc::iovec; // IoSlice is an iovec, as std promises
    message.msg_iovlen = parts.len() as _;
    // SAFETY: the parts outlive the call, which only reads them.
    let count = unsafe { libc::sendmsg(socket, &message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

/// Selects a congestion control without pacing, for a connection within this host.
#[cfg(target_os = "linux")]
pub fn do_not_pace(socket: RawFd) -> io::Result<()> {
    let name = b"reno";
    let value: *const c_void = name.as_ptr().cast();
    let size = name.len() as libc::socklen_t;
    // SAFETY: `value` points to `size` readable bytes during the call.
    check(unsafe { libc::setsockopt(socket, libc::IPPROTO_TCP, libc::TCP_CONGESTION, value, size) }).map(drop)
}

#[cfg(not(target_os = "linux"))]
pub fn do_not_pace(_socket: RawFd) -> io::Result<()> {
    Ok(())
}

/// Returns the time of a monotonic clock that also runs while the host is suspended.
pub fn running_clock() -> Duration {
    #[cfg(target_os = "linux")]
    const CLOCK: libc::clockid_t = libc::CLOCK_BOOTTIME;
    #[cfg(not(target_os = "linux"))]
    const CLOCK: libc::clockid_t = libc::CLOCK_MONOTONIC;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `clock_gettime` writes one timespec.
    unsafe { libc::clock_gettime(CLOCK, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Makes the kernel probe the peer after this number of seconds of silence, and repeat that at the
/// same interval.
pub fn keep_alive(socket: RawFd, seconds: libc::c_int) -> io::Result<()> {
    let set = |level, name, value: libc::c_int| {
        let size = std::mem::size_of_val(&value) as libc::socklen_t;
        let value: *const c_void = (&value as *const libc::c_int).cast();
        // SAFETY: `value` points to `size` readable bytes during the call.
        check(unsafe { libc::setsockopt(socket, level, name, value, size) })
    };
    set(libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
    #[cfg(target_os = "linux")]
    for (name, value) in
        [(libc::TCP_KEEPIDLE, seconds), (libc::TCP_KEEPINTVL, seconds), (libc::TCP_KEEPCNT, 2)]
    {
        set(libc::IPPROTO_TCP, name, value)?;
    }
    #[cfg(not(target_os = "linux"))]
    let _ = seconds; // unused: elsewhere the system's default interval applies
    Ok(())
}
