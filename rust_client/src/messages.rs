//! The messages of WBP/1: what is in each, and their headers.
//!
//! Decoding checks types and bounds, so a machine never sees a value that it must not. Unknown
//! fields are ignored. `docs/PROTOCOL.md`, section 6, gives the meaning of each field.

use crate::fields::{Fault, Fields};
use crate::json::{Object, Value};
use crate::limits::*;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

/// The number of the protocol.
pub const WBP: u64 = 1;

/// Why a message is dropped.
#[derive(Clone, Debug, PartialEq)]
pub enum MessageError {
    /// It breaks the protocol.
    Malformed(String),
    /// It is of another protocol.
    ProtocolVersion(String),
}

impl MessageError {
    /// The code that a `refuse` would have.
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

/// A version that a worker runs; the digest is empty where nobody hashed it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Running {
    pub epoch: u64,
    pub version: u64,
    pub digest: String,
}

/// Where a version lies in the memory of the publisher's host.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Shared {
    pub path: String,
    pub token: String,
}

/// What belongs to the chunk that travels with an announcement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Whole {
    pub crc: u32,
    pub digest: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Ping {
    pub token: u64,
    pub subscribed: bool,
    pub shared: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Pong {
    pub token: u64,
    pub epoch: u64,
    pub models: BTreeMap<String, u64>,
}

/// What a worker says.
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

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Hello {
    pub name: String,
    pub instance: String,
    pub models: BTreeMap<String, Option<Running>>,
    pub epoch: u64,
    pub age_ms: u64,
    pub features: Vec<String>,
    pub client: String,
    pub host: String,
    pub pid: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fetch {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    pub first: u64,
    pub count: u64,
    pub layout: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Progress {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    pub chunks: u64,
    pub phase: Doing,
}

/// A version and its digest: `staged`, `applied`, `end` and `commit`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OfVersion {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    pub digest: String,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Failed {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    pub code: String,
    pub text: String,
    /// Whether what ran before still runs; otherwise no version of the model does.
    pub intact: bool,
}

/// What a publisher says.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum FromPublisher {
    Welcome(Welcome),
    Announce(Announce),
    Chunk(Chunk),
    End(OfVersion),
    Commit(OfVersion),
    Abort(Abort),
    Beacon(Beacon),
    Rename(Rename),
    Refuse(Refuse),
    Ping(Ping),
    Pong(Pong),
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Welcome {
    pub epoch: u64,
    pub data: String,
    pub ping_ms: u64,
    pub lost_ms: u64,
    pub models: BTreeMap<String, u64>,
    pub shared: Option<Shared>,
    pub age_ms: u64,
    pub features: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Announce {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    pub layout: String,
    pub layout_bytes: u64,
    pub nbytes: u64,
    pub chunk_bytes: u64,
    pub commit: CommitMode,
    pub acknowledge: Acknowledge,
    pub encoding: String,
    pub encryption: Option<String>,
    pub shared: Option<Shared>,
    pub hash: bool,
    pub whole: Option<Whole>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Chunk {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    pub index: u64,
    pub crc: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Abort {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    pub text: String,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Beacon {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rename {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    pub was: Running,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Refuse {
    pub code: String,
    pub text: String,
    pub model: Option<String>,
    pub epoch: u64,
    pub version: u64,
}

impl FromPublisher {
    /// How many payload frames may follow the header.
    fn payloads(&self) -> std::ops::RangeInclusive<usize> {
        match self {
            FromPublisher::Announce(announce) => usize::from(announce.whole.is_some())..=1,
            FromPublisher::Chunk(_) => 1..=1,
            _ => 0..=0,
        }
    }
}

/// Returns the header of a message, whoever sends it.
pub fn encode(message: &impl Serialize) -> Vec<u8> {
    let mut header = b"{\"wbp\":1,".to_vec();
    match serde_json::to_vec(message) {
        Ok(object) => header.extend_from_slice(object.get(1..).unwrap_or_default()),
        Err(error) => unreachable!("messages are plain data: {}", error),
    }
    header
}

/// Decodes the header of a message that a publisher sent with so many payload frames.
pub fn from_publisher(header: &[u8], payloads: usize) -> Result<FromPublisher, MessageError> {
    let object = open(header)?;
    let message = read_from_publisher(&Fields(&object)).map_err(MessageError::Malformed)?;
    if !message.payloads().contains(&payloads) {
        let text = format!("{} payload frames, allowed are {:?}", payloads, message.payloads());
        return Err(MessageError::Malformed(text));
    }
    Ok(message)
}

/// Decodes what a worker sent: for tests, and tools that listen in.
pub fn from_worker(header: &[u8], payloads: usize) -> Result<FromWorker, MessageError> {
    let object = open(header)?;
    let message = read_from_worker(&Fields(&object)).map_err(MessageError::Malformed)?;
    if payloads > 0 {
        return Err(MessageError::Malformed(format!("{} payload frames of a worker", payloads)));
    }
    Ok(message)
}

/// Parses a header and judges its protocol number, before anything else in it.
fn open(header: &[u8]) -> Result<Object, MessageError> {
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
        "welcome" => FromPublisher::Welcome(Welcome {
            epoch: fields.count("epoch")?,
            data: fields.text("data", TEXT_MAX)?,
            ping_ms: fields.within("ping_ms", 1..=3_600_000)?,
            lost_ms: fields.within("lost_ms", 2..=36_000_000)?,
            models: fields.models("models", Fields::count)?,
            shared: fields.nullable("shared", read_shared)?,
            age_ms: fields.or("age_ms", 0, Fields::count)?,
            features: fields.or("features", Vec::new(), Fields::names)?,
        }),
        "announce" => FromPublisher::Announce(read_announce(fields)?),
        "chunk" => FromPublisher::Chunk(Chunk {
            model: fields.name("model")?,
            epoch: fields.count("epoch")?,
            version: fields.positive("version")?,
            index: fields.within("index", 0..=CHUNKS_MAX - 1)?,
            crc: read_crc(fields)?,
        }),
        "end" => FromPublisher::End(read_of_version(fields, false)?),
        "commit" => FromPublisher::Commit(read_of_version(fields, false)?),
        "abort" => FromPublisher::Abort(Abort {
            model: fields.name("model")?,
            epoch: fields.count("epoch")?,
            version: fields.positive("version")?,
            text: fields.or("text", String::new(), |f, k| f.text(k, TEXT_MAX))?,
        }),
        "beacon" => FromPublisher::Beacon(Beacon {
            model: fields.name("model")?,
            epoch: fields.count("epoch")?,
            version: fields.count("version")?,
        }),
        "rename" => FromPublisher::Rename(Rename {
            model: fields.name("model")?,
            epoch: fields.count("epoch")?,
            version: fields.positive("version")?,
            was: read_running(fields, "was")?,
        }),
        "refuse" => FromPublisher::Refuse(Refuse {
            code: fields.name("code")?,
            text: fields.text("text", TEXT_MAX)?,
            model: fields.nullable("model", Fields::name)?,
            epoch: fields.or("epoch", 0, Fields::count)?,
            version: fields.or("version", 0, Fields::count)?,
        }),
        "ping" => FromPublisher::Ping(read_ping(fields)?),
        "pong" => FromPublisher::Pong(read_pong(fields)?),
        _ => return Err("\"type\" is none that a publisher sends".to_owned()),
    })
}

fn read_announce(fields: &Fields) -> Result<Announce, Fault> {
    const COMMIT: [(&str, CommitMode); 2] = [("auto", CommitMode::Auto), ("together", CommitMode::Together)];
    const ACKNOWLEDGE: [(&str, Acknowledge); 2] =
        [("applied", Acknowledge::Applied), ("staged", Acknowledge::Staged)];
    Ok(Announce {
        model: fields.name("model")?,
        epoch: fields.count("epoch")?,
        version: fields.positive("version")?,
        layout: fields.hex("layout", 64)?,
        layout_bytes: fields.within("layout_bytes", 10..=LAYOUT_BYTES_MAX + 8)?,
        nbytes: fields.count("nbytes")?,
        chunk_bytes: fields.within("chunk_bytes", 1..=CHUNK_BYTES_MAX)?,
        commit: fields.one_of("commit", &COMMIT)?,
        acknowledge: fields.one_of("acknowledge", &ACKNOWLEDGE)?,
        encoding: fields.name("encoding")?,
        encryption: fields.nullable("encryption", Fields::name)?,
        shared: fields.nullable("shared", read_shared)?,
        hash: fields.or("hash", false, Fields::boolean)?,
        whole: fields.nullable("whole", |fields, field| {
            let whole = fields.object(field)?;
            Ok(Whole { crc: read_crc(&whole)?, digest: whole.hex("digest", 64)? })
        })?,
    })
}

fn read_from_worker(fields: &Fields) -> Result<FromWorker, Fault> {
    const PHASES: [(&str, Doing); 3] =
        [("receiving", Doing::Receiving), ("staged", Doing::Staged), ("applying", Doing::Applying)];
    let label = |fields: &Fields, field: &str| fields.text(field, LABEL_MAX);
    Ok(match fields.text("type", NAME_MAX)?.as_str() {
        "hello" => FromWorker::Hello(Hello {
            name: fields.name("name")?,
            instance: fields.hex("instance", 32)?,
            models: fields.models("models", |models, model| models.nullable(model, read_running))?,
            epoch: fields.or("epoch", 0, Fields::count)?,
            age_ms: fields.or("age_ms", 0, Fields::count)?,
            features: fields.or("features", Vec::new(), Fields::names)?,
            client: fields.or("client", String::new(), label)?,
            host: fields.or("host", String::new(), label)?,
            pid: fields.or("pid", 0, Fields::count)?,
        }),
        "fetch" => FromWorker::Fetch(Fetch {
            model: fields.name("model")?,
            epoch: fields.count("epoch")?,
            version: fields.count("version")?,
            first: fields.or("first", 0, |f, k| f.within(k, 0..=CHUNKS_MAX - 1))?,
            count: fields.or("count", 0, |f, k| f.within(k, 0..=FETCH_CHUNKS_MAX))?,
            layout: fields.or("layout", false, Fields::boolean)?,
        }),
        "progress" => FromWorker::Progress(Progress {
            model: fields.name("model")?,
            epoch: fields.count("epoch")?,
            version: fields.positive("version")?,
            chunks: fields.count("chunks")?,
            phase: fields.or("phase", Doing::Receiving, |f, k| f.one_of(k, &PHASES))?,
        }),
        "staged" => FromWorker::Staged(read_of_version(fields, false)?),
        "applied" => FromWorker::Applied(read_of_version(fields, true)?),
        "failed" => FromWorker::Failed(Failed {
            model: fields.name("model")?,
            epoch: fields.count("epoch")?,
            version: fields.positive("version")?,
            code: fields.name("code")?,
            text: fields.text("text", TEXT_MAX)?,
            intact: fields.or("intact", true, Fields::boolean)?,
        }),
        "bye" => FromWorker::Bye,
        "ping" => FromWorker::Ping(read_ping(fields)?),
        "pong" => FromWorker::Pong(read_pong(fields)?),
        _ => return Err("\"type\" is none that a worker sends".to_owned()),
    })
}

fn read_of_version(fields: &Fields, may_be_empty: bool) -> Result<OfVersion, Fault> {
    Ok(OfVersion {
        model: fields.name("model")?,
        epoch: fields.count("epoch")?,
        version: fields.positive("version")?,
        digest: if may_be_empty { fields.digest_or_empty("digest")? } else { fields.hex("digest", 64)? },
    })
}

fn read_running(fields: &Fields, field: &str) -> Result<Running, Fault> {
    let running = fields.object(field)?;
    Ok(Running {
        epoch: running.count("epoch")?,
        version: running.positive("version")?,
        digest: running.digest_or_empty("digest")?,
    })
}

fn read_shared(fields: &Fields, field: &str) -> Result<Shared, Fault> {
    let shared = fields.object(field)?;
    Ok(Shared { path: shared.text("path", TEXT_MAX)?, token: shared.hex("token", 32)? })
}

fn read_crc(fields: &Fields) -> Result<u32, Fault> {
    fields.within("crc", 0..=u64::from(u32::MAX)).map(|crc| crc as u32)
}

fn read_ping(fields: &Fields) -> Result<Ping, Fault> {
    Ok(Ping {
        token: fields.or("token", 0, Fields::count)?,
        subscribed: fields.or("subscribed", false, Fields::boolean)?,
        shared: fields.or("shared", false, Fields::boolean)?,
    })
}

fn read_pong(fields: &Fields) -> Result<Pong, Fault> {
    Ok(Pong {
        token: fields.or("token", 0, Fields::count)?,
        epoch: fields.or("epoch", 0, Fields::count)?,
        models: fields.or("models", BTreeMap::new(), |f, k| f.models(k, Fields::count))?,
    })
}

/// The topic of a model's small messages.
pub fn control_topic(model: &str) -> String {
    format!("{}/ctl", model)
}

/// The topic of a model's chunks.
pub fn data_topic(model: &str) -> String {
    format!("{}/dat", model)
}
