// A version as a whole, for models whose tensors are not registered: it never changes, and its
// memory is kept for as long as somebody holds it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "bytes.hpp"
#include "dtypes.hpp"
#include "layout.hpp"
#include "staging.hpp"

namespace weightbus {

// One tensor of a snapshot; valid for as long as that is held.
struct TensorView {
  Dtype dtype = Dtype::kU8;
  const Shape* shape = nullptr;
  Bytes bytes;
};

class Snapshot {
 public:
  Snapshot(std::string model_name, Key key, std::string digest_text, LayoutPtr layout,
           BufferPtr buffer)
      : model(std::move(model_name)),
        epoch(key.first),
        version(key.second),
        digest(std::move(digest_text)),
        layout_(std::move(layout)),
        buffer_(std::move(buffer)) {}

  const std::string model;
  const std::uint64_t epoch, version;
  const std::string digest;  // empty if it was read from shared memory and not hashed

  // Names, dtypes, shapes, aliases, metadata.
  const Layout& layout() const { return *layout_; }

  // The data section.
  Bytes data() const { return buffer_->bytes(); }

  // The tensor of a name or an alias.
  std::optional<TensorView> find(std::string_view name) const {
    const TensorSpec* spec = layout_->find(name);
    if (spec == nullptr) return {};
    return TensorView{spec->dtype, &spec->shape, data().slice(spec->begin, spec->end)};
  }

  // The elements of a tensor; null if there is none of that name, if it has another dtype, or if
  // the publisher did not align it (then its bytes have to be copied: see `find`).
  template <class T>
  const T* as(std::string_view name) const {
    const std::optional<TensorView> view = find(name);
    if (!view || view->dtype != dtype_of<T>) return nullptr;
    const auto address = reinterpret_cast<std::uintptr_t>(view->bytes.data);
    return address % alignof(T) == 0 ? reinterpret_cast<const T*>(view->bytes.data) : nullptr;
  }

 private:
  LayoutPtr layout_;
  BufferPtr buffer_;
};

}  // namespace weightbus
