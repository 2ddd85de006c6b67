// Tensors of the user's, into which versions are copied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bytes.hpp"
#include "dtypes.hpp"
#include "layout.hpp"
#include "result.hpp"

namespace weightbus {

// Memory of the user's, dense and row-major. It must stay where it is for as long as the worker
// lives.
struct Tensor {
  std::string name;
  Dtype dtype = Dtype::kF32;
  Shape shape;
  void* data = nullptr;
  std::size_t bytes = 0;
};

// A tensor over an array of a C++ type: `tensor("w", w.data(), {4, 3})`. `{}` is a scalar's shape.
template <class T>
Tensor tensor(std::string name, T* data, Shape shape) {
  static_assert(!std::is_const_v<T>, "versions are written into it");
  Tensor made{std::move(name), dtype_of<T>, std::move(shape), data, sizeof(T)};
  for (const std::uint64_t size : made.shape) made.bytes *= size;
  return made;
}

// The tensors of one model, as what versions are copied to.
class Target {
 public:
  // The error says which tensor cannot be one.
  static Result<Target> of(std::vector<Tensor> tensors) {
    std::set<std::string> names;
    for (const Tensor& tensor : tensors) {
      std::uint64_t nbytes = 0;
      if (!tensor_bytes(tensor.dtype, tensor.shape, nbytes) || nbytes != tensor.bytes) {
        return fault(tensor, "has " + std::to_string(tensor.bytes) + " bytes, and its shape " +
                                 std::to_string(nbytes) + ": pass the size of the memory");
      }
      if (tensor.data == nullptr && nbytes > 0) return fault(tensor, "has no memory");
      if (tensor.name.empty() || tensor.name.size() > kNameBytesMax) {
        return fault(tensor, "needs a name of 1 to 4096 bytes");
      }
      if (!names.insert(tensor.name).second) return fault(tensor, "is registered twice");
    }
    return Target(std::move(tensors));
  }

  // Bytes of the versions that fit, tied tensors counted once.
  std::uint64_t nbytes() const {
    std::map<const void*, std::uint64_t> by_place;
    for (const Tensor& tensor : tensors_) by_place[tensor.data] = tensor.bytes;
    std::uint64_t total = 0;
    for (const auto& [place, nbytes] : by_place) total += nbytes;
    return total;
  }

  // Names the tensors that differ; nothing if the layout can be applied. Of tied tensors any one
  // of their names will do.
  std::string difference(const Layout& layout) const {
    std::vector<std::string> lines;
    std::set<const TensorSpec*> covered;
    for (const Tensor& tensor : tensors_) {
      const TensorSpec* spec = layout.find(tensor.name);
      covered.insert(spec);
      compare(tensor, spec, lines);
    }
    for (const TensorSpec& spec : layout.tensors()) {
      if (covered.count(&spec) == 1) continue;
      lines.push_back(spec.name + ": published as " + describe_tensor(spec.dtype, spec.shape) +
                      ", not registered here");
    }
    return joined(lines);
  }

  // Copies a version whose layout has no difference.
  void copy(const LayoutPtr& layout, Bytes data) {
    if (layout != planned_) plan(layout);
    for (const Step& step : steps_) std::memcpy(step.to, data.data + step.begin, step.nbytes);
  }

 private:
  static constexpr std::size_t kLinesMax = 20;  // what a person reads before giving up

  struct Step {
    void* to;
    std::uint64_t begin, nbytes;
  };

  explicit Target(std::vector<Tensor> tensors) : tensors_(std::move(tensors)) {}

  static Error fault(const Tensor& tensor, const std::string& why) {
    return {"tensor", "tensor '" + tensor.name.substr(0, 80) + "' (" +
                          describe_tensor(tensor.dtype, tensor.shape) + ") " + why};
  }

  static void compare(const Tensor& tensor, const TensorSpec* spec,
                      std::vector<std::string>& lines) {
    if (spec == nullptr) {
      lines.push_back(tensor.name + ": " + describe_tensor(tensor.dtype, tensor.shape) +
                      " here, not published");
      return;
    }
    if (spec->shape != tensor.shape) {
      const auto bare = [](const Shape& shape) {
        const std::string text = describe_tensor(Dtype::kU8, shape);
        return text.substr(text.find('['));
      };
      lines.push_back(tensor.name + ": shape " + bare(spec->shape) + " published, " +
                      bare(tensor.shape) + " here");
    }
    if (spec->dtype != tensor.dtype) {
      lines.push_back(tensor.name + ": dtype " + std::string(name(spec->dtype)) + " published, " +
                      std::string(name(tensor.dtype)) + " here");
    }
  }

  static std::string joined(const std::vector<std::string>& lines) {
    std::string text;
    for (std::size_t i = 0; i < lines.size(); ++i) {
      if (i + 1 == kLinesMax && lines.size() > kLinesMax) {
        return text + "\n... and " + std::to_string(lines.size() - i) + " more";
      }
      text += (i ? "\n" : "") + lines[i];
    }
    return text;
  }

  void plan(const LayoutPtr& layout) {
    steps_.clear();
    for (const Tensor& tensor : tensors_) {
      const TensorSpec* spec = layout->find(tensor.name);
      if (spec->nbytes() > 0) steps_.push_back({tensor.data, spec->begin, spec->nbytes()});
    }
    planned_ = layout;
  }

  std::vector<Tensor> tensors_;
  LayoutPtr planned_;  // the layout that the steps are of
  std::vector<Step> steps_;
};

}  // namespace weightbus
