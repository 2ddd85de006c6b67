//! What workers ask for, and what they say that they do with versions, and how far a publisher believes it.

use super::content::Content;
use super::effects::{Payload, WorkerEventKind};
use super::machine::PublisherMachine;
use super::phases::{TargetEvent, VersionPhase};
use crate::messages::*;
use crate::transfer::Time;
use std::sync::Arc;

impl PublisherMachine {
    // Giving versions out.

    /// Answers a worker that asks for a version, or for chunks of one (P8).
    pub(super) fn fetched(&mut self, name: &str, fetch: &Fetch, now: Time) {
        let versions = self.store.of(&fetch.model, fetch.epoch);
        let number = versions.and_then(|versions| match fetch.version {
            0 => versions.latest_for(name),
            number => versions.get(number).map(|version| version.number),
        });
        let found = number.and_then(|number| self.content(&fetch.model, number));
        let (number, content) = match (number, found) {
            (Some(number), Some(content)) => (number, content),
            _ => return self.gone(name, fetch),
        };
        if let Some(patch) = &fetch.patch {
            return self.fetched_patch(name, fetch, patch, number, now);
        }
        self.told_why(name, fetch, number);
        if fetch.count == 0 {
            return self.describe(name, &fetch.model, number, fetch.layout);
        }
        if fetch.version == 0 || fetch.first + fetch.count > content.plan.count() {
            let text = format!(
                "chunks {} to {} of version {} were asked for; version {} has {}",
                fetch.first,
                fetch.first + fetch.count - 1,
                fetch.version,
                number,
                content.plan.count()
            );
            return self.refuse_fetch(name, fetch, "range", &text);
        }
        self.give(name, fetch, number, &content, now);
    }

    /// Gives out chunks of a version, or of the patch that was asked for.
    pub(super) fn give(&mut self, name: &str, fetch: &Fetch, number: u64, content: &Arc<Content>, now: Time) {
        if let Some(versions) = self.store.find(&fetch.model) {
            versions.left(name, number);
        }
        if self.asks(name, &fetch.model, number) {
            if let Some(peer) = self.roster.get_mut(name) {
                peer.note(&fetch.model, number, Doing::Receiving, None, now);
                peer.comes_by(&fetch.model, fetch.patch.as_ref());
            }
        }
        for index in fetch.first..fetch.first + fetch.count {
            let chunk = self.chunk((&fetch.model, number, fetch.patch.clone()), content, index);
            self.send(name, chunk, Payload::Chunk(content.clone(), index));
        }
    }

    /// Keeps a version for a worker that asks for it, unless it runs it by now: what it says on its data connection
    /// overtakes what it has asked (P19).
    fn asks(&mut self, name: &str, model: &str, number: u64) -> bool {
        let key = self.store.key(number);
        let needs = self.roster.get(name).map_or(false, |peer| peer.runs(model) < key);
        let version = self.store.find(model).and_then(|its| its.get_mut(number));
        if let Some(version) = version.filter(|_| needs) {
            version.read_by(name);
        }
        needs
    }

    fn content(&self, model: &str, number: u64) -> Option<Arc<Content>> {
        Some(self.store.models.get(model)?.get(number)?.content.clone())
    }

    pub(super) fn refuse_fetch(&mut self, name: &str, fetch: &Fetch, code: &str, text: &str) {
        if let Some(to) = self.roster.get(name).map(|peer| peer.identity.clone()) {
            self.refuse(&to, code, text, Some(fetch));
        }
    }

    /// What was asked for is not to be had: says so, and what there is instead.
    fn gone(&mut self, name: &str, fetch: &Fetch) {
        let text = format!("version {} of epoch {} is not to be had here", fetch.version, fetch.epoch);
        self.refuse_fetch(name, fetch, "gone", &text);
        let latest = self.store.models.get(&fetch.model).and_then(|versions| versions.latest_for(name));
        if let Some(latest) = latest.filter(|&latest| self.store.key(latest) != (fetch.epoch, fetch.version))
        {
            self.describe(name, &fetch.model, latest, false);
        }
    }

    /// Announces a version to one worker, and says what the whole hashes to.
    pub(super) fn describe(&mut self, name: &str, model: &str, number: u64, layout: bool) {
        let content = match self.content(model, number) {
            Some(content) => content,
            None => return,
        };
        self.asks(name, model, number);
        let call = self.calls.undecided(model, self.store.key(number));
        let announce = match self.store.models.get(model).and_then(|versions| versions.get(number)) {
            Some(version) => self.announcement(model, version, call),
            None => return,
        };
        let payload = if layout { Payload::Layout(content.clone()) } else { Payload::None };
        self.send(name, FromPublisher::Announce(announce), payload);
        let end = self.of_version(model, number, &content);
        self.say(name, FromPublisher::End(end));
    }

    // Reports.

    /// A worker says how far it is with a version (P14).
    pub(super) fn progress(&mut self, name: &str, said: &Progress, now: Time) {
        if !self.store.of(&said.model, said.epoch).map_or(false, |versions| versions.had(said.version)) {
            return;
        }
        self.report_push(said, now);
        let peer = match self.roster.get_mut(name) {
            Some(peer) if peer.runs(&said.model) < (said.epoch, said.version) => peer, // P19
            _ => return,
        };
        let receiving = said.phase == Doing::Receiving;
        let versions = match self.store.find(&said.model) {
            Some(versions) => versions,
            None => return,
        };
        let here = versions.get(said.version).is_some();
        if receiving && !here {
            return; // what it applies may be gone by now, if that takes so long
        }
        let coming = versions.get(said.version).filter(|_| receiving);
        if let Some(plan) = coming.and_then(|version| version.plan_of(said.patch.as_ref())) {
            peer.learn(said, plan, now);
        }
        peer.note_progress(said, now);
        versions.left(name, said.version + u64::from(!receiving));
        if let Some(version) = versions.get_mut(said.version).filter(|_| receiving) {
            version.read_by(name);
        }
    }

    /// A worker says that it has staged a version (P11).
    pub(super) fn staged(&mut self, name: &str, said: &OfVersion, now: Time) {
        let versions = match self.store.of(&said.model, said.epoch) {
            Some(versions) => versions,
            None => return,
        };
        let content = match versions.get(said.version) {
            Some(version) => version.content.clone(),
            None => {
                let text = "the version was aborted or superseded".to_owned();
                let abort =
                    Abort { model: said.model.clone(), epoch: said.epoch, version: said.version, text };
                return self.say(name, FromPublisher::Abort(abort));
            }
        };
        if content.digest != said.digest {
            return self.wrong_digest(name, said);
        }
        versions.left(name, said.version + 1);
        if let Some(peer) = self.roster.get_mut(name) {
            if peer.runs(&said.model) < (said.epoch, said.version) {
                peer.note(&said.model, said.version, Doing::Staged, None, now);
            }
        }
        self.carried(name, said, false, now);
        self.calls_take(name, TargetEvent::Staged, Some((&said.model, (said.epoch, said.version))), now);
        let version = self.store.models.get(&said.model).and_then(|versions| versions.get(said.version));
        if version.map_or(false, |version| !version.phase.is(VersionPhase::Pending)) {
            let commit = self.of_version(&said.model, said.version, &content);
            self.say(name, FromPublisher::Commit(commit));
        }
    }

    /// A worker says that it runs a version (P12).
    pub(super) fn applied(&mut self, name: &str, said: OfVersion, now: Time) {
        let running = Running { epoch: said.epoch, version: said.version, digest: said.digest.clone() };
        match self.roster.get(name) {
            Some(peer) if peer.wants(&said.model) => {}
            _ => return,
        }
        if !self.plausible(&said.model, &running) {
            let versions = self.store.of(&said.model, said.epoch);
            if versions.map_or(false, |versions| versions.had(said.version)) {
                self.wrong_digest(name, &said); // P15
            }
            return;
        }
        let key = (said.epoch, said.version);
        if self.roster.get(name).map_or(false, |peer| peer.runs(&said.model) < key) {
            self.carried(name, &said, true, now);
        }
        if let Some(versions) = self.store.of(&said.model, said.epoch) {
            versions.left(name, said.version + 1);
        }
        let epoch = self.epoch();
        let peer = match self.roster.get_mut(name) {
            Some(peer) if peer.runs(&said.model) < key => peer,
            _ => return, // a repetition
        };
        peer.applied(&said.model, running, epoch);
        self.arrived(name, &said.model, now);
    }

    /// A worker says that it will not run a version (P13).
    pub(super) fn failed(&mut self, name: &str, said: &Failed, now: Time) {
        let peer = match self.roster.get_mut(name) {
            Some(peer) if peer.wants(&said.model) => peer,
            _ => return,
        };
        if !said.intact {
            peer.tore(&said.model, true);
        }
        let versions = match self.store.of(&said.model, said.epoch) {
            Some(versions) => versions,
            None => return,
        };
        versions.left(name, said.version + 1);
        peer.drops(&said.model, said.version);
        self.calls_failed(name, said, now);
    }

    /// Whether a worker may run what it says it runs: if that is of an older epoch, or too long ago to say, or there
    /// is such a version and it reports its digest.
    pub(super) fn plausible(&self, model: &str, running: &Running) -> bool {
        if running.epoch != self.epoch() {
            return running.epoch < self.epoch();
        }
        let versions = self.store.models.get(model);
        if running.digest.is_empty() {
            return versions.map_or(false, |versions| versions.may_lack_digest(running.version));
        }
        match versions.and_then(|versions| versions.known_digest(running.version)) {
            None => false,
            Some("") => true,
            Some(digest) => running.digest == digest,
        }
    }

    /// A worker's bytes are not the published ones; it must never count as done.
    fn wrong_digest(&mut self, name: &str, said: &OfVersion) {
        let versions = self.store.models.get(&said.model);
        let published = versions.and_then(|versions| versions.known_digest(said.version));
        let text = format!(
            "worker {} reports digest {:?} for version {} of {}; published was {}",
            name,
            said.digest,
            said.version,
            said.model,
            published.unwrap_or("no such version")
        );
        self.tell(WorkerEventKind::WrongDigest, name, text);
    }
}
