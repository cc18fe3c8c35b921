"""Processes: rings between them, forks, workers that die, and what crosses."""

from __future__ import annotations

from tests.mutations.entry import Mutation

_RING = "tests/shm/test_ring.py::"
_HEADER = "tests/backend/test_ring_header.py::"
_LOADER = "tests/loader/test_loader_ring.py::"
_FAULTS = "tests/loader/test_loader_faults.py::"
_ON_ERROR = "tests/loader/test_on_error.py::"
_PREFETCH = "tests/prefetch/test_prefetch_faults.py::"
_PIPE = "tests/loader/test_worker_monitor.py::"

MUTATIONS = (
    Mutation(
        "a slab is claimed while another process holds it",
        "slabs whose holder has died or changed",
        "pyparallel/shm/ring.py",
        "        if not backend.ring_pass(self.header, slab, holder, PARENT):\n",
        "        backend.ring_pass(self.header, slab, holder, PARENT)\n"
        "        if False:\n",
        (_RING + "test_a_slab_that_is_not_the_workers_is_not_adopted",),
    ),
    Mutation(
        "slabs of dead workers are not reclaimed",
        "slabs whose holder has died or changed",
        "pyparallel/loader/_iterators.py",
        "                ring.reclaim(self._first_holder + i)\n",
        "                pass\n",
        (_FAULTS + "test_a_worker_that_dies_with_a_slab",),
    ),
    Mutation(
        "a worker waits for a full ring",
        "slabs whose holder has died or changed",
        "pyparallel/shm/ring.py",
        "        if slab < 0:\n            return None\n",
        "        while slab < 0:\n"
        "            slab = backend.ring_claim(self.header, holder, self.fd)\n",
        (_RING + "test_a_full_ring_is_a_miss_that_knows_its_size",),
        limit=25.0,
    ),
    Mutation(
        "a tensor that a worker keeps is overwritten",
        "slabs whose holder has died or changed",
        "pyparallel/shm/ring.py",
        "        if self._owner() is not None:  # a tensor is alive, perhaps in a gap\n"
        "            return False\n",
        "",
        (_RING + "test_a_tensor_that_a_worker_keeps_is_not_overwritten",),
    ),
    Mutation(
        "a slab is free while the worker has a tensor in it",
        "slabs whose holder has died or changed",
        "pyparallel/shm/ring.py",
        "        if owner is None:\n            self._ring.release",
        "        if True:\n            self._ring.release",
        (
            _RING + "test_a_tensor_that_a_worker_keeps_is_not_overwritten",
            _RING + "test_an_error_in_a_collate_function_frees_its_slab",
        ),
    ),
    Mutation(
        "an error in a collate function leaks a slab",
        "slabs whose holder has died or changed",
        "pyparallel/loader/_worker.py",
        "            if slab is not None:\n                slab.release()\n"
        "            raise\n",
        "            raise\n",
        (_RING + "test_an_error_in_a_collate_function_frees_its_slab",),
    ),
    Mutation(
        "a batch outside the ring keeps a slab",
        "slabs whose holder has died or changed",
        "pyparallel/loader/_worker.py",
        "            if slab is not None and not message.is_in_ring:\n"
        "                slab.release()\n",
        "",
        (
            _RING + "test_without_memory_for_a_slab_a_batch_uses_other_memory",
            _LOADER + "test_a_batch_too_large_for_a_slab_warns_with_advice",
        ),
    ),
    Mutation(
        "a signal while a batch is freed leaks its slab",
        "slabs whose holder has died or changed",
        "pyparallel/shm/ring.py",
        "            if self.holders()[slab] == PARENT:\n",
        "            if False:\n",
        (_RING + "test_a_signal_while_a_batch_is_dropped_does_not_cost_its_slab",),
    ),
    Mutation(
        "a forked child frees its parent's slabs",
        "slabs whose holder has died or changed",
        "pyparallel/shm/ring.py",
        "        if not self.created_here:\n"
        "            return  # the tensor was of a forked copy\n",
        "",
        (_LOADER + "test_a_child_that_drops_its_copies_frees_nothing",),
    ),
    Mutation(
        "a forked child uses its parent's ring",
        "locks and threads across a fork",
        "pyparallel/loader/_batch_receiver.py",
        "        if self.ring is None or not self.ring.created_here:\n",
        "        if self.ring is None:\n",
        (_LOADER + "test_a_forked_child_has_workers_and_a_ring_of_its_own",),
    ),
    Mutation(
        "gaps contain bytes of an earlier batch",
        "bytes of an earlier batch",
        "pyparallel/shm/ring.py",
        "                memory[first:last].zero_()\n",
        "                pass\n",
        (_RING + "test_no_byte_of_an_earlier_batch_can_be_reached",),
    ),
    Mutation(
        "gaps between slots are not written",
        "bytes of an earlier batch",
        "csrc/core/pack.h",
        "        writer.zero(dst + at, next - at);\n",
        "",
        ("tests/csrc/core/test_pack.cpp::test_a_lone_lane_writes_a_leaf_or_zero",),
        sanitize="address,undefined",
    ),
    Mutation(
        "memory of a slab is written before it is reserved",
        "shared memory that is short or remains",
        "pyparallel/shm/ring.py",
        "            memfd.reserve(self.fd, self.slab_offset(slab), size)\n",
        "            pass\n",
        (_RING + "test_without_memory_for_a_slab_a_batch_uses_other_memory",),
    ),
    Mutation(
        "memory outside the ring is written before it is reserved",
        "shared memory that is short or remains",
        "pyparallel/shm/memfd.py",
        "            reserve(self._fd, 0, nbytes)\n",
        "",
        (_RING + "test_without_any_memory_the_error_names_the_fix",),
    ),
    Mutation(
        "a ring without memory keeps its descriptor",
        "shared memory that is short or remains",
        "pyparallel/shm/memfd.py",
        "    except OSError:\n        os.close(fd)\n        raise\n",
        "    except OSError:\n        raise\n",
        (_RING + "test_a_ring_that_gets_no_memory_leaves_nothing",),
    ),
    Mutation(
        "programs that a worker starts inherit the ring",
        "shared memory that is short or remains",
        "pyparallel/shm/memfd.py",
        'os.memfd_create("pyparallel", os.MFD_CLOEXEC)',
        'os.memfd_create("pyparallel", 0)',
        (_RING + "test_a_program_that_is_started_inherits_no_ring",),
    ),
    Mutation(
        "the memory of a ring is private",
        "pinned private memory across a fork",
        "pyparallel/shm/ring.py",
        "mmap.mmap(fd, total_nbytes(num_slabs, slab_nbytes))",
        "mmap.mmap(fd, total_nbytes(num_slabs, slab_nbytes), mmap.MAP_PRIVATE)",
        (
            _HEADER + "test_processes_share_a_ring_and_one_is_killed",
            _LOADER + "test_slabs_are_free_when_the_last_view_dies",
        ),
    ),
    Mutation(
        "the worker keeps the descriptor of a batch that was sent",
        "a descriptor for each tensor",
        "pyparallel/shm/memfd.py",
        "        os.close(self._fd)\n        del self.bytes\n",
        "        del self.bytes\n",
        (
            "tests/shm/test_serialization.py::test_fresh_memory_keeps_no_descriptor_on_either_side",
        ),
    ),
    Mutation(
        "the parent keeps the descriptor of a batch that arrived",
        "a descriptor for each tensor",
        "pyparallel/shm/memfd.py",
        "    finally:\n        os.close(fd)\n",
        "    finally:\n        pass\n",
        (
            "tests/shm/test_serialization.py::test_fresh_memory_keeps_no_descriptor_on_either_side",
        ),
    ),
    Mutation(
        "pure Python claims slabs without a lock",
        "slabs whose holder has died or changed",
        "pyparallel/backend/_python_ring.py",
        "            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "            return True\n",
        "            return True\n",
        (_HEADER + "test_a_claim_does_not_wait_for_a_stopped_process",),
        backend="python",
    ),
    Mutation(
        "a claim of pure Python waits for ever",
        "waits without an end",
        "pyparallel/backend/_python_ring.py",
        "            if time.monotonic() > deadline:\n                return False\n",
        "            pass\n",
        (_HEADER + "test_a_claim_does_not_wait_for_a_stopped_process",),
        backend="python",
        limit=25.0,
    ),
    Mutation(
        "a child that was forked during a claim inherits the lock",
        "locks and threads across a fork",
        "pyparallel/backend/_python_ring.py",
        "    os.register_at_fork(after_in_child=_renew_mutex)\n",
        "    pass\n",
        (_HEADER + "test_a_child_that_was_forked_in_a_claim_can_claim",),
        backend="python",
        limit=25.0,
    ),
    Mutation(
        "any bytes are accepted as the header of a ring",
        "numbers from other processes",
        "pyparallel/backend/_python_ring.py",
        "        if words[:2] == [_MAGIC, num_slots] and words[2] in (_NATIVE, "
        "_PYTHON):\n",
        "        if True:\n",
        ("tests/backend/test_ring_errors.py",),
        backend="python",
    ),
    Mutation(
        "the reader waits for the rest of a message after its writer died",
        "waits without an end",
        "pyparallel/loader/worker_monitor.py",
        "            was_lost = timeout > 0 and self.is_lost()",
        "            was_lost = timeout > 0 and False",
        (_PIPE + "test_an_incomplete_message_of_a_dead_worker_is_no_message",),
        limit=25.0,
    ),
    Mutation(
        "the reader waits for the lock of a dead worker",
        "waits without an end",
        "pyparallel/loader/worker_monitor.py",
        "        if self._lock.acquire(True, GRACE if has_lost else _LOCK_SECONDS):\n",
        "        if self._lock.acquire(True):\n",
        (
            _PREFETCH
            + "test_a_worker_killed_with_the_shared_lock_is_named_without_a_wait",
        ),
        limit=30.0,
    ),
    Mutation(
        "`close` waits for a batch of workers",
        "waits without an end",
        "pyparallel/loader/worker_monitor.py",
        "            if stopped():\n                raise Stopped\n",
        "",
        (
            "tests/prefetch/test_prefetch_ends.py::test_close_waits_for_no_batch_and_keeps_persistent_workers",
        ),
        limit=80.0,
    ),
    Mutation(
        "dead workers are not detected while the thread hangs",
        "waits without an end",
        "pyparallel/prefetch/_thread.py",
        "        if watched and not self.items and not self.finished:\n"
        "            self._check_workers()\n",
        "",
        (_PREFETCH + "test_the_consumer_finds_the_dead_when_the_thread_hangs",),
        limit=30.0,
    ),
    Mutation(
        "torch raises the death of a worker in the main thread",
        "errors in the wrong place",
        "pyparallel/loader/worker_monitor.py",
        "        forget_workers(source)\n",
        "        pass\n",
        (
            "tests/prefetch/test_prefetch_ends.py::test_a_worker_death_is_raised_by_next_and_not_within_a_step",
        ),
        limit=30.0,
    ),
    Mutation(
        "an error that cannot be pickled never arrives",
        "errors and tensors that cannot be pickled",
        "pyparallel/loader/_worker.py",
        "        ForkingPickler.dumps(wrapper)\n",
        "        pass\n",
        (_FAULTS + "test_errors_arrive_and_the_epoch_continues",),
        limit=30.0,
    ),
    Mutation(
        "a tensor with a graph is sent",
        "errors and tensors that cannot be pickled",
        "pyparallel/shm/serialization.py",
        "        if tensor.requires_grad and not tensor.is_leaf:\n",
        "        if False:\n",
        ("tests/loader/test_loader_kinds.py::test_a_tensor_with_a_graph_is_refused",),
        limit=30.0,
    ),
    Mutation(
        "a serialized batch is unpickled without its tensors",
        "errors and tensors that cannot be pickled",
        "pyparallel/shm/serialization.py",
        "    raise pickle.UnpicklingError(\n",
        "    return torch.empty(0)\n    raise pickle.UnpicklingError(\n",
        (
            "tests/shm/test_serialization.py::test_a_message_is_deserialized_once_and_only_with_its_tensors",
        ),
    ),
    Mutation(
        "a query initializes the device",
        "devices in workers",
        "pyparallel/loader/preflight.py",
        '    ask = getattr(torch.get_device_module(found), "is_initialized", None)\n',
        '    ask = getattr(torch.get_device_module(found), "is_available", None)\n',
        (
            "tests/loader/test_preflight.py::test_the_device_is_queried_but_not_initialized",
        ),
    ),
    Mutation(
        "the thread allocates the first pinned block of the process",
        "devices in workers",
        "pyparallel/prefetch/_thread.py",
        "        self.options.device_stage.prepare()\n",
        "",
        (
            "tests/prefetch/test_prefetch_device.py::"
            "test_streams_and_pinned_memory_are_first_used_by_the_consumer",
        ),
    ),
    Mutation(
        "a forked child queues copies of its parent's engine",
        "devices in workers",
        "csrc/transfer/events.cpp",
        "  if (!forked()) return;\n  throw",
        "  if (this != nullptr) return;\n  throw",
        (
            "tests/csrc/transfer/test_transfer_errors.cpp::test_a_forked_child_is_refused",
        ),
        sanitize="address,undefined",
    ),
    Mutation(
        "a broken connection hides the death of a worker",
        "slabs whose holder has died or changed",
        "pyparallel/loader/_iterators.py",
        "                worker_monitor.ExplainedErrors(self),\n            ):",
        "            ):",
        (_FAULTS + "test_a_connection_that_a_dead_worker_broke_is_its_death",),
    ),
    Mutation(
        "a batch without a good sample is empty",
        "samples lost or used twice",
        "pyparallel/loader/sample_errors.py",
        "        if not samples and index is not None:\n"
        "            samples.append(self._replace(task, index, read_one))\n",
        "",
        (_ON_ERROR + "test_a_batch_without_a_good_sample_has_a_replacement",),
    ),
    Mutation(
        "errors of the machine are skipped",
        "samples lost or used twice",
        "pyparallel/loader/sample_errors.py",
        "    return isinstance(error, _FATAL) or is_death_report(error)\n",
        "    return is_death_report(error)\n",
        (_ON_ERROR + "test_errors_of_the_machine_and_the_program_are_raised",),
    ),
    Mutation(
        "the death of a worker is skipped",
        "samples lost or used twice",
        "pyparallel/loader/sample_errors.py",
        "    return isinstance(error, _FATAL) or is_death_report(error)\n",
        "    return isinstance(error, _FATAL)\n",
        (_ON_ERROR + "test_the_death_of_a_worker_of_the_dataset_is_raised",),
    ),
    Mutation(
        "errors of replayed samples are counted again",
        "samples lost or used twice",
        "pyparallel/loader/_dataset_state.py",
        "        samples = self._open()\n        self._discard_failures()\n",
        "        samples = self._open()\n",
        (_ON_ERROR + "test_a_resumed_stream_counts_no_error_twice",),
    ),
    Mutation(
        "another number of ranks continues at its own position",
        "samples lost or used twice",
        "pyparallel/loader/_progress.py",
        "            self.order = Order(sampler_of(self._sampler, now))\n",
        "            self.order = Order(self._sampler)\n"
        "            self.order.skip(num_delivered)\n",
        (
            "tests/loader/test_state_dict_ranks.py::"
            "test_unused_samples_are_dealt_again_each_once",
        ),
    ),
)
