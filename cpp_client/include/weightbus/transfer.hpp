// One version arriving chunk by chunk, pushed and fetched in any order.
//
// Each chunk is in one of four states, one byte each:
//
//     MISSING ──fetch──> ASKED ──┐
//        │                 │     ├──> HERE
//        ├─────push────────┼─────┤
//        └─────lend────────┴─> LENT ──damaged, cut off──> MISSING
//
// A chunk is lent while its bytes are being received straight into their place: whatever else comes
// of it meanwhile is ignored, since nobody may write there twice.
//
// Pushed chunks come in order, so whatever lies below the highest pushed one was dropped and is
// fetched at once. What lies above may still be pushed: it is fetched after `end`, or when nothing
// has arrived for a while. At most a window of chunks is ASKED; an answer that does not come in
// time turns all ASKED back to MISSING, and the patience doubles until something arrives.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bytes.hpp"
#include "chunks.hpp"
#include "crc32c.hpp"
#include "digest.hpp"
#include "layout.hpp"
#include "limits.hpp"
#include "messages.hpp"
#include "staging.hpp"

namespace weightbus {

// Memory into which a payload is being received, piece by piece.
class Lease {
 public:
  // `keep` is what must outlive the memory.
  explicit Lease(MutableBytes place, std::shared_ptr<void> keep = nullptr)
      : place_(place), keep_(std::move(keep)) {}

  MutableBytes place() const { return place_; }
  std::size_t count() const { return count_; }  // bytes that are here
  std::uint32_t crc() const { return crc_; }    // of these, computed while they are in the cache
  bool live() const { return live_; }  // else the memory serves another purpose by now: keep out
  bool cut_off() const { return cut_off_; }
  bool complete() const { return count_ == place_.size; }

  // Where the next bytes go.
  MutableBytes room() const { return place_.slice(count_, place_.size); }

  // Takes note of so many bytes in room().
  void received(std::size_t count) {
    crc_ = crc32c({place_.data + count_, count}, crc_);
    count_ += count;
  }

  void revoke() {
    live_ = false;
    keep_.reset();
  }

  // The rest will never come.
  void cancel() { cut_off_ = true; }

 private:
  MutableBytes place_;
  std::shared_ptr<void> keep_;
  std::size_t count_ = 0;
  std::uint32_t crc_ = 0;
  bool live_ = true, cut_off_ = false;
};

using LeasePtr = std::shared_ptr<Lease>;

// A range of chunks to fetch; a count of 0 asks for the announcement and the `end`.
struct Range {
  std::uint64_t first = 0, count = 0;
};

class Transfer {
 public:
  // `buffer` has announce.nbytes bytes; the announcement's sizes were checked.
  Transfer(Announce announced, LayoutPtr layout_of, BufferPtr into, double now,
           const Timing& timing)
      : announce(std::move(announced)),
        layout(std::move(layout_of)),
        buffer(std::move(into)),
        plan_(*ChunkPlan::of(announce.nbytes, announce.chunk_bytes)),
        states_(plan_.count(), kMissing),
        crcs_(plan_.count()),
        timing_(timing),
        heard_at_(now),
        patience_(timing.patience()) {}

  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  ~Transfer() { revoke(); }

  Announce announce;
  LayoutPtr layout;
  BufferPtr buffer;

  Key key() const { return {announce.epoch, announce.version}; }
  std::uint64_t here() const { return here_; }           // chunks that have arrived
  int restarts() const { return restarts_; }             // times the whole did not match its digest
  const std::string& digest() const { return digest_; }  // from `end`; empty until then
  bool complete() const { return here_ == plan_.count() && !digest_.empty(); }

  // Takes a chunk; returns whether it is new and sound. One that is neither is ignored.
  bool add(std::uint64_t index, std::uint32_t crc, Bytes payload, double now, bool pushed) {
    if (index >= plan_.count()) return false;
    if (pushed) pushed_ = std::max(pushed_, index + 1);
    notice_cut_off();
    if (lease_ && payload.data == lease_->place().data && index == lent_) {
      if (!take_back(crc)) return false;
    } else if (states_[index] == kHere || states_[index] == kLent || !copy(index, crc, payload)) {
      return false;
    }
    states_[index] = kHere;
    crcs_[index] = crc;
    ++here_;
    hear(now);
    return true;
  }

  // The place of a chunk of this size, to receive it there; null if it has none. `add` takes it
  // once it is complete, and must be given the lease's own memory as payload.
  LeasePtr lend(std::uint64_t index, std::size_t size) {
    notice_cut_off();
    if (index >= plan_.count() || states_[index] == kHere || states_[index] == kLent)
      return nullptr;
    const auto [begin, end] = plan_.span(index);
    if (size != end - begin) return nullptr;
    revoke();
    asked_ -= states_[index] == kAsked;
    states_[index] = kLent;
    lent_ = index;
    lent_count_ = 0;
    lease_ = std::make_shared<Lease>(buffer->bytes().slice(begin, end), buffer);
    return lease_;
  }

  // Nobody may write into the buffer any more.
  void revoke() {
    if (!lease_) return;
    lease_->revoke();
    lease_.reset();
    states_[lent_] = kMissing;
    cursor_ = std::min(cursor_, lent_);
  }

  // Takes the digest of the whole: no more chunks will be pushed.
  void end(std::string digest) {
    digest_ = std::move(digest);
    pulling_ = true;
  }

  // Takes every chunk from memory that holds the whole version.
  void read(Bytes data) {
    revoke();
    for (std::uint64_t index = 0; index < plan_.count(); ++index) {
      const auto [begin, end] = plan_.span(index);
      const MutableBytes place = buffer->bytes().slice(begin, end);
      std::memcpy(place.data, data.data + begin, place.size);
      states_[index] = kHere;
      crcs_[index] = crc32c(place);
    }
    here_ = cursor_ = plan_.count();
    asked_ = 0;
  }

  // Forgets what has arrived.
  void forget() {
    revoke();
    std::fill(states_.begin(), states_.end(), kMissing);
    here_ = asked_ = cursor_ = 0;
  }

  // Nothing will be pushed: fetch at once.
  void pull() { pulling_ = true; }

  // What to fetch now.
  std::vector<Range> wants(double now) {
    notice_cut_off();
    if (lease_ && lease_->count() > lent_count_) {
      lent_count_ = lease_->count();
      heard_at_ = now;
    }
    const double silent = now - heard_at_;
    if (silent >= timing_.quiet()) pulling_ = true;
    if (silent >= patience_) {
      ask_again(now);
      patience_ = std::min(2 * patience_, timing_.patience_max());
    }
    std::vector<Range> wanted;
    if (digest_.empty() && pulling_ && !end_asked_) {
      end_asked_ = true;
      wanted.push_back({0, 0});
    }
    if (asked_ <= kWindowChunks / 2) ask_ranges(wanted);
    return wanted;
  }

  // Whether the whole is what was published; if not, starts over.
  bool verify() {
    if (digest_ == weightbus::digest(announce.layout, announce.chunk_bytes, crcs_)) return true;
    ++restarts_;
    forget();
    digest_.clear();
    end_asked_ = false;
    pulling_ = true;
    return false;
  }

  // The connection is new: what was asked on the old one will not come.
  void reconnected(double now) {
    ask_again(now);
    pulling_ = true;
  }

 private:
  enum State : char { kMissing, kAsked, kHere, kLent };
  static constexpr int kDamagedMax = 16;  // asked for again at once; then patience decides

  // Whoever was receiving a lent chunk may have lost its connection.
  void notice_cut_off() {
    if (lease_ && lease_->cut_off()) revoke();
  }

  // The lent chunk is complete, or ought to be.
  bool take_back(std::uint32_t crc) {
    const LeasePtr lease = lease_;
    revoke();
    if (lease->complete() && lease->crc() == crc) return true;
    reject(lent_);
    return false;
  }

  bool copy(std::uint64_t index, std::uint32_t crc, Bytes payload) {
    const auto [begin, end] = plan_.span(index);
    if (payload.size != end - begin || crc32c(payload) != crc) {
      reject(index);
      return false;
    }
    std::memcpy(buffer->bytes().data + begin, payload.data, payload.size);
    asked_ -= states_[index] == kAsked;
    return true;
  }

  void ask_ranges(std::vector<Range>& wanted) {
    const std::uint64_t limit = pulling_ ? plan_.count() : pushed_;
    while (asked_ < kWindowChunks) {
      while (cursor_ < limit && states_[cursor_] != kMissing) ++cursor_;
      if (cursor_ >= limit) return;
      const std::uint64_t first = cursor_, most = std::min(limit, first + kWindowChunks - asked_);
      while (cursor_ < most && states_[cursor_] == kMissing) states_[cursor_++] = kAsked;
      asked_ += cursor_ - first;
      wanted.push_back({first, cursor_ - first});
    }
  }

  // A chunk came damaged: it is fetched (again), at once for the first few, else in due time.
  void reject(std::uint64_t index) {
    ++damaged_;
    if (states_[index] == kAsked && damaged_ <= kDamagedMax) {
      --asked_;
      states_[index] = kMissing;
    }
    if (states_[index] == kMissing) cursor_ = std::min(cursor_, index);
  }

  // Something arrived: be patient in proportion to how long it took, for slow links.
  void hear(double now) {
    gap_ = std::max(now - heard_at_, gap_ * 7 / 8);
    patience_ = std::min(std::max(timing_.patience(), 4 * gap_), timing_.patience_max());
    heard_at_ = now;
  }

  void ask_again(double now) {
    std::replace(states_.begin(), states_.end(), static_cast<char>(kAsked),
                 static_cast<char>(kMissing));
    asked_ = cursor_ = 0;
    end_asked_ = false;
    heard_at_ = now;
  }

  ChunkPlan plan_;
  std::vector<char> states_;
  std::vector<std::uint32_t> crcs_;
  std::string digest_;
  std::uint64_t here_ = 0;
  std::uint64_t asked_ = 0;
  std::uint64_t cursor_ = 0;  // nothing below it is MISSING
  std::uint64_t pushed_ = 0;  // everything below it was pushed, or dropped on the way
  std::uint64_t damaged_ = 0;
  int restarts_ = 0;
  Timing timing_;
  double heard_at_;
  double patience_;
  double gap_ = 0;  // seconds between two chunks, the longest lately
  bool end_asked_ = false;
  bool pulling_ = false;  // nothing more will be pushed, as far as we can tell
  LeasePtr lease_;        // of the chunk that is LENT
  std::uint64_t lent_ = 0;
  std::size_t lent_count_ = 0;  // how much of it was here when we looked last
};

}  // namespace weightbus
