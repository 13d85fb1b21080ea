"""`exec --capsule` and `replay`, on a script as users have it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ampcompare.experiment.replay import read_capsule_facts
from tests.cli.conftest import Call
from tests.script.replay.steps import CONVOLUTIONS


def _keep(python: Any, folder: Path, step: int, script: str = CONVOLUTIONS) -> Any:
    """Keep a step of a script in its folder; `exec` changes the process that it runs in."""
    (folder / "train.py").write_text(script)
    words = ["-m", "ampcompare", "exec", "--capsule", str(step), "train.py"]
    return python.run(words, folder, dict(os.environ))


def _capsule(python: Any, folder: Path, script: str = CONVOLUTIONS) -> Path:
    done = _keep(python, folder, 2, script)
    assert done.returncode == 0, done.stderr
    assert "step 2 is in capsule.pt (0.0 MB)" in done.stderr
    return folder / "capsule.pt"


@pytest.mark.slow
def test_a_setting_and_another_script(
    call: Call, tmp_path: Path, forked_python: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is the answer, the script's own files stay, and JSON has what was found."""
    monkeypatch.chdir(tmp_path)
    capsule = _capsule(forked_python, tmp_path)
    (other := tmp_path / "other.py").write_text(
        CONVOLUTIONS.replace("nn.BatchNorm2d(8)", "nn.BatchNorm2d(8, eps=1e-3)") + "open('trace.txt', 'w')\n"
    )
    same = call("replay", str(capsule), "--change", "onednn=off")
    assert (same.code, same.out.startswith("onednn=off: noise: 12 modules")) == (0, True), same
    done = call("replay", str(capsule), "--json", "--", str(other))
    (found,) = json.loads(done.out)
    assert (done.code, found["answer"], found["findings"][0]["module"]) == (1, "another function", "norm1"), (
        found
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["capsule.pt", "other.py", "train.py"]


@pytest.mark.slow
def test_a_compiled_model_is_judged_as_a_whole(
    call: Call, tmp_path: Path, forked_python: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one without a length, where what torch makes of it has one that raises."""
    monkeypatch.chdir(tmp_path)
    capsule = _capsule(forked_python, tmp_path)
    done = call("replay", str(capsule), "--json", "--change", "compile=eager")
    (found,) = json.loads(done.out)
    assert (done.code, found["answer"], found["modules"], found["unjudged"]) == (0, "noise", 2, {}), found
    assert [one["module"] for one in found["errors"]] == ["Net", "CrossEntropyLoss", "(SGD)"]


@pytest.mark.slow
def test_inductor_draws_the_dropout_of_torch(
    call: Call, tmp_path: Path, forked_python: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = CONVOLUTIONS.replace("self.head(", "nn.functional.dropout(self.head(").replace(
        ".mean(1))", ".mean(1)), 0.3)"
    )
    assert script.count("dropout") == 1
    capsule = _capsule(forked_python, tmp_path, script)
    done = call("replay", str(capsule), "--json", "--change", "compile=inductor")
    (found,) = json.loads(done.out)
    assert (done.code, found["answer"], found["unjudged"]) == (0, "noise", {}), found


@pytest.mark.slow
def test_an_arm(call: Call, tmp_path: Path, forked_python: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules compute as the arm casts them, by Apex's functions too; the optimizer steps by true gradients."""
    monkeypatch.chdir(tmp_path)
    capsule = _capsule(forked_python, tmp_path)
    done = call("replay", str(capsule), "--json", "--change", "arm=fp32", "--change", "arm=O1")
    same, narrow = json.loads(done.out)
    assert (done.code, same["answer"], same["change"]) == (1, "noise", "arm=fp32"), done.err
    assert (narrow["answer"], narrow["change"], narrow["unjudged"]) == ("less exact", "arm=apex:O1", {}), (
        narrow
    )
    names = {one["module"] for one in narrow["findings"]}
    assert {"conv1", "conv2", "lstm.inner", "head"} <= names, names
    assert not {"(SGD)", "(loss)", "(gradients)"} & names, names


@pytest.mark.slow
def test_compare_keeps_a_step_with_its_first_seed(tmp_path: Path, forked_python: Any) -> None:
    """The seed of the first cell begins the script, which trains nothing else."""
    (tmp_path / "train.py").write_text("import sys\n" + CONVOLUTIONS + "print('ARGS', sys.argv[1:])\n")
    words = [
        "-m",
        "ampcompare",
        "compare",
        "--seeds",
        "3-4",
        "--capsule",
        "2",
        "--",
        "train.py",
        "--seed",
        "{seed}",
    ]
    done = forked_python.run(words, tmp_path, dict(os.environ))
    assert (done.returncode, "ARGS ['--seed', '3']" in done.stdout) == (0, True), done.stderr
    assert (facts := read_capsule_facts(tmp_path / "capsule.pt"))["step"] == 2
    assert facts["arguments"] == ["--seed", "3"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_what_cannot_be_replayed(
    call: Call, tmp_path: Path, forked_python: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with what was seen and what to do."""
    monkeypatch.chdir(tmp_path)
    late = _keep(forked_python, tmp_path, 50)
    assert (late.returncode, "no capsule: the script made no step 50" in late.stderr) == (3, True), (
        late.stderr
    )
    capsule = _capsule(forked_python, tmp_path)
    for words, text, code in (
        ([str(tmp_path / "train.py"), "--change", "threads=2"], "cannot read the capsule", 2),
        ([str(capsule)], "nothing is changed: give --change onednn=off", 2),
        ([str(capsule), "--change", "sdpa=fast"], "--change sdpa=fast: there is no such change", 2),
        ([str(capsule), "--stack", "old=/no/such/python"], "the stack old cannot be started", 4),
    ):
        done = call("replay", *words)
        assert (done.code, text in done.err) == (code, True), done
    (wide := tmp_path / "wide.py").write_text(CONVOLUTIONS.replace("nn.Linear(16, 10)", "nn.Linear(16, 12)"))
    done = call("replay", str(capsule), "--", str(wide))
    assert (done.code, "cannot tell" in done.out, "head.weight is [10, 16]" in done.out) == (3, True, True), (
        done
    )
