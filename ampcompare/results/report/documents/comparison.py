"""The report of a comparison, before it has a format: its sections, its tables and what they mean."""

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ampcompare.base.formatting import (
    format_count,
    format_duration,
    format_mebibytes,
    format_percent_number,
    printable_line,
)
from ampcompare.results.analysis.conclusions.headline import warnings_and_answer
from ampcompare.results.analysis.conclusions.phrases import capitalize_sentence
from ampcompare.results.analysis.effects.samples import samples_noun
from ampcompare.results.analysis.effects.step_time import invalid_time_reason
from ampcompare.results.analysis.inference.effect import MIN_PAIRS
from ampcompare.results.analysis.inference.sample_size import round_to_two_digits
from ampcompare.results.analysis.pairing.comparability import may_runs_be_paired
from ampcompare.results.records.comparison import ArmSummary, Comparison, PublishedRow, SampleComparison
from ampcompare.results.records.evaluation import PrecisionRow, emulated_type
from ampcompare.results.records.metric import Metric
from ampcompare.results.records.run import RunRecord
from ampcompare.results.report.base import MAX_LINE
from ampcompare.results.report.columns import (
    EffectFormat,
    columns_with_values,
    effect_format,
    effect_text,
    metric_text_without_unit,
    status_cell,
    table_of_columns,
    verdict_columns,
)
from ampcompare.results.report.document import Cell, Code, Document, Facts, Items, Section, Step, Table, Text
from ampcompare.results.report.documents.ledger import ledger_blocks
from ampcompare.results.report.documents.overview import make_overview_table
from ampcompare.results.report.documents.stacks import stack_table
from ampcompare.results.report.html.sections import page_sections

MAX_NAMED = 6
METRIC_FIELDS = ("metric_final", "metric_best", "metric_last_mean")
SUMMARY_FIELDS = (
    "loss_final",
    "num_steps",
    "skipped_steps",
    "step_seconds_median",
    "step_seconds_iqr",
    "data_seconds_median",
    "samples_per_second",
    "epoch_seconds",
    "peak_bytes",
    "peak_reserved_bytes",
    "final_loss_scale",
    "first_nonfinite_loss_step",
    "diverged_step",
    "start_seconds",
    "loader_start_seconds",
)
TIMES = (
    "step_seconds_median",
    "step_seconds_iqr",
    "samples_per_second",
    "epoch_seconds",
    "step_seconds_slowest",
)
PROCESS_FIELDS = ("world_size", "nodes", "global_batch_size", "allreduce_share", "step_seconds_slowest")
READING_FIELDS = ("device_bytes",)
HEAD = ("arm", "seed", "status", "engine", "engine_version", "half", "lr", "metric")
PUBLISHED = ("top1", "top1_best", "seconds", "epoch_seconds", "peak_bytes", "diverged")
# columns of the CSV
VERDICTS = {"accuracy_verdict": "quality", "time_verdict": "time", "loss_verdict": "loss"}


def comparison_document(comparison: Comparison, logs: Mapping[str, str] | None = None) -> Document:
    """Return the report: the sentences of the headline, above the table, and all that some formats add.

    Args:
        comparison: with its verdicts and sentences, which are shown as they are.
        logs: the address of the log of each cell, to which a page links; None for none.
    """
    warnings, title, further = caveats_answer_and_rest(comparison)
    first = make_overview_table(comparison)
    below = [*first.legend, *_overview_legend(comparison, first.heads)]
    first = replace(first, legend=below, caption="Summary, one row per arm")
    others = [row for row in comparison.arms if row.arm != comparison.reference]
    verdicts = table_of_columns(
        verdict_columns(comparison),
        comparison,
        others,
        legend=verdict_legend(comparison),
        caption="Table of verdicts, one row per arm",
    )
    measured = table_of_columns(
        columns_with_values(comparison),
        comparison,
        legend=column_legend(comparison),
        caption="All measurements, one row per arm",
    )
    weights, published = precision_table(comparison), published_table(comparison)
    stacks = stack_table(comparison)
    environment = [(name, str(value)) for name, value in comparison.environment.items()]
    sections = [
        Section("headline", [Text(comparison.headline)] if comparison.headline else []),
        Section("overview", [first]),
        Section("next", [Step(step.why, step.command) for step in comparison.next_steps]),
        Section("measurements", [measured], "Measurements"),
        Section("verdicts", [verdicts] if verdicts.rows else [], "Verdicts"),
        Section("precisions", [] if weights is None else [weights]),
        Section("ledger", ledger_blocks(comparison), "Declared and observed"),
        *sample_sections(comparison),
        Section("published", [] if published is None else [published], "Published and measured"),
        Section("conclusions", [Items(comparison.reading)] if comparison.reading else [], "Conclusions"),
        Section("stacks", [] if stacks is None else [stacks], "Environments"),
        Section("environment", [Facts([("", environment)])] if environment else [], "Environment"),
        Section("command", [Code(printable_line(comparison.command, MAX_LINE))] if comparison.command else [],
                "Reproduce"),
        Section("columns", [Table(first.columns, first.rows)]),
        Section("measured", [measured, *([verdicts] if verdicts.rows else [])],
                "All measurements, one line per arm"),
        Section("values", lambda: [_run_values_table(comparison)]),
        Section("answer", [Text([line]) for line in further]),
        *page_sections(comparison, logs or {}),
    ]  # fmt: skip
    return Document(
        "judged" if comparison.judged else "comparison",
        sections,
        comparison,
        f"Comparison: {comparison.tag}" if comparison.tag else "Comparison",
        title,
        _subtitle_of_page(comparison),
        warnings,
        [row.arm for row in comparison.arms],
        comparison.reference,
    )


def _subtitle_of_page(comparison: Comparison) -> list[str]:
    """Return what was trained, on what, and how far it is."""
    words = []
    if comparison.records:
        words += _lines_on_what_was_trained(comparison.records[0])
    words.append(format_count(len(comparison.seeds), "seed"))
    words.append(f"reference {printable_line(comparison.reference, 60)}")
    on_cpu = str(comparison.environment.get("device", "")).startswith("cpu")
    device = comparison.environment.get("processor" if on_cpu else "device_name")
    if device:
        words.append(f"on {printable_line(str(device), 60)}")
    if len(comparison.records) < len(comparison.order):
        words.append(f"{len(comparison.records)} of {len(comparison.order)} runs done")
    return words


def caveats_answer_and_rest(comparison: Comparison) -> tuple[list[str], str, list[str]]:
    """Return what a reader must know first, the answer in one sentence, and what else it says."""
    warnings, answer = warnings_and_answer(comparison)
    count = len(comparison.arms)
    named = (
        f"One arm: {printable_line(comparison.arms[0].arm, 60)}"
        if count == 1
        else f"{count} arms side by side"
    )
    title, *further = answer or [named]
    return warnings, title, further


def _lines_on_what_was_trained(record: RunRecord) -> list[str]:
    config = record.config
    if config.script is not None:
        return [f"script {printable_line(config.script.name, 60)}"]
    recipe = config.recipe
    return [
        f"{printable_line(recipe.model.arch, 60)} on {printable_line(recipe.data.name, 60)}",
        format_count(recipe.max_steps, "step") if recipe.max_steps else format_count(recipe.epochs, "epoch"),
        f"batch {recipe.batch_size}",
    ]


def _overview_legend(comparison: Comparison, shown_heads: Collection[str]) -> list[str]:
    """Return a few lines: what the verdicts of the one table go by, and what the columns that it shows mean."""
    others = [row for row in comparison.arms if row.arm != comparison.reference]
    if not others:
        return []
    table, metric = comparison.judged, comparison.metric
    quality, unit = printable_line(metric.name), printable_line(metric.difference_unit)
    of = "of " if metric.difference != "points" else ""
    margin = f"±{comparison.margin:g}{f' {unit}' if unit else ''} {of}{quality}"
    if comparison.margin_rule == "auto":
        margin += " (auto)"
    tested = [row for row in others if row.quality.low is not None or row.time.low is not None]
    interval = "[ ]: interval of the deciding test, " if tested else ""
    rate = (
        f"error rate {100 * comparison.error_rate:g} % over all arms"
        if comparison.error_rate
        else "nothing was tested"
    )
    if comparison.look is not None and comparison.look > 1:
        rate = f"look {comparison.look} at these runs, {rate}"
    spread = f"; published sd {table.sd:g} {unit}".rstrip() if table and table.sd is not None else ""
    direction = (
        ""
        if metric.quality_noun == "accuracy"
        else f" {capitalize_sentence(quality)}: {metric.better} is better."
    )
    against = f"against {printable_line(comparison.reference, 60)}, {_pairing_text(comparison)}"
    lines = [
        f"Δ and verdict: {against}; {interval}{rate}.{direction} "
        f"Margins: {margin}, ±{100 * comparison.time_margin:g} % step time{spread}."
    ]
    if "rel. time" in shown_heads:
        lines[0] += f" rel. time: step time / that of {printable_line(comparison.reference, 60)}."
    if "Δ tail loss (%)" in shown_heads:
        lines.append(
            f"Δ tail loss: training loss over the last fifth of the steps, relative to that of the reference; margin "
            f"±{100 * comparison.loss_margin:g} %, tested separately at the same error rate."
        )
    if table and table.within:
        names = " and ".join(printable_line(name, 40) for name in table.within)
        lines.append(
            f"The first rows are over all values of {names}; these and the rows of single values are tested separately."
        )
    return lines


def _pairing_text(comparison: Comparison) -> str:
    judged = comparison.judged
    if judged is not None and judged.independent:
        others = [row.arm for row in comparison.arms if row.arm not in judged.references]
        names = ", ".join(printable_line(name, 40) for name in judged.independent)
        return "as independent samples" + (
            "" if set(others) <= set(judged.independent) else f" ({names}), or by pairs"
        )
    if may_runs_be_paired(comparison.records, comparison.reference):
        return "paired by seed"
    return "runs of a seed are not all pairs"


def column_legend(comparison: Comparison) -> str:
    """Return one line that says what the columns mean."""
    reference = printable_line(comparison.reference, 60)
    seeds = ", ".join(str(seed) for seed in comparison.seeds)
    over = f"mean ± sd over seeds {seeds}" if len(comparison.seeds) > 1 else f"seed {seeds}"
    metric = comparison.metric
    best = f"{'highest' if metric.better == 'higher' else 'lowest'} of any epoch"
    which = "final epoch"
    script = next((record.config.script for record in comparison.records if record.config.script), None)
    if script is not None:
        which = f"{script.metrics[0].pick} value" if script.metrics else "mean of the last tenth of the steps"
        best = "the same"
    return (
        f"{printable_line(metric.name)}: {which}, {over}; best: {best}; rel. time: step "
        f"time / that of {reference}, over pairs."
    )


def margin_words(comparison: Comparison) -> str:
    """Return the margin of the metric, with the rule that gave it and why."""
    unit = comparison.metric.difference_unit.replace("pp", "point" if comparison.margin == 1 else "points")
    of = f"{unit} of {comparison.metric.quality_noun}".strip()
    shown = f"{comparison.margin:g} {printable_line(of)}"
    rule = f"{comparison.margin_rule}: " if comparison.margin_rule == "auto" else ""
    return (
        f"{shown} ({rule}{printable_line(comparison.margin_reason, 200)})"
        if comparison.margin_reason
        else shown
    )


def verdict_legend(comparison: Comparison) -> str:
    """Return one line that says what the verdicts go by."""
    tests = (
        f"error rate {100 * comparison.error_rate:g} % over all arms (Holm). [ ]: interval of the test "
        "that decided, two-sided 1 - 2 alpha for equivalent and non-inferior, 1 - alpha otherwise"
    )
    judged = any(row.loss for row in comparison.arms)
    loss = f", {100 * comparison.loss_margin:g} % of tail loss" if judged else ""
    return (
        f"Verdicts against {printable_line(comparison.reference, 60)}, {_pairing_text(comparison)}. "
        f"Equivalence margins: {margin_words(comparison)}, {100 * comparison.time_margin:g} % of step "
        f"time{loss}; {tests if comparison.error_rate else 'nothing was tested'}. Δ peak MiB: difference in "
        "peak memory. " + _samples_of_verdicts_sentence(comparison)
    )


def _samples_of_verdicts_sentence(comparison: Comparison) -> str:
    """Return one sentence: which samples the verdicts on the metric are about; "" where ampcompare evaluated none."""
    evaluated = (record for record in comparison.records if record.config.script is None)
    counts = {epoch.samples for record in evaluated for epoch in record.summary.epochs[-1:]}
    if not counts:
        return ""
    count = f"{min(counts):,}" if len(counts) == 1 else f"{min(counts):,} to {max(counts):,}"
    noun = samples_noun(comparison.records)
    what = f"this one validation {noun[:-1]}" if counts == {1} else f"these {count} validation {noun}"
    return f"Verdicts on {comparison.metric.quality_noun} are about {what}."


def sample_sections(comparison: Comparison) -> Iterable[Section]:
    """Yield the tables for which the comparison has results of single samples."""
    compared = [(row, row.samples) for row in comparison.arms if row.samples is not None]
    noun, metric = samples_noun(comparison.records), comparison.metric
    new = [_cells_on_new_samples(row, its, comparison) for row, its in compared if its.low is not None]
    unit = f"{metric.difference_unit} of {metric.name}" if metric.difference_unit else metric.name
    if new:
        margin = metric.margin_text(comparison.margin)
        disagree = any(its.models for _, its in compared)
        table = Table.from_rows(
            [
                "arm",
                f"on these {noun}",
                f"on new {noun}",
                f"{noun} for ±{margin}",
                *(["disagree"] if disagree else []),
            ],
            [row if disagree else row[:-1] for row in new],
            f"These {noun}, or new ones",
            f"Differences in {unit}, at the confidence of the verdict's interval. On new {noun}: {noun} and "
            f"seeds as crossed random effects. {noun.capitalize()} for ±{margin}: about how many would bring that "
            f"interval inside the margin with a power of 80 % if the arms do not differ."
            + (
                f" Disagree: {noun} on which just one model of a pair is right, on average."
                if disagree
                else ""
            ),
        )
        yield Section("samples", [table])
    single = [(row, pair) for row, its in compared if row.pairs < MIN_PAIRS for pair in its.models]
    if single:
        reference = printable_line(comparison.reference, 60)
        table = Table.from_rows(
            ["arm", "seed", "right only here", f"right only in {reference}", "McNemar's p"],
            [
                [
                    printable_line(row.arm, 60),
                    str(it.seed),
                    str(it.arm_only),
                    str(it.reference_only),
                    f"{it.p:.3g}",
                ]
                for row, it in single
            ],
            "These two models",
            f"Two single models on the same {noun}, McNemar's exact test. It is about these two models, not about "
            f"the arms that trained them: two seeds of one arm often differ as much.",
        )
        yield Section("models", [table])


def _cells_on_new_samples(
    row: ArmSummary, sample_comparison: SampleComparison, comparison: Comparison
) -> list[str]:
    needed = "more seeds first"
    if sample_comparison.needed is not None:
        needed = (
            "enough"
            if sample_comparison.needed <= sample_comparison.samples
            else f"about {round_to_two_digits(sample_comparison.needed):,}"
        )
    disagreeing = (
        statistics.fmean(pair.arm_only + pair.reference_only for pair in sample_comparison.models)
        if sample_comparison.models
        else 0.0
    )
    return [
        printable_line(row.arm, 60),
        effect_text(row, "quality", comparison),
        effect_format("quality", comparison).effect_with_interval_text(
            row.quality.effect or 0.0, sample_comparison.low, sample_comparison.high
        ),
        needed,
        f"{disagreeing:.1f} of {sample_comparison.samples:,}",
    ]


def precision_table(comparison: Comparison) -> Table | None:
    """Return the table: a line for each arm and precision; None where nothing was evaluated so."""
    rows = comparison.precisions
    metric = comparison.metric
    form = effect_format("quality", comparison)
    if not rows:
        return None
    moved = any(row.sample_difference is not None for row in rows)
    answered = any(row.disagreement is not None for row in rows)
    unit = f" ({metric.difference_unit})" if metric.difference_unit else ""
    headers = ["arm", "evaluated in", metric.column_head, "own", f"Δ to own{unit}"]
    headers += ["differing answers %"] if answered else []
    headers += [f"mean |Δ| of a sample ({metric.name})"] if moved else []
    interval = (
        ", with its 95 % interval, each tested alone" if any(row.low is not None for row in rows) else ""
    )
    words = [
        f"The trained weights of each arm, evaluated in other precisions. Own: in the arm's own precision; Δ: to "
        f"that, paired by seed{interval}."
    ]
    if answered:
        words.append("Differing answers: share of decisions that differ from the arm's own evaluation.")
    return Table.from_rows(
        [printable_line(head, 60) for head in headers],
        [_evaluation_row(row, metric, form, answered=answered, moved=moved) for row in rows],
        "Trained weights in other precisions",
        " ".join(words),
    )


def _evaluation_row(
    row: PrecisionRow, metric: Metric, form: EffectFormat, *, answered: bool, moved: bool
) -> list[str | Cell]:
    line: list[str | Cell] = [printable_line(row.arm, 60), _name_of_evaluated_precision(row)]
    if row.metric_mean is None or row.difference is None:
        failed = Cell(printable_line(f"failed: {row.error}", 80), "bad", badge=True)
        return [*line, failed, "-", "-", *["-"] * (answered + moved)]
    line += [
        metric_text_without_unit(metric, row.metric_mean),
        metric_text_without_unit(metric, row.own_mean),
    ]
    line.append(form.effect_with_interval_text(row.difference, row.low, row.high))
    if answered:
        line.append("-" if row.disagreement is None else f"{100 * row.disagreement:.2f}")
    if moved:
        line.append("-" if row.sample_difference is None else f"{metric.factor * row.sample_difference:.2g}")
    return line


def _name_of_evaluated_precision(row: PrecisionRow) -> str:
    """Return a precision as the table names it, with how it was computed where that was emulated."""
    emulated = " (emulated)" if emulated_type(row.half) else ""
    return f"{printable_line(row.precision, 40)}{emulated}{', EMA' if row.averaged else ''}"


def _values_in_precisions(record: RunRecord) -> dict[str, float | None]:
    """Return what one run reached in each precision, by the names of columns of the CSV."""
    found: dict[str, float | None] = {}
    for result in record.summary.in_precisions:
        name = f"{'ema_' if result.averaged else ''}in_{result.precision.replace(':', '_')}"
        found[name] = result.values.get(record.metric.name)
        found[f"{name}_differing"] = (
            result.differing / result.answers if result.differing is not None and result.answers else None
        )
    return found


def published_table(comparison: Comparison) -> Table | None:
    """Return published figures next to measured ones: the columns that have a published value; None without any."""
    if comparison.published is None or not comparison.published.rows:
        return None
    arms = {row.arm: row for row in comparison.arms}
    lines = [
        _published_row(
            line,
            arms.get(line.row or ""),
            [record for record in comparison.records if record.arm == line.row],
        )
        for line in comparison.published.rows
    ]
    said = {name for name in lines[0] if any(line[name] for line in lines)}
    shown = [name for name in lines[0] if name.replace(", measured", ", published") in said]
    rows = [[line[name] or "-" for name in shown] for line in lines]
    return Table.from_rows(
        shown, rows, legend=published_legend(comparison), caption="Published and measured results"
    )


def _published_row(
    published: PublishedRow, row: ArmSummary | None, records: Sequence[RunRecord]
) -> dict[str, str | Cell]:
    walls = [record.summary.wall_seconds for record in records if record.summary.wall_seconds is not None]
    names = (
        published.name if published.row in (None, published.name) else f"{published.name} ({published.row})"
    )
    said = _percent_text(published.top1)
    if published.diverged and published.top1_best is None:
        said = "NaN"
    measured: str | Cell = Cell("not run", "muted", badge=True)
    if row:
        measured = _percent_text(row.metric_mean) or status_cell(row, records, 40)
    return {
        "as published": printable_line(names, 80),
        "top-1 %, published": said,
        "top-1 %, measured": measured,
        "best %, published": _percent_text(published.top1_best),
        "best %, measured": _percent_text(row.metric_best if row else None),
        "time, published": _duration_text(published.seconds),
        "time, measured": _duration_text(statistics.fmean(walls) if walls else None),
        "epoch, published": _duration_text(published.epoch_seconds),
        "epoch, measured": _duration_text(row.epoch_seconds if row else None),
        "MiB, published": format_mebibytes(published.peak_bytes, decimals=0, text_if_missing=""),
        "MiB, measured": format_mebibytes(row.peak_bytes if row else None, decimals=0, text_if_missing=""),
        "remark": printable_line(published.remark, 80),
    }


def _percent_text(share: float | None) -> str:
    return format_percent_number(share, text_if_missing="")


def _duration_text(seconds: float | None) -> str:
    return "" if seconds is None else format_duration(seconds)


def published_legend(comparison: Comparison) -> str:
    """Return one line: whose figures these are, and how the settings of the runs differ."""
    published = comparison.published
    if published is None:
        return ""
    where = f", on {published.machine}" if published.machine else ""
    words = (
        f"Published: {published.source}{where}; one run per line. Measured: means over seeds on this machine"
    )
    if published.scale is not None:
        words += (
            f", at scale {published.scale} of recipe {published.recipe}: the same arms and relations on other data "
            f"with another network, so directions can be compared, but numbers cannot"
        )
    elif published.differs:
        more = f" and {len(published.differs) - MAX_NAMED} more" if len(published.differs) > MAX_NAMED else ""
        words += f", with other settings than published: {'; '.join(published.differs[:MAX_NAMED])}{more}"
    return printable_line(f"{words}.", MAX_LINE)


def _run_values_table(comparison: Comparison) -> Table:
    """Return a line for each run: plain numbers in full precision, each with the verdicts of its arm.

    The metric of verdicts is named in its own column; each other metric has a column `NAME_final`. Shares are 0 to
    1, times in seconds, sizes in bytes. A run whose `invalid_time` says why has no times of steps; `report.json` keeps
    them. Further columns hold the published figures of the row, if any, and the columns of the tables that are means
    over runs.
    """
    published = (
        {line.row: line for line in reversed(comparison.published.rows)} if comparison.published else {}
    )
    of_publication = PUBLISHED if published else ()
    of_runs = {
        name: column.of_run
        for name, column in columns_with_values(comparison).items()
        if column.of_run is not None
    }
    others = list(
        dict.fromkeys(metric.identifier for run in comparison.records for metric in run.metrics[1:])
    )
    weights = [_values_in_precisions(record) for record in comparison.records]
    of_weights = list(dict.fromkeys(name for values in weights for name in values))
    arms = {row.arm: row for row in comparison.arms}
    rows = []
    for record, its_weights in zip(comparison.records, weights, strict=True):
        row, line = arms.get(record.arm), published.get(record.arm)
        rows.append([
            *_run_values_row(record, others),
            *(str(getattr(row, quantity, "")) for quantity in VERDICTS.values()),
            invalid_time_reason(record),
            record.error,
            *(getattr(line, name, None) for name in of_publication),
            *(of_run(record) for of_run in of_runs.values()),
            *map(its_weights.get, of_weights),
        ])  # fmt: skip
    heads = [*HEAD, *METRIC_FIELDS, *(f"{tag}_final" for tag in others), *SUMMARY_FIELDS, *PROCESS_FIELDS]
    heads += [
        *READING_FIELDS,
        *VERDICTS,
        "invalid_time",
        "error",
        *(f"published_{name}" for name in of_publication),
        *of_runs,
        *of_weights,
    ]
    return Table.for_programs(heads, rows)


def _run_values_row(record: RunRecord, other_metrics: Sequence[str]) -> list[object]:
    engine, recipe = record.engine, record.config.recipe
    lr = recipe.optimizer.lr if record.config.script is None else None  # a script has its own
    head = [
        record.arm,
        recipe.seed,
        record.status,
        engine and engine.name,
        engine and engine.version,
        record.half,
        lr,
    ]
    names = {metric.identifier: metric.name for metric in record.metrics}
    values = [getattr(record.summary, name) for name in METRIC_FIELDS]
    values += [record.summary.others_final.get(names.get(tag, "")) for tag in other_metrics]
    hidden = TIMES if invalid_time_reason(record) else ()
    values += [None if name in hidden else getattr(record.summary, name) for name in SUMMARY_FIELDS]
    values += [None if name in hidden else getattr(record.processes, name, None) for name in PROCESS_FIELDS]
    values += [getattr(record.readings, name, None) for name in READING_FIELDS]
    return [*head, record.metric.name, *values]
