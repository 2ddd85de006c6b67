//! Tensors in memory that this crate does not own, such as a C program's, and `Home`, one memory
//! for all tensors of a model.

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

// SAFETY: `Tensor::from_raw_parts` requires that only the model uses this memory while it lives.
unsafe impl Send for Raw {}
unsafe impl Sync for Raw {}

impl Memory for Raw {
    fn bytes(&self) -> &[u8] {
        if self.nbytes == 0 {
            return &[]; // `begin` may be null
        }
        // SAFETY: `Tensor::from_raw_parts` requires that the memory is valid, and that no other
        // code writes to it.
        unsafe { slice::from_raw_parts(self.begin, self.nbytes) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        if self.nbytes == 0 {
            return &mut [];
        }
        // SAFETY: as in `bytes`. No other code reads the memory while `self` is mutably borrowed.
        unsafe { slice::from_raw_parts_mut(self.begin, self.nbytes) }
    }
}

impl Tensor {
    /// Makes a tensor of memory that this crate does not free. If the memory is not aligned for the
    /// dtype, `numbers` returns an error, but `bytes` works.
    ///
    /// # Safety
    ///
    /// All of the following must hold until every clone of the model with this tensor, and every
    /// worker that has the model, is dropped. `begin` points to `nbytes` initialised bytes. No
    /// other code writes to these bytes. Other code reads them only while this model is being read
    /// (`Model::read`).
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

/// Returns `words` zeroed words, or `None` if the allocation fails. The kernel allocates each page
/// at its first access.
pub fn zeros(words: usize) -> Option<Vec<u64>> {
    if words == 0 {
        return Some(Vec::new());
    }
    let layout = alloc::Layout::array::<u64>(words).ok()?;
    // SAFETY: the layout is not empty.
    let start: *mut u64 = unsafe { alloc::alloc_zeroed(layout) }.cast();
    // SAFETY: `start` was allocated as `Vec` allocates, with this layout. Zeros are valid numbers.
    (!start.is_null()).then(|| unsafe { Vec::from_raw_parts(start, words, words) })
}

/// One memory for all tensors of a model, at the offsets that they have in a published data section.
/// A version is moved here by an exchange of pages, which does not change the tensors' addresses.
pub struct Home {
    memory: map::Memory,
    begins: Vec<u64>, // offset of each tensor in `memory`, in the order of the model
}

impl Home {
    /// Moves zeroed tensors into one new memory; keep the result as long as the tensors. Returns
    /// `None` if the tensors have less than `TABLE_BYTES` together, or if the allocation fails.
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
            // SAFETY: `begin` is within the memory, which all tensors together fill.
            let part = Raw { begin: unsafe { memory.start().add(begin) }, nbytes };
            tensors[at].move_to(Box::new(part)); // no other tensor has this part; it never moves
            begins[at] = begin as u64;
            begin += nbytes;
        }
        Some(Home { memory, begins })
    }

    /// Exchanges the content of the tensors with the content of a version. Returns false, with
    /// nothing changed, if the version has its tensors at other positions. The mutable borrow
    /// excludes readers.
    pub fn exchange(&mut self, tensors: &mut [Tensor], layout: &Layout, version: &mut map::Memory) -> bool {
        let fits = tensors.iter().zip(&self.begins).all(|(tensor, &begin)| {
            let info = layout.get(tensor.name());
            info.map_or(false, |info| info.dtype == tensor.dtype() && info.begin == begin)
        });
        fits && self.memory.exchange(version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Model;
    use crate::tests::layout;
    use std::time::{Duration, Instant};

    const ONE: &str = r#"{"embed":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;
    const OTHER: &str = r#"{"head":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;
    const TIED: &str =
        r#"{"__metadata__":{"head":"embed"},"embed":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;
    const TWO: &str = r#"{"embed":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"head":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}"#;

    fn over(name: &str, shape: &[u64], memory: *mut u8, at: usize) -> Tensor {
        let nbytes = shape.iter().product::<u64>() as usize;
        // SAFETY: each test keeps the memory for as long as its model, and accesses it only through
        // that.
        unsafe { Tensor::from_raw_parts(name, Dtype::U8, shape, memory.add(at), nbytes) }
    }

    /// Applies a version. Returns the tensors that differ.
    fn apply(model: &Model, layout: &Layout, data: &[u8]) -> Option<String> {
        let writing = model.write(Instant::now() + Duration::from_secs(20), &|| true).unwrap();
        let copy = |begin: usize, to: &mut [u8]| to.copy_from_slice(&data[begin..begin + to.len()]);
        let differ = writing.tie_fault(layout, copy);
        if differ.is_none() {
            writing.fill(layout, copy);
        }
        differ
    }

    #[test]
    fn memory_of_two_names_is_filled_by_either_or_by_both_with_equal_bytes() {
        let mut memory = [0u8; 4];
        let begin = memory.as_mut_ptr();
        let model = Model::new([over("embed", &[2], begin, 1), over("head", &[2], begin, 1)]).unwrap();
        assert_eq!(model.nbytes(), 2);
        let holds = |bytes: [u8; 2]| {
            let weights = model.read();
            ["embed", "head"].iter().all(|name| weights.get::<u8>(name).unwrap() == bytes)
        };
        for (value, json) in [ONE, OTHER, TIED, TWO].iter().enumerate() {
            for &partial in &[false, true] {
                assert_eq!(model.fault(&layout(json), partial, partial), None, "{}", json);
            }
            let data = [value as u8, 7, value as u8, 7];
            assert_eq!(apply(&model, &layout(json), &data), None);
            assert!(holds([value as u8, 7]), "{}", json);
        }
        let said = apply(&model, &layout(TWO), &[1, 2, 1, 3]).unwrap();
        assert!(said.starts_with("embed and head are one tensor here"), "{}", said);
        assert!(holds([3, 7]), "something was written");
    }

    #[test]
    fn what_no_published_tensor_reaches_is_a_fault_and_one_name_of_several_is_enough() {
        let mut memory = [0u8; 4];
        let begin = memory.as_mut_ptr();
        let apart = Model::new([over("embed", &[2], begin, 0), over("head", &[2], begin, 2)]).unwrap();
        let said = apart.fault(&layout(ONE), false, false);
        assert_eq!(said.unwrap(), "head: U8 [2] in the target, not published");
        let alone = Model::new([over("head", &[2], begin, 0)]).unwrap();
        assert_eq!(alone.fault(&layout(TIED), false, false), None);
        assert_eq!(apply(&alone, &layout(TIED), &[4, 5]), None);
        let mut gathered = [0; 2];
        let copy = |at: usize, from: &[u8]| {
            gathered[at..at + from.len()].copy_from_slice(from);
            true
        };
        assert!(alone.gather(&layout(TIED), Instant::now(), copy));
        assert_eq!(gathered, [4, 5]);
    }

    /// Plays a case of `ties.json`. Returns its outcome, and the memory.
    fn played(case: &serde_json::Value) -> (Option<&'static str>, Vec<u8>) {
        let mut memory = vec![0u8; case["memory"].as_u64().unwrap() as usize];
        let begin = memory.as_mut_ptr();
        let tensors = case["target"].as_object().unwrap().iter().map(|(name, tensor)| {
            let shape: Vec<u64> =
                tensor["shape"].as_array().unwrap().iter().map(|size| size.as_u64().unwrap()).collect();
            let dtype = Dtype::named(tensor["dtype"].as_str().unwrap()).unwrap();
            let nbytes = shape.iter().product::<u64>() as usize;
            // SAFETY: the memory outlives the model, and is read once that is gone.
            unsafe {
                let at = begin.add(tensor["at"].as_u64().unwrap() as usize);
                Tensor::from_raw_parts(name, dtype, &shape, at, nbytes)
            }
        });
        let kind = match Model::new(tensors.collect::<Vec<_>>()) {
            Err(_) => Some("memory"),
            Ok(model) => {
                let layout = layout(case["layout"].as_str().unwrap());
                let data = crate::digest::bytes_of_hex(case["data"].as_str().unwrap());
                if model.fault(&layout, case["partial"].as_bool().unwrap(), false).is_some() {
                    Some("layout")
                } else {
                    apply(&model, &layout, &data).map(|_| "differ")
                }
            }
        };
        (kind, memory)
    }

    #[test]
    fn what_is_one_tensor_is_as_in_the_vectors_that_all_clients_share() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/ties.json");
        let table: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let cases = table["cases"].as_array().unwrap();
        assert!(!cases.is_empty());
        for case in cases {
            let (kind, memory) = played(case);
            assert_eq!(kind, case["expect"]["error"].as_str(), "{}", case["name"]);
            let held =
                case["expect"]["ok"].as_str().map_or(vec![0; memory.len()], crate::digest::bytes_of_hex);
            assert_eq!(memory, held, "{}", case["name"]);
        }
    }

    #[test]
    fn tensors_that_share_a_part_of_their_memory_are_named() {
        let mut memory = [0u8; 8];
        let begin = memory.as_mut_ptr();
        type Placed<'a> = (&'a [u64], usize); // shape and position
        let cases: [(Placed<'_>, Placed<'_>, bool); 6] = [
            ((&[6], 0), (&[6], 2), false),
            ((&[8], 0), (&[1], 2), false),
            ((&[8], 0), (&[2, 4], 0), false),
            ((&[4], 0), (&[4], 4), true),
            ((&[4], 0), (&[4], 0), true),
            ((&[8], 0), (&[0], 3), true),
        ];
        for ((a, a_at), (b, b_at), fits) in cases {
            let made = Model::new([over("a", a, begin, a_at), over("b", b, begin, b_at)]);
            let said = made.err().map(|error| error.to_string());
            let named = said.as_ref().map_or(false, |said| said.contains(r#""a" and "b" share a part"#));
            assert_eq!((said.is_none(), named), (fits, !fits), "{:?}", said);
        }
    }
}
