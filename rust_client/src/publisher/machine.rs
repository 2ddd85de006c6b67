//! The publisher's state machine: makes all decisions, and has no sockets, threads or clocks.
//!
//! The caller passes each message to `receive`, each version of the user to `publish`, and the time to
//! `tick`. Each call returns the effects that the caller must carry out. While `pushing` returns a topic,
//! `push` returns the next chunks of that topic.
//!
//! ```text
//! hello ──> welcome                          adds the worker to the roster     joining.rs
//! publish ──> announce, chunk..., end        to all; or `announce` to some     publishing.rs
//! fetch ──> chunk...  | announce, end | refuse(gone)                           serving.rs
//! staged ──> commit | abort                  after the decision                calls.rs
//! applied | staged | failed                  advance the open publishes        reports.rs
//! below                                      reports workers behind a relay    behind.rs
//! silence ──> lost                           ends the worker's session        sessions.rs
//! observe ──> roster                         what each worker runs             observers.rs
//! verify ──> check ... verified              finds differing tensors           verifying.rs
//! ```
//!
//! The machine implements levels 1 to 3 of the protocol, with keys (`trust.rs`) and without. It
//! also implements patches (`patched.rs`), workers behind relays (`behind.rs`), and `applied` on the
//! data connection for workers that can send it there (P22). It does not publish through shared memory,
//! and does not work as a relay.

use super::absent::{Absent, Oversights};
use super::behind::ContestedRows;
use super::calls::Calls;
use super::effects::{Effect, Payload, WorkerEvent, WorkerEventKind};
use super::observers::{Observers, PossibleChange};
use super::phases::{PeerEvent, PeerPhase};
use super::push::Push;
use super::rate_limits::{cost_of, Notices, RateLimits};
use super::roster::{Peer, Roster};
use super::status::WorkerStatus;
use super::store::Store;
use super::trust::Trust;
use super::verifying::Checks;
use crate::limits::Timing;
use crate::messages::*;
use crate::transfer::Time;
use std::collections::BTreeMap;
use std::time::Duration;

const TOKEN_BYTES: usize = 32;

/// Returns the time since this publisher started. The clock must also run while the host is suspended.
pub type Age = Box<dyn Fn() -> Duration + Send>;
/// Returns 32 random hexadecimal digits; `None` if there are no random bytes.
pub type Draw = Box<dyn Fn() -> Option<String> + Send>;

/// The state of one publisher.
pub struct PublisherMachine {
    pub timing: Timing,
    /// Number of messages that were refused because they broke the protocol.
    pub malformed: u64,
    pub(super) data_endpoint: String,
    /// `None` if the user chose the epoch, which then never changes.
    pub(super) age: Option<Age>,
    pub(super) draw: Option<Draw>,
    pub(super) roster: Roster,
    pub(super) store: Store,
    pub(super) calls: Calls,
    // The pushes in progress, by topic. A model has up to two: of its latest version, and of a patch
    // whose result is that version.
    pub(super) pushes: BTreeMap<String, Push>,
    pub(super) absent: Absent,
    pub(super) contested_rows: ContestedRows,
    pub(super) renewed_at: Option<Time>,
    pub(super) renewal_pause: Duration, // least time between two changes of the epoch
    pub(super) trust: Option<Trust>,    // `None` without keys
    pub(super) observers: Observers,
    pub(super) checks: Checks,
    pub(super) oversights: Oversights,
    /// The address that workers connect to, for the notice that a publish reached no worker; empty
    /// if unknown.
    pub address: String,
    limits: RateLimits,
    notices: Notices,
    next_beacon_at: Time,
    effects: Vec<Effect>,
}

impl PublisherMachine {
    /// Returns a machine without workers. `data_endpoint` is the data address for workers.
    pub fn new(
        epoch: u64,
        data_endpoint: &str,
        timing: Timing,
        age: Option<Age>,
        draw: Option<Draw>,
    ) -> PublisherMachine {
        PublisherMachine {
            malformed: 0,
            data_endpoint: data_endpoint.to_owned(),
            age,
            draw,
            roster: Roster::default(),
            store: Store::new(epoch),
            calls: Calls::default(),
            pushes: BTreeMap::new(),
            absent: Absent::default(),
            contested_rows: ContestedRows::default(),
            renewed_at: None,
            renewal_pause: timing.lost_after,
            trust: None,
            observers: Observers::default(),
            checks: Checks::default(),
            oversights: Oversights::default(),
            address: String::new(),
            limits: RateLimits::new(timing.ping),
            notices: Notices::default(),
            timing,
            next_beacon_at: Time::ZERO,
            effects: Vec::new(),
        }
    }

    /// Returns the current epoch.
    pub fn epoch(&self) -> u64 {
        self.store.epoch
    }

    // Sending.

    /// Notifies the user of an event.
    pub(super) fn notify(&mut self, kind: WorkerEventKind, worker: &str, text: String) {
        self.effects.push(Effect::Notify(WorkerEvent { kind, worker: worker.to_owned(), text }));
    }

    /// Notifies the user of an event that a worker can cause any number of times. Each worker, or each
    /// key if there are keys, has its own rate limit, so that the events of one peer do not suppress those
    /// of others.
    pub(super) fn notify_limited(
        &mut self,
        kind: WorkerEventKind,
        worker: &str,
        key: &str,
        mut text: String,
        now: Time,
    ) {
        let source = if key.is_empty() { worker } else { key };
        if let Some(unreported) = self.notices.take(source, now) {
            if unreported > 0 {
                text += &format!(" (and {} more that were not reported)", unreported);
            }
            self.notify(kind, worker, text);
        }
    }

    /// Adds an effect to those that the current call returns.
    pub(super) fn perform(&mut self, effect: Effect) {
        self.effects.push(effect);
    }

    /// Sends a message to a worker, if the worker is on the roster and has a connection here.
    pub(super) fn send(&mut self, name: &str, message: FromPublisher, payload: Payload) {
        if let Some(peer) = self.roster.get(name).filter(|peer| !peer.identity.is_empty()) {
            let to = peer.identity.clone();
            self.effects.push(Effect::Send { to, message, payload });
        }
    }

    /// Sends a message without payload to a worker, as `send` does.
    pub(super) fn send_header(&mut self, name: &str, message: FromPublisher) {
        self.send(name, message, Payload::None);
    }

    /// True if the version of this epoch and number is in memory.
    pub fn offers(&self, model: &str, (epoch, number): (u64, u64)) -> bool {
        let versions = self.store.models.get(model).filter(|_| epoch == self.store.epoch);
        versions.map_or(false, |versions| versions.get(number).is_some())
    }

    /// Refuses the peer on the connection `to`, or only its request `fetch`.
    pub(super) fn refuse(&mut self, to: &[u8], code: &str, text: &str, fetch: Option<&Fetch>) {
        let refuse = Refuse {
            code: code.to_owned(),
            text: text.chars().take(crate::limits::TEXT_MAX).collect(),
            model: fetch.map(|fetch| fetch.model.clone()),
            epoch: fetch.map_or(0, |fetch| fetch.epoch),
            version: fetch.map_or(0, |fetch| fetch.version),
            ..Default::default()
        };
        let message = FromPublisher::Refuse(refuse);
        self.effects.push(Effect::Send { to: to.to_vec(), message, payload: Payload::None });
    }

    /// Drops unneeded versions and pushes. Then returns the effects: the user may publish again as soon
    /// as these end a publish, and then needs the memory.
    pub(super) fn finish(&mut self) -> Vec<Effect> {
        self.store.prune();
        let store = &self.store;
        self.pushes.retain(|_, push| {
            store.models.get(&push.model).map_or(false, |versions| versions.get(push.number).is_some())
        });
        std::mem::take(&mut self.effects)
    }

    // Receiving.

    /// Handles one message of a connection, or refuses the message if it is malformed. `payload_count` is
    /// the number of frames after the header.
    pub fn receive(&mut self, from: &[u8], header: &[u8], payload_count: usize, now: Time) -> Vec<Effect> {
        self.receive_of(from, "", header, payload_count, now)
    }

    /// Like `receive`, for a connection whose peer owns the public key `key`. `key` is empty if the
    /// publisher has no keys.
    pub fn receive_of(
        &mut self,
        from: &[u8],
        key: &str,
        header: &[u8],
        payload_count: usize,
        now: Time,
    ) -> Vec<Effect> {
        let name = self.roster.by_identity(from).map(str::to_owned);
        if self.belongs_to_other_key(name.as_deref(), key) {
            // K10: the worker that has this identity joined with another key.
            return vec![Effect::HangUp];
        }
        let unparsed_cost = cost_of(None, false);
        if name.is_none() && !self.limits.allow_unknown(now) {
            let allowed = self.limits.allow(from, unparsed_cost, header.len(), now);
            return if allowed { Vec::new() } else { vec![Effect::HangUp] };
        }
        if !self.may_connect(key) {
            if !self.limits.allow(from, unparsed_cost, header.len(), now) {
                return vec![Effect::HangUp];
            }
            self.refuse_revoked(from);
            return self.finish();
        }
        let message = to_publisher(header, payload_count);
        let cost = cost_of(message.as_ref().ok(), name.is_some());
        if !self.limits.allow(from, cost, header.len(), now) {
            return vec![Effect::HangUp];
        }
        match (message, name) {
            (Err(error), _) => {
                self.malformed += 1; // P5
                self.refuse(from, error.code(), &error.to_string(), None);
            }
            (Ok(ToPublisher::Observer(FromObserver::Observe(asked))), _) => {
                self.answer_observer(from, key, &asked, now)
            }
            (Ok(ToPublisher::Observer(FromObserver::Verify(asked))), _) => self.verify(from, key, asked, now),
            (Ok(ToPublisher::Worker(FromWorker::Hello(hello))), _) => self.hello(from, key, &hello, now),
            (Ok(ToPublisher::Worker(message)), Some(name)) => self.handle(&name, message, now),
            (Ok(ToPublisher::Worker(FromWorker::Bye(_))), None) => {}
            (Ok(ToPublisher::Worker(_)), None) => {
                let text = "say hello first: this publisher does not know this connection"; // P4
                self.refuse(from, "unknown-worker", text, None);
            }
        }
        self.finish()
    }

    /// Handles a message, not a hello, of a worker on the roster.
    fn handle(&mut self, name: &str, message: FromWorker, now: Time) {
        if let FromWorker::Bye(_) = message {
            return self.leave(name, "it sent goodbye", now);
        }
        let away = |peer: &Peer| peer.is_relay() && !peer.phase.is(PeerPhase::Here);
        if self.roster.get(name).map_or(false, away) {
            // R5: reports of the relay may be lost.
            return self.drop_session(name, "this relay was away", now);
        }
        self.note_message(name, now);
        self.send_group_key(name);
        let change = PossibleChange::of(&message);
        self.dispatch(name, message, now);
        self.note_for_observers(name, change, now);
    }

    /// Calls the handler of a message.
    fn dispatch(&mut self, name: &str, message: FromWorker, now: Time) {
        match message {
            FromWorker::Fetch(fetch) => self.fetch(name, &fetch, now),
            FromWorker::Progress(report) => self.progress(name, &report, now),
            FromWorker::Staged(report) => self.staged(name, &report, now),
            FromWorker::Applied(report) => {
                if let Some(peer) = self.roster.get_mut(name) {
                    peer.set_torn(&report.model, false);
                }
                self.applied(name, report, now);
            }
            FromWorker::Failed(report) => self.failed(name, &report, now),
            FromWorker::Ping(ping) => self.handle_ping(name, &ping, now),
            FromWorker::Checked(report) => self.checked(name, report),
            FromWorker::Below(report) => self.below(name, &report, now),
            FromWorker::Pong(_) | FromWorker::Hello(_) | FromWorker::Bye(_) => {}
        }
    }

    /// Handles a report from a data connection: the worker's token, and the message. Returns `None` if
    /// the token or the message is invalid (P22).
    ///
    /// The same report may already have arrived on the control connection, where workers repeat it.
    pub fn receive_report(&mut self, bytes: &[u8], now: Time) -> Option<Vec<Effect>> {
        let token = std::str::from_utf8(bytes.get(..TOKEN_BYTES)?).ok()?;
        let name = self.roster.by_token(token)?.to_owned();
        let report = match from_worker(&bytes[TOKEN_BYTES..], 0) {
            Ok(FromWorker::Applied(report)) => report,
            _ => return None,
        };
        let peer = self.roster.get_mut(&name)?;
        if !peer.is_lost() && !peer.torn.contains(&report.model) {
            let change = PossibleChange::Model(report.model.clone());
            peer.note_message(now);
            self.applied(&name, report, now);
            self.note_for_observers(&name, change, now);
        }
        Some(self.finish())
    }

    /// Records that a control connection is closed. Its worker is lost at once if another instance claims
    /// its name; otherwise the worker gets some time to connect again (P18).
    ///
    /// Must be called after all messages of the connection were handled: the last may be a `bye`.
    pub fn unreachable(&mut self, identity: &[u8], now: Time) -> Vec<Effect> {
        if let Some(name) = self.roster.by_identity(identity).map(str::to_owned) {
            if let Some(peer) = self.roster.get_mut(&name).filter(|peer| peer.phase.is(PeerPhase::Here)) {
                peer.note_closed(now);
                if peer.contested_at.is_some() {
                    self.lose(&name, PeerEvent::Contested, "its connection is closed", now);
                }
            }
        }
        self.finish()
    }

    /// Returns the beacon for a new subscriber of a topic, which confirms the subscription (P16). Returns
    /// `None` if the topic has no beacons.
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
            ..Default::default()
        })
    }

    // Time.

    /// Does everything that is due at `now`: sends beacons, finds lost workers, ends calls at their
    /// deadlines.
    pub fn tick(&mut self, now: Time) -> Vec<Effect> {
        self.limits.tick(now);
        self.notices.tick(now);
        if self.limits.recovered(now) {
            self.perform(Effect::GiveMemoryBack);
        }
        self.handle_contested_rows(now);
        self.check_workers(now);
        self.report_oversights(now);
        if now >= self.next_beacon_at {
            self.next_beacon_at = now + self.timing.ping;
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
        self.tick_checks(now);
        self.finish()
    }

    /// Ends every open publish with its results so far (P20).
    pub fn close(&mut self, now: Time) -> Vec<Effect> {
        self.calls.expire(now);
        self.settle_all(now);
        self.finish()
    }

    /// Returns the status of each worker by name.
    pub fn status(&self, now: Time) -> BTreeMap<String, WorkerStatus> {
        let of = |peer| WorkerStatus::of(peer, &self.store, &self.timing, now);
        self.roster.iter().map(|peer| (peer.hello.name.clone(), of(peer))).collect()
    }
}
