//! The publisher's data socket: a PUB of our own, which sends straight from a version's memory.
//!
//! To libzmq every message is an object of its own, which it hands to another thread. Here a message is sent by the
//! thread that has it: a small one is on its way when `send` returns, and of a large one the kernel takes as much as
//! it has room for whenever it has room. Each subscriber has a queue; what does not fit is dropped for that subscriber
//! alone. It belongs to one thread, which never waits here.

use super::endpoints::Place;
use super::listening::{unbindable, Listener};
use super::outlet::{Heard, Outlet, Queued};
use super::pipe::{let_go, COPIES_BYTES_MAX, HOLD};
use super::rate_limits::{Rate, TokenBucket};
use super::trust::Owner;
use super::watched::Watched;
use crate::error::Error;
use crate::raw::os::spent;
use crate::raw::ready::Ready;
use crate::raw::socket;
use crate::transfer::Time;
use std::collections::BTreeMap;
use std::io;
use std::net::TcpStream;
use std::os::unix::io::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

const PING: Duration = Duration::from_secs(5); // between two pings: whoever is gone frees its queue
const SILENCE: Duration = Duration::from_secs(30); // without an answer, and without taking anything
const ACCEPT_PAUSE: Duration = Duration::from_secs(1); // before another attempt when there is no descriptor left
const ACCEPTS: Rate = Rate(512.0, 200.0); // whoever waits for a connection fetches meanwhile
const STRANGER: Duration = Duration::from_millis(1500); // for which a connection may be there without a ticket
                                                        // Within a host, more than this is out of the cache before the other side reads it.
const NEAR_SEND_BUFFER: libc::c_int = 1 << 20;

/// A bound socket and its subscribers.
pub struct Distribution {
    listener: Listener,
    ticketed: bool,
    ready: Arc<Ready>,
    outlets: BTreeMap<u64, Watched<Outlet>>,
    next: u64,
    accepts: TokenBucket,
    accept_at: Time,
    ping_at: Time,
    hold_at: Time,
}

impl Distribution {
    /// Listens at a place; returns it with the port that was taken.
    pub fn bind(place: &Place) -> Result<(Distribution, Place), Error> {
        let (listener, place) =
            Listener::bind(place).map_err(|error| unbindable(&place.endpoint(), error))?;
        let ready = Ready::new().map_err(|error| unbindable(&place.endpoint(), error))?;
        let distribution = Distribution {
            listener,
            ticketed: false,
            ready: Arc::new(ready),
            outlets: BTreeMap::new(),
            next: 0,
            accepts: TokenBucket::new(Time::ZERO),
            accept_at: Time::ZERO,
            ping_at: Time::ZERO,
            hold_at: Time::ZERO,
        };
        Ok((distribution, place))
    }

    /// Serves from now on only who shows a ticket.
    pub fn ask_for_tickets(&mut self) {
        self.ticketed = true;
    }

    /// The descriptor at which connections come, unless it is to be left alone for a while.
    pub fn listening(&self, now: Time) -> Option<RawFd> {
        Some(self.listener.descriptor()).filter(|_| now >= self.accept_at)
    }

    /// Which of those who are connected have news.
    pub fn ready(&self) -> Arc<Ready> {
        self.ready.clone()
    }

    /// Takes a connection that is there.
    pub fn accept(&mut self, now: Time) {
        if !self.accepts.take(1.0, ACCEPTS, now) {
            self.accept_at = now + ACCEPT_PAUSE;
            return;
        }
        match self.listener.accept() {
            Ok(connection) if spent(connection.as_raw_fd()) => self.accept_at = now + ACCEPT_PAUSE, // it is closed
            Ok(connection) => {
                let _ = tune(&connection); // it may be gone already, which the first look will tell
                let outlet = Outlet::new(connection, self.ticketed, now);
                let subscriber = Watched::new(self.next, outlet, self.ready.clone());
                self.outlets.extend(subscriber.ok().map(|subscriber| (self.next, subscriber)));
                self.next += 1;
            }
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) =>
            {
                self.accept_at = now + ACCEPT_PAUSE;
            }
            Err(_) => {} // it has gone again
        }
    }

    /// Reads and sends what can be; returns what it has said.
    pub fn attend(&mut self, id: u64, readable: bool, now: Time) -> Heard {
        let outlet = match self.outlets.get_mut(&id) {
            Some(outlet) => outlet,
            None => return Heard::default(),
        };
        let heard = outlet.send(|outlet| {
            let heard = if readable { outlet.read(now)? } else { Heard::default() };
            outlet.write(now).map(|()| heard)
        });
        match heard {
            Ok(heard) => heard,
            Err(_) => {
                self.outlets.remove(&id);
                Heard::default()
            }
        }
    }

    /// Serves a connection that has shown a ticket of this worker's, in place of any that it had before; without an
    /// owner it hangs up. Tells whether it serves it (K6).
    pub fn admit(&mut self, id: u64, owner: Option<Owner>) -> bool {
        let owner = match owner {
            Some(owner) => Some(owner),
            None => {
                self.outlets.remove(&id);
                return false;
            }
        };
        self.outlets.retain(|&other, outlet| other == id || outlet.owner != owner);
        self.outlets.get_mut(&id).map(|outlet| outlet.admit(owner)).is_some()
    }

    /// Hangs up on workers that may not have connections any more (K8).
    pub fn screen(&mut self, may_read: impl Fn(&Owner) -> bool) {
        self.outlets.retain(|_, outlet| outlet.owner.as_ref().map_or(true, &may_read));
    }

    /// One of the words that it said was nobody's.
    pub fn forged(&mut self, id: u64, now: Time) {
        if self.outlets.get_mut(&id).map_or(false, |outlet| outlet.spend(now).is_err()) {
            self.outlets.remove(&id);
        }
    }

    /// Sends to everybody who subscribed to the topic; whoever lags behind loses it.
    pub fn send(&mut self, message: Queued, now: Time) {
        let message = Arc::new(message);
        self.outlets.retain(|_, outlet| {
            !outlet.wants(&message.topic) || outlet.send(|outlet| outlet.put(&message, now)).is_ok()
        });
    }

    /// Sends to one who has subscribed, if it is still there.
    pub fn answer(&mut self, id: u64, message: Queued, now: Time) {
        let message = Arc::new(message);
        let answered =
            self.outlets.get_mut(&id).map(|outlet| outlet.send(|outlet| outlet.put(&message, now)));
        if let Some(Err(_)) = answered {
            self.outlets.remove(&id);
        }
    }

    /// Whether some subscriber of a topic keeps up, or there is none.
    pub fn keeps_up(&self, topic: &str) -> bool {
        let mut wanting = self.outlets.values().filter(|outlet| outlet.wants(topic)).peekable();
        wanting.peek().is_none() || wanting.any(|outlet| outlet.keeps_up())
    }

    /// Forgets what is not on its way yet of some topics: something newer takes its place.
    pub fn withdraw(&mut self, topics: &[String], now: Time) {
        self.outlets.values_mut().for_each(|outlet| outlet.withdraw(topics, now));
    }

    /// Does what is due, a few times a second.
    pub fn tick(&mut self, now: Time) {
        if now >= self.hold_at {
            self.hold_at = now + HOLD;
            self.outlets.retain(|_, outlet| !outlet.is_stranger(now, STRANGER));
            let copied: usize = self.outlets.values().map(|outlet| outlet.copied()).sum();
            let room = COPIES_BYTES_MAX.saturating_sub(copied);
            for over in let_go(self.outlets.iter_mut().map(|(&id, outlet)| (id, outlet)), room, now) {
                self.outlets.remove(&over);
            }
        }
        if now >= self.ping_at {
            self.ping_at = now + PING;
            self.outlets.retain(|_, outlet| now.saturating_sub(outlet.alive_at) < SILENCE);
            self.outlets.retain(|_, outlet| {
                outlet.ping();
                outlet.send(|outlet| outlet.write(now)).is_ok()
            });
        }
    }

    /// Whether anything waits to be sent.
    pub fn unsent(&self) -> bool {
        self.outlets.values().any(|outlet| outlet.unsent())
    }
}

fn tune(connection: &TcpStream) -> io::Result<()> {
    let near = match (connection.local_addr(), connection.peer_addr()) {
        (Ok(ours), Ok(theirs)) => {
            connection.set_nodelay(true)?;
            ours.ip() == theirs.ip()
        }
        _ => return socket::set_send_buffer(connection.as_raw_fd(), NEAR_SEND_BUFFER), // of this host
    };
    if near {
        socket::set_send_buffer(connection.as_raw_fd(), NEAR_SEND_BUFFER)?;
        let _ = socket::do_not_pace(connection.as_raw_fd()); // some kernels have nothing else anyway
    }
    Ok(())
}
