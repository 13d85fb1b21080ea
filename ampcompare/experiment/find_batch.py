"""Find the largest batch that each arm can train in the memory of a device; each try is a separate process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ConfigError, LaunchError, UnsupportedCombination
from ampcompare.base.formatting import GIB
from ampcompare.base.option_rules import refusal_sentence
from ampcompare.experiment.launch.contract import Launcher
from ampcompare.experiment.launch.places import Places, places_for_cells
from ampcompare.experiment.option_checks import check_cells
from ampcompare.experiment.preflight import error_of_failed_arms, run_trials_of_rows
from ampcompare.experiment.run_options import LaunchOptions
from ampcompare.results.records.batch_limit import BatchLimit, BatchTry
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import RunConfig
from ampcompare.settings.stack import StackConfig, arms_with_stacks, require_used_stacks
from ampcompare.settings.validation import build_validated_model

STEPS = 5  # the first ones may overflow, and an optimizer creates its state in the first one that does not
TOO_FEW = "fewer than one batch"  # of `Data.num_batches`
OUT_OF_MEMORY = ("out of memory", "out-of-memory")


@dataclass(frozen=True)
class BatchSearchTerms:
    """The terms of a search for the largest batch.

    Attributes:
        configs: one for each arm, whose batch size is the first to be tried.
        memory_gib: that a run may take; None: all of the GPU.
        margin: share of it that stays free.
        preflight: first train a few steps of each arm, so that one that cannot train is named before any search.
    """

    configs: Sequence[RunConfig]
    memory_gib: float | None = None
    margin: float = 0.05
    note: Callable[[str], None] = lambda text: None
    preflight: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.margin < 1:
            raise ConfigError(
                f"margin {self.margin:.0%} is not a percentage of memory to keep free, such as 5"
            )
        if self.memory_gib is not None and not self.memory_gib > 0:
            raise ConfigError(f"--memory-limit {self.memory_gib:g} is not a number of GiB above 0")


def configs_of_arms(
    config: RunConfig, arms: Sequence[str], stacks: Mapping[str, StackConfig] = MappingProxyType({})
) -> list[RunConfig]:
    """Return the configurations of arms that train as one says, each once.

    Args:
        config: of the model, the data and the first batch size to try.
        arms: their texts, or lists of them; O2@old trains in the stack of that name.
        stacks: other environments by their names.

    Raises:
        ConfigError: an arm cannot be read, its stack is not known, a stack has no arm, or the batch size is that of all
            processes together, and one process is searched.
        UnsupportedCombination: an arm is for scripts.
    """
    rows = dict.fromkeys(arms_with_stacks(arms, stacks))
    require_used_stacks(stacks, {stack.name for _, stack in rows if stack is not None})
    for arm, _ in rows:
        if Arm.parse(arm).is_as_written:
            raise UnsupportedCombination(
                f"find-batch searches the batch of a recipe, and the arm {arm} is for a script, whose batches are its "
                "own; use fp32"
            )
    if config.recipe.global_batch_size is not None:
        why = "is not for find-batch, which searches the batch size of one process"
        advice = "leave it out, or give the first size with -b"
        raise ConfigError(refusal_sentence("recipe.global_batch_size", why, advice))
    return [
        _config_with_batch(config, config.recipe.batch_size, arm).model_copy(update={"stack": stack})
        for arm, stack in rows
    ]


def find_largest_batches_on_free_gpu(search: BatchSearchTerms, gpus: str | None) -> list[BatchLimit]:
    """Return the largest batch of each arm, searched on the first GPU that is free.

    Args:
        search: its terms, and the arms as configurations of one process.
        gpus: the GPUs to choose from, as `--gpus` takes them; None for all that are visible.

    Raises:
        ConfigError: there are no such GPUs, or a configuration cannot be run.
        LaunchError: a try failed for another reason than memory.
    """
    places = places_for_cells(search.configs, None, gpus)
    for text in places.notes:
        search.note(text)
    with LaunchOptions().pool(search.configs[0], Places(places.all[:1])) as launcher:
        return find_largest_batches(search, launcher)


def find_largest_batches(search: BatchSearchTerms, launcher: Launcher) -> list[BatchLimit]:
    """Return the largest batch of each arm.

    A batch fits if some updates and an evaluation end, with the margin left of the limit. On a GPU the memory is what
    torch's allocator has reserved, on a CPU the growth of the process. What goes wrong in a stack is the `error` of its
    arm, and the others are searched.
    """
    check_cells(search.configs)
    faults: dict[str, str] = {}
    if search.preflight and len(search.configs) > 1:  # else the first try says the same
        rows = {config.arm_with_stack: config for config in search.configs}
        found = run_trials_of_rows(rows, launcher, [0])
        failures = {
            error: arms for error, arms in found.failures.items() if not _may_other_batch_size_help(error)
        }
        faults = {arm: error for error, arms in failures.items() for arm in arms if rows[arm].stack}
        here = {error: [arm for arm in arms if arm not in faults] for error, arms in failures.items()}
        if refused := {error: arms for error, arms in here.items() if arms}:
            raise error_of_failed_arms(found, refused)
    if search.memory_gib is None and any(config.device == "cpu" for config in search.configs):
        raise _no_limit_error()
    with tempfile.TemporaryDirectory(prefix="ampcompare-batch-") as folder:
        searches = [_LargestBatchSearch(search, config, launcher, Path(folder)) for config in search.configs]
        return [each.search_limit(faults.get(each.config.arm_with_stack)) for each in searches]


class _LargestBatchSearch:
    """The search for the largest batch of one arm."""

    def __init__(self, search: BatchSearchTerms, config: RunConfig, launcher: Launcher, folder: Path) -> None:
        self.config = config
        self._search, self._launcher, self._folder = search, launcher, folder
        self._tries: dict[int, BatchTry] = {}
        self._limits: set[int] = set()
        self._environment: Mapping[str, Any] = {}

    def search_limit(self, fault: str | None) -> BatchLimit:
        """Return what was found, and of a stack why nothing could be.

        Args:
            fault: why the arm cannot train in its stack, where that is known.
        """
        recipe, stack = self.config.recipe, self.config.stack
        largest = 0
        if fault is None:
            try:
                largest = largest_passing_multiple(
                    self._does_batch_fit, recipe.batch_size, multiple=recipe.grad_accum_steps
                )
            except LaunchError as error:
                if stack is None:
                    raise
                fault = str(error)
        if fault is not None:
            self._search.note(f"{self.config.arm_with_stack}: {fault}")
        failed = [each for each in self._tries.values() if each.reason]
        return BatchLimit(
            arm=self.config.arm,
            fits=self._tries.get(largest),
            fails=min(failed, key=lambda each: each.batch, default=None),
            limit_bytes=min(self._limits, default=None),
            tries=len(self._tries),
            stack=None if stack is None else stack.name,
            error=fault,
            environment=self._environment,
        )

    def _does_batch_fit(self, batch: int) -> bool:
        tried = _config_with_batch(self.config, batch, self.config.arm)
        record = self._launcher.launch(tried, self._folder / tried.digest())
        if record.status != "failed" or not self._environment:
            self._environment = record.environment
        error = record.error or ""
        if (
            record.status == "failed"
            and tried.stack is not None
            and not (self._tries or _may_other_batch_size_help(error))
        ):
            raise LaunchError(error)  # of the environment, whatever the batch
        limit = _memory_limit_bytes(self._search, record)
        if limit is not None:
            self._limits.add(limit)
        self._tries[batch] = judged = _batch_try_of_record(record, batch, limit)
        self._search.note(f"{self.config.arm_with_stack}, batch {batch}: {judged.reason or 'fits'}")
        return not judged.reason


def _config_with_batch(config: RunConfig, batch: int, arm: str) -> RunConfig:
    """Return a run of a few updates with another batch and arm, which saves nothing."""
    values = config.model_dump()
    if Arm.parse(arm).spec.parallel:
        del values["parallel"]["kind"]  # that of the arm, whatever the others have
    recipe = values["recipe"]
    recipe |= {"batch_size": batch, "max_steps": STEPS, "early_stop": None, "target": None}
    if recipe["optimizer"]["lr_base"] is not None:  # the rate follows the batch
        del recipe["optimizer"]["lr"]
    return build_validated_model(RunConfig, {**values, "arm": arm, "saving": {}, "on_nan": "continue"})


def _memory_limit_bytes(search: BatchSearchTerms, record: RunRecord) -> int | None:
    """Return the bytes that the run may take; None where that is not known, as of one that has failed."""
    if search.memory_gib is not None:
        return int(search.memory_gib * GIB * (1 - search.margin))
    if record.environment.get("device") == "cpu":
        raise _no_limit_error()
    total = record.environment.get("memory_bytes")
    return int(total * (1 - search.margin)) if isinstance(total, int) else None


def _no_limit_error() -> ConfigError:
    return ConfigError("find-batch on a CPU needs the GiB that a run may use, as in --memory-limit 4")


def _batch_try_of_record(record: RunRecord, batch: int, limit: int | None) -> BatchTry:
    """Return whether a run fits."""
    summary, error = record.summary, record.error or ""
    if record.status == "failed":
        if _may_other_batch_size_help(error):
            return BatchTry(batch, error)
        raise LaunchError(f"{record.arm} with batch {batch} failed for another reason than memory: {error}")
    if summary.num_steps and summary.skipped_steps >= summary.num_steps:
        raise LaunchError(
            f"{record.arm} with batch {batch}: all {summary.num_steps} updates overflowed, so the optimizer has not "
            f"created its state; give a smaller loss scale"
        )
    by_rank = record.processes.peak_bytes_by_rank if record.processes is not None else []
    peaks = [summary.peak_reserved_bytes or summary.peak_bytes or 0, *by_rank]
    peak = max(peaks)
    if limit is not None and peak > limit:
        return BatchTry(batch, f"takes {peak / GIB:.2f} GiB of {limit / GIB:.2f}", peak)
    return BatchTry(batch, "", peak)


def _may_other_batch_size_help(error: str) -> bool:
    """Return whether a smaller batch, or more samples, might help."""
    return TOO_FEW in error or any(words in error for words in OUT_OF_MEMORY)


def largest_passing_multiple(
    passes: Callable[[int], bool], start: int, *, multiple: int = 1, precision: float = 1 / 16
) -> int:
    """Return the largest multiple that passes, or one that is smaller by at most `precision` of it; 0 if none does.

    Every number is tested once at most. What passes at a number must pass at every smaller one.

    Args:
        start: first number; doubled while it passes, else halved.
        multiple: numbers are multiples of it.
        precision: relative distance between what passes and what does not at which the search ends.
    """
    low, high = 0, 0  # in multiples; `high` is 0 while nothing has failed
    at = max(1, start // multiple)
    while at and not (low and high):
        if passes(at * multiple):
            low, at = at, 2 * at
        else:
            high, at = at, at // 2
    while low and high - low > max(1, low * precision):
        middle = (low + high) // 2
        if passes(middle * multiple):
            low = middle
        else:
            high = middle
    return low * multiple
