//! The C ABI of the worker and the publisher, as `include/weightbus.h` declares it, over the crate
//! `weightbus`.
//!
//! cbindgen reads this file. The implementation is in `inner.rs` and `publishing.rs`.
#![allow(non_camel_case_types, clippy::missing_safety_doc)]
#![deny(unsafe_op_in_unsafe_fn)]

mod inner;
mod publishing;

use inner::{answer, fill, invalid, out, quietly, text_of, Fault, Target};
use std::ffi::CString;
use std::os::raw::{c_char, c_int, c_void};
use std::time::Duration;
use weightbus_core::WorkerKeys;

/// The number of this ABI. A program may run with any library of the same number.
pub const WB_ABI: u32 = 1;

/// The result of a call.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum wb_code {
    /// The call succeeded.
    WB_OK = 0,
    /// Nothing arrived in time, or nothing was found.
    WB_NOTHING = 1,
    /// A version was rejected. The previous one still runs, unless wb_error() says that none runs.
    WB_REJECTED = 2,
    /// The publisher refuses this worker, which keeps trying to join.
    WB_REFUSED = 3,
    /// The worker or the publisher was closed.
    WB_CLOSED = 4,
    /// An apply failed half-way: the model must not be read until another version is applied.
    WB_TORN = 5,
    /// An argument is invalid.
    WB_INVALID = 6,
    /// There is no tensor, or no worker, of this name.
    WB_NOT_FOUND = 7,
    /// A socket, a thread or memory could not be created.
    WB_SYSTEM = 8,
    /// A bug in this library.
    WB_PANIC = 9,
    /// A publish missed its requirement. Its receipt has the outcome at every worker.
    WB_UNACHIEVED = 10,
}

/// A tensor: your memory for a model, or a read-only part of a snapshot.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_tensor {
    /// Name in UTF-8, with a zero byte at the end.
    pub name: *const c_char,
    /// Length of the name, for names with zero bytes. 0: the name ends at its first zero byte.
    pub name_bytes: usize,
    /// Name of the dtype in safetensors: "F32", "BF16", "I64", ...
    pub dtype: *const c_char,
    /// Sizes of the `rank` dimensions; row-major.
    pub shape: *const u64,
    pub rank: usize,
    pub data: *mut c_void,
    /// Bytes at `data`: exactly as many as dtype and shape need.
    pub nbytes: usize,
}

/// A model to subscribe to, and the destination of its versions.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_wanted {
    pub id: *const c_char,
    /// NULL: each version is returned as a snapshot.
    pub model: *const wb_model,
}

/// An event of a worker or a publisher, for logs and screens. It is borrowed for the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_event {
    /// "joined", "lost", "refused", "rejected", "changed-over" or "notice"; others may be added.
    pub kind: *const c_char,
    /// Model of an event about a version, else empty. Of a publisher: name of a worker.
    pub model: *const c_char,
    pub epoch: u64,
    pub version: u64,
    /// Code of the protocol, such as "layout-mismatch"; empty if there is none.
    pub code: *const c_char,
    pub text: *const c_char,
}

/// Called in the thread of the worker or publisher, which also answers the other side: the function
/// must not wait, and must not free the handle. It may call wb_close() or wb_publisher_close(),
/// which return at once: the thread ends after the function. Another thread that frees the handle
/// waits for the end of the function. In a publisher's function, do not call wb_publish(),
/// wb_publish_safetensors() or wb_wait_for_workers(): they would wait until their timeouts.
pub type wb_on_event = Option<extern "C" fn(event: *const wb_event, user: *mut c_void)>;

/// A complete, verified version, on which your function decides. It is borrowed for the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_offer {
    pub model: *const c_char,
    pub epoch: u64,
    pub version: u64,
    pub nbytes: u64,
    /// The version's snapshot, if the model has no memory of yours. NULL otherwise, and in
    /// before_apply.
    pub snapshot: *const wb_snapshot,
}

/// Decides on a version, in the thread that calls wb_receive(). 0 accepts the version; any other
/// result rejects it. The function may write the reason to `text`, with a zero byte at the end, in
/// at most `room` bytes. The reason is sent to the publisher. In apply, your memory holds the
/// version already: read it directly, since wb_read() would wait for the end of this call.
pub type wb_decide =
    Option<extern "C" fn(offer: *const wb_offer, text: *mut c_char, room: usize, user: *mut c_void) -> c_int>;

/// Settings of a worker. Zeros are the defaults. Everything is borrowed for the call of
/// wb_connect().
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_options {
    /// sizeof(wb_options).
    /// A library with fewer fields returns WB_INVALID if a field that it lacks is not zero.
    pub size: usize,
    /// Address of the publisher: "tcp://HOST:PORT" or "ipc://PATH". Or several addresses, of relays
    /// and the publisher, separated by commas, in order of preference. The worker changes over to
    /// the next address when one fails ("changed-over"), and returns to the first one once a
    /// publisher answers there.
    pub address: *const c_char,
    /// Name of this worker, unique among the publisher's workers. NULL: a name is generated.
    pub name: *const c_char,
    pub wanted: *const wb_wanted,
    pub wanted_count: usize,
    /// Size in bytes of the largest version to accept; 0: 64 GiB.
    pub bytes_max: u64,
    /// True: versions are not copied from the publisher's memory, even on the same host.
    pub network_only: bool,
    pub on_event: wb_on_event,
    /// Passed to all functions here; valid in any thread until the worker is freed.
    pub user: *mut c_void,
    /// Decides once for each version whether it runs, before readers see the version and before the
    /// worker reports it. After a rejection the previous snapshot stays, but no version runs in your
    /// memory (WB_TORN).
    pub apply: wb_decide,
    /// Decides before any byte of a model changes. After a rejection the previous version still
    /// runs.
    pub before_apply: wb_decide,
    /// Time limit of each call of these two functions, at most a day; 0: 60 s. After that the
    /// version is rejected, whatever the function returns later, and no other version of its model
    /// is applied until the function has returned.
    pub apply_timeout_ms: u32,
    /// True: versions may have tensors that the models here lack. These tensors are ignored.
    pub partial: bool,
    /// True: F64, F32, F16 and BF16 values are converted where dtypes differ, and rounded to
    /// nearest, ties to even.
    pub cast: bool,
    /// Program or binding that runs the worker, and its version, for the publisher's operators: at
    /// most 256 characters. NULL: "weightbus-c/" and this library's version.
    pub client: *const c_char,
    /// This worker's keys, for a publisher with keys: the path of its file from `weightbus keygen`,
    /// or of the folder, or the content of the file, which begins with {. NULL stands for the
    /// environment variable WEIGHTBUS_KEYS, if it is set, and "" for no keys. With several
    /// addresses, `keys` may have a path for each, in the same order, separated by commas.
    pub keys: *const c_char,
    /// True: every version arrives whole, never as a patch on the running version. With `partial`
    /// or `cast`, patches need a second copy of the running version.
    pub whole_only: bool,
    /// Not 0: the data endpoint may be on any host or path that the publisher names. 0: it must be
    /// on the host of `address`, or at the path of `address` with a suffix. With any other endpoint,
    /// the worker fetches all versions, which is slower.
    pub any_data_host: u64, // 64 bits: not in the padding, where older programs may have any bytes
}

/// An entry of a version's metadata: a name, and a text.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_text {
    /// Name in UTF-8 with a zero byte at the end, like the text.
    pub name: *const c_char,
    pub text: *const c_char,
}

/// The result of wb_receive(): a version that was applied or, with WB_REJECTED, rejected.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_update {
    pub epoch: u64,
    pub version: u64,
    pub nbytes: u64,
    /// Duration of the copy.
    pub nanoseconds: u64,
    /// The snapshot, if the model has no memory of yours, else NULL. Free it with
    /// wb_snapshot_free().
    pub snapshot: *mut wb_snapshot,
    pub model: [c_char; 129],
    /// Digest of the bytes; empty if they were copied from shared memory and were not hashed.
    pub digest: [c_char; 65],
    /// With WB_REJECTED and WB_REFUSED: the code of the reason ("layout-mismatch", ...).
    pub code: [c_char; 129],
    /// True if the version arrived as a patch on the version that ran before.
    pub patched: bool, // in the padding of programs that were compiled without this field
}

/// The state of a worker. The running version is current; the other fields may be slightly out of
/// date. An epoch or version is 0 if there is no such session or version.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_state {
    /// Epoch of the session.
    pub epoch: u64,
    /// Malformed messages that were dropped.
    pub malformed: u64,
    /// True if versions are copied from the publisher's memory.
    pub shared: bool,
    /// True if an apply of this model failed half-way, so that no version runs.
    pub torn: bool,
    pub running_epoch: u64,
    pub running_version: u64,
    /// The arriving version, the number of its chunks that have arrived, and of all its chunks.
    pub arriving_epoch: u64,
    pub arriving_version: u64,
    pub chunks_here: u64,
    pub chunks: u64,
    /// The version that waits for a commit.
    pub staged_epoch: u64,
    pub staged_version: u64,
    /// The version that waits for wb_receive(), or is being applied.
    pub ready_epoch: u64,
    pub ready_version: u64,
}

/// A model that versions are written to.
pub struct wb_model(weightbus_core::Model);
/// Read access to a model.
pub struct wb_reading(#[allow(dead_code)] inner::Reading); // only its end matters
/// A worker.
pub struct wb_worker(weightbus_core::Worker, inner::Names, inner::KeptMetadata);
/// Metadata of a version.
pub struct wb_metadata(inner::CMetadata);
/// A snapshot: a version that never changes.
pub struct wb_snapshot(inner::Tensors);
/// A publisher.
pub struct wb_publisher(weightbus_core::Publisher, CString);
/// The receipt of a publish.
pub struct wb_receipt(publishing::Outcomes);

/// Settings of a publisher. Zeros are the defaults. Everything is borrowed for the call of
/// wb_bind().
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_publisher_options {
    /// sizeof(wb_publisher_options), as in wb_options.
    pub size: usize,
    /// Address to listen at, the only one that workers need: "tcp://HOST:PORT" (port 0: any free
    /// one) or "ipc://PATH".
    pub address: *const c_char,
    /// Address of the data socket. NULL: the next port, or the path of `address` with a suffix.
    pub data: *const c_char,
    /// Data address that is sent to the workers. NULL: derived from `data`.
    pub advertise: *const c_char,
    /// Epoch, which workers compare with their running version's epoch; 0: milliseconds since 1970.
    pub epoch: u64,
    /// Size of a chunk in bytes; 0: 2^20.
    pub chunk_bytes: u64,
    /// Interval of pings, and the silence after which a worker is lost: at least two intervals. 0:
    /// 1 s and 5 s.
    pub ping_ms: u32,
    pub lost_after_ms: u32,
    /// A folder that keeps the epoch and the latest version of each model. A publisher that is
    /// started with this folder later, in this language or in Python, offers these versions again.
    /// NULL: no folder. Freeing the publisher waits up to 10 s until all is written there.
    pub state: *const c_char,
    /// Least number of workers that "all" stands for, in a publish that sets no `expect`.
    pub expect: usize,
    /// True: without keys, listen where other hosts can connect, which then get the weights.
    pub insecure: bool,
    /// Called with events of workers. The kind is "joined", "lost", "stuck", "back", "left",
    /// "refused", "failed", "wrong-digest" or "notice". `model` is the name of the worker.
    pub on_event: wb_on_event,
    /// Passed to `on_event`; valid in any thread until the publisher is freed.
    pub user: *mut c_void,
    /// Number of versions of each model kept in memory for patches to build on, at most 8, and the
    /// bytes that they may take together. 0: 2 versions, of any size. Only versions published as
    /// patches are kept.
    pub bases: usize,
    pub bases_bytes_max: u64,
    /// A folder from `weightbus keygen`: only workers with a key that it allows can connect, and
    /// all published data is sealed. The folder is read repeatedly. NULL stands for the
    /// environment variable WEIGHTBUS_KEYS, if it is set, and "" for no keys.
    pub keys: *const c_char,
    /// With keys: time after which a new group key replaces the current one; 0: a day.
    pub rekey_ms: u32,
    /// Number of older versions of each model kept in the folder `state`, at most 10,000.
    pub history: usize,
}

/// A publish waits until the workers run the version.
pub const WB_WAIT_APPLIED: u32 = 0;
/// A publish waits until the workers have the version, verified.
pub const WB_WAIT_STAGED: u32 = 1;
/// A publish waits for no worker.
pub const WB_WAIT_NOBODY: u32 = 2;

/// The version is sent whole.
pub const WB_ENCODING_RAW: u32 = 0;
/// The version is sent as the smallest patch on the version that a worker runs, if the publisher
/// still has the latter.
pub const WB_ENCODING_DELTA: u32 = 1;
/// Like WB_ENCODING_DELTA, but in more bytes, which take less time to encode and decode.
pub const WB_ENCODING_DELTA_FLAT: u32 = 2;
/// The one of these three encodings that is likely to arrive first.
pub const WB_ENCODING_AUTO: u32 = 3;

/// Settings of one publish. Zeros are the defaults. Everything is borrowed for the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_publish_options {
    /// sizeof(wb_publish_options), as in wb_options.
    pub size: usize,
    /// Names of the workers to publish to. 0 names: all workers that subscribe to the model.
    pub workers: *const *const c_char,
    pub workers_count: usize,
    /// Number of workers that must succeed; 0: all workers that the version is published to.
    pub at_least: usize,
    /// WB_WAIT_APPLIED, WB_WAIT_STAGED or WB_WAIT_NOBODY.
    pub wait: u32,
    /// True: no worker applies the version before the required number of workers has staged it. If
    /// too few workers stage it in time, no worker applies it.
    pub together: bool,
    /// Time limit of the whole publish; 0: 60 s.
    pub timeout_ms: u32,
    /// Least number of workers that "all" stands for: the publish waits for missing workers. 0: the
    /// publisher's `expect`.
    pub expect: usize,
    /// Encoding for workers that accept patches: WB_ENCODING_RAW, _DELTA, _DELTA_FLAT or _AUTO.
    pub encoding: u32,
    /// Metadata, such as a step or a reward. At most 32 entries, and 4 KiB of names and texts.
    pub metadata: *const wb_text,
    pub metadata_count: usize,
}

/// The outcome of a publish at one worker. It is valid as long as the receipt.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_outcome {
    pub worker: *const c_char,
    /// "applied", "staged", "failed", "lost", "left", "behind" or "skipped" (a newer version runs).
    pub outcome: *const c_char,
    /// Time from the call to the outcome; 0 while it is "behind".
    pub nanoseconds: u64,
    /// Explanation for a person; empty if the outcome needs none.
    pub detail: *const c_char,
    /// How the version arrived: "raw" (whole) or "delta-1" (a patch on the version that ran
    /// before); empty if unknown.
    pub encoding: *const c_char,
    /// Bytes of the version or patch, without headers. Bytes that were sent again are not counted.
    pub nbytes: u64,
}

/// The summary of a receipt.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_published {
    pub epoch: u64,
    pub version: u64,
    pub nbytes: u64,
    /// Time from the call to its return.
    pub nanoseconds: u64,
    pub digest: [c_char; 65],
    /// The summary in words. It is valid as long as the receipt.
    pub text: *const c_char,
}

/// Returns WB_ABI of the library that the program runs with.
#[no_mangle]
pub extern "C" fn wb_abi() -> u32 {
    WB_ABI
}

/// Returns the message of the last failed call in this thread, which is valid until the next
/// failure.
#[no_mangle]
pub extern "C" fn wb_error() -> *const c_char {
    inner::last_error()
}

/// Makes a model of tensors in your memory. Names, dtypes and shapes are borrowed for the call, and
/// `data` until the model and all of its workers are freed. Until then only this library writes to
/// `data`, and your program reads it only between wb_read() and wb_read_end().
#[no_mangle]
pub unsafe extern "C" fn wb_model_new(
    tensors: *const wb_tensor,
    count: usize,
    model: *mut *mut wb_model,
) -> wb_code {
    answer(|| {
        // SAFETY: the caller gives `count` tensors, as the header says.
        let made = unsafe { inner::model_of(tensors, count) }?;
        // SAFETY: the caller gives a place for the model.
        unsafe { out(model, wb_model(made)) }
    })
}

/// Makes a model of zeros in the library's own memory, and writes the address and size of each
/// tensor to its `data` and `nbytes`; otherwise like wb_model_new(). A version of 2 MiB or more
/// from the network is not copied there: pages are exchanged. So do not fork while a version is
/// applied: the child may find other bytes. Do not register this memory with a device or a network
/// card (cudaHostRegister(), ibv_reg_mr(), buffers of io_uring), which would keep using the old
/// pages. The effects of mlock(), madvise() and mbind() move with the pages. For these, use
/// wb_model_new().
#[no_mangle]
pub unsafe extern "C" fn wb_model_resident(
    tensors: *mut wb_tensor,
    count: usize,
    model: *mut *mut wb_model,
) -> wb_code {
    answer(|| {
        if model.is_null() {
            return Err(invalid("the pointer for the model is NULL")); // before `tensors` get their addresses
        }
        // SAFETY: the caller gives `count` tensors, as the header says, for the use of this call
        // alone.
        let made = unsafe { inner::resident_of(tensors, count) }?;
        // SAFETY: the caller gives a place for the model.
        unsafe { out(model, wb_model(made)) }
    })
}

#[no_mangle]
pub unsafe extern "C" fn wb_model_free(model: *mut wb_model) {
    // SAFETY: `wb_model_new` or `wb_model_resident` made the model, and it is not used any more.
    unsafe { inner::free(model) }
}

/// Waits while a version is being written to a model, and keeps the model unchanged until
/// wb_read_end(). Sets `epoch` and `version` to those of the version in the model, 0 before the
/// first version; either pointer may be NULL. Returns WB_TORN if an apply failed half-way.
#[no_mangle]
pub unsafe extern "C" fn wb_read(
    model: *const wb_model,
    reading: *mut *mut wb_reading,
    epoch: *mut u64,
    version: *mut u64,
) -> wb_code {
    answer(|| {
        // SAFETY: the caller gives a model that lives.
        let model = unsafe { model.as_ref() }.ok_or_else(|| invalid("no model"))?;
        let found = inner::Reading::of(&model.0)?;
        let (its_epoch, its_version) = found.version();
        // SAFETY: the caller gives places for the results, or NULL.
        unsafe {
            fill(epoch, its_epoch);
            fill(version, its_version);
            out(reading, wb_reading(found))
        }
    })
}

/// Ends the read access to a model, in the thread that called wb_read().
#[no_mangle]
pub unsafe extern "C" fn wb_read_end(reading: *mut wb_reading) {
    // SAFETY: `wb_read` made the handle, in this thread, and it is not used any more.
    unsafe { inner::free(reading) }
}

/// Starts a worker. The publisher may start later.
#[no_mangle]
pub unsafe extern "C" fn wb_connect(options: *const wb_options, worker: *mut *mut wb_worker) -> wb_code {
    answer(|| {
        // SAFETY: the caller gives options as the header says, with their size.
        let options = unsafe { inner::options_of(options) }?;
        // SAFETY: everything that the options point to is valid during this call.
        let (address, wanted) = unsafe { (text_of(options.address, 0, "address")?, Target::all(&options)?) };
        let mut builder = weightbus_core::Worker::builder(address).shared_memory(!options.network_only);
        builder = builder.partial(options.partial).cast(options.cast).patches(!options.whole_only);
        builder = builder.any_data_host(options.any_data_host != 0);
        let mut client = concat!("weightbus-c/", env!("CARGO_PKG_VERSION"));
        if !options.client.is_null() {
            // SAFETY: as for `address`.
            client = unsafe { text_of(options.client, 0, "client") }?;
        }
        builder = builder.client(client);
        if !options.name.is_null() {
            // SAFETY: as for `address`.
            builder = builder.name(unsafe { text_of(options.name, 0, "name") }?);
        }
        if !options.keys.is_null() {
            // SAFETY: as for `address`.
            let keys = unsafe { text_of(options.keys, 0, "keys") }?;
            builder = match keys.starts_with('{') {
                true => builder.worker_keys(WorkerKeys::from_json(keys)?),
                false => builder.keys(keys),
            };
        }
        if options.bytes_max > 0 {
            builder = builder.bytes_max(options.bytes_max);
        }
        for Target { id, model } in wanted {
            builder = match model {
                Some(model) => builder.model(id, &model),
                None => builder.snapshots(id),
            };
        }
        if let Some(call) = options.on_event {
            builder = builder.on_event(inner::listener(call, options.user));
        }
        if let Some(call) = options.apply {
            builder = builder.apply(inner::decide(call, options.user));
        }
        if let Some(call) = options.before_apply {
            builder = builder.before_apply(inner::decide(call, options.user));
        }
        if options.apply_timeout_ms > 0 {
            builder = builder.apply_timeout(Duration::from_millis(options.apply_timeout_ms.into()));
        }
        // SAFETY: the caller gives a place for the worker.
        unsafe { out(worker, inner::named(builder.connect()?)) }
    })
}

/// Returns the name of a worker, which is valid as long as the worker; empty for NULL.
#[no_mangle]
pub unsafe extern "C" fn wb_name(worker: *const wb_worker) -> *const c_char {
    // SAFETY: the caller gives a worker that lives, or NULL.
    unsafe { worker.as_ref() }.map_or(b"\0".as_ptr().cast(), |worker| worker.1.worker.as_ptr())
}

/// Returns the address that a worker uses or tries now. The text is valid as long as the worker,
/// and empty for NULL.
#[no_mangle]
pub unsafe extern "C" fn wb_worker_address(worker: *const wb_worker) -> *const c_char {
    // SAFETY: the caller gives a worker that lives, or NULL.
    unsafe { worker.as_ref() }.map_or(b"\0".as_ptr().cast(), |worker| worker.1.address(worker.0.address()))
}

/// Waits until the publisher admits the worker. Sets `epoch` to the publisher's, unless it is NULL.
#[no_mangle]
pub unsafe extern "C" fn wb_joined(worker: *const wb_worker, timeout_ms: u32, epoch: *mut u64) -> wb_code {
    answer(|| {
        // SAFETY: the caller gives a worker that lives, and a place or NULL.
        let worker = unsafe { inner::worker_of(worker) }?;
        match worker.wait_joined(Duration::from_millis(timeout_ms.into()))? {
            Some(found) => {
                // SAFETY: `epoch` is a place or NULL.
                unsafe { fill(epoch, found) };
                Ok(wb_code::WB_OK)
            }
            None => Ok(wb_code::WB_NOTHING),
        }
    })
}

/// Applies the newest version that has arrived, and waits for one if necessary. 0 ms: does not
/// wait.
#[no_mangle]
pub unsafe extern "C" fn wb_receive(
    worker: *const wb_worker,
    timeout_ms: u32,
    update: *mut wb_update,
) -> wb_code {
    answer(|| {
        // SAFETY: the caller gives a worker that lives, and a place.
        let (worker, update, all) =
            unsafe { (inner::worker_of(worker)?, inner::blank(update)?, inner::kept_metadata(worker)?) };
        match worker.receive(Duration::from_millis(timeout_ms.into())) {
            Ok(Some(found)) => {
                all.keep(&found);
                inner::fill_applied(update, found);
                Ok(wb_code::WB_OK)
            }
            Ok(None) => Ok(wb_code::WB_NOTHING),
            Err(error) => {
                inner::fill_rejected(update, &error);
                Err(Fault::from(error))
            }
        }
    })
}

/// Returns the publisher's metadata of a version, to be freed by wb_metadata_free(). The version is
/// one of the last few that wb_receive() returned, or the running version, by the number that
/// wb_look(), wb_read() and wb_latest() return now (a restarted publisher may change this number).
/// Returns WB_NOTHING for other versions.
#[no_mangle]
pub unsafe extern "C" fn wb_metadata_of(
    worker: *const wb_worker,
    model: *const c_char,
    epoch: u64,
    version: u64,
    metadata: *mut *mut wb_metadata,
) -> wb_code {
    answer(|| {
        // SAFETY: the caller gives a worker that lives, a name, and a place.
        unsafe {
            match inner::metadata_of(worker, text_of(model, 0, "id of a model")?, (epoch, version))? {
                Some(found) => out(metadata, wb_metadata(found)),
                None => Ok(wb_code::WB_NOTHING),
            }
        }
    })
}

/// Returns all entries, sorted by name, and sets `count`. They are valid as long as `metadata`.
#[no_mangle]
pub unsafe extern "C" fn wb_metadata_all(metadata: *const wb_metadata, count: *mut usize) -> *const wb_text {
    // SAFETY: the caller gives metadata that lives, or NULL, and a place or NULL.
    let all = unsafe { metadata.as_ref() }.map_or(&[][..], |metadata| metadata.0.all());
    unsafe { fill(count, all.len()) };
    all.as_ptr()
}

/// Returns the text of this name, which is valid as long as `metadata`; NULL if there is none.
#[no_mangle]
pub unsafe extern "C" fn wb_metadata_get(metadata: *const wb_metadata, name: *const c_char) -> *const c_char {
    quietly(std::ptr::null(), || {
        // SAFETY: the caller gives metadata that lives, or NULL, and a name.
        let (metadata, name) = unsafe { (metadata.as_ref(), text_of(name, 0, "name").ok()) };
        metadata.zip(name).map_or(std::ptr::null(), |(metadata, name)| metadata.0.text(name))
    })
}

#[no_mangle]
pub unsafe extern "C" fn wb_metadata_free(metadata: *mut wb_metadata) {
    // SAFETY: `wb_metadata_of` made the metadata, and it is not used any more.
    unsafe { inner::free(metadata) }
}

/// Sets `state` to the state of a worker, and of one of its models; `model` may be NULL.
#[no_mangle]
pub unsafe extern "C" fn wb_look(
    worker: *const wb_worker,
    model: *const c_char,
    state: *mut wb_state,
) -> wb_code {
    answer(|| {
        // SAFETY: the caller gives a worker that lives, a name or NULL, and a place.
        unsafe {
            let found = inner::worker_of(worker)?.state();
            let model = if model.is_null() { None } else { Some(text_of(model, 0, "id of a model")?) };
            fill(state, inner::state_of(&found, model)?);
        }
        Ok(wb_code::WB_OK)
    })
}

/// Returns the newest version of a model that has no memory of yours, like wb_receive(), but
/// without digest, duration and `patched`. Returns WB_NOTHING before the first version.
#[no_mangle]
pub unsafe extern "C" fn wb_latest(
    worker: *const wb_worker,
    model: *const c_char,
    update: *mut wb_update,
) -> wb_code {
    answer(|| {
        // SAFETY: the caller gives a worker that lives, a name, and a place.
        let (worker, update) = unsafe { (inner::worker_of(worker)?, inner::blank(update)?) };
        let found = worker.snapshot(unsafe { text_of(model, 0, "id of a model") }?);
        Ok(found.map_or(wb_code::WB_NOTHING, |snapshot| inner::fill_latest(update, snapshot)))
    })
}

/// Returns a descriptor for poll() and the like, which is readable while wb_receive() would not
/// wait; -1 for NULL. It belongs to the worker: do not read from it, and do not close it.
#[no_mangle]
pub unsafe extern "C" fn wb_fd(worker: *const wb_worker) -> c_int {
    // SAFETY: the caller gives a worker that lives, or NULL.
    let worker = unsafe { worker.as_ref() };
    quietly(-1, || worker.map_or(-1, |worker| worker.0.ready_fd()))
}

/// Sends a `bye`, and ends the worker's thread. Calls that wait in wb_receive() return WB_CLOSED.
#[no_mangle]
pub unsafe extern "C" fn wb_close(worker: *const wb_worker) {
    // SAFETY: the caller gives a worker that lives, or NULL.
    let worker = unsafe { worker.as_ref() };
    quietly((), || worker.map_or((), |worker| worker.0.close()))
}

/// Closes and frees a worker, which no other thread may use any more.
#[no_mangle]
pub unsafe extern "C" fn wb_worker_free(worker: *mut wb_worker) {
    // SAFETY: `wb_connect` made the worker, and it is not used any more.
    unsafe { inner::free(worker) }
}

/// Returns the tensors of a snapshot, in the order of the publisher's model, and sets `count`. They
/// live as long as the snapshot, and never change.
#[no_mangle]
pub unsafe extern "C" fn wb_snapshot_tensors(
    snapshot: *const wb_snapshot,
    count: *mut usize,
) -> *const wb_tensor {
    // SAFETY: the caller gives a snapshot that lives, or NULL, and a place or NULL.
    let tensors = unsafe { snapshot.as_ref() }.map_or(&[][..], |snapshot| snapshot.0.all());
    unsafe { fill(count, tensors.len()) };
    tensors.as_ptr()
}

/// Finds a tensor of a snapshot by its name or an alias.
#[no_mangle]
pub unsafe extern "C" fn wb_snapshot_find(
    snapshot: *const wb_snapshot,
    name: *const c_char,
    tensor: *mut wb_tensor,
) -> wb_code {
    answer(|| {
        // SAFETY: the caller gives a snapshot that lives, a name, and a place.
        unsafe {
            let snapshot = snapshot.as_ref().ok_or_else(|| invalid("no snapshot"))?;
            fill(tensor, snapshot.0.find(text_of(name, 0, "name")?)?);
        }
        Ok(wb_code::WB_OK)
    })
}

#[no_mangle]
pub unsafe extern "C" fn wb_snapshot_free(snapshot: *mut wb_snapshot) {
    // SAFETY: `wb_receive` or `wb_latest` made the snapshot, and it is not used any more.
    unsafe { inner::free(snapshot) }
}

/// Starts a publisher.
#[no_mangle]
pub unsafe extern "C" fn wb_bind(
    options: *const wb_publisher_options,
    publisher: *mut *mut wb_publisher,
) -> wb_code {
    answer(|| {
        // SAFETY: the caller gives options as the header says, and a place.
        unsafe { out(publisher, publishing::bound(publishing::builder_of(options)?.bind()?)) }
    })
}

/// Returns the address that workers need, which is valid as long as the publisher; empty for NULL.
#[no_mangle]
pub unsafe extern "C" fn wb_address(publisher: *const wb_publisher) -> *const c_char {
    // SAFETY: the caller gives a publisher that lives, or NULL.
    unsafe { publisher.as_ref() }.map_or(b"\0".as_ptr().cast(), |publisher| publisher.1.as_ptr())
}

/// Publishes a new version of a model, and waits until the workers have it (see `wait`). The
/// tensors are borrowed until they are copied, which is before the wait. `options` and `receipt`
/// may be NULL. With WB_UNACHIEVED, there is a receipt, too. Returns WB_NOTHING, with nothing
/// published, if other calls were publishing the model until the timeout.
#[no_mangle]
pub unsafe extern "C" fn wb_publish(
    publisher: *const wb_publisher,
    model: *const c_char,
    tensors: *const wb_tensor,
    count: usize,
    options: *const wb_publish_options,
    receipt: *mut *mut wb_receipt,
) -> wb_code {
    answer(|| {
        // SAFETY: the caller gives a publisher that lives, a name, `count` tensors, options or
        // NULL, a place or NULL.
        unsafe {
            publishing::clear(receipt);
            let publisher = publishing::publisher_of(publisher)?;
            let (model, options) = (text_of(model, 0, "id of a model")?, publishing::options_of(options)?);
            let tensors = publishing::Views::of(tensors, count)?;
            let result = publisher.publish_later(model, tensors.all(), &options)?.wait();
            publishing::store(result, receipt)
        }
    })
}

/// Like wb_publish(), but publishes the bytes of a safetensors file as they are.
#[no_mangle]
pub unsafe extern "C" fn wb_publish_safetensors(
    publisher: *const wb_publisher,
    model: *const c_char,
    file: *const c_void,
    nbytes: usize,
    options: *const wb_publish_options,
    receipt: *mut *mut wb_receipt,
) -> wb_code {
    answer(|| {
        // SAFETY: as in `wb_publish`, and the caller gives `nbytes` bytes of a file.
        unsafe {
            publishing::clear(receipt);
            let publisher = publishing::publisher_of(publisher)?;
            let (model, options) = (text_of(model, 0, "id of a model")?, publishing::options_of(options)?);
            let file = inner::array(file.cast::<u8>(), nbytes, "bytes of a file")?;
            publishing::store(publisher.publish_safetensors(model, file, &options)?.wait(), receipt)
        }
    })
}

/// Returns the summary of a receipt.
#[no_mangle]
pub unsafe extern "C" fn wb_receipt_look(
    receipt: *const wb_receipt,
    published: *mut wb_published,
) -> wb_code {
    answer(|| {
        // SAFETY: the caller gives a receipt that lives, and a place.
        unsafe {
            let receipt = receipt.as_ref().ok_or_else(|| invalid("no receipt"))?;
            fill(published, receipt.0.look());
        }
        Ok(wb_code::WB_OK)
    })
}

/// Returns the outcome at each worker, sorted by name, and sets `count`. Valid as long as the
/// receipt.
#[no_mangle]
pub unsafe extern "C" fn wb_receipt_workers(
    receipt: *const wb_receipt,
    count: *mut usize,
) -> *const wb_outcome {
    // SAFETY: the caller gives a receipt that lives, or NULL, and a place or NULL.
    let workers = unsafe { receipt.as_ref() }.map_or(&[][..], |receipt| receipt.0.workers());
    unsafe { fill(count, workers.len()) };
    workers.as_ptr()
}

#[no_mangle]
pub unsafe extern "C" fn wb_receipt_free(receipt: *mut wb_receipt) {
    // SAFETY: `wb_publish` or `wb_publish_safetensors` made the receipt, and it is not used any
    // more.
    unsafe { inner::free(receipt) }
}

/// Waits until `count` workers that subscribe to the model are connected. Returns WB_NOTHING if
/// they did not join in time.
#[no_mangle]
pub unsafe extern "C" fn wb_wait_for_workers(
    publisher: *const wb_publisher,
    model: *const c_char,
    count: usize,
    timeout_ms: u32,
) -> wb_code {
    answer(|| {
        // SAFETY: the caller gives a publisher that lives, and a name.
        let (publisher, model) =
            unsafe { (publishing::publisher_of(publisher)?, text_of(model, 0, "id of a model")?) };
        let joined = publisher.wait_for_workers(count, model, Duration::from_millis(timeout_ms.into()))?;
        Ok(if joined { wb_code::WB_OK } else { wb_code::WB_NOTHING })
    })
}

/// Ends a publisher's thread. Calls that wait in wb_publish() return with the outcomes so far.
/// Workers keep their running versions.
#[no_mangle]
pub unsafe extern "C" fn wb_publisher_close(publisher: *const wb_publisher) {
    // SAFETY: the caller gives a publisher that lives, or NULL.
    let publisher = unsafe { publisher.as_ref() };
    quietly((), || publisher.map_or((), |publisher| publisher.0.close()))
}

/// Closes and frees a publisher, which no other thread may use any more.
#[no_mangle]
pub unsafe extern "C" fn wb_publisher_free(publisher: *mut wb_publisher) {
    // SAFETY: `wb_bind` made the publisher, and it is not used any more.
    unsafe { inner::free(publisher) }
}
