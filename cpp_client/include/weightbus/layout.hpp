// The layout of a version: a safetensors header, believed only after it is checked (section 5.1).
//
//     0        8                      8+n
//     ├────────┼───────────────────────┼──────────────────────────────┤
//     │ n, u64 │ JSON of n bytes       │ data section: the tensors,   │
//     │ little │                       │ row-major, without gaps      │
//     └────────┴───────────────────────┴──────────────────────────────┘
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bytes.hpp"
#include "digest.hpp"
#include "dtypes.hpp"
#include "json.hpp"
#include "limits.hpp"
#include "result.hpp"

namespace weightbus {

using Shape = std::vector<std::uint64_t>;

struct TensorSpec {
  std::string name;
  Dtype dtype = Dtype::kU8;
  Shape shape;
  std::uint64_t begin = 0, end = 0;  // of the data section

  std::uint64_t nbytes() const { return end - begin; }
};

// `F32 [4, 3]`
inline std::string describe_tensor(Dtype dtype, const Shape& shape) {
  std::string text(name(dtype));
  text += " [";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i ? ", " : "") + std::to_string(shape[i]);
  }
  return text + "]";
}

// Bytes of a tensor; false if they are no whole number, or beyond what others can count (L6): a
// size of 0 makes a tensor empty, but readers still multiply the other sizes.
inline bool tensor_bytes(Dtype dtype, const Shape& shape, std::uint64_t& nbytes) {
  std::uint64_t extent = bits(dtype);
  bool empty = false;
  for (const std::uint64_t size : shape) {
    empty = empty || size == 0;
    if (size > 1 && extent > kIntegerMax / size) return false;
    extent *= std::max<std::uint64_t>(size, 1);
  }
  if (extent > kIntegerMax) return false;
  nbytes = empty ? 0 : extent / 8;
  return empty || extent % 8 == 0;
}

namespace layout_detail {

// Takes the parser's events; refuses whatever no layout has, at the first sign of it.
class Handler final : public nlohmann::json_sax<Json> {
 public:
  std::vector<TensorSpec> tensors;
  std::vector<std::pair<std::string, std::string>> metadata;
  std::string fault = "it is not JSON";

  bool start_object(std::size_t) override {
    switch (at_) {
      case At::kStart:
        at_ = At::kTop;
        return true;
      case At::kMetadataValue:
        at_ = At::kMetadata;
        return true;
      case At::kTensorValue:
        at_ = At::kTensor;
        seen_ = 0;
        return true;
      default:
        return refuse("an object where none may be");
    }
  }

  bool key(string_t& name) override {
    switch (at_) {
      case At::kTop:
        return top_key(name);
      case At::kMetadata:
        metadata.emplace_back(std::move(name), "");
        at_ = At::kText;
        return true;
      case At::kTensor:
        return field_key(name);
      default:
        return refuse("a key where none may be");
    }
  }

  bool end_object() override {
    switch (at_) {
      case At::kTop:
        at_ = At::kEnd;
        return true;
      case At::kMetadata:
        at_ = At::kTop;
        return true;
      case At::kTensor:
        at_ = At::kTop;
        return seen_ == 7 || refuse("a tensor without dtype, shape or data_offsets");
      default:
        return false;
    }
  }

  bool start_array(std::size_t) override {
    if (at_ == At::kShapeValue)
      at_ = At::kShape;
    else if (at_ == At::kOffsetsValue)
      at_ = At::kOffsets;
    else
      return refuse("an array where none may be");
    offsets_.clear();
    return true;
  }

  bool end_array() override {
    if (at_ == At::kOffsets) {
      if (offsets_.size() != 2) return refuse("data_offsets that are not two");
      tensors.back().begin = offsets_[0];
      tensors.back().end = offsets_[1];
    }
    at_ = At::kTensor;
    return true;
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (value > kIntegerMax) return refuse("a number beyond 2^53 - 1");
    if (at_ == At::kShape) {
      Shape& shape = tensors.back().shape;
      if (shape.size() >= kRankMax) return refuse("more than 64 dimensions");
      shape.push_back(value);
      return true;
    }
    if (at_ == At::kOffsets && offsets_.size() < 2) {
      offsets_.push_back(value);
      return true;
    }
    return refuse("a number where none may be");
  }

  bool string(string_t& value) override {
    if (at_ == At::kText) {
      metadata.back().second = std::move(value);
      at_ = At::kMetadata;
      return true;
    }
    if (at_ != At::kDtypeValue) return refuse("a string where none may be");
    at_ = At::kTensor;
    return find_dtype(value, tensors.back().dtype) || refuse("a dtype that safetensors lacks");
  }

  bool null() override { return refuse("a null"); }
  bool boolean(bool) override { return refuse("true or false"); }
  bool number_integer(number_integer_t) override { return refuse("a number with a sign"); }
  bool number_float(number_float_t, const string_t&) override {
    return refuse("a number that is no integer below 2^53");
  }
  bool binary(binary_t&) override { return false; }
  bool parse_error(std::size_t position, const std::string&, const Json::exception&) override {
    return refuse("no JSON from byte " + std::to_string(position) + " on");
  }

 private:
  enum class At {
    kStart,
    kTop,
    kMetadataValue,
    kMetadata,
    kText,
    kTensorValue,
    kTensor,
    kDtypeValue,
    kShapeValue,
    kShape,
    kOffsetsValue,
    kOffsets,
    kEnd,
  };

  bool top_key(string_t& name) {
    if (name == "__metadata__") {
      if (std::exchange(has_metadata_, true)) return refuse("__metadata__ twice");
      at_ = At::kMetadataValue;
      return true;
    }
    if (tensors.size() >= kTensorsMax) return refuse("more than a million tensors");
    if (name.empty() || name.size() > kNameBytesMax) {
      return refuse("a name of " + std::to_string(name.size()) + " bytes; it has 1 to 4096");
    }
    tensors.emplace_back().name = std::move(name);
    at_ = At::kTensorValue;
    return true;
  }

  bool field_key(const string_t& name) {
    const auto once = [&](unsigned bit, At next) {
      if (seen_ & bit) return refuse("a field of a tensor twice");
      seen_ |= bit;
      at_ = next;
      return true;
    };
    if (name == "dtype") return once(1, At::kDtypeValue);
    if (name == "shape") return once(2, At::kShapeValue);
    if (name == "data_offsets") return once(4, At::kOffsetsValue);
    return refuse("a field that a tensor does not have");
  }

  bool refuse(std::string why) {
    fault = std::move(why);
    if (!tensors.empty()) fault += " (at tensor '" + tensors.back().name.substr(0, 40) + "')";
    return false;
  }

  At at_ = At::kStart;
  bool has_metadata_ = false;
  unsigned seen_ = 0;  // fields of the tensor: 1 dtype, 2 shape, 4 data_offsets
  std::vector<std::uint64_t> offsets_;
};

}  // namespace layout_detail

class Layout;
using LayoutPtr = std::shared_ptr<const Layout>;

class Layout {
 public:
  // Checks a layout, its length prefix included. The error's code is "layout-invalid".
  static Result<LayoutPtr> parse(Bytes header) {
    layout_detail::Handler handler;
    auto made = std::make_shared<Layout>();
    std::string fault = check_frame(header);
    if (fault.empty() && !scan_json(header.slice(8, header.size), handler)) fault = handler.fault;
    if (fault.empty()) {
      made->tensors_ = std::move(handler.tensors);
      made->metadata_ = std::move(handler.metadata);
      fault = made->check_places();
    }
    if (fault.empty()) fault = made->check_names();
    if (!fault.empty()) {
      return Error{"layout-invalid", "the layout of " + std::to_string(header.size) +
                                         " bytes breaks section 5.1 of the protocol: " + fault};
    }
    made->id_ = sha256(header);
    return LayoutPtr(std::move(made));
  }

  const std::string& id() const { return id_; }
  std::uint64_t nbytes() const { return tensors_.empty() ? 0 : tensors_.back().end; }

  // By position in the data section.
  const std::vector<TensorSpec>& tensors() const { return tensors_; }

  // Sorted by key; an entry is an alias exactly if its value names a tensor and its key does not.
  const std::vector<std::pair<std::string, std::string>>& metadata() const { return metadata_; }

  // Other names of tensors.
  const std::map<std::string, std::string>& aliases() const { return aliases_; }

  // The tensor of a name or an alias; null if there is none.
  const TensorSpec* find(std::string_view name) const {
    const auto found = std::lower_bound(
        by_name_.begin(), by_name_.end(), name,
        [](const auto& entry, std::string_view wanted) { return entry.first < wanted; });
    if (found == by_name_.end() || found->first != name) return nullptr;
    return &tensors_[found->second];
  }

 private:
  static std::string check_frame(Bytes header) {
    if (header.size < 8) return "it is shorter than its length prefix";
    const std::uint64_t size = little_endian_u64(header.data);
    if (size > kLayoutJsonMax) return "its JSON is longer than 100,000,000 bytes";
    if (header.size != 8 + size) return "its length prefix says another length";
    if (size == 0 || header.data[8] != '{') return "its JSON does not begin with '{'";
    return "";
  }

  std::string check_places() {
    std::sort(tensors_.begin(), tensors_.end(), [](const TensorSpec& a, const TensorSpec& b) {
      return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
    });
    std::uint64_t at = 0;
    for (const TensorSpec& spec : tensors_) {
      std::uint64_t nbytes = 0;
      if (!tensor_bytes(spec.dtype, spec.shape, nbytes)) {
        return "tensor '" + spec.name.substr(0, 40) + "' fills no whole bytes, or too many";
      }
      if (spec.begin != at || spec.end < at || spec.end - at != nbytes) {
        return "tensor '" + spec.name.substr(0, 40) + "' claims bytes " +
               std::to_string(spec.begin) + " to " + std::to_string(spec.end) + ", it must own " +
               std::to_string(at) + " to " + std::to_string(at + nbytes);
      }
      at = spec.end;
    }
    return "";
  }

  std::string check_names() {
    for (std::size_t i = 0; i < tensors_.size(); ++i) by_name_.emplace_back(tensors_[i].name, i);
    std::sort(by_name_.begin(), by_name_.end());
    for (std::size_t i = 1; i < by_name_.size(); ++i) {
      if (by_name_[i - 1].first == by_name_[i].first) return "a tensor stands twice";
    }
    std::sort(metadata_.begin(), metadata_.end());
    for (std::size_t i = 0; i < metadata_.size(); ++i) {
      const auto& [key, value] = metadata_[i];
      if (i > 0 && metadata_[i - 1].first == key) return "a key of the metadata stands twice";
      if (find(value) == nullptr || find(key) != nullptr) continue;
      if (key.empty() || key.size() > kNameBytesMax) return "an alias has 1 to 4096 bytes";
      aliases_.emplace(key, value);
    }
    add_aliases();
    return aliases_.size() <= kTensorsMax ? "" : "more than a million aliases";
  }

  void add_aliases() {
    std::vector<std::pair<std::string_view, std::size_t>> more;
    for (const auto& [alias, kept] : aliases_) {
      more.emplace_back(alias, static_cast<std::size_t>(find(kept) - tensors_.data()));
    }
    by_name_.insert(by_name_.end(), more.begin(), more.end());
    std::sort(by_name_.begin(), by_name_.end());
  }

  std::string id_;
  std::vector<TensorSpec> tensors_;
  std::vector<std::pair<std::string, std::string>> metadata_;
  std::map<std::string, std::string> aliases_;
  // Sorted; views of the names above. Not a hash table: strangers could choose what collides.
  std::vector<std::pair<std::string_view, std::size_t>> by_name_;
};

}  // namespace weightbus
