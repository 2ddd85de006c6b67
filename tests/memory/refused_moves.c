/* Preloaded: one move of pages fails as it does where memory is short, its destination unmapped already; and
 * another thread may have mapped something there by then. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define DONTUNMAP 4

static int left, taken;
static unsigned char *others;
static size_t others_bytes;

/* The next move to fail, from 1 on, and whether somebody else takes the place. */
void refuse(int move, int take) {
    left = move;
    taken = take;
    others = NULL;
}

/* Whether what others have mapped there is as they wrote it. */
int others_are_well(void) {
    for (size_t i = 0; others && i < others_bytes; i++)
        if (others[i] != 9) return 0;
    return 1;
}

void *mremap(void *old, size_t old_bytes, size_t bytes, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    void *to = va_arg(rest, void *);
    va_end(rest);
    if (!(flags & DONTUNMAP) || left == 0 || --left > 0)
        return (void *)syscall(SYS_mremap, old, old_bytes, bytes, flags, to);
    munmap(to, bytes);
    if (taken) {
        others = mmap(to, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        others_bytes = bytes;
        memset(others, 9, bytes);
    }
    errno = ENOMEM;
    return MAP_FAILED;
}
