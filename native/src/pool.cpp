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

// The items of a job that one thread has first claim to: neighbours, which lie side by side in memory. One word holds the
// job's number (upper half), the first item not taken and the end of those not taken: a thread that is late finds either
// nothing left or a job that cannot end before the item it took.
struct alignas(64) Share {
  std::atomic<uint64_t> left{0};
};

constexpr uint64_t kFirst = uint64_t{1} << 16, kEnd = 1, kMostItems = kFirst - 1, kOneJob = uint64_t{1} << 32;

bool has_items(uint64_t left) { return ((left / kFirst) & kMostItems) < (left & kMostItems); }

class Pool {
 public:
  explicit Pool(PoolSettings settings)
      : settings_(std::move(settings)), shares_(new Share[static_cast<size_t>(settings_.threads)]) {
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
    const int64_t most = int64_t{kMostItems} * settings_.threads;
    for (; items > most; --items) function(context, items - 1);  // never in practice
    function_ = function;
    context_ = context;
    items_ = items;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t job = job_.load(std::memory_order_relaxed) + kOneJob;
    for (int share = 0; share < settings_.threads; ++share) {
      const auto count = static_cast<uint64_t>(first_of(share + 1) - first_of(share));
      shares_[static_cast<size_t>(share)].left.store(job | count * kEnd, std::memory_order_release);
    }
    job_.store(job);  // sequentially consistent, with sleepers_ below
    if (sleepers_.load() > 0) {
      const std::lock_guard<std::mutex> lock(sleep_mutex_);
      wake_.notify_all();
    }
    take_items(0);
    for (int spins = 0; done_.load(std::memory_order_acquire) < items; ++spins) {
      if (spins < 2000) {
        relax();
      } else {
        sched_yield();  // a worker that holds an item may need this core
      }
    }
  }

 private:
  // The first item of a share.
  int64_t first_of(int share) const { return (share * items_ + settings_.threads - 1) / settings_.threads; }

  // Runs items until none is left: this thread's own in order, as weights are read ahead, then others' from their ends.
  void take_items(int index) {
    empty(index, true);
    for (int i = 1; i < settings_.threads; ++i) empty((index + i) % settings_.threads, false);
  }

  void empty(int share, bool forwards) {
    std::atomic<uint64_t>& left = shares_[static_cast<size_t>(share)].left;
    uint64_t seen = left.load(std::memory_order_acquire);
    while (has_items(seen)) {
      const uint64_t next = forwards ? seen + kFirst : seen - kEnd;
      if (!left.compare_exchange_weak(seen, next, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      // The job lives until this item is counted, so its fields are ours to read.
      const uint64_t item = forwards ? (seen / kFirst) & kMostItems : next & kMostItems;
      function_(context_, first_of(share) + static_cast<int64_t>(item));
      done_.fetch_add(1, std::memory_order_release);
      seen = left.load(std::memory_order_acquire);
    }
  }

  void work(int index) {
    pin(index);
    uint64_t seen = 0;
    while (!stop_.load(std::memory_order_relaxed)) {
      const uint64_t job = job_.load(std::memory_order_acquire);
      if (job != seen) {
        seen = job;
        take_items(index);
      } else if (!spin(seen)) {
        sleep(seen);
      }
    }
  }

  // True as soon as there is another job.
  bool spin(uint64_t seen) {
    const Clock::time_point until = Clock::now() + std::chrono::microseconds(settings_.spin_us);
    do {
      for (int i = 0; i < 32; ++i) {
        if (job_.load(std::memory_order_relaxed) != seen) return true;
        relax();
      }
    } while (Clock::now() < until);
    return false;
  }

  void sleep(uint64_t seen) {
    std::unique_lock<std::mutex> lock(sleep_mutex_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, [this, seen] { return stop_.load() || job_.load() != seen; });
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
  const std::unique_ptr<Share[]> shares_;
  std::vector<std::thread> workers_;
  std::mutex job_mutex_;  // whose job it is
  ItemFunction function_ = nullptr;
  const void* context_ = nullptr;
  int64_t items_ = 0;
  alignas(64) std::atomic<uint64_t> job_{0};  // the number of the last one, in the upper half as in shares
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
