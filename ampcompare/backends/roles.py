"""In which type an arm holds and computes each part of a training step: what it declares, without torch."""

from dataclasses import dataclass, field

from ampcompare.base.tensors.type_names import HALF_NAMES

BATCH_NORM = "*BatchNorm*"  # the pattern of the modules that an arm itself keeps in fp32
FP16_MAX = 65504.0
BITS = {"fp8": 8, "fp16": 16, "bf16": 16, "tf32": 32, "fp32": 32}


@dataclass(frozen=True)
class LossScale:
    """What multiplies the loss before the backward pass. Without a growth interval it is static.

    Attributes:
        first: the scale of the first step.
        interval: steps without an overflow after which it grows; None for a static scale, which nothing checks.
        growth, backoff: factors after so many steps, and at an overflow.
        lowest, highest: where it stops; None for no limit.
    """

    first: float
    interval: int | None = None
    growth: float = 2.0
    backoff: float = 0.5
    lowest: float | None = None
    highest: float | None = None

    @property
    def is_static(self) -> bool:
        """Whether it stays as it is, so that no overflow is looked for."""
        return self.interval is None


@dataclass(frozen=True)
class BytesPerParameter:
    """Bytes for one parameter outside batch norm, by what they hold.

    Attributes:
        cast: 16-bit copies of weights, kept from the forward pass to the end of the backward pass.
        state: one optimizer tensor of the parameter's size.
        compensation: what the rounding of a weight has cut off.
    """

    weight: int
    gradient: int
    master: int
    master_gradient: int
    cast: int
    state: int
    compensation: int = 0

    def total(self, tensors: int) -> int:
        """Return the sum, for an optimizer that keeps this many tensors per parameter."""
        held = (
            self.weight + self.gradient + self.master + self.master_gradient + self.cast + self.compensation
        )
        return held + tensors * self.state


@dataclass(frozen=True)
class ProductFormat:
    """In which numbers one of the three products of a linear layer multiplies.

    Attributes:
        format: a name of `ampcompare.base.formats.FORMATS`, or "bf16".
        scale: how scales are made; "" for bf16.
        switches: what else changes its numbers, such as "sr" and "grads_as=e5m2".
    """

    format: str
    scale: str = ""
    switches: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.format, self.scale and f"scale {self.scale}", *self.switches)))


@dataclass(frozen=True)
class Roles:
    """In which type each part of a training step is held or computed, as an arm declares it; the default is fp32.

    Types are "fp32", "tf32", "fp16", "bf16" and "fp8".

    Attributes:
        weights: of the model between steps.
        products: operands of matrix products and convolutions; "" for the type of the weights.
        lists: what casts function by function, "autocast" or "O1"; "" if an operation runs in the type of its inputs.
        masters: copies that the optimizer steps; "" if it steps the weights.
        gradients: as they are accumulated over micro-batches.
        step: in which the optimizer computes an update.
        state: of the optimizer between steps.
        asks_state: an option names that type, so that an optimizer that keeps another one by itself is not as declared.
        reduction: in which ranks average gradients.
        update: how updated weights are rounded: "nearest", "stochastic" or "kahan".
        loss_scale: None if the loss is not scaled.
        kept: patterns of modules that stay in fp32, by the arm or by the user.
        fprop, dgrad, wgrad: of the products of linear layers, forward, for the gradient of the input and for that of
            the weight, if they have formats of their own.
    """

    weights: str = "fp32"
    products: str = ""
    lists: str = ""
    masters: str = ""
    gradients: str = "fp32"
    step: str = "fp32"
    state: str = "fp32"
    reduction: str = "fp32"
    update: str = "nearest"
    loss_scale: LossScale | None = None
    kept: tuple[str, ...] = ()
    fprop: ProductFormat | None = None
    dgrad: ProductFormat | None = None
    wgrad: ProductFormat | None = None
    asks_state: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        """Return what is not fp32, such as `fp16 weights, fp32 masters, fp16 gradients, dynamic loss scale`."""
        words = [f"{self.weights} weights"]
        if self.operand_type != self.weights:
            words.append(f"{self.operand_type} products" + (f" by {self.lists}" if self.lists else ""))
        words += [f"{self.masters} masters"] if self.masters else []
        if self.weights != "fp32":
            words += [f"{self.gradients} gradients", f"{self.state} state"]
        elif self.state != "fp32":
            words.append(f"{self.state} state")
        words += [f"reduction in {self.reduction}"] if self.reduction != self.gradients else []
        words += [f"{self.update} rounding"] if self.update != "nearest" else []
        if self.loss_scale is not None:
            words.append("static loss scale" if self.loss_scale.is_static else "dynamic loss scale")
        words += [f"fp32 in {' and '.join(self.kept)}"] if self.kept else []
        words += [f"{role} in {form}" for role, form in self.linear_formats.items()]
        return ", ".join(words)

    @property
    def operand_type(self) -> str:
        """The type of the operands of products."""
        return self.products or self.weights

    @property
    def linear_formats(self) -> dict[str, ProductFormat]:
        """The formats of the products of linear layers by role; empty if they have none of their own."""
        formats = {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}
        return {role: form for role, form in formats.items() if form is not None}

    @property
    def half(self) -> str:
        """The 16-bit type that the arm computes in; "" if it computes in fp32."""
        return next((name for name in (self.products, self.weights) if name in HALF_NAMES), "")

    @property
    def bytes_per_parameter(self) -> BytesPerParameter:
        """What a parameter outside of `kept` takes, without activations."""
        size = {name: bits // 8 for name, bits in BITS.items()}
        weight, master = size[self.weights], size.get(self.masters, 0)
        return BytesPerParameter(
            weight=weight,
            gradient=weight,
            master=master,
            master_gradient=master,
            cast=size[self.operand_type] if size[self.operand_type] < weight else 0,
            state=size[self.state],
            compensation=weight if self.update == "kahan" else 0,
        )
