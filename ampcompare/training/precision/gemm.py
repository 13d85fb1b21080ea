"""Products of linear layers in formats of 8 and 4 bits, emulated over a bf16 arm."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.optim import Optimizer

from ampcompare.backends.arm import Arm
from ampcompare.backends.gemm import LAST
from ampcompare.base.errors import UnsupportedCombination
from ampcompare.base.tensors.products import hide_operations, modes_that_see_operations
from ampcompare.base.tensors.tree import tensors_in_value
from ampcompare.training.precision.base import PrecisionWrapper, Prepared, StepOutcome, make_precision
from ampcompare.training.precision.device_generators import DeviceGenerators
from ampcompare.training.precision.keep_fp32 import ids_of_kept_modules
from ampcompare.training.precision.linear_products import (
    BF16,
    MULTIPLYING,
    LayerFormats,
    LinearProductsFunction,
    ProductRounding,
)
from ampcompare.training.precision.replaced_forward import ReplacedForward
from ampcompare.training.precision.stochastic_rounding import seed_of_step
from ampcompare.training.precision.torchao_products import TorchaoProducts, has_mxfp8_kernel

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
MAX_NAMED = 8


class LinearFormatPlan:
    """Which linear layers multiply in which formats: `install` in models, `prepare_call_of_model` before each call.

    A layer multiplies in its formats wherever it would multiply in bf16: in a block of autocast, or with bf16 weights.
    One plan serves a process; copies of models share it.

    Attributes:
        notes: what is in bf16 instead, in words; complete once the models have run.
        passes: forward passes with gradients so far, from which random bits follow.
        seed: the other part of these.
    """

    def __init__(self, arm: Arm) -> None:
        assert arm.roles is not None
        self._arm = arm
        self._roundings = {
            role: ProductRounding.make_from_declared(form) for role, form in arm.roles.linear_formats.items()
        }
        self._keep = str(arm.options.get("keep", LAST))
        rounding = self._roundings["fprop"]
        self.engine: TorchaoProducts | None = None
        if rounding is not None and arm.options.get("engine") == "torchao":
            self.engine = TorchaoProducts(rounding.scale)
        self.is_random = any(one is not None and one.stochastic for one in self._roundings.values())
        self.passes = self.seed = 0
        self._generators = DeviceGenerators()
        self._known: set[int] = set()  # ids of modules of installed models
        # models whose last layer is not known from a training pass
        self._undecided: dict[int, nn.Module] = {}
        self._last: dict[int, FormatForward] = {}  # by the id of a model
        self.has_acted = False  # a layer that is in a format has multiplied
        self._guess = self.ran_last = ""  # names of layers
        self._trial: list[str] | None = None
        self._left_out: list[str] = []
        self._kept_names: list[str] = []

    def __deepcopy__(self, memo: Any) -> LinearFormatPlan:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_generators": DeviceGenerators(), "_undecided": {}, "_known": set()}

    def has_module_of_model(self, model: nn.Module) -> bool:
        """Return whether a module is one of an installed model."""
        return id(model) in self._known

    def install(self, model: nn.Module) -> int:
        """Give the linear layers of a model their formats, and return how many there are.

        Raises:
            ConfigError: a pattern of `keep` matches no module.
        """
        named = [(name, module) for name, module in model.named_modules(remove_duplicate=False)]
        self._known |= {id(module) for _, module in named}
        kept: set[int] = set()
        if self._keep not in (LAST, "none"):
            kept = ids_of_kept_modules(self._keep.split("|"), [one for one in named if one[0]], "keep")
        layers = 0
        for name, module in dict.fromkeys(model.named_modules()):
            if not isinstance(module, MULTIPLYING):
                continue
            if not _is_plain_linear(module):
                self._left_out.append(f"{name} ({type(module).__name__})")
            elif not isinstance(module.forward, FormatForward):
                FormatForward(module, self, name, is_kept=id(module) in kept).install()
                self._kept_names += [name] if id(module) in kept else []
                layers += 1
        if self._keep == LAST and layers:
            self._undecided[id(model)] = model
        return layers

    def refuse_without_layers(self, layers: int) -> None:
        """Refuse models none of whose layers are in a format: a bf16 run must not be called one.

        Args:
            layers: how many linear layers are in a format.

        Raises:
            UnsupportedCombination: none is.
        """
        if not layers:
            raise UnsupportedCombination(
                f"{self._arm} is about linear layers (nn.Linear), and this model has none; use {self._arm.inner} on it"
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def prepare_call_of_model(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Prepare for a call of a model: find the layer that runs last, and draw random bits for its pass.

        Args:
            model: that is called.
            args, kwargs: of the call.
        """
        if self._trial is not None:
            return
        if id(model) in self._undecided:
            self._keep_last_in_bf16(model, args, kwargs)
            if torch.is_grad_enabled():
                del self._undecided[id(model)]
        if torch.is_grad_enabled():
            self.passes += 1
            self._generators.begin_step(self._seed_of_pass)

    def generator_of_device(self, device: torch.device) -> torch.Generator:
        """Return the generator of a device for this pass."""
        return self._generators.generator_of(device, self._seed_of_pass)

    @property
    def _seed_of_pass(self) -> int:
        group = torch.distributed
        rank = group.get_rank() if group.is_available() and group.is_initialized() else 0
        return seed_of_step(f"gemm on rank {rank}", self.seed, self.passes)

    def _keep_last_in_bf16(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Keep the linear layer in bf16 that runs last when a copy of the model gets these arguments."""
        layers = {
            one.name: one for module in model.modules() if isinstance(one := module.forward, FormatForward)
        }
        found = self._name_of_last_layer(model, args, kwargs)
        last = found or next(reversed(layers))
        self._guess = "" if found else last
        for name, layer in layers.items():
            layer.is_kept = name == last
        self._last[id(model)] = layers[last]
        if len(layers) == 1:
            raise UnsupportedCombination(
                f"{last or type(model).__name__} is the only linear layer, and {self._arm} keeps the one that runs "
                "last in bf16; add keep=none"
            )

    def _name_of_last_layer(self, model: nn.Module, args: Any, kwargs: Any) -> str:
        """Return the name of the layer that runs last; "" if no copy can be made or run."""
        cuda = list({param.device for param in model.parameters() if param.device.type == "cuda"})
        python, numpy = random.getstate(), np.random.get_state()
        self._trial = []
        try:
            with hide_operations(modes_that_see_operations()), torch.no_grad(), torch.random.fork_rng(cuda):
                # Arguments too: a forward pass may change them, or draw from a generator among them.
                memo: dict[int, Any] = {
                    id(one): one.detach().clone() for one in tensors_in_value((args, kwargs))
                }
                twin, its_args, its_kwargs = copy.deepcopy((model, args, kwargs), memo)
                twin(*its_args, **its_kwargs)
        except Exception:
            # a model may hold what cannot be copied; its own call raises whatever else is wrong
            return ""
        finally:
            names, self._trial = self._trial, None
            random.setstate(python)
            np.random.set_state(numpy)
        return names[-1] if names else ""

    def check_guess_of_last_layer(self) -> None:
        """Refuse a step in which another layer ran last than was guessed, where no copy could be run.

        Raises:
            UnsupportedCombination: another layer ran last; the message says how to name it.
        """
        guess, self._guess = self._guess, ""
        if guess and self.ran_last != guess:
            raise UnsupportedCombination(
                f"{self._arm} keeps the linear layer in bf16 that runs last, which no copy of this model could "
                f"show; it took {guess}, and {self.ran_last} ran last. Add keep={self.ran_last}"
            )

    def note_layer_if_in_trial(self, name: str) -> bool:
        """Return whether a layer runs in a trial, and note its name there."""
        if self._trial is not None:
            self._trial.append(name)
        return self._trial is not None

    def rounding_by_product_of(self, layer: FormatForward) -> dict[str, ProductRounding | None]:
        """Return how the products of a layer are rounded."""
        if layer.rounded_alone is not None:
            return BF16 | {role: self._roundings[role] for role in layer.rounded_alone}
        return BF16 if layer.is_kept else self._roundings

    @property
    def notes(self) -> tuple[str, ...]:
        """What is in bf16 instead, in words."""
        last = [f"{layer.name}, which runs last" for layer in self._last.values() if layer.has_acted]
        kept = last or self._kept_names
        found = []
        for what, names in (("kept in bf16", kept), (f"{self._arm.backend} is not in", self._left_out)):
            names = list(dict.fromkeys(names))
            more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
            found += [f"{what}: {', '.join(names[:MAX_NAMED])}{more}"] if names else []
        if self.engine is not None and self.has_acted:
            found.append(self.engine.multiplier_note)
        return tuple(found)


def _is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a layer multiplies its input by its weight in `forward` alone.

    A subclass with a forward of its own, and the projection inside of attention, use the weight elsewhere.
    """
    is_linear = isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear)
    return is_linear and type(module).forward is nn.Linear.forward


class FormatForward(ReplacedForward):
    """Multiplies a linear layer's operands in the formats of a plan; the layer keeps its class, weights and hooks.

    Args:
        layer: whose `forward` this replaces: from [..., in_features] to [..., out_features] in bfloat16.
        plan: the formats of all layers, and the generator of their rounding.
        name: of the layer in its model.
        is_kept: whether the plan keeps the layer in bf16.

    Attributes:
        has_acted: whether the layer was called under a plan that acts.
        rounded_alone: the products that are rounded, the others not; None for all.
    """

    module: nn.Linear

    def __init__(self, layer: nn.Linear, plan: LinearFormatPlan, name: str, *, is_kept: bool) -> None:
        super().__init__(layer, layer.forward)
        self.plan = plan
        self.name = name
        self.is_kept = is_kept
        self.has_acted = False
        # products that are rounded, the others not; None for all
        self.rounded_alone: tuple[str, ...] | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, value: Tensor) -> Tensor:
        layer = self.module
        if self.plan.note_layer_if_in_trial(self.name) or not _would_multiply_in_bf16(value, layer.weight):
            result: Tensor = self.original(value)
            return result
        self.has_acted = True
        if torch._C._current_autograd_node() is None:  # else a checkpoint computes again
            self.plan.ran_last = self.name
        self.plan.has_acted |= not self.is_kept
        is_compared = self.plan.passes == 1 and torch.is_grad_enabled()
        formats = LayerFormats(
            self.name,
            self.plan.rounding_by_product_of(self),
            self.plan.generator_of_device,
            self.plan.engine,
            is_compared,
        )
        # as autocast, which keeps this for the backward pass
        flat = value.reshape(-1, layer.in_features).bfloat16()
        rows = LinearProductsFunction.apply(flat, layer.weight.bfloat16(), formats)  # type: ignore[no-untyped-call]
        result = rows.view(*value.shape[:-1], layer.out_features)
        return result if layer.bias is None else result + layer.bias.bfloat16()


def _would_multiply_in_bf16(value: Tensor, weight: Tensor) -> bool:
    """Return whether torch would multiply in bf16 here."""
    if not value.numel() or value.dtype not in FLOATING:
        return False
    if torch.is_autocast_enabled(value.device.type):
        return torch.get_autocast_dtype(value.device.type) is torch.bfloat16
    return value.dtype is torch.bfloat16 and weight.dtype is torch.bfloat16


class Gemm(PrecisionWrapper):
    """Another arm, its options joined by `+`, whose linear layers multiply in formats of `ampcompare.base.formats`.

    Args:
        device: where the model trains.
        over: the other arm, such as "native:bf16+masters=fp32".
        options: of the backend `gemm`, by name: formats, scales and roundings.
    """

    def __init__(self, *, device: str = "cpu", over: str = "native:bf16", **options: Any) -> None:
        super().__init__(make_precision(Arm.parse(over.replace("+", ",")), device=device))
        self.plan = LinearFormatPlan(Arm.make("gemm", over=over, **options))
        engine = self.plan.engine
        is_kernel = engine is not None and has_mxfp8_kernel(torch.device(device))
        self.emulated = "" if is_kernel else "gemm"  # products run in fp32

    def _prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Prepared:
        self.plan.refuse_without_layers(sum(map(self.plan.install, models)))
        if not self.plan.seed:
            self.plan.seed = torch.initial_seed() % 2**31  # by now that of the run
        prepared = super()._prepare(models, optimizers)
        for model in prepared[0]:
            model.register_forward_pre_hook(self.plan.prepare_call_of_model, with_kwargs=True)
        return prepared

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        self.plan.check_guess_of_last_layer()
        return super().step(*optimizers)

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of the arm underneath, and what is in bf16 instead."""
        return (*self.inner.notes, *self.plan.notes)

    @notes.setter
    def notes(self, notes: tuple[str, ...]) -> None:
        """Receive those of the arm underneath."""

    def state_dict(self) -> dict[str, Any]:
        rounds = {"gemm_seed": self.plan.seed, "gemm_passes": self.plan.passes} if self.plan.is_random else {}
        return {**self.inner.state_dict(), **rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        inner_state = dict(state)
        if self.plan.is_random:
            self.plan.seed = int(inner_state.pop("gemm_seed"))
            self.plan.passes = int(inner_state.pop("gemm_passes"))
        self.inner.load_state_dict(inner_state)
