#include "linear.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#include "cpu.h"
#include "pool.h"
#include "quantize.h"

namespace paceline {
namespace {

// Products of 127 * 255 must fit a 32-bit sum over all inputs.
constexpr int64_t kMostInputs = 65536;
// A row tile is read once a panel: it should stay in the second-level cache beside the panels that stream through. But
// all weights are read once a tile, so it has a few blocks even where those are large.
constexpr int64_t kTileBytes = 256 * 1024;
constexpr int64_t kLeastTileBlocks = 8;
// Below this many multiplications a job is not worth waking a thread for, nor is laying out so few activations.
constexpr int64_t kWorthSharing = 64 * 1024;
constexpr int64_t kWorthSharedPreparing = 8 * 1024;
constexpr int64_t kItemsPerThread = 16;
constexpr size_t kHugePage = size_t{2} << 20;

int64_t rounded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

std::shared_ptr<void> aligned_memory(int64_t bytes) {
  const size_t size = static_cast<size_t>(std::max<int64_t>(bytes, 64));
  const bool large = size >= 2 * kHugePage;
  const size_t alignment = large ? kHugePage : 64;
  const size_t whole = (size + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, whole);
  if (!memory) throw std::bad_alloc();
  if (large) madvise(memory, whole, MADV_HUGEPAGE);  // fewer address look-ups; no matter where refused
  std::memset(memory, 0, size);
  return std::shared_ptr<void>(memory, std::free);
}

void check(const LinearShape& shape) {
  if (shape.in_features < 1 || shape.outputs < 1) {
    throw std::invalid_argument("a linear map needs at least one input and one output");
  }
  const bool integers = shape.kind == WeightKind::kInt8 || shape.kind == WeightKind::kInt4;
  if (integers && shape.in_features > kMostInputs) {
    throw std::invalid_argument("int8 and int4 weights take at most " + std::to_string(kMostInputs) + " inputs, not " +
                                std::to_string(shape.in_features));
  }
  const bool whole = shape.kind == WeightKind::kInt8 && shape.group == 0;
  if (integers && !whole && shape.group != 32 && shape.group != 64 && shape.group != 128) {
    throw std::invalid_argument("group is " + std::to_string(shape.group) + "; it must be 32, 64 or 128" +
                                (shape.kind == WeightKind::kInt8 ? ", or 0 for a scale a row" : ""));
  }
}

// Runs `fill(panel)` for all panels; the first error that any raises is raised here.
template <class Fill>
void for_panels(int64_t panels, const Fill& fill) {
  std::exception_ptr error;
  std::atomic<bool> failed{false};
  parallel(panels, [&](int64_t panel) {
    try {
      if (!failed.load()) fill(panel);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

}  // namespace

PackedLinear::PackedLinear(const LinearShape& shape) : shape_(shape), kernels_(&kernels()) {
  check(shape);
  shape_.isa = kernels_->name;
  const int64_t panel = kernels_->panel, each = rounded(shape.outputs, panel) / panel;
  panels_ = shape.gated ? 2 * each : each;
  const bool integers = shape.kind == WeightKind::kInt8 || shape.kind == WeightKind::kInt4;
  group_ = !integers ? 1 : shape.group ? shape.group : rounded(shape.in_features, 4);
  depth_ = rounded(shape.in_features, group_);
  switch (shape.kind) {
    case WeightKind::kFloat32: panel_bytes_ = depth_ * panel * 4; break;
    case WeightKind::kBFloat16: panel_bytes_ = depth_ * panel * 2; break;
    case WeightKind::kInt8: panel_bytes_ = depth_ * panel; break;
    case WeightKind::kInt4:
      panel_bytes_ = depth_ * panel / 2 + depth_ / shape.group * panel * 2 * (shape.has_minimum ? 2 : 1);
      break;
  }
  panel_bytes_ = rounded(panel_bytes_, 64);
  const int64_t words = rounded(panels_ * panel * 4, 64);
  const bool int8 = shape.kind == WeightKind::kInt8;
  scale_at_ = panels_ * panel_bytes_;
  bias_at_ = scale_at_ + (int8 ? words : 0);
  bytes_ = bias_at_ + (shape.has_bias ? words : 0);
}

void PackedLinear::allocate() {
  owner_ = aligned_memory(bytes_);
  data_ = static_cast<uint8_t*>(owner_.get());
}

int64_t PackedLinear::channel_of(int64_t panel, int64_t lane) const {
  const int64_t column = (shape_.gated ? panel / 2 : panel) * kernels_->panel + lane;
  if (column >= shape_.outputs) return -1;
  return shape_.gated && panel % 2 ? shape_.outputs + column : column;
}

void PackedLinear::store_bias(const float* bias) {
  if (!shape_.has_bias) return;
  float* const out = reinterpret_cast<float*>(data_ + bias_at_);
  for (int64_t i = 0; i < panels_ * kernels_->panel; ++i) {
    const int64_t channel = channel_of(i / kernels_->panel, i % kernels_->panel);
    out[i] = channel < 0 ? 0 : bias[channel];
  }
}

template <class Read>
void PackedLinear::pack_floats(const Read& read) {
  for_panels(panels_, [&](int64_t panel) {
    uint8_t* const out = data_ + panel * panel_bytes_;
    for (int64_t lane = 0; lane < kernels_->panel; ++lane) {
      const int64_t channel = channel_of(panel, lane);
      if (channel < 0) continue;
      const float* w = read(channel);
      for (int64_t k = 0; k < shape_.in_features; ++k) {
        const int64_t at = k * kernels_->panel + lane;
        if (shape_.kind == WeightKind::kFloat32) {
          reinterpret_cast<float*>(out)[at] = w[k];
        } else {
          reinterpret_cast<uint16_t*>(out)[at] = to_bfloat16(w[k]);
        }
      }
    }
  });
}

// `read(channel, row)` fills in a row of int8 weights and returns its scale.
template <class Read>
void PackedLinear::pack_int8_panels(const Read& read) {
  for_panels(panels_, [&](int64_t panel) {
    uint8_t* const out = data_ + panel * panel_bytes_;
    const std::unique_ptr<int8_t[]> row(new int8_t[static_cast<size_t>(shape_.in_features)]);
    for (int64_t lane = 0; lane < kernels_->panel; ++lane) {
      const int64_t channel = channel_of(panel, lane), at = panel * kernels_->panel + lane;
      if (channel < 0) continue;
      reinterpret_cast<float*>(data_ + scale_at_)[at] = read(channel, row.get());
      for (int64_t k = 0; k < shape_.in_features; ++k) {
        out[(k / 4 * kernels_->panel + lane) * 4 + k % 4] = static_cast<uint8_t>(row[k] + kernels_->int8_offset);
      }
    }
  });
}

// `read(channel, group, out)` fills in one group of int4 weights.
template <class Read>
void PackedLinear::pack_int4_panels(const Read& read) {
  const int64_t width = kernels_->panel, head = width * 2 * (shape_.has_minimum ? 2 : 1);
  for_panels(panels_, [&](int64_t panel) {
    Int4Group group;
    for (int64_t lane = 0; lane < width; ++lane) {
      const int64_t channel = channel_of(panel, lane);
      if (channel < 0) continue;
      for (int64_t g = 0; g < depth_ / shape_.group; ++g) {
        read(channel, g, group);
        uint8_t* out = data_ + panel * panel_bytes_ + g * (head + shape_.group / 2 * width);
        reinterpret_cast<uint16_t*>(out)[lane] = group.scale;
        if (shape_.has_minimum) reinterpret_cast<uint16_t*>(out)[width + lane] = group.minimum;
        out += head;
        for (int64_t k = 0; k < shape_.group; ++k) {
          const int shift = k % 8 < 4 ? 0 : 4;
          out[(k / 8 * width + lane) * 4 + k % 4] |= static_cast<uint8_t>(group.q[k] << shift);
        }
      }
    }
  });
}

PackedLinear PackedLinear::pack(LinearShape shape, const float* weight, int64_t stride, const float* bias) {
  shape.has_bias = bias != nullptr;
  PackedLinear packed(shape);
  packed.allocate();
  packed.store_bias(bias);
  const int64_t inputs = shape.in_features;
  switch (shape.kind) {
    case WeightKind::kFloat32:
    case WeightKind::kBFloat16: packed.pack_floats([&](int64_t channel) { return weight + channel * stride; }); break;
    case WeightKind::kInt8:
      packed.pack_int8_panels([&](int64_t channel, int8_t* row) {
        const float* w = weight + channel * stride;
        float most = 0;
        for (int64_t k = 0; k < inputs; ++k) {
          if (!std::isfinite(w[k])) throw std::invalid_argument("weights are not finite");
          most = std::max(most, std::fabs(w[k]));
        }
        const float scale = most / 127.0f;
        for (int64_t k = 0; k < inputs; ++k) {
          row[k] = scale < 1e-36f ? int8_t{0} : static_cast<int8_t>(std::nearbyint(w[k] / scale));
        }
        return scale;
      });
      break;
    case WeightKind::kInt4:
      packed.pack_int4_panels([&](int64_t channel, int64_t g, Int4Group& out) {
        const int64_t low = g * shape.group, count = std::min(shape.group, inputs - low);
        quantize_group(weight + channel * stride + low, count, shape.group, shape.has_minimum, out);
      });
      break;
  }
  return packed;
}

PackedLinear PackedLinear::pack_int8(LinearShape shape, const int8_t* weight, int64_t stride, const float* scale,
                                     const float* bias) {
  shape.kind = WeightKind::kInt8;
  shape.has_bias = bias != nullptr;
  PackedLinear packed(shape);
  packed.allocate();
  packed.store_bias(bias);
  packed.pack_int8_panels([&](int64_t channel, int8_t* row) {
    std::memcpy(row, weight + channel * stride, static_cast<size_t>(shape.in_features));
    if (std::find(row, row + shape.in_features, int8_t{-128}) != row + shape.in_features) {
      throw std::invalid_argument("int8 weights must lie in [-127, 127]; there is a -128");
    }
    return scale[channel];
  });
  return packed;
}

PackedLinear PackedLinear::pack_int4(LinearShape shape, const uint8_t* weight, int64_t stride, const float* scale,
                                     const float* minimum, const float* bias) {
  shape.kind = WeightKind::kInt4;
  shape.has_bias = bias != nullptr;
  shape.has_minimum = minimum != nullptr;
  PackedLinear packed(shape);
  packed.allocate();
  packed.store_bias(bias);
  const int64_t groups = packed.depth_ / shape.group;
  packed.pack_int4_panels([&](int64_t channel, int64_t g, Int4Group& out) {
    const int64_t low = g * shape.group, count = std::min(shape.group, shape.in_features - low);
    std::memset(out.q, 0, sizeof out.q);
    std::memcpy(out.q, weight + channel * stride + low, static_cast<size_t>(count));
    if (*std::max_element(out.q, out.q + count) > 15) throw std::invalid_argument("int4 weights must lie in [0, 15]");
    out.scale = checked_scale(scale[channel * groups + g]);
    out.minimum = minimum ? checked_minimum(minimum[channel * groups + g]) : 0;
  });
  return packed;
}

PackedLinear PackedLinear::restore(const LinearShape& shape, uint8_t* data, int64_t bytes,
                                   std::shared_ptr<void> owner) {
  PackedLinear packed(shape);
  if (packed.shape_.isa != shape.isa) {
    throw std::invalid_argument("weights were packed for " + shape.isa + ", and this runs " + packed.shape_.isa);
  }
  if (packed.bytes_ != bytes || reinterpret_cast<uintptr_t>(data) % 64 != 0) {
    throw std::invalid_argument("packed weights of this shape are " + std::to_string(packed.bytes_) +
                                " bytes at a multiple of 64; these are " + std::to_string(bytes));
  }
  packed.data_ = data;
  packed.owner_ = std::move(owner);
  return packed;
}

LinearJob PackedLinear::job() const {
  LinearJob job{};
  job.kind = shape_.kind;
  job.weight = data_;
  job.panel_bytes = panel_bytes_;
  job.panels = panels_;
  job.in_features = shape_.in_features;
  job.depth = depth_;
  job.outputs = shape_.outputs;
  job.group = group_;
  job.has_minimum = shape_.has_minimum;
  job.gated = shape_.gated;
  if (shape_.kind == WeightKind::kInt8) {
    job.channel_scale = reinterpret_cast<const float*>(data_ + scale_at_);
  }
  if (shape_.has_bias) job.bias = reinterpret_cast<const float*>(data_ + bias_at_);
  return job;
}

void PackedLinear::apply(const LinearCall& call) const {
  if (call.rows == 0) return;
  const bool integers = shape_.kind == WeightKind::kInt8 || shape_.kind == WeightKind::kInt4;
  const int64_t most = kernels_->block_rows(shape_.kind);
  LinearJob job = this->job();
  job.x = call.x;
  job.x_stride = call.x_stride;
  job.rows = call.rows;
  job.blocks = (call.rows + most - 1) / most;
  job.activation = call.activation;
  job.residual = call.residual;
  job.residual_stride = call.residual_stride;
  job.y = call.y;
  job.y_stride = call.y_stride;

  const int64_t row_bytes = depth_ * (integers ? 1 : 4);
  const int64_t scales = integers ? call.rows * (depth_ / group_) : 0;
  const int64_t prepared_floats = rounded(call.rows * row_bytes, 64) / 4;
  const int64_t normal_floats = call.norm_weight ? call.rows * shape_.in_features : 0;
  float* const scratch = thread_scratch(prepared_floats + 2 * scales + 16 + normal_floats);
  job.prepared = reinterpret_cast<uint8_t*>(scratch);
  job.row_scale = scratch + prepared_floats;
  job.row_sum = job.row_scale + scales;
  RowsJob norm{};
  if (call.norm_weight) {
    float* const normal = job.row_sum + scales + 16;
    norm.x = call.x;
    norm.x_stride = call.x_stride;
    norm.weight = call.norm_weight;
    norm.columns = shape_.in_features;
    norm.eps = call.norm_eps;
    norm.y = normal;
    norm.y_stride = shape_.in_features;
    job.x = normal;
    job.x_stride = shape_.in_features;
  }

  const int threads = pool_threads();
  // Normalized rows go on to be laid out while they are in the first-level cache.
  const auto prepare = [&](int64_t block) {
    if (norm.weight) kernels_->rms_norm(norm, block * job.rows / job.blocks, (block + 1) * job.rows / job.blocks);
    kernels_->prepare(job, block);
  };
  if (threads == 1 || call.rows * depth_ < kWorthSharedPreparing) {
    for (int64_t b = 0; b < job.blocks; ++b) prepare(b);
  } else {
    parallel(job.blocks, prepare);
  }

  const int64_t tile_blocks = std::max(kLeastTileBlocks, kTileBytes / (row_bytes * most));
  const int64_t tiles = (job.blocks + tile_blocks - 1) / tile_blocks;
  const int64_t step = shape_.gated ? 2 : 1, units = panels_ / step;
  const bool alone = threads == 1 || call.rows * depth_ * panels_ * kernels_->panel < kWorthSharing;
  const int64_t wanted = alone ? 1 : std::max<int64_t>(1, kItemsPerThread * threads / tiles);
  const int64_t chunk = (units + wanted - 1) / wanted, chunks = (units + chunk - 1) / chunk;
  const auto multiply = [&](int64_t item) {
    const int64_t block = item / chunks * tile_blocks, unit = item % chunks * chunk;
    kernels_->multiply(job, block, std::min(block + tile_blocks, job.blocks), unit * step,
                       std::min(unit + chunk, units) * step);
  };
  if (alone) {
    for (int64_t item = 0; item < tiles * chunks; ++item) multiply(item);
  } else {
    parallel(tiles * chunks, multiply);
  }
}

void PackedLinear::read_channel(int64_t panel, int64_t lane, float* out) const {
  const uint8_t* const data = data_ + panel * panel_bytes_;
  const int64_t width = kernels_->panel, inputs = shape_.in_features;
  switch (shape_.kind) {
    case WeightKind::kFloat32: {
      const auto* const w = reinterpret_cast<const float*>(data) + lane;
      for (int64_t k = 0; k < inputs; ++k) out[k] = w[k * width];
      break;
    }
    case WeightKind::kBFloat16: {
      const auto* const w = reinterpret_cast<const uint16_t*>(data) + lane;
      for (int64_t k = 0; k < inputs; ++k) out[k] = from_bfloat16(w[k * width]);
      break;
    }
    case WeightKind::kInt8: {
      const float scale = reinterpret_cast<const float*>(data_ + scale_at_)[panel * width + lane];
      for (int64_t k = 0; k < inputs; ++k) {
        const uint8_t byte = data[(k / 4 * width + lane) * 4 + k % 4];
        out[k] = static_cast<float>(static_cast<int8_t>(byte - kernels_->int8_offset)) * scale;
      }
      break;
    }
    case WeightKind::kInt4: {
      const int64_t head = width * 2 * (shape_.has_minimum ? 2 : 1);
      for (int64_t k = 0; k < inputs; ++k) {
        const uint8_t* const group = data + k / shape_.group * (head + shape_.group / 2 * width);
        const auto* const scales = reinterpret_cast<const uint16_t*>(group);
        const int64_t in_group = k % shape_.group;
        const uint8_t byte = group[head + (in_group / 8 * width + lane) * 4 + in_group % 4];
        const float q = static_cast<float>(in_group % 8 < 4 ? byte & 15 : byte >> 4);
        const float scale = from_float16(scales[lane]);
        out[k] = shape_.has_minimum ? q * scale + from_float16(scales[width + lane]) : (q - 8) * scale;
      }
      break;
    }
  }
}

void PackedLinear::unpack(float* out) const {
  for (int64_t i = 0; i < panels_ * kernels_->panel; ++i) {
    const int64_t panel = i / kernels_->panel, lane = i % kernels_->panel, channel = channel_of(panel, lane);
    if (channel >= 0) read_channel(panel, lane, out + channel * shape_.in_features);
  }
}

void PackedLinear::rows(const int64_t* channels, int64_t count, float* out, int64_t stride) const {
  if (shape_.gated) throw std::invalid_argument("a gated map has no rows to look up: its channels are gates and ups");
  for (int64_t i = 0; i < count; ++i) {
    if (channels[i] < 0 || channels[i] >= shape_.outputs) {
      throw std::invalid_argument("ids names row " + std::to_string(channels[i]) + " of a map that has " +
                                  std::to_string(shape_.outputs));
    }
  }
  over_rows(count, shape_.in_features, [&](int64_t low, int64_t high) {
    for (int64_t i = low; i < high; ++i) {
      read_channel(channels[i] / kernels_->panel, channels[i] % kernels_->panel, out + i * stride);
    }
  });
}

}  // namespace paceline
