"""Charts of how arms learn: as differences to the reference of the same seed, or absolute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ampcompare.formatting import printable
from ampcompare.records.run import RunRecord
from ampcompare.report.html.charts import Chart, FigureTable, Series, View, band_series, stops_of
from ampcompare.report.html.curves import Band, Curve, differences, make_curve, over_seeds
from ampcompare.report.html.runs import ArmRuns, not_drawn
from ampcompare.report.html.shared_settings import listed

__all__ = ["NO_TRACE", "accuracy_by_epoch", "epochs_of", "learning_charts", "traced", "why_no_epoch"]

NO_TRACE = "These records were made before runs kept a trace of their steps; run the cells again with --force."
NO_EPOCH = "No epoch was evaluated."
MANY_DOTS = 30


@dataclass(frozen=True)
class _Quantity:
    """What a chart shows: the curve of a run, and how its values and its differences are written."""

    curve: Callable[[RunRecord], Curve]
    label: str
    gap_label: str
    decimals: int | None = None
    unit: str = ""
    gap_unit: str = ""
    can_log: bool = False
    dots: bool = True


def learning_charts(arms: Sequence[ArmRuns], reference: str, most: int) -> list[Chart]:
    """Return accuracy, validation loss and training loss, each with at most `most` points per curve."""
    return [
        _accuracy(arms, reference, most),
        _validation_loss(arms, reference, most),
        _training_loss(arms, reference, most),
    ]


def epochs_of(record: RunRecord, value: Callable[[Any], float]) -> Curve:
    """Return a value of each evaluation over the number of epochs before it."""
    return make_curve((epoch.epoch + 1, value(epoch)) for epoch in record.summary.epochs)


def _top1(record: RunRecord) -> Curve:
    return epochs_of(record, lambda epoch: 100 * epoch.top1)


def _loss_of_epochs(record: RunRecord) -> Curve:
    return epochs_of(record, lambda epoch: epoch.loss)


def traced(record: RunRecord, values: Sequence[float]) -> Curve:
    """Return values of the steps that a record kept; empty without a trace."""
    return make_curve(zip(record.trace.steps, values, strict=False)) if record.trace else Curve([], [])


def why_no_epoch(arm: ArmRuns) -> str:
    """Return why an arm has no evaluation."""
    if any(record.status == "diverged" for record in arm.records):
        step = min(record.summary.diverged_step or 0 for record in arm.records if record.status == "diverged")
        return f"diverged at step {step}, before the first evaluation"
    return "failed" if arm.row.failed else "no results"


def accuracy_by_epoch(arms: Sequence[ArmRuns], most: int) -> dict[int, Band]:
    """Return top-1 in percent after each epoch, over the seeds of each arm, by its place."""
    return {arm.place: over_seeds(map(_top1, arm.ran), most) for arm in arms}


def _views(arms: Sequence[ArmRuns], reference: str, most: int, quantity: _Quantity) -> tuple[list[View], str]:
    """Return the view of differences and the absolute one, and what to say about arms without a difference."""
    base = {r.config.recipe.seed: quantity.curve(r) for arm in arms if arm.row.arm == reference for r in arm.ran}
    absolute: list[Series] = []
    relative: list[Series] = []
    stops: list[Series] = []
    apart: list[Series] = []
    same: list[str] = []

    def drawn(arm: ArmRuns, band: Band) -> list[Series]:
        return band_series(arm, band, dots=quantity.dots and len(band.x) <= MANY_DOTS)

    for arm in arms:
        curves = [(record, quantity.curve(record)) for record in arm.ran]
        absolute += drawn(arm, over_seeds((one for _, one in curves), most))
        stops += stops_of(arm, curves)
        if arm.row.arm == reference:
            continue
        paired = [
            (run, differences(one, base[seed])) for run, one in curves if (seed := run.config.recipe.seed) in base
        ]
        gap = over_seeds((one for _, one in paired), most)
        if gap.x and gap.is_constant and gap.mean[0] == 0:
            same.append(arm.name)
            continue
        relative += drawn(arm, gap)
        apart += stops_of(arm, paired)
    of, decimals = printable(reference, 40), quantity.decimals
    gaps = View(
        "Difference", f"{quantity.gap_label} to {of}", relative, apart, signed=True, decimals=decimals,
        unit=quantity.gap_unit,
    )  # fmt: skip
    log = "can" if quantity.can_log else ""
    values = View("Absolute", quantity.label, absolute, stops, decimals=decimals, unit=quantity.unit, log=log)
    equal = f" Equal to {of} at every point, and not drawn as a difference: {listed(same)}." if same else ""
    return [gaps, values], equal


def _longest(views: Sequence[View]) -> int:
    return max((len(series["x"]) for view in views for series in view.series), default=0)


def _drawn(views: Sequence[View]) -> set[int]:
    return {series["a"] for view in views for series in view.series}


def _accuracy(arms: Sequence[ArmRuns], reference: str, most: int) -> Chart:
    top1 = _Quantity(_top1, "top-1 %", "\u0394 top-1 (pp)", 2, " %", " pp")
    views, same = _views(arms, reference, most, top1)
    bands = accuracy_by_epoch(arms, most)
    sentence = ""
    if not _longest(views):
        sentence = NO_EPOCH
    elif _longest(views) == 1:
        sentence = "Each run was evaluated once, at its end: the differences above are all there is."
    return Chart(
        "accuracy",
        "Validation accuracy",
        f"Top-1 after each epoch, paired by seed.{not_drawn(arms, _drawn(views), why_no_epoch)}{same}",
        "epoch",
        views,
        _by_epoch([(arm, bands[arm.place]) for arm in arms]),
        sentence,
    )


def _by_epoch(bands: Sequence[tuple[ArmRuns, Band]]) -> FigureTable | None:
    """Return means and ranges at up to six epochs that every complete curve has."""
    longest: Sequence[float] = max((band.x for _, band in bands), key=len, default=[])
    if not longest:
        return None
    last = len(longest) - 1
    places = sorted({round(number * last / 5) for number in range(6)})
    rows = []
    for arm, band in bands:
        cells = []
        for place in places:
            if place >= len(band.x):
                cells.append("-")
            elif band.low[place] < band.high[place]:
                cells.append(f"{band.mean[place]:.2f} ({band.low[place]:.2f} to {band.high[place]:.2f})")
            else:
                cells.append(f"{band.mean[place]:.2f}")
        rows.append([arm.name, *cells])
    return FigureTable(["arm", *(f"epoch {longest[place]:g}" for place in places)], rows)


def _validation_loss(arms: Sequence[ArmRuns], reference: str, most: int) -> Chart:
    loss = _Quantity(_loss_of_epochs, "loss", "\u0394 loss", can_log=True)
    views, same = _views(arms, reference, most, loss)
    few = "" if _longest(views) > 1 else "Each run was evaluated once; the table of runs has the losses."
    return Chart(
        "validation-loss",
        "Validation loss",
        f"Mean over the validation set after each epoch, paired by seed.{same}",
        "epoch",
        views,
        sentence=few if _longest(views) else NO_EPOCH,
    )


def _training_loss(arms: Sequence[ArmRuns], reference: str, most: int) -> Chart:
    loss = _Quantity(_before_divergence, "loss", "\u0394 loss", can_log=True, dots=False)
    views, same = _views(arms, reference, most, loss)
    why = _reason_without_loss
    return Chart(
        "training-loss",
        "Training loss",
        f"Loss of single steps, evenly chosen, paired by seed.{not_drawn(arms, _drawn(views), why)}{same}",
        "step",
        views,
        sentence="" if _longest(views) else NO_TRACE,
    )


def _reason_without_loss(arm: ArmRuns) -> str:
    return "no finite loss" if any(record.trace for record in arm.ran) else "no trace"


def _before_divergence(record: RunRecord) -> Curve:
    """Return the losses up to the step at which the run diverged; its end is where the cross is drawn."""
    curve = traced(record, record.trace.losses if record.trace else [])
    end = record.summary.diverged_step
    if end is None or not curve.x:
        return curve
    kept = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if x <= end]
    return make_curve([*kept, (end, kept[-1][1])] if kept and kept[-1][0] < end else kept)
