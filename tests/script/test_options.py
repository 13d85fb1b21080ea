"""Each option of an arm acts in a script as in ampcompare's own loop, bit for bit, however the script is written."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompare.base.errors import BackendUnavailable
from ampcompare.training.precision.base import make_precision
from tests.covering import covering
from tests.script.small_script import batch, network
from tests.script.trainings import has_bits

pytestmark = pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")
ARMS = {
    "half:bf16,kahan": "half:bf16",
    "half:bf16,rounding=stochastic": "half:bf16",
    "half:bf16,state=fp32": "half:bf16",
    "half:bf16,kahan,dynamic": "half:bf16",
    "half:bf16,masters=fp32,state=bf16": "half:bf16,masters=fp32",
    "native:bf16,state=bf16": "native:bf16",
    "native:bf16,weights=bf16": "native:bf16",
    "native:bf16,weights=bf16,state=fp32": "native:bf16,weights=bf16",
    "native:bf16,weights=bf16,masters=fp32": "native:bf16",
    "native:fp16,state=bf16": "native:fp16",
    "O2,cast_model_outputs=fp16": "O2",
}
DOORS = ("plain", "closure", "autocast", "scaler", "apex.amp")
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}
STEPS = 5


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.float(), y)


def weights_of(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


def in_our_loop(arm: str, optimizer: str) -> list[Tensor]:
    precision = make_precision(arm)
    model = network()
    models, (stepped,) = precision.prepare([model], [OPTIMIZERS[optimizer](model.parameters())])
    for step in range(STEPS):
        x, y = batch(step)
        with precision.autocast():
            out = models[0](x)
        precision.backward(loss_of(out, y), [stepped])
        nn.utils.clip_grad_norm_(precision.unscale(stepped), 0.1)
        precision.step(stepped)
        stepped.zero_grad()
        for param in model.parameters():
            param.grad = None
    return weights_of(model)


def by_script(door: str, optimizer: str) -> list[Tensor]:
    model: Any = network()
    stepped = OPTIMIZERS[optimizer](model.parameters())
    scaler = torch.amp.GradScaler("cpu") if door == "scaler" else None
    if door == "apex.amp":
        from apex import amp

        model, stepped = amp.initialize(model, stepped, verbosity=0)

    def passes(step: int) -> None:
        x, y = batch(step)
        stepped.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if door in ("autocast", "scaler") else nullcontext():
            loss = loss_of(model(x), y)
        params = model.parameters()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.unscale_(stepped)
        elif door == "apex.amp":
            with amp.scale_loss(loss, stepped) as scaled:
                scaled.backward()
            params = amp.master_params(stepped)
        else:
            loss.backward()
        nn.utils.clip_grad_norm_(params, 0.1)

    for step in range(STEPS):
        if door == "closure":
            stepped.step(lambda step=step: passes(step))
            continue
        passes(step)
        if scaler is None:
            stepped.step()
        else:
            scaler.step(stepped)
            scaler.update()
    return weights_of(model)


@pytest.mark.integration
@covering({"arm": list(ARMS), "door": DOORS, "optimizer": list(OPTIMIZERS)})
def test_an_option_acts_as_in_our_loop(behind: Any, arm: str, door: str, optimizer: str) -> None:
    """The bits are those of the own loop, and not those of the arm without the option wherever they differ there."""
    expected, without = in_our_loop(arm, optimizer), in_our_loop(ARMS[arm], optimizer)
    behind.end()  # the patches and levels of the own loop
    behind(arm)
    trained = by_script(door, optimizer)
    assert all(map(has_bits, trained, expected))
    if "state" not in arm or optimizer != "sgd":  # which has no state
        assert not all(map(has_bits, expected, without)) or "cast_model_outputs" in arm


def test_a_model_param_shows_the_gradient_of_its_copy(behind: Any) -> None:
    """In a script for Apex that clips the parameters of the model, under an arm that scales and steps copies."""
    trained = []
    for of_model in (True, False):
        behind("half:bf16,kahan,dynamic")
        from apex import amp

        model: Any = network()
        model, optimizer = amp.initialize(model, OPTIMIZERS["adamw"](model.parameters()), verbosity=0)
        for step in range(3):
            x, y = batch(step)
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(model(x), y), optimizer) as scaled:
                scaled.backward()
            nn.utils.clip_grad_norm_(model.parameters() if of_model else amp.master_params(optimizer), 0.1)
            optimizer.step()
        trained.append(weights_of(model))
        behind.end()
    assert all(map(has_bits, *trained))


def test_tf32_is_refused_where_the_device_lacks_it(behind: Any) -> None:
    with pytest.raises(BackendUnavailable, match="TF32"):
        behind("fp32:tf32")
