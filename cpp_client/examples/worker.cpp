// Predicts with the newest weights, and prints which version it runs.
//
//     build/worker tcp://localhost:5555 --name w0 --patience 30
//
// The counterpart of examples/numpy_worker.py; examples/numpy_trainer.py publishes to both.
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <iostream>
#include <string>
#include <vector>
#include <weightbus/weightbus.hpp>

namespace {

using Clock = std::chrono::steady_clock;

std::atomic<bool> stop{false};

void print(const std::string& name, const weightbus::Update& update, double prediction) {
  std::cout << "{\"worker\":\"" << name << "\",\"version\":" << update.version
            << ",\"prediction\":" << std::round(prediction * 1e4) / 1e4 << ",\"digest\":\""
            << update.digest << "\"}" << std::endl;
}

int usage() {
  std::cerr << "usage: worker ADDRESS[,ADDRESS...] [--name NAME] [--patience SECONDS]\n";
  return 2;
}

}  // namespace

int main(int count, char** values) {
  const std::vector<std::string> words(values + 1, values + count);
  if (words.size() % 2 == 0) return usage();
  weightbus::Options options;
  double patience = 30;
  for (std::size_t i = 1; i + 1 < words.size(); i += 2) {
    if (words[i] == "--name") {
      options.name = words[i + 1];
    } else if (words[i] == "--patience") {
      patience = std::strtod(words[i + 1].c_str(), nullptr);
    } else {
      return usage();
    }
  }
  std::signal(SIGTERM, [](int) { stop = true; });
  std::signal(SIGINT, [](int) { stop = true; });

  float slope[3] = {}, offset = 0;
  options.in_place(
      "line", {weightbus::tensor("slope", slope, {3}), weightbus::tensor("offset", &offset, {})});
  auto worker = weightbus::Worker::connect(words[0], options);
  if (!worker) {
    std::cerr << worker.error().text << "\n";
    return 1;
  }
  auto heard = Clock::now();
  while (!stop && Clock::now() - heard < std::chrono::duration<double>(patience)) {
    const auto update = worker->receive(std::chrono::milliseconds(100));  // to check `stop`
    if (!update) {
      std::cerr << update.error().code << ": " << update.error().text << "\n";
    } else if (*update) {
      heard = Clock::now();
      print(worker->name(), **update, slope[0] + 2 * slope[1] + 3 * slope[2] + offset);
    }
  }
  return 0;  // the destructor sends a `bye`
}
