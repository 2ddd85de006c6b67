//! Which patch a version arrives by, if there is one that fits, and where this worker listens (D4, D7).

use crate::holdings::{Held, Holdings};
use crate::messages::{data_topic, patch_topic, Announce, Patch, DELTA};
use crate::patching::{Base, Bytes};
use crate::phases::Phase;

/// The patches of one model.
#[derive(Default)]
pub struct Patches {
    /// Whether any are taken.
    pub taken: bool,
    listens: bool, // to chunks of patches, in place of those of versions
}

impl Patches {
    /// The topic of the chunks that are pushed to this worker.
    pub fn topic(&self, model: &str) -> String {
        if self.listens {
            patch_topic(model)
        } else {
            data_topic(model)
        }
    }

    /// Has versions pushed as patches, or whole; tells whether that is a change.
    pub fn listen(&mut self, to_patches: bool) -> bool {
        std::mem::replace(&mut self.listens, to_patches) != to_patches
    }

    /// The patch by which a version arrives, and what it builds on; else why there is none, if any were offered.
    pub fn choose(&self, announce: &Announce, holds: &Holdings) -> Result<(Patch, Base), String> {
        if !self.taken || announce.patches.is_empty() {
            return Err(String::new());
        }
        let runs = holds.at(Phase::Running);
        let overwritten = holds.at(Phase::Applying).is_some();
        let found = runs.and_then(|held| {
            let base = held.base.as_ref().filter(|base| base.layout.id == announce.layout)?;
            let patch = announce.patches.iter().find(|patch| builds_on(patch, held))?;
            let there = !overwritten || matches!(base.bytes, Bytes::Kept(_));
            (there && patch.nbytes <= announce.nbytes).then(|| (patch.clone(), base.clone()))
        });
        found.ok_or_else(|| unfit(announce, runs, overwritten))
    }
}

fn builds_on(patch: &Patch, held: &Held) -> bool {
    patch.encoding == DELTA && (patch.epoch, patch.version) == held.key && patch.digest == held.digest
}

fn unfit(announce: &Announce, runs: Option<&Held>, overwritten: bool) -> String {
    let here = match runs {
        Some(held) => {
            let (epoch, version) = held.key;
            let bytes = match held.base {
                None => ", and its bytes were not kept",
                Some(_) if overwritten => ", and another is being applied",
                Some(_) => "",
            };
            format!("version {} of epoch {} runs here{}", version, epoch, bytes)
        }
        None => "nothing runs here".to_owned(),
    };
    let offered: Vec<String> = announce.patches.iter().map(|patch| patch.version.to_string()).collect();
    format!("{}; there are patches on {}", here, offered.join(", "))
}
