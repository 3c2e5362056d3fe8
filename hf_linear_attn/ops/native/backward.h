// Gradients of kernelized attention by recomputation. With n_i, d_i numerator and normaliser of row i and g_i the
// gradient of its output:  dn_i = g_i / d_i,  dd_i = -(g_i . o_i) / d_i.  Then
//     dphi(q_i) = S dn_i + z dd_i,  dS = sum_i phi(q_i) dn_i^T,  dz = sum_i phi(q_i) dd_i,
//     dphi(k_j) = dS v_j + dz,      dv_j = dS^T phi(k_j),
// with sums over j <= i where the form is causal: S then runs forward, dS backward, and within a block of tokens the
// weights are explicit.
//
// With a log scale rows and sums are relative to a reference that rises along the sequence: going back, the gradients of
// later rows are multiplied by the exponential of the (negative) step between two references.

#pragma once

#include "kernelized.h"

namespace hla {

struct BackwardBuffers {
  float *value, *gradient, *output, *feature_gradient, *slope, *x_gradient, *value_gradient, *normaliser_gradient;

  BackwardBuffers(const Call& c, Workspace& workspace)
      : value(workspace.take(BLOCK * c.e_row())),
        gradient(workspace.take(BLOCK * c.e_row())),
        output(workspace.take(BLOCK * c.e_row())),
        feature_gradient(workspace.take((size_t)BLOCK * c.m_row())),
        slope(workspace.take((size_t)BLOCK * std::max(c.key_map.segment(), c.query_map.segment()))),
        x_gradient(workspace.take(BLOCK * c.x_row())),
        value_gradient(workspace.take(BLOCK * c.e_row())),
        normaliser_gradient(workspace.take(BLOCK)) {}
};

// dn and dd of a block of rows, from the gradients and outputs as they were written, and the normalisers.
template <typename T>
static void row_gradients(const Call& c, long b, long h, long start, int count, const float* normaliser,
                          BackwardBuffers& back) {
  const int row = c.e_row();
  read_rows<T>(c.out_gradient, b, h, start, count, c.value_size, nullptr, back.gradient, row);
  read_rows<T>(c.out, b, h, start, count, c.value_size, nullptr, back.output, row);
  for (int t = 0; t < count; ++t) {
    float* gradient = back.gradient + t * row;
    const float inverse = normaliser[t] > FLOOR ? 1.0f / normaliser[t] : 0.0f;
    back.normaliser_gradient[t] = -dot(gradient, back.output + t * row, row) * inverse;
    scale_all(gradient, row, inverse);
  }
}

// Adds `row` to each of the rows, times scale[t] if there is one.
static void add_to_rows(const float* row, int width, int count, float* to, const float* scale = nullptr) {
  for (int t = 0; t < count; ++t) add_scaled(row, width, scale ? scale[t] : 1.0f, to + (size_t)t * width);
}

// From the gradient of a block's features to that of x, in back.x_gradient. head: among those of all rows of the batch.
static void features_backward(const FeatureBlock& block, long head, int count, BackwardBuffers& back, float* weight_gradient,
                              float* bias_gradient) {
  const size_t index = head * block.map->segment();
  block.backward(count, back.feature_gradient, back.slope, back.x_gradient,
                 weight_gradient ? weight_gradient + index * block.map->input : nullptr,
                 bias_gradient ? bias_gradient + index : nullptr);
}

static inline void clear_masked(const uint8_t* mask, long start, int count, float* rows, int width) {
  if (!mask) return;
  for (int t = 0; t < count; ++t)
    if (!mask[start + t]) memset(rows + (size_t)t * width, 0, width * sizeof(float));
}

// The gradients of keys and values of a block, without those of masked tokens.
template <typename T>
static void write_key_gradients(const Call& c, const FeatureBlock& keys, long b, long g, long start, int count,
                                BackwardBuffers& back) {
  clear_masked(c.mask_of(b), start, count, back.feature_gradient, keys.row);
  clear_masked(c.mask_of(b), start, count, back.value_gradient, c.e_row());
  write_rows<T>(c.value_gradient, b, g, start, count, c.value_size, back.value_gradient, c.e_row());
  features_backward(keys, b * c.groups + g, count, back, c.key_weight_gradient, c.key_bias_gradient);
  write_rows<T>(c.key_gradient, b, g, start, count, c.size, back.x_gradient, keys.x_row);
}

template <typename T>
static int bidirectional_backward(const Call& c) {
  const int e_row = c.e_row(), m_row = c.m_row();
  return run_parallel<T>(c.threads, [&](Workspace& workspace) {
    FeatureBlock keys(c.key_map, workspace), queries(c.query_map, workspace);
    BackwardBuffers back(c, workspace);
    State state(c, workspace), slopes(c, workspace);
    float *transposed = workspace.take((size_t)m_row * e_row), *normaliser = workspace.take(BLOCK);
    if (!workspace.ready()) return;
#pragma omp for schedule(dynamic)
    for (long stream = 0; stream < c.batch * c.groups; ++stream) {
      const long b = stream / c.groups, g = stream % c.groups;
      state.clear();
      slopes.clear();
      sum_keys<T>(c, b, g, 0, c.keys, keys, back.value, state);
      transpose(m_row, e_row, state.kv, e_row, transposed, m_row);
      for (long h = g * c.repeats(); h < (g + 1) * c.repeats(); ++h)
        for (long start = 0; start < c.length; start += BLOCK) {
          const int count = (int)std::min<long>(c.length - start, BLOCK);
          queries.read<T>(c.query, b, h, start, count, nullptr);
          for (int t = 0; t < count; ++t) normaliser[t] = dot(queries.features + (size_t)t * m_row, state.k, m_row);
          row_gradients<T>(c, b, h, start, count, normaliser, back);
          multiply(m_row, e_row, count, queries.features, 1, m_row, back.gradient, e_row, slopes.kv, e_row, true);
          add_rows(queries.features, m_row, count, slopes.k, back.normaliser_gradient);
          multiply(count, m_row, e_row, back.gradient, e_row, 1, transposed, m_row, back.feature_gradient, m_row, false);
          add_to_rows(state.k, m_row, count, back.feature_gradient, back.normaliser_gradient);
          features_backward(queries, b * c.heads + h, count, back, c.query_weight_gradient, c.query_bias_gradient);
          write_rows<T>(c.query_gradient, b, h, start, count, c.size, back.x_gradient, queries.x_row);
        }
      transpose(m_row, e_row, slopes.kv, e_row, transposed, m_row);
      for (long start = 0; start < c.keys; start += BLOCK) {
        const int count = (int)std::min<long>(c.keys - start, BLOCK);
        keys.read<T>(c.key, b, g, start, count, c.mask_of(b));
        if (keys.map->scaled()) keys.scale_rows(count, state.scale);
        read_rows<T>(c.value, b, g, start, count, c.value_size, c.mask_of(b), back.value, e_row);
        multiply(count, e_row, m_row, keys.features, m_row, 1, slopes.kv, e_row, back.value_gradient, e_row, false);
        multiply(count, m_row, e_row, back.value, e_row, 1, transposed, m_row, back.feature_gradient, m_row, false);
        add_to_rows(slopes.k, m_row, count, back.feature_gradient);
        write_key_gradients<T>(c, keys, b, g, start, count, back);
      }
    }
  });
}

// The gradient of the explicit weights of a block: dn_i . v_j + dd_i for j <= i, zeros above.
static void weight_gradients(int count, int e_row, const float* value, const float* value_t, const BackwardBuffers& back,
                             float* out) {
  triangle_product(false, count, count, e_row, back.gradient, value, value_t, out);
  for (int i = 0; i < count; ++i)
    for (int j = 0; j <= i; ++j) out[i * BLOCK + j] += back.normaliser_gradient[i];
}

// Gradients of a causal form of one key-value head, in two passes: in the order of the sequence to the queries, and back to
// keys and values. `form` reads and writes:
//     int read_keys(start, count, again)      keys and values, in the first pass up to as many as share a reference
//     void read_queries(h, start, count)      features, dn and dd
//     void write_query_gradient(h, start, count), write_key_gradients(start, count)
struct CausalBackward {
  FeatureBlock keys, queries;
  BackwardBuffers back;
  State state;  // in order: only z; back: dS and dz
  float *state_t, *value_t, *keys_t, *key_gradient, *weights, *slopes, *normaliser;
  struct ReferenceBlock {  // tokens that share a reference
    long start;
    int count;
    float reference;
  };
  std::vector<ReferenceBlock> blocks;

  CausalBackward(const Call& c, Workspace& workspace)
      : keys(c.key_map, workspace),
        queries(c.query_map, workspace),
        back(c, workspace),
        state(c, workspace),
        state_t(workspace.take((size_t)c.m_row() * c.e_row())),
        value_t(workspace.take((size_t)c.e_row() * BLOCK)),
        keys_t(workspace.take((size_t)c.m_row() * BLOCK)),
        key_gradient(workspace.take((size_t)c.m_row() * BLOCK)),
        weights(workspace.take(BLOCK * BLOCK)),
        slopes(workspace.take(BLOCK * BLOCK)),
        normaliser(workspace.take(BLOCK)) {}

  template <typename Form>
  void run(const Call& c, long g, long begin, Form& form) {
    const int e_row = c.e_row(), m_row = c.m_row();
    const long first_head = g * c.repeats(), last_head = first_head + c.repeats();
    state.clear();
    memset(state_t, 0, (size_t)m_row * e_row * sizeof(float));
    blocks.clear();
    for (long start = begin; start < c.length; start += blocks.back().count) {
      const float before = state.scale;
      const int count = form.read_keys(start, (int)std::min<long>(c.length - start, BLOCK), false);
      blocks.push_back({start, count, state.scale});
      if (keys.map->scaled()) scale_all(state_t, (long)m_row * e_row, rescale_factor(before, state.scale));
      transpose_tokens(count, e_row, back.value, value_t);
      for (long h = first_head; h < last_head; ++h) {
        form.read_queries(h, start, count);
        weight_gradients(count, e_row, back.value, value_t, back, slopes);
        multiply(count, m_row, e_row, back.gradient, e_row, 1, state_t, m_row, back.feature_gradient, m_row, false);
        add_to_rows(state.k, m_row, count, back.feature_gradient, back.normaliser_gradient);
        multiply_lower(count, slopes, keys.features, m_row, back.feature_gradient, true);
        form.write_query_gradient(h, start, count);
      }
      multiply(e_row, m_row, count, back.value, 1, e_row, keys.features, m_row, state_t, m_row, true);
      add_rows(keys.features, m_row, count, state.k);
    }
    state.clear();
    float later = blocks.empty() ? 0.0f : blocks.back().reference;
    for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) {
      const long start = block->start;
      const int count = block->count;
      form.read_keys(start, count, true);
      if (keys.map->scaled()) {
        keys.scale_rows(count, block->reference);
        scale_all(state.kv, state.numbers(), rescale_factor(block->reference, later));
        later = block->reference;
      }
      transpose_tokens(count, e_row, back.value, value_t);
      transpose_tokens(count, m_row, keys.features, keys_t);
      transpose(m_row, e_row, state.kv, e_row, state_t, m_row);
      multiply(count, m_row, e_row, back.value, e_row, 1, state_t, m_row, key_gradient, m_row, false);
      multiply(count, e_row, m_row, keys.features, m_row, 1, state.kv, e_row, back.value_gradient, e_row, false);
      add_to_rows(state.k, m_row, count, key_gradient);
      for (long h = first_head; h < last_head; ++h) {
        form.read_queries(h, start, count);
        weight_gradients(count, e_row, back.value, value_t, back, slopes);
        triangle_product(false, count, count, m_row, queries.features, keys.features, keys_t, weights);
        add_multiply_upper(count, count, slopes, 1, BLOCK, queries.features, m_row, key_gradient);
        add_multiply_upper(count, count, weights, 1, BLOCK, back.gradient, e_row, back.value_gradient);
        multiply(m_row, e_row, count, queries.features, 1, m_row, back.gradient, e_row, state.kv, e_row, true);
        add_rows(queries.features, m_row, count, state.k, back.normaliser_gradient);
      }
      memcpy(back.feature_gradient, key_gradient, (size_t)count * m_row * sizeof(float));
      form.write_key_gradients(start, count);
    }
  }
};

// How `CausalBackward` reads and writes kernelized attention.
template <typename T>
struct KernelizedForm {
  const Call& c;
  CausalBackward& pass;
  long b, g;

  int read_keys(long start, int count, bool again) {
    if (again)
      pass.keys.read<T>(c.key, b, g, start, count, c.mask_of(b));
    else
      count = read_causal_keys<T>(c, b, g, start, count, pass.keys, pass.state);
    read_rows<T>(c.value, b, g, start, count, c.value_size, c.mask_of(b), pass.back.value, c.e_row());
    return count;
  }
  void read_queries(long h, long start, int count) {
    pass.queries.read<T>(c.query, b, h, start, count, nullptr);
    row_gradients<T>(c, b, h, start, count, c.normaliser + (b * c.heads + h) * c.length + start, pass.back);
  }
  void write_query_gradient(long h, long start, int count) {
    features_backward(pass.queries, b * c.heads + h, count, pass.back, c.query_weight_gradient, c.query_bias_gradient);
    write_rows<T>(c.query_gradient, b, h, start, count, c.size, pass.back.x_gradient, c.x_row());
  }
  void write_key_gradients(long start, int count) {
    hla::write_key_gradients<T>(c, pass.keys, b, g, start, count, pass.back);
  }
};

template <typename T>
static int causal_backward(const Call& c) {
  return run_parallel<T>(c.threads, [&](Workspace& workspace) {
    CausalBackward pass(c, workspace);
    if (!workspace.ready()) return;
#pragma omp for schedule(dynamic)
    for (long stream = 0; stream < c.batch * c.groups; ++stream) {
      KernelizedForm<T> form{c, pass, stream / c.groups, stream % c.groups};
      pass.run(c, form.g, 0, form);
    }
  });
}

}  // namespace hla
