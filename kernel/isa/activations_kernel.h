// The activations of activations.inc, and the sum and product that may follow one, in place on
// rows of y. Included like csr_kernel.h, after a vector wrapper.
//
// 16-bit values are computed in 32 bits and rounded once, as torch does. What torch's own sequence
// of operators rounds in between is rounded here, too (quick_gelu). In 64 bits the C library's
// functions are called, value by value.

#include "isa/panel_kernel.h"

namespace fxsparse {
namespace FXSPARSE_ISA_NAMESPACE {
namespace activations {

inline F32 constant(float x) { return F32::broadcast(x); }

// Polynomial with coefficients from the highest power to the lowest.
template <int N>
inline F32 polynomial(F32 x, const float (&coefficients)[N]) {
  F32 sum = constant(coefficients[0]);
#pragma GCC unroll 16
  for (int i = 1; i < N; ++i) sum = F32::fma(sum, x, constant(coefficients[i]));
  return sum;
}

// e^x within 1 ulp for -87.6 < x < 88.3; 0 below and infinity above. The nearest integer n to
// x log2(e) is in the low bits of a sum with 1.5 x 2^23; the rest is Cephes' expf.
inline F32 exp(F32 x) {
  constexpr float kMagic = 12582912;
  // A bound that comes first: NaN stays.
  x = F32::max(constant(-88), F32::min(constant(89), x));
  const F32 shifted = F32::fma(x, constant(1.44269504f), constant(kMagic));
  const F32 n = F32::add(shifted, constant(-kMagic));
  F32 r = F32::fma(n, constant(-0.693359375f), x);
  r = F32::fma(n, constant(2.12194440e-4f), r);
  const F32 q = polynomial(r, {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                               4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f});
  const F32 p = F32::add(F32::fma(q, F32::mul(r, r), r), constant(1));
  return F32::mul(p, F32::power_of_two(shifted));
}

inline F32 sigmoid_of(F32 x) {
  return F32::div(constant(1), F32::add(constant(1), exp(F32::mul(x, constant(-1)))));
}

// x as the type S holds it.
template <class S>
inline F32 rounded(F32 x) {
  S stored[F32::kLanes];
  x.store(stored);
  return F32::load(stored);
}
template <>
inline F32 rounded<float>(F32 x) {
  return x;
}

// A bound that comes first: NaN and -0.0 stay, as in torch.
template <class S>
struct relu {
  static F32 of(F32 x) { return F32::max(constant(0), x); }
  static double of(double x) { return x < 0 ? 0 : x; }
};

template <class S>
struct relu6 {
  static F32 of(F32 x) { return F32::min(constant(6), F32::max(constant(0), x)); }
  static double of(double x) { return x > 6 ? 6 : x < 0 ? 0 : x; }
};

template <class S>
struct relu_squared {
  static F32 of(F32 x) {
    const F32 r = relu<S>::of(x);
    return F32::mul(r, r);
  }
  static double of(double x) { return relu<S>::of(x) * relu<S>::of(x); }
};

template <class S>
struct hardswish {
  static F32 of(F32 x) {
    const F32 bounded = F32::min(constant(6), F32::max(constant(0), F32::add(x, constant(3))));
    return F32::div(F32::mul(x, bounded), constant(6));
  }
  static double of(double x) { return x * relu6<S>::of(x + 3) / 6; }
};

// x times the normal distribution's Phi(x). For t = |x|, log(Phi(-t)) is a polynomial within
// 2e-7 for t < 2 and 3e-6 up to 6, where Phi is 1e-9; the fit's weight follows torch's own error.
// Beyond 14 Phi(-t) is 0, as exp makes it.
template <class S>
struct gelu {
  static F32 of(F32 x) {
    const F32 t = F32::min(constant(14), F32::abs(x));
    const F32 log_phi = polynomial(
        t, {-2.89093709e-11f, 1.89762421e-9f, -5.35108539e-8f, 8.51766507e-7f, -8.42055635e-6f,
            5.25359861e-5f, -1.82115488e-4f, -3.73174141e-5f, 4.87073245e-3f, -3.63907564e-2f,
            -3.18293798e-1f, -7.97886136e-1f, -6.93147181e-1f});
    const F32 phi = exp(log_phi);
    const F32 rest = F32::fma(phi, constant(-1), constant(1));
    return F32::mul(x, F32::where_negative(x, phi, rest));
  }
  static double of(double x) { return x * 0.5 * (1 + __builtin_erf(x * 0.70710678118654752440)); }
};

// x/2 (1 + tanh(u)) = x / (1 + exp(-2u)), which is the more exact for negative x.
template <class S>
struct gelu_tanh {
  static F32 of(F32 x) {
    // -2 sqrt(2 / pi) (x + 0.044715 x^3)
    const F32 inner = F32::fma(F32::mul(x, x), constant(-0.07135481283f), constant(-1.5957691216f));
    return F32::div(x, F32::add(constant(1), exp(F32::mul(x, inner))));
  }
  static double of(double x) {
    return 0.5 * x * (1 + __builtin_tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x)));
  }
};

template <class S>
struct quick_gelu {
  static F32 of(F32 x) {
    const F32 scaled = rounded<S>(F32::mul(x, constant(1.702f)));
    return F32::mul(x, rounded<S>(sigmoid_of(scaled)));
  }
  static double of(double x) { return x * (1 / (1 + __builtin_exp(-1.702 * x))); }
};

template <class S>
struct silu {
  static F32 of(F32 x) {
    return F32::div(x, F32::add(constant(1), exp(F32::mul(x, constant(-1)))));
  }
  static double of(double x) { return x / (1 + __builtin_exp(-x)); }
};

template <class S>
struct sigmoid {
  static F32 of(F32 x) { return sigmoid_of(x); }
  static double of(double x) { return 1 / (1 + __builtin_exp(-x)); }
};

// Cephes' tanhf: a polynomial near zero, where 1 - 2 / (exp(2x) + 1) would cancel.
template <class S>
struct tanh {
  static F32 of(F32 x) {
    const F32 t = F32::abs(x);
    const F32 s = F32::mul(x, x);
    const F32 p = polynomial(s, {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f,
                                 1.33314422036e-1f, -3.33332819422e-1f});
    const F32 near = F32::fma(F32::mul(p, s), x, x);
    const F32 e = F32::add(exp(F32::add(t, t)), constant(1));
    const F32 far = F32::add(constant(1), F32::div(constant(-2), e));
    const F32 signed_far = F32::where_negative(x, F32::mul(far, constant(-1)), far);
    return F32::where_negative(F32::add(t, constant(-0.625f)), near, signed_far);
  }
  static double of(double x) { return __builtin_tanh(x); }
};

// ---- rows of y ----------------------------------------------------------------------------------

// Calls f(y, a vector or what is left of one) so that every value goes through the same code.
template <class S, class F>
inline void for_vectors(S* y, int64_t n, F&& f) {
  constexpr int L = ComputeOf<S>::Vector::kLanes;
  int64_t i = 0;
  for (; i + L <= n; i += L) f(y + i, i, L);
  if (i == n) return;
  S rest[L] = {};
  __builtin_memcpy(rest, y + i, (n - i) * sizeof(S));
  f(rest, i, static_cast<int>(n - i));
  __builtin_memcpy(y + i, rest, (n - i) * sizeof(S));
}

template <class S, template <class> class F>
void activate(void* y, int64_t n) {
  if constexpr (sizeof(S) == sizeof(double)) {
    auto* values = static_cast<double*>(y);
    for (int64_t i = 0; i < n; ++i) values[i] = F<S>::of(values[i]);
  } else {
    for_vectors(static_cast<S*>(y), n,
                [](S* at, int64_t, int) { F<S>::of(F32::load(at)).store(at); });
  }
}

template <class S, class F>
inline void combine(void* y, const void* other, int64_t n, F&& f) {
  using V = typename ComputeOf<S>::Vector;
  const S* from = static_cast<const S*>(other);
  for_vectors(static_cast<S*>(y), n, [&](S* at, int64_t i, int left) {
    if (left == V::kLanes) return f(V::load(at), V::load(from + i)).store(at);
    S rest[V::kLanes] = {};
    __builtin_memcpy(rest, from + i, left * sizeof(S));
    f(V::load(at), V::load(rest)).store(at);
  });
}

template <class S>
void add(void* y, const void* other, int64_t n) {
  using V = typename ComputeOf<S>::Vector;
  combine<S>(y, other, n, [](V a, V b) { return V::add(a, b); });
}

template <class S>
void multiply(void* y, const void* other, int64_t n) {
  using V = typename ComputeOf<S>::Vector;
  combine<S>(y, other, n, [](V a, V b) { return V::mul(a, b); });
}

}  // namespace activations
}  // namespace FXSPARSE_ISA_NAMESPACE
}  // namespace fxsparse
