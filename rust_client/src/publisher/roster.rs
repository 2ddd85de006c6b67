//! Who is there: every worker that a publisher knows, by name and by connection.
//!
//! A name belongs to one living instance. A second one that asks for it is put off while the first is asked for a
//! sign of life: if one comes, the second is refused; if none comes, or its connection is gone, the name passes on.

use super::effects::Identity;
use super::link::Link;
use super::observers::Seen;
use super::phases::{At, PeerEvent, PeerPhase, WORKERS};
use crate::messages::{Doing, Hello, PatchId, Progress, Running};
use crate::transfer::{ChunkPlan, Key, Time};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

pub const WORKERS_MAX: usize = 10_000; // of one publisher: its roster is memory that peers can claim
const MODELS_MAX: usize = 4 * WORKERS_MAX; // of all of them: a name and a digest take up to 0.6 kB

/// A version on its way to a worker.
pub struct Delivery {
    pub version: u64,
    pub phase: Doing,
    pub chunks: u64,
    pub since: Time, // when it last made progress
    /// By which it comes, if by one.
    pub patch: Option<PatchId>,
    /// Who is in its way there, since when, in the worker's words.
    pub waits: String,
}

/// One worker, as the publisher knows it.
pub struct Peer {
    pub identity: Identity,
    pub hello: Hello,
    pub heard_at: Time,
    pub running: BTreeMap<String, Running>,
    pub incoming: BTreeMap<String, Delivery>,
    /// Published messages are known to reach it.
    pub subscribed: bool,
    pub phase: At<PeerPhase, PeerEvent>,
    /// Why it was lost, with what it was doing.
    pub why: String,
    /// When its connection was found closed, if it is away.
    pub closed_at: Time,
    /// It was said to be stuck.
    pub stuck: bool,
    /// Of a version, for the first time since it was heard.
    pub told_at: Option<Time>,
    /// When another instance asked for its name.
    pub contested_at: Option<Time>,
    /// Models of which it has said that none runs.
    pub torn: BTreeSet<String>,
    /// What its words on the data connection begin with; empty: it has none.
    pub token: String,
    /// The public key of its connections; empty: there are no keys.
    pub key: String,
    /// The group key has changed since it was told one.
    pub rekeyed: bool,
    pub link: Link,
    /// What observers know of it.
    pub seen: Seen,
    different: BTreeMap<String, Key>, // the last version of a model whose digest it has reported wrong
    revision: u64, // of the roster, when this last changed in a way that observers are told
    ticket: (String, Time), // that it has not shown yet, and since when
}

impl Peer {
    fn new(identity: &[u8], key: &str, hello: &Hello, now: Time) -> Peer {
        Peer {
            identity: identity.to_vec(),
            key: key.to_owned(),
            rekeyed: false,
            link: Link::default(),
            seen: Seen::default(),
            different: BTreeMap::new(),
            revision: 0,
            ticket: (String::new(), now),
            hello: hello.clone(),
            heard_at: now,
            running: BTreeMap::new(),
            incoming: BTreeMap::new(),
            subscribed: false,
            phase: At::first(WORKERS),
            why: String::new(),
            closed_at: now,
            stuck: false,
            told_at: None,
            contested_at: None,
            torn: BTreeSet::new(),
            token: String::new(),
        }
    }

    pub fn lost(&self) -> bool {
        self.phase.is(PeerPhase::Lost)
    }

    pub fn wants(&self, model: &str) -> bool {
        self.hello.models.contains_key(model)
    }

    /// What it runs of a model; (0, 0) if nothing.
    pub fn runs(&self, model: &str) -> Key {
        self.running.get(model).map_or((0, 0), |running| (running.epoch, running.version))
    }

    /// It reports another digest of a version than was published; tells whether that is news.
    pub fn differs(&mut self, model: &str, key: Key) -> bool {
        self.different.insert(model.to_owned(), key) != Some(key)
    }

    /// It is let in, and runs this: what it said before counts no more.
    pub fn welcomed(&mut self, running: BTreeMap<String, Running>) {
        self.forget();
        self.running = running;
        (self.contested_at, self.told_at, self.rekeyed) = (None, None, false);
    }

    /// Nothing that it was at, or that reached it, counts any more.
    pub fn forget(&mut self) {
        self.subscribed = false;
        self.incoming.clear();
    }

    /// It has said something.
    pub fn heard(&mut self, now: Time) {
        (self.heard_at, self.told_at) = (now, None);
    }

    /// Published messages are known to reach it, or not to.
    pub fn hears(&mut self, subscribed: bool) {
        self.subscribed = subscribed;
    }

    /// It is told of a version.
    pub fn told(&mut self, now: Time) {
        self.told_at = self.told_at.or(Some(now));
    }

    /// Lets something happen to it; returns whether there is an arrow for that.
    pub fn take(&mut self, event: PeerEvent) -> bool {
        self.phase.take(event)
    }

    /// Its connection is closed.
    pub fn closed(&mut self, now: Time) {
        self.closed_at = now;
        self.take(PeerEvent::Closed);
    }

    /// It is lost by this, while it was doing something.
    pub fn lose(&mut self, event: PeerEvent, why: &str) {
        self.take(event);
        self.stuck = false;
        self.why = why.to_owned();
    }

    /// Takes note whether it is stuck; returns whether that is news.
    pub fn turns(&mut self, stuck: bool) -> bool {
        std::mem::replace(&mut self.stuck, stuck) != stuck
    }

    /// There is another group key.
    pub fn rekey(&mut self) {
        self.rekeyed = true;
    }

    /// Returns whether it is to be told a group key; it is, by that.
    pub fn takes_key(&mut self) -> bool {
        std::mem::take(&mut self.rekeyed)
    }

    /// It runs a version of a model, in this epoch.
    pub fn applied(&mut self, model: &str, running: Running, epoch: u64) {
        let key = (running.epoch, running.version);
        if self.incoming.get(model).map_or(false, |incoming| (epoch, incoming.version) <= key) {
            self.incoming.remove(model);
        }
        self.running.insert(model.to_owned(), running);
    }

    /// It says of a model that none runs; or that one does.
    pub fn tore(&mut self, model: &str, torn: bool) {
        if torn {
            self.running.remove(model);
            self.torn.insert(model.to_owned());
        } else {
            self.torn.remove(model);
        }
    }

    /// It is not at a version any more.
    pub fn drops(&mut self, model: &str, version: u64) {
        if self.incoming.get(model).map_or(false, |incoming| incoming.version == version) {
            self.incoming.remove(model);
        }
    }

    /// Learns how fast its link is, from two words of how far one version is.
    pub fn learn(&mut self, said: &Progress, plan: ChunkPlan, now: Time) {
        let same = |old: &&Delivery| (old.version, old.patch.as_ref()) == (said.version, said.patch.as_ref());
        if let Some(old) = self.incoming.get(&said.model).filter(same) {
            let bytes = |chunks: u64| chunks.saturating_mul(plan.chunk_bytes).min(plan.nbytes);
            let more = bytes(said.chunks).saturating_sub(bytes(old.chunks));
            if old.phase == Doing::Receiving && more > 0 && now > old.since {
                self.link.learn(more, now - old.since);
            }
        }
    }

    /// Remembers what it is doing, and since when it has not moved.
    pub fn note(&mut self, model: &str, version: u64, phase: Doing, chunks: Option<u64>, now: Time) {
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

    pub fn note_progress(&mut self, said: &Progress, now: Time) {
        self.note(&said.model, said.version, said.phase, Some(said.chunks), now);
        self.comes_by(&said.model, said.patch.as_ref());
        if let Some(incoming) = self.incoming.get_mut(&said.model) {
            incoming.waits = said.waits.clone();
        }
    }

    /// What arrives of a model comes by this patch, or as a whole.
    pub fn comes_by(&mut self, model: &str, patch: Option<&PatchId>) {
        if let Some(incoming) = self.incoming.get_mut(model) {
            incoming.patch = patch.cloned();
        }
    }

    /// Whether it says nothing, though it was told of a version: it may have been stopped.
    pub fn mute(&self, now: Time, patience: Duration) -> bool {
        self.told_at.map_or(false, |told| now.saturating_sub(told) >= patience)
    }
}

/// On what footing somebody is who says hello.
#[derive(Debug, PartialEq)]
pub enum Admission {
    New,
    /// SubscriberInput before.
    Known,
    /// Ask the one who has the name for a sign of life.
    Contested,
    /// Refuse: it has given one.
    Taken,
    /// Refuse: there is no room.
    Full,
}

/// The workers of one publisher.
#[derive(Default)]
pub struct Roster {
    peers: BTreeMap<String, Peer>,
    by_identity: HashMap<Identity, String>,
    by_token: HashMap<String, String>,
    by_ticket: HashMap<String, String>,
    models: usize, // of all of them
    revision: u64,
    touched: BTreeMap<u64, String>, // by revision, each of them once
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

    /// The number of the last change of which observers are told.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// The number of one more.
    pub fn revise(&mut self) -> u64 {
        self.revision += 1;
        self.revision
    }

    /// Observers are to be told of a worker.
    pub fn touch(&mut self, name: &str) {
        if let Some(peer) = self.peers.get_mut(name) {
            self.revision += 1;
            let at = std::mem::replace(&mut peer.revision, self.revision);
            let owned = self.touched.remove(&at).unwrap_or_else(|| name.to_owned());
            self.touched.insert(self.revision, owned);
        }
    }

    /// The workers of which observers were to be told after a revision, in order.
    pub fn changed(&self, since: u64) -> impl Iterator<Item = (u64, &Peer)> {
        let later = self.touched.range(since + 1..);
        later.filter_map(move |(&at, name)| Some((at, self.peers.get(name)?)))
    }

    /// Who is behind a connection.
    pub fn by_identity(&self, identity: &[u8]) -> Option<&str> {
        self.by_identity.get(identity).map(String::as_str)
    }

    /// Whose words begin with a token.
    pub fn by_token(&self, token: &str) -> Option<&str> {
        self.by_token.get(token).map(String::as_str)
    }

    /// Has a worker's words begin with a token.
    pub fn give(&mut self, name: &str, token: String) {
        if let Some(peer) = self.peers.get_mut(name) {
            peer.token = token.clone();
            self.by_token.insert(token, name.to_owned());
        }
    }

    /// Has a worker a ticket, in place of one that it has not shown yet.
    pub fn ticket(&mut self, name: &str, ticket: &str, now: Time) {
        if let Some(peer) = self.peers.get_mut(name) {
            let before = std::mem::replace(&mut peer.ticket, (ticket.to_owned(), now));
            self.by_ticket.remove(&before.0);
            self.by_ticket.insert(ticket.to_owned(), name.to_owned());
        }
    }

    /// Whose ticket this is, for the only time, and when it was drawn.
    pub fn redeem(&mut self, ticket: &str) -> Option<(String, Time)> {
        let name = self.by_ticket.remove(ticket)?;
        let drawn_at = self.get(&name)?.ticket.1;
        Some((name, drawn_at))
    }

    /// The names of those to whom a version for all is to go.
    pub fn wanting(&self, model: &str) -> Vec<String> {
        let live = self.iter().filter(|peer| !peer.lost() && peer.wants(model));
        live.map(|peer| peer.hello.name.clone()).collect()
    }

    /// Takes a hello: who has the name now, and on what footing.
    pub fn admit(
        &mut self,
        identity: &[u8],
        key: &str,
        hello: &Hello,
        now: Time,
        lost_after: Duration,
    ) -> Admission {
        let same = |peer: &Peer| peer.hello.instance == hello.instance && peer.key == key; // K3
        let held = self.get(&hello.name).map(|peer| (same(peer), peer.lost()));
        if held == Some((false, false)) {
            return self.contest(hello, now, lost_after);
        }
        if !self.has_room(hello) {
            return Admission::Full;
        }
        if held.map_or(false, |(known, _)| known) {
            self.readmit(identity, hello, now);
            return Admission::Known;
        }
        self.remove(&hello.name);
        self.models += hello.models.len();
        self.by_identity.insert(identity.to_vec(), hello.name.clone());
        self.peers.insert(hello.name.clone(), Peer::new(identity, key, hello, now));
        self.touch(&hello.name);
        Admission::New
    }

    /// Another instance lives under the name: whether that has given a sign of life since it was asked.
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

    fn readmit(&mut self, identity: &[u8], hello: &Hello, now: Time) {
        if let Some(peer) = self.peers.get_mut(&hello.name) {
            self.models = self.models + hello.models.len() - peer.hello.models.len();
            self.by_identity.remove(&peer.identity);
            self.by_identity.insert(identity.to_vec(), hello.name.clone());
            (peer.identity, peer.hello, peer.heard_at) = (identity.to_vec(), hello.clone(), now);
            if !peer.lost() {
                peer.phase.take(PeerEvent::Spoke);
            }
            peer.seen = Seen::default();
            self.touch(&hello.name);
        }
    }

    /// Whether a worker can be let in, if need be in place of those that are lost.
    fn has_room(&mut self, hello: &Hello) -> bool {
        if self.fits(hello) {
            return true;
        }
        let lost = self.iter().filter(|peer| peer.lost() && peer.hello.name != hello.name);
        let lost: Vec<String> = lost.map(|peer| peer.hello.name.clone()).collect();
        for name in lost {
            self.remove(&name);
        }
        self.fits(hello)
    }

    fn fits(&self, hello: &Hello) -> bool {
        let before = self.get(&hello.name).map(|peer| peer.hello.models.len());
        let workers = self.peers.len() + usize::from(before.is_none());
        let models = self.models + hello.models.len() - before.unwrap_or(0);
        workers <= WORKERS_MAX && models <= MODELS_MAX
    }

    /// Forgets a worker.
    pub fn remove(&mut self, name: &str) {
        if let Some(peer) = self.peers.remove(name) {
            self.models -= peer.hello.models.len();
            self.by_identity.remove(&peer.identity);
            self.by_token.remove(&peer.token);
            self.by_ticket.remove(&peer.ticket.0);
            self.touched.remove(&peer.revision);
        }
    }

    /// The live workers that have been silent for too long.
    pub fn silent(&self, now: Time, lost_after: Duration) -> Vec<String> {
        let silent = self.iter().filter(|p| !p.lost() && now.saturating_sub(p.heard_at) >= lost_after);
        silent.map(|peer| peer.hello.name.clone()).collect()
    }

    /// The workers that have been away for so long.
    pub fn gone(&self, now: Time, patience: Duration) -> Vec<String> {
        let away = |p: &&Peer| p.phase.is(PeerPhase::Away) && now.saturating_sub(p.closed_at) >= patience;
        self.iter().filter(away).map(|peer| peer.hello.name.clone()).collect()
    }
}
