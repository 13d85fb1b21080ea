"""Compare NVIDIA Apex AMP with native torch.amp, manual half precision and fp32.

The public names below are imported when first used: `import ampcompare` itself loads neither torch nor numpy.
"""

# Before any import, since a file of the user could shadow the imported module. An old Python must be able to read this
# file, hence no import from __future__.
from ampcompare.base.environment.oldest import require_supported_python  # isort: skip

require_supported_python()
import ampcompare.base.environment.first_path  # noqa: E402, F401  # isort: skip

import importlib  # noqa: E402

from ampcompare.base.version import __version__  # noqa: E402

# the name that type checkers know; importing `typing` would take most of the time of this file
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ampcompare.api.choices import (
        list_arms,
        list_data,
        list_guards,
        list_launchers,
        list_models,
        list_optimizers,
        list_recipes,
        list_runs,
        list_tasks,
    )
    from ampcompare.api.comparison import compare, export, load_comparison, resolve_config, run
    from ampcompare.api.diagnosis import diagnose, explain_arm, find_batch, look_ahead, profile
    from ampcompare.api.machine import examine_machine
    from ampcompare.api.migration import convert_checkpoint, exec_script, lint_paths, migrate_script
    from ampcompare.api.precision import Precision, StepOutcome, make_precision
    from ampcompare.api.results_table import judge_against, judge_table
    from ampcompare.api.types import Arm, Recipe, RunConfig, RunRecord, StepRecord
    from ampcompare.base.metric_log import log_metric

__all__ = [
    "Arm",
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
    "exec_script",
    "explain_arm",
    "export",
    "find_batch",
    "judge_against",
    "judge_table",
    "lint_paths",
    "list_arms",
    "list_data",
    "list_guards",
    "list_launchers",
    "list_models",
    "list_optimizers",
    "list_recipes",
    "list_runs",
    "list_tasks",
    "load_comparison",
    "log_metric",
    "look_ahead",
    "make_precision",
    "migrate_script",
    "profile",
    "resolve_config",
    "run",
]

_HOMES = {
    "Arm": "ampcompare.api.types",
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
    "exec_script": "ampcompare.api.migration",
    "explain_arm": "ampcompare.api.diagnosis",
    "export": "ampcompare.api.comparison",
    "find_batch": "ampcompare.api.diagnosis",
    "judge_against": "ampcompare.api.results_table",
    "judge_table": "ampcompare.api.results_table",
    "lint_paths": "ampcompare.api.migration",
    "list_arms": "ampcompare.api.choices",
    "list_data": "ampcompare.api.choices",
    "list_guards": "ampcompare.api.choices",
    "list_launchers": "ampcompare.api.choices",
    "list_models": "ampcompare.api.choices",
    "list_optimizers": "ampcompare.api.choices",
    "list_recipes": "ampcompare.api.choices",
    "list_runs": "ampcompare.api.choices",
    "list_tasks": "ampcompare.api.choices",
    "load_comparison": "ampcompare.api.comparison",
    "load_ipython_extension": "ampcompare.cli.cell_magic",  # for `%load_ext ampcompare`
    "log_metric": "ampcompare.base.metric_log",
    "look_ahead": "ampcompare.api.diagnosis",
    "make_precision": "ampcompare.api.precision",
    "migrate_script": "ampcompare.api.migration",
    "profile": "ampcompare.api.diagnosis",
    "resolve_config": "ampcompare.api.comparison",
    "run": "ampcompare.api.comparison",
}


def __getattr__(name: str) -> "Any":
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
