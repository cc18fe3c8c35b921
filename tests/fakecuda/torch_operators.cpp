// torch's operators for CUDA tensors, computed by torch's CPU kernels: the machine code
// of torch's own kernels needs a GPU, and the wheel has no PTX of them. The work is
// queued on the stream as a kernel is, and runs there on the same memory. Outputs are
// allocated, and shapes are checked, when the operator is called.
//
// Loaded when a process opens its first context; see load_torch_operators().
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <set>
#include <string>
#include <vector>

#include "torch_call.h"

namespace fakecuda {
namespace {

using at::Tensor;

// Operators that compute nothing: torch's own code handles memory and metadata.
const std::set<std::string>& kept_operators() {
  static const auto& names = *new std::set<std::string>{
      "aten::_local_scalar_dense", "aten::_pin_memory",    "aten::is_pinned",
      "aten::record_stream",       "aten::resize_",        "aten::set_",
      "aten::is_set_to",           "aten::_resize_output_"};
  return names;
}

// Operators of sparse tensors that have kernels of their own.
constexpr const char* kSparseOperators[] = {"_to_dense", "_coalesce"};

// Within a device. Any other copy is torch's: it copies bytes by the runtime, from and
// to tensors that it makes contiguous first.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  const bool is_within = self.is_cuda() && self.device() == source.device();
  const bool is_plain = self.dtype() == source.dtype() && self.is_contiguous() &&
                        source.is_contiguous() && self.sizes() == source.sizes() &&
                        self.is_conj() == source.is_conj() &&
                        self.is_neg() == source.is_neg();
  if (!is_within || is_plain) return at::native::copy_(self, source, non_blocking);
  static const auto& op =
      *new auto(c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", ""));
  Stack stack{self, source, non_blocking};
  compute_on_host(op, &stack);
  return self;
}

bool has_tensor(const std::vector<c10::Argument>& arguments) {
  for (const c10::Argument& argument : arguments) {
    if (argument.type()->str().find("Tensor") != std::string::npos) return true;
  }
  return false;
}

bool returns_view(const c10::FunctionSchema& schema) {
  for (const c10::Argument& result : schema.returns()) {
    if (result.alias_info() != nullptr && !is_written(result)) return true;
  }
  return false;
}

bool is_computed(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  return schema.operator_name().getNamespace() == "aten" &&
         kept_operators().count(schema.name()) == 0 && has_tensor(schema.arguments()) &&
         !returns_view(schema) &&
         op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
}

class Silence final : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// torch's own kernels are registered already: these replace them.
const bool registered = [] {
  Silence silence;  // torch warns of a kernel that is replaced
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  auto& library = *new torch::Library(torch::Library::IMPL, "aten",
                                      c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name :
       dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    const auto op = dispatcher.findOp(name);
    if (!op.has_value() || !op->hasSchema() || !is_computed(*op)) continue;
    library.impl(c10::toString(name).c_str(),
                 torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
  }
  library.impl("copy_", copy_);
  auto& sparse = *new torch::Library(torch::Library::IMPL, "aten",
                                     c10::DispatchKey::SparseCUDA, __FILE__, __LINE__);
  for (const char* name : kSparseOperators) {
    sparse.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
  }
  return true;
}();

}  // namespace
}  // namespace fakecuda
