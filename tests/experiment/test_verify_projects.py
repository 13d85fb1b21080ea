"""`migrate --verify` on scripts with several losses, micro-batches or files, as they are after `migrate`."""

from pathlib import Path

import pytest

from ampcompare.experiment.rewrite_comparison import EQUAL
from ampcompare.experiment.verify import verify_script

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
    "the loop in another file": {"main": f"{HEAD}from engine import *\n{BUILD}{MAIN}", "engine": HEAD + TRAIN},
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
        verify_script(
            str(tmp_path / "main.py"), ["O1"], steps=6, say=said.append, how="adapter" if several else "rewrite"
        )
        == 0
    )
    assert said[-2] == f"verdict: {EQUAL}; you can go on with the {'adapter' if several else 'rewritten files'}:"
    for line in said[:2]:
        assert line.endswith(f": {steps} steps, 0 skipped, {passes} backward passes")
