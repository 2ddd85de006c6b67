//! Copies the user's tensors into the content of a version (its layout and its bytes), and hashes the
//! bytes in the same pass.
//!
//! Training can go on as soon as the bytes are copied (P2). Once no worker needs the version, the next
//! copy reuses its memory: new pages would cost more time than the copy itself.

use crate::checksum::{copy_crc32c, crc32c};
use crate::digest::digest;
use crate::dtype::Dtype;
use crate::layout::{Layout, LayoutError, ORDER};
use crate::limits::{CHUNKS_MAX, LAYOUT_BYTES_MAX};
use crate::messages::Metadata;
use crate::staging::{Buffer, Buffers};
use crate::transfer::ChunkPlan;
use std::cmp::Reverse;
use std::convert::TryInto;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Deref;
use std::sync::Arc;

// Copies of at least this size bypass the CPU caches, which would not hold the bytes until they are sent.
const STREAM_BYTES: u64 = 1 << 25;

/// A tensor to publish: a view of the caller's memory, which is copied.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    pub name: &'a str,
    pub dtype: Dtype,
    /// The size of each dimension; the elements are in row-major order.
    pub shape: &'a [u64],
    /// The elements, little-endian: as many bytes as dtype and shape require.
    pub bytes: &'a [u8],
}

/// A layout: its bytes, and the parsed layout.
pub struct Header {
    pub bytes: Vec<u8>,
    pub layout: Layout,
}

/// The immutable bytes of a version, or of a patch whose result is that version.
pub struct Content {
    /// The layout of the version. The layout and the digest of a patch are those of its result.
    pub header: Arc<Header>,
    pub plan: ChunkPlan,
    pub crcs: Vec<u32>,
    pub digest: String,
    /// The metadata of the version.
    pub metadata: Metadata,
    block: Box<dyn Deref<Target = [u8]> + Send + Sync>,
}

impl Content {
    /// Returns the bytes of a chunk.
    pub fn chunk(&self, index: u64) -> &[u8] {
        let span = self.plan.span(index);
        &self.block[span.start as usize..span.end as usize]
    }

    /// Returns all bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.block
    }

    /// Returns the content of a patch whose result is `version`. The patch has the chunk size of the version.
    pub fn of_patch(version: &Content, bytes: Vec<u8>) -> Content {
        let plan = ChunkPlan { nbytes: bytes.len() as u64, ..version.plan };
        let crcs = bytes.chunks(plan.chunk_bytes as usize).map(crc32c).collect();
        let (header, digest) = (version.header.clone(), version.digest.clone());
        Content { header, plan, crcs, digest, metadata: Metadata::new(), block: Box::new(bytes) }
    }
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Content({} bytes, {})", self.plan.nbytes, self.digest)
    }
}

/// A tensor's name, dtype and shape.
type TensorSpec = (String, Dtype, Vec<u64>);

/// Copies the tensors of one model. Keeps the last layout, and free memory for the next copies.
#[derive(Default)]
pub struct Copier {
    buffers: Buffers,
    last: Option<(Vec<TensorSpec>, Arc<Header>, Vec<usize>)>, // the last result of `header_of`
}

impl Copier {
    /// Copies tensors into new content. Fails if a tensor is invalid, there are too many chunks, or
    /// memory is short.
    pub fn copy(&mut self, tensors: &[TensorView], chunk_bytes: u64) -> Result<Content, String> {
        for tensor in tensors {
            check_size(tensor)?;
        }
        let (header, order) = self.header_of(tensors)?;
        let parts: Vec<&[u8]> = order.iter().map(|&at| tensors[at].bytes).collect();
        self.fill(header, &parts, chunk_bytes)
    }

    /// Copies the bytes of a safetensors file into new content, unchanged.
    pub fn copy_file(&mut self, file: &[u8], chunk_bytes: u64) -> Result<Content, String> {
        let mut length = [0; 8];
        length.copy_from_slice(file.get(..8).ok_or("a safetensors file has at least 8 bytes")?);
        let end = usize::try_from(u64::from_le_bytes(length)).ok().and_then(|size| size.checked_add(8));
        let (header, data) = match end {
            Some(end) if end <= file.len() => file.split_at(end),
            _ => {
                return Err("the file is shorter than its header says: was it written completely?".to_owned())
            }
        };
        let layout = Layout::parse(header).map_err(|LayoutError(text)| text)?;
        if layout.nbytes != data.len() as u64 {
            return Err(format!(
                "the file has {} bytes of tensors, but its header says {}: was it written completely?",
                data.len(),
                layout.nbytes
            ));
        }
        let header = Header { bytes: header.to_vec(), layout };
        self.fill(Arc::new(header), &[data], chunk_bytes)
    }

    /// Reads an open safetensors file into new content.
    pub fn read_file(&mut self, mut file: &File, chunk_bytes: u64) -> Result<Content, String> {
        let short = |error: io::Error| format!("it cannot be read: {}", error);
        let mut header = vec![0; 8];
        file.read_exact(&mut header).map_err(short)?;
        let length = u64::from_le_bytes(header[..].try_into().unwrap_or_default());
        if length > LAYOUT_BYTES_MAX {
            return Err(format!("its header claims to have {} bytes", length));
        }
        header.resize(8 + length as usize, 0);
        file.read_exact(&mut header[8..]).map_err(short)?;
        let layout = Layout::parse(&header).map_err(|LayoutError(text)| text)?;
        let plan = self.plan(layout.nbytes, chunk_bytes)?;
        let found = file.metadata().map_err(short)?.len();
        if found != header.len() as u64 + plan.nbytes {
            return Err(format!(
                "it has {} bytes, but its header says {}",
                found,
                header.len() as u64 + plan.nbytes
            ));
        }
        let mut block = self.new_block(plan)?;
        file.read_exact(&mut block).map_err(short)?;
        let crcs: Vec<u32> = block.chunks(chunk_bytes as usize).map(crc32c).collect();
        let digest = digest(&layout.id, chunk_bytes, &crcs);
        let header = Arc::new(Header { bytes: header, layout });
        Ok(Content { header, plan, crcs, digest, metadata: Metadata::new(), block: Box::new(block) })
    }

    fn plan(&self, nbytes: u64, chunk_bytes: u64) -> Result<ChunkPlan, String> {
        let plan = ChunkPlan::new(nbytes, chunk_bytes).ok_or("chunks of 0 bytes")?;
        if plan.count() > CHUNKS_MAX {
            return Err(format!(
                "{} bytes in chunks of {} bytes are {} chunks; at most {} are allowed: make chunks larger",
                plan.nbytes,
                chunk_bytes,
                plan.count(),
                CHUNKS_MAX
            ));
        }
        Ok(plan)
    }

    fn new_block(&self, plan: ChunkPlan) -> Result<Buffer, String> {
        let none = |error| format!("there is no memory for {} bytes: {}", plan.nbytes, error);
        self.buffers.take_for_copy(plan.nbytes).map_err(none)
    }

    /// Returns the layout of the tensors, and the indices of the tensors in the order of the layout.
    /// If names, dtypes and shapes equal those of the previous call, returns the previous result.
    fn header_of(&mut self, tensors: &[TensorView]) -> Result<(Arc<Header>, Vec<usize>), String> {
        if let Some((specs, header, order)) = &self.last {
            let same = |(spec, tensor): (&TensorSpec, &TensorView)| {
                spec.0 == tensor.name && spec.1 == tensor.dtype && spec.2 == tensor.shape
            };
            if specs.len() == tensors.len() && specs.iter().zip(tensors).all(same) {
                return Ok((header.clone(), order.clone()));
            }
        }
        let (header, order) = lay_out(tensors)?;
        let spec = |tensor: &TensorView| (tensor.name.to_owned(), tensor.dtype, tensor.shape.to_vec());
        let header = Arc::new(header);
        self.last = Some((tensors.iter().map(spec).collect(), header.clone(), order.clone()));
        Ok((header, order))
    }

    /// Copies the parts one after another into new content, and hashes the bytes in the same pass.
    fn fill(&self, header: Arc<Header>, parts: &[&[u8]], chunk_bytes: u64) -> Result<Content, String> {
        let plan = self.plan(header.layout.nbytes, chunk_bytes)?;
        let mut block = self.new_block(plan)?;
        let mut parts = parts.iter().copied().filter(|part| !part.is_empty());
        let mut part: &[u8] = &[];
        let mut crcs = Vec::with_capacity(plan.count() as usize);
        let past_caches = plan.nbytes >= STREAM_BYTES;
        for chunk in block.chunks_mut(chunk_bytes as usize) {
            let (mut at, mut crc) = (0, 0);
            while at < chunk.len() {
                if part.is_empty() {
                    part = parts.next().ok_or("the tensors have fewer bytes than their layout says")?;
                }
                let count = part.len().min(chunk.len() - at);
                crc = copy_crc32c(crc, &part[..count], &mut chunk[at..at + count], past_caches);
                at += count;
                part = &part[count..];
            }
            crcs.push(crc);
        }
        let digest = digest(&header.layout.id, chunk_bytes, &crcs);
        Ok(Content { header, plan, crcs, digest, metadata: Metadata::new(), block: Box::new(block) })
    }
}

fn check_size(tensor: &TensorView) -> Result<(), String> {
    let bits = tensor.shape.iter().try_fold(tensor.dtype.bits(), |product, &size| product.checked_mul(size));
    if bits.map(|bits| (bits / 8, bits % 8)) == Some((tensor.bytes.len() as u64, 0)) {
        return Ok(());
    }
    Err(format!(
        "tensor {:?} ({} {:?}) has {} bytes; its dtype and shape require {}",
        tensor.name,
        tensor.dtype,
        tensor.shape,
        tensor.bytes.len(),
        bits.map_or("more than a tensor can have".to_owned(), |bits| (bits / 8).to_string())
    ))
}

/// Returns the layout that safetensors would write, and the indices of the tensors in the order of the
/// layout: by dtype, then by name. The layout is padded to a multiple of 8 bytes. If the tensors were
/// given in another order, the layout's metadata contains the given order.
fn lay_out(tensors: &[TensorView]) -> Result<(Header, Vec<usize>), String> {
    let rank = |dtype: Dtype| Dtype::ALL.iter().position(|&known| known == dtype);
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&at| (Reverse(rank(tensors[at].dtype)), tensors[at].name));
    let mut json = String::from("{");
    if let Some(text) = order_text(tensors, &order) {
        json += &format!(r#""__metadata__":{{"{}":"{}"}}"#, ORDER, text);
    }
    let mut begin = 0;
    for &at in &order {
        let TensorView { name, dtype, shape, bytes } = tensors[at];
        let end = begin + bytes.len() as u64;
        let name = serde_json::to_string(name).map_err(|error| error.to_string())?;
        let sizes: Vec<String> = shape.iter().map(u64::to_string).collect();
        let comma = if json.len() > 1 { "," } else { "" };
        json += &format!(
            r#"{}{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}}"#,
            comma,
            name,
            dtype,
            sizes.join(","),
            begin,
            end
        );
        begin = end;
    }
    json.push('}');
    json.extend(std::iter::repeat(' ').take((8 - json.len() % 8) % 8));
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    // Checks names, sizes and duplicate keys.
    let layout = Layout::parse(&bytes).map_err(|LayoutError(text)| text)?;
    Ok((Header { bytes, layout }, order))
}

/// Returns the value of the metadata `ORDER`: each tensor's position in the layout. Returns `None` if
/// the tensors were given in the order of the layout, or if a tensor's name equals the value: `ORDER`
/// would be read as an alias of that tensor.
fn order_text(tensors: &[TensorView], order: &[usize]) -> Option<String> {
    let mut positions = vec![0; order.len()];
    for (position, &at) in order.iter().enumerate() {
        positions[at] = position;
    }
    let in_order = positions.iter().enumerate().all(|(at, &place)| at == place);
    let text = positions.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    Some(text).filter(|text| !in_order && tensors.iter().all(|tensor| tensor.name != text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view<'a>(name: &'a str, dtype: Dtype, shape: &'a [u64], bytes: &'a [u8]) -> TensorView<'a> {
        TensorView { name, dtype, shape, bytes }
    }

    #[test]
    fn a_version_is_what_the_specification_says() {
        let bytes: Vec<u8> = (0..10).collect();
        let content = Copier::default().copy(&[view("w", Dtype::U8, &[10], &bytes)], 4).unwrap();
        // The example of section 5.6.
        assert_eq!(content.crcs, [3_644_005_027, 3_051_321_737, 348_614_566]);
        assert_eq!(content.digest, "c139ea9c7a71aced2c425b90e6c7d80b38472652c9848038869814e37c38dfd6");
        assert_eq!(content.chunk(2), [8, 9]);
    }

    #[test]
    fn tensors_lie_by_dtype_and_name_and_a_file_is_the_same() {
        let (b, a, c) = ([1u8; 8], [2u8; 4], [3u8; 1]);
        let tensors = [
            view("c", Dtype::U8, &[1], &c),
            view("b", Dtype::F32, &[2], &b),
            view("a", Dtype::F32, &[], &a),
            view("none", Dtype::F64, &[0, 3], &[]),
        ];
        let mut copier = Copier::default();
        let content = copier.copy(&tensors, 5).unwrap();
        let names: Vec<&str> = content.header.layout.in_order().map(|info| &info.name[..]).collect();
        assert_eq!(names, ["c", "b", "a", "none"]);
        let data: Vec<u8> =
            (0..content.plan.count()).flat_map(|index| content.chunk(index).to_vec()).collect();
        assert_eq!(data, [2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 3]);
        let file = [&content.header.bytes[..], &data].concat();
        assert_eq!(content.header.bytes.len() % 8, 0);
        let again = copier.copy_file(&file, 5).unwrap();
        assert_eq!((&again.digest, &again.header.layout.id), (&content.digest, &content.header.layout.id));
        assert!(copier.copy_file(&file[..file.len() - 1], 5).is_err());
        assert!(copier.copy_file(&file[..9], 5).is_err());
        assert!(copier.copy_file(&[], 5).is_err());
    }

    #[test]
    fn what_cannot_travel_is_refused() {
        let mut copier = Copier::default();
        let bytes = [0u8; 8];
        assert!(copier.copy(&[view("w", Dtype::F32, &[3], &bytes)], 4).unwrap_err().contains("\"w\""));
        assert!(copier.copy(&[view("", Dtype::U8, &[8], &bytes)], 4).is_err());
        let twice = [view("w", Dtype::U8, &[8], &bytes), view("w", Dtype::U8, &[8], &bytes)];
        assert!(copier.copy(&twice, 4).is_err());
        assert!(copier.copy(&[view("w", Dtype::U8, &[8], &bytes)], 0).is_err());
    }

    #[test]
    fn memory_serves_the_next_version() {
        let mut copier = Copier::default();
        let bytes = vec![7u8; 1000];
        let first = copier.copy(&[view("w", Dtype::U8, &[1000], &bytes)], 100).unwrap();
        let place = first.chunk(0).as_ptr();
        drop(first);
        let second = copier.copy(&[view("w", Dtype::U8, &[1000], &bytes)], 100).unwrap();
        assert_eq!(second.chunk(0).as_ptr(), place);
        assert!(second.block.iter().all(|&byte| byte == 7));
    }
}
