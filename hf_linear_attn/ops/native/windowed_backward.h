// Gradients of the windowed form (see windowed.h): the near part's band, and the far part in either direction, with the
// state of each block computed again.

#pragma once

#include "windowed.h"

namespace hla {

static inline Strided reversed(Strided tensor, long tokens, int bytes) {
  tensor.data = static_cast<char*>(tensor.data) + (tokens - 1) * tensor.token * bytes;
  tensor.token = -tensor.token;
  return tensor;
}

// Gradients of one key-value head, accumulated over blocks: of all its queries, keys and values, in the order of the
// sequence, with a margin for blocks that reach beyond either end.
struct GradientAccumulators {
  long rows, keys, margin;
  int x_row, e_row;
  std::vector<float> query, key, value;

  GradientAccumulators(const Call& c)
      : rows(c.length),
        keys(c.keys),
        margin(2 * c.window + 4 * BLOCK),
        x_row(padded(c.size)),
        e_row(padded(c.value_size)),
        query((c.heads / c.groups) * rows * x_row),
        key((keys + 2 * margin) * x_row),
        value((keys + 2 * margin) * e_row) {}
  void clear() {
    for (auto* gradient : {&query, &key, &value}) std::fill(gradient->begin(), gradient->end(), 0.0f);
  }
  float* query_at(long r, long row) { return query.data() + (r * rows + row) * x_row; }
  float* key_at(long token) { return key.data() + (margin + token) * x_row; }
  float* value_at(long token) { return value.data() + (margin + token) * e_row; }
};

// Adds rows [count, width] to rows that run forwards or backwards from `to`.
static void add_rows_along(const float* from, int width, int count, float* to, bool backwards) {
  for (int t = 0; t < count; ++t) {
    float* row = to + (backwards ? -(long)t : (long)t) * width;
    for (int j = 0; j < width; j += LANES) store(row + j, load(row + j) + load(from + (size_t)t * width + j));
  }
}

// What the backward pass of the far part needs besides the forward's buffers.
struct FarBackwardBuffers {
  float *state_t, *value_t, *slopes, *key_gradient;

  static size_t floats(const Call& c) {
    const size_t e_row = padded(c.value_size), m_row = c.key_map.features();
    return m_row * e_row + e_row * BLOCK + BLOCK * BLOCK + BLOCK * m_row + 256;
  }
  FarBackwardBuffers(const Call& c, Workspace& workspace)
      : state_t(workspace.take((size_t)c.key_map.features() * padded(c.value_size))),
        value_t(workspace.take((size_t)padded(c.value_size) * BLOCK)),
        slopes(workspace.take(BLOCK * BLOCK)),
        key_gradient(workspace.take((size_t)BLOCK * c.key_map.features())) {}
};

// The far part's gradients in one direction; `normaliser` of all rows in the order of the sequence.
template <typename T>
static void far_backward(const Call& c, const Stream& s, Far& far, FarBackwardBuffers& buffers, BackwardBuffers& back,
                         float* normaliser, GradientAccumulators& to) {
  const int e_row = far.state.columns, m_row = far.state.rows;
  FarKeys& keys = *far.before;
  auto read_row_gradients = [&](long h, long start, int count) {
    const float* all = c.normaliser + (s.b * c.heads + h) * c.length;
    for (int t = 0; t < count; ++t) normaliser[t] = all[s.position_of(start + t)];
    row_gradients<T>(c, s.b, h, start, count, normaliser, back);
  };
  const auto key_position = [&](long token) { return s.backwards ? c.keys - 1 - token : token; };

  // Rows before the first block that has keys have no far part.
  long begin = 0;
  while (begin < c.length && !FarKeys::any(s, s.offset + begin - c.window, (int)std::min<long>(c.length - begin, BLOCK)))
    begin += BLOCK;
  far.clear();
  memset(buffers.state_t, 0, (size_t)m_row * e_row * sizeof(float));
  for (long start = begin; start < c.length; start += BLOCK) {
    const int count = (int)std::min<long>(c.length - start, BLOCK);
    keys.read<T>(c, s, s.offset + start - c.window, count);
    keys.transpose_features(count);
    transpose_tokens(count, e_row, keys.value, buffers.value_t);
    for (long r = 0; r < s.repeats; ++r) {
      const long h = s.g * s.repeats + r;
      far.read_queries<T>(c, s, h, start, count);
      read_row_gradients(h, start, count);
      weight_gradients(count, e_row, keys.value, buffers.value_t, back, buffers.slopes);
      multiply(count, m_row, e_row, back.gradient, e_row, 1, buffers.state_t, m_row, back.feature_gradient, m_row, false);
      add_outer(back.normaliser_gradient, far.state.k, m_row, count, back.feature_gradient);
      multiply_lower(count, buffers.slopes, keys.block.features, m_row, back.feature_gradient, true);
      for (int t = 0; t < count; ++t) {
        float *slope = back.feature_gradient + (long)t * m_row, *feature = far.queries.features + (long)t * m_row;
        const float mix = s.mix(c, h, start + t);
        if (c.mix_gradient)
          c.mix_gradient[(s.b * c.heads + h) * c.length + s.position_of(start + t)] += dot(slope, feature, m_row);
        scale_all(slope, m_row, mix);
        if (mix != 0.0f) scale_all(feature, m_row, 1.0f / mix);
      }
      map_backward(c, far.queries, s.b, h, c.heads, start, count, c.query_weight_gradient, c.query_bias_gradient, back);
      add_rows_along(back.x_gradient, to.x_row, count, to.query_at(r, s.position_of(start)), s.backwards);
    }
    multiply(e_row, m_row, count, keys.value, 1, e_row, keys.block.features, m_row, buffers.state_t, m_row, true);
    State::add_rows(keys.block.features, m_row, count, far.state.k);
  }
  far.clear();
  for (long start = c.length > 0 ? (c.length - 1) / BLOCK * BLOCK : -1; start >= begin; start -= BLOCK) {
    const int count = (int)std::min<long>(c.length - start, BLOCK);
    const long first = s.offset + start - c.window;
    keys.read<T>(c, s, first, count);
    keys.transpose_features(count);
    transpose_tokens(count, e_row, keys.value, buffers.value_t);
    transpose(m_row, e_row, far.state.kv, e_row, buffers.state_t, m_row);
    multiply(count, m_row, e_row, keys.value, e_row, 1, buffers.state_t, m_row, buffers.key_gradient, m_row, false);
    multiply(count, e_row, m_row, keys.block.features, m_row, 1, far.state.kv, e_row, back.value_gradient, e_row, false);
    add_to_rows(far.state.k, m_row, count, buffers.key_gradient);
    for (long r = 0; r < s.repeats; ++r) {
      const long h = s.g * s.repeats + r;
      far.read_queries<T>(c, s, h, start, count);
      read_row_gradients(h, start, count);
      weight_gradients(count, e_row, keys.value, buffers.value_t, back, buffers.slopes);
      lower_product(count, m_row, far.queries.features, keys.block.features, keys.transposed, far.weights);
      multiply_lower_transposed(count, buffers.slopes, far.queries.features, m_row, buffers.key_gradient);
      multiply_lower_transposed(count, far.weights, back.gradient, e_row, back.value_gradient);
      multiply(m_row, e_row, count, far.queries.features, 1, m_row, back.gradient, e_row, far.state.kv, e_row, true);
      add_weighted(back.normaliser_gradient, far.queries.features, m_row, count, far.state.k);
    }
    memcpy(back.feature_gradient, buffers.key_gradient, (size_t)count * m_row * sizeof(float));
    clear_masked(s.far(), first, count, back.feature_gradient, m_row);
    clear_masked(s.far(), first, count, back.value_gradient, e_row);
    map_backward(c, keys.block, s.b, s.g, c.groups, first, count, c.key_weight_gradient, c.key_bias_gradient, back);
    clear_masked(s.far(), first, count, back.x_gradient, to.x_row);
    add_rows_along(back.x_gradient, to.x_row, count, to.key_at(key_position(first)), s.backwards);
    add_rows_along(back.value_gradient, e_row, count, to.value_at(key_position(first)), s.backwards);
  }
}

template <typename T>
static int windowed_backward(const Call& c) {
  const int x_row = padded(c.size), e_row = padded(c.value_size);
  const size_t workspace_floats = Far::floats(c, false) + FarBackwardBuffers::floats(c) + BackwardBuffers::floats(c) +
                                  Band::floats(c) + BLOCK * (x_row + 2) + 256;
  Call reversed_call = c;
  if (c.two_sided) {
    for (Strided Call::* rows : {&Call::query, &Call::out, &Call::out_gradient})
      reversed_call.*rows = reversed(c.*rows, c.length, sizeof(T));
    for (Strided Call::* tokens : {&Call::key, &Call::value}) reversed_call.*tokens = reversed(c.*tokens, c.keys, sizeof(T));
  }
  return run_parallel<T>(c.threads, workspace_floats, [&](Workspace& workspace) {
    Far far(c, workspace, false);
    FarBackwardBuffers far_buffers(c, workspace);
    BackwardBuffers back(c, workspace);
    Band band(c, workspace, true);
    float *query = workspace.take(BLOCK * x_row), *normaliser = workspace.take(BLOCK), *top = workspace.take(BLOCK);
    GradientAccumulators to(c);
#pragma omp for schedule(dynamic)
    for (long task = 0; task < c.batch * c.groups; ++task) {
      Stream s(c, task);
      to.clear();
      band.read_sinks<T>(c, s);
      far_backward<T>(c, s, far, far_buffers, back, normaliser, to);
      if (c.two_sided) {
        s.reverse();
        far_backward<T>(reversed_call, s, far, far_buffers, back, normaliser, to);
        s.reverse();
      }
      for (long start = 0; start < c.length; start += BLOCK) {
        const int count = (int)std::min<long>(c.length - start, BLOCK);
        const long first = s.offset + start;
        band.read<T>(c, s, start, count);
        for (long r = 0; r < s.repeats; ++r) {
          const long h = s.g * s.repeats + r, index = (s.b * c.heads + h) * c.length + start;
          read_rows<T>(c.query, s.b, h, start, count, c.size, s.valid() + s.offset, query, x_row);
          row_gradients<T>(c, s.b, h, start, count, c.normaliser + index, back);
          memcpy(top, c.top + index, count * sizeof(float));
          band.exponentials(count, query, c.scaling, true, top);
          band.backward(count, query, c.scaling, back, to.query_at(r, start), to.key_at(first - c.window),
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
      if (!c.sinks) continue;
      write_rows<T>(c.sink_key_gradient, s.b, s.g, 0, (int)c.sinks, c.size, band.sink_key_gradient, x_row);
      write_rows<T>(c.sink_value_gradient, s.b, s.g, 0, (int)c.sinks, c.value_size, band.sink_value_gradient, e_row);
    }
  });
}

}  // namespace hla
