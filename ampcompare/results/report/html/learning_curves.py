"""Charts of how arms learn: as differences to the reference of the same seed, or absolute."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ampcompare.base.formatting import printable_line
from ampcompare.results.analysis.conclusions.phrases import capitalize_sentence
from ampcompare.results.analysis.pairing.scores import metric_of_runs
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.metric import Metric
from ampcompare.results.records.run import RunRecord
from ampcompare.results.report.document import Table
from ampcompare.results.report.html.charts import (
    Band,
    Chart,
    ChartView,
    Curve,
    Series,
    band_over_seeds,
    band_series,
    curve_of_differences,
    divergence_marks,
    make_curve,
)
from ampcompare.results.report.html.runs import ArmRuns, arms_not_drawn_text, join_first_names

NO_TRACE = (
    "These records were made before runs kept a trace of their steps; run the cells again with --force."
)
NO_EPOCH = "No epoch was evaluated."
MANY_DOTS = 30


@dataclass(frozen=True)
class _ChartQuantity:
    """What a chart shows: the curve of a run, and how its values and its differences are written."""

    curve: Callable[[RunRecord], Curve]
    label: str
    gap_label: str
    decimals: int | None = None
    unit: str = ""
    gap_unit: str = ""
    can_log: bool = False
    dots: bool = True


def learning_charts(arms: Sequence[ArmRuns], reference: str, max_points: int) -> list[Chart]:
    """Return the metric of verdicts, validation loss and training loss.

    Args:
        max_points: of each curve.
    """
    return [
        _metric_chart(arms, reference, max_points),
        _validation_loss_chart(arms, reference, max_points),
        _training_loss_chart(arms, reference, max_points),
    ]


def curve_by_epoch(record: RunRecord, value: Callable[[EpochResult], float | None]) -> Curve:
    """Return a value of each evaluation that has it over the number of epochs before it."""
    points = ((epoch.epoch + 1, value(epoch)) for epoch in record.summary.epochs)
    return make_curve((number, y) for number, y in points if y is not None)


def _metric_curve(record: RunRecord) -> Curve:
    return curve_by_epoch(record, lambda epoch: record.metric.factor * epoch.value)


def trace_curve(record: RunRecord, values: Sequence[float]) -> Curve:
    """Return values of the steps that a record kept; empty without a trace."""
    return make_curve(zip(record.trace.steps, values, strict=False)) if record.trace else Curve([], [])


def why_no_evaluation(arm: ArmRuns) -> str:
    """Return why an arm has no evaluation."""
    if any(record.status == "diverged" for record in arm.records):
        step = min(record.summary.diverged_step or 0 for record in arm.records if record.status == "diverged")
        return f"diverged at step {step}, before the first evaluation"
    return "failed" if arm.row.failed else "no results"


def metric_bands_by_arm_index(arms: Sequence[ArmRuns], max_points: int) -> dict[int, Band]:
    """Return the metric as it is shown after each epoch, over the seeds of each arm, by its index."""
    return {arm.index: band_over_seeds(map(_metric_curve, arm.records_that_ran), max_points) for arm in arms}


def common_metric_of_arms(arms: Sequence[ArmRuns]) -> Metric:
    """Return the metric that the runs of these arms share."""
    return metric_of_runs(record for arm in arms for record in arm.records)


def _views_and_missing_text_of_quantity(
    arms: Sequence[ArmRuns], reference: str, max_points: int, quantity: _ChartQuantity
) -> tuple[list[ChartView], str]:
    """Return the view of differences and the absolute one, and what to say about arms without a difference."""
    base = {
        r.config.recipe.seed: quantity.curve(r)
        for arm in arms
        if arm.row.arm == reference
        for r in arm.records_that_ran
    }
    absolute: list[Series] = []
    relative: list[Series] = []
    stops: list[Series] = []
    apart: list[Series] = []
    same: list[str] = []

    def series_of(arm: ArmRuns, band: Band) -> list[Series]:
        return band_series(arm, band, dots=quantity.dots and len(band.x) <= MANY_DOTS)

    for arm in arms:
        curves = [(record, quantity.curve(record)) for record in arm.records_that_ran]
        absolute += series_of(arm, band_over_seeds((one for _, one in curves), max_points))
        stops += divergence_marks(arm, curves)
        if arm.row.arm == reference:
            continue
        paired = [
            (run, curve_of_differences(one, base[seed]))
            for run, one in curves
            if (seed := run.config.recipe.seed) in base
        ]
        gap = band_over_seeds((one for _, one in paired), max_points)
        if gap.x and not any((*gap.low, *gap.high)):
            same.append(arm.name)
            continue
        relative += series_of(arm, gap)
        apart += divergence_marks(arm, paired)
    of, decimals = printable_line(reference, 40), quantity.decimals
    gaps = ChartView(
        "Difference", f"{quantity.gap_label} to {of}", relative, apart, signed=True, decimals=decimals,
        unit=quantity.gap_unit,
    )  # fmt: skip
    values = ChartView("Absolute", quantity.label, absolute, stops, decimals=decimals, unit=quantity.unit)
    log = [replace(values, name="Logarithmic", log=10)] if quantity.can_log else []
    equal = (
        f" Equal to {of} at every point, and not drawn as a difference: {join_first_names(same)}."
        if same
        else ""
    )
    return [gaps, values, *log], equal


def _longest_curve_length(views: Sequence[ChartView]) -> int:
    return max((len(series["x"]) for view in views for series in view.series), default=0)


def _arms_in_views(views: Sequence[ChartView]) -> set[int]:
    return {series["a"] for view in views for series in view.series}


def _metric_chart(arms: Sequence[ArmRuns], reference: str, max_points: int) -> Chart:
    metric = common_metric_of_arms(arms)
    head, name = printable_line(metric.column_head), printable_line(metric.name)
    unit = f" {printable_line(metric.unit)}" if metric.unit else ""
    # A curve's differences are those of the values that it shows, in their unit.
    gap_unit = " pp" if metric.factor == 100 else unit
    gap_head = f"\u0394 {name}{f' ({gap_unit.strip()})' if gap_unit and gap_unit.strip() not in name else ''}"
    views, same = _views_and_missing_text_of_quantity(
        arms,
        reference,
        max_points,
        _ChartQuantity(_metric_curve, head, gap_head, metric.decimals, unit, gap_unit),
    )
    bands = metric_bands_by_arm_index(arms, max_points)
    sentence = ""
    if not _longest_curve_length(views):
        sentence = NO_EPOCH
    elif _longest_curve_length(views) == 1:
        sentence = "Each run was evaluated once, at its end, so the differences above are all there is."
    return Chart(
        "accuracy",
        f"Validation {metric.quality_noun}",
        f"{capitalize_sentence(name)} after each epoch, paired by seed."
        f"{arms_not_drawn_text(arms, _arms_in_views(views), why_no_evaluation)}{same}",
        "epoch",
        views,
        _epoch_table([(arm, bands[arm.index]) for arm in arms], metric.decimals),
        sentence,
    )


def _epoch_table(bands: Sequence[tuple[ArmRuns, Band]], decimals: int) -> Table | None:
    """Return means and ranges at up to six epochs that every complete curve has."""
    longest: Sequence[float] = max((band.x for _, band in bands), key=len, default=[])
    if not longest:
        return None
    last = len(longest) - 1
    indices = sorted({round(number * last / 5) for number in range(6)})
    rows = []
    for arm, band in bands:
        cells = []
        for index in indices:
            if index >= len(band.x):
                cells.append("-")
            elif band.low[index] < band.high[index]:
                mean, low, high = (f"{side[index]:.{decimals}f}" for side in (band.mean, band.low, band.high))
                cells.append(f"{mean} ({low} to {high})")
            else:
                cells.append(f"{band.mean[index]:.{decimals}f}")
        rows.append([arm.name, *cells])
    return Table.from_rows(["arm", *(f"epoch {longest[index]:g}" for index in indices)], rows)


def _validation_loss_chart(arms: Sequence[ArmRuns], reference: str, max_points: int) -> Chart:
    loss = _ChartQuantity(
        lambda record: curve_by_epoch(record, lambda epoch: epoch.loss), "loss", "\u0394 loss", can_log=True
    )
    views, same = _views_and_missing_text_of_quantity(arms, reference, max_points, loss)
    few = (
        ""
        if _longest_curve_length(views) > 1
        else "Each run was evaluated once; the table of runs has the losses."
    )
    return Chart(
        "validation-loss",
        "Validation loss",
        f"Mean over the validation set after each epoch, paired by seed.{same}",
        "epoch",
        views,
        sentence=few if _longest_curve_length(views) else NO_EPOCH,
    )


def _training_loss_chart(arms: Sequence[ArmRuns], reference: str, max_points: int) -> Chart:
    loss = _ChartQuantity(_losses_before_divergence, "loss", "\u0394 loss", can_log=True, dots=False)
    views, same = _views_and_missing_text_of_quantity(arms, reference, max_points, loss)
    why = _reason_without_loss
    return Chart(
        "training-loss",
        "Training loss",
        "Loss of single steps, evenly chosen, paired by "
        f"seed.{arms_not_drawn_text(arms, _arms_in_views(views), why)}{same}",
        "step",
        views,
        sentence="" if _longest_curve_length(views) else NO_TRACE,
    )


def _reason_without_loss(arm: ArmRuns) -> str:
    return "no finite loss" if any(record.trace for record in arm.records_that_ran) else "no trace"


def _losses_before_divergence(record: RunRecord) -> Curve:
    """Return the losses up to the step at which the run diverged; its end is where the cross is drawn."""
    curve = trace_curve(record, record.trace.losses if record.trace else [])
    end = record.summary.diverged_step
    if end is None or not curve.x:
        return curve
    kept = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if x <= end]
    return make_curve([*kept, (end, kept[-1][1])] if kept and kept[-1][0] < end else kept)
