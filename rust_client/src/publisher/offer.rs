//! An offer: a version to publish, and patches that turn the versions that workers run into this version.

use super::content::Content;
use super::roster::Peer;
use crate::delta::worth::Way;
use crate::messages::{Patch, PatchId, Running, DELTA};
use std::sync::Arc;

/// A patch whose result is a version. Its bytes are sent in chunks, like a version's.
#[derive(Clone, Debug)]
pub struct VersionPatch {
    pub id: PatchId,
    /// The bytes of the patch, with the layout and the digest of the version.
    pub content: Arc<Content>,
    /// True if the patch may code changes by class, which takes longer to decode.
    pub classes: bool,
    /// The cost of decoding the patch: decoding takes as long as a patch without changes on a version of
    /// this many bytes. 0 if unknown.
    pub work: f64,
    base: Running, // as workers report this version
}

impl VersionPatch {
    pub fn new(base: Running, version: &Content, bytes: Vec<u8>, way: Way) -> VersionPatch {
        let id = PatchId {
            encoding: DELTA.to_owned(),
            epoch: base.epoch,
            version: base.version,
            ..Default::default()
        };
        let work = way.work * version.plan.nbytes as f64;
        let content = Arc::new(Content::of_patch(version, bytes));
        VersionPatch { id, base, content, classes: way.classes, work }
    }

    /// Returns the patch's entry in announcements.
    pub fn offered(&self) -> Patch {
        let PatchId { encoding, epoch, version, .. } = self.id.clone();
        let (digest, nbytes) = (self.base.digest.clone(), self.content.plan.nbytes);
        Patch { encoding, epoch, version, digest, nbytes, ..Default::default() }
    }

    /// True if a worker accepts patches, and runs the base of this patch.
    pub fn is_for(&self, peer: &Peer, model: &str) -> bool {
        accepts_patches(peer) && peer.running.get(model) == Some(&self.base)
    }
}

pub fn accepts_patches(peer: &Peer) -> bool {
    peer.hello.features.iter().any(|feature| feature == DELTA)
}

/// A version to publish.
#[derive(Clone, Debug)]
pub struct Offer {
    pub content: Arc<Content>,
    /// True if later patches may build on the version: then workers keep its bytes (D1).
    pub keep: bool,
    /// The publisher pushes the first patch; workers fetch the others.
    pub patches: Vec<VersionPatch>,
    /// The reasons that patches could not be made.
    pub faults: Vec<String>,
}

impl Offer {
    pub fn add_patch(&mut self, patch: VersionPatch) {
        self.patches.push(patch);
    }

    /// Records why a patch could not be made.
    pub fn record_fault(&mut self, fault: String) {
        self.faults.push(fault);
    }
}

impl From<Arc<Content>> for Offer {
    fn from(content: Arc<Content>) -> Offer {
        Offer { content, keep: false, patches: Vec::new(), faults: Vec::new() }
    }
}
