//! The roster: every worker that a publisher knows, by name and by connection.
//!
//! A name belongs to one live instance of a worker. When a second instance claims the name, the
//! publisher pings the first. If the first answers, the second is refused. If the first does not answer,
//! or its connection is closed, the second gets the name.
//!
//! A worker behind a relay is on the roster, too, but has no connection here. `behind.rs` changes the
//! worker's record when the relay reports.

use super::effects::Identity;
use super::link::Link;
use super::observers::ObserverRecord;
use super::phases::{PeerEvent, PeerPhase, StateMachine, WORKERS};
use crate::messages::{Doing, Hello, PatchId, Progress, ProgressPhase, Running, RELAY};
use crate::transfer::{ChunkPlan, Key, Time};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

pub const WORKERS_MAX: usize = 10_000; // bounds the roster, because any peer can add workers
const MODELS_MAX: usize = 4 * WORKERS_MAX; // subscriptions of all workers: each takes up to 0.6 kB

/// A version that is being delivered to a worker.
pub struct Delivery {
    pub version: u64,
    pub phase: ProgressPhase,
    pub chunks: u64,
    pub since: Time, // when the delivery last made progress
    /// The patch that is delivered; `None` for the whole version.
    pub patch: Option<PatchId>,
    /// The worker's text on why the version cannot be applied yet.
    pub waits: String,
}

/// The publisher's record of one worker.
pub struct Peer {
    /// The worker's control connection; empty if the worker has none here.
    pub identity: Identity,
    pub hello: Hello,
    pub heard_at: Time,
    pub running: BTreeMap<String, Running>,
    pub incoming: BTreeMap<String, Delivery>,
    /// True if the worker has confirmed that broadcasts reach it.
    pub subscribed: bool,
    /// True if the worker copies versions from the shared memory of a relay on its host.
    pub shared_memory: bool,
    pub phase: StateMachine<PeerPhase, PeerEvent>,
    /// Why the worker was lost, and what it was doing then.
    pub lost_why: String,
    /// When the worker's connection was closed, if the phase is `Away`.
    pub closed_at: Time,
    /// True if the worker was reported as stuck.
    pub stuck: bool,
    /// When a version was first announced to the worker after its last message; `None` if none was.
    pub unanswered_since: Option<Time>,
    /// When another instance claimed the worker's name, and this one was pinged.
    pub contested_at: Option<Time>,
    /// Models of which no version runs at the worker, because an apply failed half-way.
    pub torn: BTreeSet<String>,
    /// The token with which the worker's reports on the data connection begin; empty if it may send none.
    pub token: String,
    /// The public key of the worker's connections; empty without keys.
    pub key: String,
    /// True if the current group key must still be sent to the worker.
    pub key_due: bool,
    pub link: Link,
    /// Data about the worker that only observers get.
    pub observed: ObserverRecord,
    /// The relays before the worker, the nearest to here first.
    pub through: Vec<String>,
    // Of a relay, while its first report is incomplete: the known workers that the report has not named.
    unreported: BTreeSet<String>,
    // By model, the last version of which the worker reported a wrong digest.
    wrong_digests: BTreeMap<String, Key>,
    // The roster's revision at the last change of this worker for observers.
    revision: u64,
    ticket: (String, Time), // the ticket, if it is not redeemed, and when it was drawn
}

impl Peer {
    fn new(identity: &[u8], key: &str, hello: &Hello, now: Time) -> Peer {
        Peer {
            identity: identity.to_vec(),
            key: key.to_owned(),
            key_due: false,
            link: Link::default(),
            observed: ObserverRecord::default(),
            through: Vec::new(),
            unreported: BTreeSet::new(),
            wrong_digests: BTreeMap::new(),
            revision: 0,
            ticket: (String::new(), now),
            hello: hello.clone(),
            heard_at: now,
            running: BTreeMap::new(),
            incoming: BTreeMap::new(),
            subscribed: false,
            shared_memory: false,
            phase: StateMachine::new(WORKERS),
            lost_why: String::new(),
            closed_at: now,
            stuck: false,
            unanswered_since: None,
            contested_at: None,
            torn: BTreeSet::new(),
            token: String::new(),
        }
    }

    /// True if a version is staged at the worker, or has made progress there within `patience`. A worker does
    /// not report that it drops an arriving version.
    pub fn is_under_way(&self, model: &str, number: u64, patience: Duration, now: Time) -> bool {
        self.incoming.get(model).map_or(false, |its| {
            let moves = now.saturating_sub(its.since) < patience;
            its.version == number && (moves || its.phase == ProgressPhase::Staged)
        })
    }

    pub fn is_lost(&self) -> bool {
        self.phase.is(PeerPhase::Lost)
    }

    /// True if the worker is a relay: it passes versions on, and calls of publish do not wait for it.
    pub fn is_relay(&self) -> bool {
        is_relay(&self.hello)
    }

    /// True if the worker has a session here; false if it is behind a relay.
    pub fn in_session(&self) -> bool {
        self.through.is_empty()
    }

    /// True if this relay, which has a session here, reports the worker.
    pub fn is_behind(&self, relay: &str) -> bool {
        self.through.first().map_or(false, |first| first == relay)
    }

    /// True if the worker reported that it has staged this version.
    pub fn has_staged(&self, model: &str, version: u64) -> bool {
        let staged = |its: &Delivery| (its.version, its.phase) == (version, ProgressPhase::Staged);
        self.incoming.get(model).map_or(false, staged)
    }

    pub fn subscribes_to(&self, model: &str) -> bool {
        self.hello.models.contains_key(model)
    }

    /// Returns the (epoch, number) of the version that the worker runs of a model; (0, 0) if none.
    pub fn running_key(&self, model: &str) -> Key {
        self.running.get(model).map_or((0, 0), |running| (running.epoch, running.version))
    }

    /// Records that the worker reported a wrong digest of a version. Returns false if its last wrong digest
    /// was of the same version.
    pub fn note_wrong_digest(&mut self, model: &str, key: Key) -> bool {
        self.wrong_digests.insert(model.to_owned(), key) != Some(key)
    }

    /// Removes the running versions that are not newer than those in the latest hello.
    ///
    /// A running version can be newer than the hello: a worker repeats its hello, and an `applied` on the
    /// data connection can arrive before the repetition. If the hello names no running version, the worker
    /// runs none any more, unless the known version is of an epoch above that of the hello. (P12)
    fn keep_newer_than_hello(&mut self) {
        let hello = &self.hello;
        self.running.retain(|model, known| match hello.models.get(model) {
            None => false,
            Some(None) => hello.epoch < known.epoch,
            Some(Some(named)) => (named.epoch, named.version) < (known.epoch, known.version),
        });
    }

    /// Begins a session. `running` has the plausible running versions of the hello.
    pub fn begin_session(&mut self, running: BTreeMap<String, Running>) {
        self.forget_deliveries();
        self.keep_newer_than_hello();
        for (model, named) in running {
            self.running.entry(model).or_insert(named);
        }
        (self.contested_at, self.unanswered_since, self.key_due) = (None, None, false);
    }

    /// Forgets the worker's deliveries, and whether broadcasts reach the worker.
    pub fn forget_deliveries(&mut self) {
        self.subscribed = false;
        self.incoming.clear();
    }

    /// Records that the worker sent a message.
    pub fn note_message(&mut self, now: Time) {
        (self.heard_at, self.unanswered_since) = (now, None);
    }

    /// Records whether broadcasts reach the worker.
    pub fn set_subscribed(&mut self, subscribed: bool) {
        self.subscribed = subscribed;
    }

    // Reports of relays.

    /// Begins the first report of this relay, which must name these workers.
    pub fn expect_rows(&mut self, names: Vec<String>) {
        self.unreported = names.into_iter().collect();
    }

    /// Records that the first report of this relay has named a worker.
    pub fn note_row(&mut self, name: &str) {
        self.unreported.remove(name);
    }

    /// Ends the first report of this relay. Returns the workers that the report did not name.
    pub fn take_unreported(&mut self) -> BTreeSet<String> {
        std::mem::take(&mut self.unreported)
    }

    /// Records when the relay heard the worker, and how versions reach the worker from there.
    pub fn note_heard_by_relay(&mut self, at: Time, subscribed: bool, shared_memory: bool) {
        (self.heard_at, self.subscribed, self.shared_memory) = (at, subscribed, shared_memory);
    }

    /// Records that the worker runs no version of a model.
    pub fn clear_running(&mut self, model: &str) {
        self.running.remove(model);
    }

    /// Records which version arrives at the worker, as its relay reports.
    pub fn note_relayed_delivery(&mut self, model: &str, doing: &Doing, now: Time) {
        let phase = match doing.phase.filter(|_| doing.incoming > 0) {
            Some(phase) => phase,
            None => return drop(self.incoming.remove(model)),
        };
        self.note_delivery(model, doing.incoming, phase, Some(doing.chunks), now);
        self.set_patch(model, doing.incoming_patch.as_ref());
        if let Some(incoming) = self.incoming.get_mut(model) {
            incoming.since = now.saturating_sub(Duration::from_millis(doing.idle_ms));
        }
    }

    /// Records that a version is announced to the worker, which should answer with a message.
    pub fn expect_answer(&mut self, now: Time) {
        self.unanswered_since = self.unanswered_since.or(Some(now));
    }

    /// Applies an event to the worker's phase. Returns true if the table has this transition.
    pub fn apply_event(&mut self, event: PeerEvent) -> bool {
        self.phase.apply_event(event)
    }

    /// Records that the worker's connection is closed.
    pub fn note_closed(&mut self, now: Time) {
        self.closed_at = now;
        self.apply_event(PeerEvent::Closed);
    }

    /// Applies an event by which the worker is lost. `why` includes what the worker was doing.
    pub fn lose(&mut self, event: PeerEvent, why: &str) {
        self.apply_event(event);
        self.stuck = false;
        self.lost_why = why.to_owned();
    }

    /// Sets whether the worker is stuck. Returns true if that changed.
    pub fn set_stuck(&mut self, stuck: bool) -> bool {
        std::mem::replace(&mut self.stuck, stuck) != stuck
    }

    /// Records that the group key was replaced, and must be sent to the worker.
    pub fn require_key(&mut self) {
        self.key_due = true;
    }

    /// Returns true if the group key must be sent to the worker, and assumes that the caller sends it.
    pub fn take_key_due(&mut self) -> bool {
        std::mem::take(&mut self.key_due)
    }

    /// Records that the worker runs a version of a model. Ends the delivery of that version or an older
    /// one. `epoch` is the current epoch, which is that of deliveries.
    pub fn applied(&mut self, model: &str, running: Running, epoch: u64) {
        let key = (running.epoch, running.version);
        if self.incoming.get(model).map_or(false, |incoming| (epoch, incoming.version) <= key) {
            self.incoming.remove(model);
        }
        self.running.insert(model.to_owned(), running);
    }

    /// Records whether an apply of the model failed half-way, so that no version of it runs.
    pub fn set_torn(&mut self, model: &str, torn: bool) {
        if torn {
            self.running.remove(model);
            self.torn.insert(model.to_owned());
        } else {
            self.torn.remove(model);
        }
    }

    /// Ends the delivery of a version that the worker failed to apply.
    pub fn end_delivery(&mut self, model: &str, version: u64) {
        if self.incoming.get(model).map_or(false, |incoming| incoming.version == version) {
            self.incoming.remove(model);
        }
    }

    /// Updates the rate of the worker's link from two progress reports of one version.
    pub fn update_link_rate(&mut self, report: &Progress, plan: ChunkPlan, now: Time) {
        let same =
            |old: &&Delivery| (old.version, old.patch.as_ref()) == (report.version, report.patch.as_ref());
        if let Some(old) = self.incoming.get(&report.model).filter(same) {
            let bytes = |chunks: u64| chunks.saturating_mul(plan.chunk_bytes).min(plan.nbytes);
            let more = bytes(report.chunks).saturating_sub(bytes(old.chunks));
            if old.phase == ProgressPhase::Receiving && more > 0 && now > old.since {
                self.link.record_transfer(more, now - old.since);
            }
        }
    }

    /// Records the phase and the chunks of a delivery, and when it last made progress.
    pub fn note_delivery(
        &mut self,
        model: &str,
        version: u64,
        phase: ProgressPhase,
        chunks: Option<u64>,
        now: Time,
    ) {
        match self.incoming.get_mut(model) {
            Some(old) if (old.version, old.phase) == (version, phase) => {
                if let Some(chunks) = chunks.filter(|&chunks| chunks != old.chunks) {
                    (old.chunks, old.since) = (chunks, now);
                }
            }
            _ => {
                let chunks = chunks.unwrap_or(0);
                let (patch, waits) = (None, String::new());
                let incoming = Delivery { version, phase, chunks, since: now, patch, waits };
                self.incoming.insert(model.to_owned(), incoming);
            }
        }
    }

    /// Records a progress report.
    pub fn note_progress(&mut self, report: &Progress, now: Time) {
        self.note_delivery(&report.model, report.version, report.phase, Some(report.chunks), now);
        self.set_patch(&report.model, report.patch.as_ref());
        if let Some(incoming) = self.incoming.get_mut(&report.model) {
            incoming.waits = report.waits.clone();
        }
    }

    /// Records the patch by which a model's version is delivered; `None` if it is delivered whole.
    pub fn set_patch(&mut self, model: &str, patch: Option<&PatchId>) {
        if let Some(incoming) = self.incoming.get_mut(model) {
            incoming.patch = patch.cloned();
        }
    }

    /// True if the worker has been silent for `patience` after a version was announced. Its process may be
    /// suspended.
    pub fn is_unresponsive(&self, now: Time, patience: Duration) -> bool {
        self.unanswered_since.map_or(false, |asked| now.saturating_sub(asked) >= patience)
    }
}

/// True if a worker passes versions on.
pub fn is_relay(hello: &Hello) -> bool {
    hello.features.iter().any(|feature| feature == RELAY)
}

/// What the roster decides on a hello.
#[derive(Debug, PartialEq)]
pub enum Admission {
    /// Admitted as a new worker.
    New,
    /// Admitted; the instance was already on the roster.
    Known,
    /// Not decided: ping the other instance that has the name, which may be dead.
    Contested,
    /// Refuse: the instance with that name is alive.
    Taken,
    /// Refuse: the roster is full.
    Full,
}

/// The workers of one publisher.
#[derive(Default)]
pub struct Roster {
    peers: BTreeMap<String, Peer>,
    by_identity: HashMap<Identity, String>,
    by_token: HashMap<String, String>,
    by_ticket: HashMap<String, String>, // unredeemed tickets
    model_count: usize,                 // subscriptions to models, of all workers
    relay_count: usize,                 // includes relays behind relays
    revision: u64,
    touched: BTreeMap<u64, String>, // the name of each worker, by its revision
}

impl Roster {
    pub fn iter(&self) -> impl Iterator<Item = &Peer> {
        self.peers.values()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Peer> {
        self.peers.values_mut()
    }

    pub fn get(&self, name: &str) -> Option<&Peer> {
        self.peers.get(name)
    }

    pub fn get_mut(&mut self, name: &str) -> Option<&mut Peer> {
        self.peers.get_mut(name)
    }

    pub fn len(&self) -> usize {
        self.peers.len()
    }

    /// Returns the current revision. Each change for observers increments the revision.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Begins a new revision, and returns its number.
    pub fn next_revision(&mut self) -> u64 {
        self.revision += 1;
        self.revision
    }

    /// Records that a worker has changed for observers.
    pub fn touch(&mut self, name: &str) {
        if let Some(peer) = self.peers.get_mut(name) {
            self.revision += 1;
            let at = std::mem::replace(&mut peer.revision, self.revision);
            let owned = self.touched.remove(&at).unwrap_or_else(|| name.to_owned());
            self.touched.insert(self.revision, owned);
        }
    }

    /// Returns the workers that changed after the revision `since`, and their revisions, in the order of the
    /// revisions.
    pub fn changed(&self, since: u64) -> impl Iterator<Item = (u64, &Peer)> {
        let later = self.touched.range(since + 1..);
        later.filter_map(move |(&at, name)| Some((at, self.peers.get(name)?)))
    }

    /// Returns the name of the worker on a connection.
    pub fn by_identity(&self, identity: &[u8]) -> Option<&str> {
        self.by_identity.get(identity).map(String::as_str)
    }

    /// Returns the name of the worker whose reports on the data connection begin with this token.
    pub fn by_token(&self, token: &str) -> Option<&str> {
        self.by_token.get(token).map(String::as_str)
    }

    /// Sets the token that a worker's reports on the data connection begin with.
    pub fn set_token(&mut self, name: &str, token: String) {
        if let Some(peer) = self.peers.get_mut(name) {
            peer.token = token.clone();
            self.by_token.insert(token, name.to_owned());
        }
    }

    /// Replaces a worker's unredeemed ticket with this one.
    pub fn set_ticket(&mut self, name: &str, ticket: &str, now: Time) {
        if let Some(peer) = self.peers.get_mut(name) {
            let before = std::mem::replace(&mut peer.ticket, (ticket.to_owned(), now));
            self.by_ticket.remove(&before.0);
            self.by_ticket.insert(ticket.to_owned(), name.to_owned());
        }
    }

    /// Redeems a ticket, which is valid once. Returns the worker's name, and when the ticket was drawn.
    pub fn redeem(&mut self, ticket: &str) -> Option<(String, Time)> {
        let name = self.by_ticket.remove(ticket)?;
        let drawn_at = self.get(&name)?.ticket.1;
        Some((name, drawn_at))
    }

    /// True if there are relays.
    pub fn has_relays(&self) -> bool {
        self.relay_count > 0
    }

    /// Returns the names of the live workers that subscribe to a model. Leaves out relays.
    pub fn subscribers(&self, model: &str) -> Vec<String> {
        let live =
            self.iter().filter(|peer| !peer.is_lost() && !peer.is_relay() && peer.subscribes_to(model));
        live.map(|peer| peer.hello.name.clone()).collect()
    }

    /// Returns the names of the live workers and relays with sessions here that subscribe to a model.
    pub fn receivers(&self, model: &str) -> Vec<String> {
        let live =
            self.iter().filter(|peer| !peer.is_lost() && peer.in_session() && peer.subscribes_to(model));
        live.map(|peer| peer.hello.name.clone()).collect()
    }

    /// Returns the names of the live relays with sessions here that subscribe to a model.
    pub fn relays_of(&self, model: &str) -> Vec<String> {
        if self.relay_count == 0 {
            return Vec::new();
        }
        let found = self.receivers(model).into_iter();
        found.filter(|name| self.get(name).map_or(false, Peer::is_relay)).collect()
    }

    /// Returns the names of the workers behind a relay that has a session here.
    pub fn names_behind(&self, relay: &str) -> Vec<String> {
        let behind = self.iter().filter(|peer| peer.is_behind(relay));
        behind.map(|peer| peer.hello.name.clone()).collect()
    }

    /// Returns the names of the live relays with sessions here behind which these workers are.
    pub fn relays_before(&self, workers: &[String]) -> BTreeSet<String> {
        if self.relay_count == 0 {
            return BTreeSet::new();
        }
        let firsts = workers.iter().filter_map(|name| self.get(name)?.through.first());
        let live =
            |relay: &&String| self.get(relay).map_or(false, |peer| !peer.is_lost() && peer.in_session());
        firsts.filter(live).cloned().collect()
    }

    /// Returns those of `workers` that are behind this relay, sorted.
    pub fn named_behind<'a>(
        &self,
        relay: &str,
        workers: impl IntoIterator<Item = &'a String>,
    ) -> Vec<String> {
        let behind = |name: &&String| self.get(name).map_or(false, |peer| peer.is_behind(relay));
        let found: BTreeSet<&String> = workers.into_iter().filter(behind).collect();
        found.into_iter().cloned().collect()
    }

    /// True if a version for `workers` (`None`: for all) is sent to the peer `name`, because the peer is one
    /// of them, or a relay before one of them.
    pub fn is_recipient(&self, name: &str, workers: Option<&[String]>) -> bool {
        workers.map_or(true, |workers| {
            let relay = self.get(name).map_or(false, Peer::is_relay);
            workers.iter().any(|each| each == name) || relay && !self.named_behind(name, workers).is_empty()
        })
    }

    /// Handles a hello. Admits the worker if the result is `New` or `Known`.
    pub fn admit(
        &mut self,
        identity: &[u8],
        key: &str,
        hello: &Hello,
        now: Time,
        lost_after: Duration,
    ) -> Admission {
        let may_replace = |peer: &Peer| peer.is_lost() || peer.hello.instance == hello.instance;
        if let Some(away) = self.get(&hello.name).filter(|peer| !peer.in_session()) {
            if !may_replace(away) {
                return Admission::Taken;
            }
            self.remove(&hello.name); // the worker was behind a relay, and gets a session here now
        }
        let same = |peer: &Peer| peer.hello.instance == hello.instance && peer.key == key; // K3
        let holder = self.get(&hello.name).map(|peer| (same(peer), peer.is_lost()));
        if holder == Some((false, false)) {
            return self.contest(hello, now, lost_after);
        }
        if !self.has_room(hello) {
            return Admission::Full;
        }
        if holder.map_or(false, |(known, _)| known) {
            self.readmit(identity, hello, now);
            return Admission::Known;
        }
        self.remove(&hello.name);
        self.by_identity.insert(identity.to_vec(), hello.name.clone());
        self.add(Peer::new(identity, key, hello, now));
        Admission::New
    }

    /// Adds a worker behind relays, and removes a previous one with the same name. Returns false if there is
    /// no room.
    pub fn add_behind(&mut self, hello: &Hello, through: Vec<String>, now: Time) -> bool {
        let room = self.has_room(hello);
        if room {
            self.remove(&hello.name);
            self.add(Peer { through, ..Peer::new(&[], "", hello, now) });
        }
        room
    }

    fn add(&mut self, peer: Peer) {
        let name = peer.hello.name.clone();
        self.model_count += peer.hello.models.len();
        self.relay_count += usize::from(peer.is_relay());
        self.peers.insert(name.clone(), peer);
        self.touch(&name);
    }

    /// Handles a hello for the name of another live instance. Returns `Taken` if the other instance has sent
    /// a message after it was pinged.
    fn contest(&mut self, hello: &Hello, now: Time, lost_after: Duration) -> Admission {
        let peer = match self.peers.get_mut(&hello.name) {
            Some(peer) => peer,
            None => return Admission::Contested,
        };
        match peer.contested_at.filter(|&asked| now.saturating_sub(asked) < lost_after) {
            Some(asked) if peer.heard_at > asked => return Admission::Taken,
            Some(_) => {}
            None => peer.contested_at = Some(now),
        }
        Admission::Contested
    }

    /// Moves a worker to a new connection, with a new hello.
    fn readmit(&mut self, identity: &[u8], hello: &Hello, now: Time) {
        if let Some(peer) = self.peers.get_mut(&hello.name) {
            self.model_count = self.model_count + hello.models.len() - peer.hello.models.len();
            self.relay_count = self.relay_count + usize::from(is_relay(hello)) - usize::from(peer.is_relay());
            self.by_identity.remove(&peer.identity);
            self.by_identity.insert(identity.to_vec(), hello.name.clone());
            (peer.identity, peer.hello, peer.heard_at) = (identity.to_vec(), hello.clone(), now);
            if !peer.is_lost() {
                peer.phase.apply_event(PeerEvent::Spoke);
            }
            peer.observed = ObserverRecord::default();
            self.touch(&hello.name);
        }
    }

    /// True if there is room for a worker. Removes lost workers if necessary.
    fn has_room(&mut self, hello: &Hello) -> bool {
        if self.fits(hello) {
            return true;
        }
        let lost = self.iter().filter(|peer| peer.is_lost() && peer.hello.name != hello.name);
        let lost: Vec<String> = lost.map(|peer| peer.hello.name.clone()).collect();
        for name in lost {
            self.remove(&name);
        }
        self.fits(hello)
    }

    fn fits(&self, hello: &Hello) -> bool {
        let before = self.get(&hello.name).map(|peer| peer.hello.models.len());
        let workers = self.peers.len() + usize::from(before.is_none());
        let models = self.model_count + hello.models.len() - before.unwrap_or(0);
        workers <= WORKERS_MAX && models <= MODELS_MAX
    }

    /// Forgets a worker's connection and token, so that the worker must send hello again.
    pub fn disconnect(&mut self, name: &str) {
        if let Some(peer) = self.peers.get_mut(name) {
            self.by_identity.remove(&std::mem::take(&mut peer.identity));
            self.by_token.remove(&std::mem::take(&mut peer.token));
        }
    }

    /// Removes a worker.
    pub fn remove(&mut self, name: &str) {
        if let Some(peer) = self.peers.remove(name) {
            self.model_count -= peer.hello.models.len();
            self.relay_count -= usize::from(peer.is_relay());
            self.by_identity.remove(&peer.identity);
            self.by_token.remove(&peer.token);
            self.by_ticket.remove(&peer.ticket.0);
            self.touched.remove(&peer.revision);
        }
    }

    /// Returns the names of the live workers with sessions here that have been silent for `lost_after`.
    pub fn silent_workers(&self, now: Time, lost_after: Duration) -> Vec<String> {
        let here = self.iter().filter(|peer| !peer.is_lost() && peer.in_session());
        let silent = here.filter(|p| now.saturating_sub(p.heard_at) >= lost_after);
        silent.map(|peer| peer.hello.name.clone()).collect()
    }

    /// Returns the names of the workers whose connections have been closed for `patience`.
    pub fn disconnected_workers(&self, now: Time, patience: Duration) -> Vec<String> {
        let away = |p: &&Peer| p.phase.is(PeerPhase::Away) && now.saturating_sub(p.closed_at) >= patience;
        self.iter().filter(away).map(|peer| peer.hello.name.clone()).collect()
    }
}
