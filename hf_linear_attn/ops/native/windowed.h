// Exact weights inside a window and for sinks, kernelized ones beyond it, one normaliser (see ops/windowed.py), for maps
// without a log scale:
//     w_ij = exp(tau q_i.k_j - top_i)   inside,  top_i the largest exponent there
//     w_ij = mix phi(q_i).phi(k_j)      beyond
//
// Rows are taken in blocks of n = 64. The far part is causal attention over keys delayed by `window`: with a block go the
// keys from `window` before it, of which row t sees those up to its own position (a triangle), and the state of all
// earlier ones. With a two-sided window the keys from `window` behind it are added, of which row t sees those from its own
// position on, and the state of all later ones: a first pass from the end saves these for every block.
// The near part is a band of a matrix of n rows and whole blocks of keys around them, of which only vectors that touch the
// band are computed, and behind it the sinks' columns, where a row sees those that are outside of its window. As far keys
// sinks have no features. With a two-sided window the rows of sinks are exact, too.

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
  std::vector<int64_t> sinks;  // their positions in rows of the sequence
  long margin, tokens_end;     // behind the last token

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
    for (tokens_end = keys; tokens_end && !valid()[tokens_end - 1];) --tokens_end;
    if (!c.sinks) return;
    if (c.sink_position)
      sinks.assign(c.sink_position + b * c.sinks, c.sink_position + (b + 1) * c.sinks);
    else
      find_ends(c.sinks);
    far_flags = flags;
    for (const int64_t sink : sinks)
      if (sink + offset >= 0 && sink + offset < keys) far_flags[margin + sink + offset] = 0;
  }
  const uint8_t* valid() const { return flags.data() + margin; }
  const uint8_t* far() const { return (far_flags.empty() ? flags : far_flags).data() + margin; }

  // Makes the first and the last `count` tokens sinks, all of them where there are fewer.
  void find_ends(long count) {
    long first = 0, last = keys - 1;
    for (long left = count; left && first < keys; ++first)
      if (valid()[first]) sinks.push_back(first), --left;
    for (long left = count; left && last >= first; --last)
      if (valid()[last]) sinks.push_back(last), --left;
  }

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

// Multiplies the features of queries by their mixing weights; with a log scale adds those to it.
static void weigh_features(const Call& c, const Stream& s, long h, long start, int count, const FeatureBlock& queries) {
  const float root = std::sqrt(c.scaling);
  for (int t = 0; t < count; ++t) {
    const float from_query = query_mix(c, h, root, queries.x + (long)t * queries.x_row, queries.x_row);
    const float log_mix = s.log_mix(c, h, start + t) + from_query;
    if (queries.map->scaled())
      queries.scale[t] += log_mix;
    else
      scale_all(queries.features + (long)t * queries.row, queries.row, std::exp(log_mix));
  }
}

// What brings a far part relative to exp(scale) to the near part's exponent. Where it outweighs that by e^60, the near
// part is lost in rounding anyway.
static inline float far_factor(float scale, float top) { return top == -INFINITY ? 1.0f : std::exp(std::min(scale - top, 60.0f)); }

// What a model adds to the logits of a block of rows: of row 0, and how far rows are apart; their cap, and its own sink.
struct Added {
  const float *near = nullptr, *sinks = nullptr;
  long near_row = 0, sinks_row = 0;
  float cap = 0.0f, sink = -INFINITY;
};

// The matrix products and exponentials of the near part of one block: the band's columns, then the sinks'.
struct Band {
  // Columns before those of the block's own keys (`window` in whole blocks), and all. Row t sees those from t + first to
  // t + reach.
  int before, columns, first, reach, sinks, x_row, e_row;
  bool has_backward, has_sink_rows, all_relative;
  float *weights, *slopes;
  float *sink_key, *sink_key_t, *sink_value, *sink_value_t, *sink_key_gradient, *sink_value_gradient;
  int num_sinks = 0;
  bool any_sink = false;            // whether a row of the block sees one outside of its window
  int32_t *seen_from, *seen_until;  // rows of the block from which on, and up to which, a sink is outside of the window

  static int blocks_before(const Call& c) { return (c.window + BLOCK - 1) / BLOCK; }
  static int num_blocks(const Call& c) { return blocks_before(c) * (c.two_sided ? 2 : 1) + 1; }
  Band(const Call& c, Workspace& workspace, bool backward)
      : before(blocks_before(c) * BLOCK),
        columns(num_blocks(c) * BLOCK),
        first(before - c.window + 1),
        reach(c.two_sided ? before + c.window - 1 : before),
        sinks(padded((int)(c.sinks * (c.two_sided ? 2 : 1)))),
        x_row(c.x_row()),
        e_row(c.e_row()),
        has_backward(backward),
        has_sink_rows(c.two_sided && c.sinks),
        all_relative(c.query_map.scaled()),
        weights(workspace.take((size_t)(columns + sinks) * BLOCK)),
        slopes(workspace.take(backward ? (size_t)(columns + sinks) * BLOCK : 0)),
        sink_key(workspace.take((size_t)sinks * x_row)),
        sink_key_t(workspace.take((size_t)sinks * x_row)),
        sink_value(workspace.take((size_t)sinks * e_row)),
        sink_value_t(workspace.take((size_t)sinks * e_row)),
        sink_key_gradient(workspace.take((size_t)sinks * x_row)),
        sink_value_gradient(workspace.take((size_t)sinks * e_row)),
        seen_from(reinterpret_cast<int32_t*>(workspace.take(sinks))),
        seen_until(reinterpret_cast<int32_t*>(workspace.take(sinks))),
        capacity(columns + SPARE_BLOCKS * BLOCK),
        keys(workspace.take((size_t)capacity * x_row)),
        values(workspace.take((size_t)capacity * e_row)),
        biases(workspace.take(capacity)),
        keys_t(workspace.take((size_t)columns * x_row)),
        values_t(workspace.take(backward ? (size_t)columns * e_row : 0)) {}

  // Column j of the block: a row of keys, of values, and its bias (0, or -inf where there is no token). Later blocks move
  // them.
  float* key(int j = 0) const { return keys + (size_t)(begin + j) * x_row; }
  float* value(int j = 0) const { return values + (size_t)(begin + j) * e_row; }
  float* bias(int j = 0) const { return biases + begin + j; }
  // The block of transposed keys or values that column j belongs to, [x_row | e_row, BLOCK].
  float* key_t(int j) const { return keys_t + slot_of(j) * x_row * BLOCK; }
  float* value_t(int j) const { return values_t + slot_of(j) * e_row * BLOCK; }

  // The sinks of a row of the batch, with zeros behind them; their gradients begin at zero.
  template <typename T>
  void read_sinks(const Call& c, const Stream& s) {
    num_sinks = (int)s.sinks.size();
    if (!sinks) return;
    for (float* matrix : {sink_key, sink_key_gradient}) memset(matrix, 0, (size_t)sinks * x_row * sizeof(float));
    for (float* matrix : {sink_value, sink_value_gradient}) memset(matrix, 0, (size_t)sinks * e_row * sizeof(float));
    for (int j = 0; j < num_sinks; ++j) {
      const bool separate = c.sink_key.data;  // else they are tokens of the sequence
      const long at = separate ? j : s.sinks[j];
      read_rows<T>(separate ? c.sink_key : c.key, s.b, s.g, at, 1, c.size, nullptr, sink_key + j * x_row, x_row);
      read_rows<T>(separate ? c.sink_value : c.value, s.b, s.g, at, 1, c.value_size, nullptr, sink_value + j * e_row, e_row);
    }
    transpose(sinks, x_row, sink_key, x_row, sink_key_t, sinks);
    transpose(sinks, e_row, sink_value, e_row, sink_value_t, sinks);
  }

  // Reads the keys and values around a block of rows. Blocks follow one another from row 0 on: each key is read once.
  template <typename T>
  void read(const Call& c, const Stream& s, long start, int count) {
    const int present = start ? columns - BLOCK : 0;
    if (!start) {
      begin = 0;
    } else if ((begin += BLOCK) + columns > capacity) {
      memmove(keys, key(), (size_t)present * x_row * sizeof(float));
      memmove(values, value(), (size_t)present * e_row * sizeof(float));
      memmove(biases, bias(), present * sizeof(float));
      begin = 0;
    }
    const uint8_t* valid = s.valid();
    const long from = s.offset + start - before;
    first_slot = start / BLOCK;
    read_rows<T>(c.key, s.b, s.g, from + present, columns - present, c.size, valid, key(present), x_row);
    read_rows<T>(c.value, s.b, s.g, from + present, columns - present, c.value_size, valid, value(present), e_row);
    for (int j = present; j < columns; ++j) *bias(j) = valid[from + j] ? 0.0f : -INFINITY;
    // Tiles read keys and values as they are, but few rows at the end of a sequence go without them.
    const bool few_rows = tiles_for(BLOCK) && !tiles_for(count);
    for (int j = few_rows ? 0 : present; (!tiles_for(count) || has_sink_rows) && j < columns; j += BLOCK) {
      transpose(BLOCK, x_row, key(j), x_row, key_t(j), BLOCK);
      if (has_backward) transpose(BLOCK, e_row, value(j), e_row, value_t(j), BLOCK);
    }
    any_sink = false;
    for (int j = 0; j < sinks; ++j) {
      const int64_t distance = j < num_sinks ? std::max<int64_t>(s.sinks[j] - start, INT_MIN / 2) : INT_MAX / 2;
      seen_from[j] = (int32_t)std::min<int64_t>(distance + c.window, INT_MAX);
      seen_until[j] = c.two_sided && j < num_sinks ? (int32_t)std::min<int64_t>(distance - c.window, INT_MAX) : -1;
      any_sink |= j < num_sinks && (seen_from[j] < count || seen_until[j] >= 0);
    }
  }

  int stride() const { return columns + sinks; }  // of weights and slopes

  // Columns that some row of the tile at i touches, in whole vectors.
  int begin_of(int i) const { return (i + first) / LANES * LANES; }
  int end_of(int i, int tile_rows) const { return std::min(padded(i + tile_rows + reach), columns); }

  // Some columns of weights and slopes.
  struct Columns {
    int begin, end;
    int size() const { return end - begin; }
  };
  // Columns of the band, and those of the sinks if a row of the block sees one.
  struct Parts {
    Columns part[2];
    int count;
    const Columns* begin() const { return part; }
    const Columns* end() const { return part + count; }
    const Columns& band() const { return part[0]; }
  };
  Parts parts(int i, int rows) const {
    return {{{begin_of(i), end_of(i, rows)}, {columns, columns + sinks}}, any_sink ? 2 : 1};
  }

  // out [rows, columns] = rows of x_row or e_row numbers times transposed keys or values; sinks_t: those of the sinks.
  void multiply_columns(int rows, int width, const float* in, const Parts& touched, bool by_keys, float* out) const {
    const float* sinks_t = by_keys ? sink_key_t : sink_value_t;
    if (TileProducts* tiles = tiles_for(rows)) {
      const Columns band = touched.band();
      const float* right = by_keys ? key(band.begin) : value(band.begin);
      tiles->multiply(rows, band.size(), width, in, width, 1, right, width, out + band.begin, stride(), false, true);
      if (any_sink) multiply_floats(rows, sinks, width, in, width, 1, sinks_t, sinks, out + columns, stride(), false);
      return;
    }
    for (int j = touched.band().begin; j < touched.band().end;) {
      const int stop = std::min(touched.band().end, (j / BLOCK + 1) * BLOCK);
      const float* block = (by_keys ? key_t(j) : value_t(j)) + j % BLOCK;
      multiply_strip(rows, stop - j, width, in, width, 1, block, BLOCK, out + j, stride(), false);
      j = stop;
    }
    if (any_sink) multiply_strip(rows, sinks, width, in, width, 1, sinks_t, sinks, out + columns, stride(), false);
  }

  // to [rows, width] += weights or slopes times keys or values.
  void add_columns(int rows, int width, const float* in, const Parts& touched, bool keys, float* to) const {
    const Columns band = touched.band();
    const float *right = keys ? key(band.begin) : value(band.begin), *right_sinks = keys ? sink_key : sink_value;
    if (tiles_for(rows))
      multiply(rows, width, band.size(), in + band.begin, stride(), 1, right, width, to, width, true);
    else
      multiply_strip(rows, width, band.size(), in + band.begin, stride(), 1, right, width, to, width, true);
    if (any_sink) multiply_floats(rows, width, num_sinks, in + columns, stride(), 1, right_sinks, width, to, width, true);
  }

  // Those of the sinks from j on that are outside of the window of row t of the block.
  VecInt seen_sinks(int t, int j) const {
    VecInt from, until;
    memcpy(&from, seen_from + j, sizeof from);
    memcpy(&until, seen_until + j, sizeof until);
    return (from <= t) | (until >= t);
  }

  static Added added(const Call& c, long b, long h, long start) {
    const auto row = [&](const Strided& tensor) {
      return tensor.data ? static_cast<const float*>(tensor.data) + b * tensor.batch + h * tensor.head + start * tensor.token
                         : nullptr;
    };
    const float sink = c.model_sink ? c.model_sink[h] : -INFINITY;
    return {row(c.near_bias), row(c.sink_bias), c.near_bias.token, c.sink_bias.token, c.softcap, sink};
  }

  // exp(tau q.k - top) of all rows; top is computed, or with `known` taken from the forward pass. Adds to normalisers.
  void exponentials(int count, const float* query, float scaling, bool known, float* top, float* normaliser,
                    const Added& added = {}) const {
    const bool tiles = tiles_for(count);  // all columns: skipping those outside of the band would cost more
    if (tiles) multiply_columns(count, x_row, query, parts(0, count), true, weights);
    for (int i = 0; i < count; i += TILE_ROWS) {
      const int tile_rows = std::min(count - i, TILE_ROWS);
      const Parts touched = parts(i, tile_rows);
      if (!tiles) multiply_columns(tile_rows, x_row, query + i * x_row, touched, true, weights + (size_t)i * stride());
      for (int t = i; t < i + tile_rows; ++t) {
        float* row = weights + (size_t)t * stride();
        const Columns band = touched.band();
        VecInt lane;
        for (int j = 0; j < LANES; ++j) lane[j] = band.begin + j;
        Vec maxima = splat(-INFINITY);
        const auto add_logits = [&](int j, VecInt inside, Vec shift) {
          const Vec product = load(row + j) * scaling;
          const Vec logit = select(inside, (added.cap ? capped(product, added.cap) : product) + shift, splat(-INFINITY));
          store(row + j, logit);
          maxima = larger(maxima, logit);
        };
        const float* near = added.near ? added.near + t * added.near_row - t - first : nullptr;
        for (int j = band.begin; j < band.end; j += LANES, lane += LANES)
          add_logits(j, (lane >= t + first) & (lane <= t + reach), near ? load(bias(j)) + load(near + j) : load(bias(j)));
        const float* of_sinks = added.sinks ? added.sinks + t * added.sinks_row : nullptr;
        if (any_sink)
          for (int j = 0; j < sinks; j += LANES)
            add_logits(columns + j, seen_sinks(t, j), of_sinks ? load(of_sinks + j) : Vec{});
        if (!known) top[t] = std::max(max_of(maxima), added.sink);
      }
      for (int t = i; t < i + tile_rows; ++t) {  // a separate pass, because it waits for the maxima
        float* row = weights + (size_t)t * stride();
        const bool any = top[t] != -INFINITY;  // key in the window
        Vec total{};
        for (const Columns& part : touched)
          for (int j = part.begin; j < part.end; j += LANES) {
            const Vec weight = any ? exp_of(load(row + j) - top[t]) : Vec{};
            store(row + j, weight);
            total += weight;
          }
        if (normaliser) normaliser[t] += sum_of(total) + (any ? std::exp(added.sink - top[t]) : 0.0f);
      }
    }
  }

  // Zeros in the rows outside of the columns that their tiles touch.
  void clear_outside(int count, float* matrix) const {
    const Columns all = parts(0, count).band();
    for (int t = 0; t < count; ++t) {
      const int i = t / TILE_ROWS * TILE_ROWS;
      const Columns own = parts(i, std::min(count - i, TILE_ROWS)).band();
      float* row = matrix + (size_t)t * stride();
      memset(row + all.begin, 0, (own.begin - all.begin) * sizeof(float));
      memset(row + own.end, 0, (all.end - own.end) * sizeof(float));
    }
  }

  // Adds the near part to numerators.
  void add_to(int count, float* out) const {
    if (tiles_for(count)) {
      clear_outside(count, weights);
      return add_columns(count, e_row, weights, parts(0, count), false, out);
    }
    for (int i = 0; i < count; i += TILE_ROWS) {
      const int rows = std::min(count - i, TILE_ROWS);
      add_columns(rows, e_row, weights + (size_t)i * stride(), parts(i, rows), false, out + (size_t)i * e_row);
    }
  }

  // Gradients through the near weights: added to those of the rows' queries, and of the columns' keys and values.
  void backward(int count, const float* query, float scaling, const BackwardBuffers& rows, float* query_gradient,
                float* key_gradient, float* value_gradient) const {
    const bool tiles = tiles_for(count);
    if (tiles) {
      multiply_columns(count, e_row, rows.gradient, parts(0, count), false, slopes);
      clear_outside(count, weights);
      clear_outside(count, slopes);
    }
    for (int i = 0; i < count; i += TILE_ROWS) {
      const int tile_rows = std::min(count - i, TILE_ROWS);
      const Parts touched = parts(i, tile_rows);
      float* slope_rows = slopes + (size_t)i * stride();
      if (!tiles) multiply_columns(tile_rows, e_row, rows.gradient + (size_t)i * e_row, touched, false, slope_rows);
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
        // Near weights are relative to the largest exponent. Far weights without a log scale are not: its gradient is
        // shared by the ties.
        const float shared = all_relative ? 0.0f : sum_of(total) / std::max(sum_of(ties), 1.0f);
        for (const Columns& part : touched)
          for (int j = part.begin; j < part.end; j += LANES) {
            const Vec correction = select(load(weight + j) >= 1.0f, splat(shared), Vec{});
            store(slope + j, (load(slope + j) - correction) * scaling);
          }
      }
      if (!tiles) add_columns(tile_rows, x_row, slope_rows, touched, true, query_gradient + (size_t)i * x_row);
    }
    if (any_sink) {
      multiply(sinks, x_row, count, slopes + columns, 1, stride(), query, x_row, sink_key_gradient, x_row, true);
      multiply(sinks, e_row, count, weights + columns, 1, stride(), rows.gradient, e_row, sink_value_gradient, e_row, true);
    }
    const Columns all = parts(0, count).band();
    if (tiles) {
      add_columns(count, x_row, slopes, parts(0, count), true, query_gradient);
      float *key_rows = key_gradient + (size_t)all.begin * x_row, *value_rows = value_gradient + (size_t)all.begin * e_row;
      multiply(all.size(), x_row, count, slopes + all.begin, 1, stride(), query, x_row, key_rows, x_row, true);
      multiply(all.size(), e_row, count, weights + all.begin, 1, stride(), rows.gradient, e_row, value_rows, e_row, true);
      return;
    }
    for (int j = all.begin; j < all.end; j += LANES) {  // of which the tiles of rows meet all or none
      int from = 0, to = count;
      while (from < count && end_of(from, std::min(count - from, TILE_ROWS)) <= j) from += TILE_ROWS;
      while (to > from && begin_of((to - 1) / TILE_ROWS * TILE_ROWS) > j) to = (to - 1) / TILE_ROWS * TILE_ROWS;
      if (from >= to) continue;
      multiply_floats(LANES, x_row, to - from, slopes + (size_t)from * stride() + j, 1, stride(),
                      query + (size_t)from * x_row, x_row, key_gradient + (size_t)j * x_row, x_row, true);
      multiply_floats(LANES, e_row, to - from, weights + (size_t)from * stride() + j, 1, stride(),
                      rows.gradient + (size_t)from * e_row, e_row, value_gradient + (size_t)j * e_row, e_row, true);
    }
  }

 private:
  static constexpr int SPARE_BLOCKS = 6;  // of the buffers, so that few blocks move what is in them
  int slot_of(int j) const { return (int)((first_slot + j / BLOCK) % (columns / BLOCK)); }

  int capacity, begin = 0;
  long first_slot = 0;  // of column 0
  float *keys, *values, *biases, *keys_t, *values_t;
};

// Exact attention of the sinks' own queries over all keys (two-sided windows), added up block by block.
struct SinkRows {
  int x_row, e_row, num_rows = 0;
  float *query, *weights, *out, *top, *total;  // query: times tau; out and total: relative to exp(top)
  // Backward: of the outputs and weights, its product with the output, of the queries.
  float *gradient, *slopes, *product, *query_gradient;

  SinkRows(const Call& c, Workspace& workspace, bool backward) : x_row(c.x_row()), e_row(c.e_row()) {
    const size_t rows = c.two_sided ? 2 * c.sinks * c.repeats() : 0, rows_backward = backward ? rows : 0;
    query = workspace.take(rows * x_row);
    weights = workspace.take(rows * BLOCK);
    out = workspace.take(rows * e_row);
    top = workspace.take(rows);
    total = workspace.take(rows);
    gradient = workspace.take(rows_backward * e_row);
    slopes = workspace.take(rows_backward * BLOCK);
    product = workspace.take(rows_backward);
    query_gradient = workspace.take(rows_backward * x_row);
  }

  // Calls body(row, head, position) for every sink of every head.
  template <typename Body>
  static void for_each(const Call& c, const Stream& s, Body body) {
    for (int row = 0, r = 0; r < c.repeats(); ++r)
      for (const int64_t position : s.sinks) body(row++, s.g * c.repeats() + r, position);
  }
  static size_t index(const Call& c, const Stream& s, long h, long position) {
    return (s.b * c.heads + h) * c.length + position;
  }

  template <typename T>
  void begin(const Call& c, const Stream& s) {
    num_rows = c.two_sided ? (int)(s.sinks.size() * c.repeats()) : 0;
    if (!num_rows) return;
    for_each(c, s, [&](int row, long h, long position) {
      read_rows<T>(c.query, s.b, h, position, 1, c.size, nullptr, query + (size_t)row * x_row, x_row);
      top[row] = -INFINITY;
      total[row] = 0.0f;
    });
    scale_all(query, (long)num_rows * x_row, c.scaling);
    memset(out, 0, (size_t)num_rows * e_row * sizeof(float));
  }

  // Logits of the keys of a block of rows.
  void read_logits(const Band& band) const {
    multiply_floats(num_rows, BLOCK, x_row, query, x_row, 1, band.key_t(band.before), BLOCK, weights, BLOCK, false);
    for (int row = 0; row < num_rows; ++row)
      for (int j = 0; j < BLOCK; j += LANES) {
        float* at = weights + row * BLOCK + j;
        store(at, load(at) + load(band.bias(band.before + j)));
      }
  }

  void add(const Band& band) {
    if (!num_rows) return;
    read_logits(band);
    for (int row = 0; row < num_rows; ++row) {
      float* weight = weights + row * BLOCK;
      Vec maxima = splat(top[row]), sum{};
      for (int j = 0; j < BLOCK; j += LANES) maxima = larger(maxima, load(weight + j));
      const float highest = max_of(maxima), factor = rescale_factor(top[row], highest);
      const bool any = highest != -INFINITY;  // key so far
      for (int j = 0; j < BLOCK; j += LANES) {
        const Vec value = any ? exp_of(load(weight + j) - highest) : Vec{};
        store(weight + j, value);
        sum += value;
      }
      total[row] = total[row] * factor + sum_of(sum);
      top[row] = highest;
      if (factor != 1.0f) scale_all(out + (size_t)row * e_row, e_row, factor);
    }
    multiply_floats(num_rows, e_row, BLOCK, weights, BLOCK, 1, band.value(band.before), e_row, out, e_row, true);
  }

  // Writes the outputs over those of the windowed form, and for the backward pass as `top` the logarithm of the sum of all
  // weights, and 0 as the normaliser: what the rows would get through a window has no gradient.
  template <typename T>
  void finish(const Call& c, const Stream& s) {
    if (!num_rows) return;
    for_each(c, s, [&](int row, long h, long position) {
      scale_all(out + (size_t)row * e_row, e_row, 1.0f / total[row]);
      write_rows<T>(c.out, s.b, h, position, 1, c.value_size, out + (size_t)row * e_row, e_row);
      if (c.normaliser) c.normaliser[index(c, s, h, position)] = 0.0f;
      if (c.top) c.top[index(c, s, h, position)] = top[row] + std::log(total[row]);
    });
  }

  template <typename T>
  void begin_backward(const Call& c, const Stream& s) {
    begin<T>(c, s);
    if (!num_rows) return;
    for_each(c, s, [&](int row, long h, long position) {
      read_rows<T>(c.out_gradient, s.b, h, position, 1, c.value_size, nullptr, gradient + (size_t)row * e_row, e_row);
      read_rows<T>(c.out, s.b, h, position, 1, c.value_size, nullptr, out + (size_t)row * e_row, e_row);
      product[row] = dot(gradient + (size_t)row * e_row, out + (size_t)row * e_row, e_row);
      top[row] = c.top[index(c, s, h, position)];
    });
    memset(query_gradient, 0, (size_t)num_rows * x_row * sizeof(float));
  }

  // Adds to the gradients of the keys and values of a block of rows.
  void backward(const Band& band, float* key_gradient, float* value_gradient) const {
    if (!num_rows) return;
    read_logits(band);
    multiply_floats(num_rows, BLOCK, e_row, gradient, e_row, 1, band.value_t(band.before), BLOCK, slopes, BLOCK, false);
    for (int row = 0; row < num_rows; ++row)
      for (int j = 0; j < BLOCK; j += LANES) {
        float *weight = weights + row * BLOCK + j, *slope = slopes + row * BLOCK + j;
        store(weight, exp_of(load(weight) - top[row]));
        store(slope, load(weight) * (load(slope) - product[row]));
      }
    const float* own_keys = band.key(band.before);
    multiply_floats(num_rows, x_row, BLOCK, slopes, BLOCK, 1, own_keys, x_row, query_gradient, x_row, true);
    multiply_floats(BLOCK, x_row, num_rows, slopes, 1, BLOCK, query, x_row, key_gradient, x_row, true);
    multiply_floats(BLOCK, e_row, num_rows, weights, 1, BLOCK, gradient, e_row, value_gradient, e_row, true);
  }
};

// A block of far keys: features, and which of them are tokens.
struct FarKeys {
  static constexpr long NOT_READ = LONG_MIN;
  FeatureBlock block;
  float* transposed;
  long position = NOT_READ;  // of the first one
  int begin = 0, end = 0;    // from the first token to behind the last one
  int num_transposed = 0;
  bool behind = false;  // whether they are multiplied by the factors of keys behind the rows

  FarKeys(const Call& c, Workspace& workspace)
      : block(c.key_map, workspace), transposed(workspace.take((size_t)BLOCK * c.m_row())) {}

  bool any() const { return begin < end; }
  static bool any(const Stream& s, long from, int count) {
    const uint8_t* keys = s.far() + from;
    return std::any_of(keys, keys + count, [](uint8_t token) { return token != 0; });
  }

  // Computes the features of keys at a position, rows [count, x_row], if there are any: beyond either end of a sequence
  // there are none, which short inputs mostly consist of.
  void read(const Stream& s, long from, int count, float* rows) {
    const uint8_t* tokens = s.far() + from;
    position = from;
    for (end = count; end && !tokens[end - 1];) --end;
    for (begin = 0; begin < end && !tokens[begin];) ++begin;
    num_transposed = 0;
    if (!any()) return;
    block.use_rows(rows, s.g, end, tokens);
    memset(block.features + (size_t)end * block.row, 0, (size_t)(BLOCK - end) * block.row * sizeof(float));
  }

  // Multiplies the features by factors of keys from `position` on, if there are any.
  void weigh(const Strided& factors, const Stream& s, int count) const {
    if (!factors.data) return;
    const float* of_head = static_cast<const float*>(factors.data) + s.b * factors.batch + s.g * factors.head;
    for (int t = 0; t < count; ++t)
      if (s.far()[position + t]) scale_all(block.features + (long)t * block.row, block.row, of_head[(position + t) * factors.token]);
  }

  // Transposes the features of the first keys for a triangle of so many rows, unless tiles serve.
  void transpose_features(int keys, int rows) {
    if (!any() || keys <= num_transposed || tiles_for(rows)) return;
    transpose(keys, block.row, block.features, block.row, transposed, BLOCK);
    num_transposed = keys;
  }
};

// The far part of a block of rows: the state that all rows see, and blocks of keys of which each row sees some.
struct Far {
  bool two_sided;
  FeatureBlock queries;
  State state;  // over the keys before those of `before`
  float *weights, *value;
  std::vector<FarKeys> blocks;
  FarKeys *before, *after;              // row t sees keys 0 ... t of the first block, and keys t ... of the second
  const float *before_value, *after_value;
  int first_row = 0, last_row = 0;      // the rows that see any far key are these, without the last
  bool has_keys = false;                // whether the state holds any key
  // Two-sided: the blocks of keys behind each other from `window` on, their sums, and for every block of rows the state of
  // the keys behind those of `after`, where there are any.
  std::vector<State> sums, later_states;
  long num_later_states = 0;
  State combined;
  const State* visible = nullptr;
  // Where rows weigh keys behind them by factors: the state of these keys, and buffers of their part of the sums.
  const State* visible_behind = nullptr;
  float *behind_out, *behind_normaliser;

  static long row_blocks(const Call& c) { return (c.length + BLOCK - 1) / BLOCK; }
  // Whether the blocks of keys before and behind the rows are the same ones; with the default window of 64 they are.
  static bool shares_blocks(const Call& c) { return c.two_sided && 2 * c.window % BLOCK == 0 && !c.key_before.data; }
  Far(const Call& c, Workspace& workspace)
      : two_sided(c.two_sided),
        queries(c.query_map, workspace),
        state(c, workspace),
        weights(workspace.take(BLOCK * BLOCK)),
        value(workspace.take(BLOCK * c.e_row())),
        combined(c, workspace),
        behind_out(workspace.take(c.row_behind.data ? BLOCK * c.e_row() : 0)),
        behind_normaliser(workspace.take(BLOCK)) {
    for (int i = 0; i < (two_sided ? 3 : 1); ++i) blocks.emplace_back(c, workspace);
    for (long i = 0; two_sided && i < row_blocks(c); ++i) later_states.emplace_back(c, workspace);
    for (long i = 0; shares_blocks(c) && i < row_blocks(c); ++i) sums.emplace_back(c, workspace);
    before = after = &blocks[0];
  }

  void clear() {
    state.clear();
    has_keys = false;
    for (FarKeys& block : blocks) block.position = FarKeys::NOT_READ;
  }

  // Two-sided: saves, from the end on, the state of the keys behind each block's `after`. Begins and ends cleared.
  template <typename T>
  void sum_later_keys(const Call& c, const Stream& s) {
    const long from = s.offset + c.window;  // where the first block's `after` begins
    num_later_states = s.tokens_end > from ? (s.tokens_end - from + BLOCK - 1) / BLOCK - 1 : 0;
    for (long block = num_later_states; block > 0; --block) {
      const long first = from + block * BLOCK;
      State& sum = block < (long)sums.size() ? sums[block] : combined;
      sum.clear();
      if (FarKeys::any(s, first, BLOCK)) {
        blocks[0].block.read<T>(c.key, s.b, s.g, first, BLOCK, s.far());
        blocks[0].position = first;
        blocks[0].weigh(c.key_behind, s, (int)std::min<long>(s.keys - first, BLOCK));
        read_rows<T>(c.value, s.b, s.g, first, BLOCK, c.value_size, s.far(), value, c.e_row());
        sum.add(blocks[0].block.features, value, BLOCK);
      }
      state.set_sum(state, sum);
      if (block <= row_blocks(c)) memcpy(later_states[block - 1].kv, state.kv, state.numbers() * sizeof(float));
    }
    clear();
  }

  // The block of keys from a position on, rows [count, x_row]: a saved one, or else it is read over the oldest.
  FarKeys* keys_at(const Call& c, const Stream& s, long from, int count, float* rows, bool behind) {
    FarKeys* oldest = &blocks[0];
    for (FarKeys& block : blocks) {
      if (block.position == from && (block.behind == behind || !c.key_before.data)) return &block;
      if (block.position < oldest->position) oldest = &block;
    }
    oldest->read(s, from, count, rows);
    oldest->behind = behind;
    if (oldest->any()) oldest->weigh(behind ? c.key_behind : c.key_before, s, oldest->end);
    return oldest;
  }

  // Prepares the keys and states that a block of rows sees; its first row is key `first`.
  void begin(const Call& c, const Stream& s, const Band& band, long start, int count, long length) {
    const long first = s.offset + start, block = start / BLOCK;
    const bool last = start + count >= length;
    if (two_sided) {  // the later block first, so that it does not overwrite the other
      after = keys_at(c, s, first + c.window, BLOCK, band.key(band.before + c.window), true);
      after_value = band.value(band.before + c.window);
    }
    before = keys_at(c, s, first - c.window, two_sided && !last ? BLOCK : count, band.key(band.before - c.window), false);
    before_value = band.value(band.before - c.window);
    visible = has_keys ? &state : nullptr;
    visible_behind = c.row_behind.data && block < num_later_states ? &later_states[block] : nullptr;
    if (block < num_later_states && !visible_behind) {  // never, where the window is not two-sided
      visible = has_keys ? &combined : &later_states[block];
      if (has_keys) combined.set_sum(state, later_states[block]);
    }
    first_row = visible || visible_behind || (two_sided && after->any()) ? 0 : std::min(before->begin / LANES * LANES, count);
    last_row = visible || visible_behind || (before->any() && before->begin < count) ? count : two_sided ? std::min(after->end, count) : 0;
    for (FarKeys* keys : {after, before}) keys->transpose_features(std::max(keys->end, last_row), last_row - first_row);
  }

  // The features of the rows that see far keys. Their queries are read.
  void read_features(const Call& c, const Stream& s, long h, long start) {
    if (first_row >= last_row) return;
    FeatureBlock part = queries.from(first_row);
    part.use_rows(part.x, h, last_row - first_row, nullptr);
    weigh_features(c, s, h, start + first_row, last_row - first_row, part);
  }

  // behind: factors of the first rows for keys behind them, and how far these are apart; null: they are 1.
  void rows(int count, float* out, float* normaliser, const float* behind, long behind_row) {
    const int width = state.columns, m_row = state.rows;
    memset(normaliser, 0, count * sizeof(float));
    memset(out, 0, (size_t)std::min(first_row, count) * width * sizeof(float));
    const int stop = std::max(first_row, last_row), seeing = stop - first_row;
    memset(out + (size_t)stop * width, 0, (size_t)std::max(count - stop, 0) * width * sizeof(float));
    if (!seeing) return;
    const FeatureBlock part = queries.from(first_row);
    float *to = out + (size_t)first_row * width, *sums_to = normaliser + first_row;
    const bool has_before = before->any() && before->begin < count;
    if (has_before) {
      const FeatureBlock keys = before->block.from(first_row);  // earlier ones are no tokens
      causal_rows(seeing, part, keys, before->transposed + first_row, before_value + (size_t)first_row * width,
                  visible ? *visible : state, visible, weights, to, sums_to);
    } else if (visible) {
      read_state(seeing, part, *visible, to, sums_to);
    } else {
      memset(to, 0, (size_t)seeing * width * sizeof(float));
    }
    if (!two_sided || !(after->any() || visible_behind)) return;
    float *to_behind = behind ? behind_out : to, *sums_behind = behind ? behind_normaliser : sums_to;
    if (behind) {
      memset(to_behind, 0, (size_t)seeing * width * sizeof(float));
      memset(sums_behind, 0, seeing * sizeof(float));
      if (visible_behind) read_state(seeing, part, *visible_behind, to_behind, sums_behind);
    }
    if (after->any()) {
      const int keys = std::max(after->end, seeing);  // behind the last there are zeros
      triangle_product(true, seeing, keys, m_row, part.features, after->block.features, after->transposed, weights);
      add_multiply_upper(seeing, keys, weights, BLOCK, 1, after_value, width, to_behind);
      for (int t = 0; t < seeing; ++t) sums_behind[t] += row_sum(weights + t * BLOCK, keys - 1);
    }
    for (int t = 0; behind && t < seeing; ++t) {
      const float factor = behind[(first_row + t) * behind_row];
      for (int j = 0; j < width; j += LANES) {
        float* number = to + (size_t)t * width + j;
        store(number, load(number) + load(to_behind + (size_t)t * width + j) * factor);
      }
      sums_to[t] += sums_behind[t] * factor;
    }
  }

  // Brings rows, which are relative to the log scales of their queries, to the near part's exponents `top`, and adds the
  // near part's normalisers.
  void rescale(int count, const float* top, const float* near, float* out, float* normaliser) const {
    for (int t = 0; t < count; ++t) {
      const float factor = t >= first_row && t < last_row ? far_factor(queries.scale[t], top[t]) : 1.0f;
      scale_all(out + (size_t)t * state.columns, state.columns, factor);
      normaliser[t] = normaliser[t] * factor + near[t];
    }
  }

  void add_keys(const Call& c, long start, int count) {
    if (!before->any() || before->begin >= count) return;
    const long block = (start - 2 * c.window) / BLOCK;  // among those behind each other from `window` on
    if (start >= 2 * c.window && block > 0 && block <= num_later_states && block < (long)sums.size())
      state.set_sum(state, sums[block]);
    else
      state.add(before->block.features, before_value, std::min(before->end, count));
    has_keys = true;
  }
};

// Zeros as outputs of the padding behind the last token of a row, from a position on. block: buffer for a block.
template <typename T>
static void clear_padding(const Call& c, const Stream& s, long from, float* block) {
  memset(block, 0, (size_t)BLOCK * c.e_row() * sizeof(float));
  for (long h = s.g * c.repeats(); h < (s.g + 1) * c.repeats(); ++h) {
    for (long start = from; start < c.length; start += BLOCK)
      write_rows<T>(c.out, s.b, h, start, (int)std::min<long>(c.length - start, BLOCK), c.value_size, block, c.e_row());
    for (float* numbers : {c.normaliser, c.top})
      if (numbers) std::fill_n(numbers + (s.b * c.heads + h) * c.length + from, c.length - from, 0.0f);
  }
}

template <typename T>
static int windowed(const Call& c) {
  return run_parallel<T>(c.threads, [&](Workspace& workspace) {
    Far far(c, workspace);
    Band band(c, workspace, false);
    SinkRows sink_rows(c, workspace, false);
    float *out = workspace.take(BLOCK * c.e_row()), *normaliser = workspace.take(BLOCK), *top = workspace.take(BLOCK),
          *near = workspace.take(BLOCK);
    if (!workspace.ready()) return;
#pragma omp for schedule(dynamic)
    for (long task = 0; task < c.batch * c.groups; ++task) {
      Stream s(c, task);
      band.read_sinks<T>(c, s);
      sink_rows.begin<T>(c, s);
      far.clear();
      if (c.two_sided)
        far.sum_later_keys<T>(c, s);
      else
        far.has_keys = unpack_state(c, task, far.state);
      const long length = c.two_sided ? s.tokens_end : c.length;
      for (long start = 0; start < length; start += BLOCK) {
        const int count = (int)std::min<long>(length - start, BLOCK);
        band.read<T>(c, s, start, count);
        sink_rows.add(band);
        far.begin(c, s, band, start, count, length);
        for (long h = s.g * c.repeats(); h < (s.g + 1) * c.repeats(); ++h) {
          read_rows<T>(c.query, s.b, h, start, count, c.size, s.valid() + s.offset, far.queries.x, far.queries.x_row);
          far.read_features(c, s, h, start);
          const Strided& factors = c.row_behind;
          const float* behind = static_cast<const float*>(factors.data);
          if (behind) behind += s.b * factors.batch + h * factors.head + start * factors.token;
          far.rows(count, out, normaliser, behind, factors.token);
          const bool scaled = far.queries.map->scaled();
          if (scaled) memset(near, 0, count * sizeof(float));
          const Added added = Band::added(c, s.b, h, start);
          band.exponentials(count, far.queries.x, c.scaling, false, top, scaled ? near : normaliser, added);
          if (scaled) far.rescale(count, top, near, out, normaliser);
          band.add_to(count, out);
          const size_t index = (s.b * c.heads + h) * c.length + start;
          if (c.normaliser) memcpy(c.normaliser + index, normaliser, count * sizeof(float));
          if (c.top) memcpy(c.top + index, top, count * sizeof(float));
          divide_rows<T>(c, c.out, s.b, h, start, count, out, normaliser);
        }
        if (start + count < length || c.next_kv) far.add_keys(c, start, count);
      }
      clear_padding<T>(c, s, length, out);
      sink_rows.finish<T>(c, s);
      if (c.next_kv) pack_state(c, task, far.state);
    }
  });
}

}  // namespace hla
