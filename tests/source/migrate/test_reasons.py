"""Every reason for what is left by hand: it names what is in the script, and a script of the tests has it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ampcompare.source.migrate.read.finding import BY_HAND, without_advice
from ampcompare.source.migrate.rewrite import migrate_text
from tests.modules import modules_of_package, parsed

HEAD = "import torch\nfrom apex import amp, fp16_utils, normalization, optimizers, parallel\n"
INITIALIZE = "model, optimizer = amp.initialize(model, optimizer)\n"
BLOCK = "    with amp.scale_loss(loss, optimizer) as scaled:\n        scaled.backward()\n"
INNER = "".join(f"    {line}" for line in BLOCK.splitlines(keepends=True))
LOOP = "for x in data:\n    optimizer.zero_grad()\n    loss = model(x)\n" + BLOCK
STEP = "    optimizer.step()\n"
TRAINING = INITIALIZE + LOOP + STEP
# The reason, and a script; the line that it is about ends in `#!`.
REASONS = {
    "apex.amp is used as a value here": TRAINING + "helper(amp)  #!",
    "amp is bound to something else here": INITIALIZE + LOOP + STEP + "if fp32:\n    amp = None  #!",
    "this puts another module in the place of Apex": TRAINING + "sys.modules['apex.amp'] = fake  #!",
    "this is apex.amp by a text, so that what the script calls of it is not seen": TRAINING
    + "sys.modules['apex.amp'].initialize(other)  #!",
    "FusedSGD is bound to something else here": (
        "if fused:\n    from apex.optimizers import FusedSGD\nelse:\n    FusedSGD = None  #!"
    ),
    "amp.initialize is passed as a value; call it directly": "setup = amp.initialize  #!",
    "amp.initialize is inside another statement": "assert amp.initialize(model, optimizer)  #!\n"
    + LOOP
    + STEP,
    "amp.initialize without models": "amp.initialize(opt_level='O1')  #!\n" + LOOP + STEP,
    "this backward pass also runs above amp.initialize": "def train(fp16):\n    for x in data:\n"
    "        optimizer.zero_grad()\n        loss = model(x)\n        if fp16:\n"
    "            with amp.scale_loss(loss, optimizer) as scaled:  #!\n                scaled.backward()\n"
    "        else:\n            loss.backward()\n        optimizer.step()\n\ntrain(False)\n"
    + INITIALIZE
    + "train(True)\n",
    "this also runs above amp.initialize, where Apex casts nothing": "def evaluate():\n"
    "    with torch.no_grad():  #!\n        print(model(x))\n\nevaluate()\n"
    + INITIALIZE.replace("r)", "r, opt_level='O1', enabled=fp16)")
    + LOOP
    + STEP
    + "evaluate()\n",
    "other, which amp.initialize does not get, may step with a loss that Apex does not scale": (
        "other = torch.optim.SGD(weights)\n" + INITIALIZE
    )
    + "for i, x in enumerate(data):\n    optimizer.zero_grad()\n    other.zero_grad()\n    loss = model(x)\n"
    + "    if i % 2:\n"
    + INNER.replace("\n    ", "\n        ").rstrip(" ").replace("    with", "        with", 1)
    + "    else:\n        loss.backward()\n    optimizer.step()\n    other.step()  #!\n",
    "O1 without casts is loss scaling alone": INITIALIZE.replace("r)", "r, patch_torch_functions=False)  #!")
    + LOOP
    + STEP,
    "Apex has no argument level": INITIALIZE.replace("r)", "r, level=1)  #!") + LOOP + STEP,
    "amp.state_dict with a destination": TRAINING + "amp.state_dict(found)  #!",
    "amp.load_state_dict is not a statement of its own": TRAINING + "done = amp.load_state_dict(found)  #!",
    "the backward pass runs only if `a`, or if `b` and `c < 3`, and this step in other cases too": INITIALIZE
    + "for x in data:\n    optimizer.zero_grad()\n    loss = model(x)\n"
    + "    if a:\n"
    + INNER
    + "    if b:\n        if c < 3:\n    "
    + INNER.replace("\n    ", "\n        ").rstrip(" ")
    + "    optimizer.step()  #!\n",
    "other steps with this loss, and amp.initialize does not get it": "other = SGD(weights)\n"
    + INITIALIZE
    + LOOP
    + STEP
    + "    other.zero_grad()\n    loss.backward()  #!\n    other.step()\n",
    "group steps with this loss, and holds group.first, for which losses are scaled": INITIALIZE.replace(
        "optimizer", "group.first"
    )
    + "for x in data:\n    group.zero_grad()\n    loss = model(x)\n"
    + BLOCK.replace("optimizer", "group.first")
    + "    loss.backward()  #!\n    group.step()\n",
    "opts['d'] steps with this loss, and whether it is one of": INITIALIZE
    + LOOP
    + STEP
    + "    opts['d'].zero_grad()\n    loss.backward()  #!\n    opts['d'].step()\n",
    "torch.amp sets the loss scale by GradScaler(init_scale=...)": TRAINING
    + "amp._amp_state.loss_scalers[0]._loss_scale = 2**20  #!",
    "amp._amp_state.opt_properties is internal to Apex, and torch.amp has nothing": TRAINING
    + "print(amp._amp_state.opt_properties)  #!",
    "amp._amp_state is internal to Apex, and torch.amp has nothing": TRAINING + "state = amp._amp_state  #!",
    "torch's DistributedDataParallel has no disable_allreduce": "from apex.parallel import DistributedDataParallel\n"
    + INITIALIZE
    + "net = DistributedDataParallel(model)\nnet.disable_allreduce()  #!\n"
    + LOOP
    + STEP,
    "amp.scale_loss is used without a with statement of its own": INITIALIZE
    + "for x in data:\n    loss = model(x)\n    amp.scale_loss(loss, optimizer).backward()  #!\n"
    + STEP,
    "amp.scale_loss shares a with statement": TRAINING.replace("with amp", "with timer, amp").replace(
        "scaled:", "scaled:  #!"
    ),
    "the scaled loss is bound to something that is not a plain name": TRAINING.replace(
        "as scaled:", "as self.scaled:  #!"
    ),
    "amp.scale_loss needs a loss and its optimizers": TRAINING.replace(
        "(loss, optimizer) as scaled:", "(loss) as scaled:  #!"
    ),
    "engine.backward is no backward pass of a loss by its name": "import engine\n"
    + TRAINING.replace(STEP, "    engine.backward(loss)  #!\n" + STEP),
    "this loss goes through .scale(), as of a GradScaler": TRAINING.replace(
        STEP, "    other.scale(loss).backward()  #!\n" + STEP
    ),
    "the optimizer of amp.master_params is not a plain name": TRAINING.replace(
        STEP, "    clip_grad_norm_(amp.master_params(optimizers[0]), 1)  #!\n" + STEP
    ),
    "is called on what no import of this file makes apex.amp": "import support\n"
    + TRAINING
    + "support.master_params(optimizer)  #!",
    "help.run gets the loss and the optimizer, and is no function of this file": "import help\n"
    + TRAINING.replace("    loss = model(x)\n", "    loss = model(x)\n    help.run(loss, optimizer)  #!\n"),
    "no optimizer.step() follows these gradients in the same function": TRAINING
    + "    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1)  #!\n",
    "gradients that stay scaled are read on a path that leaves": INITIALIZE
    + "for x in data:\n    loss = model(x)\n"
    + BLOCK
    + "    for p in amp.master_params(optimizer):  #!\n        if p.grad.isnan().any():\n            continue\n"
    + "    if x % 2 == 0:\n        optimizer.step()\n        optimizer.zero_grad()\n",
    "whose branches leave in several ways": TRAINING.replace(
        STEP,
        "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1)\n    if norm < 9:\n"
        "        optimizer.step()  #!\n"
        "        if late:\n            break\n",
    ),
    "gradients decide on this step, and nothing above it unscales": TRAINING.replace(
        STEP, "    if grad_norm < 9:\n        optimizer.step()  #!\n"
    ),
    "what hook() in line 9 does with these gradients is not known": INITIALIZE
    + LOOP.replace("scale_loss(loss, optimizer) as scaled:", "scale_loss(loss, optimizer) as scaled:  #!")
    + "    hook(optimizer)\ndef other():\n    optimizer.step()\n",
    "aux_optim.step() in line 11 steps with this loss, and is not rewritten": TRAINING
    + "    aux(x).mean().backward()  #!\n    aux_optim.step()\n",
    "the way from here to a step of optimizer cannot be followed": INITIALIZE
    + "def run(x):\n    loss = model(x)\n"
    + BLOCK.replace("scaled:", "scaled:  #!")
    + "def update():\n    optimizer.step()\n",
    "the backward pass of model(x).mean().backward() in line 12 adds to these gradients": INITIALIZE
    + LOOP.replace("scaled:", "scaled:  #!")
    + "    extra(x)\n"
    + STEP
    + "def extra(x):\n    model(x).mean().backward()\n",
    "gradients are read in a branch and again after it": INITIALIZE
    + "for x in data:\n    optimizer.zero_grad()\n    loss = model(x)\n    if x:\n"
    + INNER
    + "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)\n    else:\n        continue\n"
    + "    torch.nn.utils.clip_grad_norm_(model.parameters(), 2)  #!\n"
    + STEP,
    "the model is not a plain name, so its forward pass": "models[0], optimizer = "
    "amp.initialize(models[0], optimizer, opt_level='O2')  #!\n" + LOOP + STEP,
    "this step also follows": INITIALIZE
    + "def update():\n    optimizer.step()  #!\nfor x in data:\n    optimizer.zero_grad()\n    loss = model(x)\n"
    + BLOCK
    + "    update()\n    optimizer.zero_grad()\n    warm(x)\n    update()\ndef warm(x):\n    model(x).backward()\n",
    "this step comes last in one place and not in another": INITIALIZE.replace("optimizer", "[o, p]")
    + "def update(o):\n    o.step()  #!\n"
    + LOOP.replace("loss, optimizer", "loss, [o, p]")
    + "    update(o)\n    update(p)\n",
    "gradients of optimizer may be scaled here still, where they are read, and no step of it is below": INITIALIZE
    + "def norm():\n    return sum(p.grad.sum() for p in model.parameters())  #!\ndef run(x):\n    loss = model(x)\n"
    + BLOCK
    + "    print(norm())\nfor x in data:\n    optimizer.zero_grad()\n    run(x)\n    optimizer.step()\n",
    "p.grad in line 5 reads gradients that are still scaled": INITIALIZE
    + "def norm():\n    return sum(p.grad.sum() for p in model.parameters())\ndef outer():\n    print(norm())\n"
    + "def run(x):\n    loss = model(x)\n"
    + BLOCK.replace("scaled:", "scaled:  #!")
    + "    outer()\nfor x in data:\n    optimizer.zero_grad()\n    run(x)\n    optimizer.step()\n",
    "reads or changes gradients inside the block of scale_loss": TRAINING.replace(
        "scaled.backward()\n", "scaled.backward()\n        show(amp.master_params(optimizer))  #!\n"
    ),
    "this casts weights of a model that amp.initialize got to fp16": TRAINING + "    model.half()  #!\n",
    "this computes on what came from autocast, and has no statement of its own": INITIALIZE
    + "for x in data:\n    optimizer.zero_grad()\n    out = model(x)\n    loss = out.mean()\n"
    + BLOCK
    + STEP
    + "    if out.sum() > 1:  #!\n        print(x)\n",
    "what came from autocast goes on into `yield": INITIALIZE
    + "def run():\n    for x in data:\n        optimizer.zero_grad()\n"
    + "        out = model(x)\n        loss = out.mean()\n"
    + INNER
    + "        optimizer.step()\n        yield out.softmax(1)  #!\n",
    "the decorator is passed as a value": "wrap = amp.half_function  #!",
    "is bound to something else as well": (
        "try:\n    from apex.optimizers import FusedAdam\nexcept ImportError:\n    FusedAdam = make()  #!"
    ),
    "create_syncbn_process_group is passed as a value": "f = parallel.create_syncbn_process_group  #!",
    "FusedRMSNorm is passed as a value": "layer = normalization.FusedRMSNorm  #!",
    "the function to register cannot be seen": "amp.register_half_function(torch, name)  #!",
    "is a class; call it under": "amp.register_float_function(torch.nn, 'Linear')  #!",
    "this needs a function cast_inputs, but the module has something else": (
        "cast_inputs = 1\nf = amp.half_function(g)  #!"
    ),
    "to_python_float is passed as a value": "f = fp16_utils.to_python_float  #!",
    "with another order of weight decay": "optimizers.FusedSGD(p, 0.1, wd_after_momentum=True)  #!",
    "bias_correction or adam_w_mode is no literal here": "optimizers.FusedAdam(p, adam_w_mode=mode)  #!",
    "FusedAdam(capturable=...) has no equivalent in torch": "optimizers.FusedAdam(p, capturable=True)  #!",
    "the arguments of Apex's DistributedDataParallel are passed as": (
        "parallel.DistributedDataParallel(model, **options)  #!"
    ),
    "gradient_average has no equivalent in torch's": (
        "parallel.DistributedDataParallel(model, gradient_average=False)  #!"
    ),
    "this asks for Apex, which the result does not import": "importlib.import_module('apex')  #!\n"
    + TRAINING,
}
# Read, not run: what only large or rare projects reach.
READ = (
    "what comes before and after this block is too much to be followed",
    " may step with this loss, and is not rewritten",
    " may step the same optimizer, and is not rewritten",
    "its step is not rewritten, and it may run with a scaled loss",
    "it runs with more files than are read",
)


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_is_given_for_the_line_that_it_is_about(reason: str) -> None:
    text = HEAD + REASONS[reason]
    found = [each for each in migrate_text(text).findings if each.kind == BY_HAND]
    assert any(reason in each.message for each in found), [each.message for each in found]
    lines = {number for number, line in enumerate(text.splitlines(), 1) if line.endswith("#!")}
    assert {each.line for each in found if reason in each.message} == lines


def _texts(node: ast.AST | None, constants: dict[str, ast.expr]) -> Iterator[list[str]]:
    """Yield the fixed parts of each sentence that an expression may be."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        yield from _texts(node.func.value, constants)
    elif isinstance(node, ast.Name):
        yield from _texts(constants.get(node.id), constants)
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body, constants)
        yield from _texts(node.orelse, constants)
    elif isinstance(node, ast.JoinedStr):
        yield [str(each.value) for each in node.values if isinstance(each, ast.Constant)]
    elif isinstance(node, ast.Constant) and node.value:
        yield re.split(r"\{\w*\}", str(node.value))


def reasons() -> dict[str, list[str]]:
    """Return the reasons of `migrate`, each by its place, as the parts between what is put in."""
    trees = {
        name: parsed(path.read_text("utf-8"))
        for name, path in modules_of_package().items()
        if name.startswith("ampcompare.source.migrate")
    }
    constants = {
        node.targets[0].id: node.value
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    return {
        f"{name}:{node.lineno}": parts
        for name, tree in trees.items()
        for node in _sentences(tree)
        for parts in _texts(node, constants)
    }


def _sentences(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield what a module says as a reason: as an error, or as the result of a function that is named so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "UnsureRewrite":
            yield from node.args[1:]
        elif isinstance(node, ast.ClassDef) and any(
            isinstance(base, ast.Name) and base.id == "StrEnum" for base in node.bases
        ):
            yield from (each.value for each in node.body if isinstance(each, ast.Assign))
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("_why"):
            yield from (
                each.value
                for each in ast.walk(node)
                if isinstance(each, ast.Return) and each.value is not None
            )


def test_each_reason_is_that_of_a_script_of_the_tests() -> None:
    """A reason that none of the scripts has is one that nobody has seen to be true."""
    folder = Path(__file__).parent
    files = [*folder.rglob("*.py"), *folder.glob("cases/*.txt")]
    seen = "\n".join(path.read_text("utf-8") for path in files)
    found = reasons()
    assert len(found) > 80
    unseen = {
        place: parts
        for place, parts in found.items()
        if not any(part.strip()[:25] in seen for part in parts if len(part) > 12)
    }
    assert {place for place, parts in unseen.items() if not any(part in READ for part in parts)} == set()


# With which an order begins.
VERBS = frozenset({
    "add", "build", "call", "cast", "change", "clear", "correct", "do", "drop", "give", "install", "keep", "leave",
    "let", "load", "make", "migrate", "move", "pass", "put", "remove", "rename", "run", "save", "see", "set", "split",
    "take", "unscale", "update", "use", "wrap", "write",
})  # fmt: skip
CLAUSE = re.compile(r"[,:.]\s+|\b(?:and|or|so)\s+")


def test_what_to_do_stands_behind_a_semicolon() -> None:
    """A reason for the adapter ends above it: nothing is to be done there."""
    found = {
        place: why
        for place, text in messages().items()
        for why in [without_advice(text)]
        if any(clause.split()[:1] and clause.split()[0] in VERBS for clause in CLAUSE.split(why))
    }
    assert found == {}


def messages() -> dict[str, str]:
    """Return the sentences in the code of `migrate`, each by its place."""
    found = {}
    for name, path in modules_of_package().items():
        tree = parsed(path.read_text("utf-8"))
        if not name.startswith("ampcompare.source.migrate"):
            continue
        owners = [
            each for each in ast.walk(tree) if isinstance(each, (ast.Module, ast.FunctionDef, ast.ClassDef))
        ]
        apart = {each.body[0].value for each in owners if isinstance(each.body[0], ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                apart |= {*node.values}
            text = _sentence_of(node) if node not in apart else ""
            if text.count(" ") > 3 and "\n" not in text:
                found[f"{name}:{getattr(node, 'lineno', 0)}"] = text
    assert len(found) > 150
    return found


def _sentence_of(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
