//! How a publisher is set up: its addresses, times, keys and folders, checked before anything is bound.

use super::bases::Bases;
use super::content::{Content, Copier};
use super::effects::WorkerEvent;
use super::endpoints::{check_exposure, Place};
use super::keeper::Keeper;
use super::keys::PublisherKeys;
use super::listening::unbindable;
use super::machine::{self, PublisherMachine};
use super::pub_socket::PubSocket;
use super::router::Router;
use super::run::{Listener, Loop, Shared, Work};
use super::sealer::{self, Sealer};
use super::state::{StateFolder, Stored, HISTORY_MAX};
use super::turns::Turns;
use super::watch::Watch;
use super::{Published, Publisher, DAY};
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

const BASES: usize = 2; // versions that patches may build on: what most workers run, and what those who missed it
const CHUNK_BYTES: u64 = 1 << 20; // larger ones gained nothing when measured

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
    history: usize,
    expect: usize,
    keys: Option<PathBuf>, // nothing: what the environment says; empty: none
    rekey: Duration,
    insecure: bool,
    bases: (usize, u64),
    listener: Option<Listener>,
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
            listener: None,
        }
    }

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

    /// A folder that outlives this publisher, and keeps its epoch, and the latest version of each model: one that is
    /// started with it later comes after this one, whatever clocks say, and offers these again. It is that of publishers
    /// in Python, too: either takes up where the other has ended. Versions are written in a thread of their own, a moment
    /// after they were published; closing waits up to 10 s for the last.
    pub fn state(mut self, folder: impl Into<PathBuf>) -> PublisherBuilder {
        self.state = Some(folder.into());
        self
    }

    /// How many older versions of each model are kept in that folder, to which a publisher in Python can go back: none,
    /// and at most 10,000.
    pub fn history(mut self, versions: usize) -> PublisherBuilder {
        self.history = versions;
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
        let (place, data, keys) = self.checked()?;
        let timing = timing_of(self.ping, self.lost_after)?;
        check_descriptors().map_err(|error| unbindable(&place.endpoint(), error))?;
        let state = self.state.as_deref().map(|path| StateFolder::open(path, self.history)).transpose()?;
        let epoch = new_epoch(self.epoch, state.as_ref())?;
        let mut state = state.map(|folder| Restored::of(folder, || self.published()));
        let broken = |what: &str| {
            let what = what.to_owned();
            move |error: io::Error| Error::Io { what, error }
        };
        let secret = keys.as_ref().map(|keys| &keys.secret[..]);
        let (router, bound) = Router::bind(&place, secret)?;
        let (mut data, data_place) = match data {
            Some(data) => PubSocket::bind(&data)?,
            None => bind_beside(&place, &bound)?,
        };
        if let Some(its) = &mut state {
            its.folder.begin(epoch, &its.stored)?; // nobody has heard of it yet, and an address that is taken spends none
        }
        let told = self.advertise.unwrap_or_else(|| data_place.advertised(&bound));
        let started = running_clock();
        let age: machine::Age = Box::new(move || running_clock().saturating_sub(started));
        let age = Some(age).filter(|_| self.epoch.is_none());
        let mut machine = PublisherMachine::new(epoch, &told, timing, age, Some(Box::new(draw)))
            .clock(Box::new(unix_millis));
        let shared = Arc::new(Shared::new().map_err(broken("no descriptors for a publisher"))?);
        let (mut sealer, mut watch) = (None, None);
        if let Some(keys) = keys {
            data.ask_for_tickets();
            let new = Sealer::new(
                drawing_keys().map_err(broken("no random numbers"))?,
                Some(self.rekey),
                Duration::ZERO,
            );
            machine = machine.trust(keys.by_key, new.key());
            sealer = Some(new);
            let begun = Watch::begin(keys.allowed, timing.ping, shared.clone());
            watch = Some(begun.map_err(broken("no thread for keys"))?);
        }
        machine.address = bound.endpoint();
        let (mut models, mut keeper) = (HashMap::new(), None);
        if let Some(mut its) = state {
            its.offer(&mut machine);
            for fault in its.folder.faults() {
                shared.leave(Work::Notice(fault))?;
            }
            models = its.models;
            keeper =
                Some(Keeper::begin(its.folder, shared.clone()).map_err(broken("no thread for the disk"))?);
        }
        let thread = Loop::new(machine, router, data, shared.clone(), keeper, self.listener, sealer);
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
            thread: Mutex::new(Some(thread.map_err(broken("no thread for a publisher"))?)),
        })
    }
}

/// What a publisher before has left.
struct Restored {
    folder: StateFolder,
    stored: Vec<Stored>, // what can be offered
    contents: Vec<Arc<Content>>,
    models: HashMap<String, Arc<Turns<Published>>>,
}

impl Restored {
    /// Reads the latest version of each model.
    fn of(folder: StateFolder, new: impl Fn() -> Published) -> Restored {
        let (stored, contents, models) = (Vec::new(), Vec::new(), HashMap::new());
        let mut found = Restored { folder, stored, contents, models };
        for latest in found.folder.latest() {
            let mut its = new();
            match found.folder.read(&latest, &mut its.copier) {
                Ok(content) => {
                    found.contents.push(Arc::new(content));
                    found.models.insert(latest.model.clone(), Arc::new(Turns::new(its)));
                    found.stored.push(latest);
                }
                Err(text) => {
                    let text =
                        format!("version {} of {} is not offered: {}", latest.version, latest.model, text);
                    found.folder.lacks(text);
                }
            }
        }
        found
    }

    fn offer(&mut self, machine: &mut PublisherMachine) {
        for (stored, content) in self.stored.drain(..).zip(self.contents.drain(..)) {
            machine.offer(&stored.model, content, stored.names.into_iter().collect());
        }
    }
}

impl PublisherBuilder {
    fn published(&self) -> Published {
        let (count, bytes_max) = self.bases;
        Published { copier: Copier::default(), bases: Bases::new(count, bytes_max) }
    }

    /// Where to bind, and with which keys, once all that can be wrong with what the user says was looked at.
    fn checked(&self) -> Result<(Place, Option<Place>, Option<PublisherKeys>), Error> {
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
        if self.history > HISTORY_MAX {
            let text =
                format!("{} older versions of each model; at most {} are kept", self.history, HISTORY_MAX);
            return Err(Error::Setup(text));
        }
        if self.rekey.is_zero() {
            return Err(Error::Setup("rekey of nothing: how old may a group key become?".to_owned()));
        }
        Ok((place, data, keys))
    }

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
fn bind_beside(asked: &Place, bound: &Place) -> Result<(PubSocket, Place), Error> {
    match (PubSocket::bind(&bound.beside()), asked) {
        (Err(_), Place::Tcp { host, port: 0 }) => {
            PubSocket::bind(&Place::Tcp { host: host.clone(), port: 0 })
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
    let least = state.map_or(0, StateFolder::epoch) + 1;
    let now = unix_millis();
    match asked {
        None => Ok(now.max(least)),
        Some(epoch) if (least..=INTEGER_MAX).contains(&epoch) => Ok(epoch),
        Some(epoch) => Err(Error::Setup(format!(
            "epoch {}: it must be above all that the state folder has seen, {} to {}; leave it out",
            epoch, least, INTEGER_MAX
        ))),
    }
}

fn unix_millis() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
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
