//! Tracks the sessions of workers: which workers answer, return, make no progress, are lost, or have left.

use super::effects::WorkerEventKind;
use super::machine::PublisherMachine;
use super::phases::{PeerEvent, TargetEvent};
use super::roster::{is_relay, Peer};
use super::status::{doing_text, is_stuck};
use super::store::Version;
use crate::messages::*;
use crate::transfer::Time;

impl PublisherMachine {
    /// Answers a ping (P17). The worker is also sent what it has to stage and may have missed (P10), and a
    /// relay the versions that named workers behind it lack (R8).
    pub(super) fn handle_ping(&mut self, name: &str, ping: &Ping, now: Time) {
        let models = match self.roster.get_mut(name) {
            Some(peer) => {
                peer.set_subscribed(ping.subscribed);
                self.store.latest_by_model(name, peer.hello.models.keys())
            }
            None => return,
        };
        self.send_header(
            name,
            FromPublisher::Pong(Pong {
                token: ping.token,
                epoch: self.epoch(),
                models,
                ..Default::default()
            }),
        );
        for (model, number) in self.missed_undecided(name, now) {
            self.announce_undecided(name, &model, number, now);
        }
        let relay = self.roster.get(name).filter(|peer| peer.is_relay());
        let models: Vec<String> =
            relay.into_iter().flat_map(|relay| relay.hello.models.keys().cloned()).collect();
        for model in models {
            self.announce_owed(name, &model, now);
        }
    }

    /// Announces an undecided version to one worker, and records when.
    fn announce_undecided(&mut self, name: &str, model: &str, number: u64, now: Time) {
        self.calls.note_announced(name, model, number, now);
        self.announce_to(name, model, number, false);
    }

    /// Announces to a relay the next version for named workers behind it, unless that version is arriving
    /// there (R8). A worker may have come to the relay after the publish.
    pub(super) fn announce_owed(&mut self, name: &str, model: &str, now: Time) {
        let number = match self.next_owed(name, model) {
            Some(number) => number,
            None => return,
        };
        let patience = self.timing.lost_after;
        if self.roster.get(name).map_or(false, |relay| !relay.is_under_way(model, number, patience, now)) {
            self.announce_to(name, model, number, false);
        }
    }

    /// Returns the number of the oldest version that named workers behind a relay need and the relay lacks
    /// (R8). Returns `None` if there is none, or the worker is not a relay.
    ///
    /// These versions are announced one after the other: for a newer version, a relay drops the version
    /// that is arriving.
    pub(super) fn next_owed(&self, name: &str, model: &str) -> Option<u64> {
        let relay = self.roster.get(name).filter(|peer| peer.is_relay())?;
        let failed = relay.observed.failed.get(model).map_or(0, |(failed, _)| *failed);
        let runs = |worker: &String| self.roster.get(worker).map(|peer| peer.running_key(model));
        let needed = |version: &&Version| {
            let key = self.store.key(version.number);
            let named = || self.roster.named_behind(name, version.only.iter().flatten());
            let lacks = relay.running_key(model) < key && version.number != failed;
            lacks && named().iter().filter_map(runs).any(|its| its < key)
        };
        let mut named = self.store.models.get(model)?.for_named_workers();
        named.find(needed).map(|version| version.number)
    }

    /// Records that a worker has sent a message on its control connection.
    pub(super) fn note_message(&mut self, name: &str, now: Time) {
        if let Some(peer) = self.roster.get_mut(name) {
            peer.note_message(now);
            if peer.is_lost() {
                self.resume_worker(name, now);
            } else {
                peer.apply_event(PeerEvent::Spoke);
            }
        }
    }

    /// Announces the versions that a worker may have missed, when it joins or answers again (P18).
    pub(super) fn resume_worker(&mut self, name: &str, now: Time) {
        self.answers_again(name);
        for (model, number) in self.rejoin_calls(name, now) {
            self.announce_undecided(name, &model, number, now);
        }
    }

    /// Records that a worker answers again, and notifies the user if it was lost or away.
    pub(super) fn answers_again(&mut self, name: &str) {
        if self.roster.get_mut(name).map_or(false, |peer| peer.apply_event(PeerEvent::Spoke)) {
            self.notify(WorkerEventKind::Back, name, format!("worker {} answers again", name));
        }
    }

    /// Marks silent and disconnected workers as lost. Notifies the user of workers that are stuck, or make
    /// progress again.
    pub(super) fn check_workers(&mut self, now: Time) {
        for name in self.roster.silent_workers(now, self.timing.lost_after) {
            let heard = self.roster.get(&name).map_or(now, |peer| peer.heard_at);
            let silent = now.saturating_sub(heard).as_secs_f64();
            self.lose(&name, PeerEvent::Silent, &format!("silent for {:.1} s", silent), now);
        }
        let patience = self.timing.gone_after;
        for name in self.roster.disconnected_workers(now, patience) {
            let why =
                format!("its connection is closed, and it opened no other in {} s", patience.as_secs_f64());
            self.lose(&name, PeerEvent::Overdue, &why, now);
        }
        let timing = self.timing;
        let mut turned = Vec::new();
        for peer in self.roster.iter_mut().filter(|peer| !peer.is_lost()) {
            let stuck = is_stuck(peer, &timing, now);
            if peer.set_stuck(stuck) {
                turned.push((peer.hello.name.clone(), stuck));
            }
        }
        for (name, stuck) in turned {
            if stuck {
                let text = format!("worker {} is stuck: {}", name, self.doing(&name, now));
                self.notify(WorkerEventKind::Stuck, &name, text);
            } else {
                self.notify(WorkerEventKind::Back, &name, format!("worker {} moves again", name));
            }
        }
        self.release_for_unresponsive(now);
    }

    /// Releases the versions that are kept for unresponsive workers, except those that these workers were
    /// receiving (P9).
    fn release_for_unresponsive(&mut self, now: Time) {
        let quiet = self.timing.quiet;
        for peer in self.roster.iter().filter(|peer| !peer.is_lost() && peer.is_unresponsive(now, quiet)) {
            for (model, versions) in &mut self.store.models {
                let receiving = peer.incoming.get(model).map_or(0, |incoming| incoming.version);
                versions.keep_receiving_only(&peer.hello.name, receiving);
            }
        }
    }

    /// Marks a worker as lost by an event, and notifies the user. A silent worker may still be running.
    pub(super) fn lose(&mut self, name: &str, event: PeerEvent, why: &str, now: Time) {
        let doing = self.doing(name, now);
        let detail = if doing.is_empty() { why.to_owned() } else { format!("{} while {}", why, doing) };
        if let Some(peer) = self.roster.get_mut(name) {
            peer.lose(event, &detail);
        }
        self.forget(name);
        self.notify(WorkerEventKind::Lost, name, format!("worker {} is lost: {}", name, detail));
        self.lose_in_calls(name, &detail, event != PeerEvent::Silent, now);
        if self.roster.get(name).map_or(false, Peer::is_relay) {
            self.lose_behind(name, now);
        }
    }

    /// Marks the workers behind a relay as lost. They may soon return through another relay (R5).
    pub(super) fn lose_behind(&mut self, relay: &str, now: Time) {
        for name in self.roster.names_behind(relay) {
            if self.roster.get(&name).map_or(false, |peer| !peer.is_lost()) {
                self.lose(&name, PeerEvent::Silent, &format!("its relay {} is gone", relay), now);
                self.roster.touch(&name);
            }
        }
    }

    /// Ends the session of a worker, which must then send hello again.
    pub(super) fn drop_session(&mut self, name: &str, why: &str, now: Time) {
        if let Some(peer) = self.roster.get(name) {
            let (to, lost) = (peer.identity.clone(), peer.is_lost());
            self.roster.disconnect(name);
            self.refuse(&to, "unknown-worker", &format!("{}: say hello again", why), None);
            if !lost {
                self.lose(name, PeerEvent::Silent, why, now);
            }
        }
    }

    /// Returns a text on what a worker is doing; empty if no version is being delivered.
    pub(super) fn doing(&self, name: &str, now: Time) -> String {
        let incoming = self.roster.get(name).into_iter().flat_map(|peer| &peer.incoming);
        let phases = incoming.map(|(model, its)| doing_text(model, its, &self.store, &self.timing, now));
        phases.collect::<Vec<_>>().join("; ")
    }

    /// Forgets the deliveries to a worker that is gone, so that no version is kept for it.
    pub(super) fn forget(&mut self, name: &str) {
        if let Some(peer) = self.roster.get_mut(name) {
            peer.forget_deliveries();
        }
        for versions in self.store.models.values_mut() {
            versions.forget_worker(name);
        }
    }

    /// Removes a worker that has left. No call of publish waits for the worker any more.
    pub(super) fn leave(&mut self, name: &str, why: &str, now: Time) {
        self.forget(name);
        let text = format!("worker {} has left: {}", name, why);
        let hello = self.roster.get(name).map(|peer| peer.hello.clone());
        if let Some(hello) = &hello {
            self.absent.note(hello, "left", &text, now);
        }
        self.roster.remove(name);
        self.notify(WorkerEventKind::Left, name, text);
        self.apply_to_calls(name, TargetEvent::Left, None, now);
        if hello.as_ref().map_or(false, is_relay) {
            self.lose_behind(name, now);
        }
    }
}
