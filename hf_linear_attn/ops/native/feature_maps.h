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
  ROTATED_RELU = 7,   // (relu(y) + epsilon) [cos, sin] of the token's angle
  PRECOMPUTED = 8,    // x, in float32, is the features themselves; forward only
};

struct Map {
  int32_t activation;
  int32_t parts;
  int32_t width;      // f, numbers in a segment
  int32_t projected;  // whether there is a W
  int32_t input;      // d, numbers in a row of x
  float bias_scale;   // of b
  float in_scale, alpha, epsilon, factor;
  const float* weight;                            // [heads or 1, d, padded f]
  const float* weight_t;                          // its transpose [heads or 1, padded f, padded d]
  const float* bias;                              // [heads or 1, padded f] or null
  int64_t weight_head, weight_t_head, bias_head;  // 0: shared by the heads
  const float* cosine;                            // [batch or 1, L]
  const float* sine;
  int64_t angle_batch;
  const float* scales;  // [batch, heads, L]: log scales of precomputed features; or null
  int64_t scale_batch, scale_head;

  bool scaled() const { return scales || activation == EXP_PAIR || activation == POSITIVE || activation == POSITIVE_PAIR; }
  int segment() const { return padded(width); }
  int features() const { return parts * segment(); }
};

constexpr int BLOCK = 64;  // tokens

// [softmax(y), softmax(-y)] with y = in_scale x + bias_scale b, for rows of N whole vectors, at most a block; x becomes y.
// Three passes over all rows, because within a row each step waits for the one before.
template <int N>
static void softmax_pairs(int count, float* x, float in_scale, const float* bias, float bias_scale, float* out) {
  float maximum[BLOCK], negated_minimum[BLOCK], total_up[BLOCK], total_down[BLOCK];
  for (int t = 0; t < count; ++t) {
    Vec minima = splat(INFINITY), maxima = splat(-INFINITY);
    for (int j = 0; j < N; ++j) {
      float* at = x + (t * N + j) * LANES;
      Vec y = load(at) * in_scale;
      if (bias) y += load(bias + j * LANES) * bias_scale;
      store(at, y);
      minima = smaller(minima, y);
      maxima = larger(maxima, y);
    }
    maxima_of(maxima, -minima, maximum[t], negated_minimum[t]);
  }
  for (int t = 0; t < count; ++t) {
    Vec sum_up{}, sum_down{};
    for (int j = 0; j < N; ++j) {
      const Vec y = load(x + (t * N + j) * LANES), up = exp_of(y - maximum[t]), down = exp_of(-y - negated_minimum[t]);
      store(out + (2 * t * N + j) * LANES, up);
      store(out + ((2 * t + 1) * N + j) * LANES, down);
      sum_up += up;
      sum_down += down;
    }
    sums_of(sum_up, sum_down, total_up[t], total_down[t]);
  }
  for (int t = 0; t < count; ++t) {
    scale_all(out + 2 * t * N * LANES, N * LANES, 1.0f / total_up[t]);
    scale_all(out + (2 * t + 1) * N * LANES, N * LANES, 1.0f / total_down[t]);
  }
}

static inline void range_of(const float* y, int width, float& low, float& high) {
  Vec minima = splat(INFINITY), maxima = splat(-INFINITY);
  for (int j = 0; j < width; j += LANES) {
    const Vec value = load(y + j);
    if (j + LANES > width) {
      const VecInt real = first_lanes(width - j);
      minima = smaller(minima, select(real, value, splat(INFINITY)));
      maxima = larger(maxima, select(real, value, splat(-INFINITY)));
    } else {
      minima = smaller(minima, value);
      maxima = larger(maxima, value);
    }
  }
  low = -max_of(-minima);
  high = max_of(maxima);
}

// Returns the sum of the row.
static inline float exp_row(const float* y, float sign, int width, float shift, float factor, float* out) {
  Vec lane_totals{};
  for (int j = 0; j < padded(width); j += LANES) {
    Vec value = exp_of(load(y + j) * sign + shift) * factor;
    if (j + LANES > width) value = select(first_lanes(width - j), value, Vec{});
    store(out + j, value);
    lane_totals += value;
  }
  return sum_of(lane_totals);
}

// x [count, padded d] -> out [count, features]; scale [count] where the map has a log scale. y: buffer for a block.
static void apply_map(const Map& map, int head, const float* angles_cos, const float* angles_sin, const float* x, int x_row,
                      int count, float* y, float* out, float* scale) {
  const int width = map.width, segment = map.segment(), row = map.features();
  const float* in = x;
  int in_row = x_row;
  if (map.projected) {
    const float* weight = map.weight + head * map.weight_head;
    if (TileProducts* tiles = tiles_for(count))
      tiles->multiply_by_weights(count, segment, map.input, x, x_row, weight, segment, y, segment);
    else
      multiply_floats(count, segment, map.input, x, x_row, 1, weight, segment, y, segment, false);
    const float* bias = map.bias ? map.bias + head * map.bias_head : nullptr;
    if (map.activation == SOFTMAX_PAIR && width % LANES == 0) switch (width / LANES) {
        case 2: return softmax_pairs<2>(count, y, map.in_scale, bias, map.bias_scale, out);
        case 4: return softmax_pairs<4>(count, y, map.in_scale, bias, map.bias_scale, out);
        case 8: return softmax_pairs<8>(count, y, map.in_scale, bias, map.bias_scale, out);
      }
    if (bias || map.in_scale != 1.0f)
      for (int t = 0; t < count; ++t)
        for (int j = 0; j < segment; j += LANES) {
          Vec value = load(y + t * segment + j) * map.in_scale;
          store(y + t * segment + j, bias ? value + load(bias + j) * map.bias_scale : value);
        }
    in = y;
    in_row = segment;
  }
  const float input_scale = map.projected ? 1.0f : map.in_scale;
  for (int t = 0; t < count; ++t) {
    const float* from = in + t * in_row;
    float* to = out + t * row;
    float low, high;
    switch (map.activation) {
      case PRECOMPUTED: break;  // `out` is x
      case ELU:
        for (int j = 0; j < segment; j += LANES) {
          const Vec value = load(from + j) * input_scale;
          Vec feature = select(value > 0.0f, value + 1.0f, (exp_of(value) - 1.0f) * map.alpha + 1.0f);
          if (j + LANES > width) feature = select(first_lanes(width - j), feature, Vec{});
          store(to + j, feature);
        }
        break;
      case RELU:
      case ROTATED_RELU:
        for (int j = 0; j < segment; j += LANES) {
          Vec feature = larger(load(from + j) * input_scale, Vec{}) + map.epsilon;
          if (j + LANES > width) feature = select(first_lanes(width - j), feature, Vec{});
          if (map.activation == RELU) {
            store(to + j, feature);
          } else {
            store(to + j, feature * angles_cos[t]);
            store(to + segment + j, feature * angles_sin[t]);
          }
        }
        break;
      case SOFTMAX_PAIR:
        range_of(from, width, low, high);
        scale_all(to, segment, 1.0f / exp_row(from, 1.0f, width, -high, 1.0f, to));
        scale_all(to + segment, segment, 1.0f / exp_row(from, -1.0f, width, low, 1.0f, to + segment));
        break;
      case SOFTMAX_JOINT: {
        range_of(from, width, low, high);
        const float top = 2.0f * (high > -low ? high : -low);
        const float up = exp_row(from, 2.0f, width, -top, 1.0f, to);
        const float down = exp_row(from, -2.0f, width, -top, 1.0f, to + segment);
        scale_all(to, row, 1.0f / (up + down));
        break;
      }
      case EXP_PAIR:
        range_of(from, width, low, high);
        scale[t] = high > -low ? high : -low;
        exp_row(from, 1.0f, width, -scale[t], 1.0f, to);
        exp_row(from, -1.0f, width, -scale[t], 1.0f, to + segment);
        break;
      default: {  // POSITIVE, POSITIVE_PAIR
        const float* raw = x + t * x_row;
        const float half = 0.5f * map.in_scale * map.in_scale * dot(raw, raw, x_row);
        range_of(from, width, low, high);
        const bool pair = map.activation == POSITIVE_PAIR;
        const float top = pair && -low > high ? -low : high;
        scale[t] = top - half;
        exp_row(from, 1.0f, width, -top, map.factor, to);
        if (pair) exp_row(from, -1.0f, width, -top, map.factor, to + segment);
      }
    }
  }
}

// Gradients of one block: features and their gradient -> gradient of x [count, x_row]; those of W and b are added up.
// Features may be relative to anything that is constant along a row. y: the block's products as apply_map left them; slope:
// buffer for a block.
static void apply_map_backward(const Map& map, int head, const float* angles_cos, const float* angles_sin, const float* x,
                               int x_row, int count, const float* y, const float* features, const float* gradient,
                               float* slope, float* x_gradient, float* weight_gradient, float* bias_gradient) {
  const int segment = map.segment(), row = map.features();
  const float* in = map.projected ? y : x;
  const int in_row = map.projected ? segment : x_row;
  float* to_rows = map.projected ? slope : x_gradient;
  const int to_row = map.projected ? segment : x_row;
  const float input_scale = map.projected ? 1.0f : map.in_scale;
  for (int t = 0; t < count; ++t) {
    const float *from = in + t * in_row, *value = features + t * row, *up = gradient + t * row;
    float* to = to_rows + t * to_row;
    switch (map.activation) {
      case ELU:
        for (int j = 0; j < segment; j += LANES) {
          const Vec derivative =
              select(load(from + j) * input_scale > 0.0f, splat(1.0f), load(value + j) + (map.alpha - 1.0f));
          store(to + j, load(up + j) * derivative * input_scale);
        }
        break;
      case RELU:
      case ROTATED_RELU:
        for (int j = 0; j < segment; j += LANES) {
          Vec incoming = load(up + j);
          if (map.activation == ROTATED_RELU) incoming = incoming * angles_cos[t] + load(up + segment + j) * angles_sin[t];
          store(to + j, select(load(from + j) * input_scale > 0.0f, incoming * input_scale, Vec{}));
        }
        break;
      case SOFTMAX_PAIR: {
        const float first = dot(value, up, segment), second = dot(value + segment, up + segment, segment);
        for (int j = 0; j < segment; j += LANES)
          store(to + j,
                load(value + j) * (load(up + j) - first) - load(value + segment + j) * (load(up + segment + j) - second));
        break;
      }
      case SOFTMAX_JOINT: {
        const float mean = dot(value, up, row);
        for (int j = 0; j < segment; j += LANES)
          store(to + j,
                (load(value + j) * (load(up + j) - mean) - load(value + segment + j) * (load(up + segment + j) - mean)) *
                    2.0f);
        break;
      }
      default:  // exponentials, whatever they are relative to: the gradient of an exponent is feature times gradient
        for (int j = 0; j < segment; j += LANES) {
          Vec product = load(value + j) * load(up + j);
          if (map.parts == 2) product -= load(value + segment + j) * load(up + segment + j);
          store(to + j, product);
        }
    }
  }
  if (!map.projected) return;
  if (bias_gradient)
    for (int t = 0; t < count; ++t)
      for (int j = 0; j < segment; j += LANES)
        store(bias_gradient + j, load(bias_gradient + j) + load(slope + t * segment + j) * map.bias_scale);
  if (map.in_scale != 1.0f)
    for (int i = 0; i < count * segment; i += LANES) store(slope + i, load(slope + i) * map.in_scale);
  multiply(count, x_row, segment, slope, segment, 1, map.weight_t + head * map.weight_t_head, x_row, x_gradient, x_row,
           false);
  if (map.activation == POSITIVE || map.activation == POSITIVE_PAIR)  // through |x'|^2 / 2
    for (int t = 0; t < count; ++t) {
      const Vec all = splat(dot(features + (size_t)t * row, gradient + (size_t)t * row, row) * map.in_scale * map.in_scale);
      for (int j = 0; j < x_row; j += LANES)
        store(x_gradient + t * x_row + j, load(x_gradient + t * x_row + j) - load(x + t * x_row + j) * all);
    }
  if (weight_gradient) multiply(map.input, segment, count, x, 1, x_row, slope, segment, weight_gradient, segment, true);
}

}  // namespace hla
