// A policy in Eigen that a trainer keeps up to date:
//
//     build/policy tcp://localhost:5555
//
// Two linear layers, as in torch.nn.Linear ([outputs, inputs], row-major), in Eigen matrices;
// versions are copied straight into them.
#include <Eigen/Dense>
#include <iostream>
#include <weightbus/weightbus.hpp>

namespace {

// Eigen's default order is column-major.
using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

struct Linear {
  Linear(int outputs, int inputs) : weight(outputs, inputs), bias(outputs) {}

  std::vector<weightbus::Tensor> tensors(const std::string& name) {
    const auto rows = static_cast<std::uint64_t>(weight.rows());
    const auto columns = static_cast<std::uint64_t>(weight.cols());
    return {weightbus::tensor(name + ".weight", weight, {rows, columns}),
            weightbus::tensor(name + ".bias", bias, {rows})};
  }

  Eigen::VectorXf operator()(const Eigen::VectorXf& input) const { return weight * input + bias; }

  Matrix weight;
  Eigen::VectorXf bias;
};

}  // namespace

int main(int count, char** values) {
  if (count != 2) return std::cerr << "usage: policy ADDRESS\n", 2;
  Linear hidden(4, 3), action(2, 4);
  std::vector<weightbus::Tensor> tensors = hidden.tensors("0");
  for (weightbus::Tensor& one : action.tensors("2")) tensors.push_back(std::move(one));

  weightbus::Options options;
  options.in_place("policy", tensors);
  auto worker = weightbus::Worker::connect(values[1], options);
  if (!worker) return std::cerr << worker.error().text << "\n", 1;
  worker->start();  // versions are applied in the background from here on
  if (!worker->wait_for_version("policy", 1, std::chrono::seconds(30))) return 1;

  const auto reading = worker->reading("policy");  // the same version, whole, while it is held
  if (!reading) return std::cerr << reading.error().text << "\n", 1;
  const Eigen::VectorXf observation = Eigen::VectorXf::LinSpaced(3, 1, 3);
  const Eigen::VectorXf acts = action(hidden(observation).array().tanh().matrix());
  std::cout << "version " << reading->version.second << ": " << acts[0] << " " << acts[1]
            << std::endl;
}
