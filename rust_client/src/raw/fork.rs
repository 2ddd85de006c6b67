//! What a forked child inherits of this crate's descriptors: it lets go of them, and its parent goes on.
//!
//! A connection ends, and an address or a lock becomes free, when the last process has closed it. So a child that lives
//! on (a DataLoader's worker, say) would keep them from a trainer that is killed and started again. That none of them
//! crosses an `exec` does not help there.
//!
//! In a child each of them becomes one of `/dev/null`, under its number: what the child has of this crate's objects may
//! be dropped there, or not, and closes nothing that the child has opened since.
//!
//! A child has only the thread that forked, and must do with what is safe in a signal handler: it takes no memory.

use std::cell::UnsafeCell;
use std::io;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::os::unix::io::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::Once;

const WORDS: usize = 1 << 14; // for as many descriptors as Linux gives to a process unless it is told otherwise

/// Descriptors, each as a bit.
struct Set([AtomicU64; WORDS], AtomicUsize); // and how many words there are to look at

impl Set {
    const fn new() -> Set {
        #[allow(clippy::declare_interior_mutable_const)] // one for each word
        const NONE: AtomicU64 = AtomicU64::new(0);
        Set([NONE; WORDS], AtomicUsize::new(0))
    }

    fn place(&self, descriptor: RawFd) -> Option<(usize, &AtomicU64, u64)> {
        let at = usize::try_from(descriptor).ok()?;
        Some((at / 64, self.0.get(at / 64)?, 1 << (at % 64)))
    }

    fn add(&self, descriptor: RawFd) {
        if let Some((at, word, bit)) = self.place(descriptor) {
            self.1.fetch_max(at + 1, Ordering::Relaxed);
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    fn remove(&self, descriptor: RawFd) {
        if let Some((_, word, bit)) = self.place(descriptor) {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
    }

    /// Takes all out, one after another.
    fn drain(&self, mut each: impl FnMut(RawFd)) {
        for (at, word) in self.0.iter().enumerate().take(self.1.load(Ordering::Relaxed)) {
            let mut left = word.swap(0, Ordering::Relaxed);
            while left != 0 {
                each((at * 64) as RawFd + left.trailing_zeros() as RawFd);
                left &= left - 1;
            }
        }
    }
}

static OURS: Set = Set::new();
static FORKS: AtomicU32 = AtomicU32::new(0); // between the first process and this one

/// Held by whoever opens something, until that is in a set; and while a process is forked.
struct Opening(UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: the C library looks after who has it.
unsafe impl Sync for Opening {}

static OPENING: Opening = Opening(UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER));

impl Opening {
    fn lock(&self) {
        // SAFETY: it is static and never moves. It could fail only if this thread had it, and nobody opens in `open`.
        unsafe { libc::pthread_mutex_lock(self.0.get()) };
    }

    fn unlock(&self) {
        // SAFETY: whoever calls it has it; in a child that is the thread that forked.
        unsafe { libc::pthread_mutex_unlock(self.0.get()) };
    }

    fn hold<T>(&self, run: impl FnOnce() -> T) -> T {
        struct Held<'a>(&'a Opening);
        impl Drop for Held<'_> {
            fn drop(&mut self) {
                self.0.unlock();
            }
        }
        tell_the_system();
        self.lock();
        let _held = Held(self);
        run()
    }
}

fn tell_the_system() {
    static TOLD: Once = Once::new();
    TOLD.call_once(|| {
        // SAFETY: the functions are there for as long as this code. Without memory for it, children keep what they had.
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
        // SAFETY: it is one of ours. Where there is no /dev/null, to close it is the better of two evils.
        unsafe {
            if nothing < 0 || libc::dup2(nothing, descriptor) < 0 {
                libc::close(descriptor);
            } else {
                libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC);
            }
        }
    });
    if nothing >= 0 {
        // SAFETY: it is this function's.
        unsafe { libc::close(nothing) };
    }
    OPENING.unlock();
}

/// This process, as opposed to those that are forked from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process(u32);

impl Process {
    pub fn this() -> Process {
        tell_the_system();
        Process(FORKS.load(Ordering::Relaxed))
    }

    /// Whether that is this one. In a child there is none of the threads, and locks may be held by nobody.
    pub fn is_this(self) -> bool {
        self == Process(FORKS.load(Ordering::Relaxed))
    }
}

/// Something with a descriptor that children let go of.
#[derive(Debug)]
pub struct Own<T: AsRawFd>(ManuallyDrop<T>);

impl<T: AsRawFd> Own<T> {
    /// Opens something, which takes no time: nobody can fork meanwhile, and nobody else can open or close.
    pub fn open(open: impl FnOnce() -> io::Result<T>) -> io::Result<Own<T>> {
        OPENING.hold(|| open().map(Own::of))
    }

    /// Opens two at once.
    pub fn pair(open: impl FnOnce() -> io::Result<(T, T)>) -> io::Result<(Own<T>, Own<T>)> {
        OPENING.hold(|| open().map(|(one, other)| (Own::of(one), Own::of(other))))
    }

    /// What may have taken its time, as a disk or a network does, and is there by now. A child that is forked at the
    /// very moment keeps it.
    pub fn new(its: T) -> Own<T> {
        OPENING.hold(|| Own::of(its))
    }

    fn of(its: T) -> Own<T> {
        OURS.add(its.as_raw_fd());
        Own(ManuallyDrop::new(its))
    }
}

impl<T: AsRawFd> Drop for Own<T> {
    fn drop(&mut self) {
        // Nobody can fork in between, so it is either ours or closed, and its number another's.
        OPENING.hold(|| {
            OURS.remove(self.0.as_raw_fd());
            // SAFETY: it is not used any more.
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
