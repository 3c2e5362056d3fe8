// Gradients of kernelized attention by recomputation. With n_i, d_i numerator and normaliser of row i and g_i the
// gradient of its output:  dn_i = g_i / d_i,  dd_i = -(g_i . o_i) / d_i.  Then
//     dphi(q_i) = S dn_i + z dd_i,  dS = sum_i phi(q_i) dn_i^T,  dz = sum_i phi(q_i) dd_i,
//     dphi(k_j) = dS v_j + dz,      dv_j = dS^T phi(k_j),
// with state over j <= i where the form is causal: S then runs forward, dS backward, and within a block of tokens the
// weights are explicit.
//
// With a log scale rows and state are relative to a reference that rises along the sequence: going back, the gradients of
// later rows are multiplied by the exponential of the (negative) step between two references.

#pragma once

#include "kernelized.h"

namespace hla {

struct BackwardBuffers {
  float *value, *gradient, *output, *feature_gradient, *slope, *x_gradient, *value_gradient, *normaliser_gradient;

  static size_t widest_segment(const Call& c) { return std::max(c.key_map.segment(), c.query_map.segment()); }
  static size_t floats(const Call& c) {
    const size_t x_row = padded(c.size), e_row = padded(c.value_size), m_row = c.key_map.features();
    return BLOCK * (4 * e_row + m_row + widest_segment(c) + x_row + 1) + 256;
  }
  BackwardBuffers(const Call& c, Workspace& workspace) {
    const size_t x_row = padded(c.size), e_row = padded(c.value_size), m_row = c.key_map.features();
    value = workspace.take(BLOCK * e_row);
    gradient = workspace.take(BLOCK * e_row);
    output = workspace.take(BLOCK * e_row);
    value_gradient = workspace.take(BLOCK * e_row);
    feature_gradient = workspace.take(BLOCK * m_row);
    slope = workspace.take(BLOCK * widest_segment(c));
    x_gradient = workspace.take(BLOCK * x_row);
    normaliser_gradient = workspace.take(BLOCK);
  }
};

// dn and dd of a block of rows, from the gradients and outputs as they were written, and the normalisers.
template <typename T>
static void row_gradients(const Call& c, long b, long h, long start, int count, const float* normaliser,
                          BackwardBuffers& back) {
  const int row = padded(c.value_size);
  read_rows<T>(c.out_gradient, b, h, start, count, c.value_size, nullptr, back.gradient, row);
  read_rows<T>(c.out, b, h, start, count, c.value_size, nullptr, back.output, row);
  for (int t = 0; t < count; ++t) {
    float* gradient = back.gradient + t * row;
    const float inverse = normaliser[t] > FLOOR ? 1.0f / normaliser[t] : 0.0f;
    back.normaliser_gradient[t] = -dot(gradient, back.output + t * row, row) * inverse;
    for (int j = 0; j < row; j += LANES) store(gradient + j, load(gradient + j) * inverse);
  }
}

// Adds scale[t] * row to row t.
static void add_outer(const float* scale, const float* row, int width, int count, float* to) {
  for (int t = 0; t < count; ++t)
    for (int j = 0; j < width; j += LANES)
      store(to + (size_t)t * width + j, load(to + (size_t)t * width + j) + load(row + j) * scale[t]);
}

// total += sum_t scale[t] * rows[t]
static void add_weighted(const float* scale, const float* rows, int width, int count, float* total) {
  for (int j = 0; j < width; j += LANES) {
    Vec sum = load(total + j);
    for (int t = 0; t < count; ++t) sum += load(rows + (size_t)t * width + j) * scale[t];
    store(total + j, sum);
  }
}

// From the gradient of a block's features to that of x, in back.x_gradient.
static void map_backward(const Call& c, const FeatureBlock& block, long b, long head, long heads, long start, int count,
                         float* weight_gradient, float* bias_gradient, BackwardBuffers& back) {
  const Map& map = *block.map;
  const long angle = b * map.angle_batch + start;
  const size_t index = b * heads + head;
  apply_map_backward(map, (int)head, map.cosine ? map.cosine + angle : nullptr, map.sine ? map.sine + angle : nullptr,
                     block.x, block.x_row, count, block.y, block.features, back.feature_gradient, back.slope,
                     back.x_gradient, weight_gradient ? weight_gradient + index * c.size * map.segment() : nullptr,
                     bias_gradient ? bias_gradient + index * map.segment() : nullptr);
}

// Adds one row to each.
static void add_to_rows(const float* row, int width, int count, float* to) {
  for (int t = 0; t < count; ++t)
    for (int j = 0; j < width; j += LANES)
      store(to + (size_t)t * width + j, load(to + (size_t)t * width + j) + load(row + j));
}

static inline void clear_masked(const uint8_t* mask, long start, int count, float* rows, int width) {
  if (!mask) return;
  for (int t = 0; t < count; ++t)
    if (!mask[start + t]) memset(rows + (size_t)t * width, 0, width * sizeof(float));
}

template <typename T>
static void write_query_gradient(const Call& c, const FeatureBlock& block, long b, long h, long start, int count,
                                 BackwardBuffers& back) {
  map_backward(c, block, b, h, c.heads, start, count, c.query_weight_gradient, c.query_bias_gradient, back);
  write_rows<T>(c.query_gradient, b, h, start, count, c.size, back.x_gradient, block.x_row);
}

// The gradients of keys and values of a block, without those of masked tokens.
template <typename T>
static void write_key_gradients(const Call& c, const FeatureBlock& block, long b, long g, long start, int count,
                                const uint8_t* mask, BackwardBuffers& back) {
  const int e_row = padded(c.value_size);
  clear_masked(mask, start, count, back.feature_gradient, block.row);
  clear_masked(mask, start, count, back.value_gradient, e_row);
  write_rows<T>(c.value_gradient, b, g, start, count, c.value_size, back.value_gradient, e_row);
  map_backward(c, block, b, g, c.groups, start, count, c.key_weight_gradient, c.key_bias_gradient, back);
  write_rows<T>(c.key_gradient, b, g, start, count, c.size, back.x_gradient, block.x_row);
}

template <typename T>
static int bidirectional_backward(const Call& c) {
  const int x_row = padded(c.size), e_row = padded(c.value_size), m_row = c.key_map.features();
  const long repeats = c.heads / c.groups;
  const size_t square = (size_t)m_row * e_row;
  const size_t workspace_floats = FeatureBlock::floats(c.key_map, x_row) + FeatureBlock::floats(c.query_map, x_row) +
                                  BackwardBuffers::floats(c) + 2 * State::floats(m_row, e_row) + square + BLOCK + 512;
  return run_parallel<T>(c.threads, workspace_floats, [&](Workspace& workspace) {
    FeatureBlock keys(c.key_map, x_row, workspace), queries(c.query_map, x_row, workspace);
    BackwardBuffers back(c, workspace);
    State state(m_row, e_row, workspace), slopes(m_row, e_row, workspace);
    float *transposed = workspace.take(square), *normaliser = workspace.take(BLOCK);
#pragma omp for schedule(dynamic)
    for (long stream = 0; stream < c.batch * c.groups; ++stream) {
      const long b = stream / c.groups, g = stream % c.groups;
      const uint8_t* mask = c.mask ? c.mask + b * c.mask_batch : nullptr;
      state.clear();
      slopes.clear();
      sum_keys<T>(c, b, g, 0, c.keys, keys, back.value, state);
      transpose(m_row, e_row, state.kv, e_row, transposed, m_row);
      for (long r = 0; r < repeats; ++r)
        for (long start = 0; start < c.length; start += BLOCK) {
          const long h = g * repeats + r;
          const int count = (int)(c.length - start < BLOCK ? c.length - start : BLOCK);
          queries.read<T>(c.query, b, h, start, count, c.size, nullptr);
          for (int t = 0; t < count; ++t) normaliser[t] = dot(queries.features + (size_t)t * m_row, state.k, m_row);
          row_gradients<T>(c, b, h, start, count, normaliser, back);
          multiply(m_row, e_row, count, queries.features, 1, m_row, back.gradient, e_row, slopes.kv, e_row, true);
          add_weighted(back.normaliser_gradient, queries.features, m_row, count, slopes.k);
          multiply(count, m_row, e_row, back.gradient, e_row, 1, transposed, m_row, back.feature_gradient, m_row, false);
          add_outer(back.normaliser_gradient, state.k, m_row, count, back.feature_gradient);
          write_query_gradient<T>(c, queries, b, h, start, count, back);
        }
      transpose(m_row, e_row, slopes.kv, e_row, transposed, m_row);
      for (long start = 0; start < c.keys; start += BLOCK) {
        const int count = (int)(c.keys - start < BLOCK ? c.keys - start : BLOCK);
        keys.read<T>(c.key, b, g, start, count, c.size, mask);
        if (keys.map->scaled()) keys.scale_rows(count, state.scale);
        read_rows<T>(c.value, b, g, start, count, c.value_size, mask, back.value, e_row);
        multiply(count, e_row, m_row, keys.features, m_row, 1, slopes.kv, e_row, back.value_gradient, e_row, false);
        multiply(count, m_row, e_row, back.value, e_row, 1, transposed, m_row, back.feature_gradient, m_row, false);
        add_to_rows(slopes.k, m_row, count, back.feature_gradient);
        write_key_gradients<T>(c, keys, b, g, start, count, mask, back);
      }
    }
  });
}

// out [n, width] += lower^T [n, n] right [n, width]: row j reads rows i >= j.
static void multiply_lower_transposed(int count, const float* lower, const float* right, int width, float* out) {
  if (tiles_for(count)) return multiply(count, width, count, lower, 1, BLOCK, right, width, out, width, true);
  for (int j = 0; j < count; j += TILE_ROWS) {
    const int tile_rows = count - j < TILE_ROWS ? count - j : TILE_ROWS;
    multiply_strip(tile_rows, width, count - j, lower + j * BLOCK + j, 1, BLOCK, right + (size_t)j * width, width,
                   out + (size_t)j * width, width, true);
  }
}

// The gradient of the explicit weights of a block: dn_i . v_j + dd_i for j <= i, zeros above.
static void weight_gradients(int count, int e_row, const float* value, const float* value_t, const BackwardBuffers& back,
                             float* out) {
  lower_product(count, e_row, back.gradient, value, value_t, out);
  for (int i = 0; i < count; ++i)
    for (int j = 0; j <= i; ++j) out[i * BLOCK + j] += back.normaliser_gradient[i];
}

// Tokens that share a reference.
struct ReferenceBlock {
  long start;
  int count;
  float reference;
};

template <typename T>
static int causal_backward(const Call& c) {
  const int x_row = padded(c.size), e_row = padded(c.value_size), m_row = c.key_map.features();
  const long repeats = c.heads / c.groups;
  const size_t square = (size_t)m_row * e_row;
  const size_t workspace_floats = FeatureBlock::floats(c.key_map, x_row) + FeatureBlock::floats(c.query_map, x_row) +
                                  BackwardBuffers::floats(c) + State::floats(m_row, e_row) + square + m_row +
                                  BLOCK * ((size_t)e_row + 2 * m_row + 2 * BLOCK + 1) + 1024;
  return run_parallel<T>(c.threads, workspace_floats, [&](Workspace& workspace) {
    FeatureBlock keys(c.key_map, x_row, workspace), queries(c.query_map, x_row, workspace);
    BackwardBuffers back(c, workspace);
    State state(m_row, e_row, workspace);  // forward: only z; backward: dS and dz
    float *state_t = workspace.take(square), *value_t = workspace.take((size_t)e_row * BLOCK);
    float *keys_t = workspace.take((size_t)m_row * BLOCK), *key_gradient = workspace.take((size_t)BLOCK * m_row);
    float *weights = workspace.take(BLOCK * BLOCK), *slopes = workspace.take(BLOCK * BLOCK);
    std::vector<ReferenceBlock> blocks;
#pragma omp for schedule(dynamic)
    for (long stream = 0; stream < c.batch * c.groups; ++stream) {
      const long b = stream / c.groups, g = stream % c.groups;
      const uint8_t* mask = c.mask ? c.mask + b * c.mask_batch : nullptr;
      state.clear();
      memset(state_t, 0, square * sizeof(float));
      blocks.clear();
      for (long start = 0; start < c.length;) {
        int count = (int)(c.length - start < BLOCK ? c.length - start : BLOCK);
        const float before = state.scale;
        count = read_causal_keys<T>(c, b, g, start, count, mask, keys, state);
        blocks.push_back({start, count, state.scale});
        if (keys.map->scaled()) scale_all(state_t, (long)square, rescale_factor(before, state.scale));
        read_rows<T>(c.value, b, g, start, count, c.value_size, mask, back.value, e_row);
        transpose_tokens(count, e_row, back.value, value_t);
        for (long r = 0; r < repeats; ++r) {
          const long h = g * repeats + r;
          queries.read<T>(c.query, b, h, start, count, c.size, nullptr);
          row_gradients<T>(c, b, h, start, count, c.normaliser + (b * c.heads + h) * c.length + start, back);
          weight_gradients(count, e_row, back.value, value_t, back, slopes);
          multiply(count, m_row, e_row, back.gradient, e_row, 1, state_t, m_row, back.feature_gradient, m_row, false);
          add_outer(back.normaliser_gradient, state.k, m_row, count, back.feature_gradient);
          multiply_lower(count, slopes, keys.features, m_row, back.feature_gradient, true);
          write_query_gradient<T>(c, queries, b, h, start, count, back);
        }
        multiply(e_row, m_row, count, back.value, 1, e_row, keys.features, m_row, state_t, m_row, true);
        State::add_rows(keys.features, m_row, count, state.k);
        start += count;
      }
      state.clear();
      float later = blocks.empty() ? 0.0f : blocks.back().reference;
      for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) {
        const long start = block->start;
        const int count = block->count;
        keys.read<T>(c.key, b, g, start, count, c.size, mask);
        if (keys.map->scaled()) {
          keys.scale_rows(count, block->reference);
          const float step = rescale_factor(block->reference, later);
          scale_all(state.kv, (long)square, step);
          scale_all(state.k, m_row, step);
          later = block->reference;
        }
        read_rows<T>(c.value, b, g, start, count, c.value_size, mask, back.value, e_row);
        transpose_tokens(count, e_row, back.value, value_t);
        transpose_tokens(count, m_row, keys.features, keys_t);
        transpose(m_row, e_row, state.kv, e_row, state_t, m_row);
        multiply(count, m_row, e_row, back.value, e_row, 1, state_t, m_row, key_gradient, m_row, false);
        multiply(count, e_row, m_row, keys.features, m_row, 1, state.kv, e_row, back.value_gradient, e_row, false);
        add_to_rows(state.k, m_row, count, key_gradient);
        for (long r = 0; r < repeats; ++r) {
          const long h = g * repeats + r;
          queries.read<T>(c.query, b, h, start, count, c.size, nullptr);
          row_gradients<T>(c, b, h, start, count, c.normaliser + (b * c.heads + h) * c.length + start, back);
          weight_gradients(count, e_row, back.value, value_t, back, slopes);
          lower_product(count, m_row, queries.features, keys.features, keys_t, weights);
          multiply_lower_transposed(count, slopes, queries.features, m_row, key_gradient);
          multiply_lower_transposed(count, weights, back.gradient, e_row, back.value_gradient);
          multiply(m_row, e_row, count, queries.features, 1, m_row, back.gradient, e_row, state.kv, e_row, true);
          add_weighted(back.normaliser_gradient, queries.features, m_row, count, state.k);
        }
        memcpy(back.feature_gradient, key_gradient, (size_t)count * m_row * sizeof(float));
        write_key_gradients<T>(c, keys, b, g, start, count, mask, back);
      }
    }
  });
}

}  // namespace hla
