// Any bytes are a layout or refused; one that is read covers its data without gap or overlap.
#include <cstdlib>
#include <weightbus/layout.hpp>

using namespace weightbus;

namespace {

void check(const Layout& layout) {
  std::uint64_t at = 0;
  for (const TensorSpec& spec : layout.tensors()) {
    std::uint64_t nbytes = 0;
    if (spec.begin != at || !tensor_bytes(spec.dtype, spec.shape, nbytes)) std::abort();
    if (spec.nbytes() != nbytes || layout.find(spec.name) != &spec) std::abort();
    at = spec.end;
  }
  if (layout.nbytes() != at || at > kIntegerMax) std::abort();
  for (const auto& [alias, kept] : layout.aliases()) {
    if (layout.find(alias) == nullptr || layout.find(alias) != layout.find(kept)) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (const auto layout = Layout::parse({data, size})) check(**layout);
  // Once more with the right length in front, which a fuzzer rarely finds by itself.
  std::string header;
  append_little_endian(header, size, 8);
  header.append(reinterpret_cast<const char*>(data), size);
  if (const auto layout = Layout::parse(header)) check(**layout);
  return 0;
}
