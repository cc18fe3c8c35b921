#include "torch_call.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "host_kernel.h"
#include "torch_tensors.h"

namespace fakecuda {
namespace {

using at::Tensor;
using c10::IValue;

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

}  // namespace

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

void compute_on_host(const c10::OperatorHandle& op, Stack* stack) {
  Call(op, stack).run();
}

}  // namespace fakecuda
