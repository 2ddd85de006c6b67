// Made by `make protocol`; do not edit.
//! The messages of WBP/1, and the objects in them: structs, and their readers.

use crate::fields::*;
use crate::messages::Received;
use crate::protocol::limits::*;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// The words of the field `phase`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProgressPhase {
    Applying,
    #[default]
    Receiving,
    Staged,
}

/// The words of the field `commit`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AnnounceCommit {
    #[default]
    Auto,
    Together,
}

/// The words of the field `acknowledge`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AnnounceAcknowledge {
    #[default]
    Applied,
    Staged,
}

/// The words of the field `state`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WorkerRowState {
    #[default]
    Live,
    Lost,
    Stuck,
}

/// The words of the field `road`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WorkerRowRoad {
    #[default]
    Pulled,
    Pushed,
    Shared,
}

/// A version that a worker runs. `digest` is empty if the worker did not hash the version.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Running {
    /// The epoch of the version.
    pub epoch: u64,
    /// Its number.
    pub version: u64,
    /// The digest that the worker reported in `applied`.
    pub digest: String,
}

impl Running {
    fn read(fields: &Fields) -> Result<Running, Fault> {
        Ok(Running {
            epoch: fields.required("epoch", count)?,
            version: fields.required("version", positive)?,
            digest: fields.required("digest", hex_or_empty(64))?,
        })
    }
}

/// Another publisher that has some chunks of a version, which its own publisher may lack.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Source {
    /// The control address of the source.
    pub address: String,
    /// The chunks that the source has: first and count of each range, in turn.
    pub chunks: Vec<u64>,
}

impl Source {
    fn read(fields: &Fields) -> Result<Source, Fault> {
        Ok(Source {
            address: fields.required("address", text(TEXT_MAX))?,
            chunks: fields.required("chunks", array(SOURCE_RANGES_MAX, within(0..=CHUNKS_MAX)))?,
        })
    }
}

/// The checksum and digest of a version whose only chunk is sent in its announcement.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Whole {
    /// The CRC of the payload.
    pub crc: u32,
    /// The digest of the version.
    pub digest: String,
}

impl Whole {
    fn read(fields: &Fields) -> Result<Whole, Fault> {
        Ok(Whole { crc: fields.required("crc", uint32)?, digest: fields.required("digest", hex(64))? })
    }
}

/// A segment of shared memory: its path, and the token that the segment must contain.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Shared {
    /// The path to open. A path that S4 does not permit is not malformed.
    pub path: String,
    /// The token in the segment.
    pub token: String,
}

impl Shared {
    fn read(fields: &Fields) -> Result<Shared, Fault> {
        Ok(Shared {
            path: fields.required("path", text(TEXT_MAX))?,
            token: fields.required("token", hex(32))?,
        })
    }
}

/// The id of a patch to a version: its encoding, and the base that it builds on.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PatchId {
    /// `delta-1`.
    pub encoding: String,
    /// The epoch of the base.
    pub epoch: u64,
    /// The number of the base.
    pub version: u64,
}

impl PatchId {
    fn read(fields: &Fields) -> Result<PatchId, Fault> {
        Ok(PatchId {
            encoding: fields.required("encoding", name)?,
            epoch: fields.required("epoch", count)?,
            version: fields.required("version", positive)?,
        })
    }
}

/// A patch that a publisher offers: its id, the digest of its base, and its size.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Patch {
    /// As in `patchid`.
    pub encoding: String,
    /// As in `patchid`.
    pub epoch: u64,
    /// As in `patchid`.
    pub version: u64,
    /// The digest of the base.
    pub digest: String,
    /// Bytes of the patch, which is cut into chunks of `chunk_bytes`.
    pub nbytes: u64,
}

impl Patch {
    fn read(fields: &Fields) -> Result<Patch, Fault> {
        Ok(Patch {
            encoding: fields.required("encoding", name)?,
            epoch: fields.required("epoch", count)?,
            version: fields.required("version", positive)?,
            digest: fields.required("digest", hex(64))?,
            nbytes: fields.required("nbytes", positive)?,
        })
    }
}

/// A model's latest version for all workers, and the ages of this and earlier versions.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ModelRow {
    /// The model.
    pub name: String,
    /// Its latest version for all.
    pub version: u64,
    /// Bytes of that version.
    pub nbytes: u64,
    /// Its encoding.
    pub encoding: String,
    /// When that version and some before it were published.
    #[serde(skip_serializing_if = "is_default")]
    pub published: Vec<Published>,
    /// Metadata of the latest version.
    #[serde(skip_serializing_if = "is_default")]
    pub metadata: BTreeMap<String, String>,
}

/// A version, and how long ago it was published.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Published {
    /// A version of the publisher's epoch.
    pub version: u64,
    /// Its age.
    pub age_ms: u64,
}

/// A worker, and the state of each of its models.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct WorkerRow {
    /// The worker.
    pub name: String,
    /// P14, P18.
    pub state: WorkerRowState,
    /// How versions reach the worker: `shared` or `pushed` if that field, or `subscribed`, of its
    /// last `ping` was true; else `pulled`.
    pub road: WorkerRowRoad,
    /// The age of its last message.
    pub heard_ms: u64,
    /// Its models.
    pub models: BTreeMap<String, Doing>,
    /// That of its `hello`.
    #[serde(skip_serializing_if = "is_default")]
    pub client: String,
    /// That of its `hello`.
    #[serde(skip_serializing_if = "is_default")]
    pub host: String,
    /// That of its `hello`.
    #[serde(skip_serializing_if = "is_default")]
    pub pid: u64,
    /// In `below`: that of its `hello`.
    #[serde(skip_serializing_if = "is_default")]
    pub instance: String,
    /// The worker is a relay.
    #[serde(skip_serializing_if = "is_default")]
    pub relay: bool,
    /// The relays between the publisher and the worker, the nearest to the publisher first.
    #[serde(skip_serializing_if = "is_default")]
    pub through: Vec<String>,
}

impl WorkerRow {
    fn read(fields: &Fields) -> Result<WorkerRow, Fault> {
        Ok(WorkerRow {
            name: fields.required("name", name)?,
            state: fields.required("state", word)?,
            road: fields.required("road", word)?,
            heard_ms: fields.required("heard_ms", count)?,
            models: fields.required("models", map(MODELS_MAX, name, object(Doing::read)))?,
            client: fields.optional("client", text(LABEL_MAX))?,
            host: fields.optional("host", text(LABEL_MAX))?,
            pid: fields.optional("pid", count)?,
            instance: fields.optional("instance", hex_or_empty(32))?,
            relay: fields.optional("relay", boolean)?,
            through: fields.optional("through", array(RELAYS_MAX, name))?,
        })
    }
}

/// The state of a model at a worker: which versions run, arrive, or have failed.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Doing {
    /// Of the running version.
    #[serde(skip_serializing_if = "is_default")]
    pub epoch: u64,
    /// The running version; 0: none.
    #[serde(skip_serializing_if = "is_default")]
    pub version: u64,
    /// The newest version for this worker when the row was made; see also `models`.
    #[serde(skip_serializing_if = "is_default")]
    pub newest: u64,
    /// Microseconds from the publish of the running version to its `applied`; 0: unknown.
    #[serde(skip_serializing_if = "is_default")]
    pub took_us: u64,
    /// The version that the worker receives, has staged or applies; 0: none.
    #[serde(skip_serializing_if = "is_default")]
    pub incoming: u64,
    /// The phase of that version; empty: none.
    #[serde(skip_serializing_if = "is_default")]
    pub phase: Option<ProgressPhase>,
    /// The chunks of that version that the worker has.
    #[serde(skip_serializing_if = "is_default")]
    pub chunks: u64,
    /// All chunks of that version.
    #[serde(skip_serializing_if = "is_default")]
    pub count: u64,
    /// Milliseconds since `phase` or `chunks` last changed.
    #[serde(skip_serializing_if = "is_default")]
    pub idle_ms: u64,
    /// The last failed version, if no newer version runs; 0: none.
    #[serde(skip_serializing_if = "is_default")]
    pub failed: u64,
    /// Code and text of that `failed`.
    #[serde(skip_serializing_if = "is_default")]
    pub error: String,
    /// In `below`: the patch by which the running version arrived; null: it arrived whole, or
    /// `took_us` is 0.
    #[serde(skip_serializing_if = "is_default")]
    pub patch: Option<PatchId>,
    /// In `below`: the patch by which `incoming` arrives or has arrived; null: it arrives whole.
    #[serde(skip_serializing_if = "is_default")]
    pub incoming_patch: Option<PatchId>,
}

impl Doing {
    fn read(fields: &Fields) -> Result<Doing, Fault> {
        Ok(Doing {
            epoch: fields.optional("epoch", count)?,
            version: fields.optional("version", count)?,
            newest: fields.optional("newest", count)?,
            took_us: fields.optional("took_us", count)?,
            incoming: fields.optional("incoming", count)?,
            phase: fields.optional("phase", word_or_empty)?,
            chunks: fields.optional("chunks", count)?,
            count: fields.optional("count", count)?,
            idle_ms: fields.optional("idle_ms", count)?,
            failed: fields.optional("failed", count)?,
            error: fields.optional("error", text(ERROR_MAX))?,
            patch: fields.optional("patch", nullable(object(PatchId::read)))?,
            incoming_patch: fields.optional("incoming_patch", nullable(object(PatchId::read)))?,
        })
    }
}

/// An event of a worker. After the event `left`, the worker is no longer on the roster.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Happened {
    /// `joined`, `lost`, `back`, `stuck`, `left`, `refused`, `failed`, `wrong-digest`, or another
    /// word.
    pub kind: String,
    /// The worker; after `left` it is off the roster.
    pub worker: String,
    /// The event in words.
    pub text: String,
    /// Its age.
    pub age_ms: u64,
}

/// A tensor that differs, with the checksums of the published and of the worker's bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Difference {
    /// The tensor's name, cut off there.
    pub name: String,
    /// The CRC of its bytes in the version.
    pub published: u32,
    /// The CRC of its bytes in the model.
    pub runs: u32,
}

/// Request to join. `models` has each model of the worker, with the version that it runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Hello {
    /// The worker's name. A second instance of the name is refused while the first is live (P3).
    pub name: String,
    /// Random; drawn at the start of the process, for all its connections.
    pub instance: String,
    /// The models that the worker wants, each with its running version; null: none runs.
    pub models: BTreeMap<String, Option<Running>>,
    /// The applied epoch: the greatest epoch of which this process applied a version, or wrote a
    /// part of one into a model (W24); 0: none.
    #[serde(skip_serializing_if = "is_default")]
    pub epoch: u64,
    /// Milliseconds since the publisher of the applied epoch started (W1); 0: unknown.
    #[serde(skip_serializing_if = "is_default")]
    pub age_ms: u64,
    /// The optional features that the worker implements.
    #[serde(skip_serializing_if = "is_default")]
    pub features: Vec<String>,
    /// Program and version, for operators.
    #[serde(skip_serializing_if = "is_default")]
    pub client: String,
    /// The worker's host, for operators.
    #[serde(skip_serializing_if = "is_default")]
    pub host: String,
    /// The worker's process, for operators.
    #[serde(skip_serializing_if = "is_default")]
    pub pid: u64,
}

impl Hello {
    fn read(fields: &Fields) -> Result<Hello, Fault> {
        Ok(Hello {
            name: fields.required("name", name)?,
            instance: fields.required("instance", hex(32))?,
            models: fields.required("models", map(MODELS_MAX, name, nullable(object(Running::read))))?,
            epoch: fields.optional("epoch", count)?,
            age_ms: fields.optional("age_ms", count)?,
            features: fields.optional("features", array(FEATURES_MAX, name))?,
            client: fields.optional("client", text(LABEL_MAX))?,
            host: fields.optional("host", text(LABEL_MAX))?,
            pid: fields.optional("pid", count)?,
        })
    }
}

/// Admit a worker, and send the data endpoint, and the latest version of each model.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Welcome {
    /// The publisher's epoch, and the session's.
    pub epoch: u64,
    /// The endpoint of the data channel (level 2).
    pub data: String,
    /// The publisher's interval of pings (W18).
    pub ping_ms: u64,
    /// Milliseconds of silence until the publisher considers a worker lost; for logs.
    pub lost_ms: u64,
    /// For each model, the newest committed version for this worker. A model without a version has
    /// 0 or is missing.
    pub models: BTreeMap<String, u64>,
    /// Milliseconds since the publisher started, or fewer; 0: unknown.
    #[serde(skip_serializing_if = "is_default")]
    pub age_ms: u64,
    /// Values for optional features.
    #[serde(skip_serializing_if = "is_default")]
    pub features: Vec<String>,
    /// The probe (S2); null: the publisher offers no segments.
    #[serde(skip_serializing_if = "is_default")]
    pub shared: Option<Shared>,
    /// The group keys (E2), the newest last; empty: nothing is sealed.
    #[serde(skip_serializing_if = "is_default")]
    pub keys: Vec<String>,
}

impl Welcome {
    fn read(fields: &Fields) -> Result<Welcome, Fault> {
        Ok(Welcome {
            epoch: fields.required("epoch", count)?,
            data: fields.required("data", text(TEXT_MAX))?,
            ping_ms: fields.required("ping_ms", within(1..=3_600_000))?,
            lost_ms: fields.required("lost_ms", within(2..=36_000_000))?,
            models: fields.required("models", map(MODELS_MAX, name, count))?,
            age_ms: fields.optional("age_ms", count)?,
            features: fields.optional("features", array(FEATURES_MAX, name))?,
            shared: fields.optional("shared", nullable(object(Shared::read)))?,
            keys: fields.optional("keys", array(GROUP_KEYS_MAX, hex(64)))?,
        })
    }
}

/// Request a pong. A worker adds whether it receives pushes and reads shared memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Ping {
    /// Returned in the `pong`.
    #[serde(skip_serializing_if = "is_default")]
    pub token: u64,
    /// Of a worker: W18 at level 2.
    #[serde(skip_serializing_if = "is_default")]
    pub subscribed: bool,
    /// Of a worker: it uses shared memory in this session (S2).
    #[serde(skip_serializing_if = "is_default")]
    pub shared: bool,
}

impl Ping {
    fn read(fields: &Fields) -> Result<Ping, Fault> {
        Ok(Ping {
            token: fields.optional("token", count)?,
            subscribed: fields.optional("subscribed", boolean)?,
            shared: fields.optional("shared", boolean)?,
        })
    }
}

/// Answer a ping. A publisher adds the latest version of each of the worker's models.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Pong {
    /// That of the `ping`.
    #[serde(skip_serializing_if = "is_default")]
    pub token: u64,
    /// Of a publisher: its epoch; of a worker: 0.
    #[serde(skip_serializing_if = "is_default")]
    pub epoch: u64,
    /// Of a publisher: as in `welcome`.
    #[serde(skip_serializing_if = "is_default")]
    pub models: BTreeMap<String, u64>,
    /// Of a relay: milliseconds since it, or a relay above it, lost the publisher above (R3); 0:
    /// neither has.
    #[serde(skip_serializing_if = "is_default")]
    pub cut_off_ms: u64,
}

impl Pong {
    fn read(fields: &Fields) -> Result<Pong, Fault> {
        Ok(Pong {
            token: fields.optional("token", count)?,
            epoch: fields.optional("epoch", count)?,
            models: fields.optional("models", map(MODELS_MAX, name, count))?,
            cut_off_ms: fields.optional("cut_off_ms", count)?,
        })
    }
}

/// Request `count` chunks of a version, from index `first` on; with 0, its announcement.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Fetch {
    /// The model.
    pub model: String,
    /// The session's epoch.
    pub epoch: u64,
    /// The version; 0: the newest committed version for this worker. With `version` 0, `count` is
    /// 0.
    pub version: u64,
    /// The first chunk.
    #[serde(skip_serializing_if = "is_default")]
    pub first: u64,
    /// The number of chunks. 0: the publisher answers with the announcement and the `end`.
    #[serde(skip_serializing_if = "is_default")]
    pub count: u64,
    /// With `count` 0: whether the announcement carries the layout.
    #[serde(skip_serializing_if = "is_default")]
    pub layout: bool,
    /// The requested patch (D8).
    #[serde(skip_serializing_if = "is_default")]
    pub patch: Option<PatchId>,
    /// Why the version is fetched whole although it has patches (D10).
    #[serde(skip_serializing_if = "is_default")]
    pub unpatched: String,
    /// The bytes that the worker needs of these chunks (T2); empty: all.
    #[serde(skip_serializing_if = "is_default")]
    pub ranges: Vec<u64>,
    /// With `count` 0: the publisher answers with `checksums` (T4).
    #[serde(skip_serializing_if = "is_default")]
    pub checksums: bool,
}

impl Fetch {
    fn read(fields: &Fields) -> Result<Fetch, Fault> {
        Ok(Fetch {
            model: fields.required("model", name)?,
            epoch: fields.required("epoch", count)?,
            version: fields.required("version", count)?,
            first: fields.optional("first", within(0..=CHUNKS_MAX - 1))?,
            count: fields.optional("count", within(0..=FETCH_CHUNKS_MAX))?,
            layout: fields.optional("layout", boolean)?,
            patch: fields.optional("patch", nullable(object(PatchId::read)))?,
            unpatched: fields.optional("unpatched", text(LABEL_MAX))?,
            ranges: fields.optional("ranges", array(RANGES_MAX, count))?,
            checksums: fields.optional("checksums", boolean)?,
        })
    }
}

/// Announce a version. The payload may be the layout or, with `whole`, all of its data.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Announce {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    /// The layout id.
    pub layout: String,
    /// The length of the layout, its 8 bytes of length included.
    pub layout_bytes: u64,
    /// The length of the data section.
    pub nbytes: u64,
    /// The length of a chunk.
    pub chunk_bytes: u64,
    /// `auto`: the worker applies the version once it is whole. `together`: level 3.
    pub commit: AnnounceCommit,
    /// `staged`: a worker of level 3 also sends the message `staged` (W14). Other workers ignore
    /// the field.
    pub acknowledge: AnnounceAcknowledge,
    /// `raw`. Other values are reserved.
    pub encoding: String,
    /// Null: not encrypted. `aes-256-gcm`: sealed. Other values are reserved.
    #[serde(skip_serializing_if = "is_default")]
    pub encryption: Option<String>,
    /// The CRC of chunk 0 and the digest, if chunk 0 is the payload.
    #[serde(skip_serializing_if = "is_default")]
    pub whole: Option<Whole>,
    /// The segment that holds the data section; null: there is none.
    #[serde(skip_serializing_if = "is_default")]
    pub shared: Option<Shared>,
    /// A worker that reads the segment reports a digest (S7).
    #[serde(skip_serializing_if = "is_default")]
    pub hash: bool,
    /// The id of the group key that seals this payload (E3).
    #[serde(skip_serializing_if = "is_default")]
    pub key: Option<String>,
    /// The tag of this payload.
    #[serde(skip_serializing_if = "is_default")]
    pub tag: Option<String>,
    /// The version may become the base of a patch (D1, D3).
    #[serde(skip_serializing_if = "is_default")]
    pub keep: bool,
    /// The patches that lead to this version. The first is pushed (D6).
    #[serde(skip_serializing_if = "is_default")]
    pub patches: Vec<Patch>,
    /// Texts about the version.
    #[serde(skip_serializing_if = "is_default")]
    pub metadata: BTreeMap<String, String>,
    /// To a relay: the version is only for these workers behind it (R8). Empty: for all.
    #[serde(skip_serializing_if = "is_default")]
    pub workers: Vec<String>,
    /// The sources of the version, and the chunks that each has (N1).
    #[serde(skip_serializing_if = "is_default")]
    pub sources: Vec<Source>,
    /// The numbers of the versions of other models that are published as one with this version.
    #[serde(skip_serializing_if = "is_default")]
    pub companions: BTreeMap<String, u64>,
}

impl Announce {
    fn read(fields: &Fields) -> Result<Announce, Fault> {
        Ok(Announce {
            model: fields.required("model", name)?,
            epoch: fields.required("epoch", count)?,
            version: fields.required("version", positive)?,
            layout: fields.required("layout", hex(64))?,
            layout_bytes: fields.required("layout_bytes", within(10..=LAYOUT_BYTES_MAX + 8))?,
            nbytes: fields.required("nbytes", count)?,
            chunk_bytes: fields.required("chunk_bytes", within(CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX))?,
            commit: fields.required("commit", word)?,
            acknowledge: fields.required("acknowledge", word)?,
            encoding: fields.required("encoding", name)?,
            encryption: fields.optional("encryption", nullable(name))?,
            whole: fields.optional("whole", nullable(object(Whole::read)))?,
            shared: fields.optional("shared", nullable(object(Shared::read)))?,
            hash: fields.optional("hash", boolean)?,
            key: fields.optional("key", nullable(hex(16)))?,
            tag: fields.optional("tag", nullable(hex(32)))?,
            keep: fields.optional("keep", boolean)?,
            patches: fields.optional("patches", array(PATCHES_MAX, object(Patch::read)))?,
            metadata: fields
                .optional("metadata", map(METADATA_MAX, text(METADATA_NAME_MAX), text(TEXT_MAX)))?,
            workers: fields.optional("workers", array(NAMED_MAX, name))?,
            sources: fields.optional("sources", array(SOURCES_MAX, object(Source::read)))?,
            companions: fields.optional("companions", map(MODELS_MAX, name, count))?,
        })
    }
}

/// One chunk of a version's data section. The payload is the chunk.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Chunk {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    /// The number of the chunk.
    pub index: u64,
    /// The CRC of the payload.
    pub crc: u32,
    /// The patch that the chunk belongs to (D9).
    #[serde(skip_serializing_if = "is_default")]
    pub patch: Option<PatchId>,
}

impl Chunk {
    fn read(fields: &Fields) -> Result<Chunk, Fault> {
        Ok(Chunk {
            model: fields.required("model", name)?,
            epoch: fields.required("epoch", count)?,
            version: fields.required("version", positive)?,
            index: fields.required("index", within(0..=CHUNKS_MAX - 1))?,
            crc: fields.required("crc", uint32)?,
            patch: fields.optional("patch", nullable(object(PatchId::read)))?,
        })
    }
}

/// The bytes of a chunk that a worker needs. The payload is these bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Piece {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    /// The number of the chunk.
    pub index: u64,
    /// The CRC of the payload.
    pub crc: u32,
    /// The CRC of the chunk, in which the bytes of the payload are zero.
    pub rest: u32,
}

impl Piece {
    fn read(fields: &Fields) -> Result<Piece, Fault> {
        Ok(Piece {
            model: fields.required("model", name)?,
            epoch: fields.required("epoch", count)?,
            version: fields.required("version", positive)?,
            index: fields.required("index", within(0..=CHUNKS_MAX - 1))?,
            crc: fields.required("crc", uint32)?,
            rest: fields.required("rest", uint32)?,
        })
    }
}

/// The CRC of each chunk of a version. The payload has 4 bytes, little-endian, for each.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Checksums {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
}

impl Checksums {
    fn read(fields: &Fields) -> Result<Checksums, Fault> {
        Ok(Checksums {
            model: fields.required("model", name)?,
            epoch: fields.required("epoch", count)?,
            version: fields.required("version", positive)?,
        })
    }
}

/// End the push of a version, and send its digest.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct End {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    /// The digest of the version.
    pub digest: String,
    /// The patch whose chunks this `end` follows (D9). `digest` is always that of the version.
    #[serde(skip_serializing_if = "is_default")]
    pub patch: Option<PatchId>,
}

impl End {
    fn read(fields: &Fields) -> Result<End, Fault> {
        Ok(End {
            model: fields.required("model", name)?,
            epoch: fields.required("epoch", count)?,
            version: fields.required("version", positive)?,
            digest: fields.required("digest", hex(64))?,
            patch: fields.optional("patch", nullable(object(PatchId::read)))?,
        })
    }
}

/// Report that the worker runs a version. `digest` is empty if the version was not hashed.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Applied {
    pub model: String,
    pub epoch: u64,
    /// The version that the worker runs.
    pub version: u64,
    /// The digest that the worker computed. Empty only with shared memory.
    pub digest: String,
    /// A remark about this version, for the publisher's user.
    #[serde(skip_serializing_if = "is_default")]
    pub note: String,
    /// As in `staged`.
    #[serde(skip_serializing_if = "is_default")]
    pub patch: Option<PatchId>,
    /// The time to decode the patch, in microseconds (D11); 0: not given.
    #[serde(skip_serializing_if = "is_default")]
    pub decode_us: u64,
}

impl Applied {
    fn read(fields: &Fields) -> Result<Applied, Fault> {
        Ok(Applied {
            model: fields.required("model", name)?,
            epoch: fields.required("epoch", count)?,
            version: fields.required("version", positive)?,
            digest: fields.required("digest", hex_or_empty(64))?,
            note: fields.optional("note", text(TEXT_MAX))?,
            patch: fields.optional("patch", nullable(object(PatchId::read)))?,
            decode_us: fields.optional("decode_us", count)?,
        })
    }
}

/// Report that a version failed. `intact` is true if the previous version still runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Failed {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    /// A code.
    pub code: String,
    /// The reason in words; at most 20 lines on tensors that differ.
    pub text: String,
    /// False: an apply failed half-way, so the worker runs no version of the model (W24).
    #[serde(skip_serializing_if = "is_default_failed_intact")]
    pub intact: bool,
}

impl Default for Failed {
    fn default() -> Failed {
        Failed {
            model: Default::default(),
            epoch: Default::default(),
            version: Default::default(),
            code: Default::default(),
            text: Default::default(),
            intact: true,
        }
    }
}

impl Failed {
    fn read(fields: &Fields) -> Result<Failed, Fault> {
        Ok(Failed {
            model: fields.required("model", name)?,
            epoch: fields.required("epoch", count)?,
            version: fields.required("version", positive)?,
            code: fields.required("code", name)?,
            text: fields.required("text", text(TEXT_MAX))?,
            intact: fields.or("intact", true, boolean)?,
        })
    }
}

/// Refuse a worker or a message, with the reason.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Refuse {
    /// A code.
    pub code: String,
    /// The reason in words.
    pub text: String,
    /// Of a refused `fetch`: its model.
    #[serde(skip_serializing_if = "is_default")]
    pub model: Option<String>,
    /// Of a refused `fetch`: its epoch; 0: not given.
    #[serde(skip_serializing_if = "is_default")]
    pub epoch: u64,
    /// Of a refused `fetch`: its version.
    #[serde(skip_serializing_if = "is_default")]
    pub version: u64,
}

impl Refuse {
    fn read(fields: &Fields) -> Result<Refuse, Fault> {
        Ok(Refuse {
            code: fields.required("code", name)?,
            text: fields.required("text", text(TEXT_MAX))?,
            model: fields.optional("model", nullable(name))?,
            epoch: fields.optional("epoch", count)?,
            version: fields.optional("version", count)?,
        })
    }
}

/// Leave the session.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Bye {}

impl Bye {
    fn read(_fields: &Fields) -> Result<Bye, Fault> {
        Ok(Bye {})
    }
}

/// Repeat the number of a model's latest version (0: none yet).
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Beacon {
    /// The model.
    pub model: String,
    /// The publisher's epoch.
    pub epoch: u64,
    /// The newest committed version for all workers; 0: none.
    pub version: u64,
}

impl Beacon {
    fn read(fields: &Fields) -> Result<Beacon, Fault> {
        Ok(Beacon {
            model: fields.required("model", name)?,
            epoch: fields.required("epoch", count)?,
            version: fields.required("version", count)?,
        })
    }
}

/// Report how many chunks of a version have arrived, and what the worker does with it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Progress {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    /// With phase `receiving`: the number of valid chunks that the worker has, pushed or fetched.
    /// With other phases: 0.
    pub chunks: u64,
    /// `applying`: the version is being applied. `receiving`: it is arriving. `staged`: it is
    /// ready, and the user has not begun to apply it.
    #[serde(skip_serializing_if = "is_default")]
    pub phase: ProgressPhase,
    /// With `staged`: why the version cannot be applied yet.
    #[serde(skip_serializing_if = "is_default")]
    pub waits: String,
    /// The patch by which the version arrives (D9), and whose chunks `chunks` counts.
    #[serde(skip_serializing_if = "is_default")]
    pub patch: Option<PatchId>,
}

impl Progress {
    fn read(fields: &Fields) -> Result<Progress, Fault> {
        Ok(Progress {
            model: fields.required("model", name)?,
            epoch: fields.required("epoch", count)?,
            version: fields.required("version", positive)?,
            chunks: fields.required("chunks", count)?,
            phase: fields.optional("phase", word)?,
            waits: fields.optional("waits", text(LABEL_MAX))?,
            patch: fields.optional("patch", nullable(object(PatchId::read)))?,
        })
    }
}

/// Report that a version is complete and verified, and not applied yet.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Staged {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    /// The digest that the worker computed.
    pub digest: String,
    /// The patch by which the version arrived (D9).
    #[serde(skip_serializing_if = "is_default")]
    pub patch: Option<PatchId>,
}

impl Staged {
    fn read(fields: &Fields) -> Result<Staged, Fault> {
        Ok(Staged {
            model: fields.required("model", name)?,
            epoch: fields.required("epoch", count)?,
            version: fields.required("version", positive)?,
            digest: fields.required("digest", hex(64))?,
            patch: fields.optional("patch", nullable(object(PatchId::read)))?,
        })
    }
}

/// Allow workers to apply the version that they have staged.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Commit {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    /// The digest of the version.
    pub digest: String,
}

impl Commit {
    fn read(fields: &Fields) -> Result<Commit, Fault> {
        Ok(Commit {
            model: fields.required("model", name)?,
            epoch: fields.required("epoch", count)?,
            version: fields.required("version", positive)?,
            digest: fields.required("digest", hex(64))?,
        })
    }
}

/// Make workers drop the version that they have staged.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Abort {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    /// The reason.
    #[serde(skip_serializing_if = "is_default")]
    pub text: String,
}

impl Abort {
    fn read(fields: &Fields) -> Result<Abort, Fault> {
        Ok(Abort {
            model: fields.required("model", name)?,
            epoch: fields.required("epoch", count)?,
            version: fields.required("version", positive)?,
            text: fields.optional("text", text(TEXT_MAX))?,
        })
    }
}

/// Announce the segment in which the first version of a model will be.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Prepare {
    /// The model.
    pub model: String,
    /// The publisher's epoch.
    pub epoch: u64,
    /// The length of the data section.
    pub nbytes: u64,
    /// The segment.
    pub shared: Shared,
}

impl Prepare {
    fn read(fields: &Fields) -> Result<Prepare, Fault> {
        Ok(Prepare {
            model: fields.required("model", name)?,
            epoch: fields.required("epoch", count)?,
            nbytes: fields.required("nbytes", count)?,
            shared: fields.required("shared", object(Shared::read))?,
        })
    }
}

/// One encrypted chunk of a version's data section. The payload is the encrypted chunk.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SealedChunk {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    /// The number of the chunk.
    pub index: u64,
    /// The id of the group key.
    pub key: String,
    /// The tag of the payload.
    pub tag: String,
    /// As in `chunk`.
    #[serde(skip_serializing_if = "is_default")]
    pub patch: Option<PatchId>,
}

impl SealedChunk {
    fn read(fields: &Fields) -> Result<SealedChunk, Fault> {
        Ok(SealedChunk {
            model: fields.required("model", name)?,
            epoch: fields.required("epoch", count)?,
            version: fields.required("version", positive)?,
            index: fields.required("index", within(0..=CHUNKS_MAX - 1))?,
            key: fields.required("key", hex(16))?,
            tag: fields.required("tag", hex(32))?,
            patch: fields.optional("patch", nullable(object(PatchId::read)))?,
        })
    }
}

/// An encrypted announcement (its payload is not in `sealed`), end or beacon for all.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SealedMessage {
    /// The id of the group key.
    pub key: String,
    /// Increases with each message under one group key (E5).
    pub count: u64,
    /// The sealed header of the inner message and its tag, in base64 with padding.
    pub sealed: String,
}

impl SealedMessage {
    fn read(fields: &Fields) -> Result<SealedMessage, Fault> {
        Ok(SealedMessage {
            key: fields.required("key", hex(16))?,
            count: fields.required("count", positive)?,
            sealed: fields.required("sealed", base64(HEADER_BYTES_MAX))?,
        })
    }
}

/// Send the group keys. The last one encrypts messages from now on.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Rekey {
    /// The publisher's epoch.
    pub epoch: u64,
    /// The group keys, as in `welcome`.
    pub keys: Vec<String>,
}

impl Rekey {
    fn read(fields: &Fields) -> Result<Rekey, Fault> {
        Ok(Rekey {
            epoch: fields.required("epoch", count)?,
            keys: fields.required("keys", array(GROUP_KEYS_MAX, hex(64)))?,
        })
    }
}

/// Give the running version `was` another epoch and number; the bytes are equal.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Rename {
    pub model: String,
    pub epoch: u64,
    /// The new name.
    pub version: u64,
    /// The version that the worker runs, as in its `hello`.
    pub was: Running,
    /// Metadata of the new name; replaces the old.
    #[serde(skip_serializing_if = "is_default")]
    pub metadata: BTreeMap<String, String>,
}

impl Rename {
    fn read(fields: &Fields) -> Result<Rename, Fault> {
        Ok(Rename {
            model: fields.required("model", name)?,
            epoch: fields.required("epoch", count)?,
            version: fields.required("version", positive)?,
            was: fields.required("was", object(Running::read))?,
            metadata: fields
                .optional("metadata", map(METADATA_MAX, text(METADATA_NAME_MAX), text(TEXT_MAX)))?,
        })
    }
}

/// Report the workers behind a relay that changed, and those that left.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Below {
    /// The session's epoch.
    pub epoch: u64,
    /// The report starts from the beginning: workers that neither this message nor the following
    /// ones name are no longer behind the relay.
    #[serde(skip_serializing_if = "is_default")]
    pub first: bool,
    /// Another `below` continues this one.
    #[serde(skip_serializing_if = "is_default")]
    pub more: bool,
    /// Workers that joined or changed; each replaces its earlier row.
    #[serde(skip_serializing_if = "is_default")]
    pub rows: Vec<WorkerRow>,
    /// Workers that left.
    #[serde(skip_serializing_if = "is_default")]
    pub left: Vec<String>,
}

impl Below {
    fn read(fields: &Fields) -> Result<Below, Fault> {
        Ok(Below {
            epoch: fields.required("epoch", count)?,
            first: fields.optional("first", boolean)?,
            more: fields.optional("more", boolean)?,
            rows: fields.optional("rows", array(PAGE_ROWS_MAX, object(WorkerRow::read)))?,
            left: fields.optional("left", array(PAGE_ROWS_MAX, name))?,
        })
    }
}

/// Request the changes since revision `since` of an epoch, in at most `pages` pages.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Observe {
    /// That of the last `roster`; 0: none.
    #[serde(skip_serializing_if = "is_default")]
    pub epoch: u64,
    /// The `revision` of the last `roster`; 0: from the beginning.
    #[serde(skip_serializing_if = "is_default")]
    pub since: u64,
    /// How many `roster` messages may answer this `observe`.
    #[serde(skip_serializing_if = "is_default_observe_pages")]
    pub pages: u64,
}

impl Default for Observe {
    fn default() -> Observe {
        Observe { epoch: Default::default(), since: Default::default(), pages: 1 }
    }
}

impl Observe {
    fn read(fields: &Fields) -> Result<Observe, Fault> {
        Ok(Observe {
            epoch: fields.optional("epoch", count)?,
            since: fields.optional("since", count)?,
            pages: fields.or("pages", 1, positive)?,
        })
    }
}

/// The changes since the revision `since`, up to the revision `revision`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RosterPage {
    /// The publisher's epoch.
    pub epoch: u64,
    /// The revision after which this message starts: that of the `observe`, or of the message
    /// before in this answer. 0: it starts from the beginning, and the observer forgets all earlier
    /// answers.
    pub since: u64,
    /// The `since` of the next message or `observe`.
    pub revision: u64,
    /// The newest revision.
    pub latest: u64,
    /// The number of workers, lost ones included.
    pub workers: u64,
    /// More changes exist. If `follows` is false, the observer sends `observe` again to get them.
    #[serde(skip_serializing_if = "is_default")]
    pub more: bool,
    /// Another `roster` of this answer follows.
    #[serde(skip_serializing_if = "is_default")]
    pub follows: bool,
    /// The publisher's clock, in milliseconds since 1970; 0: not given.
    #[serde(skip_serializing_if = "is_default")]
    pub time_ms: u64,
    /// Models with a version since then; each replaces its earlier row.
    #[serde(skip_serializing_if = "is_default")]
    pub models: Vec<ModelRow>,
    /// Workers that joined or changed; likewise.
    #[serde(skip_serializing_if = "is_default")]
    pub rows: Vec<WorkerRow>,
    /// Events of workers; the observer handles them before `rows`.
    #[serde(skip_serializing_if = "is_default")]
    pub events: Vec<Happened>,
}

/// Request the checksums of a worker's present weights, from tensor number `first` on.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Check {
    pub model: String,
    pub epoch: u64,
    /// The version that the worker runs, as far as the publisher knows.
    pub version: u64,
    /// The number of the first name, from 0, in the order of all names (aliases included) sorted by
    /// their UTF-8.
    #[serde(skip_serializing_if = "is_default")]
    pub first: u64,
}

impl Check {
    fn read(fields: &Fields) -> Result<Check, Fault> {
        Ok(Check {
            model: fields.required("model", name)?,
            epoch: fields.required("epoch", count)?,
            version: fields.required("version", positive)?,
            first: fields.optional("first", count)?,
        })
    }
}

/// Answer a check: the CRC-32C of each tensor (null: not comparable), or the reason for none.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Checked {
    pub model: String,
    pub epoch: u64,
    /// Those of the `check`.
    pub version: u64,
    /// That of the `check`.
    #[serde(skip_serializing_if = "is_default")]
    pub first: u64,
    /// For each name from `first`: the CRC of its bytes in the model, as they would lie in a
    /// version; null: not comparable.
    #[serde(skip_serializing_if = "is_default")]
    pub sums: Vec<Option<u32>>,
    /// Why there are no sums; null: there are.
    #[serde(skip_serializing_if = "is_default")]
    pub code: Option<String>,
    /// The same in words.
    #[serde(skip_serializing_if = "is_default")]
    pub text: String,
}

impl Checked {
    fn read(fields: &Fields) -> Result<Checked, Fault> {
        Ok(Checked {
            model: fields.required("model", name)?,
            epoch: fields.required("epoch", count)?,
            version: fields.required("version", positive)?,
            first: fields.optional("first", count)?,
            sums: fields.optional("sums", array(CHECK_NAMES_MAX, nullable(uint32)))?,
            code: fields.optional("code", nullable(name))?,
            text: fields.optional("text", text(TEXT_MAX))?,
        })
    }
}

/// Request a comparison of a worker's weights with the published weights.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Verify {
    /// The worker.
    pub worker: String,
    /// The model.
    pub model: String,
    /// As in `check`.
    #[serde(skip_serializing_if = "is_default")]
    pub first: u64,
}

impl Verify {
    fn read(fields: &Fields) -> Result<Verify, Fault> {
        Ok(Verify {
            worker: fields.required("worker", name)?,
            model: fields.required("model", name)?,
            first: fields.optional("first", count)?,
        })
    }
}

/// Answer a verify: how many tensors were compared, and which of them differ.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Verified {
    /// That of the `verify`.
    pub worker: String,
    /// That of the `verify`.
    pub model: String,
    /// Of the version that the worker runs; 0: nothing was compared.
    #[serde(skip_serializing_if = "is_default")]
    pub epoch: u64,
    /// The version that the worker runs; 0: nothing was compared.
    #[serde(skip_serializing_if = "is_default")]
    pub version: u64,
    /// That of the `verify`.
    #[serde(skip_serializing_if = "is_default")]
    pub first: u64,
    /// How many names this answer covers.
    #[serde(skip_serializing_if = "is_default")]
    pub count: u64,
    /// How many names the version has.
    #[serde(skip_serializing_if = "is_default")]
    pub names: u64,
    /// How many of the covered names are not comparable.
    #[serde(skip_serializing_if = "is_default")]
    pub unlike: u64,
    /// How many of them differ.
    #[serde(skip_serializing_if = "is_default")]
    pub differing: u64,
    /// The first names that differ.
    #[serde(skip_serializing_if = "is_default")]
    pub differences: Vec<Difference>,
    /// Why nothing was compared; null: it was.
    #[serde(skip_serializing_if = "is_default")]
    pub code: Option<String>,
    /// The same in words.
    #[serde(skip_serializing_if = "is_default")]
    pub text: String,
}

/// A message from a worker to a publisher.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(clippy::large_enum_variant)]
pub enum FromWorker {
    Hello(Hello),
    Ping(Ping),
    Pong(Pong),
    Fetch(Fetch),
    Applied(Applied),
    Failed(Failed),
    Bye(Bye),
    Progress(Progress),
    Staged(Staged),
    Below(Below),
    Checked(Checked),
}

impl Received for FromWorker {
    fn read(kind: &str, fields: &Fields) -> Result<Option<FromWorker>, Fault> {
        Ok(Some(match kind {
            "hello" => FromWorker::Hello(Hello::read(fields)?),
            "ping" => FromWorker::Ping(Ping::read(fields)?),
            "pong" => FromWorker::Pong(Pong::read(fields)?),
            "fetch" => FromWorker::Fetch(Fetch::read(fields)?),
            "applied" => FromWorker::Applied(Applied::read(fields)?),
            "failed" => FromWorker::Failed(Failed::read(fields)?),
            "bye" => FromWorker::Bye(Bye::read(fields)?),
            "progress" => FromWorker::Progress(Progress::read(fields)?),
            "staged" => FromWorker::Staged(Staged::read(fields)?),
            "below" => FromWorker::Below(Below::read(fields)?),
            "checked" => FromWorker::Checked(Checked::read(fields)?),
            _ => return Ok(None),
        }))
    }

    fn payloads(&self) -> RangeInclusive<usize> {
        0..=0
    }
}

/// A message from a publisher to a worker.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(clippy::large_enum_variant)]
pub enum FromPublisher {
    Welcome(Welcome),
    Ping(Ping),
    Pong(Pong),
    Announce(Announce),
    Chunk(Chunk),
    Piece(Piece),
    Checksums(Checksums),
    End(End),
    Refuse(Refuse),
    Beacon(Beacon),
    Commit(Commit),
    Abort(Abort),
    Prepare(Prepare),
    SealedChunk(SealedChunk),
    SealedMessage(SealedMessage),
    Rekey(Rekey),
    Rename(Rename),
    Check(Check),
}

impl Received for FromPublisher {
    fn read(kind: &str, fields: &Fields) -> Result<Option<FromPublisher>, Fault> {
        Ok(Some(match kind {
            "welcome" => FromPublisher::Welcome(Welcome::read(fields)?),
            "ping" => FromPublisher::Ping(Ping::read(fields)?),
            "pong" => FromPublisher::Pong(Pong::read(fields)?),
            "announce" => FromPublisher::Announce(Announce::read(fields)?),
            "chunk" => FromPublisher::Chunk(Chunk::read(fields)?),
            "piece" => FromPublisher::Piece(Piece::read(fields)?),
            "checksums" => FromPublisher::Checksums(Checksums::read(fields)?),
            "end" => FromPublisher::End(End::read(fields)?),
            "refuse" => FromPublisher::Refuse(Refuse::read(fields)?),
            "beacon" => FromPublisher::Beacon(Beacon::read(fields)?),
            "commit" => FromPublisher::Commit(Commit::read(fields)?),
            "abort" => FromPublisher::Abort(Abort::read(fields)?),
            "prepare" => FromPublisher::Prepare(Prepare::read(fields)?),
            "sealed_chunk" => FromPublisher::SealedChunk(SealedChunk::read(fields)?),
            "sealed_message" => FromPublisher::SealedMessage(SealedMessage::read(fields)?),
            "rekey" => FromPublisher::Rekey(Rekey::read(fields)?),
            "rename" => FromPublisher::Rename(Rename::read(fields)?),
            "check" => FromPublisher::Check(Check::read(fields)?),
            _ => return Ok(None),
        }))
    }

    fn payloads(&self) -> RangeInclusive<usize> {
        match self {
            FromPublisher::Announce(_) | FromPublisher::SealedMessage(_) => 0..=1,
            FromPublisher::Chunk(_)
            | FromPublisher::Piece(_)
            | FromPublisher::Checksums(_)
            | FromPublisher::SealedChunk(_) => 1..=1,
            _ => 0..=0,
        }
    }
}

/// A message from an observer to a publisher.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(clippy::large_enum_variant)]
pub enum FromObserver {
    Observe(Observe),
    Verify(Verify),
}

impl Received for FromObserver {
    fn read(kind: &str, fields: &Fields) -> Result<Option<FromObserver>, Fault> {
        Ok(Some(match kind {
            "observe" => FromObserver::Observe(Observe::read(fields)?),
            "verify" => FromObserver::Verify(Verify::read(fields)?),
            _ => return Ok(None),
        }))
    }

    fn payloads(&self) -> RangeInclusive<usize> {
        0..=0
    }
}

/// A message from a publisher to an observer.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(clippy::large_enum_variant)]
pub enum ToObserver {
    Roster(RosterPage),
    Verified(Verified),
}

fn is_default_failed_intact(value: &bool) -> bool {
    *value
}

fn is_default_observe_pages(value: &u64) -> bool {
    *value == 1
}

/// Accepts `prepare`, and maps a segment before its first version.
pub const MAPPING: &str = "mapping";
/// Accepts `rename`.
pub const RENAMING: &str = "renaming";
/// Decodes patches of this encoding.
pub const DELTA: &str = "delta-1";
/// Sends `applied` on its data connection; of a publisher: `upstream.TOKEN`, the token for it.
pub const UPSTREAM: &str = "upstream";
/// `ticket.TOKEN`, the ticket for a data connection.
pub const TICKET: &str = "ticket";
/// Answers `check`.
pub const CHECKING: &str = "checking";
/// Of a worker: a relay, which sends `below`; of a publisher: accepts `below`.
pub const RELAY: &str = "relay";
/// Applies a version and its companions as one.
pub const COMPANIONS: &str = "companions";
/// Of a worker: receives only a part of its versions; of a publisher: sends parts.
pub const PARTS: &str = "parts";
