//! What can go wrong, for people: who, what, and what to do next.

use crate::code::Code;
use crate::dtype::Dtype;
use crate::publisher::Receipt;
use std::fmt;
use std::io;

/// What went wrong.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// An address that this bus cannot use.
    Address { address: String, text: String },
    /// The worker was set up in a way that cannot work.
    Setup(String),
    /// Keys cannot be read, or make no sense, or nothing here can do with keys.
    Keys(String),
    /// A version cannot be taken; the model still holds the old one, bit for bit, unless the text says
    /// that no version runs.
    Rejected { model: String, epoch: u64, version: u64, code: Code, text: String },
    /// The publisher refuses this worker, which goes on asking.
    Refused { worker: String, address: String, code: Code, text: String },
    /// The worker is closed.
    Closed { worker: String, reason: String },
    /// An apply has failed half-way: the model holds parts of two versions, or one that was turned down.
    /// None is served until another is applied.
    Torn,
    /// A model or version has no tensor of this name.
    NoTensor { name: String, known: String },
    /// A tensor is of another type than was asked for.
    OtherDtype { name: String, dtype: Dtype, asked: Dtype },
    /// A publish did not reach what it required before its deadline. The receipt says what every worker did, and
    /// `missing` who was expected and never came.
    Publish { receipt: Box<Receipt>, missing: String },
    /// The time of a publish was over before the tensors were copied; nothing was published.
    Late(String),
    /// A publish names a worker that has never joined; nothing was published.
    UnknownWorker(String),
    /// The publisher is closed.
    PublisherClosed { reason: String },
    /// Sockets or threads are not to be had.
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
            Error::Refused { worker, address, code, text } => write!(
                f,
                "the publisher at {} refuses worker {:?} ({}): {}; the worker goes on asking",
                address, worker, code, text
            ),
            Error::Closed { worker, reason } => {
                write!(f, "worker {:?} is closed ({}); connect a new one", worker, reason)
            }
            Error::Torn => f.write_str(
                "no version runs here: the last was turned down after its bytes had changed the model, or changed \
                 while it was copied; receive() applies the next that comes",
            ),
            Error::NoTensor { name, known } => {
                write!(f, "there is no tensor {:?} here; there are: {}", name, known)
            }
            Error::OtherDtype { name, dtype, asked } => write!(
                f,
                "tensor {:?} is of dtype {}, asked for was {}; ask for {}, or convert",
                name, dtype, asked, dtype
            ),
            Error::Publish { receipt, missing } => {
                write!(f, "less was achieved than required: {}", receipt)?;
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
