// A linear map whose weights were laid out once for the inner loops of one instruction set.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "jobs.h"

namespace paceline {

// What a packed map is, apart from its bytes: equal descriptions have equal layouts.
struct LinearShape {
  WeightKind kind = WeightKind::kFloat32;
  std::string isa;
  int64_t in_features = 0;
  int64_t outputs = 0;  // columns of y; a gated map has twice as many channels, those of the gate first
  bool gated = false;
  bool has_bias = false;
  int64_t group = 0;         // inputs that share a scale: int4's weights; int8's activations, 0 for all of a row
  bool has_minimum = false;  // int4 alone

  int64_t channels() const { return gated ? 2 * outputs : outputs; }
};

// Rows of activations and where results go; strides in elements.
struct LinearCall {
  const float* x;
  int64_t x_stride;
  int64_t rows;
  Activation activation;
  const float* residual;
  int64_t residual_stride;
  float* y;
  int64_t y_stride;
  const float* norm_weight = nullptr;  // [in_features]: rows are normalized first, as `Kernels::rms_norm` does
  float norm_eps = 0;
};

class PackedLinear {
 public:
  // From dense float32 weights [channels, in_features], whose rows lie `stride` apart; int8 and int4 quantize them.
  // `shape.isa` is ignored: weights are laid out for `kernels()`. Raises std::invalid_argument.
  static PackedLinear pack(LinearShape shape, const float* weight, int64_t stride, const float* bias);

  // int8 [channels, in_features] in [-127, 127] with a scale for each channel.
  static PackedLinear pack_int8(LinearShape shape, const int8_t* weight, int64_t stride, const float* scale,
                                const float* bias);

  // uint8 [channels, in_features] in [0, 15], scales and minimums [channels, groups]; no minimums: scale * (q - 8).
  static PackedLinear pack_int4(LinearShape shape, const uint8_t* weight, int64_t stride, const float* scale,
                                const float* minimum, const float* bias);

  // Over bytes that another map of this shape had in `data()`; `owner` keeps them alive.
  static PackedLinear restore(const LinearShape& shape, uint8_t* data, int64_t bytes, std::shared_ptr<void> owner);

  void apply(const LinearCall& call) const;

  // The weights as the kernels see them, float32 [channels, in_features], dense.
  void unpack(float* out) const;

  // Some of the channels, `stride` apart in `out`. Raises std::invalid_argument for a gated map and for channels that
  // it does not have.
  void rows(const int64_t* channels, int64_t count, float* out, int64_t stride) const;

  const LinearShape& shape() const { return shape_; }
  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  explicit PackedLinear(const LinearShape& shape);

  void allocate();
  void store_bias(const float* bias);
  // The channel in a lane of a panel, or -1 where the lane is padding.
  int64_t channel_of(int64_t panel, int64_t lane) const;
  template <class Read>
  void pack_floats(const Read& read);
  template <class Read>
  void pack_int8_panels(const Read& read);
  template <class Read>
  void pack_int4_panels(const Read& read);
  // The weights of the channel in a lane of a panel, as the kernels see them.
  void read_channel(int64_t panel, int64_t lane, float* out) const;
  LinearJob job() const;

  LinearShape shape_;
  const Kernels* kernels_;
  int64_t group_;  // int8, int4: inputs that share a scale
  int64_t depth_;  // in_features, padded
  int64_t panels_;
  int64_t panel_bytes_;
  int64_t scale_at_, bias_at_, bytes_;  // offsets of what follows the panels
  uint8_t* data_ = nullptr;
  std::shared_ptr<void> owner_;
};

}  // namespace paceline
