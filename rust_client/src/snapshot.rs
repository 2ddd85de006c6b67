//! A version that the user may keep for any length of time.

use crate::element::Element;
use crate::error::Error;
use crate::layout::{Layout, TensorInfo};
use crate::messages::Metadata;
use crate::model::no_tensor;
use crate::raw::cast::{copied, values_of};
use crate::staging::Buffer;
use crate::transfer::Key;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// One whole version of a model, immutable. Its memory is reused once the last reference is
/// dropped.
pub struct Snapshot {
    /// Id of the model.
    pub model: String,
    /// Epoch of the publisher.
    pub epoch: u64,
    /// Version number.
    pub version: u64,
    /// Metadata from the publisher: a map from names to texts.
    pub metadata: BTreeMap<String, String>,
    pub(crate) layout: Arc<Layout>,
    pub(crate) data: Arc<Buffer>,
}

impl Snapshot {
    /// Returns a snapshot of the same bytes under another key.
    pub(crate) fn renamed(&self, (epoch, version): Key, metadata: Metadata) -> Snapshot {
        let (layout, data) = (self.layout.clone(), self.data.clone());
        Snapshot { model: self.model.clone(), epoch, version, metadata, layout, data }
    }

    /// Returns the tensors, in the order of the publisher's model.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.layout.in_order()
    }

    /// Returns the layout, which also has the aliases of tensors and the layout's metadata.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the bytes of a tensor.
    pub fn bytes(&self, name: &str) -> Result<&[u8], Error> {
        self.find(name).map(|(_, bytes)| bytes)
    }

    /// Returns the elements of a tensor. They are copied only if the publisher did not align them.
    pub fn get<T: Element>(&self, name: &str) -> Result<Cow<'_, [T]>, Error> {
        let (info, bytes) = self.find(name)?;
        if info.dtype != T::DTYPE {
            return Err(Error::OtherDtype { name: name.to_owned(), dtype: info.dtype, asked: T::DTYPE });
        }
        Ok(values_of(bytes).map_or_else(|| Cow::Owned(copied(bytes)), Cow::Borrowed))
    }

    fn find(&self, name: &str) -> Result<(&TensorInfo, &[u8]), Error> {
        let known = || self.layout.tensors.iter().map(|tensor| tensor.name.as_str());
        let info = self.layout.get(name).ok_or_else(|| no_tensor(name, known()))?;
        Ok((info, &self.data[info.begin as usize..info.end as usize]))
    }
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Snapshot({} version {} of epoch {})", self.model, self.version, self.epoch)
    }
}
