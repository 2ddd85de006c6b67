//! What a version goes through at a worker: phase x event -> phase. Nothing else moves one.
//!
//! ```text
//! announced ──> arriving ──> staged ──> ready ──> applying ──> running
//!     │             │           │         │           │           │
//!     └─────────────┴───────────┴─────────┴───────────┴───────────┴──> dropped, rejected
//! ```
//!
//! An event that has no arrow from a version's phase changes nothing: messages come late, twice and
//! in any order. `docs/PROTOCOL.md` has the same tables (section 8), and `tests/vectors/phases.json`
//! has every arrow, and every pair without one.

use serde::{Deserialize, Serialize};
use Event::*;
use Phase::*;

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// There is such a version; its layout or memory is missing.
    Announced,
    /// Its chunks are coming.
    Arriving,
    /// Whole and verified; waits for a commit.
    Staged,
    /// The user may apply it.
    Ready,
    /// The user does.
    Applying,
    Running,
    /// Of no use; it may be announced again.
    Dropped,
    /// Not tried again in this session.
    Rejected,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Event {
    /// Its layout is known and fits, and there is memory.
    Begun,
    /// Its segment is open, and it need not be staged.
    Mapped,
    /// All chunks and the digest are here, and match.
    Whole,
    /// It is `auto`, or `commit` came, or it is announced as `auto`.
    Committed,
    /// The user begins to apply it.
    Taken,
    /// The user will apply it later.
    PutBack,
    Applied,
    /// A check fails that a repetition will not mend, or the user turns it down.
    Declined,
    /// Something fails that may be otherwise next time.
    Failed,
    /// An apply has failed half-way: what ran is gone, too.
    Torn,
    /// Its segment holds another version by now.
    Stale,
    /// A newer version has the same bytes.
    Renamed,
    /// A newer version takes its place.
    Newer,
    /// The publisher has it no more.
    Gone,
    Aborted,
    /// A session of another epoch has begun.
    Fenced,
}

pub const ARROWS: &[(Phase, Event, Phase)] = &[
    (Announced, Begun, Arriving),
    (Announced, Mapped, Ready),
    (Announced, Declined, Rejected),
    (Announced, Failed, Dropped),
    (Announced, Newer, Dropped),
    (Announced, Gone, Dropped),
    (Announced, Aborted, Dropped),
    (Announced, Fenced, Dropped),
    (Arriving, Whole, Staged),
    (Arriving, Failed, Dropped),
    (Arriving, Newer, Dropped),
    (Arriving, Gone, Dropped),
    (Arriving, Aborted, Dropped),
    (Arriving, Fenced, Dropped),
    (Staged, Committed, Ready),
    (Staged, Newer, Dropped),
    (Staged, Aborted, Dropped),
    (Staged, Fenced, Dropped),
    (Ready, Taken, Applying),
    (Ready, Newer, Dropped),
    (Applying, Applied, Running),
    (Applying, PutBack, Ready),
    (Applying, Declined, Rejected),
    (Applying, Failed, Dropped),
    (Applying, Torn, Dropped),
    (Applying, Stale, Dropped),
    (Applying, Newer, Dropped), // another thread was faster
    (Running, Renamed, Running),
    (Running, Newer, Dropped),
    (Running, Torn, Dropped),
];

/// Of an announced version: what it lacks. Who lacks a layout has asked for it; a segment and memory
/// are there at once, or are not to be had; a buffer is when another version lets go of one. It is
/// `begun` once it lacks no more than memory, and `mapped` once it lacks no more than a segment.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lack {
    Layout,
    Segment,
    Memory,
    Buffer,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LackEvent {
    Known,
    Located,
    Opened,
    Full,
    Freed,
}

pub const LACKS: &[(Lack, LackEvent, Lack)] = &[
    (Lack::Layout, LackEvent::Known, Lack::Memory),
    (Lack::Layout, LackEvent::Located, Lack::Segment),
    (Lack::Segment, LackEvent::Opened, Lack::Memory),
    (Lack::Memory, LackEvent::Full, Lack::Buffer),
    (Lack::Buffer, LackEvent::Freed, Lack::Memory),
];

/// Of an arriving version: how it comes. A chunk that is received may have been asked for; where
/// nothing more is pushed, all are.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Coming {
    Received,
    Pulled,
    Copied,
    Decoded,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    Unpushed,
    Lent,
    Patched,
    Returned,
}

pub const COMING: &[(Coming, Way, Coming)] = &[
    (Coming::Received, Way::Unpushed, Coming::Pulled),
    (Coming::Received, Way::Lent, Coming::Copied),
    (Coming::Pulled, Way::Patched, Coming::Decoded),
    (Coming::Copied, Way::Returned, Coming::Pulled),
];

/// Of a model: whether its worker takes what is pushed. Who had to drop an arriving version for a
/// newer one finishes the next, by fetching, before it looks at anything newer; else one that is
/// slower than its publisher would never complete any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    #[default]
    Following,
    CatchingUp,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ModeEvent {
    Replaced,
    Completed,
}

pub const MODES: &[(Mode, ModeEvent, Mode)] = &[
    (Mode::Following, ModeEvent::Replaced, Mode::CatchingUp),
    (Mode::CatchingUp, ModeEvent::Completed, Mode::Following),
];

/// Of a worker: whether it has a session with its publisher. While it probes it has none: its hello is
/// answered, and it is yet to be seen whether the publisher's memory can be read.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Session {
    Outside,
    Probing,
    Inside,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Change {
    Located,
    Welcomed,
    Unknown,
    Refused,
    Silent,
}

pub const SESSIONS: &[(Session, Change, Session)] = &[
    (Session::Outside, Change::Located, Session::Probing),
    (Session::Outside, Change::Welcomed, Session::Inside),
    (Session::Probing, Change::Located, Session::Probing), // by another welcome
    (Session::Probing, Change::Welcomed, Session::Inside),
    (Session::Probing, Change::Unknown, Session::Outside),
    (Session::Probing, Change::Refused, Session::Outside),
    (Session::Probing, Change::Silent, Session::Outside),
    (Session::Inside, Change::Located, Session::Probing), // by a publisher of another epoch
    (Session::Inside, Change::Welcomed, Session::Inside), // the same
    (Session::Inside, Change::Unknown, Session::Outside),
    (Session::Inside, Change::Refused, Session::Outside),
    (Session::Inside, Change::Silent, Session::Outside),
];

/// Where an event leads from a state, by one of these tables; nothing if it changes nothing.
pub fn next<S: Copy + PartialEq, E: Copy + PartialEq>(table: &[(S, E, S)], state: S, event: E) -> Option<S> {
    table.iter().find(|(from, by, _)| (*from, *by) == (state, event)).map(|&(_, _, to)| to)
}
