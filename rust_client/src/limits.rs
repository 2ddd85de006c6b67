//! The limits and times of the protocol, and the local choices of each side.

pub use crate::protocol::limits::*;
pub use crate::protocol::timers::Timing;
use std::time::Duration;

pub const NAME_MAX: usize = 128; // characters of a name
pub const CALLS_MAX: usize = 256; // open publishes of one model: each acknowledgement checks all of them
pub const BYTES_MAX: u64 = 1 << 36; // default limit of the bytes of one version
pub const EPOCHS_KEPT: usize = 8; // epochs of which the publisher's age is kept
pub const BUFFERS_MAX: usize = 2; // buffers in use: for a complete version, and for an arriving one
pub const BUFFERS_KEPT: usize = 3; // free buffers: for these two versions, and for a released snapshot
pub const SEGMENTS_MAX: usize = 8; // segments kept open: a publisher has three for each model
pub const REJECTED_KEPT: usize = 8; // rejected versions that are remembered
pub const LAYOUTS_KEPT: usize = 4; // layouts kept: a model that alternates between some fetches each once
pub const RESTARTS_MAX: u32 = 3; // transfers of one version that may fail the digest check
pub const DAMAGED_MAX: u32 = 16; // damaged chunks requested again at once; later ones after the timeout
pub const DIFFERENCES_MAX: usize = 20; // lines in one error text

/// ZMTP commands a second that a publisher may send. A publisher pings every few seconds, and each
/// ping is answered.
pub const COMMANDS_MAX: u32 = 64;
pub const UNREAD_BYTES_MAX: usize = 1 << 16; // bytes of queued answers that the publisher has not read
/// Size in bytes of a layout that a worker always accepts, enough for some 10,000 tensors. A larger
/// layout may exceed the size of its data by at most this number, and must not exceed `bytes_max /
/// LAYOUT_MEMORY`: a parsed layout takes several times the memory of its bytes.
pub const LAYOUT_BYTES_GUARANTEED: u64 = 1 << 20;
pub const LAYOUT_MEMORY: u64 = 16;
/// Number of tensors that any worker accepts. A worker with a large model accepts more. The largest
/// models, with a tensor for each expert, have half this number.
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
