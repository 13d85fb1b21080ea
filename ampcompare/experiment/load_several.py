"""Load several run directories: those with equal settings form one experiment, the others stay separate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ampcompare.analysis.inference.criteria import criteria_of
from ampcompare.analysis.inference.looks import Design, error_rate_of_next
from ampcompare.analysis.runs.comparability import changed_settings
from ampcompare.analysis.summary import summarize
from ampcompare.base.errors import ConfigError, RecordError
from ampcompare.experiment.load import reload_comparison
from ampcompare.records.comparison import Comparison
from ampcompare.records.run import RunRecord

__all__ = ["reload_experiments"]


def reload_experiments(paths: Sequence[Path]) -> list[tuple[str, Comparison]]:
    """Read run directories or `report.json` files, and return experiments of different settings, each with a name.

    Directories whose runs differ in nothing but arm and seed are summed up together, as if one command had run them.

    Raises:
        RecordError: one cannot be read or holds no runs, or two hold the same arm with the same seed.
        ConfigError: two that belong together have different references or margins.
    """
    loaded = [(_name(path, paths), reload_comparison(path)) for path in paths]
    for name, comparison in loaded:
        if not comparison.records:
            raise RecordError(f"{name} holds no runs, only their summary; name a run directory")
    groups: list[list[tuple[str, Comparison]]] = []
    for one in loaded:
        group = next((group for group in groups if _same_settings(group[0][1], one[1])), None)
        if group is None:
            groups.append([one])
        else:
            group.append(one)
    return [group[0] if len(group) == 1 else _together(group) for group in groups]


def _name(path: Path, paths: Sequence[Path]) -> str:
    """Return the last part of a path that distinguishes it from the others."""
    names = [other.resolve().name for other in paths]
    return path.resolve().name if names.count(path.resolve().name) == 1 else str(path)


def _same_settings(one: Comparison, other: Comparison) -> bool:
    return not changed_settings(_first(one).config, _first(other).config)


def _first(comparison: Comparison) -> RunRecord:
    """Return a record of the reference, or else of another arm."""
    mine = (record for record in comparison.records if record.arm == comparison.reference)
    return next(mine, comparison.records[0])


def _together(group: Sequence[tuple[str, Comparison]]) -> tuple[str, Comparison]:
    """Sum up the records of several directories of equal settings."""
    first_name, first = group[0]
    origin: dict[tuple[str, int], str] = {}  # of the directories before
    for name, comparison in group:
        if (comparison.reference, criteria_of(comparison)) != (first.reference, criteria_of(first)):
            raise ConfigError(
                f"{first_name} and {name} hold runs of the same settings, but have different references, margins or "
                f"tags; name one of them"
            )
        keys = [(record.arm, record.config.recipe.seed) for record in comparison.records]
        for arm, seed in keys:
            if (arm, seed) in origin:
                raise RecordError(
                    f"{arm} with seed {seed} is in {origin[arm, seed]} and in {name}, which hold runs of the same "
                    "settings; a run counts once, so name one of them"
                )
        origin |= dict.fromkeys(keys, name)
    comparison = summarize(
        [record for _, comparison in group for record in comparison.records],
        arms=list(dict.fromkeys(row.arm for _, comparison in group for row in comparison.arms)),
        reference=first.reference,
        command="; ".join(comparison.command for _, comparison in group if comparison.command),
        terms=criteria_of(first),
        design=_design([comparison for _, comparison in group]),
        published=first.published,
        excluded=[line for _, comparison in group for line in comparison.excluded],
    )
    return " + ".join(name for name, _ in group), comparison


def _design(comparisons: Sequence[Comparison]) -> Design | None:
    """Return how runs of several directories are tested together; None where no journal has a look at any of them.

    It is one more look at each. Its error rate is that of the next look at the directory with the least left, halved
    for every further directory, since adding directories one by one looks again each time.
    """
    if not any(comparison.looks for comparison in comparisons):
        return None
    rates = [0.0 if comparison.error_rate == 0 else _next_error_rate(comparison) for comparison in comparisons]
    rate = min(rates) / 2 ** (len(comparisons) - 2)
    looks = "Runs of several directories, each of which was looked at before"
    if not rate:
        return Design(
            0.0, 0.0, notes=(f"Nothing was tested: {looks.lower()}, and one of them has no error rate left to spend.",)
        )
    return Design(rate, rate / 2, notes=(f"{looks}: one more look, tested at an error rate of {100 * rate:.3g} %.",))


def _next_error_rate(comparison: Comparison) -> float:
    return error_rate_of_next(comparison.looks, comparison.looks[-1].planned if comparison.looks else None)
