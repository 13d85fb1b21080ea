"""Attacks on what is compared: other work, machines and mixtures end in `not comparable` or in the reading."""

from collections.abc import Callable
from typing import Any

import pytest

from ampcompare.results.records.comparison import ArmSummary, Comparison
from ampcompare.results.records.evaluation import SampleResults
from ampcompare.results.records.run import EngineInfo, Resumption, RunRecord
from ampcompare.settings.config import RunConfig
from ampcompare.testing import make_comparison, make_record

Change = Callable[[RunRecord], RunRecord]
TOP1 = {"fp32": [0.5, 0.52, 0.49, 0.51, 0.505], "half": [0.501, 0.519, 0.491, 0.509, 0.506]}
SPEED = {"fp32": [0.0100, 0.0101, 0.0099, 0.0102, 0.0100], "half": [0.0050, 0.0051, 0.0049, 0.0050, 0.0051]}
PEAK = {"fp32": 10_000, "half": 5_000}
PACKAGES = {"timm": "1.0", "numpy": "2.0"}


def _unchanged(record: RunRecord) -> RunRecord:
    return record


def _compared(change: Change = _unchanged, arm: str = "half") -> Comparison:
    """Compare half, twice as fast and half as large, with fp32; the runs of one arm are changed."""
    records = [
        make_record(name, seed, top1=TOP1[name][seed], seconds=SPEED[name][seed], peak_bytes=PEAK[name])
        for name in TOP1
        for seed in range(5)
    ]
    records = [_labels("same")(_environment(torch="2.13.0", processor="a CPU")(record)) for record in records]
    records = [_updated(code={"net.py": "1", "a.py": "1"}, packages=PACKAGES)(record) for record in records]
    changed = [change(record) if record.arm == arm else record for record in records]
    label = next((record.arm for record in changed if record.config.arm == "half"), "half")
    return make_comparison(changed, arms=["fp32", label])


def _half(comparison: Comparison) -> ArmSummary:
    return comparison.arms[1]


def _config(**values: Any) -> Change:
    def change(record: RunRecord) -> RunRecord:
        merged = record.config.model_dump()
        for name, value in values.items():
            merged[name] = {**merged[name], **value} if isinstance(value, dict) else value
        return record.model_copy(update={"config": RunConfig.model_validate(merged)})

    return change


def _updated(**values: Any) -> Change:
    return lambda record: record.model_copy(update=values)


def _summary(**values: Any) -> Change:
    return lambda record: record.model_copy(update={"summary": record.summary.model_copy(update=values)})


def _environment(**values: Any) -> Change:
    return lambda record: record.model_copy(update={"environment": {**record.environment, **values}})


def _samples(count: int) -> Change:
    def change(record: RunRecord) -> RunRecord:
        correct = round((record.summary.metric_final or 0) * count)
        counts = {"top-1": correct, "top-5": count}
        values = {name: right / count for name, right in counts.items()}
        changes = {"samples": count, "counts": counts, "values": values}
        return _summary(epochs=[record.summary.epochs[0].model_copy(update=changes)])(record)

    return change


def _labels(digest: str) -> Change:
    def change(record: RunRecord) -> RunRecord:
        images = SampleResults(bits="", sha256="", labels_sha256=digest)
        return _summary(epochs=[record.summary.epochs[0].model_copy(update={"per_sample": images})])(record)

    return change


def _resumed(step: int, arm: str, *notes: str) -> Change:
    return lambda record: record.model_copy(
        update={"resumed": [Resumption(step=step, arm=arm, notes=list(notes))]}
    )


def _only(seed: int, change: Change) -> Change:
    return lambda record: change(record) if record.config.recipe.seed == seed else record


OTHER_WORK: dict[str, tuple[Change, str]] = {
    "twice the batch": (_config(recipe={"batch_size": 128}), "global batch size 128, not 64"),
    "two processes of the same batch": (
        _config(processes=2, parallel={"kind": "ddp"}),
        "global batch size 128, not 64",
    ),
    "ten times the updates": (_summary(num_steps=1000), "1000 updates, not 100"),
    "another validation set": (_samples(50_000), "validated on 50000 samples, not 1000"),
    "other labels": (_labels("other"), "validated on samples with other labels"),
    "another data set": (_config(recipe={"data": {"name": "synthetic"}}), "name synthetic, not digits"),
    "more epochs": (_config(recipe={"epochs": 50}), "epochs 50, not 5"),
    "another learning rate": (_config(recipe={"optimizer": {"lr": 0.3}}), "lr 0.3, not "),
    "bad updates dropped": (_config(on_nan="skip"), "on_nan skip, not stop"),
    "another limit of skipped steps": (_config(max_skipped=3), "max_skipped 3, not None"),
    "TF32": (_config(tf32="on"), "tf32 on, not torch"),
    "another torch": (_environment(torch="1.13.1"), "torch 1.13.1, not 2.13.0"),
    "other code": (_updated(code={"net.py": "2", "b.py": "1"}), "of another version of net.py"),
    "other packages": (_updated(packages={"timm": "0.9", "numpy": "1.9"}), "timm 0.9, not 1.0"),
    "a switch": (_environment(AMPCOMPARE_APEX_STRICT="1"), "AMPCOMPARE_APEX_STRICT 1, not unset"),
    "trained by the reference": (_resumed(60, "fp32"), "trained by fp32 for 60 of 100 steps"),
}


@pytest.mark.parametrize("name", OTHER_WORK)
@pytest.mark.parametrize("seeds", ["all", "one"])
def test_other_work_gets_no_verdict(name: str, seeds: str) -> None:
    """What was trained otherwise, in all seeds or in one, is not comparable in accuracy, time and memory."""
    change, words = OTHER_WORK[name]
    comparison = _compared(change if seeds == "all" else _only(2, change))
    row = _half(comparison)
    for verdict in (str(row.quality), str(row.time), str(row.memory)):
        assert verdict.startswith("not comparable (")
        assert words in verdict
    assert row.memory.effect is None
    assert comparison.reading[0].startswith("No arm is recommended")


def test_equal_global_batches_are_compared() -> None:
    """64 samples on one process and 2 x 32 are the same work; the time is compared where the row names it."""
    split = _config(processes=2, parallel={"kind": "ddp"}, recipe={"batch_size": 32})
    unnamed = _compared(split)
    assert str(_half(unnamed).quality) == "equivalent (±0.5)"
    assert str(_half(unnamed).time) == "not comparable (processes 2, not 1; kind ddp, not none)"
    label = {"arm": "half kind=ddp processes=2"}
    named = _compared(lambda record: split(record).model_copy(update=label))
    row = _half(named)
    assert (str(row.quality), str(row.time)) == ("equivalent (±0.5)", "better")
    assert (
        "Cells ran with different numbers of processes: 1 (fp32); 2 (half kind=ddp processes=2)."
        in named.reading
    )
    assert any("samples that batch norm sees at once): 64 (fp32); 32 (half" in line for line in named.reading)


ELSEWHERE: dict[str, tuple[Change, str]] = {
    "GPU": (_environment(device="cuda:0", device_name="H100"), "on cuda, not cpu"),
    "processor": (_environment(processor="abacus"), "processor abacus, not a CPU"),
    "threads": (_config(threads=8), "threads 8, not 1"),
    "workers": (_config(workers=2), "workers 2, not 0"),
    "deterministic": (_config(deterministic=True), "deterministic True, not False"),
    "resumed with another torch": (
        _resumed(60, "half", "torch 1.13.1 then, 2.13.0 now"), "resumed with torch 1.13.1 then, 2.13.0 now",
    ),
    "resumed on another host": (_resumed(60, "half", "host a then, b now"), "resumed with host a then, b now"),
}  # fmt: skip


@pytest.mark.parametrize("name", ELSEWHERE)
def test_another_machine_gets_no_verdict_on_time_and_memory(name: str) -> None:
    """Where half ran elsewhere or otherwise, its accuracy is compared, its time and memory are not, and it is said."""
    change, words = ELSEWHERE[name]
    comparison = _compared(change)
    row = _half(comparison)
    assert str(row.quality) == "equivalent (±0.5)"
    assert str(row.time) == str(row.memory) == f"not comparable ({words})"
    assert comparison.reading[0].startswith("No arm is recommended")


def _engine(name: str, version: str) -> Change:
    return lambda record: record.model_copy(
        update={"engine": EngineInfo(name=name, version=version, reason="")}
    )  # type: ignore[arg-type]


def test_two_engines_in_one_row_are_no_arm() -> None:
    """A row of which some seeds ran on our engine and some on NVIDIA's gets no verdict."""

    def change(record: RunRecord) -> RunRecord:
        return _engine(*(("compat", "25.05") if record.config.recipe.seed < 2 else ("nvidia", "0.1")))(record)

    row = _half(_compared(change))
    words = "not comparable (compat 25.05 and nvidia 0.1 in one row)"
    assert (str(row.quality), str(row.time), str(row.memory)) == (words, words, words)
    assert str(_half(_compared(_engine("compat", "25.05"))).quality) == "equivalent (±0.5)"


def test_a_row_of_two_recipes_is_no_arm() -> None:
    """Seeds of both arms that had another recipe pair well one by one, and are no row of one arm."""
    records = _compared().records
    other = _config(recipe={"epochs": 50})
    mixed = [other(record) if record.config.recipe.seed > 2 else record for record in records]
    row = _half(make_comparison(mixed, arms=["fp32", "half"]))
    assert str(row.quality) == str(row.time) == "not comparable (epochs 50, not 5, in one row)"


def _on(*hosts: str) -> Change:
    return lambda record: record.model_copy(update={"host": hosts[record.config.recipe.seed % len(hosts)]})


def test_a_host_that_is_the_arm_is_no_machine_for_times() -> None:
    """Where one arm ran on a host that the other never used, the host cannot be told from the arm."""
    records = [_on("a")(record) for record in _compared().records]
    same = make_comparison(records, arms=["fp32", "half"])
    assert str(_half(same).time) == "better"
    apart = [_on("b")(record) if record.arm == "half" else record for record in records]
    comparison = make_comparison(apart, arms=["fp32", "half"])
    assert str(_half(comparison).time) == "not comparable (on host b, not a)"
    assert "Cells ran with different hosts: a (fp32); b (half)." in comparison.reading
    spread = [_on("a", "b")(record) for record in records]
    assert str(_half(make_comparison(spread, arms=["fp32", "half"])).time) == "better"


def test_a_resumed_mixture_is_named_in_every_report() -> None:
    """A run that another arm trained first is that mixture in status, verdict and reading."""
    comparison = _compared(_only(0, _resumed(60, "fp32", "converted from fp32")))
    row = _half(comparison)
    assert row.status == "ok; trained by fp32 for 60 of 100 steps 1/5"
    assert str(row.quality) == "not comparable (trained by fp32 for 60 of 100 steps)"
    assert any(
        line.startswith("half: 1 of 5 runs trained by fp32 for 60 of 100 steps")
        for line in comparison.reading
    )


def test_a_mixed_reference_blocks_all() -> None:
    row = _half(_compared(_only(1, _resumed(30, "half")), arm="fp32"))
    assert str(row.quality) == "not comparable (trained by half for 30 of 100 steps)"


def test_digests_of_ordinary_cells_stay() -> None:
    """Run directories of earlier versions stay usable: the digest of the defaults is what it was."""
    assert RunConfig.model_validate({"recipe": {"seed": 3}, "arm": "half"}).digest() == DIGEST_OF_HALF_3


DIGEST_OF_HALF_3 = "cf8cc7b2ebd1"
