//! What a publisher's workers, targets, decisions and versions go through: phase x event -> phase. Nothing else moves one.
//!
//! An event that has no arrow from where something is changes nothing. `docs/PROTOCOL.md` has the same tables, and says
//! what they mean and how they are coupled (section 9); `tests/vectors/publisher_phases.json` has every arrow, and every
//! pair without one. Nothing here tells that a process has ended, or lends the memory of a version: those arrows are
//! unused.

use super::receipt::Outcome;
use crate::phases::next;

pub type Table<S, E> = &'static [(S, E, S)];

/// Where something is in a table: first where that begins, and then wherever events lead.
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

    /// Takes an event; tells whether there is an arrow for that.
    pub fn take(&mut self, event: E) -> bool {
        next(self.1, self.0, event).map(|state| self.0 = state).is_some()
    }
}

/// A worker on the roster.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PeerPhase {
    Here,
    /// Its connection is closed, and it has come on no other.
    Away,
    Lost,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PeerEvent {
    /// It has said something on the control channel.
    Spoke,
    /// Its connection is.
    Closed,
    /// It has been away for too long.
    Overdue,
    /// It is away, and another instance asks for its name.
    Contested,
    /// It has said nothing for too long.
    Silent,
    /// Its process has.
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

/// What happens to a target, which is one worker in one call of publish.
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
        (Is::Lost, Returned, Is::Behind), // whatever it says, it has returned first
        (Is::Left, Returned, Is::Behind),
    ]
};

/// Of a call that commits together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decision {
    Open,
    Commit,
    Abort,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DecisionEvent {
    /// So many have staged it as are required.
    Enough,
    /// So many cannot any more, or it is given up, or its time is over.
    TooFew,
}

pub const DECISIONS: Table<Decision, DecisionEvent> = &[
    (Decision::Open, DecisionEvent::Enough, Decision::Commit),
    (Decision::Open, DecisionEvent::TooFew, Decision::Abort),
];

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum VersionPhase {
    /// It is numbered, and may wait until enough workers have staged it.
    Pending,
    /// Of its model, for all workers that have nothing newer of their own.
    Latest,
    /// The same, while nobody is at it: whoever publishes next may write over it.
    Lent,
    /// The newest that was published to some worker alone.
    Targeted,
    /// Some worker is still at it.
    Old,
    /// It is not to be had.
    Gone,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum VersionEvent {
    /// It is committed, for all workers.
    ForAll,
    /// It is committed, for workers that were named.
    ForSome,
    /// Nobody is at it.
    Unread,
    /// Somebody wants it, and its memory still has it.
    Asked,
    /// Somebody wants it, and its memory serves another version by now.
    Overwritten,
    /// Other versions are the newest for all that it was for.
    Newer,
    Aborted,
    /// Its memory is wanted for the next version.
    GivenUp,
}

pub const VERSIONS: Table<VersionPhase, VersionEvent> = {
    use VersionEvent::*;
    use VersionPhase::*;
    &[
        (Pending, ForAll, Latest),
        (Pending, ForSome, Targeted),
        (Pending, Aborted, Gone),
        (Latest, Unread, Lent),
        (Latest, Newer, Old),
        (Latest, GivenUp, Gone),
        (Lent, Asked, Latest),
        (Lent, Overwritten, Gone),
        (Lent, Newer, Gone),
        (Lent, GivenUp, Gone),
        (Targeted, Newer, Old),
        (Targeted, GivenUp, Gone),
        (Old, Unread, Gone),
        (Old, GivenUp, Gone),
    ]
};

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::collections::BTreeMap;
    use std::fmt::Debug;

    type Arrows = BTreeMap<[String; 3], String>; // from what a table is of, a state and an event, to a state

    /// As the protocol writes it.
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
