//! Which of many connections have news: the kernel keeps the list. To hand it the list each time (`no_epoll.rs`) takes
//! longer than the news, where there are hundreds.

use super::fork::Own;
use super::os::check;
use std::io;
use std::os::unix::io::{AsRawFd, FromRawFd, OwnedFd, RawFd};

const FOUND_MAX: usize = 256; // at once; the others are found next time

/// Connections by what their owner calls them.
pub struct Ready {
    epoll: Own<OwnedFd>,
}

impl Ready {
    pub fn new() -> io::Result<Ready> {
        let epoll = Own::open(|| {
            // SAFETY: it takes no pointer, and what it returns is nobody's yet.
            let epoll = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
            Ok(unsafe { OwnedFd::from_raw_fd(epoll) })
        })?;
        Ok(Ready { epoll })
    }

    /// Has a connection looked at from now on.
    pub fn add(&self, connection: RawFd, id: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, connection, id, false)
    }

    /// Says whether it is waited for room, too.
    pub fn wait_for_room(&self, connection: RawFd, id: u64, room: bool) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, connection, id, room)
    }

    /// Has it looked at no longer. The kernel would go on for as long as a forked child has it open.
    pub fn remove(&self, connection: RawFd, id: u64) {
        let _ = self.control(libc::EPOLL_CTL_DEL, connection, id, false);
    }

    fn control(&self, what: libc::c_int, connection: RawFd, id: u64, room: bool) -> io::Result<()> {
        let events = libc::EPOLLIN | if room { libc::EPOLLOUT } else { 0 };
        let mut event = libc::epoll_event { events: events as u32, u64: id };
        // SAFETY: the kernel reads one event; a descriptor that is none gives an error.
        check(unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), what, connection, &mut event) }).map(drop)
    }

    /// What to poll until there is news.
    pub fn items(&self) -> Vec<zmq::PollItem<'_>> {
        vec![zmq::PollItem::from_fd(self.epoll.as_raw_fd(), zmq::POLLIN)]
    }

    /// What the poll of these items has found: who has news, and whether there is something to read, or the end.
    /// Else there is room.
    pub fn found(&self, items: &[zmq::PollItem<'_>]) -> Vec<(u64, bool)> {
        if !items.iter().any(zmq::PollItem::is_readable) {
            return Vec::new();
        }
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; FOUND_MAX];
        // SAFETY: the kernel writes at most so many events.
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
mod no_epoll; // which only other systems build, but all must try

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
                let child = pairs[1].0.try_clone().unwrap(); // as a forked one has it
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
