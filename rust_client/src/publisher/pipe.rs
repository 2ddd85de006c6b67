//! Sends messages, as frames of ZMTP 3, on a data connection (`subscriber.rs`) or a control connection
//! (`control_connection.rs`).
//!
//! Queued messages have weak references to versions, so that a peer that reads nothing, such as a
//! stopped process, keeps no memory that the next version needs. Only the message that is being sent
//! holds its version. If sending stalls, the unsent bytes are copied, and the version is released.

use super::content::{Content, Header};
use super::effects::Payload;
use super::sealer::Sealed;
use crate::raw::fork::Own;
use crate::raw::socket;
use crate::transfer::Time;
use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::os::unix::io::AsRawFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

const TURN_BYTES: usize = 1 << 20; // sent to one peer before another peer is served
pub const HOLD: Duration = Duration::from_millis(100); // how long a stalled message may hold a version
pub const HOLD_MAX: Duration = Duration::from_secs(1); // the same without room for a copy, or if outdated
const COPY_TIME_MAX: Duration = Duration::from_secs(30); // to send a copy while others wait for room: 64 MiB at 2 MB/s
/// The most bytes of copies for all connections of one socket. The largest chunk has this size, so that
/// one copy always fits.
pub const COPIES_BYTES_MAX: usize = 1 << 26;

/// The owner of bytes that do not change, such as a version or a layout.
pub trait Piece: Send + Sync {
    /// Returns the bytes; of a version, those of the chunk `index`.
    fn piece(&self, index: u64) -> &[u8];
}

impl Piece for Header {
    fn piece(&self, _index: u64) -> &[u8] {
        &self.bytes
    }
}

impl Piece for Content {
    fn piece(&self, index: u64) -> &[u8] {
        self.chunk(index)
    }
}

impl Piece for Sealed {
    fn piece(&self, _index: u64) -> &[u8] {
        &self.bytes
    }
}

/// The payload of a queued message, which is its last frame.
pub enum Tail {
    None,
    /// The queue keeps these bytes in memory.
    Owned(Arc<dyn Piece>),
    /// The piece of this index of a version, which the queue does not keep in memory.
    Version(Weak<dyn Piece>, u64),
}

impl Tail {
    pub fn of(payload: &Payload) -> Tail {
        fn weak<T: Piece + 'static>(piece: &Arc<T>) -> Weak<dyn Piece> {
            let weak: Weak<T> = Arc::downgrade(piece);
            weak
        }
        match payload {
            Payload::None => Tail::None,
            Payload::Layout(content) => Tail::Owned(content.header.clone()),
            Payload::Chunk(content, index) => Tail::Version(weak(content), *index),
            Payload::SealedLayout(sealed) => Tail::Owned(sealed.clone()),
            Payload::Sealed(sealed) => Tail::Version(weak(sealed), 0),
        }
    }

    /// Returns the owner of the payload, and the index of the piece. Returns `Some(None)` if the message
    /// has no payload, and `None` if the version was released.
    pub fn piece(&self) -> Option<Option<(Arc<dyn Piece>, u64)>> {
        match self {
            Tail::None => Some(None),
            Tail::Owned(piece) => Some(Some((piece.clone(), 0))),
            Tail::Version(piece, index) => piece.upgrade().map(|piece| Some((piece, *index))),
        }
    }

    /// Returns the number of payload bytes that the queue keeps in memory.
    pub fn owned_bytes(&self) -> usize {
        match self {
            Tail::Owned(piece) => piece.piece(0).len(),
            _ => 0,
        }
    }
}

/// What is being sent.
pub enum Sending {
    Nothing,
    /// Bytes of this connection alone: commands, an encrypted message, or the copied rest of a message.
    Owned(Vec<u8>),
    /// A message: all its bytes except the payload, then the owner of the payload, if there is one, and
    /// the index of the piece.
    Message(Arc<Vec<u8>>, Option<(Arc<dyn Piece>, u64)>),
}

impl Sending {
    /// Returns the bytes before the payload, and the payload.
    fn parts(&self) -> (&[u8], &[u8]) {
        match self {
            Sending::Nothing => (&[], &[]),
            Sending::Owned(bytes) => (bytes, &[]),
            Sending::Message(heads, None) => (heads, &[]),
            Sending::Message(heads, Some((piece, index))) => (heads, piece.piece(*index)),
        }
    }
}

/// One connection, and the message that is being sent on it.
pub struct Pipe {
    pub connection: Own<TcpStream>, // also for a Unix socket, which has the same functions
    pub alive_at: Time,             // when the peer last showed that it is alive
    sending: Sending,
    sent: usize,   // bytes of `sending`
    blocked: bool, // the kernel accepted no more bytes at the last attempt
    started_at: Time,
    progress_at: Time,         // when the kernel last accepted bytes
    outdated_at: Option<Time>, // when the version that is being sent became outdated
}

impl Pipe {
    pub fn new(connection: Own<TcpStream>, now: Time) -> Pipe {
        Pipe {
            connection,
            alive_at: now,
            sending: Sending::Nothing,
            sent: 0,
            blocked: false,
            started_at: now,
            progress_at: now,
            outdated_at: None,
        }
    }

    /// True if no message is partly sent.
    pub fn is_idle(&self) -> bool {
        matches!(self.sending, Sending::Nothing)
    }

    /// Returns the size of the copy that is being sent; 0 if none is.
    pub fn copy_bytes(&self) -> usize {
        match &self.sending {
            Sending::Owned(bytes) => bytes.len(),
            _ => 0,
        }
    }

    /// True if the kernel has accepted no bytes of the partly sent message for `patience`.
    pub fn is_stalled(&self, now: Time, patience: Duration) -> bool {
        !self.is_idle() && now.saturating_sub(self.progress_at) >= patience
    }

    /// True if the message that is being sent has stalled, or takes too long while other connections wait
    /// for room.
    pub fn blocks_others(&self, now: Time) -> bool {
        self.is_stalled(now, HOLD_MAX) || now.saturating_sub(self.started_at) >= COPY_TIME_MAX
    }

    /// Returns the number of unsent bytes of a message that holds a version; 0 for any other.
    fn held_bytes(&self) -> usize {
        match &self.sending {
            Sending::Message(_, Some(_)) => {
                let (heads, tail) = self.sending.parts();
                heads.len() + tail.len() - self.sent
            }
            _ => 0,
        }
    }

    /// Records that the version that is being sent is outdated.
    pub fn mark_outdated(&mut self, now: Time) {
        if self.held_bytes() > 0 {
            self.outdated_at = self.outdated_at.or(Some(now));
        }
    }

    /// Copies the unsent bytes of the message, so that it no longer holds its version.
    fn copy_rest(&mut self) {
        if let Sending::Message(_, Some(_)) = self.sending {
            let (heads, tail) = self.sending.parts();
            let skipped = self.sent.saturating_sub(heads.len());
            let rest = [&heads[self.sent.min(heads.len())..], &tail[skipped..]].concat();
            (self.sending, self.sent) = (Sending::Owned(rest), 0);
        }
    }

    /// Sends until the kernel accepts no more bytes, `next` returns nothing, or `TURN_BYTES` are sent.
    /// `next` returns the next message when one has been sent.
    pub fn write(&mut self, now: Time, mut next: impl FnMut() -> Sending) -> io::Result<()> {
        let mut turn = TURN_BYTES;
        while turn > 0 {
            if self.is_idle() {
                self.sending = next();
                // A stall is counted from now on: before, there was nothing to send.
                (self.started_at, self.progress_at) = (now, now);
            }
            if self.is_idle() {
                break;
            }
            let (heads, tail) = self.sending.parts();
            let all = heads.len() + tail.len();
            let skipped = self.sent.saturating_sub(heads.len());
            let parts = [IoSlice::new(&heads[self.sent.min(heads.len())..]), IoSlice::new(&tail[skipped..])];
            let count = match socket::send(self.connection.as_raw_fd(), &parts) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.blocked = true;
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            self.progress_at = now;
            if std::mem::take(&mut self.blocked) {
                self.alive_at = now; // the peer accepts data again, so it is alive
            }
            turn = turn.saturating_sub(count);
            self.sent += count;
            if self.sent == all {
                (self.sending, self.sent, self.outdated_at) = (Sending::Nothing, 0, None);
            }
        }
        Ok(())
    }
}

/// A connection with a pipe, for `release_versions`.
pub trait HasPipe {
    fn pipe(&mut self) -> &mut Pipe;
}

/// Releases the versions that stalled messages hold: copies the unsent bytes of these messages, at most
/// `room` bytes in all. Returns the ids of connections for which there was no room for too long. The
/// caller must close these connections, because each may hold another version.
pub fn release_versions<'a, H: HasPipe + 'a>(
    pipes: impl Iterator<Item = (u64, &'a mut H)>,
    room: usize,
    now: Time,
) -> Vec<u64> {
    let mut room = room;
    let mut to_close = Vec::new();
    for (id, connection) in pipes {
        let pipe = connection.pipe();
        let outdated = pipe.outdated_at.map_or(false, |at| now.saturating_sub(at) >= HOLD_MAX);
        if !outdated && !pipe.is_stalled(now, HOLD) {
            continue;
        }
        match room.checked_sub(pipe.held_bytes()) {
            Some(left) => {
                room = left;
                pipe.copy_rest();
            }
            None if outdated || pipe.is_stalled(now, HOLD_MAX) => to_close.push(id),
            None => {}
        }
    }
    to_close
}
