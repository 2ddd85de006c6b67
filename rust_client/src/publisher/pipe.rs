//! What is on its way on one connection, as frames of ZMTP 3: on the data connection (`outlet.rs`) and on the control
//! connection (`accepted.rs`) alike.
//!
//! What waits refers to a version weakly: a peer that takes nothing (a stopped process, say) keeps no memory that the
//! next version is to be written to. What is half sent is copied if it does not move.

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

const TURN_BYTES: usize = 1 << 20; // sent to one peer before the next has its turn
pub const HOLD: Duration = Duration::from_millis(100); // that half a message may hold on to a version while none of it is taken
pub const HOLD_MAX: Duration = Duration::from_secs(1); // the same where there is no room for a copy, or the version is out of date
const COPY_MAX: Duration = Duration::from_secs(30); // for a copy that others wait for: the largest chunk, at 2 MB/s
/// Bytes of copies of all connections to one socket together: as many as the largest chunk has, so that one always fits.
pub const COPIES_BYTES_MAX: usize = 1 << 26;

/// Bytes that whoever has them keeps as they are.
pub trait Piece: Send + Sync {
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

/// The last frame of a message that waits.
pub enum Tail {
    None,
    Kept(Arc<dyn Piece>),
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
            Payload::Layout(content) => Tail::Kept(content.header.clone()),
            Payload::Chunk(content, index) => Tail::Version(weak(content), *index),
            Payload::SealedLayout(sealed) => Tail::Kept(sealed.clone()),
            Payload::Sealed(sealed) => Tail::Version(weak(sealed), 0),
        }
    }

    /// What has the bytes, and which of its pieces they are; nothing if nobody needs that version any more.
    pub fn piece(&self) -> Option<Option<(Arc<dyn Piece>, u64)>> {
        match self {
            Tail::None => Some(None),
            Tail::Kept(piece) => Some(Some((piece.clone(), 0))),
            Tail::Version(piece, index) => piece.upgrade().map(|piece| Some((piece, *index))),
        }
    }

    /// Bytes that are kept for as long as it waits, whether a version needs them or not.
    pub fn kept(&self) -> usize {
        match self {
            Tail::Kept(piece) => piece.piece(0).len(),
            _ => 0,
        }
    }
}

/// What is being sent.
pub enum Sending {
    Nothing,
    /// Bytes of its own: commands, what was encrypted for this peer alone, or the copied rest of a message.
    Own(Vec<u8>),
    /// Frames and how the last one begins, and what has the bytes of that.
    Message(Arc<Vec<u8>>, Option<(Arc<dyn Piece>, u64)>),
}

impl Sending {
    fn parts(&self) -> (&[u8], &[u8]) {
        match self {
            Sending::Nothing => (&[], &[]),
            Sending::Own(bytes) => (bytes, &[]),
            Sending::Message(heads, None) => (heads, &[]),
            Sending::Message(heads, Some((piece, index))) => (heads, piece.piece(*index)),
        }
    }
}

/// One connection, and what is half sent on it.
pub struct Pipe {
    pub connection: Own<TcpStream>, // or one of the host, which is alike
    pub alive_at: Time,             // when the other side showed last that it lives
    sending: Sending,
    sent: usize,
    blocked: bool,
    begun_at: Time,
    moved_at: Time,            // when the kernel took something last
    outdated_at: Option<Time>, // since when the version of what is half sent is not the newest any more
}

impl Pipe {
    pub fn new(connection: Own<TcpStream>, now: Time) -> Pipe {
        Pipe {
            connection,
            alive_at: now,
            sending: Sending::Nothing,
            sent: 0,
            blocked: false,
            begun_at: now,
            moved_at: now,
            outdated_at: None,
        }
    }

    /// Whether nothing is half sent.
    pub fn is_idle(&self) -> bool {
        matches!(self.sending, Sending::Nothing)
    }

    /// Bytes of a copy that only this connection needs.
    pub fn copied(&self) -> usize {
        match &self.sending {
            Sending::Own(bytes) => bytes.len(),
            _ => 0,
        }
    }

    /// Whether it has something to take, and took none of it for so long.
    pub fn stands_still(&self, now: Time, patience: Duration) -> bool {
        !self.is_idle() && now.saturating_sub(self.moved_at) >= patience
    }

    /// Whether its copy stands still, or takes so long that others should have the room.
    pub fn hogs(&self, now: Time) -> bool {
        self.stands_still(now, HOLD_MAX) || now.saturating_sub(self.begun_at) >= COPY_MAX
    }

    /// Bytes that are left of a message whose version it keeps.
    fn held(&self) -> usize {
        match &self.sending {
            Sending::Message(_, Some(_)) => {
                let (heads, tail) = self.sending.parts();
                heads.len() + tail.len() - self.sent
            }
            _ => 0,
        }
    }

    /// There is a newer version than that of what is half sent.
    pub fn outdate(&mut self, now: Time) {
        if self.held() > 0 {
            self.outdated_at = self.outdated_at.or(Some(now));
        }
    }

    /// Copies what is left of a message, to let its version go.
    fn let_go(&mut self) {
        if let Sending::Message(_, Some(_)) = self.sending {
            let (heads, tail) = self.sending.parts();
            let skipped = self.sent.saturating_sub(heads.len());
            let rest = [&heads[self.sent.min(heads.len())..], &tail[skipped..]].concat();
            (self.sending, self.sent) = (Sending::Own(rest), 0);
        }
    }

    /// Sends until the kernel takes no more, there is nothing next, or others should have a turn.
    pub fn write(&mut self, now: Time, mut next: impl FnMut() -> Sending) -> io::Result<()> {
        let mut turn = TURN_BYTES;
        while turn > 0 {
            if self.is_idle() {
                self.sending = next();
                (self.begun_at, self.moved_at) = (now, now); // it stands still from now on, not while there was nothing to take
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
            self.moved_at = now;
            if std::mem::take(&mut self.blocked) {
                self.alive_at = now; // it was full and has room again: the other side lives
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

/// Of some connections, those whose memory is looked after.
pub trait Held {
    fn pipe(&mut self) -> &mut Pipe;
}

/// Lets versions go that connections hold on to which stand still, by copying what is left of a message. Returns those
/// connections for which there was no room, and that have had their time: hang up on them, since each may keep another
/// version.
pub fn let_go<'a, H: Held + 'a>(
    pipes: impl Iterator<Item = (u64, &'a mut H)>,
    room: usize,
    now: Time,
) -> Vec<u64> {
    let mut room = room;
    let mut over = Vec::new();
    for (id, held) in pipes {
        let pipe = held.pipe();
        let outdated = pipe.outdated_at.map_or(false, |at| now.saturating_sub(at) >= HOLD_MAX);
        if !outdated && !pipe.stands_still(now, HOLD) {
            continue;
        }
        match room.checked_sub(pipe.held()) {
            Some(left) => {
                room = left;
                pipe.let_go();
            }
            None if outdated || pipe.stands_still(now, HOLD_MAX) => over.push(id),
            None => {}
        }
    }
    over
}
