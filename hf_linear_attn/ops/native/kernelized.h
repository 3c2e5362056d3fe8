// Kernelized attention: o_i = phi(q_i) S / phi(q_i) z with S = sum_j phi(k_j) v_j, z = sum_j phi(k_j).
//
// One pass over blocks of 64 tokens; features live in one block's buffer only. Every (row, key-value head) is a task of its
// own, and long bidirectional inputs are cut into segments of a fixed length: results depend neither on the number of
// threads nor on the rest of the batch.

#pragma once

#include "decay.h"
#include "feature_maps.h"

namespace hla {

constexpr float FLOOR = 1e-30f;      // of a normaliser; see ops/common.py
constexpr long SEGMENT = 2048;       // tokens whose state one task adds up
constexpr float SAFE_RANGE = 15.0f;  // of log scales that one common reference serves

// The arguments of a kernel, as ops/native/binding.py fills them by name; what a kernel does not use is null or zero.
struct Call {
  Strided query, key, value, out;                                                      // [B, H | G, L | S, d | e]
  Strided out_gradient, query_gradient, key_gradient, value_gradient;                  // as these
  Strided mix;                                                                         // [B, H, L], see below
  Strided sink_key, sink_value, sink_key_gradient, sink_value_gradient;                // [B, G, s, d | e], see below
  Strided decay;                                                                       // [B, G, L, m], see below
  Strided near_bias, sink_bias;                                                        // [B, H, L, 2 w - 1 | s], see below
  Strided row_behind, key_before, key_behind;                                          // [B, H, L], [B, G, S], see below
  const uint8_t* mask;                                                                 // [B | 1, S], 1: a token; null: all
  const float *kv, *k_sum, *log_scale;                                                 // [B, G, m, e], [B, G, m], [B, G]
  float *next_kv, *next_k_sum, *next_log_scale;                                        // of the causal form
  float *normaliser, *top;                                                             // [B, H, L]: for the backward pass
  float *query_weight_gradient, *query_bias_gradient;                                  // [B, H, d, padded f], [B, H, padded f]
  float *key_weight_gradient, *key_bias_gradient;                                      // [B, G, ...]
  float* mix_gradient;                                                                 // [B, H, L]
  const float* mix_weight;                                                             // u [H, padded d], see below
  const float* model_sink;                                                             // [H], see below
  const int64_t *skip, *sink_position;                                                 // [B], [B, s]
  const int64_t* count;                                                                // [B]: tokens before this one
  int64_t* next_count;                                                                 // with this one
  const void *ring_key, *ring_value;                                                   // [B, G, w, d | e]
  const uint8_t* ring_mask;                                                            // [B, w]
  void *next_ring_key, *next_ring_value;
  uint8_t* next_ring_mask;
  const int64_t* head_index;                                                           // [G], see below
  Map query_map, key_map;
  int64_t mask_batch, batch, heads, groups, length, keys;
  int64_t offset, sinks, ring_capacity;                                                // the key that row 0 is; s; see below
  int32_t size, value_size, dtype, threads;                                            // d, e, ...
  int32_t window, two_sided, int8_rows;                                                // w; whether also distances > -w; below
  float scaling, mix_bound, saturation, softcap;                                       // tau, ..., N, see below
  // Log decays of the causal form with precomputed features, in float32.
  // Windows: the first `skip` keys are no tokens. Log mixing weights are mix + clip(sqrt(tau) u.q, +-bound), without u
  // `mix`; for one token less log(1 + n / N), n of its `count` tokens lying outside, without the last term if N is 0.
  // Sinks are exact for every row: those at `sink_position`, counted in rows. Two-sided: the first s tokens and the last s,
  // whose own rows are exact, too. One token: the first ones of each row, contiguous; the new one is added to them while
  // there are fewer. Its state and ring may lie where the next ones do.
  // Windows of models with terms in their logits: logits are within `softcap`, if it is not 0, and then row i's logit at
  // distance d is increased by number w - 1 - d of `near_bias`, before and behind which there are 64 more numbers (MARGIN in
  // terms.py), and that of sink j by number j of `sink_bias`, in whole vectors. Features of far keys are multiplied by
  // `key_before` or `key_behind`, those of rows for keys behind them by `row_behind`. `model_sink` is one more logit of every
  // row of a head, without a value. All in float32.
  // With `int8_rows` a step's ring, sinks and exact heads are rows of bytes (`Int8`).
  // A ring has memory for `ring_capacity` tokens, so that the next one can begin a token further.
  // Key-value head g of a step reads and writes head `head_index[g]` of query, key, value and out. Exact heads have their
  // keys and values in the memory of a ring of `ring_capacity` tokens, and `keys` of them with the new one.

  int x_row() const { return padded(size); }
  int e_row() const { return padded(value_size); }
  int m_row() const { return key_map.features(); }
  long repeats() const { return heads / groups; }
  long num_features() const { return (long)key_map.parts * key_map.width; }
  const uint8_t* mask_of(long b) const { return mask ? mask + b * mask_batch : nullptr; }

  // A tensor of one token whose g-th head, or `repeats` query heads of it, is that of `head_index`.
  template <typename T>
  Strided select_head(Strided tensor, long g, long repeats) const {
    if (head_index) tensor.data = static_cast<T*>(tensor.data) + (head_index[g] - g) * repeats * tensor.head;
    return tensor;
  }
};

// What turns numbers relative to one log scale into numbers relative to a higher one.
static inline float rescale_factor(float lower, float higher) {
  return lower == higher ? 1.0f : lower == -INFINITY ? 0.0f : std::exp(lower - higher);
}

// total += sum_t rows[t], each times scale[t] if there is one.
static void add_rows(const float* rows, int width, int count, float* total, const float* scale = nullptr) {
  for (int j = 0; j < width; j += LANES) {
    Vec sum{};
    for (int t = 0; t < count; ++t) sum += load(rows + (size_t)t * width + j) * (scale ? scale[t] : 1.0f);
    store(total + j, load(total + j) + sum);
  }
}

// S [m, e], z [m] behind it, and the log scale that both are relative to.
struct State {
  float *kv, *k;
  float scale = -INFINITY;
  int rows, columns;

  State(const Call& c, Workspace& workspace)
      : kv(workspace.take((size_t)c.m_row() * (c.e_row() + 1))),
        k(kv + (size_t)c.m_row() * c.e_row()),
        rows(c.m_row()),
        columns(c.e_row()) {}

  long numbers() const { return (long)rows * (columns + 1); }
  void clear() {
    memset(kv, 0, numbers() * sizeof(float));
    scale = -INFINITY;
  }

  // Makes the state relative to `reference`, which is at least the present scale.
  void rescale(float reference) {
    if (reference == scale) return;
    scale_all(kv, numbers(), rescale_factor(scale, reference));
    scale = reference;
  }

  void add(const float* features, const float* value, int count) {
    multiply(rows, columns, count, features, 1, rows, value, columns, kv, columns, true);
    add_rows(features, rows, count, k);
  }

  void merge(const State& other) {
    if (other.scale > scale) rescale(other.scale);
    add_scaled(other.kv, numbers(), rescale_factor(other.scale, scale), kv);
  }
  void set_sum(const State& first, const State& second) {
    for (long i = 0; i < numbers(); i += LANES) store(kv + i, load(first.kv + i) + load(second.kv + i));
  }
};

static inline float max_of_values(const float* values, int count) {
  float top = -INFINITY;
  for (int t = 0; t < count; ++t) top = values[t] > top ? values[t] : top;
  return top;
}

template <typename T>
static void sum_keys(const Call& c, long b, long g, long from, long to, FeatureBlock& keys, float* value, State& state) {
  for (long start = from; start < to; start += BLOCK) {
    const int count = (int)std::min<long>(to - start, BLOCK);
    keys.read<T>(c.key, b, g, start, count, c.mask_of(b));
    read_rows<T>(c.value, b, g, start, count, c.value_size, c.mask_of(b), value, c.e_row());
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
static void divide_rows(const Call& c, const Strided& out, long b, long h, long start, int count, float* numerator,
                        const float* denominator) {
  const int row = c.e_row();
  for (int t = 0; t < count; ++t)
    scale_all(numerator + (size_t)t * row, row, 1.0f / (denominator[t] > FLOOR ? denominator[t] : FLOOR));
  write_rows<T>(out, b, h, start, count, c.value_size, numerator, row);
}

// Numerators and normalisers of rows from the keys of the state.
static void read_state(int count, const FeatureBlock& queries, const State& state, float* out, float* normaliser) {
  multiply(count, state.columns, state.rows, queries.features, state.rows, 1, state.kv, state.columns, out, state.columns,
           false);
  for (int t = 0; t < count; ++t) normaliser[t] = dot(queries.features + (size_t)t * state.rows, state.k, state.rows);
}

// Transposes the tokens [n, width] for `lower_product`, unless tiles serve (which read them as they are).
static void transpose_tokens(int count, int width, const float* tokens, float* transposed) {
  if (!tiles_for(count)) transpose(count, width, tokens, width, transposed, BLOCK);
}

// Lower or upper triangle (with the diagonal) of rows [n, m] columns [num_columns, m]^T, zeros elsewhere. transposed: the
// columns, by `transpose_tokens`.
static void triangle_product(bool upper, int count, int num_columns, int depth, const float* rows, const float* columns,
                             const float* transposed, float* out) {
  TileProducts* tiles = tiles_for(count);  // all columns: skipping the other half would cost more
  if (tiles) tiles->multiply(count, padded(num_columns), depth, rows, depth, 1, columns, depth, out, BLOCK, false, true);
  for (int i = 0; i < count; i += TILE_ROWS) {
    const int tile_rows = std::min(count - i, TILE_ROWS), begin = upper ? i / LANES * LANES : 0;
    const int end = padded(upper || tiles ? num_columns : i + tile_rows);
    if (!tiles)
      multiply_strip(tile_rows, end - begin, depth, rows + (size_t)i * depth, depth, 1, transposed + begin, BLOCK,
                     out + i * BLOCK + begin, BLOCK, false);
    for (int r = i; r < i + tile_rows; ++r) {
      const int first = upper ? 0 : r + 1;
      memset(out + r * BLOCK + first, 0, ((upper ? r : end) - first) * sizeof(float));
    }
  }
}

// out [n, width] (+)= lower triangle [n, n] right [n, width], of which only the lower part is read.
static void multiply_lower(int count, const float* weights, const float* right, int width, float* out, bool add) {
  if (tiles_for(count)) return multiply(count, width, count, weights, BLOCK, 1, right, width, out, width, add);
  for (int i = 0; i < count; i += TILE_ROWS) {
    const int tile_rows = std::min(count - i, TILE_ROWS);
    multiply_strip(tile_rows, width, i + tile_rows, weights + i * BLOCK, BLOCK, 1, right, width, out + (size_t)i * width,
                   width, add);
  }
}

// out [n, width] += upper triangle [n, depth] right [depth, width], with these strides of weights.
static void add_multiply_upper(int count, int depth, const float* weights, long row, long step, const float* right,
                               int width, float* out) {
  if (tiles_for(count)) return multiply(count, width, depth, weights, row, step, right, width, out, width, true);
  for (int i = 0; i < count; i += TILE_ROWS)
    multiply_strip(std::min(count - i, TILE_ROWS), width, depth - i, weights + i * (row + step), row, step,
                   right + (size_t)i * width, width, out + (size_t)i * width, width, true);
}

static inline float row_sum(const float* row, int last) {
  Vec total{};
  for (int j = 0; j <= last; j += LANES) total += load(row + j);
  return sum_of(total);
}

template <typename T>
static int bidirectional(const Call& c) {
  const long segments = std::max(1l, (long)(c.keys + SEGMENT - 1) / SEGMENT), streams = c.batch * c.groups;
  const long pieces = (c.length + SEGMENT - 1) / SEGMENT;
  int failed = 0;
  Workspace shared(failed);
  std::vector<State> totals;
  for (long task = 0; task < streams * segments; ++task) totals.emplace_back(c, shared);
  if (failed) return 1;
  return run_parallel<T>(c.threads, [&](Workspace& workspace) {
    FeatureBlock keys(c.key_map, workspace), queries(c.query_map, workspace);
    float *block = workspace.take(BLOCK * c.e_row()), *normaliser = workspace.take(BLOCK);
    if (!workspace.ready()) return;
#pragma omp for schedule(dynamic)
    for (long task = 0; task < streams * segments; ++task) {
      const long stream = task / segments, start = task % segments * SEGMENT;
      totals[task].clear();
      sum_keys<T>(c, stream / c.groups, stream % c.groups, start, std::min<long>(start + SEGMENT, c.keys), keys, block,
                  totals[task]);
    }
#pragma omp for schedule(static)
    for (long stream = 0; stream < streams; ++stream)
      for (long segment = 1; segment < segments; ++segment)
        totals[stream * segments].merge(totals[stream * segments + segment]);
#pragma omp for schedule(dynamic)
    for (long task = 0; task < c.batch * c.heads * pieces; ++task) {
      const long b = task / pieces / c.heads, h = task / pieces % c.heads, first = task % pieces * SEGMENT;
      const State& state = totals[(b * c.groups + h / c.repeats()) * segments];
      const long stop = std::min<long>(first + SEGMENT, c.length);
      for (long start = first; start < stop; start += BLOCK) {
        const int count = (int)std::min<long>(stop - start, BLOCK);
        queries.read<T>(c.query, b, h, start, count, nullptr);
        read_state(count, queries, state, block, normaliser);
        divide_rows<T>(c, c.out, b, h, start, count, block, normaliser);
      }
    }
  });
}

// Rows of a causal block before normalisation, in `out` and `normaliser`: the keys of the state (with `has_state`), and
// the block's own, j <= i. `transposed` are the block's key features transposed, `weights` is a buffer for n x n.
static void causal_rows(int count, const FeatureBlock& queries, const FeatureBlock& keys, const float* transposed,
                        const float* value, const State& state, bool has_state, float* weights, float* out,
                        float* normaliser) {
  const int m_row = state.rows, e_row = state.columns;
  if (has_state) read_state(count, queries, state, out, normaliser);
  if (count > 1) {
    triangle_product(false, count, count, m_row, queries.features, keys.features, transposed, weights);
  } else {
    weights[0] = dot(queries.features, keys.features, m_row);
    for (int j = 1; j < LANES; ++j) weights[j] = 0.0f;
  }
  multiply_lower(count, weights, value, e_row, out, has_state);
  for (int t = 0; t < count; ++t) normaliser[t] = (has_state ? normaliser[t] : 0.0f) + row_sum(weights + t * BLOCK, t);
}

// The state before the call -> padded segments; whether there is one.
static bool unpack_state(const Call& c, long stream, State& state) {
  state.clear();
  if (!c.kv) return false;
  for (long f = 0, from = stream * c.num_features(); f < c.num_features(); ++f, ++from) {
    const long to = c.key_map.column_of(f);
    memcpy(state.kv + to * state.columns, c.kv + from * c.value_size, c.value_size * sizeof(float));
    state.k[to] = c.k_sum[from];
  }
  if (c.log_scale) state.scale = c.log_scale[stream];
  return true;
}

static void pack_state(const Call& c, long stream, const State& state) {
  for (long f = 0, to = stream * c.num_features(); f < c.num_features(); ++f, ++to) {
    const long from = c.key_map.column_of(f);
    memcpy(c.next_kv + to * c.value_size, state.kv + from * state.columns, c.value_size * sizeof(float));
    c.next_k_sum[to] = state.k[from];
  }
  if (c.next_log_scale) c.next_log_scale[stream] = state.scale;
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
static int read_causal_keys(const Call& c, long b, long g, long start, int count, FeatureBlock& keys, State& state) {
  keys.read<T>(c.key, b, g, start, count, c.mask_of(b));
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
  const int e_row = c.e_row(), m_row = c.m_row();
  const bool has_decay = c.decay.data != nullptr;
  return run_parallel<T>(c.threads, [&](Workspace& workspace) {
    FeatureBlock keys(c.key_map, workspace), queries(c.query_map, workspace);
    State state(c, workspace);
    float *value = workspace.take(BLOCK * e_row), *out = workspace.take(BLOCK * e_row);
    float *transposed = workspace.take((size_t)BLOCK * m_row), *weights = workspace.take(BLOCK * BLOCK);
    float* normaliser = workspace.take(BLOCK);
    Decay decay(m_row, has_decay ? BLOCK : 0, workspace);
    if (!workspace.ready()) return;
#pragma omp for schedule(dynamic)
    for (long stream = 0; stream < c.batch * c.groups; ++stream) {
      const long b = stream / c.groups, g = stream % c.groups;
      bool has_state = unpack_state(c, stream, state);
      for (long start = 0; start < c.length;) {
        int count = (int)std::min<long>(c.length - start, BLOCK);
        count = read_causal_keys<T>(c, b, g, start, count, keys, state);
        read_rows<T>(c.value, b, g, start, count, c.value_size, c.mask_of(b), value, e_row);
        if (has_decay) {
          decay.read(c.decay, b, g, start, count, c.key_map.width, c.mask_of(b));
          decay.apply_to_keys(keys.features, count);
          if (has_state) decay.move_to_middle(state.kv, e_row);
        }
        if (count > 1) transpose_tokens(count, m_row, keys.features, transposed);
        for (long h = g * c.repeats(); h < (g + 1) * c.repeats(); ++h) {
          queries.read<T>(c.query, b, h, start, count, nullptr);
          if (has_decay) decay.apply_to_queries(queries.features, count);
          causal_rows(count, queries, keys, transposed, value, state, has_state, weights, out, normaliser);
          if (c.normaliser) memcpy(c.normaliser + (b * c.heads + h) * c.length + start, normaliser, count * sizeof(float));
          divide_rows<T>(c, c.out, b, h, start, count, out, normaliser);
        }
        start += count;
        if (start < c.length || c.next_kv) {  // else the state is not read again
          state.add(keys.features, value, count);
          if (has_decay) decay.move_to_end(state.kv, e_row, count);
        }
        has_state = true;
      }
      if (c.next_kv) pack_state(c, stream, state);
    }
  });
}

}  // namespace hla
