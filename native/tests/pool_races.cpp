// Callers and settings that come at once, for ThreadSanitizer: every item runs once, and nobody reads what another
// writes. Built and run by sanitize.sh.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "../src/pool.h"

namespace {

std::atomic<bool> wrong{false};

void call(int items) {
  for (int round = 0; round < 2000; ++round) {
    std::vector<int> found(static_cast<size_t>(items));
    paceline::parallel(items, [&](int64_t item) {
      found[static_cast<size_t>(item)] += round + static_cast<int>(item);
      paceline::thread_scratch(64)[0] = 1;
    });
    for (int item = 0; item < items; ++item) {
      if (found[static_cast<size_t>(item)] != round + item) wrong = true;
    }
    // Long enough, now and then, for workers to fall asleep.
    if (round % 97 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

}  // namespace

int main() {
  paceline::configure_pool({4, 5, {}});
  std::thread many(call, 17), few(call, 3);
  for (int i = 0; i < 60; ++i) {
    paceline::configure_pool({1 + i % 5, i % 7, {}});
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  many.join();
  few.join();
  call(9);
  paceline::configure_pool({1, 0, {}});  // ends the workers
  std::puts(wrong ? "an item ran twice or not at all" : "pool: no races");
  return wrong ? 1 : 0;
}
