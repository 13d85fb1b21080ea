"""The child process: `child.py PROGRAM FILE REQUEST` calls a function of PROGRAM and writes its answer into FILE.

It imports nothing of this package, so that a broken installation fails in the function that is asked, not before.
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


def answer(program: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Return the value of a program's function or what it raised, and the warnings that were given.

    Args:
        program: a file with the function.
        request: `path` to import from, name of the `function`, and its `options`.
    """
    sys.path[:] = request["path"]
    spec = importlib.util.spec_from_file_location(program.stem, program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            spec.loader.exec_module(module)
            result: dict[str, Any] = {"value": getattr(module, request["function"])(**request["options"])}
        except BaseException as error:  # a package may raise anything when it is imported, SystemExit too
            text = " ".join(str(error).split())
            result = {"failure": f"{type(error).__name__}: {text}" if text else type(error).__name__}
    return {**result, "warnings": [" ".join(str(warning.message).split()) for warning in caught]}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(answer(Path(sys.argv[1]), json.loads(sys.argv[3]))), encoding="utf-8")
    os._exit(0)  # a crash or a hang while Python shuts down does not change the answer
