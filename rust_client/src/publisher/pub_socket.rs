//! The publisher's data socket: our own PUB socket, which sends directly from a version's memory.
//!
//! libzmq allocates an object for every message, and passes the object to another thread. Here the
//! calling thread sends: when `send` returns, a small message is sent. A large message is sent in parts,
//! whenever the kernel has room. Each subscriber connection has a queue. A message that does not fit into a queue is
//! dropped only for that subscriber. One thread owns the socket, and no call blocks.

use super::endpoints::ListenAddress;
use super::listening::{bind_error, LimitedListener, Listener};
use super::pipe::{release_versions, COPIES_BYTES_MAX, HOLD};
use super::rate_limits::Rate;
use super::subscriber::{Queued, SubscriberConnection, SubscriberInput};
use super::trust::Owner;
use super::watched::Watched;
use crate::error::Error;
use crate::raw::ready::Ready;
use crate::raw::socket;
use crate::transfer::Time;
use std::collections::BTreeMap;
use std::io;
use std::net::TcpStream;
use std::os::unix::io::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

const PING_INTERVAL: Duration = Duration::from_secs(5); // between two pings, to detect dead peers
const SILENCE_MAX: Duration = Duration::from_secs(30); // of a peer that sends and accepts nothing
const ACCEPT_PAUSE: Duration = Duration::from_secs(1); // after too many connections, or with few descriptors left
const ACCEPTS: Rate = Rate(512.0, 200.0); // connections; a worker that must wait fetches meanwhile
const TICKET_WAIT_MAX: Duration = Duration::from_millis(1500); // for a new connection to send its ticket
const LOCAL_SEND_BUFFER: libc::c_int = 1 << 20; // on this host, where more bytes would not stay in the CPU cache

/// A bound PUB socket, and its subscribers.
pub struct PubSocket {
    listener: LimitedListener,
    requires_ticket: bool,
    ready: Arc<Ready>,
    connections: BTreeMap<u64, Watched<SubscriberConnection>>,
    next_id: u64,
    next_ping_at: Time,
    next_hold_at: Time,
}

impl PubSocket {
    /// Listens at an address. Returns the socket, and the address with the bound port.
    pub fn bind(listen_at: &ListenAddress) -> Result<(PubSocket, ListenAddress), Error> {
        let (listener, listen_at) =
            Listener::bind(listen_at).map_err(|error| bind_error(&listen_at.endpoint(), error))?;
        let ready = Ready::new().map_err(|error| bind_error(&listen_at.endpoint(), error))?;
        let pub_socket = PubSocket {
            listener: LimitedListener::new(listener, ACCEPTS, ACCEPT_PAUSE),
            requires_ticket: false,
            ready: Arc::new(ready),
            connections: BTreeMap::new(),
            next_id: 0,
            next_ping_at: Time::ZERO,
            next_hold_at: Time::ZERO,
        };
        Ok((pub_socket, listen_at))
    }

    /// Makes the socket serve only connections that have sent a valid ticket.
    pub fn require_tickets(&mut self) {
        self.requires_ticket = true;
    }

    /// Returns the descriptor to poll for new connections; `None` while accepting is paused.
    pub fn listener_descriptor(&self, now: Time) -> Option<RawFd> {
        self.listener.descriptor(now)
    }

    /// Returns the `Ready` that finds the connections with events.
    pub fn ready(&self) -> Arc<Ready> {
        self.ready.clone()
    }

    /// Accepts a waiting connection.
    pub fn accept(&mut self, now: Time) {
        if let Some(connection) = self.listener.accept(now) {
            // An error means that the peer is gone; then the first read fails, too.
            let _ = set_options(&connection);
            let subscriber = SubscriberConnection::new(connection, self.requires_ticket, now);
            let subscriber = Watched::new(self.next_id, subscriber, self.ready.clone());
            self.connections.extend(subscriber.ok().map(|subscriber| (self.next_id, subscriber)));
            self.next_id += 1;
        }
    }

    /// Handles the events of a connection: reads if it is `readable`, and sends what is possible.
    /// Returns the messages of the subscriber.
    pub fn process_events(&mut self, id: u64, readable: bool, now: Time) -> SubscriberInput {
        let subscriber = match self.connections.get_mut(&id) {
            Some(subscriber) => subscriber,
            None => return SubscriberInput::default(),
        };
        let input = subscriber.serve(|subscriber| {
            let input = if readable { subscriber.read(now)? } else { SubscriberInput::default() };
            subscriber.write(now).map(|()| input)
        });
        match input {
            Ok(input) => input,
            Err(_) => {
                self.connections.remove(&id);
                SubscriberInput::default()
            }
        }
    }

    /// Begins to serve a connection that has sent the ticket of `owner`, and closes the owner's earlier
    /// connection. If `owner` is `None`, the ticket was invalid: closes the connection. Returns true if the
    /// connection is served (K6).
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

    /// Closes the connections whose owners no longer have permission (K8).
    pub fn close_revoked(&mut self, may_read: impl Fn(&Owner) -> bool) {
        self.connections.retain(|_, subscriber| subscriber.owner.as_ref().map_or(true, &may_read));
    }

    /// Counts an invalid report of a connection. Closes the connection after too many.
    pub fn note_invalid_report(&mut self, id: u64, now: Time) {
        if self.connections.get_mut(&id).map_or(false, |subscriber| subscriber.spend(now).is_err()) {
            self.connections.remove(&id);
        }
    }

    /// Sends a message to every subscriber of its topic whose queue has room.
    pub fn send(&mut self, message: Queued, now: Time) {
        let message = Arc::new(message);
        self.connections.retain(|_, subscriber| {
            !subscriber.subscribes_to(&message.topic)
                || subscriber.serve(|subscriber| subscriber.put(&message, now)).is_ok()
        });
    }

    /// Sends a message to one subscriber, if it is still connected.
    pub fn answer(&mut self, id: u64, message: Queued, now: Time) {
        let message = Arc::new(message);
        let answered = self
            .connections
            .get_mut(&id)
            .map(|subscriber| subscriber.serve(|subscriber| subscriber.put(&message, now)));
        if let Some(Err(_)) = answered {
            self.connections.remove(&id);
        }
    }

    /// True if the queue of some subscriber of the topic is empty, or the topic has no subscriber.
    pub fn has_room(&self, topic: &str) -> bool {
        let mut wanting =
            self.connections.values().filter(|subscriber| subscriber.subscribes_to(topic)).peekable();
        wanting.peek().is_none() || wanting.any(|subscriber| subscriber.is_queue_empty())
    }

    /// Drops the queued messages of these topics, which are outdated.
    pub fn withdraw(&mut self, topics: &[String], now: Time) {
        self.connections.values_mut().for_each(|subscriber| subscriber.withdraw(topics, now));
    }

    /// Sends pings, and closes connections that are dead, lack a ticket, or hold a version too long. Must
    /// be called a few times a second.
    pub fn tick(&mut self, now: Time) {
        if now >= self.next_hold_at {
            self.next_hold_at = now + HOLD;
            self.connections.retain(|_, subscriber| !subscriber.lacks_ticket(now, TICKET_WAIT_MAX));
            let copied: usize = self.connections.values().map(|subscriber| subscriber.copy_bytes()).sum();
            let room = COPIES_BYTES_MAX.saturating_sub(copied);
            for id in release_versions(
                self.connections.iter_mut().map(|(&id, subscriber)| (id, subscriber)),
                room,
                now,
            ) {
                self.connections.remove(&id);
            }
        }
        if now >= self.next_ping_at {
            self.next_ping_at = now + PING_INTERVAL;
            self.connections.retain(|_, subscriber| now.saturating_sub(subscriber.alive_at) < SILENCE_MAX);
            self.connections.retain(|_, subscriber| {
                subscriber.ping();
                subscriber.serve(|subscriber| subscriber.write(now)).is_ok()
            });
        }
    }

    /// True if anything waits to be sent.
    pub fn has_unsent(&self) -> bool {
        self.connections.values().any(|subscriber| subscriber.has_unsent())
    }
}

fn set_options(connection: &TcpStream) -> io::Result<()> {
    let same_host = match (connection.local_addr(), connection.peer_addr()) {
        (Ok(ours), Ok(theirs)) => {
            connection.set_nodelay(true)?;
            ours.ip() == theirs.ip()
        }
        // Not an IP address: a Unix socket.
        _ => return socket::set_send_buffer(connection.as_raw_fd(), LOCAL_SEND_BUFFER),
    };
    if same_host {
        socket::set_send_buffer(connection.as_raw_fd(), LOCAL_SEND_BUFFER)?;
        let _ = socket::do_not_pace(connection.as_raw_fd()); // fails on kernels without pacing
    }
    Ok(())
}
