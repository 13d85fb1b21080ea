"""The function that stands for LARC trains as the class of the engine does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ampcompare.apex.parallel.LARC import LARC
from ampcompare.source.migrate.rewrite import migrate_text


def _larc() -> Any:
    before = "import torch\nfrom apex.parallel import LARC\n\noptimizer = LARC(optimizer)\n"
    text = migrate_text(before).text
    assert text.endswith("\noptimizer = larc(optimizer)\n")
    found: dict[str, Any] = {}
    exec(text.rpartition("\noptimizer = ")[0], found)
    return found["larc"]


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_weights_are_those_of_the_class(clip: bool, decay: float) -> None:
    """Within rounding, also of a weight that is zero; the weight decay is what it was after each step."""
    results = []
    for wrap in (LARC, _larc()):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        torch.nn.init.zeros_(model.bias)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=decay)
        optimizer = wrap(inner, trust_coefficient=0.1, clip=clip)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            assert inner.param_groups[0]["weight_decay"] == decay
        results.append([param.detach().clone() for param in model.parameters()])
    torch.testing.assert_close(results[0], results[1])


def test_gradients_are_unscaled_when_the_hooks_run() -> None:
    """GradScaler gives the same step as no scaler."""
    larc, results = _larc(), []
    for enabled in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        optimizer = larc(torch.optim.SGD(model.parameters(), lr=0.1))
        scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        results.append(model.weight.detach().clone())
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("classes = [LARC]", "passed as a value"),
        ("def larc(): return LARC(optimizer)", "something else of that name"),
        ("x = LARC(torch.optim.SGD(params, fused=True))", "a fused optimizer unscales"),
    ],
)
def test_what_cannot_become_the_function_stays(line: str, message: str) -> None:
    before = f"import torch\nfrom apex.parallel import LARC\n{line}\n"
    migration = migrate_text(before)
    assert message in migration.findings[0].message
    assert "from apex.parallel import LARC" in migration.text
