// A publisher of the weight bus for C++17: it copies a model, sends it to every worker that
// connects, and reports the outcome at each worker.
//
// It is a layer over libweightbus. Tensors and results are defined in weightbus.hpp.
#pragma once

#include <weightbus/weightbus.hpp>

namespace weightbus {

// The outcome of a publish at one worker.
struct Outcome {
  // "applied", "staged", "failed", "lost", "left", "behind" or "skipped" (a newer version runs).
  std::string outcome;
  std::chrono::nanoseconds after{0};  // from the call to the outcome; 0 while "behind"
  std::string detail;                 // for a person; empty if the outcome needs none
  // How the version arrived: "raw" (whole) or "delta-1" (a patch on the version that ran before);
  // empty if unknown. And the size of the version or patch in bytes.
  std::string encoding;
  std::uint64_t nbytes = 0;
};

// The result of one publish.
struct Receipt {
  std::uint64_t epoch = 0, version = 0, nbytes = 0;
  std::chrono::nanoseconds took{0};
  std::string digest;
  std::map<std::string, Outcome> workers;  // by name: each worker that the version was published to
  bool achieved = false;                   // the required number of workers succeeded
  std::string text;                        // the receipt as a text for a person
};

// The options of one publish.
struct PublishOptions {
  std::vector<std::string> workers;  // names of the workers; empty: all that subscribe to the model
  std::size_t at_least = 0;          // number of workers that must succeed; 0: all
  // The state that a worker must reach.
  enum class Wait { applied, staged, nobody } wait = Wait::applied;
  bool together = false;  // no worker applies the version before the required number has staged it
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  std::size_t expect = 0;  // least number that "all" stands for; 0: the publisher's
  // How the version is sent to workers that accept patches: whole, or as a patch on the version
  // that they run. `delta_flat` has more bytes, which are faster to encode and decode. `automatic`
  // chooses the one that is likely to arrive first.
  enum class Encoding { raw, delta, delta_flat, automatic } encoding = Encoding::raw;
  // Texts by name that are sent with the version, such as a step or a reward. At most 32 entries,
  // and 4 KiB in all.
  std::map<std::string, std::string> metadata;
};

struct PublisherOptions {
  std::string data, advertise;    // address of the data socket, and the one sent to workers
  std::uint64_t epoch = 0;        // 0: milliseconds since 1970
  std::uint64_t chunk_bytes = 0;  // 0: 2^20
  std::chrono::milliseconds ping = std::chrono::seconds(1);        // between two pings
  std::chrono::milliseconds lost_after = std::chrono::seconds(5);  // silence; at least twice `ping`
  // A folder that keeps the epoch and the latest version of each model after the publisher ends.
  // The next publisher with this folder, in this language or in Python, offers these versions
  // again.
  std::string state;
  std::size_t history = 0;  // number of older versions of each model kept in `state`
  std::size_t expect = 0;   // least number of workers that "all" stands for
  bool insecure = false;    // without keys, allow an address that other hosts can reach
  // Number of versions of each model kept in memory as bases of patches, at most 8, and the bytes
  // that they may take together; 0: 2 versions of any size.
  std::size_t bases = 0;
  std::uint64_t bases_bytes_max = 0;

  // A folder made by `weightbus keygen`: only workers with a key that it allows can connect, and
  // all published data is encrypted. The folder is checked repeatedly. Default: the folder in the
  // environment variable WEIGHTBUS_KEYS, if it is set. With "", there are no keys.
  std::optional<std::string> keys;
  std::chrono::milliseconds rekey{0};  // the lifetime of a group key; 0: a day

  // Called on each event of a worker ("joined", "lost", "stuck", "back", "left", "refused",
  // "failed", "wrong-digest", "notice"; `model` is the worker's name), in the publisher's own
  // thread. The function must not block, and must not destroy the publisher.
  std::function<void(const Event&)> on_event;
};

// Publishes versions of models. Any thread may call any method. The destructor calls close().
class Publisher {
 public:
  Publisher(Publisher&&) = default;
  Publisher& operator=(Publisher&& other) noexcept {
    raw_ = std::move(other.raw_);  // first, because this ends the thread that calls on_event_
    on_event_ = std::move(other.on_event_);
    return *this;
  }

  // Listens at "tcp://HOST:PORT" (port 0: any free one) or "ipc://PATH".
  static Result<Publisher> bind(const std::string& address, PublisherOptions options = {}) {
    const auto text_or_null = [](const std::string& text) {
      return text.empty() ? nullptr : text.c_str();
    };
    auto on_event =
        std::make_unique<std::function<void(const Event&)>>(std::move(options.on_event));
    wb_publisher_options raw{};
    raw.size = sizeof raw;
    raw.address = address.c_str();
    raw.data = text_or_null(options.data);
    raw.advertise = text_or_null(options.advertise);
    raw.epoch = options.epoch;
    raw.chunk_bytes = options.chunk_bytes;
    raw.ping_ms = milliseconds(options.ping);
    raw.lost_after_ms = milliseconds(options.lost_after);
    raw.state = text_or_null(options.state);
    raw.history = options.history;
    raw.expect = options.expect;
    raw.insecure = options.insecure;
    raw.keys = options.keys ? options.keys->c_str() : nullptr;
    raw.rekey_ms = milliseconds(options.rekey);
    if (*on_event) raw.on_event = &call_listener;
    raw.user = on_event.get();
    raw.bases = options.bases;
    raw.bases_bytes_max = options.bases_bytes_max;
    wb_publisher* made = nullptr;
    const wb_code code = wb_bind(&raw, &made);
    if (code != WB_OK) return detail::error_of(code);
    return Publisher(std::move(on_event), made);
  }

  // The address that workers connect to, with the port that was bound.
  std::string address() const { return wb_address(raw_.get()); }

  // Publishes a new version of a model, and waits until the workers have it. `tensors` are copied
  // before the wait begins, and are not written to. The result is a receipt even if fewer workers
  // succeeded than required: see `achieved`.
  Result<Receipt> publish(const std::string& model, const std::vector<Tensor>& tensors,
                          const PublishOptions& options = {}) {
    std::vector<wb_tensor> raw;
    raw.reserve(tensors.size());
    for (const Tensor& one : tensors) {
      raw.push_back({one.name.c_str(), one.name.size(), one.dtype.c_str(), one.shape.data(),
                     one.shape.size(), one.data, one.bytes});
    }
    return publish_with(options, [&](const wb_publish_options& how, wb_receipt** receipt) {
      return wb_publish(raw_.get(), model.c_str(), raw.data(), raw.size(), &how, receipt);
    });
  }

  // Like publish(), with the bytes of a safetensors file.
  Result<Receipt> publish_safetensors(const std::string& model, Span<const std::byte> file,
                                      const PublishOptions& options = {}) {
    return publish_with(options, [&](const wb_publish_options& how, wb_receipt** receipt) {
      return wb_publish_safetensors(raw_.get(), model.c_str(), file.data(), file.size(), &how,
                                    receipt);
    });
  }

  // Waits until at least `count` workers subscribe to the model. Returns true if they did in time.
  Result<bool> wait_for_workers(const std::string& model, std::size_t count,
                                std::chrono::milliseconds timeout) {
    const wb_code code =
        wb_wait_for_workers(raw_.get(), model.c_str(), count, milliseconds(timeout));
    if (code == WB_OK || code == WB_NOTHING) return code == WB_OK;
    return detail::error_of(code);
  }

  // Closes the publisher: calls of publish() return with the outcomes so far.
  void close() { wb_publisher_close(raw_.get()); }

 private:
  using OnEvent = std::unique_ptr<std::function<void(const Event&)>>;

  Publisher(OnEvent on_event, wb_publisher* raw) : on_event_(std::move(on_event)), raw_(raw) {}

  static std::uint32_t milliseconds(std::chrono::milliseconds time) {
    const auto count = time.count();
    return count < 0 ? 0 : count > UINT32_MAX ? UINT32_MAX : static_cast<std::uint32_t>(count);
  }

  static void call_listener(const wb_event* event, void* user) noexcept {
    try {
      (*static_cast<std::function<void(const Event&)>*>(user))(
          {event->kind, event->model, event->epoch, event->version, event->code, event->text});
    } catch (...) {
      std::fputs("weightbus: on_event threw an exception, which it must not\n", stderr);
    }
  }

  template <class Publish>
  Result<Receipt> publish_with(const PublishOptions& options, Publish publish) {
    if (options.timeout.count() <= 0) return Error{"invalid", "timeout must be above zero"};
    std::vector<const char*> names;
    names.reserve(options.workers.size());
    for (const std::string& name : options.workers) names.push_back(name.c_str());
    wb_publish_options raw{};
    raw.size = sizeof raw;
    raw.workers = names.data();
    raw.workers_count = names.size();
    raw.at_least = options.at_least;
    raw.wait = static_cast<std::uint32_t>(options.wait);
    raw.together = options.together;
    raw.timeout_ms = milliseconds(options.timeout);
    raw.expect = options.expect;
    raw.encoding = static_cast<std::uint32_t>(options.encoding);
    std::vector<wb_text> metadata;
    metadata.reserve(options.metadata.size());
    for (const auto& [name, text] : options.metadata)
      metadata.push_back({name.c_str(), text.c_str()});
    raw.metadata = metadata.data();
    raw.metadata_count = metadata.size();
    wb_receipt* made = nullptr;
    const wb_code code = publish(raw, &made);
    const detail::Handle<wb_receipt, wb_receipt_free> receipt(made);
    if (!receipt) return detail::error_of(code);
    return receipt_of(receipt.get(), code == WB_OK);
  }

  static Receipt receipt_of(const wb_receipt* receipt, bool achieved) {
    wb_published look{};
    wb_receipt_look(receipt, &look);
    Receipt made{look.epoch,  look.version, look.nbytes, std::chrono::nanoseconds(look.nanoseconds),
                 look.digest, {},           achieved,    look.text};
    std::size_t count = 0;
    const wb_outcome* workers = wb_receipt_workers(receipt, &count);
    for (std::size_t at = 0; at < count; ++at) {
      made.workers[workers[at].worker] = {
          workers[at].outcome, std::chrono::nanoseconds(workers[at].nanoseconds),
          workers[at].detail, workers[at].encoding, workers[at].nbytes};
    }
    return made;
  }

  OnEvent on_event_;  // outlives `raw_`, here and in a move assignment
  detail::Handle<wb_publisher, wb_publisher_free> raw_;
};

}  // namespace weightbus
