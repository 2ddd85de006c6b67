//! The versions of one model at a worker: the phase of each, and the memory that belongs to it.
//!
//! The store owns all memory of a version, and frees this memory when it drops the version.

use crate::layout::Layout;
use crate::limits::REJECTED_KEPT;
use crate::messages::{Announce, AnnounceAcknowledge, AnnounceCommit, Metadata, PatchId, Running, DELTA};
use crate::patching::{Base, Bytes};
use crate::phases::{next, Event, Lack, LackEvent, Mode, ModeEvent, Phase, LACKS, MODES, TRANSITIONS};
use crate::staging::{Buffer, Source, StagedVersion};
use crate::transfer::{Key, Time, Transfer};
use std::collections::VecDeque;
use std::sync::Arc;

/// A version at this worker.
pub struct VersionEntry {
    key: Key,
    announce: Announce,
    phase: Phase,
    lacks: Lack,                   // while announced
    layout: Option<Arc<Layout>>,   // once known
    transfer: Option<Transfer>,    // while arriving
    staged: Option<StagedVersion>, // while waiting for a commit
    committed: bool,               // while staged: the version waits only for its companions
    digest: String,                // once whole
    local: bool,                   // true if copied from the publisher's memory, or a copy failed
    patch: Option<PatchId>,        // the patch by which the version arrived
    decode_us: u64,                // microseconds that decoding this patch took
    note: String,                  // while running: text about values that the model cannot hold
    base: Option<Base>,            // while running: the bytes that patches may build on
    metadata: Metadata,            // belongs to the current number
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

    pub fn lacks(&self) -> Lack {
        self.lacks
    }

    pub fn layout(&self) -> Option<&Arc<Layout>> {
        self.layout.as_ref()
    }

    pub fn transfer(&self) -> Option<&Transfer> {
        self.transfer.as_ref()
    }

    /// Returns the digest; empty before the version is complete.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    pub fn patch(&self) -> Option<PatchId> {
        self.patch.clone()
    }

    pub fn decode_us(&self) -> u64 {
        self.decode_us
    }

    pub fn note(&self) -> &str {
        &self.note
    }

    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Returns the bytes that patches may build on, while the version runs.
    pub fn base(&self) -> Option<&Base> {
        self.base.as_ref()
    }

    /// Replaces the stored announcement with a repeated one, if both describe the same bytes.
    /// Returns true if they do.
    pub fn update_announcement(&mut self, announce: &Announce) -> bool {
        let same = same_bytes(&self.announce, announce);
        if same {
            (self.announce, self.metadata) = (announce.clone(), announce.metadata.clone());
        }
        same
    }

    /// Begins the transfer of the whole version instead of a patch. `buffer` is the version's
    /// buffer, if the decoder has returned it.
    pub fn receive_whole(&mut self, buffer: Option<Buffer>, why: &str, now: Time) -> Option<&mut Transfer> {
        self.transfer = self.transfer.take().and_then(|transfer| transfer.give_up(buffer, why, now));
        self.transfer.as_mut()
    }

    /// Stages the version. With `patches`, patches may build on it.
    fn stage(&mut self, patches: bool) {
        if let Some(transfer) = self.transfer.take() {
            self.patch = transfer.patch();
            self.decode_us = transfer.decode_us();
            let (buffer, layout, digest) = transfer.into_parts();
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
    live: Vec<VersionEntry>, // oldest first
    // Versions that are not tried again in this session. A version older than these is still tried:
    // the rejected version may have been aborted or meant for few workers, and the older version may
    // be the latest for all workers.
    rejected: VecDeque<Key>,
}

impl VersionStore {
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns the running version.
    pub fn running(&self) -> Option<Running> {
        let entry = self.in_phase(Phase::Running)?;
        let (epoch, version) = entry.key;
        Some(Running { epoch, version, digest: entry.digest.clone(), ..Default::default() })
    }

    pub fn is_rejected(&self, key: Key) -> bool {
        self.rejected.contains(&key)
    }

    /// Returns the version in a phase: the oldest, if there are several.
    pub fn in_phase(&self, phase: Phase) -> Option<&VersionEntry> {
        self.live.iter().find(|entry| entry.phase == phase)
    }

    pub fn in_phase_mut(&mut self, phase: Phase) -> Option<&mut VersionEntry> {
        self.live.iter_mut().find(|entry| entry.phase == phase)
    }

    /// Returns the transfer of this version, if it is arriving.
    pub fn arriving(&mut self, key: Key) -> Option<&mut Transfer> {
        self.in_phase_mut(Phase::Arriving).filter(|entry| entry.key == key)?.transfer.as_mut()
    }

    /// Returns the transfer of the arriving version.
    pub fn transfer(&mut self) -> Option<&mut Transfer> {
        self.in_phase_mut(Phase::Arriving)?.transfer.as_mut()
    }

    /// Returns the versions in these phases, in the order of the phases.
    pub fn in_phases<'a>(&'a self, phases: &'a [Phase]) -> impl Iterator<Item = &'a VersionEntry> {
        phases.iter().flat_map(move |phase| self.live.iter().filter(move |entry| entry.phase == *phase))
    }

    /// Returns the key of the newest version that is staged, ready, being applied or running; zeros
    /// if there is none.
    pub fn newest(&self) -> Key {
        let here = [Phase::Staged, Phase::Ready, Phase::Applying, Phase::Running];
        self.in_phases(&here).map(|entry| entry.key).max().unwrap_or((0, 0))
    }

    /// Adds an announced version, which replaces any other version in phase `Announced`.
    pub fn add_announced(&mut self, announce: Announce) {
        self.apply_event(Phase::Announced, Event::Newer);
        let key = (announce.epoch, announce.version);
        self.live.push(VersionEntry {
            key,
            metadata: announce.metadata.clone(),
            announce,
            layout: None,
            transfer: None,
            staged: None,
            committed: false,
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

    /// Begins a session of this epoch: drops announced versions, and unfinished versions of other
    /// epochs. Requests missing chunks again, since earlier requests will not be answered (W28).
    pub fn reconnected(&mut self, epoch: u64, now: Time) {
        self.apply_event_where(Event::Fenced, |entry| {
            entry.phase == Phase::Announced || entry.key.0 != epoch
        });
        if let Some(transfer) = self.transfer() {
            transfer.reconnected(now);
        }
        self.rejected.clear();
    }

    /// Sets the layout of the announced version.
    pub fn set_layout(&mut self, layout: Arc<Layout>) {
        if let Some(entry) = self.in_phase_mut(Phase::Announced) {
            entry.layout = Some(layout);
        }
    }

    /// Records that the layout or memory that the announced version waits for has become available,
    /// or is not available now.
    pub fn resolve(&mut self, event: LackEvent) {
        if let Some(entry) = self.in_phase_mut(Phase::Announced) {
            entry.lacks = next(LACKS, entry.lacks, event).unwrap_or(entry.lacks);
        }
    }

    /// Begins the transfer of the announced version. `local` is true if the version was copied from
    /// the publisher's memory, or the copy was tried.
    pub fn begin_transfer(&mut self, transfer: Transfer, local: bool) {
        self.apply_event(Phase::Announced, Event::Begun);
        if let Some(entry) = self.in_phase_mut(Phase::Arriving) {
            (entry.transfer, entry.local) = (Some(transfer), local);
        }
    }

    /// Stages the arriving version. With `patches`, patches may build on it.
    pub fn stage_arriving(&mut self, patches: bool) {
        self.apply_event(Phase::Staged, Event::Newer);
        if let Some(entry) = self.in_phase_mut(Phase::Arriving) {
            entry.stage(patches);
        }
        self.apply_event(Phase::Arriving, Event::Whole);
    }

    /// If the staged version has companions, records that it is committed, and returns true.
    pub fn await_companions(&mut self) -> bool {
        let staged = self.in_phase_mut(Phase::Staged).filter(|entry| !entry.announce.companions.is_empty());
        staged.map(|entry| entry.committed = true).is_some()
    }

    /// Returns the staged version, if it is committed and waits for its companions.
    pub fn awaiting_companions(&self) -> Option<&VersionEntry> {
        self.in_phase(Phase::Staged).filter(|entry| entry.committed)
    }

    /// Makes the staged version ready, and returns it.
    pub fn commit(&mut self) -> Option<StagedVersion> {
        let staged = self.in_phase_mut(Phase::Staged).and_then(|entry| entry.staged.take());
        self.apply_event(Phase::Staged, Event::Committed);
        staged
    }

    /// Sets the digest, the note and the patch base of the version that runs now. At most one
    /// buffer is kept as a patch base (D3): none, while an arriving patch builds on another one.
    pub fn set_patch_base(&mut self, digest: &str, base: Option<Base>, note: &str) {
        let arriving = self.transfer();
        let in_use = arriving.map_or(false, |transfer| {
            transfer.decoding() || matches!(transfer.builds_on(), Some(Bytes::Kept(_)))
        });
        if let Some(entry) = self.in_phase_mut(Phase::Running) {
            if !digest.is_empty() {
                entry.digest = digest.to_owned(); // hashed while it was applied
            }
            entry.note = note.to_owned();
            entry.base = base.filter(|base| !in_use || matches!(base.bytes, Bytes::Model(_)));
        }
    }

    /// Releases the buffer that is kept for patches. Returns true if there was one.
    pub fn forget_base(&mut self) -> bool {
        match self.in_phase_mut(Phase::Running) {
            Some(entry) if matches!(entry.base, Some(Base { bytes: Bytes::Kept(_), .. })) => {
                entry.base = None;
                true
            }
            _ => false, // a model's own memory stays
        }
    }

    /// Gives the running version another key and other metadata.
    pub fn rename(&mut self, key: Key, metadata: Metadata) {
        if self.apply_event(Phase::Running, Event::Renamed) {
            if let Some(entry) = self.in_phase_mut(Phase::Running) {
                (entry.key, entry.metadata) = (key, metadata);
            }
        }
    }

    /// Applies an event to the mode. Returns true if the mode changes (W26).
    pub fn change_mode(&mut self, event: ModeEvent) -> bool {
        let mode = next(MODES, self.mode, event);
        self.mode = mode.unwrap_or(self.mode);
        mode.is_some()
    }

    /// Applies an event to the version in a phase. Returns true if the table has this transition.
    pub fn apply_event(&mut self, phase: Phase, event: Event) -> bool {
        self.apply_event_where(event, |entry| entry.phase == phase)
    }

    /// Applies an event to the versions for which `matches` returns true. Returns true if
    /// any of them changed its phase.
    pub fn apply_event_where(&mut self, event: Event, matches: impl Fn(&VersionEntry) -> bool) -> bool {
        let (mut moved, rejected) = (false, &mut self.rejected);
        self.live.retain_mut(|entry| {
            if let Some(phase) = next(TRANSITIONS, entry.phase, event).filter(|_| matches(entry)) {
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

/// True if the version must be staged and reported before it is applied.
pub fn must_be_staged(announce: &Announce) -> bool {
    announce.commit == AnnounceCommit::Together || announce.acknowledge == AnnounceAcknowledge::Staged
}

/// True if the version may be applied from shared memory, without a copy that is staged (S6).
pub fn may_be_mapped(announce: &Announce) -> bool {
    !must_be_staged(announce) && announce.companions.is_empty()
}

/// True if two announcements of a version describe the same bytes.
fn same_bytes(one: &Announce, other: &Announce) -> bool {
    (&one.layout, one.nbytes, one.chunk_bytes) == (&other.layout, other.nbytes, other.chunk_bytes)
}
