//! Handles `below`, by which relays report the workers behind them (R5 to R7).
//!
//! A row of such a report has the whole state of one worker, so a relay may repeat rows. A change in a row
//! advances the open publishes as the worker's own report would. The relay has already compared the digests.

use super::effects::WorkerEventKind;
use super::machine::PublisherMachine;
use super::phases::{PeerEvent, TargetEvent};
use super::publication::Wait;
use super::roster::WORKERS_MAX;
use crate::limits::RELAYS_MAX;
use crate::messages::*;
use crate::transfer::Time;
use std::collections::BTreeMap;
use std::time::Duration;

/// Rows that have no effect yet, because their workers have a session here or behind another relay:
/// by worker, the relay, the row, and the time of the report.
#[derive(Default)]
pub struct ContestedRows(BTreeMap<String, (String, WorkerRow, Time)>);

impl ContestedRows {
    /// Keeps a row. If two relays report the same worker, keeps the row of the relay that heard the
    /// worker last.
    fn insert(&mut self, relay: &str, row: &WorkerRow, now: Time) {
        let heard = |row: &WorkerRow, at: Time| at.saturating_sub(Duration::from_millis(row.heard_ms));
        if let Some((by, kept, at)) = self.0.get(&row.name) {
            if by != relay && heard(kept, *at) > heard(row, now) {
                return;
            }
        }
        if self.0.len() < WORKERS_MAX || self.0.contains_key(&row.name) {
            self.0.insert(row.name.clone(), (relay.to_owned(), row.clone(), now));
        }
    }

    /// Drops the row of a relay about this worker.
    fn remove(&mut self, relay: &str, name: &str) {
        if self.0.get(name).map_or(false, |(by, ..)| by == relay) {
            self.0.remove(name);
        }
    }

    /// Drops all rows of a relay.
    fn remove_all(&mut self, relay: &str) {
        self.0.retain(|_, (by, ..)| by != relay);
    }
}

impl PublisherMachine {
    /// Handles a relay's report of the workers behind it.
    pub(super) fn below(&mut self, relay: &str, report: &Below, now: Time) {
        if report.epoch != self.epoch() || !self.roster.get(relay).map_or(false, |peer| peer.is_relay()) {
            return;
        }
        if report.first {
            self.contested_rows.remove_all(relay);
        }
        for name in &report.left {
            self.contested_rows.remove(relay, name);
            let last = self.roster.get(name).filter(|peer| peer.is_behind(relay));
            if let Some(last) = last.and_then(|peer| peer.through.last().cloned()) {
                self.leave(name, &format!("as relay {} reports", last), now);
            }
        }
        let behind = if report.first { self.roster.names_behind(relay) } else { Vec::new() };
        if let Some(peer) = self.roster.get_mut(relay) {
            if report.first {
                peer.expect_rows(behind);
            }
            report.rows.iter().for_each(|row| peer.note_row(&row.name));
        }
        for row in &report.rows {
            self.handle_row(relay, row, now);
        }
        let unnamed = self.roster.get_mut(relay).filter(|_| !report.more).map(|peer| peer.take_unreported());
        for name in unnamed.into_iter().flatten() {
            if self.roster.get(&name).map_or(false, |peer| peer.is_behind(relay) && !peer.is_lost()) {
                self.lose(&name, PeerEvent::Silent, &format!("relay {} lacks it", relay), now);
            }
        }
    }

    /// Handles the kept rows of workers that are now lost or gone here. Drops rows of relays that are
    /// lost. The relays do not repeat these rows (R6).
    pub(super) fn handle_contested_rows(&mut self, now: Time) {
        let is_absent = |name: &str| self.roster.get(name).map_or(true, |peer| peer.is_lost());
        let over =
            |(name, (relay, ..)): &(&String, &(String, WorkerRow, Time))| is_absent(relay) || is_absent(name);
        let over: Vec<String> =
            self.contested_rows.0.iter().filter(over).map(|(name, _)| name.clone()).collect();
        for name in over {
            if let Some((relay, mut row, at)) = self.contested_rows.0.remove(&name) {
                if self.roster.get(&relay).map_or(false, |peer| !peer.is_lost()) {
                    row.heard_ms = row.heard_ms.saturating_add(now.saturating_sub(at).as_millis() as u64);
                    self.handle_row(&relay, &row, now);
                }
            }
        }
    }

    /// Handles the row of one worker.
    fn handle_row(&mut self, relay: &str, row: &WorkerRow, now: Time) {
        let name = &row.name;
        let through: Vec<String> =
            Some(relay).into_iter().map(str::to_owned).chain(row.through.iter().cloned()).collect();
        let heard_at = now.saturating_sub(Duration::from_millis(row.heard_ms));
        self.contested_rows.remove(relay, name);
        if through.len() > RELAYS_MAX || through.contains(name) {
            let text = format!("relay {} is in a loop: {} > {}", relay, through.join(" > "), name);
            return self.notify_of_relay(relay, relay, text, now);
        }
        let known = self.roster.get(name);
        if let Some(known) = known.filter(|known| !known.is_behind(relay) && !known.is_lost()) {
            if row.state == WorkerRowState::Lost {
                return; // the worker has left this relay, and is known elsewhere
            }
            let same = known.hello.instance == row.instance;
            if !same || heard_at <= known.heard_at {
                let text = format!(
                    "worker {} is {} and {}, in two processes: give one another name",
                    name,
                    location(&known.through),
                    location(&through)
                );
                self.contested_rows.insert(relay, row, now);
                if !same {
                    self.notify_of_relay(relay, name, text, now);
                }
                return;
            }
        }
        let hello = hello_of(row);
        match known.map(|known| (known.through == through && known.hello == hello, known.is_lost())) {
            Some((true, lost)) => {
                if lost && row.state != WorkerRowState::Lost {
                    self.answers_again(name);
                    self.rejoin_calls(name, now); // the relay announces what the worker must stage
                }
            }
            _ => {
                if !self.add_behind(relay, &hello, through, now) {
                    return;
                }
            }
        }
        if let Some(peer) = self.roster.get_mut(name) {
            let (subscribed, shared) = (row.road == WorkerRowRoad::Pushed, row.road == WorkerRowRoad::Shared);
            peer.note_heard_by_relay(heard_at, subscribed, shared);
        }
        for (model, doing) in &row.models {
            self.update_model(name, model, doing, now);
        }
        let live = self.roster.get(name).filter(|peer| !peer.is_lost());
        if let Some(last) = live.and_then(|peer| peer.through.last().cloned()) {
            if row.state == WorkerRowState::Lost {
                self.lose(name, PeerEvent::Silent, &format!("as relay {} reports", last), now);
            }
        }
        self.note_rows_for_observers(name, row.models.keys(), now);
    }

    /// Puts a worker behind relays on the roster, and removes a previous one with the same name.
    /// Returns false if there is no room.
    fn add_behind(&mut self, relay: &str, hello: &Hello, through: Vec<String>, now: Time) -> bool {
        let name = &hello.name;
        let before = self.roster.get(name).map(|peer| peer.is_relay() && peer.in_session());
        if before.is_some() {
            self.forget(name);
        }
        if before == Some(true) {
            self.lose_behind(name, now); // `relay` reports the workers behind `name`, too
        }
        let text = format!("worker {} is {}", name, location(&through));
        if !self.roster.add_behind(hello, through, now) {
            let text = format!("the roster is full: worker {} behind relay {} is left out", name, relay);
            self.notify_of_relay(relay, relay, text, now);
            return false;
        }
        self.absent.remove(name);
        self.notify(WorkerEventKind::Joined, name, text);
        self.rejoin_calls(name, now);
        true
    }

    /// Handles the state of one model in the row of a worker.
    fn update_model(&mut self, name: &str, model: &str, doing: &Doing, now: Time) {
        let epoch = self.epoch();
        let peer = match self.roster.get_mut(name) {
            Some(peer) => peer,
            None => return,
        };
        let (before, runs) = (peer.running_key(model), (doing.epoch, doing.version));
        let newer = doing.version > 0 && runs > before;
        if doing.version == 0 {
            peer.clear_running(model);
        } else if newer {
            let running = Running { epoch: doing.epoch, version: doing.version, ..Default::default() };
            peer.applied(model, running, epoch);
        }
        peer.note_relayed_delivery(model, doing, now);
        let shared = peer.shared_memory;
        if newer {
            if doing.took_us > 0 && !shared {
                self.record_transport(name, (model, runs), doing.patch.as_ref(), None, now);
            }
            self.note_running(name, model, "", now);
        }
        let key = self.store.key(doing.incoming);
        let staged = doing.phase == Some(ProgressPhase::Staged) && self.offers(model, key);
        if staged && !shared {
            self.record_transport(name, (model, key), doing.incoming_patch.as_ref(), None, now);
        }
        let awaited = self.calls.undecided(model, key);
        if staged && awaited.map_or(false, |call| call.commits_together() || call.terms.wait == Wait::Staged)
        {
            self.apply_to_calls(name, TargetEvent::Staged, Some((model, key)), now);
        }
        let peer = self.roster.get_mut(name).filter(|_| doing.failed > 0);
        if peer.map_or(false, |peer| peer.observed.note_failure(model, doing.failed, &doing.error)) {
            let (code, text) = doing.error.split_once(": ").unwrap_or((&doing.error, ""));
            let failed = Failed {
                model: model.to_owned(),
                epoch,
                version: doing.failed,
                code: if code.is_empty() { "failed" } else { code }.to_owned(),
                text: text.to_owned(),
                intact: doing.version > 0 || before == (0, 0),
                ..Default::default()
            };
            self.fail_in_calls(name, &failed, now);
        }
    }

    /// Notifies the user of an event that the rows of a relay can cause any number of times. The relay,
    /// or its key, has a rate limit.
    fn notify_of_relay(&mut self, relay: &str, worker: &str, text: String, now: Time) {
        let key = self.roster.get(relay).map_or_else(String::new, |peer| peer.key.clone());
        let source = if key.is_empty() { relay } else { &key };
        self.notify_limited(WorkerEventKind::Notice, worker, source, text, now);
    }
}

/// Returns a hello with those fields that are known of a worker behind a relay.
fn hello_of(row: &WorkerRow) -> Hello {
    Hello {
        name: row.name.clone(),
        instance: row.instance.clone(),
        models: row.models.keys().map(|model| (model.clone(), None)).collect(),
        features: if row.relay { vec![RELAY.to_owned()] } else { Vec::new() },
        client: row.client.clone(),
        host: row.host.clone(),
        pid: row.pid,
        ..Default::default()
    }
}

/// Returns a text on how a worker is connected.
fn location(through: &[String]) -> String {
    match through {
        [] => "connected to this publisher".to_owned(),
        relays => format!("behind relay {}", relays.join(" > ")),
    }
}
