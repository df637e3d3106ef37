// The update rules, once for every processor: V is a vector of floats with the operators + - * /, fma, sqrt and sign_of.
//
// The operations and their order, fused multiply-adds included, are those that torch.optim's foreach implementations
// execute on processors with FMA; only the square root is always the correctly rounded one, which torch's vector library
// does not promise. So Lion and SGD give torch's bits, Adam and Adagrad differ in the last place of a few elements. All
// operations round correctly, so the results are the same for every vector width, and wherever an element lies.
#pragma once

#include "kernels.h"

#ifdef __CUDACC__
#define ZL_INLINE static __host__ __device__ __forceinline__
#define ZL_MEMBER __host__ __device__ __forceinline__
#else
#define ZL_INLINE static inline __attribute__((always_inline))
#define ZL_MEMBER inline __attribute__((always_inline))
#endif

namespace zl {

// Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019).
// scale, keep = 1 - lr x decay (decoupled) or 1, l2 = decay (added to the gradient) or 0, 1 - beta1, beta2, 1 - beta2,
// sqrt(1 - beta2^t) or 1, eps, -lr / (1 - beta1^t) or -lr
struct Adam {
  static constexpr int states = 2;
  float scale, keep, l2, toward, beta2, weight2, correction2, eps, step;
  bool far;

  ZL_MEMBER Adam(const float* row, float factor) {
    scale = row[0] * factor;
    keep = row[1];
    l2 = row[2];
    far = !(row[3] < 0.5f);  // torch.lerp starts from the nearer end
    toward = far ? row[3] - 1.0f : row[3];
    beta2 = row[4];
    weight2 = row[5];
    correction2 = row[6];
    eps = row[7];
    step = row[8];
  }

  template <class V>
  ZL_MEMBER void operator()(V& p, V g, V& m, V& v) const {
    g = g * V(scale);
    if (l2 != 0.0f) g = fma(p, V(l2), g);
    p = p * V(keep);
    m = fma(V(toward), g - m, far ? g : m);
    v = fma(V(weight2) * g, g, v * V(beta2));
    V root = sqrt(v) / V(correction2) + V(eps);
    p = p + (V(step) * m) / root;
  }
};

// Lion (Chen et al., 2023, Algorithm 2).
// scale, keep = 1 - lr x decay, beta1, 1 - beta1, beta2, 1 - beta2, -lr
struct Lion {
  static constexpr int states = 1;
  float scale, keep, beta1, weight1, beta2, weight2, step;

  ZL_MEMBER Lion(const float* row, float factor) {
    scale = row[0] * factor;
    keep = row[1];
    beta1 = row[2];
    weight1 = row[3];
    beta2 = row[4];
    weight2 = row[5];
    step = row[6];
  }

  template <class V>
  ZL_MEMBER void operator()(V& p, V g, V& m, V&) const {
    g = g * V(scale);
    V direction = sign_of(fma(g, V(weight1), m * V(beta1)));
    p = fma(direction, V(step), p * V(keep));
    m = fma(g, V(weight2), m * V(beta2));
  }
};

// Adagrad (Duchi et al., 2011).
// scale, l2 = decay or 0, eps, -lr / (1 + (t - 1) x lr_decay)
struct Adagrad {
  static constexpr int states = 1;
  float scale, l2, eps, step;

  ZL_MEMBER Adagrad(const float* row, float factor) {
    scale = row[0] * factor;
    l2 = row[1];
    eps = row[2];
    step = row[3];
  }

  template <class V>
  ZL_MEMBER void operator()(V& p, V g, V& sum, V&) const {
    g = g * V(scale);
    if (l2 != 0.0f) g = fma(p, V(l2), g);
    sum = fma(g, g, sum);
    p = p + (V(step) * g) / (sqrt(sum) + V(eps));
  }
};

// SGD with momentum, as torch.optim.SGD says it.
// scale, l2 = decay or 0, momentum, 1 - dampening, 1 for the first step (the buffer starts as the gradient), 1 for
// Nesterov, -lr
struct Sgd {
  static constexpr int states = 1;
  float scale, l2, momentum, weight, first, nesterov, step;

  ZL_MEMBER Sgd(const float* row, float factor) {
    scale = row[0] * factor;
    l2 = row[1];
    momentum = row[2];
    weight = row[3];
    first = row[4];
    nesterov = row[5];
    step = row[6];
  }

  template <class V>
  ZL_MEMBER void operator()(V& p, V g, V& buffer, V&) const {
    g = g * V(scale);
    if (l2 != 0.0f) g = fma(p, V(l2), g);
    if (momentum != 0.0f) {
      buffer = first != 0.0f ? g : fma(g, V(weight), buffer * V(momentum));
      g = nesterov != 0.0f ? fma(buffer, V(momentum), g) : buffer;
    }
    p = fma(g, V(step), p);
  }
};

}  // namespace zl
