// Matrix products with factors rounded to bfloat16 and sums in float32, by AMX tiles: for calls whose inputs are in
// bfloat16, on processors that have them. There `multiply` and its kin take this way while a TileProducts is alive.
//
// Inputs are bfloat16 already, so only what is computed from them is rounded: features, weights, sums over keys, each by
// at most 2^-9. Forward, the weights of feature maps count as two numbers, w = high + low, since exponentials follow.

#pragma once

#include "io.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__linux__)
#define HLA_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hla {

#if defined(HLA_TILES)

// Linux grants the tiles' registers to a process that asks for them.
static bool request_tile_permission() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}
static bool tiles_granted() {
  static const bool granted = request_tile_permission();
  return granted;
}

// Keeps the compiler from moving stores past the tile instructions, whose memory operands it does not see.
static inline void memory_barrier() { __asm__ volatile("" ::: "memory"); }

// Both factors in pairs of bfloat16 along the sum: left [rows, depth / 2], right [depth / 2, columns], in 32-bit words.
class TileProducts {
 public:
  TileProducts(bool enabled, Workspace& workspace) : active_(enabled && tiles_granted()) {
    if (!active_) return;
    left_ = words_of(workspace, ROWS * DEPTH / 2);
    right_ = words_of(workspace, DEPTH / 2 * COLUMNS);
    for (uint32_t*& weights : weights_) weights = words_of(workspace, WEIGHTS);
    _tile_storeconfig(before_);
    alignas(64) uint8_t config[64] = {1};
    for (int tile = 0; tile < 8; ++tile) {
      config[16 + 2 * tile] = 64;     // bytes of a row
      config[48 + tile] = TILE_SIZE;  // rows
    }
    memory_barrier();
    _tile_loadconfig(config);
    current() = this;
  }
  ~TileProducts() {
    if (!active_) return;
    current() = nullptr;
    memory_barrier();
    if (before_[0])
      _tile_loadconfig(before_);
    else
      _tile_release();
  }
  TileProducts(const TileProducts&) = delete;
  TileProducts& operator=(const TileProducts&) = delete;

  // The tile products of this thread, or null.
  static TileProducts*& current() {
    static thread_local TileProducts* active = nullptr;
    return active;
  }

  // As `multiply`; transposed: with B [columns, depth].
  void multiply(int rows, int columns, int depth, const float* a, long a_row, long a_step, const float* b, long b_row,
                float* c, long c_row, bool add, bool transposed = false) {
    for (int k = 0; k < depth; k += DEPTH) {
      const int tile_depth = std::min(depth - k, DEPTH);
      int packed = -1;
      for (int j = 0; j < columns; j += COLUMNS) {
        const int tile_columns = std::min(columns - j, COLUMNS);
        if (transposed)
          pack_right_transposed(b + j * b_row + k, b_row, tile_depth, tile_columns);
        else
          pack_right(b + k * b_row + j, b_row, tile_depth, tile_columns, right_, false);
        for (int i = 0; i < rows; i += ROWS) {
          const int tile_rows = std::min(rows - i, ROWS);
          if (packed != i) pack_left(a + i * a_row + k * a_step, a_row, a_step, tile_rows, tile_depth);
          packed = i;
          products(tile_rows, tile_columns, tile_depth, right_, 1, c + i * c_row + j, c_row, add || k);
        }
      }
    }
  }

  // C = A B with B = high + low as two bfloat16 numbers each; at most ROWS rows. What B holds must not change while this
  // object lives.
  void multiply_by_weights(int rows, int columns, int depth, const float* a, long a_row, const float* b, long b_row,
                           float* c, long c_row) {
    if (depth > DEPTH || 2 * steps(depth) * TILE_SIZE * columns > WEIGHTS)
      return multiply_floats(rows, columns, depth, a, a_row, 1, b, b_row, c, c_row, false);
    int slot = b == packed_[0] ? 0 : 1;
    if (b != packed_[slot]) {
      slot = newest_slot_ ^ 1;
      pack_right(b, b_row, depth, columns, weights_[slot], false);
      pack_right(b, b_row, depth, columns, weights_[slot] + steps(depth) * TILE_SIZE * columns, true);
      packed_[slot] = b;
    }
    newest_slot_ = slot;
    pack_left(a, a_row, 1, rows, depth);
    products(rows, columns, depth, weights_[slot], 2, c, c_row, false);
  }

 private:
  static constexpr int TILE_SIZE = 16;  // rows of a tile, and 32-bit words in one of them
  static constexpr int ROWS = 64, DEPTH = 256, COLUMNS = 256, WEIGHTS = 24576;

  static uint32_t* words_of(Workspace& workspace, size_t count) {
    return reinterpret_cast<uint32_t*>(workspace.take(count));
  }
  static int steps(int depth) { return (depth + 2 * TILE_SIZE - 1) / (2 * TILE_SIZE); }

  // Two rows of 16 numbers -> 16 words, (low, high) each.
  static __m512i pair(__m512 low, __m512 high) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                           20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }

  // What bfloat16 leaves of a number.
  static __m512 remainder(__m512 x) {
    const __m512i rounded = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16);
    return _mm512_sub_ps(x, (__m512)rounded);
  }

  // right [depth / 2, columns] of the numbers, or of what bfloat16 leaves of them.
  void pack_right(const float* b, long b_row, int depth, int columns, uint32_t* right, bool remainders) {
    for (int k = 0; k < steps(depth) * 2 * TILE_SIZE; k += 2)
      for (int j = 0; j < columns; j += TILE_SIZE) {
        __m512 low = k < depth ? _mm512_loadu_ps(b + k * b_row + j) : _mm512_setzero_ps();
        __m512 high = k + 1 < depth ? _mm512_loadu_ps(b + (k + 1) * b_row + j) : _mm512_setzero_ps();
        if (remainders) low = remainder(low), high = remainder(high);
        _mm512_store_si512(right + k / 2 * columns + j, pair(low, high));
      }
  }

  // Numbers k ... k + 31 of a row of `depth`, zeros behind its end.
  static Vec words(const float* row, int k, int depth) {
    const int left = depth - k;
    const __mmask16 first = left >= TILE_SIZE ? 0xffff : (1u << left) - 1;
    const __mmask16 second = left >= 2 * TILE_SIZE ? 0xffff : left > TILE_SIZE ? (1u << (left - TILE_SIZE)) - 1 : 0;
    const __m512 low = _mm512_maskz_loadu_ps(first, row + k), high = _mm512_maskz_loadu_ps(second, row + k + TILE_SIZE);
    return (Vec)(__m512i)_mm512_cvtne2ps_pbh(high, low);
  }

  void pack_right_transposed(const float* b, long b_row, int depth, int columns) {
    for (int j = 0; j < columns; j += TILE_SIZE)
      for (int k = 0; k < steps(depth) * 2 * TILE_SIZE; k += 2 * TILE_SIZE) {
        Vec block[TILE_SIZE];
#pragma GCC unroll 16
        for (int i = 0; i < TILE_SIZE; ++i) block[i] = words(b + (j + i) * b_row, k, depth);
        transpose_registers<1>(block);
#pragma GCC unroll 16
        for (int i = 0; i < TILE_SIZE; ++i) _mm512_store_si512(right_ + (k / 2 + i) * columns + j, (__m512i)block[i]);
      }
  }

  void pack_left(const float* a, long a_row, long a_step, int rows, int depth) {
    const int row = steps(depth) * TILE_SIZE;
    if (a_step == 1) {
      for (int r = 0; r < rows; ++r)
        for (int k = 0; k < depth; k += 2 * TILE_SIZE)
          _mm512_store_si512(left_ + r * row + k / 2, (__m512i)words(a + r * a_row, k, depth));
      return;
    }
    // The sum runs down the columns: pairs of rows, transposed.
    for (int k = 0; k < steps(depth) * 2 * TILE_SIZE; k += 2 * TILE_SIZE)
      for (int r = 0; r < rows; r += TILE_SIZE) {
        Vec block[TILE_SIZE];
#pragma GCC unroll 16
        for (int i = 0; i < TILE_SIZE; ++i) {
          const int at = k + 2 * i;
          const __m512 low = at < depth ? _mm512_loadu_ps(a + at * a_step + r) : _mm512_setzero_ps();
          const __m512 high = at + 1 < depth ? _mm512_loadu_ps(a + (at + 1) * a_step + r) : _mm512_setzero_ps();
          block[i] = (Vec)pair(low, high);
        }
        transpose_registers<1>(block);
#pragma GCC unroll 16
        for (int i = 0; i < TILE_SIZE; ++i) _mm512_store_si512(left_ + (r + i) * row + k / 2, (__m512i)block[i]);
      }
  }

  // parts: how many packed right factors lie behind one another, to be added.
  void products(int rows, int columns, int depth, const uint32_t* right, int parts, float* c, long c_row, bool add) {
    memory_barrier();
    const Factors factors{left_, right, steps(depth) * TILE_SIZE, columns, parts};
    for (int i = 0; i < rows; i += 2 * TILE_SIZE)
      for (int j = 0; j < columns; j += 2 * TILE_SIZE) square(factors, rows, i, j, c, c_row, add);
  }

  struct Factors {
    const uint32_t *left, *right;
    int words, columns, parts;
  };

  // Up to two by two tiles of sums: 0 1 / 2 3.
  static void square(const Factors& factors, int rows, int i, int j, float* c, long c_row, bool add) {
    const int words = factors.words, columns = factors.columns;
    const bool below = i + TILE_SIZE < rows, right_of = j + TILE_SIZE < columns;
    float* at = c + i * c_row + j;
    const bool full = i + (below ? 2 * TILE_SIZE : TILE_SIZE) <= rows;  // else rows past the last one must not be written
    const bool accumulate = add && full;
    const long stride = c_row * 4;
    if (accumulate) {
      _tile_loadd(0, at, stride);
      if (right_of) _tile_loadd(1, at + TILE_SIZE, stride);
      if (below) _tile_loadd(2, at + TILE_SIZE * c_row, stride);
      if (below && right_of) _tile_loadd(3, at + TILE_SIZE * c_row + TILE_SIZE, stride);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int part = 0; part < factors.parts; ++part) {
      const uint32_t *left = factors.left + i * words, *right = factors.right + part * words * columns + j;
      for (int k = 0; k < words; k += TILE_SIZE) {
        _tile_loadd(4, left + k, words * 4);
        _tile_loadd(6, right + k * columns, columns * 4);
        _tile_dpbf16ps(0, 4, 6);
        if (right_of) {
          _tile_loadd(7, right + k * columns + TILE_SIZE, columns * 4);
          _tile_dpbf16ps(1, 4, 7);
        }
        if (below) {
          _tile_loadd(5, left + TILE_SIZE * words + k, words * 4);
          _tile_dpbf16ps(2, 5, 6);
          if (right_of) _tile_dpbf16ps(3, 5, 7);
        }
      }
    }
    alignas(64) float buffer[4 * TILE_SIZE * TILE_SIZE];
    float* to = full ? at : buffer;
    const long row = full ? c_row : 2 * TILE_SIZE;
    _tile_stored(0, to, row * 4);
    if (right_of) _tile_stored(1, to + TILE_SIZE, row * 4);
    if (below) _tile_stored(2, to + TILE_SIZE * row, row * 4);
    if (below && right_of) _tile_stored(3, to + TILE_SIZE * row + TILE_SIZE, row * 4);
    memory_barrier();
    if (full) return;
    for (int r = 0; r < rows - i; ++r)
      for (int l = 0; l < (right_of ? 2 * TILE_SIZE : TILE_SIZE); l += LANES) {
        float* out = at + r * c_row + l;
        const Vec sum = load(buffer + r * 2 * TILE_SIZE + l);
        store(out, add ? load(out) + sum : sum);
      }
  }

  bool active_;
  int newest_slot_ = 0;
  const float* packed_[2] = {nullptr, nullptr};  // whose weights are packed: those of keys and of queries alternate
  alignas(64) uint8_t before_[64];
  uint32_t *left_, *right_, *weights_[2];
};

// With fewer rows packing costs more than the tiles save.
constexpr int MIN_TILE_ROWS = 8;

static inline TileProducts* tiles_for(int rows) { return rows >= MIN_TILE_ROWS ? TileProducts::current() : nullptr; }

#else

class TileProducts {
 public:
  TileProducts(bool, Workspace&) {}
  void multiply(int, int, int, const float*, long, long, const float*, long, float*, long, bool, bool = false) {}
  void multiply_by_weights(int, int, int, const float*, long, const float*, long, float*, long) {}
};

static inline TileProducts* tiles_for(int) { return nullptr; }

#endif

// C[M, N] (+)= A[M, K] B[K, N]: A with a row or a column stride of one, B and C with rows of whole vectors.
static void multiply(int rows, int columns, int depth, const float* a, long a_row, long a_step, const float* b, long b_row,
                     float* c, long c_row, bool add) {
  if (TileProducts* tiles = tiles_for(rows))
    tiles->multiply(rows, columns, depth, a, a_row, a_step, b, b_row, c, c_row, add);
  else
    multiply_floats(rows, columns, depth, a, a_row, a_step, b, b_row, c, c_row, add);
}

// Runs `body(workspace)` on every thread of a team, for bfloat16 inputs (T) with its tile products. The body takes its
// memory, returns unless the workspace is ready, and has loops that share their iterations (`omp for`). Returns 1 if a
// thread got no memory.
template <typename T, typename Body>
static int run_parallel(const int threads, Body body) {
  int failed = 0;
#pragma omp parallel num_threads(threads)
  {
    Workspace workspace(failed);
    TileProducts tiles(bfloat16_factors<T>, workspace);
    body(workspace);
  }
  return failed;
}

}  // namespace hla
