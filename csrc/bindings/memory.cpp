#include "bindings/memory.h"

#include <c10/util/DimVector.h>
#include <torch/csrc/Dtype.h>

#include <chrono>

#include "bindings/arguments.h"
#include "bindings/run.h"
#include "memory/block_cache.h"
#include "ops/host_memory.h"

namespace pyparallel::bindings {
namespace {

py::object empty(py::handle shape, py::handle dtype) {
  const auto sizes = to_ints<c10::DimVector>(shape, {"empty", "shape"});
  if (!THPDtype_Check(dtype.ptr())) wrong_type("empty: dtype", "a torch.dtype", dtype);
  const auto type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
  return py::reinterpret_steal<py::object>(
      THPVariable_Wrap(ops::new_host_tensor(sizes, type)));
}

py::tuple cache_info() {
  const memory::CacheInfo info = memory::cache_info();
  return py::make_tuple(info.in_use, info.cached, info.limit, info.hits, info.misses);
}

void bound_cache(int64_t limit, double idle_seconds) {
  const std::chrono::duration<double> max_idle(idle_seconds);
  memory::bound_cache(limit,
                      std::chrono::duration_cast<std::chrono::milliseconds>(max_idle));
}

int64_t clear_cache() {
  int64_t freed = 0;
  unlocked([&] { freed = memory::clear_cache(); });
  return freed;
}

}  // namespace

void define_memory(py::module_* module) {
  module->def("empty", &empty, py::arg("shape"), py::arg("dtype"));
  module->def("cache_info", &cache_info);
  module->def("bound_cache", &bound_cache, py::arg("limit"), py::arg("idle_seconds"));
  module->def("clear_cache", &clear_cache);
}

}  // namespace pyparallel::bindings
