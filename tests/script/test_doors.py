"""No arm is inert in any door of a script: what ran is what was declared, or the arm is refused with a reason."""

import os
from pathlib import Path
from typing import Any

import pytest

from ampcompare.backends.arm import Arm
from ampcompare.experiment.launch.script.rows import read_script_rows
from ampcompare.results.analysis.pairing.declared import role_comparisons
from tests.covering import covering
from tests.script.doors import ARMS, DOORS, LIBRARY_DOORS, OPTIMIZERS, script_of

FEW = [
    *("apex:O2", "native:fp16", "gemm:nvfp4,sr,keep=none"),
    *(
        pytest.param(arm, marks=pytest.mark.slow)
        for arm in (
            *("fp32", "apex:O1", "native:bf16,state=bf16", "native:bf16,weights=bf16,masters=fp32"),
            *("half:bf16,kahan", "half:bf16,masters=fp32,grads=fp32"),
        )
    ),
]


def check(arm: str, door: str, optimizer: str, folder: Path, python: Any) -> str:
    """Train a script under an arm, and return its weights as they were printed."""
    (folder / "train.py").write_text(script_of(door, optimizer))
    words = ["-m", "ampcompare", "exec", "--arm", arm, "--record", "rows.jsonl", "train.py"]
    done = python.run(words, folder, {**os.environ, "PYTHONWARNINGS": "ignore"})
    assert done.returncode == 0, done.stderr
    rows = read_script_rows(folder / "rows.jsonl")
    assert not [text for text in rows.remarks if "in its first" in text]  # each optimizer gets gradients
    ledger = rows.ledger
    assert ledger is not None
    assert ledger.forward
    found = role_comparisons(Arm.parse(arm).roles, ledger)
    assert [role.difference_text for role in found if role.differs] == []
    if "keep_fp32" in arm:  # of the first layer, which has two thirds of the multiply-adds
        assert 0.5 < ledger.forward["fp32"] < 1
    return str(done.stdout).splitlines()[-1]


@pytest.mark.integration
@covering({"arm": FEW, "door": list(DOORS), "optimizer": list(OPTIMIZERS)})
def test_what_ran_is_what_was_declared(
    arm: str, door: str, optimizer: str, tmp_path: Path, forked_python: Any
) -> None:
    check(arm, door, optimizer, tmp_path, forked_python)


@pytest.mark.integration
@pytest.mark.parametrize("door", list(DOORS))
def test_outputs_of_models_are_cast_in_every_door(door: str, tmp_path: Path, forked_python: Any) -> None:
    without, under = (
        check(arm, door, "sgd", tmp_path, forked_python)
        for arm in ("apex:O1", "apex:O1,cast_model_outputs=bf16")
    )
    assert under != without


def test_outputs_are_cast_as_by_apex(tmp_path: Path, forked_python: Any) -> None:
    """A plain script has the losses of one that calls `amp.initialize`, in its evaluation too."""
    step = """
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    print(repr(loss.item()), loss.dtype, model.eval()(x).dtype, model.train()(x).dtype)
"""
    by_apex = "from apex import amp\nmodel, optimizer = amp.initialize(model, optimizer, opt_level='O1', verbosity=0)\n"
    loop = "for step in range(4):\n    loss = model(x).square().mean()" + step
    plain = loop.replace("with amp.scale_loss(loss, optimizer) as scaled:", "if True:").replace(
        "scaled.", "loss."
    )
    head = script_of("plain", "sgd").partition("for step")[0]
    printed = []
    for text in (head + plain, head + by_apex + loop):
        (tmp_path / "train.py").write_text(text)
        words = ["-m", "ampcompare", "exec", "--arm", "apex:O1,cast_model_outputs=bf16", "train.py"]
        done = forked_python.run(words, tmp_path, {**os.environ, "PYTHONWARNINGS": "ignore"})
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.splitlines())
    assert printed[0] == printed[1]
    assert " torch.bfloat16 torch.bfloat16 torch.bfloat16" in printed[0][0]


@pytest.mark.extended
@covering({"arm": ARMS, "door": list(DOORS), "optimizer": list(OPTIMIZERS)})
def test_every_arm_meets_every_door_and_optimizer(
    arm: str, door: str, optimizer: str, tmp_path: Path, forked_python: Any
) -> None:
    check(arm, door, optimizer, tmp_path, forked_python)


@pytest.mark.slow
@pytest.mark.parametrize("arm", FEW)
@pytest.mark.parametrize("door", LIBRARY_DOORS)
def test_trainers_of_libraries(arm: str, door: str, tmp_path: Path, forked_python: Any) -> None:
    pytest.importorskip({"trainer": "transformers"}.get(door, door))
    check(arm, door, "adamw", tmp_path, forked_python)
