//! A subscriber's connection, which is looked at for as long as it is there.

use super::outlet::Outlet;
use crate::raw::ready::Ready;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::unix::io::AsRawFd;
use std::sync::Arc;

pub struct Subscriber {
    id: u64,
    outlet: Outlet,
    ready: Arc<Ready>,
    room: bool, // it is waited for that
}

impl Subscriber {
    pub fn new(id: u64, outlet: Outlet, ready: Arc<Ready>) -> io::Result<Subscriber> {
        ready.add(outlet.connection.as_raw_fd(), id)?;
        Ok(Subscriber { id, outlet, ready, room: false })
    }

    /// Does something with it that may leave something to be sent.
    pub fn send<T>(&mut self, by: impl FnOnce(&mut Outlet) -> io::Result<T>) -> io::Result<T> {
        let done = by(&mut self.outlet)?;
        let unsent = self.outlet.unsent();
        if unsent != self.room {
            self.ready.wait_for_room(self.outlet.connection.as_raw_fd(), self.id, unsent)?;
            self.room = unsent;
        }
        Ok(done)
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        self.ready.remove(self.outlet.connection.as_raw_fd(), self.id);
    }
}

impl Deref for Subscriber {
    type Target = Outlet;

    fn deref(&self) -> &Outlet {
        &self.outlet
    }
}

impl DerefMut for Subscriber {
    fn deref_mut(&mut self) -> &mut Outlet {
        &mut self.outlet
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
        let child = ours.try_clone().unwrap(); // as a forked one has it
        let ready = Arc::new(Ready::new().unwrap());
        let outlet = Outlet::new(Own::new(ours), false, Duration::ZERO);
        let mut subscriber = Subscriber::new(7, outlet, ready.clone()).unwrap();
        assert_eq!(look(&ready), []);
        subscriber.send(|_| Ok(())).unwrap();
        assert_eq!(look(&ready), [(7, false)], "it is still to be greeted");
        subscriber.send(|outlet| outlet.write(Duration::ZERO)).unwrap();
        assert_eq!(look(&ready), []);
        theirs.write_all(b"news").unwrap();
        drop(subscriber);
        assert_eq!(look(&ready), []);
        drop(child);
    }
}
