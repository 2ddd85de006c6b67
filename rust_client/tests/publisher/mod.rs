//! A publisher without sockets, as small as the protocol permits: what it says to each message.
#![allow(dead_code)] // each test uses a part
#![allow(clippy::needless_update)] // in literals of messages, which later fields leave alone

pub mod dice;
pub mod sealer;
pub mod worker;

use std::collections::BTreeMap;
use std::time::Duration;
use weightbus::checksum::crc32c;
use weightbus::digest::{bytes_of_hex, digest, layout_id};
use weightbus::effects::Effect;
use weightbus::machine::WorkerMachine;
use weightbus::messages::*;
use weightbus::transfer::ChunkPlan;
use weightbus::zmtp::{Place, Places, Published, PublishedPayload};

pub const MODEL: &str = "policy";

/// A message: header and payloads.
pub type Message = (Vec<u8>, Vec<Vec<u8>>);

/// A version as it is published.
#[derive(Clone)]
pub struct Version {
    pub number: u64,
    pub layout: Vec<u8>,
    pub data: Vec<u8>,
    pub chunk_bytes: u64,
    pub commit: AnnounceCommit,
    pub acknowledge: AnnounceAcknowledge,
    pub keep: bool,
    pub patches: Vec<(Patch, Vec<u8>)>,
    pub sources: Vec<Source>,
}

impl Version {
    /// One tensor `w` of bytes.
    pub fn of_bytes(number: u64, data: Vec<u8>, chunk_bytes: u64) -> Version {
        let json = format!(r#"{{"w":{{"dtype":"U8","shape":[{0}],"data_offsets":[0,{0}]}}}}"#, data.len());
        Version {
            number,
            layout: layout(&json),
            data,
            chunk_bytes,
            commit: AnnounceCommit::Auto,
            acknowledge: AnnounceAcknowledge::Applied,
            keep: false,
            patches: Vec::new(),
            sources: Vec::new(),
        }
    }

    /// It, with a patch on another version of this layout, unless that would be no smaller.
    pub fn on(mut self, epoch: u64, base: &Version) -> Version {
        let bytes = delta(base, &self);
        if bytes.len() <= self.data.len() {
            let (encoding, digest, nbytes) = (DELTA.to_owned(), base.digest(), bytes.len() as u64);
            self.patches.push((
                Patch { encoding, epoch, version: base.number, digest, nbytes, ..Default::default() },
                bytes,
            ));
        }
        self
    }

    fn plan(&self) -> ChunkPlan {
        ChunkPlan::new(self.data.len() as u64, self.chunk_bytes).expect("a chunk size")
    }

    fn chunk(&self, index: u64) -> &[u8] {
        let span = self.plan().span(index);
        &self.data[span.start as usize..span.end as usize]
    }

    pub fn digest(&self) -> String {
        let crcs: Vec<u32> = (0..self.plan().count()).map(|index| crc32c(self.chunk(index))).collect();
        digest(&layout_id(&self.layout), self.chunk_bytes, &crcs)
    }

    pub fn announce(&self, epoch: u64) -> Announce {
        Announce {
            model: MODEL.to_owned(),
            epoch,
            version: self.number,
            layout: layout_id(&self.layout),
            layout_bytes: self.layout.len() as u64,
            nbytes: self.data.len() as u64,
            chunk_bytes: self.chunk_bytes,
            commit: self.commit,
            acknowledge: self.acknowledge,
            encoding: "raw".to_owned(),
            keep: self.keep,
            patches: self.patches.iter().map(|(patch, _)| patch.clone()).collect(),
            sources: self.sources.clone(),
            ..Default::default()
        }
    }

    pub fn announcement(&self, epoch: u64, with_layout: bool) -> Message {
        let payloads = if with_layout { vec![self.layout.clone()] } else { Vec::new() };
        (encode(&FromPublisher::Announce(self.announce(epoch))), payloads)
    }

    pub fn chunk_message(&self, epoch: u64, index: u64) -> Message {
        let payload = self.chunk(index).to_vec();
        (encode(&self.chunk_header(epoch, index, &payload, None)), vec![payload])
    }

    fn chunk_header(&self, epoch: u64, index: u64, payload: &[u8], patch: Option<PatchId>) -> FromPublisher {
        let (model, version, crc) = (MODEL.to_owned(), self.number, crc32c(payload));
        FromPublisher::Chunk(Chunk { model, epoch, version, index, crc, patch, ..Default::default() })
    }

    /// All chunks of one of its patches.
    pub fn patch_chunks(&self, epoch: u64, at: usize) -> Vec<Message> {
        let (patch, bytes) = &self.patches[at];
        let chunks = bytes.chunks(self.chunk_bytes as usize).enumerate();
        let message = |(index, chunk): (usize, &[u8])| {
            (encode(&self.chunk_header(epoch, index as u64, chunk, Some(patch.id()))), vec![chunk.to_vec()])
        };
        chunks.map(message).collect()
    }

    pub fn patch_end(&self, epoch: u64, at: usize) -> Message {
        self.end_of(epoch, Some(self.patches[at].0.id()))
    }

    /// What is pushed of its first patch.
    pub fn pushed_patch(&self, epoch: u64) -> Vec<Message> {
        let mut messages = self.patch_chunks(epoch, 0);
        messages.push(self.patch_end(epoch, 0));
        messages
    }

    fn end_of(&self, epoch: u64, patch: Option<PatchId>) -> Message {
        let (model, digest) = (MODEL.to_owned(), self.digest());
        let end = End { model, epoch, version: self.number, digest, patch, ..Default::default() };
        (encode(&FromPublisher::End(end)), Vec::new())
    }

    pub fn end(&self, epoch: u64) -> Message {
        self.end_of(epoch, None)
    }

    pub fn commit_message(&self, epoch: u64) -> Message {
        let (model, digest) = (MODEL.to_owned(), self.digest());
        let commit = Commit { model, epoch, version: self.number, digest, ..Default::default() };
        (encode(&FromPublisher::Commit(commit)), Vec::new())
    }

    /// Everything that is pushed of it.
    pub fn pushed(&self, epoch: u64, with_layout: bool) -> Vec<Message> {
        let mut messages = vec![self.announcement(epoch, with_layout)];
        messages.extend((0..self.plan().count()).map(|index| self.chunk_message(epoch, index)));
        messages.push(self.end(epoch));
        messages
    }

    /// It as one message, if it has one chunk.
    pub fn whole(&self, epoch: u64) -> Message {
        let whole = Some(Whole { crc: crc32c(&self.data), digest: self.digest(), ..Default::default() });
        let announce = Announce { whole, ..self.announce(epoch) };
        (encode(&FromPublisher::Announce(announce)), vec![self.data.clone()])
    }
}

/// What turns a version of bytes into another: each byte that differs is overwritten (`docs/DELTA.md`).
fn delta(base: &Version, target: &Version) -> Vec<u8> {
    const BLOCK: usize = 1 << 18;
    let (nbytes, chunk_bytes) = (target.data.len() as u64, target.chunk_bytes);
    let before = Version { chunk_bytes, ..base.clone() };
    let mut patch = b"WBDELTA1\0\0\0\0".to_vec();
    patch.extend((chunk_bytes as u32).to_le_bytes());
    patch.extend(nbytes.to_le_bytes());
    for id in [layout_id(&target.layout), before.digest(), target.digest()] {
        patch.extend(bytes_of_hex(&id));
    }
    let blocks: Vec<_> = before.data.chunks(BLOCK).zip(target.data.chunks(BLOCK)).collect();
    for group in blocks.chunks(16) {
        let bodies: Vec<Vec<u8>> = group.iter().map(|(before, after)| overwrite(before, after)).collect();
        for body in &bodies {
            let mut entry = if body.is_empty() { 0 } else { body.len() << 2 | 2 };
            while entry > 127 {
                patch.push(entry as u8 & 127 | 128);
                entry >>= 7;
            }
            patch.push(entry as u8);
        }
        bodies.iter().for_each(|body| patch.extend(body));
    }
    patch
}

/// The body of a block: gaps by a Rice code whose low bits hold all of them, and bytes.
fn overwrite(before: &[u8], after: &[u8]) -> Vec<u8> {
    const LOW_BITS: usize = 18;
    let changed: Vec<usize> = (0..after.len()).filter(|&at| before[at] != after[at]).collect();
    if changed.is_empty() {
        return Vec::new();
    }
    let mut bits = vec![true; changed.len()];
    let mut next = 0;
    for at in &changed {
        bits.extend((0..LOW_BITS).map(|bit| (at - next) >> bit & 1 == 1));
        next = at + 1;
    }
    let mut body = ((changed.len() | LOW_BITS << 19) as u32).to_le_bytes()[..3].to_vec();
    body.extend(bits.chunks(8).map(|bits| bits.iter().rev().fold(0, |byte, &bit| byte << 1 | u8::from(bit))));
    body.extend(changed.iter().map(|&at| after[at]));
    body
}

/// A safetensors header of this JSON.
pub fn layout(json: &str) -> Vec<u8> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes
}

pub fn welcome(epoch: u64, data: &str, models: BTreeMap<String, u64>) -> Message {
    let welcome =
        Welcome { epoch, data: data.to_owned(), ping_ms: 1000, lost_ms: 5000, models, ..Default::default() };
    (encode(&FromPublisher::Welcome(welcome)), Vec::new())
}

fn refuse(code: &str, fetch: Option<&Fetch>) -> Message {
    let refuse = Refuse {
        code: code.to_owned(),
        text: "as the test has it".to_owned(),
        model: fetch.map(|fetch| fetch.model.clone()),
        epoch: fetch.map_or(0, |fetch| fetch.epoch),
        version: fetch.map_or(0, |fetch| fetch.version),
        ..Default::default()
    };
    (encode(&FromPublisher::Refuse(refuse)), Vec::new())
}

/// One publisher with one worker, of one model.
pub struct Publisher {
    pub epoch: u64,
    pub data: String,
    pub latest: Option<Version>,    // committed
    pub undecided: Option<Version>, // together, not committed yet
    pub knows_worker: bool,
    pub applied: Vec<Applied>,
    pub failed: Vec<Failed>,
    pub unpatched: Vec<String>, // why all of a version was fetched
    pub left: bool,
}

impl Publisher {
    pub fn new(epoch: u64, data: &str) -> Publisher {
        Publisher {
            epoch,
            data: data.to_owned(),
            latest: None,
            undecided: None,
            knows_worker: false,
            applied: Vec::new(),
            failed: Vec::new(),
            unpatched: Vec::new(),
            left: false,
        }
    }

    /// Publishes a version; returns what goes out on the data channel.
    pub fn publish(&mut self, version: Version, with_layout: bool) -> Vec<Message> {
        let messages = version.pushed(self.epoch, with_layout);
        self.undecided = None;
        match version.commit {
            AnnounceCommit::Auto => self.latest = Some(version),
            AnnounceCommit::Together => self.undecided = Some(version),
        }
        messages
    }

    pub fn beacon(&self) -> Message {
        let version = self.latest.as_ref().map_or(0, |version| version.number);
        let beacon = Beacon { model: MODEL.to_owned(), epoch: self.epoch, version, ..Default::default() };
        (encode(&FromPublisher::Beacon(beacon)), Vec::new())
    }

    fn models(&self) -> BTreeMap<String, u64> {
        self.latest.iter().map(|version| (MODEL.to_owned(), version.number)).collect()
    }

    /// Answers what a worker said.
    pub fn hear(&mut self, header: &[u8]) -> Vec<Message> {
        let message = from_worker(header, 0).expect("a worker sends valid messages");
        let first = matches!(message, FromWorker::Hello(_) | FromWorker::Bye(_));
        if !first && !self.knows_worker {
            return vec![refuse("unknown-worker", None)];
        }
        match message {
            FromWorker::Hello(hello) => {
                if hello.epoch > self.epoch {
                    return vec![refuse("stale-epoch", None)];
                }
                self.knows_worker = true;
                vec![welcome(self.epoch, &self.data, self.models())]
            }
            FromWorker::Ping(ping) => {
                let pong = Pong {
                    token: ping.token,
                    epoch: self.epoch,
                    models: self.models(),
                    ..Default::default()
                };
                vec![(encode(&FromPublisher::Pong(pong)), Vec::new())]
            }
            FromWorker::Fetch(fetch) => {
                let why = fetch.unpatched.clone();
                if !why.is_empty() && !self.unpatched.contains(&why) {
                    self.unpatched.push(why);
                }
                self.fetched(&fetch)
            }
            FromWorker::Staged(staged) => self.staged(&staged),
            FromWorker::Applied(applied) => {
                self.applied.push(applied);
                Vec::new()
            }
            FromWorker::Failed(failed) => {
                self.failed.push(failed);
                Vec::new()
            }
            FromWorker::Bye(_) => {
                self.left = true;
                Vec::new()
            }
            FromWorker::Progress(_) | FromWorker::Pong(_) | FromWorker::Checked(_) | FromWorker::Below(_) => {
                Vec::new()
            }
        }
    }

    fn fetched(&self, fetch: &Fetch) -> Vec<Message> {
        let number = fetch.version;
        let versions = || self.latest.iter().chain(&self.undecided);
        let found = match number {
            0 => self.latest.as_ref(),
            _ => versions().find(|version| version.number == number),
        };
        let version = match found.filter(|_| fetch.epoch == self.epoch) {
            Some(version) => version,
            None => {
                let mut messages = vec![refuse("gone", Some(fetch))];
                if let Some(latest) = &self.latest {
                    messages.push(latest.announcement(self.epoch, false));
                    messages.push(latest.end(self.epoch));
                }
                return messages;
            }
        };
        if let Some(id) = &fetch.patch {
            return self.fetched_patch(version, id, fetch);
        }
        if fetch.count == 0 {
            return vec![version.announcement(self.epoch, fetch.layout), version.end(self.epoch)];
        }
        if number == 0 || fetch.first + fetch.count > version.plan().count() {
            return vec![refuse("range", Some(fetch))];
        }
        let indexes = fetch.first..fetch.first + fetch.count;
        indexes.map(|index| version.chunk_message(self.epoch, index)).collect()
    }

    fn fetched_patch(&self, version: &Version, id: &PatchId, fetch: &Fetch) -> Vec<Message> {
        let at = match version.patches.iter().position(|(patch, _)| patch.id() == *id) {
            Some(at) => at,
            None => return vec![refuse("no-patch", Some(fetch))],
        };
        let chunks = version.patch_chunks(self.epoch, at);
        match chunks.get(fetch.first as usize..(fetch.first + fetch.count) as usize) {
            Some([]) => vec![version.patch_end(self.epoch, at)],
            Some(chunks) => chunks.to_vec(),
            None => vec![refuse("no-patch", Some(fetch))],
        }
    }

    /// One worker is enough to commit.
    fn staged(&mut self, staged: &Staged) -> Vec<Message> {
        if self.undecided.as_ref().map(|version| version.number) == Some(staged.version) {
            self.latest =
                self.undecided.take().map(|version| Version { commit: AnnounceCommit::Auto, ..version });
        }
        let found = self.latest.as_ref().filter(|version| version.number == staged.version);
        found.map(|version| version.commit_message(self.epoch)).into_iter().collect()
    }
}

/// Has a worker receive what was published as its subscription does: a chunk where it belongs.
pub fn receive_published(machine: &mut WorkerMachine, message: Message, now: Duration) -> Vec<Effect> {
    let (header, payloads) = message;
    let mut payload = payloads.first().cloned().map_or(PublishedPayload::None, PublishedPayload::Bytes);
    if let Some(bytes) = payloads.first() {
        if let Place::InBuffer(ticket) = machine.place(&header, bytes.len()) {
            machine.unfilled(ticket).unwrap()[..bytes.len()].copy_from_slice(bytes);
            machine.received(ticket, bytes.len());
            payload = PublishedPayload::InPlace(ticket);
        }
    }
    machine.receive_published(&Published { header, payload_count: payloads.len(), payload }, now)
}
