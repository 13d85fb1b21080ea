"""Compare NVIDIA Apex AMP with native torch.amp, manual half precision and fp32.

The public names below are imported when first used: `import ampcompare` itself loads neither torch nor numpy.
"""

from __future__ import annotations

# Before any import, since a file of the user could shadow the imported module.
import ampcompare.base.environment.first_path  # noqa: F401  # isort: skip

import importlib

from ampcompare.base.version import __version__

TYPE_CHECKING = False  # the name that type checkers know; importing `typing` would take most of the time of this file
if TYPE_CHECKING:
    from typing import Any

    from ampcompare.api import (
        compare,
        convert_checkpoint,
        diagnose,
        examine_machine,
        explain_arm,
        judge_table,
        reproduce_claims,
        run,
    )
    from ampcompare.backends.arm import Arm
    from ampcompare.precision.base import Precision, StepOutcome
    from ampcompare.precision.factory import make_precision
    from ampcompare.records.callback import Callback, CellInfo
    from ampcompare.records.run import RunRecord
    from ampcompare.records.step import StepRecord
    from ampcompare.script.metric_log import log_metric
    from ampcompare.settings.config import RunConfig
    from ampcompare.settings.recipe import Recipe

__all__ = [
    "Arm",
    "Callback",
    "CellInfo",
    "Precision",
    "Recipe",
    "RunConfig",
    "RunRecord",
    "StepOutcome",
    "StepRecord",
    "__version__",
    "compare",
    "convert_checkpoint",
    "diagnose",
    "examine_machine",
    "explain_arm",
    "judge_table",
    "log_metric",
    "make_precision",
    "reproduce_claims",
    "run",
]

_HOMES = {
    "Arm": "ampcompare.backends.arm",
    "Callback": "ampcompare.records.callback",
    "CellInfo": "ampcompare.records.callback",
    "Precision": "ampcompare.precision.base",
    "Recipe": "ampcompare.settings.recipe",
    "RunConfig": "ampcompare.settings.config",
    "RunRecord": "ampcompare.records.run",
    "StepOutcome": "ampcompare.precision.base",
    "StepRecord": "ampcompare.records.step",
    "compare": "ampcompare.api",
    "convert_checkpoint": "ampcompare.api",
    "diagnose": "ampcompare.api",
    "examine_machine": "ampcompare.api",
    "explain_arm": "ampcompare.api",
    "judge_table": "ampcompare.api",
    "log_metric": "ampcompare.script.metric_log",
    "make_precision": "ampcompare.precision.factory",
    "reproduce_claims": "ampcompare.api",
    "run": "ampcompare.api",
}


def __getattr__(name: str) -> Any:
    """Import a public name's module on first use.

    Raises:
        AttributeError: `name` is not public.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'ampcompare' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, also those not imported yet."""
    return sorted({*globals(), *__all__})
