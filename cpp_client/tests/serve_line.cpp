// Publishes one version of the model of the README's example, until a worker has it and has left.
#include <cstring>
#include <iostream>

#include "server.hpp"

int main() {
  using namespace weightbus;
  const std::string json = R"({"offset":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
                           R"("slope":{"dtype":"F32","shape":[3],"data_offsets":[4,16]}})";
  Published line;
  append_little_endian(line.layout, json.size(), 8);
  line.layout += json;
  const float values[] = {3, 2, -1, 0.5};
  line.data.assign(reinterpret_cast<const char*>(values), sizeof values);
  Server server(7, "tcp://127.0.0.1:*", "line");
  server.publish(line);
  std::cout << server.address() << std::endl;
  const bool done =
      server.wait_until([](const auto& p) { return p.applied() == 1 && p.said_goodbye(); });
  return done ? 0 : 1;
}
