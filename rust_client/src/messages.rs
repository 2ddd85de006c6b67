//! The messages of WBP/1: their fields and their headers.
//!
//! Decoding checks types and bounds, so that no invalid value reaches a machine. Unknown fields are
//! ignored. `docs/PROTOCOL.md`, section 6, gives the meaning of each field.

use crate::fields::{is_hex, Fault, Fields};
use crate::json::{Object, Value};
use crate::limits::*;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;

/// The version of the protocol.
pub const WBP: u64 = 1;

/// Name of the feature and of the encoding of patches.
pub const DELTA: &str = "delta-1";

/// Metadata of a version: a map from names to texts.
pub type Metadata = BTreeMap<String, String>;

/// Why a message is dropped.
#[derive(Clone, Debug, PartialEq)]
pub enum MessageError {
    /// The message breaks the protocol.
    Malformed(String),
    /// The message has another protocol version.
    ProtocolVersion(String),
}

impl MessageError {
    /// Returns the code for a `refuse`.
    pub fn code(&self) -> &'static str {
        match self {
            MessageError::Malformed(_) => "malformed",
            MessageError::ProtocolVersion(_) => "protocol-version",
        }
    }
}

impl fmt::Display for MessageError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            MessageError::Malformed(text) => write!(f, "not a message of WBP/1: {}", text),
            MessageError::ProtocolVersion(text) => f.write_str(text),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CommitMode {
    Auto,
    Together,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Acknowledge {
    Applied,
    Staged,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Doing {
    Receiving,
    Staged,
    Applying,
}

/// A message from a worker.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum FromWorker {
    Hello(Hello),
    Fetch(Fetch),
    Progress(Progress),
    Staged(OfVersion),
    Applied(OfVersion),
    Failed(Failed),
    Bye,
    Ping(Ping),
    Pong(Pong),
}

/// A message from a publisher.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum FromPublisher {
    Welcome(Welcome),
    Announce(Announce),
    Chunk(Chunk),
    #[serde(rename = "sealed_chunk")]
    SealedChunk(SealedChunk),
    #[serde(rename = "sealed_message")]
    SealedMessage(SealedMessage),
    End(OfVersion),
    Commit(OfVersion),
    Abort(Abort),
    Beacon(Beacon),
    Rename(Rename),
    Rekey(Rekey),
    Refuse(Refuse),
    Ping(Ping),
    Pong(Pong),
}

/// Defines a struct and its reader for each message, and for each object in a message. Each field
/// is followed by the function that reads it.
macro_rules! messages {
    ($($(#[$doc:meta])* $name:ident { $($(#[$what:meta])* $field:ident: $type:ty = $read:expr,)* })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Debug, PartialEq, Serialize)]
            pub struct $name { $($(#[$what])* pub $field: $type,)* }

            impl $name {
                fn read(fields: &Fields) -> Result<$name, Fault> {
                    Ok($name { $($field: fields.read(stringify!($field), $read)?,)* })
                }
            }
        )*
    };
}

messages! {
    /// A version that a worker runs. The digest is empty if the version was not hashed.
    Running {
        epoch: u64 = Fields::count,
        version: u64 = Fields::positive,
        digest: String = Fields::digest_or_empty,
    }

    /// Location of a version in shared memory of the publisher's host.
    Shared {
        path: String = text(TEXT_MAX),
        token: String = hex(32),
    }

    /// The CRC-32C of the only chunk, which is sent with the announcement, and the digest of the
    /// version.
    Whole {
        crc: u32 = crc,
        digest: String = hex(64),
    }

    /// Identifies a patch by its encoding and its base, the version that it builds on.
    PatchId {
        encoding: String = Fields::name,
        epoch: u64 = Fields::count,
        version: u64 = Fields::positive,
    }

    /// A patch that the publisher offers: its encoding, its base with that version's digest, and
    /// its size.
    Patch {
        encoding: String = Fields::name,
        epoch: u64 = Fields::count,
        version: u64 = Fields::positive,
        digest: String = hex(64),
        nbytes: u64 = Fields::positive,
    }

    #[derive(Default)]
    Ping {
        token: u64 = or(0, Fields::count),
        subscribed: bool = or(false, Fields::boolean),
        shared: bool = or(false, Fields::boolean),
    }

    #[derive(Default)]
    Pong {
        token: u64 = or(0, Fields::count),
        epoch: u64 = or(0, Fields::count),
        models: BTreeMap<String, u64> = or(BTreeMap::new(), |f, k| f.models(k, Fields::count)),
    }

    Hello {
        name: String = Fields::name,
        instance: String = hex(32),
        models: BTreeMap<String, Option<Running>> = |f, k| f.models(k, |its, model| {
            its.nullable(model, |f, k| Running::read(&f.object(k)?))
        }),
        epoch: u64 = or(0, Fields::count),
        age_ms: u64 = or(0, Fields::count),
        features: Vec<String> = or(Vec::new(), Fields::names),
        client: String = or(String::new(), text(LABEL_MAX)),
        host: String = or(String::new(), text(LABEL_MAX)),
        pid: u64 = or(0, Fields::count),
    }

    Fetch {
        model: String = Fields::name,
        epoch: u64 = Fields::count,
        version: u64 = Fields::count,
        first: u64 = or(0, within(0..=CHUNKS_MAX - 1)),
        count: u64 = or(0, within(0..=FETCH_CHUNKS_MAX)),
        layout: bool = or(false, Fields::boolean),
        #[serde(skip_serializing_if = "Option::is_none")]
        patch: Option<PatchId> = patch_id,
        /// Why the whole version is fetched, though patches were offered.
        #[serde(skip_serializing_if = "String::is_empty")]
        unpatched: String = or(String::new(), text(LABEL_MAX)),
    }

    Progress {
        model: String = Fields::name,
        epoch: u64 = Fields::count,
        version: u64 = Fields::positive,
        chunks: u64 = Fields::count,
        phase: Doing = or(Doing::Receiving, |f, k| f.one_of(k, &DOING)),
        #[serde(skip_serializing_if = "Option::is_none")]
        patch: Option<PatchId> = patch_id,
        /// What delays the apply of the version, and since when.
        #[serde(skip_serializing_if = "String::is_empty")]
        waits: String = or(String::new(), text(LABEL_MAX)),
    }

    /// A version, its digest, and the patch by which it arrives: the content of `staged`,
    /// `applied`, `end`, and `commit`. A `commit` has no patch.
    #[derive(Default)]
    OfVersion {
        model: String = Fields::name,
        epoch: u64 = Fields::count,
        version: u64 = Fields::positive,
        digest: String = Fields::digest_or_empty, // empty in `applied` only
        #[serde(skip_serializing_if = "Option::is_none")]
        patch: Option<PatchId> = patch_id,
        /// Microseconds that decoding this patch took, in `applied` only; 0 if unknown.
        #[serde(skip_serializing_if = "is_zero")]
        decode_us: u64 = or(0, Fields::count),
        /// The worker's note on the running version, in `applied` only.
        #[serde(skip_serializing_if = "String::is_empty")]
        note: String = or(String::new(), text(TEXT_MAX)),
    }

    Failed {
        model: String = Fields::name,
        epoch: u64 = Fields::count,
        version: u64 = Fields::positive,
        code: String = Fields::name,
        text: String = text(TEXT_MAX),
        /// True if the previous version still runs; false if no version of the model runs.
        intact: bool = or(true, Fields::boolean),
    }

    Welcome {
        epoch: u64 = Fields::count,
        data: String = text(TEXT_MAX),
        ping_ms: u64 = within(1..=3_600_000),
        lost_ms: u64 = within(2..=36_000_000),
        models: BTreeMap<String, u64> = |f, k| f.models(k, Fields::count),
        shared: Option<Shared> = |f, k| f.nullable(k, |f, k| Shared::read(&f.object(k)?)),
        age_ms: u64 = or(0, Fields::count),
        features: Vec<String> = or(Vec::new(), Fields::names),
        /// Group keys, the newest last.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        keys: Vec<String> = or(Vec::new(), Fields::keys),
    }

    Rekey {
        epoch: u64 = Fields::count,
        keys: Vec<String> = Fields::keys,
    }

    Announce {
        model: String = Fields::name,
        epoch: u64 = Fields::count,
        version: u64 = Fields::positive,
        layout: String = hex(64),
        layout_bytes: u64 = within(10..=LAYOUT_BYTES_MAX + 8),
        nbytes: u64 = Fields::count,
        chunk_bytes: u64 = within(1..=CHUNK_BYTES_MAX),
        commit: CommitMode = |f, k| f.one_of(k, &COMMIT),
        acknowledge: Acknowledge = |f, k| f.one_of(k, &ACKNOWLEDGE),
        encoding: String = Fields::name,
        encryption: Option<String> = |f, k| f.nullable(k, Fields::name),
        /// Id of the key with which the payload is encrypted.
        #[serde(skip_serializing_if = "Option::is_none")]
        key: Option<String> = |f, k| f.nullable(k, hex(16)),
        #[serde(skip_serializing_if = "Option::is_none")]
        tag: Option<String> = |f, k| f.nullable(k, hex(32)),
        shared: Option<Shared> = |f, k| f.nullable(k, |f, k| Shared::read(&f.object(k)?)),
        hash: bool = or(false, Fields::boolean),
        whole: Option<Whole> = |f, k| f.nullable(k, |f, k| Whole::read(&f.object(k)?)),
        /// True if patches may build on this version.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        keep: bool = or(false, Fields::boolean),
        /// Patches whose result is this version. The first one is pushed.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        patches: Vec<Patch> = or(Vec::new(), |f, k| f.objects(k, PATCHES_MAX, Patch::read)),
        /// Metadata from the publisher.
        #[serde(skip_serializing_if = "BTreeMap::is_empty")]
        metadata: Metadata = or(Metadata::new(), Fields::metadata),
    }

    Chunk {
        model: String = Fields::name,
        epoch: u64 = Fields::count,
        version: u64 = Fields::positive,
        index: u64 = within(0..=CHUNKS_MAX - 1),
        crc: u32 = crc,
        #[serde(skip_serializing_if = "Option::is_none")]
        patch: Option<PatchId> = patch_id,
    }

    SealedChunk {
        model: String = Fields::name,
        epoch: u64 = Fields::count,
        version: u64 = Fields::positive,
        index: u64 = within(0..=CHUNKS_MAX - 1),
        key: String = hex(16),
        tag: String = hex(32),
        #[serde(skip_serializing_if = "Option::is_none")]
        patch: Option<PatchId> = patch_id,
    }

    /// An encrypted announcement, end or beacon for all workers.
    SealedMessage {
        key: String = hex(16),
        count: u64 = Fields::positive,
        sealed: String = Fields::base64,
    }

    Abort {
        model: String = Fields::name,
        epoch: u64 = Fields::count,
        version: u64 = Fields::positive,
        text: String = or(String::new(), text(TEXT_MAX)),
    }

    Beacon {
        model: String = Fields::name,
        epoch: u64 = Fields::count,
        version: u64 = Fields::count,
    }

    Rename {
        model: String = Fields::name,
        epoch: u64 = Fields::count,
        version: u64 = Fields::positive,
        was: Running = |f, k| Running::read(&f.object(k)?),
        /// Metadata of the version under its new number.
        #[serde(skip_serializing_if = "BTreeMap::is_empty")]
        metadata: Metadata = or(Metadata::new(), Fields::metadata),
    }

    Refuse {
        code: String = Fields::name,
        text: String = text(TEXT_MAX),
        model: Option<String> = |f, k| f.nullable(k, Fields::name),
        epoch: u64 = or(0, Fields::count),
        version: u64 = or(0, Fields::count),
    }
}

const COMMIT: [(&str, CommitMode); 2] = [("auto", CommitMode::Auto), ("together", CommitMode::Together)];
const ACKNOWLEDGE: [(&str, Acknowledge); 2] =
    [("applied", Acknowledge::Applied), ("staged", Acknowledge::Staged)];
const DOING: [(&str, Doing); 3] =
    [("receiving", Doing::Receiving), ("staged", Doing::Staged), ("applying", Doing::Applying)];

// Readers of fields that are bounded or optional.

fn within<'a>(bounds: RangeInclusive<u64>) -> impl FnOnce(&Fields<'a>, &str) -> Result<u64, Fault> {
    |fields, field| fields.within(field, bounds)
}

fn text<'a>(characters_max: usize) -> impl FnOnce(&Fields<'a>, &str) -> Result<String, Fault> {
    move |fields, field| fields.text(field, characters_max)
}

fn hex<'a>(digits: usize) -> impl FnOnce(&Fields<'a>, &str) -> Result<String, Fault> {
    move |fields, field| fields.hex(field, digits)
}

fn or<'a, T>(
    default: T,
    read: impl FnOnce(&Fields<'a>, &str) -> Result<T, Fault>,
) -> impl FnOnce(&Fields<'a>, &str) -> Result<T, Fault> {
    |fields, field| fields.or(field, default, read)
}

fn crc(fields: &Fields, field: &str) -> Result<u32, Fault> {
    fields.within(field, 0..=u64::from(u32::MAX)).map(|crc| crc as u32)
}

pub(crate) fn is_zero(number: &u64) -> bool {
    *number == 0
}

fn patch_id(fields: &Fields, field: &str) -> Result<Option<PatchId>, Fault> {
    fields.nullable(field, |fields, field| PatchId::read(&fields.object(field)?))
}

impl Patch {
    /// Returns the id of this patch.
    pub fn id(&self) -> PatchId {
        PatchId { encoding: self.encoding.clone(), epoch: self.epoch, version: self.version }
    }
}

impl FromPublisher {
    /// Returns how many payload frames may follow the header of this message.
    fn payloads(&self) -> RangeInclusive<usize> {
        match self {
            FromPublisher::Announce(announce) => usize::from(announce.whole.is_some())..=1,
            FromPublisher::Chunk(_) | FromPublisher::SealedChunk(_) => 1..=1,
            FromPublisher::SealedMessage(_) => 0..=1,
            _ => 0..=0,
        }
    }
}

/// Returns the header of a message.
pub fn encode(message: &impl Serialize) -> Vec<u8> {
    let mut header = b"{\"wbp\":1,".to_vec();
    match serde_json::to_vec(message) {
        Ok(object) => header.extend_from_slice(object.get(1..).unwrap_or_default()),
        Err(error) => unreachable!("messages are plain data: {}", error),
    }
    header
}

/// Decodes the header of a message from a publisher with `payloads` payload frames.
pub fn from_publisher(header: &[u8], payloads: usize) -> Result<FromPublisher, MessageError> {
    let object = open(header)?;
    let message = read_from_publisher(&Fields(&object)).map_err(MessageError::Malformed)?;
    if !message.payloads().contains(&payloads) {
        let text = format!("{} payload frames, allowed are {:?}", payloads, message.payloads());
        return Err(MessageError::Malformed(text));
    }
    Ok(message)
}

/// Decodes a message from a worker, for tests and for tools that read a worker's traffic.
pub fn from_worker(header: &[u8], payloads: usize) -> Result<FromWorker, MessageError> {
    worker_message(&Fields(&open(header)?), payloads)
}

/// Decodes the fields of a message from a worker.
pub(crate) fn worker_message(fields: &Fields, payloads: usize) -> Result<FromWorker, MessageError> {
    let message = read_from_worker(fields).map_err(MessageError::Malformed)?;
    if payloads > 0 {
        return Err(MessageError::Malformed(format!("{} payload frames of a worker", payloads)));
    }
    Ok(message)
}

/// Parses a header, and checks its protocol version before its other fields.
pub(crate) fn open(header: &[u8]) -> Result<Object, MessageError> {
    let malformed = |text: String| Err(MessageError::Malformed(text));
    if header.len() > HEADER_BYTES_MAX {
        return malformed(format!("a header of {} bytes; {} are allowed", header.len(), HEADER_BYTES_MAX));
    }
    let object = match serde_json::from_slice(header) {
        Ok(Value::Object(object)) => object,
        Ok(other) => return malformed(format!("the header is {}, not an object", other.kind())),
        Err(error) => return malformed(error.to_string()),
    };
    let number = match object.get("wbp") {
        Some(Value::Integer(WBP)) => return Ok(object),
        Some(Value::Integer(number)) => number.to_string(),
        Some(Value::Negative(number)) => number.to_string(),
        None => "0".to_owned(),
        Some(other) => return malformed(format!("\"wbp\" is {}", other.kind())),
    };
    Err(MessageError::ProtocolVersion(format!("protocol number {}; this side speaks {}", number, WBP)))
}

fn read_from_publisher(fields: &Fields) -> Result<FromPublisher, Fault> {
    Ok(match fields.text("type", NAME_MAX)?.as_str() {
        "welcome" => FromPublisher::Welcome(Welcome::read(fields)?),
        "announce" => FromPublisher::Announce(Announce::read(fields)?),
        "chunk" => FromPublisher::Chunk(Chunk::read(fields)?),
        "sealed_chunk" => FromPublisher::SealedChunk(SealedChunk::read(fields)?),
        "sealed_message" => FromPublisher::SealedMessage(SealedMessage::read(fields)?),
        "end" => FromPublisher::End(read_hashed(fields)?),
        "commit" => FromPublisher::Commit(read_commit(fields)?),
        "abort" => FromPublisher::Abort(Abort::read(fields)?),
        "beacon" => FromPublisher::Beacon(Beacon::read(fields)?),
        "rename" => FromPublisher::Rename(Rename::read(fields)?),
        "rekey" => FromPublisher::Rekey(Rekey::read(fields)?),
        "refuse" => FromPublisher::Refuse(Refuse::read(fields)?),
        "ping" => FromPublisher::Ping(Ping::read(fields)?),
        "pong" => FromPublisher::Pong(Pong::read(fields)?),
        _ => return Err("\"type\" is none that a publisher sends".to_owned()),
    })
}

fn read_from_worker(fields: &Fields) -> Result<FromWorker, Fault> {
    Ok(match fields.text("type", NAME_MAX)?.as_str() {
        "hello" => FromWorker::Hello(Hello::read(fields)?),
        "fetch" => FromWorker::Fetch(Fetch::read(fields)?),
        "progress" => FromWorker::Progress(Progress::read(fields)?),
        "staged" => FromWorker::Staged(read_hashed(fields)?),
        "applied" => FromWorker::Applied(OfVersion::read(fields)?),
        "failed" => FromWorker::Failed(Failed::read(fields)?),
        "bye" => FromWorker::Bye,
        "ping" => FromWorker::Ping(Ping::read(fields)?),
        "pong" => FromWorker::Pong(Pong::read(fields)?),
        _ => return Err("\"type\" is none that a worker sends".to_owned()),
    })
}

/// Reads the version in a message, with its digest and its patch.
fn read_hashed(fields: &Fields) -> Result<OfVersion, Fault> {
    Ok(OfVersion { patch: patch_id(fields, "patch")?, ..read_commit(fields)? })
}

/// Reads the version in a message, with its digest and without a patch.
fn read_commit(fields: &Fields) -> Result<OfVersion, Fault> {
    Ok(OfVersion {
        model: fields.name("model")?,
        epoch: fields.count("epoch")?,
        version: fields.positive("version")?,
        digest: fields.hex("digest", 64)?,
        ..OfVersion::default()
    })
}

/// Returns the token of 32 digits in a feature `NAME.TOKEN` of a publisher; empty if there is none.
pub fn token_of<'a>(features: &'a [String], feature: &str) -> &'a str {
    let mut named = features.iter().filter_map(|each| each.strip_prefix(feature)?.strip_prefix('.'));
    named.find(|token| is_hex(token, 32)).unwrap_or_default()
}

/// Returns the topic of a model's small messages.
pub fn control_topic(model: &str) -> String {
    format!("{}/ctl", model)
}

/// Returns the topic of a model's chunks.
pub fn data_topic(model: &str) -> String {
    format!("{}/dat", model)
}

/// Returns the topic of chunks and ends of a model's patches.
pub fn patch_topic(model: &str) -> String {
    format!("{}/dlt", model)
}
