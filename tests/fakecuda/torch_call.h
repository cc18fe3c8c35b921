// One call of an operator with CUDA tensors.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <vector>

namespace fakecuda {

using Stack = std::vector<c10::IValue>;

// True if the operator writes to the argument, or returns an argument that it wrote to.
bool is_written(const c10::Argument& argument);

// Queues the work of an operator on the current stream, and puts the results in the
// place of the arguments. Waits for the stream if the results need values.
void compute_on_host(const c10::OperatorHandle& op, Stack* stack);

}  // namespace fakecuda
