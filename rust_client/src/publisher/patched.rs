//! How versions go out as patches: which are pushed, what is answered to who asks for one, and what is said of them.

use super::bases::Taker;
use super::effects::WorkerEventKind;
use super::machine::PublisherMachine;
use super::offer::{takes_patches, VersionPatch};
use super::roster::Peer;
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

impl PublisherMachine {
    /// What each worker runs of a model, and what is known of its link, of those that take patches, and to whom a version would go (D2).
    pub fn takers(&self, model: &str, workers: Option<&[String]>) -> Vec<Taker> {
        let named = |name: &String| workers.map_or(true, |workers| workers.contains(name));
        let live = self.roster.iter().filter(|peer| !peer.lost() && peer.wants(model) && takes_patches(peer));
        let taker = |peer: &Peer| {
            let (rate, decode) = (peer.link.rate(), peer.link.decode());
            Taker { running: peer.running.get(model).cloned(), rate, decode }
        };
        live.filter(|peer| named(&peer.hello.name)).map(taker).collect()
    }

    pub(super) fn listeners(&self, model: &str, patches: &[VersionPatch]) -> Listeners {
        let mut found = Listeners::default();
        for peer in self.roster.iter().filter(|peer| !peer.lost() && peer.subscribed && peer.wants(model)) {
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
        let versions = self.store.find(&fetch.model);
        let version = match versions.and_then(|versions| versions.get_mut(number)) {
            Some(version) if !version.patches.is_empty() => version,
            _ => return,
        };
        if !fetch.unpatched.is_empty() && version.told_why(name) {
            let text = format!(
                "worker {} takes all of version {} of {}, for which there was a patch: {}",
                name, number, fetch.model, fetch.unpatched
            );
            self.tell(WorkerEventKind::Notice, name, text);
        }
    }

    /// A worker says how a version came to it (D11): in `applied`, or before that.
    pub(super) fn carried(&mut self, name: &str, said: &OfVersion, applied: bool, now: Time) {
        let versions = self.store.of(&said.model, said.epoch);
        let version = versions.and_then(|versions| versions.get(said.version));
        let version = match version {
            Some(version) => version,
            None => return,
        };
        let patch = said.patch.as_ref().map(|id| version.patches.iter().find(|patch| patch.id == *id));
        let (encoding, plan, decoded) = match patch {
            None => ("raw", version.content.plan, None),
            Some(Some(patch)) => (DELTA, patch.content.plan, Some((patch.work, patch.classes))),
            Some(None) => return,
        };
        let key = (said.epoch, said.version);
        self.calls.carried(name, &said.model, key, encoding, plan.nbytes);
        let peer = match self.roster.get_mut(name).filter(|_| applied) {
            Some(peer) => peer,
            None => return,
        };
        if let Some((work, classes)) = decoded {
            peer.link.decoded(said.decode_us, work, classes);
        } else if plan.count() > 1 {
            // One of a chunk is there as soon as anything can be, however fast the link.
            for started in self.calls.started(&said.model, key) {
                peer.link.brought(plan.nbytes, now.saturating_sub(started));
            }
        }
    }
}
