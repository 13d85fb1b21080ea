"""What the first steps of a script and of a recipe tell of the rest."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ampcompare
from ampcompare.base.errors import ConfigError, LaunchError
from ampcompare.results.records.outlook import ShareLost, WatchedFirstSteps

pytestmark = pytest.mark.integration

SCRIPT = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=300)
for step in range(300):
    batch = torch.randn(16, 8)
    loss = torch.nn.functional.cross_entropy(model(batch), batch[:, :4].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    assert step < 30, "the prefix is over"
"""


@pytest.fixture
def look(forking: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Look ahead of a script that is written beside."""
    monkeypatch.setattr("ampcompare.experiment.diagnose.subprocess", forking)
    monkeypatch.chdir(tmp_path)

    def run(source: str, *arms: str, **options: Any) -> Any:
        Path("train.py").write_text(source)
        return ampcompare.look_ahead(arms, script=["train.py"], device="cpu", prefix=20, **options)

    return run


@pytest.mark.slow
def test_a_script(look: Any) -> None:
    """It runs its first steps only; weights in bf16 lose too much by its own schedule, and master weights cure that."""
    found = look(SCRIPT, "half:bf16", "half:bf16,masters=fp32", "O2")
    bf16, masters, o2 = found.arms
    assert (bf16.word, bf16.part) == ("will not hold", "weights")
    assert bf16.share_rest > bf16.share_now > 0
    assert [masters.word, o2.word] == ["no fault in sight"] * 2
    assert (found.prefix.steps, found.prefix.total) == (20, 300)
    assert found.prefix.total_from == "the loops around a step, 300"
    assert found.prefix.basis == "its scheduler, to step 300"
    assert found.twin is not None
    assert 0 < found.twin < 0.01


def test_a_script_that_holds_bf16_weights(look: Any) -> None:
    """The script as it is written loses its updates; its weights are lifted to see how many."""
    halved = SCRIPT.replace("4))\n", "4)).bfloat16()\n", 1).replace(
        "model(batch)", "model(batch.bfloat16()).float()"
    )
    found = look(halved, "half:bf16,masters=fp32", twin=False)
    assert found.prefix.weights == "bf16"
    assert found.arms[0].arm == "script"
    assert [arm.word for arm in found.arms] == ["will not hold", "no fault in sight"]


def test_a_script_that_is_shorter_than_the_prefix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Updates are rounded in the second half of a prefix, so that it runs again with as many steps as there are."""
    asked = []

    def prefix_of(options: Any, environment: Any, *, is_twin: bool) -> WatchedFirstSteps:
        asked.append(options.prefix)
        made = min(options.prefix, 30)
        shares = {"bf16": ShareLost(now=0.6, rest=0.6)} if options.prefix == made else {}
        return WatchedFirstSteps(steps=made, shares=shares)

    monkeypatch.setattr("ampcompare.experiment.look_ahead._run_prefix_of_training", prefix_of)
    script = tmp_path / "train.py"
    script.touch()
    found = ampcompare.look_ahead(["half:bf16"], script=[str(script)], device="cpu")
    assert asked == [100, 30, 30]
    assert found.arms[0].word == "will not hold"


def test_a_script_without_a_step(look: Any) -> None:
    """A script that never trains, or fails before, is an error with its reason."""
    with pytest.raises(LaunchError, match="showed no first step"):
        look("print('done')", "half:bf16")
    with pytest.raises(LaunchError, match="ZeroDivisionError"):
        look("1 / 0", "half:bf16")


@pytest.mark.usefixtures("forked_children")
def test_a_recipe() -> None:
    """The schedule of a recipe is known to its end."""
    found = ampcompare.look_ahead(
        ["half:bf16"],
        prefix=10,
        twin=False,
        device="cpu",
        **{"recipe.epochs": 1, "recipe.data.train_size": 640, "recipe.batch_size": 16},
    )
    assert found.prefix.total == 40
    assert found.twin is None
    assert found.arms[0].share_rest is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix": 5}, "a prefix of 5 steps is too short"),
        ({"prefix": 20, "steps": 20}, "--steps 20 is the length of the whole training"),
        ({"arms": []}, "there is no arm"),
    ],
)
def test_what_cannot_be_looked_at(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ampcompare.look_ahead(**{"arms": ["half:bf16"], "device": "cpu", **options})
