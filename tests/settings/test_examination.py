"""What the function of a child process raises is raised again by the caller."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ampcompare
from ampcompare.base.errors import (
    AmpCompareError,
    CheckpointError,
    ConfigError,
    EnvironmentUnfit,
    LaunchError,
)
from ampcompare.base.processes.call import ChildAnswer
from ampcompare.settings.examination import result_of_answer, return_user_errors


def _ask_torch() -> None:
    """Ask torch for a name that it lacks, as a file of the package does."""
    code = compile("torch._foreach_no_more", str(Path(ampcompare.__file__).with_name("asks.py")), "exec")
    exec(code, {"torch": torch})


@return_user_errors
def _examine(error: Exception | None) -> dict[str, Any]:
    if error is None:
        _ask_torch()
    else:
        raise error
    return {}


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (ConfigError("no such arm"), ConfigError, "no such arm"),
        (CheckpointError("of another model"), ConfigError, "of another model"),
        (EnvironmentUnfit("no GPU"), EnvironmentUnfit, "no GPU"),
        (AmpCompareError("the model"), LaunchError, "the model"),
        (None, EnvironmentUnfit, "lacks torch._foreach_no_more"),
    ],
)
def test_an_error_that_is_meant_for_users(error: Exception | None, kind: type[Exception], says: str) -> None:
    """Its class is that of its exit code, and a name that torch lacks is one of them."""
    with pytest.raises(kind, match=says):
        result_of_answer(ChildAnswer(_examine(error), "done"), "it failed")


def test_any_other_error() -> None:
    with pytest.raises(ZeroDivisionError):
        _examine(ZeroDivisionError())
    with pytest.raises(LaunchError, match="it failed: killed"):
        result_of_answer(ChildAnswer({}, "died", "killed"), "it failed")
