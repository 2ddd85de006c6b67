//! Decodes versions from patches, and finds the bytes that the patches build on (D3, D5).

use crate::delta::Patch;
use crate::layout::Layout;
use crate::model::Model;
use crate::staging::Buffer;
use crate::transfer::Key;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

const PIECE_BYTES: usize = 1 << 24; // copied between two checks of `wanted`: some milliseconds
const WRITE_TIMEOUT: Duration = Duration::from_secs(1); // limit of the wait for a writer of the base

/// Location of the bytes of the running version.
#[derive(Clone)]
pub enum Bytes {
    /// In a buffer that was kept, which does not change.
    Kept(Arc<Buffer>),
    /// In the model itself: the next version that is applied overwrites the bytes.
    Model(Model),
}

/// The running version, for patches to build on.
#[derive(Clone)]
pub struct Base {
    pub layout: Arc<Layout>,
    pub bytes: Bytes,
}

impl fmt::Debug for Base {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let location = if let Bytes::Kept(_) = self.bytes { "a buffer" } else { "a model" };
        write!(f, "Base(of {} bytes in {})", self.layout.nbytes, location)
    }
}

impl Base {
    /// Copies the bytes into `to`. Returns false if the bytes are not available, or once `wanted`
    /// returns false.
    fn copy_to(&self, to: &mut [u8], wanted: &dyn Fn() -> bool) -> bool {
        let mut copy = |begin: usize, bytes: &[u8]| {
            let mut pieces =
                to[begin..begin + bytes.len()].chunks_mut(PIECE_BYTES).zip(bytes.chunks(PIECE_BYTES));
            pieces.all(|(to, bytes)| {
                to.copy_from_slice(bytes);
                wanted()
            })
        };
        match &self.bytes {
            Bytes::Kept(buffer) => copy(0, buffer),
            Bytes::Model(model) => model.gather(&self.layout, Instant::now() + WRITE_TIMEOUT, copy),
        }
    }
}

/// The job to decode a received patch into a version.
pub struct Patching {
    pub model: String,
    pub key: Key,
    pub base: Base,
    pub patch: Buffer,
    /// Destination of the decoded version, as large as the base.
    pub version: Buffer,
    /// Digest of the version.
    pub digest: String,
    /// Can be upgraded while the transfer waits for the result.
    pub wanted: Weak<()>,
}

impl fmt::Debug for Patching {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Patching({} {:?}, {})", self.model, self.key, self.digest)
    }
}

impl Patching {
    /// Decodes the patch. Returns how long that took, or the reason that the patch cannot be used.
    /// Stops early once `stopped` returns true, or the transfer no longer waits for the result.
    pub fn run(&mut self, stopped: &dyn Fn() -> bool) -> Result<Duration, String> {
        let started = Instant::now();
        let wanted = || self.wanted.strong_count() > 0 && !stopped();
        let patch = Patch::parse(&self.base.layout, &self.patch).map_err(|error| error.to_string())?;
        if patch.header.target != self.digest {
            return Err(format!("it leads to {:.12}, not to {:.12}", patch.header.target, self.digest));
        }
        if !self.base.copy_to(&mut self.version, &wanted) {
            return Err("its base was being overwritten".to_owned());
        }
        patch.apply_while(&mut self.version, None, &wanted).map_err(|error| error.to_string())?;
        Ok(started.elapsed())
    }
}
