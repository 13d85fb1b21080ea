"""`ampcompare reproduce`: claims listed, chosen, run and told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampcompare.experiment.claims import definition as claims
from ampcompare.experiment.claims.definition import Study

Call = Callable[..., Any]
TINY = Study.model_validate(
    {
        "source": "a post",
        "shapes": {
            "tiny": {
                "seeds": "0-4",
                "arms": ["fp32"],
                "settings": {
                    "device": "cpu",
                    "recipe": {
                        "data": {"name": "digits", "train_size": 64, "val_size": 32},
                        "model": {"arch": "mlp"},
                        "optimizer": {"lr": 1e30},
                        "schedule": {"name": "constant", "warmup_epochs": 0},
                        "epochs": 1,
                        "batch_size": 8,
                    },
                },
            }
        },
        "claims": [
            {
                "name": "explodes",
                "says": "a huge rate diverges",
                "published": "NaN",
                "shape": "tiny",
                "tests": [{"kind": "diverges", "row": "fp32"}],
            }
        ],
    }
)


@pytest.fixture
def tiny_study(monkeypatch: pytest.MonkeyPatch) -> None:
    """A study of one claim that takes a second."""
    monkeypatch.setattr(claims, "load_study", lambda name: TINY)
    monkeypatch.setattr("ampcompare.experiment.claims.reproduce.load_study", lambda name: TINY)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_study")
def test_a_claim_is_run_and_told(call: Call, tmp_path: Path) -> None:
    """The table has the claim with its verdict, files lie in the folder, and a second call trains nothing."""
    words = ("reproduce", "articles", "-o", str(tmp_path))
    done = call(*words)
    assert done.code == 0
    assert "fp32: diverged 5/5" in done.out
    assert "1 claims: holds 1." in done.out
    assert done.lines[-1] == f"report: {tmp_path / 'reproduce.md'}"
    assert "| a huge rate diverges" in (tmp_path / "reproduce.md").read_text()
    assert json.loads((tmp_path / "reproduce.json").read_text())["claims"][0]["verdict"] == "holds"
    again = call(*words, "--json")
    assert again.json()["claims"][0]["measured"] == "fp32: diverged 5/5"
    assert again.err.count("(cached)") == 5
    assert call(*words, "--quiet").err == ""


def test_claims_are_listed(call: Call) -> None:
    """`--list` names every claim of the study and runs nothing; names choose among them."""
    names = [line.split()[0] for line in call("reproduce", "articles", "--list").out.splitlines()[2:]]
    assert len(names) >= 13
    assert {"half-diverges", "double-step", "native-faster"} <= set(names)
    assert len(call("reproduce", "articles", "double-step", "--list").out.splitlines()) == 3


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("half-divergs",), "did you mean 'half-diverges'?"),
        (("--budget", "soon"), "--budget 'soon' is not a time"),
    ],
)
def test_mistakes_are_one_line(call: Call, words: tuple[str, ...], part: str) -> None:
    """A mistyped claim or time is told before anything runs, and ends with 2."""
    done = call("reproduce", "articles", *words)
    assert (done.code, len(done.lines)) == (2, 1)
    assert part in done.err


@pytest.mark.usefixtures("tiny_study")
def test_a_gpu_is_asked_for_only_where_a_claim_needs_one(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that needs none starts no process that looks for one."""
    monkeypatch.setattr("ampcompare.experiment.claims.reproduce.sees_gpu", lambda: pytest.fail("it was asked for"))
    assert call("reproduce", "articles", "-o", str(tmp_path)).code == 0
