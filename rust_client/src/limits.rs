//! The limits and times of the protocol, and the local choices of each side.

pub use crate::protocol::limits::*;
pub use crate::protocol::timers::Timing;
use std::time::Duration;

pub const NAME_MAX: usize = 128; // characters of a name
pub const CALLS_MAX: usize = 256; // open publishes of one model: each acknowledgement checks all
pub const BYTES_MAX: u64 = 1 << 36; // of one version, unless the user says otherwise
pub const EPOCHS_KEPT: usize = 8; // for which the age of the publisher is kept
pub const BUFFERS_MAX: usize = 2; // of one model: a complete version, and an arriving one
pub const BUFFERS_KEPT: usize = 3; // unused: for those two, and for a released snapshot
pub const SEGMENTS_MAX: usize = 8; // kept open: a publisher has three for each model
pub const REJECTED_KEPT: usize = 8; // rejected versions that are remembered
pub const LAYOUTS_KEPT: usize = 4; // so that a model that alternates need not fetch them again
pub const RESTARTS_MAX: u32 = 3; // transfers of one version whose digest did not match
pub const DAMAGED_MAX: u32 = 16; // damaged chunks requested again at once; more wait for the timeout
pub const DIFFERENCES_MAX: usize = 20; // lines in one error text

/// ZMTP commands a second that a publisher may send. A publisher pings every few seconds, and each
/// ping is answered.
pub const COMMANDS: u32 = 64;
pub const UNREAD_BYTES_MAX: usize = 1 << 16; // queued answers that the publisher does not read
/// Size of a layout that a worker always accepts, enough for some 10,000 tensors. A larger layout
/// may exceed the size of its data by at most this, and must not exceed `bytes_max /
/// LAYOUT_MEMORY`: a parsed layout takes several times the memory of its bytes.
pub const LAYOUT_BYTES_GUARANTEED: u64 = 1 << 20;
pub const LAYOUT_MEMORY: u64 = 16;
/// Number of tensors that any worker accepts. A worker with a large model accepts more. The largest
/// models, with a tensor for each expert, have half as many.
pub const TENSORS_UNKNOWN_MAX: usize = 1 << 18;

impl Timing {
    /// Returns the interval of progress reports while chunks arrive slowly.
    pub(crate) fn report(&self) -> Duration {
        self.quiet / 5 * 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_may_wait_for_ever() {
        assert!(Timing { quiet: Duration::MAX, ..Timing::default() }.report() > Duration::MAX / 3);
    }
}
