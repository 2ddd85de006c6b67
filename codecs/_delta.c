/* The inner loops of encoding and decoding patches. Only `delta/kernels.py` calls these functions;
 * it also describes them. `delta/numpy_kernels.py` has the same functions in numpy. A step is the
 * change of an element from base to target; the steps of a class are adjacent. Every value that is
 * read from a body is checked against the sizes of the body and of the block. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "elements are read without a change of byte order; other processors use numpy_kernels.py"
#endif

#define CLASSES 16
#define FIELDS 5
#define WINDOW 64 /* elements scanned at once */
#define EVERY 31
#define WIDTH_MAX 19
#define RICE_MAX 18
#define GOLOMB_BITS_MAX 16
#define ELEMENTS_MAX ((size_t)1 << 18)
#define NEVER ((uint32_t)1 << 30) /* a gap larger than any block */

enum { PLAIN, INTEGER, BF16, F16 };
enum { COUNT, GAP, LARGE, LARGE_GAP, SIZE }; /* the fields of a table's row */

struct pair {
    const uint8_t *base, *target;
    size_t elements;
};

struct classes { /* the classes that have steps */
    int count, which[CLASSES];
    uint32_t begins[CLASSES];
};

struct counter { /* the progress of `find` in one class */
    int class_id;
    uint32_t left; /* elements of the class before the next one that differs */
    const uint32_t *gaps, *end;
    const int32_t *steps;
};

struct frame { /* a copy of the last window of a block, if that is shorter */
    uint8_t bytes[2 * WINDOW];
};

static inline uint16_t load16(const uint8_t *p) {
    uint16_t u;
    memcpy(&u, p, 2);
    return u;
}

/* Return the window of a block at `at`. A shorter last window is copied and padded with zeros. */
static inline const uint8_t *frame_of(struct frame *frame, const uint8_t *block, size_t at, size_t elements) {
    if (elements - at >= WINDOW) return block + 2 * at;
    memset(frame, 0, sizeof *frame);
    memcpy(frame, block + 2 * at, 2 * (elements - at));
    return frame->bytes;
}

static inline int32_t key(uint16_t u) { return u & 0x8000 ? 0xFFFF - u : u | 0x8000; }
static inline uint16_t element_of(int32_t key) { return (uint16_t)(key & 0x8000 ? key & 0x7FFF : 0xFFFF - key); }

static inline int class_of(uint16_t u, int kind) {
    if (kind == F16) return u >> 11 & 15;
    if (kind != BF16) return 0;
    int exponent = u >> 7 & 255, c = (exponent - 96) >> 1;
    return exponent < 96 ? 0 : c < 15 ? c : 15;
}

static inline size_t lowest(uint64_t bits) { return (size_t)__builtin_ctzll(bits); }
static inline int ones(uint64_t bits) { return __builtin_popcountll(bits); }
static inline int length(uint64_t value) { return value ? 64 - __builtin_clzll(value) : 0; }

/* For any processor. */

#define NAME(function) function##_portable
#define FOR
struct window_portable {
    uint64_t masks[CLASSES];
};

static inline void load_portable(struct window_portable *window, const uint8_t *p, int kind) {
    memset(window, 0, sizeof *window);
    for (int i = 0; i < WINDOW; i++) window->masks[class_of(load16(p + 2 * i), kind)] |= (uint64_t)1 << i;
}

static inline uint64_t mask_portable(const struct window_portable *window, int c) { return window->masks[c]; }

static inline uint64_t differ_portable(const uint8_t *p, const uint8_t *q) {
    uint64_t differ = 0;
    if (memcmp(p, q, 2 * WINDOW))
        for (int i = 0; i < WINDOW; i++) differ |= (uint64_t)(load16(p + 2 * i) != load16(q + 2 * i)) << i;
    return differ;
}

static inline size_t nth_portable(uint64_t mask, uint32_t n) {
    while (n--) mask &= mask - 1;
    return lowest(mask);
}
#include "_delta_scan.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX2 "avx2,bmi,bmi2,popcnt,lzcnt"
#define NAME(function) function##_avx2
#define FOR __attribute__((target(AVX2)))
#define IN __attribute__((target(AVX2), always_inline)) static inline
struct window_avx2 {
    __m256i classes[2];
};

IN __m256i load32_avx2(const uint8_t *p, int kind) {
    __m256i a = _mm256_loadu_si256((const __m256i *)p), b = _mm256_loadu_si256((const __m256i *)(p + 32));
    const __m256i byte = _mm256_set1_epi16(255);
    int by = kind == F16 ? 11 : 7;
    a = _mm256_and_si256(_mm256_srli_epi16(a, by), byte), b = _mm256_and_si256(_mm256_srli_epi16(b, by), byte);
    __m256i x = _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xD8);
    if (kind == F16) return _mm256_and_si256(x, _mm256_set1_epi8(15));
    x = _mm256_srli_epi16(_mm256_subs_epu8(x, _mm256_set1_epi8(96)), 1);
    return _mm256_min_epu8(_mm256_and_si256(x, _mm256_set1_epi8(127)), _mm256_set1_epi8(15));
}

IN void load_avx2(struct window_avx2 *window, const uint8_t *p, int kind) {
    window->classes[0] = load32_avx2(p, kind), window->classes[1] = load32_avx2(p + 64, kind);
}

IN uint64_t mask_avx2(const struct window_avx2 *window, int c) {
    __m256i wanted = _mm256_set1_epi8((char)c);
    uint32_t low = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(window->classes[0], wanted));
    return low | (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(window->classes[1], wanted)) << 32;
}

IN uint64_t same32_avx2(const uint8_t *p, const uint8_t *q) {
    __m256i a = _mm256_cmpeq_epi16(_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)q));
    __m256i b = _mm256_cmpeq_epi16(_mm256_loadu_si256((const __m256i *)(p + 32)), _mm256_loadu_si256((const __m256i *)(q + 32)));
    return (uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xD8));
}

IN uint64_t differ_avx2(const uint8_t *p, const uint8_t *q) { return ~(same32_avx2(p, q) | same32_avx2(p + 64, q + 64) << 32); }

IN size_t nth_avx2(uint64_t mask, uint32_t n) { return lowest(_pdep_u64((uint64_t)1 << n, mask)); }
#include "_delta_scan.h"
#undef IN

#define AVX512 "avx512f,avx512bw,avx512vl,bmi,bmi2,popcnt,lzcnt"
#define NAME(function) function##_avx512
#define FOR __attribute__((target(AVX512)))
#define IN __attribute__((target(AVX512), always_inline)) static inline
struct window_avx512 {
    __m512i classes;
};

IN void load_avx512(struct window_avx512 *window, const uint8_t *p, int kind) {
    __m512i a = _mm512_loadu_si512(p), b = _mm512_loadu_si512(p + 64);
    unsigned by = kind == F16 ? 11 : 7;
    __m256i low = _mm512_cvtepi16_epi8(_mm512_srli_epi16(a, by)), high = _mm512_cvtepi16_epi8(_mm512_srli_epi16(b, by));
    __m512i x = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    if (kind != F16) {
        x = _mm512_srli_epi16(_mm512_subs_epu8(x, _mm512_set1_epi8(96)), 1);
        x = _mm512_min_epu8(_mm512_and_si512(x, _mm512_set1_epi8(127)), _mm512_set1_epi8(15));
    }
    window->classes = _mm512_and_si512(x, _mm512_set1_epi8(15));
}

IN uint64_t mask_avx512(const struct window_avx512 *window, int c) {
    return _mm512_cmpeq_epi8_mask(window->classes, _mm512_set1_epi8((char)c));
}

IN uint64_t differ_avx512(const uint8_t *p, const uint8_t *q) {
    uint64_t low = _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(p), _mm512_loadu_si512(q));
    return low | (uint64_t)_mm512_cmpneq_epi16_mask(_mm512_loadu_si512(p + 64), _mm512_loadu_si512(q + 64)) << 32;
}

IN size_t nth_avx512(uint64_t mask, uint32_t n) { return lowest(_pdep_u64((uint64_t)1 << n, mask)); }
#include "_delta_scan.h"
#undef IN
#endif

struct level {
    const char *name;
    size_t (*compare)(const struct pair *, int, uint32_t *);
    void (*changes)(const struct pair *, int, const struct classes *, uint32_t *, int32_t *);
    size_t (*find)(const uint8_t *, size_t, int, struct counter *, int, uint32_t *, int32_t *);
};

static struct level choice[4], *level = choice; /* the best first; ends with an entry without a name */

static void choose(void) {
    struct level *next = choice;
#if defined(__x86_64__)
    __builtin_cpu_init();
    int wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
    if (wide && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        *next++ = (struct level){"avx512", compare_avx512, changes_avx512, find_avx512};
    if (wide) *next++ = (struct level){"avx2", compare_avx2, changes_avx2, find_avx2};
#endif
    *next++ = (struct level){"portable", compare_portable, changes_portable, find_portable};
    *next = (struct level){NULL, NULL, NULL, NULL};
}

/* Reading bits, the lowest bit of each byte first. */

struct reader {
    const uint8_t *data;
    size_t nbytes, at, end; /* `at` and `end` are offsets in bits */
    const char *fault;      /* an error text; NULL: no fault was found */
};

/* Return the next bits without consuming them: at least 57, padded with zeros. */
static inline uint64_t peek(const struct reader *reader) {
    size_t byte = reader->at / 8;
    uint64_t word = 0;
    if (byte + 8 <= reader->nbytes)
        memcpy(&word, reader->data + byte, 8);
    else if (byte < reader->nbytes)
        memcpy(&word, reader->data + byte, reader->nbytes - byte);
    return word >> reader->at % 8;
}

/* Return whether the body has so many more bits; set a fault if not. */
static int has_bits(struct reader *reader, uint64_t bits) {
    if (bits > reader->end - reader->at) reader->fault = "the body of a block ends early";
    return !reader->fault;
}

static uint32_t number(struct reader *reader, int width) {
    if (!has_bits(reader, (uint64_t)width)) return 0;
    uint32_t value = (uint32_t)(peek(reader) & (((uint64_t)1 << width) - 1));
    reader->at += (size_t)width;
    return value;
}

static inline uint32_t unary(struct reader *reader, uint32_t most) {
    uint32_t value = 0;
    for (;;) {
        uint64_t word = peek(reader) & (((uint64_t)1 << 57) - 1);
        if (word) {
            uint32_t zeros = (uint32_t)lowest(word);
            reader->at += zeros + 1, value += zeros;
            if (value > most) reader->fault = "a code leads past the end of a block";
            return value;
        }
        reader->at += 57, value += 57;
        if (reader->at >= reader->end || value > most) {
            reader->fault = reader->at < reader->end ? "a code leads past the end of a block" : "a unary code has no end";
            return 0;
        }
    }
}

/* Read Rice codes of gaps; set a fault if the gaps lead to position `most` or beyond. */
static int gaps_of(struct reader *reader, size_t count, int k, size_t most, uint32_t *gaps) {
    for (size_t i = 0; i < count && !reader->fault; i++) gaps[i] = unary(reader, (uint32_t)(most >> k)) << k;
    if (reader->fault || !has_bits(reader, (uint64_t)count * (uint64_t)k)) return -1;
    uint64_t next = 0;
    for (size_t i = 0; i < count; i++, reader->at += (size_t)k) {
        gaps[i] |= (uint32_t)(peek(reader) & (((uint64_t)1 << k) - 1));
        next += gaps[i] + (uint64_t)1;
    }
    if (next > most) reader->fault = "gaps lead past the end of a block";
    return reader->fault ? -1 : 0;
}

static int golomb_of(struct reader *reader, size_t count, int k, uint32_t *values) {
    uint64_t total = 0;
    for (size_t i = 0; i < count && !reader->fault; i++) {
        values[i] = unary(reader, (uint32_t)(GOLOMB_BITS_MAX - k)) + (uint32_t)k;
        total += values[i];
    }
    if (reader->fault || !has_bits(reader, total)) return -1;
    for (size_t i = 0; i < count; i++) {
        uint32_t width = values[i];
        values[i] = (uint32_t)(peek(reader) & (((uint64_t)1 << width) - 1)) + ((uint32_t)1 << width) - ((uint32_t)1 << k);
        reader->at += width;
    }
    return 0;
}

/* Read the gaps and the steps of a class; `spare` has room for 2 * count values. */
static int steps_of(struct reader *reader, const uint8_t *row, size_t count, size_t large, size_t elements,
                    uint32_t *gaps, int32_t *steps, uint32_t *spare) {
    if (gaps_of(reader, count, row[GAP], elements, gaps) < 0 || !has_bits(reader, count)) return -1;
    for (size_t i = 0; i < count; i++, reader->at++) steps[i] = reader->data[reader->at / 8] >> reader->at % 8 & 1 ? -1 : 1;
    if (row[LARGE] == EVERY) {
        if (golomb_of(reader, count, row[SIZE], spare) < 0) return -1;
        for (size_t i = 0; i < count; i++) steps[i] *= (int32_t)spare[i] + 1;
    } else if (row[LARGE]) {
        if (gaps_of(reader, large, row[LARGE_GAP], count, spare) < 0) return -1;
        if (golomb_of(reader, large, row[SIZE], spare + large) < 0) return -1;
        for (size_t i = 0, at = 0; i < large; i++, at++) {
            at += spare[i];
            steps[at] *= (int32_t)spare[large + i] + 2;
        }
    }
    return 0;
}

struct body { /* what `read_body` needs besides the bits, and where it writes its results */
    const uint8_t *table, *base;
    size_t classes, elements;
    int kind;
    uint32_t *positions;
    uint16_t *values;
};

static int count_steps(struct reader *reader, const struct body *body, uint32_t *counts, uint32_t *larges, size_t *total) {
    for (size_t c = 0; c < body->classes; c++) {
        const uint8_t *row = body->table + FIELDS * c;
        counts[c] = row[COUNT] ? number(reader, row[COUNT]) : 0;
        larges[c] = row[COUNT] && row[LARGE] && row[LARGE] != EVERY ? number(reader, row[LARGE]) : 0;
        *total += counts[c];
        if (larges[c] > counts[c]) reader->fault = "more large steps than steps";
    }
    if (*total > body->elements) reader->fault = "more steps than elements";
    if (!reader->fault) has_bits(reader, 2 * (uint64_t)*total);
    return reader->fault ? -1 : 0;
}

/* Convert gaps within classes to positions in the block; put the steps into the order of these. */
static void place(struct reader *reader, const struct body *body, const uint32_t *counts, const uint32_t *gaps,
                  const int32_t *steps, size_t total, int32_t *found) {
    if (body->classes == 1) {
        uint32_t next = 0;
        for (size_t i = 0; i < total; i++) body->positions[i] = next + gaps[i], next += gaps[i] + 1;
        memcpy(found, steps, total * sizeof *found);
        return;
    }
    struct counter counters[CLASSES];
    int used = 0;
    size_t begin = 0;
    for (int c = 0; c < CLASSES; begin += counts[c++])
        if (counts[c]) counters[used++] = (struct counter){c, gaps[begin], gaps + begin, gaps + begin + counts[c], steps + begin};
    if (level->find(body->base, body->elements, body->kind, counters, used, body->positions, found) != total)
        reader->fault = "the patch refers past the last element of a class: is it applied to the wrong base?";
}

/* Read a body; return the number of its steps. On failure, set a fault and return -1. */
static Py_ssize_t read_body(struct reader *reader, const struct body *body, size_t most) {
    uint32_t counts[CLASSES] = {0}, larges[CLASSES] = {0};
    size_t total = 0, begin = 0;
    if (count_steps(reader, body, counts, larges, &total) < 0) return -1;
    uint32_t *memory = malloc((5 * total + 1) * sizeof *memory), *gaps = memory, *spare = memory + 3 * total;
    int32_t *steps = (int32_t *)memory + total, *found = (int32_t *)memory + 2 * total;
    if (!memory || total > most) reader->fault = "no room for the steps of a block";
    for (size_t c = 0; c < body->classes && !reader->fault; begin += counts[c++])
        if (body->table[FIELDS * c])
            steps_of(reader, body->table + FIELDS * c, counts[c], larges[c], body->elements, gaps + begin, steps + begin, spare);
    if (!reader->fault && (reader->end - reader->at > 7 || peek(reader))) reader->fault = "bits are left in the body of a block";
    if (!reader->fault) place(reader, body, counts, gaps, steps, total, found);
    for (size_t i = 0; i < total && !reader->fault; i++) {
        int32_t placed = key(load16(body->base + 2 * body->positions[i])) + found[i];
        if (placed < 0 || placed > 0xFFFF) reader->fault = "a step leads beyond 16 bits: is the patch applied to the wrong base?";
        body->values[i] = element_of(placed);
    }
    free(memory);
    return reader->fault ? -1 : (Py_ssize_t)total;
}

/* Writing bits. If the output is too small, `full` is set and nothing more is written. */

struct writer {
    uint8_t *at, *end;
    uint64_t bits;
    int count, full;
};

static inline void put_bits(struct writer *writer, uint64_t value, int width) { /* width <= 32 */
    writer->bits |= value << writer->count;
    writer->count += width;
    if (writer->count < 32) return;
    if (writer->end - writer->at < 4) {
        writer->full = 1, writer->at = writer->end;
    } else {
        memcpy(writer->at, &writer->bits, 4);
        writer->at += 4;
    }
    writer->bits >>= 32, writer->count -= 32;
}

static void put_unary(struct writer *writer, uint32_t value) {
    for (; value > 31 && !writer->full; value -= 31) put_bits(writer, 0, 31);
    if (!writer->full) put_bits(writer, (uint64_t)1 << value, (int)value + 1);
}

static void put_rice(struct writer *writer, const uint32_t *values, size_t count, int k) {
    for (size_t i = 0; i < count && !writer->full; i++) put_unary(writer, values[i] >> k);
    for (size_t i = 0; k && i < count; i++) put_bits(writer, values[i] & (((uint32_t)1 << k) - 1), k);
}

static void put_golomb(struct writer *writer, const uint32_t *values, size_t count, int k) {
    for (size_t i = 0; i < count; i++) put_unary(writer, (uint32_t)(length(values[i] + ((uint64_t)1 << k)) - 1 - k));
    for (size_t i = 0; i < count; i++) {
        uint64_t shifted = values[i] + ((uint64_t)1 << k);
        int width = length(shifted) - 1;
        put_bits(writer, shifted & (((uint64_t)1 << width) - 1), width);
    }
}

static Py_ssize_t put_end(struct writer *writer, const uint8_t *begin) {
    for (; writer->count > 0; writer->count -= 8, writer->bits >>= 8) {
        if (writer->at == writer->end) return -1;
        *writer->at++ = (uint8_t)writer->bits;
    }
    return writer->full ? -1 : writer->at - begin;
}

static inline uint32_t size_of(int32_t step) { return (uint32_t)(step < 0 ? -step : step); }

/* Find the steps of a class in a block whose size is above 1; write the gaps between them, and
 * their sizes minus 2; return their number. */
static size_t larges_of(const int32_t *steps, size_t count, uint32_t *gaps, uint32_t *sizes) {
    size_t found = 0, next = 0;
    for (size_t i = 0; i < count; i++)
        if (size_of(steps[i]) > 1) {
            gaps[found] = (uint32_t)(i - next), next = i + 1;
            sizes[found++] = size_of(steps[i]) - 2;
        }
    return found;
}

static void write_class(struct writer *writer, const uint8_t *row, const uint32_t *gaps, const int32_t *steps, size_t count, uint32_t *spare) {
    put_rice(writer, gaps, count, row[GAP]);
    for (size_t i = 0; i < count; i++) put_bits(writer, steps[i] < 0, 1);
    if (row[LARGE] == EVERY) {
        for (size_t i = 0; i < count; i++) spare[i] = size_of(steps[i]) - 1;
        put_golomb(writer, spare, count, row[SIZE]);
    } else if (row[LARGE]) {
        size_t large = larges_of(steps, count, spare, spare + count);
        put_rice(writer, spare, large, row[LARGE_GAP]);
        put_golomb(writer, spare + count, large, row[SIZE]);
    }
}

/* Choosing codes for one class, over all blocks of a group. */

static int best_rice(const uint32_t *values, size_t count, uint64_t *cost) {
    uint64_t sum = 0, best = UINT64_MAX;
    for (size_t i = 0; i < count; i++) sum += values[i];
    *cost = 0;
    if (!count) return 0;
    int middle = length(sum * 11 / (16 * count)) - 1, chosen = 0;
    if (middle < 0) middle = 0;
    for (int k = middle > 0 ? middle - 1 : 0; k < middle + 2; k++) {
        uint64_t bits = count * (uint64_t)(1 + k);
        for (size_t i = 0; i < count; i++) bits += values[i] >> k;
        if (bits < best) best = bits, chosen = k;
    }
    *cost = best;
    return chosen;
}

/* Return the Exp-Golomb parameter with the fewest bits for the numbers `values[i] + 1` and `zeros`
 * zeros, estimated from their lengths. Set `cost` to the bits of the numbers `values[i] + more` and
 * of the zeros with this parameter. */
static int best_golomb(const uint32_t *values, size_t count, uint32_t more, size_t zeros, uint64_t *cost) {
    uint64_t lengths[18] = {zeros}, best = UINT64_MAX;
    int chosen = 0;
    for (size_t i = 0; i < count; i++) lengths[length(values[i] + (uint64_t)1)]++;
    for (int k = 0; k < 16; k++) {
        uint64_t bits = 0;
        for (int n = 0; n < 17; n++) bits += lengths[n] * (uint64_t)(1 + k + 2 * (n > k ? n - k : 0));
        if (bits < best) best = bits, chosen = k;
    }
    *cost = zeros * (uint64_t)(1 + chosen);
    for (size_t i = 0; i < count; i++)
        *cost += (uint64_t)(2 * length(values[i] + more + ((uint64_t)1 << chosen)) - 1 - chosen);
    return chosen;
}

struct group {
    const uint32_t *counts, *gaps;
    const int32_t *steps;
    size_t blocks, classes, total;
};

/* Choose the codes of a class; `spare` has room for 3 * total values. */
static void tune_class(const struct group *group, size_t c, uint8_t *row, uint32_t *spare) {
    uint32_t *gaps = spare, *large_gaps = spare + group->total, *sizes = large_gaps + group->total;
    size_t count = 0, larges = 0, at = 0;
    uint32_t most = 0, large_most = 0;
    for (size_t i = 0; i < group->blocks * group->classes; at += group->counts[i++]) {
        if (i % group->classes != c) continue;
        uint32_t here = group->counts[i];
        memcpy(gaps + count, group->gaps + at, here * sizeof *gaps);
        size_t found = larges_of(group->steps + at, here, large_gaps + larges, sizes + larges);
        count += here, larges += found;
        if (here > most) most = here;
        if (found > large_most) large_most = (uint32_t)found;
    }
    memset(row, 0, FIELDS);
    if (!count) return;
    uint64_t ignored, gaps_cost, large_cost, every_cost;
    int large_gap = best_rice(large_gaps, larges, &gaps_cost);
    int size = best_golomb(sizes, larges, 0, 0, &large_cost);
    int every = best_golomb(sizes, larges, 1, count - larges, &every_cost);
    row[COUNT] = (uint8_t)length(most);
    row[GAP] = (uint8_t)best_rice(gaps, count, &ignored);
    large_cost += gaps_cost + group->blocks * (uint64_t)length(large_most);
    row[LARGE] = large_cost <= every_cost ? (uint8_t)length(large_most) : EVERY;
    if (row[LARGE] == EVERY) row[SIZE] = (uint8_t)every;
    else if (row[LARGE]) row[LARGE_GAP] = (uint8_t)large_gap, row[SIZE] = (uint8_t)size;
}

/* The functions for Python. */

#define BUFFERS_MAX 5

/* Release the views; return `result`. */
static PyObject *done(Py_buffer *views, int count, PyObject *result) {
    while (count--) PyBuffer_Release(&views[count]);
    return result;
}

static PyObject *unfit(Py_buffer *views, int count) {
    PyErr_SetString(PyExc_TypeError, "the arguments do not fit together");
    return done(views, count, NULL);
}

static int pair_of(const Py_buffer *base, const Py_buffer *target, struct pair *pair) {
    *pair = (struct pair){base->buf, target->buf, (size_t)base->len / 2};
    return base->len == target->len && base->len % 2 == 0 && pair->elements <= ELEMENTS_MAX;
}

static size_t classes_of(int kind) { return kind == BF16 || kind == F16 ? CLASSES : 1; }

/* compare(base, target, kind, counts) -> int */
static PyObject *py_compare(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer v[3];
    struct pair pair;
    int kind;
    size_t total;
    if (!PyArg_ParseTuple(args, "y*y*iw*", &v[0], &v[1], &kind, &v[2])) return NULL;
    if (!pair_of(&v[0], &v[1], &pair) || (size_t)v[2].len != 4 * classes_of(kind)) return unfit(v, 3);
    Py_BEGIN_ALLOW_THREADS
    total = level->compare(&pair, kind, v[2].buf);
    Py_END_ALLOW_THREADS
    return done(v, 3, PyLong_FromSize_t(total));
}

/* changes(base, target, kind, counts, gaps, steps), with the counts that `compare` wrote */
static PyObject *py_changes(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer v[5];
    struct pair pair;
    struct classes there = {.count = 0};
    int kind;
    if (!PyArg_ParseTuple(args, "y*y*iy*w*w*", &v[0], &v[1], &kind, &v[2], &v[3], &v[4])) return NULL;
    if (!pair_of(&v[0], &v[1], &pair) || (size_t)v[2].len != 4 * classes_of(kind)) return unfit(v, 5);
    const uint32_t *counts = v[2].buf;
    size_t total = 0;
    for (size_t c = 0; c < classes_of(kind); total += counts[c++]) {
        there.begins[c] = (uint32_t)total;
        if (counts[c]) there.which[there.count++] = (int)c;
    }
    if ((size_t)v[3].len != 4 * total || v[4].len != v[3].len) return unfit(v, 5);
    Py_BEGIN_ALLOW_THREADS
    if (there.count) level->changes(&pair, kind, &there, v[3].buf, v[4].buf);
    Py_END_ALLOW_THREADS
    return done(v, 5, Py_NewRef(Py_None));
}

/* tune(counts, gaps, steps, table) */
static PyObject *py_tune(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer v[4];
    if (!PyArg_ParseTuple(args, "y*y*y*w*", &v[0], &v[1], &v[2], &v[3])) return NULL;
    struct group group = {v[0].buf, v[1].buf, v[2].buf, 0, (size_t)v[3].len / FIELDS, (size_t)v[1].len / 4};
    size_t total = 0, cells = (size_t)v[0].len / 4;
    for (size_t i = 0; i < cells; i++) total += group.counts[i];
    if (!group.classes || cells % group.classes || total != group.total || v[2].len != v[1].len) return unfit(v, 4);
    group.blocks = cells / group.classes;
    uint32_t *spare = malloc((3 * total + 1) * sizeof *spare);
    if (!spare) return done(v, 4, PyErr_NoMemory());
    Py_BEGIN_ALLOW_THREADS
    for (size_t c = 0; c < group.classes; c++) tune_class(&group, c, (uint8_t *)v[3].buf + FIELDS * c, spare);
    Py_END_ALLOW_THREADS
    free(spare);
    return done(v, 4, Py_NewRef(Py_None));
}

/* write(counts, gaps, steps, table, room) -> size of the body; -1 if `room` is too small */
static PyObject *py_write(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer v[5];
    if (!PyArg_ParseTuple(args, "y*y*y*y*w*", &v[0], &v[1], &v[2], &v[3], &v[4])) return NULL;
    const uint32_t *counts = v[0].buf, *gaps = v[1].buf;
    const int32_t *steps = v[2].buf;
    const uint8_t *table = v[3].buf;
    size_t classes = (size_t)v[0].len / 4, total = 0;
    for (size_t c = 0; c < classes; c++) total += counts[c];
    if ((size_t)v[3].len != FIELDS * classes || (size_t)v[1].len != 4 * total || v[2].len != v[1].len) return unfit(v, 5);
    uint32_t *spare = malloc((2 * total + 1) * sizeof *spare);
    if (!spare) return done(v, 5, PyErr_NoMemory());
    struct writer writer = {v[4].buf, (uint8_t *)v[4].buf + v[4].len, 0, 0, 0};
    Py_ssize_t nbytes;
    Py_BEGIN_ALLOW_THREADS
    size_t begin = 0;
    for (size_t c = 0; c < classes; begin += counts[c++]) {
        const uint8_t *row = table + FIELDS * c;
        if (row[COUNT]) put_bits(&writer, counts[c], row[COUNT]);
        if (row[COUNT] && row[LARGE] && row[LARGE] != EVERY)
            put_bits(&writer, larges_of(steps + begin, counts[c], spare, spare + counts[c]), row[LARGE]);
    }
    begin = 0;
    for (size_t c = 0; c < classes && !writer.full; begin += counts[c++])
        if (table[FIELDS * c]) write_class(&writer, table + FIELDS * c, gaps + begin, steps + begin, counts[c], spare);
    nbytes = put_end(&writer, v[4].buf);
    Py_END_ALLOW_THREADS
    free(spare);
    return done(v, 5, PyLong_FromSsize_t(nbytes));
}

static int is_valid_table(const struct body *body) {
    for (size_t c = 0; c < body->classes; c++) {
        const uint8_t *row = body->table + FIELDS * c;
        if (row[COUNT] > WIDTH_MAX || row[GAP] > RICE_MAX || row[LARGE_GAP] > RICE_MAX || row[SIZE] > 15) return 0;
        if (row[LARGE] > WIDTH_MAX && row[LARGE] != EVERY) return 0;
    }
    return body->classes == 1 || (body->classes == CLASSES && classes_of(body->kind) == CLASSES);
}

/* read(body, table, base, kind, positions, values) -> int */
static PyObject *py_read(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer v[5];
    int kind;
    if (!PyArg_ParseTuple(args, "y*y*y*iw*w*", &v[0], &v[1], &v[2], &kind, &v[3], &v[4])) return NULL;
    struct reader reader = {v[0].buf, (size_t)v[0].len, 0, 8 * (size_t)v[0].len, NULL};
    struct body body = {v[1].buf, v[2].buf, (size_t)v[1].len / FIELDS, (size_t)v[2].len / 2, kind, v[3].buf, v[4].buf};
    size_t most = (size_t)v[3].len / 4;
    if (!is_valid_table(&body) || body.elements > ELEMENTS_MAX || (size_t)v[4].len / 2 < most) return unfit(v, 5);
    Py_ssize_t count;
    Py_BEGIN_ALLOW_THREADS
    count = read_body(&reader, &body, most);
    Py_END_ALLOW_THREADS
    if (count < 0) PyErr_SetString(PyExc_ValueError, reader.fault);
    return done(v, 5, count < 0 ? NULL : PyLong_FromSsize_t(count));
}

/* levels() -> the names of the instruction sets that this processor supports, the best first */
static PyObject *py_levels(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    PyObject *names = PyList_New(0);
    for (struct level *each = choice; names && each->name; each++) {
        PyObject *name = PyUnicode_FromString(each->name);
        if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

/* use(name): select an instruction set of `levels`; for tests and benchmarks */
static PyObject *py_use(PyObject *module, PyObject *wanted) {
    (void)module;
    const char *name = PyUnicode_AsUTF8(wanted);
    if (!name) return NULL;
    for (struct level *each = choice; each->name; each++)
        if (!strcmp(each->name, name)) {
            level = each;
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "this processor has no %s", name);
}

static PyMethodDef functions[] = {
    {"compare", py_compare, METH_VARARGS, NULL},
    {"changes", py_changes, METH_VARARGS, NULL},
    {"tune", py_tune, METH_VARARGS, NULL},
    {"write", py_write, METH_VARARGS, NULL},
    {"read", py_read, METH_VARARGS, NULL},
    {"levels", py_levels, METH_NOARGS, NULL},
    {"use", py_use, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "weightbus.codecs._delta", .m_size = -1, .m_methods = functions,
};

PyMODINIT_FUNC PyInit__delta(void) {
    choose();
    return PyModule_Create(&definition);
}
