//! A publisher: it copies a model, sends it to every worker that connects, and says what became of it.
//!
//! `machine.rs` decides, `run.rs` carries, and this file is what users call.

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
mod accepted;
mod builder;
mod calls;
mod curve;
mod endpoints;
mod joining;
mod keeper;
mod keys;
mod left_behind;
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
mod state;
mod status;
mod store;
mod subscriber;
mod turns;
mod verifying;
mod watch;
mod watched;

pub use bases::Encoding;
pub use builder::PublisherBuilder;
pub use content::TensorView;
pub use effects::{WorkerEvent, WorkerEventKind};
pub use publication::{Require, Wait};
pub use receipt::{Outcome, Receipt, WorkerReceipt};
pub use status::{WorkerState, WorkerStatus};

use crate::error::Error;
use crate::fields::is_name;
use crate::limits::{METADATA_BYTES_MAX, METADATA_MAX, METADATA_NAME_MAX};
use crate::messages::CommitMode;
use crate::threads::join_handle;
use bases::{Bases, Taker};
use content::{Content, Copier};
use publication::Terms;
use run::{Answer, Shared, Work};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::mem::{forget, replace};
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use turns::Turns;
use watch::Watch;

const ANSWER: Duration = Duration::from_secs(10); // that the thread gets to answer beyond a deadline
const DAY: Duration = Duration::from_secs(86_400); // that one group key is in force, too, unless the user says otherwise

/// What is asked of one publish.
///
/// ```
/// # use weightbus::{PublishOptions, Require};
/// # use std::time::Duration;
/// let options =
///     PublishOptions { require: Require::AtLeast(2), timeout: Duration::from_secs(5), ..PublishOptions::default() };
/// ```
#[derive(Clone, Debug)]
pub struct PublishOptions {
    /// Names of the workers it is for; nothing: all that want the model. Workers that join later get the latest
    /// version that was meant for all.
    pub workers: Option<Vec<String>>,
    /// How many of them must get there.
    pub require: Require,
    /// What "there" is.
    pub wait: Wait,
    /// None applies before so many as are required have staged; if too few do in time, none applies at all.
    pub together: bool,
    /// For all of this.
    pub timeout: Duration,
    /// Of it, for how long a worker that is lost meanwhile is waited for; nothing: `lost_after` for one that falls
    /// silent, and no longer for one whose connection is closed and that made no other.
    pub grace: Option<Duration>,
    /// How many "all" are at least: those that are missing are waited for, until they join and get there. Nothing:
    /// as many as the publisher was told to expect.
    pub expect: Option<usize>,
    /// How it goes to workers that take patches.
    pub encoding: Encoding,
    /// What to say of the version, as text by name: a step, a reward. At most 32 entries, and 4 KiB of names and texts.
    pub metadata: BTreeMap<String, String>,
}

impl Default for PublishOptions {
    fn default() -> PublishOptions {
        let Terms { workers, require, wait, timeout, .. } = Terms::default();
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
    models: Mutex<HashMap<String, Arc<Turns<Published>>>>,
    watch: Mutex<Option<Watch>>, // over the folder of keys
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What is kept of a model between two versions.
struct Published {
    copier: Copier,
    bases: Bases,
}

/// A publish that is under way.
pub struct Publishing {
    answer: Receiver<Answer>,
    until: Instant,
    shared: Arc<Shared>,
}

impl Publishing {
    /// Waits for what becomes of it.
    pub fn wait(self) -> Result<Receipt, Error> {
        let left = self.until.saturating_duration_since(Instant::now());
        match self.answer.recv_timeout(left + ANSWER) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Disconnected) => Err(self.shared.closed()),
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
    /// Begins with everything else at its default.
    pub fn bind(address: &str) -> Result<Publisher, Error> {
        Publisher::builder(address).bind()
    }

    /// Sets a publisher up whose control socket is bound here, the one address that workers need: `tcp://HOST:PORT`
    /// (port 0: any free one) or `ipc://PATH`.
    pub fn builder(address: &str) -> PublisherBuilder {
        PublisherBuilder::new(address)
    }

    /// The one address that workers need, with the port that was taken.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Where the data socket is.
    pub fn data_address(&self) -> &str {
        &self.data_address
    }

    /// This publisher's incarnation, as it began: a receipt has that of its version.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Publishes a new version of a model and waits until the workers have it.
    ///
    /// The tensors are copied before this waits for anybody. With no worker there, and none expected, the receipt
    /// names none: the version waits for those that join. `Error::Publish` means that less was achieved than required;
    /// it has the receipt.
    pub fn publish(
        &self,
        model: &str,
        tensors: &[TensorView],
        options: &PublishOptions,
    ) -> Result<Receipt, Error> {
        self.publish_later(model, tensors, options)?.wait()
    }

    /// The same, and returns as soon as the tensors are copied.
    ///
    /// A newer version overtakes an older one that is still on its way: a worker that goes straight to the newer one
    /// counts as `Skipped`, which is success.
    pub fn publish_later(
        &self,
        model: &str,
        tensors: &[TensorView],
        options: &PublishOptions,
    ) -> Result<Publishing, Error> {
        self.submit(model, options, |copier| copier.copy(tensors, self.chunk_bytes))
    }

    /// Publishes the bytes of a safetensors file, as they stand: what `publish_later` does of tensors.
    pub fn publish_safetensors(
        &self,
        model: &str,
        file: &[u8],
        options: &PublishOptions,
    ) -> Result<Publishing, Error> {
        self.submit(model, options, |copier| copier.copy_file(file, self.chunk_bytes))
    }

    fn submit(
        &self,
        model: &str,
        options: &PublishOptions,
        copy: impl FnOnce(&mut Copier) -> Result<Content, String>,
    ) -> Result<Publishing, Error> {
        if !self.shared.is_here() {
            return Err(self.shared.closed()); // locks of ours may be held by threads that are not here
        }
        let began = Instant::now();
        let asked = self.asked(model, options)?;
        let until = began + asked.timeout;
        let fresh = || {
            let (count, bytes_max) = self.bases;
            Arc::new(Turns::new(Published { copier: Copier::default(), bases: Bases::new(count, bytes_max) }))
        };
        let its = lock(&self.models).entry(model.to_owned()).or_insert_with(fresh).clone();
        // Versions are numbered in the order in which they were copied.
        // The publisher's own thread must not stand still while another makes a patch.
        let patience = if self.is_own_thread() { Duration::ZERO } else { asked.timeout };
        let mut its = its.take(began + patience).ok_or_else(|| late(model, patience))?;
        let takers = match options.encoding {
            Encoding::Raw => Vec::new(),
            _ => self.takers(model, &asked, until)?,
        };
        let mut content = copy(&mut its.copier)
            .map_err(|text| Error::Setup(format!("{} cannot be published: {}", model, text)))?;
        content.metadata = options.metadata.clone();
        let to_all = asked.workers.is_none();
        let offer = its.bases.offer(Arc::new(content), options.encoding, &takers, to_all, until);
        let (sender, answer) = channel();
        let model = model.to_owned();
        self.shared.leave(Work::Publish { model, offer, asked, began, answer: sender })?;
        Ok(Publishing { answer, until, shared: self.shared.clone() })
    }

    /// What each worker runs, and how soon a patch is there, of those that take patches and that a version is for. In the publisher's own thread, and
    /// where that does not say in time, it is one of which nobody knows: then there is no patch on anything.
    fn takers(&self, model: &str, asked: &Terms, until: Instant) -> Result<Vec<Taker>, Error> {
        if self.is_own_thread() {
            return Ok(vec![Taker::default()]);
        }
        let (sender, answer) = channel();
        self.shared.leave(Work::Takers(model.to_owned(), asked.workers.clone(), sender))?;
        match answer.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(takers) => Ok(takers),
            Err(RecvTimeoutError::Timeout) => Ok(vec![Taker::default()]),
            Err(RecvTimeoutError::Disconnected) => Err(self.shared.closed()),
        }
    }

    fn is_own_thread(&self) -> bool {
        lock(&self.thread).as_ref().map(|thread| thread.thread().id()) == Some(thread::current().id())
    }

    fn asked(&self, model: &str, options: &PublishOptions) -> Result<Terms, Error> {
        let wrong = |text: String| Err(Error::Setup(text));
        if !is_name(model) {
            return wrong(format!(
                "{:?} cannot name a model: it must be 1 to 128 characters of A-Z a-z 0-9 . _ -",
                model
            ));
        }
        if options.timeout.is_zero() || options.timeout > 365 * DAY {
            return wrong(format!(
                "a timeout of {:?}; it is more than nothing, and at most a year",
                options.timeout
            ));
        }
        if let Some(why) = unfit(&options.metadata) {
            return wrong(format!("metadata: {}", why));
        }
        if let Some(workers) = &options.workers {
            let mut names = workers.clone();
            names.sort();
            names.dedup();
            if names.len() < workers.len() || names.is_empty() {
                return wrong(
                    "workers: name each once, and one at least; or leave it out for all".to_owned(),
                );
            }
            if let Require::AtLeast(count) = options.require {
                if count > workers.len() {
                    return wrong(format!("{} of {} workers are required: name more", count, workers.len()));
                }
            }
        }
        let all = options.workers.is_none() && options.require == Require::All;
        let expect = options.expect.unwrap_or(self.expect);
        if options.expect.map_or(false, |expect| expect > 0) && !all {
            return wrong(
                "expect is about all workers: leave `workers` and `require` as they are".to_owned(),
            );
        }
        Ok(Terms {
            workers: options.workers.clone(),
            require: options.require,
            wait: options.wait,
            commit: if options.together { CommitMode::Together } else { CommitMode::Auto },
            timeout: options.timeout,
            grace: options.grace.unwrap_or(self.lost_after),
            grace_of_gone: options.grace.unwrap_or_default(),
            expect: if all { expect } else { 0 },
        })
    }

    /// Who is there, by name, lost workers included, and which version each of them runs.
    pub fn workers(&self) -> Result<BTreeMap<String, WorkerStatus>, Error> {
        let (sender, answer) = channel();
        self.shared.leave(Work::Status(sender))?;
        answer.recv_timeout(ANSWER).map_err(|_| self.shared.closed())
    }

    /// Waits until so many workers are there that want the model; returns whether they came in time.
    pub fn wait_for_workers(&self, count: usize, model: &str, timeout: Duration) -> Result<bool, Error> {
        let model = model.to_owned();
        self.wait_until(timeout, move |roster| {
            let there = |status: &&WorkerStatus| {
                status.state != WorkerState::Lost && status.models.contains_key(&model)
            };
            roster.values().filter(there).count() >= count
        })
    }

    /// Waits until something is so of those who are there, as `workers` has it; returns whether it was in time. It is
    /// asked in the publisher's own thread, whenever something happens to a worker, and ten times a second.
    pub fn wait_until(
        &self,
        timeout: Duration,
        condition: impl Fn(&BTreeMap<String, WorkerStatus>) -> bool + Send + 'static,
    ) -> Result<bool, Error> {
        let (sender, answer) = channel();
        let until = Instant::now() + timeout.min(365 * DAY);
        self.shared.leave(Work::Watch(Box::new(condition), until, sender))?;
        match answer.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(()) => Ok(true),
            Err(_) if Instant::now() >= until => Ok(false), // given up, here or there
            Err(_) => Err(self.shared.closed()),
        }
    }

    /// Answers open publishes as they stand, and closes the sockets. Dropping the publisher does it, too. In the
    /// publisher's own thread, where `on_worker` is called, it does not wait: that ends when the function has returned.
    /// In a forked child there is nothing to close.
    pub fn close(&self) {
        if !self.shared.is_here() {
            return;
        }
        self.shared.stop();
        drop(lock(&self.watch).take());
        if let Some(thread) = join_handle(&self.thread) {
            let _ = thread.join(); // it never waits long; if it panicked, whoever calls next is told
        }
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        if self.shared.is_here() {
            self.close();
        } else {
            // Threads that are not here.
            forget(replace(&mut self.thread, Mutex::new(None)));
            forget(replace(&mut self.watch, Mutex::new(None)));
        }
    }
}

/// Says why metadata cannot travel; nothing if it can.
fn unfit(metadata: &BTreeMap<String, String>) -> Option<String> {
    let named = |name: &&String| !(1..=METADATA_NAME_MAX).contains(&name.chars().count());
    if metadata.len() > METADATA_MAX {
        return Some(format!("{} entries; at most {} travel", metadata.len(), METADATA_MAX));
    }
    if let Some(name) = metadata.keys().find(named) {
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

fn late(model: &str, waited: Duration) -> Error {
    if waited.is_zero() {
        let text =
            "another thread is publishing it, for which a listener must not wait; publish it in one thread";
        return Error::Late(format!("{}: {}", model, text));
    }
    Error::Late(format!(
        "{}: another thread was publishing it for all of {:?}, so nothing was published; give it a longer timeout, or \
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
        assert_eq!(unfit(&said("step", "12000")), None);
        assert_eq!(unfit(&said("s", &"x".repeat(METADATA_BYTES_MAX - 1))), None);
        for (wrong, why) in [
            (many, "33 entries; at most 32"),
            (said("", "x"), "1 to 128 characters"),
            (said(&"n".repeat(METADATA_NAME_MAX + 1), ""), "1 to 128 characters"),
            (said("n", "a\0b"), "a NUL"),
            (said("s", &"x".repeat(METADATA_BYTES_MAX)), "4097 bytes"),
        ] {
            let told = unfit(&wrong).expect("a fault");
            assert!(told.contains(why), "{}", told);
        }
    }
}
