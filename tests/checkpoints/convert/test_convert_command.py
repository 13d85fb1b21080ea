"""The command `convert`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ampcompare.cli import main
from tests.checkpoints.convert.small_scripts import NativeScript, train_apex

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
    assert [line.split(",")[0].split(":")[0] for line in document["lost"]] == [
        "whether the scale is static",
        "min_loss_scale and max_loss_scale",
        "the last bits of the weights",
    ]
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
def test_wrong_calls_of_the_command(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Usage errors and missing files are one line and exit code 2."""
    assert main(["convert", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["model.safetensors", "optimizer.pt", "scaler.pt", "training_args.bin", "trainer_state.json"],
         "name one of its model.safetensors, optimizer.pt, scaler.pt, training_args.bin"),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], "pytorch_model-00001-of-00002.bin"),
        (["latest", "global_step5/mp_rank_00_model_states.pt"], "global_step5/mp_rank_00_model_states.pt"),
        ([".metadata", "__0_0.distcp"], "dcp_to_torch"),
        (["notes.txt"], "none of .pt"),
        ([f"epoch_{number:02}.pth" for number in range(30)], "and 10 more"),
    ],
    ids=["Trainer", "shards", "DeepSpeed", "torch.distributed", "nothing", "many"],
)  # fmt: skip
def test_a_folder_names_its_files(
    names: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints of every suffix in it, one level below too, or the command that makes one file of many."""
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert main(["convert", str(tmp_path), "--inspect"]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "json" not in error
    assert "latest" not in error
