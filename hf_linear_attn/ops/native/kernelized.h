// Kernelized attention: o_i = phi(q_i) S / phi(q_i) z with S = sum_j phi(k_j) v_j, z = sum_j phi(k_j).
//
// One pass over blocks of 64 tokens; features live in one block's buffer only. Every (row, key-value head) is a task of its
// own, and long bidirectional inputs are cut into segments of a fixed length: results depend neither on the number of
// threads nor on the rest of the batch.

#pragma once

#include <algorithm>
#include <vector>

#include "decay.h"
#include "feature_maps.h"
#include "io.h"

namespace hla {

constexpr float FLOOR = 1e-20f;      // of a normaliser; see ops/common.py
constexpr long SEGMENT = 2048;       // tokens whose state one task adds up
constexpr float SAFE_RANGE = 15.0f;  // of log scales that one common reference serves

struct Call {
  Strided query, key, value, out;  // [B, H | G, L | S, d | e]
  Strided out_gradient;            // as out
  Strided query_gradient, key_gradient, value_gradient;
  const uint8_t* mask;  // [B, S], 1: a token; null: all of them
  int64_t mask_batch;
  int64_t batch, heads, groups, length, keys;
  int32_t size, value_size;  // d, e
  int32_t dtype, threads;
  Map query_map, key_map;
  const float *state, *state_sum, *state_scale;        // [B, G, m, e], [B, G, m], [B, G] or null
  float *next_state, *next_sum, *next_scale;           // written by the causal form
  float* normaliser;                                   // [B, H, L]: saved for the backward pass of the causal form; or null
  float *query_weight_gradient, *query_bias_gradient;  // [B, H, d, padded f], [B, H, padded f] or null
  float *key_weight_gradient, *key_bias_gradient;      // [B, G, ...]
  // Windowed forms only: exact weights near, kernelized ones far.
  const int64_t* skip;        // [B]: the first keys that are no tokens; null: none
  Strided mix;                // [B, H, L]: exp of the rows' log mixing weights
  float* top;                 // [B, H, L]: stabilisers, saved for the backward pass; or null
  float* mix_gradient;        // [B, H, L], of the log mixing weights
  int64_t offset;             // the key that row 0 is
  int32_t window, two_sided;  // two_sided: distances below `window` before and after
  float scaling;
  // One token of windowed attention: the last `window` keys [B, G, w, d], values, and which are tokens [B, w]; before and
  // after, which may be the same memory.
  const void *ring_key, *ring_value;
  const uint8_t* ring_mask;
  void *next_ring_key, *next_ring_value;
  uint8_t* next_ring_mask;
  // Log mixing weights by formula: `mix` and clip(√τ u·q, ±bound), u [H, padded d] or null. For one token they are
  // b + clip(√τ u·q, ±bound) - log(1 + n / N), b [H]; null b: `mix` holds them.
  const float *mix_base, *mix_weight;
  const int64_t* count;         // [B]: tokens before this one, of which n lie outside
  int64_t* next_count;          // with this one
  float mix_bound, saturation;  // N; 0: without the last term
  // Sinks [B, G, s, d], exact for every row, and their values: those at `position` [B, s], counted in rows. One token of
  // windowed attention: the first tokens of each row, contiguous; the new one is added to them while there are fewer.
  Strided sink_key, sink_value, sink_key_gradient, sink_value_gradient;
  const int64_t* sink_position;
  int64_t sinks;
  // Causal form with precomputed features only: log decays [B, G, L, m] of the state, in float32; null data: none.
  Strided decay;
};

// What turns numbers relative to one log scale into numbers relative to a higher one.
static inline float rescale_factor(float lower, float higher) {
  return lower == higher ? 1.0f : lower == -INFINITY ? 0.0f : std::exp(lower - higher);
}

// A block of tokens of one head with its feature map: inputs x, products y, features and log scales.
struct FeatureBlock {
  const Map* map;
  int row;    // features of a token, padded
  int x_row;  // padded d
  float *x, *y, *features, *scale;

  static size_t floats(const Map& map, int x_row, int tokens = BLOCK) {
    const size_t mapped = map.activation == PRECOMPUTED ? 0 : map.segment() + map.features();
    return tokens * (x_row + mapped + 1) + 64;
  }
  FeatureBlock(const Map& m, int x_padded, Workspace& workspace, int tokens = BLOCK)
      : map(&m),
        row(m.features()),
        x_row(x_padded),
        x(workspace.take((size_t)tokens * x_padded)),
        y(m.activation == PRECOMPUTED ? nullptr : workspace.take((size_t)tokens * m.segment())),
        features(m.activation == PRECOMPUTED ? x : workspace.take((size_t)tokens * m.features())),
        scale(workspace.take(tokens)) {}

  // Masked tokens are zero; as keys they have no features either.
  template <typename T>
  void read(const Strided& from, long b, long head, long start, int count, int size, const uint8_t* mask,
            bool are_keys = true) {
    if (map->activation == PRECOMPUTED)
      read_rows<float>(from, b, head, start, count, size, mask, x, x_row);
    else
      read_rows<T>(from, b, head, start, count, size, mask, x, x_row);
    if (map->scales)
      memcpy(scale, map->scales + b * map->scale_batch + head * map->scale_head + start, count * sizeof(float));
    const long angle = b * map->angle_batch + start;
    apply_map(*map, (int)head, map->cosine ? map->cosine + angle : nullptr, map->sine ? map->sine + angle : nullptr, x,
              x_row, count, y, features, scale);
    if (mask && are_keys)
      for (int t = 0; t < count; ++t)
        if (!mask[start + t]) {
          memset(features + (size_t)t * row, 0, row * sizeof(float));
          scale[t] = -INFINITY;
        }
  }

  void scale_rows(int count, float reference) {
    for (int t = 0; t < count; ++t)
      scale_all(features + (size_t)t * row, row, scale[t] == -INFINITY ? 0.0f : std::exp(scale[t] - reference));
  }
};

// S [m, e], z [m] and the log scale that both are relative to.
struct State {
  float *kv, *k;
  float scale;
  int rows, columns;

  static size_t floats(int rows, int columns) { return (size_t)rows * columns + rows + 32; }
  State(int m, int e, Workspace& workspace)
      : kv(workspace.take((size_t)m * e)), k(workspace.take(m)), scale(-INFINITY), rows(m), columns(e) {}
  State(int m, int e, float* at) : kv(at), k(at + (size_t)m * e), scale(-INFINITY), rows(m), columns(e) {}

  void clear() {
    memset(kv, 0, (size_t)rows * columns * sizeof(float));
    memset(k, 0, rows * sizeof(float));
    scale = -INFINITY;
  }

  // Makes the state relative to `reference`, which is at least the present scale.
  void rescale(float reference) {
    if (reference == scale) return;
    const float factor = rescale_factor(scale, reference);
    scale_all(kv, (long)rows * columns, factor);
    scale_all(k, rows, factor);
    scale = reference;
  }

  void add(const float* features, const float* value, int count) {
    multiply(rows, columns, count, features, 1, rows, value, columns, kv, columns, true);
    add_rows(features, rows, count, k);
  }

  static void add_rows(const float* from, int width, int count, float* total) {
    for (int j = 0; j < width; j += LANES) {
      Vec sum{};
      for (int t = 0; t < count; ++t) sum += load(from + (size_t)t * width + j);
      store(total + j, load(total + j) + sum);
    }
  }

  void merge(const State& other) {
    if (other.scale > scale) rescale(other.scale);
    const float factor = rescale_factor(other.scale, scale);
    for (long i = 0; i < (long)rows * columns; i += LANES) store(kv + i, load(kv + i) + load(other.kv + i) * factor);
    for (int i = 0; i < rows; i += LANES) store(k + i, load(k + i) + load(other.k + i) * factor);
  }
};

static inline float max_of_values(const float* values, int count) {
  float top = -INFINITY;
  for (int t = 0; t < count; ++t) top = values[t] > top ? values[t] : top;
  return top;
}

template <typename T>
static void sum_keys(const Call& c, long b, long g, long from, long to, FeatureBlock& keys, float* value, State& state) {
  const uint8_t* mask = c.mask ? c.mask + b * c.mask_batch : nullptr;
  const int value_row = padded(c.value_size);
  for (long start = from; start < to; start += BLOCK) {
    const int count = (int)(to - start < BLOCK ? to - start : BLOCK);
    keys.read<T>(c.key, b, g, start, count, c.size, mask);
    read_rows<T>(c.value, b, g, start, count, c.value_size, mask, value, value_row);
    if (keys.map->scaled()) {
      const float top = max_of_values(keys.scale, count);
      if (top == -INFINITY) continue;
      if (top > state.scale) state.rescale(top);
      keys.scale_rows(count, state.scale);
    }
    state.add(keys.features, value, count);
  }
}

template <typename T>
static void divide_rows(const Call& c, long b, long h, long start, int count, float* numerator, const float* denominator) {
  const int row = padded(c.value_size);
  for (int t = 0; t < count; ++t)
    scale_all(numerator + (size_t)t * row, row, 1.0f / (denominator[t] > FLOOR ? denominator[t] : FLOOR));
  write_rows<T>(c.out, b, h, start, count, c.value_size, numerator, row);
}

// Numerators and normalisers of rows from the keys of the state.
static void read_state(int count, const FeatureBlock& queries, const State& state, float* out, float* normaliser) {
  multiply(count, state.columns, state.rows, queries.features, state.rows, 1, state.kv, state.columns, out, state.columns,
           false);
  for (int t = 0; t < count; ++t) normaliser[t] = dot(queries.features + (size_t)t * state.rows, state.k, state.rows);
}

template <typename T>
static int bidirectional(const Call& c) {
  const int x_row = padded(c.size), e_row = padded(c.value_size), m_row = c.key_map.features();
  const long segments = (c.keys + SEGMENT - 1) / SEGMENT, repeats = c.heads / c.groups;
  const long streams = c.batch * c.groups;
  const size_t state_floats = (State::floats(m_row, e_row) + 15) / 16 * 16;
  const size_t workspace_floats =
      FeatureBlock::floats(c.key_map, x_row) + FeatureBlock::floats(c.query_map, x_row) + BLOCK * (e_row + 1) + 256;
  float* totals = static_cast<float*>(
      std::aligned_alloc(64, (streams * (segments > 0 ? segments : 1) * state_floats * 4 + 63) / 64 * 64));
  if (!totals) return 1;
  std::vector<float> scales(streams * (segments > 0 ? segments : 1), -INFINITY);
  const int failed = run_parallel<T>(c.threads, workspace_floats, [&](Workspace& workspace) {
    FeatureBlock keys(c.key_map, x_row, workspace), queries(c.query_map, x_row, workspace);
    float *block = workspace.take(BLOCK * e_row), *normaliser = workspace.take(BLOCK);
#pragma omp for schedule(dynamic)
    for (long task = 0; task < streams * segments; ++task) {
      const long stream = task / segments, segment = task % segments;
      State state(m_row, e_row, totals + task * state_floats);
      state.clear();
      const long stop = (segment + 1) * SEGMENT < c.keys ? (segment + 1) * SEGMENT : c.keys;
      sum_keys<T>(c, stream / c.groups, stream % c.groups, segment * SEGMENT, stop, keys, block, state);
      scales[task] = state.scale;
    }
#pragma omp for schedule(static)
    for (long stream = 0; stream < streams; ++stream) {
      State state(m_row, e_row, totals + stream * segments * state_floats);
      state.scale = scales[stream * segments];
      for (long segment = 1; segment < segments; ++segment) {
        State part(m_row, e_row, totals + (stream * segments + segment) * state_floats);
        part.scale = scales[stream * segments + segment];
        state.merge(part);
      }
    }
    const long pieces = (c.length + SEGMENT - 1) / SEGMENT;
#pragma omp for schedule(dynamic)
    for (long task = 0; task < c.batch * c.heads * pieces; ++task) {
      const long b = task / pieces / c.heads, h = task / pieces % c.heads, piece = task % pieces;
      const State state(m_row, e_row, totals + (b * c.groups + h / repeats) * segments * state_floats);
      const long stop = (piece + 1) * SEGMENT < c.length ? (piece + 1) * SEGMENT : c.length;
      for (long start = piece * SEGMENT; start < stop; start += BLOCK) {
        const int count = (int)(stop - start < BLOCK ? stop - start : BLOCK);
        queries.read<T>(c.query, b, h, start, count, c.size, nullptr);
        read_state(count, queries, state, block, normaliser);
        divide_rows<T>(c, b, h, start, count, block, normaliser);
      }
    }
  });
  std::free(totals);
  return failed;
}

// Transposes the tokens [n, width] for `lower_product`, unless tiles serve (which read them as they are).
static void transpose_tokens(int count, int width, const float* tokens, float* transposed) {
  if (!tiles_for(count)) transpose(count, width, tokens, width, transposed, BLOCK);
}

// Lower triangle of rows [n, m] columns [n, m]^T, zeros above it. transposed: the columns, by `transpose_tokens`.
static void lower_product(int count, int depth, const float* rows, const float* columns, const float* transposed,
                          float* out) {
  if (TileProducts* tiles = tiles_for(count)) {  // skipping the other half would cost more
    const int tile_columns = padded(count);
    tiles->multiply_transposed(count, tile_columns, depth, rows, depth, columns, depth, out, BLOCK);
    for (int r = 0; r < count; ++r) memset(out + r * BLOCK + r + 1, 0, (tile_columns - r - 1) * sizeof(float));
    return;
  }
  for (int i = 0; i < count; i += TILE_ROWS) {
    const int tile_rows = count - i < TILE_ROWS ? count - i : TILE_ROWS;
    const int tile_columns = padded(i + tile_rows);
    multiply_strip(tile_rows, tile_columns, depth, rows + (size_t)i * depth, depth, 1, transposed, BLOCK, out + i * BLOCK,
                   BLOCK, false);
    for (int r = i; r < i + tile_rows; ++r)
      for (int j = r + 1; j < tile_columns; ++j) out[r * BLOCK + j] = 0.0f;
  }
}

// out [n, width] (+)= lower_product [n, n] right [n, width], which reads only the lower part.
static void multiply_lower(int count, const float* weights, const float* right, int width, float* out, bool add) {
  if (tiles_for(count)) return multiply(count, width, count, weights, BLOCK, 1, right, width, out, width, add);
  for (int i = 0; i < count; i += TILE_ROWS) {
    const int tile_rows = count - i < TILE_ROWS ? count - i : TILE_ROWS;
    multiply_strip(tile_rows, width, i + tile_rows, weights + i * BLOCK, BLOCK, 1, right, width, out + (size_t)i * width,
                   width, add);
  }
}

static inline float row_sum(const float* row, int last) {
  Vec total{};
  for (int j = 0; j <= last; j += LANES) total += load(row + j);
  return sum_of(total);
}

// Rows of a causal block before normalisation, in `out` and `normaliser`: the keys of the state (with `has_state`), and
// the block's own, j <= i. `transposed` are the block's key features transposed, `weights` is a buffer for n x n.
static void causal_rows(int count, const FeatureBlock& queries, const FeatureBlock& keys, const float* transposed,
                        const float* value, const State& state, bool has_state, float* weights, float* out,
                        float* normaliser) {
  const int m_row = state.rows, e_row = state.columns;
  if (has_state) read_state(count, queries, state, out, normaliser);
  if (count > 1) {
    lower_product(count, m_row, queries.features, keys.features, transposed, weights);
  } else {
    weights[0] = dot(queries.features, keys.features, m_row);
    for (int j = 1; j < LANES; ++j) weights[j] = 0.0f;
  }
  multiply_lower(count, weights, value, e_row, out, has_state);
  for (int t = 0; t < count; ++t) normaliser[t] = (has_state ? normaliser[t] : 0.0f) + row_sum(weights + t * BLOCK, t);
}

// Segments of f numbers <-> padded segments.
static void unpack_state(const Map& map, int e, const float* kv, const float* k, State& state) {
  state.clear();
  for (int p = 0; p < map.parts; ++p)
    for (int f = 0; f < map.width; ++f) {
      const int from = p * map.width + f, to = p * map.segment() + f;
      memcpy(state.kv + (size_t)to * state.columns, kv + (size_t)from * e, e * sizeof(float));
      state.k[to] = k[from];
    }
}

static void pack_state(const Map& map, int e, const State& state, float* kv, float* k) {
  for (int p = 0; p < map.parts; ++p)
    for (int f = 0; f < map.width; ++f) {
      const int to = p * map.width + f, from = p * map.segment() + f;
      memcpy(kv + (size_t)to * e, state.kv + (size_t)from * state.columns, e * sizeof(float));
      k[to] = state.k[from];
    }
}

// How many of the tokens that follow can share one reference: log scales up to the last stay within SAFE_RANGE of the
// running maximum at the first, so that no row's weights vanish against a key that it does not see.
static int shared_reference(const float* scale, int count, float carried, float& reference) {
  int t = 0;
  reference = carried;
  while (t < count && reference == -INFINITY) reference = scale[t++];  // rows up to the first key have no weight anyway
  const float limit = (t == 0 && scale[0] > reference ? scale[0] : reference) + SAFE_RANGE;
  for (; t < count; ++t) {
    if (scale[t] > limit) return t;
    reference = scale[t] > reference ? scale[t] : reference;
  }
  return count;
}

// Reads a block of keys, makes as many tokens as possible and the state relative to one reference, and returns the number
// of these tokens. The scale of the state is that reference afterwards.
template <typename T>
static int read_causal_keys(const Call& c, long b, long g, long start, int count, const uint8_t* mask, FeatureBlock& keys,
                            State& state) {
  keys.read<T>(c.key, b, g, start, count, c.size, mask);
  if (!keys.map->scaled()) return count;
  float reference;
  count = shared_reference(keys.scale, count, state.scale, reference);
  if (reference != -INFINITY) {
    state.rescale(reference);
    keys.scale_rows(count, reference);
  }
  return count;
}

template <typename T>
static int causal(const Call& c) {
  const int x_row = padded(c.size), e_row = padded(c.value_size), m_row = c.key_map.features();
  const long repeats = c.heads / c.groups;
  const bool has_decay = c.decay.data != nullptr;
  const size_t workspace_floats = FeatureBlock::floats(c.key_map, x_row) + FeatureBlock::floats(c.query_map, x_row) +
                                  State::floats(m_row, e_row) + (size_t)BLOCK * (2 * e_row + m_row + BLOCK + 1) + 512 +
                                  (has_decay ? Decay::floats(m_row, BLOCK) : 0);
  return run_parallel<T>(c.threads, workspace_floats, [&](Workspace& workspace) {
    FeatureBlock keys(c.key_map, x_row, workspace), queries(c.query_map, x_row, workspace);
    State state(m_row, e_row, workspace);
    float *value = workspace.take(BLOCK * e_row), *out = workspace.take(BLOCK * e_row),
          *transposed = workspace.take((size_t)BLOCK * m_row);
    float *weights = workspace.take(BLOCK * BLOCK), *normaliser = workspace.take(BLOCK);
    Decay decay(m_row, has_decay ? BLOCK : 0, workspace);
#pragma omp for schedule(dynamic)
    for (long stream = 0; stream < c.batch * c.groups; ++stream) {
      const long b = stream / c.groups, g = stream % c.groups;
      const uint8_t* mask = c.mask ? c.mask + b * c.mask_batch : nullptr;
      const long kv_size = (long)c.key_map.parts * c.key_map.width * c.value_size,
                 k_size = (long)c.key_map.parts * c.key_map.width;
      bool has_state = c.state != nullptr;
      if (has_state) {
        unpack_state(c.key_map, c.value_size, c.state + stream * kv_size, c.state_sum + stream * k_size, state);
        if (c.state_scale) state.scale = c.state_scale[stream];
      } else {
        state.clear();
      }
      for (long start = 0; start < c.length;) {
        int count = (int)(c.length - start < BLOCK ? c.length - start : BLOCK);
        count = read_causal_keys<T>(c, b, g, start, count, mask, keys, state);
        read_rows<T>(c.value, b, g, start, count, c.value_size, mask, value, e_row);
        if (has_decay) {
          decay.read(c.decay, b, g, start, count, c.key_map.width, mask);
          decay.apply_to_keys(keys.features, count);
          if (has_state) decay.move_to_middle(state.kv, state.k, e_row);
        }
        if (count > 1) transpose_tokens(count, m_row, keys.features, transposed);
        for (long r = 0; r < repeats; ++r) {
          const long h = g * repeats + r;
          queries.read<T>(c.query, b, h, start, count, c.size, nullptr);
          if (has_decay) decay.apply_to_queries(queries.features, count);
          causal_rows(count, queries, keys, transposed, value, state, has_state, weights, out, normaliser);
          if (c.normaliser) memcpy(c.normaliser + (b * c.heads + h) * c.length + start, normaliser, count * sizeof(float));
          divide_rows<T>(c, b, h, start, count, out, normaliser);
        }
        start += count;
        if (start < c.length || c.next_state) {  // else the state is not read again
          state.add(keys.features, value, count);
          if (has_decay) decay.move_to_end(state.kv, state.k, e_row, count);
        }
        has_state = true;
      }
      if (c.next_state) {
        pack_state(c.key_map, c.value_size, state, c.next_state + stream * kv_size, c.next_sum + stream * k_size);
        if (c.next_scale) c.next_scale[stream] = state.scale;
      }
    }
  });
}

}  // namespace hla
