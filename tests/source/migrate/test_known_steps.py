"""Projects whose rewriting one look at a file would get wrong: rewritten right, or left by hand with the reason."""

from pathlib import Path

import pytest

from ampcompare.source.migrate.project import migrate_file
from ampcompare.source.versions import Versions

HEAD = "import torch\nfrom apex import amp\nmodel, optimizer = amp.initialize(model, optimizer)\n"
BLOCK = "with amp.scale_loss(loss, optimizer) as scaled:\n    scaled.backward()\n"


def _loop(*lines: str) -> str:
    return "for i, x in enumerate(data):\n" + "".join(
        f"    {line}\n" for text in lines for line in text.splitlines()
    )


def _migrated(
    folder: Path, name: str = "train", versions: Versions | None = None, **files: str
) -> tuple[str, str]:
    """Return what becomes of a file, and what is said of it."""
    (folder / "README.md").touch()
    for each, text in files.items():
        (folder / f"{each}.py").write_text(text, encoding="utf-8")
    result = migrate_file(folder / f"{name}.py", versions=versions or Versions())
    assert result.migration is not None
    return result.migration.text, "\n".join(result.lines())


LOOP_OF_STEPS = """\
def update(optimizer):
    optimizer.step()
def train(model, optimizer):
    for x in data:
        loss = model(x)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        for each in [optimizer]:
            each.step()
        optimizer.zero_grad()
train(model, optimizer)
"""
LEFT = {
    "a star import takes the place of a function": (
        HEAD
        + "def step(optimizer):\n    optimizer.step()\nfrom helpers import *\n"
        + _loop("optimizer.zero_grad()", "loss = model(x)", BLOCK, "step(optimizer)"),
        "def step(optimizer):\n    optimizer.step()\n",
        "optimizer.step() in line 2 of helpers.py steps optimizer, and is not rewritten",
    ),
    "a step of a function that nothing calls": (HEAD + LOOP_OF_STEPS, "", "cannot be followed"),
    "a step in a lambda": (
        HEAD
        + "step = lambda: optimizer.step()\n"
        + _loop("optimizer.zero_grad()", "loss = model(x)", BLOCK, "step()"),
        "",
        "",
    ),
    "gradients that are read behind a step of some rounds": (
        HEAD
        + _loop(
            "loss = model(x)",
            BLOCK,
            "if i % 2:\n    optimizer.step()\n    optimizer.zero_grad()",
            "print(sum(p.grad.norm() for p in model.parameters() if p.grad is not None))",
        ),
        "",
        "reads gradients behind a step that not every round makes",
    ),
    "a step without a backward pass": (
        HEAD
        + _loop(
            "loss = model(x)",
            "if loss < 9:\n    " + BLOCK.replace("\n    ", "\n        "),
            "optimizer.step()",
            "optimizer.zero_grad()",
        ),
        "",
        "the backward pass runs only if `loss < 9`",
    ),
    "gradients that are kept": (
        HEAD + _loop("loss = model(x)", BLOCK, "optimizer.step()", "if i > 0:\n    optimizer.zero_grad()"),
        "",
        "gradients are cleared only if `i > 0`",
    ),
    "a hook that nobody knows": (
        HEAD
        + _loop(
            "optimizer.zero_grad()", "loss = model(x)", BLOCK, "hook.after(optimizer)", "optimizer.step()"
        ),
        "",
        "what hook.after() in line 9 does with the gradients, before the step, is not known",
    ),
}


@pytest.mark.parametrize(
    ("call", "is_named"),
    [
        ("tracker.log_weights(model)", True),
        ("save_images(model, x)", True),
        ("tracker.log_value(loss)", False),
        ("print(model)", False),
    ],
)
def test_a_call_that_gets_a_model_and_is_trusted_by_its_name_is_said(
    tmp_path: Path, call: str, is_named: bool
) -> None:
    """Between backward pass and step, where gradients are still scaled; not inside the block, nor behind the step."""
    head = "from tracking import save_images, tracker\n" + HEAD
    lines = ("optimizer.zero_grad()", "loss = model(x)", BLOCK, "optimizer.step()")
    _, said = _migrated(tmp_path, train=head + _loop(*lines[:3], call, lines[3]))
    assert ("nothing is known of it but its name" in said) == is_named
    assert "by hand" not in said
    for others in ((*lines, call), (*lines[:2], f"{BLOCK}    {call}", lines[3])):
        assert "nothing is known of it" not in _migrated(tmp_path, train=head + _loop(*others))[1]


@pytest.mark.parametrize(("train", "helpers", "why"), LEFT.values(), ids=LEFT)
def test_what_is_not_proven_is_left_by_hand(tmp_path: Path, train: str, helpers: str, why: str) -> None:
    text, said = _migrated(tmp_path, train=train, helpers=helpers)
    assert "GradScaler" not in text
    assert why in said


def test_files_of_one_training_are_not_rewritten(tmp_path: Path) -> None:
    """A block without a scaler on its optimizer would fail at the first step."""
    files = {
        "setup_amp": "from apex import amp\ndef prepare(net, optimizer, options):\n"
        "    return amp.initialize(net, optimizer, **options)\n",
        "steps": "from apex import amp\ndef step(loss, optimizer):\n    optimizer.zero_grad()\n"
        "    with amp.scale_loss(loss, optimizer) as scaled:\n        scaled.backward()\n    optimizer.step()\n",
        "train": "from setup_amp import prepare\nfrom steps import step\nnet, optimizer = prepare(net, optimizer, {})\n"
        "for x in data:\n    step(net(x), optimizer)\n",
    }
    text, said = _migrated(tmp_path, "steps", **files)
    assert "amp.scale_loss" in text
    assert "a part of Apex's core is in setup_amp.py too" in said
    files["setup_amp"] = files["setup_amp"].replace("**options", 'opt_level="O1"')
    assert "amp.scale_loss" in _migrated(tmp_path, "steps", **files)[0]
    assert "amp.initialize" in _migrated(tmp_path, "setup_amp", **files)[0]


def test_a_branch_with_the_step_of_another_file_stays(tmp_path: Path) -> None:
    train = (
        HEAD
        + "from tpu import update\n"
        + _loop(
            "optimizer.zero_grad()",
            "loss = model(x)",
            "if not tpu:\n    " + BLOCK.replace("\n    ", "\n        ") + "    optimizer.step()",
            "else:\n    loss.backward()\n    update(optimizer)",
        )
    )
    text, _ = _migrated(tmp_path, train=train, tpu="def update(optimizer):\n    optimizer.step()\n")
    assert "        loss.backward()\n        update(optimizer)\n" in text
    assert "        scaler.step(optimizer)\n        scaler.update()\n" in text


def test_gradients_that_decide_on_the_step_do_not_keep_the_scale_from_falling(tmp_path: Path) -> None:
    train = HEAD + _loop(
        "optimizer.zero_grad()",
        "loss = model(x)",
        BLOCK,
        "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "if math.isfinite(norm):\n    optimizer.step()",
    )
    text, notes = _migrated(tmp_path, train=train)
    assert "    scaler.unscale_(optimizer)\n    norm = " in text
    assert "    if math.isfinite(norm):\n        scaler.step(optimizer)\n    scaler.update()\n" in text
    assert "train.py:11:9: note: Apex leaves out the next step that is called after an overflow" in notes


@pytest.mark.parametrize(
    ("guard", "runs"),
    [
        ('"apex" not in sys.modules', False),
        ('"apex" in sys.modules', True),
        ('importlib.util.find_spec("apex") is None', False),
    ],
)
def test_questions_for_apex_are_answered(tmp_path: Path, guard: str, runs: bool) -> None:
    train = (
        HEAD
        + f"if {guard}:\n    f()\n"
        + _loop("optimizer.zero_grad()", "loss = model(x)", BLOCK, "optimizer.step()")
    )
    text, said = _migrated(tmp_path, train=train)
    assert "if " not in text
    assert ("\nf()\n" in text) == runs
    assert "the answer is yes now" in said


def test_outputs_go_to_the_cpu_in_fp32(tmp_path: Path) -> None:
    loop = _loop("optimizer.zero_grad()", "loss = model(x)", BLOCK, "optimizer.step()")
    train = HEAD + loop + "with torch.no_grad():\n    found = model(x).detach().cpu()\n"
    text, _ = _migrated(tmp_path, train=train + "sizes.addmm_(a, b)\n")
    assert "model(x).detach().float().cpu()" in text
    assert "sizes.addmm_(a, b)" in text  # not of what came from autocast


def test_a_loss_that_no_file_scales_is_called_so(tmp_path: Path) -> None:
    loop = _loop("optimizer.zero_grad()", "loss = model(x)", "loss.backward()", "optimizer.step()")
    text, said = _migrated(tmp_path, train=HEAD + loop)
    assert "no file calls scale_loss, so the loss is not scaled, as with Apex" in said
    assert "    loss.backward()\n    optimizer.step()\n" in text


@pytest.mark.parametrize("version", [(1, 13), (2, 2)])
def test_older_versions_of_torch_have_the_scaler_under_another_name(
    tmp_path: Path, version: tuple[int, int]
) -> None:
    train = HEAD + _loop("optimizer.zero_grad()", "loss = model(x)", BLOCK, "optimizer.step()")
    text, _ = _migrated(tmp_path, versions=Versions(version), train=train)
    assert "scaler = torch.cuda.amp.GradScaler()\n" in text
    assert (
        'scaler = torch.amp.GradScaler("cuda")\n'
        in _migrated(tmp_path, versions=Versions((2, 3)), train=train)[0]
    )


def test_a_file_that_imports_torch_in_functions_does_not_import_it_at_the_top(tmp_path: Path) -> None:
    body = HEAD.replace("import torch\n", "") + _loop(
        "optimizer.zero_grad()", "loss = model(x)", BLOCK, "optimizer.step()"
    )
    train = (
        "def load():\n    import torch\n    return torch.load(path)\n\n\ndef train(model, optimizer, data):\n"
    )
    text, _ = _migrated(tmp_path, train=train + "".join(f"    {line}\n" for line in body.splitlines()))
    assert not text.startswith("import torch")
    assert "def train(model, optimizer, data):\n    import torch\n" in text
