"""Waits between streams, their events, and their memory."""

from __future__ import annotations

from tests.mutations.entry import Mutation

_SLAB = "tests/transfer/test_to_device.py::"
_SPANS = "tests/transfer/test_in_place_copies.py::"
_PREFETCH = "tests/prefetch/test_prefetch_device.py::"
_BACK = "tests/scatter_gather/test_to_host.py::"
_JOBS = "tests/parallel/test_parallel_apply_streams.py::"

MUTATIONS = (
    Mutation(
        "`wait` does not wait for the copies",
        "the consumer reads too early",
        "pyparallel/transfer/to_device.py",
        "        self._event.wait(stream)\n        self._finalizer.detach()",
        "        self._finalizer.detach()",
        (_SLAB + "test_every_value_arrives_while_memory_is_reused",),
    ),
    Mutation(
        "the sender's stream waits for the copy instead of the consumer's",
        "the consumer reads too early",
        "pyparallel/transfer/to_device.py",
        "        stream = api.current_stream(self._device)\n        if self._watch",
        "        stream = self._home\n        if self._watch",
        (_SLAB + "test_a_consumer_on_another_stream_may_drop_the_batch_at_once",),
    ),
    Mutation(
        "the event is recorded on another stream than the copies",
        "the consumer reads too early",
        "pyparallel/transfer/engine.py",
        "        event = DeviceEvent(api, api.record(stream))\n",
        "        event = DeviceEvent(api, api.record(home))\n",
        (_SLAB + "test_every_value_arrives_while_memory_is_reused",),
    ),
    Mutation(
        "the consumer does not wait for a transform",
        "the consumer reads too early",
        "pyparallel/prefetch/_to_device.py",
        "            api.wait(stream, event)\n",
        "",
        (_PREFETCH + "test_a_transform_runs_after_the_copy_and_before_the_consumer",),
    ),
    Mutation(
        "a job does not wait for the queued work of its caller",
        "the consumer reads too early",
        "pyparallel/parallel/_device_threads.py",
        "                self._api.wait(place.stream, "
        "self.caller_streams[device].event)\n",
        "",
        (_JOBS + "test_results_are_right_however_slow_the_streams_are",),
    ),
    Mutation(
        "the caller's stream does not wait for jobs",
        "the consumer reads too early",
        "pyparallel/parallel/_device_threads.py",
        "            self._api.wait(self.caller_streams[self._devices[i]].stream, "
        "event)\n",
        "            pass\n",
        (_JOBS + "test_results_are_right_however_slow_the_streams_are",),
    ),
    Mutation(
        "the caller's stream does not wait for failed jobs",
        "the consumer reads too early",
        "pyparallel/parallel/_device_threads.py",
        """                    return job()
                finally:
                    self._done[i] = self._api.record(place.stream)
""",
        """                    found = job()
                    self._done[i] = self._api.record(place.stream)
                    return found
                finally:
                    pass
""",
        (_JOBS + "test_the_caller_waits_for_jobs_that_fail_too",),
    ),
    Mutation(
        "mmcv's scatter waits for fewer parts than it copies",
        "the consumer reads too early",
        "pyparallel/mmcv/_functions.py",
        "        for item, part in _assign_parts(output, len(devices)):\n",
        """        most = len(output) // len(devices)
        parts = [i // most for i in range(most * len(devices))] if most else []
        for item, part in zip(output, parts):
""",
        (
            "tests/mmcv/test_functions.py::"
            "test_items_are_sent_and_waited_for_by_one_partition",
        ),
    ),
    Mutation(
        "the parts of a batch are copied one after the other",
        "the consumer reads too early",
        "pyparallel/scatter_gather/scatter.py",
        "    return [pytree.unflatten(structure, wait()) for wait in waits]",
        """    return [
        pytree.unflatten(structure, start_copy(leaves, column, target, options.dtype,
                                               stream, name)())
        for column, target in zip(columns, targets, strict=False)
    ]""",
        (
            "tests/scatter_gather/test_scatter_devices.py::test_all_copies_start_before_the_first_wait",
        ),
    ),
    Mutation(
        "a copy does not wait for the last user of its memory",
        "the producer writes too early",
        "pyparallel/transfer/engine.py",
        "    api.wait(stream, allocated)\n",
        "",
        (_SLAB + "test_the_copy_waits_for_uses_queued_up_to_the_allocation",),
    ),
    Mutation(
        "memory of a copy without `wait` is reused at once",
        "the producer writes too early",
        "pyparallel/transfer/to_device.py",
        "        event.wait(home)\n",
        "        pass\n",
        (_SLAB + "test_memory_of_a_copy_without_a_wait_is_safe_to_reuse",),
    ),
    Mutation(
        "an error frees the memory of earlier copies at once",
        "the producer writes too early",
        "pyparallel/transfer/engine.py",
        "        api.wait(home, api.record(stream))  # it frees their memory\n",
        "",
        (_SPANS + "test_a_copy_that_was_queued_before_an_error_keeps_its_source",),
    ),
    Mutation(
        "an error in the engine frees the memory of earlier copies at once",
        "the producer writes too early",
        "pyparallel/transfer/engine.py",
        "        sent.wait(streams[1])",
        "        pass",
        (
            "tests/transfer/test_engine.py::test_an_error_between_copies_is_raised_and_sources_are_kept_alive",
        ),
    ),
    Mutation(
        "the thread allocates memory on its own stream",
        "memory of another stream",
        "pyparallel/prefetch/_to_device.py",
        "MixedCopy(skeleton.take_tensors(), device, self._api, consumer_stream)",
        "MixedCopy(skeleton.take_tensors(), device, self._api)",
        (_PREFETCH + "test_memory_is_taken_from_the_stream_of_the_latest_next",),
    ),
    Mutation(
        "a consumer on another stream is not recorded",
        "memory of another stream",
        "pyparallel/transfer/to_device.py",
        "                api.keep(block, stream)\n",
        "                pass\n",
        (_SLAB + "test_a_consumer_on_another_stream_may_drop_the_batch_at_once",),
    ),
    Mutation(
        "the consumer of a transform is not recorded",
        "memory of another stream",
        "pyparallel/prefetch/_to_device.py",
        "                    api.keep(tensor, stream)\n",
        "                    pass\n",
        (
            _PREFETCH
            + "test_memory_of_a_transform_is_kept_for_the_consumer_that_reads_"
            "it",
        ),
    ),
    Mutation(
        "a backward pass on the stream of a job is not recorded",
        "memory of another stream",
        "pyparallel/parallel/_device_threads.py",
        "                    _record_stream(self._api, self._uses(i), device, "
        "place.stream)\n",
        "",
        (
            _JOBS + "test_memory_of_arguments_is_kept_for_a_backward_pass_on_the_"
            "stream_of_the_job",
        ),
    ),
    Mutation(
        "the reader of a job's results is not recorded",
        "memory of another stream",
        "pyparallel/parallel/_device_threads.py",
        "                    _record_stream(\n"
        "                        self._api, result, device, "
        "group.caller_streams[device].stream\n"
        "                    )\n",
        "                    pass\n",
        (_JOBS + "test_memory_of_results_is_kept_for_the_stream_that_reads_them",),
    ),
    Mutation(
        "every `wait` records its stream",
        "recorded memory grows",
        "pyparallel/transfer/to_device.py",
        "        if stream != self._home:\n",
        "        if True:\n",
        (_SLAB + "test_torch_device_calls_torch_in_the_right_order",),
    ),
    Mutation(
        "every batch has a copy stream of its own",
        "a new stream for every epoch",
        "pyparallel/transfer/device.py",
        "            if device not in self._streams:\n",
        "            if True:\n",
        (_SLAB + "test_there_is_one_copy_stream_for_each_device",),
    ),
    Mutation(
        "all devices share one copy stream",
        "a stream of another device or of a captured graph",
        "pyparallel/transfer/device.py",
        "                self._streams[device] = self.new_stream(device)\n"
        "            return self._streams[device]",
        "                self._streams[device] = self.new_stream(device)\n"
        "            return next(iter(self._streams.values()))",
        (_SLAB + "test_there_is_one_copy_stream_for_each_device",),
    ),
    Mutation(
        "a copy is queued while a graph is captured",
        "a stream of another device or of a captured graph",
        "pyparallel/transfer/engine.py",
        "        _check_not_capturing(name, each, api)\n",
        "        pass\n",
        (_SLAB + "test_a_stream_under_capture_is_refused_before_anything_is_queued",),
    ),
    Mutation(
        "capture is checked on the current stream, not on the copy stream",
        "a stream of another device or of a captured graph",
        "pyparallel/transfer/device.py",
        "        with self.using(stream):\n            return _is_capturing_here",
        "        if True:\n            return _is_capturing_here",
        (
            _SLAB
            + "test_capture_is_checked_on_the_stream_and_only_on_devices_with_graphs",
        ),
    ),
    Mutation(
        "a copy to the host is queued while a graph is captured",
        "a stream of another device or of a captured graph",
        "pyparallel/transfer/from_device.py",
        "        if api.is_capturing(home):\n",
        "        if False:\n",
        (_BACK + "test_nothing_is_queued_while_a_graph_is_recorded",),
    ),
    Mutation(
        "jobs run while a graph is captured",
        "a stream of another device or of a captured graph",
        "pyparallel/parallel/_device_threads.py",
        "            if self._api.is_capturing(stream):\n",
        "            if False:\n",
        (_JOBS + "test_a_stream_under_capture_is_refused_before_anything_runs",),
    ),
    Mutation(
        "both directions share one copy stream",
        "the default stream",
        "pyparallel/transfer/device.py",
        "torch_return = TorchReturn(backend.transfers)",
        "torch_return = TorchReturn(backend.transfers)\n"
        "torch_return._streams = torch_device._streams",
        (
            "tests/transfer/test_from_device.py::"
            "test_both_directions_have_streams_of_their_own",
        ),
    ),
    Mutation(
        "a copy is queued on the current stream",
        "the default stream",
        "pyparallel/transfer/to_device.py",
        "        copies = api.copy_stream(device) if stream is None else stream\n",
        "        copies = self._home if stream is None else stream\n",
        (
            _SLAB + "test_every_value_arrives_while_memory_is_reused",
            _SLAB + "test_torch_device_calls_torch_in_the_right_order",
        ),
    ),
    Mutation(
        "a copy blocks the host",
        "copies that only look asynchronous",
        "pyparallel/transfer/device.py",
        "            dst.copy_(src, non_blocking=True)",
        "            dst.copy_(src)",
        (_SLAB + "test_torch_device_calls_torch_in_the_right_order",),
    ),
    Mutation(
        "large pageable leaves are read in place",
        "copies that only look asynchronous",
        "pyparallel/transfer/layout.py",
        "        direct = [i for i in large if is_pinned(leaves[i])]\n",
        "        direct = large\n",
        (_SLAB + "test_large_leaves_of_ordinary_memory_are_packed",),
    ),
    Mutation(
        "a pageable span is read in place",
        "copies that only look asynchronous",
        "pyparallel/transfer/layout.py",
        "        if span is not None and is_pinned(span.source):\n",
        "        if span is not None:\n",
        (_SPANS + "test_ordinary_memory_and_small_batches_are_packed",),
    ),
    Mutation(
        "the host reads results without waiting",
        "results read before they arrive",
        "pyparallel/transfer/from_device.py",
        "            self._api.wait_on_host(self._event)\n",
        "",
        (_BACK + "test_results_are_those_of_the_call_while_memory_is_reused",),
    ),
    Mutation(
        "a copy to the host does not wait for its sources",
        "results read before they arrive",
        "pyparallel/transfer/from_device.py",
        "            api.wait(stream, api.record(home))\n",
        "",
        (_BACK + "test_results_are_those_of_the_call_while_memory_is_reused",),
    ),
    Mutation(
        "the slab of a copy to the host is freed at once",
        "results read before they arrive",
        "pyparallel/transfer/from_device.py",
        "engine.queue(copies, held, (stream, home), api)",
        "engine.queue(copies, [], (stream, home), api)",
        (_BACK + "test_a_dropped_handle_frees_its_memory_after_the_copy",),
    ),
)
