"""Modules by the paths of their files, trees of sources, and the example backend as an installed package would be."""

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "ampcompare-bf16-params"


def module_at(path: str) -> Any:
    """Return the module of a file of this repository, given relative to its root, executed anew."""
    file = ROOT / path
    spec: Any = importlib.util.spec_from_file_location(f"{file.parent.name}_{file.stem}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def modules_of_package() -> dict[str, Path]:
    """Return the files of the package by the names of their modules."""
    found = {}
    for path in sorted((ROOT / "ampcompare").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def parsed(text: str) -> ast.Module:
    """Return the tree of a source text; it is the same object at each call, for tests that read the whole package."""
    return ast.parse(text)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements with those in them, and none of their expressions, of which there are many."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody"):
            yield from statements(getattr(node, field, []))
        for part in (*getattr(node, "handlers", []), *getattr(node, "cases", [])):
            yield from statements(part.body)


def with_example(folder: Path) -> list[str]:
    """Register the example backend by the files that its installation would leave; return folders for the path."""
    settings = (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8")
    points: Any = re.search(r'\[project\.entry-points\."([^"]+)"\]\n((?:[\w-]+ = "[^"]+"\n)+)', settings)
    metadata = folder / "ampcompare_bf16_params-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: ampcompare-bf16-params\nVersion: 0.1.0\n"
    )
    (metadata / "entry_points.txt").write_text(f"[{points[1]}]\n{points[2].replace(chr(34), '')}")
    return [str(EXAMPLE), str(folder)]
