"""Statements with a cross entropy of probabilities, moved out of autocast by `lint --fix` where that is sure."""

import pytest

from ampcompare.source.lint.check import check_text
from ampcompare.source.lint.run import LintSelection, fixed_text_rest_and_num_fixes

HEAD = """import torch
import torch.nn.functional as F
from torch import nn
criterion = nn.BCELoss()
"""
OFF = 'with torch.autocast("cuda", enabled=False):'


def _fix(body: str, enter: str = 'with torch.autocast("cuda"):') -> str:
    """Return what becomes of statements under autocast, with those around them."""
    text = f"{HEAD}def train(model, x, y, losses):\n    {enter}\n" + "".join(
        f"        {line}\n" for line in body.split("\n")
    )
    selection = LintSelection(select=("AMP230",))
    found = check_text(text, selection.reports_code)
    assert found
    fixed, left, _ = fixed_text_rest_and_num_fixes(text, found, selection)
    assert (fixed == text) == bool(left)
    lines = fixed.removeprefix(HEAD).splitlines()[2:]
    return "\n".join(line.removeprefix(" " * 8) for line in lines)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("loss = criterion(x, y)", "loss = criterion(x.float(), y.float())"),
        (
            "loss = criterion(input=x, target=y.float())",
            "loss = criterion(input=x.float(), target=y.float())",
        ),
        ("loss = criterion(x['p'], y > 0)", "loss = criterion(x['p'].float(), (y > 0).float())"),
        ("F.binary_cross_entropy(x.sigmoid(), y)", "F.binary_cross_entropy(x.float().sigmoid(), y.float())"),
        ("loss += criterion(torch.sigmoid(x), y)", "loss += criterion(torch.sigmoid(x.float()), y.float())"),
        ("loss = criterion(x.float().view(-1), y)", "loss = criterion(x.float().view(-1), y.float())"),
        ("criterion(1 - x, torch.ones_like(x))", "criterion((1 - x).float(), torch.ones_like(x).float())"),
        ("losses.append(criterion(x, y).item())", "losses.append(criterion(x.float(), y.float()).item())"),
        ("nn.BCELoss().to(x.device)(x, y).sum()", "nn.BCELoss().to(x.device)(x.float(), y.float()).sum()"),
    ],
)
def test_a_statement_leaves_autocast_with_inputs_in_fp32(before: str, after: str) -> None:
    assert _fix(before) == f"{OFF}\n    {after}"


def test_what_goes_into_the_only_loss_is_computed_above_it() -> None:
    after = "loss_input = model(x)\nloss_target = y @ y\nwith torch.cuda.amp.autocast(enabled=False):\n    "
    after += "return criterion(loss_input.float(), loss_target.float())"
    assert _fix("return criterion(model(x), y @ y)", "with torch.cuda.amp.autocast():") == after


@pytest.mark.parametrize(
    "body",
    [
        "loss = criterion(x, y) + F.mse_loss(x, y)",
        "loss = criterion(x, y) + criterion(model(x), y)",
        "loss = criterion(x, y) ** 2",
        "loss = 1 / criterion(x, y)",
        "loss = criterion(*x, y)",
        "loss = criterion(x := model(x), y)",
        "loss = sum(criterion(one, y) for one in x)",
        "if criterion(x, y) > 1:\n    pass",
    ],
)
def test_a_statement_stays_where_something_else_in_it_may_be_cast(body: str) -> None:
    assert _fix(body) == body
