//! Mapped memory: private memory whose pages can be exchanged, and another process's mapped file.

use std::fs::File;
use std::io::{self, Write};
use std::mem::forget;
use std::ops::{Deref, DerefMut};
use std::os::unix::io::AsRawFd;
use std::process::abort;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};

/// A region from `mmap`. An empty region maps nothing.
struct Region {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a region is plain memory; borrows of its owner control the access.
unsafe impl Send for Region {}
// SAFETY: as for `Send`.
unsafe impl Sync for Region {}

impl Region {
    fn map(len: usize, protection: i32, flags: i32, file: Option<&File>) -> io::Result<Region> {
        if len == 0 {
            return Ok(Region { start: NonNull::dangling(), len });
        }
        let descriptor = file.map_or(-1, AsRawFd::as_raw_fd);
        // SAFETY: the call gives no address, so no mapping is replaced.
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
            // SAFETY: `self` owns the region, and no borrow of it is left.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
        }
    }
}

/// The bytes that one page table covers. The kernel moves an aligned range of this size in one
/// step.
pub const TABLE_BYTES: usize = 1 << 21;

/// Private memory in whole pages. Memory of at least `TABLE_BYTES` is aligned to that.
pub struct Memory {
    _region: Region,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: as for a region.
unsafe impl Send for Memory {}
// SAFETY: as for `Send`.
unsafe impl Sync for Memory {}

impl Memory {
    /// Returns zeroed memory; with `touched`, the kernel allocates all pages now.
    pub fn new(len: usize, touched: bool) -> io::Result<Memory> {
        let mut flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        if touched && cfg!(target_os = "linux") {
            flags |= POPULATE;
        }
        Memory::mapped(len, libc::PROT_READ | libc::PROT_WRITE, flags)
    }

    fn mapped(len: usize, protection: i32, flags: i32) -> io::Result<Memory> {
        let mapped = if len < TABLE_BYTES { len } else { len.saturating_add(TABLE_BYTES) };
        let region = Region::map(mapped, protection, flags, None)?;
        let offset = if mapped > len { region.start.as_ptr().align_offset(TABLE_BYTES) } else { 0 };
        // SAFETY: either `offset` is 0, or the region has `TABLE_BYTES` more, which exceed `offset`.
        let start = unsafe { NonNull::new_unchecked(region.start.as_ptr().add(offset)) };
        Ok(Memory { _region: region, start, len })
    }

    /// Reserves addresses for `len` bytes, to which pages can be moved temporarily.
    fn reserve(len: usize) -> io::Result<Memory> {
        Memory::mapped(len, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)
    }

    /// Returns the address of the memory, which never changes.
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Exchanges the content of two memories of equal length without a copy: moves their pages by
    /// way of a third memory. Returns false, with nothing changed, if that is not possible.
    pub fn exchange(&mut self, other: &mut Memory) -> bool {
        if self.len == 0 || other.len != self.len || STOPPED.load(Ordering::Relaxed) {
            return false;
        }
        let mut spare = match Memory::reserve(self.len) {
            Ok(spare) => spare,
            Err(_) => return false,
        };
        match move_pages(self, &mut spare) {
            Moved::All => {}
            Moved::Nothing => return false,
            Moved::Lost => {
                forget(spare); // another thread has mapped its own memory there
                return false;
            }
        }
        let moved = move_home(other, self);
        let back = if moved { other } else { self };
        if !move_home(&mut spare, back) {
            back.copy_from_slice(&spare); // the pages are still in `spare`
        }
        moved
    }
}

/// Result of moving pages.
#[derive(Clone, Copy, PartialEq)]
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
enum Moved {
    All,
    Nothing,
    /// No page was moved, and another thread has mapped its own memory at the destination.
    Lost,
}

static STOPPED: AtomicBool = AtomicBool::new(false); // set after a failure that may lose memory

/// Moves the pages of `from` to `to`, and leaves zeros at `from`. Most failures occur after the
/// kernel has unmapped `to`; then `to` is mapped again, with zeros.
#[cfg(target_os = "linux")]
fn move_pages(from: &mut Memory, to: &mut Memory) -> Moved {
    const DONTUNMAP: i32 = 4; // since Linux 5.7
    let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | DONTUNMAP;
    let (begin, end) = (from.start.as_ptr().cast(), to.start.as_ptr().cast());
    // SAFETY: both memories are borrowed mutably, and consist of whole pages. The content of `to`
    // is not needed.
    if unsafe { mremap(begin, from.len, from.len, how, end) } != libc::MAP_FAILED {
        return Moved::All;
    }
    if let Some(libc::EINVAL | libc::EPERM | libc::ENOSYS) = io::Error::last_os_error().raw_os_error() {
        return Moved::Nothing; // the kernel returns these before it changes anything
    }
    STOPPED.store(true, Ordering::Relaxed);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: no mapping is replaced.
    let again = unsafe { libc::mmap(end, to.len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if again == end {
        Moved::Nothing
    } else {
        Moved::Lost
    }
}

#[cfg(all(target_os = "linux", not(test)))]
use libc::mremap;
#[cfg(all(target_os = "linux", test))]
use tests::mremap;

#[cfg(not(target_os = "linux"))]
fn move_pages(_from: &mut Memory, _to: &mut Memory) -> Moved {
    Moved::Nothing
}

/// Moves pages to `to`, at whose addresses the tensors or the version must stay. Returns true on
/// success. If another thread has mapped memory at these addresses, aborts the process, since this
/// crate would overwrite that memory.
fn move_home(from: &mut Memory, to: &mut Memory) -> bool {
    let moved = move_pages(from, to);
    if moved == Moved::Lost {
        let _ =
            writeln!(io::stderr(), "weightbus: the kernel lost a model's memory while pages were exchanged");
        abort();
    }
    moved == Moved::All
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
        // SAFETY: as in `deref`, and the borrow of `self` is unique.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// A file of another process, mapped for reading. That process may write to the file at any time,
/// so there are no references into the mapping: bytes are copied out.
pub struct Foreign(Region);

impl Foreign {
    /// Maps the first `len` bytes of a file. The file must never become shorter than that.
    pub fn new(file: &File, len: usize) -> io::Result<Foreign> {
        Region::map(len, libc::PROT_READ, libc::MAP_SHARED, Some(file)).map(Foreign)
    }

    /// Fills `to` with the bytes from `offset` on.
    ///
    /// # Panics
    ///
    /// If the bytes extend beyond the end of the mapping.
    pub fn copy_to(&self, offset: usize, to: &mut [u8]) {
        let end = offset.checked_add(to.len());
        assert!(end.map_or(false, |end| end <= self.0.len), "a copy from beyond the end");
        // SAFETY: source and destination are mapped, long enough, and cannot overlap, since the
        // source is mapped read-only. The file is sealed against shrinking, so pages cannot vanish.
        // A writer that breaks the protocol only makes the bytes wrong.
        unsafe {
            ptr::copy_nonoverlapping(self.0.start.as_ptr().add(offset), to.as_mut_ptr(), to.len());
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use libc::{c_int, c_void};
    use std::cell::Cell;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    const LEN: usize = (1 << 22) + 1;

    thread_local! {
        // The next move to fail, and whether its destination is taken then.
        static REFUSED: Cell<(u32, bool)> = Cell::default();
        static OTHERS: Cell<*const u8> = const { Cell::new(ptr::null()) };
    }

    /// Fails as the kernel does if memory is short: the destination is unmapped already, and
    /// another thread may have mapped something there.
    pub unsafe fn mremap(
        old: *mut c_void,
        from: usize,
        len: usize,
        how: c_int,
        to: *mut c_void,
    ) -> *mut c_void {
        let (left, taken) = REFUSED.with(Cell::get);
        REFUSED.with(|refused| refused.set((left.saturating_sub(1), taken)));
        if left != 1 {
            // SAFETY: required of the caller.
            return unsafe { libc::mremap(old, from, len, how, to) };
        }
        let (both, fixed) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
        // SAFETY: as the kernel does, and then as another thread may.
        unsafe {
            libc::munmap(to, len);
            if taken {
                let others: *mut u8 = libc::mmap(to, len, both, fixed, -1, 0).cast();
                others.write_bytes(9, len);
                OTHERS.with(|kept| kept.set(others));
            }
            *libc::__errno_location() = libc::ENOMEM;
        }
        libc::MAP_FAILED
    }

    fn two() -> (Memory, Memory) {
        let (mut one, mut other) = (Memory::new(LEN, false).unwrap(), Memory::new(LEN, false).unwrap());
        one.fill(1);
        other.fill(2);
        (one, other)
    }

    fn all(bytes: &[u8], byte: u8) -> bool {
        bytes.iter().all(|&found| found == byte)
    }

    #[test]
    fn a_move_that_fails_half_way_leaves_no_hole_and_touches_nobody_elses_memory() {
        for (case, kept) in [("1 free", true), ("1 taken", true), ("2 free", true), ("3 free", true)]
            .into_iter()
            .chain([("2 taken", false), ("3 taken", false)])
        {
            let mut child = Command::new(std::env::current_exe().unwrap());
            child
                .args(["--ignored", "--nocapture", "--exact", "raw::map::tests::refused"])
                .env("REFUSED", case);
            let done = child.output().unwrap();
            let (told, words) =
                (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
            assert!(told.contains("running 1 test"), "{}", told);
            let aborted =
                done.status.signal() == Some(libc::SIGABRT) && words.contains("lost a model's memory");
            assert_eq!((done.status.success(), aborted), (kept, !kept), "{}: {} {}", case, told, words);
        }
    }

    #[test]
    #[ignore = "of the test before, in a process of its own"]
    fn refused() {
        let case = std::env::var("REFUSED").unwrap();
        let (at, taken) = (case[..1].parse().unwrap(), case.ends_with("taken"));
        let (mut one, mut other) = two();
        REFUSED.with(|refused| refused.set((at, taken)));
        let exchanged = one.exchange(&mut other);
        assert_eq!(exchanged, at == 3);
        assert!(!one.exchange(&mut other), "it tries again");
        assert!(all(&one, 1 + exchanged as u8) && all(&other, 2 - exchanged as u8));
        let others = OTHERS.with(Cell::get);
        // SAFETY: it was mapped above with this length, and is never unmapped.
        assert!(others.is_null() || all(unsafe { slice::from_raw_parts(others, LEN) }, 9));
    }

    #[test]
    fn where_room_is_short_nothing_changes_and_later_pages_are_exchanged_again() {
        let mut child = Command::new(std::env::current_exe().unwrap());
        let done = child.args(["--ignored", "--exact", "raw::map::tests::short"]).output().unwrap();
        let told = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success() && told.contains("running 1 test"), "{}", told);
    }

    #[test]
    #[ignore = "of the test before, in a process of its own"]
    fn short() {
        let (mut one, mut other) = two();
        let limit = |bytes| {
            let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
            // SAFETY: the kernel reads `limit`.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
        };
        limit(1 << 20);
        let exchanged = one.exchange(&mut other);
        limit(libc::RLIM_INFINITY);
        assert!(!exchanged && all(&one, 1) && all(&other, 2));
        assert!(one.exchange(&mut other) && all(&one, 2) && all(&other, 1));
    }
}
