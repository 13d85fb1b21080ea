"""`migrate --verify`: train a script as it is and rewritten, on the CPU with the same seed, and compare every step."""

import contextlib
import dataclasses
import functools
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ampcompare.base.environment.gpus import visible_gpus
from ampcompare.base.errors import ConfigError, LaunchError
from ampcompare.base.processes.sandbox import WITHOUT_OVERLAYS, open_sandbox
from ampcompare.base.processes.start import kill_family, start_command
from ampcompare.script.legacy.replay import SEED
from ampcompare.script.legacy.target import CALLS_APEX
from ampcompare.settings.resume_trace import read_rows
from ampcompare.settings.stack import StackConfig
from ampcompare.source.migrate.adapter.project import plan_adapters
from ampcompare.source.migrate.finding import NOTE
from ampcompare.source.migrate.project import FileMigration, find_mistakes, migrate_file
from ampcompare.source.project import Project

# Relative; fp16 keeps 11 bits, and some steps of training make more of a rounding.
ROUNDING = 0.01
# Taken steps up to which losses must agree. Some training makes much of a rounding in the steps behind them: small
# batches through batch norm, Adam on gradients near 0.
FIRST = 3
# A tensor that differs by more is compared by its length. A vector that starts at 0, as biases of batch norm do, is the
# sum of a few updates.
OF_LENGTH, SMALL, OF_SMALL = 0.1, 0.1, 0.5
EQUAL, WITHIN, DIFFERENT = "equal to the last bit", "within rounding", "different"
# O2 and O3 have no equivalent, so what they train is apart from autocast by more than a rounding where training
# amplifies it. O1 is what they are rewritten to: it shows whether the rewrite is at fault, or the level.
WITHOUT_EQUIVALENT = {"O2", "O3"}
MAX_NAMES = 3  # of files, in a line
# What a rewrite may differ from the original, in differences of a twin, whose weights are a unit in the last place of
# fp16 apart; and how much it may where the twin is equal. Of losses, and of norms of gradients.
OF_TWIN, WITHOUT_TWIN, NORMS_WITHOUT_TWIN = 8.0, 2.0**-9, 0.1
HALVES = ("float16", "bfloat16")
ENGINE = "on ampcompare's engine"
STAY = "your files stay as they are"
UNKNOWN = "unknown"  # what became of `amp.initialize` in a stack
RECORD = "record.jsonl"  # of the run, in its folder; missing where nothing was recorded
SUPERVISE = "ampcompare.experiment.launch.script.supervise"
# Mistakes of the original that make its training different from torch.amp's, whatever few steps show.
MISTAKES = ("AMP230",)
TIME_LIMIT = 3600.0  # of a run
# The factor between the norms of gradients that steps use: one that was not unscaled is a loss scale apart. Smaller
# norms than the last are roundings of what cancels out.
OF_NORM, MIN_NORM = 2.0, 1e-6
OF_FIRST_NORM = 1.005
# Operations of the autograd graph that both Apex and torch.amp run in 16 bits, and those that both run in fp32. Not
# LogSoftmax: that of cross_entropy stays in 16 bits under autocast for CUDA, since torch passes its type on.
PRODUCTS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Addbmm", "Mv", "Convolution", "ConvolutionBackward")
IN_FP32 = (
    "Softmax", "NllLoss", "NllLoss2D", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits",
    "MseLoss", "L1Loss", "SmoothL1Loss", "KlDiv", "SoftMarginLoss", "CtcLoss",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What a script trained.

    Attributes:
        losses: of each backward pass.
        scales: before each backward pass.
        applied: for each step, the number of the optimizer and whether it was taken.
        digests: of the parameters after each step, by optimizer.
        weights: after the last step.
        names: of parameters.
        levels: the opt levels of `amp.initialize`, or the classes of the loss scalers.
        norms: of the gradients that each step was given, by optimizer; None where it was skipped.
        passes: for each call of `backward`, how many operations of each kind gave 16-bit and wider results.
        files: of the script that use Apex, from its folder.
        written: files that the script wrote, in copies that are gone: the user's are as they were.
        limits: for which files that does not hold; "" if it holds for all.
        plain_steps: how often an optimizer stepped, whether or not a loss was scaled.
        initialize: what became of `amp.initialize`: "called", "disabled" or "".
        evaluations: the types of what models returned without gradients.
        reads: the types in which values came to the host by `cpu()`.
        halves: the 16-bit types of what losses were computed from.
        policy: the factors by which a dynamic loss scale grows and backs off, and its interval; empty for a static one.
        clears: whether a `zero_grad` came before each step, behind the one before.
        clip_norms: `norms`, or what a clipping has found before it clips; where the run is paired with a stack, like
            the next.
        batches: hashes of the first ones.
        draws: hashes of the generators before those forward passes of them that draw random numbers.
        first_changed: how many first weights were not those of the stack, and are now.
        place: where it ran, in words; "" for here.
        is_cut: it was ended behind its last step.
    """

    losses: list[float | None]
    scales: list[float | None]
    applied: list[tuple[int, bool]]
    digests: dict[str, list[list[str]]]
    weights: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    levels: tuple[str, ...] = ()
    norms: dict[str, list[float | None]] = field(default_factory=dict)
    passes: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    files: tuple[str, ...] = ()
    written: list[str] = field(default_factory=list)
    limits: str = ""
    plain_steps: int = 0
    initialize: str = ""
    evaluations: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    halves: tuple[str, ...] = ()
    policy: tuple[float, ...] = ()
    clears: tuple[bool, ...] = ()
    clip_norms: dict[str, list[float | None]] = field(default_factory=dict)
    batches: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()
    first_changed: int = 0
    place: str = ""
    is_cut: bool = False

    def sums(self) -> str:
        """Return the counts in words."""
        skipped = sum(not taken for _, taken in self.applied)
        return f"{len(self.applied)} steps, {skipped} skipped, {len(self.losses)} backward passes"


def verify_script(
    path: str,
    arguments: list[str],
    *,
    steps: int,
    say: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
    adapter: bool = False,
    stack: StackConfig | None = None,
) -> int:
    """Run a script twice and print the comparison; return the exit code.

    Args:
        arguments: of the script.
        steps: at most, of one optimizer.
        say: prints a line.
        adapter: the script is not rewritten, but imports the adapter in the place of Apex.
        check: called once the rewrite is known to be whole, before the script runs; what it raises is passed on.
        stack: where the unchanged script runs, with the Apex that is there; both begin with the weights of that run.

    Raises:
        ConfigError: there is no such script, or it cannot be rewritten.
        EnvironmentUnfit: the stack cannot be started, or has no torch.
        LaunchError: one of the runs failed, or trained nothing.
    """
    script = require_script(path)
    migrate_whole([script], adapter=adapter)
    check()
    with tempfile.TemporaryDirectory(prefix="ampcompare-verify-") as folder:
        run: Callable[..., Run] = functools.partial(run_script, script, arguments, steps=steps)
        if stack is not None:
            run = functools.partial(run, first_weights=Path(folder, "first.pt"))
        return _Verification(path, arguments, run, say, adapter=adapter, stack=stack).verify()


def require_script(path: str) -> Path:
    """Return the path of a script.

    Raises:
        ConfigError: there is no such file.
    """
    script = Path(path)
    if not script.is_file():
        raise ConfigError(f"{path} is a folder; name a script" if script.is_dir() else f"there is no script {path}")
    return script


class _Verification:
    """The runs of one script that are compared, and what is said of them."""

    def __init__(
        self,
        path: str,
        arguments: list[str],
        run: Callable[..., Run],
        say: Callable[[str], None],
        *,
        adapter: bool,
        stack: StackConfig | None,
    ) -> None:
        self._script, self._path, self._arguments = Path(path), path, arguments
        self._run, self._say, self._adapter, self._stack = run, say, adapter, stack
        self._how = "adapter" if adapter else "torch"

    def verify(self) -> int:
        """Run and compare; return the exit code."""
        say, adapter, stack = self._say, self._adapter, self._stack
        original = self._run() if stack is None else self._run(stack=stack)
        if not original.applied or (stack is not None and not original.losses):
            raise LaunchError(_why_nothing(original))
        files = _files_of_project(self._script) if stack is not None else original.files
        others = [self._script.parent / each for each in files if each != self._script.name]
        migrations = migrate_whole([self._script, *others], adapter=adapter)
        say(f"unchanged, {original.place or ENGINE}: {original.sums()}")
        if original.limits:
            say(original.limits)
        if original.written:
            names = ", ".join(os.path.relpath(path) for path in original.written[:MAX_NAMES])
            more = f" and {len(original.written) - MAX_NAMES} more" * (len(original.written) > MAX_NAMES)
            say(f"the script writes {names}{more}: here into a copy that is gone afterwards; {STAY}")
        rewritten = self._run(rewrite=self._how)
        say(f"{'with the adapter' if adapter else 'rewritten'}, on torch: {rewritten.sums()}")
        if not rewritten.applied and not rewritten.losses:
            made = f"{rewritten.plain_steps} steps and {len(rewritten.passes)} backward passes"
            say(f"fp16: {DIFFERENT}; the rewritten script scaled no loss in {made}: its switch for fp16 did not act")
            return self._end_different()
        unpaired = ""
        if stack is not None:
            unpaired, lines = _compare_starts(original, rewritten)
            for line in lines:
                say(line)
        verdict, lines = self._compare(original, rewritten)
        without = [] if adapter else sorted(WITHOUT_EQUIVALENT.intersection(original.levels))
        is_of_level = bool(without) and verdict == DIFFERENT and not unpaired
        of_level = f" of O1; {' and '.join(without)} has no equivalent in torch.amp" * is_of_level
        for line in lines:
            say(line)
        if is_of_level:
            at_o1 = self._run(opt_level="O1")
            say(f"unchanged, at O1{f', {ENGINE}' * (stack is not None)}: {at_o1.sums()}")
            verdict, lines = self._compare(at_o1, rewritten, opt_level="O1")
            for line in lines:
                say(f"against O1: {line}")
        elif stack is not None and verdict == DIFFERENT and not unpaired:
            self._say_whose_fault(rewritten)
        for result in migrations if verdict != EQUAL or is_of_level else []:
            for place, kind, message in result.rows():
                if kind == NOTE:
                    say(f"known difference, {result.path}:{place}: {message}")
        mistakes = _known_mistakes(migrations)
        for line in mistakes:
            say(line)
        if unpaired and verdict == DIFFERENT:
            say(f"verdict: cannot tell, since {unpaired}")
            return 1
        if mistakes and verdict != DIFFERENT:
            say(f"verdict: {verdict} in these steps, but the lines above raise an error on a GPU: correct them first")
            return 1
        if verdict == DIFFERENT:
            return self._end_different()
        if without:
            where = f"you can go on if torch.amp is as accurate as {without[-1]} in whole trainings"
            say(f"verdict: {verdict}{of_level}; {where}:")
            say(f"  {self._compare_command(without[-1])}")
        else:
            say(f"verdict: {verdict}; you can go on with the rewritten files:")
        changed = [str(each.path) for each in migrations if each.changed]
        say(f"  {shlex.join(['ampcompare', 'migrate', *['--adapter'] * adapter, '--write', *changed])}")
        return 0

    def _end_different(self) -> int:
        self._say(f"verdict: {DIFFERENT}; keep the original until the first difference above is explained")
        return 1

    def _compare(self, original: Run, rewritten: Run, *, opt_level: str | None = None) -> tuple[str, list[str]]:
        """Return the verdict and its lines; where roundings differ, a twin shows what they make.

        The twin is that of the original, or of the rewritten script where the original ran in another stack.
        """
        is_there = bool(original.place)
        if is_there:
            original, rewritten = _meet(original, rewritten)
        verdict, lines = compare_runs(original, rewritten)
        if verdict == WITHIN or (verdict == DIFFERENT and _differ_in_weights_alone(original, rewritten)):
            twin = self._run(rewrite=self._how, twin=True) if is_there else self._run(opt_level=opt_level, twin=True)
            of = rewritten if is_there else original
            if is_there:
                twin = dataclasses.replace(twin, norms=twin.clip_norms)
            verdict, lines = compare_runs(original, rewritten, twin, of)
            beyond = differ_more_than_twin(original, rewritten, twin, of)
            if beyond:
                return DIFFERENT, [*lines, *beyond]
        return verdict, lines

    def _say_whose_fault(self, rewritten: Run) -> None:
        """Compare with the unchanged script here: where that trains as the rewritten one, the stacks are apart."""
        assert self._stack is not None
        here = self._run()
        verdict, _ = self._compare(here, rewritten)
        self._say(f"unchanged, {ENGINE} here: {here.sums()}; against it, the rewritten script is {verdict}")
        if verdict != DIFFERENT:
            replay = f"ampcompare replay capsule.pt --stack {self._stack.text()}"
            self._say(f"so the stacks are apart, not the rewrite; exec --capsule and {replay} name the module")

    def _compare_command(self, level: str) -> str:
        """Return the command that compares whole trainings."""
        device = [] if visible_gpus() else ["--device", "cpu"]
        arms = ["--reference", level, "--arm", "fp16"]
        if self._stack is not None:
            at = f"script@{self._stack.name}"
            arms = ["--stack", self._stack.text(), "--reference", at, "--arm", f"{at},fp16"]
            device = []
        return shlex.join(["ampcompare", "compare", *arms, *device, "--", self._path, *self._arguments])


def _files_of_project(script: Path) -> list[str]:
    """Return a script and the files that it imports, from its folder, if they use Apex."""
    project, path = Project(script), Path(os.path.abspath(script))
    waiting, found = [path], [path]
    while waiting:
        each = waiting.pop()
        module = project.module(each)
        new = [] if module is None else [other for other in project.imported_by(module, each) if other not in found]
        found += new
        waiting += new
    return [
        str(each.relative_to(path.parent))
        for each in found
        if each.is_relative_to(path.parent) and CALLS_APEX.search(each.read_bytes())
    ]


def _compare_starts(original: Run, rewritten: Run) -> tuple[str, list[str]]:
    """Return why two runs of two stacks are no pair, "" if they are one, and what they begin with, in words."""
    lines = ["first weights: equal in both"]
    if rewritten.first_changed:
        count = rewritten.first_changed
        are = "tensor differs" if count == 1 else "tensors differ"
        lines = [f"first weights: {count} {are} between the stacks; both runs begin with those of {original.place}"]
    pairs = list(zip(original.batches, rewritten.batches, strict=False))
    other = next((number for number, (first, second) in enumerate(pairs, 1) if first != second), None)
    if other is not None:
        why = f"batch {other} is not the same in both stacks; generators of a GPU and of a CPU give other numbers"
        return why, [*lines, f"batches: {why}"]
    lines.append(f"batches: the first {len(pairs)} are equal")
    if original.draws != rewritten.draws:
        why = "the generators differ where the forward pass draws, as for dropout"
        return why, [*lines, f"random numbers: {why}"]
    return "", lines


def _meet(original: Run, rewritten: Run) -> tuple[Run, Run]:
    """Return two runs of two stacks as far as both were followed: they may end between the steps of two optimizers."""
    counts = [Counter(number for number, _ in run.applied) for run in (original, rewritten)]
    equal = {str(number) for number in counts[0] if counts[0][number] == counts[1][number]}
    weights = {key: value for key, value in original.weights.items() if key.partition(".")[0] in equal}
    ends = [len(run.applied) for run in (original, rewritten)]
    if original.is_cut and ends[1] > ends[0]:
        rewritten = dataclasses.replace(rewritten, applied=rewritten.applied[: ends[0]])
    elif rewritten.is_cut and ends[0] > ends[1]:
        original = dataclasses.replace(original, applied=original.applied[: ends[1]])
    names = rewritten.names
    return (
        dataclasses.replace(original, norms=original.clip_norms, names=names, weights=weights),
        dataclasses.replace(rewritten, norms=rewritten.clip_norms),
    )


def _why_nothing(run: Run) -> str:
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


def _known_mistakes(migrations: list[FileMigration]) -> list[str]:
    """Return the mistakes of the original, or else of the result, that few steps do not show."""
    found = []
    for result in migrations:
        texts = [] if result.document is None else [("", result.document.text)]
        texts += [] if result.migration is None else [("line {} of the result: ", result.migration.text)]
        for where, text in texts:
            mistakes = [each for each in find_mistakes(text) if each[1] in MISTAKES]
            for line, code, message in mistakes:
                place = f"{result.path}: {where.format(line)}" if where else f"{result.path}:{line}: "
                found.append(f"{place}{code}: {message}")
            if mistakes:
                break
    return found


def migrate_whole(paths: list[Path], *, adapter: bool) -> list[FileMigration]:
    """Return what becomes of files."""
    if adapter:
        plans, faults = plan_adapters(paths)
        results = [*faults, *(each for plan in plans for each in plan.files)]
    else:
        results = [migrate_file(path) for path in paths]
    for result in results:
        if result.fault is not None:
            raise ConfigError(result.lines()[0])
        if result.by_hand:
            raise ConfigError(
                f"{result.by_hand} line{'s' * (result.by_hand != 1)} of {result.path} must be rewritten by hand first; "
                f"see them with: ampcompare migrate {'--adapter ' * adapter}{result.path}"
            )
    return results


def run_script(
    script: Path,
    arguments: list[str],
    *,
    steps: int,
    rewrite: str | None = None,
    opt_level: str | None = None,
    twin: bool = False,
    stack: StackConfig | None = None,
    first_weights: Path | None = None,
) -> Run:
    """Run a script in a child process: on the CPU, or in a stack, on the device that the script takes there.

    Args:
        rewrite: how it is rewritten, with the files that it imports: for "torch" or the "adapter"; None as it is.
        opt_level: instead of the script's.
        twin: whether its weights change by a unit in the last place of fp16 behind the first step.
        stack: where it runs; None for here.
        first_weights: the file from which it begins, and that a run in a stack makes.

    Raises:
        EnvironmentUnfit: the stack cannot be started, or has no torch.
        LaunchError: it failed.
    """
    with tempfile.TemporaryDirectory(prefix="ampcompare-verify-") as outer:
        folder = Path(outer, "run")
        folder.mkdir()
        made = folder / "first.pt"
        request = {
            "arguments": arguments,
            "steps": steps,
            "rewrite": rewrite,
            "opt_level": opt_level,
            "twin": twin,
            "folder": str(folder),
            "first_weights": first_weights if stack is None or first_weights is None else str(made),
        }
        with open_sandbox(Path(outer, "store"), shared=[folder], roots=[script.parent]) as sandbox:
            at = sandbox.at(str(script))
            words, place = json.dumps({**request, "script": at}, default=str), ""
            environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", **sandbox.environment}
            if stack is None:
                command = start_command("ampcompare.script.legacy.replay", words)
            else:
                from ampcompare.experiment.launch.script.stacks import OTHER_PYTHON, traced_command  # it imports torch

                command, found = traced_command(stack, at, arguments, folder, seed=SEED, steps=steps, request=words)
                place = f"in the stack {stack.name} ({found.versions})"
                if found.has_ampcompare and not found.apex:
                    place = f"{ENGINE} {place}"
                environment = {name: value for name, value in environment.items() if name not in OTHER_PYTHON}
            code, text = wait_for(command, environment)
        which = "the rewritten script" if rewrite else f"the unchanged script{f' at {opt_level}' * bool(opt_level)}"
        which += f" in the stack {stack.name}" if stack is not None else ""
        last = [line for line in text.splitlines() if line.strip()]
        errors = [line for line in last if not line.startswith("ampcompare:")] or last
        if code is None:
            raise LaunchError(f"{which} had not made its steps after {TIME_LIMIT:g} s and was ended; use fewer --steps")
        if code:
            why = _read_error(folder) or (errors[-1] if errors else "")
            raise LaunchError(f"{which} ended with exit code {code}: {why}")
        if stack is not None and first_weights is not None and made.exists():
            shutil.move(made, first_weights)
        run = _read_run(folder) if (folder / "trace.json").exists() else _read_recording(folder, steps)
        limits = WITHOUT_OVERLAYS if sandbox.is_partial else ""
        written = [one.path for one in sandbox.written]
        return dataclasses.replace(run, written=written, limits=limits, place=place)


def wait_for(command: list[str], environment: dict[str, str]) -> tuple[int | None, str]:
    """Return the exit code of a command, None if it was ended after `TIME_LIMIT`, and its errors.

    They go to a file: what a script leaves behind, which is ended as well, would hold a pipe open.
    """
    null, code = subprocess.DEVNULL, None
    # What supervises a stack ends with its input, and gives the script none.
    start = subprocess.PIPE if SUPERVISE in command else null
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdin=start, stdout=null, stderr=errors, env=environment, start_new_session=True
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(TIME_LIMIT)
        finally:
            kill_family(process.pid)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        errors.seek(0)
        return code, errors.read().decode("utf-8", "replace")


def _read_error(folder: Path) -> str:
    """Return the error that ended a run, with its line; "" where it was not recorded."""
    ends = [row for row in read_rows(folder / RECORD) if row.get("kind") == "end"]
    return str(ends[-1]["error"] or "") if ends else ""


def _read_run(folder: Path) -> Run:
    trace = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    rows = read_rows(folder / RECORD)
    count = max((len(each) for each in trace["digests"].values()), default=0)
    stepped = [number for number, row in enumerate(rows) if row.get("kind") == "step" and row["step"] < count]
    # A run that is cut ends at the step after the last one, whose backward passes are there or not by chance.
    end = len(rows) if not trace["is_cut"] else stepped[-1] if stepped else 0
    weights: dict[str, Any] = {}
    if (folder / "weights.npz").exists():
        import numpy

        with numpy.load(folder / "weights.npz") as data:
            weights = {key: data[key] for key in data.files}
    by_step = _order_of([rows[number] for number in stepped])
    return dataclasses.replace(
        _run_of(rows[:end], [rows[number] for number in stepped], rows),
        digests=by_step(trace["digests"]),
        weights=by_step(weights),
        names=by_step(trace["names"]),
        norms=by_step(trace["norms"]),
        passes=[{name: (half, wide) for name, (half, wide) in each.items()} for each in trace["passes"]],
        files=tuple(trace["files"]),
        plain_steps=trace["plain_steps"],
        initialize=trace["initialize"],
        evaluations=tuple(trace["evaluations"]),
        reads=tuple(trace["reads"]),
        halves=tuple(trace["halves"]),
        policy=tuple(trace["policy"]),
        clears=tuple(trace["clears"]),
        clip_norms=by_step(trace["clip_norms"]),
        batches=tuple(trace["batches"]),
        draws=tuple(trace["draws"]),
        first_changed=trace["first_changed"],
        is_cut=trace["is_cut"],
    )


def _read_recording(folder: Path, steps: int) -> Run:
    """Return what the recorder of a stack has written: of the optimizers whose loss was scaled."""
    rows = read_rows(folder / RECORD)
    scaled = {number for row in rows if row.get("kind") == "backward" for number in row["optimizers"]}
    stepped = [row for row in rows if row.get("kind") == "step" and (row["optimizer"] in scaled or not scaled)]
    is_cut = any(row["step"] + 1 >= steps for row in stepped)
    by_step = _order_of(stepped)
    norms: dict[str, list[float | None]] = {}
    for row in stepped:
        norm = row["grad_norm"]
        norms.setdefault(str(row["optimizer"]), []).append(None if norm is None else float(norm))
    weights: dict[str, Any] = {}
    if (folder / "last.pt").exists():
        import torch

        last = torch.load(folder / "last.pt", map_location="cpu", weights_only=True)
        numbers = {row["optimizer"] for row in stepped}
        held = [(number, each) for number, each in enumerate(last) if number in numbers]
        weights = {f"{number}.{place}": one.numpy() for number, each in held for place, one in enumerate(each)}
    none: dict[str, Any] = {"sha256": [], "draws": []}
    batches = next((row for row in rows if row.get("kind") == "batches"), none)
    run = _run_of(rows, stepped, rows)
    return dataclasses.replace(
        run,
        weights=by_step(weights),
        norms=by_step(norms),
        clip_norms=by_step(norms),
        passes=[{} for row in rows if row.get("kind") in ("backward", "plain_backward")],
        plain_steps=len(stepped),
        initialize=UNKNOWN if not run.levels else "called",
        batches=tuple(batches["sha256"]),
        draws=tuple(batches["draws"]),
        is_cut=is_cut,
    )


def _order_of(steps: list[dict[str, Any]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what renames the optimizers of values: by their first step.

    Apex sees all at once, a scaler each at its step.
    """
    order = {number: str(place) for place, number in enumerate(dict.fromkeys(row["optimizer"] for row in steps))}

    def by_step(values: dict[str, Any]) -> dict[str, Any]:
        parts = ((*key.partition("."), value) for key, value in values.items())
        return {f"{order.get(int(number), number)}{dot}{rest}": value for number, dot, rest, value in parts}

    return by_step


def _run_of(rows: list[dict[str, Any]], steps: list[dict[str, Any]], all_rows: list[dict[str, Any]]) -> Run:
    """Return what the rows of a record say: backward passes of `rows`, and the steps."""
    backwards = [row for row in rows if row.get("kind") == "backward"]
    losses, scales = (
        [None if row[key] is None else float(row[key]) for row in backwards] for key in ("loss", "scale_before")
    )
    order = {number: place for place, number in enumerate(dict.fromkeys(row["optimizer"] for row in steps))}
    applied = [(order[row["optimizer"]], row["applied"]) for row in steps]
    levels = tuple(row["opt_level"] for row in all_rows if row.get("kind") == "initialize")
    return Run(losses, scales, applied, {}, levels=levels)


def _differ_in_weights_alone(original: Run, rewritten: Run) -> bool:
    """Return whether the weights are all that is different, as those are whose gradients are roundings of nothing.

    Such as a bias in front of a batch norm: a twin shows how far roundings take it.
    """
    return compare_runs(original, dataclasses.replace(rewritten, weights=original.weights))[0] != DIFFERENT


def compare_runs(
    original: Run, rewritten: Run, twin: Run | None = None, of: Run | None = None
) -> tuple[str, list[str]]:
    """Return how the rewritten script trained against the original: the verdict, and what was compared, in words.

    Args:
        twin: weights that are apart in it may be apart in the result.
        of: the run whose twin it is; None for the original.
    """
    apart: dict[str, float] = {}
    if twin is not None:
        base = (of or original).weights
        apart = {key: _largest_apart(base[key], twin.weights[key]) for key in base.keys() & twin.weights.keys()}
    compared = [
        _compare_losses(original, rewritten),
        _compare_scales(original, rewritten),
        _compare_steps(original, rewritten),
        _compare_weights(original, rewritten, apart),
    ]
    compared += _compare_types(original, rewritten)
    # Different whatever roundings do: gradients that are not unscaled, no autocast.
    beyond = [_other_gradients(original, rewritten), _other_precision(original, rewritten)]
    beyond += _other_settings(original, rewritten)
    compared += [(DIFFERENT, line) for line in beyond if line]
    order = (EQUAL, WITHIN, DIFFERENT)
    return max((verdict for verdict, _ in compared), key=order.index), [line for _, line in compared]


def _compare_types(original: Run, rewritten: Run) -> list[tuple[str, str]]:
    """Return where an evaluation, or what comes to the host, has other types: fewer bits, or more."""
    found = []
    for what, before, after in (
        ("what a model returns without gradients", original.evaluations, rewritten.evaluations),
        ("what comes to the host by cpu()", original.reads, rewritten.reads),
    ):
        for number, (first, second) in enumerate(zip(before, after, strict=False), 1):
            if (first in HALVES) != (second in HALVES):
                verdict = DIFFERENT if second in HALVES else WITHIN
                found.append((verdict, f"types: {verdict}; {what} is {second}, not {first}, at the {number}. call"))
                break
    return found


def differ_more_than_twin(original: Run, rewritten: Run, twin: Run, of: Run | None = None) -> list[str]:
    """Return where a rewrite differs by more than roundings make, as a twin shows them: `of` the original, if not said.

    A twin of another run is the rewritten one's.
    """
    lines = []
    largest = 0.0
    base = of or original
    whose = "unchanged" if base is original else "rewritten"
    apart = _differences(base, twin)
    for number, difference in enumerate(_differences(original, rewritten), 1):
        largest = max(largest, apart[number - 1] if number <= len(apart) else float("inf"))
        if difference > max(OF_TWIN * largest, WITHOUT_TWIN):
            lines.append(_beyond(f"losses: {DIFFERENT}; at backward pass {number}", difference, largest, whose))
            break
    for name, norms in original.norms.items():
        largest = 0.0
        runs = (rewritten, twin, base)
        others = zip(norms, *(run.norms.get(name, []) for run in runs), strict=False)
        for number, (first, second, third, fourth) in enumerate(others, 1):
            if None in (first, second, third, fourth) or max(first or 0.0, second or 0.0) < MIN_NORM:
                continue
            largest = max(largest, _difference(fourth, third))
            if _difference(first, second) > max(OF_TWIN * largest, NORMS_WITHOUT_TWIN):
                where = f"gradients: {DIFFERENT}; their norm at step {number} of optimizer {int(name) + 1}"
                lines.append(_beyond(where, _difference(first, second), largest, whose))
                break
    return lines


def _beyond(where: str, difference: float, largest: float, whose: str) -> str:
    return (
        f"{where} by {difference:.2g}, where a twin of the {whose} script, its weights moved by one unit in the last "
        f"place of fp16, differs by {largest:.2g}"
    )


def _differences(original: Run, rewritten: Run) -> list[float]:
    """Return the relative difference of the losses of each backward pass; none if other passes were scaled."""
    if _scale_others(original, rewritten):
        return []
    return [_difference(*pair) for pair in zip(original.losses, rewritten.losses, strict=False)]


def _scale_others(original: Run, rewritten: Run) -> bool:
    """Return whether both ran as many backward passes, and scaled more of them in one: Apex leaves plain ones alone."""
    return len(original.passes) == len(rewritten.passes) and len(original.losses) != len(rewritten.losses)


def _difference(first: float | None, second: float | None) -> float:
    """Return a relative difference: 0 for two NaN, infinity where one alone is NaN or there is none."""
    if first == second or (first != first and second != second):
        return 0.0
    if first is None or second is None:
        return float("inf")
    found = abs(first - second) / max(abs(first), abs(second), 1e-6)
    return found if found == found else float("inf")


def _first_above(differences: list[float], limit: float) -> int | None:
    """Return the first backward pass whose losses are more than a limit apart."""
    return next((number for number, each in enumerate(differences, 1) if each > limit), None)


def _compare_losses(original: Run, rewritten: Run) -> tuple[str, str]:
    if _scale_others(original, rewritten):
        return EQUAL, f"losses: not compared, since {len(original.losses)} against {len(rewritten.losses)} were scaled"
    differences = _differences(original, rewritten)
    first, parted = _first_above(differences, 0.0), _first_above(differences, ROUNDING)
    if first is None:
        return EQUAL, f"losses: {EQUAL} in {len(differences)} backward passes"
    verdict = WITHIN if parted is None or parted > _first_passes(original) else DIFFERENT
    until = f" up to backward pass {parted - 1}" if verdict == WITHIN and parted is not None else ""
    return verdict, (
        f"losses: {verdict}{until}; first at backward pass {first}: {original.losses[first - 1]} against "
        f"{rewritten.losses[first - 1]}; largest relative difference {max(differences):.2g}"
    )


def _first_passes(run: Run) -> int:
    """Return the backward passes of the first taken steps, of all where there are no more steps."""
    taken = [number for number, (_, applied) in enumerate(run.applied, 1) if applied]
    return len(run.losses) if len(taken) <= FIRST else len(run.losses) * taken[FIRST - 1] // len(run.applied)


def _compare_scales(original: Run, rewritten: Run) -> tuple[str, str]:
    if _scale_others(original, rewritten):
        return EQUAL, "loss scales: not compared"
    pairs = [(a or 1.0, b or 1.0) for a, b in zip(original.scales, rewritten.scales, strict=False)]
    for index, (first, second) in enumerate(pairs, 1):
        if first != second:
            if index == 1:
                return DIFFERENT, f"loss scales: {DIFFERENT} from the start: {first:g} against {second:g}"
            if len(original.losses) == len(original.applied) == len(rewritten.losses):
                return DIFFERENT, f"loss scales: {DIFFERENT} at backward pass {index}: {first:g} against {second:g}"
            # Apex moves a scale at each of the passes of a step, a GradScaler once. A power of two changes no bit of
            # what does not overflow; what it skips is compared below.
            return WITHIN, f"loss scales: first different at backward pass {index}: {first:g} against {second:g}"
    return EQUAL, "loss scales: equal"


def _compare_steps(original: Run, rewritten: Run) -> tuple[str, str]:
    for number, (first, second) in enumerate(zip(original.applied, rewritten.applied, strict=False), 1):
        if first != second:
            words = [f"{'taken' if taken else 'skipped'} by optimizer {index + 1}" for index, taken in (first, second)]
            return DIFFERENT, f"steps: first different at step {number}: {words[0]} against {words[1]}"
    if len(original.applied) != len(rewritten.applied):
        return DIFFERENT, f"steps: {len(original.applied)} against {len(rewritten.applied)}"
    return EQUAL, "skipped steps: equal"


def _other_gradients(original: Run, rewritten: Run) -> str:
    """Return where an optimizer was given other gradients; Adam trains nearly alike if they are not unscaled."""
    for number, norms in original.norms.items():
        for index, (first, second) in enumerate(zip(norms, rewritten.norms.get(number, []), strict=False)):
            taken = _is_taken(original, number, index) and _is_taken(rewritten, number, index)
            if not taken or first is None or second is None or (first < MIN_NORM and second < MIN_NORM):
                continue
            # Of the first step, the same losses have the same gradients.
            factor = OF_FIRST_NORM if index == 0 and _begin_alike(original, rewritten) else OF_NORM
            if not (first <= factor * second and second <= factor * first) and _difference(first, second):
                where = f"step {index + 1} of optimizer {int(number) + 1}"
                return f"gradients: {DIFFERENT}; first at {where}: norm {first:.3g} against {second:.3g}"
    return ""


def _begin_alike(original: Run, rewritten: Run) -> bool:
    """Return whether the losses of the first step are equal to the last bit."""
    differences = _differences(original, rewritten)
    passes = max(1, len(original.losses) // max(1, len(original.applied)))
    return bool(differences) and not any(differences[:passes])


def _other_settings(original: Run, rewritten: Run) -> list[str]:
    """Return what a run of few steps need not show: another 16-bit type or policy of the loss scale, kept gradients."""
    found = []
    if original.halves and rewritten.halves and original.halves != rewritten.halves:
        types = [" and ".join(each.halves) for each in (rewritten, original)]
        found.append(f"precision: {DIFFERENT}; losses are computed in {types[0]}, not in {types[1]}")
    if original.policy and rewritten.policy and original.policy != rewritten.policy:
        policies = [
            f"{up:g} and {down:g} every {steps:g} steps" for up, down, steps in (rewritten.policy, original.policy)
        ]
        found.append(f"loss scales: {DIFFERENT}; the factors are {policies[0]}, not {policies[1]}")
    for number, (first, second) in enumerate(zip(original.clears, rewritten.clears, strict=False), 1):
        if first and not second:
            found.append(
                f"gradients: {DIFFERENT}; nothing clears them before step {number}, as in the unchanged script"
            )
            break
    return found


def _is_taken(run: Run, number: str, index: int) -> bool:
    steps = [taken for each, taken in run.applied if str(each) == number]
    return index < len(steps) and steps[index]


def _other_precision(original: Run, rewritten: Run) -> str:
    """Return which operations run in another precision; without autocast losses are no more than roundings apart."""
    for number, (first, second) in enumerate(zip(original.passes, rewritten.passes, strict=False), 1):
        for name in sorted(first.keys() & second.keys()):
            (half, wide), (new_half, new_wide) = first[name], second[name]
            kind = name.rstrip("0123456789").removesuffix("Backward")
            where = f"precision: {DIFFERENT}; in backward pass {number}, {new_half} of {kind} are in 16 bits"
            if kind in PRODUCTS and (new_half - half) * (new_wide - wide) < 0:
                place = "outside of autocast" if new_half < half else "under autocast that had its casts off"
                return f"{where}, {half} in the unchanged script: is a forward pass {place}?"
            if kind in IN_FP32 and not half and new_half:
                return f"{where}, none in the unchanged script: is a loss outside of autocast?"
    return ""


def _compare_weights(original: Run, rewritten: Run, apart: Mapping[str, float]) -> tuple[str, str]:
    """Return the verdict on weights, of every step where both were followed, else of the last one.

    Args:
        apart: how far a twin is from its run.
    """
    place = _first_weight_apart(original, rewritten)
    if place is None and original.digests:
        return EQUAL, f"weights: {EQUAL} after every step"
    # Where losses have parted in later steps, so have weights.
    parted = _first_above(_differences(original, rewritten), ROUNDING) is not None
    worst, where, verdict, by_length = 0.0, "", WITHIN, ""
    keys = [key for key in original.weights if key in rewritten.weights and original.weights[key].size]
    largest = max((float(abs(original.weights[key]).max()) for key in keys), default=0.0)
    for key in keys:
        first, second = original.weights[key], rewritten.weights[key]
        if first.shape != second.shape:
            return DIFFERENT, f"weights: {_name(original, key)} has shape {first.shape} against {second.shape}"
        size = float(abs(first).max())
        difference = _largest_apart(first, second)
        is_small = first.ndim == 1 and size < SMALL * largest
        if difference > ROUNDING and _distance(first, second) <= (OF_SMALL if is_small or parted else OF_LENGTH):
            by_length = f"; more in single weights such as those of {_name(original, key)}"
            continue
        if difference > ROUNDING and difference <= OF_TWIN * apart.get(key, 0.0):
            by_length = f"; more in {_name(original, key)}, which roundings take as far"
            continue
        verdict = verdict if difference <= ROUNDING else DIFFERENT
        if not difference <= worst:
            worst, where = difference, key
    if place is None and not keys:
        return EQUAL, "weights: not compared, since the runs end between the steps of their optimizers"
    if place is None and not worst and not by_length:
        return EQUAL, f"weights: {EQUAL} after the last step"
    begin = "" if place is None else f"first at step {place[0]} in {_name(original, place[1])}; "
    key = place[1] if place is not None else keys[0]
    return verdict, (
        f"weights: {verdict}; {begin}at the end by {worst:.2g} of the largest weight at most, in "
        f"{_name(original, where or key)}{by_length}"
    )


def _largest_apart(first: Any, second: Any) -> float:
    """Return the largest difference of two tensors of one shape, as a part of the largest number of the first."""
    return float(abs(first - second).max()) / max(float(abs(first).max()), 1e-6)


def _distance(first: Any, second: Any) -> float:
    """Return how far two vectors are apart, in lengths of the first."""
    return float(((first - second) ** 2).sum() ** 0.5) / max(float((first**2).sum() ** 0.5), 1e-12)


def _first_weight_apart(original: Run, rewritten: Run) -> tuple[int, str] | None:
    found: list[tuple[int, str]] = []
    for number, steps in original.digests.items():
        for index, (first, second) in enumerate(zip(steps, rewritten.digests.get(number, []), strict=False), 1):
            apart = [place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b]
            if apart:
                found.append((index, f"{number}.{apart[0]}"))
                break
    return min(found, default=None)


def _name(run: Run, key: str) -> str:
    number, _, index = key.partition(".")
    shape = f" ({'x'.join(map(str, run.weights[key].shape))})" if key in run.weights else ""
    name = run.names.get(key, f"parameter {int(index) + 1}")
    return f"{name}{shape} of optimizer {int(number) + 1}"
