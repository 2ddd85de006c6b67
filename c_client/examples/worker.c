// A worker that keeps the model "line" in memory of its own: worker ADDRESS[,ADDRESS...] [SECONDS]

#include <stdio.h>
#include <stdlib.h>
#include <weightbus.h>

static int fail(const char* what) {
  fprintf(stderr, "%s: %s\n", what, wb_error());
  return 1;
}

int main(int argc, char** argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: worker ADDRESS[,ADDRESS...] [SECONDS]\n");
    return 2;
  }
  float slope[3] = {0}, offset = 0;
  const uint64_t three[] = {3};
  const wb_tensor tensors[] = {
      {.name = "slope", .dtype = "F32", .shape = three, .rank = 1, .data = slope, .nbytes = 12},
      {.name = "offset", .dtype = "F32", .data = &offset, .nbytes = 4},
  };
  wb_model* line = NULL;
  if (wb_model_new(tensors, 2, &line)) return fail("the model");

  const wb_wanted wanted = {.id = "line", .model = line};
  const wb_options options = {
      .size = sizeof options, .address = argv[1], .wanted = &wanted, .wanted_count = 1};
  wb_worker* worker = NULL;
  if (wb_connect(&options, &worker)) return fail("the worker");

  const uint32_t patience_ms = (argc > 2 ? (uint32_t)atoi(argv[2]) : 30) * 1000;
  wb_update update;
  wb_code code;
  while ((code = wb_receive(worker, patience_ms, &update)) != WB_NOTHING) {
    if (code == WB_CLOSED) break;
    if (code != WB_OK) {
      fprintf(stderr, "%s\n", wb_error());  // the old version still runs
      continue;
    }
    wb_reading* reading = NULL;  // one version, whole, until it ends
    if (wb_read(line, &reading, NULL, NULL)) continue;
    printf("version %llu: %g %g %g, %g\n", (unsigned long long)update.version, slope[0], slope[1],
           slope[2], offset);
    fflush(stdout);
    wb_read_end(reading);
  }
  wb_worker_free(worker);
  wb_model_free(line);
  return 0;
}
