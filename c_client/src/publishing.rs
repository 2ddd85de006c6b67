//! The implementation of the ABI of publishers.

use crate::inner::{array, c_text, copied, described, invalid, out, put, text_of, Fault, User};
use crate::{
    wb_code, wb_event, wb_outcome, wb_publish_options, wb_published, wb_publisher, wb_publisher_options,
    wb_receipt, wb_tensor, WB_ENCODING_AUTO, WB_ENCODING_DELTA, WB_ENCODING_DELTA_FLAT, WB_ENCODING_RAW,
    WB_WAIT_APPLIED, WB_WAIT_NOBODY, WB_WAIT_STAGED,
};
use std::ffi::CString;
use std::mem::size_of;
use std::os::raw::{c_char, c_void};
use std::ptr;
use std::slice;
use std::time::Duration;
use weightbus_core::{
    Encoding, Error, PublishOptions, Publisher, PublisherBuilder, Receipt, Require, TensorView, Wait,
    WorkerEvent,
};

const BASES: usize = 2; // the default of `PublisherBuilder::bases`

/// # Safety
///
/// As the header requires of the arguments.
pub unsafe fn builder_of(options: *const wb_publisher_options) -> Result<PublisherBuilder, Fault> {
    let all = size_of::<wb_publisher_options>();
    // SAFETY: guaranteed by the caller, here and below.
    let options = unsafe { copied(options, all, "wb_publisher_options") }?;
    let text = |text: *const c_char, what| match text.is_null() {
        true => Ok(None),
        false => unsafe { text_of(text, 0, what) }.map(Some),
    };
    let mut builder = Publisher::builder(unsafe { text_of(options.address, 0, "address") }?);
    if let Some(data) = text(options.data, "data")? {
        builder = builder.data(data);
    }
    if let Some(address) = text(options.advertise, "advertise")? {
        builder = builder.advertise(address);
    }
    if let Some(folder) = text(options.state, "state")? {
        builder = builder.state(folder);
    }
    if options.history > 0 {
        builder = builder.history(options.history);
    }
    if options.epoch > 0 {
        builder = builder.epoch(options.epoch);
    }
    if options.chunk_bytes > 0 {
        builder = builder.chunk_bytes(options.chunk_bytes);
    }
    if (options.ping_ms, options.lost_after_ms) != (0, 0) {
        let millis = |given: u32, otherwise| if given == 0 { otherwise } else { given.into() };
        let (ping, lost_after) = (millis(options.ping_ms, 1000), millis(options.lost_after_ms, 5000));
        builder = builder.timing(Duration::from_millis(ping), Duration::from_millis(lost_after));
    }
    if (options.bases, options.bases_bytes_max) != (0, 0) {
        let versions = if options.bases == 0 { BASES } else { options.bases };
        let bytes_max = if options.bases_bytes_max == 0 { u64::MAX } else { options.bases_bytes_max };
        builder = builder.bases(versions, bytes_max);
    }
    if let Some(folder) = text(options.keys, "keys")? {
        builder = builder.keys(folder);
    }
    if options.rekey_ms > 0 {
        builder = builder.rekey(Duration::from_millis(options.rekey_ms.into()));
    }
    if options.insecure {
        builder = builder.insecure();
    }
    if let Some(call) = options.on_event {
        builder = builder.on_worker(listener(call, options.user));
    }
    Ok(builder.expect(options.expect))
}

/// Returns a listener that calls a function of C with each event of a worker.
fn listener(
    call: extern "C" fn(*const wb_event, *mut c_void),
    user: *mut c_void,
) -> impl FnMut(&WorkerEvent) + Send + 'static {
    let user = User::new(user);
    move |event| {
        let (kind, worker, code, text) =
            (c_text(event.kind.as_str()), c_text(&event.worker), c_text(""), c_text(&event.text));
        let (kind, model, code, text) = (kind.as_ptr(), worker.as_ptr(), code.as_ptr(), text.as_ptr());
        call(&wb_event { kind, model, epoch: 0, version: 0, code, text }, user.get());
    }
}

/// Returns the publisher with its address as a text for C.
pub fn bound(publisher: Publisher) -> wb_publisher {
    let address = c_text(publisher.address());
    wb_publisher(publisher, address)
}

/// # Safety
///
/// `publisher` must be NULL or live for all of `'a`.
pub unsafe fn publisher_of<'a>(publisher: *const wb_publisher) -> Result<&'a Publisher, Fault> {
    // SAFETY: guaranteed by the caller.
    unsafe { publisher.as_ref() }.map(|publisher| &publisher.0).ok_or_else(|| invalid("no publisher"))
}

/// # Safety
///
/// As the header requires of the arguments.
pub unsafe fn options_of(options: *const wb_publish_options) -> Result<PublishOptions, Fault> {
    let mut built = PublishOptions::default();
    if options.is_null() {
        return Ok(built);
    }
    // SAFETY: guaranteed by the caller, here and below.
    let options = unsafe { copied(options, size_of::<wb_publish_options>(), "wb_publish_options") }?;
    let names = unsafe { array(options.workers, options.workers_count, "workers") }?;
    if !names.is_empty() {
        let name = |&name: &*const c_char| Ok(unsafe { text_of(name, 0, "name of a worker") }?.to_owned());
        built.workers = Some(names.iter().map(name).collect::<Result<Vec<_>, Fault>>()?);
    }
    if options.at_least > 0 {
        built.require = Require::AtLeast(options.at_least);
    }
    built.wait = match options.wait {
        WB_WAIT_APPLIED => Wait::Applied,
        WB_WAIT_STAGED => Wait::Staged,
        WB_WAIT_NOBODY => Wait::Nobody,
        other => return Err(invalid(&format!("wait is {}, not WB_WAIT_APPLIED, _STAGED or _NOBODY", other))),
    };
    built.together = options.together;
    if options.timeout_ms > 0 {
        built.timeout = Duration::from_millis(options.timeout_ms.into());
    }
    built.encoding = match options.encoding {
        WB_ENCODING_RAW => Encoding::Raw,
        WB_ENCODING_DELTA => Encoding::Delta,
        WB_ENCODING_DELTA_FLAT => Encoding::DeltaFlat,
        WB_ENCODING_AUTO => Encoding::Auto,
        other => {
            let text = format!("encoding is {}, not WB_ENCODING_RAW, _DELTA, _DELTA_FLAT or _AUTO", other);
            return Err(invalid(&text));
        }
    };
    for entry in unsafe { array(options.metadata, options.metadata_count, "metadata") }? {
        let (name, text) = unsafe {
            (text_of(entry.name, 0, "name of metadata")?, text_of(entry.text, 0, "text of metadata")?)
        };
        built.metadata.insert(name.to_owned(), text.to_owned());
    }
    built.expect = Some(options.expect).filter(|&expect| expect > 0);
    Ok(built)
}

/// Views of the caller's tensors.
pub struct Views<'a>(Vec<TensorView<'a>>);

impl<'a> Views<'a> {
    /// # Safety
    ///
    /// As `wb_tensor` says, for all of `'a`.
    pub unsafe fn of(tensors: *const wb_tensor, count: usize) -> Result<Views<'a>, Fault> {
        // SAFETY: guaranteed by the caller, here and below.
        let tensors = unsafe { array(tensors, count, "tensors") }?;
        let view = |tensor: &wb_tensor| {
            let (name, dtype, shape) = unsafe { described(tensor) }?;
            if tensor.data.is_null() && tensor.nbytes > 0 {
                return Err(invalid(&format!("tensor {:?} has no memory", name)));
            }
            let bytes: &[u8] = match tensor.nbytes {
                0 => &[],
                nbytes => unsafe { slice::from_raw_parts(tensor.data.cast(), nbytes) },
            };
            Ok(TensorView { name, dtype, shape, bytes })
        };
        Ok(Views(tensors.iter().map(view).collect::<Result<_, Fault>>()?))
    }

    pub fn all(&self) -> &[TensorView<'a>] {
        &self.0
    }
}

/// The outcome at each worker, as C reads it.
pub struct Outcomes {
    all: Vec<wb_outcome>, // point into `_texts`
    _texts: Vec<[CString; 3]>,
    text: CString,
    receipt: Receipt,
}

// SAFETY: the pointers are to texts that never change and that live as long as this object.
unsafe impl Send for Outcomes {}
unsafe impl Sync for Outcomes {}

impl Outcomes {
    fn of(receipt: Receipt) -> Outcomes {
        let text = |(name, worker): (&String, &weightbus_core::WorkerReceipt)| {
            [c_text(name), c_text(&worker.detail), c_text(worker.encoding)]
        };
        let texts: Vec<_> = receipt.workers.iter().map(text).collect();
        type Texts = [CString; 3];
        let look =
            |(worker, [name, detail, encoding]): (&weightbus_core::WorkerReceipt, &Texts)| wb_outcome {
                worker: name.as_ptr(),
                outcome: outcome_name(worker.outcome),
                nanoseconds: worker.after.map_or(0, |after| after.as_nanos() as u64),
                detail: detail.as_ptr(),
                encoding: encoding.as_ptr(),
                nbytes: worker.nbytes,
            };
        let all = receipt.workers.values().zip(&texts).map(look).collect();
        Outcomes { all, _texts: texts, text: c_text(&receipt.to_string()), receipt }
    }

    pub fn workers(&self) -> &[wb_outcome] {
        &self.all
    }

    pub fn look(&self) -> wb_published {
        let mut digest = [0; 65];
        put(&self.receipt.digest, &mut digest);
        wb_published {
            epoch: self.receipt.epoch,
            version: self.receipt.version,
            nbytes: self.receipt.nbytes,
            nanoseconds: self.receipt.took.as_nanos() as u64,
            digest,
            text: self.text.as_ptr(),
        }
    }
}

fn outcome_name(outcome: weightbus_core::Outcome) -> *const c_char {
    use weightbus_core::Outcome::*;
    let name: &'static [u8] = match outcome {
        Behind => b"behind\0",
        Staged => b"staged\0",
        Applied => b"applied\0",
        Skipped => b"skipped\0",
        Failed => b"failed\0",
        Lost => b"lost\0",
        Left => b"left\0",
    };
    name.as_ptr().cast()
}

/// Sets the receipt at `place` to NULL, so that a failed call leaves no old receipt there.
///
/// # Safety
///
/// `place` must be NULL or writable.
pub unsafe fn clear(place: *mut *mut wb_receipt) {
    if !place.is_null() {
        // SAFETY: `place` is not NULL.
        unsafe { place.write(ptr::null_mut()) };
    }
}

/// Writes the receipt of a publish to `place`, even if the requirement was missed. Returns the code.
///
/// # Safety
///
/// `place` must be NULL or writable.
pub unsafe fn store(result: Result<Receipt, Error>, place: *mut *mut wb_receipt) -> Result<wb_code, Fault> {
    let (receipt, fault) = match result {
        Ok(receipt) => (receipt, None),
        Err(error) => {
            let receipt = match &error {
                Error::Publish { receipt, .. } => (**receipt).clone(),
                _ => return Err(error.into()),
            };
            (receipt, Some(Fault::from(error)))
        }
    };
    if !place.is_null() {
        // SAFETY: `place` is not NULL.
        unsafe { out(place, wb_receipt(Outcomes::of(receipt))) }?;
    }
    fault.map_or(Ok(wb_code::WB_OK), Err)
}
