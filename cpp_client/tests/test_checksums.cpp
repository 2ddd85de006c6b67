// Checksums of the processor and of the tables are one, however the bytes lie and are cut.
#include <doctest/doctest.h>

#include <fstream>
#include <random>
#include <weightbus/digest.hpp>
#include <weightbus/json.hpp>

using namespace weightbus;

namespace {

std::string random_bytes(std::mt19937& random, std::size_t size) {
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

// One bit at a time, as the definition has it.
std::uint32_t by_definition(Bytes bytes) {
  std::uint32_t crc = ~0U;
  for (std::size_t i = 0; i < bytes.size; ++i) {
    crc ^= bytes.data[i];
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ 0x82F63B78 : crc >> 1;
  }
  return ~crc;
}

}  // namespace

TEST_CASE("the vectors' checksums, by every implementation") {
  std::ifstream file(VECTORS "/checksums.json");
  const Json table = Json::parse(file);
  REQUIRE(table["crc32c"].size() >= 8);
  for (const Json& one : table["crc32c"]) {
    const std::string bytes = unhex(one["hex"].get<std::string>());
    const Bytes view = bytes;
    CHECK(crc32c(view) == one["crc"]);
    CHECK(~crc32c_detail::portable(~0U, view.data, view.size) == one["crc"]);
  }
  for (const Json& one : table["digests"]) {
    const std::string id = one["layout"];
    CHECK(digest(id, one["chunk_bytes"], one["crcs"]) == one["digest"]);
  }
}

TEST_CASE("every length and alignment gives what the definition gives") {
  std::mt19937 random(1);
  const std::string bytes = random_bytes(random, 3 * 8192 + 3 * 256 + 64);
  for (std::size_t size : {0, 1, 7, 8, 9, 255, 767, 768, 769, 1535, 8192, 24575, 24576, 25344}) {
    for (std::size_t offset = 0; offset < 9; ++offset) {
      const Bytes view(bytes.data() + offset, size);
      const std::uint32_t expected = by_definition(view);
      CHECK(crc32c(view) == expected);
      CHECK(~crc32c_detail::portable(~0U, view.data, view.size) == expected);
    }
  }
}

TEST_CASE("a checksum goes on from that of what came before") {
  std::mt19937 random(2);
  for (int round = 0; round < 200; ++round) {
    const std::string bytes = random_bytes(random, random() % 60000);
    const std::size_t cut = random() % (bytes.size() + 1);
    const Bytes view = bytes;
    CHECK(crc32c(view.slice(cut, view.size), crc32c(view.slice(0, cut))) == crc32c(view));
  }
}
