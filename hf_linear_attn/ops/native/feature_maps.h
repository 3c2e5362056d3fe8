// Feature maps on one block of tokens, forward and backward. The formulas are those of the classes in feature_maps/.
//
// A map is an optional product y = in_scale x W + bias_scale b and an activation. Features of f numbers each come in
// `parts` segments, every one padded to whole vectors with zeros; their order does not matter to any sum.

#pragma once

#include "amx.h"

namespace hla {

enum Activation : int32_t {
  ELU = 0,            // elu(y) + 1
  RELU = 1,           // relu(y) + epsilon
  SOFTMAX_PAIR = 2,   // [softmax(y), softmax(-y)]
  SOFTMAX_JOINT = 3,  // softmax([2y, -2y])
  EXP_PAIR = 4,       // [exp(y), exp(-y)], log scale max |y|
  POSITIVE = 5,       // exp(y - |x'|^2 / 2) factor with x' = in_scale x; log scale: the largest exponent
  POSITIVE_PAIR = 6,  // the same with [y, -y]
  EXP = 7,            // exp(y); log scale: the largest y
  SOFTMAX = 8,        // softmax(y)
  PRECOMPUTED = 9,    // x, in float32, is the features themselves; forward only
};

struct Map {
  const float *weight, *weight_t;                 // [heads or 1, d, padded f], its transpose [heads or 1, padded f, padded d]
  const float* bias;                              // [heads or 1, padded f] or null
  const float* scales;                            // [batch, heads, L]: log scales of precomputed features; or null
  int64_t weight_head, weight_t_head, bias_head;  // 0: shared by the heads
  int64_t scale_batch, scale_head;
  int32_t activation, parts;
  int32_t width, projected, input;  // f, numbers in a segment; whether there is a W; d, numbers in a row of x
  float in_scale, bias_scale, alpha, epsilon, factor, softcap;  // softcap: of in_scale x W, forward only; 0: none

  bool scaled() const {
    return scales || activation == EXP_PAIR || activation == POSITIVE || activation == POSITIVE_PAIR || activation == EXP;
  }
  int segment() const { return padded(width); }
  int features() const { return parts * segment(); }
  long column_of(long feature) const { return feature / width * segment() + feature % width; }
};

constexpr int BLOCK = 64;  // tokens

// log(SMALLEST_FEATURE) of formulas.py. (Relative to the largest exponential, not to the sum of all.)
constexpr float SMALLEST_EXPONENT = -46.0517f;

// A block of tokens of one head with its feature map: inputs x [tokens, padded d], products y, features and log scales.
struct FeatureBlock {
  const Map* map;
  int row, x_row;  // features and inputs of a token, padded
  float *x, *y, *features, *scale;
  long head = 0;  // of what is read

  FeatureBlock(const Map& m, Workspace& workspace, int tokens = BLOCK)
      : map(&m),
        row(m.features()),
        x_row(padded(m.input)),
        x(workspace.take((size_t)tokens * x_row)),
        y(workspace.take(m.projected ? (size_t)tokens * m.segment() : 0)),
        features(m.activation == PRECOMPUTED ? x : workspace.take((size_t)tokens * row)),
        scale(workspace.take(tokens)) {}

  // Masked tokens are zero; as keys they have no features either.
  template <typename T>
  void read(const Strided& from, long b, long of_head, long start, int count, const uint8_t* mask, bool are_keys = true) {
    head = of_head;
    if (map->activation == PRECOMPUTED)
      read_rows<float>(from, b, head, start, count, map->input, mask, x, x_row);
    else
      read_rows<T>(from, b, head, start, count, map->input, mask, x, x_row);
    if (map->scales)
      memcpy(scale, map->scales + b * map->scale_batch + head * map->scale_head + start, count * sizeof(float));
    apply(count);
    if (mask && are_keys) clear_masked(count, mask + start);
  }

  // The features of inputs [count, x_row] that are read already; those of masked tokens are zero.
  void use_rows(float* rows, long of_head, int count, const uint8_t* mask) const {
    FeatureBlock part = *this;
    part.x = rows;
    part.head = of_head;
    part.apply(count);
    if (mask) part.clear_masked(count, mask);
  }

  // The tokens from one on.
  FeatureBlock from(int token) const {
    FeatureBlock part = *this;
    part.x += (size_t)token * x_row;
    part.features += (size_t)token * row;
    part.scale += token;
    return part;
  }

  // One token of heads first ... first + count - 1. Where they share their weights these are read once.
  template <typename T>
  void read_heads(Strided from, long b, long first, int count, const uint8_t* mask) {
    static const uint8_t masked[BLOCK] = {};
    const bool shared = map->projected && !map->weight_head && !map->bias_head;
    from.token = from.head;
    FeatureBlock part = *this;
    for (int t = 0, step = shared ? count : 1; t < count; t += step) {
      part.read<T>(from, b, first + t, 0, step, mask && !*mask ? masked : nullptr);
      part.x += part.x_row;
      part.features += part.row;
      ++part.scale;
    }
  }

  void scale_rows(int count, float reference) {
    for (int t = 0; t < count; ++t)
      scale_all(features + (size_t)t * row, row, scale[t] == -INFINITY ? 0.0f : std::exp(scale[t] - reference));
  }

  // From the gradient of features to that of x [count, x_row]; those of W and b are added up. Features may be relative to
  // anything that is constant along a row. slope: buffer for a block.
  void backward(int count, const float* gradient, float* slope, float* x_gradient, float* weight_gradient,
                float* bias_gradient) const {
    const int segment = map->segment(), in_row = map->projected ? segment : x_row;
    const float *in = map->projected ? y : x, input_scale = map->projected ? 1.0f : map->in_scale;
    for (int t = 0; t < count; ++t) {
      const float *from = in + t * in_row, *value = features + t * row, *up = gradient + t * row;
      float* to = (map->projected ? slope : x_gradient) + t * in_row;
      switch (map->activation) {
        case ELU:
          for (int j = 0; j < segment; j += LANES) {
            const Vec derivative =
                select(load(from + j) * input_scale > 0.0f, splat(1.0f), load(value + j) + (map->alpha - 1.0f));
            store(to + j, load(up + j) * derivative * input_scale);
          }
          break;
        case RELU:
          for (int j = 0; j < segment; j += LANES)
            store(to + j, select(load(from + j) * input_scale > 0.0f, load(up + j) * input_scale, Vec{}));
          break;
        default: {  // exponentials, whatever they are relative to: the gradient of an exponent is feature times gradient
          const bool joint = map->activation == SOFTMAX_JOINT, separate = map->activation == SOFTMAX_PAIR;
          const float first = joint || map->activation == SOFTMAX ? dot(value, up, row) : separate ? dot(value, up, segment) : 0.0f;
          const float second = separate ? dot(value + segment, up + segment, segment) : first;
          for (int j = 0; j < segment; j += LANES) {
            Vec product = load(value + j) * (load(up + j) - first);
            if (map->parts == 2) product -= load(value + segment + j) * (load(up + segment + j) - second);
            store(to + j, joint ? product * 2.0f : product);
          }
        }
      }
    }
    if (!map->projected) return;
    if (bias_gradient)
      for (int t = 0; t < count; ++t) add_scaled(slope + t * segment, segment, map->bias_scale, bias_gradient);
    if (map->in_scale != 1.0f) scale_all(slope, (long)count * segment, map->in_scale);
    multiply(count, x_row, segment, slope, segment, 1, map->weight_t + head * map->weight_t_head, x_row, x_gradient, x_row,
             false);
    if (positive())  // through |x'|^2 / 2
      for (int t = 0; t < count; ++t) {
        const float all = dot(features + (size_t)t * row, gradient + (size_t)t * row, row) * map->in_scale * map->in_scale;
        add_scaled(x + t * x_row, x_row, -all, x_gradient + t * x_row);
      }
    if (weight_gradient) multiply(map->input, segment, count, x, 1, x_row, slope, segment, weight_gradient, segment, true);
  }

 private:
  bool positive() const { return map->activation == POSITIVE || map->activation == POSITIVE_PAIR; }

  void clear_masked(int count, const uint8_t* mask) {
    for (int t = 0; t < count; ++t)
      if (!mask[t]) {
        memset(features + (size_t)t * row, 0, row * sizeof(float));
        scale[t] = -INFINITY;
      }
  }

  void apply(int count) {
    const int segment = map->segment();
    if (!map->projected) {
      if (map->activation != PRECOMPUTED) activate(count, x, x_row, map->in_scale);
      return;
    }
    const float* weight = map->weight + head * map->weight_head;
    if (TileProducts* tiles = tiles_for(count))
      tiles->multiply_by_weights(count, segment, map->input, x, x_row, weight, segment, y, segment);
    else
      multiply_floats(count, segment, map->input, x, x_row, 1, weight, segment, y, segment, false);
    if (!map->bias && !map->softcap) return activate(count, y, segment, map->in_scale);
    const float* bias = map->bias ? map->bias + head * map->bias_head : nullptr;
    for (int t = 0; t < count; ++t)
      for (int j = 0; j < segment; j += LANES) {
        const Vec product = load(y + t * segment + j) * map->in_scale;
        const Vec within = map->softcap ? capped(product, map->softcap) : product;
        store(y + t * segment + j, bias ? within + load(bias + j) * map->bias_scale : within);
      }
    activate(count, y, segment, 1.0f);
  }

  void activate(int count, const float* in, int in_row, float in_scale) {
    switch (map->activation) {
      case ELU:
        return for_each(count, in, in_row, [=](int t, int j, Vec value) {
          value *= in_scale;
          const Vec feature = select(value > 0.0f, value + 1.0f, (exp_of(value) - 1.0f) * map->alpha + 1.0f);
          store(features + t * row + j, first_lanes(feature, map->width - j));
        });
      case RELU:
        return for_each(count, in, in_row, [=](int t, int j, Vec value) {
          store(features + t * row + j, first_lanes(larger(value * in_scale, Vec{}) + map->epsilon, map->width - j));
        });
      case SOFTMAX_PAIR: return exponentials<SOFTMAX_PAIR>(count, in, in_row, in_scale);
      case SOFTMAX_JOINT: return exponentials<SOFTMAX_JOINT>(count, in, in_row, in_scale);
      case EXP_PAIR: return exponentials<EXP_PAIR>(count, in, in_row, in_scale);
      case POSITIVE: return exponentials<POSITIVE>(count, in, in_row, in_scale);
      case EXP: return exponentials<EXP>(count, in, in_row, in_scale);
      case SOFTMAX: return exponentials<SOFTMAX>(count, in, in_row, in_scale);
      default: return exponentials<POSITIVE_PAIR>(count, in, in_row, in_scale);
    }
  }

  template <typename Body>
  void for_each(int count, const float* in, int in_row, Body body) {
    for (int t = 0; t < count; ++t)
      for (int j = 0; j < map->segment(); j += LANES) body(t, j, load(in + t * in_row + j));
  }

  // One loop over all tokens for each step, because within a token each step waits for the one before.
  template <Activation KIND>
  void exponentials(int count, const float* in, int in_row, float in_scale) {
    constexpr bool joint = KIND == SOFTMAX_JOINT, separate = KIND == SOFTMAX_PAIR, single = KIND == SOFTMAX;
    constexpr bool pair = KIND != POSITIVE && KIND != EXP && !single;
    constexpr bool positive = KIND == POSITIVE || KIND == POSITIVE_PAIR;
    const int segment = map->segment(), last = segment - LANES;
    const VecInt real = lanes_below(map->width - last);  // of the last vector
    const float gain = joint ? 2.0f * in_scale : in_scale, factor = positive ? map->factor : 1.0f;
    float shift[2][BLOCK], total[2][BLOCK];
    for (int t = 0; t < count; ++t) {
      const float* from = in + t * in_row;
      Vec minima = select(real, load(from + last), splat(INFINITY)),
          maxima = select(real, load(from + last), splat(-INFINITY));
      for (int j = 0; j < last; j += LANES) {
        minima = smaller(minima, load(from + j));
        maxima = larger(maxima, load(from + j));
      }
      const float high = max_of(maxima), low = max_of(-minima), top = gain * (pair && low > high ? low : high);
      shift[0][t] = separate ? gain * high : top;
      shift[1][t] = separate ? gain * low : top;
      if (positive || KIND == EXP_PAIR || KIND == EXP)
        scale[t] = top - (positive ? 0.5f * map->in_scale * map->in_scale * dot(x + t * x_row, x + t * x_row, x_row) : 0.0f);
    }
    for (int t = 0; t < count; ++t) {
      float* to = features + t * row;
      Vec sums[2] = {};
      const auto add = [&](int part, int j, Vec value) {
        const Vec exponent = value - shift[part][t];
        value = exp_of(exponent) * factor;
        if (single) value = select(exponent < SMALLEST_EXPONENT, Vec{}, value);  // a NaN stays
        if (j == last) value = select(real, value, Vec{});
        store(to + part * segment + j, value);
        sums[part] += value;
      };
      for (int j = 0; j < segment; j += LANES) {
        const Vec value = load(in + t * in_row + j) * gain;
        add(0, j, value);
        if (pair) add(1, j, -value);
      }
      for (int part = 0; part <= pair; ++part) total[part][t] = sum_of(sums[part]);
    }
    if (joint || separate || single)
      for (int t = 0; t < count; ++t)
        for (int part = 0; part <= pair; ++part)
          scale_all(features + t * row + part * segment, segment,
                    1.0f / (joint ? total[0][t] + total[1][t] : total[part][t]));
  }
};

}  // namespace hla
