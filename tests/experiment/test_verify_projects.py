"""`migrate --verify` on scripts with several losses, micro-batches or files, as they are after `migrate`."""

import ast
import dataclasses
import shlex
from pathlib import Path

import pytest

from ampcompare.base.errors import LaunchError
from ampcompare.cli import main
from ampcompare.experiment import verify
from ampcompare.experiment.rewrite_comparison import EQUAL
from ampcompare.experiment.verify import verify_rewritten_script
from ampcompare.source.migrate.adapter.choice import MigrationChoice, choose_adapter_for_all

HEAD = """
import sys
import torch
from apex import amp
"""
BUILD = """
def build():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    return model, optimizer, [(torch.randn(4, 8).cuda(), torch.randint(3, (4,)).cuda()) for _ in range(6)]
"""
TRAIN = """
def train_one_epoch(fp16, model, optimizer, loader):
    for step, (x, y) in enumerate(loader):
        loss = torch.nn.functional.cross_entropy(model(x).float(), y) / 2
        if fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        if step % 2 == 1:
            if fp16:
                torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
"""
MAIN = """
def main(level):
    model, optimizer, loader = build()
    model, optimizer = amp.initialize(model, optimizer, opt_level=level)
    for _ in range(9):
        train_one_epoch(True, model, optimizer, loader)


if __name__ == "__main__":
    main(sys.argv[1])
"""
TWO_OPTIMIZERS = """
def main():
    one, two = torch.nn.Linear(4, 8).cuda(), torch.nn.Linear(8, 1).cuda()
    first, second = (torch.optim.Adam(each.parameters(), lr=1e-3) for each in (one, two))
    [one, two], [first, second] = amp.initialize([one, two], [first, second], opt_level="O1", num_losses=2)
    while True:
        loss = torch.nn.functional.mse_loss(two(one(torch.randn(8, 4).cuda())), torch.ones(8, 1).cuda())
        first.zero_grad()
        with amp.scale_loss(loss, first, loss_id=0) as scaled:
            scaled.backward()
        first.step()
        for _ in range(2):
            loss = torch.nn.functional.mse_loss(two(one(torch.randn(8, 4).cuda()).detach()), torch.zeros(8, 1).cuda())
            second.zero_grad()
            with amp.scale_loss(loss, second, loss_id=1) as scaled:
                scaled.backward()
            second.step()


main()
"""
FILES = {
    "the loop in another file": {
        "main": f"{HEAD}from engine import *\n{BUILD}{MAIN}",
        "engine": HEAD + TRAIN,
    },
    "two optimizers": {"main": HEAD + TWO_OPTIMIZERS},
}


@pytest.mark.usefixtures("forked_runs")
@pytest.mark.integration
@pytest.mark.parametrize(
    ("files", "steps", "passes"), [("the loop in another file", 6, 12), ("two optimizers", 10, 10)]
)
def test_a_project_trains_the_same(tmp_path: Path, files: str, steps: int, passes: int) -> None:
    """Only backward passes that lead to a step are counted, in both runs."""
    (tmp_path / "README.md").touch()  # the topmost folder, as in test_neighbors.py
    for name, text in FILES[files].items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    said: list[str] = []
    several = "engine" in FILES[files]  # which move with the adapter
    assert (
        verify_rewritten_script(
            str(tmp_path / "main.py"),
            ["O1"],
            steps=6,
            say=said.append,
            how="adapter" if several else "rewrite",
        )
        == 0
    )
    assert (
        said[-2] == f"verdict: {EQUAL}; you can go on with the {'adapter' if several else 'rewritten files'}:"
    )
    for line in said[:2]:
        assert line.endswith(f": {steps} steps, 0 skipped, {passes} backward passes")


NESTED = {
    "main.py": "import sys\nfrom engine.trainer import fit\n\nfit(sys.argv[1:])\n",
    "engine/trainer.py": """import torch

try:
    from apex import amp
except ImportError:
    amp = None


def fit(words):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if amp is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    for _ in range(4):
        loss = model(torch.randn(8, 4).cuda()).float().pow(2).mean()
        optimizer.zero_grad()
        if amp is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("has_init", [True, False])
def test_the_adapter_is_found_where_it_will_lie(has_init: bool, tmp_path: Path) -> None:
    """In a package; in a folder without `__init__.py` too, or the verdict says so. The named command writes it."""
    for name, text in {**NESTED, **({"engine/__init__.py": ""} if has_init else {})}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    said: list[str] = []
    code = verify_rewritten_script(str(tmp_path / "main.py"), [], steps=4, say=said.append)
    files = [str(tmp_path / "main.py"), str(tmp_path / "engine" / "trainer.py")]
    command = shlex.split(said[-1]) if code == 0 else ["ampcompare", "migrate", "--write", *files]
    assert command[:4] == ["ampcompare", "migrate", "--write", files[0]]
    assert main(command[1:]) == 0
    imports = [each for each in ast.walk(ast.parse(Path(files[1]).read_text())) if hasattr(each, "names")]
    full = [
        f"{getattr(each, 'module', '')}.{alias.name}".lstrip(".") for each in imports for alias in each.names
    ]
    (name,) = {each for each in full if each.endswith("torch_amp_adapter")}
    is_found = (tmp_path / name.replace(".", "/")).with_suffix(".py").is_file()
    assert is_found == (code == 0)
    assert is_found or not has_init


@pytest.mark.slow
def test_an_adapter_that_no_import_finds_is_no_green_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its place is wrong: the import is not tried, so the script ends and the error names it."""
    script = tmp_path / "train.py"
    script.write_text(NESTED["engine/trainer.py"] + "\n\nfit([])\n")
    monkeypatch.setattr(
        verify,
        "choose_adapter_for_all",
        lambda paths: _placed_elsewhere(choose_adapter_for_all(paths), tmp_path / "elsewhere"),
    )
    with pytest.raises(LaunchError, match=r"No module named 'torch_amp_adapter' \(.*train.py:3\)"):
        verify_rewritten_script(str(script), [], steps=4, say=[].append, how="adapter")


def _placed_elsewhere(choice: MigrationChoice, folder: Path) -> MigrationChoice:
    (plan,) = choice.plans
    moved = dataclasses.replace(plan.adapter, path=folder / plan.adapter.path.name)
    return dataclasses.replace(choice, plans=[dataclasses.replace(plan, adapter=moved)])


@pytest.mark.slow
def test_a_part_of_the_core_outside_of_the_folder_of_the_script_moves_with_it(tmp_path: Path) -> None:
    """As an example of a package does, which the package itself trains; what did not run stays."""
    files = {
        ".git/HEAD": "",
        "lib/__init__.py": "",
        "lib/bot.py": "from apex import amp\n\n\ndef step(loss, optimizer):\n"
        "    with amp.scale_loss(loss, optimizer) as scaled_loss:\n        scaled_loss.backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n",
        "lib/rare.py": "from apex import amp\n\namp.init(enabled=True)\n",  # what the adapter lacks
        "examples/main.py": "import sys\nfrom pathlib import Path\n\nimport torch\n\n"
        "sys.path.append(str(Path(__file__).parents[1]))\nfrom apex import amp\nfrom lib.bot import step\n\n"
        "if len(sys.argv) > 1:\n    import lib.rare\n"
        "torch.manual_seed(0)\nmodel = torch.nn.Linear(4, 2).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model, optimizer = amp.initialize(model, optimizer, opt_level='O2')\n"
        "for _ in range(3):\n    step(model(torch.randn(8, 4).cuda()).float().pow(2).mean(), optimizer)\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    script, bot = tmp_path / "examples" / "main.py", tmp_path / "lib" / "bot.py"
    said: list[str] = []
    assert verify_rewritten_script(str(script), [], steps=3, say=said.append) == 0
    assert any(each.startswith(f"{bot} takes the adapter") for each in said)
    assert shlex.split(said[-1]) == ["ampcompare", "migrate", "--write", str(script), str(bot)]
