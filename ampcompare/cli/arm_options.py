"""Options that name one arm by its backend and options, as `--backend apex --opt-level O2`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ConfigError
from ampcompare.cli.help import ARMS, option
from ampcompare.cli.values import BACKEND, FLAG, HALF, LEVEL, Choice

__all__ = ["arm_from_flags", "arm_options"]

Function = TypeVar("Function", bound=Callable[..., Any])

OUTPUT_DTYPE = Choice(("fp32", "fp16", "bf16"), {"float32": "fp32", "float": "fp32", **HALF.others})
OPTIONS: dict[str, dict[str, Any]] = {  # of an arm, in the order of the help
    "--opt-level": {"type": LEVEL, "help": "opt level of Apex; needs no --backend"},
    "--engine": {
        "type": Choice(("auto", "nvidia", "compat")),
        "help": "Apex: the real one (nvidia), or ampcompare's own (compat)  [default: auto]",
    },
    "--dtype": {"type": HALF, "help": "native, half: 16-bit type  [default: fp16]"},
    "--loss-scale": {"metavar": "dynamic|NUMBER", "help": "Apex, half: loss scale"},
    "--keep-batchnorm-fp32": {"type": FLAG, "help": "Apex O2, O3: batch norm stays in fp32"},
    "--keep-fp32": {"metavar": "PATTERNS", "help": "Apex, native, half: modules in fp32, by name or type, joined by |"},
    "--master-weights": {"type": FLAG, "help": "Apex O2, O3, and half: fp32 copies of the weights"},
    "--cast-model-outputs": {"type": OUTPUT_DTYPE, "help": "Apex: type of the model's outputs"},
    "--min-loss-scale": {"metavar": "NUMBER", "help": "Apex: lower bound of a dynamic loss scale"},
    "--max-loss-scale": {"metavar": "NUMBER", "help": "Apex: upper bound of a dynamic loss scale"},
    "--bn-fp32/--no-bn-fp32": {"default": None, "help": "half: batch norm stays in fp32"},
    "--init-scale": {"metavar": "NUMBER", "help": "native, half: first value of a dynamic loss scale"},
    "--growth-factor": {"metavar": "NUMBER", "help": "native: factor when the loss scale grows"},
    "--backoff-factor": {"metavar": "NUMBER", "help": "native: factor after an overflow"},
    "--growth-interval": {"metavar": "STEPS", "help": "native, half: steps without overflow until it grows"},
}
NAMES = {flag.partition("/")[0].removeprefix("--").replace("-", "_"): flag.partition("/")[0] for flag in OPTIONS}


def arm_options(function: Function) -> Function:
    """Add `--backend` and the options of an arm."""
    for flag, settings in reversed(OPTIONS.items()):
        function = option(flag, group=ARMS, **settings)(function)
    text = "fp32, apex, native, half or another of `list arms`; its options follow"
    return option("--backend", type=BACKEND, group=ARMS, help=text)(function)


def arm_from_flags(parameters: Mapping[str, Any], *, is_named: bool) -> str | None:
    """Return the arm that `--backend` and its options name, in its canonical form; None if they name none.

    Args:
        is_named: whether `--arm` is given, which the flags cannot be combined with.

    Raises:
        ConfigError: both ways are used, options have no backend, or the arm cannot be used.
    """
    options = {name: parameters[name] for name in NAMES if parameters[name] is not None}
    backend = parameters["backend"]
    flags = ", ".join([*(["--backend"] if backend else []), *map(NAMES.__getitem__, options)])
    if is_named and flags:
        raise ConfigError(f"--arm cannot be combined with {flags}; use one or the other")
    if backend is None and "opt_level" in options:
        backend = "apex"
    if backend is None and options:
        raise ConfigError(f"{flags} belongs to a backend; name it with --backend")
    return None if backend is None else str(Arm.make(backend, **options))
