"""Which trainings are ordinary: one of each form that is, and what of each kind is not."""

import re
from pathlib import Path
from textwrap import indent

import pytest

from ampcompare.source.migrate.adapter.choice import choose_rewrite_or_adapter

BASE = """\
import argparse

import torch
from apex import amp
from torch import nn

import network


class Meter:
    def __init__(self):
        self.sum = 0.0

    def update(self, value, count):
        self.sum += value * count


def accuracy(output, target, topk=(1,)):
    _, pred = output.topk(max(topk), 1, True, True)
    correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
    return [correct[:k].reshape(-1).float().sum(0) for k in topk]


def train(loader, model, criterion, optimizer, epoch):
    losses = Meter()
    model.train()
    for step, (images, target) in enumerate(loader):
        images, target = images.cuda(), target.cuda()
        output = model(images)
        loss = criterion(output, target)
        top = accuracy(output, target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print("%d %.4f" % (epoch, loss), f"{loss.item():.2f}", top[0])


def validate(loader, model, criterion):
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, target in loader:
            output = model(images.cuda())
            loss = criterion(output, target.cuda())
            correct += output.argmax(1).eq(target.cuda()).sum().item()
    print(correct, loss.item())


def main():
    args = argparse.ArgumentParser().parse_args()
    model = network.Net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss().cuda()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    data = [(torch.randn(4, 8), torch.zeros(4).long())] * 3
    for epoch in range(3):
        train(data, model, criterion, optimizer, epoch)
        validate(data, model, criterion)
        scheduler.step()
        torch.save({"model": model.state_dict(), "amp": amp.state_dict()}, "last.pt")


if __name__ == "__main__":
    main()
"""
NETWORK = """\
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = F.relu(self.one(x))
        return self.two(x)
"""
APEX = "from apex import amp\n"
OWN_LOSS = """

class Loss(nn.Module):
    def forward(self, output, target):
        return F.cross_entropy(output, target)
"""
OTHER = """\
from apex import amp


def scale(loss, optimizer):
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
"""
LEVEL = 'opt_level="O1"'
STEP = "        optimizer.step()\n"
LOSS = "        loss = criterion(output, target)\n"
TRAINED = "        optimizer.step()\n        if step"
FORWARD = "        x = F.relu(self.one(x))\n"
BLOCK = """\
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
"""
CLEAR = "        optimizer.zero_grad()\n"
MADE = '    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")\n'
CLIP = "        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)\n"
ROUND = BASE[BASE.index("        output = model(images)\n") : BASE.index("        if step % 10")]
EVALUATED = "            correct += output.argmax(1).eq(target.cuda()).sum().item()\n"


def reason(folder: Path, text: str, network: str = NETWORK, **files: str) -> str:
    """Return why the file takes the adapter; "" if it is rewritten."""
    for name, content in {"train": text, "network": network, **files}.items():
        (folder / f"{name}.py").write_text(content, encoding="utf-8")
    choice = choose_rewrite_or_adapter([folder / "train.py"], rewritten="ordinary")
    result = choice.files[0]
    assert result.fault is None
    assert result.is_changed
    return choice.reasons.get(folder / "train.py", "")


ORDINARY = {
    "as it is": (),
    "O0": (('"O1"', '"O0"'),),
    "behind a switch": (
        (MADE, f"    if args.fp16:\n    {MADE}"),
        (
            BLOCK,
            "        if args.fp16:\n    "
            + BLOCK.replace("\n ", "\n     ")
            + "        else:\n            loss.backward()\n",
        ),
        ("optimizer, epoch)", "optimizer, epoch, args)"),
    ),
    "a network of torchvision": (
        ("network.Net()", "torchvision.models.resnet18()"),
        ("import network", "import torchvision"),
    ),
    "a loss of the project": (("nn.CrossEntropyLoss()", "network.Loss()"),),
    "a second loss that is added": ((LOSS, LOSS + "        loss += 0.1 * criterion(2 * output, target)\n"),),
    "clips of parameters": (("amp.master_params(optimizer)", "model.parameters()"),),
    "a guarded import": (
        (APEX, f"try:\n    {APEX}except ImportError:\n    amp = None\n"),
        (MADE, f"    if args.fp16 and amp is not None:\n    {MADE}"),
    ),
    "an import that must not fail": ((APEX, f"try:\n    {APEX}except ImportError:\n    raise\n"),),
    "a flag": (
        (APEX, f"try:\n    {APEX}    there = True\nexcept ImportError:\n    there = False\n"),
        (MADE, f"    if there:\n    {MADE}"),
    ),
    "a state without that of amp": (('"amp": amp.state_dict()', '"optimizer": optimizer.state_dict()'),),
    "a resumed state": (
        (MADE, f'{MADE}    saved = torch.load("old.pt")\n    amp.load_state_dict(saved["amp"])\n'),
    ),
}


@pytest.mark.parametrize("changes", ORDINARY.values(), ids=ORDINARY)
def test_an_ordinary_training_is_rewritten(tmp_path: Path, changes: tuple[tuple[str, str], ...]) -> None:
    text = BASE
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    assert reason(tmp_path, text, NETWORK + OWN_LOSS) == ""


def below(line: str) -> str:
    """Return the step, and a line below it."""
    return f"{STEP}        {line}\n        if step"


OTHERS = {
    "a level at run time": (MADE, MADE.replace('"O1"', "args.level"), r"opt_level=args\.level"),
    "amp as a value": (MADE, f"{MADE}    use(amp)\n", "used as a value"),
    "an import of some runs": (APEX, f"if True:\n    {APEX}", "Apex is imported under a condition"),
    "a star": (
        "import network",
        "from network import *",
        "a file with a star import, as here, is not rewritten",
    ),
    "a text": (MADE, f'{MADE}    print("apex")\n', "asks for Apex"),
    "a step behind a loss": (
        "        optimizer.step()\n",
        f"        if loss < 5:\n    {STEP}",
        "another form here: a step for each backward pass",
    ),
    "O2": ('"O1"', '"O2"', "opt_level='O2'"),
    "a static scale": ('opt_level="O1"', 'opt_level="O1", loss_scale=128.0', r"loss_scale=128\.0"),
    "options": (MADE, f'    way = dict(opt_level="O1")\n{MADE.replace(LEVEL, "**way")}', r"opt_level=\*\*"),
    "a list of models": (
        "initialize(model,",
        "initialize([model],",
        " of amp.initialize is `.model.`, and no variable of its own",
    ),
    "in a loop": (MADE, "    for _ in range(2):\n    " + MADE, "in a loop"),
    "behind a call": (MADE, "    if torch.cuda.is_available():\n    " + MADE, r"runs if torch\.cuda"),
    "in a try": (MADE, "    try:\n    " + MADE + "    except RuntimeError:\n        pass\n", "other|another"),
    "two losses": (BLOCK, BLOCK * 2, "2 calls of amp.scale_loss, and a rewrite is proven right for one"),
    "a loss in the block": (
        "scale_loss(loss,",
        "scale_loss(criterion(output, target),",
        "another form here: the loss is a variable that the lines above",
    ),
    "delay_unscale": (
        "scale_loss(loss, optimizer)",
        "scale_loss(loss, optimizer, delay_unscale=True)",
        "an ordinary training has another form here: with amp.scale_loss",
    ),
    "a norm in the loop": (
        TRAINED,
        below("norm = sum(p.grad.norm() for p in model.parameters())"),
        "another form here: clips of torch between the backward",
    ),
    "an unknown clip": (
        CLIP,
        "        args.clip(model.parameters())\n",
        "another form here: clips alone between the backward pass",
    ),
    "a hook before the step": (
        CLIP,
        f"{CLIP}        hooks.run()\n",
        "another form here: clips alone between the backward pass",
    ),
    "a step behind the norm": (
        f"{CLIP}        optimizer.step()\n",
        f"        norm = {CLIP.strip()}\n        if norm < 5:\n    {STEP}",
        "another form here: a step for each backward pass",
    ),
    "cleared at times": (
        CLEAR,
        "        if step:\n            optimizer.zero_grad()\n",
        "gradients are cleared only if",
    ),
    "not cleared": (CLEAR, "", "another form here: zero_grad stands in the block of the step"),
    "another step": (
        TRAINED,
        below("center.step()"),
        "several calls of step, and a rewrite is proven right for one",
    ),
    "a skipped backward pass": (
        BLOCK,
        "        if loss.item() < 9:\n    " + BLOCK.replace("\n ", "\n     "),
        "the backward pass runs only if",
    ),
    "outputs in a list": (LOSS, f"{LOSS}        kept.append(output)\n", "kept.append"),
    "outputs in an attribute": (
        LOSS,
        f"{LOSS}        args.kept = output\n",
        "goes into `args.kept = output`",
    ),
    "outputs in a dict": (TRAINED, below("seen = {'out': output}"), "what the model returns"),
    "outputs on the host": (LOSS, f"{LOSS}        seen = output.cpu().numpy()\n", r"output\.cpu"),
    "a softmax outside": (TRAINED, below("seen = torch.softmax(output, 1)"), "torch.softmax"),
    "a power outside": (
        TRAINED,
        below("seen = output ** 2"),
        "` computes on what comes from the autocast block",
    ),
    "a power in its place": (
        TRAINED,
        below("output **= 2"),
        "` computes on what comes from the autocast block",
    ),
    "a sum outside": (
        TRAINED,
        below("seen = output.sum()"),
        "` computes on what comes from the autocast block",
    ),
    "a metric of a library": (TRAINED, below("metric.update(output, target)"), "goes into `metric.update"),
    "losses in a meter": ("losses.update(loss.item()", "losses.update(loss.data", r"loss\.data|value"),
    "a global": (
        LOSS,
        f"        global output\n{LOSS}",
        "another form here: assignments alone in the forward pass",
    ),
    "a second call of the model": (TRAINED, below("model(images)"), "is outside of the autocast block"),
    "the model in a library": (MADE, f"{MADE}    watch(model)\n", "the model goes into"),
    "the optimizer in a library": (
        MADE,
        f"{MADE}    schedule = warmup(optimizer)\n",
        "the optimizer goes into",
    ),
    "parameters in a library": (MADE, f"{MADE}    average = Averages(model.parameters())\n", "parameters"),
    "a method of the model": (TRAINED, below("model.regularize()"), "the model goes into `model.regularize"),
    "an attribute of the model": (
        TRAINED,
        below("print(model.features)"),
        "the model goes into `model.features",
    ),
    "a network of a library": (
        "network.Net()",
        "timm.create_model('x')",
        "what makes `model` is `timm.create_model.*`, and only networks of this project",
    ),
    "an optimizer of a library": ("torch.optim.SGD(", "radam.RAdam(", "what makes `optimizer` is `radam"),
    "probabilities on the host": (
        EVALUATED,
        f"            seen = output.cpu()\n{EVALUATED}",
        "cpu",
    ),
    "features in a list": (EVALUATED, f"            kept.append(output)\n{EVALUATED}", "kept"),
    "evaluation without no_grad": (
        "    with torch.no_grad():\n        for",
        "    if True:\n        for",
        "is outside of the autocast block",
    ),
    "weights loaded in the evaluation": (
        EVALUATED,
        f"            model.load_state_dict(x)\n{EVALUATED}",
        "goes into `model.load_state_dict",
    ),
    "deepcopy": (MADE, f"{MADE}    other = copy.deepcopy(model)\n", "copies"),
    "EMA": (MADE, f"{MADE}    ema = 1\n", "ema"),
    "half": (MADE, f"{MADE}    data = torch.zeros(3).half()\n", "half"),
    "a thread": (MADE, f"{MADE}    threading.Thread(target=print)\n", "Thread"),
    "DataParallel": (MADE, f"{MADE}    model = torch.nn.DataParallel(model)\n", "DataParallel"),
    "a closure": ("optimizer.step()", "optimizer.step(closure)", "a step with a closure"),
    "options of a step": ("optimizer.step()", "optimizer.step(**options)", r"a step that gets \*\*options"),
    "a forward pass in a try": (
        LOSS,
        f"        try:\n    {LOSS}        except ValueError:\n            raise\n",
        "another form here: assignments alone in the forward pass",
    ),
    "a scaled function": (
        MADE,
        f'    amp.register_float_function(torch, "sum")\n{MADE}',
        " is more of Apex than the core",
    ),
    "a model from elsewhere": (
        "    model = network.Net().cuda()\n",
        "",
        "what makes `model` is not seen in this function",
    ),
    "other names": (
        MADE,
        MADE.replace("model, opt", "args.net, opt", 1),
        "model, optimizer = amp.initialize",
    ),
    "another loss": (
        "nn.CrossEntropyLoss()",
        "nn.MultiLabelSoftMarginLoss()",
        "MultiLabelSoftMarginLoss, which is not on the list",
    ),
    "another loss in the block": (
        "loss = criterion(output, target)\n        top",
        "loss = torch.nn.functional.multilabel_soft_margin_loss(output, target)\n        top",
        "multilabel_soft_margin_loss",
    ),
    "a function that is not listed": (
        "loss = criterion(output, target)\n        top",
        "loss = torch.cumsum(criterion(output, target), 0)\n        top",
        " is in a block of autocast, and not on the list",
    ),
    "a number in the block": (
        "loss = criterion(output, target)\n        top",
        "loss = (criterion(output, target) + output * target[0, 0]).mean()\n        top",
        "` may have a tensor of one number in fp32",
    ),
    "a number that the block makes": (
        "loss = criterion(output, target)\n        top",
        "loss = (criterion(output, target) + output * target.mean()).mean()\n        top",
        "a number that mean makes is in a block of autocast, and not on the list",
    ),
    "a sum in place in the block": (
        "loss = criterion(output, target)\n        top",
        "output += output**2\n        loss = criterion(output, target)\n        top",
        r"`output \+= output \*\* 2` works in place with a tensor that may be fp32",
    ),
    "an evaluation before": (
        MADE,
        f"    validate([], model, criterion)\n{MADE}",
        "this also runs above amp.initialize",
    ),
    "weights written in the evaluation": (
        "        for images, target in loader:\n            output = model(images.cuda())",
        "        for images, target in loader:\n            for each in model.parameters():\n"
        "                each.mul_(2)\n            output = model(images.cuda())",
        "the model goes into `model.parameters",
    ),
    "arrays": (MADE, f"{MADE}    x = torch.from_numpy(array)\n", "which may be of fp64"),
    "a tensor of an array": (MADE, f"{MADE}    x = torch.tensor(array)\n", "which may be of fp64"),
    "a loader": (MADE, f"{MADE}    x = torch.utils.data.DataLoader(rows)\n", "which may be of fp64"),
    "a data set": (
        "class Meter:\n",
        "class Meter:\n    def __getitem__(self, key):\n        return 0\n\n",
        "fp64",
    ),
    "accumulation": (STEP, f"        if (step + 1) % 2 == 0:\n    {STEP}", "a step for each backward pass"),
    "an attribute in the forward pass": (
        LOSS,
        f"        model.seen = 1\n{LOSS}",
        "another form here: the forward pass sets variables alone",
    ),
    "a backward pass in a try": (
        BLOCK,
        f"        try:\n{indent(BLOCK, '    ')}        except RuntimeError:\n            raise\n",
        "another form here: the forward pass stands right above its backward pass",
    ),
    "a training step in a try": (
        ROUND,
        f"        try:\n{indent(ROUND, '    ')}        finally:\n            print(step)\n",
        "another form here: no `try` around the backward pass",
    ),
    "a step above": (
        BLOCK + CLIP + STEP,
        STEP + BLOCK,
        "another form here: the step stands below its backward pass",
    ),
    "a divided loss": (
        "scale_loss(loss,",
        "scale_loss(loss / len(images),",
        "another form here: the loss is a variable, which may be divided",
    ),
    "cleared twice": (
        CLEAR,
        f"{CLEAR}        if step:\n    {CLEAR}",
        "another form here: gradients are cleared behind the step, or above the forward pass",
    ),
    "arithmetic in place outside": (
        TRAINED,
        below("output -= images.mean()"),
        "goes into `output -= images.mean",
    ),
    "arithmetic with a tensor outside": (
        TRAINED,
        below("seen = output.detach() * decay"),
        r"detach\(\) \* decay",
    ),
    "parts of the model": (
        TRAINED,
        below("for layer in model.children(): layer.train()"),
        "the model goes into `model.children",
    ),
    "two inputs": (
        "model(images)\n",
        "model(images, target)\n",
        "gets more than one tensor, of which one may be",
    ),
    "arithmetic of tensors in the block": (
        "loss = criterion(output, target)\n        top",
        "loss = criterion(output - target, target)\n        top",
        "` computes with tensors whose types and sizes nothing shows",
    ),
    "a product of data": (TRAINED, below("images @= turn"), "this line names @, a product, outside"),
    "a product by a text": (TRAINED, below("images = getattr(images, 'mm')(turn)"), "names mm, a product"),
    "a product by its method": (TRAINED, below("images.__matmul__(turn)"), "names __matmul__, a product"),
    "a transform": (
        MADE,
        f"{MADE}    import torchvision\n    blur = torchvision.transforms.GaussianBlur(3)\n",
        "torchvision.transforms.GaussianBlur, which is not on the list of what makes no fp64",
    ),
    "a text for fp64": (MADE, f"{MADE}    x = y.type('torch.cuda.DoubleTensor')\n", "DoubleTensor"),
    "a data set with transforms of its own": (
        MADE,
        f"{MADE}    import torchvision.datasets as sets\n    data = torch.utils.data.DataLoader(\n"
        "        sets.CIFAR10('.', transform=lambda image: image)\n    )\n",
        "which may be of fp64",
    ),
    "a file of tensors": (
        MADE,
        f"{MADE}    extra = torch.load('x.pt').cuda()\n",
        "a file of tensors, which may be",
    ),
    "cleared by another optimizer": (
        CLEAR,
        "        other.zero_grad()\n",
        "another form here: zero_grad stands",
    ),
    "another switch for the block": (
        BLOCK,
        "        if scales:\n    "
        + BLOCK.replace("\n ", "\n     ")
        + "        else:\n            loss.backward()\n",
        "the loss is scaled if `scales`, and amp.initialize runs in other cases",
    ),
    "another core": ("import network", "import network, other", "a part of Apex's core is in other.py too"),
}


@pytest.mark.parametrize(("before", "after", "expected"), OTHERS.values(), ids=OTHERS)
def test_what_is_not_on_the_list_is_named(tmp_path: Path, before: str, after: str, expected: str) -> None:
    assert before in BASE
    said = reason(tmp_path, BASE.replace(before, after), other=OTHER)
    assert said.startswith("line ")
    assert re.search(expected, said), said


@pytest.mark.parametrize("name", ["accuracy", "format", "id", "sum"])
def test_a_function_of_the_project_is_read_whatever_its_name_is(tmp_path: Path, name: str) -> None:
    text = BASE.replace("accuracy(", f"{name}(")
    assert reason(tmp_path, text) == ""
    said = reason(tmp_path, text.replace("output.topk(", "output.cpu().topk("))
    assert "what the model returns goes into `output.cpu()`" in said


@pytest.mark.parametrize(("source", "is_read"), [("network", True), ("PIL", False)])
def test_a_network_is_one_of_the_project_by_its_class_and_not_by_its_name(
    tmp_path: Path, source: str, is_read: bool
) -> None:
    text = BASE.replace("network.Net()", "Net()").replace(
        "import network\n", f"import network\nfrom {source} import Net\n"
    )
    said = reason(tmp_path, text)
    assert said == "" if is_read else "what makes `model` is `Net()" in said


def test_a_file_that_another_one_imports_takes_the_adapter(tmp_path: Path) -> None:
    said = reason(tmp_path, BASE, launch="from train import main\n\nmain()\n")
    assert said.endswith("launch.py imports this file, and what it does with it is not read")


NETWORKS = {
    "half": "        x = F.relu(self.one(x)).half()\n",
    "types": "        x = F.relu(self.one(x)).to(torch.float16)\n",
    "products in place": "        x = self.one(x)\n        x.addmm_(x, x)\n",
    "no_grad": "        with torch.no_grad():\n            y = self.one(x)\n        x = F.relu(self.one(x))\n",
    "the host": "        x = F.relu(self.one(x))\n        self.seen = x.cpu()\n",
    "own functions": "        x = torch.autograd.Function.apply(self.one(x))\n",
    "jit": "        x = torch.jit.trace(self.one, x)(x)\n",
    "hooks": "        x = self.one(x)\n        x.register_hook(print)\n",
    "gradients": "        x = F.relu(self.one(x)) + self.one.weight.grad.sum()\n",
    "binary_cross_entropy": "        x = F.binary_cross_entropy(self.one(x), x)\n",
    "exponentials in place": "        x = self.one(x).exp_()\n",
    "softmax of a tensor": "        x = torch.log(self.one(x).softmax(1) + 1e-8)\n",
    "a learned number": "        x = self.one(x) * torch.tensor(30.0)\n",
    "a number": "        x = self.one(x) * torch.ones([])\n",
    "another name of acos": "        x = torch.sigmoid(self.one(x)).arccos()\n",
    "a square": "        x = self.one(x).square()\n",
    "a sum to a size": "        x = self.one(x)\n        x = x - x.sum_to_size(x.size(0), 1)\n",
    "layer_norm of torch": "        x = torch.layer_norm(self.one(x), (16,))\n",
    "a power in place": "        x = self.one(x)\n        x **= 2\n",
    "positions in place": "        x = self.one(x)\n        x += self.one.bias\n",
    "the input in place": "        y = self.one(x)\n        y += x.repeat(1, 2)\n        x = y\n",
    "an item of a weight": "        x = self.one(x) * self.one.weight[0, 0]\n",
    "a norm": "        x = self.one(x) / x.norm()\n",
    "grid_sample": "        x = F.grid_sample(self.one(x), x)\n",
    "variance": "        x = self.one(x).var(1)\n",
    "out=": "        x = torch.mul(self.one(x), 2, out=x)\n",
    "gelu into items": "        x = F.gelu(self.one(x))\n        y = torch.zeros(4, 16)\n        y[0] = x[0]\n",
    "libraries": "        import einops\n        x = F.relu(self.one(x))\n",
    "softmax of another module": "        x = torch.special.softmax(self.one(x), 1)\n",
    "matmul of another module": "        x = torch.linalg.matmul(self.one(x), self.one.weight)\n",
    "a method by its class": "        x = torch.Tensor.softmax(self.one(x), 1)\n",
    "an operator of torch": "        x = torch.ops.aten.softmax(self.one(x), 1)\n",
    "another module of torch by one that imports it": "        x = F.torch.softmax(self.one(x), 1)\n",
    "a method by a text": "        x = getattr(self.one(x), 'square')()\n",
    "a function by a text": "        x = vars(F)['rms_norm'](self.one(x), (16,))\n",
    "a parameter": "        x = self.one(x) + torch.nn.Parameter(x)\n",
    "a new tensor": "        x = self.one(x) + torch.arange(16)\n",
    "a method that is not listed": "        x = self.one(x).diagonal()\n",
    "a weight by its name": "        x = self.one(x) + getattr(self.one, 'bias')\n",
    "an output that is kept": "        self.seen = x = F.relu(self.one(x))\n",
    "a lambda": "        act = lambda h: torch.linalg.norm(h, dim=1)\n        x = act(self.one(x))\n",
    "a function as a value": "        act = F.relu\n        x = act(self.one(x))\n",
    "a function of numpy": "        import numpy as np\n        x = self.one(x) * np.sqrt(2)\n",
    "functions of operator": "        import operator\n        x = operator.mul(self.one(x), self.one.bias)\n",
    "an item by unbind": "        x = self.one(x) * self.one.bias.unbind()[0]\n",
}


HIDING = {
    "a product in a constructor": ("16, 4)\n", "16, 4)\n        self.scale = x @ x.t()\n"),
    "a product that a constructor calls": (
        "    def forward",
        "    def turn(self, x):\n        return torch.matmul(x, x)\n\n    def forward",
    ),
    "a base that is no network": (
        "class Net(nn.Module)",
        "class Mixin:\n    pass\n\n\nclass Net(Mixin, nn.Module)",
    ),
    "a layer as a base": ("class Net(nn.Module)", "class Net(nn.Linear)"),
    "a property": (
        "    def forward",
        "    @property\n    def gain(self):\n        return 1\n\n    def forward",
    ),
    "a file's tensors": (
        "class Net(nn.Module)",
        "SCALES = [torch.tensor(0.3)]\n\n\nclass Net(nn.Module)",
    ),
    "a function for a layer": (
        "class Net(nn.Module)",
        "def norm(h):\n    return torch.linalg.norm(h, dim=1)\n\n\nlayers = [norm]\n\n\nclass Net(nn.Module)",
    ),
}


@pytest.mark.parametrize(("before", "after"), HIDING.values(), ids=HIDING)
def test_what_a_network_hides_takes_the_adapter(tmp_path: Path, before: str, after: str) -> None:
    network = NETWORK.replace(before, after).replace(FORWARD, FORWARD.replace("(x))", "(x)) * 2"))
    if "SCALES" in after:
        network = network.replace("* 2", "* SCALES[0]")
    assert re.search(
        "network.py (?:has .* in (?:a|the) network|names .*, a product)", reason(tmp_path, BASE, network)
    )


@pytest.mark.parametrize("forward", NETWORKS.values(), ids=NETWORKS)
def test_words_of_a_network_take_the_adapter(tmp_path: Path, forward: str) -> None:
    said = reason(tmp_path, BASE, NETWORK.replace(FORWARD, forward))
    assert "network.py" in said or "a rewrite changes this, or leaves open what it does" in said
