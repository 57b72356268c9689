// The thread pool behind parallel.h.
//
// Threads start at the first parallel call and stay. The pool is never destroyed: its threads sleep until the process ends, so no
// destructor can race with a library that still uses it. After fork() the child has no threads but a copy of the pool's memory;
// the child handler therefore drops that copy (leaking it, since its locks may be held by threads that do not exist there) and the
// next parallel call starts a new pool.
#include "parallel.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "tensor.h"

namespace te {
namespace {

int64_t available_processors() {
#if defined(__linux__)
  // The set may be larger than cpu_set_t on big machines; grow until the kernel accepts it.
  for (int bits = 1024; bits <= (1 << 16); bits *= 2) {
    cpu_set_t* set = CPU_ALLOC(bits);
    if (set == nullptr) break;
    const size_t size = CPU_ALLOC_SIZE(bits);
    const bool ok = sched_getaffinity(0, size, set) == 0;
    const int count = ok ? CPU_COUNT_S(size, set) : 0;
    CPU_FREE(set);
    if (ok) return count > 0 ? count : 1;
  }
#endif
  const unsigned count = std::thread::hardware_concurrency();
  return count > 0 ? count : 1;
}

struct Job {
  const std::function<void(int64_t)>* task = nullptr;
  int64_t count = 0;
  int64_t helpers = 0;  // how many pool threads may take part
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> joined{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  std::mutex error_mutex;
};

thread_local bool inside_task = false;

void run_tasks(Job& job) {
  inside_task = true;
  for (;;) {
    const int64_t i = job.next.fetch_add(1, std::memory_order_relaxed);
    if (i >= job.count || job.failed.load(std::memory_order_relaxed)) break;
    try {
      (*job.task)(i);
    } catch (...) {
      std::lock_guard<std::mutex> lock(job.error_mutex);
      if (!job.error) job.error = std::current_exception();
      job.failed.store(true, std::memory_order_relaxed);
    }
  }
  inside_task = false;
}

class Pool {
 public:
  // One caller at a time owns the pool; another Python thread waits here for its turn.
  void run(Job& job, int64_t helpers) {
    std::lock_guard<std::mutex> owner(owner_mutex_);
    while (int64_t(workers_) < helpers) {
      std::thread([this] { work(); }).detach();
      ++workers_;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job.helpers = helpers;
      job_ = &job;
      active_ = 0;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    run_tasks(job);
    // No thread may join any more; wait for those that did, since job lives on this stack.
    std::unique_lock<std::mutex> lock(mutex_);
    job_ = nullptr;
    for (int spin = 0; active_ != 0 && spin < kSpins; ++spin) {
      lock.unlock();
      relax();
      lock.lock();
    }
    done_.wait(lock, [this] { return active_ == 0; });
  }

 private:
  static constexpr int kSpins = 2000;  // tens of microseconds: short calls then need no trip through the kernel

  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  void work() {
    uint64_t seen = 0;
    for (;;) {
      for (int spin = 0; spin < kSpins && generation_.load(std::memory_order_acquire) == seen; ++spin) relax();
      Job* job = nullptr;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
        seen = generation_.load(std::memory_order_relaxed);
        if (job_ != nullptr && job_->joined.load(std::memory_order_relaxed) < job_->helpers) {
          job = job_;
          job->joined.fetch_add(1, std::memory_order_relaxed);
          ++active_;
        }
      }
      if (job == nullptr) continue;
      run_tasks(*job);
      std::lock_guard<std::mutex> lock(mutex_);
      if (--active_ == 0) done_.notify_one();
    }
  }

  std::mutex owner_mutex_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::atomic<uint64_t> generation_{0};
  Job* job_ = nullptr;
  int64_t active_ = 0;
  int64_t workers_ = 0;  // guarded by owner_mutex_
};

std::atomic<Pool*> pool{nullptr};
std::atomic<int64_t> num_threads{0};  // 0: not asked yet

void forget_pool_in_child() {
  pool.store(nullptr);
  inside_task = false;
}

Pool& the_pool() {
  Pool* current = pool.load(std::memory_order_acquire);
  if (current != nullptr) return *current;
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool_in_child);
  (void)registered;
  Pool* fresh = new Pool;
  if (pool.compare_exchange_strong(current, fresh)) return *fresh;
  delete fresh;  // another thread was first
  return *current;
}

}  // namespace

int64_t get_num_threads() {
  int64_t n = num_threads.load(std::memory_order_relaxed);
  if (n == 0) {
    n = available_processors();
    num_threads.store(n, std::memory_order_relaxed);
  }
  return n;
}

void set_num_threads(int64_t threads) {
  TE_CHECK(threads >= 1 && threads <= 1024, "threads is " << threads << "; expected 1 to 1024");
  num_threads.store(threads, std::memory_order_relaxed);
}

void parallel_for(int64_t count, const std::function<void(int64_t)>& task) {
  if (count <= 0) return;
  const int64_t threads = inside_task ? 1 : (get_num_threads() < count ? get_num_threads() : count);
  if (threads == 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  Job job;
  job.task = &task;
  job.count = count;
  the_pool().run(job, threads - 1);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace te
