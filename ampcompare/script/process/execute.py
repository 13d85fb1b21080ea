"""Run a script to its end as the interpreter would: same `__main__`, same traceback, same exit code."""

from __future__ import annotations

import atexit
import itertools
import linecache
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from ampcompare.apex._install import ApexFinder
from ampcompare.base.environment import first_path
from ampcompare.base.environment.torch_names import own_missing_torch_name_error
from ampcompare.base.errors import AmpCompareError, EnvironmentUnfit, GuardError
from ampcompare.base.location import is_users_or_installed_file, location_of_error
from ampcompare.base.processes.start import add_working_directory_first
from ampcompare.script.imports.missing_names import missing_names_of_script
from ampcompare.script.invocation.exec_settings import ExecSettings
from ampcompare.script.invocation.stderr import print_hint_at_migrate, say
from ampcompare.script.invocation.target import (
    NEEDED_LATER,
    Target,
    forget_shadowed_modules,
    import_without_script_folder,
    search_script_folder_last,
)
from ampcompare.script.legacy.old_script import COMPAT_HINT, may_compat_torch_prevent
from ampcompare.script.process import child_processes
from ampcompare.script.process.banned_loss import find_banned_loss_text
from ampcompare.script.process.prepare import PreparedProcess, prepare_process
from ampcompare.script.process.shadowed import find_shadowing_text

if TYPE_CHECKING:
    from ampcompare.script.recording.recorder import Recorder

TO_CPU = "this machine has no GPU: add --device cpu"
PLACE = re.compile(r"[^\n:]+:\d+: ")
HOOKS = ("ampcompare.guards.", "ampcompare.script.", "ampcompare.base.patches")

_kept: list[ModuleType | None] = []
# Messages of torch: of the CPU build, and of a CUDA build without a driver or a device; also in tracebacks of children.
MESSAGES = re.compile(
    "not compiled with CUDA|compiled without CUDA|requires CUDA support|without ATen_cuda"
    "|Found no NVIDIA driver|No CUDA GPUs are available|no CUDA-capable device|CUDA driver initialization failed"
    r"|no attribute '_(cuda|nccl)|dummy base class (Event|Stream|CUDAGraph)|dummy base class _Cuda"
    "|NVTX functions not installed|doesn't have NCCL built in|only supported with GPUs"
    r"|accelerator device when none is available|torch\.cuda\.is_available\(\) is False|CUDA is not available"
)
TENSOR = re.compile(r"\btensor\(")  # as torch prints one
# A line of a script whose error does not mention CUDA: a bare `assert`, or `None.split`.
ASKS = re.compile(
    r"cuda\s*\.\s*(is_available|device_count)\s*\(|version\s*\.\s*cuda\b|cudnn\s*\.\s*version\s*\("
)


def execute(
    target: Target,
    settings: ExecSettings,
    prepare: Callable[[ExecSettings], PreparedProcess] = prepare_process,
    explain: Callable[[BaseException], AmpCompareError | None] = lambda error: None,
) -> int:
    """Prepare this process, run the target and return its exit code; an uncaught exception has been printed.

    Args:
        target: the script or module.
        settings: the options of `exec`.
        prepare: sets up this process before the target is loaded.
        explain: returns what an uncaught exception means where the arm is its cause.

    Raises:
        ConfigError: there is no such script or module, or an option that cannot be used with it.
    """
    interrupted: list[bool] = []
    # Registered first, so that it runs last: after the script's own handlers.
    atexit.register(_die_by_signal_if_interrupted, interrupted)
    if first_path.IS_GONE:  # what follows must not take one of PYTHONPATH for it
        add_working_directory_first()
    if settings.imports_torch:
        import_without_script_folder(NEEDED_LATER)
    target.set_sys_path_and_argv()
    with search_script_folder_last():
        prepared = prepare(settings)
    forget_shadowed_modules()
    code: CodeType | None = None
    ending = ScriptEnding()
    try:
        code, main = target.load_code_and_main()
        # This module's namespace is still in use and must not be collected.
        _kept.append(sys.modules.get("__main__"))
        sys.modules["__main__"] = main
        exec(code, main.__dict__)
    except SystemExit as caught:
        ending.status = _print_and_convert_exit_code(caught.code)
    except AmpCompareError as caught:
        if code is None:
            prepared.close(2, str(caught))
            raise
        ending.error = caught
    except BaseException as caught:
        ending.error = caught
    if ending.error is not None:
        _print_and_explain_error(ending, ending.error, code, settings, explain)
        if isinstance(ending.error, KeyboardInterrupt):
            interrupted.append(True)
    prepared.close(ending.status, ending.error_text, _find_advice_in_error(ending.error))
    _print_missing_names(prepared.finder, ending.error)
    if settings.watch or settings.arm is None:  # else the user has named no record
        _print_sums_of_steps(prepared.recorder)
    if ending.status == 0 and settings.arm is None:  # which stays the last thing that is read
        print_hint_at_migrate(settings)
    return ending.status


@dataclass
class ScriptEnding:
    """How a script ended.

    Attributes:
        status: the exit code.
        error: the uncaught exception, or what it means where ampcompare refuses something; None for none.
        banned_loss: what is said of a loss that autocast refuses, in place of the error; None where it is no such one.
        lacks_gpu: it failed as this machine has no GPU, and `--device cpu` may help.
    """

    status: int = 0
    error: BaseException | None = None
    banned_loss: str | None = None
    lacks_gpu: bool = False

    @property
    def error_text(self) -> str | None:
        """The error as the record has it; None without one."""
        words = self.banned_loss or _error_text_with_line(self.error)
        return f"{words}; {TO_CPU}" if self.lacks_gpu else words


def _print_and_explain_error(
    ending: ScriptEnding,
    error: BaseException,
    code: CodeType | None,
    settings: ExecSettings,
    explain: Callable[[BaseException], AmpCompareError | None],
) -> None:
    """Print an uncaught exception and what is known of it, and set the ending accordingly."""
    ending.status = 130 if isinstance(error, KeyboardInterrupt) else 1
    is_refusal = settings.arm is not None and isinstance(error, AmpCompareError)  # of what the script does
    meaning = error if is_refusal else explain(error) or own_missing_torch_name_error(error)
    if meaning is not error:
        _print_traceback_within_script(error, code)
    if isinstance(meaning, AmpCompareError):
        ending.status = meaning.exit_code
        ending.error = error = meaning
        say(str(_error_text_with_line(meaning)))
        if untried := "" if settings.watch else untried_arms_text(meaning.advice.arms, settings):
            say(untried)
    elif banned := find_banned_loss_text(error):
        ending.banned_loss = banned
        say(banned)
    if settings.device is None and lacks_gpu(error):
        ending.lacks_gpu = True
        say(
            "this machine has no GPU; for a smoke test on the CPU put --device cpu before the script: "
            f"ampcompare exec --device cpu {settings.name}"
        )
        if settings.watch:
            ending.status = EnvironmentUnfit.exit_code
    if (shadowed := find_shadowing_text(error)) is not None:
        helps = "" if settings.imports_torch else ", or try --compat-torch, which imports torch before it"
        say(f"{shadowed}{helps}")
    elif not settings.compat_torch and may_compat_torch_prevent(f"{type(error).__name__}: {error}"):
        say(COMPAT_HINT)


def untried_arms_text(arms: Sequence[str], settings: ExecSettings) -> str:
    """Return that arms of an advice were not tried, and what tries them; "" for none."""
    if not arms:
        return ""
    return (
        f"{' and '.join(arms)} {'was' if len(arms) == 1 else 'were'} not tried here: "
        f"`ampcompare compare --dry-run --arm {settings.arm} -- ...` names those that train to finite losses"
    )


def _find_advice_in_error(error: BaseException | None) -> dict[str, Any] | None:
    """Return what a record holds of advice that names arms: which they are, and the words around them."""
    if not isinstance(error, AmpCompareError) or not error.advice.arms:
        return None
    return {**asdict(error.advice), "seen": _error_text_with_line(error, error.seen)}


def _error_text_with_line(error: BaseException | None, said: str = "") -> str | None:
    """Return an error with the line of the script that led to it; some of ampcompare's own begin with it.

    Args:
        said: its message, or the part of it that is wanted; all by default.
    """
    if error is None:
        return None
    said = said or str(error)
    if not isinstance(error, AmpCompareError):
        message = _message_without_numbers(_message_without_traceback(said))
        said = ": ".join([type(error).__name__, *filter(None, [message])])
    if isinstance(error, SyntaxError) or (isinstance(error, AmpCompareError) and PLACE.match(said)):
        return said
    place = location_of_error(error)
    return said if place is None else f"{said} ({place})"


def _message_without_traceback(message: str) -> str:
    """Return a message without the traceback of another process in it: what was said before, and the error itself."""
    before, begin, rest = message.partition("Traceback (most recent call last):\n")
    if not begin:
        return message
    lines = rest.strip().splitlines()
    last_frame = max((number for number, line in enumerate(lines) if line.startswith("  ")), default=-1)
    head = before.strip().removesuffix("Original").strip(" -:.\n")
    return ": ".join(filter(None, [head, "\n".join(lines[last_frame + 1 :])]))


def _print_and_convert_exit_code(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    sys.stdout.flush()
    print(code, file=sys.stderr)
    return 1


def _die_by_signal_if_interrupted(interrupted: list[bool]) -> None:
    """End as the interpreter does on Ctrl-C: by the signal itself, so that a shell's loop stops too."""
    if interrupted:
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _print_traceback_within_script(error: BaseException, code: CodeType | None) -> None:
    """Pass the exception to `sys.excepthook` with only the frames of the script."""
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code is not code:
        traceback = traceback.tb_next
    if traceback is None:  # raised before the script ran, by an import of its parent package
        traceback = _find_traceback_of_script(error.__traceback__)
    if isinstance(error, GuardError):
        _end_traceback_at_user_line(traceback)
    error.__traceback__ = _traceback_without_hooks(traceback)
    chained, visited = error.__cause__ or error.__context__, {id(error)}
    while chained is not None and id(chained) not in visited:
        visited.add(id(chained))
        chained.__traceback__ = _traceback_without_hooks(chained.__traceback__)
        chained = chained.__cause__ or chained.__context__
    sys.stdout.flush()
    sys.excepthook(type(error), error, error.__traceback__)


def _traceback_without_hooks(traceback: TracebackType | None) -> TracebackType | None:
    """Remove the frames that watch or redirect a call: plain Python would not have them."""
    kept: list[TracebackType] = []
    while traceback is not None:
        if traceback.tb_next is None or not _is_hook_frame(traceback):
            kept.append(traceback)
        traceback = traceback.tb_next
    for outer, inner in itertools.pairwise(kept):
        outer.tb_next = inner
    return kept[0] if kept else None


def _is_hook_frame(traceback: TracebackType) -> bool:
    name = traceback.tb_frame.f_globals.get("__name__", "")
    return isinstance(name, str) and name.startswith(HOOKS)


def _end_traceback_at_user_line(traceback: TracebackType | None) -> None:
    """Cut off the frames of torch and of the guards, which do not help with a mistake of the script."""
    last = traceback
    while traceback is not None:
        if is_users_or_installed_file(traceback.tb_frame.f_code.co_filename):
            last = traceback
        traceback = traceback.tb_next
    if last is not None:
        last.tb_next = None


def _find_traceback_of_script(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__", "").startswith(
        ("ampcompare.script.invocation", "ampcompare.script.process", "importlib")
    ):
        traceback = traceback.tb_next
    return traceback


def _print_missing_names(finder: ApexFinder | None, error: BaseException | None) -> None:
    names = [] if finder is None else missing_names_of_script(finder, error)
    if names:
        say(
            f"the script asked for {', '.join(names)}, which the compat engine does not have; if it caught the error, "
            "it silently took another path; run with --engine nvidia where that Apex is installed"
        )


def _print_sums_of_steps(recorder: Recorder | None) -> None:
    if recorder is not None:
        empty = "the record has no step: none went through apex.amp, FP16_Optimizer or GradScaler"
        if child_processes.num_started_processes():
            empty = "the record has no step of this process; processes that it started write their own files"
        say(recorder.find_step_sums_text() or empty)


def lacks_gpu(error: BaseException) -> bool:
    """Return whether an exception, such as a bare `assert torch.cuda.is_available()`, comes from the lack of a GPU."""
    torch: Any = sys.modules.get("torch")
    if not isinstance(error, Exception) or (torch is not None and torch.cuda.is_available()):
        return False
    return MESSAGES.search(str(error)) is not None or _is_line_asking_for_gpu(error)


def _is_line_asking_for_gpu(error: Exception) -> bool:
    traceback = error.__traceback__
    if traceback is None or not isinstance(error, AssertionError | AttributeError | TypeError):
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return (
        ASKS.search(linecache.getline(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)) is not None
    )


def _message_without_numbers(message: str) -> str:
    """Return a message without the numbers of the tensors that are printed in it over several lines."""
    parts, end = [], 0
    for begin in TENSOR.finditer(message):
        if begin.start() < end:
            continue
        close = _end_of_parenthesis(message, begin.end())
        if "\n" in message[begin.end() : close]:
            parts += [message[end : begin.start()].rstrip(), " tensor(...)"]
            end = close
    return "".join([*parts, message[end:]])


def _end_of_parenthesis(text: str, start: int) -> int:
    """Return the place behind the parenthesis that is open at a place; the end of the text if it is not closed."""
    is_open = 1
    for place in range(start, len(text)):
        is_open += {"(": 1, ")": -1}.get(text[place], 0)
        if not is_open:
            return place + 1
    return len(text)
