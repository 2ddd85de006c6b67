//! Estimates the size of a patch from a sample, without a scan of both versions.
//!
//! A patch is a little larger than two entropies together: that of the positions of the changed
//! elements, and that of their new values. If the changes are coded by class (`encode.rs`), the
//! positions take fewer bytes, but the coding takes longer. So the fastest links need whole
//! versions, the slowest links patches with classes, and links in between patches without classes.
//!
//! A `Pair` has two numbers: for patches without classes, and for patches with classes. The
//! constants were measured, and equal those of the Python publisher (`codecs/delta/worth.py`).

use super::format::{groups, Block, Kind, HEADER_BYTES};
use crate::dtype::Dtype;
use crate::layout::Layout;
use std::ops::Range;

const SAMPLES: usize = 64; // blocks that are sampled, at most
const SAMPLE_BYTES: usize = 1 << 18; // bytes that are sampled in all of these blocks
const STEPS: usize = 1 << 12; // number of steps whose size is sampled
const STEP_BITS: f64 = 2.0; // for size 1 and the sign; a larger size adds twice its logarithm
const CLASS_SHARE: f64 = 0.7; // share of the positions' entropy that remains with classes
const SAMPLE_BLOCKS: usize = 2; // for measuring the encoding: a megabyte of 16-bit elements
const CHANGED: f64 = 40.0; // additional cost of a changed element; comparing any element costs 1
const WORTH: f64 = 1.1; // a patch must save this many times its cost, since rates are rough

pub type Pair = [f64; 2];

/// Estimated cost of patches.
#[derive(Clone, Copy, Debug)]
pub struct Estimate {
    /// Size in bytes without classes, and with classes.
    pub sizes: Pair,
    /// Time to make or decode the patch, relative to a patch without changes.
    pub work: f64,
}

/// How to make a patch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Way {
    pub classes: bool,
    /// `Estimate::work`; 0 if unknown.
    pub work: f64,
}

/// Returns how to make the patch that arrives first; `None` if the whole version arrives earlier.
///
/// `nbytes` is the size of the version, and `rate` is the rate of the link in bytes a second.
/// `encode` and `decode` are the seconds per byte of an unchanged version, here and at the worker.
pub fn chosen(nbytes: f64, estimate: &Estimate, rate: f64, encode: Pair, decode: Pair) -> Option<Way> {
    let cost = |classes: usize| (encode[classes] + decode[classes]) * nbytes * estimate.work;
    let seconds = |classes: usize| cost(classes) + estimate.sizes[classes] / rate;
    let classes = seconds(1) < seconds(0);
    let saved = (nbytes - estimate.sizes[usize::from(classes)]) / rate;
    (saved > WORTH * cost(usize::from(classes))).then_some(Way { classes, work: estimate.work })
}

/// True if some patch may save time over a link of this rate: the smallest one, without changes.
pub fn may_pay(rate: f64, encode: Pair, decode: Pair) -> bool {
    chosen(1.0, &Estimate { sizes: [0.0; 2], work: 1.0 }, rate, encode, decode).is_some()
}

/// Estimates the cost of patches that turn the data section `base` into `target`.
pub fn estimate(layout: &Layout, base: &[u8], target: &[u8]) -> Estimate {
    let blocks: Vec<Block> = groups(layout).flatten().collect();
    let step = (blocks.len() / SAMPLES).max(1);
    let blocks: Vec<Block> = blocks.into_iter().skip(step / 2).step_by(step).collect();
    let mut kinds: Vec<(usize, Kind, Vec<Range<usize>>)> = Vec::new();
    for block in &blocks {
        let begin = block.begin + block.nbytes() / block.width / 3 * block.width;
        let elements = (SAMPLE_BYTES / blocks.len() / block.width).max(1);
        let range = begin..block.end.min(begin + elements * block.width);
        match kinds.iter_mut().find(|(width, kind, _)| (*width, *kind) == (block.width, block.kind)) {
            Some((_, _, ranges)) => ranges.push(range),
            None => kinds.push((block.width, block.kind, vec![range])),
        }
    }
    let mut all = SampleTotals::default();
    for (width, kind, ranges) in kinds {
        all.add(width, kind, &ranges, base, target);
    }
    let size =
        |bits: f64| HEADER_BYTES as f64 + (bits / 8.0 / all.seen.max(1.0) * layout.nbytes as f64).ceil();
    let work = 1.0 + CHANGED * all.changed / all.elements.max(1.0);
    Estimate { sizes: all.bits.map(size), work }
}

/// The estimated bits of the sampled elements, and the size of the sample.
#[derive(Default)]
struct SampleTotals {
    bits: Pair,
    changed: f64,
    elements: f64,
    seen: f64, // bytes
}

impl SampleTotals {
    /// Adds the changes in these byte ranges, whose elements have this width in bytes and this
    /// kind.
    fn add(&mut self, width: usize, kind: Kind, ranges: &[Range<usize>], base: &[u8], target: &[u8]) {
        let differing = |range: &Range<usize>| {
            let (old, new) = (base[range.clone()].chunks(width), target[range.clone()].chunks(width));
            old.zip(new).filter(|(old, new)| old != new)
        };
        let changed: Vec<usize> = ranges.iter().map(|range| differing(range).count()).collect();
        let (change_bits, class_share) = match kind {
            Kind::Plain => (8.0 * width as f64, 1.0),
            _ => {
                let every = (changed.iter().sum::<usize>() / STEPS).max(1);
                let steps = ranges.iter().flat_map(differing).step_by(every);
                (STEP_BITS + 2.0 * mean_log2(steps), CLASS_SHARE)
            }
        };
        for (range, &changed) in ranges.iter().zip(&changed) {
            let (count, changed) = ((range.len() / width) as f64, changed as f64);
            let entropy = count * entropy_of(changed / count);
            for (bits, share) in self.bits.iter_mut().zip([1.0, class_share]) {
                *bits += (share * entropy + change_bits * changed).min(8.0 * width as f64 * count);
            }
            self.changed += changed;
            self.elements += count;
            self.seen += range.len() as f64;
        }
    }
}

/// Returns the entropy of an event with this probability, in bits.
fn entropy_of(share: f64) -> f64 {
    let part = |share: f64| if share > 0.0 { -share * share.log2() } else { 0.0 };
    part(share) + part(1.0 - share)
}

/// Returns the mean binary logarithm of the sizes of steps, given as pairs of old and new elements;
/// 0 if there are none.
fn mean_log2<'a>(steps: impl Iterator<Item = (&'a [u8], &'a [u8])>) -> f64 {
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0i64, |value, &byte| value << 8 | i64::from(byte));
    let (mut sum, mut count) = (0.0, 0.0);
    for (old, new) in steps {
        sum += ((number(new) - number(old)).abs() as f64).log2();
        count += 1.0;
    }
    if count > 0.0 {
        sum / count
    } else {
        0.0
    }
}

/// Returns the dtype and the byte range of the first blocks of the largest group; `None` if the
/// layout has no bytes.
///
/// The time to encode a patch of these blocks is representative, since the blocks of a group share
/// one table.
pub fn sample(layout: &Layout) -> Option<(Dtype, Range<usize>)> {
    let mut largest: Vec<Block> = Vec::new();
    let nbytes = |blocks: &[Block]| blocks.iter().map(Block::nbytes).sum::<usize>();
    for group in groups(layout) {
        if nbytes(&group) > nbytes(&largest) {
            largest = group;
        }
    }
    largest.truncate(SAMPLE_BLOCKS);
    let range = largest.first()?.begin..largest.last()?.end;
    let begin = range.start as u64;
    let first = layout.tensors.iter().find(|tensor| (tensor.begin..tensor.end).contains(&begin))?;
    // a patch treats elements of less than a byte as bytes
    let dtype = if first.dtype.bits() % 8 == 0 { first.dtype } else { Dtype::U8 };
    Some((dtype, range))
}

#[cfg(test)]
mod tests {
    use super::super::{encode, Side};
    use super::*;
    use crate::publisher::content::{Content, Copier};
    use crate::publisher::TensorView;

    const COUNT: u64 = 1 << 18;

    /// Returns two versions in which about this share of the elements differs by one unit.
    fn versions(share: f64) -> (Content, Content) {
        let mut chance = 1u64;
        let mut draw = move || {
            chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (chance >> 33) as f64 / (1u64 << 31) as f64
        };
        let old: Vec<u8> = (0..COUNT)
            .flat_map(|_| {
                let weight = ((0..12).map(|_| draw()).sum::<f64>() - 6.0) * 0.05; // about normal
                ((weight as f32).to_bits() >> 16).to_le_bytes()[..2].to_vec()
            })
            .collect();
        let mut new = old.clone();
        for element in new.chunks_mut(2) {
            element[0] ^= u8::from(draw() < share);
        }
        let content = |bytes: &[u8]| {
            let tensor = TensorView { name: "w", dtype: Dtype::BF16, shape: &[COUNT], bytes };
            Copier::default().copy(&[tensor], 1 << 16).unwrap()
        };
        (content(&old), content(&new))
    }

    #[test]
    fn an_estimate_is_about_right() {
        for share in [0.002, 0.01, 0.05, 0.2] {
            let (old, new) = versions(share);
            let layout = &new.header.layout;
            let would = estimate(layout, old.bytes(), new.bytes());
            assert!((would.work / (1.0 + CHANGED * share) - 1.0).abs() < 0.2, "{}: {:?}", share, would);
            for classes in [false, true] {
                let sides = [&old, &new].map(|its| Side { data: its.bytes(), digest: &its.digest });
                let [old, new] = sides;
                let size = encode(layout, 1 << 16, old, new, classes, &|| true).unwrap().len() as f64;
                let told = would.sizes[usize::from(classes)];
                assert!((0.5 * size..1.5 * size).contains(&told), "{} {}: {} {}", share, classes, size, told);
            }
        }
    }

    #[test]
    fn where_everything_changed_nothing_is_saved() {
        let (old, new) = versions(0.0);
        let other: Vec<u8> = new.bytes().iter().enumerate().map(|(at, byte)| byte ^ (at as u8 | 1)).collect();
        let would = estimate(&new.header.layout, old.bytes(), &other);
        assert!(would.sizes[1] > 0.9 * other.len() as f64 && would.work > 0.9 * CHANGED, "{:?}", would);
    }

    #[test]
    fn classes_are_for_slow_links_and_nothing_is_for_fast_ones() {
        let would = Estimate { sizes: [20_000.0, 14_000.0], work: 1.0 };
        let pace = [1e-10, 2e-10];
        let way = |rate| chosen(1e6, &would, rate, pace, pace).map(|way| way.classes);
        assert_eq!([1e6, 1e8, 5e9].map(way), [Some(true), Some(false), None]);
        assert!(may_pay(1e8, pace, pace) && !may_pay(f64::INFINITY, pace, pace));
    }

    #[test]
    fn a_patch_must_save_a_little_more_than_it_takes() {
        let would = Estimate { sizes: [0.0; 2], work: 1.0 };
        for (gain, pays) in [(WORTH + 0.02, true), (WORTH - 0.02, false)] {
            let rate = 1.0 / (gain * 2e-9);
            assert_eq!(chosen(1e6, &would, rate, [1e-9; 2], [1e-9; 2]).is_some(), pays);
        }
    }

    #[test]
    fn a_sample_is_of_the_largest_group() {
        let view = |name, dtype, shape, bytes| TensorView { name, dtype, shape, bytes };
        let bytes = [0; 6000];
        let tensors = [
            view("a", Dtype::F32, &[5], &bytes[..20]),
            view("b", Dtype::BF16, &[3, 1000], &bytes),
            view("c", Dtype::U8, &[7], &bytes[..7]),
        ];
        let content = Copier::default().copy(&tensors, 100).unwrap();
        let its = content.header.layout.get("b").unwrap();
        let place = its.begin as usize..its.end as usize;
        assert_eq!(sample(&content.header.layout), Some((Dtype::BF16, place)));
        let none = Copier::default().copy(&[], 100).unwrap();
        assert_eq!(sample(&none.header.layout), None);
    }
}
