// Exact weights inside a window and for sinks, kernelized ones beyond it, one normaliser (see ops/windowed.py), for maps
// without a log scale:
//     w_ij = exp(tau q_i.k_j - top_i)   inside,  top_i the largest exponent there
//     w_ij = mix phi(q_i).phi(k_j)      beyond
//
// Rows are taken in blocks of n = 64. The far part is causal attention over keys delayed by `window`: with a block go the
// keys from `window` before it, of which row t sees those up to its own position (a triangle), and the state of all
// earlier ones. With a two-sided window the keys from `window` behind it are added, of which row t sees those from its own
// position on, and the state of all later ones: a first pass from the end saves these for every block.
// The near part is a band of an n x (n + window) matrix, of which only vectors that touch the band are computed, and behind
// it the sinks' columns, where a row sees those that are outside of its window. As far keys sinks have no features.

#pragma once

#include <climits>
#include <initializer_list>

#include "backward.h"

namespace hla {

// One row of the batch and key-value head: keys, values and which are tokens, from either end.
struct Stream {
  long b, g, rows, keys, offset;
  bool backwards = false;
  // Which keys are tokens, and which of these are no sinks; with a margin on either side, so that no index needs a check.
  std::vector<uint8_t> flags, far_flags;
  long margin;

  Stream(const Call& c, long stream)
      : b(stream / c.groups),
        g(stream % c.groups),
        rows(c.length),
        keys(c.keys),
        offset(c.offset),
        margin(2 * c.window + 4 * BLOCK) {
    flags.assign(keys + 2 * margin, 0);
    const uint8_t* mask = c.mask_of(b);
    for (long j = c.skip ? c.skip[b] : 0; j < keys; ++j) flags[margin + j] = mask ? mask[j] : 1;
    if (!c.sinks) return;
    far_flags = flags;
    for (long j = 0; j < c.sinks; ++j) {
      const long key = c.sink_position[b * c.sinks + j] + offset;
      if (key >= 0 && key < keys) far_flags[margin + key] = 0;
    }
  }
  const uint8_t* valid() const { return flags.data() + margin; }
  const uint8_t* far() const { return (far_flags.empty() ? flags : far_flags).data() + margin; }

  // Reads rows and keys backwards: token j becomes token keys - 1 - j.
  void reverse() {
    std::reverse(flags.begin(), flags.end());
    std::reverse(far_flags.begin(), far_flags.end());
    backwards = !backwards;
  }
  // Position of a row in the sequence.
  long position_of(long row) const { return backwards ? rows - 1 - row : row; }
  float log_mix(const Call& c, long h, long row) const {
    return static_cast<const float*>(c.mix.data)[b * c.mix.batch + h * c.mix.head + position_of(row) * c.mix.token];
  }
};

// What the query x of head h adds to its log mixing weight; root: of the scaling.
static inline float query_mix(const Call& c, long h, float root, const float* x, int x_row) {
  if (!c.mix_weight) return 0.0f;
  const float part = dot(x, c.mix_weight + h * x_row, x_row) * root;
  return part < -c.mix_bound ? -c.mix_bound : part > c.mix_bound ? c.mix_bound : part;
}

// The matrix products and exponentials of the near part of one block: the band's columns, then the sinks'.
struct Band {
  int window, reach, columns, sinks, x_row, e_row;  // reach: last column of row t is t + reach
  bool has_backward;
  float *key, *value, *key_t, *value_t, *weights, *slopes, *bias;
  float *sink_key, *sink_key_t, *sink_value, *sink_value_t, *sink_key_gradient, *sink_value_gradient;
  const int64_t* sink_position;     // in rows of the sequence
  int32_t *seen_from, *seen_until;  // rows of the block from which on, and up to which, a sink is outside of the window

  // Some columns of the weights with their keys and values.
  struct Columns {
    int begin, end, row;  // row: of the transposed keys and values
    const float *key, *key_t, *value, *value_t;
    int size() const { return end - begin; }
  };
  // Columns of the band, and those of the sinks if there are any.
  struct Parts {
    Columns part[2];
    int count;
    const Columns* begin() const { return part; }
    const Columns* end() const { return part + count; }
  };

  static int columns_of(const Call& c) { return padded(c.window + BLOCK + (c.two_sided ? c.window : 0)); }
  Band(const Call& c, Workspace& workspace, bool backward)
      : window(c.window),
        reach(c.two_sided ? 2 * c.window - 1 : c.window),
        columns(columns_of(c)),
        sinks(padded((int)c.sinks)),
        x_row(c.x_row()),
        e_row(c.e_row()),
        has_backward(backward),
        key(workspace.take((size_t)columns * x_row)),
        value(workspace.take((size_t)columns * e_row)),
        key_t(workspace.take((size_t)columns * x_row)),
        value_t(workspace.take((size_t)columns * e_row)),
        weights(workspace.take((size_t)(columns + sinks) * BLOCK)),
        slopes(workspace.take((size_t)(columns + sinks) * BLOCK)),
        bias(workspace.take(columns + sinks)),
        sink_key(workspace.take((size_t)sinks * x_row)),
        sink_key_t(workspace.take((size_t)sinks * x_row)),
        sink_value(workspace.take((size_t)sinks * e_row)),
        sink_value_t(workspace.take((size_t)sinks * e_row)),
        sink_key_gradient(workspace.take((size_t)sinks * x_row)),
        sink_value_gradient(workspace.take((size_t)sinks * e_row)),
        seen_from(reinterpret_cast<int32_t*>(workspace.take(sinks))),
        seen_until(reinterpret_cast<int32_t*>(workspace.take(sinks))) {}

  // The sinks of a row of the batch, with zeros behind them; their gradients begin at zero.
  template <typename T>
  void read_sinks(const Call& c, const Stream& s) {
    if (!sinks) return;
    sink_position = c.sink_position + s.b * c.sinks;
    for (float* matrix : {sink_key, sink_key_gradient}) memset(matrix, 0, (size_t)sinks * x_row * sizeof(float));
    for (float* matrix : {sink_value, sink_value_gradient}) memset(matrix, 0, (size_t)sinks * e_row * sizeof(float));
    read_rows<T>(c.sink_key, s.b, s.g, 0, (int)c.sinks, c.size, nullptr, sink_key, x_row);
    read_rows<T>(c.sink_value, s.b, s.g, 0, (int)c.sinks, c.value_size, nullptr, sink_value, e_row);
    transpose(sinks, x_row, sink_key, x_row, sink_key_t, sinks);
    transpose(sinks, e_row, sink_value, e_row, sink_value_t, sinks);
  }

  // Keys and values from `window` before the block's first row on.
  template <typename T>
  void read(const Call& c, const Stream& s, long start, int count) {
    const uint8_t* valid = s.valid();
    const long first = s.offset + start;
    columns = padded(window + count + (c.two_sided ? window : 0));
    read_rows<T>(c.key, s.b, s.g, first - window, columns, c.size, valid, key, x_row);
    read_rows<T>(c.value, s.b, s.g, first - window, columns, c.value_size, valid, value, e_row);
    for (int j = 0; j < columns; ++j) bias[j] = valid[first - window + j] ? 0.0f : -INFINITY;
    for (int j = 0; j < sinks; ++j) {
      bias[columns + j] = j < c.sinks ? 0.0f : -INFINITY;
      const int64_t distance = j < c.sinks ? std::max<int64_t>(sink_position[j] - start, INT_MIN / 2) : 0;
      seen_from[j] = (int32_t)(distance + window);
      seen_until[j] = c.two_sided ? (int32_t)(distance - window) : -1;
    }
    if (tiles_for(count)) return;
    transpose(columns, x_row, key, x_row, key_t, columns);
    if (has_backward) transpose(columns, e_row, value, e_row, value_t, columns);
  }

  int stride() const { return columns + sinks; }  // of weights and slopes

  // Columns that some row of the tile at i touches, in whole vectors.
  int begin_of(int i) const { return (i + 1) / LANES * LANES; }
  int end_of(int i, int tile_rows) const { return std::min(padded(i + tile_rows + reach), columns); }

  // Columns begin ... end - 1 of the band, and the sinks' behind it.
  Parts parts(int begin, int end) const {
    return {
        {{begin, end, columns, key + (size_t)begin * x_row, key_t + begin, value + (size_t)begin * e_row, value_t + begin},
         {columns, columns + sinks, sinks, sink_key, sink_key_t, sink_value, sink_value_t}},
        sinks ? 2 : 1};
  }

  // Those of the sinks from j on that are outside of the window of row t of the block.
  VecInt seen_sinks(int t, int j) const {
    VecInt from, until;
    memcpy(&from, seen_from + j, sizeof from);
    memcpy(&until, seen_until + j, sizeof until);
    return (from <= t) | (until >= t);
  }

  // exp(tau q.k - top) of all rows; top is computed, or with `known` taken from the forward pass.
  void exponentials(int count, const float* query, float scaling, bool known, float* top) const {
    TileProducts* tiles = tiles_for(count);  // all columns: skipping those outside of the band would cost more
    if (tiles)
      for (const Columns& part : parts(0, columns))
        tiles->multiply(count, part.size(), x_row, query, x_row, 1, part.key, x_row, weights + part.begin, stride(), false,
                        true);
    for (int i = 0; i < count; i += TILE_ROWS) {
      const int tile_rows = std::min(count - i, TILE_ROWS);
      const Parts touched = parts(begin_of(i), end_of(i, tile_rows));
      if (!tiles)
        for (const Columns& part : touched)
          multiply_strip(tile_rows, part.size(), x_row, query + i * x_row, x_row, 1, part.key_t, part.row,
                         weights + (size_t)i * stride() + part.begin, stride(), false);
      for (int t = i; t < i + tile_rows; ++t) {
        float* row = weights + (size_t)t * stride();
        VecInt lane;
        for (int j = 0; j < LANES; ++j) lane[j] = touched.part[0].begin + j;
        Vec maxima = splat(-INFINITY);
        const auto add_logits = [&](int j, VecInt inside) {
          const Vec logit = select(inside, load(row + j) * scaling + load(bias + j), splat(-INFINITY));
          store(row + j, logit);
          maxima = larger(maxima, logit);
        };
        for (int j = touched.part[0].begin; j < touched.part[0].end; j += LANES, lane += LANES)
          add_logits(j, (lane > t) & (lane <= t + reach));
        for (int j = 0; j < sinks; j += LANES) add_logits(columns + j, seen_sinks(t, j));
        if (!known) top[t] = max_of(maxima);
      }
      for (int t = i; t < i + tile_rows; ++t)  // a separate pass, because it waits for the maxima
        for (const Columns& part : touched) {
          float* row = weights + (size_t)t * stride();
          const bool any = top[t] != -INFINITY;  // key in the window
          for (int j = part.begin; j < part.end; j += LANES) store(row + j, any ? exp_of(load(row + j) - top[t]) : Vec{});
        }
    }
  }

  // Zeros in the rows outside of the columns that their tiles touch.
  void clear_outside(int count, float* matrix) const {
    for (int t = 0; t < count; ++t) {
      const int i = t / TILE_ROWS * TILE_ROWS, begin = begin_of(i), end = end_of(i, std::min(count - i, TILE_ROWS));
      float* row = matrix + (size_t)t * stride();
      memset(row, 0, begin * sizeof(float));
      memset(row + end, 0, (columns - end) * sizeof(float));
    }
  }

  // Adds the near part to numerators and normalisers.
  void add_to(int count, float* out, float* normaliser) const {
    TileProducts* tiles = tiles_for(count);
    if (tiles) {
      clear_outside(count, weights);
      for (const Columns& part : parts(0, columns))
        multiply(count, e_row, part.size(), weights + part.begin, stride(), 1, part.value, e_row, out, e_row, true);
    }
    for (int i = 0; i < count; i += TILE_ROWS) {
      const int tile_rows = std::min(count - i, TILE_ROWS);
      for (const Columns& part : parts(begin_of(i), end_of(i, tile_rows))) {
        if (!tiles)
          multiply_strip(tile_rows, e_row, part.size(), weights + (size_t)i * stride() + part.begin, stride(), 1, part.value,
                         e_row, out + (size_t)i * e_row, e_row, true);
        for (int t = i; t < i + tile_rows; ++t) {
          Vec total{};
          for (int j = part.begin; j < part.end; j += LANES) total += load(weights + (size_t)t * stride() + j);
          normaliser[t] += sum_of(total);
        }
      }
    }
  }

  // Gradients through the near weights: added to those of the rows' queries, and of the columns' keys and values.
  void backward(int count, const float* query, float scaling, const BackwardBuffers& rows, float* query_gradient,
                float* key_gradient, float* value_gradient) const {
    TileProducts* tiles = tiles_for(count);
    if (tiles)
      for (const Columns& part : parts(0, columns))
        tiles->multiply(count, part.size(), e_row, rows.gradient, e_row, 1, part.value, e_row, slopes + part.begin, stride(),
                        false, true);
    clear_outside(count, weights);
    clear_outside(count, slopes);
    for (int i = 0; i < count; i += TILE_ROWS) {
      const int tile_rows = std::min(count - i, TILE_ROWS);
      const Parts touched = parts(begin_of(i), end_of(i, tile_rows));
      if (!tiles)
        for (const Columns& part : touched)
          multiply_strip(tile_rows, part.size(), e_row, rows.gradient + (size_t)i * e_row, e_row, 1, part.value_t, part.row,
                         slopes + (size_t)i * stride() + part.begin, stride(), false);
      for (int t = i; t < i + tile_rows; ++t) {
        float *weight = weights + (size_t)t * stride(), *slope = slopes + (size_t)t * stride();
        Vec total{}, ties{};
        for (const Columns& part : touched)
          for (int j = part.begin; j < part.end; j += LANES) {
            const Vec product = load(weight + j) * (load(slope + j) + rows.normaliser_gradient[t]);
            store(slope + j, product);
            total += product;
            ties += select(load(weight + j) >= 1.0f, splat(1.0f), Vec{});
          }
        // Near weights are relative to the largest exponent, far weights are not: its gradient is shared by the ties.
        const float shared = sum_of(total) / std::max(sum_of(ties), 1.0f);
        for (const Columns& part : touched)
          for (int j = part.begin; j < part.end; j += LANES) {
            const Vec correction = select(load(weight + j) >= 1.0f, splat(shared), Vec{});
            store(slope + j, (load(slope + j) - correction) * scaling);
          }
      }
      if (!tiles)
        for (const Columns& part : touched)
          multiply_strip(tile_rows, x_row, part.size(), slopes + (size_t)i * stride() + part.begin, stride(), 1, part.key,
                         x_row, query_gradient + (size_t)i * x_row, x_row, true);
    }
    if (sinks) {
      multiply(sinks, x_row, count, slopes + columns, 1, stride(), query, x_row, sink_key_gradient, x_row, true);
      multiply(sinks, e_row, count, weights + columns, 1, stride(), rows.gradient, e_row, sink_value_gradient, e_row, true);
    }
    if (tiles) {
      for (const Columns& part : parts(0, columns))
        multiply(count, x_row, part.size(), slopes + part.begin, stride(), 1, part.key, x_row, query_gradient, x_row, true);
      multiply(columns, x_row, count, slopes, 1, stride(), query, x_row, key_gradient, x_row, true);
      multiply(columns, e_row, count, weights, 1, stride(), rows.gradient, e_row, value_gradient, e_row, true);
      return;
    }
    for (int j = 0; j < columns; j += TILE_ROWS) {
      const int tile_rows = std::min(columns - j, TILE_ROWS);
      const int from = std::max(0, j - reach), to = std::min(count, j + tile_rows);  // rows whose band meets these columns
      if (from >= to) continue;
      multiply_strip(tile_rows, x_row, to - from, slopes + (size_t)from * stride() + j, 1, stride(),
                     query + (size_t)from * x_row, x_row, key_gradient + (size_t)j * x_row, x_row, true);
      multiply_strip(tile_rows, e_row, to - from, weights + (size_t)from * stride() + j, 1, stride(),
                     rows.gradient + (size_t)from * e_row, e_row, value_gradient + (size_t)j * e_row, e_row, true);
    }
  }
};

// A block of far keys: features and values.
struct FarKeys {
  static constexpr long NOT_READ = LONG_MIN;
  FeatureBlock block;
  float *value, *transposed;
  long first = NOT_READ;    // position of the first one
  bool has_tokens = false;  // whether any is a token
  int num_read = 0;         // how many are read
  bool is_transposed = false;

  FarKeys(const Call& c, Workspace& workspace)
      : block(c.key_map, workspace),
        value(workspace.take(BLOCK * c.e_row())),
        transposed(workspace.take((size_t)BLOCK * c.m_row())) {}

  static bool any(const Stream& s, long from, int count) {
    const uint8_t* keys = s.far() + from;
    return std::any_of(keys, keys + count, [](uint8_t token) { return token != 0; });
  }

  template <typename T>
  void read(const Call& c, const Stream& s, long from, int count) {
    block.read<T>(c.key, s.b, s.g, from, count, s.far());
    read_rows<T>(c.value, s.b, s.g, from, count, c.value_size, s.far(), value, c.e_row());
    num_read = count;
    is_transposed = false;
  }

  // Transposes the features for the triangle of so many rows, unless tiles serve.
  void transpose_features(int rows) {
    if (is_transposed || tiles_for(rows)) return;
    transpose(num_read, block.row, block.features, block.row, transposed, BLOCK);
    is_transposed = true;
  }

  // Reads the keys, if there are any: beyond either end of a sequence there are none, which short inputs mostly consist of.
  template <typename T>
  void begin(const Call& c, const Stream& s, long from, int count) {
    first = from;
    has_tokens = any(s, from, count);
    if (has_tokens) read<T>(c, s, from, count);
  }
};

// Queries and their features, times the mixing weight; padding becomes a query of zeros.
template <typename T>
static void read_far_queries(const Call& c, const Stream& s, long h, long start, int count, FeatureBlock& queries) {
  queries.read<T>(c.query, s.b, h, start, count, s.valid() + s.offset, false);
  const float root = std::sqrt(c.scaling);
  for (int t = 0; t < count; ++t) {
    const float from_query = query_mix(c, h, root, queries.x + (long)t * queries.x_row, queries.x_row);
    scale_all(queries.features + (long)t * queries.row, queries.row, std::exp(s.log_mix(c, h, start + t) + from_query));
  }
}

// The far part of a block of rows: the state that all rows see, and blocks of keys of which each row sees some.
struct Far {
  bool two_sided;
  FeatureBlock queries;
  State state;  // over the keys before those of `before`
  float* weights;
  std::vector<FarKeys> blocks;
  FarKeys *before, *after;  // row t sees keys 0 ... t of the first block, and keys t ... of the second
  bool has_keys = false;    // whether the state holds any key
  // Two-sided: for every block of rows the state of the keys behind those of `after`, where there are any.
  std::vector<State> later_states;
  long num_later_states = 0;
  State combined;
  const State* visible = nullptr;

  static long row_blocks(const Call& c) { return (c.length + BLOCK - 1) / BLOCK; }
  Far(const Call& c, Workspace& workspace)
      : two_sided(c.two_sided),
        queries(c.query_map, workspace),
        state(c, workspace),
        weights(workspace.take(BLOCK * BLOCK)),
        combined(c, workspace) {
    // Two-sided: blocks of rows share blocks of keys where these coincide, with the default window of 64 after two blocks.
    for (int i = 0; i < (two_sided ? 3 : 1); ++i) blocks.emplace_back(c, workspace);
    for (long i = 0; two_sided && i < row_blocks(c); ++i) later_states.emplace_back(c, workspace);
    before = after = &blocks[0];
  }

  void clear() {
    state.clear();
    has_keys = false;
    for (FarKeys& block : blocks) block.first = FarKeys::NOT_READ;
  }

  // Two-sided: saves, from the end on, the state of the keys behind each block's `after`. Begins and ends cleared.
  template <typename T>
  void sum_later_keys(const Call& c, const Stream& s) {
    const long from = s.offset + c.window;  // where the first block's `after` begins
    num_later_states = c.keys > from ? (c.keys - from + BLOCK - 1) / BLOCK - 1 : 0;
    for (long block = num_later_states; block > 0; --block) {
      const long first = from + block * BLOCK;
      if (FarKeys::any(s, first, BLOCK)) {
        before->read<T>(c, s, first, BLOCK);
        state.add(before->block.features, before->value, BLOCK);
      }
      if (block <= row_blocks(c)) memcpy(later_states[block - 1].kv, state.kv, state.numbers() * sizeof(float));
    }
    clear();
  }

  // The block of keys from a position on: a saved one, or else it is read over the oldest.
  template <typename T>
  FarKeys* keys_at(const Call& c, const Stream& s, long from) {
    FarKeys* oldest = &blocks[0];
    for (FarKeys& block : blocks) {
      if (block.first == from) return &block;
      if (block.first < oldest->first) oldest = &block;
    }
    oldest->begin<T>(c, s, from, BLOCK);
    return oldest;
  }

  // Prepares the keys and states that a block of rows sees; its first row is key `first`.
  template <typename T>
  void begin(const Call& c, const Stream& s, long start, int count) {
    const long first = s.offset + start, block = start / BLOCK;
    if (two_sided) {
      after = keys_at<T>(c, s, first + c.window);  // this one first, so that it does not overwrite the other
      before = keys_at<T>(c, s, first - c.window);
    } else {
      before->begin<T>(c, s, first - c.window, count);
    }
    for (FarKeys* keys : {after, before})
      if (keys->has_tokens) keys->transpose_features(count);
    visible = has_keys ? &state : nullptr;
    if (block >= num_later_states) return;  // always, where the window is not two-sided
    combined.set_sum(state, later_states[block]);
    visible = &combined;
  }

  // Whether any key is far from the block's rows.
  bool any() const { return visible || before->has_tokens || after->has_tokens; }

  void rows(int count, float* out, float* normaliser) {
    if (before->has_tokens) {
      causal_rows(count, queries, before->block, before->transposed, before->value, visible ? *visible : state, visible,
                  weights, out, normaliser);
    } else if (visible) {
      read_state(count, queries, *visible, out, normaliser);
    } else {
      memset(out, 0, (size_t)count * state.columns * sizeof(float));
      memset(normaliser, 0, count * sizeof(float));
    }
    if (!two_sided || !after->has_tokens) return;
    triangle_product(true, count, BLOCK, state.rows, queries.features, after->block.features, after->transposed, weights);
    add_multiply_upper(count, BLOCK, weights, BLOCK, 1, after->value, state.columns, out);
    for (int t = 0; t < count; ++t) normaliser[t] += row_sum(weights + t * BLOCK, BLOCK - 1);
  }

  void add_keys(int count) {
    if (!before->has_tokens) return;
    state.add(before->block.features, before->value, count);
    has_keys = true;
  }
};

template <typename T>
static int windowed(const Call& c) {
  return run_parallel<T>(c.threads, [&](Workspace& workspace) {
    Far far(c, workspace);
    Band band(c, workspace, false);
    float *out = workspace.take(BLOCK * c.e_row()), *normaliser = workspace.take(BLOCK), *top = workspace.take(BLOCK);
    if (!workspace.ready()) return;
#pragma omp for schedule(dynamic)
    for (long task = 0; task < c.batch * c.groups; ++task) {
      Stream s(c, task);
      band.read_sinks<T>(c, s);
      far.clear();
      if (c.two_sided)
        far.sum_later_keys<T>(c, s);
      else
        far.has_keys = unpack_state(c, task, far.state);
      for (long start = 0; start < c.length; start += BLOCK) {
        const int count = (int)std::min<long>(c.length - start, BLOCK);
        far.begin<T>(c, s, start, count);
        band.read<T>(c, s, start, count);
        for (long h = s.g * c.repeats(); h < (s.g + 1) * c.repeats(); ++h) {
          if (far.any()) {
            read_far_queries<T>(c, s, h, start, count, far.queries);
          } else {  // only the near part
            read_rows<T>(c.query, s.b, h, start, count, c.size, s.valid() + s.offset, far.queries.x, far.queries.x_row);
          }
          far.rows(count, out, normaliser);
          band.exponentials(count, far.queries.x, c.scaling, false, top);
          band.add_to(count, out, normaliser);
          const size_t index = (s.b * c.heads + h) * c.length + start;
          if (c.normaliser) memcpy(c.normaliser + index, normaliser, count * sizeof(float));
          if (c.top) memcpy(c.top + index, top, count * sizeof(float));
          divide_rows<T>(c, s.b, h, start, count, out, normaliser);
        }
        if (start + count < c.length || c.next_state) far.add_keys(count);
      }
      if (c.next_state) pack_state(c, task, far.state);
    }
  });
}

}  // namespace hla
