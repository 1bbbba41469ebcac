// Row by row: norms, gates, rotations, the largest of a row. Included after vec.h.
#pragma once

// y = (x + residual) / rms(x + residual) * weight. Squares are summed in float32, as torch does.
void rms_norm(const RowsJob& job, int64_t low, int64_t high) {
  for (Index row = low; row < high; ++row) {
    const float* x = job.x + row * job.x_stride;
    const float* weight = job.weight + row * job.weight_stride;
    float* y = job.y + row * job.y_stride;
    if (job.residual) {
      float* total = job.residual + row * job.residual_stride;
      for (Index c = 0; c < job.columns; c += kWidth) {
        const Index inside = job.columns - c;
        store_first(total + c, add(load_first(total + c, inside), load_first(x + c, inside)), inside);
      }
      x = total;
    }
    Floats even = zeros(), odd = zeros();
    Index c = 0;
    for (; c + 2 * kWidth <= job.columns; c += 2 * kWidth) {
      const Floats a = load(x + c), b = load(x + c + kWidth);
      even = fma(a, a, even);
      odd = fma(b, b, odd);
    }
    for (; c < job.columns; c += kWidth) {
      const Floats a = load_first(x + c, job.columns - c);
      even = fma(a, a, even);
    }
    const float mean = sum(add(even, odd)) / static_cast<float>(job.columns);
    const Floats factor = all(1.0f / __builtin_sqrtf(mean + job.eps));
    for (c = 0; c < job.columns; c += kWidth) {
      const Index inside = job.columns - c;
      store_first(y + c, mul(mul(load_first(x + c, inside), factor), load_first(weight + c, inside)), inside);
    }
  }
}

// x [T, 2 columns] -> y [T, columns] = act(first half) * second half.
void gate(const RowsJob& job, Activation activation, int64_t low, int64_t high) {
  for (Index row = low; row < high; ++row) {
    const float* x = job.x + row * job.x_stride;
    float* y = job.y + row * job.y_stride;
    for (Index c = 0; c < job.columns; c += kWidth) {
      const Index inside = job.columns - c;
      const Floats gated = activate(load_first(x + c, inside), activation);
      store_first(y + c, mul(gated, load_first(x + job.columns + c, inside)), inside);
    }
  }
}

// Pairs are (i, i + rotary_dim / 2); features beyond rotary_dim stay.
void rope(const RopeJob& job, int64_t low, int64_t high) {
  const Index half = job.rotary_dim / 2;
  for (Index row = low; row < high; ++row) {
    const float* cosine = job.cosine + row * job.angle_stride;
    const float* sine = job.sine + row * job.angle_stride;
    for (Index head = 0; head < job.heads; ++head) {
      float* x = job.x + row * job.x_stride + head * job.head_dim;
      for (Index i = 0; i < half; i += kWidth) {
        const Index inside = half - i;
        const Floats a = load_first(x + i, inside), b = load_first(x + half + i, inside);
        const Floats turned_a = fnma(b, load_first(sine + i, inside), mul(a, load_first(cosine + i, inside)));
        const Floats turned_b =
            fma(a, load_first(sine + half + i, inside), mul(b, load_first(cosine + half + i, inside)));
        store_first(x + i, turned_a, inside);
        store_first(x + half + i, turned_b, inside);
      }
    }
  }
}

// Index of the first NaN if there is one, else of the first largest: torch.argmax's rule.
int64_t argmax(const float* x, int64_t columns) {
  // One pass for the value, NaN being larger than all; a second, that stops early, for the place.
  Floats most[4] = {all(-kInfinity), all(-kInfinity), all(-kInfinity), all(-kInfinity)};
  Floats sound = zeros();  // NaN where a NaN went by
  Index c = 0;
  for (; c + 4 * kWidth <= columns; c += 4 * kWidth) {
    for (Index v = 0; v < 4; ++v) {
      const Floats a = load(x + c + v * kWidth);
      most[v] = max(a, most[v]);
      sound = fma(a, zeros(), sound);
    }
  }
  float best = -kInfinity;
  bool doubtful = false;  // a NaN, or an infinity, whose product with zero is NaN as well
  float lanes[kWidth];
  for (Index v = 0; v < 4; ++v) {
    store(lanes, most[v]);
    for (float lane : lanes) best = lane > best ? lane : best;
  }
  store(lanes, sound);
  for (float lane : lanes) doubtful |= lane != lane;
  for (; c < columns; ++c) {
    best = x[c] > best ? x[c] : best;
    doubtful |= x[c] != x[c];
  }
  if (doubtful) {
    for (Index i = 0; i < columns; ++i) {
      if (x[i] != x[i]) return i;
    }
  }
  const Floats target = all(best);
  for (Index i = 0; i < columns; i += kWidth) {
    const Mask inside = first(columns - i);
    const Mask hit = equal(load(x + i, inside), target);
#if defined(__AVX512F__)
    const unsigned bits = hit & inside;
#else
    const unsigned bits = static_cast<unsigned>(_mm256_movemask_ps(_mm256_and_ps(hit, inside)));
#endif
    if (bits) return i + __builtin_ctz(bits);
  }
  return 0;
}
