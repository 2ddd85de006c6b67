//! The API of the publisher, which copies a model, sends the copy to the workers, and reports what
//! each worker did with it.
//!
//! `machine.rs` makes the decisions and does no I/O. `run.rs` is the thread that carries out these decisions.

pub mod bases;
pub mod content;
pub mod effects;
pub mod grants;
pub mod machine;
pub mod offer;
pub mod publication;
pub mod receipt;
pub mod sealer;
pub mod trust;

mod absent;
mod behind;
mod builder;
mod calls;
mod control_connection;
mod curve;
mod endpoints;
mod joining;
mod keeper;
mod keys;
mod link;
mod listening;
mod observers;
mod pages;
mod patched;
mod phases;
mod pipe;
mod pub_socket;
mod publishing;
mod push;
mod rate_limits;
mod reports;
mod roster;
mod router;
mod run;
mod serving;
mod sessions;
mod stale_socket;
mod state;
mod status;
mod store;
mod subscriber;
mod timed_lock;
mod verifying;
mod watch;
mod watched;

pub use bases::Encoding;
pub use builder::PublisherBuilder;
pub use content::TensorView;
pub use effects::{WorkerEvent, WorkerEventKind};
pub use phases::Outcome;
pub use publication::{Require, Wait};
pub use receipt::{Receipt, WorkerReceipt};
pub use status::{WorkerState, WorkerStatus};

use crate::error::Error;
use crate::fields::is_name;
use crate::limits::{METADATA_BYTES_MAX, METADATA_MAX, METADATA_NAME_MAX};
use crate::messages::AnnounceCommit;
use crate::threads::join_handle;
use bases::{Bases, PatchCandidate};
use content::{Content, Copier};
use publication::PublishTerms;
use run::{Answer, Shared, Work};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::mem::{forget, replace};
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use timed_lock::TimedLock;
use watch::Watch;

// How long a call waits for an answer of the publisher's thread; a publish waits this long after its
// deadline.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
const DAY: Duration = Duration::from_secs(86_400); // the default lifetime of a group key

/// Options of one publish.
///
/// ```
/// # use weightbus::{PublishOptions, Require};
/// # use std::time::Duration;
/// let options =
///     PublishOptions { require: Require::AtLeast(2), timeout: Duration::from_secs(5), ..PublishOptions::default() };
/// ```
#[derive(Clone, Debug)]
pub struct PublishOptions {
    /// Names of the workers to publish to; `None` for all workers that subscribe to the model. A
    /// worker that joins later gets the latest version that was published to all.
    pub workers: Option<Vec<String>>,
    /// How many of the workers must reach the state `wait`.
    pub require: Require,
    /// The state that a worker must reach: applied, or only staged.
    pub wait: Wait,
    /// If true, workers apply the version only after `require` workers have staged it. If too few
    /// workers stage the version in time, no worker applies it.
    pub together: bool,
    /// The time limit of the publish.
    pub timeout: Duration,
    /// How long to wait, within `timeout`, for a worker that is lost during the publish. `None`: `lost_after`
    /// for a worker that fell silent, and no time for a worker whose connection was closed.
    pub grace: Option<Duration>,
    /// The least number of workers for `Require::All`: the publish waits until that many workers
    /// have joined and reached `wait`. `None`: the number given to `PublisherBuilder::expect`.
    pub expect: Option<usize>,
    /// How the version is encoded for workers that accept patches.
    pub encoding: Encoding,
    /// Texts by name that are sent with the version, such as a step or a reward: at most 32
    /// entries, with 4 KiB of names and texts together.
    pub metadata: BTreeMap<String, String>,
}

impl Default for PublishOptions {
    fn default() -> PublishOptions {
        let PublishTerms { workers, require, wait, timeout, .. } = PublishTerms::default();
        PublishOptions {
            workers,
            require,
            wait,
            together: false,
            timeout,
            grace: None,
            expect: None,
            encoding: Encoding::Raw,
            metadata: BTreeMap::new(),
        }
    }
}

/// Publishes versions of models to every worker that connects. Any thread may call any method.
///
/// ```
/// use weightbus::{Dtype, Publisher, PublishOptions, TensorView};
///
/// let publisher = Publisher::bind("tcp://127.0.0.1:0")?;
/// let weights: Vec<u8> = [0.5f32; 6].iter().flat_map(|value| value.to_le_bytes()).collect();
/// let tensors = [TensorView { name: "w", dtype: Dtype::F32, shape: &[2, 3], bytes: &weights }];
/// let receipt = publisher.publish("policy", &tensors, &PublishOptions::default())?;
/// println!("{}", receipt);
/// # Ok::<(), weightbus::Error>(())
/// ```
pub struct Publisher {
    address: String,
    data_address: String,
    epoch: u64,
    chunk_bytes: u64,
    expect: usize,
    lost_after: Duration,
    bases: (usize, u64),
    models: Mutex<HashMap<String, Arc<TimedLock<PublishState>>>>,
    watch: Mutex<Option<Watch>>, // watches the folder of keys
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What a publisher keeps of a model from one publish to the next.
struct PublishState {
    copier: Copier,
    bases: Bases,
}

/// A publish that is in progress.
pub struct Publishing {
    answer: Receiver<Answer>,
    deadline: Instant,
    shared: Arc<Shared>,
}

impl Publishing {
    /// Waits until the publish ends, and returns its receipt. Returns `Error::Publish`, which contains
    /// the receipt, if the workers did less than was required.
    pub fn wait(self) -> Result<Receipt, Error> {
        let remaining = self.deadline.saturating_duration_since(Instant::now());
        match self.answer.recv_timeout(remaining + ANSWER_TIMEOUT) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Disconnected) => Err(self.shared.closed_error()),
            Err(RecvTimeoutError::Timeout) => {
                Err(Error::PublisherClosed { reason: "its thread does not answer".to_owned() })
            }
        }
    }
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Publisher({}, epoch {})", self.address, self.epoch)
    }
}

impl Publisher {
    /// Starts a publisher at `address` with default settings.
    pub fn bind(address: &str) -> Result<Publisher, Error> {
        Publisher::builder(address).bind()
    }

    /// Returns a builder for a publisher whose control socket binds `address`: `tcp://HOST:PORT`
    /// (port 0: any free port) or `ipc://PATH`. Workers need only this address.
    pub fn builder(address: &str) -> PublisherBuilder {
        PublisherBuilder::new(address)
    }

    /// Returns the address that workers connect to, with the port that was bound.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Returns the address of the data socket.
    pub fn data_address(&self) -> &str {
        &self.data_address
    }

    /// Returns the epoch in which this publisher started. The epoch may change later: a receipt has
    /// the epoch of its version.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Publishes a new version of a model, and waits until the workers have applied it (or what
    /// `options` require). Returns the receipt.
    ///
    /// The tensors are copied before the wait begins. If no worker is connected and none is
    /// expected, the receipt has no workers, and workers that join later get the version. Returns
    /// `Error::Publish`, which contains the receipt, if the workers did less than was required.
    pub fn publish(
        &self,
        model: &str,
        tensors: &[TensorView],
        options: &PublishOptions,
    ) -> Result<Receipt, Error> {
        self.publish_later(model, tensors, options)?.wait()
    }

    /// Publishes like `publish`, but returns as soon as the tensors are copied.
    ///
    /// If a newer version is published before a worker has the older one, the worker may go straight
    /// to the newer version. It then counts as `Skipped` for the older one, which is success.
    pub fn publish_later(
        &self,
        model: &str,
        tensors: &[TensorView],
        options: &PublishOptions,
    ) -> Result<Publishing, Error> {
        self.submit(model, options, |copier| copier.copy(tensors, self.chunk_bytes))
    }

    /// Publishes the bytes of a safetensors file unchanged, and returns like `publish_later`.
    pub fn publish_safetensors(
        &self,
        model: &str,
        file: &[u8],
        options: &PublishOptions,
    ) -> Result<Publishing, Error> {
        self.submit(model, options, |copier| copier.copy_file(file, self.chunk_bytes))
    }

    /// Copies the tensors with `copy`, makes patches, and submits the version to the publisher's thread.
    fn submit(
        &self,
        model: &str,
        options: &PublishOptions,
        copy: impl FnOnce(&mut Copier) -> Result<Content, String>,
    ) -> Result<Publishing, Error> {
        if !self.shared.is_own_process() {
            // A forked child has no copy of the parent's threads, one of which may have held a lock.
            return Err(self.shared.closed_error());
        }
        let began = Instant::now();
        let terms = self.checked_terms(model, options)?;
        let deadline = began + terms.timeout;
        let new_state = || {
            let (count, bytes_max) = self.bases;
            Arc::new(TimedLock::new(PublishState {
                copier: Copier::default(),
                bases: Bases::new(count, bytes_max),
            }))
        };
        let model_lock = lock(&self.models).entry(model.to_owned()).or_insert_with(new_state).clone();
        // One thread at a time copies a model, so that versions are numbered in the order of the
        // copies. The publisher's own thread does not wait: another thread may be making a patch.
        let wait_max = if self.is_own_thread() { Duration::ZERO } else { terms.timeout };
        let mut state = model_lock.lock_until(began + wait_max).ok_or_else(|| busy_error(model, wait_max))?;
        let patch_candidates = match options.encoding {
            Encoding::Raw => Vec::new(),
            _ => self.patch_candidates(model, &terms, deadline)?,
        };
        let mut content = copy(&mut state.copier)
            .map_err(|text| Error::Setup(format!("{} cannot be published: {}", model, text)))?;
        content.metadata = options.metadata.clone();
        let to_all = terms.workers.is_none();
        let offer =
            state.bases.offer(Arc::new(content), options.encoding, &patch_candidates, to_all, deadline);
        let (sender, answer) = channel();
        let model = model.to_owned();
        self.shared.submit(Work::Publish { model, offer, terms, began, answer: sender })?;
        Ok(Publishing { answer, deadline, shared: self.shared.clone() })
    }

    /// Returns the workers of this publish that accept patches, each with its running version and its speeds.
    ///
    /// The publisher's thread knows these workers. If the caller is that thread, or no answer comes before
    /// `until`, returns one unknown worker instead: then no patch is made, but the version is kept as a base.
    fn patch_candidates(
        &self,
        model: &str,
        terms: &PublishTerms,
        until: Instant,
    ) -> Result<Vec<PatchCandidate>, Error> {
        if self.is_own_thread() {
            return Ok(vec![PatchCandidate::default()]);
        }
        let (sender, answer) = channel();
        self.shared.submit(Work::PatchCandidates(model.to_owned(), terms.workers.clone(), sender))?;
        match answer.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(patch_candidates) => Ok(patch_candidates),
            Err(RecvTimeoutError::Timeout) => Ok(vec![PatchCandidate::default()]),
            Err(RecvTimeoutError::Disconnected) => Err(self.shared.closed_error()),
        }
    }

    /// True if the caller is the publisher's thread.
    fn is_own_thread(&self) -> bool {
        lock(&self.thread).as_ref().map(|thread| thread.thread().id()) == Some(thread::current().id())
    }

    /// Returns the checked terms of a publish, with the defaults of this publisher.
    fn checked_terms(&self, model: &str, options: &PublishOptions) -> Result<PublishTerms, Error> {
        let wrong = |text: String| Err(Error::Setup(text));
        if !is_name(model) {
            return wrong(format!(
                "{:?} cannot name a model: it must be 1 to 128 characters of A-Z a-z 0-9 . _ -",
                model
            ));
        }
        if options.timeout.is_zero() || options.timeout > 365 * DAY {
            return wrong(format!(
                "a timeout of {:?}: it must be more than zero, and at most a year",
                options.timeout
            ));
        }
        if let Some(why) = metadata_fault(&options.metadata) {
            return wrong(format!("metadata: {}", why));
        }
        if let Some(workers) = &options.workers {
            let mut names = workers.clone();
            names.sort();
            names.dedup();
            if names.len() < workers.len() || names.is_empty() {
                return wrong(
                    "workers: name at least one, and each only once; or leave `workers` out to publish to all"
                        .to_owned(),
                );
            }
            if let Require::AtLeast(count) = options.require {
                if count > workers.len() {
                    return wrong(format!(
                        "{} workers are required, but only {} are named in `workers`: name more",
                        count,
                        workers.len()
                    ));
                }
            }
        }
        let all = options.workers.is_none() && options.require == Require::All;
        let expect = options.expect.unwrap_or(self.expect);
        if options.expect.map_or(false, |expect| expect > 0) && !all {
            return wrong("expect counts all workers: leave out `workers` and `require`".to_owned());
        }
        Ok(PublishTerms {
            workers: options.workers.clone(),
            require: options.require,
            wait: options.wait,
            commit: if options.together { AnnounceCommit::Together } else { AnnounceCommit::Auto },
            timeout: options.timeout,
            grace: options.grace.unwrap_or(self.lost_after),
            grace_of_gone: options.grace.unwrap_or_default(),
            expect: if all { expect } else { 0 },
        })
    }

    /// Returns the status of each worker by name, lost workers included.
    pub fn workers(&self) -> Result<BTreeMap<String, WorkerStatus>, Error> {
        let (sender, answer) = channel();
        self.shared.submit(Work::Status(sender))?;
        answer.recv_timeout(ANSWER_TIMEOUT).map_err(|_| self.shared.closed_error())
    }

    /// Waits until at least `count` workers that are not lost subscribe to the model, those behind
    /// relays included. Returns false at the timeout.
    pub fn wait_for_workers(&self, count: usize, model: &str, timeout: Duration) -> Result<bool, Error> {
        let model = model.to_owned();
        self.wait_until(timeout, move |roster| {
            let connected = |status: &&WorkerStatus| {
                status.state != WorkerState::Lost && !status.relay && status.models.contains_key(&model)
            };
            roster.values().filter(connected).count() >= count
        })
    }

    /// Waits until `condition` returns true for the result of `workers`. Returns false at the timeout. The
    /// publisher's own thread calls `condition` at each event of a worker, and ten times a second.
    pub fn wait_until(
        &self,
        timeout: Duration,
        condition: impl Fn(&BTreeMap<String, WorkerStatus>) -> bool + Send + 'static,
    ) -> Result<bool, Error> {
        let (sender, answer) = channel();
        let until = Instant::now() + timeout.min(365 * DAY);
        self.shared.submit(Work::Watch(Box::new(condition), until, sender))?;
        match answer.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(()) => Ok(true),
            Err(_) if Instant::now() >= until => Ok(false), // timed out, here or in the thread
            Err(_) => Err(self.shared.closed_error()),
        }
    }

    /// Ends the open publishes with their results so far, and closes the sockets. Dropping the publisher does
    /// the same. In the `on_worker` function, which runs in the publisher's thread, `close` does not wait:
    /// the thread ends after the function returns. In a forked child, `close` does nothing.
    pub fn close(&self) {
        if !self.shared.is_own_process() {
            return;
        }
        self.shared.stop();
        drop(lock(&self.watch).take());
        if let Some(thread) = join_handle(&self.thread) {
            // The thread waits at most 10 s for the disk. If it panicked, the next call of a method
            // returns an error.
            let _ = thread.join();
        }
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        if self.shared.is_own_process() {
            self.close();
        } else {
            // A forked child has no copy of these threads, and cannot join them.
            forget(replace(&mut self.thread, Mutex::new(None)));
            forget(replace(&mut self.watch, Mutex::new(None)));
        }
    }
}

/// Returns the error text for metadata that cannot be sent; `None` if it can be sent.
fn metadata_fault(metadata: &BTreeMap<String, String>) -> Option<String> {
    let is_invalid = |name: &&String| !(1..=METADATA_NAME_MAX).contains(&name.chars().count());
    if metadata.len() > METADATA_MAX {
        return Some(format!("{} entries; at most {} travel", metadata.len(), METADATA_MAX));
    }
    if let Some(name) = metadata.keys().find(is_invalid) {
        return Some(format!("the name {:.80?}; a name has 1 to {} characters", name, METADATA_NAME_MAX));
    }
    if metadata.iter().any(|(name, text)| name.contains('\0') || text.contains('\0')) {
        return Some("a NUL; text has none".to_owned());
    }
    let total: usize = metadata.iter().map(|(name, text)| name.len() + text.len()).sum();
    (total > METADATA_BYTES_MAX).then(|| {
        format!(
            "{} bytes; names and texts are at most {} in all: keep what is larger in a file of your own",
            total, METADATA_BYTES_MAX
        )
    })
}

/// Returns the error of a publish because another thread was publishing the model.
fn busy_error(model: &str, waited: Duration) -> Error {
    if waited.is_zero() {
        let text =
            "another thread is publishing it, and an `on_worker` function must not wait; publish it in one thread";
        return Error::Late(format!("{}: {}", model, text));
    }
    Error::Late(format!(
        "{}: another thread was still publishing it after {:?}, so nothing was published; give a longer timeout, or \
         publish it in one thread",
        model, waited
    ))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_has_bounds() {
        let said = |name: &str, text: &str| [(name.to_owned(), text.to_owned())].into_iter().collect();
        let many = (0..=METADATA_MAX).map(|number| (number.to_string(), String::new())).collect();
        assert_eq!(metadata_fault(&said("step", "12000")), None);
        assert_eq!(metadata_fault(&said("s", &"x".repeat(METADATA_BYTES_MAX - 1))), None);
        for (wrong, why) in [
            (many, "33 entries; at most 32"),
            (said("", "x"), "1 to 128 characters"),
            (said(&"n".repeat(METADATA_NAME_MAX + 1), ""), "1 to 128 characters"),
            (said("n", "a\0b"), "a NUL"),
            (said("s", &"x".repeat(METADATA_BYTES_MAX)), "4097 bytes"),
        ] {
            let told = metadata_fault(&wrong).expect("a fault");
            assert!(told.contains(why), "{}", told);
        }
    }
}
