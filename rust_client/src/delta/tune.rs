//! Chooses the codes for the steps of a group, and writes the bodies of its blocks in these codes.

use super::format::{Large, Row, Table};
use super::scan::Steps;
use super::write::{bit_length, Writer};

const PARAMETERS: u32 = 16; // number of Exp-Golomb parameters
const LENGTHS: usize = 17; // possible bit lengths of a size: 0 to 16

/// The steps of a class with a size above 1, in one or more blocks.
#[derive(Default)]
struct Larges {
    gaps: Vec<u32>,
    sizes: Vec<u32>, // minus 2
}

impl Larges {
    /// Appends the large steps of a block. Returns their number.
    fn extend(&mut self, steps: &[i32]) -> usize {
        let (before, mut next) = (self.gaps.len(), 0);
        for (at, step) in steps.iter().enumerate() {
            let size = step.unsigned_abs();
            if size > 1 {
                self.gaps.push((at - next) as u32);
                self.sizes.push(size - 2);
                next = at + 1;
            }
        }
        self.gaps.len() - before
    }
}

/// Returns the best codes for some blocks. `blocks` has the steps of each block by class.
pub fn table(blocks: &[&[Steps]]) -> Table {
    let classes = blocks.first().map_or(0, |block| block.len());
    let of = |class| row(class, &blocks.iter().map(|block| &block[class]).collect::<Vec<_>>());
    Table { classes, rows: (0..classes).filter_map(of).collect() }
}

fn row(class: usize, blocks: &[&Steps]) -> Option<Row> {
    let counts = || blocks.iter().map(|block| block.gaps.len());
    let (count, most) = (counts().sum::<usize>(), counts().max()?);
    if count == 0 {
        return None;
    }
    let mut larges = Larges::default();
    let large_most = blocks.iter().map(|block| larges.extend(&block.steps)).max()?;
    let (gap, _) = best_rice(blocks.iter().flat_map(|block| block.gaps.iter().copied()), count);
    let (large_gap, gaps_cost) = best_rice(larges.gaps.iter().copied(), larges.gaps.len());
    let (size, sizes_cost) = best_golomb(&larges.sizes, 0, 0);
    let (every, every_cost) = best_golomb(&larges.sizes, 1, count - larges.sizes.len());
    let width = bit_length(large_most as u32);
    let large_cost = gaps_cost + sizes_cost + blocks.len() as u64 * u64::from(width);
    let (large, size) = match width {
        _ if large_cost > every_cost => (Large::Every, every),
        0 => (Large::None, 0),
        _ => (Large::Some(width, large_gap), size),
    };
    Some(Row { class, count: bit_length(most as u32), gap, large, size })
}

/// Returns the best of three Rice parameters near the mean value, and the number of bits that the
/// values then take.
fn best_rice(values: impl Iterator<Item = u32> + Clone, count: usize) -> (u32, u64) {
    if count == 0 {
        return (0, 0);
    }
    let count = count as u64;
    let sum: u64 = values.clone().map(u64::from).sum();
    // the mean of gaps is below 2^18
    let middle = bit_length((sum * 11 / (16 * count)) as u32).saturating_sub(1);
    let cost =
        |k: u32| count * u64::from(1 + k) + values.clone().map(|value| u64::from(value >> k)).sum::<u64>();
    let costs = (middle.saturating_sub(1)..middle + 2).map(|k| (cost(k), k));
    costs.min().map_or((0, 0), |(cost, k)| (k, cost))
}

/// Returns a good Exp-Golomb parameter for sizes, and the number of bits that the sizes then take.
/// `sizes` are the sizes above 1, minus 2, and `more` is added to each. `ones` is the number of
/// sizes that are 1.
fn best_golomb(sizes: &[u32], more: u32, ones: usize) -> (u32, u64) {
    let mut lengths = [0; LENGTHS];
    lengths[0] = ones as u64;
    sizes.iter().for_each(|size| lengths[bit_length(size + 1) as usize] += 1);
    let guess = |k: u32| -> u64 {
        let by_length = lengths.iter().zip(0u32..);
        by_length.map(|(count, length)| count * u64::from(1 + k + 2 * length.saturating_sub(k))).sum()
    };
    let k = (0..PARAMETERS).min_by_key(|&k| guess(k)).unwrap_or(0); // the lowest of equal ones
    let cost = |size: &u32| u64::from(2 * bit_length(size + more + (1 << k)) - 1 - k);
    (k, ones as u64 * u64::from(1 + k) + sizes.iter().map(cost).sum::<u64>())
}

/// Returns the body of a block. `block` has its steps by class.
pub fn body(block: &[Steps], table: &Table) -> Vec<u8> {
    let mut writer = Writer::default();
    let larges = |row: &Row| {
        let mut larges = Larges::default();
        if let Large::Some(..) = row.large {
            larges.extend(&block[row.class].steps);
        }
        larges
    };
    let larges: Vec<Larges> = table.rows.iter().map(larges).collect();
    for (row, larges) in table.rows.iter().zip(&larges) {
        writer.number(block[row.class].gaps.len() as u32, row.count);
        if let Large::Some(width, _) = row.large {
            writer.number(larges.gaps.len() as u32, width);
        }
    }
    for (row, larges) in table.rows.iter().zip(&larges) {
        let Steps { gaps, steps } = &block[row.class];
        writer.rice(gaps, row.gap);
        writer.signs(steps);
        match row.large {
            Large::None => {}
            Large::Every => {
                let sizes: Vec<u32> = steps.iter().map(|step| step.unsigned_abs() - 1).collect();
                writer.golomb(&sizes, row.size);
            }
            Large::Some(_, gap) => {
                writer.rice(&larges.gaps, gap);
                writer.golomb(&larges.sizes, row.size);
            }
        }
    }
    writer.end()
}

/// Returns a body that overwrites elements: the gaps before these elements, then the bytes
/// `elements`.
pub fn overwrite(gaps: &[u32], elements: impl Iterator<Item = u8>) -> Vec<u8> {
    let (k, _) = best_rice(gaps.iter().copied(), gaps.len());
    let mut writer = Writer::default();
    writer.number(gaps.len() as u32 | k << 19, 24);
    writer.rice(gaps, k);
    let mut body = writer.end();
    body.extend(elements);
    body
}
