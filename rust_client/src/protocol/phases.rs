// Made by `make protocol`; do not edit.
//! The tables of states: from a state, by an event, to a state. An event without a
//! transition changes nothing.

use serde::{Deserialize, Serialize};

/// A version at a worker: its states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Is wanted, but its layout is not known or it has no memory yet.
    #[default]
    Announced,
    /// Has memory; its chunks arrive.
    Arriving,
    /// Is whole and verified, and waits for a commit.
    Staged,
    /// May be applied; the user has not begun.
    Ready,
    /// Is being applied.
    Applying,
    /// Runs.
    Running,
    /// Is not kept. It may be announced again.
    Dropped,
    /// Is not fetched or applied in this session.
    Rejected,
}

impl Phase {
    /// Returns the name of the state, which is the same in all languages.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Announced => "announced",
            Phase::Arriving => "arriving",
            Phase::Staged => "staged",
            Phase::Ready => "ready",
            Phase::Applying => "applying",
            Phase::Running => "running",
            Phase::Dropped => "dropped",
            Phase::Rejected => "rejected",
        }
    }
}

/// A version at a worker: its events.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Event {
    /// The layout is known, all checks pass, and there is memory (W6, W7).
    Begun,
    /// Its segment is open, and the version need not be staged (S6).
    Mapped,
    /// All chunks and the digest are there and match (W13).
    Whole,
    /// The version is whole and `auto`; or a `commit`, or an announcement with `auto`, arrives for
    /// it (W14).
    Committed,
    /// The user begins to apply it.
    Taken,
    /// The user does not apply it now, but will later.
    PutBack,
    /// Applying has succeeded, the user's part included (W16).
    Applied,
    /// The version fails with a code that is not tried again (W6, W24).
    Declined,
    /// The version fails with a code that is tried again (W6, W13), also when it is applied.
    Failed,
    /// An apply failed half-way (W24).
    Torn,
    /// Its segment holds another version (S5).
    Stale,
    /// A newer version has its bytes (W25).
    Renamed,
    /// A newer version takes its place (W8); for an applying version: in another thread.
    Newer,
    /// A `refuse` drops it (W27).
    Gone,
    /// `abort` names it (W14).
    Aborted,
    /// A session begins (W28), and the version is announced, or of another epoch.
    Fenced,
}

/// A version at a worker: its transitions.
pub const TRANSITIONS: &[(Phase, Event, Phase)] = &[
    (Phase::Announced, Event::Begun, Phase::Arriving),
    (Phase::Announced, Event::Mapped, Phase::Ready),
    (Phase::Announced, Event::Declined, Phase::Rejected),
    (Phase::Announced, Event::Failed, Phase::Dropped),
    (Phase::Announced, Event::Newer, Phase::Dropped),
    (Phase::Announced, Event::Gone, Phase::Dropped),
    (Phase::Announced, Event::Aborted, Phase::Dropped),
    (Phase::Announced, Event::Fenced, Phase::Dropped),
    (Phase::Arriving, Event::Whole, Phase::Staged),
    (Phase::Arriving, Event::Failed, Phase::Dropped),
    (Phase::Arriving, Event::Newer, Phase::Dropped),
    (Phase::Arriving, Event::Gone, Phase::Dropped),
    (Phase::Arriving, Event::Aborted, Phase::Dropped),
    (Phase::Arriving, Event::Fenced, Phase::Dropped),
    (Phase::Staged, Event::Committed, Phase::Ready),
    (Phase::Staged, Event::Newer, Phase::Dropped),
    (Phase::Staged, Event::Aborted, Phase::Dropped),
    (Phase::Staged, Event::Fenced, Phase::Dropped),
    (Phase::Ready, Event::Taken, Phase::Applying),
    (Phase::Ready, Event::Newer, Phase::Dropped),
    (Phase::Applying, Event::Applied, Phase::Running),
    (Phase::Applying, Event::PutBack, Phase::Ready),
    (Phase::Applying, Event::Declined, Phase::Rejected),
    (Phase::Applying, Event::Failed, Phase::Dropped),
    (Phase::Applying, Event::Torn, Phase::Dropped),
    (Phase::Applying, Event::Stale, Phase::Dropped),
    (Phase::Applying, Event::Newer, Phase::Dropped),
    (Phase::Running, Event::Renamed, Phase::Running),
    (Phase::Running, Event::Newer, Phase::Dropped),
    (Phase::Running, Event::Torn, Phase::Dropped),
];

/// Whether a worker receives pushed chunks of a model: its states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Receives pushed chunks.
    #[default]
    Following,
    /// Fetches the next version before it considers a newer one.
    CatchingUp,
}

impl Mode {
    /// Returns the name of the state, which is the same in all languages.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Following => "following",
            Mode::CatchingUp => "catching-up",
        }
    }
}

/// Whether a worker receives pushed chunks of a model: its events.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ModeEvent {
    /// An arriving version is dropped for a newer one (W26).
    Replaced,
    /// A version is whole, mapped or renamed (W26).
    Completed,
}

/// Whether a worker receives pushed chunks of a model: its transitions.
pub const MODES: &[(Mode, ModeEvent, Mode)] = &[
    (Mode::Following, ModeEvent::Replaced, Mode::CatchingUp),
    (Mode::CatchingUp, ModeEvent::Completed, Mode::Following),
];

/// A worker's session: its states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Session {
    /// Has no session.
    #[default]
    Outside,
    /// Has an answer to its hello, and is opening the publisher's shared memory (S2).
    Probing,
    /// Has a session.
    Inside,
}

impl Session {
    /// Returns the name of the state, which is the same in all languages.
    pub fn name(self) -> &'static str {
        match self {
            Session::Outside => "outside",
            Session::Probing => "probing",
            Session::Inside => "inside",
        }
    }
}

/// A worker's session: its events.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Change {
    /// A `welcome` with shared memory arrives (S2).
    Located,
    /// A session begins (W2).
    Welcomed,
    /// `refuse` with `unknown-worker` (W20).
    Unknown,
    /// Any other `refuse` that ends the session (W20).
    Refused,
    /// The publisher is lost (W19).
    Silent,
}

/// A worker's session: its transitions.
pub const SESSIONS: &[(Session, Change, Session)] = &[
    (Session::Outside, Change::Located, Session::Probing),
    (Session::Outside, Change::Welcomed, Session::Inside),
    (Session::Probing, Change::Located, Session::Probing),
    (Session::Probing, Change::Welcomed, Session::Inside),
    (Session::Probing, Change::Unknown, Session::Outside),
    (Session::Probing, Change::Refused, Session::Outside),
    (Session::Probing, Change::Silent, Session::Outside),
    (Session::Inside, Change::Located, Session::Probing),
    (Session::Inside, Change::Welcomed, Session::Inside),
    (Session::Inside, Change::Unknown, Session::Outside),
    (Session::Inside, Change::Refused, Session::Outside),
    (Session::Inside, Change::Silent, Session::Outside),
];

/// What an announced version lacks: its states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lack {
    /// A layout, which was requested.
    #[default]
    Layout,
    /// Its segment.
    Segment,
    /// Memory, which is available at once or not at all.
    Memory,
    /// A buffer, until another version releases one.
    Buffer,
}

impl Lack {
    /// Returns the name of the state, which is the same in all languages.
    pub fn name(self) -> &'static str {
        match self {
            Lack::Layout => "layout",
            Lack::Segment => "segment",
            Lack::Memory => "memory",
            Lack::Buffer => "buffer",
        }
    }
}

/// What an announced version lacks: its events.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LackEvent {
    /// The layout passes all checks (W6).
    Known,
    /// The layout passes all checks, and the version is in a segment (S2, S6).
    Located,
    /// The version must be staged from its segment, or the segment cannot be opened (S6).
    Opened,
    /// All memory is in use (W6).
    Full,
    /// Memory is no longer in use (W6).
    Freed,
}

/// What an announced version lacks: its transitions.
pub const LACKS: &[(Lack, LackEvent, Lack)] = &[
    (Lack::Layout, LackEvent::Known, Lack::Memory),
    (Lack::Layout, LackEvent::Located, Lack::Segment),
    (Lack::Segment, LackEvent::Opened, Lack::Memory),
    (Lack::Memory, LackEvent::Full, Lack::Buffer),
    (Lack::Buffer, LackEvent::Freed, Lack::Memory),
];

/// The source of an arriving version: its states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Coming {
    /// Chunks are pushed, and some may be requested.
    #[default]
    Received,
    /// All missing chunks are requested.
    Pulled,
    /// Is copied from its segment.
    Copied,
    /// Is decoded from a patch.
    Decoded,
}

impl Coming {
    /// Returns the name of the state, which is the same in all languages.
    pub fn name(self) -> &'static str {
        match self {
            Coming::Received => "received",
            Coming::Pulled => "pulled",
            Coming::Copied => "copied",
            Coming::Decoded => "decoded",
        }
    }
}

/// The source of an arriving version: its events.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// No more chunks are pushed (W30, W31).
    Unpushed,
    /// The copy from the segment starts (S6).
    CopyStarted,
    /// The copy from the segment has ended (S6).
    CopyEnded,
    /// The patch has arrived (D5).
    Patched,
}

/// The source of an arriving version: its transitions.
pub const COMING: &[(Coming, Way, Coming)] = &[
    (Coming::Received, Way::Unpushed, Coming::Pulled),
    (Coming::Received, Way::CopyStarted, Coming::Copied),
    (Coming::Pulled, Way::Patched, Coming::Decoded),
    (Coming::Copied, Way::CopyEnded, Coming::Pulled),
];

/// A worker on the roster: its states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PeerPhase {
    /// Is connected.
    #[default]
    Here,
    /// Its connection is closed, and there is no new one yet.
    Away,
    /// Another instance may take its name.
    Lost,
}

impl PeerPhase {
    /// Returns the name of the state, which is the same in all languages.
    pub fn name(self) -> &'static str {
        match self {
            PeerPhase::Here => "here",
            PeerPhase::Away => "away",
            PeerPhase::Lost => "lost",
        }
    }
}

/// A worker on the roster: its events.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PeerEvent {
    /// Sends a message on the control channel (P3, P18).
    Spoke,
    /// Loses its control connection (P18).
    Closed,
    /// Has been away for `gone_after` (P18).
    Overdue,
    /// Is away, and another instance requests its name (P3).
    Contested,
    /// Has sent nothing for `lost_after` (P18).
    Silent,
    /// Ends: its process is gone (P18).
    Ended,
}

/// A worker on the roster: its transitions.
pub const WORKERS: &[(PeerPhase, PeerEvent, PeerPhase)] = &[
    (PeerPhase::Here, PeerEvent::Closed, PeerPhase::Away),
    (PeerPhase::Here, PeerEvent::Silent, PeerPhase::Lost),
    (PeerPhase::Here, PeerEvent::Ended, PeerPhase::Lost),
    (PeerPhase::Away, PeerEvent::Spoke, PeerPhase::Here),
    (PeerPhase::Away, PeerEvent::Overdue, PeerPhase::Lost),
    (PeerPhase::Away, PeerEvent::Contested, PeerPhase::Lost),
    (PeerPhase::Away, PeerEvent::Silent, PeerPhase::Lost),
    (PeerPhase::Away, PeerEvent::Ended, PeerPhase::Lost),
    (PeerPhase::Lost, PeerEvent::Spoke, PeerPhase::Here),
];

/// One worker in one call of publish: its states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Has not reported the version.
    #[default]
    Behind,
    /// Has staged the version.
    Staged,
    /// Runs the version.
    Applied,
    /// Runs a newer version.
    Skipped,
    /// Has failed the version.
    Failed,
    /// Is lost.
    Lost,
    /// Has left.
    Left,
}

impl Outcome {
    /// Returns the name of the state, which is the same in all languages.
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

/// One worker in one call of publish: its events.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TargetEvent {
    /// Reports the version staged, with the right digest (P11).
    Staged,
    /// Reports the version applied, with the right digest (P12).
    Applied,
    /// Reports a newer version applied (P12).
    Skipped,
    /// Reports the version failed (P13).
    Failed,
    /// Is lost on the roster (P18).
    Lost,
    /// Sends `bye` or a `hello` with another name, or its key is revoked (P18).
    Left,
    /// Is welcomed, or sends a message after it was lost (P18).
    Returned,
}

/// One worker in one call of publish: its transitions.
pub const TARGETS: &[(Outcome, TargetEvent, Outcome)] = &[
    (Outcome::Behind, TargetEvent::Staged, Outcome::Staged),
    (Outcome::Behind, TargetEvent::Applied, Outcome::Applied),
    (Outcome::Behind, TargetEvent::Skipped, Outcome::Skipped),
    (Outcome::Behind, TargetEvent::Failed, Outcome::Failed),
    (Outcome::Behind, TargetEvent::Lost, Outcome::Lost),
    (Outcome::Behind, TargetEvent::Left, Outcome::Left),
    (Outcome::Staged, TargetEvent::Applied, Outcome::Applied),
    (Outcome::Staged, TargetEvent::Skipped, Outcome::Skipped),
    (Outcome::Staged, TargetEvent::Failed, Outcome::Failed),
    (Outcome::Staged, TargetEvent::Lost, Outcome::Lost),
    (Outcome::Staged, TargetEvent::Left, Outcome::Left),
    (Outcome::Failed, TargetEvent::Staged, Outcome::Staged),
    (Outcome::Failed, TargetEvent::Applied, Outcome::Applied),
    (Outcome::Failed, TargetEvent::Skipped, Outcome::Skipped),
    (Outcome::Failed, TargetEvent::Left, Outcome::Left),
    (Outcome::Lost, TargetEvent::Left, Outcome::Left),
    (Outcome::Lost, TargetEvent::Returned, Outcome::Behind),
    (Outcome::Left, TargetEvent::Returned, Outcome::Behind),
];

/// The decision on a version that is committed together: its states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Decision {
    /// Is not made yet.
    #[default]
    Open,
    /// Commits the version.
    Commit,
    /// Drops the version.
    Abort,
}

impl Decision {
    /// Returns the name of the state, which is the same in all languages.
    pub fn name(self) -> &'static str {
        match self {
            Decision::Open => "open",
            Decision::Commit => "commit",
            Decision::Abort => "abort",
        }
    }
}

/// The decision on a version that is committed together: its events.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DecisionEvent {
    /// The required number of workers has staged the version (P10).
    Enough,
    /// The required number has become impossible, or the deadline or the user ends the call (P10).
    TooFew,
}

/// The decision on a version that is committed together: its transitions.
pub const DECISIONS: &[(Decision, DecisionEvent, Decision)] = &[
    (Decision::Open, DecisionEvent::Enough, Decision::Commit),
    (Decision::Open, DecisionEvent::TooFew, Decision::Abort),
];

/// A published version: its states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VersionPhase {
    /// Waits for its decision.
    #[default]
    Pending,
    /// Is the newest for all workers, except those named for a newer one.
    Latest,
    /// Is the newest, but no worker receives it: the next version may overwrite it.
    Reclaimable,
    /// Is the newest for some named workers.
    Targeted,
    /// Is no longer the newest, but a worker still receives it.
    Old,
    /// Is not available any more.
    Gone,
}

impl VersionPhase {
    /// Returns the name of the state, which is the same in all languages.
    pub fn name(self) -> &'static str {
        match self {
            VersionPhase::Pending => "pending",
            VersionPhase::Latest => "latest",
            VersionPhase::Reclaimable => "reclaimable",
            VersionPhase::Targeted => "targeted",
            VersionPhase::Old => "old",
            VersionPhase::Gone => "gone",
        }
    }
}

/// A published version: its events.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VersionEvent {
    /// The version is committed for all workers (P6).
    ForAll,
    /// The version is committed for named workers (P6).
    ForSome,
    /// The version is no longer the newest for any worker (P8).
    Newer,
    /// The decision is abort (P10).
    Aborted,
    /// Nothing receives, hashes or compares the version (P9).
    NoReaders,
    /// The version is requested, and its memory still holds it (P9).
    Requested,
    /// The version is requested, but its memory holds another version (P9).
    Overwritten,
    /// The next version needs its memory (P9).
    Evicted,
}

/// A published version: its transitions.
pub const VERSIONS: &[(VersionPhase, VersionEvent, VersionPhase)] = &[
    (VersionPhase::Pending, VersionEvent::ForAll, VersionPhase::Latest),
    (VersionPhase::Pending, VersionEvent::ForSome, VersionPhase::Targeted),
    (VersionPhase::Pending, VersionEvent::Aborted, VersionPhase::Gone),
    (VersionPhase::Latest, VersionEvent::NoReaders, VersionPhase::Reclaimable),
    (VersionPhase::Latest, VersionEvent::Newer, VersionPhase::Old),
    (VersionPhase::Latest, VersionEvent::Evicted, VersionPhase::Gone),
    (VersionPhase::Reclaimable, VersionEvent::Requested, VersionPhase::Latest),
    (VersionPhase::Reclaimable, VersionEvent::Overwritten, VersionPhase::Gone),
    (VersionPhase::Reclaimable, VersionEvent::Newer, VersionPhase::Gone),
    (VersionPhase::Reclaimable, VersionEvent::Evicted, VersionPhase::Gone),
    (VersionPhase::Targeted, VersionEvent::Newer, VersionPhase::Old),
    (VersionPhase::Targeted, VersionEvent::Evicted, VersionPhase::Gone),
    (VersionPhase::Old, VersionEvent::NoReaders, VersionPhase::Gone),
    (VersionPhase::Old, VersionEvent::Evicted, VersionPhase::Gone),
];
