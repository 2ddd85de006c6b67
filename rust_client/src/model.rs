//! The memory of a model: the user's tensors, which are read through guards and written in place.
//!
//! A reader sees one complete version: versions are written only while there is no reader
//! (`gate.rs`).

use crate::casting::{can_cast, cast, lost_values, Overflow};
use crate::dtype::Dtype;
use crate::element::Element;
use crate::error::Error;
use crate::gate::{Call, Gate, Pass, Reader};
use crate::layout::{Layout, TensorInfo};
use crate::limits::DIFFERENCES_MAX;
use crate::messages::Metadata;
use crate::raw::cast::{bytes_of, bytes_of_mut, values_of};
use crate::raw::memory::{zeros, Home};
use crate::staging::Buffer;
use crate::transfer::Key;
use crate::words::escaped;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Instant;

/// Memory of elements of any dtype.
pub(crate) trait Memory: Send + Sync {
    fn bytes(&self) -> &[u8];
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// The user's memory, with elements of type `T`.
struct Numbers<T, M>(M, PhantomData<T>);

impl<T: Element, M: AsRef<[T]> + AsMut<[T]> + Send + Sync> Memory for Numbers<T, M> {
    fn bytes(&self) -> &[u8] {
        bytes_of(self.0.as_ref())
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytes_of_mut(self.0.as_mut())
    }
}

/// Zeroed memory for elements of any dtype: words, and the number of bytes in use.
struct Zeros(Vec<u64>, usize);

impl Memory for Zeros {
    fn bytes(&self) -> &[u8] {
        &bytes_of(&self.0)[..self.1]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytes_of_mut(&mut self.0)[..self.1]
    }
}

/// A named array of numbers, row-major.
pub struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    memory: Box<dyn Memory>,
    movable: bool, // made by `zeros`: `Model::new` may move its memory
}

impl Tensor {
    /// Makes a tensor of existing memory: a `Vec`, a `Box<[T]>`, a `&'static mut [T]`, or any other
    /// memory that can be borrowed as a slice. `Model::new` checks that the memory fills the shape.
    pub fn new<T, M>(name: impl Into<String>, shape: &[u64], numbers: M) -> Tensor
    where
        T: Element,
        M: AsRef<[T]> + AsMut<[T]> + Send + Sync + 'static,
    {
        Tensor::of(name.into(), T::DTYPE, shape, Box::new(Numbers(numbers, PhantomData)))
    }

    pub(crate) fn of(name: String, dtype: Dtype, shape: &[u64], memory: Box<dyn Memory>) -> Tensor {
        Tensor { name, dtype, shape: shape.to_vec(), memory, movable: false }
    }

    /// Makes a tensor of zeros, with a dtype chosen at run time. If the memory cannot be allocated,
    /// `Model::new` returns an error.
    ///
    /// If all tensors of a model are made this way, and together have 2 MiB or more, a version from
    /// the network is not copied into them: the memory pages of the tensors are exchanged with the
    /// pages of the version. So do not fork during an apply, and do not register this memory with a
    /// device or a network card (`cudaHostRegister`, `ibv_reg_mr`, buffers of `io_uring`), which
    /// would keep using the old pages. The effects of `mlock`, `madvise` and `mbind` move with the
    /// pages, too. Use `new` for such memory.
    pub fn zeros(name: impl Into<String>, dtype: Dtype, shape: &[u64]) -> Tensor {
        let bytes = nbytes_of(dtype, shape).unwrap_or(0) as usize; // `Model::new` reports the error
        let zeros = zeros((bytes + 7) / 8);
        let memory = Box::new(zeros.map_or(Zeros(Vec::new(), 0), |zeros| Zeros(zeros, bytes)));
        Tensor { movable: true, ..Tensor::of(name.into(), dtype, shape, memory) }
    }

    pub(crate) fn move_to(&mut self, memory: Box<dyn Memory>) {
        self.memory = memory;
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the dtype.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the size of each dimension.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        self.memory.bytes()
    }

    /// Returns the elements, or `Error::OtherDtype` if their type is not `T`.
    pub fn numbers<T: Element>(&self) -> Result<&[T], Error> {
        let numbers = if T::DTYPE == self.dtype { values_of(self.bytes()) } else { None };
        numbers.ok_or_else(|| Error::OtherDtype {
            name: self.name.clone(),
            dtype: self.dtype,
            asked: T::DTYPE,
        })
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Tensor({} {} {:?})", self.name, self.dtype, self.shape)
    }
}

fn nbytes_of(dtype: Dtype, shape: &[u64]) -> Option<u64> {
    let bits = shape.iter().try_fold(dtype.bits(), |bits, &size| bits.checked_mul(size))?;
    (bits % 8 == 0).then_some(bits / 8)
}

/// The content of a model's memory.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Content {
    /// The initial values, no version.
    Initial,
    /// A version, with its metadata.
    Version(Key, Metadata),
    /// A version that the user's function has not decided on yet.
    Undecided,
    /// Parts of two versions, or a rejected version.
    Torn,
}

/// The tensors of a model, with the values of one version.
pub struct Weights {
    tensors: Vec<Tensor>,
    home: Option<Home>, // one memory for all tensors, if they were made by `Tensor::zeros`
    index: HashMap<String, usize>,
    content: Arc<Mutex<Content>>, // shared: a version may be renamed while a guard exists
}

impl Weights {
    /// Returns the epoch and the number of the version in these weights. Returns `None` before the
    /// first version, and while no version runs.
    pub fn version(&self) -> Option<(u64, u64)> {
        match *lock_content(&self.content) {
            Content::Version(key, _) => Some(key),
            Content::Initial | Content::Undecided | Content::Torn => None,
        }
    }

    /// Returns the publisher's metadata of the running version: a map from names to texts, which
    /// may be empty.
    pub fn metadata(&self) -> BTreeMap<String, String> {
        match &*lock_content(&self.content) {
            Content::Version(_, metadata) => metadata.clone(),
            Content::Initial | Content::Undecided | Content::Torn => BTreeMap::new(),
        }
    }

    /// True if an apply failed half-way, so that no version runs.
    pub fn is_torn(&self) -> bool {
        *lock_content(&self.content) == Content::Torn
    }

    /// Returns all tensors, in the order given to `Model::new`. Returns no tensors if an apply
    /// failed half-way.
    pub fn tensors(&self) -> &[Tensor] {
        if self.is_torn() {
            return &[]; // W24
        }
        &self.tensors
    }

    /// Returns the tensor of this name, or `Error::Torn` if an apply failed half-way.
    pub fn tensor(&self, name: &str) -> Result<&Tensor, Error> {
        if self.is_torn() {
            return Err(Error::Torn); // W24
        }
        let found = self.index.get(name).map(|&at| &self.tensors[at]);
        found.ok_or_else(|| no_tensor(name, self.tensors.iter().map(Tensor::name)))
    }

    /// Returns the elements of a tensor.
    pub fn get<T: Element>(&self, name: &str) -> Result<&[T], Error> {
        self.tensor(name)?.numbers()
    }
}

fn lock_content(content: &Mutex<Content>) -> MutexGuard<'_, Content> {
    content.lock().unwrap_or_else(PoisonError::into_inner) // a single value, never half written
}

/// Returns the error for an unknown tensor name, which lists the known names.
pub(crate) fn no_tensor<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Error {
    let mut known: Vec<&str> = known.take(DIFFERENCES_MAX + 1).collect();
    if known.len() > DIFFERENCES_MAX {
        known[DIFFERENCES_MAX] = "...";
    }
    Error::NoTensor { name: name.to_owned(), known: escaped(&known.join(", ")) }
}

impl fmt::Debug for Weights {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Weights({} tensors of version {:?})", self.tensors.len(), self.version())
    }
}

struct Inner {
    signature: BTreeMap<String, (Dtype, Vec<u64>)>,
    first_names: HashMap<String, String>, // maps each name of a tensor with several names to the first
    nbytes: u64,
    content: Arc<Mutex<Content>>,
    weights: RwLock<Weights>, // never contended, since a thread passes the gate first
    gate: Gate,
}

/// A model that new versions are written to. Clones refer to the same memory.
#[derive(Clone)]
pub struct Model(Arc<Inner>);

impl Model {
    /// Makes a model of the user's tensors.
    pub fn new(tensors: impl IntoIterator<Item = Tensor>) -> Result<Model, Error> {
        let mut tensors: Vec<Tensor> = tensors.into_iter().collect();
        let mut index = HashMap::new();
        let mut signature = BTreeMap::new();
        for (at, tensor) in tensors.iter().enumerate() {
            let bytes = tensor.bytes().len() as u64;
            let wanted = nbytes_of(tensor.dtype, &tensor.shape);
            if let (true, 0, Some(1..)) = (tensor.movable, bytes, wanted) {
                let what = format!("tensor {:?} of {} {:?}", tensor.name, tensor.dtype, tensor.shape);
                return Err(Error::Io { what, error: io::ErrorKind::OutOfMemory.into() });
            }
            if wanted != Some(bytes) {
                return Err(Error::Setup(format!(
                    "tensor {:?} has {} bytes, which do not fill {} {:?}",
                    tensor.name, bytes, tensor.dtype, tensor.shape
                )));
            }
            if index.insert(tensor.name.clone(), at).is_some() {
                return Err(Error::Setup(format!("two tensors are called {:?}; rename one", tensor.name)));
            }
            signature.insert(tensor.name.clone(), (tensor.dtype, tensor.shape.clone()));
        }
        let first_names = first_names_of(&tensors)?;
        let once = tensors
            .iter()
            .filter(|tensor| first_names.get(&tensor.name).map_or(true, |first| *first == tensor.name));
        let total = once.map(|tensor| tensor.bytes().len() as u64).sum();
        let movable = tensors.iter().all(|tensor| tensor.movable);
        let home = if movable { Home::of(&mut tensors) } else { None };
        let content = Arc::new(Mutex::new(Content::Initial));
        Ok(Model(Arc::new(Inner {
            signature,
            first_names,
            nbytes: total,
            content: content.clone(),
            weights: RwLock::new(Weights { tensors, home, index, content }),
            gate: Gate::default(),
        })))
    }

    /// Returns the number of tensor names.
    pub(crate) fn count(&self) -> usize {
        self.0.signature.len()
    }

    /// Returns the size of all tensors in bytes.
    pub fn nbytes(&self) -> u64 {
        self.0.nbytes
    }

    /// Returns the weights, which do not change while the guard lives. Waits while a version is
    /// being written, and while the user's function decides on a version. Do not call
    /// `Worker::receive` while this thread holds a guard: `receive` would wait for the guard until
    /// its timeout.
    pub fn read(&self) -> WeightsGuard<'_> {
        let pass = self.0.gate.read();
        let weights = self.0.weights.read().unwrap_or_else(PoisonError::into_inner);
        let mut content = lock_content(&self.0.content);
        if *content == Content::Undecided {
            *content = Content::Torn; // W24: the user's function is late, else this reader would still wait
        }
        WeightsGuard { weights, _pass: pass }
    }

    /// Waits until there is no reader. Returns exclusive access, or `None` at the deadline or once
    /// `wanted` returns false.
    pub(crate) fn write(&self, deadline: Instant, wanted: &dyn Fn() -> bool) -> Option<Writing<'_>> {
        self.0.gate.write(deadline, wanted).map(|pass| Writing { inner: &self.0, pass })
    }

    /// Calls `copy` for each tensor of a layout, with the tensor's offset in the data section and
    /// the tensor's bytes in the model. Returns false if a tensor is missing, if `copy` returns
    /// false, if an apply failed half-way, or if a version is still being written at the deadline.
    pub(crate) fn gather(
        &self,
        layout: &Layout,
        deadline: Instant,
        mut copy: impl FnMut(usize, &[u8]) -> bool,
    ) -> bool {
        let _pass = match self.0.gate.read_first(deadline) {
            Some(pass) => pass,
            None => return false,
        };
        let weights = self.0.weights.read().unwrap_or_else(PoisonError::into_inner);
        // for a tensor that the model has only under another of its names
        let by_alias = |info: &TensorInfo| {
            let names_it = |name: &str| layout.get(name).map_or(false, |other| other.name == info.name);
            weights.tensors.iter().position(|tensor| names_it(&tensor.name))
        };
        let bytes_of = |info: &TensorInfo| {
            let at = weights.index.get(&info.name).copied().or_else(|| by_alias(info))?;
            let bytes = weights.tensors[at].bytes();
            Some(bytes).filter(|bytes| bytes.len() as u64 == info.end - info.begin)
        };
        !weights.is_torn()
            && layout
                .tensors
                .iter()
                .all(|info| bytes_of(info).map_or(false, |bytes| copy(info.begin as usize, bytes)))
    }

    pub(crate) fn gate(&self) -> &Gate {
        &self.0.gate
    }

    /// Returns the running version, as (epoch, number), with its metadata. The bool is true if no
    /// version runs because an apply failed half-way. Does not wait for readers or writers.
    pub(crate) fn running(&self) -> (Option<(Key, Metadata)>, bool) {
        match &*lock_content(&self.0.content) {
            Content::Initial => (None, false),
            Content::Version(key, metadata) => (Some((*key, metadata.clone())), false),
            Content::Undecided => (None, self.0.gate.is_overdue()),
            Content::Torn => (None, true),
        }
    }

    /// Gives the running version the number `key` and this metadata, if its number is `was`.
    pub(crate) fn rename(&self, was: Key, key: Key, metadata: &Metadata) {
        let mut content = lock_content(&self.0.content);
        if matches!(*content, Content::Version(known, _) if known == was) {
            *content = Content::Version(key, metadata.clone());
        }
    }

    /// Returns a text with the differences between the model's tensors and a layout, one a line, or
    /// `None` if the layout fits. With `partial`, the model may lack tensors of the layout; with
    /// `casts`, any two float dtypes fit. A tensor may have several names on either side: a
    /// published tensor fits if the model has any of its names, and a tensor of the model is filled
    /// if any of its names is published.
    #[doc(hidden)]
    pub fn fault(&self, layout: &Layout, partial: bool, casts: bool) -> Option<String> {
        let signature = &self.0.signature;
        let first = |name: &str| self.0.first_names.get(name);
        let shared: Vec<&str> =
            signature.keys().map(String::as_str).filter(|name| layout.get(name).is_some()).collect();
        let filled: HashSet<&String> = shared.iter().filter_map(|name| first(name)).collect();
        let matched: HashSet<&str> =
            shared.iter().filter_map(|name| layout.get(name)).map(|info| &info.name[..]).collect();
        let is_matched = |name: &str| layout.get(name).map_or(false, |info| matched.contains(&info.name[..]));
        let is_filled = |name: &str| first(name).map_or(false, |first| filled.contains(first));
        let published = layout.names().filter(|name| !partial && !is_matched(name)); // W6
        let own = signature
            .keys()
            .map(String::as_str)
            .filter(|name| layout.get(name).is_some() || !is_filled(name));
        let mut names: Vec<&str> = published.chain(own).collect();
        names.sort_unstable();
        names.dedup();
        let (mut lines, mut count) = (Vec::new(), 0);
        let mut differs = |line: &dyn Fn(String) -> String, name: &str| {
            count += 1;
            if count <= DIFFERENCES_MAX {
                lines.push(line(escaped(name)));
            }
        };
        for name in names {
            let published = layout.get(name).map(|info| (info.dtype, &info.shape));
            let own = signature.get(name).map(|(dtype, shape)| (*dtype, shape));
            match (published, own) {
                (Some((dtype, shape)), None) => {
                    differs(
                        &|name| format!("{}: published as {} {:?}, not in the target", name, dtype, shape),
                        name,
                    );
                }
                (None, Some((dtype, shape))) => {
                    differs(
                        &|name| format!("{}: {} {:?} in the target, not published", name, dtype, shape),
                        name,
                    );
                }
                (Some((dtype, shape)), Some((own_dtype, own_shape))) => {
                    if shape != own_shape {
                        differs(
                            &|name| format!("{}: shape {:?} published, {:?} here", name, shape, own_shape),
                            name,
                        );
                    }
                    if dtype != own_dtype && !(casts && can_cast(dtype, own_dtype)) {
                        differs(
                            &|name| format!("{}: dtype {} published, {} here", name, dtype, own_dtype),
                            name,
                        );
                    }
                }
                (None, None) => {}
            }
        }
        if count > DIFFERENCES_MAX {
            lines.truncate(DIFFERENCES_MAX - 1);
            lines.push(format!("... and {} more", count - DIFFERENCES_MAX + 1));
        }
        (!lines.is_empty()).then(|| lines.join("\n"))
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Model({} tensors, {} bytes)", self.0.signature.len(), self.0.nbytes)
    }
}

/// Exclusive access to write a model.
pub(crate) struct Writing<'a> {
    inner: &'a Inner,
    pass: Pass<'a>,
}

impl Writing<'_> {
    /// Returns the version that the model holds.
    pub fn version(&self) -> Option<Key> {
        self.inner.weights.read().unwrap_or_else(PoisonError::into_inner).version()
    }

    pub fn set_content(&self, now: Content) {
        *lock_content(&self.inner.content) = now;
    }

    /// Returns an error message if two names share memory here, but have different values in a
    /// version. `copy` fills a slice with the version's bytes from an offset in the data section.
    pub fn tie_fault(&self, layout: &Layout, mut copy: impl FnMut(usize, &mut [u8])) -> Option<String> {
        const PIECE: usize = 1 << 16;
        // maps the first name of a tensor to the first of its names that is published
        let mut written: HashMap<&str, &str> = HashMap::new();
        let (mut one, mut other) = (vec![0; PIECE], vec![0; PIECE]);
        let mut names: Vec<(&String, &String)> = self.inner.first_names.iter().collect();
        names.sort_unstable();
        for (name, first) in names {
            let info = match layout.get(name) {
                Some(info) => info,
                None => continue, // another name of this memory is published
            };
            let before = *written.entry(first).or_insert(name);
            let twin = layout.get(before)?;
            let mut alike = twin.end - twin.begin == info.end - info.begin;
            let mut at = 0;
            while alike && twin.begin != info.begin && at < (info.end - info.begin) as usize {
                let size = PIECE.min((info.end - info.begin) as usize - at);
                copy(twin.begin as usize + at, &mut one[..size]);
                copy(info.begin as usize + at, &mut other[..size]);
                alike = one[..size] == other[..size];
                at += size;
            }
            if !alike {
                return Some(format!(
                    "{} and {} are one tensor here, but were published with different values; give each memory of its own, or tie them at the publisher",
                    before, name
                ));
            }
        }
        None
    }

    /// Exchanges the memory pages of the tensors with those of a version. Returns false, with
    /// nothing changed, if that is not possible.
    pub fn exchange(&self, layout: &Layout, version: &mut Buffer) -> bool {
        let mut weights = self.inner.weights.write().unwrap_or_else(PoisonError::into_inner);
        let Weights { tensors, home, .. } = &mut *weights;
        match (home, version.pages()) {
            (Some(home), Some(pages)) => home.exchange(tensors, layout, pages),
            _ => false,
        }
    }

    /// Fills every tensor: calls `copy` with an offset in the data section and the memory to fill.
    /// Returns the tensors in which a cast made finite values infinite.
    pub fn fill(&self, layout: &Layout, mut copy: impl FnMut(usize, &mut [u8])) -> Vec<Overflow> {
        let mut lost = Vec::new();
        let mut weights = self.inner.weights.write().unwrap_or_else(PoisonError::into_inner);
        for tensor in &mut weights.tensors {
            let (to, bytes) = (tensor.dtype, tensor.memory.bytes_mut());
            match layout.get(&tensor.name) {
                Some(info) if info.dtype == to => copy(info.begin as usize, bytes),
                Some(info) => match copy_cast(info, to, bytes, &mut copy) {
                    0 => {}
                    count => lost.push(Overflow { name: tensor.name.clone(), dtype: to, count }),
                },
                None => {}
            }
        }
        lost
    }

    /// Calls `function` with the weights in the memory, while nothing can change them. Readers wait
    /// until the function returns or exceeds the deadline of `call`.
    pub fn call_with_weights<T>(&self, call: &Arc<Call>, function: impl FnOnce(&Weights) -> T) -> T {
        self.pass.begin_call(call);
        let weights = self.inner.weights.read().unwrap_or_else(PoisonError::into_inner);
        let result = function(&weights);
        drop(weights);
        self.pass.end_call();
        result
    }
}

/// Maps each name of a tensor with several names to its first name. Returns an error if two tensors
/// overlap only in part: the memory cannot hold both.
fn first_names_of(tensors: &[Tensor]) -> Result<HashMap<String, String>, Error> {
    let span = |tensor: &Tensor| {
        let bytes = tensor.bytes().as_ptr_range();
        (bytes.start as usize, bytes.end as usize)
    };
    let mut spans: Vec<(usize, usize, &Tensor)> = tensors
        .iter()
        .filter(|tensor| !tensor.bytes().is_empty())
        .map(|tensor| (span(tensor).0, span(tensor).1, tensor))
        .collect();
    spans.sort_by(|a, b| (a.0, &a.2.name).cmp(&(b.0, &b.2.name)));
    let mut same = HashMap::new();
    let mut last: Option<(usize, usize, &Tensor)> = None;
    for (begin, end, tensor) in spans {
        match last {
            Some(one) if begin < one.1 => {
                let first = one.2;
                if (begin, end, tensor.dtype, &tensor.shape) != (one.0, one.1, first.dtype, &first.shape) {
                    return Err(Error::Setup(format!(
                        "{:?} and {:?} share a part of their memory, which cannot hold both; give each memory of its own",
                        first.name, tensor.name
                    )));
                }
                same.insert(first.name.clone(), first.name.clone());
                same.insert(tensor.name.clone(), first.name.clone());
            }
            _ => last = Some((begin, end, tensor)),
        }
    }
    Ok(same)
}

/// Fills a tensor with converted values of another dtype, piece by piece. Returns the number of
/// finite values that became infinite.
fn copy_cast(info: &TensorInfo, to: Dtype, bytes: &mut [u8], mut copy: impl FnMut(usize, &mut [u8])) -> u64 {
    const VALUES: usize = 4096; // per piece, so that a piece stays in the L1 cache
    let (from_bytes, to_bytes) = (info.dtype.bits() as usize / 8, to.bits() as usize / 8);
    let mut piece = [0; 8 * VALUES];
    let mut count = 0;
    for (index, target) in bytes.chunks_mut(to_bytes * VALUES).enumerate() {
        let source = &mut piece[..target.len() / to_bytes * from_bytes];
        copy(info.begin as usize + index * VALUES * from_bytes, source);
        cast(info.dtype, source, to, target);
        count += lost_values(info.dtype, source, to, target);
    }
    count
}

/// Read access to the weights, which do not change while this guard lives.
pub struct WeightsGuard<'a> {
    weights: RwLockReadGuard<'a, Weights>, // dropped first
    _pass: Reader<'a>,
}

impl Deref for WeightsGuard<'_> {
    type Target = Weights;

    fn deref(&self) -> &Weights {
        &self.weights
    }
}

impl fmt::Debug for WeightsGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.weights.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::layout;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::Duration;

    const LONG: Duration = Duration::from_secs(20);

    fn model() -> Model {
        Model::new([Tensor::new("a", &[5000], vec![0u8; 5000]), Tensor::new("b", &[], vec![0u8])]).unwrap()
    }

    fn fill(writing: &Writing, byte: u8) {
        let json = r#"{"a":{"dtype":"U8","shape":[5000],"data_offsets":[0,5000]},"b":{"dtype":"U8","shape":[],"data_offsets":[5000,5001]}}"#;
        writing.fill(&layout(json), |_, bytes| bytes.fill(byte));
    }

    #[test]
    fn a_reader_never_sees_two_versions() {
        let (model, done) = (model(), AtomicBool::new(false));
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        let weights = model.read();
                        let first = weights.get::<u8>("b").unwrap()[0];
                        assert!(weights.get::<u8>("a").unwrap().iter().all(|byte| *byte == first));
                    }
                });
            }
            for round in 0..2000u32 {
                let written =
                    model.write(Instant::now() + LONG, &|| true).map(|writing| fill(&writing, round as u8));
                assert!(written.is_some(), "steady readers kept a writer out");
            }
            done.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn parts_of_two_versions_are_served_to_nobody() {
        let model = model();
        let hold = |now| model.write(Instant::now(), &|| true).unwrap().set_content(now);
        let said = |step: &str| Metadata::from([("step".to_owned(), step.to_owned())]);
        hold(Content::Version((1, 2), said("12")));
        model.rename((1, 1), (2, 1), &said("it does not run"));
        assert_eq!((model.read().version(), model.read().metadata()), (Some((1, 2)), said("12")));
        model.rename((1, 2), (2, 1), &said("11"));
        assert_eq!((model.read().version(), model.read().metadata()), (Some((2, 1)), said("11")));
        hold(Content::Torn);
        model.rename((2, 1), (3, 1), &said("10"));
        let weights = model.read();
        assert!(weights.is_torn() && weights.version().is_none() && weights.tensors().is_empty());
        assert!(weights.metadata().is_empty());
        assert!(matches!(weights.get::<u8>("b"), Err(Error::Torn)));
        drop(weights);
        hold(Content::Version((2, 1), Metadata::new()));
        assert_eq!(model.read().get::<u8>("b").unwrap(), [0]);
    }

    #[test]
    fn what_a_model_holds_is_gathered_unless_it_is_being_written() {
        let model = model();
        let json = r#"{"b":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[5000],"data_offsets":[1,5001]}}"#;
        let layout = layout(json);
        let gathered = || {
            let mut bytes = vec![9; 5001];
            let copy = |begin: usize, from: &[u8]| {
                bytes[begin..begin + from.len()].copy_from_slice(from);
                true
            };
            model.gather(&layout, Instant::now(), copy).then_some(bytes)
        };
        let writing = model.write(Instant::now(), &|| true).unwrap();
        fill(&writing, 3);
        assert!(gathered().is_none(), "it may be half of one");
        drop(writing);
        let reader = model.read();
        assert_eq!(gathered(), Some(vec![3; 5001]));
        drop(reader);
        assert!(!model.gather(&layout, Instant::now(), |_, _| false), "it was stopped");
        model.write(Instant::now(), &|| true).unwrap().set_content(Content::Torn);
        assert!(gathered().is_none(), "parts of two versions");
    }

    #[test]
    fn a_writer_gives_up_and_readers_go_on() {
        let model = model();
        let guard = model.read();
        assert!(model.write(Instant::now(), &|| true).map(|writing| fill(&writing, 1)).is_none());
        let other = model.read(); // no writer waits any more
        assert_eq!(other.get::<u8>("b").unwrap(), [0]);
        drop((guard, other));
        assert!(model.write(Instant::now(), &|| true).map(|writing| fill(&writing, 1)).is_some());
    }
}
