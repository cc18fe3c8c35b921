"""What batches are made of: values, kinds, sizes, and which sample goes where."""

from __future__ import annotations

from tests.mutations.entry import Mutation

_COLLATE = "tests/batch/test_collate.py::"
_COLLATE_ERRORS = "tests/batch/test_collate_errors.py::"
_COLLATE_FIELDS = "tests/batch/test_collate_fields.py::"
_PLAN = "tests/batch/test_plan.py::"
_SCATTER = "tests/scatter_gather/test_scatter.py::"
_SCATTER_ERRORS = "tests/scatter_gather/test_scatter_errors.py::"
_IMAGE = "tests/images/test_preprocessor.py::"
_SAMPLER = "tests/sampler/test_size_batch_sampler.py::"
_SAMPLER_STATE = "tests/sampler/test_sampler_state.py::"
_BATCHER = "tests/sampler/test_size_batcher.py::"

MUTATIONS = (
    Mutation(
        "a tensor that needs gradients is copied as bytes",
        "tensors with more state than their bytes",
        "pyparallel/batch/stack.py",
        "        and not (torch.is_grad_enabled() and any(map(_requires_grad, "
        "samples)))\n",
        "",
        (_COLLATE + "test_gradients_flow_and_no_grad_stops_them",),
    ),
    Mutation(
        "tangents are lost",
        "tensors with more state than their bytes",
        "pyparallel/batch/stack.py",
        "        and not in_forward_ad()\n",
        "",
        (_COLLATE + "test_tangents_of_forward_mode_flow_through",),
    ),
    Mutation(
        "subclasses are handled as plain tensors",
        "tensors with more state than their bytes",
        "pyparallel/batch/stack.py",
        "        and PLAIN.issuperset(map(type, samples))\n",
        "",
        (_COLLATE + "test_subclasses_are_stacked_by_their_own_rules",),
    ),
    Mutation(
        "quantized tensors are copied as bytes",
        "tensors with more state than their bytes",
        "pyparallel/batch/stack.py",
        "        and not (first.is_quantized or any(map(_is_nested, samples)))\n",
        "",
        (_COLLATE + "test_quantized_tensors_are_stacked_by_torch",),
    ),
    Mutation(
        "pure Python copies conjugated tensors as bytes",
        "tensors with more state than their bytes",
        "pyparallel/backend/plain.py",
        "        and not (tensor.is_conj() or tensor.is_neg())\n",
        "",
        (
            _COLLATE + "test_conjugated_negated_and_zero_tensors_are_resolved",
            "tests/backend/test_native_errors.py",
        ),
        backend="python",
    ),
    Mutation(
        "the conjugate bit of a tensor is ignored",
        "tensors with more state than their bytes",
        "pyparallel/shm/serialization.py",
        "            tensor = tensor.resolve_conj().resolve_neg()  # torch's queue "
        "drops both\n",
        "            pass\n",
        ("tests/loader/test_loader_kinds.py::test_a_batch_arrives_as_with_torch",),
    ),
    Mutation(
        "an expanded tensor is copied in its full size",
        "tensors with more state than their bytes",
        "pyparallel/shm/serialization.py",
        "            and tensor.nbytes <= tensor.untyped_storage().nbytes()  # not "
        "expanded\n",
        "",
        (
            "tests/shm/test_serialization.py::test_an_expanded_tensor_is_sent_in_its_stored_size",
        ),
    ),
    Mutation(
        "arrays with negative strides are passed to torch",
        "tensors with more state than their bytes",
        "pyparallel/batch/stack.py",
        "        and all(step >= 0 and step % value.itemsize == 0 for step in "
        "value.strides)\n",
        "",
        (_COLLATE + "test_numpy_arrays_are_stacked_and_never_written",),
    ),
    Mutation(
        "read-only arrays are passed to torch",
        "tensors with more state than their bytes",
        "pyparallel/batch/stack.py",
        "        value.flags.writeable\n        and value",
        "        value",
        (_COLLATE + "test_numpy_arrays_are_stacked_and_never_written",),
    ),
    Mutation(
        "a batch overwrites the memory of another tensor",
        "tensors with more state than their bytes",
        "pyparallel/backend/_checks.py",
        "    if dst is not None and tensor.is_contiguous() and overlap(tensor, dst):\n",
        "    if False:\n",
        ("tests/backend/test_native_errors.py", "tests/backend/test_slab_errors.py"),
        backend="python",
    ),
    Mutation(
        "metadata is copied to the device",
        "leaves that are already in place",
        "pyparallel/scatter_gather/move.py",
        "        return not leaf.cpu_only\n",
        "        return True\n",
        (
            _SCATTER + "test_cpu_only_content_is_the_very_object",
            "tests/scatter_gather/test_scatter_devices.py::"
            "test_any_tree_and_any_options_split_as_on_the_host",
        ),
    ),
    Mutation(
        "metadata is moved by `to`",
        "leaves that are already in place",
        "pyparallel/batch/container.py",
        "        if self._cpu_only:\n            return self\n",
        "",
        ("tests/batch/test_container.py::test_metadata_is_not_copied",),
    ),
    Mutation(
        "tensors on the device are copied again",
        "leaves that are already in place",
        "pyparallel/prefetch/_to_device.py",
        "        skeleton = TensorSkeleton(batch, lambda tensor: tensor.device != "
        "device)\n",
        "        skeleton = TensorSkeleton(batch, lambda tensor: True)\n",
        (
            "tests/prefetch/test_prefetch_device.py::test_tensors_on_the_device_are_returned_unchanged",
        ),
    ),
    Mutation(
        "padding of raw pixels is not normalised",
        "padding before or after normalisation",
        "pyparallel/images/_batch.py",
        "        if self.pad_first:\n            if",
        "        if False:\n            if",
        (_IMAGE + "test_padding_may_be_normalised_with_the_pixels",),
    ),
    Mutation(
        "padding of raw pixels is in the channel order of the result",
        "padding before or after normalisation",
        "pyparallel/images/_batch.py",
        "            if self.swap_channels:\n                fill = fill[::-1]\n",
        "",
        (_IMAGE + "test_padding_may_be_normalised_with_the_pixels",),
    ),
    Mutation(
        "every sample is padded with the value of the first",
        "padding before or after normalisation",
        "pyparallel/batch/plan.py",
        "    if len(set(map(id, values))) == 1:  # nearly always",
        "    if True:  # nearly always",
        (_COLLATE + "test_each_sample_is_padded_with_its_own_value",),
    ),
    Mutation(
        "2**63 is a padding value of int64",
        "padding values and sizes that do not fit",
        "pyparallel/batch/plan.py",
        "    if dtype in limits and value >= limits[dtype]:\n",
        "    if False:\n",
        (_PLAN + "test_a_value_that_is_just_too_large_is_refused",),
    ),
    Mutation(
        "a value that the dtype cannot hold is written",
        "padding values and sizes that do not fit",
        "pyparallel/batch/plan.py",
        '        return _convert_number(struct.pack("d", number), dtype)\n'
        "    except RuntimeError as error:\n",
        '        return _convert_number(struct.pack("d", number), dtype)\n'
        "    except RuntimeError as error:\n"
        "        return bytes(dtype.itemsize)\n",
        (
            _COLLATE_ERRORS
            + "test_errors_of_mmcv_are_errors_with_the_place_and_both_values",
            "tests/robustness/test_bad_inputs.py",
        ),
    ),
    Mutation(
        "an imaginary part is dropped",
        "padding values and sizes that do not fit",
        "pyparallel/batch/plan.py",
        "    if not isinstance(value, (str, bytes)) and not _is_complex(value):\n",
        "    value = value.real if isinstance(value, complex) else value\n"
        "    if not isinstance(value, (str, bytes)):\n",
        ("tests/robustness/test_bad_inputs.py",),
    ),
    Mutation(
        "minus zero becomes zero",
        "padding values and sizes that do not fit",
        "pyparallel/batch/plan.py",
        '        return _convert_number(struct.pack("d", number), dtype)\n',
        '        return _convert_number(struct.pack("d", number + 0.0), dtype)\n',
        (_PLAN + "test_the_sign_of_zero_is_kept",),
    ),
    Mutation(
        "a batch may have more than 2**63 bytes",
        "padding values and sizes that do not fit",
        "pyparallel/batch/plan.py",
        "    if math.prod(size for size in shape if size) > _MAX_BYTES:\n",
        "    if math.prod(shape) > _MAX_BYTES:\n",
        (_PLAN + "test_zero_sizes_do_not_hide_an_overflow",),
    ),
    Mutation(
        "an unpickled container may have any pad_dims",
        "padding values and sizes that do not fit",
        "pyparallel/batch/container.py",
        '        _check_pad_dims(state["_pad_dims"])\n',
        "",
        (
            "tests/batch/test_container.py::test_a_pickle_with_impossible_pad_dims_is_refused",
        ),
    ),
    Mutation(
        "padding values are computed on the default device",
        "modes of threads",
        "pyparallel/batch/plan.py",
        '    cells = torch.empty(2, dtype=dtype, device="cpu").fill_(value)\n',
        "    cells = torch.empty(2, dtype=dtype).fill_(value)\n",
        (
            _COLLATE + "test_a_default_device_does_not_matter",
            "tests/batch/test_pad_stack.py::test_a_default_device_does_not_matter",
        ),
    ),
    Mutation(
        "bfloat16 is rounded away from even",
        "rounding",
        "csrc/core/image/math.h",
        "(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16",
        "(bits + 0x8000) >> 16",
        ("tests/csrc/core/test_half.cpp::test_every_bfloat16_and_values_between",),
    ),
    Mutation(
        "float16 is rounded away from even",
        "rounding",
        "csrc/core/image/math.h",
        "(magnitude >> 13) & 1;",
        "1;",
        ("tests/csrc/core/test_half.cpp::test_every_float16_and_values_between",),
    ),
    Mutation(
        "NaN becomes infinity",
        "rounding",
        "csrc/core/image/math.h",
        "(is_number ? rounded : 0x7FC0)",
        "(is_number ? rounded : 0x7F80)",
        ("tests/csrc/core/test_half.cpp::test_every_bfloat16_and_values_between",),
    ),
    Mutation(
        "padding is normalised in one step",
        "rounding",
        "pyparallel/images/_batch.py",
        "            less = [_float32(v - m) for v, m in zip(fill, mean, "
        "strict=True)]\n",
        "            less = [v - m for v, m in zip(fill, mean, strict=True)]\n",
        (_IMAGE + "test_padding_is_normalised_in_two_steps_as_pixels_are",),
    ),
    Mutation(
        "a batch is divided by rounding down",
        "empty, single, equal and uneven batches",
        "pyparallel/scatter_gather/split.py",
        "    size = -(-num_items // num_parts)\n",
        "    size = max(1, num_items // num_parts)\n",
        (_PLAN + "test_a_partition_is_that_of_torch_chunk",),
    ),
    Mutation(
        "an empty batch has no part",
        "empty, single, equal and uneven batches",
        "pyparallel/scatter_gather/split.py",
        "    if num_items == 0:\n        return [0]\n",
        "    if num_items == 0:\n        return []\n",
        (_PLAN + "test_a_partition_is_that_of_torch_chunk",),
    ),
    Mutation(
        "chunks without a device are dropped",
        "empty, single, equal and uneven batches",
        "pyparallel/scatter_gather/split.py",
        "    if len(chunks) > options.num_targets:\n",
        "    if False:\n",
        (_SCATTER_ERRORS + "test_more_chunks_than_targets",),
    ),
    Mutation(
        "labels are divided in another way than their images",
        "empty, single, equal and uneven batches",
        "pyparallel/scatter_gather/split.py",
        "    if plain and parts and sizes is None and options.num_targets > 1:\n",
        "    if False:\n",
        (_SCATTER + "test_tensors_next_to_a_container_follow_its_chunks",),
    ),
    Mutation(
        "fields with different numbers of parts are cut to the smallest",
        "empty, single, equal and uneven batches",
        "pyparallel/scatter_gather/split.py",
        "        if len(part) != len(expected):\n",
        "        if False:\n",
        (_SCATTER_ERRORS + "test_containers_with_different_numbers_of_chunks",),
    ),
    Mutation(
        "an empty container makes arguments disappear",
        "empty, single, equal and uneven batches",
        "pyparallel/scatter_gather/split.py",
        "    if not data:\n        raise",
        "    if False:\n        raise",
        (_SCATTER_ERRORS + "test_an_empty_container",),
    ),
    Mutation(
        "lists of unequal length are cut",
        "empty, single, equal and uneven batches",
        "pyparallel/batch/columns.py",
        "        if len(item) != len(first):\n",
        "        if False:\n",
        (
            _COLLATE_ERRORS
            + "test_errors_of_mmcv_are_errors_with_the_place_and_both_values",
        ),
    ),
    Mutation(
        "keys that only other samples have are dropped without an error",
        "empty, single, equal and uneven batches",
        "pyparallel/batch/collate.py",
        "        if extra:\n",
        "        if False:\n",
        (_COLLATE_ERRORS + "test_extra_keys_are_dropped_with_one_warning",),
    ),
    Mutation(
        "text is walked letter by letter",
        "empty, single, equal and uneven batches",
        "pyparallel/batch/collate.py",
        "    if isinstance(first, _TEXT):\n",
        "    if False:\n",
        (_COLLATE + "test_text_becomes_a_list",),
    ),
    Mutation(
        "endless nesting ends in a RecursionError",
        "empty, single, equal and uneven batches",
        "pyparallel/batch/pytree.py",
        '            raise nesting_error("the batch") from None\n',
        "            raise\n",
        ("tests/batch/test_pytree.py::test_cycles_and_bottomless_nests_are_refused",),
    ),
    Mutation(
        "a batch of one sample shares its memory",
        "empty, single, equal and uneven batches",
        "pyparallel/backend/_python.py",
        "        return stacked if stacked.dim() < _NCHW else stacked.contiguous()\n",
        "        if len(samples) == 1:\n            return first[None]\n"
        "        return stacked if stacked.dim() < _NCHW else stacked.contiguous()\n",
        (
            "tests/backend/test_stack_equal.py::"
            "test_the_result_shares_no_memory_with_one_sample",
            _COLLATE + "test_one_sample_is_copied_not_aliased",
        ),
        backend="python",
    ),
    Mutation(
        "equal values are stacked, although the default is another rule",
        "empty, single, equal and uneven batches",
        "pyparallel/batch/collate_fields.py",
        "        if self._default is not None or _dotted(path) in self._parents:\n",
        "        if _dotted(path) in self._parents:\n",
        (_COLLATE_FIELDS + "test_the_default_is_the_rule_of_equal_values_too",),
    ),
    Mutation(
        "a rule with a misspelt name has no effect",
        "empty, single, equal and uneven batches",
        "pyparallel/batch/collate_fields.py",
        "            if not _has_field(batch[0], name):\n",
        "            if False:\n",
        (_COLLATE_FIELDS + "test_a_rule_without_a_field_is_an_error",),
    ),
    Mutation(
        "an empty list is a list of floats",
        "empty, single, equal and uneven batches",
        "pyparallel/batch/rules.py",
        "        like.new_empty((0, *like.shape[1:])) if is_empty else value\n",
        "        torch.empty(0) if is_empty else value\n",
        (_COLLATE_FIELDS + "test_an_empty_list_has_the_dtype_and_width_of_the_others",),
    ),
    Mutation(
        "the incomplete last step is lost",
        "samples that are lost or used twice",
        "pyparallel/sampler/planner.py",
        "        if num_extra and not self.drop_last:\n",
        "        if num_extra < 0:\n",
        (_SAMPLER + "test_every_sample_is_in_one_batch",),
    ),
    Mutation(
        "other ranks begin the epoch again",
        "samples that are lost or used twice",
        "pyparallel/sampler/size_batch_sampler.py",
        "            self._history.append([num_replicas, step])\n",
        "",
        (_SAMPLER_STATE + "test_each_sample_is_used_once_with_any_changes_of_ranks",),
    ),
    Mutation(
        "a resumed stream repeats a batch",
        "samples that are lost or used twice",
        "pyparallel/sampler/size_batcher.py",
        "replace(window.start, num_batches=number)",
        "replace(window.start, num_batches=number - 1)",
        (_BATCHER + "test_a_batcher_continues_after_any_batch",),
    ),
)
