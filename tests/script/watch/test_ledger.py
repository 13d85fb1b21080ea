"""The ledger of scripts: in which types each trains, which line set them, and what under an arm is not as declared."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampcompare.backends.arm import Arm
from ampcompare.base.environment.variables import CELL_FOLDER
from ampcompare.experiment.launch.script.rows import read_script_rows
from ampcompare.results.analysis.pairing.declared import role_comparisons
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
    "x = x.bfloat16()\n"
    + PLAIN.replace("model.parameters()", "[p for p in model.parameters() if p.requires_grad]")
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
        ledger = read_script_rows(tmp_path / "rows.jsonl").ledger
        assert ledger is not None
        return ledger, done.stderr

    return call


def types_of(ledger: Ledger) -> dict[str, Any]:
    parts = {
        name: list(ledger.types_of_groups(name)) for name in ("weights", "masters", "gradients", "state")
    }
    return {**parts, "forward": list(ledger.forward), "backward": list(ledger.backward)}


@pytest.mark.parametrize(
    ("text", "types", "facts"),
    [
        (
            PLAIN,
            {"weights": ["fp32"], "forward": ["fp32"], "state": ["fp32"]},
            {"loss_scale": None, "frozen": {}},
        ),
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
    apart = ADAPTER.replace("requires_grad_(False).", "").replace(
        "if p.requires_grad", "if p.dtype is torch.float32"
    )
    for text in (
        ADAPTER.replace("[p for p in model.parameters() if p.requires_grad]", "model.parameters()"),
        apart,
    ):
        ledger = run(text)[0]
        assert (ledger.frozen, ledger.types_of_groups("weights"), ledger.types_of_groups("masters")) == (
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
    assert run(WEIGHTS, "half:bf16")[0].by["weights"] == "cast, arm half:bf16"
    under = run(ADAPTER, "fp32")[0]
    assert (under.by["frozen"], "weights" in under.by) == ("cast, train.py:8", False)
    assert [role.name for role in role_comparisons(Arm.parse("fp32").roles, under) if role.differs] == []


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
    shown = {role.name: role.remark for role in role_comparisons(arm.roles, ledger)}
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
    differing = [
        role.difference_text
        for role in role_comparisons(Arm.parse("native:bf16").roles, ledger)
        if role.differs
    ]
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


TWICE = """
import torch
model = torch.nn.Linear(2, 2)
optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
scaler.scale(model(torch.ones(2, 2)).sum()).backward()
scaler.step(optimizer)
optimizer.step()
scaler.update()
"""


@pytest.mark.parametrize(
    ("options", "reports"), [((), True), (("--ledger",), True), (("--arm", "fp32"), False)]
)
def test_mistakes_are_found_in_the_script_as_it_is(
    options: tuple[str, ...], reports: bool, tmp_path: Path, forked_python: Any
) -> None:
    """With its ledger too; behind another arm the script's steps are not those of torch.amp."""
    (tmp_path / "train.py").write_text(TWICE)
    env = {name: value for name, value in os.environ.items() if name != CELL_FOLDER}
    done = forked_python.run(["-m", "ampcompare", "exec", *options, "train.py"], tmp_path, env)
    assert done.returncode == 0
    assert ("ampcompare guard step-twice: train.py:7" in done.stderr) == reports


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


SKIPS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.position = nn.Embedding(20, 4)
        self.position.weight.requires_grad_(False)
        self.last = nn.Linear(4, 2)
    def forward(self, x):
        return self.last(x + self.position.weight[:6]) * scale
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
for step in range(6):
    scale = 3e4 if step < 2 else 1.0
    loss = model(x).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
GAN = """
def make():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
maker, judge = make(), make()
first, second = (torch.optim.SGD(net.parameters(), 0.05, momentum=0.9) for net in (maker, judge))
for step in range(4):
    judge.requires_grad_(False)
    first.zero_grad()
    judge(maker(x)).float().square().mean().backward()
    first.step()
    judge.requires_grad_(True)
    second.zero_grad()
    (judge(x) - judge(maker(x).detach())).float().square().mean().backward()
    second.step()
"""
IN_BACKWARD = """
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
optimizers = {param: torch.optim.SGD([param], 0.05, momentum=0.9) for param in model.parameters()}
def step_now(param):
    optimizers[param].step()
    optimizers[param].zero_grad()
for param in model.parameters():
    param.register_post_accumulate_grad_hook(step_now)
for step in range(4):
    model(x).square().mean().backward()
"""
REVERSED_MASTERS = MASTERS.replace("optim.SGD(masters", "optim.SGD(masters[::-1]").replace(
    "model.bfloat16()", "model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()"
)


@pytest.mark.parametrize(
    ("text", "arm", "weights"),
    [
        (SKIPS, "apex:O2", "fp16"),
        (SKIPS, "half:masters=fp32,dynamic", "fp16"),
        (GAN, "script", "fp32"),
        (GAN, "apex:O2", "fp16"),
        (GAN, "half:bf16,masters=fp32", "bf16"),
        (IN_BACKWARD, "script", "fp32"),
        (REVERSED_MASTERS, "script", "bf16"),
    ],
)
def test_a_master_belongs_to_the_weight_it_is_copied_to(run: Run, text: str, arm: str, weights: str) -> None:
    """Not to another one of its shape; a net that another one's step freezes is trained all the same."""
    ledger = run(text, arm)[0]
    assert ledger.types_of_groups("weights") == {weights: 1.0}
    assert ledger.types_of_groups("masters") == ({} if weights == "fp32" else {"fp32": 1.0})
    assert ledger.frozen == ({weights: 1.0} if text is SKIPS else {})
    assert sum(group.parameters for group in ledger.groups) == {SKIPS: 10, GAN: 80, IN_BACKWARD: 40}.get(
        text, 60
    )


DISTILLED = """
student = nn.Linear(4, 4)
teacher = nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 4)).to(torch.bfloat16)
optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
for step in range(4):
    with torch.no_grad():
        wanted = teacher(x.bfloat16()).float()
    loss = (student(x) - wanted).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        student(x.repeat(20, 1))  # an evaluation
"""


def test_a_reference_model_without_gradients_is_in_it(run: Run) -> None:
    """Two products of 4 x 32 in the teacher and one of 4 x 4 in the student, of as many rows."""
    ledger = run(DISTILLED)[0]
    assert ledger.frozen == {"bf16": 1.0}
    assert ledger.forward == pytest.approx({"bf16": 256 / 272, "fp32": 16 / 272})
    assert (ledger.by["frozen"], "weights" in ledger.by) == ("cast, train.py:10", False)


DEFAULT = """
torch.set_default_dtype(torch.bfloat16)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 2)
    def forward(self, x):
        return self.last(x)
model = Net()
x = x.bfloat16()
"""
AS_ARGUMENT = """
class Net(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.last = nn.Linear(4, 2, dtype=dtype)
    def forward(self, x):
        return self.last(x)
def build(dtype):
    return Net(dtype)
model = build(torch.bfloat16)
x = x.bfloat16()
"""
IN_CONSTRUCTOR = AS_ARGUMENT.replace("dtype=dtype)", ").to(dtype)")
ASSIGNED = """
checkpoint = model.bfloat16().state_dict()
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
model.load_state_dict(checkpoint, assign=True)
x = x.bfloat16()
"""
BY_DATA = """
for param in model.parameters():
    param.data = param.data.bfloat16()
for buffer in model.buffers():
    buffer.data = buffer.data.bfloat16() if buffer.is_floating_point() else buffer.data
x = x.bfloat16()
"""
OTHERS = """
other = nn.Linear(4, 4).half()
model[0].bfloat16()
model[1:].to(torch.bfloat16)
x = x.bfloat16()
"""


@pytest.mark.parametrize(
    ("text", "by"),
    [
        (DEFAULT, "train.py:16, made so by set_default_dtype, train.py:9"),
        (AS_ARGUMENT, "train.py:16, made so"),
        (IN_CONSTRUCTOR, "cast, train.py:12"),
        (ASSIGNED, "train.py:11, loaded so"),
        (BY_DATA, "before train.py:15"),
        (OTHERS, "cast, train.py:10; cast, train.py:11"),
        ("model.half().float()\n", None),
    ],
    ids=["default type", "argument", "in a constructor", "assigned", "data", "others", "back"],
)
def test_the_line_that_sets_the_type_of_weights_is_named(run: Run, text: str, by: str | None) -> None:
    """It is that of the call that makes or casts what is trained, not that of the optimizer or of another model."""
    assert run(text + PLAIN)[0].by.get("weights") == by


def test_data_of_a_default_type_are_not_lifted(run: Run) -> None:
    """The weights are, which is no reason to read the rest as fp32."""
    by = run(DEFAULT + PLAIN, "fp32")[0].by["weights"]
    assert by.endswith("lifted by arm fp32, its data is not")


@pytest.mark.parametrize("zeroes", ["optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)"])
def test_updates_of_a_closure_are_seen(run: Run, zeroes: str) -> None:
    """As those of a plain step: of the same share of elements."""
    closure = CLOSURE.replace("optimizer.zero_grad()", zeroes).replace("lr=0.05", "lr=0.0001")
    plain = WEIGHTS.replace("lr=0.05, momentum=0.9", "lr=0.0001")
    ledger, other = run("model.bfloat16()\nx = x.bfloat16()\n" + closure)[0], run(plain)[0]
    assert (ledger.update, ledger.lost, ledger.steps) == (other.update, other.lost, other.steps)
    assert ledger.lost is not None


def test_a_group_without_parameters_is_not_shown(run: Run) -> None:
    """As that for biases and norms of a network whose adapters alone are trained: of it there is nothing to say."""
    text = PLAIN.replace("model.parameters()", '[{"params": [*model.parameters()]}, {"params": []}]')
    assert [group.name for group in run(text)[0].groups] == ["SGD 0"]


def test_that_every_step_was_skipped_is_said(run: Run) -> None:
    """It is not that the optimizer keeps no state."""
    text = SCALER.replace("init_scale=256.0", "init_scale=2.0**60").replace("range(4)", "range(50)")
    ledger = run(text)[0]
    assert ledger.skipped == len(ledger.steps)
    assert [role.remark for role in role_comparisons(None, ledger) if role.name == "state"] == [
        "every step was skipped"
    ]


COMPILED = """
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
halve = torch.compile(lambda value: value / 2, backend="eager")
x = halve(x)
"""


@pytest.mark.slow
def test_a_compiled_program_hides_its_own_products_alone(run: Run) -> None:
    """And not what is computed around it, of which the backward pass has no part apart."""
    aside = run(COMPILED + PLAIN)[0]
    assert (aside.forward, aside.backward, aside.unseen) == ({"fp32": 1.0}, {"fp32": 1.0}, "")
    last = run(COMPILED + "model[0].bfloat16()\nx = x.bfloat16()\nmodel[0].compile(backend='eager')\n"
               "model[1].register_forward_hook(lambda m, i, o: o.float())\n" + PLAIN)[0]  # fmt: skip
    assert (last.forward, last.backward, last.unseen) == ({"fp32": 1.0}, {}, "torch.compile")
    whole = run(COMPILED + "model = torch.compile(model, backend='eager')\n" + PLAIN)[0]
    assert (whole.forward, whole.backward, whole.unseen) == ({}, {}, "torch.compile")
    assert "not seen: torch.compile" in [role.remark for role in role_comparisons(None, whole)]
