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

    from ampcompare.api.checkpoint import convert_checkpoint
    from ampcompare.api.claims import reproduce_claims
    from ampcompare.api.comparison import compare
    from ampcompare.api.diagnosis import diagnose
    from ampcompare.api.explanation import explain_arm
    from ampcompare.api.machine import examine_machine
    from ampcompare.api.precision import Precision, StepOutcome, make_precision
    from ampcompare.api.profiling import profile
    from ampcompare.api.results_table import judge_table
    from ampcompare.api.source import lint_paths, migrate_script
    from ampcompare.api.stored import load_comparison
    from ampcompare.api.training import run
    from ampcompare.api.types import Arm, Callback, CellInfo, Recipe, RunConfig, RunRecord, StepRecord
    from ampcompare.base.metric_log import log_metric

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
    "Arm": "ampcompare.api.types",
    "Callback": "ampcompare.api.types",
    "CellInfo": "ampcompare.api.types",
    "Precision": "ampcompare.api.precision",
    "Recipe": "ampcompare.api.types",
    "RunConfig": "ampcompare.api.types",
    "RunRecord": "ampcompare.api.types",
    "StepOutcome": "ampcompare.api.precision",
    "StepRecord": "ampcompare.api.types",
    "compare": "ampcompare.api.comparison",
    "convert_checkpoint": "ampcompare.api.checkpoint",
    "diagnose": "ampcompare.api.diagnosis",
    "examine_machine": "ampcompare.api.machine",
    "explain_arm": "ampcompare.api.explanation",
    "judge_table": "ampcompare.api.results_table",
    "lint_paths": "ampcompare.api.source",
    "load_comparison": "ampcompare.api.stored",
    "load_ipython_extension": "ampcompare.cli.cell_magic",  # for `%load_ext ampcompare`
    "log_metric": "ampcompare.base.metric_log",
    "make_precision": "ampcompare.api.precision",
    "migrate_script": "ampcompare.api.source",
    "profile": "ampcompare.api.profiling",
    "reproduce_claims": "ampcompare.api.claims",
    "run": "ampcompare.api.training",
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
