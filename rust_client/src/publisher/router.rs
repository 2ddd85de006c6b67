//! The publisher's control socket: a bound ROUTER of libzmq's.

use super::comers::Comers;
use super::distribution::unbindable;
use super::effects::Identity;
use super::endpoints::Place;
use super::left_behind::free_path;
use super::zap::{serve, Gate};
use crate::error::Error;
use crate::limits::HEADER_BYTES_MAX;
use crate::raw::fork::Libzmqs;
use crate::raw::hang_up::{Hook, Name};
use crate::raw::socket::with_chance;
use crate::transfer::Time;
use std::convert::TryInto;
use std::io;
use std::os::unix::io::RawFd;

const LINGER_MS: i32 = 200; // what is on its way at the end gets this
const KEEPALIVE_SECONDS: i32 = 10; // of silence, then after each question without answer
const UNREAD: i32 = 4; // messages of one worker before TCP pushes back: each may have 128 KiB
const QUEUE: i32 = 80; // messages for one worker, who has 16 chunks outstanding and may ask for 64: bytes count
const UNREAD_BYTES: i32 = 1 << 15; // in the kernel, which takes twice that: what may come between two looks
const DROPPED: usize = 256; // messages of connections that were hung up on, before others have a turn
const DOORBELL: &str = "inproc://doorbell";
const SOCKETS: usize = 3; // with the one that rings; a gate has another
const FRAME_HEAD: usize = 9; // of ZMTP, at most
const CURVE_COMMAND: usize = 33; // what CURVE adds to a frame
const FRAMES_MAX: usize = 8; // more make a message malformed, however many there are

/// A message of a worker: its connection, the header, and how many frames follow.
pub struct FromRouter {
    pub identity: Vec<u8>,
    /// The public key of that connection; empty: it has none.
    pub key: String,
    pub header: Vec<u8>,
    pub payloads: usize,
}

/// A bound ROUTER.
pub struct Router {
    socket: zmq::Socket,
    doorbell: zmq::Socket, // rings for each connection that comes or goes
    comers: Comers,
    last: Option<(RawFd, Identity)>, // of the last message: where it came from
    /// Asked who may come in, where there are keys.
    pub gate: Option<Gate>,
    _libzmqs: Libzmqs, // which goes before the context
    _context: zmq::Context,
}

impl Router {
    /// Listens at a place; returns it with the port that was taken. `seed` is a number that nobody can guess: the
    /// identities that libzmq gives to connections begin there (section 14 of the protocol). With a secret key only
    /// those connect whom the gate lets in.
    pub fn bind(place: &Place, seed: u32, secret: Option<&str>) -> Result<(Router, Place), Error> {
        // libzmq removes whatever is at a path before it binds.
        let _folder = match place {
            Place::Ipc(path) => Some(free_path(path).map_err(|error| unbindable(&place.endpoint(), error))?),
            Place::Tcp { .. } => None,
        };
        let broken =
            |error: zmq::Error| unbindable(&place.endpoint(), io::Error::from_raw_os_error(error.to_raw()));
        let (sockets, libzmqs) = open(place, seed, secret).map_err(broken)?;
        let Sockets { socket, doorbell, gate, context } = sockets;
        let endpoint = socket.get_last_endpoint().map_err(broken)?;
        let bound = Place::parse(&endpoint.unwrap_or_default())?;
        let name = match &bound {
            Place::Tcp { port, .. } => Name::Port(*port),
            Place::Ipc(path) => Name::Path(path.clone()),
        };
        let hook = Hook::new(name).map_err(|error| unbindable(&place.endpoint(), error))?;
        let (comers, last) = (Comers::new(hook), None);
        let router = Router { socket, doorbell, comers, last, gate, _libzmqs: libzmqs, _context: context };
        Ok((router, bound))
    }

    /// What to poll: for messages, and for connections that have come.
    pub fn poll_items(&self) -> [zmq::PollItem<'_>; 2] {
        [self.socket.as_poll_item(zmq::POLLIN), self.doorbell.as_poll_item(zmq::POLLIN)]
    }

    /// Takes note of the connections that have come and gone.
    ///
    /// Ask often: libzmq stands still while a thousand of them wait here.
    pub fn greet(&mut self, now: Time) {
        while let Ok(told) = self.doorbell.recv_multipart(zmq::DONTWAIT) {
            let told = told.first().map_or(&[][..], Vec::as_slice);
            let event = told.get(..2).and_then(|event| event.try_into().ok()).map(u16::from_ne_bytes);
            let value = told.get(2..).and_then(|value| value.try_into().ok()).map(i32::from_ne_bytes);
            match value {
                Some(descriptor) if event == Some(zmq::SocketEvent::ACCEPTED.to_raw()) => {
                    self.comers.accept(descriptor, now)
                }
                Some(descriptor) => self.comers.closed(descriptor),
                None => {}
            }
        }
    }

    /// The identities of connections that were closed, each once. Take all messages first.
    pub fn take_closed(&mut self) -> Vec<Identity> {
        self.comers.take_closed()
    }

    /// Whether `take_closed` has anything to tell.
    pub fn any_closed(&self) -> bool {
        self.comers.any_closed()
    }

    /// When to look at connections next, if ever.
    pub fn due(&self) -> Option<Time> {
        self.comers.due()
    }

    /// Hangs up on whoever floods libzmq; `drained`: all messages are taken.
    pub fn look(&mut self, now: Time, drained: bool) {
        self.comers.look(now, drained);
    }

    /// Closes the connection of the message that was received last.
    pub fn hang_up(&mut self) {
        if let Some((descriptor, identity)) = self.last.take() {
            self.comers.drop_of(&identity, descriptor);
            self.comers.hang_up(descriptor);
        }
    }

    /// Returns the next message, if there is one. What connections have left that were hung up on is dropped.
    pub fn receive(&mut self, now: Time) -> Option<FromRouter> {
        for _ in 0..DROPPED {
            let (message, descriptor, nbytes) = self.next()?;
            if self.comers.dropped(&message.identity, descriptor) {
                continue;
            }
            if !self.comers.has(descriptor) {
                self.greet(now); // the word of it comes before its messages
            }
            if self.comers.saw(descriptor, &message.identity, nbytes) {
                self.last = Some((descriptor, message.identity.clone()));
                return Some(message);
            }
        }
        None
    }

    /// A message, the descriptor of its connection, and how many bytes it took there.
    fn next(&self) -> Option<(FromRouter, RawFd, usize)> {
        let identity = self.socket.recv_msg(zmq::DONTWAIT).ok()?;
        let (mut header, mut payloads, mut more) = (Vec::new(), 0, identity.get_more());
        let (mut first, mut key) = (true, String::new());
        let (mut descriptor, mut nbytes) = (-1, 0);
        let head = FRAME_HEAD + if self.gate.is_some() { CURVE_COMMAND } else { 0 };
        while more {
            let mut frame = self.socket.recv_msg(zmq::DONTWAIT).ok()?;
            more = frame.get_more();
            nbytes += frame.len() + head;
            if first {
                header = frame.to_vec();
                key = self.gate.as_ref().and(frame.gets("User-Id")).unwrap_or_default().to_owned();
                descriptor = frame.gets("__fd").and_then(|text| text.parse().ok()).unwrap_or(-1);
            } else if payloads < FRAMES_MAX {
                payloads += 1;
            }
            first = false;
        }
        Some((FromRouter { identity: identity.to_vec(), key, header, payloads }, descriptor, nbytes))
    }

    /// Sends to one worker; false if its connection is gone. One that does not read loses the message once its queue
    /// is full, as with any loss.
    pub fn send(&self, identity: &[u8], header: &[u8], payload: Option<&[u8]>) -> bool {
        let more = zmq::DONTWAIT | zmq::SNDMORE;
        match self.socket.send(identity, more) {
            Ok(()) => {}
            Err(zmq::Error::EHOSTUNREACH) => return false,
            Err(_) => return true,
        }
        // From here on libzmq takes the rest, whatever it does with it: the message is one.
        let _ = match payload {
            None => self.socket.send(header, zmq::DONTWAIT),
            Some(payload) => {
                self.socket.send(header, more).and_then(|()| self.socket.send(payload, zmq::DONTWAIT))
            }
        };
        true
    }
}

/// What is closed in this order.
struct Sockets {
    socket: zmq::Socket,
    doorbell: zmq::Socket,
    gate: Option<Gate>,
    context: zmq::Context,
}

fn sockets(seed: u32, keyed: bool) -> zmq::Result<Sockets> {
    let context = zmq::Context::new();
    let gate = keyed.then(|| Gate::open(&context)).transpose()?;
    let socket = with_chance(seed, || context.socket(zmq::ROUTER))?;
    let changes = zmq::SocketEvent::ACCEPTED.to_raw() | zmq::SocketEvent::DISCONNECTED.to_raw();
    socket.monitor(DOORBELL, changes.into())?;
    let doorbell = context.socket(zmq::PAIR)?;
    Ok(Sockets { socket, doorbell, gate, context })
}

fn open(place: &Place, seed: u32, secret: Option<&str>) -> zmq::Result<(Sockets, Libzmqs)> {
    let count = if secret.is_some() { SOCKETS + 1 } else { SOCKETS };
    let (mut sockets, libzmqs) = Libzmqs::of(count, || sockets(seed, secret.is_some()))?;
    let socket = &mut sockets.socket;
    if let Some(secret) = secret {
        serve(socket, secret)?;
    }
    socket.set_linger(LINGER_MS)?;
    socket.set_router_mandatory(true)?; // say so when a worker is gone
    socket.set_maxmsgsize(2 * HEADER_BYTES_MAX as i64)?;
    socket.set_sndhwm(QUEUE)?;
    socket.set_rcvhwm(UNREAD)?;
    socket.set_rcvbuf(UNREAD_BYTES)?;
    // TCP finds out which peers are gone, so that their queues are freed. Not ZeroMQ's own pings: see section 11.
    socket.set_tcp_keepalive(1)?;
    socket.set_tcp_keepalive_idle(KEEPALIVE_SECONDS)?;
    socket.set_tcp_keepalive_intvl(KEEPALIVE_SECONDS)?;
    socket.set_tcp_keepalive_cnt(2)?;
    let endpoint = place.endpoint();
    socket.set_ipv6(endpoint.contains('['))?;
    sockets.doorbell.connect(DOORBELL)?;
    sockets.socket.bind(&endpoint)?;
    Ok((sockets, libzmqs))
}
