"""The names of optimizers: built-in ones, those of other packages, and `module:Class`; checked without torch.

A package registers an optimizer under the entry-point group `ampcompare.optimizers`, as `module:Class`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ampcompare.backends.library import Library
from ampcompare.base.environment.packages import entry_points, find_module
from ampcompare.base.errors import BackendUnavailable, ConfigError, close_matches

__all__ = [
    "APEX",
    "BUILT_IN",
    "GROUP",
    "LIBRARIES",
    "OWN_APEX",
    "OptimizerSpec",
    "canonical_name",
    "list_optimizers",
    "optimizer_path",
    "require_optimizer",
]

GROUP = "ampcompare.optimizers"
APEX = "apex.optimizers"
OWN_APEX = "ampcompare.apex.optimizers"
PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*[:.][A-Za-z_]\w*")


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer that has its own name.

    Attributes:
        path: `module:Class`; for those of Apex, ampcompare's own.
        summary: one line for `ampcompare list`.
    """

    path: str
    summary: str


BUILT_IN = {
    "sgd": OptimizerSpec("torch.optim:SGD", "torch.optim.SGD"),
    "adam": OptimizerSpec("torch.optim:Adam", "torch.optim.Adam, L2 decay"),
    "adamw": OptimizerSpec("torch.optim:AdamW", "torch.optim.AdamW, decoupled decay"),
    "fused_adam": OptimizerSpec(f"{OWN_APEX}:FusedAdam", "apex.optimizers.FusedAdam: AdamW with fp32 moments"),
    "fused_lamb": OptimizerSpec(f"{OWN_APEX}:FusedLAMB", "apex.optimizers.FusedLAMB: clips at a norm of 1 by default"),
    "fused_novograd": OptimizerSpec(f"{OWN_APEX}:FusedNovoGrad", "apex.optimizers.FusedNovoGrad"),
    "fused_sgd": OptimizerSpec(f"{OWN_APEX}:FusedSGD", "apex.optimizers.FusedSGD: fp16 and fp32 weights"),
    "fused_adagrad": OptimizerSpec(f"{OWN_APEX}:FusedAdagrad", "apex.optimizers.FusedAdagrad"),
}
LIBRARIES = {  # packages of known optimizers, by the first part of a path
    "torchao": Library(("torchao",), ("torchao",), "pip install 'ampcompare[fp8]'", extra="fp8"),
    "bitsandbytes": Library(("bitsandbytes",), ("bitsandbytes",), "pip install bitsandbytes"),
}
KNOWN_PATHS = {
    "torch.optim.Muon": "torch: matrices only",
    "torchao.optim.AdamW8bit": "torchao: AdamW with moments in 8 bits",
    "bitsandbytes.optim.AdamW8bit": "bitsandbytes: AdamW with moments in 8 bits",
}


def canonical_name(text: str) -> str:
    """Return the name under which settings hold an optimizer: its own name if it has one, else `module:Class`.

    Raises:
        ConfigError: the text is neither.
    """
    name = text.lower().replace("-", "_")
    if name in BUILT_IN:
        return name
    if text in _registered_names():
        return text
    if not PATH.fullmatch(text):
        known = [*BUILT_IN, *_registered_names()]
        close = close_matches(name, known)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"there is no optimizer {text!r}: {hint}known are {', '.join(known)}, or write module:Class")
    module, _, attribute = text.replace(":", ".").rpartition(".")
    module = OWN_APEX if module == APEX else module
    path = f"{module}:{attribute}"
    return next((name for name, spec in BUILT_IN.items() if spec.path == path), path)


def optimizer_path(name: str) -> str:
    """Return `module:Class` of a canonical name.

    Raises:
        ConfigError: two packages register the name, or none does.
    """
    if name in BUILT_IN:
        return BUILT_IN[name].path
    if ":" in name:
        return name
    values = [entry.value for entry in entry_points(group=GROUP) if entry.name == name]
    if len(values) != 1:
        by = f"{len(values)} packages: {' and '.join(values)}" if values else "no package"
        raise ConfigError(f"the optimizer {name!r} is registered by {by}; install one that registers it")
    return values[0]


def require_optimizer(name: str) -> None:
    """Check that an optimizer can exist, without importing its module.

    Raises:
        ConfigError: there is no such module.
        BackendUnavailable: it belongs to a package that is not installed; the message says how to install it.
    """
    path = optimizer_path(name)
    module = path.partition(":")[0]
    library = LIBRARIES.get(module.partition(".")[0])
    if library is not None and (missing := library.missing()):
        raise BackendUnavailable(f"optimizer {name}: {module.partition('.')[0]} is {missing}")
    if not find_module(module)[0]:
        raise ConfigError(f"optimizer {name}: there is no module {module!r}; name it by module:Class")


def list_optimizers() -> list[tuple[str, bool, str]]:
    """Return (name, available, what it is or why not) of each optimizer; nothing is imported to find out."""
    rows = [(name, True, spec.summary) for name, spec in BUILT_IN.items()]
    rows += [
        (name, find_module(value.partition(":")[0])[0], f"from {value}") for name, value in _registered_names().items()
    ]
    return [*rows, *_known_rows(), ("module:Class", True, "any other class or function of torch's optimizer interface")]


def _known_rows() -> Iterator[tuple[str, bool, str]]:
    for path, summary in KNOWN_PATHS.items():
        library = LIBRARIES.get(path.partition(".")[0])
        if library is None:
            available = find_module("torch.optim._" + path.rpartition(".")[2].lower())[0]
            yield path, available, summary if available else "this torch does not have it: pip install -U torch"
        else:
            missing = library.missing()
            yield path, not missing, missing or summary


def _registered_names() -> dict[str, str]:
    return {entry.name: entry.value for entry in entry_points(group=GROUP)}
