// Short inputs: one token after a state, and keys that fit into one block. Their cost is not the arithmetic of long inputs,
// so both forms do without the padded copy of the state that the general forms keep.

#pragma once

#include "kernelized.h"

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
    float *next = c.next_state + at * e, *next_k = c.next_sum + at;
    if (first) {
      advance_rows(width, e, c.state + at * e, decay, phi_k, phi_q, value, next, out);
      normaliser += advance_sum(width, c.state_sum + at, decay, phi_k, phi_q, next_k);
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
  const long repeats = c.repeats(), heads_per_task = std::max<long>(1, std::min(STEP_HEADS, BLOCK / repeats));
  const long parts = (c.groups + heads_per_task - 1) / heads_per_task;
  return run_parallel<float>(c.threads, [&](Workspace& workspace) {  // one row: no tiles
    FeatureBlock keys(c.key_map, workspace, (int)heads_per_task);
    FeatureBlock queries(c.query_map, workspace, (int)(heads_per_task * repeats));
    float *value = workspace.take(e), *out = workspace.take(e);
    if (!workspace.ready()) return;
#pragma omp for schedule(static)
    for (long task = 0; task < c.batch * parts; ++task) {
      const long b = task / parts, first = task % parts * heads_per_task, last = std::min(first + heads_per_task, c.groups);
      keys.read_heads<T>(c.key, b, first, (int)(last - first), c.mask_of(b));
      queries.read_heads<T>(c.query, b, first * repeats, (int)((last - first) * repeats), nullptr);
      for (long g = first; g < last; ++g) {
        const long stream = b * c.groups + g;
        float *phi_k = keys.features + (g - first) * m_row, decay = 1.0f;
        read_rows<T>(c.value, b, g, 0, 1, e, c.mask_of(b), value, e);
        if (keys.map->scaled()) {
          const float previous = c.state_scale[stream], own = keys.scale[g - first], top = own > previous ? own : previous;
          decay = rescale_factor(previous, top);
          scale_all(phi_k, m_row, rescale_factor(own, top));
          c.next_scale[stream] = top;
        }
        for (long r = 0; r < repeats; ++r) {
          const float* phi_q = queries.features + ((g - first) * repeats + r) * m_row;
          const float normaliser = step_row(c, stream, decay, phi_k, phi_q, value, r == 0, out);
          divide_rows<T>(c, b, g * repeats + r, 0, 1, out, &normaliser);
        }
      }
    }
  });
}

// Whether explicit weights between all rows and keys cost fewer operations than the state does.
static inline bool prefers_explicit_weights(const Call& c) {
  const long m = c.m_row(), e = c.e_row();
  return c.keys > 0 && c.keys <= BLOCK && c.length * padded((int)c.keys) * (m + e) < (c.keys + c.length) * m * e;
}

// The bidirectional form with explicit weights: w = phi(q) phi(k)^T, o = w v / sum w.
template <typename T>
static int explicit_weights(const Call& c) {
  const int e_row = c.e_row(), m_row = c.m_row(), count = (int)c.keys, columns = padded(count);
  return run_parallel<T>(c.threads, [&](Workspace& workspace) {
    FeatureBlock keys(c.key_map, workspace, count), queries(c.query_map, workspace);
    float *value = workspace.take((size_t)count * e_row), *transposed = workspace.take((size_t)columns * m_row);
    float *out = workspace.take(BLOCK * e_row), *weights = workspace.take(BLOCK * BLOCK);
    float* normaliser = workspace.take(BLOCK);
    if (!workspace.ready()) return;
#pragma omp for schedule(static)
    for (long stream = 0; stream < c.batch * c.groups; ++stream) {
      const long b = stream / c.groups, g = stream % c.groups;
      keys.read<T>(c.key, b, g, 0, count, c.mask_of(b));
      read_rows<T>(c.value, b, g, 0, count, c.value_size, c.mask_of(b), value, e_row);
      if (keys.map->scaled()) keys.scale_rows(count, max_of_values(keys.scale, count));
      transpose(count, m_row, keys.features, m_row, transposed, columns);
      for (long h = g * c.repeats(); h < (g + 1) * c.repeats(); ++h)
        for (long start = 0; start < c.length; start += BLOCK) {
          const int rows = (int)std::min<long>(c.length - start, BLOCK);
          queries.read<T>(c.query, b, h, start, rows, nullptr);
          multiply(rows, columns, m_row, queries.features, m_row, 1, transposed, columns, weights, BLOCK, false);
          multiply(rows, e_row, count, weights, BLOCK, 1, value, e_row, out, e_row, false);
          for (int t = 0; t < rows; ++t) normaliser[t] = row_sum(weights + t * BLOCK, count - 1);
          divide_rows<T>(c, b, h, start, rows, out, normaliser);
        }
    }
  });
}

template <typename T>
static int dispatch_bidirectional(const Call& c) {
  return prefers_explicit_weights(c) ? explicit_weights<T>(c) : bidirectional<T>(c);
}

template <typename T>
static int dispatch_causal(const Call& c) {
  const bool one = c.length == 1 && c.state && c.next_state && c.value_size % LANES == 0 && c.repeats() <= BLOCK;
  return one && !c.normaliser && !c.decay.data ? causal_step<T>(c) : causal<T>(c);
}

}  // namespace hla
