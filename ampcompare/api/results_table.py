"""Compare results that were measured elsewhere, or with earlier ones: the command `judge`."""

from pathlib import Path
from typing import TextIO, get_args

from ampcompare.base.errors import ConfigError, require_one_of
from ampcompare.base.option_rules import refusal_sentence
from ampcompare.experiment.reload_report import read_records
from ampcompare.results.analysis.against import AgainstResult, judge_new_results, table_of_records
from ampcompare.results.analysis.inference.terms import Preference, Terms
from ampcompare.results.analysis.results_table import Better, ResultsTable, judge_arms, read_table
from ampcompare.results.records.comparison import Comparison


def judge_table(
    table: str | Path | TextIO,
    *,
    reference: str | None = None,
    metric: str | None = None,
    better: Better | None = None,
    sd: float | None = None,
    margin: float | str = Terms.margin,
    time_margin: float = 100 * Terms.time_margin,
    objective: Preference = Terms.prefer,
) -> Comparison:
    """Compare the arms of a table of results that were measured elsewhere; `judged` says what the figures are.

    Args:
        table: a CSV or Markdown file with a line per run, or per mean of runs, and the columns arm, a metric and, where
            known, seed, seconds and n, the runs behind a mean.
        reference: the arm that the others are compared with, in any case; by default script, else fp32,
            else the first.
        metric: column that holds the results; by default accuracy, else the only one.
        better: direction of the metric; by default what its name tells, as of accuracy, BLEU or RMSE.
        sd: published standard deviation over seeds in the unit of the metric, for arms with fewer than three runs.
        margin: equivalence margin in the unit of the metric, or for accuracy a rule as for `compare`.
        time_margin: equivalence margin in percent of the time.
        objective: what the recommended arm improves while it keeps the quality.

    Raises:
        RecordError: the table cannot be read; the message names the line.
        ConfigError: an option that cannot be used, there is no arm of the reference's name, or the metric needs a
            direction or a margin.
    """
    require_one_of((None, *get_args(Better)), "better", better)
    results = read_table(Path(table) if isinstance(table, str) else table, metric=metric, better=better)
    return judge_arms(results, reference=reference, sd=sd, terms=Terms(margin, time_margin / 100, objective))


def judge_against(
    new: str | Path | TextIO,
    old: str | Path,
    *,
    arm: str | None = None,
    metric: str | None = None,
    better: Better | None = None,
    sd: float | None = None,
    margin: float | str = Terms.margin,
) -> AgainstResult:
    """Say whether new results are no worse than old ones, worse, or whether that cannot be told.

    Args:
        new: a run directory, a `report.json` or `record.json`, or a table as for `judge_table`.
        old: the results to compare with, of any of these kinds.
        arm: arm to compare where a side has several; a side with one arm needs none, whatever its name.
        metric: column that holds the results, as for `judge_table`; runs have the metric that they were trained by.
        better: direction of the metric, as for `judge_table`.
        sd: published standard deviation over seeds, as for `judge_table`.
        margin: difference that does not matter, in the unit of the metric, or for accuracy a rule as for `compare`.

    Returns:
        The answer, with effect, interval and the seeds that are still needed; `data()` is the line of JSON, and
        `exit_code` that of the command.

    Raises:
        RecordError: a table or folder cannot be read.
        ConfigError: several arms and none named, two metrics, or an option that cannot be used.
        ExtraMissing: the extra `stats` is not installed.
    """
    require_one_of((None, *get_args(Better)), "better", better)
    tables = [_read_run_or_table(side, metric, better) for side in (new, old)]
    return judge_new_results(*tables, arm=arm, sd=sd, terms=Terms(margin))


def _read_run_or_table(
    source: str | Path | TextIO, metric: str | None, better: Better | None
) -> ResultsTable:
    path = Path(source) if isinstance(source, (str, Path)) else None
    if path is None or not (path.is_dir() or path.suffix == ".json"):
        return read_table(path or source, metric=metric, better=better)
    table = table_of_records(read_records(path), str(path))
    if metric not in (None, table.metric.name):
        why = f"was trained by {table.metric.name}, not {metric}"
        raise ConfigError(refusal_sentence(str(path), why, "leave --metric out"))
    return table
