//! Replaces `ready.rs` on systems other than Linux: passes all connections to each poll.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::io::RawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The connections to watch, each with an id that its owner chose.
pub struct Ready {
    connections: Mutex<BTreeMap<u64, (RawFd, bool)>>, // the bool: also ready if output is possible
}

impl Ready {
    pub fn new() -> io::Result<Ready> {
        Ok(Ready { connections: Mutex::default() })
    }

    /// Watches a connection from now on.
    pub fn add(&self, connection: RawFd, id: u64) -> io::Result<()> {
        self.wait_for_room(connection, id, false)
    }

    /// Sets whether a connection is also ready when output is possible (`room`).
    pub fn wait_for_room(&self, connection: RawFd, id: u64, room: bool) -> io::Result<()> {
        self.connections().insert(id, (connection, room));
        Ok(())
    }

    /// Stops watching a connection.
    pub fn remove(&self, _connection: RawFd, id: u64) {
        self.connections().remove(&id);
    }

    fn connections(&self) -> MutexGuard<'_, BTreeMap<u64, (RawFd, bool)>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the items to poll.
    pub fn items(&self) -> Vec<zmq::PollItem<'_>> {
        let events = |room| if room { zmq::POLLIN | zmq::POLLOUT } else { zmq::POLLIN };
        self.connections().values().map(|&(at, room)| zmq::PollItem::from_fd(at, events(room))).collect()
    }

    /// Returns the ids of the connections that the poll of these items found ready. The bool is
    /// true if the connection can be read or has ended, false if only output is possible.
    pub fn found(&self, items: &[zmq::PollItem<'_>]) -> Vec<(u64, bool)> {
        let connections = self.connections();
        let news = connections.keys().zip(items).filter(|(_, item)| !item.get_revents().is_empty());
        news.map(|(&id, item)| (id, item.is_readable() || item.is_error())).collect()
    }
}
