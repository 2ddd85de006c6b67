//! The publisher's control socket: our own ROUTER socket.
//!
//! libzmq's ROUTER accepts peers of ZMTP 1 and 2, and takes even a browser for such a peer. It does not
//! bound the frames of a message or the answers to ZMTP pings, and it aborts the process if a ping comes at
//! the wrong moment. This socket bounds every input before it stores the input, from peers with and
//! without keys.
//!
//! One thread owns the socket, and no call blocks.

use super::control_connection::{Admits, ControlConnection, Message, Progress};
use super::effects::{Identity, Payload};
use super::endpoints::ListenAddress;
use super::listening::{bind_error, LimitedListener, Listener};
use super::pipe::{release_versions, COPIES_BYTES_MAX};
use super::rate_limits::Rate;
use super::watched::Watched;
use crate::curve::{key_of, public_of};
use crate::error::Error;
use crate::raw::fork::Own;
use crate::raw::ready::Ready;
use crate::raw::socket;
use crate::raw::sodium::Pair;
use crate::transfer::Time;
use std::collections::BTreeMap;
use std::convert::TryInto;
use std::io;
use std::net::{IpAddr, TcpStream};
use std::os::unix::io::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

const ACCEPTS: Rate = Rate(512.0, 1000.0); // connections; each costs some 20 us, with keys up to 200
const ACCEPTS_AT_ONCE: usize = 16; // connections accepted before open connections are served
const HANDSHAKE_MAX: Duration = Duration::from_millis(1500); // for a handshake, or to read a refusal
const UNFINISHED_MAX: usize = 256; // connections that have sent no message; with more, one is closed
const UNFINISHED_OF_HOST_MAX: usize = 64; // the same, of one host
const PARTIAL_BYTES_MAX: usize = 1 << 20; // of incomplete messages, of all connections
const PARTIAL_BYTES_SMALL: usize = 8192; // a connection with at most this many is not counted
const WAITING_BYTES_MAX: usize = 1 << 26; // of layouts and headers queued for all connections
const CHECK_INTERVAL: Duration = Duration::from_millis(100); // between two checks of all connections
const STALLED_MAX: Duration = Duration::from_secs(30); // after which a peer that reads nothing is disconnected
const KEEPALIVE_SECONDS: i32 = 10; // of silence before the first probe, and between probes

/// Messages that arrived on a connection, and the public key of its owner; empty without keys.
pub struct ReceivedMessages {
    pub key: String,
    pub messages: Vec<Message>,
}

/// The host of a peer. All ipc peers, and all peers that are already gone, count as one host, `None`.
type Host = Option<IpAddr>;

/// A bound ROUTER.
pub struct Router {
    listener: LimitedListener,
    keys: Option<Arc<Pair>>,
    ready: Arc<Ready>,
    connections: BTreeMap<u64, Watched<ControlConnection>>, // by id, which is never reused
    unfinished: BTreeMap<u64, Host>, // connections that have sent no message, oldest first
    next_id: u64,
    newly_closed: Vec<u64>, // closed connections that had sent a message, until `take_closed`
    next_check_at: Time,
}

fn identity(id: u64) -> Identity {
    id.to_be_bytes().to_vec()
}

fn id_of(identity: &[u8]) -> Option<u64> {
    identity.try_into().ok().map(u64::from_be_bytes)
}

impl Router {
    /// Listens at an address. Returns the router, and the address with the bound port. With a
    /// secret key, only peers with an allowed key can connect.
    pub fn bind(listen_at: &ListenAddress, secret: Option<&str>) -> Result<(Router, ListenAddress), Error> {
        let broken = |error| bind_error(&listen_at.endpoint(), error);
        let keys = secret.map(pair_of).transpose()?;
        let (listener, bound) = Listener::bind(listen_at).map_err(broken)?;
        let bound = listener.bound().unwrap_or(bound);
        let router = Router {
            listener: LimitedListener::new(listener, ACCEPTS, CHECK_INTERVAL),
            keys: keys.map(Arc::new),
            ready: Arc::new(Ready::new().map_err(broken)?),
            connections: BTreeMap::new(),
            unfinished: BTreeMap::new(),
            next_id: 1,
            newly_closed: Vec::new(),
            next_check_at: Time::ZERO,
        };
        Ok((router, bound))
    }

    /// Returns the descriptor to poll for new connections; `None` while accepting is paused.
    pub fn listener_descriptor(&self, now: Time) -> Option<RawFd> {
        self.listener.descriptor(now)
    }

    /// Returns the `Ready` that finds the connections with events.
    pub fn ready(&self) -> Arc<Ready> {
        self.ready.clone()
    }

    /// Accepts waiting connections.
    pub fn accept(&mut self, now: Time) {
        for _ in 0..ACCEPTS_AT_ONCE {
            match self.listener.accept(now) {
                Some(connection) => self.add(connection, now),
                None => return,
            }
        }
    }

    /// Adds an accepted connection.
    fn add(&mut self, connection: Own<TcpStream>, now: Time) {
        let host: Host = connection.peer_addr().ok().map(|peer| peer.ip());
        let _ = set_options(&connection); // fails if the peer is gone; then the first read fails, too
        self.make_room(&host);
        let (id, connection) = (self.next_id, ControlConnection::new(connection, self.keys.clone(), now));
        self.next_id += 1;
        if let Ok(mut watched) = Watched::new(id, connection, self.ready.clone()) {
            // Send the greeting at once, so that a peer with other keys, or none, sees the mismatch itself.
            if watched.serve(|connection| connection.write(0, now)).is_ok() {
                self.connections.insert(id, watched);
                self.unfinished.insert(id, host);
            }
        }
    }

    /// If too many connections have sent no message, closes one: of this host if it has too many of them,
    /// otherwise of the host that has most. Closes the connection with the least progress, and of several
    /// the oldest. So a peer that knows the publisher's key can connect although many others try.
    fn make_room(&mut self, host: &Host) {
        let mut counts: BTreeMap<&Host, usize> = BTreeMap::new();
        self.unfinished.values().for_each(|host| *counts.entry(host).or_default() += 1);
        let most = counts.iter().max_by_key(|(_, &count)| count).map(|(&host, _)| *host);
        let crowded = if counts.get(host).map_or(false, |&count| count >= UNFINISHED_OF_HOST_MAX) {
            Some(*host)
        } else {
            most.filter(|_| self.unfinished.len() >= UNFINISHED_MAX)
        };
        if let Some(crowded) = crowded {
            let candidates = self.unfinished.iter().filter(|(_, &host)| host == crowded).map(|(&id, _)| id);
            let progress = |id: &u64| self.connections.get(id).map(|connection| connection.progress);
            if let Some(id) = candidates.min_by_key(|id| (progress(id), *id)) {
                self.close(id);
            }
        }
    }

    /// Handles the events of a connection: reads if it is `readable`, and sends what is possible.
    /// Returns the messages that arrived.
    pub fn process_events(&mut self, id: u64, readable: bool, admits: Admits, now: Time) -> ReceivedMessages {
        let room = self.copy_room();
        let nothing = ReceivedMessages { key: String::new(), messages: Vec::new() };
        let connection = match self.connections.get_mut(&id) {
            Some(connection) => connection,
            None => return nothing,
        };
        let messages = connection.serve(|connection| {
            let messages = if readable { connection.read(admits, now)? } else { Vec::new() };
            connection.write(room, now).map(|()| messages)
        });
        match messages {
            Ok(messages) => {
                if connection.progress == Progress::SentMessage {
                    self.unfinished.remove(&id);
                }
                ReceivedMessages { key: connection.key.clone(), messages }
            }
            Err(_) => {
                self.close(id);
                nothing
            }
        }
    }

    /// Returns the identity of the connection with this number.
    pub fn identity(id: u64) -> Identity {
        identity(id)
    }

    /// True if a connection is still open.
    pub fn is_open(&self, id: u64) -> bool {
        self.connections.contains_key(&id)
    }

    /// Closes a connection.
    pub fn close(&mut self, id: u64) {
        let spoke = self.unfinished.remove(&id).is_none();
        if self.connections.remove(&id).is_some() && spoke {
            self.newly_closed.push(id);
        }
    }

    /// Returns the identities of newly closed connections that had sent a message.
    pub fn take_closed(&mut self) -> Vec<Identity> {
        std::mem::take(&mut self.newly_closed).into_iter().map(identity).collect()
    }

    /// Sends a message on the connection `to`. Returns false if the connection is closed. If too many
    /// messages are queued because the worker does not read, drops the message and returns true.
    pub fn send(&mut self, to: &[u8], header: &[u8], payload: &Payload, now: Time) -> bool {
        let room = self.copy_room();
        let id = match id_of(to) {
            Some(id) => id,
            None => return false,
        };
        let sent = match self.connections.get_mut(&id) {
            Some(connection) => connection.serve(|connection| connection.put(header, payload, room, now)),
            None => return false,
        };
        if sent.is_err() {
            self.close(id);
        }
        sent.is_ok()
    }

    /// Returns the number of bytes that encrypted copies of payloads may still use. With keys, each
    /// connection needs its own copy. Without keys, there are no such copies.
    fn copy_room(&self) -> usize {
        if self.keys.is_none() {
            return COPIES_BYTES_MAX;
        }
        COPIES_BYTES_MAX
            .saturating_sub(self.connections.values().map(|connection| connection.copy_bytes()).sum())
    }

    /// Closes connections that exceed the time for the handshake, have stalled, or need too much memory.
    /// Must be called a few times a second.
    pub fn tick(&mut self, now: Time) {
        if now < self.next_check_at {
            return;
        }
        self.next_check_at = now + CHECK_INTERVAL;
        let mut over: Vec<u64> = Vec::new();
        for (&id, connection) in &self.connections {
            let late =
                connection.progress < Progress::Open && now.saturating_sub(connection.since) >= HANDSHAKE_MAX;
            if late || connection.is_stalled(now, STALLED_MAX) {
                over.push(id);
            }
        }
        over.extend(self.largest(
            |connection| Some(connection.partial_bytes()).filter(|&nbytes| nbytes > PARTIAL_BYTES_SMALL),
            PARTIAL_BYTES_MAX,
        ));
        over.extend(self.largest(|connection| Some(connection.queued_bytes()), WAITING_BYTES_MAX));
        over.into_iter().for_each(|id| self.close(id));
        self.share_room(now);
    }

    /// Returns the ids of the connections that take most bytes, so that all others together take at most
    /// `bytes_max`. Returns none if only one connection is counted. `bytes_of` returns the bytes of a
    /// connection; `None` if the connection is not counted.
    fn largest(&self, bytes_of: impl Fn(&ControlConnection) -> Option<usize>, bytes_max: usize) -> Vec<u64> {
        let mut each: Vec<(usize, u64)> = self
            .connections
            .iter()
            .filter_map(|(&id, connection)| Some((bytes_of(connection)?, id)))
            .collect();
        let mut all: usize = each.iter().map(|(nbytes, _)| nbytes).sum();
        if all <= bytes_max || each.len() < 2 {
            return Vec::new();
        }
        each.sort_unstable();
        let mut over = Vec::new();
        while all > bytes_max {
            match each.pop() {
                Some((nbytes, id)) => {
                    all -= nbytes;
                    over.push(id);
                }
                None => break,
            }
        }
        over
    }

    /// Releases the versions that stalled messages hold. If connections wait for room for a copy, closes
    /// the connections whose copies make too little progress.
    fn share_room(&mut self, now: Time) {
        let copied: usize = self.connections.values().map(|connection| connection.copy_bytes()).sum();
        let room = COPIES_BYTES_MAX.saturating_sub(copied);
        let mut over = release_versions(
            self.connections.iter_mut().map(|(&id, connection)| (id, connection)),
            room,
            now,
        );
        let starved: Vec<u64> =
            self.connections.iter().filter(|(_, connection)| connection.starved).map(|(&id, _)| id).collect();
        if !starved.is_empty() {
            let blocking =
                |connection: &ControlConnection| connection.copy_bytes() > 0 && connection.blocks_others(now);
            over.extend(
                self.connections.iter().filter(|(_, connection)| blocking(connection)).map(|(&id, _)| id),
            );
        }
        over.into_iter().for_each(|id| self.close(id));
        for id in starved {
            let room = self.copy_room();
            if let Some(connection) = self.connections.get_mut(&id) {
                if connection.serve(|connection| connection.write(room, now)).is_err() {
                    self.close(id);
                }
            }
        }
    }

    /// True if anything waits to be sent.
    pub fn has_unsent(&self) -> bool {
        self.connections.values().any(|connection| connection.has_unsent())
    }
}

fn pair_of(secret: &str) -> Result<Pair, Error> {
    let odd = || Error::Keys("the publisher's secret key is invalid".to_owned());
    let public = public_of(secret).ok_or_else(odd)?;
    Ok(Pair { public: key_of(&public).ok_or_else(odd)?, secret: key_of(secret).ok_or_else(odd)? })
}

fn set_options(connection: &TcpStream) -> io::Result<()> {
    // A Unix socket has no such options, and fails here.
    connection.set_nodelay(true)?;
    // So that TCP detects dead peers, and their queues are freed.
    socket::keep_alive(connection.as_raw_fd(), KEEPALIVE_SECONDS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::framing::greeting;
    use std::io::Write;
    use std::time::Instant;

    const NOW: Time = Duration::from_secs(1);

    /// Connects, and lets the router handle what was sent.
    fn dial(router: &mut Router, port: u16, says: &[u8]) -> TcpStream {
        let mut dialled = TcpStream::connect(("127.0.0.1", port)).unwrap();
        dialled.write_all(says).unwrap();
        let (id, end) = (router.next_id, Instant::now() + Duration::from_secs(10));
        let heard = |router: &Router| {
            router
                .connections
                .get(&id)
                .map_or(false, |its| says.is_empty() || its.progress > Progress::Silent)
        };
        while !heard(router) {
            assert!(Instant::now() < end, "it does not come");
            router.accept(NOW);
            router.process_events(id, true, &|_| true, NOW);
        }
        dialled
    }

    #[test]
    fn of_many_that_say_nothing_the_oldest_make_room_and_who_gets_further_stays() {
        let listen_at = ListenAddress::Tcp { host: "127.0.0.1".to_owned(), port: 0 };
        let (mut router, bound) = Router::bind(&listen_at, None).unwrap();
        let port = match bound {
            ListenAddress::Tcp { port, .. } => port,
            other => panic!("{:?}", other),
        };
        let _further = dial(&mut router, port, &greeting(false, false));
        let _crowd: Vec<_> = (0..3 * UNFINISHED_OF_HOST_MAX).map(|_| dial(&mut router, port, b"")).collect();
        assert_eq!(router.connections.len(), UNFINISHED_OF_HOST_MAX);
        let last = router.next_id - 1;
        assert!(router.is_open(1) && !router.is_open(2) && router.is_open(last));
        router.tick(NOW + HANDSHAKE_MAX);
        assert!(router.connections.is_empty(), "nobody is waited for longer");
    }
}
