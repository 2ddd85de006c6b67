// Plays CartPole with the newest policy, 32 games at once, until the pole stands for 475 steps of 500:
//
//     build/rollouts tcp://localhost:5555
#include <Eigen/Dense>
#include <iostream>
#include <weightbus/weightbus.hpp>

namespace {

constexpr int kGames = 32, kSteps = 500, kEnough = 475;

using Games = Eigen::Array<float, 1, kGames>;
using States = Eigen::Array<float, 4, kGames>;  // position, speed, angle, turn
using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// Sequential(Linear(4, 8), Tanh(), Linear(8, 2)). Versions are written directly into its matrices.
struct Policy {
  std::vector<weightbus::Tensor> tensors() {
    return {weightbus::tensor("0.weight", weight0, {8, 4}), weightbus::tensor("0.bias", bias0, {8}),
            weightbus::tensor("2.weight", weight2, {2, 8}), weightbus::tensor("2.bias", bias2, {2})};
  }

  // Returns the force on each cart.
  Games operator()(const States& states) const {
    const Eigen::MatrixXf hidden = ((weight0 * states.matrix()).colwise() + bias0).array().tanh();
    const Eigen::MatrixXf scores = (weight2 * hidden).colwise() + bias2;
    return (scores.row(1).array() > scores.row(0).array()).cast<float>() * 20 - 10;
  }

  Matrix weight0{8, 4}, weight2{2, 8};
  Eigen::VectorXf bias0{8}, bias2{2};
};

void step(States& states, const Games& force) {
  const Games sine = states.row(2).sin(), cosine = states.row(2).cos(), turn = states.row(3);
  const Games pushed = (force + 0.05f * turn.square() * sine) / 1.1f;
  const Games swing =
      (9.8f * sine - cosine * pushed) / (0.5f * (4 / 3.f - 0.1f * cosine.square() / 1.1f));
  states.row(0) += 0.02f * states.row(1);
  states.row(1) += 0.02f * (pushed - 0.05f * swing * cosine / 1.1f);
  states.row(2) += 0.02f * turn;
  states.row(3) += 0.02f * swing;
}

}  // namespace

int main(int count, char** values) {
  if (count != 2) return std::cerr << "usage: rollouts ADDRESS\n", 2;
  Policy policy;
  weightbus::Options options;
  options.in_place("policy", policy.tensors());
  auto worker = weightbus::Worker::connect(values[1], options);
  if (!worker) return std::cerr << worker.error().text << "\n", 1;
  worker->start();  // versions are applied in the background, while no reading exists

  float mean = 0;
  for (std::uint64_t begun = 0, version = 0; mean < kEnough;) {
    if (!worker->wait_for_version("policy", begun + 1, std::chrono::seconds(30))) return 1;
    States states = States::Random() * 0.05f;
    Eigen::Array<bool, 1, kGames> stands = Eigen::Array<bool, 1, kGames>::Constant(true);
    int steps = 0;
    for (int i = 0; i < kSteps && stands.any(); ++i) {
      Games force;
      {
        const auto reading = worker->reading("policy");  // no version is applied while this exists
        if (!reading) return std::cerr << reading.error().text << "\n", 1;
        version = reading->version.second;
        if (i == 0) begun = version;
        force = policy(states);
      }
      step(states, force);
      stands = stands && states.row(0).abs() < 2.4f && states.row(2).abs() < 0.2095f;
      steps += static_cast<int>(stands.count());
    }
    mean = static_cast<float>(steps) / kGames;
    std::cout << "version " << version << ": stands for " << mean << " steps" << std::endl;
  }
}
