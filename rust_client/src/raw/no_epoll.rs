//! Which of many connections have news, where the kernel keeps no list: `ready.rs` for other systems than Linux.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::io::RawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Connections by what their owner calls them.
pub struct Ready {
    each: Mutex<BTreeMap<u64, (RawFd, bool)>>, // and whether it is waited for room
}

impl Ready {
    pub fn new() -> io::Result<Ready> {
        Ok(Ready { each: Mutex::default() })
    }

    /// Has a connection looked at from now on.
    pub fn add(&self, connection: RawFd, id: u64) -> io::Result<()> {
        self.wait_for_room(connection, id, false)
    }

    /// Says whether it is waited for room, too.
    pub fn wait_for_room(&self, connection: RawFd, id: u64, room: bool) -> io::Result<()> {
        self.each().insert(id, (connection, room));
        Ok(())
    }

    /// Has it looked at no longer.
    pub fn remove(&self, _connection: RawFd, id: u64) {
        self.each().remove(&id);
    }

    fn each(&self) -> MutexGuard<'_, BTreeMap<u64, (RawFd, bool)>> {
        self.each.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What to poll until there is news.
    pub fn items(&self) -> Vec<zmq::PollItem<'_>> {
        let events = |room| if room { zmq::POLLIN | zmq::POLLOUT } else { zmq::POLLIN };
        self.each().values().map(|&(at, room)| zmq::PollItem::from_fd(at, events(room))).collect()
    }

    /// What the poll of these items has found: who has news, and whether there is something to read, or the end.
    /// Else there is room.
    pub fn found(&self, items: &[zmq::PollItem<'_>]) -> Vec<(u64, bool)> {
        let each = self.each();
        let news = each.keys().zip(items).filter(|(_, item)| !item.get_revents().is_empty());
        news.map(|(&id, item)| (id, item.is_readable() || item.is_error())).collect()
    }
}
