//! Handles the reports `progress`, `staged`, `applied` and `failed` of workers, and rejects implausible ones.

use super::effects::WorkerEventKind;
use super::machine::PublisherMachine;
use super::phases::{TargetEvent, VersionPhase};
use crate::messages::*;
use crate::transfer::{Key, Time};

impl PublisherMachine {
    /// Handles a `progress` report (P14).
    pub(super) fn progress(&mut self, name: &str, report: &Progress, now: Time) {
        if !self
            .store
            .in_epoch(&report.model, report.epoch)
            .map_or(false, |versions| versions.was_published(report.version))
        {
            return;
        }
        self.report_push(report, now);
        let peer = match self.roster.get_mut(name) {
            Some(peer) if peer.running_key(&report.model) < (report.epoch, report.version) => peer, // P19
            _ => return,
        };
        let receiving = report.phase == ProgressPhase::Receiving;
        let versions = match self.store.find(&report.model) {
            Some(versions) => versions,
            None => return,
        };
        let in_memory = versions.get(report.version).is_some();
        if receiving && !in_memory {
            return; // the version was dropped, so the worker cannot get the rest
        }
        let arriving = versions.get(report.version).filter(|_| receiving);
        if let Some(plan) = arriving.and_then(|version| version.plan_of(report.patch.as_ref())) {
            peer.update_link_rate(report, plan, now);
        }
        peer.note_progress(report, now);
        versions.end_receiving(name, report.version + u64::from(!receiving));
        if let Some(version) = versions.get_mut(report.version).filter(|_| receiving) {
            version.add_receiver(name);
        }
    }

    /// Handles a `staged` report (P11).
    pub(super) fn staged(&mut self, name: &str, report: &Staged, now: Time) {
        let versions = match self.store.in_epoch(&report.model, report.epoch) {
            Some(versions) => versions,
            None => return,
        };
        let content = match versions.get(report.version) {
            Some(version) => version.content.clone(),
            None => {
                let text = "the version was aborted or superseded".to_owned();
                let abort = Abort {
                    model: report.model.clone(),
                    epoch: report.epoch,
                    version: report.version,
                    text,
                    ..Default::default()
                };
                return self.send_header(name, FromPublisher::Abort(abort));
            }
        };
        let key = (report.epoch, report.version);
        if content.digest != report.digest {
            return self.wrong_digest(name, &report.model, key, &report.digest, now);
        }
        versions.end_receiving(name, report.version + 1);
        if let Some(peer) = self.roster.get_mut(name) {
            if peer.running_key(&report.model) < key {
                peer.note_delivery(&report.model, report.version, ProgressPhase::Staged, None, now);
            }
        }
        self.record_transport(name, (&report.model, key), report.patch.as_ref(), None, now);
        self.apply_to_calls(name, TargetEvent::Staged, Some((&report.model, key)), now);
        let version = self.store.models.get(&report.model).and_then(|versions| versions.get(report.version));
        if version.map_or(false, |version| !version.phase.is(VersionPhase::Pending)) {
            let commit = self.commit(&report.model, report.version, &content);
            self.send_header(name, FromPublisher::Commit(commit));
        }
    }

    /// Handles an `applied` report (P12).
    pub(super) fn applied(&mut self, name: &str, report: Applied, now: Time) {
        let key = (report.epoch, report.version);
        let (epoch, version, digest) = (report.epoch, report.version, report.digest.clone());
        let running = Running { epoch, version, digest, ..Default::default() };
        match self.roster.get(name) {
            Some(peer) if peer.subscribes_to(&report.model) => {}
            _ => return,
        }
        // P15
        if !self.is_plausible(&report.model, &running) {
            return self.wrong_digest(name, &report.model, key, &report.digest, now);
        }
        if self.roster.get(name).map_or(false, |peer| peer.running_key(&report.model) < key) {
            let (patch, decode_us) = (report.patch.as_ref(), Some(report.decode_us));
            self.record_transport(name, (&report.model, key), patch, decode_us, now);
        }
        if let Some(versions) = self.store.in_epoch(&report.model, report.epoch) {
            versions.end_receiving(name, report.version + 1);
        }
        let epoch = self.epoch();
        let peer = match self.roster.get_mut(name) {
            Some(peer) if peer.running_key(&report.model) < key => peer,
            _ => return, // a repeated report
        };
        peer.applied(&report.model, running, epoch);
        self.note_running(name, &report.model, &report.note, now);
        self.announce_owed(name, &report.model, now); // if the worker is a relay
    }

    /// Handles a `failed` report (P13).
    pub(super) fn failed(&mut self, name: &str, report: &Failed, now: Time) {
        let peer = match self.roster.get_mut(name) {
            Some(peer) if peer.subscribes_to(&report.model) => peer,
            _ => return,
        };
        if !report.intact {
            peer.set_torn(&report.model, true);
        }
        let versions = match self.store.in_epoch(&report.model, report.epoch) {
            Some(versions) => versions,
            None => return,
        };
        versions.end_receiving(name, report.version + 1);
        peer.end_delivery(&report.model, report.version);
        self.fail_in_calls(name, report, now);
    }

    /// True if a worker may run the version that it reports. The version must be of an older epoch, or
    /// must have been published in this epoch with the reported digest, if that digest is still known.
    pub(super) fn is_plausible(&self, model: &str, running: &Running) -> bool {
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

    /// Notifies the user that the digest in a worker's report differs from the published one. The report does
    /// not count. Notifies once for a version, although the worker repeats its report with every ping.
    fn wrong_digest(&mut self, name: &str, model: &str, version: Key, digest: &str, now: Time) {
        let peer = self.roster.get_mut(name).filter(|peer| peer.subscribes_to(model));
        let key = match peer.and_then(|peer| peer.note_wrong_digest(model, version).then(|| peer.key.clone()))
        {
            Some(key) => key,
            None => return,
        };
        let versions = self.store.in_epoch(model, version.0);
        let published = versions.and_then(|versions| versions.known_digest(version.1)).map(str::to_owned);
        let text = format!(
            "worker {} reports digest {:?} for version {} of {}; published was {}",
            name,
            digest,
            version.1,
            model,
            published.as_deref().unwrap_or("no such version")
        );
        self.notify_limited(WorkerEventKind::WrongDigest, name, &key, text, now);
    }
}
