//! Listening sockets, which accept connections at a limited rate.

use super::endpoints::ListenAddress;
use super::rate_limits::{Rate, TokenBucket};
use super::stale_socket::remove_stale_socket;
use crate::error::Error;
use crate::raw::fork::Own;
use crate::raw::os::spent;
use crate::raw::socket::{is_name, unix_by_name};
use crate::transfer::Time;
use std::io;
use std::net::{IpAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::unix::io::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

const ACCEPT_PAUSE: Duration = Duration::from_secs(1); // when descriptors or memory are exhausted

pub enum Listener {
    Tcp(Own<TcpListener>),
    Ipc(Own<UnixListener>, PathBuf),
}

impl Listener {
    /// Listens at an address. Returns the listener, and the address with the bound port.
    pub fn bind(listen_at: &ListenAddress) -> io::Result<(Listener, ListenAddress)> {
        listen(listen_at)
    }

    pub fn accept(&self) -> io::Result<Own<TcpStream>> {
        let connection = Own::open(|| match self {
            Listener::Tcp(listener) => Ok(listener.accept()?.0),
            // From here on, a Unix socket is used like a TCP socket.
            Listener::Ipc(listener, _) => Ok(OwnedFd::from(listener.accept()?.0).into()),
        })?;
        connection.set_nonblocking(true)?;
        Ok(connection)
    }

    /// Returns the IP address and port that are bound; `None` for a path.
    pub fn bound(&self) -> Option<ListenAddress> {
        match self {
            Listener::Tcp(listener) => {
                let name = listener.local_addr().ok()?;
                let host = match name.ip() {
                    IpAddr::V4(ip) => ip.to_string(),
                    IpAddr::V6(ip) => format!("[{}]", ip),
                };
                Some(ListenAddress::Tcp { host, port: name.port() })
            }
            Listener::Ipc(..) => None,
        }
    }

    /// Returns the path of the socket file, if there is one. The file must be removed at the end.
    fn path(&self) -> Option<&PathBuf> {
        match self {
            Listener::Ipc(_, path) if !is_name(path) => Some(path),
            _ => None,
        }
    }

    pub fn descriptor(&self) -> RawFd {
        match self {
            Listener::Tcp(listener) => listener.as_raw_fd(),
            Listener::Ipc(listener, _) => listener.as_raw_fd(),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(path) = self.path() {
            // No other publisher takes the path while this socket listens.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// A listener that limits the rate of connections, and pauses when descriptors or memory are exhausted.
pub struct LimitedListener {
    listener: Listener,
    rate: Rate,
    pause: Duration,
    accepts: TokenBucket,
    accept_at: Time,
}

impl LimitedListener {
    /// Returns a listener with this rate limit. `pause` is how long it accepts nothing after the rate
    /// was exceeded, or after a connection was closed to save descriptors.
    pub fn new(listener: Listener, rate: Rate, pause: Duration) -> LimitedListener {
        LimitedListener {
            listener,
            rate,
            pause,
            accepts: TokenBucket::new(Time::ZERO),
            accept_at: Time::ZERO,
        }
    }

    /// Returns the descriptor to poll for new connections; `None` during a pause.
    pub fn descriptor(&self, now: Time) -> Option<RawFd> {
        Some(self.listener.descriptor()).filter(|_| now >= self.accept_at)
    }

    /// Accepts a connection. Returns `None` if none waits, or if a pause begins.
    pub fn accept(&mut self, now: Time) -> Option<Own<TcpStream>> {
        if !self.accepts.take(1.0, self.rate, now) {
            self.accept_at = now + self.pause;
            return None;
        }
        match self.listener.accept() {
            // Closes the connection: the last descriptors are reserved for the process itself.
            Ok(connection) if spent(connection.as_raw_fd()) => self.accept_at = now + self.pause,
            Ok(connection) => return Some(connection),
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) =>
            {
                self.accept_at = now + ACCEPT_PAUSE;
            }
            Err(_) => {} // no connection waits, or the peer is already gone
        }
        None
    }
}

fn listen(listen_at: &ListenAddress) -> io::Result<(Listener, ListenAddress)> {
    match listen_at {
        ListenAddress::Ipc(path) if is_name(path) => {
            let listener = Own::open(|| unix_by_name(path, true).map(UnixListener::from))?;
            listener.set_nonblocking(true)?;
            Ok((Listener::Ipc(listener, path.clone()), listen_at.clone()))
        }
        ListenAddress::Ipc(path) => {
            let _folder = remove_stale_socket(path)?;
            let listener = Own::open(|| UnixListener::bind(path))?;
            listener.set_nonblocking(true)?;
            Ok((Listener::Ipc(listener, path.clone()), listen_at.clone()))
        }
        ListenAddress::Tcp { host, port } => {
            let bare = host.trim_matches(|c| c == '[' || c == ']');
            let name = if bare == "*" { "0.0.0.0" } else { bare };
            let addresses: Vec<_> = (name, *port).to_socket_addrs()?.collect();
            let listener = Own::open(|| TcpListener::bind(&addresses[..]))?;
            listener.set_nonblocking(true)?;
            let port = listener.local_addr()?.port();
            Ok((Listener::Tcp(listener), ListenAddress::Tcp { host: host.clone(), port }))
        }
    }
}

/// Returns the error for an address that cannot be bound. Its text advises what to do.
pub fn bind_error(address: &str, error: io::Error) -> Error {
    if error.kind() == io::ErrorKind::AddrInUse {
        let text = "another process listens there; stop it, or take another address (port 0: any free one)";
        return Error::Address { address: address.to_owned(), text: text.to_owned() };
    }
    Error::Io { what: format!("cannot listen at {}", address), error }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Barrier, Mutex};
    use std::thread;

    #[cfg(target_os = "linux")]
    #[test]
    fn a_name_in_no_folder_is_listened_at_and_found() {
        let listen_at = ListenAddress::Ipc(format!("@weightbus-{}", std::process::id()).into());
        let (listener, _) = Listener::bind(&listen_at).unwrap();
        assert!(matches!(Listener::bind(&listen_at), Err(error) if error.kind() == io::ErrorKind::AddrInUse));
        let endpoint = crate::endpoint::Endpoint::parse(&listen_at.endpoint()).unwrap();
        let _dialled = crate::subscription::dial(&endpoint, std::time::Duration::from_secs(1)).unwrap();
        listener.accept().unwrap();
    }

    #[test]
    fn only_one_of_several_listeners_binds_a_stale_path() {
        let path = std::env::temp_dir().join(format!("weightbus-race-{}", std::process::id()));
        let listen_at = ListenAddress::Ipc(path.clone());
        for _ in 0..200 {
            drop(UnixListener::bind(&path).unwrap()); // the path stays
            let (together, bound) = (Barrier::new(4), Mutex::new(Vec::new()));
            thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        together.wait();
                        let result = Listener::bind(&listen_at);
                        bound.lock().unwrap().extend(result);
                    });
                }
            });
            assert_eq!(bound.into_inner().unwrap().len(), 1);
        }
    }
}
