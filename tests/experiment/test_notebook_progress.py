"""Progress in a notebook: one output that is drawn again, chosen where the code runs in a kernel."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from ampcompare.experiment.launch.contract import Progress
from ampcompare.experiment.notebook_progress import NotebookProgress, observer_or_notebook_progress
from ampcompare.experiment.observer import PlanOutline
from ampcompare.results.records.comparison import read_comparison

STORED = Path(__file__).parents[1] / "results" / "report" / "schema_2.json"


class _Display:
    """What IPython's `display` returns for an output with a handle."""

    def __init__(self) -> None:
        self.bundles: list[dict[str, str]] = []

    def __call__(self, bundle: dict[str, str], **options: Any) -> _Display:
        assert options == {"raw": True, "display_id": True}
        self.bundles.append(bundle)
        return self

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.bundles.append(bundle)


def _kernel(monkeypatch: pytest.MonkeyPatch, kernel: object | None) -> _Display:
    shown = _Display()
    shell = types.SimpleNamespace(kernel=kernel)
    module = types.ModuleType("IPython")
    module.get_ipython = lambda: shell  # type: ignore[attr-defined]
    display = types.ModuleType("IPython.display")
    display.display = shown  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def test_progress_is_one_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan, steps and ends of runs update a single output, as text and as HTML with names made safe."""
    shown = _kernel(monkeypatch, object())
    records = read_comparison(STORED).records[:2]
    cells = [record.config for record in records]
    progress = observer_or_notebook_progress(None)
    assert isinstance(progress, NotebookProgress)
    progress.plan(PlanOutline(cells, ["fp32 <b>", "bf16"], [None, None], Path("runs/first")))
    monkeypatch.setattr("ampcompare.experiment.notebook_progress.SECONDS_BETWEEN", -1.0)
    progress.begin(cells[0], 1, 2)
    progress.place(1, "GPU 3")
    progress.progress(1, Progress(phase="training", epoch=0, steps=3, total_steps=12, loss=0.5))
    text, html = (shown.bundles[-1][kind] for kind in ("text/plain", "text/html"))
    assert text.startswith("0 of 2 runs")
    assert "fp32 <b>, seed 0, GPU 3: training, step 3 of 12, loss 0.5" in text
    assert 'value="0.250"' in html
    assert "fp32 &lt;b&gt;" in html
    progress.end(records[0].model_copy(update={"cell": cells[0].digest()}), reused=True)
    progress.note("a note")
    text = shown.bundles[-1]["text/plain"]
    assert text.startswith("1 of 2 runs")
    assert "(cached)" in text
    assert text.endswith("note: a note")
