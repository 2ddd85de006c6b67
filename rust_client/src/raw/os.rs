//! Functions of the kernel that the standard library lacks.

use std::fs::File;
use std::io;
use std::os::unix::io::{AsRawFd, RawFd};

const DESCRIPTORS_MIN: usize = 24; // free ones at the start: a worker or a publisher needs no more

/// Takes the shared lock of an open file. Fails with `WouldBlock` if the file is locked
/// exclusively.
pub fn lock_shared_nowait(file: &File) -> io::Result<()> {
    flock(file, libc::LOCK_SH | libc::LOCK_NB)
}

/// Takes the exclusive lock of an open file. Fails with `WouldBlock` if the file is locked.
pub fn lock_exclusive_nowait(file: &File) -> io::Result<()> {
    flock(file, libc::LOCK_EX | libc::LOCK_NB)
}

/// Releases the lock of an open file.
pub fn unlock(file: &File) -> io::Result<()> {
    flock(file, libc::LOCK_UN)
}

/// Makes the C library return freed memory to the system. glibc keeps the memory of messages that
/// one thread allocated and another thread freed: most of the memory of a flood of messages.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub fn give_memory_back() {
    // SAFETY: `malloc_trim` takes the locks of the allocator, and moves nothing.
    unsafe { libc::malloc_trim(0) };
}

/// Does nothing: other C libraries have no such call.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn give_memory_back() {}

/// Returns an error if too few descriptors are free for a worker or a publisher: libzmq ends the
/// process if there is none for a new socket.
pub fn check_descriptors() -> io::Result<()> {
    let mut taken = Vec::new();
    while taken.len() < DESCRIPTORS_MIN {
        match File::open("/dev/null") {
            Ok(file) => taken.push(file),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE) | Some(libc::ENFILE)) => {
                let text = format!(
                    "{} descriptors are left, and its sockets need {}: close files, or raise the limit (`ulimit -n`) where it is started",
                    taken.len(),
                    DESCRIPTORS_MIN
                );
                return Err(io::Error::new(error.kind(), text));
            }
            Err(_) => break, // without /dev/null, descriptors cannot be counted
        }
    }
    Ok(())
}

const RESERVED: libc::rlim_t = 32; // descriptors that connections must not use (protocol, section 12)

/// True if fewer than `RESERVED` descriptors are left after the new one, `descriptor`. The kernel
/// gives a new descriptor the lowest free number, so all lower numbers are in use.
pub fn spent(descriptor: RawFd) -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `getrlimit` writes one rlimit.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } == 0;
    known && limit.rlim_cur != libc::RLIM_INFINITY && descriptor as libc::rlim_t + RESERVED >= limit.rlim_cur
}

fn flock(file: &File, operation: libc::c_int) -> io::Result<()> {
    // SAFETY: the descriptor is open for as long as `file` is borrowed.
    check(unsafe { libc::flock(file.as_raw_fd(), operation) }).map(drop)
}

/// True if a file can never become shorter.
#[cfg(target_os = "linux")]
pub fn sealed_against_shrinking(file: &File) -> bool {
    // SAFETY: the descriptor is open; F_GET_SEALS takes no argument.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    seals >= 0 && seals & libc::F_SEAL_SHRINK != 0
}

/// Returns false: this system has no seals, and so no shared-memory transport.
#[cfg(not(target_os = "linux"))]
pub fn sealed_against_shrinking(_file: &File) -> bool {
    false
}

/// Makes a socket readable only once this many bytes have arrived.
pub fn set_receive_low_water(socket: RawFd, bytes: usize) -> io::Result<()> {
    let value = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    let size = std::mem::size_of_val(&value) as libc::socklen_t;
    // SAFETY: the kernel reads `size` bytes of `value`; an invalid descriptor gives an error.
    let result = unsafe {
        libc::setsockopt(
            socket,
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            (&value as *const libc::c_int).cast(),
            size,
        )
    };
    check(result).map(drop)
}

pub(super) fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_descriptors_are_kept() {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: it writes one rlimit.
        assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) }, 0);
        let last = limit.rlim_cur as RawFd;
        assert!(!spent(last - RESERVED as RawFd - 1) && spent(last - RESERVED as RawFd));
    }
}
