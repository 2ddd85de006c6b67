//! The C ABI of the worker and the publisher: what `include/weightbus.h` says, over the crate `weightbus`.
//!
//! This file is what cbindgen reads; what it takes to keep its promises is in `inner.rs`.
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

/// What came of a call.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum wb_code {
    /// It is done.
    WB_OK = 0,
    /// Nothing has come in time.
    WB_NOTHING = 1,
    /// A version cannot be taken; what ran before still runs, unless wb_error() says that none does.
    WB_REJECTED = 2,
    /// The publisher refuses this worker, which goes on asking.
    WB_REFUSED = 3,
    /// The worker was closed.
    WB_CLOSED = 4,
    /// An apply has failed half-way: the model is not to be read until another version is applied.
    WB_TORN = 5,
    /// An argument makes no sense.
    WB_INVALID = 6,
    /// There is no tensor of this name.
    WB_NOT_FOUND = 7,
    /// Sockets, threads or memory are not to be had.
    WB_SYSTEM = 8,
    /// A bug in this library.
    WB_PANIC = 9,
    /// A publish did not reach what it required; its receipt says what every worker did.
    WB_UNACHIEVED = 10,
}

/// A tensor: memory of yours for a model, or, read-only, a part of a snapshot.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_tensor {
    /// UTF-8 with a zero behind it.
    pub name: *const c_char,
    /// Its length, which tells where a name has a zero in it; 0: up to the first one.
    pub name_bytes: usize,
    /// As safetensors has it: "F32", "BF16", "I64", ...
    pub dtype: *const c_char,
    /// `rank` sizes; row-major.
    pub shape: *const u64,
    pub rank: usize,
    pub data: *mut c_void,
    /// Bytes at `data`: exactly what dtype and shape say.
    pub nbytes: usize,
}

/// A model that is wanted, by its id, and where its versions go.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_wanted {
    pub id: *const c_char,
    /// NULL: each version comes as a snapshot.
    pub model: *const wb_model,
}

/// What happens to a worker, for logs and screens. All of it is borrowed for the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_event {
    /// "joined", "lost", "refused", "rejected" or "notice"; others may come.
    pub kind: *const c_char,
    /// Empty unless it is about a version; so are the numbers.
    pub model: *const c_char,
    pub epoch: u64,
    pub version: u64,
    /// Of the protocol, such as "layout-mismatch"; or empty.
    pub code: *const c_char,
    pub text: *const c_char,
}

/// Called in the own thread of the worker or publisher, which answers the other side: it must not wait, and must
/// not free that handle. It may close it: wb_close() and wb_publisher_close() return at once here, and the thread
/// ends after this call; whoever frees the handle elsewhere waits for that. Of a publisher, wb_publish(),
/// wb_publish_safetensors() and wb_wait_for_workers() would wait for this very thread, until they give up.
pub type wb_on_event = Option<extern "C" fn(event: *const wb_event, user: *mut c_void)>;

/// A version, whole and verified, on which a function of yours decides. All of it is borrowed for the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_offer {
    pub model: *const c_char,
    pub epoch: u64,
    pub version: u64,
    pub nbytes: u64,
    /// Of a model without memory of yours, else NULL, as it is in before_apply.
    pub snapshot: *const wb_snapshot,
}

/// Decides on a version, in the thread that calls wb_receive(): 0 takes it, all else turns it down. Why may be
/// written to `text`, with a zero behind it, of at most `room` bytes: the publisher is told. In apply, memory of
/// yours holds the version, to be read as it is: wb_read() would wait for this call.
pub type wb_decide =
    Option<extern "C" fn(offer: *const wb_offer, text: *mut c_char, room: usize, user: *mut c_void) -> c_int>;

/// How a worker is set up. Zeros are the defaults; everything here is borrowed for the call of wb_connect().
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_options {
    /// sizeof(wb_options).
    /// A library that knows fewer fields takes more of them where they are zero, else answers WB_INVALID.
    pub size: usize,
    /// Of the publisher: "tcp://HOST:PORT" or "ipc://PATH".
    pub address: *const c_char,
    /// Of this worker, unique among the publisher's; NULL: one is made up.
    pub name: *const c_char,
    pub wanted: *const wb_wanted,
    pub wanted_count: usize,
    /// The largest version to take; 0: 64 GiB.
    pub bytes_max: u64,
    /// Do not copy out of the publisher's memory where it is on this host.
    pub network_only: bool,
    pub on_event: wb_on_event,
    /// Passed on to all functions here; alive and usable in any thread until the worker is freed.
    pub user: *mut c_void,
    /// Decides whether a version runs, once for each, before anybody reads it and before it is reported. One
    /// that is turned down leaves the snapshot before it; in memory of yours it leaves none (WB_TORN).
    pub apply: wb_decide,
    /// The same before a byte of a model changes: what ran before runs on.
    pub before_apply: wb_decide,
    /// What each call of the two may take, at most a day; 0: 60 s. Then the version counts as turned down,
    /// whatever is answered later, and its model takes no other one until the function has returned.
    pub apply_timeout_ms: u32,
    /// Versions may have tensors that the models here lack: they are passed over.
    pub partial: bool,
    /// Values are converted where dtypes differ, among F64, F32, F16 and BF16: to the nearest, of two the even.
    pub cast: bool,
    /// What the worker runs on, for the publisher's operators: a program or binding, and its version, in at most
    /// 256 characters. NULL: "weightbus-c/" and the version of this library.
    pub client: *const c_char,
    /// This worker's keys, for a publisher that has some: the path of its file of `weightbus keygen`, or of the
    /// folder, or what stands in the file, which begins with {. NULL: what the environment's WEIGHTBUS_KEYS says,
    /// else there are none, as with "".
    pub keys: *const c_char,
    /// Take every version as a whole, not as a patch on what runs where the publisher offers one. With `partial` or
    /// `cast` patches cost a copy of what runs.
    pub whole_only: bool,
    /// Not 0: published data may come from another host than that of the address, or from any path, wherever the
    /// publisher says. Else they must be on that host, or beside that path, or all is fetched, which is slower.
    pub any_data_host: u64, // as wide as no padding is, in which programs that do not know it may have anything
}

/// Something that is said of a version: a name, and a text.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_text {
    /// UTF-8 with a zero behind it, as is the text.
    pub name: *const c_char,
    pub text: *const c_char,
}

/// What wb_receive() tells: a version that was applied, or (WB_REJECTED) that could not be.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_update {
    pub epoch: u64,
    pub version: u64,
    pub nbytes: u64,
    /// How long the copy took.
    pub nanoseconds: u64,
    /// Of a model without memory of yours, else NULL; to be freed by wb_snapshot_free().
    pub snapshot: *mut wb_snapshot,
    pub model: [c_char; 129],
    /// What its bytes hash to; empty where they came from shared memory.
    pub digest: [c_char; 65],
    /// Of WB_REJECTED and WB_REFUSED: why, in the protocol's words ("layout-mismatch", ...).
    pub code: [c_char; 129],
    /// It came as a patch on the version that ran before, not as a whole.
    pub patched: bool, // where programs that were compiled without it have nothing
}

/// How a worker stands. What runs is of now, the rest of a moment ago; numbers are 0 where there is nothing.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_state {
    /// Of the session.
    pub epoch: u64,
    /// Messages dropped because they broke the protocol.
    pub malformed: u64,
    /// Versions are copied out of the publisher's memory.
    pub shared: bool,
    /// Of one model: an apply has failed half-way, and none runs.
    pub torn: bool,
    pub running_epoch: u64,
    pub running_version: u64,
    /// What arrives, how many of its chunks are here, and of how many.
    pub arriving_epoch: u64,
    pub arriving_version: u64,
    pub chunks_here: u64,
    pub chunks: u64,
    /// What waits for a commit.
    pub staged_epoch: u64,
    pub staged_version: u64,
    /// What waits for wb_receive(), or is being applied.
    pub ready_epoch: u64,
    pub ready_version: u64,
}

/// A model whose memory is yours.
pub struct wb_model(weightbus_core::Model);
/// One who reads a model.
pub struct wb_reading(#[allow(dead_code)] inner::Reading); // what counts is that it is there
/// A worker.
pub struct wb_worker(weightbus_core::Worker, CString, inner::AllSaid);
/// What is said of a version.
pub struct wb_metadata(inner::Said);
/// A version that never changes.
pub struct wb_snapshot(inner::Tensors);
/// A publisher.
pub struct wb_publisher(weightbus_core::Publisher, CString);
/// What became of a publish.
pub struct wb_receipt(publishing::Outcomes);

/// How a publisher is set up. Zeros are the defaults; everything here is borrowed for the call of wb_bind().
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_publisher_options {
    /// sizeof(wb_publisher_options), as in wb_options.
    pub size: usize,
    /// Where it listens, which is the one address that workers need: "tcp://HOST:PORT" (port 0: any free one) or
    /// "ipc://PATH".
    pub address: *const c_char,
    /// Where its data socket is; NULL: one port above, or a path beside.
    pub data: *const c_char,
    /// What workers are told to connect to for data; NULL: it follows from `data`.
    pub advertise: *const c_char,
    /// Its incarnation, which workers hold against that of what they run; 0: milliseconds since 1970.
    pub epoch: u64,
    /// Bytes of a chunk; 0: 2^20.
    pub chunk_bytes: u64,
    /// Between two signs of life, and the silence after which a worker is lost, of which at least two must fit
    /// in; 0: 1 s and 5 s.
    pub ping_ms: u32,
    pub lost_after_ms: u32,
    /// A folder that outlives it, and keeps its epoch and the latest version of each model, which a publisher that is
    /// started with it later offers again, in this language or in Python; NULL: none. Freeing it waits up to 10 s for
    /// what is to be written there.
    pub state: *const c_char,
    /// How many workers "all" are at least in a publish that does not say.
    pub expect: usize,
    /// Without keys, listen where other hosts can connect, though whoever does gets the weights.
    pub insecure: bool,
    /// Told what becomes of workers: its kind is "joined", "lost", "stuck", "back", "left", "refused", "failed",
    /// "wrong-digest" or "notice", its `model` the name of the worker.
    pub on_event: wb_on_event,
    /// Passed on to it; alive and usable in any thread until the publisher is freed.
    pub user: *mut c_void,
    /// How many versions of each model are kept in memory for patches to build on, at most 8, and how many bytes those
    /// may take together; 0: 2, and of any size. Only what is published as patches is kept.
    pub bases: usize,
    pub bases_bytes_max: u64,
    /// A folder that `weightbus keygen` has made: only workers with a key that it allows connect, and all that is
    /// published is sealed. It is looked at again and again. NULL: what the environment's WEIGHTBUS_KEYS says, else
    /// none; "": none.
    pub keys: *const c_char,
    /// With keys, after how long another group key takes the place of one; 0: a day.
    pub rekey_ms: u32,
    /// How many older versions of each model are kept in the folder `state`, at most 10,000.
    pub history: usize,
}

/// When a worker counts as being there: it runs the version,
pub const WB_WAIT_APPLIED: u32 = 0;
/// it holds it, verified,
pub const WB_WAIT_STAGED: u32 = 1;
/// or nobody is waited for.
pub const WB_WAIT_NOBODY: u32 = 2;

/// A version goes as it is,
pub const WB_ENCODING_RAW: u32 = 0;
/// by what has changed since the one that a worker runs, in the fewest bytes, where the publisher still has that,
pub const WB_ENCODING_DELTA: u32 = 1;
/// or the same in more bytes, which take less time to make and to decode;
pub const WB_ENCODING_DELTA_FLAT: u32 = 2;
/// or by that of these three which is likely to be there soonest.
pub const WB_ENCODING_AUTO: u32 = 3;

/// What is asked of one publish. Zeros are the defaults; everything here is borrowed for the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_publish_options {
    /// sizeof(wb_publish_options), as in wb_options.
    pub size: usize,
    /// Names of the workers it is for; 0 of them: all that want the model.
    pub workers: *const *const c_char,
    pub workers_count: usize,
    /// How many must get there; 0: all that it is for.
    pub at_least: usize,
    /// WB_WAIT_APPLIED, WB_WAIT_STAGED or WB_WAIT_NOBODY.
    pub wait: u32,
    /// None applies before so many as are required have staged; if too few do in time, none applies at all.
    pub together: bool,
    /// For all of this; 0: 60 s.
    pub timeout_ms: u32,
    /// How many "all" are at least: who is missing is waited for. 0: as many as the publisher was told.
    pub expect: usize,
    /// How it goes to workers that take patches: WB_ENCODING_RAW, _DELTA, _DELTA_FLAT or _AUTO.
    pub encoding: u32,
    /// What to say of the version: a step, a reward. At most 32 entries, and 4 KiB of names and texts.
    pub metadata: *const wb_text,
    pub metadata_count: usize,
}

/// What one worker did with a version. It lives as long as its receipt.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_outcome {
    pub worker: *const c_char,
    /// "applied", "staged", "failed", "lost", "left", "behind" or "skipped" (it runs a newer one).
    pub outcome: *const c_char,
    /// From the call to that; 0 while it is behind.
    pub nanoseconds: u64,
    /// For a person; empty where the outcome says it all.
    pub detail: *const c_char,
    /// How the version came to it: "raw" (all of it) or "delta-1" (a patch on what ran there); empty where nobody can
    /// tell.
    pub encoding: *const c_char,
    /// Bytes of that, without headers; what was lost and sent again is not counted.
    pub nbytes: u64,
}

/// What became of one publish.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wb_published {
    pub epoch: u64,
    pub version: u64,
    pub nbytes: u64,
    /// From the call to its answer.
    pub nanoseconds: u64,
    pub digest: [c_char; 65],
    /// All of it in words; lives as long as the receipt.
    pub text: *const c_char,
}

/// Returns WB_ABI of the library that is running.
#[no_mangle]
pub extern "C" fn wb_abi() -> u32 {
    WB_ABI
}

/// Returns why the last call that failed in this thread did; valid until the next that fails in it.
#[no_mangle]
pub extern "C" fn wb_error() -> *const c_char {
    inner::last_words()
}

/// Makes a model of tensors of yours. Names, dtypes and shapes are borrowed for the call, `data` until the
/// model and all of its workers are freed. Until then only this library writes there, and you read between
/// wb_read() and wb_read_end().
#[no_mangle]
pub unsafe extern "C" fn wb_model_new(
    tensors: *const wb_tensor,
    count: usize,
    model: *mut *mut wb_model,
) -> wb_code {
    answer(|| {
        // SAFETY: the caller gives `count` tensors, as the header says.
        let made = unsafe { inner::model_of(tensors, count) }?;
        // SAFETY: as is `model`.
        unsafe { out(model, wb_model(made)) }
    })
}

/// Makes a model in memory of the library's own, of zeros, and puts its place into `data` and `nbytes` of each
/// tensor; else like wb_model_new(). A version of 2 MiB or more that comes over the network gets there by an
/// exchange of pages, which copies nothing. Do not fork while one is applied: the child may find other bytes.
/// Nor register this memory with a device or a network card (cudaHostRegister(), ibv_reg_mr(), buffers of
/// io_uring), which would go on using pages that were exchanged; and what mlock(), madvise() and mbind() say
/// of pages travels with them. For that take memory of yours, and wb_model_new().
#[no_mangle]
pub unsafe extern "C" fn wb_model_resident(
    tensors: *mut wb_tensor,
    count: usize,
    model: *mut *mut wb_model,
) -> wb_code {
    answer(|| {
        if model.is_null() {
            return Err(invalid("no place for the model")); // before `tensors` are told where theirs is
        }
        // SAFETY: the caller gives `count` tensors, as the header says, which are nobody else's for this call.
        let made = unsafe { inner::resident_of(tensors, count) }?;
        // SAFETY: as is `model`.
        unsafe { out(model, wb_model(made)) }
    })
}

#[no_mangle]
pub unsafe extern "C" fn wb_model_free(model: *mut wb_model) {
    // SAFETY: it came of `wb_model_new`, and nobody uses it any more.
    unsafe { inner::free(model) }
}

/// Waits until nobody writes to a model, and keeps it as it is until wb_read_end(). `epoch` and `version` are
/// told what it holds, 0 before the first version; either may be NULL. WB_TORN: there is nothing to read.
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
        // SAFETY: the caller gives places for them, or NULL.
        unsafe {
            fill(epoch, its_epoch);
            fill(version, its_version);
            out(reading, wb_reading(found))
        }
    })
}

/// Lets go of a model, in the thread that called wb_read().
#[no_mangle]
pub unsafe extern "C" fn wb_read_end(reading: *mut wb_reading) {
    // SAFETY: it came of `wb_read`, in this thread, and nobody uses it any more.
    unsafe { inner::free(reading) }
}

/// Starts a worker. The publisher need not be there yet.
#[no_mangle]
pub unsafe extern "C" fn wb_connect(options: *const wb_options, worker: *mut *mut wb_worker) -> wb_code {
    answer(|| {
        // SAFETY: the caller gives options as the header says; they tell their size.
        let options = unsafe { inner::options_of(options) }?;
        // SAFETY: all that they point to is there for this call.
        let (address, wanted) = unsafe { (text_of(options.address, 0, "address")?, Target::all(&options)?) };
        let mut builder = weightbus_core::Worker::builder(address).shared_memory(!options.network_only);
        builder = builder.partial(options.partial).cast(options.cast).patches(!options.whole_only);
        builder = builder.any_data_host(options.any_data_host != 0);
        let mut client = concat!("weightbus-c/", env!("CARGO_PKG_VERSION"));
        if !options.client.is_null() {
            // SAFETY: as above.
            client = unsafe { text_of(options.client, 0, "client") }?;
        }
        builder = builder.client(client);
        if !options.name.is_null() {
            // SAFETY: as above.
            builder = builder.name(unsafe { text_of(options.name, 0, "name") }?);
        }
        if !options.keys.is_null() {
            // SAFETY: as above.
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
        // SAFETY: the caller gives a place for it.
        unsafe { out(worker, inner::named(builder.connect()?)) }
    })
}

/// Returns what a worker is called, for as long as it lives; empty for no worker.
#[no_mangle]
pub unsafe extern "C" fn wb_name(worker: *const wb_worker) -> *const c_char {
    // SAFETY: the caller gives a worker that lives, or NULL.
    unsafe { worker.as_ref() }.map_or(b"\0".as_ptr().cast(), |worker| worker.1.as_ptr())
}

/// Waits until the publisher has let the worker in, and tells its epoch (`epoch` may be NULL).
#[no_mangle]
pub unsafe extern "C" fn wb_joined(worker: *const wb_worker, timeout_ms: u32, epoch: *mut u64) -> wb_code {
    answer(|| {
        // SAFETY: the caller gives a worker that lives, and a place or NULL.
        let worker = unsafe { inner::worker_of(worker) }?;
        match worker.wait_joined(Duration::from_millis(timeout_ms.into()))? {
            Some(found) => {
                // SAFETY: as above.
                unsafe { fill(epoch, found) };
                Ok(wb_code::WB_OK)
            }
            None => Ok(wb_code::WB_NOTHING),
        }
    })
}

/// Applies the newest version that has arrived, waiting for one if need be. 0 ms: does not wait.
#[no_mangle]
pub unsafe extern "C" fn wb_receive(
    worker: *const wb_worker,
    timeout_ms: u32,
    update: *mut wb_update,
) -> wb_code {
    answer(|| {
        // SAFETY: the caller gives a worker that lives, and a place.
        let (worker, update, all) =
            unsafe { (inner::worker_of(worker)?, inner::blank(update)?, inner::all_said(worker)?) };
        match worker.receive(Duration::from_millis(timeout_ms.into())) {
            Ok(Some(found)) => {
                all.keep(&found);
                inner::tell(update, found);
                Ok(wb_code::WB_OK)
            }
            Ok(None) => Ok(wb_code::WB_NOTHING),
            Err(error) => {
                inner::tell_rejected(update, &error);
                Err(Fault::from(error))
            }
        }
    })
}

/// Tells what its publisher says of a version: of what its model runs, by the name that wb_look(), wb_read() and
/// wb_latest() tell now (a publisher that is started again may give it another), or of one of the last few that
/// wb_receive() has told; to be freed by wb_metadata_free(). WB_NOTHING: it is none of those.
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
            match inner::said_of(worker, text_of(model, 0, "id of a model")?, (epoch, version))? {
                Some(said) => out(metadata, wb_metadata(said)),
                None => Ok(wb_code::WB_NOTHING),
            }
        }
    })
}

/// Returns all that is said, by name, and how many entries there are. They live as long as `metadata`.
#[no_mangle]
pub unsafe extern "C" fn wb_metadata_all(metadata: *const wb_metadata, count: *mut usize) -> *const wb_text {
    // SAFETY: the caller gives metadata that lives, or NULL, and a place or NULL.
    let all = unsafe { metadata.as_ref() }.map_or(&[][..], |metadata| metadata.0.all());
    unsafe { fill(count, all.len()) };
    all.as_ptr()
}

/// Returns the text of one name, for as long as `metadata` lives; NULL if nothing is said under it.
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
    // SAFETY: it came of `wb_metadata_of`, and nobody uses it any more.
    unsafe { inner::free(metadata) }
}

/// Tells how a worker stands, and one of its models; `model` may be NULL.
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

/// Tells the newest version of a model without memory of yours, as wb_receive() did when it was applied
/// (without its digest). WB_NOTHING: there is none yet.
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
        Ok(found.map_or(wb_code::WB_NOTHING, |snapshot| inner::tell_latest(update, snapshot)))
    })
}

/// Returns a descriptor that is readable while wb_receive() would not wait, for poll() and its like; -1 for no
/// worker. It is the worker's: do not read from it or close it.
#[no_mangle]
pub unsafe extern "C" fn wb_fd(worker: *const wb_worker) -> c_int {
    // SAFETY: the caller gives a worker that lives, or NULL.
    let worker = unsafe { worker.as_ref() };
    quietly(-1, || worker.map_or(-1, |worker| worker.0.ready_fd()))
}

/// Says goodbye, and ends the worker's thread: whoever waits in wb_receive() gets WB_CLOSED.
#[no_mangle]
pub unsafe extern "C" fn wb_close(worker: *const wb_worker) {
    // SAFETY: the caller gives a worker that lives, or NULL.
    let worker = unsafe { worker.as_ref() };
    quietly((), || worker.map_or((), |worker| worker.0.close()))
}

/// Closes and frees a worker that nobody else uses.
#[no_mangle]
pub unsafe extern "C" fn wb_worker_free(worker: *mut wb_worker) {
    // SAFETY: it came of `wb_connect`, and nobody uses it any more.
    unsafe { inner::free(worker) }
}

/// Returns the tensors of a snapshot, in the order of their bytes, and how many there are. They live as long
/// as it does, and nobody writes to them.
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

/// Finds a tensor of a snapshot by its name, or by another name that its publisher gave it.
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
    // SAFETY: it came of `wb_receive`, and nobody uses it any more.
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

/// Returns the one address that workers need, for as long as the publisher lives; empty for no publisher.
#[no_mangle]
pub unsafe extern "C" fn wb_address(publisher: *const wb_publisher) -> *const c_char {
    // SAFETY: the caller gives a publisher that lives, or NULL.
    unsafe { publisher.as_ref() }.map_or(b"\0".as_ptr().cast(), |publisher| publisher.1.as_ptr())
}

/// Publishes a new version of a model, of tensors that are borrowed until they are copied, before this waits for
/// anybody; then waits until the workers have it. `options` may be NULL, and so may `receipt`, which WB_UNACHIEVED
/// brings as well. WB_NOTHING: others were publishing the model until its time was over, so nothing was published.
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
        // SAFETY: the caller gives a publisher that lives, a name, `count` tensors, options or NULL, a place or NULL.
        unsafe {
            publishing::clear(receipt);
            let publisher = publishing::publisher_of(publisher)?;
            let (model, options) = (text_of(model, 0, "id of a model")?, publishing::options_of(options)?);
            let tensors = publishing::Views::of(tensors, count)?;
            let result = publisher.publish_later(model, tensors.all(), &options)?.wait();
            publishing::tell(result, receipt)
        }
    })
}

/// The same of the bytes of a safetensors file, as they stand.
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
        // SAFETY: as above, and `nbytes` bytes of a file.
        unsafe {
            publishing::clear(receipt);
            let publisher = publishing::publisher_of(publisher)?;
            let (model, options) = (text_of(model, 0, "id of a model")?, publishing::options_of(options)?);
            let file = inner::array(file.cast::<u8>(), nbytes, "bytes of a file")?;
            publishing::tell(publisher.publish_safetensors(model, file, &options)?.wait(), receipt)
        }
    })
}

/// Tells what became of a publish.
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

/// Returns what each worker did, by name, and how many there are. They live as long as the receipt.
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
    // SAFETY: it came of `wb_publish`, and nobody uses it any more.
    unsafe { inner::free(receipt) }
}

/// Waits until so many workers are there that want the model. WB_NOTHING: they did not come in time.
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
        let there = publisher.wait_for_workers(count, model, Duration::from_millis(timeout_ms.into()))?;
        Ok(if there { wb_code::WB_OK } else { wb_code::WB_NOTHING })
    })
}

/// Ends a publisher's thread: who waits in wb_publish() is answered as things stand. Workers keep what they run.
#[no_mangle]
pub unsafe extern "C" fn wb_publisher_close(publisher: *const wb_publisher) {
    // SAFETY: the caller gives a publisher that lives, or NULL.
    let publisher = unsafe { publisher.as_ref() };
    quietly((), || publisher.map_or((), |publisher| publisher.0.close()))
}

/// Closes and frees a publisher that nobody else uses.
#[no_mangle]
pub unsafe extern "C" fn wb_publisher_free(publisher: *mut wb_publisher) {
    // SAFETY: it came of `wb_bind`, and nobody uses it any more.
    unsafe { inner::free(publisher) }
}
