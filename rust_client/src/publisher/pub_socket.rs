//! The publisher's data socket: a PUB of our own, which sends straight from a version's memory.
//!
//! To libzmq every message is an object of its own, which it hands to another thread. Here a message is sent by the
//! thread that has it: a small one is on its way when `send` returns, and of a large one the kernel takes as much as
//! it has room for whenever it has room. Each subscriber has a queue; what does not fit is dropped for that subscriber
//! alone. It belongs to one thread, which never waits here.

use super::endpoints::Place;
use super::listening::{unbindable, Listener};
use super::pipe::{let_go, COPIES_BYTES_MAX, HOLD};
use super::rate_limits::{Rate, TokenBucket};
use super::subscriber::{Queued, SubscriberConnection, SubscriberInput};
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
pub struct PubSocket {
    listener: Listener,
    ticketed: bool,
    ready: Arc<Ready>,
    connections: BTreeMap<u64, Watched<SubscriberConnection>>,
    next: u64,
    accepts: TokenBucket,
    accept_at: Time,
    ping_at: Time,
    hold_at: Time,
}

impl PubSocket {
    /// Listens at a place; returns it with the port that was taken.
    pub fn bind(place: &Place) -> Result<(PubSocket, Place), Error> {
        let (listener, place) =
            Listener::bind(place).map_err(|error| unbindable(&place.endpoint(), error))?;
        let ready = Ready::new().map_err(|error| unbindable(&place.endpoint(), error))?;
        let pub_socket = PubSocket {
            listener,
            ticketed: false,
            ready: Arc::new(ready),
            connections: BTreeMap::new(),
            next: 0,
            accepts: TokenBucket::new(Time::ZERO),
            accept_at: Time::ZERO,
            ping_at: Time::ZERO,
            hold_at: Time::ZERO,
        };
        Ok((pub_socket, place))
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
                let subscriber = SubscriberConnection::new(connection, self.ticketed, now);
                let subscriber = Watched::new(self.next, subscriber, self.ready.clone());
                self.connections.extend(subscriber.ok().map(|subscriber| (self.next, subscriber)));
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
    pub fn process_events(&mut self, id: u64, readable: bool, now: Time) -> SubscriberInput {
        let subscriber = match self.connections.get_mut(&id) {
            Some(subscriber) => subscriber,
            None => return SubscriberInput::default(),
        };
        let heard = subscriber.send(|subscriber| {
            let heard = if readable { subscriber.read(now)? } else { SubscriberInput::default() };
            subscriber.write(now).map(|()| heard)
        });
        match heard {
            Ok(heard) => heard,
            Err(_) => {
                self.connections.remove(&id);
                SubscriberInput::default()
            }
        }
    }

    /// Serves a connection that has shown a ticket of this worker's, in place of any that it had before; without an
    /// owner it hangs up. Tells whether it serves it (K6).
    pub fn admit(&mut self, id: u64, owner: Option<Owner>) -> bool {
        let owner = match owner {
            Some(owner) => Some(owner),
            None => {
                self.connections.remove(&id);
                return false;
            }
        };
        self.connections.retain(|&other, subscriber| other == id || subscriber.owner != owner);
        self.connections.get_mut(&id).map(|subscriber| subscriber.admit(owner)).is_some()
    }

    /// Hangs up on workers that may not have connections any more (K8).
    pub fn screen(&mut self, may_read: impl Fn(&Owner) -> bool) {
        self.connections.retain(|_, subscriber| subscriber.owner.as_ref().map_or(true, &may_read));
    }

    /// One of the words that it said was nobody's.
    pub fn invalid_frames(&mut self, id: u64, now: Time) {
        if self.connections.get_mut(&id).map_or(false, |subscriber| subscriber.spend(now).is_err()) {
            self.connections.remove(&id);
        }
    }

    /// Sends to everybody who subscribed to the topic; whoever lags behind loses it.
    pub fn send(&mut self, message: Queued, now: Time) {
        let message = Arc::new(message);
        self.connections.retain(|_, subscriber| {
            !subscriber.wants(&message.topic)
                || subscriber.send(|subscriber| subscriber.put(&message, now)).is_ok()
        });
    }

    /// Sends to one who has subscribed, if it is still there.
    pub fn answer(&mut self, id: u64, message: Queued, now: Time) {
        let message = Arc::new(message);
        let answered = self
            .connections
            .get_mut(&id)
            .map(|subscriber| subscriber.send(|subscriber| subscriber.put(&message, now)));
        if let Some(Err(_)) = answered {
            self.connections.remove(&id);
        }
    }

    /// Whether some subscriber of a topic keeps up, or there is none.
    pub fn keeps_up(&self, topic: &str) -> bool {
        let mut wanting = self.connections.values().filter(|subscriber| subscriber.wants(topic)).peekable();
        wanting.peek().is_none() || wanting.any(|subscriber| subscriber.keeps_up())
    }

    /// Forgets what is not on its way yet of some topics: something newer takes its place.
    pub fn withdraw(&mut self, topics: &[String], now: Time) {
        self.connections.values_mut().for_each(|subscriber| subscriber.withdraw(topics, now));
    }

    /// Does what is due, a few times a second.
    pub fn tick(&mut self, now: Time) {
        if now >= self.hold_at {
            self.hold_at = now + HOLD;
            self.connections.retain(|_, subscriber| !subscriber.is_stranger(now, STRANGER));
            let copied: usize = self.connections.values().map(|subscriber| subscriber.copied()).sum();
            let room = COPIES_BYTES_MAX.saturating_sub(copied);
            for over in
                let_go(self.connections.iter_mut().map(|(&id, subscriber)| (id, subscriber)), room, now)
            {
                self.connections.remove(&over);
            }
        }
        if now >= self.ping_at {
            self.ping_at = now + PING;
            self.connections.retain(|_, subscriber| now.saturating_sub(subscriber.alive_at) < SILENCE);
            self.connections.retain(|_, subscriber| {
                subscriber.ping();
                subscriber.send(|subscriber| subscriber.write(now)).is_ok()
            });
        }
    }

    /// Whether anything waits to be sent.
    pub fn unsent(&self) -> bool {
        self.connections.values().any(|subscriber| subscriber.unsent())
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
