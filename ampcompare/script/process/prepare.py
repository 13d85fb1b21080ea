"""Prepare a process for a script, as the settings of `ampcompare exec` say, before the script starts."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ampcompare import guards
from ampcompare.apex._install import ApexFinder, install
from ampcompare.base.environment.apex import ApexInstall, find_installed_apex
from ampcompare.base.errors import BackendUnavailable, UnsupportedCombination
from ampcompare.base.location import user_location
from ampcompare.base.shim import finder as shim
from ampcompare.script.imports.missing_names import record_missing_apex_names
from ampcompare.script.invocation.exec_settings import ExecSettings
from ampcompare.script.invocation.stderr import print_hint_at_migrate, print_violation, say_once
from ampcompare.script.process import child_processes

if TYPE_CHECKING:
    from ampcompare.base.patches import Subscriptions
    from ampcompare.script.recording.recorder import RecordedSteps, Recorder

# Arguments that only some levels take: `initialize` refuses them at the others.
REFUSED = {
    **dict.fromkeys(("O1", "O4"), ("cast_model_type", "keep_batchnorm_fp32", "master_weights")),
    **dict.fromkeys(("O0", "O2", "O3", "O5"), ("patch_torch_functions",)),
}
# What an opt level sets, and a script may override.
REPLACED = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")


@dataclasses.dataclass(frozen=True)
class PreparedProcess:
    """What was set up in a process: what resolves `apex`, unless that is the real one, and the rows of a record."""

    finder: ApexFinder | None
    rows: RecordedSteps | None

    @property
    def recorder(self) -> Recorder | None:
        """What writes the record."""
        return None if self.rows is None else self.rows.recorder

    def close(self, status: int, error: str | None, advice: dict[str, Any] | None = None) -> None:
        """Write the end of the record, if any."""
        if self.recorder is not None:
            self.recorder.close(status, error, advice)


def _note_guard_violation(
    violation: guards.Violation, settings: ExecSettings, rows: RecordedSteps | None
) -> None:
    """Print what a guard has found, and record it."""
    print_violation(violation)
    print_hint_at_migrate(settings)
    if rows is not None:
        rows.recorder.add_row({"kind": "guard", "text": str(violation)})


def prepare_process(
    settings: ExecSettings,
    *,
    child: str | None = None,
    stand_in: Callable[[RecordedSteps | None], bool] | None = None,
) -> PreparedProcess:
    """Prepare this process; nothing is undone later, because the process belongs to the script.

    Args:
        stand_in: puts an arm behind the names of amp, given where it records what it does, and returns whether
            `apex.amp` is still to be recorded.
        child: the name of this process, such as "SpawnProcess-1", if the script has started it by multiprocessing.
    """
    finder = _install_engine_as_apex(settings, quiet=child is not None)
    _install_torchvision_finder()
    child_processes.call_first_in_children(
        dataclasses.asdict(settings), target=f"{__name__}:{prepare_child.__name__}"
    )
    child_processes.put_exec_before_started_ranks(settings)
    child_processes.start_counting_child_processes()
    if settings.device == "cpu":
        from ampcompare.script.legacy.cpu_device import redirect_cuda_to_cpu

        redirect_cuda_to_cpu(quiet=child is not None, autocast_lists=settings.autocast_lists)
    if settings.compat_torch:
        from ampcompare.script.legacy.torch_functions import patch_for_old_scripts

        patch_for_old_scripts()
    rows = None
    if settings.record is not None or settings.ledger or settings.max_steps is not None:
        # Imported here: without them a script that needs no torch loads none.
        from ampcompare.script.recording.recorder import RecordedSteps, Recorder, record_header

        rows = RecordedSteps(Recorder(settings.record, record_header(settings), child=child))
    if settings.record is not None or settings.opt_level is not None or stand_in is not None:
        _require_apex_amp(settings.engine)
    records_amp = stand_in is None or stand_in(rows)
    if rows is not None:
        from ampcompare.script.recording.scaled_steps import record_steps

        record_steps(rows, amp=records_amp)
    # After the CUDA functions and an arm, so that the guards see what the script asks for.
    guards.install_in_mode(
        settings.guards,
        say=lambda violation: _note_guard_violation(violation, settings, rows),
        passes=settings.guard_passes,
    )
    if settings.opt_level is not None:
        from ampcompare.base.patches import Layer, Subscriptions

        override_opt_level(settings.opt_level, Subscriptions(Layer.STAND_IN), quiet=child is not None)
    return PreparedProcess(finder, rows)


def prepare_child(values: dict[str, Any], name: str) -> None:
    """Prepare a process that the script has started by multiprocessing."""
    prepare_process(ExecSettings(**values), child=name)


def _install_engine_as_apex(settings: ExecSettings, *, quiet: bool) -> ApexFinder | None:
    """Let `import apex` find the engine, whole or in an installed Apex; return what resolves it if it is whole."""
    probe = find_installed_apex()
    if settings.engine == "nvidia":
        if not probe.has_amp:
            raise BackendUnavailable(f"engine nvidia: {probe.reason}")
        return None
    if _takes_only_amp_of_engine(settings, probe):
        assert probe.path is not None
        shim.install()
        if not quiet:
            added = ", ".join(shim.missing_submodules(probe.path))
            say_once(f"{probe.path} has no {added}: these are ampcompare's, and the rest of apex is NVIDIA's")
        return None
    finder = install()
    record_missing_apex_names(finder)
    return finder


def _takes_only_amp_of_engine(settings: ExecSettings, installed: ApexInstall) -> bool:
    """Return whether the engine adds to NVIDIA's Apex without amp, whose kernels the script then keeps.

    Under an arm all of Apex is the engine's, as on other machines; and the kernels know no CPU.
    """
    on_gpu = settings.arm is None and settings.device is None
    return on_gpu and installed.kind == "no_amp" and installed.has_kernels


def _require_apex_amp(engine: str) -> None:
    try:
        importlib.import_module("apex.amp")
    except ImportError as error:
        raise BackendUnavailable(f"apex.amp of --engine {engine} cannot be imported: {error}") from error


def override_opt_level(
    level: str, events: Subscriptions, *, quiet: bool = False, options: Mapping[str, Any] | None = None
) -> None:
    """Make `amp.initialize` use `level` without arguments that it refuses, with one line on stderr.

    Args:
        options: further arguments to set. With them, none of the script's own that `REPLACED` lists is kept, and
            `enabled=False` is an error.
    """

    signature = inspect.signature(sys.modules["apex.amp"].initialize)

    def initialize(original: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        requested = given.get("opt_level", "O1")
        dropped = []
        if requested != level:
            dropped = [name for name in REFUSED[level] if given.get(name) is not None]
            for name in dropped:
                del given[name]
        if options is not None:
            if given.get("enabled") is False and level != "O0":
                raise UnsupportedCombination(
                    f"{user_location()}: amp.initialize has enabled=False, so apex:{level} has no effect; run the "
                    f"script with amp enabled"
                )
            for name in REPLACED:
                given.pop(name, None)
            given.update(options)
        given["opt_level"] = level
        if not quiet:
            without = f", without the script's {', '.join(dropped)}" if dropped else ""
            say_once(f"--opt-level {level} instead of the script's {requested}{without}")
        return original(*bound.args, **bound.kwargs)

    for name in ("apex.amp", "apex.amp.frontend"):
        events.wrap(sys.modules[name], "initialize", initialize)
    if options is None:  # of no arm, which answers in the place of the adapter
        from ampcompare.script.imports.adapter_imports import call_with_each_adapter

        call_with_each_adapter(lambda adapter: events.wrap(adapter, "initialize", initialize), events)


class _TorchvisionFinder(MetaPathFinder):
    """Import torchvision by `load_torchvision`, the first time that it is imported."""

    def __init__(self) -> None:
        self._busy = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision" or self._busy:
            return None
        self._busy = True
        try:
            from ampcompare.tasks.torchvision_loader import load_torchvision

            module = load_torchvision()
        except (BackendUnavailable, ImportError):
            return None  # the script's own import reports why
        finally:
            self._busy = False
        return ModuleSpec(fullname, _LoadedModuleLoader(module), is_package=True)


class _LoadedModuleLoader(Loader):
    """Returns a module that is already loaded."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _install_torchvision_finder() -> None:
    """Watch for the import of torchvision in this process."""
    if not any(isinstance(finder, _TorchvisionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchvisionFinder())
