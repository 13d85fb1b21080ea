"""A training of a few steps: `train.py LEVEL KIND`; prints losses, scales and a digest of the weights."""

import copy
import hashlib
import io
import sys

import torch
from apex import amp
from torch import nn
from torch.nn import functional

torch.set_num_threads(1)
torch.manual_seed(0)
level, kind = sys.argv[1:3]
x, y = torch.randn(16, 8).cuda(), torch.randint(0, 4, (16,)).cuda()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.layer_norm = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.LayerNorm(16)
        self.second, self.last, self.scale = (
            nn.Linear(16, 16),
            nn.Linear(16, 4),
            nn.Parameter(torch.tensor(1.5)),
        )

    def forward(self, inputs):
        hidden = functional.gelu(self.norm(self.first(inputs)))
        out = self.second(hidden)
        out += self.layer_norm(hidden)
        return self.last(self.second(out)) * self.scale


def digest(*nets):
    """Return a digest of all weights and buffers."""
    tensors = [each for net in nets for each in net.state_dict().values()]
    return hashlib.sha1(b"".join(each.float().numpy().tobytes() for each in tensors)).hexdigest()[:12]


def backward(loss, optimizer, **options):
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()


def norms(optimizer):
    return [None if each.grad is None else float(each.grad.norm()) for each in amp.master_params(optimizer)]


def train(net, optimizer, steps=6, inputs=x):
    """Train, with an overflow in the third step."""
    for step in range(steps):
        loss = functional.cross_entropy(net(inputs), y)
        optimizer.zero_grad()
        backward(loss * 1e30 if step == 2 else loss, optimizer)
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        print(loss.item(), dict(amp.state_dict()))


net = Net().cuda()
options = {"verbosity": 1}
if kind == "adam":
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
else:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
if kind == "plain" or kind == "adam":
    net, optimizer = amp.initialize(net, optimizer, opt_level=level)
    train(net, optimizer)
elif kind == "static":
    net, optimizer = amp.initialize(net, optimizer, opt_level=level, loss_scale="100.0")
    train(net, optimizer, steps=2)
elif kind == "bounds":
    net, optimizer = amp.initialize(
        net, optimizer, opt_level=level, loss_scale="dynamic", min_loss_scale=65536.0
    )
    train(net, optimizer)
elif kind == "disabled":
    net, optimizer = amp.initialize(net, optimizer, opt_level=level, enabled=False)
    train(net, optimizer, steps=2)
elif kind == "options":
    own = {
        "O1": {"patch_torch_functions": False},
        "O3": {"keep_batchnorm_fp32": "True", "master_weights": True},
    }
    more = own.get(level, {"keep_batchnorm_fp32": False})
    net, optimizer = amp.initialize(net, optimizer, opt_level=level, cast_model_outputs=torch.float16, **more)
    print(net(x).dtype)
    train(net, optimizer, steps=4)
elif kind == "accumulate":
    net, optimizer = amp.initialize(net, optimizer, opt_level=level)
    for step in range(9):
        loss = functional.cross_entropy(net(x[step % 3 :: 3]), y[step % 3 :: 3]) / 3
        last = step % 3 == 2
        backward(loss * 1e30 if step == 3 else loss, optimizer, delay_unscale=not last)
        if last:
            print(norms(optimizer))
            optimizer.step()
            optimizer.zero_grad()
        print(loss.item(), dict(amp.state_dict()))
elif kind == "kept":  # gradients that are there before a block are added after unscaling
    net, optimizer = amp.initialize(net, optimizer, opt_level=level)
    for step in range(6):
        loss = functional.cross_entropy(net(x), y)
        backward(loss, optimizer)
        print(loss.item(), norms(optimizer))
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
elif kind == "losses":  # two losses of one optimizer, with scalers of their own
    net, optimizer = amp.initialize(net, optimizer, opt_level=level, num_losses=2)
    for step in range(5):
        optimizer.zero_grad()
        out = net(x)
        losses = functional.cross_entropy(out, y), out.float().pow(2).mean()
        backward(losses[0], optimizer, loss_id=0)
        out = net(x)
        backward(out.float().pow(2).mean() * (1e30 if step == 1 else 1.0), optimizer, loss_id=1)
        optimizer.step()
        print([each.item() for each in losses], dict(amp.state_dict()))
elif kind == "gan":  # two models and optimizers, one loss for both
    other = nn.Linear(4, 1).cuda()
    second = torch.optim.Adam(other.parameters(), lr=1e-2)
    (net, other), (optimizer, second) = amp.initialize(
        [net, other], [optimizer, second], opt_level=level, num_losses=2
    )
    for step in range(5):
        optimizer.zero_grad()
        fake = net(x)
        loss = (other(fake) - 1).float().pow(2).mean()
        backward(loss, optimizer)
        optimizer.step()
        second.zero_grad()
        scaled = other(net(x)).float().pow(2).mean() * (1e30 if step == 1 else 1.0)
        backward(scaled, [optimizer, second], loss_id=1)
        second.step()
        optimizer.step()
        print(loss.item(), dict(amp.state_dict()), digest(other))
elif kind == "twice":  # a call of initialize for each model
    other = nn.Linear(4, 1).cuda()
    second = torch.optim.Adam(other.parameters(), lr=1e-2)
    net, optimizer = amp.initialize(net, optimizer, opt_level=level)
    other, second = amp.initialize(other, second, opt_level="O1" if level == "O1" else "O0")
    for _ in range(4):
        loss = other(net(x)).float().pow(2).mean()
        optimizer.zero_grad()
        second.zero_grad()
        backward(loss, [optimizer, second])
        optimizer.step()
        second.step()
        print(loss.item(), digest(other))
elif kind == "evaluate":  # between steps, without gradients; types of outputs
    net, optimizer = amp.initialize(net, optimizer, opt_level=level)
    for _ in range(4):
        loss = functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        net.eval()
        with torch.no_grad():
            out = net(x)
            print(out.dtype, out.cpu().dtype, out.float().sum().item(), out.float().std().item())
        net.train()
        backward(loss, optimizer)
        optimizer.step()
        print(loss.item())
elif kind == "closure":
    net, optimizer = amp.initialize(net, optimizer, opt_level=level)
    for _ in range(4):

        def closure():
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(x), y)
            backward(loss, optimizer)
            return loss

        try:
            print(optimizer.step(closure).item())
        except RuntimeError:
            print("RuntimeError")
elif kind == "scheduler":
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    net, optimizer = amp.initialize(net, optimizer, opt_level=level)
    for step in range(4):
        loss = functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        backward(loss * 1e30 if step == 0 else loss, optimizer)
        optimizer.step()
        schedule.step()
        print(loss.item(), schedule.get_last_lr())
elif kind == "parallel":
    net, optimizer = amp.initialize(net, optimizer, opt_level=level)
    train(nn.DataParallel(net), optimizer)
elif kind == "copy":  # a copy of the model, as averages of weights are
    net, optimizer = amp.initialize(net, optimizer, opt_level=level)
    average = copy.deepcopy(net)
    for _ in range(3):
        train(net, optimizer, steps=1)
        with torch.no_grad():
            for old, new in zip(average.parameters(), net.parameters(), strict=True):
                old.mul_(0.5).add_(new, alpha=0.5)
            print(average(x).float().sum().item())
    print(digest(average))
elif kind == "checkpoint":
    net, optimizer = amp.initialize(net, optimizer, opt_level=level)
    train(net, optimizer, steps=4)
    saved = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, saved)
    print({str(each.dtype) for each in net.state_dict().values()})
    train(net, optimizer, steps=2)
    saved.seek(0)
    state = torch.load(saved)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    amp.load_state_dict(state["amp"])
    train(net, optimizer, steps=2)
elif kind == "group":  # parameters that an optimizer gets later, and some that are frozen
    net.second.requires_grad_(False)
    optimizer = torch.optim.SGD([each for each in net.parameters() if each.requires_grad], lr=0.1)
    net, optimizer = amp.initialize(net, optimizer, opt_level=level)
    train(net, optimizer, steps=2)
    net.second.requires_grad_(True)
    optimizer.add_param_group({"params": list(net.second.parameters()), "lr": 0.01})
    train(net, optimizer, steps=2)
elif kind == "functions":
    import types

    own = types.SimpleNamespace(
        power=lambda value: value * value, product=lambda a, b: a @ b, join=lambda a, b: a - b
    )
    amp.register_float_function(own, "power")
    amp.register_half_function(own, "product")
    amp.register_promote_function(own, "join")
    amp.register_float_function(torch, "sigmoid")
    half, full = amp.half_function(lambda value: value), amp.float_function(lambda value: value)
    print(half(x).dtype, full(x.half()).dtype)
    net, optimizer = amp.initialize(net, optimizer, opt_level=level)
    out = net(x)
    print(out.dtype, half(x).dtype, full(out).dtype, own.power(out).dtype, own.product(x, x.t()).dtype)
    print(own.join(out, out.float()).dtype, torch.sigmoid(out).dtype)
    with amp.disable_casts():
        print(functional.linear(x, torch.ones(1, 8).cuda()).dtype)
    print(functional.binary_cross_entropy(torch.sigmoid(out), torch.ones(16, 4).cuda()).item())
    train(net, optimizer, steps=2)
elif kind == "penalty":  # a gradient of gradients
    net, optimizer = amp.initialize(net, optimizer, opt_level=level)
    for _ in range(3):
        inputs = x.clone().requires_grad_()
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(inputs), y)
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        backward(loss + slope.float().pow(2).mean(), optimizer)
        optimizer.step()
        print(loss.item(), slope.dtype)
elif kind == "threads":
    import threading

    net, optimizer = amp.initialize(net, optimizer, opt_level=level)
    found = []
    thread = threading.Thread(target=lambda: found.append(net(x).dtype))
    thread.start()
    thread.join()
    print(found)
    train(net, optimizer, steps=2)
elif kind == "recomputed":
    from torch.utils.checkpoint import checkpoint

    net, optimizer = amp.initialize(net, optimizer, opt_level=level)
    inputs = x.clone().requires_grad_()
    for _ in range(3):
        loss = functional.cross_entropy(checkpoint(net, inputs, use_reentrant=False), y)
        optimizer.zero_grad()
        backward(loss, optimizer)
        optimizer.step()
        print(loss.item())
elif kind == "late":  # what is done between amp.initialize and the first backward pass
    net, optimizer = amp.initialize(net, optimizer, opt_level=level)
    other = nn.Linear(4, 4).cuda()
    weights = {key: value * 0.5 for key, value in net.state_dict().items()}
    print([each.dtype for each in amp.master_params(optimizer)])
    for each in net.parameters():
        each.data.mul_(0.5)
    net.layer_norm.bias = net.first.bias  # a tie
    optimizer.add_param_group({"params": other.parameters(), "lr": 0.01})
    train(net, optimizer, steps=3)
    print([each.dtype for each in amp.master_params(optimizer)])
    net.load_state_dict(weights)
    train(net, optimizer, steps=2)
    net.first.load_state_dict({key[6:]: value for key, value in weights.items() if key.startswith("first")})
    train(net, optimizer, steps=2)
    for each in net.parameters():  # a swap in place and back, as averages do it: masters stay as they are
        kept = each.detach().clone()
        with torch.no_grad():
            each.mul_(2.0).copy_(kept)
    train(net, optimizer, steps=2)
elif kind in ("state", "adam state"):
    # what an optimizer has before amp.initialize, and what it loads behind it
    if kind == "adam state":
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def types():
        tensors = (
            one for state in optimizer.state.values() for one in state.values() if torch.is_tensor(one)
        )
        return [(str(each.dtype), each.float().sum().item()) for each in tensors]

    for _ in range(2):
        functional.cross_entropy(net(x), y).mul(1e-3).backward()
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    net, optimizer = amp.initialize(net, optimizer, opt_level=level)
    print(types())
    if level != "O3":
        optimizer.load_state_dict(copy.deepcopy(saved))
        print(types())
    train(net, optimizer, steps=3)
    print(types())
    optimizer.load_state_dict(copy.deepcopy(saved))
    train(net, optimizer, steps=3)
    print(types())
elif kind == "masters":  # saved with a checkpoint and put back by names of Apex's own, as in NVIDIA's BERT
    net, optimizer = amp.initialize(net, optimizer, opt_level=level, loss_scale="dynamic")
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0**10
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    for each in amp.master_params(optimizer):
        each.data.mul_(1.001)
    if hasattr(optimizer, "_master_params_to_model_params"):
        optimizer._master_params_to_model_params()
    train(net, optimizer)
    print(optimizer._amp_stash.already_patched, amp._amp_state.opt_properties.options["opt_level"])
elif kind == "zeroing":  # gradients behind `zero_grad`, of parameters without a gradient too
    net, optimizer = amp.initialize(net, optimizer, opt_level=level)
    for clear in (
        optimizer.zero_grad,
        lambda: optimizer.zero_grad(set_to_none=True),
        net.zero_grad,
        lambda: None,
    ):
        backward(functional.cross_entropy(net(x), y), optimizer)
        optimizer.step()
        backward(functional.cross_entropy(net(x), y), optimizer)
        clear()
        print(
            norms(optimizer),
            [None if each.grad is None else float(each.grad.norm()) for each in net.parameters()],
        )
        backward(net.first(x.to(net.first.weight.dtype)).float().sum(), optimizer)
        optimizer.step()
        print(digest(net))
elif kind == "skips":  # overflows whose steps are late, checked later, or seen by the script
    net, optimizer = amp.initialize(net, optimizer, opt_level=level, num_losses=2)
    for step in range(6):
        loss = functional.cross_entropy(net(x), y)
        backward(loss * 1e30 if step in (1, 2, 4) else loss, optimizer, delay_overflow_check=step == 4)
        print(
            amp._amp_state.loss_scalers[0]._has_overflow if step != 4 else "unchecked", dict(amp.state_dict())
        )
        if step not in (1, 4):
            print(optimizer.step())
        optimizer.zero_grad()
    print(digest(net))
    given = {"kept": 1}
    print(amp.state_dict(given) is given, given)
elif kind == "normalized":  # by functions that Apex casts as a whole
    net, optimizer = amp.initialize(net, optimizer, opt_level=level)
    for _ in range(3):
        out = functional.normalize(net(x), dim=1)
        squared = out * 1
        squared **= 2
        loss = functional.cross_entropy(out, y) + squared.float().mean()
        optimizer.zero_grad()
        backward(loss, optimizer)
        optimizer.step()
        print(loss.item(), squared.dtype)
print(kind, digest(net))
