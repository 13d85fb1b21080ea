"""Verdicts on figures that someone else measured: a table of runs in, a comparison without records out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from ampcompare.analysis.criteria import Criteria
from ampcompare.analysis.csv_table import ResultsTable, Run, read_table
from ampcompare.analysis.margins import resolve_margin
from ampcompare.analysis.recommendation import recommend
from ampcompare.analysis.statistics import (
    MIN_PAIRS,
    Effect,
    Margin,
    Verdict,
    decide,
    known_spread,
    min_resolvable_spread,
    paired,
    unpaired,
    wilson,
)
from ampcompare.analysis.step_time import TIME_FLOOR, ratio_of
from ampcompare.errors import ConfigError
from ampcompare.records.comparison import ArmSummary, Comparison

__all__ = ["EXAMPLE_SD", "example_table", "judge"]

EXAMPLE_SD = 0.18  # the largest published standard deviation (conservative)


@dataclass(frozen=True)
class _Group:
    """The runs of one arm with one set of settings."""

    label: str
    settings: dict[str, str]
    runs: tuple[Run, ...]

    @property
    def diverged(self) -> int:
        return sum(run.diverged for run in self.runs)


def example_table() -> ResultsTable:
    """Return a published table of ResNet-50 on ImageNet, one run per arm."""
    text = (files("ampcompare.analysis") / "data" / "resnet50.csv").read_text(encoding="utf-8")
    return read_table(text, "the example")


def judge(
    table: ResultsTable, *, reference: str | None = None, sd: float | None = None, terms: Criteria | None = None
) -> Comparison:
    """Compare every arm of a table with one of them.

    Args:
        reference: an arm; by default fp32, or else the first.
        sd: standard deviation over seeds in points that is known from elsewhere, used if there are fewer than three
            runs.

    Raises:
        ConfigError: no such arm, or a standard deviation that is none.
    """
    terms = terms or Criteria()
    if sd is not None and not (math.isfinite(sd) and sd > 0):
        raise ConfigError(f"the spread over seeds is {sd}; give the standard deviation in points, such as 0.18")
    groups = _groups(table.runs)
    base = _reference(groups, reference)
    others = [group for group in groups if group is not base]
    accuracy = {group.label: _accuracy(group, base, sd, table.resolution) for group in groups}
    times = {group.label: _effect(group, base, _log_speed, TIME_FLOOR, None) for group in groups}
    open_arms = [group for group in others if not _closed(group, base)]
    margin = resolve_margin(
        terms.rule, [100 * share for run in base.runs if (share := _share(run)) is not None],
        resolution=table.resolution, reference=base.label, sd=sd, least=True,
    )  # fmt: skip
    verdicts = _verdicts(open_arms, accuracy, margin.of_share())
    time_verdicts = _verdicts([group for group in others if not _differs(group, base)], times, terms.time())
    rows = []
    for group in groups:
        verdict = verdicts.get(group.label, Verdict(_diverged(group) if group is base else _closed(group, base)))
        timed = time_verdicts.get(group.label, Verdict())
        if timed.word == "" and group is not base and times[group.label] is not None:
            timed = Verdict(_differs(group, base))
        rows.append(_row(group, base, accuracy[group.label], times[group.label], verdict, timed))
    seeds = sorted({int(run.seed) for run in table.runs if run.seed.isdigit()})
    return Comparison(
        command="",
        reference=base.label,
        seeds=seeds,
        margin=margin.points,
        margin_rule=str(terms.margin),
        margin_reason=margin.reason,
        time_margin=terms.time_margin,
        prefer=terms.prefer,
        arms=rows,
        reading=[recommend(rows, base.label, terms)] if others else [],
        records=[],
    )


def _groups(runs: Sequence[Run]) -> list[_Group]:
    together: dict[tuple[str, tuple[tuple[str, str], ...]], list[Run]] = {}
    for run in runs:
        together.setdefault((run.arm, run.settings), []).append(run)
    arms = [arm for arm, _ in together]
    groups = []
    for (arm, settings), mine in together.items():
        alone = arms.count(arm) == 1
        label = arm if alone else f"{arm} {' '.join(f'{name}={value}' for name, value in settings)}"
        groups.append(_Group(label, dict(settings), tuple(mine)))
    return groups


def _reference(groups: Sequence[_Group], wanted: str | None) -> _Group:
    if wanted is None:
        return next((group for group in groups if group.label == "fp32"), groups[0])
    fit = [group for group in groups if group.label == wanted] or [
        group for group in groups if group.runs[0].arm == wanted
    ]
    if len(fit) != 1:
        known = ", ".join(repr(group.label) for group in fit or groups)
        raise ConfigError(f"{'several arms are' if fit else 'there is no arm'} {wanted!r}; choose one of {known}")
    return fit[0]


def _differs(group: _Group, base: _Group) -> str:
    apart = [
        f"{name} {value or 'none'}, not {base.settings.get(name) or 'none'}"
        for name, value in group.settings.items()
        if value != base.settings.get(name)
    ]
    return f"not comparable ({'; '.join(apart)})" if apart else ""


def _diverged(group: _Group) -> str:
    return f"diverged {group.diverged}/{len(group.runs)}" if group.diverged else ""


def _closed(group: _Group, base: _Group) -> str:
    """Return the verdict on accuracy that needs no test."""
    return _diverged(group) or _differs(group, base)


def _accuracy(group: _Group, base: _Group, sd: float | None, resolution: float) -> Effect | None:
    """Return the effect on top-1 as a share."""
    floor = min_resolvable_spread(1) * resolution / 100
    return _effect(group, base, _share, floor, None if sd is None else sd / 100)


def _share(run: Run) -> float | None:
    return None if run.accuracy is None else run.accuracy / 100


def _log_speed(run: Run) -> float | None:
    return None if run.seconds is None else -math.log(run.seconds)


def _effect(
    group: _Group, base: _Group, value: Callable[[Run], float | None], floor: float, sd: float | None
) -> Effect | None:
    """Pair by seed where both have seeds in common, else compare the two samples."""
    here = [(run.seed, number) for run in group.runs if (number := value(run)) is not None]
    there = [(run.seed, number) for run in base.runs if (number := value(run)) is not None]
    if not here or not there:
        return None
    partners = {seed: number for seed, number in there if seed}
    pairs = [(number, partners[seed]) for seed, number in here if seed in partners]
    if pairs:
        arm, reference = [a for a, _ in pairs], [b for _, b in pairs]
    else:
        arm, reference = [number for _, number in here], [number for _, number in there]
    if sd is not None and min(len(arm), len(reference)) < MIN_PAIRS:
        return known_spread(arm, reference, sd)
    return paired(arm, reference, floor) if pairs else unpaired(arm, reference, floor)


def _verdicts(groups: Sequence[_Group], effects: dict[str, Effect | None], margin: Margin) -> dict[str, Verdict]:
    verdicts = decide([effects[group.label] for group in groups], margin)
    return {group.label: verdict for group, verdict in zip(groups, verdicts, strict=True)}


def _row(
    group: _Group, base: _Group, accuracy: Effect | None, time: Effect | None, verdict: Verdict, timed: Verdict
) -> ArmSummary:
    points = [share for run in group.runs if (share := _share(run)) is not None]
    peak, base_peak = _peak(group), _peak(base)
    rate = wilson(group.diverged, len(group.runs)) if group.diverged else (None, None)
    return ArmSummary(
        arm=group.label,
        engine=None,
        half=None,
        lr=math.nan,
        seeds=sorted(int(run.seed) for run in group.runs if run.seed.isdigit()),
        completed=len(group.runs) - group.diverged,
        diverged=group.diverged,
        failed=0,
        top1_mean=statistics.fmean(points) if points else None,
        top1_sd=statistics.stdev(points) if len(points) > 1 else None,
        top1_best=max(points, default=None),
        peak_bytes=peak,
        time_ratio=ratio_of(-time.mean) if time else None,
        time_ratio_low=None if timed.high is None else ratio_of(-timed.high),
        time_ratio_high=None if timed.low is None else ratio_of(-timed.low),
        time_ratio_confidence=timed.confidence,
        time_verdict=timed.word,
        top1_difference=accuracy.mean if accuracy else None,
        top1_difference_low=verdict.low,
        top1_difference_high=verdict.high,
        top1_difference_confidence=verdict.confidence,
        accuracy_verdict=verdict.word,
        pairs=accuracy.pairs if accuracy else 0,
        memory_difference=None if peak is None or base_peak is None or group is base else peak - base_peak,
        diverged_low=rate[0],
        diverged_high=rate[1],
        status=_diverged(group) or "ok",
    )


def _peak(group: _Group) -> int | None:
    return max((round(run.mebibytes * 2**20) for run in group.runs if run.mebibytes is not None), default=None)
