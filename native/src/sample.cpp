// A row is read once for its largest logits, block by block. They bound what top_k can keep from below, so only the
// few blocks that reach the bound are looked at again. top_p needs the weight of all tokens, which costs a second pass;
// from it follows a logit below which all tokens together weigh too little to matter. Filters and the draw then work
// on those candidates: a histogram of their logits leaves a handful of tokens about each threshold to be sorted.
#include "sample.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>

#include "cpu.h"
#include "pool.h"

namespace paceline {
namespace {

// runtime/sampling.py's BOUNDARY, and what arithmetic in float32 adds: 1e-6 from sums, the rest from exponents.
constexpr double kNear = 1e-5 + 2e-6;
constexpr double kNoExponent = -746.0;  // e ** this is 0 in float64
constexpr int64_t kFew = 256;           // tokens that are sorted rather than counted
constexpr int kBins = 1024;
constexpr int64_t kWorthSharing = 32 * 1024;  // logits
constexpr float kInfinity = HUGE_VALF;

struct Ranked {
  float logit;
  float weight;
};

// Scratch for one row; everything for `columns` tokens.
struct Scratch {
  double* spans;
  float* maxima;
  float* bounds;  // a second copy of the maxima
  int32_t* ids;
  float* logits;
  float* weights;
  Ranked* ranked;
};

int64_t blocks_of(int64_t columns) { return (columns + kSampleBlock - 1) / kSampleBlock; }
int64_t spans_of(int64_t columns) { return (columns + kSampleSpan - 1) / kSampleSpan; }

Scratch make_scratch(int64_t columns) {
  const int64_t spans = spans_of(columns), blocks = blocks_of(columns);
  float* next = thread_scratch(2 * spans + 2 * blocks + 5 * columns);
  const auto take = [&next](int64_t floats) {
    float* const taken = next;
    next += floats;
    return taken;
  };
  Scratch scratch;
  scratch.spans = reinterpret_cast<double*>(take(2 * spans));
  scratch.ranked = reinterpret_cast<Ranked*>(take(2 * columns));
  scratch.ids = reinterpret_cast<int32_t*>(take(columns));
  scratch.logits = take(columns);
  scratch.weights = take(columns);
  scratch.maxima = take(blocks);
  scratch.bounds = take(blocks);
  return scratch;
}

struct Params {
  double temperature;
  int64_t top_k;  // 0: off
  double top_p;   // 1 or more: off
  double min_p;   // 0: off

  bool cuts_mass() const { return top_p < 1.0; }
  bool filters() const { return top_k > 0 || cuts_mass() || min_p > 0.0; }
};

struct Row {
  const float* logits;
  int64_t columns;
  WeightScale scale;
  Params params;
  double uniform;
};

struct Drawn {
  int64_t token;
  bool near;
};

// ------------------------------------------------------------------------------------------------- thresholds

// A part of the tokens in descending order: from where their sum reaches one value to where it reaches another.
struct Bracket {
  Ranked* tokens;
  int64_t size;
  double mass;   // of all tokens above the part
  int64_t rank;  // how many these are
};

// Where a sum over the ranking, from the top, reaches a value: the last token with less above it.
struct Crossing {
  float logit;
  int64_t rank;  // 1 for the best token
  double mass;   // of all tokens down to and including this one
};

enum class Sum { kTokens, kMass };

// Whole bins of a histogram, between `low` and `high` of the sum, until a few tokens are left or they are all equal.
Bracket bracket(Ranked* tokens, int64_t size, Sum sum, double low, double high) {
  Bracket found{tokens, size, 0.0, 0};
  while (found.size > kFew) {
    float least = kInfinity, most = -kInfinity;
    for (int64_t i = 0; i < found.size; ++i) {
      least = std::min(least, tokens[i].logit);
      most = std::max(most, tokens[i].logit);
    }
    if (least == most) return found;
    const double scale = kBins / (static_cast<double>(most) - least);
    const auto bin = [=](float logit) {
      return std::min(kBins - 1, static_cast<int>((static_cast<double>(most) - logit) * scale));
    };
    double mass[kBins] = {};
    int32_t count[kBins] = {};
    for (int64_t i = 0; i < found.size; ++i) {
      const int b = bin(tokens[i].logit);
      mass[b] += tokens[i].weight;
      count[b] += 1;
    }
    const auto reached = [&](int b) {
      return sum == Sum::kMass ? found.mass + mass[b] : static_cast<double>(found.rank + count[b]);
    };
    int begin = 0;
    while (begin < kBins - 1 && reached(begin) < low) {
      found.mass += mass[begin];
      found.rank += count[begin++];
    }
    int end = begin;
    double at_end = reached(begin);
    while (end < kBins - 1 && at_end < high) {
      ++end;
      at_end += sum == Sum::kMass ? mass[end] : count[end];
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < found.size; ++i) {
      const int b = bin(tokens[i].logit);
      tokens[kept] = tokens[i];
      kept += (b >= begin) & (b <= end);
    }
    const bool worth = kept < found.size / 2;
    found.size = kept;
    if (!worth) break;
  }
  std::sort(tokens, tokens + found.size, [](const Ranked& a, const Ranked& b) { return a.logit > b.logit; });
  return found;
}

Crossing cross(const Bracket& part, Sum sum, double value) {
  Crossing at{-kInfinity, part.rank, part.mass};
  for (int64_t i = 0; i < part.size; ++i) {
    const double above = sum == Sum::kMass ? at.mass : static_cast<double>(at.rank);
    if (i > 0 && above >= value) break;
    at.logit = part.tokens[i].logit;
    at.mass += part.tokens[i].weight;
    at.rank += 1;
  }
  return at;
}

// The tokens that a row's filters have to look at, in the order of their ids.
struct Candidates {
  int32_t* ids;
  float* logits;
  float* weights;
  Ranked* ranked;
  int64_t size;
  double noise;     // of a logit
  double doubtful;  // the weight of tokens whose membership is in doubt

  // Fills `ranked` with the tokens of at least this logit.
  int64_t rank_from(float least) {
    int64_t count = 0;
    for (int64_t i = 0; i < size; ++i) {
      ranked[count] = {logits[i], weights[i]};
      count += logits[i] >= least;
    }
    return count;
  }

  // All tokens as near to a threshold as noise reaches, if one below `at` is among them, are in doubt.
  void doubt_about(const Crossing& at) {
    const double low = at.logit - noise, high = at.logit + noise;
    int64_t count = 0;
    double mass = 0.0;
    for (int64_t i = 0; i < size; ++i) {
      // No branches in these loops: a processor could not foretell them.
      const bool above = logits[i] >= low, about = above & (logits[i] <= high);
      count += above;
      mass += about ? weights[i] : 0.0f;
    }
    if (count > at.rank) doubtful += mass;
  }

  // All tokens but the best that weigh about this much.
  void doubt_weight(double weight) {
    const double low = weight * (1.0 - kNear), high = weight * (1.0 + kNear);
    double mass = low <= 1.0 && 1.0 <= high ? -1.0 : 0.0;
    for (int64_t i = 0; i < size; ++i) {
      mass += (low <= weights[i]) & (weights[i] <= high) ? weights[i] : 0.0f;
    }
    doubtful += std::max(mass, 0.0);
  }

  double mass_from(float least) const {
    double mass = 0.0;
    for (int64_t i = 0; i < size; ++i) mass += logits[i] >= least ? weights[i] : 0.0f;
    return mass;
  }

  void keep(float least, double weight) {
    int64_t kept = 0;
    for (int64_t i = 0; i < size; ++i) {
      ids[kept] = ids[i];
      logits[kept] = logits[i];
      weights[kept] = weights[i];
      kept += (logits[i] >= least) & (weights[i] >= weight);
    }
    size = kept;
  }
};

// A logit at or below all that matter to top_k, given the largest of each block: k blocks hold k tokens at least as
// high as the lowest of their maxima.
double top_k_cutoff(const Row& row, const Scratch& scratch, double noise) {
  const int64_t blocks = blocks_of(row.columns), k = row.params.top_k;
  if (k > blocks) return -kInfinity;
  std::copy(scratch.maxima, scratch.maxima + blocks, scratch.bounds);
  std::nth_element(scratch.bounds, scratch.bounds + k - 1, scratch.bounds + blocks, std::greater<float>());
  return scratch.bounds[k - 1] - 2.0 * noise;
}

// Adds up the weights of the spans. Those of a row that is to be drawn from are never all 0.
double total_of(const Row& row, const Scratch& scratch) {
  kernels().weigh_spans(row.logits, row.columns, row.scale, scratch.spans);
  double total = 0.0;
  for (int64_t s = 0; s < spans_of(row.columns); ++s) total += scratch.spans[s];
  return total;
}

Candidates filter(const Row& row, const Scratch& scratch) {
  const Params& params = row.params;
  const double best = row.scale.best;
  Candidates found{scratch.ids, scratch.logits, scratch.weights, scratch.ranked, 0, kNear * params.temperature, 0.0};
  double cutoff, total = 0.0;
  if (params.top_k > 0) {
    cutoff = top_k_cutoff(row, scratch, found.noise);
  } else if (params.cuts_mass()) {
    total = total_of(row, scratch);
    const double rest = (1.0 - params.top_p - 2.0 * kNear) * total / static_cast<double>(row.columns);
    cutoff = rest > 0.0 ? best + params.temperature * std::log(rest) : -kInfinity;
  } else {
    cutoff = best + params.temperature * (std::log(params.min_p) - 2.0 * kNear);
  }
  // Rounded down, and never so far that -infinity passes.
  const float least = std::nextafter(static_cast<float>(std::clamp<double>(cutoff, -FLT_MAX, FLT_MAX)), -FLT_MAX);
  found.size = kernels().pick(row.logits, row.columns, scratch.maxima, least, found.ids, found.logits);
  kernels().weigh(found.logits, found.size, row.scale, found.weights);

  float threshold = -kInfinity;
  if (params.top_k > 0 && params.top_k < found.size) {
    const double k = static_cast<double>(params.top_k);
    const Bracket part = bracket(found.ranked, found.rank_from(-kInfinity), Sum::kTokens, k, k);
    const Crossing last = cross(part, Sum::kTokens, k);
    found.doubt_about(last);
    threshold = last.logit;
  }
  if (params.cuts_mass()) {
    if (params.top_k > 0) total = found.mass_from(threshold);
    const double low = (params.top_p - kNear) * total, high = (params.top_p + kNear) * total;
    const Bracket part = bracket(found.ranked, found.rank_from(threshold), Sum::kMass, low, high);
    const Crossing last = cross(part, Sum::kMass, params.top_p * total);
    found.doubt_about(last);
    // Those that the edge might reach; the first token stays in any case.
    found.doubtful += std::max(cross(part, Sum::kMass, high).mass - cross(part, Sum::kMass, low).mass, 0.0);
    threshold = std::max(threshold, last.logit);
  }
  if (params.min_p > 0.0) found.doubt_weight(params.min_p);
  found.keep(threshold, params.min_p);
  return found;
}

// --------------------------------------------------------------------------------------------------- the draw

// Below the total in spite of rounding, else no token would exceed it.
double target_of(double uniform, double total) { return std::min(uniform * total, std::nextafter(total, 0.0)); }

// Whether a token among these might come out at all.
bool any_possible(const float* logits, int64_t low, int64_t high, const WeightScale& scale) {
  for (int64_t i = low; i < high; ++i) {
    if ((static_cast<double>(logits[i]) - scale.best) * scale.inverse > kNoExponent) return true;
  }
  return false;
}

// Where a draw fell: at `index` of the `size` tokens that could come out.
struct Place {
  int64_t index;
  double lower;  // the cumulated weight before the token and with it
  double upper;
};

bool is_near(const Place& at, double target, double total, double doubtful, const float* logits, int64_t size,
             const WeightScale& scale) {
  const double slack = kNear * total + doubtful;
  const bool low = target - at.lower <= slack, high = at.upper - target <= slack;
  if ((low || high) && doubtful > 0.0) return true;
  // At the ends of the distribution there is nothing to turn into.
  return (low && any_possible(logits, 0, at.index, scale)) ||
         (high && any_possible(logits, at.index + 1, size, scale));
}

// The first of `size` tokens whose cumulated weight, from `before` on, exceeds the target; the last with a weight,
// should rounding leave none.
Place find(const float* weights, int64_t size, double before, double target) {
  Place at{0, before, before};
  double sum = before;
  for (int64_t i = 0; i < size; ++i) {
    if (weights[i] == 0.0f) continue;
    at = {i, sum, sum + weights[i]};
    sum = at.upper;
    if (sum > target) break;
  }
  return at;
}

Drawn draw_from_all(const Row& row, const Scratch& scratch) {
  const double total = total_of(row, scratch), target = target_of(row.uniform, total);
  const int64_t last = spans_of(row.columns) - 1;
  int64_t span = 0;
  double before = 0.0;
  // Adding in the same order as total_of, some span exceeds the target.
  while (span < last && before + scratch.spans[span] <= target) before += scratch.spans[span++];
  const int64_t low = span * kSampleSpan, size = std::min(kSampleSpan, row.columns - low);
  kernels().weigh(row.logits + low, size, row.scale, scratch.weights);
  Place at = find(scratch.weights, size, before, target);
  at.index += low;
  return {at.index, is_near(at, target, total, 0.0, row.logits, row.columns, row.scale)};
}

Drawn draw_from_few(const Row& row, const Scratch& scratch) {
  const Candidates kept = filter(row, scratch);
  double total = 0.0;
  for (int64_t i = 0; i < kept.size; ++i) total += kept.weights[i];
  const double target = target_of(row.uniform, total);
  const Place at = find(kept.weights, kept.size, 0.0, target);
  return {kept.ids[at.index], is_near(at, target, total, kept.doubtful, kept.logits, kept.size, row.scale)};
}

int64_t first_best(const Row& row, const float* maxima) {
  const float best = row.scale.best;
  const int64_t low = (std::find(maxima, maxima + blocks_of(row.columns), best) - maxima) * kSampleBlock;
  return std::find(row.logits + low, row.logits + row.columns, best) - row.logits;
}

Drawn sample_row(const SampleBatch& batch, int64_t index) {
  const Scratch scratch = make_scratch(batch.columns);
  Row row{};
  row.logits = batch.logits + index * batch.logits_stride;
  row.columns = batch.columns;
  row.uniform = batch.uniform[index];
  const float best = kernels().row_maxima(row.logits, row.columns, scratch.maxima);
  if (!(std::fabs(best) <= FLT_MAX)) return {-1, false};
  const double temperature = batch.temperature[index];
  row.scale.best = best;
  if (temperature == 0.0) return {first_best(row, scratch.maxima), false};
  // Beyond these bounds its inverse, or the product with an infinite logit, would be nothing that float32 holds.
  Params& params = row.params;
  params.temperature = std::clamp(temperature, 1e-30, 1e30);
  const int64_t k = batch.top_k[index];
  params.top_k = k < batch.columns ? k : 0;
  params.top_p = batch.top_p[index];
  params.min_p = std::min(batch.min_p[index], 1.0);
  row.scale.inverse = static_cast<float>(1.0 / params.temperature);
  row.scale.rest = static_cast<float>(1.0 / params.temperature - row.scale.inverse);
  return params.filters() ? draw_from_few(row, scratch) : draw_from_all(row, scratch);
}

}  // namespace

void sample(const SampleBatch& batch) {
  const auto take = [&batch](int64_t row) {
    const Drawn drawn = sample_row(batch, row);
    batch.tokens[row] = drawn.token;
    batch.near[row] = drawn.near ? 1 : 0;
  };
  if (batch.rows * batch.columns >= kWorthSharing) return parallel(batch.rows, take);
  for (int64_t row = 0; row < batch.rows; ++row) take(row);
}

}  // namespace paceline
