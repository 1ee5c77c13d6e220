// Weights as panels, made once when a model is loaded.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "kernels.h"

namespace pdserve {

enum class WeightType : int { bf16 = 0, f32 = 1, f16 = 2 };

// Memory that starts on a page boundary and requests huge pages.
class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes);
  // Makes the system provide the pages now, not at their first use. Does nothing where it cannot.
  void populate() const;
  ~Memory();
  Memory(Memory&& other) noexcept : at_(other.at_), bytes_(other.bytes_) { other.at_ = nullptr; }
  Memory& operator=(Memory&& other) noexcept {
    std::swap(at_, other.at_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(at_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void* at_ = nullptr;
  size_t bytes_ = 0;
};

// Adjacent memory for many matrices: a single matrix seldom fills huge pages, and with small pages a product of one row takes
// 15 % longer.
class Arena {
 public:
  // Zeroed memory at a multiple of 64 bytes, valid as long as the arena.
  void* take(size_t bytes);

 private:
  std::vector<Memory> chunks_;
  // Bytes of the last chunk.
  size_t used_ = 0;
};

// [rows (out features), depth (in features)] of a checkpoint, row-major; a bias of the same type, or null.
struct Source {
  const void* weight;
  const void* bias;
  long rows, depth;
};

// One matrix in panels, with the biases and scales of its columns.
class Packed {
 public:
  // The sources' rows one after the other. `interleave`: two sources of the same shape, 16 rows of each in turn.
  // `as_codes`: bfloat16 weights are compressed where that saves memory.
  Packed(std::shared_ptr<Arena> arena, const std::vector<Source>& sources, WeightType type, Format format,
         bool interleave, bool as_codes);

  const Matrix& matrix() const { return matrix_; }
  // Bytes that a product reads.
  size_t bytes() const { return bytes_ + plain_units_.size() * sizeof(uint32_t); }

 private:
  void encode(const uint32_t* units, long panel);

  std::shared_ptr<Arena> arena_;
  // Or the codes' fields.
  uint32_t* units_;
  size_t bytes_;
  std::unique_ptr<Codes> codes_;
  std::vector<long> first_plain_;
  std::vector<int32_t> plain_;
  std::vector<uint32_t> plain_units_;
  std::vector<float> bias_, scale_;
  std::vector<int32_t> sums_;
  Matrix matrix_;
};

float read_weight(const void* source, long index, WeightType type);
std::vector<float> to_floats(const void* source, long count, WeightType type);

}  // namespace pdserve
