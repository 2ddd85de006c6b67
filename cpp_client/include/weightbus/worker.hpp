// A worker: it receives the versions of some models and applies them.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "applier.hpp"
#include "control.hpp"
#include "endpoints.hpp"
#include "loop.hpp"
#include "machine.hpp"
#include "reading_lock.hpp"
#include "result.hpp"
#include "segment.hpp"
#include "snapshot.hpp"
#include "state.hpp"
#include "tensor.hpp"

namespace weightbus {

struct Options {
  std::string name;  // unique among the publisher's workers; empty: host, process, a random suffix
  bool shared_memory = true;  // read versions from the publisher's memory where it is on this host
  std::uint64_t bytes_max = kStagingBytesMax;  // the largest version to accept
  Timing timing;

  // Versions of this model are copied into these tensors.
  Options& in_place(std::string model, std::vector<Tensor> tensors) {
    models.emplace_back(std::move(model), std::move(tensors));
    return *this;
  }

  // Versions of this model are handed out as snapshots.
  Options& snapshots(std::string model) {
    models.emplace_back(std::move(model), std::nullopt);
    return *this;
  }

  std::vector<std::pair<std::string, std::optional<std::vector<Tensor>>>> models;
};

// Versions are received in the background at all times. They are applied either where `receive()`
// is called, or, after `start()`, in the background. Any thread may call any method.
class Worker {
 public:
  using Duration = std::chrono::steady_clock::duration;

  // The publisher need not be there yet. Codes: "address", "model", "name", "options", "tensor",
  // "system".
  static Result<Worker> connect(const std::string& address, Options options);

  Worker(Worker&&) noexcept = default;
  Worker& operator=(Worker&&) noexcept = default;
  ~Worker() = default;  // closes

  const std::string& name() const { return applier_->name; }

  // Applies the newest version that has arrived, waiting for one if need be, and returns what was
  // applied; nothing if none came in time. It is applied in this thread, in place: call it where
  // nobody uses the weights, or let everybody read under `reading()`.
  //
  // An error says that a version was not taken (the weights are as they were), that the publisher
  // refuses this worker ("name-taken", ...; it goes on asking), or that the worker is closed
  // ("closed"). Each is returned once.
  Result<std::optional<Update>> receive(Duration timeout) {
    if (applier_->in_background) {
      return Error{"options", "worker " + name() +
                                  " applies in the background since start(); use " +
                                  "wait_for_version() and reading()"};
    }
    return applier_->receive(after(timeout));
  }

  // Applies versions in the background from now on, whenever nobody reads. What goes wrong stands
  // in `events()`; the weights then stay as they were.
  void start() { applier_->start(); }

  // Keeps the weights as they are for as long as it is held. Not twice in one thread.
  std::shared_lock<ReadingLock> reading() { return std::shared_lock(applier_->lock); }

  // The newest snapshot of a model that is not registered; null before its first version.
  std::shared_ptr<const Snapshot> snapshot(const std::string& model) const {
    const std::lock_guard guard(applier_->mutex);
    const auto found = applier_->snapshots.find(model);
    return found == applier_->snapshots.end() ? nullptr : found->second;
  }

  // What a model runs; nothing before its first version.
  std::optional<Update> running(const std::string& model) const {
    const std::lock_guard guard(applier_->mutex);
    return applier_->find_running(model);
  }

  // Waits until a model runs this version or a newer one; nothing when the time is over.
  std::optional<Update> wait_for_version(const std::string& model, std::uint64_t version,
                                         Duration timeout) const {
    std::unique_lock guard(applier_->mutex);
    applier_->applied.wait_until(guard, after(timeout), [&] {
      const auto update = applier_->find_running(model);
      return update && update->version >= version;
    });
    std::optional<Update> update = applier_->find_running(model);
    return update && update->version >= version ? update : std::nullopt;
  }

  // Waits until the publisher has let this worker in; whether it has.
  bool wait_joined(Duration timeout) const {
    return applier_->handoff->wait_joined(after(timeout));
  }

  // How things stand, for operators.
  State state() const {
    State state = applier_->loop->state();
    state.joined = applier_->handoff->joined();
    state.refusal = applier_->handoff->refused();
    const std::lock_guard guard(applier_->mutex);
    for (const auto& [model, update] : applier_->running) state.models[model].running = update;
    return state;
  }

  // What has happened since the last call (the last 256 things).
  std::vector<Event> events() { return applier_->handoff->events(); }

  // Says goodbye. Whoever waits in `receive()` is told "closed".
  void close() { applier_->close(); }

 private:
  // (A year, at most: the clock cannot count Duration::max() from now on.)
  static std::chrono::steady_clock::time_point after(Duration timeout) {
    return std::chrono::steady_clock::now() +
           std::min<Duration>(timeout, std::chrono::hours(24 * 365));
  }

  explicit Worker(std::unique_ptr<Applier> applier) : applier_(std::move(applier)) {}

  std::unique_ptr<Applier> applier_;
};

namespace worker_detail {

inline std::string host_name() {
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  return host;
}

inline std::string random_hex(int digits) {
  std::random_device device;  // the kernel's
  std::string text;
  for (int i = 0; i < digits; ++i) text.push_back("0123456789abcdef"[device() & 15]);
  return text;
}

inline std::string default_name() {
  std::string host = host_name().substr(0, 80);
  for (char& c : host) {
    if (!is_name(std::string_view(&c, 1))) c = '-';
  }
  return host + "-" + std::to_string(getpid()) + "-" + random_hex(4);
}

inline std::optional<Error> fault(const Options& options) {
  const Timing& timing = options.timing;
  if (!is_name(options.name)) {
    return Error{"name", "worker '" + options.name + "': a name is 1 to 128 of the characters " +
                             "A-Z a-z 0-9 . _ -"};
  }
  if (options.models.empty() || options.models.size() > kModelsMax) {
    return Error{"model", std::to_string(options.models.size()) +
                              " models; a worker takes 1 to 64: add them with in_place() or " +
                              "snapshots()"};
  }
  if (!(timing.ping > 0) || timing.lost_after < 2 * timing.ping) {
    return Error{"options",
                 "timing: choose a ping above zero, and lost_after of at least twice " +
                     std::string("that, since a publisher needs two chances to be heard")};
  }
  return {};
}

}  // namespace worker_detail

inline Result<Worker> Worker::connect(const std::string& address, Options options) {
  if (options.name.empty()) options.name = worker_detail::default_name();
  if (auto fault = worker_detail::fault(options)) return *fault;
  const Result<Endpoint> endpoint = Endpoint::parse(address);
  if (!endpoint) return endpoint.error();
  auto applier = std::make_unique<Applier>();
  Applier* const kept = applier.get();
  kept->name = options.name;
  WorkerMachine::Models sizes;
  for (auto& [model, tensors] : options.models) {
    if (!is_name(model) || kept->models.count(model) == 1) {
      return Error{"model", "model '" + model +
                                "' is named twice, or its name is not 1 to 128 of " +
                                "the characters A-Z a-z 0-9 . _ -"};
    }
    if (tensors) {
      Result<Target> target = Target::of(std::move(*tensors));
      if (!target) return Error{"tensor", model + ": " + target.error().text};
      sizes[model] = target->nbytes();
      kept->models[model].target = std::move(*target);
    } else {
      sizes[model] = 0;
      kept->models[model];
    }
  }
  Result<std::unique_ptr<Control>> control = Control::connect(address);
  if (!control) return control.error();
  const Identity identity{options.name, worker_detail::random_hex(32), "weightbus-cpp/0.1.0",
                          worker_detail::host_name(), static_cast<std::uint64_t>(getpid())};
  const Accepts accepts = [kept](const std::string& model, const Layout& layout) {
    return kept->difference(model, layout);
  };
  Opens opens = [](const Shared&, std::uint64_t) -> SharedMemoryPtr { return nullptr; };
  if (options.shared_memory) {
    opens = [segments = std::make_shared<Segments>()](const Shared& shared, std::uint64_t nbytes) {
      return segments->open(shared, nbytes);
    };
  }
  WorkerMachine machine(identity, std::move(sizes), accepts, std::move(opens), options.bytes_max,
                        options.timing);
  kept->loop = std::make_unique<Loop>(
      std::move(machine), std::move(*control), *endpoint, kept->handoff,
      [kept](const StagedPtr& staged) { return kept->apply_at_once(staged); });
  return Worker(std::move(applier));
}

}  // namespace weightbus
