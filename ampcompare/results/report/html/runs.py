"""The arms of a page with their runs, and why an arm's times do not count."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampcompare.base.formatting import printable_line
from ampcompare.results.analysis.effects.step_time import invalid_time_reason
from ampcompare.results.records.comparison import ArmSummary, Comparison
from ampcompare.results.records.evaluation import emulated_type
from ampcompare.results.records.run import RunRecord
from ampcompare.results.records.verdict import UNJUDGED

VARIED = ("arm", "recipe.seed")  # by the matrix itself
OF_A_FAILURE = ("exit_code",)
MAX_NAMED = 12


@dataclass(frozen=True)
class ArmRuns:
    """An arm: its index among the rows, its summary and its records."""

    index: int
    row: ArmSummary
    records: Sequence[RunRecord]

    @property
    def name(self) -> str:
        return printable_line(self.row.arm, 60) or "(no name)"

    @property
    def records_that_ran(self) -> list[RunRecord]:
        return [record for record in self.records if record.has_result]

    @property
    def completed_runs(self) -> list[RunRecord]:
        return [record for record in self.records if record.status == "completed"]

    @property
    def timed_runs(self) -> list[RunRecord]:
        """Those of `records_that_ran` whose times figures may draw: none if the times of the arm are invalid."""
        return (
            []
            if self.row.invalid_time
            else [record for record in self.records_that_ran if not invalid_time_reason(record)]
        )

    @property
    def why_times_do_not_count(self) -> str:
        """Why its times do not count, such as `invalid: load 9.0 on 2 cores`; "" if they do."""
        if self.row.invalid_time:
            return printable_line(f"invalid: {self.row.invalid_time}", 100)
        half = (
            next((record.half for record in self.records_that_ran if record.half), None)
            or self.row.half
            or ""
        )
        if emulated_type(half):
            return printable_line(half, 60)
        return printable_line(str(self.row.time), 100) if self.row.time.kind in UNJUDGED else ""


def arms_with_runs(comparison: Comparison) -> list[ArmRuns]:
    """Return the arms in the order of the rows."""
    by_arm = comparison.by_arm()
    return [ArmRuns(index, row, by_arm[row.arm]) for index, row in enumerate(comparison.arms)]


def arms_without_valid_times_sentence(arms: Sequence[ArmRuns]) -> str:
    """Return one sentence that names the arms whose times do not count, by reason; "" if there are none."""
    faults: dict[str, list[str]] = {}
    for arm in arms:
        if arm.why_times_do_not_count:
            faults.setdefault(arm.why_times_do_not_count, []).append(arm.name)
    if not faults:
        return ""
    words = [f"{join_first_names(names)} ({fault})" for fault, names in faults.items()]
    return f"Times that do not count: {'; '.join(words)}."


def arms_not_drawn_text(
    arms: Sequence[ArmRuns], drawn: Collection[int], why: Callable[[ArmRuns], str]
) -> str:
    """Return a sentence for each reason why arms are not in a figure that shows others."""
    reasons: dict[str, list[str]] = {}
    for arm in arms:
        if drawn and arm.index not in drawn and (reason := why(arm)):
            reasons.setdefault(reason, []).append(arm.name)
    return "".join(f" Not drawn: {join_first_names(names)} ({reason})." for reason, names in reasons.items())


def round_to_digits(value: float, digits: int = 5) -> float:
    """Return a number with this many digits; a whole one as an int, which is shorter in JSON."""
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() else short


@dataclass(frozen=True)
class SharedAndDifferingFacts:
    """Facts by name: those equal in all runs, and for the others their values by arm."""

    equal: list[tuple[str, str]]
    differing: list[tuple[str, list[tuple[str, str]]]]


def shared_and_differing_settings(comparison: Comparison) -> SharedAndDifferingFacts:
    """Return the settings of all runs, by dotted names such as `recipe.optimizer.lr`."""
    facts = [record.config.values_by_path() for record in comparison.records]
    return _shared_and_differing_facts(
        comparison.records, [{k: v for k, v in found.items() if k not in VARIED} for found in facts]
    )


def shared_nondefault_settings(comparison: Comparison, shared: SharedAndDifferingFacts) -> list[list[str]]:
    """Return the settings that all runs share and that differ from their defaults: name, value here, default."""
    known = comparison.records[0].config.defaults_by_path() if comparison.records else {}
    defaults = {name: _setting_text(value) for name, value in known.items()}
    return [
        [name.removeprefix("recipe."), value, defaults.get(name, "not set")]
        for name, value in shared.equal
        if value != defaults.get(name, "not set")
    ]


def shared_and_differing_environment(comparison: Comparison) -> SharedAndDifferingFacts:
    """Return the environment of all runs that started; of the comparison if none started."""
    known = [record for record in comparison.records if record.environment]
    records = [record for record in known if record.status != "failed"] or known
    if not records:
        return SharedAndDifferingFacts(
            [(_setting_text(name), _setting_text(value)) for name, value in comparison.environment.items()],
            [],
        )
    facts = [{k: v for k, v in record.environment.items() if k not in OF_A_FAILURE} for record in records]
    return _shared_and_differing_facts(records, facts)


def _setting_text(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, list | tuple):
        return ", ".join(_setting_text(item) for item in value)
    if isinstance(value, Mapping) and not value:
        return "none"
    return printable_line(str(value).lower() if isinstance(value, bool) else str(value), 200)


def _shared_and_differing_facts(
    records: Sequence[RunRecord], facts: Sequence[Mapping[str, Any]]
) -> SharedAndDifferingFacts:
    names = list(dict.fromkeys(name for found in facts for name in found))
    equal: list[tuple[str, str]] = []
    differing: list[tuple[str, list[tuple[str, str]]]] = []
    for name in names:
        seen = [_setting_text(found.get(name)) for found in facts]
        if len(set(seen)) == 1:
            equal.append((_setting_text(name), seen[0]))
            continue
        by_value: dict[str, dict[str, None]] = {}
        for record, value in zip(records, seen, strict=True):
            by_value.setdefault(value, {})[printable_line(record.arm, 60)] = None
        differing.append(
            (_setting_text(name), [(value, join_first_names(arms)) for value, arms in by_value.items()])
        )
    return SharedAndDifferingFacts(equal, differing)


def join_first_names(names: Iterable[str]) -> str:
    """Return names in a row; of very many, the first ones and how many more there are."""
    known = list(names)
    shown = ", ".join(known[:MAX_NAMED])
    return shown if len(known) <= MAX_NAMED else f"{shown} and {len(known) - MAX_NAMED} more"
