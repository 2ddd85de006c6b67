// Any bytes on the data channel, cut in any way, are taken or end the connection. The first byte
// says how they are cut; without its highest bit the greeting was exchanged before.
#include <algorithm>
#include <cstring>
#include <vector>
#include <weightbus/zmtp.hpp>

using namespace weightbus;

namespace {

const std::string kOpening = [] {
  std::string bytes("\xFF\0\0\0\0\0\0\0\1\x7F\3\0NULL", 16);
  bytes.resize(64);
  return bytes + std::string("\4\x1A\5READY\13Socket-Type\0\0\0\4XPUB", 28);
}();

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::size_t most = 1 + (data[0] & 63);
  std::string bytes = data[0] & 128 ? "" : kOpening;
  bytes.append(reinterpret_cast<const char*>(data) + 1, size - 1);

  std::vector<LeasePtr> leases;
  ZmtpStream stream(
      [&](Bytes, std::size_t length) -> LeasePtr {
        if (length > 1 << 16) return nullptr;
        auto memory = std::make_shared<std::vector<std::uint8_t>>(length);
        leases.push_back(std::make_shared<Lease>(MutableBytes{memory->data(), length}, memory));
        return leases.back();
      },
      [&](const Frames& frames) {
        std::size_t sum = 0;
        for (const Bytes& one : frames) {
          for (std::size_t i = 0; i < one.size; ++i) sum += one.data[i];
        }
        if (!leases.empty() && sum % 7 == 0) leases.back()->revoke();
      });
  stream.subscribe("m/ctl", true);
  for (std::string_view rest = bytes; !rest.empty();) {
    const MutableBytes room = stream.room();
    const std::size_t count = std::min({room.size, rest.size(), most});
    if (count == 0) std::abort();  // the connection would hang
    std::memcpy(room.data, rest.data(), count);
    rest.remove_prefix(count);
    if (!leases.empty() && count == 3) leases.back()->revoke();
    if (!stream.received(count)) break;
  }
  stream.close();
  return 0;
}
