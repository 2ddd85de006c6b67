//! Frees a path at which a socket is to be bound, if an earlier socket was left behind there.
//!
//! The path of a killed publisher stays, and has to be removed before it can be bound again: but
//! never while a process listens there, and never if it is no socket. Checking, removing and
//! binding happen under a lock on the folder, which publishers in Python take, too, so they are one
//! step.

use crate::raw::fork::Own;
use crate::raw::os;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

// For the lock on a folder, which other publishers hold for less than a millisecond.
const LOCK: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(5); // between two attempts to take it

/// Keeps other publishers from binding in a folder until it is dropped.
pub struct Locked(Own<File>);

impl Drop for Locked {
    fn drop(&mut self) {
        let _ = os::unlock(&self.0); // releases a forked child's copy, too
    }
}

/// Removes a socket at which no process listens. Fails if a process listens there, or if it is no
/// socket. Keep the returned lock until the path is bound.
pub fn free_path(path: &Path) -> io::Result<Locked> {
    let folder = lock_folder(path)?;
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
        Ok(found) if !found.file_type().is_socket() => {
            let text = "something is there which is no socket, and stays; move it away, or take another path";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
        }
        Ok(_) if is_bound(path)? => return Err(io::ErrorKind::AddrInUse.into()),
        Ok(_) => fs::remove_file(path)?,
    }
    Ok(folder)
}

fn lock_folder(path: &Path) -> io::Result<Locked> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let folder = File::open(parent.unwrap_or_else(|| Path::new("."))).map(Own::new)?;
    let until = Instant::now() + LOCK;
    loop {
        match os::lock_exclusive_nowait(&folder) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => {
                thread::sleep(LOOK);
            }
            result => return result.map(|()| Locked(folder)),
        }
    }
}

/// True if a process listens at a socket. The test connects a datagram socket, which a listener of
/// another kind refuses at once: it never waits in a queue to be accepted.
fn is_bound(path: &Path) -> io::Result<bool> {
    match UnixDatagram::unbound()?.connect(path) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EPROTOTYPE) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(false),
        Err(error) => Err(error),
    }
}
