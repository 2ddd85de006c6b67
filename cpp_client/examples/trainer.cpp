// Fits a line by gradient descent, and publishes it to all workers after every step.
//
//     build/trainer tcp://127.0.0.1:5555 --workers 1 --steps 20
//
// The counterpart of examples/numpy_trainer.py; build/worker, and workers in other languages,
// receive from it.
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>
#include <weightbus/publisher.hpp>

int main(int count, char** values) {
  const std::vector<std::string> words(values + 1, values + count);
  std::size_t workers = 1;
  int steps = 20;
  for (std::size_t i = 1; i + 1 < words.size(); i += 2) {
    if (words[i] == "--workers") workers = std::strtoul(words[i + 1].c_str(), nullptr, 10);
    if (words[i] == "--steps") steps = std::atoi(words[i + 1].c_str());
  }
  if (words.size() % 2 == 0) {
    std::cerr << "usage: trainer ADDRESS [--workers N] [--steps N]\n";
    return 2;
  }
  weightbus::PublisherOptions options;
  options.expect = workers;
  auto publisher = weightbus::Publisher::bind(words[0], options);
  if (!publisher) {
    std::cerr << publisher.error().text << "\n";
    return 1;
  }
  std::cout << publisher->address() << std::endl;

  const float truth[3] = {1, 2, 3};
  float slope[3] = {}, offset = 0;
  for (int step = 0; step < steps; ++step) {
    for (int i = 0; i < 3; ++i) slope[i] += 0.2f * (truth[i] - slope[i]);
    offset += 0.2f * (4 - offset);
    const auto receipt = publisher->publish(
        "line", {weightbus::tensor("slope", slope, {3}), weightbus::tensor("offset", &offset, {})});
    if (!receipt) {
      std::cerr << receipt.error().text << "\n";
      return 1;
    }
    std::cout << receipt->text << std::endl;
    if (!receipt->achieved) return 1;
  }
  return 0;
}
