//! The messages of WBP/1: their headers, and the topics of published messages.
//!
//! Decoding checks types and bounds, so that no invalid value reaches a state machine. Unknown
//! fields are ignored. `make protocol` makes the structs from the description of the protocol.
//!
//! Observers are not workers. They send `observe` repeatedly. Each answer, a `roster`, has the
//! changes since the previous `roster`: rows of models, rows of workers, and events. Times are ages
//! in milliseconds at the moment of the answer, so that clocks need not agree.
//!
//! ```text
//! observer              publisher              worker
//! verify(worker) ──────> check ───────────────> computes checksums of its present weights
//! verified <──────────── compares <──────────── checked
//! ```

use crate::fields::{is_hex, text, Fault, Fields};
use crate::json::{Object, Value};
use crate::limits::{HEADER_BYTES_MAX, NAME_MAX};
pub use crate::protocol::messages::*;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;

/// The version number of the protocol.
pub const WBP: u64 = 1;

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

impl From<Fault> for MessageError {
    fn from(fault: Fault) -> MessageError {
        MessageError::Malformed(fault)
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

/// Any message to a publisher.
#[derive(Clone, Debug, PartialEq)]
pub enum ToPublisher {
    Worker(FromWorker),
    Observer(FromObserver),
}

/// The messages of one side.
pub(crate) trait Received: Sized {
    /// Reads the fields of a message; `None` if the side sends no messages of this type.
    fn read(kind: &str, fields: &Fields) -> Result<Option<Self>, Fault>;

    /// Returns how many payload frames may follow the header of this message.
    fn payloads(&self) -> RangeInclusive<usize>;
}

impl Patch {
    /// Returns the id of this patch.
    pub fn id(&self) -> PatchId {
        let (epoch, version) = (self.epoch, self.version);
        PatchId { encoding: self.encoding.clone(), epoch, version, ..Default::default() }
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

/// Decodes the header of a message from a publisher with `payload_count` payload frames.
pub fn from_publisher(header: &[u8], payload_count: usize) -> Result<FromPublisher, MessageError> {
    match decode(&open(header)?, payload_count)?.ok_or_else(|| unknown("publisher"))? {
        FromPublisher::Announce(Announce { whole: Some(_), .. }) if payload_count == 0 => {
            Err(MessageError::Malformed("an announcement with `whole` has no payload".to_owned()))
        }
        message => Ok(message),
    }
}

/// Decodes a message from a worker.
pub fn from_worker(header: &[u8], payload_count: usize) -> Result<FromWorker, MessageError> {
    decode(&open(header)?, payload_count)?.ok_or_else(|| unknown("worker"))
}

/// Decodes a message from a worker or an observer.
pub fn to_publisher(header: &[u8], payload_count: usize) -> Result<ToPublisher, MessageError> {
    let object = open(header)?;
    if let Some(message) = decode(&object, payload_count)? {
        return Ok(ToPublisher::Worker(message));
    }
    decode(&object, payload_count)?.map(ToPublisher::Observer).ok_or_else(|| unknown("worker"))
}

fn unknown(side: &str) -> MessageError {
    MessageError::Malformed(format!("a {} sends no message of this \"type\"", side))
}

fn decode<M: Received>(object: &Object, payload_count: usize) -> Result<Option<M>, Fault> {
    let fields = Fields(object);
    let message = M::read(&fields.required("type", text(NAME_MAX))?, &fields)?;
    match message.as_ref().map(M::payloads) {
        Some(allowed) if !allowed.contains(&payload_count) => {
            Err(format!("{} payload frames; {:?} are allowed", payload_count, allowed))
        }
        _ => Ok(message),
    }
}

/// Parses a header, and checks its protocol version before its other fields.
fn open(header: &[u8]) -> Result<Object, MessageError> {
    let malformed = |text: String| Err(MessageError::Malformed(text));
    if header.len() > HEADER_BYTES_MAX {
        return malformed(format!("a header of {} bytes exceeds {} bytes", header.len(), HEADER_BYTES_MAX));
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
