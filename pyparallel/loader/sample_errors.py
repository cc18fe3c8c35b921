"""Skip or replace samples that raise an error: ``on_error`` of a loader.

`ErrorPolicy` runs where the dataset is read. It records each error as a `Failure`,
which reaches the parent with the batch. The parent counts the failures of an epoch.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    SubsetRandomSampler,
    get_worker_info,
)

from ..core.errors import (
    BatchTypeError,
    BatchValueError,
    ErrorLimitError,
    LoaderWarning,
    check_int,
    type_name,
    warn_once,
)
from ..core.torch_private import ExceptionWrapper, in_worker_thread
from ._random_state import IndexKindError, SampleTask, sample_key
from .arguments import Loader
from .errors import is_death_report, worker_text, wrap_exception
from .tracebacks import format_indices, message_of, rank_text

#: Takes the place of the samples of a batch if no sample could be read or replaced.
#: The batch is left out.
NO_SAMPLES: Any = object()
#: Errors of the machine or of the program, which no other sample avoids. The first one
#: is no end of the data: only a sampler ends an epoch.
_FATAL = (
    StopIteration,
    *(MemoryError, torch.OutOfMemoryError),
    *(ImportError, NameError, SyntaxError, SystemError, IndexKindError),
)
#: Marks a sample that raised.
_FAILED = object()
#: The most characters of an error's text in a `SampleError`.
_MAX_TEXT = 500


class SampleError(NamedTuple):
    """A sample that raised an error, and was skipped or replaced.

    Attributes:
        index: the index of the sample: an integer, a string, or a list of these. Any
            other index is described by a text. For an iterable dataset: its number
            among the samples that its process has read in this epoch.
        error: the class and the message of the error.
    """

    index: Any
    error: str


class Failure(NamedTuple):
    """An error of a sample, on its way to the parent.

    Attributes:
        error: the public description.
        cause: the exception, in a form that pickles if a worker raised it.
    """

    error: SampleError
    cause: Exception | ExceptionWrapper


def check_policy(loader: Loader) -> None:
    """Raise an error if the arguments of a loader do not fit its ``on_error``."""
    mode, dataset = loader.on_error, loader.dataset
    if mode not in ("raise", "skip", "replace"):
        raise BatchValueError(
            "DataLoader: on_error must be 'raise', 'skip' or 'replace', but is "
            f"{mode!r}."
        )
    check_int(loader.max_errors, 0, "DataLoader: max_errors")
    if mode == "raise":
        return
    if isinstance(dataset, IterDataPipe | MapDataPipe):
        raise BatchTypeError(
            f"DataLoader: with on_error={mode!r} dataset must be a Dataset or an "
            "IterableDataset, but is a DataPipe, which torch's own iterator reads. "
            "Wrap it in an IterableDataset."
        )
    if isinstance(dataset, IterableDataset):
        if mode == "skip" and inspect.isgeneratorfunction(type(dataset).__iter__):
            raise _generator_error(f"of {type_name(dataset)} is one")
    if mode == "replace":
        if isinstance(dataset, IterableDataset) or _length(dataset) is None:
            raise BatchTypeError(
                "DataLoader: with on_error='replace' dataset must be map-style and "
                f"have a length, but is {type_name(dataset)}. Use on_error='skip'."
            )
        if _draws_from_subset(loader):
            raise BatchValueError(
                "DataLoader: with on_error='replace' sampler must draw from the whole "
                "dataset, as replacements do, but is a SubsetRandomSampler. Use "
                "Subset(dataset, indices) with shuffle=True."
            )


def _length(dataset: Any) -> int | None:
    """Return the length of a dataset, None if it has none."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _draws_from_subset(loader: Loader) -> bool:
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(isinstance(sampler, SubsetRandomSampler) for sampler in samplers)


class ErrorPolicy:
    """Reads samples, and skips or replaces those that raise an error."""

    def __init__(self, loader: Loader) -> None:
        #: The errors that have not been sent to the parent.
        self.failures: list[Failure] = []
        self.max_errors: int = loader.max_errors
        self._replaces = loader.on_error == "replace"
        # The number of samples from which replacements are drawn.
        self._num_candidates = 0
        if not isinstance(loader.dataset, IterableDataset):
            if not _draws_from_subset(loader):
                self._num_candidates = _length(loader.dataset) or 0

    def take_failures(self) -> tuple[Failure, ...]:
        """Return the failures since the last call."""
        taken = tuple(self.failures)
        self.failures.clear()
        return taken

    def read(
        self,
        task: SampleTask,
        indices: Any,
        read_one: Callable[[Any], Any],
        read_batch: Callable[[Any], Any] | None,
    ) -> Any:
        """Return the samples of a batch that raise no error, at least one.

        Args:
            task: the task of the batch, which determines the replacements.
            indices: the indices of the samples.
            read_one: returns the sample of an index.
            read_batch: returns the samples of several indices. If it raises, it is
                called again for each index.

        Returns:
            The samples. If all of them raised and cannot be replaced: `NO_SAMPLES`.
        """
        if read_batch is None:
            found = self._read_each(task, indices, read_one)
            return [sample for _, sample in found] or _no_samples(indices)
        indices = list(indices)
        try:
            return read_batch(indices)
        except Exception as error:
            if is_fatal(error):
                raise

        def read_alone(index: Any) -> Any:
            return read_batch([index])

        found = self._read_each(task, indices, read_alone)
        if len(found) == 1:
            return found[0][1]
        if all(isinstance(each, list) and len(each) == 1 for _, each in found):
            return [sample for _, (sample,) in found] or _no_samples(indices)
        # The dataset joins samples in a form of its own.
        kept = [index for index, _ in found]
        batch = self._try(read_batch, kept)
        return NO_SAMPLES if batch is _FAILED else batch

    def _read_each(
        self, task: SampleTask, indices: Any, read: Callable[[Any], Any]
    ) -> list[tuple[Any, Any]]:
        """Return each index that could be read, with what ``read`` returned for it."""
        found: list[tuple[Any, Any]] = []
        index = None
        for index in indices:
            sample = self._try(read, index)
            if sample is not _FAILED:
                found.append((index, sample))
            elif self._replaces:
                found += self._replace(task, index, read)
        if not found and index is not None:
            found += self._replace(task, index, read)
        return found

    def _try(self, read_one: Callable[[Any], Any], index: Any) -> Any:
        try:
            return read_one(index)
        except Exception as error:
            self.record(error, index, f"at index {format_indices(index)}")
            return _FAILED

    def _replace(
        self, task: SampleTask, index: Any, read_one: Callable[[Any], Any]
    ) -> list[tuple[int, Any]]:
        """Return the index of another sample, and the sample.

        The task and the index determine it. If the index is no number of a sample, or
        the length is unknown, the list is empty.

        Raises:
            ValueError: all samples of the dataset raise an error.
        """
        first, length = _plain(index), self._num_candidates
        if type(first) is not int or not -length <= first < length:
            return []
        failed, attempt = {first % length}, 0
        while len(failed) < length:
            key = sample_key(task.seed, task.epoch, "replacement", (first, attempt))
            attempt += 1
            other = int.from_bytes(key[:8], "little") % length
            if other in failed:
                continue
            sample = self._try(read_one, other)
            if sample is not _FAILED:
                return [(other, sample)]
            failed.add(other)
        last = self.failures[-1]
        raise no_batch_error(last.error) from _exception(last.cause)

    def record(self, error: Exception, index: Any, location: str) -> None:
        """Record the error of a sample, which is being handled, or raise it.

        Raises:
            ErrorLimitError: this process alone exceeds ``max_errors``.
            Exception: the error, if it must not be skipped.
        """
        if is_fatal(error):
            raise error
        cause: Exception | ExceptionWrapper = error
        info = get_worker_info()
        if info is not None and not in_worker_thread():
            cause = wrap_exception(worker_text(info.id), location)
        text = f"{type(error).__qualname__}: {message_of(error)}"[:_MAX_TEXT]
        self.failures.append(Failure(SampleError(_plain(index), text), cause))
        if len(self.failures) > self.max_errors:
            raise limit_error(self.failures[-1].error, self.max_errors) from error

    def skip_errors(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator without the samples that raise an error.

        Raises:
            TypeError: the iterator is a generator.
        """
        if isinstance(samples, Generator):
            raise _generator_error("returns one")
        return _SkippingIterator(samples, self)


def _no_samples(indices: Any) -> Any:
    """Return the samples of a batch without any: it had no index, or all failed."""
    return NO_SAMPLES if len(indices) else []


def _plain(index: Any) -> Any:
    """Return an index as plain data, which a state can contain."""
    if isinstance(index, str):
        return str(index)
    if type(index) in (list, tuple):
        return [_plain(each) for each in index]
    try:
        return operator.index(index)
    except TypeError:
        return format_indices(index)


class _SkippingIterator:
    """An iterator over the samples of an iterable dataset that raise no error."""

    def __init__(self, samples: Iterator[Any], policy: ErrorPolicy) -> None:
        self._samples, self._policy = samples, policy
        self._number = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        last: Exception | None = None
        while True:
            number, self._number = self._number, self._number + 1
            try:
                return next(self._samples)
            except StopIteration:
                if last is not None:
                    _warn_of_end(number - 1, last)
                raise
            except Exception as error:
                self._policy.record(error, number, f"at sample {number}")
                last = error


def is_fatal(error: Exception) -> bool:
    """Return True if an error must be raised whatever ``on_error`` is."""
    return isinstance(error, _FATAL) or is_death_report(error)


def limit_error(last: SampleError, limit: int) -> ErrorLimitError:
    """Return the error for more failures than ``max_errors``."""
    return ErrorLimitError(
        f"DataLoader{rank_text()}: an epoch must have at most "
        f"max_errors={limit} failed samples, but has more. The last one has index "
        f"{format_indices(last.index)}: {last.error}. Repair the samples in "
        "DataLoader.sample_errors, or increase max_errors."
    )


def no_batch_error(last: SampleError) -> BatchValueError:
    """Return the error for a dataset without a sample that can be read."""
    return BatchValueError(
        "DataLoader: a batch must have a sample, but all samples failed. The last "
        f"failed one has index {format_indices(last.index)}: {last.error}. Repair the "
        "samples."
    )


def _generator_error(found: str) -> BatchTypeError:
    return BatchTypeError(
        "DataLoader: with on_error='skip' the iterator of an iterable dataset must "
        f"continue after an error, but a generator ends there, and __iter__ {found}. "
        "Catch errors in the generator and set on_error='raise', or return an object "
        "with __next__ from __iter__."
    )


def _warn_of_end(number: int, error: Exception) -> None:
    warn_once(
        "PP216",
        f"DataLoader: sample {number} raised {type(error).__qualname__}: "
        f"{message_of(error)[:_MAX_TEXT]}, and the iterable dataset ended directly "
        "after it. Samples may be missing, as an iterator around a generator ends at "
        "its first error. Catch the error in the generator.",
        LoaderWarning,
    )


def warn_of_left_out(number: int) -> None:
    """Warn once that a batch of the epoch was left out."""
    warn_once(
        "PP217",
        f"DataLoader{rank_text()}: batch {number} of the epoch was "
        "left out, because its samples raised errors and no other sample can replace "
        "them. That needs integer indices, a dataset with a length, and a sampler that "
        "draws from all of it. Further batches are left out without a warning. In "
        "distributed training, end epochs after the same number of steps on all ranks.",
        LoaderWarning,
    )


def count_failures(
    counted: list[SampleError], failures: tuple[Failure, ...], limit: int
) -> None:
    """Add the failures of a batch to those of the epoch. Warn of the first one.

    Raises:
        ErrorLimitError: the epoch exceeds the limit. Nothing is added.
    """
    left = limit - len(counted)
    if len(failures) > left:
        last = failures[max(left, 0)]
        raise limit_error(last.error, limit) from _exception(last.cause)
    for failure in failures:
        warn_once(
            "PP215",
            f"DataLoader: sample {format_indices(failure.error.index)} was left out, "
            f"because it raised {failure.error.error}. Further samples are left out "
            "without a warning: see DataLoader.sample_errors. Repair them, or set "
            "on_error='raise'.",
            LoaderWarning,
        )
    counted.extend(failure.error for failure in failures)


def _exception(cause: Exception | ExceptionWrapper) -> Exception:
    if isinstance(cause, Exception):
        return cause
    try:
        cause.reraise()
    except Exception as error:
        return error
    raise AssertionError("unreachable")  # pragma: no cover
