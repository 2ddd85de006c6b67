// What the machine wants done; the loop does it.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "messages.hpp"
#include "staging.hpp"

namespace weightbus {

struct Send {  // to the publisher, over the control channel
  FromWorker message;
};
struct ConnectData {  // take published messages from this endpoint, in place of any before
  std::string endpoint;
};
struct Redial {  // make both connections anew: those that there are may lead nowhere
};
struct Subscribe {  // ask for a topic, or no longer
  std::string topic;
  bool on;
};
struct Ready {  // a version is staged, verified, and may be applied
  StagedPtr staged;
};
struct Rejected {  // a version cannot be taken; the old one still runs
  std::string model;
  Key key;
  std::string code, text;
};
struct Refused {  // the publisher refuses this worker, which keeps asking
  std::string code, text;
};
struct Joined {
  std::uint64_t epoch;
};
struct Notice {  // something that an operator may want to know; `lost` is a code of its own
  std::string code, text;
};

using Effect =
    std::variant<Send, ConnectData, Redial, Subscribe, Ready, Rejected, Refused, Joined, Notice>;
using Effects = std::vector<Effect>;

inline void append(Effects& to, Effects more) {
  for (Effect& effect : more) to.push_back(std::move(effect));
}

}  // namespace weightbus
