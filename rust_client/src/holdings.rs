//! The versions of one model that are here, each in its phase, and what there is of them.
//!
//! Memory has no owner but what is held here: a version that is dropped gives it back.

use crate::effects::Staged;
use crate::layout::Layout;
use crate::limits::REJECTED_KEPT;
use crate::messages::{Acknowledge, Announce, CommitMode, Metadata, PatchId};
use crate::patching::{Base, Bytes};
use crate::phases::{next, Event, Gain, Lack, Phase, ARROWS, LACKS};
use crate::transfer::{Key, Transfer};
use std::collections::VecDeque;
use std::sync::Arc;

/// A version that is here.
pub struct Held {
    pub key: Key,
    pub announce: Announce,
    /// Once it is known.
    pub layout: Option<Arc<Layout>>,
    /// While it arrives.
    pub transfer: Option<Transfer>,
    /// While it waits for a commit.
    pub staged: Option<Staged>,
    pub digest: String,
    /// It was copied out of the publisher's memory, or tried to be.
    pub local: bool,
    /// By which patch it came.
    pub patch: Option<PatchId>,
    /// Microseconds that this patch took to be decoded.
    pub decode_us: u64,
    /// While it runs, if patches may build on it.
    pub base: Option<Base>,
    phase: Phase,
    lacks: Lack, // while it is announced
}

impl Held {
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// What it lacks while it is announced.
    pub fn lacks(&self) -> Lack {
        self.lacks
    }
}

/// The versions of one model.
#[derive(Default)]
pub struct Holdings {
    live: Vec<Held>, // the oldest first
    // Could not be taken; not tried again. An older one still may be: what was rejected may have
    // been aborted, or meant for few, and the latest for all be one that was missed.
    pub rejected: VecDeque<Key>,
}

impl Holdings {
    /// The version in a phase, the oldest if there are several.
    pub fn at(&self, phase: Phase) -> Option<&Held> {
        self.live.iter().find(|held| held.phase == phase)
    }

    pub fn at_mut(&mut self, phase: Phase) -> Option<&mut Held> {
        self.live.iter_mut().find(|held| held.phase == phase)
    }

    /// The version that arrives, if it is this one, and how far it is.
    pub fn arriving(&mut self, key: Key) -> Option<&mut Transfer> {
        self.at_mut(Phase::Arriving).filter(|held| held.key == key)?.transfer.as_mut()
    }

    /// The versions in some phases, in that order.
    pub fn all<'a>(&'a self, phases: &'a [Phase]) -> impl Iterator<Item = &'a Held> {
        phases.iter().flat_map(move |phase| self.live.iter().filter(move |held| held.phase == *phase))
    }

    /// The newest version that needs no announcement any more.
    pub fn newest(&self) -> Key {
        let here = [Phase::Staged, Phase::Ready, Phase::Applying, Phase::Running];
        self.all(&here).map(|held| held.key).max().unwrap_or((0, 0))
    }

    /// Takes note of a version that was announced, in place of any that was only announced.
    pub fn expect(&mut self, announce: Announce) {
        self.tell(Phase::Announced, Event::Newer);
        let key = (announce.epoch, announce.version);
        self.live.push(Held {
            key,
            announce,
            layout: None,
            transfer: None,
            staged: None,
            digest: String::new(),
            local: false,
            patch: None,
            decode_us: 0,
            base: None,
            phase: Phase::Announced,
            lacks: Lack::Layout,
        });
    }

    /// Something that the announced version lacked is here, or is not to be had for now.
    pub fn gain(&mut self, event: Gain) {
        if let Some(held) = self.at_mut(Phase::Announced) {
            held.lacks = next(LACKS, held.lacks, event).unwrap_or(held.lacks);
        }
    }

    /// Gives back the bytes that patches may build on; tells whether any were kept for that.
    pub fn forget_base(&mut self) -> bool {
        match self.at_mut(Phase::Running) {
            Some(held) if matches!(held.base, Some(Base { bytes: Bytes::Kept(_), .. })) => {
                held.base = None;
                true
            }
            _ => false, // a model stays where it is
        }
    }

    /// Has a version of another name in the place of one that runs.
    pub fn rename(&mut self, key: Key, metadata: Metadata) {
        if self.tell(Phase::Running, Event::Renamed) {
            if let Some(held) = self.at_mut(Phase::Running) {
                (held.key, held.announce.metadata) = (key, metadata);
            }
        }
    }

    /// Lets something happen to what is in a phase; tells whether there is an arrow for that.
    pub fn tell(&mut self, phase: Phase, event: Event) -> bool {
        self.tell_those(event, |held| held.phase == phase)
    }

    /// Lets something happen to these versions; tells whether any has an arrow for that.
    pub fn tell_those(&mut self, event: Event, whom: impl Fn(&Held) -> bool) -> bool {
        let (mut moved, rejected) = (false, &mut self.rejected);
        self.live.retain_mut(|held| {
            if let Some(phase) = next(ARROWS, held.phase, event).filter(|_| whom(held)) {
                held.phase = phase;
                moved = true;
                if phase == Phase::Rejected {
                    rejected.truncate(REJECTED_KEPT - 1);
                    rejected.push_front(held.key);
                }
            }
            !matches!(held.phase, Phase::Dropped | Phase::Rejected)
        });
        moved
    }
}

/// Whether the version must be held and reported before it is applied.
pub fn must_be_staged(announce: &Announce) -> bool {
    announce.commit == CommitMode::Together || announce.acknowledge == Acknowledge::Staged
}

/// Whether two announcements of a version agree on what arrives.
pub fn same_bytes(one: &Announce, other: &Announce) -> bool {
    (&one.layout, one.nbytes, one.chunk_bytes) == (&other.layout, other.nbytes, other.chunk_bytes)
}
