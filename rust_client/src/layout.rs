//! Parses a layout: a safetensors header with the tensors of a version, and their positions.
//!
//! `Layout::parse` checks untrusted bytes before any tensor is made of them. Tied tensors are sent
//! once, under one name. The metadata has their other names (`Layout::aliases`).

use crate::digest::layout_id;
use crate::dtype::Dtype;
use crate::limits::*;
use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, MapAccess, Visitor};
use std::collections::{BTreeMap, HashMap};
use std::convert::TryInto;
use std::fmt;

/// A tensor, and its position in the data section.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    pub begin: u64,
    pub end: u64,
}

/// A checked layout.
#[derive(Debug)]
pub struct Layout {
    /// The SHA-256 of the layout's bytes.
    pub id: String,
    /// The tensors, in the order of the data section.
    pub tensors: Vec<TensorInfo>,
    /// Further names of tensors: a map from each alias to the tensor's name.
    pub aliases: BTreeMap<String, String>,
    /// The safetensors metadata: a map from keys to texts, which includes the aliases.
    pub metadata: BTreeMap<String, String>,
    /// Size of the data section in bytes.
    pub nbytes: u64,
    index: HashMap<String, usize>,
    order: Vec<usize>,
}

/// Metadata key of the order of the tensors in the publisher's model. The value lists indices: of
/// tensors in the data section, and after these of aliases.
pub(crate) const ORDER: &str = "weightbus.order";

/// Why a layout is invalid.
#[derive(Clone, Debug, PartialEq)]
pub struct LayoutError(pub String);

impl fmt::Display for LayoutError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn fault<T>(text: String) -> Result<T, LayoutError> {
    Err(LayoutError(text))
}

impl Layout {
    /// Parses the header of a safetensors file. `header` includes the 8 bytes that give its length.
    pub fn parse(header: &[u8]) -> Result<Layout, LayoutError> {
        let entries: Entries = match serde_json::from_slice(json_of(header)?) {
            Ok(entries) => entries,
            Err(error) => return fault(format!("no safetensors header: {}", error)),
        };
        let tensors = sorted(entries.tensors)?;
        let metadata = entries.metadata.unwrap_or_default();
        let mut index: HashMap<String, usize> =
            tensors.iter().enumerate().map(|(at, tensor)| (tensor.name.clone(), at)).collect();
        let aliases: BTreeMap<String, String> = metadata
            .iter()
            .filter(|(name, tensor)| index.contains_key(*tensor) && !index.contains_key(*name))
            .map(|(name, tensor)| (name.clone(), tensor.clone()))
            .collect();
        for (alias, tensor) in &aliases {
            check_name(alias)?;
            let at = index[tensor];
            index.insert(alias.clone(), at);
        }
        let nbytes = tensors.last().map_or(0, |tensor| tensor.end);
        let text = metadata.get(ORDER).filter(|_| !aliases.contains_key(ORDER));
        let order = text.and_then(|text| order_of(text, index.len()));
        let order = order.map_or_else(
            || (0..tensors.len()).collect(),
            |order| order.into_iter().filter(|&at| at < tensors.len()).collect(), // others are aliases
        );
        Ok(Layout { id: layout_id(header), tensors, aliases, metadata, nbytes, index, order })
    }

    /// Returns the tensors in the order of the publisher's model.
    pub fn in_order(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.order.iter().map(move |&at| &self.tensors[at])
    }

    /// Returns the tensor with this name or alias.
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.index.get(name).map(|&at| &self.tensors[at])
    }

    /// Returns all names, including aliases, in no particular order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.index.keys().map(String::as_str)
    }
}

/// Parses the metadata text of an order. Returns `None` unless the text has each index below `size`
/// once.
fn order_of(text: &str, size: usize) -> Option<Vec<usize>> {
    let mut unseen = vec![true; size];
    let mut order = Vec::with_capacity(size);
    for word in text.split(',') {
        let at: usize = word.parse().ok()?;
        if at.to_string() != word || !std::mem::replace(unseen.get_mut(at)?, false) {
            return None;
        }
        order.push(at);
    }
    Some(order).filter(|order| order.len() == size)
}

/// Returns the beginning of a name, for an error text.
fn short(name: &str) -> String {
    name.chars().take(40).collect()
}

/// Returns the JSON of a header, if its first bytes give its length.
fn json_of(header: &[u8]) -> Result<&[u8], LayoutError> {
    let stated = header.get(..8).and_then(|bytes| bytes.try_into().ok()).map(u64::from_le_bytes);
    let json = header.get(8..).unwrap_or_default();
    if stated != Some(json.len() as u64) || json.len() as u64 > LAYOUT_BYTES_MAX {
        return fault(format!(
            "a header of {} bytes says that it holds {:?} bytes of JSON; a header has 8 bytes more \
             than its JSON, and JSON has at most {} bytes",
            header.len(),
            stated.unwrap_or(0),
            LAYOUT_BYTES_MAX
        ));
    }
    if json.first() != Some(&b'{') {
        return fault("the header must begin with '{'".to_owned());
    }
    Ok(json)
}

/// Sorts tensors by position, and checks that they cover the data section without gaps.
fn sorted(mut tensors: Vec<TensorInfo>) -> Result<Vec<TensorInfo>, LayoutError> {
    tensors.sort_by_key(|tensor| (tensor.begin, tensor.end));
    let mut at = 0;
    for tensor in &tensors {
        check_name(&tensor.name)?;
        let nbytes = bytes_of(tensor)?;
        if tensor.begin != at || tensor.end.checked_sub(tensor.begin) != Some(nbytes) {
            return fault(format!(
                "tensor {:?} ({} {:?}, {} bytes) claims bytes {} to {}; it must own {} to {}, \
                 since tensors lie end to end",
                short(&tensor.name),
                tensor.dtype,
                tensor.shape,
                nbytes,
                tensor.begin,
                tensor.end,
                at,
                at + nbytes
            ));
        }
        at = tensor.end;
    }
    Ok(tensors)
}

fn check_name(name: &str) -> Result<(), LayoutError> {
    if (1..=NAME_BYTES_MAX).contains(&name.len()) {
        return Ok(());
    }
    fault(format!("a name has {} bytes; it may have 1 to {}", name.len(), NAME_BYTES_MAX))
}

/// Returns the size of a tensor in bytes. Fails if the tensor has too many bits or dimensions (L5,
/// L6).
fn bytes_of(tensor: &TensorInfo) -> Result<u64, LayoutError> {
    let bits = tensor.dtype.bits();
    // A size of 0 counts as 1: a reader may multiply the other sizes first, without overflow.
    let extent = tensor.shape.iter().try_fold(bits, |product, &size| product.checked_mul(size.max(1)));
    if extent.map_or(true, |extent| extent > INTEGER_MAX) || tensor.shape.len() > RANK_MAX {
        return fault(format!(
            "tensor {:?} has more than 2^53 bits, or more than {} dimensions",
            short(&tensor.name),
            RANK_MAX
        ));
    }
    let bits: u64 = tensor.shape.iter().product::<u64>() * bits; // no overflow: at most `extent`
    if bits % 8 != 0 {
        return fault(format!("tensor {:?} does not fill whole bytes", short(&tensor.name)));
    }
    Ok(bits / 8)
}

// Parsing of the JSON. serde's derive would accept arrays for objects, and keep the last of two
// equal keys. These visitors reject both.

#[derive(Default)]
struct Entries {
    tensors: Vec<TensorInfo>,
    metadata: Option<BTreeMap<String, String>>,
}

struct EntriesVisitor;

impl<'de> Visitor<'de> for EntriesVisitor {
    type Value = Entries;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
        let mut entries = Entries::default();
        let mut seen = std::collections::HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if seen.len() > TENSORS_MAX {
                return Err(de::Error::custom(format_args!("more than {} tensors", TENSORS_MAX)));
            }
            if !seen.insert(name.clone()) {
                return Err(duplicate_key(&name));
            }
            if name == "__metadata__" {
                entries.metadata = Some(map.next_value::<Texts>()?.0);
            } else {
                entries.tensors.push(map.next_value_seed(InfoOf(name))?);
            }
        }
        if entries.tensors.len() > TENSORS_MAX {
            return Err(de::Error::custom(format_args!("more than {} tensors", TENSORS_MAX)));
        }
        Ok(entries)
    }
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Entries, D::Error> {
        deserializer.deserialize_map(EntriesVisitor)
    }
}

fn duplicate_key<E: de::Error>(key: &str) -> E {
    E::custom(format_args!("{:?} occurs twice; each key may occur once", short(key)))
}

/// Reads the description of the tensor of this name.
struct InfoOf(String);

impl<'de> DeserializeSeed<'de> for InfoOf {
    type Value = TensorInfo;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<TensorInfo, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for InfoOf {
    type Value = TensorInfo;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "dtype, shape and data_offsets of {:?}", short(&self.0))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TensorInfo, A::Error> {
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(field) = map.next_key::<String>()? {
            let again = match field.as_str() {
                "dtype" => dtype.replace(map.next_value::<String>()?).is_some(),
                "shape" => shape.replace(map.next_value::<Vec<u64>>()?).is_some(),
                "data_offsets" => offsets.replace(map.next_value::<[u64; 2]>()?).is_some(),
                other => {
                    let (field, tensor) = (short(other), short(&self.0));
                    return Err(de::Error::custom(format_args!("{:?} in {:?}", field, tensor)));
                }
            };
            if again {
                return Err(duplicate_key(&field));
            }
        }
        let dtype = dtype.ok_or_else(|| de::Error::missing_field("dtype"))?;
        let shape = shape.ok_or_else(|| de::Error::missing_field("shape"))?;
        let [begin, end] = offsets.ok_or_else(|| de::Error::missing_field("data_offsets"))?;
        let known = Dtype::named(&dtype);
        let dtype = known.ok_or_else(|| de::Error::custom(format_args!("dtype {:?}", short(&dtype))))?;
        if begin > INTEGER_MAX || end > INTEGER_MAX || shape.iter().any(|&size| size > INTEGER_MAX) {
            return Err(de::Error::custom("a size or an offset beyond 2^53 - 1"));
        }
        Ok(TensorInfo { name: self.0, dtype, shape, begin, end })
    }
}

/// An object of strings.
struct Texts(BTreeMap<String, String>);

struct TextsVisitor;

impl<'de> Visitor<'de> for TextsVisitor {
    type Value = Texts;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Texts, A::Error> {
        let mut texts = BTreeMap::new();
        while let Some((key, text)) = map.next_entry::<String, String>()? {
            if texts.contains_key(&key) {
                return Err(duplicate_key(&key));
            }
            texts.insert(key, text);
        }
        Ok(Texts(texts))
    }
}

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Texts, D::Error> {
        deserializer.deserialize_map(TextsVisitor)
    }
}
