// One token of windowed attention after a state: the oldest key of the ring moves into S and z unless it is a sink, the new
// key is appended to the ring, and the row sees the new ring and the sinks before it exactly (see ops/window_step.py).

#pragma once

#include <type_traits>

#include "short_sequences.h"
#include "windowed.h"

namespace hla {

// The ring [w, size] in float32 with padded rows; zeros where it holds no token. The last one always is one.
template <typename T>
static void read_ring(T* ring, int w, int size, const uint8_t* valid, float* to, int row) {
  const Strided rows{ring, 0, 0, size};
  read_rows<T>(rows, 0, 0, 0, w - 1, size, valid, to, row);
  read_rows<T>(rows, 0, 0, w - 1, 1, size, nullptr, to + (size_t)(w - 1) * row, row);
}

// The ring without its oldest token and with a new one, in the same memory or elsewhere.
template <typename T>
static void advance_ring(const T* ring, int w, int size, const T* token, T* next) {
  memmove(next, ring + size, (size_t)(w - 1) * size * sizeof(T));
  memcpy(next + (size_t)(w - 1) * size, token, size * sizeof(T));
}

// The sinks of a head [s, size], with the new token while there are fewer.
template <typename T>
static T* add_sink(const Strided& sinks, long b, long g, long count, long max_count, int size, const T* token) {
  T* rows = static_cast<T*>(sinks.data) + b * sinks.batch + g * sinks.head;
  if (count < max_count) memcpy(rows + count * size, token, size * sizeof(T));
  return rows;
}

// The mixing weight of head h, for its query x.
static float mixing_weight(const Call& c, long b, long h, const float* x, int x_row) {
  if (!c.mix_base) return static_cast<const float*>(c.mix.data)[b * c.mix.batch + h * c.mix.head];
  const int64_t outside = c.count[b] + 1 - c.window - c.sinks;
  const float bound = c.saturation > 0 && outside > 0 ? std::log1p((float)outside / c.saturation) : 0.0f;
  return std::exp(c.mix_base[h] + query_mix(c, h, std::sqrt(c.scaling), x, x_row) - bound);
}

template <typename T>
static int windowed_step(const Call& c) {
  const int x_row = c.x_row(), e = c.value_size, e_row = c.e_row(), w = c.window;
  return run_parallel<float>(c.threads, [&](Workspace& workspace) {  // one row: no tiles
    FeatureBlock keys(c.key_map, workspace, 1), queries(c.query_map, workspace, 1);
    float *value = workspace.take(e_row), *out = workspace.take(e_row);
    float *key_buffer = workspace.take((size_t)w * x_row), *value_buffer = workspace.take((size_t)w * e_row),
          *sink_key_buffer = workspace.take((size_t)c.sinks * x_row),
          *sink_value_buffer = workspace.take((size_t)c.sinks * e_row), *weights = workspace.take(w + c.sinks + LANES);
    if (!workspace.ready()) return;
#pragma omp for schedule(static)
    for (long stream = 0; stream < c.batch * c.groups; ++stream) {
      const long b = stream / c.groups, g = stream % c.groups;
      const uint8_t *valid = c.ring_mask + b * w, *next_valid = valid + 1;  // of the new ring, but for its last token
      const T* ring_key = static_cast<const T*>(c.ring_key) + stream * c.window * c.size;
      const T* ring_value = static_cast<const T*>(c.ring_value) + stream * c.window * e;
      T* new_key = static_cast<T*>(c.next_ring_key) + stream * c.window * c.size;
      T* new_value = static_cast<T*>(c.next_ring_value) + stream * c.window * e;
      const long oldest = c.count[b] - w;  // position of the token that leaves the ring
      const uint8_t is_far = valid[0] && oldest >= c.sinks;
      const int sinks = (int)std::max(0l, std::min<long>(oldest + 1, c.sinks));  // outside of the ring
      const Strided key_rows{const_cast<T*>(ring_key), 0, 0, c.size}, value_rows{const_cast<T*>(ring_value), 0, 0, e};
      keys.read<T>(key_rows, 0, g, 0, 1, &is_far);
      read_rows<T>(value_rows, 0, 0, 0, 1, e, &is_far, value, e_row);
      const T* token_key = static_cast<const T*>(c.key.data) + b * c.key.batch + g * c.key.head;
      const T* token_value = static_cast<const T*>(c.value.data) + b * c.value.batch + g * c.value.head;
      advance_ring<T>(ring_key, w, c.size, token_key, new_key);
      advance_ring<T>(ring_value, w, e, token_value, new_value);
      if (c.sinks) {
        T* sink_keys = add_sink<T>(c.sink_key, b, g, c.count[b], c.sinks, c.size, token_key);
        T* sink_values = add_sink<T>(c.sink_value, b, g, c.count[b], c.sinks, e, token_value);
        read_rows<T>({sink_keys, 0, 0, c.size}, 0, 0, 0, sinks, c.size, nullptr, sink_key_buffer, x_row);
        read_rows<T>({sink_values, 0, 0, e}, 0, 0, 0, sinks, e, nullptr, sink_value_buffer, e_row);
      }
      const bool contiguous_float32 = std::is_same<T, float>::value && c.size == x_row && e == e_row &&
                                      std::find(next_valid, next_valid + w - 1, 0) == next_valid + w - 1;
      const float *near_key = key_buffer, *near_value = value_buffer;
      if (contiguous_float32) {
        near_key = reinterpret_cast<const float*>(new_key);
        near_value = reinterpret_cast<const float*>(new_value);
      } else {
        read_ring<T>(new_key, w, c.size, next_valid, key_buffer, x_row);
        read_ring<T>(new_value, w, e, next_valid, value_buffer, e_row);
      }

      for (long h = g * c.repeats(); h < (g + 1) * c.repeats(); ++h) {
        queries.read<T>(c.query, b, h, 0, 1, nullptr);
        scale_all(queries.features, queries.row, mixing_weight(c, b, h, queries.x, x_row));
        float normaliser = step_row(c, stream, 1.0f, keys.features, queries.features, value, h == g * c.repeats(), out);
        float top = -INFINITY, *sink_weights = weights + w;
        for (int j = 0; j < w + sinks; ++j) {
          const float* key = j < w ? near_key + (size_t)j * x_row : sink_key_buffer + (size_t)(j - w) * x_row;
          const bool is_token = j >= w - 1 || next_valid[j];
          weights[j] = is_token ? dot(queries.x, key, x_row) * c.scaling : -INFINITY;
          top = weights[j] > top || weights[j] != weights[j] ? weights[j] : top;
        }
        for (int j = 0; j < w + sinks; j += LANES) {
          const Vec weight = first_lanes(exp_of(load(weights + j) - top), w + sinks - j);
          store(weights + j, weight);
          normaliser += sum_of(weight);
        }
        multiply(1, e_row, w, weights, w, 1, near_value, e_row, out, e_row, true);
        if (sinks) multiply(1, e_row, sinks, sink_weights, sinks, 1, sink_value_buffer, e_row, out, e_row, true);
        divide_rows<T>(c, b, h, 0, 1, out, &normaliser);
      }
    }
    // The masks and counts may be overwritten in place: only after all heads of a row of the batch have read them.
#pragma omp single
    for (long b = 0; b < c.batch; ++b) {
      memmove(c.next_ring_mask + b * w, c.ring_mask + b * w + 1, w - 1);
      c.next_ring_mask[b * w + w - 1] = 1;
      c.next_count[b] = c.count[b] + 1;
    }
  });
}

}  // namespace hla
