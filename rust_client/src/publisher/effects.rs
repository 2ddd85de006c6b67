//! What a publisher's machine wants done.

use super::content::Content;
use super::receipt::Receipt;
use super::sealer::Sealed;
use crate::messages::FromPublisher;
use crate::transfer::Key;
use std::collections::BTreeSet;
use std::sync::Arc;

/// A connection to the ROUTER, as ZeroMQ calls it.
pub type Identity = Vec<u8>;

/// The payload of a message: bytes of a version, which nobody copies before they are sent.
#[derive(Clone, Debug)]
pub enum Payload {
    None,
    Layout(Arc<Content>),
    Chunk(Arc<Content>, u64),
    SealedLayout(Arc<Sealed>),
    Sealed(Arc<Sealed>),
}

impl Payload {
    /// The frame, if there is one.
    pub fn bytes(&self) -> Option<&[u8]> {
        match self {
            Payload::None => None,
            Payload::Layout(content) => Some(&content.header.bytes),
            Payload::Chunk(content, index) => Some(content.chunk(*index)),
            Payload::SealedLayout(sealed) | Payload::Sealed(sealed) => Some(&sealed.bytes),
        }
    }
}

/// What became of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WorkerEventKind {
    Joined,
    /// It fell silent.
    Lost,
    /// It answers, and makes no progress.
    Stuck,
    /// It answers again, or moves again.
    Back,
    /// It said goodbye.
    Left,
    /// It was not let in.
    Refused,
    /// It will not run a version.
    Failed,
    /// It reports bytes that were not published, and never counts as done.
    WrongDigest,
    /// Nothing became of a worker: a version was published to nobody, a worker wants a model that is called nearly
    /// as one that is published (`polcy`), or has a version and never applies it; a version came to one as a whole though there was a
    /// patch, or the epoch has changed.
    Notice,
}

impl WorkerEventKind {
    /// Returns its name, as it is in all languages.
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

/// Something that happened to a worker, in words for people.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerEvent {
    pub kind: WorkerEventKind,
    /// Its name; empty for a notice that is of none.
    pub worker: String,
    pub text: String,
}

/// Something for the thread to do.
#[derive(Debug)]
pub enum Effect {
    /// Send to one worker.
    Send { to: Identity, message: FromPublisher, payload: Payload },
    /// Send this header to whoever looks on, or is looked at.
    Answer { to: Identity, header: Vec<u8> },
    /// Publish to whoever has subscribed to the topic.
    Broadcast { topic: String, message: FromPublisher, payload: Payload },
    /// Forget what was published of a model and is not on its way yet: it is out of date.
    Withdraw { model: String },
    /// A version is the latest for all workers now: what there is to keep of a model, and its names of before.
    Settled { model: String, key: Key, content: Arc<Content>, names: BTreeSet<Key> },
    /// A call of publish is over; with words on who never came, if anybody was expected.
    Resolve { id: u64, receipt: Receipt, achieved: bool, missing: String },
    /// Hang up on those whose keys may not have data connections any more, and draw another group key.
    Screen,
    /// Close the connection of the message that is being taken.
    HangUp,
    /// Memory that a flood took goes back to the system.
    GiveMemoryBack,
    /// Tell whoever listens.
    Tell(WorkerEvent),
}
