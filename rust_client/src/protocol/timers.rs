// Made by `make protocol`; do not edit.
//! The times of the protocol.

use std::time::Duration;

/// The intervals and timeouts of workers and publishers.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Between two hellos.
    pub hello_retry: Duration,
    /// Between two pings.
    pub ping: Duration,
    /// Silence after which the other side is lost.
    pub lost_after: Duration,
    /// Silence of the control channel after which the publisher is lost.
    pub deaf_after: Duration,
    /// Between two fetches of version 0 (W4); silence after which a push counts as ended.
    pub quiet: Duration,
    /// Silence after which a fetch is repeated.
    pub patience: Duration,
    /// The longest such silence.
    pub patience_max: Duration,
    /// Time without a connection after which a worker is lost.
    pub gone_after: Duration,
    /// Time without progress after which a live worker is stuck.
    pub stuck_after: Duration,
}

impl Default for Timing {
    fn default() -> Timing {
        Timing {
            hello_retry: Duration::from_millis(250),
            ping: Duration::from_secs(1),
            lost_after: Duration::from_secs(5),
            deaf_after: Duration::from_secs(30),
            quiet: Duration::from_millis(250),
            patience: Duration::from_secs(1),
            patience_max: Duration::from_secs(16),
            gone_after: Duration::from_secs(2),
            stuck_after: Duration::from_secs(5),
        }
    }
}
