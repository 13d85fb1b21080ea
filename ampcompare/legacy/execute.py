"""Run a target to its end as the interpreter would: same `__main__`, same traceback, same exit code."""

from __future__ import annotations

import atexit
import itertools
import os
import re
import signal
import sys
from types import CodeType, ModuleType, TracebackType
from typing import Any

from ampcompare.apex._install import HOME, KERNELS, ApexFinder, real_name
from ampcompare.errors import AmpCompareError, GuardError
from ampcompare.guards.place import is_users
from ampcompare.legacy.settings import ExecSettings
from ampcompare.legacy.target import Target

__all__ = ["execute"]

NO_GPU = re.compile("Torch not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs are available")
_kept: list[ModuleType | None] = []


def execute(target: Target, settings: ExecSettings) -> int:
    """Prepare this process, run the target and return its exit code; an uncaught exception has been printed.

    Raises:
        AmpCompareError: what was asked for cannot be had; the target was not started.
    """
    interrupted: list[bool] = []
    # Registered first, so that it runs last: after the script's own handlers.
    atexit.register(_die_if, interrupted)
    target.set_paths()
    applied = settings.apply()
    code: CodeType | None = None
    status = 0
    error: BaseException | None = None
    try:
        code, main = target.load()
        # Whose namespace is still running must not be collected.
        _kept.append(sys.modules.get("__main__"))
        sys.modules["__main__"] = main
        exec(code, main.__dict__)
    except SystemExit as caught:
        status = _exit_status(caught.code)
    except AmpCompareError as caught:
        if code is None:
            applied.close(2, repr(caught))
            raise
        error = caught
    except BaseException as caught:
        error = caught
    if error is not None:
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        _print_traceback(error, code)
        _say_how_to_go_without_a_gpu(error, settings)
        if isinstance(error, KeyboardInterrupt):
            interrupted.append(True)
    applied.close(status, None if error is None else f"{type(error).__name__}: {error}")
    _say_what_was_missing(applied.finder, error)
    return status


def _exit_status(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    sys.stdout.flush()
    print(code, file=sys.stderr)
    return 1


def _die_if(interrupted: list[bool]) -> None:
    """End as the interpreter does on Ctrl-C: by the signal itself, so that a shell's loop stops too."""
    if interrupted:
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _print_traceback(error: BaseException, code: CodeType | None) -> None:
    """Hand the exception to `sys.excepthook` with the frames of the script alone."""
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code is not code:
        traceback = traceback.tb_next
    if traceback is None:  # raised before the script ran, by an import of its parent package
        traceback = _outside(error.__traceback__)
    if isinstance(error, GuardError):
        _end_at_the_users_line(traceback)
    error.__traceback__ = _without_ours(traceback)
    chained, seen = error.__cause__ or error.__context__, {id(error)}
    while chained is not None and id(chained) not in seen:
        seen.add(id(chained))
        chained.__traceback__ = _without_ours(chained.__traceback__)
        chained = chained.__cause__ or chained.__context__
    sys.stdout.flush()
    sys.excepthook(type(error), error, error.__traceback__)


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    """Leave out the frames that watch a call or lead it elsewhere: plain Python would not have them."""
    kept: list[TracebackType] = []
    while traceback is not None:
        if traceback.tb_next is None or not _is_between(traceback):
            kept.append(traceback)
        traceback = traceback.tb_next
    for outer, inner in itertools.pairwise(kept):
        outer.tb_next = inner
    return kept[0] if kept else None


def _is_between(traceback: TracebackType) -> bool:
    name = traceback.tb_frame.f_globals.get("__name__", "")
    return isinstance(name, str) and name.startswith(("ampcompare.guards.", "ampcompare.legacy."))


def _say_how_to_go_without_a_gpu(error: BaseException, settings: ExecSettings) -> None:
    if settings.device is None and isinstance(error, (AssertionError, RuntimeError)) and NO_GPU.search(str(error)):
        print(
            f"ampcompare: there is no GPU here; for a smoke test on the CPU put --device cpu before the script: "
            f"ampcompare exec --device cpu {settings.name}",
            file=sys.stderr,
        )


def _end_at_the_users_line(traceback: TracebackType | None) -> None:
    """Cut off the frames of torch and of the guards, which say nothing about a mistake of the script."""
    last = traceback
    while traceback is not None:
        if is_users(traceback.tb_frame.f_code.co_filename):
            last = traceback
        traceback = traceback.tb_next
    if last is not None:
        last.tb_next = None


def _outside(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__", "").startswith(
        ("ampcompare.legacy", "importlib")
    ):
        traceback = traceback.tb_next
    return traceback


def _say_what_was_missing(finder: ApexFinder | None, error: BaseException | None) -> None:
    if finder is None:
        return
    missing = list(finder.missing)
    while error is not None:
        name = _lacking(error)
        if name is not None and name not in missing:
            missing.append(name)
        error = error.__cause__ or error.__context__
    if missing:
        print(
            f"ampcompare: the script asked for {', '.join(missing)}, which the compat engine does not have; guard the "
            "import, or run with --engine nvidia where that Apex is installed",
            file=sys.stderr,
        )


def _lacking(error: BaseException) -> str | None:
    """Return what an ImportError did not find in `apex`, under the name that the script used."""
    if not isinstance(error, ImportError) or error.name is None:
        return None
    if error.name == HOME or error.name.startswith(f"{HOME}."):
        module = "apex" + error.name[len(HOME) :]
        wanted = getattr(error, "name_from", None) or str(error).partition("cannot import name '")[2].partition("'")[0]
        return f"{module}.{wanted}" if wanted else module
    return error.name if real_name(error.name) or error.name in KERNELS else None
