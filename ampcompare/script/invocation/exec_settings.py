"""What `ampcompare exec` was asked to do; plain data, which spawned processes get too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ampcompare.base.guard_modes import GUARD_OPTIONS, GuardMode

VALUE_OPTIONS = {  # of `exec`, by the field that each gives a value
    "engine": "--engine",
    "opt_level": "--opt-level",
    "arm": "--arm",
    "seed": "--seed",
    "shift_seeds": "--shift-seeds",
    "first_weights": "--first-weights",
    "max_steps": "--max-steps",
    "guard_passes": "--guard-passes",
    "device": "--device",
    "record": "--record",
}
SWITCHES = {"twin": "--twin", "compat_torch": "--compat-torch"}
OF_KEPT_STEP = ("engine", "device", "seed", "compat_torch")


@dataclass(frozen=True)
class ExecSettings:
    """How a script is run.

    Attributes:
        engine: what `import apex` means: ampcompare's own engine, or the real Apex.
        opt_level: override the script's opt level.
        arm: run the script under this arm: fp32, bf16, native:fp16, half, O2; with --stack script@NAME.
        seed: seed Python, NumPy and torch before the script starts; with --arm.
        shift_seeds: add an offset for the seed to what the script seeds: global generators alone, or all; with --seed.
        twin: change each weight that an optimizer gets by one part in 512; with --arm.
        first_weights: begin with the weights of a file that `recorder.py --save-weights FILE` has kept; with --arm.
        max_steps: end after N steps; with --arm.
        watch: record also first weights and batches, scalars, memory and the files that the script writes.
        record: record every backward pass and step, for `ampcompare report FILE`.
        ledger: show in which types it trained, and which lines set them; with --arm.
        device: run the script's CUDA calls on the CPU: a smoke test.
        autocast_lists: what torch.autocast casts on a CPU, with --arm or --device cpu: what it casts on cuda, or the
            lists of the cpu.
        compat_torch: restore removed and changed APIs of torch, numpy and Python.
        guards: what happens on mistakes in the use of mixed precision: "warn", "strict" (an error) or "off".
        guard_passes: end the guards after N backward passes, so that later steps cost nothing.
        name: the script or module, for the record, like the next.
        arguments: of the script.
    """

    engine: str = "compat"
    opt_level: str | None = None
    arm: str | None = None
    seed: int | None = None
    shift_seeds: Literal["global", "all"] | None = None
    twin: bool = False
    first_weights: str | None = None
    max_steps: int | None = None
    watch: bool = False
    record: str | None = None
    ledger: bool = False
    device: str | None = None
    autocast_lists: str = "cuda"
    compat_torch: bool = False
    guards: GuardMode = "warn"
    guard_passes: int | None = None
    name: str = ""
    arguments: tuple[str, ...] = ()

    @property
    def imports_torch(self) -> bool:
        """Whether torch is imported before the script starts."""
        asked = (self.arm, self.opt_level, self.record, self.max_steps, self.device)
        return self.compat_torch or self.ledger or any(each is not None for each in asked)

    @property
    def exec_options(self) -> list[str]:
        """The options of `ampcompare exec` that stand for these settings, as words before the script.

        The script and its arguments are not among them, nor `watch`, which follows from arm and record, nor `ledger`,
        which one process shows.
        """
        values = {flag: getattr(self, name) for name, flag in VALUE_OPTIONS.items()}
        words = [word for flag, value in values.items() if value is not None for word in (flag, str(value))]
        if (
            self.autocast_lists != ExecSettings.autocast_lists
        ):  # else a script without --device and arm is refused
            words += ["--autocast-lists", self.autocast_lists]
        words += [flag for name, flag in SWITCHES.items() if getattr(self, name)]
        return [*words, *GUARD_OPTIONS[self.guards]]


def exec_fields_for_resume_check(
    fields: Mapping[str, Any], name: str, arguments: Sequence[str]
) -> dict[str, Any]:
    """Return the fields of `ExecSettings` of a script whose resumption is verified: without guards, and with a seed.

    Args:
        fields: as they are asked for; the arm `script` and the seed 0 where none is.
        name: of the script or module.
        arguments: of the script.
    """
    return {
        **fields,
        "arm": fields.get("arm") or "script",
        "seed": fields.get("seed") or 0,
        "guards": "off",
        "name": name,
        "arguments": list(arguments),
    }


def settings_of_kept_step(fields: Mapping[str, Any], name: str, arguments: Sequence[str]) -> ExecSettings:
    """Return how a script runs of which a step is kept: as it is, without guards.

    Args:
        fields: of `ExecSettings`; those of an arm are left out.
        name: of the script or module.
        arguments: of the script.
    """
    kept = {key: fields[key] for key in OF_KEPT_STEP if key in fields}
    return ExecSettings(**kept, guards="off", name=name, arguments=tuple(arguments))
