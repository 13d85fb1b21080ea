"""Training scripts drawn at random: networks, options of `amp.initialize`, and what happens from step to step."""

import random
from collections.abc import Callable

HEAD = """
import copy, hashlib, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from apex import amp

torch.set_num_threads(1)
torch.manual_seed({seed})
x, y = torch.randn(16, 8).cuda(), torch.randint(0, 4, (16,)).cuda()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.layer_norm = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.LayerNorm(16)
        self.second, self.last, self.scale = nn.Linear(16, 16), nn.Linear(16, 4), nn.Parameter(torch.tensor(1.5))
        self.conv = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, inputs):
        hidden = {activation}(self.norm(self.first(inputs)))
        hidden = hidden + self.conv(hidden.unsqueeze(1)).mean(1)
        out = self.second(hidden)
        {mix}
        return self.last(self.second(out)) * self.scale


def digest():
    tensors = [each for net in nets for each in net.state_dict().values()]
    return hashlib.sha1(b"".join(each.float().numpy().tobytes() for each in tensors)).hexdigest()[:10]


def gradients(params):
    grads = [each.grad for each in params]
    return [None if each is None else (str(each.dtype), float(each.float().norm())) for each in grads]


def loss_of(i, factor=1.0):
    out = nets[i](x)
    print("out", out.dtype)
    return {loss} * factor


nets = [Net().cuda() for _ in range({nets})]
optimizers = [{optimizer} for net in nets]
found = amp.initialize(nets, optimizers, opt_level={level!r}, num_losses={losses}, verbosity=0{options})
nets, optimizers = found
saved = {{}}
"""
ACTIVATIONS = ("F.gelu", "F.relu", "torch.tanh", "F.softplus", "F.silu")
MIXES = (
    "out += self.layer_norm(hidden)",
    "out = out + self.layer_norm(hidden)",
    "out = torch.cat([out[:, :8], self.layer_norm(hidden)[:, 8:].to(out.dtype)], 1)",
    "out = F.dropout(out, 0.0) * torch.sigmoid(self.layer_norm(hidden))",
    "out = torch.stack([out, out * 2]).sum(0)",
    "out = torch.einsum('bi,bi->bi', out, hidden.to(out.dtype).softmax(1))",
    "out = F.softmax(out, 1) + torch.log1p(out.abs()).logsumexp(1, keepdim=True)",
    "out = torch.log_softmax(out, 1).square() + out.log_softmax(1)",
    "out = F.scaled_dot_product_attention(out[None], out[None], out[None])[0]",
)
LOSSES = (
    "F.cross_entropy(out, y)",
    "F.nll_loss(F.log_softmax(out.float(), 1), y)",
    "F.mse_loss(out, torch.zeros_like(out))",
    "out.float().pow(2).mean()",
    "F.binary_cross_entropy_with_logits(out, torch.zeros_like(out))",
    "F.smooth_l1_loss(out, torch.ones_like(out))",
    "F.huber_loss(out, torch.ones_like(out))",
    "(1 - torch.cosine_similarity(out, torch.ones_like(out))).mean()",
    "F.pairwise_distance(out, torch.ones_like(out)).mean()",
)
FIRST = "[each for name, each in net.named_parameters() if 'first' in name]"
OTHERS = "[each for name, each in net.named_parameters() if 'first' not in name]"
OPTIMIZERS = (
    "torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)",
    "torch.optim.AdamW(net.parameters(), lr=1e-2)",
    f"torch.optim.SGD([{{'params': {FIRST}, 'lr': 0.01}}, {{'params': {OTHERS}}}], lr=0.1)",
    "torch.optim.Adam(net.parameters(), lr=1e-3, weight_decay=0.01)",
    "torch.optim.RMSprop(net.parameters(), lr=1e-3)",
)
# What happens now and then, as code about a network, its optimizer and its number.
EVENTS: tuple[Callable[[str, str, int], str], ...] = (
    lambda net, optimizer, i: f"{optimizer}.step()\nprint('step', digest())",
    lambda net, optimizer, i: (
        f"{net}.eval()\nwith torch.no_grad():\n    print('eval', {net}(x).dtype, {net}(x).float().sum().item())\n"
        f"{net}.train()"
    ),
    lambda net, optimizer, i: f"for group in {optimizer}.param_groups:\n    group['lr'] *= 0.5",
    lambda net, optimizer, i: f"loss_of({i}).backward()\nprint('plain', gradients({net}.parameters()))",
    lambda net, optimizer, i: f"saved['weights'] = copy.deepcopy({net}.state_dict())",
    lambda net, optimizer, i: f"if 'weights' in saved:\n    {net}.load_state_dict(saved['weights'])",
    lambda net, optimizer, i: f"saved[{i}] = copy.deepcopy({optimizer}.state_dict())",
    lambda net, optimizer, i: (
        f"if {i} in saved and len(saved[{i}]['param_groups']) == len({optimizer}.param_groups):\n"
        f"    {optimizer}.load_state_dict(saved[{i}])"
    ),
    lambda net, optimizer, i: "saved['amp'] = copy.deepcopy(amp.state_dict())",
    lambda net, optimizer, i: "if 'amp' in saved:\n    amp.load_state_dict(saved['amp'])",
    lambda net, optimizer, i: f"{net}.second.requires_grad_(not {net}.second.weight.requires_grad)",
    lambda net, optimizer, i: (
        f"print(torch.autograd.grad(loss_of({i}), [{net}.last.weight])[0].float().norm().item())"
    ),
    lambda net, optimizer, i: (
        f"out = checkpoint({net}, x.clone().requires_grad_(), use_reentrant=False)\n"
        f"with amp.scale_loss(out.float().mean(), {optimizer}) as scaled:\n    scaled.backward()\n"
        f"print('recomputed', out.dtype, gradients(amp.master_params({optimizer})))"
    ),
    lambda net, optimizer, i: (
        f"new = nn.Linear(4, 4).cuda().to({net}.last.weight.dtype)\n"
        f"{optimizer}.add_param_group({{'params': list(new.parameters())}})"
    ),
)


def draw_training(seed: int) -> str:
    """Return the text of a script for Apex, which prints losses, types, gradients, scales and digests of weights."""
    draw = random.Random(seed)
    level = draw.choice(("O0", "O1", "O1", "O2", "O3"))
    count, losses = draw.choice((1, 1, 2)), draw.choice((1, 1, 2))
    given = {
        "loss_scale": (0.2, ("128.0", "'dynamic'", "1.0")),
        "keep_batchnorm_fp32": (0.25 if level in ("O2", "O3") else 0.0, ("True", "False", "'True'")),
        "cast_model_outputs": (0.15, ("torch.float16", "torch.float32")),
        "min_loss_scale": (0.15, ("1.0", "32768.0")),
        "master_weights": (0.2 if level == "O3" else 0.0, ("True",)),
    }
    options = [
        f", {name}={draw.choice(values)}" for name, (share, values) in given.items() if draw.random() < share
    ]
    head = HEAD.format(
        seed=seed,
        activation=draw.choice(ACTIVATIONS),
        mix=draw.choice(MIXES),
        loss=draw.choice(LOSSES),
        nets=count,
        optimizer=draw.choice(OPTIMIZERS),
        level=level,
        losses=losses,
        options="".join(options),
    )
    parts = []
    for _ in range(draw.randint(8, 22)):
        i = draw.randrange(count)
        net, optimizer = f"nets[{i}]", f"optimizers[{i}]"
        if draw.random() < 0.5:
            parts.append(_draw_update(draw, i, optimizer, loss_id=draw.randrange(losses)))
        else:
            parts.append(draw.choice(EVENTS)(net, optimizer, i))
    return "\n".join([head, *parts, "print('end', digest())\n"])


def _draw_update(draw: random.Random, i: int, optimizer: str, *, loss_id: int) -> str:
    """Return the code of one backward pass, with an overflow now and then, and mostly with a step."""
    clear = draw.choice(("", "zero_grad()", "zero_grad(set_to_none=True)", "zero_grad(set_to_none=False)"))
    factor = "1e30" if draw.random() < 0.12 else "1.0"
    block = draw.choice(
        ("",) * 8 + ("with torch.autocast('cuda', enabled=False):", "with amp.disable_casts():")
    )
    delay = draw.choice(("",) * 6 + (", delay_unscale=True", ", delay_overflow_check=True"))
    owner = optimizer if draw.random() < 0.85 else "optimizers"
    lines = [
        f"{optimizer}.{clear}" if clear else "",
        f"{block}\n    loss = loss_of({i}, {factor})" if block else f"loss = loss_of({i}, {factor})",
        f"with amp.scale_loss(loss, {owner}, loss_id={loss_id}{delay}) as scaled:",
        "    scaled.backward()",
        f"print('loss', loss.dtype, loss.item(), scaled.item(), gradients(amp.master_params({optimizer})))",
        f"nn.utils.clip_grad_norm_(amp.master_params({optimizer}), 0.5)" if draw.random() < 0.25 else "",
        f"{optimizer}.step()" if draw.random() < 0.85 else "",
        "print('weights', digest(), dict(amp.state_dict()))",
    ]
    return "\n".join(line for line in lines if line)
