//! What a worker makes sure of before it takes a version: that it can be read, and that it fits.

use crate::effects::Host;
use crate::layout::Layout;
use crate::limits::{
    CHUNKS_MAX, LAYOUTS_KEPT, LAYOUT_BYTES_FREE, LAYOUT_BYTES_MAX, LAYOUT_MEMORY, TENSORS_UNKNOWN_MAX,
};
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
    unfit: VecDeque<(String, Fault)>, // layouts of too many tensors, and what is told of them
    tensors_max: usize,
}

impl Acceptance {
    pub fn new(bytes_max: u64) -> Acceptance {
        Acceptance {
            bytes_max,
            sealed: false,
            known: VecDeque::new(),
            unfit: VecDeque::new(),
            tensors_max: TENSORS_UNKNOWN_MAX,
        }
    }

    /// The largest version to take.
    pub fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// The model here has so many tensors.
    pub fn expect_tensors(&mut self, count: usize) {
        self.tensors_max = TENSORS_UNKNOWN_MAX.max(count.saturating_mul(2));
    }

    /// Bytes of the largest layout to take.
    pub fn layout_bytes_max(&self) -> u64 {
        (self.bytes_max / LAYOUT_MEMORY).clamp(LAYOUT_BYTES_FREE, LAYOUT_BYTES_MAX + 8)
    }

    /// Says why a layout is larger than this worker reads, or than its data warrants, if it is.
    fn oversize(&self, announce: &Announce) -> Option<Fault> {
        let (nbytes, most) = (announce.layout_bytes, self.layout_bytes_max());
        if nbytes > most {
            let text = format!("a layout of {} bytes; this worker takes at most {}", nbytes, most);
            return Some(("too-large", text + ": raise its bytes_max if that is meant"));
        }
        let most = LAYOUT_BYTES_FREE + announce.nbytes;
        (nbytes > most).then(|| {
            let text = format!("a layout of {} bytes for {} bytes of weights", nbytes, announce.nbytes);
            ("too-large", format!("{}; at most {} are taken", text, most))
        })
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
        if let Some(fault) = self.oversize(announce) {
            return Err(fault); // before the work is done
        }
        if header.len() as u64 != announce.layout_bytes {
            let (found, said) = (header.len(), announce.layout_bytes);
            return Err(invalid(format!("the layout has {} bytes, announced were {}", found, said)));
        }
        let layout = Layout::parse(header).map_err(|error| invalid(error.to_string()))?;
        if layout.tensors.len() > self.tensors_max && layout.id == announce.layout {
            let text =
                format!("{} tensors; this worker takes at most {}", layout.tensors.len(), self.tensors_max);
            self.unfit.truncate(LAYOUTS_KEPT - 1);
            self.unfit.push_front((layout.id, ("too-large", text.clone())));
            return Err(("too-large", text));
        }
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
        if let Some(fault) = self.oversize(announce) {
            return Some(fault);
        }
        if let Some((_, fault)) = self.unfit.iter().find(|(id, _)| *id == announce.layout) {
            return Some(fault.clone());
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
