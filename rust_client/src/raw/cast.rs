//! Casts between numbers and bytes.

use crate::element::*;
use std::mem::{align_of, size_of, size_of_val};
use std::slice;

/// A type without padding, for which every bit pattern is a valid value.
///
/// # Safety
///
/// Any initialised bytes must be a valid value, and all bytes of a value must be initialised.
pub unsafe trait Plain: Copy + Send + Sync + 'static {}

macro_rules! plain {
    ($($t:ty),*) => {
        // SAFETY: numbers have no padding and no invalid values.
        $(unsafe impl Plain for $t {})*
    };
}
plain!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);

macro_rules! transparent {
    ($($t:ty),*) => {
        // SAFETY: each type is `repr(transparent)` around numbers.
        $(unsafe impl Plain for $t {})*
    };
}
transparent!(
    Bool, F4Pair, F6E2M3Byte, F6E3M2Byte, F8E5M2, F8E4M3, F8E8M0, F8E4M3Fnuz, F8E5M2Fnuz, F16, BF16, C64
);

#[cfg(feature = "half")]
transparent!(half::f16, half::bf16);

/// Returns the bytes of some numbers.
pub fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: `Plain` has no uninitialised bytes; address, size and lifetime are those of `values`.
    unsafe { slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// Returns the bytes of some numbers, for writing.
pub fn bytes_of_mut<T: Plain>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as in `bytes_of`; any bytes are valid values of `Plain`, and the borrow is unique.
    unsafe { slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// Returns bytes as numbers; `None` if the bytes are misaligned, or end within a number.
pub fn values_of<T: Plain>(bytes: &[u8]) -> Option<&[T]> {
    let size = size_of::<T>();
    if size == 0 || bytes.len() % size != 0 || bytes.as_ptr() as usize % align_of::<T>() != 0 {
        return None;
    }
    // SAFETY: alignment and length were checked, and any bytes are valid values of `Plain`.
    Some(unsafe { slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size) })
}

/// Returns the numbers in bytes of any alignment. An incomplete last number is dropped.
pub fn copied<T: Plain>(bytes: &[u8]) -> Vec<T> {
    let whole = bytes.chunks_exact(size_of::<T>().max(1));
    // SAFETY: each piece has the bytes of one value, and any bytes are valid values of `Plain`.
    whole.map(|piece| unsafe { piece.as_ptr().cast::<T>().read_unaligned() }).collect()
}
