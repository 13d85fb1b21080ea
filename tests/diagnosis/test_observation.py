"""What is seen of a model, and what happens where it cannot be."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ampcompare.backends.arm import Arm
from ampcompare.diagnosis.explain import bytes_per_parameter, observation_text, observe_small_step_in_child
from ampcompare.diagnosis.explain_step import explain_step
from ampcompare.settings.config import RunConfig

DATA = {"name": "synthetic", "train_size": 32, "val_size": 16, "image_size": 8}


def _config(arm: str, arch: str = "convnet", **recipe: Any) -> RunConfig:
    settings = {
        "data": DATA,
        "model": {"arch": arch, "args": recipe.pop("args", {})},
        "batch_size": 4,
        **recipe,
    }
    return RunConfig.model_validate({"arm": arm, "device": "cpu", "recipe": settings})


def _seen(arm: str, arch: str = "convnet", **recipe: Any) -> dict[str, Any]:
    seen = explain_step(_config(arm, arch, **recipe).model_dump(mode="json"))
    assert "error" not in seen, seen
    return seen


def _rows(seen: dict[str, Any], kind: str) -> set[tuple[str, ...]]:
    return {
        tuple(",".join(row[part]) for part in ("weights", "inputs", "outputs"))
        for row in seen["modules"]
        if row["type"] == kind
    }


class Codes(torch.Tensor):
    """Looks like fp32, and holds a byte for each number and one scale, as optimizers with state in 8 bits do."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        self.codes, self.scale = torch.zeros(self.shape, dtype=torch.uint8), torch.ones(1)
        return ["codes", "scale"], None


class InCodes(torch.optim.Optimizer):
    """Makes such state at its first step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["average"] = torch.zeros_like(param).as_subclass(Codes)


def test_state_in_8_bits_is_counted_as_it_is_held() -> None:
    """A tensor of another class counts by what it holds, and not by the type that it shows."""
    seen = _seen("fp32", "mlp", optimizer={"name": f"{__name__}:InCodes", "lr": 0.1})
    state = seen["counts"]["optimizer_state"]
    assert state["uint8"]["bytes"] == seen["num_parameters"]
    assert state["fp32"]["bytes"] == 4 * state["uint8"]["tensors"]
    assert seen["bytes_per_parameter"] == pytest.approx(9, abs=0.01)


def test_shards_are_counted() -> None:
    """On one rank FSDP2 holds fp32 weights, gradients and state: 16 bytes with Adam, and nothing in 16 bits."""
    seen = _seen("fsdp:bf16", "mlp", optimizer={"name": "adamw", "lr": 1e-3})
    assert seen["bytes_per_parameter"] == pytest.approx(16, abs=0.01)
    assert {dtype for parts in seen["counts"].values() for dtype in parts} == {"fp32"}


def test_kept_modules_are_seen_and_named() -> None:
    """A kept module has fp32 weights, runs in fp32 between bf16 neighbors, and the heading names it."""
    seen = _seen("half:bf16,keep_fp32=BatchNorm*", args={"width": 4})
    assert _rows(seen, "BatchNorm2d") == {("fp32", "bf16", "bf16")}
    assert _rows(seen, "Conv2d") == {("bf16", "bf16", "bf16")}
    assert seen["kept_fp32"] == [row["module"] for row in seen["modules"] if row["type"] == "BatchNorm2d"]
    text = " ".join(observation_text(seen, width=100).split())
    assert f"kept in fp32: {', '.join(seen['kept_fp32'])}" in text


def test_o2() -> None:
    """Under O2 convolutions are fp16, batch norms keep fp32 weights, and masters and state are fp32."""
    seen = _seen("apex:O2", args={"width": 4})
    assert _rows(seen, "Conv2d") == {("fp16", "fp16", "fp16")}
    assert _rows(seen, "BatchNorm2d") == {("fp32", "fp16", "fp16")}
    assert _rows(seen, "ConvNet") == {("fp16,fp32", "fp32", "fp32")}
    assert seen["engine"] == "compat"
    counts = seen["counts"]
    assert set(counts["master_weights"]) == set(counts["master_gradients"]) == {"fp32"}
    fp16 = counts["parameters"]["fp16"]["elements"]
    assert counts["master_weights"]["fp32"]["elements"] == fp16
    held = bytes_per_parameter(Arm.parse("apex:O2"))
    expected = held.total(1) * fp16 + 12 * counts["parameters"]["fp32"]["elements"]
    assert seen["bytes"]["total"] - seen["bytes"]["buffers"] == expected


@pytest.mark.integration
@pytest.mark.usefixtures("forked_children")
def test_o1_in_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under O1, seen from a process of its own, weights are fp32, products fp16; an idle module is told."""
    (tmp_path / "mynet.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, num_classes):\n"
        "        super().__init__()\n"
        "        self.used, self.unused = torch.nn.Linear(192, num_classes), torch.nn.Linear(2, 2)\n"
        "    def forward(self, x):\n"
        "        return self.used(x.flatten(1))\n"
    )
    monkeypatch.chdir(tmp_path)
    seen = observe_small_step_in_child(_config("apex:O1", "mynet:Net", optimizer={"name": "adam"}))
    rows = {row["module"]: row for row in seen["modules"]}
    assert (rows["used"]["weights"], rows["used"]["outputs"], rows["unused"]["ran"]) == (
        ["fp32"],
        ["fp16"],
        False,
    )
    assert seen["modules"][-1]["module"] == "(model)"
    assert "not called" in observation_text(seen, width=100)
    import torch

    assert torch.nn.functional.linear.__module__ in (None, "torch._C._nn")


def test_a_scale_that_begins_too_high() -> None:
    """Steps are repeated until one is applied, and those skipped are counted."""
    seen = _seen("native:fp16,init_scale=1e9", "mlp")
    assert seen["loss_scale"]["skipped_steps"] > 0
    assert seen["loss_scale"]["after"][0] < 1e9
    assert seen["counts"]["optimizer_state"]["fp32"]["elements"] == seen["num_parameters"]
    assert "skipped first" in observation_text(seen, width=100)


def test_many_modules_share_rows() -> None:
    """Beyond what fits a screen, modules of like types share a row."""
    seen = _seen("half", "transformer", args={"width": 8, "depth": 8, "heads": 2})
    short = observation_text(seen, width=100)
    assert "modules" in short
    assert len(short.splitlines()) < len(seen["modules"])
    assert all(len(line) <= 100 for line in short.splitlines())
    assert f"{seen['num_parameters']:,}" in short
