//! Patches (encoding `delta-1`): a patch turns one version into another of the same layout, bit for
//! bit.
//!
//! `docs/DELTA.md` at the root defines every byte. The whole patch is checked against the bytes of
//! the base before any byte is written. The check decodes all changes, and keeps decoded changes up
//! to a memory limit. The write uses the kept changes, and decodes the others again.

mod bits;
mod encode;
mod format;
mod scan;
mod steps;
mod tune;
pub mod worth;
mod write;

use crate::digest::digest_while;
use crate::layout::Layout;
pub use encode::{encode, Side};
pub use format::Header;
use format::{Block, Mode, Table};
use std::fmt;
use steps::{Changes, Scratch};

const KEPT_DIVISOR: usize = 8; // no block's changes are kept once the kept ones exceed 1/8 of the data

/// The error text for a malformed block.
type Fault = &'static str;

/// Why a patch is rejected.
#[derive(Clone, Debug, PartialEq)]
pub struct PatchError(pub String);

impl fmt::Display for PatchError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The part of a patch for one block.
#[derive(Debug)]
struct Part<'a> {
    block: Block,
    mode: Mode,
    body: &'a [u8],
    table: usize, // index of the group's table, if the mode is `Steps`
}

/// A patch for a layout.
#[derive(Debug)]
pub struct Patch<'a> {
    pub header: Header,
    parts: Vec<Part<'a>>, // of blocks that change
    tables: Vec<Table>,
}

impl<'a> Patch<'a> {
    /// Parses a patch, and checks everything that can be checked without the base.
    pub fn parse(layout: &Layout, data: &'a [u8]) -> Result<Patch<'a>, PatchError> {
        let header = Header::parse(data)?;
        if header.layout_id != layout.id || header.nbytes != layout.nbytes {
            return Err(PatchError(format!(
                "the patch is for the layout {:.12} of {} bytes; this version has {:.12} of {} bytes",
                header.layout_id, header.nbytes, layout.id, layout.nbytes
            )));
        }
        let mut patch = Patch { header, parts: Vec::new(), tables: Vec::new() };
        let mut at = format::HEADER_BYTES;
        for group in format::groups(layout) {
            patch.parse_group(&group, data, &mut at)?;
        }
        if at < data.len() {
            return Err(PatchError(format!("{} bytes follow the last block", data.len() - at)));
        }
        Ok(patch)
    }

    fn parse_group(&mut self, group: &[Block], data: &'a [u8], at: &mut usize) -> Result<(), PatchError> {
        let mut entries = Vec::with_capacity(group.len());
        for block in group {
            entries.push(format::entry(data, at, block).map_err(|fault| in_block(block, fault))?);
        }
        if entries.iter().any(|&(mode, _)| mode == Mode::Steps) {
            let table = format::table(data, at, group[0].kind);
            self.tables.push(table.map_err(|fault| in_block(&group[0], fault))?);
        }
        for (&block, (mode, nbytes)) in group.iter().zip(entries) {
            let body = data.get(*at..*at + nbytes);
            let body = body.ok_or_else(|| in_block(&block, "the patch ends in its body"))?;
            if mode != Mode::Unchanged {
                self.parts.push(Part { block, mode, body, table: self.tables.len().saturating_sub(1) });
            }
            *at += nbytes;
        }
        Ok(())
    }

    /// Changes `data` from the base of the patch to its target. `digest` is the digest of `data`,
    /// if known. If `data` is not the base, or a block is malformed, returns an error and leaves
    /// `data` unchanged. If the result is not the target, returns an error, and `data` must be
    /// discarded.
    pub fn apply(&self, data: &mut [u8], digest: Option<&str>) -> Result<(), PatchError> {
        self.apply_while(data, digest, &|| true)
    }

    /// Does what `apply` does, but fails soon after `wanted` returns false; `data` may have changed.
    pub fn apply_while(
        &self,
        data: &mut [u8],
        digest: Option<&str>,
        wanted: &dyn Fn() -> bool,
    ) -> Result<(), PatchError> {
        let header = &self.header;
        let digest_of = |data: &[u8]| digest_while(&header.layout_id, header.chunk_bytes, data, wanted);
        let found = digest.map_or_else(|| digest_of(data), str::to_owned);
        if found != header.base {
            return Err(PatchError(format!(
                "the patch is for the base {:.12}, not {:.12}",
                header.base, found
            )));
        }
        self.apply_unchecked_while(data, wanted)?;
        let made = digest_of(data);
        if made != header.target {
            return Err(PatchError(format!(
                "the patch leads to {:.12}, but its header names {:.12}",
                made, header.target
            )));
        }
        Ok(())
    }

    /// Changes all blocks of `data`, or none if one is malformed. Unlike `apply`, checks no digest.
    pub fn apply_unchecked(&self, data: &mut [u8]) -> Result<(), PatchError> {
        self.apply_unchecked_while(data, &|| true)
    }

    /// Does what `apply_unchecked` does, but returns an error before the next block once `wanted`
    /// returns false. Then earlier blocks may have changed.
    fn apply_unchecked_while(&self, data: &mut [u8], wanted: &dyn Fn() -> bool) -> Result<(), PatchError> {
        let go_on = || if wanted() { Ok(()) } else { Err(PatchError("it is no longer needed".to_owned())) };
        if data.len() as u64 != self.header.nbytes {
            let text = format!("a patch for {} bytes, not for {}", self.header.nbytes, data.len());
            return Err(PatchError(text));
        }
        let kept_max = data.len() / KEPT_DIVISOR;
        let (mut scratch, mut kept, mut again) = (Scratch::default(), Changes::default(), Changes::default());
        let mut ends = Vec::new(); // for each of the first parts, the end of its kept changes
        for part in &self.parts {
            go_on()?;
            let block = &data[part.block.begin..part.block.end];
            if kept.nbytes() <= kept_max {
                self.decode(part, block, &mut scratch, &mut kept)?;
                ends.push((kept.at.len(), kept.values.len()));
            } else {
                again.clear();
                self.decode(part, block, &mut scratch, &mut again)?;
            }
        }
        let mut begin = (0, 0);
        for (index, part) in self.parts.iter().enumerate() {
            go_on()?;
            let block = &mut data[part.block.begin..part.block.end];
            if let Some(&end) = ends.get(index) {
                part.write(&kept.at[begin.0..end.0], &kept.values[begin.1..end.1], block);
                begin = end;
            } else {
                again.clear();
                self.decode(part, block, &mut scratch, &mut again)?;
                part.write(&again.at, &again.values, block);
            }
        }
        Ok(())
    }

    /// Returns an error if the patch does not turn the data section `base` into `target`, or once
    /// `wanted` returns false.
    pub fn compare(&self, base: &[u8], target: &[u8], wanted: &dyn Fn() -> bool) -> Result<(), PatchError> {
        let nbytes = self.header.nbytes;
        if base.len() as u64 != nbytes || target.len() as u64 != nbytes {
            let text = format!("a patch for {} bytes, not for {} and {}", nbytes, base.len(), target.len());
            return Err(PatchError(text));
        }
        let (mut scratch, mut changes, mut made) = (Scratch::default(), Changes::default(), Vec::new());
        let mut at = 0;
        let same = |begin: usize, end: usize| base[begin..end] == target[begin..end];
        for part in &self.parts {
            let Block { begin, end, .. } = part.block;
            if !wanted() {
                return Err(PatchError("it took too long to check".to_owned()));
            }
            changes.clear();
            self.decode(part, &base[begin..end], &mut scratch, &mut changes)?;
            made.clear();
            made.extend_from_slice(&base[begin..end]);
            part.write(&changes.at, &changes.values, &mut made);
            if made != target[begin..end] || !same(at, begin) {
                return Err(in_block(
                    &part.block,
                    "its result, or the data before it, differs from the target",
                ));
            }
            at = end;
        }
        if !same(at, base.len()) {
            return Err(PatchError(format!("the result differs from the target after byte {}", at)));
        }
        Ok(())
    }

    /// Appends the changes of a block to `changes`. `block` is the block's bytes in the base.
    fn decode(
        &self,
        part: &Part,
        block: &[u8],
        scratch: &mut Scratch,
        changes: &mut Changes,
    ) -> Result<(), PatchError> {
        let Block { width, kind, .. } = part.block;
        let read = match part.mode {
            Mode::Steps => steps::read(part.body, &self.tables[part.table], block, kind, scratch, changes),
            Mode::Overwrite => steps::read_overwrite(part.body, width, block.len() / width, &mut changes.at),
            Mode::Raw | Mode::Unchanged => Ok(()),
        };
        read.map_err(|fault| in_block(&part.block, fault))
    }
}

impl Part<'_> {
    /// Writes decoded changes into the bytes of the block.
    fn write(&self, at: &[u32], values: &[u16], block: &mut [u8]) {
        match self.mode {
            Mode::Unchanged => {}
            Mode::Raw => block.copy_from_slice(self.body),
            Mode::Steps => {
                for (&at, value) in at.iter().zip(values) {
                    block[2 * at as usize..][..2].copy_from_slice(&value.to_le_bytes());
                }
            }
            Mode::Overwrite => {
                let width = self.block.width;
                let elements = self.body[self.body.len() - at.len() * width..].chunks_exact(width);
                for (&at, element) in at.iter().zip(elements) {
                    block[at as usize * width..][..width].copy_from_slice(element);
                }
            }
        }
    }
}

fn in_block(block: &Block, fault: Fault) -> PatchError {
    PatchError(format!("the block at byte {}: {}", block.begin, fault))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::digest_while;
    use crate::tests::layout;
    use std::cell::Cell;

    #[test]
    fn a_patch_that_nobody_wants_any_more_ends_before_the_next_block() {
        const BLOCKS: usize = 3;
        let nbytes = BLOCKS << 18;
        let json = format!(r#"{{"w":{{"dtype":"U8","shape":[{0}],"data_offsets":[0,{0}]}}}}"#, nbytes);
        let layout = layout(&json);
        let (base, target) = (vec![0; nbytes], vec![1; nbytes]);
        let digest = |data: &[u8]| digest_while(&layout.id, 1 << 20, data, &|| true);
        let (before, after) = (digest(&base), digest(&target));
        let old = encode::Side { data: &base, digest: &before };
        let new = encode::Side { data: &target, digest: &after };
        let bytes = encode::encode(&layout, 1 << 20, old, new, false, &|| true).unwrap();
        let patch = Patch::parse(&layout, &bytes).unwrap();
        for most in 0..=2 * BLOCKS {
            let (mut data, looks) = (base.clone(), Cell::new(0));
            let done = patch.apply_unchecked_while(&mut data, &|| looks.replace(looks.get() + 1) < most);
            assert_eq!(done.is_ok(), most == 2 * BLOCKS);
            let changed = data.iter().filter(|byte| **byte == 1).count();
            assert_eq!(
                changed >> 18,
                most.saturating_sub(BLOCKS),
                "the first half of the looks is at what it says"
            );
        }
    }
}
