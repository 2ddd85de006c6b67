//! The worker's control socket. Only the publisher's (`publisher/router.rs`) uses the `zmq` crate, too, and polling does.
//!
//! The data connection is not libzmq's but our own (`subscription.rs`), which speaks the same
//! protocol and receives faster.

use crate::door::Door;
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::keys::WorkerKeys;
use crate::limits::MESSAGE_BYTES_MAX;
use crate::raw::fork::Libzmqs;
use crate::raw::os::check_descriptors;
use crate::transfer::Time;
use std::convert::TryInto;
use std::io;
use std::time::Duration;

const LINGER_MS: i32 = 200; // what is on its way at the end (a goodbye, an acknowledgement) gets this
const RECONNECT_MS: i32 = 50;
const RECONNECT_MAX_MS: i32 = 1_000;
const CONNECT_MS: i32 = 3_000; // for one attempt: the kernel tries again after 1 s, then after 3 s
const QUEUE: i32 = 32; // messages held before TCP pushes back; bytes count, so it is small

const SOCKETS: usize = 3; // with the one that tells of changes
const CHANGES_AT: &str = "inproc://changes";

/// Of a connection. After an error of ZMTP the last one comes, and then none any more.
const CHANGES: [zmq::SocketEvent; 8] = [
    zmq::SocketEvent::CONNECT_DELAYED,
    zmq::SocketEvent::CONNECT_RETRIED,
    zmq::SocketEvent::CONNECTED,
    zmq::SocketEvent::HANDSHAKE_SUCCEEDED,
    zmq::SocketEvent::HANDSHAKE_FAILED_NO_DETAIL,
    zmq::SocketEvent::HANDSHAKE_FAILED_PROTOCOL,
    zmq::SocketEvent::HANDSHAKE_FAILED_AUTH,
    zmq::SocketEvent::DISCONNECTED,
];

/// A connected DEALER.
pub struct Control {
    socket: zmq::Socket,
    changes: zmq::Socket, // of the other one, which is closed first
    address: String,
    door: Door,
    _libzmqs: Libzmqs, // which goes before the context
    _context: zmq::Context,
}

impl Control {
    /// Connects, with keys to the owner of the publisher's key alone.
    pub fn connect(address: &str, keys: Option<&WorkerKeys>) -> Result<Control, Error> {
        Endpoint::parse(address)?;
        let broken = |error| Error::Io { what: format!("cannot connect to {}", address), error };
        check_descriptors().map_err(broken)?;
        open(address, keys).map_err(|error| broken(io::Error::from_raw_os_error(error.to_raw())))
    }

    /// What to poll: for messages, and also for somebody at the other end.
    pub fn poll_item(&self, writable: bool) -> zmq::PollItem<'_> {
        self.socket.as_poll_item(if writable { zmq::POLLIN | zmq::POLLOUT } else { zmq::POLLIN })
    }

    /// Returns the frames of the next message, if there is one.
    pub fn receive(&self) -> Option<Vec<zmq::Message>> {
        let mut frames = vec![self.socket.recv_msg(zmq::DONTWAIT).ok()?];
        while frames.last().map_or(false, zmq::Message::get_more) {
            frames.push(self.socket.recv_msg(zmq::DONTWAIT).ok()?);
        }
        Some(frames)
    }

    /// Sends to the publisher; lost while nobody is there.
    pub fn send(&self, header: &[u8]) {
        let _ = self.socket.send(header, zmq::DONTWAIT);
    }

    /// Whether anything became of the connection since this was asked last; and why it failed, if that is a matter of
    /// keys.
    ///
    /// Ask often: ZeroMQ stands still while a thousand changes wait here.
    pub fn changed(&mut self, now: Time, patience: Duration) -> (bool, Option<&'static str>) {
        let (mut changed, mut refused) = (false, None);
        while let Ok(told) = self.changes.recv_multipart(zmq::DONTWAIT) {
            changed = true;
            if let Some(Ok([a, b, value @ ..])) =
                told.first().map(|told| TryInto::<[u8; 6]>::try_into(&told[..]))
            {
                let event = zmq::SocketEvent::from_raw(u16::from_ne_bytes([a, b]));
                refused = self.door.why(event, u32::from_ne_bytes(value), now, patience).or(refused);
            }
        }
        (changed, refused)
    }

    /// Makes the connection anew; what waits to be sent on the old one is lost.
    pub fn redial(&self) {
        let _ = self.socket.disconnect(&self.address); // fails if there is none
        let _ = self.socket.connect(&self.address); // only checks the address, which it did before
    }
}

fn open(address: &str, keys: Option<&WorkerKeys>) -> zmq::Result<Control> {
    let ((context, socket, changes), libzmqs) = Libzmqs::of(SOCKETS, || {
        let context = zmq::Context::new();
        let socket = context.socket(zmq::DEALER)?;
        socket.monitor(CHANGES_AT, CHANGES.iter().map(|&change| i32::from(change.to_raw())).sum())?;
        let changes = context.socket(zmq::PAIR)?;
        Ok((context, socket, changes))
    })?;
    socket.set_linger(LINGER_MS)?;
    socket.set_reconnect_ivl(RECONNECT_MS)?;
    socket.set_reconnect_ivl_max(RECONNECT_MAX_MS)?;
    socket.set_connect_timeout(CONNECT_MS)?;
    socket.set_immediate(true)?; // say nothing to nobody: it would pile up
    socket.set_rcvhwm(QUEUE)?;
    socket.set_maxmsgsize(MESSAGE_BYTES_MAX as i64)?;
    socket.set_ipv6(address.contains('['))?;
    if let Some(keys) = keys {
        socket.set_curve_publickey(keys.public.as_bytes())?; // K1
        socket.set_curve_secretkey(keys.secret.as_bytes())?;
        socket.set_curve_serverkey(keys.publisher.as_bytes())?;
    }
    changes.connect(CHANGES_AT)?;
    socket.connect(address)?;
    let door = Door::new(keys.is_some());
    let address = address.to_owned();
    Ok(Control { socket, changes, address, door, _libzmqs: libzmqs, _context: context })
}
