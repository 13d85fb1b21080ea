"""How often the step times of one run are called invalid, by what the machine does to them.

    python -m benchmarks.rates validity [--jobs 2] [--out docs/benchmarks/validity]

Simulated step times in units of an undisturbed step, with normal noise of 1 % unless said otherwise. `compare` is the
rule of the package: more than a quarter of the steps are outliers, or the halves differ. For comparison, `count`: more
than a tenth of the steps lie beyond 3 scaled MADs; `variance`: such steps explain more than half of the variance. The
last column is how far the median of a run is off, its standard deviation included (root mean square).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ampcompare.results.analysis.effects.step_time import invalid_reason
from ampcompare.results.records.run import RunRecord, RunSummary, SystemReadings
from ampcompare.settings.config import RunConfig
from ampcompare.training.run_summary import halves, outlier_share
from benchmarks.rates.study import Row, Study, Table

__all__ = ["STUDY"]

Floats = NDArray[np.float64]
STEPS = (45, 100, 500)
CONFIG = RunConfig()


def _some(generator: np.random.Generator, runs: int, steps: int, share: float, factor: float) -> Floats:
    """Return factors of single steps at random: `factor` for a share of them, 1 for the others."""
    return np.where(generator.random((runs, steps)) < share, factor, 1.0)


def _noise(generator: np.random.Generator, runs: int, steps: int, sd: float = 0.01) -> Floats:
    return generator.normal(1, sd, (runs, steps))


def _slow_end(steps: int, share: float) -> Floats:
    return np.where(np.arange(steps) >= steps * (1 - share), 1.3, 1.0)[None, :]


Shape = Callable[[np.random.Generator, int, int], Floats]
FIT: dict[str, Shape] = {
    "normal noise": _noise,
    "steady GPU (0.05 %), 15 % of steps half a percent slower": lambda g, r, n: (
        _noise(g, r, n, 0.0005) * _some(g, r, n, 0.15, 1.005)
    ),
    "8 % of steps skipped, a third cheaper": lambda g, r, n: _noise(g, r, n) * _some(g, r, n, 0.08, 0.67),
    "8 % of steps half again as long": lambda g, r, n: _noise(g, r, n) * _some(g, r, n, 0.08, 1.5),
    "floor and exponential noise of 10 %": lambda g, r, n: 1 + g.exponential(0.1, (r, n)),
    "lognormal, sigma 0.1": lambda g, r, n: g.lognormal(0, 0.1, (r, n)),
    "lognormal, sigma 1": lambda g, r, n: g.lognormal(0, 1, (r, n)),
}
UNFIT: dict[str, Shape] = {
    "60 % of steps at one speed, 40 % a tenth slower": lambda g, r, n: _noise(g, r, n) * _some(g, r, n, 0.4, 1.1),
    "drift from 0 to +10 %": lambda g, r, n: _noise(g, r, n) * np.linspace(1, 1.1, n)[None, :],
    "drift from 0 to +30 %": lambda g, r, n: _noise(g, r, n) * np.linspace(1, 1.3, n)[None, :],
    "drift from 0 to +30 %, noise of 5 %": lambda g, r, n: _noise(g, r, n, 0.05) * np.linspace(1, 1.3, n)[None, :],
    "+30 % in the second half": lambda g, r, n: _noise(g, r, n) * _slow_end(n, 0.5),
    "+30 % in the second half, noise of 5 %": lambda g, r, n: _noise(g, r, n, 0.05) * _slow_end(n, 0.5),
    "+30 % in the last 30 % of steps": lambda g, r, n: _noise(g, r, n) * _slow_end(n, 0.3),
    "+30 % in the last 20 % of steps": lambda g, r, n: _noise(g, r, n) * _slow_end(n, 0.2),
}
SHAPES = FIT | UNFIT


def _is_invalid(seconds: Sequence[float]) -> bool:
    """Return what `compare` says of a run with these step times, on a machine without any other fault."""
    two = halves(seconds)
    readings = SystemReadings(
        timed_steps=len(seconds),
        outlier_share=outlier_share(seconds),
        first_half_seconds=two and two.first,
        second_half_seconds=two and two.second,
        halves_error=two and two.error,
    )
    record = RunRecord(
        cell="", arm="fp32", status="completed", config=CONFIG, summary=RunSummary(num_steps=len(seconds)),
        readings=readings,
    )  # fmt: skip
    return bool(invalid_reason(record))


def _outliers(seconds: Floats) -> NDArray[np.bool_]:
    deviations = np.abs(seconds - np.median(seconds, axis=1, keepdims=True))
    return np.asarray(deviations > 3 * 1.4826 * np.median(deviations, axis=1, keepdims=True))


def _share_explained(seconds: Floats, outliers: NDArray[np.bool_]) -> Floats:
    """Return the share of the variance of each run that its outliers explain."""
    others = np.ma.array(seconds, mask=outliers)
    return np.asarray(1 - others.var(axis=1) * (1 - outliers.mean(axis=1)) / seconds.var(axis=1))


def _row(cell: tuple[str, int], replicates: int) -> Row:
    name, steps = cell
    shape = SHAPES[name]
    seconds = np.maximum(shape(np.random.default_rng(0), replicates, steps), 1e-3)
    outliers = _outliers(seconds)
    rates = {
        "compare": statistics.fmean(map(_is_invalid, seconds.tolist())),
        "count": float((outliers.mean(axis=1) > 0.1).mean()),
        "variance": float((_share_explained(seconds, outliers) > 0.5).mean()),
    }
    undisturbed = np.median(shape(np.random.default_rng(1), 1, 100_000)) if name in FIT else 1.0
    off = math.sqrt(float((np.log(np.median(seconds, axis=1) / undisturbed) ** 2).mean()))
    return {
        "machine": "fit" if name in FIT else "unfit",
        "step times": name,
        "steps": str(steps),
        **{rule: f"{100 * rate:.0f} %" for rule, rate in rates.items()},
        "median off by": f"{100 * off:.1f} %",
    }


STUDY = Study(
    title="Invalid step times",
    about=__doc__,
    tables=(
        Table("validity", [(name, steps) for name in SHAPES for steps in STEPS], _row, by=("machine", "step times")),
    ),
    replicates=2000,
)
