"""The columns of tables with a row per arm: the overview, the measurements and the verdicts, in all formats."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ampcompare.base.formatting import (
    MIB,
    format_decimal,
    format_mebibytes,
    format_percent_number,
    format_seconds,
    printable_line,
)
from ampcompare.results.analysis.pairing.scores import final_metric_value
from ampcompare.results.records.comparison import ArmSummary, Comparison, Quantity
from ampcompare.results.records.evaluation import emulated_type
from ampcompare.results.records.metric import TOP5, Metric
from ampcompare.results.records.run import RunRecord
from ampcompare.results.records.verdict import KEPT, Kind, Verdict
from ampcompare.results.report.document import Cell, Column, Table, Tone

_MORE_DIGITS = 10
NOTABLE_WAIT = 0.05  # of a step
_TONES: tuple[tuple[Tone, tuple[Kind, ...]], ...] = (
    ("good", KEPT),
    ("bad", ("worse", "diverged")),
    (
        "open",
        ("learned nothing", "inconclusive", "few seeds", "not tested", "conditional", "not as declared"),
    ),
    ("muted", ("not comparable", "emulated", "no verdict", "invalid")),
)
STATES: dict[str, Tone] = {"completed": "good", "diverged": "bad", "failed": "bad", "interrupted": "open"}


def _applies_always(comparison: Comparison) -> bool:
    return True


def _make_empty_cell(row: ArmSummary, comparison: Comparison) -> Cell:
    return Cell()


@dataclass(frozen=True)
class ArmColumn(Column):
    """A column of a table with a row per arm.

    Attributes:
        cell: of an arm's row in its comparison.
        applies: whether a comparison has values for the column; else no table shows it.
        of_run: its value for one run, which the CSV then has too; None if there is no such value.
        needs_others: whether that table leaves it out where only the reference has a number.
    """

    head: str = ""
    numeric: bool = True
    cell: Callable[[ArmSummary, Comparison], Cell] = _make_empty_cell
    applies: Callable[[Comparison], bool] = _applies_always
    of_run: Callable[[RunRecord], float | None] | None = None
    needs_others: bool = False


def column_of_summary(
    text: Callable[[ArmSummary], str], applies: Callable[[Comparison], bool] = _applies_always
) -> ArmColumn:
    """Return a column of what the summary of an arm holds."""
    return ArmColumn(cell=lambda row, comparison: Cell(text(row)), applies=applies)


def column_of_run_means(
    value: Callable[[RunRecord], float | None],
    form: Callable[[float], str],
    applies: Callable[[Comparison], bool] = _applies_always,
) -> ArmColumn:
    """Return a column of the mean over the completed runs of an arm; the CSV has the value of each run."""

    def cell_of_mean(row: ArmSummary, comparison: Comparison) -> Cell:
        completed = [
            value(run) for run in comparison.records if run.arm == row.arm and run.status == "completed"
        ]
        measured = [number for number in completed if number is not None]
        return Cell(form(statistics.fmean(measured))) if measured else Cell()

    return ArmColumn(cell=cell_of_mean, applies=applies, of_run=value)


def metric_text_without_unit(metric: Metric, value: float | None, sd: float | None = None) -> str:
    """Return a value of a metric without its unit, with its standard deviation, if known; "-" without one."""
    return (
        "-"
        if value is None
        else metric.value_text_without_unit(value)
        + ("" if sd is None else f" ± {metric.value_text_without_unit(sd)}")
    )


def _number_text(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


INVALID = Cell("invalid", "muted", badge=True)


def step_time_cell(row: ArmSummary, comparison: Comparison) -> Cell:
    """Return the step time with two decimals below 10 ms and one above; a word where it does not count."""
    if row.step_seconds_median is None or (row.invalid_time and not row.has_completed):
        return Cell(tone="muted")
    if is_emulated(row):
        return Cell("emulated", "muted")
    if row.invalid_time:
        return INVALID
    milliseconds = 1000 * row.step_seconds_median
    if milliseconds < 10:
        return Cell(f"{milliseconds:,.2f}")
    return Cell(f"{milliseconds:,.1f}" if milliseconds < 1000 else f"{milliseconds:,.0f}")


def _epoch_time_cell(row: ArmSummary, comparison: Comparison) -> Cell:
    """Return the time of an epoch, which is a time of steps; a word where that is invalid."""
    if row.invalid_time and row.epoch_seconds is not None:
        return INVALID
    return Cell(format_seconds(row.epoch_seconds, row.epoch_seconds_sd))


@dataclass(frozen=True)
class EffectFormat:
    """How effects in one quantity are shown.

    Attributes:
        of_shown: a number of a row in the unit that is shown.
        limits: the ends of the margin and no difference, in the shown unit.
        decimals: as far as no limit is near.
        sign: "+" to write it for positive numbers.
    """

    of_shown: Callable[[float], float]
    limits: Sequence[float]
    decimals: int = 2
    sign: str = "+"

    def effect_with_interval_text(
        self, value: float, low: float | None = None, high: float | None = None
    ) -> str:
        """Return an effect with its interval, if there is one, without the unit."""
        low, high = (None if bound is None else self.of_shown(bound) for bound in (low, high))
        return format_interval(
            self.of_shown(value), low, high, self.limits, decimals=self.decimals, sign=self.sign
        )


def effect_format(quantity: Quantity, comparison: Comparison) -> EffectFormat:
    """Return how effects in a quantity are shown; the lower end of the margin of a ratio is 1 / (1 + margin)."""
    metric = comparison.metric
    if quantity == "memory":
        return EffectFormat(lambda size: size / MIB, (), 1)
    if quantity == "time":
        return EffectFormat(
            float, (1 / (1 + comparison.time_margin), 1.0, 1 + comparison.time_margin), sign=""
        )
    margin = 100 * comparison.loss_margin if quantity == "loss" else comparison.margin
    limits = (100 * (1 / (1 + margin / 100) - 1), 0.0, margin)
    if quantity == "loss":
        return EffectFormat(lambda difference: 100 * difference, limits)
    if metric.difference == "points":
        limits = (-margin, 0.0, margin)
    return EffectFormat(metric.difference_in_shown_unit, limits, metric.difference_decimals)


def effect_text(row: ArmSummary, quantity: Quantity, comparison: Comparison) -> str:
    """Return the effect of an arm in a quantity, with the interval of the deciding test; "-" where none counts."""
    verdict = row.verdict(quantity)
    if verdict.effect is None or (quantity == "time" and row.valid_time_ratio is None):
        return "-"
    return effect_format(quantity, comparison).effect_with_interval_text(
        verdict.effect, verdict.low, verdict.high
    )


def _skipped_of_all_steps_text(row: ArmSummary) -> str:
    return "-" if row.skipped_steps is None else f"{row.skipped_steps}/{row.num_steps}"


def short_arm_name(row: ArmSummary) -> str:
    """Return the name of an arm, cut to what a table has room for."""
    return printable_line(row.arm, 60)


def engine_text_of_arm(row: ArmSummary) -> str:
    """Return the engine or library that an arm ran on, with its version; "" for torch."""
    return printable_line((row.engine or "").removesuffix("+compat"), 60)  # its name says so already


def _engine_text(row: ArmSummary) -> str:
    words = [engine_text_of_arm(row), (row.half or "") if is_emulated(row) else ""]
    return printable_line("; ".join(filter(None, words)), 60) or "torch"


def status_cell(row: ArmSummary, records: Iterable[RunRecord], longest: int = 60) -> Cell:
    """Return what became of the runs of a row, in the tone of the best of them; a judged table has no records."""
    ended = {record.status for record in records if record.arm == row.arm}
    if not ended and (row.has_completed or row.diverged):
        ended = {"diverged"} if row.diverged else {"completed"}
    tone: Tone = next((tone for state, tone in STATES.items() if state in ended), "muted")
    return Cell(printable_line(row.status, longest), tone, badge=bool(row.status))


def _are_start_methods_compared(comparison: Comparison) -> bool:
    """Return whether ways to start processes and loaders are compared."""
    configs = [record.config for record in comparison.records]
    return len({(config.launcher, config.workers, config.threads) for config in configs}) > 1


def _has_several_ranks(comparison: Comparison) -> bool:
    return any(row.allreduce_share is not None for row in comparison.arms)


def _has_loss(comparison: Comparison) -> bool:
    return any(row.loss_tail is not None for row in comparison.arms)


def _metric_columns(comparison: Comparison) -> dict[str, ArmColumn]:
    """Return the final and the best value of the metric that verdicts are about."""
    metric = comparison.metric
    return {
        metric.column_head: column_of_summary(
            lambda row: metric_text_without_unit(metric, row.metric_mean, row.metric_sd)
        ),
        f"best {metric.column_head}": column_of_summary(
            lambda row: metric_text_without_unit(metric, row.metric_best)
        ),
    }


def _other_metric_columns(comparison: Comparison) -> dict[str, ArmColumn]:
    """Return the final values of the other metrics; the CSV alone has top-5."""
    others = comparison.records[0].metrics[1:] if comparison.records else []
    means = {
        one.column_head: column_of_run_means(
            partial(final_metric_value, name=one.name), partial(metric_text_without_unit, one)
        )
        for one in others
    }
    return {head: replace(column, of_run=None) for head, column in means.items() if head != TOP5.column_head}


def _throughput_text(row: ArmSummary) -> str:
    has_no_measure = bool(row.invalid_time) or is_emulated(row)
    return _number_text(None if has_no_measure else row.samples_per_second, ",.0f")


def _throughput_columns(comparison: Comparison) -> dict[str, ArmColumn]:
    """Return the samples, or whatever runs count, of a second."""
    unit = next((record.unit for record in comparison.records), "samples").replace("images", "samples")
    return {f"{unit}/s": column_of_summary(_throughput_text)}


def _energy_columns(comparison: Comparison) -> dict[str, ArmColumn]:
    """Return the energy of a GPU for a thousand samples, or whatever runs count, if any run has one."""
    unit = next((record.unit for record in comparison.records), "samples").replace("images", "samples")

    def joules_per_thousand(record: RunRecord) -> float | None:
        one = None if record.readings is None else record.readings.joules_per_unit
        return None if one is None else 1000 * one

    known = any(joules_per_thousand(record) is not None for record in comparison.records)
    return (
        {f"J/1000 {unit}": column_of_run_means(joules_per_thousand, lambda mean: f"{mean:.3g}")}
        if known
        else {}
    )


def _has_long_data_wait(comparison: Comparison) -> bool:
    """Return whether a run waits for its batches long enough to matter."""
    summaries = [record.summary for record in comparison.records]
    return any(
        (summary.data_seconds_median or 0) > NOTABLE_WAIT * summary.step_seconds_median
        for summary in summaries
        if summary.step_seconds_median
    )


def _data_wait_cell(row: ArmSummary, comparison: Comparison) -> Cell:
    """Return the wait for a batch, which is no part of a step, as a mean over the runs."""
    waits = [run.summary.data_seconds_median for run in comparison.records if run.arm == row.arm]
    known = [wait for wait in waits if wait is not None]
    return Cell(_number_text(1000 * statistics.fmean(known) if known else None, ",.2f"))


def _is_lr_set_by_recipe(comparison: Comparison) -> bool:
    """Return whether any learning rate is a setting of ampcompare: that of a script is the script's."""
    return any(not math.isnan(row.lr) for row in comparison.arms)


ColumnsOf = Callable[[Comparison], dict[str, ArmColumn]]
COLUMNS: dict[str, ArmColumn | ColumnsOf] = {
    "arm": column_of_summary(short_arm_name),
    "lr": column_of_summary(lambda row: f"{row.lr:g}", _is_lr_set_by_recipe),
    "metric": _metric_columns,
    "other metrics": _other_metric_columns,
    "epoch (s)": ArmColumn(cell=_epoch_time_cell),
    "peak MiB": column_of_summary(lambda row: format_mebibytes(row.peak_bytes)),
    "step (ms)": ArmColumn(cell=step_time_cell),
    "data (ms)": ArmColumn(cell=_data_wait_cell, applies=_has_long_data_wait),
    "throughput": _throughput_columns,
    "energy": _energy_columns,
    "rel. time": column_of_summary(lambda row: _number_text(row.valid_time_ratio, ".2f")),
    "tail loss": column_of_run_means(lambda record: record.summary.loss_tail, "{:.4g}".format, _has_loss),
    "final loss scale": column_of_summary(lambda row: _number_text(row.final_loss_scale, "g")),
    "skipped steps": column_of_summary(_skipped_of_all_steps_text),
    "status": ArmColumn(cell=lambda row, comparison: status_cell(row, comparison.records)),
    "engine": column_of_summary(_engine_text),
    "start (s)": column_of_summary(
        lambda row: format_seconds(row.start_seconds), _are_start_methods_compared
    ),
    "first batch (s)": column_of_summary(
        lambda row: format_seconds(row.loader_start_seconds), _are_start_methods_compared
    ),
    "all-reduce %": column_of_summary(
        lambda row: format_percent_number(row.allreduce_share), _has_several_ranks
    ),
}
"""The table of measurements. A new line here is in every format; a function gives columns whose heads differ."""


def verdict_columns(comparison: Comparison) -> dict[str, ArmColumn]:
    """Return the columns of the table of verdicts, by their heads."""
    metric = comparison.metric
    heads: dict[Quantity, tuple[str, str]] = {
        "quality": (metric.difference_column_head, f"{metric.quality_noun} verdict"),
        "time": ("rel. time", "time verdict"),
        "loss": ("Δ tail loss (%)", "tail loss verdict"),
    }
    if not any(row.loss for row in comparison.arms):
        del heads["loss"]
    shown = {"arm": column_of_summary(short_arm_name)}
    for quantity, (effect, verdict) in heads.items():
        shown[effect] = ArmColumn(cell=partial(_effect_cell, quantity))
        shown[verdict] = ArmColumn(cell=partial(_cell_of_verdict, quantity))
    return {
        **shown,
        "Δ peak MiB": ArmColumn(cell=_memory_cell),
        "paired seeds": column_of_summary(lambda row: str(row.pairs)),
    }


def _effect_cell(quantity: Quantity, row: ArmSummary, comparison: Comparison) -> Cell:
    return Cell(effect_text(row, quantity, comparison))


def _cell_of_verdict(quantity: Quantity, row: ArmSummary, comparison: Comparison) -> Cell:
    return verdict_cell(row.verdict(quantity))


def _memory_cell(row: ArmSummary, comparison: Comparison) -> Cell:
    """Return the difference in memory, or why there is none."""
    return verdict_cell(row.memory) if row.memory.effect is None else _effect_cell("memory", row, comparison)


def verdict_cell(verdict: Verdict, longest: int = 60) -> Cell:
    """Return a cell of a verdict in its words, in characters at most."""
    return Cell(printable_line(str(verdict), longest) or "-", verdict_tone(verdict), badge=bool(verdict))


def run_state_cell(state: str) -> Cell:
    """Return a cell of what became of a run; only what is not as planned is a badge."""
    return Cell(state, STATES.get(state, ""), badge=state != "completed")


def columns_with_values(comparison: Comparison) -> dict[str, ArmColumn]:
    """Return the columns that a comparison has values for, by their heads."""
    shown: dict[str, ArmColumn] = {}
    for name, entry in COLUMNS.items():
        if not isinstance(entry, ArmColumn):
            shown |= entry(comparison)
        elif entry.applies(comparison):
            shown[name] = entry
    return shown


def table_of_columns(
    shown_columns: Mapping[str, ArmColumn],
    comparison: Comparison,
    rows: Sequence[ArmSummary] | None = None,
    **options: Any,
) -> Table:
    """Return a table of these columns, for all arms or some; options are those of `Table.from_rows`."""
    chosen = comparison.arms if rows is None else rows
    return Table.from_rows(
        shown_columns,
        [[column.cell(row, comparison) for column in shown_columns.values()] for row in chosen],
        **options,
    )


def format_interval(
    value: float,
    low: float | None,
    high: float | None,
    limits: Sequence[float],
    *,
    decimals: int = 2,
    sign: str = "",
) -> str:
    """Return `+0.09 [-0.73, +0.91]`, or the value alone where there is no interval.

    A verdict says on which side of a limit each bound lies: of 0, or of the equivalence margin. Rounding must not say
    otherwise, as "-0.50" would of a bound of -0.4996 that is inside a margin of 0.5. So a bound gets as many digits
    as that takes; from the second one more on, it may also be rounded away from the limit.
    """
    if low is None or high is None:
        return format_decimal(value, decimals, sign)
    shown = [_bound_text(bound, limits, decimals, sign) for bound in (low, high)]
    return f"{format_decimal(value, decimals, sign)} [{shown[0]}, {shown[1]}]"


def _bound_text(bound: float, limits: Sequence[float], decimals: int, sign: str) -> str:
    """Return the text of a bound that lies on the same side of all limits as the bound."""
    for more in range(_MORE_DIGITS + 1):
        texts = [format_decimal(bound, decimals + more, sign)]
        if more > 1 and math.isfinite(bound):
            step = 10.0 ** -(decimals + more)
            texts += [format_decimal(float(texts[0]) + move, decimals + more, sign) for move in (step, -step)]
        for text in texts:  # limits as sentences print them, such as ±0.5
            if all(
                _side_of_limit(float(text), float(f"{limit:g}")) == _side_of_limit(bound, limit)
                for limit in limits
            ):
                return text
    return repr(bound)


def _side_of_limit(value: float, limit: float) -> int:
    return (value > limit) - (value < limit)


def verdict_detail_without_margin(verdict: Verdict) -> str:
    """Return what the word of a verdict leaves out, except a margin, which the legend has."""
    return (
        verdict.update_counts_text
        if verdict.kind in ("equivalent", "non-inferior")
        else printable_line(verdict.detail, 200)
    )


def verdict_tone(verdict: Verdict) -> Tone:
    """Return the color of a verdict."""
    return next((tone for tone, kinds in _TONES if verdict.kind in kinds), "")


def step_time_verdict_words(verdict: Verdict, margin: float) -> str:
    """Return what a verdict on the step time, whose margin is a share of it, says; "" where it decides nothing."""
    words: dict[Kind, str] = {
        "better": "faster",
        "worse": "slower",
        "equivalent": "equally fast",
        "non-inferior": f"step time at most {100 * margin:g} % longer",
    }
    return words.get(verdict.kind, "")


def is_emulated(row: ArmSummary) -> bool:
    """Return whether an arm's 16-bit arithmetic was computed in fp32 and rounded, so that its times say nothing."""
    return bool(emulated_type(row.half))
