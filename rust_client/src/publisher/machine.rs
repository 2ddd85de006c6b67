//! The publisher's behaviour, without sockets, threads or clocks.
//!
//! Feed it what arrives (`receive`), what the user wants (`publish`) and the passing of time (`tick`); it answers
//! with effects. `push` gives the next chunks while `pushing` says of what there are some.
//!
//! ```text
//! hello ──> welcome                          the worker is on the roster       sessions.rs
//! publish ──> announce, chunk..., end        pushed; or announce and end, to some workers alone
//! fetch ──> chunk...  | announce, end | refuse(gone)                           reports.rs
//! staged ──> commit | abort                  once decided                      calls.rs
//! applied | staged | failed                  move the publish along            reports.rs
//! silence ──> lost
//! ```
//!
//! It is of levels 1 to 3, with keys (`trust.rs`) and without, offers patches (`patched.rs`), and says `applied` on the
//! data connection to whoever can (P22). There is no shared road, and nobody looks on (P23): to `observe` it answers
//! `malformed`.

use super::calls::Calls;
use super::content::Content;
use super::effects::{Effect, Payload, WorkerEvent, WorkerEventKind};
use super::offer::{Offer, VersionPatch};
use super::patience::{cost_of, Patience};
use super::publication::{Asked, Publication, Require, Wait};
use super::push::{topic_of, Push, Step};
use super::roster::{Peer, Roster};
use super::sessions::Absent;
use super::status::WorkerStatus;
use super::store::{Kept, Store};
use super::trust::Trust;
use crate::limits::Timing;
use crate::messages::*;
use crate::transfer::Time;
use std::collections::BTreeMap;
use std::time::Duration;

/// Of a version that travels with its announcement, to all who hear that.
pub const WHOLE_BYTES_MAX: u64 = 1 << 18;
const TOKEN_BYTES: usize = 32;

/// Says for how long this publisher has been running, by a clock that never stops.
pub type Age = Box<dyn Fn() -> Duration + Send>;
/// Draws 32 hexadecimal digits that nobody can guess; nothing if there are none to be had.
pub type Draw = Box<dyn Fn() -> Option<String> + Send>;

/// One publisher.
pub struct Machine {
    pub timing: Timing,
    /// Messages dropped because they broke the protocol.
    pub malformed: u64,
    pub(super) data_endpoint: String,
    /// Nothing: the epoch was chosen, and is final.
    pub(super) age: Option<Age>,
    pub(super) draw: Option<Draw>,
    pub(super) roster: Roster,
    pub(super) store: Store,
    pub(super) calls: Calls,
    pub(super) pushes: BTreeMap<String, Push>, // by topic: of each model what was published last, and a patch to that
    pub(super) absent: Absent,
    pub(super) renewed_at: Option<Time>,
    pub(super) trust: Option<Trust>, // nothing: there are no keys
    patience: Patience,
    beacon_at: Time,
    out: Vec<Effect>,
}

impl Machine {
    /// `data_endpoint` is where workers are told that the data socket is.
    pub fn new(
        epoch: u64,
        data_endpoint: &str,
        timing: Timing,
        age: Option<Age>,
        draw: Option<Draw>,
    ) -> Machine {
        Machine {
            malformed: 0,
            data_endpoint: data_endpoint.to_owned(),
            age,
            draw,
            roster: Roster::default(),
            store: Store { epoch, models: BTreeMap::new() },
            calls: Calls::default(),
            pushes: BTreeMap::new(),
            absent: Absent::default(),
            renewed_at: None,
            trust: None,
            patience: Patience::new(timing.ping),
            timing,
            beacon_at: Time::ZERO,
            out: Vec::new(),
        }
    }

    /// Its incarnation.
    pub fn epoch(&self) -> u64 {
        self.store.epoch
    }

    // What goes out.

    pub(super) fn tell(&mut self, kind: WorkerEventKind, worker: &str, text: String) {
        self.out.push(Effect::Tell(WorkerEvent { kind, worker: worker.to_owned(), text }));
    }

    pub(super) fn perform(&mut self, effect: Effect) {
        self.out.push(effect);
    }

    /// Sends to a worker, if it is there.
    pub(super) fn send(&mut self, name: &str, message: FromPublisher, payload: Payload) {
        if let Some(peer) = self.roster.get(name) {
            let to = peer.identity.clone();
            self.out.push(Effect::Send { to, message, payload });
        }
    }

    pub(super) fn say(&mut self, name: &str, message: FromPublisher) {
        self.send(name, message, Payload::None);
    }

    /// Whether a version can be had, by its epoch and number.
    pub fn offers(&self, model: &str, (epoch, number): (u64, u64)) -> bool {
        let versions = self.store.models.get(model).filter(|_| epoch == self.store.epoch);
        versions.map_or(false, |versions| versions.get(number).is_some())
    }

    pub(super) fn refuse(&mut self, to: &[u8], code: &str, text: &str, fetch: Option<&Fetch>) {
        let refuse = Refuse {
            code: code.to_owned(),
            text: text.chars().take(crate::limits::TEXT_MAX).collect(),
            model: fetch.map(|fetch| fetch.model.clone()),
            epoch: fetch.map_or(0, |fetch| fetch.epoch),
            version: fetch.map_or(0, |fetch| fetch.version),
        };
        let message = FromPublisher::Refuse(refuse);
        self.out.push(Effect::Send { to: to.to_vec(), message, payload: Payload::None });
    }

    /// Lets memory go before calls are answered: whoever is may publish again at once.
    pub(super) fn finish(&mut self) -> Vec<Effect> {
        self.store.prune();
        let store = &self.store;
        self.pushes.retain(|_, push| {
            store.models.get(&push.model).map_or(false, |versions| versions.get(push.number).is_some())
        });
        std::mem::take(&mut self.out)
    }

    // What arrives.

    /// Takes one message of a connection. Whatever is malformed is refused.
    pub fn receive(&mut self, from: &[u8], header: &[u8], payloads: usize, now: Time) -> Vec<Effect> {
        self.receive_of(from, "", header, payloads, now)
    }

    /// The same of a connection of this public key, where there are keys.
    pub fn receive_of(
        &mut self,
        from: &[u8],
        key: &str,
        header: &[u8],
        payloads: usize,
        now: Time,
    ) -> Vec<Effect> {
        let name = self.roster.by_identity(from).map(str::to_owned);
        if self.is_of_another(name.as_deref(), key) {
            return Vec::new(); // K10: whoever dials may choose its identity. (libzmq has no call that hangs up on it.)
        }
        if name.is_none() && !self.patience.has_time(now) {
            return Vec::new();
        }
        if !self.may_come(key) {
            if self.patience.bears(from, cost_of(None, false), header.len(), now) {
                self.refuse_revoked(from);
            }
            return self.finish();
        }
        let message = from_worker(header, payloads);
        let cost = cost_of(message.as_ref().ok(), name.is_some());
        if !self.patience.bears(from, cost, header.len(), now) {
            return Vec::new();
        }
        match (message, name) {
            (Err(error), _) => {
                self.malformed += 1; // P5
                self.refuse(from, error.code(), &error.to_string(), None);
            }
            (Ok(FromWorker::Hello(hello)), _) => self.hello(from, key, &hello, now),
            (Ok(FromWorker::Bye), Some(name)) => self.leave(&name, "it said goodbye", now),
            (Ok(FromWorker::Bye), None) => {}
            (Ok(message), Some(name)) => {
                self.heard(&name, now);
                self.tell_keys(&name);
                self.heed(&name, message, now);
            }
            (Ok(_), None) => {
                let text = "say hello first: this publisher does not know this connection"; // P4
                self.refuse(from, "unknown-worker", text, None);
            }
        }
        self.finish()
    }

    fn heed(&mut self, name: &str, message: FromWorker, now: Time) {
        match message {
            FromWorker::Fetch(fetch) => self.fetched(name, &fetch, now),
            FromWorker::Progress(said) => self.progress(name, &said, now),
            FromWorker::Staged(said) => self.staged(name, &said, now),
            FromWorker::Applied(said) => {
                if let Some(peer) = self.roster.get_mut(name) {
                    peer.torn.remove(&said.model);
                }
                self.applied(name, said, now);
            }
            FromWorker::Failed(said) => self.failed(name, &said, now),
            FromWorker::Ping(ping) => self.pinged(name, &ping),
            FromWorker::Pong(_) | FromWorker::Hello(_) | FromWorker::Bye => {}
        }
    }

    /// Takes what somebody said on a data connection; nothing if it is no worker's word (P22).
    ///
    /// It may be late, or doubled: all of it is said again on the control channel.
    pub fn receive_word(&mut self, word: &[u8], now: Time) -> Option<Vec<Effect>> {
        let token = std::str::from_utf8(word.get(..TOKEN_BYTES)?).ok()?;
        let name = self.roster.by_token(token)?.to_owned();
        let said = match from_worker(&word[TOKEN_BYTES..], 0) {
            Ok(FromWorker::Applied(said)) => said,
            _ => return None,
        };
        let peer = self.roster.get(&name)?;
        if !peer.lost && !peer.torn.contains(&said.model) {
            self.heard(&name, now);
            self.applied(&name, said, now);
        }
        Some(self.finish())
    }

    /// A connection is gone. Its worker may reconnect, unless another wants its name.
    pub fn unreachable(&mut self, identity: &[u8], now: Time) -> Vec<Effect> {
        if let Some(name) = self.roster.by_identity(identity).map(str::to_owned) {
            let contested = self.roster.get(&name).map(|peer| peer.contested_at.is_some() && !peer.lost);
            if contested == Some(true) {
                self.lose(&name, "its connection is gone", now);
            }
        }
        self.finish()
    }

    /// Somebody has subscribed: what to tell it at once, so that it knows that it is heard (P16).
    pub fn subscribed(&self, topic: &str) -> Option<FromPublisher> {
        let model = topic.strip_suffix("/ctl").filter(|model| crate::fields::is_name(model))?;
        Some(self.beacon(model))
    }

    fn beacon(&self, model: &str) -> FromPublisher {
        let latest = self.store.models.get(model).and_then(|versions| versions.latest());
        FromPublisher::Beacon(Beacon {
            model: model.to_owned(),
            epoch: self.epoch(),
            version: latest.unwrap_or(0),
        })
    }

    // What the user wants.

    /// Publishes a version: to every worker that has the model, or to some by name. `started` is when it was called.
    ///
    /// A name that was never on the roster is an error, in words; then nothing was published.
    pub fn publish(
        &mut self,
        id: u64,
        model: &str,
        offer: impl Into<Offer>,
        asked: Asked,
        started: Time,
        now: Time,
    ) -> Result<Vec<Effect>, String> {
        let names = self.targets(model, &asked)?;
        let offer = offer.into();
        for fault in &offer.faults {
            self.tell(WorkerEventKind::Notice, "", format!("{}: {}", model, fault));
        }
        let content = offer.content.clone();
        let versions = self.store.models.entry(model.to_owned()).or_default();
        let pending = versions.pending;
        let number = versions.number(offer);
        if let Some(pending) = pending {
            self.give_up(model, pending, "superseded by a newer publish", now);
        }
        let about = (content.plan.nbytes, &content.digest[..]);
        let mut call = Publication::new(id, model, self.store.key(number), about, asked, started);
        let quiet = self.timing.quiet;
        let mut receivers = Vec::new();
        for name in &names {
            call.aim(name);
            if let Some(peer) = self.roster.get_mut(name) {
                if peer.lost {
                    call.lost_before(name, now);
                    continue;
                }
                peer.told_at = peer.told_at.or(Some(now));
                receivers.extend(Some(name.clone()).filter(|_| !peer.mute(now, quiet)));
            }
        }
        let versions = self.store.models.entry(model.to_owned()).or_default();
        if let Some(version) = versions.get_mut(number) {
            version.receivers.extend(receivers);
        }
        if call.together() {
            versions.pending = Some(number);
        } else {
            versions.settle(number, call.asked.workers.as_deref());
        }
        self.announce(&call, number, &names, now);
        self.calls.open(call);
        self.settle(id, now);
        Ok(self.finish())
    }

    fn targets(&self, model: &str, asked: &Asked) -> Result<Vec<String>, String> {
        let workers = match &asked.workers {
            None => return Ok(self.roster.wanting(model)),
            Some(workers) => workers,
        };
        let unknown: Vec<&str> =
            workers.iter().filter(|name| self.roster.get(name).is_none()).map(String::as_str).collect();
        if unknown.is_empty() {
            return Ok(workers.clone());
        }
        let known: Vec<&str> = self.roster.iter().map(|peer| peer.hello.name.as_str()).collect();
        Err(format!(
            "no worker named {} has joined; known are {}: check the name, or wait_for_workers() first",
            unknown.join(", "),
            if known.is_empty() { "none".to_owned() } else { known.join(", ") }
        ))
    }

    /// Says that a version is there: to all, or to each that would not hear that (P6).
    fn announce(&mut self, call: &Publication, number: u64, names: &[String], now: Time) {
        let model = &call.model;
        let announce = match self.store.models.get(model).and_then(|versions| versions.get(number)) {
            Some(version) => self.announcement(model, version, Some(call)),
            None => return,
        };
        let all = call.asked.workers.is_none();
        if all {
            self.perform(Effect::Withdraw { model: model.clone() });
            self.broadcast(model, number, announce.clone(), now);
        }
        for name in names {
            let hears = |peer: &Peer| peer.lost || (all && peer.subscribed);
            let alone = self.roster.get(name).map_or(false, |peer| !hears(peer));
            if alone {
                self.say(name, FromPublisher::Announce(announce.clone()));
            }
        }
    }

    /// Announces a version to all; begins to push it, unless it is so small that it goes along, or nobody listens.
    /// Those who listen for a patch are pushed the first (D6).
    fn broadcast(&mut self, model: &str, number: u64, mut announce: Announce, now: Time) {
        self.end_pushes(model);
        let versions = self.store.models.entry(model.to_owned()).or_default();
        let (content, patches) = match versions.get(number) {
            Some(version) => (version.content.clone(), version.patches.clone()),
            None => return,
        };
        let layout_id = &content.header.layout.id;
        let known = versions.announced_layout == *layout_id;
        versions.announced_layout = layout_id.clone();
        let listeners = self.listeners(model, &patches);
        let small = content.plan.count() == 1 && content.plan.nbytes <= WHOLE_BYTES_MAX;
        let mut payload = if known { Payload::None } else { Payload::Layout(content.clone()) };
        if listeners.whole && known && small {
            announce.whole = Some(Whole { crc: content.crcs[0], digest: content.digest.clone() });
            payload = Payload::Chunk(content.clone(), 0);
        } else if listeners.whole {
            self.begin_push(Push::new(model, number, content.clone(), None, now));
        }
        if let Some(first) = patches.first().filter(|_| listeners.first) {
            self.begin_push(Push::new(model, number, first.content.clone(), Some(first.id.clone()), now));
        }
        let topic = control_topic(model);
        self.perform(Effect::Broadcast { topic, message: FromPublisher::Announce(announce), payload });
        if !listeners.any {
            self.broadcast_end(model, number, &content); // nothing is pushed: who hears it all the same fetches
        }
    }

    fn broadcast_end(&mut self, model: &str, number: u64, content: &Content) {
        let message = FromPublisher::End(self.of_version(model, number, content));
        self.perform(Effect::Broadcast { topic: control_topic(model), message, payload: Payload::None });
    }

    /// The announcement of a version; a committed one is for everybody to apply at once.
    pub(super) fn announcement(&self, model: &str, version: &Kept, call: Option<&Publication>) -> Announce {
        let content = &version.content;
        let together = call.map_or(false, Publication::together);
        let staged = together || call.map_or(false, |call| call.asked.wait == Wait::Staged);
        Announce {
            model: model.to_owned(),
            epoch: self.epoch(),
            version: version.number,
            layout: content.header.layout.id.clone(),
            layout_bytes: content.header.bytes.len() as u64,
            nbytes: content.plan.nbytes,
            chunk_bytes: content.plan.chunk_bytes,
            commit: if together { CommitMode::Together } else { CommitMode::Auto },
            acknowledge: if staged { Acknowledge::Staged } else { Acknowledge::Applied },
            encoding: "raw".to_owned(),
            encryption: None,
            key: None,
            tag: None,
            shared: None,
            hash: false,
            whole: None,
            keep: version.keep,
            patches: version.patches.iter().map(VersionPatch::offered).collect(),
        }
    }

    pub(super) fn of_version(&self, model: &str, number: u64, content: &Content) -> OfVersion {
        OfVersion {
            model: model.to_owned(),
            epoch: self.epoch(),
            version: number,
            digest: content.digest.clone(),
            ..OfVersion::default()
        }
    }

    pub(super) fn chunk(
        &self,
        (model, number, patch): (&str, u64, Option<PatchId>),
        content: &Content,
        index: u64,
    ) -> FromPublisher {
        FromPublisher::Chunk(Chunk {
            model: model.to_owned(),
            epoch: self.epoch(),
            version: number,
            index,
            crc: content.crcs[index as usize],
            patch,
        })
    }

    // Pushing.

    fn begin_push(&mut self, push: Push) {
        self.pushes.insert(push.topic(), push);
    }

    /// Pushes no more of what was published of a model.
    pub(super) fn end_pushes(&mut self, model: &str) {
        self.pushes.retain(|_, push| push.model != model);
    }

    /// Some worker has so many chunks of what is pushed.
    pub(super) fn report_push(&mut self, said: &Progress, now: Time) {
        let push = self.pushes.get_mut(&topic_of(&said.model, said.patch.as_ref()));
        if let Some(push) = push.filter(|push| push.number == said.version && push.patch == said.patch) {
            push.report(said.chunks, now);
        }
    }

    /// The topics on which `push` has something to send now.
    pub fn pushing(&self) -> impl Iterator<Item = &String> {
        self.pushes.iter().filter(|(_, push)| push.ready()).map(|(topic, _)| topic)
    }

    /// The next chunks to publish on a topic.
    pub fn push(&mut self, topic: &str, now: Time) -> Vec<Effect> {
        self.step(topic, now);
        self.finish()
    }

    fn step(&mut self, topic: &str, now: Time) {
        let quiet = self.timing.quiet;
        let push = match self.pushes.get_mut(topic) {
            Some(push) => push,
            None => return,
        };
        let step = push.step(now, quiet);
        let (model, number, content, patch) =
            (push.model.clone(), push.number, push.content.clone(), push.patch.clone());
        match step {
            Step::Nothing => {}
            Step::Chunks(indexes) => {
                for index in indexes {
                    let message = self.chunk((&model, number, patch.clone()), &content, index);
                    let payload = Payload::Chunk(content.clone(), index);
                    self.perform(Effect::Broadcast { topic: topic.to_owned(), message, payload });
                }
            }
            Step::End => {
                self.pushes.remove(topic);
                if patch.is_none() {
                    return self.broadcast_end(&model, number, &content);
                }
                let end = OfVersion { patch, ..self.of_version(&model, number, &content) }; // D7
                let message = FromPublisher::End(end);
                self.perform(Effect::Broadcast { topic: topic.to_owned(), message, payload: Payload::None });
            }
        }
    }

    // Time.

    /// Does what is due: beacons, lost workers, deadlines.
    pub fn tick(&mut self, now: Time) -> Vec<Effect> {
        self.patience.tick(now);
        self.look_after(now);
        if now >= self.beacon_at {
            self.beacon_at = now + self.timing.ping;
            let settled = self.store.models.iter().filter(|(_, versions)| versions.latest().is_some());
            let beacons: Vec<_> =
                settled.map(|(model, _)| (control_topic(model), self.beacon(model))).collect();
            for (topic, message) in beacons {
                self.perform(Effect::Broadcast { topic, message, payload: Payload::None });
            }
        }
        let topics: Vec<String> = self.pushes.keys().cloned().collect();
        for topic in topics {
            self.step(&topic, now);
        }
        self.settle_all(now);
        self.finish()
    }

    /// Resolves every call that is still open, as it stands (P20).
    pub fn close(&mut self, now: Time) -> Vec<Effect> {
        self.calls.end_at(now);
        self.settle_all(now);
        self.finish()
    }

    /// Who is there, and who runs which version.
    pub fn status(&self, now: Time) -> BTreeMap<String, WorkerStatus> {
        let of = |peer| WorkerStatus::of(peer, &self.store, &self.timing, now);
        self.roster.iter().map(|peer| (peer.hello.name.clone(), of(peer))).collect()
    }
}

impl Default for Asked {
    fn default() -> Asked {
        Asked {
            workers: None,
            require: Require::All,
            wait: Wait::Applied,
            commit: CommitMode::Auto,
            timeout: Duration::from_secs(60),
            grace: Duration::from_secs(5),
            expect: 0,
        }
    }
}
