"""Scripts that fix their seeds get verdicts, unmodified, from `--shift-seeds`."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

HEAD = """
import os, random, numpy as np, torch
from torch import nn
STEPS = 12
def train(model, batches, backward=lambda loss: loss.backward(), optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
def net(*layers): return nn.Sequential(nn.Linear(4, 8), *layers, nn.ReLU(), nn.Linear(8, 2))
def data(generator=None):
    x = torch.randn(8 * STEPS, 4, generator=generator)
    return torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
def loader(data, **options): return torch.utils.data.DataLoader(data, batch_size=8, **options)
"""
SCRIPTS = {
    "once": "torch.manual_seed(0)\ntrain(net(), loader(data(), shuffle=True))",
    "all three": (
        "def set_seed(n): random.seed(n); np.random.seed(n); torch.manual_seed(n); torch.cuda.manual_seed_all(n)\n"
        "set_seed(42)\ntrain(net(), loader(data(), shuffle=True))"
    ),
    "data of its own generator": (
        "own = data(torch.Generator().manual_seed(7))\ntorch.manual_seed(1)\ntrain(net(), loader(own, shuffle=True))"
    ),
    "in each epoch": (
        "torch.manual_seed(3)\nmodel, own = net(), data()\n"
        "for epoch in range(2): torch.manual_seed(100 + epoch); train(model, loader(own, shuffle=True))"
    ),
    "in workers": (
        "torch.manual_seed(3)\nclass Noise(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 8 * STEPS\n"
        "    def __getitem__(self, i): x = np.random.randn(4).astype('float32'); return x, int(x[0] > 0)\n"
        "train(net(), loader(Noise(), num_workers=1, worker_init_fn=lambda worker: np.random.seed(5 + worker)))"
    ),
    "dropout alone": (
        "torch.manual_seed(2)\nfirst = net(nn.Dropout(0.3)); own = data()\n"
        "for p in first.parameters(): nn.init.constant_(p, 0.1) if p.ndim < 2 else nn.init.eye_(p)\n"
        "x = torch.linspace(-1, 1, 32 * STEPS).view(-1, 4)\n"
        "train(first, loader(torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())))"
    ),
    "Accelerate": (
        "from accelerate import Accelerator\nfrom accelerate.utils import set_seed\n"
        "accelerator = Accelerator(cpu=True)\nset_seed(42)\nmodel = net()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model, optimizer, batches = accelerator.prepare(model, optimizer, loader(data(), shuffle=True))\n"
        "train(model, batches, accelerator.backward, optimizer)"
    ),
    "Fabric": (
        "import lightning_fabric\nfabric = lightning_fabric.Fabric(accelerator='cpu', devices=1)\n"
        "lightning_fabric.seed_everything(1)\nmodel = net()\n"
        "model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "train(model, fabric.setup_dataloaders(loader(data(), shuffle=True)), fabric.backward, optimizer)"
    ),
    "transformers": (
        "from transformers import Trainer, TrainingArguments\n"
        "class Net(nn.Module):\n"
        "    def __init__(self): super().__init__(); self.inner = net()\n"
        "    def forward(self, x, labels): return {'loss': nn.functional.cross_entropy(self.inner(x), labels)}\n"
        "own = [{'x': x, 'labels': y} for x, y in data(torch.Generator().manual_seed(7))]\n"
        "args = TrainingArguments('trained', per_device_train_batch_size=8, num_train_epochs=1, report_to=[],\n"
        "    save_strategy='no', use_cpu=True, disable_tqdm=True, data_seed=5)\n"
        "Trainer(model_init=lambda: Net(), args=args, train_dataset=own).train()"
    ),
    "lightning": (
        "import lightning\nlightning.seed_everything(42, workers=True)\n"
        "class Net(lightning.LightningModule):\n"
        "    def __init__(self): super().__init__(); self.inner = net(nn.Dropout(0.1))\n"
        "    def training_step(self, batch, index):\n"
        "        return nn.functional.cross_entropy(self.inner(batch[0]), batch[1])\n"
        "    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)\n"
        "trainer = lightning.Trainer(max_epochs=1, accelerator='cpu', devices=1, logger=False,\n"
        "    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)\n"
        "trainer.fit(Net(), loader(data(), shuffle=True, num_workers=2))"
    ),
}
OF_TRAINERS = ("transformers", "lightning")  # which the tests do not install


@pytest.mark.parametrize("how", SCRIPTS)
def test_a_script_that_fixes_its_seed_gets_a_verdict(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Each seed is a run of its own, and its arms are a pair; the report names the lines that seed."""
    if how in OF_TRAINERS and importlib.util.find_spec(how) is None:
        pytest.skip(f"{how} is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(HEAD + SCRIPTS[how])
    words = ("--arm", "script,bf16", "--device", "cpu", "--seeds", "0-2", "--no-preflight", "-o", "out")
    done = call("compare", *words, "--shift-seeds", "--", "train.py")
    assert done.code == 0, done.err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    (row,) = [row for row in report["arms"] if row["arm"] == "native:bf16"]
    assert row["quality"]["among"] != "few seeds", row
    assert row["quality"]["kind"] not in ("", "not comparable"), row
    assert report.get("excluded", []) == []
    details = " ".join(report["reading"])
    assert "Paired: in each seed all arms began from the same weights" in details
    assert "Shifted seeds: seed k adds 1000003 k to " in details
    starts = {
        json.dumps([*record["script"]["weights"], *record["script"]["batches"], *record["script"]["draws"]])
        for record in report["records"]
    }
    assert len(starts) == 3
    used = {
        call["used"] for record in report["records"] for call in record["script"]["seeds"] if call["used"]
    }
    assert used
    if how == "data of its own generator":
        assert "Not shifted, in all seeds as written: torch.Generator(7) in train.py:" in details
