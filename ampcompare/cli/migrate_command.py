"""`ampcompare migrate`: move scripts of Apex to torch.amp, by a rewrite or with the adapter."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ampcompare.api.migration import migrate_script
from ampcompare.base.errors import ConfigError, EnvironmentUnfit
from ampcompare.base.option_rules import rule_of_exclusion
from ampcompare.cli.forms import CommandForm, default_form, form_asked_by_parameter
from ampcompare.cli.help import Command, make_option_from_signature, option
from ampcompare.cli.output import print_folded_on_stderr
from ampcompare.cli.values import FILE, WordChoice

if TYPE_CHECKING:
    from ampcompare.source.migrate.adapter.project import AdapterPlan
    from ampcompare.source.migrate.project import FileMigration

VERIFY_RESUME = form_asked_by_parameter(
    "--verify-resume STEP",
    "resume_step",
    ("paths", "adapter", "rewrite", "resume_args", "convert"),
    ", which runs two scripts and changes no file",
)
VERIFY = form_asked_by_parameter(
    "--verify",
    "verify",
    ("paths", "adapter", "rewrite", "steps", "stack", "preflight"),
    ", which changes no file and rewrites for the torch that is installed",
)
ADAPT = form_asked_by_parameter(
    "--adapter", "adapter", ("paths", "mode"), ", which keeps the code, for all versions of torch"
)
FORMS = (VERIFY_RESUME, VERIFY, ADAPT, default_form(("paths", "torch_version", "mode", "rewrite")))


@click.command(
    "migrate",
    cls=Command,
    forms=FORMS,
    rules=(rule_of_exclusion("--rewrite", "rewrite", "--adapter", "adapter", ", which keeps the code"),),
    examples=[
        ("What would change?", "ampcompare migrate train.py"),
        ("Does the new script train the same?", "ampcompare migrate --verify train.py -- --epochs 1"),
        (
            "Change imports only, and add one file with Apex's functions:",
            "ampcompare migrate --adapter --write src",
        ),
    ],
    epilog="Exit codes: 0 everything was rewritten; 1 something is left to do by hand; 2 usage, or a file cannot be "
    "read, parsed or written. With --verify: 0 equal, or within rounding; 1 different; 3 a script failed, or there is "
    "nothing to compare.",
)
@option("--diff", "mode", flag_value="diff", default=True, help="print a patch and change no file  [default]")
@option("--write", "mode", flag_value="write", help="change the files")
@option(
    "--adapter",
    is_flag=True,
    help="add one file with Apex's functions on torch.autocast for all files, and change imports alone; by default "
    "trainings, and what runs with them, take it",
)
@option(
    "--rewrite",
    is_flag=True,
    help="rewrite all that nothing speaks against, with a note on each thing that the text does not prove right; the "
    "adapter for none",
)
@make_option_from_signature(migrate_script)("--torch-version", metavar="VERSION")
@option(
    "--verify",
    is_flag=True,
    help="run the script before and after the rewrite on the CPU, and compare each step",
)
@option(
    "--device",
    type=WordChoice(["cpu"]),
    default="cpu",
    expose_value=False,
    help="of --verify, which needs no other",
)
@option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="of --verify")
@option(
    "--stack",
    metavar="NAME=COMMAND",
    help="of --verify: run the unchanged script in another environment, with its Apex: old=/envs/old/bin/python",
)
@option(
    "--verify-resume",
    "resume_step",
    type=click.IntRange(1),
    metavar="STEP",
    help="stop the Apex script once it has saved at or behind STEP, start the rewritten one from its file, and compare "
    "with the Apex script without a break",
)
@option(
    "--resume-args",
    metavar="ARGS",
    help="with --verify-resume: added to the script's arguments when it is started again: {checkpoint} is the file "
    "that it saved last, {folder} its folder",
)
@option("--convert", is_flag=True, help="with --verify-resume: from the file that ampcompare convert makes")
@option(
    "--preflight/--no-preflight",
    default=True,
    help="with --verify, first train a few steps of the script: what cannot work is said at once",
)
@click.argument("paths", metavar="PATHS...", nargs=-1, required=True, type=FILE)
def command(
    asked: CommandForm,
    mode: str,
    adapter: bool,
    rewrite: bool,
    torch_version: str | None,
    verify: bool,
    steps: int,
    stack: str | None,
    resume_step: int | None,
    resume_args: str | None,
    convert: bool,
    preflight: bool,
    paths: tuple[str, ...],
) -> int:
    """Move Apex scripts to torch.amp; verify that they train the same.

    PATHS are files, folders and notebooks. The patch, or the result of --verify, goes to stdout, remarks to stderr.
    Trainings keep their code and take the adapter: one file with Apex's functions on torch.autocast, which they
    import. With --rewrite their code has torch.autocast and GradScaler.

    ampcompare migrate --verify train.py -- ARGS runs train.py ARGS twice: unchanged on ampcompare's engine, and
    rewritten on torch. With --stack old=/envs/old/bin/python the unchanged one runs there, with the Apex of that
    environment.
    """
    how = "adapter" if adapter else "rewrite" if rewrite else ""
    if asked is VERIFY_RESUME:
        assert resume_step is not None
        from ampcompare.base.environment.extras import require_torch
        from ampcompare.experiment.script_resume import verify_migrated_resume

        require_torch()
        return verify_migrated_resume(
            paths[0],
            list(paths[1:]),
            step=resume_step,
            resume_args=resume_args,
            how=how,
            convert=convert,
            say=click.echo,
        )
    if asked is VERIFY:
        from ampcompare.base.environment.extras import require_torch
        from ampcompare.experiment.verify import verify_rewritten_script
        from ampcompare.settings.stack import parse_stacks

        require_torch()

        def check() -> None:
            from ampcompare.experiment.preflight import run_trials_of_configs
            from ampcompare.settings.config import RunConfig
            from ampcompare.settings.script import script_config

            script = script_config(paths, compat_torch=True)  # as in the runs that follow
            run_trials_of_configs([RunConfig(arm="script", device="cpu", script=script)], _say_on_stderr)

        first = check if preflight and stack is None else lambda: None
        where = None if stack is None else next(iter(parse_stacks([stack]).values()))
        return verify_rewritten_script(
            paths[0], list(paths[1:]), steps=steps, say=click.echo, check=first, how=how, stack=where
        )
    return _write_or_print_migrations(
        paths, torch_version, adapter=adapter, rewrite=rewrite, write=mode == "write"
    )


def _write_or_print_migrations(
    paths: tuple[str, ...], torch_version: str | None, *, adapter: bool, rewrite: bool, write: bool
) -> int:
    """Print or write what becomes of files, and the adapter next to those that take it; return the exit code."""
    from ampcompare.source.find import find_sources
    from ampcompare.source.migrate.adapter.choice import choose_adapter_for_all, choose_rewrite_or_adapter
    from ampcompare.source.versions import installed_or_given_versions

    versions = installed_or_given_versions(torch_version)
    output = _MigrationOutput(write=write)
    files = list(
        find_sources(paths, unreadable=lambda path, why: output.report_fault(f"{path}: not read: {why}"))
    )
    if adapter:
        choice = choose_adapter_for_all(files)
    else:
        named = set(map(Path, paths))
        choice = choose_rewrite_or_adapter(
            files,
            rewritten="all" if rewrite else "none",
            must_parse=named.__contains__,
            versions=versions,
            within=paths,
        )
    for line in choice.reason_lines():
        _say_on_stderr(line)
    for plan in choice.plans:
        output.print_or_write_project(plan)
    adapted = sum(each.takes_adapter for each in output.changed)
    output.print_or_write_files(choice.rewritten)
    waiting = [each for each in choice.files if each.num_lines_by_hand]
    left = sum(each.num_lines_by_hand for each in waiting)
    moved = [each for each in output.changed if not each.has_only_comments_added]
    _say_on_stderr(_migration_counts_line(len(files), output, adapted, left, len(waiting)))
    if staying := choice.paths_staying_on_apex():
        _say_command_for_unmigrated(staying, paths, adapter=adapter, some_written=bool(moved) and write)
    elif moved and not output.faults:
        flag = "--adapter " * adapter + "--rewrite " * rewrite
        _say_command_that_comes_next(files, output, f"ampcompare migrate {flag}--verify")
    if moved:
        is_whole = not left and not output.faults and not choice.imports_apex
        _say_lines_requiring_apex([each.path for each in moved], is_whole=is_whole)
    return ConfigError.exit_code if output.faults else int(left > 0)


class _MigrationOutput:
    """Where what becomes of files goes.

    Attributes:
        write: whether files are written; patches are printed otherwise.
        faults: how many files could not be read or written.
        changed: the files that were written, or would be.
    """

    def __init__(self, *, write: bool) -> None:
        self.write = write
        self.faults = 0
        self.changed: list[FileMigration] = []
        self._added: set[Path] = set()  # adapters, of which two groups of files may have one by two names

    def report_fault(self, line: str) -> None:
        """Say what is wrong with a file."""
        self.faults += 1
        _say_on_stderr(f"ampcompare: {line}")

    def print_or_write_project(self, plan: AdapterPlan) -> None:
        """Put the files of a project that take the adapter, and the adapter first."""
        from ampcompare.source.migrate.adapter.project import KEPT_FILE, NOT_INSTALLED

        count = sum(each.takes_adapter for each in plan.files)
        is_new = plan.adapter.is_new and plan.adapter.path not in self._added
        try:
            if count and is_new:
                self._added.add(plan.adapter.path)
                if self.write:
                    plan.adapter.write()
                else:
                    click.echo(plan.adapter.diff(), nl=False)
        except OSError as fault:
            self.report_fault(f"{plan.adapter.path.parent}: not written: {fault}")
            return
        self.print_or_write_files(plan.files)
        if count and plan.adapter.is_edited:
            _say_on_stderr(KEPT_FILE.format(plan.adapter.path))
        if count:
            done = f"added {plan.adapter.path}" if self.write and is_new else str(plan.adapter.path)
            whose = f"{count} file{'s' * (count != 1)}"
            _say_on_stderr(f"{done}: Apex's functions on torch.autocast, for {whose}; keep it with them")
        if count and plan.is_left_out_of_installation:
            _say_on_stderr(NOT_INSTALLED.format(plan.adapter.path))

    def print_or_write_files(self, files: list[FileMigration]) -> None:
        """Print the patches of files, or write them, and say what is found in them."""
        for each in files:
            if each.fault is not None:
                self.report_fault(each.summary())
                continue
            if each.is_changed and self.write:
                try:
                    each.write()
                except (ValueError, OSError, EnvironmentUnfit) as fault:  # what `write` says of a file
                    self.report_fault(f"{each.path}: not written: {fault}")
                    continue
            elif each.is_changed:
                click.echo(each.diff(), nl=False)
            for line in each.lines():
                _say_on_stderr(line)
            if each.is_changed:
                self.changed.append(each)


def _say_command_that_comes_next(files: list[Path], output: _MigrationOutput, command: str) -> None:
    """Name the command that verifies a patch, or what becomes of checkpoints once it is written."""
    if output.write:
        if any(each.loads_apex_scaler_state for each in output.changed):
            _say_on_stderr(
                "files that were saved with Apex load as before; to convert one: ampcompare convert OLD NEW --to native"
            )
    elif len(files) > 1 or files[0].suffix == ".py":
        script = shlex.quote(str(files[0])) if len(files) == 1 else "SCRIPT.py"
        _say_on_stderr(f"next, check that it trains the same: {command} {script} -- ARGS")


def _say_command_for_unmigrated(
    files: list[Path], paths: tuple[str, ...], *, adapter: bool, some_written: bool
) -> None:
    """Name what runs the files that are left by hand: the adapter, or the engine for what the adapter lacks."""
    from ampcompare.source.migrate.adapter.project import files_taken_off_apex
    from ampcompare.source.migrate.leftovers import apex_names_engine_lacks

    moving = [] if adapter else files_taken_off_apex(files)
    if moving:
        command = shlex.join(["ampcompare", "migrate", "--adapter", *paths])
        first = "; undo this --write first, since all files of a project share one loss scaler" * some_written
        how = "what is left moves off Apex as it is, with Apex's functions on torch.autocast in one file"
        _say_on_stderr(f"{how}: {command}{first}")
    lacking = {path: apex_names_engine_lacks(path) for path in files if path not in moving}
    rest = [path for path, names in lacking.items() if not names]
    if rest:
        names = f" in {', '.join(map(str, rest))}" * (len(rest) < len(files))
        install = "`import ampcompare.apex; ampcompare.apex.install()` above the imports of Apex"
        _say_on_stderr(f"what is left{names} runs on with {install}")
    for path, missing in lacking.items():
        if missing:
            _say_on_stderr(
                f"{path} needs {', '.join(missing)}, which neither the adapter nor ampcompare's engine has"
            )


def _say_lines_requiring_apex(files: list[Path], *, is_whole: bool) -> None:
    """Name the lines by which a project asks for the package Apex, which can go with the last import of it."""
    from ampcompare.source.migrate.leftovers import requirements_of_apex

    when = (
        "can go, unless a file that was not named here, or another package, imports it"
        if is_whole
        else "stays as long as a file needs it"
    )
    for path, line, text in requirements_of_apex(files):
        _say_on_stderr(f"{os.path.relpath(path)}:{line}: `{text}`: the dependency on Apex {when}")


def _migration_counts_line(
    files: int, output: _MigrationOutput, num_adapted: int, num_lines_left: int, by_hand: int
) -> str:
    done = (
        ["rewritten", "moved to the adapter", "marked"]
        if output.write
        else ["to rewrite", "to move to the adapter", "to mark"]
    )
    marked = sum(each.has_only_comments_added for each in output.changed)
    changed = (len(output.changed) - num_adapted - marked, num_adapted, marked)
    counts = [f"{count} {how}" for count, how in zip(changed, done, strict=True) if count]
    what = ", ".join(counts) + "; --write does it" * (not output.write) if counts else "nothing to rewrite"
    parts = [f"{files} file{'s' * (files != 1)}: {what}"]
    if num_lines_left:
        parts.append(f"{num_lines_left} line{'s' * (num_lines_left != 1)} left by hand in {by_hand} of them")
    if output.faults:
        parts.append(f"{output.faults} not migrated")
    return "; ".join(parts)


def _say_on_stderr(line: str) -> None:
    print_folded_on_stderr(line)
    sys.stderr.flush()
