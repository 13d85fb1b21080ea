"""The one table of a comparison: a row per arm with its quality, verdict, times and memory, and lines below it."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from ampcompare.base.files.run_files import CellFile
from ampcompare.base.formatting import MIB, format_bytes, format_decimal, format_few_names, printable_line
from ampcompare.results.analysis.pairing.declared import sentences_on_types_not_of_arm
from ampcompare.results.records.comparison import ArmSummary, Comparison
from ampcompare.results.records.evaluation import emulated_type
from ampcompare.results.records.metric import Metric
from ampcompare.results.records.run import script_fault_remarks
from ampcompare.results.records.verdict import OPEN, UNJUDGED
from ampcompare.results.report.columns import (
    INVALID,
    ArmColumn,
    column_of_summary,
    effect_text,
    engine_text_of_arm,
    is_emulated,
    metric_text_without_unit,
    run_state_cell,
    short_arm_name,
    status_cell,
    step_time_cell,
    step_time_verdict_words,
    verdict_detail_without_margin,
    verdict_tone,
)
from ampcompare.results.report.document import Cell, Table

LONGEST = 120
SHARE = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?= %)")
Value = Callable[[ArmSummary], str]


def begins_with_number(text: str) -> bool:
    """Return whether a text begins with a number."""
    return text.lstrip("+-")[:1].isdigit()


def is_reference(row: ArmSummary, comparison: Comparison) -> bool:
    """Return whether others are compared with a row."""
    references = [comparison.reference] if comparison.judged is None else comparison.judged.references
    return row.arm in references


def _quality_cell(row: ArmSummary, comparison: Comparison) -> Cell:
    if row.metric_mean is None:
        return Cell()
    metric = comparison.metric
    return Cell(
        metric_text_without_unit(metric, row.metric_mean, row.metric_sd),
        short=metric_text_without_unit(metric, row.metric_mean),
    )


def _difference_cell(row: ArmSummary, comparison: Comparison) -> Cell:
    if row.quality.effect is None or is_reference(row, comparison):
        return Cell()
    return Cell(effect_text(row, "quality", comparison))


def _verdict_cell(row: ArmSummary, comparison: Comparison) -> Cell:
    word, detail = row.quality.word, verdict_detail_without_margin(row.quality)
    if not word:
        if row.failed and not row.has_completed:
            return run_state_cell("failed")
        if is_reference(row, comparison):
            return Cell("reference", "muted")
        return Cell("not run", "muted", badge=True) if row.status == "not run" else Cell()
    text = f"{word} ({detail})" if detail and (row.quality.kind in OPEN or row.quality.updates) else word
    return Cell(text, verdict_tone(row.quality), short=word, note=detail if text != word else "", badge=True)


def _loss_cell(row: ArmSummary, comparison: Comparison) -> Cell:
    if row.loss.effect is None or is_reference(row, comparison):
        return Cell()
    words = [
        format_decimal(100 * row.loss.effect, 2, "+"),
        row.loss.word,
        f"({row.loss.update_counts_text})" * bool(row.loss.update_counts_text),
    ]
    return Cell(" ".join(filter(None, words)), verdict_tone(row.loss))


def _ratio_cell(row: ArmSummary, comparison: Comparison) -> Cell:
    if is_reference(row, comparison):
        return Cell("1.00") if row.has_completed and not row.invalid_time else Cell()
    if row.time.effect is None:
        return Cell()
    if is_emulated(row) and row.time.kind != "invalid":
        return Cell("emulated", "muted", short="-")
    if row.time.kind in UNJUDGED:
        shown = INVALID if row.time.kind == "invalid" else Cell(row.time.word, "muted", badge=True)
        return replace(shown, short="-")
    text = effect_text(row, "time", comparison)
    tone = "" if row.time.kind in OPEN else verdict_tone(row.time)
    return Cell(text, tone, short=format_decimal(row.time.effect, 2))


def _peak_cell(row: ArmSummary, comparison: Comparison) -> Cell:
    if row.peak_bytes is None:
        return Cell()
    size = row.peak_bytes / MIB
    return Cell(f"{size:,.{1 if size < 1000 else 0}f}")


def _memory_cell(row: ArmSummary, comparison: Comparison) -> Cell:
    more = row.memory.effect
    return Cell() if more is None else Cell(f"{'-' if more < 0 else '+'}{format_bytes(abs(round(more)))}")


ARM = replace(column_of_summary(short_arm_name), head="arm", numeric=False)
VERDICT = ArmColumn("verdict", numeric=False, cell=_verdict_cell, shorten=1)
RATIO = ArmColumn(
    "rel. time",
    cell=_ratio_cell,
    needs_others=True,
    shorten=2,
    shortened="intervals of rel. time",
    drop=6,
    dropped="relative step times",
)


def _columns_of_quality(metric: Metric) -> list[ArmColumn]:
    head, difference = printable_line(metric.column_head), printable_line(metric.difference_column_head)
    return [
        ArmColumn(head, cell=_quality_cell, shorten=7, shortened=f"sd of {printable_line(metric.name)}"),
        ArmColumn(difference, cell=_difference_cell, needs_others=True),
        VERDICT,
    ]


def columns_of_own_runs(metric: Metric) -> list[ArmColumn]:
    """Return the columns of a comparison that ran here; notes of rows are the last column where there is room."""
    return [
        ARM,
        *_columns_of_quality(metric),
        ArmColumn("Δ tail loss (%)", cell=_loss_cell, needs_others=True, drop=1, dropped="tail losses"),
        ArmColumn("step (ms)", cell=step_time_cell, drop=5, dropped="step times"),
        RATIO,
        ArmColumn("peak MiB", cell=_peak_cell, drop=4, dropped="peak memory"),
    ]


def columns_of_judged_table(metric: Metric) -> list[ArmColumn]:
    """Return the columns of a table that someone else measured."""
    return [
        ARM,
        replace(
            column_of_summary(_run_count_text),
            head="runs",
            drop=3,
            dropped="numbers of runs",
        ),
        *_columns_of_quality(metric),
        RATIO,
        ArmColumn("Δ memory", cell=_memory_cell, drop=4, dropped="differences in memory"),
    ]


def make_overview_table(comparison: Comparison) -> Table:
    """Return the table, without the columns that have no value in any row; below it what all arms share."""
    judged = comparison.judged is not None
    known = (columns_of_judged_table if judged else columns_of_own_runs)(comparison.metric)
    cells = {column.head: [column.cell(row, comparison) for row in comparison.arms] for column in known}
    kept = [column for column in known if _is_column_informative(column, cells[column.head], comparison)]
    rows = [[cells[column.head][index] for column in kept] for index in range(len(comparison.arms))]
    notes = row_notes(comparison)
    states = [
        status_cell(row, comparison.records).tone if _status_text_unless_completed(row) else ""
        for row in comparison.arms
    ]
    return Table(
        kept,
        rows,
        legend=shared_fact_lines(comparison),
        notes=notes if any(notes) else (),
        states=states,
        narrows=True,
    )


def _is_column_informative(column: ArmColumn, cells: Sequence[Cell], comparison: Comparison) -> bool:
    """Return whether a column has a value that is not known before reading it."""
    if not column.numeric:
        return column is ARM or any(cell.text not in ("-", "reference") for cell in cells)
    judged = zip(comparison.arms, cells, strict=True)
    looked_at = [cell for row, cell in judged if not (column.needs_others and is_reference(row, comparison))]
    return any(begins_with_number(cell.text) for cell in looked_at)


def row_notes(comparison: Comparison) -> list[list[str]]:
    """Return for each row what its numbers do not say: why it has none, and in what it differs from the others."""
    return [list(dict.fromkeys(filter(None, _notes_of_row(row, comparison)))) for row in comparison.arms]


def shared_fact_lines(comparison: Comparison) -> list[str]:
    """Return lines on what all arms share, on times that do not count and on how far memory varies; none where there is
    nothing to say.
    """
    lines = (
        _shared_settings_line(comparison),
        _invalid_step_times_line(comparison),
        _cpu_memory_spread_line(comparison),
        _written_files_line(comparison),
    )
    return [line for line in lines if line]


def _notes_of_row(row: ArmSummary, comparison: Comparison) -> list[str]:
    settings = _notes_by_row_on_differing_settings(comparison)
    if _has_learned_nothing_by_skipping(row):  # which the reason says, of each run
        settings = [value for value in settings if value is not _skipped_of_all_steps_text_if_any]
    its = [value(row) for value in settings]
    time = step_time_verdict_words(row.time, comparison.time_margin)
    # The cell of an open verdict has its reason.
    reason = (
        ""
        if row.quality.kind in OPEN
        else printable_line(verdict_detail_without_margin(row.quality), LONGEST)
    )
    memory = f"memory {printable_line(str(row.memory), LONGEST)}" if row.memory else ""
    ran: list[str] = []
    for record in comparison.records:
        if record.arm == row.arm and record.ledger is not None:
            ran += sentences_on_types_not_of_arm(record.config.parsed_arm.roles, record.ledger)
        if record.arm == row.arm:
            remarks = (*record.guards, *script_fault_remarks(record))
            ran += [printable_line(text, 2 * LONGEST) for text in remarks]
    return [
        _status_text_unless_completed(row),
        reason,
        time,
        *its,
        memory,
        *_texts_merged_to_percent_ranges(ran),
    ]


def _texts_merged_to_percent_ranges(texts: Sequence[str]) -> list[str]:
    """Return texts in order of first appearance, those that differ in percentages alone as one, as of several seeds."""
    shares_by_rest: dict[str, list[list[str]]] = {}
    for text in texts:
        shares_by_rest.setdefault(SHARE.sub("\0", text), []).append(SHARE.findall(text))
    found = []
    for rest, shares in shares_by_rest.items():
        first, *others = rest.split("\0")
        for values, part in zip(zip(*shares, strict=True), others, strict=True):
            least, most = min(values, key=float), max(values, key=float)
            first += (least if float(least) == float(most) else f"{least} to {most}") + part
        found.append(first)
    return found


def _has_learned_nothing_by_skipping(row: ArmSummary) -> bool:
    is_all = row.skipped_steps is not None and 0 < row.skipped_steps == row.num_steps
    return is_all and "steps skipped" in row.quality.detail


def _run_count_text(row: ArmSummary) -> str:
    return "-" if row.completed is None else str(row.completed + row.diverged)


def _status_text_unless_completed(row: ArmSummary) -> str:
    """Return what became of the runs, unless all were completed."""
    status = printable_line(row.status, LONGEST)
    return "" if status in ("", "ok", "not run", str(row.quality)) else status


def _lr_text(row: ArmSummary) -> str:
    return f"lr {row.lr:g}" if row.lr == row.lr else ""


def _steps_text(row: ArmSummary) -> str:
    runs = (row.completed or 0) + row.diverged
    if not row.num_steps or not runs or row.diverged:
        return ""
    if row.num_steps % runs:  # as of a script that leaves out batches
        return f"{row.num_steps:,} steps in {runs} runs"
    return f"{row.num_steps // runs:,} steps"


def _skipped_of_all_steps_text(row: ArmSummary) -> str:
    if row.skipped_steps is None:
        return ""
    if 0 < row.skipped_steps == row.num_steps:
        return f"all {row.num_steps} steps skipped"  # as why a run learned nothing
    return (
        f"{row.skipped_steps:,} of {row.num_steps:,} steps skipped"
        if row.skipped_steps
        else "0 steps skipped"
    )


def _loss_scale_text(row: ArmSummary) -> str:
    return "" if row.final_loss_scale is None else f"final loss scale {row.final_loss_scale:g}"


SETTINGS: tuple[Value, ...] = (_lr_text, _steps_text, _skipped_of_all_steps_text)


def _distinct_values(comparison: Comparison, value: Value) -> set[str]:
    return {text for row in comparison.arms if (text := value(row))}


def _setting_of_all_text(comparison: Comparison, value: Value) -> str:
    """Return the one value of a setting that all arms have, or all whose runs did not diverge; "" for several."""
    ran = [row for row in comparison.arms if row.completed or row.diverged]
    if len(texts := _distinct_values(comparison, value)) != 1:
        return ""
    return f"{min(texts)}{'' if all(map(value, ran)) else ' where no run diverged'}"


def _notes_by_row_on_differing_settings(comparison: Comparison) -> list[Value]:
    """Return the settings and counts in which rows differ, each as the note of a row."""
    chosen: list[Value] = [value for value in SETTINGS if not _setting_of_all_text(comparison, value)]
    shown = [
        _skipped_of_all_steps_text_if_any if value is _skipped_of_all_steps_text else value
        for value in chosen
    ]
    return [*shown, *([_engine_text] if _do_engines_differ(comparison) else [])]


def _skipped_of_all_steps_text_if_any(row: ArmSummary) -> str:
    return _skipped_of_all_steps_text(row) if row.skipped_steps else ""


def _engine_text(row: ArmSummary) -> str:
    return f"engine {engine_text_of_arm(row)}" if row.engine else ""


def _engine_texts_by_backend(comparison: Comparison) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in comparison.arms:
        if row.engine:
            found.setdefault(row.arm.partition(":")[0].partition(" ")[0], set()).add(engine_text_of_arm(row))
    return found


def _do_engines_differ(comparison: Comparison) -> bool:
    return any(len(engines) > 1 for engines in _engine_texts_by_backend(comparison).values())


def _shared_settings_line(comparison: Comparison) -> str:
    """Return one line of what all arms share."""
    if comparison.judged is not None:
        return ""
    shared = [*filter(None, [_seed_numbers_text(comparison.seeds)])]
    for value in SETTINGS:
        shared += filter(None, [_setting_of_all_text(comparison, value)])
    stacks = {one.config.script.first_weights for one in comparison.records if one.config.script is not None}
    shared += [f"first weights of the stack {one.name}" for one in stacks if one is not None]
    if len(scales := _distinct_values(comparison, _loss_scale_text)) == 1:
        is_of_all = all(_loss_scale_text(row) for row in comparison.arms if row.has_completed)
        shared.append(f"{scales.pop()}{'' if is_of_all else ' where the loss is scaled'}")
    whose = "All arms: " if len(comparison.arms) > 1 else ""
    line = f"{whose}{', '.join(shared)}." if shared else ""
    line = line[:1].upper() + line[1:]
    engines = _engine_texts_by_backend(comparison)
    if engines and not _do_engines_differ(comparison):
        line += f" Engine: {', '.join(f'{min(its)} ({printable_line(name, 40)})' for name, its in engines.items())}."
    return line.strip()


def _seed_numbers_text(seeds: Sequence[int]) -> str:
    """Return `seeds 0-4`, or the single ones where they have gaps."""
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"seeds {seeds[0]}-{seeds[-1]}"
    return f"seed{'s' if len(seeds) > 1 else ''} {' '.join(map(str, seeds))}" if seeds else ""


def _invalid_step_times_line(comparison: Comparison) -> str:
    """Return one line: which step times do not count, or are not compared, and why."""
    reasons: dict[str, dict[str, list[str]]] = {"No step times": {}, "Step times without a verdict": {}}
    missing, unjudged = reasons.values()
    for row in comparison.arms:
        if reason := _why_no_time(row):
            missing.setdefault(reason, []).append(printable_line(row.arm, 60))
        elif row.has_completed and row.time.kind in UNJUDGED:
            unjudged.setdefault(printable_line(str(row.time), 200), []).append(printable_line(row.arm, 60))
    lines = [
        f"{what}: {'; '.join(f'{reason} for {format_few_names(names)}' for reason, names in its.items())}."
        for what, its in reasons.items()
        if its
    ]
    return printable_line(" ".join(lines), 2000)


def _cpu_memory_spread_line(comparison: Comparison) -> str:
    """Return one line on peaks measured on a CPU, which differ between equal runs; "" elsewhere."""
    peaks: dict[str, list[int]] = {}
    for record in comparison.records:
        if record.device_kind != "cpu":
            return ""
        if record.summary.peak_bytes is not None:
            peaks.setdefault(record.arm, []).append(record.summary.peak_bytes)
    if not peaks:
        return ""
    spread = max(max(values) - min(values) for values in peaks.values())
    shown = f"{spread / MIB:.1f}"
    here = f": here by up to {shown} MiB between the seeds of an arm" if float(shown) else ""
    return f"Peak MiB: growth of resident memory, the highest of the seeds; on a CPU it varies from run to run{here}."


def _written_files_line(comparison: Comparison) -> str:
    """Return one line on the files that a script wrote, from the working directory; "" without any."""
    scripts = [record.script for record in comparison.records if record.script is not None]
    files = dict.fromkeys(file for script in scripts for file in script.files)
    near = {file: os.path.relpath(file) for file in files}
    names = [printable_line(file if near[file].startswith(os.pardir) else near[file], 120) for file in files]
    if not names:
        return ""
    return (
        f"The script wrote {format_few_names(names)}: into cells/CELL/{CellFile.WRITTEN}, and your own "
        "files are as they were."
    )


def _why_no_time(row: ArmSummary) -> str:
    """Return why there is no step time of an arm; "" where there is one, or no run."""
    if is_emulated(row):
        return f"{printable_line(emulated_type(row.half), 40)} emulated (computed in fp32, rounded)"
    if not row.has_completed:
        return ""
    return f"invalid ({row.invalid_time})" if row.invalid_time else ""
