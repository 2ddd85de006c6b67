//! The worker's public API.

use crate::applying::{ask, Decide, Functions, Offer, APPLY_TIMEOUT, APPLY_TIMEOUT_MAX};
use crate::casting::Overflow;
use crate::control::Control;
use crate::effects::Host;
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::fields::is_name;
use crate::gate::{Gate, Pass};
use crate::keys::WorkerKeys;
use crate::layout::Layout;
use crate::limits::{Timing, BYTES_MAX, LABEL_MAX, MODELS_MAX};
use crate::machine::{State, Wanted, WorkerMachine};
use crate::messages::{self, Hello, Metadata};
use crate::model::{Content, Model, Writing};
use crate::patching::{Base, Bytes};
use crate::protocol::codes::Code;
use crate::raw::os::check_descriptors;
use crate::ready_queue::{Group, Next, ReadyQueue};
use crate::run::{Event, Listener, Loop, Outcome, Shared};
use crate::segment::{Reading, Segment, Segments, Stale, Stamp};
use crate::snapshot::Snapshot;
use crate::staging::{Buffer, Buffers, Source, StagedVersion};
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

// limit of the time for which a thread holds one model of a group while it waits for another
const HOLD_MAX: Duration = Duration::from_millis(50);

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
            Target::Snapshots(snapshots) => &snapshots.gate,
        }
    }

    /// Waits until the target is not in use. Returns exclusive access, or `None` at the deadline or
    /// once `wanted` returns false.
    fn hold(&self, deadline: Instant, wanted: &dyn Fn() -> bool) -> Option<Hold<'_>> {
        match self {
            Target::InPlace(model) => {
                model.write(deadline, wanted).map(|writing| Hold::InPlace(model, writing))
            }
            Target::Snapshots(snapshots) => {
                snapshots.gate.write(deadline, wanted).map(|_pass| Hold::Snapshots { snapshots, _pass })
            }
        }
    }

    /// Returns the running version, as (epoch, number), with its metadata. The bool is true if no
    /// version runs because an apply failed half-way.
    fn running(&self) -> (Option<(Key, Metadata)>, bool) {
        match self {
            Target::InPlace(model) => model.running(),
            Target::Snapshots(snapshots) => {
                let of = |latest: &Arc<Snapshot>| ((latest.epoch, latest.version), latest.metadata.clone());
                (lock(&snapshots.latest).as_ref().map(of), false)
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
    duplicate: Option<String>,
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
    Path(PathBuf),          // empty: no keys
    Given(Vec<WorkerKeys>), // one for all addresses, or one for each
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let models: Vec<&String> = self.targets.keys().collect();
        write!(f, "Builder(of {}: {:?})", self.addresses.join(", "), models)
    }
}

impl Builder {
    /// Adds an address, of the publisher or of one of its relays. The worker changes over to it
    /// when the addresses before it fail; after the last address, the worker tries the first one
    /// again. While the worker uses another address than the first, it returns to the first one
    /// once a publisher answers there.
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
            self.duplicate = Some(id);
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
    /// address or, for `ipc`, at the path of the address plus a suffix. If the endpoint is elsewhere,
    /// the worker fetches all versions, which is slower. With `true`, a publisher can make the worker
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
        self.keys = Some(Keys::Path(path.into()));
        self
    }

    /// Sets this worker's keys instead of the path of a file.
    pub fn worker_keys(self, keys: WorkerKeys) -> Builder {
        self.worker_keys_of_each([keys])
    }

    /// Sets this worker's keys for each of its addresses, in the same order.
    pub fn worker_keys_of_each(mut self, keys: impl IntoIterator<Item = WorkerKeys>) -> Builder {
        self.keys = Some(Keys::Given(keys.into_iter().collect()));
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
        let pattern = keys.first().map_or("*", WorkerKeys::name);
        let name = self.name.unwrap_or_else(|| pattern.replace('*', &default_name()));
        if !is_name(&name) {
            return Err(Error::Setup(format!("{:?} cannot name a worker: {}", name, NAME_RULE)));
        }
        check_descriptors()
            .map_err(|error| Error::Io { what: format!("cannot connect to {}", self.addresses[0]), error })?;
        let start_error = |what: &str| {
            let what = format!("worker {:?} cannot start: {}", name, what);
            move |error| Error::Io { what, error }
        };
        let identity = Hello {
            name: name.clone(),
            instance: random_digits(16).map_err(start_error("no random numbers"))?,
            client: self.client.chars().take(LABEL_MAX).collect(),
            host: host_name(),
            pid: std::process::id().into(),
            ..Hello::default()
        };
        let targets = Arc::new(self.targets);
        let (partial, cast) = (self.partial, self.cast);
        let exact = !partial && !cast; // a model holds the exact bytes of a version
        let wanted: Vec<Wanted> =
            targets.iter().map(|(model, target)| wanted(model, target, exact)).collect();
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
            machine.require_sealed();
        }
        if self.patches {
            machine.accept_patches();
        }
        let shared = Arc::new(Shared::new().map_err(start_error("no sockets"))?);
        let payload_max = machine.payload_bytes_max();
        let control = Control::connect(&self.addresses, &keys, payload_max, shared.waker())?;
        let control = control.any_data_host(self.any_data_host);
        let (addresses, listener) = (self.addresses.clone(), self.listener);
        let run = Loop::new(machine, control, addresses, name.clone(), shared.clone(), listener, host);
        let thread = thread::Builder::new().name("weightbus-worker".to_owned());
        let thread = thread.spawn(move || run.run()).map_err(start_error("no thread"))?;
        let (addresses, functions) = (self.addresses, self.functions);
        Ok(Worker { name, addresses, targets, functions, exact, shared, thread: Mutex::new(Some(thread)) })
    }

    /// Returns this worker's keys: none, one entry for all addresses, or one for each.
    fn own_keys(&mut self) -> Result<Vec<WorkerKeys>, Error> {
        let (name, count) = (self.name.as_deref(), self.addresses.len());
        let keys = match self.keys.take() {
            Some(Keys::Given(keys)) if keys.is_empty() => {
                let text = "an empty list of keys; give keys, or .keys(\"\") for none";
                return Err(Error::Keys(text.to_owned()));
            }
            Some(Keys::Given(keys)) => keys,
            Some(Keys::Path(path)) => WorkerKeys::read_all(&path, name, count)?,
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
        if let Some(id) = &self.duplicate {
            return Err(Error::Setup(format!("model {:?} is given twice; give it once", id)));
        }
        if self.targets.is_empty() || self.targets.len() > MODELS_MAX {
            let count = self.targets.len();
            return Err(Error::Setup(format!(
                "{} models are given; a worker accepts 1 to {}",
                count, MODELS_MAX
            )));
        }
        if let Some(id) = self.targets.keys().find(|id| !is_name(id)) {
            return Err(Error::Setup(format!("{:?} cannot name a model: {}", id, NAME_RULE)));
        }
        if self.functions.timeout.is_zero() || self.functions.timeout > APPLY_TIMEOUT_MAX {
            let text = format!("an apply_timeout of {:?}", self.functions.timeout);
            return Err(Error::Setup(text + "; it must be more than 0, and at most a day"));
        }
        Ok(())
    }
}

fn wanted(model: &str, target: &Target, exact: bool) -> Wanted {
    let nbytes = match target {
        Target::InPlace(model) if exact => model.nbytes(),
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
    exact: bool, // a model holds the exact bytes of a version
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let models: Vec<&String> = self.targets.keys().collect();
        write!(f, "Worker({} of {}: {:?})", self.name, self.addresses.join(", "), models)
    }
}

/// Result of an attempt to apply versions.
enum Attempt {
    /// All are applied, except those for whose model a newer version runs.
    Applied(Vec<Update>),
    /// A model was being read until the deadline, or the worker was closed.
    InUse,
    /// The versions are gone from shared memory.
    Stale,
}

/// Why a version was not applied.
enum Unapplied {
    Stale,
    Failed(String),
    /// The user's function exceeded its time limit. The failure was reported at the deadline.
    Overdue,
}

/// Exclusive access to a target.
enum Hold<'a> {
    InPlace(&'a Model, Writing<'a>),
    Snapshots { snapshots: &'a Snapshots, _pass: Pass<'a> },
}

impl Hold<'_> {
    /// Returns the version that the target has.
    fn version(&self) -> Option<Key> {
        match self {
            Hold::InPlace(_, writing) => writing.version(),
            Hold::Snapshots { snapshots, .. } => {
                lock(&snapshots.latest).as_ref().map(|snapshot| (snapshot.epoch, snapshot.version))
            }
        }
    }
}

/// A version that is being applied.
struct Work<'a> {
    staged: StagedVersion,
    hold: Hold<'a>,
    /// True if the model's memory was written, so that the previous version cannot run any more.
    written: bool,
    made: Option<Made>,
}

/// The result of writing a version into its target.
struct Made {
    update: Update,
    base: Option<Base>,  // the bytes that patches may build on
    lost: Vec<Overflow>, // tensors that could not hold all values
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
            duplicate: None,
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

    /// Returns the address that the worker uses or tries now.
    pub fn address(&self) -> &str {
        &self.addresses[self.shared.address_index()]
    }

    /// Returns all addresses of the worker, in order of preference.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Applies the newest version that has arrived, and waits for one if necessary. Returns `None`
    /// if no version arrived before the timeout, or if the model was being read until the timeout.
    /// Returns an error if a version or this worker is rejected, or the worker is closed.
    ///
    /// Versions of several models that were published as one are applied in one call, which returns
    /// the first; later calls return the others. No reader has one of these models meanwhile. The
    /// user's functions are called for each of the versions before any version is reported. If one
    /// version is rejected, so are the others.
    pub fn receive(&self, timeout: Duration) -> Result<Option<Update>, Error> {
        self.check_process()?;
        let deadline = deadline_after(timeout);
        loop {
            let group = match self.ready_queue().take(&self.name, deadline)? {
                Next::Versions(group) => group,
                Next::Applied(update) => return Ok(Some(update)),
                Next::Nothing => return Ok(None),
            };
            match self.apply(group, deadline)? {
                Attempt::Applied(updates) => {
                    let mut updates = updates.into_iter();
                    if let Some(first) = updates.next() {
                        updates.for_each(|update| self.ready_queue().add_applied(update));
                        return Ok(Some(first));
                    }
                }
                Attempt::InUse if Instant::now() >= deadline => return Ok(None),
                Attempt::InUse => {} // closed: `take` returns the error
                Attempt::Stale => {} // a newer version replaced it: wait for the newer one
            }
        }
    }

    /// Returns an iterator that applies one version after the other. The iterator ends if no
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
        self.ready_queue().wait_joined(&self.name, deadline_after(timeout))
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
            let (runs, torn) = target.running();
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

    /// Applies versions at once. Reports the result to the worker's thread before another version
    /// can be applied to these models. If one version is rejected, returns an error, and none runs.
    fn apply(&self, mut group: Group, deadline: Instant) -> Result<Attempt, Error> {
        group.sort_by(|one, other| one.model.cmp(&other.model));
        for staged in &group {
            self.shared.report(&staged.model, staged.key, Outcome::Taken);
        }
        let holds = match self.hold(&group, deadline) {
            Some(holds) => holds,
            None => return Ok(self.put_back(group)),
        };
        let mut works = Vec::new();
        for (staged, hold) in group.into_iter().zip(holds) {
            if hold.version() < Some(staged.key) {
                works.push(Work { staged, hold, written: false, made: None });
            } else {
                let (model, key) = (staged.model.clone(), staged.key);
                drop(staged); // another thread was faster
                self.shared.report(&model, key, Outcome::Dropped);
            }
        }
        type Step = fn(&Worker, &mut Work) -> Result<(), Unapplied>;
        let steps: [Step; 4] =
            [Worker::call_before_apply, Worker::check_ties, Worker::write, Worker::call_apply];
        for step in steps {
            for at in 0..works.len() {
                if let Err(why) = step(self, &mut works[at]) {
                    return self.give_up(works, at, why);
                }
            }
        }
        run_at_once(&mut works);
        Ok(Attempt::Applied(works.iter_mut().filter_map(|work| self.report_applied(work)).collect()))
    }

    /// Waits until none of these versions' targets is in use. Returns exclusive access to each, or
    /// `None` at the deadline or once the worker is closed.
    ///
    /// While this thread waits for one target, it holds other targets for at most `HOLD_MAX`:
    /// another thread may read the awaited target, and wait for a target that this thread holds.
    fn hold(&self, group: &Group, deadline: Instant) -> Option<Vec<Hold<'_>>> {
        let open = || !self.ready_queue().is_closed();
        let targets: Vec<&Target> = group.iter().map(|staged| &self.targets[&staged.model]).collect();
        let mut first = 0;
        loop {
            let mut holds = BTreeMap::from([(first, targets[first].hold(deadline, &open)?)]);
            let soon = deadline.min(Instant::now() + HOLD_MAX);
            let busy = (0..targets.len()).filter(|at| *at != first).find(|&at| {
                let hold = targets[at].hold(soon, &open);
                hold.map(|hold| holds.insert(at, hold)).is_none()
            });
            match busy {
                Some(at) => first = at,
                None => return Some(holds.into_values().collect()),
            }
        }
    }

    /// Puts versions back into the ready queue. Drops those for whose model a newer one has arrived.
    fn put_back(&self, group: Group) -> Attempt {
        for staged in &group {
            self.shared.report(&staged.model, staged.key, Outcome::PutBack);
        }
        for unwanted in self.ready_queue().put_back(group) {
            let (model, key) = (unwanted.model.clone(), unwanted.key);
            drop(unwanted); // its buffer is free before the worker's thread gets the report
            self.shared.report(&model, key, Outcome::Dropped);
        }
        Attempt::InUse
    }

    fn call_before_apply(&self, work: &mut Work) -> Result<(), Unapplied> {
        let Work { staged, hold, .. } = work;
        let offer = offer_of(&staged.model, staged.key, &staged.layout);
        let writing = match hold {
            Hold::InPlace(_, writing) => Some(&*writing),
            Hold::Snapshots { .. } => None,
        };
        self.decide(&self.functions.before, offer, writing, true)
    }

    /// Rejects a version with different values for names that share one tensor here.
    fn check_ties(&self, work: &mut Work) -> Result<(), Unapplied> {
        match (&work.hold, &work.staged.source) {
            (Hold::InPlace(_, writing), Source::Buffer(buffer)) => {
                let copy =
                    |begin, bytes: &mut [u8]| bytes.copy_from_slice(&buffer[begin..begin + bytes.len()]);
                writing
                    .tie_fault(&work.staged.layout, copy)
                    .map_or(Ok(()), |text| Err(Unapplied::Failed(text)))
            }
            _ => Ok(()), // a version in shared memory is checked when it is written
        }
    }

    /// Writes a version into its model, or makes a snapshot of it.
    fn write(&self, work: &mut Work) -> Result<(), Unapplied> {
        let begun = Instant::now();
        let staged = &mut work.staged;
        work.made = Some(match &work.hold {
            Hold::InPlace(model, writing) => {
                let Written { digest, exchanged, lost } = match write(writing, staged) {
                    Ok(written) => written,
                    Err(Unwritten::Stale) => return Err(Unapplied::Stale),
                    Err(Unwritten::Differs(text)) => return Err(Unapplied::Failed(text)),
                    Err(Unwritten::Torn) => {
                        work.written = true;
                        return Err(Unapplied::Failed(Error::Torn.to_string()));
                    }
                };
                let update = update_of(staged, digest, begun.elapsed(), None);
                // without a base, this call frees the buffer for the next version
                let base = base_of(model, staged, self.exact || exchanged);
                writing.set_content(Content::Undecided);
                work.written = true;
                Made { update, base, lost }
            }
            Hold::Snapshots { snapshots, .. } => {
                let snapshot = Arc::new(snapshot_of(&snapshots.buffers, staged)?);
                let (layout, bytes) = (snapshot.layout.clone(), Bytes::Kept(snapshot.data.clone()));
                let base = staged.keep.then(|| Base { layout, bytes });
                let update = update_of(staged, staged.digest.clone(), begun.elapsed(), Some(snapshot));
                Made { update, base, lost: Vec::new() }
            }
        });
        Ok(())
    }

    fn call_apply(&self, work: &mut Work) -> Result<(), Unapplied> {
        let Work { staged, hold, made, .. } = work;
        let snapshot = made.as_ref().and_then(|made| made.update.snapshot.as_ref());
        let offer = Offer { snapshot, ..offer_of(&staged.model, staged.key, &staged.layout) };
        match hold {
            Hold::InPlace(_, writing) => self.decide(&self.functions.apply, offer, Some(writing), false),
            Hold::Snapshots { .. } => self.decide(&self.functions.apply, offer, None, true),
        }
    }

    /// Reports a version that runs, and returns it.
    fn report_applied(&self, work: &mut Work) -> Option<Update> {
        let Made { update, base, lost } = work.made.take()?;
        let digest = update.digest.clone();
        self.shared.report(&update.model, work.staged.key, Outcome::Applied { digest, base, lost });
        Some(update)
    }

    /// Reports that no version of a group was applied, because of the failure `why` of the version
    /// at index `at`. A model that was written runs no version now.
    fn give_up(&self, works: Vec<Work>, at: usize, why: Unapplied) -> Result<Attempt, Error> {
        let (model, key) = (works[at].staged.model.clone(), works[at].staged.key);
        let text = match &why {
            Unapplied::Stale => "it is gone from shared memory".to_owned(),
            Unapplied::Failed(text) => text.clone(),
            Unapplied::Overdue => self.functions.overdue_text(),
        };
        let torn = works.iter().any(|work| work.written);
        for (index, Work { staged, hold, written, made }) in works.into_iter().enumerate() {
            if let (Hold::InPlace(_, writing), true) = (&hold, written) {
                writing.set_content(Content::Torn); // W24: before a reader can see these weights
            }
            let (other_model, other_key) = (staged.model.clone(), staged.key);
            drop((staged, made)); // its buffer is free before the worker's thread gets the report
            let (intact, again) = (!written, torn && !written);
            let outcome = match &why {
                _ if index != at => {
                    let text =
                        format!("version {} of {}, published with this one, failed: {}", key.1, model, text);
                    Outcome::Failed { text, intact, again }
                }
                Unapplied::Stale => Outcome::Stale,
                Unapplied::Failed(_) => Outcome::Failed { text: text.clone(), intact, again },
                Unapplied::Overdue => Outcome::Late,
            };
            self.shared.report(&other_model, other_key, outcome);
        }
        match why {
            Unapplied::Stale => Ok(Attempt::Stale),
            _ => Err(rejected(model, key, text)),
        }
    }

    /// Calls the user's function, if any, which may reject the version. With `writing`, readers of
    /// the model wait during the call. `intact` is true if the previous version still runs after a
    /// rejection; otherwise the function gets the model's weights.
    fn decide(
        &self,
        function: &Option<Decide>,
        offer: Offer,
        writing: Option<&Writing>,
        intact: bool,
    ) -> Result<(), Unapplied> {
        let function = match function {
            Some(function) => function,
            None => return Ok(()),
        };
        let (call, calling) = self.functions.begin(&offer, intact);
        self.shared.watch(calling);
        let decided = match writing {
            Some(writing) => writing.call_with_weights(&call, |weights| {
                ask(function, &Offer { weights: Some(weights).filter(|_| !intact), ..offer })
            }),
            None => ask(function, &offer),
        };
        if !call.returned() {
            self.shared.report_overdue(); // before this model applies another version
            return Err(Unapplied::Overdue);
        }
        decided.map_err(Unapplied::Failed)
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

fn rejected(model: String, (epoch, version): Key, text: String) -> Error {
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
fn snapshot_of(buffers: &Buffers, staged: &mut StagedVersion) -> Result<Snapshot, Unapplied> {
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
                .map_err(|error| Unapplied::Failed(format!("no memory for a copy: {}", error)))?;
            let read = segment.read(&stamp, |memory| {
                memory.copy_to(0, &mut copy);
                hashed(memory, layout, *hash_chunks)
            });
            staged.digest = read.map_err(|Stale| Unapplied::Stale)?;
            copy
        }
    };
    let ((epoch, version), layout, data) = (staged.key, staged.layout.clone(), Arc::new(data));
    let (model, metadata) = (staged.model.clone(), staged.metadata.clone());
    Ok(Snapshot { model, epoch, version, metadata, layout, data })
}

/// Returns the bytes that patches on this version may build on: the model's memory if it holds the
/// version's exact bytes (`exact`), otherwise the version's buffer. Returns `None` if no patch will
/// build on the version. Takes the buffer out of `staged`.
fn base_of(model: &Model, staged: &mut StagedVersion, exact: bool) -> Option<Base> {
    let bytes = match replace(&mut staged.source, Source::Buffer(Buffer::default())) {
        Source::Buffer(_) if staged.keep && exact => Bytes::Model(model.clone()),
        Source::Buffer(mut buffer) if staged.keep => {
            buffer.keep();
            Bytes::Kept(Arc::new(buffer)) // D3
        }
        _ => return None,
    };
    Some(Base { layout: staged.layout.clone(), bytes })
}

/// Makes written versions run, before a reader can see one of them.
fn run_at_once(works: &mut [Work]) {
    let snapshots = works.iter().filter_map(|work| match &work.hold {
        Hold::Snapshots { snapshots, .. } => Some(lock(&snapshots.latest)),
        Hold::InPlace(..) => None,
    });
    let mut latest = snapshots.collect::<Vec<_>>().into_iter(); // all are locked until all are replaced
    let mut replaced = Vec::new();
    for work in works.iter() {
        let update = work.made.as_ref().map(|made| &made.update);
        match (&work.hold, update) {
            (Hold::InPlace(_, writing), Some(update)) => {
                writing.set_content(Content::Version(work.staged.key, update.metadata.clone()));
            }
            (Hold::Snapshots { .. }, Some(update)) => replaced.extend(latest.next().map(|mut latest| {
                *latest = update.snapshot.clone();
                latest
            })),
            _ => {}
        }
    }
}

/// Result of writing a version to the model.
struct Written {
    digest: String,
    exchanged: bool, // true if the pages of the model and the version were exchanged
    lost: Vec<Overflow>,
}

fn write(writing: &Writing, staged: &mut StagedVersion) -> Result<Written, Unwritten> {
    let (stamp, layout) = (stamp_of(staged), &staged.layout);
    match &mut staged.source {
        Source::Buffer(buffer) => {
            let exchanged = writing.exchange(layout, buffer);
            let mut lost = Vec::new();
            if !exchanged {
                lost = writing
                    .fill(layout, |begin, bytes| bytes.copy_from_slice(&buffer[begin..begin + bytes.len()]));
            }
            Ok(Written { digest: staged.digest.clone(), exchanged, lost })
        }
        Source::Segment { segment, hash_chunks } => {
            let (mut touched, mut fault) = (false, None);
            let read = segment.read(&stamp, |memory| {
                fault = writing.tie_fault(layout, |begin, bytes| memory.copy_to(begin, bytes));
                if fault.is_some() {
                    return Written { digest: String::new(), exchanged: false, lost: Vec::new() };
                }
                touched = true;
                let lost = writing.fill(layout, |begin, bytes| memory.copy_to(begin, bytes));
                Written { digest: hashed(memory, layout, *hash_chunks), exchanged: false, lost }
            });
            // The check after the copy fails only if the publisher broke the rules of the segment:
            // S5.
            let read = read.map_err(|Stale| if touched { Unwritten::Torn } else { Unwritten::Stale })?;
            fault.map_or(Ok(read), |text| Err(Unwritten::Differs(text)))
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

fn deadline_after(timeout: Duration) -> Instant {
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
            exact: true,
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
        worker.ready_queue().put(vec![staged("m", version, layout, buffer)]);
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
            while offer.version == 1 && !hanging.running().1 {
                thread::yield_now(); // the call of `ran` decides that the function is late
            }
            Ok(())
        });
        for version in [1, 2] {
            put(&worker, version);
            assert_eq!(worker.receive(LONG).is_ok(), version == 2);
        }
        worker.shared.report_overdue(); // the call above reported it already
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

    /// A worker without a publisher, of models a and b in place and snapshots of c.
    fn of_three(models: [&Model; 2], functions: Functions) -> Worker {
        let [a, b] = models.map(|model| Target::InPlace(model.clone()));
        let c = Target::Snapshots(Snapshots::default());
        let targets = [("a", a), ("b", b), ("c", c)].map(|(id, target)| (id.to_owned(), target));
        let mut worker = worker(models[0], LONG, |_| Ok(()));
        (worker.targets, worker.functions) = (Arc::new(BTreeMap::from(targets)), functions);
        worker
    }

    fn put_three(worker: &Worker, version: u64, bytes: [u8; 3]) {
        let layout = || layout(r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#);
        let of = |model, byte| {
            let mut buffer = Buffers::default().take(1).unwrap().unwrap();
            buffer.fill(byte);
            staged(model, version, layout(), buffer)
        };
        let group = [("c", bytes[2]), ("a", bytes[0]), ("b", bytes[1])];
        worker.ready_queue().put(group.map(|(model, byte)| of(model, byte)).into());
    }

    fn told(worker: &Worker) -> Vec<String> {
        let told = std::mem::take(&mut *worker.shared.outcomes.lock().unwrap());
        let word = |outcome: &Outcome| match outcome {
            Outcome::Failed { intact, again, .. } => format!("failed intact={} again={}", intact, again),
            Outcome::Applied { .. } => "applied".to_owned(),
            other => format!("{:?}", other).to_lowercase(),
        };
        told.iter().map(|(model, _, outcome)| format!("{} {}", model, word(outcome))).collect()
    }

    #[test]
    fn versions_that_are_published_as_one_are_applied_in_one_call() {
        let models = [model(), model()];
        let (calls, seen) = channel();
        let calls = Mutex::new(calls);
        let apply: Decide = Box::new(move |offer: &Offer| Ok(lock(&calls).send(offer.model.to_owned())?));
        let functions = Functions { before: None, apply: Some(apply), timeout: LONG };
        let worker = of_three([&models[0], &models[1]], functions);
        put_three(&worker, 1, [1, 2, 3]);
        let first = worker.receive(LONG).unwrap().unwrap();
        let runs = [
            models[0].running().0,
            models[1].running().0,
            worker.snapshot("c").map(|s| ((1, s.version), s.metadata.clone())),
        ];
        assert!(runs.iter().all(|runs| matches!(runs, Some(((_, 1), _)))), "{:?}", runs);
        assert_eq!(seen.try_iter().collect::<Vec<_>>(), ["a", "b", "c"]);
        let expected = ["a taken", "b taken", "c taken", "a applied", "b applied", "c applied"];
        assert_eq!(told(&worker), expected, "each is reported once all run");
        let others: Vec<_> = worker.updates(Duration::ZERO).map(|update| update.unwrap().model).collect();
        assert_eq!((&first.model[..], &others[..]), ("a", &["b".to_owned(), "c".to_owned()][..]));
    }

    #[test]
    fn one_that_is_rejected_takes_the_others_with_it() {
        for (before, expected) in [
            (
                true,
                [
                    "a failed intact=true again=false",
                    "b failed intact=true again=false",
                    "c failed intact=true again=false",
                ],
            ),
            (
                false,
                [
                    "a failed intact=false again=false",
                    "b failed intact=false again=false",
                    "c failed intact=true again=true",
                ],
            ),
        ] {
            let models = [model(), model()];
            let no: Decide = Box::new(|offer: &Offer| match offer.model {
                "b" => Err("no".into()),
                _ => Ok(()),
            });
            let yes: Option<Decide> = None;
            let (before, apply) = if before { (Some(no), yes) } else { (yes, Some(no)) };
            let worker = of_three([&models[0], &models[1]], Functions { before, apply, timeout: LONG });
            put_three(&worker, 1, [1, 2, 3]);
            let error = worker.receive(LONG).unwrap_err().to_string();
            assert!(error.contains("version 1 of b") && error.contains("no"), "{}", error);
            assert_eq!(told(&worker)[3..], expected);
            assert!(worker.snapshot("c").is_none());
        }
    }

    #[test]
    fn whoever_reads_one_model_and_wants_another_holds_nobody_up() {
        let models = [model(), model()];
        let functions = || Functions { before: None, apply: None, timeout: LONG };
        let worker = of_three([&models[0], &models[1]], functions());
        put_three(&worker, 1, [1, 2, 3]);
        thread::scope(|scope| {
            let b = models[1].read();
            let applying = scope.spawn(|| worker.receive(LONG).unwrap().is_some());
            while told(&worker).is_empty() {
                thread::yield_now();
            }
            let a = models[0].read(); // the thread that applies lets go of it
            assert_eq!((a.version(), b.version()), (None, None), "both of one time");
            drop((a, b));
            assert!(applying.join().unwrap());
        });
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
