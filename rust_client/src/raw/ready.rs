//! Finds the ready connections among many. The kernel keeps the list of connections (epoll), since
//! to pass a long list at each poll (`no_epoll.rs`) takes longer than the work itself.

use super::fork::Own;
use super::os::check;
use std::io;
use std::os::unix::io::{AsRawFd, FromRawFd, OwnedFd, RawFd};

const FOUND_MAX: usize = 256; // connections found by one call; the next call finds the others

/// The connections to watch, each with an id that its owner chose.
pub struct Ready {
    epoll: Own<OwnedFd>,
}

impl Ready {
    pub fn new() -> io::Result<Ready> {
        let epoll = Own::open(|| {
            // SAFETY: `epoll_create1` takes no pointer, and returns a new descriptor.
            let epoll = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
            Ok(unsafe { OwnedFd::from_raw_fd(epoll) })
        })?;
        Ok(Ready { epoll })
    }

    /// Watches a connection from now on.
    pub fn add(&self, connection: RawFd, id: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, connection, id, false)
    }

    /// Sets whether a connection is also ready when output is possible (`room`).
    pub fn wait_for_room(&self, connection: RawFd, id: u64, room: bool) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, connection, id, room)
    }

    /// Stops watching a connection. To close the connection is not enough: the kernel would watch
    /// it as long as a forked child has it open.
    pub fn remove(&self, connection: RawFd, id: u64) {
        let _ = self.control(libc::EPOLL_CTL_DEL, connection, id, false);
    }

    fn control(&self, what: libc::c_int, connection: RawFd, id: u64, room: bool) -> io::Result<()> {
        let events = libc::EPOLLIN | if room { libc::EPOLLOUT } else { 0 };
        let mut event = libc::epoll_event { events: events as u32, u64: id };
        // SAFETY: the kernel reads one event; an invalid descriptor gives an error.
        check(unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), what, connection, &mut event) }).map(drop)
    }

    /// Returns the items to poll.
    pub fn items(&self) -> Vec<zmq::PollItem<'_>> {
        vec![zmq::PollItem::from_fd(self.epoll.as_raw_fd(), zmq::POLLIN)]
    }

    /// Returns the ids of the connections that the poll of these items found ready. The bool is
    /// true if the connection can be read or has ended, false if only output is possible.
    pub fn found(&self, items: &[zmq::PollItem<'_>]) -> Vec<(u64, bool)> {
        if !items.iter().any(zmq::PollItem::is_readable) {
            return Vec::new();
        }
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; FOUND_MAX];
        // SAFETY: the kernel writes at most `FOUND_MAX` events.
        let count = unsafe {
            libc::epoll_wait(self.epoll.as_raw_fd(), events.as_mut_ptr(), FOUND_MAX as libc::c_int, 0)
        };
        events.iter().take(count.max(0) as usize).map(|&event| found(event)).collect()
    }
}

fn found(event: libc::epoll_event) -> (u64, bool) {
    let (id, events) = (event.u64, event.events as libc::c_int);
    (id, events & (libc::EPOLLIN | libc::EPOLLERR | libc::EPOLLHUP) != 0)
}

#[cfg(test)]
#[path = "no_epoll.rs"]
mod no_epoll; // used on other systems only, but tested on all

#[cfg(test)]
mod tests {
    use super::{no_epoll, Ready};
    use std::io::Write;
    use std::net::Shutdown;
    use std::os::unix::io::AsRawFd;
    use std::os::unix::net::UnixStream;

    macro_rules! tells_who_has_news {
        ($name:ident, $ready:ty) => {
            #[test]
            fn $name() {
                let ready = <$ready>::new().unwrap();
                let mut pairs: Vec<_> = (0..4).map(|_| UnixStream::pair().unwrap()).collect();
                for (id, (ours, _)) in pairs.iter().enumerate() {
                    ready.add(ours.as_raw_fd(), id as u64).unwrap();
                }
                let look = || {
                    let mut items = ready.items();
                    zmq::poll(&mut items, 0).unwrap();
                    let mut found = ready.found(&items);
                    found.sort_unstable();
                    found
                };
                assert_eq!(look(), []);
                pairs[1].1.write_all(b"news").unwrap();
                pairs[2].1.shutdown(Shutdown::Both).unwrap();
                assert_eq!(look(), [(1, true), (2, true)]);
                assert_eq!(look().len(), 2, "until it is read");
                ready.wait_for_room(pairs[0].0.as_raw_fd(), 0, true).unwrap();
                ready.remove(pairs[2].0.as_raw_fd(), 2);
                assert_eq!(look(), [(0, false), (1, true)]);
                ready.wait_for_room(pairs[0].0.as_raw_fd(), 0, false).unwrap();
                let child = pairs[1].0.try_clone().unwrap(); // as in a forked child
                for id in [0, 1, 3] {
                    ready.remove(pairs[id].0.as_raw_fd(), id as u64);
                }
                drop(pairs);
                drop(child);
                assert_eq!(look(), []);
            }
        };
    }

    tells_who_has_news!(the_kernel_tells_who_has_news, Ready);
    tells_who_has_news!(a_poll_of_all_tells_who_has_news, no_epoll::Ready);
}
