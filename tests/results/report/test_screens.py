"""What a terminal shows at 80 and 100 columns, against the texts in `screens/`.

After a wanted change, `WRITE_SCREENS=1 pytest tests/results/report/test_screens.py` writes them anew; read the diff.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampcompare.results.records.comparison import ArmSummary, Comparison, JudgedTable, NextStep
from ampcompare.results.report.base import document_of
from ampcompare.results.report.terminal import Terminal

SCREENS = Path(__file__).parent / "screens"
ARMS = (
    "fp32",
    "apex:O0",
    "apex:O1",
    "apex:O2",
    "apex:O3",
    "native:fp16",
    "native:bf16",
    "half:bn_fp32",
    "half",
)
UNTESTED: dict[str, Any] = {
    "metric_difference": None, "metric_difference_low": None, "metric_difference_high": None, "time_ratio": None,
    "time_ratio_low": None, "time_ratio_high": None, "time_verdict": "",
}  # fmt: skip
DIVERGED: dict[str, Any] = {
    **UNTESTED, "completed": 0, "diverged": 3, "metric_mean": None, "metric_sd": None,
    "accuracy_verdict": "diverged 3/3", "status": "diverged at step 1", "num_steps": 6,
    "invalid_time": "1 timed steps, 30 needed",
}  # fmt: skip
FAILED: dict[str, Any] = {
    **UNTESTED, "completed": 0, "failed": 3, "metric_mean": None, "metric_sd": None, "accuracy_verdict": "",
    "status": "failed: CUDA out of memory. Tried to allocate 2.00 GiB", "num_steps": None, "skipped_steps": None,
    "step_seconds_median": None, "peak_bytes": None,
}  # fmt: skip
EMULATED: dict[str, Any] = {
    "half": "fp16 emulated", "time_verdict": "not comparable (fp16 computed in fp32)", "time_ratio_low": None,
    "time_ratio_high": None, "accuracy_verdict": "inconclusive (≤24 more seeds)", "metric_difference_low": -0.0086,
    "metric_difference_high": 0.0086,
}  # fmt: skip
STEP = NextStep(
    command="ampcompare compare --arm fp32 --arm half --seeds 0-4 --margin 0.5 --output-dir runs/compare-8f1d0c2ab9",
    why="2 more seeds settle half, about 40 s",
)


def _row(arm: str, **values: Any) -> ArmSummary:
    base: dict[str, Any] = {
        "arm": arm, "engine": "compat 25.05" if arm.startswith("apex") else None, "half": None, "lr": 0.05,
        "seeds": [0, 1, 2], "completed": 3, "diverged": 0, "failed": 0, "metric_mean": 0.987, "metric_sd": 0.0032,
        "step_seconds_median": 0.1234, "peak_bytes": 8123 * 2**20, "num_steps": 330, "skipped_steps": 0,
        "status": "ok", "pairs": 3,
    }  # fmt: skip
    if arm != "fp32":
        base |= {
            "metric_difference": 0.0009, "metric_difference_low": -0.004, "metric_difference_high": 0.0041,
            "accuracy_verdict": "equivalent (±0.5)", "time_ratio": 0.52, "time_ratio_low": 0.49,
            "time_ratio_high": 0.55, "time_verdict": "better",
        }  # fmt: skip
    return ArmSummary(**{**base, **values})


def _comparison(
    changed: dict[str, dict[str, Any]], arms: tuple[str, ...] = ARMS, **values: Any
) -> Comparison:
    base: dict[str, Any] = {
        "command": "", "reference": arms[0], "seeds": [0, 1, 2], "records": [], "next_steps": [STEP],
        "arms": [_row(arm, **changed.get(arm, {})) for arm in arms],
        "headline": ["native:fp16 keeps fp32's accuracy (Δ +0.09 pp, within ±0.5).", "Speed: half 0.52x."],
        "reading": ["Correlation of top-1 with fp32 over seeds: half 0.87."],
    }  # fmt: skip
    return Comparison(**{**base, **values})


def _one_seed() -> Comparison:
    values = {"completed": 1, "seeds": [0], "pairs": 1, "metric_sd": None, "num_steps": 110}
    open_values = {
        **values, "metric_difference_low": None, "metric_difference_high": None, "time_ratio_low": None,
        "time_ratio_high": None, "accuracy_verdict": "inconclusive (fewer than 3 seeds)",
        "time_verdict": "inconclusive (fewer than 3 seeds)",
    }  # fmt: skip
    return _comparison({arm: values if arm == "fp32" else open_values for arm in ARMS}, seeds=[0])


def _mixed_engines() -> Comparison:
    return _comparison(
        {
            "apex:O1": {"engine": "nvidia 0.1", "accuracy_verdict": "non-inferior (margin 0.5)", "skipped_steps": 3},
            "half": {
                "accuracy_verdict": "worse", "metric_difference": -0.0112, "metric_difference_low": -0.0204,
                "metric_difference_high": -0.00002, "time_verdict": "worse", "time_ratio": 1.2, "time_ratio_low": 1.1,
                "time_ratio_high": 1.31,
            },
        }
    )  # fmt: skip


def _judged() -> Comparison:
    published = {
        **UNTESTED,
        "step_seconds_median": None,
        "peak_bytes": None,
        "num_steps": None,
        "engine": None,
    }
    one = {**published, "completed": 1, "metric_sd": None, "skipped_steps": None}
    low, high = -0.0070, 0.0044
    return _comparison(
        {
            "fp32": {**one, "metric_mean": 0.7592},
            "apex:O1": {
                **one, "metric_mean": 0.7579, "metric_difference": -0.0013, "metric_difference_low": low,
                "metric_difference_high": high, "accuracy_verdict": "inconclusive (≤6 more seeds)", "time_ratio": 1.03,
            },
            "half:bn_fp32 batch=1024 lr=0.4": {
                **one, "metric_mean": 0.7557, "metric_difference": -0.0035,
                "accuracy_verdict": "not comparable (batch 1024, not 4096; lr 0.4, not 1.6)",
            },
        },
        arms=("fp32", "apex:O1", "half:bn_fp32 batch=1024 lr=0.4"),
        judged=JudgedTable(references=["fp32"], sd=0.18),
    )  # fmt: skip


SCENES: dict[str, Callable[[], Comparison]] = {
    "equal": lambda: _comparison({}),
    "diverged": lambda: _comparison({"half": DIVERGED, "apex:O3": DIVERGED}),
    "invalid": lambda: _comparison(
        {
            arm: {
                "invalid_time": "load 9.0 on 2 cores",
                "time_verdict": "invalid measurement (load 9.0 on 2 cores)",
            }
            for arm in ("apex:O1", "native:fp16")
        }
    ),
    "emulated": lambda: _comparison(
        {arm: EMULATED for arm in ARMS if arm not in ("fp32", "apex:O0", "native:bf16")}
    ),
    "failed": lambda: _comparison({"apex:O2": FAILED}),
    "one-seed": _one_seed,
    "engines": _mixed_engines,
    "judge": _judged,
}


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("scene", SCENES)
def test_a_screen_is_as_it_was_read(scene: str, width: int) -> None:
    """The whole text, each line of which fits the terminal."""
    text = Terminal(width).render(SCENES[scene]())
    assert max(map(len, text.splitlines())) <= width
    screen = SCREENS / f"{scene}-{width}.txt"
    if os.environ.get("WRITE_SCREENS"):
        screen.write_text(text, encoding="utf-8")
    assert text == screen.read_text(encoding="utf-8")


@pytest.mark.parametrize("scene", SCENES)
def test_every_width_fits(scene: str) -> None:
    """From 66 columns on nothing is wider than the terminal, and whatever is left out is named."""
    comparison = SCENES[scene]()
    document = document_of(comparison)
    for width in (60, 66, 72, 90, 110, 140, 200):
        text = Terminal(width).document_text(document)
        assert max(map(len, text.splitlines())) <= width or width < 66
        heads = " ".join(text.split("\n\n")[1].partition("---")[0].split())
        hidden = " ".join(text.split()).partition("Not shown at this width:")[2]
        for head, lacking in (
            ("step", "step times"),
            ("peak", "peak memory"),
            ("time", "relative step times"),
        ):
            assert head in heads or lacking in hidden or comparison.judged is not None, (width, head)
        for row in comparison.arms:
            assert str(row.quality).partition(" (")[0] in text, width


def test_a_long_command_can_be_pasted() -> None:
    """It is cut before options, with a backslash at the end of each line but the last; in a pipe it is one line."""
    comparison = _comparison({})
    lines = Terminal(60).render(comparison).splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("  ampcompare compare"))
    command = [line.strip() for line in lines[start:] if line.strip()]
    assert all(line.endswith(" \\") for line in command[:-1])
    assert " ".join(line.removesuffix(" \\") for line in command) == STEP.command
    assert f"  {STEP.command}\n" in Terminal().render(comparison)


def test_a_single_arm_has_no_verdict_column() -> None:
    """The row of a run shows what was measured; nothing is compared."""
    text = Terminal(100).render(_comparison({}, arms=("fp32",), next_steps=[]))
    assert text.split("\n\n")[1].splitlines()[0].split("  ")[0] == "arm"
    assert "verdict" not in text
    assert "Δ" not in text.split("\n\n")[1]
