"""Memory that is read, or written, after it was given up; and how much there is."""

from __future__ import annotations

from tests.mutations.entry import Mutation

_SPANS = "tests/transfer/test_in_place_copies.py::"
_KEEPER = "tests/transfer/test_keep_alive.py::"
_ENGINE = "tests/transfer/test_engine.py::"
_LOCK = "tests/shm/test_pinning.py::"
_BUDGETS = "tests/robustness/test_budgets.py::"
_HOST_SLABS = "tests/transfer/test_pinned_results.py::"

MUTATIONS = (
    Mutation(
        "sources that are read in place are not kept alive",
        "sources that change or are freed",
        "pyparallel/transfer/engine.py",
        "        self._sources[ticket] = sources\n",
        "        self._sources[ticket] = None\n",
        (_SPANS + "test_a_slot_is_free_when_it_has_been_read_and_not_before",),
    ),
    Mutation(
        "sources are freed before their event has completed",
        "pinned memory reused too early",
        "pyparallel/transfer/engine.py",
        "            if is_done():\n",
        "            if True:\n",
        (_SPANS + "test_a_slot_is_free_when_it_has_been_read_and_not_before",),
    ),
    Mutation(
        "the end of the interpreter frees sources of pending copies",
        "the end of the interpreter",
        "pyparallel/transfer/engine.py",
        "        if not drained:\n            _leak(self._sources)\n",
        "",
        (
            _KEEPER + "test_the_end_of_the_interpreter_waits_a_little_and_drops_"
            "nothing_early",
        ),
    ),
    Mutation(
        "a device that fails frees the sources of its copies",
        "pinned memory reused too early",
        "pyparallel/transfer/engine.py",
        "        except Exception:  # the device failed: it may still read the "
        "sources\n            drained = False\n",
        "        except Exception:\n            drained = True\n",
        (
            _KEEPER + "test_the_end_of_the_interpreter_waits_a_little_and_drops_"
            "nothing_early",
        ),
    ),
    Mutation(
        "a forked child frees the sources of its parent's copies",
        "locks and threads across a fork",
        "pyparallel/transfer/engine.py",
        "        _leak((self._sources, self._checks))\n"
        "        self._sources, self._checks = {}, {}\n",
        "        self._sources, self._checks = {}, {}\n",
        (_SPANS + "test_a_forked_child_does_not_free_the_sources_of_its_parent",),
    ),
    Mutation(
        "the engine's sources are not kept alive",
        "sources that change or are freed",
        "pyparallel/transfer/engine.py",
        "    ticket = keep_alive.hold(sources) if sources else None\n",
        "    ticket = None\n",
        (_ENGINE + "test_sources_read_in_place_live_until_the_copy_is_done",),
    ),
    Mutation(
        "the engine's sources are freed when `send` returns",
        "pinned memory reused too early",
        "pyparallel/transfer/engine.py",
        "        is_done = sent.is_done\n",
        "",
        (_ENGINE + "test_sources_read_in_place_live_until_the_copy_is_done",),
    ),
    Mutation(
        "pinned tensors that torch copies are not kept alive",
        "sources that change or are freed",
        "pyparallel/transfer/to_device.py",
        "            hold_while_read(in_place, self._device, self._api)\n",
        "            pass\n",
        (
            "tests/scatter_gather/test_move.py::test_sources_that_torch_reads_in_place_are_kept_alive",
        ),
    ),
    Mutation(
        "a dropped slab is free while the device reads it",
        "pinned memory reused too early",
        "pyparallel/shm/ring.py",
        "        if self.is_pinned(slab) and self._pinner is not None:\n",
        "        if False:\n",
        (_LOCK + "test_a_slab_is_not_free_before_its_mark_is_done",),
    ),
    Mutation(
        "dropped slabs are freed before their event has completed",
        "pinned memory reused too early",
        "pyparallel/shm/ring.py",
        "self._pinner.fence().is_done)",
        "lambda: True)",
        (_LOCK + "test_a_slab_is_not_free_before_its_mark_is_done",),
    ),
    Mutation(
        "slabs are unpinned while a copy reads them",
        "pages unpinned too early or twice",
        "pyparallel/shm/ring.py",
        "                if holder == FREE:\n",
        "                if True:\n",
        (_LOCK + "test_after_the_last_iterator_no_slab_stays_pinned",),
    ),
    Mutation(
        "a forked child unpins its parent's pages",
        "pages unpinned too early or twice",
        "pyparallel/shm/ring.py",
        "    if pid != os.getpid():  # a forked copy, which has not pinned them\n"
        "        return\n",
        "",
        (_LOCK + "test_a_forked_child_neither_waits_nor_unlocks",),
    ),
    Mutation(
        "a slab that grows is pinned twice",
        "pages unpinned too early or twice",
        "pyparallel/shm/ring.py",
        "        if before:  # the slab was free, so no copy reads it\n"
        "            pinner.unpin(self.slab_address(slab))\n",
        "",
        (_LOCK + "test_a_slab_that_grows_is_unpinned_and_pinned_again",),
    ),
    Mutation(
        "a slab that could not be pinned is tried again for every batch",
        "pinned memory without a limit",
        "pyparallel/shm/ring.py",
        "        if before in (nbytes, -1):\n",
        "        if before == nbytes:\n",
        (_LOCK + "test_a_slab_that_could_not_be_pinned_is_not_tried_again",),
    ),
    Mutation(
        "each slab may have the limit of the whole ring",
        "pinned memory without a limit",
        "pyparallel/loader/_batch_receiver.py",
        "        slab_nbytes = largest_slab(num_slabs, limit)\n",
        "        slab_nbytes = limit\n",
        (_BUDGETS + "test_the_ring_of_a_loader_stays_within_max_ring_bytes",),
    ),
    Mutation(
        "the edges of slabs are not counted",
        "pinned memory without a limit",
        "pyparallel/shm/ring.py",
        "    return max(pages * mmap.PAGESIZE - 2 * _LINE, 0)",
        "    return max(pages * mmap.PAGESIZE, 0)",
        (
            _BUDGETS + "test_a_full_ring_stays_within_its_limit",
            _BUDGETS + "test_the_ring_of_a_loader_stays_within_max_ring_bytes",
        ),
    ),
    Mutation(
        "a slab grows into the next slab",
        "pinned memory without a limit",
        "pyparallel/shm/ring.py",
        "        size = min(-(-(need + need // 8) // _GROW) * _GROW, self._stride)\n",
        "        size = -(-(need + need // 8) // _GROW) * _GROW\n",
        ("tests/shm/test_ring.py::test_a_slab_uses_at_most_its_stride",),
    ),
    Mutation(
        "prefetching has no limit",
        "pinned memory without a limit",
        "pyparallel/prefetch/_thread.py",
        "len(self.items) >= self.options.queue_size",
        "len(self.items) >= 1000",
        (
            "tests/prefetch/test_pre_data_loader.py::"
            "test_no_more_than_queue_size_batches_are_fetched_ahead",
        ),
    ),
    Mutation(
        "the thread keeps a batch after the consumer took it",
        "pinned memory without a limit",
        "pyparallel/prefetch/_thread.py",
        "        del batch, get_batch, state",
        "        del state",
        (
            _BUDGETS
            + "test_prefetching_keeps_queue_size_batches_with_the_one_in_preparation",
            "tests/prefetch/test_prefetch_faults.py::test_only_the_consumer_keeps_a_batch_alive",
        ),
    ),
    Mutation(
        "a copy of no bytes is queued",
        "tensors without elements",
        "pyparallel/transfer/engine.py",
        "    if layout.packed and layout.plan.nbytes:\n",
        "    if layout.packed:\n",
        (
            "tests/transfer/test_to_device.py::test_nothing_but_empty_leaves_needs_no_copy",
        ),
    ),
    Mutation(
        "a copy of no bytes to the host is queued",
        "tensors without elements",
        "pyparallel/transfer/from_device.py",
        "        if self._plan.nbytes == 0:\n            return\n",
        "",
        (
            "tests/scatter_gather/test_to_host.py::test_nothing_but_empty_tensors_needs_no_copy",
        ),
    ),
    Mutation(
        "an empty tensor makes a stream wait",
        "tensors without elements",
        "pyparallel/mmcv/_functions.py",
        "        if output.numel() and streams[0] is not None:\n",
        "        if streams[0] is not None:\n",
        ("tests/mmcv/test_functions.py::test_an_empty_tensor_needs_no_stream",),
    ),
    Mutation(
        "empty leaves decide the position of a span",
        "tensors without elements",
        "pyparallel/transfer/layout.py",
        "        if not nbytes:\n            order.append(index)\n"
        "            continue\n",
        "",
        (_SPANS + "test_empty_leaves_of_a_span_may_be_anywhere",),
    ),
    Mutation(
        "slots follow each other without a gap",
        "misaligned slots and views that keep slabs alive",
        "pyparallel/backend/_python.py",
        "-(-prod(leaf.shape) * leaf.itemsize // ALIGNMENT) * ALIGNMENT",
        "prod(leaf.shape) * leaf.itemsize",
        (
            "tests/backend/test_slab_plan.py::test_slots_are_ascending_aligned_and_disjoint",
            "tests/backend/test_slab_plan.py::test_both_backends_plan_alike",
        ),
        backend="python",
    ),
    Mutation(
        "a plan may have slots at any byte",
        "misaligned slots and views that keep slabs alive",
        "pyparallel/backend/_checks.py",
        "    if start < begin or start % ALIGNMENT:\n",
        "    if start < begin:\n",
        ("tests/backend/test_slab_errors.py",),
        backend="python",
    ),
    Mutation(
        "a plan may have slots that overlap",
        "misaligned slots and views that keep slabs alive",
        "pyparallel/backend/_checks.py",
        "    if start < begin or start % ALIGNMENT:\n",
        "    if start % ALIGNMENT:\n",
        ("tests/backend/test_slab_errors.py",),
        backend="python",
    ),
    Mutation(
        "the leaves of a span may start at any byte",
        "misaligned slots and views that keep slabs alive",
        "pyparallel/transfer/layout.py",
        "        if start < end or (start - begin) % backend.ALIGNMENT:\n",
        "        if start < end:\n",
        (_SPANS + "test_one_span_is_one_copy_and_everything_else_is_packed",),
    ),
    Mutation(
        "a span may be mostly other data",
        "misaligned slots and views that keep slabs alive",
        "pyparallel/transfer/layout.py",
        "    if length > _MOST_EXCESS * total:\n        return None\n",
        "",
        (_SPANS + "test_one_span_is_one_copy_and_everything_else_is_packed",),
    ),
    Mutation(
        "a span may end beyond its storage",
        "memory that was freed",
        "pyparallel/transfer/layout.py",
        "    if not 0 <= start <= memory.numel() - length:\n        return None\n",
        "",
        (_SPANS + "test_a_leaf_beyond_its_storage_is_an_error_and_not_read",),
    ),
    Mutation(
        "memory that was freed is read",
        "memory that was freed",
        "pyparallel/backend/plain.py",
        'have} are left" if need > have else ""',
        'have} are left" if need > have < 0 else ""',
        ("tests/backend/test_native_errors.py", "tests/backend/test_slab_errors.py"),
        backend="python",
    ),
    Mutation(
        "pinned results have no limit",
        "pinned memory without a limit",
        "pyparallel/transfer/pinned_results.py",
        "            fits = in_use + nbytes <= self.limit\n",
        "            fits = in_use >= 0\n",
        (_HOST_SLABS + "test_beyond_the_limit_results_are_in_pageable_memory",),
    ),
    Mutation(
        "the count of results deadlocks in a signal handler",
        "locks held while waiting",
        "pyparallel/transfer/pinned_results.py",
        "        self._lock = threading.RLock()  # a handler",
        "        self._lock = threading.Lock()  # a handler",
        (_HOST_SLABS + "test_a_signal_handler_may_query_while_slabs_are_counted",),
        limit=25.0,
    ),
    Mutation(
        "results do not count while they are allocated",
        "pinned memory without a limit",
        "pyparallel/transfer/pinned_results.py",
        "                self._nbytes += nbytes\n        if not fits:\n",
        "                pass\n        if not fits:\n",
        (_HOST_SLABS + "test_threads_that_allocate_at_a_time_stay_within_the_limit",),
    ),
    Mutation(
        "results in pageable memory are not kept alive",
        "sources that change or are freed",
        "pyparallel/transfer/from_device.py",
        "        held = [slab] if is_pinned else [slab, self._host]\n",
        "        held = [slab] if is_pinned else [slab]\n",
        (_HOST_SLABS + "test_pageable_results_are_kept_alive_until_they_are_written",),
    ),
    Mutation(
        "a forked child counts its parent's results",
        "locks and threads across a fork",
        "pyparallel/transfer/pinned_results.py",
        "os.register_at_fork(after_in_child=host_slabs.forget)\n",
        "",
        (_HOST_SLABS + "test_a_forked_child_starts_empty_and_waits_for_no_lock",),
        limit=25.0,
    ),
)
