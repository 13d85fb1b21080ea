"""`keep_fp32` of an arm in a script that names no model: modules are found when the script first calls them."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ampcompare.base.errors import ConfigError
from ampcompare.base.location import message_with_script_line
from ampcompare.base.patches import Subscriptions
from ampcompare.training.precision.keep_fp32 import kept_in_fp32

WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "_FabricModule": "_forward_module",  # which hands attributes such as `forward` to the module inside
    "FP16Model": "network",
}


def model_inside_wrappers(model: nn.Module) -> nn.Module:
    """Return the model inside of what distributes, compiles or casts it: its names are those of the script."""
    while True:
        if type(model).__name__ in WRAPPERS:
            model = getattr(model, WRAPPERS[type(model).__name__])
        elif type(model) is nn.Sequential and [type(part).__name__ for part in list(model)[:-1]] == [
            "tofp16"
        ]:
            model = model[-1]  # of network_to_half
        else:
            return model


class KeptFp32AtFirstCall:
    """Keeps modules in fp32, of every model that the script calls."""

    def __init__(self, patterns: str, context: Callable[[], Any], is_wanted: Callable[[], bool]) -> None:
        self._patterns = patterns.split("|")
        self._unmatched = set(self._patterns)
        self._context = context
        self._is_wanted = is_wanted
        self._seen: dict[int, nn.Module] = {}
        self._called: list[nn.Module] = []  # by the script itself: patterns are of what is inside of them

    def install(self, events: Subscriptions) -> None:
        """Find models from now on."""
        events.call_at_end(register_module_forward_pre_hook(self._keep_fp32_at_call).remove)
        events.call_at_end(register_optimizer_step_pre_hook(self._refuse_unmatched_patterns).remove)

    def _keep_fp32_at_call(self, module: nn.Module, _arguments: Any) -> None:
        if id(module) in self._seen or not self._is_wanted():
            return
        self._seen |= {id(inner): inner for inner in module.modules()}
        self._called.append(model_inside_wrappers(module))
        for pattern in self._patterns:
            with (
                suppress(ConfigError),
                kept_in_fp32([model_inside_wrappers(module)], pattern, None, self._context),
            ):
                self._unmatched.discard(pattern)

    def _refuse_unmatched_patterns(self, *_arguments: Any) -> None:
        if self._unmatched and self._is_wanted():
            raise ConfigError(message_with_script_line(self._why_unmatched(sorted(self._unmatched))))

    def _why_unmatched(self, patterns: Sequence[str]) -> str:
        for pattern in patterns:
            for module in self._called:
                if fnmatchcase(type(module).__name__, pattern):
                    return f"keep_fp32={pattern} {_why_outermost_not_kept(module)}"
        missing = " and ".join(patterns)
        return (
            f"keep_fp32={missing} matches no module that the script has called, neither by name nor by type"
        )


def _why_outermost_not_kept(module: nn.Module) -> str:
    """Return why a module that the script calls by itself is not kept."""
    kind = type(module).__name__
    if next(module.parameters(), None) is not None:
        return f"matches the whole model, {kind}; it keeps modules inside of one: name those, or compare fp32"
    return (
        f"matches {kind} alone, which the script itself calls and no model has in it; it keeps modules inside of a "
        f"model: pass {kind} its inputs with .float(), where no autocast is on"
    )
