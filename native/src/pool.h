// The threads that share a kernel's work. The caller is one of them.
//
// Work is many small items. Each thread goes through a share of its own from the first to the last, so that it reads on
// where it was, and takes one by one from the ends of others' when it is done: a thread that the system sets aside (two
// cores also serve HTTP) delays one item and not its share. Between jobs a worker spins for a short while, because a model's step is
// hundreds of jobs microseconds apart, and then sleeps: an idle engine costs nothing. The caller never waits for a
// worker that has not taken an item, so a sleeping one costs its wake-up and no more.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

namespace paceline {

struct PoolSettings {
  int threads = 1;         // the caller included
  int spin_us = 50;        // how long a worker looks for the next job before it sleeps
  std::vector<int> cores;  // thread i runs on cores[i]; empty leaves that to the system. Thread 0 is the caller, which
                           // pins itself if it wants to
};

// Cores that this process may run on.
int available_cores();

PoolSettings pool_settings();

// Replaces the workers. Raises std::invalid_argument for settings that make no sense, std::system_error where the
// system gives no thread.
void configure_pool(const PoolSettings& settings);

using ItemFunction = void (*)(const void* context, int64_t item);

// Calls `function(context, i)` for i in [0, items), each once, in any order and on any thread; returns when all are
// done. While another thread's job runs, this one's items run here alone.
void run_items(int64_t items, ItemFunction function, const void* context);

template <class Function>
void parallel(int64_t items, const Function& function) {
  run_items(
      items, [](const void* context, int64_t item) { (*static_cast<const Function*>(context))(item); }, &function);
}

// Threads that items are spread over.
int pool_threads();

// Calls `function(low, high)` for pieces of about the same size of [0, rows). Rows are `columns` elements of light
// work; few of them stay on the calling thread, as waking another would take longer.
template <class Function>
void over_rows(int64_t rows, int64_t columns, const Function& function) {
  constexpr int64_t kWorthSharing = 8 * 1024, kPiecesPerThread = 4;
  if (rows == 0) return;
  const int64_t pieces =
      rows * columns < kWorthSharing ? 1 : std::min<int64_t>(rows, kPiecesPerThread * pool_threads());
  parallel(pieces, [&](int64_t i) { function(i * rows / pieces, (i + 1) * rows / pieces); });
}

// Memory that grows to the largest request so far and is kept. Requests lose what it held.
class Scratch {
 public:
  // 64-byte aligned. Raises std::bad_alloc.
  float* floats(int64_t count);

 private:
  struct Freed {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Freed> memory_;
  int64_t size_ = 0;
};

// Floats of scratch that belong to the calling thread and stay valid until its next call.
float* thread_scratch(int64_t floats);

}  // namespace paceline
