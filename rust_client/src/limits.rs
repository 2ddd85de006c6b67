//! Every bound of the protocol, in one place; `docs/PROTOCOL.md`, section 12, gives the reasons.

use std::time::Duration;

pub const INTEGER_MAX: u64 = (1 << 53) - 1;
pub const HEADER_BYTES_MAX: usize = 65_536;
pub const TEXT_MAX: usize = 4096;
pub const CALLS_MAX: usize = 256; // publishes of one model that are open: every acknowledgement looks at each
pub const LABEL_MAX: usize = 256;
pub const NAME_MAX: usize = 128;
pub const METADATA_MAX: usize = 32; // entries of what is said of one version
pub const METADATA_NAME_MAX: usize = 128;
pub const METADATA_BYTES_MAX: usize = 4096; // of their names and texts together
pub const FEATURES_MAX: usize = 64;
pub const MODELS_MAX: usize = 64;
pub const CHUNK_BYTES_MAX: u64 = 1 << 26;
pub const CHUNKS_MAX: u64 = 1 << 20;
pub const FETCH_CHUNKS_MAX: u64 = 64;
pub const WINDOW_CHUNKS: usize = 16;
pub const LAYOUT_BYTES_MAX: u64 = 100_000_000;
pub const TENSORS_MAX: usize = 1_000_000;
pub const RANK_MAX: usize = 64;
pub const TENSOR_NAME_BYTES_MAX: usize = 4096;
pub const MESSAGE_BYTES_MAX: u64 = 100_065_536;
pub const PATCHES_MAX: usize = 8; // of one version
pub const GROUP_KEYS_MAX: usize = 2; // of a session: one, and the one before while it changes

// What each side chooses for itself.
pub const PROGRESS_CHUNKS: usize = 16; // chunks between two reports: a quarter of what a push runs ahead
pub const BYTES_MAX: u64 = 1 << 36; // of one version, unless the user says otherwise
pub const EPOCHS_KEPT: usize = 8; // of which the publisher's age is remembered
pub const BUFFERS_MAX: usize = 2; // of one model: a version that is complete, one that arrives
pub const BUFFERS_KEPT: usize = 3; // unused: those two, and one that a snapshot gave back
pub const SEGMENTS_MAX: usize = 8; // kept open: a publisher has three for each model
pub const REJECTED_KEPT: usize = 8; // versions remembered that could not be taken here
pub const LAYOUTS_KEPT: usize = 4; // so that a model that alternates sends none again
pub const APPLIES_MAX: u32 = 3; // in a row that fail half-way before a version is rejected
pub const RESTARTS_MAX: u32 = 3; // transfers of one version whose digest did not match
pub const TRIES_MAX: u32 = 5; // times that nothing new comes, until a version is fetched in place of a patch, or is announced anew
pub const DAMAGED_MAX: u32 = 16; // damaged chunks asked for again at once, before patience decides
pub const DIFFERENCES_MAX: usize = 20; // lines that a person reads before giving up

pub const COMMANDS: u32 = 64; // of ZMTP's own in a second, from a publisher, which pings every few seconds: each is answered
pub const UNREAD_BYTES_MAX: usize = 1 << 16; // of these answers, for a publisher that reads none
/// Bytes of a layout that a worker takes in any case, with some 10,000 tensors. A larger one must not be larger than its
/// data by more than this, nor than a share of `bytes_max`: to understand and store a layout takes many times its bytes.
pub const LAYOUT_BYTES_FREE: u64 = 1 << 20;
pub const LAYOUT_MEMORY: u64 = 16;
/// Of a model whose names its worker does not know before: the largest models, with a tensor for each expert, have half
/// as many.
pub const TENSORS_UNKNOWN_MAX: usize = 1 << 18;

/// How long a worker waits.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Between two pings, and two repetitions of a report.
    pub ping: Duration,
    /// Silence after which the publisher is lost.
    pub lost_after: Duration,
    /// Silence of the control channel alone after which it is lost.
    pub deaf_after: Duration,
    /// Between two hellos.
    pub hello_retry: Duration,
    /// Silence after which a worker stops waiting for a push.
    pub quiet: Duration,
    /// Silence after which a fetch is repeated; it doubles each time.
    pub patience: Duration,
    /// Its bound.
    pub patience_max: Duration,
}

impl Timing {
    /// Between two reports of progress where chunks come slowly.
    pub(crate) fn report(&self) -> Duration {
        self.quiet / 5 * 2
    }
}

impl Default for Timing {
    fn default() -> Timing {
        Timing {
            ping: Duration::from_secs(1),
            lost_after: Duration::from_secs(5),
            deaf_after: Duration::from_secs(30),
            hello_retry: Duration::from_millis(250),
            quiet: Duration::from_millis(250),
            patience: Duration::from_secs(1),
            patience_max: Duration::from_secs(16),
        }
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
