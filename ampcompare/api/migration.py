"""Scripts and checkpoints of users, with Apex and without: the commands `exec`, `lint`, `migrate` and `convert`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ampcompare.backends.arm import Arm
from ampcompare.base.environment.extras import require_torch
from ampcompare.base.errors import ConfigError, EnvironmentUnfit, require_one_of
from ampcompare.base.guard_modes import GUARD_OPTIONS, GuardMode

if TYPE_CHECKING:
    from ampcompare.checkpoints.convert.fp32_weights import ConvertedCheckpoint
    from ampcompare.source.lint.report import Report
    from ampcompare.source.migrate.project import FileMigration


def exec_script(
    script: Sequence[str],
    *,
    engine: Literal["compat", "nvidia"] = "compat",
    opt_level: str | None = None,
    arm: Arm | str | None = None,
    seed: int | None = None,
    max_steps: int | None = None,
    record: str | Path | None = None,
    device: Literal["cpu"] | None = None,
    compat_torch: bool = False,
    guards: GuardMode = "warn",
) -> int:
    """Run an unmodified script with ampcompare's engine in place of Apex, in a separate process, and wait for it.

    The process has the working directory, environment and streams of this one. O1 replaces functions of torch for the
    life of a process, hence the separate one.

    Args:
        script: the script with its arguments, or "-m" and a module.
        engine: what `import apex` means: ampcompare's own engine, or the real Apex.
        opt_level: overrides the script's opt level.
        arm: run the script under this arm, such as "bf16" or "O2".
        seed: seeds Python, NumPy and torch before the script starts; with `arm`.
        max_steps: end after so many steps; with `arm`.
        record: file for every backward pass and step.
        device: "cpu" runs the script's CUDA calls on the CPU: a smoke test.
        compat_torch: restore removed and changed APIs of torch, numpy and Python.
        guards: what happens on mistakes in the use of mixed precision: a warning, an error, or nothing.

    Returns:
        The exit code: the script's own; 2 for options that cannot be used, 4 where this machine cannot run them, both
        said on standard error.

    Raises:
        ConfigError: there is no such arm, or no script was given.
    """
    if not script or isinstance(script, str):
        raise ConfigError(
            f"script is {script!r}; give a list: the script and its arguments, as in ['train.py']"
        )
    require_one_of(GUARD_OPTIONS, "guards", guards)
    from ampcompare.experiment.script_process import run_script_by_exec

    return run_script_by_exec(
        script,
        engine=engine,
        opt_level=opt_level,
        arm=None if arm is None else str(Arm.parse(arm) if isinstance(arm, str) else arm),
        seed=seed,
        max_steps=max_steps,
        record=None if record is None else str(record),
        device=device,
        compat_torch=compat_torch,
        guards=guards,
    )


def lint_paths(
    *paths: str | Path,
    select: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    fix: bool = False,
    torch_version: str | None = None,
) -> Report:
    """Report mistakes in the use of Apex and torch.amp in files, folders and notebooks.

    Args:
        paths: what to examine; the working directory by default.
        select: codes, or their beginnings, to report; by default those of pyproject.toml, or all.
        ignore: codes, or their beginnings, to leave out; by default those of pyproject.toml.
        exclude: patterns of files and folders to leave out, with those of pyproject.toml.
        fix: fix in the files what can be fixed safely; report the rest.
        torch_version: of the torch that the files are for, such as "2.9"; by default the one that is installed, or the
            newest.

    Returns:
        Findings with their places, and what could not be read.

    Raises:
        ConfigError: a code that does not exist, or settings that cannot be read.
    """
    from ampcompare.source.find import find_sources
    from ampcompare.source.lint.report import UnreadFile
    from ampcompare.source.lint.run import lint_files, read_lint_selection
    from ampcompare.source.versions import installed_or_given_versions

    places = [Path(path) for path in paths] or [Path()]
    selection = replace(read_lint_selection(places), versions=installed_or_given_versions(torch_version))
    if select is not None:
        selection = replace(selection, select=tuple(select))
    if ignore is not None:
        selection = replace(selection, ignore=tuple(ignore))
    missing: list[UnreadFile] = []
    patterns = (*selection.exclude, *exclude)
    files = find_sources(
        places, exclude=patterns, unreadable=lambda path, why: missing.append(UnreadFile(path, why))
    )
    report = lint_files(files, selection, fix=fix, named_files=set(places))
    report.unread[:0] = missing
    return report


def migrate_script(
    path: str | Path,
    *,
    write: bool = False,
    torch_version: str | None = None,
    how: Literal["rewrite", "adapter"] | None = None,
) -> FileMigration:
    """Move an Apex script or notebook to torch.amp, and renew deprecated names of torch and transformers.

    Args:
        path: the file.
        write: change the file, and write the adapter next to it where it takes that; otherwise the result has the
            patch, in `diff()`.
        torch_version: of the torch that the files are for, such as "2.9"; by default the one that is installed, or the
            newest.
        how: "rewrite" rewrites all that nothing speaks against; "adapter" changes imports to those of the adapter. By
            default a training takes the adapter, with a `reason`, and a file that runs with none is rewritten.

    Returns:
        The new text and what was found, line by line; a file that cannot be read or parsed has a `fault`.

    Raises:
        ConfigError: there is no such file, or the file has changed meanwhile.
        EnvironmentUnfit: the file cannot be written.
    """
    from ampcompare.source.migrate.adapter.choice import choose_adapter_for_all, choose_rewrite_or_adapter
    from ampcompare.source.migrate.project import FileMigration
    from ampcompare.source.versions import installed_or_given_versions

    require_one_of((None, "rewrite", "adapter"), "how", how)
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"there is no file {file}; give the path of a script or notebook")
    if how == "adapter":
        choice = choose_adapter_for_all([file])
    else:
        choice = choose_rewrite_or_adapter(
            [file],
            rewritten="all" if how == "rewrite" else "none",
            must_parse=lambda each: True,
            versions=installed_or_given_versions(torch_version),
        )
    result = choice.files[0] if choice.files else FileMigration(file)
    reason = choice.reasons.get(file, "")
    result = replace(result, reason=reason)
    if write and result.is_changed:
        try:
            for adapter in choice.adapters:
                if adapter.is_new:
                    adapter.write()
            result.write()
        except ValueError as fault:
            raise ConfigError(f"{file}: not written: {fault}") from None
        except OSError as fault:
            raise EnvironmentUnfit(f"{file}: not written: {fault}") from None
    return result


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    to: Literal["native", "apex"],
    *,
    opt_level: Literal["O0", "O1", "O2", "O3", "O4", "O5"] | None = None,
    save_apex_format: bool = False,
    static_scale: bool | None = None,
) -> ConvertedCheckpoint:
    """Convert a checkpoint file between Apex and torch.amp. Imports torch.

    Args:
        source: a checkpoint of ampcompare, of a script with apex.amp, FP16_Optimizer or torch.amp, of timm, mmengine or
            Lightning.
        target: file to write, in the layout of `source`.
        to: "native" for torch.amp, "apex" for apex.amp.
        opt_level: level of the Apex side; by default inferred from the source, or O1 for the result.
        save_apex_format: write exactly what an Apex script saves, with `to="apex"`.
        static_scale: True if the script of the source gave `loss_scale` a number, so that the GradScaler never grows;
            by default what the numbers in the source show.

    Returns:
        What was converted: `source` and `level` that were inferred, and `changed` and `lost` as texts.

    Raises:
        CheckpointError: the source cannot be read.
        ConversionError: it already has the requested kind, has nothing to convert, or is the target.
        EnvironmentUnfit: the target cannot be written.
    """
    require_torch()
    from ampcompare.checkpoints.convert.convert import convert_file

    return convert_file(
        Path(source),
        Path(target),
        to,
        opt_level=opt_level,
        legacy_layout=save_apex_format,
        static_scale=static_scale,
    )
