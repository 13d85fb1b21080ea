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

    from ampcompare.api.comparison import compare, load_comparison, reproduce_claims, run
    from ampcompare.api.diagnosis import diagnose, explain_arm, profile
    from ampcompare.api.machine import examine_machine
    from ampcompare.api.migration import convert_checkpoint, lint_paths, migrate_script
    from ampcompare.api.results_table import judge_table
    from ampcompare.backends.arm import Arm
    from ampcompare.base.metric_log import log_metric
    from ampcompare.experiment.follow import Callback, CellInfo
    from ampcompare.runs.records.run import RunRecord
    from ampcompare.runs.records.step import StepRecord
    from ampcompare.runs.settings.config import RunConfig
    from ampcompare.runs.settings.recipe import Recipe
    from ampcompare.training.precision.base import Precision, StepOutcome
    from ampcompare.training.precision.factory import make_precision

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
    "lint_paths",
    "load_comparison",
    "log_metric",
    "make_precision",
    "migrate_script",
    "profile",
    "reproduce_claims",
    "run",
]

_HOMES = {
    "Arm": "ampcompare.backends.arm",
    "Callback": "ampcompare.experiment.follow",
    "CellInfo": "ampcompare.experiment.follow",
    "Precision": "ampcompare.training.precision.base",
    "Recipe": "ampcompare.runs.settings.recipe",
    "RunConfig": "ampcompare.runs.settings.config",
    "RunRecord": "ampcompare.runs.records.run",
    "StepOutcome": "ampcompare.training.precision.base",
    "StepRecord": "ampcompare.runs.records.step",
    "compare": "ampcompare.api.comparison",
    "convert_checkpoint": "ampcompare.api.migration",
    "diagnose": "ampcompare.api.diagnosis",
    "examine_machine": "ampcompare.api.machine",
    "explain_arm": "ampcompare.api.diagnosis",
    "judge_table": "ampcompare.api.results_table",
    "lint_paths": "ampcompare.api.migration",
    "load_comparison": "ampcompare.api.comparison",
    "load_ipython_extension": "ampcompare.cli.cell_magic",  # for `%load_ext ampcompare`
    "log_metric": "ampcompare.base.metric_log",
    "make_precision": "ampcompare.training.precision.factory",
    "migrate_script": "ampcompare.api.migration",
    "profile": "ampcompare.api.diagnosis",
    "reproduce_claims": "ampcompare.api.comparison",
    "run": "ampcompare.api.comparison",
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
