"""Ordinary trainings drawn at random: networks of a few operations, losses, and what stands around the update.

Most of what is drawn is on the lists of what O1 and autocast compute alike. Functions that only round otherwise, `gelu`
and `cross_entropy`, are left out, so that a rewritten training prints the same numbers.
"""

import random
import re
from textwrap import indent

SCRIPT = """\
import math

import torch
from torch import nn
from torch.nn import functional as F

from apex import amp


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.batch_norm, self.group_norm = nn.LayerNorm(16), nn.BatchNorm1d(16), nn.GroupNorm(4, 16)
        self.conv, self.embedding, self.dropout = nn.Conv1d(1, 2, 3, padding=1), nn.Embedding(16, 16), nn.Dropout(0.1)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(True))
{weights}
    def forward(self, x):
        h = self.first(x)
{operations}
        return {result}


def evaluate(model, batch):
    model.eval()
    with torch.no_grad():
        output = model(batch[0].cuda())
        print("evaluation", {figure})
    model.train()


def train(model, optimizer, scheduler, criterion, batches):
    total = 0.0
    for step, (x, target) in enumerate(batches):
        x, target = x.cuda(), target.cuda()
{above}
        output = model(x)
        loss = {loss}
{middle}
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
{between}
        optimizer.step()
        print("loss", loss.item())
{below}


def main():
    torch.manual_seed({seed})
    torch.set_num_threads(1)
    model = Net().cuda()
    criterion = {criterion}
    optimizer = {optimizer}
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    batches = [(torch.randn(16, 8), torch.randn(16, 16)) for _ in range(6)]
    train(model, optimizer, scheduler, criterion, batches)
    evaluate(model, batches[0])
    print("weights", [each.abs().sum().item() for each in model.parameters()])


if __name__ == "__main__":
    main()
"""
WEIGHTS = """\
self.bias, self.scale = nn.Parameter(torch.zeros(1, 16)), nn.Parameter(torch.ones(1))
self.weight, self.pair = nn.Parameter(0.1 * torch.randn(16, 16)), nn.Parameter(torch.randn(2) + 1.5)
self.register_buffer("mask", torch.zeros(1, 16))
"""
OF_WEIGHTS = re.compile(r"self\.(?:bias|scale|weight|pair|mask)\b")
OPERATIONS = (
    "h = F.relu(h)", "h = torch.sigmoid(h) * h", "h = torch.tanh(h)", "h = F.silu(h)", "h = F.elu(h)",
    "h = h + self.bias", "h = h * self.scale", "h = h - self.mask", "h = self.third(h) + h",
    "h = self.norm(h)", "h = self.batch_norm(h)", "h = self.group_norm(h)", "h = F.layer_norm(h, (16,))",
    "h = F.softmax(h, dim=1)", "h = F.log_softmax(h, dim=1)", "h = self.dropout(h)", "h = self.block(h)",
    "h = torch.cat([h[:, :8], self.second(h)[:, 8:]], 1)", "h = torch.stack([h, self.bias.expand(16, 16)]).mean(0)",
    "h = torch.where(h > 0, h, self.bias.expand_as(h))", "h = h.clamp(min=-2, max=2)", "h = h @ self.weight",
    "h = torch.matmul(F.softmax(torch.matmul(h, h.t()) / 4, dim=-1), h)", "h = F.linear(h, self.weight, self.bias[0])",
    "h = torch.exp(-h.abs())", "h = torch.log(h.abs() + 1)", "h = torch.sqrt(h.abs() + 1e-2)", "h = h**2 / 4",
    "h = (h.sum(1, keepdim=True) + h) / 16", "h = h.max(dim=1, keepdim=True)[0] - h", "h = h.mean(0, keepdim=True) + h",
    "h = self.conv(h.unsqueeze(1)).mean(1)", "h = F.avg_pool1d(h.unsqueeze(1), 3, 1, 1).squeeze(1)",
    "h = self.embedding(torch.arange(16, device=h.device)) + h", "h = h + F.one_hot(h.argmax(1), 16)",
    "h = torch.gather(h, 1, h.argsort(1))", "h = h.float()", "h = h.masked_fill(h < -1, 0)",
    "h = h.chunk(2, 1)[0].repeat(1, 2)", "h = h * torch.sigmoid(self.second(h))", "h = h - h.mean(1, keepdim=True)",
    "h = F.layer_norm(h, (16,)) + self.second(h)", "h = 0.5 * (h + self.block(h))",
    "h = h.view(16, 4, 4).permute(0, 2, 1).flatten(1)",
    "h = h * torch.full((1,), 2.0, device=h.device)", "h = 1 / (h.abs() + 1)",
    # what O1 and autocast compute in other types
    "h = self.pair[0] * h", "h = h - h.exp().mean()", "h = h.clone()\nh += self.bias",
    "h = h.clone()\nh.mul_(self.scale)",
    "h = h + F.l1_loss(h, torch.zeros_like(h))", "w = F.softmax(self.pair, 0)\nh = w[0] * h + w[1] * self.second(h)",
    "h = h * (h > self.pair[0])", "h = h.softmax(1)", "h = h.std(1, keepdim=True) + h",
)  # fmt: skip
RESULTS = ("h", "self.third(h)", "self.second(h) * self.scale", "h.float()", "F.softmax(self.third(h), 1)")
LOSSES = (
    "criterion(output, target)", "F.mse_loss(output, target)", "torch.mean((output - target) ** 2)",
    "F.binary_cross_entropy_with_logits(output, (target > 0).float())", "(output.float() - target).abs().mean()",
    "criterion(output, target) * 1e30 if step == 4 else criterion(output, target)",
    "criterion(torch.sigmoid(output), target)",
)  # fmt: skip
ABOVE = (
    "", "", "x = x + 0.01 * torch.randn_like(x)", "scheduler.step()",
    "for group in optimizer.param_groups:\n    group['lr'] = 0.05 / (1 + step)",
)  # fmt: skip
MIDDLE = ("", "", "loss = loss / 2", "total = total + loss.item()", "print(output.argmax(1).sum().item())")
BETWEEN = (
    "", "", "nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)",
    "norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)\nprint('norm', float(norm))",
)  # fmt: skip
BELOW = (
    "", "", "if step % 3 == 2:\n    evaluate(model, (x, target))", "scheduler.step()",
    "with torch.no_grad():\n    print('again', model(x).float().sum().item())",
    "if step == 3:\n    torch.save({'model': model.state_dict(), 'amp': amp.state_dict()}, 'last.pt')",
)  # fmt: skip
FIGURES = (
    "output.argmax(1).sum().item()",
    "output.float().sum().item()",
    "F.mse_loss(output, batch[1].cuda()).item()",
)
CRITERIA = ("nn.MSELoss()", "nn.SmoothL1Loss()", "nn.L1Loss().cuda()")
OPTIMIZERS = (
    "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
    "torch.optim.AdamW(model.parameters(), lr=1e-3)",
)


def draw_ordinary_training(seed: int) -> str:
    """Return the text of a script for Apex, which prints losses, norms, figures and weights."""
    draw = random.Random(seed)
    operations = "\n".join(draw.choice(OPERATIONS) for _ in range(draw.randint(2, 5)))
    above, middle, between, below = (draw.choice(each) for each in (ABOVE, MIDDLE, BETWEEN, BELOW))
    if draw.random() < 0.6:
        above = f"{above}\noptimizer.zero_grad()"
    else:
        below = f"optimizer.zero_grad()\n{below}"
    result = draw.choice(RESULTS)
    has_weights = OF_WEIGHTS.search(f"{operations}\n{result}") is not None
    return SCRIPT.format(
        seed=seed,
        weights=indent(WEIGHTS, 8 * " ") if has_weights else "",
        operations=indent(operations, 8 * " "),
        above=indent(above, 8 * " "),
        middle=indent(middle, 8 * " "),
        between=indent(between, 8 * " "),
        below=indent(below, 8 * " "),
        result=result,
        figure=draw.choice(FIGURES),
        loss=draw.choice(LOSSES),
        criterion=draw.choice(CRITERIA),
        optimizer=draw.choice(OPTIMIZERS),
    )
