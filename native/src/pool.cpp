#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

namespace paceline {
namespace {

using Clock = std::chrono::steady_clock;

void relax() { __builtin_ia32_pause(); }

// A job's number in the upper half of one word, its items not yet taken in the lower: a worker that is late finds
// either nothing left or a job that cannot end before the item it took.
constexpr uint64_t kOneJob = uint64_t{1} << 32;
constexpr uint64_t kItems = kOneJob - 1;

class Pool {
 public:
  explicit Pool(PoolSettings settings) : settings_(std::move(settings)) {
    for (int i = 1; i < settings_.threads; ++i) workers_.emplace_back([this, i] { work(i); });
  }

  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(sleep_mutex_);
      stop_.store(true);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  const PoolSettings& settings() const { return settings_; }

  void run(int64_t items, ItemFunction function, const void* context) {
    const std::unique_lock<std::mutex> turn(job_mutex_, std::try_to_lock);
    if (items == 1 || workers_.empty() || !turn.owns_lock()) {
      for (int64_t i = 0; i < items; ++i) function(context, i);
      return;
    }
    for (; items > int64_t{kItems}; --items) function(context, items - 1);  // never in practice
    function_ = function;
    context_ = context;
    items_ = items;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t job = (tickets_.load(std::memory_order_relaxed) & ~kItems) + kOneJob;
    tickets_.store(job | static_cast<uint64_t>(items));  // sequentially consistent, with sleepers_ below
    if (sleepers_.load() > 0) {
      const std::lock_guard<std::mutex> lock(sleep_mutex_);
      wake_.notify_all();
    }
    take_items();
    for (int spins = 0; done_.load(std::memory_order_acquire) < items; ++spins) {
      if (spins < 2000) {
        relax();
      } else {
        sched_yield();  // a worker that holds an item may need this core
      }
    }
  }

 private:
  // Runs items until none is left.
  void take_items() {
    uint64_t seen = tickets_.load(std::memory_order_acquire);
    while (seen & kItems) {
      if (!tickets_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire))
        continue;
      // The job lives until this item is counted, so its fields are ours to read.
      function_(context_, items_ - static_cast<int64_t>(seen & kItems));
      done_.fetch_add(1, std::memory_order_release);
      seen = tickets_.load(std::memory_order_acquire);
    }
  }

  void work(int index) {
    pin(index);
    while (!stop_.load(std::memory_order_relaxed)) {
      take_items();
      if (!spin()) sleep();
    }
  }

  // True as soon as there is an item.
  bool spin() {
    const Clock::time_point until = Clock::now() + std::chrono::microseconds(settings_.spin_us);
    do {
      for (int i = 0; i < 32; ++i) {
        if (tickets_.load(std::memory_order_relaxed) & kItems) return true;
        relax();
      }
    } while (Clock::now() < until);
    return false;
  }

  void sleep() {
    std::unique_lock<std::mutex> lock(sleep_mutex_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, [this] { return stop_.load() || (tickets_.load() & kItems) != 0; });
    sleepers_.fetch_sub(1);
  }

  void pin(int index) {
    if (settings_.cores.empty()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(settings_.cores[static_cast<size_t>(index) % settings_.cores.size()], &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // a wish: without it the kernels only run slower
  }

  const PoolSettings settings_;
  std::vector<std::thread> workers_;
  std::mutex job_mutex_;  // whose job it is
  ItemFunction function_ = nullptr;
  const void* context_ = nullptr;
  int64_t items_ = 0;
  alignas(64) std::atomic<uint64_t> tickets_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
};

// The pool of this process. Never destroyed at exit: threads end with the process. A forked child has no workers and
// an unusable copy of the locks, so it forgets the parent's pool and makes one when it first needs it.
struct Home {
  std::mutex mutex;
  std::shared_ptr<Pool> pool;
  PoolSettings settings;
};

Home* home = nullptr;

void forget_parent() {
  Home* const fresh = new Home;
  fresh->settings = home->settings;
  home = fresh;
}

Home& the_home() {
  static const bool made = [] {
    home = new Home;
    home->settings.threads = available_cores();
    pthread_atfork(nullptr, nullptr, forget_parent);
    return true;
  }();
  (void)made;
  return *home;
}

std::shared_ptr<Pool> the_pool() {
  Home& here = the_home();
  const std::lock_guard<std::mutex> lock(here.mutex);
  if (!here.pool) here.pool = std::make_shared<Pool>(here.settings);
  return here.pool;
}

}  // namespace

int available_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());
}

PoolSettings pool_settings() {
  Home& here = the_home();
  const std::lock_guard<std::mutex> lock(here.mutex);
  return here.settings;
}

void configure_pool(const PoolSettings& settings) {
  if (settings.threads < 1 || settings.threads > 1024) {
    throw std::invalid_argument("threads is " + std::to_string(settings.threads) + "; it must be 1 to 1024");
  }
  if (settings.spin_us < 0 || settings.spin_us > 1000000) {
    throw std::invalid_argument("spin_us is " + std::to_string(settings.spin_us) + "; it must be 0 to 1000000");
  }
  for (int core : settings.cores) {
    if (core < 0 || core >= CPU_SETSIZE) {
      throw std::invalid_argument("cores names " + std::to_string(core) + ", which is no core");
    }
  }
  auto fresh = std::make_shared<Pool>(settings);
  Home& here = the_home();
  const std::lock_guard<std::mutex> lock(here.mutex);
  here.settings = settings;
  here.pool.swap(fresh);  // the old one ends with its last job
}

int pool_threads() {
  Home& here = the_home();
  const std::lock_guard<std::mutex> lock(here.mutex);
  return here.settings.threads;
}

void run_items(int64_t items, ItemFunction function, const void* context) {
  if (items <= 0) return;
  if (items == 1) return function(context, 0);
  the_pool()->run(items, function, context);
}

float* Scratch::floats(int64_t count) {
  if (count > size_) {
    memory_.reset();
    size_ = 0;
    const size_t bytes = (static_cast<size_t>(count) * sizeof(float) + 63) / 64 * 64;
    memory_.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
    if (!memory_) throw std::bad_alloc();
    size_ = count;
  }
  return memory_.get();
}

float* thread_scratch(int64_t floats) {
  static thread_local Scratch kept;
  return kept.floats(floats);
}

}  // namespace paceline
