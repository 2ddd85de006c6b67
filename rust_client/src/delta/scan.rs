//! Compares two blocks: finds the elements that change, and by which steps.
//!
//! Each block is read once, 64 elements at a time. The pass collects what both encodings need
//! (`encode.rs`): all elements as one class, and elements in sixteen classes. All classes are counted
//! at once, each in one byte of a 128-bit number.

use super::format::{Kind, CLASSES};
use super::steps::{element, ordinal_of, Classes, BF16, F16};
use std::convert::TryInto;

const WINDOW: usize = 64;
const SPAN: usize = 2 * WINDOW; // bytes of a window

/// The changes of a block: of all elements, or of one class.
#[derive(Default)]
pub struct Steps {
    /// The number of unchanged elements before each changed element.
    pub gaps: Vec<u32>,
    /// The distance from each changed element's old to its new value, in representable values.
    pub steps: Vec<i32>,
}

impl Steps {
    /// Adds the step of the element with this rank. `next` is the rank after the previous changed
    /// element.
    fn push(&mut self, rank: u32, step: i32, next: &mut u32) {
        self.gaps.push(rank - *next);
        self.steps.push(step);
        *next = rank + 1;
    }
}

/// Compares two blocks of 16-bit elements. Returns all steps, and for floats also the steps by
/// class.
pub fn steps(base: &[u8], target: &[u8], kind: Kind) -> (Steps, Vec<Steps>) {
    match kind {
        Kind::Bf16 => by_class(base, target, &BF16),
        Kind::F16 => by_class(base, target, &F16),
        _ => (flat(base, target), Vec::new()),
    }
}

fn flat(base: &[u8], target: &[u8]) -> Steps {
    let (mut found, mut next) = (Steps::default(), 0);
    for ((old, new), begin) in base.chunks(SPAN).zip(target.chunks(SPAN)).zip((0..).step_by(WINDOW)) {
        let mut mask = differ(old, new);
        while mask != 0 {
            let index = mask.trailing_zeros();
            found.push(begin + index, step(old, new, index), &mut next);
            mask &= mask - 1;
        }
    }
    found
}

fn by_class(base: &[u8], target: &[u8], classes: &Classes) -> (Steps, Vec<Steps>) {
    let (mut all, mut all_next) = (Steps::default(), 0);
    let mut found: Vec<Steps> = (0..CLASSES).map(|_| Steps::default()).collect();
    // for each class: its elements in earlier windows, and the rank after its last changed element
    let (mut seen, mut next) = ([0u32; CLASSES], [0u32; CLASSES]);
    for ((old, new), begin) in base.chunks(SPAN).zip(target.chunks(SPAN)).zip((0..).step_by(WINDOW)) {
        let (mut mask, mut counted, mut counts) = (differ(old, new), 0, 0u128);
        while mask != 0 {
            let index = mask.trailing_zeros();
            counts += classes.count(&old[2 * counted..2 * index as usize]);
            counted = index as usize;
            let class = classes.of(element(&old[2 * counted..]));
            let rank = seen[class] + (counts >> (8 * class) & 255) as u32;
            let step = step(old, new, index);
            all.push(begin + index, step, &mut all_next);
            found[class].push(rank, step, &mut next[class]);
            mask &= mask - 1;
        }
        counts += classes.count(&old[2 * counted..]);
        for (seen, count) in seen.iter_mut().zip(counts.to_le_bytes()) {
            *seen += u32::from(count);
        }
    }
    (all, found)
}

fn step(old: &[u8], new: &[u8], index: u32) -> i32 {
    let at = 2 * index as usize;
    ordinal_of(element(&new[at..])) - ordinal_of(element(&old[at..]))
}

/// Returns a mask with a bit for each element of a window: the bit is set if the element differs.
fn differ(old: &[u8], new: &[u8]) -> u64 {
    if old == new {
        return 0;
    }
    if let (Ok(old), Ok(new)) = (old.try_into(), new.try_into()) {
        return differ_whole(old, new);
    }
    let (mut old_side, mut new_side) = ([0; SPAN], [0; SPAN]); // zeros pad the last window
    old_side[..old.len()].copy_from_slice(old);
    new_side[..new.len()].copy_from_slice(new);
    differ_whole(&old_side, &new_side)
}

fn differ_whole(old: &[u8; SPAN], new: &[u8; SPAN]) -> u64 {
    const LOW: u64 = 0x7fff_7fff_7fff_7fff;
    // a multiplication by this gathers the lowest bits of four elements
    const TOGETHER: u64 = 1 << 48 | 1 << 33 | 1 << 18 | 1 << 3;
    let words = |side: &[u8; SPAN]| {
        let mut words = [0; SPAN / 8];
        for (word, bytes) in words.iter_mut().zip(side.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
        }
        words
    };
    words(old).iter().zip(words(new)).rev().fold(0, |mask, (&old, new)| {
        let bits = old ^ new;
        let highest = (((bits & LOW) + LOW) | bits) & !LOW; // the highest bit of each element that differs
        mask << 4 | (highest >> 15).wrapping_mul(TOGETHER) >> 48 & 15
    })
}

/// Returns the positions of elements of `width` bytes that differ.
pub fn changed(base: &[u8], target: &[u8], width: usize) -> Vec<u32> {
    match width {
        1 => changed_of::<1>(base, target),
        2 => changed_of::<2>(base, target),
        4 => changed_of::<4>(base, target),
        _ => changed_of::<8>(base, target),
    }
}

fn changed_of<const WIDTH: usize>(base: &[u8], target: &[u8]) -> Vec<u32> {
    let mut found = Vec::new();
    let mut next = 0;
    for (old, new) in base.chunks(WINDOW * WIDTH).zip(target.chunks(WINDOW * WIDTH)) {
        if old != new {
            let elements = old.chunks_exact(WIDTH).zip(new.chunks_exact(WIDTH)).zip(next..);
            found.extend(elements.filter(|((old, new), _)| old != new).map(|(_, at)| at));
        }
        next += WINDOW as u32;
    }
    found
}

/// Returns the gap before each of these increasing positions.
pub fn gaps_of(at: &[u32]) -> Vec<u32> {
    let mut next = 0;
    let gap = |&at: &u32| at - std::mem::replace(&mut next, at + 1);
    at.iter().map(gap).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_element_of_a_window_is_told_from_its_neighbours() {
        for length in [1, 2, 63, 64] {
            for at in 0..length {
                for bit in 0..16 {
                    let old: Vec<u8> = (0..2 * length as u8).collect();
                    let mut new = old.clone();
                    new[2 * at + bit / 8] ^= 1 << (bit % 8);
                    assert_eq!(differ(&old, &new), 1 << at);
                    assert_eq!(changed(&old, &new, 2), [at as u32]);
                }
            }
        }
        assert_eq!(differ(&[0; SPAN], &[255; SPAN]), u64::MAX);
    }

    #[test]
    fn ranks_are_counted_within_classes_over_windows() {
        let element = |class: u16| ((96 + 2 * class) << 7).to_le_bytes();
        let base: Vec<u8> = (0..200).flat_map(|at| element(at % 3)).collect();
        let mut target = base.clone();
        for at in [0usize, 3, 100, 199] {
            target[2 * at] += 1;
        }
        let (all, found) = steps(&base, &target, Kind::Bf16);
        assert_eq!((&found[0].gaps[..], &found[0].steps[..]), (&[0, 0][..], &[1, 1][..]));
        assert_eq!(found[1].gaps, [33, 32]); // of 33 before 100, and 66 before 199
        assert!(found[2].gaps.is_empty());
        let (flat, none) = steps(&base, &target, Kind::Integer);
        assert_eq!((&all.gaps, &all.steps), (&flat.gaps, &flat.steps));
        assert_eq!(flat.gaps, [0, 2, 96, 98]);
        assert!(none.is_empty());
    }
}
