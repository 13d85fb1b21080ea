"""The largest batch of each arm, with a launcher that trains nothing."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ampcompare.base.errors import ConfigError, LaunchError, UnsupportedCombination
from ampcompare.experiment.find_batch import (
    GIB,
    STEPS,
    BatchSearchTerms,
    configs_of_arms,
    find_largest_batches,
    largest_passing_multiple,
)
from ampcompare.experiment.launch.contract import Launcher
from ampcompare.experiment.launch.worker.cell import record_of_failure
from ampcompare.results.records.run import RunRecord, RunSummary
from ampcompare.settings.config import RunConfig
from ampcompare.settings.stack import parse_stacks
from ampcompare.tasks.data import Data

BASE = RunConfig.model_validate({"recipe": {"batch_size": 8, "epochs": 1}, "device": "cpu"})
PER_SAMPLE = {"fp32": GIB // 100, "half": GIB // 200}


def _record(config: RunConfig, device: str, **summary: Any) -> RunRecord:
    environment = {"device": device, **({"memory_bytes": GIB} if device == "cuda:0" else {})}
    numbers = RunSummary(num_steps=STEPS, **summary)
    return RunRecord(
        cell=config.digest(), arm=config.arm, status="completed", config=config, environment=environment,
        summary=numbers,
    )  # fmt: skip


class Pretend(Launcher):
    """Returns records whose memory follows the batch, and keeps the configurations."""

    def __init__(self, answer: Callable[[RunConfig], RunRecord]) -> None:
        self.answer = answer
        self.asked: list[RunConfig] = []

    def launch(self, config: RunConfig, folder: Path, on_progress: Any = None) -> RunRecord:
        self.asked.append(config)
        return self.answer(config)


def _on_cpu(config: RunConfig) -> RunRecord:
    return _record(config, "cpu", peak_bytes=PER_SAMPLE[config.arm] * config.recipe.batch_size)


def test_an_arm_that_cannot_train_is_named_before_the_search() -> None:
    """Each arm is tried once; the others would be searched for nothing."""
    launcher = Pretend(
        lambda config: (
            record_of_failure(config, KeyError("layer")) if config.arm == "half" else _on_cpu(config)
        )
    )
    with pytest.raises(LaunchError, match=r"half: KeyError: 'layer' \(nothing else was started"):
        find_largest_batches(BatchSearchTerms(configs_of_arms(BASE, ["fp32", "half"]), 1.0), launcher)
    assert [config.arm for config in launcher.asked] == ["fp32", "half"]


def test_each_arm_has_its_batch_within_the_margin() -> None:
    """On a CPU the limit less its margin decides; half of the memory for a sample is twice the batch."""
    launcher = Pretend(_on_cpu)
    notes: list[str] = []
    fp32, half = find_largest_batches(
        BatchSearchTerms(configs_of_arms(BASE, ["fp32", "half"]), 1.0, 0.1, notes.append, False), launcher
    )
    assert fp32.fits is not None
    assert half.fits is not None
    assert fp32.fails is not None
    assert 85 <= fp32.fits.batch <= 90 < fp32.fails.batch
    assert 170 <= half.fits.batch <= 180
    assert fp32.fails.reason.endswith("GiB of 0.90")
    assert fp32.tries + half.tries == len(launcher.asked) == len(notes)
    assert notes[0] == "fp32, batch 8: fits"
    assert {config.recipe.max_steps for config in launcher.asked} == {STEPS}


def test_an_arm_in_shards_is_searched_next_to_others() -> None:
    """`fsdp` brings its own kind of parallelism, and the others keep theirs."""
    plain, sharded = configs_of_arms(BASE, ["fp32", "fsdp"])
    assert (plain.parallel.kind, sharded.parallel.kind) == ("none", "fsdp")
    launcher = Pretend(
        lambda config: _record(config, "cpu", peak_bytes=GIB // 100 * config.recipe.batch_size)
    )
    for limit in find_largest_batches(BatchSearchTerms([plain, sharded], 1.0), launcher):
        assert limit.fits is not None
    assert {config.parallel.kind for config in launcher.asked if config.arm != "fp32"} == {"fsdp"}


@pytest.mark.parametrize("preflight", [True, False])
def test_what_fails_in_a_stack_is_the_error_of_its_arm(preflight: bool) -> None:
    """The others are searched, and each limit says in which environment it was found."""

    def answer(config: RunConfig) -> RunRecord:
        if config.stack is not None and config.stack.name == "gone":
            return record_of_failure(config, OSError("the stack gone cannot be started"))
        name = "here" if config.stack is None else config.stack.name
        record = _record(config, "cpu", peak_bytes=PER_SAMPLE[config.arm] * config.recipe.batch_size)
        return record.model_copy(update={"environment": {"device": "cpu", "torch": name}})

    stacks = parse_stacks({"new": "/envs/new/bin/python", "gone": "/no/such"})
    configs = configs_of_arms(BASE, ["half@new,fp32", "fp32@gone"], stacks)
    launcher = Pretend(answer)
    there, here, gone = find_largest_batches(
        BatchSearchTerms(configs, 1.0, 0.1, preflight=preflight), launcher
    )
    assert [limit.label for limit in (there, here, gone)] == ["half@new", "fp32", "fp32@gone"]
    assert there.fits is not None
    assert here.fits is not None
    assert 170 <= there.fits.batch <= 180
    assert 85 <= here.fits.batch <= 90
    assert (there.environment["torch"], here.environment["torch"]) == ("new", "here")
    assert (gone.fits, gone.fails, gone.tries) == (None, None, 0)
    assert "the stack gone cannot be started" in str(gone.error)
    assert here.error is there.error is None
    assert sum(config.stack == stacks["gone"] for config in launcher.asked) == 1


def test_a_failing_arm_here_ends_the_search_next_to_a_stack() -> None:
    stacks = parse_stacks({"new": "/envs/new/bin/python"})
    configs = configs_of_arms(BASE, ["fp32@new", "fp32"], stacks)
    launcher = Pretend(lambda config: record_of_failure(config, KeyError("layer")))
    with pytest.raises(LaunchError, match=r"fp32: KeyError: 'layer' \(nothing else was started"):
        find_largest_batches(BatchSearchTerms(configs, 1.0), launcher)


def test_a_limit_is_needed_for_the_cpu_of_a_stack_too() -> None:
    found = BASE.model_copy(update={"device": "auto"})
    configs = configs_of_arms(found, ["fp32@new"], parse_stacks({"new": "/envs/new/bin/python"}))
    with pytest.raises(ConfigError, match="find-batch on a CPU needs the GiB"):
        find_largest_batches(BatchSearchTerms(configs), Pretend(_on_cpu))


def test_arms_and_stacks_belong_together() -> None:
    stacks = parse_stacks({"new": "/envs/new/bin/python"})
    with pytest.raises(ConfigError, match="--stack new needs an arm that trains there"):
        configs_of_arms(BASE, ["fp32"], stacks)
    with pytest.raises(ConfigError, match="@old names a stack that is not given"):
        configs_of_arms(BASE, ["fp32@old"], stacks)
    with pytest.raises(
        UnsupportedCombination, match="the arm script is for a script, whose batches are its own"
    ):
        configs_of_arms(BASE, ["script@new"], stacks)
    assert len(configs_of_arms(BASE, ["bf16@new", "native:bf16@new,bf16"], stacks)) == 2


def test_a_gpu_needs_no_limit() -> None:
    """Running out of memory is too much, and so is what the allocator has reserved of the last 5 %."""

    def answer(config: RunConfig) -> RunRecord:
        taken = config.recipe.batch_size * GIB // 100
        if taken > GIB:
            return record_of_failure(config, MemoryError("cannot allocate"))
        return _record(config, "cuda:0", peak_bytes=taken // 2, peak_reserved_bytes=taken)

    on_gpu = BASE.model_copy(update={"device": "auto"})
    (limit,) = find_largest_batches(BatchSearchTerms(configs_of_arms(on_gpu, ["fp32"])), Pretend(answer))
    assert limit.fits is not None
    assert limit.fails is not None
    assert 90 <= limit.fits.batch <= 95
    assert limit.limit_bytes == int(0.95 * GIB)


def test_the_data_bound_the_batch() -> None:
    """A batch that the training set cannot fill does not fit, and the message of the data says why."""

    few = SimpleNamespace(num_train=50, name="few")

    def answer(config: RunConfig) -> RunRecord:
        try:
            Data.num_batches(few, config.recipe.batch_size)  # type: ignore[arg-type]
        except ConfigError as error:
            return record_of_failure(config, error)
        return _record(config, "cpu", peak_bytes=1)

    (limit,) = find_largest_batches(BatchSearchTerms(configs_of_arms(BASE, ["fp32"]), 1.0), Pretend(answer))
    assert limit.fits is not None
    assert limit.fails is not None
    assert limit.fits.batch in (48, 49, 50)
    assert "few has 50 training samples" in limit.fails.reason


def test_micro_batches_and_rates_follow() -> None:
    """Every batch can be cut as asked, and a rate that follows the batch does."""
    optimizer = {"name": "sgd", "lr_base": 0.1, "lr_base_batch": 8}
    config = RunConfig.model_validate(
        {"recipe": {"batch_size": 8, "grad_accum_steps": 4, "optimizer": optimizer}, "device": "cpu"}
    )
    launcher = Pretend(_on_cpu)
    find_largest_batches(BatchSearchTerms(configs_of_arms(config, ["fp32"]), 1.0), launcher)
    assert all(tried.recipe.batch_size % 4 == 0 for tried in launcher.asked)
    assert all(
        tried.recipe.optimizer.lr == pytest.approx(0.1 * tried.recipe.batch_size / 8)
        for tried in launcher.asked
    )


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            lambda config: record_of_failure(config, KeyError("layer")),
            "failed for another reason than memory: KeyError",
        ),
        (lambda config: _record(config, "cpu", skipped_steps=STEPS), "all 5 updates overflowed"),
    ],
)
def test_another_failure_ends_the_search(answer: Callable[[RunConfig], RunRecord], message: str) -> None:
    """A bug or an optimizer without state says nothing about memory."""
    with pytest.raises(LaunchError, match=message):
        find_largest_batches(BatchSearchTerms(configs_of_arms(BASE, ["fp32"]), 1.0), Pretend(answer))


def test_a_cpu_needs_a_limit() -> None:
    """At once where the device is named, and after the first try where it was found."""
    with pytest.raises(ConfigError, match="find-batch on a CPU needs the GiB"):
        find_largest_batches(BatchSearchTerms(configs_of_arms(BASE, ["fp32"])), Pretend(_on_cpu))
    launcher = Pretend(_on_cpu)
    found = BASE.model_copy(update={"device": "auto"})
    with pytest.raises(ConfigError, match="find-batch on a CPU needs the GiB"):
        find_largest_batches(BatchSearchTerms(configs_of_arms(found, ["fp32"])), launcher)
    assert len(launcher.asked) == 1


def test_bad_values_are_refused() -> None:
    """A margin, a limit and a batch of all processes that have no meaning."""
    with pytest.raises(ConfigError, match="margin 120%"):
        BatchSearchTerms([BASE], margin=1.2)
    with pytest.raises(ConfigError, match="--memory-limit 0"):
        BatchSearchTerms([BASE], memory_gib=0.0)
    total = RunConfig.model_validate({"recipe": {"global_batch_size": 8}})
    with pytest.raises(
        ConfigError, match=r"recipe.global_batch_size is not for find-batch, which searches the batch"
    ):
        configs_of_arms(total, ["fp32"])


@pytest.mark.parametrize("start", [1, 7, 64, 1000])
@pytest.mark.parametrize("multiple", [1, 4])
def test_it_is_the_largest_within_its_precision(start: int, multiple: int) -> None:
    """For every bound: what is returned passes, and what lies a sixteenth above, or the next multiple, does not."""
    for bound in [0, 1, 2, 3, 4, 5, 9, 63, 64, 65, 100, 700, 5000]:
        tested: list[int] = []

        def passes(number: int, bound: int = bound, tested: list[int] = tested) -> bool:
            tested.append(number)
            return number <= bound

        found = largest_passing_multiple(passes, start, multiple=multiple)
        assert found % multiple == 0
        assert found <= bound
        assert bound - found < max(multiple, found / 16 + multiple)
        assert found in tested or not found
        assert len(tested) == len(set(tested))
        assert len(tested) <= 12 + 2 * math.log2(max(bound, start))
