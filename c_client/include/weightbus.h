// libweightbus: a worker of the weight bus. It takes a model's weights from its trainer, version by version,
// each one whole, verified, and written in place. Made by cbindgen from src/lib.rs (`make header`): do not edit.
//
// Threads. Every function may be called in any thread, and threads may share a worker, a model and a snapshot,
// with two exceptions: wb_read_end() is called in the thread that called wb_read(), and nobody uses what
// is being freed. A thread that holds a wb_reading does not call wb_receive(): it would find the model in use.
//
// Memory. What is borrowed says for how long. Handles are freed by the function that names them; NULL is fine.
// Free the workers of a model before the model, and only then the memory of its tensors.
//
// Errors. What can fail returns a wb_code; wb_error() has the words. No panic crosses this boundary, and no
// exception of C++ may: let none out of a wb_on_event or a wb_decide.
//
// Stability. WB_ABI changes with every change that a compiled program would notice: the soname has it.
// Within one number functions and codes are added, and fields at the end of wb_options, which tells its size.


#ifndef WEIGHTBUS_H
#define WEIGHTBUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// The version of the library that this header belongs to.
#define WB_VERSION "0.1.0"

// The number of this ABI. A program may run with any library of the same number.
#define WB_ABI 1

// When a worker counts as being there: it runs the version,
#define WB_WAIT_APPLIED 0

// it holds it, verified,
#define WB_WAIT_STAGED 1

// or nobody is waited for.
#define WB_WAIT_NOBODY 2

// A version goes as it is,
#define WB_ENCODING_RAW 0

// by what has changed since the one that a worker runs, in the fewest bytes, where the publisher still has that,
#define WB_ENCODING_DELTA 1

// or the same in more bytes, which take less time to make and to decode;
#define WB_ENCODING_DELTA_FLAT 2

// or by that of these three which is likely to be there soonest.
#define WB_ENCODING_AUTO 3

// What came of a call.
typedef enum {
  // It is done.
  WB_OK = 0,
  // Nothing has come in time.
  WB_NOTHING = 1,
  // A version cannot be taken; what ran before still runs, unless wb_error() says that none does.
  WB_REJECTED = 2,
  // The publisher refuses this worker, which goes on asking.
  WB_REFUSED = 3,
  // The worker was closed.
  WB_CLOSED = 4,
  // An apply has failed half-way: the model is not to be read until another version is applied.
  WB_TORN = 5,
  // An argument makes no sense.
  WB_INVALID = 6,
  // There is no tensor of this name.
  WB_NOT_FOUND = 7,
  // Sockets, threads or memory are not to be had.
  WB_SYSTEM = 8,
  // A bug in this library.
  WB_PANIC = 9,
  // A publish did not reach what it required; its receipt says what every worker did.
  WB_UNACHIEVED = 10,
} wb_code;

// What is said of a version.
typedef struct wb_metadata wb_metadata;

// A model whose memory is yours.
typedef struct wb_model wb_model;

// A publisher.
typedef struct wb_publisher wb_publisher;

// One who reads a model.
typedef struct wb_reading wb_reading;

// What became of a publish.
typedef struct wb_receipt wb_receipt;

// A version that never changes.
typedef struct wb_snapshot wb_snapshot;

// A worker.
typedef struct wb_worker wb_worker;

// A tensor: memory of yours for a model, or, read-only, a part of a snapshot.
typedef struct {
  // UTF-8 with a zero behind it.
  const char *name;
  // Its length, which tells where a name has a zero in it; 0: up to the first one.
  size_t name_bytes;
  // As safetensors has it: "F32", "BF16", "I64", ...
  const char *dtype;
  // `rank` sizes; row-major.
  const uint64_t *shape;
  size_t rank;
  void *data;
  // Bytes at `data`: exactly what dtype and shape say.
  size_t nbytes;
} wb_tensor;

// A model that is wanted, by its id, and where its versions go.
typedef struct {
  const char *id;
  // NULL: each version comes as a snapshot.
  const wb_model *model;
} wb_wanted;

// What happens to a worker, for logs and screens. All of it is borrowed for the call.
typedef struct {
  // "joined", "lost", "refused", "rejected" or "notice"; others may come.
  const char *kind;
  // Empty unless it is about a version; so are the numbers.
  const char *model;
  uint64_t epoch;
  uint64_t version;
  // Of the protocol, such as "layout-mismatch"; or empty.
  const char *code;
  const char *text;
} wb_event;

// Called in the own thread of the worker or publisher, which answers the other side: it must not wait, and must
// not free that handle. It may close it: wb_close() and wb_publisher_close() return at once here, and the thread
// ends after this call; whoever frees the handle elsewhere waits for that. Of a publisher, wb_publish(),
// wb_publish_safetensors() and wb_wait_for_workers() would wait for this very thread, until they give up.
typedef void (*wb_on_event)(const wb_event *event, void *user);

// A version, whole and verified, on which a function of yours decides. All of it is borrowed for the call.
typedef struct {
  const char *model;
  uint64_t epoch;
  uint64_t version;
  uint64_t nbytes;
  // Of a model without memory of yours, else NULL, as it is in before_apply.
  const wb_snapshot *snapshot;
} wb_offer;

// Decides on a version, in the thread that calls wb_receive(): 0 takes it, all else turns it down. Why may be
// written to `text`, with a zero behind it, of at most `room` bytes: the publisher is told. In apply, memory of
// yours holds the version, to be read as it is: wb_read() would wait for this call.
typedef int (*wb_decide)(const wb_offer *offer, char *text, size_t room, void *user);

// How a worker is set up. Zeros are the defaults; everything here is borrowed for the call of wb_connect().
typedef struct {
  // sizeof(wb_options).
  // A library that knows fewer fields takes more of them where they are zero, else answers WB_INVALID.
  size_t size;
  // Of the publisher: "tcp://HOST:PORT" or "ipc://PATH".
  const char *address;
  // Of this worker, unique among the publisher's; NULL: one is made up.
  const char *name;
  const wb_wanted *wanted;
  size_t wanted_count;
  // The largest version to take; 0: 64 GiB.
  uint64_t bytes_max;
  // Do not copy out of the publisher's memory where it is on this host.
  bool network_only;
  wb_on_event on_event;
  // Passed on to all functions here; alive and usable in any thread until the worker is freed.
  void *user;
  // Decides whether a version runs, once for each, before anybody reads it and before it is reported. One
  // that is turned down leaves the snapshot before it; in memory of yours it leaves none (WB_TORN).
  wb_decide apply;
  // The same before a byte of a model changes: what ran before runs on.
  wb_decide before_apply;
  // What each call of the two may take, at most a day; 0: 60 s. Then the version counts as turned down,
  // whatever is answered later, and its model takes no other one until the function has returned.
  uint32_t apply_timeout_ms;
  // Versions may have tensors that the models here lack: they are passed over.
  bool partial;
  // Values are converted where dtypes differ, among F64, F32, F16 and BF16: to the nearest, of two the even.
  bool cast;
  // What the worker runs on, for the publisher's operators: a program or binding, and its version, in at most
  // 256 characters. NULL: "weightbus-c/" and the version of this library.
  const char *client;
  // This worker's keys, for a publisher that has some: the path of its file of `weightbus keygen`, or of the
  // folder, or what stands in the file, which begins with {. NULL: what the environment's WEIGHTBUS_KEYS says,
  // else there are none, as with "".
  const char *keys;
  // Take every version as a whole, not as a patch on what runs where the publisher offers one. With `partial` or
  // `cast` patches cost a copy of what runs.
  bool whole_only;
  // Not 0: published data may come from another host than that of the address, or from any path, wherever the
  // publisher says. Else they must be on that host, or beside that path, or all is fetched, which is slower.
  uint64_t any_data_host;
} wb_options;

// What wb_receive() tells: a version that was applied, or (WB_REJECTED) that could not be.
typedef struct {
  uint64_t epoch;
  uint64_t version;
  uint64_t nbytes;
  // How long the copy took.
  uint64_t nanoseconds;
  // Of a model without memory of yours, else NULL; to be freed by wb_snapshot_free().
  wb_snapshot *snapshot;
  char model[129];
  // What its bytes hash to; empty where they came from shared memory.
  char digest[65];
  // Of WB_REJECTED and WB_REFUSED: why, in the protocol's words ("layout-mismatch", ...).
  char code[129];
  // It came as a patch on the version that ran before, not as a whole.
  bool patched;
} wb_update;

// Something that is said of a version: a name, and a text.
typedef struct {
  // UTF-8 with a zero behind it, as is the text.
  const char *name;
  const char *text;
} wb_text;

// How a worker stands. What runs is of now, the rest of a moment ago; numbers are 0 where there is nothing.
typedef struct {
  // Of the session.
  uint64_t epoch;
  // Messages dropped because they broke the protocol.
  uint64_t malformed;
  // Versions are copied out of the publisher's memory.
  bool shared;
  // Of one model: an apply has failed half-way, and none runs.
  bool torn;
  uint64_t running_epoch;
  uint64_t running_version;
  // What arrives, how many of its chunks are here, and of how many.
  uint64_t arriving_epoch;
  uint64_t arriving_version;
  uint64_t chunks_here;
  uint64_t chunks;
  // What waits for a commit.
  uint64_t staged_epoch;
  uint64_t staged_version;
  // What waits for wb_receive(), or is being applied.
  uint64_t ready_epoch;
  uint64_t ready_version;
} wb_state;

// How a publisher is set up. Zeros are the defaults; everything here is borrowed for the call of wb_bind().
typedef struct {
  // sizeof(wb_publisher_options), as in wb_options.
  size_t size;
  // Where it listens, which is the one address that workers need: "tcp://HOST:PORT" (port 0: any free one) or
  // "ipc://PATH".
  const char *address;
  // Where its data socket is; NULL: one port above, or a path beside.
  const char *data;
  // What workers are told to connect to for data; NULL: it follows from `data`.
  const char *advertise;
  // Its incarnation, which workers hold against that of what they run; 0: milliseconds since 1970.
  uint64_t epoch;
  // Bytes of a chunk; 0: 2^20.
  uint64_t chunk_bytes;
  // Between two signs of life, and the silence after which a worker is lost, of which at least two must fit
  // in; 0: 1 s and 5 s.
  uint32_t ping_ms;
  uint32_t lost_after_ms;
  // A folder that outlives it, and keeps its epoch and the latest version of each model, which a publisher that is
  // started with it later offers again, in this language or in Python; NULL: none. Freeing it waits up to 10 s for
  // what is to be written there.
  const char *state;
  // How many workers "all" are at least in a publish that does not say.
  size_t expect;
  // Without keys, listen where other hosts can connect, though whoever does gets the weights.
  bool insecure;
  // Told what becomes of workers: its kind is "joined", "lost", "stuck", "back", "left", "refused", "failed",
  // "wrong-digest" or "notice", its `model` the name of the worker.
  wb_on_event on_event;
  // Passed on to it; alive and usable in any thread until the publisher is freed.
  void *user;
  // How many versions of each model are kept in memory for patches to build on, at most 8, and how many bytes those
  // may take together; 0: 2, and of any size. Only what is published as patches is kept.
  size_t bases;
  uint64_t bases_bytes_max;
  // A folder that `weightbus keygen` has made: only workers with a key that it allows connect, and all that is
  // published is sealed. It is looked at again and again. NULL: what the environment's WEIGHTBUS_KEYS says, else
  // none; "": none.
  const char *keys;
  // With keys, after how long another group key takes the place of one; 0: a day.
  uint32_t rekey_ms;
  // How many older versions of each model are kept in the folder `state`, at most 10,000.
  size_t history;
} wb_publisher_options;

// What is asked of one publish. Zeros are the defaults; everything here is borrowed for the call.
typedef struct {
  // sizeof(wb_publish_options), as in wb_options.
  size_t size;
  // Names of the workers it is for; 0 of them: all that want the model.
  const char *const *workers;
  size_t workers_count;
  // How many must get there; 0: all that it is for.
  size_t at_least;
  // WB_WAIT_APPLIED, WB_WAIT_STAGED or WB_WAIT_NOBODY.
  uint32_t wait;
  // None applies before so many as are required have staged; if too few do in time, none applies at all.
  bool together;
  // For all of this; 0: 60 s.
  uint32_t timeout_ms;
  // How many "all" are at least: who is missing is waited for. 0: as many as the publisher was told.
  size_t expect;
  // How it goes to workers that take patches: WB_ENCODING_RAW, _DELTA, _DELTA_FLAT or _AUTO.
  uint32_t encoding;
  // What to say of the version: a step, a reward. At most 32 entries, and 4 KiB of names and texts.
  const wb_text *metadata;
  size_t metadata_count;
} wb_publish_options;

// What became of one publish.
typedef struct {
  uint64_t epoch;
  uint64_t version;
  uint64_t nbytes;
  // From the call to its answer.
  uint64_t nanoseconds;
  char digest[65];
  // All of it in words; lives as long as the receipt.
  const char *text;
} wb_published;

// What one worker did with a version. It lives as long as its receipt.
typedef struct {
  const char *worker;
  // "applied", "staged", "failed", "lost", "left", "behind" or "skipped" (it runs a newer one).
  const char *outcome;
  // From the call to that; 0 while it is behind.
  uint64_t nanoseconds;
  // For a person; empty where the outcome says it all.
  const char *detail;
  // How the version came to it: "raw" (all of it) or "delta-1" (a patch on what ran there); empty where nobody can
  // tell.
  const char *encoding;
  // Bytes of that, without headers; what was lost and sent again is not counted.
  uint64_t nbytes;
} wb_outcome;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Returns WB_ABI of the library that is running.
uint32_t wb_abi(void);

// Returns why the last call that failed in this thread did; valid until the next that fails in it.
const char *wb_error(void);

// Makes a model of tensors of yours. Names, dtypes and shapes are borrowed for the call, `data` until the
// model and all of its workers are freed. Until then only this library writes there, and you read between
// wb_read() and wb_read_end().
wb_code wb_model_new(const wb_tensor *tensors, size_t count, wb_model **model);

// Makes a model in memory of the library's own, of zeros, and puts its place into `data` and `nbytes` of each
// tensor; else like wb_model_new(). A version of 2 MiB or more that comes over the network gets there by an
// exchange of pages, which copies nothing. Do not fork while one is applied: the child may find other bytes.
// Nor register this memory with a device or a network card (cudaHostRegister(), ibv_reg_mr(), buffers of
// io_uring), which would go on using pages that were exchanged; and what mlock(), madvise() and mbind() say
// of pages travels with them. For that take memory of yours, and wb_model_new().
wb_code wb_model_resident(wb_tensor *tensors, size_t count, wb_model **model);

void wb_model_free(wb_model *model);

// Waits until nobody writes to a model, and keeps it as it is until wb_read_end(). `epoch` and `version` are
// told what it holds, 0 before the first version; either may be NULL. WB_TORN: there is nothing to read.
wb_code wb_read(const wb_model *model, wb_reading **reading, uint64_t *epoch, uint64_t *version);

// Lets go of a model, in the thread that called wb_read().
void wb_read_end(wb_reading *reading);

// Starts a worker. The publisher need not be there yet.
wb_code wb_connect(const wb_options *options, wb_worker **worker);

// Returns what a worker is called, for as long as it lives; empty for no worker.
const char *wb_name(const wb_worker *worker);

// Waits until the publisher has let the worker in, and tells its epoch (`epoch` may be NULL).
wb_code wb_joined(const wb_worker *worker, uint32_t timeout_ms, uint64_t *epoch);

// Applies the newest version that has arrived, waiting for one if need be. 0 ms: does not wait.
wb_code wb_receive(const wb_worker *worker, uint32_t timeout_ms, wb_update *update);

// Tells what its publisher says of a version: of what its model runs, by the name that wb_look(), wb_read() and
// wb_latest() tell now (a publisher that is started again may give it another), or of one of the last few that
// wb_receive() has told; to be freed by wb_metadata_free(). WB_NOTHING: it is none of those.
wb_code wb_metadata_of(const wb_worker *worker,
                       const char *model,
                       uint64_t epoch,
                       uint64_t version,
                       wb_metadata **metadata);

// Returns all that is said, by name, and how many entries there are. They live as long as `metadata`.
const wb_text *wb_metadata_all(const wb_metadata *metadata, size_t *count);

// Returns the text of one name, for as long as `metadata` lives; NULL if nothing is said under it.
const char *wb_metadata_get(const wb_metadata *metadata, const char *name);

void wb_metadata_free(wb_metadata *metadata);

// Tells how a worker stands, and one of its models; `model` may be NULL.
wb_code wb_look(const wb_worker *worker, const char *model, wb_state *state);

// Tells the newest version of a model without memory of yours, as wb_receive() did when it was applied
// (without its digest). WB_NOTHING: there is none yet.
wb_code wb_latest(const wb_worker *worker, const char *model, wb_update *update);

// Returns a descriptor that is readable while wb_receive() would not wait, for poll() and its like; -1 for no
// worker. It is the worker's: do not read from it or close it.
int wb_fd(const wb_worker *worker);

// Says goodbye, and ends the worker's thread: whoever waits in wb_receive() gets WB_CLOSED.
void wb_close(const wb_worker *worker);

// Closes and frees a worker that nobody else uses.
void wb_worker_free(wb_worker *worker);

// Returns the tensors of a snapshot, in the order of their bytes, and how many there are. They live as long
// as it does, and nobody writes to them.
const wb_tensor *wb_snapshot_tensors(const wb_snapshot *snapshot, size_t *count);

// Finds a tensor of a snapshot by its name, or by another name that its publisher gave it.
wb_code wb_snapshot_find(const wb_snapshot *snapshot, const char *name, wb_tensor *tensor);

void wb_snapshot_free(wb_snapshot *snapshot);

// Starts a publisher.
wb_code wb_bind(const wb_publisher_options *options, wb_publisher **publisher);

// Returns the one address that workers need, for as long as the publisher lives; empty for no publisher.
const char *wb_address(const wb_publisher *publisher);

// Publishes a new version of a model, of tensors that are borrowed until they are copied, before this waits for
// anybody; then waits until the workers have it. `options` may be NULL, and so may `receipt`, which WB_UNACHIEVED
// brings as well. WB_NOTHING: others were publishing the model until its time was over, so nothing was published.
wb_code wb_publish(const wb_publisher *publisher,
                   const char *model,
                   const wb_tensor *tensors,
                   size_t count,
                   const wb_publish_options *options,
                   wb_receipt **receipt);

// The same of the bytes of a safetensors file, as they stand.
wb_code wb_publish_safetensors(const wb_publisher *publisher,
                               const char *model,
                               const void *file,
                               size_t nbytes,
                               const wb_publish_options *options,
                               wb_receipt **receipt);

// Tells what became of a publish.
wb_code wb_receipt_look(const wb_receipt *receipt, wb_published *published);

// Returns what each worker did, by name, and how many there are. They live as long as the receipt.
const wb_outcome *wb_receipt_workers(const wb_receipt *receipt, size_t *count);

void wb_receipt_free(wb_receipt *receipt);

// Waits until so many workers are there that want the model. WB_NOTHING: they did not come in time.
wb_code wb_wait_for_workers(const wb_publisher *publisher,
                            const char *model,
                            size_t count,
                            uint32_t timeout_ms);

// Ends a publisher's thread: who waits in wb_publish() is answered as things stand. Workers keep what they run.
void wb_publisher_close(const wb_publisher *publisher);

// Closes and frees a publisher that nobody else uses.
void wb_publisher_free(wb_publisher *publisher);

#ifdef __cplusplus
} // extern "C"
#endif // __cplusplus

#endif /* WEIGHTBUS_H */
