// Where the time goes: with -DFUSED_PROFILE each FUSED_STAGE measures the rest of the block it stands in, and the
// totals go to stderr at exit. Without the flag nothing of it is compiled.
#pragma once

#ifndef FUSED_PROFILE
#define FUSED_STAGE(name)
#else
#include <atomic>
#include <chrono>
#include <cstdio>

#define FUSED_STAGE(name)                                                          \
  static fused::profile::Stage& profiled_stage = *new fused::profile::Stage(name); \
  const fused::profile::Timer profiled_timer(profiled_stage)

namespace fused::profile {

struct Stage {
  const char* name;
  std::atomic<int64_t> nanoseconds{0};
  std::atomic<int64_t> calls{0};
  Stage* previous;

  static inline std::atomic<Stage*> newest{nullptr};
  explicit Stage(const char* name) : name(name), previous(newest.load()) {
    while (!newest.compare_exchange_weak(previous, this)) {
    }
  }
};

class Timer {
  using Clock = std::chrono::steady_clock;
  Stage& stage_;
  const Clock::time_point start_ = Clock::now();

 public:
  explicit Timer(Stage& stage) : stage_(stage) {}
  ~Timer() {
    stage_.nanoseconds += std::chrono::nanoseconds(Clock::now() - start_).count();
    stage_.calls++;
  }
};

struct Report {
  ~Report() {
    double total = 0;
    for (const Stage* s = Stage::newest; s; s = s->previous) total += double(s->nanoseconds);
    print(Stage::newest, total);
  }
  static void print(const Stage* s, double total) {
    if (!s) return;
    print(s->previous, total);
    std::fprintf(stderr, "%5.1f %% %8.0f ns a call  %s\n", 100 * double(s->nanoseconds) / total,
                 double(s->nanoseconds) / double(s->calls), s->name);
  }
};
inline const Report report_at_exit;

}  // namespace fused::profile
#endif
