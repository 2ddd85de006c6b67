//! Handles workers' reports about versions, and rejects implausible reports.

use super::effects::WorkerEventKind;
use super::machine::PublisherMachine;
use super::phases::{TargetEvent, VersionPhase};
use crate::messages::*;
use crate::transfer::{Key, Time};

impl PublisherMachine {
    /// Handles a `progress` report (P14).
    pub(super) fn progress(&mut self, name: &str, said: &Progress, now: Time) {
        if !self.store.of(&said.model, said.epoch).map_or(false, |versions| versions.had(said.version)) {
            return;
        }
        self.report_push(said, now);
        let peer = match self.roster.get_mut(name) {
            Some(peer) if peer.runs(&said.model) < (said.epoch, said.version) => peer, // P19
            _ => return,
        };
        let receiving = said.phase == ProgressPhase::Receiving;
        let versions = match self.store.find(&said.model) {
            Some(versions) => versions,
            None => return,
        };
        let here = versions.get(said.version).is_some();
        if receiving && !here {
            return; // the version was dropped, so no worker can receive it
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

    /// Handles a `staged` report (P11).
    pub(super) fn staged(&mut self, name: &str, said: &Staged, now: Time) {
        let versions = match self.store.of(&said.model, said.epoch) {
            Some(versions) => versions,
            None => return,
        };
        let content = match versions.get(said.version) {
            Some(version) => version.content.clone(),
            None => {
                let text = "the version was aborted or superseded".to_owned();
                let abort = Abort {
                    model: said.model.clone(),
                    epoch: said.epoch,
                    version: said.version,
                    text,
                    ..Default::default()
                };
                return self.say(name, FromPublisher::Abort(abort));
            }
        };
        let key = (said.epoch, said.version);
        if content.digest != said.digest {
            return self.wrong_digest(name, &said.model, key, &said.digest, now);
        }
        versions.left(name, said.version + 1);
        if let Some(peer) = self.roster.get_mut(name) {
            if peer.runs(&said.model) < key {
                peer.note(&said.model, said.version, ProgressPhase::Staged, None, now);
            }
        }
        self.record_transport(name, (&said.model, key), said.patch.as_ref(), None, now);
        self.calls_take(name, TargetEvent::Staged, Some((&said.model, key)), now);
        let version = self.store.models.get(&said.model).and_then(|versions| versions.get(said.version));
        if version.map_or(false, |version| !version.phase.is(VersionPhase::Pending)) {
            let commit = self.commit(&said.model, said.version, &content);
            self.say(name, FromPublisher::Commit(commit));
        }
    }

    /// Handles an `applied` report (P12).
    pub(super) fn applied(&mut self, name: &str, said: Applied, now: Time) {
        let key = (said.epoch, said.version);
        let (epoch, version, digest) = (said.epoch, said.version, said.digest.clone());
        let running = Running { epoch, version, digest, ..Default::default() };
        match self.roster.get(name) {
            Some(peer) if peer.wants(&said.model) => {}
            _ => return,
        }
        // P15
        if !self.plausible(&said.model, &running) {
            return self.wrong_digest(name, &said.model, key, &said.digest, now);
        }
        if self.roster.get(name).map_or(false, |peer| peer.runs(&said.model) < key) {
            let (patch, decode_us) = (said.patch.as_ref(), Some(said.decode_us));
            self.record_transport(name, (&said.model, key), patch, decode_us, now);
        }
        if let Some(versions) = self.store.of(&said.model, said.epoch) {
            versions.left(name, said.version + 1);
        }
        let epoch = self.epoch();
        let peer = match self.roster.get_mut(name) {
            Some(peer) if peer.runs(&said.model) < key => peer,
            _ => return, // a repeated report
        };
        peer.applied(&said.model, running, epoch);
        self.arrived(name, &said.model, &said.note, now);
    }

    /// Handles a `failed` report (P13).
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

    /// True if a worker may run the version that it reports: the version is of an older epoch, its
    /// digest is no longer known, or it was published with the reported digest.
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

    /// Reports to the user that a worker's bytes differ from the published ones. The worker does
    /// not count as done. The user gets one report for a version, although the worker repeats its
    /// own with every ping.
    fn wrong_digest(&mut self, name: &str, model: &str, of: Key, digest: &str, now: Time) {
        let news = self.roster.get_mut(name).filter(|peer| peer.wants(model));
        let key = match news.and_then(|peer| peer.differs(model, of).then(|| peer.key.clone())) {
            Some(key) => key,
            None => return,
        };
        let versions = self.store.of(model, of.0);
        let published = versions.and_then(|versions| versions.known_digest(of.1)).map(str::to_owned);
        let text = format!(
            "worker {} reports digest {:?} for version {} of {}; published was {}",
            name,
            digest,
            of.1,
            model,
            published.as_deref().unwrap_or("no such version")
        );
        self.tell_of(WorkerEventKind::WrongDigest, name, &key, text, now);
    }
}
