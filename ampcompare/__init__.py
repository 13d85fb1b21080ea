"""Compare NVIDIA Apex AMP with native torch.amp, manual half precision and fp32.

The public names below are imported when first used: `import ampcompare` itself loads neither torch nor numpy.
"""

from __future__ import annotations

# Before any import, since a file of the user could shadow the imported module.
from ampcompare.base.environment.oldest import require_python, require_torch  # isort: skip

require_python()
import ampcompare.base.environment.first_path  # noqa: E402, F401  # isort: skip

require_torch()

import importlib  # noqa: E402

from ampcompare.base.version import __version__  # noqa: E402

TYPE_CHECKING = False  # the name that type checkers know; importing `typing` would take most of the time of this file
if TYPE_CHECKING:
    from typing import Any

    from ampcompare.api.comparison import compare, load_comparison, reproduce_claims, run
    from ampcompare.api.diagnosis import diagnose, explain_arm, profile
    from ampcompare.api.machine import examine_machine
    from ampcompare.api.migration import convert_checkpoint, lint_paths, migrate_script
    from ampcompare.api.precision import Precision, StepOutcome, make_precision
    from ampcompare.api.results_table import judge_table
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
    "convert_checkpoint": "ampcompare.api.migration",
    "diagnose": "ampcompare.api.diagnosis",
    "examine_machine": "ampcompare.api.machine",
    "explain_arm": "ampcompare.api.diagnosis",
    "judge_table": "ampcompare.api.results_table",
    "lint_paths": "ampcompare.api.migration",
    "load_comparison": "ampcompare.api.comparison",
    "load_ipython_extension": "ampcompare.cli.cell_magic",  # for `%load_ext ampcompare`
    "log_metric": "ampcompare.base.metric_log",
    "make_precision": "ampcompare.api.precision",
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
