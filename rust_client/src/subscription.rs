//! The worker's data connection. Chunks are read straight into a version's buffer.
//!
//! The connection belongs to one thread, which never blocks here. Another thread looks up the host,
//! connects, and then wakes the first thread. A connection that breaks or falls silent is dialled
//! again.

use crate::endpoint::Endpoint;
use crate::limits::{COMMANDS_MAX, UNREAD_BYTES_MAX};
use crate::raw::fork::Own;
use crate::raw::os;
use crate::raw::socket::{is_name, unix_by_name};
use crate::transfer::Time;
use crate::waker::Waker;
use crate::zmtp::{Places, Published, Stream};
use std::collections::BTreeSet;
use std::io::{self, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::io::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

const DIAL: Duration = Duration::from_secs(5); // limit for each address, and for the handshake
const REDIAL: Duration = Duration::from_millis(50); // pause between two attempts; doubles
const REDIAL_MAX: Duration = Duration::from_secs(1);
const SILENCE: Duration = Duration::from_secs(30); // a publisher sends beacons far more often
const SECOND: Duration = Duration::from_secs(1);
const LOW_WATER_BYTES: usize = 1 << 18; // of a payload: a wake-up waits for at most so many bytes

/// Connects to an endpoint. `patience` is the limit for each address of the host.
pub fn dial(endpoint: &Endpoint, patience: Duration) -> io::Result<Own<TcpStream>> {
    let connection = match endpoint {
        Endpoint::Tcp { host, port } => dial_tcp(host, *port, patience)?,
        Endpoint::Ipc(path) if is_name(path) => unix_by_name(path, false)?.into(),
        // a connected Unix socket can be used like a TCP socket
        Endpoint::Ipc(path) => OwnedFd::from(UnixStream::connect(path)?).into(),
    };
    let connection = Own::new(connection);
    connection.set_nonblocking(true)?;
    Ok(connection)
}

fn dial_tcp(host: &str, port: u16, patience: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, patience) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The result of an attempt to connect, from the thread that made it.
pub struct Dialled {
    pub generation: u64,
    pub connection: io::Result<Own<TcpStream>>,
}

/// A subscription to some topics of one publisher. `T` is the ticket of `Places`.
pub struct Subscription<T> {
    endpoint: Option<Endpoint>,
    ticket: String, // for the next connection
    ticketed: bool, // every connection needs a ticket
    topics: BTreeSet<String>,
    connection: Option<Own<TcpStream>>,
    stream: Stream<T>,
    waker: Arc<Waker>,
    dialled: (Sender<Dialled>, Receiver<Dialled>),
    generation: u64, // number of the endpoint: a connection to an earlier endpoint is dropped
    dialling: bool,
    dial_at: Time,
    pause: Duration,
    heard_at: Time,
    counted: (u64, Time), // number of commands at the beginning of this second, and that time
    low_water: usize,
}

impl<T: Copy> Subscription<T> {
    pub fn new(waker: Arc<Waker>) -> Subscription<T> {
        Subscription {
            endpoint: None,
            ticket: String::new(),
            ticketed: false,
            topics: BTreeSet::new(),
            connection: None,
            stream: Stream::new(&BTreeSet::new()),
            waker,
            dialled: channel(),
            generation: 0,
            dialling: false,
            dial_at: Time::ZERO,
            pause: REDIAL,
            heard_at: Time::ZERO,
            counted: (0, Time::ZERO),
            low_water: 1,
        }
    }

    /// Connects to this endpoint instead of the previous one. If `ticket` is not empty, every
    /// connection needs a ticket, which is valid once.
    pub fn connect(&mut self, endpoint: Endpoint, ticket: String, places: &mut impl Places<Ticket = T>) {
        if self.endpoint.as_ref() != Some(&endpoint) {
            self.disconnect(places);
            self.endpoint = Some(endpoint);
        }
        self.ticketed = !ticket.is_empty();
        self.ticket = ticket;
    }

    /// True if no connection can be made because the ticket was used.
    pub fn needs_ticket(&self) -> bool {
        self.ticketed && self.ticket.is_empty() && self.connection.is_none() && !self.dialling
    }

    /// Closes the connection. The next connection needs another call of `connect`.
    pub fn disconnect(&mut self, places: &mut impl Places<Ticket = T>) {
        self.redial(places);
        self.endpoint = None;
        self.ticketed = false;
        self.generation += 1;
        self.dialling = false; // a lookup of another host may take long
    }

    /// Closes the connection and dials again at once.
    pub fn redial(&mut self, places: &mut impl Places<Ticket = T>) {
        self.hang_up(places);
        self.dial_at = Time::ZERO;
        self.pause = REDIAL;
    }

    /// Subscribes to a topic, or unsubscribes. Repetitions have no effect.
    pub fn subscribe(&mut self, topic: &str, on: bool) {
        let changed = if on { self.topics.insert(topic.to_owned()) } else { self.topics.remove(topic) };
        if changed {
            self.stream.subscribe(topic, on);
        }
    }

    /// Dials, writes, and closes a silent connection. Returns the descriptor to poll for input. The
    /// bool is true if it must be polled for output, too.
    pub fn process_events(
        &mut self,
        now: Time,
        places: &mut impl Places<Ticket = T>,
    ) -> Option<(RawFd, bool)> {
        while let Ok(dialled) = self.dialled.1.try_recv() {
            self.adopt(dialled, now);
        }
        let patience = if self.stream.is_open() { SILENCE } else { DIAL };
        if self.connection.is_some() && now.saturating_sub(self.heard_at) >= patience {
            self.hang_up(places);
        }
        if self.connection.is_none() {
            self.dial(now);
            return None;
        }
        self.write(places);
        let unsent = !self.stream.outgoing.is_empty();
        self.connection.as_ref().map(|connection| (connection.as_raw_fd(), unsent))
    }

    /// True if `receive` may return a message without new bytes, so that `poll` need not wait.
    pub fn has_arrived(&self) -> bool {
        !self.stream.arrived.is_empty() || self.stream.is_deferred()
    }

    /// Returns the next message, if there is one.
    pub fn receive(&mut self, now: Time, places: &mut impl Places<Ticket = T>) -> Option<Published<T>> {
        while self.stream.arrived.is_empty() {
            let connection = self.connection.as_mut()?;
            match self.stream.read(&mut **connection, places) {
                Ok(count) if count > 0 => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.set_low_water(self.stream.missing().min(LOW_WATER_BYTES));
                    return None;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => {
                    self.hang_up(places); // closed, broken or not ZMTP: chunks are fetched now
                    return None;
                }
            }
            if self.stream.is_open() {
                self.heard_at = now; // bytes of a handshake do not show that the peer works
            }
            if !self.stream.arrived.is_empty() {
                self.pause = REDIAL; // commands alone do not show that a redial is worthwhile
            }
            self.write(places);
            self.check_commands(now, places);
        }
        self.stream.arrived.pop_front()
    }

    /// Closes the connection if the peer's commands keep this thread busy, or if the peer does not
    /// read the answers.
    fn check_commands(&mut self, now: Time, places: &mut impl Places<Ticket = T>) {
        if now.saturating_sub(self.counted.1) >= SECOND {
            self.counted = (self.stream.commands, now);
        }
        let too_many = self.stream.commands.saturating_sub(self.counted.0) > u64::from(COMMANDS_MAX);
        if too_many || self.stream.outgoing.len() > UNREAD_BYTES_MAX {
            self.hang_up(places);
        }
    }

    /// Makes `poll` wait until `count` bytes have arrived, instead of waking for each packet.
    fn set_low_water(&mut self, count: usize) {
        if let Some(connection) = self.connection.as_ref().filter(|_| count != self.low_water) {
            if os::set_receive_low_water(connection.as_raw_fd(), count).is_ok() {
                self.low_water = count;
            }
        }
    }

    /// Starts a thread that connects, if an attempt is due and none is under way.
    fn dial(&mut self, now: Time) {
        let endpoint = match &self.endpoint {
            Some(endpoint) if !self.dialling && !self.needs_ticket() && now >= self.dial_at => {
                endpoint.clone()
            }
            _ => return,
        };
        self.dial_at = now + self.pause;
        self.pause = (2 * self.pause).min(REDIAL_MAX);
        let (generation, found, waker) = (self.generation, self.dialled.0.clone(), self.waker.clone());
        let dial = move || {
            let connection = dial(&endpoint, DIAL);
            let _ = found.send(Dialled { generation, connection }); // the receiver may be gone
            waker.wake();
        };
        self.dialling = thread::Builder::new().name("weightbus-dial".to_owned()).spawn(dial).is_ok();
    }

    /// Handles the result of an attempt to connect.
    fn adopt(&mut self, dialled: Dialled, now: Time) {
        if dialled.generation != self.generation {
            return;
        }
        self.dialling = false;
        if self.connection.is_some() {
            return;
        }
        if let Ok(connection) = dialled.connection {
            self.connection = Some(connection);
            (self.heard_at, self.counted) = (now, (0, now));
            self.low_water = 1;
            self.stream = Stream::new(&self.topics);
            self.stream.set_ticket(std::mem::take(&mut self.ticket)); // used once
        }
    }

    fn write(&mut self, places: &mut impl Places<Ticket = T>) {
        let connection = match &mut self.connection {
            Some(connection) if !self.stream.outgoing.is_empty() => connection,
            _ => return,
        };
        match connection.write(&self.stream.outgoing) {
            Ok(count) if count > 0 => drop(self.stream.outgoing.drain(..count)),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            _ => self.hang_up(places),
        }
    }

    fn hang_up(&mut self, places: &mut impl Places<Ticket = T>) {
        self.connection = None;
        self.stream.close(places);
        self.stream = Stream::new(&self.topics);
    }
}
