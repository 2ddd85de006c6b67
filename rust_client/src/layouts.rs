//! Checks whether a worker can accept a version: its encoding, its sizes, and its layout.

use crate::effects::Host;
use crate::layout::Layout;
use crate::limits::{
    CHUNKS_MAX, LAYOUTS_KEPT, LAYOUT_BYTES_GUARANTEED, LAYOUT_BYTES_MAX, LAYOUT_MEMORY, TENSORS_UNKNOWN_MAX,
};
use crate::messages::Announce;
use crate::sealing::AES_256_GCM;
use std::collections::VecDeque;
use std::sync::Arc;

/// Why a version is not accepted: a code for the `failed` report, and a text.
pub type Fault = (&'static str, String);

/// A layout that was received, and whether the model here accepts it.
struct KnownLayout {
    layout: Arc<Layout>,
    accepted: bool,
}

/// The known layouts of one model, and the limits of its worker.
pub struct Acceptance {
    bytes_max: u64, // size in bytes of the largest version to accept
    sealed: bool,   // true: only sealed versions are accepted; false: only versions in the clear
    known: VecDeque<KnownLayout>,
    unfit: VecDeque<(String, Fault)>, // ids of layouts with too many tensors, and their faults
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

    /// Returns the largest version to accept, in bytes.
    pub fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// Sets the number of tensors that the user's model has.
    pub fn expect_tensors(&mut self, count: usize) {
        self.tensors_max = TENSORS_UNKNOWN_MAX.max(count.saturating_mul(2));
    }

    /// Returns the size in bytes of the largest layout to accept.
    pub fn layout_bytes_max(&self) -> u64 {
        (self.bytes_max / LAYOUT_MEMORY).clamp(LAYOUT_BYTES_GUARANTEED, LAYOUT_BYTES_MAX + 8)
    }

    /// Returns a fault if a layout is too large for this worker, or for the version's data.
    fn size_fault(&self, announce: &Announce) -> Option<Fault> {
        let (nbytes, most) = (announce.layout_bytes, self.layout_bytes_max());
        if nbytes > most {
            let text = format!("a layout of {} bytes; this worker accepts at most {}", nbytes, most);
            return Some(("too-large", text + ": raise its bytes_max if that is meant"));
        }
        let most = LAYOUT_BYTES_GUARANTEED + announce.nbytes;
        (nbytes > most).then(|| {
            let text = format!("a layout of {} bytes for {} bytes of weights", nbytes, announce.nbytes);
            ("too-large", format!("{}; at most {} are allowed", text, most))
        })
    }

    pub fn require_sealed(&mut self) {
        self.sealed = true;
    }

    /// Returns the layout of an announced version, if it is known.
    pub fn layout(&self, announce: &Announce) -> Option<Arc<Layout>> {
        let known = self.known.iter().find(|known| known.layout.id == announce.layout);
        known.map(|known| known.layout.clone())
    }

    /// Adds a layout that came with an announcement. Returns a fault if the layout is not accepted.
    pub fn learn(&mut self, announce: &Announce, header: &[u8]) -> Result<(), Fault> {
        let invalid = |text| ("layout-invalid", text);
        if let Some(fault) = self.size_fault(announce) {
            return Err(fault); // before the layout is parsed
        }
        if header.len() as u64 != announce.layout_bytes {
            let (found, announced) = (header.len(), announce.layout_bytes);
            return Err(invalid(format!("the layout has {} bytes, but {} were announced", found, announced)));
        }
        let layout = Layout::parse(header).map_err(|error| invalid(error.to_string()))?;
        if layout.tensors.len() > self.tensors_max && layout.id == announce.layout {
            let text =
                format!("{} tensors; this worker accepts at most {}", layout.tensors.len(), self.tensors_max);
            self.unfit.truncate(LAYOUTS_KEPT - 1);
            self.unfit.push_front((layout.id, ("too-large", text.clone())));
            return Err(("too-large", text));
        }
        if layout.id != announce.layout {
            let (found, announced) = (layout.id, &announce.layout);
            return Err(invalid(format!("the layout hashes to {}, but {} was announced", found, announced)));
        }
        if self.layout(announce).is_none() {
            self.known.truncate(LAYOUTS_KEPT - 1);
            self.known.push_front(KnownLayout { layout: Arc::new(layout), accepted: false });
        }
        Ok(())
    }

    /// Returns the reason that a version cannot be accepted; `None` if no reason is known yet.
    pub fn fault(&mut self, announce: &Announce, host: &dyn Host) -> Option<Fault> {
        let nbytes = announce.nbytes;
        let encryption = self.sealed.then_some(AES_256_GCM);
        if announce.encoding != "raw" || announce.encryption.as_deref() != encryption {
            let what = format!("encoding {:?}, encryption {:?}", announce.encoding, announce.encryption); // E1
            let taken = format!("; this worker accepts \"raw\" and encryption {:?}", encryption);
            return Some(("unsupported", what + &taken));
        }
        if nbytes > self.bytes_max {
            let text = format!("{} bytes; this worker accepts at most {}", nbytes, self.bytes_max);
            return Some(("too-large", text + ": raise its bytes_max if that is meant"));
        }
        if let Some(fault) = self.size_fault(announce) {
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

impl KnownLayout {
    fn fault(&mut self, announce: &Announce, host: &dyn Host) -> Option<Fault> {
        let (announced, found) = (announce.nbytes, self.layout.nbytes);
        if found != announced {
            let text = format!("{} bytes were announced, but the layout holds {}", announced, found);
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
