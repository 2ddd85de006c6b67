//! Patches: finds the workers that accept patches, decides what is pushed, and records how versions arrived.

use super::bases::PatchCandidate;
use super::machine::PublisherMachine;
use super::offer::{accepts_patches, VersionPatch};
use super::roster::Peer;
use crate::messages::*;
use crate::transfer::{Key, Time};

/// What the subscribers of a model need: the whole version, its first patch, or both (D6).
#[derive(Default)]
pub(super) struct SubscriberNeeds {
    /// True if a subscriber needs the whole version.
    pub whole: bool,
    /// True if a subscriber runs the base of the first patch.
    pub first_patch: bool,
}

impl PublisherMachine {
    /// Returns the live workers that subscribe to a model and accept patches (D2), restricted to the names
    /// in `workers` unless that is `None`.
    pub fn patch_candidates(&self, model: &str, workers: Option<&[String]>) -> Vec<PatchCandidate> {
        let named = |name: &String| workers.map_or(true, |workers| workers.contains(name));
        let here = self.roster.iter().filter(|peer| !peer.is_lost() && peer.in_session());
        let live = here.filter(|peer| peer.subscribes_to(model) && accepts_patches(peer));
        let candidate = |peer: &Peer| {
            let (rate, decode) = (peer.link.rate(), peer.link.decode());
            PatchCandidate { running: peer.running.get(model).cloned(), rate, decode }
        };
        live.filter(|peer| named(&peer.hello.name)).map(candidate).collect()
    }

    /// Returns what the live subscribers of a model need of a version with these patches.
    pub(super) fn subscriber_needs(&self, model: &str, patches: &[VersionPatch]) -> SubscriberNeeds {
        let mut found = SubscriberNeeds::default();
        let here = self.roster.iter().filter(|peer| !peer.is_lost() && peer.in_session());
        for peer in here.filter(|peer| peer.subscribed && peer.subscribes_to(model)) {
            let patch = patches.iter().position(|patch| patch.is_for(peer, model));
            found.whole |= patch.is_none();
            found.first_patch |= patch == Some(0);
        }
        found
    }

    /// Records whether a version arrived at a worker whole or as a patch (D11). `decode_us` is the field
    /// of an `applied` report; `None` for other reports, which do not update the link's estimates.
    pub(super) fn record_transport(
        &mut self,
        name: &str,
        (model, key): (&str, Key),
        patch: Option<&PatchId>,
        decode_us: Option<u64>,
        now: Time,
    ) {
        let version = self.store.in_epoch(model, key.0).and_then(|versions| versions.get(key.1));
        let version = match version {
            Some(version) => version,
            None => return,
        };
        let patch = patch.map(|id| version.patches.iter().find(|patch| patch.id == *id));
        let (encoding, plan, decoded) = match patch {
            None => ("raw", version.content.plan, None),
            Some(Some(patch)) => (DELTA, patch.content.plan, Some((patch.work, patch.classes))),
            Some(None) => return,
        };
        self.calls.record_transport(name, model, key, encoding, plan.nbytes);
        let (peer, decode_us) = match (self.roster.get_mut(name), decode_us) {
            (Some(peer), Some(decode_us)) => (peer, decode_us),
            _ => return,
        };
        if let Some((work, classes)) = decoded {
            peer.link.record_decode(decode_us, work, classes);
        } else if plan.count() > 1 {
            // The time of a version of a single chunk depends little on the rate of the link.
            for started in self.calls.start_times(model, key) {
                peer.link.observe_rate(plan.nbytes, now.saturating_sub(started));
            }
        }
    }
}
