//! Patches: which workers accept them, which subscribers can use a patch, how a version has
//! arrived.

use super::bases::PatchCandidate;
use super::machine::PublisherMachine;
use super::offer::{takes_patches, VersionPatch};
use super::roster::Peer;
use crate::messages::*;
use crate::transfer::Time;

/// The forms in which the subscribers of a model need a version that is pushed (D6).
#[derive(Default)]
pub(super) struct Listeners {
    /// True if there is a subscriber.
    pub any: bool,
    /// True if a subscriber needs the whole version.
    pub whole: bool,
    /// True if a subscriber runs the base of the first patch.
    pub first: bool,
}

impl PublisherMachine {
    /// Returns the live workers that accept patches and that a version would be sent to (D2).
    /// `workers` are the names that the version is for; `None`: all.
    pub fn patch_candidates(&self, model: &str, workers: Option<&[String]>) -> Vec<PatchCandidate> {
        let named = |name: &String| workers.map_or(true, |workers| workers.contains(name));
        let live = self.roster.iter().filter(|peer| !peer.lost() && peer.wants(model) && takes_patches(peer));
        let taker = |peer: &Peer| {
            let (rate, decode) = (peer.link.rate(), peer.link.decode());
            PatchCandidate { running: peer.running.get(model).cloned(), rate, decode }
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

    /// Records in which form a version arrived at a worker (D11). `applied`: `said` is an `applied`
    /// report.
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
            // A version of one chunk arrives at once, however fast the link.
            for started in self.calls.started(&said.model, key) {
                peer.link.brought(plan.nbytes, now.saturating_sub(started));
            }
        }
    }
}
