//! The open calls of publish: applies the workers' events to each call, and resolves the call when its
//! result is known.
//!
//! A call whose version the workers apply together stays open until the commit or abort, even if the
//! call is already resolved.

use super::absent::why_no_recipient;
use super::effects::{Effect, WorkerEventKind};
use super::machine::PublisherMachine;
use super::phases::{Decision, Outcome, TargetEvent, VersionEvent};
use super::publication::Publication;
use super::roster::Peer;
use crate::limits::CALLS_MAX;
use crate::messages::*;
use crate::transfer::{Key, Time};
use crate::words::escaped;
use std::collections::{BTreeMap, BTreeSet};

/// The open calls of one publisher.
#[derive(Default)]
pub struct Calls {
    open: BTreeMap<u64, Publication>,
    unreached_models: BTreeSet<String>, // models of which `warn_of_no_recipient` has notified the user
}

impl Calls {
    pub(super) fn add(&mut self, call: Publication) {
        self.open.insert(call.id, call);
    }

    /// True if the user was notified that a publish of the model reached no worker, and no subscriber
    /// of the model has joined since.
    pub(super) fn is_unreached(&self, model: &str) -> bool {
        self.unreached_models.contains(model)
    }

    fn ids(&self) -> Vec<u64> {
        self.open.keys().copied().collect()
    }

    /// Returns the open call of a version, if that version is not committed.
    pub(super) fn undecided(&self, model: &str, key: Key) -> Option<&Publication> {
        self.open.values().find(|c| c.key == key && c.model == model && !c.decision.is(Decision::Commit))
    }

    /// Records that an undecided version is announced to one worker again.
    pub(super) fn note_announced(&mut self, name: &str, model: &str, number: u64, now: Time) {
        for call in self.open.values_mut().filter(|call| call.model == model && call.key.1 == number) {
            call.note_announced(name, now);
        }
    }

    /// Records the encoding and size in which a version arrived at a worker.
    pub(super) fn record_transport(
        &mut self,
        name: &str,
        model: &str,
        key: Key,
        encoding: &'static str,
        nbytes: u64,
    ) {
        for call in self.open.values_mut().filter(|call| call.key == key && call.model == model) {
            call.record_transport(name, encoding, nbytes);
        }
    }

    /// Returns the start times of the open calls of a version.
    pub(super) fn start_times<'a>(&'a self, model: &'a str, key: Key) -> impl Iterator<Item = Time> + 'a {
        self.open.values().filter(move |call| call.key == key && call.model == model).map(|call| call.started)
    }

    /// Moves the deadlines of all calls to `now`.
    pub(super) fn expire(&mut self, now: Time) {
        for call in self.open.values_mut() {
            call.expire(now);
        }
    }
}

impl PublisherMachine {
    // Events.

    /// Ends the call of the version `pending`, which waits for its commit, with the reason `why`.
    pub(super) fn end_pending_call(&mut self, model: &str, pending: u64, why: &str, now: Time) {
        let key = self.store.key(pending);
        for id in self.calls.ids() {
            if let Some(call) = self.calls.open.get_mut(&id).filter(|c| c.key == key && c.model == model) {
                call.end(why);
                self.settle(id, now);
            }
        }
    }

    /// Ends the oldest open call of a model that has more than `CALLS_MAX` open calls. Calls stay open
    /// while workers apply nothing.
    pub(super) fn limit_calls(&mut self, model: &str, now: Time) {
        if self.calls.open.len() <= CALLS_MAX {
            return;
        }
        let same = || self.calls.open.values().filter(|call| call.model == model);
        let oldest = same().next().map(|call| call.id).filter(|_| same().count() > CALLS_MAX);
        if let Some(id) = oldest {
            if let Some(call) = self.calls.open.get_mut(&id) {
                call.end("newer versions of the model are open, and no worker applies them");
            }
            self.settle(id, now);
        }
    }

    /// Moves the calls whose versions are still offered from the epoch `before` to `epoch`.
    pub(super) fn renew_calls(&mut self, before: u64, epoch: u64) {
        for call in self.calls.open.values_mut().filter(|call| call.key.0 == before) {
            let versions = self.store.models.get(&call.model);
            if versions.map_or(false, |versions| versions.get(call.key.1).is_some()) {
                call.renew(epoch);
            }
        }
    }

    /// Updates the calls for a worker that joins or returns. Returns the (model, version) pairs that
    /// must be announced to the worker, because a commit waits until the worker has staged them.
    ///
    /// A relay is not a recipient of a call, but the workers behind the relay have to stage (R5).
    pub(super) fn rejoin_calls(&mut self, name: &str, now: Time) -> Vec<(String, u64)> {
        let hello = match self.roster.get(name) {
            Some(peer) if peer.is_relay() => return self.undecided_of_relay(name, peer),
            Some(peer) => &peer.hello,
            None => return Vec::new(),
        };
        let mut waiting = Vec::new();
        for model in hello.models.keys() {
            self.calls.unreached_models.remove(model);
        }
        for call in self.calls.open.values_mut() {
            if call.terms.workers.is_none() && hello.models.contains_key(&call.model) {
                call.add_joined(name);
            }
            call.apply_event(name, TargetEvent::Returned, now, "");
            if call.is_undecided() && call.outcome(name) == Some(Outcome::Behind) {
                waiting.push((call.model.clone(), call.key.1));
            }
        }
        waiting
    }

    /// Returns the undecided (model, version) pairs that are sent to a relay.
    fn undecided_of_relay(&self, name: &str, relay: &Peer) -> Vec<(String, u64)> {
        let calls = self.calls.open.values().filter(|call| call.is_undecided());
        let sent_to_relay = calls.filter(|call| {
            relay.subscribes_to(&call.model) && self.roster.is_recipient(name, call.terms.workers.as_deref())
        });
        sent_to_relay.map(|call| (call.model.clone(), call.key.1)).collect()
    }

    /// Returns the undecided (model, version) pairs that a worker should be receiving, and is not (P10).
    ///
    /// The announcement may have been lost, or ignored while the worker was catching up. Neither a pong nor
    /// the answer to a fetch of version 0 names an undecided version.
    pub(super) fn missed_undecided(&self, name: &str, now: Time) -> Vec<(String, u64)> {
        let peer = match self.roster.get(name) {
            Some(peer) => peer,
            None => return Vec::new(),
        };
        let missed = |call: &&Publication| {
            let (model, number) = (&call.model, call.key.1);
            let failed = peer.observed.failed.get(model).map_or(0, |(failed, _)| *failed);
            call.is_undecided()
                && peer.subscribes_to(model)
                && self.roster.is_recipient(name, call.terms.workers.as_deref())
                && !(peer.is_relay() && call.terms.workers.is_some()) // `announce_owed` announces it
                && peer.running_key(model) < call.key
                && failed != number
                && !peer.is_under_way(model, number, self.timing.lost_after, now)
                && now.saturating_sub(call.announced_at(name)) >= self.timing.ping
        };
        self.calls.open.values().filter(missed).map(|call| (call.model.clone(), call.key.1)).collect()
    }

    /// Marks a worker as lost in all calls. `gone` is true if the worker's connection is closed.
    pub(super) fn lose_in_calls(&mut self, name: &str, detail: &str, gone: bool, now: Time) {
        for id in self.calls.ids() {
            if let Some(call) = self.calls.open.get_mut(&id) {
                call.lose(name, now, detail, gone);
                self.settle(id, now);
            }
        }
    }

    /// Applies an event of a worker to the calls of the version `of`, or to all calls if `of` is `None`.
    pub(super) fn apply_to_calls(
        &mut self,
        name: &str,
        event: TargetEvent,
        of: Option<(&str, Key)>,
        now: Time,
    ) {
        for id in self.calls.ids() {
            let is_affected = |call: &&mut Publication| of.map_or(true, |of| of == (&call.model, call.key));
            if let Some(call) = self.calls.open.get_mut(&id).filter(is_affected) {
                call.apply_event(name, event, now, "");
                self.settle(id, now);
            }
        }
    }

    /// Records a worker's failure in the calls of that version, and notifies the user.
    pub(super) fn fail_in_calls(&mut self, name: &str, report: &Failed, now: Time) {
        let mut detail = format!("{}: {}", escaped(&report.code), escaped(&report.text));
        if !report.intact {
            detail += "; it runs no version now, until one is applied";
        }
        let key = (report.epoch, report.version);
        for id in self.calls.ids() {
            let call = match self.calls.open.get_mut(&id) {
                Some(call) if call.key == key && call.model == report.model => call,
                _ => continue,
            };
            if call.apply_event(name, TargetEvent::Failed, now, &detail) {
                let (model, version) = (&report.model, report.version);
                let text = format!("worker {} failed version {} of {}: {}", name, version, model, detail);
                self.notify(WorkerEventKind::Failed, name, text);
            }
            self.settle(id, now);
        }
    }

    /// Records in the calls of a model that a worker has its running version, and has skipped the
    /// older ones. `note` is the worker's text on the apply.
    pub(super) fn note_running(&mut self, name: &str, model: &str, note: &str, now: Time) {
        let runs = self.roster.get(name).map_or((0, 0), |peer| peer.running_key(model));
        for id in self.calls.ids() {
            let call = match self.calls.open.get_mut(&id) {
                Some(call) if call.model == model && call.key <= runs => call,
                _ => continue,
            };
            if call.key == runs {
                call.apply_event(name, TargetEvent::Applied, now, note);
            } else {
                call.apply_event(name, TargetEvent::Skipped, now, &format!("it runs version {}", runs.1));
            }
            self.settle(id, now);
        }
    }

    // Deciding and resolving.

    pub(super) fn settle_all(&mut self, now: Time) {
        for id in self.calls.ids() {
            self.settle(id, now);
        }
    }

    /// Commits or aborts the version of a call if the decision is due. Resolves the call if its result
    /// is known.
    pub(super) fn settle(&mut self, id: u64, now: Time) {
        let mut call = match self.calls.open.remove(&id) {
            Some(call) => call,
            None => return,
        };
        if call.decide(now) {
            self.carry_out_decision(&call);
        }
        if let Some(achieved) = call.verdict(now).filter(|_| !call.resolved) {
            call.resolve();
            self.explain(&mut call, now);
            call.set_relays(|name| Some(self.roster.get(name)?.through.clone()));
            let missing = if achieved { String::new() } else { self.shortfall_reason(&call) };
            self.perform(Effect::Resolve { id, receipt: call.receipt(now), achieved, missing });
            if achieved && call.has_no_recipient() {
                self.warn_of_no_recipient(&call);
            }
        }
        if !(call.resolved && (!call.commits_together() || !call.decision.is(Decision::Open))) {
            self.calls.add(call);
        }
    }

    /// Commits or aborts the version of a call, as decided, and sends `commit` or `abort` to the
    /// workers and relays.
    fn carry_out_decision(&mut self, call: &Publication) {
        let (model, number) = (&call.model, call.key.1);
        let live = |name: &&String| self.roster.get(name).map_or(false, |peer| !peer.is_lost());
        let live_names: Vec<String> = call.recipient_names().filter(live).cloned().collect();
        let mut relays = self.roster.relays_of(model);
        relays.retain(|name| call.outcome(name).is_none());
        let versions = self.store.versions(model);
        if call.decision.is(Decision::Commit) {
            versions.commit(number, call.terms.workers.as_deref());
            let content = match versions.get(number) {
                Some(version) => version.content.clone(),
                None => return,
            };
            if call.terms.workers.is_none() {
                self.store_latest(model, number);
            }
            let commit = self.commit(model, number, &content);
            for name in live_names.iter().filter(|name| call.outcome(name) == Some(Outcome::Staged)) {
                self.send_header(name, FromPublisher::Commit(commit.clone()));
            }
            let staged =
                |name: &&String| self.roster.get(name).map_or(false, |peer| peer.has_staged(model, number));
            let relays: Vec<&String> = relays.iter().filter(staged).collect();
            for name in relays {
                self.send_header(name, FromPublisher::Commit(commit.clone()));
            }
            return;
        }
        versions.apply_event(number, VersionEvent::Aborted);
        let text = if call.end_reason.is_empty() { "not enough staged" } else { &call.end_reason };
        let abort = Abort {
            model: model.clone(),
            epoch: call.key.0,
            version: number,
            text: text.to_owned(),
            ..Default::default()
        };
        for name in live_names.iter().chain(&relays) {
            self.send_header(name, FromPublisher::Abort(abort.clone()));
        }
    }

    /// Sets the detail of each unfinished recipient to a text on what the worker is doing.
    fn explain(&self, call: &mut Publication, now: Time) {
        call.explain(|name| {
            let heard_at = self.roster.get(name)?.heard_at;
            let doing = self.doing(name, now);
            let doing = if doing.is_empty() { "nothing heard of it yet" } else { &doing };
            let silent = now.saturating_sub(heard_at).as_secs_f64();
            Some(format!("{}; last heard {:.1} s ago", doing, silent))
        });
    }

    /// Returns the reasons why workers that subscribe to the model are absent, and are not recipients.
    fn absence_reasons(&self, call: &Publication) -> Vec<String> {
        let lost = self.roster.iter().filter(|peer| peer.is_lost() && peer.subscribes_to(&call.model));
        let lost = lost.filter(|peer| call.outcome(&peer.hello.name).is_none());
        let lost = lost.map(|peer| format!("worker {} is lost: {}", peer.hello.name, peer.lost_why));
        lost.chain(self.absent.reasons(&call.model)).collect()
    }

    /// Returns a text on how many expected workers are missing, and why; empty if none is missing.
    fn shortfall_reason(&self, call: &Publication) -> String {
        let missing = call.missing_count();
        if missing == 0 {
            return String::new();
        }
        let away = self.absence_reasons(call).join("; ");
        let (what, away) = match away.as_str() {
            "" => ("never came", "no worker was refused, is lost or has left"),
            away => ("are missing", away),
        };
        format!("{} of {} workers {} ({})", missing, call.terms.expect, what, away)
    }

    /// Notifies the user that a publish reached no worker. Does so once for each model, until a
    /// subscriber of the model joins.
    fn warn_of_no_recipient(&mut self, call: &Publication) {
        if !self.calls.unreached_models.insert(call.model.clone()) {
            return;
        }
        let mut why = self.absence_reasons(call).join("; ");
        if why.is_empty() {
            why = why_no_recipient(&call.model, &self.roster);
        }
        let mut text = format!(
            "version {} of {} was published to no worker: {}. It waits for those that join; expect=N waits for N workers",
            call.key.1, call.model, why
        );
        if !self.address.is_empty() {
            text += &format!("; they connect to {}", self.address);
        }
        self.notify(WorkerEventKind::Notice, "", text);
    }
}
