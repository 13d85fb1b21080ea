"""What `ampcompare exec` was asked to do, and doing it to a process before the script starts."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ampcompare import guards
from ampcompare.apex._install import ApexFinder, install
from ampcompare.environment import probe_apex
from ampcompare.errors import BackendUnavailable
from ampcompare.legacy.notes import say_finding

if TYPE_CHECKING:
    from ampcompare.legacy.recorder import Recorder

__all__ = ["Applied", "ExecSettings"]


@dataclass(frozen=True)
class ExecSettings:
    """How a script is to be run.

    Attributes:
        engine: what stands for `apex`: compat (ours) or nvidia (the real one, untouched).
        opt_level: overrides the one that the script gives to `amp.initialize`.
        record: file for what every backward pass and step did.
        device: "cpu" sends what the script does on CUDA to the CPU.
        compat_torch: mend what has changed in torch and Python since the script was written.
        guards: what becomes of mistakes in the use of mixed precision: "warn", "strict" (an error) or "off".
        name: the script or module, for the record, like the next.
        arguments: of the script.
    """

    engine: str = "compat"
    opt_level: str | None = None
    record: str | None = None
    device: str | None = None
    compat_torch: bool = False
    guards: str = "warn"
    name: str = ""
    arguments: tuple[str, ...] = ()

    def apply(self, *, child: str | None = None) -> Applied:
        """Prepare this process; nothing is undone later, as the process belongs to the script.

        Args:
            child: in a process that the script started by multiprocessing, a word that tells it from its siblings.

        Raises:
            BackendUnavailable: the real Apex was asked for and is not here, or does not import.
            EnvironmentUnfit: the record cannot be written.
        """
        from ampcompare.legacy import children, torchvision_import

        finder = None
        if self.engine == "nvidia":
            install_found = probe_apex()
            if not install_found.has_amp:
                raise BackendUnavailable(f"--engine nvidia: {install_found.reason}")
        else:
            finder = install()
        torchvision_import.install()
        children.pass_on(self)
        if self.device == "cpu":
            from ampcompare.legacy.cpu_device import run_on_cpu

            run_on_cpu(quiet=child is not None)
        if self.compat_torch:
            from ampcompare.legacy.compat_torch import mend_torch

            mend_torch()
        if self.guards != "off":
            # Over what stands in for CUDA, so that they see what the script asks for.
            guards.install(strict=self.guards == "strict", say=say_finding)
        applied = Applied(finder)
        if self.record is not None or self.opt_level is not None:
            self._hook_amp(applied, child)
        return applied

    def _hook_amp(self, applied: Applied, child: str | None) -> None:
        from ampcompare.legacy import opt_level, watch
        from ampcompare.legacy.recorder import Recorder, header

        if self.record is not None:
            applied.recorder = Recorder(self.record, header(self), child=child)
        try:
            importlib.import_module("apex.amp")
        except ImportError as error:
            raise BackendUnavailable(f"apex.amp of --engine {self.engine} cannot be imported: {error}") from error
        if applied.recorder is not None:
            watch.watch_amp(applied.recorder)
        if self.opt_level is not None:
            opt_level.override(self.opt_level, quiet=child is not None)


class Applied:
    """What `ExecSettings.apply` has set up.

    Attributes:
        finder: resolves `apex`; None with the real one.
        recorder: writes the record; None without.
    """

    def __init__(self, finder: ApexFinder | None) -> None:
        self.finder = finder
        self.recorder: Recorder | None = None

    def close(self, status: int, error: str | None) -> None:
        """Write the end of the record."""
        if self.recorder is not None:
            self.recorder.close(status, error)
