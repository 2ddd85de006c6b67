/* What codecs/_crc32c.h computes, held against one bit after the other: at every level of instructions that
 * the processor has, copied and not, streamed and not. No Python, so that it runs under sanitizers and
 * emulators as well. */
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

int main(void) {
    wb_choose();
    for (struct wb_level *level = wb_levels; level->name; level++) {
        if (level->fold(0, NULL, (const uint8_t *)"123456789", 9, 0) != 0xe3069283u) fail(level->name, 9, "not CRC-32C");
        for (int round = 0; round < ROUNDS; round++) {
            size_t n = round < 600 ? (size_t)round : number(round % 10 ? 3000 : SIZE_MAX_HERE);
            check(level, n, number(65), round & 1, round & 2);
        }
        printf("%s: as bit by bit\n", level->name);
    }
    return 0;
}
