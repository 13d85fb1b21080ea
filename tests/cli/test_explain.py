"""`ampcompare explain`, with and without a model."""

from collections.abc import Callable
from typing import Any

Call = Callable[..., Any]


def test_a_level(call: Call) -> None:
    """A level is an arm of apex, said with what it does and its native equivalent, also as one document."""
    done = call("explain", "O2")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("apex:O2: an fp16 model")
    assert "Native equivalent: native:fp16" in done.out
    assert call("explain", "apex:O2").out == done.out
    data = call("explain", "O2,loss_scale=128", "--json").json()
    assert (data["arm"], data["twin"], data["observed"]) == ("apex:O2,loss_scale=128", "native:fp16", None)
    assert data["bytes_per_parameter"]["total"]["adam"] == 20


def test_what_autocast_casts_on_a_gpu(call: Call) -> None:
    """The installed torch is asked; an arm that casts otherwise, or nothing, has no such list."""
    done = call("explain", "native:bf16")
    assert (done.code, done.err) == (0, "")
    assert "under autocast, as its dispatcher says" in done.out
    assert "\n  in bf16: addbmm, addmm," in done.out
    assert "\n  refused: binary_cross_entropy\n" in done.out
    casts = call("explain", "native:fp16", "--json").json()["casts"]
    assert {"softmax", "upsample_nearest2d"} <= set(casts["casts"]["in fp32"])
    assert any("rms_norm" in change for change in casts["changes"]) or casts["torch"].startswith(
        ("2.6", "2.7")
    )
    assert "casts" not in call("explain", "apex:O1", "--json").json()


def test_a_model(call: Call, tmp_path: Any) -> None:
    """With --arch the model's types are seen, and settings may come from the file of a comparison."""
    settings = tmp_path / "settings.yaml"
    settings.write_text("arms: [fp32, half]\nseeds: 0-3\nrecipe: {model: {arch: mymod:Picky}}\n")
    words = [
        "--data",
        "synthetic",
        "--train-size",
        "16",
        "--val-size",
        "16",
        "--image-size",
        "8",
        "--device",
        "cpu",
    ]
    done = call("explain", "native:bf16", "--config", str(settings), *words)
    assert (done.code, done.err) == (0, "")
    assert "Seen in one step of mymod:Picky on synthetic (batch 8x3x8x8, cpu, bf16 " in done.out


def test_a_script(call: Call, tmp_path: Any) -> None:
    """A script after -- is trained for some steps; what ran stands next to what the arm declares."""
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
        "for step in range(40):\n"
        "    model(torch.ones(3, 4)).square().mean().backward()\n"
        "    optimizer.step()\n"
    )
    done = call("explain", "native:bf16", "--", str(tmp_path / "train.py"))
    assert done.code == 0
    assert "What ran under native:bf16\n" in done.out
    assert "forward products" in done.out
    data = call("explain", "native:bf16", "--json", "--", str(tmp_path / "train.py")).json()
    assert data["roles"]["products"] == "bf16"
    assert data["ledger"]["forward"] == {"bf16": 1.0}
    (tmp_path / "train.py").write_text("print('no training')\n")
    assert call("explain", "native:bf16", "--", str(tmp_path / "train.py")).code == 3
