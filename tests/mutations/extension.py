"""Checks of the extension before the engine reads; each mutation compiles it again."""

from __future__ import annotations

from tests.mutations.entry import Mutation

_RACES = "tests/robustness/test_races.py::"
_NATIVE_OPS = "tests/backend/test_operators.py::"
_NATIVE = "tests/backend/test_native_errors.py::"
_SLABS = "tests/backend/test_slab_errors.py::"
_RINGS = "tests/backend/test_ring_errors.py::"
_SEND = "tests/backend/test_send_errors.py::"
_WALKS = "tests/backend/test_pytree_walk.py::"
_PLACES = "tests/backend/test_pad_copy_places.py::"
_OTHERS = "containers and tensors that change during a copy"
_GONE = "memory that was freed"
_SHARED = "an output that is an input, or too small"

MUTATIONS = (
    Mutation(
        "a sample is padded from a storage that was shrunk",
        _GONE,
        "csrc/ops/pad_copy.cpp",
        "  check_storage(sample, where);\n",
        "",
        (
            _RACES
            + "test_a_padded_sample_that_changed_is_refused_or_does_not_reach_beyond",
        ),
    ),
    Mutation(
        "a leaf is packed from a storage that was shrunk",
        _GONE,
        "csrc/ops/pack.cpp",
        "    if (leaf.is_contiguous() && holds(leaf, planned.nbytes)) {\n",
        "    if (leaf.is_contiguous()) {\n",
        (_RACES + "test_a_packed_leaf_that_changed_is_refused_and_nothing_is_written",),
    ),
    Mutation(
        "equal samples are stacked from a storage that was shrunk",
        _GONE,
        "csrc/ops/stack_equal.cpp",
        "  return holds(sample, nbytes);\n",
        "  return nbytes >= 0;\n",
        ("tests/backend/test_stack_equal.py::test_memory_that_was_freed_is_not_read",),
    ),
    Mutation(
        "a tensor may end behind its storage",
        _GONE,
        "csrc/ops/snapshot.cpp",
        "  TORCH_CHECK_VALUE(static_cast<uint64_t>(end) <= held, where,\n",
        "  TORCH_CHECK_VALUE(static_cast<uint64_t>(end) <= held + 4, where,\n",
        (_NATIVE + "test_a_tensor_reaches_to_the_last_byte_of_its_storage",),
    ),
    Mutation(
        "a leaf may have another shape than planned",
        _OTHERS,
        "csrc/ops/pack.cpp",
        " leaf.sizes() == planned.shape, where,\n",
        " planned.nbytes >= 0, where,\n",
        (_RACES + "test_a_packed_leaf_that_changed_is_refused_and_nothing_is_written",),
    ),
    Mutation(
        "a walk has no reference to its leaves",
        _OTHERS,
        "csrc/pytree/walk.cpp",
        "    leaves_.push_back(object);\n    Py_INCREF(object);\n",
        "    leaves_.push_back(object);\n",
        (_WALKS + "test_a_thousand_walks_leak_nothing",),
    ),
    Mutation(
        "a walk runs the Python code of a class",
        _OTHERS,
        "csrc/pytree/walk.cpp",
        "    if (!is_simple_class(type)) return false;\n",
        "    static_cast<void>(is_simple_class);\n",
        (_WALKS + "test_possible_containers_are_left_to_optree",),
    ),
    Mutation(
        "a walk follows a list that contains itself",
        _OTHERS,
        "csrc/pytree/walk.cpp",
        "constexpr int kMaxDepth = 200;",
        "constexpr int kMaxDepth = 200'000'000;",
        (_WALKS + "test_deep_nests_are_left_to_optree",),
    ),
    Mutation(
        "a walk reads a list beyond its new end",
        _OTHERS,
        "csrc/pytree/columns.cpp",
        "  if (static_cast<size_t>(PyList_GET_SIZE(dicts)) != columns->num_dicts)",
        "  if (columns->num_dicts == 0)",
        (
            "tests/backend/test_dict_columns.py::"
            "test_a_list_that_is_cut_by_a_garbage_collection_is_left",
        ),
    ),
    Mutation(
        "a sample starts before its row",
        "padding values and sizes that do not fit",
        "csrc/ops/pad_copy.cpp",
        "    TORCH_CHECK_VALUE(start[d] >= 0, where,",
        "    TORCH_CHECK_VALUE(start[d] >= -9, where,",
        (_PLACES + "test_wrong_starts_are_refused",),
    ),
    Mutation(
        "a sample ends behind its row",
        "padding values and sizes that do not fit",
        "csrc/ops/pad_copy.cpp",
        "    TORCH_CHECK_VALUE(start[d] <= target[d] - sample.sizes[d], where,\n",
        "    TORCH_CHECK_VALUE(start[d] <= target[d], where,\n",
        (_PLACES + "test_wrong_starts_are_refused",),
    ),
    Mutation(
        "a sample is larger than its row",
        "padding values and sizes that do not fit",
        "csrc/ops/pad_copy.cpp",
        "    TORCH_CHECK_VALUE(sample.sizes[d] <= target[d], where,",
        "    TORCH_CHECK_VALUE(sample.sizes[d] <= target[d] + 9, where,",
        (_NATIVE + "test_pad_copy_refuses",),
    ),
    Mutation(
        "a copy reads and writes the same memory",
        _SHARED,
        "csrc/ops/snapshot.cpp",
        "      !overlap(source, nbytes, dst), where,\n",
        "      nbytes < 0 || !overlap(source, 0, dst), where,\n",
        (
            _NATIVE + "test_pad_copy_refuses",
            _SLABS + "test_pack_refuses_and_writes_nothing",
            _SEND + "test_bad_arguments_are_named_and_nothing_is_written",
        ),
    ),
    Mutation(
        "a copy ends beyond its target",
        _SHARED,
        "csrc/ops/transfer.cpp",
        "    TORCH_CHECK_VALUE(source.nbytes == target.nbytes, to,",
        "    TORCH_CHECK_VALUE(source.nbytes >= 0, to,",
        (_SEND + "test_bad_arguments_are_named_and_nothing_is_written",),
    ),
    Mutation(
        "packed leaves may exceed their slab",
        _SHARED,
        "csrc/ops/pack.cpp",
        "  TORCH_CHECK_VALUE(snapshot.nbytes == plan.nbytes(), where,",
        "  TORCH_CHECK_VALUE(snapshot.nbytes >= 0, where,",
        (
            _SLABS + "test_pack_refuses_and_writes_nothing",
            _SLABS + "test_views_refuses",
        ),
    ),
    Mutation(
        "slots of a plan from Python may overlap",
        "misaligned slots and views that keep slabs alive",
        "csrc/ops/slab_plan.cpp",
        "slot_ascends(leaf->offset, *end) && is_aligned(leaf->offset)",
        "is_aligned(leaf->offset)",
        (_SLABS + "test_a_plan_refuses",),
    ),
    Mutation(
        "views begin in the middle of an item",
        "misaligned slots and views that keep slabs alive",
        "csrc/ops/pack.cpp",
        "    TORCH_CHECK_VALUE(base.offset % itemsize == 0, kSlab,\n",
        "    TORCH_CHECK_VALUE(base.offset >= 0, kSlab,\n",
        (_SLABS + "test_views_refuses",),
    ),
    Mutation(
        "the negative bit of a tensor is ignored",
        "tensors with more state than their bytes",
        "csrc/ops/snapshot.cpp",
        "                    DispatchKey::Conjugate, DispatchKey::Negative,\n",
        "                    DispatchKey::Conjugate,\n",
        (_NATIVE + "test_every_tensor_must_be_plain",),
    ),
    Mutation(
        "memory without the magic number is accepted as the header of a ring",
        "numbers from other processes",
        "csrc/ops/ring.cpp",
        "ring_nbytes(num_slots) && ring.is_formatted();",
        "ring_nbytes(num_slots);",
        (_RINGS + "test_a_corrupted_header_is_refused",),
    ),
    Mutation(
        "a slab number beyond the ring is accepted",
        "numbers from other processes",
        "csrc/ops/ring.cpp",
        "slot >= 0 && slot < ring.num_slots(),",
        "slot >= 0,",
        (_RINGS + "test_a_bad_number_is_refused_and_nothing_written",),
    ),
    Mutation(
        "the words of a ring may be unaligned",
        "numbers from other processes",
        "csrc/ops/ring.cpp",
        "  TORCH_CHECK_VALUE(past == 0, where,",
        "  TORCH_CHECK_VALUE(past < kRingLine, where,",
        (_RINGS + "test_another_header_is_refused",),
    ),
    Mutation(
        "long copies keep the GIL",
        "locks held while waiting",
        "csrc/bindings/run.h",
        "  unlocked([&] { job->run(); });\n",
        "  job->run();\n",
        (_NATIVE_OPS + "test_large_copies_release_the_gil",),
    ),
    Mutation(
        "sending keeps the GIL",
        "locks held while waiting",
        "csrc/bindings/transfer.cpp",
        "  return result_unlocked([&] { return job.run(); });\n",
        "  return job.run();\n",
        ("tests/transfer/test_engine.py::test_large_transfers_release_the_gil",),
    ),
    Mutation(
        "torch's operators use several threads in a forked child",
        "locks and threads across a fork",
        "csrc/cpu/backend.cpp",
        "    if (forked()) {\n",
        "    if (num_threads_ > 0) {\n",
        (_NATIVE_OPS + "test_a_forked_child_pads_after_its_parent_used_threads",),
    ),
    Mutation(
        "reused memory is returned in torch's deterministic mode",
        "bytes of an earlier batch",
        "csrc/ops/host_memory.cpp",
        "!is_large(shape, dtype) || at::globalContext().deterministicAlgorithms()",
        "!is_large(shape, dtype)",
        (
            "tests/robustness/test_memory.py::test_deterministic_mode_uses_memory_of_torch",
        ),
    ),
)
