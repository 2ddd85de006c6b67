//! Builds a publisher: checks its settings, then binds its sockets and starts its threads.

use super::bases::Bases;
use super::content::{Content, Copier};
use super::effects::WorkerEvent;
use super::endpoints::{check_exposure, ListenAddress};
use super::keeper::Keeper;
use super::keys::PublisherKeys;
use super::listening::bind_error;
use super::machine::{self, PublisherMachine};
use super::pub_socket::PubSocket;
use super::router::Router;
use super::run::{Loop, OnWorker, Shared, Work};
use super::sealer::{self, Sealer};
use super::state::{StateFolder, Stored, HISTORY_MAX};
use super::timed_lock::TimedLock;
use super::watch::Watch;
use super::{PublishState, Publisher, DAY};
use crate::error::Error;
use crate::limits::{Timing, CHUNK_BYTES_MAX, INTEGER_MAX, PATCHES_MAX};
use crate::raw::os::check_descriptors;
use crate::raw::socket::running_clock;
use std::collections::HashMap;
use std::fs;
use std::io::{self, Read};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

// By default, patches may build on two versions: the one that most workers run, and its predecessor.
const BASES: usize = 2;
const CHUNK_BYTES: u64 = 1 << 20; // larger chunks were not faster

/// The settings of a publisher; see `Publisher::builder`.
pub struct PublisherBuilder {
    address: String,
    data: Option<String>,
    advertise: Option<String>,
    epoch: Option<u64>,
    chunk_bytes: u64,
    ping: Duration,
    lost_after: Duration,
    state: Option<PathBuf>,
    history: usize,
    expect: usize,
    keys: Option<PathBuf>, // `None`: from the environment; empty: no keys
    rekey: Duration,
    insecure: bool,
    bases: (usize, u64),
    on_worker: Option<OnWorker>,
}

impl PublisherBuilder {
    pub(super) fn new(address: &str) -> PublisherBuilder {
        PublisherBuilder {
            address: address.to_owned(),
            data: None,
            advertise: None,
            epoch: None,
            chunk_bytes: CHUNK_BYTES,
            ping: Duration::from_secs(1),
            lost_after: Duration::from_secs(5),
            state: None,
            history: 0,
            expect: 0,
            keys: None,
            rekey: DAY,
            insecure: false,
            bases: (BASES, u64::MAX),
            on_worker: None,
        }
    }

    /// Sets the address at which the data socket is bound. Default: the port above the control
    /// port, or a path beside the control path.
    pub fn data(mut self, address: &str) -> PublisherBuilder {
        self.data = Some(address.to_owned());
        self
    }

    /// Sets the data address that is sent to workers. Default: derived from the bound address.
    pub fn advertise(mut self, address: &str) -> PublisherBuilder {
        self.advertise = Some(address.to_owned());
        self
    }

    /// Sets the epoch, which then never changes. A worker rejects a publisher whose epoch is below
    /// that of a version which the worker has applied.
    ///
    /// Default: the milliseconds since 1970. If a wrong clock makes this epoch too low, the publisher
    /// raises the epoch when a worker reports that the previous publisher started earlier.
    pub fn epoch(mut self, epoch: u64) -> PublisherBuilder {
        self.epoch = Some(epoch);
        self
    }

    /// Sets the size of a chunk in bytes: 1 to 2^26. Default: 1 MiB.
    pub fn chunk_bytes(mut self, bytes: u64) -> PublisherBuilder {
        self.chunk_bytes = bytes;
        self
    }

    /// Sets the time between two pings (default: 1 s), and the silence after which a worker is lost
    /// (default: 5 s; at least twice `ping`).
    pub fn timing(mut self, ping: Duration, lost_after: Duration) -> PublisherBuilder {
        (self.ping, self.lost_after) = (ping, lost_after);
        self
    }

    /// Sets a folder that keeps the epoch and the latest version of each model after the publisher
    /// ends. The next publisher with that folder takes a higher epoch, whatever the clocks say, and
    /// offers these versions again. Publishers in Python use the same format, so that either can
    /// take over from the other. A thread writes each version shortly after its publish; `close`
    /// waits at most 10 s for the last versions.
    pub fn state(mut self, folder: impl Into<PathBuf>) -> PublisherBuilder {
        self.state = Some(folder.into());
        self
    }

    /// Sets how many older versions of each model the state folder keeps: at most 10,000. A
    /// publisher in Python can go back to such a version. Default: 0.
    pub fn history(mut self, versions: usize) -> PublisherBuilder {
        self.history = versions;
        self
    }

    /// Sets the default of `PublishOptions::expect`: the least number of workers for `Require::All`.
    pub fn expect(mut self, workers: usize) -> PublisherBuilder {
        self.expect = workers;
        self
    }

    /// Sets how many versions of each model are kept in memory as bases of patches (1 to 8), and
    /// the most bytes that these versions take. A worker that runs a base receives only the changes
    /// since that version. Default: 2 versions of any size. A version is kept only if some worker
    /// accepts patches, and never if it is published as `Encoding::Raw`.
    pub fn bases(mut self, versions: usize, bytes_max: u64) -> PublisherBuilder {
        self.bases = (versions, bytes_max);
        self
    }

    /// Sets the folder of keys, which `weightbus keygen` makes. Only workers with an allowed key
    /// can connect, each under the name of its key. All published messages are encrypted. The
    /// folder is checked repeatedly: adding a file admits a worker, and removing the file
    /// disconnects that worker. Default: the folder in the environment variable `WEIGHTBUS_KEYS`.
    /// If that is not set, or the path is empty, there are no keys.
    pub fn keys(mut self, folder: impl Into<PathBuf>) -> PublisherBuilder {
        self.keys = Some(folder.into());
        self
    }

    /// Sets the time after which the group key, which encrypts published messages, is replaced.
    /// Default: a day.
    pub fn rekey(mut self, life: Duration) -> PublisherBuilder {
        self.rekey = life;
        self
    }

    /// Allows to bind an address that other hosts can reach without keys: then any peer that
    /// connects gets the weights.
    pub fn insecure(mut self) -> PublisherBuilder {
        self.insecure = true;
        self
    }

    /// Sets a function that the publisher's thread calls on each event of a worker. The function
    /// must not block. It may call `publish_later` and `close`. It must not call `publish`,
    /// `workers` or `wait_until`: these would wait for the publisher's thread until they time out.
    pub fn on_worker(mut self, listener: impl FnMut(&WorkerEvent) + Send + 'static) -> PublisherBuilder {
        self.on_worker = Some(Box::new(listener));
        self
    }

    /// Binds the sockets and starts the publisher's thread.
    pub fn bind(self) -> Result<Publisher, Error> {
        let (listen_at, data, keys) = self.checked()?;
        let timing = timing_of(self.ping, self.lost_after)?;
        check_descriptors().map_err(|error| bind_error(&listen_at.endpoint(), error))?;
        let state = self.state.as_deref().map(|path| StateFolder::open(path, self.history)).transpose()?;
        let epoch = new_epoch(self.epoch, state.as_ref())?;
        let mut state = state.map(|folder| Restored::read(folder, || self.published()));
        let io_error = |what: &str| {
            let what = what.to_owned();
            move |error: io::Error| Error::Io { what, error }
        };
        let secret = keys.as_ref().map(|keys| &keys.secret[..]);
        let (router, bound) = Router::bind(&listen_at, secret)?;
        let (mut data, data_place) = match data {
            Some(data) => PubSocket::bind(&data)?,
            None => bind_beside(&listen_at, &bound)?,
        };
        if let Some(restored) = &mut state {
            // Write the epoch before any worker learns it, but after the bind: a publisher that
            // cannot bind uses up no epoch.
            restored.folder.record_epoch(epoch, &restored.stored)?;
        }
        let advertised = self.advertise.unwrap_or_else(|| data_place.advertised(&bound));
        let started = running_clock();
        let age: machine::Age = Box::new(move || running_clock().saturating_sub(started));
        let age = Some(age).filter(|_| self.epoch.is_none());
        let mut machine = PublisherMachine::new(epoch, &advertised, timing, age, Some(Box::new(draw_token)))
            .clock(Box::new(unix_millis));
        let shared = Arc::new(Shared::new().map_err(io_error("no descriptors for a publisher"))?);
        let (mut sealer, mut watch) = (None, None);
        if let Some(keys) = keys {
            data.require_tickets();
            let new = Sealer::new(
                key_drawer().map_err(io_error("no random numbers"))?,
                Some(self.rekey),
                Duration::ZERO,
            );
            machine = machine.trust(keys.by_key, new.key());
            sealer = Some(new);
            let started = Watch::start(keys.allowed, timing.ping, shared.clone());
            watch = Some(started.map_err(io_error("no thread for keys"))?);
        }
        machine.address = bound.endpoint();
        let (mut models, mut keeper) = (HashMap::new(), None);
        if let Some(mut restored) = state {
            restored.offer_versions(&mut machine);
            for fault in restored.folder.take_faults() {
                shared.submit(Work::Notice(fault))?;
            }
            models = restored.models;
            keeper = Some(
                Keeper::start(restored.folder, shared.clone()).map_err(io_error("no thread for the disk"))?,
            );
        }
        let thread = Loop::new(machine, router, data, shared.clone(), keeper, self.on_worker, sealer);
        let thread = thread::Builder::new().name("weightbus-publisher".to_owned()).spawn(|| thread.run());
        Ok(Publisher {
            address: bound.endpoint(),
            data_address: data_place.endpoint(),
            epoch,
            chunk_bytes: self.chunk_bytes,
            expect: self.expect,
            lost_after: self.lost_after,
            bases: self.bases,
            models: Mutex::new(models),
            watch: Mutex::new(watch),
            shared,
            thread: Mutex::new(Some(thread.map_err(io_error("no thread for a publisher"))?)),
        })
    }
}

/// The state folder, and the versions that an earlier publisher left there.
struct Restored {
    folder: StateFolder,
    stored: Vec<Stored>, // versions that could be read
    contents: Vec<Arc<Content>>,
    models: HashMap<String, Arc<TimedLock<PublishState>>>,
}

impl Restored {
    /// Reads the latest version of each model. Records a fault of the folder for each version that
    /// cannot be read. `new` returns the initial state of a model.
    fn read(folder: StateFolder, new: impl Fn() -> PublishState) -> Restored {
        let (stored, contents, models) = (Vec::new(), Vec::new(), HashMap::new());
        let mut found = Restored { folder, stored, contents, models };
        for latest in found.folder.latest() {
            let mut state = new();
            match found.folder.read(&latest, &mut state.copier) {
                Ok(content) => {
                    found.contents.push(Arc::new(content));
                    found.models.insert(latest.model.clone(), Arc::new(TimedLock::new(state)));
                    found.stored.push(latest);
                }
                Err(text) => {
                    let text =
                        format!("version {} of {} is not offered: {}", latest.version, latest.model, text);
                    found.folder.record_fault(text);
                }
            }
        }
        found
    }

    /// Makes the versions that could be read the latest of their models.
    fn offer_versions(&mut self, machine: &mut PublisherMachine) {
        for (stored, content) in self.stored.drain(..).zip(self.contents.drain(..)) {
            machine.offer(&stored.model, content, stored.names.into_iter().collect());
        }
    }
}

impl PublisherBuilder {
    fn published(&self) -> PublishState {
        let (count, bytes_max) = self.bases;
        PublishState { copier: Copier::default(), bases: Bases::new(count, bytes_max) }
    }

    /// Checks all settings. Returns the control address, the data address if one is set, and the
    /// keys if there are any.
    fn checked(&self) -> Result<(ListenAddress, Option<ListenAddress>, Option<PublisherKeys>), Error> {
        let listen_at = ListenAddress::parse(&self.address)?;
        let keys = self.read_keys()?;
        let exposure_allowed = self.insecure || keys.is_some();
        check_exposure(exposure_allowed, &self.address, &listen_at)?;
        let data = self.data.as_deref().map(ListenAddress::parse).transpose()?;
        if let (Some(address), Some(listen_at)) = (&self.data, &data) {
            check_exposure(exposure_allowed, address, listen_at)?;
        }
        if let Some(advertised) = &self.advertise {
            ListenAddress::parse(advertised)?;
        }
        if !(1..=CHUNK_BYTES_MAX).contains(&self.chunk_bytes) {
            let text = format!("chunk_bytes is {}; 1 to {} are allowed", self.chunk_bytes, CHUNK_BYTES_MAX);
            return Err(Error::Setup(text));
        }
        if !(1..=PATCHES_MAX).contains(&self.bases.0) {
            let text =
                format!("bases: {} versions per model; 1 to {} are allowed", self.bases.0, PATCHES_MAX);
            return Err(Error::Setup(text));
        }
        if self.history > HISTORY_MAX {
            let text = format!(
                "history: {} older versions per model; at most {} are allowed",
                self.history, HISTORY_MAX
            );
            return Err(Error::Setup(text));
        }
        if self.rekey.is_zero() {
            return Err(Error::Setup("rekey is zero; it must be the lifetime of a group key".to_owned()));
        }
        Ok((listen_at, data, keys))
    }

    /// Returns the keys in the folder that was set, or that `WEIGHTBUS_KEYS` names; `None` if there
    /// is no folder.
    fn read_keys(&self) -> Result<Option<PublisherKeys>, Error> {
        let named = || std::env::var_os("WEIGHTBUS_KEYS").unwrap_or_default().into();
        let folder: PathBuf = self.keys.clone().unwrap_or_else(named);
        Some(folder)
            .filter(|folder| !folder.as_os_str().is_empty())
            .map(|f| PublisherKeys::read(&f))
            .transpose()
    }
}

/// Binds the data socket at its default address, the port above the control port. If that port is
/// taken, and `asked`, the control address of the user, has port 0, binds any free port.
fn bind_beside(asked: &ListenAddress, bound: &ListenAddress) -> Result<(PubSocket, ListenAddress), Error> {
    match (PubSocket::bind(&bound.beside()), asked) {
        (Err(_), ListenAddress::Tcp { host, port: 0 }) => {
            PubSocket::bind(&ListenAddress::Tcp { host: host.clone(), port: 0 })
        }
        (result, _) => result,
    }
}

fn timing_of(ping: Duration, lost_after: Duration) -> Result<Timing, Error> {
    let hour = Duration::from_secs(3600);
    let valid =
        (Duration::from_millis(1)..=hour).contains(&ping) && (ping * 2..=10 * hour).contains(&lost_after);
    if !valid {
        return Err(Error::Setup(format!(
            "ping of {:?} and lost_after of {:?}: a worker needs two chances to be heard; choose lost_after of at least \
             twice ping and at most {:?}, and ping of 1 ms to {:?}",
            ping,
            lost_after,
            10 * hour,
            hour
        )));
    }
    Ok(Timing {
        ping,
        lost_after,
        quiet: ping.min(Duration::from_millis(250)),
        gone_after: 2 * ping, // for a worker to connect again and to ping
        stuck_after: lost_after,
        ..Timing::default()
    })
}

/// Returns the epoch of a new publisher: `asked`, if the user has set one, or the milliseconds since
/// 1970. The epoch is above every epoch in the state folder, even if the clock is wrong (P1).
fn new_epoch(asked: Option<u64>, state: Option<&StateFolder>) -> Result<u64, Error> {
    let epoch_min = state.map_or(0, StateFolder::epoch) + 1;
    let now = unix_millis();
    match asked {
        None => Ok(now.max(epoch_min)),
        Some(epoch) if (epoch_min..=INTEGER_MAX).contains(&epoch) => Ok(epoch),
        Some(epoch) => Err(Error::Setup(format!(
            "epoch {}: it must be above all epochs of the state folder, from {} to {}; or set no epoch",
            epoch, epoch_min, INTEGER_MAX
        ))),
    }
}

fn unix_millis() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

fn fill_random(bytes: &mut [u8]) -> io::Result<()> {
    fs::File::open("/dev/urandom")?.read_exact(bytes)
}

/// Returns a function that draws random group keys. The function keeps `/dev/urandom` open, so that
/// it still works when the process has no more descriptors.
fn key_drawer() -> io::Result<sealer::DrawKey> {
    let mut random = fs::File::open("/dev/urandom")?;
    Ok(Box::new(move || {
        let mut key = [0; 32];
        match random.read_exact(&mut key) {
            Ok(()) => key,
            // Nothing else is safe as a key.
            Err(error) => panic!("no random numbers for a group key: {}", error),
        }
    }))
}

/// Returns 32 random hexadecimal digits; `None` if there are no random bytes.
fn draw_token() -> Option<String> {
    let mut bytes = [0; 16];
    fill_random(&mut bytes).ok()?;
    Some(crate::digest::hex(&bytes))
}
