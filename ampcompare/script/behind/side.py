"""What a backend finds on the side of the script that it is to stand behind."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ampcompare.base.patches import Subscriptions
from ampcompare.script.recording.recorder import RecordedSteps
from ampcompare.script.torch_amp.parallel_wrappers import ParallelWrappers


@dataclass(frozen=True)
class ScriptProcessContext:
    """The process of a script, before anything of its training is replaced.

    Attributes:
        events: takes subscribers to what the script calls, and ends them.
        rows: of the record; None if nothing is recorded.
        wrappers: what the script wraps for several processes.
        engine: what the script imports as `apex`, "nvidia" or "compat".
        device_type: "cpu" or "cuda", where it really computes: "cpu" also where a CPU is in the place of CUDA.
        record_weights: called with the models and the optimizers that `amp.initialize` gets, before it changes them.
        has_initialized: whether the script has called the `amp.initialize` of an Apex.
    """

    events: Subscriptions
    rows: RecordedSteps | None
    wrappers: ParallelWrappers
    engine: str
    device_type: str
    record_weights: Callable[[list[Any], list[Any]], None]
    has_initialized: Callable[[], bool]


def as_list(value: Any) -> list[Any]:
    """Return models or optimizers as `amp.initialize` takes them, one, several or `None`, as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
