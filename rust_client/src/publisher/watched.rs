//! A connection that is polled for input while it is open, and for output while something is unsent.

use super::control_connection::ControlConnection;
use super::pipe::{HasPipe, Pipe};
use super::subscriber::SubscriberConnection;
use crate::raw::ready::Ready;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::unix::io::AsRawFd;
use std::sync::Arc;

/// A connection that can be polled.
pub trait Connection: HasPipe + Deref<Target = Pipe> {
    /// True if something waits to be sent.
    fn has_unsent(&self) -> bool;
}

impl Connection for SubscriberConnection {
    fn has_unsent(&self) -> bool {
        SubscriberConnection::has_unsent(self)
    }
}

impl Connection for ControlConnection {
    fn has_unsent(&self) -> bool {
        ControlConnection::has_unsent(self)
    }
}

/// An open connection, registered with `Ready`, which finds the connections with events.
pub struct Watched<C: Connection> {
    id: u64,
    inner: C,
    ready: Arc<Ready>,
    watches_output: bool, // also polls for output
}

impl<C: Connection> Watched<C> {
    /// Registers a connection under this id.
    pub fn new(id: u64, inner: C, ready: Arc<Ready>) -> io::Result<Watched<C>> {
        ready.add(inner.connection.as_raw_fd(), id)?;
        Ok(Watched { id, inner, ready, watches_output: false })
    }

    /// Calls `io_step`, which reads from the connection or writes to it. Then polls for output if
    /// something is unsent. Returns the result of `io_step`.
    pub fn serve<T>(&mut self, io_step: impl FnOnce(&mut C) -> io::Result<T>) -> io::Result<T> {
        let done = io_step(&mut self.inner)?;
        let unsent = self.inner.has_unsent();
        if unsent != self.watches_output {
            self.ready.wait_for_room(self.inner.connection.as_raw_fd(), self.id, unsent)?;
            self.watches_output = unsent;
        }
        Ok(done)
    }
}

impl<C: Connection> HasPipe for Watched<C> {
    fn pipe(&mut self) -> &mut Pipe {
        self.inner.pipe()
    }
}

impl<C: Connection> Drop for Watched<C> {
    fn drop(&mut self) {
        self.ready.remove(self.inner.connection.as_raw_fd(), self.id);
    }
}

impl<C: Connection> Deref for Watched<C> {
    type Target = C;

    fn deref(&self) -> &C {
        &self.inner
    }
}

impl<C: Connection> DerefMut for Watched<C> {
    fn deref_mut(&mut self) -> &mut C {
        &mut self.inner
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
