// A worker without a network or a clock: the machine, applying at once whatever is ready.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>
#include <weightbus/machine.hpp>

namespace weightbus {

class Player {
 public:
  struct Setting {
    std::vector<std::string> models = {"m"};
    std::uint64_t bytes_max = kStagingBytesMax;
    Accepts accepts = [](const std::string&, const Layout&) { return std::string(); };
    Opens opens = [](const Shared&, std::uint64_t) { return SharedMemoryPtr(); };
    bool apply = true;  // at once
  };

  explicit Player(Setting setting)
      : setting_(std::move(setting)),
        machine_({"w", std::string(32, '0'), "", "", 0}, wanted(setting_), setting_.accepts,
                 setting_.opens, setting_.bytes_max) {}

  double now = 1000;
  std::vector<FromWorker> sent;
  std::vector<Effect> others;    // effects but messages and what was applied
  std::vector<StagedPtr> ready;  // what was not applied, since `apply` is off
  std::map<std::string, std::uint64_t> runs;
  std::map<std::string, std::string> bytes;  // of what runs

  WorkerMachine& machine() { return machine_; }

  void control(const Frames& frames) { perform(machine_.receive(frames, now)); }

  // A published message, its topic left out.
  void data(const Frames& frames) {
    Frames with_topic{Bytes(std::string_view("m/ctl"))};
    with_topic.insert(with_topic.end(), frames.begin(), frames.end());
    perform(machine_.receive_published(with_topic, now));
  }

  void wait(double seconds) {
    const double until = now + seconds;
    while (now < until) {
      now = std::min(until, now + 0.1);
      perform(machine_.connected(now));
      perform(machine_.tick(now));
    }
  }

  void perform(Effects effects) {
    for (Effect& effect : effects) {
      if (auto* send = std::get_if<Send>(&effect)) {
        sent.push_back(std::move(send->message));
      } else if (auto* done = std::get_if<Ready>(&effect)) {
        setting_.apply ? apply(*done->staged) : ready.push_back(std::move(done->staged));
      } else {
        others.push_back(std::move(effect));
      }
    }
  }

  // Copies a version under its segment's lock, if it lies in one.
  void apply(const StagedVersion& staged) {
    const std::string model = staged.model;
    const Key key = staged.key;
    if (staged.shared && !staged.shared->begin(staged.stamp())) {
      return perform(machine_.stale(model, key, now));
    }
    std::string copied(staged.data().text());
    std::string digest;
    if (staged.hash_chunks > 0) {
      digest = digest_of(staged.layout->id(), staged.data(), staged.hash_chunks);
    }
    if (staged.shared && !staged.shared->end(staged.stamp())) {
      return perform(machine_.failed(model, key, "overwritten while it was copied", now, false));
    }
    runs[model] = key.second;
    bytes[model] = std::move(copied);
    perform(machine_.applied(model, key, now, digest));
  }

 private:
  static WorkerMachine::Models wanted(const Setting& setting) {
    WorkerMachine::Models models;
    for (const std::string& model : setting.models) models[model] = 0;
    return models;
  }

  Setting setting_;
  WorkerMachine machine_;
};

}  // namespace weightbus
