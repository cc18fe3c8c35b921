// torch's operators for CUDA tensors, computed by torch's CPU kernels: the machine code
// of torch's own kernels needs a GPU, and the wheel has no PTX of them. The work is
// queued on the stream as a kernel is, and runs there on the same memory. Outputs are
// allocated, and shapes are checked, when the operator is called.
//
// Loaded when a process opens its first context; see load_torch_operators().
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"

namespace fakecuda {
namespace {

using at::Tensor;
using c10::IValue;
using Stack = std::vector<IValue>;

// Each call draws fewer numbers than this.
constexpr uint64_t kOffsetStep = 4;

Tensor with_number_flag(Tensor to, const Tensor& from) {
  to.unsafeGetTensorImpl()->set_wrapped_number(
      from.unsafeGetTensorImpl()->is_wrapped_number());
  return to;
}

// Calls `change` with each tensor of an argument or a result.
IValue map_tensors(const IValue& value,
                   const std::function<Tensor(const Tensor&)>& change) {
  if (value.isTensor()) {
    const Tensor& tensor = value.toTensor();
    return tensor.defined() ? IValue(change(tensor)) : value;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& tensor : value.toTensorVector()) {
      changed.push_back(tensor.defined() ? change(tensor) : tensor);
    }
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      const bool has_tensor = tensor.has_value() && tensor->defined();
      changed.push_back(has_tensor ? std::optional<Tensor>(change(*tensor)) : tensor);
    }
    return changed;
  }
  return value;
}

// A tensor of the host with the memory of a CUDA tensor; a copy of a host tensor, since
// its memory may change before the stream is there.
Tensor host_alias(const Tensor& tensor) {
  if (!tensor.is_cuda()) return with_number_flag(tensor.clone(), tensor);
  if (tensor.is_sparse()) return tensor.to(c10::Device(at::kCPU));
  const auto options = tensor.options().device(at::kCPU).pinned_memory(false);
  if (tensor.numel() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  Tensor alias =
      at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

// A tensor of the same shape: without values, or zeros of the host, which are also fine
// as indices.
Tensor meta_like(const Tensor& tensor) {
  if (!tensor.is_cuda()) return with_number_flag(tensor.clone(), tensor);
  const auto options = tensor.options().device(at::kMeta).pinned_memory(false);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

Tensor zeros_like(const Tensor& tensor) {
  if (!tensor.is_cuda()) return with_number_flag(tensor.clone(), tensor);
  const auto options = tensor.options().device(at::kCPU).pinned_memory(false);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options).zero_();
}

HostKernel::Range range_of(const Tensor& tensor) {
  size_t extent = 1;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    extent += static_cast<size_t>((tensor.size(i) - 1) * tensor.stride(i));
  }
  return {tensor.data_ptr(), tensor.numel() == 0 ? 0 : extent * tensor.element_size()};
}

// A generator of the host whose seed follows from the state of the CUDA generator,
// which advances. Without `given`, the default generator of the device.
at::Generator host_generator(const IValue& given, c10::DeviceIndex device) {
  at::Generator generator = given.isNone()
                                ? at::globalContext().defaultGenerator(
                                      c10::Device(c10::DeviceType::CUDA, device))
                                : given.toGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  const uint64_t offset = generator.get_offset();
  generator.set_offset(offset + kOffsetStep);
  return at::make_generator<at::CPUGeneratorImpl>(generator.current_seed() + offset);
}

// True if the operator writes to the argument, or returns an argument that it wrote to.
bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Elements of all arguments up to which an operator is tried to find shapes.
constexpr int64_t kMaxTrial = 1 << 14;

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op),
        stack_(stack),
        num_arguments_(op.schema().arguments().size()),
        arguments_(stack->end() - static_cast<ptrdiff_t>(num_arguments_),
                   stack->end()) {
    for (const IValue& argument : arguments_) {
      map_tensors(argument, [&](const Tensor& tensor) {
        if (tensor.is_cuda()) device_ = tensor.device().index();
        has_sparse_ |= tensor.is_sparse();
        num_elements_ += tensor.numel();
        return tensor;
      });
    }
  }

  void run() {
    const c10::cuda::OptionalCUDAGuard guard(c10::Device(c10::kCUDA, device_));
    const at::DisableRecordFunctionGuard no_records;
    Stack shapes;
    if (has_sparse_ || !returns_tensors() || has_shape_of_values() ||
        (!find_shapes(&shapes) && makes_tensors())) {
      run_and_wait();
    } else {
      queue(shapes);
    }
  }

 private:
  bool returns_tensors() const {
    for (const c10::Argument& result : op_.schema().returns()) {
      const auto kind = result.type()->kind();
      if (kind == c10::TypeKind::TensorType) continue;
      if (kind != c10::TypeKind::ListType) return false;
    }
    return true;
  }

  bool makes_tensors() const {
    for (const c10::Argument& result : op_.schema().returns()) {
      if (!is_written(result)) return true;
    }
    return false;
  }

  bool has_shape_of_values() const {
    if (!has_tag(at::Tag::dynamic_output_shape)) return false;
    if (op_.schema().name() != "aten::index") return true;
    bool has_mask = false;
    map_tensors(arguments_[1], [&](const Tensor& index) {
      has_mask |= index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
      return index;
    });
    return has_mask;
  }

  bool has_tag(at::Tag tag) const {
    const auto& tags = op_.getTags();
    return std::find(tags.begin(), tags.end(), tag) != tags.end();
  }

  // Sets *shapes to results of the same shapes. False if they cannot be found without
  // the values. Raises the errors of wrong arguments.
  bool find_shapes(Stack* shapes) const {
    if (num_elements_ > kMaxTrial || has_tag(at::Tag::nondeterministic_seeded)) {
      return find_shapes(meta_like, shapes);
    }
    // torch computes the shapes of many operators in Python, which takes longer.
    try {
      return find_shapes(zeros_like, shapes);
    } catch (const c10::Error&) {
      const std::exception_ptr error = std::current_exception();
      try {  // zeros may be wrong as values, for example as divisors
        return find_shapes(meta_like, shapes);
      } catch (const std::exception&) {
        std::rethrow_exception(error);
      }
    }
  }

  bool find_shapes(Tensor (*like)(const Tensor&), Stack* shapes) const {
    const auto& schema = op_.schema();
    shapes->clear();
    for (size_t i = 0; i < num_arguments_; ++i) {
      const bool is_out = schema.arguments()[i].is_out();
      shapes->push_back(map_tensors(arguments_[i], [&](const Tensor& tensor) {
        const Tensor shape = like(tensor);
        return is_out ? at::empty({0}, shape.options()) : shape;
      }));
      if (shapes->back().isDevice()) shapes->back() = c10::Device(at::kCPU);
    }
    try {
      op_.callBoxed(shapes);
    } catch (const c10::NotImplementedError&) {
      return false;
    }
    bool is_strided = true;
    for (const IValue& shape : *shapes) {
      map_tensors(shape, [&](const Tensor& tensor) {
        is_strided = is_strided && tensor.layout() == c10::kStrided;
        return tensor;
      });
    }
    return is_strided;
  }

  // The arguments with aliases of the host in the place of CUDA tensors.
  Stack host_arguments() const {
    Stack values;
    for (size_t i = 0; i < num_arguments_; ++i) {
      const auto& type = op_.schema().arguments()[i].type();
      const bool is_generator = op_.schema().arguments()[i].name() == "generator" &&
                                type->kind() == c10::TypeKind::OptionalType;
      if (is_generator) {
        values.emplace_back(host_generator(arguments_[i], device_));
      } else if (arguments_[i].isDevice()) {
        values.emplace_back(c10::Device(at::kCPU));
      } else {
        values.push_back(map_tensors(arguments_[i], host_alias));
      }
    }
    return values;
  }

  void queue(const Stack& shapes) {
    const auto& returns = op_.schema().returns();
    resize_outs(shapes);
    Stack results;
    Stack targets;  // aliases of new results, none for arguments that are returned
    for (size_t i = 0; i < returns.size(); ++i) {
      if (is_written(returns[i])) {
        results.push_back(returned_argument(i));
        targets.emplace_back();
        continue;
      }
      const c10::Device device(c10::kCUDA, device_);
      results.push_back(map_tensors(shapes[i], [&](const Tensor& shape) {
        return at::empty_strided(shape.sizes(), shape.strides(),
                                 shape.options().device(device));
      }));
      targets.push_back(map_tensors(results.back(), host_alias));
    }
    launch(targets, results);
    finish(results);
  }

  void launch(const Stack& targets, const Stack& results) const {
    HostKernel kernel;
    kernel.name = c10::toString(op_.operator_name());
    const auto add_range = [&](const Tensor& tensor) {
      if (tensor.is_cuda()) kernel.ranges.push_back(range_of(tensor));
      return tensor;
    };
    for (const IValue& argument : arguments_) map_tensors(argument, add_range);
    for (const IValue& result : results) map_tensors(result, add_range);
    kernel.body = [op = op_, arguments = host_arguments(), targets] {
      const at::AutoDispatchBelowAutograd no_autograd;
      const at::DisableRecordFunctionGuard no_records;
      const c10::ParallelGuard one_thread(true);
      Stack stack = arguments;
      op.callBoxed(&stack);
      for (size_t i = 0; i < targets.size(); ++i) assign(targets[i], stack[i]);
    };
    C10_CUDA_CHECK(launch_host_kernel(c10::cuda::getCurrentCUDAStream(device_).stream(),
                                      std::move(kernel)));
  }

  static void assign(const IValue& target, const IValue& value) {
    if (target.isTensor()) {
      target.toTensor().copy_(value.toTensor());
    } else if (target.isTensorList()) {
      const auto targets = target.toTensorVector();
      const auto values = value.toTensorVector();
      for (size_t i = 0; i < targets.size(); ++i) targets[i].copy_(values[i]);
    }
  }

  // Gives each `out` the size that the operator computes for it.
  void resize_outs(const Stack& shapes) const {
    const auto& schema = op_.schema();
    for (size_t i = 0; i < schema.returns().size() && i < shapes.size(); ++i) {
      if (!is_written(schema.returns()[i]) || !shapes[i].isTensor()) continue;
      const IValue& argument = returned_argument(i);
      const Tensor& shape = shapes[i].toTensor();
      if (argument.toTensor().sizes() == shape.sizes()) continue;
      argument.toTensor().resize_(shape.sizes());
    }
  }

  const IValue& returned_argument(size_t index) const {
    const auto& schema = op_.schema();
    const auto& names = schema.returns()[index].alias_info()->beforeSets();
    for (size_t i = 0; i < num_arguments_; ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias != nullptr && alias->beforeSets() == names) return arguments_[i];
    }
    TORCH_INTERNAL_ASSERT(false, op_.schema());
  }

  // For results whose shape depends on values, or that the host needs at once.
  void run_and_wait() {
    c10::cuda::getCurrentCUDAStream(device_).synchronize();
    Stack stack = host_arguments();
    op_.callBoxed(&stack);
    const auto& returns = op_.schema().returns();
    for (size_t i = 0; i < stack.size(); ++i) {
      stack[i] = is_written(returns[i])
                     ? returned_argument(i)
                     : map_tensors(stack[i], [&](const Tensor& tensor) {
                         return tensor.to(c10::Device(c10::kCUDA, device_));
                       });
    }
    finish(stack);
  }

  void finish(const Stack& results) {
    stack_->resize(stack_->size() - num_arguments_);
    stack_->insert(stack_->end(), results.begin(), results.end());
  }

  const c10::OperatorHandle& op_;
  Stack* const stack_;
  const size_t num_arguments_;
  const Stack arguments_;
  c10::DeviceIndex device_ = 0;
  int64_t num_elements_ = 0;
  bool has_sparse_ = false;
};

// Queues the work of an operator on the current stream, and puts the results in the
// place of the arguments. Waits for the stream if the results need values.
void compute_on_host(const c10::OperatorHandle& op, Stack* stack) {
  Call(op, stack).run();
}

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
