"""The ledger of scripts: in which types each trains, which line set them, and what under an arm is not as declared."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampcompare.backends.arm import Arm
from ampcompare.experiment.launch.script.rows import read_rows
from ampcompare.results.analysis.pairing.declared import roles_next_to
from ampcompare.results.records.ledger import Ledger

HEAD = """import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
x = torch.linspace(-1, 1, 24).reshape(6, 4)
"""
PLAIN = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(4):
    loss = model(x).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
AUTOCAST = """
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(4):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
SCALER = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(4):
    for part in range(2):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().square().mean() / 2
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
CLOSURE = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
def closure():
    optimizer.zero_grad()
    loss = model(x).float().square().mean()
    loss.backward()
    return loss
for step in range(4):
    optimizer.step(closure)
"""
WEIGHTS = "model.bfloat16()\nx = x.bfloat16()\n" + PLAIN
ADAPTER = (
    "model[0].requires_grad_(False).bfloat16()\nmodel[0].register_forward_hook(lambda m, i, o: o.float())\n"
    "x = x.bfloat16()\n" + PLAIN.replace("model.parameters()", "[p for p in model.parameters() if p.requires_grad]")
)
MASTERS = """
model.bfloat16()
x = x.bfloat16()
masters = [p.detach().float() for p in model.parameters()]
optimizer = torch.optim.SGD(masters, lr=0.05)
for step in range(4):
    model.zero_grad()
    model(x).float().square().mean().backward()
    for p, master in zip(model.parameters(), masters):
        master.grad = p.grad.float()
    optimizer.step()
    with torch.no_grad():
        for p, master in zip(model.parameters(), masters):
            p.copy_(master)
"""
OFF_LATER = AUTOCAST.replace("range(4)", "range(24)").replace(
    "dtype=torch.bfloat16", "dtype=torch.bfloat16, enabled=step < 10"
)
Run = Callable[..., tuple[Ledger, str]]


@pytest.fixture
def run(tmp_path: Path, forked_python: Any) -> Run:
    """Run a script under an arm; return its ledger, and what the program wrote to stderr."""

    def call(text: str, arm: str = "script", *options: str) -> tuple[Ledger, str]:
        (tmp_path / "train.py").write_text(HEAD + text)
        words = ["-m", "ampcompare", "exec", "--arm", arm, "--record", "rows.jsonl", *options, "train.py"]
        done = forked_python.run(words, tmp_path, os.environ)
        assert done.returncode == 0, done.stderr
        ledger = read_rows(tmp_path / "rows.jsonl").ledger
        assert ledger is not None
        return ledger, done.stderr

    return call


def types_of(ledger: Ledger) -> dict[str, Any]:
    parts = {name: list(ledger.of_groups(name)) for name in ("weights", "masters", "gradients", "state")}
    return {**parts, "forward": list(ledger.forward), "backward": list(ledger.backward)}


@pytest.mark.parametrize(
    ("text", "types", "facts"),
    [
        (PLAIN, {"weights": ["fp32"], "forward": ["fp32"], "state": ["fp32"]}, {"loss_scale": None, "frozen": {}}),
        (AUTOCAST, {"weights": ["fp32"], "forward": ["bf16"], "backward": ["bf16"], "state": ["fp32"]}, {}),
        (SCALER, {"weights": ["fp32"], "forward": ["fp16"], "gradients": ["fp32"]}, {"loss_scale": 256.0}),
        (CLOSURE, {"weights": ["fp32"], "forward": ["fp32"], "gradients": ["fp32"], "state": []}, {}),
        (WEIGHTS, {"weights": ["bf16"], "forward": ["bf16"], "masters": [], "state": ["bf16"]}, {}),
        (ADAPTER, {"weights": ["fp32"], "forward": ["bf16", "fp32"]}, {"frozen": {"bf16": 1.0}}),
        (MASTERS, {"weights": ["bf16"], "masters": ["fp32"], "gradients": ["fp32"]}, {}),
    ],
    ids=["plain", "autocast", "scaler", "closure", "weights", "adapter", "masters"],
)
def test_what_a_script_trains_in(run: Run, text: str, types: dict[str, Any], facts: dict[str, Any]) -> None:
    """Mixtures as people write them, without any arm."""
    ledger, _ = run(text)
    seen = types_of(ledger)
    assert {name: sorted(seen[name]) for name in types} == types
    assert {name: getattr(ledger, name) for name in facts} == facts


def test_lines_that_set_types_are_named(run: Run) -> None:
    """The line of autocast, of the scaler, of the optimizer and of a cast; of frozen weights apart."""
    by = run(SCALER)[0].by
    assert by["products"] == "autocast, train.py:13"
    assert by["loss scale"] == "GradScaler, train.py:10"
    assert by["state"] == "SGD, train.py:9"
    assert run(WEIGHTS)[0].by["weights"] == "cast, train.py:8"
    assert run(ADAPTER)[0].by["frozen"] == "cast, train.py:8"


def test_what_no_optimizer_trains_is_frozen(run: Run) -> None:
    """A part in no optimizer, and a frozen one that an optimizer has; it is neither a weight nor a master there."""
    apart = ADAPTER.replace("requires_grad_(False).", "").replace("if p.requires_grad", "if p.dtype is torch.float32")
    for text in (ADAPTER.replace("[p for p in model.parameters() if p.requires_grad]", "model.parameters()"), apart):
        ledger = run(text)[0]
        assert (ledger.frozen, ledger.of_groups("weights"), ledger.of_groups("masters")) == (
            {"bf16": 1.0},
            {"fp32": 1.0},
            {},
        )


def test_each_of_several_optimizers_is_seen(run: Run) -> None:
    """They step one after another after one pass."""
    text = """
optimizers = [torch.optim.SGD([param], lr=0.05, momentum=0.9) for param in model.parameters()]
for step in range(4):
    model.zero_grad()
    model(x).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
"""
    ledger = run(text)[0]
    assert [group.gradients for group in ledger.groups] == [{"fp32": 1.0}] * 6


def test_gradients_that_were_stepped_are_not_accumulated(run: Run) -> None:
    """Of a model that the loss of another one goes through, whose steps are known late under a loss scale."""
    text = """
other = nn.Linear(2, 2)
one_optimizer, optimizer = (torch.optim.SGD(part.parameters(), lr=0.05) for part in (model, other))
for step in range(4):
    for stepped in (one_optimizer, optimizer):
        stepped.zero_grad()
        other(model(x)).square().mean().backward()
        stepped.step()
"""
    assert run(text, "half:bf16,masters=fp32")[0].accumulated == {}


def test_casts_of_a_script_are_not_those_of_the_arm(run: Run) -> None:
    assert run(WEIGHTS, "fp32")[0].by["weights"] == "cast, train.py:8, lifted by arm fp32"
    assert run(WEIGHTS, "half:bf16")[0].by["weights"] == "cast, arm half:dtype=bf16"
    under = run(ADAPTER, "fp32")[0]
    assert (under.by["frozen"], "weights" in under.by) == ("cast, train.py:8", False)
    assert [role.name for role in roles_next_to(Arm.parse("fp32").roles, under) if role.differs] == []


def test_a_model_of_a_library_is_cast_by_the_arm_through_its_own_method(run: Run) -> None:
    text = """
class Net(nn.Sequential):
    def to(self, *args, **kwargs):  # as models of transformers do
        return super().to(*args, **kwargs)
teacher = nn.Linear(4, 2).bfloat16().requires_grad_(False)
model = Net(nn.Linear(4, 8).bfloat16().requires_grad_(False), nn.Linear(8, 2).bfloat16())
x = x.bfloat16()
"""
    for arm in ("apex:O2", "half:bf16,kahan"):
        assert run(text + PLAIN, arm)[0].by["weights"] == f"cast, arm {Arm.parse(arm)}"
    arm = Arm.parse("half:bf16,masters=fp32")
    ledger = run(text + PLAIN, str(arm))[0]
    assert ledger.by["frozen"] == f"cast, arm {arm}"
    shown = {role.name: role.remark for role in roles_next_to(arm.roles, ledger)}
    assert shown["loss scale"] == ""  # the arm's scaler scales nothing


def test_frozen_weights_of_an_optimizer_have_no_part_in_its_updates(run: Run) -> None:
    """Nor have their masters, though one has the shape of a weight that is trained."""
    text = """
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
model[0].requires_grad_(False)
"""
    for arm in ("script", "apex:O2", "half:bf16,masters=fp32"):
        ledger = run(text + PLAIN, arm)[0]
        (group,) = ledger.groups
        assert (group.parameters, len(group.weights), len(ledger.frozen)) == (20, 1, 1)
        assert group.weights == ({"fp32": 1.0} if arm == "script" else ledger.frozen)


def test_gradients_of_lifted_weights_are_reduced(run: Run) -> None:
    """The wrapper was made when they had 16 bits."""
    text = f"""
import torch.distributed
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = nn.parallel.DistributedDataParallel(model.bfloat16())
x = x.bfloat16()
{PLAIN}
torch.distributed.destroy_process_group()
"""
    assert run(text, "fp32")[0].reduced == {"fp32": 1.0}
    assert run(text)[0].reduced == {"bf16": 1.0}


def test_gradients_of_micro_batches_and_lost_updates(run: Run) -> None:
    assert run(SCALER)[0].accumulated == {"fp32": 1.0}
    assert run(PLAIN)[0].accumulated == {}
    lost = run(WEIGHTS.replace("lr=0.05", "lr=0.0001"))[0].lost
    assert lost is not None
    assert lost > 0.8
    assert (run(MASTERS)[0].lost or 0) < 0.2


def test_an_arm_that_stops_acting_is_seen(run: Run) -> None:
    """A script that switches its autocast off after some steps trains these under another arm."""
    ledger, _ = run(OFF_LATER, "native:bf16")
    differing = [role.difference for role in roles_next_to(Arm.parse("native:bf16").roles, ledger) if role.differs]
    assert len(differing) == 1
    assert "(none in bf16 in step 20), bf16 was asked" in differing[0]


def test_exec_shows_it(run: Run, tmp_path: Path, forked_python: Any) -> None:
    """`exec --ledger SCRIPT` needs no arm and no record, and leaves the output of the script alone."""
    (tmp_path / "train.py").write_text(HEAD + WEIGHTS + "print('done')\n")
    done = forked_python.run(["-m", "ampcompare", "exec", "--ledger", "train.py"], tmp_path, os.environ)
    assert (done.stdout, done.returncode) == ("done\n", 0)
    assert "weights" in done.stderr
    assert "cast, train.py:8" in done.stderr
    refused = forked_python.run(
        ["-m", "ampcompare", "exec", "--ledger", "--opt-level", "O2", "train.py"], tmp_path, os.environ
    )
    assert refused.returncode == 2
    assert "--arm O2" in refused.stderr


def test_exec_names_an_option_without_effect(tmp_path: Path, forked_python: Any) -> None:
    """It keeps no file."""
    (tmp_path / "train.py").write_text(HEAD + PLAIN.replace(", momentum=0.9", ""))
    (tmp_path / "temporary").mkdir()
    env = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    for arm, said in (
        ("native:bf16,state=bf16", "state=bf16 has no effect on this training: the optimizer keeps none"),
        ("half:bf16,masters=fp32", ""),
    ):
        done = forked_python.run(["-m", "ampcompare", "exec", "--arm", arm, "train.py"], tmp_path, env)
        assert (done.returncode, done.stdout) == (0, "")
        lines = [line for line in done.stderr.splitlines() if line.startswith("ampcompare:")]
        assert lines == [f"ampcompare: {said}"] * bool(said)
        assert not list((tmp_path / "temporary").iterdir())
