"""`clip_grad_norm_`: clip by the norm of all gradients, which is taken in fp32."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ampcompare.apex.multi_tensor_apply.arithmetic import per_tensor_norms


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place so that the norm of all together is at most `max_norm`, and return the norm before.

    For L2 norms of fp16 and bf16 gradients, norm and factor are fp32, so 65504 is not a limit; other norms are those of
    `torch.nn.utils.clip_grad_norm_`.

    Raises:
        RuntimeError: `error_if_nonfinite` and the norm is inf or NaN.

    Source: Apex 25.05, `apex.contrib.clip_grad.clip_grad_norm_`.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [param.grad.detach() for param in params if param.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    if float(norm_type) != 2.0 or any(grad.is_sparse for grad in grads):
        return torch.nn.utils.clip_grad_norm_(params, float(max_norm), norm_type, error_if_nonfinite)
    device = grads[0].device
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        alike.setdefault((grad.device, torch.promote_types(grad.dtype, torch.float32)), []).append(grad)
    norms = [torch.linalg.vector_norm(per_tensor_norms(of, dtype=wide)) for (_, wide), of in alike.items()]
    widest = torch.float64 if any(wide is torch.float64 for _, wide in alike) else torch.float32
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device, widest) for norm in norms]))
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The gradients have a norm of {total.item()}, so they cannot be clipped; find the overflow, or leave out "
            "error_if_nonfinite."
        )
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    for (place, _), of in alike.items():
        torch._foreach_mul_(of, factor.to(place))
    return total
