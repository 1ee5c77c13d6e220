// The functions of one instruction set's table, one by one, for tests and benchmarks in Python. Memory comes as addresses. A
// group of threads shares rows, panels or attention items. `times` repeats ops that are shorter than a call from Python.
#include "ops.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "dispatch.h"
#include "pack.h"
#include "sampling.h"
#include "threads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdserve {
namespace {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

long element_bytes(KvType type) { return type == KvType::f32 ? 4 : 2; }

// An instruction set and the threads that use it.
class Machine {
 public:
  Machine(const std::string& isa, int num_threads, std::vector<int> cpus)
      : kernels_(find_kernels(isa.c_str())), threads_(num_threads, std::move(cpus)) {
    if (kernels_ == nullptr) throw std::invalid_argument("this machine does not run the instruction set " + isa);
    sampler_ = std::make_unique<RowSampler>(*kernels_, threads_);
  }

  RowSampler& sampler() { return *sampler_; }

  const Kernels& kernels() const { return *kernels_; }
  int size() const { return threads_.size(); }

  // work(first, last) for each thread's range of [0, count).
  template <class Work>
  void for_ranges(long count, long times, Work&& work) {
    for (long i = 0; i < times; ++i)
      threads_.run([&](int thread) { work(count * thread / size(), count * (thread + 1) / size()); });
  }

  // work(i, thread) for each i, by the threads as they become free.
  template <class Work>
  void for_each(long count, long times, Work&& work) {
    for (long i = 0; i < times; ++i) {
      std::atomic<long> next{0};
      threads_.run([&](int thread) {
        for (long item; (item = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(item, thread);
      });
    }
  }

 private:
  const Kernels* kernels_;
  ThreadGroup threads_;
  std::unique_ptr<RowSampler> sampler_;
};

// `rows`: (format, units, low, scale, stride).
Activations activations(const nb::tuple& rows) {
  return {Format(nb::cast<int>(rows[0])), at<uint32_t>(nb::cast<Address>(rows[1])),
          at<uint32_t>(nb::cast<Address>(rows[2])), at<float>(nb::cast<Address>(rows[3])), nb::cast<long>(rows[4])};
}

// `matrices`: (weight, bias or 0, rows, depth) of each.
Packed pack(const std::vector<nb::tuple>& matrices, int type, int format, bool interleave, const std::string& isa) {
  std::vector<Source> sources;
  for (const nb::tuple& fields : matrices)
    sources.push_back({at<void>(nb::cast<Address>(fields[0])), at<void>(nb::cast<Address>(fields[1])),
                       nb::cast<long>(fields[2]), nb::cast<long>(fields[3])});
  const Kernels* reader = find_kernels(isa.c_str());
  nb::gil_scoped_release release;
  const bool as_codes = reader != nullptr && reader->reads_codes;
  return Packed(std::make_shared<Arena>(), sources, WeightType(type), Format(format), interleave, as_codes);
}

// Rows times each of the matrices, one after the other, into the same `out`.
void multiply(Machine& machine, const nb::tuple& left, long num_rows, const std::vector<const Packed*>& matrices,
              bool silu, Address out, long stride) {
  const Activations area = activations(left);
  const Rows rows{area.units, area.low, area.scale, area.stride};
  nb::gil_scoped_release release;
  const auto kernel = silu ? machine.kernels().multiply_silu : machine.kernels().multiply;
  for (const Packed* packed : matrices) {
    const Matrix& matrix = packed->matrix();
    if (matrix.codes != nullptr && !machine.kernels().reads_codes)
      throw std::invalid_argument("this instruction set does not read compressed weights");
    machine.for_ranges(matrix.columns / kPanelColumns, 1, [&](long first, long last) {
      const Memory scratch(matrix.codes != nullptr ? matrix.depth * kPanelColumns * sizeof(uint32_t) : 0);
      kernel(rows, num_rows, matrix, first, last, at<float>(out) + first * kPanelColumns / (silu ? 2 : 1), stride,
             false, scratch.as<void>());
    });
  }
}

void to_rows(Machine& machine, Address x, long num_rows, long width, const nb::tuple& out, long times) {
  const Activations area = activations(out);
  nb::gil_scoped_release release;
  machine.for_ranges(num_rows, times, [&](long first, long last) {
    for (long row = first; row < last; ++row) machine.kernels().to_rows(at<float>(x) + row * width, width, area, row);
  });
}

void norm(Machine& machine, Address x, Address weight, float eps, long num_rows, long width, const nb::tuple& out,
          long times) {
  const Activations area = activations(out);
  nb::gil_scoped_release release;
  machine.for_ranges(num_rows, times, [&](long first, long last) {
    for (long row = first; row < last; ++row)
      machine.kernels().norm(at<float>(x) + row * width, at<float>(weight), eps, width, area, row);
  });
}

// x: [num_rows][heads][head_dim]; head h of row r goes to element offsets[r] + h * head_stride of `out`.
void rotate(Machine& machine, Address x, Address norm, float eps, Address angles, long num_rows, long heads, int head_dim,
            int type, Address out, Address offsets, long head_stride, long times) {
  nb::gil_scoped_release release;
  const long bytes = element_bytes(KvType(type));
  machine.for_ranges(num_rows, times, [&](long first, long last) {
    for (long row = first; row < last; ++row)
      for (long head = 0; head < heads; ++head)
        machine.kernels().rotate(at<float>(x) + (row * heads + head) * head_dim, at<float>(norm), eps,
                                 angles == 0 ? nullptr : at<float>(angles) + row * 2 * head_dim, head_dim, KvType(type),
                                 at<char>(out) + (at<int64_t>(offsets)[row] + head * head_stride) * bytes);
  });
}

struct Item {
  Span span;
  int kv_head;
  long first, last;
};

// q: [num_kv_heads][num_tokens][queries_per_kv][head_dim]; out: float32 [num_tokens][num_heads * head_dim].
// shape: (num_heads, num_kv_heads, head_dim, scale); rows: (num_tokens, num_sequences, starts, contexts, tables,
// table_stride); cache: (memory, type, block_stride, layer_stride, kv_stride, head_stride, block_size).
void attend(Machine& machine, const nb::tuple& shape_fields, const nb::tuple& cache_fields, const nb::tuple& row_fields,
            long layer, long window, Address q, Address out, long times) {
  const auto number = [](const nb::tuple& fields, int i) { return nb::cast<long>(fields[i]); };
  const AttentionShape shape{int(number(shape_fields, 0)), int(number(shape_fields, 1)), int(number(shape_fields, 2)),
                             nb::cast<float>(shape_fields[3])};
  const KvCache cache{at<char>(number(cache_fields, 0)), KvType(number(cache_fields, 1)), number(cache_fields, 2),
                      number(cache_fields, 3),           number(cache_fields, 4),         number(cache_fields, 5),
                      number(cache_fields, 6)};
  const long num_tokens = number(row_fields, 0), num_sequences = number(row_fields, 1), stride = number(row_fields, 5);
  const auto *starts = at<int64_t>(number(row_fields, 2)), *contexts = at<int64_t>(number(row_fields, 3)),
             *tables = at<int64_t>(number(row_fields, 4));
  nb::gil_scoped_release release;

  const long queries_per_kv = shape.num_heads / shape.num_kv_heads;
  const long rows_at_once = std::max(1L, kQueryTile / queries_per_kv);
  const long width = long(shape.num_heads) * shape.head_dim;
  std::vector<Item> items;
  for (long i = 0; i < num_sequences; ++i) {
    const Span span{starts[i], starts[i + 1], contexts[i], tables + i * stride};
    for (long last = span.end; last > span.begin; last -= std::min(rows_at_once, last - span.begin))
      for (int head = 0; head < shape.num_kv_heads; ++head)
        items.push_back({span, head, std::max(span.begin, last - rows_at_once), last});
  }
  const long query_bytes = cache.type == KvType::bf16 ? 2 : 4;
  std::vector<Memory> scratch;
  for (int thread = 0; thread < machine.size(); ++thread)
    scratch.emplace_back(machine.kernels().attend_scratch_bytes(shape));
  machine.for_each(long(items.size()), times, [&](long i, int thread) {
    const Item& item = items[i];
    const long vector = (item.kv_head * num_tokens + item.first) * queries_per_kv;
    machine.kernels().attend(shape, cache, item.span, layer, item.kv_head, item.first, item.last, window,
                             at<char>(q) + vector * shape.head_dim * query_bytes,
                             at<float>(out) + item.first * width + item.kv_head * queries_per_kv * shape.head_dim, width,
                             scratch[thread].as<void>());
  });
}

// Reads memory once and adds it up: measures the machine's memory bandwidth.
uint64_t read(Machine& machine, Address memory, long bytes) {
  nb::gil_scoped_release release;
  std::atomic<uint64_t> total{0};
  machine.for_ranges(bytes / 64, 1, [&](long first, long last) {
    typedef uint64_t Line __attribute__((vector_size(64)));
    Line sums[4]{};
    const Line* lines = at<Line>(memory);
    long i = first;
    for (; i + 4 <= last; i += 4)
      for (int j = 0; j < 4; ++j) sums[j] += lines[i + j];
    for (; i < last; ++i) sums[0] += lines[i];
    const Line sum = sums[0] + sums[1] + sums[2] + sums[3];
    for (int lane = 0; lane < 8; ++lane) total += sum[lane];
  });
  return total;
}

void sample(Machine& machine, Address requests, long count, Address logits, long stride, long vocab_size, Address results) {
  nb::gil_scoped_release release;
  machine.sampler().sample(at<SampleRequest>(requests), count, at<float>(logits), stride, vocab_size,
                           at<SampleResult>(results));
}

}  // namespace

void bind_ops(nb::module_& module) {
  nb::class_<Packed>(module, "Packed")
      .def_prop_ro("columns", [](const Packed& self) { return self.matrix().columns; })
      .def_prop_ro("bytes", &Packed::bytes);
  module.def("pack", &pack);
  nb::class_<Machine>(module, "Machine")
      .def(nb::init<const std::string&, int, std::vector<int>>(), "isa"_a, "num_threads"_a, "cpus"_a)
      .def("multiply", &multiply)
      .def("to_rows", &to_rows)
      .def("norm", &norm)
      .def("rotate", &rotate)
      .def("attend", &attend)
      .def("sample", &sample)
      .def("read", &read);
}

}  // namespace pdserve
