"""Next steps after a comparison: commands to paste, built from the command that made it.

No step changes a margin: a margin is chosen before the runs. More seeds are advised only where a look is left to test
them (`results.analysis.inference.alpha_spending`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ampcompare.base.files.run_files import CellFile, file_of_cell
from ampcompare.base.formatting import format_ranges
from ampcompare.base.secrets.masking import hide_secrets_in_words
from ampcompare.results.analysis.conclusions.phrases import names_text
from ampcompare.results.analysis.conclusions.recommendation import (
    arms_doubted_for_ranking_ties,
    recommended_arms,
)
from ampcompare.results.analysis.inference.effect import MIN_PAIRS
from ampcompare.results.analysis.pairing.learning import (
    EPS,
    arms_that_skip_most_steps,
    learned_nothing_verdict,
    proven_divergence_cause,
)
from ampcompare.results.analysis.pairing.seeding import fixes_seed_of_torch
from ampcompare.results.records.comparison import ArmSummary, Comparison, NextStep
from ampcompare.results.records.run import NOT_STARTED, RunRecord
from ampcompare.results.records.verdict import OPEN

MAX_STEPS = 3
FIRST_SEEDS = 5  # where there are too few for a verdict
MAX_LR = 0.1  # that is advised where the reference diverged, however large its own
MAX_MORE = 20  # seeds that are advised to settle as many arms as possible; beyond, as few as settle one
REFUSED = 2  # exit code of a script that an arm refuses: its message says what to do
SAFE_EPS = "1e-4"  # far above the least number of fp16
PROGRAM = ["ampcompare", "compare"]
WATCHED = 8  # steps that `diagnose` watches unless it is asked for more
MAX_WATCHED = 40  # a divergence behind them is late for it
# In the error of a script that checks its numbers, or of a library that does, such as SciPy or torch.distributions.
SAYS_NOT_FINITE = re.compile(
    r"\b(?:nans?|infs?|infinite|infinity|non-?finite)\b|not finite|invalid numeric entries|constraint .*\bReal\(\)",
    re.IGNORECASE,
)
# Likewise, of a number that is finite and wrong: a loss that has diverged, or a matrix that rounding makes singular.
CHECKS_NUMBERS = re.compile(
    r"\b(?:AssertionError|LinAlgError|ZeroDivisionError)\b|not positive-definite|satisfy the constraint|"
    r"\b(?:diverge[ds]?|diverging|explode[ds]?|exploding)\b",
    re.IGNORECASE,
)
OF_SCRIPT_RUN = (
    "--device",
    "--shift-seeds",
    "--seed-arg",
    "--nproc-per-node",
    "--compat-torch",
    "--allow-writes",
)


NUMBERS_IN_ERRORS = (("not finite", SAYS_NOT_FINITE), ("wrong", CHECKS_NUMBERS))


def next_steps(comparison: Comparison, next_error_rate: float) -> list[NextStep]:
    """Return what to do next, the most useful first, and each command once.

    Args:
        comparison: what there is.
        next_error_rate: what the next look may spend; 0 where no look is left.
    """
    typed = CompareCommandLine.parse(comparison.command)
    steps = list(_all_next_steps(comparison, comparison.by_arm(), typed, next_error_rate))
    return list({step.command: step for step in reversed(steps)}.values())[::-1][:MAX_STEPS]


def _all_next_steps(
    comparison: Comparison,
    by_arm: Mapping[str, Sequence[RunRecord]],
    command_line: CompareCommandLine | None,
    next_error_rate: float,
) -> Iterator[NextStep]:
    rows = [row for row in comparison.arms if row.arm != comparison.reference]
    if command_line is not None:
        yield from _next_step_for_missing_runs(comparison, command_line)
    reference = by_arm.get(comparison.reference, [])
    blocked = _next_step_for_unusable_reference(comparison, reference, command_line)
    if blocked:
        yield blocked
    yield from _next_steps_after_failure(comparison, by_arm, command_line)
    if blocked:
        return
    tied = arms_doubted_for_ranking_ties(comparison.arms, comparison.reference, comparison.metric)
    for row in recommended_arms(rows, comparison.prefer, comparison.metric, tied)[:1]:
        if not by_arm[row.arm][0].config.parsed_arm.is_as_written:  # such as a script in another stack
            yield _next_step_to_explain_arm(
                by_arm[row.arm], f"see what to write in a training script for {row.arm}"
            )
    if command_line is not None:
        told_by_seeds = [row for row in rows if row.arm not in tied]
        yield from _next_steps_with_more_seeds(comparison, told_by_seeds, command_line, next_error_rate)
    yield from _next_steps_after_divergence(comparison, by_arm, command_line)
    yield from _next_steps_after_skipped_steps(comparison, by_arm, command_line)
    if command_line is not None:
        yield from _next_steps_to_measure_time(rows, command_line)


def _next_step_to_explain_arm(records: Sequence[RunRecord], why: str) -> NextStep:
    return NextStep(command=shlex.join(["ampcompare", "explain", records[0].config.arm]), why=why)


def _next_step_for_missing_runs(
    comparison: Comparison, command_line: CompareCommandLine
) -> Iterator[NextStep]:
    missing = comparison.missing_cells
    # of more seeds there are copies too; the headline has the remedy
    if missing and not comparison.only_copies:
        runs = "the missing run" if len(missing) == 1 else f"the {len(missing)} missing runs"
        yield NextStep(command=str(command_line), why=f"finish {runs}; the others are kept")


def _next_steps_after_failure(
    comparison: Comparison, by_arm: Mapping[str, Sequence[RunRecord]], command_line: CompareCommandLine | None
) -> Iterator[NextStep]:
    for records in by_arm.values():
        failed = [record for record in records if record.status == "failed"]
        if failed and failed[0].config.script is not None:
            if failed[0].environment.get("exit_code") != REFUSED:
                yield _next_step_after_failed_script(failed[0], comparison, command_line)
            continue
        if failed:
            arm = failed[0].config.arm
            why = f"check what {arm} needs here{_place_of_log_text(failed[0])}"
            yield NextStep(command=shlex.join(["ampcompare", "doctor", "--for", arm]), why=why)
            return


def _place_of_log_text(record: RunRecord) -> str:
    """Return where the log of a failed cell is; "" for one that was not started."""
    if NOT_STARTED in record.environment:
        return ""
    return f"; its log is {file_of_cell(record.cell, CellFile.LOG)} in the run directory"


def _next_step_after_failed_script(
    record: RunRecord, comparison: Comparison, command_line: CompareCommandLine | None
) -> NextStep:
    """Return how to see a script fail, or what it computes before, if it checks numbers and another arm trains it."""
    is_by_arm = any(run.status == "completed" and run.arm != record.arm for run in comparison.records)
    is_here = command_line is not None and bool(command_line.script) and record.config.stack is None
    found = [what for what, pattern in NUMBERS_IN_ERRORS if pattern.search(record.error or "")]
    if command_line is None or not is_here or not is_by_arm or not found:
        return _next_step_rerunning_in_foreground(record)
    command = command_line.command_to_diagnose(record.config.arm, record.config.recipe.seed, 0)
    return NextStep(command=command, why=f"find what is {found[0]} under {record.arm} before its script ends")


def _next_step_rerunning_in_foreground(record: RunRecord) -> NextStep:
    """Return how to see a script fail; in a stack without the options that its recorder has not."""
    script, stack = record.config.script, record.config.stack
    assert script is not None
    seed = record.config.recipe.seed
    words = ["ampcompare", "exec"]
    words += ["--stack", shlex.join(hide_secrets_in_words(shlex.split(stack.text())))] if stack else []
    words += ["--arm", record.arm, "--seed", str(seed)]
    words += ["--shift-seeds", script.shift_seeds] if script.shift_seeds else []
    words += ["--device", "cpu"] if record.config.device == "cpu" and stack is None else []
    words += ["--compat-torch"] if script.compat_torch else []
    words += ["-m"] if script.is_module else []
    arguments = script.arguments_for(seed, record.config.arm, Path("by-hand"))
    return NextStep(
        command=shlex.join([*words, script.name, *arguments]),
        why=f"run it in the foreground{_place_of_log_text(record)}",
    )


def _next_step_for_unusable_reference(
    comparison: Comparison, records: Sequence[RunRecord], command_line: CompareCommandLine | None
) -> NextStep | None:
    """Return what to change where the reference gives nothing to compare with."""
    # which sets its own learning rate
    if command_line is None or not records or records[0].config.script is not None:
        return None
    recipe = records[0].config.recipe
    name = comparison.reference
    if all(record.status == "diverged" for record in records):
        lr = f"{min(recipe.optimizer.lr / 10, MAX_LR):g}"
        return NextStep(
            command=str(command_line.with_option("--lr", lr).with_own_run_directory(f"lr-{lr}")),
            why=f"{name} itself diverged; try a lower learning rate",
        )
    if not learned_nothing_verdict(records):
        return None
    epochs = str(max(10, 3 * recipe.epochs))
    longer = (
        command_line.with_option("--max-steps", None)
        .with_option("--epochs", epochs)
        .with_own_run_directory(f"epochs-{epochs}")
    )
    why = f"train until {name} has learned something; if it has not by then, try another --lr"
    return NextStep(command=str(longer), why=why)


def _next_steps_with_more_seeds(
    comparison: Comparison,
    rows: Sequence[ArmSummary],
    command_line: CompareCommandLine,
    next_error_rate: float,
) -> Iterator[NextStep]:
    """Yield the seeds that give a verdict, within the looks that are left."""
    if comparison.only_copies:  # of more seeds too
        return
    planned = {int(cell.rpartition("@")[2]) for cell in comparison.order}
    seeds = sorted({*comparison.seeds, *planned})
    if not rows or not seeds or command_line.value_of_option("--seeds") == "auto":
        return
    few = [row for row in rows if "few seeds" in (row.quality.kind, row.quality.among)]
    more = {
        row.arm: row.quality.more_seeds for row in rows if row.quality.kind in OPEN and row.quality.more_seeds
    }
    if few and len(seeds) < MIN_PAIRS:
        count = FIRST_SEEDS - len(seeds)
        what = f"for verdicts: {count} more seeds"
    elif more and next_error_rate > 0:
        count = max((number for number in more.values() if number <= MAX_MORE), default=min(more.values()))
        settled = [arm for arm, number in more.items() if number <= count]
        noun = "1 more seed" if count == 1 else f"{count} more seeds"
        what = f"to decide on {names_text(settled)}: {noun} at most"
    elif comparison.look and not next_error_rate and any(row.quality.kind in OPEN for row in rows):
        fresh = range(max(seeds) + 1, max(seeds) + 1 + max(FIRST_SEEDS, 2 * len(seeds)))
        again = command_line.with_option("--seeds", format_ranges(fresh))
        yield NextStep(
            command=str(again.with_own_run_directory("again", same_recipe=True)),
            why="no look is left at these runs; other seeds in another run directory are a new comparison",
        )
        return
    else:
        return
    wanted = [*seeds, *range(max(seeds) + 1, max(seeds) + 1 + count)]
    more_seeds = command_line.with_option("--seeds", format_ranges(wanted))
    if fixes_seed_of_torch(comparison.records):
        more_seeds = CompareCommandLine((*more_seeds.words, "--shift-seeds"), more_seeds.script)
        what += "; the script fixes its seed, which --shift-seeds shifts"
    yield NextStep(command=str(more_seeds), why=what)


def _next_steps_after_divergence(
    comparison: Comparison, by_arm: Mapping[str, Sequence[RunRecord]], command_line: CompareCommandLine | None
) -> Iterator[NextStep]:
    arms = [row.arm for row in comparison.arms if row.diverged and by_arm.get(row.arm)]
    reference = by_arm.get(comparison.reference, [])
    by_eps = [arm for arm in arms if EPS in proven_divergence_cause(by_arm[arm])]
    if by_eps and command_line is not None and command_line.script:
        yield from _next_step_with_masters(by_arm[by_eps[0]], command_line)
    elif by_eps and command_line is not None:
        yield NextStep(
            command=str(
                command_line.with_option("--eps", SAFE_EPS).with_own_run_directory(f"eps-{SAFE_EPS}")
            ),
            why=f"an eps that fp16 can hold, for {names_text(by_eps)}",
        )
    for arm in [arm for arm in arms if arm not in by_eps and arm != comparison.reference][:1]:
        lost = [
            (step, one.config.recipe.seed)
            for one in by_arm[arm]
            if (step := _first_bad_training_step(one)) is not None
        ]
        step, seed = min(lost, default=(None, 0))
        if command_line is not None and command_line.script and step is not None and step <= MAX_WATCHED:
            command = command_line.command_to_diagnose(arm, seed, step)
            first = min(
                (at for one in reference if (at := _first_bad_training_step(one)) is not None), default=None
            )
            why = f"find where {arm} overflows, and try what cures it"
            if first is not None and first <= step:
                why = f"find what is not finite under {arm}; {comparison.reference} diverges too, as by its data or lr"
            yield NextStep(command=command, why=why)
        else:
            yield _next_step_to_explain_arm(
                by_arm[arm], f"see what {arm} does to weights, gradients and the loss scale"
            )


def _next_step_with_masters(
    records: Sequence[RunRecord], command_line: CompareCommandLine
) -> Iterator[NextStep]:
    """Yield the command with fp32 masters too, where the arm has them as an option: the eps is the script's."""
    arm = records[0].config.parsed_arm
    if "master_weights" in (arm.spec.parsers or {}) and arm.roles is not None and not arm.roles.masters:
        other = str(arm.with_options(master_weights=True))
        command = str(CompareCommandLine((*command_line.words, "--arm", other), command_line.script))
        why = (
            f"the eps of the script's optimizer is 0 in fp16: masters, or an eps of {SAFE_EPS} in the script"
        )
        yield NextStep(command=command, why=why)


def _next_steps_after_skipped_steps(
    comparison: Comparison, by_arm: Mapping[str, Sequence[RunRecord]], command_line: CompareCommandLine | None
) -> Iterator[NextStep]:
    """Yield what finds the place that overflows at every loss scale, of the arm that skips the most steps."""
    found = arms_that_skip_most_steps(by_arm)
    found.pop(comparison.reference, None)
    if command_line is None or not command_line.script or not found:
        return
    arm = max(found, key=lambda one: found[one].summary.skipped_steps)
    command = command_line.command_to_diagnose(arm, found[arm].config.recipe.seed, 0)
    yield NextStep(command=command, why=f"find what overflows under {arm}, whose steps were skipped")


def _first_bad_training_step(record: RunRecord) -> int | None:
    """Return the first bad step of a run, or None where it is not known, or the run is good."""
    if record.status != "diverged":
        return None
    found = record.summary.diverged_step
    return record.summary.first_nonfinite_loss_step if found is None else found


def _next_steps_to_measure_time(
    rows: Sequence[ArmSummary], command_line: CompareCommandLine
) -> Iterator[NextStep]:
    kinds = [row.time.kind for row in rows]
    if "emulated" in kinds:
        on_gpu = command_line.with_option("--device", "cuda").with_own_run_directory("gpu", same_recipe=True)
        yield NextStep(command=str(on_gpu), why="on a machine with a GPU: measure step time and memory")
    elif "invalid" in kinds:
        timed = command_line.with_option("--timing-rounds", "3").with_own_run_directory(
            "timed", same_recipe=True
        )
        yield NextStep(command=str(timed), why="on an idle machine: time all arms in turns")


@dataclass(frozen=True)
class CompareCommandLine:
    """The words of `ampcompare compare ...`, and those of a script behind `--`."""

    words: tuple[str, ...]
    script: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> CompareCommandLine | None:
        """Read a command line; None if it is not a single `ampcompare compare`, such as another command."""
        try:
            words = shlex.split(text)
        except ValueError:
            return None
        if words[:2] != PROGRAM or any(word.endswith(";") for word in words):
            return None
        end = words.index("--") if "--" in words else len(words)
        # `--name=value` as two words, as the rest of this class takes them.
        pairs = [word.split("=", 1) if word.startswith("--") else [word] for word in words[:end]]
        return cls(tuple(part for pair in pairs for part in pair), tuple(words[end:]))

    def __str__(self) -> str:
        return shlex.join([*self.words, *self.script])

    def _positions_of_option(self, names: Sequence[str]) -> list[int]:
        return [at for at, word in enumerate(self.words[:-1]) if word in names]

    def value_of_option(self, *names: str) -> str | None:
        """Return what an option was given last, under any of its names; None if it was not."""
        places = self._positions_of_option(names)
        return self.words[places[-1] + 1] if places else None

    def with_option(self, name: str, value: str | None, *other_names: str) -> CompareCommandLine:
        """Return the command with an option at another value, in its place, or at the end; without it for None."""
        places, words = self._positions_of_option((name, *other_names)), list(self.words)
        first = places[0] if places else len(words)
        for at in reversed(places):
            del words[at : at + 2]
        words[first:first] = [] if value is None else [name, value]
        return CompareCommandLine(tuple(words), self.script)

    def command_to_diagnose(self, arm: str, seed: int, step: int) -> str:
        """Return the command that watches the script under an arm, with a seed, up to a step."""
        words = ["ampcompare", "diagnose", "--arm", arm]
        for at, word in enumerate(self.words):
            if word in OF_SCRIPT_RUN:
                value = self.words[at + 1 : at + 2]
                words += [word, *(one for one in value if not one.startswith("-"))]
        words += ["--seed", str(seed)] if seed else []
        words += ["--steps", str(step + 2)] if step + 2 > WATCHED else []
        return shlex.join([*words, *self.script])

    def with_own_run_directory(self, suffix: str, *, same_recipe: bool = False) -> CompareCommandLine:
        """Return the command with its own run directory; the default one is named by the recipe, or needs a tag."""
        folder = self.value_of_option("-o", "--output-dir")
        if folder is not None:
            return self.with_option("-o", f"{folder.rstrip('/')}-{suffix}", "--output-dir")
        return self.with_option("--tag", suffix) if same_recipe else self
