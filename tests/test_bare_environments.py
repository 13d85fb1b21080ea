"""The engine of Apex works where torch alone is installed; what reads scripts works where nothing is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parent.parent
# torch and what it requires; under the name of a distribution where it is not that of a module.
TORCH = [
    "torch",
    "torchgen",
    "functorch",
    "typing_extensions",
    "filelock",
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
]
TORCH += ["markupsafe", "fsspec", "triton", "nvidia", "cuda"]
IMPORT_ALL = """
import importlib, importlib.abc, importlib.metadata, pkgutil, sys, warnings

class Bare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        head = name.partition(".")[0]
        if head in sys.stdlib_module_names or head in installed or head == "ampcompare":
            return None
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

room, *installed = sys.argv[1:]
warnings.simplefilter("ignore")
sys.meta_path.insert(0, Bare())
package = importlib.import_module(room)
count = 0
for module in pkgutil.walk_packages(package.__path__, f"{room}."):
    importlib.import_module(module.name)
    count += 1
print(count, *sorted(name for name in {name.partition(".")[0] for name in sys.modules} if name in ("torch", "numpy")))
"""


def import_all(room: str, *installed: str) -> str:
    """Import every module of a room in a process that finds the standard library and some packages alone."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, room, *installed],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def modules_of(room: str) -> int:
    """Return how many modules a room has below its package."""
    folder = ROOT.joinpath(*room.split("."))
    return len(list(folder.rglob("*.py"))) - 1


@pytest.mark.slow
def test_the_engine_imports_with_torch_alone() -> None:
    """`ampcompare.apex` needs no numpy, no pydantic and no click."""
    assert import_all("ampcompare.apex", *TORCH) == f"{modules_of('ampcompare.apex')} torch"


def test_source_imports_with_nothing_installed() -> None:
    """`lint` and `migrate` parse and rewrite with the standard library; torch and pydantic are not there to find."""
    assert import_all("ampcompare.source") == str(modules_of("ampcompare.source"))
