// libweightbus: workers and publishers of the weight bus. A worker receives a model's weights from
// its trainer, version by version. Each version is complete, verified, and in place. cbindgen makes
// this file from src/lib.rs (`make header`): do not edit it.
//
// Threads. Every function may be called in any thread, and threads may share a worker, a publisher,
// a model and a snapshot. But wb_read_end() must be called in the thread that called wb_read(), and
// a handle must not be used while it is freed. A thread that holds a wb_reading must not call
// wb_receive(), which would wait for the end of this reading until its timeout.
//
// Memory. Where memory is borrowed, a comment says for how long. Each kind of handle has a function
// that frees it, such as wb_worker_free(), and that accepts NULL. Free the workers of a model before
// the model, and the memory of its tensors last.
//
// Errors. A function that can fail returns a wb_code, and wb_error() returns the message. No panic
// leaves this library, and no C++ exception may leave a wb_on_event or a wb_decide.
//
// Stability. WB_ABI changes with every change that a compiled program would notice, and is in the
// soname. With the same WB_ABI, a release may add functions, codes, and fields of wb_options.


#ifndef WEIGHTBUS_H
#define WEIGHTBUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// The version of the library that this header belongs to.
#define WB_VERSION "0.1.0"

// The number of this ABI. A program may run with any library of the same number.
#define WB_ABI 1

// A publish waits until the workers run the version.
#define WB_WAIT_APPLIED 0

// A publish waits until the workers have the version, verified.
#define WB_WAIT_STAGED 1

// A publish waits for no worker.
#define WB_WAIT_NOBODY 2

// The version is sent whole.
#define WB_ENCODING_RAW 0

// The version is sent as the smallest patch on the version that a worker runs, if the publisher
// still has the latter.
#define WB_ENCODING_DELTA 1

// Like WB_ENCODING_DELTA, but in more bytes, which take less time to encode and decode.
#define WB_ENCODING_DELTA_FLAT 2

// The one of these three encodings that is likely to arrive first.
#define WB_ENCODING_AUTO 3

// The result of a call.
typedef enum {
  // The call succeeded.
  WB_OK = 0,
  // Nothing arrived in time, or nothing was found.
  WB_NOTHING = 1,
  // A version was rejected. The previous one still runs, unless wb_error() says that none runs.
  WB_REJECTED = 2,
  // The publisher refuses this worker, which keeps trying to join.
  WB_REFUSED = 3,
  // The worker or the publisher was closed.
  WB_CLOSED = 4,
  // An apply failed half-way: the model must not be read until another version is applied.
  WB_TORN = 5,
  // An argument is invalid.
  WB_INVALID = 6,
  // There is no tensor, or no worker, of this name.
  WB_NOT_FOUND = 7,
  // A socket, a thread or memory could not be created.
  WB_SYSTEM = 8,
  // A bug in this library.
  WB_PANIC = 9,
  // A publish missed its requirement. Its receipt has the outcome at every worker.
  WB_UNACHIEVED = 10,
} wb_code;

// Metadata of a version.
typedef struct wb_metadata wb_metadata;

// A model that versions are written to.
typedef struct wb_model wb_model;

// A publisher.
typedef struct wb_publisher wb_publisher;

// Read access to a model.
typedef struct wb_reading wb_reading;

// The receipt of a publish.
typedef struct wb_receipt wb_receipt;

// A snapshot: a version that never changes.
typedef struct wb_snapshot wb_snapshot;

// A worker.
typedef struct wb_worker wb_worker;

// A tensor: your memory for a model, or a read-only part of a snapshot.
typedef struct {
  // Name in UTF-8, with a zero byte at the end.
  const char *name;
  // Length of the name, for names with zero bytes. 0: the name ends at its first zero byte.
  size_t name_bytes;
  // Name of the dtype in safetensors: "F32", "BF16", "I64", ...
  const char *dtype;
  // Sizes of the `rank` dimensions; row-major.
  const uint64_t *shape;
  size_t rank;
  void *data;
  // Bytes at `data`: exactly as many as dtype and shape need.
  size_t nbytes;
} wb_tensor;

// A model to subscribe to, and the destination of its versions.
typedef struct {
  const char *id;
  // NULL: each version is returned as a snapshot.
  const wb_model *model;
} wb_wanted;

// An event of a worker or a publisher, for logs and screens. It is borrowed for the call.
typedef struct {
  // "joined", "lost", "refused", "rejected", "changed-over" or "notice"; others may be added.
  const char *kind;
  // Model of an event about a version, else empty. Of a publisher: name of a worker.
  const char *model;
  uint64_t epoch;
  uint64_t version;
  // Code of the protocol, such as "layout-mismatch"; empty if there is none.
  const char *code;
  const char *text;
} wb_event;

// Called in the thread of the worker or publisher, which also answers the other side: the function
// must not wait, and must not free the handle. It may call wb_close() or wb_publisher_close(),
// which return at once: the thread ends after the function. Another thread that frees the handle
// waits for the end of the function. In a publisher's function, do not call wb_publish(),
// wb_publish_safetensors() or wb_wait_for_workers(): they would wait until their timeouts.
typedef void (*wb_on_event)(const wb_event *event, void *user);

// A complete, verified version, on which your function decides. It is borrowed for the call.
typedef struct {
  const char *model;
  uint64_t epoch;
  uint64_t version;
  uint64_t nbytes;
  // The version's snapshot, if the model has no memory of yours. NULL otherwise, and in
  // before_apply.
  const wb_snapshot *snapshot;
} wb_offer;

// Decides on a version, in the thread that calls wb_receive(). 0 accepts the version; any other
// result rejects it. The function may write the reason to `text`, with a zero byte at the end, in
// at most `room` bytes. The reason is sent to the publisher. In apply, your memory holds the
// version already: read it directly, since wb_read() would wait for the end of this call.
typedef int (*wb_decide)(const wb_offer *offer, char *text, size_t room, void *user);

// Settings of a worker. Zeros are the defaults. Everything is borrowed for the call of
// wb_connect().
typedef struct {
  // sizeof(wb_options).
  // A library with fewer fields returns WB_INVALID if a field that it lacks is not zero.
  size_t size;
  // Address of the publisher: "tcp://HOST:PORT" or "ipc://PATH". Or several addresses, of relays
  // and the publisher, separated by commas, in order of preference. The worker changes over to
  // the next address when one fails ("changed-over"), and returns to the first one once a
  // publisher answers there.
  const char *address;
  // Name of this worker, unique among the publisher's workers. NULL: a name is generated.
  const char *name;
  const wb_wanted *wanted;
  size_t wanted_count;
  // Size in bytes of the largest version to accept; 0: 64 GiB.
  uint64_t bytes_max;
  // True: versions are not copied from the publisher's memory, even on the same host.
  bool network_only;
  wb_on_event on_event;
  // Passed to all functions here; valid in any thread until the worker is freed.
  void *user;
  // Decides once for each version whether it runs, before readers see the version and before the
  // worker reports it. After a rejection the previous snapshot stays, but no version runs in your
  // memory (WB_TORN).
  wb_decide apply;
  // Decides before any byte of a model changes. After a rejection the previous version still
  // runs.
  wb_decide before_apply;
  // Time limit of each call of these two functions, at most a day; 0: 60 s. After that the
  // version is rejected, whatever the function returns later, and no other version of its model
  // is applied until the function has returned.
  uint32_t apply_timeout_ms;
  // True: versions may have tensors that the models here lack. These tensors are ignored.
  bool partial;
  // True: F64, F32, F16 and BF16 values are converted where dtypes differ, and rounded to
  // nearest, ties to even.
  bool cast;
  // Program or binding that runs the worker, and its version, for the publisher's operators: at
  // most 256 characters. NULL: "weightbus-c/" and this library's version.
  const char *client;
  // This worker's keys, for a publisher with keys: the path of its file from `weightbus keygen`,
  // or of the folder, or the content of the file, which begins with {. NULL stands for the
  // environment variable WEIGHTBUS_KEYS, if it is set, and "" for no keys. With several
  // addresses, `keys` may have a path for each, in the same order, separated by commas.
  const char *keys;
  // True: every version arrives whole, never as a patch on the running version. With `partial`
  // or `cast`, patches need a second copy of the running version.
  bool whole_only;
  // Not 0: the data endpoint may be on any host or path that the publisher names. 0: it must be
  // on the host of `address`, or at the path of `address` with a suffix. With any other endpoint,
  // the worker fetches all versions, which is slower.
  uint64_t any_data_host;
} wb_options;

// The result of wb_receive(): a version that was applied or, with WB_REJECTED, rejected.
typedef struct {
  uint64_t epoch;
  uint64_t version;
  uint64_t nbytes;
  // Duration of the copy.
  uint64_t nanoseconds;
  // The snapshot, if the model has no memory of yours, else NULL. Free it with
  // wb_snapshot_free().
  wb_snapshot *snapshot;
  char model[129];
  // Digest of the bytes; empty if they were copied from shared memory and were not hashed.
  char digest[65];
  // With WB_REJECTED and WB_REFUSED: the code of the reason ("layout-mismatch", ...).
  char code[129];
  // True if the version arrived as a patch on the version that ran before.
  bool patched;
} wb_update;

// An entry of a version's metadata: a name, and a text.
typedef struct {
  // Name in UTF-8 with a zero byte at the end, like the text.
  const char *name;
  const char *text;
} wb_text;

// The state of a worker. The running version is current; the other fields may be slightly out of
// date. An epoch or version is 0 if there is no such session or version.
typedef struct {
  // Epoch of the session.
  uint64_t epoch;
  // Malformed messages that were dropped.
  uint64_t malformed;
  // True if versions are copied from the publisher's memory.
  bool shared;
  // True if an apply of this model failed half-way, so that no version runs.
  bool torn;
  uint64_t running_epoch;
  uint64_t running_version;
  // The arriving version, the number of its chunks that have arrived, and of all its chunks.
  uint64_t arriving_epoch;
  uint64_t arriving_version;
  uint64_t chunks_here;
  uint64_t chunks;
  // The version that waits for a commit.
  uint64_t staged_epoch;
  uint64_t staged_version;
  // The version that waits for wb_receive(), or is being applied.
  uint64_t ready_epoch;
  uint64_t ready_version;
} wb_state;

// Settings of a publisher. Zeros are the defaults. Everything is borrowed for the call of
// wb_bind().
typedef struct {
  // sizeof(wb_publisher_options), as in wb_options.
  size_t size;
  // Address to listen at, the only one that workers need: "tcp://HOST:PORT" (port 0: any free
  // one) or "ipc://PATH".
  const char *address;
  // Address of the data socket. NULL: the next port, or the path of `address` with a suffix.
  const char *data;
  // Data address that is sent to the workers. NULL: derived from `data`.
  const char *advertise;
  // Epoch, which workers compare with their running version's epoch; 0: milliseconds since 1970.
  uint64_t epoch;
  // Size of a chunk in bytes; 0: 2^20.
  uint64_t chunk_bytes;
  // Interval of pings, and the silence after which a worker is lost: at least two intervals. 0:
  // 1 s and 5 s.
  uint32_t ping_ms;
  uint32_t lost_after_ms;
  // A folder that keeps the epoch and the latest version of each model. A publisher that is
  // started with this folder later, in this language or in Python, offers these versions again.
  // NULL: no folder. Freeing the publisher waits up to 10 s until all is written there.
  const char *state;
  // Least number of workers that "all" stands for, in a publish that sets no `expect`.
  size_t expect;
  // True: without keys, listen where other hosts can connect, which then get the weights.
  bool insecure;
  // Called with events of workers. The kind is "joined", "lost", "stuck", "back", "left",
  // "refused", "failed", "wrong-digest" or "notice". `model` is the name of the worker.
  wb_on_event on_event;
  // Passed to `on_event`; valid in any thread until the publisher is freed.
  void *user;
  // Number of versions of each model kept in memory for patches to build on, at most 8, and the
  // bytes that they may take together. 0: 2 versions, of any size. Only versions published as
  // patches are kept.
  size_t bases;
  uint64_t bases_bytes_max;
  // A folder from `weightbus keygen`: only workers with a key that it allows can connect, and
  // all published data is sealed. The folder is read repeatedly. NULL stands for the
  // environment variable WEIGHTBUS_KEYS, if it is set, and "" for no keys.
  const char *keys;
  // With keys: time after which a new group key replaces the current one; 0: a day.
  uint32_t rekey_ms;
  // Number of older versions of each model kept in the folder `state`, at most 10,000.
  size_t history;
} wb_publisher_options;

// Settings of one publish. Zeros are the defaults. Everything is borrowed for the call.
typedef struct {
  // sizeof(wb_publish_options), as in wb_options.
  size_t size;
  // Names of the workers to publish to. 0 names: all workers that subscribe to the model.
  const char *const *workers;
  size_t workers_count;
  // Number of workers that must succeed; 0: all workers that the version is published to.
  size_t at_least;
  // WB_WAIT_APPLIED, WB_WAIT_STAGED or WB_WAIT_NOBODY.
  uint32_t wait;
  // True: no worker applies the version before the required number of workers has staged it. If
  // too few workers stage it in time, no worker applies it.
  bool together;
  // Time limit of the whole publish; 0: 60 s.
  uint32_t timeout_ms;
  // Least number of workers that "all" stands for: the publish waits for missing workers. 0: the
  // publisher's `expect`.
  size_t expect;
  // Encoding for workers that accept patches: WB_ENCODING_RAW, _DELTA, _DELTA_FLAT or _AUTO.
  uint32_t encoding;
  // Metadata, such as a step or a reward. At most 32 entries, and 4 KiB of names and texts.
  const wb_text *metadata;
  size_t metadata_count;
} wb_publish_options;

// The summary of a receipt.
typedef struct {
  uint64_t epoch;
  uint64_t version;
  uint64_t nbytes;
  // Time from the call to its return.
  uint64_t nanoseconds;
  char digest[65];
  // The summary in words. It is valid as long as the receipt.
  const char *text;
} wb_published;

// The outcome of a publish at one worker. It is valid as long as the receipt.
typedef struct {
  const char *worker;
  // "applied", "staged", "failed", "lost", "left", "behind" or "skipped" (a newer version runs).
  const char *outcome;
  // Time from the call to the outcome; 0 while it is "behind".
  uint64_t nanoseconds;
  // Explanation for a person; empty if the outcome needs none.
  const char *detail;
  // How the version arrived: "raw" (whole) or "delta-1" (a patch on the version that ran
  // before); empty if unknown.
  const char *encoding;
  // Bytes of the version or patch, without headers. Bytes that were sent again are not counted.
  uint64_t nbytes;
} wb_outcome;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Returns WB_ABI of the library that the program runs with.
uint32_t wb_abi(void);

// Returns the message of the last failed call in this thread, which is valid until the next
// failure.
const char *wb_error(void);

// Makes a model of tensors in your memory. Names, dtypes and shapes are borrowed for the call, and
// `data` until the model and all of its workers are freed. Until then only this library writes to
// `data`, and your program reads it only between wb_read() and wb_read_end().
wb_code wb_model_new(const wb_tensor *tensors, size_t count, wb_model **model);

// Makes a model of zeros in the library's own memory, and writes the address and size of each
// tensor to its `data` and `nbytes`; otherwise like wb_model_new(). A version of 2 MiB or more
// from the network is not copied there: pages are exchanged. So do not fork while a version is
// applied: the child may find other bytes. Do not register this memory with a device or a network
// card (cudaHostRegister(), ibv_reg_mr(), buffers of io_uring), which would keep using the old
// pages. The effects of mlock(), madvise() and mbind() move with the pages. For these, use
// wb_model_new().
wb_code wb_model_resident(wb_tensor *tensors, size_t count, wb_model **model);

void wb_model_free(wb_model *model);

// Waits while a version is being written to a model, and keeps the model unchanged until
// wb_read_end(). Sets `epoch` and `version` to those of the version in the model, 0 before the
// first version; either pointer may be NULL. Returns WB_TORN if an apply failed half-way.
wb_code wb_read(const wb_model *model, wb_reading **reading, uint64_t *epoch, uint64_t *version);

// Ends the read access to a model, in the thread that called wb_read().
void wb_read_end(wb_reading *reading);

// Starts a worker. The publisher may start later.
wb_code wb_connect(const wb_options *options, wb_worker **worker);

// Returns the name of a worker, which is valid as long as the worker; empty for NULL.
const char *wb_name(const wb_worker *worker);

// Returns the address that a worker uses or tries now. The text is valid as long as the worker,
// and empty for NULL.
const char *wb_worker_address(const wb_worker *worker);

// Waits until the publisher admits the worker. Sets `epoch` to the publisher's, unless it is NULL.
wb_code wb_joined(const wb_worker *worker, uint32_t timeout_ms, uint64_t *epoch);

// Applies the newest version that has arrived, and waits for one if necessary. 0 ms: does not
// wait.
wb_code wb_receive(const wb_worker *worker, uint32_t timeout_ms, wb_update *update);

// Returns the publisher's metadata of a version, to be freed by wb_metadata_free(). The version is
// one of the last few that wb_receive() returned, or the running version, by the number that
// wb_look(), wb_read() and wb_latest() return now (a restarted publisher may change this number).
// Returns WB_NOTHING for other versions.
wb_code wb_metadata_of(const wb_worker *worker,
                       const char *model,
                       uint64_t epoch,
                       uint64_t version,
                       wb_metadata **metadata);

// Returns all entries, sorted by name, and sets `count`. They are valid as long as `metadata`.
const wb_text *wb_metadata_all(const wb_metadata *metadata, size_t *count);

// Returns the text of this name, which is valid as long as `metadata`; NULL if there is none.
const char *wb_metadata_get(const wb_metadata *metadata, const char *name);

void wb_metadata_free(wb_metadata *metadata);

// Sets `state` to the state of a worker, and of one of its models; `model` may be NULL.
wb_code wb_look(const wb_worker *worker, const char *model, wb_state *state);

// Returns the newest version of a model that has no memory of yours, like wb_receive(), but
// without digest, duration and `patched`. Returns WB_NOTHING before the first version.
wb_code wb_latest(const wb_worker *worker, const char *model, wb_update *update);

// Returns a descriptor for poll() and the like, which is readable while wb_receive() would not
// wait; -1 for NULL. It belongs to the worker: do not read from it, and do not close it.
int wb_fd(const wb_worker *worker);

// Sends a `bye`, and ends the worker's thread. Calls that wait in wb_receive() return WB_CLOSED.
void wb_close(const wb_worker *worker);

// Closes and frees a worker, which no other thread may use any more.
void wb_worker_free(wb_worker *worker);

// Returns the tensors of a snapshot, in the order of the publisher's model, and sets `count`. They
// live as long as the snapshot, and never change.
const wb_tensor *wb_snapshot_tensors(const wb_snapshot *snapshot, size_t *count);

// Finds a tensor of a snapshot by its name or an alias.
wb_code wb_snapshot_find(const wb_snapshot *snapshot, const char *name, wb_tensor *tensor);

void wb_snapshot_free(wb_snapshot *snapshot);

// Starts a publisher.
wb_code wb_bind(const wb_publisher_options *options, wb_publisher **publisher);

// Returns the address that workers need, which is valid as long as the publisher; empty for NULL.
const char *wb_address(const wb_publisher *publisher);

// Publishes a new version of a model, and waits until the workers have it (see `wait`). The
// tensors are borrowed until they are copied, which is before the wait. `options` and `receipt`
// may be NULL. With WB_UNACHIEVED, there is a receipt, too. Returns WB_NOTHING, with nothing
// published, if other calls were publishing the model until the timeout.
wb_code wb_publish(const wb_publisher *publisher,
                   const char *model,
                   const wb_tensor *tensors,
                   size_t count,
                   const wb_publish_options *options,
                   wb_receipt **receipt);

// Like wb_publish(), but publishes the bytes of a safetensors file as they are.
wb_code wb_publish_safetensors(const wb_publisher *publisher,
                               const char *model,
                               const void *file,
                               size_t nbytes,
                               const wb_publish_options *options,
                               wb_receipt **receipt);

// Returns the summary of a receipt.
wb_code wb_receipt_look(const wb_receipt *receipt, wb_published *published);

// Returns the outcome at each worker, sorted by name, and sets `count`. Valid as long as the
// receipt.
const wb_outcome *wb_receipt_workers(const wb_receipt *receipt, size_t *count);

void wb_receipt_free(wb_receipt *receipt);

// Waits until `count` workers that subscribe to the model are connected. Returns WB_NOTHING if
// they did not join in time.
wb_code wb_wait_for_workers(const wb_publisher *publisher,
                            const char *model,
                            size_t count,
                            uint32_t timeout_ms);

// Ends a publisher's thread. Calls that wait in wb_publish() return with the outcomes so far.
// Workers keep their running versions.
void wb_publisher_close(const wb_publisher *publisher);

// Closes and frees a publisher, which no other thread may use any more.
void wb_publisher_free(wb_publisher *publisher);

#ifdef __cplusplus
} // extern "C"
#endif // __cplusplus

#endif /* WEIGHTBUS_H */
