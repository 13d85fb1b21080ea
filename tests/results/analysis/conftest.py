"""Run directories that hold what real runs leave behind, for tests that then change something in them."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ampcompare.experiment.launch.cell_files import write_record
from ampcompare.experiment.plan import make_plan
from ampcompare.experiment.run_directory import RunDirectory
from ampcompare.results.analysis.inference.effect import bounds, margin_bounds, p_values
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.run import RunRecord, RunSummary, StepRecord, dump_json
from ampcompare.settings.config import RunConfig

STEPS = 60
SAMPLES = 1000
TOP1 = {"fp32": [500, 520, 490, 510, 505], "half": [501, 519, 491, 509, 506]}  # right of 1,000, by seed


@pytest.fixture
def quick_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out how many seeds an open verdict lacks, which a simulation does not read, compute once what equal counts
    have in common, and round deviations as floats do: `statistics` has fractions, for half of the time of a verdict.
    """

    def variance(values: Sequence[float]) -> float:
        if min(values) == max(values):
            return 0.0
        mean = math.fsum(values) / len(values)
        return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)

    verdict = "ampcompare.results.analysis.inference.verdict"
    monkeypatch.setattr(f"{verdict}.pairs_to_settle", lambda *_, **__: None)
    for test in (p_values, bounds, margin_bounds):
        monkeypatch.setattr(f"{verdict}.{test.__name__}", cache(test))
    monkeypatch.setattr("statistics.variance", variance)
    monkeypatch.setattr("statistics.stdev", lambda values: math.sqrt(variance(values)))


@pytest.fixture(scope="session")
def run_of() -> Callable[..., tuple[RunRecord, list[StepRecord]]]:
    """Build the record and the steps of one cell, which agree in every number."""

    def build(config: RunConfig, correct: int, seconds: float = 0.01, **values: Any) -> Any:
        seed = config.recipe.seed
        losses = [2.0 / (1 + step) + 0.01 * seed + 0.001 * len(config.arm) for step in range(STEPS)]
        steps = [
            StepRecord(step, 0, loss, (), (), (True,), None, seconds * (1 + 0.001 * (step % 3)), 0.0)
            for step, loss in enumerate(losses)
        ]
        median = sorted(step.seconds for step in steps[config.warmup_steps :])[(STEPS - config.warmup_steps) // 2]
        epoch = EpochResult(
            epoch=0, samples=SAMPLES, top1_correct=correct, top5_correct=SAMPLES, loss=1.0, train_seconds=1.0,
            eval_seconds=0.1,
        )  # fmt: skip
        summary = RunSummary(
            metric_final=epoch.value, metric_best=epoch.value, top5_final=1.0, loss_final=1.0, epochs=[epoch],
            num_steps=STEPS, losses_sha256=hashlib.sha256(struct.pack(f"<{STEPS}d", *losses)).hexdigest(),
            warmup_steps=config.warmup_steps, step_seconds_median=median,
            samples_per_second=config.recipe.batch_size / median, epoch_seconds=1.0, peak_bytes=10_000,
        )  # fmt: skip
        record = RunRecord(
            cell=config.digest(), arm=config.arm, status="completed", config=config, host="here",
            started="2026-11-22T08:00:00.000+00:00",
            environment={"device": "cpu", "torch": "2.13.0", "processor": "a CPU"}, summary=summary,
        )  # fmt: skip
        return record.model_copy(update=values), steps

    return build


@pytest.fixture(scope="session")
def honest_folder(tmp_path_factory: pytest.TempPathFactory, run_of: Callable[..., Any]) -> Callable[..., Path]:
    """Write a run directory of fp32 and half with all that `compare` writes, without training; once for all who read
    it, and nobody changes it.
    """

    @cache
    def write(seeds: Sequence[int] = range(5), *, with_plan: bool = True) -> Path:
        plan = make_plan(RunConfig.model_validate({"device": "cpu", "recipe": {"epochs": 1}}), ["fp32", "half"], seeds)
        folder = tmp_path_factory.mktemp("run")
        for config in plan.cells:
            record, steps = run_of(config, TOP1[config.arm][config.recipe.seed])
            cell = RunDirectory(folder).cell(config)
            cell.mkdir(parents=True)
            write_record(record, cell)
            (cell / "steps.jsonl").write_text("".join(dump_json(step, indent=None) + "\n" for step in steps))
        if with_plan:
            cells = {label: cell.digest() for label, cell in zip(plan.order, plan.cells, strict=True)}
            stored = {"arms": plan.arms, "reference": "fp32", "command": "", "order": plan.order, "cells": cells}
            (folder / "plan.json").write_text(json.dumps(stored))
        return folder

    return write


@pytest.fixture
def run_folder(tmp_path: Path, honest_folder: Callable[..., Path]) -> Callable[..., Path]:
    """Return a copy of such a run directory, to change it."""

    def copied(seeds: Sequence[int] = range(5), *, with_plan: bool = True) -> Path:
        return Path(shutil.copytree(honest_folder(seeds, with_plan=with_plan), tmp_path / "run"))

    return copied


@pytest.fixture
def record_path() -> Callable[[Path, str, int], Path]:
    """Find the record of an arm and seed in a run directory."""

    def find(folder: Path, arm: str, seed: int) -> Path:
        for path in folder.glob("cells/*/record.json"):
            config = json.loads(path.read_text())["config"]
            if (config["arm"], config["recipe"]["seed"]) == (arm, seed):
                return path
        raise AssertionError(f"{folder} has no {arm}, seed {seed}")

    return find
