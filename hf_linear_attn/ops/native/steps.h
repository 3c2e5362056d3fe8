// Decoding: one token after a state, without the padded copy of the state that the forms for sequences keep.

#pragma once

#include <type_traits>

#include "windowed.h"

namespace hla {

// S' = decay S + k v^T and total = q S' for C vectors of columns: every number of the state is read and written once.
template <int C>
static void advance_columns(int rows, const float* before, long row, float decay, const float* k, const float* q,
                            const float* v, float* after, float* total) {
  Vec value[C], sum[C];
  for (int j = 0; j < C; ++j) {
    value[j] = load(v + j * LANES);
    sum[j] = load(total + j * LANES);
  }
  for (int f = 0; f < rows; ++f)
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) {
      const Vec updated = load(before + f * row + j * LANES) * decay + value[j] * k[f];
      store(after + f * row + j * LANES, updated);
      sum[j] += updated * q[f];
    }
  for (int j = 0; j < C; ++j) store(total + j * LANES, sum[j]);
}

static void advance_rows(int rows, int columns, const float* before, float decay, const float* k, const float* q,
                         const float* v, float* after, float* total) {
  int j = 0;
  for (; j + 4 * LANES <= columns; j += 4 * LANES)
    advance_columns<4>(rows, before + j, columns, decay, k, q, v + j, after + j, total + j);
  for (; j < columns; j += LANES) advance_columns<1>(rows, before + j, columns, decay, k, q, v + j, after + j, total + j);
}

// z' = decay z + k; returns q z'.
static float advance_sum(int rows, const float* before, float decay, const float* k, const float* q, float* after) {
  Vec total{};
  int f = 0;
  for (; f + LANES <= rows; f += LANES) {
    const Vec updated = load(before + f) * decay + load(k + f);
    store(after + f, updated);
    total += updated * load(q + f);
  }
  float rest = sum_of(total);
  for (; f < rows; ++f) {
    after[f] = before[f] * decay + k[f];
    rest += after[f] * q[f];
  }
  return rest;
}

// One row of head h after the state of its key-value head (stream); the first row also computes the new state. Returns the
// normaliser.
static float step_row(const Call& c, long stream, float decay, const float* phi_k, const float* phi_q, const float* value,
                      bool first, float* out) {
  const int width = c.key_map.width, segment = c.key_map.segment(), e = c.value_size;
  float normaliser = 0.0f;
  memset(out, 0, e * sizeof(float));
  for (int p = 0; p < c.key_map.parts; ++p, phi_k += segment, phi_q += segment) {
    const long at = stream * c.num_features() + (long)p * width;
    float *next = c.next_kv + at * e, *next_k = c.next_k_sum + at;
    if (first) {
      advance_rows(width, e, c.kv + at * e, decay, phi_k, phi_q, value, next, out);
      normaliser += advance_sum(width, c.k_sum + at, decay, phi_k, phi_q, next_k);
    } else {
      multiply(1, e, width, phi_q, segment, 1, next, e, out, e, true);
      for (int f = 0; f < width; ++f) normaliser += phi_q[f] * next_k[f];
    }
  }
  return normaliser;
}

// Key-value heads whose features one task of a decoding step computes at once.
constexpr long STEP_HEADS = 8;

// The causal form for one token after a state whose rows are whole vectors. The new state may lie where the old one does.
template <typename T>
static int causal_step(const Call& c) {
  const int e = c.value_size, m_row = c.m_row();
  const long repeats = c.repeats(), heads_per_task = c.head_index ? 1 : std::max<long>(1, std::min(STEP_HEADS, BLOCK / repeats));
  const long parts = (c.groups + heads_per_task - 1) / heads_per_task;
  return run_parallel<float>(c.threads, [&](Workspace& workspace) {  // one row: no tiles
    FeatureBlock keys(c.key_map, workspace, (int)heads_per_task);
    FeatureBlock queries(c.query_map, workspace, (int)(heads_per_task * repeats));
    float *value = workspace.take(e), *out = workspace.take(e);
    if (!workspace.ready()) return;
#pragma omp for schedule(static)
    for (long task = 0; task < c.batch * parts; ++task) {
      const long b = task / parts, first = task % parts * heads_per_task, last = std::min(first + heads_per_task, c.groups);
      keys.read_heads<T>(c.select_head<T>(c.key, first, 1), b, first, (int)(last - first), c.mask_of(b));
      queries.read_heads<T>(c.select_head<T>(c.query, first, repeats), b, first * repeats, (int)((last - first) * repeats), nullptr);
      for (long g = first; g < last; ++g) {
        const long stream = b * c.groups + g;
        float *phi_k = keys.features + (g - first) * m_row, decay = 1.0f;
        const Strided out_rows = c.select_head<T>(c.out, g, repeats);
        read_rows<T>(c.select_head<T>(c.value, g, 1), b, g, 0, 1, e, c.mask_of(b), value, e);
        if (keys.map->scaled()) {
          const float previous = c.log_scale[stream], own = keys.scale[g - first], top = own > previous ? own : previous;
          decay = rescale_factor(previous, top);
          scale_all(phi_k, m_row, rescale_factor(own, top));
          c.next_log_scale[stream] = top;
        }
        for (long r = 0; r < repeats; ++r) {
          const float* phi_q = queries.features + ((g - first) * repeats + r) * m_row;
          const float normaliser = step_row(c, stream, decay, phi_k, phi_q, value, r == 0, out);
          divide_rows<T>(c, out_rows, b, g * repeats + r, 0, 1, out, &normaliser);
        }
      }
    }
  });
}

template <typename T>
static int dispatch_causal(const Call& c) {
  const bool one = c.length == 1 && c.kv && c.next_kv && c.value_size % LANES == 0 && c.repeats() <= BLOCK;
  return one && !c.normaliser && !c.decay.data ? causal_step<T>(c) : causal<T>(c);
}

// One token of windowed attention: the oldest key of the ring moves into S and z unless it is a sink, the new key is
// appended to the ring, and the row sees the new ring and the sinks before it exactly (see ops/windowed.py). A token that
// the mask drops has an output of zeros, and leaves everything as it is.

// Stored tokens [count, size] of type S.
template <typename S>
static Strided stored_rows(const S* tokens, int size) {
  return {const_cast<S*>(tokens), 0, 0, stored_size<S>(size)};
}

// The ring [w, size] in float32 with padded rows; zeros where it holds no token. The last one is the new token itself.
template <typename T, typename S>
static void read_ring(const S* ring, int w, int size, const uint8_t* valid, const T* token, float* to, int row) {
  read_rows<S>(stored_rows(ring, size), 0, 0, 0, w - 1, size, valid, to, row);
  read_rows<T>(stored_rows(token, size), 0, 0, 0, 1, size, nullptr, to + (size_t)(w - 1) * row, row);
}

// The ring without its oldest token and with a new one: a token further in the same memory, or elsewhere.
template <typename T, typename S>
static void advance_ring(const S* ring, int w, int size, const T* token, S* next) {
  const int row = stored_size<S>(size);
  if (next != ring + row) memmove(next, ring + row, (size_t)(w - 1) * row * sizeof(S));
  store_token(token, size, next + (size_t)(w - 1) * row);
}

// The sinks of a head [s, size], with the new token while there are fewer.
template <typename T, typename S>
static S* add_sink(const Strided& sinks, long b, long g, long count, long max_count, int size, const T* token) {
  S* rows = static_cast<S*>(sinks.data) + b * sinks.batch + g * sinks.head;
  if (count < max_count) store_token(token, size, rows + count * stored_size<S>(size));
  return rows;
}

// Replaces n logits by their exponentials relative to the largest one, which it returns (a NaN stays), and adds these up.
static float exponentials_of(float* weights, long n, float* total) {
  float top = -INFINITY;
  for (long j = 0; j < n; ++j) top = weights[j] > top || weights[j] != weights[j] ? weights[j] : top;
  Vec sum{};
  for (long j = 0; j < n; j += LANES) {
    const Vec weight =
        first_lanes(exp_of(load(weights + j) - (top == -INFINITY ? 0.0f : top)), (int)std::min<long>(n - j, LANES));
    store(weights + j, weight);
    sum += weight;
  }
  *total = sum_of(sum);
  return top;
}

// The log mixing weight of head h, for its query x.
static float log_mixing_weight(const Call& c, long b, long h, const float* x, int x_row) {
  const float base = static_cast<const float*>(c.mix.data)[b * c.mix.batch + h * c.mix.head];
  const int64_t outside = c.count[b] + 1 - c.window - c.sinks;
  const float bound = c.saturation > 0 && outside > 0 ? std::log1p((float)outside / c.saturation) : 0.0f;
  return base + query_mix(c, h, std::sqrt(c.scaling), x, x_row) - bound;
}

// The key or the value of the token of key-value head g.
template <typename T>
static const T* token_of(const Call& c, const Strided& tensor, long b, long g) {
  return static_cast<const T*>(c.select_head<T>(tensor, g, 1).data) + b * tensor.batch + g * tensor.head;
}

// With a state in type S.
template <typename T, typename S>
static int windowed_step(const Call& c) {
  const int x_row = c.x_row(), e = c.value_size, e_row = c.e_row(), w = c.window, repeats = (int)c.repeats();
  const int key_size = stored_size<S>(c.size), value_size = stored_size<S>(e);
  const long row = (w + c.sinks + LANES - 1) / LANES * LANES;
  return run_parallel<float>(c.threads, [&](Workspace& workspace) {  // one row: no tiles
    FeatureBlock keys(c.key_map, workspace, 1), queries(c.query_map, workspace, repeats);
    float *value = workspace.take(e_row), *out = workspace.take((size_t)repeats * e_row);
    float *key_buffer = workspace.take((size_t)w * x_row), *value_buffer = workspace.take((size_t)w * e_row),
          *sink_key_buffer = workspace.take((size_t)c.sinks * x_row),
          *sink_value_buffer = workspace.take((size_t)c.sinks * e_row), *weights = workspace.take((size_t)repeats * row);
    float* normaliser = workspace.take(repeats);
    if (!workspace.ready()) return;
#pragma omp for schedule(static)
    for (long stream = 0; stream < c.batch * c.groups; ++stream) {
      const long b = stream / c.groups, g = stream % c.groups;
      const uint8_t *valid = c.ring_mask + b * w, *next_valid = valid + 1;  // of the new ring, but for its last token
      const S* ring_key = static_cast<const S*>(c.ring_key) + stream * c.ring_capacity * key_size;
      const S* ring_value = static_cast<const S*>(c.ring_value) + stream * c.ring_capacity * value_size;
      S* new_key = static_cast<S*>(c.next_ring_key) + stream * c.ring_capacity * key_size;
      S* new_value = static_cast<S*>(c.next_ring_value) + stream * c.ring_capacity * value_size;
      const Strided query_rows = c.select_head<T>(c.query, g, repeats), out_rows = c.select_head<T>(c.out, g, repeats);
      const long numbers = c.num_features(), first = g * repeats;
      const auto keep_state = [&] {
        if (c.next_kv == c.kv) return;
        memmove(c.next_kv + stream * numbers * e, c.kv + stream * numbers * e, numbers * e * sizeof(float));
        memmove(c.next_k_sum + stream * numbers, c.k_sum + stream * numbers, numbers * sizeof(float));
      };
      if (c.mask && !*c.mask_of(b)) {
        const std::vector<float> zeros(e_row);
        for (int r = 0; r < repeats; ++r) write_rows<T>(out_rows, b, first + r, 0, 1, e, zeros.data(), e_row);
        memmove(new_key, ring_key, (size_t)w * key_size * sizeof(S));
        memmove(new_value, ring_value, (size_t)w * value_size * sizeof(S));
        keep_state();
        continue;
      }
      const long oldest = c.count[b] - w;  // position of the token that leaves the ring
      const uint8_t is_far = valid[0] && oldest >= c.sinks;
      const bool is_short = oldest < c.sinks;  // no key is far, nor was one before
      const int sinks = (int)std::max(0l, std::min<long>(oldest + 1, c.sinks));  // outside of the ring
      if (!is_short) {  // before the ring moves, which may be in place
        keys.read<S>(stored_rows(ring_key, c.size), 0, g, 0, 1, &is_far);
        read_rows<S>(stored_rows(ring_value, e), 0, 0, 0, 1, e, &is_far, value, e_row);
      }
      const T* token_key = token_of<T>(c, c.key, b, g);
      const T* token_value = token_of<T>(c, c.value, b, g);
      advance_ring<T, S>(ring_key, w, c.size, token_key, new_key);
      advance_ring<T, S>(ring_value, w, e, token_value, new_value);
      if (c.sinks) {
        const S* sink_keys = add_sink<T, S>(c.sink_key, b, g, c.count[b], c.sinks, c.size, token_key);
        const S* sink_values = add_sink<T, S>(c.sink_value, b, g, c.count[b], c.sinks, e, token_value);
        read_rows<S>(stored_rows(sink_keys, c.size), 0, 0, 0, sinks, c.size, nullptr, sink_key_buffer, x_row);
        read_rows<S>(stored_rows(sink_values, e), 0, 0, 0, sinks, e, nullptr, sink_value_buffer, e_row);
      }
      const int from = (int)(std::find(next_valid, next_valid + w - 1, 1) - next_valid);  // padding comes first in a ring
      const int near = w - from, all = near + sinks;
      const bool contiguous_float32 = std::is_same<S, float>::value && c.size == x_row && e == e_row &&
                                      std::find(next_valid + from, next_valid + w - 1, 0) == next_valid + w - 1;
      const float *near_key = key_buffer, *near_value = value_buffer;
      const S *first_key = new_key + (size_t)from * key_size, *first_value = new_value + (size_t)from * value_size;
      if (contiguous_float32) {
        near_key = reinterpret_cast<const float*>(first_key);
        near_value = reinterpret_cast<const float*>(first_value);
      } else {
        read_ring<T, S>(first_key, near, c.size, next_valid + from, token_key, key_buffer, x_row);
        read_ring<T, S>(first_value, near, e, next_valid + from, token_value, value_buffer, e_row);
      }

      for (int r = 0; r < repeats; ++r) {
        FeatureBlock query = queries.from(r);
        float* own = out + (size_t)r * e_row;
        if (is_short) {
          read_rows<T>(query_rows, b, first + r, 0, 1, c.size, nullptr, query.x, x_row);
          memset(own, 0, e * sizeof(float));
          normaliser[r] = 0.0f;
          continue;
        }
        query.read<T>(query_rows, b, first + r, 0, 1, nullptr);
        const float log_mix = log_mixing_weight(c, b, first + r, query.x, x_row);
        if (query.map->scaled())
          *query.scale += log_mix;
        else
          scale_all(query.features, query.row, std::exp(log_mix));
        normaliser[r] = step_row(c, stream, 1.0f, keys.features, query.features, value, r == 0, own);
      }
      if (is_short) keep_state();
      for (int j = 0; j < all; ++j) {
        const float* key = j < near ? near_key + (size_t)j * x_row : sink_key_buffer + (size_t)(j - near) * x_row;
        if (j >= near - 1 || next_valid[from + j])
          dots(repeats, queries.x, x_row, key, x_row, c.scaling, weights + j, row);
        else
          for (int r = 0; r < repeats; ++r) weights[r * row + j] = -INFINITY;
      }
      for (int r = 0; r < repeats; ++r) {
        const FeatureBlock query = queries.from(r);
        float *own = weights + r * row, total, factor = 1.0f;
        const float top = exponentials_of(own, all, &total);
        if (query.map->scaled() && !is_short) {
          factor = far_factor(*query.scale, top);
          scale_all(out + (size_t)r * e_row, e_row, factor);
        }
        normaliser[r] = normaliser[r] * factor + total;
      }
      multiply_floats(repeats, e_row, near, weights, row, 1, near_value, e_row, out, e_row, true);
      if (sinks) multiply_floats(repeats, e_row, sinks, weights + near, row, 1, sink_value_buffer, e_row, out, e_row, true);
      for (int r = 0; r < repeats; ++r)
        divide_rows<T>(c, out_rows, b, first + r, 0, 1, out + (size_t)r * e_row, normaliser + r);
    }
    // The masks and counts may be overwritten in place: only after all heads of a row of the batch have read them.
#pragma omp single
    for (long b = 0; b < c.batch; ++b) {
      const int real = !c.mask || *c.mask_of(b);
      memmove(c.next_ring_mask + b * w, c.ring_mask + b * w + real, w - real);
      if (real) c.next_ring_mask[b * w + w - 1] = 1;
      c.next_count[b] = c.count[b] + real;
    }
  });
}

// One token of exact attention, whose key and value are appended to those of the tokens before it. `ring_mask`
// [B, ring_capacity], where there is one, says which of these are tokens; `mask` says so of the new one.
template <typename T, typename S>
static int exact_step(const Call& c) {
  const int d = c.size, e = c.value_size, x_row = c.x_row(), e_row = c.e_row(), repeats = (int)c.repeats();
  const long n = c.keys, row = (n + LANES - 1) / LANES * LANES;
  const bool in_place = readable_in_place<S> && d == x_row && e == e_row;
  return run_parallel<float>(c.threads, [&](Workspace& workspace) {
    float *x = workspace.take((size_t)repeats * x_row), *out = workspace.take((size_t)repeats * e_row);
    float *weights = workspace.take((size_t)repeats * row), *block = workspace.take((size_t)BLOCK * std::max(x_row, e_row));
    float *totals = workspace.take(repeats);
    if (!workspace.ready()) return;
#pragma omp for schedule(static)
    for (long stream = 0; stream < c.batch * c.groups; ++stream) {
      const long b = stream / c.groups, g = stream % c.groups;
      const int key_size = stored_size<S>(d), value_size = stored_size<S>(e);
      S* keys = static_cast<S*>(c.next_ring_key) + stream * c.ring_capacity * key_size;
      S* values = static_cast<S*>(c.next_ring_value) + stream * c.ring_capacity * value_size;
      // Padding may hold anything, NaN too.
      const bool real = !c.mask || *c.mask_of(b);
      const T *token_key = token_of<T>(c, c.key, b, g), *token_value = token_of<T>(c, c.value, b, g);
      memset(keys + (n - 1) * key_size, 0, key_size * sizeof(S));
      memset(values + (n - 1) * value_size, 0, value_size * sizeof(S));
      if (real) store_token(token_key, d, keys + (n - 1) * key_size);
      if (real) store_token(token_value, e, values + (n - 1) * value_size);
      // Calls function(tokens, their row, start, count) for blocks of tokens, and at last for the new one itself.
      const auto for_blocks = [&](const S* tokens, int size, const T* token, int to_row, const auto& function) {
        const Strided rows = stored_rows(tokens, size);
        for (long start = 0; start < n - 1; start += BLOCK) {
          const int count = (int)std::min<long>(n - 1 - start, BLOCK);
          if constexpr (readable_in_place<S>)
            if (in_place) {
              function(tokens + start * rows.token, rows.token, start, count);
              continue;
            }
          read_rows<S>(rows, 0, 0, start, count, size, nullptr, block, to_row);
          function(static_cast<const float*>(block), to_row, start, count);
        }
        read_rows<T>(stored_rows(token, size), 0, 0, 0, real, size, nullptr, block, to_row);
        function(static_cast<const float*>(block), to_row, n - 1, real);
      };
      const uint8_t* valid = c.next_ring_mask ? c.next_ring_mask + b * c.ring_capacity : nullptr;
      for (int r = 0; r < repeats; ++r)
        read_rows<T>(c.select_head<T>(c.query, g, repeats), b, g * repeats + r, 0, 1, d, c.mask_of(b), x + r * x_row, x_row);
      for (int r = 0; r < repeats; ++r) std::fill_n(weights + r * row, n, -INFINITY);
      for_blocks(keys, d, token_key, x_row, [&](const auto* near, long near_row, long start, int count) {
        for (int t = 0; t < count; ++t, near += near_row)
          if (!valid || start + t == n - 1 || valid[start + t])
            dots(repeats, x, x_row, numbers_of(near), x_row, scale_of(near, d) * c.scaling, weights + start + t, row);
      });
      for (int r = 0; r < repeats; ++r) exponentials_of(weights + r * row, n, totals + r);
      memset(out, 0, (size_t)repeats * e_row * sizeof(float));
      for_blocks(values, e, token_value, e_row, [&](const auto* near, long near_row, long start, int count) {
        for (int t = 0; t < count; ++t)
          for (int r = 0; r < repeats; ++r) weights[r * row + start + t] *= scale_of(near + t * near_row, e);
        multiply_floats(repeats, e_row, count, weights + start, row, 1, numbers_of(near), near_row, out, e_row, true);
      });
      for (int r = 0; r < repeats; ++r)
        divide_rows<T>(c, c.select_head<T>(c.out, g, repeats), b, g * repeats + r, 0, 1, out + r * e_row, totals + r);
    }
#pragma omp single
    for (long b = 0; c.next_ring_mask && b < c.batch; ++b) c.next_ring_mask[b * c.ring_capacity + n - 1] = !c.mask || *c.mask_of(b);
  });
}

template <typename T>
static int dispatch_windowed_step(const Call& c) {
  return c.int8_rows ? windowed_step<T, Int8>(c) : windowed_step<T, T>(c);
}
template <typename T>
static int dispatch_exact_step(const Call& c) {
  return c.int8_rows ? exact_step<T, Int8>(c) : exact_step<T, T>(c);
}

}  // namespace hla
