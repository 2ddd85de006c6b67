//! One model of a worker: what it runs, what is arriving, and what waits to be applied.
//!
//! ```text
//! idle ──announce──> arriving ──all chunks, digest──> staged ──commit──> ready ──applied──> idle
//!                       │                               │                  │
//!                       └── newer announced ────────────┴── abort, newer   └── failed
//! ```
//!
//! `auto` versions are ready as soon as they are staged. The latest version wins: a newer
//! announcement replaces the transfer under way. But a worker that was replaced once finishes the
//! next one, by fetching, before it looks at anything newer; otherwise one that is slower than the
//! trainer would never complete any.

use crate::effects::{Effect, Host, Source, Staged};
use crate::layout::Layout;
use crate::limits::*;
use crate::messages::*;
use crate::segment::{Segment, Stamp};
use crate::staging::{Buffer, Buffers};
use crate::transfer::{Key, Payload, Time, Transfer, Want};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Codes of failures after which the next beacon leads to another attempt, since bytes were damaged
/// or memory was short.
const TRANSIENT: [&str; 4] = ["digest-mismatch", "layout-invalid", "no-memory", "unsupported"];

/// Why a version is not taken: a code and a text.
type Problem = (&'static str, String);

/// A layout that was received, and whether the model here can take it.
struct KnownLayout {
    layout: Arc<Layout>,
    accepted: bool,
}

/// What is remembered of a version while the user has it.
struct Out {
    digest: String,
    say_staged: bool,
}

/// A version that is held until it is committed.
struct Undecided {
    key: Key,
    layout: Arc<Layout>,
    buffer: Buffer,
    digest: String,
}

/// One model of one worker.
pub struct Slot {
    pub model: String,
    /// What runs here.
    pub running: Option<Running>,
    /// Finishing one version, whatever is announced.
    pub catching_up: bool,
    /// Versions are read from shared memory: nothing needs to be pushed.
    pub shared: bool,
    host: Arc<dyn Host>,
    bytes_max: u64,
    timing: Timing,
    arriving: Option<Transfer>,
    undecided: Option<Undecided>,
    ready: BTreeMap<Key, Out>, // given out to be applied
    buffers: Buffers,
    layouts: VecDeque<KnownLayout>,
    waiting: Option<Announce>, // newer, but its layout or a buffer is missing
    // Could not be taken; not tried again. An older one still may be: what was rejected may have
    // been aborted, or meant for few, and the latest for all be one that was missed.
    rejected: VecDeque<Key>,
    failure: Option<Failed>, // the last one, until another version is begun
    taken: Key,              // is being applied
    stale: Key,              // was not to be had from shared memory: fetch it, if it is offered
    asked_at: Option<Time>,  // when the latest announcement was asked for
    leases: u64,             // ids given out so far
}

impl Slot {
    pub fn new(model: &str, host: Arc<dyn Host>, bytes_max: u64, timing: Timing) -> Slot {
        Slot {
            model: model.to_owned(),
            running: None,
            catching_up: false,
            shared: false,
            host,
            bytes_max,
            timing,
            arriving: None,
            undecided: None,
            ready: BTreeMap::new(),
            buffers: Buffers::default(),
            layouts: VecDeque::new(),
            waiting: None,
            rejected: VecDeque::new(),
            failure: None,
            taken: (0, 0),
            stale: (0, 0),
            asked_at: None,
            leases: 0,
        }
    }

    /// The newest version that needs no announcement any more.
    fn newest(&self) -> Key {
        let running = self.running.as_ref().map(|running| (running.epoch, running.version));
        let undecided = self.undecided.as_ref().map(|staged| staged.key);
        let ready = self.ready.keys().next_back().copied();
        running.max(undecided).max(ready).unwrap_or((0, 0))
    }

    fn arriving_key(&self) -> Option<Key> {
        self.arriving.as_ref().map(Transfer::key)
    }

    // What the publisher says.

    /// A beacon, a welcome or a stray chunk speaks of a version: ask if it is news.
    pub fn hear_of(&mut self, epoch: u64, version: u64, now: Time) -> Vec<Effect> {
        let key = (epoch, version);
        let known = self.newest().max(self.arriving_key().unwrap_or((0, 0)));
        if version == 0 || key <= known || self.catching_up || self.rejected.contains(&key) {
            return Vec::new();
        }
        self.ask_latest(epoch, now)
    }

    fn ask_latest(&mut self, epoch: u64, now: Time) -> Vec<Effect> {
        if self.asked_at.map_or(false, |at| now.saturating_sub(at) < self.timing.quiet) {
            return Vec::new();
        }
        self.asked_at = Some(now);
        let layout = match &self.waiting {
            Some(waiting) => self.layout(&waiting.layout).is_none(),
            None => false,
        };
        vec![self.fetch((epoch, 0), 0, 0, layout)]
    }

    fn fetch(&self, (epoch, version): Key, first: u64, count: u64, layout: bool) -> Effect {
        let model = self.model.clone();
        Effect::Send(FromWorker::Fetch(Fetch { model, epoch, version, first, count, layout }))
    }

    fn layout(&self, id: &str) -> Option<Arc<Layout>> {
        self.layouts.iter().find(|known| known.layout.id == id).map(|known| known.layout.clone())
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
        if let Some(header) = layout {
            if let Err(text) = self.learn(&announce, header) {
                return self.reject(&announce, "layout-invalid", text);
            }
        }
        let committed = announce.commit == CommitMode::Auto;
        if committed && self.undecided.as_ref().map(|staged| staged.key) == Some(key) {
            return self.commit();
        }
        if key <= self.newest() || self.rejected.contains(&key) {
            return Vec::new();
        }
        if let Some(arriving) = &mut self.arriving {
            if key < arriving.key() || (self.catching_up && key != arriving.key()) {
                return Vec::new();
            }
            if key == arriving.key() && same_bytes(&announce, &arriving.announce) {
                arriving.announce = announce; // it may have been committed meanwhile
                return Vec::new();
            }
        }
        let follows = announce.whole.is_some() || (pushed && !self.shared);
        let mut effects = self.begin(announce, now);
        if !follows {
            if let Some(arriving) = &mut self.arriving {
                arriving.pull();
            }
            effects.extend(self.pull(now));
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
        let chunk = Chunk { model: announce.model.clone(), epoch, version, index: 0, crc: whole.crc };
        let end = OfVersion { model: announce.model.clone(), epoch, version, digest: whole.digest };
        let mut effects = self.announced(announce, None, now, true);
        effects.extend(self.chunk(&chunk, Payload::Bytes(payload), now, true));
        effects.extend(self.end(end, now));
        effects
    }

    /// Remembers a layout, or says what is wrong with it.
    fn learn(&mut self, announce: &Announce, header: &[u8]) -> Result<(), String> {
        if header.len() as u64 != announce.layout_bytes {
            return Err(format!(
                "the layout has {} bytes, announced were {}",
                header.len(),
                announce.layout_bytes
            ));
        }
        let layout = Layout::parse(header).map_err(|error| error.to_string())?;
        if layout.id != announce.layout {
            return Err(format!("the layout hashes to {}, announced was {}", layout.id, announce.layout));
        }
        if self.layout(&layout.id).is_none() {
            self.layouts.truncate(LAYOUTS_KEPT - 1);
            self.layouts.push_front(KnownLayout { layout: Arc::new(layout), accepted: false });
        }
        Ok(())
    }

    /// Starts to receive a version, replacing an older one that is still arriving.
    fn begin(&mut self, announce: Announce, now: Time) -> Vec<Effect> {
        let key = (announce.epoch, announce.version);
        let layout = self.layout(&announce.layout);
        let problem = self.unsupported(&announce).or_else(|| self.mismatch(&announce, layout.as_deref()));
        if let Some((code, text)) = problem {
            return self.reject(&announce, code, text);
        }
        let layout = match layout {
            Some(layout) => layout,
            None => {
                self.waiting = Some(announce);
                self.asked_at = Some(now);
                return vec![self.fetch(key, 0, 0, true)];
            }
        };
        let shared = announce.shared.as_ref().filter(|_| key != self.stale);
        let segment = shared.and_then(|shared| self.host.open(shared, announce.nbytes));
        match segment {
            Some(segment) if !must_be_staged(&announce) => {
                let mut effects = self.drop_arriving(now);
                effects.push(self.point(&announce, layout, segment));
                effects
            }
            segment => self.receive(announce, layout, segment, now),
        }
    }

    /// The version is whole in shared memory: it can be applied from there.
    fn point(&mut self, announce: &Announce, layout: Arc<Layout>, segment: Arc<Segment>) -> Effect {
        self.waiting = None;
        self.failure = None;
        self.undecided = None;
        let key = (announce.epoch, announce.version);
        self.ready.insert(key, Out { digest: String::new(), say_staged: false });
        let hash_chunks = if announce.hash { announce.chunk_bytes } else { 0 };
        let source = Source::Segment { segment, hash_chunks };
        Effect::Ready(Staged { model: self.model.clone(), key, layout, source, digest: String::new() })
    }

    /// Takes a buffer, and receives the version there; from shared memory, if it is open.
    fn receive(
        &mut self,
        announce: Announce,
        layout: Arc<Layout>,
        segment: Option<Arc<Segment>>,
        now: Time,
    ) -> Vec<Effect> {
        let mut effects = self.abandon();
        let buffer = match self.buffers.take(announce.nbytes) {
            Ok(Some(buffer)) => buffer,
            Ok(None) => {
                self.waiting = Some(announce); // `resume` begins when one is given back
                return effects;
            }
            Err(error) => {
                let nbytes = announce.nbytes;
                let text =
                    format!("no memory for {} bytes ({}): lower bytes_max, or make room", nbytes, error);
                effects.extend(self.reject(&announce, "no-memory", text));
                effects.extend(self.caught_up(announce.epoch, now));
                return effects;
            }
        };
        self.waiting = None;
        self.failure = None;
        let stamp = Stamp::new(&self.model, announce.epoch, announce.version);
        let mut transfer = Transfer::new(announce, layout, buffer, now, self.timing);
        if let Some(segment) = segment {
            if segment.read(&stamp, |memory| transfer.read(memory)).is_err() {
                transfer.forget(); // it is fetched over the network
            }
        }
        self.arriving = Some(transfer);
        effects
    }

    /// A newer version replaces the one arriving; the next is finished, whatever comes.
    fn abandon(&mut self) -> Vec<Effect> {
        if self.arriving.take().is_none() || self.catching_up {
            return Vec::new();
        }
        self.catching_up = true;
        if self.shared {
            return Vec::new();
        }
        vec![Effect::Subscribe { topic: data_topic(&self.model), on: false }]
    }

    fn unsupported(&self, announce: &Announce) -> Option<Problem> {
        let nbytes = announce.nbytes;
        if announce.encoding != "raw" || announce.encryption.is_some() {
            let text = format!(
                "encoding {:?}, encryption {:?}; this worker takes \"raw\" without encryption",
                announce.encoding, announce.encryption
            );
            return Some(("unsupported", text));
        }
        if nbytes > self.bytes_max {
            let text = format!(
                "{} bytes; this worker takes at most {}: raise its bytes_max if that is meant",
                nbytes, self.bytes_max
            );
            return Some(("too-large", text));
        }
        if nbytes > CHUNKS_MAX * announce.chunk_bytes {
            let text = format!(
                "{} bytes in chunks of {} are more than {} chunks",
                nbytes, announce.chunk_bytes, CHUNKS_MAX
            );
            return Some(("too-many-chunks", text));
        }
        None
    }

    fn mismatch(&mut self, announce: &Announce, layout: Option<&Layout>) -> Option<Problem> {
        let layout = layout?;
        if layout.nbytes != announce.nbytes {
            let text = format!("announced are {} bytes, the layout holds {}", announce.nbytes, layout.nbytes);
            return Some(("layout-invalid", text));
        }
        let known = self.layouts.iter_mut().find(|known| known.layout.id == layout.id)?;
        if known.accepted {
            return None;
        }
        let fault = self.host.fault(&self.model, layout);
        known.accepted = fault.is_none();
        fault.map(|text| ("layout-mismatch", text))
    }

    fn reject(&mut self, announce: &Announce, code: &'static str, text: String) -> Vec<Effect> {
        let key = (announce.epoch, announce.version);
        if !TRANSIENT.contains(&code) {
            self.remember_rejected(key);
        }
        self.waiting = None;
        let failed = self.fail(key, code, &text);
        vec![failed, Effect::Rejected { model: self.model.clone(), key, code, text }]
    }

    fn remember_rejected(&mut self, key: Key) {
        self.rejected.truncate(REJECTED_KEPT - 1);
        self.rejected.push_front(key);
    }

    fn fail(&mut self, (epoch, version): Key, code: &str, text: &str) -> Effect {
        let failed = Failed {
            model: self.model.clone(),
            epoch,
            version,
            code: code.to_owned(),
            text: text.chars().take(TEXT_MAX).collect(),
        };
        self.failure = Some(failed.clone());
        Effect::Send(FromWorker::Failed(failed))
    }

    /// Lends the place of a chunk whose payload is about to be received; nothing if it has none.
    pub fn place(&mut self, chunk: &Chunk, size: usize) -> Option<u64> {
        let key = (chunk.epoch, chunk.version);
        let transfer = self.arriving.as_mut().filter(|transfer| transfer.key() == key)?;
        self.leases += 1;
        transfer.lend(chunk.index, size, self.leases).then_some(self.leases)
    }

    /// The transfer to whose place a lease belongs, if it still does.
    pub fn leased(&mut self) -> Option<&mut Transfer> {
        self.arriving.as_mut()
    }

    /// A piece of a version.
    pub fn chunk(&mut self, chunk: &Chunk, payload: Payload, now: Time, pushed: bool) -> Vec<Effect> {
        let key = (chunk.epoch, chunk.version);
        let transfer = match self.arriving.as_mut().filter(|transfer| transfer.key() == key) {
            Some(transfer) => transfer,
            None => return self.stray(key, now),
        };
        let fresh = transfer.add(chunk.index, chunk.crc, payload, now, pushed);
        let report = fresh && pushed && transfer.here % PROGRESS_CHUNKS == 0;
        let mut effects = self.pull(now);
        if report {
            effects.extend(self.progress());
        }
        effects.extend(self.completed(now));
        effects
    }

    /// All chunks of a version are out.
    pub fn end(&mut self, end: OfVersion, now: Time) -> Vec<Effect> {
        let key = (end.epoch, end.version);
        match self.arriving.as_mut().filter(|transfer| transfer.key() == key) {
            Some(transfer) => transfer.end(end.digest),
            None => return self.stray(key, now),
        }
        let mut effects = self.pull(now);
        effects.extend(self.completed(now));
        effects
    }

    fn stray(&mut self, (epoch, version): Key, now: Time) -> Vec<Effect> {
        if self.waiting.is_some() {
            return Vec::new();
        }
        self.hear_of(epoch, version, now)
    }

    fn pull(&mut self, now: Time) -> Vec<Effect> {
        let transfer = match &mut self.arriving {
            Some(transfer) => transfer,
            None => return Vec::new(),
        };
        let key = transfer.key();
        let wants = transfer.wants(now).into_iter();
        wants
            .map(|want| match want {
                Want::End => self.fetch(key, 0, 0, false),
                Want::Chunks { first, count } => self.fetch(key, first, count, false),
            })
            .collect()
    }

    fn progress(&self) -> Option<Effect> {
        let transfer = self.arriving.as_ref()?;
        Some(self.say_progress(transfer.key(), transfer.here as u64, Phase::Receiving))
    }

    fn say_progress(&self, (epoch, version): Key, chunks: u64, phase: Phase) -> Effect {
        let model = self.model.clone();
        Effect::Send(FromWorker::Progress(Progress { model, epoch, version, chunks, phase }))
    }

    /// If the version is whole: verifies it, then stages it.
    fn completed(&mut self, now: Time) -> Vec<Effect> {
        let mut transfer = match self.arriving.take() {
            Some(transfer) if transfer.complete() => transfer,
            incomplete => {
                self.arriving = incomplete;
                return Vec::new();
            }
        };
        let epoch = transfer.announce.epoch;
        if transfer.verify() {
            let mut effects = self.stage(transfer);
            effects.extend(self.caught_up(epoch, now));
            return effects;
        }
        if transfer.restarts < RESTARTS_MAX {
            self.arriving = Some(transfer); // the next tick fetches it anew
            return Vec::new();
        }
        let text = format!("the whole did not match its digest, {} times", transfer.restarts);
        let mut effects = self.reject(&transfer.announce, "digest-mismatch", text);
        drop(transfer); // its buffer may serve what follows
        effects.extend(self.caught_up(epoch, now));
        effects
    }

    fn stage(&mut self, transfer: Transfer) -> Vec<Effect> {
        let key = transfer.key();
        let Transfer { announce, layout, buffer, digest, .. } = transfer;
        let digest = digest.unwrap_or_default();
        let mut effects = Vec::new();
        let say_staged = must_be_staged(&announce);
        if say_staged {
            effects.push(self.say_staged(key, &digest));
        }
        self.undecided = None;
        if announce.commit == CommitMode::Together {
            self.undecided = Some(Undecided { key, layout, buffer, digest });
        } else {
            self.ready.insert(key, Out { digest: digest.clone(), say_staged });
            let source = Source::Buffer(buffer);
            effects.push(Effect::Ready(Staged { model: self.model.clone(), key, layout, source, digest }));
        }
        effects
    }

    /// The version that waits for its commit is committed.
    fn commit(&mut self) -> Vec<Effect> {
        let Undecided { key, layout, buffer, digest } = match self.undecided.take() {
            Some(undecided) => undecided,
            None => return Vec::new(),
        };
        self.ready.insert(key, Out { digest: digest.clone(), say_staged: true });
        let source = Source::Buffer(buffer);
        vec![Effect::Ready(Staged { model: self.model.clone(), key, layout, source, digest })]
    }

    /// A transfer is over: take pushed chunks again, and look for what came meanwhile.
    fn caught_up(&mut self, epoch: u64, now: Time) -> Vec<Effect> {
        if !self.catching_up {
            return Vec::new();
        }
        self.catching_up = false;
        let mut effects = vec![Effect::Subscribe { topic: data_topic(&self.model), on: !self.shared }];
        effects.extend(self.ask_latest(epoch, now));
        effects
    }

    /// The version that is staged here may be applied.
    pub fn committed(&mut self, commit: &OfVersion) -> Vec<Effect> {
        let key = (commit.epoch, commit.version);
        match &self.undecided {
            Some(staged) if staged.key == key && staged.digest == commit.digest => self.commit(),
            _ => Vec::new(),
        }
    }

    /// The version must not be applied: drop what there is of it.
    pub fn aborted(&mut self, abort: &Abort, now: Time) -> Vec<Effect> {
        let key = (abort.epoch, abort.version);
        let mut effects = Vec::new();
        if self.undecided.as_ref().map(|staged| staged.key) == Some(key) {
            self.undecided = None;
            effects.extend(self.resume(now)); // a buffer is free
        }
        if self.arriving_key() == Some(key) {
            effects.extend(self.drop_arriving(now));
        }
        effects
    }

    /// The publisher no longer has a version.
    pub fn gone(&mut self, epoch: u64, version: u64, now: Time) -> Vec<Effect> {
        let arriving = self.arriving_key();
        if arriving.map_or(false, |key| epoch != 0 && epoch != key.0) {
            return Vec::new(); // a late word of an older publisher
        }
        if self.waiting.as_ref().map_or(false, |waiting| version == 0 || version == waiting.version) {
            self.waiting = None;
        }
        match arriving {
            Some(key) if key.1 == version => {
                let mut effects = self.drop_arriving(now);
                effects.extend(self.ask_latest(key.0, now));
                effects
            }
            _ => Vec::new(),
        }
    }

    fn drop_arriving(&mut self, now: Time) -> Vec<Effect> {
        match self.arriving.take() {
            Some(transfer) => {
                self.waiting = None;
                self.caught_up(transfer.announce.epoch, now)
            }
            None => Vec::new(),
        }
    }

    /// Versions will come over the network, probably of this size: have a buffer for them.
    pub fn expect(&mut self, nbytes: u64) {
        if !self.shared && nbytes <= self.bytes_max {
            self.buffers.reserve(nbytes);
        }
    }

    /// The publisher has let this worker in (again), and has this version for it.
    pub fn reconnected(&mut self, epoch: u64, version: u64, now: Time) -> Vec<Effect> {
        if self.undecided.as_ref().map_or(false, |staged| staged.key.0 != epoch) {
            self.undecided = None;
        }
        self.waiting = None;
        self.rejected.clear();
        let mut effects = Vec::new();
        match &mut self.arriving {
            Some(transfer) if transfer.key().0 == epoch => transfer.reconnected(now),
            _ => effects.extend(self.drop_arriving(now)),
        }
        self.asked_at = None;
        effects.extend(self.staged_again());
        effects.extend(self.hear_of(epoch, version, now));
        effects
    }

    /// `staged` of every version that is held and not yet applied, where it is due.
    fn staged_again(&self) -> Vec<Effect> {
        let ready = self.ready.iter().filter(|(_, out)| out.say_staged);
        let ready = ready.map(|(key, out)| self.say_staged(*key, &out.digest));
        let undecided = self.undecided.iter().map(|staged| self.say_staged(staged.key, &staged.digest));
        ready.chain(undecided).collect()
    }

    fn say_staged(&self, key: Key, digest: &str) -> Effect {
        Effect::Send(FromWorker::Staged(self.of_version(key, digest)))
    }

    fn of_version(&self, (epoch, version): Key, digest: &str) -> OfVersion {
        OfVersion { model: self.model.clone(), epoch, version, digest: digest.to_owned() }
    }

    // What the user does with a version that is ready.

    /// Somebody has begun to apply a version.
    pub fn taken(&mut self, key: Key) {
        self.taken = key;
    }

    /// A version was applied: it runs here. Its digest, if it was hashed only then.
    pub fn applied(&mut self, key: Key, digest: &str, now: Time) -> Vec<Effect> {
        let out = match self.ready.remove(&key) {
            Some(out) => out,
            None => return Vec::new(),
        };
        let digest = if digest.is_empty() { out.digest } else { digest.to_owned() };
        let mut effects = vec![Effect::Send(FromWorker::Applied(self.of_version(key, &digest)))];
        self.running = Some(Running { epoch: key.0, version: key.1, digest });
        effects.extend(self.resume(now));
        effects
    }

    /// A version could not be applied; the old one still runs.
    pub fn failed(&mut self, key: Key, text: &str, now: Time) -> Vec<Effect> {
        if self.ready.remove(&key).is_none() {
            return Vec::new();
        }
        self.remember_rejected(key);
        let mut effects = vec![self.fail(key, "apply", text)];
        effects.extend(self.resume(now));
        effects
    }

    /// A version was gone from shared memory before it could be copied: ask for the latest.
    pub fn gone_stale(&mut self, key: Key, now: Time) -> Vec<Effect> {
        if self.ready.remove(&key).is_none() {
            return Vec::new();
        }
        self.stale = key;
        self.asked_at = None;
        self.ask_latest(key.0, now)
    }

    /// A version was replaced by a newer one before anybody applied it.
    pub fn dropped(&mut self, key: Key, now: Time) -> Vec<Effect> {
        match self.ready.remove(&key) {
            Some(_) => self.resume(now),
            None => Vec::new(),
        }
    }

    /// A buffer is free: begin what waited for it.
    fn resume(&mut self, now: Time) -> Vec<Effect> {
        if self.arriving.is_some() {
            return Vec::new();
        }
        match self.waiting.take() {
            Some(waiting) if (waiting.epoch, waiting.version) > self.newest() => self.begin(waiting, now),
            _ => Vec::new(),
        }
    }

    // Time.

    /// Fetches what is due.
    pub fn tick(&mut self, now: Time) -> Vec<Effect> {
        if self.arriving.is_some() {
            let mut effects = self.pull(now);
            effects.extend(self.completed(now));
            return effects;
        }
        let due = self.asked_at.map_or(true, |at| now.saturating_sub(at) >= self.timing.patience);
        match self.waiting.take() {
            Some(waiting) if due => self.begin(waiting, now),
            waiting => {
                self.waiting = waiting;
                Vec::new()
            }
        }
    }

    /// Says again how things stand, in case it got lost.
    pub fn repeat(&self) -> Vec<Effect> {
        let mut effects: Vec<Effect> = self.progress().into_iter().collect();
        effects.extend(self.staged_again());
        if let Some(running) = &self.running {
            let key = (running.epoch, running.version);
            effects.push(Effect::Send(FromWorker::Applied(self.of_version(key, &running.digest))));
        }
        effects.extend(self.failure.clone().map(|failed| Effect::Send(FromWorker::Failed(failed))));
        if let (Some(&key), None) = (self.ready.keys().next_back(), &self.arriving) {
            let phase = if key == self.taken { Phase::Applying } else { Phase::Staged };
            effects.push(self.say_progress(key, 0, phase));
        }
        effects
    }
}

/// Whether the version must be held and reported before it is applied.
fn must_be_staged(announce: &Announce) -> bool {
    announce.commit == CommitMode::Together || announce.acknowledge == Acknowledge::Staged
}

/// Whether two announcements of a version agree on what arrives.
fn same_bytes(one: &Announce, other: &Announce) -> bool {
    (&one.layout, one.nbytes, one.chunk_bytes) == (&other.layout, other.nbytes, other.chunk_bytes)
}
