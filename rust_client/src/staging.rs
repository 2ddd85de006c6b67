//! Reusable buffers, in which the versions of one model arrive and wait.
//!
//! At most two buffers are in use for staging: one for a complete version that waits to be applied,
//! the other for the arriving version. So a steady stream of versions allocates no new memory. A
//! buffer returns to its pool when it is dropped, in any thread.

use crate::layout::Layout;
use crate::limits::{BUFFERS_KEPT, BUFFERS_MAX};
use crate::messages::Metadata;
use crate::raw::map::Memory;
use crate::segment::Segment;
use crate::transfer::Key;
use std::convert::TryFrom;
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Location of the bytes of a version.
pub enum Source {
    Buffer(Buffer),
    /// In shared memory. Unless `hash_chunks` is 0, the version is hashed in chunks of this size.
    Segment {
        segment: Arc<Segment>,
        hash_chunks: u64,
    },
}

/// A version that may be applied.
pub struct StagedVersion {
    pub model: String,
    pub key: Key,
    pub layout: Arc<Layout>,
    pub source: Source,
    /// Digest of the version; empty if the bytes are in shared memory, since they were not hashed
    /// yet.
    pub digest: String,
    /// How the version arrived, see `Update`.
    pub encoding: &'static str,
    /// Metadata from the publisher.
    pub metadata: Metadata,
    /// True if patches may build on this version: then its bytes are kept after the apply.
    pub keep: bool,
}

impl fmt::Debug for StagedVersion {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Staged({} {:?}, {})", self.model, self.key, self.digest)
    }
}

#[derive(Default)]
struct Pool {
    free: Vec<Memory>,
    nbytes: u64,    // size of each free memory, which is that of the last version
    staging: usize, // number of buffers in use for staging
}

/// The buffers of one model.
#[derive(Default)]
pub struct Buffers(Arc<Mutex<Pool>>);

/// Memory of the size of a version's data section.
#[derive(Default)]
pub struct Buffer {
    memory: Option<Memory>, // None in a default buffer
    pool: Weak<Mutex<Pool>>,
    staging: bool, // in use for staging
}

fn lock(pool: &Mutex<Pool>) -> MutexGuard<'_, Pool> {
    pool.lock().unwrap_or_else(PoisonError::into_inner) // a list of memory is never half changed
}

impl Pool {
    /// Keeps only memory of this size from now on.
    fn keep(&mut self, nbytes: u64) {
        if self.nbytes != nbytes {
            self.free.clear(); // the model has changed its size: old memory will never fit again
            self.nbytes = nbytes;
        }
    }

    /// Returns memory of this size, reused if possible.
    fn take(&mut self, nbytes: u64) -> io::Result<Memory> {
        self.keep(nbytes);
        self.free.pop().map_or_else(|| memory_of(nbytes, false), Ok)
    }
}

impl Buffers {
    /// Allocates a buffer of this size now, so that the first version need not wait for the
    /// allocation. If the allocation fails, a later `take` returns the error.
    pub fn reserve(&self, nbytes: u64) {
        let mut pool = lock(&self.0);
        if nbytes > 0 && pool.staging == 0 && pool.free.is_empty() {
            pool.keep(nbytes);
            pool.free.extend(memory_of(nbytes, true).ok());
        }
    }

    /// Returns a buffer of this size, reused if possible; `None` if `BUFFERS_MAX` buffers are in
    /// use for staging.
    pub fn take(&self, nbytes: u64) -> io::Result<Option<Buffer>> {
        let mut pool = lock(&self.0);
        if pool.staging >= BUFFERS_MAX {
            return Ok(None);
        }
        let memory = pool.take(nbytes)?;
        pool.staging += 1;
        Ok(Some(Buffer { memory: Some(memory), pool: Arc::downgrade(&self.0), staging: true }))
    }

    /// Returns a buffer for a copy, which does not count as in use for staging.
    pub fn take_for_copy(&self, nbytes: u64) -> io::Result<Buffer> {
        let mut pool = lock(&self.0);
        let memory = pool.take(nbytes)?;
        Ok(Buffer { memory: Some(memory), pool: Arc::downgrade(&self.0), staging: false })
    }
}

fn memory_of(nbytes: u64, touched: bool) -> io::Result<Memory> {
    let none = |_| io::Error::new(io::ErrorKind::OutOfMemory, "more than can be addressed");
    Memory::new(usize::try_from(nbytes).map_err(none)?, touched)
}

impl Buffer {
    /// Returns a buffer for a patch, which belongs to no model's pool.
    pub fn unpooled(nbytes: u64) -> io::Result<Buffer> {
        Ok(Buffer { memory: Some(memory_of(nbytes, false)?), pool: Weak::new(), staging: false })
    }

    /// Returns the memory, whose pages can be exchanged with a model's; `None` for a default buffer.
    pub fn pages(&mut self) -> Option<&mut Memory> {
        self.memory.as_mut()
    }

    /// Stops counting the buffer as in use for staging, since a snapshot or a patch base keeps it.
    pub fn keep(&mut self) {
        if std::mem::take(&mut self.staging) {
            if let Some(pool) = self.pool.upgrade() {
                lock(&pool).staging -= 1;
            }
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.memory.as_deref().unwrap_or_default()
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.memory.as_deref_mut().unwrap_or_default()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.upgrade() {
            let mut pool = lock(&pool);
            pool.staging -= usize::from(self.staging);
            let fits = self.len() as u64 == pool.nbytes;
            if fits && pool.free.len() < BUFFERS_KEPT {
                pool.free.extend(self.memory.take());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(buffers: &Buffers) -> Vec<usize> {
        lock(&buffers.0).free.iter().map(|memory| memory.len()).collect()
    }

    #[test]
    fn what_is_of_an_old_size_is_not_kept_when_it_comes_back() {
        let buffers = Buffers::default();
        let mut base = buffers.take(5000).unwrap().unwrap();
        base.keep();
        let next = buffers.take(6000).unwrap().unwrap();
        let copy = buffers.take_for_copy(6000).unwrap();
        drop(base); // another version runs
        assert!(kept(&buffers).is_empty(), "no version will be of its size");
        drop((next, copy));
        assert_eq!(kept(&buffers), [6000, 6000]);
        let last = buffers.take(7000).unwrap();
        assert!(last.is_some() && kept(&buffers).is_empty());
    }
}
