// Exact weights inside a window, kernelized ones beyond it, one normaliser (see ops/windowed.py), for maps without a log
// scale:
//     w_ij = exp(tau q_i.k_j - top_i)   inside,  top_i the largest exponent there
//     w_ij = mix phi(q_i).phi(k_j)      beyond
//
// Rows are taken in blocks of n = 64. The far part is causal attention over keys delayed by `window`: with a block go the
// keys from `window` before it, of which row t sees those up to its own place (a triangle), and sums over all earlier
// ones. With a window on both sides the far part on the right is the same pass over the sequence read backwards.
// The near part is a band of an n x (n + window) matrix; only vectors that touch the band are computed.

#pragma once

#include <algorithm>
#include <vector>

#include "backward.h"

namespace hla {

// One row of the batch and key-value head: keys, values and which are tokens, from either end.
struct Stream {
  long b, g, repeats, rows, keys, offset;
  bool backwards = false;
  std::vector<uint8_t> flags;  // validity with room on either side, so that no index needs a check
  long room;

  Stream(const Call& c, long stream)
      : b(stream / c.groups), g(stream % c.groups), repeats(c.heads / c.groups), rows(c.length), keys(c.keys),
        offset(c.offset), room(2 * c.window + 4 * BLOCK) {
    flags.assign(keys + 2 * room, 0);
    const uint8_t* mask = c.mask ? c.mask + b * c.mask_batch : nullptr;
    for (long j = c.skip ? c.skip[b] : 0; j < keys; ++j) flags[room + j] = mask ? mask[j] : 1;
  }
  const uint8_t* valid() const { return flags.data() + room; }

  // Both read backwards: token j becomes token keys - 1 - j.
  void reverse() {
    std::reverse(flags.begin(), flags.end());
    backwards = !backwards;
  }
  // Place of a row in the sequence.
  long row_at(long row) const { return backwards ? rows - 1 - row : row; }
  float mix(const Call& c, long h, long row) const {
    return static_cast<const float*>(c.mix.data)[b * c.mix.batch + h * c.mix.head + row_at(row) * c.mix.token];
  }
};

static inline Strided reversed(Strided tensor, long tokens, int bytes) {
  tensor.data = static_cast<char*>(tensor.data) + (tokens - 1) * tensor.token * bytes;
  tensor.token = -tensor.token;
  return tensor;
}

// What the query x of head h adds to its log mixing weight.
static inline float query_mix(const Call& c, long h, const float* x, int x_row) {
  const float part = dot(x, c.mix_weight + h * x_row, x_row) * std::sqrt(c.scaling);
  return part < -c.mix_bound ? -c.mix_bound : part > c.mix_bound ? c.mix_bound : part;
}

// The matrix products and exponentials of the near part of one block.
struct Band {
  int window, reach, columns, x_row, e_row;  // reach: last column of row t is t + reach
  float *key, *turned_key, *value, *turned_value, *weights, *slopes, *bias;
  // Keys and values slide through larger rooms: a block reads those that the one before has not.
  static constexpr int SLIDE = 4 * BLOCK;
  float *key_room, *value_room;
  int place = 0, held = 0;  // of the rooms' rows: the first, and how many are read
  long next = -1;           // first row of the block that would go on

  static int columns_of(const Call& c) { return padded(c.window + BLOCK + (c.both_sides ? c.window : 0)); }
  static size_t floats(const Call& c, bool backward) {
    const size_t columns = columns_of(c), x_row = padded(c.size), e_row = padded(c.value_size);
    return columns * (2 * x_row + e_row + BLOCK + 1 + (backward ? e_row + BLOCK : 0)) + SLIDE * (x_row + e_row) + 128;
  }
  Band(const Call& c, Room& room, bool backward)
      : window(c.window), reach(c.both_sides ? 2 * c.window - 1 : c.window), columns(columns_of(c)), x_row(padded(c.size)),
        e_row(padded(c.value_size)), turned_key(room.take((size_t)columns * x_row)),
        turned_value(backward ? room.take((size_t)columns * e_row) : nullptr),
        weights(room.take((size_t)columns * BLOCK)), slopes(backward ? room.take((size_t)columns * BLOCK) : nullptr),
        bias(room.take(columns)), key_room(room.take((size_t)(columns + SLIDE) * x_row)),
        value_room(room.take((size_t)(columns + SLIDE) * e_row)) {}

  // Keys and values from `window` before the block's first row on.
  template <typename T>
  void read(const Call& c, const Stream& s, long first, int count) {
    const uint8_t* valid = s.valid();
    columns = padded(window + count + (c.both_sides ? window : 0));
    const int kept = first == next ? std::min(held - BLOCK, columns) : 0;
    place = first == next ? place + BLOCK : 0;
    if (place > SLIDE) {
      memmove(key_room, key_room + (size_t)place * x_row, (size_t)kept * x_row * sizeof(float));
      memmove(value_room, value_room + (size_t)place * e_row, (size_t)kept * e_row * sizeof(float));
      place = 0;
    }
    key = key_room + (size_t)place * x_row;
    value = value_room + (size_t)place * e_row;
    read_rows<T>(c.key, s.b, s.g, first - window + kept, columns - kept, c.size, valid, key + (size_t)kept * x_row, x_row);
    read_rows<T>(c.value, s.b, s.g, first - window + kept, columns - kept, c.value_size, valid, value + (size_t)kept * e_row,
                 e_row);
    held = columns;
    next = first + BLOCK;
    for (int j = 0; j < columns; ++j) bias[j] = valid[first - window + j] ? 0.0f : -INFINITY;
    if (tiles_for(count)) return;
    transpose(columns, x_row, key, x_row, turned_key, columns);
    if (turned_value) transpose(columns, e_row, value, e_row, turned_value, columns);
  }

  // Columns that some row of the tile at i touches, in whole vectors.
  int begin_of(int i) const { return (i + 1) / LANES * LANES; }
  int end_of(int i, int tall) const { return std::min(padded(i + tall + reach), columns); }

  // exp(tau q.k - top) of all rows; top is found, or taken from the forward pass.
  void exponentials(int count, const float* query, float scaling, bool known, float* top) const {
    TileProducts* tiles = tiles_for(count);  // all columns: what lies outside of the band costs less than leaving it out
    if (tiles) tiles->multiply_turned(count, columns, x_row, query, x_row, key, x_row, weights, columns);
    for (int i = 0; i < count; i += TILE_ROWS) {
      const int tall = std::min(count - i, TILE_ROWS), begin = begin_of(i), end = end_of(i, tall);
      if (!tiles)
        strip(tall, end - begin, x_row, query + i * x_row, x_row, 1, turned_key + begin, columns,
              weights + (size_t)i * columns + begin, columns, false);
      for (int t = i; t < i + tall; ++t) {
        float* row = weights + (size_t)t * columns;
        VecInt lane;
        for (int j = 0; j < LANES; ++j) lane[j] = begin + j;
        Vec most = splat(-INFINITY);
        for (int j = begin; j < end; j += LANES, lane += LANES) {
          const VecInt inside = (lane > t) & (lane <= t + reach);
          const Vec logit = select(inside, load(row + j) * scaling + load(bias + j), splat(-INFINITY));
          store(row + j, logit);
          most = larger(most, logit);
        }
        if (!known) top[t] = max_of(most);
        if (top[t] == -INFINITY) {  // nothing near
          for (int j = begin; j < end; j += LANES) store(row + j, Vec{});
        } else {
          for (int j = begin; j < end; j += LANES) store(row + j, exp_of(load(row + j) - top[t]));
        }
      }
    }
  }

  // Zeros in the rows outside of the columns that their tiles touch.
  void clear_outside(int count, float* matrix) const {
    for (int t = 0; t < count; ++t) {
      const int i = t / TILE_ROWS * TILE_ROWS, begin = begin_of(i), end = end_of(i, std::min(count - i, TILE_ROWS));
      float* row = matrix + (size_t)t * columns;
      memset(row, 0, begin * sizeof(float));
      memset(row + end, 0, (columns - end) * sizeof(float));
    }
  }

  // Adds the near part to numerators and normalisers.
  void add_to(int count, float* out, float* normaliser) const {
    TileProducts* tiles = tiles_for(count);
    if (tiles) {
      clear_outside(count, weights);
      multiply(count, e_row, columns, weights, columns, 1, value, e_row, out, e_row, true);
    }
    for (int i = 0; i < count; i += TILE_ROWS) {
      const int tall = std::min(count - i, TILE_ROWS), begin = begin_of(i), end = end_of(i, tall);
      if (!tiles)
        strip(tall, e_row, end - begin, weights + (size_t)i * columns + begin, columns, 1, value + (size_t)begin * e_row,
              e_row, out + (size_t)i * e_row, e_row, true);
      for (int t = i; t < i + tall; ++t) {
        Vec total{};
        for (int j = begin; j < end; j += LANES) total += load(weights + (size_t)t * columns + j);
        normaliser[t] += sum_of(total);
      }
    }
  }

  // Gradients through the near weights: added to those of the rows' queries, and of the columns' keys and values.
  void back(int count, const float* query, float scaling, const BackRoom& rows, float* query_gradient, float* key_gradient,
            float* value_gradient) const {
    TileProducts* tiles = tiles_for(count);
    if (tiles) tiles->multiply_turned(count, columns, e_row, rows.gradient, e_row, value, e_row, slopes, columns);
    clear_outside(count, weights);
    clear_outside(count, slopes);
    for (int i = 0; i < count; i += TILE_ROWS) {
      const int tall = std::min(count - i, TILE_ROWS), begin = begin_of(i), end = end_of(i, tall);
      if (!tiles)
        strip(tall, end - begin, e_row, rows.gradient + (size_t)i * e_row, e_row, 1, turned_value + begin, columns,
              slopes + (size_t)i * columns + begin, columns, false);
      for (int t = i; t < i + tall; ++t) {
        float *weight = weights + (size_t)t * columns, *slope = slopes + (size_t)t * columns;
        Vec total{}, ties{};
        for (int j = begin; j < end; j += LANES) {
          const Vec here = load(weight + j) * (load(slope + j) + rows.normaliser_gradient[t]);
          store(slope + j, here);
          total += here;
          ties += select(load(weight + j) >= 1.0f, splat(1.0f), Vec{});
        }
        // The largest exponent is what the near weights are relative to: the far ones are not.
        const float shared = sum_of(total) / std::max(sum_of(ties), 1.0f);
        for (int j = begin; j < end; j += LANES) {
          const Vec mine = select(load(weight + j) >= 1.0f, splat(shared), Vec{});
          store(slope + j, (load(slope + j) - mine) * scaling);
        }
      }
      if (!tiles)
        strip(tall, x_row, end - begin, slopes + (size_t)i * columns + begin, columns, 1, key + (size_t)begin * x_row, x_row,
              query_gradient + (size_t)i * x_row, x_row, true);
    }
    if (tiles) {
      multiply(count, x_row, columns, slopes, columns, 1, key, x_row, query_gradient, x_row, true);
      multiply(columns, x_row, count, slopes, 1, columns, query, x_row, key_gradient, x_row, true);
      multiply(columns, e_row, count, weights, 1, columns, rows.gradient, e_row, value_gradient, e_row, true);
      return;
    }
    for (int j = 0; j < columns; j += TILE_ROWS) {
      const int tall = std::min(columns - j, TILE_ROWS);
      const int from = std::max(0, j - reach), to = std::min(count, j + tall);  // rows whose band meets these columns
      if (from >= to) continue;
      strip(tall, x_row, to - from, slopes + (size_t)from * columns + j, 1, columns, query + (size_t)from * x_row, x_row,
            key_gradient + (size_t)j * x_row, x_row, true);
      strip(tall, e_row, to - from, weights + (size_t)from * columns + j, 1, columns, rows.gradient + (size_t)from * e_row,
            e_row, value_gradient + (size_t)j * e_row, e_row, true);
    }
  }
};

// The far part: causal attention over keys delayed by `window`.
struct Far {
  Side keys, queries;
  Sums sums;
  float *value, *turned, *weights;
  bool held = false;  // whether the sums hold any key
  bool here = false;  // whether the block's keys hold one

  static size_t floats(const Call& c) {
    const size_t x_row = padded(c.size), e_row = padded(c.value_size), m_row = c.key_map.features();
    return Side::floats(c.key_map, x_row) + Side::floats(c.query_map, x_row) + Sums::floats(m_row, e_row) +
           BLOCK * (e_row + m_row + BLOCK) + 512;
  }
  Far(const Call& c, Room& room)
      : keys(c.key_map, padded(c.size), room), queries(c.query_map, padded(c.size), room),
        sums(c.key_map.features(), padded(c.value_size), room), value(room.take(BLOCK * padded(c.value_size))),
        turned(room.take((size_t)BLOCK * c.key_map.features())), weights(room.take(BLOCK * BLOCK)) {}

  void clear() {
    sums.clear();
    held = false;
  }

  // Whether any key is far from the block's rows.
  bool any() const { return held || here; }

  template <typename T>
  void read_keys(const Call& c, const Stream& s, long first, int count) {
    keys.read<T>(c.key, s.b, s.g, first - c.window, count, c.size, s.valid());
    read_rows<T>(c.value, s.b, s.g, first - c.window, count, c.value_size, s.valid(), value, sums.columns);
    turn_columns(count, sums.rows, keys.features, turned);
  }

  static bool has_keys(const Call& c, const Stream& s, long first, int count) {
    const uint8_t* valid = s.valid() + first - c.window;
    return std::any_of(valid, valid + count, [](uint8_t token) { return token != 0; });
  }

  // The keys, if there are any: at the ends of a sequence there are none, and short inputs consist of little else.
  template <typename T>
  void begin(const Call& c, const Stream& s, long first, int count) {
    here = has_keys(c, s, first, count);
    if (here) read_keys<T>(c, s, first, count);
  }

  // Queries and their features, times the mixing weight; what is no token is a query of zeros.
  template <typename T>
  void read_queries(const Call& c, const Stream& s, long h, long start, int count) {
    const uint8_t* valid = s.valid() + s.offset;
    queries.read<T>(c.query, s.b, h, start, count, c.size, valid, false);
    for (int t = 0; t < count; ++t) {
      float mix = s.mix(c, h, start + t);
      if (c.mix_weight) mix *= std::exp(query_mix(c, h, queries.x + (long)t * queries.x_row, queries.x_row));
      scale_all(queries.features + (long)t * sums.rows, sums.rows, mix);
    }
  }

  void rows(int count, float* out, float* normaliser) {
    if (here) {
      causal_rows(count, queries, keys, turned, value, sums, held, weights, out, normaliser);
    } else if (held) {
      sums_rows(count, queries, sums, out, normaliser);
    } else {
      memset(out, 0, (size_t)count * sums.columns * sizeof(float));
      memset(normaliser, 0, count * sizeof(float));
    }
  }

  void go_on(int count) {
    if (!here) return;
    sums.add(keys.features, value, count);
    held = true;
  }
};

template <typename T>
static int windowed(const Call& c) {
  const int x_row = padded(c.size), e_row = padded(c.value_size);
  const long repeats = c.heads / c.groups;
  const size_t behind_floats = c.both_sides ? (size_t)repeats * c.length * (e_row + 1) + 32 : 0;
  const size_t room_floats = Far::floats(c) + Band::floats(c, false) + BLOCK * (x_row + e_row + 2) + behind_floats + 256;
  const long kv_size = (long)c.key_map.parts * c.key_map.width * c.value_size, k_size = (long)c.key_map.parts * c.key_map.width;
  int failed = 0;
#pragma omp parallel num_threads(c.threads)
  {
    Room room(room_floats + TileProducts::floats(rounds<T>));
    if (room.failed()) {
#pragma omp atomic write
      failed = 1;
    }
    TileProducts tiles(rounds<T>, room);
    Far far(c, room);
    Band band(c, room, false);
    float *out = room.take(BLOCK * e_row), *normaliser = room.take(BLOCK), *top = room.take(BLOCK);
    float *behind = room.take(c.both_sides ? (size_t)repeats * c.length * e_row : 0);
    float *behind_normaliser = room.take(c.both_sides ? (size_t)repeats * c.length : 0);
#pragma omp barrier
    if (!failed) {
#pragma omp for schedule(dynamic)
      for (long task = 0; task < c.batch * c.groups; ++task) {
        Stream s(c, task);
        far.clear();
        if (c.both_sides) {
          Call back = c;
          back.query = reversed(c.query, c.length, sizeof(T));
          back.key = reversed(c.key, c.keys, sizeof(T));
          back.value = reversed(c.value, c.keys, sizeof(T));
          s.reverse();
          for (long start = 0; start < c.length; start += BLOCK) {
            const int count = (int)std::min<long>(c.length - start, BLOCK);
            far.begin<T>(back, s, start, count);
            for (long r = 0; r < repeats; ++r) {
              if (far.any()) far.read_queries<T>(back, s, s.g * repeats + r, start, count);
              far.rows(count, behind + (r * c.length + start) * e_row, behind_normaliser + r * c.length + start);
            }
            if (start + count < c.length) far.go_on(count);
          }
          s.reverse();
          far.clear();
        } else if (c.state) {
          unpack_state(c.key_map, c.value_size, c.state + task * kv_size, c.state_sum + task * k_size, far.sums);
          far.held = true;
        }
        for (long start = 0; start < c.length; start += BLOCK) {
          const int count = (int)std::min<long>(c.length - start, BLOCK);
          const long first = s.offset + start;
          far.begin<T>(c, s, first, count);
          band.read<T>(c, s, first, count);
          for (long r = 0; r < repeats; ++r) {
            const long h = s.g * repeats + r;
            if (far.any()) {
              far.read_queries<T>(c, s, h, start, count);
            } else {  // the near part alone
              read_rows<T>(c.query, s.b, h, start, count, c.size, s.valid() + s.offset, far.queries.x, x_row);
            }
            far.rows(count, out, normaliser);
            for (int t = 0; c.both_sides && t < count; ++t) {
              const long place = r * c.length + c.length - 1 - (start + t);
              normaliser[t] += behind_normaliser[place];
              for (int j = 0; j < e_row; j += LANES)
                store(out + t * e_row + j, load(out + t * e_row + j) + load(behind + place * e_row + j));
            }
            band.exponentials(count, far.queries.x, c.scaling, false, top);
            band.add_to(count, out, normaliser);
            const size_t place = (s.b * c.heads + h) * c.length + start;
            if (c.normaliser) memcpy(c.normaliser + place, normaliser, count * sizeof(float));
            if (c.top) memcpy(c.top + place, top, count * sizeof(float));
            divide_rows<T>(c, s.b, h, start, count, out, normaliser);
          }
          if (start + count < c.length || c.next_state) far.go_on(count);
        }
        if (c.next_state)
          pack_state(c.key_map, c.value_size, far.sums, c.next_state + task * kv_size, c.next_sum + task * k_size);
      }
    }
  }
  return failed;
}

// Gradients that are still being added up: of all rows of a key-value head's queries, and of its keys and values, in the
// order of the sequence, with room for blocks that reach beyond either end.
struct Collected {
  long rows, keys, room;
  int x_row, e_row;
  std::vector<float> query, key, value;

  Collected(const Call& c)
      : rows(c.length), keys(c.keys), room(2 * c.window + 4 * BLOCK), x_row(padded(c.size)), e_row(padded(c.value_size)),
        query((c.heads / c.groups) * rows * x_row), key((keys + 2 * room) * x_row), value((keys + 2 * room) * e_row) {}
  void clear() {
    for (auto* held : {&query, &key, &value}) std::fill(held->begin(), held->end(), 0.0f);
  }
  float* query_at(long r, long row) { return query.data() + (r * rows + row) * x_row; }
  float* key_at(long token) { return key.data() + (room + token) * x_row; }
  float* value_at(long token) { return value.data() + (room + token) * e_row; }
};

// Adds rows [count, width] to rows that run forwards or backwards from `to`.
static void add_rows_along(const float* from, int width, int count, float* to, bool backwards) {
  for (int t = 0; t < count; ++t) {
    float* row = to + (backwards ? -(long)t : (long)t) * width;
    for (int j = 0; j < width; j += LANES) store(row + j, load(row + j) + load(from + (size_t)t * width + j));
  }
}

// What the backward pass of the far part needs besides the forward's room.
struct FarBack {
  float *turned_sums, *turned_value, *slopes, *key_gradient;

  static size_t floats(const Call& c) {
    const size_t e_row = padded(c.value_size), m_row = c.key_map.features();
    return m_row * e_row + e_row * BLOCK + BLOCK * BLOCK + BLOCK * m_row + 256;
  }
  FarBack(const Call& c, Room& room)
      : turned_sums(room.take((size_t)c.key_map.features() * padded(c.value_size))),
        turned_value(room.take((size_t)padded(c.value_size) * BLOCK)), slopes(room.take(BLOCK * BLOCK)),
        key_gradient(room.take((size_t)BLOCK * c.key_map.features())) {}
};

// The far part's gradients in one direction; `normaliser` of all rows in the order of the sequence.
template <typename T>
static void far_back(const Call& c, const Stream& s, Far& far, FarBack& room, BackRoom& back,
                     float* normaliser, Collected& to) {
  const int e_row = far.sums.columns, m_row = far.sums.rows;
  auto read_rows_back = [&](long h, long start, int count) {
    const float* all = c.normaliser + (s.b * c.heads + h) * c.length;
    for (int t = 0; t < count; ++t) normaliser[t] = all[s.row_at(start + t)];
    row_gradients<T>(c, s.b, h, start, count, normaliser, back);
  };
  const auto key_place = [&](long token) { return s.backwards ? c.keys - 1 - token : token; };

  // Rows before the first block that has keys have no far part.
  long begin = 0;
  while (begin < c.length && !Far::has_keys(c, s, s.offset + begin, (int)std::min<long>(c.length - begin, BLOCK))) begin += BLOCK;
  far.clear();
  memset(room.turned_sums, 0, (size_t)m_row * e_row * sizeof(float));
  for (long start = begin; start < c.length; start += BLOCK) {
    const int count = (int)std::min<long>(c.length - start, BLOCK);
    far.read_keys<T>(c, s, s.offset + start, count);
    turn_columns(count, e_row, far.value, room.turned_value);
    for (long r = 0; r < s.repeats; ++r) {
      const long h = s.g * s.repeats + r;
      far.read_queries<T>(c, s, h, start, count);
      read_rows_back(h, start, count);
      weight_gradients(count, e_row, far.value, room.turned_value, back, room.slopes);
      multiply(count, m_row, e_row, back.gradient, e_row, 1, room.turned_sums, m_row, back.feature_gradient, m_row, false);
      add_outer(back.normaliser_gradient, far.sums.k, m_row, count, back.feature_gradient);
      below_times(count, room.slopes, far.keys.features, m_row, back.feature_gradient, true);
      for (int t = 0; t < count; ++t) {
        float *slope = back.feature_gradient + (long)t * m_row, *feature = far.queries.features + (long)t * m_row;
        const float mix = s.mix(c, h, start + t);
        if (c.mix_gradient)
          c.mix_gradient[(s.b * c.heads + h) * c.length + s.row_at(start + t)] += dot(slope, feature, m_row);
        scale_all(slope, m_row, mix);
        if (mix != 0.0f) scale_all(feature, m_row, 1.0f / mix);
      }
      side_back(c, far.queries, s.b, h, c.heads, start, count, c.query_weight_gradient, c.query_bias_gradient, back);
      add_rows_along(back.x_gradient, to.x_row, count, to.query_at(r, s.row_at(start)), s.backwards);
    }
    multiply(e_row, m_row, count, far.value, 1, e_row, far.keys.features, m_row, room.turned_sums, m_row, true);
    Sums::add_rows(far.keys.features, m_row, count, far.sums.k);
  }
  far.clear();
  for (long start = c.length > 0 ? (c.length - 1) / BLOCK * BLOCK : -1; start >= begin; start -= BLOCK) {
    const int count = (int)std::min<long>(c.length - start, BLOCK);
    const long first = s.offset + start - c.window;
    far.read_keys<T>(c, s, s.offset + start, count);
    turn_columns(count, e_row, far.value, room.turned_value);
    transpose(m_row, e_row, far.sums.kv, e_row, room.turned_sums, m_row);
    multiply(count, m_row, e_row, far.value, e_row, 1, room.turned_sums, m_row, room.key_gradient, m_row, false);
    multiply(count, e_row, m_row, far.keys.features, m_row, 1, far.sums.kv, e_row, back.value_gradient, e_row, false);
    add_to_rows(far.sums.k, m_row, count, room.key_gradient);
    for (long r = 0; r < s.repeats; ++r) {
      const long h = s.g * s.repeats + r;
      far.read_queries<T>(c, s, h, start, count);
      read_rows_back(h, start, count);
      weight_gradients(count, e_row, far.value, room.turned_value, back, room.slopes);
      triangle(count, m_row, far.queries.features, far.keys.features, far.turned, far.weights);
      above_times(count, room.slopes, far.queries.features, m_row, room.key_gradient);
      above_times(count, far.weights, back.gradient, e_row, back.value_gradient);
      multiply(m_row, e_row, count, far.queries.features, 1, m_row, back.gradient, e_row, far.sums.kv, e_row, true);
      add_weighted(back.normaliser_gradient, far.queries.features, m_row, count, far.sums.k);
    }
    memcpy(back.feature_gradient, room.key_gradient, (size_t)count * m_row * sizeof(float));
    clear_masked(s.valid(), first, count, back.feature_gradient, m_row);
    clear_masked(s.valid(), first, count, back.value_gradient, e_row);
    side_back(c, far.keys, s.b, s.g, c.groups, first, count, c.key_weight_gradient, c.key_bias_gradient, back);
    clear_masked(s.valid(), first, count, back.x_gradient, to.x_row);
    add_rows_along(back.x_gradient, to.x_row, count, to.key_at(key_place(first)), s.backwards);
    add_rows_along(back.value_gradient, e_row, count, to.value_at(key_place(first)), s.backwards);
  }
}

template <typename T>
static int windowed_backward(const Call& c) {
  const int x_row = padded(c.size), e_row = padded(c.value_size);
  const size_t room_floats =
      Far::floats(c) + FarBack::floats(c) + BackRoom::floats(c) + Band::floats(c, true) + BLOCK * (x_row + 2) + 256;
  Call other = c;
  if (c.both_sides) {
    for (Strided Call::*rows : {&Call::query, &Call::out, &Call::out_gradient})
      other.*rows = reversed(c.*rows, c.length, sizeof(T));
    for (Strided Call::*tokens : {&Call::key, &Call::value}) other.*tokens = reversed(c.*tokens, c.keys, sizeof(T));
  }
  int failed = 0;
#pragma omp parallel num_threads(c.threads)
  {
    Room room(room_floats + TileProducts::floats(rounds<T>));
    if (room.failed()) {
#pragma omp atomic write
      failed = 1;
    }
    TileProducts tiles(rounds<T>, room);
    Far far(c, room);
    FarBack far_room(c, room);
    BackRoom back(c, room);
    Band band(c, room, true);
    float *query = room.take(BLOCK * x_row), *normaliser = room.take(BLOCK), *top = room.take(BLOCK);
    Collected to(c);
#pragma omp barrier
    if (!failed) {
#pragma omp for schedule(dynamic)
      for (long task = 0; task < c.batch * c.groups; ++task) {
        Stream s(c, task);
        to.clear();
        far_back<T>(c, s, far, far_room, back, normaliser, to);
        if (c.both_sides) {
          s.reverse();
          far_back<T>(other, s, far, far_room, back, normaliser, to);
          s.reverse();
        }
        for (long start = 0; start < c.length; start += BLOCK) {
          const int count = (int)std::min<long>(c.length - start, BLOCK);
          const long first = s.offset + start;
          band.read<T>(c, s, first, count);
          for (long r = 0; r < s.repeats; ++r) {
            const long h = s.g * s.repeats + r, place = (s.b * c.heads + h) * c.length + start;
            read_rows<T>(c.query, s.b, h, start, count, c.size, s.valid() + s.offset, query, x_row);
            row_gradients<T>(c, s.b, h, start, count, c.normaliser + place, back);
            memcpy(top, c.top + place, count * sizeof(float));
            band.exponentials(count, query, c.scaling, true, top);
            band.back(count, query, c.scaling, back, to.query_at(r, start), to.key_at(first - c.window),
                      to.value_at(first - c.window));
          }
        }
        for (long r = 0; r < s.repeats; ++r) {
          for (long row = 0; row < c.length; ++row)
            if (!s.valid()[s.offset + row]) memset(to.query_at(r, row), 0, x_row * sizeof(float));
          write_rows<T>(c.query_gradient, s.b, s.g * s.repeats + r, 0, (int)c.length, c.size, to.query_at(r, 0), x_row);
        }
        write_rows<T>(c.key_gradient, s.b, s.g, 0, (int)c.keys, c.size, to.key_at(0), x_row);
        write_rows<T>(c.value_gradient, s.b, s.g, 0, (int)c.keys, c.value_size, to.value_at(0), e_row);
      }
    }
  }
  return failed;
}

}  // namespace hla
