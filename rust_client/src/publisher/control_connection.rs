//! One control connection at the publisher: the server's side of ZMTP 3 between ROUTER and DEALER,
//! without keys or with CURVE.
//!
//! ```text
//! greeting ──> handshake ──> open       must be reached in time; invalid input closes the connection
//!     └────────────┴──> refused         until that time, the peer can read the reason
//! ```
//!
//! A peer that does not speak ZMTP 3 (a browser, a probe, an older ZeroMQ) is disconnected at the first
//! wrong byte of its greeting.

use super::curve::{Answer, Curve};
use super::effects::Payload;
use super::pipe::{HasPipe, Pipe, Sending, Tail};
use super::rate_limits::{Rate, TokenBucket};
use crate::curve::FRAME_BYTES;
use crate::framing::{
    fault, frame, frame_head, greeted, greeting, mechanism, pong, read_head, socket_type, COMMAND,
    GREETING_BYTES, MORE,
};
use crate::limits::{CONTROL_BYTES_MAX, UNREAD_BYTES_MAX};
use crate::raw::fork::Own;
use crate::raw::sodium::{Key, Pair};
use crate::transfer::Time;
use std::collections::VecDeque;
use std::io::{self, Read};
use std::net::{Shutdown, TcpStream};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

const METADATA: &[u8] = b"\x0bSocket-Type\0\0\0\x06ROUTER\x08Identity\0\0\0\0";
const COMMAND_BYTES_MAX: usize = 1024; // of a handshake command; the longest, INITIATE, needs 300
const FRAMES_MAX: usize = 8; // of a message; workers send one, later versions of the protocol may send more
const READ_BYTES: usize = 8192; // read from one connection before the next is served
const QUEUE_MAX: usize = 80; // messages for a worker, which may request 64 chunks at once
const HEADERS_BYTES_MAX: usize = 1 << 20; // of all headers queued for one worker
const QUEUED_LAYOUT_BYTES_MAX: usize = 1 << 23; // of all layouts queued for one worker; a single layout may be larger
const COMMAND_RATE: Rate = Rate(64.0, 32.0); // ZMTP commands: libzmq sends one ping a second

/// Returns true if the owner of this public key may connect.
pub type Admits<'a> = &'a dyn Fn(&str) -> bool;

/// A message of a worker: its header, and the number of frames that follow.
#[derive(Debug, PartialEq)]
pub struct Message {
    pub header: Vec<u8>,
    pub payload_count: usize,
}

/// The progress of a connection, in ascending order. If there are too many connections, those with
/// the least progress are closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Progress {
    /// The peer is refused: the reason is sent, then the connection is closed.
    Refused,
    Silent,
    Greeted,
    /// The peer has proved that it knows the publisher's public key.
    KnowsKey,
    /// The handshake is complete.
    Open,
    /// The peer has sent a message.
    SentMessage,
}

struct QueuedMessage {
    header: Vec<u8>,
    tail: Tail,
}

/// The publisher's side of one control connection.
pub struct ControlConnection {
    pipe: Pipe,
    /// The public key of the peer; empty without keys.
    pub key: String,
    pub progress: Progress,
    pub since: Time,
    curve: Option<(Curve, Arc<Pair>)>,
    received: Vec<u8>,
    message: Option<Message>, // the received part of an incomplete message
    message_bytes: usize,
    handshake_bytes: Vec<u8>, // unsent greeting and handshake commands
    pongs: VecDeque<Vec<u8>>, // answers to pings, sent only between messages
    pong_bytes: usize,
    queue: VecDeque<QueuedMessage>,
    header_bytes: usize, // of the queued headers
    layout_bytes: usize, // of the queued layouts
    /// True if the next payload waits until there is room for its encrypted copy.
    pub starved: bool,
    command_bucket: TokenBucket,
}

impl HasPipe for ControlConnection {
    fn pipe(&mut self) -> &mut Pipe {
        &mut self.pipe
    }
}

impl ControlConnection {
    /// Returns a connection on which nothing was sent yet. `keys` is the publisher's key pair.
    pub fn new(connection: Own<TcpStream>, keys: Option<Arc<Pair>>, now: Time) -> ControlConnection {
        ControlConnection {
            pipe: Pipe::new(connection, now),
            key: String::new(),
            progress: Progress::Silent,
            since: now,
            received: Vec::new(),
            message: None,
            message_bytes: 0,
            handshake_bytes: greeting(keys.is_some(), true),
            curve: keys.map(|keys| (Curve::new(), keys)),
            pongs: VecDeque::new(),
            pong_bytes: 0,
            queue: VecDeque::new(),
            header_bytes: 0,
            layout_bytes: 0,
            starved: false,
            command_bucket: TokenBucket::new(now),
        }
    }

    /// True if something can be sent as soon as the kernel has room. False for messages that wait for
    /// room for an encrypted copy.
    pub fn has_unsent(&self) -> bool {
        !self.pipe.is_idle()
            || !self.handshake_bytes.is_empty()
            || !self.pongs.is_empty()
            || (!self.queue.is_empty() && !self.starved)
    }

    /// Returns the number of bytes that an incomplete message takes in memory.
    pub fn partial_bytes(&self) -> usize {
        self.received.len() + self.message.as_ref().map_or(0, |message| message.header.len())
    }

    /// Returns the number of queued bytes that only this connection needs: not those of versions.
    pub fn queued_bytes(&self) -> usize {
        self.pong_bytes + self.header_bytes + self.layout_bytes
    }

    // Sending.

    /// Sends a message, or queues the message behind earlier ones. Drops the message if too much is
    /// queued, or if the handshake is not complete; the worker repeats its request. `room` is the number
    /// of bytes that encrypted copies of payloads may still use.
    pub fn put(&mut self, header: &[u8], payload: &Payload, room: usize, now: Time) -> io::Result<()> {
        if self.progress < Progress::Open {
            return Ok(());
        }
        let tail = Tail::of(payload);
        let owned = tail.owned_bytes();
        let fits = self.queue.len() < QUEUE_MAX
            && self.header_bytes + header.len() <= HEADERS_BYTES_MAX
            && (self.layout_bytes == 0 || self.layout_bytes + owned <= QUEUED_LAYOUT_BYTES_MAX);
        if !fits {
            return Ok(());
        }
        let idle = !self.has_unsent();
        self.header_bytes += header.len();
        self.layout_bytes += owned;
        self.queue.push_back(QueuedMessage { header: header.to_vec(), tail });
        if idle {
            self.write(room, now)
        } else {
            Ok(())
        }
    }

    /// Sends until the kernel accepts no more bytes, or this connection's share of the time is used up.
    /// `room` is the number of bytes that encrypted copies of payloads may still use.
    pub fn write(&mut self, room: usize, now: Time) -> io::Result<()> {
        self.starved = false;
        let ControlConnection { pipe, curve, handshake_bytes, pongs, queue, starved, .. } = self;
        let (pong_bytes, header_bytes, layout_bytes) =
            (&mut self.pong_bytes, &mut self.header_bytes, &mut self.layout_bytes);
        pipe.write(now, || {
            if !handshake_bytes.is_empty() {
                return Sending::Owned(std::mem::take(handshake_bytes));
            }
            if !pongs.is_empty() {
                *pong_bytes = 0;
                let mut frames = Vec::new();
                pongs.drain(..).for_each(|pong| append_frame(curve, COMMAND, &[&pong], &mut frames));
                return Sending::Owned(frames);
            }
            while let Some(QueuedMessage { header, tail }) = queue.pop_front() {
                let uncount = |layouts: &mut usize, headers: &mut usize| {
                    *layouts -= tail.owned_bytes();
                    *headers -= header.len();
                };
                let piece = match tail.piece() {
                    Some(piece) => piece,
                    None => {
                        uncount(layout_bytes, header_bytes); // the version was released
                        continue;
                    }
                };
                let bytes = piece.as_ref().map_or(&[][..], |(piece, index)| piece.piece(*index));
                if curve.is_some() && bytes.len() > room {
                    *starved = true;
                    queue.push_front(QueuedMessage { header, tail });
                    return Sending::Nothing;
                }
                uncount(layout_bytes, header_bytes);
                let more = if piece.is_some() { MORE } else { 0 };
                let mut heads = Vec::with_capacity(header.len() + 64);
                append_frame(curve, more, &[&header], &mut heads);
                return match piece {
                    None => Sending::Owned(heads),
                    Some(_) if curve.is_some() => {
                        heads.reserve(bytes.len() + FRAME_BYTES + 9);
                        append_frame(curve, 0, &[bytes], &mut heads);
                        Sending::Owned(heads)
                    }
                    Some((piece, index)) => {
                        frame_head(&mut heads, 0, piece.piece(index).len());
                        Sending::Message(Arc::new(heads), Some((piece, index)))
                    }
                };
            }
            Sending::Nothing
        })?;
        if self.progress == Progress::Refused && !self.has_unsent() {
            let _ = self.pipe.connection.shutdown(Shutdown::Write); // an error means that the peer is gone
        }
        Ok(())
    }

    // Receiving.

    /// Reads from the connection once. Returns the messages that are now complete.
    pub fn read(&mut self, admits: Admits, now: Time) -> io::Result<Vec<Message>> {
        let mut bytes = [0; READ_BYTES];
        let count = match self.pipe.connection.read(&mut bytes) {
            Ok(0) => return fault("the other side has closed the connection"),
            Ok(count) => count,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                return Ok(Vec::new());
            }
            Err(error) => return Err(error),
        };
        self.pipe.alive_at = now;
        let mut messages = Vec::new();
        if self.progress == Progress::Refused {
            // The bytes are read and ignored: closing with unread bytes would reset the connection, and
            // the peer would not get the reason.
            return Ok(messages);
        }
        self.received.extend_from_slice(&bytes[..count]);
        let mut at = 0;
        loop {
            match self.parse(at, admits, &mut messages, now)? {
                0 => break,
                size => at += size,
            }
        }
        if at == self.received.len() || self.progress == Progress::Refused {
            self.received = Vec::new(); // so that thousands of idle connections keep no buffers
        } else {
            self.received.drain(..at);
        }
        Ok(messages)
    }

    /// Parses the greeting or frame at offset `at` of the received bytes. Returns its size; 0 if it
    /// is incomplete.
    fn parse(
        &mut self,
        at: usize,
        admits: Admits,
        messages: &mut Vec<Message>,
        now: Time,
    ) -> io::Result<usize> {
        match self.progress {
            Progress::Refused => return Ok(0),
            Progress::Silent => return self.parse_greeting(at),
            _ => {}
        }
        let open = self.progress >= Progress::Open;
        let size_max = match (open, &self.curve) {
            (false, _) => COMMAND_BYTES_MAX,
            (true, None) => CONTROL_BYTES_MAX,
            (true, Some(_)) => CONTROL_BYTES_MAX + FRAME_BYTES,
        };
        let bytes = &self.received[at..];
        let found = match read_head(bytes, size_max)? {
            Some(found) => found,
            None => return Ok(0),
        };
        let end = found.head + found.size;
        let body = match bytes.get(found.head..end) {
            Some(body) => body,
            None => return Ok(0),
        };
        if !open {
            if found.flags & COMMAND == 0 {
                return fault("a message before the handshake was over");
            }
            let command = body.to_vec();
            self.handle_handshake_command(&command, admits)?;
            return Ok(end);
        }
        let (flags, body) = match &mut self.curve {
            None => (found.flags, body.to_vec()),
            Some(_) if found.flags & MORE != 0 => return fault("a CURVE message of several ZMTP frames"),
            Some((curve, _)) => curve.session().carried(body).map(|(flags, body)| (flags, body.to_vec()))?,
        };
        if flags & COMMAND != 0 {
            self.handle_command(&body, now)?;
        } else {
            self.add_frame(flags, body, messages)?;
        }
        Ok(end)
    }

    /// Parses the greeting at offset `at`. Returns its size, or 0 if the greeting is incomplete. Fails
    /// at the first byte that is not of ZMTP 3.
    fn parse_greeting(&mut self, at: usize) -> io::Result<usize> {
        let peer_mechanism = match greeted(&self.received[at..])? {
            Some(mechanism) => mechanism,
            None => return Ok(0),
        };
        if peer_mechanism != mechanism(self.curve.is_some()) {
            self.progress = Progress::Refused; // our greeting, with our mechanism, tells the peer why
            return Ok(GREETING_BYTES);
        }
        self.progress = Progress::Greeted;
        if self.curve.is_none() {
            let ready = [b"\x05READY", METADATA].concat();
            frame(&mut self.handshake_bytes, COMMAND, &ready);
        }
        Ok(GREETING_BYTES)
    }

    fn handle_handshake_command(&mut self, command: &[u8], admits: Admits) -> io::Result<()> {
        let (curve, own) = match &mut self.curve {
            Some((curve, own)) => (curve, own.clone()),
            None => {
                return match command.strip_prefix(b"\x05READY") {
                    Some(metadata) => self.finish_handshake(metadata),
                    None => fault("a command that has no place in a handshake"),
                };
            }
        };
        match curve.handle(&own, command)? {
            Answer::Command(answer) => {
                self.progress = Progress::KnowsKey;
                frame(&mut self.handshake_bytes, COMMAND, &answer);
                Ok(())
            }
            Answer::Initiated(key, metadata) => self.admit_owner(&key, &metadata, admits),
        }
    }

    /// Admits or refuses the peer that has proved that it owns this key.
    fn admit_owner(&mut self, key: &Key, metadata: &[u8], admits: Admits) -> io::Result<()> {
        let key = zmq::z85_encode(key).ok().filter(|key| admits(key));
        match (key, &mut self.curve) {
            (Some(key), Some((curve, _))) => {
                let ready = curve.ready(METADATA);
                frame(&mut self.handshake_bytes, COMMAND, &ready);
                self.key = key;
                self.finish_handshake(metadata)
            }
            _ => {
                frame(&mut self.handshake_bytes, COMMAND, Curve::denied());
                self.progress = Progress::Refused; // K2
                Ok(())
            }
        }
    }

    /// Completes the handshake. Ignores the identity in the peer's metadata: the publisher numbers its
    /// connections, so that no peer can claim the identity of another.
    fn finish_handshake(&mut self, metadata: &[u8]) -> io::Result<()> {
        match socket_type(metadata) {
            Some(b"DEALER" | b"REQ" | b"ROUTER") => {
                self.progress = Progress::Open;
                Ok(())
            }
            _ => fault("a socket type that cannot connect to a ROUTER"),
        }
    }

    fn handle_command(&mut self, body: &[u8], now: Time) -> io::Result<()> {
        if !self.command_bucket.take(1.0, COMMAND_RATE, now) {
            return fault("more ZMTP commands than the rate limit allows");
        }
        if body.starts_with(b"\x05ERROR") {
            return fault("the peer sent ERROR");
        }
        if let Some(pong) = pong(body) {
            self.pong_bytes += pong.len() + FRAME_BYTES;
            self.pongs.push_back(pong);
        }
        if self.pong_bytes > UNREAD_BYTES_MAX {
            return fault("it reads none of the answers to its pings");
        }
        Ok(())
    }

    /// Adds a frame to the incomplete message. Moves the message to `messages` if this is its last frame.
    fn add_frame(&mut self, flags: u8, body: Vec<u8>, messages: &mut Vec<Message>) -> io::Result<()> {
        self.message_bytes += body.len();
        if self.message_bytes > CONTROL_BYTES_MAX {
            return fault(&format!("a message of more than {} bytes", CONTROL_BYTES_MAX));
        }
        match &mut self.message {
            None => self.message = Some(Message { header: body, payload_count: 0 }),
            Some(message) if message.payload_count + 1 < FRAMES_MAX => message.payload_count += 1,
            Some(_) => return fault("a message of too many frames"),
        }
        if flags & MORE == 0 {
            messages.extend(self.message.take());
            self.message_bytes = 0;
            self.progress = Progress::SentMessage;
        }
        Ok(())
    }
}

impl Deref for ControlConnection {
    type Target = Pipe;

    fn deref(&self) -> &Pipe {
        &self.pipe
    }
}

impl DerefMut for ControlConnection {
    fn deref_mut(&mut self) -> &mut Pipe {
        &mut self.pipe
    }
}

/// Appends a frame to `to`; encrypts the frame if the connection has keys.
fn append_frame(curve: &mut Option<(Curve, Arc<Pair>)>, flags: u8, body: &[&[u8]], to: &mut Vec<u8>) {
    let size = body.iter().map(|part| part.len()).sum::<usize>();
    match curve {
        None => {
            frame_head(to, flags, size);
            body.iter().for_each(|part| to.extend_from_slice(part));
        }
        Some((curve, _)) => {
            frame_head(to, 0, size + FRAME_BYTES); // without flags: the body has them
            curve.session().carry(flags, body, to);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::content::{Content, Copier, TensorView};
    use super::super::pipe::{release_versions, COPIES_BYTES_MAX, HOLD};
    use super::*;
    use crate::dtype::Dtype;
    use crate::limits::HEADER_BYTES_MAX;
    use std::io::Write;
    use std::os::unix::io::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    const NOW: Time = Duration::from_secs(1);
    const ANSWER: usize = GREETING_BYTES + 2 + 6 + METADATA.len(); // greeting and READY

    fn pair(keys: Option<Arc<Pair>>) -> (ControlConnection, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        (ControlConnection::new(Own::new(OwnedFd::from(ours).into()), keys, NOW), theirs)
    }

    fn greets(mechanism: &[u8]) -> Vec<u8> {
        let mut bytes = greeting(false, false);
        bytes[12..12 + mechanism.len()].copy_from_slice(mechanism);
        bytes
    }

    fn dealer() -> Vec<u8> {
        let mut bytes = greets(b"NULL");
        frame(&mut bytes, COMMAND, b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\x05other");
        bytes
    }

    /// Reads everything that has arrived.
    fn heard(connection: &mut ControlConnection) -> io::Result<Vec<Message>> {
        let mut all = Vec::new();
        for _ in 0..64 {
            all.extend(connection.read(&|_| false, NOW)?);
        }
        Ok(all)
    }

    fn met() -> (ControlConnection, UnixStream) {
        let (mut connection, mut theirs) = pair(None);
        theirs.write_all(&dealer()).unwrap();
        assert_eq!(heard(&mut connection).unwrap(), []);
        assert_eq!(connection.progress, Progress::Open);
        connection.write(0, NOW).unwrap();
        theirs.read_exact(&mut [0; ANSWER]).unwrap();
        (connection, theirs)
    }

    fn content(nbytes: usize) -> Arc<Content> {
        let bytes = vec![5; nbytes];
        let tensor = TensorView { name: "w", dtype: Dtype::U8, shape: &[nbytes as u64], bytes: &bytes };
        Arc::new(Copier::default().copy(&[tensor], 1 << 26).unwrap())
    }

    #[test]
    fn messages_come_and_go() {
        let (mut connection, mut theirs) = met();
        theirs.write_all(b"\0\x02{}\x01\x02{}\x01\x01a\0\0").unwrap();
        let message = |payload_count| Message { header: b"{}".to_vec(), payload_count };
        assert_eq!(heard(&mut connection).unwrap(), [message(0), message(2)]);
        let content = content(3);
        connection.put(b"{1}", &Payload::None, 0, NOW).unwrap();
        connection.put(b"{2}", &Payload::Chunk(content, 0), 0, NOW).unwrap();
        let mut bytes = [0; 15];
        theirs.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"\0\x03{1}\x01\x03{2}\0\x03\x05\x05\x05");
        assert!(!connection.has_unsent() && connection.queued_bytes() == 0);
    }

    #[test]
    fn who_speaks_otherwise_is_hung_up_on_at_the_first_wrong_byte() {
        let old = |version: &[u8]| [b"\xff\0\0\0\0\0\0\0\x01\x7f", version].concat();
        for first in [
            &b"G"[..],
            b"\x16\x03\x01",
            b"\x01\0",
            b"\xff\0\0\0\0\0\0\0\x01\x7e",
            &old(&[0]),
            &old(&[1, 4]),
            &old(&[2]),
        ] {
            let (mut connection, mut theirs) = pair(None);
            theirs.write_all(first).unwrap();
            assert!(heard(&mut connection).is_err(), "{:?}", first);
        }
        for (mechanism, keyed) in
            [(&b"PLAIN"[..], false), (b"CURVE", false), (b"NULLX", false), (b"NULL", true)]
        {
            let keys = keyed.then(|| Arc::new(Pair { public: [0; 32], secret: [0; 32] }));
            let (mut connection, mut theirs) = pair(keys);
            theirs.write_all(&greets(mechanism)).unwrap();
            theirs.write_all(b"what is of no use any more").unwrap();
            assert_eq!(heard(&mut connection).unwrap(), []);
            connection.write(0, NOW).unwrap();
            let mut all = Vec::new();
            theirs.read_to_end(&mut all).unwrap(); // then the connection ends
            assert_eq!((all.len(), connection.progress), (GREETING_BYTES, Progress::Refused));
        }
    }

    #[test]
    fn what_no_dealer_says_ends_the_connection() {
        let framed = |flags, body: &[u8]| {
            let mut bytes = Vec::new();
            frame(&mut bytes, flags, body);
            bytes
        };
        let before = |bytes: Vec<u8>| [greets(b"NULL"), bytes].concat();
        let after = |bytes: Vec<u8>| [dealer(), bytes].concat();
        for (at, bytes) in [
            before(framed(0, b"{}")),
            before(framed(COMMAND, b"\x05READY\x0bSocket-Type\0\0\0\x03SUB")),
            before(framed(COMMAND, b"\x05READY\x0bSocket-Type\0\0\0\xff")),
            before(framed(COMMAND, b"\x05READY")),
            before(framed(COMMAND, &[7; COMMAND_BYTES_MAX + 1])),
            after(vec![8]),
            after(framed(COMMAND | MORE, b"\x04PING\0\0")),
            after(framed(COMMAND, b"\x05ERROR\0")),
            after(b"\x02\xff\xff\xff\xff\xff\xff\xff\xff".to_vec()),
            after(framed(MORE, b"").repeat(FRAMES_MAX + 1)),
            after(framed(MORE, &[b' '; HEADER_BYTES_MAX]).repeat(3)),
            after(framed(COMMAND, b"\x04PING\0\0context").repeat(65)),
        ]
        .iter()
        .enumerate()
        {
            let (mut connection, theirs) = pair(None);
            let mut writer = theirs.try_clone().unwrap();
            let bytes = bytes.clone();
            let written = std::thread::spawn(move || drop(writer.write_all(&bytes)));
            let ended = (0..1000).any(|_| {
                std::thread::yield_now();
                heard(&mut connection).is_err()
            });
            assert!(ended, "{}", at);
            drop((connection, theirs));
            written.join().unwrap();
        }
    }

    #[test]
    fn a_ping_is_answered_between_messages_with_no_more_than_its_context() {
        let (mut connection, mut theirs) = met();
        theirs.write_all(b"\x04\x18\x04PING\0\x090123456789abcdefX").unwrap();
        assert_eq!(heard(&mut connection).unwrap(), []);
        connection.write(0, NOW).unwrap();
        let mut pong = [0; 23];
        theirs.read_exact(&mut pong).unwrap();
        assert_eq!(&pong, b"\x04\x15\x04PONG0123456789abcdef");
    }

    #[test]
    fn who_reads_nothing_holds_no_version_and_little_else() {
        let (mut connection, _theirs) = met();
        let mut versions = Vec::new();
        for _ in 0..3 * QUEUE_MAX {
            let version = content(1 << 20);
            versions.push(Arc::downgrade(&version));
            connection.put(b"{}", &Payload::Chunk(version, 0), COPIES_BYTES_MAX, NOW).unwrap();
        }
        assert_eq!(
            versions.iter().filter(|version| version.upgrade().is_some()).count(),
            1,
            "half of it is sent"
        );
        assert!(
            release_versions(std::iter::once((7, &mut connection)), COPIES_BYTES_MAX, NOW + HOLD).is_empty()
        );
        assert!(versions.iter().all(|version| version.upgrade().is_none()));
        assert!(connection.queue.len() <= QUEUE_MAX && connection.copy_bytes() <= 1 << 20);
        for _ in 0..QUEUE_MAX {
            connection.put(&[b' '; HEADER_BYTES_MAX], &Payload::None, 0, NOW).unwrap();
        }
        assert!(connection.queued_bytes() <= HEADERS_BYTES_MAX);
    }

    #[cfg(feature = "keys")]
    mod keyed {
        use super::*;
        use crate::curve::Client;
        use crate::raw::sodium;

        fn command(bytes: &[u8]) -> Vec<u8> {
            let mut framed = Vec::new();
            frame(&mut framed, COMMAND, bytes);
            framed
        }

        fn message(client: &mut Client, flags: u8, body: &[u8]) -> Vec<u8> {
            let mut message = Vec::new();
            client.session().carry(flags, &[body], &mut message);
            message
        }

        fn opened(client: &mut Client, body: &[u8]) -> (u8, Vec<u8>) {
            client.session().carried(body).map(|(flags, body)| (flags, body.to_vec())).unwrap()
        }

        /// Returns the body of the next frame.
        fn next(theirs: &mut UnixStream) -> Vec<u8> {
            let mut head = [0; 2];
            theirs.read_exact(&mut head).unwrap();
            assert_eq!(head[0] & LONG_FLAG, 0);
            let mut body = vec![0; usize::from(head[1])];
            theirs.read_exact(&mut body).unwrap();
            body
        }

        const LONG_FLAG: u8 = 2;

        /// A client after its INITIATE, admitted or not.
        fn after_initiate(allowed: bool) -> (ControlConnection, UnixStream, Client) {
            let keys = Arc::new(sodium::pair());
            let (mut connection, mut theirs) = pair(Some(keys.clone()));
            let mut client = Client::new(Arc::new(sodium::pair()), keys.public);
            theirs.write_all(&greets(b"CURVE")).unwrap();
            theirs.write_all(&command(&client.hello().unwrap())).unwrap();
            assert_eq!(heard(&mut connection).unwrap(), []);
            assert_eq!(connection.progress, Progress::KnowsKey);
            connection.write(0, NOW).unwrap();
            theirs.read_exact(&mut [0; GREETING_BYTES]).unwrap();
            let welcome = next(&mut theirs);
            let initiate = client.initiate(&welcome[8..], b"\x0bSocket-Type\0\0\0\x06DEALER").unwrap();
            theirs.write_all(&command(&initiate)).unwrap();
            let key = zmq::z85_encode(&client.public()).unwrap();
            connection.read(&|asked| allowed && asked == key, NOW).unwrap();
            connection.write(0, NOW).unwrap();
            (connection, theirs, client)
        }

        #[test]
        fn who_is_allowed_speaks_under_its_key() {
            let (mut connection, mut theirs, mut client) = after_initiate(true);
            assert!(next(&mut theirs).starts_with(b"\x05READY"));
            assert_eq!(connection.key, zmq::z85_encode(&client.public()).unwrap());
            let mut framed = Vec::new();
            frame(&mut framed, 0, &message(&mut client, MORE, b"{}"));
            frame(&mut framed, 0, &message(&mut client, 0, b"payload"));
            frame(&mut framed, 0, &message(&mut client, COMMAND, b"\x04PING\0\0ctx"));
            theirs.write_all(&framed).unwrap();
            assert_eq!(
                heard(&mut connection).unwrap(),
                [Message { header: b"{}".to_vec(), payload_count: 1 }]
            );
            connection.write(0, NOW).unwrap();
            assert_eq!(opened(&mut client, &next(&mut theirs)), (COMMAND, b"\x04PONGctx".to_vec()));
            let content = content(3);
            connection.put(b"{1}", &Payload::Chunk(content.clone(), 0), 2, NOW).unwrap();
            assert!(connection.starved && !connection.has_unsent(), "there is no room for a copy");
            connection.write(3, NOW).unwrap();
            assert_eq!(opened(&mut client, &next(&mut theirs)), (MORE, b"{1}".to_vec()));
            assert_eq!(opened(&mut client, &next(&mut theirs)), (0, vec![5; 3]));
            let mut plain = Vec::new();
            frame(&mut plain, 0, b"{}");
            theirs.write_all(&plain).unwrap();
            assert!(heard(&mut connection).is_err());
        }

        #[test]
        fn who_is_not_allowed_is_told_so_and_says_nothing_more() {
            let (mut connection, mut theirs, mut client) = after_initiate(false);
            let mut framed = Vec::new();
            frame(&mut framed, 0, &message(&mut client, 0, b"{}"));
            theirs.write_all(&framed).unwrap();
            assert_eq!(heard(&mut connection).unwrap(), []);
            assert_eq!(next(&mut theirs), b"\x05ERROR\x03400");
            assert_eq!((theirs.read(&mut [0]).unwrap(), &connection.key[..]), (0, ""), "and that is the end");
        }
    }
}
