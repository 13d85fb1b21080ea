"""The notebooks of examples/: run in a real kernel, and shown on the site with their outputs."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.modules import module_at

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
# One seed for three: what the cells do is the same, and the stored outputs are of three.
FEWER = {"seeds=range(3)": "seeds=range(1)", "--seeds 0-2": "--seeds 0"}


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    return module_at("docs/hooks/notebooks.py")


def _kinds(notebook: dict[str, Any]) -> list[list[tuple[str, list[str]]]]:
    """Return of each cell which outputs it has, and in which forms; joined, where a stream comes in pieces."""
    kinds = []
    for cell in notebook["cells"]:
        found = [(one["output_type"], sorted(one.get("data", {}))) for one in cell.get("outputs", ())]
        kinds.append(list(dict.fromkeys((kind, tuple(forms)) for kind, forms in found)))
    return [[(kind, list(forms)) for kind, forms in cell] for cell in kinds]


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.extended] * (path is not NOTEBOOKS[0]))
        for path in NOTEBOOKS
    ],
)
def test_notebooks_run_in_a_kernel(path: Path, hook: ModuleType, tmp_path: Path) -> None:
    """Every cell runs in a new kernel and has outputs of the kinds that are stored; none is an error."""
    for package in ("nbclient", "ipykernel", "jinja2"):
        pytest.importorskip(package)
    text = path.read_text(encoding="utf-8")
    for many, few in FEWER.items():
        text = text.replace(many, few)
    copy = tmp_path / "notebooks" / path.name
    copy.parent.mkdir()
    copy.write_text(text, encoding="utf-8")
    done = hook.run(copy)
    assert _kinds(done) == _kinds(json.loads(text))
    assert "error" not in {kind for cell in _kinds(done) for kind, _ in cell}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_notebooks_are_pages(path: Path, hook: ModuleType) -> None:
    """A page has text and code of the notebook, and a place for each stored output, which needs no script."""
    notebook = hook.read(path)
    page = hook.markdown_of(notebook, path.name)
    outputs = hook.outputs_of(notebook)
    assert page.startswith("# ")
    assert len(outputs) == len(hook.PLACE.findall(page)) > 3
    assert all("".join(cell["source"]) in page for cell in notebook["cells"])
    assert not any("<script" in output for output in outputs)
    assert not any(str(place) in output for output in outputs for place in (ROOT, Path.home(), "/tmp/"))
