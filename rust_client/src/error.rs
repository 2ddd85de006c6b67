//! Errors. The text of each names the side at fault, the cause, and what to do next.

use crate::dtype::Dtype;
use crate::protocol::codes::Code;
use crate::publisher::Receipt;
use std::fmt;
use std::io;

/// An error of a worker or a publisher.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The address is invalid, or this worker must not connect to it.
    Address { address: String, text: String },
    /// The worker's settings are invalid.
    Setup(String),
    /// Keys cannot be read, are invalid, or are not supported by this build.
    Keys(String),
    /// A version was rejected. The model still holds the previous version, bit for bit, unless the
    /// text says that no version runs.
    Rejected { model: String, epoch: u64, version: u64, code: Code, text: String },
    /// The publisher refuses this worker, which keeps trying to join. If the worker has several
    /// addresses, it got a session at none: `address` lists all addresses, and `text` has the
    /// answer of each.
    Refused { worker: String, address: String, code: Code, text: String },
    /// The worker is closed.
    Closed { worker: String, reason: String },
    /// An apply failed half-way: the model holds parts of two versions, or a rejected version. The
    /// model cannot be read until another version is applied.
    Torn,
    /// The model or version has no tensor of this name.
    NoTensor { name: String, known: String },
    /// The tensor's dtype is not the requested one.
    OtherDtype { name: String, dtype: Dtype, asked: Dtype },
    /// A publish missed its requirement before the deadline. The receipt has the result of every
    /// worker, and `missing` names expected workers that never joined.
    Publish { receipt: Box<Receipt>, missing: String },
    /// The deadline of a publish passed before the tensors were copied; nothing was published.
    Late(String),
    /// A publish names a worker that has never joined; nothing was published.
    UnknownWorker(String),
    /// The publisher is closed.
    PublisherClosed { reason: String },
    /// A socket, a thread or memory could not be created.
    Io { what: String, error: io::Error },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Error::Address { address, text } => write!(f, "{:?}: {}", address, text),
            Error::Setup(text) | Error::Keys(text) | Error::Late(text) | Error::UnknownWorker(text) => {
                f.write_str(text)
            }
            Error::Rejected { model, version, code, text, .. } => {
                write!(f, "version {} of {} cannot be applied here ({}): {}", version, model, code, text)
            }
            Error::Refused { worker, address, text, .. } if address.contains(", ") => write!(
                f,
                "no publisher accepts worker {:?}: {}; the worker keeps trying to join",
                worker, text
            ),
            Error::Refused { worker, address, code, text } => write!(
                f,
                "the publisher at {} refuses worker {:?} ({}): {}; the worker keeps trying to join",
                address, worker, code, text
            ),
            Error::Closed { worker, reason } => {
                write!(f, "worker {:?} is closed ({}); connect a new one", worker, reason)
            }
            Error::Torn => f.write_str(
                "no version runs here: the last version was rejected after its bytes were in the model, or was \
                 overwritten while it was copied; receive() applies the next version that arrives",
            ),
            Error::NoTensor { name, known } => {
                write!(f, "there is no tensor {:?} here; there are: {}", name, known)
            }
            Error::OtherDtype { name, dtype, asked } => write!(
                f,
                "tensor {:?} has dtype {}, but {} was requested; request {}, or convert the tensor",
                name, dtype, asked, dtype
            ),
            Error::Publish { receipt, missing } => {
                write!(f, "the publish missed its requirement: {}", receipt)?;
                if missing.is_empty() {
                    return Ok(());
                }
                write!(f, "; {}", missing)
            }
            Error::PublisherClosed { reason } => {
                write!(f, "the publisher is closed ({}); bind a new one", reason)
            }
            Error::Io { what, error } => write!(f, "{}: {}", what, error),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Io { error, .. } => Some(error),
            _ => None,
        }
    }
}
