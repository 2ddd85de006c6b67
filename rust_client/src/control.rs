//! The worker's control connection: this crate's own DEALER socket, which dials in the background.
//!
//! libzmq's DEALER accepts a message of any number of frames, and reads further messages while the
//! worker is busy. This socket reads only when the worker has time, and stores no more of a message
//! than a publisher may send. With keys, it uses CURVE and accepts only the pinned key's owner.

use crate::curve::{key_of, Carried, Client, DENIED, FRAME_BYTES};
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::framing::{
    fault, frame, frame_head, greeted, greeting, mechanism, pong, read_head, socket_type, COMMAND,
    GREETING_BYTES, MORE,
};
use crate::handshakes::{Event, HandshakeFailures};
use crate::keys::WorkerKeys;
use crate::limits::{COMMANDS_MAX, HEADER_BYTES_MAX, MESSAGE_BYTES_MAX, UNREAD_BYTES_MAX};
use crate::raw::fork::Own;
use crate::raw::sodium::{Key, Pair};
use crate::subscription::{dial, Dialled};
use crate::transfer::Time;
use crate::waker::Waker;
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::ops::Deref;
use std::os::unix::io::{AsRawFd, RawFd};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

const DIAL: Duration = Duration::from_secs(3); // limit for each IP address; the kernel retries after 1 s
const REDIAL: Duration = Duration::from_millis(50); // pause between two attempts; doubles
const REDIAL_MAX: Duration = Duration::from_secs(1);
const HANDSHAKE: Duration = Duration::from_secs(10); // limit: a busy publisher answers by then
const LINGER: Duration = Duration::from_millis(200); // limit for sending a `bye` when the worker closes
const METADATA: &[u8] = b"\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0";
const FRAMES_MAX: usize = 8; // of a message; a later protocol may have more than one payload
const SCRATCH_BYTES: usize = 8192; // read at once; a longer frame gets its own memory
const RECEIVE_BYTES: usize = 1 << 18; // bytes of such a frame read at once
const TURN_BYTES: usize = 1 << 22; // read before other work continues
const UNSENT_BYTES_MAX: usize = 1 << 20; // if the publisher does not read; more messages are dropped

// Size of a greeting up to its version. The rest of the greeting is sent once the peer's mechanism
// has arrived: if the mechanisms differ, libzmq closes the connection before it sends its own.
const VERSION_BYTES: usize = 12;
const COMMAND_BYTES_MAX: usize = 1024; // in a handshake

/// A frame of a message. A frame that is too large for this worker is empty.
pub enum Frame {
    Plain(Vec<u8>),
    Carried(Carried),
}

impl Deref for Frame {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Frame::Plain(bytes) => bytes,
            Frame::Carried(bytes) => bytes,
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Greeting,
    Handshake,
    Open,
}

/// A frame longer than `SCRATCH_BYTES` that is being received.
struct Body {
    flags: u8,
    missing: usize,
    bytes: Option<Vec<u8>>, // `None` if the frame is too large: then it is skipped
}

/// One connection.
struct Line {
    connection: Own<TcpStream>,
    opened_at: Time,
    state: State,
    scratch: Vec<u8>, // read, but not handled yet
    body: Option<Body>,
    frames: Vec<Frame>, // of a message that is not whole
    arrived: VecDeque<Vec<Frame>>,
    outgoing: Vec<u8>,
    curve: Option<Client>,
    payload_max: usize,
    commands: u32, // ZMTP commands in the last second
    counted_at: Time,
}

/// A control address, with the keys for it and the failed handshakes there.
struct ControlAddress {
    address: String,
    endpoint: Endpoint,
    keys: Option<(Arc<Pair>, Key)>, // this worker's key pair, and the publisher's key
    failures: HandshakeFailures,
}

/// Changes of a control connection.
#[derive(Default)]
pub struct Changes {
    /// True if an attempt to connect began or ended, or the connection changed.
    pub any: bool,
    /// True if the connection ended, or could not be opened.
    pub ended: bool,
    /// Why a handshake failed, if keys are the cause.
    pub refused: Option<&'static str>,
}

/// A DEALER socket that is connected to one publisher, and dials again after a loss.
pub struct Control {
    targets: Vec<ControlAddress>, // at least one
    present: usize,               // index of the target that is dialled
    any_data_host: bool,
    payload_max: usize,
    waker: Arc<Waker>,
    dialled: (Sender<Dialled>, Receiver<Dialled>),
    dialling: bool,
    generation: u64, // number of the last attempt: the results of earlier attempts are dropped
    dial_at: Time,
    pause: Duration,
    line: Option<Line>,
    events: Vec<Event>, // since the last call of `take_changes`
}

impl Control {
    /// Makes a socket that connects to the first of `addresses`. `keys` has the worker's keys for
    /// each address, or one entry for all addresses, or is empty. With keys, the peer must own the
    /// publisher's key. Payloads of more than `payload_max` bytes are skipped.
    pub fn connect(
        addresses: &[String],
        keys: &[WorkerKeys],
        payload_max: u64,
        waker: Arc<Waker>,
    ) -> Result<Control, Error> {
        let read = |keys: &WorkerKeys| {
            let pair = Pair { public: key_of(&keys.public)?, secret: key_of(&keys.secret)? };
            Some((Arc::new(pair), key_of(&keys.publisher)?))
        };
        let invalid = || Error::Keys("a key must be 40 characters of Z85".to_owned());
        let target = |(at, address): (usize, &String)| {
            let endpoint = Endpoint::parse(address)?;
            let keys = keys.get(at).or_else(|| keys.first());
            let keys = keys.map(|keys| read(keys).ok_or_else(invalid)).transpose()?; // K1
            let failures = HandshakeFailures::new(keys.is_some());
            Ok(ControlAddress { address: address.clone(), endpoint, keys, failures })
        };
        let targets =
            addresses.iter().enumerate().map(target).collect::<Result<Vec<ControlAddress>, Error>>()?;

        // An encrypted frame must be read as a whole. It comes from the owner of the pinned key.
        let payload_max = if keys.is_empty() { payload_max } else { MESSAGE_BYTES_MAX };
        Ok(Control::to_targets(targets, payload_max.min(MESSAGE_BYTES_MAX) as usize, waker))
    }

    fn to_targets(targets: Vec<ControlAddress>, payload_max: usize, waker: Arc<Waker>) -> Control {
        Control {
            targets,
            present: 0,
            any_data_host: false,
            payload_max,
            waker,
            dialled: channel(),
            dialling: false,
            generation: 0,
            dial_at: Time::ZERO,
            pause: REDIAL,
            line: None,
            events: Vec::new(),
        }
    }

    /// Makes a socket that connects to a source of the publisher's version, at the address `named`.
    /// With keys, the source must own the publisher's key. Without keys, the source must be where a
    /// data endpoint must be, see `Endpoint::of_data` (N2).
    pub fn to_source(&self, named: &str, waker: Arc<Waker>) -> Result<Control, Error> {
        let publisher = &self.targets[self.present];
        let anywhere = self.any_data_host || publisher.keys.is_some();
        Endpoint::parse(named)?;
        let far = |_| Error::Address {
            address: named.to_owned(),
            text: format!(
                "it is not on the host of the publisher ({}), and there are no keys, so this worker \
                 fetches all chunks from the publisher; use keys, or allow such hosts with any_data_host",
                publisher.address
            ),
        };
        let endpoint = Endpoint::of_data(named, &publisher.address, self.peer_ip(), anywhere).map_err(far)?;
        let (keys, failures) = (publisher.keys.clone(), HandshakeFailures::new(publisher.keys.is_some()));
        let source = ControlAddress { address: named.to_owned(), endpoint, keys, failures };
        Ok(Control::to_targets(vec![source], self.payload_max, waker))
    }

    /// True if this worker has keys for the address that is dialled.
    pub fn is_keyed(&self) -> bool {
        self.targets[self.present].keys.is_some()
    }

    fn peer_ip(&self) -> Option<IpAddr> {
        let peer = self.line.as_ref()?.connection.peer_addr().ok()?;
        Some(peer.ip())
    }

    /// Dials, writes, and ends handshakes that take too long. Returns the descriptor to poll for
    /// input. The bool is true if the descriptor must be polled for output, too.
    pub fn process_events(&mut self, now: Time) -> Option<(RawFd, bool)> {
        while let Ok(dialled) = self.dialled.1.try_recv() {
            self.adopt(dialled, now);
        }
        if self.line.as_ref().map_or(false, |line| line.handshake_timed_out(now)) {
            self.hang_up(Event::BrokenInHandshake);
        }
        if self.line.is_none() {
            self.dial(now);
        } else {
            self.write();
        }
        let line = self.line.as_ref()?;
        Some((line.connection.as_raw_fd(), !line.outgoing.is_empty()))
    }

    /// Sets whether the data endpoint may be on any host (see `Builder::any_data_host`).
    pub fn any_data_host(mut self, on: bool) -> Control {
        self.any_data_host = on;
        self
    }

    /// Returns the data endpoint `named` by the publisher, or an error if this worker must
    /// not connect to it.
    pub fn data_endpoint(&self, named: &str) -> Result<Endpoint, Error> {
        let address = &self.targets[self.present].address;
        Endpoint::of_data(named, address, self.peer_ip(), self.any_data_host)
    }

    /// True if the connection is open, and nothing is unsent.
    pub fn is_open(&self) -> bool {
        self.line.as_ref().map_or(false, |line| line.state == State::Open && line.outgoing.is_empty())
    }

    /// True if a message has been received but not returned yet, so that `poll` need not wait.
    pub fn has_arrived(&self) -> bool {
        self.line.as_ref().map_or(false, |line| !line.arrived.is_empty())
    }

    /// Returns the frames of the next message, if one has arrived. Reads a limited number of bytes.
    pub fn receive(&mut self, now: Time) -> Option<Vec<Frame>> {
        let mut turn = TURN_BYTES;
        loop {
            let line = self.line.as_mut()?;
            if let Some(message) = line.arrived.pop_front() {
                self.pause = REDIAL;
                return Some(message);
            }
            if turn == 0 {
                return None;
            }
            let before = line.state;
            match line.read(now) {
                Ok(count) => turn = turn.saturating_sub(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    let event = line.end_event();
                    self.hang_up(event);
                    return None;
                }
            }
            if before != State::Open && line.state == State::Open {
                self.events.push(Event::HandshakeDone);
            }
            self.write();
        }
    }

    /// Sends a message to the publisher. The message is lost while there is no connection.
    pub fn send(&mut self, header: &[u8]) {
        if let Some(line) = &mut self.line {
            if line.state == State::Open && line.outgoing.len() <= UNSENT_BYTES_MAX {
                line.send_frame(0, header);
                self.write();
            }
        }
    }

    /// True if there are changes that `take_changes` has not returned yet.
    pub fn has_changed(&self) -> bool {
        !self.events.is_empty()
    }

    /// Returns what has changed since the last call. For `patience`, see `HandshakeFailures`.
    pub fn take_changes(&mut self, now: Time, patience: Duration) -> Changes {
        let mut changes = Changes { any: self.has_changed(), ..Changes::default() };
        let failures = &mut self.targets[self.present].failures;
        for event in self.events.drain(..) {
            changes.refused = failures.reason(event, now, patience).or(changes.refused);
            changes.ended |= event.is_end();
        }
        changes
    }

    /// Closes the connection, and dials the address with the index `to` at `dial_at`. Messages that
    /// were sent to the present publisher still arrive there.
    pub fn change_over(&mut self, to: usize, dial_at: Time) {
        if let Some(line) = self.line.take() {
            let thread = thread::Builder::new().name("weightbus-linger".to_owned());
            let _ = thread.spawn(move || line.linger()); // without a thread, a `bye` may be lost
        }
        self.present = to;
        self.generation += 1; // the result of an attempt at the previous address is dropped
        self.dialling = false;
        (self.dial_at, self.pause) = (dial_at, REDIAL);
        self.events.clear();
    }

    /// Returns the endpoint of the first address.
    pub fn first_endpoint(&self) -> &Endpoint {
        &self.targets[0].endpoint
    }

    /// Closes the connection and dials at once. Unsent messages are lost.
    pub fn redial(&mut self) {
        self.line = None;
        self.dial_at = Time::ZERO;
        self.pause = REDIAL;
    }

    /// Starts a thread that connects, if an attempt is due and none is under way.
    fn dial(&mut self, now: Time) {
        if self.dialling || now < self.dial_at {
            return;
        }
        self.dial_at = now + self.pause;
        self.pause = (2 * self.pause).min(REDIAL_MAX);
        self.generation += 1;
        let (endpoint, generation) = (self.targets[self.present].endpoint.clone(), self.generation);
        let (found, waker) = (self.dialled.0.clone(), self.waker.clone());
        let dial = move || {
            let connection = dial(&endpoint, DIAL);
            let _ = found.send(Dialled { generation, connection }); // the receiver may be gone
            waker.wake();
        };
        self.dialling = thread::Builder::new().name("weightbus-dial".to_owned()).spawn(dial).is_ok();
        self.events.push(Event::Dialled);
    }

    /// Handles the result of an attempt to connect.
    fn adopt(&mut self, dialled: Dialled, now: Time) {
        if dialled.generation != self.generation {
            return;
        }
        self.dialling = false;
        match dialled.connection {
            _ if self.line.is_some() => {}
            Ok(connection) => {
                self.events.push(Event::Dialled);
                let keys = self.targets[self.present].keys.as_ref();
                let curve = keys.map(|(own, server)| Client::new(own.clone(), *server));
                self.line = Some(Line::new(connection, curve, self.payload_max, now));
                self.write();
            }
            Err(_) => self.events.push(Event::Unreachable),
        }
    }

    fn write(&mut self) {
        if let Some(line) = &mut self.line {
            if line.write().is_err() {
                let event = line.end_event();
                self.hang_up(event);
            }
        }
    }

    fn hang_up(&mut self, event: Event) {
        self.line = None;
        self.events.push(event);
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        if let Some(line) = self.line.take() {
            line.linger();
        }
    }
}

impl Line {
    fn new(connection: Own<TcpStream>, curve: Option<Client>, payload_max: usize, now: Time) -> Line {
        Line {
            connection,
            opened_at: now,
            state: State::Greeting,
            scratch: Vec::new(),
            body: None,
            frames: Vec::new(),
            arrived: VecDeque::new(),
            outgoing: greeting(curve.is_some(), false)[..VERSION_BYTES].to_vec(),
            curve,
            payload_max,
            commands: 0,
            counted_at: now,
        }
    }

    fn handshake_timed_out(&self, now: Time) -> bool {
        self.state != State::Open && now.saturating_sub(self.opened_at) >= HANDSHAKE
    }

    /// Returns the event to report if this connection ends now.
    fn end_event(&self) -> Event {
        match self.state {
            State::Greeting if matches!(greeted(&self.scratch), Ok(Some(_))) => Event::OtherMechanism,
            State::Handshake
                if self.scratch.get(2..).map_or(false, |command| command.starts_with(DENIED)) =>
            {
                Event::Denied
            }
            State::Open => Event::Broken,
            _ => Event::BrokenInHandshake,
        }
    }

    /// Sends the unsent messages, and waits a moment for the peer to close: a close with unread
    /// input would discard messages that were sent.
    fn linger(mut self) {
        let end = Instant::now() + LINGER;
        let mut ended = false;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || self.state != State::Open || self.write().is_err() {
                return;
            }
            if self.outgoing.is_empty() && !std::mem::replace(&mut ended, true) {
                let _ = self.connection.shutdown(Shutdown::Write); // fails on a closed connection
            }
            match self.connection.read(&mut [0; SCRATCH_BYTES]) {
                Ok(0) => return,
                Ok(_) => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
            let events = if ended { zmq::POLLIN } else { zmq::POLLIN | zmq::POLLOUT };
            let mut items = [zmq::PollItem::from_fd(self.connection.as_raw_fd(), events)];
            if zmq::poll(&mut items, left.as_millis() as i64 + 1).is_err() {
                return;
            }
        }
    }

    fn write(&mut self) -> io::Result<()> {
        while !self.outgoing.is_empty() {
            match self.connection.write(&self.outgoing) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => drop(self.outgoing.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn send_frame(&mut self, flags: u8, body: &[u8]) {
        match &mut self.curve {
            None => frame(&mut self.outgoing, flags, body),
            Some(curve) => {
                // sent as an ordinary frame, as libzmq does
                frame_head(&mut self.outgoing, 0, body.len() + FRAME_BYTES);
                curve.session().carry(flags, &[body], &mut self.outgoing);
            }
        }
    }

    /// Reads once, and puts complete messages into `arrived`. Returns the number of bytes read.
    fn read(&mut self, now: Time) -> io::Result<usize> {
        let count = match &mut self.body {
            None => {
                let mut bytes = [0; SCRATCH_BYTES];
                let count = self.connection.read(&mut bytes)?;
                self.scratch.extend_from_slice(&bytes[..count]);
                self.parse_all(now)?;
                count
            }
            Some(body) => {
                let count = body.read(&mut *self.connection)?;
                if body.missing == 0 {
                    let (flags, bytes) = (body.flags, body.bytes.take().unwrap_or_default());
                    self.body = None;
                    self.frame(flags, bytes, now)?;
                }
                count
            }
        };
        if count == 0 {
            return fault("the publisher has closed the connection");
        }
        Ok(count)
    }

    fn parse_all(&mut self, now: Time) -> io::Result<()> {
        let scratch = std::mem::take(&mut self.scratch);
        let mut at = 0;
        let result = loop {
            match self.parse(&scratch[at..], now) {
                Ok(0) => break Ok(()),
                Ok(size) => at += size,
                Err(error) => break Err(error),
            }
        };
        // after an error, `end_event` reads the peer's greeting or error command from `scratch`
        self.scratch = scratch[at..].to_vec();
        result
    }

    /// Handles the greeting, command or frame at the beginning of `bytes`. Returns the number of
    /// bytes handled, or 0 if more bytes are needed.
    fn parse(&mut self, bytes: &[u8], now: Time) -> io::Result<usize> {
        if self.state == State::Greeting {
            return self.greet(bytes);
        }
        let open = self.state == State::Open;
        let size_max = match (open, &self.curve) {
            (false, _) => COMMAND_BYTES_MAX,
            (true, Some(_)) => self.payload_max.max(HEADER_BYTES_MAX) + FRAME_BYTES,
            (true, None) if self.frames.is_empty() => HEADER_BYTES_MAX,
            (true, None) => MESSAGE_BYTES_MAX as usize,
        };
        let found = match read_head(bytes, size_max)? {
            Some(found) => found,
            None => return Ok(0),
        };
        let rest = &bytes[found.head..];
        if let Some(body) = rest.get(..found.size) {
            if !open {
                self.shake_hands(found.flags, body)?;
            } else {
                self.frame(found.flags, body.to_vec(), now)?;
            }
            return Ok(found.head + found.size);
        }
        if found.head + found.size <= SCRATCH_BYTES || !open {
            return Ok(0);
        }
        let wanted = self.curve.is_some() || found.size <= self.payload_max.max(HEADER_BYTES_MAX);
        let body = wanted.then(|| {
            let mut body = Vec::with_capacity(found.size);
            body.extend_from_slice(rest);
            body
        });
        self.body = Some(Body { flags: found.flags, missing: found.size - rest.len(), bytes: body });
        Ok(bytes.len())
    }

    /// Handles a greeting. Returns the number of bytes handled, or 0 if more bytes are needed.
    fn greet(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let peer_mechanism = match greeted(bytes)? {
            Some(peer_mechanism) => peer_mechanism,
            None => return Ok(0),
        };
        if peer_mechanism != mechanism(self.curve.is_some()) {
            return fault("only one of the two sides has keys");
        }
        self.state = State::Handshake;
        self.outgoing.extend_from_slice(&greeting(self.curve.is_some(), false)[VERSION_BYTES..]);
        let command = match &mut self.curve {
            None => [b"\x05READY", METADATA].concat(),
            Some(curve) => curve.hello()?,
        };
        frame(&mut self.outgoing, COMMAND, &command);
        Ok(GREETING_BYTES)
    }

    fn shake_hands(&mut self, flags: u8, body: &[u8]) -> io::Result<()> {
        if flags & COMMAND == 0 {
            return fault("a message before the handshake was over");
        }
        let metadata = match (&mut self.curve, body.strip_prefix(b"\x05READY")) {
            (None, Some(metadata)) => metadata.to_vec(),
            (Some(curve), Some(ready)) => curve.ready(ready)?,
            (Some(curve), None) => match body.strip_prefix(b"\x07WELCOME") {
                Some(welcome) => {
                    let initiate = curve.initiate(welcome, METADATA)?;
                    frame(&mut self.outgoing, COMMAND, &initiate);
                    return Ok(());
                }
                None => return fault("a command that has no place in a handshake"),
            },
            (None, None) => return fault("a command that has no place in a handshake"),
        };
        match socket_type(&metadata) {
            Some(b"ROUTER" | b"DEALER" | b"REP") => {
                self.state = State::Open;
                Ok(())
            }
            _ => fault("the other side is no ROUTER socket: is this the address of the data?"),
        }
    }

    /// Handles a complete frame.
    fn frame(&mut self, flags: u8, bytes: Vec<u8>, now: Time) -> io::Result<()> {
        let (flags, frame) = match &mut self.curve {
            None => (flags, Frame::Plain(bytes)),
            Some(_) if flags & MORE != 0 => return fault("a CURVE message of several ZMTP frames"),
            Some(curve) => {
                curve.session().carried(&bytes).map(|(flags, body)| (flags, Frame::Carried(body)))?
            }
        };
        if flags & COMMAND != 0 {
            return self.command(&frame, now);
        }
        if self.frames.len() >= FRAMES_MAX {
            return fault("a message of too many frames");
        }
        if self.frames.is_empty() && frame.len() > HEADER_BYTES_MAX {
            return fault("a header that is too long");
        }
        let payload: usize = self.frames.iter().skip(1).map(|frame| frame.len()).sum();
        if payload + frame.len() > self.payload_max.max(HEADER_BYTES_MAX) {
            return fault("a message that is too long for this worker");
        }
        self.frames.push(frame);
        if flags & MORE == 0 {
            self.arrived.push_back(std::mem::take(&mut self.frames));
        }
        Ok(())
    }

    fn command(&mut self, body: &[u8], now: Time) -> io::Result<()> {
        if now.saturating_sub(self.counted_at) >= Duration::from_secs(1) {
            (self.commands, self.counted_at) = (0, now);
        }
        self.commands += 1;
        if self.commands > COMMANDS_MAX || body.starts_with(b"\x05ERROR") {
            return fault("too many commands, or an ERROR command");
        }
        if let Some(pong) = pong(body) {
            self.send_frame(COMMAND, &pong);
        }
        if self.outgoing.len() > UNREAD_BYTES_MAX + UNSENT_BYTES_MAX {
            return fault("the publisher does not read the answers to its pings");
        }
        Ok(())
    }
}

impl Body {
    /// Reads once. The bytes of a frame that is not skipped go straight into the frame's memory.
    fn read(&mut self, from: &mut impl Read) -> io::Result<usize> {
        let count = match &mut self.bytes {
            None => {
                let mut bytes = [0; SCRATCH_BYTES];
                let most = self.missing.min(bytes.len());
                from.read(&mut bytes[..most])?
            }
            Some(bytes) => {
                let before = bytes.len();
                let done = from.take(self.missing.min(RECEIVE_BYTES) as u64).read_to_end(bytes);
                match (bytes.len() - before, done) {
                    (0, Err(error)) => return Err(error),
                    (count, _) => count, // even if the read ended with an error
                }
            }
        };
        self.missing -= count;
        Ok(count)
    }
}
