//! Decides which versions of one model a worker receives, stages and applies (`phases.rs`).
//!
//! A newer version replaces an older one that is still arriving. The worker then receives the
//! newer version completely before it begins another version.

use crate::effects::{Effect, Host};
use crate::fetch_planner::FetchPlanner;
use crate::layout::Layout;
use crate::layouts::{Acceptance, Fault};
use crate::limits::*;
use crate::messages::*;
use crate::patches::Patches;
use crate::patching::{Base, Bytes, Patching};
use crate::phases::{Event, Lack, LackEvent, Mode, ModeEvent, Phase};
use crate::protocol::codes::TRANSIENT;
use crate::reports::{self, NOT_APPLIED};
use crate::sealing::{Opening, Subject};
use crate::segment::{Segment, Stamp};
use crate::sources::{SourceChunk, SourceFetch};
use crate::staging::{Buffer, Buffers, Source, StagedVersion};
use crate::transfer::{Key, Payload, Piece, Proof, Time, Transfer};
use crate::version_store::{may_be_mapped, VersionEntry, VersionStore};
use crate::words::escaped;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Phases of versions in the ready queue, or in a user's thread.
const HANDED_OVER: [Phase; 2] = [Phase::Ready, Phase::Applying];

/// State of a model. Versions are pairs of epoch and number.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct ModelState {
    /// The running version.
    pub running: Option<(u64, u64)>,
    /// Metadata of the running version, under its current number.
    pub metadata: BTreeMap<String, String>,
    /// The arriving version, with chunks received and chunks in all.
    pub arriving: Option<((u64, u64), u64, u64)>,
    /// The version that waits for a commit.
    pub staged: Option<(u64, u64)>,
    /// The version that waits for `Worker::receive`, or is being applied.
    pub ready: Option<(u64, u64)>,
    /// True if an apply failed half-way, so that no version runs.
    pub torn: bool,
}

/// One model of one worker.
pub struct Follower {
    model: String,
    shared: bool, // versions are read from shared memory: no chunk needs to be pushed
    host: Arc<dyn Host>,
    timing: Timing,
    versions: VersionStore,
    buffers: Buffers,
    acceptance: Acceptance,
    planner: FetchPlanner,
    patches: Patches,
    epoch: u64,             // greatest epoch of which bytes were written into the model
    torn_applies: u32,      // failed half-way applies in a row: unless 0, no version runs
    network_only: Key,      // the version to receive over the network, although it is in shared memory
    failed: Option<Failed>, // last failure, until another version is begun
    leases: u64,            // ids issued so far
}

impl Follower {
    pub fn new(model: &str, host: Arc<dyn Host>, bytes_max: u64, timing: Timing) -> Follower {
        Follower {
            model: model.to_owned(),
            shared: false,
            host,
            timing,
            versions: VersionStore::default(),
            buffers: Buffers::default(),
            acceptance: Acceptance::new(bytes_max),
            planner: FetchPlanner::new(model, timing),
            patches: Patches::new(model, timing),
            epoch: 0,
            torn_applies: 0,
            network_only: (0, 0),
            failed: None,
            leases: 0,
        }
    }

    /// Sets the number of tensors that the user's model has.
    pub fn expect_tensors(&mut self, count: usize) {
        self.acceptance.expect_tensors(count);
    }

    /// Returns the size in bytes of the largest payload that this model accepts: a layout, or a
    /// chunk.
    pub fn payload_bytes_max(&self) -> u64 {
        self.acceptance.layout_bytes_max().max(self.acceptance.bytes_max().min(CHUNK_BYTES_MAX))
    }

    pub fn require_sealed(&mut self) {
        self.acceptance.require_sealed();
    }

    pub fn accept_patches(&mut self) {
        self.patches.accept();
    }

    pub fn accepts_patches(&self) -> bool {
        self.patches.accepted()
    }

    pub fn model(&self) -> &str {
        &self.model
    }

    /// Returns the greatest epoch of which bytes were written into the model.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    pub fn running(&self) -> Option<Running> {
        self.versions.running()
    }

    /// Returns the state for display.
    pub fn state(&self) -> ModelState {
        let key = |phase| self.versions.in_phase(phase).map(VersionEntry::key);
        let transfer = self.versions.in_phase(Phase::Arriving).and_then(VersionEntry::transfer);
        let metadata = self.versions.in_phase(Phase::Running).map(|entry| entry.metadata().clone());
        ModelState {
            running: key(Phase::Running),
            metadata: metadata.unwrap_or_default(),
            arriving: transfer.map(|it| (it.key(), it.chunks_received() as u64, it.count())),
            staged: key(Phase::Staged),
            ready: key(Phase::Ready).max(key(Phase::Applying)),
            torn: self.torn_applies > 0,
        }
    }

    // Messages of the publisher.

    /// Requests a version that a beacon, a welcome or a stray chunk names, if the version is new.
    pub fn hear_of(&mut self, epoch: u64, version: u64, now: Time) -> Vec<Effect> {
        self.planner.hear_of(&self.versions, epoch, version, now)
    }

    /// Handles an announcement. `layout` is the version's layout, if the message has it. `pushed`
    /// is true if the message came over the data connection, so that chunks may be pushed.
    pub fn announced(
        &mut self,
        announce: Announce,
        layout: Option<&[u8]>,
        now: Time,
        pushed: bool,
    ) -> Vec<Effect> {
        let key = (announce.epoch, announce.version);
        let staged = self.versions.in_phase(Phase::Staged).map(VersionEntry::key); // W5, W14
        if staged == Some(key) && announce.commit == AnnounceCommit::Auto {
            return self.commit();
        }
        if key <= self.versions.newest() || self.versions.is_rejected(key) {
            return Vec::new();
        }
        let catching_up = self.versions.mode() == Mode::CatchingUp;
        if let Some(arriving) = self.versions.in_phase_mut(Phase::Arriving) {
            if key == arriving.key() && arriving.update_announcement(&announce) {
                return Vec::new();
            }
            if key < arriving.key() || (catching_up && key != arriving.key()) {
                return Vec::new(); // W8, W26
            }
        }
        if self.versions.in_phase(Phase::Announced).map_or(false, |waiting| key < waiting.key()) {
            return Vec::new(); // W5
        }
        let learnt = layout.map(|header| self.acceptance.learn(&announce, header));
        // A version that is too large is declined in `begin`, and not fetched again (W15).
        if let Some(Err(fault)) = learnt.filter(|learnt| !matches!(learnt, Err(("too-large", _)))) {
            // A version may have waited for this layout.
            self.versions.apply_event_where(Event::Failed, |entry| {
                entry.key() == key && entry.phase() == Phase::Announced
            });
            return self.fail(key, fault, now);
        }
        let chunks_follow = announce.whole.is_some() || (pushed && !self.shared); // W31, S8
        self.versions.add_announced(announce);
        let mut effects = self.begin(now);
        if let Some(transfer) = self.versions.arriving(key).filter(|_| !chunks_follow) {
            transfer.pull();
            effects.extend(self.pull(key, now));
        }
        effects
    }

    /// Handles a whole version that came in one message, as an announcement, one chunk and an end.
    pub fn announced_whole(
        &mut self,
        announce: Announce,
        whole: Whole,
        payload: &[u8],
        now: Time,
    ) -> Vec<Effect> {
        let (epoch, version) = (announce.epoch, announce.version);
        let (model, digest) = (announce.model.clone(), whole.digest);
        let end = End { model, epoch, version, digest, ..Default::default() };
        let mut effects = self.announced(announce, None, now, true);
        let piece = Piece { key: (epoch, version), patch: None, index: 0 };
        effects.extend(self.chunk(piece, Proof::Crc(whole.crc), Payload::Bytes(payload), now, true));
        effects.extend(self.end(end, now));
        effects
    }

    /// Handles a rename of the running version: a newer version has the same bytes, so nothing is
    /// fetched or applied.
    ///
    /// The rename is ignored while another version is ready or being applied: the user's thread may
    /// be writing this version into the model.
    pub fn renamed(&mut self, rename: Rename, now: Time) -> Vec<Effect> {
        let key = (rename.epoch, rename.version); // W25
        let handed_over = self.versions.in_phases(&HANDED_OVER).next().is_some();
        let arriving = self.versions.in_phase(Phase::Arriving).map_or((0, 0), VersionEntry::key);
        let same = self.running().as_ref() == Some(&rename.was);
        if !same || handed_over || key <= self.versions.newest() || key < arriving {
            return Vec::new();
        }
        self.versions.apply_event_where(Event::Newer, |entry| entry.phase() != Phase::Running);
        let was = (rename.was.epoch, rename.was.version);
        self.versions.rename(key, rename.metadata.clone());
        let mut effects =
            vec![Effect::Renamed { model: self.model.clone(), was, key, metadata: rename.metadata }];
        effects.extend(self.report_running(key));
        self.forget_failure();
        effects.extend(self.change_mode(ModeEvent::Completed, Some(now)));
        effects
    }

    /// Starts to receive the announced version; if its layout is not known, requests the layout.
    fn begin(&mut self, now: Time) -> Vec<Effect> {
        let announce = match self.versions.in_phase(Phase::Announced) {
            Some(entry) => entry.announce().clone(),
            None => return Vec::new(),
        };
        if let Some(fault) = self.acceptance.fault(&announce, &*self.host) {
            return self.decline(Phase::Announced, fault, now); // W6
        }
        let key = (announce.epoch, announce.version);
        let layout = match self.acceptance.layout(&announce) {
            Some(layout) => layout,
            None => return self.planner.layout(key, now),
        };
        self.versions.set_layout(layout.clone());
        let segment = self.segment(&announce);
        self.versions.resolve(if segment.is_some() { LackEvent::Located } else { LackEvent::Known });
        match segment {
            Some(segment) if may_be_mapped(&announce) => self.map(announce, layout, segment, now), // S6
            segment => {
                self.versions.resolve(LackEvent::Opened);
                self.make_room(announce, layout, segment, now)
            }
        }
    }

    /// Returns the segment that holds a version; `None` if the version must come over the network.
    fn segment(&self, announce: &Announce) -> Option<Arc<Segment>> {
        let key = (announce.epoch, announce.version);
        let shared = announce.shared.as_ref().filter(|_| key != self.network_only)?;
        self.host.open(shared, announce.nbytes)
    }

    /// Makes a version ready whose bytes are complete in shared memory: it is applied from there.
    fn map(
        &mut self,
        announce: Announce,
        layout: Arc<Layout>,
        segment: Arc<Segment>,
        now: Time,
    ) -> Vec<Effect> {
        self.versions.apply_event(Phase::Arriving, Event::Newer);
        self.versions.apply_event(Phase::Staged, Event::Newer);
        self.versions.apply_event(Phase::Announced, Event::Mapped);
        self.forget_failure();
        let hash_chunks = if announce.hash { announce.chunk_bytes } else { 0 }; // S7
        let (model, key) = (self.model.clone(), (announce.epoch, announce.version));
        let source = Source::Segment { segment, hash_chunks };
        let mut effects = self.change_mode(ModeEvent::Completed, Some(now));
        let (digest, metadata) = (String::new(), announce.metadata);
        let staged =
            StagedVersion { model, key, layout, source, digest, encoding: "", metadata, keep: false };
        effects.push(Effect::Ready(staged));
        effects
    }

    /// Takes a buffer for the announced version, which replaces the arriving version.
    fn make_room(
        &mut self,
        announce: Announce,
        layout: Arc<Layout>,
        segment: Option<Arc<Segment>>,
        now: Time,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        if self.versions.apply_event(Phase::Arriving, Event::Newer) {
            effects.extend(self.change_mode(ModeEvent::Replaced, None)); // W26
        }
        let mut buffer = self.buffers.take(announce.nbytes);
        if buffer.is_err() && self.versions.forget_base() {
            buffer = self.buffers.take(announce.nbytes); // the next version matters more (D3)
        }
        match buffer {
            Ok(Some(buffer)) => {
                self.versions.resolve(LackEvent::Freed);
                effects.extend(self.receive(announce, layout, buffer, segment, now));
            }
            Ok(None) => self.versions.resolve(LackEvent::Full), // continues in `resume`
            // the decoder holds memory: `decoded` continues
            Err(_) if self.patches.decoding() => self.versions.resolve(LackEvent::Full),
            Err(error) => {
                let text = format!("no memory for {} bytes ({})", announce.nbytes, error);
                let fault = ("no-memory", text + ": lower bytes_max, or make room");
                effects.extend(self.decline(Phase::Announced, fault, now));
            }
        }
        effects
    }

    /// Begins to receive a version into a buffer: copies it from shared memory, or expects chunks.
    fn receive(
        &mut self,
        announce: Announce,
        layout: Arc<Layout>,
        buffer: Buffer,
        segment: Option<Arc<Segment>>,
        now: Time,
    ) -> Vec<Effect> {
        let stamp = Stamp::new(&self.model, announce.epoch, announce.version);
        let (local, whole) = (segment.is_some(), announce.whole.is_some());
        let mut transfer = match segment {
            None if !whole => self.patches.transfer(&self.versions, announce, layout, buffer, now),
            _ => Transfer::new(announce, layout, buffer, "", now, self.timing),
        };
        if let Some(segment) = segment {
            if segment.read(&stamp, |memory| transfer.read(memory)).is_err() {
                transfer.forget(); // the version is fetched over the network
            }
        }
        let listening = match whole {
            true => Vec::new(),
            false => self.patches.listen(&transfer, self.shared, self.versions.mode()),
        };
        if !listening.is_empty() {
            transfer.pull();
        }
        let jobs = match local || whole || transfer.patch().is_some() {
            true => Vec::new(),
            false => transfer.fetch_from_sources(),
        };
        let sources = jobs.into_iter().map(Effect::FetchFromSource);
        let key = transfer.key();
        self.versions.begin_transfer(transfer, local);
        self.forget_failure();
        let fetches = self.pull(key, now);
        sources.chain(listening).chain(fetches).collect()
    }

    /// Handles a chunk from a source (N1).
    pub fn source_chunk(&mut self, key: Key, chunk: &SourceChunk, now: Time) -> Vec<Effect> {
        let SourceChunk { wanted, index, crc, bytes, .. } = chunk;
        let new = match self.versions.arriving(key) {
            Some(transfer) => transfer.add_from_source(wanted, *index, *crc, bytes, now),
            None => false,
        };
        if new {
            self.completed(key, now)
        } else {
            Vec::new()
        }
    }

    /// Handles the end of a source's job. If the source has not sent all chunks, `done` has the
    /// reason, and the missing chunks are fetched from the publisher (N3).
    pub fn source_over(
        &mut self,
        key: Key,
        job: &SourceFetch,
        done: Result<(), String>,
        now: Time,
    ) -> Vec<Effect> {
        let transfer = self.versions.arriving(key);
        if !transfer.map_or(false, |transfer| transfer.source_over(job, now)) {
            return Vec::new();
        }
        let notice = |fault| {
            let text = format!("chunks of the source at {} are lacking: {}", escaped(&job.address), fault);
            Effect::Notice { code: "source".to_owned(), text }
        };
        let mut effects: Vec<Effect> = done.err().map(notice).into_iter().collect();
        effects.extend(self.pull(key, now));
        effects
    }

    /// Handles a refusal: the publisher no longer has the requested patch, or never had it.
    pub fn no_patch(&mut self, key: Key, now: Time) -> Vec<Effect> {
        self.patches.refused(&mut self.versions, key, now)
    }

    /// Handles the result of decoding a patch: stages the decoded version, or fetches the whole
    /// version.
    pub fn decoded(&mut self, job: Patching, done: Result<Duration, String>, now: Time) -> Vec<Effect> {
        self.patches.decoded();
        let transfer = self.versions.arriving(job.key).filter(|transfer| transfer.waits_for(&job));
        match (transfer, done) {
            (Some(transfer), Ok(took)) => {
                transfer.decoded(job, took);
                self.stage(now)
            }
            (Some(_), Err(why)) => self.patches.give_up(&mut self.versions, Some(job.version), &why, now),
            (None, _) => {
                drop(job); // the version was replaced or aborted: its buffer is free
                self.resume(now)
            }
        }
    }

    /// Changes the mode, and with it whether the model receives pushed chunks. If the model
    /// receives them again and `now` is given, also requests the latest version.
    fn change_mode(&mut self, event: ModeEvent, now: Option<Time>) -> Vec<Effect> {
        if !self.versions.change_mode(event) {
            return Vec::new();
        }
        let following = self.versions.mode() == Mode::Following;
        let mut effects = vec![self.subscription()];
        if let Some(now) = now.filter(|_| following) {
            let (epoch, _) = self.versions.newest();
            effects.extend(self.planner.request_latest(&self.versions, epoch, now, false));
        }
        effects
    }

    /// Returns the effect that subscribes to pushed chunks, or unsubscribes (W26, S8).
    fn subscription(&self) -> Effect {
        let on = self.versions.mode() == Mode::Following && !self.shared;
        Effect::Subscribe { topic: self.patches.topic(), on }
    }

    /// Rejects the version in this phase, or only drops it if the failure may not recur.
    fn decline(&mut self, phase: Phase, fault: Fault, now: Time) -> Vec<Effect> {
        let key = self.versions.in_phase(phase).map_or((0, 0), VersionEntry::key);
        let event = if TRANSIENT.contains(&fault.0) { Event::Failed } else { Event::Declined };
        self.versions.apply_event(phase, event); // W15
        self.fail(key, fault, now)
    }

    // Chunks.

    /// Leases the buffer space of a chunk whose payload is about to be received. Returns the id of
    /// the lease, or `None` if the chunk is not wanted.
    pub fn lease(&mut self, piece: Piece, size: usize, opening: Option<Opening>) -> Option<u64> {
        let transfer = self.versions.arriving(piece.key).filter(|transfer| transfer.is_of(piece.patch))?;
        self.leases += 1;
        transfer.lease(piece.index, size, self.leases, opening).then_some(self.leases)
    }

    /// True if this version is arriving.
    pub fn arrives(&self, key: Key) -> bool {
        self.versions.in_phase(Phase::Arriving).map_or(false, |entry| entry.key() == key)
    }

    /// Returns the subject under which the chunks of this version, or of this patch, are sealed.
    /// Returns `None` if that version or patch is not arriving.
    pub fn subject(&self, key: Key, patch: Option<&PatchId>) -> Option<Subject> {
        let entry = self.versions.in_phase(Phase::Arriving).filter(|entry| entry.key() == key)?;
        let transfer = entry.transfer().filter(|transfer| transfer.is_of(patch))?;
        Some(transfer.subject())
    }

    /// Returns the arriving transfer, to which every lease belongs.
    pub fn leased(&mut self) -> Option<&mut Transfer> {
        self.versions.transfer()
    }

    /// Handles a chunk.
    pub fn chunk(
        &mut self,
        piece: Piece,
        proof: Proof,
        payload: Payload,
        now: Time,
        pushed: bool,
    ) -> Vec<Effect> {
        let key = piece.key;
        let transfer = match self.versions.arriving(key) {
            Some(transfer) if transfer.is_of(piece.patch) => transfer,
            Some(_) => return Vec::new(), // D9
            None => return self.stray(key, now),
        };
        let fresh = transfer.add(piece.index, proof, payload, now, pushed); // W9
        let due = fresh && pushed && transfer.reports(now);
        let mut effects = self.pull(key, now);
        if due {
            effects.extend(reports::receiving(&self.versions));
        }
        effects.extend(self.completed(key, now));
        effects
    }

    /// Handles an `end`: the publisher has sent all chunks of a version or patch.
    pub fn end(&mut self, end: End, now: Time) -> Vec<Effect> {
        let key = (end.epoch, end.version);
        match self.versions.arriving(key) {
            Some(transfer) if transfer.is_of(end.patch.as_ref()) => transfer.end(end.digest),
            Some(_) => return Vec::new(), // D9
            None => return self.stray(key, now),
        }
        let mut effects = self.pull(key, now);
        effects.extend(self.completed(key, now));
        effects
    }

    /// Records that a ping was answered: no answer to a request before `sent_at` is on its way (W12).
    pub fn answered(&mut self, sent_at: Time) {
        self.planner.answered(&mut self.versions, sent_at);
    }

    fn stray(&mut self, (epoch, version): Key, now: Time) -> Vec<Effect> {
        match self.versions.in_phase(Phase::Announced) {
            Some(_) => Vec::new(), // its layout was requested
            None => self.hear_of(epoch, version, now),
        }
    }

    /// Returns the fetches that the arriving version wants to send now.
    fn pull(&mut self, key: Key, now: Time) -> Vec<Effect> {
        self.versions.arriving(key).map_or_else(Vec::new, |transfer| reports::fetches(transfer, now))
    }

    /// Verifies and stages the arriving version, if it is complete.
    fn completed(&mut self, key: Key, now: Time) -> Vec<Effect> {
        let transfer = match self.versions.arriving(key).filter(|transfer| transfer.complete()) {
            Some(transfer) => transfer,
            None => return Vec::new(),
        };
        if transfer.patch().is_some() {
            return self.patches.decode(transfer);
        }
        if transfer.verify() {
            return self.stage(now);
        }
        let restarts = transfer.restarts();
        if restarts < RESTARTS_MAX {
            return Vec::new(); // the next tick fetches the chunks again: W13
        }
        let text = format!("the version did not match its digest, {} times", restarts);
        self.decline(Phase::Arriving, ("digest-mismatch", text), now)
    }

    /// Stages the arriving version, and commits it unless it waits for a commit message.
    fn stage(&mut self, now: Time) -> Vec<Effect> {
        self.versions.stage_arriving(self.patches.accepted());
        let mut effects = reports::staged(&self.versions, &[Phase::Staged]);
        let staged = self.versions.in_phase(Phase::Staged);
        if staged.map_or(false, |entry| entry.announce().commit != AnnounceCommit::Together) {
            effects.extend(self.commit());
        }
        effects.extend(self.change_mode(ModeEvent::Completed, Some(now)));
        effects
    }

    /// Makes the staged version ready. If the version has companions, only records the commit,
    /// since all of them become ready at once (C2).
    fn commit(&mut self) -> Vec<Effect> {
        if self.versions.await_companions() {
            return Vec::new();
        }
        self.versions.commit().map(Effect::Ready).into_iter().collect()
    }

    /// Returns the committed version that waits for companions, and the companions' version numbers.
    pub fn awaiting_companions(&self) -> Option<(Key, &BTreeMap<String, u64>)> {
        self.versions.awaiting_companions().map(|entry| (entry.key(), &entry.announce().companions))
    }

    /// True if this version or a newer one is ready or runs.
    pub fn has_at_least(&self, key: Key) -> bool {
        self.versions.in_phases(&[Phase::Ready, Phase::Running]).any(|entry| entry.key() >= key)
    }

    /// Makes ready the version that waited for its companions, and returns this version.
    pub fn release(&mut self) -> Option<StagedVersion> {
        self.versions.commit()
    }

    /// Handles a commit: the staged version may be applied.
    pub fn committed(&mut self, commit: &Commit) -> Vec<Effect> {
        let key = (commit.epoch, commit.version);
        match self.versions.in_phase(Phase::Staged) {
            Some(entry) if entry.key() == key && entry.digest() == commit.digest => self.commit(), // W14
            _ => Vec::new(),
        }
    }

    /// Handles an abort: drops the version, which must not be applied.
    pub fn aborted(&mut self, abort: &Abort, now: Time) -> Vec<Effect> {
        let key = (abort.epoch, abort.version);
        let arrived = self.versions.arriving(key).is_some();
        self.versions.apply_event_where(Event::Aborted, |entry| entry.key() == key); // W14
        self.planner.end_backoff(key);
        let effects = self.resume(now);
        let idle = effects.is_empty() && self.versions.in_phase(Phase::Arriving).is_none();
        if arrived && idle && self.versions.mode() == Mode::CatchingUp {
            return self.planner.request_latest(&self.versions, abort.epoch, now, false);
            // W26
        }
        effects
    }

    /// Handles a refusal: the publisher no longer has this version. Version 0 stands for every
    /// announced version, and epoch 0 for every epoch.
    pub fn gone(&mut self, epoch: u64, version: u64, now: Time) -> Vec<Effect> {
        let arriving = self.versions.in_phase(Phase::Arriving).map(VersionEntry::key);
        self.planner.end_backoff((epoch, version));
        self.versions.apply_event_where(Event::Gone, |entry| {
            let named = version == entry.key().1 || (version == 0 && entry.phase() == Phase::Announced);
            named && (epoch == 0 || epoch == entry.key().0) // else it concerns an older publisher
        });
        match arriving {
            Some((epoch, _)) if self.versions.in_phase(Phase::Arriving).is_none() => {
                let effects = self.resume(now); // W27
                if effects.is_empty() {
                    self.planner.request_latest(&self.versions, epoch, now, false)
                } else {
                    effects
                }
            }
            _ => Vec::new(),
        }
    }

    // The session.

    /// Handles the start of a session with a publisher whose latest version is this one. Unless
    /// versions are read from shared memory, reserves a buffer of `nbytes`, their expected size.
    pub fn reconnected(
        &mut self,
        (epoch, version): Key,
        nbytes: u64,
        shared: bool,
        now: Time,
    ) -> Vec<Effect> {
        self.shared = shared;
        let mut effects = vec![self.subscription()];
        if !shared && nbytes <= self.acceptance.bytes_max() {
            self.buffers.reserve(nbytes);
        }
        self.versions.reconnected(epoch, now);
        self.torn_applies = self.torn_applies.min(1); // earlier failures count as one
        self.planner.reconnected();
        effects.extend(reports::staged(&self.versions, &NOT_APPLIED));
        effects.extend(self.hear_of(epoch, version, now));
        effects
    }

    // Reports of the user's threads.

    /// Notes that a user's thread has begun to apply a version.
    pub fn taken(&mut self, key: Key) {
        self.versions.apply_event_where(Event::Taken, |entry| entry.key() == key);
    }

    /// Notes that a user's thread could not apply a version yet.
    pub fn put_back(&mut self, key: Key) {
        self.versions.apply_event_where(Event::PutBack, |entry| entry.key() == key);
    }

    /// Handles a version that was applied and runs now. `digest` is empty if the version was not
    /// hashed. Patches may build on `base`. `note` is a text about values that the model's dtypes
    /// cannot hold; empty if there are none.
    pub fn applied(
        &mut self,
        key: Key,
        digest: &str,
        base: Option<Base>,
        note: &str,
        now: Time,
    ) -> Vec<Effect> {
        if !self.versions.apply_event_where(Event::Applied, |entry| entry.key() == key) {
            return Vec::new();
        }
        self.versions
            .apply_event_where(Event::Newer, |entry| entry.phase() == Phase::Running && entry.key() != key);
        self.versions.set_patch_base(digest, base, note); // D3
        let mut effects: Vec<Effect> = self.report_running(key).into_iter().collect();
        if matches!(self.leased().and_then(|transfer| transfer.builds_on()), Some(Bytes::Model(_))) {
            let why = "another version runs now, and has overwritten the patch's base";
            effects.extend(self.patches.give_up(&mut self.versions, None, why, now));
        }
        effects.extend(self.resume(now));
        effects
    }

    /// Handles a version that could not be applied. If the model is `intact`, the previous version
    /// still runs.
    pub fn failed(&mut self, key: Key, text: &str, intact: bool, now: Time) -> Vec<Effect> {
        let again = !intact && self.torn_applies + 1 < APPLIES_MAX;
        let event = if again { Event::Torn } else { Event::Declined };
        if !self
            .versions
            .apply_event_where(event, |entry| entry.key() == key && entry.phase() == Phase::Applying)
        {
            return Vec::new();
        }
        if !intact {
            self.versions.apply_event(Phase::Running, Event::Torn); // W24
            self.network_only = key; // the next attempt gets the version over the network, verified
            self.torn_applies += 1;
            self.epoch = self.epoch.max(key.0);
        }
        self.record_failure(key, "apply", text);
        let mut effects: Vec<Effect> = self.failure().into_iter().collect();
        effects.extend(self.resume(now));
        effects
    }

    /// Handles a version that was not applied since a companion is torn. The previous version still
    /// runs, and this one is received again.
    pub fn failed_for_now(&mut self, key: Key, text: &str, now: Time) -> Vec<Effect> {
        let applying = |entry: &VersionEntry| entry.key() == key && entry.phase() == Phase::Applying;
        if !self.versions.apply_event_where(Event::Failed, applying) {
            return Vec::new();
        }
        self.planner.back_off(key, now);
        self.record_failure(key, "no-memory", text);
        let mut effects: Vec<Effect> = self.failure().into_iter().collect();
        effects.extend(self.resume(now));
        effects
    }

    /// Notes that a version runs under this key. Returns the report to the publisher.
    fn report_running(&mut self, key: Key) -> Option<Effect> {
        self.torn_applies = 0;
        self.epoch = self.epoch.max(key.0);
        self.failed = self.failed.take().filter(|failed| (failed.epoch, failed.version) > key);
        reports::applied(&self.versions)
    }

    /// Forgets the last failure when another version begins. While no version runs, keeps the
    /// failure, which is reported with every ping.
    fn forget_failure(&mut self) {
        if self.torn_applies == 0 {
            self.failed = None;
        }
    }

    /// Reports to the publisher and the user that a version is not accepted: for now if the failure
    /// may not recur, otherwise in this session.
    fn fail(&mut self, key: Key, (code, text): Fault, now: Time) -> Vec<Effect> {
        if TRANSIENT.contains(&code) {
            self.planner.back_off(key, now);
        }
        self.record_failure(key, code, &text);
        let rejected = Effect::Rejected { model: self.model.clone(), key, code, text };
        self.failure().into_iter().chain([rejected]).collect()
    }

    fn record_failure(&mut self, (epoch, version): Key, code: &str, text: &str) {
        let text = text.chars().take(TEXT_MAX).collect();
        let (model, code, intact) = (self.model.clone(), code.to_owned(), true);
        self.failed = Some(Failed { model, epoch, version, code, text, intact, ..Default::default() });
    }

    /// Returns the report of the last failure, unless it was forgotten.
    fn failure(&self) -> Option<Effect> {
        self.failed.as_ref().map(|failed| reports::failed(failed, self.torn_applies > 0))
    }

    /// Handles a version that was gone from shared memory before it was copied: requests the latest
    /// version.
    pub fn gone_stale(&mut self, key: Key, now: Time) -> Vec<Effect> {
        if !self.versions.apply_event_where(Event::Stale, |entry| entry.key() == key) {
            return Vec::new();
        }
        self.network_only = key; // S5
        self.planner.request_latest(&self.versions, key.0, now, true)
    }

    /// Handles a version that was replaced by a newer one before it was applied.
    pub fn dropped(&mut self, key: Key, now: Time) -> Vec<Effect> {
        let replaced = |entry: &VersionEntry| entry.key() == key && HANDED_OVER.contains(&entry.phase());
        if self.versions.apply_event_where(Event::Newer, replaced) {
            self.resume(now)
        } else {
            Vec::new()
        }
    }

    /// Begins to receive the announced version that waits for a buffer, if a buffer is free now.
    fn resume(&mut self, now: Time) -> Vec<Effect> {
        if self.versions.in_phase(Phase::Arriving).is_some() {
            return Vec::new();
        }
        let newest = self.versions.newest();
        self.versions.apply_event_where(Event::Newer, |entry| {
            entry.phase() == Phase::Announced && entry.key() <= newest
        });
        let waiting = self.versions.in_phase(Phase::Announced).filter(|entry| entry.lacks() == Lack::Buffer);
        match waiting.map(|entry| (entry.announce().clone(), entry.layout().cloned())) {
            Some((announce, Some(layout))) => {
                let segment = self.segment(&announce);
                self.make_room(announce, layout, segment, now)
            }
            _ => Vec::new(),
        }
    }

    // Time.

    /// Returns the requests that are due. Gives up a transfer that makes no progress.
    pub fn tick(&mut self, now: Time) -> Vec<Effect> {
        let hopeless = self.leased().filter(|transfer| transfer.hopeless());
        if let Some(patched) = hopeless.map(|transfer| transfer.patch().is_some()) {
            let why = "no chunks arrive that fit the announcement".to_owned(); // W12
            return match patched {
                true => self.patches.give_up(&mut self.versions, None, "no more of its chunks arrive", now),
                false => self.decline(Phase::Arriving, ("digest-mismatch", why), now),
            };
        }
        if let Some(key) = self.versions.in_phase(Phase::Arriving).map(VersionEntry::key) {
            let mut effects = self.pull(key, now);
            effects.extend(self.completed(key, now));
            return effects;
        }
        let waiting = self.versions.in_phase(Phase::Announced);
        if !waiting.map_or(false, |entry| entry.lacks() == Lack::Layout) {
            return self.resume(now);
        }
        if self.planner.due(now) {
            return self.begin(now);
        }
        Vec::new()
    }

    /// Returns all reports again, in case one was lost.
    pub fn repeat(&self) -> Vec<Effect> {
        reports::current(&self.versions, self.failure()) // W17
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::layout_id;
    use crate::tests::AnyLayout;

    #[test]
    fn an_older_announcement_does_not_replace_a_newer_one() {
        let json = r#"{"w":{"dtype":"U8","shape":[10],"data_offsets":[0,10]}} "#;
        let layout = [&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat();
        let announce = |version: u64| {
            let header = format!(
                r#"{{"wbp":1,"type":"announce","model":"m","epoch":7,"version":{},"layout":"{}","layout_bytes":64,
                "nbytes":10,"chunk_bytes":4,"commit":"auto","acknowledge":"applied","encoding":"raw"}}"#,
                version,
                layout_id(&layout)
            );
            match from_publisher(header.as_bytes(), 0) {
                Ok(FromPublisher::Announce(announce)) => announce,
                other => panic!("{:?}", other),
            }
        };
        let mut follower = Follower::new("m", Arc::new(AnyLayout), 100, Timing::default());
        assert_eq!(
            follower.announced(announce(2), None, Time::ZERO, true).len(),
            1,
            "the fetch of its layout"
        );
        for payload in [&layout[..], &b"no layout"[..]] {
            let effects = follower.announced(announce(1), Some(payload), Time::ZERO, true);
            assert!(effects.is_empty(), "{:?}", effects);
        }
        assert_eq!(follower.versions.in_phase(Phase::Announced).map(VersionEntry::key), Some((7, 2)));
    }

    #[test]
    fn that_nothing_runs_is_said_of_a_failure_only_as_long_as_it_is_so() {
        let mut follower = Follower::new("m", Arc::new(AnyLayout), 1, Timing::default());
        let intact = |follower: &Follower| match follower.failure() {
            Some(Effect::Send(FromWorker::Failed(failed))) => failed.intact,
            other => panic!("{:?}", other),
        };
        follower.torn_applies = 1;
        follower.record_failure((7, 5), "apply", "it failed half-way");
        assert!(!intact(&follower));
        follower.report_running((7, 4)); // an older one, which was meant for all
        assert!(intact(&follower));
    }
}
