"""What the levels of `apex.amp` mean, by hand in plain torch: no line is shared with ampcompare's engine.

It has the surface that `golden_replay.Replay` uses, for one optimizer and one loss. Two implementations that run on
one processor must agree to the last bit, whatever the order in which that processor sums.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

HALF = {
    "O1": torch.float16,
    "O2": torch.float16,
    "O3": torch.float16,
    "O4": torch.bfloat16,
    "O5": torch.bfloat16,
}
BATCH_NORM = nn.modules.batchnorm._BatchNorm
DTYPES = {torch.float32, torch.float16, torch.bfloat16}


def is_within_reach(scenario: dict[str, Any]) -> bool:
    """Return whether the levels by hand have what a scenario needs."""
    alone = len(scenario["optimizers"]) == len(scenario["losses"]) == 1
    return alone and not {"restart", "add_group"} & scenario.keys() and scenario.get("accumulate") != "plain"


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return floating-point tensors in another type, in tuples and lists too."""
    if isinstance(value, (tuple, list)):
        return type(value)(cast(item, dtype) for item in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype in DTYPES else value


def widen_state(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
    """Make a state dict fp32, as that of a model of O2 is."""
    state.update({name: cast(value, torch.float32) for name, value in state.items()})


class CastFunctions(TorchFunctionMode):
    """O1 and O4: products in 16 bits, sensitive functions in fp32. O1 casts a weight once until the next step."""

    NARROW = ("linear", "conv2d", "matmul", "lstm")
    WIDE = (F.softmax, F.gelu, F.layer_norm, F.cross_entropy, F.mse_loss)

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.weights: dict[int, Tensor] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self.WIDE:
            args = cast(args, torch.float32)
        elif function.__name__ in self.NARROW:
            args = self.narrow(args)
        return function(*args, **(kwargs or {}))

    def narrow(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(self.narrow(item) for item in value)
        once = self.dtype is torch.float16 and torch.is_grad_enabled() and isinstance(value, nn.Parameter)
        return self.weights.setdefault(id(value), value.to(self.dtype)) if once else cast(value, self.dtype)


class AmpByHand:
    """`amp` of one session; `close` ends its casts."""

    def __init__(self) -> None:
        self._amp_state = self
        self.casts: CastFunctions | None = None
        self.scaler = SimpleNamespace()

    def close(self) -> None:
        if self.casts is not None:
            self.casts.__exit__(None, None, None)
        self.casts = None

    def initialize(
        self,
        models: Any,
        optimizer: torch.optim.Optimizer,
        *,
        opt_level: str,
        enabled: bool = True,
        **options: Any,
    ) -> tuple[Any, Any]:
        options.pop("verbosity"), options.pop("strict")
        stays_wide = opt_level in ("O0", "O1", "O4") or not enabled
        half = torch.float32 if stays_wide else HALF[opt_level]
        keeps_norms = str(options.get("keep_batchnorm_fp32", opt_level in ("O2", "O5"))) == "True"
        has_masters = options.get("master_weights", opt_level in ("O2", "O5")) and enabled
        given = (
            str(options.get("loss_scale", "dynamic" if opt_level in ("O1", "O2") else 1.0))
            if enabled
            else "1"
        )
        first = min(2.0**16, options.get("max_loss_scale", 2.0**24)) if given == "dynamic" else float(given)
        self.scaler = SimpleNamespace(
            scale=first, dynamic=given == "dynamic", unskipped=0, overflows=False,
            lowest=options.get("min_loss_scale", 0.0), highest=options.get("max_loss_scale", 2.0**24),
        )  # fmt: skip
        outputs = options.get("cast_model_outputs", torch.float32)
        for model in models if isinstance(models, list) else [models]:
            self.cast_model(model, half, keeps_norms)
            if not stays_wide:
                model.register_forward_pre_hook(lambda _, inputs: cast(inputs, half))
                model.register_state_dict_post_hook(widen_state)
            if enabled and ("cast_model_outputs" in options or not stays_wide):
                model.register_forward_hook(lambda _, __, output, dtype=outputs: cast(output, dtype))
        self.pairs = self.give_masters(optimizer) if has_masters else []
        self.guard_step(optimizer)
        if enabled and opt_level in ("O1", "O4"):
            self.casts = CastFunctions(HALF[opt_level])
            self.casts.__enter__()
        return models, optimizer

    def cast_model(self, model: nn.Module, dtype: torch.dtype, keeps_norms: bool) -> None:
        for module in model.modules():
            if not (keeps_norms and isinstance(module, BATCH_NORM)):
                for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                    tensor.data = cast(tensor.data, dtype)

    def give_masters(self, optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, Tensor]]:
        """Let the optimizer step fp32 copies of its 16-bit parameters, and return each with its copy."""
        pairs = []
        for group in optimizer.param_groups:
            for index, param in enumerate(group["params"]):
                if param.dtype is not torch.float32:
                    master = param.detach().clone().float().requires_grad_()
                    pairs.append((param, master))
                    group["params"][index] = master
        return pairs

    def guard_step(self, optimizer: torch.optim.Optimizer) -> None:
        plain_step, plain_clear = optimizer.step, optimizer.zero_grad

        def step() -> None:
            if self.scaler.overflows:
                self.scaler.overflows = False
                return
            plain_step()
            with torch.no_grad():
                for param, master in self.pairs:
                    param.copy_(master)

        def zero_grad() -> None:
            plain_clear()
            for param, _ in self.pairs:
                param.grad = None

        optimizer.step, optimizer.zero_grad = step, zero_grad  # type: ignore[method-assign, assignment]

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any, *, delay_unscale: bool = False) -> Iterator[Tensor]:
        yield loss.float() * self.scaler.scale
        if self.casts is not None:
            self.casts.weights.clear()
        acts = self.scaler.scale != 1 or self.scaler.dynamic or self.pairs
        if acts and not delay_unscale:
            self.unscale(optimizer)
            self.move_scale()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        for param, master in self.pairs:
            master.grad = None if param.grad is None else param.grad.float()
        grads = [param.grad for param in self.master_params(optimizer) if param.grad is not None]
        raw = [param.grad for param, _ in self.pairs if param.grad is not None]
        self.scaler.overflows = self.scaler.dynamic and not all(
            bool(grad.isfinite().all()) for grad in (*grads, *raw)
        )
        if self.scaler.scale != 1 and not self.scaler.overflows:
            for grad in grads:
                grad.mul_(1 / self.scaler.scale)

    def move_scale(self) -> None:
        scaler = self.scaler
        scaler.unskipped = 0 if scaler.overflows else scaler.unskipped + 1
        if scaler.overflows:
            scaler.scale = max(scaler.lowest, scaler.scale / 2)
        elif scaler.dynamic and scaler.unskipped == 2000:
            scaler.scale, scaler.unskipped = min(scaler.highest, scaler.scale * 2), 0

    def master_params(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return [param for group in optimizer.param_groups for param in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        return {"loss_scaler0": {"loss_scale": self.scaler.scale, "unskipped": self.scaler.unskipped}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.scale, self.scaler.unskipped = state["loss_scaler0"].values()
