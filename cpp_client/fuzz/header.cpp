// Any bytes are a message of a publisher, or refused; what was read is written and read again.
#include <cstdlib>
#include <weightbus/messages.hpp>

using namespace weightbus;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  for (std::size_t payloads = 0; payloads < 2; ++payloads) {
    const Result<FromPublisher> message = decode<FromPublisher>({data, size}, payloads);
    if (!message) continue;
    const std::string once = std::visit([](const auto& one) { return encode(one); }, *message);
    const Result<FromPublisher> again = decode<FromPublisher>(once, payloads);
    if (!again) std::abort();
    if (std::visit([](const auto& one) { return encode(one); }, *again) != once) std::abort();
  }
  return 0;
}
