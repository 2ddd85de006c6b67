//! Pushes the chunks of a version, or of a patch, at the pace of the fastest worker (P7).
//!
//! A chunk that does not fit into a subscriber's queue is dropped for that subscriber. So a push is at
//! most `PUSH_CHUNKS` ahead of the progress that the fastest worker has reported, and equally fast
//! workers miss no chunk. Slower workers miss chunks, fetch these, and do not delay the others. If no
//! worker reports progress for a while, the push ends early, and workers fetch the rest.

use super::content::Content;
use crate::limits::PUSH_CHUNKS;
use crate::messages::{data_topic, patch_topic, PatchId};
use crate::transfer::Time;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

const BURST_BYTES: u64 = 1 << 20; // pushed in one step, between other work

/// What a push sends next.
pub enum Step {
    Nothing,
    Chunks(Range<u64>),
    End,
}

/// Returns the topic of the chunks of a version, or of a patch.
pub fn topic_of(model: &str, patch: Option<&PatchId>) -> String {
    patch.map_or_else(|| data_topic(model), |_| patch_topic(model))
}

/// The push of one version, or of one of its patches.
pub struct Push {
    pub model: String,
    pub number: u64,
    pub content: Arc<Content>,
    /// The patch that is pushed; `None` for the whole version.
    pub patch: Option<PatchId>,
    next: u64,     // index of the next chunk
    reported: u64, // most chunks that a worker has reported
    progress_at: Time,
    stalled: bool, // no worker has reported progress for too long
}

impl Push {
    pub fn new(model: &str, number: u64, content: Arc<Content>, patch: Option<PatchId>, now: Time) -> Push {
        let model = model.to_owned();
        Push { model, number, content, patch, next: 0, reported: 0, progress_at: now, stalled: false }
    }

    /// Returns the topic on which the chunks are sent (D6).
    pub fn topic(&self) -> String {
        topic_of(&self.model, self.patch.as_ref())
    }

    /// Records that some worker has reported this number of chunks.
    pub fn report(&mut self, chunks: u64, now: Time) {
        if chunks > self.reported {
            (self.reported, self.progress_at) = (chunks, now);
        }
    }

    /// True if only the end must still be sent.
    fn is_ending(&self) -> bool {
        self.stalled || self.next == self.content.plan.count()
    }

    /// Returns the index at which the push must wait for more progress.
    fn limit(&self) -> u64 {
        self.content.plan.count().min(self.reported.saturating_add(PUSH_CHUNKS))
    }

    /// True if a chunk, or the end, may be sent now.
    pub fn is_ready(&self) -> bool {
        self.is_ending() || self.next < self.limit()
    }

    /// Returns what to send now: the next chunks, or the end. The end comes after the last chunk, or if no
    /// worker reports progress for `patience`.
    pub fn step(&mut self, now: Time, patience: Duration) -> Step {
        if self.is_ending() {
            return Step::End;
        }
        self.stalled = now.saturating_sub(self.progress_at) >= patience;
        let burst = (BURST_BYTES / self.content.plan.chunk_bytes).max(1);
        let first = self.next;
        self.next = self.limit().min(first + burst);
        if self.next == first {
            return Step::Nothing;
        }
        self.progress_at = now;
        Step::Chunks(first..self.next)
    }
}
