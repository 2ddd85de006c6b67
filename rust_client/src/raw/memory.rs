//! Memory that somebody else owns, such as a C program, as a tensor; and memory that a model's tensors share.

use crate::dtype::Dtype;
use crate::layout::Layout;
use crate::model::{Memory, Tensor};
use crate::raw::map::{self, TABLE_BYTES};
use std::alloc;
use std::cmp::Reverse;
use std::slice;

struct Raw {
    begin: *mut u8,
    nbytes: usize,
}

// SAFETY: it is nobody's but the model's for as long as that lives, says `Tensor::from_raw_parts`.
unsafe impl Send for Raw {}
unsafe impl Sync for Raw {}

impl Memory for Raw {
    fn bytes(&self) -> &[u8] {
        if self.nbytes == 0 {
            return &[]; // its address may be none
        }
        // SAFETY: `Tensor::from_raw_parts` says that it is there, and that nobody else writes to it.
        unsafe { slice::from_raw_parts(self.begin, self.nbytes) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        if self.nbytes == 0 {
            return &mut [];
        }
        // SAFETY: as above, and nobody else reads it while `self` is borrowed alone.
        unsafe { slice::from_raw_parts_mut(self.begin, self.nbytes) }
    }
}

impl Tensor {
    /// Makes a tensor of memory that is not this crate's to free. Where it is not aligned for the dtype,
    /// `numbers` finds no numbers; `bytes` serves any.
    ///
    /// # Safety
    ///
    /// From now until every clone of the model with this tensor, and every worker that has it, is
    /// dropped, `begin` must point to `nbytes` initialised bytes; nobody else may write to them; and
    /// others may read them only while this model is being read (`Model::read`).
    pub unsafe fn from_raw_parts(
        name: impl Into<String>,
        dtype: Dtype,
        shape: &[u64],
        begin: *mut u8,
        nbytes: usize,
    ) -> Tensor {
        Tensor::of(name.into(), dtype, shape, Box::new(Raw { begin, nbytes }))
    }
}

/// So many zeros, of which the kernel makes pages when they are touched; nothing where there is no memory.
pub fn zeros(words: usize) -> Option<Vec<u64>> {
    if words == 0 {
        return Some(Vec::new());
    }
    let layout = alloc::Layout::array::<u64>(words).ok()?;
    // SAFETY: it is for some bytes.
    let start: *mut u64 = unsafe { alloc::alloc_zeroed(layout) }.cast();
    // SAFETY: the allocator of `Vec` gave it, for this layout; zeros are numbers.
    (!start.is_null()).then(|| unsafe { Vec::from_raw_parts(start, words, words) })
}

/// Where all tensors of a model lie, as they do in what a publisher sends: a version that lies in pages of
/// its own gets here by an exchange of pages. The tensors stay where they are.
pub struct Home {
    memory: map::Memory,
    begins: Vec<u64>, // of the tensors, in their order
}

impl Home {
    /// Has tensors of zeros move in, and has to live as long as they do. Nothing if it is not worth it, or
    /// there is no memory.
    pub fn of(tensors: &mut [Tensor]) -> Option<Home> {
        let nbytes = tensors.iter().map(|tensor| tensor.bytes().len()).sum();
        if nbytes < TABLE_BYTES {
            return None;
        }
        let memory = map::Memory::new(nbytes, false).ok()?;
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        order.sort_by_key(|&at| (Reverse(tensors[at].dtype() as usize), tensors[at].name().to_owned()));
        let (mut begins, mut begin) = (vec![0; tensors.len()], 0);
        for at in order {
            let nbytes = tensors[at].bytes().len();
            // SAFETY: all tensors together fill the memory.
            let part = Raw { begin: unsafe { memory.start().add(begin) }, nbytes };
            tensors[at].move_to(Box::new(part)); // nobody else has this part, and it stays where it is
            begins[at] = begin as u64;
            begin += nbytes;
        }
        Some(Home { memory, begins })
    }

    /// Exchanges what its tensors hold with a version; not if that lies in another way. Nobody looks at
    /// them: they are borrowed alone.
    pub fn exchange(&mut self, tensors: &mut [Tensor], layout: &Layout, version: &mut map::Memory) -> bool {
        let fits = tensors.iter().zip(&self.begins).all(|(tensor, &begin)| {
            let info = layout.get(tensor.name());
            info.map_or(false, |info| info.dtype == tensor.dtype() && info.begin == begin)
        });
        fits && self.memory.exchange(version)
    }
}
