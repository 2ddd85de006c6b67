//! Hanging up on connections of libzmq's, which has no call for that but closes what it finds at an end.

use super::fork::Own;
use std::fs::File;
use std::io::{self, Read};
use std::mem::ManuallyDrop;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::os::unix::io::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

const RESERVED: libc::rlim_t = 32; // descriptors kept from connections: section 12 of the protocol

/// Whether hardly any descriptors are left: a new one has the lowest free number.
pub fn spent(descriptor: RawFd) -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: it writes one rlimit.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } == 0;
    known && limit.rlim_cur != libc::RLIM_INFINITY && descriptor as libc::rlim_t + RESERVED >= limit.rlim_cur
}

/// Where connections come in that may be hung up on.
pub enum Name {
    Port(u16),
    Path(PathBuf),
}

/// The other side of a connection.
pub type Host = Option<IpAddr>;

/// Looks at a connection through a descriptor of our own: the one that libzmq has named may be another's by now.
pub struct Hook {
    name: Name,
    nothing: Own<File>,
    look: Own<OwnedFd>,
}

impl Hook {
    pub fn new(name: Name) -> io::Result<Hook> {
        let nothing = Own::open(|| File::open("/dev/null"))?;
        let look = Own::open(|| nothing.try_clone().map(OwnedFd::from))?;
        Ok(Hook { name, nothing, look })
    }

    /// Ends a connection, if there is still one of ours.
    pub fn hang_up(&self, descriptor: RawFd) {
        if self.turn_to(descriptor) && self.is_ours() {
            let _ = self.end(); // what is gone needs none
        }
        self.turn_to(self.nothing.as_raw_fd());
    }

    /// Whether the kernel says what came on connections.
    pub fn counts(&self) -> bool {
        cfg!(target_os = "linux") && matches!(self.name, Name::Port(_))
    }

    /// Where a connection comes from; over ipc, or if it is gone, that is one place.
    pub fn host(&self, descriptor: RawFd) -> Host {
        let host = if self.turn_to(descriptor) {
            self.as_tcp().peer_addr().ok().map(|peer| peer.ip())
        } else {
            None
        };
        self.turn_to(self.nothing.as_raw_fd());
        host
    }

    /// How many bytes came on a connection, if it is one of ours.
    pub fn came(&self, descriptor: RawFd) -> Option<u64> {
        let came = if self.turn_to(descriptor) && self.is_ours() { self.received() } else { None };
        self.turn_to(self.nothing.as_raw_fd());
        came
    }

    #[cfg(target_os = "linux")]
    fn received(&self) -> Option<u64> {
        const AT: usize = 128; // of `tcpi_bytes_received` in the kernel's `struct tcp_info`, since 4.1
        let mut told = [0_u8; AT + 8];
        let mut size = told.len() as libc::socklen_t;
        let to = told.as_mut_ptr().cast();
        // SAFETY: the kernel writes at most `size` bytes to `told`.
        let done = unsafe {
            libc::getsockopt(self.look.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, to, &mut size)
        };
        let whole = done == 0 && size as usize == told.len();
        told[AT..].try_into().ok().map(u64::from_ne_bytes).filter(|_| whole)
    }

    #[cfg(not(target_os = "linux"))]
    fn received(&self) -> Option<u64> {
        None
    }

    fn turn_to(&self, descriptor: RawFd) -> bool {
        // SAFETY: `look` is nobody else's, and whoever has a descriptor that is none gets an error.
        unsafe {
            libc::dup2(descriptor, self.look.as_raw_fd()) >= 0
                && libc::fcntl(self.look.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) >= 0
        }
    }

    fn is_ours(&self) -> bool {
        match &self.name {
            Name::Port(port) => self.as_tcp().local_addr().map_or(false, |name| name.port() == *port),
            Name::Path(path) => {
                // SAFETY: the descriptor is open, and stays ours.
                let as_unix = ManuallyDrop::new(unsafe { UnixStream::from_raw_fd(self.look.as_raw_fd()) });
                as_unix.local_addr().map_or(false, |name| name.as_pathname() == Some(path))
            }
        }
    }

    fn as_tcp(&self) -> ManuallyDrop<TcpStream> {
        // SAFETY: the descriptor is open, and stays ours.
        ManuallyDrop::new(unsafe { TcpStream::from_raw_fd(self.look.as_raw_fd()) })
    }

    /// Has libzmq find the end of what comes. All at once is what it must not find: it (4.3.5) aborts the process if a
    /// connection breaks that it does not read for now.
    fn end(&self) -> io::Result<()> {
        if let Name::Port(_) = self.name {
            // Over a path nothing comes any more as it is.
            self.let_nothing_pass();
        }
        let mut connection = self.as_tcp();
        connection.shutdown(Shutdown::Read)?;
        let mut rest = [0; 4096];
        while connection.read(&mut rest)? > 0 {}
        Ok(())
    }

    #[cfg(target_os = "linux")]
    fn let_nothing_pass(&self) {
        let mut nothing = libc::sock_filter { code: 6, jt: 0, jf: 0, k: 0 }; // BPF's "ret #0"
        let filter = libc::sock_fprog { len: 1, filter: &mut nothing };
        // Or the kernel would wait for answers, which do not pass.
        let linger = libc::linger { l_onoff: 1, l_linger: 0 };
        let set = |name, value: *const libc::c_void, size: usize| {
            // SAFETY: the kernel reads `size` bytes of a value that outlives the call, and copies the filter.
            unsafe { libc::setsockopt(self.look.as_raw_fd(), libc::SOL_SOCKET, name, value, size as u32) }
        };
        if set(
            libc::SO_ATTACH_FILTER,
            (&filter as *const libc::sock_fprog).cast(),
            std::mem::size_of_val(&filter),
        ) == 0
        {
            set(libc::SO_LINGER, (&linger as *const libc::linger).cast(), std::mem::size_of_val(&linger));
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn let_nothing_pass(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::TcpListener;

    fn pair() -> (TcpListener, TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let dialled = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let accepted = listener.accept().unwrap().0;
        accepted.set_nonblocking(true).unwrap();
        (listener, accepted, dialled)
    }

    #[test]
    fn whoever_reads_finds_the_end_though_more_is_sent() {
        let (listener, mut accepted, mut dialled) = pair();
        dialled.write_all(b"what came before").unwrap();
        let hook = Hook::new(Name::Port(listener.local_addr().unwrap().port())).unwrap();
        hook.hang_up(accepted.as_raw_fd());
        let _ = dialled.write(b"what comes later");
        assert_eq!(accepted.read(&mut [0; 100]).unwrap(), 0);
        drop(accepted);
        assert_eq!(dialled.read(&mut [0; 100]).unwrap_or(0), 0, "the connection is closed");
    }

    #[test]
    fn what_is_anothers_by_now_is_left_alone() {
        let (listener, mut accepted, mut dialled) = pair();
        let (other, ..) = pair();
        for name in
            [Name::Port(other.local_addr().unwrap().port()), Name::Path(PathBuf::from("/no/such/socket"))]
        {
            let hook = Hook::new(name).unwrap();
            for descriptor in [accepted.as_raw_fd(), File::open("/dev/null").unwrap().as_raw_fd(), 1 << 20] {
                hook.hang_up(descriptor);
            }
        }
        dialled.write_all(b"x").unwrap();
        accepted.set_nonblocking(false).unwrap();
        assert_eq!(accepted.read(&mut [0; 100]).unwrap(), 1);
        drop(listener);
    }

    #[test]
    fn only_the_last_descriptors_are_kept() {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: it writes one rlimit.
        assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) }, 0);
        let last = limit.rlim_cur as RawFd;
        assert!(!spent(last - RESERVED as RawFd - 1) && spent(last - RESERVED as RawFd));
    }
}
