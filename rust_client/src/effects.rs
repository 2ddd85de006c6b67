//! What the machine wants done, and what it asks of its surroundings.

use crate::layout::Layout;
use crate::messages::{FromWorker, Metadata, Shared};
use crate::patching::Patching;
use crate::segment::Segment;
use crate::staging::StagedVersion;
use crate::transfer::Key;
use std::sync::Arc;

/// Something for the run loop to do.
#[derive(Debug)]
pub enum Effect {
    /// Send a message to the publisher.
    Send(FromWorker),
    /// Take published messages from this endpoint, in place of any before; with a ticket, which is spent with
    /// the next connection, unless it is empty.
    Connect { endpoint: String, ticket: String },
    /// Make both connections anew: those that there are may lead nowhere.
    Redial,
    /// Ask for a topic, or no longer.
    Subscribe { topic: String, on: bool },
    /// A version is whole and verified, and may be applied.
    Ready(StagedVersion),
    /// Decode a patch, in a thread that need not answer pings, and tell how that has ended.
    Decode(Patching),
    /// What runs has another name from now on, of which this is said.
    Renamed { model: String, was: Key, key: Key, metadata: Metadata },
    /// The publisher has let this worker in.
    Joined { epoch: u64 },
    /// The publisher is silent.
    Lost,
    /// A version cannot be taken; the old one still runs.
    Rejected { model: String, key: Key, code: &'static str, text: String },
    /// The publisher refuses this worker, which goes on asking.
    Refused { code: String, text: String },
    /// Something that a user may want to know.
    Notice { code: String, text: String },
}

/// What a machine asks of its surroundings.
pub trait Host: Send + Sync {
    /// Says why a layout cannot be applied to a model; nothing if it can.
    fn fault(&self, model: &str, layout: &Layout) -> Option<String>;

    /// Opens a segment of shared memory; nothing if it is not of this host.
    fn open(&self, _shared: &Shared, _nbytes: u64) -> Option<Arc<Segment>> {
        None
    }

    /// What runs has another name from now on, of which this is said.
    fn renamed(&self, _model: &str, _was: Key, _key: Key, _metadata: &Metadata) {}
}
