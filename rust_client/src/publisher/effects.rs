//! Effects: the actions that a publisher's machine decides, and that the publisher's thread carries out.

use super::content::Content;
use super::receipt::Receipt;
use super::sealer::Sealed;
use crate::messages::FromPublisher;
use crate::transfer::Key;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The ROUTER's identity of a control connection.
pub type Identity = Vec<u8>;

/// The payload of a message: shared bytes of a version, which queues do not copy.
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
    /// The worker rejected a version, or failed to apply it.
    Failed,
    /// The worker reported a digest that differs from the published one. The report does not count.
    WrongDigest,
    /// Any other event: for example, a version was published to no worker, a worker subscribes to a
    /// model whose name is probably misspelt (`polcy`), a worker never applies its version, a worker
    /// fetches a whole version although there is a patch, or the epoch has changed.
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
    /// Drop the queued messages of a model, which are outdated.
    Withdraw { model: String },
    /// Store a version on disk, because it is now the latest for all workers. `names` are its earlier
    /// (epoch, version) pairs.
    Store { model: String, key: Key, content: Arc<Content>, names: BTreeSet<Key> },
    /// Return from a call of publish. `missing` is a text on expected workers that never joined; empty
    /// if all joined.
    Resolve { id: u64, receipt: Receipt, achieved: bool, missing: String },
    /// Close the data connections of workers without permission, and rotate the group key.
    CloseRevoked,
    /// Close the control connection whose message is being handled.
    HangUp,
    /// Return free memory to the operating system after a flood of messages.
    GiveMemoryBack,
    /// Report an event to the user's `on_worker` function.
    Notify(WorkerEvent),
}
