// Made by `make protocol`; do not edit.
//! The codes of the protocol, for programs. Texts beside them are for people.

use std::fmt;

/// The codes of `failed` after which a worker tries the version again.
pub const TRANSIENT: [&str; 4] = ["layout-invalid", "unsupported", "no-memory", "digest-mismatch"];

/// Why a version was rejected, or a worker was refused.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Code {
    /// The layout breaks a rule, or is not the announced one.
    LayoutInvalid,
    /// The model has other names, shapes or dtypes.
    LayoutMismatch,
    /// An unknown encoding or encryption; `together` at levels 1 and 2.
    Unsupported,
    /// More bytes than the worker accepts.
    TooLarge,
    /// Too many chunks.
    TooManyChunks,
    /// No memory, disk space or file descriptor.
    NoMemory,
    /// The chunks do not match the version's digest, or do not arrive.
    DigestMismatch,
    /// The user rejected the version, or applying it failed; for an apply that failed half-way see
    /// W24.
    Apply,
    /// The connection is not that of a known worker (P4).
    UnknownWorker,
    /// Another live instance has the name.
    NameTaken,
    /// The worker has weights that this publisher cannot replace (P3).
    StaleEpoch,
    /// There is no room for the worker or observer.
    Limit,
    /// `wbp` is not 1.
    ProtocolVersion,
    /// The key is for another name (K3).
    WrongName,
    /// The key is no longer allowed (K8).
    Revoked,
    /// The key does not permit this (K4).
    NotAllowed,
    /// The message is malformed: a bug of the worker.
    Malformed,
    /// The model's name is probably wrong (P25).
    NoModel,
    /// The version is not available.
    Gone,
    /// The version has no such chunks.
    Range,
    /// There is no such patch (D8).
    NoPatch,
    /// A handshake failed because of keys; the text has the likely reason.
    Keys,
    /// A code that this crate does not know; the protocol may add codes.
    Other(String),
}

impl Code {
    /// Returns the code as it is in messages.
    pub fn as_str(&self) -> &str {
        match self {
            Code::LayoutInvalid => "layout-invalid",
            Code::LayoutMismatch => "layout-mismatch",
            Code::Unsupported => "unsupported",
            Code::TooLarge => "too-large",
            Code::TooManyChunks => "too-many-chunks",
            Code::NoMemory => "no-memory",
            Code::DigestMismatch => "digest-mismatch",
            Code::Apply => "apply",
            Code::UnknownWorker => "unknown-worker",
            Code::NameTaken => "name-taken",
            Code::StaleEpoch => "stale-epoch",
            Code::Limit => "limit",
            Code::ProtocolVersion => "protocol-version",
            Code::WrongName => "wrong-name",
            Code::Revoked => "revoked",
            Code::NotAllowed => "not-allowed",
            Code::Malformed => "malformed",
            Code::NoModel => "no-model",
            Code::Gone => "gone",
            Code::Range => "range",
            Code::NoPatch => "no-patch",
            Code::Keys => "keys",
            Code::Other(text) => text,
        }
    }
}

impl From<&str> for Code {
    fn from(text: &str) -> Code {
        match text {
            "layout-invalid" => Code::LayoutInvalid,
            "layout-mismatch" => Code::LayoutMismatch,
            "unsupported" => Code::Unsupported,
            "too-large" => Code::TooLarge,
            "too-many-chunks" => Code::TooManyChunks,
            "no-memory" => Code::NoMemory,
            "digest-mismatch" => Code::DigestMismatch,
            "apply" => Code::Apply,
            "unknown-worker" => Code::UnknownWorker,
            "name-taken" => Code::NameTaken,
            "stale-epoch" => Code::StaleEpoch,
            "limit" => Code::Limit,
            "protocol-version" => Code::ProtocolVersion,
            "wrong-name" => Code::WrongName,
            "revoked" => Code::Revoked,
            "not-allowed" => Code::NotAllowed,
            "malformed" => Code::Malformed,
            "no-model" => Code::NoModel,
            "gone" => Code::Gone,
            "range" => Code::Range,
            "no-patch" => Code::NoPatch,
            "keys" => Code::Keys,
            other => Code::Other(other.to_owned()),
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
