//! Describes workers for the user of a publisher: the versions that a worker runs, and what it is doing.

use super::roster::{Delivery, Peer};
use super::store::Store;
use crate::limits::{Timing, LABEL_MAX};
use crate::messages::ProgressPhase;
pub use crate::messages::WorkerRowState as WorkerState;
use crate::transfer::{Key, Time};
use crate::words::printable;
use std::collections::BTreeMap;
use std::time::Duration;

/// The status of one worker.
#[derive(Clone, Debug)]
pub struct WorkerStatus {
    /// A stuck worker answers, but makes no progress.
    pub state: WorkerState,
    /// True if broadcasts reach the worker. Otherwise the worker fetches everything.
    pub pushed: bool,
    /// The models that the worker subscribes to, each with the running (epoch, version).
    pub models: BTreeMap<String, Option<Key>>,
    /// By model, a text on the version that is being delivered to the worker.
    pub doing: BTreeMap<String, String>,
    /// The time since the worker's last message.
    pub silent: Duration,
    /// The client library, as the worker reports it.
    pub client: String,
    pub host: String,
    pub pid: u64,
    /// True if the worker is a relay, which passes versions on to other workers.
    pub relay: bool,
    /// The names of the relays before the worker, the nearest to the publisher first. If there are relays,
    /// `pushed` is about the broadcasts of the last one.
    pub through: Vec<String>,
    /// True if the worker copies versions from the shared memory of a relay on its host.
    pub shared_memory: bool,
}

impl WorkerStatus {
    pub(super) fn of(peer: &Peer, store: &Store, timing: &Timing, now: Time) -> WorkerStatus {
        let runs = |model: &String| Some(peer.running_key(model)).filter(|&key| key > (0, 0));
        let doing = |(m, i): (&String, &Delivery)| (m.clone(), doing_text(m, i, store, timing, now));
        WorkerStatus {
            state: state_of(peer, timing, now),
            pushed: peer.subscribed,
            models: peer.hello.models.keys().map(|model| (model.clone(), runs(model))).collect(),
            doing: peer.incoming.iter().map(doing).collect(),
            silent: now.saturating_sub(peer.heard_at),
            client: peer.hello.client.clone(),
            host: peer.hello.host.clone(),
            pid: peer.hello.pid,
            relay: peer.is_relay(),
            through: peer.through.clone(),
            shared_memory: peer.shared_memory,
        }
    }
}

/// Returns the state of a worker: live, stuck or lost.
pub(super) fn state_of(peer: &Peer, timing: &Timing, now: Time) -> WorkerState {
    match (peer.is_lost(), is_stuck(peer, timing, now)) {
        (true, _) => WorkerState::Lost,
        (false, true) => WorkerState::Stuck,
        (false, false) => WorkerState::Live,
    }
}

/// True if a delivery to the worker has made no progress for `stuck_after`.
pub(super) fn is_stuck(peer: &Peer, timing: &Timing, now: Time) -> bool {
    peer.incoming.values().any(|incoming| now.saturating_sub(incoming.since) >= timing.stuck_after)
}

/// Returns the number of chunks of the version that is being delivered. If that was dropped, returns the
/// number of chunks that have arrived.
pub(super) fn chunk_count(model: &str, incoming: &Delivery, store: &Store) -> u64 {
    let version = store.models.get(model).and_then(|versions| versions.get(incoming.version));
    version.map_or(incoming.chunks, |version| version.chunks_of(incoming.patch.as_ref()))
}

/// Returns a text on a delivery to a worker: what the worker is doing, and for how long it has made no
/// progress.
pub(super) fn doing_text(
    model: &str,
    incoming: &Delivery,
    store: &Store,
    timing: &Timing,
    now: Time,
) -> String {
    let version = incoming.version;
    let mut text = match incoming.phase {
        ProgressPhase::Applying => format!("applying version {}", version),
        ProgressPhase::Staged => format!("staged version {}", version),
        ProgressPhase::Receiving => {
            let count = chunk_count(model, incoming, store);
            format!("receiving version {}, {} of {} chunks here", version, incoming.chunks, count)
        }
    };
    if !incoming.waits.is_empty() {
        let who = printable(&incoming.waits, LABEL_MAX);
        text += &format!(", which waits for users of the old weights: {}", who);
    }
    let idle = now.saturating_sub(incoming.since);
    if idle >= timing.quiet {
        text += &format!(", no progress for {:.1} s", idle.as_secs_f64());
    }
    text
}
