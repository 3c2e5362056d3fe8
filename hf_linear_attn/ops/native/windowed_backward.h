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
  for (long t = 0; t < count; ++t) add_scaled(from + t * width, width, 1.0f, to + (backwards ? -t : t) * width);
}

// How `CausalBackward` reads and writes the far part in one direction.
template <typename T>
struct FarForm {
  const Call& c;
  const Stream& s;
  CausalBackward& pass;
  GradientAccumulators& to;

  bool is_scaled() const { return pass.queries.map->scaled(); }
  int read_keys(long start, int count, bool) {
    const long first = s.offset + start - c.window;
    pass.keys.read<T>(c.key, s.b, s.g, first, count, s.far());
    read_rows<T>(c.value, s.b, s.g, first, count, c.value_size, s.far(), pass.back.value, to.e_row);
    return count;
  }
  void read_queries(long h, long start, int count) {
    pass.queries.read<T>(c.query, s.b, h, start, count, s.valid() + s.offset, false);
    weigh_features(c, s, h, start, count, pass.queries);
    const float *all = c.normaliser + (s.b * c.heads + h) * c.length, *tops = c.top + (s.b * c.heads + h) * c.length;
    for (int t = 0; t < count; ++t) {
      const long position = s.position_of(start + t);
      pass.normaliser[t] = all[position];
      if (!is_scaled()) continue;
      scale_all(pass.queries.features + (long)t * pass.queries.row, pass.queries.row,
                far_factor(pass.queries.scale[t], tops[position]));
    }
    row_gradients<T>(c, s.b, h, start, count, pass.normaliser, pass.back);
  }
  void write_query_gradient(long h, long start, int count) {
    const int m_row = pass.queries.row;
    for (int t = 0; t < count; ++t) {
      float *slope = pass.back.feature_gradient + (long)t * m_row, *feature = pass.queries.features + (long)t * m_row;
      const float mix = is_scaled() ? 1.0f : std::exp(s.log_mix(c, h, start + t));  // that of an exponent needs none
      if (c.mix_gradient)
        c.mix_gradient[(s.b * c.heads + h) * c.length + s.position_of(start + t)] += dot(slope, feature, m_row);
      scale_all(slope, m_row, mix);
      if (std::isnormal(mix)) scale_all(feature, m_row, 1.0f / mix);  // the inverse of a smaller one is infinite
    }
    features_backward(pass.queries, s.b * c.heads + h, count, pass.back, c.query_weight_gradient, c.query_bias_gradient);
    float* rows = to.query_at(h - s.g * c.repeats(), s.position_of(start));
    add_rows_along(pass.back.x_gradient, to.x_row, count, rows, s.backwards);
  }
  void write_key_gradients(long start, int count) {
    const long first = s.offset + start - c.window, position = s.backwards ? c.keys - 1 - first : first;
    clear_masked(s.far(), first, count, pass.back.feature_gradient, pass.keys.row);
    clear_masked(s.far(), first, count, pass.back.value_gradient, to.e_row);
    features_backward(pass.keys, s.b * c.groups + s.g, count, pass.back, c.key_weight_gradient, c.key_bias_gradient);
    clear_masked(s.far(), first, count, pass.back.x_gradient, to.x_row);
    add_rows_along(pass.back.x_gradient, to.x_row, count, to.key_at(position), s.backwards);
    add_rows_along(pass.back.value_gradient, to.e_row, count, to.value_at(position), s.backwards);
  }

  void run() {
    // Rows before the first block that has keys have no far part.
    long begin = 0;
    while (begin < c.length && !FarKeys::any(s, s.offset + begin - c.window, (int)std::min<long>(c.length - begin, BLOCK)))
      begin += BLOCK;
    pass.run(c, s.g, begin, *this);
  }
};

template <typename T>
static int windowed_backward(const Call& c) {
  Call reversed_call = c;
  if (c.two_sided) {
    for (Strided Call::* rows : {&Call::query, &Call::out, &Call::out_gradient})
      reversed_call.*rows = reversed(c.*rows, c.length, sizeof(T));
    for (Strided Call::* tokens : {&Call::key, &Call::value}) reversed_call.*tokens = reversed(c.*tokens, c.keys, sizeof(T));
  }
  return run_parallel<T>(c.threads, [&](Workspace& workspace) {
    CausalBackward far(c, workspace);
    BackwardBuffers& back = far.back;
    Band band(c, workspace, true);
    SinkRows sink_rows(c, workspace, true);
    const int x_row = band.x_row, e_row = band.e_row;
    float *query = workspace.take(BLOCK * x_row), *top = workspace.take(BLOCK);
    if (!workspace.ready()) return;
    GradientAccumulators to(c);
#pragma omp for schedule(dynamic)
    for (long task = 0; task < c.batch * c.groups; ++task) {
      Stream s(c, task);
      to.clear();
      band.read_sinks<T>(c, s);
      sink_rows.begin_backward<T>(c, s);
      FarForm<T>{c, s, far, to}.run();
      if (c.two_sided) {
        s.reverse();
        FarForm<T>{reversed_call, s, far, to}.run();
        s.reverse();
      }
      const long length = c.two_sided ? s.tokens_end : c.length;
      for (long start = 0; start < length; start += BLOCK) {
        const int count = (int)std::min<long>(length - start, BLOCK);
        const long first = s.offset + start - band.before;
        band.read<T>(c, s, start, count);
        sink_rows.backward(band, to.key_at(s.offset + start), to.value_at(s.offset + start));
        for (long r = 0; r < c.repeats(); ++r) {
          const long h = s.g * c.repeats() + r, index = (s.b * c.heads + h) * c.length + start;
          read_rows<T>(c.query, s.b, h, start, count, c.size, s.valid() + s.offset, query, x_row);
          row_gradients<T>(c, s.b, h, start, count, c.normaliser + index, back);
          memcpy(top, c.top + index, count * sizeof(float));
          band.exponentials(count, query, c.scaling, true, top, nullptr);
          band.backward(count, query, c.scaling, back, to.query_at(r, start), to.key_at(first), to.value_at(first));
        }
      }
      SinkRows::for_each(c, s, [&](int row, long h, long position) {
        if (!c.two_sided) return;
        float* gradient = sink_rows.query_gradient + (size_t)row * x_row;
        scale_all(gradient, x_row, c.scaling);
        add_rows_along(gradient, x_row, 1, to.query_at(h - s.g * c.repeats(), position), false);
      });
      for (int j = 0; c.two_sided && j < band.num_sinks; ++j) {
        add_rows_along(band.sink_key_gradient + j * x_row, x_row, 1, to.key_at(s.sinks[j]), false);
        add_rows_along(band.sink_value_gradient + j * e_row, e_row, 1, to.value_at(s.sinks[j]), false);
      }
      for (long r = 0; r < c.repeats(); ++r) {
        clear_masked(s.valid() + s.offset, 0, (int)c.length, to.query_at(r, 0), x_row);
        write_rows<T>(c.query_gradient, s.b, s.g * c.repeats() + r, 0, (int)c.length, c.size, to.query_at(r, 0), x_row);
      }
      write_rows<T>(c.key_gradient, s.b, s.g, 0, (int)c.keys, c.size, to.key_at(0), x_row);
      write_rows<T>(c.value_gradient, s.b, s.g, 0, (int)c.keys, c.value_size, to.value_at(0), e_row);
      if (!c.sink_key_gradient.data) continue;
      write_rows<T>(c.sink_key_gradient, s.b, s.g, 0, (int)c.sinks, c.size, band.sink_key_gradient, x_row);
      write_rows<T>(c.sink_value_gradient, s.b, s.g, 0, (int)c.sinks, c.value_size, band.sink_value_gradient, e_row);
    }
  });
}

}  // namespace hla
