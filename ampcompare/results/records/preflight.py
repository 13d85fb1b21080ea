"""What a few steps of each arm have shown before a comparison, and the same in words."""

import statistics
from collections.abc import Mapping, Sequence

from pydantic import Field

from ampcompare.base.formatting import format_count, format_duration, format_few_names
from ampcompare.results.records.document import ArmLabel, FrozenRecord

MAX_SHOWN = 6  # names in a line
PER = 1000  # steps of which the cost is given where the number of steps of a cell is not known


class ArmTrial(FrozenRecord):
    """A few steps of one arm, or why it made none."""

    error: str = Field("", description="why it cannot train")
    exit_code: int = Field(0, description="of that error")
    steps: int = 0
    seconds: float = Field(0.0, description="from the start of its process to its end")
    step_seconds: float | None = Field(
        None, description="median, without the first step where there are others"
    )
    lost_loss_at: int | None = Field(
        None, description="the first step whose loss is not finite, where that of the last one is not either"
    )

    @property
    def overhead_seconds(self) -> float:
        """The seconds in which it made no step."""
        return max(0.0, self.seconds - self.steps * (self.step_seconds or 0.0))


class Preflight(FrozenRecord):
    """What a few steps of each arm before all cells have shown; of the reference where it does not say which arm."""

    arms: dict[ArmLabel, ArmTrial] = Field({}, description="by the label of a row")
    untried: list[str] = Field([], description="rows for which the time did not last")
    optimizers: list[str] = Field([], description="the names of their classes")
    losses: list[float] = Field([], description="of the first steps")
    remarks: dict[str, list[ArmLabel]] = Field(
        {}, description="what goes wrong by the script's own lines, with the rows in which it does"
    )
    is_script: bool = False
    copies: bool | None = Field(None, description="whether two seeds gave the same weights and batches")
    seed_option: str = Field("", description="of the script, for its seed")
    why_copies: str = Field("", description="why they did, and what helps")
    metrics: dict[str, float | None] = Field({}, description="the requested ones, with the last value so far")
    faults: dict[str, str] = Field({}, description="why the values of a requested metric cannot be used")
    numbers: dict[str, str] = Field(
        {}, description="what the script showed, each with the option that takes it"
    )
    written: list[str] = Field([], description="files that it wrote outside of the folder of its cell")
    overwritten: list[str] = Field([], description="those of them that lie there")
    cell_steps: int | None = Field(None, description="of a whole cell, as far as it is known")
    seconds: float = 0.0

    @property
    def failures(self) -> dict[str, list[str]]:
        """The arms that cannot train, by the reason."""
        arms: dict[str, list[str]] = {}
        for arm, trial in self.arms.items():
            if trial.error:
                arms.setdefault(trial.error, []).append(arm)
        return arms

    def cell_seconds(self, label: str, steps: int) -> float:
        """Return the seconds of a cell with so many steps.

        Args:
            label: of the row; of one that was not tried the mean of the others counts.
            steps: of the cell.
        """
        known = [trial for trial in self.arms.values() if trial.step_seconds is not None]
        trial = self.arms.get(label)
        own = trial if trial is not None and trial.step_seconds is not None else None
        step = (
            own.step_seconds
            if own is not None
            else statistics.fmean(one.step_seconds or 0.0 for one in known)
        )
        later = known[1:] or known  # the first one also started the server of all
        return statistics.median(one.overhead_seconds for one in later) + steps * (step or 0.0)

    def estimate_seconds(self, labels: Sequence[str], steps: int | None = None) -> float | None:
        """Return the seconds of cells in turn, by their rows; None if steps, or the time of one, are not known.

        Args:
            labels: of the rows, one for each cell.
            steps: of each cell; None for those that were seen.
        """
        steps = self.cell_steps if steps is None else steps
        if steps is None or all(trial.step_seconds is None for trial in self.arms.values()):
            return None
        return sum(self.cell_seconds(label, steps) for label in labels if not self.is_refused(label))

    def is_refused(self, label: str) -> bool:
        """Return whether the arm of a row cannot train."""
        return label in self.arms and bool(self.arms[label].error)

    @property
    def identical_seeds_sentence(self) -> str:
        """What there is to say where two seeds gave the same run."""
        option = (
            f"--seed-arg={self.seed_option} passes it on"
            if self.seed_option
            else "pass it on with --seed-arg"
        )
        return f"the script does not follow the seed, so that all seeds give the same run: {self.why_copies or option}"

    def summary_lines(self, labels: Sequence[str] = ()) -> list[str]:
        """Return what was seen in a few lines, by the rows of a plan's cells."""
        lines = [f"  {format_few_names(arms)} cannot train: {error}" for error, arms in self.failures.items()]
        trained = {arm: trial for arm, trial in self.arms.items() if trial.steps and not trial.error}
        if not trained:
            known = lines or ["  no step yet, so that nothing is known of what comes"]
            return [f"preflight, {format_duration(self.seconds)}:", *known]
        if self.untried:
            lines.append(
                f"  {format_few_names(self.untried)} not tried, as that takes long: their first cells show it"
            )
        steps = next(iter(trained.values())).steps
        what = [f"{format_few_names(list(trained))} trained", f"{format_count(steps, 'step')} each"]
        what += [f"with {format_few_names(self.optimizers)}"] if self.optimizers else []
        what += [f"loss {self.losses[0]:.4g} to {self.losses[-1]:.4g}"] if self.losses else []
        lines = [f"preflight, {format_duration(self.seconds)}: {', '.join(what)}", *lines]
        lines += [f"  {format_few_names(arms)}: {text}" for text, arms in self.remarks.items()]
        lines += self._nonfinite_loss_lines(trained)
        if self.copies:
            lines.append(f"  {self.identical_seeds_sentence}")
        for name, value in self.metrics.items():
            seen = f"{value:g} so far" if value is not None else f"not seen in {format_count(steps, 'step')}"
            lines.append(f"  metric {name}: {seen}")
        if labels and self.is_script and not self.metrics:
            shown = (
                f"; it shows {format_few_names(list(self.numbers)[:MAX_SHOWN])}: see --list-metrics"
                if self.numbers
                else ""
            )
            lines.append(f"  metric: its training loss{shown}")
        if self.overwritten:
            lines.append(
                f"  writes {format_few_names(self.overwritten)}, which is there: a script that reads it may "
                "resume an earlier run"
            )
        elif self.written:
            lines.append(f"  writes {format_few_names(self.written)}")
        return [*lines, *self._cost_lines(labels)]

    @staticmethod
    def _nonfinite_loss_lines(trained: Mapping[str, ArmTrial]) -> list[str]:
        """Return a line for each step at which the loss of some arms is not finite."""
        arms: dict[int, list[str]] = {}
        for arm, trial in trained.items():
            if trial.lost_loss_at is not None:
                arms.setdefault(trial.lost_loss_at, []).append(arm)
        return [
            f"  {'' if len(some) == len(trained) else format_few_names(some) + ': '}"
            f"the loss is not finite in step {step}, before anything is compared"
            for step, some in sorted(arms.items())
        ]

    def _cost_lines(self, labels: Sequence[str]) -> list[str]:
        cost = self.estimate_seconds(labels, self.cell_steps or PER)
        if not labels or cost is None:
            return []
        line = f"  about {format_duration(cost)} for {format_count(len(labels), 'cell')} in turn"
        if self.cell_steps is not None:
            return [f"{line}, {format_count(self.cell_steps, 'step')} each"]
        return [f"{line} of {PER} steps each; how many a cell makes is not known"]
