// Entry points of the native CPU backend. They return 0, or 1 if memory ran out, or 2 for an unknown dtype.

#include "steps.h"
#include "windowed_backward.h"

enum DType : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

#define DISPATCH(function, call)                                                           \
  switch ((call)->dtype) {                                                                 \
    case FLOAT32: return hla::function<float>(*(call));                                    \
    case BFLOAT16: return hla::function<hla::BFloat16>(*(call)); HALF_CASE(function, call) \
    default: return 2;                                                                     \
  }
#if defined(HLA_FLOAT16)
#define HAS_FLOAT16 1
#define HALF_CASE(function, call) \
  case FLOAT16: return hla::function<hla::Float16>(*(call));
#else
#define HAS_FLOAT16 0
#define HALF_CASE(function, call)
#endif

extern "C" {

int hla_lanes() { return hla::LANES; }
int64_t hla_call_bytes() { return sizeof(hla::Call); }
int hla_has_float16() { return HAS_FLOAT16; }
int hla_bidirectional(const hla::Call* call) { DISPATCH(bidirectional, call) }
int hla_causal(const hla::Call* call) { DISPATCH(dispatch_causal, call) }
int hla_bidirectional_backward(const hla::Call* call) { DISPATCH(bidirectional_backward, call) }
int hla_causal_step(const hla::Call* call) { DISPATCH(causal_step, call) }
int hla_exact_step(const hla::Call* call) { DISPATCH(dispatch_exact_step, call) }
int hla_windowed(const hla::Call* call) { DISPATCH(windowed, call) }
int hla_windowed_step(const hla::Call* call) { DISPATCH(dispatch_windowed_step, call) }
int hla_windowed_backward(const hla::Call* call) { DISPATCH(windowed_backward, call) }
int hla_causal_backward(const hla::Call* call) { DISPATCH(causal_backward, call) }
}
