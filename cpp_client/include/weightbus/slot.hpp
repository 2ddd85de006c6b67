// One model of a worker: what it runs, what is arriving, and what waits to be applied.
//
//     idle ──announce──> arriving ──all chunks, digest──> staged ──commit──> ready ──applied──>
//     idle
//                           │                               │                  │
//                           └── newer announced ────────────┴── abort, newer   └── failed
//
// `auto` versions are ready as soon as they are staged. The latest version wins: a newer
// announcement replaces the transfer under way. But a worker that was replaced once finishes the
// next one, by fetching, before it looks at anything newer; otherwise one that is slower than the
// trainer would never complete any.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "effects.hpp"
#include "layout.hpp"
#include "limits.hpp"
#include "messages.hpp"
#include "segment.hpp"
#include "staging.hpp"
#include "transfer.hpp"

namespace weightbus {

// Says why a layout cannot be applied to a model; nothing if it can.
using Accepts = std::function<std::string(const std::string& model, const Layout&)>;
// Opens a segment of shared memory; null if it is not to be had here.
using Opens = std::function<SharedMemoryPtr(const Shared&, std::uint64_t nbytes)>;

class Slot {
 public:
  Slot(std::string model, Accepts accepts, Opens opens, std::uint64_t bytes_max, Timing timing)
      : model_(std::move(model)),
        accepts_(std::move(accepts)),
        opens_(std::move(opens)),
        bytes_max_(bytes_max),
        timing_(timing) {}

  const std::optional<Running>& running() const { return running_; }

  // The greatest epoch of which anything was applied.
  std::uint64_t epoch() const { return epoch_; }
  bool catching_up() const { return catching_up_; }

  // How things stand, for operators.
  struct Status {
    std::optional<Running> running;
    std::optional<Key> arriving, staged, ready;
    std::uint64_t chunks = 0;  // of the one that is arriving
    bool catching_up = false;
  };
  Status status() const {
    Status status{running_, {}, {}, {}, 0, catching_up_};
    if (arriving_) {
      status.arriving = arriving_->key();
      status.chunks = arriving_->here();
    }
    if (undecided_) status.staged = undecided_->key;
    if (!ready_.empty()) status.ready = ready_.rbegin()->first;
    return status;
  }

  // What the publisher says.

  // A beacon, a welcome or a stray chunk speaks of a version: ask if it is news.
  Effects hear_of(std::uint64_t epoch, std::uint64_t version, double now) {
    Key known = newest();
    if (arriving_) known = std::max(known, arriving_->key());
    const Key key{epoch, version};
    if (version == 0 || key <= known || is_rejected(key)) return {};
    if (catching_up_ && (arriving_ || waiting_)) return {};
    return ask_latest(epoch, now);
  }

  // A version exists. `layout` is the payload, if there is one; chunks may follow only if the
  // announcement itself was pushed.
  Effects announced(const Announce& announce, const Bytes* layout, double now, bool pushed) {
    const Key key{announce.epoch, announce.version};
    if (layout != nullptr) {
      std::string fault = learn(announce, *layout);
      if (!fault.empty()) return reject(announce, "layout-invalid", std::move(fault));
    }
    if (undecided_ && key == undecided_->key && announce.commit == "auto") return commit();
    if (key <= newest() || is_rejected(key)) return {};
    if (arriving_) {
      if (key < arriving_->key()) return {};
      if (key == arriving_->key() && same_bytes(announce, arriving_->announce)) {
        arriving_->announce = announce;  // it may have been committed meanwhile
        return {};
      }
      if (catching_up_ && key != arriving_->key()) return {};
    }
    Effects effects = begin(announce, now);
    if (arriving_ && (shared_ || !pushed)) {
      arriving_->pull();
      append(effects, pull(now));
    }
    return effects;
  }

  // A version exists, and this is all of it: announcement, chunk and end in one.
  Effects announced_whole(Announce announce, Bytes payload, double now) {
    Chunk chunk{{announce.model, announce.epoch, announce.version}, 0, announce.whole->crc};
    End end{{announce.model, announce.epoch, announce.version}, announce.whole->digest};
    announce.whole.reset();
    Effects effects = announced(announce, nullptr, now, /*pushed=*/true);
    append(effects, this->chunk(chunk, payload, now, /*pushed=*/true));
    append(effects, this->end(end, now));
    return effects;
  }

  // Where a chunk's payload belongs that is about to be received; null: nowhere.
  LeasePtr place(const Chunk& chunk, std::size_t size) {
    if (!is_arriving(chunk)) return nullptr;
    return arriving_->lend(chunk.index, size);
  }

  // A piece of a version.
  Effects chunk(const Chunk& chunk, Bytes payload, double now, bool pushed) {
    if (!is_arriving(chunk)) return stray(chunk, now);
    const bool fresh = arriving_->add(chunk.index, chunk.crc, payload, now, pushed);
    Effects effects = pull(now);
    if (fresh && pushed && arriving_->here() % kProgressChunks == 0) {
      effects.push_back(Send{progress()});
    }
    append(effects, completed(now));
    return effects;
  }

  // All chunks of a version are out.
  Effects end(const End& end, double now) {
    if (!is_arriving(end)) return stray(end, now);
    arriving_->end(end.digest);
    Effects effects = pull(now);
    append(effects, completed(now));
    return effects;
  }

  // The version that is staged here may be applied.
  Effects committed(const Commit& commit) {
    const Key key{commit.epoch, commit.version};
    if (!undecided_ || undecided_->key != key || undecided_->digest != commit.digest) return {};
    return this->commit();
  }

  // The version must not be applied: drop what there is of it.
  Effects aborted(const Abort& abort, double now) {
    const Key key{abort.epoch, abort.version};
    if (undecided_ && undecided_->key == key) undecided_.reset();
    if (waiting_ && key_of(*waiting_) == key) waiting_.reset();
    return is_arriving(abort) ? drop_arriving(now) : Effects{};
  }

  // The publisher no longer has a version (of any epoch, if that is 0).
  Effects gone(std::uint64_t epoch, std::uint64_t version, double now) {
    if (arriving_ && epoch != 0 && epoch != arriving_->key().first) return {};  // a late word
    if (waiting_ && (version == 0 || version == waiting_->version)) waiting_.reset();
    if (!arriving_ || arriving_->key().second != version) return {};
    const std::uint64_t asked = arriving_->key().first;
    Effects effects = drop_arriving(now);
    append(effects, ask_latest(asked, now));
    return effects;
  }

  // Versions will come from shared memory, or probably of this size over the network.
  void expect(bool shared, std::uint64_t nbytes) {
    shared_ = shared;
    if (!shared && nbytes <= bytes_max_ && in_buffers() == 0) shelf_->reserve(nbytes);
  }

  // The publisher has let this worker in (again), and has this version for it.
  Effects reconnected(std::uint64_t epoch, std::uint64_t version, double now) {
    Effects effects;
    if (undecided_ && undecided_->key.first != epoch) undecided_.reset();
    waiting_.reset();
    rejected_.clear();
    torn_ = std::min(torn_, 1);  // it may be tried as often as at first
    if (arriving_ && arriving_->key().first != epoch) {
      append(effects, drop_arriving(now));
    } else if (arriving_) {
      arriving_->reconnected(now);
    }
    asked_at_ = kNever;
    say_staged(effects);
    append(effects, hear_of(epoch, version, now));
    return effects;
  }

  // What the user does with a version that is ready.

  // Somebody has begun to apply a version.
  void taken(Key key) { taken_ = key; }

  // A version was applied: it runs here. `digest`, if it was hashed only then.
  Effects applied(Key key, double now, const std::string& digest) {
    const StagedPtr staged = returned(key);
    if (!staged) return {};
    running_ = Running{key.first, key.second, digest.empty() ? staged->digest : digest};
    epoch_ = std::max(epoch_, key.first);
    if (std::exchange(torn_, 0) > 0) failure_.reset();
    Effects effects{Send{applied_message()}};
    append(effects, resume(now));
    return effects;
  }

  // A version could not be applied. If the model is `intact`, the old one still runs (W24).
  Effects failed(Key key, const std::string& text, double now, bool intact = true) {
    if (!returned(key)) return {};
    if (!intact) {
      running_.reset();
      stale_ = key;  // what is tried next comes verified
      epoch_ = std::max(epoch_, key.first);
      ++torn_;
    }
    if (intact || torn_ >= kAppliesMax) remember_rejected(key);
    Effects effects{fail(key, "apply", text)};
    append(effects, resume(now));
    return effects;
  }

  // A version was gone from shared memory before it could be copied: ask for the latest.
  Effects stale(Key key, double now) {
    if (!returned(key)) return {};
    stale_ = key;
    asked_at_ = kNever;
    return ask_latest(key.first, now);
  }

  // A version was replaced by a newer one before anybody applied it.
  Effects dropped(Key key, double now) { return returned(key) ? resume(now) : Effects{}; }

  // Time.

  // Fetches what is due.
  Effects tick(double now) {
    if (arriving_) {
      Effects effects = pull(now);
      append(effects, completed(now));
      return effects;
    }
    if (waiting_ && now - asked_at_ >= timing_.patience()) return resume(now);
    return {};
  }

  // Says again how things stand, in case it got lost.
  void repeat(Effects& effects) const {
    if (arriving_) effects.push_back(Send{progress()});
    say_staged(effects);
    if (running_) effects.push_back(Send{applied_message()});
    if (failure_) effects.push_back(Send{*failure_});
    if (!ready_.empty() && !arriving_) {
      const Key key = ready_.rbegin()->first;
      const char* phase = key == taken_ ? "applying" : "staged";
      effects.push_back(Send{Progress{{model_, key.first, key.second}, 0, phase}});
    }
  }

 private:
  static constexpr double kNever = -std::numeric_limits<double>::infinity();
  static constexpr int kAppliesMax = 3;   // in a row that fail half-way; then it is rejected
  static constexpr int kRestartsMax = 3;  // then a version whose digest never matched is given up
  static constexpr std::size_t kRejectedKept = 8;
  static constexpr std::size_t kLayoutsKept = 4;  // a model that alternates sends none again

  struct Known {
    LayoutPtr layout;
    bool accepted = false;  // it can be applied here
  };
  struct Fault {
    std::string code, text;
  };

  static Key key_of(const Announce& announce) { return {announce.epoch, announce.version}; }

  static bool same_bytes(const Announce& one, const Announce& other) {
    return one.layout == other.layout && one.nbytes == other.nbytes &&
           one.chunk_bytes == other.chunk_bytes;
  }

  bool is_arriving(const OfVersion& of) const {
    return arriving_ && arriving_->key() == Key{of.epoch, of.version};
  }

  bool is_rejected(Key key) const {
    return std::find(rejected_.begin(), rejected_.end(), key) != rejected_.end();
  }

  void remember_rejected(Key key) {
    if (rejected_.size() >= kRejectedKept) rejected_.pop_front();
    rejected_.push_back(key);
  }

  // The newest version that needs no announcement any more.
  Key newest() const {
    Key key{0, 0};
    if (!ready_.empty()) key = ready_.rbegin()->first;
    if (running_) key = std::max(key, Key{running_->epoch, running_->version});
    if (undecided_) key = std::max(key, undecided_->key);
    return key;
  }

  // A chunk or an end of a version that is not arriving names it.
  Effects stray(const OfVersion& of, double now) {
    return waiting_ ? Effects{} : hear_of(of.epoch, of.version, now);
  }

  Effects ask_latest(std::uint64_t epoch, double now) {
    if (now - asked_at_ < timing_.quiet()) return {};
    asked_at_ = now;
    const bool without_layout = waiting_ && find_layout(waiting_->layout) == nullptr;
    return {Send{Fetch{{model_, epoch, 0}, 0, 0, without_layout}}};
  }

  Known* find_layout(const std::string& id) {
    for (Known& known : layouts_) {
      if (known.layout->id() == id) return &known;
    }
    return nullptr;
  }

  // Remembers a layout; returns what is wrong with it, if anything.
  std::string learn(const Announce& announce, Bytes header) {
    if (header.size != announce.layout_bytes) {
      return "the layout has " + std::to_string(header.size) + " bytes, announced were " +
             std::to_string(announce.layout_bytes);
    }
    Result<LayoutPtr> layout = Layout::parse(header);
    if (!layout) return layout.error().text;
    if ((*layout)->id() != announce.layout) {
      return "the layout hashes to " + (*layout)->id() + ", announced was " + announce.layout;
    }
    if (find_layout(announce.layout) != nullptr) return "";
    if (layouts_.size() >= kLayoutsKept) layouts_.pop_front();
    layouts_.push_back({*layout});
    return "";
  }

  // Starts to receive a version, replacing an older one that is still arriving.
  Effects begin(const Announce& announce, double now) {
    waiting_ = announce;
    Known* known = find_layout(announce.layout);
    std::optional<Fault> fault = unsupported(announce);
    if (!fault && known != nullptr) fault = mismatch(announce, *known);
    if (fault) return reject(announce, std::move(fault->code), std::move(fault->text));
    if (known == nullptr) {
      asked_at_ = now;
      return {Send{Fetch{{model_, announce.epoch, announce.version}, 0, 0, true}}};
    }
    const LayoutPtr layout = known->layout;
    SharedMemoryPtr memory;
    if (announce.shared && key_of(announce) != stale_) {
      memory = opens_(*announce.shared, announce.nbytes);
    }
    if (memory && announce.acknowledge == "applied" && announce.commit == "auto") {
      Effects effects = drop_arriving(now);
      append(effects, point(announce, layout, memory));
      return effects;
    }
    return receive(announce, layout, memory, now);
  }

  // The version is whole in shared memory: it can be applied from there.
  Effects point(const Announce& announce, const LayoutPtr& layout, const SharedMemoryPtr& memory) {
    begun();
    undecided_.reset();
    auto staged = std::make_shared<StagedVersion>();
    staged->model = model_;
    staged->key = key_of(announce);
    staged->layout = layout;
    staged->shared = memory;
    staged->hash_chunks = announce.hash ? announce.chunk_bytes : 0;
    ready_[staged->key] = staged;
    return {Ready{staged}};
  }

  // Takes a buffer and waits for chunks, or fills it from shared memory.
  Effects receive(const Announce& announce, const LayoutPtr& layout, const SharedMemoryPtr& memory,
                  double now) {
    Effects effects = abandon();
    if (in_buffers() >= kBuffersMax) return effects;  // `resume` begins when one comes back
    BufferPtr buffer = shelf_->take(announce.nbytes);
    if (!buffer) {
      append(effects, reject(announce, "no-memory",
                             "there is no memory for " + std::to_string(announce.nbytes) +
                                 " bytes: lower bytes_max, or make room"));
      append(effects, caught_up(announce.epoch, now));
      return effects;
    }
    begun();
    arriving_ = std::make_unique<Transfer>(announce, layout, std::move(buffer), now, timing_);
    const Stamp stamp{model_, announce.epoch, announce.version};
    if (memory && memory->begin(stamp)) {
      arriving_->read(memory->data());
      if (!memory->end(stamp)) arriving_->forget();
    }
    return effects;
  }

  void begun() {
    waiting_.reset();
    if (torn_ == 0) failure_.reset();
  }

  // Buffers that hold a version which is arriving, staged or ready.
  std::size_t in_buffers() const {
    std::size_t count = arriving_ ? 1 : 0;
    count += undecided_ ? 1 : 0;
    for (const auto& [key, staged] : ready_) count += staged->buffer ? 1 : 0;
    return count;
  }

  // A newer version replaces the one arriving; the next is finished, whatever comes.
  Effects abandon() {
    if (!arriving_) return {};
    arriving_.reset();
    if (std::exchange(catching_up_, true) || shared_) return {};
    return {Subscribe{data_topic(model_), false}};
  }

  std::optional<Fault> unsupported(const Announce& announce) const {
    if (announce.encoding != "raw" || announce.encryption) {
      return Fault{"unsupported", "encoding '" + announce.encoding + "', encryption '" +
                                      announce.encryption.value_or("none") +
                                      "'; this worker takes 'raw' without encryption"};
    }
    if (announce.nbytes > bytes_max_) {
      return Fault{"too-large",
                   std::to_string(announce.nbytes) + " bytes; this worker takes at most " +
                       std::to_string(bytes_max_) + ": raise its bytes_max if that is meant"};
    }
    if (announce.nbytes > kChunksMax * announce.chunk_bytes) {
      return Fault{"too-many-chunks", std::to_string(announce.nbytes) + " bytes in chunks of " +
                                          std::to_string(announce.chunk_bytes) + " are more than " +
                                          std::to_string(kChunksMax) +
                                          " chunks: publish with larger ones"};
    }
    return {};
  }

  std::optional<Fault> mismatch(const Announce& announce, Known& known) const {
    if (known.layout->nbytes() != announce.nbytes) {
      return Fault{"layout-invalid", "announced are " + std::to_string(announce.nbytes) +
                                         " bytes, the layout holds " +
                                         std::to_string(known.layout->nbytes())};
    }
    if (known.accepted) return {};
    std::string problem = accepts_(model_, *known.layout);
    if (!problem.empty()) return Fault{"layout-mismatch", std::move(problem)};
    known.accepted = true;
    return {};
  }

  // What may be otherwise next time, since bytes were damaged or memory was short, is not
  // remembered: the next beacon leads to another attempt.
  Effects reject(const Announce& announce, std::string code, std::string text) {
    const bool transient = code == "digest-mismatch" || code == "layout-invalid" ||
                           code == "no-memory" || code == "unsupported";
    if (!transient) remember_rejected(key_of(announce));
    waiting_.reset();
    Effects effects{fail(key_of(announce), code, text)};
    effects.push_back(Rejected{model_, key_of(announce), std::move(code), std::move(text)});
    return effects;
  }

  Effect fail(Key key, const std::string& code, const std::string& text) {
    failure_ = Failed{{model_, key.first, key.second}, code, truncated(text, kTextMax), torn_ == 0};
    return Send{*failure_};
  }

  Effects pull(double now) {
    Effects effects;
    const auto [epoch, version] = arriving_->key();
    for (const Range& range : arriving_->wants(now)) {
      effects.push_back(Send{Fetch{{model_, epoch, version}, range.first, range.count, false}});
    }
    return effects;
  }

  Progress progress() const {
    const auto [epoch, version] = arriving_->key();
    return {{model_, epoch, version}, arriving_->here(), "receiving"};
  }

  // If the version is whole: verifies it, then stages it.
  Effects completed(double now) {
    if (!arriving_ || !arriving_->complete()) return {};
    const std::uint64_t epoch = arriving_->key().first;
    if (!arriving_->verify()) {
      if (arriving_->restarts() < kRestartsMax) return {};  // the next tick fetches it anew
      const std::unique_ptr<Transfer> transfer = std::move(arriving_);
      Effects effects = reject(
          transfer->announce, "digest-mismatch",
          "the whole did not match its digest, " + std::to_string(transfer->restarts()) + " times");
      append(effects, caught_up(epoch, now));
      return effects;
    }
    Effects effects = stage();
    append(effects, caught_up(epoch, now));
    return effects;
  }

  Effects stage() {
    const std::unique_ptr<Transfer> transfer = std::move(arriving_);
    const Announce& announce = transfer->announce;
    auto staged = std::make_shared<StagedVersion>();
    staged->model = model_;
    staged->key = transfer->key();
    staged->layout = transfer->layout;
    staged->buffer = std::move(transfer->buffer);
    staged->digest = transfer->digest();
    staged->say_staged = announce.acknowledge == "staged" || announce.commit == "together";
    undecided_ = std::move(staged);
    Effects effects;
    if (undecided_->say_staged) effects.push_back(staged_message(*undecided_));
    if (announce.commit != "together") append(effects, commit());
    return effects;
  }

  Effects commit() {
    const StagedPtr staged = std::move(undecided_);
    undecided_.reset();
    ready_[staged->key] = staged;
    return {Ready{staged}};
  }

  // A transfer is over: take pushed chunks again, and look for what came meanwhile.
  Effects caught_up(std::uint64_t epoch, double now) {
    if (!std::exchange(catching_up_, false)) return {};
    Effects effects{Subscribe{data_topic(model_), !shared_}};
    append(effects, ask_latest(epoch, now));
    return effects;
  }

  Effects drop_arriving(double now) {
    if (!arriving_) return {};
    const std::uint64_t epoch = arriving_->key().first;
    arriving_.reset();
    waiting_.reset();
    return caught_up(epoch, now);
  }

  Effect staged_message(const StagedVersion& staged) const {
    return Send{Staged{{model_, staged.key.first, staged.key.second}, staged.digest}};
  }

  Applied applied_message() const {
    return {{model_, running_->epoch, running_->version}, running_->digest};
  }

  // What is staged is said for as long as it is held and not applied.
  void say_staged(Effects& effects) const {
    for (const auto& [key, staged] : ready_) {
      if (staged->say_staged) effects.push_back(staged_message(*staged));
    }
    if (undecided_ && undecided_->say_staged) effects.push_back(staged_message(*undecided_));
  }

  StagedPtr returned(Key key) {
    const auto found = ready_.find(key);
    if (found == ready_.end()) return nullptr;
    StagedPtr staged = std::move(found->second);
    ready_.erase(found);
    return staged;
  }

  // A buffer is free, or patience is over: begins what waited for it.
  Effects resume(double now) {
    if (!waiting_ || arriving_) return {};
    const Announce waiting = *waiting_;
    if (key_of(waiting) <= newest()) {
      waiting_.reset();
      return {};
    }
    Effects effects = begin(waiting, now);
    if (arriving_) {  // what was pushed of it has gone by
      arriving_->pull();
      append(effects, pull(now));
    }
    return effects;
  }

  const std::string model_;
  const Accepts accepts_;
  const Opens opens_;
  const std::uint64_t bytes_max_;
  const Timing timing_;
  std::shared_ptr<Shelf> shelf_ = Shelf::make();
  bool shared_ = false;  // versions are read from shared memory: nothing needs to be pushed

  std::optional<Running> running_;
  std::uint64_t epoch_ = 0;  // the greatest of which bytes were written into the model
  int torn_ = 0;  // applies in a row that failed half-way: while there is one, nothing runs
  std::unique_ptr<Transfer> arriving_;
  StagedPtr undecided_;              // staged together, waiting for the commit
  std::map<Key, StagedPtr> ready_;   // given out to be applied
  std::optional<Announce> waiting_;  // newer, but its layout or a buffer is missing
  std::deque<Known> layouts_;
  // Could not be taken; not tried again. An older one still may be: what was rejected may have been
  // aborted, or meant for few, and the latest for all be one that was missed.
  std::deque<Key> rejected_;
  std::optional<Failed> failure_;  // the last one, until another version is begun
  bool catching_up_ = false;       // finishing one version, whatever is announced
  Key taken_{0, 0};                // is being applied
  Key stale_{0, 0};  // was not to be had from shared memory: fetched, if it is offered again
  double asked_at_ = kNever;  // when the latest announcement was asked for
};

}  // namespace weightbus
