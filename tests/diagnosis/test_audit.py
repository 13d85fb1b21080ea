"""Executed types against what `explain` promises."""

from __future__ import annotations

import pytest

from ampcompare.backends.arm import Arm
from ampcompare.diagnosis.diagnose import audit
from ampcompare.diagnosis.observation import Observation
from ampcompare.diagnosis.watch import Called


@pytest.mark.parametrize(
    ("arm", "operation", "given", "module", "remark"),
    [
        ("apex:O1", "_softmax", "fp16", "head", "fp16 island: explain promises softmax in fp32, all but x.softmax()"),
        ("apex:O1", "exp", "fp16", "head", "fp16 island: explain promises exp in fp32"),
        ("apex:O1", "exp", "fp32", "head", ""),
        ("native:fp16", "exp", "fp16", "head", ""),
        ("apex:O2", "exp", "fp16", "head", ""),
        ("apex:O2", "mm", "fp32", "head", "fp32 island: the model is fp16"),
        ("apex:O2,keep_fp32=head", "mm", "fp32", "head.0", ""),
        ("apex:O2,keep_fp32=head", "mm", "fp16", "head.0", "fp16 island: keep_fp32 promises"),
        ("apex:O2,keep_fp32=Linear", "mm", "fp32", "head", ""),
        ("apex:O2", "native_batch_norm", "fp16", "head", "fp16 batch norm"),
        ("apex:O3", "native_batch_norm", "fp16", "head", ""),
        ("fp32", "mm", "bf16", "head", "fp32 promises fp32"),
        ("apex:O1", "exp", "fp16", "", ""),
        ("fabric:32-true", "mm", "fp32", "head", ""),
        ("fabric:16-true", "mm", "fp32", "head", "fp32 island: the model is fp16"),
        ("actnn", "mm", "fp32", "head", ""),
        ("actnn:over=apex:O2", "mm", "fp32", "head", "fp32 island: the model is fp16"),
        ("fp8", "mm", "fp32", "head", ""),
    ],
)
def test_a_remark_is_what_explain_does_not_say(arm: str, operation: str, given: str, module: str, remark: str) -> None:
    """Only a type that the sentences of the arm exclude is remarked on."""
    observation = Observation()
    observation.modules = [module]
    observation.types[Called(operation, (given,), (given,), module, "forward")] = 2
    (row,) = audit(Arm.parse(arm), observation)
    assert row.remark.startswith(remark)
    assert bool(row.remark) == bool(remark)
