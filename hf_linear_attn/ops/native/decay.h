// A decaying state: S_t = diag(exp(decay_t)) S_(t-1) + phi(k_t) v_t, one log decay per feature and token.
//
// With G_t the decays of a block added up, a weight is sum_f q_tf k_jf exp(G_tf - G_jf). Queries are multiplied by
// exp(G_t - G_mid) and keys by exp(G_mid - G_j): a token decays by exp(-1) at most (ops/gated.py), so that no exponent
// leaves +-32 in a block of 64.

#pragma once

#include "io.h"

namespace hla {

struct Decay {
  int row;         // features of a token, padded
  float* factors;  // [BLOCK, row]: exp(G_t - G_mid)
  float* middle;   // [row]: exp(G_mid)

  Decay(int features, int tokens, Workspace& workspace)
      : row(features), factors(workspace.take((size_t)tokens * features)), middle(workspace.take(features)) {}

  // Decays of a block of one head; tokens that the mask drops do not decay.
  void read(const Strided& from, long b, long head, long start, int count, int size, const uint8_t* mask) {
    read_rows<float>(from, b, head, start, count, size, mask, factors, row);
    for (int t = 1; t < count; ++t) add_scaled(factors + (size_t)(t - 1) * row, row, 1.0f, factors + (size_t)t * row);
    memcpy(middle, factors + (size_t)(count / 2) * row, row * sizeof(float));
    for (int t = 0; t < count; ++t)
      for (int j = 0; j < row; j += LANES) {
        float* at = factors + (size_t)t * row + j;
        store(at, exp_of(load(at) - load(middle + j)));
      }
    for (int j = 0; j < row; j += LANES) store(middle + j, exp_of(load(middle + j)));
  }

  void apply_to_queries(float* features, int count) const {
    for (size_t i = 0; i < (size_t)count * row; i += LANES) store(features + i, load(features + i) * load(factors + i));
  }
  void apply_to_keys(float* features, int count) const {
    for (size_t i = 0; i < (size_t)count * row; i += LANES) store(features + i, load(features + i) / load(factors + i));
  }

  // Decays S and, behind it, z from the block's start to its middle, where queries read them, and from there to its end.
  void move_to_middle(float* kv, int columns) const { scale_state(middle, kv, columns); }
  void move_to_end(float* kv, int columns, int count) const {
    scale_state(factors + (size_t)(count - 1) * row, kv, columns);
  }

 private:
  void scale_state(const float* by, float* kv, int columns) const {
    for (int f = 0; f < row; ++f) scale_all(kv + (size_t)f * columns, columns, by[f]);
    for (int f = 0; f < row; f += LANES) store(kv + row * columns + f, load(kv + row * columns + f) * load(by + f));
  }
};

}  // namespace hla
