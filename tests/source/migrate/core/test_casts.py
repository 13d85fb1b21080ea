"""Notes of `migrate` on functions that Apex and autocast compute in different types; the tables are measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ampcompare.apex.amp.lists import functional_overrides, torch_overrides
from ampcompare.base.tensors.cuda_casts import cuda_casts, operations_with_autocast_kernel
from ampcompare.source.migrate.core.casts import (
    FUNCTIONAL,
    IN_ITS_PLACE,
    KEPT,
    LOWER,
    PLAIN,
    ROUNDED,
    WIDE,
)
from ampcompare.source.migrate.project import migrate_file
from ampcompare.source.migrate.read.cast_lists import WIDE_UNDER_AUTOCAST
from ampcompare.source.migrate.read.finding import BY_HAND, NOTE
from ampcompare.source.migrate.rewrite import migrate_text

# Calls of one tensor of 2x3x3 numbers; other functions take it alone.
CALLS: dict[str, Callable[[Tensor], Any]] = {
    **{name: lambda x, name=name: getattr(torch, name)(x, 0) for name in (
        "cumsum", "cumprod", "logsumexp", "softmax", "log_softmax")},
    **{name: lambda x, name=name: getattr(torch, name)(x, x) for name in ("cdist", "dist")},
    **{name: lambda x, name=name: getattr(F, name)(x, x) for name in (
        "cosine_similarity", "pairwise_distance", "huber_loss")},
    "pow": lambda x: x.pow(2),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(2, 3, dtype=torch.long)),
    "softmin": lambda x: F.softmin(x, 0),
    "layer_norm": lambda x: F.layer_norm(x, (3,)),
    "rms_norm": lambda x: F.rms_norm(x, (3,)),
    "group_norm": lambda x: F.group_norm(x, 3),
    "pdist": lambda x: F.pdist(x[0]),
    "einsum": lambda x: torch.einsum("bij,bjk->bik", x, x),
    "grid_sample": lambda x: F.grid_sample(x[None], x[None, :, :, :2], align_corners=False),
    "affine_grid": lambda x: F.affine_grid(x[:, :2], [2, 1, 3, 3], align_corners=False),
    "prelu": lambda x: F.prelu(x, x[0, 0, :1]),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x),
}  # fmt: skip


def _type_on_cuda(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the type of what a function returns under autocast of CUDA."""
    if name == "rms_norm" and not any(
        each.startswith("aten::rms_norm") for each in operations_with_autocast_kernel("CUDA")
    ):
        pytest.skip("torch before 2.12 has rms_norm in no list")
    call = CALLS.get(name) or (getattr(torch, name) if hasattr(torch, name) else getattr(F, name))
    with cuda_casts(), torch.autocast("cpu", dtype=torch.float16):
        result = call((torch.rand(2, 3, 3) * 0.5 + 0.25).to(dtype))
    assert isinstance(result, Tensor)
    return result.dtype


@pytest.mark.parametrize("name", [*FUNCTIONAL, *PLAIN])
def test_autocast_computes_in_the_type_that_the_table_says(name: str) -> None:
    after = {**FUNCTIONAL, **PLAIN}[name][1]
    half, full = _type_on_cuda(name, torch.float16), _type_on_cuda(name, torch.float32)
    assert half is (torch.float32 if after in (WIDE, ROUNDED) else torch.float16)
    assert full is (torch.float16 if after == LOWER else torch.float32)


def test_autocast_rounds_inside_of_cross_entropy() -> None:
    """Its value is that of a log-softmax in fp16, not that of one in fp32, which O1 computes."""
    logits, target = torch.tensor([[1.0, 2.3, -0.7]]).half(), torch.tensor([2])
    with cuda_casts(), torch.autocast("cpu", dtype=torch.float16):
        found = F.cross_entropy(logits, target)
    assert found.item() == F.nll_loss(logits.log_softmax(-1).float(), target).item()
    assert found.item() != F.cross_entropy(logits.float(), target).item()


@pytest.mark.parametrize("name", sorted(WIDE_UNDER_AUTOCAST))
def test_autocast_computes_in_fp32(name: str) -> None:
    assert _type_on_cuda(name, torch.float16) is torch.float32


def test_the_types_of_O1_are_those_of_the_lists_of_Apex() -> None:
    for table, lists in ((FUNCTIONAL, functional_overrides), (PLAIN, torch_overrides)):
        for name, (before, after) in table.items():
            assert before == (WIDE if name in lists.FP32_FUNCS else KEPT)
            assert before != after
    for name in torch_overrides.FP32_FUNCS:
        assert (name in PLAIN) != (name in WIDE_UNDER_AUTOCAST or name == "renorm")
        assert not hasattr(Tensor, f"{name}_") or f"{name}_" in IN_ITS_PLACE


HEAD = """import torch
from torch import nn
from torch.nn import functional as F
from apex import amp
import numpy as np

class Net(nn.Module):
    def forward(self, x):
        x = F.gelu(x).exp_().softmax(-1)
        return F.softmax(x, -1).std() + np.log1p(3) + torch.var(x) + nn.PReLU()(nn.CrossEntropyLoss()(x, x))

model = Net()
model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters()), opt_level="O1")
for x in batches:
    loss = model(x)
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
"""


def _notes(text: str) -> list[str]:
    found = migrate_text(text).findings
    return [one.message for one in found if one.kind == NOTE and one.line == 13 and "types" in one.message]


def test_one_note_names_what_O1_computes_in_another_type_with_the_lines() -> None:
    (note,) = _notes(HEAD)
    said = "gelu (line 9) fp32, now the type of its inputs"
    for part in (
        said,
        "exp_ (line 9) fp32 alone",
        "softmax (line 9) the type of its inputs, now fp32",
        "prelu (line 10)",
        "cross_entropy (line 10) fp32, now fp32 of a log-softmax in the type of its inputs",
    ):
        assert part in note
    assert "log1p" not in note
    assert note.count(" softmax ") == 1


def test_at_O2_the_note_names_what_autocast_computes_in_fp32() -> None:
    found = migrate_text(HEAD.replace('"O1"', '"O2"')).findings
    notes = [
        one.message for one in found if one.message.startswith("in the model these were computed in fp16")
    ]
    assert len(notes) == 1
    assert notes[0].endswith(": softmax (line 9)")
    assert not _notes(HEAD.replace('"O1"', '"O0"'))


@pytest.mark.parametrize(
    ("line", "level", "notes"),
    [
        ("h = x.float()", "O2", 1),
        ("h = x.to(torch.float32)", "O3", 1),
        ("h = x.to(dtype=torch.float)", "O2", 1),
        ("h = (x > 0).float()", "O2", 0),
        ("h = x.to('cuda')", "O2", 0),
        ("h = x.float()", "O1", 0),
    ],
)
def test_what_a_model_of_O2_computes_in_fp32_by_itself_is_said(line: str, level: str, notes: int) -> None:
    """O2 patches no functions, and autocast casts products of fp32 tensors."""
    body = f"        {line}\n        return h.matmul(h.t())\n"
    text = HEAD.replace("        x = F.gelu(x).exp_().softmax(-1)\n", body).replace('"O1"', f'"{level}"')
    found = [
        one.message
        for one in migrate_text(text).findings
        if "fp32 itself, as it may in line 9," in one.message
    ]
    assert len(found) == notes
    assert all(f"was in fp32 at {level};" in each for each in found)


def test_a_metric_of_the_script_makes_no_tensor_of_the_model_fp32(tmp_path: Path) -> None:
    """A function of a file with layers may."""
    body, train = HEAD.replace('"O1"', '"O2"').split("model = Net()\n")
    metric = "def accuracy(x, y):\n    return x.eq(y).float().mean()\n\n"
    assert not any(
        "fp32 itself" in each.message for each in migrate_text(metric + HEAD.replace("O1", "O2")).findings
    )
    (tmp_path / "net.py").write_text(body + metric.replace(".eq", ".mul"), encoding="utf-8")
    (tmp_path / "train.py").write_text(
        "import torch\nfrom apex import amp\nfrom net import Net\n\nmodel = Net()\n" + train
    )
    said = [message for _, _, message in migrate_file(tmp_path / "train.py").rows()]
    assert sum("fp32 itself, as it may in line 13 of net.py," in each for each in said) == 1


def test_a_file_that_is_imported_has_a_note_of_its_own(tmp_path: Path) -> None:
    """It stands where training is initialized, and names the file."""
    body, train = HEAD.split("model = Net()\n")
    (tmp_path / "net.py").write_text(body.replace("from apex import amp\n", ""), encoding="utf-8")
    head = "import torch\nfrom apex import amp\nfrom net import Net\n\nmodel = Net()\n"
    (tmp_path / "train.py").write_text(head + train, encoding="utf-8")
    found = migrate_file(tmp_path / "train.py").rows()
    (place,) = [
        place for place, _, message in found if message.startswith("net.py: types that O1 and autocast")
    ]
    assert place.startswith("6:")


LOSS = """import torch

class Distances(torch.nn.Module):
    def forward(self, a, b):
        return distances(a, b).sum()

def distances(a, b):
    dist = a.pow(2).sum(1, keepdim=True) + b.pow(2).sum(1, keepdim=True).t()
    dist.addmm_(1, -2, a, b.t())
    return dist

def rank(a, b):
    return torch.zeros(2, 2).addmm_(a, b)
"""
TRAINER = """import torch
from apex import amp
from losses import rank

class Trainer:
    def __init__(self, model, loss_func):
        self.model, self.loss_func = model, loss_func
        self.optimizer = torch.optim.SGD(model.parameters())
        self.model, self.optimizer = amp.initialize(self.model, self.optimizer, opt_level="O1")

    def step(self, x):
        out = self.model(x)
        loss = self.loss_func(out, out)
        with amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()
        return rank(x, x)
"""
MAIN = """from losses import Distances
from trainer import Trainer

def make_loss(name):
    distances = Distances()

    def loss_func(a, b):
        return distances(a, b)

    return loss_func
"""


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        ("make_loss('distances')", BY_HAND),
        ("Distances()", BY_HAND),
        ("LOSSES[name]", NOTE),
    ],
)
def test_products_in_place_of_a_loss_of_another_file_are_named(tmp_path: Path, made: str, kind: str) -> None:
    """Those that no autocast reaches are not."""
    (tmp_path / "losses.py").write_text(LOSS, encoding="utf-8")
    (tmp_path / "trainer.py").write_text(TRAINER, encoding="utf-8")
    (tmp_path / "main.py").write_text(
        MAIN + f"\ntrainer = Trainer(net, {made})\ntrainer.step(x)\n", encoding="utf-8"
    )
    found = [row for row in migrate_file(tmp_path / "trainer.py").rows() if "addmm_" in row[2]]
    ((_, said, message),) = found
    assert said == kind
    assert message.startswith(
        "this training runs line 9 of" if kind == BY_HAND else "losses.py calls addmm_ in line 9"
    )


@pytest.mark.parametrize(
    ("product", "result"),
    [
        ("x.addmm_(x, x.t())", "x.addmm_(x.to(x.dtype), x.t().to(x.dtype))"),
        (
            "self.c.addr_(1, -2, x + x, x)",
            "self.c.addr_(1, -2, (x + x).to(self.c.dtype), x.to(self.c.dtype))",
        ),
        ("x.baddbmm_(x, batch2=x, beta=2)", "x.baddbmm_(x.to(x.dtype), batch2=x.to(x.dtype), beta=2)"),
    ],
)
def test_products_in_place_of_the_file_get_the_casts_of_O1(product: str, result: str) -> None:
    old = "x = F.gelu(x).exp_().softmax(-1)"
    migration = migrate_text(HEAD.replace(old, product))
    assert f"        {result}\n" in migration.text


def test_a_product_that_cannot_be_cast_is_left() -> None:
    migration = migrate_text(HEAD.replace("F.gelu(x).exp_().softmax(-1)", "torch.mm(x, x.t(), out=x)"))
    assert any("mm with out=" in each.message for each in migration.findings)
    migration = migrate_text(HEAD.replace("loss = model(x)", "loss = torch.mm(model(x), x, out=y).sum()"))
    (left,) = [each.message for each in migration.findings if each.kind == BY_HAND]
    assert left.endswith("; or take the adapter, which casts")


UNPACKED = """with torch.no_grad():
    PARTS
    logits = logits.detach().cpu().numpy()
"""


@pytest.mark.parametrize(
    "parts",
    [
        "kept, logits = model(x)",
        "kept, logits = model(x)[:2]",
        "outputs = model(x)\n    kept, logits = outputs[:2]",
        "outputs = model(x)\n    kept, logits = outputs",
        "logits = model(x)",
    ],
)
def test_parts_of_outputs_go_to_the_cpu_in_fp32(parts: str) -> None:
    text = HEAD + UNPACKED.replace("PARTS", parts)
    assert "logits.detach().float().cpu()" in migrate_text(text).text
    other = migrate_text(text.replace("logits", "tags").replace("tags = model(x)", "_, tags = model(x)"))
    assert "tags.detach().cpu()" in other.text  # which may be integers
    assert any(each.message.startswith("O1 cast to fp32 at .cpu()") for each in other.findings)


@pytest.mark.parametrize(
    "parts", ["_, logits = model(x).max(1)", "logits = model(x).topk(2)[1]", "_, logits = x"]
)
def test_indices_and_inputs_go_to_the_cpu_as_they_are(parts: str) -> None:
    migration = migrate_text(HEAD + UNPACKED.replace("PARTS", parts))
    assert "logits.detach().cpu()" in migration.text
    assert not any(".cpu()" in each.message for each in migration.findings)


@pytest.mark.parametrize(("given", "is_said"), [("logits", True), ("x", False)])
def test_what_a_function_of_the_file_moves_is_named_where_it_gets_an_output(
    given: str, is_said: bool
) -> None:
    show = "def show(image, size):\n    return grid(image)\n\ndef grid(image):\n    return image.detach().cpu()\n"
    text = HEAD.replace("model = Net()", show + "model = Net()")
    text += f"with torch.no_grad():\n    logits = model(x)\nshow({given}, size=3)\n"
    said = [each.message for each in migrate_text(text).findings]
    assert any(each.startswith("O1 cast to fp32 at .cpu()") for each in said) == is_said


@pytest.mark.parametrize("covered", [True, False])
def test_another_file_that_moves_outputs_is_named_where_they_may_be_fp16(
    tmp_path: Path, covered: bool
) -> None:
    run = "def detect(model, x):\n    return show(model(x))\n\ndef show(logits):\n    return logits.cpu()\n"
    (tmp_path / "show.py").write_text(run, encoding="utf-8")
    below = (
        "def check():\n    with torch.no_grad():\n        out = model(x)\n    show(out)\n" if covered else ""
    )
    text = f"from show import detect, show\n{HEAD}{below}model.eval()\nfound = detect(model, x)\n"
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    said = [message for _, _, message in migrate_file(tmp_path / "train.py").rows()]
    assert any(".cpu(), as in line 5 of show.py" in each for each in said) == covered


def test_an_attribute_is_no_method_of_a_tensor() -> None:
    """O1 casts in nn.Softmax, which calls that of torch.nn.functional."""
    body = "        self.softmax = nn.Softmax(-1)\n        return self.softmax(x) + other.softmax(x)\n"
    text = HEAD.replace("        x = F.gelu(x).exp_().softmax(-1)\n", body)
    assert not any(" softmax (" in each.message for each in migrate_text(text).findings)


def test_what_runs_before_training_refuses_no_fp16() -> None:
    head, train = HEAD.split("class Net")
    text = (
        head
        + "def prepare(x):\n    return x.renorm_(2, 0, 1)\n\nweight = prepare(torch.rand(3, 3))\n\nclass Net"
        + train
    )
    assert not any("renorm_" in each.message for each in migrate_text(text).findings)


NUMBERS = """
import torch
from apex import amp


class Net(torch.nn.Module):
    def __init__(self, widths):
        super().__init__()
        self.rate = torch.ones(3).sum() * torch.ones(3)
        self.layer = torch.nn.Linear(8, 2)

    def forward(self, x):
        count = x.sum()
        return self.layer(x) * {0}


model, optimizer = amp.initialize(Net([1]).cuda(), optimizer, opt_level="O1")
pad = torch.nn.CrossEntropyLoss().ignore_index
for x in loader:
    loss = model(x).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("factor", "is_said"),
    [
        ("(x / count)", True),
        ("(x.float() / count).half()", False),
        ("(x.to(torch.float32) / count).half()", False),
        ("2", False),
    ],
)
def test_a_number_is_named_where_the_other_tensor_is_not_made_fp32_anyway(factor: str, is_said: bool) -> None:
    """Constructors run before Apex casts anything, and a layer that is only asked for an attribute computes nothing."""
    said = " ".join(each.message for each in migrate_text(NUMBERS.format(factor)).findings)
    assert ("a tensor of one number may be fp32" in said) is is_said
    assert "cross_entropy" not in said


def test_every_line_of_arithmetic_in_place_is_named() -> None:
    """A first line that does not matter hides no other one."""
    text = (
        "import torch\nfrom apex import amp\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.layer = torch.nn.Linear(4, 4)\n"
        "        self.bias = torch.nn.Parameter(torch.zeros(4))\n"
        "        self.shift = torch.nn.Parameter(torch.ones(4))\n"
        "    def forward(self, x):\n        h = self.layer(x)\n        h += self.bias\n        h *= self.shift\n"
        "        return h\n\nmodel = Net()\n"
        "model, optimizer = amp.initialize(model, optimizer, opt_level='O1')\n"
        "for x in data:\n    loss = model(x).mean()\n    with amp.scale_loss(loss, optimizer) as scaled:\n"
        "        scaled.backward()\n    optimizer.step()\n"
    )
    (note,) = [each.message for each in migrate_text(text).findings if "in place" in each.message]
    assert "`h += self.bias` (line 12), `h *= self.shift` (line 13)" in note


PRODUCT = """import torch
from apex import amp

bank = torch.rand(8, 8).cuda()
bank = torch.mm(bank, bank)

def mix(x):
    return x @ bank

def unused(x):
    with amp.disable_casts():
        return torch.mm(x, bank)

model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for x in data:
    optimizer.zero_grad()
    features = {}
    loss = model(features).mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("x", None),
        ("unused(x)", None),
        ("torch.matmul(x, bank)", 17),
        ("x.mm(bank)", 17),
        ("mix(x)", 8),
        ("torch.nn.functional.conv1d(x, bank)", 17),
    ],
)
def test_products_outside_of_autocast_are_named(value: str, line: int | None) -> None:
    """O1 casts what is made for a model, too; what runs above `amp.initialize`, or without casts, is as before."""
    said = [each.message for each in migrate_text(PRODUCT.replace("{}", value)).findings]
    found = [each for each in said if each.startswith("products of tensors that run outside of autocast")]
    assert [each.split(";")[0].split()[-1] for each in found] == ([] if line is None else [str(line)])


WRITING = """import torch
from apex import amp

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.layer.weight.data.copy_(torch.eye(4))

    def forward(self, x):
        first = self.layer(x)
        {}
        return first + self.layer(x)

model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="{}")
for x in data:
    optimizer.zero_grad()
    loss = model(x).mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("line", "level", "is_said"),
    [
        ("self.layer.weight.data.copy_(self.mean)", "O2", True),
        ("self.layer.weight.data = self.mean", "O2", True),
        ("torch.nn.utils.vector_to_parameters(self.mean, self.parameters())", "O2", True),
        ("self.layer.weight.data.copy_(self.mean)", "O1", False),  # which keeps casts, too
        ("self.buffer = first.detach()", "O2", False),
    ],
)
def test_weights_that_a_network_of_o2_writes_are_named(line: str, level: str, is_said: bool) -> None:
    """Within one forward pass autocast computes with the weights of before."""
    said = " ".join(each.message for each in migrate_text(WRITING.format(line, level)).findings)
    assert ("a network writes weights, as it may in line 12" in said) is is_said
