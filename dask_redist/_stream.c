/* Copies of boxes from one array to others that leave the cache alone.

An ordinary store first reads the line that it will overwrite; a stream past the cache does not, so a
copy of much more than the cache holds moves two thirds of the bytes. memcpy does the same only for
single copies of many megabytes, and the rows of a box are shorter than that.

Boxes that lie side by side in the source, cut along its last axis, are copied together: the source
is read once, a few rows at a time, and each box gets its part of them.

The only machine for which it is made is x86-64; on others memcpy would do as well.

    cc -O2 -shared -fPIC -o _stream.so _stream.c
*/
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <emmintrin.h>

#define PAGE 4096
#define BLOCK (64 * 1024) /* bytes of the source that boxes side by side share at a time */

/* One line, to an address that is a multiple of 64. */
static inline void line(char *to, const char *from)
{
    __m128i a = _mm_loadu_si128((const __m128i *)from);
    __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
    __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
    _mm_stream_si128((__m128i *)to, a);
    _mm_stream_si128((__m128i *)(to + 16), b);
    _mm_stream_si128((__m128i *)(to + 32), c);
    _mm_stream_si128((__m128i *)(to + 48), d);
}

static void row(char *to, const char *from, size_t length)
{
    size_t head = -(uintptr_t)to & 63;
    if (length < 512 && (head || length & 63)) { /* parts of lines: better left to the cache */
        memcpy(to, from, length);
        return;
    }
    if (head) {
        memcpy(to, from, head);
        to += head, from += head, length -= head;
    }
    /* Four pages side by side keep more of the memory's banks busy. */
    for (; length >= 4 * PAGE; to += 4 * PAGE, from += 4 * PAGE, length -= 4 * PAGE)
        for (size_t k = 0; k < PAGE; k += 64) {
            line(to + k, from + k);
            line(to + k + PAGE, from + k + PAGE);
            line(to + k + 2 * PAGE, from + k + 2 * PAGE);
            line(to + k + 3 * PAGE, from + k + 3 * PAGE);
        }
    for (; length >= 64; to += 64, from += 64, length -= 64)
        line(to, from);
    memcpy(to, from, length);
}

/* Boxes that differ only in what they take of each row of the source. */
struct boxes {
    int count, ndim;
    char **to;
    const char **from;
    const size_t *lengths;
    const ptrdiff_t *shape, *from_strides, *to_strides; /* the last: `ndim` a box */
};

static void advance(const struct boxes *b, int axis, ptrdiff_t steps)
{
    for (int k = 0; k < b->count; k++) {
        b->to[k] += steps * b->to_strides[k * b->ndim + axis];
        b->from[k] += steps * b->from_strides[axis];
    }
}

/* Some rows of one box. */
static void rows(char *to, const char *from, ptrdiff_t count, ptrdiff_t to_stride,
                 ptrdiff_t from_stride, size_t length)
{
    char together[BLOCK];
    if (length < 512 && to_stride == (ptrdiff_t)length && count * length <= BLOCK &&
        (length & 63 || (uintptr_t)to & 63)) {
        /* Parts of lines that make whole ones: they go out together. */
        for (ptrdiff_t i = 0; i < count; i++)
            memcpy(together + i * length, from + i * from_stride, length);
        row(to, together, count * length);
        return;
    }
    for (ptrdiff_t i = 0; i < count; i++)
        row(to + i * to_stride, from + i * from_stride, length);
}

/* Have some rows of all boxes in the cache: one sweep over the source, in its own order. */
static void fetch(const struct boxes *b, ptrdiff_t first, ptrdiff_t end)
{
    for (ptrdiff_t i = first; i < end; i++)
        for (int k = 0; k < b->count; k++) {
            const char *from = b->from[k] + i * b->from_strides[b->ndim - 1];
            for (size_t at = 0; at < b->lengths[k]; at += 64)
                _mm_prefetch(from + at, _MM_HINT_T0);
        }
}

static void walk(const struct boxes *b, int axis)
{
    if (axis + 1 < b->ndim) {
        for (ptrdiff_t i = 0; i < b->shape[axis]; i++) {
            walk(b, axis + 1);
            advance(b, axis, 1);
        }
        advance(b, axis, -b->shape[axis]);
        return;
    }
    size_t all = 0;
    for (int k = 0; k < b->count; k++)
        all += b->lengths[k];
    ptrdiff_t step = all < BLOCK ? BLOCK / all : 1, from_stride = b->from_strides[axis];
    for (ptrdiff_t i = 0; i < b->shape[axis]; i += step) {
        ptrdiff_t left = b->shape[axis] - i, count = left < step ? left : step;
        if (b->count > 1 && all <= BLOCK)
            fetch(b, i, i + count);
        for (int k = 0; k < b->count; k++) {
            ptrdiff_t to_stride = b->to_strides[k * b->ndim + axis];
            rows(b->to[k] + i * to_stride, b->from[k] + i * from_stride, count, to_stride,
                 from_stride, b->lengths[k]);
        }
    }
}

/* Copy `count` boxes: a row of `lengths[k]` bytes for each index of a shape of `ndim` axes, one at
   least. `to` and `from` are left as they were, but move meanwhile. */
void dask_redist_stream(int count, char **to, const char **from, const size_t *lengths, int ndim,
                        const ptrdiff_t *shape, const ptrdiff_t *from_strides,
                        const ptrdiff_t *to_strides)
{
    struct boxes b = {count, ndim, to, from, lengths, shape, from_strides, to_strides};
    walk(&b, 0);
    _mm_sfence();
}
