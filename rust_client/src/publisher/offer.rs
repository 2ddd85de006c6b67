//! A version as it is offered: by itself, and by patches on what workers run.

use super::content::Content;
use super::roster::Peer;
use crate::delta::worth::Way;
use crate::messages::{Patch, PatchId, Running, DELTA};
use std::sync::Arc;

/// A patch that leads to a version: it is given out in chunks, as that is.
#[derive(Clone, Debug)]
pub struct VersionPatch {
    pub id: PatchId,
    /// Its bytes; the layout and the digest are those of the version.
    pub content: Arc<Content>,
    /// Its steps may be coded by class, which takes longer to decode.
    pub classes: bool,
    /// What it takes to decode it, in bytes of a version that stays as it is; 0: who knows.
    pub work: f64,
    base: Running, // as workers say that they run it
}

impl VersionPatch {
    pub fn new(base: Running, version: &Content, bytes: Vec<u8>, way: Way) -> VersionPatch {
        let id = PatchId { encoding: DELTA.to_owned(), epoch: base.epoch, version: base.version };
        let work = way.work * version.plan.nbytes as f64;
        let content = Arc::new(Content::of_patch(version, bytes));
        VersionPatch { id, base, content, classes: way.classes, work }
    }

    /// What announcements say of it.
    pub fn offered(&self) -> Patch {
        let PatchId { encoding, epoch, version } = self.id.clone();
        Patch { encoding, epoch, version, digest: self.base.digest.clone(), nbytes: self.content.plan.nbytes }
    }

    /// Whether a worker can have a version of that model come by it.
    pub fn is_for(&self, peer: &Peer, model: &str) -> bool {
        takes_patches(peer) && peer.running.get(model) == Some(&self.base)
    }
}

pub fn takes_patches(peer: &Peer) -> bool {
    peer.hello.features.iter().any(|feature| feature == DELTA)
}

/// What is to be published.
#[derive(Clone, Debug)]
pub struct Offer {
    pub content: Arc<Content>,
    /// Patches on it may come: workers that take those keep its bytes (D1).
    pub keep: bool,
    /// The first is pushed, the others are fetched.
    pub patches: Vec<VersionPatch>,
    /// What went wrong with patches that there are not, in words.
    pub faults: Vec<String>,
}

impl Offer {
    /// It may come by a patch, too.
    pub fn by(&mut self, patch: VersionPatch) {
        self.patches.push(patch);
    }

    /// There is a patch less, and why.
    pub fn lacks(&mut self, fault: String) {
        self.faults.push(fault);
    }
}

impl From<Arc<Content>> for Offer {
    fn from(content: Arc<Content>) -> Offer {
        Offer { content, keep: false, patches: Vec::new(), faults: Vec::new() }
    }
}
