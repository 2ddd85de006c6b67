// What a worker applies versions to, in the user's thread or in the background; what the threads
// share stays in one place here, while the `Worker` itself may be moved.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "digest.hpp"
#include "handoff.hpp"
#include "layout.hpp"
#include "loop.hpp"
#include "reading_lock.hpp"
#include "result.hpp"
#include "snapshot.hpp"
#include "staging.hpp"
#include "state.hpp"
#include "tensor.hpp"

namespace weightbus {

struct Applier {
  using Deadline = std::chrono::steady_clock::time_point;

  static constexpr std::uint64_t kAtOnceBytes = 1 << 20;  // copied sooner than a thread wakes up

  // A model: in place, or as snapshots.
  struct Model {
    std::optional<Target> target;
    std::shared_ptr<Shelf> shelf = Shelf::make();  // for snapshots of shared memory
  };

  std::string name;
  std::map<std::string, Model> models;
  ReadingLock lock;  // held exclusively while weights change
  std::shared_ptr<Handoff> handoff = std::make_shared<Handoff>();
  std::atomic<bool> in_background{false};

  mutable std::mutex mutex;  // of the three below
  mutable std::condition_variable applied;
  std::map<std::string, Update> running;
  std::map<std::string, std::shared_ptr<const Snapshot>> snapshots;

  std::unique_ptr<Loop> loop;
  std::thread background;

  ~Applier() { close(); }

  void close() {
    if (loop) loop->close();
    handoff->close();
    const std::lock_guard guard(closing);
    if (background.joinable()) background.join();
  }

  // By the worker's thread, of layouts that were announced.
  std::string difference(const std::string& model, const Layout& layout) const {
    const Model& kept = models.at(model);
    return kept.target ? kept.target->difference(layout) : "";
  }

  std::optional<Update> find_running(const std::string& model) const {
    const auto found = running.find(model);
    return found == running.end() ? std::nullopt : std::optional(found->second);
  }

  Result<std::optional<Update>> receive(Deadline deadline) {
    while (true) {
      Result<StagedPtr> staged = handoff->take(deadline);
      if (!staged) return staged.error();
      if (!*staged) return std::optional<Update>();
      std::unique_lock writing(lock, std::defer_lock);
      if (!writing.try_lock_until(deadline)) {  // somebody reads and does not leave: later, then
        if (!handoff->put_back(*staged)) loop->dropped((*staged)->model, (*staged)->key);
        return std::optional<Update>();
      }
      std::optional<Update> update = apply(std::move(*staged));
      if (update) return update;
    }
  }

  void start() {
    const std::lock_guard guard(closing);
    if (in_background.exchange(true)) return;
    background = std::thread([this] {
      while (true) {
        const auto outcome = receive(std::chrono::steady_clock::now() + std::chrono::hours(1));
        if (!outcome && outcome.error().code == "closed") return;
      }
    });
  }

  // In the worker's thread: a small version is there sooner than another thread is awake.
  bool apply_at_once(const StagedPtr& staged) {
    if (!in_background || staged->layout->nbytes() > kAtOnceBytes) return false;
    std::unique_lock writing(lock, std::defer_lock);
    if (!writing.try_lock_until(std::chrono::steady_clock::now())) return false;
    apply(staged);
    return true;
  }

  // Under the lock. Nothing if the version was overtaken, or has gone from shared memory.
  std::optional<Update> apply(StagedPtr staged) {
    const std::string model = staged->model;
    const Key key = staged->key;
    const std::optional<Update> before = this->before(model);
    if (before && Key{before->epoch, before->version} >= key) {
      staged.reset();
      loop->dropped(model, key);
      return {};
    }
    loop->taken(model, key);
    const auto started = std::chrono::steady_clock::now();
    Update update{model, key.first, key.second, staged->layout->nbytes(), staged->digest, 0};
    const Outcome outcome = put_in(*staged, update);
    staged.reset();  // its buffer serves the next version from here on
    if (outcome == Outcome::kStale) {
      loop->stale(model, key);
      return {};
    }
    if (outcome == Outcome::kTorn) {
      forget_running(model);
      return fail(model, key, false, "it was overwritten while it was copied: no version runs");
    }
    if (outcome == Outcome::kNoMemory) {
      return fail(model, key, true,
                  "there is no memory for a snapshot of " + std::to_string(update.nbytes) +
                      " bytes: let go of older ones");
    }
    update.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
    tell(update);
    return update;
  }

  std::nullopt_t fail(const std::string& model, Key key, bool intact, const std::string& text) {
    handoff->note({Event::Kind::kFailed, model, key.first, key.second, "", "apply", text});
    loop->failed(model, key, text, intact);
    return std::nullopt;
  }

  void forget_running(const std::string& model) {
    const std::lock_guard guard(mutex);
    running.erase(model);
  }

  // Here first, then at the publisher: whoever waits for its receipt must find it here.
  void tell(const Update& update) {
    {
      const std::lock_guard guard(mutex);
      running[update.model] = update;
      applied.notify_all();
    }
    handoff->note(
        {Event::Kind::kApplied, update.model, update.epoch, update.version, update.digest, "", ""});
    loop->applied(update.model, {update.epoch, update.version}, update.digest);
  }

  std::optional<Update> before(const std::string& model) const {
    const std::lock_guard guard(mutex);
    return find_running(model);
  }

  enum class Outcome { kApplied, kStale, kTorn, kNoMemory };

  // Copies a version to where it belongs, under the segment's lock if it lies in one.
  Outcome put_in(const StagedVersion& staged, Update& update) {
    const Stamp stamp = staged.stamp();
    if (staged.shared && !staged.shared->begin(stamp)) return Outcome::kStale;
    BufferPtr held = staged.buffer;
    const bool room = models.at(staged.model).target ? copy_in_place(staged) : hold(staged, held);
    if (room && staged.hash_chunks > 0) {
      update.digest = digest_of(staged.layout->id(), staged.data(), staged.hash_chunks);
    }
    if (staged.shared && !staged.shared->end(stamp)) {  // S5; a copy beside the model is dropped
      return models.at(staged.model).target ? Outcome::kTorn : Outcome::kStale;
    }
    if (!room) return Outcome::kNoMemory;
    if (!models.at(staged.model).target) keep(staged, std::move(held), update.digest);
    return Outcome::kApplied;
  }

  bool copy_in_place(const StagedVersion& staged) {
    models.at(staged.model).target->copy(staged.layout, staged.data());
    return true;
  }

  // A snapshot of what was received is that buffer itself; one of shared memory is a copy.
  bool hold(const StagedVersion& staged, BufferPtr& held) {
    if (!staged.shared) return true;
    held = models.at(staged.model).shelf->take(staged.layout->nbytes());
    if (held == nullptr) return false;
    const Bytes data = staged.data();
    if (data.size > 0) std::memcpy(held->bytes().data, data.data, data.size);
    return true;
  }

  void keep(const StagedVersion& staged, BufferPtr held, const std::string& digest) {
    auto snapshot = std::make_shared<const Snapshot>(staged.model, staged.key, digest,
                                                     staged.layout, std::move(held));
    const std::lock_guard guard(mutex);
    std::swap(snapshots[staged.model], snapshot);
  }

  std::mutex closing;  // of `background`
};

}  // namespace weightbus
