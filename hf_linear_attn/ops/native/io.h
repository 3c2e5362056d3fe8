// Rows of tensors in float32, bfloat16 or float16, read into and written from padded float32 blocks; memory for blocks.

#pragma once

#include <cstdlib>
#include <limits>
#include <type_traits>
#include <vector>

#include "simd.h"

namespace hla {

// The memory of one thread of a team, in pieces of whole cache lines.
class Workspace {
 public:
  explicit Workspace(int& failed) : failed_(failed) {}
  ~Workspace() {
    for (float* chunk : chunks_) std::free(chunk);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  float* take(size_t floats) {
    floats = (floats + 15) / 16 * 16;
    if (floats > left_) {
      left_ = std::max(floats, CHUNK);
      next_ = static_cast<float*>(std::aligned_alloc(64, left_ * sizeof(float)));
      chunks_.push_back(next_);
      if (!next_) {
#pragma omp atomic write
        failed_ = 1;
      }
    }
    left_ -= floats;
    float* piece = next_;
    next_ += floats;
    return piece;
  }
  // Waits for all threads of the team; false if one of them got no memory.
  bool ready() const {
#pragma omp barrier
    return !failed_;
  }

 private:
  static constexpr size_t CHUNK = 1 << 16;
  int& failed_;
  float* next_ = nullptr;
  size_t left_ = 0;
  std::vector<float*> chunks_;
};

// Batch, head and token strides in elements; the numbers of a token are contiguous.
struct Strided {
  void* data;
  int64_t batch, head, token;
};

struct BFloat16 {
  uint16_t bits;
};
// Stored only: it is converted to float32 for every operation.
#if defined(__aarch64__)
#define HLA_FLOAT16 1
typedef __fp16 Float16;  // GCC has no _Float16 in C++ there before version 13
#elif defined(__FLT16_MAX__)
#define HLA_FLOAT16 1
typedef _Float16 Float16;
#endif

// Whether factors computed from inputs of a type may be rounded to bfloat16.
template <typename T>
constexpr bool bfloat16_factors = false;
template <>
constexpr bool bfloat16_factors<BFloat16> = true;

static inline float to_float(float x) { return x; }
static inline float to_float(BFloat16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static inline void from_float(float x, float& to) { to = x; }
static inline void from_float(float x, BFloat16& to) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to.bits = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}
#if defined(HLA_FLOAT16)
static inline float to_float(Float16 x) { return (float)x; }
static inline void from_float(float x, Float16& to) { to = (Float16)x; }
#endif

// One row of numbers, converted. Bfloat16 goes by whole vectors where the processor converts them.
template <typename T>
static inline void read_row(const T* in, int size, float* out) {
  for (int j = 0; j < size; ++j) out[j] = to_float(in[j]);
}
template <typename T>
static inline void write_row(const float* in, int size, T* out) {
  for (int j = 0; j < size; ++j) from_float(in[j], out[j]);
}
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
template <>
inline void read_row(const BFloat16* in, int size, float* out) {
  int j = 0;
  for (; j + LANES <= size; j += LANES) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + j));
    store(out + j, (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  for (; j < size; ++j) out[j] = to_float(in[j]);
}
template <>
inline void write_row(const float* in, int size, BFloat16* out) {
  int j = 0;
  for (; j + LANES <= size; j += LANES)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + j), (__m256i)_mm512_cvtneps_pbh((__m512)load(in + j)));
  for (; j < size; ++j) from_float(in[j], out[j]);
}
#endif

// A token of a state is stored in the inputs' type, or as numbers of one byte with a scale behind them, the bytes of a
// float32 (see ops/int8.py).
struct Int8 {
  int8_t number;
};
constexpr int SCALE_BYTES = 4;

template <typename S>
static inline int stored_size(int size) {
  return std::is_same<S, Int8>::value ? size + SCALE_BYTES : size;
}

// Stored tokens that products read where they are: their numbers, and what these are multiplied by.
template <typename S>
constexpr bool readable_in_place = std::is_same<S, float>::value || std::is_same<S, Int8>::value;
static inline const float* numbers_of(const float* token) { return token; }
static inline const int8_t* numbers_of(const Int8* token) { return &token->number; }
static inline float scale_of(const float*, int) { return 1.0f; }
static inline float scale_of(const Int8* token, int size) {
  float scale;
  memcpy(&scale, token + size, SCALE_BYTES);
  return scale;
}

template <>
inline void read_row(const Int8* in, int size, float* out) {
  const float scale = scale_of(in, size);
  int j = 0;
  for (; j + LANES <= size; j += LANES) store(out + j, load(&in[j].number) * scale);
  for (; j < size; ++j) out[j] = in[j].number * scale;
}

template <typename T>
static inline void store_token(const T* token, int size, T* to) {
  memcpy(to, token, size * sizeof(T));
}
template <typename T>
static void store_token(const T* token, int size, Int8* to) {
  float largest = 0.0f;
  for (int j = 0; j < size; ++j) {
    const float x = std::fabs(to_float(token[j]));
    largest = x > largest || x != x ? x : largest;
  }
  float scale = largest / 127.0f;
  uint32_t bits;
  memcpy(&bits, &scale, SCALE_BYTES);
  bits = (bits + 0x7f) & ~0x7fu;  // rounded up to 17 significant bits
  memcpy(&scale, &bits, SCALE_BYTES);
  memcpy(to + size, &scale, SCALE_BYTES);
  const bool finite = scale - scale == 0.0f;
  const float divisor = std::max(scale, std::numeric_limits<float>::min());
  for (int j = 0; j < size; ++j) to[j].number = finite ? (int8_t)std::nearbyint(to_float(token[j]) / divisor) : 0;
}

// In a model's tensors a head's next token is kilobytes away, where the processor does not look ahead by itself.
constexpr long AHEAD = 12;
template <bool WRITE, typename T>
static inline void prefetch_row(const T* row, int size) {
  for (int j = 0; j < size; j += 64 / (int)sizeof(T)) __builtin_prefetch(row + j, WRITE, 2);
}

// Tokens start ... start + count - 1 of a head -> to [count, row]; masked tokens and the padding of a row are zero.
template <typename T>
static void read_rows(const Strided& from, long b, long head, long start, int count, int size, const uint8_t* mask,
                      float* to, int row) {
  const T* base = static_cast<const T*>(from.data) + b * from.batch + head * from.head;
  for (int t = 0; t < count; ++t) {
    float* out = to + (size_t)t * row;
    const T* in = base + (start + t) * from.token;
    prefetch_row<false>(in + AHEAD * from.token, size);
    const int real = !mask || mask[start + t] ? size : 0;
    read_row(in, real, out);
    for (int j = real; j < row; ++j) out[j] = 0.0f;
  }
}

template <typename T>
static void write_rows(const Strided& to, long b, long head, long start, int count, int size, const float* from, int row) {
  T* base = static_cast<T*>(to.data) + b * to.batch + head * to.head;
  for (int t = 0; t < count; ++t) {
    T* out = base + (start + t) * to.token;
    prefetch_row<true>(out + AHEAD * to.token, size);
    write_row(from + (size_t)t * row, size, out);
  }
}

}  // namespace hla
