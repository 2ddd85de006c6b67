//! A bell that wakes a thread out of `poll`.

use crate::raw::fork::Own;
use std::io::{self, Read, Write};
use std::os::unix::io::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;

/// One thread polls it, any thread rings it.
pub struct Bell {
    clapper: Own<UnixStream>,
    rope: Own<UnixStream>,
}

impl Bell {
    pub fn new() -> io::Result<Bell> {
        let (clapper, rope) = Own::pair(UnixStream::pair)?;
        clapper.set_nonblocking(true)?;
        rope.set_nonblocking(true)?;
        Ok(Bell { clapper, rope })
    }

    /// Makes a poll return, now or next time.
    pub fn ring(&self) {
        let _ = (&*self.rope).write(b"!"); // if it cannot take more, it rings already
    }

    /// Has it ring no longer.
    pub fn silence(&self) {
        let mut heard = [0; 256];
        while matches!((&*self.clapper).read(&mut heard), Ok(count) if count == heard.len()) {}
    }
}

impl AsRawFd for Bell {
    fn as_raw_fd(&self) -> RawFd {
        self.clapper.as_raw_fd()
    }
}
