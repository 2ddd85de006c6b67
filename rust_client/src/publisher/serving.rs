//! Answers fetches: of versions, of patches, and of their chunks (P8).

use super::content::Content;
use super::effects::{Payload, WorkerEventKind};
use super::machine::PublisherMachine;
use super::offer::VersionPatch;
use super::store::Version;
use crate::limits::NAMED_MAX;
use crate::messages::*;
use crate::transfer::Time;
use crate::words::escaped;
use std::sync::Arc;

impl PublisherMachine {
    /// Handles a fetch of a version, of a patch, or of chunks of either (P8).
    pub(super) fn fetch(&mut self, name: &str, fetch: &Fetch, now: Time) {
        let versions = self.store.in_epoch(&fetch.model, fetch.epoch);
        let number = versions.and_then(|versions| match fetch.version {
            0 => versions.latest_for(name),
            number => versions.get(number).map(|version| version.number),
        });
        let found = number.and_then(|number| self.content(&fetch.model, number));
        let (number, content) = match (number, found) {
            (Some(number), Some(content)) => (number, content),
            _ => return self.refuse_unavailable(name, fetch),
        };
        if let Some(patch) = &fetch.patch {
            return self.send_patch(name, fetch, patch, number, now);
        }
        self.note_unpatched(name, fetch, number, now);
        if fetch.count == 0 {
            if let Some(versions) = self.store.find(&fetch.model) {
                versions.end_receiving(name, number); // the worker receives no older version any more (P9)
            }
            return self.announce_to(name, &fetch.model, number, fetch.layout);
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
        self.send_chunks(name, fetch, number, &content, now);
    }

    /// Sends the requested chunks of a version or patch; `content` has their bytes.
    fn send_chunks(&mut self, name: &str, fetch: &Fetch, number: u64, content: &Arc<Content>, now: Time) {
        if let Some(versions) = self.store.find(&fetch.model) {
            versions.end_receiving(name, number);
        }
        if self.note_receiver(name, &fetch.model, number) {
            if let Some(peer) = self.roster.get_mut(name) {
                peer.note_delivery(&fetch.model, number, ProgressPhase::Receiving, None, now);
                peer.set_patch(&fetch.model, fetch.patch.as_ref());
            }
        }
        for index in fetch.first..fetch.first + fetch.count {
            let chunk = self.chunk((&fetch.model, number, fetch.patch.clone()), content, index);
            self.send(name, chunk, Payload::Chunk(content.clone(), index));
        }
    }

    /// Records that a worker receives a version, so that the version is kept. Does nothing and returns
    /// false if the worker already runs the version: its report on the data connection may arrive before
    /// its earlier request (P19).
    fn note_receiver(&mut self, name: &str, model: &str, number: u64) -> bool {
        let key = self.store.key(number);
        let needs = self.roster.get(name).map_or(false, |peer| peer.running_key(model) < key);
        let version = self.store.find(model).and_then(|its| its.get_mut(number));
        if let Some(version) = version.filter(|_| needs) {
            version.add_receiver(name);
        }
        needs
    }

    fn content(&self, model: &str, number: u64) -> Option<Arc<Content>> {
        Some(self.store.models.get(model)?.get(number)?.content.clone())
    }

    fn refuse_fetch(&mut self, name: &str, fetch: &Fetch, code: &str, text: &str) {
        if let Some(to) = self.roster.get(name).map(|peer| peer.identity.clone()) {
            self.refuse(&to, code, text, Some(fetch));
        }
    }

    /// Refuses a fetch of an unavailable version, and announces the latest version instead.
    fn refuse_unavailable(&mut self, name: &str, fetch: &Fetch) {
        let text = format!("version {} of epoch {} is not available here", fetch.version, fetch.epoch);
        self.refuse_fetch(name, fetch, "gone", &text);
        let latest = self.store.models.get(&fetch.model).and_then(|versions| versions.latest_for(name));
        if let Some(latest) = latest.filter(|&latest| self.store.key(latest) != (fetch.epoch, fetch.version))
        {
            self.announce_to(name, &fetch.model, latest, false);
        }
    }

    /// Announces a version to one worker, with the layout as payload if `layout`, and sends the `end`, which
    /// has the digest.
    pub(super) fn announce_to(&mut self, name: &str, model: &str, number: u64, layout: bool) {
        let content = match self.content(model, number) {
            Some(content) => content,
            None => return,
        };
        self.note_receiver(name, model, number);
        let call = self.calls.undecided(model, self.store.key(number));
        let announce = match self.store.models.get(model).and_then(|versions| versions.get(number)) {
            Some(version) => self.with_named_workers(name, self.announcement(model, version, call), version),
            None => return,
        };
        let payload = if layout { Payload::Layout(content.clone()) } else { Payload::None };
        self.send(name, FromPublisher::Announce(announce), payload);
        let end = self.end(model, number, &content, None);
        self.send_header(name, FromPublisher::End(end));
    }

    /// Returns the announcement of a version for one peer. If the version is only for named workers, a relay
    /// gets their names: first those behind the relay, then others, which may come to it later (R8).
    pub(super) fn with_named_workers(&self, name: &str, announce: Announce, version: &Version) -> Announce {
        match (&version.only, self.roster.get(name)) {
            (Some(only), Some(peer)) if peer.is_relay() => {
                let mut workers = self.roster.named_behind(name, only);
                let mut others: Vec<_> =
                    only.iter().filter(|each| !workers.contains(each)).cloned().collect();
                others.sort();
                workers.append(&mut others);
                workers.truncate(NAMED_MAX);
                Announce { workers, ..announce }
            }
            _ => announce,
        }
    }

    fn patch(&self, model: &str, number: u64, id: &PatchId) -> Option<&VersionPatch> {
        self.store.models.get(model)?.get(number)?.patches.iter().find(|patch| patch.id == *id)
    }

    /// Handles a fetch of a patch (D8).
    fn send_patch(&mut self, name: &str, fetch: &Fetch, id: &PatchId, number: u64, now: Time) {
        let patch = self.patch(&fetch.model, number, id).filter(|_| fetch.version > 0);
        let content = patch.map(|patch| patch.content.clone());
        match content.filter(|content| fetch.first + fetch.count <= content.plan.count()) {
            None => {
                let text = format!("version {} has no such patch, or not so many chunks", number);
                self.refuse_fetch(name, fetch, "no-patch", &text);
            }
            Some(content) if fetch.count == 0 => {
                let end = self.end(&fetch.model, number, &content, Some(id.clone()));
                self.send_header(name, FromPublisher::End(end));
            }
            Some(content) => self.send_chunks(name, fetch, number, &content, now),
        }
    }

    /// Notifies the user why a worker fetches the whole version although there are patches: once for each
    /// worker and version (D10).
    fn note_unpatched(&mut self, name: &str, fetch: &Fetch, number: u64, now: Time) {
        let versions = self.store.find(&fetch.model);
        let version = match versions.and_then(|versions| versions.get_mut(number)) {
            Some(version) if !version.patches.is_empty() => version,
            _ => return,
        };
        if !fetch.unpatched.is_empty() && version.note_unpatched(name) {
            let text = format!(
                "worker {} takes all of version {} of {}, for which there was a patch: {}",
                name,
                number,
                fetch.model,
                escaped(&fetch.unpatched)
            );
            let key = self.roster.get(name).map_or_else(String::new, |peer| peer.key.clone());
            self.notify_limited(WorkerEventKind::Notice, name, &key, text, now);
        }
    }
}
