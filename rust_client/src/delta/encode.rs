//! Makes a patch, the difference between two versions of one layout, in as few bytes as possible.
//!
//! Each block gets the mode that takes the fewest bytes. A step is the distance from an old to a
//! new value, counted in representable values. The steps of a block form one class or, for floats,
//! sixteen classes by exponent. From one exponent to the next, the probability of a change halves.
//! So the gaps between changes take fewer bits if each class is coded separately. The Python
//! encoder makes the same bytes.

use super::format::{self, Block, Header, Kind, Mode};
use super::scan::{self, Steps};
use super::{tune, PatchError};
use crate::layout::Layout;

/// A data section, and its digest.
#[derive(Clone, Copy)]
pub struct Side<'a> {
    pub data: &'a [u8],
    pub digest: &'a str,
}

/// Returns the patch that turns the data section `base` into `target`, bit for bit.
///
/// Both digests are computed over chunks of `chunk_bytes`. With `classes`, steps may be coded by
/// class: that takes fewer bytes, but the decoder must read every element of the base. Returns an
/// error if a data section does not fit the layout, or once `wanted` returns false.
pub fn encode(
    layout: &Layout,
    chunk_bytes: u64,
    base: Side,
    target: Side,
    classes: bool,
    wanted: &dyn Fn() -> bool,
) -> Result<Vec<u8>, PatchError> {
    for side in [base, target] {
        if side.data.len() as u64 != layout.nbytes {
            let text =
                format!("a data section of {} bytes; the layout has {}", side.data.len(), layout.nbytes);
            return Err(PatchError(text));
        }
    }
    let (base_digest, target_digest) = (base.digest.to_owned(), target.digest.to_owned());
    let header = Header {
        layout_id: layout.id.clone(),
        nbytes: layout.nbytes,
        chunk_bytes,
        base: base_digest,
        target: target_digest,
    };
    let mut patch = header.pack();
    for blocks in format::groups(layout) {
        if !wanted() {
            return Err(PatchError("it took too long to make".to_owned()));
        }
        patch.extend_from_slice(&group(&blocks, base.data, target.data, classes));
    }
    Ok(patch)
}

/// An encoded block.
type Coded = (Mode, Vec<u8>);

/// Encodes a group in as few bytes as possible.
fn group(blocks: &[Block], base: &[u8], target: &[u8], classes: bool) -> Vec<u8> {
    let pair = |block: &Block| (&base[block.begin..block.end], &target[block.begin..block.end]);
    let mut group =
        Group { blocks, pairs: blocks.iter().map(pair).collect(), stepless: vec![None; blocks.len()] };
    let kind = blocks[0].kind;
    let classes = classes && matches!(kind, Kind::Bf16 | Kind::F16);
    let (mut flat, mut by_class) = (Vec::new(), Vec::new());
    if kind != Kind::Plain {
        for (index, &(base, target)) in group.pairs.iter().enumerate() {
            let kind = if classes { kind } else { Kind::Integer };
            let (all, each) = scan::steps(base, target, kind);
            if !all.gaps.is_empty() {
                flat.push((index, vec![all]));
                by_class.push((index, each));
            }
        }
    }
    let coded = group.coded(flat);
    if classes {
        let by_class = group.coded(by_class);
        if by_class.len() < coded.len() {
            return by_class;
        }
    }
    coded
}

/// Blocks that share a table of codes.
struct Group<'a> {
    blocks: &'a [Block],
    pairs: Vec<(&'a [u8], &'a [u8])>,
    stepless: Vec<Option<Coded>>, // each block's encoding without steps, made when first needed
}

/// The steps of a block, with its index in the group.
type Stepped = (usize, Vec<Steps>);

impl Group<'_> {
    /// Returns the bytes of the group: entries, table and bodies. A block is coded by steps if
    /// `found` has its steps, and no other mode takes fewer bytes.
    fn coded(&mut self, found: Vec<Stepped>) -> Vec<u8> {
        let (table, bodies) = self.stepped(found);
        let mut bodies = bodies.into_iter().peekable();
        let mut coded = Vec::with_capacity(self.blocks.len());
        for index in 0..self.blocks.len() {
            coded.push(match bodies.next_if(|(stepped, _)| *stepped == index) {
                Some((_, body)) => (Mode::Steps, body),
                None => self.stepless(index).clone(),
            });
        }
        let mut out = Vec::new();
        for (mode, body) in &coded {
            format::pack_entry(*mode, body.len(), &mut out);
        }
        out.extend_from_slice(&table);
        coded.iter().for_each(|(_, body)| out.extend_from_slice(body));
        out
    }

    /// Returns the table and the bodies of the blocks that take the fewest bytes by steps.
    ///
    /// A block that does not, even with a table of its own, does not influence this table.
    fn stepped(&mut self, mut found: Vec<Stepped>) -> (Vec<u8>, Vec<(usize, Vec<u8>)>) {
        while !found.is_empty() {
            let (table, bodies) = self.written(&found);
            if bodies.len() == found.len() {
                return (table, bodies);
            }
            let best = |index: usize| bodies.iter().any(|&(other, _)| other == index);
            let alone: Vec<bool> =
                found.chunks(1).map(|one| best(one[0].0) || !self.written(one).1.is_empty()).collect();
            let all = alone.iter().all(|&alone| alone);
            let mut alone = alone.into_iter();
            found.retain(|&(index, _)| alone.next() == Some(true) && (!all || best(index)));
        }
        (Vec::new(), Vec::new())
    }

    /// Returns the best table for all these blocks, and the bodies of those blocks that take the
    /// fewest bytes by steps with this table.
    fn written(&mut self, found: &[Stepped]) -> (Vec<u8>, Vec<(usize, Vec<u8>)>) {
        let table = tune::table(&found.iter().map(|(_, steps)| &steps[..]).collect::<Vec<_>>());
        let mut bodies = Vec::with_capacity(found.len());
        for (index, steps) in found {
            let body = tune::body(steps, &table);
            if self.is_best(*index, body.len(), changes(steps)) {
                bodies.push((*index, body));
            }
        }
        (format::pack_table(&table), bodies)
    }

    /// True if no other mode of a block takes fewer bytes than a body of steps of `nbytes`.
    fn is_best(&mut self, index: usize, nbytes: usize, changes: usize) -> bool {
        let block = self.blocks[index];
        nbytes < block.nbytes()
            && (nbytes <= overwrite_least(changes, block.width) || nbytes <= self.stepless(index).1.len())
    }

    /// Returns the encoding of a block without steps.
    fn stepless(&mut self, index: usize) -> &Coded {
        let (block, (base, target)) = (&self.blocks[index], self.pairs[index]);
        self.stepless[index].get_or_insert_with(|| overwrite(block, base, target))
    }
}

fn changes(steps: &[Steps]) -> usize {
    steps.iter().map(|class| class.gaps.len()).sum()
}

/// Returns the minimum size in bytes of a body that overwrites `changes` elements.
fn overwrite_least(changes: usize, width: usize) -> usize {
    3 + changes / 8 + changes * width
}

/// Encodes the changed elements of a block, or the whole block if that takes fewer bytes.
fn overwrite(block: &Block, base: &[u8], target: &[u8]) -> Coded {
    let width = block.width;
    let at = scan::changed(base, target, width);
    if at.is_empty() {
        return (Mode::Unchanged, Vec::new());
    }
    if overwrite_least(at.len(), width) < block.nbytes() {
        let elements = at.iter().flat_map(|&at| &target[at as usize * width..][..width]).copied();
        let body = tune::overwrite(&scan::gaps_of(&at), elements);
        if body.len() < block.nbytes() {
            return (Mode::Overwrite, body);
        }
    }
    (Mode::Raw, target.to_owned())
}
