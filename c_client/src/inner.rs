//! The implementation of the ABI: checks arguments, keeps error messages, and converts values for C.

use crate::{
    wb_code, wb_event, wb_offer, wb_options, wb_snapshot, wb_state, wb_tensor, wb_text, wb_update, wb_worker,
};
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CStr, CString};
use std::mem::{size_of, transmute, MaybeUninit};
use std::os::raw::{c_char, c_int, c_void};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::ptr;
use std::slice;
use std::sync::{Arc, Mutex, PoisonError};
use weightbus_core::messages::DELTA;
use weightbus_core::{
    Dtype, Error, Event, Model, ModelState, Offer, Snapshot, State, Tensor, TensorInfo, Update, WeightsGuard,
    Worker,
};

/// Why a call fails: a code, and an error message.
pub struct Fault(wb_code, String);

pub fn invalid(text: &str) -> Fault {
    Fault(wb_code::WB_INVALID, text.to_owned())
}

impl From<Error> for Fault {
    fn from(error: Error) -> Fault {
        let code = match &error {
            Error::Rejected { .. } => wb_code::WB_REJECTED,
            Error::Refused { .. } => wb_code::WB_REFUSED,
            Error::Closed { .. } | Error::PublisherClosed { .. } => wb_code::WB_CLOSED,
            Error::Torn => wb_code::WB_TORN,
            Error::Late(_) => wb_code::WB_NOTHING,
            Error::Publish { .. } => wb_code::WB_UNACHIEVED,
            Error::NoTensor { .. } | Error::UnknownWorker(_) => wb_code::WB_NOT_FOUND,
            Error::Io { .. } => wb_code::WB_SYSTEM,
            _ => wb_code::WB_INVALID,
        };
        Fault(code, error.to_string())
    }
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

pub fn last_error() -> *const c_char {
    LAST_ERROR.try_with(|error| error.borrow().as_ptr()).unwrap_or(b"\0".as_ptr().cast())
}

fn set_last_error(text: &str) {
    let _ = LAST_ERROR.try_with(|error| *error.borrow_mut() = c_text(text)); // fails while the thread ends
}

/// Returns a text for C. Zero bytes in the text are replaced, since they would end it.
pub fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default()
}

/// Runs the body of a call. Returns its code, or WB_PANIC. Stores an error's message for
/// wb_error().
pub fn answer(act: impl FnOnce() -> Result<wb_code, Fault>) -> wb_code {
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(Ok(code)) => code,
        Ok(Err(Fault(code, text))) => {
            set_last_error(&text);
            code
        }
        Err(_) => {
            set_last_error("a bug in libweightbus: see standard error");
            wb_code::WB_PANIC
        }
    }
}

/// Runs the body of a call without a code. Returns `otherwise` if it panics.
pub fn quietly<T>(otherwise: T, act: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(act)).unwrap_or(otherwise)
}

/// Makes a handle of `value`, and writes it to `place`.
///
/// # Safety
///
/// `place` must be NULL or writable.
pub unsafe fn out<T>(place: *mut *mut T, value: T) -> Result<wb_code, Fault> {
    if place.is_null() {
        return Err(invalid("the pointer for the result is NULL"));
    }
    // SAFETY: `place` is not NULL.
    unsafe { place.write(Box::into_raw(Box::new(value))) };
    Ok(wb_code::WB_OK)
}

/// Writes a value to `place`, unless that is NULL.
///
/// # Safety
///
/// `place` must be NULL or writable.
pub unsafe fn fill<T>(place: *mut T, value: T) {
    if !place.is_null() {
        // SAFETY: `place` is not NULL.
        unsafe { place.write(value) }
    }
}

/// Frees a handle that `out` made.
///
/// # Safety
///
/// `handle` must be NULL or made by `out`, and must not be used any more.
pub unsafe fn free<T>(handle: *mut T) {
    if !handle.is_null() {
        // SAFETY: the handle is a box of ours.
        quietly((), || drop(unsafe { Box::from_raw(handle) }));
    }
}

/// Returns a text of the C program. If `length` is 0, the text ends at its first zero byte.
///
/// # Safety
///
/// `text` must be NULL, or point to `length` bytes or to bytes that include a zero, for all of
/// `'a`.
pub unsafe fn text_of<'a>(text: *const c_char, length: usize, what: &str) -> Result<&'a str, Fault> {
    let bytes = match length {
        _ if text.is_null() => return Err(invalid(&format!("no {}", what))),
        // SAFETY: the caller guarantees that it ends.
        0 => unsafe { CStr::from_ptr(text) }.to_bytes(),
        // SAFETY: the caller guarantees these bytes.
        length => unsafe { slice::from_raw_parts(text.cast(), length) },
    };
    std::str::from_utf8(bytes).map_err(|_| invalid(&format!("the {} is not UTF-8", what)))
}

/// Returns an array of the C program, which may be NULL if it is empty.
///
/// # Safety
///
/// `first` must point to `count` values for all of `'a`, unless there are none.
pub unsafe fn array<'a, T>(first: *const T, count: usize, what: &str) -> Result<&'a [T], Fault> {
    match (first.is_null(), count) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(invalid(&format!("no {}", what))),
        // SAFETY: the caller guarantees these values.
        (false, count) => Ok(unsafe { slice::from_raw_parts(first, count) }),
    }
}

/// Makes a model of the caller's memory.
///
/// # Safety
///
/// As `wb_model_new` says.
pub unsafe fn model_of(tensors: *const wb_tensor, count: usize) -> Result<Model, Fault> {
    // SAFETY: guaranteed by the caller, here and below.
    let tensors = unsafe { array(tensors, count, "tensors") }?;
    let made = tensors.iter().map(|tensor| {
        let (name, dtype, shape) = unsafe { described(tensor) }?;
        if tensor.data.is_null() && tensor.nbytes > 0 {
            return Err(invalid(&format!("tensor {:?} has no memory", name)));
        }
        Ok(unsafe { Tensor::from_raw_parts(name, dtype, shape, tensor.data.cast(), tensor.nbytes) })
    });
    Ok(Model::new(made.collect::<Result<Vec<Tensor>, Fault>>()?)?)
}

/// Returns the name, the dtype and the shape of a tensor of the C program.
///
/// # Safety
///
/// As `wb_tensor` says, for all of `'a`.
pub unsafe fn described<'a>(tensor: &wb_tensor) -> Result<(&'a str, Dtype, &'a [u64]), Fault> {
    // SAFETY: guaranteed by the caller.
    let (name, dtype, shape) = unsafe {
        let name = text_of(tensor.name, tensor.name_bytes, "name of a tensor")?;
        (name, text_of(tensor.dtype, 0, "dtype")?, array(tensor.shape, tensor.rank, "shape")?)
    };
    let found = Dtype::named(dtype);
    let dtype = found.ok_or_else(|| invalid(&format!("tensor {:?}: unknown dtype {:?}", name, dtype)))?;
    Ok((name, dtype, shape))
}

/// Makes a model of zeros in this library's memory, and writes the address and size of each tensor
/// to `tensors`.
///
/// # Safety
///
/// As `wb_model_resident` says.
pub unsafe fn resident_of(tensors: *mut wb_tensor, count: usize) -> Result<Model, Fault> {
    // SAFETY: guaranteed by the caller, here and below.
    let described =
        unsafe { array(tensors, count, "tensors") }?.iter().map(|tensor| unsafe { described(tensor) });
    let zeros = described.map(|tensor| tensor.map(|(name, dtype, shape)| Tensor::zeros(name, dtype, shape)));
    let model = Model::new(zeros.collect::<Result<Vec<Tensor>, Fault>>()?)?;
    for (at, made) in model.read().tensors().iter().enumerate() {
        // SAFETY: there are as many, in this order. Only an apply writes to their memory.
        let tensor = unsafe { &mut *tensors.add(at) };
        (tensor.data, tensor.nbytes) = (made.bytes().as_ptr() as *mut c_void, made.bytes().len());
    }
    Ok(model)
}

/// Read access to a model. The guard is dropped before the model, and must not leave its thread.
pub struct Reading {
    guard: WeightsGuard<'static>,
    _model: Box<Model>,
}

impl Reading {
    pub fn of(model: &Model) -> Result<Reading, Fault> {
        let model = Box::new(model.clone());
        // SAFETY: the guard borrows the content of the box, which never moves, and outlives the
        // guard.
        let guard = unsafe { transmute::<WeightsGuard<'_>, WeightsGuard<'static>>(model.read()) };
        if guard.is_torn() {
            return Err(Error::Torn.into());
        }
        Ok(Reading { guard, _model: model })
    }

    pub fn version(&self) -> (u64, u64) {
        self.guard.version().unwrap_or((0, 0))
    }
}

/// Returns a copy of the caller's options for a worker.
///
/// # Safety
///
/// `options` must be NULL or have as many bytes as its first field says.
pub unsafe fn options_of(options: *const wb_options) -> Result<wb_options, Fault> {
    let first = MaybeUninit::<wb_options>::zeroed();
    // SAFETY: `apply` is within `first`. The fields before it were in the first header.
    let least = unsafe { ptr::addr_of!((*first.as_ptr()).apply) } as usize - first.as_ptr() as usize;
    // SAFETY: guaranteed by the caller; zeros are a value of each field.
    unsafe { copied(options, least, "wb_options") }
}

/// Returns a copy of a caller's options. The caller may have been compiled when there were fewer
/// fields, or more. `least` is the size of the fields in the first header.
///
/// # Safety
///
/// `options` must be NULL or have as many bytes as its first field says. Zeros must be valid
/// values.
pub unsafe fn copied<T: Copy>(options: *const T, least: usize, what: &str) -> Result<T, Fault> {
    const SIZE_MAX: usize = 4096; // no header will have more: a larger size was not initialised
    if options.is_null() {
        return Err(invalid("no options"));
    }
    // SAFETY: the first field exists.
    let (size, all) = (unsafe { options.cast::<usize>().read() }, size_of::<T>());
    let mut copy = MaybeUninit::<T>::zeroed();
    if size < least || size > SIZE_MAX {
        return Err(invalid(&format!("{0}.size is {1}, not {2}: set it to sizeof({0})", what, size, all)));
    }
    let known = size.min(all);
    // SAFETY: the caller has `size` bytes.
    let unknown = unsafe { slice::from_raw_parts(options.cast::<u8>().add(known), size - known) };
    if unknown.iter().any(|&byte| byte != 0) {
        return Err(invalid(&format!(
            "{} has a field that this library does not know: leave it zero, or use a newer library",
            what
        )));
    }
    // SAFETY: `known` bytes exist. The fields after them are zero, which is a value of each field.
    unsafe {
        copy.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(options.cast(), known);
        Ok(copy.assume_init())
    }
}

/// A model to subscribe to.
pub struct Target {
    pub id: String,
    pub model: Option<Model>,
}

impl Target {
    /// # Safety
    ///
    /// As `wb_options` says.
    pub unsafe fn all(options: &wb_options) -> Result<Vec<Target>, Fault> {
        // SAFETY: guaranteed by the caller, here and below.
        let wanted = unsafe { array(options.wanted, options.wanted_count, "models") }?;
        let target = |wanted: &crate::wb_wanted| unsafe {
            let id = text_of(wanted.id, 0, "id of a model")?.to_owned();
            Ok(Target { id, model: wanted.model.as_ref().map(|model| model.0.clone()) })
        };
        wanted.iter().map(target).collect()
    }
}

/// # Safety
///
/// `worker` must be NULL or live for all of `'a`.
pub unsafe fn worker_of<'a>(worker: *const wb_worker) -> Result<&'a Worker, Fault> {
    // SAFETY: guaranteed by the caller.
    unsafe { worker.as_ref() }.map(|worker| &worker.0).ok_or_else(|| invalid("no worker"))
}

/// # Safety
///
/// `worker` must be NULL or live for all of `'a`.
pub unsafe fn kept_metadata<'a>(worker: *const wb_worker) -> Result<&'a KeptMetadata, Fault> {
    // SAFETY: guaranteed by the caller.
    unsafe { worker.as_ref() }.map(|worker| &worker.2).ok_or_else(|| invalid("no worker"))
}

const METADATA_KEPT: usize = 8; // versions of each model: other threads may receive newer ones meanwhile

/// Metadata of a version, with its epoch and number.
type VersionMetadata = ((u64, u64), BTreeMap<String, String>);

/// Metadata of the last versions of each model that `wb_receive` returned.
#[derive(Default)]
pub struct KeptMetadata(Mutex<BTreeMap<String, VecDeque<VersionMetadata>>>);

impl KeptMetadata {
    pub fn keep(&self, update: &Update) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let last = all.entry(update.model.clone()).or_default();
        last.truncate(METADATA_KEPT - 1);
        last.push_front(((update.epoch, update.version), update.metadata.clone()));
    }

    fn of(&self, model: &str, key: (u64, u64)) -> Option<CMetadata> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(model)?.iter().find(|(known, _)| *known == key).map(|(_, metadata)| CMetadata::of(metadata))
    }
}

/// Returns the metadata of a version that `wb_receive` returned, or of the running version, which
/// may have been renamed since.
///
/// # Safety
///
/// `worker` must be NULL or live for this call.
pub unsafe fn metadata_of(
    worker: *const wb_worker,
    model: &str,
    key: (u64, u64),
) -> Result<Option<CMetadata>, Fault> {
    // SAFETY: guaranteed by the caller.
    let (all, worker) = unsafe { (kept_metadata(worker)?, worker_of(worker)?) };
    let runs = || worker.state().models.remove(model).filter(|state| state.running == Some(key));
    Ok(all.of(model, key).or_else(|| runs().map(|state| CMetadata::of(&state.metadata))))
}

/// Metadata of a version, as C reads it.
pub struct CMetadata {
    all: Vec<wb_text>, // point into `texts`
    texts: Vec<[CString; 2]>,
}

// SAFETY: the pointers are to texts that never change and that live as long as this object.
unsafe impl Send for CMetadata {}
unsafe impl Sync for CMetadata {}

impl CMetadata {
    fn of(metadata: &BTreeMap<String, String>) -> CMetadata {
        let texts: Vec<_> = metadata.iter().map(|(name, text)| [c_text(name), c_text(text)]).collect();
        let all = texts.iter().map(|[name, text]| wb_text { name: name.as_ptr(), text: text.as_ptr() });
        CMetadata { all: all.collect(), texts }
    }

    pub fn all(&self) -> &[wb_text] {
        &self.all
    }

    pub fn text(&self, name: &str) -> *const c_char {
        let found = self.texts.iter().find(|[known, _]| known.as_bytes() == name.as_bytes());
        found.map_or(ptr::null(), |[_, text]| text.as_ptr())
    }
}

/// The name and the addresses of a worker, as texts for C.
pub struct Names {
    pub worker: CString,
    addresses: Vec<CString>,
}

impl Names {
    pub fn address(&self, address: &str) -> *const c_char {
        let found = self.addresses.iter().find(|known| known.as_bytes() == address.as_bytes());
        found.map_or(b"\0".as_ptr().cast(), |address| address.as_ptr())
    }
}

/// Returns the worker with its name and addresses as texts for C.
pub fn named(worker: Worker) -> wb_worker {
    let addresses = worker.addresses().iter().map(|address| c_text(address)).collect();
    let names = Names { worker: c_text(worker.name()), addresses };
    wb_worker(worker, names, KeptMetadata::default())
}

/// A pointer that is only passed on to the caller's functions.
pub struct User(*mut c_void);

// SAFETY: the header requires that the pointer is valid in any thread.
unsafe impl Send for User {}
unsafe impl Sync for User {}

impl User {
    pub fn new(user: *mut c_void) -> User {
        User(user)
    }

    pub fn get(&self) -> *mut c_void {
        self.0
    }
}

/// Returns a listener that calls a function of C with each event.
pub fn listener(
    call: extern "C" fn(*const wb_event, *mut c_void),
    user: *mut c_void,
) -> impl FnMut(&Event) + Send + 'static {
    let user = User::new(user);
    move |event| {
        let moved;
        let (kind, (model, epoch, version), code, text) = match event {
            Event::Joined { epoch } => ("joined", ("", *epoch, 0), "", ""),
            Event::Lost => ("lost", ("", 0, 0), "", ""),
            Event::Refused { code, text } => ("refused", ("", 0, 0), code.as_str(), &text[..]),
            Event::Rejected { model, epoch, version, code, text } => {
                ("rejected", (&model[..], *epoch, *version), code.as_str(), &text[..])
            }
            Event::ChangedOver { from, to } => {
                moved = format!("from {} to {}", from, to);
                ("changed-over", ("", 0, 0), "", &moved[..])
            }
            Event::Notice { code, text } => ("notice", ("", 0, 0), code.as_str(), &text[..]),
            _ => return,
        };
        let (kind, model, code, text) = (c_text(kind), c_text(model), c_text(code), c_text(text));
        let (kind, model, code, text) = (kind.as_ptr(), model.as_ptr(), code.as_ptr(), text.as_ptr());
        call(&wb_event { kind, model, epoch, version, code, text }, user.get());
    }
}

/// Size of the memory for the reason that a function of C gives for a rejection.
const REASON_BYTES: usize = 1024;

/// Returns a function that makes a function of C decide on each version.
pub fn decide(
    call: extern "C" fn(*const wb_offer, *mut c_char, usize, *mut c_void) -> c_int,
    user: *mut c_void,
) -> impl Fn(&Offer) -> Result<(), Box<dyn std::error::Error>> + Send + Sync + 'static {
    let user = User::new(user);
    move |offer| {
        let model = c_text(offer.model);
        let snapshot = offer.snapshot.map(|snapshot| wb_snapshot(Tensors::of(snapshot.clone())));
        let (epoch, version, nbytes) = (offer.epoch, offer.version, offer.layout.nbytes);
        let snapshot = snapshot.as_ref().map_or(ptr::null(), |snapshot| snapshot as *const wb_snapshot);
        let offer = wb_offer { model: model.as_ptr(), epoch, version, nbytes, snapshot };
        let mut text = [0u8; REASON_BYTES];
        match call(&offer, text.as_mut_ptr().cast(), text.len(), user.get()) {
            0 => Ok(()),
            code => {
                let reason = text.split(|byte| *byte == 0).next().unwrap_or_default();
                let reason = String::from_utf8_lossy(reason).into_owned();
                Err(if reason.is_empty() { format!("rejected with code {}", code) } else { reason }.into())
            }
        }
    }
}

/// Fills the update at `place` with zeros, and returns it.
///
/// # Safety
///
/// `place` must be NULL or writable for all of `'a`.
pub unsafe fn blank<'a>(place: *mut wb_update) -> Result<&'a mut wb_update, Fault> {
    if place.is_null() {
        return Err(invalid("the pointer for the update is NULL"));
    }
    // SAFETY: `place` is not NULL, and zeros are a value of each field.
    unsafe {
        place.write_bytes(0, 1);
        Ok(&mut *place)
    }
}

/// Writes a text into an array of zeros, and cuts a text that would overwrite the last zero.
pub fn put(text: &str, array: &mut [c_char]) {
    let length_max = array.len() - 1;
    for (to, from) in array.iter_mut().zip(text.bytes().take(length_max)) {
        *to = from as c_char;
    }
}

pub fn fill_applied(update: &mut wb_update, found: Update) {
    update.epoch = found.epoch;
    update.version = found.version;
    update.nbytes = found.nbytes;
    update.nanoseconds = found.took.as_nanos() as u64;
    update.patched = found.encoding == DELTA;
    put(&found.model, &mut update.model);
    put(&found.digest, &mut update.digest);
    if let Some(snapshot) = found.snapshot {
        update.snapshot = Box::into_raw(Box::new(wb_snapshot(Tensors::of(snapshot))));
    }
}

pub fn fill_latest(update: &mut wb_update, snapshot: Arc<Snapshot>) -> wb_code {
    update.epoch = snapshot.epoch;
    update.version = snapshot.version;
    update.nbytes = snapshot.layout().nbytes;
    put(&snapshot.model, &mut update.model);
    update.snapshot = Box::into_raw(Box::new(wb_snapshot(Tensors::of(snapshot))));
    wb_code::WB_OK
}

pub fn fill_rejected(update: &mut wb_update, error: &Error) {
    match error {
        Error::Rejected { model, epoch, version, code, .. } => {
            update.epoch = *epoch;
            update.version = *version;
            put(model, &mut update.model);
            put(code.as_str(), &mut update.code);
        }
        Error::Refused { code, .. } => put(code.as_str(), &mut update.code),
        _ => {}
    }
}

pub fn state_of(state: &State, model: Option<&str>) -> Result<wb_state, Fault> {
    let found = match model {
        Some(id) => state.models.get(id).cloned().ok_or_else(|| invalid(&format!("no model {:?}", id)))?,
        None => ModelState::default(),
    };
    let (arriving, chunks_here, chunks) = found.arriving.unwrap_or_default();
    let (running_epoch, running_version) = found.running.unwrap_or_default();
    let (staged_epoch, staged_version) = found.staged.unwrap_or_default();
    let (ready_epoch, ready_version) = found.ready.unwrap_or_default();
    Ok(wb_state {
        epoch: state.epoch.unwrap_or(0),
        malformed: state.malformed,
        shared: state.shared,
        torn: found.torn,
        running_epoch,
        running_version,
        arriving_epoch: arriving.0,
        arriving_version: arriving.1,
        chunks_here,
        chunks,
        staged_epoch,
        staged_version,
        ready_epoch,
        ready_version,
    })
}

/// A snapshot, and its tensors as C reads them.
pub struct Tensors {
    all: Vec<wb_tensor>, // point into `_texts` and `snapshot`
    _texts: Vec<(Vec<u8>, CString)>,
    snapshot: Arc<Snapshot>,
}

// SAFETY: the pointers are to memory that never changes and that lives as long as this object.
unsafe impl Send for Tensors {}
unsafe impl Sync for Tensors {}

impl Tensors {
    fn of(snapshot: Arc<Snapshot>) -> Tensors {
        let infos = || snapshot.tensors();
        let texts: Vec<_> = infos().map(|info| (with_zero(&info.name), c_text(info.dtype.name()))).collect();
        let look = |(info, (name, dtype)): (&TensorInfo, &(Vec<u8>, CString))| {
            let bytes = snapshot.bytes(&info.name).unwrap_or_default();
            wb_tensor {
                name: name.as_ptr().cast(),
                name_bytes: info.name.len(),
                dtype: dtype.as_ptr(),
                shape: info.shape.as_ptr(),
                rank: info.shape.len(),
                data: bytes.as_ptr() as *mut c_void, // only to be read, says the header
                nbytes: bytes.len(),
            }
        };
        let all = infos().zip(&texts).map(look).collect();
        Tensors { all, _texts: texts, snapshot }
    }

    pub fn all(&self) -> &[wb_tensor] {
        &self.all
    }

    pub fn find(&self, name: &str) -> Result<wb_tensor, Fault> {
        self.snapshot.bytes(name)?; // lists the known names if there is no such tensor
        let info = self.snapshot.layout().get(name);
        let mut infos = self.snapshot.tensors();
        let at = info.and_then(|info| infos.position(|other| other.name == info.name));
        at.map(|at| self.all[at]).ok_or_else(|| invalid(&format!("tensor {:?} is not in the snapshot", name)))
    }
}

/// Returns the bytes of a text, which may include zero bytes, and a zero byte.
fn with_zero(text: &str) -> Vec<u8> {
    [text.as_bytes(), &[0]].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_panic_gets_out() {
        assert_eq!(answer(|| panic!("a test")), wb_code::WB_PANIC);
        // SAFETY: the message of this thread stays until the next failure.
        let words = unsafe { CStr::from_ptr(last_error()) };
        assert!(words.to_str().unwrap().contains("bug"), "{:?}", words);
        assert_eq!(quietly(-1, || panic!("a test")), -1);
    }

    #[test]
    fn an_update_is_as_large_as_it_was_without_its_last_field() {
        let fields = 4 * size_of::<u64>() + size_of::<usize>() + 129 + 65 + 129;
        let aligned = (fields + 7) / 8 * 8; // programs that were compiled without it have that much room
        assert_eq!(size_of::<wb_update>(), aligned);
    }

    #[test]
    fn texts_of_any_kind_are_texts_of_c() {
        assert_eq!(c_text("a\0b").to_str().unwrap(), "a\u{fffd}b");
        let mut place = [1 as c_char; 4];
        put("abcdef", &mut place);
        assert_eq!(place[..3], [b'a' as c_char, b'b' as c_char, b'c' as c_char]);
    }
}
