"""`migrate --verify`: train a script as it is and rewritten, on the CPU with the same seed, and compare every step."""

import dataclasses
import functools
import hashlib
import os
import shlex
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from ampcompare.base.environment.gpus import visible_gpus
from ampcompare.base.errors import ConfigError, LaunchError
from ampcompare.base.files.run_files import CellFile
from ampcompare.base.formatting import format_count
from ampcompare.base.location import PACKAGE
from ampcompare.experiment.rewrite_comparison import (
    DIFFERENT,
    EQUAL,
    WITHIN,
    compare_runs,
    compare_starts,
    cut_runs_to_common_steps,
    differences_beyond_twin,
    is_difference_in_weights_alone,
)
from ampcompare.experiment.script_process import ENGINE, require_script, trace_script_in_child
from ampcompare.experiment.script_run import UNKNOWN, ScriptRun
from ampcompare.script.examination.rewrite_run import FOR_ADAPTER, FOR_TORCH
from ampcompare.script.invocation.target import CALLS_APEX
from ampcompare.settings.stack import StackConfig, arm_text_with_stack
from ampcompare.source.find import absolute_path
from ampcompare.source.migrate.adapter.choice import choose_adapter_for_all, choose_rewrite_or_adapter
from ampcompare.source.migrate.adapter.imports import adapter_text
from ampcompare.source.migrate.project import FileMigration, find_numerical_lint_mistakes, migrate_file
from ampcompare.source.migrate.read.finding import NOTE
from ampcompare.source.project import ImportIndex

# O2 and O3 have no equivalent, so what they train is apart from autocast by more than a rounding where training
# amplifies it. O1 is what they are rewritten to: it shows whether the rewrite is at fault, or the level.
WITHOUT_EQUIVALENT = {"O2", "O3"}
MAX_NAMES = 3  # of files, in a line
STAY = "your files stay as they are"
# Mistakes of the original that make its training different from torch.amp's, whatever few steps show.
MISTAKES = ("AMP230",)


def verify_rewritten_script(
    path: str,
    arguments: list[str],
    *,
    steps: int,
    say: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
    how: str = "",
    stack: StackConfig | None = None,
) -> int:
    """Run a script twice and print the comparison; return the exit code.

    Args:
        path: of the script.
        arguments: of the script.
        steps: at most, of one optimizer.
        say: prints a line.
        check: called once the rewrite is known to be whole, before the script runs; what it raises is passed on.
        how: "rewrite" rewrites the script for torch.amp; with "adapter" it imports the adapter in the place of Apex;
            "" does what `migrate` does by default.
        stack: where the unchanged script runs, with the Apex that is there; both begin with the weights of that run.

    Raises:
        ConfigError: there is no such script, or it cannot be rewritten.
        EnvironmentUnfit: the stack cannot be started, or has no torch.
        LaunchError: one of the runs failed, or trained nothing.
    """
    script = require_script(path)
    migrate_whole_files([script], how)
    check()
    with tempfile.TemporaryDirectory(prefix="ampcompare-verify-") as folder:
        run: Callable[..., ScriptRun] = functools.partial(
            trace_script_in_child, script, arguments, steps=steps
        )
        if stack is not None:
            run = functools.partial(run, first_weights=Path(folder, CellFile.WEIGHTS))
        return _Verification(path, arguments, run, say, how=how, stack=stack).verify()


class _Verification:
    """The runs of one script that are compared, and what is said of them."""

    def __init__(
        self,
        path: str,
        arguments: list[str],
        run: Callable[..., ScriptRun],
        say: Callable[[str], None],
        *,
        how: str,
        stack: StackConfig | None,
    ) -> None:
        self._script = Path(path)
        self._path = path
        self._arguments = arguments
        self._run = run
        self._say = say
        self._asked = how
        self._stack = stack
        self._adapter = False  # whether the script takes it: known with its files
        self._run_moved = run  # with what becomes of them

    def verify(self) -> int:
        """Run and compare; return the exit code: 0 where the rewritten files can be used, else 1.

        Raises:
            LaunchError: the unchanged script trained nothing that could be compared, nothing of it changes, or a run
                failed.
        """
        original = self._run() if self._stack is None else self._run(stack=self._stack)
        if not original.applied or (self._stack is not None and not original.losses):
            raise LaunchError(_why_nothing_to_compare(original))
        migrations = self._migrations_of_script_and_files(original)
        self._say_what_original_did(original)
        rewritten = self._run_moved()
        self._say(
            f"{'with the adapter' if self._adapter else 'rewritten'}, on torch: {rewritten.step_counts_text()}"
        )
        if not rewritten.losses:
            return self._print_verdict_of_unscaled_rewrite(original, rewritten)

        unpaired = "" if self._stack is None else self._say_starts_and_why_unpaired(original, rewritten)
        verdict, lines = self._compare_with_twin_if_different(original, rewritten)
        self._say_lines(lines)
        without = [] if self._adapter else sorted(WITHOUT_EQUIVALENT.intersection(original.levels))
        is_of_level = bool(without) and verdict == DIFFERENT and not unpaired
        if is_of_level:
            verdict = self._compare_at_o1(rewritten)
        elif self._stack is not None and verdict == DIFFERENT and not unpaired:
            self._say_whether_stacks_differ(rewritten)
        if verdict != EQUAL or is_of_level:
            self._say_lines(_notes_on_known_differences(migrations))
        mistakes = _mistakes_few_steps_hide(migrations)
        self._say_lines(mistakes)

        if verdict == DIFFERENT:
            if not unpaired:
                return self._print_different_verdict()
            self._say(f"verdict: cannot tell, since {unpaired}")
            return 1
        if mistakes:
            self._say(
                f"verdict: {verdict} in these steps, but the lines above raise an error on a GPU: correct them first"
            )
            return 1
        self._print_usable_verdict(verdict, without, migrations, is_of_level=is_of_level)
        return 0

    def _print_verdict_of_unscaled_rewrite(self, original: ScriptRun, rewritten: ScriptRun) -> int:
        """Print that a rewritten script scaled no loss, and return the exit code.

        Raises:
            LaunchError: the unchanged script scaled none either.
        """
        if not original.losses:
            raise LaunchError(NO_LOSS_SCALED)
        made = f"{rewritten.plain_steps} steps and {len(rewritten.passes)} backward passes"
        self._say(
            f"fp16: {DIFFERENT}; the rewritten script scaled no loss in {made}: its switch for fp16 did not act"
        )
        return self._print_different_verdict()

    def _say_lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._say(line)

    def _migrations_of_script_and_files(self, original: ScriptRun) -> list[FileMigration]:
        """Return what becomes of the script and of the files of it that use Apex.

        Raises:
            LaunchError: nothing of them changes.
        """
        imported = _project_files_with_apex(self._script)
        if self._stack is None:  # the run has seen which of them it imports
            imported = [*original.files, *(each for each in imported if self._was_imported(each, original))]
        others = [
            os.path.normpath(self._script.parent / each) for each in imported if each != self._script.name
        ]
        moved = migrate_whole_files([self._script, *map(Path, dict.fromkeys(others))], self._asked)
        if not moved.texts():
            raise LaunchError(NOTHING_CHANGES)
        self._adapter, how = moved.adapter, FOR_ADAPTER if moved.adapter else FOR_TORCH
        self._run_moved = functools.partial(self._run, rewrite=how, texts=moved.texts())
        self._say_lines(moved.reasons)
        return moved.files

    def _was_imported(self, file: str, original: ScriptRun) -> bool:
        """Return whether the unchanged script imported a file from outside of its folder."""
        content = (self._script.parent / file).read_bytes()
        return file.startswith(os.pardir) and hashlib.sha256(content).hexdigest() in original.others

    def _say_what_original_did(self, original: ScriptRun) -> None:
        self._say(f"unchanged, {original.place or ENGINE}: {original.step_counts_text()}")
        if original.limits:
            self._say(original.limits)
        if original.written:
            names = ", ".join(os.path.relpath(path) for path in original.written[:MAX_NAMES])
            more = f" and {len(original.written) - MAX_NAMES} more" * (len(original.written) > MAX_NAMES)
            self._say(f"the script writes {names}{more}: here into a copy that is gone afterwards; {STAY}")

    def _say_starts_and_why_unpaired(self, original: ScriptRun, rewritten: ScriptRun) -> str:
        """Print what two runs of two stacks begin with; return why they are no pair, "" if they are one."""
        unpaired, lines = compare_starts(original, rewritten)
        self._say_lines(lines)
        return unpaired

    def _compare_at_o1(self, rewritten: ScriptRun) -> str:
        """Compare with the unchanged script at O1, which O2 and O3 are rewritten to; return the verdict."""
        at_o1 = self._run(opt_level="O1")
        self._say(f"unchanged, at O1{f', {ENGINE}' * (self._stack is not None)}: {at_o1.step_counts_text()}")
        verdict, lines = self._compare_with_twin_if_different(at_o1, rewritten, opt_level="O1")
        self._say_lines(f"against O1: {line}" for line in lines)
        return verdict

    def _print_usable_verdict(
        self, verdict: str, without: list[str], migrations: list[FileMigration], *, is_of_level: bool
    ) -> None:
        """Print the verdict and the commands that come next.

        Args:
            without: the levels of the script that torch.amp has no equivalent of.
            is_of_level: whether the verdict is that on O1, since the script's own level trains otherwise.
        """
        if without:
            of_level = f" of O1; {' and '.join(without)} has no equivalent in torch.amp" * is_of_level
            where = f"you can go on if torch.amp is as accurate as {without[-1]} in whole trainings"
            self._say(f"verdict: {verdict}{of_level}; {where}:")
            self._say(f"  {self._command_to_compare_trainings(without[-1])}")
        else:
            with_what = "the adapter" if self._adapter else "the rewritten files"
            self._say(f"verdict: {verdict}; you can go on with {with_what}:")
        # With the script, changed or not: where the adapter lies follows from what imports the others.
        names = dict.fromkeys([self._path, *(str(each.path) for each in migrations if each.is_changed)])
        asked = [f"--{self._asked}"] * bool(self._asked)
        self._say(f"  {shlex.join(['ampcompare', 'migrate', *asked, '--write', *names])}")

    def _print_different_verdict(self) -> int:
        self._say(f"verdict: {DIFFERENT}; keep the original until the first difference above is explained")
        return 1

    def _compare_with_twin_if_different(
        self, original: ScriptRun, rewritten: ScriptRun, *, opt_level: str | None = None
    ) -> tuple[str, list[str]]:
        """Return the verdict and its lines; where roundings differ, a twin shows what they make.

        The twin is that of the original, or of the rewritten script where the original ran in another stack.
        """
        is_there = bool(original.place)
        if is_there:
            original, rewritten = cut_runs_to_common_steps(original, rewritten)
        verdict, lines = compare_runs(original, rewritten)
        if verdict == WITHIN or (
            verdict == DIFFERENT and is_difference_in_weights_alone(original, rewritten)
        ):
            twin = self._run_moved(twin=True) if is_there else self._run(opt_level=opt_level, twin=True)
            of = rewritten if is_there else original
            if is_there:
                twin = dataclasses.replace(twin, norms=twin.clip_norms)
            verdict, lines = compare_runs(original, rewritten, twin, of)
            beyond = differences_beyond_twin(original, rewritten, twin, of)
            if beyond:
                return DIFFERENT, [*lines, *beyond]
        return verdict, lines

    def _say_whether_stacks_differ(self, rewritten: ScriptRun) -> None:
        """Compare with the unchanged script here: where that trains as the rewritten one, the stacks are apart."""
        assert self._stack is not None
        here = self._run()
        verdict, _ = self._compare_with_twin_if_different(here, rewritten)
        self._say(
            f"unchanged, {ENGINE} here: {here.step_counts_text()}; against it, the rewritten script is {verdict}"
        )
        if verdict != DIFFERENT:
            replay = f"ampcompare replay capsule.pt --stack {self._stack.text()}"
            self._say(
                f"so the stacks are apart, not the rewrite; exec --capsule and {replay} name the module"
            )

    def _command_to_compare_trainings(self, level: str) -> str:
        """Return the command that compares whole trainings."""
        device = [] if visible_gpus() else ["--device", "cpu"]
        arms = ["--reference", level, "--arm", "fp16"]
        if self._stack is not None:
            at = arm_text_with_stack("script", self._stack.name)
            arms = ["--stack", self._stack.text(), "--reference", at, "--arm", f"{at},fp16"]
            device = []
        return shlex.join(["ampcompare", "compare", *arms, *device, "--", self._path, *self._arguments])


def _project_files_with_apex(script: Path) -> list[str]:
    """Return a script and the files of its project that it imports, if they use Apex, as from its folder."""
    imports, path = ImportIndex(), absolute_path(script)
    waiting, found = [path], [path]
    while waiting:
        new = [other for other in imports.files_imported_by(waiting.pop()) if other not in found]
        found += new
        waiting += new
    own = Path(PACKAGE)
    return [
        os.path.relpath(each, path.parent)
        for each in found
        if not each.is_relative_to(own) and CALLS_APEX.search(each.read_bytes())
    ]


NO_LOSS_SCALED = (
    "there is nothing to compare: neither the script nor its migrated form scales a loss or shows another"
)

NOTHING_CHANGES = (
    "there is nothing to compare: migrate changes neither the script nor a file that it imports; "
    "`ampcompare lint` looks for mistakes in a script that has moved, and `ampcompare compare --arm script,fp32,O1` "
    "trains it under several arms"
)


def _why_nothing_to_compare(run: ScriptRun) -> str:
    """Return why there is nothing to compare, from what the unchanged script did."""
    did = f"made {run.plain_steps} steps and {len(run.passes)} backward passes and ended"
    amp = {
        "": "never called amp.initialize: pass the argument that switches mixed precision on, as in -- --fp16",
        "disabled": "called amp.initialize with enabled=False: pass the argument that switches mixed precision on",
        "called": "called amp.initialize, but no scale_loss or no step came before its end",
        UNKNOWN: "did not switch mixed precision on: pass the argument that does, as in -- --fp16",
    }
    unseen = "took no step that a loss scaler or apex.amp saw"
    return f"there is nothing to compare: the unchanged script {did}, and {unseen}. It {amp[run.initialize]}"


def _notes_on_known_differences(migrations: list[FileMigration]) -> list[str]:
    """Return the notes of migrations: where the result is known to act otherwise than Apex."""
    return [
        f"known difference, {result.path}:{place}: {message}"
        for result in migrations
        for place, kind, message in result.rows()
        if kind == NOTE
    ]


def _mistakes_few_steps_hide(migrations: list[FileMigration]) -> list[str]:
    """Return the mistakes of the original, or else of the result, that few steps do not show."""
    found = []
    for result in migrations:
        texts = [] if result.document is None else [("", result.document.text)]
        texts += [] if result.migration is None else [("line {} of the result: ", result.migration.text)]
        for where, text in texts:
            mistakes = [each for each in find_numerical_lint_mistakes(text) if each[1] in MISTAKES]
            for line, code, message in mistakes:
                place = f"{result.path}: {where.format(line)}" if where else f"{result.path}:{line}: "
                found.append(f"{place}{code}: {message}")
            if mistakes:
                break
    return found


@dataclasses.dataclass(frozen=True)
class MigratedFiles:
    """What becomes of the files of a script.

    Attributes:
        adapter: whether they take the adapter, instead of being rewritten.
        reasons: why, in a line for each of them, where `migrate` chose so.
        adapters: the files of the adapter that are to be written.
    """

    files: list[FileMigration]
    adapter: bool
    reasons: list[str]
    adapters: list[Path] = dataclasses.field(default_factory=list)

    def texts(self) -> dict[Path, str]:
        """Return the text of each file that changes or is new, by its path."""
        changed = [
            (each.path, each.migration.text) for each in self.files if each.is_changed and each.migration
        ]
        return {**dict(changed), **dict.fromkeys(self.adapters, adapter_text() if self.adapters else "")}


def migrate_whole_files(paths: list[Path], how: str) -> MigratedFiles:
    """Return what becomes of files, all of whose lines that concern Apex are rewritten.

    Args:
        paths: scripts, and modules that they import.
        how: "rewrite" for torch.amp, "adapter" for the adapter in the place of Apex; "" for what is chosen by default.

    Raises:
        ConfigError: a file cannot be read or parsed, or lines of it are left by hand.
    """
    reasons, adapters = [], list[Path]()
    is_adapter = how == "adapter"
    if not how:
        choice = choose_rewrite_or_adapter(paths, within=paths)
        is_adapter, reasons = bool(choice.plans), choice.reason_lines()
    elif is_adapter:
        choice = choose_adapter_for_all(paths)
    if is_adapter:
        results, adapters = choice.files, [each.path for each in choice.adapters if each.is_new]
    else:
        imports = ImportIndex(paths)
        results = [migrate_file(path, imports=imports) for path in paths]
    for result in results:
        if result.fault is not None:
            raise ConfigError(result.lines()[0])
        if result.num_lines_by_hand:
            command = ["ampcompare", "migrate", *[f"--{how}"] * bool(how), str(result.path)]
            left = format_count(result.num_lines_by_hand, "line")
            raise ConfigError(
                f"{left} of {result.path} must be rewritten by hand first; see them with: {shlex.join(command)}"
            )
    return MigratedFiles(results, is_adapter, reasons, adapters)
