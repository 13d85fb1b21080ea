"""Compare results that were measured elsewhere: the command `judge`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ampcompare.backends.arm import same_arm
from ampcompare.runs.analysis.inference.criteria import Criteria, Preference
from ampcompare.runs.analysis.tables.csv_table import TableOptions, read_table_file
from ampcompare.runs.analysis.tables.external import judge
from ampcompare.runs.analysis.tables.quantities import Better
from ampcompare.runs.records.comparison import Comparison

__all__ = ["judge_table"]


def judge_table(
    table: str | Path,
    *,
    reference: str | None = None,
    metric: str | None = None,
    better: Better | None = None,
    within: Sequence[str] | str = (),
    settings: Sequence[str] | str = (),
    sd: float | None = None,
    runs: int | None = None,
    margin: float | str = Criteria.margin,
    time_margin: float = 100 * Criteria.time_margin,
    objective: Preference = Criteria.prefer,
) -> Comparison:
    """Compare the arms of a table of results that were measured elsewhere.

    Args:
        table: a CSV or Markdown file with a line per run, or per mean of runs, and the columns arm, a metric such as
            accuracy and, if known, seed, sd, n, time or throughput, memory and diverged.
        reference: the arm that the others are compared with, in any case; by default fp32, or else the first.
        metric: column that holds the results; by default accuracy, else a known metric.
        better: direction of the metric; by default lower for error, loss, WER and the like, else higher.
        within: settings whose values divide the table into blocks; arms are compared within each block.
        settings: columns that runs must share, besides those with known names.
        sd: published standard deviation over seeds in the unit of the metric, for arms with fewer than three runs.
        runs: number of runs averaged in each line that has a standard deviation, such as ± 0.16, but no number of
            runs.
        margin: equivalence margin in the unit of the metric, or a rule as for `compare`; for metrics other than
            accuracy, "auto" is the usual margin of the metric.
        time_margin: equivalence margin in percent of the time.
        objective: what the recommended arm improves while it keeps the accuracy.

    Returns:
        A comparison without records; `judged` says what its figures are.

    Raises:
        RecordError: the table cannot be read; the message names the line.
        ConfigError: an option that cannot be used, there is no arm of the reference's name, or the metric has no usual
            margin.
    """
    blocks = (within,) if isinstance(within, str) else tuple(within)
    shared = (settings,) if isinstance(settings, str) else tuple(settings)
    results = read_table_file(Path(table), TableOptions(metric, better, (*shared, *blocks)))
    criteria = Criteria(margin, time_margin / 100, objective)
    reference = same_arm(reference, [run.arm for run in results.runs])
    return judge(results, reference=reference, sd=sd, terms=criteria, within=blocks, runs=runs)
