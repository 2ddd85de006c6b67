//! Decodes the bodies of blocks: finds the elements that change, and their new values.
//!
//! A block with classes is read 64 elements at a time. Each byte of a 128-bit number counts the
//! elements of one class. The elements are classified one by one only if some of these 64 elements
//! change.

use super::bits::{number, Reader};
use super::format::{Kind, Large, Row, Table, CLASSES, RICE_MAX};
use super::Fault;
use std::convert::TryInto;

const WINDOW: usize = 64;
const NEVER: u32 = u32::MAX; // above the rank of any element
const NO_CLASS: u8 = CLASSES as u8; // for indices after the last element of the last window

/// Decoded changes: the positions of elements in their blocks and, for steps, the new values.
#[derive(Default)]
pub struct Changes {
    pub at: Vec<u32>,
    pub values: Vec<u16>,
}

impl Changes {
    pub fn nbytes(&self) -> usize {
        4 * self.at.len() + 2 * self.values.len()
    }

    pub fn clear(&mut self) {
        self.at.clear();
        self.values.clear();
    }
}

/// Reusable memory for the steps of one block.
#[derive(Default)]
pub struct Scratch {
    ranks: Vec<u32>,
    steps: Vec<i32>,
    large: Vec<u32>, // indices of a class's steps with a size above 1
    sizes: Vec<u32>,
}

/// Reads the body of a block of steps, and appends the changes. `block` is the block's bytes in the
/// base.
pub fn read(
    body: &[u8],
    table: &Table,
    block: &[u8],
    kind: Kind,
    scratch: &mut Scratch,
    changes: &mut Changes,
) -> Result<(), Fault> {
    let (mut reader, elements) = (Reader::new(body), block.len() / 2);
    let counts = counts(&mut reader, table, elements)?;
    scratch.ranks.clear();
    scratch.steps.clear();
    for (row, &(count, large)) in table.rows.iter().zip(&counts) {
        scratch.read_class(&mut reader, row, count, large, elements)?;
    }
    reader.check_end()?;
    changes.at.reserve(scratch.ranks.len());
    changes.values.reserve(scratch.ranks.len());
    let mut put = |at: u32, step: i32| -> Result<(), Fault> {
        let ordinal = ordinal_of(element(&block[2 * at as usize..])) + step;
        let ordinal = u16::try_from(ordinal)
            .map_err(|_| "a step leads beyond 16 bits: is the patch applied to the wrong base?")?;
        changes.at.push(at);
        changes.values.push(if ordinal & 0x8000 == 0 { !ordinal } else { ordinal & 0x7fff });
        Ok(())
    };
    if table.classes == 1 {
        let mut steps = scratch.ranks.iter().zip(&scratch.steps);
        return steps.try_for_each(|(&at, &step)| put(at, step));
    }
    find_changes(block, kind, cursors(table, &counts), scratch, &mut put)
}

/// Returns, for each class, the number of steps and the number of large steps. Returns an error if
/// the block has fewer elements, or the body fewer bytes, than that many steps need.
fn counts(reader: &mut Reader, table: &Table, elements: usize) -> Result<Vec<(usize, usize)>, Fault> {
    let mut counts = Vec::with_capacity(table.rows.len());
    let mut total = 0;
    for row in &table.rows {
        let count = reader.number(row.count)? as usize;
        let large = match row.large {
            Large::Some(width, _) => reader.number(width)? as usize,
            _ => 0,
        };
        if large > count {
            return Err("it has more large steps than steps");
        }
        total += count;
        counts.push((count, large));
    }
    if total > elements || 2 * total > reader.remaining() {
        return Err("it has more steps than its elements or its bits allow");
    }
    Ok(counts)
}

impl Scratch {
    /// Reads the steps of a class, and the ranks of the changed elements within the class.
    fn read_class(
        &mut self,
        reader: &mut Reader,
        row: &Row,
        count: usize,
        large: usize,
        elements: usize,
    ) -> Result<(), Fault> {
        let begin = self.steps.len();
        reader.positions(count, row.gap, elements, &mut self.ranks)?;
        reader.signs(count, &mut self.steps)?;
        let steps = &mut self.steps[begin..];
        match row.large {
            Large::None => {}
            Large::Every => {
                reader.golomb(count, row.size, &mut self.sizes)?;
                for (step, &size) in steps.iter_mut().zip(&self.sizes) {
                    *step *= size as i32 + 1;
                }
            }
            Large::Some(_, gap) => {
                self.large.clear();
                reader.positions(large, gap, count, &mut self.large)?;
                reader.golomb(large, row.size, &mut self.sizes)?;
                for (&index, &size) in self.large.iter().zip(&self.sizes) {
                    steps[index as usize] *= size as i32 + 2;
                }
            }
        }
        Ok(())
    }
}

#[inline]
pub fn element(bytes: &[u8]) -> u16 {
    u16::from_le_bytes([bytes[0], bytes[1]])
}

/// Returns the position of a 16-bit float or integer in the order of all values of its dtype.
#[inline]
pub fn ordinal_of(element: u16) -> i32 {
    i32::from(if element & 0x8000 == 0 { element | 0x8000 } else { !element })
}

/// Returns the class of an element. `upper` is the element without its lowest 7 bits.
const fn class_of(upper: usize, f16: bool) -> usize {
    if f16 {
        return upper >> 4 & 15;
    }
    let exponent = upper & 255;
    match exponent {
        0..=95 => 0,
        96..=125 => (exponent - 96) >> 1,
        _ => CLASSES - 1,
    }
}

/// Tables by the upper 9 bits of an element: its class, and a number that counts one in this class.
pub struct Classes {
    of: [u8; 512],
    ones: [u128; 512],
}

const fn classes(f16: bool) -> Classes {
    let mut classes = Classes { of: [0; 512], ones: [0; 512] };
    let mut upper = 0;
    while upper < 512 {
        let class = class_of(upper, f16);
        classes.of[upper] = class as u8;
        classes.ones[upper] = 1 << (8 * class);
        upper += 1;
    }
    classes
}

pub static BF16: Classes = classes(false);
pub static F16: Classes = classes(true);

impl Classes {
    /// Counts the elements of each class: each byte of the result is one count, and the lowest byte
    /// is that of the first class. There are at most 255 elements, so no count overflows.
    #[inline]
    pub fn count(&self, elements: &[u8]) -> u128 {
        let ones = elements.chunks_exact(2).map(|bytes| self.ones[usize::from(element(bytes) >> 7)]);
        ones.fold(0, |sum: u128, one| sum.wrapping_add(one))
    }

    /// Returns the class of an element.
    #[inline]
    pub fn of(&self, element: u16) -> usize {
        self.of[usize::from(element >> 7)].into()
    }

    fn classes_of(&self, window: &[u8]) -> [u8; WINDOW] {
        let mut found = [NO_CLASS; WINDOW];
        for (class, bytes) in found.iter_mut().zip(window.chunks_exact(2)) {
            *class = self.of(element(bytes)) as u8;
        }
        found
    }
}

/// Returns a mask with a bit for each element: the bit is set if the element is of this class.
fn mask_of(classes: &[u8; WINDOW], class: usize) -> u64 {
    const EACH: u64 = 0x0101_0101_0101_0101;
    const TOGETHER: u64 = 0x0102_0408_1020_4080; // gathers the bytes' lowest bits in the highest
    classes.chunks_exact(8).rev().fold(0, |mask, bytes| {
        let word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
        let differs = word ^ (class as u64 * EACH); // per byte: 0 for this class, else at most 31
        let same = !(differs + 0x7f * EACH) >> 7 & EACH;
        mask << 8 | same.wrapping_mul(TOGETHER) >> 56
    })
}

/// The steps of a class that are not used yet: indices `next` to `end` of `Scratch::steps`.
struct Cursor {
    class: usize,
    next: usize,
    end: usize,
    seen: u32, // number of elements of the class up to the last position that was examined
}

fn cursors(table: &Table, counts: &[(usize, usize)]) -> Vec<Cursor> {
    let mut end = 0;
    let all = table.rows.iter().zip(counts).map(|(row, &(count, _))| {
        end += count;
        Cursor { class: row.class, next: end - count, end, seen: 0 }
    });
    all.filter(|cursor| cursor.next < cursor.end).collect()
}

/// Finds the changed elements by their ranks within their classes, and calls `put` with the
/// position and the step of each.
fn find_changes(
    block: &[u8],
    kind: Kind,
    mut cursors: Vec<Cursor>,
    scratch: &Scratch,
    put: &mut impl FnMut(u32, i32) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let classes = if kind == Kind::F16 { &F16 } else { &BF16 };
    let rank = |cursor: &Cursor| if cursor.next < cursor.end { scratch.ranks[cursor.next] } else { NEVER };
    for (index, window) in block.chunks(2 * WINDOW).enumerate() {
        let counts = classes.count(window).to_le_bytes();
        let mut classified = None;
        for cursor in &mut cursors {
            let past = cursor.seen + u32::from(counts[cursor.class]);
            if rank(cursor) < past {
                let classified = classified.get_or_insert_with(|| classes.classes_of(window));
                let mut mask = mask_of(classified, cursor.class);
                while rank(cursor) < past {
                    for _ in cursor.seen..rank(cursor) {
                        mask &= mask - 1;
                    }
                    put((index * WINDOW) as u32 + mask.trailing_zeros(), scratch.steps[cursor.next])?;
                    mask &= mask - 1;
                    cursor.seen = rank(cursor) + 1;
                    cursor.next += 1;
                }
            }
            cursor.seen = past;
        }
    }
    if cursors.iter().all(|cursor| cursor.next == cursor.end) {
        Ok(())
    } else {
        Err("the patch refers past the last element of a class: is it applied to the wrong base?")
    }
}

/// Reads the positions of the overwritten elements from a body, and appends them to `at`. The new
/// elements are at the end of the body.
pub fn read_overwrite(body: &[u8], width: usize, elements: usize, at: &mut Vec<u32>) -> Result<(), Fault> {
    const FAULT: Fault = "it names more elements than the block or its bits allow";
    let (head, rest) = body.split_at(body.len().min(3));
    let (count, k) = (number(head) as usize & 0x7_ffff, number(head) as u32 >> 19);
    let codes = rest.len().checked_sub(count * width).ok_or(FAULT)?;
    if head.len() < 3 || count == 0 || count > elements.min(8 * codes) || k > RICE_MAX {
        return Err(FAULT);
    }
    let mut reader = Reader::new(&rest[..codes]);
    at.reserve(count);
    reader.positions(count, k, elements, at)?;
    reader.check_end()
}
