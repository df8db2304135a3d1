// The step that the rows of one table in one partition are in the middle of (consistency sync, docs/decisions/0044): of
// each row that a push of it has touched, values and state as they were before the first one, and the sum of the
// gradients so far. So every further push replaces the step so far by the step of the sum. Not part of a partition's
// contents: whoever gets the partition begins with none. Under the partition's mutex.
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

#include "pool.h"
#include "table.h"

namespace everstep {

class Running {
  static constexpr uint32_t kNone = 0xffffffffu;  // no slot; unused
  static constexpr uint32_t kGone = 0xfffffffeu;  // the row was freed
  struct Entry {
    uint32_t slot = 0;
    uint32_t at = kNone;  // its place in the chunks
  };

  size_t row_floats() const { return 2 * table_.dim + table_.state; }
  // A power of two: the pool uses such a block again for anything.
  size_t chunk_bytes() const {
    size_t bytes = 4096;
    while (bytes < row_floats() * sizeof(float)) bytes *= 2;
    return bytes;
  }
  float* row(uint32_t at) const { return chunks_[at / per_chunk_] + at % per_chunk_ * row_floats(); }
  // Where a slot stands, or would.
  static Entry& place(std::vector<Entry>& index, uint32_t slot) {
    const uint64_t mask = index.size() - 1;
    uint64_t i = (slot * kGolden >> 32) & mask;
    while (index[i].at != kNone && index[i].slot != slot) i = (i + 1) & mask;
    return index[i];
  }

 public:
  Running(const Table& table, Pool& pool) : table_(table), pool_(pool) {}
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  // Pushes of one step, applied one by one, are not the step of their sum. (Without momentum and decay SGD is linear.)
  static bool needed(const Optimizer& o) { return o.kind != kSgd || o.momentum != 0.0 || o.weight_decay != 0.0; }

  bool empty() const { return step_ < 0; }
  // A push of `step` to these rows (kNone: of no row) is about to be applied: after this, `add` cannot fail. Whatever
  // another step has left is gone. How many of them the step has not touched yet. Throws std::bad_alloc with nothing
  // lost of this step.
  size_t begin(int64_t step, const uint32_t* slots, size_t n_slots) {
    if (step != step_) clear();
    size_t n = 0;
    for (size_t i = 0; i < n_slots; ++i)
      n += slots[i] != kNone && (index_.empty() || place(index_, slots[i]).at >= kGone);
    uint64_t size = index_.empty() ? 16 : index_.size();
    while ((taken_ + n) * 2 > size) size *= 2;
    if (size > index_.size()) {
      std::vector<Entry> grown(size);
      for (const Entry& e : index_) {
        if (e.at != kNone) place(grown, e.slot) = e;
      }
      index_.swap(grown);
    }
    step_ = step;
    per_chunk_ = chunk_bytes() / (row_floats() * sizeof(float));
    while (chunks_.size() * per_chunk_ < rows_ + n) {
      chunks_.reserve(chunks_.size() + 1);
      chunks_.push_back(reinterpret_cast<float*>(pool_.take(chunk_bytes())));
    }
    return n;
  }
  // The row at `values` (its state behind them) is as it was before the step again, and `sum` the gradient of all of
  // the step so far.
  void add(uint32_t slot, float* values, const float* grad, float* sum) {
    const size_t dim = table_.dim, floats = dim + table_.state;
    Entry& entry = place(index_, slot);
    if (entry.at >= kGone) {
      taken_ += entry.at == kNone;
      entry = Entry{slot, uint32_t(rows_++)};
      float* kept = row(entry.at);
      std::memcpy(kept, values, floats * sizeof(float));
      std::memcpy(kept + floats, grad, dim * sizeof(float));
      std::memcpy(sum, grad, dim * sizeof(float));
      return;
    }
    float* kept = row(entry.at);
    std::memcpy(values, kept, floats * sizeof(float));
    float* total = kept + floats;
    for (size_t j = 0; j < dim; ++j) sum[j] = total[j] = total[j] + grad[j];
  }
  // The row is freed.
  void forget(uint32_t slot) {
    if (index_.empty()) return;
    Entry& entry = place(index_, slot);
    if (entry.at < kGone) entry.at = kGone;
  }
  void clear() {
    for (float* chunk : chunks_) pool_.give(reinterpret_cast<uint8_t*>(chunk), chunk_bytes());
    chunks_ = {};
    index_ = {};
    rows_ = taken_ = 0;
    step_ = -1;
  }

 private:
  const Table& table_;
  Pool& pool_;
  int64_t step_ = -1;
  size_t rows_ = 0;           // used in the chunks
  size_t taken_ = 0;          // entries of the index that are not kNone
  size_t per_chunk_ = 1;      // rows
  std::vector<Entry> index_;  // open addressing; a power of two, at most half full
  std::vector<float*> chunks_;
};

}  // namespace everstep
