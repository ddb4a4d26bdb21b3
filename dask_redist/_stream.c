/* Copies of a box from one array to another that leave the cache alone.

An ordinary store first reads the line that it will overwrite; a stream past the cache does not, so a
copy of much more than the cache holds moves two thirds of the bytes. memcpy does the same only for
single copies of many megabytes, and the rows of a box are shorter than that.

The only machine for which it is made is x86-64; on others memcpy would do as well.

    cc -O2 -shared -fPIC -o _stream.so _stream.c
*/
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <emmintrin.h>

#define PAGE 4096

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

static void box(char *to, const char *from, int ndim, const ptrdiff_t *shape,
                const ptrdiff_t *to_strides, const ptrdiff_t *from_strides, size_t length)
{
    if (ndim == 0) {
        row(to, from, length);
        return;
    }
    for (ptrdiff_t i = 0; i < *shape; i++) {
        box(to, from, ndim - 1, shape + 1, to_strides + 1, from_strides + 1, length);
        to += *to_strides, from += *from_strides;
    }
}

/* Copy rows of `length` bytes, at each index of a box of `ndim` axes. */
void dask_redist_stream(char *to, const char *from, int ndim, const ptrdiff_t *shape,
                        const ptrdiff_t *to_strides, const ptrdiff_t *from_strides, size_t length)
{
    box(to, from, ndim, shape, to_strides, from_strides, length);
    _mm_sfence();
}
