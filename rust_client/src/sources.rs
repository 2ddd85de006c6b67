//! Fetches chunks of versions from the sources that an announcement names (N1 to N3).
//!
//! For each source, a thread has a control socket and a session of level 1
//! (`docs/protocol/index.md`) until all chunks are fetched. This thread verifies and decrypts
//! chunks. The worker's thread copies them into the buffer, so that a buffer has one writer. A
//! window limits the number of chunks that are requested, but not yet in the buffer.

use crate::checksum::crc32c;
use crate::control::{Control, Frame};
use crate::error::Error;
use crate::keyring::Keyring;
use crate::limits::{Timing, DAMAGED_MAX, WINDOW_CHUNKS};
use crate::messages::{
    encode, from_publisher, Bye, Chunk, Fetch, FromPublisher, FromWorker, Hello, PatchId, Ping, Pong,
    SealedChunk,
};
use crate::run::{Outcome, Shared};
use crate::sealing::Subject;
use crate::transfer::{ChunkPlan, Key, Time};
use crate::waker::Waker;
use crate::words::escaped;
use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::os::unix::io::AsRawFd;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

const CHECK_INTERVAL: Duration = Duration::from_millis(100); // of checks that the version is still wanted

/// The job to fetch some chunks of a version from one source. No other source has these chunks.
#[derive(Clone)]
pub struct SourceFetch {
    pub address: String,
    pub indexes: Vec<u64>,
    pub subject: Subject,
    pub plan: ChunkPlan,
    /// Can be upgraded while the transfer waits for chunks of sources.
    pub wanted: Weak<()>,
}

impl fmt::Debug for SourceFetch {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "SourceFetch({} chunks at {})", self.indexes.len(), self.address)
    }
}

/// A verified chunk of a version, from a source.
pub struct SourceChunk {
    pub index: u64,
    pub crc: u32,
    pub bytes: Frame,
    /// `SourceFetch::wanted` of the job.
    pub wanted: Weak<()>,
    _pending: PendingCopy,
}

impl fmt::Debug for SourceChunk {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "SourceChunk({})", self.index)
    }
}

/// Counts a chunk that is not copied yet. Its drop lets the session request another chunk.
struct PendingCopy(Arc<AtomicUsize>, Arc<Waker>);

impl PendingCopy {
    fn new(count: &Arc<AtomicUsize>, waker: &Arc<Waker>) -> PendingCopy {
        count.fetch_add(1, Ordering::Relaxed);
        PendingCopy(count.clone(), waker.clone())
    }
}

impl Drop for PendingCopy {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
        self.1.wake();
    }
}

/// The threads that fetch from sources.
pub struct Sources {
    shared: Arc<Shared>,
    stop: Arc<AtomicBool>,
    running: Vec<(Arc<Waker>, JoinHandle<()>)>,
}

impl Sources {
    pub fn new(shared: Arc<Shared>) -> Sources {
        Sources { shared, stop: Arc::default(), running: Vec::new() }
    }

    /// Starts a thread that fetches chunks. Each chunk is reported as `Outcome::FromSource`, and
    /// the end of the job as `Outcome::SourceOver`. `control` is the worker's own connection, which
    /// has the keys for the publisher. `hello` is the first message to the source.
    pub fn fetch(&mut self, job: SourceFetch, control: &Control, hello: Hello, timing: Timing) {
        self.running.retain(|(_, thread)| !thread.is_finished());
        let (shared, stop, unstarted) = (self.shared.clone(), self.stop.clone(), job.clone());
        let started = Session::new(job, control, hello, timing).and_then(|session| {
            let waker = session.waker.clone();
            let run = move || run(session, &shared, &stop);
            let thread = thread::Builder::new().name("weightbus-source".to_owned());
            Ok((waker, thread.spawn(run).map_err(|error| format!("there is no thread for it ({})", error))?))
        });
        match started {
            Ok(running) => self.running.push(running),
            Err(fault) => report_end(&self.shared, unstarted, Err(fault)),
        }
    }
}

impl Drop for Sources {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.running.iter().for_each(|(waker, _)| waker.wake());
        for (_, thread) in self.running.drain(..) {
            let _ = thread.join(); // the thread stops soon
        }
    }
}

fn run(mut session: Session, shared: &Shared, stop: &AtomicBool) {
    let done = catch_unwind(AssertUnwindSafe(|| session.run(shared, stop)));
    report_end(
        shared,
        session.job.clone(),
        done.unwrap_or_else(|_| Err("its thread failed, which is a bug".to_owned())),
    );
}

/// Reports the end of a job. Chunks that have not arrived are fetched from the publisher.
fn report_end(shared: &Shared, job: SourceFetch, done: Result<(), String>) {
    let (model, key) = (job.subject.model.clone(), (job.subject.epoch, job.subject.version));
    shared.report(&model, key, Outcome::SourceOver(Box::new(job), done));
}

/// The session with one source.
struct Session {
    job: SourceFetch,
    control: Control,
    waker: Arc<Waker>,
    timing: Timing,
    hello: Vec<u8>,
    keyring: Option<Keyring>, // None: chunks come in the clear
    started: Instant,
    in_session: bool,
    missing: Vec<u64>, // chunks to be requested, the next one last
    requested: BTreeSet<u64>,
    uncopied: Arc<AtomicUsize>, // number of chunks that the worker's thread has not copied yet
    damaged: u32,
    heard_at: Time,
    requested_at: Time,
    overdue_since: Option<Time>, // first pong for a ping that was sent after all requests
}

impl Session {
    fn new(job: SourceFetch, control: &Control, hello: Hello, timing: Timing) -> Result<Session, String> {
        let waker =
            Arc::new(Waker::new().map_err(|error| format!("there are no sockets for it ({})", error))?);
        let control = control.to_source(&job.address, waker.clone()).map_err(|error| match error {
            Error::Address { text, .. } => text,
            other => other.to_string(),
        })?;
        let keyring = control.is_keyed().then(Keyring::default);
        let missing = job.indexes.iter().rev().copied().collect();
        Ok(Session {
            job,
            control,
            waker,
            timing,
            hello: encode(&FromWorker::Hello(hello)),
            keyring,
            started: Instant::now(),
            in_session: false,
            missing,
            requested: BTreeSet::new(),
            uncopied: Arc::default(),
            damaged: 0,
            heard_at: Time::ZERO,
            requested_at: Time::ZERO,
            overdue_since: None,
        })
    }

    /// Fetches the chunks. Returns an error with the reason if the source has not sent all of them.
    /// Stops early, with `Ok`, once the worker stops or the transfer no longer waits.
    fn run(&mut self, shared: &Shared, stop: &AtomicBool) -> Result<(), String> {
        let done = self.fetch_all(shared, stop);
        self.send(FromWorker::Bye(Bye::default()));
        done
    }

    fn fetch_all(&mut self, shared: &Shared, stop: &AtomicBool) -> Result<(), String> {
        let (mut hello_at, mut pinged_at) = (None, Time::ZERO);
        while !self.missing.is_empty() || !self.requested.is_empty() {
            if stop.load(Ordering::Relaxed) || self.job.wanted.strong_count() == 0 {
                return Ok(());
            }
            self.check_deadlines(self.started.elapsed())?;
            self.wait().map_err(|error| format!("its sockets failed ({})", error))?;
            while let Some(frames) = self.control.receive(self.started.elapsed()) {
                self.handle(frames, shared)?;
            }
            let now = self.started.elapsed();
            let changes = self.control.take_changes(now, self.timing.lost_after);
            if let Some(why) = changes.refused {
                return Err(why.to_owned());
            }
            if changes.ended {
                return Err("its connection is closed, or cannot be opened".to_owned());
            }
            let due = |at: Option<Time>, every| at.map_or(true, |at| now.saturating_sub(at) >= every);
            if self.in_session {
                self.request(now);
                if due(Some(pinged_at), self.timing.ping) {
                    pinged_at = now;
                    let token = now.as_millis() as u64;
                    self.send(FromWorker::Ping(Ping { token, ..Ping::default() }));
                }
            } else if self.control.is_open() && due(hello_at, self.timing.hello_retry) {
                hello_at = Some(now);
                self.control.send(&self.hello);
            }
        }
        Ok(())
    }

    /// Returns an error if the source is silent, or answers pings but not the requests before them.
    /// A source answers in the order of the messages.
    fn check_deadlines(&self, now: Time) -> Result<(), String> {
        let patience = self.timing.lost_after;
        let late = |since: Time| now.saturating_sub(since) >= patience;
        if late(self.heard_at) {
            return Err(format!("it has sent nothing for {} s", patience.as_secs_f64()));
        }
        if self.overdue_since.map_or(false, late) {
            return Err("it does not send what was requested".to_owned());
        }
        Ok(())
    }

    /// Waits for input, for a wake-up, or for `CHECK_INTERVAL`.
    fn wait(&mut self) -> io::Result<()> {
        let control = self.control.process_events(self.started.elapsed());
        let mut items = vec![zmq::PollItem::from_fd(self.waker.as_raw_fd(), zmq::POLLIN)];
        items.extend(control.map(|(descriptor, unsent)| {
            let events = if unsent { zmq::POLLIN | zmq::POLLOUT } else { zmq::POLLIN };
            zmq::PollItem::from_fd(descriptor, events)
        }));
        let at_once = self.control.has_arrived() || self.control.has_changed();
        let milliseconds = if at_once { 0 } else { CHECK_INTERVAL.as_millis() as i64 };
        match zmq::poll(&mut items, milliseconds) {
            Ok(_) | Err(zmq::Error::EINTR) => {}
            Err(error) => return Err(io::Error::from_raw_os_error(error.to_raw())),
        }
        self.waker.drain();
        Ok(())
    }

    fn send(&mut self, message: FromWorker) {
        self.control.send(&encode(&message));
    }

    /// Handles a message. An error ends the session.
    fn handle(&mut self, mut frames: Vec<Frame>, shared: &Shared) -> Result<(), String> {
        let now = self.started.elapsed();
        self.heard_at = now;
        let header = frames.first().map_or(&[][..], |frame| &frame[..]);
        let count = frames.len().saturating_sub(1);
        let message = from_publisher(header, count).map_err(|error| error.to_string())?;
        match message {
            FromPublisher::Welcome(welcome) if welcome.epoch != self.job.subject.epoch => {
                return Err(format!("its epoch is {}, not {}", welcome.epoch, self.job.subject.epoch));
            }
            FromPublisher::Welcome(welcome) => {
                if let Some(keyring) = &mut self.keyring {
                    keyring.add(&welcome.keys, now + self.timing.lost_after);
                }
                self.in_session = true;
            }
            FromPublisher::Rekey(rekey) => {
                if let Some(keyring) = &mut self.keyring {
                    keyring.add(&rekey.keys, now + self.timing.lost_after); // E6
                }
            }
            FromPublisher::Ping(ping) => {
                self.send(FromWorker::Pong(Pong { token: ping.token, ..Pong::default() }));
            }
            FromPublisher::Pong(pong) => {
                let later = Duration::from_millis(pong.token) > self.requested_at;
                let overdue = (later && !self.requested.is_empty()).then_some(now);
                self.overdue_since = self.overdue_since.or(overdue);
            }
            FromPublisher::Refuse(refuse) => {
                return Err(format!("it refuses ({}): {}", escaped(&refuse.code), escaped(&refuse.text)));
            }
            FromPublisher::Chunk(chunk)
                if self.expects(&chunk.model, (chunk.epoch, chunk.version), &chunk.patch, chunk.index) =>
            {
                let crc = self.check(&chunk, &frames[1]);
                return self.arrived(chunk.index, crc.map(|crc| (crc, frames.swap_remove(1))), shared);
            }
            FromPublisher::SealedChunk(chunk)
                if self.expects(&chunk.model, (chunk.epoch, chunk.version), &chunk.patch, chunk.index) =>
            {
                let plain = self.decrypt(&chunk, &frames[1]);
                return self.arrived(chunk.index, plain, shared);
            }
            _ => {} // in this session, no version is applied
        }
        Ok(())
    }

    /// True if this chunk is requested.
    fn expects(&self, model: &str, key: Key, patch: &Option<PatchId>, index: u64) -> bool {
        let Subject { model: wanted, epoch, version, .. } = &self.job.subject;
        model == wanted && key == (*epoch, *version) && patch.is_none() && self.requested.contains(&index)
    }

    /// Returns the checksum of a chunk in the clear; `None` if the chunk is damaged.
    fn check(&self, chunk: &Chunk, bytes: &[u8]) -> Option<u32> {
        let sound = self.keyring.is_none()
            && self.job.plan.fits(chunk.index, bytes.len())
            && crc32c(bytes) == chunk.crc;
        sound.then_some(chunk.crc) // W9
    }

    /// Returns the checksum and the bytes of a sealed chunk; `None` if the chunk is not authentic.
    fn decrypt(&mut self, chunk: &SealedChunk, sealed: &[u8]) -> Option<(u32, Frame)> {
        let opening = match &mut self.keyring {
            Some(keyring) if self.job.plan.fits(chunk.index, sealed.len()) => {
                keyring.opening(&self.job.subject, chunk, sealed.len())?
            }
            _ => return None,
        };
        let mut plain = vec![0; sealed.len()];
        let crc = opening.decrypt(sealed, &mut plain)?; // E4
        Some((crc, Frame::Plain(plain)))
    }

    /// Hands a requested chunk over, or requests it again if it was damaged.
    fn arrived(&mut self, index: u64, intact: Option<(u32, Frame)>, shared: &Shared) -> Result<(), String> {
        self.requested.remove(&index);
        self.overdue_since = None;
        let (crc, bytes) = match intact {
            Some(intact) => intact,
            None => {
                self.damaged += 1;
                self.missing.push(index);
                let too_many = self.damaged > DAMAGED_MAX;
                return if too_many { Err("its chunks are damaged".to_owned()) } else { Ok(()) };
            }
        };
        let (subject, wanted) = (&self.job.subject, self.job.wanted.clone());
        let _pending = PendingCopy::new(&self.uncopied, &self.waker);
        let chunk = SourceChunk { index, crc, bytes, wanted, _pending };
        shared.report(&subject.model, (subject.epoch, subject.version), Outcome::FromSource(chunk));
        Ok(())
    }

    /// Requests chunks, as far as the window allows (W11). Uncopied chunks count against the window.
    fn request(&mut self, now: Time) {
        let uncopied = self.uncopied.load(Ordering::Relaxed);
        if self.missing.is_empty() || self.requested.len() + uncopied > WINDOW_CHUNKS / 2 {
            return;
        }
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        while self.requested.len() + uncopied < WINDOW_CHUNKS {
            let index = match self.missing.pop() {
                Some(index) => index,
                None => break,
            };
            self.requested.insert(index);
            match ranges.last_mut() {
                Some((first, count)) if *first + *count == index => *count += 1,
                _ => ranges.push((index, 1)),
            }
        }
        (self.requested_at, self.overdue_since) = (now, None);
        for (first, count) in ranges {
            let Subject { model, epoch, version, .. } = self.job.subject.clone();
            self.send(FromWorker::Fetch(Fetch { model, epoch, version, first, count, ..Fetch::default() }));
        }
    }
}
