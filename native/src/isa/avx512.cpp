// The kernels for AVX-512 F, BW, DQ, VL and VNNI.
#include <immintrin.h>

#include <type_traits>

#include "../jobs.h"

namespace paceline {
namespace {
#include "vec.h"
// Each needs those before it.
#include "prepare.h"
//
#include "tiles.h"
//
#include "linear.h"
//
#include "cache.h"
//
#include "attention.h"
//
#include "decode.h"
//
#include "rows.h"
//
#include "sample.h"
}  // namespace

const Kernels& kernels_avx512() {
  static const Kernels kernels = {
      "avx512",     kPanel,        kInt8Offset,  kQueryPanel, block_rows, prepare, multiply, write_kv, attention_scratch,
      attend_chunk, attend_decode, merge_decode, rms_norm,    gate,       rope,    argmax,
      row_maxima,   weigh,         weigh_spans,  pick};
  return kernels;
}

}  // namespace paceline
