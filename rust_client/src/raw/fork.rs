//! Closes this crate's descriptors in forked children, without effect on the parent.
//!
//! A connection ends, and an address or a lock becomes free, when the last process has closed its
//! descriptor. So a child that outlives its parent, such as a DataLoader's worker, would block the
//! address and the lock for the restarted trainer. Close-on-exec does not help, since the child
//! calls no exec.
//!
//! In a child, each of these descriptors is replaced by one of `/dev/null` with the same number. So
//! the child may drop its copies of this crate's objects without closing its own newer descriptors.
//!
//! A child has only the thread that called fork. The fork handler in the child may only do what is
//! safe in a signal handler, so it allocates no memory.

use std::cell::UnsafeCell;
use std::io;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::os::unix::io::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::Once;

const WORDS: usize = 1 << 14; // for Linux's default limit of descriptors

/// A set of descriptors, one bit each.
struct Set([AtomicU64; WORDS], AtomicUsize); // the bits, and the number of words in use

impl Set {
    const fn new() -> Set {
        #[allow(clippy::declare_interior_mutable_const)] // one for each word
        const NONE: AtomicU64 = AtomicU64::new(0);
        Set([NONE; WORDS], AtomicUsize::new(0))
    }

    /// Returns the index of a descriptor's word, the word, and the descriptor's bit in it.
    fn locate(&self, descriptor: RawFd) -> Option<(usize, &AtomicU64, u64)> {
        let at = usize::try_from(descriptor).ok()?;
        Some((at / 64, self.0.get(at / 64)?, 1 << (at % 64)))
    }

    fn add(&self, descriptor: RawFd) {
        if let Some((at, word, bit)) = self.locate(descriptor) {
            self.1.fetch_max(at + 1, Ordering::Relaxed);
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    fn remove(&self, descriptor: RawFd) {
        if let Some((_, word, bit)) = self.locate(descriptor) {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
    }

    /// Removes all descriptors, and calls `each` with every removed descriptor.
    fn drain(&self, mut each: impl FnMut(RawFd)) {
        for (at, word) in self.0.iter().enumerate().take(self.1.load(Ordering::Relaxed)) {
            let mut bits = word.swap(0, Ordering::Relaxed);
            while bits != 0 {
                each((at * 64) as RawFd + bits.trailing_zeros() as RawFd);
                bits &= bits - 1;
            }
        }
    }
}

static OURS: Set = Set::new();
static FORKS: AtomicU32 = AtomicU32::new(0); // number of forks from the first process to this one

/// A lock that is held while a process is forked, and from the opening of a descriptor until
/// `OURS` contains the descriptor.
struct Opening(UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: the C library synchronises the mutex.
unsafe impl Sync for Opening {}

static OPENING: Opening = Opening(UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER));

impl Opening {
    fn lock(&self) {
        // SAFETY: the mutex is static and never moves. Locking fails only if this thread holds it,
        // but calls of `open` are never nested.
        unsafe { libc::pthread_mutex_lock(self.0.get()) };
    }

    fn unlock(&self) {
        // SAFETY: the caller holds the mutex. In a child, the caller is the thread that forked.
        unsafe { libc::pthread_mutex_unlock(self.0.get()) };
    }

    fn with_lock<T>(&self, run: impl FnOnce() -> T) -> T {
        struct Held<'a>(&'a Opening);
        impl Drop for Held<'_> {
            fn drop(&mut self) {
                self.0.unlock();
            }
        }
        register_handlers();
        self.lock();
        let _held = Held(self);
        run()
    }
}

fn register_handlers() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        // SAFETY: the three functions are never unloaded. If the call fails for lack of memory,
        // children keep the descriptors.
        unsafe { libc::pthread_atfork(Some(before), Some(after), Some(in_child)) };
    });
}

unsafe extern "C" fn before() {
    OPENING.lock();
}

unsafe extern "C" fn after() {
    OPENING.unlock();
}

unsafe extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the path ends with a zero.
    let nothing = unsafe { libc::open(b"/dev/null\0".as_ptr().cast(), libc::O_RDWR | libc::O_CLOEXEC) };
    OURS.drain(|descriptor| {
        // SAFETY: this crate owns the descriptor. If /dev/null cannot be opened, the descriptor is
        // closed, which is the lesser evil.
        unsafe {
            if nothing < 0 || libc::dup2(nothing, descriptor) < 0 {
                libc::close(descriptor);
            } else {
                libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC);
            }
        }
    });
    if nothing >= 0 {
        // SAFETY: this function has opened it.
        unsafe { libc::close(nothing) };
    }
    OPENING.unlock();
}

/// Distinguishes a process from its parents and its forked children.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process(u32);

impl Process {
    pub fn this() -> Process {
        register_handlers();
        Process(FORKS.load(Ordering::Relaxed))
    }

    /// True if this is the current process. A forked child has none of the process's threads, and
    /// locks may be held there forever.
    pub fn is_this(self) -> bool {
        self == Process(FORKS.load(Ordering::Relaxed))
    }
}

/// An object whose descriptor is closed in forked children.
#[derive(Debug)]
pub struct Own<T: AsRawFd>(ManuallyDrop<T>);

impl<T: AsRawFd> Own<T> {
    /// Opens an object. While `open` runs, no other thread can fork, open or close, so it must not
    /// block.
    pub fn open(open: impl FnOnce() -> io::Result<T>) -> io::Result<Own<T>> {
        OPENING.with_lock(|| open().map(Own::of))
    }

    /// Opens two objects at once, like `open`.
    pub fn pair(open: impl FnOnce() -> io::Result<(T, T)>) -> io::Result<(Own<T>, Own<T>)> {
        OPENING.with_lock(|| open().map(|(one, other)| (Own::of(one), Own::of(other))))
    }

    /// Registers an object that took time to open, on a disk or a network. A child that is forked
    /// before this call keeps the descriptor.
    pub fn new(object: T) -> Own<T> {
        OPENING.with_lock(|| Own::of(object))
    }

    fn of(object: T) -> Own<T> {
        OURS.add(object.as_raw_fd());
        Own(ManuallyDrop::new(object))
    }
}

impl<T: AsRawFd> Drop for Own<T> {
    fn drop(&mut self) {
        // The lock prevents a fork between the two steps: otherwise a child could find a closed
        // descriptor in the set.
        OPENING.with_lock(|| {
            OURS.remove(self.0.as_raw_fd());
            // SAFETY: the object is not used any more.
            unsafe { ManuallyDrop::drop(&mut self.0) };
        });
    }
}

impl<T: AsRawFd> Deref for Own<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: AsRawFd> DerefMut for Own<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}
