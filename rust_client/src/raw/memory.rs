//! Memory that somebody else owns, such as a C program, as a tensor.

use crate::dtype::Dtype;
use crate::model::{Memory, Tensor};
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
