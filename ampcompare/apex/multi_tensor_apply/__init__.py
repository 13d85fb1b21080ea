"""Operations over whole lists of tensors, with the calling convention of `apex.multi_tensor_apply`.

`multi_tensor_applier` is the shared instance that legacy scripts import; the operations themselves carry Apex's names
in `ampcompare.apex.amp_C`.
"""

from ampcompare.apex.multi_tensor_apply.multi_tensor_apply import MultiTensorApply

__all__ = ["MultiTensorApply", "multi_tensor_applier"]

multi_tensor_applier = MultiTensorApply(2048 * 32)
