// The Python module `kernels.cpu._native`. It takes tensors as addresses, which `kernels/cpu/decoder.py` has checked.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "decoder.h"
#include "digest.h"
#include "dispatch.h"
#include "fatal_signals.h"
#include "ops.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdserve {
namespace {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : supported_kernels()) names.push_back(kernels->name);
  return names;
}

const Kernels& kernels_named(const std::string& name) {
  const Kernels* kernels = find_kernels(name.c_str());
  if (kernels == nullptr) throw std::invalid_argument("this machine does not run the instruction set " + name);
  return *kernels;
}

// `fields`: (weight, bias or 0, rows, depth).
Source source(const nb::tuple& fields) {
  return {pointer<void>(nb::cast<uintptr_t>(fields[0])), pointer<void>(nb::cast<uintptr_t>(fields[1])),
          nb::cast<long>(fields[2]), nb::cast<long>(fields[3])};
}

}  // namespace

NB_MODULE(_native, module) {
  // A step thread that outlives the interpreter holds its decoder. That is no leak, and should not be logged as one.
  nb::set_leak_warnings(false);
  module.def("instruction_sets", &instruction_sets, "Instruction sets that were built and run here, best first.");
  module.def("report_fatal_signals", &report_fatal_signals, "report_fd"_a, "answer_fd"_a, "wait_ms"_a);
  bind_ops(module);
  bind_digests(module);

  nb::class_<Decoder>(module, "Decoder")
      .def(
          "__init__",
          [](Decoder* self, const std::string& isa, int weight_type, int format, long hidden_size, long intermediate_size,
             long vocab_size, int num_heads, int num_kv_heads, int head_dim, float scale, float eps, int num_threads,
             std::vector<int> cpus, nb::handle, uintptr_t core_leases, uint32_t borrower, std::vector<int> borrow_cpus,
             double stay_away_s) {
            const ModelShape shape{hidden_size,  intermediate_size, vocab_size, num_heads,
                                   num_kv_heads, head_dim,          scale,      eps};
            new (self) Decoder(shape, WeightType(weight_type), Format(format), kernels_named(isa), num_threads,
                               std::move(cpus),
                               Borrowing{pointer<CoreLease>(core_leases), borrower, std::move(borrow_cpus),
                                         std::chrono::nanoseconds(int64_t(1e9 * stay_away_s))});
          },
          nb::keep_alive<1, 15>(),  // Threads read the leases until they end.
          nb::kw_only(), "isa"_a, "weight_type"_a, "format"_a, "hidden_size"_a, "intermediate_size"_a, "vocab_size"_a,
          "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "scale"_a, "eps"_a, "num_threads"_a, "cpus"_a,
          "memory"_a.none(), "core_leases"_a, "borrower"_a, "borrow_cpus"_a, "stay_away_s"_a)
      .def(
          "add_layer",
          [](Decoder& self, const nb::tuple& q, const nb::tuple& k, const nb::tuple& v, const nb::tuple& output,
             const nb::tuple& gate, const nb::tuple& up, const nb::tuple& down, uintptr_t input_norm,
             uintptr_t post_attention_norm, uintptr_t q_norm, uintptr_t k_norm, long window) {
            const LayerSource layer{source(q),
                                    source(k),
                                    source(v),
                                    source(output),
                                    source(gate),
                                    source(up),
                                    source(down),
                                    pointer<void>(input_norm),
                                    pointer<void>(post_attention_norm),
                                    pointer<void>(q_norm),
                                    pointer<void>(k_norm),
                                    window};
            nb::gil_scoped_release release;
            self.add_layer(layer);
          },
          nb::kw_only(), "q"_a, "k"_a, "v"_a, "output"_a, "gate"_a, "up"_a, "down"_a, "input_norm"_a,
          "post_attention_norm"_a, "q_norm"_a, "k_norm"_a, "window"_a)
      .def(
          "finish",
          [](Decoder& self, uintptr_t embedding, uintptr_t norm, const nb::tuple& lm_head, uintptr_t angles) {
            const Source head = source(lm_head);
            nb::gil_scoped_release release;
            self.finish(pointer<void>(embedding), pointer<void>(norm), head, pointer<float>(angles));
          },
          nb::kw_only(), "embedding"_a, "norm"_a, "lm_head"_a, "angles"_a)
      .def(
          "forward",
          [](Decoder& self, long num_tokens, long num_sequences, long num_logits, long table_stride, uintptr_t token_ids,
             uintptr_t positions, uintptr_t slots, uintptr_t starts, uintptr_t contexts, uintptr_t tables,
             uintptr_t logits_rows, uintptr_t kv_cache, int kv_type, long block_stride, long layer_stride,
             long kv_stride, long head_stride, long block_size, uintptr_t out, long stride, bool hidden_only,
             uintptr_t interrupt) {
            const Step step{num_tokens,
                            num_sequences,
                            num_logits,
                            table_stride,
                            pointer<int64_t>(token_ids),
                            pointer<int64_t>(positions),
                            pointer<int64_t>(slots),
                            pointer<int64_t>(starts),
                            pointer<int64_t>(contexts),
                            pointer<int64_t>(tables),
                            pointer<int64_t>(logits_rows),
                            hidden_only};
            const KvCache cache{pointer<char>(kv_cache), KvType(kv_type), block_stride, layer_stride,
                                kv_stride,               head_stride,     block_size};
            return self.forward(step, cache, pointer<float>(out), stride, pointer<int32_t>(interrupt));
          },
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "sample",
          [](Decoder& self, uintptr_t requests, long count, uintptr_t logits, long stride, long vocab_size,
             uintptr_t results) {
            self.sampler().sample(pointer<SampleRequest>(requests), count, pointer<float>(logits), stride, vocab_size,
                                  pointer<SampleResult>(results));
          },
          nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("logits_stride", &Decoder::logits_stride)
      .def_prop_ro("weight_bytes", &Decoder::weight_bytes)
      .def_prop_ro("num_threads", &Decoder::num_threads)
      .def_prop_ro("borrowed_core_seconds", &Decoder::borrowed_core_seconds)
      .def_prop_ro("redone_units", &Decoder::redone_units);
}

}  // namespace pdserve
