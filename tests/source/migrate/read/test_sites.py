"""Where a module reads gradients that are still scaled."""

import pytest

from ampcompare.source.migrate.rewrite import migrate_text

TRAIN = """import torch
from apex import amp

model = torch.nn.Linear(8, 8).cuda()
prompt = torch.zeros(8, device="cuda").requires_grad_()
OPTIMIZER
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for x in data:
    optimizer.zero_grad()
    loss = model(x + prompt).mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    READ
    optimizer.step()
"""
OF_MODEL = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"


@pytest.mark.parametrize("read", ["prompt.grad.clamp_(-1, 1)", "print(prompt.grad.abs().max())"])
@pytest.mark.parametrize(
    ("optimizer", "is_unscaled"),
    [
        ("optimizer = torch.optim.SGD([prompt], lr=0.1)", True),
        ("optimizer = torch.optim.SGD([{'params': [prompt]}, {'params': model.parameters()}], lr=0.1)", True),
        (f"{OF_MODEL}\noptimizer.add_param_group({{'params': prompt}})", True),
        (f"{OF_MODEL}\nlearned = list(model.parameters())\nlearned.append(prompt)", True),
        (OF_MODEL, False),
    ],
)
def test_gradients_of_tensors_that_an_optimizer_has_are_unscaled(
    optimizer: str, is_unscaled: bool, read: str
) -> None:
    """A tensor that no optimizer has keeps scaled gradients, as with Apex: attacks on inputs read those."""
    result = migrate_text(TRAIN.replace("OPTIMIZER", optimizer).replace("READ", read))
    assert not result.left_by_hand
    lines = result.text.splitlines()
    above = lines[lines.index(f"    {read}") - 1]
    assert (above == "    scaler.unscale_(optimizer)") is is_unscaled


@pytest.mark.parametrize(
    ("line", "is_said"),
    [
        ("other = model(x).mean()\n    other.backward()", True),
        ("if other:\n        loss.backward()", True),
        ("print(loss)", False),
    ],
)
def test_a_loss_that_apex_leaves_unscaled_next_to_a_scaled_one_is_named(line: str, is_said: bool) -> None:
    """An attack on weights trains so: its gradients are added to those of the scaled loss."""
    text = TRAIN.replace("OPTIMIZER", OF_MODEL).replace("READ", line)
    said = " ".join(each.message for each in migrate_text(text).findings)
    assert ("Apex does not scale this loss" in said) is is_said
