//! The publisher's side of one data connection, in ZMTP 3, and the queue of messages for its subscriber.

use super::effects::Payload;
use super::pipe::{HasPipe, Pipe, Sending, Tail};
use super::rate_limits::{Rate, TokenBucket};
use super::trust::Owner;
use crate::framing::{
    fault, frame, frame_head, greeted, greeting, mechanism, pong, read_head, COMMAND, GREETING_BYTES, MORE,
};
use crate::limits::UNREAD_BYTES_MAX;
use crate::raw::fork::Own;
use crate::transfer::Time;
use std::collections::{BTreeSet, VecDeque};
use std::io::{self, Read};
use std::net::TcpStream;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

const READY: &[u8] = b"\x05READY\x0bSocket-Type\0\0\0\x04XPUB\x08Identity\0\0\0\0";
const PING: &[u8] = b"\x04PING\0\0";
const BODY_BYTES_MAX: usize = 8192; // of a frame from a subscriber
const READ_BYTES: usize = 1024; // read from a subscriber before others are served: some 100 frames
const QUEUE_MAX: usize = 1000; // messages in the queue, which has no copies of chunks
const TOPIC_BYTES_MAX: usize = 132; // the longest name of a model, and a suffix
const TOPICS_MAX: usize = 256; // of one subscriber: more than any worker needs
const FRAME_RATE: Rate = Rate(256.0, 1024.0); // frames from one subscriber, pongs included

const TICKET: u8 = 3; // first byte of a message that has a ticket
const TICKET_BYTES: usize = 32;

/// A message for the queues of all subscribers of its topic, which share it.
pub struct Queued {
    pub topic: String,
    heads: Arc<Vec<u8>>, // all bytes of the message except the payload
    tail: Tail,
}

impl Queued {
    pub fn new(topic: String, header: &[u8], payload: &Payload) -> Queued {
        let mut heads = Vec::with_capacity(topic.len() + header.len() + 32);
        frame(&mut heads, MORE, topic.as_bytes());
        match payload.bytes() {
            None => frame(&mut heads, 0, header),
            Some(bytes) => {
                frame(&mut heads, MORE, header);
                frame_head(&mut heads, 0, bytes.len());
            }
        }
        Queued { topic, heads: Arc::new(heads), tail: Tail::of(payload) }
    }
}

/// The messages of a subscriber that one `read` has received.
#[derive(Default)]
pub struct SubscriberInput {
    /// The ticket, which is the first message if tickets are required.
    pub ticket: Option<String>,
    /// Topics to which the subscriber has now subscribed.
    pub topics: Vec<String>,
    /// Reports, each with the worker's token (P22).
    pub reports: Vec<Vec<u8>>,
}

/// One subscriber's connection.
pub struct SubscriberConnection {
    pipe: Pipe,
    /// The worker that owns the connection, as its ticket has shown; `None` without a valid ticket.
    pub owner: Option<Owner>,
    requires_ticket: bool, // serve the connection only if it has an owner
    ticket_received: bool,
    since: Time,
    topics: BTreeSet<String>,
    queue: VecDeque<Arc<Queued>>,
    commands: Vec<u8>, // unsent greeting and commands, which may only be sent between messages
    topic: String,     // of the message that is being sent
    received: Vec<u8>,
    greeted: bool,
    ready: bool,
    bucket: TokenBucket,
}

impl SubscriberConnection {
    /// Sets the worker that owns this connection.
    pub fn admit(&mut self, owner: Option<Owner>) {
        self.owner = owner;
    }

    /// Returns a new connection. If `requires_ticket`, messages are sent only after the peer has sent a
    /// valid ticket (K6).
    pub fn new(connection: Own<TcpStream>, requires_ticket: bool, now: Time) -> SubscriberConnection {
        SubscriberConnection {
            pipe: Pipe::new(connection, now),
            owner: None,
            requires_ticket,
            ticket_received: false,
            since: now,
            topics: BTreeSet::new(),
            queue: VecDeque::new(),
            commands: greeting(false, true),
            topic: String::new(),
            received: Vec::new(),
            greeted: false,
            ready: false,
            bucket: TokenBucket::new(now),
        }
    }

    /// True if messages of a topic are sent: the peer has subscribed to the topic or to a prefix of it, and
    /// has sent a ticket if one is required.
    pub fn subscribes_to(&self, topic: &str) -> bool {
        let asked =
            self.topics.contains(topic) || self.topics.iter().any(|asked| topic.starts_with(&asked[..]));
        asked && self.is_served()
    }

    fn is_served(&self) -> bool {
        !self.requires_ticket || self.owner.is_some()
    }

    /// True if the connection has been open for `patience` without a valid ticket.
    pub fn lacks_ticket(&self, now: Time, patience: Duration) -> bool {
        !self.is_served() && now.saturating_sub(self.since) >= patience
    }

    /// True if something waits to be sent.
    pub fn has_unsent(&self) -> bool {
        !self.pipe.is_idle() || !self.commands.is_empty() || !self.queue.is_empty()
    }

    /// True if no message is queued behind the one that is being sent.
    pub fn is_queue_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Sends a message, or queues the message behind earlier ones. Drops the message if the queue is full.
    pub fn put(&mut self, message: &Arc<Queued>, now: Time) -> io::Result<()> {
        let idle = !self.has_unsent();
        if self.queue.len() < QUEUE_MAX {
            self.queue.push_back(message.clone());
        }
        if idle {
            self.write(now)
        } else {
            Ok(())
        }
    }

    /// Drops the queued messages of these topics. If a message of these topics is being sent, marks its
    /// version as outdated.
    pub fn withdraw(&mut self, topics: &[String], now: Time) {
        self.queue.retain(|message| !topics.contains(&message.topic));
        if topics.contains(&self.topic) {
            self.pipe.mark_outdated(now);
        }
    }

    /// Queues a ping, if the connection is ready and served.
    pub fn ping(&mut self) {
        if self.ready && self.is_served() {
            frame(&mut self.commands, COMMAND, PING);
        }
    }

    /// Sends until the kernel accepts no more bytes, or this connection's share of the time is used up.
    pub fn write(&mut self, now: Time) -> io::Result<()> {
        let (commands, queue, topic) = (&mut self.commands, &mut self.queue, &mut self.topic);
        self.pipe.write(now, || {
            topic.clear();
            if !commands.is_empty() {
                return Sending::Owned(std::mem::take(commands));
            }
            while let Some(message) = queue.pop_front() {
                // `None`: the version was released.
                if let Some(piece) = message.tail.piece() {
                    topic.clone_from(&message.topic);
                    return Sending::Message(message.heads.clone(), piece);
                }
            }
            Sending::Nothing
        })
    }

    /// Reads from the connection once. Returns the messages of the subscriber.
    pub fn read(&mut self, now: Time) -> io::Result<SubscriberInput> {
        let mut bytes = [0; READ_BYTES];
        let count = match self.pipe.connection.read(&mut bytes) {
            Ok(0) => return fault("the subscriber has closed the connection"),
            Ok(count) => count,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                return Ok(SubscriberInput::default());
            }
            Err(error) => return Err(error),
        };
        self.received.extend_from_slice(&bytes[..count]);
        self.pipe.alive_at = now;
        let mut input = SubscriberInput::default();
        let mut at = 0;
        loop {
            match self.parse(at, &mut input, now)? {
                0 => break,
                size => at += size,
            }
        }
        self.received.drain(..at);
        if self.topics.len() > TOPICS_MAX || self.commands.len() > UNREAD_BYTES_MAX {
            return fault("it has too many subscriptions, or reads no answers");
        }
        Ok(input)
    }

    /// Parses the greeting or frame at offset `at` of the received bytes. Returns its size; 0 if it
    /// is incomplete.
    fn parse(&mut self, at: usize, input: &mut SubscriberInput, now: Time) -> io::Result<usize> {
        let bytes = &self.received[at..];
        if !self.greeted {
            return self.parse_greeting(at);
        }
        let (flags, head, size) = match read_head(bytes, BODY_BYTES_MAX)? {
            Some(found) if found.flags & MORE != 0 => {
                return fault("a message of several frames, which no subscriber sends")
            }
            Some(found) => (found.flags, found.head, found.size),
            None => return Ok(0),
        };
        let body = match bytes.get(head..head + size) {
            Some(body) => body.to_vec(),
            None => return Ok(0),
        };
        let is_report = flags & COMMAND == 0 && body.first() == Some(&2);
        if !is_report {
            self.spend(now)?;
        }
        if flags & COMMAND != 0 {
            self.handle_command(&body)?;
        } else if !self.ready {
            return fault("a message before the handshake was over");
        } else {
            self.handle_message(body, input)?;
        }
        Ok(head + size)
    }

    fn parse_greeting(&mut self, at: usize) -> io::Result<usize> {
        match greeted(&self.received[at..])? {
            None => return Ok(0),
            Some(its) if its != mechanism(false) => {
                return fault("a greeting with another mechanism than NULL")
            }
            Some(_) => {}
        }
        self.greeted = true;
        frame(&mut self.commands, COMMAND, READY);
        Ok(GREETING_BYTES)
    }

    fn handle_command(&mut self, body: &[u8]) -> io::Result<()> {
        if body.starts_with(b"\x05READY") {
            self.ready = true;
        } else if body.starts_with(b"\x05ERROR") {
            return fault("the peer sent ERROR");
        } else if let Some(pong) = pong(body) {
            frame(&mut self.commands, COMMAND, &pong);
        }
        Ok(())
    }

    /// Handles a message: a ticket, a report, or a subscription.
    fn handle_message(&mut self, mut body: Vec<u8>, input: &mut SubscriberInput) -> io::Result<()> {
        if self.requires_ticket && !std::mem::replace(&mut self.ticket_received, true) {
            let ticket = body.strip_prefix(&[TICKET]).filter(|ticket| ticket.len() == TICKET_BYTES);
            input.ticket = ticket.and_then(|ticket| String::from_utf8(ticket.to_vec()).ok());
            return if input.ticket.is_some() { Ok(()) } else { fault("it has shown no ticket") };
        }
        match body.first() {
            Some(2) => input.reports.push(body.split_off(1)),
            Some(on @ (0 | 1)) if body.len() <= 1 + TOPIC_BYTES_MAX => {
                let on = *on == 1;
                match (String::from_utf8(body.split_off(1)), on) {
                    (Ok(topic), true) => {
                        self.topics.insert(topic.clone());
                        input.topics.push(topic);
                    }
                    (Ok(topic), false) => drop(self.topics.remove(&topic)),
                    (Err(_), _) => return fault("a topic that is not valid UTF-8"),
                }
            }
            _ => return fault("a message that is neither a report nor a valid subscription"),
        }
        Ok(())
    }

    /// Takes one unit from the subscriber's token bucket. Fails if the bucket is empty.
    pub fn spend(&mut self, now: Time) -> io::Result<()> {
        if self.bucket.take(1.0, FRAME_RATE, now) {
            Ok(())
        } else {
            fault("it sends more frames than the rate limit allows")
        }
    }
}

impl HasPipe for SubscriberConnection {
    fn pipe(&mut self) -> &mut Pipe {
        &mut self.pipe
    }
}

impl Deref for SubscriberConnection {
    type Target = Pipe;

    fn deref(&self) -> &Pipe {
        &self.pipe
    }
}

impl DerefMut for SubscriberConnection {
    fn deref_mut(&mut self) -> &mut Pipe {
        &mut self.pipe
    }
}

#[cfg(test)]
mod tests {
    use super::super::content::Copier;
    use super::super::content::{Content, TensorView};
    use super::super::pipe::{release_versions, HOLD, HOLD_MAX};
    use super::*;
    use crate::dtype::Dtype;
    use std::io::Write;
    use std::os::unix::io::OwnedFd;
    use std::os::unix::net::UnixStream;

    fn pair() -> (SubscriberConnection, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (SubscriberConnection::new(Own::new(OwnedFd::from(ours).into()), false, Time::ZERO), theirs)
    }

    fn greeted() -> Vec<u8> {
        let mut bytes = greeting(false, false);
        frame(&mut bytes, COMMAND, b"\x05READY\x0bSocket-Type\0\0\0\x03SUB");
        bytes
    }

    fn hold(subscriber: &mut SubscriberConnection, room: usize, now: Time) -> Vec<u64> {
        release_versions(std::iter::once((7, subscriber)), room, now)
    }

    /// A connected subscriber of a topic.
    fn subscribed(topic: &str) -> (SubscriberConnection, UnixStream) {
        let (mut subscriber, mut other) = pair();
        let mut said = greeted();
        frame(&mut said, 0, &[&[1], topic.as_bytes()].concat());
        other.write_all(&said).unwrap();
        let input = subscriber.read(Time::ZERO).unwrap();
        assert_eq!(input.topics, [topic]);
        subscriber.write(Time::ZERO).unwrap();
        let mut answer = vec![0; GREETING_BYTES + 2 + READY.len()];
        other.read_exact(&mut answer).unwrap();
        assert_eq!(&answer[GREETING_BYTES + 2..], READY);
        (subscriber, other)
    }

    fn content(nbytes: usize) -> Arc<Content> {
        let bytes = vec![5; nbytes];
        let tensor = TensorView { name: "w", dtype: Dtype::U8, shape: &[nbytes as u64], bytes: &bytes };
        Arc::new(Copier::default().copy(&[tensor], 1 << 26).unwrap())
    }

    #[test]
    fn a_message_comes_as_frames() {
        let (mut subscriber, mut other) = subscribed("m/ctl");
        assert!(subscriber.subscribes_to("m/ctl") && !subscriber.subscribes_to("m/dat"));
        let message = Queued::new("m/ctl".to_owned(), b"{}", &Payload::None);
        subscriber.put(&Arc::new(message), Time::ZERO).unwrap();
        let mut bytes = [0; 11];
        other.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"\x01\x05m/ctl\x00\x02{}");
        assert!(!subscriber.has_unsent());
    }

    #[test]
    fn what_nobody_reads_keeps_no_version() {
        let (mut subscriber, _other) = subscribed("m/dat");
        let large = content(1 << 24);
        let weak = Arc::downgrade(&large);
        for _ in 0..3 {
            let message = Queued::new("m/dat".to_owned(), b"{}", &Payload::Chunk(large.clone(), 0));
            subscriber.put(&Arc::new(message), Time::ZERO).unwrap();
        }
        drop(large);
        assert!(weak.upgrade().is_some(), "half of it is sent");
        assert!(
            hold(&mut subscriber, 1 << 20, HOLD).is_empty(),
            "it gets some time, if there is no room for a copy"
        );
        assert!(weak.upgrade().is_some());
        assert_eq!(hold(&mut subscriber, 0, HOLD_MAX), [7], "and no more");
        assert!(hold(&mut subscriber, 1 << 25, HOLD).is_empty());
        assert!(weak.upgrade().is_none());
        assert!(subscriber.has_unsent() && !subscriber.is_queue_empty());
        subscriber.withdraw(&["m/dat".to_owned()], HOLD);
        assert!(subscriber.is_queue_empty());
    }

    #[test]
    fn a_rest_that_was_copied_is_the_same_bytes() {
        let (mut subscriber, mut other) = subscribed("m/dat");
        let large = content(1 << 22);
        let message = Queued::new("m/dat".to_owned(), b"{}", &Payload::Chunk(large.clone(), 0));
        subscriber.put(&Arc::new(message), Time::ZERO).unwrap();
        drop(large);
        hold(&mut subscriber, 1 << 22, HOLD);
        other.set_nonblocking(true).unwrap();
        let mut bytes = Vec::new();
        let mut buffer = vec![0; 1 << 16];
        while bytes.len() < (1 << 22) + 20 {
            match other.read(&mut buffer) {
                Ok(count) => bytes.extend_from_slice(&buffer[..count]),
                Err(_) => {
                    assert!(subscriber.has_unsent(), "{} bytes came", bytes.len());
                    subscriber.write(Time::ZERO).unwrap();
                }
            }
        }
        assert_eq!(&bytes[..11], b"\x01\x05m/dat\x01\x02{}");
        assert!(bytes[20..].iter().all(|&byte| byte == 5) && !subscriber.has_unsent());
    }

    #[test]
    fn whoever_is_no_subscriber_is_hung_up_on() {
        let mut long = greeted();
        frame(&mut long, 0, &[1; 200]);
        let mut early = greeted()[..GREETING_BYTES].to_vec();
        frame(&mut early, 0, b"\x01m/ctl");
        let mut more = greeted();
        frame(&mut more, MORE, b"\x01m/ctl");
        let mut other = greeted();
        frame(&mut other, 0, b"\x07");
        for said in [vec![b'x'; 64], long, early, more, other] {
            let (mut subscriber, mut theirs) = pair();
            theirs.write_all(&said).unwrap();
            assert!(subscriber.read(Time::ZERO).is_err());
        }
        let (mut subscriber, theirs) = pair();
        drop(theirs);
        assert!(subscriber.read(Time::ZERO).is_err());
    }

    #[test]
    fn a_flood_of_subscriptions_is_hung_up_on() {
        let (mut subscriber, mut other) = subscribed("m/ctl");
        let mut said = Vec::new();
        for _ in 0..300 {
            frame(&mut said, 0, b"\x01m");
        }
        other.write_all(&said).unwrap();
        assert!((0..2).any(|_| subscriber.read(Time::ZERO).is_err()));
    }
}
