"""What `convert --inspect` says about checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampcompare.checkpoints.convert.inspect import inspect_file, inspection_lines
from ampcompare.checkpoints.store.file import write_checkpoint
from ampcompare.cli import main
from tests.checkpoints.convert.small_scripts import OPTIMIZER, SCALER, WEIGHTS

pytestmark = pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")


def saved_at(amp: Any, path: Path, opt_level: str, *, load_first: bool = False, steps: int = 6) -> None:
    """Write the checkpoint of a script with Apex."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    if load_first:
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for _ in range(steps):
        loss = model(torch.randn(16, 8)).square().mean() * 1e-3
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "amp": amp.state_dict(),
        "epoch": 1,
    }
    torch.save(state, path)
    amp._amp_state.close()


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
def test_the_opt_level_shows_in_the_numbers(tmp_path: Path, amp: Any, opt_level: str) -> None:
    """Apex stores no opt level; roundness of weights, batch norms and state and the scale tell it."""
    path = tmp_path / "a.pt"
    saved_at(amp, path, opt_level)
    found = inspect_file(path)
    assert (found.writer, found.level, found.format) == ("an Apex script", opt_level, "torch archive")
    assert [row["kind"] for row in found.rows] == ["weights", "optimizer"]
    assert found.keys == ["epoch"]


def test_the_traps_of_o2_are_shown(tmp_path: Path, amp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded weights without masters, and optimizer state that Apex loads in fp16."""
    path = tmp_path / "a.pt"
    saved_at(amp, path, "O2")
    (masters,) = inspect_file(path).traps
    assert "no masters were saved" in masters
    monkeypatch.setenv("AMPCOMPARE_APEX_STRICT", "1")
    saved_at(amp, path, "O2", load_first=True, steps=0)
    assert "optimizer state is fp16" in inspect_file(path).traps[1]


def test_our_layout_has_none_of_the_traps(tmp_path: Path, make_state: Any) -> None:
    """With masters in it no trap is named; the arm gives the level, and the checksum is right until a byte is not."""
    path = tmp_path / "a.pt"
    write_checkpoint(path, make_state(1 / 3))
    found = inspect_file(path)
    assert (found.writer, found.level, found.arm, found.checksum) == ("ampcompare", "O2", "apex:O2", "right")
    assert [row["kind"] for row in found.rows] == ["weights", "optimizer", "fp32 masters"]
    assert found.traps == []
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)
    assert "damaged" in inspect_file(path).checksum


@pytest.mark.parametrize(
    "state, writer",
    [
        ({"model": WEIGHTS, "optimizer": OPTIMIZER, "scaler": SCALER}, "a torch.amp script"),
        ({"model": WEIGHTS, "optimizer": OPTIMIZER}, "a script"),
        (WEIGHTS, "a state dict alone"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_who_wrote_it(tmp_path: Path, state: Any, writer: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each program is known by its keys, and scale and weights are found under its names."""
    path = tmp_path / "a.pt"
    torch.save(state, path)
    found = inspect_file(path)
    assert found.writer == writer
    assert [scale["scale"] for scale in found.scales] == ([16.0] if "growth_factor" in str(state) else [])
    kinds = [row["kind"] for row in found.rows]
    assert kinds[0] == "weights"
    assert found.traps == []
    assert main(["convert", "--inspect", str(path)]) == 0
    assert f"written by: {writer}" in capsys.readouterr().out


def test_objects_and_wrappers_and_no_scaler_are_shown(tmp_path: Path) -> None:
    """Objects have their place, wrapped names a note, and fp16 weights without a scaler a trap."""
    path = tmp_path / "a.pt"
    torch.save(
        {
            "state_dict": {"module.w": torch.full((9,), 0.3).half()},
            "optimizer": OPTIMIZER,
            "call": json.loads,
        },
        path,
    )
    found = inspect_file(path)
    assert found.objects == ["call: json.loads"]
    assert "`module.`" in found.notes[0]
    assert any("restarts at 65536" in trap for trap in found.traps)
    assert "  call: json.loads" in inspection_lines(found)


def test_names_in_a_file_cannot_steer_a_terminal(tmp_path: Path) -> None:
    """Escapes in keys are shown as question marks, and a line has an end."""
    path = tmp_path / "a.pt"
    torch.save({"model": WEIGHTS, "\x1b[2J": 1, "long" * 500: 2}, path)
    lines = inspection_lines(inspect_file(path))
    assert all(line.isprintable() and len(line) <= 500 for line in lines)


def test_json_of_an_inspection(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One strict document with the same facts, non-finite scales included."""
    path = tmp_path / "a.pt"
    torch.save({"model": WEIGHTS, "scaler": {**SCALER, "scale": torch.tensor(torch.inf)}}, path)
    assert main(["convert", "--inspect", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["scales"][0]["scale"] == "inf"
    assert document["rows"][0] == {
        "place": "model", "kind": "weights", "entries": 1, "bytes": 36, "dtypes": {"float32": 1}
    }  # fmt: skip


def _rounded(dtype: torch.dtype, *, as_fp32: bool = False) -> dict[str, torch.Tensor]:
    held = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    return {"w": held.float() if as_fp32 else held}


@pytest.mark.parametrize(
    ("weights", "level", "because"),
    [
        (_rounded(torch.bfloat16), "O5", "weights are bf16 values"),
        (_rounded(torch.bfloat16, as_fp32=True), "O5", "weights are bf16 values"),
        (_rounded(torch.float16), "O2", "weights are fp16 values; O3 looks the same in this model"),
        (_rounded(torch.float32), "O1", "fp32 weights and a loss scale"),
        (_rounded(torch.float64), None, "weights are float64, which no level trains"),
        (_rounded(torch.float8_e4m3fn), None, "weights are float8_e4m3fn, which no level trains"),
    ],
)
def test_the_level_is_that_of_the_types_there_are(
    tmp_path: Path, weights: Any, level: Any, because: str
) -> None:
    """Weights of bf16 are no fp32 weights, and others are none of Apex."""
    path = tmp_path / "a.pt"
    torch.save({"model": weights, "amp": {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 1}}}, path)
    found = inspect_file(path)
    assert (found.level, found.level_because) == (level, because)
    torch.save({"model": weights}, path)
    assert ("bf16" in inspect_file(path).level_because) == ("bf16" in because)


@pytest.mark.parametrize(
    "name", ["best_model", "model_best", "state_dict_ema", "teacher", "swa_model", "target_net"]
)
def test_another_state_of_the_model_is_no_masters(tmp_path: Path, name: str) -> None:
    """It may be equal to the weights by chance; the masters next to it are found all the same."""
    full = torch.rand(8, 8)
    state = {name: {"w": full.clone()}, "model": {"w": full.half()}}
    torch.save(state, tmp_path / "a.pt")
    rows = {row["place"]: row["kind"] for row in inspect_file(tmp_path / "a.pt").rows}
    assert rows[name] in ("weights", "averaged weights")
    assert rows["model"] == "weights"
    torch.save({**state, "masters": [full]}, tmp_path / "a.pt")
    rows = {row["place"]: row["kind"] for row in inspect_file(tmp_path / "a.pt").rows}
    assert [kind for place, kind in rows.items() if place.startswith("masters")] == ["fp32 masters"]
    torch.save({"best": {"model": {"w": full.half()}, "own": [full]}}, tmp_path / "a.pt")
    rows = {row["place"]: row["kind"] for row in inspect_file(tmp_path / "a.pt").rows}
    assert rows["best.own"] == "fp32 masters"


def test_statistics_next_to_weights_are_no_weights(tmp_path: Path) -> None:
    """Alone, they may be all that a module has."""
    normalize = {"mean": torch.rand(3), "std": torch.rand(3)}
    torch.save({"model": torch.nn.Linear(2, 1).state_dict(), "normalize": normalize}, tmp_path / "a.pt")
    torch.save({"model": normalize}, tmp_path / "b.pt")
    kinds = [
        {row["place"]: row["kind"] for row in inspect_file(tmp_path / name).rows} for name in ("a.pt", "b.pt")
    ]
    assert kinds == [{"model": "weights", "normalize": "tensors"}, {"model": "weights"}]
