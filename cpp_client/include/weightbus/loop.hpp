// The worker's thread: it owns the sockets, moves frames, and lets the machine decide.
//
// What is ready to be applied goes to the `Handoff`; what the user's thread did with it comes back
// through `taken`, `applied`, `stale` and `failed`.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <variant>

#include "control.hpp"
#include "descriptor.hpp"
#include "effects.hpp"
#include "endpoints.hpp"
#include "handoff.hpp"
#include "machine.hpp"
#include "state.hpp"
#include "subscription.hpp"

namespace weightbus {

class Loop {
 public:
  // Applies a version in the worker's thread; false if it is to be left for other threads.
  using AtOnce = std::function<bool(const StagedPtr&)>;

  Loop(WorkerMachine machine, std::unique_ptr<Control> control, Endpoint address,
       std::shared_ptr<Handoff> handoff, AtOnce at_once)
      : machine_(std::move(machine)),
        control_(std::move(control)),
        address_(std::move(address)),
        handoff_(std::move(handoff)),
        at_once_(std::move(at_once)),
        subscription_(
            [this](Bytes header, std::size_t size) { return machine_.place(header, size); },
            [this](const Frames& frames) { perform(machine_.receive_published(frames, now())); },
            bell_),
        thread_([this] { run(); }) {}

  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;
  ~Loop() { close(); }

  // For any thread.

  // A version is about to be applied. (No hurry: it only serves those who ask.)
  void taken(const std::string& model, Key key) {
    enqueue([=](double) {
      machine_.taken(model, key);
      return Effects{};
    });
  }

  // A version was applied; its bytes hash to this, if they were hashed. Whoever calls this holds
  // the version no more: its buffer serves the next one.
  void applied(const std::string& model, Key key, const std::string& digest) {
    hand_over([=](double now) { return machine_.applied(model, key, now, digest); });
  }

  // A version was gone from shared memory before it could be applied.
  void stale(const std::string& model, Key key) {
    hand_over([=](double now) { return machine_.stale(model, key, now); });
  }

  // A version could not be applied; the one before it still runs, if the model is intact.
  void failed(const std::string& model, Key key, const std::string& text, bool intact) {
    hand_over([=](double now) { return machine_.failed(model, key, text, now, intact); });
  }

  // A version will not be applied, since a newer one was.
  void dropped(const std::string& model, Key key) {
    hand_over([=](double now) { return machine_.dropped(model, key, now); });
  }

  // How things stood a moment ago.
  State state() const {
    const std::lock_guard guard(mutex_);
    return state_;
  }

  // Says goodbye and ends the thread. Calling it twice, or from two threads, is fine.
  void close() {
    stopping_ = true;
    bell_->ring();
    const std::lock_guard guard(closing_);
    if (thread_.joinable()) thread_.join();
  }

 private:
  using Work = std::function<Effects(double now)>;

  static constexpr double kTickSeconds = 0.1;  // between two looks at the clock
  static constexpr int kBatch = 16;            // control messages taken before the data gets a turn

  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  void enqueue(Work work) {
    const std::lock_guard guard(mutex_);
    work_.push_back(std::move(work));
  }

  void hand_over(Work work) {
    enqueue(std::move(work));
    if (std::this_thread::get_id() != thread_id_.load()) bell_->ring();
  }

  // For the thread itself.

  void run() {
    thread_id_ = std::this_thread::get_id();
    while (!stopping_) {
      try {
        turn();
      } catch (const std::exception& error) {  // no memory for what a peer has sent
        note({Event::Kind::kNotice, "", 0, 0, "", "system", error.what()});
      }
    }
    do_work();
    perform(machine_.close());
    subscription_.disconnect();
    control_.reset();
    handoff_->close();
  }

  // Takes what there is, ticks when it is time.
  void turn() {
    subscription_.attend(now());
    const Control::Activity activity =
        control_->wait(*bell_, machine_.wants_hello(now()), subscription_.descriptor(),
                       subscription_.unsent(), next_tick_ - now());
    do_work();
    if (activity.writable) perform(machine_.connected(now()));
    if (activity.control) take_control();
    const bool due = now() >= next_tick_;
    // What is here of a chunk tells that more will come, though too little is here to wake us.
    if (activity.other || due) subscription_.receive(now());
    if (!due) return;
    if (control_->changed()) machine_.changed(now());
    perform(machine_.tick(now()));
    next_tick_ = now() + kTickSeconds;
    publish_state();
  }

  void take_control() {
    for (int i = 0; i < kBatch; ++i) {
      const Frames frames = control_->receive();
      if (frames.empty()) return;
      perform(machine_.receive(frames, now()));
    }
  }

  void do_work() {
    while (true) {
      Work work;
      {
        const std::lock_guard guard(mutex_);
        if (work_.empty()) return;
        work = std::move(work_.front());
        work_.pop_front();
      }
      perform(work(now()));
    }
  }

  void perform(Effects effects) {
    for (Effect& effect : effects) {
      std::visit([this](auto& one) { perform_one(one); }, effect);
    }
  }

  void perform_one(Send& send) { control_->send(encode(send.message)); }

  void perform_one(Subscribe& subscribe) { subscription_.subscribe(subscribe.topic, subscribe.on); }

  void perform_one(ConnectData& connect) {
    const Result<Endpoint> endpoint = Endpoint::resolve(connect.endpoint, address_);
    if (endpoint) return subscription_.connect(*endpoint);
    subscription_.disconnect();  // everything can still be fetched
    note({Event::Kind::kNotice, "", 0, 0, "", endpoint.error().code, endpoint.error().text});
  }

  void perform_one(Redial&) {
    control_->redial();
    subscription_.redial();
  }

  void perform_one(Ready& ready) {
    if (at_once_(ready.staged)) {
      ready.staged.reset();
      return do_work();  // what became of it
    }
    const StagedPtr older = handoff_->put(std::move(ready.staged));
    if (older) perform(machine_.dropped(older->model, older->key, now()));
  }

  void perform_one(Joined& joined) {
    publish_state();
    note({Event::Kind::kJoined, "", joined.epoch, 0, "", "", ""});
  }

  void perform_one(Rejected& rejected) {
    const auto [epoch, version] = rejected.key;
    note({Event::Kind::kFailed, rejected.model, epoch, version, "", rejected.code, rejected.text});
  }

  void perform_one(Refused& refused) {
    note({Event::Kind::kRefused, "", machine_.epoch(), 0, "", refused.code, refused.text});
  }

  void perform_one(Notice& notice) {
    const auto kind = notice.code == "lost" ? Event::Kind::kLost : Event::Kind::kNotice;
    note({kind, "", machine_.epoch(), 0, "", notice.code, notice.text});
  }

  void note(Event event) { handoff_->note(std::move(event)); }

  void publish_state() {
    State state;
    state.epoch = machine_.epoch();
    state.subscribed = machine_.subscribed();
    state.shared = machine_.shared();
    state.malformed = machine_.malformed();
    state.data_fault = subscription_.fault();
    for (const auto& [model, slot] : machine_.slots()) {
      const Slot::Status status = slot.status();
      state.models[model] = {{},           status.arriving, status.staged,
                             status.ready, status.chunks,   status.catching_up};
    }
    const std::lock_guard guard(mutex_);
    state_ = std::move(state);
  }

  WorkerMachine machine_;
  std::unique_ptr<Control> control_;
  const Endpoint address_;
  const std::shared_ptr<Handoff> handoff_;
  const AtOnce at_once_;
  const std::shared_ptr<Bell> bell_ = std::make_shared<Bell>();
  Subscription subscription_;
  double next_tick_ = 0;

  mutable std::mutex mutex_;  // of the two below
  std::deque<Work> work_;
  State state_;

  std::mutex closing_;
  std::atomic<bool> stopping_{false};
  std::atomic<std::thread::id> thread_id_{};
  std::thread thread_;  // the last: it uses all of the above
};

}  // namespace weightbus
