//! What a publish returns: what every worker did with a version, and when.

use crate::messages::DELTA;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// How far a worker is with a version that was published to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Outcome {
    /// It is still at it; `detail` says in which phase.
    Behind,
    /// It holds the version, verified.
    Staged,
    /// It runs it.
    Applied,
    /// It runs a newer one.
    Skipped,
    /// It will not run it; `detail` says why.
    Failed,
    /// It fell silent.
    Lost,
    /// It said goodbye, and is no longer one of all.
    Left,
}

impl Outcome {
    /// As other languages write it.
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Behind => "behind",
            Outcome::Staged => "staged",
            Outcome::Applied => "applied",
            Outcome::Skipped => "skipped",
            Outcome::Failed => "failed",
            Outcome::Lost => "lost",
            Outcome::Left => "left",
        }
    }
}

/// What one worker did with a version.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerReceipt {
    pub outcome: Outcome,
    /// From the call of publish to that; nothing while it is behind.
    pub after: Option<Duration>,
    /// For a person; empty where the outcome says it all.
    pub detail: String,
    /// How the version came to it: `raw` (all of it) or `delta-1` (a patch on what ran there); empty where nobody can
    /// tell.
    pub encoding: &'static str,
    /// Bytes of that, without headers; what was lost and sent again is not counted.
    pub nbytes: u64,
}

impl WorkerReceipt {
    /// Whether the version came as a patch.
    pub fn patched(&self) -> bool {
        self.encoding == DELTA
    }
}

/// What became of one publish.
#[derive(Clone, Debug, PartialEq)]
pub struct Receipt {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    /// Of its tensors.
    pub nbytes: u64,
    /// What workers' bytes were held against.
    pub digest: String,
    /// From the call of publish to this receipt.
    pub took: Duration,
    /// What was said of the version.
    pub metadata: BTreeMap<String, String>,
    /// By name, every worker that it was for.
    pub workers: BTreeMap<String, WorkerReceipt>,
}

impl Receipt {
    /// The names of the workers of one outcome.
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
            write!(f, "; nobody is there: it waits for those that join")?;
        }
        for (name, worker) in &self.workers {
            write!(f, "; {} {}", name, worker.outcome.name())?;
            if let Some(after) = worker.after {
                write!(f, " after {:.3} s", after.as_secs_f64())?;
            }
            if worker.patched() {
                write!(f, " by {} ({} bytes)", worker.encoding, worker.nbytes)?;
            }
            if !worker.detail.is_empty() {
                write!(f, ": {}", worker.detail)?;
            }
        }
        Ok(())
    }
}
