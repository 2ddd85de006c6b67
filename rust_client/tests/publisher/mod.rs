//! A publisher without sockets, as small as the protocol permits: what it says to each message.
#![allow(dead_code)] // each test uses a part

use std::collections::BTreeMap;
use weightbus::checksum::crc32c;
use weightbus::digest::{digest, layout_id};
use weightbus::messages::*;
use weightbus::transfer::ChunkPlan;

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
    pub commit: CommitMode,
    pub acknowledge: Acknowledge,
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
            commit: CommitMode::Auto,
            acknowledge: Acknowledge::Applied,
        }
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
            encryption: None,
            shared: None,
            hash: false,
            whole: None,
        }
    }

    pub fn announcement(&self, epoch: u64, with_layout: bool) -> Message {
        let payloads = if with_layout { vec![self.layout.clone()] } else { Vec::new() };
        (encode(&FromPublisher::Announce(self.announce(epoch))), payloads)
    }

    pub fn chunk_message(&self, epoch: u64, index: u64) -> Message {
        let payload = self.chunk(index).to_vec();
        let chunk =
            Chunk { model: MODEL.to_owned(), epoch, version: self.number, index, crc: crc32c(&payload) };
        (encode(&FromPublisher::Chunk(chunk)), vec![payload])
    }

    fn of_version(&self, epoch: u64) -> OfVersion {
        OfVersion { model: MODEL.to_owned(), epoch, version: self.number, digest: self.digest() }
    }

    pub fn end(&self, epoch: u64) -> Message {
        (encode(&FromPublisher::End(self.of_version(epoch))), Vec::new())
    }

    pub fn commit_message(&self, epoch: u64) -> Message {
        (encode(&FromPublisher::Commit(self.of_version(epoch))), Vec::new())
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
        let whole = Some(Whole { crc: crc32c(&self.data), digest: self.digest() });
        let announce = Announce { whole, ..self.announce(epoch) };
        (encode(&FromPublisher::Announce(announce)), vec![self.data.clone()])
    }
}

/// A safetensors header of this JSON.
pub fn layout(json: &str) -> Vec<u8> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes
}

pub fn welcome(epoch: u64, data: &str, models: BTreeMap<String, u64>) -> Message {
    let welcome = Welcome {
        epoch,
        data: data.to_owned(),
        ping_ms: 1000,
        lost_ms: 5000,
        models,
        shared: None,
        age_ms: 0,
        features: Vec::new(),
    };
    (encode(&FromPublisher::Welcome(welcome)), Vec::new())
}

fn refuse(code: &str, fetch: Option<&Fetch>) -> Message {
    let refuse = Refuse {
        code: code.to_owned(),
        text: "as the test has it".to_owned(),
        model: fetch.map(|fetch| fetch.model.clone()),
        epoch: fetch.map_or(0, |fetch| fetch.epoch),
        version: fetch.map_or(0, |fetch| fetch.version),
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
    pub applied: Vec<OfVersion>,
    pub failed: Vec<Failed>,
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
            left: false,
        }
    }

    /// Publishes a version; returns what goes out on the data channel.
    pub fn publish(&mut self, version: Version, with_layout: bool) -> Vec<Message> {
        let messages = version.pushed(self.epoch, with_layout);
        self.undecided = None;
        match version.commit {
            CommitMode::Auto => self.latest = Some(version),
            CommitMode::Together => self.undecided = Some(version),
        }
        messages
    }

    pub fn beacon(&self) -> Message {
        let version = self.latest.as_ref().map_or(0, |version| version.number);
        let beacon = Beacon { model: MODEL.to_owned(), epoch: self.epoch, version };
        (encode(&FromPublisher::Beacon(beacon)), Vec::new())
    }

    fn models(&self) -> BTreeMap<String, u64> {
        self.latest.iter().map(|version| (MODEL.to_owned(), version.number)).collect()
    }

    /// Answers what a worker said.
    pub fn hear(&mut self, header: &[u8]) -> Vec<Message> {
        let message = from_worker(header, 0).expect("a worker sends valid messages");
        let first = matches!(message, FromWorker::Hello(_) | FromWorker::Bye);
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
                let pong = Pong { token: ping.token, epoch: self.epoch, models: self.models() };
                vec![(encode(&FromPublisher::Pong(pong)), Vec::new())]
            }
            FromWorker::Fetch(fetch) => self.fetched(&fetch),
            FromWorker::Staged(staged) => self.staged(&staged),
            FromWorker::Applied(applied) => {
                self.applied.push(applied);
                Vec::new()
            }
            FromWorker::Failed(failed) => {
                self.failed.push(failed);
                Vec::new()
            }
            FromWorker::Bye => {
                self.left = true;
                Vec::new()
            }
            FromWorker::Progress(_) | FromWorker::Pong(_) => Vec::new(),
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
        if fetch.count == 0 {
            return vec![version.announcement(self.epoch, fetch.layout), version.end(self.epoch)];
        }
        if number == 0 || fetch.first + fetch.count > version.plan().count() {
            return vec![refuse("range", Some(fetch))];
        }
        let indexes = fetch.first..fetch.first + fetch.count;
        indexes.map(|index| version.chunk_message(self.epoch, index)).collect()
    }

    /// One worker is enough to commit.
    fn staged(&mut self, staged: &OfVersion) -> Vec<Message> {
        if self.undecided.as_ref().map(|version| version.number) == Some(staged.version) {
            self.latest =
                self.undecided.take().map(|version| Version { commit: CommitMode::Auto, ..version });
        }
        let found = self.latest.as_ref().filter(|version| version.number == staged.version);
        found.map(|version| version.commit_message(self.epoch)).into_iter().collect()
    }
}
