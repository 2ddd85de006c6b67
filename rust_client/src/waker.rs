//! Wakes a thread that waits in `poll`.

use crate::raw::fork::Own;
use std::io::{self, Read, Write};
use std::os::unix::io::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;

/// A pair of sockets: one thread polls the receiver, any thread writes to the sender.
pub struct Waker {
    receiver: Own<UnixStream>,
    sender: Own<UnixStream>,
}

impl Waker {
    pub fn new() -> io::Result<Waker> {
        let (receiver, sender) = Own::pair(UnixStream::pair)?;
        receiver.set_nonblocking(true)?;
        sender.set_nonblocking(true)?;
        Ok(Waker { receiver, sender })
    }

    /// Makes the current or next `poll` return.
    pub fn wake(&self) {
        let _ = (&*self.sender).write(b"!"); // fails if the socket is full: then `poll` returns anyway
    }

    /// Drains the socket, so that the next `poll` waits.
    pub fn drain(&self) {
        let mut buffer = [0; 256];
        while matches!((&*self.receiver).read(&mut buffer), Ok(count) if count == buffer.len()) {}
    }
}

impl AsRawFd for Waker {
    fn as_raw_fd(&self) -> RawFd {
        self.receiver.as_raw_fd()
    }
}
