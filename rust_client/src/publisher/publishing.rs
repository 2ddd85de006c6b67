//! Publishes versions: announces and pushes a version to all workers, or only announces the version to
//! some workers (P6, P7).

use super::content::Content;
use super::effects::{Effect, Payload, WorkerEventKind};
use super::machine::PublisherMachine;
use super::offer::{Offer, VersionPatch};
use super::phases::TargetEvent;
use super::publication::{Publication, PublishTerms, Wait};
use super::push::{topic_of, Push, Step};
use super::roster::Peer;
use super::store::Version;
use crate::error::Error;
use crate::limits::{NAMED_MAX, WHOLE_BYTES_MAX};
use crate::messages::*;
use crate::transfer::{Key, Time};
use std::collections::BTreeSet;
use std::sync::Arc;

impl PublisherMachine {
    /// Publishes a version to every worker that subscribes to the model, or to the workers named in
    /// `terms`. `id` identifies the call in `Effect::Resolve`; `started` is the time of the user's call.
    ///
    /// Publishes nothing and returns an error if a named worker has never joined, or too many workers
    /// behind one relay are named.
    pub fn publish(
        &mut self,
        id: u64,
        model: &str,
        offer: impl Into<Offer>,
        terms: PublishTerms,
        started: Time,
        now: Time,
    ) -> Result<Vec<Effect>, Error> {
        let names = self.recipients(model, &terms)?;
        let offer = offer.into();
        for fault in &offer.faults {
            self.notify(WorkerEventKind::Notice, "", format!("{}: {}", model, fault));
        }
        let content = offer.content.clone();
        let versions = self.store.versions(model);
        let pending = versions.pending();
        let number = versions.add(offer);
        self.observers.published(model, number, now);
        if let Some(pending) = pending {
            self.end_pending_call(model, pending, "superseded by a newer publish", now);
        }
        let about = (content.plan.nbytes, &content.digest[..], &content.metadata);
        let mut call = Publication::new(id, model, self.store.key(number), about, terms, started);
        for name in &names {
            call.add_recipient(name);
            match self.roster.get(name) {
                None => {
                    call.apply_event(name, TargetEvent::Left, now, "it left before the publish");
                }
                Some(peer) if peer.is_lost() => {
                    call.apply_event(name, TargetEvent::Lost, now, "it was lost before the publish");
                }
                Some(_) => {}
            }
        }
        // Without relays, every recipient has a session here.
        let relays = self.roster.has_relays();
        let receiving = if relays { self.receiving(model, &call.terms) } else { names };
        self.begin_receiving(model, number, &call.terms, &receiving, now);
        let versions = self.store.versions(model);
        if !call.commits_together() {
            versions.commit(number, call.terms.workers.as_deref());
            if call.terms.workers.is_none() {
                self.store_latest(model, number);
            }
        }
        self.announce(&call, number, &receiving, now);
        self.calls.add(call);
        self.limit_calls(model, now);
        self.settle(id, now);
        Ok(self.finish())
    }

    /// Makes a version of an earlier publisher the latest of its model. `names` are the (epoch, version)
    /// pairs under which it was published. Must be called before any worker joins (P21).
    pub fn offer(&mut self, model: &str, content: Arc<Content>, names: BTreeSet<Key>) {
        let versions = self.store.versions(model);
        let number = versions.restore(content, names);
        versions.commit(number, None);
    }

    /// Adds the effect that stores a version, which is now the latest for all workers.
    pub(super) fn store_latest(&mut self, model: &str, number: u64) {
        let key = self.store.key(number);
        let version = self.store.models.get(model).and_then(|versions| versions.get(number));
        if let Some((content, names)) = version.map(|its| (its.content.clone(), its.names.clone())) {
            self.perform(Effect::Store { model: model.to_owned(), key, content, names });
        }
    }

    /// Returns the names of the recipients of a publish. Relays are not recipients.
    fn recipients(&self, model: &str, terms: &PublishTerms) -> Result<Vec<String>, Error> {
        let workers = match &terms.workers {
            None => return Ok(self.roster.subscribers(model)),
            Some(workers) => workers,
        };
        let known = |name: &String| self.roster.get(name).is_some() || self.absent.has_left(name);
        let unknown: Vec<&str> = workers.iter().filter(|name| !known(name)).map(String::as_str).collect();
        if unknown.is_empty() {
            for relay in self.roster.relays_before(workers) {
                let count = self.roster.named_behind(&relay, workers).len();
                if count > NAMED_MAX {
                    return Err(Error::Setup(format!(
                        "{} of the named workers are behind relay {}: name at most {}, or publish to all",
                        count, relay, NAMED_MAX
                    )));
                }
            }
            return Ok(workers.clone());
        }
        let known: Vec<&str> = self.roster.iter().map(|peer| peer.hello.name.as_str()).collect();
        Err(Error::UnknownWorker(format!(
            "no worker named {} has joined; known are {}: check the name, or wait_for_workers() first",
            unknown.join(", "),
            if known.is_empty() { "none".to_owned() } else { known.join(", ") }
        )))
    }

    /// Returns the names of the peers with sessions here to which a version is sent: recipients, and the
    /// relays before other recipients.
    fn receiving(&self, model: &str, terms: &PublishTerms) -> Vec<String> {
        let workers = match &terms.workers {
            None => return self.roster.receivers(model),
            Some(workers) => workers,
        };
        let here = |name: &&String| self.roster.get(name).map_or(false, Peer::in_session);
        let mut found: Vec<String> = workers.iter().filter(here).cloned().collect();
        let relays = self.roster.relays_before(workers);
        found.extend(relays.into_iter().filter(|relay| !workers.contains(relay)));
        found
    }

    /// Records that these peers begin to receive a version. For unresponsive peers the version is not kept.
    fn begin_receiving(
        &mut self,
        model: &str,
        number: u64,
        terms: &PublishTerms,
        names: &[String],
        now: Time,
    ) {
        let quiet = self.timing.quiet;
        let version = match self.store.versions(model).get_mut(number) {
            Some(version) => version,
            None => return,
        };
        if let Some(workers) = &terms.workers {
            version.restrict(workers);
        }
        for name in names {
            if let Some(peer) = self.roster.get_mut(name).filter(|peer| !peer.is_lost()) {
                peer.expect_answer(now);
                if !peer.is_unresponsive(now, quiet) {
                    version.add_receiver(name);
                }
            }
        }
    }

    /// Announces a version: by a broadcast if it is for all, and to each worker that no broadcast
    /// reaches (P6).
    fn announce(&mut self, call: &Publication, number: u64, names: &[String], now: Time) {
        let model = &call.model;
        let announce = match self.store.models.get(model).and_then(|versions| versions.get(number)) {
            Some(version) => self.announcement(model, version, Some(call)),
            None => return,
        };
        let all = call.terms.workers.is_none();
        if all {
            self.perform(Effect::Withdraw { model: model.clone() });
            self.broadcast(model, number, announce.clone(), now);
        }
        for name in names {
            let reached = |peer: &Peer| peer.is_lost() || (all && peer.subscribed);
            let needs_message = self.roster.get(name).map_or(false, |peer| !reached(peer));
            // R8: a relay gets versions for named workers one after the other, the oldest first.
            let later = !all
                && self.roster.get(name).map_or(false, Peer::is_relay)
                && self.next_owed(name, model) != Some(number);
            if needs_message && !later {
                let version = self.store.models.get(model).and_then(|versions| versions.get(number));
                if let Some(version) = version {
                    let announce = self.with_named_workers(name, announce.clone(), version);
                    self.send_header(name, FromPublisher::Announce(announce));
                }
            }
        }
    }

    /// Broadcasts an announcement, and begins to push what subscribers need (D6): the whole version, its
    /// first patch, or both. A small version is sent as the payload of the announcement instead. If the
    /// whole version is not pushed, no `end` of that version follows (S9).
    fn broadcast(&mut self, model: &str, number: u64, mut announce: Announce, now: Time) {
        self.end_pushes(model);
        let versions = self.store.versions(model);
        let (content, patches) = match versions.get(number) {
            Some(version) => (version.content.clone(), version.patches.clone()),
            None => return,
        };
        let layout_id = &content.header.layout.id;
        let known = versions.note_announced_layout(layout_id);
        let needs = self.subscriber_needs(model, &patches);
        let small = content.plan.count() == 1 && content.plan.nbytes <= WHOLE_BYTES_MAX;
        let mut payload = if known { Payload::None } else { Payload::Layout(content.clone()) };
        if needs.whole && known && small {
            announce.whole =
                Some(Whole { crc: content.crcs[0], digest: content.digest.clone(), ..Default::default() });
            payload = Payload::Chunk(content.clone(), 0);
        } else if needs.whole {
            self.begin_push(Push::new(model, number, content.clone(), None, now));
        }
        if let Some(first) = patches.first().filter(|_| needs.first_patch) {
            self.begin_push(Push::new(model, number, first.content.clone(), Some(first.id.clone()), now));
        }
        let topic = control_topic(model);
        self.perform(Effect::Broadcast { topic, message: FromPublisher::Announce(announce), payload });
    }

    fn broadcast_end(&mut self, model: &str, number: u64, content: &Content) {
        let message = FromPublisher::End(self.end(model, number, content, None));
        self.perform(Effect::Broadcast { topic: control_topic(model), message, payload: Payload::None });
    }

    /// Returns the announcement of a version. `call` is the undecided publish of the version; `None` if the
    /// version is already committed, so that workers apply it at once.
    pub(super) fn announcement(
        &self,
        model: &str,
        version: &Version,
        call: Option<&Publication>,
    ) -> Announce {
        let content = &version.content;
        let together = call.map_or(false, Publication::commits_together);
        let staged = together || call.map_or(false, |call| call.terms.wait == Wait::Staged);
        Announce {
            model: model.to_owned(),
            epoch: self.epoch(),
            version: version.number,
            layout: content.header.layout.id.clone(),
            layout_bytes: content.header.bytes.len() as u64,
            nbytes: content.plan.nbytes,
            chunk_bytes: content.plan.chunk_bytes,
            commit: if together { AnnounceCommit::Together } else { AnnounceCommit::Auto },
            acknowledge: if staged { AnnounceAcknowledge::Staged } else { AnnounceAcknowledge::Applied },
            encoding: "raw".to_owned(),
            keep: version.keep,
            patches: version.patches.iter().map(VersionPatch::offered).collect(),
            metadata: content.metadata.clone(),
            ..Default::default()
        }
    }

    pub(super) fn end(&self, model: &str, number: u64, content: &Content, patch: Option<PatchId>) -> End {
        let (model, epoch, digest) = (model.to_owned(), self.epoch(), content.digest.clone());
        End { model, epoch, version: number, digest, patch, ..Default::default() }
    }

    pub(super) fn commit(&self, model: &str, number: u64, content: &Content) -> Commit {
        let (model, epoch, digest) = (model.to_owned(), self.epoch(), content.digest.clone());
        Commit { model, epoch, version: number, digest, ..Default::default() }
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
            ..Default::default()
        })
    }

    // Pushing.

    fn begin_push(&mut self, push: Push) {
        self.pushes.insert(push.topic(), push);
    }

    /// Stops the pushes of a model.
    pub(super) fn end_pushes(&mut self, model: &str) {
        self.pushes.retain(|_, push| push.model != model);
    }

    /// Passes a worker's progress to the push of the same version or patch, if that is in progress.
    pub(super) fn report_push(&mut self, report: &Progress, now: Time) {
        let push = self.pushes.get_mut(&topic_of(&report.model, report.patch.as_ref()));
        if let Some(push) = push.filter(|push| push.number == report.version && push.patch == report.patch) {
            push.report(report.chunks, now);
        }
    }

    /// Returns the topics on which `push` has something to send now.
    pub fn pushing(&self) -> impl Iterator<Item = &String> {
        self.pushes.iter().filter(|(_, push)| push.is_ready()).map(|(topic, _)| topic)
    }

    /// Returns the effects that send the next chunks of a topic.
    pub fn push(&mut self, topic: &str, now: Time) -> Vec<Effect> {
        self.step(topic, now);
        self.finish()
    }

    /// Sends the next chunks of a topic, or the end.
    pub(super) fn step(&mut self, topic: &str, now: Time) {
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
                let message = FromPublisher::End(self.end(&model, number, &content, patch)); // D7
                self.perform(Effect::Broadcast { topic: topic.to_owned(), message, payload: Payload::None });
            }
        }
    }
}
