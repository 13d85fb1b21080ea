"""Every command that trains uses the free ones of several GPUs, which are pretended here, as are the launchers."""

from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.environment.gpus import Gpu
from ampcompare.base.errors import LaunchError
from ampcompare.cli import main
from ampcompare.experiment import diagnose
from ampcompare.experiment.launch import places
from ampcompare.experiment.launch.contract import Launcher
from ampcompare.experiment.launch.dispatch import dispatch
from ampcompare.experiment.launch.places import ANYWHERE, Place
from ampcompare.results.records.run import RunRecord

GPUS = [
    Gpu("GPU-a", 0, "Pretended"),
    Gpu("GPU-b", 1, "Pretended", in_use="process 1 uses it"),
    Gpu("GPU-c", 2, "Other"),
]
SMALL = ("--arch", "mlp", "--data", "synthetic", "--seeds", "0-1")


class Ends(Launcher):
    """Trains nothing."""

    def launch(self, *words: object) -> RunRecord:
        raise LaunchError("it trains nothing")


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What CUDA_VISIBLE_DEVICES is at each place of a command."""
    seen: list[str] = []

    def make(config: object, *, place: Place = ANYWHERE, **options: Any) -> Launcher:
        seen.append(place.environment.get("CUDA_VISIBLE_DEVICES", ""))
        return Ends()

    monkeypatch.setattr(places, "visible_gpus", lambda: GPUS)
    monkeypatch.setattr(dispatch, "make_launcher", make)
    (tmp_path / "train.py").write_text("import torch\n")
    monkeypatch.chdir(tmp_path)
    return seen


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("compare", "--arm", "fp32,bf16", *SMALL), ["GPU-a", "GPU-c"]),
        (("compare", "--arm", "fp32,bf16", *SMALL, "--gpus", "1-2"), ["GPU-b", "GPU-c"]),
        (("compare", "--arm", "fp32,bf16", *SMALL, "--jobs", "1"), [""]),
        (("compare", "--arm", "fp32,bf16", *SMALL, "--nproc-per-node", "2"), ["GPU-a,GPU-c"]),
        (("compare", "--arm", "fp32,bf16", "--task", "lm", "--seeds", "0"), ["GPU-a", "GPU-c"]),
        (("compare", "--arm", "fp32,bf16", "--seeds", "0", "--", "train.py"), ["GPU-a", "GPU-c"]),
        (("find-batch", "--arm", "fp32,bf16", *SMALL[:4]), ["GPU-a"]),
        (("find-batch", "--arm", "fp32,bf16", *SMALL[:4], "--gpus", "2"), ["GPU-c"]),
    ],
)
def test_commands_that_train_cells(used: list[str], words: tuple[str, ...], expected: list[str]) -> None:
    """Each place sees its own GPUs; the one that others use is left out, unless it is named."""
    assert main(list(words)) == 3
    assert used == expected


@pytest.mark.parametrize("script", [(), ("--", "train.py")])
def test_diagnose(used: list[str], monkeypatch: pytest.MonkeyPatch, script: tuple[str, ...]) -> None:
    """It trains on the first GPU that is free, with a recipe and with a script."""

    def stands_for(*given: Any, environment: Any = None) -> None:
        used.append((environment or given[-1])["CUDA_VISIBLE_DEVICES"])
        raise LaunchError("it trains nothing")

    monkeypatch.setattr(diagnose, "diagnose_in_child", stands_for)
    monkeypatch.setattr(diagnose, "diagnose_script", stands_for)
    assert main(["diagnose", "--arm", "O2", "--no-preflight", *script]) == 3
    assert used == ["GPU-a"]
