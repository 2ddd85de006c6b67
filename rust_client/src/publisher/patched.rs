//! How versions go out as patches: which are pushed, what is answered to who asks for one, and what is said of them.

use super::effects::WorkerEventKind;
use super::machine::Machine;
use super::offer::{takes_patches, VersionPatch};
use crate::messages::*;
use crate::transfer::Time;

/// What those who hear what is pushed of a version make of it (D6).
#[derive(Default)]
pub(super) struct Listeners {
    /// Somebody listens.
    pub any: bool,
    /// Somebody needs all of the version.
    pub whole: bool,
    /// Somebody runs what its first patch builds on.
    pub first: bool,
}

impl Machine {
    /// What each worker runs of a model, of those that take patches, and to whom a version would go (D2).
    pub fn takers(&self, model: &str, workers: Option<&[String]>) -> Vec<Option<Running>> {
        let named = |name: &String| workers.map_or(true, |workers| workers.contains(name));
        let live = self.roster.iter().filter(|peer| !peer.lost && peer.wants(model) && takes_patches(peer));
        live.filter(|peer| named(&peer.hello.name)).map(|peer| peer.running.get(model).cloned()).collect()
    }

    pub(super) fn listeners(&self, model: &str, patches: &[VersionPatch]) -> Listeners {
        let mut found = Listeners::default();
        for peer in self.roster.iter().filter(|peer| !peer.lost && peer.subscribed && peer.wants(model)) {
            let patch = patches.iter().position(|patch| patch.is_for(peer, model));
            found.any = true;
            found.whole |= patch.is_none();
            found.first |= patch == Some(0);
        }
        found
    }

    fn patch(&self, model: &str, number: u64, id: &PatchId) -> Option<&VersionPatch> {
        self.store.models.get(model)?.get(number)?.patches.iter().find(|patch| patch.id == *id)
    }

    /// Answers a worker that asks for a patch to a version (D8).
    pub(super) fn fetched_patch(&mut self, name: &str, fetch: &Fetch, id: &PatchId, number: u64, now: Time) {
        let patch = self.patch(&fetch.model, number, id).filter(|_| fetch.version > 0);
        let content = patch.map(|patch| patch.content.clone());
        match content.filter(|content| fetch.first + fetch.count <= content.plan.count()) {
            None => {
                let text = format!("version {} has no such patch, or not so many chunks", number);
                self.refuse_fetch(name, fetch, "no-patch", &text);
            }
            Some(content) if fetch.count == 0 => {
                let end =
                    OfVersion { patch: Some(id.clone()), ..self.of_version(&fetch.model, number, &content) };
                self.say(name, FromPublisher::End(end));
            }
            Some(content) => self.give(name, fetch, number, &content, now),
        }
    }

    /// A worker says why no patch is of use to it: that is told once, if there is one (D10).
    pub(super) fn told_why(&mut self, name: &str, fetch: &Fetch, number: u64) {
        let versions = self.store.models.get_mut(&fetch.model);
        let version = match versions.and_then(|versions| versions.get_mut(number)) {
            Some(version) if !version.patches.is_empty() => version,
            _ => return,
        };
        if !fetch.unpatched.is_empty() && version.unpatched.insert(name.to_owned()) {
            let text = format!(
                "worker {} takes all of version {} of {}, for which there was a patch: {}",
                name, number, fetch.model, fetch.unpatched
            );
            self.tell(WorkerEventKind::Notice, name, text);
        }
    }

    /// A worker says how a version came to it (D11).
    pub(super) fn carried(&mut self, name: &str, said: &OfVersion) {
        let versions = self.store.of(&said.model, said.epoch);
        let version = versions.and_then(|versions| versions.get(said.version));
        let (encoding, nbytes) = match (version, &said.patch) {
            (Some(version), None) => ("raw", version.content.plan.nbytes),
            (Some(version), Some(id)) => match version.patches.iter().find(|patch| patch.id == *id) {
                Some(patch) => (DELTA, patch.content.plan.nbytes),
                None => return,
            },
            (None, _) => return,
        };
        self.calls.carried(name, &said.model, (said.epoch, said.version), encoding, nbytes);
    }
}
