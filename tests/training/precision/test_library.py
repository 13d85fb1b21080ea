"""What docs/backends.md says of other libraries, against what the installed ones do."""

import pytest
import torch
from torch import nn

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import BackendUnavailable
from ampcompare.results.analysis.pairing.declared import role_comparisons
from ampcompare.training.ledger import StepTypeRecorder
from ampcompare.training.precision.base import make_precision

ASKED = [
    *("accelerate:no", "accelerate:fp16", "accelerate:bf16"),
    *("fabric:32-true", "fabric:16-mixed", "fabric:bf16-mixed", "fabric:16-true", "fabric:bf16-true"),
    *("mmengine:fp32", "mmengine:fp16", "mmengine:bf16"),
]
ON_CPU = {"accelerate:fp16": "fp32", "fabric:16-mixed": "native:bf16"}
GPU_ONLY = ("mmengine:fp16", "mmengine:bf16")


@pytest.mark.parametrize("text", ASKED)
def test_the_table_is_what_the_libraries_do(text: str) -> None:
    """On a CPU the ledger of each installed library shows what docs/backends.md says, or it refuses."""
    arm = Arm.parse(text)
    assert arm.spec.library is not None
    if arm.spec.library.why_missing():
        pytest.skip(arm.spec.library.why_missing())
    if text in GPU_ONLY:
        with pytest.raises(BackendUnavailable):
            make_precision(text)
        return
    precision = make_precision(text)
    model: nn.Module = nn.Linear(2, 2)
    (model,), (optimizer,) = precision.prepare([model], [torch.optim.SGD(model.parameters(), lr=0.1)])
    look = StepTypeRecorder(model.parameters)
    look.begin(0, [optimizer], detailed=True)
    with look.operations_observed_in_block():
        with precision.autocast():
            loss = model(torch.ones(1, 2)).float().sum()
        precision.backward(loss, [optimizer])
    precision.step(optimizer)
    look.end([optimizer])
    roles = Arm.parse(ON_CPU.get(text, text)).roles
    assert roles is not None
    scales = precision.loss_scales()
    found = role_comparisons(roles, look.read_ledger_from_device(loss_scale=scales[0] if scales else None))
    assert [role.difference_text for role in found if role.differs] == []
