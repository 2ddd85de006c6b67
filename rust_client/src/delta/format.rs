//! The format of a patch: its header, its blocks, and the tables of its codes.

use super::bits::{number, Reader};
use super::write::Writer;
use super::{Fault, PatchError};
use crate::digest::{bytes_of_hex, hex};
use crate::dtype::Dtype;
use crate::layout::Layout;
use crate::limits::{CHUNKS_MAX, CHUNK_BYTES_MAX};

const MAGIC: &[u8] = b"WBDELTA1";
pub const HEADER_BYTES: usize = 120;
const BLOCK_ELEMENTS: usize = 1 << 18;
const GROUP_BLOCKS: usize = 16;
const ENTRY_BYTES_MAX: u32 = 4;
pub const CLASSES: usize = 16;
const WIDTH_MAX: u32 = 19; // bits of a count
pub const RICE_MAX: u32 = 18;
const EVERY: u32 = 31; // in a row's field `large`: `Large::Every`
                       // Widths in bits of the fields of a table's row.
const COUNT_BITS: u32 = 5;
const GAP_BITS: u32 = 5;
const LARGE_BITS: u32 = 5;
const LARGE_GAP_BITS: u32 = 5;
const SIZE_BITS: u32 = 4;

/// The header of a patch.
#[derive(Debug)]
pub struct Header {
    pub layout_id: String,
    pub nbytes: u64,
    /// Chunk size in bytes of both digests.
    pub chunk_bytes: u64,
    pub base: String,
    pub target: String,
}

impl Header {
    /// Parses the header of a patch, and nothing after it.
    pub fn parse(patch: &[u8]) -> Result<Header, PatchError> {
        let head = patch.get(..HEADER_BYTES).unwrap_or_default();
        if !head.starts_with(MAGIC) {
            return Err(PatchError(format!(
                "{} bytes that begin with {:02x?} are not a patch; a patch has at least {} bytes, and begins with {:02x?}",
                patch.len(),
                &patch[..patch.len().min(MAGIC.len())],
                HEADER_BYTES,
                MAGIC
            )));
        }
        let (flags, chunk_bytes, nbytes) =
            (number(&head[8..12]), number(&head[12..16]), number(&head[16..24]));
        if flags != 0 {
            return Err(PatchError(format!("the patch has flags {:#x}; none are known here", flags)));
        }
        if !(1..=CHUNK_BYTES_MAX).contains(&chunk_bytes) || nbytes > CHUNKS_MAX * chunk_bytes {
            return Err(PatchError(format!(
                "a patch for {} bytes in chunks of {} bytes; at most {} chunks of 1 to {} bytes are allowed",
                nbytes, chunk_bytes, CHUNKS_MAX, CHUNK_BYTES_MAX
            )));
        }
        let [layout_id, base, target] = [24, 56, 88].map(|at| hex(&head[at..at + 32]));
        Ok(Header { layout_id, nbytes, chunk_bytes, base, target })
    }

    /// Returns the bytes of the header.
    pub fn pack(&self) -> Vec<u8> {
        let mut out = [MAGIC, &[0; 4]].concat();
        out.extend_from_slice(&(self.chunk_bytes as u32).to_le_bytes());
        out.extend_from_slice(&self.nbytes.to_le_bytes());
        for id in [&self.layout_id, &self.base, &self.target] {
            out.extend_from_slice(&bytes_of_hex(id));
        }
        out
    }
}

/// How a patch can code the elements of a dtype.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Elements that are only copied or overwritten.
    Plain,
    /// Integers of 16 bits.
    Integer,
    /// Floats of 16 bits.
    Bf16,
    F16,
}

/// Adjacent elements of one dtype: bytes `begin` to `end` of the data section.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    pub begin: usize,
    pub end: usize,
    pub width: usize, // bytes of an element; 1 if it has fewer bits
    pub kind: Kind,
}

impl Block {
    pub fn nbytes(&self) -> usize {
        self.end - self.begin
    }
}

/// Returns one block for each run of adjacent tensors of one dtype.
fn runs(layout: &Layout) -> Vec<Block> {
    let mut found: Vec<Block> = Vec::new();
    let mut previous = None;
    for tensor in layout.tensors.iter().filter(|tensor| tensor.begin < tensor.end) {
        if previous != Some(tensor.dtype) {
            let kind = match tensor.dtype {
                Dtype::BF16 => Kind::Bf16,
                Dtype::F16 => Kind::F16,
                Dtype::I16 | Dtype::U16 => Kind::Integer,
                _ => Kind::Plain,
            };
            let width = (tensor.dtype.bits() as usize / 8).max(1);
            found.push(Block { begin: tensor.begin as usize, end: 0, width, kind });
            previous = Some(tensor.dtype);
        }
        if let Some(last) = found.last_mut() {
            last.end = tensor.end as usize;
        }
    }
    found
}

/// Cuts a layout into groups of adjacent blocks of one dtype. Returns the groups in order.
pub fn groups(layout: &Layout) -> impl Iterator<Item = Vec<Block>> {
    runs(layout).into_iter().flat_map(|run| {
        let cut = |whole: Block, nbytes: usize| {
            (whole.begin..whole.end).step_by(nbytes).map(move |begin| Block {
                begin,
                end: whole.end.min(begin + nbytes),
                ..whole
            })
        };
        let nbytes = BLOCK_ELEMENTS * run.width;
        cut(run, GROUP_BLOCKS * nbytes).map(move |group| cut(group, nbytes).collect())
    })
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mode {
    Unchanged,
    Steps,
    Overwrite,
    Raw,
}

/// Reads the entry of a block at `at`, and advances `at`. Returns the mode, and the size of the
/// body in bytes.
pub fn entry(data: &[u8], at: &mut usize, block: &Block) -> Result<(Mode, usize), Fault> {
    let mut value = 0;
    for index in 0..ENTRY_BYTES_MAX {
        let byte = *data.get(*at).ok_or("the patch ends in its entry")?;
        *at += 1;
        value |= usize::from(byte & 127) << (7 * index);
        if byte == 0 && index > 0 {
            return Err("its entry has more bytes than it needs");
        }
        if byte < 128 {
            return check_size(
                [Mode::Unchanged, Mode::Steps, Mode::Overwrite, Mode::Raw][value & 3],
                value >> 2,
                block,
            );
        }
    }
    Err("its entry has no end")
}

/// Appends the entry of a block.
pub fn pack_entry(mode: Mode, nbytes: usize, out: &mut Vec<u8>) {
    let mut value = nbytes << 2 | mode as usize;
    while value > 127 {
        out.push((value & 127) as u8 | 128);
        value >>= 7;
    }
    out.push(value as u8);
}

fn check_size(mode: Mode, nbytes: usize, block: &Block) -> Result<(Mode, usize), Fault> {
    let allowed = match mode {
        Mode::Unchanged => nbytes == 0,
        Mode::Raw => nbytes == block.nbytes(),
        _ => (1..block.nbytes()).contains(&nbytes),
    };
    match (allowed, mode, block.kind) {
        (false, ..) => Err("its body has more bytes than its mode allows, or fewer"),
        (true, Mode::Steps, Kind::Plain) => Err("it has steps, but its elements do not have 16 bits"),
        _ => Ok((mode, nbytes)),
    }
}

/// Which steps of a class are large, that is, have a size above 1.
#[derive(Clone, Copy, Debug)]
pub enum Large {
    None,
    /// Some steps: the number of bits of their count, and the Rice parameter of the gaps between
    /// them.
    Some(u32, u32),
    /// Possibly all steps, so that the size of each is coded.
    Every,
}

/// A row of a table: the parameters of the codes for the steps of a class.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub class: usize,
    pub count: u32, // bits of the number of steps in a block
    pub gap: u32,   // Rice parameter of the gaps between changed elements
    pub large: Large,
    pub size: u32, // Exp-Golomb parameter of the sizes
}

/// The codes for the steps of a group, with one class or `CLASSES` classes. A class without steps
/// has no row.
#[derive(Debug)]
pub struct Table {
    pub classes: usize,
    pub rows: Vec<Row>,
}

/// Reads the table of a group at `at`, and advances `at`.
pub fn table(data: &[u8], at: &mut usize, kind: Kind) -> Result<Table, Fault> {
    let classes = data.get(*at).map_or(0, |&byte| usize::from(byte));
    if classes != 1 && !(classes == CLASSES && matches!(kind, Kind::Bf16 | Kind::F16)) {
        return Err("its table must have 1 class, or 16 classes for floats of 16 bits");
    }
    let mut reader = Reader::new(&data[*at + 1..]);
    let mut rows = Vec::with_capacity(classes);
    for class in 0..classes {
        rows.extend(row(&mut reader, class)?);
    }
    *at += 1 + reader.check_padding()?;
    Ok(Table { classes, rows })
}

fn row(reader: &mut Reader, class: usize) -> Result<Option<Row>, Fault> {
    let mut field = |width: u32, most: u32| match reader.number(width)? {
        value if value <= most => Ok(value),
        _ => Err("a parameter of its table is larger than it may be"),
    };
    let count = field(COUNT_BITS, WIDTH_MAX)?;
    if count == 0 {
        return Ok(None);
    }
    let gap = field(GAP_BITS, RICE_MAX)?;
    let large = match field(LARGE_BITS, EVERY)? {
        0 => Large::None,
        EVERY => Large::Every,
        width if width <= WIDTH_MAX => Large::Some(width, field(LARGE_GAP_BITS, RICE_MAX)?),
        _ => return Err("a count in its table has too many bits"),
    };
    let size = if let Large::None = large { 0 } else { field(SIZE_BITS, 15)? };
    Ok(Some(Row { class, count, gap, large, size }))
}

/// Returns the bytes of a table.
pub fn pack_table(table: &Table) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.number(table.classes as u32, 8);
    let mut rows = table.rows.iter().peekable();
    for class in 0..table.classes {
        match rows.next_if(|row| row.class == class) {
            Some(row) => pack_row(row, &mut writer),
            None => writer.number(0, COUNT_BITS),
        }
    }
    writer.end()
}

fn pack_row(row: &Row, writer: &mut Writer) {
    writer.number(row.count, COUNT_BITS);
    writer.number(row.gap, GAP_BITS);
    match row.large {
        Large::None => return writer.number(0, LARGE_BITS),
        Large::Every => writer.number(EVERY, LARGE_BITS),
        Large::Some(width, gap) => {
            writer.number(width, LARGE_BITS);
            writer.number(gap, LARGE_GAP_BITS);
        }
    }
    writer.number(row.size, SIZE_BITS);
}
