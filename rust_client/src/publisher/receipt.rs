//! Receipts: the result of a publish, with the outcome of every worker, and the time of that outcome.

use super::phases::Outcome;
use crate::messages::DELTA;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// What one worker did with a version.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerReceipt {
    pub outcome: Outcome,
    /// The time from the call of publish to the outcome; `None` while the worker is behind.
    pub after: Option<Duration>,
    /// An explanation of the outcome, for people; empty if none is needed.
    pub detail: String,
    /// How the version arrived: `raw` (whole) or `delta-1` (as a patch on the worker's running version);
    /// empty if unknown.
    pub encoding: &'static str,
    /// The number of bytes that arrived, without headers and repeated chunks.
    pub nbytes: u64,
    /// The names of the relays before the worker, the nearest to the publisher first.
    pub through: Vec<String>,
}

impl WorkerReceipt {
    /// True if the version arrived as a patch.
    pub fn patched(&self) -> bool {
        self.encoding == DELTA
    }
}

/// The result of one publish.
#[derive(Clone, Debug, PartialEq)]
pub struct Receipt {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    /// The size of the version's tensors in bytes.
    pub nbytes: u64,
    /// The version's digest, with which the workers' reports were compared.
    pub digest: String,
    /// The time from the call of publish to this receipt.
    pub took: Duration,
    /// The metadata of the version.
    pub metadata: BTreeMap<String, String>,
    /// Every worker that the version was published to, by name.
    pub workers: BTreeMap<String, WorkerReceipt>,
}

impl Receipt {
    /// Returns the names of the workers with this outcome.
    pub fn those(&self, outcome: Outcome) -> Vec<&str> {
        let those = self.workers.iter().filter(|(_, worker)| worker.outcome == outcome);
        those.map(|(name, _)| name.as_str()).collect()
    }
}

impl fmt::Display for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let took = self.took.as_secs_f64();
        write!(f, "{} version {} ({} bytes, {:.3} s)", self.model, self.version, self.nbytes, took)?;
        if self.workers.is_empty() {
            write!(f, "; no worker is connected: it waits for workers")?;
        }
        for (name, worker) in &self.workers {
            write!(f, "; {} {}", name, worker.outcome.name())?;
            if let Some(after) = worker.after {
                write!(f, " after {:.3} s", after.as_secs_f64())?;
            }
            if worker.patched() {
                write!(f, " by {} ({} bytes)", worker.encoding, worker.nbytes)?;
            }
            if !worker.through.is_empty() {
                write!(f, " through {}", worker.through.join(" and "))?;
            }
            if !worker.detail.is_empty() {
                write!(f, ": {}", worker.detail)?;
            }
        }
        Ok(())
    }
}
