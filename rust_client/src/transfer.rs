//! Transfer of one version, chunk by chunk, pushed and fetched in any order.
//!
//! Each chunk is in one of five states:
//!
//! ```text
//! Missing ──────────────fetched───────────> Requested ──no answer in time─────────> Missing
//! Missing, Requested ───arrives whole─────> Received
//! Missing, Requested ───begins to arrive──> Leased ─────complete──────────────────> Received
//!                                           Leased ─────damaged, cut off──────────> Missing
//! Missing ──────────────a source has it───> AtSource ───arrives from the source───> Received
//!                                           AtSource ───the source's job ends─────> Missing
//! ```
//!
//! A chunk is `Leased` while its bytes are being received straight into the buffer. If the chunk
//! arrives again meanwhile, it is ignored, so that this part of the buffer has only one writer.
//!
//! Pushed chunks come in order. A missing chunk below the highest pushed one was lost, and is
//! fetched at once. Any other missing chunk may still be pushed, and is fetched after `end`, or
//! when nothing has arrived for a while. At most a window of chunks is requested at a time. If no
//! answer comes in time, all requested chunks are missing again, and the timeout doubles until a
//! chunk arrives. The publisher answers in order. So as long as it has not answered a ping that was
//! sent after a fetch, the chunks of that fetch may still arrive, and the longest timeout applies.
//!
//! A patch may arrive instead of the version, into a separate buffer. The version is then decoded
//! from the patch.
//!
//! A *source* is a rank of a sharded trainer that has some of the chunks. Other threads fetch these
//! from the source, as a *job*. Until the job ends, its chunks are accepted only from this source.

use crate::checksum::{crc32c, crc32c_append};
use crate::digest::digest;
use crate::layout::Layout;
use crate::limits::{
    Timing, CHUNK_BYTES_MAX, DAMAGED_MAX, LABEL_MAX, PROGRESS_CHUNKS, TRIES_MAX, WINDOW_CHUNKS,
};
use crate::messages::{Announce, Patch, PatchId};
use crate::patching::{Base, Bytes, Patching};
use crate::phases::{next, Coming, Way, COMING};
use crate::sealing::{Opening, Subject};
use crate::segment::Reading;
use crate::sources::SourceFetch;
use crate::staging::Buffer;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// A point in time: the duration since a fixed moment.
pub type Time = Duration;

/// A version's epoch and number. A newer version has a greater key.
pub type Key = (u64, u64);

/// How a data section is cut into chunks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChunkPlan {
    pub nbytes: u64,
    pub chunk_bytes: u64,
}

impl ChunkPlan {
    /// Returns the plan for chunks of this size, or `None` if the size is not allowed.
    pub fn new(nbytes: u64, chunk_bytes: u64) -> Option<ChunkPlan> {
        (1..=CHUNK_BYTES_MAX).contains(&chunk_bytes).then_some(ChunkPlan { nbytes, chunk_bytes })
    }

    /// Returns the number of chunks.
    pub fn count(self) -> u64 {
        self.nbytes / self.chunk_bytes + u64::from(self.nbytes % self.chunk_bytes > 0)
    }

    /// Returns the position of a chunk in the data section.
    pub fn span(self, index: u64) -> Range<u64> {
        let begin = index * self.chunk_bytes;
        begin..self.nbytes.min(begin + self.chunk_bytes)
    }

    /// True if the chunk has `size` bytes.
    pub fn fits(self, index: u64, size: usize) -> bool {
        let span = self.span(index);
        span.end - span.start == size as u64
    }
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Missing,
    Requested,
    Received,
    Leased,
    AtSource,
}

impl State {
    /// True if a copy that arrives from the publisher is ignored.
    fn is_taken(self) -> bool {
        matches!(self, State::Received | State::Leased | State::AtSource)
    }
}

/// The lease of the buffer space where a chunk is being received.
struct Lease {
    id: u64,
    index: usize,
    filled: usize,            // bytes received
    crc: u32,                 // of the received bytes; unused if the chunk is sealed
    opening: Option<Opening>, // decrypts a sealed chunk
    seen: usize,              // `filled` when `wants` was last called
}

/// The payload of a chunk.
#[derive(Clone, Copy)]
pub enum Payload<'a> {
    /// Bytes, to be copied into the buffer.
    Bytes(&'a [u8]),
    /// The id of the lease under which the bytes were received into the buffer.
    InPlace(u64),
}

/// The proof that a chunk is undamaged.
pub enum Proof {
    Crc(u32),
    /// What decrypts a sealed chunk. `None` if the encryption key is not known, or if the chunk was
    /// decrypted while it was received.
    Sealed(Option<Opening>),
}

/// A request that a transfer sends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Want {
    /// The announcement, and the `end`.
    End,
    /// `count` chunks from `first` on.
    Chunks { first: u64, count: u64 },
}

/// Identifies a chunk.
#[derive(Clone, Copy)]
pub struct Piece<'a> {
    pub key: Key,
    /// The patch that the chunk belongs to; `None` for a chunk of the version itself.
    pub patch: Option<&'a PatchId>,
    pub index: u64,
}

/// A patch that arrives instead of a whole version.
struct Patched {
    patch: Patch,
    inputs: Option<(Base, Buffer)>, // base and destination; None while the patch is being decoded
    wanted: Arc<()>,                // see `Patching::wanted`
}

/// A version on its way into a buffer.
pub struct Transfer {
    announce: Announce,
    layout: Arc<Layout>,
    buffer: Buffer,
    chunks_received: usize, // number of undamaged chunks received
    restarts: u32,          // times that all chunks together did not match the digest
    reported_at: Time,      // last progress report
    digest: Option<String>,
    unpatched_reason: String, // why the version arrives whole, though patches were offered
    decode_us: u64,           // microseconds that decoding the patch took; 0 until then
    patched: Option<Patched>,
    tries: u32, // timeouts in a row without progress
    plan: ChunkPlan,
    states: Vec<State>,
    crcs: Vec<u32>,
    requested: usize, // number of chunks in state `Requested`
    cursor: usize,    // no chunk below this index is missing
    pushed: usize,    // every chunk below this index was pushed, or lost on the way
    damaged: u32,
    timing: Timing,
    heard_at: Time,
    requested_at: Time,
    answered: Option<Time>, // send time of the last ping that was answered
    patience: Duration,
    gap: Duration, // longest recent time between two chunks
    end_requested: bool,
    arrival: Coming,
    lease: Option<Lease>,
    at_sources: usize,             // number of chunks in state `AtSource`
    from_sources: Option<Arc<()>>, // token of the sources' jobs, while `at_sources` is not 0
}

impl Transfer {
    /// Begins the transfer of a whole version. If patches were offered, `why` says why none is
    /// used.
    pub fn new(
        announce: Announce,
        layout: Arc<Layout>,
        buffer: Buffer,
        why: &str,
        now: Time,
        timing: Timing,
    ) -> Transfer {
        let nbytes = announce.nbytes;
        let mut transfer = Transfer::of_bytes(nbytes, announce, layout, buffer, now, timing);
        transfer.unpatched_reason = why.chars().take(LABEL_MAX).collect();
        transfer
    }

    /// Begins the transfer of a patch into `buffer`. Later the patch is decoded into `version`.
    pub fn of_patch(
        (patch, base, buffer): (Patch, Base, Buffer),
        announce: Announce,
        layout: Arc<Layout>,
        version: Buffer,
        now: Time,
        timing: Timing,
    ) -> Transfer {
        let mut transfer = Transfer::of_bytes(patch.nbytes, announce, layout, buffer, now, timing);
        transfer.patched = Some(Patched { patch, inputs: Some((base, version)), wanted: Arc::default() });
        transfer
    }

    fn of_bytes(
        nbytes: u64,
        announce: Announce,
        layout: Arc<Layout>,
        buffer: Buffer,
        now: Time,
        timing: Timing,
    ) -> Transfer {
        let plan = ChunkPlan { nbytes, chunk_bytes: announce.chunk_bytes };
        let count = plan.count() as usize; // at most CHUNKS_MAX, checked before
        Transfer {
            announce,
            layout,
            buffer,
            chunks_received: 0,
            restarts: 0,
            reported_at: now,
            digest: None,
            unpatched_reason: String::new(),
            decode_us: 0,
            patched: None,
            tries: 0,
            plan,
            states: vec![State::Missing; count],
            crcs: vec![0; count],
            requested: 0,
            cursor: 0,
            pushed: 0,
            damaged: 0,
            timing,
            heard_at: now,
            requested_at: now,
            answered: None,
            patience: timing.patience,
            gap: Duration::ZERO,
            end_requested: false,
            arrival: Coming::Received,
            lease: None,
            at_sources: 0,
            from_sources: None,
        }
    }

    pub fn key(&self) -> Key {
        (self.announce.epoch, self.announce.version)
    }

    /// Returns the id of the model.
    pub fn model(&self) -> &str {
        &self.announce.model
    }

    pub fn chunks_received(&self) -> usize {
        self.chunks_received
    }

    pub fn restarts(&self) -> u32 {
        self.restarts
    }

    pub fn unpatched_reason(&self) -> &str {
        &self.unpatched_reason
    }

    pub fn decode_us(&self) -> u64 {
        self.decode_us
    }

    /// Returns the id of the patch that arrives instead of the version, if any.
    pub fn patch(&self) -> Option<PatchId> {
        self.patched.as_ref().map(|patched| patched.patch.id())
    }

    /// True if this transfer receives this patch, or with `None` the version itself (D9).
    pub fn is_of(&self, patch: Option<&PatchId>) -> bool {
        self.patch().as_ref() == patch
    }

    /// Returns the version or patch whose chunks arrive, for their decryption.
    pub fn subject(&self) -> Subject {
        match &self.patched {
            Some(patched) => Subject::of_patch(&self.announce, &patched.patch),
            None => Subject::of(&self.announce),
        }
    }

    /// True if repeated requests have brought no usable chunk.
    pub fn hopeless(&self) -> bool {
        !self.decoding() && self.tries >= TRIES_MAX
    }

    /// True while the patch is being decoded.
    pub fn decoding(&self) -> bool {
        self.arrival == Coming::Decoded
    }

    /// Returns the bytes that the patch builds on; `None` without a patch, or once the patch is
    /// being decoded.
    pub fn builds_on(&self) -> Option<&Bytes> {
        let (base, _) = self.patched.as_ref()?.inputs.as_ref()?;
        Some(&base.bytes)
    }

    /// Returns the job that decodes the received patch, once. Returns `None` before the version's
    /// digest is known.
    pub fn decode(&mut self) -> Option<Patching> {
        let digest = self.digest.clone()?;
        let patched = self.patched.as_mut()?;
        let (base, version) = patched.inputs.take()?;
        let wanted = Arc::downgrade(&patched.wanted);
        self.change_way(Way::Patched);
        Some(Patching {
            model: self.announce.model.clone(),
            key: (self.announce.epoch, self.announce.version),
            base,
            patch: std::mem::take(&mut self.buffer),
            version,
            digest,
            wanted,
        })
    }

    /// True if `decode` of this transfer returned this job.
    pub fn waits_for(&self, job: &Patching) -> bool {
        let wanted = self.patched.as_ref().map(|patched| Arc::downgrade(&patched.wanted));
        wanted.map_or(false, |wanted| wanted.ptr_eq(&job.wanted))
    }

    /// Takes the complete version from the job that decoded the patch in the time `took`.
    pub fn decoded(&mut self, job: Patching, took: Duration) {
        self.decode_us = took.as_micros() as u64;
        self.buffer = job.version;
        self.digest = Some(job.digest);
    }

    /// Returns the buffer, the layout and the digest of a complete, verified version.
    pub fn into_parts(self) -> (Buffer, Arc<Layout>, String) {
        (self.buffer, self.layout, self.digest.unwrap_or_default())
    }

    /// Returns a transfer of the whole version instead of its patch. The version is received into
    /// `buffer`, or without it into the buffer for the decoded version. Returns `None` if there is
    /// no `buffer`, and the decoder has the other one.
    pub fn give_up(self, buffer: Option<Buffer>, why: &str, now: Time) -> Option<Transfer> {
        let buffer = buffer.or_else(|| Some(self.patched?.inputs?.1))?;
        let mut whole = Transfer::new(self.announce, self.layout, buffer, why, now, self.timing);
        whole.pull();
        Some(whole)
    }

    /// Returns the number of chunks of the version, or of its patch.
    pub fn count(&self) -> u64 {
        self.plan.count()
    }

    /// True if every chunk has been received, and the digest is known.
    pub fn complete(&self) -> bool {
        self.chunks_received == self.states.len() && self.digest.is_some()
    }

    /// Returns true if a progress report is due, and then notes that the report is sent (W23).
    pub fn reports(&mut self, now: Time) -> bool {
        let slow = now.saturating_sub(self.reported_at) >= self.timing.report();
        let due = slow || self.chunks_received % PROGRESS_CHUNKS == 0;
        self.reported_at = if due { now } else { self.reported_at };
        due
    }

    /// Adds a chunk. Returns true if it is new and undamaged; any other chunk is ignored.
    pub fn add(&mut self, index: u64, proof: Proof, payload: Payload, now: Time, pushed: bool) -> bool {
        if index >= self.states.len() as u64 {
            return false;
        }
        let index = index as usize;
        if pushed {
            self.pushed = self.pushed.max(index + 1);
        }
        let wanted = match payload {
            Payload::InPlace(id) => self.lease.as_ref().map_or(false, |l| l.id == id && l.index == index),
            Payload::Bytes(_) => !self.states[index].is_taken(),
        };
        if !wanted {
            return false; // another copy was received or is being received, or the lease has ended
        }
        let found = match payload {
            Payload::InPlace(_) => self.end_lease(&proof),
            Payload::Bytes(bytes) => self.put(index, proof, bytes),
        };
        match found {
            Some(crc) => {
                self.forget_request(index);
                self.states[index] = State::Received;
                self.crcs[index] = crc;
                self.chunks_received += 1;
                self.note_arrival(now);
            }
            None => self.reject(index),
        }
        found.is_some()
    }

    /// Ends the lease. Returns the CRC-32C of the chunk, or `None` if the chunk is incomplete or
    /// damaged.
    fn end_lease(&mut self, proof: &Proof) -> Option<u32> {
        let lease = self.revoke()?;
        let whole = lease.filled == self.span(lease.index).len();
        match (lease.opening, proof) {
            (Some(opening), _) => opening.verify().filter(|_| whole),
            (None, Proof::Crc(crc)) => Some(lease.crc).filter(|found| whole && found == crc),
            (None, Proof::Sealed(_)) => None,
        }
    }

    /// Copies a chunk into the buffer. Returns its CRC-32C, or `None` if the chunk is damaged.
    fn put(&mut self, index: usize, proof: Proof, bytes: &[u8]) -> Option<u32> {
        let span = self.span(index);
        if bytes.len() != span.len() {
            return None;
        }
        match proof {
            Proof::Sealed(opening) => opening?.decrypt(bytes, &mut self.buffer[span]), // E4
            Proof::Crc(crc) => {
                if crc32c(bytes) != crc {
                    return None;
                }
                self.buffer[span].copy_from_slice(bytes);
                Some(crc)
            }
        }
    }

    /// Leases the buffer space of a chunk of `size` bytes under this `id`. Returns false if the
    /// chunk is not wanted or has another size. `opening` decrypts a sealed chunk as it arrives.
    pub fn lease(&mut self, index: u64, size: usize, id: u64, opening: Option<Opening>) -> bool {
        if index >= self.states.len() as u64 {
            return false;
        }
        let index = index as usize;
        if self.states[index].is_taken() || size != self.span(index).len() {
            return false;
        }
        self.revoke();
        self.forget_request(index);
        self.states[index] = State::Leased;
        self.lease = Some(Lease { id, index, filled: 0, crc: 0, opening, seen: 0 });
        true
    }

    /// Returns the unfilled part of the leased memory; `None` if the lease has ended.
    pub fn unfilled(&mut self, id: u64) -> Option<&mut [u8]> {
        let (index, filled) = match &self.lease {
            Some(lease) if lease.id == id => (lease.index, lease.filled),
            _ => return None,
        };
        let span = self.span(index);
        Some(&mut self.buffer[span.start + filled..span.end])
    }

    /// Notes that `count` bytes were received under a lease.
    pub fn received(&mut self, id: u64, count: usize) {
        if let Some(lease) = self.lease.as_mut().filter(|lease| lease.id == id) {
            let begin = lease.index * self.plan.chunk_bytes as usize + lease.filled;
            let bytes = &mut self.buffer[begin..begin + count];
            match &mut lease.opening {
                Some(opening) => opening.decrypt_next(bytes),
                None => lease.crc = crc32c_append(lease.crc, bytes),
            }
            lease.filled += count;
        }
    }

    /// Ends the lease with this id, whose payload will never be complete.
    pub fn cancel(&mut self, id: u64) {
        if self.lease.as_ref().map_or(false, |lease| lease.id == id) {
            self.revoke();
        }
    }

    /// Ends the lease, so that nothing writes into the buffer. Returns the ended lease.
    fn revoke(&mut self) -> Option<Lease> {
        let lease = self.lease.take()?;
        self.states[lease.index] = State::Missing;
        self.cursor = self.cursor.min(lease.index);
        Some(lease)
    }

    /// Sets the digest of the version, and fetches the missing chunks: no more chunks will be
    /// pushed.
    pub fn end(&mut self, digest: String) {
        self.digest = Some(digest);
        self.pull();
    }

    /// Returns the jobs that fetch chunks from the version's sources, one for each source (N1).
    pub fn fetch_from_sources(&mut self) -> Vec<SourceFetch> {
        let token = Arc::new(());
        let mut left = self.plan.count(); // limits the work if the ranges of sources overlap
        let mut jobs = Vec::new();
        for source in &self.announce.sources {
            let mut indexes = Vec::new();
            for range in source.chunks.chunks_exact(2) {
                let end = self.plan.count().min(range[0] + range[1].min(left));
                left -= end.saturating_sub(range[0]);
                for index in range[0]..end {
                    let state = &mut self.states[index as usize];
                    if *state == State::Missing {
                        *state = State::AtSource;
                        indexes.push(index);
                    }
                }
            }
            if !indexes.is_empty() {
                self.at_sources += indexes.len();
                let (address, plan, wanted) = (source.address.clone(), self.plan, Arc::downgrade(&token));
                jobs.push(SourceFetch { address, indexes, subject: self.subject(), plan, wanted });
            }
        }
        self.from_sources = Some(token).filter(|_| !jobs.is_empty());
        jobs
    }

    /// True if a job or chunk with this `wanted` belongs to this transfer, which still waits for
    /// chunks of sources.
    fn waits_for_sources(&self, wanted: &Weak<()>) -> bool {
        self.from_sources.as_ref().map_or(false, |token| Arc::downgrade(token).ptr_eq(wanted))
    }

    /// Copies a verified chunk of a job into the buffer. Returns false if the chunk is not wanted.
    pub fn add_from_source(
        &mut self,
        wanted: &Weak<()>,
        index: u64,
        crc: u32,
        bytes: &[u8],
        now: Time,
    ) -> bool {
        let index = index as usize; // below the number of chunks if the job is of this transfer
        if !self.waits_for_sources(wanted) || self.states[index] != State::AtSource {
            return false;
        }
        let span = self.span(index);
        self.buffer[span].copy_from_slice(bytes);
        self.states[index] = State::Received;
        self.crcs[index] = crc;
        self.chunks_received += 1;
        self.leave_sources(1);
        (self.tries, self.heard_at) = (0, now);
        true
    }

    /// Ends a job: chunks that the source has not sent are fetched like any other chunk (N3).
    /// Returns false if this transfer does not wait for the job.
    pub fn source_over(&mut self, job: &SourceFetch, now: Time) -> bool {
        if !self.waits_for_sources(&job.wanted) {
            return false;
        }
        let mut unsent = 0;
        for &index in &job.indexes {
            if self.states[index as usize] == State::AtSource {
                self.states[index as usize] = State::Missing;
                self.cursor = self.cursor.min(index as usize);
                unsent += 1;
            }
        }
        self.leave_sources(unsent);
        self.heard_at = now;
        true
    }

    /// Notes that `count` chunks are no longer expected from sources.
    fn leave_sources(&mut self, count: usize) {
        self.at_sources -= count;
        if self.at_sources == 0 {
            self.from_sources = None;
        }
    }

    /// Copies every chunk from shared memory that holds the whole version.
    pub fn read(&mut self, memory: &Reading) {
        self.revoke();
        for index in 0..self.states.len() {
            let span = self.span(index);
            let bytes = &mut self.buffer[span.clone()];
            memory.copy_to(span.start, bytes);
            self.crcs[index] = crc32c(bytes);
            self.states[index] = State::Received;
        }
        self.chunks_received = self.states.len();
        self.cursor = self.chunks_received;
        self.requested = 0;
    }

    /// Marks all chunks as missing, since the received bytes may belong to another version.
    pub fn forget(&mut self) {
        self.states.fill(State::Missing);
        self.chunks_received = 0;
        self.requested = 0;
        self.cursor = 0;
    }

    /// Fetches all missing chunks from now on, since probably no more chunks will be pushed.
    pub fn pull(&mut self) {
        self.change_way(Way::Unpushed);
    }

    fn change_way(&mut self, way: Way) {
        self.arrival = next(COMING, self.arrival, way).unwrap_or(self.arrival);
    }

    /// Records that a ping was answered: no answer to a request before `sent_at` is on its way.
    pub fn answered(&mut self, sent_at: Time) {
        self.answered = Some(sent_at);
    }

    /// Returns the requests to send now, and marks their chunks as requested.
    pub fn wants(&mut self, now: Time) -> Vec<Want> {
        if self.decoding() {
            return Vec::new();
        }
        if let Some(lease) = self.lease.as_mut().filter(|lease| lease.filled > lease.seen) {
            lease.seen = lease.filled;
            self.heard_at = now;
        }
        let silent = now.saturating_sub(self.heard_at);
        if silent >= self.timing.quiet {
            self.pull();
        }
        // until a later ping is answered, the chunks may be on their way
        let lost = self.answered > Some(self.requested_at);
        // while chunks are expected from sources only, the publisher is not late
        let waits = self.at_sources == 0 || self.requested > 0;
        if waits && silent >= if lost { self.patience } else { self.timing.patience_max } {
            self.tries += 1;
            self.request_again(now);
            self.patience = (2 * self.patience).min(self.timing.patience_max);
        }
        let mut wants = Vec::new();
        if self.digest.is_none() && self.arrival == Coming::Pulled && !self.end_requested {
            self.end_requested = true;
            wants.push(Want::End);
        }
        if self.requested <= WINDOW_CHUNKS / 2 {
            self.request_ranges(&mut wants);
        }
        if !wants.is_empty() {
            self.requested_at = now;
        }
        wants
    }

    /// Returns true if the received chunks match the digest. Otherwise marks all chunks as missing.
    pub fn verify(&mut self) -> bool {
        let found = digest(&self.announce.layout, self.plan.chunk_bytes, &self.crcs);
        if self.digest.as_ref() == Some(&found) {
            return true;
        }
        self.restarts += 1;
        self.forget();
        self.digest = None;
        self.end_requested = false;
        self.pull();
        false
    }

    /// Requests all missing chunks again: requests on an earlier connection will not be answered.
    pub fn reconnected(&mut self, now: Time) {
        self.request_again(now);
        self.pull();
        self.tries = 0;
    }

    fn request_ranges(&mut self, wants: &mut Vec<Want>) {
        let limit = if self.arrival == Coming::Pulled { self.states.len() } else { self.pushed };
        while self.requested < WINDOW_CHUNKS {
            let from = self.cursor.min(limit);
            let found = self.states[from..limit].iter().position(|&state| state == State::Missing);
            let first = match found {
                Some(at) => from + at,
                None => {
                    self.cursor = self.cursor.max(limit);
                    return;
                }
            };
            let end = limit.min(first + WINDOW_CHUNKS - self.requested);
            let states = self.states[first..end].iter_mut();
            let run = states.take_while(|state| **state == State::Missing);
            let count = run.map(|state| *state = State::Requested).count();
            self.requested += count;
            self.cursor = first + count;
            wants.push(Want::Chunks { first: first as u64, count: count as u64 });
        }
    }

    /// Notes that a chunk was damaged. The first few are fetched again at once, later ones after
    /// the timeout.
    fn reject(&mut self, index: usize) {
        self.damaged = self.damaged.saturating_add(1);
        if self.damaged <= DAMAGED_MAX {
            self.forget_request(index);
        }
        if self.states[index] == State::Missing {
            self.cursor = self.cursor.min(index);
        }
    }

    fn forget_request(&mut self, index: usize) {
        if self.states[index] == State::Requested {
            self.states[index] = State::Missing;
            self.requested -= 1;
        }
    }

    /// Notes that a chunk arrived. For slow links, sets the timeout in proportion to the longest
    /// recent time between two chunks.
    fn note_arrival(&mut self, now: Time) {
        self.tries = 0;
        self.gap = now.saturating_sub(self.heard_at).max(self.gap * 7 / 8);
        self.patience = self.timing.patience.max(4 * self.gap).min(self.timing.patience_max);
        self.heard_at = now;
    }

    fn request_again(&mut self, now: Time) {
        for state in self.states.iter_mut().filter(|state| **state == State::Requested) {
            *state = State::Missing;
        }
        self.requested = 0;
        self.cursor = 0;
        self.end_requested = false;
        self.heard_at = now;
    }

    fn span(&self, index: usize) -> Range<usize> {
        let span = self.plan.span(index as u64);
        span.start as usize..span.end as usize
    }
}
