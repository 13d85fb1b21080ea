"""The names of optimizers: built-in ones, and `module:Class`; checked without torch."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ampcompare.backends.library import Library
from ampcompare.base.environment.packages import importability_and_spec
from ampcompare.base.errors import BackendUnavailable, ConfigError, close_matches

APEX = "apex.optimizers"
OWN_APEX = "ampcompare.apex.optimizers"
PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*[:.][A-Za-z_]\w*")


@dataclass(frozen=True)
class OptimizerClassSpec:
    """An optimizer that has its own name: `module:Class`, for those of Apex ampcompare's own, and a line for `list`."""

    path: str
    summary: str


BUILT_IN = {
    "sgd": OptimizerClassSpec("torch.optim:SGD", "torch.optim.SGD"),
    "adam": OptimizerClassSpec("torch.optim:Adam", "torch.optim.Adam, L2 decay"),
    "adamw": OptimizerClassSpec("torch.optim:AdamW", "torch.optim.AdamW, decoupled decay"),
    "fused_adam": OptimizerClassSpec(
        f"{OWN_APEX}:FusedAdam", "apex.optimizers.FusedAdam: AdamW with fp32 moments"
    ),
    "fused_lamb": OptimizerClassSpec(
        f"{OWN_APEX}:FusedLAMB", "apex.optimizers.FusedLAMB: clips at a norm of 1 by default"
    ),
    "fused_novograd": OptimizerClassSpec(f"{OWN_APEX}:FusedNovoGrad", "apex.optimizers.FusedNovoGrad"),
    "fused_sgd": OptimizerClassSpec(
        f"{OWN_APEX}:FusedSGD", "apex.optimizers.FusedSGD: fp16 and fp32 weights"
    ),
    "fused_adagrad": OptimizerClassSpec(f"{OWN_APEX}:FusedAdagrad", "apex.optimizers.FusedAdagrad"),
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


def canonical_optimizer_name(text: str) -> str:
    """Return the name under which settings hold an optimizer: its own name if it has one, else `module:Class`."""
    name = text.lower().replace("-", "_")
    if name in BUILT_IN:
        return name
    if not PATH.fullmatch(text):
        close = close_matches(name, BUILT_IN)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"there is no optimizer {text!r}: {hint}known are {', '.join(BUILT_IN)}, or write module:Class"
        )
    module, _, attribute = text.replace(":", ".").rpartition(".")
    module = OWN_APEX if module == APEX else module
    path = f"{module}:{attribute}"
    return next((name for name, spec in BUILT_IN.items() if spec.path == path), path)


def optimizer_class_path(name: str) -> str:
    """Return `module:Class` of a canonical name."""
    return BUILT_IN[name].path if name in BUILT_IN else name


def require_optimizer(name: str) -> None:
    """Check that the module of an optimizer exists and its package is installed, without importing it.

    Raises:
        BackendUnavailable: its package is not installed.
        ConfigError: there is no such module.
    """
    module = optimizer_class_path(name).partition(":")[0]
    library = LIBRARIES.get(module.partition(".")[0])
    if library is not None and (missing := library.why_missing()):
        raise BackendUnavailable(f"optimizer {name}: {module.partition('.')[0]} is {missing}")
    if not importability_and_spec(module)[0]:
        raise ConfigError(f"optimizer {name}: there is no module {module!r}; name it by module:Class")


def list_optimizers() -> list[tuple[str, bool, str]]:
    """Return (name, available, what it is or why not) of each optimizer; nothing is imported to find out."""
    rows = [(name, True, spec.summary) for name, spec in BUILT_IN.items()]
    return [
        *rows,
        *_optimizer_rows(),
        ("module:Class", True, "any other class or function of torch's optimizer interface"),
    ]


def _optimizer_rows() -> Iterator[tuple[str, bool, str]]:
    for path, summary in KNOWN_PATHS.items():
        library = LIBRARIES.get(path.partition(".")[0])
        if library is None:
            available = importability_and_spec("torch.optim._" + path.rpartition(".")[2].lower())[0]
            yield (
                path,
                available,
                summary if available else "this torch does not have it: pip install -U torch",
            )
        else:
            missing = library.why_missing()
            yield path, not missing, missing or summary
