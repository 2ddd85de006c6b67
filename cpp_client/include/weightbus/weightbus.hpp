// A worker of the weight bus for C++17: it receives a model's weights from its trainer, version by
// version. Each version is whole, verified, and written in place.
//
// This is a layer over libweightbus, whose `weightbus.h` has the details. The layer adds handles
// that free themselves, values instead of borrowed memory, and a thread that applies versions in
// the background. No function throws for an ordinary outcome, and no exception of a user function
// enters the library.
#pragma once

#include <weightbus.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>
#if __cplusplus >= 202002L
#include <span>
#endif

namespace weightbus {

// The error of a failed call. The code is one of the protocol (section 13: "layout-mismatch",
// "name-taken", "apply", ...) or, for errors on this side alone, "invalid", "torn", "closed",
// "timeout", "not-found", "system" or "panic".
struct Error {
  std::string code;
  std::string text;
};

// A value, or an error.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : content_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : content_(std::in_place_index<1>, std::move(error)) {}

  explicit operator bool() const { return content_.index() == 0; }
  bool ok() const { return content_.index() == 0; }

  // Call it only if ok().
  T& value() { return *std::get_if<0>(&content_); }
  const T& value() const { return *std::get_if<0>(&content_); }
  T& operator*() { return value(); }
  const T& operator*() const { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

  // Call it only if not ok().
  const Error& error() const { return *std::get_if<1>(&content_); }

 private:
  std::variant<T, Error> content_;
};

// Contiguous elements; in C++20 it converts to a std::span.
template <class T>
class Span {
 public:
  constexpr Span() = default;
  constexpr Span(T* data, std::size_t size) : data_(data), size_(size) {}

  constexpr T* data() const { return data_; }
  constexpr std::size_t size() const { return size_; }
  constexpr bool empty() const { return size_ == 0; }
  constexpr T* begin() const { return data_; }
  constexpr T* end() const { return data_ + size_; }
  constexpr T& operator[](std::size_t at) const { return data_[at]; }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

// The small floats of weights, which C++17 lacks: their bits, and conversions to float.

struct BFloat16 {
  std::uint16_t bits = 0;
};

struct Float16 {
  std::uint16_t bits = 0;
};

struct Float8E4M3 {  // "fn": no infinities; all bits set is NaN
  std::uint8_t bits = 0;
};

struct Float8E5M2 {
  std::uint8_t bits = 0;
};

// True if the byte is not 0. (Not a `bool`, because the bytes of a version may have any value.)
struct Bool {
  std::uint8_t byte = 0;

  explicit operator bool() const { return byte != 0; }
};

namespace detail {

inline float float_of_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Widens an IEEE-like float. The greatest exponent means infinity (fraction 0) or NaN. With
// `finite`, there is no infinity, and only the pattern with all bits set is NaN.
inline float widen(std::uint32_t bits, int exponent_bits, int fraction_bits, bool finite) {
  const std::uint32_t exponents = (1U << exponent_bits) - 1, fractions = (1U << fraction_bits) - 1;
  const std::uint32_t exponent = bits >> fraction_bits & exponents, fraction = bits & fractions;
  const std::uint32_t sign = (bits >> (exponent_bits + fraction_bits) & 1) << 31;
  if (exponent == exponents && (finite ? fraction == fractions : fraction != 0)) {
    return float_of_bits(sign | 0x7FC00000);
  }
  if (exponent == exponents && !finite) return float_of_bits(sign | 0x7F800000);
  const std::uint32_t whole = exponent == 0 ? fraction : fraction + fractions + 1;
  const int power = static_cast<int>(exponent == 0 ? 1 : exponent) -
                    static_cast<int>(exponents >> 1) - fraction_bits;
  const float value =
      static_cast<float>(whole) * float_of_bits(static_cast<std::uint32_t>(127 + power) << 23);
  return sign ? -value : value;
}

}  // namespace detail

inline float to_float(BFloat16 from) {
  return detail::float_of_bits(std::uint32_t{from.bits} << 16);
}
inline float to_float(Float16 from) { return detail::widen(from.bits, 5, 10, false); }
inline float to_float(Float8E4M3 from) { return detail::widen(from.bits, 4, 3, true); }
inline float to_float(Float8E5M2 from) { return detail::widen(from.bits, 5, 2, false); }

// Converts many values; `to` must have room for all.
template <class Small>
void to_floats(Span<const Small> from, float* to) {
  for (const Small one : from) *to++ = to_float(one);
}

// The dtype of a C++ type, by safetensors' name. For a type of yours with the same bits:
//
//     template <> struct weightbus::DtypeOf<Eigen::bfloat16> { static constexpr auto value =
//     "BF16"; };
template <class T, class = void>
struct DtypeOf;

// clang-format off
template <> struct DtypeOf<Bool> { static constexpr auto value = "BOOL"; };
template <> struct DtypeOf<std::uint8_t> { static constexpr auto value = "U8"; };
template <> struct DtypeOf<std::int8_t> { static constexpr auto value = "I8"; };
template <> struct DtypeOf<std::uint16_t> { static constexpr auto value = "U16"; };
template <> struct DtypeOf<std::int16_t> { static constexpr auto value = "I16"; };
template <> struct DtypeOf<std::uint32_t> { static constexpr auto value = "U32"; };
template <> struct DtypeOf<std::int32_t> { static constexpr auto value = "I32"; };
template <> struct DtypeOf<std::uint64_t> { static constexpr auto value = "U64"; };
template <> struct DtypeOf<std::int64_t> { static constexpr auto value = "I64"; };
template <> struct DtypeOf<float> { static constexpr auto value = "F32"; };
template <> struct DtypeOf<double> { static constexpr auto value = "F64"; };
template <> struct DtypeOf<Float16> { static constexpr auto value = "F16"; };
template <> struct DtypeOf<BFloat16> { static constexpr auto value = "BF16"; };
template <> struct DtypeOf<Float8E4M3> { static constexpr auto value = "F8_E4M3"; };
template <> struct DtypeOf<Float8E5M2> { static constexpr auto value = "F8_E5M2"; };
// clang-format on

template <class T>  // std::complex<float>, whose header is not needed here
struct DtypeOf<T, std::enable_if_t<std::is_same_v<decltype(std::declval<T>().imag()), float>>> {
  static constexpr auto value = "C64";
};

template <class T>
inline constexpr const char* dtype_of = DtypeOf<T>::value;

using Shape = std::vector<std::uint64_t>;  // row-major; {} is a scalar

// Caller-owned memory, dense and row-major, into which versions are copied. It must stay valid, at
// the same address, for as long as the worker lives.
struct Tensor {
  std::string name, dtype;
  Shape shape;
  void* data = nullptr;
  std::size_t bytes = 0;
};

// A tensor over an array of a C++ type: `tensor("w", w.data(), {4, 3})`.
template <class T>
Tensor tensor(std::string name, T* data, Shape shape) {
  static_assert(!std::is_const_v<T>, "versions are written into it");
  Tensor made{std::move(name), dtype_of<T>, std::move(shape), data, sizeof(T)};
  for (const std::uint64_t size : made.shape) made.bytes *= size;
  return made;
}

// A tensor over anything with data() and size(), such as a vector or a row-major Eigen matrix. The
// size is checked against the shape when the worker connects.
template <class Elements>
auto tensor(std::string name, Elements& elements, Shape shape)
    -> decltype(elements.size(), elements.data(), Tensor()) {
  Tensor made = tensor(std::move(name), elements.data(), std::move(shape));
  made.bytes = sizeof(*elements.data()) * static_cast<std::size_t>(elements.size());
  return made;
}

#if __cplusplus >= 202002L
template <class T>
Tensor tensor(std::string name, std::span<T> elements, Shape shape) {
  Tensor made = tensor(std::move(name), elements.data(), std::move(shape));
  made.bytes = elements.size_bytes();
  return made;
}
#endif

namespace detail {

template <auto free>
struct Free {
  template <class T>
  void operator()(T* handle) const noexcept {
    free(handle);
  }
};

template <class T, auto free>
using Handle = std::unique_ptr<T, Free<free>>;

// Returns the error of the last call that failed in this thread.
inline Error error_of(wb_code code, std::string protocol_code = {}) {
  static constexpr const char* kNames[] = {"ok",     "timeout", "rejected",  "refused",
                                           "closed", "torn",    "invalid",   "not-found",
                                           "system", "panic",   "unachieved"};
  const bool known = static_cast<std::size_t>(code) < std::size(kNames);
  if (protocol_code.empty()) protocol_code = known ? kNames[code] : "unknown";
  return {std::move(protocol_code), wb_error()};
}

// Makes a model of tensors, and sets the address and size of memory in each of `tensors`.
template <class Make>
Result<std::shared_ptr<const wb_model>> model_of(std::vector<Tensor>& tensors, Make make) {
  std::vector<wb_tensor> raw;
  raw.reserve(tensors.size());
  for (const Tensor& one : tensors) {
    raw.push_back({one.name.c_str(), one.name.size(), one.dtype.c_str(), one.shape.data(),
                   one.shape.size(), one.data, one.bytes});
  }
  wb_model* made = nullptr;
  const wb_code code = make(raw.data(), raw.size(), &made);
  if (code != WB_OK) return error_of(code);
  for (std::size_t at = 0; at < raw.size(); ++at) {
    tensors[at].data = raw[at].data;
    tensors[at].bytes = raw[at].nbytes;
  }
  return std::shared_ptr<const wb_model>(
      made, [](const wb_model* model) { wb_model_free(const_cast<wb_model*>(model)); });
}

}  // namespace detail

// Tensors in the library's own memory, zeros at first. The memory is valid as long as this object
// or a worker that uses it exists. A version of 2 MiB or more that arrives over the network is
// placed there by an exchange of pages, without a copy. Do not fork while a version is applied, and
// do not register this memory with a device or a network card (cudaHostRegister, ibv_reg_mr,
// io_uring), which would keep using the old pages. The effects of mlock, madvise and mbind move
// with the pages, too. For such uses, call `in_place` with your own memory.
class Resident {
 public:
  // Only the names, dtypes and shapes of `tensors` are used: `tensor<float>("w", nullptr, {4, 3})`.
  static Result<Resident> of(std::vector<Tensor> tensors) {
    auto model = detail::model_of(tensors, wb_model_resident);
    if (!model) return model.error();
    return Resident(std::move(*model), std::move(tensors));
  }

  // The tensors, with their memory.
  const std::vector<Tensor>& tensors() const { return tensors_; }

  const std::shared_ptr<const wb_model>& model() const { return model_; }

 private:
  Resident(std::shared_ptr<const wb_model> model, std::vector<Tensor> tensors)
      : model_(std::move(model)), tensors_(std::move(tensors)) {}

  std::shared_ptr<const wb_model> model_;
  std::vector<Tensor> tensors_;
};

// One tensor of a snapshot; valid while the snapshot is held.
class TensorView {
 public:
  explicit TensorView(const wb_tensor& raw) : raw_(raw) {}

  std::string_view name() const { return {raw_.name, raw_.name_bytes}; }
  std::string_view dtype() const { return raw_.dtype; }
  Span<const std::uint64_t> shape() const { return {raw_.shape, raw_.rank}; }
  Span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(raw_.data), raw_.nbytes};
  }

  // Returns the elements. Fails if the tensor has another dtype, or is not aligned in the
  // publisher's layout (then copy its bytes).
  template <class T>
  Result<Span<const T>> as() const {
    if (dtype() != dtype_of<T>) return fault("is " + std::string(dtype()) + ", not " + dtype_of<T>);
    if (reinterpret_cast<std::uintptr_t>(raw_.data) % alignof(T) != 0)
      return fault("is not aligned: copy its bytes()");
    return Span<const T>(static_cast<const T*>(raw_.data), raw_.nbytes / sizeof(T));
  }

 private:
  Error fault(const std::string& why) const {
    return {"invalid", "tensor '" + std::string(name()) + "' " + why};
  }

  wb_tensor raw_;
};

// One version of a model that is received as snapshots. It never changes. Its memory is reused
// after its release.
class Snapshot {
 public:
  explicit Snapshot(const wb_update& update)
      : model(update.model),
        epoch(update.epoch),
        version(update.version),
        raw_(update.snapshot, wb_snapshot_free) {}

  // The snapshot of an offer, which owns it during the call.
  explicit Snapshot(const wb_offer& offer)
      : model(offer.model),
        epoch(offer.epoch),
        version(offer.version),
        raw_(offer.snapshot, [](const wb_snapshot*) {}) {}

  Snapshot(const Snapshot&) = delete;  // an offer's is valid during the call only
  Snapshot& operator=(const Snapshot&) = delete;

  const std::string model;
  const std::uint64_t epoch, version;

  // The tensors, in the order of the publisher's model.
  std::vector<TensorView> tensors() const {
    std::size_t count = 0;
    const wb_tensor* first = wb_snapshot_tensors(raw_.get(), &count);
    return {first, first + count};
  }

  // Returns a tensor by its name, or by an alias from the publisher.
  Result<TensorView> find(const std::string& name) const {
    wb_tensor found;
    const wb_code code = wb_snapshot_find(raw_.get(), name.c_str(), &found);
    if (code != WB_OK) return detail::error_of(code);
    return TensorView(found);
  }

  // The elements of a tensor.
  template <class T>
  Result<Span<const T>> as(const std::string& name) const {
    const Result<TensorView> found = find(name);
    if (!found) return found.error();
    return found->as<T>();
  }

 private:
  std::shared_ptr<const wb_snapshot> raw_;
};

// A version that was just applied.
struct Update {
  std::string model;
  std::uint64_t epoch = 0, version = 0, nbytes = 0;
  std::string digest;  // of the bytes; empty if these came from shared memory and were not hashed
  double seconds = 0;  // duration of the copy
  std::shared_ptr<const Snapshot> snapshot;     // of a model received as snapshots
  bool patched = false;                         // arrived as a patch on the version that ran before
  std::map<std::string, std::string> metadata;  // from the publisher, such as a step
};

// A version, whole and verified, that a user function accepts or rejects.
struct Offer {
  std::string model;
  std::uint64_t epoch = 0, version = 0, nbytes = 0;
  const Snapshot* snapshot =
      nullptr;  // in `apply`, of a model received as snapshots; valid during the call
};

// Returns nullopt to accept the version, or a reason to reject it, which is reported to the
// publisher. An exception rejects the version, too.
using Decide = std::function<std::optional<std::string>(const Offer&)>;

// An event: "joined", "lost", "refused", "rejected", "changed-over" or "notice"; more kinds may be
// added.
struct Event {
  std::string kind, model;
  std::uint64_t epoch = 0, version = 0;
  std::string code, text;
};

using Version = std::pair<std::uint64_t, std::uint64_t>;  // epoch, number

struct ModelState {
  std::optional<Version> running, arriving, staged, ready;
  std::uint64_t chunks_here = 0, chunks = 0;  // of the arriving version
  bool torn = false;                          // an apply failed half-way, and no version runs
  // The publisher's metadata of the running version, under its current number.
  std::map<std::string, std::string> metadata;
};

struct State {
  std::uint64_t epoch = 0;      // of the session; 0 outside one
  bool shared = false;          // versions are read from the publisher's memory
  std::uint64_t malformed = 0;  // messages dropped because they broke the protocol
  std::map<std::string, ModelState> models;
};

struct Options {
  std::string name;  // unique among the publisher's workers; empty: host, process, a random suffix
  bool shared_memory = true;    // copy versions out of a local publisher's memory
  std::uint64_t bytes_max = 0;  // size of the largest version to accept; 0: 64 GiB

  bool partial = false;  // ignore tensors that the models here lack
  bool cast = false;     // convert values where dtypes differ, among F64, F32, F16 and BF16
  // Accept patches on the running version, if the publisher offers them. With `partial` or `cast`,
  // that needs a second copy of the running version.
  bool patches = true;

  // Connect to any data address that the publisher sends. If false, the data address must be on the
  // host of the publisher's address, or at its path with a suffix. For any other data address, the
  // worker fetches all versions, which is slower.
  bool any_data_host = false;

  // This worker's keys, for a publisher with keys: the path of its file from `weightbus keygen`,
  // the path of the folder, or the contents of the file, which begin with {. Default: the
  // environment variable WEIGHTBUS_KEYS, if it is set. With "", there are no keys. With several
  // addresses, there may be a path for each of them, in the same order, separated by commas.
  std::optional<std::string> keys;

  // Called in the worker's own thread, which answers the publisher: it must not block, and must not
  // close the worker.
  std::function<void(const Event&)> on_event;

  // Accepts or rejects each version once, in the thread that applies it, before any reader sees it
  // and before it is reported. After a rejection, the previous snapshot stays. A model in place
  // already has the new version (read it without reading()), and is torn after a rejection.
  Decide apply;

  // Decides before any byte of a model changes: after a rejection the previous version still runs.
  Decide before_apply;

  // The time limit of each call of these two functions, at most a day. After that the version is
  // rejected, and its model accepts no other version until the function has returned.
  std::chrono::milliseconds apply_timeout = std::chrono::seconds(60);

  // Versions of this model are copied into these tensors.
  Options& in_place(std::string model, std::vector<Tensor> tensors) {
    models.emplace_back(std::move(model), std::move(tensors));
    return *this;
  }

  Options& in_place(std::string model, Resident tensors) {
    models.emplace_back(std::move(model), std::move(tensors));
    return *this;
  }

  // Versions of this model are returned as snapshots.
  Options& snapshots(std::string model) {
    models.emplace_back(std::move(model), std::monostate());
    return *this;
  }

  using Target = std::variant<std::monostate, std::vector<Tensor>, Resident>;
  std::vector<std::pair<std::string, Target>> models;
};

// Keeps a model unchanged while this object exists. Destroy it in the thread that created it, and
// before its worker. That thread must not call receive() or create another Reading meanwhile.
class Reading {
 public:
  Reading(wb_reading* raw, Version of) : version(of), raw_(raw) {}

  const Version version;  // the version in the model; {0, 0} before the first

 private:
  detail::Handle<wb_reading, wb_read_end> raw_;
};

// Receives versions in the background at all times. Applies them in receive() or, after start(), in
// the background. Any thread may call any method.
class Worker {
 public:
  using Duration = std::chrono::steady_clock::duration;

  // Starts a worker. The publisher may start later. The text may have several addresses, separated
  // by commas.
  static Result<Worker> connect(const std::string& address, Options options);

  // The same for several addresses, of relays and the publisher, in order of preference. The worker
  // changes over to the next address when one fails, and returns to the first one once a publisher
  // answers there.
  static Result<Worker> connect(const std::vector<std::string>& addresses, Options options) {
    std::string list;
    for (const std::string& address : addresses) list += (list.empty() ? "" : ",") + address;
    return connect(list, std::move(options));
  }

  static Result<Worker> connect(std::initializer_list<std::string> addresses, Options options) {
    return connect(std::vector<std::string>(addresses), std::move(options));
  }

  const std::string& name() const { return core_->name; }

  // The address that the worker uses or tries now.
  std::string address() const { return wb_worker_address(core_->raw.get()); }

  // Applies the newest version that has arrived, waiting for one if necessary, and returns the
  // update; nullopt if none arrived in time. The version is applied in this thread: call receive()
  // where the weights are not in use, or let readers hold a `reading()`.
  //
  // An error means that a version was rejected (the weights are unchanged, unless the error says
  // that none runs), that the publisher refuses this worker ("name-taken", ...; the worker keeps
  // trying), or that the worker is closed. Each is returned once.
  Result<std::optional<Update>> receive(Duration timeout) {
    if (core_->in_background()) {
      return Error{"invalid", "worker " + name() +
                                  " applies in the background since start(); use " +
                                  "wait_for_version() and reading()"};
    }
    return core_->receive(timeout);
  }

  // Applies versions in the background from now on, while no reading is held. Errors are reported
  // to `on_event`.
  void start() { core_->start(); }

  // Keeps a model unchanged while the result exists. Fails ("torn") if an apply failed half-way.
  Result<Reading> reading(const std::string& model) const {
    const wb_model* const found = core_->find(model);
    if (found == nullptr) return Error{"invalid", "model '" + model + "' has no memory here"};
    wb_reading* raw = nullptr;
    Version version;
    const wb_code code = wb_read(found, &raw, &version.first, &version.second);
    if (code != WB_OK) return detail::error_of(code);
    return Reading(raw, version);
  }

  // Returns the newest snapshot of a model received as snapshots; null before its first version.
  // Keep the result: each call builds the list of tensors again.
  std::shared_ptr<const Snapshot> snapshot(const std::string& model) const {
    wb_update seen;
    const wb_code code = wb_latest(core_->raw.get(), model.c_str(), &seen);
    return code == WB_OK ? std::make_shared<const Snapshot>(seen) : nullptr;
  }

  // The version that a model runs; nullopt before the first one, and while no version runs.
  std::optional<Version> running(const std::string& model) const {
    return core_->look(model.c_str()).second.running;
  }

  // Waits until a model runs this version or a newer one. Returns true if it does.
  bool wait_for_version(const std::string& model, std::uint64_t version, Duration timeout) const {
    std::unique_lock guard(core_->mutex);
    return core_->applied.wait_until(guard, Core::after(timeout), [&] {
      const auto runs = running(model);
      return runs && runs->second >= version;
    });
  }

  // Waits until the publisher has admitted this worker, and returns the publisher's epoch.
  Result<std::uint64_t> wait_joined(Duration timeout) const {
    std::uint64_t epoch = 0;
    const wb_code code = wb_joined(core_->raw.get(), Core::milliseconds(timeout), &epoch);
    if (code == WB_NOTHING)
      return Error{"timeout",
                   "no publisher at " + core_->addresses + " has admitted worker " + name()};
    if (code != WB_OK) return detail::error_of(code);
    return epoch;
  }

  // Returns the worker's state, for monitoring.
  State state() const {
    State state = core_->look(nullptr).first;
    for (const std::string& id : core_->ids) {
      ModelState& model = state.models[id];
      do {  // the version may be renamed between the two calls
        model = core_->look(id.c_str()).second;
      } while (model.running && !core_->metadata_of(id.c_str(), *model.running, model.metadata));
    }
    return state;
  }

  // A descriptor for poll(), readable while receive(0s) would return an update or an error. The
  // worker owns it.
  int fd() const { return wb_fd(core_->raw.get()); }

  // Sends a `bye` and ends, as the destructor does. Waiting calls of receive() return "closed". A
  // function that decides on a version may call close(), and its decision is still used.
  void close() { core_->close(); }

 private:
  struct Core {
    ~Core() { close(); }

    static std::uint32_t milliseconds(Duration time) {
      const auto count = std::chrono::ceil<std::chrono::milliseconds>(time).count();
      return count < 0 ? 0 : count > UINT32_MAX ? UINT32_MAX : static_cast<std::uint32_t>(count);
    }

    static std::chrono::steady_clock::time_point after(Duration time) {
      return std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds(time));
    }

    bool in_background() {
      const std::lock_guard guard(mutex);
      return background.joinable();
    }

    Result<std::optional<Update>> receive(Duration timeout) {
      wb_update seen;
      const wb_code code = wb_receive(raw.get(), milliseconds(timeout), &seen);
      if (code == WB_NOTHING) return std::optional<Update>();
      if (code != WB_OK) return detail::error_of(code, seen.code);
      const std::lock_guard guard(mutex);
      applied.notify_all();
      std::map<std::string, std::string> metadata;
      metadata_of(seen.model, {seen.epoch, seen.version}, metadata);
      return std::optional(Update{seen.model, seen.epoch, seen.version, seen.nbytes, seen.digest,
                                  1e-9 * static_cast<double>(seen.nanoseconds),
                                  seen.snapshot ? std::make_shared<const Snapshot>(seen) : nullptr,
                                  seen.patched, std::move(metadata)});
    }

    // Adds the metadata of a version to `all`. Returns false if the version is no longer known.
    bool metadata_of(const char* model, Version version,
                     std::map<std::string, std::string>& all) const {
      wb_metadata* made = nullptr;
      const wb_code code = wb_metadata_of(raw.get(), model, version.first, version.second, &made);
      const detail::Handle<wb_metadata, wb_metadata_free> metadata(made);
      std::size_t count = 0;
      const wb_text* texts = wb_metadata_all(metadata.get(), &count);
      for (std::size_t i = 0; i < count; i++) all.emplace(texts[i].name, texts[i].text);
      return code != WB_NOTHING;
    }

    void start() {
      const std::lock_guard guard(mutex);
      if (background.joinable()) return;
      background = std::thread([this] {
        while (true) {
          const auto outcome = receive(std::chrono::hours(1));
          if (!outcome && outcome.error().code == "closed") return;
        }
      });
    }

    void close() {
      wb_close(raw.get());
      std::thread ended;
      {
        const std::lock_guard guard(mutex);
        if (background.get_id() == std::this_thread::get_id()) return;  // the destructor joins it
        ended.swap(background);
      }
      if (ended.joinable()) ended.join();
    }

    const wb_model* find(const std::string& id) const {
      const auto found = models.find(id);
      return found == models.end() ? nullptr : found->second.get();
    }

    std::pair<State, ModelState> look(const char* model) const {
      wb_state seen{};
      wb_look(raw.get(), model, &seen);
      const auto version = [](std::uint64_t epoch, std::uint64_t number) {
        return number == 0 ? std::nullopt : std::optional(Version(epoch, number));
      };
      return {{seen.epoch, seen.shared, seen.malformed, {}},
              {version(seen.running_epoch, seen.running_version),
               version(seen.arriving_epoch, seen.arriving_version),
               version(seen.staged_epoch, seen.staged_version),
               version(seen.ready_epoch, seen.ready_version),
               seen.chunks_here,
               seen.chunks,
               seen.torn,
               {}}};
    }

    static void call_listener(const wb_event* event, void* user) noexcept {
      try {
        static_cast<Core*>(user)->on_event(
            {event->kind, event->model, event->epoch, event->version, event->code, event->text});
      } catch (const std::exception& error) {
        std::fprintf(stderr, "weightbus: on_event threw an exception, which it must not: %s\n",
                     error.what());
      } catch (...) {
        std::fputs("weightbus: on_event threw an exception, which it must not\n", stderr);
      }
    }

    static int decide(const Decide& function, const wb_offer& offer, char* text,
                      std::size_t size) noexcept {
      const auto reject = [&](const char* why) { return std::snprintf(text, size, "%s", why), 1; };
      try {
        const Snapshot snapshot(offer);
        const auto why = function({offer.model, offer.epoch, offer.version, offer.nbytes,
                                   offer.snapshot ? &snapshot : nullptr});
        return why ? reject(why->c_str()) : 0;
      } catch (const std::exception& error) {
        return reject(error.what());
      } catch (...) {
        return reject("it threw something that is not a std::exception");
      }
    }

    static int call_apply(const wb_offer* offer, char* text, std::size_t size, void* user) {
      return decide(static_cast<Core*>(user)->apply, *offer, text, size);
    }

    static int call_before_apply(const wb_offer* offer, char* text, std::size_t size, void* user) {
      return decide(static_cast<Core*>(user)->before_apply, *offer, text, size);
    }

    std::string name, addresses;
    std::vector<std::string> ids;
    std::function<void(const Event&)> on_event;
    Decide apply, before_apply;
    std::map<std::string, std::shared_ptr<const wb_model>> models;
    detail::Handle<wb_worker, wb_worker_free> raw;  // destroyed before the members that it uses
    std::mutex mutex;
    std::condition_variable applied;
    std::thread background;
  };

  explicit Worker(std::unique_ptr<Core> core) : core_(std::move(core)) {}

  std::unique_ptr<Core> core_;
};

inline Result<Worker> Worker::connect(const std::string& address, Options options) {
  if (options.apply_timeout.count() <= 0 || options.apply_timeout > std::chrono::hours(24)) {
    return Error{"invalid", "apply_timeout must be above zero, and at most a day"};
  }
  using Model = Result<std::shared_ptr<const wb_model>>;
  auto core = std::make_unique<Core>();
  std::vector<wb_wanted> wanted;
  for (auto& [id, target] : options.models) {
    wanted.push_back({id.c_str(), nullptr});
    core->ids.push_back(id);
    if (std::holds_alternative<std::monostate>(target)) continue;
    const auto resident = std::get_if<Resident>(&target);
    if (resident && !resident->model())
      return Error{"invalid", id + ": this Resident was moved from; give the one that it became"};
    const Model model =
        resident ? Model(resident->model()) : detail::model_of(std::get<1>(target), wb_model_new);
    if (!model) return Error{model.error().code, id + ": " + model.error().text};
    wanted.back().model = model->get();
    if (!core->models.emplace(id, *model).second)
      return Error{"invalid", "model '" + id + "' is given twice; give it once"};
  }
  wb_options raw{};
  raw.size = sizeof raw;
  raw.address = address.c_str();
  raw.name = options.name.empty() ? nullptr : options.name.c_str();
  raw.wanted = wanted.data();
  raw.wanted_count = wanted.size();
  raw.bytes_max = options.bytes_max;
  raw.network_only = !options.shared_memory;
  core->on_event = std::move(options.on_event);
  if (core->on_event) raw.on_event = &Core::call_listener;
  core->apply = std::move(options.apply);
  if (core->apply) raw.apply = &Core::call_apply;
  core->before_apply = std::move(options.before_apply);
  if (core->before_apply) raw.before_apply = &Core::call_before_apply;
  raw.apply_timeout_ms = Core::milliseconds(options.apply_timeout);
  raw.partial = options.partial;
  raw.cast = options.cast;
  raw.whole_only = !options.patches;
  raw.any_data_host = options.any_data_host;
  raw.client = "weightbus-cpp/" WB_VERSION;
  raw.keys = options.keys ? options.keys->c_str() : nullptr;
  raw.user = core.get();
  wb_worker* made = nullptr;
  const wb_code code = wb_connect(&raw, &made);
  if (code != WB_OK) return detail::error_of(code);
  core->raw.reset(made);
  core->name = wb_name(made);
  core->addresses = address;
  return Worker(std::move(core));
}

}  // namespace weightbus
