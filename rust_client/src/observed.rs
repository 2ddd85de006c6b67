//! Messages of observers: the workers, and which version each one runs, in pages that fit a header.
//!
//! An observer is not a worker. It sends `observe` repeatedly, and each `roster` in answer has the
//! changes since the previous one: rows of models, rows of workers, and events. Times are ages in
//! milliseconds at the moment of the answer, so that clocks need not agree.
//!
//! ```text
//! observer              publisher              worker
//! verify(worker) ──────> check ───────────────> sums what its weights are now
//! verified <──────────── compares <──────────── checked
//! ```

use crate::fields::{Fault, Fields};
use crate::limits::{NAME_MAX, TEXT_MAX};
use crate::messages::{is_zero, open, worker_message, Doing, FromWorker, MessageError, Metadata};
use serde::Serialize;
use std::collections::BTreeMap;

/// The feature of a worker that answers `check`.
pub const CHECKING: &str = "checking";
const CHECK_NAMES_MAX: usize = 4096; // in one answer of a worker: more do not fit a header

/// Any message to a publisher.
#[derive(Clone, Debug, PartialEq)]
pub enum ToPublisher {
    Worker(FromWorker),
    Checked(Checked),
    Observe(Observe),
    Verify(Verify),
}

/// An observer's request for the changes since a revision of an epoch.
#[derive(Clone, Debug, PartialEq)]
pub struct Observe {
    pub epoch: u64,
    pub since: u64,
    /// The largest number of `roster` messages in the answer.
    pub pages: u64,
}

impl Observe {
    fn read(fields: &Fields) -> Result<Observe, Fault> {
        Ok(Observe {
            epoch: fields.or("epoch", 0, Fields::count)?,
            since: fields.or("since", 0, Fields::count)?,
            pages: fields.or("pages", 1, Fields::positive)?,
        })
    }
}

/// An observer's request to compare a worker's weights with the published ones, from the tensor
/// `first` on.
#[derive(Clone, Debug, PartialEq)]
pub struct Verify {
    pub worker: String,
    pub model: String,
    pub first: u64,
}

impl Verify {
    fn read(fields: &Fields) -> Result<Verify, Fault> {
        Ok(Verify {
            worker: fields.name("worker")?,
            model: fields.name("model")?,
            first: fields.or("first", 0, Fields::count)?,
        })
    }
}

/// A worker's answer to `check`: the CRC-32C of some tensors, `None` for a tensor that cannot be
/// compared. If `sums` is empty, `code` and `text` give the reason.
#[derive(Clone, Debug, PartialEq)]
pub struct Checked {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    pub first: u64,
    pub sums: Vec<Option<u32>>,
    pub code: Option<String>,
    pub text: String,
}

impl Checked {
    fn read(fields: &Fields) -> Result<Checked, Fault> {
        Ok(Checked {
            model: fields.name("model")?,
            epoch: fields.count("epoch")?,
            version: fields.positive("version")?,
            first: fields.or("first", 0, Fields::count)?,
            sums: fields.or("sums", Vec::new(), |fields, field| fields.checksums(field, CHECK_NAMES_MAX))?,
            code: fields.nullable("code", Fields::name)?,
            text: fields.or("text", String::new(), |fields, field| fields.text(field, TEXT_MAX))?,
        })
    }
}

/// Decodes a message from a worker or an observer.
pub fn to_publisher(header: &[u8], payloads: usize) -> Result<ToPublisher, MessageError> {
    let object = open(header)?;
    let fields = Fields(&object);
    if payloads > 0 {
        // returns the error: none of these messages has a payload
        return worker_message(&fields, payloads).map(ToPublisher::Worker);
    }
    let read = match fields.text("type", NAME_MAX).as_deref() {
        Ok("observe") => Observe::read(&fields).map(ToPublisher::Observe),
        Ok("verify") => Verify::read(&fields).map(ToPublisher::Verify),
        Ok("checked") => Checked::read(&fields).map(ToPublisher::Checked),
        _ => return worker_message(&fields, payloads).map(ToPublisher::Worker),
    };
    read.map_err(MessageError::Malformed)
}

/// A request to a worker for the checksums of its running version, from the tensor `first` on.
#[derive(Serialize)]
#[serde(tag = "type", rename = "check")]
pub struct Check {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    pub first: u64,
}

/// A tensor that differs between a worker and the published version.
#[derive(Serialize)]
pub struct Difference {
    pub name: String,
    pub published: u32,
    pub runs: u32,
}

/// The differences between a worker's weights and the published ones, for `count` of `names`
/// tensors from the tensor `first` on. If they are unknown, `code` and `text` give the reason.
#[derive(Serialize)]
#[serde(tag = "type", rename = "verified")]
pub struct Verified {
    pub worker: String,
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    pub first: u64,
    pub count: u64,
    pub names: u64,
    pub unlike: u64,
    pub differing: u64,
    pub differences: Vec<Difference>,
    pub code: Option<String>,
    pub text: String,
}

impl Verified {
    /// Returns an answer to this request, without results.
    pub fn of(asked: &Verify) -> Verified {
        let Verify { worker, model, first } = asked.clone();
        let (epoch, version, count, names, unlike, differing) = (0, 0, 0, 0, 0, 0);
        let (differences, code, text) = (Vec::new(), None, String::new());
        Verified {
            worker,
            model,
            epoch,
            version,
            first,
            count,
            names,
            unlike,
            differing,
            differences,
            code,
            text,
        }
    }
}

/// How long ago a version was published.
#[derive(Serialize)]
pub struct Published {
    pub version: u64,
    pub age_ms: u64,
}

/// A model: its latest version for all workers, and when that version and some earlier ones were
/// published.
#[derive(Serialize)]
pub struct ModelRow<'a> {
    pub name: &'a str,
    pub version: u64,
    pub nbytes: u64,
    pub encoding: &'static str,
    pub published: Vec<Published>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: &'a Metadata,
}

/// State of a worker's model: the running version, the arriving one, and failures.
#[derive(Default, Serialize)]
pub struct Standing<'a> {
    #[serde(skip_serializing_if = "is_zero")]
    pub epoch: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub version: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub newest: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub took_us: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub incoming: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<Doing>,
    #[serde(skip_serializing_if = "is_zero")]
    pub chunks: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub count: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub idle_ms: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub failed: u64,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub error: &'a str,
}

/// A worker, and the state of each of its models.
#[derive(Serialize)]
pub struct WorkerRow<'a> {
    pub name: &'a str,
    pub state: &'static str,
    pub road: &'static str,
    pub heard_ms: u64,
    pub models: BTreeMap<&'a str, Standing<'a>>,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub client: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub host: &'a str,
    #[serde(skip_serializing_if = "is_zero")]
    pub pid: u64,
}

/// An event of a worker. The kind `left` means that the worker is no longer connected.
#[derive(Serialize)]
pub struct Happened<'a> {
    pub kind: &'static str,
    pub worker: &'a str,
    pub text: &'a str,
    pub age_ms: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_has_defaults_and_bounds() {
        let asked = |text: &str| to_publisher(text.as_bytes(), 0);
        let plain = Observe { epoch: 0, since: 0, pages: 1 };
        assert_eq!(asked(r#"{"wbp":1,"type":"observe"}"#), Ok(ToPublisher::Observe(plain)));
        let full = Observe { epoch: 3, since: 5, pages: 2 };
        let text = r#"{"wbp":1,"type":"observe","epoch":3,"since":5,"pages":2,"more":[]}"#;
        assert_eq!(asked(text), Ok(ToPublisher::Observe(full)));
        for wrong in [r#""pages":0"#, r#""since":-1"#, r#""epoch":9007199254740992"#, r#""since":"1""#] {
            let error = asked(&format!(r#"{{"wbp":1,"type":"observe",{}}}"#, wrong)).unwrap_err();
            assert_eq!(error.code(), "malformed", "{}", wrong);
        }
        let two = to_publisher(br#"{"wbp":1,"type":"observe"}"#, 1);
        assert_eq!(two.unwrap_err().code(), "malformed");
        assert_eq!(asked(r#"{"wbp":2,"type":"observe"}"#).unwrap_err().code(), "protocol-version");
        assert_eq!(asked(r#"{"wbp":1,"type":"bye"}"#), Ok(ToPublisher::Worker(FromWorker::Bye)));
    }
}
