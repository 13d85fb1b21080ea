"""Compare results that were measured elsewhere: the command `judge`."""

from pathlib import Path
from typing import TextIO, get_args

from ampcompare.base.errors import require_one_of
from ampcompare.results.analysis.inference.criteria import Criteria, Preference
from ampcompare.results.analysis.results_table import Better, judge, read_table
from ampcompare.results.records.comparison import Comparison


def judge_table(
    table: str | Path | TextIO,
    *,
    reference: str | None = None,
    metric: str | None = None,
    better: Better | None = None,
    sd: float | None = None,
    margin: float | str = Criteria.margin,
    time_margin: float = 100 * Criteria.time_margin,
    objective: Preference = Criteria.prefer,
) -> Comparison:
    """Compare the arms of a table of results that were measured elsewhere; `judged` says what the figures are.

    Args:
        table: a CSV or Markdown file with a line per run, or per mean of runs, and the columns arm, a metric and, where
            known, seed, seconds and n, the runs behind a mean.
        reference: the arm that the others are compared with, in any case; by default fp32, or else the first.
        metric: column that holds the results; by default accuracy, else the only one.
        better: direction of the metric; by default what its name tells, as of accuracy, BLEU or RMSE.
        sd: published standard deviation over seeds in the unit of the metric, for arms with fewer than three runs.
        margin: equivalence margin in the unit of the metric, or for accuracy a rule as for `compare`.
        time_margin: equivalence margin in percent of the time.
        objective: what the recommended arm improves while it keeps the accuracy.

    Raises:
        RecordError: the table cannot be read; the message names the line.
        ConfigError: an option that cannot be used, there is no arm of the reference's name, or the metric needs a
            direction or a margin.
    """
    require_one_of((None, *get_args(Better)), "better", better)
    results = read_table(Path(table) if isinstance(table, str) else table, metric=metric, better=better)
    return judge(results, reference=reference, sd=sd, terms=Criteria(margin, time_margin / 100, objective))
