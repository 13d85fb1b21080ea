"""The command `convert`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ampcompare.cli import main
from tests.training.checkpoint.convert.small_scripts import NativeScript, train_apex

pytestmark = pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")


def test_the_command_converts_and_says_what_was_lost(
    tmp_path: Path, amp: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text and JSON of one conversion name level, what is carried and what is not; the exit code is 0."""
    path = tmp_path / "legacy.pt"
    train_apex(amp, path, "O2")
    assert main(["convert", str(path), str(tmp_path / "native.pt"), "--to", "native"]) == 0
    text = capsys.readouterr().out
    assert "native.pt: Apex O2 to torch.amp" in text
    assert "  not carried: the last bits of the weights" in text
    assert main(["convert", str(path), str(tmp_path / "native.pt"), "--to", "native", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["from"], document["to"], document["opt_level"]) == ("apex", "native", "O2")
    assert len(document["lost"]) == 2
    assert NativeScript().load(torch.load(tmp_path / "native.pt")) is None


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["a.pt"], "or --inspect"),
        (["a.pt", "b.pt"], "--to native or --to apex"),
        (["a.pt", "b.pt", "--inspect"], "writes nothing"),
        (["a.pt", "--inspect", "--opt-level", "O2"], "writes nothing"),
        (["none.pt", "b.pt", "--to", "native"], "cannot read the checkpoint none.pt: No such file"),
        (["none.pt", "--inspect"], "cannot read the checkpoint none.pt: No such file"),
    ],
)
def test_wrong_calls_of_the_command(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Usage errors and missing files are one line and exit code 2."""
    assert main(["convert", *arguments]) == 2
    assert says in capsys.readouterr().err
