//! The shared-memory transport: a worker copies the memory of a publisher on the same host straight
//! into the model.
//!
//! A segment is a header of 4096 bytes (magic, token, the stamp of the version) and the data
//! section. The publisher fills a segment under an exclusive lock. The worker copies under a shared
//! lock, and checks the stamp before and after the copy. Neither side waits for a lock. A worker
//! that gets no lock, or finds another stamp, fetches the version over the network.

use crate::checksum::crc32c_append;
use crate::digest::{bytes_of_hex, digest};
use crate::limits::SEGMENTS_MAX;
use crate::messages::Shared;
use crate::raw::fork::Own;
use crate::raw::map::Foreign;
use crate::raw::os;
use std::convert::TryFrom;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Arc, Mutex, PoisonError};

const HEADER_BYTES: usize = 4096;
const MAGIC: &[u8; 8] = b"WBPSHM1\0";
const STAMP_AT: usize = 24;
const STAMP_BYTES: usize = 152;
const PIECE_BYTES: usize = 1 << 16; // hashed at once, while it is in the cache

/// The error for a segment that was overwritten by another version, or is being filled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stale;

/// Identifies a version by its model, epoch and number.
#[derive(Clone, Debug, PartialEq)]
pub struct Stamp([u8; STAMP_BYTES]);

impl Stamp {
    pub fn new(model: &str, epoch: u64, version: u64) -> Stamp {
        let mut bytes = [0; STAMP_BYTES];
        bytes[..8].copy_from_slice(&epoch.to_le_bytes());
        bytes[8..16].copy_from_slice(&version.to_le_bytes());
        bytes[16..24].copy_from_slice(&(model.len() as u64).to_le_bytes());
        let name = &model.as_bytes()[..model.len().min(STAMP_BYTES - 24)];
        bytes[24..24 + name.len()].copy_from_slice(name);
        Stamp(bytes)
    }
}

/// A segment of another process, open for reading.
pub struct Segment {
    token: String,
    nbytes: usize,
    memory: Foreign,
    file: Mutex<Own<File>>, // all threads share one file lock, so one thread at a time reads
}

impl Segment {
    /// Opens a segment. Returns `None` if it is on another host, or this worker must not read it.
    pub fn open(shared: &Shared, nbytes: u64) -> Option<Segment> {
        if !is_path_of_descriptor(&shared.path) {
            return None;
        }
        let nbytes = usize::try_from(nbytes).ok()?;
        let len = nbytes.checked_add(HEADER_BYTES)?;
        let flags = libc::O_NONBLOCK | libc::O_CLOEXEC;
        let open = || OpenOptions::new().read(true).custom_flags(flags).open(&shared.path);
        let file = Own::open(open).ok()?;
        let found = file.metadata().ok()?;
        if !found.is_file() || found.len() != len as u64 || !os::sealed_against_shrinking(&file) {
            return None;
        }
        let memory = Foreign::new(&file, len).ok()?;
        let mut head = [0; STAMP_AT];
        memory.copy_to(0, &mut head);
        if &head[..8] != MAGIC || head[8..] != bytes_of_hex(&shared.token)[..] {
            return None;
        }
        Some(Segment { token: shared.token.clone(), nbytes, memory, file: Mutex::new(file) })
    }

    /// Calls `copy` with the data section, if the segment holds this version. Returns what `copy`
    /// returned.
    ///
    /// The copied bytes are valid only if `read` returns `Ok`.
    pub fn read<T>(&self, stamp: &Stamp, copy: impl FnOnce(&Reading) -> T) -> Result<T, Stale> {
        let file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        os::lock_shared_nowait(&file).map_err(|_| Stale)?;
        let _unlock = Unlock(&file);
        self.check(stamp)?;
        let copied = copy(&Reading(self));
        self.check(stamp)?;
        Ok(copied)
    }

    fn check(&self, stamp: &Stamp) -> Result<(), Stale> {
        let mut found = [0; STAMP_BYTES];
        self.memory.copy_to(STAMP_AT, &mut found);
        if found == stamp.0 {
            Ok(())
        } else {
            Err(Stale)
        }
    }
}

struct Unlock<'a>(&'a File);

impl Drop for Unlock<'_> {
    fn drop(&mut self) {
        let _ = os::unlock(self.0); // after an error, closing the file releases the lock
    }
}

/// The data section of a locked segment.
pub struct Reading<'a>(&'a Segment);

impl Reading<'_> {
    pub fn nbytes(&self) -> usize {
        self.0.nbytes
    }

    /// Copies bytes of the data section, from `begin` on.
    pub fn copy_to(&self, begin: usize, to: &mut [u8]) {
        self.0.memory.copy_to(HEADER_BYTES + begin, to);
    }

    /// Returns the digest of the data section, in chunks of this size.
    pub fn digest(&self, layout_id: &str, chunk_bytes: u64) -> String {
        let chunk_bytes = usize::try_from(chunk_bytes).unwrap_or(usize::MAX);
        let mut piece = vec![0; PIECE_BYTES.min(chunk_bytes)];
        let mut crcs = Vec::new();
        let mut at = 0;
        while at < self.0.nbytes {
            let end = self.0.nbytes.min(at.saturating_add(chunk_bytes));
            let mut crc = 0;
            while at < end {
                let part = piece.len().min(end - at);
                self.copy_to(at, &mut piece[..part]);
                crc = crc32c_append(crc, &piece[..part]);
                at += part;
            }
            crcs.push(crc);
        }
        digest(layout_id, chunk_bytes as u64, &crcs)
    }
}

/// True if a path is `/proc/PID/fd/FD`: no other path is ever opened.
fn is_path_of_descriptor(path: &str) -> bool {
    let number = |text: &str| (1..=10).contains(&text.len()) && text.bytes().all(|c| c.is_ascii_digit());
    let rest = path.strip_prefix("/proc/").and_then(|rest| rest.split_once("/fd/"));
    rest.map_or(false, |(pid, descriptor)| number(pid) && number(descriptor))
}

/// The segments that a worker opened last, kept so that each segment is mapped once.
#[derive(Default)]
pub struct Segments(Mutex<Vec<Arc<Segment>>>);

impl Segments {
    /// Returns a segment, and opens it if it is not open yet. Returns `None` if that fails.
    pub fn open(&self, shared: &Shared, nbytes: u64) -> Option<Arc<Segment>> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |s: &&Arc<Segment>| s.token == shared.token && s.nbytes as u64 == nbytes;
        if let Some(segment) = known.iter().find(same) {
            return Some(segment.clone());
        }
        let segment = Arc::new(Segment::open(shared, nbytes)?);
        if known.len() >= SEGMENTS_MAX {
            known.remove(0);
        }
        known.push(segment.clone());
        Some(segment)
    }
}
