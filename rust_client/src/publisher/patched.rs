//! How versions go out as patches: who takes some, who listens to which, and by what a version has come.

use super::bases::Taker;
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
