// Norms, rotation and rounding of single rows.
#pragma once

#include "vec.h"

namespace pdserve::PD_ISA {

// The last vector of a row may be incomplete; missing elements read as zero.
static PD_INLINE vf load_partial(const float* p, long count) {
  if (count >= kLanes) return load(p);
  vf x{};
  std::memcpy(&x, p, count * sizeof(float));
  return x;
}

static PD_INLINE void store_partial(float* p, vf x, long count) {
  if (count >= kLanes) return store(p, x);
  std::memcpy(p, &x, count * sizeof(float));
}

static PD_INLINE void store_bf16_partial(uint16_t* p, vf x, long count) {
  if (count >= kLanes) return store_bf16(p, x);
  for (long i = 0; i < count; ++i) p[i] = uint16_t(bf16_bits(x[i]));
}

typedef uint8_t vb __attribute__((vector_size(kLanes)));

// 16-bit integers with one scale for the row, offset to be unsigned, split into bytes.
static void quantize_row(const float* x, long width, uint8_t* high, uint8_t* low, float* scale) {
  vf greatest{}, poison{};
  for (long i = 0; i < width; i += kLanes) {
    const vf chunk = load_partial(x + i, width - i);
    greatest = max(greatest, max(chunk, -chunk));
    poison += chunk * splat(0.0f);
  }
  const float top = largest(greatest);
  *scale = top / 32767.0f + sum(poison);  // NaN or infinity anywhere: the whole row is NaN.
  const float inverse = top > 0 ? 32767.0f / top : 0.0f;
  for (long i = 0; i < width; i += kLanes) {
    const vf scaled = round_to_integer(load_partial(x + i, width - i) * splat(inverse));
    const vi value = __builtin_convertvector(scaled, vi) + 32768;
    const vb upper = __builtin_convertvector(value >> 8, vb), lower = __builtin_convertvector(value & 255, vb);
    const size_t count = size_t(width - i < kLanes ? width - i : kLanes);
    std::memcpy(high + i, &upper, count);
    std::memcpy(low + i, &lower, count);
  }
}

static void to_rows(const float* x, long width, const Activations& out, long row) {
  uint32_t* line = out.units + row * out.stride;
  switch (out.format) {
    case Format::f32:
      std::memcpy(line, x, width * sizeof(float));
      break;
    case Format::bf16:
      for (long i = 0; i < width; i += kLanes)
        store_bf16_partial(reinterpret_cast<uint16_t*>(line) + i, load_partial(x + i, width - i), width - i);
      // The other half of the last unit meets zeros in the matrix, but must not be NaN.
      if (width % 2 != 0) reinterpret_cast<uint16_t*>(line)[width] = 0;
      break;
    case Format::int8:
      quantize_row(x, width, reinterpret_cast<uint8_t*>(line),
                   reinterpret_cast<uint8_t*>(out.low + row * out.stride), out.scale + row);
      break;
  }
}

static float inverse_rms(const float* x, long width, float eps) {
  vf squares{};
  for (long i = 0; i < width; i += kLanes) {
    const vf chunk = load_partial(x + i, width - i);
    squares = fma(chunk, chunk, squares);
  }
  return 1.0f / std::sqrt(sum(squares) / float(width) + eps);
}

// Longest row that can be normed; checked when a model is loaded.
constexpr long kMaxWidth = 1 << 15;

static void norm(const float* x, const float* weight, float eps, long width, const Activations& out, long row) {
  alignas(64) float line[kMaxWidth];
  const vf factor = splat(inverse_rms(x, width, eps));
  for (long i = 0; i < width; i += kLanes)
    store_partial(line + i, load_partial(x + i, width - i) * factor * load_partial(weight + i, width - i), width - i);
  to_rows(line, width, out, row);
}

// Checked when a model is loaded.
constexpr int kMaxHeadDim = 1024;

static void rotate(const float* x, const float* norm, float eps, const float* angles, int head_dim, KvType type,
                   void* out) {
  alignas(64) float line[kMaxHeadDim], rotated[kMaxHeadDim];
  const float factor = norm != nullptr ? inverse_rms(x, head_dim, eps) : 1.0f;
  for (int i = 0; i < head_dim; ++i) line[i] = norm != nullptr ? x[i] * factor * norm[i] : x[i];
  const float* result = line;
  if (angles != nullptr) {
    const float *cosine = angles, *sine = angles + head_dim;
    const int half = head_dim / 2;
    for (int i = 0; i < half; ++i) {
      rotated[i] = line[i] * cosine[i] - line[i + half] * sine[i];
      rotated[i + half] = line[i + half] * cosine[i + half] + line[i] * sine[i + half];
    }
    result = rotated;
  }
  switch (type) {
    case KvType::f32:
      std::memcpy(out, result, head_dim * sizeof(float));
      break;
    case KvType::bf16:
      for (int i = 0; i < head_dim; i += kLanes)
        store_bf16_partial(static_cast<uint16_t*>(out) + i, load_partial(result + i, head_dim - i), head_dim - i);
      break;
    case KvType::f16:
      for (int i = 0; i < head_dim; ++i) static_cast<uint16_t*>(out)[i] = to_f16(result[i]);
      break;
  }
}

}  // namespace pdserve::PD_ISA
