/* Computes CRC-32C (Castagnoli), alone or while copying, in one pass over the bytes, without Python.
 *
 * Theory of operation. A CRC is a remainder of polynomials over GF(2), so a block of bytes times x^D
 * modulo P can be added to the bytes D bits further on: this *folds* the block. Carry-less
 * multiplication folds 64 bits at a time. Several accumulators run over the data, and each is folded
 * past the others onto the next bytes. At the end, crc32q reduces them. (V. Gopal et al., "Fast CRC
 * Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009.) To copy and hash
 * takes hardly longer than to read, since both wait for memory.
 *
 * Each instruction set has one function `wb_fold_*`; `wb_choose` lists those that the processor
 * supports. If `to` is null, nothing is copied. Otherwise each byte of `from` is read only once, or
 * is hashed in `to` after the copy. So the CRC is always that of the bytes in `to`, even if a
 * trainer writes to `from` during the copy. `stream` makes the stores bypass the caches: for
 * blocks that are larger than the caches, and that this core will not read soon.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef uint32_t (*wb_fold)(uint32_t crc, uint8_t *to, const uint8_t *from, size_t n, int stream);

#define WB_POLYNOMIAL 0x82f63b78u /* 0x1EDC6F41, bits reversed */
#define WB_BLOCK 16384            /* bytes copied by memcpy, then hashed while in the cache */

/* For any processor: eight bytes at a time, with eight tables. */

static uint32_t wb_tables[8][256];

static void wb_make_tables(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? WB_POLYNOMIAL : 0);
        wb_tables[0][byte] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (int byte = 0; byte < 256; byte++)
            wb_tables[k][byte] = wb_tables[k - 1][byte] >> 8 ^ wb_tables[0][wb_tables[k - 1][byte] & 255];
}

static uint32_t wb_hash_portable(uint32_t crc, const uint8_t *p, size_t n) {
    for (; n >= 8; p += 8, n -= 8) {
        uint32_t low = crc ^ ((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
        crc = wb_tables[7][low & 255] ^ wb_tables[6][low >> 8 & 255] ^ wb_tables[5][low >> 16 & 255] ^
              wb_tables[4][low >> 24] ^ wb_tables[3][p[4]] ^ wb_tables[2][p[5]] ^ wb_tables[1][p[6]] ^
              wb_tables[0][p[7]];
    }
    for (; n; p++, n--) crc = crc >> 8 ^ wb_tables[0][(crc ^ *p) & 255];
    return crc;
}

/* Copy and hash block by block; each block is hashed in its destination. */
#define WB_BY_BLOCKS(hash)                                                                      \
    (void)stream;                                                                               \
    crc = ~crc;                                                                                 \
    while (n) {                                                                                 \
        size_t k = n < WB_BLOCK ? n : WB_BLOCK;                                                 \
        crc = hash(crc, to ? memcpy(to, from, k) : from, k);                                    \
        if (to) to += k;                                                                        \
        from += k, n -= k;                                                                      \
    }                                                                                           \
    return ~crc;

static uint32_t wb_fold_portable(uint32_t crc, uint8_t *to, const uint8_t *from, size_t n, int stream) {
    WB_BY_BLOCKS(wb_hash_portable)
}

#if defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <sys/auxv.h>
#define WB_HWCAP_CRC32 (1 << 7)

__attribute__((target("+crc"))) static uint32_t wb_hash_arm(uint32_t crc, const uint8_t *p, size_t n) {
    uint64_t word;
    for (; n >= 8; p += 8, n -= 8) {
        memcpy(&word, p, 8);
        crc = __builtin_aarch64_crc32cx(crc, word);
    }
    for (; n; p++, n--) crc = __builtin_aarch64_crc32cb(crc, *p);
    return crc;
}

static uint32_t wb_fold_arm(uint32_t crc, uint8_t *to, const uint8_t *from, size_t n, int stream) {
    WB_BY_BLOCKS(wb_hash_arm)
}
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#define WB_SSE42 "sse4.2"
#define WB_CLMUL "pclmul,sse4.2"
#define WB_VCLMUL "avx512f,avx512vl,vpclmulqdq,pclmul,sse4.2"
#define WB_FOR(levels) __attribute__((target(levels)))
#define WB_IN(levels) __attribute__((target(levels), always_inline)) static inline

/* x^(D+31) and x^(D-33) modulo P, bits reversed: they fold the low and high half over D bits. */
#define WB_FOLD_128_BYTES _mm_set_epi64x(0x0d3b6092, 0x6992cea2)
#define WB_FOLD_256_BYTES _mm512_broadcast_i32x4(_mm_set_epi64x(0xb9e02b86, 0xdcb17aa4))

WB_FOR(WB_SSE42) static uint32_t wb_hash_sse(uint32_t crc, const uint8_t *p, size_t n) {
    uint64_t wide = crc, word;
    for (; n >= 8; p += 8, n -= 8) {
        memcpy(&word, p, 8);
        wide = _mm_crc32_u64(wide, word);
    }
    for (; n; p++, n--) wide = _mm_crc32_u8((uint32_t)wide, *p);
    return (uint32_t)wide;
}

WB_FOR(WB_SSE42)
static uint32_t wb_fold_sse(uint32_t crc, uint8_t *to, const uint8_t *from, size_t n, int stream) {
    WB_BY_BLOCKS(wb_hash_sse)
}

enum wb_mode { WB_HASH, WB_COPY, WB_STREAM }; /* constants in calls, so branches are optimised away */

/* Copy and hash the first bytes, until `to` is aligned for streaming stores; return their number. */
WB_FOR(WB_SSE42)
static size_t wb_align(uint32_t *crc, uint8_t *to, const uint8_t *from, size_t n) {
    size_t k = -(uintptr_t)to & 63;
    if (k > n) k = n;
    *crc = wb_hash_sse(*crc, memcpy(to, from, k), k);
    return k;
}

WB_IN(WB_CLMUL) __m128i wb_put128(uint8_t *to, const uint8_t *from, size_t at, enum wb_mode mode) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)(from + at));
    if (mode == WB_COPY) _mm_storeu_si128((__m128i *)(to + at), bytes);
    if (mode == WB_STREAM) _mm_stream_si128((__m128i *)(to + at), bytes);
    return bytes;
}

WB_IN(WB_CLMUL) uint32_t wb_run128(uint32_t crc, uint8_t *to, const uint8_t *from, size_t n, enum wb_mode mode) {
    size_t at = mode == WB_STREAM ? wb_align(&crc, to, from, n) : 0;
    if (n - at >= 256) {
        const __m128i by = WB_FOLD_128_BYTES;
        __m128i sums[8];
        for (int i = 0; i < 8; i++) sums[i] = wb_put128(to, from, at + 16 * i, mode);
        sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128((int)crc));
        for (at += 128; n - at >= 128; at += 128)
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                __m128i low = _mm_clmulepi64_si128(sums[i], by, 0x00), high = _mm_clmulepi64_si128(sums[i], by, 0x11);
                sums[i] = _mm_xor_si128(wb_put128(to, from, at + 16 * i, mode), _mm_xor_si128(low, high));
            }
        crc = wb_hash_sse(0, (const uint8_t *)sums, sizeof sums);
    }
    const uint8_t *rest = mode == WB_HASH ? from + at : memcpy(to + at, from + at, n - at);
    if (mode == WB_STREAM) _mm_sfence();
    return wb_hash_sse(crc, rest, n - at);
}

WB_IN(WB_VCLMUL) __m512i wb_put512(uint8_t *to, const uint8_t *from, size_t at, enum wb_mode mode) {
    __m512i bytes = _mm512_loadu_si512(from + at);
    if (mode == WB_COPY) _mm512_storeu_si512(to + at, bytes);
    if (mode == WB_STREAM) _mm512_stream_si512((void *)(to + at), bytes);
    return bytes;
}

WB_IN(WB_VCLMUL) uint32_t wb_run512(uint32_t crc, uint8_t *to, const uint8_t *from, size_t n, enum wb_mode mode) {
    size_t at = mode == WB_STREAM ? wb_align(&crc, to, from, n) : 0;
    if (n - at >= 512) {
        const __m512i by = WB_FOLD_256_BYTES;
        __m512i sums[4];
        for (int i = 0; i < 4; i++) sums[i] = wb_put512(to, from, at + 64 * i, mode);
        sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
        for (at += 256; n - at >= 256; at += 256)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                __m512i low = _mm512_clmulepi64_epi128(sums[i], by, 0x00), high = _mm512_clmulepi64_epi128(sums[i], by, 0x11);
                sums[i] = _mm512_ternarylogic_epi64(low, high, wb_put512(to, from, at + 64 * i, mode), 0x96);
            }
        crc = wb_hash_sse(0, (const uint8_t *)sums, sizeof sums);
    }
    const uint8_t *rest = mode == WB_HASH ? from + at : memcpy(to + at, from + at, n - at);
    if (mode == WB_STREAM) _mm_sfence();
    return wb_hash_sse(crc, rest, n - at);
}

#define WB_EACH_MODE(run)                                                                       \
    if (!to) return ~run(~crc, to, from, n, WB_HASH);                                           \
    return stream ? ~run(~crc, to, from, n, WB_STREAM) : ~run(~crc, to, from, n, WB_COPY);

WB_FOR(WB_CLMUL)
static uint32_t wb_fold_clmul(uint32_t crc, uint8_t *to, const uint8_t *from, size_t n, int stream) {
    WB_EACH_MODE(wb_run128)
}

WB_FOR(WB_VCLMUL)
static uint32_t wb_fold_vclmul(uint32_t crc, uint8_t *to, const uint8_t *from, size_t n, int stream) {
    WB_EACH_MODE(wb_run512)
}
#endif

/* The instruction sets that this processor supports, the best first. */

struct wb_level {
    const char *name;
    wb_fold fold;
};

static struct wb_level wb_levels[5]; /* ends with an entry without a name */

static void wb_choose(void) {
    struct wb_level *level = wb_levels;
    wb_make_tables();
#if defined(__x86_64__)
    __builtin_cpu_init();
    int sse = __builtin_cpu_supports("sse4.2"), clmul = sse && __builtin_cpu_supports("pclmul");
    int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl");
    if (clmul && wide && __builtin_cpu_supports("vpclmulqdq"))
        *level++ = (struct wb_level){"vpclmulqdq", wb_fold_vclmul};
    if (clmul) *level++ = (struct wb_level){"pclmulqdq", wb_fold_clmul};
    if (sse) *level++ = (struct wb_level){"sse4.2", wb_fold_sse};
#elif defined(__aarch64__) && defined(__linux__)
    if (getauxval(AT_HWCAP) & WB_HWCAP_CRC32) *level++ = (struct wb_level){"armv8-crc", wb_fold_arm};
#endif
    *level++ = (struct wb_level){"portable", wb_fold_portable};
    *level = (struct wb_level){NULL, NULL};
}
