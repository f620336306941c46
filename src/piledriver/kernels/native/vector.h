/* Vectors of fp32 as wide as the registers of the machine that compiles this. */

#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define REGISTERS 32
#elif defined(__AVX__)
#define LANES 8
#define REGISTERS 16
#else
#define LANES 4
#define REGISTERS 32
#endif

_Static_assert(WIDEST % LANES == 0, "rows and heads must be whole vectors");

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef float unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE vec load(const float *at) { return *(const unaligned *)at; }

INLINE void store(float *at, vec value) { *(unaligned *)at = value; }

INLINE vec all(float value) { return value - (vec){}; }

/* `sum + x * y`, rounded once where there is such an instruction. It is named because a compiler that chooses fuses in
some loops and not in others (GCC for AMD's processors): the bits of a row would depend on the number of rows. */
#if LANES == 16
INLINE vec add_product(vec sum, vec x, vec y) { return (vec)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum); }
#elif defined(__AVX2__) && defined(__FMA__)
INLINE vec add_product(vec sum, vec x, vec y) { return (vec)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum); }
#elif defined(__ARM_NEON)
INLINE vec add_product(vec sum, vec x, vec y) {
    return (vec)vfmaq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)y);
}
#else
INLINE vec add_product(vec sum, vec x, vec y) { return sum + x * y; }
#endif

/* The sum of the lanes: halves are added until one is left. */
#if LANES == 16
typedef float half __attribute__((vector_size(32)));
typedef float quarter __attribute__((vector_size(16)));
INLINE quarter fold(vec value) {
    half halves[2];
    quarter quarters[2];
    memcpy(halves, &value, sizeof value);
    halves[0] += halves[1];
    memcpy(quarters, halves, sizeof quarters);
    return quarters[0] + quarters[1];
}
#elif LANES == 8
typedef float quarter __attribute__((vector_size(16)));
INLINE quarter fold(vec value) {
    quarter quarters[2];
    memcpy(quarters, &value, sizeof value);
    return quarters[0] + quarters[1];
}
#else
typedef vec quarter;
INLINE quarter fold(vec value) { return value; }
#endif

INLINE float total(vec value) {
    const quarter four = fold(value);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* The next bytes as numbers. GCC widens bytes one by one, so that the instruction is named where there is one. */
#if LANES == 16
INLINE ivec widen(const int8_t *at) { return (ivec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)); }
INLINE ivec widen_unsigned(const uint8_t *at) {
    return (ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at));
}
#elif defined(__AVX2__)
INLINE ivec widen(const int8_t *at) { return (ivec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)); }
INLINE ivec widen_unsigned(const uint8_t *at) {
    return (ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at));
}
#else
typedef int8_t bytes __attribute__((vector_size(LANES)));
typedef uint8_t unsigned_bytes __attribute__((vector_size(LANES)));
INLINE ivec widen(const int8_t *at) {
    bytes some;
    memcpy(&some, at, sizeof some);
    return __builtin_convertvector(some, ivec);
}
INLINE ivec widen_unsigned(const uint8_t *at) {
    unsigned_bytes some;
    memcpy(&some, at, sizeof some);
    return __builtin_convertvector(some, ivec);
}
#endif

INLINE vec choose(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

/* e^x for x from -87 to 88, and their values beyond: range reduction and Cephes' polynomial. */
INLINE vec exponential(vec x) {
    const vec low = all(-87.0f), high = all(88.0f), round = all(12582912.0f);
    x = choose(x < low, low, choose(x > high, high, x));
    const vec whole = add_product(round, x, all(1.44269504088896341f)) - round;
    const vec rest = add_product(add_product(x, whole, all(-0.693359375f)), whole, all(2.12194440e-4f));
    vec series = all(1.9875691500e-4f);
    series = add_product(all(1.3981999507e-3f), series, rest);
    series = add_product(all(8.3334519073e-3f), series, rest);
    series = add_product(all(4.1665795894e-2f), series, rest);
    series = add_product(all(1.6666665459e-1f), series, rest);
    series = add_product(all(5.0000001201e-1f), series, rest);
    series = add_product(rest, series, rest * rest) + 1.0f;
    return series * (vec)((__builtin_convertvector(whole, ivec) + 127) << 23);
}
