"""Which arms a step can be repeated under, and the environment of a side in a stack."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ampcompare.base.errors import AmpCompareError
from ampcompare.base.processes.script_environment import ONE_THREAD
from ampcompare.experiment import replay
from ampcompare.experiment.launch.script import stacks
from ampcompare.experiment.replay import replay_variants_of_changes
from ampcompare.settings.stack import StackConfig


def test_an_arm_is_a_change_in_its_one_spelling() -> None:
    (side, other) = replay_variants_of_changes(["arm=bf16", "arm=O1"], {}, None, ["train.py"])
    assert (side.name, side.changes) == ("arm=native:bf16", {"arm": "native:bf16"})
    assert other.name == "arm=apex:O1"


@pytest.mark.parametrize(
    ("arm", "why"),
    [
        (
            "O2",
            "it holds weights in 16 bits, so that its step does not start from the numbers of the capsule",
        ),
        ("half", "arm=native:fp16 computes from those, and compare trains half"),
        ("half:bf16", "arm=native:bf16 computes from those"),
        ("bf16,state=bf16", "it holds the state of the optimizer in 16 bits"),
        ("gemm:fp8", "its products have number formats of their own"),
        ("fp8", "cannot replace amp in a script"),
        ("script", "it is the step as it is"),
        ("nosuch", "unknown backend"),
    ],
)
def test_other_arms_are_refused_with_the_reason(arm: str, why: str) -> None:
    with pytest.raises(AmpCompareError, match=why):
        replay_variants_of_changes([f"arm={arm}"], {}, None, ["train.py"])


@pytest.mark.integration
def test_a_side_in_a_stack_has_the_threads_and_hashes_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the user has set: the sides are compared to the last bit."""
    for name in ONE_THREAD:
        monkeypatch.setenv(name, "3")
    monkeypatch.setattr(stacks, "inspect_stack", lambda stack, folder: SimpleNamespace(fault=""))
    path = tmp_path / "environment.json"
    code = f"import json, os; open({str(path)!r}, 'w').write(json.dumps(dict(os.environ)))"
    stack = StackConfig(name="own", command=(sys.executable,))
    assert replay._exit_code_and_output_in_stack(stack, ["-c", code], tmp_path) == (0, "")
    assert ONE_THREAD.items() <= json.loads(path.read_text(encoding="utf-8")).items()
