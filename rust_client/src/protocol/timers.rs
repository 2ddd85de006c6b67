// Made by `make protocol`; do not edit.
//! The default times of the protocol.

use std::time::Duration;

/// Between two hellos.
pub const HELLO_RETRY: Duration = Duration::from_millis(250);
/// Between two pings.
pub const PING: Duration = Duration::from_secs(1);
/// Silence after which the other side is lost.
pub const LOST_AFTER: Duration = Duration::from_secs(5);
/// Silence of the control channel after which the publisher is lost.
pub const DEAF_AFTER: Duration = Duration::from_secs(30);
/// Between two fetches of version 0 (W4); silence after which a push counts as ended.
pub const QUIET: Duration = Duration::from_millis(250);
/// Silence after which a fetch is repeated.
pub const PATIENCE: Duration = Duration::from_secs(1);
/// The longest such silence.
pub const PATIENCE_MAX: Duration = Duration::from_secs(16);
/// Between two `progress` of a slow push; less than `quiet`.
pub const REPORT: Duration = Duration::from_millis(100);
/// Time without a connection, until a worker is lost.
pub const GONE_AFTER: Duration = Duration::from_secs(2);
/// Time without progress, until a live worker is stuck.
pub const STUCK_AFTER: Duration = Duration::from_secs(5);
