// Tests what the header promises, with a real publisher: serve.py runs this program.

#define _POSIX_C_SOURCE 200809L

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <weightbus.h>

#define LONG_MS 20000
#define DEADLINE_MS 400

static void expect(bool holds, const char* what, int line) {
  if (holds) return;
  fprintf(stderr, "test.c:%d: %s; wb_error(): %s\n", line, what, wb_error());
  exit(1);
}
#define EXPECT(what) expect(what, #what, __LINE__)

// Under AddressSanitizer memory that cannot be had is told as it is without.
const char* __asan_default_options(void);
const char* __asan_default_options(void) { return "allocator_may_return_null=1"; }

// Asks serve.py for something; returns its answer as a number.
static long ask(const char* what) {
  char answer[64] = "";
  printf("%s\n", what);
  fflush(stdout);
  EXPECT(fgets(answer, sizeof answer, stdin) != NULL);
  return strtol(answer, NULL, 10);
}

static bool all_bytes(const void* data, size_t count, unsigned char byte) {
  const unsigned char* at = data;
  for (size_t i = 0; i < count; i++) {
    if (at[i] != byte) return false;
  }
  return true;
}

static const uint64_t kShape[] = {4, 3};
static float w[12], b;

// "head" is "w", and nobody publishes it.
static wb_model* line_model(void) {
  const wb_tensor tensors[] = {
      {.name = "w", .dtype = "F32", .shape = kShape, .rank = 2, .data = w, .nbytes = sizeof w},
      {.name = "b", .dtype = "F32", .data = &b, .nbytes = sizeof b},
      {.name = "head", .dtype = "F32", .shape = kShape, .rank = 2, .data = w, .nbytes = sizeof w},
  };
  wb_model* model = NULL;
  EXPECT(wb_model_new(tensors, 3, &model) == WB_OK);
  return model;
}

static void what_cannot_be_is_said(void) {
  EXPECT(wb_abi() == WB_ABI);
  wb_model* model = NULL;
  wb_tensor tensor = {.name = "w", .dtype = "F33", .data = w, .nbytes = 4};
  EXPECT(wb_model_new(&tensor, 1, &model) == WB_INVALID && strstr(wb_error(), "F33"));
  tensor.dtype = "F32", tensor.nbytes = 5;
  EXPECT(wb_model_new(&tensor, 1, &model) == WB_INVALID && strstr(wb_error(), "5 bytes"));
  tensor.nbytes = 4, tensor.data = NULL;
  EXPECT(wb_model_new(&tensor, 1, &model) == WB_INVALID && strstr(wb_error(), "no memory"));
  tensor.name = "\xff";
  EXPECT(wb_model_new(&tensor, 1, &model) == WB_INVALID && strstr(wb_error(), "UTF-8"));
  EXPECT(wb_model_new(NULL, 1, &model) == WB_INVALID && wb_model_new(NULL, 0, NULL) == WB_INVALID);
  const uint64_t ten[] = {10};
  const wb_tensor parts[] = {
      {.name = "a", .dtype = "F32", .shape = ten, .rank = 1, .data = w, .nbytes = 40},
      {.name = "b", .dtype = "F32", .shape = ten, .rank = 1, .data = w + 2, .nbytes = 40},
  };
  EXPECT(wb_model_new(parts, 2, &model) == WB_INVALID && strstr(wb_error(), "share a part"));
  EXPECT(model == NULL);
  wb_worker* worker = NULL;
  wb_options options = {.size = 3, .address = "tcp://localhost:1"};
  EXPECT(wb_connect(&options, &worker) == WB_INVALID && strstr(wb_error(), "sizeof"));
  options.size = 5000;
  EXPECT(wb_connect(&options, &worker) == WB_INVALID && strstr(wb_error(), "sizeof"));
  struct {
    wb_options known;
    const char* added;
  } later = {.known = options, .added = "set"};  // a program that was compiled with a later header
  later.known.size = sizeof later;
  EXPECT(wb_connect(&later.known, &worker) == WB_INVALID && strstr(wb_error(), "newer library"));
  later.added = NULL;
  EXPECT(wb_connect(&later.known, &worker) == WB_INVALID && strstr(wb_error(), "0 models"));
  options.size = offsetof(wb_options, apply);  // a program that was compiled with the first header
  EXPECT(wb_connect(&options, &worker) == WB_INVALID && strstr(wb_error(), "0 models"));
  options.size = sizeof options;
  EXPECT(wb_connect(&options, &worker) == WB_INVALID && strstr(wb_error(), "0 models"));
  const wb_wanted wanted = {.id = "line"};
  options.wanted = &wanted, options.wanted_count = 1, options.address = "nowhere";
  EXPECT(wb_connect(&options, &worker) == WB_INVALID && strstr(wb_error(), "nowhere"));
  options.address = "tcp://localhost:1", options.keys = "{}";
  EXPECT(wb_connect(&options, &worker) == WB_INVALID && strstr(wb_error(), "\"name\" is missing"));
  options.keys = "nowhere/w.json";
  EXPECT(wb_connect(&options, &worker) == WB_INVALID && strstr(wb_error(), "nowhere/w.json"));
  EXPECT(wb_connect(NULL, &worker) == WB_INVALID && worker == NULL);
  EXPECT(wb_receive(NULL, 0, NULL) == WB_INVALID && wb_fd(NULL) == -1);
  wb_close(NULL), wb_worker_free(NULL), wb_model_free(NULL), wb_read_end(NULL);
  wb_snapshot_free(NULL);
  size_t count = 1;
  (void)wb_snapshot_tensors(NULL, &count);
  EXPECT(count == 0);
}

static pthread_mutex_t noting = PTHREAD_MUTEX_INITIALIZER;

static void note_joined(const wb_event* event, void* user) {
  pthread_mutex_lock(&noting);
  if (strcmp(event->kind, "joined") == 0 && event->epoch > 0) *(int*)user += 1;
  pthread_mutex_unlock(&noting);
}

static bool readable(int descriptor, int timeout_ms) {
  struct pollfd item = {.fd = descriptor, .events = POLLIN};
  return poll(&item, 1, timeout_ms) == 1;
}

static atomic_int unwanted, unwanted_early;  // numbers of versions that are turned down

static int turn_down(const wb_offer* offer, char* text, size_t room, void* user) {
  (void)user;
  const bool line = strcmp(offer->model, "line") == 0;
  EXPECT(offer->epoch > 0 && offer->nbytes > 0 && line == (offer->snapshot == NULL));
  if (line) {
    EXPECT(all_bytes(&b, sizeof b, *(unsigned char*)w));  // it is there already
  } else {
    wb_tensor found;
    EXPECT(wb_snapshot_find(offer->snapshot, "w", &found) == WB_OK);
  }
  if ((int)offer->version != unwanted) return 0;
  snprintf(text, room, "no version %d here", unwanted);
  return -5;
}

static int turn_down_early(const wb_offer* offer, char* text, size_t room, void* user) {
  (void)text, (void)room, (void)user;
  EXPECT(offer->snapshot == NULL);
  return (int)offer->version == unwanted_early ? 7 : 0;
}

// Returns a worker of "line" in this memory, and of "free" in none.
static wb_worker* worker_of(const char* address, const wb_model* model, bool network, int* joined) {
  const wb_wanted wanted[] = {{.id = "line", .model = model}, {.id = "free"}};
  const wb_options options = {
      .size = sizeof options,
      .address = address,
      .name = "c",
      .wanted = wanted,
      .wanted_count = 2,
      .network_only = network,
      .on_event = note_joined,
      .user = joined,
      .apply = turn_down,
      .before_apply = turn_down_early,
      .apply_timeout_ms = LONG_MS,
  };
  wb_worker* worker = NULL;
  EXPECT(wb_connect(&options, &worker) == WB_OK);
  EXPECT(strcmp(wb_name(worker), "c") == 0 && wb_name(NULL)[0] == 0);
  uint64_t epoch = 0;
  EXPECT(wb_joined(worker, LONG_MS, &epoch) == WB_OK && epoch > 0);
  EXPECT(ask("client c weightbus-c") == 1);
  pthread_mutex_lock(&noting);
  EXPECT(*joined == 1);
  pthread_mutex_unlock(&noting);
  return worker;
}

static void versions_are_written_in_place(wb_worker* worker, wb_model* model) {
  wb_update update;
  const int descriptor = wb_fd(worker);
  EXPECT(!readable(descriptor, 0) && wb_receive(worker, 0, &update) == WB_NOTHING);
  ask("publish line 4x3 1");
  EXPECT(readable(descriptor, LONG_MS));
  EXPECT(wb_receive(worker, 0, &update) == WB_OK);
  EXPECT(strcmp(update.model, "line") == 0 && update.version == 1 && update.nbytes == 52);
  EXPECT(update.snapshot == NULL && update.epoch > 0 && update.code[0] == 0);
  EXPECT(!readable(descriptor, 0));
  wb_reading* reading = NULL;
  uint64_t epoch = 0, version = 0;
  EXPECT(wb_read(model, &reading, &epoch, &version) == WB_OK && version == 1);
  EXPECT(epoch == update.epoch && all_bytes(w, sizeof w, 1) && all_bytes(&b, sizeof b, 1));
  // Nothing is written while somebody reads.
  ask("publish line 4x3 2");
  EXPECT(readable(descriptor, LONG_MS));
  EXPECT(wb_receive(worker, 10, &update) == WB_NOTHING && all_bytes(w, sizeof w, 1));
  wb_read_end(reading);
  EXPECT(wb_receive(worker, LONG_MS, &update) == WB_OK && all_bytes(w, sizeof w, 2));
  while (ask("running c") != 2) (void)poll(NULL, 0, 10);
  wb_state state;
  EXPECT(wb_look(worker, "line", &state) == WB_OK && state.epoch == epoch && !state.torn);
  EXPECT(state.running_epoch == epoch && state.running_version == 2 && state.malformed == 0);
  EXPECT(wb_look(worker, NULL, &state) == WB_OK && state.running_version == 0);
  EXPECT(wb_look(worker, "nix", &state) == WB_INVALID && strstr(wb_error(), "nix"));
}

static void what_does_not_fit_is_turned_down(wb_worker* worker, wb_model* model) {
  wb_update update;
  ask("publish line 3x4 3");
  EXPECT(wb_receive(worker, LONG_MS, &update) == WB_REJECTED);
  EXPECT(strcmp(update.code, "layout-mismatch") == 0 && update.version == 3);
  EXPECT(strstr(wb_error(), "[3, 4] published, [4, 3] here") != NULL);
  wb_reading* reading = NULL;
  uint64_t version = 0;
  EXPECT(wb_read(model, &reading, NULL, &version) == WB_OK && version == 2);
  EXPECT(all_bytes(w, sizeof w, 2));
  wb_read_end(reading);
}

static void snapshots_stay_as_they_are(wb_worker* worker) {
  wb_update first, second, latest;
  EXPECT(wb_latest(worker, "free", &latest) == WB_NOTHING && latest.snapshot == NULL);
  ask("publish free 5 7");
  EXPECT(wb_receive(worker, LONG_MS, &first) == WB_OK && first.snapshot != NULL);
  ask("publish free 2x2 8");
  EXPECT(wb_receive(worker, LONG_MS, &second) == WB_OK && second.snapshot != NULL);
  size_t count = 0;
  const wb_tensor* tensors = wb_snapshot_tensors(first.snapshot, &count);
  EXPECT(count == 2);
  for (size_t i = 0; i < count; i++) {
    EXPECT(strlen(tensors[i].name) == tensors[i].name_bytes && !strcmp(tensors[i].dtype, "F32"));
    EXPECT(all_bytes(tensors[i].data, tensors[i].nbytes, 7));
  }
  wb_tensor found;
  EXPECT(wb_snapshot_find(second.snapshot, "w", &found) == WB_OK);
  EXPECT(found.rank == 2 && found.shape[0] == 2 && found.shape[1] == 2 && found.nbytes == 16);
  EXPECT(all_bytes(found.data, 16, 8));
  EXPECT(wb_snapshot_find(first.snapshot, "nix", &found) == WB_NOT_FOUND);
  EXPECT(strstr(wb_error(), "nix") != NULL);
  EXPECT(wb_latest(worker, "free", &latest) == WB_OK && latest.version == second.version);
  wb_snapshot_free(first.snapshot);
  EXPECT(wb_snapshot_find(latest.snapshot, "w", &found) == WB_OK && all_bytes(found.data, 16, 8));
  EXPECT(wb_latest(worker, "line", &first) == WB_NOTHING && strcmp(latest.model, "free") == 0);
  wb_snapshot_free(latest.snapshot);
  wb_snapshot_free(second.snapshot);
}

static void the_user_decides(wb_worker* worker, wb_model* model) {
  wb_update update;
  wb_reading* reading = NULL;
  uint64_t version = 0;
  atomic_store(&unwanted_early, 4);
  ask("publish line 4x3 4");
  EXPECT(wb_receive(worker, LONG_MS, &update) == WB_REJECTED);
  EXPECT(strcmp(update.code, "apply") == 0 && update.version == 4 && strstr(wb_error(), "code 7"));
  EXPECT(wb_read(model, &reading, NULL, &version) == WB_OK && version == 2);
  EXPECT(all_bytes(w, sizeof w, 2));
  wb_read_end(reading);
  atomic_store(&unwanted, 5);
  ask("publish line 4x3 5");
  for (int i = 0; i < 3; i++) {
    EXPECT(wb_receive(worker, LONG_MS, &update) == WB_REJECTED && update.version == 5);
    EXPECT(strstr(wb_error(), "no version 5 here") != NULL);
    EXPECT(wb_read(model, &reading, NULL, NULL) == WB_TORN);
  }
  ask("publish line 4x3 6");
  EXPECT(wb_receive(worker, LONG_MS, &update) == WB_OK && all_bytes(w, sizeof w, 6));
  while (ask("running c") != 6) (void)poll(NULL, 0, 10);
}

// Of "wide", which has "w" and "b" of F32, a worker that wants "w" alone, of F64.
static void a_part_is_enough_and_values_are_converted(const char* address) {
  double part[4] = {0};
  const uint64_t four[] = {4};
  const wb_tensor tensor = {"w", 0, "F64", four, 1, part, sizeof part};
  wb_model* model = NULL;
  EXPECT(wb_model_new(&tensor, 1, &model) == WB_OK);
  const wb_wanted wanted = {.id = "wide", .model = model};
  const wb_options options = {.size = sizeof options,
                              .address = address,
                              .wanted = &wanted,
                              .wanted_count = 1,
                              .partial = true,
                              .any_data_host = 1,
                              .cast = true};
  wb_worker* worker = NULL;
  EXPECT(wb_connect(&options, &worker) == WB_OK);
  ask("publish wide 4 64");
  wb_update update;
  EXPECT(wb_receive(worker, LONG_MS, &update) == WB_OK && update.nbytes == 20);
  float same;
  memset(&same, 64, sizeof same);
  EXPECT(part[0] == (double)same && part[3] == (double)same);
  wb_worker_free(worker);
  wb_model_free(model);
}

// Of 4 MiB, in memory of the library's: it stays where it is.
static void large_versions_change_places(const char* address, bool network) {
  const uint64_t shape[] = {1024, 1024};
  wb_tensor tensors[] = {{.name = "b", .dtype = "F32"},
                         {.name = "w", .dtype = "F32", .shape = shape, .rank = 2}};
  wb_model* model = NULL;
  tensors[0].dtype = "F33";
  EXPECT(wb_model_resident(tensors, 2, &model) == WB_INVALID && strstr(wb_error(), "F33"));
  tensors[0].dtype = "F32";
  EXPECT(wb_model_resident(tensors, 2, NULL) == WB_INVALID && tensors[1].data == NULL);
  const uint64_t vast[] = {(uint64_t)1 << 50, 64};
  tensors[1].shape = vast;
  EXPECT(wb_model_resident(tensors, 2, &model) == WB_SYSTEM && strstr(wb_error(), "\"w\" of F32"));
  tensors[1].shape = shape;
  EXPECT(wb_model_resident(tensors, 2, &model) == WB_OK && tensors[0].nbytes == 4);
  EXPECT(tensors[1].nbytes == 4 << 20 && all_bytes(tensors[1].data, tensors[1].nbytes, 0));
  const wb_wanted wanted = {.id = "large", .model = model};
  const wb_options options = {.size = sizeof options,
                              .address = address,
                              .name = "large",
                              .wanted = &wanted,
                              .wanted_count = 1,
                              .network_only = network};
  wb_worker* worker = NULL;
  EXPECT(wb_connect(&options, &worker) == WB_OK);
  for (unsigned char byte = 1; byte <= 3; byte++) {
    char publish[64];
    snprintf(publish, sizeof publish, "publish large 1024x1024 %d", byte);
    ask(publish);
    wb_update update;
    EXPECT(wb_receive(worker, LONG_MS, &update) == WB_OK && update.version == byte);
    EXPECT((update.digest[0] != 0) == network);
    for (size_t i = 0; i < 2; i++) {
      EXPECT(all_bytes(tensors[i].data, tensors[i].nbytes, byte));
    }
  }
  wb_worker_free(worker);
  wb_model_free(model);
}

static void* receive(void* worker) {
  wb_update update;
  EXPECT(wb_receive(worker, LONG_MS, &update) == WB_CLOSED && strstr(wb_error(), "close"));
  return NULL;
}

static void whoever_waits_learns_of_the_end(wb_worker* worker) {
  pthread_t waiting;
  EXPECT(pthread_create(&waiting, NULL, receive, worker) == 0);
  wb_close(worker);
  EXPECT(pthread_join(waiting, NULL) == 0);
  EXPECT(readable(wb_fd(worker), 0));
  wb_update update;
  EXPECT(wb_receive(worker, 0, &update) == WB_CLOSED);
}

// What stands in the files of those with keys: the pairs of libzmq's documentation.
#define PUBLISHERS_KEY "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
#define TAKERS_KEY "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
static const char kTakersKeys[] =
    "{\"name\": \"taker\", \"public\": \"" TAKERS_KEY
    "\", \"secret\": \"D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs\", \"publisher\": \"" PUBLISHERS_KEY
    "\"}";
static const char* takers_keys = "";
static const char* takers_step = NULL;  // what is said of what it takes

// Takes one version, as a worker of another process would.
static void* take_one(void* address) {
  const wb_wanted wanted = {.id = "line"};
  const wb_options options = {.size = sizeof options,
                              .address = address,
                              .name = "taker",
                              .wanted = &wanted,
                              .wanted_count = 1,
                              .keys = takers_keys};
  wb_worker* worker = NULL;
  wb_update update;
  EXPECT(wb_connect(&options, &worker) == WB_OK);
  EXPECT(wb_receive(worker, LONG_MS, &update) == WB_OK);
  size_t count;
  const wb_tensor* tensors = wb_snapshot_tensors(update.snapshot, &count);
  EXPECT(count == 2 && all_bytes(tensors[0].data, tensors[0].nbytes, 5));
  wb_metadata* metadata = NULL;
  EXPECT(wb_metadata_of(worker, "line", update.epoch, update.version + 1, &metadata) == WB_NOTHING);
  EXPECT(wb_metadata_of(worker, "line", update.epoch, update.version, &metadata) == WB_OK);
  EXPECT(wb_metadata_all(metadata, &count) != NULL && count == (takers_step ? 1 : 0));
  const char* step = wb_metadata_get(metadata, "step");
  EXPECT(takers_step ? step && strcmp(step, takers_step) == 0 : step == NULL);
  EXPECT(wb_metadata_get(metadata, "none") == NULL && wb_metadata_get(NULL, "step") == NULL);
  wb_metadata_free(metadata);
  wb_snapshot_free(update.snapshot);
  wb_worker_free(worker);
  return NULL;
}

static void count_events(const wb_event* event, void* user) {
  if (strcmp(event->kind, "joined") == 0) atomic_fetch_add((atomic_int*)user, 1);
}

static void a_trainer_in_c_publishes(void) {
  atomic_int joined = 0;
  wb_publisher_options options = {.size = sizeof options,
                                  .address = "tcp://127.0.0.1:0",
                                  .on_event = count_events,
                                  .user = &joined};
  wb_publisher* publisher = NULL;
  EXPECT(wb_bind(&options, &publisher) == WB_OK);
  char address[64];
  snprintf(address, sizeof address, "%s", wb_address(publisher));
  takers_step = "12";
  pthread_t taker;
  EXPECT(pthread_create(&taker, NULL, take_one, address) == 0);
  memset(w, 5, sizeof w);
  memset(&b, 5, sizeof b);
  const wb_tensor tensors[] = {
      {.name = "w", .dtype = "F32", .shape = kShape, .rank = 2, .data = w, .nbytes = sizeof w},
      {.name = "b", .dtype = "F32", .data = &b, .nbytes = sizeof b},
  };
  const wb_text said = {.name = "step", .text = takers_step};
  const wb_publish_options how = {.size = sizeof how,
                                  .expect = 1,
                                  .timeout_ms = LONG_MS,
                                  .metadata = &said,
                                  .metadata_count = 1};
  wb_receipt* receipt = NULL;
  EXPECT(wb_publish(publisher, "line", tensors, 2, &how, &receipt) == WB_OK);
  const wb_text unsaid = {.name = "", .text = "12"};
  const wb_publish_options nameless = {
      .size = sizeof nameless, .metadata = &unsaid, .metadata_count = 1};
  EXPECT(wb_publish(publisher, "line", tensors, 2, &nameless, NULL) == WB_INVALID);
  wb_published published;
  EXPECT(wb_receipt_look(receipt, &published) == WB_OK && published.version == 1);
  EXPECT(published.nbytes == sizeof w + sizeof b && strlen(published.digest) == 64);
  size_t count;
  const wb_outcome* workers = wb_receipt_workers(receipt, &count);
  EXPECT(count == 1 && strcmp(workers[0].worker, "taker") == 0);
  EXPECT(strcmp(workers[0].outcome, "applied") == 0 && atomic_load(&joined) == 1);
  wb_receipt_free(receipt);
  EXPECT(pthread_join(taker, NULL) == 0);
  EXPECT(wb_wait_for_workers(publisher, "line", 5, 1) == WB_NOTHING);

  const wb_publish_options hasty = {.size = sizeof hasty, .expect = 2, .timeout_ms = 50};
  EXPECT(wb_publish(publisher, "line", tensors, 2, &hasty, &receipt) == WB_UNACHIEVED);
  EXPECT(strstr(wb_error(), "2 of 2 workers are missing (worker taker has left") != NULL);
  EXPECT(wb_receipt_look(receipt, &published) == WB_OK && published.version == 2);
  wb_receipt_free(receipt);
  EXPECT(wb_publish(publisher, "line", tensors, 1, NULL, NULL) == WB_OK);
  EXPECT(wb_publish_safetensors(publisher, "line", "x", 1, NULL, NULL) == WB_INVALID);
  const char* nobody = "nobody";
  const wb_publish_options named = {.size = sizeof named, .workers = &nobody, .workers_count = 1};
  EXPECT(wb_publish(publisher, "line", tensors, 1, &named, NULL) == WB_NOT_FOUND);
  wb_publisher_close(publisher);
  EXPECT(wb_publish(publisher, "line", tensors, 2, NULL, &receipt) == WB_CLOSED && !receipt);
  wb_publisher_free(publisher);
  options.address = "tcp://0.0.0.0:0";
  EXPECT(wb_bind(&options, &publisher) == WB_INVALID && strstr(wb_error(), "insecure"));
}

static char at_large[64];
static uint8_t large_bytes[1 << 19];

// Takes versions until its publisher has gone for good.
static void* take_all(void* worker) {
  wb_update update;
  while (wb_receive(worker, LONG_MS, &update) == WB_OK) wb_snapshot_free(update.snapshot);
  return NULL;
}

static void a_trainer_in_c_sends_what_has_changed(void) {
  wb_publisher_options options = {.size = sizeof options,
                                  .address = "tcp://127.0.0.1:0",
                                  .bases = 1,
                                  .bases_bytes_max = 1 << 20};
  wb_publisher* publisher = NULL;
  EXPECT(wb_bind(&options, &publisher) == WB_OK);
  snprintf(at_large, sizeof at_large, "%s", wb_address(publisher));
  const wb_wanted wanted = {.id = "large"};
  const wb_options taking = {.size = sizeof taking,
                             .address = at_large,
                             .name = "taker",
                             .wanted = &wanted,
                             .wanted_count = 1};
  wb_worker* worker = NULL;
  EXPECT(wb_connect(&taking, &worker) == WB_OK);
  pthread_t taker;
  EXPECT(pthread_create(&taker, NULL, take_all, worker) == 0);
  EXPECT(wb_wait_for_workers(publisher, "large", 1, LONG_MS) == WB_OK);
  const uint64_t shape[] = {sizeof large_bytes / 2};
  const wb_tensor tensor = {.name = "w",
                            .dtype = "BF16",
                            .shape = shape,
                            .rank = 1,
                            .data = large_bytes,
                            .nbytes = sizeof large_bytes};
  wb_publish_options how = {.size = sizeof how, .expect = 1, .timeout_ms = LONG_MS, .encoding = 7};
  EXPECT(wb_publish(publisher, "large", &tensor, 1, &how, NULL) == WB_INVALID);
  const uint32_t encodings[] = {WB_ENCODING_DELTA, WB_ENCODING_DELTA, WB_ENCODING_DELTA_FLAT,
                                WB_ENCODING_RAW, WB_ENCODING_AUTO};
  for (size_t at = 0; at < 5; at++) {  // of the last there is nothing to build on
    how.encoding = encodings[at];
    large_bytes[1000 * at] ^= 1;
    wb_receipt* receipt = NULL;
    EXPECT(wb_publish(publisher, "large", &tensor, 1, &how, &receipt) == WB_OK);
    size_t count;
    const wb_outcome* its = wb_receipt_workers(receipt, &count);
    const int patched = at == 1 || at == 2;
    EXPECT(count == 1 && strcmp(its->encoding, patched ? "delta-1" : "raw") == 0);
    EXPECT(patched ? its->nbytes < 1000 : its->nbytes == sizeof large_bytes);
    wb_receipt_free(receipt);
  }
  wb_close(worker);
  EXPECT(pthread_join(taker, NULL) == 0);
  wb_worker_free(worker);
  wb_publisher_free(publisher);
}

static void write_file(const char* folder, const char* name, const char* json) {
  char path[512];
  EXPECT(snprintf(path, sizeof path, "%s/%s", folder, name) < (int)sizeof path);
  const int file = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
  EXPECT(file >= 0 && write(file, json, strlen(json)) == (ssize_t)strlen(json) && close(file) == 0);
}

static void a_trainer_in_c_with_keys_lets_nobody_else_in(void) {
  const char* folder = getenv("TMPDIR");  // serve.py makes it, and removes it
  EXPECT(folder != NULL);
  char allowed[512];
  EXPECT(snprintf(allowed, sizeof allowed, "%s/allowed", folder) < (int)sizeof allowed);
  EXPECT(mkdir(allowed, 0700) == 0);
  write_file(folder, "publisher.json",
             "{\"public\": \"" PUBLISHERS_KEY
             "\", \"secret\": \"JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6\"}");
  write_file(folder, "allowed/taker.json", "{\"name\": \"taker\", \"public\": \"" TAKERS_KEY "\"}");
  wb_publisher_options options = {
      .size = sizeof options, .address = "tcp://0.0.0.0:0", .keys = allowed, .rekey_ms = 50};
  wb_publisher* publisher = NULL;
  EXPECT(wb_bind(&options, &publisher) == WB_INVALID && strstr(wb_error(), "publisher.json"));
  options.keys = folder;
  EXPECT(wb_bind(&options, &publisher) == WB_OK);
  char address[64];
  snprintf(address, sizeof address, "tcp://127.0.0.1%s", strrchr(wb_address(publisher), ':'));
  takers_keys = kTakersKeys;
  takers_step = NULL;
  pthread_t taker;
  EXPECT(pthread_create(&taker, NULL, take_one, address) == 0);
  const wb_tensor tensors[] = {
      {.name = "w", .dtype = "F32", .shape = kShape, .rank = 2, .data = w, .nbytes = sizeof w},
      {.name = "b", .dtype = "F32", .data = &b, .nbytes = sizeof b},
  };
  const wb_publish_options how = {.size = sizeof how, .expect = 1, .timeout_ms = LONG_MS};
  EXPECT(wb_publish(publisher, "line", tensors, 2, &how, NULL) == WB_OK);
  EXPECT(pthread_join(taker, NULL) == 0);
  wb_publisher_free(publisher);
  takers_keys = "";
}

static double now_ms(void) {
  struct timespec now;
  EXPECT(clock_gettime(CLOCK_MONOTONIC, &now) == 0);
  return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

// Sleeps for as long as a call may take: where a busy host wakes that late, too, it is not the
// call.
static void* sleep_for_the_deadline(void* slept) {
  const struct timespec deadline = {.tv_nsec = DEADLINE_MS * 1000000L};
  double begun = now_ms();
  EXPECT(nanosleep(&deadline, NULL) == 0);
  *(double*)slept = now_ms() - begun;
  return NULL;
}

static const wb_publish_options kHasty = {
    .size = sizeof kHasty, .expect = 1, .timeout_ms = DEADLINE_MS};

static void publishes(const wb_publisher* publisher) {
  const wb_tensor tensor = {.name = "b", .dtype = "F32", .data = &b, .nbytes = sizeof b};
  EXPECT(wb_publish(publisher, "line", &tensor, 1, &kHasty, NULL) == WB_UNACHIEVED);
}

static void publishes_a_patch(const wb_publisher* publisher) {
  const wb_tensor tensor = {.name = "b", .dtype = "F32", .data = &b, .nbytes = sizeof b};
  wb_publish_options how = kHasty;
  how.encoding = WB_ENCODING_DELTA;
  EXPECT(wb_publish(publisher, "line", &tensor, 1, &how, NULL) == WB_UNACHIEVED);
}

static void publishes_a_file(const wb_publisher* publisher) {
  const char file[] = "\2\0\0\0\0\0\0\0{}";  // of no tensors
  EXPECT(wb_publish_safetensors(publisher, "line", file, sizeof file - 1, &kHasty, NULL) ==
         WB_UNACHIEVED);
}

static void waits_for_workers(const wb_publisher* publisher) {
  EXPECT(wb_wait_for_workers(publisher, "line", 2, DEADLINE_MS) == WB_NOTHING);
}

// Every call to a publisher that waits is back by its deadline, a tenth of it and a quarter of a
// second, whether nobody is there or a worker that takes nothing. Closing has none: it waits for
// less.
static void calls_are_back_in_time(bool asleep) {
  void (*const calls[])(const wb_publisher*) = {publishes, publishes_a_patch, publishes_a_file,
                                                waits_for_workers, wb_publisher_close};
  const wb_publisher_options options = {.size = sizeof options, .address = "tcp://127.0.0.1:0"};
  wb_publisher* publisher = NULL;
  EXPECT(wb_bind(&options, &publisher) == WB_OK);
  wb_worker* worker = NULL;
  wb_model* model = asleep ? line_model() : NULL;
  if (asleep) {
    const wb_wanted line = {.id = "line", .model = model};
    const wb_options how = {
        .size = sizeof how, .address = wb_address(publisher), .wanted = &line, .wanted_count = 1};
    EXPECT(wb_connect(&how, &worker) == WB_OK);
    EXPECT(wb_wait_for_workers(publisher, "line", 1, LONG_MS) == WB_OK);
  }
  for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
    double slept = 0;
    pthread_t control;
    EXPECT(pthread_create(&control, NULL, sleep_for_the_deadline, &slept) == 0);
    double begun = now_ms();
    calls[i](publisher);
    double took = now_ms() - begun;
    EXPECT(pthread_join(control, NULL) == 0);
    EXPECT(took <= 1.1 * slept + 250);
  }
  wb_publisher_free(publisher);
  wb_worker_free(worker);
  wb_model_free(model);
}

static bool says_step(const wb_worker* worker, uint64_t epoch, uint64_t version, const char* step) {
  wb_metadata* metadata = NULL;
  EXPECT(wb_metadata_of(worker, "line", epoch, version, &metadata) == WB_OK);
  const char* found = wb_metadata_get(metadata, "step");
  const bool same = found != NULL && strcmp(found, step) == 0;
  wb_metadata_free(metadata);
  return same;
}

// Its publisher, when it is started again, has the bytes as they were published for all, and not
// that something else was said of them to one.
static void what_runs_has_the_words_of_its_new_name(void) {
  char folder[256], address[256];
  snprintf(folder, sizeof folder, "%s/state", getenv("TMPDIR"));
  snprintf(address, sizeof address, "ipc://%s/again", getenv("TMPDIR"));
  const wb_publisher_options options = {.size = sizeof options,
                                        .address = address,
                                        .ping_ms = 200,
                                        .lost_after_ms = 5000,
                                        .state = folder};
  wb_publisher* publisher = NULL;
  EXPECT(wb_bind(&options, &publisher) == WB_OK);
  wb_model* model = line_model();
  const wb_wanted wanted = {.id = "line", .model = model};
  const wb_options its = {
      .size = sizeof its, .address = address, .wanted = &wanted, .wanted_count = 1};
  wb_worker* worker = NULL;
  EXPECT(wb_connect(&its, &worker) == WB_OK);
  EXPECT(wb_wait_for_workers(publisher, "line", 1, LONG_MS) == WB_OK);
  const float weights[13] = {0};
  const wb_tensor tensors[] = {{.name = "w",
                                .dtype = "F32",
                                .shape = kShape,
                                .rank = 2,
                                .data = (void*)weights,
                                .nbytes = sizeof w},
                               {.name = "b", .dtype = "F32", .data = (void*)weights, .nbytes = 4}};
  const char* name = wb_name(worker);
  wb_update update = {0};
  for (size_t some = 0; some < 2; some++) {
    const wb_text said = {.name = "step", .text = some ? "for one" : "for all"};
    const wb_publish_options how = {.size = sizeof how,
                                    .workers = &name,
                                    .workers_count = some,
                                    .wait = WB_WAIT_NOBODY,
                                    .metadata = &said,
                                    .metadata_count = 1};
    EXPECT(wb_publish(publisher, "line", tensors, 2, &how, NULL) == WB_OK);
    EXPECT(wb_receive(worker, LONG_MS, &update) == WB_OK);
    EXPECT(says_step(worker, update.epoch, update.version, said.text));
  }
  wb_publisher_free(publisher);
  EXPECT(wb_bind(&options, &publisher) == WB_OK);
  wb_state state = {.running_epoch = update.epoch};
  const struct timespec moment = {.tv_nsec = 1000000};
  for (const double until = now_ms() + LONG_MS; state.running_epoch == update.epoch;) {
    EXPECT(now_ms() < until && nanosleep(&moment, NULL) == 0);
    EXPECT(wb_look(worker, "line", &state) == WB_OK);
  }
  EXPECT(state.running_version == 1 && says_step(worker, state.running_epoch, 1, "for all"));
  EXPECT(says_step(worker, update.epoch, update.version, "for one"));  // as it was told
  wb_publisher_free(publisher);
  wb_worker_free(worker);
  wb_model_free(model);
}

// Counts what is open here and is not /dev/null, but for what was open before.
static int count_open(bool before[], bool note) {
  int count = 0;
  DIR* all = opendir("/proc/self/fd");
  EXPECT(all != NULL);
  for (struct dirent* each = readdir(all); each != NULL; each = readdir(all)) {
    char link[300], what[64] = "";
    int number = atoi(each->d_name);
    if (each->d_name[0] == '.' || number == dirfd(all) || number >= 4096) continue;
    snprintf(link, sizeof link, "/proc/self/fd/%s", each->d_name);
    const bool is_open = readlink(link, what, sizeof what - 1) > 0;
    EXPECT(is_open || errno == ENOENT);
    if (!is_open) continue;  // a thread has closed it since
    if (note) before[number] = true;
    if (!before[number] && strcmp(what, "/dev/null") != 0) count++;
  }
  closedir(all);
  return count;
}

// What a forked child keeps of a publisher and a worker; -1 if it can do anything with them.
static int kept_by_a_child(bool before[], wb_publisher* publisher, wb_worker* worker) {
  int said[2], count = -1;
  EXPECT(pipe(said) == 0);
  pid_t child = fork();
  if (child == 0) {
    EXPECT(close(said[0]) == 0);
    count = count_open(before, false) - 1;  // the pipe
    const wb_tensor tensor = {.name = "b", .dtype = "F32", .data = &b, .nbytes = sizeof b};
    wb_update update = {0};
    bool refused = wb_publish(publisher, "line", &tensor, 1, NULL, NULL) == WB_CLOSED &&
                   wb_receive(worker, LONG_MS, &update) == WB_CLOSED;
    wb_publisher_free(publisher);
    wb_worker_free(worker);
    if (!refused) count = -1;
    EXPECT(write(said[1], &count, sizeof count) == sizeof count);
    execl("/bin/true", "true", (char*)NULL);  // valgrind looks for leaks at an exit
    _exit(1);
  }
  EXPECT(child > 0 && close(said[1]) == 0);
  EXPECT(read(said[0], &count, sizeof count) == sizeof count);
  EXPECT(waitpid(child, NULL, 0) == child && close(said[0]) == 0);
  return count;
}

static void count_change_overs(const wb_event* event, void* user) {
  if (strcmp(event->kind, "changed-over") == 0 && strstr(event->text, " to tcp://"))
    atomic_fetch_add((atomic_int*)user, 1);
}

static void a_worker_changes_over_to_its_next_address(void) {
  wb_publisher_options options = {
      .size = sizeof options, .address = "tcp://127.0.0.1:0", .keys = ""};
  wb_publisher *first = NULL, *second = NULL;
  EXPECT(wb_bind(&options, &first) == WB_OK && wb_bind(&options, &second) == WB_OK);
  char list[128];
  snprintf(list, sizeof list, "%s,%s", wb_address(first), wb_address(second));
  atomic_int changes = 0;
  const wb_wanted wanted = {.id = "line"};
  const wb_options its = {.size = sizeof its,
                          .address = list,
                          .wanted = &wanted,
                          .wanted_count = 1,
                          .on_event = count_change_overs,
                          .user = &changes,
                          .keys = ""};
  wb_worker* worker = NULL;
  EXPECT(wb_connect(&its, &worker) == WB_OK);
  EXPECT(wb_wait_for_workers(first, "line", 1, LONG_MS) == WB_OK);
  EXPECT(strcmp(wb_worker_address(worker), wb_address(first)) == 0 && atomic_load(&changes) == 0);
  wb_publisher_free(first);
  EXPECT(wb_wait_for_workers(second, "line", 1, LONG_MS) == WB_OK);
  EXPECT(strcmp(wb_worker_address(worker), wb_address(second)) == 0 && atomic_load(&changes) > 0);
  EXPECT(wb_worker_address(NULL)[0] == 0);
  wb_worker_free(worker);
  wb_publisher_free(second);
}

static void a_forked_child_keeps_nothing(bool before[]) {
  wb_publisher_options options = {
      .size = sizeof options, .address = "tcp://127.0.0.1:0", .keys = ""};
  wb_publisher* publisher = NULL;
  EXPECT(wb_bind(&options, &publisher) == WB_OK);
  wb_model* model = line_model();
  const wb_wanted wanted = {.id = "line", .model = model};
  const wb_options its = {
      .size = sizeof its, .address = wb_address(publisher), .wanted = &wanted, .wanted_count = 1};
  wb_worker* worker = NULL;
  EXPECT(wb_connect(&its, &worker) == WB_OK);
  EXPECT(wb_wait_for_workers(publisher, "line", 1, LONG_MS) == WB_OK);
  EXPECT(count_open(before, false) > 10);
  // A connection that is being made this very moment a child may keep.
  const double until = now_ms() + LONG_MS;
  int count = kept_by_a_child(before, publisher, worker);
  while (count > 0 && now_ms() < until) count = kept_by_a_child(before, publisher, worker);
  EXPECT(count == 0);
  publishes(publisher);  // the parent goes on
  wb_publisher_free(publisher);
  wb_worker_free(worker);
  wb_model_free(model);
}

int main(int argc, char** argv) {
  EXPECT(argc > 1);
  static bool before[4096];  // noted first: threads of earlier tests may still be closing theirs
  EXPECT(count_open(before, true) == 0);
  what_cannot_be_is_said();
  a_trainer_in_c_publishes();
  a_trainer_in_c_sends_what_has_changed();
  a_trainer_in_c_with_keys_lets_nobody_else_in();
  what_runs_has_the_words_of_its_new_name();
  a_worker_changes_over_to_its_next_address();
  a_forked_child_keeps_nothing(before);
  calls_are_back_in_time(false);
  calls_are_back_in_time(true);
  int joined = 0;
  wb_model* model = line_model();
  wb_worker* worker = worker_of(argv[argc - 1], model, argc > 2, &joined);
  versions_are_written_in_place(worker, model);
  what_does_not_fit_is_turned_down(worker, model);
  the_user_decides(worker, model);
  snapshots_stay_as_they_are(worker);
  a_part_is_enough_and_values_are_converted(argv[argc - 1]);
  large_versions_change_places(argv[argc - 1], argc > 2);
  whoever_waits_learns_of_the_end(worker);
  wb_worker_free(worker);
  wb_model_free(model);
  printf("all well\n");
  return 0;
}
