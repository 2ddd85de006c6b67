//! State machines of a publisher's workers, targets, decisions and versions, as tables of (phase,
//! event, next phase). Nothing else changes a phase.
//!
//! An event without a transition from the current phase changes nothing. `docs/PROTOCOL.md` has the
//! same tables, and describes their meaning and their coupling (section 9);
//! `tests/vectors/publisher_phases.json` has every pair of phase and event. The transitions of
//! ended processes and of reclaimable memory are unused here.

use super::receipt::Outcome;
use crate::phases::next;

pub type Table<S, E> = &'static [(S, E, S)];

/// The current phase in a table. The initial phase is that of the first row.
#[derive(Clone, Copy)]
pub struct At<S: 'static, E: 'static>(S, Table<S, E>);

impl<S: Copy + PartialEq, E: Copy + PartialEq> At<S, E> {
    pub fn first(table: Table<S, E>) -> At<S, E> {
        At(table[0].0, table)
    }

    pub fn now(&self) -> S {
        self.0
    }

    pub fn is(&self, state: S) -> bool {
        self.0 == state
    }

    /// Applies an event. Returns true if the table has this transition.
    pub fn take(&mut self, event: E) -> bool {
        next(self.1, self.0, event).map(|state| self.0 = state).is_some()
    }
}

/// A worker on the roster.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PeerPhase {
    Here,
    /// The worker's connection is closed, and the worker has opened no other.
    Away,
    Lost,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PeerEvent {
    /// The worker sent a message on the control channel.
    Spoke,
    /// The worker's connection was closed.
    Closed,
    /// The worker was away for too long.
    Overdue,
    /// The worker is away, and another instance claims the worker's name.
    Contested,
    /// The worker was silent for too long.
    Silent,
    /// The worker's process ended.
    Ended,
}

pub const WORKERS: Table<PeerPhase, PeerEvent> = {
    use PeerEvent::*;
    use PeerPhase::*;
    &[
        (Here, Closed, Away),
        (Here, Silent, Lost),
        (Here, Ended, Lost),
        (Away, Spoke, Here),
        (Away, Overdue, Lost),
        (Away, Contested, Lost),
        (Away, Silent, Lost),
        (Away, Ended, Lost),
        (Lost, Spoke, Here),
    ]
};

/// An event of a target, which is one worker in one call of publish.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TargetEvent {
    Staged,
    Applied,
    Skipped,
    Failed,
    Lost,
    Left,
    Returned,
}

pub const TARGETS: Table<Outcome, TargetEvent> = {
    use Outcome as Is;
    use TargetEvent::*;
    &[
        (Is::Behind, Staged, Is::Staged),
        (Is::Behind, Applied, Is::Applied),
        (Is::Behind, Skipped, Is::Skipped),
        (Is::Behind, Failed, Is::Failed),
        (Is::Behind, Lost, Is::Lost),
        (Is::Behind, Left, Is::Left),
        (Is::Staged, Applied, Is::Applied),
        (Is::Staged, Skipped, Is::Skipped),
        (Is::Staged, Failed, Is::Failed),
        (Is::Staged, Lost, Is::Lost),
        (Is::Staged, Left, Is::Left),
        (Is::Failed, Staged, Is::Staged), // a retry may succeed
        (Is::Failed, Applied, Is::Applied),
        (Is::Failed, Skipped, Is::Skipped),
        (Is::Failed, Left, Is::Left),
        (Is::Lost, Left, Is::Left),
        (Is::Lost, Returned, Is::Behind), // a lost worker returns before any other event
        (Is::Left, Returned, Is::Behind),
    ]
};

/// The decision of a call whose workers apply the version together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decision {
    Open,
    Commit,
    Abort,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DecisionEvent {
    /// The required number of workers have staged the version.
    Enough,
    /// Too few workers can still stage the version, the call was ended early, or its deadline
    /// passed.
    TooFew,
}

pub const DECISIONS: Table<Decision, DecisionEvent> = &[
    (Decision::Open, DecisionEvent::Enough, Decision::Commit),
    (Decision::Open, DecisionEvent::TooFew, Decision::Abort),
];

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum VersionPhase {
    /// The version has a number, but is not committed.
    Pending,
    /// The newest version for all workers except those to which a newer one was published by name.
    Latest,
    /// The version is `Latest`, but reclaimable: no worker receives it, so the next publish may
    /// overwrite its memory.
    Reclaimable,
    /// The newest version that was published to some worker by name.
    Targeted,
    /// The version is outdated, but some worker still receives it.
    Old,
    /// The version is unavailable.
    Gone,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum VersionEvent {
    /// The version was committed for all workers.
    ForAll,
    /// The version was committed for named workers.
    ForSome,
    /// No worker receives the version.
    NoReaders,
    /// A worker requests the version, which is still in memory.
    Requested,
    /// A worker requests the version, but its memory was overwritten by another version.
    Overwritten,
    /// Newer versions have replaced the version for all of its workers.
    Newer,
    Aborted,
    /// The version's memory is needed for the next version.
    Evicted,
}

pub const VERSIONS: Table<VersionPhase, VersionEvent> = {
    use VersionEvent::*;
    use VersionPhase::*;
    &[
        (Pending, ForAll, Latest),
        (Pending, ForSome, Targeted),
        (Pending, Aborted, Gone),
        (Latest, NoReaders, Reclaimable),
        (Latest, Newer, Old),
        (Latest, Evicted, Gone),
        (Reclaimable, Requested, Latest),
        (Reclaimable, Overwritten, Gone),
        (Reclaimable, Newer, Gone),
        (Reclaimable, Evicted, Gone),
        (Targeted, Newer, Old),
        (Targeted, Evicted, Gone),
        (Old, NoReaders, Gone),
        (Old, Evicted, Gone),
    ]
};

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::collections::BTreeMap;
    use std::fmt::Debug;

    type Arrows = BTreeMap<[String; 3], String>; // from table, state and event to the next state

    /// Returns a name as the protocol spells it.
    fn word(name: &dyn Debug) -> String {
        let mut word = String::new();
        for letter in format!("{:?}", name).chars() {
            word += if letter.is_uppercase() && !word.is_empty() { "-" } else { "" };
            word.push(letter.to_ascii_lowercase());
        }
        word
    }

    fn add<S: Debug, E: Debug>(arrows: &mut Arrows, of: &str, table: Table<S, E>) {
        for (from, by, to) in table {
            let known = arrows.insert([of.to_owned(), word(from), word(by)], word(to));
            assert_eq!(known, None, "two arrows");
        }
    }

    #[test]
    fn the_tables_are_those_of_the_protocol() {
        let mut arrows = Arrows::new();
        add(&mut arrows, "worker on the roster", WORKERS);
        add(&mut arrows, "target", TARGETS);
        add(&mut arrows, "decision", DECISIONS);
        add(&mut arrows, "published version", VERSIONS);
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/publisher_phases.json");
        let vectors: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let cases = vectors["cases"].as_array().unwrap().iter().filter(|case| !case["next"].is_null());
        let text = |case: &Value, field: &str| case[field].as_str().unwrap().to_owned();
        let told: Arrows =
            cases.map(|c| (["of", "state", "event"].map(|field| text(c, field)), text(c, "next"))).collect();
        assert_eq!(arrows, told);
    }
}
