//! The phases of a version at a worker: phase x event -> phase. Nothing else changes a phase.
//!
//! ```text
//! announced ──> arriving ──> staged ──> ready ──> applying ──> running
//!     │             │           │         │           │           │
//!     └─────────────┴───────────┴─────────┴───────────┴───────────┴──> dropped, rejected
//! ```
//!
//! An event without an arrow from a version's phase changes nothing: messages come late, twice and
//! in any order. `docs/PROTOCOL.md` has the same tables (section 8), and
//! `tests/vectors/phases.json` has every arrow, and every pair without one.

use serde::{Deserialize, Serialize};
use Event::*;
use Phase::*;

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// The version exists; its layout or memory is missing.
    Announced,
    /// Chunks of the version are arriving.
    Arriving,
    /// The version is complete and verified, and waits for a commit.
    Staged,
    /// The user may apply the version.
    Ready,
    /// A user's thread is applying the version.
    Applying,
    Running,
    /// The version is no longer in use, and may be announced again.
    Dropped,
    /// The version is not tried again in this session.
    Rejected,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Event {
    /// The version's layout is known and fits, and there is memory.
    Begun,
    /// The version's segment is open, and the version need not be staged.
    Mapped,
    /// All chunks and the digest have arrived, and match.
    Whole,
    /// The version was announced as `auto`, now or before, or a `commit` came.
    Committed,
    /// A user's thread begins to apply the version.
    Taken,
    /// A user's thread will apply the version later.
    PutBack,
    Applied,
    /// A check failed that would fail again, or the user's function rejected the version.
    Declined,
    /// Something failed that may succeed next time.
    Failed,
    /// An apply failed half-way: the previous version is lost, too.
    Torn,
    /// The version's shared-memory segment was overwritten by another version.
    Stale,
    /// A newer version has the same bytes.
    Renamed,
    /// A newer version replaces this one.
    Newer,
    /// The publisher no longer has the version.
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
    (Applying, Newer, Dropped), // another thread has applied a newer one
    (Running, Renamed, Running),
    (Running, Newer, Dropped),
    (Running, Torn, Dropped),
];

/// What an announced version waits for. A missing layout was requested. A segment or memory is
/// available at once or not at all. A buffer becomes available when another version releases it.
/// The version is `begun` once it lacks only memory, and `mapped` once it lacks only a segment.
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

/// How the chunks of an arriving version arrive. `Received`: the publisher pushes chunks, and lost
/// ones are requested. `Pulled`: all missing chunks are requested.
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
    CopyStarted,
    Patched,
    CopyEnded,
}

pub const COMING: &[(Coming, Way, Coming)] = &[
    (Coming::Received, Way::Unpushed, Coming::Pulled),
    (Coming::Received, Way::CopyStarted, Coming::Copied),
    (Coming::Pulled, Way::Patched, Coming::Decoded),
    (Coming::Copied, Way::CopyEnded, Coming::Pulled),
];

/// Whether a worker receives pushed chunks of a model. After a worker has dropped an arriving
/// version for a newer one, it fetches that newer version completely before it begins another
/// (`CatchingUp`). Otherwise a worker slower than its publisher would never complete a version.
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

/// Whether a worker has a session. `Probing`: the publisher has answered the hello, but the session
/// has not begun, since the worker still checks whether the publisher's memory can be read.
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
    (Session::Inside, Change::Located, Session::Probing), // a publisher of another epoch
    (Session::Inside, Change::Welcomed, Session::Inside), // the same
    (Session::Inside, Change::Unknown, Session::Outside),
    (Session::Inside, Change::Refused, Session::Outside),
    (Session::Inside, Change::Silent, Session::Outside),
];

/// Returns the state that an event leads to; `None` if the table has no such transition.
pub fn next<S: Copy + PartialEq, E: Copy + PartialEq>(table: &[(S, E, S)], state: S, event: E) -> Option<S> {
    table.iter().find(|(from, by, _)| (*from, *by) == (state, event)).map(|&(_, _, to)| to)
}
