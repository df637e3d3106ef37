// The update rules, once for every processor: V is a vector of floats with the operators + - * /, fma, sqrt and sign_of.
//
// All operations round correctly, so the results are the same for every vector width and at every place in an array.
//
// SGD and Adagrad execute the operations of torch.optim's foreach implementations on processors with FMA. (torch's square
// root is that of its vector library, which may round differently.) In the other rules no constant near one multiplies a
// value. In fp32 1 - lr x decay has an error of 3e-8, which would act in every step and add up to 3e-5 in a thousand.
// Written as p - (lr x decay) p, the error is relative to the small number, and a thousand steps stay within 1e-6 of
// float64.
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

// a + weight (b - a), computed from the nearer end, as torch.lerp does it.
struct Lerp {
  float weight;
  bool far;

  ZL_MEMBER explicit Lerp(float w) {
    far = !(w < 0.5f);
    weight = far ? w - 1.0f : w;
  }

  template <class V>
  ZL_MEMBER V operator()(V a, V b) const {
    return fma(V(weight), b - a, far ? b : a);
  }
};

// Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019).
// scale, -lr x decay (decoupled) or 0, l2 = decay (added to the gradient) or 0, 1 - beta1, 1 - beta2,
// sqrt(1 - beta2^t) or 1, eps, -lr / (1 - beta1^t) or -lr
struct Adam {
  static constexpr int states = 2;
  Lerp mean, square;
  float scale, decay, l2, correction2, eps, step;

  ZL_MEMBER Adam(const float* row, float factor) : mean(row[3]), square(row[4]) {
    scale = row[0] * factor;
    decay = row[1];
    l2 = row[2];
    correction2 = row[5];
    eps = row[6];
    step = row[7];
  }

  template <class V>
  ZL_MEMBER void operator()(V& p, V g, V& m, V& v) const {
    g = g * V(scale);
    if (l2 != 0.0f) g = fma(p, V(l2), g);
    m = mean(m, g);
    v = fma(V(square.weight), fma(g, g, V(0.0f) - v), square.far ? g * g : v);
    V change = (V(step) * m) / (sqrt(v) / V(correction2) + V(eps));
    if (decay != 0.0f) change = fma(p, V(decay), change);
    p = p + change;
  }
};

// Lion (Chen et al., 2023, Algorithm 2).
// scale, -lr x decay, 1 - beta1, 1 - beta2, -lr
struct Lion {
  static constexpr int states = 1;
  Lerp look, mean;
  float scale, decay, step;

  ZL_MEMBER Lion(const float* row, float factor) : look(row[2]), mean(row[3]) {
    scale = row[0] * factor;
    decay = row[1];
    step = row[4];
  }

  template <class V>
  ZL_MEMBER void operator()(V& p, V g, V& m, V&) const {
    g = g * V(scale);
    V change = V(step) * sign_of(look(m, g));
    if (decay != 0.0f) change = fma(p, V(decay), change);
    p = p + change;
    m = mean(m, g);
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

// SGD with momentum, as torch.optim.SGD documents it.
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
