"""What `ampcompare exec` was asked to do; plain data, which spawned processes get too."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ExecSettings"]


@dataclass(frozen=True)
class ExecSettings:
    """How a script is run.

    Attributes:
        engine: what `apex` means: compat (`ampcompare.apex`) or nvidia (the real one, untouched).
        opt_level: overrides the one that the script passes to `amp.initialize`.
        arm: what stands behind `apex.amp` and `torch.amp`; None leaves the script's own choice.
        seed: of Python, NumPy and torch when the script starts; None leaves them as they are.
        max_steps: after which the script ends, with exit code 0.
        watch: record also first weights and batches, scalars, memory and the files that the script writes.
        record: file for what every backward pass and step did.
        device: "cpu" sends what the script does on CUDA to the CPU.
        compat_torch: restore what has changed in torch and Python since the script was written.
        guards: what happens on mistakes in the use of mixed precision: "warn", "strict" (an error) or "off".
        name: the script or module, for the record, like the next.
        arguments: of the script.
    """

    engine: str = "compat"
    opt_level: str | None = None
    arm: str | None = None
    seed: int | None = None
    max_steps: int | None = None
    watch: bool = False
    record: str | None = None
    device: str | None = None
    compat_torch: bool = False
    guards: str = "warn"
    name: str = ""
    arguments: tuple[str, ...] = ()
