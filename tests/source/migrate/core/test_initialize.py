"""The value of `amp.initialize` keeps its form: a list of one model is a list."""

import pytest

from ampcompare.source.migrate.rewrite import migrate_text

TEXT = """import torch
from apex import amp

net, critic = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
first, second = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(critic.parameters(), lr=0.1)
{0}
loss = net(torch.randn(8, 4)).mean()
with amp.scale_loss(loss, {1}) as scaled:
    scaled.backward()
{1}.step()
"""


@pytest.mark.parametrize(
    ("call", "optimizer", "line"),
    [
        ("nets, steps = amp.initialize([net], [first])", "steps[0]", "nets, steps = [net], [first]"),
        (
            "nets, steps = amp.initialize([net, critic], [first])",
            "steps[0]",
            "nets, steps = [net, critic], [first]",
        ),
        ("nets, first = amp.initialize([net], first)", "first", "nets = [net]"),
        ("[net], first = amp.initialize([net], first)", "first", ""),
        ("(net, critic), (first, second) = amp.initialize([net, critic], [first, second])", "first", ""),
        ("(net, b), [first, second] = amp.initialize([net, critic], [first, second])", "first", "b = critic"),
    ],
)
def test_the_value_keeps_its_form(call: str, optimizer: str, line: str) -> None:
    migration = migrate_text(TEXT.format(call, optimizer))
    above, _, below = migration.text.partition("scaler = ")
    assert "amp.initialize" not in migration.text
    between = [*above.splitlines()[4:], *below.splitlines()[1:2]]
    assert [each for each in between if " = " in each and "with " not in each and "loss" not in each] == [
        line
    ] * bool(line)


def test_a_scale_that_is_dynamic_or_left_to_the_level_is_dynamic() -> None:
    text = (
        "import torch\nfrom apex import amp\n\n"
        'model, optimizer = amp.initialize(model, optimizer, loss_scale="dynamic" if fixed else None)\n'
        "for x in data:\n    loss = model(x)\n    with amp.scale_loss(loss, optimizer) as scaled:\n"
        "        scaled.backward()\n    optimizer.step()\n"
    )
    migration = migrate_text(text)
    assert 'scaler = torch.amp.GradScaler("cuda")\n' in migration.text
    assert not migration.findings
