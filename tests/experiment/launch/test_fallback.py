"""A cell that diverges trains again under the next arm of a list, and says so."""

from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.experiment.launch.contract import Launcher
from ampcompare.experiment.launch.dispatch.local import LocalLauncher
from ampcompare.results.analysis.pairing.declared import not_as_declared_verdict
from ampcompare.results.records.run import RunRecord, RunSummary, read_record
from ampcompare.settings.config import RunConfig
from ampcompare.settings.validation import build_validated_model


class Diverging(Launcher):
    """Trains nothing; of some arms it says that they diverge."""

    def __init__(self, *bad: str) -> None:
        self.bad = bad
        self.asked: list[RunConfig] = []

    def launch(self, config: RunConfig, folder: Path, on_progress: Any = None) -> RunRecord:
        self.asked.append(config)
        folder.mkdir(parents=True, exist_ok=True)
        is_bad = config.arm in self.bad
        summary = RunSummary(num_steps=9, diverged_step=5 if is_bad else None)
        status = "diverged" if is_bad else "completed"
        return RunRecord(cell=config.digest(), arm=config.arm, status=status, config=config, summary=summary)


def _launch(config: RunConfig, inner: Diverging, folder: Path) -> RunRecord:
    launcher = LocalLauncher()
    launcher._launchers["fork"] = inner
    return launcher.launch(config, folder)


def test_the_next_arm_trains_until_one_holds(tmp_path: Path) -> None:
    """The record stays that of the cell, names who trained, and has no verdict as the cell's arm."""
    config = RunConfig(arm="half", on_nan="fallback:native:fp16,bf16,fp32")
    inner = Diverging("half", "native:fp16")
    record = _launch(config, inner, tmp_path)
    assert [asked.arm for asked in inner.asked] == ["half", "native:fp16", "native:bf16"]
    assert inner.asked[1].on_nan == "stop"
    assert (record.cell, record.arm, record.config) == (config.digest(), "half", config)
    assert record.fell_back is not None
    assert (record.fell_back.arm, record.fell_back.diverged) == ("native:bf16", {"half": 5, "native:fp16": 5})
    assert not_as_declared_verdict([record]).why == "half diverged at step 5, and native:bf16 trained instead"
    assert read_record(tmp_path / "record.json") == record


def test_an_arm_that_holds_stays(tmp_path: Path) -> None:
    """Nothing is trained twice, and where every arm diverges the last record says so."""
    config = RunConfig(arm="half", on_nan="fallback:fp32")
    assert _launch(config, Diverging(), tmp_path).fell_back is None
    lost = _launch(config, Diverging("half", "fp32"), tmp_path)
    assert lost.status == "diverged"
    assert lost.fell_back is not None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"on_nan": "fallback:fp23"}, "fp23"),
        ({"on_nan": "fall-back"}, "on_nan 'fall-back' is unknown; did you mean 'fallback:ARM'?"),
        ({"on_nan": "fallback:fp32", "launcher": "slurm"}, "not one of launcher slurm"),
    ],
)
def test_what_cannot_be_asked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_validated_model(RunConfig, values)
