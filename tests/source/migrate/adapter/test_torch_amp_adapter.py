"""The adapter against the engine, both under the emulated GPU: the same output, to the last digit."""

import ast
import copy
import inspect
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ampcompare import apex
from ampcompare.api.migration import lint_paths, migrate_script
from ampcompare.source.amp_names import ADAPTER
from ampcompare.source.migrate.adapter.imports import adapt_text, adapter_text
from ampcompare.source.migrate.adapter.mark import OFFERED
from ampcompare.source.migrate.replacements import DDP_ARGUMENTS
from tests.source.migrate.adapter.random_trainings import draw_training

SCRIPT = Path(__file__).with_name("scripts") / "train.py"
KINDS = (
    "plain", "adam", "static", "bounds", "disabled", "options", "accumulate", "kept", "losses", "gan", "twice",
    "evaluate", "closure", "scheduler", "parallel", "copy", "checkpoint", "group", "functions", "penalty", "threads",
    "recomputed", "late", "state", "adam state", "masters", "zeroing", "skips", "normalized",
)  # fmt: skip
FAST = [
    ("O1", "plain"),
    ("O1", "gan"),
    ("O1", "functions"),
    ("O2", "losses"),
    ("O2", "copy"),
    ("O2", "late"),
    ("O2", "adam state"),
    ("O3", "state"),
    ("O2", "masters"),
    ("O2", "zeroing"),
    ("O1", "skips"),
    ("O1", "normalized"),
]
EXTENDED = (pytest.mark.extended, pytest.mark.slow)
# What the engine prints and the adapter does not: the options, and a word about fp16 gradients.
SAYS = re.compile(r"Selected |Defaults |Processing |After |Warning:|Skipping loss|Unscaling |\w+ +: ")


def _run(python: Any, folder: Path, *arguments: str) -> tuple[int, list[str]]:
    words = [
        "-W",
        "ignore",
        "-m",
        "ampcompare",
        "exec",
        "--no-guards",
        "--device",
        "cpu",
        "train.py",
        *arguments,
    ]
    done = python.run(words, folder, {**os.environ, "OMP_NUM_THREADS": "1"})
    lines = [line for line in done.stdout.splitlines() if line.strip() and not SAYS.match(line)]
    return done.returncode, lines or done.stderr.splitlines()


def _compare(python: Any, folder: Path, text: str, *arguments: str, adapter: str = "") -> None:
    (folder / "train.py").write_text(text)
    expected = _run(python, folder, *arguments)
    assert expected[0] == 0, expected
    migration = adapt_text(text)
    assert not migration.findings
    (folder / "train.py").write_text(migration.text)
    (folder / f"{ADAPTER}.py").write_text(adapter or adapter_text())
    assert _run(python, folder, *arguments) == expected


REGISTERED = """\
import torch
from torch.nn import functional as F
from apex import amp

amp.register_half_function(torch, "einsum")
amp.register_half_function(F, "softmax")
amp.register_half_function(torch, "log1p")
amp.register_half_function(F, "gelu")
amp.register_float_function(torch, "softmax")
amp.register_float_function(torch.Tensor, "square")
amp.register_float_function(torch, "matmul")
amp.register_float_function(torch, "sigmoid")
amp.register_promote_function(torch, "tensordot")
amp.register_promote_function(torch, "bmm")
torch.manual_seed(0)
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
wide = torch.rand(8, 8, device="cuda")
half = model(wide)
for x, y in ((half, half), (wide, wide), (half, wide)):
    for result in (
        torch.einsum("bi,ij->bj", x, y), F.softmax(x, 1), torch.log1p(x.abs()), F.gelu(x), torch.softmax(x, 1),
        x.square(), torch.matmul(x, y), torch.sigmoid(x), torch.tensordot(x, y.to(x.dtype), 1),
        torch.bmm(x[None], y[None]), x.softmax(1), F.linear(x, y),
    ):
        print(result.dtype, result.flatten().tolist())
"""


IN_BACKWARD = """\
import torch
from torch import nn
from torch.nn import functional as F
from apex import amp


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.mm(weight.t())

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        to_x, to_weight = grad.mm(weight), grad.t().mm(x)
        print("product", grad.dtype, to_x.dtype, to_weight.dtype, (grad * weight.sum()).dtype)
        return to_x.to(x.dtype), to_weight.to(weight.dtype)


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            again = ctx.function(x)
        print("again", again.dtype, F.softmax(again, 1).dtype)
        torch.autograd.backward(again, grad)
        return None, x.grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.first.weight.register_hook(lambda grad: print("early hook", grad.mm(self.inner.weight).dtype))

    def block(self, x):
        return F.relu(self.inner(x))

    def forward(self, x):
        hidden = self.first(x)
        hidden = Product.apply(hidden.float(), self.inner.weight) + Product.apply(hidden, self.inner.weight)
        hidden = Recompute.apply(self.block, hidden) + Recompute.apply(self.block, hidden.float())
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: print("hook", grad.mm(self.inner.weight).dtype))
        return self.last(hidden)


torch.manual_seed(0)
net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net, optimizer = amp.initialize(net, optimizer, opt_level="O1", verbosity=0)
x, y = torch.randn(6, 8).cuda(), torch.randint(0, 4, (6,)).cuda()
for step in range(4):
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    print(loss.item(), [each.grad.norm().item() for each in net.parameters()])
"""


@pytest.mark.integration
def test_functions_that_a_script_registers_are_cast_as_it_says(forked_python: Any, tmp_path: Path) -> None:
    """Also those that the adapter keeps free of casts, and those that autocast casts otherwise."""
    _compare(forked_python, tmp_path, REGISTERED)


@pytest.mark.integration
@pytest.mark.parametrize(("level", "kind"), FAST)
def test_trains_as_the_engine(forked_python: Any, tmp_path: Path, level: str, kind: str) -> None:
    """Losses, scales, skipped steps, types and final weights."""
    _compare(forked_python, tmp_path, SCRIPT.read_text(), level, kind)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_the_engine_at_every_level(
    forked_python: Any, tmp_path: Path, level: str, kind: str
) -> None:
    _compare(forked_python, tmp_path, SCRIPT.read_text(), level, kind)


@pytest.mark.integration
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(k, marks=EXTENDED) for k in range(6, 160))])
def test_trainings_drawn_at_random_train_as_the_engine(forked_python: Any, tmp_path: Path, seed: int) -> None:
    """States saved and loaded in mid-training, groups added, weights frozen, passes without a scale, overflows."""
    _compare(forked_python, tmp_path, draw_training(seed))


@pytest.mark.integration
def test_grad_modes_leave_the_cache_of_casts_as_it_was(forked_python: Any, tmp_path: Path) -> None:
    """A checkpoint runs `no_grad` for each tensor that it keeps, at a moment at which gradients are off anyway."""
    begin = "    inputs = x.clone().requires_grad_()\n    for"
    text = SCRIPT.read_text()
    assert text.count(begin) == 1
    modes = "    torch.set_grad_enabled(mode=False)\n    net(x)\n    torch.set_grad_enabled(True)\n"
    text = text.replace(begin, f"{modes}    with torch.no_grad():\n        net(x)\n{begin}")
    _compare(forked_python, tmp_path, text, "O1", "recomputed")


HEAD = """import torch
from torch import nn
from apex import amp

torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x, y = torch.randn(16, 8).cuda(), torch.randint(0, 2, (16,)).cuda()
"""


@pytest.mark.integration
def test_reads_the_states_of_apex_and_of_a_grad_scaler(forked_python: Any, tmp_path: Path) -> None:
    text = HEAD + (
        "net, optimizer = amp.initialize(net, optimizer, num_losses=2, verbosity=0)\n"
        "state = dict(amp.state_dict())\n"
        "state['loss_scaler1'] = {'loss_scale': 64.0, 'unskipped': 7}\n"
        "amp.load_state_dict(state)\n"
        "print(dict(amp.state_dict()))\n"
        "if amp.__name__ == 'torch_amp_adapter':\n"
        "    amp.load_state_dict({'scale': 8.0, 'growth_factor': 2.0, 'backoff_factor': 0.5,\n"
        "                         'growth_interval': 2000, '_growth_tracker': 3})\n"
        "    assert amp.state_dict()['loss_scaler0'] == {'loss_scale': 8.0, 'unskipped': 3}\n"
        "    amp.load_state_dict({})\n"
    )
    _compare(forked_python, tmp_path, text)


@pytest.mark.integration
def test_loads_what_fits_of_states_of_other_runs(forked_python: Any, tmp_path: Path) -> None:
    """By position, with fewer entries and with more, as Apex does. Before `initialize` there are no scalers."""
    text = HEAD + (
        "print(hasattr(amp._amp_state, 'loss_scalers'))\n"
        "net, optimizer = amp.initialize(net, optimizer, num_losses=2, verbosity=0)\n"
        "for numbers in ((5,), (7, 0), (0, 1, 2, 3)):\n"
        "    amp.load_state_dict({f'loss_scaler{i}': {'loss_scale': 2.0**i, 'unskipped': i} for i in numbers})\n"
        "    print(dict(amp.state_dict())) if numbers[-1] < 3 else None\n"
        "try:\n    amp.load_state_dict({'loss_scaler0': {'loss_scale': 4.0}})\n"
        "except KeyError as error:\n    print(error)\n"
    )
    _compare(forked_python, tmp_path, text)


@pytest.mark.integration
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_loads_a_state_of_the_fused_adam_of_apex(forked_python: Any, tmp_path: Path, level: str) -> None:
    """Whose groups count the steps: the next ones are those of an AdamW with the same moments."""
    (tmp_path / f"{ADAPTER}.py").write_text(adapter_text())
    text = HEAD + (
        "from apex.optimizers import FusedAdam\n"
        "def step():\n"
        "    loss = nn.functional.cross_entropy(net(x).float(), y)\n"
        "    optimizer.zero_grad()\n"
        "    with amp.scale_loss(loss, optimizer) as scaled_loss:\n"
        "        scaled_loss.backward()\n"
        "    optimizer.step()\n"
        "    return loss.item()\n"
        f"net, optimizer = amp.initialize(net, FusedAdam(net.parameters()), opt_level='{level}', verbosity=0)\n"
        "[step() for _ in range(3)]\n"
        "weights, state = {k: v.clone() for k, v in net.state_dict().items()}, optimizer.state_dict()\n"
        "state = {'state': {k: {n: t.clone() for n, t in v.items()} for k, v in state['state'].items()},\n"
        "         'param_groups': [dict(each) for each in state['param_groups']]}\n"
        "torch.save(state, 'of_torch.pt')\n"
        "for each in state['state'].values():\n    del each['step']\n"
        "state['param_groups'] = [{'params': each['params'], 'lr': each['lr'], 'bias_correction': True, 'eps': 1e-8,\n"
        "                          'betas': (0.9, 0.999), 'weight_decay': 0.0, 'step': 3}\n"
        "                         for each in state['param_groups']]\n"
        "found = []\n"
        "for one in (torch.load('of_torch.pt'), state):\n"
        "    net.load_state_dict(weights)\n"
        "    optimizer.load_state_dict(one)\n"
        "    found.append([step() for _ in range(3)])\n"
        "print(found[0] == found[1], len(set(found[0])))\n"
    )
    (tmp_path / "train.py").write_text(adapt_text(text).text)
    assert _run(forked_python, tmp_path) == (0, ["True 3"])


WRAPPER = """
class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner, self.count, self.state, self.defaults = inner, 0, {}, {}
        self.param_groups = inner.param_groups
        for each in self.params():
            self.state[each] = {"slow": each.detach().clone()}
    def params(self):
        return [each for group in self.inner.param_groups for each in group["params"]]
    def zero_grad(self):
        self.inner.zero_grad()
    def state_dict(self):
        return self.inner.state_dict()
    def load_state_dict(self, state):
        self.inner.load_state_dict(state)
    def step(self, closure=None):
        self.inner.step(closure)
        self.count += 1
        for each in self.params() if self.count % 2 == 0 else []:
            slow = self.state[each]["slow"]
            slow.copy_(each.data.add_(slow).mul_(0.5))
"""


@pytest.mark.integration
def test_an_optimizer_around_another_one_shares_its_masters_and_groups(
    forked_python: Any, tmp_path: Path
) -> None:
    text = (
        HEAD.replace("torch.manual_seed", f"{WRAPPER}\ntorch.manual_seed")
        + "optimizer = Lookahead(optimizer)\n"
        + "net, optimizer = amp.initialize(net, optimizer, opt_level='O2', verbosity=0)\n"
        + "for step in range(5):\n"
        + "    loss = nn.functional.cross_entropy(net(x), y)\n"
        + "    optimizer.zero_grad()\n"
        + "    with amp.scale_loss(loss, optimizer) as scaled_loss:\n"
        + "        scaled_loss.backward()\n"
        + "    optimizer.step()\n"
        + "    optimizer.param_groups[0]['lr'] *= 0.5\n"
        + "    print(loss.item(), optimizer.inner.param_groups[0]['lr'])\n"
    )
    _compare(forked_python, tmp_path, text)


@pytest.mark.integration
def test_casts_in_threads_that_call_no_forward_of_the_model(forked_python: Any, tmp_path: Path) -> None:
    """As servers and thread pools run parts of a model, and methods other than `forward`."""
    text = HEAD + (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "net, optimizer = amp.initialize(net, optimizer, verbosity=0)\n"
        "with ThreadPoolExecutor(1) as pool:\n"
        "    print(pool.submit(lambda: net[0](x).dtype).result(), net[0](x).dtype)\n"
    )
    _compare(forked_python, tmp_path, text)


OWN_BLOCKS = """
from torch.utils.checkpoint import checkpoint
net, optimizer = amp.initialize(net, optimizer, verbosity=0)
off = torch.autocast("cuda", enabled=False)


@off
def features(x):
    return net[1](net[0](x))


class Product(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        return x.float() * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        return grad * 2


for step in range(6):
    optimizer.zero_grad()
    with torch.cuda.amp.autocast(enabled=False):
        out = net(x)
        inner = features(x)
        with amp.disable_casts(), off:
            plain = net[0](x)
        again = checkpoint(net, x, use_reentrant=False)
        with torch.no_grad(), off:
            frozen = net(x)
    print(*(each.dtype for each in (out, inner, plain, again, frozen, net[0](x))))
    loss = nn.functional.cross_entropy(out, y) + Product.apply(again).pow(2).mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        with torch.autocast("cuda", enabled=False):
            scaled_loss.backward()
    with off:
        optimizer.step()
    print(loss.item(), net[0].weight.grad.dtype, net[0].weight.sum().item())
"""


@pytest.mark.integration
def test_disabled_autocast_blocks_of_a_script_turn_no_casts_off(forked_python: Any, tmp_path: Path) -> None:
    """As those of trainers that know both ways; Apex's casts ask nothing of torch's autocast."""
    _compare(forked_python, tmp_path, HEAD + OWN_BLOCKS)
    _, lines = _run(forked_python, tmp_path)
    assert lines[0] == " ".join(f"torch.float{bits}" for bits in (16, 16, 32, 16, 16, 16))


@pytest.mark.integration
def test_a_group_that_is_added_before_the_first_backward_pass_makes_masters(
    forked_python: Any, tmp_path: Path
) -> None:
    """As in Apex, which then keeps fp32 gradients of passes before the first block."""
    text = HEAD.replace("nn.ReLU()", "nn.BatchNorm1d(8)") + (
        "net, optimizer = amp.initialize(net, optimizer, opt_level='O2', verbosity=0)\n"
        "optimizer.add_param_group({'params': nn.Linear(4, 4).cuda().half().parameters(), 'lr': 0.5})\n"
        "nn.functional.cross_entropy(net(x), y).backward()\n"
        "print([each.grad is None for each in amp.master_params(optimizer)])\n"
        "for _ in range(3):\n"
        "    with amp.scale_loss(nn.functional.cross_entropy(net(x), y), optimizer) as scaled:\n"
        "        scaled.backward()\n"
        "    optimizer.step()\n"
        "    print(scaled.item(), [(each.dtype, each.sum().item()) for each in amp.master_params(optimizer)])\n"
    )
    _compare(forked_python, tmp_path, text)


@pytest.mark.integration
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_fused_layer_norm_returns_the_type_of_its_input(
    forked_python: Any, tmp_path: Path, level: str
) -> None:
    """That of autocast in a block of torch's; its gradients have the types that they have in Apex."""
    text = HEAD.replace(
        "from apex import amp", "from apex import amp\nfrom apex.normalization import FusedLayerNorm"
    ) + (
        "net = nn.Sequential(nn.Linear(8, 8), FusedLayerNorm(8), nn.Linear(8, 2)).cuda()\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        f"net, optimizer = amp.initialize(net, optimizer, opt_level='{level}', verbosity=0)\n"
        "with torch.autocast('cuda', torch.float16, enabled=False):\n"
        "    print(net[:2](x.to(net[0].weight.dtype)).dtype)\n"
        "if net[1].weight.dtype is torch.float32:\n    print(net[1](x).dtype, net[1](x).sum().item())\n"
        "with torch.autocast('cuda', torch.float16):\n    print(net[:2](x).dtype)\n"
        "for _ in range(3):\n"
        "    loss = nn.functional.cross_entropy(net(x), y)\n"
        "    optimizer.zero_grad()\n"
        "    with amp.scale_loss(loss, optimizer) as scaled_loss:\n        scaled_loss.backward()\n"
        "    optimizer.step()\n"
        "    print(loss.item(), net[1].weight.grad.dtype, net[1].weight.sum().item())\n"
    )
    _compare(forked_python, tmp_path, text)


@pytest.mark.integration
def test_products_that_apex_leaves_alone_keep_their_types(forked_python: Any, tmp_path: Path) -> None:
    """Autocast casts what they are made of."""
    text = HEAD + (
        "net, optimizer = amp.initialize(net, optimizer, verbosity=0)\n"
        "half = net(x)\n"
        "for each in (x[:8], half[:2, :2]):\n"
        "    found = (torch.einsum('ij,jk', each, each), torch.tensordot(each, each, 1), torch.inner(each, each),\n"
        "             torch.chain_matmul(each, each, each), torch.matrix_power(each, 3), torch.mm(each, each))\n"
        "    print([(one.dtype, one.float().sum().item()) for one in found])\n"
    )
    _compare(forked_python, tmp_path, text)


@pytest.mark.integration
def test_functions_that_apex_does_not_list_keep_their_types(forked_python: Any, tmp_path: Path) -> None:
    """Autocast casts them, as other names of what Apex lists, or by what they call."""
    text = HEAD + (
        "net, optimizer = amp.initialize(net, optimizer, verbosity=0)\n"
        "half = net(x).sigmoid()\n"
        "for a, b in ((half, half), (x[:, :2], half), (half, x[:, :2])):\n"
        "    found = (a.arccos(), torch.arcsin(a), a.arctan2(a), a.cov(), a.sum_to_size(1), a.square(),\n"
        "             torch.layer_norm(a, (2,)), torch.group_norm(a, 1), nn.functional.layer_norm(a, (2,)),\n"
        "             nn.functional.group_norm(a, 1), torch.pairwise_distance(a, b), a.clone().atan2_(b),\n"
        "             a.clone().eq_(b), a.clone().lt_(b))\n"
        "    print([(one.dtype, one.flatten().tolist()) for one in found])\n"
    )
    _compare(forked_python, tmp_path, text)


@pytest.mark.integration
def test_functions_of_the_modules_of_torch_that_apex_does_not_list_keep_their_types(
    forked_python: Any, tmp_path: Path
) -> None:
    """Autocast casts products, norms and logarithms under all of their names; O1 casts `norm`, which calls one."""
    text = HEAD + (
        "net, optimizer = amp.initialize(net, optimizer, verbosity=0)\n"
        "linalg, special = torch.linalg, torch.special\n"
        "half = net(x).sigmoid()[:2]\n"
        "for a in (half, x[:2, :2]):\n"
        "    found = (linalg.matmul(a, a), linalg.multi_dot([a, a]), linalg.vecdot(a, a), linalg.vector_norm(a),\n"
        "             special.expm1(a), special.softmax(a, 1), special.log_softmax(a, 1), special.logsumexp(a, 1),\n"
        "             special.log1p(a.abs()), linalg.norm(a.flatten()), a.norm(), torch.norm(a, dim=1),\n"
        "             a.norm('nuc'), nn.functional.normalize(a))\n"
        "    print([(one.dtype, one.flatten().tolist()) for one in found])\n"
    )
    _compare(forked_python, tmp_path, text)


LOADED = "net.load_state_dict({key: torch.full_like(one, k) for key, one in net.state_dict().items()})"
FILLED = "for each in net.parameters(): each.data.fill_(k)"
PUT_IN = "for each in net.parameters(): each.data = torch.full_like(each, k)"


@pytest.mark.integration
@pytest.mark.parametrize(
    ("change", "mode"),
    [
        (LOADED, "torch.no_grad()"),
        (LOADED, "torch.enable_grad()"),
        (FILLED, "torch.no_grad()"),
        (PUT_IN, "torch.inference_mode()"),
    ],
)
def test_evaluations_see_the_weights_of_their_time(
    forked_python: Any, tmp_path: Path, change: str, mode: str
) -> None:
    """Those of checkpoints that are loaded, or averages that are swapped in, with no step between them."""
    text = HEAD + (
        "net, optimizer = amp.initialize(net, optimizer, verbosity=0)\n"
        "net(x).sum().item()\n"
        "for k in (1, 2, 3):\n"
        f"    with torch.no_grad():\n        {change}\n"
        f"    with {mode}:\n        print(net(torch.ones_like(x))[0, 0].item())\n"
    )
    (tmp_path / f"{ADAPTER}.py").write_text(adapter_text())
    (tmp_path / "train.py").write_text(adapt_text(text).text)
    _, lines = _run(forked_python, tmp_path)
    assert [float(line) for line in lines[-3:]] == [(8 * k + k) * 8 * k + k for k in (1, 2, 3)]


@pytest.mark.integration
def test_inputs_with_gradients_are_read_as_they_are(forked_python: Any, tmp_path: Path) -> None:
    """As adversarial examples, which change in place from pass to pass."""
    text = HEAD + (
        "net, optimizer = amp.initialize(net, optimizer, verbosity=0)\n"
        "adverse = x.clone().requires_grad_()\n"
        "for _ in range(3):\n"
        "    loss = nn.functional.cross_entropy(net(adverse), y)\n"
        "    (grad,) = torch.autograd.grad(loss, adverse)\n"
        "    adverse.data.add_(0.5 * grad.sign())\n"
        "    print(loss.item(), grad.abs().sum().item())\n"
    )
    _compare(forked_python, tmp_path, text)


@pytest.mark.integration
def test_a_derivative_that_is_called_by_a_name_of_its_own_runs_without_casts(
    forked_python: Any, tmp_path: Path
) -> None:
    """As in penalties, of which a product in fp32 is a part that no pass casts."""
    text = (
        "from torch.autograd import grad as derivative\n"
        + HEAD
        + (
            "net, optimizer = amp.initialize(net, optimizer, verbosity=0)\n"
            "wide = torch.rand(8, 8, device='cuda')\n"
            "for _ in range(3):\n"
            "    point = x.clone().requires_grad_()\n"
            "    out = torch.einsum('bi,ij->bj', point, wide) * net(point).float().sum()\n"
            "    (slope,) = derivative(out.sum(), point, create_graph=True)\n"
            "    penalty = slope.square().mean()\n"
            "    optimizer.zero_grad()\n"
            "    with amp.scale_loss(penalty, optimizer) as scaled_loss:\n"
            "        scaled_loss.backward()\n"
            "    optimizer.step()\n"
            "    print(slope.dtype, slope.norm().item(), penalty.item())\n"
        )
    )
    _compare(forked_python, tmp_path, text)


@pytest.mark.integration
def test_what_a_backward_pass_calls_in_python_is_cast_as_the_forward_pass(
    forked_python: Any, tmp_path: Path
) -> None:
    """Apex's casts are in Python: own functions, what they compute again, and hooks of tensors have them too."""
    _compare(forked_python, tmp_path, IN_BACKWARD)


@pytest.mark.integration
def test_inputs_in_fp64_go_into_products_in_fp16(forked_python: Any, tmp_path: Path) -> None:
    """As arrays of numpy have them; what is no product computes in fp64, as under Apex."""
    text = HEAD + (
        "net = nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2)).cuda()\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "net, optimizer = amp.initialize(net, optimizer, verbosity=0)\n"
        "wide = x.double()\n"
        "for _ in range(3):\n"
        "    out = net((wide - wide.mean())[:, None])\n"
        "    loss = nn.functional.cross_entropy(out, y)\n"
        "    optimizer.zero_grad()\n"
        "    with amp.scale_loss(loss, optimizer) as scaled_loss:\n"
        "        scaled_loss.backward()\n"
        "    optimizer.step()\n"
        "    print(out.dtype, loss.item(), (wide @ wide.T).dtype)\n"
    )
    _compare(forked_python, tmp_path, text)


@pytest.mark.integration
def test_inputs_in_fp64_go_into_recurrent_layers_in_fp16(forked_python: Any, tmp_path: Path) -> None:
    text = HEAD + (
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.lstm, self.gru, self.rnn = nn.LSTM(8, 4), nn.GRU(4, 4), nn.RNN(4, 4)\n"
        "        self.cells = nn.ModuleList([nn.LSTMCell(4, 4), nn.GRUCell(4, 4), nn.RNNCell(4, 2)])\n"
        "    def forward(self, x):\n"
        "        for layer in (self.lstm, self.gru, self.rnn):\n"
        "            x = layer(x.double())[0]\n"
        "            print(x.dtype)\n"
        "        x = self.cells[0](x.double())[0]\n"
        "        return self.cells[2](self.cells[1](x.double(), x.double()).double())\n"
        "net = Net().cuda()\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "net, optimizer = amp.initialize(net, optimizer, verbosity=0)\n"
        "for _ in range(3):\n"
        "    out = net(x.double())\n"
        "    with amp.scale_loss(nn.functional.cross_entropy(out, y), optimizer) as scaled_loss:\n"
        "        scaled_loss.backward()\n"
        "    optimizer.step()\n"
        "    print(out.dtype, out.flatten().tolist())\n"
    )
    _compare(forked_python, tmp_path, text)


@pytest.mark.integration
@pytest.mark.parametrize(
    "given", ["x=wide", "x=[wide]", "x={'x': (wide, 1)}", "[wide]", "{'x': [1, {'x': wide}]}"]
)
def test_inputs_in_fp64_are_seen_by_name_and_inside_of_others(
    forked_python: Any, tmp_path: Path, given: str
) -> None:
    text = HEAD + (
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.last = nn.Linear(8, 2)\n"
        "    def forward(self, x):\n"
        "        while not isinstance(x, torch.Tensor):\n"
        "            x = x.get('x') if isinstance(x, dict) else x[-1] if isinstance(x[0], int) else x[0]\n"
        "        return self.last(x @ x.T @ x)\n"
        "net = Net().cuda()\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "net, optimizer = amp.initialize(net, optimizer, verbosity=0)\n"
        "wide = x.double()\n"
        "for _ in range(2):\n"
        f"    out = net({given})\n"
        "    with amp.scale_loss(nn.functional.cross_entropy(out, y), optimizer) as scaled_loss:\n"
        "        scaled_loss.backward()\n"
        "    optimizer.step()\n"
        "    print(out.dtype, out.flatten().tolist())\n"
    )
    _compare(forked_python, tmp_path, text)


@pytest.mark.integration
def test_no_cast_of_an_input_by_name_is_kept(forked_python: Any, tmp_path: Path) -> None:
    """A leaf that is written in place between two calls of a model, as in an attack, is cast again."""
    text = HEAD + (
        "net, optimizer = amp.initialize(net, optimizer, verbosity=0)\n"
        "leaf = x.clone().requires_grad_()\n"
        "for _ in range(3):\n"
        "    out = net(input=leaf)\n"
        "    (grad,) = torch.autograd.grad(nn.functional.cross_entropy(out, y), leaf)\n"
        "    leaf.data.add_(grad.sign())\n"
        "    print(out.flatten().tolist())\n"
    )
    _compare(forked_python, tmp_path, text)


@pytest.mark.integration
@pytest.mark.parametrize(
    "forward",
    [
        "net[2](net[1](net[0](leaf)))",
        "nn.functional.linear(leaf, weight)",
        "leaf @ weight",
        "torch.mm(leaf, weight)",
        "leaf.matmul(weight) + leaf.mm(weight)",
        "torch.conv1d(leaf[:, None], leaf[:1, None]).flatten(1)",
    ],
)
def test_no_cast_of_a_tensor_that_is_no_weight_is_kept(
    forked_python: Any, tmp_path: Path, forward: str
) -> None:
    """Autocast keeps the casts of all leaves, Apex those of parameters; gradients of several uses are added in fp32."""
    text = HEAD + (
        "net, optimizer = amp.initialize(net, optimizer, verbosity=0)\n"
        "leaf, weight = x.clone().requires_grad_(), torch.eye(8).cuda()\n"
        "for _ in range(3):\n"
        f"    out = {forward}\n"
        f"    (grad,) = torch.autograd.grad((out.float() ** 2).mean() + ({forward}).float().sum(), leaf)\n"
        "    leaf.data.add_(grad.sign())\n"
        "    print(out.dtype, out.flatten().tolist(), grad.flatten().tolist())\n"
    )
    _compare(forked_python, tmp_path, text)


@pytest.mark.integration
def test_products_of_fp64_are_fp16_wherever_they_are_made(forked_python: Any, tmp_path: Path) -> None:
    text = HEAD + (
        "net, optimizer = amp.initialize(net, optimizer, verbosity=0)\n"
        "wide = x.double()\n"
        "results = wide @ wide.T, wide.mm(wide.T), torch.matmul(wide, wide.T), net[0](wide), net(x).double() @ x[:2]\n"
        "for result in results:\n"
        "    print(result.dtype, result.flatten().tolist())\n"
    )
    _compare(forked_python, tmp_path, text)


@pytest.mark.integration
def test_sparse_products_distributions_and_other_names_of_functions_run_without_casts(
    forked_python: Any, tmp_path: Path
) -> None:
    """Apex lists no such product; and the modules of torch.distributions bound their functions by imports."""
    text = HEAD + (
        "net, optimizer = amp.initialize(net, optimizer, verbosity=0)\n"
        "sparse, out = torch.eye(16).cuda().to_sparse(), net(x)\n"
        "bernoulli, geometric = (getattr(torch.distributions, x)(logits=out) for x in ('Bernoulli', 'Geometric'))\n"
        "for result in (\n"
        "    torch.spmm(sparse, x), torch.dsmm(sparse, x), torch.sparse.mm(sparse, x), bernoulli.entropy(),\n"
        "    bernoulli.log_prob((out > 0).to(out.dtype)), geometric.log_prob((out > 0).to(out.dtype)),\n"
        "    torch.distributions.Categorical(logits=out).entropy(),\n"
        "    torch.lstm_cell(x, (x, x), torch.ones(32, 8).cuda(), torch.ones(32, 8).cuda())[0],\n"
        "    torch.kl_div(out, out), nn.functional.kl_div(out, out), torch.hinge_embedding_loss(out, out.sign()),\n"
        "    nn.functional.triplet_margin_loss(out, -out, out),\n"
        "    torch.triplet_margin_loss(out, -out, out),\n"
        "):\n"
        "    print(result.dtype, result.flatten().tolist())\n"
    )
    _compare(forked_python, tmp_path, text)


@pytest.mark.integration
def test_the_step_behind_an_overflow_is_another_one(forked_python: Any, tmp_path: Path) -> None:
    """Apex replaces it for once; scripts that compare it run the batch again, also below a scheduler."""
    text = HEAD + (
        "net, optimizer = amp.initialize(net, optimizer, verbosity=0)\n"
        "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n"
        "for index in range(4):\n"
        "    for tries in range(4):\n"
        "        loss = nn.functional.cross_entropy(net(x), y) * (3e37 if index == 1 and tries < 2 else 1)\n"
        "        default = optimizer.step\n"
        "        with amp.scale_loss(loss, optimizer) as scaled_loss:\n"
        "            scaled_loss.backward()\n"
        "        is_skipped = optimizer.step is not default\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
        "        print(index, tries, is_skipped, optimizer.step is default, net[0].weight.sum().item())\n"
        "        if not is_skipped:\n"
        "            break\n"
        "    scheduler.step()\n"
    )
    _compare(forked_python, tmp_path, text)


@pytest.mark.integration
def test_a_whole_model_is_saved_and_loaded(forked_python: Any, tmp_path: Path) -> None:
    text = HEAD + (
        "net, optimizer = amp.initialize(net, optimizer, verbosity=0)\n"
        "torch.save(net, 'model.pt')\n"
        "print(torch.load('model.pt', weights_only=False)(x).sum().item() == net(x).sum().item())\n"
    )
    _compare(forked_python, tmp_path, text)


@pytest.mark.integration
def test_an_error_in_a_block_leaves_the_gradients_that_were_there(forked_python: Any, tmp_path: Path) -> None:
    text = HEAD + (
        "net, optimizer = amp.initialize(net, optimizer, verbosity=0)\n"
        "with amp.scale_loss(net(x).float().sum(), optimizer) as loss:\n"
        "    loss.backward()\n"
        "before = [each.grad.clone() for each in net.parameters()]\n"
        "try:\n"
        "    with amp.scale_loss(net(x).float().sum(), optimizer) as loss:\n"
        "        raise KeyError\n"
        "except KeyError:\n"
        "    print([torch.equal(a, b.grad) for a, b in zip(before, net.parameters())])\n"
    )
    _compare(forked_python, tmp_path, text)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("amp.initialize(net, optimizer, opt_level='01')", "letter O"),
        ("amp.initialize(net, optimizer, opt_level='O1', keep_batchnorm_fp32=True)", "not for opt_level O1"),
        (
            "amp.initialize(net, optimizer, opt_level='O2', patch_torch_functions=True)",
            "not for opt_level O2",
        ),
        (
            "amp.initialize(net, optimizer); amp.initialize(net, optimizer)",
            "went through amp.initialize before",
        ),
        ("amp.scale_loss(x, optimizer).__enter__()", "without amp.initialize of torch_amp_adapter"),
        ("amp.initialize(net); amp.load_state_dict({'model': {}, 'amp': {}})", "the keys ['model', 'amp']"),
        (
            "amp.initialize(net); nn.functional.binary_cross_entropy(net(x).sigmoid(), net(x).sigmoid())",
            "needs fp32 under O1",
        ),
        ("amp.initialize(net); amp.scale_loss(x, optimizer).__enter__()", "no attribute '_adapter_stash'"),
    ],
)
def test_says_what_it_cannot_do(forked_python: Any, tmp_path: Path, code: str, says: str) -> None:
    (tmp_path / f"{ADAPTER}.py").write_text(adapter_text())
    (tmp_path / "train.py").write_text(adapt_text(f"{HEAD}{code}\n").text)
    code_, _ = _run(forked_python, tmp_path)
    words = ["-m", "ampcompare", "exec", "--no-guards", "--device", "cpu", "train.py"]
    done = forked_python.run(words, tmp_path, dict(os.environ))
    assert code_ == 1
    assert says in done.stderr


@pytest.mark.integration
def test_tensors_on_the_cpu_keep_their_types_where_there_is_a_gpu(forked_python: Any, tmp_path: Path) -> None:
    """Apex casts CUDA tensors alone, so that statistics of fp64 on the host keep their digits."""
    code = (
        "import sys\n"
        "amp.initialize(net, optimizer, opt_level='O1')\n"
        "wide = torch.tensor([1e8, 1e8 + 1, 1e8 + 2], dtype=torch.float64)\n"
        "gelu = nn.functional.gelu\n"
        "calls = [wide.std, lambda: torch.var(wide), wide.cpu, lambda: wide + wide.float(), lambda: gelu(wide)]\n"
        "print([call().dtype for call in calls])\n"
        "sys.modules['torch_amp_adapter']._casts.only_cuda = True  # as where CUDA is no CPU that stands for it\n"
        "print([call().dtype for call in calls], wide.std().item())\n"
    )
    (tmp_path / f"{ADAPTER}.py").write_text(adapter_text())
    (tmp_path / "train.py").write_text(adapt_text(HEAD + code).text)
    code_, lines = _run(forked_python, tmp_path)
    assert code_ == 0, lines
    float32, float64 = "torch.float32", "torch.float64"
    assert lines[-2] == f"[{', '.join([float32, float32, float32, float64, float32])}]"
    assert lines[-1] == f"[{', '.join([float64] * 5)}] 1.0"


@pytest.mark.integration
@pytest.mark.slow
def test_a_compiled_model_trains(forked_python: Any, tmp_path: Path) -> None:
    """TorchDynamo takes the open autocast block for the state in which it traces."""
    text = HEAD + (
        "net, optimizer = amp.initialize(net, optimizer, verbosity=0)\n"
        "net = torch.compile(net, backend='aot_eager')\n"
        "for _ in range(3):\n"
        "    out = net(x)\n"
        "    loss = nn.functional.cross_entropy(out, y)\n"
        "    optimizer.zero_grad()\n"
        "    with amp.scale_loss(loss, optimizer) as scaled_loss:\n"
        "        scaled_loss.backward()\n"
        "    optimizer.step()\n"
        "print(out.dtype, loss.item() < 0.8)\n"
    )
    _compare(forked_python, tmp_path, text)


def test_inputs_and_outputs_in_any_mapping_or_iterable_are_cast(forked_python: Any, tmp_path: Path) -> None:
    """A mapping that is no dict, a deque, an object with a method `to` and a text that is left alone."""
    text = (
        "import collections, torch\nfrom apex import amp\n\n"
        "class Pair(dict):\n    def to(self, dtype):\n        return Pair(x=self['x'].to(dtype))\n\n"
        "class Net(torch.nn.Linear):\n    def forward(self, given, name):\n"
        "        x = given['x'] if hasattr(given, 'keys') else given[0]\n        print(name, type(given), x.dtype)\n"
        "        y = super().forward(x)\n"
        "        return given if name == 'same' else {'deque': collections.deque([y, 1]),\n"
        "                                             'mapping': collections.UserDict(y=y)}[name]\n\n"
        "net = Net(4, 2).cuda()\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "net, optimizer = amp.initialize(net, optimizer, opt_level='O2', verbosity=0)\n"
        "x = torch.ones(3, 4).cuda()\n"
        "for given in (collections.UserDict(x=x), collections.deque([x]), Pair(x=x), [x, b'a', None]):\n"
        "    for name in ('deque', 'mapping', 'same'):\n"
        "        out = net(given, name)\n        print(type(out), out)\n"
        "        loss = net([x], 'deque')[0].sum()\n"
        "        with amp.scale_loss(loss, optimizer) as scaled_loss:\n            scaled_loss.backward()\n"
        "        optimizer.step()\n"
    )
    _compare(forked_python, tmp_path, text)


def test_is_one_short_file_on_torch_and_the_standard_library() -> None:
    text = adapter_text()
    assert len(text.splitlines()) <= 300
    assert all(len(line) <= 120 for line in text.splitlines())
    assert "SPDX-License-Identifier: 0BSD" in text
    tree = ast.parse(text, feature_version=(3, 8))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    named = {alias.name.split(".")[0] for node in imports for alias in node.names}
    named |= {str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert named <= {*sys.stdlib_module_names, "torch"}


def test_is_no_finding_of_lint_or_migrate(tmp_path: Path) -> None:
    (tmp_path / f"{ADAPTER}.py").write_text(adapter_text())
    assert not lint_paths(tmp_path).findings
    result = migrate_script(tmp_path / f"{ADAPTER}.py")
    assert not result.is_changed
    assert not result.rows()


def test_has_every_name_that_imports_are_changed_to() -> None:
    tree = ast.parse(adapter_text())
    names = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    stored = (node for each in tree.body if isinstance(each, ast.Assign) for node in ast.walk(each))
    names |= {node.id for node in stored if isinstance(node, ast.Name)}
    assert set().union(*OFFERED.values(), OFFERED) <= names


OF_DDP = (
    {"gradient_predivide_factor": 4.0},
    {
        "gradient_predivide_factor": 4.0,
        "gradient_average": False,
        "message_size": 25,
        "num_allreduce_streams": 2,
    },
    {
        "allreduce_always_fp32": True,
        "gradient_average_split_factor": 2.0,
        "prof": False,
        "shared_param": None,
    },
    {"delay_allreduce": True, "retain_allreduce_buffers": True, "allreduce_trigger_params": None},
)


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """The adapter, which changes nothing of torch before its `initialize`."""
    namespace: dict[str, Any] = {"__name__": ADAPTER}
    monkeypatch.setitem(sys.modules, ADAPTER, types.ModuleType(ADAPTER))
    exec(compile(adapter_text(), ADAPTER, "exec"), namespace)
    return types.SimpleNamespace(**namespace)


@pytest.fixture
def wrappers(adapter: types.SimpleNamespace) -> tuple[type, type]:
    """The DistributedDataParallel of the adapter and that of the engine."""
    return adapter.DistributedDataParallel, apex.parallel.DistributedDataParallel


def test_its_layers_and_wrapper_are_none_of_torch_where_those_of_apex_are_none(
    adapter: types.SimpleNamespace,
) -> None:
    """Scripts ask so which weights to initialize, to decay or to unwrap."""
    for kind, its, of_apex in (
        (nn.LayerNorm, adapter.FusedLayerNorm, apex.normalization.FusedLayerNorm),
        (
            nn.parallel.DistributedDataParallel,
            adapter.DistributedDataParallel,
            apex.parallel.DistributedDataParallel,
        ),
    ):
        assert not issubclass(its, kind), kind
        assert not issubclass(of_apex, kind), kind
    torch.manual_seed(0)
    norms = [kind((3, 4), eps=1e-3) for kind in (nn.LayerNorm, adapter.FusedLayerNorm)]
    x = torch.randn(2, 3, 4)
    for norm in norms:
        nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    assert torch.equal(norms[0](x), norms[1](x))
    assert [str(each.state_dict()) for each in norms[:1]] == [str(each.state_dict()) for each in norms[1:]]
    assert repr(norms[1]) == f"Fused{norms[0]}"
    assert not [*adapter.FusedLayerNorm(4, 1e-5, False).parameters()]
    assert torch.equal(copy.deepcopy(norms[1])(x), norms[0](x))


def test_its_wrapper_takes_the_options_of_that_of_apex_in_the_same_order(wrappers: tuple[type, type]) -> None:
    ours, theirs = (list(inspect.signature(each).parameters) for each in wrappers)
    assert ours == theirs[: len(ours)] == list(DDP_ARGUMENTS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_options_of_its_wrapper_mean_what_they_do_in_apex(wrappers: tuple[type, type]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for options in OF_DDP:
            found = []
            for wrapper in wrappers:
                torch.manual_seed(0)
                net = wrapper(nn.Linear(2, 2), **options)
                net(torch.ones(1, 2)).sum().backward()
                found.append(torch.cat([each.grad.flatten() for each in net.parameters()]))
            assert torch.equal(*found), options
            assert found[0][0] == (0.25 if options.get("gradient_average") is False else 1.0)
        with pytest.raises(ValueError, match="leave it out"):
            wrappers[0](nn.Linear(2, 2), shared_param=True)
        for wrapper in wrappers:
            net = wrapper(nn.Linear(2, 2))
            net.disable_allreduce()
            net(torch.ones(1, 2)).sum().backward()
            net.enable_allreduce()
            net(torch.ones(1, 2)).sum().backward()
            assert torch.equal(net.module.bias.grad, torch.full((2,), 2.0))
        for wrapper in wrappers:  # as of a network that teaches another one
            teacher = wrapper(nn.Linear(2, 2).requires_grad_(False)).eval()
            assert not teacher(torch.ones(1, 2)).requires_grad
            assert [*teacher.state_dict()] == ["module.weight", "module.bias"]
    finally:
        dist.destroy_process_group()
