"""Bad input: the exit code, one line that says what was seen and what to do, and nothing lost."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import TINY

Call = Callable[..., Any]


def _check(done: Any, code: int, *parts: str) -> None:
    assert done.code == code, done.err
    assert done.out == ""
    assert len(done.lines) == 1, done.err
    assert done.lines[0].startswith("ampcompare: ")
    assert "Traceback" not in done.err
    for part in parts:
        assert part in done.err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["run", "--arm", "natve:fp16"], ["unknown backend 'natve'", "did you mean 'native'?"]),
        (
            ["run", "--backend", "half:dtype=bf16,master_weights"],
            ["it is an arm: --arm half:dtype=bf16,master_weights;"],
        ),
        (["run", "--arm", "apex-O2"], ["did you mean 'apex:O2'?"]),
        (
            ["find-batch", "--arm", "O2@old"],
            ["@old names a stack that is not given", "add --stack old=COMMAND"],
        ),
        (["find-batch", "--stack", "old=python"], ["--stack old needs an arm that trains there"]),
        (["find-batch", "--arm", "script"], ["searches the batch of a recipe", "use fp32"]),
        (
            ["compare", "--capsule", "2"],
            ["--capsule STEP needs a script; write: ampcompare compare --capsule"],
        ),
        (["run", "--first-weights", "old"], ["--first-weights old is for a script after --"]),
        (["run", "--arm", "fp32,apex:O2"], ["names 2 arms, fp32 and apex:O2, but one arm is expected here"]),
        (["run", "--arm", "apex:02"], ["write O2"]),
        (["compare", "--arm", "fp32", "--arm", "fp32"], ["'fp32' is named twice"]),
        (["compare", "--seeds", "4-0"], ["seeds '4-0'"]),
        (["compare", "--set", "arm=half"], ["a comparison needs a list of arms", "arm: half"]),
        (["run", "--epochs", "0"], ["recipe.epochs", "at least 1", "seen: 0"]),
        (["run", "--lr", "nan"], ["recipe.optimizer.lr", "seen: nan"]),
        (["run", "--device", "gpu"], ["device 'gpu' is unknown; use auto, cpu, cuda"]),
        (["run", "--dtype", "bf16"], ["--dtype needs --backend NAME, whose option it is; give both"]),
        (
            ["run", "--arm", "half", "--dtype", "bf16"],
            ["--dtype is not for --arm, whose text has its options; give only"],
        ),
        (["run", "--backend", "fp32", "--loss-scale", "2"], ["'fp32' has no option 'loss_scale'"]),
        (["run", "--set", "epochs"], ["--set 'epochs' is not NAME=VALUE"]),
        (
            ["run", "--set", "recipe.epohcs=3"],
            ["no setting 'recipe.epohcs'", "did you mean 'recipe.epochs'?"],
        ),
        (["run", "--model-arg", "width"], ["--model-arg 'width' is not NAME=VALUE"]),
        (["report", "nowhere"], ["there is no nowhere", "a run directory, a record.json or a report.json"]),
        (["report", "."], ["holds no records"]),
        (["diagnose", "--compile", "eager", *TINY], ["--compile"]),
        (["profile", "--steps", "0", *TINY], ["--steps must be at least 1"]),
        (["profile", "--nproc-per-node", "2", *TINY], ["only a script after --"]),
        (["explain", "O1", "--arch", "mlp", "--data", "digit"], ["digits"]),
        (["explain", "O1", "--data", "synthetic"], ["--data is for a script or a model", "--arch"]),
        (["diagnose", "--prefix", "3", *TINY], ["--prefix is for --ahead"]),
        (["diagnose", "--ahead", "--no-cures", *TINY], ["--no-cures is not for --ahead"]),
        (["migrate", "--steps", "3", "train.py"], ["--steps is for --verify"]),
        (
            ["migrate", "--verify", "--write", "train.py"],
            ["--write is not for --verify, which changes no file"],
        ),
        (["judge", "--example", "--time-margin", "-2"], ["the time margin is -2 %"]),
    ],
)
def test_bad_words(call: Call, words: list[str], parts: list[str]) -> None:
    """Words that cannot be used end with exit code 2 and one line, before anything runs."""
    _check(call(*words), 2, *parts)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["comapre"], "Did you mean 'compare'?"),
        (["run", "--opt-levell", "O2"], "Did you mean '--opt-level'?"),
        (["run", "--engine", "nvida"], "Did you mean 'nvidia'?"),
        (["run", "--epochs", "many"], "'many' is not a valid integer"),
        (["report", ".", "--format", "pdf"], "'pdf' is not one of"),
        (["run", "surplus"], "unexpected extra argument (surplus)"),
        (["diagnose", "--reference", "float16", *TINY], "float32"),
        (["compare", "--emit-cells", "", *TINY], "the path is empty"),
    ],
)
def test_usage(call: Call, words: list[str], part: str) -> None:
    """Unknown commands and options end with exit code 2, the usage, and the nearest name."""
    done = call(*words)
    assert (done.code, done.out) == (2, "")
    assert part in done.lines[-1]
    assert "Usage: " in done.err


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("recipe: [1", ["is not YAML: line 1, column 11: expected ',' or ']'"]),
        ("recipe: [1,\n2\n", ["is not YAML: line 3, column 1", "that begins in line 1"]),
        ("epochs: 1\n", ["did you mean 'recipe.epochs'?"]),
        ("- 1\n- 2\n", ["holds list, not a mapping of settings"]),
        ("recipe: {epochs: 0}\n", ["recipe.epochs", "seen: 0"]),
        ("recipe: 3\n", ["recipe: it is a group of settings", "seen: 3"]),
        (b"\xff\xfe\xfa", ["cannot read the config file"]),
        ("1: 2\n", ["there is no setting 1"]),
    ],
)
def test_bad_config_files(call: Call, tmp_path: Path, content: str | bytes, parts: list[str]) -> None:
    """A file that is not YAML, not a mapping, or holds a mistake is refused with the mistake."""
    path = tmp_path / "config.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    _check(call("run", "--config", str(path), "--dry-run"), 2, *parts)


def test_nothing_is_lost_by_a_mistake(call: Call, tmp_path: Path) -> None:
    """A run directory is byte for byte what it was after a call that could not run."""
    out = str(tmp_path / "out")
    assert call("run", "--arch", "mlp", "-o", out, tiny=True).code == 0
    before = {path: path.read_bytes() for path in Path(out).rglob("*") if path.is_file()}
    assert call("run", "--arch", "mlp", "-o", out, "--epochs", "0").code == 2
    assert call("run", "--arch", "mymod:broken", "-o", out, tiny=True).code == 2
    assert call("compare", "--arm", "apex:02", "-o", out, tiny=True).code == 2
    assert {path: path.read_bytes() for path in before} == before


def test_records_that_cannot_be_read(call: Call, tmp_path: Path) -> None:
    """A cut, emptied, newer or altered record is refused by `report`, named by its path, and left as it is."""
    assert call("run", "--arch", "mlp", "-o", str(tmp_path), tiny=True).code == 0
    (path,) = tmp_path.glob("cells/*/record.json")
    text = path.read_text()
    newer = "schema 99, written by a newer ampcompare, and this one reads up to 2; upgrade"
    for changed, part in (
        (text[: len(text) // 2], "not JSON"),
        ("", "not JSON"),
        (text.replace('"schema": 2', '"schema": 99'), newer),
        (text.replace('"schema": 2,', ""), "no schema number"),
        (text.replace('"completed"', '"splendid"'), "status"),
    ):
        path.write_text(changed)
        for target in (path, tmp_path):
            _check(call("report", str(target)), 2, str(path), part)
        assert path.read_text() == changed


def test_runs_of_different_recipes_are_no_table(call: Call, tmp_path: Path) -> None:
    """Runs that differ in more than arm and seed are not averaged into one row: the difference is named."""
    for words in (["--seed", "0"], ["--seed", "1"], ["--arm", "half"]):
        assert call("run", "--arch", "mlp", "-o", str(tmp_path), *words, tiny=True).code == 0
    table = call("report", str(tmp_path)).out.partition("\n---")[2]
    assert [line.partition(" ")[0] for line in table.splitlines()[1:4]] == ["fp32", "half", ""]
    assert call("run", "--arch", "mlp", "-o", str(tmp_path), "--lr", "0.5", tiny=True).code == 0
    _check(call("report", str(tmp_path)), 2, "different settings (recipe.optimizer.lr)", "record.json")


def test_every_cell_of_a_comparison_failed(call: Call, tmp_path: Path) -> None:
    """Where all cells fail alike the cause is said once more at the end, with its exit code; `--json` still answers."""
    words = ["compare", "--arm", "fp32,half", "--seeds", "0", "--arch", "mymod:broken", "-o", str(tmp_path)]
    done = call(*words, tiny=True)
    assert (done.code, done.out) == (2, "")
    assert done.lines[-1].startswith("ampcompare: factory mymod:broken: calling it raised")
    assert "nothing else was started" in done.lines[-1]
    words.append("--no-preflight")
    done = call(*words, tiny=True)
    assert (done.code, done.out) == (2, "")
    assert done.lines[-1].startswith("ampcompare: every cell failed: factory mymod:broken")
    done = call(*words, "--json", tiny=True)
    assert done.code == 2
    assert {record["status"] for record in done.json()["records"]} == {"failed"}
    assert json.loads((tmp_path / "report.json").read_text())["arms"]
