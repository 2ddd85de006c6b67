//! Memory straight from the kernel: our own, which can change places, and a segment of another process.

use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::unix::io::AsRawFd;
use std::ptr::{self, NonNull};
use std::slice;

/// A region that `mmap` gave; nothing is mapped for no bytes.
struct Region {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a region is memory and nothing else; who may touch it when is up to its owner's borrows.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    fn map(len: usize, protection: i32, flags: i32, file: Option<&File>) -> io::Result<Region> {
        if len == 0 {
            return Ok(Region { start: NonNull::dangling(), len });
        }
        let descriptor = file.map_or(-1, AsRawFd::as_raw_fd);
        // SAFETY: no address is asked for, so nothing that exists is replaced.
        let start = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, descriptor, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        match NonNull::new(start.cast()) {
            Some(start) => Ok(Region { start, len }),
            None => Err(io::Error::new(io::ErrorKind::Other, "mapped at address 0")),
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the region is ours, and nobody can have borrowed it any more.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
        }
    }
}

/// Bytes of which one table of the processor names the pages: moved at once if they begin at a multiple.
pub const TABLE_BYTES: usize = 1 << 21;

/// Private memory in pages of its own, which begin at a multiple of `TABLE_BYTES` if there are as many.
pub struct Memory {
    _region: Region,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: as for a region.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Returns so many zeros; with `touched`, the kernel gives all pages now.
    pub fn new(len: usize, touched: bool) -> io::Result<Memory> {
        let mut flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        if touched && cfg!(target_os = "linux") {
            flags |= POPULATE;
        }
        let room = if len < TABLE_BYTES { len } else { len.saturating_add(TABLE_BYTES) };
        let region = Region::map(room, libc::PROT_READ | libc::PROT_WRITE, flags, None)?;
        let before = if room > len { region.start.as_ptr().align_offset(TABLE_BYTES) } else { 0 };
        // SAFETY: there is room for `TABLE_BYTES` more, and it is less than that.
        let start = unsafe { NonNull::new_unchecked(region.start.as_ptr().add(before)) };
        Ok(Memory { _region: region, start, len })
    }

    /// Exchanges what two of one length hold, without a copy and by way of a third: these pages change
    /// places. Where that cannot be nothing has changed.
    pub fn exchange(&mut self, other: &mut Memory, spare: &mut Memory) -> bool {
        let len = self.len;
        if len == 0 || other.len != len || spare.len != len || !move_pages(self, spare) {
            return false;
        }
        let moved = move_pages(other, self);
        let back = if moved { other } else { self };
        if !move_pages(spare, back) {
            back.copy_from_slice(spare); // they are where they were
        }
        moved
    }
}

/// Moves the pages of one to the other; zeros are left behind, and nothing is unmapped in between.
#[cfg(target_os = "linux")]
fn move_pages(from: &mut Memory, to: &mut Memory) -> bool {
    const DONTUNMAP: i32 = 4; // of Linux 5.7
    let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | DONTUNMAP;
    let (begin, end) = (from.start.as_ptr().cast(), to.start.as_ptr());
    // SAFETY: both are ours alone, in whole pages: what was at `to` is what we no longer want.
    let moved = unsafe { libc::mremap(begin, from.len, from.len, how, end) };
    moved != libc::MAP_FAILED
}

#[cfg(not(target_os = "linux"))]
fn move_pages(_from: &mut Memory, _to: &mut Memory) -> bool {
    false
}

#[cfg(target_os = "linux")]
const POPULATE: i32 = libc::MAP_POPULATE;
#[cfg(not(target_os = "linux"))]
const POPULATE: i32 = 0;

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the memory is mapped, readable, zeroed at first, and lives as long as `self`.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow of `self` is unique.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// A file of another process, mapped for reading. That process may write it at any time, so there
/// is no reference into it: bytes are copied out.
pub struct Foreign(Region);

impl Foreign {
    /// Maps the first `len` bytes of a file, which must be that long and never become shorter.
    pub fn new(file: &File, len: usize) -> io::Result<Foreign> {
        Region::map(len, libc::PROT_READ, libc::MAP_SHARED, Some(file)).map(Foreign)
    }

    /// Copies bytes from `offset` on.
    ///
    /// # Panics
    ///
    /// If they lie beyond the end.
    pub fn copy_to(&self, offset: usize, to: &mut [u8]) {
        let end = offset.checked_add(to.len());
        assert!(end.map_or(false, |end| end <= self.0.len), "a copy from beyond the end");
        // SAFETY: source and destination are both mapped and long enough, and cannot overlap, since
        // the source is mapped for reading alone. The file is sealed against shrinking, so pages
        // cannot vanish. A writer that breaks the protocol makes the bytes wrong, nothing else.
        unsafe {
            ptr::copy_nonoverlapping(self.0.start.as_ptr().add(offset), to.as_mut_ptr(), to.len());
        }
    }
}
