"""`migrate --verify --stack`: the unchanged script in another environment, the rewritten one here."""

import dataclasses
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampcompare.base.errors import EnvironmentUnfit, LaunchError
from ampcompare.experiment.launch.script import stacks
from ampcompare.experiment.rewrite_comparison import (
    DIFFERENT,
    EQUAL,
    WITHIN,
    compare_runs,
    compare_starts,
    cut_runs_to_common_steps,
    differences_beyond_twin,
)
from ampcompare.experiment.script_run import ScriptRun
from ampcompare.experiment.verify import verify_rewritten_script
from ampcompare.settings.stack import StackConfig, parse_stacks

RUN = ScriptRun(
    [1.0, 0.5],
    [1.0, 1.0],
    [(0, True), (0, True)],
    {},
    {"0.0": np.array([1.0, 2.0])},
    batches=("a", "b"),
    place="there",
)
# What amp does in fp32, in the files and by the names that the genuine one has.
APEX = {
    "__init__.py": "",
    "amp/__init__.py": """
from ._amp_state import master_params
from .frontend import initialize
from .handle import scale_loss
""",
    "amp/_amp_state.py": """
class State: pass
_amp_state = State()
def master_params(optimizer):
    for group in optimizer.param_groups:
        yield from group["params"]
""",
    "amp/scaler.py": """
class LossScaler:
    dynamic = False
    def loss_scale(self): return 1.0
    def update_scale(self): return False
""",
    "amp/frontend.py": """
import os, types, torch
from ._amp_state import _amp_state
from .scaler import LossScaler
def initialize(models, optimizers, opt_level="O1"):
    _amp_state.opt_properties = types.SimpleNamespace(enabled=True, opt_level=opt_level)
    _amp_state.loss_scalers = [LossScaler()]
    if os.environ.get("CASE") == "batches":
        torch.rand(3)
    if os.environ.get("CASE") == "rate":
        optimizers.param_groups[0]["lr"] *= 1.5
    return _initialize(models, optimizers, _amp_state.opt_properties)
def _initialize(models, optimizers, properties):
    return models, optimizers
""",
    "amp/handle.py": """
import contextlib
from ._amp_state import _amp_state
@contextlib.contextmanager
def scale_loss(loss, optimizers, loss_id=0):
    yield loss * 1.0
    _amp_state.loss_scalers[loss_id].update_scale()
""",
}
SCRIPT = """
import sys
import torch
from apex import amp

torch.set_num_threads(1)
if "seeded" in sys.argv and sys.flags.no_site:  # in the stack
    torch.rand(3)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
if "seeded" in sys.argv:
    torch.manual_seed(1)
model, optimizer = amp.initialize(model, optimizer, opt_level=sys.argv[1])
for step in range(9):
    x, y = torch.randn(4, 8), torch.randint(2, (4,))
    loss = torch.nn.functional.cross_entropy(model(x).float(), y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
    optimizer.step()
    optimizer.zero_grad()
"""
CASES = {  # of the stack, with the arguments, the exit code and what is said
    "same": (
        ["O0"],
        0,
        ["first weights: equal in both", f"verdict: {EQUAL}; you can go on with the rewritten files:"],
    ),
    "weights": (
        ["O0", "seeded"],
        0,
        ["first weights: 4 tensors differ between", f"weights: {EQUAL} after the last step"],
    ),
    "batches": (
        ["O0"],
        1,
        ["first weights: equal in both", "verdict: cannot tell, since batch 1 is not the same"],
    ),
    "rate": (
        ["O0"],
        1,
        ["so the stacks are apart, not the rewrite", f"verdict: {DIFFERENT}; keep the original"],
    ),
}


def _stack(command: str) -> StackConfig:
    stacks._known.clear()
    return parse_stacks({"old": command})["old"]


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """The command of this Python with its torch and a small Apex, without ampcompare."""
    for name, text in APEX.items():
        path = tmp_path / "site" / "apex" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    paths = f"{tmp_path / 'site'}:{sysconfig.get_paths()['purelib']}"
    return f"env PYTHONPATH={paths} {sys.executable} -S"


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.usefixtures("forked_runs")
def test_the_rewritten_script_trains_as_the_apex_of_a_stack(
    bare: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, stack = tmp_path / "train.py", _stack(bare)
    script.write_text(SCRIPT, encoding="utf-8")
    for case, (arguments, code, words) in CASES.items():
        monkeypatch.setenv("CASE", case)
        said: list[str] = []
        assert (
            verify_rewritten_script(
                str(script), arguments, steps=6, say=said.append, how="rewrite", stack=stack
            )
            == code
        ), said
        assert "in the stack old (Python " in said[0]
        assert "the genuine Apex of unknown version): 6 steps, 0 skipped, 6 backward passes" in said[0]
        for each in words:
            assert any(line.startswith(each) for line in said), (case, each, said)
    assert script.read_text(encoding="utf-8") == SCRIPT


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.usefixtures("forked_runs")
def test_without_apex_the_ampcompare_of_a_stack_trains_there(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    said: list[str] = []
    assert (
        verify_rewritten_script(
            str(script), ["O1"], steps=6, say=said.append, how="rewrite", stack=_stack(sys.executable)
        )
        == 0
    )
    assert said[0].startswith("unchanged, on ampcompare's engine in the stack old (Python ")
    assert f"weights: {EQUAL} after every step" in said


@pytest.mark.slow
@pytest.mark.integration
def test_what_cannot_run_in_a_stack_is_said(bare: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    run = {"steps": 6, "say": lambda line: None}
    with pytest.raises(EnvironmentUnfit, match="the stack old cannot be started"):
        verify_rewritten_script(str(script), ["O0"], stack=_stack(str(tmp_path / "none")), **run)  # type: ignore[arg-type]
    (tmp_path / "site" / "apex" / "amp" / "handle.py").write_text(
        "raise OSError('no kernels')", encoding="utf-8"
    )
    with pytest.raises(
        LaunchError, match="unchanged script in the stack old ended with exit code 1: OSError: no kern"
    ):
        verify_rewritten_script(str(script), ["O0"], stack=_stack(bare), **run)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"batches": ("a",)}, ""),
        ({"batches": ("a", "c")}, "batch 2 is not the same in both stacks"),
        ({"draws": ("d",)}, "the generators differ where the forward pass draws"),
    ],
)
def test_runs_with_other_batches_or_draws_are_no_pair(change: dict[str, Any], why: str) -> None:
    assert compare_starts(RUN, dataclasses.replace(RUN, **change))[0].startswith(why)
    assert bool(compare_starts(RUN, dataclasses.replace(RUN, **change))[0]) == bool(why)


def test_last_weights_are_compared_where_no_others_are_known() -> None:
    assert compare_runs(RUN, RUN) == (
        EQUAL,
        [*compare_runs(RUN, RUN)[1][:3], f"weights: {EQUAL} after the last step"],
    )
    near = dataclasses.replace(RUN, weights={"0.0": np.array([1.0, 2.001])})
    assert compare_runs(RUN, near)[0] == WITHIN
    assert compare_runs(RUN, dataclasses.replace(RUN, weights={"0.0": np.array([1.0, 3.0])}))[0] == DIFFERENT
    assert "not compared" in compare_runs(dataclasses.replace(RUN, weights={}), RUN)[1][3]


def test_two_optimizers_are_compared_as_far_as_both_runs_went() -> None:
    weights = {"0.0": np.ones(2), "1.0": np.ones(2)}
    there = ScriptRun(
        [1.0] * 3, [1.0] * 3, [(0, True), (1, True), (0, True)], {}, weights, is_cut=True, place="there"
    )
    here = dataclasses.replace(there, applied=[*there.applied, (1, True)], is_cut=True, place="")
    first, second = cut_runs_to_common_steps(there, here)
    assert first.applied == second.applied
    assert set(first.weights) == {"0.0"}
    ended = dataclasses.replace(there, is_cut=False)
    # it made fewer steps by itself
    assert compare_runs(*cut_runs_to_common_steps(ended, here))[0] == DIFFERENT


def test_a_twin_of_the_rewritten_script_shows_what_roundings_make() -> None:
    base = dataclasses.replace(RUN, norms={"0": [1.0, 1.0]})
    there = dataclasses.replace(base, losses=[1.0, 0.51])
    twin = dataclasses.replace(base, losses=[1.0, 0.5025])
    assert differences_beyond_twin(there, base, twin, base) == []
    assert "twin of the rewritten" in differences_beyond_twin(there, base, base, base)[0]
    moved = dataclasses.replace(base, weights={"0.0": np.array([1.0, 2.9])})
    assert compare_runs(moved, base, twin, base)[0] == DIFFERENT
    assert compare_runs(moved, base, moved, base)[0] == WITHIN
