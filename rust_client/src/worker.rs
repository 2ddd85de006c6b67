//! The worker's public API.

use crate::applying::{ask, Decide, Functions, Offer, APPLY_TIMEOUT, APPLY_TIMEOUT_MAX};
use crate::casting::Overflow;
use crate::control::Control;
use crate::effects::Host;
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::fields::is_name;
use crate::gate::Gate;
use crate::keys::WorkerKeys;
use crate::layout::Layout;
use crate::limits::{Timing, BYTES_MAX, LABEL_MAX, MODELS_MAX};
use crate::machine::{State, Wanted, WorkerMachine};
use crate::messages::{self, Hello, Metadata};
use crate::model::{Model, Ran, Writing};
use crate::patching::{Base, Bytes};
use crate::protocol::codes::Code;
use crate::raw::os::check_descriptors;
use crate::ready_queue::{Next, ReadyQueue};
use crate::run::{Event, Listener, Loop, Outcome, Shared};
use crate::segment::{Reading, Segment, Segments, Stale, Stamp};
use crate::snapshot::Snapshot;
use crate::staging::Buffers;
use crate::staging::{Source, StagedVersion};
use crate::stream::UpdateStream;
use crate::threads::join_handle;
use crate::transfer::Key;
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::mem::{forget, replace};
use std::os::unix::io::RawFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

const NAME_RULE: &str = "a name is 1 to 128 of the characters A-Z a-z 0-9 . _ -";

/// A version that was just applied.
#[derive(Clone, Debug)]
pub struct Update {
    /// Id of the model.
    pub model: String,
    /// Epoch of the publisher.
    pub epoch: u64,
    /// Version number.
    pub version: u64,
    /// Size of the tensors in bytes.
    pub nbytes: u64,
    /// Digest of the bytes that was reported to the publisher. Empty if the bytes were copied from
    /// shared memory and the publisher requested no hash.
    pub digest: String,
    /// How the version arrived: `"raw"` as a whole version over the network, `"delta-1"` as a patch
    /// on the previously running version, empty if it was copied from the publisher's memory.
    pub encoding: &'static str,
    /// Metadata from the publisher, such as a step or a reward: a map from names to texts.
    pub metadata: BTreeMap<String, String>,
    /// How long copying the version into the model took.
    pub took: Duration,
    /// The version's bytes, for a model registered with `Builder::snapshots`; otherwise `None`.
    pub snapshot: Option<Arc<Snapshot>>,
}

/// Destination of a model's versions.
enum Target {
    InPlace(Model),
    Snapshots(Snapshots),
}

/// The versions of a model registered with `Builder::snapshots`.
#[derive(Default)]
struct Snapshots {
    buffers: Buffers,
    latest: Mutex<Option<Arc<Snapshot>>>,
    gate: Gate, // one thread at a time makes a snapshot and decides on it
}

impl Target {
    fn gate(&self) -> &Gate {
        match self {
            Target::InPlace(model) => model.gate(),
            Target::Snapshots(its) => &its.gate,
        }
    }

    /// Returns the running version, as (epoch, number), with its metadata. The bool is true if no
    /// version runs because an apply failed half-way.
    fn ran(&self) -> (Option<(Key, Metadata)>, bool) {
        match self {
            Target::InPlace(model) => model.ran(),
            Target::Snapshots(its) => {
                let of = |latest: &Arc<Snapshot>| ((latest.epoch, latest.version), latest.metadata.clone());
                (lock(&its.latest).as_ref().map(of), false)
            }
        }
    }
}

/// Configures and starts a `Worker`.
#[must_use = "nothing happens before `connect`"]
pub struct Builder {
    addresses: Vec<String>,
    name: Option<String>,
    client: String,
    targets: BTreeMap<String, Target>,
    /// A model id that was given twice, which `connect` reports.
    twice: Option<String>,
    bytes_max: u64,
    shared_memory: bool,
    timing: Timing,
    listener: Option<Listener>,
    functions: Functions,
    partial: bool,
    cast: bool,
    patches: bool,
    any_data_host: bool,
    keys: Option<Keys>,
}

/// Source of the keys, if configured.
enum Keys {
    At(PathBuf),           // empty: no keys
    Here(Vec<WorkerKeys>), // one for all addresses, or one for each
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let models: Vec<&String> = self.targets.keys().collect();
        write!(f, "Builder(of {}: {:?})", self.addresses.join(", "), models)
    }
}

impl Builder {
    /// Adds an address that the worker changes over to when those before fail: a publisher, or a
    /// relay of it. After the last one, the worker tries the first one again. While it is with
    /// another address than the first, it returns to the first one once a publisher answers there.
    pub fn fallback(mut self, address: impl Into<String>) -> Builder {
        self.addresses.extend(Endpoint::addresses_in(&address.into()));
        self
    }

    /// Sets the worker's name, which must be unique among the publisher's workers. Default: host
    /// name, process id and a random suffix.
    pub fn name(mut self, name: impl Into<String>) -> Builder {
        self.name = Some(name.into());
        self
    }

    /// Sets the name of the client library, which the publisher's operators see. A longer text is
    /// cut to 256 characters. Crates that wrap this crate set their own. Default: the name and the
    /// version of this crate.
    pub fn client(mut self, client: impl Into<String>) -> Builder {
        self.client = client.into();
        self
    }

    /// Subscribes to the model `id`, whose versions are written to the memory of `model`.
    pub fn model(self, id: impl Into<String>, model: &Model) -> Builder {
        self.target(id.into(), Target::InPlace(model.clone()))
    }

    /// Subscribes to the model `id`, whose versions are returned as `Snapshot`s.
    pub fn snapshots(self, id: impl Into<String>) -> Builder {
        self.target(id.into(), Target::Snapshots(Snapshots::default()))
    }

    fn target(mut self, id: String, target: Target) -> Builder {
        if self.targets.insert(id.clone(), target).is_some() {
            self.twice = Some(id);
        }
        self
    }

    /// Sets the largest version to accept, in bytes: 64 GiB by default.
    pub fn bytes_max(mut self, bytes: u64) -> Builder {
        self.bytes_max = bytes;
        self
    }

    /// Sets whether versions are copied from the publisher's memory if the publisher is on this
    /// host (default: true). Versions that are copied this way are staged or hashed only if the
    /// publisher requires that.
    pub fn shared_memory(mut self, on: bool) -> Builder {
        self.shared_memory = on;
        self
    }

    /// Sets whether versions may have tensors that the model lacks (default: false). Such tensors
    /// are ignored. A version that lacks a tensor of the model is always rejected.
    pub fn partial(mut self, on: bool) -> Builder {
        self.partial = on;
        self
    }

    /// Sets whether F64, F32, F16 and BF16 values are converted where the dtypes differ (default:
    /// false). Values are rounded to nearest, ties to even.
    pub fn cast(mut self, on: bool) -> Builder {
        self.cast = on;
        self
    }

    /// Sets whether versions may arrive as patches on the running version, if the publisher offers
    /// patches (default: true). Patches build on the bytes in the model's own memory. With
    /// `partial` or `cast`, the worker keeps a second copy of the running version for that.
    pub fn patches(mut self, on: bool) -> Builder {
        self.patches = on;
        self
    }

    /// Sets whether the worker connects to a data endpoint on any host or path that the publisher
    /// names (default: false). By default, the data endpoint must be on the host of the publisher's
    /// address or, for `ipc`, at the path of the address plus a suffix. If it is elsewhere, the
    /// worker fetches all versions, which is slower. With `true`, a publisher can make the worker
    /// connect to anything that the worker can reach. Without keys, the same holds for the sources
    /// of a version: the other ranks of a sharded trainer.
    pub fn any_data_host(mut self, on: bool) -> Builder {
        self.any_data_host = on;
        self
    }

    /// Sets the path of this worker's key file from `weightbus keygen`, or of its folder, where
    /// `name` selects the file. The worker then accepts only the publisher whose key is in the
    /// file, and all traffic is encrypted. Default: the path in the environment variable
    /// `WEIGHTBUS_KEYS`, else no keys. An empty path means no keys. A worker with several addresses
    /// may have a path for each of them, in the same order, separated by commas.
    pub fn keys(mut self, path: impl Into<PathBuf>) -> Builder {
        self.keys = Some(Keys::At(path.into()));
        self
    }

    /// Sets this worker's keys instead of the path of a file.
    pub fn worker_keys(self, keys: WorkerKeys) -> Builder {
        self.worker_keys_of_each([keys])
    }

    /// Sets this worker's keys for each of its addresses, in the same order.
    pub fn worker_keys_of_each(mut self, keys: impl IntoIterator<Item = WorkerKeys>) -> Builder {
        self.keys = Some(Keys::Here(keys.into_iter().collect()));
        self
    }

    /// Sets intervals and timeouts. The defaults are those of the protocol.
    pub fn timing(mut self, timing: Timing) -> Builder {
        self.timing = timing;
        self
    }

    /// Sets a listener, which the worker's thread calls with each event. The listener must not
    /// block.
    pub fn on_event(mut self, listener: impl FnMut(&Event) + Send + 'static) -> Builder {
        self.listener = Some(Box::new(listener));
        self
    }

    /// Sets a function that decides whether a version runs. The thread that calls `receive` calls
    /// the function once for each version, after the version is complete and verified, and before
    /// the version is acknowledged and readers see it. If the function returns an error or panics,
    /// the version is rejected, and the text of the error is sent to the publisher.
    ///
    /// A rejected snapshot is discarded, and the previous one stays the latest. A `Model` already
    /// holds the rejected version: no version runs until another one is applied, and readers get
    /// `Error::Torn`. Use `before_apply` to decide earlier.
    pub fn apply(
        mut self,
        decide: impl Fn(&Offer) -> Result<(), Box<dyn std::error::Error>> + Send + Sync + 'static,
    ) -> Builder {
        self.functions.apply = Some(Box::new(decide));
        self
    }

    /// Sets a function that decides on each version before any byte of the model changes. After a
    /// rejection the previous version still runs.
    pub fn before_apply(
        mut self,
        decide: impl Fn(&Offer) -> Result<(), Box<dyn std::error::Error>> + Send + Sync + 'static,
    ) -> Builder {
        self.functions.before = Some(Box::new(decide));
        self
    }

    /// Sets the time limit for each call of `apply` and `before_apply`: 60 s by default, at most a
    /// day. If a call exceeds the limit, the version is rejected, whatever the function returns
    /// later. Until the function has returned, no other version is applied to the model.
    pub fn apply_timeout(mut self, timeout: Duration) -> Builder {
        self.functions.timeout = timeout;
        self
    }

    /// Starts the worker. The publisher may start later.
    pub fn connect(mut self) -> Result<Worker, Error> {
        self.check()?;
        let keys = self.own_keys()?;
        self.check_addresses()?;
        let form = keys.first().map_or("*", WorkerKeys::name);
        let name = self.name.unwrap_or_else(|| form.replace('*', &default_name()));
        if !is_name(&name) {
            return Err(Error::Setup(format!("{:?} cannot name a worker: {}", name, NAME_RULE)));
        }
        check_descriptors()
            .map_err(|error| Error::Io { what: format!("cannot connect to {}", self.addresses[0]), error })?;
        let broken = |what: &str| {
            let what = format!("worker {:?} cannot start: {}", name, what);
            move |error| Error::Io { what, error }
        };
        let identity = Hello {
            name: name.clone(),
            instance: random_digits(16).map_err(broken("no random numbers"))?,
            client: self.client.chars().take(LABEL_MAX).collect(),
            host: host_name(),
            pid: std::process::id().into(),
            ..Hello::default()
        };
        let targets = Arc::new(self.targets);
        let (partial, cast) = (self.partial, self.cast);
        let alike = !partial && !cast; // versions are as large as their models
        let wanted: Vec<Wanted> =
            targets.iter().map(|(model, target)| wanted(model, target, alike)).collect();
        let segments = self.shared_memory.then(Segments::default);
        let host = Arc::new(UserHost { targets: targets.clone(), segments, partial, cast });
        let mut machine = WorkerMachine::new(identity, &wanted, host.clone(), self.bytes_max, self.timing);
        for (id, target) in targets.iter() {
            if let Target::InPlace(model) = target {
                machine.expect_tensors(id, model.count());
            }
        }
        machine.use_addresses(self.addresses.len());
        if !keys.is_empty() {
            machine.take_sealed();
        }
        if self.patches {
            machine.take_patches();
        }
        let shared = Arc::new(Shared::new().map_err(broken("no sockets"))?);
        let payload_max = machine.payload_bytes_max();
        let control = Control::connect(&self.addresses, &keys, payload_max, shared.waker())?;
        let control = control.any_data_host(self.any_data_host);
        let (addresses, listener) = (self.addresses.clone(), self.listener);
        let run = Loop::new(machine, control, addresses, name.clone(), shared.clone(), listener, host);
        let thread = thread::Builder::new().name("weightbus-worker".to_owned());
        let thread = thread.spawn(move || run.run()).map_err(broken("no thread"))?;
        let (addresses, functions) = (self.addresses, self.functions);
        Ok(Worker { name, addresses, targets, functions, alike, shared, thread: Mutex::new(Some(thread)) })
    }

    /// Returns this worker's keys: none, those for all addresses, or those for each.
    fn own_keys(&mut self) -> Result<Vec<WorkerKeys>, Error> {
        let (name, count) = (self.name.as_deref(), self.addresses.len());
        let keys = match self.keys.take() {
            Some(Keys::Here(keys)) if keys.is_empty() => {
                let text = "an empty list of keys; give keys, or .keys(\"\") for none";
                return Err(Error::Keys(text.to_owned()));
            }
            Some(Keys::Here(keys)) => keys,
            Some(Keys::At(path)) => WorkerKeys::read_all(&path, name, count)?,
            None => WorkerKeys::read_all(
                std::env::var_os("WEIGHTBUS_KEYS").unwrap_or_default().as_ref(),
                name,
                count,
            )?,
        };
        if keys.len() > 1 && keys.len() != count {
            let text =
                format!("{} keys for {} addresses; give one for all, or one for each", keys.len(), count);
            return Err(Error::Keys(text));
        }
        Ok(keys)
    }

    fn check_addresses(&self) -> Result<(), Error> {
        for (at, address) in self.addresses.iter().enumerate() {
            Endpoint::parse(address)?;
            if self.addresses[..at].contains(address) {
                let text = format!("address {:?} is given twice; give each address once", address);
                return Err(Error::Setup(text));
            }
        }
        Ok(())
    }

    fn check(&self) -> Result<(), Error> {
        if let Some(id) = &self.twice {
            return Err(Error::Setup(format!("model {:?} is wanted twice; name it once", id)));
        }
        if self.targets.is_empty() || self.targets.len() > MODELS_MAX {
            let count = self.targets.len();
            return Err(Error::Setup(format!(
                "{} models are wanted; a worker takes 1 to {}",
                count, MODELS_MAX
            )));
        }
        if let Some(id) = self.targets.keys().find(|id| !is_name(id)) {
            return Err(Error::Setup(format!("{:?} cannot name a model: {}", id, NAME_RULE)));
        }
        if self.functions.timeout.is_zero() || self.functions.timeout > APPLY_TIMEOUT_MAX {
            let text = format!("an apply_timeout of {:?}", self.functions.timeout);
            return Err(Error::Setup(text + "; it is more than nothing, and at most a day"));
        }
        Ok(())
    }
}

fn wanted(model: &str, target: &Target, alike: bool) -> Wanted {
    let nbytes = match target {
        Target::InPlace(model) if alike => model.nbytes(),
        _ => 0,
    };
    Wanted { model: model.to_owned(), nbytes }
}

/// The state machine's access to the user's models.
struct UserHost {
    targets: Arc<BTreeMap<String, Target>>,
    segments: Option<Segments>,
    partial: bool,
    cast: bool,
}

impl Host for UserHost {
    fn fault(&self, model: &str, layout: &Layout) -> Option<String> {
        match self.targets.get(model)? {
            Target::InPlace(model) => model.fault(layout, self.partial, self.cast),
            Target::Snapshots(_) => None, // snapshots accept every layout
        }
    }

    fn open(&self, shared: &messages::Shared, nbytes: u64) -> Option<Arc<Segment>> {
        self.segments.as_ref()?.open(shared, nbytes)
    }

    fn renamed(&self, model: &str, was: Key, key: Key, metadata: &Metadata) {
        match self.targets.get(model) {
            Some(Target::InPlace(model)) => model.rename(was, key, metadata),
            Some(Target::Snapshots(snapshots)) => {
                let mut latest = lock(&snapshots.latest);
                let same = latest.as_ref().filter(|snapshot| (snapshot.epoch, snapshot.version) == was);
                if let Some(renamed) = same.map(|snapshot| snapshot.renamed(key, metadata.clone())) {
                    *latest = Some(Arc::new(renamed));
                }
            }
            None => {}
        }
    }
}

/// Receives the versions of some models and applies them.
///
/// Versions are received in the background, and applied in the thread that calls `receive`. All
/// methods take `&self`: several threads may share a worker.
pub struct Worker {
    name: String,
    addresses: Vec<String>,
    targets: Arc<BTreeMap<String, Target>>,
    functions: Functions,
    alike: bool, // models hold the exact bytes of a version
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let models: Vec<&String> = self.targets.keys().collect();
        write!(f, "Worker({} of {}: {:?})", self.name, self.addresses.join(", "), models)
    }
}

/// A version that was applied.
struct Applied {
    update: Update,
    base: Option<Base>,  // the bytes that patches may build on
    lost: Vec<Overflow>, // tensors that could not hold all values
}

/// Result of an attempt to apply a version.
enum Attempt {
    Applied(Box<Applied>),
    NotNewer,
    /// The model was being read until the deadline, or the worker was closed.
    InUse,
    Stale,
    Failed {
        text: String,
        intact: bool,
    },
    /// The user's function exceeded its time limit. The failure was reported at the deadline.
    TooLong,
}

impl Worker {
    /// Returns a builder of a worker for the publisher at this address: `tcp://HOST:PORT` or
    /// `ipc://PATH`. The text may have several addresses, in order of preference, separated by
    /// commas (see `Builder::fallback`).
    pub fn builder(address: impl Into<String>) -> Builder {
        Builder {
            addresses: Endpoint::addresses_in(&address.into()),
            name: None,
            client: concat!("weightbus-rust/", env!("CARGO_PKG_VERSION")).to_owned(),
            targets: BTreeMap::new(),
            twice: None,
            bytes_max: BYTES_MAX,
            shared_memory: true,
            timing: Timing::default(),
            listener: None,
            functions: Functions { before: None, apply: None, timeout: APPLY_TIMEOUT },
            partial: false,
            cast: false,
            patches: true,
            any_data_host: false,
            keys: None,
        }
    }

    /// Returns the worker's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the publisher's address. Of a worker with several addresses: the one that it is with,
    /// or tries now.
    pub fn address(&self) -> &str {
        &self.addresses[self.shared.address()]
    }

    /// Returns all addresses of the worker, in order of preference.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Applies the newest version that has arrived, and waits for one if necessary. Returns `None`
    /// if no version arrived before the timeout, or if the model was being read until the timeout.
    /// Returns an error if a version or this worker is rejected, or the worker is closed.
    pub fn receive(&self, timeout: Duration) -> Result<Option<Update>, Error> {
        self.check_process()?;
        let deadline = far(timeout);
        loop {
            let staged = match self.ready_queue().take(&self.name, deadline)? {
                Next::Version(staged) => staged,
                Next::Nothing => return Ok(None),
            };
            let (model, key) = (staged.model.clone(), staged.key);
            match self.apply(staged, deadline) {
                Attempt::Applied(done) => return Ok(Some(done.update)),
                Attempt::InUse if Instant::now() >= deadline => return Ok(None),
                Attempt::InUse => {} // closed: `take` returns the error
                Attempt::NotNewer | Attempt::Stale => {} // a newer one replaced it: wait for that
                Attempt::Failed { text, .. } => return Err(turned_down(model, key, text)),
                Attempt::TooLong => return Err(turned_down(model, key, self.functions.too_long())),
            }
        }
    }

    /// Returns an iterator that applies one version after the other. The iterator ends when no
    /// version arrives within `patience`.
    pub fn updates(&self, patience: Duration) -> Updates<'_> {
        Updates { worker: self, patience }
    }

    /// Returns a stream of updates for async tasks, which must not block. A separate thread calls
    /// `receive` for the stream.
    pub fn stream(self: &Arc<Worker>) -> Result<UpdateStream, Error> {
        let what = "no thread for a stream".to_owned();
        UpdateStream::of(self.clone()).map_err(|error| Error::Io { what, error })
    }

    /// Returns the latest snapshot of a model registered with `Builder::snapshots`, if any.
    pub fn snapshot(&self, model: &str) -> Option<Arc<Snapshot>> {
        match self.targets.get(model)? {
            Target::Snapshots(snapshots) => lock(&snapshots.latest).clone(),
            Target::InPlace(_) => None,
        }
    }

    /// Waits until the publisher admits this worker. Returns the publisher's epoch, or `None` at
    /// the timeout.
    pub fn wait_joined(&self, timeout: Duration) -> Result<Option<u64>, Error> {
        self.check_process()?;
        self.ready_queue().wait_joined(&self.name, far(timeout))
    }

    /// Returns the worker's state. The running versions are current. The other fields are at most a
    /// tenth of a second old, unless the worker's thread is busy.
    pub fn state(&self) -> State {
        let mut state = self.shared.state();
        if !self.shared.is_here() {
            return state;
        }
        for (id, target) in self.targets.iter() {
            let model = state.models.entry(id.clone()).or_default();
            let (runs, torn) = target.ran();
            let (running, metadata) =
                runs.map_or((None, Metadata::new()), |(key, metadata)| (Some(key), metadata));
            (model.running, model.metadata, model.torn) = (running, metadata, torn);
        }
        state
    }

    /// Returns a descriptor for `poll` or `epoll`, which is readable while `receive` would return a
    /// version or an error at once. The descriptor belongs to the worker: do not read from it, and
    /// do not close it.
    pub fn ready_fd(&self) -> RawFd {
        if !self.shared.is_here() {
            return self.ready_queue().waker(); // readable, since `receive` returns an error at once
        }
        self.ready_queue().descriptor()
    }

    /// Sends `bye` and closes the sockets. Threads that wait in `receive` get `Error::Closed`.
    /// Dropping the worker closes it, too. `close` waits for the end of the worker's thread, except
    /// if `on_event`'s listener calls it: then the thread ends after the listener has returned. In
    /// a forked child `close` does nothing.
    pub fn close(&self) {
        if !self.shared.is_here() {
            return;
        }
        self.shared.stop();
        if let Some(thread) = join_handle(&self.thread) {
            let _ = thread.join(); // an error is a panic, which the ready queue reports
        }
        for target in self.targets.values() {
            target.gate().wake(); // threads that wait here find the ready queue closed
        }
    }

    /// Returns an error in a forked child: it has none of the worker's threads, and a lock that
    /// such a thread held at the fork stays locked forever.
    fn check_process(&self) -> Result<(), Error> {
        if self.shared.is_here() {
            return Ok(());
        }
        let reason = "it belongs to the process that this one was forked from".to_owned();
        Err(Error::Closed { worker: self.name.clone(), reason })
    }

    fn ready_queue(&self) -> &ReadyQueue {
        &self.shared.ready_queue
    }

    /// Applies a version. Reports the result to the worker's thread before another version can be
    /// applied to this model.
    fn apply(&self, staged: StagedVersion, deadline: Instant) -> Attempt {
        let (model, key) = (staged.model.clone(), staged.key);
        let open = || !self.ready_queue().is_closed();
        self.shared.tell(&model, key, Outcome::Taken);
        match self.targets.get(&model) {
            Some(Target::InPlace(its)) => match its.write(deadline, &open) {
                Some(writing) => self.tell(&model, key, self.apply_in_place(its, &writing, staged)),
                None => self.put_back(staged),
            },
            Some(Target::Snapshots(its)) => match its.gate.write(deadline, &open) {
                Some(_pass) => self.tell(&model, key, self.keep(its, staged)),
                None => self.put_back(staged),
            },
            None => self.tell(&model, key, failed("no such model here".to_owned())),
        }
    }

    /// Reports the result of an attempt to the worker's thread. The caller has released the
    /// version's buffer, unless a base or a snapshot keeps it.
    fn tell(&self, model: &str, key: Key, mut attempt: Attempt) -> Attempt {
        let outcome = match &mut attempt {
            Attempt::Applied(done) => Outcome::Applied {
                digest: done.update.digest.clone(),
                base: done.base.take(),
                lost: std::mem::take(&mut done.lost),
            },
            Attempt::InUse => Outcome::PutBack,
            Attempt::NotNewer => Outcome::Dropped,
            Attempt::Stale => Outcome::Stale,
            Attempt::Failed { text, intact } => Outcome::Failed { text: text.clone(), intact: *intact },
            Attempt::TooLong => Outcome::Late,
        };
        self.shared.tell(model, key, outcome);
        attempt
    }

    /// Puts a version back into the ready queue, unless a newer version has arrived.
    fn put_back(&self, staged: StagedVersion) -> Attempt {
        let (model, key) = (staged.model.clone(), staged.key);
        let attempt = self.tell(&model, key, Attempt::InUse);
        if self.ready_queue().put_back(staged).map(drop).is_some() {
            self.tell(&model, key, Attempt::NotNewer);
        }
        attempt
    }

    fn apply_in_place(&self, model: &Model, writing: &Writing, mut staged: StagedVersion) -> Attempt {
        let (key, layout) = (staged.key, staged.layout.clone());
        if writing.version() >= Some(key) {
            return Attempt::NotNewer; // another thread has applied a newer version
        }
        let offer = offer_of(&staged.model, key, &layout);
        if let Err(attempt) = self.decide(&self.functions.before, offer, Some(writing), true) {
            return attempt;
        }
        let begun = Instant::now();
        let (update, exchanged, lost) = match write(writing, &mut staged) {
            Ok(written) => {
                (update_of(&staged, written.digest, begun.elapsed(), None), written.exchanged, written.lost)
            }
            Err(Unwritten::Stale) => return Attempt::Stale,
            Err(Unwritten::Differs(text)) => return failed(text),
            Err(Unwritten::Torn) => {
                writing.set_ran(Ran::Torn); // before a reader can see the torn weights
                return Attempt::Failed { text: Error::Torn.to_string(), intact: false };
            }
        };
        // without a base, this call frees the buffer for the next version
        let base = base_of(model, staged, self.alike || exchanged);
        writing.set_ran(Ran::Undecided);
        let offer = offer_of(&update.model, key, &layout);
        if let Err(attempt) = self.decide(&self.functions.apply, offer, Some(writing), false) {
            writing.set_ran(Ran::Torn); // W24
            return attempt;
        }
        // The model has the new version's number before a reader can see the new weights, and
        // before the version is acknowledged.
        writing.set_ran(Ran::Version(key, update.metadata.clone()));
        Attempt::Applied(Box::new(Applied { update, base, lost }))
    }

    /// Makes a snapshot of a version, and makes it the latest one unless the user's functions
    /// reject it.
    fn keep(&self, its: &Snapshots, mut staged: StagedVersion) -> Attempt {
        let key = staged.key;
        if lock(&its.latest).as_ref().map(|snapshot| (snapshot.epoch, snapshot.version)) >= Some(key) {
            return Attempt::NotNewer;
        }
        let offer = offer_of(&staged.model, key, &staged.layout);
        if let Err(attempt) = self.decide(&self.functions.before, offer, None, true) {
            return attempt;
        }
        let begun = Instant::now();
        let snapshot = match snapshot_of(&its.buffers, &mut staged) {
            Ok(snapshot) => Arc::new(snapshot),
            Err(attempt) => return attempt,
        };
        let update = update_of(&staged, staged.digest.clone(), begun.elapsed(), Some(snapshot.clone()));
        let offer = Offer { snapshot: Some(&snapshot), ..offer_of(&update.model, key, &snapshot.layout) };
        if let Err(attempt) = self.decide(&self.functions.apply, offer, None, true) {
            return attempt;
        }
        let (layout, bytes) = (snapshot.layout.clone(), Bytes::Kept(snapshot.data.clone()));
        *lock(&its.latest) = Some(snapshot);
        let base = staged.keep.then(|| Base { layout, bytes });
        Attempt::Applied(Box::new(Applied { update, base, lost: Vec::new() }))
    }

    /// Calls the user's function, if any, which may reject the version. With `writing`, the
    /// function sees the model's memory, and readers wait. `intact` is true if the
    /// previous version still runs after a rejection.
    fn decide(
        &self,
        function: &Option<Decide>,
        offer: Offer,
        writing: Option<&Writing>,
        intact: bool,
    ) -> Result<(), Attempt> {
        let function = match function {
            Some(function) => function,
            None => return Ok(()),
        };
        let (call, calling) = self.functions.begin(&offer, intact);
        self.shared.watch(calling);
        let decided = match writing {
            Some(writing) => writing.show(&call, |weights| {
                ask(function, &Offer { weights: Some(weights).filter(|_| !intact), ..offer })
            }),
            None => ask(function, &offer),
        };
        if !call.returned() {
            self.shared.tell_overdue(); // before this model applies another version
            return Err(Attempt::TooLong);
        }
        decided.map_err(|text| Attempt::Failed { text, intact })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if self.shared.is_here() {
            self.close();
        } else {
            forget(replace(&mut self.thread, Mutex::new(None))); // the thread is in the parent
        }
    }
}

fn offer_of<'a>(model: &'a str, (epoch, version): Key, layout: &'a Layout) -> Offer<'a> {
    Offer { model, epoch, version, layout, weights: None, snapshot: None }
}

fn turned_down(model: String, (epoch, version): Key, text: String) -> Error {
    Error::Rejected { model, epoch, version, code: Code::Apply, text }
}

fn update_of(
    staged: &StagedVersion,
    digest: String,
    took: Duration,
    snapshot: Option<Arc<Snapshot>>,
) -> Update {
    let (epoch, version) = staged.key;
    Update {
        model: staged.model.clone(),
        epoch,
        version,
        nbytes: staged.layout.nbytes,
        digest,
        encoding: staged.encoding,
        metadata: staged.metadata.clone(),
        took,
        snapshot,
    }
}

/// Why a version was not written to the model.
enum Unwritten {
    /// The version was replaced before any byte was copied.
    Stale,
    /// The version was overwritten during the copy, so the model holds parts of two versions.
    Torn,
    /// The version has different values for names that share one tensor here. No byte was copied.
    Differs(String),
}

/// Makes a snapshot of a version. Bytes in a buffer are not copied. Bytes in shared memory are
/// copied and, if required, hashed into `staged.digest`.
fn snapshot_of(buffers: &Buffers, staged: &mut StagedVersion) -> Result<Snapshot, Attempt> {
    let stamp = stamp_of(staged);
    let data = match &mut staged.source {
        Source::Buffer(buffer) => {
            buffer.keep();
            std::mem::take(buffer)
        }
        Source::Segment { segment, hash_chunks } => {
            let layout = &staged.layout;
            let mut copy = buffers
                .take_for_copy(layout.nbytes)
                .map_err(|error| failed(format!("no memory for a copy: {}", error)))?;
            let read = segment.read(&stamp, |memory| {
                memory.copy_to(0, &mut copy);
                hashed(memory, layout, *hash_chunks)
            });
            staged.digest = read.map_err(|Stale| Attempt::Stale)?;
            copy
        }
    };
    let ((epoch, version), layout, data) = (staged.key, staged.layout.clone(), Arc::new(data));
    let (model, metadata) = (staged.model.clone(), staged.metadata.clone());
    Ok(Snapshot { model, epoch, version, metadata, layout, data })
}

/// Returns the bytes that patches on this version may build on, or `None` if no patch will build on
/// it. If the model holds the version's exact bytes (`alike`), these are the model's memory,
/// otherwise the buffer.
fn base_of(model: &Model, staged: StagedVersion, alike: bool) -> Option<Base> {
    let StagedVersion { keep, layout, source, .. } = staged;
    let bytes = match source {
        Source::Buffer(_) if keep && alike => Bytes::Model(model.clone()),
        Source::Buffer(mut buffer) if keep => {
            buffer.keep();
            Bytes::Kept(Arc::new(buffer)) // D3
        }
        _ => return None,
    };
    Some(Base { layout, bytes })
}

fn failed(text: String) -> Attempt {
    Attempt::Failed { text, intact: true }
}

/// Result of writing a version to the model.
struct Written {
    digest: String,
    exchanged: bool, // the model's memory and the version's were swapped
    lost: Vec<Overflow>,
}

fn write(writing: &Writing, staged: &mut StagedVersion) -> Result<Written, Unwritten> {
    let (stamp, layout) = (stamp_of(staged), &staged.layout);
    match &mut staged.source {
        Source::Buffer(buffer) => {
            let differ = writing
                .differ(layout, |begin, bytes| bytes.copy_from_slice(&buffer[begin..begin + bytes.len()]));
            if let Some(text) = differ {
                return Err(Unwritten::Differs(text));
            }
            let exchanged = writing.exchange(layout, buffer);
            let mut lost = Vec::new();
            if !exchanged {
                lost = writing
                    .fill(layout, |begin, bytes| bytes.copy_from_slice(&buffer[begin..begin + bytes.len()]));
            }
            Ok(Written { digest: staged.digest.clone(), exchanged, lost })
        }
        Source::Segment { segment, hash_chunks } => {
            let (mut touched, mut differ) = (false, None);
            let read = segment.read(&stamp, |memory| {
                differ = writing.differ(layout, |begin, bytes| memory.copy_to(begin, bytes));
                if differ.is_some() {
                    return Written { digest: String::new(), exchanged: false, lost: Vec::new() };
                }
                touched = true;
                let lost = writing.fill(layout, |begin, bytes| memory.copy_to(begin, bytes));
                Written { digest: hashed(memory, layout, *hash_chunks), exchanged: false, lost }
            });
            // The check after the copy fails only if the publisher broke the rules of the segment:
            // S5.
            let read = read.map_err(|Stale| if touched { Unwritten::Torn } else { Unwritten::Stale })?;
            differ.map_or(Ok(read), |text| Err(Unwritten::Differs(text)))
        }
    }
}

/// Returns the digest of the bytes; empty if `hash_chunks` is 0.
fn hashed(memory: &Reading, layout: &Layout, hash_chunks: u64) -> String {
    if hash_chunks == 0 {
        String::new()
    } else {
        memory.digest(&layout.id, hash_chunks)
    }
}

fn stamp_of(staged: &StagedVersion) -> Stamp {
    let (epoch, version): Key = staged.key;
    Stamp::new(&staged.model, epoch, version)
}

/// Iterator that applies versions.
#[derive(Debug)]
pub struct Updates<'a> {
    worker: &'a Worker,
    patience: Duration,
}

impl Iterator for Updates<'_> {
    type Item = Result<Update, Error>;

    fn next(&mut self) -> Option<Result<Update, Error>> {
        self.worker.receive(self.patience).transpose()
    }
}

fn far(timeout: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    Instant::now() + timeout.min(CENTURY)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn default_name() -> String {
    let host = host_name().replace(|c: char| !is_name(c.encode_utf8(&mut [0; 4])), "-");
    let host: String = host.chars().take(80).collect();
    let suffix = random_digits(2).unwrap_or_default();
    format!("{}-{}-{}", host, std::process::id(), suffix)
}

fn host_name() -> String {
    let name =
        fs::read_to_string("/proc/sys/kernel/hostname").or_else(|_| fs::read_to_string("/etc/hostname"));
    name.unwrap_or_default().trim().chars().take(LABEL_MAX).collect()
}

fn random_digits(bytes: usize) -> io::Result<String> {
    let mut random = vec![0; bytes];
    fs::File::open("/dev/urandom")?.read_exact(&mut random)?;
    Ok(crate::digest::hex(&random))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Tensor;
    use crate::tests::{layout, staged};
    use std::sync::mpsc::channel;

    const LONG: Duration = Duration::from_secs(20);

    /// A worker without a publisher, of a model of one byte.
    fn worker(
        model: &Model,
        timeout: Duration,
        apply: impl Fn(&Offer) -> Result<(), Box<dyn std::error::Error>> + Send + Sync + 'static,
    ) -> Worker {
        let apply: Option<Decide> = Some(Box::new(apply));
        Worker {
            name: "w".to_owned(),
            addresses: vec![String::new()],
            targets: Arc::new(BTreeMap::from([("m".to_owned(), Target::InPlace(model.clone()))])),
            functions: Functions { before: None, apply, timeout },
            alike: true,
            shared: Arc::new(Shared::new().unwrap()),
            thread: Mutex::new(None),
        }
    }

    fn model() -> Model {
        Model::new([Tensor::new("w", &[1], vec![0u8])]).unwrap()
    }

    fn put(worker: &Worker, version: u64) {
        let layout = layout(r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#);
        let buffer = Buffers::default().take(1).unwrap().unwrap();
        worker.ready_queue().put(staged("m", version, layout, buffer));
    }

    /// A version of two tensors of 1 MiB and a number, with all bytes equal.
    fn large(order: [&str; 3], byte: u8) -> StagedVersion {
        let (mut entries, mut begin) = (Vec::new(), 0);
        for name in order {
            let (shape, nbytes) = if name == "number" { ("[]", 4) } else { ("[262144]", 1 << 20) };
            let place = format!("\"data_offsets\":[{},{}]", begin, begin + nbytes);
            entries.push(format!("\"{}\":{{\"dtype\":\"F32\",\"shape\":{},{}}}", name, shape, place));
            begin += nbytes;
        }
        let layout = layout(&format!("{{{}}}", entries.join(",")));
        let mut buffer = Buffers::default().take(layout.nbytes).unwrap().unwrap();
        buffer.fill(byte);
        staged("m", 1, layout, buffer)
    }

    #[test]
    fn pages_change_places_where_a_version_lies_as_the_model_does() {
        let shape = |name| if name == "number" { vec![] } else { vec![262144] };
        let tensors = ["b", "number", "a"].map(|name| Tensor::zeros(name, crate::Dtype::F32, &shape(name)));
        let model = Model::new(tensors).unwrap();
        let places = || {
            let weights = model.read();
            weights.tensors().iter().map(|tensor| tensor.bytes().as_ptr()).collect::<Vec<_>>()
        };
        let before = places();
        for (order, byte, left) in
            [(["a", "b", "number"], 1, 0), (["number", "a", "b"], 2, 2), (["a", "b", "number"], 3, 2)]
        {
            let mut staged = large(order, byte);
            let writing = model.write(Instant::now(), &|| true).unwrap();
            assert!(matches!(write(&writing, &mut staged), Ok(written) if written.digest == "d"));
            drop(writing);
            let all = |bytes: &[u8], byte| bytes.iter().all(|&found| found == byte);
            assert!(model.read().tensors().iter().all(|tensor| all(tensor.bytes(), byte)));
            assert_eq!(places(), before, "they stay where they are");
            if let (Source::Buffer(buffer), true) = (&staged.source, cfg!(target_os = "linux")) {
                assert!(all(buffer, left), "{:?} is copied, {} left", order, buffer[0]);
            }
        }
    }

    #[test]
    fn what_is_found_overdue_is_told_before_what_follows() {
        let model = model();
        let hanging = model.clone();
        let worker = worker(&model, Duration::from_millis(20), move |offer| {
            while offer.version == 1 && !hanging.ran().1 {
                thread::yield_now(); // the call of `ran` decides that the function is late
            }
            Ok(())
        });
        for version in [1, 2] {
            put(&worker, version);
            assert_eq!(worker.receive(LONG).is_ok(), version == 2);
        }
        worker.shared.tell_overdue(); // the call above reported it already
        let told = worker.shared.outcomes.lock().unwrap();
        let told: Vec<_> = told.iter().map(|(_, key, outcome)| (key.1, outcome)).collect();
        assert!(
            matches!(
                told[..],
                [
                    (1, Outcome::Taken),
                    (1, Outcome::Failed { intact: false, .. }),
                    (1, Outcome::Late),
                    (2, Outcome::Taken),
                    (2, Outcome::Applied { .. })
                ]
            ),
            "{:?}",
            told
        );
    }

    #[test]
    fn what_came_of_a_version_is_told_before_its_model_is_free() {
        for good in [true, false] {
            let ((asked, asks), (go, goes)) = (channel(), channel::<()>());
            let (asked, goes) = (Mutex::new(asked), Mutex::new(goes));
            let model = model();
            let worker = worker(&model, LONG, move |_| {
                lock(&asked).send(())?;
                lock(&goes).recv_timeout(LONG)?;
                good.then_some(()).ok_or_else(|| "no".into())
            });
            put(&worker, 1);
            thread::scope(|scope| {
                let applying = scope.spawn(|| worker.receive(LONG));
                asks.recv_timeout(LONG).unwrap();
                let outcomes = worker.shared.outcomes.lock().unwrap(); // nothing can be reported
                go.send(()).unwrap();
                let free = model.write(Instant::now() + Duration::from_millis(100), &|| true).is_some();
                drop(outcomes);
                assert!(!free, "others may apply and tell before");
                assert_eq!(applying.join().unwrap().is_ok(), good);
            });
        }
    }
}
