//! The publisher's control socket: a bound ROUTER of libzmq's.

use super::distribution::unbindable;
use super::endpoints::Place;
use super::left_behind::free_path;
use super::zap::{serve, Gate};
use crate::error::Error;
use crate::limits::HEADER_BYTES_MAX;
use crate::raw::hang_up::{spent, Hook, Name};
use crate::raw::socket::with_chance;
use std::convert::TryInto;
use std::io;
use std::os::unix::io::RawFd;

const LINGER_MS: i32 = 200; // what is on its way at the end gets this
const KEEPALIVE_SECONDS: i32 = 10; // of silence, then after each question without answer
const UNREAD: i32 = 4; // messages of one worker before TCP pushes back: each may have 128 KiB
const QUEUE: i32 = 80; // messages for one worker, who has 16 chunks outstanding and may ask for 64: bytes count
const COMERS_AT: &str = "inproc://comers";
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
    comers: zmq::Socket,
    hook: Hook,
    /// Asked who may come in, where there are keys.
    pub gate: Option<Gate>,
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
        let (context, gate, socket, comers) = open(place, seed, secret).map_err(broken)?;
        let endpoint = socket.get_last_endpoint().map_err(broken)?;
        let bound = Place::parse(&endpoint.unwrap_or_default())?;
        let name = match &bound {
            Place::Tcp { port, .. } => Name::Port(*port),
            Place::Ipc(path) => Name::Path(path.clone()),
        };
        let hook = Hook::new(name).map_err(|error| unbindable(&place.endpoint(), error))?;
        Ok((Router { socket, comers, hook, gate, _context: context }, bound))
    }

    /// What to poll: for messages, and for connections that have come.
    pub fn poll_items(&self) -> [zmq::PollItem<'_>; 2] {
        [self.socket.as_poll_item(zmq::POLLIN), self.comers.as_poll_item(zmq::POLLIN)]
    }

    /// Hangs up on those of the connections that have come that took one of the last descriptors. Without any, libzmq
    /// tries to accept the next one again and again, and the process can open nothing.
    ///
    /// Ask often: libzmq stands still while a thousand of them wait here.
    pub fn keep_descriptors(&self) {
        while let Ok(told) = self.comers.recv_multipart(zmq::DONTWAIT) {
            let value = told.first().and_then(|told| told.get(2..)?.try_into().ok()).map(u32::from_ne_bytes);
            if let Some(descriptor) = value.map(|value| value as RawFd).filter(|&each| spent(each)) {
                self.hook.hang_up(descriptor);
            }
        }
    }

    /// Returns the next message, if there is one.
    pub fn receive(&self) -> Option<FromRouter> {
        let identity = self.socket.recv_msg(zmq::DONTWAIT).ok()?;
        let (mut header, mut payloads, mut more) = (Vec::new(), 0, identity.get_more());
        let (mut first, mut key) = (true, String::new());
        while more {
            let mut frame = self.socket.recv_msg(zmq::DONTWAIT).ok()?;
            more = frame.get_more();
            if first {
                header = frame.to_vec();
                key = self.gate.as_ref().and(frame.gets("User-Id")).unwrap_or_default().to_owned();
            } else if payloads < FRAMES_MAX {
                payloads += 1;
            }
            first = false;
        }
        Some(FromRouter { identity: identity.to_vec(), key, header, payloads })
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

type Opened = (zmq::Context, Option<Gate>, zmq::Socket, zmq::Socket);

fn open(place: &Place, seed: u32, secret: Option<&str>) -> zmq::Result<Opened> {
    let context = zmq::Context::new();
    let gate = secret.map(|_| Gate::open(&context)).transpose()?;
    let mut socket = with_chance(seed, || context.socket(zmq::ROUTER))?;
    if let Some(secret) = secret {
        serve(&mut socket, secret)?;
    }
    socket.set_linger(LINGER_MS)?;
    socket.set_router_mandatory(true)?; // say so when a worker is gone
    socket.set_maxmsgsize(2 * HEADER_BYTES_MAX as i64)?;
    socket.set_sndhwm(QUEUE)?;
    socket.set_rcvhwm(UNREAD)?;
    // TCP finds out which peers are gone, so that their queues are freed. Not ZeroMQ's own pings: see section 11.
    socket.set_tcp_keepalive(1)?;
    socket.set_tcp_keepalive_idle(KEEPALIVE_SECONDS)?;
    socket.set_tcp_keepalive_intvl(KEEPALIVE_SECONDS)?;
    socket.set_tcp_keepalive_cnt(2)?;
    let endpoint = place.endpoint();
    socket.set_ipv6(endpoint.contains('['))?;
    socket.monitor(COMERS_AT, zmq::SocketEvent::ACCEPTED.to_raw().into())?;
    let comers = context.socket(zmq::PAIR)?;
    comers.connect(COMERS_AT)?;
    socket.bind(&endpoint)?;
    Ok((context, gate, socket, comers))
}
