//! The versions of one model that are here, each in its phase, and what there is of them.
//!
//! Memory has no owner but what is held here: a version that is dropped gives it back.

use crate::layout::Layout;
use crate::limits::REJECTED_KEPT;
use crate::messages::{Acknowledge, Announce, CommitMode, Metadata, PatchId, Running, DELTA};
use crate::patching::{Base, Bytes};
use crate::phases::{next, Event, Lack, LackEvent, Mode, ModeEvent, Phase, ARROWS, LACKS, MODES};
use crate::staging::{Buffer, Source, StagedVersion};
use crate::transfer::{Key, Time, Transfer};
use std::collections::VecDeque;
use std::sync::Arc;

/// A version that is here.
pub struct VersionEntry {
    key: Key,
    announce: Announce,
    phase: Phase,
    lacks: Lack,                   // while it is announced
    layout: Option<Arc<Layout>>,   // once it does not lack that
    transfer: Option<Transfer>,    // while it arrives
    staged: Option<StagedVersion>, // while it waits for a commit
    digest: String,                // once it is whole
    local: bool,                   // it was copied out of the publisher's memory, or tried to be
    patch: Option<PatchId>,        // by which it came
    decode_us: u64,                // microseconds that this patch took to be decoded
    note: String,                  // while it runs: of values that the model cannot hold
    base: Option<Base>,            // while it runs, if patches may build on it
    metadata: Metadata,            // what is said of it: by the name that it has
}

impl VersionEntry {
    pub fn key(&self) -> Key {
        self.key
    }

    pub fn announce(&self) -> &Announce {
        &self.announce
    }

    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// What it lacks while it is announced.
    pub fn lacks(&self) -> Lack {
        self.lacks
    }

    /// Once it does not lack that.
    pub fn layout(&self) -> Option<&Arc<Layout>> {
        self.layout.as_ref()
    }

    /// While it arrives.
    pub fn transfer(&self) -> Option<&Transfer> {
        self.transfer.as_ref()
    }

    /// Once it is whole.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// By which patch it came.
    pub fn patch(&self) -> Option<PatchId> {
        self.patch.clone()
    }

    /// Microseconds that this patch took to be decoded.
    pub fn decode_us(&self) -> u64 {
        self.decode_us
    }

    /// What there is to say of the values that the model holds.
    pub fn note(&self) -> &str {
        &self.note
    }

    /// What is said of it: by the name that it has.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// While it runs, if patches may build on it.
    pub fn base(&self) -> Option<&Base> {
        self.base.as_ref()
    }

    /// It is announced again: takes that, if the same arrives, and tells whether it does.
    pub fn update_announcement(&mut self, announce: &Announce) -> bool {
        let same = same_bytes(&self.announce, announce);
        if same {
            (self.announce, self.metadata) = (announce.clone(), announce.metadata.clone());
        }
        same
    }

    /// All of it arrives in place of a patch, into this buffer if that was lent.
    pub fn comes_whole(&mut self, version: Option<Buffer>, why: &str, now: Time) -> Option<&mut Transfer> {
        self.transfer = self.transfer.take().and_then(|transfer| transfer.give_up(version, why, now));
        self.transfer.as_mut()
    }

    /// It is whole and sound. `patches`: they are taken, and may build on it.
    fn stage(&mut self, patches: bool) {
        if let Some(transfer) = self.transfer.take() {
            self.patch = transfer.patch();
            self.decode_us = transfer.decode_us();
            let (buffer, layout, digest) = transfer.whole();
            self.digest = digest;
            self.staged = Some(StagedVersion {
                model: self.announce.model.clone(),
                key: self.key,
                layout,
                source: Source::Buffer(buffer),
                digest: self.digest.clone(),
                encoding: match self.patch {
                    Some(_) => DELTA,
                    None if self.local => "",
                    None => "raw",
                },
                metadata: self.announce.metadata.clone(),
                keep: self.announce.keep && patches && !self.local, // D3
            });
        }
    }
}

/// The versions of one model.
#[derive(Default)]
pub struct VersionStore {
    mode: Mode,
    live: Vec<VersionEntry>, // the oldest first
    // Could not be taken; not tried again. An older one still may be: what was rejected may have
    // been aborted, or meant for few, and the latest for all be one that was missed.
    rejected: VecDeque<Key>,
}

impl VersionStore {
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// What runs.
    pub fn running(&self) -> Option<Running> {
        let entry = self.at(Phase::Running)?;
        let (epoch, version) = entry.key;
        Some(Running { epoch, version, digest: entry.digest.clone() })
    }

    pub fn is_rejected(&self, key: Key) -> bool {
        self.rejected.contains(&key)
    }

    /// The version in a phase, the oldest if there are several.
    pub fn at(&self, phase: Phase) -> Option<&VersionEntry> {
        self.live.iter().find(|entry| entry.phase == phase)
    }

    pub fn at_mut(&mut self, phase: Phase) -> Option<&mut VersionEntry> {
        self.live.iter_mut().find(|entry| entry.phase == phase)
    }

    /// The version that arrives, if it is this one, and how far it is.
    pub fn arriving(&mut self, key: Key) -> Option<&mut Transfer> {
        self.at_mut(Phase::Arriving).filter(|entry| entry.key == key)?.transfer.as_mut()
    }

    /// What arrives, whichever version that is.
    pub fn transfer(&mut self) -> Option<&mut Transfer> {
        self.at_mut(Phase::Arriving)?.transfer.as_mut()
    }

    /// The versions in some phases, in that order.
    pub fn all<'a>(&'a self, phases: &'a [Phase]) -> impl Iterator<Item = &'a VersionEntry> {
        phases.iter().flat_map(move |phase| self.live.iter().filter(move |entry| entry.phase == *phase))
    }

    /// The newest version that needs no announcement any more.
    pub fn newest(&self) -> Key {
        let here = [Phase::Staged, Phase::Ready, Phase::Applying, Phase::Running];
        self.all(&here).map(|entry| entry.key).max().unwrap_or((0, 0))
    }

    /// Takes note of a version that was announced, in place of any that was only announced.
    pub fn expect(&mut self, announce: Announce) {
        self.tell(Phase::Announced, Event::Newer);
        let key = (announce.epoch, announce.version);
        self.live.push(VersionEntry {
            key,
            metadata: announce.metadata.clone(),
            announce,
            layout: None,
            transfer: None,
            staged: None,
            digest: String::new(),
            local: false,
            patch: None,
            decode_us: 0,
            note: String::new(),
            base: None,
            phase: Phase::Announced,
            lacks: Lack::Layout,
        });
    }

    /// A session begins, of this epoch: what was asked for before will not come (W28).
    pub fn reconnected(&mut self, epoch: u64, now: Time) {
        self.tell_those(Event::Fenced, |entry| entry.phase == Phase::Announced || entry.key.0 != epoch);
        if let Some(transfer) = self.transfer() {
            transfer.reconnected(now);
        }
        self.rejected.clear();
    }

    /// The layout of the announced version is here.
    pub fn knows(&mut self, layout: Arc<Layout>) {
        if let Some(entry) = self.at_mut(Phase::Announced) {
            entry.layout = Some(layout);
        }
    }

    /// Something that the announced version lacked is here, or is not to be had for now.
    pub fn resolve(&mut self, event: LackEvent) {
        if let Some(entry) = self.at_mut(Phase::Announced) {
            entry.lacks = next(LACKS, entry.lacks, event).unwrap_or(entry.lacks);
        }
    }

    /// The announced version arrives by this. `local`: it was copied out of the publisher's memory, or tried to be.
    pub fn begun(&mut self, transfer: Transfer, local: bool) {
        self.tell(Phase::Announced, Event::Begun);
        if let Some(entry) = self.at_mut(Phase::Arriving) {
            (entry.transfer, entry.local) = (Some(transfer), local);
        }
    }

    /// What arrives is whole and sound. `patches`: they are taken, and may build on it.
    pub fn whole(&mut self, patches: bool) {
        self.tell(Phase::Staged, Event::Newer);
        if let Some(entry) = self.at_mut(Phase::Arriving) {
            entry.stage(patches);
        }
        self.tell(Phase::Arriving, Event::Whole);
    }

    /// What is staged may be applied: gives it away.
    pub fn commit(&mut self) -> Option<StagedVersion> {
        let staged = self.at_mut(Phase::Staged).and_then(|entry| entry.staged.take());
        self.tell(Phase::Staged, Event::Committed);
        staged
    }

    /// What runs is another version: keeps its bytes, if patches may build on them. But of those that are kept for
    /// that, what arrives may still need others: there is one at a time (D3).
    pub fn set_patch_base(&mut self, digest: &str, base: Option<Base>, note: &str) {
        let arriving = self.transfer();
        let another = arriving.map_or(false, |transfer| {
            transfer.decoding() || matches!(transfer.builds_on(), Some(Bytes::Kept(_)))
        });
        if let Some(entry) = self.at_mut(Phase::Running) {
            if !digest.is_empty() {
                entry.digest = digest.to_owned(); // it was hashed only when it was applied
            }
            entry.note = note.to_owned();
            entry.base = base.filter(|base| !another || matches!(base.bytes, Bytes::Model(_)));
        }
    }

    /// Gives back the bytes that patches may build on; tells whether any were kept for that.
    pub fn forget_base(&mut self) -> bool {
        match self.at_mut(Phase::Running) {
            Some(entry) if matches!(entry.base, Some(Base { bytes: Bytes::Kept(_), .. })) => {
                entry.base = None;
                true
            }
            _ => false, // a model stays where it is
        }
    }

    /// Has a version of another name in the place of one that runs.
    pub fn rename(&mut self, key: Key, metadata: Metadata) {
        if self.tell(Phase::Running, Event::Renamed) {
            if let Some(entry) = self.at_mut(Phase::Running) {
                (entry.key, entry.metadata) = (key, metadata);
            }
        }
    }

    /// Lets something happen to the model; tells whether its mode is another one now (W26).
    pub fn change_mode(&mut self, event: ModeEvent) -> bool {
        let mode = next(MODES, self.mode, event);
        self.mode = mode.unwrap_or(self.mode);
        mode.is_some()
    }

    /// Lets something happen to what is in a phase; tells whether there is an arrow for that.
    pub fn tell(&mut self, phase: Phase, event: Event) -> bool {
        self.tell_those(event, |entry| entry.phase == phase)
    }

    /// Lets something happen to these versions; tells whether any has an arrow for that.
    pub fn tell_those(&mut self, event: Event, whom: impl Fn(&VersionEntry) -> bool) -> bool {
        let (mut moved, rejected) = (false, &mut self.rejected);
        self.live.retain_mut(|entry| {
            if let Some(phase) = next(ARROWS, entry.phase, event).filter(|_| whom(entry)) {
                entry.phase = phase;
                moved = true;
                if phase == Phase::Rejected {
                    rejected.truncate(REJECTED_KEPT - 1);
                    rejected.push_front(entry.key);
                }
            }
            !matches!(entry.phase, Phase::Dropped | Phase::Rejected)
        });
        moved
    }
}

/// Whether the version must be held and reported before it is applied.
pub fn must_be_staged(announce: &Announce) -> bool {
    announce.commit == CommitMode::Together || announce.acknowledge == Acknowledge::Staged
}

/// Whether two announcements of a version agree on what arrives.
fn same_bytes(one: &Announce, other: &Announce) -> bool {
    (&one.layout, one.nbytes, one.chunk_bytes) == (&other.layout, other.nbytes, other.chunk_bytes)
}
