//! One model of a worker: what comes of it, and what becomes of the versions here (`phases.rs`).
//!
//! The latest version wins: an older one that is on its way makes room for it. But a worker that
//! had to drop one finishes the next, by fetching, before it looks at anything newer.

use crate::effects::{Effect, Host, Source, Staged};
use crate::holdings::{must_be_staged, same_bytes, Held, Holdings};
use crate::layout::Layout;
use crate::layouts::{Layouts, Problem};
use crate::limits::*;
use crate::messages::*;
use crate::patches::Patches;
use crate::patching::{Base, Bytes, Decoding};
use crate::phases::{next, Event, Gain, Lack, Mode, Phase, Turn, MODES};
use crate::sealing::{Opening, Subject};
use crate::segment::{Segment, Stamp};
use crate::staging::{Buffer, Buffers};
use crate::transfer::{Key, Payload, Piece, Proof, Time, Transfer, Want};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// What may be otherwise next time, since bytes were damaged or memory was short: it is tried again,
/// after a while.
const TRANSIENT: [&str; 4] = ["digest-mismatch", "layout-invalid", "no-memory", "unsupported"];

const AT_THE_USERS: [Phase; 2] = [Phase::Ready, Phase::Applying];
const NOT_APPLIED: [Phase; 3] = [Phase::Ready, Phase::Applying, Phase::Staged];

/// A version that has failed and is to be tried again: it is left alone for ever longer (W36).
#[derive(Default)]
struct PutOff {
    key: Key,
    until: Time,
    pause: Duration,
}

impl PutOff {
    /// Puts a version off, for twice as long as the last time.
    fn again(&mut self, key: Key, timing: &Timing, now: Time) {
        let longer = self.pause.saturating_mul(2).min(timing.patience_max);
        self.pause = if key == self.key { longer } else { timing.patience };
        self.until = now.saturating_add(self.pause);
        self.key = key;
    }

    /// A version is not to be had any more: what was before it may be what there is.
    fn no_longer(&mut self, key: Key) {
        if key == self.key {
            self.until = Time::ZERO;
        }
    }
}

/// How a model of a worker stands. Versions are pairs of epoch and number.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct ModelState {
    /// What runs.
    pub running: Option<(u64, u64)>,
    /// What its publisher says of that, by the name that it has now.
    pub metadata: BTreeMap<String, String>,
    /// What arrives, how many of its chunks are here, and of how many.
    pub arriving: Option<((u64, u64), u64, u64)>,
    /// What waits for a commit.
    pub staged: Option<(u64, u64)>,
    /// What waits for `Worker::receive`, or is being applied.
    pub ready: Option<(u64, u64)>,
    /// An apply has failed half-way: none runs.
    pub torn: bool,
}

/// One model of one worker.
pub struct Slot {
    pub model: String,
    /// Versions are read from shared memory: nothing needs to be pushed.
    pub shared: bool,
    /// The greatest of which bytes were written into the model.
    pub epoch: u64,
    pub mode: Mode,
    pub patches: Patches,
    host: Arc<dyn Host>,
    timing: Timing,
    holds: Holdings,
    buffers: Buffers,
    layouts: Layouts,
    failure: Option<Failed>, // the last one, until another version is begun
    torn: u32,               // applies in a row that failed half-way: while there is one, nothing runs
    stale: Key,              // was not to be had from shared memory: fetch it, if it is offered
    asked_at: Option<Time>,  // when the latest announcement was asked for
    answered: Option<Time>,  // when the last ping was sent that was answered
    later: PutOff,           // what has failed, and is to be tried again
    leases: u64,             // ids given out so far
    decoding: usize,         // patches that are being decoded, though their versions may be of no use by now
}

impl Slot {
    pub fn new(model: &str, host: Arc<dyn Host>, bytes_max: u64, timing: Timing) -> Slot {
        Slot {
            model: model.to_owned(),
            shared: false,
            epoch: 0,
            mode: Mode::Following,
            patches: Patches::default(),
            host,
            timing,
            holds: Holdings::default(),
            buffers: Buffers::default(),
            layouts: Layouts::new(bytes_max),
            failure: None,
            torn: 0,
            stale: (0, 0),
            asked_at: None,
            answered: None,
            later: PutOff::default(),
            leases: 0,
            decoding: 0,
        }
    }

    /// From now on only what is sealed is taken.
    pub fn take_sealed(&mut self) {
        self.layouts.sealed = true;
    }

    /// What runs here.
    pub fn running(&self) -> Option<Running> {
        let held = self.holds.at(Phase::Running)?;
        let (epoch, version) = held.key;
        Some(Running { epoch, version, digest: held.digest.clone() })
    }

    /// How the model stands, for a person.
    pub fn state(&self) -> ModelState {
        let key = |phase| self.holds.at(phase).map(|held| held.key);
        let transfer = self.holds.at(Phase::Arriving).and_then(|held| held.transfer.as_ref());
        let metadata = self.holds.at(Phase::Running).map(|held| held.announce.metadata.clone());
        ModelState {
            running: key(Phase::Running),
            metadata: metadata.unwrap_or_default(),
            arriving: transfer.map(|transfer| (transfer.key(), transfer.here as u64, transfer.count())),
            staged: key(Phase::Staged),
            ready: key(Phase::Ready).max(key(Phase::Applying)),
            torn: self.torn > 0,
        }
    }

    // What the publisher says.

    /// A beacon, a welcome or a stray chunk speaks of a version: ask if it is news.
    pub fn hear_of(&mut self, epoch: u64, version: u64, now: Time) -> Vec<Effect> {
        let key = (epoch, version); // W4
        if version == 0 || key <= self.holds.newest() || self.holds.rejected.contains(&key) {
            return Vec::new();
        }
        match self.holds.at(Phase::Arriving) {
            Some(held) if key <= held.key || self.mode == Mode::CatchingUp => Vec::new(), // W26
            _ if self.awaited_layout().map_or(false, |awaited| key <= awaited) => Vec::new(), // W7
            _ if key <= self.later.key && now < self.later.until => Vec::new(),           // W36
            _ => self.ask_latest(epoch, now),
        }
    }

    /// The version that waits for its layout, which was asked for.
    fn awaited_layout(&self) -> Option<Key> {
        let waiting = self.holds.at(Phase::Announced)?;
        Some(waiting.key).filter(|_| waiting.lacks() == Lack::Layout)
    }

    fn ask_latest(&mut self, epoch: u64, now: Time) -> Vec<Effect> {
        if self.asked_at.map_or(false, |at| now.saturating_sub(at) < self.timing.quiet) {
            return Vec::new();
        }
        self.asked_at = Some(now);
        let layout = self.awaited_layout().is_some(); // W7
        vec![self.fetch((epoch, 0), 0, 0, layout)]
    }

    fn fetch(&self, (epoch, version): Key, first: u64, count: u64, layout: bool) -> Effect {
        let model = self.model.clone();
        let (patch, unpatched) = (None, String::new());
        let fetch = Fetch { model, epoch, version, first, count, layout, patch, unpatched };
        Effect::Send(FromWorker::Fetch(fetch))
    }

    /// A version exists; its chunks may follow if the announcement itself was pushed.
    pub fn announced(
        &mut self,
        announce: Announce,
        layout: Option<&[u8]>,
        now: Time,
        pushed: bool,
    ) -> Vec<Effect> {
        let key = (announce.epoch, announce.version);
        if let Some(Err(problem)) = layout.map(|header| self.layouts.learn(&announce, header)) {
            // It may have waited for this.
            self.holds.tell_those(Event::Failed, |held| held.key == key && held.phase() == Phase::Announced);
            return self.fail(key, problem, now);
        }
        let staged = self.holds.at(Phase::Staged).map(|held| held.key); // W5, W14
        if staged == Some(key) && announce.commit == CommitMode::Auto {
            return self.commit();
        }
        if key <= self.holds.newest() || self.holds.rejected.contains(&key) {
            return Vec::new();
        }
        let catching_up = self.mode == Mode::CatchingUp;
        if let Some(arriving) = self.holds.at_mut(Phase::Arriving) {
            if key == arriving.key && same_bytes(&announce, &arriving.announce) {
                arriving.announce = announce; // it may have been committed meanwhile
                return Vec::new();
            }
            if key < arriving.key || (catching_up && key != arriving.key) {
                return Vec::new(); // W8, W26
            }
        }
        let follows = announce.whole.is_some() || (pushed && !self.shared); // W31, S8
        self.holds.expect(announce);
        let mut effects = self.begin(now);
        if let Some(transfer) = self.holds.arriving(key).filter(|_| !follows) {
            transfer.pull();
            effects.extend(self.pull(key, now));
        }
        effects
    }

    /// A version of one chunk, whole: announcement, chunk and end in one message.
    pub fn announced_whole(
        &mut self,
        announce: Announce,
        whole: Whole,
        payload: &[u8],
        now: Time,
    ) -> Vec<Effect> {
        let (epoch, version) = (announce.epoch, announce.version);
        let (model, digest) = (announce.model.clone(), whole.digest);
        let end = OfVersion { model, epoch, version, digest, ..OfVersion::default() };
        let mut effects = self.announced(announce, None, now, true);
        let piece = Piece { key: (epoch, version), patch: None, index: 0 };
        effects.extend(self.chunk(piece, Proof::Crc(whole.crc), Payload::Bytes(payload), now, true));
        effects.extend(self.end(end, now));
        effects
    }

    /// What runs here is a newer version, byte for byte: nothing is to be fetched or applied.
    ///
    /// Not if another version is at the user's, who may be writing it into the model.
    pub fn renamed(&mut self, rename: Rename, now: Time) -> Vec<Effect> {
        let key = (rename.epoch, rename.version); // W25
        let busy = self.holds.all(&AT_THE_USERS).next().is_some();
        let begun = self.holds.at(Phase::Arriving).map_or((0, 0), |held| held.key);
        let same = self.running().as_ref() == Some(&rename.was);
        if !same || busy || key <= self.holds.newest() || key < begun {
            return Vec::new();
        }
        self.holds.tell_those(Event::Newer, |held| held.phase() != Phase::Running);
        let was = (rename.was.epoch, rename.was.version);
        self.holds.rename(key, rename.metadata.clone());
        self.epoch = self.epoch.max(key.0);
        self.failure = None;
        let mut effects =
            vec![Effect::Renamed { model: self.model.clone(), was, key, metadata: rename.metadata }];
        effects.extend(self.say_applied());
        effects.extend(self.turn(Turn::Completed, Some(now)));
        effects
    }

    /// Starts to receive what is announced, if its layout is known.
    fn begin(&mut self, now: Time) -> Vec<Effect> {
        let announce = match self.holds.at(Phase::Announced) {
            Some(held) => held.announce.clone(),
            None => return Vec::new(),
        };
        if let Err(problem) = self.layouts.check(&announce, &*self.host) {
            return self.decline(Phase::Announced, problem, now); // W6
        }
        let key = (announce.epoch, announce.version);
        let layout = match self.layouts.get(&announce) {
            Some(layout) => layout,
            None => {
                self.asked_at = Some(now);
                return vec![self.fetch(key, 0, 0, true)]; // W7
            }
        };
        if let Some(held) = self.holds.at_mut(Phase::Announced) {
            held.layout = Some(layout.clone());
        }
        let segment = self.segment(&announce);
        self.holds.gain(if segment.is_some() { Gain::Located } else { Gain::Known });
        match segment {
            Some(segment) if !must_be_staged(&announce) => self.map(announce, layout, segment, now), // S6
            segment => {
                self.holds.gain(Gain::Opened);
                self.make_room(announce, layout, segment, now)
            }
        }
    }

    /// The shared memory that a version lies in; nothing if it must come over the network.
    fn segment(&self, announce: &Announce) -> Option<Arc<Segment>> {
        let key = (announce.epoch, announce.version);
        let shared = announce.shared.as_ref().filter(|_| key != self.stale)?;
        self.host.open(shared, announce.nbytes)
    }

    /// The version is whole in shared memory: it can be applied from there.
    fn map(
        &mut self,
        announce: Announce,
        layout: Arc<Layout>,
        segment: Arc<Segment>,
        now: Time,
    ) -> Vec<Effect> {
        self.holds.tell(Phase::Arriving, Event::Newer);
        self.holds.tell(Phase::Staged, Event::Newer);
        self.holds.tell(Phase::Announced, Event::Mapped);
        self.forget_failure();
        let hash_chunks = if announce.hash { announce.chunk_bytes } else { 0 }; // S7
        let (model, key) = (self.model.clone(), (announce.epoch, announce.version));
        let source = Source::Segment { segment, hash_chunks };
        let mut effects = self.turn(Turn::Completed, Some(now));
        let (digest, metadata) = (String::new(), announce.metadata);
        let staged = Staged { model, key, layout, source, digest, encoding: "", metadata, keep: false };
        effects.push(Effect::Ready(staged));
        effects
    }

    /// Takes a buffer for what is announced, in place of what arrives.
    fn make_room(
        &mut self,
        announce: Announce,
        layout: Arc<Layout>,
        segment: Option<Arc<Segment>>,
        now: Time,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        if self.holds.tell(Phase::Arriving, Event::Newer) {
            effects.extend(self.turn(Turn::Replaced, None)); // W26
        }
        let mut buffer = self.buffers.take(announce.nbytes);
        if buffer.is_err() && self.holds.forget_base() {
            buffer = self.buffers.take(announce.nbytes); // the next version matters more (D3)
        }
        match buffer {
            Ok(Some(buffer)) => {
                self.holds.gain(Gain::Freed);
                effects.extend(self.receive(announce, layout, buffer, segment, now));
            }
            Ok(None) => self.holds.gain(Gain::Full), // `resume` goes on when one is given back
            Err(_) if self.decoding > 0 => self.holds.gain(Gain::Full), // by the decoder: `decoded` goes on
            Err(error) => {
                let text = format!("no memory for {} bytes ({})", announce.nbytes, error);
                let problem = ("no-memory", text + ": lower bytes_max, or make room");
                effects.extend(self.decline(Phase::Announced, problem, now));
            }
        }
        effects
    }

    /// There is a buffer: take what lies in shared memory, or wait for chunks.
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
            None if !whole => self.transfer(announce, layout, buffer, now),
            _ => Transfer::new(announce, layout, buffer, now, self.timing),
        };
        if let Some(segment) = segment {
            if segment.read(&stamp, |memory| transfer.read(memory)).is_err() {
                transfer.forget(); // it is fetched over the network
            }
        }
        let patch = transfer.patch();
        let first = transfer.announce.patches.first().map(Patch::id);
        let listening = if whole { Vec::new() } else { self.listen(patch.is_some()) };
        let pull = !listening.is_empty() || (patch.is_some() && patch != first);
        if pull {
            transfer.pull(); // D7
        }
        self.holds.tell(Phase::Announced, Event::Begun);
        self.forget_failure();
        let key = transfer.key();
        if let Some(held) = self.holds.at_mut(Phase::Arriving) {
            held.transfer = Some(transfer);
            held.local = local;
        }
        let asking = if pull { self.pull(key, now) } else { Vec::new() };
        listening.into_iter().chain(asking).collect()
    }

    /// What a version arrives by: a patch on what runs here, or it itself.
    fn transfer(&self, announce: Announce, layout: Arc<Layout>, buffer: Buffer, now: Time) -> Transfer {
        let room = |(patch, base): (Patch, Base)| match Buffer::alone(patch.nbytes) {
            Ok(room) => Ok((patch, base, room)),
            Err(error) => Err(format!("no memory for a patch of {} bytes ({})", patch.nbytes, error)),
        };
        match self.patches.choose(&announce, &self.holds).and_then(room) {
            Ok(patch) => Transfer::of_patch(patch, announce, layout, buffer, now, self.timing), // D4
            Err(why) => {
                let mut transfer = Transfer::new(announce, layout, buffer, now, self.timing);
                transfer.why = why.chars().take(LABEL_MAX).collect();
                transfer
            }
        }
    }

    /// Has the next versions pushed in the way in which this one arrives.
    fn listen(&mut self, to_patches: bool) -> Vec<Effect> {
        let before = self.patches.topic(&self.model);
        let other = self.patches.listen(to_patches); // D7
        if !other || self.shared || self.mode == Mode::CatchingUp {
            return Vec::new();
        }
        let topic = self.patches.topic(&self.model);
        vec![Effect::Subscribe { topic: before, on: false }, Effect::Subscribe { topic, on: true }]
    }

    /// A patch is of no use: has all of its version fetched in its place, into this buffer if it was lent.
    fn give_up(&mut self, version: Option<Buffer>, why: &str, now: Time) -> Vec<Effect> {
        let held = match self.holds.at_mut(Phase::Arriving) {
            Some(held) => held,
            None => return Vec::new(),
        };
        let key = held.key;
        held.transfer = held.transfer.take().and_then(|transfer| transfer.give_up(version, why, now)); // D5, D10
        let (model, version) = (&self.model, key.1);
        let text = format!("version {} of {} is fetched as a whole, not patched: {}", version, model, why);
        let mut effects = vec![Effect::Notice { code: "unpatched".to_owned(), text }];
        effects.extend(self.pull(key, now));
        effects
    }

    /// The publisher has no patch (any more) that was asked for.
    pub fn no_patch(&mut self, key: Key, now: Time) -> Vec<Effect> {
        match self.holds.arriving(key) {
            Some(transfer) if transfer.patch().is_some() && !transfer.decoding() => {
                self.give_up(None, "the publisher has no such patch (any more)", now)
                // D8
            }
            _ => Vec::new(),
        }
    }

    /// A patch was decoded, and its version is whole; or all of it is to be fetched.
    pub fn decoded(&mut self, job: Decoding, done: Result<Duration, String>, now: Time) -> Vec<Effect> {
        self.decoding -= 1;
        let transfer = self.holds.arriving(job.key).filter(|transfer| transfer.waits_for(&job));
        match (transfer, done) {
            (Some(transfer), Ok(took)) => {
                transfer.decode_us = took.as_micros() as u64;
                transfer.buffer = job.version;
                transfer.digest = Some(job.digest);
                self.stage(now)
            }
            (Some(_), Err(why)) => self.give_up(Some(job.version), &why, now),
            (None, _) => {
                drop(job); // something newer took its place, or it was aborted: there is a buffer free
                self.resume(now)
            }
        }
    }

    /// A version is on its way: forget why another was not. (That nothing runs is said on.)
    fn forget_failure(&mut self) {
        if self.torn == 0 {
            self.failure = None;
        }
    }

    /// Takes pushed chunks again, and looks for what came meanwhile; or takes them no longer.
    fn turn(&mut self, turn: Turn, now: Option<Time>) -> Vec<Effect> {
        self.mode = match next(MODES, self.mode, turn) {
            Some(mode) => mode,
            None => return Vec::new(),
        };
        let following = self.mode == Mode::Following;
        let topic = self.patches.topic(&self.model);
        let mut effects = vec![Effect::Subscribe { topic, on: following && !self.shared }];
        if let Some(now) = now.filter(|_| following) {
            let (epoch, _) = self.holds.newest();
            effects.extend(self.ask_latest(epoch, now));
        }
        effects
    }

    /// The version in this phase is not taken.
    fn decline(&mut self, phase: Phase, problem: Problem, now: Time) -> Vec<Effect> {
        let key = self.holds.at(phase).map_or((0, 0), |held| held.key);
        let event = if TRANSIENT.contains(&problem.0) { Event::Failed } else { Event::Declined };
        self.holds.tell(phase, event); // W15
        self.fail(key, problem, now)
    }

    fn fail(&mut self, key: Key, (code, text): Problem, now: Time) -> Vec<Effect> {
        if TRANSIENT.contains(&code) {
            self.later.again(key, &self.timing, now);
        }
        let failed = self.note_failure(key, code, &text);
        vec![failed, Effect::Rejected { model: self.model.clone(), key, code, text }]
    }

    fn note_failure(&mut self, (epoch, version): Key, code: &str, text: &str) -> Effect {
        let text = text.chars().take(TEXT_MAX).collect();
        let (model, code, intact) = (self.model.clone(), code.to_owned(), self.torn == 0);
        let failed = Failed { model, epoch, version, code, text, intact };
        self.failure = Some(failed.clone());
        Effect::Send(FromWorker::Failed(failed))
    }

    // What arrives of it.

    /// Lends the place of a chunk whose payload is about to be received; nothing if it has none.
    pub fn place(&mut self, piece: Piece, size: usize, opening: Option<Opening>) -> Option<u64> {
        let transfer = self.holds.arriving(piece.key).filter(|transfer| transfer.is_of(piece.patch))?;
        self.leases += 1;
        transfer.lend(piece.index, size, self.leases, opening).then_some(self.leases)
    }

    /// Whether a version is arriving.
    pub fn arrives(&self, key: Key) -> bool {
        self.holds.at(Phase::Arriving).map_or(false, |held| held.key == key)
    }

    /// What the chunks of this version, or of this patch to it, are sealed as, if that is what arrives.
    pub fn subject(&self, key: Key, patch: Option<&PatchId>) -> Option<Subject> {
        let held = self.holds.at(Phase::Arriving).filter(|held| held.key == key)?;
        let transfer = held.transfer.as_ref().filter(|transfer| transfer.is_of(patch))?;
        Some(transfer.subject())
    }

    /// The transfer to whose place a lease belongs, if it still does.
    pub fn leased(&mut self) -> Option<&mut Transfer> {
        self.holds.at_mut(Phase::Arriving)?.transfer.as_mut()
    }

    /// A piece of a version.
    pub fn chunk(
        &mut self,
        piece: Piece,
        proof: Proof,
        payload: Payload,
        now: Time,
        pushed: bool,
    ) -> Vec<Effect> {
        let key = piece.key;
        let transfer = match self.holds.arriving(key) {
            Some(transfer) if transfer.is_of(piece.patch) => transfer,
            Some(_) => return Vec::new(), // D9
            None => return self.stray(key, now),
        };
        let fresh = transfer.add(piece.index, proof, payload, now, pushed); // W9
        let slow = now.saturating_sub(transfer.reported_at) >= self.timing.report();
        let report = fresh && pushed && (slow || transfer.here % PROGRESS_CHUNKS == 0); // W23
        if report {
            transfer.reported_at = now;
        }
        let mut effects = self.pull(key, now);
        if report {
            effects.extend(self.progress());
        }
        effects.extend(self.completed(key, now));
        effects
    }

    /// All chunks of a version are out.
    pub fn end(&mut self, end: OfVersion, now: Time) -> Vec<Effect> {
        let key = (end.epoch, end.version);
        match self.holds.arriving(key) {
            Some(transfer) if transfer.is_of(end.patch.as_ref()) => transfer.end(end.digest),
            Some(_) => return Vec::new(), // D9
            None => return self.stray(key, now),
        }
        let mut effects = self.pull(key, now);
        effects.extend(self.completed(key, now));
        effects
    }

    /// A ping that was sent then was answered, and so was whatever was asked before it (W12).
    pub fn answered(&mut self, sent_at: Time) {
        self.answered = Some(sent_at);
        if let Some(transfer) = self.leased() {
            transfer.answered(sent_at);
        }
    }

    fn stray(&mut self, (epoch, version): Key, now: Time) -> Vec<Effect> {
        match self.holds.at(Phase::Announced) {
            Some(_) => Vec::new(), // its layout was asked for
            None => self.hear_of(epoch, version, now),
        }
    }

    fn pull(&mut self, key: Key, now: Time) -> Vec<Effect> {
        let transfer = match self.holds.arriving(key) {
            Some(transfer) => transfer,
            None => return Vec::new(),
        };
        let wants = transfer.wants(now);
        let (patch, why, model) = (transfer.patch(), transfer.why.clone(), self.model.clone());
        let fetch = |want| {
            let (first, count) = match want {
                Want::End => (0, 0),
                Want::Chunks { first, count } => (first, count),
            };
            let (epoch, version) = key;
            let (model, patch, unpatched) = (model.clone(), patch.clone(), why.clone()); // D10
            let fetch = Fetch { model, epoch, version, first, count, layout: false, patch, unpatched };
            Effect::Send(FromWorker::Fetch(fetch))
        };
        wants.into_iter().map(fetch).collect()
    }

    /// If the version is whole: verifies it, then stages it.
    fn completed(&mut self, key: Key, now: Time) -> Vec<Effect> {
        let transfer = match self.holds.arriving(key).filter(|transfer| transfer.complete()) {
            Some(transfer) => transfer,
            None => return Vec::new(),
        };
        if transfer.patch().is_some() {
            let job = transfer.decode();
            self.decoding += usize::from(job.is_some());
            return job.map(Effect::Decode).into_iter().collect(); // D5
        }
        if transfer.verify() {
            return self.stage(now);
        }
        let restarts = transfer.restarts;
        if restarts < RESTARTS_MAX {
            return Vec::new(); // the next tick fetches it anew: W13
        }
        let text = format!("the whole did not match its digest, {} times", restarts);
        self.decline(Phase::Arriving, ("digest-mismatch", text), now)
    }

    /// What arrives is whole and sound: stage it, and commit it unless that waits for others.
    fn stage(&mut self, now: Time) -> Vec<Effect> {
        self.holds.tell(Phase::Staged, Event::Newer);
        let mut together = false;
        if let Some(held) = self.holds.at_mut(Phase::Arriving) {
            together = held.announce.commit == CommitMode::Together;
            if let Some(transfer) = held.transfer.take() {
                held.patch = transfer.patch();
                held.decode_us = transfer.decode_us;
                let Transfer { layout, buffer, digest, .. } = transfer;
                held.digest = digest.unwrap_or_default();
                held.staged = Some(Staged {
                    model: self.model.clone(),
                    key: held.key,
                    layout,
                    source: Source::Buffer(buffer),
                    digest: held.digest.clone(),
                    encoding: match held.patch {
                        Some(_) => DELTA,
                        None if held.local => "",
                        None => "raw",
                    },
                    metadata: held.announce.metadata.clone(),
                    keep: held.announce.keep && self.patches.taken && !held.local, // D3
                });
            }
        }
        self.holds.tell(Phase::Arriving, Event::Whole);
        let mut effects = self.say_staged(&[Phase::Staged]);
        if !together {
            effects.extend(self.commit());
        }
        effects.extend(self.turn(Turn::Completed, Some(now)));
        effects
    }

    /// What is staged may be applied.
    fn commit(&mut self) -> Vec<Effect> {
        let staged = self.holds.at_mut(Phase::Staged).and_then(|held| held.staged.take());
        self.holds.tell(Phase::Staged, Event::Committed);
        staged.map(Effect::Ready).into_iter().collect()
    }

    /// The version that is staged here may be applied.
    pub fn committed(&mut self, commit: &OfVersion) -> Vec<Effect> {
        let key = (commit.epoch, commit.version);
        match self.holds.at(Phase::Staged) {
            Some(held) if held.key == key && held.digest == commit.digest => self.commit(), // W14
            _ => Vec::new(),
        }
    }

    /// The version must not be applied: drop what there is of it.
    pub fn aborted(&mut self, abort: &Abort, now: Time) -> Vec<Effect> {
        let key = (abort.epoch, abort.version);
        self.holds.tell_those(Event::Aborted, |held| held.key == key); // W14
        self.later.no_longer(key);
        let effects = self.resume(now);
        let idle = effects.is_empty() && self.holds.at(Phase::Arriving).is_none();
        if idle && self.mode == Mode::CatchingUp {
            return self.ask_latest(abort.epoch, now); // W26
        }
        effects
    }

    /// The publisher no longer has a version; 0: it has none.
    pub fn gone(&mut self, epoch: u64, version: u64, now: Time) -> Vec<Effect> {
        let arriving = self.holds.at(Phase::Arriving).map(|held| held.key);
        self.later.no_longer((epoch, version));
        self.holds.tell_those(Event::Gone, |held| {
            let named = version == held.key.1 || (version == 0 && held.phase() == Phase::Announced);
            named && (epoch == 0 || epoch == held.key.0) // not a late word of an older publisher
        });
        match arriving {
            Some((epoch, _)) if self.holds.at(Phase::Arriving).is_none() => {
                let effects = self.resume(now); // W27
                if effects.is_empty() {
                    self.ask_latest(epoch, now)
                } else {
                    effects
                }
            }
            _ => Vec::new(),
        }
    }

    // The session.

    /// Versions will come over the network, probably of this size: have a buffer for them.
    pub fn expect(&mut self, nbytes: u64) {
        if !self.shared && nbytes <= self.layouts.bytes_max {
            self.buffers.reserve(nbytes);
        }
    }

    /// The publisher has let this worker in (again), and has this version for it.
    pub fn reconnected(&mut self, epoch: u64, version: u64, now: Time) -> Vec<Effect> {
        self.holds.tell_those(Event::Fenced, |held| held.phase() == Phase::Announced || held.key.0 != epoch); // W28
        if let Some(transfer) = self.leased() {
            transfer.reconnected(now);
        }
        self.holds.rejected.clear();
        self.torn = self.torn.min(1); // it may be tried as often as at first
        self.asked_at = None;
        let mut effects = self.say_staged(&NOT_APPLIED);
        effects.extend(self.hear_of(epoch, version, now));
        effects
    }

    // What the user does with a version that is ready.

    /// Somebody has begun to apply a version.
    pub fn taken(&mut self, key: Key) {
        self.holds.tell_those(Event::Taken, |held| held.key == key);
    }

    /// Somebody could not apply a version just now.
    pub fn put_back(&mut self, key: Key) {
        self.holds.tell_those(Event::PutBack, |held| held.key == key);
    }

    /// A version was applied: it runs here. Its digest, if it was hashed only then; and where its bytes are, if
    /// patches may build on them.
    pub fn applied(&mut self, key: Key, digest: &str, base: Option<Base>, now: Time) -> Vec<Effect> {
        if !self.holds.tell_those(Event::Applied, |held| held.key == key) {
            return Vec::new();
        }
        self.holds.tell_those(Event::Newer, |held| held.phase() == Phase::Running && held.key != key);
        let arriving = self.holds.at(Phase::Arriving).and_then(|held| held.transfer.as_ref());
        let needs = arriving.and_then(Transfer::builds_on);
        let decoding = arriving.map_or(false, Transfer::decoding);
        let (kept, gone) = (matches!(needs, Some(Bytes::Kept(_))), matches!(needs, Some(Bytes::Model(_))));
        if let Some(held) = self.holds.at_mut(Phase::Running) {
            if !digest.is_empty() {
                held.digest = digest.to_owned();
            }
            let another = kept || decoding; // one at a time (D3)
            held.base = base.filter(|base| !another || matches!(base.bytes, Bytes::Model(_)));
        }
        self.torn = 0;
        self.epoch = self.epoch.max(key.0);
        self.failure = self.failure.take().filter(|failed| (failed.epoch, failed.version) > key);
        let mut effects: Vec<Effect> = self.say_applied().into_iter().collect();
        if gone {
            effects.extend(self.give_up(None, "another version runs by now, in the place of its base", now));
        }
        effects.extend(self.resume(now));
        effects
    }

    /// A version could not be applied. If the model is `intact`, what ran before still runs.
    pub fn failed(&mut self, key: Key, text: &str, intact: bool, now: Time) -> Vec<Effect> {
        let again = !intact && self.torn + 1 < APPLIES_MAX;
        let event = if again { Event::Torn } else { Event::Declined };
        if !self.holds.tell_those(event, |held| held.key == key && held.phase() == Phase::Applying) {
            return Vec::new();
        }
        if !intact {
            self.holds.tell(Phase::Running, Event::Torn); // W24
            self.stale = key; // what is tried next comes verified
            self.torn += 1;
            self.epoch = self.epoch.max(key.0);
        }
        let mut effects = vec![self.note_failure(key, "apply", text)];
        effects.extend(self.resume(now));
        effects
    }

    /// A version was gone from shared memory before it could be copied: ask for the latest.
    pub fn gone_stale(&mut self, key: Key, now: Time) -> Vec<Effect> {
        if !self.holds.tell_those(Event::Stale, |held| held.key == key) {
            return Vec::new();
        }
        self.stale = key; // S5
        self.asked_at = None;
        self.ask_latest(key.0, now)
    }

    /// A version was replaced by a newer one before anybody applied it.
    pub fn dropped(&mut self, key: Key, now: Time) -> Vec<Effect> {
        let replaced = |held: &Held| held.key == key && AT_THE_USERS.contains(&held.phase());
        if self.holds.tell_those(Event::Newer, replaced) {
            self.resume(now)
        } else {
            Vec::new()
        }
    }

    /// A buffer is free: begin what waited for it.
    fn resume(&mut self, now: Time) -> Vec<Effect> {
        if self.holds.at(Phase::Arriving).is_some() {
            return Vec::new();
        }
        let newest = self.holds.newest();
        self.holds.tell_those(Event::Newer, |held| held.phase() == Phase::Announced && held.key <= newest);
        let waiting = self.holds.at(Phase::Announced).filter(|held| held.lacks() == Lack::Buffer);
        match waiting.map(|held| (held.announce.clone(), held.layout.clone())) {
            Some((announce, Some(layout))) => {
                let segment = self.segment(&announce);
                self.make_room(announce, layout, segment, now)
            }
            _ => Vec::new(),
        }
    }

    // Time.

    /// Fetches what is due.
    pub fn tick(&mut self, now: Time) -> Vec<Effect> {
        let hopeless = self.leased().filter(|transfer| transfer.hopeless());
        if let Some(patched) = hopeless.map(|transfer| transfer.patch().is_some()) {
            let why = "nothing comes that fits what was announced".to_owned(); // W12
            return match patched {
                true => self.give_up(None, "nothing more of it comes", now),
                false => self.decline(Phase::Arriving, ("digest-mismatch", why), now),
            };
        }
        if let Some(key) = self.holds.at(Phase::Arriving).map(|held| held.key) {
            let mut effects = self.pull(key, now);
            effects.extend(self.completed(key, now));
            return effects;
        }
        if self.awaited_layout().is_none() {
            return self.resume(now);
        }
        let passed = self.answered > self.asked_at; // W7: else it may be on its way
        let patience = if passed { self.timing.patience } else { self.timing.patience_max };
        if self.asked_at.map_or(true, |at| now.saturating_sub(at) >= patience) {
            return self.begin(now);
        }
        Vec::new()
    }

    /// Says again how things stand, in case it got lost.
    pub fn repeat(&self) -> Vec<Effect> {
        let applying = self.holds.at(Phase::Applying); // W17; it may hang, others become ready behind it
        let newest = self.holds.all(&[Phase::Ready]).max_by_key(|held| held.key);
        let arriving = if applying.is_none() { self.progress() } else { None };
        let idle = arriving.is_none();
        let mut effects: Vec<Effect> = arriving.into_iter().collect();
        effects.extend(self.say_staged(&NOT_APPLIED));
        effects.extend(self.say_applied());
        effects.extend(self.failure.clone().map(|failed| Effect::Send(FromWorker::Failed(failed))));
        if let Some(held) = applying.or(newest).filter(|_| idle) {
            let phase = if applying.is_some() { Doing::Applying } else { Doing::Staged };
            effects.push(self.say_progress(held.key, 0, phase, None));
        }
        effects
    }

    fn progress(&self) -> Option<Effect> {
        let transfer = self.holds.at(Phase::Arriving)?.transfer.as_ref()?;
        Some(self.say_progress(transfer.key(), transfer.here as u64, Doing::Receiving, transfer.patch()))
    }

    fn say_progress(
        &self,
        (epoch, version): Key,
        chunks: u64,
        phase: Doing,
        patch: Option<PatchId>,
    ) -> Effect {
        let (model, waits) = (self.model.clone(), String::new());
        Effect::Send(FromWorker::Progress(Progress { model, epoch, version, chunks, phase, patch, waits }))
    }

    /// `staged` of every version in these phases of which it is due.
    fn say_staged(&self, phases: &[Phase]) -> Vec<Effect> {
        let due = self.holds.all(phases).filter(|held| must_be_staged(&held.announce));
        due.map(|held| Effect::Send(FromWorker::Staged(self.of_version(held)))).collect()
    }

    fn say_applied(&self) -> Option<Effect> {
        let held = self.holds.at(Phase::Running)?;
        let said = OfVersion { decode_us: held.decode_us, ..self.of_version(held) }; // D11
        Some(Effect::Send(FromWorker::Applied(said)))
    }

    fn of_version(&self, held: &Held) -> OfVersion {
        let (epoch, version) = held.key;
        let (model, digest, patch) = (self.model.clone(), held.digest.clone(), held.patch.clone());
        OfVersion { model, epoch, version, digest, patch, decode_us: 0 }
    }
}
