"""What the table of torch's equivalents names is rewritten."""

import pytest

from ampcompare.source.migrate.replacement_table import IMPORTED, OPTIMIZERS
from ampcompare.source.migrate.rewrite import migrate_text


@pytest.mark.parametrize("name", IMPORTED)
def test_what_keeps_its_arguments_leaves_no_apex(name: str) -> None:
    """Imported by its name, or used through `import apex`."""
    module, _, last = name.rpartition(".")
    for before in (f"from {module} import {last} as X\nx = X(m)\n", f"import {module}\nx = {name}(m)\n"):
        after = migrate_text(before)
        assert "apex" not in after.text
        assert after.left == 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fused_optimizer_becomes_its_twin(name: str) -> None:
    """With the arguments that both have; an argument of Apex alone is dropped."""
    before = f"import torch\nfrom apex.optimizers import {name}\no = {name}(p, lr=0.1, set_grad_none=True)\n"
    after = migrate_text(before).text
    assert f"o = {OPTIMIZERS[name].torch}(p, lr=0.1" in after
    assert "set_grad_none" not in after
