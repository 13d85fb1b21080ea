"""Importing torchvision beside whatever torch there is. Processes of their own, as an import happens once in each."""

import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

# Runs before ours: a torchvision that works, or fails, in a way that the machine at hand may not.
FAKE = """
import importlib, sys, types
real = importlib.import_module
calls = []
def fake(name, *rest):
    if name != "torchvision":
        return real(name, *rest)
    calls.append(name)
    return answer(len(calls))
importlib.import_module = fake
"""


def test_a_plain_import_works_or_says_what_to_install(forked_python: Any, tmp_path: Path) -> None:
    """A torchvision that works is left alone; one that is missing, or broken in another way, has a remedy."""
    (tmp_path / "code.py").write_text(
        FAKE + "from ampcompare.base.errors import BackendUnavailable\n"
        "from ampcompare.tasks.torchvision_loader import load_torchvision, _define_missing_operators\n"
        "sys.modules['torchvision.marker'] = types.ModuleType('torchvision.marker')\n"
        "answer = lambda call: 'works'\n"
        "print(load_torchvision(), len(calls), 'torchvision.marker' in sys.modules, "
        "_define_missing_operators.cache_info().currsize)\n"
        "failures = [ImportError('No module named torchvision'), RuntimeError('something\\nelse'), "
        "RuntimeError('operator torchvision::roi_align does not exist')]\n"
        "def answer(call):\n"
        "    raise failure\n"
        "for failure in failures:\n"
        "    calls.clear()\n"
        "    try:\n"
        "        load_torchvision()\n"
        "    except BackendUnavailable as error:\n"
        "        print(len(calls), error.exit_code, error)\n"
    )
    done = forked_python.run(["-W", "error", str(tmp_path / "code.py")], tmp_path, os.environ)
    assert done.returncode == 0, done.stderr
    works, *lines = done.stdout.splitlines()
    assert works == "works 1 True 0"
    told = [
        "1 4 torchvision cannot be imported (ImportError: No module named torchvision); ",
        "1 4 torchvision cannot be imported (RuntimeError: something); ",
        "2 4 torchvision cannot be imported (RuntimeError: operator torchvision::roi_align does not exist); ",
    ]
    assert [line.startswith(start) for line, start in zip(lines, told, strict=True)] == [True] * 3
    assert all("pip install torchvision" in line for line in lines)
