// Adam and AdamW on one chunk, in one pass over memory. The same steps as adam_formulas.py, in the same order and with
// the same rounding: that file says what each of them is, and the tests compare the two bit for bit.
//
// GRAD and PARAM are the types of gradients and params: bf16, fp16, fp32; PARAM is `none` if the master is the param.
// STATES is fp32_states, split_states or bf16_states. DECOUPLED is 1 for AdamW. All four are set on the command line,
// which also forbids fused multiply-adds and reordered sums.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

enum Scalar {  // adam_formulas.Scalar
  GRAD_SCALE,
  DECAY,
  ODD_DECAY,
  ONE_MINUS_BETA1,
  BETA2,
  ONE_MINUS_BETA2,
  ROOT_OF_CORRECTION2,
  EPSILON,
  STEP_SIZE,
};
struct Scalars {  // a copy of one's own, so that no store to a state can change it
  float at[STEP_SIZE + 1];
};
constexpr int NUM_KEYS = 4;             // stochastic_rounding.NUM_KEYS
constexpr int64_t LEAST_NUMEL = 32768;  // fewer elements take less time than it takes to wake threads

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

constexpr uint32_t QUIET_NAN = 0x7FC00000;

// Rounds to nearest even, as bf16 in the high half; the low half is meaningless.
inline uint32_t rounded_bits(float value) {
  const uint32_t bits = bits_of(value);
  return value == value ? bits + (0x7FFF + ((bits >> 16) & 1)) : QUIET_NAN;
}

struct fp32 {
  using type = float;
  static float load(float value) { return value; }
};

struct bf16 {
  using type = uint16_t;
  static float load(uint16_t bits) { return float_of(uint32_t{bits} << 16); }
  static uint16_t store(float value) { return uint16_t(rounded_bits(value) >> 16); }
};

// Integer arithmetic, because compilers have no vector code for fp16 on all processors. Its exponent bias is 112 less than
// that of fp32. Source of the rounding, which lets an addition align denormal numbers: Giesen, Float->half conversions.
struct fp16 {
  using type = uint16_t;
  static float load(uint16_t half) {
    const float magnitude = float_of(uint32_t{half} << 13 & 0x0FFFE000) * 0x1p112f;
    const uint32_t special = magnitude >= 65536.0f ? 0x7F800000 : 0;  // fp16 cannot hold it: an infinity or NaN
    return float_of(bits_of(magnitude) | special | (uint32_t{half} << 16 & 0x80000000));
  }
  static uint16_t store(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7FFFFFFF;
    const uint32_t normal = (magnitude - (112u << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
    const uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    const uint32_t special = magnitude > 0x7F800000 ? 0x7E00 : 0x7C00;
    const uint32_t half = magnitude >= 0x47800000 ? special : magnitude < 0x38800000 ? denormal : normal;
    return uint16_t(half | (bits >> 16 & 0x8000));
  }
};

struct none {
  using type = char;
};

struct State {
  float master, exp_avg, exp_avg_sq;
};

inline State stepped(const Scalars& own, float decay, float grad, State old) {
  grad = grad * own.at[GRAD_SCALE];
  float master = old.master;
  if (DECOUPLED)
    master = master * decay;
  else
    grad = grad + master * decay;
  const float exp_avg = old.exp_avg + (grad - old.exp_avg) * own.at[ONE_MINUS_BETA1];
  const float exp_avg_sq = old.exp_avg_sq * own.at[BETA2] + grad * grad * own.at[ONE_MINUS_BETA2];
  const float denominator = std::sqrt(exp_avg_sq) / own.at[ROOT_OF_CORRECTION2] + own.at[EPSILON];
  return {master - exp_avg * own.at[STEP_SIZE] / denominator, exp_avg, exp_avg_sq};
}

template <class Grad, class Param>
void fp32_states(void* const* tensors, int64_t numel, const Scalars own, const int32_t*, int num_threads) {
  constexpr bool HAS_PARAM = !std::is_same_v<Param, none>;
  auto* __restrict grad = static_cast<const typename Grad::type*>(tensors[0]);
  auto* __restrict master = static_cast<float*>(tensors[1]);
  auto* __restrict exp_avg = static_cast<float*>(tensors[2]);
  auto* __restrict exp_avg_sq = static_cast<float*>(tensors[3]);
  auto* __restrict param = HAS_PARAM ? static_cast<typename Param::type*>(tensors[4]) : nullptr;
#pragma omp parallel for simd num_threads(num_threads) schedule(static) if (parallel : numel >= LEAST_NUMEL)
  for (int64_t i = 0; i < numel; ++i) {
    const State state = stepped(own, own.at[DECAY], Grad::load(grad[i]), {master[i], exp_avg[i], exp_avg_sq[i]});
    master[i] = state.master;
    exp_avg[i] = state.exp_avg;
    exp_avg_sq[i] = state.exp_avg_sq;
    if constexpr (HAS_PARAM) param[i] = Param::store(state.master);
  }
}

// The master is the param in the high half plus the residual; the sign of exp_avg_sq marks ties: split_states.py.
template <class Grad, class Param>
void split_states(void* const* tensors, int64_t num_words, const Scalars own, const int32_t*, int num_threads) {
  auto* __restrict grad = static_cast<const typename Grad::type*>(tensors[0]);
  auto* __restrict param = static_cast<uint16_t*>(tensors[1]);
  auto* __restrict residual = static_cast<int16_t*>(tensors[2]);
  auto* __restrict exp_avg = static_cast<float*>(tensors[3]);
  auto* __restrict exp_avg_sq = static_cast<float*>(tensors[4]);
  const int64_t numel = 2 * num_words;
#pragma omp parallel for simd num_threads(num_threads) schedule(static) if (parallel : numel >= LEAST_NUMEL)
  for (int64_t i = 0; i < numel; ++i) {
    const uint32_t marked = bits_of(exp_avg_sq[i]);
    const uint32_t rounded_down = (marked >> 31) << 16;
    const float master = float_of((uint32_t{param[i]} << 16) + uint32_t(int32_t{residual[i]}) + rounded_down);
    const float decay = i % 2 ? own.at[ODD_DECAY] : own.at[DECAY];
    const State state =
        stepped(own, decay, Grad::load(grad[i]), {master, exp_avg[i], float_of(marked & 0x7FFFFFFF)});
    const uint32_t bits = bits_of(state.master);
    const uint32_t mark = (bits & 0x1FFFF) == 0x8000 ? 0x80000000 : 0;
    param[i] = uint16_t(rounded_bits(state.master) >> 16);
    residual[i] = int16_t(bits);
    exp_avg[i] = state.exp_avg;
    exp_avg_sq[i] = float_of((bits_of(state.exp_avg_sq) & 0x7FFFFFFF) | mark);
  }
}

// All states are rounded at random, with the bits of a hash for each pair of elements: stochastic_rounding.py.
inline uint32_t rounded_pair(float even, float odd, uint32_t random) {
  const uint32_t low = bits_of(even) + (random & 0xFFFF);
  const uint32_t high = bits_of(odd) + (random >> 16);
  return (low >> 16) | (high & 0xFFFF0000);
}

template <class Grad>
float grad_of(typename Grad::type stored) {
  const float value = Grad::load(stored);
  if constexpr (std::is_same_v<Grad, bf16>) return value;  // a bf16 NaN already has an empty low half
  return value == value ? value : float_of(QUIET_NAN);
}

template <class Grad, class Param>
void bf16_states(void* const* tensors, int64_t num_words, const Scalars own, const int32_t* integers,
                 int num_threads) {
  auto* __restrict grad = static_cast<const typename Grad::type*>(tensors[0]);
  auto* __restrict param = static_cast<uint32_t*>(tensors[1]);
  auto* __restrict exp_avg = static_cast<uint32_t*>(tensors[2]);
  auto* __restrict exp_avg_sq = static_cast<uint32_t*>(tensors[3]);
  uint32_t keys[NUM_KEYS];
  std::memcpy(keys, integers, sizeof keys);
  const uint32_t first = uint32_t(integers[NUM_KEYS]);
#pragma omp parallel for simd num_threads(num_threads) schedule(static) if (parallel : 2 * num_words >= LEAST_NUMEL)
  for (int64_t i = 0; i < num_words; ++i) {
    uint32_t mixed = (uint32_t(i) + first) ^ keys[0];
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D;
    mixed = mixed ^ (mixed >> 15);
    const uint32_t products[3] = {
        (mixed ^ keys[1]) * 0x846CA68B, (mixed ^ keys[2]) * 0x9E3779B1, (mixed ^ keys[3]) * 0x85EBCA6B};
    const uint32_t words[3] = {param[i], exp_avg[i], exp_avg_sq[i]};
    const State even = stepped(own, own.at[DECAY], grad_of<Grad>(grad[2 * i]),
                               {float_of(words[0] << 16), float_of(words[1] << 16), float_of(words[2] << 16)});
    const State odd = stepped(own, own.at[ODD_DECAY], grad_of<Grad>(grad[2 * i + 1]),
                              {float_of(words[0] & 0xFFFF0000), float_of(words[1] & 0xFFFF0000),
                               float_of(words[2] & 0xFFFF0000)});
    param[i] = rounded_pair(even.master, odd.master, products[0] ^ (products[0] >> 16));
    exp_avg[i] = rounded_pair(even.exp_avg, odd.exp_avg, products[1] ^ (products[1] >> 16));
    exp_avg_sq[i] = rounded_pair(even.exp_avg_sq, odd.exp_avg_sq, products[2] ^ (products[2] >> 16));
  }
}

}  // namespace

// `numel`: of words of two elements if elements form pairs.
extern "C" void windlass_update(void* const* tensors, int64_t numel, const float* scalars, const int32_t* integers,
                                int num_threads) {
  Scalars own;
  std::memcpy(own.at, scalars, sizeof own.at);
  STATES<GRAD, PARAM>(tensors, numel, own, integers, num_threads);
}
