//! Effects: actions that a publisher's machine returns for its thread to carry out.

use super::content::Content;
use super::receipt::Receipt;
use super::sealer::Sealed;
use crate::messages::FromPublisher;
use crate::transfer::Key;
use std::collections::BTreeSet;
use std::sync::Arc;

/// A control connection, as the ROUTER identifies it.
pub type Identity = Vec<u8>;

/// The payload of a message: bytes of a version, which are sent without a copy.
#[derive(Clone, Debug)]
pub enum Payload {
    None,
    Layout(Arc<Content>),
    Chunk(Arc<Content>, u64),
    SealedLayout(Arc<Sealed>),
    Sealed(Arc<Sealed>),
}

impl Payload {
    /// Returns the bytes; `None` if there is no payload.
    pub fn bytes(&self) -> Option<&[u8]> {
        match self {
            Payload::None => None,
            Payload::Layout(content) => Some(&content.header.bytes),
            Payload::Chunk(content, index) => Some(content.chunk(*index)),
            Payload::SealedLayout(sealed) | Payload::Sealed(sealed) => Some(&sealed.bytes),
        }
    }
}

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WorkerEventKind {
    Joined,
    /// The worker fell silent, or its connection was closed.
    Lost,
    /// The worker answers, but makes no progress.
    Stuck,
    /// The worker answers again, or makes progress again.
    Back,
    /// The worker left.
    Left,
    /// The worker was refused.
    Refused,
    /// The worker will not run a version.
    Failed,
    /// The worker reported a digest that differs from the published one. It does not count as done.
    WrongDigest,
    /// Any other event: a version was published to no worker, a worker subscribes to a model whose
    /// name is similar to a published one (`polcy`), a worker never applies its version, a version
    /// arrived whole although there was a patch, or the epoch has changed.
    Notice,
}

impl WorkerEventKind {
    /// Returns the kind's name, which is the same in all languages.
    pub fn as_str(self) -> &'static str {
        match self {
            WorkerEventKind::Joined => "joined",
            WorkerEventKind::Lost => "lost",
            WorkerEventKind::Stuck => "stuck",
            WorkerEventKind::Back => "back",
            WorkerEventKind::Left => "left",
            WorkerEventKind::Refused => "refused",
            WorkerEventKind::Failed => "failed",
            WorkerEventKind::WrongDigest => "wrong-digest",
            WorkerEventKind::Notice => "notice",
        }
    }
}

/// An event of a worker, with a text for people.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerEvent {
    pub kind: WorkerEventKind,
    /// The worker's name; empty for a notice that concerns no worker.
    pub worker: String,
    pub text: String,
}

/// An action for the publisher's thread.
#[derive(Debug)]
pub enum Effect {
    /// Send a message to one worker.
    Send { to: Identity, message: FromPublisher, payload: Payload },
    /// Send this header to an observer, or to the worker that an observer's request is about.
    Answer { to: Identity, header: Vec<u8> },
    /// Send a message to every subscriber of the topic.
    Broadcast { topic: String, message: FromPublisher, payload: Payload },
    /// Drop the queued messages of a model: they are outdated.
    Withdraw { model: String },
    /// Store a version, with its earlier (epoch, version) pairs: it is now the latest for all
    /// workers.
    Store { model: String, key: Key, content: Arc<Content>, names: BTreeSet<Key> },
    /// End a call of publish. `missing` is a text on the expected workers that never joined; empty
    /// if none.
    Resolve { id: u64, receipt: Receipt, achieved: bool, missing: String },
    /// Close the data connections of workers without permission, and rotate the group key.
    CloseRevoked,
    /// Close the connection whose message is being handled.
    HangUp,
    /// Return memory to the system after a flood.
    GiveMemoryBack,
    /// Report an event to the listener.
    Notify(WorkerEvent),
}
