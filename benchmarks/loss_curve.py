"""Error rates of the verdicts on the training loss over the last fifth of the steps.

    python benchmarks/loss_curve.py [--replicates 4000] [--comparisons 60] [--out docs/benchmarks/loss_curve]

Simulated curves fall as a power of the step. Their logarithm has three kinds of noise: that of the batches, which both
runs of a seed share; that of a run's own path, autocorrelated from step to step (AR(1) with `phi`); and what a run as a
whole is off by, which no number of steps averages out. `own` is its standard deviation in percent. Arms share the
reference. The columns: how often one of equal arms is called better or worse; how often it would be if the steps were
taken for independent samples; how often arms that are worse by the margin of 1 % are said to keep the loss; how often
equal arms are shown to keep it; and how often arms that are worse by 2 % are called worse.

The real runs train fp32 under two names on a small language model. In `A/A` the second name has seeds of its own, which
is more noise than a pair has that shares its batches. In `planted` it has the same seeds and 0.9 of the learning rate.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
import numpy as np
from aa_tasks import NAMES, OWN_SEEDS, RECIPES
from results import write_results
from scipy.signal import lfilter
from scipy.stats import binomtest, ttest_1samp
from tabulate import tabulate

from ampcompare.experiment.launch.worker.cell import run_cell
from ampcompare.runs.analysis.inference.criteria import Criteria
from ampcompare.runs.analysis.inference.effect import ERROR_RATE
from ampcompare.runs.analysis.inference.verdict import decide
from ampcompare.runs.analysis.summary import summarize
from ampcompare.runs.analysis.verdicts.loss_tail import tail_loss
from ampcompare.runs.records.run import RunRecord
from ampcompare.runs.records.summary import loss_tail
from ampcompare.runs.settings.config import RunConfig

STEPS = 500
MARGIN = 0.01
PLANTED = 0.02
LM = RECIPES["lm"]
SLOWER = 0.9
BATCH, PATH = 0.05, 0.02  # standard deviations of the logarithm
WINNER = ("better", "worse")
KEEPS = ("identical", "equivalent", "non-inferior", "better")
Curves = "np.ndarray[Any, Any]"


@dataclass(frozen=True)
class Scenario:
    """What is simulated.

    Attributes:
        seeds: pairs.
        arms: without the reference.
        phi: of the noise of a path, from step to step.
        own: standard deviation of what a run is off by, in percent.
    """

    seeds: int
    arms: int = 1
    phi: float = 0.95
    own: float = 0.5


SCENARIOS = [
    *(Scenario(seeds, own=own) for own in (0.1, 0.5, 1.0) for seeds in (3, 5, 10)),
    *(Scenario(seeds, phi=0.99) for seeds in (3, 5)),
    *(Scenario(seeds, arms=8) for seeds in (3, 5)),
]


def _curves(case: Scenario, worse: float, generator: np.random.Generator) -> Curves:
    """Return losses (arms + 1, seeds, steps), those of the reference first; arms are worse by a share."""
    shape = (case.arms + 1, case.seeds)
    fall = np.log(1.5 + 3 * np.arange(1, STEPS + 1) ** -0.5)
    batches = BATCH * generator.normal(size=(1, case.seeds, STEPS))
    innovations = math.sqrt(1 - case.phi**2) * PATH * generator.normal(size=(*shape, STEPS))
    innovations[..., 0] /= math.sqrt(1 - case.phi**2)
    paths = lfilter([1], [1, -case.phi], innovations)
    whole = case.own / 100 * generator.normal(size=(*shape, 1))
    logs = fall + batches + paths + whole
    logs[1:] += math.log1p(worse)
    return np.exp(logs)


def _words(curves: Curves, template: RunRecord) -> list[str]:
    runs = [
        [
            template.model_copy(
                update={"summary": template.summary.model_copy(update={"num_steps": STEPS, **loss_tail(losses)})}
            )
            for losses in arm.tolist()
        ]
        for arm in curves
    ]
    effects = [tail_loss(list(zip(arm, runs[0], strict=True))).effect for arm in runs[1:]]
    return [verdict.word for verdict in decide(effects, Criteria().loss(), ERROR_RATE)]


def _by_steps(curves: Curves) -> bool:
    """Return whether a t test over all steps of all seeds, as if independent, finds one of the arms to differ."""
    tail = np.log(curves[..., -(STEPS // 5) :])
    differences = (tail[1:] - tail[0]).reshape(len(curves) - 1, -1)
    return bool((ttest_1samp(differences, 0, axis=1).pvalue < ERROR_RATE / len(differences)).any())


def _simulated(case: Scenario, replicates: int, template: RunRecord) -> dict[str, str]:
    counts: Counter[str] = Counter()
    generator = np.random.default_rng([case.seeds, case.arms, round(100 * case.phi), round(100 * case.own)])
    for _ in range(replicates):
        equal = _curves(case, 0.0, generator)
        words = _words(equal, template)
        counts["winner"] += any(word.startswith(WINNER) for word in words)
        counts["shown"] += sum(word.startswith(KEEPS) for word in words)
        counts["steps"] += _by_steps(equal)
        counts["kept"] += any(word.startswith(KEEPS) for word in _words(_curves(case, MARGIN, generator), template))
        found = _words(_curves(case, PLANTED, generator), template)
        counts["found"] += sum(word.startswith("worse") for word in found)
    arms = replicates * case.arms
    return {
        "seeds": str(case.seeds),
        "arms": str(case.arms + 1),
        "phi": f"{case.phi:g}",
        "own %": f"{case.own:g}",
        "A/A: winner or loser %": f"{100 * counts['winner'] / replicates:.1f}",
        "by steps %": f"{100 * counts['steps'] / replicates:.1f}",
        "at the margin: kept %": f"{100 * counts['kept'] / replicates:.1f}",
        "A/A: shown to keep %": f"{100 * counts['shown'] / arms:.1f}",
        "2 % worse: found %": f"{100 * counts['found'] / arms:.1f}",
        "replicates": str(replicates),
    }


def _record(seed: int, name: str, folder: Path, *, lr: float | None = None, own_seed: int | None = None) -> RunRecord:
    """Train one run; the record has the seed of its pair and the settings of the first name."""
    recipe = {**LM, "seed": seed if own_seed is None else own_seed}
    named = RunConfig.model_validate({"recipe": {**LM, "seed": seed}, "device": "cpu"})
    trained = recipe if lr is None else {**recipe, "optimizer": {**recipe["optimizer"], "lr": lr}}
    record = run_cell(RunConfig.model_validate({"recipe": trained, "device": "cpu"}), folder)
    return record.model_copy(update={"arm": name, "config": named})


def _real(kind: str, comparisons: int, seeds: int) -> dict[str, str]:
    words: Counter[str] = Counter()
    differences = []
    for number in range(comparisons):
        records = []
        with tempfile.TemporaryDirectory() as folder:
            for seed in range(number * seeds, (number + 1) * seeds):
                records.append(_record(seed, NAMES[0], Path(folder, f"{seed}-0")))
                other = {"own_seed": seed + OWN_SEEDS} if kind == "A/A" else {"lr": SLOWER * LM["optimizer"]["lr"]}
                records.append(_record(seed, NAMES[1], Path(folder, f"{seed}-1"), **other))
        row = summarize(records, arms=NAMES, reference=NAMES[0]).arms[1]
        words[row.loss_verdict.partition(" (")[0]] += 1
        differences.append(100 * (row.loss_difference or 0.0))
        if not (number + 1) % 10:
            click.echo(f"[{kind} {number + 1}/{comparisons}]", err=True)
    called = words["better"] + words["worse"]
    bounds = binomtest(called, comparisons).proportion_ci(0.95, method="wilson")
    return {
        "runs": kind,
        "comparisons": str(comparisons),
        "seeds": str(seeds),
        "mean difference %": f"{statistics.fmean(differences):+.2f}",
        "its sd %": f"{statistics.stdev(differences):.2f}",
        "better or worse": f"{called} ({100 * called / comparisons:.1f} %)",
        "95 % interval": f"{100 * bounds.low:.1f} to {100 * bounds.high:.1f} %",
        "all verdicts": ", ".join(f"{word} {count}" for word, count in words.most_common()),
    }


@click.command()
@click.option("--replicates", default=4000, show_default=True)
@click.option("--comparisons", default=60, show_default=True, help="of real runs, of each kind; 0 for none")
@click.option("--seeds", default=3, show_default=True, help="pairs in each comparison of real runs")
@click.option("--out", default=None, help="write OUT.md")
def main(replicates: int, comparisons: int, seeds: int, out: str | None) -> None:
    """Count false words, and those that should be there."""
    template = RunRecord(cell="0", arm="fp32", status="completed", config=RunConfig())
    rows: Sequence[dict[str, str]] = [_simulated(case, replicates, template) for case in SCENARIOS]
    parts = ["## Simulated", tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)]
    click.echo(parts[-1])
    if comparisons:
        real = [_real(kind, comparisons, seeds) for kind in ("A/A", "planted")]
        parts += ["## Real runs", tabulate(real, headers="keys", tablefmt="github", disable_numparse=True)]
        click.echo(parts[-1])
    if out is not None:
        facts = f"{STEPS} steps; standard error of a rate of 5 %: {100 * math.sqrt(0.0475 / replicates):.1f} points."
        write_results(out, "Error rates of verdicts on the training loss", __doc__, facts, "\n\n".join(parts))


if __name__ == "__main__":
    main()
