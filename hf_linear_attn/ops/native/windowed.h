// Exact weights inside a window, kernelized ones beyond it, one normaliser (see ops/windowed.py), for maps without a log
// scale:
//     w_ij = exp(tau q_i.k_j - top_i)   inside,  top_i the largest exponent there
//     w_ij = mix phi(q_i).phi(k_j)      beyond
//
// Rows are taken in blocks of n = 64. The far part is causal attention over keys delayed by `window`: with a block go the
// keys from `window` before it, of which row t sees those up to its own place (a triangle), and sums over all earlier
// ones. With a window on both sides go as well the keys from `window` behind it, of which row t sees those from its own
// place on, and sums over all later ones: a first pass from the end leaves these for every block.
// The near part is a band of an n x (n + window) matrix; only vectors that touch the band are computed.

#pragma once

#include <algorithm>
#include <climits>
#include <initializer_list>
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

// What the query x of head h adds to its log mixing weight; root: of the scaling.
static inline float query_mix(const Call& c, long h, float root, const float* x, int x_row) {
  const float part = dot(x, c.mix_weight + h * x_row, x_row) * root;
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
      }
      for (int t = i; t < i + tall; ++t) {  // (a pass of its own: it waits for the maxima)
        float* row = weights + (size_t)t * columns;
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

// A block of far keys: features and values.
struct FarKeys {
  static constexpr long NOWHERE = LONG_MIN;
  Side side;
  float *value, *turned;
  long first = NOWHERE;  // place of the first one
  bool here = false;     // whether any is a token
  int held = 0;          // how many are read
  bool is_turned = false;

  static size_t floats(const Call& c) {
    const size_t e_row = padded(c.value_size), m_row = c.key_map.features();
    return Side::floats(c.key_map, padded(c.size)) + BLOCK * (e_row + m_row) + 128;
  }
  FarKeys(const Call& c, Room& room)
      : side(c.key_map, padded(c.size), room), value(room.take(BLOCK * padded(c.value_size))),
        turned(room.take((size_t)BLOCK * c.key_map.features())) {}

  static bool any(const Stream& s, long from, int count) {
    const uint8_t* valid = s.valid() + from;
    return std::any_of(valid, valid + count, [](uint8_t token) { return token != 0; });
  }

  template <typename T>
  void read(const Call& c, const Stream& s, long from, int count) {
    side.read<T>(c.key, s.b, s.g, from, count, c.size, s.valid());
    read_rows<T>(c.value, s.b, s.g, from, count, c.value_size, s.valid(), value, padded(c.value_size));
    held = count;
    is_turned = false;
  }

  // The features transposed, where the triangle of so many rows wants them so.
  void turn(int rows) {
    if (is_turned || tiles_for(rows)) return;
    transpose(held, side.row, side.features, side.row, turned, BLOCK);
    is_turned = true;
  }

  // The keys, if there are any: at the ends of a sequence there are none, and short inputs consist of little else.
  template <typename T>
  void begin(const Call& c, const Stream& s, long from, int count) {
    first = from;
    here = any(s, from, count);
    if (here) read<T>(c, s, from, count);
  }
};

// Upper triangle of rows [n, m] columns [64, m]^T, zeros below it. turned: the columns transposed, where no tiles serve.
static void upper_triangle(int count, int depth, const float* rows, const float* columns, const float* turned, float* out) {
  if (TileProducts* tiles = tiles_for(count)) {  // the other half costs less than leaving it out
    tiles->multiply_turned(count, BLOCK, depth, rows, depth, columns, depth, out, BLOCK);
    for (int r = 1; r < count; ++r) memset(out + r * BLOCK, 0, r * sizeof(float));
    return;
  }
  for (int i = 0; i < count; i += TILE_ROWS) {
    const int tall = std::min(count - i, TILE_ROWS), begin = i / LANES * LANES;
    strip(tall, BLOCK - begin, depth, rows + (size_t)i * depth, depth, 1, turned + begin, BLOCK, out + i * BLOCK + begin, BLOCK,
          false);
    for (int r = i; r < i + tall; ++r) memset(out + r * BLOCK, 0, r * sizeof(float));
  }
}

// out [n, width] += upper triangle [n, 64] right [64, width].
static void add_upper_times(int count, const float* weights, const float* right, int width, float* out) {
  if (tiles_for(count)) return multiply(count, width, BLOCK, weights, BLOCK, 1, right, width, out, width, true);
  for (int i = 0; i < count; i += TILE_ROWS)
    strip(std::min(count - i, TILE_ROWS), width, BLOCK - i, weights + i * BLOCK + i, BLOCK, 1, right + (size_t)i * width, width,
          out + (size_t)i * width, width, true);
}

// The far part of a block of rows: the sums that all of them see, and blocks of keys of which each sees some.
struct Far {
  bool both_sides;
  Side queries;
  long stride;  // of sums
  Sums sums;    // over the keys before those of `before`
  float* weights;
  std::vector<FarKeys> blocks;
  FarKeys *before, *after;  // row t sees the keys up to place t of the one, and from place t on of the other
  bool held = false;        // whether the sums hold any key
  // On both sides: for every block of rows the sums over the keys behind those of `after`, where there are some.
  float* later;
  long later_blocks = 0;
  Sums together;
  const Sums* seen = nullptr;

  // On both sides blocks of rows share blocks of keys, where these meet: as many are kept as that takes, if they are few.
  static int kept(const Call& c, bool both_sides) {
    if (!both_sides) return 1;
    return 2 * c.window % BLOCK == 0 && 2 * c.window <= 3 * BLOCK ? 2 * c.window / BLOCK + 1 : 2;
  }
  static long row_blocks(const Call& c) { return (c.length + BLOCK - 1) / BLOCK; }
  static size_t sums_floats(const Call& c) {
    return (Sums::floats(c.key_map.features(), padded(c.value_size)) + 15) / 16 * 16;
  }
  static size_t floats(const Call& c, bool both_sides) {
    return kept(c, both_sides) * FarKeys::floats(c) + Side::floats(c.query_map, padded(c.size)) + BLOCK * BLOCK + 128 +
           sums_floats(c) * (both_sides ? 2 + row_blocks(c) : 1);
  }
  Far(const Call& c, Room& room, bool both)
      : both_sides(both), queries(c.query_map, padded(c.size), room), stride(sums_floats(c)), sums(made(c, room.take(stride))),
        weights(room.take(BLOCK * BLOCK)), later(both ? room.take(stride * row_blocks(c)) : nullptr),
        together(made(c, both ? room.take(stride) : nullptr)) {
    for (int i = 0; i < kept(c, both); ++i) blocks.emplace_back(c, room);
    before = after = &blocks[0];
  }
  long numbers() const { return (long)sums.rows * (sums.columns + 1); }  // kv, and k behind it
  static Sums made(const Call& c, float* at) { return Sums(c.key_map.features(), padded(c.value_size), at); }

  void clear() {
    sums.clear();
    held = false;
    for (FarKeys& block : blocks) block.first = FarKeys::NOWHERE;
  }

  // Both sides: from the end on, the sums over the keys behind each block's `after`. Begins and ends cleared.
  template <typename T>
  void sum_later(const Call& c, const Stream& s) {
    const long from = s.offset + c.window;  // where the first block's `after` begins
    later_blocks = c.keys > from ? (c.keys - from + BLOCK - 1) / BLOCK - 1 : 0;
    for (long block = later_blocks; block > 0; --block) {
      const long first = from + block * BLOCK;
      if (FarKeys::any(s, first, BLOCK)) {
        before->read<T>(c, s, first, BLOCK);
        sums.add(before->side.features, before->value, BLOCK);
      }
      if (block <= row_blocks(c)) memcpy(later + (block - 1) * stride, sums.kv, numbers() * sizeof(float));
    }
    clear();
  }

  // The keys from a place on: those that are there already, or read in place of the foremost.
  template <typename T>
  FarKeys* keys_at(const Call& c, const Stream& s, long from) {
    FarKeys* foremost = &blocks[0];
    for (FarKeys& block : blocks) {
      if (block.first == from) return &block;
      if (block.first < foremost->first) foremost = &block;
    }
    foremost->begin<T>(c, s, from, BLOCK);
    return foremost;
  }

  // What the rows of a block see, the first of them key `first`.
  template <typename T>
  void begin(const Call& c, const Stream& s, long start, int count) {
    const long first = s.offset + start, block = start / BLOCK;
    if (!both_sides) {
      before->begin<T>(c, s, first - c.window, count);
      if (before->here) before->turn(count);
      seen = held ? &sums : nullptr;
      return;
    }
    after = keys_at<T>(c, s, first + c.window);  // this one first: it does not take the place of the other
    before = keys_at<T>(c, s, first - c.window);
    for (FarKeys* keys : {after, before})
      if (keys->here) keys->turn(count);
    if (block >= later_blocks) {
      seen = held ? &sums : nullptr;
      return;
    }
    const float* behind = later + block * stride;
    for (long i = 0; i < numbers(); i += LANES) store(together.kv + i, load(sums.kv + i) + load(behind + i));
    seen = &together;
  }

  // Whether any key is far from the block's rows.
  bool any() const { return seen || before->here || after->here; }

  // Queries and their features, times the mixing weight; what is no token is a query of zeros.
  template <typename T>
  void read_queries(const Call& c, const Stream& s, long h, long start, int count) {
    const uint8_t* valid = s.valid() + s.offset;
    queries.read<T>(c.query, s.b, h, start, count, c.size, valid, false);
    float mix[BLOCK] = {};
    if (c.mix_weight) {
      const float root = std::sqrt(c.scaling);
      for (int t = 0; t < count; ++t) mix[t] = query_mix(c, h, root, queries.x + (long)t * queries.x_row, queries.x_row);
      for (int t = 0; t < padded(count); t += LANES) store(mix + t, exp_of(load(mix + t)));
    }
    for (int t = 0; t < count; ++t) {
      const float rest = s.mix(c, h, start + t);
      scale_all(queries.features + (long)t * sums.rows, sums.rows, c.mix_weight ? rest * mix[t] : rest);
    }
  }

  void rows(int count, float* out, float* normaliser) {
    if (before->here) {
      causal_rows(count, queries, before->side, before->turned, before->value, seen ? *seen : sums, seen, weights, out,
                  normaliser);
    } else if (seen) {
      sums_rows(count, queries, *seen, out, normaliser);
    } else {
      memset(out, 0, (size_t)count * sums.columns * sizeof(float));
      memset(normaliser, 0, count * sizeof(float));
    }
    if (!both_sides || !after->here) return;
    upper_triangle(count, sums.rows, queries.features, after->side.features, after->turned, weights);
    add_upper_times(count, weights, after->value, sums.columns, out);
    for (int t = 0; t < count; ++t) normaliser[t] += row_sum(weights + t * BLOCK, BLOCK - 1);
  }

  void go_on(int count) {
    if (!before->here) return;
    sums.add(before->side.features, before->value, count);
    held = true;
  }
};

template <typename T>
static int windowed(const Call& c) {
  const int x_row = padded(c.size), e_row = padded(c.value_size);
  const long repeats = c.heads / c.groups;
  const size_t room_floats = Far::floats(c, c.both_sides) + Band::floats(c, false) + BLOCK * (x_row + e_row + 2) + 256;
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
    Far far(c, room, c.both_sides);
    Band band(c, room, false);
    float *out = room.take(BLOCK * e_row), *normaliser = room.take(BLOCK), *top = room.take(BLOCK);
#pragma omp barrier
    if (!failed) {
#pragma omp for schedule(dynamic)
      for (long task = 0; task < c.batch * c.groups; ++task) {
        Stream s(c, task);
        far.clear();
        if (c.both_sides) {
          far.sum_later<T>(c, s);
        } else if (c.state) {
          unpack_state(c.key_map, c.value_size, c.state + task * kv_size, c.state_sum + task * k_size, far.sums);
          far.held = true;
        }
        for (long start = 0; start < c.length; start += BLOCK) {
          const int count = (int)std::min<long>(c.length - start, BLOCK);
          const long first = s.offset + start;
          far.begin<T>(c, s, start, count);
          band.read<T>(c, s, first, count);
          for (long r = 0; r < repeats; ++r) {
            const long h = s.g * repeats + r;
            if (far.any()) {
              far.read_queries<T>(c, s, h, start, count);
            } else {  // the near part alone
              read_rows<T>(c.query, s.b, h, start, count, c.size, s.valid() + s.offset, far.queries.x, x_row);
            }
            far.rows(count, out, normaliser);
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

}  // namespace hla
