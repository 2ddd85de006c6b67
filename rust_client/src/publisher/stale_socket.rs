//! Removes the socket file of a killed publisher, so that its path can be bound again.
//!
//! Any other file, or a socket at which a process still listens, is not removed. Publishers,
//! also those in Python, lock the folder while they check, remove and bind the path.

use crate::raw::fork::Own;
use crate::raw::os;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

// The longest wait for the lock on a folder: publishers hold it for less than a millisecond.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);
const RETRY_INTERVAL: Duration = Duration::from_millis(5); // between two attempts to take the lock

/// The lock of a folder. Other publishers cannot bind in the folder until this is dropped.
pub struct FolderLock(Own<File>);

impl Drop for FolderLock {
    fn drop(&mut self) {
        let _ = os::unlock(&self.0); // so that a forked child's copy does not keep the lock
    }
}

/// Removes a stale socket at `path`, if there is one. Fails if a process listens there, or the file is
/// not a socket. The caller must keep the returned lock until it has bound the path.
pub fn remove_stale_socket(path: &Path) -> io::Result<FolderLock> {
    let folder = lock_folder(path)?;
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
        Ok(found) if !found.file_type().is_socket() => {
            let text = "the path is a file that is not a socket: move it away, or choose another path";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
        }
        Ok(_) if is_in_use(path)? => return Err(io::ErrorKind::AddrInUse.into()),
        Ok(_) => fs::remove_file(path)?,
    }
    Ok(folder)
}

fn lock_folder(path: &Path) -> io::Result<FolderLock> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let folder = File::open(parent.unwrap_or_else(|| Path::new("."))).map(Own::new)?;
    let until = Instant::now() + LOCK_TIMEOUT;
    loop {
        match os::lock_exclusive_nowait(&folder) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => {
                thread::sleep(RETRY_INTERVAL);
            }
            result => return result.map(|()| FolderLock(folder)),
        }
    }
}

/// True if a process listens at the socket `path`. Tries to connect a datagram socket: a stream
/// listener refuses that at once, so this never waits in an accept queue.
fn is_in_use(path: &Path) -> io::Result<bool> {
    match UnixDatagram::unbound()?.connect(path) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EPROTOTYPE) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(false),
        Err(error) => Err(error),
    }
}
