// Kernelized attention: o_i = phi(q_i) S / phi(q_i) z with S = sum_j phi(k_j) v_j, z = sum_j phi(k_j).
//
// One pass over blocks of 64 tokens; features live in one block's room only. Every (row, key-value head) is a task of its
// own, and long bidirectional inputs are cut into segments of a fixed length: results depend neither on the number of
// threads nor on the rest of the batch.

#pragma once

#include <algorithm>
#include <vector>

#include "decay.h"
#include "io.h"
#include "maps.h"

namespace hla {

constexpr float FLOOR = 1e-20f;       // of a normaliser; see ops/common.py
constexpr long SEGMENT = 2048;        // tokens whose sums one task adds up
constexpr float SAFE_RANGE = 15.0f;   // of log scales that one common reference serves

struct Call {
  Strided query, key, value, out;            // [B, H | G, L | S, d | e]
  Strided out_gradient;                      // as out
  Strided query_gradient, key_gradient, value_gradient;
  const uint8_t* mask;                       // [B, S], 1: a token; null: all of them
  int64_t mask_batch;
  int64_t batch, heads, groups, length, keys;
  int32_t size, value_size;                  // d, e
  int32_t dtype, threads;
  Map query_map, key_map;
  const float *state, *state_sum, *state_scale;      // [B, G, m, e], [B, G, m], [B, G] or null
  float *next_state, *next_sum, *next_scale;         // written by the causal form
  float* normaliser;                                 // [B, H, L]: the causal form leaves it for its backward; or null
  float *query_weight_gradient, *query_bias_gradient;  // [B, H, d, padded f], [B, H, padded f] or null
  float *key_weight_gradient, *key_bias_gradient;      // [B, G, ...]
  // Windowed forms only: exact weights near, kernelized ones far.
  const int64_t* skip;                                 // [B]: the first keys that are no tokens; null: none
  Strided mix;                                         // [B, H, L]: exp of the rows' log mixing weights
  float* top;                                          // [B, H, L]: stabilisers, kept for the backward; or null
  float* mix_gradient;                                 // [B, H, L], of the log mixing weights
  int64_t offset;                                      // the key that row 0 is
  int32_t window, both_sides;                          // both_sides: distances below `window` before and after
  float scaling;
  // One token of a hybrid: the last `window` keys [B, G, w, d], values, and which are tokens [B, w]; before and after.
  // A ring of either kind is followed by that of the next head after ring_room tokens (next_ring_room).
  const void *ring_key, *ring_value;
  const uint8_t* ring_mask;
  void *next_ring_key, *next_ring_value;
  uint8_t* next_ring_mask;
  int64_t ring_room, next_ring_room;
  // Log mixing weights by formula: `mix` and clip(√τ u·q, ±bound), u [H, padded d] or null. For one token they are
  // b + clip(√τ u·q, ±bound) - log(1 + n / N), b [H]; null b: `mix` holds them.
  const float *mix_base, *mix_weight;
  const int64_t* count;                                // [B]: tokens before this one, of which n lie outside; null: n = 0
  int64_t* next_count;                                 // with this one; or null
  float mix_bound, saturation;                         // N
  // Causal form with given features only: log decays [B, G, L, m] of the sums, in float32; null data: none.
  Strided decay;
};

// A map with what a block of it needs: sides are tokens of one head, x and its features.
struct Side {
  const Map* map;
  int row;        // features of a token, padded
  int x_row;      // padded d
  float *x, *y, *features, *scale;

  static size_t floats(const Map& map, int x_row, int tokens = BLOCK) {
    const size_t made = map.activation == GIVEN ? 0 : map.segment() + map.features();
    return tokens * (x_row + made + 1) + 64;
  }
  Side(const Map& m, int x_padded, Room& room, int tokens = BLOCK)
      : map(&m), row(m.features()), x_row(x_padded), x(room.take((size_t)tokens * x_padded)),
        y(m.activation == GIVEN ? nullptr : room.take((size_t)tokens * m.segment())),
        features(m.activation == GIVEN ? x : room.take((size_t)tokens * m.features())),
        scale(room.take(tokens)) {}

  // Tokens that the mask drops are zero; as keys they have no features either.
  template <typename T>
  void read(const Strided& from, long b, long head, long start, int count, int size, const uint8_t* mask,
            bool are_keys = true) {
    if (map->activation == GIVEN)
      read_rows<float>(from, b, head, start, count, size, mask, x, x_row);
    else
      read_rows<T>(from, b, head, start, count, size, mask, x, x_row);
    if (map->scales) memcpy(scale, map->scales + b * map->scale_batch + head * map->scale_head + start, count * sizeof(float));
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
    for (int t = 0; t < count; ++t) {
      const float factor = scale[t] == -INFINITY ? 0.0f : std::exp(scale[t] - reference);
      for (int j = 0; j < row; j += LANES) store(features + t * row + j, load(features + t * row + j) * factor);
    }
  }
};

// S [m, e], z [m] and the log scale that both are relative to.
struct Sums {
  float *kv, *k;
  float scale;
  int rows, columns;

  static size_t floats(int rows, int columns) { return (size_t)rows * columns + rows + 32; }
  Sums(int m, int e, Room& room) : kv(room.take((size_t)m * e)), k(room.take(m)), scale(-INFINITY), rows(m), columns(e) {}
  Sums(int m, int e, float* at) : kv(at), k(at + (size_t)m * e), scale(-INFINITY), rows(m), columns(e) {}

  void clear() {
    memset(kv, 0, (size_t)rows * columns * sizeof(float));
    memset(k, 0, rows * sizeof(float));
    scale = -INFINITY;
  }

  // Makes `reference` (at least the present scale) what the sums are relative to.
  void move(float reference) {
    if (reference == scale) return;
    const float factor = scale == -INFINITY ? 0.0f : std::exp(scale - reference);
    for (long i = 0; i < (long)rows * columns; i += LANES) store(kv + i, load(kv + i) * factor);
    for (int i = 0; i < rows; i += LANES) store(k + i, load(k + i) * factor);
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

  void merge(const Sums& other) {
    if (other.scale > scale) move(other.scale);
    const float factor = other.scale == scale ? 1.0f : other.scale == -INFINITY ? 0.0f : std::exp(other.scale - scale);
    for (long i = 0; i < (long)rows * columns; i += LANES) store(kv + i, load(kv + i) + load(other.kv + i) * factor);
    for (int i = 0; i < rows; i += LANES) store(k + i, load(k + i) + load(other.k + i) * factor);
  }
};

static inline float top_of(const float* values, int count) {
  float top = -INFINITY;
  for (int t = 0; t < count; ++t) top = values[t] > top ? values[t] : top;
  return top;
}

template <typename T>
static void sum_keys(const Call& c, long b, long g, long from, long to, Side& keys, float* value, Sums& sums) {
  const uint8_t* mask = c.mask ? c.mask + b * c.mask_batch : nullptr;
  const int value_row = padded(c.value_size);
  for (long start = from; start < to; start += BLOCK) {
    const int count = (int)(to - start < BLOCK ? to - start : BLOCK);
    keys.read<T>(c.key, b, g, start, count, c.size, mask);
    read_rows<T>(c.value, b, g, start, count, c.value_size, mask, value, value_row);
    if (keys.map->scaled()) {
      const float top = top_of(keys.scale, count);
      if (top == -INFINITY) continue;
      if (top > sums.scale) sums.move(top);
      keys.scale_rows(count, sums.scale);
    }
    sums.add(keys.features, value, count);
  }
}

template <typename T>
static void divide_rows(const Call& c, long b, long h, long start, int count, float* numerator, const float* denominator) {
  const int row = padded(c.value_size);
  for (int t = 0; t < count; ++t) {
    const float inverse = 1.0f / (denominator[t] > FLOOR ? denominator[t] : FLOOR);
    for (int j = 0; j < row; j += LANES) store(numerator + t * row + j, load(numerator + t * row + j) * inverse);
  }
  write_rows<T>(c.out, b, h, start, count, c.value_size, numerator, row);
}

template <typename T>
static int bidirectional(const Call& c) {
  const int x_row = padded(c.size), e_row = padded(c.value_size), m_row = c.key_map.features();
  const long segments = (c.keys + SEGMENT - 1) / SEGMENT, repeats = c.heads / c.groups;
  const long streams = c.batch * c.groups;
  const size_t sums_floats = (Sums::floats(m_row, e_row) + 15) / 16 * 16;
  const size_t room_floats = Side::floats(c.key_map, x_row) + Side::floats(c.query_map, x_row) + BLOCK * (e_row + 1) + 256;
  float* totals = static_cast<float*>(std::aligned_alloc(64, (streams * (segments > 0 ? segments : 1) * sums_floats * 4 + 63) / 64 * 64));
  if (!totals) return 1;
  std::vector<float> scales(streams * (segments > 0 ? segments : 1), -INFINITY);
  int failed = 0;
#pragma omp parallel num_threads(c.threads)
  {
    Room room(room_floats + TileProducts::floats(rounds<T>));
    if (room.failed()) {
#pragma omp atomic write
      failed = 1;
    }
    TileProducts tiles(rounds<T>, room);
    Side keys(c.key_map, x_row, room), queries(c.query_map, x_row, room);
    float *block = room.take(BLOCK * e_row), *normaliser = room.take(BLOCK);
#pragma omp barrier
    if (!failed) {
#pragma omp for schedule(dynamic)
      for (long task = 0; task < streams * segments; ++task) {
        const long stream = task / segments, segment = task % segments;
        Sums sums(m_row, e_row, totals + task * sums_floats);
        sums.clear();
        const long stop = (segment + 1) * SEGMENT < c.keys ? (segment + 1) * SEGMENT : c.keys;
        sum_keys<T>(c, stream / c.groups, stream % c.groups, segment * SEGMENT, stop, keys, block, sums);
        scales[task] = sums.scale;
      }
#pragma omp for schedule(static)
      for (long stream = 0; stream < streams; ++stream) {
        Sums sums(m_row, e_row, totals + stream * segments * sums_floats);
        sums.scale = scales[stream * segments];
        for (long segment = 1; segment < segments; ++segment) {
          Sums part(m_row, e_row, totals + (stream * segments + segment) * sums_floats);
          part.scale = scales[stream * segments + segment];
          sums.merge(part);
        }
      }
      const long pieces = (c.length + SEGMENT - 1) / SEGMENT;
#pragma omp for schedule(dynamic)
      for (long task = 0; task < c.batch * c.heads * pieces; ++task) {
        const long b = task / pieces / c.heads, h = task / pieces % c.heads, piece = task % pieces;
        const Sums sums(m_row, e_row, totals + (b * c.groups + h / repeats) * segments * sums_floats);
        const long stop = (piece + 1) * SEGMENT < c.length ? (piece + 1) * SEGMENT : c.length;
        for (long start = piece * SEGMENT; start < stop; start += BLOCK) {
          const int count = (int)(stop - start < BLOCK ? stop - start : BLOCK);
          queries.read<T>(c.query, b, h, start, count, c.size, nullptr);
          multiply(count, e_row, m_row, queries.features, m_row, 1, sums.kv, e_row, block, e_row, false);
          for (int t = 0; t < count; ++t) normaliser[t] = dot(queries.features + (size_t)t * m_row, sums.k, m_row);
          divide_rows<T>(c, b, h, start, count, block, normaliser);
        }
      }
    }
  }
  std::free(totals);
  return failed;
}

// Transposes the tokens [n, width] that `triangle` is going to take, where it reads them so.
static void turn_columns(int count, int width, const float* tokens, float* turned) {
  if (!tiles_for(count)) transpose(count, width, tokens, width, turned, BLOCK);
}

// Lower triangle of rows [n, m] columns [n, m]^T, zeros above it. turned: by `turn_columns`.
static void triangle(int count, int depth, const float* rows, const float* columns, const float* turned, float* out) {
  if (TileProducts* tiles = tiles_for(count)) {  // the other half costs less than leaving it out
    const int wide = padded(count);
    tiles->multiply_turned(count, wide, depth, rows, depth, columns, depth, out, BLOCK);
    for (int r = 0; r < count; ++r) memset(out + r * BLOCK + r + 1, 0, (wide - r - 1) * sizeof(float));
    return;
  }
  for (int i = 0; i < count; i += TILE_ROWS) {
    const int tall = count - i < TILE_ROWS ? count - i : TILE_ROWS;
    const int wide = padded(i + tall);
    strip(tall, wide, depth, rows + (size_t)i * depth, depth, 1, turned, BLOCK, out + i * BLOCK, BLOCK, false);
    for (int r = i; r < i + tall; ++r)
      for (int j = r + 1; j < wide; ++j) out[r * BLOCK + j] = 0.0f;
  }
}

// out [n, width] (+)= triangle [n, n] right [n, width], which reads only the lower part.
static void below_times(int count, const float* weights, const float* right, int width, float* out, bool add) {
  if (tiles_for(count)) return multiply(count, width, count, weights, BLOCK, 1, right, width, out, width, add);
  for (int i = 0; i < count; i += TILE_ROWS) {
    const int tall = count - i < TILE_ROWS ? count - i : TILE_ROWS;
    strip(tall, width, i + tall, weights + i * BLOCK, BLOCK, 1, right, width, out + (size_t)i * width, width, add);
  }
}

static inline float row_sum(const float* row, int last) {
  Vec total{};
  for (int j = 0; j <= last; j += LANES) total += load(row + j);
  return sum_of(total);
}

// What the keys of the sums give to rows before normalisation.
static void sums_rows(int count, const Side& queries, const Sums& sums, float* out, float* normaliser) {
  multiply(count, sums.columns, sums.rows, queries.features, sums.rows, 1, sums.kv, sums.columns, out, sums.columns, false);
  for (int t = 0; t < count; ++t) normaliser[t] = dot(queries.features + (size_t)t * sums.rows, sums.k, sums.rows);
}

// Rows of a causal block before normalisation, in `out` and `normaliser`: the keys of the sums (where they hold any), and
// the block's own, j <= i. The room: `turned` are the block's key features transposed, `weights` for n x n.
static void causal_rows(int count, const Side& queries, const Side& keys, const float* turned, const float* value,
                        const Sums& sums, bool held, float* weights, float* out, float* normaliser) {
  const int m_row = sums.rows, e_row = sums.columns;
  if (held) sums_rows(count, queries, sums, out, normaliser);
  if (count > 1) {
    triangle(count, m_row, queries.features, keys.features, turned, weights);
  } else {
    weights[0] = dot(queries.features, keys.features, m_row);
    for (int j = 1; j < LANES; ++j) weights[j] = 0.0f;
  }
  below_times(count, weights, value, e_row, out, held);
  for (int t = 0; t < count; ++t) normaliser[t] = (held ? normaliser[t] : 0.0f) + row_sum(weights + t * BLOCK, t);
}

// Segments of f numbers <-> padded segments.
static void unpack_state(const Map& map, int e, const float* kv, const float* k, Sums& sums) {
  sums.clear();
  for (int p = 0; p < map.parts; ++p)
    for (int f = 0; f < map.width; ++f) {
      const int from = p * map.width + f, to = p * map.segment() + f;
      memcpy(sums.kv + (size_t)to * sums.columns, kv + (size_t)from * e, e * sizeof(float));
      sums.k[to] = k[from];
    }
}

static void pack_state(const Map& map, int e, const Sums& sums, float* kv, float* k) {
  for (int p = 0; p < map.parts; ++p)
    for (int f = 0; f < map.width; ++f) {
      const int to = p * map.width + f, from = p * map.segment() + f;
      memcpy(kv + (size_t)to * e, sums.kv + (size_t)from * sums.columns, e * sizeof(float));
      k[to] = sums.k[from];
    }
}

// How many of the tokens that follow can share one reference: log scales up to the last stay within SAFE_RANGE of the
// running maximum at the first, so that no row's weights vanish against a key that it does not see.
static int shared_reference(const float* scale, int count, float carried, float& reference) {
  const float first = scale[0] > carried ? scale[0] : carried;
  reference = first;
  if (first == -INFINITY) {  // nothing seen yet: rows up to the first real key have no weight anyway
    int t = 0;
    while (t < count && scale[t] == -INFINITY) ++t;
    if (t == count) return count;
    reference = scale[t];
    const float base = reference;
    for (; t < count; ++t) {
      if (scale[t] > base + SAFE_RANGE) return t;
      reference = scale[t] > reference ? scale[t] : reference;
    }
    return count;
  }
  for (int t = 1; t < count; ++t) {
    if (scale[t] > first + SAFE_RANGE) return t;
    reference = scale[t] > reference ? scale[t] : reference;
  }
  return count;
}

// Reads a block of keys, makes what it can share with the sums relative to one reference, and says how many tokens that
// are. The sums' scale is that reference then.
template <typename T>
static int read_causal_keys(const Call& c, long b, long g, long start, int count, const uint8_t* mask, Side& keys,
                            Sums& sums) {
  keys.read<T>(c.key, b, g, start, count, c.size, mask);
  if (!keys.map->scaled()) return count;
  float reference;
  count = shared_reference(keys.scale, count, sums.scale, reference);
  if (reference != -INFINITY) {
    sums.move(reference);
    keys.scale_rows(count, reference);
  }
  return count;
}

template <typename T>
static int causal(const Call& c) {
  const int x_row = padded(c.size), e_row = padded(c.value_size), m_row = c.key_map.features();
  const long repeats = c.heads / c.groups;
  const bool forgets = c.decay.data != nullptr;
  const size_t room_floats = Side::floats(c.key_map, x_row) + Side::floats(c.query_map, x_row) +
                             Sums::floats(m_row, e_row) + (size_t)BLOCK * (2 * e_row + m_row + BLOCK + 1) + 512 +
                             (forgets ? Decay::floats(m_row, BLOCK) : 0);
  int failed = 0;
#pragma omp parallel num_threads(c.threads)
  {
    Room room(room_floats + TileProducts::floats(rounds<T>));
    if (room.failed()) {
#pragma omp atomic write
      failed = 1;
    }
    TileProducts tiles(rounds<T>, room);
    Side keys(c.key_map, x_row, room), queries(c.query_map, x_row, room);
    Sums sums(m_row, e_row, room);
    float *value = room.take(BLOCK * e_row), *out = room.take(BLOCK * e_row), *turned = room.take((size_t)BLOCK * m_row);
    float *weights = room.take(BLOCK * BLOCK), *normaliser = room.take(BLOCK);
    Decay decay(m_row, forgets ? BLOCK : 0, room);
#pragma omp barrier
    if (!failed) {
#pragma omp for schedule(dynamic)
      for (long stream = 0; stream < c.batch * c.groups; ++stream) {
        const long b = stream / c.groups, g = stream % c.groups;
        const uint8_t* mask = c.mask ? c.mask + b * c.mask_batch : nullptr;
        const long kv_size = (long)c.key_map.parts * c.key_map.width * c.value_size, k_size = (long)c.key_map.parts * c.key_map.width;
        bool held = c.state != nullptr;
        if (held) {
          unpack_state(c.key_map, c.value_size, c.state + stream * kv_size, c.state_sum + stream * k_size, sums);
          if (c.state_scale) sums.scale = c.state_scale[stream];
        } else {
          sums.clear();
        }
        for (long start = 0; start < c.length;) {
          int count = (int)(c.length - start < BLOCK ? c.length - start : BLOCK);
          count = read_causal_keys<T>(c, b, g, start, count, mask, keys, sums);
          read_rows<T>(c.value, b, g, start, count, c.value_size, mask, value, e_row);
          if (forgets) {
            decay.read(c.decay, b, g, start, count, c.key_map.width, mask);
            decay.on_keys(keys.features, count);
            if (held) decay.to_middle(sums.kv, sums.k, e_row);
          }
          if (count > 1) turn_columns(count, m_row, keys.features, turned);
          for (long r = 0; r < repeats; ++r) {
            const long h = g * repeats + r;
            queries.read<T>(c.query, b, h, start, count, c.size, nullptr);
            if (forgets) decay.on_queries(queries.features, count);
            causal_rows(count, queries, keys, turned, value, sums, held, weights, out, normaliser);
            if (c.normaliser)
              memcpy(c.normaliser + (b * c.heads + h) * c.length + start, normaliser, count * sizeof(float));
            divide_rows<T>(c, b, h, start, count, out, normaliser);
          }
          start += count;
          if (start < c.length || c.next_state) {  // else nobody reads them
            sums.add(keys.features, value, count);
            if (forgets) decay.to_end(sums.kv, sums.k, e_row, count);
          }
          held = true;
        }
        if (c.next_state) {
          pack_state(c.key_map, c.value_size, sums, c.next_state + stream * kv_size, c.next_sum + stream * k_size);
          if (c.next_scale) c.next_scale[stream] = sums.scale;
        }
      }
    }
  }
  return failed;
}

}  // namespace hla
