"""Defects of the interfaces that are replaced, put back in."""

from __future__ import annotations

from tests.mutations.entry import Mutation

_TRAP = "defects of mmcv and mmengine"
_STEPS = "tests/parallel/test_data_parallel_steps.py::"
_ONE = "tests/parallel/test_data_parallel.py::"
_DEVICE = _ONE + "TestOnADevice::"
_RANKS = "tests/parallel/test_distributed.py::"
_FAULTS = "tests/parallel/test_distributed_faults.py::"

MUTATIONS = (
    Mutation(
        "torch's loader leaves containers unpinned",
        _TRAP,
        "pyparallel/batch/container.py",
        "        return self._map(lambda leaf: leaf.pin_memory() if leaf.is_cpu else "
        "leaf)\n",
        "        return self\n",
        ("tests/batch/test_container.py::test_torchs_own_pin_memory_pins_containers",),
    ),
    Mutation(
        "namedtuples become lists",
        _TRAP,
        "pyparallel/batch/collate.py",
        "    return pytree.rebuild_sequence(first, columns) if named else columns\n",
        "    return columns\n",
        (
            "tests/batch/test_collate.py::test_sequences_become_lists_and_namedtuples_keep_their_type",
        ),
    ),
    Mutation(
        "defaultdicts lose their factory",
        _TRAP,
        "pyparallel/batch/pytree.py",
        "        if isinstance(like, defaultdict):\n",
        "        if False:\n",
        (
            "tests/batch/test_collate.py::test_mappings_keep_type_and_order",
            "tests/scatter_gather/test_scatter.py::test_containers_keep_their_types",
        ),
    ),
    Mutation(
        "a wrapper below torch.compile is not found",
        _TRAP,
        "pyparallel/parallel/registry.py",
        "    module = uncompiled(module)\n    return any",
        "    return any",
        (
            _ONE + "test_a_compiled_wrapper_is_a_module_wrapper_and_still_opens_"
            "containers",
        ),
    ),
    Mutation(
        "every step checks every parameter",
        _TRAP,
        "pyparallel/parallel/data_parallel.py",
        '            if self.__dict__.get("_device_checked"):\n',
        "            if False:\n",
        (_DEVICE + "test_every_tensor_is_checked_once_and_then_only_the_first",),
    ),
    Mutation(
        "a module that was moved is not checked again",
        _TRAP,
        "pyparallel/parallel/data_parallel.py",
        '        self.__dict__.pop("_device_checked", None)\n',
        "",
        (_DEVICE + "test_the_check_is_armed_again_when_the_wrapper_is_moved",),
    ),
    Mutation(
        "a replica's optimizer makes a step of its own",
        _TRAP,
        "pyparallel/parallel/data_parallel.py",
        "        with forbid_optimizer_steps(arguments, where):\n",
        "        if True:\n",
        (_STEPS + "TestUpdates::test_an_optimizer_is_not_stepped_and_nothing_changes",),
    ),
    Mutation(
        "a query of unused parameters runs the backward pass",
        _TRAP,
        "pyparallel/mmengine/anomalous_params.py",
        "        reached.extend(will_execute(node) for node in nodes)\n"
        "        raise _BackwardAborted\n",
        "        reached.extend(will_execute(node) for node in nodes)\n",
        (
            "tests/mmengine/test_anomalous_params.py::test_nothing_is_run_and_no_hook_is_called",
        ),
    ),
    Mutation(
        "the caller's dict of clip_grad is emptied",
        _TRAP,
        "pyparallel/mmengine/optimizer_wrapper.py",
        "    kwargs = dict(clip_grad)\n",
        "    kwargs = clip_grad\n",
        (
            "tests/mmengine/test_optimizer_wrapper.py::test_arguments_of_callers_are_not_changed",
        ),
    ),
    Mutation(
        "steps bypass torch's context",
        _TRAP,
        "pyparallel/parallel/distributed.py",
        "            self._prepare()\n            with self._inside_ddp_forward():\n",
        "            with self._inside_ddp_forward():\n",
        (
            _RANKS + "test_buffers_are_broadcast_again_after_a_validation_step",
            _RANKS + "test_ranks_with_unequal_numbers_of_batches_end_equal_under_join",
        ),
    ),
    Mutation(
        "models that differ between ranks are trained",
        _TRAP,
        "pyparallel/parallel/distributed.py",
        "    if index is None:\n        return\n",
        "    return\n",
        (
            _FAULTS
            + "test_different_models_are_an_error_on_all_ranks_and_the_group_is_usable",
        ),
    ),
)
