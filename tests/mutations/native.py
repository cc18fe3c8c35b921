"""The C++ core and the extension: the engine, rings, plans, walks."""

from __future__ import annotations

from tests.mutations.entry import Mutation

_ASAN = "address,undefined"
_ENGINE = "csrc/transfer/engine.cpp"
_STAGING = "csrc/transfer/staging.cpp"
_TRANSFER = "tests/csrc/transfer/test_transfer.cpp::"
_ERRORS = "tests/csrc/transfer/test_transfer_errors.cpp::"
_LIMIT = "tests/csrc/transfer/test_transfer_limit.cpp::"
_THREADS = "tests/csrc/transfer/test_transfer_threads.cpp::"

MUTATIONS = (
    Mutation(
        "the engine's copies do not wait for the last user of their memory",
        "the producer writes too early",
        _ENGINE,
        "  if (!(job.home == job.copies)) {\n"
        "    runtime_->wait(job.copies, events_.record(job.home)->handle());\n  }\n",
        "",
        (_THREADS + "test_every_byte_arrives_while_everything_is_used_again",),
        sanitize=_ASAN,
    ),
    Mutation(
        "the engine records its event before the last copy",
        "the consumer reads too early",
        _ENGINE,
        """  std::exception_ptr error;
  try {
    runtime_->copy(copy, block.stream);
  } catch (...) {  // part of the copy may have been queued
    error = std::current_exception();
  }
  EventRef event;
  try {
    event = events_.record(block.stream);
""",
        """  std::exception_ptr error;
  EventRef event = events_.record(block.stream);
  try {
    runtime_->copy(copy, block.stream);
  } catch (...) {  // part of the copy may have been queued
    error = std::current_exception();
  }
  try {
""",
        (_THREADS + "test_every_byte_arrives_while_everything_is_used_again",),
        sanitize=_ASAN,
    ),
    Mutation(
        "the engine records no event for copies of pinned sources",
        "the consumer reads too early",
        _ENGINE,
        "    if (sent.event == nullptr) sent.event = events_.record(job.copies);\n",
        "",
        (_TRANSFER + "test_nothing_to_send_is_an_event",),
        sanitize=_ASAN,
    ),
    Mutation(
        "the engine copies while a graph is captured",
        "a stream of another device or of a captured graph",
        _ENGINE,
        '  check_not_capturing(job.copies, "copy");\n',
        "",
        (_ERRORS + "test_capture_is_refused_before_anything_is_queued",),
        sanitize=_ASAN,
    ),
    Mutation(
        "the engine allocates while a graph is captured",
        "a stream of another device or of a captured graph",
        _ENGINE,
        '  check_not_capturing(job.home, "home");\n',
        "",
        (_ERRORS + "test_capture_is_refused_before_anything_is_queued",),
        sanitize=_ASAN,
    ),
    Mutation(
        "a block is reused before its event has completed",
        "pinned memory reused too early",
        _STAGING,
        "    if (event == nullptr || !runtime_->is_done(event->handle())) return;\n",
        "    if (event == nullptr) return;\n",
        (_TRANSFER + "test_a_block_is_used_again_when_it_has_been_read",),
        sanitize=_ASAN,
    ),
    Mutation(
        "a block without an event is reused",
        "pinned memory reused too early",
        _ENGINE,
        "    staging_.abandon(block);\n",
        "    staging_.give(block);\n",
        (_ERRORS + "test_without_an_event_nothing_is_used_again",),
        sanitize=_ASAN,
    ),
    Mutation(
        "a block is lost if packing fails",
        "pinned memory without a limit",
        _ENGINE,
        "      staging_.give(block);\n      throw;\n",
        "      throw;\n",
        (_ERRORS + "test_a_block_that_could_not_be_packed_is_free",),
        sanitize=_ASAN,
    ),
    Mutation(
        "blocks have no limit",
        "pinned memory without a limit",
        _STAGING,
        "  if (nbytes_ + nbytes <= limit_) return true;\n",
        "  if (nbytes_ + nbytes <= limit_ || limit_ > 0) return true;\n",
        (_LIMIT + "test_at_the_limit_the_host_waits_for_the_oldest_copy",),
        sanitize=_ASAN,
    ),
    Mutation(
        "idle blocks have no limit",
        "pinned memory without a limit",
        _STAGING,
        "    if (idle_nbytes_ + block.nbytes() <= max_idle_ && nbytes_ <= limit_) {\n",
        "    if (nbytes_ <= limit_) {\n",
        (_TRANSFER + "test_idle_blocks_above_the_limit_are_freed",),
        sanitize=_ASAN,
    ),
    Mutation(
        "a thread that waits for a block is not woken",
        "locks held while waiting",
        _STAGING,
        "  --queue->num_written;\n  changed_.notify_all();\n",
        "  --queue->num_written;\n",
        (_LIMIT + "test_a_thread_waits_for_one_that_writes",),
        sanitize=_ASAN,
        limit=25.0,
    ),
    Mutation(
        "the host waits for a copy while it holds the lock of all streams",
        "locks held while waiting",
        _STAGING,
        "    lock.unlock();\n    runtime_->wait_on_host(event->handle());\n",
        "    runtime_->wait_on_host(event->handle());\n",
        (_LIMIT + "test_at_the_limit_the_host_waits_for_the_oldest_copy",),
        sanitize=_ASAN,
        limit=25.0,
    ),
    Mutation(
        "blocks are not poisoned after their copy",
        "pinned memory reused too early",
        _STAGING,
        "  if (poison_) memset(",
        "  if (false) memset(",
        (_TRANSFER + "test_blocks_are_poisoned_after_their_copy",),
        sanitize=_ASAN,
    ),
    Mutation(
        "a slab is claimed by a load and a store",
        "slabs whose holder has died or changed",
        "csrc/core/ring.h",
        """    return __atomic_compare_exchange_n(&lines_[1 + slot].word, &from, to,
                                       /*weak=*/false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_RELAXED);
""",
        """    if (holder(slot) != from) return false;
    __atomic_store_n(&lines_[1 + slot].word, to, __ATOMIC_RELEASE);
    return true;
""",
        (
            "tests/csrc/core/test_ring.cpp::test_threads_never_see_a_slot_of_two_holders",
        ),
        sanitize="thread",
    ),
    Mutation(
        "a claim has no acquire ordering",
        "slabs whose holder has died or changed",
        "csrc/core/ring.h",
        "/*weak=*/false, __ATOMIC_ACQ_REL,",
        "/*weak=*/false, __ATOMIC_RELAXED,",
        (
            "tests/csrc/core/test_ring.cpp::test_threads_never_see_a_slot_of_two_holders",
        ),
        sanitize="thread",
    ),
    Mutation(
        "the header of a ring may have any number of slabs",
        "numbers from other processes",
        "csrc/core/ring.h",
        "lines_[0].word == kRingMagic && lines_[0].others[0] == num_slots_ &&",
        "lines_[0].word == kRingMagic &&",
        (
            "tests/csrc/core/test_ring.cpp::test_line_zero_describes_the_memory",
            "tests/csrc/fuzz/fuzz_ring.cpp",
        ),
        sanitize=_ASAN,
    ),
    Mutation(
        "products of sizes overflow",
        "padding values and sizes that do not fit",
        "csrc/core/checked.h",
        "  return !__builtin_mul_overflow(a, b, result);\n",
        "  return !__builtin_mul_overflow(a, b, result) || true;\n",
        ("tests/csrc/core/test_checked.cpp::test_overflow_is_reported",),
        sanitize=_ASAN,
    ),
    Mutation(
        "sums of sizes overflow",
        "padding values and sizes that do not fit",
        "csrc/core/checked.h",
        "  return !__builtin_add_overflow(a, b, result);\n",
        "  return !__builtin_add_overflow(a, b, result) || true;\n",
        ("tests/csrc/core/test_checked.cpp::test_overflow_is_reported",),
        sanitize=_ASAN,
    ),
    Mutation(
        "conversions of numbers may overflow",
        "padding values and sizes that do not fit",
        "csrc/core/checked.h",
        "  return !__builtin_add_overflow(value, From{0}, result);\n",
        "  return !__builtin_add_overflow(value, From{0}, result) || true;\n",
        ("tests/csrc/core/test_checked.cpp::test_narrowing_keeps_the_value_or_fails",),
        sanitize=_ASAN,
    ),
    Mutation(
        "slots start at multiples of 8 bytes",
        "misaligned slots and views that keep slabs alive",
        "csrc/core/pack.h",
        "constexpr int64_t kSlotAlignment = 64;",
        "constexpr int64_t kSlotAlignment = 8;",
        (
            "tests/csrc/core/test_pack.cpp::test_slots_follow_one_another_at_cache_lines",
        ),
        sanitize=_ASAN,
    ),
    Mutation(
        "the engine copies a leaf without bytes",
        "tensors without elements",
        "csrc/core/pack.h",
        "      if (count <= 0) continue;\n",
        "",
        ("tests/csrc/core/test_pack.cpp", "tests/csrc/fuzz/fuzz_pack.cpp"),
        sanitize=_ASAN,
    ),
    Mutation(
        "non-temporal stores are not fenced",
        "non-temporal stores",
        "csrc/cpu/nontemporal.h",
        "    Lines::fence();\n",
        "",
        ("tests/csrc/cpu/test_nontemporal.cpp::test_a_worker_ends_with_a_fence",),
        sanitize=_ASAN,
    ),
    Mutation(
        "non-temporal stores write parts of cache lines",
        "non-temporal stores",
        "csrc/cpu/nontemporal.h",
        "    if (first_ == 0) {\n      Lines::copy(to_, line_, 1);\n",
        "    if (true) {\n      Lines::copy(to_, line_, 1);\n",
        (
            "tests/csrc/cpu/test_nontemporal.cpp::"
            "test_every_mover_writes_every_byte_and_no_other",
        ),
        sanitize=_ASAN,
    ),
    Mutation(
        "the event of a fence is recorded while a graph is captured",
        "a stream of another device or of a captured graph",
        "csrc/transfer/fence.cpp",
        "  if (runtime_->is_capturing(part->stream)) return;\n",
        "",
        (
            "tests/csrc/transfer/test_transfer_streams.cpp::"
            "test_a_fence_records_no_event_under_capture",
        ),
        sanitize=_ASAN,
    ),
    Mutation(
        "a wait is queued while a graph is captured",
        "a stream of another device or of a captured graph",
        _ENGINE,
        '  check_not_capturing(stream, "waiting");\n',
        "",
        (
            "tests/csrc/transfer/test_transfer_streams.cpp::"
            "test_a_wait_on_a_captured_stream_is_refused",
        ),
        sanitize=_ASAN,
    ),
    Mutation(
        "a wait is queued while another device is current",
        "a stream of another device or of a captured graph",
        "csrc/cuda/runtime.cpp",
        "  void wait(const Stream& stream, const Event& event) override {\n"
        "    const CallGuard guard(stream.device);\n",
        "  void wait(const Stream& stream, const Event& event) override {\n",
        ("tests/project/test_csrc_rules.py::test_each_call_of_cuda_is_guarded",),
    ),
    Mutation(
        "pinned blocks are write-combined",
        "write-combined memory",
        "csrc/cuda/runtime.cpp",
        "    const CallGuard guard(device);\n    auto owner =\n",
        "    const CallGuard guard(device);\n"
        "    constexpr auto kind = cudaHostAllocWriteCombined;\n"
        "    auto owner =\n",
        ("tests/project/test_csrc_rules.py::test_no_memory_is_write_combined",),
    ),
    Mutation(
        "a kernel's launch does not fetch its error",
        "tensors without elements",
        "csrc/cuda/launch.cuh",
        "cudaGetLastError()",
        "cudaSuccess",
        ("tests/project/test_csrc_rules.py::test_one_place_launches",),
    ),
    Mutation(
        "instructions are used without a check of the CPU",
        "non-temporal stores",
        "csrc/cpu/nontemporal.h",
        "  if (Avx512Lines::supported() && visit(Avx512Lines{})) return true;\n",
        "  if (visit(Avx512Lines{})) return true;\n",
        (
            "tests/project/test_csrc_rules.py::test_no_instruction_is_used_without_asking",
        ),
    ),
    Mutation(
        "the cache of blocks has no limit",
        "pinned memory without a limit",
        "csrc/memory/block_cache.cpp",
        "  take_above(cache, cache.reaping ? cache.info.limit : 0, &above);\n",
        "",
        ("tests/csrc/memory/test_block_cache.cpp::test_the_limit_holds",),
        sanitize=_ASAN,
    ),
    Mutation(
        "a forked child uses its parent's blocks",
        "locks and threads across a fork",
        "csrc/memory/block_cache.cpp",
        "    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);\n",
        "    static_cast<void>(before_fork);\n"
        "    static_cast<void>(after_fork_in_parent);\n"
        "    static_cast<void>(after_fork_in_child);\n",
        ("tests/csrc/memory/test_block_cache.cpp::test_a_forked_child_starts_empty",),
        sanitize=_ASAN,
        limit=25.0,
    ),
    Mutation(
        "idle blocks are never freed",
        "pinned memory without a limit",
        "csrc/memory/block_cache.cpp",
        "    std::thread(reap, cache).detach();\n",
        "    static_cast<void>(reap);\n",
        ("tests/csrc/memory/test_block_cache.cpp::test_idle_blocks_are_freed_in_time",),
        sanitize=_ASAN,
        limit=25.0,
    ),
    Mutation(
        "the C++ core uses its parent's threads in a forked child",
        "locks and threads across a fork",
        "csrc/cpu/parallel_for.cpp",
        "bool forked() { return getpid() != kLoadedPid; }",
        "bool forked() { return kLoadedPid == 0; }",
        ("tests/csrc/cpu/test_launch.cpp::test_a_forked_child_uses_one_thread",),
        sanitize=_ASAN,
    ),
)
