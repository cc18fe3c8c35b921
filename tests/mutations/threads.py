"""Threads: errors, ends, modes, and waits on the host."""

from __future__ import annotations

from tests.mutations.entry import Mutation

_FAULTS = "tests/prefetch/test_prefetch_faults.py::"
_ENDS = "tests/prefetch/test_prefetch_ends.py::"
_PRE = "tests/prefetch/test_pre_data_loader.py::"
_MODES = "tests/parallel/test_parallel_apply_modes.py::"
_ERRORS = "tests/parallel/test_parallel_apply_errors.py::"
_THREADS = "tests/parallel/test_parallel_apply_threads.py::"

MUTATIONS = (
    Mutation(
        "an error looks like the end of the data",
        "errors in the wrong place",
        "pyparallel/prefetch/_thread.py",
        "        prefetch_thread.put(QueueItem(error=explained))\n",
        "        prefetch_thread.put(QueueItem())\n",
        (
            _FAULTS + "test_an_error_arrives_in_the_place_of_its_batch_and_ends_the_"
            "iterator",
        ),
        limit=30.0,
    ),
    Mutation(
        "only an Exception reaches the consumer",
        "errors in the wrong place",
        "pyparallel/prefetch/_thread.py",
        "    except BaseException as error:\n        explained",
        "    except Exception as error:\n        explained",
        (
            _FAULTS + "test_an_error_arrives_in_the_place_of_its_batch_and_ends_the_"
            "iterator",
        ),
        limit=30.0,
    ),
    Mutation(
        "StopIteration in a transform ends the data",
        "errors in the wrong place",
        "pyparallel/prefetch/_thread.py",
        "    if isinstance(error, StopIteration):\n",
        "    if False:\n",
        (_FAULTS + "test_stop_iteration_from_elsewhere_is_no_end",),
        limit=30.0,
    ),
    Mutation(
        "StopIteration in a dataset ends the data",
        "errors in the wrong place",
        "pyparallel/prefetch/_thread.py",
        "            if error := early_end_error(end, loader, num_batches):\n"
        "                raise error from end\n",
        "",
        (
            _FAULTS + "test_an_error_arrives_in_the_place_of_its_batch_and_ends_the_"
            "iterator",
        ),
        limit=30.0,
    ),
    Mutation(
        "batches follow one whose `wait` failed",
        "errors in the wrong place",
        "pyparallel/prefetch/iterator.py",
        "        except BaseException:  # the batch is lost, so no later one may "
        "follow\n            self.close()\n            raise\n",
        "        except BaseException:\n            raise\n",
        (_FAULTS + "test_a_batch_whose_wait_fails_ends_the_iterator",),
        limit=30.0,
    ),
    Mutation(
        "`next` after the end waits",
        "errors in the wrong place",
        "pyparallel/prefetch/_thread.py",
        "                if self.finished:\n                    return None\n",
        "",
        (_PRE + "test_an_ended_iterator_stays_at_its_end",),
        limit=25.0,
    ),
    Mutation(
        "a closed iterator returns batches",
        "errors in the wrong place",
        "pyparallel/prefetch/_thread.py",
        "        prefetch_thread.items.clear()\n",
        "",
        (
            _ENDS + "test_a_pass_can_be_closed_by_itself",
            _ENDS + "test_close_ends_all_iterators_and_allows_new_ones",
        ),
        limit=30.0,
    ),
    Mutation(
        "two iterators share a loader that is its own iterator",
        "errors in the wrong place",
        "pyparallel/prefetch/pre_data_loader.py",
        "        if isinstance(self.loader, Iterator) or "
        "shares_iterator(self.loader):\n            self._close_iterators()\n",
        "",
        (_PRE + "test_a_loader_that_is_its_own_iterator_has_one_iterator_at_a_time",),
        limit=30.0,
    ),
    Mutation(
        "an error keeps the loader's workers alive",
        "errors in the wrong place",
        "pyparallel/prefetch/_thread.py",
        "        worker_monitor.clear_error_frames(explained, "
        "prefetch_thread.source)\n",
        "",
        (_FAULTS + "test_a_kept_error_keeps_neither_workers_nor_batches_alive",),
        limit=90.0,
    ),
    Mutation(
        "an iterator that is freed leaves its thread",
        "waits without an end",
        "pyparallel/prefetch/iterator.py",
        "        self._stop = weakref.finalize(self, _stop_thread, prefetch_thread)\n",
        "        self._stop = weakref.finalize(owner, _stop_thread, prefetch_thread)\n",
        (_ENDS + "test_a_pass_in_a_cycle_is_collected",),
        limit=30.0,
    ),
    Mutation(
        "an iterator that ends leaves the loader's iterator open",
        "waits without an end",
        "pyparallel/prefetch/_thread.py",
        "            worker_monitor.release(\n"
        "                prefetch_thread.source, prefetch_thread.options.loader\n"
        "            )\n",
        "            pass\n",
        (_ENDS + "test_an_iterator_with_other_references_is_closed",),
        limit=30.0,
    ),
    Mutation(
        "a stop does not wake a thread that waits for space in the queue",
        "waits without an end",
        "pyparallel/prefetch/_thread.py",
        "        prefetch_thread.items.clear()\n"
        "        prefetch_thread.changed.notify_all()\n",
        "        prefetch_thread.items.clear()\n",
        (
            _ENDS + "test_a_pass_can_be_closed_by_itself",
            _ENDS + "test_close_ends_all_iterators_and_allows_new_ones",
        ),
        limit=30.0,
    ),
    Mutation(
        "a forked child waits for its parent's thread",
        "locks and threads across a fork",
        "pyparallel/prefetch/_thread.py",
        "        if os.getpid() != self.pid:\n            raise RuntimeError(\n",
        "        if False:\n            raise RuntimeError(\n",
        (_ENDS + "test_a_forked_child_gets_an_error_at_once_and_can_iterate_anew",),
        limit=30.0,
    ),
    Mutation(
        "a forked child uses its parent's thread pool",
        "locks and threads across a fork",
        "pyparallel/parallel/_thread_pool.py",
        "os.register_at_fork(after_in_child=_reset_all)\n",
        "",
        (_THREADS + "test_a_forked_child_has_threads_of_its_own",),
        limit=30.0,
    ),
    Mutation(
        "threads are not stopped at the end of the interpreter",
        "the end of the interpreter",
        "pyparallel/prefetch/_thread.py",
        "@atexit.register\ndef _stop_all",
        "def _stop_all",
        (_ENDS + "test_the_interpreter_exits_at_once_with_its_own_code",),
        limit=90.0,
    ),
    Mutation(
        "the thread is not a daemon",
        "the end of the interpreter",
        "pyparallel/prefetch/_thread.py",
        'name="pyparallel-prefetch", daemon=True',
        'name="pyparallel-prefetch", daemon=False',
        (_ENDS + "test_the_interpreter_exits_at_once_with_its_own_code",),
        limit=90.0,
    ),
    Mutation(
        "an iterator starts while the interpreter exits",
        "the end of the interpreter",
        "pyparallel/prefetch/_thread.py",
        "        if _exiting.is_set():\n",
        "        if False:\n",
        (_ENDS + "test_no_pass_starts_while_the_interpreter_exits",),
        limit=90.0,
    ),
    Mutation(
        "threads are stopped before other threads have their batches",
        "the end of the interpreter",
        "pyparallel/prefetch/_thread.py",
        "@atexit.register\ndef _stop_all",
        "@threading._register_atexit\ndef _stop_all",
        (_ENDS + "test_a_thread_that_outlives_the_main_thread_gets_all_its_batches",),
        limit=90.0,
    ),
    Mutation(
        "the end of the interpreter does not wait for jobs",
        "the end of the interpreter",
        "pyparallel/parallel/_thread_pool.py",
        "@atexit.register\ndef _close_all",
        "def _close_all",
        (
            _THREADS + "test_the_interpreter_exits_with_threads_that_wait_and_threads_"
            "that_work",
        ),
        limit=90.0,
    ),
    Mutation(
        "a destructor reacquires the GIL",
        "the end of the interpreter",
        "csrc/bindings/run.h",
        """  std::exception_ptr error;
  PyThreadState* const state = PyEval_SaveThread();
  try {
    work();
  } catch (...) {
    error = std::current_exception();
  }
  lock_again(state);
  if (error) std::rethrow_exception(error);
""",
        """  pybind11::gil_scoped_release released;
  work();
""",
        ("tests/robustness/test_thread_exit.py",),
    ),
    Mutation(
        "the dtype of autocast does not reach the thread",
        "modes of threads",
        "pyparallel/core/thread_state.py",
        "        torch.set_autocast_dtype(name, dtype)\n",
        "",
        (_MODES + "test_the_modes_of_the_caller_apply_in_its_calls_only",),
    ),
    Mutation(
        "autocast does not reach the thread",
        "modes of threads",
        "pyparallel/core/thread_state.py",
        "        torch.set_autocast_enabled(name, is_on)\n",
        "",
        (_MODES + "test_the_modes_of_the_caller_apply_in_its_calls_only",),
    ),
    Mutation(
        "the cache setting of autocast does not reach the thread",
        "modes of threads",
        "pyparallel/core/thread_state.py",
        "    torch.set_autocast_cache_enabled(state.cache)\n",
        "",
        (_MODES + "test_the_modes_of_the_caller_apply_in_its_calls_only",),
    ),
    Mutation(
        "inference mode does not reach the thread",
        "modes of threads",
        "pyparallel/core/thread_state.py",
        "        if state.inference != before.inference:\n",
        "        if False:\n",
        (_MODES + "test_the_modes_of_the_caller_apply_in_its_calls_only",),
    ),
    Mutation(
        "no_grad does not reach the thread",
        "modes of threads",
        "pyparallel/core/thread_state.py",
        "    torch.set_grad_enabled(state.grad)\n",
        "",
        (_MODES + "test_the_modes_of_the_caller_apply_in_its_calls_only",),
    ),
    Mutation(
        "the default device does not reach the thread",
        "modes of threads",
        "pyparallel/core/thread_state.py",
        "    if now.default_device != state.default_device:\n",
        "    if False:\n",
        (_MODES + "test_the_modes_of_the_caller_apply_in_its_calls_only",),
    ),
    Mutation(
        "a mode that a call changes affects the next call",
        "modes of threads",
        "pyparallel/core/thread_state.py",
        "        if capture() != state:\n",
        "        if False:\n",
        (_MODES + "test_changes_of_a_call_are_not_seen_by_others",),
    ),
    Mutation(
        "context variables do not reach the thread",
        "modes of threads",
        "pyparallel/parallel/_device_threads.py",
        "        context = contextvars.copy_context()\n",
        "        context = contextvars.Context()\n",
        (_MODES + "test_the_modes_of_the_caller_apply_in_its_calls_only",),
    ),
    Mutation(
        "two streams of a device share the cache of autocast",
        "modes of threads",
        "pyparallel/parallel/_device_threads.py",
        "            state = state._replace(cache=False)\n",
        "            pass\n",
        (
            "tests/parallel/test_parallel_apply_streams.py::test_casts_are_cached_unless_two_"
            "streams_of_one_device_would_share_them",
        ),
    ),
    Mutation(
        "the loading thread does not get the caller's modes",
        "modes of threads",
        "pyparallel/prefetch/_thread.py",
        "        with thread_state.applied(prefetch_thread.state):\n",
        "        if True:\n",
        (_PRE + "test_the_thread_has_the_modes_of_the_call_of_iter",),
    ),
    Mutation(
        "every job computes with all cores",
        "threads inside of operators",
        "pyparallel/parallel/_device_threads.py",
        "        num_threads = self._host_threads if device == HOST else "
        "self._num_threads\n",
        "        num_threads = self._num_threads\n",
        (
            "tests/parallel/test_parallel_apply.py::"
            "test_jobs_on_the_host_share_the_threads_of_their_caller",
        ),
    ),
    Mutation(
        "the caller keeps the number of threads of a job",
        "threads inside of operators",
        "pyparallel/parallel/_device_threads.py",
        "            torch.set_num_threads(self._num_threads)\n",
        "            pass\n",
        (
            "tests/parallel/test_parallel_apply.py::"
            "test_jobs_on_the_host_share_the_threads_of_their_caller",
            "tests/parallel/test_parallel_apply_caller.py::test_the_caller_has_the_number_of_operator_threads_of_the_others",
        ),
    ),
    Mutation(
        "the first error in time is raised, not the first by item",
        "errors in the wrong place",
        "pyparallel/parallel/_device_threads.py",
        "            if number < self.first:\n",
        "            if self.error is None:\n",
        (_ERRORS + "test_the_first_error_by_item_is_raised_whichever_comes_first",),
    ),
    Mutation(
        "a failed call is kept alive by its own traceback",
        "errors in the wrong place",
        "pyparallel/parallel/_device_threads.py",
        "        failure.error = None  # its traceback refers to this frame\n",
        "        pass\n",
        (_THREADS + "test_nothing_of_a_failed_call_is_kept_alive",),
    ),
    Mutation(
        "calls begin after an interrupt",
        "errors in the wrong place",
        "pyparallel/parallel/_thread_pool.py",
        "            cancel()\n            for worker",
        "            for worker",
        (
            _THREADS + "test_an_interrupt_waits_for_running_calls",
            _THREADS + "test_an_interrupt_withdraws_items_that_were_not_submitted",
            "tests/parallel/test_parallel_apply_caller.py::"
            "test_ctrl_c_in_the_callers_part_ends_the_call",
        ),
        limit=30.0,
    ),
)
