"""`ampcompare migrate`: rewrite scripts of Apex for torch.amp."""

import shlex
import sys
from pathlib import Path

import click

from ampcompare.api.migration import migrate_script
from ampcompare.base.errors import ConfigError, EnvironmentUnfit
from ampcompare.cli.forms import Form, form, plain_form
from ampcompare.cli.help import Command, option, option_factory
from ampcompare.cli.output import note
from ampcompare.cli.values import FILE, Choice

VERIFY_RESUME = form(
    "--verify-resume STEP",
    "resume_step",
    ("paths", "adapter", "resume_args", "convert"),
    ", which runs two scripts and changes no file",
)
VERIFY = form(
    "--verify",
    "verify",
    ("paths", "adapter", "steps", "stack", "preflight"),
    ", which changes no file and rewrites for the torch that is installed",
)
ADAPT = form("--adapter", "adapter", ("paths", "mode"), ", whose file runs on all versions of torch")
FORMS = (VERIFY_RESUME, VERIFY, ADAPT, plain_form(("paths", "torch_version", "mode")))


@click.command(
    "migrate",
    cls=Command,
    forms=FORMS,
    examples=[
        ("What would change?", "ampcompare migrate train.py"),
        ("Does the new script train the same?", "ampcompare migrate --verify train.py -- --epochs 1"),
        ("Change imports only, and add one file with Apex's functions:", "ampcompare migrate --adapter --write src"),
    ],
    epilog="Exit codes: 0 everything was rewritten; 1 something is left to do by hand; 2 usage, or a file cannot be "
    "read, parsed or written. With --verify: 0 equal, or within rounding; 1 different; 3 a script failed.",
)
@option("--diff", "mode", flag_value="diff", default=True, help="print a patch and change no file  [default]")
@option("--write", "mode", flag_value="write", help="change the files")
@option(
    "--adapter",
    is_flag=True,
    help="leave the code, add one file with Apex's functions on torch.autocast, and import that in the place of Apex",
)
@option_factory(migrate_script)("--torch-version", metavar="VERSION")
@option("--verify", is_flag=True, help="run the script before and after the rewrite on the CPU, and compare each step")
@option("--device", type=Choice(["cpu"]), default="cpu", expose_value=False, help="of --verify, which needs no other")
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
    asked: Form,
    mode: str,
    adapter: bool,
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
    """Rewrite Apex scripts for torch.amp; verify that they train the same.

    PATHS are files, folders and notebooks. The patch, or the result of --verify, goes to stdout, remarks to stderr.
    Code that cannot be rewritten safely stays, with a comment above the line; --adapter moves it too.

    ampcompare migrate --verify train.py -- ARGS runs train.py ARGS twice: unchanged on ampcompare's engine, and
    rewritten on torch. With --stack old=/envs/old/bin/python the unchanged one runs there, with the Apex of that
    environment.
    """
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
            adapter=adapter,
            convert=convert,
            say=click.echo,
        )
    if asked is VERIFY:
        from ampcompare.base.environment.extras import require_torch
        from ampcompare.experiment.verify import verify_script
        from ampcompare.settings.stack import parse_stacks

        require_torch()

        def check() -> None:
            from ampcompare.experiment.preflight import try_configs
            from ampcompare.settings.config import RunConfig
            from ampcompare.settings.script import script_config

            try_configs([RunConfig(arm="script", device="cpu", script=script_config(paths))], _say_on_stderr)

        first = check if preflight and stack is None else lambda: None
        where = None if stack is None else next(iter(parse_stacks([stack]).values()))
        return verify_script(
            paths[0], list(paths[1:]), steps=steps, say=click.echo, check=first, adapter=adapter, stack=where
        )
    if asked is ADAPT:
        return _adapt_paths(paths, write=mode == "write")
    return _migrate_paths(paths, torch_version, write=mode == "write")


def _migrate_paths(paths: tuple[str, ...], torch_version: str | None, *, write: bool) -> int:
    from ampcompare.source.find import find_sources
    from ampcompare.source.migrate.project import find_mistakes, migrate_file
    from ampcompare.source.versions import known_versions

    versions = known_versions(torch_version)

    faults: list[str] = []

    def fail(line: str) -> None:
        faults.append(line)
        _say_on_stderr(f"ampcompare: {line}")

    files = list(find_sources(paths, unreadable=lambda path, reason: fail(f"{path}: not read: {reason}")))
    named = set(map(Path, paths))
    changed = left = 0
    waiting: list[Path] = []
    loads = False
    for path in files:
        result = migrate_file(path, must_parse=path in named, examine=find_mistakes, versions=versions, within=paths)
        if result.fault is not None:
            fail(result.lines()[0])
            continue
        if result.changed and write:
            loads |= result.loads_state
            try:
                result.write()
            except (ValueError, EnvironmentUnfit) as fault:  # what `write` says of a file
                fail(f"{path}: not written: {fault}")
                continue
        elif result.changed:
            click.echo(result.diff(), nl=False)
        for line in result.lines():
            _say_on_stderr(line)
        changed += result.changed
        left += result.by_hand
        waiting += [path] if result.by_hand else []
    _say_on_stderr(_sums_line(len(files), changed, left, len(waiting), len(faults), write))
    if left:
        _say_how_it_runs(waiting, paths, some_written=changed > 0 and write)
    elif loads and not faults:
        _say_on_stderr(
            "files that were saved with Apex load as before; to convert one: ampcompare convert OLD NEW --to native"
        )
    elif changed and not write and not faults:
        script = shlex.quote(str(files[0])) if len(files) == 1 else "SCRIPT.py"
        _say_on_stderr(f"next, check that it trains the same: ampcompare migrate --verify {script} -- ARGS")
    return ConfigError.exit_code if faults else int(left > 0)


def _say_how_it_runs(files: list[Path], paths: tuple[str, ...], *, some_written: bool) -> None:
    """Name what runs the files that are left by hand: the adapter, or the engine for what the adapter lacks."""
    from ampcompare.source.migrate.adapter.project import lacking

    rest = lacking(files)
    if len(rest) < len(files):
        command = shlex.join(["ampcompare", "migrate", "--adapter", *paths])
        first = "; undo this --write first, since all files of a project share one loss scaler" * some_written
        how = "what is left moves off Apex as it is, with Apex's functions on torch.autocast in one file"
        _say_on_stderr(f"{how}: {command}{first}")
    if rest:
        names = f" in {', '.join(map(str, rest))}" * (len(rest) < len(files))
        install = "`import ampcompare.apex; ampcompare.apex.install()` above the imports of Apex"
        _say_on_stderr(f"what is left{names} runs on with {install}")


def _adapt_paths(paths: tuple[str, ...], *, write: bool) -> int:
    """Put the adapter next to the files, and change their imports."""
    from ampcompare.source.find import find_sources
    from ampcompare.source.migrate.adapter.project import KEPT_FILE, plan_adapters

    faults: list[str] = []

    def fail(line: str) -> None:
        faults.append(line)
        _say_on_stderr(f"ampcompare: {line}")

    files = list(find_sources(paths, unreadable=lambda path, reason: fail(f"{path}: not read: {reason}")))
    plans, unread = plan_adapters(files)
    for each in unread:
        fail(each.summary())
    changed = left = by_hand = 0
    for plan in plans:
        own = [each for each in plan.files if each.changed]
        try:
            if own and write and plan.adapter.is_new:
                plan.adapter.write()
            elif own and not write:
                click.echo(plan.adapter.diff(), nl=False)
            for each in own:
                if write:
                    each.write()
                else:
                    click.echo(each.diff(), nl=False)
        except (ValueError, OSError, EnvironmentUnfit) as fault:
            fail(f"{plan.adapter.path.parent}: not written: {fault}")
            continue
        for each in plan.files:
            for line in each.lines():
                _say_on_stderr(line)
        if own and plan.adapter.is_edited:
            _say_on_stderr(KEPT_FILE.format(plan.adapter.path))
        if own:
            whose = f"{len(own)} file{'s' * (len(own) != 1)}"
            _say_on_stderr(f"{plan.adapter.path}: Apex's functions on torch.autocast, for {whose}; keep it with them")
        changed += len(own)
        left += sum(each.by_hand for each in plan.files)
        by_hand += sum(bool(each.by_hand) for each in plan.files)
    _say_on_stderr(_sums_line(len(files), changed, left, by_hand, len(faults), write))
    if changed and not write and not faults:
        script = shlex.quote(str(files[0])) if len(files) == 1 else "SCRIPT.py"
        _say_on_stderr(f"next, check that it trains the same: ampcompare migrate --adapter --verify {script} -- ARGS")
    return ConfigError.exit_code if faults else int(left > 0)


def _sums_line(files: int, changed: int, left: int, by_hand: int, faults: int, write: bool) -> str:
    done = "rewritten" if write else "to rewrite; --write does it"
    parts = [f"{files} file{'s' * (files != 1)}: {f'{changed} {done}' if changed else 'nothing to rewrite'}"]
    if left:
        parts.append(f"{left} line{'s' * (left != 1)} left by hand in {by_hand} of them")
    if faults:
        parts.append(f"{faults} not migrated")
    return "; ".join(parts)


def _say_on_stderr(line: str) -> None:
    note(line)
    sys.stderr.flush()
