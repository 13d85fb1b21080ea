"""What an arm that cannot train advises: of other arms those that the same preflight has seen to train."""

import json
from pathlib import Path
from typing import Any

import pytest

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ArmAdvice, UnsupportedCombination
from ampcompare.base.files.run_files import CellFile
from ampcompare.experiment.launch.contract import BY_HAND, Launcher, record_of_failed_cell
from ampcompare.experiment.launch.script.rows import read_script_rows
from ampcompare.experiment.preflight import run_trials_of_rows
from ampcompare.results.records.document import dump_json
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import RunConfig
from ampcompare.settings.script import ScriptConfig

SEEN = "train.py:3: under apex:O2 an operation gets tensors of both types"
END = {"kind": "end", "exit_code": 2, "error": "with all its arms"}


class ByArm(Launcher):
    """Trains some arms; others fail with advice."""

    zero_denominators = 0.0

    def __init__(self, able: set[str], advice: ArmAdvice) -> None:
        self.able, self.advice, self.asked = able, advice, list[str]()

    def launch(self, config: RunConfig, folder: Path, on_progress: Any = None) -> RunRecord:
        self.asked.append(config.arm)
        rows: list[dict[str, Any]] = [{"kind": "header"}]
        step = {
            "kind": "step",
            "optimizer": 0,
            "applied": True,
            "seconds": 0.01,
            "lr": None,
            "grad_norm": None,
        }
        if config.arm in self.able:
            rows += [*3 * [step], {"kind": "ledger", "zero_denominators": self.zero_denominators}]
        else:
            advice = {"arms": self.advice.arms, "remedy": self.advice.remedy, "seen": SEEN}
            rows.append({**END, "advice": advice} if self.advice.arms else END)
        folder.mkdir(parents=True)
        (folder / CellFile.SCRIPT).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        steps = read_script_rows(folder / CellFile.SCRIPT).steps
        (folder / CellFile.STEPS).write_text("".join(f"{dump_json(step, indent=None)}\n" for step in steps))
        record = record_of_failed_cell(config, "with all its arms", exit_code=2)
        return (
            record.model_copy(update={"status": "completed", "error": None})
            if config.arm in self.able
            else record
        )


@pytest.mark.parametrize(
    ("able", "arms", "tried", "said"),
    [
        ({"fp32", "native:bf16"}, ("native:bf16", "apex:O1"), ["apex:O1"], "; compare native:bf16, or cast it"),
        ({"fp32", "apex:O2,keep_fp32=head"}, ("apex:O2,keep_fp32=head",), ["apex:O2,keep_fp32=head"],
         "; compare apex:O2,keep_fp32=head, or cast it"),
        ({"fp32"}, ("native:bf16", "native:fp16"), ["native:fp16"], "; cast it"),
        ({"fp32"}, ("fp32", "native:bf16"), [], "; compare fp32, or cast it"),
    ],
)  # fmt: skip
def test_advice_names_arms_that_were_seen_to_train(
    tmp_path: Path, able: set[str], arms: tuple[str, ...], tried: list[str], said: str
) -> None:
    rows = {
        arm: RunConfig(arm=arm, script=ScriptConfig(name="train.py"))
        for arm in ("fp32", "native:bf16", "apex:O2")
    }
    launcher = ByArm(able, ArmAdvice(arms, "cast it"))
    found = run_trials_of_rows(rows, launcher, (0, 1), tmp_path)
    assert launcher.asked == [*rows, *tried]
    assert found.arms["apex:O2"].error == SEEN + said
    assert found.arms.keys() == rows.keys()


class ByKept(ByArm):
    """Trains an arm that keeps both heads; with one of them it advises to keep the other too."""

    def launch(self, config: RunConfig, folder: Path, on_progress: Any = None) -> RunRecord:
        kept = config.parsed_arm.keep_fp32
        self.advice = ArmAdvice(
            (f"apex:O2,keep_fp32={f'{kept}|' if kept else ''}{'ab'[not kept]}",), "cast it"
        )
        return super().launch(config, folder, on_progress)


def test_advice_to_keep_modules_is_followed_until_the_script_trains(tmp_path: Path) -> None:
    rows = {
        arm: RunConfig(arm=arm, script=ScriptConfig(name="train.py"), device="cpu")
        for arm in ("fp32", "apex:O2")
    }
    launcher = ByKept({"fp32", str(Arm.parse("apex:O2,keep_fp32=b|a"))}, ArmAdvice())
    found = run_trials_of_rows(rows, launcher, (0, 1), tmp_path)
    assert launcher.asked == [*rows, "apex:O2,keep_fp32=b", str(Arm.parse("apex:O2,keep_fp32=b|a"))]
    assert found.arms["apex:O2"].error == f"{SEEN}; compare apex:O2,keep_fp32=b|a, or cast it"


def test_an_arm_that_divides_by_an_eps_of_zero_is_not_advised(tmp_path: Path) -> None:
    """Its first losses are finite, and its weights are not."""
    rows = {arm: RunConfig(arm=arm, script=ScriptConfig(name="train.py")) for arm in ("fp32", "apex:O2")}
    launcher = ByArm({"fp32", "half:keep_fp32=fft"}, ArmAdvice(("half:keep_fp32=fft",), "cast it"))
    launcher.zero_denominators = 0.25
    found = run_trials_of_rows(rows, launcher, (0, 1), tmp_path)
    assert launcher.asked == [*rows, "half:keep_fp32=fft"]
    assert found.arms["apex:O2"].error == f"{SEEN}; cast it"


def test_an_error_without_advice_stays_as_it_is(tmp_path: Path) -> None:
    rows = {arm: RunConfig(arm=arm, script=ScriptConfig(name="train.py")) for arm in ("fp32", "half")}
    found = run_trials_of_rows(rows, ByArm({"fp32"}, ArmAdvice()), (0, 1), tmp_path)
    assert found.arms["half"].error == "with all its arms"


def test_a_stack_that_cannot_be_started_is_left_to_its_cells(tmp_path: Path) -> None:
    """Each says in its own folder how it is recorded by hand; a folder of the preflight is gone by then."""

    class ByHand(ByArm):
        def launch(self, config: RunConfig, folder: Path, on_progress: Any = None) -> RunRecord:
            record = super().launch(config, folder, on_progress)
            return (
                record
                if config.arm in self.able
                else record_of_failed_cell(config, "no python", exit_code=3, **{BY_HAND: True})
            )

    rows = {arm: RunConfig(arm=arm, script=ScriptConfig(name="train.py")) for arm in ("script", "fp32")}
    found = run_trials_of_rows(rows, ByHand({"fp32"}, ArmAdvice()), (0, 1), tmp_path)
    assert found.arms.keys() == {"fp32"}
    assert not found.untried


def test_advice_in_words() -> None:
    error = UnsupportedCombination.with_advice("no", "fp32", "script", "apex:O1", remedy="cast it")
    assert str(error) == "no; compare fp32, script or apex:O1, or cast it"
    assert str(error.advice.with_arms(["script"])) == "compare script, or cast it"
    assert str(UnsupportedCombination.with_advice("no", remedy="cast it")) == "no; cast it"
    assert (str(ArmAdvice()), str(UnsupportedCombination.with_advice("no", "fp32"))) == (
        "",
        "no; compare fp32",
    )
