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

mod calls;
mod distribution;
mod endpoints;
mod keys;
mod left_behind;
mod outlet;
mod patched;
mod patience;
mod push;
mod reports;
mod roster;
mod router;
mod run;
mod sessions;
mod state;
mod status;
mod store;
mod turns;
mod watch;
mod zap;

pub use bases::Encoding;
pub use content::TensorView;
pub use effects::{WorkerEvent, WorkerEventKind};
pub use publication::{Require, Wait};
pub use receipt::{Outcome, Receipt, WorkerReceipt};
pub use status::{WorkerState, WorkerStatus};

use crate::error::Error;
use crate::fields::is_name;
use crate::limits::{Timing, CHUNK_BYTES_MAX, INTEGER_MAX, PATCHES_MAX};
use crate::messages::{CommitMode, Running};
use crate::raw::socket::running_clock;
use crate::threads::join_handle;
use bases::Bases;
use content::{Content, Copier};
use distribution::Distribution;
use endpoints::{check_exposure, Place};
use keys::PublisherKeys;
use machine::Machine;
use publication::Asked;
use router::Router;
use run::{Answer, Listener, Loop, Shared, Work};
use sealer::Sealer;
use state::StateFolder;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::path::PathBuf;
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use turns::Turns;
use watch::Watch;

const BASES: usize = 2; // versions that patches may build on: what most workers run, and what those who missed it
const CHUNK_BYTES: u64 = 1 << 20; // larger ones gained nothing when measured
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
    /// Of it, for how long a worker that falls silent meanwhile is waited for; nothing: `lost_after`.
    pub grace: Option<Duration>,
    /// How many "all" are at least: those that are missing are waited for, until they join and get there. Nothing:
    /// as many as the publisher was told to expect.
    pub expect: Option<usize>,
    /// How it goes to workers that take patches.
    pub encoding: Encoding,
}

impl Default for PublishOptions {
    fn default() -> PublishOptions {
        let Asked { workers, require, wait, timeout, .. } = Asked::default();
        PublishOptions {
            workers,
            require,
            wait,
            together: false,
            timeout,
            grace: None,
            expect: None,
            encoding: Encoding::Raw,
        }
    }
}

/// How a publisher is set up, see `Publisher::builder`.
pub struct PublisherBuilder {
    address: String,
    data: Option<String>,
    advertise: Option<String>,
    epoch: Option<u64>,
    chunk_bytes: u64,
    ping: Duration,
    lost_after: Duration,
    state: Option<PathBuf>,
    expect: usize,
    keys: Option<PathBuf>, // nothing: what the environment says; empty: none
    rekey: Duration,
    insecure: bool,
    bases: (usize, u64),
    listener: Option<Listener>,
}

impl PublisherBuilder {
    /// Where the data socket is bound; otherwise one port above the address, or at a path beside it.
    pub fn data(mut self, address: &str) -> PublisherBuilder {
        self.data = Some(address.to_owned());
        self
    }

    /// What workers are told to connect to for data; otherwise it follows from `data`.
    pub fn advertise(mut self, address: &str) -> PublisherBuilder {
        self.advertise = Some(address.to_owned());
        self
    }

    /// This publisher's incarnation: workers refuse one that is lower than what they have applied from. Otherwise it
    /// is milliseconds since 1970; should the clock be behind that of a publisher before, a worker's word that this
    /// one started later raises it. One that is given is never changed.
    pub fn epoch(mut self, epoch: u64) -> PublisherBuilder {
        self.epoch = Some(epoch);
        self
    }

    /// Bytes of a chunk, 1 to 2^26.
    pub fn chunk_bytes(mut self, bytes: u64) -> PublisherBuilder {
        self.chunk_bytes = bytes;
        self
    }

    /// Between two signs of life, and the silence after which a worker is lost: at least twice as long.
    pub fn timing(mut self, ping: Duration, lost_after: Duration) -> PublisherBuilder {
        (self.ping, self.lost_after) = (ping, lost_after);
        self
    }

    /// A folder that outlives this publisher, and keeps its epoch: one that is started with it later comes after this
    /// one, whatever clocks say. A folder in which a publisher in Python keeps versions is refused: that one would
    /// offer them again, over what this one has published since.
    pub fn state(mut self, folder: impl Into<PathBuf>) -> PublisherBuilder {
        self.state = Some(folder.into());
        self
    }

    /// How many workers "all" are at least in a publish that does not say.
    pub fn expect(mut self, workers: usize) -> PublisherBuilder {
        self.expect = workers;
        self
    }

    /// How many versions of each model are kept in memory for patches to build on, 1 to 8, and how many bytes those may
    /// take together: workers that run one of them are sent what has changed since. 2 versions are, of any size. Only
    /// what is published as `Encoding::Delta` or `DeltaFlat`, while somebody takes patches, is kept.
    pub fn bases(mut self, versions: usize, bytes_max: u64) -> PublisherBuilder {
        self.bases = (versions, bytes_max);
        self
    }

    /// A folder that `weightbus keygen` has made: only workers with a key that it allows connect, under the name of
    /// that key, and all that is published is sealed. It is looked at again and again: adding a file lets somebody in,
    /// removing it shuts it out. By default what the environment's `WEIGHTBUS_KEYS` says, else there are none, as there
    /// are with an empty path.
    pub fn keys(mut self, folder: impl Into<PathBuf>) -> PublisherBuilder {
        self.keys = Some(folder.into());
        self
    }

    /// With keys, after how long another group key takes the place of one; otherwise a day.
    pub fn rekey(mut self, life: Duration) -> PublisherBuilder {
        self.rekey = life;
        self
    }

    /// Without keys, listens where other hosts can connect, though whoever does gets the weights.
    pub fn insecure(mut self) -> PublisherBuilder {
        self.insecure = true;
        self
    }

    /// Has a function told what becomes of workers, in the publisher's own thread: it must not wait.
    /// `publish_later` and `close` do not; `publish`, `workers` and `wait_until` would wait for this very thread, until
    /// they give up.
    pub fn on_worker(mut self, listener: impl FnMut(&WorkerEvent) + Send + 'static) -> PublisherBuilder {
        self.listener = Some(Box::new(listener));
        self
    }

    /// Binds the sockets, and begins.
    pub fn bind(self) -> Result<Publisher, Error> {
        let place = Place::parse(&self.address)?;
        let keys = self.own_keys()?;
        let shielded = self.insecure || keys.is_some();
        check_exposure(shielded, &self.address, &place)?;
        let data = self.data.as_deref().map(Place::parse).transpose()?;
        if let (Some(address), Some(place)) = (&self.data, &data) {
            check_exposure(shielded, address, place)?;
        }
        if let Some(told) = &self.advertise {
            Place::parse(told)?;
        }
        if !(1..=CHUNK_BYTES_MAX).contains(&self.chunk_bytes) {
            let text = format!("chunks of {} bytes; 1 to {} are allowed", self.chunk_bytes, CHUNK_BYTES_MAX);
            return Err(Error::Setup(text));
        }
        if !(1..=PATCHES_MAX).contains(&self.bases.0) {
            let text = format!("patches on {} versions; 1 to {} are allowed", self.bases.0, PATCHES_MAX);
            return Err(Error::Setup(text));
        }
        if self.rekey.is_zero() {
            return Err(Error::Setup("rekey of nothing: how old may a group key become?".to_owned()));
        }
        let timing = timing_of(self.ping, self.lost_after)?;
        let state = self.state.as_deref().map(StateFolder::open).transpose()?;
        let epoch = new_epoch(self.epoch, state.as_ref())?;
        let broken = |what: &str| {
            let what = what.to_owned();
            move |error: io::Error| Error::Io { what, error }
        };
        let mut seed = [0; 4];
        random(&mut seed).map_err(broken("no random numbers"))?;
        let secret = keys.as_ref().map(|keys| &keys.secret[..]);
        let (router, bound) = Router::bind(&place, u32::from_ne_bytes(seed), secret)?;
        let (mut data, data_place) = match data {
            Some(data) => Distribution::bind(&data)?,
            None => bind_beside(&place, &bound)?,
        };
        if let Some(state) = &state {
            state.record(epoch)?; // nobody has heard of it yet, and an address that is taken spends none
        }
        let told = self.advertise.unwrap_or_else(|| data_place.advertised(&bound));
        let started = running_clock();
        let age: machine::Age = Box::new(move || running_clock().saturating_sub(started));
        let age = Some(age).filter(|_| self.epoch.is_none());
        let mut machine = Machine::new(epoch, &told, timing, age, Some(Box::new(draw)));
        let shared = Arc::new(Shared::new().map_err(broken("no descriptors for a publisher"))?);
        let (mut sealer, mut watch) = (None, None);
        if let Some(keys) = keys {
            data.ask_for_tickets();
            let new = Sealer::new(
                drawing_keys().map_err(broken("no random numbers"))?,
                Some(self.rekey),
                Duration::ZERO,
            );
            machine = machine.trust(keys.allowed, new.key());
            sealer = Some(new);
            let begun = Watch::begin(&keys.folder, timing.ping, shared.clone());
            watch = Some(begun.map_err(broken("no thread for keys"))?);
        }
        let thread = Loop::new(machine, router, data, shared.clone(), state, self.listener, sealer);
        let thread = thread::Builder::new().name("weightbus-publisher".to_owned()).spawn(|| thread.run());
        Ok(Publisher {
            address: bound.endpoint(),
            data_address: data_place.endpoint(),
            epoch,
            chunk_bytes: self.chunk_bytes,
            expect: self.expect,
            lost_after: self.lost_after,
            bases: self.bases,
            models: Mutex::default(),
            watch: Mutex::new(watch),
            shared,
            thread: Mutex::new(Some(thread.map_err(broken("no thread for a publisher"))?)),
        })
    }
}

impl PublisherBuilder {
    fn own_keys(&self) -> Result<Option<PublisherKeys>, Error> {
        let named = || std::env::var_os("WEIGHTBUS_KEYS").unwrap_or_default().into();
        let folder: PathBuf = self.keys.clone().unwrap_or_else(named);
        Some(folder)
            .filter(|folder| !folder.as_os_str().is_empty())
            .map(|f| PublisherKeys::read(&f))
            .transpose()
    }
}

/// The port beside; if that is taken, and any port would have done for the address, then any does here.
fn bind_beside(asked: &Place, bound: &Place) -> Result<(Distribution, Place), Error> {
    match (Distribution::bind(&bound.beside()), asked) {
        (Err(_), Place::Tcp { host, port: 0 }) => {
            Distribution::bind(&Place::Tcp { host: host.clone(), port: 0 })
        }
        (result, _) => result,
    }
}

fn timing_of(ping: Duration, lost_after: Duration) -> Result<Timing, Error> {
    let hour = Duration::from_secs(3600);
    let right =
        (Duration::from_millis(1)..=hour).contains(&ping) && (ping * 2..=10 * hour).contains(&lost_after);
    if !right {
        return Err(Error::Setup(format!(
            "ping of {:?} and lost_after of {:?}: a worker needs two chances to be heard; choose lost_after of at least \
             twice ping and at most {:?}, and ping of 1 ms to {:?}",
            ping,
            lost_after,
            10 * hour,
            hour
        )));
    }
    Ok(Timing { ping, lost_after, quiet: ping.min(Duration::from_millis(250)), ..Timing::default() })
}

/// Above all of the folder's, whatever the clock says (P1).
fn new_epoch(asked: Option<u64>, state: Option<&StateFolder>) -> Result<u64, Error> {
    let least = state.map_or(Ok(0), StateFolder::epoch)? + 1;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
    match asked {
        None => Ok(now.max(least)),
        Some(epoch) if (least..=INTEGER_MAX).contains(&epoch) => Ok(epoch),
        Some(epoch) => Err(Error::Setup(format!(
            "epoch {}: it must be above all that the state folder has seen, {} to {}; leave it out",
            epoch, least, INTEGER_MAX
        ))),
    }
}

fn random(bytes: &mut [u8]) -> io::Result<()> {
    fs::File::open("/dev/urandom")?.read_exact(bytes)
}

/// What draws group keys. Its file is open: there is always another one.
fn drawing_keys() -> io::Result<sealer::DrawKey> {
    let mut chance = fs::File::open("/dev/urandom")?;
    Ok(Box::new(move || {
        let mut key = [0; 32];
        match chance.read_exact(&mut key) {
            Ok(()) => key,
            Err(error) => panic!("no random numbers for a group key: {}", error), // no other will do: this is the end
        }
    }))
}

fn draw() -> Option<String> {
    let mut bytes = [0; 16];
    random(&mut bytes).ok()?;
    Some(crate::digest::hex(&bytes))
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
        PublisherBuilder {
            address: address.to_owned(),
            data: None,
            advertise: None,
            epoch: None,
            chunk_bytes: CHUNK_BYTES,
            ping: Duration::from_secs(1),
            lost_after: Duration::from_secs(5),
            state: None,
            expect: 0,
            keys: None,
            rekey: DAY,
            insecure: false,
            bases: (BASES, u64::MAX),
            listener: None,
        }
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
        let content = copy(&mut its.copier)
            .map_err(|text| Error::Setup(format!("{} cannot be published: {}", model, text)))?;
        let to_all = asked.workers.is_none();
        let offer = its.bases.offer(Arc::new(content), options.encoding, &takers, to_all, until);
        let (sender, answer) = channel();
        let model = model.to_owned();
        self.shared.leave(Work::Publish { model, offer, asked, began, answer: sender })?;
        Ok(Publishing { answer, until, shared: self.shared.clone() })
    }

    /// What each worker runs, of those that take patches and that a version is for. In the publisher's own thread, and
    /// where that does not say in time, it is one of which nobody knows: then there is no patch on anything.
    fn takers(&self, model: &str, asked: &Asked, until: Instant) -> Result<Vec<Option<Running>>, Error> {
        if self.is_own_thread() {
            return Ok(vec![None]);
        }
        let (sender, answer) = channel();
        self.shared.leave(Work::Takers(model.to_owned(), asked.workers.clone(), sender))?;
        match answer.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(takers) => Ok(takers),
            Err(RecvTimeoutError::Timeout) => Ok(vec![None]),
            Err(RecvTimeoutError::Disconnected) => Err(self.shared.closed()),
        }
    }

    fn is_own_thread(&self) -> bool {
        lock(&self.thread).as_ref().map(|thread| thread.thread().id()) == Some(thread::current().id())
    }

    fn asked(&self, model: &str, options: &PublishOptions) -> Result<Asked, Error> {
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
        Ok(Asked {
            workers: options.workers.clone(),
            require: options.require,
            wait: options.wait,
            commit: if options.together { CommitMode::Together } else { CommitMode::Auto },
            timeout: options.timeout,
            grace: options.grace.unwrap_or(self.lost_after),
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
    pub fn close(&self) {
        self.shared.stop();
        drop(lock(&self.watch).take());
        if let Some(thread) = join_handle(&self.thread) {
            let _ = thread.join(); // it never waits long; if it panicked, whoever calls next is told
        }
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.close();
    }
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
