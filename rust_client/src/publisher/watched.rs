//! A connection that is registered for polling while it is open.

use super::control_connection::ControlConnection;
use super::pipe::{Held, Pipe};
use super::subscriber::SubscriberConnection;
use crate::raw::ready::Ready;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::unix::io::AsRawFd;
use std::sync::Arc;

/// A connection that can be polled.
pub trait Connection: Held + Deref<Target = Pipe> {
    /// True if something waits to be sent.
    fn unsent(&self) -> bool;
}

impl Connection for SubscriberConnection {
    fn unsent(&self) -> bool {
        SubscriberConnection::unsent(self)
    }
}

impl Connection for ControlConnection {
    fn unsent(&self) -> bool {
        ControlConnection::unsent(self)
    }
}

pub struct Watched<C: Connection> {
    id: u64,
    its: C,
    ready: Arc<Ready>,
    room: bool, // polled for output, too
}

impl<C: Connection> Watched<C> {
    pub fn new(id: u64, its: C, ready: Arc<Ready>) -> io::Result<Watched<C>> {
        ready.add(its.connection.as_raw_fd(), id)?;
        Ok(Watched { id, its, ready, room: false })
    }

    /// Calls `by`, which reads from the connection or writes to it, and returns its result. Then registers for output if
    /// something is unsent.
    pub fn serve<T>(&mut self, by: impl FnOnce(&mut C) -> io::Result<T>) -> io::Result<T> {
        let done = by(&mut self.its)?;
        let unsent = self.its.unsent();
        if unsent != self.room {
            self.ready.wait_for_room(self.its.connection.as_raw_fd(), self.id, unsent)?;
            self.room = unsent;
        }
        Ok(done)
    }
}

impl<C: Connection> Held for Watched<C> {
    fn pipe(&mut self) -> &mut Pipe {
        self.its.pipe()
    }
}

impl<C: Connection> Drop for Watched<C> {
    fn drop(&mut self) {
        self.ready.remove(self.its.connection.as_raw_fd(), self.id);
    }
}

impl<C: Connection> Deref for Watched<C> {
    type Target = C;

    fn deref(&self) -> &C {
        &self.its
    }
}

impl<C: Connection> DerefMut for Watched<C> {
    fn deref_mut(&mut self) -> &mut C {
        &mut self.its
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw::fork::Own;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    fn look(ready: &Ready) -> Vec<(u64, bool)> {
        let mut items = ready.items();
        zmq::poll(&mut items, 0).unwrap();
        ready.found(&items)
    }

    #[test]
    fn who_has_something_unsent_is_waited_for_and_who_is_gone_is_not() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let ours = listener.accept().unwrap().0;
        let child = ours.try_clone().unwrap(); // as a forked child has it
        let ready = Arc::new(Ready::new().unwrap());
        let subscriber = SubscriberConnection::new(Own::new(ours), false, Duration::ZERO);
        let mut subscriber = Watched::new(7, subscriber, ready.clone()).unwrap();
        assert_eq!(look(&ready), []);
        subscriber.serve(|_| Ok(())).unwrap();
        assert_eq!(look(&ready), [(7, false)], "it is still to be greeted");
        subscriber.serve(|subscriber| subscriber.write(Duration::ZERO)).unwrap();
        assert_eq!(look(&ready), []);
        theirs.write_all(b"news").unwrap();
        drop(subscriber);
        assert_eq!(look(&ready), []);
        drop(child);
    }
}
