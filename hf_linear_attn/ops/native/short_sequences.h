// Short inputs: one token after a state, and keys that fit into one block. Their cost is not the arithmetic of long inputs,
// so both forms do without the padded copy of the state that the general forms keep.

#pragma once

#include <algorithm>

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

// Features of one token in heads first ... first + count - 1. Where they share their weights these are read once.
template <typename T>
static void read_heads(FeatureBlock& block, const Strided& from, long b, long first, int count, int size,
                       const uint8_t* mask) {
  const Map& map = *block.map;
  T* base = static_cast<T*>(from.data) + b * from.batch + first * from.head;
  const Strided across{base, 0, 0, from.head};
  if (mask && !*mask)
    memset(block.x, 0, (size_t)count * block.x_row * sizeof(float));
  else if (map.activation == PRECOMPUTED)
    read_rows<float>({static_cast<float*>(from.data) + b * from.batch + first * from.head, 0, 0, from.head}, 0, 0, 0, count,
                     size, nullptr, block.x, block.x_row);
  else
    read_rows<T>(across, 0, 0, 0, count, size, nullptr, block.x, block.x_row);
  if (map.scales)
    for (int t = 0; t < count; ++t) block.scale[t] = map.scales[b * map.scale_batch + (first + t) * map.scale_head];
  const float* cosine = map.cosine ? map.cosine + b * map.angle_batch : nullptr;
  const float* sine = map.sine ? map.sine + b * map.angle_batch : nullptr;
  if (map.projected && !map.weight_head && !map.bias_head && !cosine) {
    apply_map(map, 0, nullptr, nullptr, block.x, block.x_row, count, block.y, block.features, block.scale);
  } else {
    for (int t = 0; t < count; ++t)
      apply_map(map, (int)first + t, cosine, sine, block.x + (size_t)t * block.x_row, block.x_row, 1, block.y,
                block.features + (size_t)t * block.row, block.scale + t);
  }
  if (mask && !*mask) {
    memset(block.features, 0, (size_t)count * block.row * sizeof(float));
    std::fill(block.scale, block.scale + count, -INFINITY);
  }
}

// Key-value heads whose features one task of a decoding step computes at once.
constexpr long STEP_HEADS = 8;

// The causal form for one token after a state whose rows are whole vectors. The new state may lie where the old one does.
template <typename T>
static int causal_step(const Call& c) {
  const int x_row = padded(c.size), e = c.value_size, m_row = c.key_map.features();
  const long repeats = c.heads / c.groups, features = (long)c.key_map.parts * c.key_map.width;
  const long heads_per_task = std::max<long>(1, std::min(STEP_HEADS, BLOCK / repeats));
  const long parts = (c.groups + heads_per_task - 1) / heads_per_task;
  const int width = c.key_map.width, segment = c.key_map.segment(), rows = (int)(heads_per_task * repeats);
  const size_t workspace_floats = FeatureBlock::floats(c.key_map, x_row, (int)heads_per_task) +
                                  FeatureBlock::floats(c.query_map, x_row, rows) + 2 * e + 128;
  return run_parallel<float>(c.threads, workspace_floats, [&](Workspace& workspace) {  // one row: no tiles
    FeatureBlock keys(c.key_map, x_row, workspace, (int)heads_per_task), queries(c.query_map, x_row, workspace, rows);
    float *value = workspace.take(e), *out = workspace.take(e);
#pragma omp for schedule(static)
    for (long task = 0; task < c.batch * parts; ++task) {
      const long b = task / parts, first = task % parts * heads_per_task, last = std::min(first + heads_per_task, c.groups);
      const uint8_t* mask = c.mask ? c.mask + b * c.mask_batch : nullptr;
      read_heads<T>(keys, c.key, b, first, (int)(last - first), c.size, mask);
      read_heads<T>(queries, c.query, b, first * repeats, (int)((last - first) * repeats), c.size, nullptr);
      for (long g = first; g < last; ++g) {
        const long stream = b * c.groups + g;
        const float *kv = c.state + stream * features * e, *k = c.state_sum + stream * features;
        float *next = c.next_state + stream * features * e, *next_k = c.next_sum + stream * features;
        float* phi_k = keys.features + (g - first) * m_row;
        read_rows<T>(c.value, b, g, 0, 1, e, mask, value, e);
        float decay = 1.0f;
        if (keys.map->scaled()) {
          const float previous = c.state_scale[stream], own = keys.scale[g - first], top = own > previous ? own : previous;
          decay = rescale_factor(previous, top);
          scale_all(phi_k, m_row, rescale_factor(own, top));
          c.next_scale[stream] = top;
        }
        for (long r = 0; r < repeats; ++r) {
          const float* phi_q = queries.features + ((g - first) * repeats + r) * m_row;
          memset(out, 0, e * sizeof(float));
          float normaliser = 0.0f;
          for (int p = 0; p < c.key_map.parts; ++p) {
            const long at = (long)p * width;
            if (r == 0) {
              advance_rows(width, e, kv + at * e, decay, phi_k + p * segment, phi_q + p * segment, value, next + at * e,
                           out);
              normaliser += advance_sum(width, k + at, decay, phi_k + p * segment, phi_q + p * segment, next_k + at);
            } else {
              multiply(1, e, width, phi_q + p * segment, segment, 1, next + at * e, e, out, e, true);
              for (int f = 0; f < width; ++f) normaliser += phi_q[p * segment + f] * next_k[at + f];
            }
          }
          divide_rows<T>(c, b, g * repeats + r, 0, 1, out, &normaliser);
        }
      }
    }
  });
}

// Whether explicit weights between all rows and keys cost fewer operations than the state does.
static inline bool prefers_explicit_weights(const Call& c) {
  const long m = c.key_map.features(), e = padded(c.value_size);
  return c.keys > 0 && c.keys <= BLOCK && c.length * padded((int)c.keys) * (m + e) < (c.keys + c.length) * m * e;
}

// The bidirectional form with explicit weights: w = phi(q) phi(k)^T, o = w v / sum w.
template <typename T>
static int explicit_weights(const Call& c) {
  const int x_row = padded(c.size), e_row = padded(c.value_size), m_row = c.key_map.features();
  const int count = (int)c.keys, tile_columns = padded(count), row_block = (int)std::min<long>(c.length, BLOCK);
  const long repeats = c.heads / c.groups;
  const size_t workspace_floats = FeatureBlock::floats(c.key_map, x_row, count) +
                                  FeatureBlock::floats(c.query_map, x_row, row_block) +
                                  (size_t)tile_columns * (e_row + m_row) + (size_t)BLOCK * (e_row + BLOCK + 1) + 256;
  return run_parallel<T>(c.threads, workspace_floats, [&](Workspace& workspace) {
    FeatureBlock keys(c.key_map, x_row, workspace, count), queries(c.query_map, x_row, workspace, row_block);
    float *value = workspace.take((size_t)count * e_row), *transposed = workspace.take((size_t)tile_columns * m_row);
    float *out = workspace.take(BLOCK * e_row), *weights = workspace.take(BLOCK * BLOCK),
          *normaliser = workspace.take(BLOCK);
#pragma omp for schedule(static)
    for (long stream = 0; stream < c.batch * c.groups; ++stream) {
      const long b = stream / c.groups, g = stream % c.groups;
      const uint8_t* mask = c.mask ? c.mask + b * c.mask_batch : nullptr;
      keys.read<T>(c.key, b, g, 0, count, c.size, mask);
      read_rows<T>(c.value, b, g, 0, count, c.value_size, mask, value, e_row);
      if (keys.map->scaled()) keys.scale_rows(count, max_of_values(keys.scale, count));
      transpose(count, m_row, keys.features, m_row, transposed, tile_columns);
      for (long r = 0; r < repeats; ++r)
        for (long start = 0; start < c.length; start += BLOCK) {
          const long h = g * repeats + r;
          const int rows = (int)std::min<long>(c.length - start, BLOCK);
          queries.read<T>(c.query, b, h, start, rows, c.size, nullptr);
          multiply(rows, tile_columns, m_row, queries.features, m_row, 1, transposed, tile_columns, weights, BLOCK, false);
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
  const bool one = c.length == 1 && c.state && c.next_state && c.value_size % LANES == 0 && c.heads / c.groups <= BLOCK;
  return one && !c.normaliser && !c.decay.data ? causal_step<T>(c) : causal<T>(c);
}

}  // namespace hla
