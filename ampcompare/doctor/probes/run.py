"""What the child process runs: `run.py PROBE FILE REQUEST` answers the question PROBE into FILE.

It knows nothing of the package around it, so that a broken installation can spoil no more than the probe itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

__all__ = ["answer"]


def answer(probe: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return the value of a probe, or what it raised, and the warnings given on the way."""
    sys.path[:] = request["path"]
    spec = importlib.util.spec_from_file_location(probe, Path(__file__).resolve().with_name(f"{probe}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            result: dict[str, Any] = {"value": getattr(module, probe)(**request["options"])}
        except BaseException as error:  # a package may raise anything when it is imported, SystemExit too
            text = " ".join(str(error).split())
            result = {"failure": f"{type(error).__name__}: {text}" if text else type(error).__name__}
    return {**result, "warnings": [" ".join(str(warning.message).split()) for warning in seen]}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(answer(sys.argv[1], json.loads(sys.argv[3]))), encoding="utf-8")
    os._exit(0)  # what crashes or hangs while Python ends does not matter here
