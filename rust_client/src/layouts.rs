//! What a worker makes sure of before it takes a version: that it can be read, and that it fits.

use crate::effects::Host;
use crate::layout::Layout;
use crate::limits::{CHUNKS_MAX, LAYOUTS_KEPT};
use crate::messages::Announce;
use crate::sealing::AES_256_GCM;
use std::collections::VecDeque;
use std::sync::Arc;

/// Why a version is not taken: a code of `failed`, and what is wrong in words.
pub type Fault = (&'static str, String);

/// A layout that was received, and whether the model here can take it.
struct Known {
    layout: Arc<Layout>,
    accepted: bool,
}

/// The layouts that a worker knows of one model, and what it takes.
pub struct Acceptance {
    bytes_max: u64, // the largest version to take
    sealed: bool,   // only what is sealed is taken, else only what is not
    known: VecDeque<Known>,
}

impl Acceptance {
    pub fn new(bytes_max: u64) -> Acceptance {
        Acceptance { bytes_max, sealed: false, known: VecDeque::new() }
    }

    /// The largest version to take.
    pub fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// From now on only what is sealed is taken.
    pub fn take_sealed(&mut self) {
        self.sealed = true;
    }

    /// The layout of an announced version, if it is known.
    pub fn layout(&self, announce: &Announce) -> Option<Arc<Layout>> {
        let known = self.known.iter().find(|known| known.layout.id == announce.layout);
        known.map(|known| known.layout.clone())
    }

    /// Remembers a layout that came with an announcement, or says what is wrong with it.
    pub fn learn(&mut self, announce: &Announce, header: &[u8]) -> Result<(), Fault> {
        let invalid = |text| ("layout-invalid", text);
        if header.len() as u64 != announce.layout_bytes {
            let (found, said) = (header.len(), announce.layout_bytes);
            return Err(invalid(format!("the layout has {} bytes, announced were {}", found, said)));
        }
        let layout = Layout::parse(header).map_err(|error| invalid(error.to_string()))?;
        if layout.id != announce.layout {
            let (found, said) = (layout.id, &announce.layout);
            return Err(invalid(format!("the layout hashes to {}, announced was {}", found, said)));
        }
        if self.layout(announce).is_none() {
            self.known.truncate(LAYOUTS_KEPT - 1);
            self.known.push_front(Known { layout: Arc::new(layout), accepted: false });
        }
        Ok(())
    }

    /// Says why a version cannot be taken, as far as that is known yet.
    pub fn fault(&mut self, announce: &Announce, host: &dyn Host) -> Option<Fault> {
        let nbytes = announce.nbytes;
        let encryption = self.sealed.then_some(AES_256_GCM);
        if announce.encoding != "raw" || announce.encryption.as_deref() != encryption {
            let what = format!("encoding {:?}, encryption {:?}", announce.encoding, announce.encryption); // E1
            let taken = format!("; this worker takes \"raw\" and encryption {:?}", encryption);
            return Some(("unsupported", what + &taken));
        }
        if nbytes > self.bytes_max {
            let text = format!("{} bytes; this worker takes at most {}", nbytes, self.bytes_max);
            return Some(("too-large", text + ": raise its bytes_max if that is meant"));
        }
        if nbytes > CHUNKS_MAX * announce.chunk_bytes {
            let text = format!("{} bytes in chunks of {}", nbytes, announce.chunk_bytes);
            return Some(("too-many-chunks", format!("{} are more than {} chunks", text, CHUNKS_MAX)));
        }
        match self.known.iter_mut().find(|known| known.layout.id == announce.layout) {
            Some(known) => known.fault(announce, host),
            None => None,
        }
    }
}

impl Known {
    fn fault(&mut self, announce: &Announce, host: &dyn Host) -> Option<Fault> {
        let (said, found) = (announce.nbytes, self.layout.nbytes);
        if found != said {
            let text = format!("announced are {} bytes, the layout holds {}", said, found);
            return Some(("layout-invalid", text));
        }
        if !self.accepted {
            if let Some(text) = host.fault(&announce.model, &self.layout) {
                return Some(("layout-mismatch", text));
            }
            self.accepted = true;
        }
        None
    }
}
