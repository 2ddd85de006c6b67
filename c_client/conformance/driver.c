// The driver of the conformance suite: a worker over the ABI that reports its events.
//
// Golden vectors test the inside of the library: the Rust client's driver answers them.

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <weightbus.h>

#define MODELS_MAX 64
#define TENSORS_MAX 1024
#define RANK_MAX 64
#define LOOK_MS 100  // how often to look whether to end
#define PIECE 65536

static const char kUsage[] =
    "usage: driver vectors DIR | driver worker ADDRESS --name NAME --models M1,M2 "
    "[--in-place SPEC.json] [--no-tensors] [--bytes-max N] [--network] [--seconds S] "
    "[--turn-down N,...] [--break N,...] [--apply-seconds S[:N,...]] [--apply-timeout S] "
    "[--partial] "
    "[--cast] [--keys FILE]";

static void die(const char* what, const char* why) {
  fprintf(stderr, "%s: %s\n", what, why);
  exit(2);
}

// What is registered of one model.
typedef struct {
  char* id;
  wb_tensor tensors[TENSORS_MAX];
  size_t count;
  wb_model* model;          // NULL: it comes as snapshots
  uint64_t epoch, version;  // of what was said to run
} Registered;

static Registered models[MODELS_MAX];
static size_t model_count;
static bool with_tensors = true;
static atomic_bool over;
static pthread_mutex_t out = PTHREAD_MUTEX_INITIALIZER;

static void terminate(int number) {
  (void)number;
  atomic_store(&over, true);
}

// What is said: one line of JSON for each event.

static void say_text(const char* text, size_t count) {
  putchar('"');
  for (size_t i = 0; i < count; i++) {
    const unsigned char c = (unsigned char)text[i];
    if (c == '"' || c == '\\') {
      printf("\\%c", c);
    } else if (c < 0x20) {
      printf("\\u%04x", c);
    } else {
      putchar(c);
    }
  }
  putchar('"');
}

static void say_field(const char* name, const char* text) {
  printf(",\"%s\":", name);
  say_text(text, strlen(text));
}

static void say_version(const char* model, uint64_t epoch, uint64_t version) {
  say_field("model", model);
  printf(",\"epoch\":%llu,\"version\":%llu", (unsigned long long)epoch,
         (unsigned long long)version);
}

static void begin(const char* event) {
  pthread_mutex_lock(&out);
  printf("{\"event\":\"%s\"", event);
}

static void end(void) {
  printf("}\n");
  fflush(stdout);
  pthread_mutex_unlock(&out);
}

static void on_event(const wb_event* event, void* user) {
  (void)user;
  if (strcmp(event->kind, "joined") == 0) {
    begin("joined");
    printf(",\"epoch\":%llu", (unsigned long long)event->epoch);
  } else if (strcmp(event->kind, "lost") == 0) {
    begin("lost");
  } else if (strcmp(event->kind, "refused") == 0) {
    begin("refused");
    say_field("code", event->code);
    say_field("text", event->text);
  } else if (strcmp(event->kind, "rejected") == 0) {
    begin("failed");
    say_version(event->model, event->epoch, event->version);
    say_field("code", event->code);
    say_field("text", event->text);
  } else {
    fprintf(stderr, "%s: %s %s\n", event->kind, event->code, event->text);
    return;
  }
  end();
}

// The user's functions.

#define NUMBERS_MAX 64

static unsigned long long turned_down[NUMBERS_MAX], broken[NUMBERS_MAX], slow[NUMBERS_MAX];
static double apply_seconds;

static void read_numbers(char* list, unsigned long long* numbers) {
  for (char* word = strtok(list, ","); word != NULL; word = strtok(NULL, ",")) {
    if (numbers[NUMBERS_MAX - 1] != 0) die(word, "too many versions");
    while (*numbers != 0) numbers++;
    *numbers = strtoull(word, NULL, 10);
  }
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static bool among(const unsigned long long* numbers, uint64_t version) {
  while (*numbers != 0 && *numbers != version) numbers++;
  return *numbers != 0;
}

static int verdict(bool no, const char* what, char* text, size_t room) {
  if (no) snprintf(text, room, "told to %s", what);
  return no;
}

static Registered* registered(const char* id) {
  for (size_t i = 0; i < model_count; i++) {
    if (strcmp(models[i].id, id) == 0) return &models[i];
  }
  die(id, "a model that nobody asked for");
  return NULL;
}

static int before_apply(const wb_offer* offer, char* text, size_t room, void* user) {
  (void)user;
  const bool no = registered(offer->model)->model && among(turned_down, offer->version);
  return verdict(no, "turn down", text, room);
}

static int apply(const wb_offer* offer, char* text, size_t room, void* user) {
  (void)user;
  const struct timespec moment = {.tv_nsec = 10000000};
  const double seconds = slow[0] == 0 || among(slow, offer->version) ? apply_seconds : 0;
  for (const double end = now() + seconds; now() < end && !atomic_load(&over);) {
    nanosleep(&moment, NULL);
  }
  if (registered(offer->model)->model)
    return verdict(among(broken, offer->version), "break", text, room);
  return verdict(among(turned_down, offer->version), "turn down", text, room);
}

static uint32_t crc_table[8][256];

static void make_crc_table(void) {
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (0x82F63B78u & (0u - (crc & 1)));
    crc_table[0][i] = crc;
  }
  for (uint32_t i = 0; i < 256; i++) {
    for (int k = 1; k < 8; k++) {
      const uint32_t before = crc_table[k - 1][i];
      crc_table[k][i] = (before >> 8) ^ crc_table[0][before & 0xff];
    }
  }
}

static uint32_t crc32c(const void* data, size_t count) {
  const unsigned char* at = data;
  uint32_t crc = 0xFFFFFFFFu;
  for (; count >= 8; count -= 8, at += 8) {
    uint32_t low, high;
    memcpy(&low, at, 4);
    memcpy(&high, at + 4, 4);
    low ^= crc;
    crc = crc_table[7][low & 0xff] ^ crc_table[6][low >> 8 & 0xff] ^
          crc_table[5][low >> 16 & 0xff] ^ crc_table[4][low >> 24] ^ crc_table[3][high & 0xff] ^
          crc_table[2][high >> 8 & 0xff] ^ crc_table[1][high >> 16 & 0xff] ^
          crc_table[0][high >> 24];
  }
  for (; count > 0; count--, at++) crc = (crc >> 8) ^ crc_table[0][(crc ^ *at) & 0xff];
  return ~crc;
}

static void say_tensors(const wb_tensor* tensors, size_t count) {
  printf(",\"tensors\":{");
  for (size_t i = 0; i < count; i++) {
    if (i > 0) putchar(',');
    say_text(tensors[i].name, tensors[i].name_bytes);
    printf(":%u", crc32c(tensors[i].data, tensors[i].nbytes));
  }
  putchar('}');
}

static void say_metadata(wb_metadata* metadata) {
  size_t count = 0;
  const wb_text* all = wb_metadata_all(metadata, &count);
  printf(",\"metadata\":{");
  for (size_t i = 0; i < count; i++) {
    if (i > 0) putchar(',');
    say_text(all[i].name, strlen(all[i].name));
    putchar(':');
    say_text(all[i].text, strlen(all[i].text));
    if (wb_metadata_get(metadata, all[i].name) != all[i].text) die("metadata", all[i].name);
  }
  putchar('}');
  wb_metadata_free(metadata);
}

static void say_applied(const wb_worker* worker, const wb_update* update) {
  Registered* its = registered(update->model);
  its->epoch = update->epoch, its->version = update->version;
  wb_metadata* metadata = NULL;
  if (wb_metadata_of(worker, its->id, its->epoch, its->version, &metadata) != WB_OK)
    die("metadata", wb_error());
  wb_reading* reading = NULL;
  if (with_tensors && its->model) wb_read(its->model, &reading, NULL, NULL);
  begin("applied");
  say_version(update->model, update->epoch, update->version);
  say_field("digest", update->digest);
  say_metadata(metadata);
  if (with_tensors && its->model) {
    say_tensors(its->tensors, its->count);
  } else if (with_tensors) {
    size_t count = 0;
    const wb_tensor* tensors = wb_snapshot_tensors(update->snapshot, &count);
    say_tensors(tensors, count);
  }
  end();
  wb_read_end(reading);
}

// Says what a model runs by another name than was said last.
static void look(const wb_worker* worker, Registered* its) {
  wb_state state;
  if (wb_look(worker, its->id, &state) != WB_OK) die(its->id, wb_error());
  const uint64_t epoch = state.running_epoch, version = state.running_version;
  if (version == 0 || (epoch == its->epoch && version == its->version)) return;
  wb_metadata* metadata = NULL;
  if (wb_metadata_of(worker, its->id, epoch, version, &metadata) != WB_OK) return;  // yet another
  its->epoch = epoch, its->version = version;
  begin("runs");
  say_version(its->id, epoch, version);
  say_metadata(metadata);
  end();
}

// Reads a model all the time: all bytes of a version are the same where this is asked for.
static void* look_for_torn(void* argument) {
  const Registered* its = argument;
  while (!atomic_load(&over)) {
    wb_reading* reading = NULL;
    if (wb_read(its->model, &reading, NULL, NULL) == WB_OK) {
      const unsigned char* first = NULL;
      bool same = true;
      for (size_t i = 0; i < its->count && same; i++) {
        const unsigned char* data = its->tensors[i].data;
        const size_t count = its->tensors[i].nbytes;
        if (count == 0) continue;
        if (first == NULL) first = data;
        same = *first == *data && memcmp(data, data + 1, count - 1) == 0;
      }
      if (!same) {
        begin("torn");
        say_field("model", its->id);
        end();
        atomic_store(&over, true);
      }
    }
    wb_read_end(reading);
    const struct timespec moment = {.tv_nsec = 100000};  // others want to write
    nanosleep(&moment, NULL);
  }
  return NULL;
}

// The memory that is registered: {"model": {"tensor": {"dtype": "F32", "shape": [4, 3]}}}.

static const char* at;  // what of the JSON is still to be read

static char next(void) {
  while (*at != 0 && strchr(" \t\r\n,:", *at)) at++;
  return *at;
}

static void take(char wanted) {
  if (next() != wanted) die("--in-place", at);
  at++;
}

static bool ended(char mark) {
  if (next() != mark) return false;
  at++;
  return true;
}

static char* text(void) {  // without escapes, which no specification has
  take('"');
  const char* quote = strchr(at, '"');
  if (quote == NULL) die("--in-place", at);
  char* copy = strndup(at, (size_t)(quote - at));
  at = quote + 1;
  return copy;
}

static void read_tensor(wb_tensor* tensor) {
  uint64_t* shape = calloc(RANK_MAX, sizeof *shape);
  tensor->name = text();
  tensor->name_bytes = strlen(tensor->name);
  for (take('{'); !ended('}');) {
    char* key = text();
    if (strcmp(key, "dtype") == 0) {
      tensor->dtype = text();
    } else {
      for (take('['); !ended(']');) {
        if (tensor->rank == RANK_MAX) die("--in-place", "too many dimensions");
        char* behind = NULL;
        shape[tensor->rank] = strtoull(at, &behind, 10);
        if (behind == at) die("--in-place", at);
        at = behind;
        tensor->rank++;
      }
    }
    free(key);
  }
  tensor->shape = shape;
}

static void read_model(Registered* its) {
  for (take('{'); !ended('}');) {
    if (its->count == TENSORS_MAX) die(its->id, "too many tensors");
    read_tensor(&its->tensors[its->count++]);
  }
  if (wb_model_resident(its->tensors, its->count, &its->model) != WB_OK) die(its->id, wb_error());
}

static char* content_of(const char* path) {
  FILE* file = fopen(path, "rb");
  if (file == NULL) die(path, strerror(errno));
  size_t count = 0;
  char* content = NULL;
  do {
    content = realloc(content, count + PIECE + 1);
    count += fread(content + count, 1, PIECE, file);
    content[count] = 0;
  } while (!feof(file) && !ferror(file));
  fclose(file);
  return content;
}

static void read_specification(const char* path) {
  char* content = content_of(path);
  at = content;
  for (take('{'); !ended('}');) {
    char* id = text();
    Registered* its = NULL;
    for (size_t i = 0; i < model_count; i++) {
      if (strcmp(models[i].id, id) == 0) its = &models[i];
    }
    if (its == NULL) die(id, "registered, but not among --models");
    read_model(its);
    free(id);
  }
  free(content);
}

static void split_models(char* list) {
  for (char* id = strtok(list, ","); id != NULL; id = strtok(NULL, ",")) {
    if (model_count == MODELS_MAX) die(id, "too many models");
    models[model_count++].id = id;
  }
}

// Applies whatever comes until SIGTERM, or until the time is over.
static void follow(const wb_options* options, double seconds) {
  const double deadline = now() + seconds;
  wb_worker* worker = NULL;
  if (wb_connect(options, &worker) != WB_OK) die("the worker", wb_error());
  pthread_t readers[MODELS_MAX];
  size_t reader_count = 0;
  for (size_t i = 0; i < model_count && with_tensors && !options->cast; i++) {
    if (models[i].model == NULL) continue;
    if (pthread_create(&readers[reader_count], NULL, look_for_torn, &models[i]) == 0)
      reader_count++;
  }
  while (!atomic_load(&over) && now() < deadline) {
    wb_update update;
    const wb_code code = wb_receive(worker, LOOK_MS, &update);
    if (code == WB_OK) {
      say_applied(worker, &update);
      wb_snapshot_free(update.snapshot);
    } else if (code == WB_NOTHING) {
      for (size_t i = 0; i < model_count; i++) look(worker, &models[i]);
    } else {
      fprintf(stderr, "%d: %s\n", (int)code, wb_error());  // `on_event` has said so
    }
  }
  atomic_store(&over, true);
  for (size_t i = 0; i < reader_count; i++) pthread_join(readers[i], NULL);
  wb_worker_free(worker);
}

int main(int argc, char** argv) {
  if (argc == 3 && strcmp(argv[1], "vectors") == 0) return 0;
  if (argc < 3 || strcmp(argv[1], "worker") != 0) die("driver", kUsage);
  signal(SIGTERM, terminate);
  make_crc_table();
  wb_options options = {.size = sizeof options, .address = argv[2], .on_event = on_event};
  const char* specification = NULL;
  double seconds = 120;
  for (int i = 3; i < argc; i++) {
    char* value = i + 1 < argc ? argv[i + 1] : NULL;
    if (strcmp(argv[i], "--no-tensors") == 0) {
      with_tensors = false;
      continue;
    }
    if (strcmp(argv[i], "--network") == 0) {
      options.network_only = true;
      continue;
    }
    if (strcmp(argv[i], "--partial") == 0) {
      options.partial = true;
      continue;
    }
    if (strcmp(argv[i], "--cast") == 0) {
      options.cast = true;
      continue;
    }
    if (value == NULL) die(argv[i], kUsage);
    i++;
    if (strcmp(argv[i - 1], "--name") == 0)
      options.name = value;
    else if (strcmp(argv[i - 1], "--keys") == 0)
      options.keys = value;
    else if (strcmp(argv[i - 1], "--models") == 0)
      split_models(value);
    else if (strcmp(argv[i - 1], "--in-place") == 0)
      specification = value;
    else if (strcmp(argv[i - 1], "--bytes-max") == 0)
      options.bytes_max = strtoull(value, NULL, 10);
    else if (strcmp(argv[i - 1], "--seconds") == 0)
      seconds = strtod(value, NULL);
    else if (strcmp(argv[i - 1], "--turn-down") == 0)
      read_numbers(value, turned_down);
    else if (strcmp(argv[i - 1], "--break") == 0)
      read_numbers(value, broken);
    else if (strcmp(argv[i - 1], "--apply-seconds") == 0) {
      char* which = NULL;
      apply_seconds = strtod(value, &which);
      if (*which == ':') read_numbers(which + 1, slow);
    } else if (strcmp(argv[i - 1], "--apply-timeout") == 0)
      options.apply_timeout_ms = (uint32_t)(1000 * strtod(value, NULL));
    else
      die(argv[i - 1], kUsage);
  }
  if (turned_down[0] != 0 || broken[0] != 0 || apply_seconds > 0) {
    options.before_apply = before_apply;
    options.apply = apply;
  }
  if (specification != NULL) read_specification(specification);
  wb_wanted wanted[MODELS_MAX];
  for (size_t i = 0; i < model_count; i++) wanted[i] = (wb_wanted){models[i].id, models[i].model};
  options.wanted = wanted, options.wanted_count = model_count;
  follow(&options, seconds);
  for (size_t i = 0; i < model_count; i++) wb_model_free(models[i].model);
  return 0;
}
