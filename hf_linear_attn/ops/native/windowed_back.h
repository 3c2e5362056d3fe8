// Gradients of the windowed form (see windowed.h): the near part's band, and the far part in either direction, with the
// sums of each block computed again.

#pragma once

#include "windowed.h"

namespace hla {

static inline Strided reversed(Strided tensor, long tokens, int bytes) {
  tensor.data = static_cast<char*>(tensor.data) + (tokens - 1) * tensor.token * bytes;
  tensor.token = -tensor.token;
  return tensor;
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
  FarKeys& keys = *far.before;
  auto read_rows_back = [&](long h, long start, int count) {
    const float* all = c.normaliser + (s.b * c.heads + h) * c.length;
    for (int t = 0; t < count; ++t) normaliser[t] = all[s.row_at(start + t)];
    row_gradients<T>(c, s.b, h, start, count, normaliser, back);
  };
  const auto key_place = [&](long token) { return s.backwards ? c.keys - 1 - token : token; };

  // Rows before the first block that has keys have no far part.
  long begin = 0;
  while (begin < c.length && !FarKeys::any(s, s.offset + begin - c.window, (int)std::min<long>(c.length - begin, BLOCK))) begin += BLOCK;
  far.clear();
  memset(room.turned_sums, 0, (size_t)m_row * e_row * sizeof(float));
  for (long start = begin; start < c.length; start += BLOCK) {
    const int count = (int)std::min<long>(c.length - start, BLOCK);
    keys.read<T>(c, s, s.offset + start - c.window, count);
    keys.turn(count);
    turn_columns(count, e_row, keys.value, room.turned_value);
    for (long r = 0; r < s.repeats; ++r) {
      const long h = s.g * s.repeats + r;
      far.read_queries<T>(c, s, h, start, count);
      read_rows_back(h, start, count);
      weight_gradients(count, e_row, keys.value, room.turned_value, back, room.slopes);
      multiply(count, m_row, e_row, back.gradient, e_row, 1, room.turned_sums, m_row, back.feature_gradient, m_row, false);
      add_outer(back.normaliser_gradient, far.sums.k, m_row, count, back.feature_gradient);
      below_times(count, room.slopes, keys.side.features, m_row, back.feature_gradient, true);
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
    multiply(e_row, m_row, count, keys.value, 1, e_row, keys.side.features, m_row, room.turned_sums, m_row, true);
    Sums::add_rows(keys.side.features, m_row, count, far.sums.k);
  }
  far.clear();
  for (long start = c.length > 0 ? (c.length - 1) / BLOCK * BLOCK : -1; start >= begin; start -= BLOCK) {
    const int count = (int)std::min<long>(c.length - start, BLOCK);
    const long first = s.offset + start - c.window;
    keys.read<T>(c, s, first, count);
    keys.turn(count);
    turn_columns(count, e_row, keys.value, room.turned_value);
    transpose(m_row, e_row, far.sums.kv, e_row, room.turned_sums, m_row);
    multiply(count, m_row, e_row, keys.value, e_row, 1, room.turned_sums, m_row, room.key_gradient, m_row, false);
    multiply(count, e_row, m_row, keys.side.features, m_row, 1, far.sums.kv, e_row, back.value_gradient, e_row, false);
    add_to_rows(far.sums.k, m_row, count, room.key_gradient);
    for (long r = 0; r < s.repeats; ++r) {
      const long h = s.g * s.repeats + r;
      far.read_queries<T>(c, s, h, start, count);
      read_rows_back(h, start, count);
      weight_gradients(count, e_row, keys.value, room.turned_value, back, room.slopes);
      triangle(count, m_row, far.queries.features, keys.side.features, keys.turned, far.weights);
      above_times(count, room.slopes, far.queries.features, m_row, room.key_gradient);
      above_times(count, far.weights, back.gradient, e_row, back.value_gradient);
      multiply(m_row, e_row, count, far.queries.features, 1, m_row, back.gradient, e_row, far.sums.kv, e_row, true);
      add_weighted(back.normaliser_gradient, far.queries.features, m_row, count, far.sums.k);
    }
    memcpy(back.feature_gradient, room.key_gradient, (size_t)count * m_row * sizeof(float));
    clear_masked(s.valid(), first, count, back.feature_gradient, m_row);
    clear_masked(s.valid(), first, count, back.value_gradient, e_row);
    side_back(c, keys.side, s.b, s.g, c.groups, first, count, c.key_weight_gradient, c.key_bias_gradient, back);
    clear_masked(s.valid(), first, count, back.x_gradient, to.x_row);
    add_rows_along(back.x_gradient, to.x_row, count, to.key_at(key_place(first)), s.backwards);
    add_rows_along(back.value_gradient, e_row, count, to.value_at(key_place(first)), s.backwards);
  }
}

template <typename T>
static int windowed_backward(const Call& c) {
  const int x_row = padded(c.size), e_row = padded(c.value_size);
  const size_t room_floats =
      Far::floats(c, false) + FarBack::floats(c) + BackRoom::floats(c) + Band::floats(c, true) + BLOCK * (x_row + 2) + 256;
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
    Far far(c, room, false);
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
