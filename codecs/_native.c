/* The C helper, for loops that are too slow in Python: checksums while copying, many small copies
 * in one call, the inspection of many tensors, and the exchange of pages. Only `native.py` calls
 * the helper; it describes the functions, and has the same functions in Python. Nothing in this
 * file depends on the protocol. */
#define PY_SSIZE_T_CLEAN
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <Python.h>
#include <errno.h>
#include <stdio.h>
#include <sys/mman.h>

#include "_crc32c.h"

#define LOCKED_BYTES 32768 /* below this size, hashing keeps the GIL, and copies use the caches */
#define AHEAD 4            /* how many tensors ahead of the current one memory is prefetched */

static wb_fold fold;

/* The buffers of a call's arguments, which are released together. */
struct views {
    Py_buffer at[5];
    int count;
};

static int open_view(struct views *views, PyObject *object, int flags) {
    if (PyObject_GetBuffer(object, &views->at[views->count], flags) < 0) return -1;
    views->count++;
    return 0;
}

static PyObject *close_views(struct views *views, PyObject *result) {
    while (views->count) PyBuffer_Release(&views->at[--views->count]);
    return result;
}

/* Return 0 if the number of arguments is right; else raise TypeError and return -1. */
static int wrong_number(Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted) return 0;
    PyErr_Format(PyExc_TypeError, "%zd arguments were given, not %zd", given, wanted);
    return -1;
}

/* crc32c(data, value) -> int */
static PyObject *crc32c(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count < 1 || count > 2) return wrong_number(count, 2), NULL;
    uint32_t crc = count > 1 ? (uint32_t)PyLong_AsUnsignedLongMask(args[1]) : 0;
    Py_buffer data;
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE) < 0) return NULL;
    if (data.len < LOCKED_BYTES) {
        crc = fold(crc, NULL, data.buf, (size_t)data.len, 0);
    } else {
        Py_BEGIN_ALLOW_THREADS
        crc = fold(crc, NULL, data.buf, (size_t)data.len, 0);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

/* copy_crc32c(to, from, value, stream) -> int */
static PyObject *copy_crc32c(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    struct views views = {.count = 0};
    if (wrong_number(count, 4)) return NULL;
    uint32_t crc = (uint32_t)PyLong_AsUnsignedLongMask(args[2]);
    int stream = PyObject_IsTrue(args[3]);
    if (PyErr_Occurred() || open_view(&views, args[0], PyBUF_WRITABLE) < 0 || open_view(&views, args[1], PyBUF_SIMPLE) < 0)
        return close_views(&views, NULL);
    Py_buffer *to = &views.at[0], *from = &views.at[1];
    if (to->len != from->len) {
        PyErr_Format(PyExc_ValueError, "%zd bytes do not fit %zd", from->len, to->len);
        return close_views(&views, NULL);
    }
    Py_BEGIN_ALLOW_THREADS
    crc = fold(crc, to->buf, from->buf, (size_t)to->len, stream);
    Py_END_ALLOW_THREADS
    return close_views(&views, PyLong_FromUnsignedLong(crc));
}

static int open_addresses(struct views *views, PyObject *const *args, int count) {
    for (int i = 0; i < count; i++)
        if (open_view(views, args[i], PyBUF_SIMPLE) < 0) return -1;
    for (int i = 1; i < count; i++)
        if (views->at[i].len != views->at[0].len || views->at[i].len % 8) {
            PyErr_SetString(PyExc_ValueError, "addresses and sizes must be equally many integers of 64 bits");
            return -1;
        }
    return 0;
}

/* No memory is mapped below this address (vm.mmap_min_addr): a lower one is null plus an offset. */
#define FIRST_ADDRESS 4096

static int is_unmapped(uint64_t address, uint64_t size) {
    return (size != 0) & ((address < FIRST_ADDRESS) | (address + size < address));
}

/* Raise ValueError if an address cannot be valid: a tensor may have been freed, or have no memory. */
static int check_addresses(const uint64_t *addresses, const uint64_t *sizes, size_t count) {
    int wrong = 0;
    for (size_t i = 0; i < count; i++) wrong |= is_unmapped(addresses[i], sizes[i]);
    for (size_t i = 0; wrong && i < count; i++)
        if (is_unmapped(addresses[i], sizes[i])) {
            PyErr_Format(PyExc_ValueError, "%llu bytes at address %llu: there is no memory, so a tensor has been freed, or never had any",
                         (unsigned long long)sizes[i], (unsigned long long)addresses[i]);
            return -1;
        }
    return 0;
}

static void fetch_ahead(const uint64_t *addresses, size_t index, size_t count) {
    if (index + AHEAD >= count) return;
    const char *next = (const char *)(uintptr_t)addresses[index + AHEAD];
    for (int line = 0; line < 3; line++) __builtin_prefetch(next + 64 * line);
}

/* Copy with streaming stores. These do not first read the destination, so a third of the memory
 * traffic is saved. */
static void copy_streaming(uint8_t *to, const uint8_t *from, size_t n) {
#if defined(__x86_64__)
    size_t at = -(uintptr_t)to & 15;
    memcpy(to, from, at);
    for (; n - at >= 256; at += 256) {
        for (size_t i = at; i < at + 256; i += 64) __builtin_prefetch(from + i + 2048);
        for (size_t i = at; i < at + 256; i += 16)
            _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
    }
    _mm_sfence();
    to += at, from += at, n -= at;
#endif
    memcpy(to, from, n);
}

/* copies(to, from, sizes, stream) */
static PyObject *copies(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    struct views views = {.count = 0};
    int stream = given == 4 ? PyObject_IsTrue(args[3]) : 0;
    if ((given != 3 && wrong_number(given, 4)) || stream < 0 || open_addresses(&views, args, 3) < 0) return close_views(&views, NULL);
    const uint64_t *to = views.at[0].buf, *from = views.at[1].buf, *sizes = views.at[2].buf;
    size_t count = (size_t)views.at[0].len / 8;
    if (check_addresses(to, sizes, count) < 0 || check_addresses(from, sizes, count) < 0) return close_views(&views, NULL);
    Py_BEGIN_ALLOW_THREADS
    for (size_t i = 0; i < count; i++) {
        fetch_ahead(from, i, count);
        if (stream && sizes[i] >= LOCKED_BYTES)
            copy_streaming((uint8_t *)(uintptr_t)to[i], (const uint8_t *)(uintptr_t)from[i], sizes[i]);
        else if (sizes[i]) /* an empty tensor may have no valid address */
            memcpy((void *)(uintptr_t)to[i], (const void *)(uintptr_t)from[i], sizes[i]);
    }
    Py_END_ALLOW_THREADS
    return close_views(&views, Py_NewRef(Py_None));
}

/* The progress of `gather`: `done` is the number of bytes, `crc` that of the current chunk so far. */
struct place {
    uint8_t *to;
    size_t done, chunk_bytes;
    uint32_t crc, *crcs;
};

static void take_piece(struct place *at, const uint8_t *from, size_t left, int stream) {
    while (left) {
        size_t room = at->chunk_bytes - at->done % at->chunk_bytes, size = left < room ? left : room;
        uint8_t *to = at->to + at->done;
        at->crc = fold(at->crc, to == from ? NULL : to, from, size, stream && size >= LOCKED_BYTES);
        at->done += size, from += size, left -= size;
        if (size == room) *at->crcs++ = at->crc, at->crc = 0;
    }
}

/* gather(to, from, sizes, chunk_bytes, crcs, stream) */
static PyObject *gather(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    struct views views = {.count = 0};
    if (wrong_number(given, 6) || open_addresses(&views, args + 1, 2) < 0) return close_views(&views, NULL);
    size_t chunk_bytes = PyLong_AsSize_t(args[3]);
    int stream = PyObject_IsTrue(args[5]);
    if (PyErr_Occurred() || open_view(&views, args[0], PyBUF_WRITABLE) < 0 || open_view(&views, args[4], PyBUF_WRITABLE) < 0)
        return close_views(&views, NULL);
    const uint64_t *from = views.at[0].buf, *sizes = views.at[1].buf;
    size_t count = (size_t)views.at[0].len / 8, total = 0, nbytes = (size_t)views.at[2].len;
    for (size_t i = 0; i < count && total <= nbytes; i++) total += sizes[i] <= nbytes ? sizes[i] : nbytes + 1;
    if (!chunk_bytes || total != nbytes || (size_t)views.at[3].len / 4 < (nbytes + chunk_bytes - 1) / chunk_bytes) {
        PyErr_SetString(PyExc_ValueError, "the pieces, the buffer and the checksums do not fit together");
        return close_views(&views, NULL);
    }
    if (check_addresses(from, sizes, count) < 0) return close_views(&views, NULL);
    struct place at = {.to = views.at[2].buf, .chunk_bytes = chunk_bytes, .crcs = views.at[3].buf};
    Py_BEGIN_ALLOW_THREADS
    for (size_t i = 0; i < count; i++) {
        fetch_ahead(from, i, count);
        take_piece(&at, (const uint8_t *)(uintptr_t)from[i], sizes[i], stream);
    }
    if (at.done % chunk_bytes) *at.crcs = at.crc;
    Py_END_ALLOW_THREADS
    return close_views(&views, Py_NewRef(Py_None));
}

/* The part of DLPack 1 that inspects tensors: see https://dmlc.github.io/dlpack/latest/. */

typedef struct {
    void *data;
    struct { int32_t type, id; } device;
    int32_t ndim;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} Tensor;

typedef struct {
    struct { uint32_t major, minor; } version;
    void *previous, *allocate, *export, *import;
    int (*look)(void *object, Tensor *found);
} Exchange;

#define RANK_MAX 64
#define COMPLEX 5

struct mark { /* followed by shape and strides, `ndim` integers each */
    uint64_t address;
    int32_t device, device_id, dtype, ndim;
};

static int has_elements(const Tensor *tensor) {
    for (int32_t i = 0; i < tensor->ndim; i++)
        if (!tensor->shape[i]) return 0;
    return 1;
}

static Py_ssize_t mark_of(const Exchange *exchange, PyObject *tensor, char *out, Py_ssize_t room) {
    Tensor found;
    if (exchange->look(tensor, &found) < 0) return -1;
    if (found.ndim < 0 || found.ndim > RANK_MAX || found.dtype.code == COMPLEX) {
        PyErr_SetString(PyExc_BufferError, "DLPack does not describe this tensor completely");
        return -1; /* a complex tensor may be conjugated, which DLPack does not show */
    }
    uint64_t address = (uint64_t)(uintptr_t)found.data + found.byte_offset;
    if (address < FIRST_ADDRESS && has_elements(&found)) {
        PyErr_SetString(PyExc_BufferError, "this tensor has elements, and no memory for them");
        return -1;
    }
    size_t each = sizeof(int64_t) * (size_t)found.ndim;
    Py_ssize_t size = (Py_ssize_t)(sizeof(struct mark) + 2 * each);
    if (size > room) return size;
    struct mark mark = {
        .address = address,
        .device = found.device.type,
        .device_id = found.device.id,
        .dtype = found.dtype.code | found.dtype.bits << 8 | found.dtype.lanes << 16,
        .ndim = found.ndim,
    };
    memcpy(out, &mark, sizeof mark);
    memcpy(out + sizeof mark, found.shape, each);
    if (found.strides)
        memcpy(out + sizeof mark + each, found.strides, each);
    else
        memset(out + sizeof mark + each, 0, each);
    return size;
}

/* marks(tensors, exchange) -> bytes */
static PyObject *marks(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    if (wrong_number(given, 2)) return NULL;
    const Exchange *exchange = PyCapsule_GetPointer(args[1], "dlpack_exchange_api");
    if (!exchange) return NULL;
    if (exchange->version.major != 1 || !exchange->look) {
        PyErr_SetString(PyExc_BufferError, "these tensors cannot be inspected by DLPack 1");
        return NULL;
    }
    PyObject *tensors = PySequence_Fast(args[0], "`tensors` must be a sequence of tensors");
    if (!tensors) return NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(tensors), room = 64 * count + 4096, used = 0;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, room);
    for (Py_ssize_t i = 0; bytes && i < count; i++) {
        PyObject *tensor = PySequence_Fast_GET_ITEM(tensors, i);
        Py_ssize_t size = mark_of(exchange, tensor, PyBytes_AS_STRING(bytes) + used, room - used);
        if (size < 0) {
            Py_CLEAR(bytes);
        } else if (size > room - used) {
            room = 2 * room;
            _PyBytes_Resize(&bytes, room);
            i--;
        } else {
            used += size;
        }
    }
    Py_DECREF(tensors);
    if (bytes) _PyBytes_Resize(&bytes, used);
    return bytes;
}

#if defined(__linux__) && defined(MREMAP_DONTUNMAP) && defined(MAP_FIXED_NOREPLACE)
#define TABLE_BYTES ((size_t)1 << 21) /* what a page table maps; so aligned, whole tables are moved */

static _Atomic int stopped; /* the errno that ended all exchanges of pages; 0: none */

static void *map(void *at, size_t nbytes, int protection, int how) {
    return mmap(at, nbytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | how, -1, 0);
}

/* Move pages. `from` stays mapped, so that no other thread can map memory there. Most failures
   occur after the kernel has unmapped `to`; then this function maps empty memory at `to`. Returns 0
   or an errno; the errno is negative if another thread has mapped memory at `to` before. */
static int move_pages_to(void *to, void *from, size_t nbytes) {
    if (mremap(from, nbytes, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to) != MAP_FAILED) return 0;
    int error = errno;
    if (error == EINVAL || error == EPERM || error == ENOSYS) return error; /* unchanged */
    stopped = error;
    return map(to, nbytes, PROT_READ | PROT_WRITE, MAP_FIXED_NOREPLACE) == to ? error : -error;
}

/* Like `move_pages_to`, but `to` is memory of tensors or of a version. Aborts if another thread has
   mapped memory at `to`, since later writes to the tensors would corrupt that thread's memory. */
static int move_pages_home(void *to, void *from, size_t nbytes) {
    int error = move_pages_to(to, from, nbytes);
    if (error >= 0) return error;
    fprintf(stderr, "weightbus: the kernel lost a model's memory while pages were exchanged: %s\n", strerror(-error));
    abort();
}

/* Exchange pages by way of `spare`. `one` and `other` always stay mapped, and no content is lost. */
static int exchange_by(void *one, void *other, void *spare, size_t nbytes) {
    int error = move_pages_to(spare, one, nbytes);
    if (error) return error;
    error = move_pages_home(one, other, nbytes); /* if this fails, `one` gets its own pages back */
    void *back = error ? one : other;
    if (move_pages_home(back, spare, nbytes)) memcpy(back, spare, nbytes);
    return error;
}

static int exchange_pages(void *one, void *other, size_t nbytes) {
    if (stopped) return stopped;
    size_t room = nbytes + TABLE_BYTES;
    char *whole = map(NULL, room, PROT_NONE, 0); /* reserves only addresses, no pages */
    if (whole == MAP_FAILED) return ENOBUFS;
    char *spare = whole + (-(uintptr_t)whole & (TABLE_BYTES - 1));
    int error = exchange_by(one, other, spare, nbytes);
    if (error < 0) return -error; /* another thread has mapped memory there: do not unmap it */
    munmap(whole, room);
    return error;
}
#else
static int exchange_pages(void *one, void *other, size_t nbytes) {
    (void)one, (void)other, (void)nbytes;
    return ENOSYS;
}
#endif

/* exchange(one, other, nbytes) */
static PyObject *exchange(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long one, other, nbytes;
    int error;
    if (!PyArg_ParseTuple(args, "KKK", &one, &other, &nbytes)) return NULL;
    uint64_t both[] = {one, other}, sizes[] = {nbytes, nbytes};
    if (check_addresses(both, sizes, 2) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    error = exchange_pages((void *)(uintptr_t)one, (void *)(uintptr_t)other, (size_t)nbytes);
    Py_END_ALLOW_THREADS
    if (!error) Py_RETURN_NONE;
    if (error == ENOBUFS) return PyErr_Format(PyExc_MemoryError, "no address space for %llu more bytes, which an exchange of pages needs", nbytes);
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

/* levels() -> the names of the instruction sets that this processor supports, the best first */
static PyObject *levels(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    PyObject *names = PyList_New(0);
    for (struct wb_level *level = wb_levels; names && level->name; level++) {
        PyObject *name = PyUnicode_FromString(level->name);
        if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

/* use(name): select an instruction set of `levels`; for tests and benchmarks */
static PyObject *use(PyObject *module, PyObject *wanted) {
    (void)module;
    const char *name = PyUnicode_AsUTF8(wanted);
    if (!name) return NULL;
    for (struct wb_level *level = wb_levels; level->name; level++)
        if (!strcmp(level->name, name)) {
            fold = level->fold;
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "this processor has no %s", name);
}

static PyMethodDef functions[] = {
    {"crc32c", (PyCFunction)(void (*)(void))crc32c, METH_FASTCALL, NULL},
    {"copy_crc32c", (PyCFunction)(void (*)(void))copy_crc32c, METH_FASTCALL, NULL},
    {"copies", (PyCFunction)(void (*)(void))copies, METH_FASTCALL, NULL},
    {"gather", (PyCFunction)(void (*)(void))gather, METH_FASTCALL, NULL},
    {"marks", (PyCFunction)(void (*)(void))marks, METH_FASTCALL, NULL},
    {"exchange", exchange, METH_VARARGS, NULL},
    {"levels", levels, METH_NOARGS, NULL},
    {"use", use, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "weightbus.codecs._native", .m_size = -1, .m_methods = functions,
};

PyMODINIT_FUNC PyInit__native(void) {
    wb_choose();
    fold = wb_levels[0].fold;
    return PyModule_Create(&definition);
}
