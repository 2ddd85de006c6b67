// The driver of the conformance suite: `driver vectors DIR`, or `driver worker ADDRESS ...`.
#include <iostream>
#include <string>
#include <vector>

#include "vectors.hpp"
#include "worker.hpp"

int main(int count, char** values) {
  const std::vector<std::string> arguments(values + 1, values + count);
  if (arguments.size() == 2 && arguments[0] == "vectors") return run_vectors(arguments[1]);
  if (arguments.size() >= 2 && arguments[0] == "worker") return run_worker(arguments);
  std::cerr << "usage: driver vectors DIR\n"
               "       driver worker ADDRESS --name NAME --models M1,M2 [--in-place SPEC.json]\n"
               "              [--no-tensors] [--bytes-max N] [--network] [--seconds S]\n";
  return 2;
}
