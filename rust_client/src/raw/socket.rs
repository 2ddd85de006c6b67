//! Options of sockets, and numbers and clocks of the C library, that a publisher needs.

use super::os::check;
use std::io::{self, IoSlice};
use std::os::raw::{c_char, c_uint, c_void};
use std::os::unix::io::RawFd;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

extern "C" {
    fn initstate(seed: c_uint, state: *mut c_char, size: usize) -> *mut c_char;
    fn setstate(state: *mut c_char) -> *mut c_char;
}

const CHANCE_BYTES: usize = 64;
static CHANCE: Mutex<[u8; CHANCE_BYTES]> = Mutex::new([0; CHANCE_BYTES]);

/// Runs something meanwhile that the C library's `rand` begins anywhere, and has it go on where it was. It is one for
/// the whole process: another thread that draws meanwhile gets numbers that follow from `seed`, and loses the place at
/// which an `srand` of its own meanwhile has begun. Nobody's safety is at stake in that, with glibc, which has a lock
/// for it.
pub fn with_chance<T>(seed: u32, run: impl FnOnce() -> T) -> T {
    let mut chance = CHANCE.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the memory is static and as long as is said. Rust touches it under this lock alone; the C library may
    // write to it in any thread that calls `rand` before `setstate`, under the lock that it has for its state.
    let before = unsafe { initstate(seed, chance.as_mut_ptr().cast(), CHANCE_BYTES) };
    let result = run();
    if !before.is_null() {
        // SAFETY: it is what `initstate` has returned, the C library's own memory or that of somebody who called it.
        unsafe { setstate(before) };
    }
    result
}

/// How many bytes the kernel holds for a connection that are not sent yet.
pub fn set_send_buffer(socket: RawFd, bytes: libc::c_int) -> io::Result<()> {
    let size = std::mem::size_of_val(&bytes) as libc::socklen_t;
    let value: *const c_void = (&bytes as *const libc::c_int).cast();
    // SAFETY: the kernel reads `size` bytes of `value`; a descriptor that is none gives an error.
    check(unsafe { libc::setsockopt(socket, libc::SOL_SOCKET, libc::SO_SNDBUF, value, size) }).map(drop)
}

/// Sends what the kernel takes at once. A connection that is gone is an error, and no signal, which would end a
/// program in C that does not ignore it.
pub fn send(socket: RawFd, parts: &[IoSlice]) -> io::Result<usize> {
    // SAFETY: zeros are a message of nothing to nobody.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_ptr() as *mut libc::iovec; // IoSlice is one, as std promises
    message.msg_iovlen = parts.len() as _;
    // SAFETY: the parts outlive the call, which only reads them.
    let count = unsafe { libc::sendmsg(socket, &message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

/// Has nothing pace a connection that stays within this host.
#[cfg(target_os = "linux")]
pub fn do_not_pace(socket: RawFd) -> io::Result<()> {
    let name = b"reno";
    let value: *const c_void = name.as_ptr().cast();
    let size = name.len() as libc::socklen_t;
    // SAFETY: as above.
    check(unsafe { libc::setsockopt(socket, libc::IPPROTO_TCP, libc::TCP_CONGESTION, value, size) }).map(drop)
}

#[cfg(not(target_os = "linux"))]
pub fn do_not_pace(_socket: RawFd) -> io::Result<()> {
    Ok(())
}

/// The time by a clock that never jumps, and that runs on while the host sleeps.
pub fn running_clock() -> Duration {
    #[cfg(target_os = "linux")]
    const CLOCK: libc::clockid_t = libc::CLOCK_BOOTTIME;
    #[cfg(not(target_os = "linux"))]
    const CLOCK: libc::clockid_t = libc::CLOCK_MONOTONIC;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it writes one timespec.
    unsafe { libc::clock_gettime(CLOCK, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" {
        fn rand() -> libc::c_int;
        fn srand(seed: c_uint);
    }

    #[test]
    fn who_draws_numbers_goes_on_where_it_was() {
        // SAFETY: `rand` of this process, which no other test uses.
        let draw = || unsafe { rand() };
        // SAFETY: as above.
        unsafe { srand(7) };
        let undisturbed = [draw(), draw()];
        // SAFETY: as above.
        unsafe { srand(7) };
        let first = draw();
        let (one, other) = (with_chance(1, draw), with_chance(2, draw));
        assert_ne!(one, other);
        assert_eq!([first, draw()], undisturbed);
    }
}
