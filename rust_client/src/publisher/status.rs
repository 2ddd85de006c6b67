//! Who runs what, and what everybody is doing: the roster as the user of a publisher sees it.

use super::roster::{Delivery, Peer};
use super::store::Store;
use crate::limits::{Timing, LABEL_MAX};
use crate::messages::Doing;
use crate::transfer::{Key, Time};
use crate::words::printable;
use std::collections::BTreeMap;
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerState {
    Live,
    /// It answers, but makes no progress.
    Stuck,
    Lost,
}

/// One worker, as an operator sees it.
#[derive(Clone, Debug)]
pub struct WorkerStatus {
    pub state: WorkerState,
    /// What is pushed to all reaches it; otherwise it fetches everything.
    pub pushed: bool,
    /// The models that it wants, with the epoch and version that it runs.
    pub models: BTreeMap<String, Option<Key>>,
    /// By model, what it is doing with a newer version, in words.
    pub doing: BTreeMap<String, String>,
    /// Since it was last heard.
    pub silent: Duration,
    /// What it says it is.
    pub client: String,
    pub host: String,
    pub pid: u64,
}

impl WorkerStatus {
    pub(super) fn of(peer: &Peer, store: &Store, timing: &Timing, now: Time) -> WorkerStatus {
        let runs = |model: &String| Some(peer.runs(model)).filter(|&key| key > (0, 0));
        let stuck = is_stuck(peer, timing, now);
        let doing = |(m, i): (&String, &Delivery)| (m.clone(), phase_of(m, i, store, timing, now));
        WorkerStatus {
            state: match (peer.lost(), stuck) {
                (true, _) => WorkerState::Lost,
                (false, true) => WorkerState::Stuck,
                (false, false) => WorkerState::Live,
            },
            pushed: peer.subscribed,
            models: peer.hello.models.keys().map(|model| (model.clone(), runs(model))).collect(),
            doing: peer.incoming.iter().map(doing).collect(),
            silent: now.saturating_sub(peer.heard_at),
            client: peer.hello.client.clone(),
            host: peer.hello.host.clone(),
            pid: peer.hello.pid,
        }
    }
}

/// Whether a worker has something on its way that has not moved for long.
pub(super) fn is_stuck(peer: &Peer, timing: &Timing, now: Time) -> bool {
    peer.incoming.values().any(|incoming| now.saturating_sub(incoming.since) >= timing.lost_after)
}

/// How many chunks there are of what arrives; what is here, if it is gone by now.
pub(super) fn count_of(model: &str, incoming: &Delivery, store: &Store) -> u64 {
    let kept = store.models.get(model).and_then(|versions| versions.get(incoming.version));
    kept.map_or(incoming.chunks, |kept| kept.chunks_of(incoming.patch.as_ref()))
}

/// Says what a worker is doing with a version, and since when it has not moved.
pub(super) fn phase_of(
    model: &str,
    incoming: &Delivery,
    store: &Store,
    timing: &Timing,
    now: Time,
) -> String {
    let version = incoming.version;
    let mut text = match incoming.phase {
        Doing::Applying => format!("applying version {}", version),
        Doing::Staged => format!("staged version {}", version),
        Doing::Receiving => {
            let count = count_of(model, incoming, store);
            format!("receiving version {}, {} of {} chunks here", version, incoming.chunks, count)
        }
    };
    if !incoming.waits.is_empty() {
        let who = printable(&incoming.waits, LABEL_MAX);
        text += &format!(", which waits for who uses the old weights: {}", who);
    }
    let idle = now.saturating_sub(incoming.since);
    if idle >= timing.quiet {
        text += &format!(", no progress for {:.1} s", idle.as_secs_f64());
    }
    text
}
