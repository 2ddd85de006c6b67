/* What codecs/_crc32c.h computes, held against one bit after the other: at every level of instructions that
 * the processor has, copied and not, streamed and not; and of memory that is written meanwhile. No Python,
 * so that it runs under sanitizers and emulators as well. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "../../codecs/_crc32c.h"

#define SIZE_MAX_HERE 70000
#define ROUNDS 3000
#define AROUND 64 /* bytes beside what is written, which must stay as they are */

static uint64_t state = 88172645463325252u;

static uint64_t number(uint64_t below) { /* xorshift64: the same on every machine */
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state % below;
}

static uint32_t bit_by_bit(uint32_t crc, const uint8_t *p, size_t n) {
    for (crc = ~crc; n; p++, n--) {
        crc ^= *p;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? WB_POLYNOMIAL : 0);
    }
    return ~crc;
}

static void fail(const char *level, size_t n, const char *what) {
    fprintf(stderr, "%s: %zu bytes: %s\n", level, n, what);
    exit(1);
}

/* Memory of exactly the size, so that a sanitizer sees every byte read beyond it. */
static void check(const struct wb_level *level, size_t n, size_t offset, int copy, int stream) {
    uint8_t *from = malloc(n + offset), *room = malloc(n + offset + 2 * AROUND), *to = room + AROUND + offset;
    for (size_t i = 0; i < n; i++) from[offset + i] = (uint8_t)number(256);
    memset(room, 7, n + offset + 2 * AROUND);
    uint32_t start = (uint32_t)number(1ull << 32), expected = bit_by_bit(start, from + offset, n);
    if (level->fold(start, copy ? to : NULL, from + offset, n, stream) != expected) fail(level->name, n, "another checksum");
    if (copy && memcmp(to, from + offset, n)) fail(level->name, n, "not what was to be copied");
    for (size_t i = 0; i < AROUND; i++)
        if (to[-1 - (long)i] != 7 || to[n + i] != 7) fail(level->name, n, "written beside its place");
    free(from), free(room);
}

static volatile uint64_t live[512]; /* written all the time, as a trainer's weights are */

static void *train(void *nothing) {
    for (;;)
        for (size_t i = 0; i < sizeof live / sizeof *live; i++) live[i] += 0x0101010101010101u;
    return nothing;
}

/* What was hashed is what lies in the copy, so that whoever has that can verify it. */
static void check_live(const struct wb_level *level, int stream) {
    static uint8_t to[sizeof live + 64];
    for (int round = 0; round < 20 * ROUNDS; round++) {
        size_t n = number(round % 10 ? 400 : sizeof live), offset = number(64);
        uint32_t crc = level->fold(0, to + offset, (const uint8_t *)live, n, stream);
        if (level->fold(0, NULL, to + offset, n, 0) != crc) fail(level->name, n, "not the checksum of what was copied");
    }
}

int main(void) {
    pthread_t trainer;
    wb_choose();
    if (pthread_create(&trainer, NULL, train, NULL)) return 1;
    for (struct wb_level *level = wb_levels; level->name; level++) {
        if (level->fold(0, NULL, (const uint8_t *)"123456789", 9, 0) != 0xe3069283u) fail(level->name, 9, "not CRC-32C");
        for (int round = 0; round < ROUNDS; round++) {
            size_t n = round < 600 ? (size_t)round : number(round % 10 ? 3000 : SIZE_MAX_HERE);
            check(level, n, number(65), round & 1, round & 2);
        }
        check_live(level, 0), check_live(level, 1);
        printf("%s: as bit by bit\n", level->name);
    }
    return 0;
}
