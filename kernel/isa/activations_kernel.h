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

// Vectors that are computed side by side: each step depends on the one before, and would wait for
// it. Four at a time take 0.6 of the time of one (gelu, AVX-512).
constexpr int kSideBySide = F32::kLanes == 16 ? 4 : F32::kLanes == 8 ? 2 : 1;

template <int N>
struct Several {
  static constexpr int kLanes = N * F32::kLanes;
  F32 v[N];

  template <class F>
  static Several each(F&& f) {
    Several r;
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) r.v[i] = f(i);
    return r;
  }
  static Several zero() { return broadcast(0); }
  static Several broadcast(float x) {
    return each([&](int) { return F32::broadcast(x); });
  }
  template <class S>
  static Several load(const S* p) {
    return each([&](int i) { return F32::load(p + i * F32::kLanes); });
  }
  template <class S>
  void store(S* p) const {
    for (int i = 0; i < N; ++i) v[i].store(p + i * F32::kLanes);
  }
#define FXSPARSE_EACH(name)                                        \
  static Several name(const Several& a, const Several& b) {        \
    return each([&](int i) { return F32::name(a.v[i], b.v[i]); }); \
  }
  FXSPARSE_EACH(add)
  FXSPARSE_EACH(sub)
  FXSPARSE_EACH(mul)
  FXSPARSE_EACH(div)
  FXSPARSE_EACH(min)
  FXSPARSE_EACH(max)
#undef FXSPARSE_EACH
  static Several abs(const Several& a) {
    return each([&](int i) { return F32::abs(a.v[i]); });
  }
  static Several fma(const Several& a, const Several& b, const Several& c) {
    return each([&](int i) { return F32::fma(a.v[i], b.v[i], c.v[i]); });
  }
  static Several where_negative(const Several& x, const Several& a, const Several& b) {
    return each([&](int i) { return F32::where_negative(x.v[i], a.v[i], b.v[i]); });
  }
  static Several power_of_two(const Several& x) {
    return each([&](int i) { return F32::power_of_two(x.v[i]); });
  }
};

// Polynomial with coefficients from the highest power to the lowest.
template <class V, int N>
inline V polynomial(V x, const float (&coefficients)[N]) {
  V sum = V::broadcast(coefficients[0]);
#pragma GCC unroll 16
  for (int i = 1; i < N; ++i) sum = V::fma(sum, x, V::broadcast(coefficients[i]));
  return sum;
}

// 2^(x + rest) for -127 <= x <= 128 and a small rest, within 1 ulp; 0 at the lower end and infinity
// at the upper. The nearest integer n is in the low bits of a sum with 1.5 x 2^23. The polynomial
// is the best of its degree for 2^r from -1/2 to 1/2, to 2e-9.
template <class V>
inline V exp2(V x, V rest = V::zero()) {
  constexpr float kMagic = 12582912;
  const V shifted = V::add(x, V::broadcast(kMagic));
  const V n = V::add(shifted, V::broadcast(-kMagic));
  const V r = V::add(V::sub(x, n), rest);
  const V p = polynomial(r, {1.53533626e-4f, 1.33988746e-3f, 9.61843736e-3f, 5.55033247e-2f,
                             2.40226479e-1f, 6.93147203e-1f, 1});
  return V::mul(p, V::power_of_two(shifted));
}

// A bound that comes first: NaN stays.
template <class V>
inline V bounded(V x, float least, float most) {
  return V::max(V::broadcast(least), V::min(V::broadcast(most), x));
}

// e^-x; 0 from x = 87.7 on, and infinity below -88.4.
template <class V>
inline V exp_negative(V x) {
  constexpr float kFactor = -1.44269504f;  // of which -1.925963e-8 x is left
  const V in_range = bounded(x, -88.7f, 88);
  const V y = V::mul(in_range, V::broadcast(kFactor));
  const V lost = V::fma(in_range, V::broadcast(kFactor), V::mul(y, V::broadcast(-1)));
  return exp2(y, lost);
}

template <class V>
inline V sigmoid_of(V x) {
  return V::div(V::broadcast(1), V::add(V::broadcast(1), exp_negative(x)));
}

// x as the type S holds it.
template <class S, class V>
inline V rounded(V x) {
  if constexpr (sizeof(S) == sizeof(float)) return x;
  S stored[V::kLanes];
  x.store(stored);
  return V::load(stored);
}

// A bound that comes first: NaN and -0.0 stay, as in torch.
template <class S>
struct relu {
  template <class V>
  static V of(V x) {
    return V::max(V::broadcast(0), x);
  }
  static double of(double x) { return x < 0 ? 0 : x; }
};

template <class S>
struct relu6 {
  template <class V>
  static V of(V x) {
    return V::min(V::broadcast(6), V::max(V::broadcast(0), x));
  }
  static double of(double x) { return x > 6 ? 6 : x < 0 ? 0 : x; }
};

template <class S>
struct relu_squared {
  template <class V>
  static V of(V x) {
    const V r = relu<S>::of(x);
    return V::mul(r, r);
  }
  static double of(double x) { return relu<S>::of(x) * relu<S>::of(x); }
};

template <class S>
struct hardswish {
  template <class V>
  static V of(V x) {
    const V bounded = V::min(V::broadcast(6), V::max(V::broadcast(0), V::add(x, V::broadcast(3))));
    return V::div(V::mul(x, bounded), V::broadcast(6));
  }
  static double of(double x) { return x * relu6<S>::of(x + 3) / 6; }
};

// x times the normal distribution's Phi(x). For t = |x|, log2(Phi(-t)) is a polynomial within
// 2e-7 for t < 2 and 4e-6 up to 5. From 6 on, where Phi(-t) is 1e-9 and torch's result is 0, it
// only has to fall.
template <class S>
struct gelu {
  template <class V>
  static V of(V x) {
    const V log_phi =
        polynomial(V::abs(x), {-2.21734907e-8f, 6.89013276e-7f, -9.15712323e-6f, 6.59910911e-5f,
                               -2.44046348e-4f, -7.24611217e-5f, 7.0325844e-3f, -5.24959957e-2f,
                               -4.59204584e-1f, -1.15110576f, -1});
    const V phi = exp2(V::max(V::broadcast(-127), log_phi));
    return V::mul(x, V::where_negative(x, phi, V::sub(V::broadcast(1), phi)));
  }
  static double of(double x) { return 0.5 * x * __builtin_erfc(x * -0.70710678118654752440); }
};

// x/2 (1 + tanh(u)) = x / (1 + exp(-2u)), which is the more exact for negative x.
template <class S>
struct gelu_tanh {
  template <class V>
  static V of(V x) {
    // -2 log2(e) sqrt(2 / pi) (x + 0.044715 x^3)
    const V inner = V::fma(V::mul(x, x), V::broadcast(-0.1029432397f), V::broadcast(-2.302208198f));
    const V exponent = bounded(V::mul(x, inner), -127, 128);
    return V::div(x, V::add(V::broadcast(1), exp2(exponent)));
  }
  static double of(double x) {
    return x / (1 + __builtin_exp(-1.59576912160573071176 * (x + 0.044715 * x * x * x)));
  }
};

template <class S>
struct quick_gelu {
  template <class V>
  static V of(V x) {
    const V scaled = rounded<S>(V::mul(x, V::broadcast(1.702f)));
    return V::mul(x, rounded<S>(sigmoid_of(scaled)));
  }
  static double of(double x) { return x * (1 / (1 + __builtin_exp(-1.702 * x))); }
};

template <class S>
struct silu {
  template <class V>
  static V of(V x) {
    return V::div(x, V::add(V::broadcast(1), exp_negative(x)));
  }
  static double of(double x) { return x / (1 + __builtin_exp(-x)); }
};

template <class S>
struct sigmoid {
  template <class V>
  static V of(V x) {
    return sigmoid_of(x);
  }
  static double of(double x) { return 1 / (1 + __builtin_exp(-x)); }
};

// Cephes' tanhf: a polynomial near zero, where 1 - 2 / (exp(2x) + 1) would cancel.
template <class S>
struct tanh {
  template <class V>
  static V of(V x) {
    const V t = V::abs(x);
    const V s = V::mul(x, x);
    const V p = polynomial(s, {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f,
                               1.33314422036e-1f, -3.33332819422e-1f});
    const V near = V::fma(V::mul(p, s), x, x);
    const V e = exp_negative(V::mul(t, V::broadcast(-2)));
    const V far = V::sub(V::broadcast(1), V::div(V::broadcast(2), V::add(e, V::broadcast(1))));
    const V signed_far = V::where_negative(x, V::mul(far, V::broadcast(-1)), far);
    return V::where_negative(V::sub(t, V::broadcast(0.625f)), near, signed_far);
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
    using V = Several<kSideBySide>;
    S* values = static_cast<S*>(y);
    const int64_t whole = n / V::kLanes * V::kLanes;
    for (S* at = values; at != values + whole; at += V::kLanes) F<S>::of(V::load(at)).store(at);
    for_vectors(values + whole, n - whole,
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
