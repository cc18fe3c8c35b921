"""Samplers: batches of samples of similar sizes, and evaluation on several ranks.

`distributed_eval_sampler` gives each sample to exactly one rank. `size_batch_sampler`
plans batches of similar sizes, so that they need little padding. `size_batcher` does
the same for streams: it reads windows of samples.

`ranks` looks up the ranks of a sampler, and `_loaders` checks its loader.
`_measure` evaluates a function for the sizes, and caches them in a file.
`planner` checks the sizes and makes the plan of an epoch, which is equal on all ranks:

1. Let samples of similar sizes share a place, if there are too many (`places`).
2. Shuffle the places, and divide windows of them into batches (`_division`).
3. Combine batches of similar cost into steps, one batch for each rank.

`report` compares a plan with random batches. This folder needs NumPy, so other folders
import its modules with that in mind: only the three classes can be imported without.
"""

__all__ = [
    "distributed_eval_sampler",
    "places",
    "planner",
    "ranks",
    "report",
    "size_batch_sampler",
    "size_batcher",
]
