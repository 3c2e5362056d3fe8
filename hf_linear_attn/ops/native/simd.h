// Vectors of the widest registers that the compiler may use, small matrix products, and the exponential.
//
// Everything is written with the vector extensions that GCC and Clang share: the same source serves AVX-512, AVX2, NEON
// and plain SSE. Matrices are row-major float32, their rows padded with zeros to whole vectors.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace hla {

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int TILE_COLUMNS = 4;  // vectors; with 6 rows 24 of 32 registers hold sums
#elif defined(__AVX__)
constexpr int LANES = 8;
constexpr int TILE_COLUMNS = 2;  // 12 of 16 registers
#else
constexpr int LANES = 4;
constexpr int TILE_COLUMNS = 2;
#endif
constexpr int TILE_ROWS = 6;

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t VecInt __attribute__((vector_size(LANES * 4)));
typedef float VecLoose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

static inline Vec load(const float* p) { return *reinterpret_cast<const VecLoose*>(p); }
static inline void store(float* p, Vec v) { *reinterpret_cast<VecLoose*>(p) = v; }
// LANES integers of one byte. (GCC takes five times as many instructions for a conversion of vectors of them.)
static inline Vec load(const int8_t* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  VecInt integers;
  for (int i = 0; i < LANES; ++i) integers[i] = p[i];
  return __builtin_convertvector(integers, Vec);
#endif
}
static inline Vec splat(float x) { return x - Vec{}; }  // not +: 0 + x is not x for -0, and would be computed
static inline Vec select(VecInt which, Vec yes, Vec no) { return which ? yes : no; }
// A NaN in the first argument stays.
static inline Vec larger(Vec a, Vec b) { return a < b ? b : a; }
static inline Vec smaller(Vec a, Vec b) { return a > b ? b : a; }
static inline int padded(int n) { return (n + LANES - 1) / LANES * LANES; }

static inline VecInt lanes_below(int n) {
  VecInt lane;
  for (int i = 0; i < LANES; ++i) lane[i] = i;
  return lane < n;
}
// v with zeros from lane n on.
static inline Vec first_lanes(Vec v, int n) { return n < LANES ? select(lanes_below(n), v, Vec{}) : v; }

template <typename Fold>
static inline float reduce(Vec v, Fold fold) {
  float x[LANES];
  memcpy(x, &v, sizeof v);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) x[i] = fold(x[i], x[i + half]);
  return x[0];
}
static inline float sum_of(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  return reduce(v, [](float a, float b) { return a + b; });
#endif
}
static inline float max_of(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  return reduce(v, [](float a, float b) { return a > b ? a : b; });
#endif
}

// e^x with a relative error below two units in the last place, for x at most 88; 0 below -87.3. A NaN stays.
static inline Vec exp_of(Vec x) {
#if defined(__AVX512F__)
  // Not x < -87.3, so that a NaN stays. Numbers too small for a normal float32 take some processors a hundred times as
  // long, and a window has many: those lanes are left out.
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ);
#else
  const VecInt underflows = x < -87.3f;
  x = larger(x, splat(-110.0f));
#endif
  const Vec shifted = x * 1.44269504088896341f + 12582912.0f;  // the integer part sits in the low bits
  const Vec integer = shifted - 12582912.0f;
  const Vec fraction = (x - integer * 0.693359375f) + integer * 2.12194440e-4f;
  // The polynomial 1 + ... of degree 5 with the least relative error for |fraction| <= log(2) / 2: 9.2e-8.
  Vec p = fraction * 8.29030667e-3f + 4.18979749e-2f;
  p = p * fraction + 1.66676372e-1f;
  p = p * fraction + 4.99991506e-1f;
  p = p * fraction + 9.99999702e-1f;
  p = p * fraction + 1.0f;
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)integer);
#else
  const Vec power = (Vec)(((VecInt)shifted << 23) + 0x3f800000);
  return select(underflows, Vec{}, p * power);
#endif
}

// cap tanh(x / cap), with an absolute error of some 1e-7 cap.
static inline Vec capped(Vec x, float cap) {
  const Vec power = exp_of(smaller(x * (2.0f / cap), splat(40.0f)));
  return cap - 2.0f * cap / (power + 1.0f);
}

// -------------------------------------------------------------------------------------------------------------------
// C[M, N] (+)= A[M, K] B[K, N]: A with any strides, B and C with rows of whole vectors; B in float32 or of one byte.

template <int R, int C, typename B>
static inline __attribute__((always_inline)) void tile(const float* a, long a_row, long a_step, const B* b, long b_row,
                                                       float* c, long c_row, int depth, bool add) {
  Vec sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) sum[r][j] = Vec{};
  for (int k = 0; k < depth; ++k) {
    Vec right[C];
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) right[j] = load(b + k * b_row + j * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec left = splat(a[r * a_row + k * a_step]);
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) sum[r][j] += left * right[j];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) {
      // A block is added up by itself first: one token after the other onto a long sum would drift.
      float* at = c + r * c_row + j * LANES;
      store(at, add ? load(at) + sum[r][j] : sum[r][j]);
    }
}

template <int C, typename B>
static inline void tile_rows(int rows, const float* a, long a_row, long a_step, const B* b, long b_row, float* c, long c_row,
                             int depth, bool add) {
  switch (rows) {
    case 6: tile<6, C>(a, a_row, a_step, b, b_row, c, c_row, depth, add); break;
    case 5: tile<5, C>(a, a_row, a_step, b, b_row, c, c_row, depth, add); break;
    case 4: tile<4, C>(a, a_row, a_step, b, b_row, c, c_row, depth, add); break;
    case 3: tile<3, C>(a, a_row, a_step, b, b_row, c, c_row, depth, add); break;
    case 2: tile<2, C>(a, a_row, a_step, b, b_row, c, c_row, depth, add); break;
    default: tile<1, C>(a, a_row, a_step, b, b_row, c, c_row, depth, add); break;
  }
}

// One tile of at most TILE_ROWS rows against all columns.
template <typename B>
static inline void multiply_strip(int rows, int columns, int depth, const float* a, long a_row, long a_step, const B* b,
                                  long b_row, float* c, long c_row, bool add) {
  int j = 0;
  for (; j + TILE_COLUMNS * LANES <= columns; j += TILE_COLUMNS * LANES)
    tile_rows<TILE_COLUMNS>(rows, a, a_row, a_step, b + j, b_row, c + j, c_row, depth, add);
  switch ((columns - j) / LANES) {
#if defined(__AVX512F__)
    case 3: tile_rows<3>(rows, a, a_row, a_step, b + j, b_row, c + j, c_row, depth, add); break;
    case 2: tile_rows<2>(rows, a, a_row, a_step, b + j, b_row, c + j, c_row, depth, add); break;
#endif
    case 1: tile_rows<1>(rows, a, a_row, a_step, b + j, b_row, c + j, c_row, depth, add); break;
    default: break;
  }
}

template <typename B>
static void multiply_floats(int rows, int columns, int depth, const float* a, long a_row, long a_step, const B* b, long b_row,
                            float* c, long c_row, bool add) {
  for (int i = 0; i < rows; i += TILE_ROWS) {
    multiply_strip(std::min(rows - i, TILE_ROWS), columns, depth, a + i * a_row, a_row, a_step, b, b_row, c + i * c_row,
                   c_row, add);
  }
}

// Transposes LANES rows of one vector each: after step s, bit s of row and lane are exchanged.
template <int STEP>
static inline __attribute__((always_inline)) void transpose_registers(Vec (&rows)[LANES]) {
  if constexpr (STEP < LANES) {
    VecInt low, high;
    for (int i = 0; i < LANES; ++i) {
      low[i] = i & STEP ? LANES + i - STEP : i;
      high[i] = i & STEP ? LANES + i : i + STEP;
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i)
      if (!(i & STEP)) {
        const Vec first = rows[i], second = rows[i + STEP];
#if defined(__clang__)
        Vec a, b;
        for (int j = 0; j < LANES; ++j) {
          a[j] = low[j] < LANES ? first[low[j]] : second[low[j] - LANES];
          b[j] = high[j] < LANES ? first[high[j]] : second[high[j] - LANES];
        }
        rows[i] = a;
        rows[i + STEP] = b;
#else
        rows[i] = __builtin_shuffle(first, second, low);
        rows[i + STEP] = __builtin_shuffle(first, second, high);
#endif
      }
    transpose_registers<STEP * 2>(rows);
  }
}

// out[columns, rows] = in[rows, columns]. Both counts are rounded up to whole vectors: out has space for that, and rows of
// `in` beyond the last are not read but taken as zero.
static void transpose(int rows, int columns, const float* in, long in_row, float* out, long out_row) {
  for (int i = 0; i < rows; i += LANES)
    for (int j = 0; j < columns; j += LANES) {
      Vec block[LANES];
#pragma GCC unroll 16
      for (int r = 0; r < LANES; ++r) block[r] = i + r < rows ? load(in + (i + r) * in_row + j) : Vec{};
      transpose_registers<1>(block);
#pragma GCC unroll 16
      for (int r = 0; r < LANES; ++r) store(out + (j + r) * out_row + i, block[r]);
    }
}

static inline float dot(const float* a, const float* b, int n) {
  Vec total{};
  for (int i = 0; i < n; i += LANES) total += load(a + i) * load(b + i);
  return sum_of(total);
}

// out[r * out_row] = factor * (rows[r] . b): b is read once for R rows.
template <int R, typename B>
static inline void dot_rows(const float* rows, int row, const B* b, int n, float factor, float* out, long out_row) {
  Vec total[R]{};
  for (int i = 0; i < n; i += LANES) {
    const Vec right = load(b + i);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) total[r] += load(rows + r * row + i) * right;
  }
  for (int r = 0; r < R; ++r) out[r * out_row] = sum_of(total[r]) * factor;
}
template <typename B>
static inline void dots(int count, const float* rows, int row, const B* b, int n, float factor, float* out, long out_row) {
  for (; count >= 4; count -= 4, rows += 4 * row, out += 4 * out_row) dot_rows<4>(rows, row, b, n, factor, out, out_row);
  switch (count) {
    case 3: dot_rows<3>(rows, row, b, n, factor, out, out_row); break;
    case 2: dot_rows<2>(rows, row, b, n, factor, out, out_row); break;
    case 1: dot_rows<1>(rows, row, b, n, factor, out, out_row); break;
    default: break;
  }
}

static inline void scale_all(float* rows, long numbers, float factor) {
  for (long i = 0; i < numbers; i += LANES) store(rows + i, load(rows + i) * factor);
}

// to += factor from.
static inline void add_scaled(const float* from, long numbers, float factor, float* to) {
  for (long i = 0; i < numbers; i += LANES) store(to + i, load(to + i) + load(from + i) * factor);
}

}  // namespace hla
