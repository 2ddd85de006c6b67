//! The actions that the worker's state machine returns, and the services that the machine calls.

use crate::layout::Layout;
use crate::messages::{FromWorker, Metadata, Shared};
use crate::patching::Patching;
use crate::segment::Segment;
use crate::sources::SourceFetch;
use crate::staging::StagedVersion;
use crate::transfer::Key;
use std::sync::Arc;
use std::time::Duration;

/// An action for the run loop.
#[derive(Debug)]
pub enum Effect {
    /// Send a message to the publisher.
    Send(FromWorker),
    /// Connect the data socket to this endpoint only. If `ticket` is not empty, the next connection
    /// presents it; it is valid once.
    Connect { endpoint: String, ticket: String },
    /// Close both connections, which may be dead, and dial again.
    Redial,
    /// Close both connections, and dial another of the worker's addresses after a pause. A pause
    /// ends a round in which no address gave the worker a session.
    ChangeOver { to: usize, pause: Duration },
    /// Find out whether a publisher listens at the first address, and report the answer.
    Probe,
    /// Subscribe to a topic, or unsubscribe.
    Subscribe { topic: String, on: bool },
    /// A version is whole and verified, and may be applied.
    Ready(StagedVersion),
    /// Versions of several models that were published as one may be applied, all at once.
    ReadyAtOnce(Vec<StagedVersion>),
    /// Decode a patch in another thread, so that pings are answered meanwhile; report the result.
    Decode(Patching),
    /// Fetch chunks from a source, in another thread, and report each chunk and the end.
    FetchFromSource(SourceFetch),
    /// Give the running version `was` the key `key` and this metadata.
    Renamed { model: String, was: Key, key: Key, metadata: Metadata },
    /// The publisher has admitted this worker.
    Joined { epoch: u64 },
    /// The publisher is lost.
    Lost,
    /// A version was rejected; the previous one still runs.
    Rejected { model: String, key: Key, code: &'static str, text: String },
    /// The publisher refuses this worker, which keeps trying to join.
    Refused { code: String, text: String },
    /// Something unusual that a user may want to know.
    Notice { code: String, text: String },
}

/// Services that the machine calls.
pub trait Host: Send + Sync {
    /// Returns why a layout cannot be applied to a model; `None` if it can.
    fn fault(&self, model: &str, layout: &Layout) -> Option<String>;

    /// Opens a segment of shared memory. Returns `None` if it cannot be read, e.g. on another host.
    fn open(&self, _shared: &Shared, _nbytes: u64) -> Option<Arc<Segment>> {
        None
    }

    /// Gives the running version `was` the key `key` and this metadata.
    fn renamed(&self, _model: &str, _was: Key, _key: Key, _metadata: &Metadata) {}
}
