// A lock that many may hold together, or one alone. Who wants it alone keeps new ones out, so it never starves. Not
// reentrant.
#pragma once
#include <condition_variable>
#include <mutex>

namespace everstep {

class Gate {
 public:
  // False: somebody has it alone, or waits for that. Never blocks.
  bool try_enter() {
    std::lock_guard<std::mutex> hold(mutex_);
    if (alone_) return false;
    ++inside_;
    return true;
  }
  void enter() {
    std::unique_lock<std::mutex> hold(mutex_);
    changed_.wait(hold, [&] { return !alone_; });
    ++inside_;
  }
  void leave() {
    std::lock_guard<std::mutex> hold(mutex_);
    if (!--inside_ && alone_) changed_.notify_all();
  }
  void enter_alone() {
    std::unique_lock<std::mutex> hold(mutex_);
    changed_.wait(hold, [&] { return !alone_; });
    alone_ = true;
    changed_.wait(hold, [&] { return !inside_; });
  }
  void leave_alone() {
    std::lock_guard<std::mutex> hold(mutex_);
    alone_ = false;
    changed_.notify_all();
  }

  class Shared {
   public:
    explicit Shared(Gate& gate) : gate_(gate) { gate_.enter(); }
    ~Shared() { gate_.leave(); }
    Shared(const Shared&) = delete;
    Shared& operator=(const Shared&) = delete;

   private:
    Gate& gate_;
  };

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int inside_ = 0;
  bool alone_ = false;
};

}  // namespace everstep
