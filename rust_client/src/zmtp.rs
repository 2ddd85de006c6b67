//! The subscriber's side of ZMTP 3 (ZeroMQ RFC 23, NULL security), without sockets.
//!
//! libzmq receives each message into new memory. That costs new pages, a change of thread, and a
//! copy: together, these take longer than the network does. So the worker reads published messages
//! itself, and the kernel copies most bytes of a payload straight to their destination.
//!
//! ```text
//! greeting (64 bytes) ──> READY ──> messages and commands
//!
//! a frame:  ┌───────┬────────────────────┬─ ··· ─┐   flags: 1 more frames follow, 2 the size has 8 bytes,
//!           │ flags │ size, 1 or 8 bytes │ body  │          4 the frame is a command
//!           └───────┴────────────────────┴─ ··· ─┘
//! a message: topic, header, at most one payload
//! ```

use crate::framing::{greeting, pong, COMMAND, GREETING_BYTES, MORE};
use crate::limits::{HEADER_BYTES_MAX, MESSAGE_BYTES_MAX};
use std::collections::{BTreeSet, VecDeque};
use std::convert::TryInto;
use std::fmt;
use std::io::{self, Read};

const LONG: u8 = 2;
const TICKET: u8 = 3; // first byte of a message with a ticket; 0 and 1 end and begin a subscription
const SCRATCH_BYTES: usize = 8192; // read ahead; at most this much of a payload is copied twice
const RECEIVE_BYTES: usize = 1 << 18; // read at once, so that it is in the cache for the checksum
const PAYLOAD_INDEX: usize = 2; // the index of a message's payload, after topic and header
const FRAMES_MAX: usize = 8; // of a message; a later protocol may have more than one payload
const READY: &[u8] = b"\x05READY\x0bSocket-Type\0\0\0\x03SUB\x08Identity\0\0\0\0";

/// Destinations of published payloads.
pub trait Places {
    /// Identifies a place, until the place is used for another payload.
    type Ticket: Copy;

    /// Returns the destination of a payload that is about to be received.
    fn place(&mut self, header: &[u8], size: usize) -> Place<Self::Ticket>;

    /// Returns the unfilled memory of the place; `None` if another payload uses the place now.
    fn unfilled(&mut self, ticket: Self::Ticket) -> Option<&mut [u8]>;

    /// Notes that `count` bytes were received into this place.
    fn received(&mut self, ticket: Self::Ticket, count: usize);

    /// Releases a place whose payload will never be complete.
    fn cancel(&mut self, ticket: Self::Ticket);
}

/// Destination of a payload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Place<T> {
    /// The buffer of a transfer, at the offset of the chunk.
    InBuffer(T),
    /// New memory.
    NewMemory,
    /// No destination: the payload is read and discarded.
    Nowhere,
}

/// A published message.
#[derive(Debug)]
pub struct Published<T> {
    pub header: Vec<u8>,
    /// Number of payload frames.
    pub payload_count: usize,
    pub payload: PublishedPayload<T>,
}

/// The first payload of a published message; further ones are discarded.
#[derive(Debug)]
pub enum PublishedPayload<T> {
    None,
    /// The payload; empty if it was discarded.
    Bytes(Vec<u8>),
    InPlace(T),
}

/// The error for a peer that does not speak ZMTP 3, or breaks its rules: the connection must be
/// closed.
#[derive(Debug)]
pub struct ZmtpError(pub String);

impl fmt::Display for ZmtpError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<ZmtpError> for io::Error {
    fn from(error: ZmtpError) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, error.0)
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Greeting,
    Ready,
    Open,
}

/// A frame that is being received, and is too long for `scratch`.
struct Body<T> {
    flags: u8,
    missing: usize, // bytes still to come
    to: BodyTo<T>,
}

enum BodyTo<T> {
    InBuffer(T),
    NewMemory { bytes: Vec<u8>, filled: usize },
    Nowhere,
}

/// A frame of the message that is arriving.
enum Frame<T> {
    Bytes(Vec<u8>),
    InPlace(T),
}

/// One connection. `T` is the ticket of `Places`.
pub struct Stream<T> {
    /// Bytes to be sent.
    pub outgoing: Vec<u8>,
    /// Number of commands received, each of which may need an answer.
    pub commands: u64,
    /// Complete messages.
    pub arrived: VecDeque<Published<T>>,
    state: State,
    scratch: Box<[u8]>,
    filled: usize,  // bytes in the scratch
    deferred: bool, // a payload in `scratch` waits until earlier messages are handled
    frames: Vec<Frame<T>>,
    body: Option<Body<T>>,
    topics: BTreeSet<String>,
    ticket: String, // to be sent before the subscriptions
}

impl<T: Copy> Stream<T> {
    /// Begins a connection with subscriptions to these topics.
    pub fn new(topics: &BTreeSet<String>) -> Stream<T> {
        Stream {
            outgoing: greeting(false, false),
            commands: 0,
            arrived: VecDeque::new(),
            state: State::Greeting,
            scratch: vec![0; SCRATCH_BYTES].into_boxed_slice(),
            filled: 0,
            deferred: false,
            frames: Vec::new(),
            body: None,
            topics: topics.clone(),
            ticket: String::new(),
        }
    }

    /// Sets a ticket, which is sent before the subscriptions.
    pub fn set_ticket(&mut self, ticket: String) {
        self.ticket = ticket;
    }

    /// True if the handshake is over.
    pub fn is_open(&self) -> bool {
        self.state == State::Open
    }

    /// True if `read` can complete messages without new bytes.
    pub fn is_deferred(&self) -> bool {
        self.deferred
    }

    /// Subscribes to a topic, or unsubscribes.
    pub fn subscribe(&mut self, topic: &str, on: bool) {
        if on {
            self.topics.insert(topic.to_owned());
        } else {
            self.topics.remove(topic);
        }
        if self.state == State::Open {
            self.send_subscription(topic, on);
        }
    }

    fn send_subscription(&mut self, topic: &str, on: bool) {
        let mut body = vec![u8::from(on)];
        body.extend_from_slice(topic.as_bytes());
        self.send(0, &body);
    }

    /// Returns the number of bytes, at least 1, that are missing from the frame being received.
    pub fn missing(&self) -> usize {
        self.body.as_ref().map_or(1, |body| body.missing.max(1))
    }

    /// Reads once; a long payload goes straight to its destination. Returns the number of bytes
    /// read. Complete messages are then in `arrived`: handle them before the next call. After an
    /// error other than `WouldBlock` or `Interrupted`, close the connection.
    pub fn read(&mut self, from: &mut impl Read, places: &mut impl Places<Ticket = T>) -> io::Result<usize> {
        if std::mem::take(&mut self.deferred) {
            self.parse_all(places)?;
        }
        let body = match &mut self.body {
            Some(body) => body,
            None => {
                let count = from.read(&mut self.scratch[self.filled..])?;
                self.filled += count;
                self.parse_all(places)?;
                return Ok(count);
            }
        };
        let count = body.read(from, &mut self.scratch, places)?;
        if body.missing == 0 {
            self.finish_body(places)?;
        }
        Ok(count)
    }

    /// Ends the stream when its connection is lost. Cancels a place that is filled in part.
    pub fn close(&mut self, places: &mut impl Places<Ticket = T>) {
        if let Some(Body { to: BodyTo::InBuffer(ticket), .. }) = self.body.take() {
            places.cancel(ticket);
        }
    }

    // Parsing.

    fn parse_all(&mut self, places: &mut impl Places<Ticket = T>) -> Result<(), ZmtpError> {
        let mut at = 0;
        loop {
            let size = self.parse(at, places)?;
            if size == 0 {
                break;
            }
            at += size;
        }
        self.scratch.copy_within(at..self.filled, 0);
        self.filled -= at;
        Ok(())
    }

    /// Handles the greeting or frame at `at` in the scratch. Returns the number of bytes handled,
    /// or 0 if more bytes are needed.
    fn parse(&mut self, at: usize, places: &mut impl Places<Ticket = T>) -> Result<usize, ZmtpError> {
        let bytes = &self.scratch[at..self.filled];
        if self.state == State::Greeting {
            return self.greet(at);
        }
        let flags = match bytes.first() {
            Some(&flags) if flags > MORE | LONG | COMMAND => {
                return Err(ZmtpError(format!("a frame with flags {:#x}", flags)));
            }
            Some(&flags) => flags,
            None => return Ok(0),
        };
        let head = if flags & LONG != 0 { 9 } else { 2 };
        let size = match (bytes.get(1), bytes.get(1..head).map(TryInto::<[u8; 8]>::try_into)) {
            (_, Some(Ok(size))) => u64::from_be_bytes(size),
            (Some(&size), Some(Err(_))) => u64::from(size),
            _ => return Ok(0),
        };
        let payload = flags & COMMAND == 0 && self.frames.len() >= PAYLOAD_INDEX;
        let bound = if payload { MESSAGE_BYTES_MAX } else { HEADER_BYTES_MAX as u64 };
        if size > bound {
            return Err(ZmtpError(format!("a frame of {} bytes; at most {} are allowed", size, bound)));
        }
        let size = size as usize;
        let available = bytes.len() - head;
        if size <= available {
            let body = bytes[head..head + size].to_vec();
            self.frame(flags, Frame::Bytes(body))?;
            return Ok(head + size);
        }
        if head + size <= SCRATCH_BYTES && !payload {
            return Ok(0);
        }
        if payload && !self.arrived.is_empty() {
            self.deferred = true; // earlier messages may decide where the payload belongs
            return Ok(0);
        }
        self.begin_body(flags, size, payload, places);
        self.take_ahead(at + head, available, places);
        Ok(head + available)
    }

    fn greet(&mut self, at: usize) -> Result<usize, ZmtpError> {
        let bytes = &self.scratch[at..self.filled];
        if bytes.len() < GREETING_BYTES {
            return Ok(0);
        }
        if bytes[0] != 0xff || bytes[9] != 0x7f || bytes[10] < 3 {
            return Err(ZmtpError("the other side does not speak ZMTP 3".to_owned()));
        }
        if &bytes[12..17] != b"NULL\0" {
            let asked = String::from_utf8_lossy(&bytes[12..32]).into_owned();
            return Err(ZmtpError(format!(
                "the other side asks for {} security",
                asked.trim_end_matches('\0')
            )));
        }
        self.state = State::Ready;
        self.send(COMMAND, READY);
        Ok(GREETING_BYTES)
    }

    /// Chooses the destination of a frame of `size` bytes that does not fit into `scratch`.
    fn begin_body(&mut self, flags: u8, size: usize, payload: bool, places: &mut impl Places<Ticket = T>) {
        let place = match self.frames.get(PAYLOAD_INDEX - 1) {
            Some(Frame::Bytes(header)) if self.frames.len() == PAYLOAD_INDEX && payload => {
                places.place(header, size)
            }
            _ if payload => Place::Nowhere,
            _ => Place::NewMemory,
        };
        let to = match place {
            Place::InBuffer(ticket) => BodyTo::InBuffer(ticket),
            Place::NewMemory => BodyTo::NewMemory { bytes: vec![0; size], filled: 0 },
            Place::Nowhere => BodyTo::Nowhere,
        };
        self.body = Some(Body { flags, missing: size, to });
    }

    /// Moves the `count` bytes of a body that were read ahead, from `at` in `scratch` on, to their
    /// destination.
    fn take_ahead(&mut self, at: usize, count: usize, places: &mut impl Places<Ticket = T>) {
        let mut ahead = &self.scratch[at..at + count];
        let mut unused = [0; 0];
        if let Some(body) = &mut self.body {
            while !ahead.is_empty() {
                match body.read(&mut ahead, &mut unused, places) {
                    Ok(count) if count > 0 => {}
                    _ => {
                        body.missing -= ahead.len(); // discarded
                        return;
                    }
                }
            }
        }
    }

    fn finish_body(&mut self, places: &mut impl Places<Ticket = T>) -> Result<(), ZmtpError> {
        let (flags, to) = match self.body.take() {
            Some(body) => (body.flags, body.to),
            None => return Ok(()),
        };
        let frame = match to {
            BodyTo::InBuffer(ticket) if places.unfilled(ticket).is_some() => Frame::InPlace(ticket),
            BodyTo::NewMemory { bytes, .. } => Frame::Bytes(bytes),
            _ => Frame::Bytes(Vec::new()),
        };
        self.frame(flags, frame)
    }

    fn frame(&mut self, flags: u8, frame: Frame<T>) -> Result<(), ZmtpError> {
        if flags & COMMAND != 0 {
            return match frame {
                Frame::Bytes(body) => self.command(&body),
                Frame::InPlace(_) => Ok(()),
            };
        }
        if self.state != State::Open {
            return Err(ZmtpError("a message before READY".to_owned()));
        }
        if self.frames.len() >= FRAMES_MAX {
            return Err(ZmtpError(format!("a message of more than {} frames", FRAMES_MAX)));
        }
        self.frames.push(frame);
        if flags & MORE == 0 {
            let frames = std::mem::take(&mut self.frames);
            self.arrived.push_back(published(frames));
        }
        Ok(())
    }

    fn command(&mut self, body: &[u8]) -> Result<(), ZmtpError> {
        self.commands += 1;
        let size = body.first().map_or(0, |&size| usize::from(size) + 1).min(body.len());
        let (name, rest) = body.split_at(size);
        match name.get(1..).unwrap_or_default() {
            b"READY" if self.state == State::Ready => {
                self.state = State::Open;
                if !self.ticket.is_empty() {
                    let message = [&[TICKET], std::mem::take(&mut self.ticket).as_bytes()].concat();
                    self.send(0, &message); // K7
                }
                for topic in self.topics.clone() {
                    self.send_subscription(&topic, true);
                }
            }
            b"PING" => {
                if let Some(pong) = pong(body) {
                    self.send(COMMAND, &pong);
                }
            }
            b"ERROR" => {
                let text = String::from_utf8_lossy(rest.get(1..).unwrap_or_default()).into_owned();
                return Err(ZmtpError(format!("the other side says: {}", text)));
            }
            _ => {}
        }
        Ok(())
    }

    fn send(&mut self, flags: u8, body: &[u8]) {
        self.outgoing.extend_from_slice(&[flags, body.len() as u8]); // a topic has 132 bytes at most
        self.outgoing.extend_from_slice(body);
    }
}

impl<T: Copy> Body<T> {
    /// Reads once. Discarded bytes are read into `scratch`.
    fn read(
        &mut self,
        from: &mut impl Read,
        scratch: &mut [u8],
        places: &mut impl Places<Ticket = T>,
    ) -> io::Result<usize> {
        let at_once = self.missing.min(RECEIVE_BYTES);
        let count = match &mut self.to {
            BodyTo::InBuffer(ticket) => match places.unfilled(*ticket) {
                Some(unfilled) => {
                    let at_once = at_once.min(unfilled.len());
                    let count = from.read(&mut unfilled[..at_once])?;
                    places.received(*ticket, count);
                    count
                }
                None => {
                    self.to = BodyTo::Nowhere;
                    discard(from, scratch, at_once)?
                }
            },
            BodyTo::NewMemory { bytes, filled } => {
                let count = from.read(&mut bytes[*filled..*filled + at_once])?;
                *filled += count;
                count
            }
            BodyTo::Nowhere => discard(from, scratch, at_once)?,
        };
        self.missing -= count;
        Ok(count)
    }
}

fn discard(from: &mut impl Read, scratch: &mut [u8], count: usize) -> io::Result<usize> {
    let count = count.min(scratch.len());
    from.read(&mut scratch[..count])
}

fn published<T>(frames: Vec<Frame<T>>) -> Published<T> {
    let payload_count = frames.len().saturating_sub(PAYLOAD_INDEX);
    let mut frames = frames.into_iter().skip(1); // no topic: the header names the model, too
    let header = match frames.next() {
        Some(Frame::Bytes(header)) => header,
        _ => Vec::new(),
    };
    let payload = match frames.next() {
        Some(Frame::Bytes(bytes)) => PublishedPayload::Bytes(bytes),
        Some(Frame::InPlace(ticket)) => PublishedPayload::InPlace(ticket),
        None => PublishedPayload::None,
    };
    Published { header, payload_count, payload }
}
