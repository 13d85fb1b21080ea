"""What a profile leaves behind: one step of each arm by phase and kind of work, its memory, its limits, and reasons."""

from typing import Literal

from pydantic import Field

from ampcompare.results.records.document import Count, Finite, FrozenRecord

Phase = Literal["data", "forward", "backward", "unscale", "optimizer", "other"]
WorkKind = Literal[
    "product", "normalization", "pointwise", "cast", "copy", "communication", "emulation", "sync", "other", "host"
]
ReasonKind = Literal[
    "data", "host", "synchronization", "dimensions", "fp32 operations", "casts", "optimizer", "graph breaks",
    "small batch", "emulation", "kept twice",
]  # fmt: skip
PHASES: dict[Phase, str] = {
    "data": "data",
    "forward": "forward pass",
    "backward": "backward pass",
    "unscale": "unscale, check, clip",
    "optimizer": "optimizer",
    "other": "other",
}
KINDS: dict[WorkKind, str] = {
    "product": "matrix products, convolutions",
    "normalization": "normalization, softmax",
    "pointwise": "pointwise operations, reductions",
    "cast": "casts",
    "copy": "copies, fills",
    "communication": "communication",
    "emulation": "emulation of 16 bits, or of a GPU",
    "sync": "reads of the device",
    "other": "other operations",
    "host": "outside of operations",
}


class Part(FrozenRecord):
    """A part of a step. All parts of a step add up to it."""

    phase: Phase
    kind: WorkKind
    seconds: Finite


class Operation(FrozenRecord):
    """An operation or kernel of a step, summed over its calls.

    `seconds` is its own time, without the operations that it calls.
    """

    name: str
    phase: Phase
    kind: WorkKind
    dtype: str
    seconds: Finite


class Layer(FrozenRecord):
    """A module with its forward and backward pass, without the modules inside it."""

    module: str
    seconds: Finite
    fp32_seconds: Finite = Field(0.0, description="of operations that compute in fp32")


class Product(FrozenRecord):
    """A matrix product or convolution of a module whose sizes are no multiples of what tensor cores take.

    Attributes:
        sizes: those that miss, such as "in 30".
        share: of the FLOPs of the forward pass.
    """

    module: str
    operation: str
    dtype: str
    sizes: list[str]
    share: float


class Sync(FrozenRecord):
    """A place where the host reads a value of the device, and so waits for it."""

    where: str = Field(description="file:line; empty if no line of the user's code is on the way")
    what: str
    calls: float = Field(description="in a step that has any")
    seconds: Finite = Field(0.0, description="that the host waited in a step")
    steps: Count = Field(1, description="watched steps that have any")
    watched: Count = Field(1, description="steps that were watched")


class Repeated(FrozenRecord):
    """A tensor that is cast to the same type again and again in one step."""

    where: str
    module: str
    casts: int
    bytes: int


class Held(FrozenRecord):
    """Bytes of a kind at the peak of memory."""

    kind: str
    dtype: str
    bytes: int


class Memory(FrozenRecord):
    """What holds memory at the peak of a step.

    Attributes:
        measured_bytes: the peak, from the allocator.
        held: what was counted; the rest is `rest_bytes`, which can be negative by what the allocator did not count.
        layers: activations kept for the backward pass by module, the largest first.
        kept_twice_bytes: activations kept in one type and again in another, the smaller of both.
        reserved_bytes: held by the caching allocator of a GPU; None on a CPU.
    """

    measured_bytes: int
    held: list[Held]
    rest_bytes: int
    layers: list[Held] = Field(default_factory=list)
    kept_twice_bytes: int = 0
    kept_twice: list[Held] = Field(default_factory=list)
    reserved_bytes: int | None = None


class Limits(FrozenRecord):
    """How near a step is to what the device can do.

    Attributes:
        flops: of a step, as torch.utils.flop_counter counts them.
        bytes: read and written by all operations of a step, if none of it stays in a cache.
        peak_flops, peak_bytes: per second, of the device in the type `peak_dtype`; None if unknown.
        source: of the peaks.
    """

    flops: Finite = 0.0
    bytes: Finite = 0.0
    cast_bytes: Finite = 0.0
    peak_flops: float | None = None
    peak_dtype: str = "fp32"
    peak_bytes: float | None = None
    source: str = ""

    @property
    def intensity(self) -> float | None:
        """FLOPs for each byte."""
        return self.flops / self.bytes if self.bytes else None

    def utilization(self, seconds: float) -> float | None:
        """Return the share of the peak that a step of some seconds reaches: MFU."""
        return self.flops / seconds / self.peak_flops if self.peak_flops and seconds else None


class Trial(FrozenRecord):
    """A change that was trained, in the same process and in turns with the arm as it is.

    Attributes:
        change: the setting, as on the command line.
        seconds: of a step, or of the work of one step of the arm if the batch differs.
    """

    change: str
    before_seconds: float
    seconds: float
    failure: str = ""

    @property
    def gain(self) -> float:
        """Share of the step that the change saves; negative if it costs time."""
        return 1 - self.seconds / self.before_seconds if self.before_seconds else 0.0


class Reason(FrozenRecord):
    """Why an arm is not faster or not smaller.

    Attributes:
        text: a sentence with the evidence.
        share: of the step (or of the peak of memory) that it explains.
        gain: what removing it saves, in words; "" if unknown.
        tested: the gain was measured by training with the change.
        on_gpu: counted here, but of effect on a GPU only.
        evidence: lines with places and figures.
    """

    kind: ReasonKind
    text: str
    share: float
    gain: str = ""
    tested: bool = False
    on_gpu: bool = False
    evidence: list[str] = Field(default_factory=list)


class ArmProfile(FrozenRecord):
    """One step of an arm, the mean of a few steady ones.

    Attributes:
        seconds: of a step without a profiler; the parts are scaled to it.
        half: how 16-bit types are computed on a CPU, such as "bf16 emulated".
        graph_breaks: of torch.compile by reason; None if the arm is not compiled.
        failure: why the arm has no profile; "" if it has.
    """

    arm: str
    seconds: Finite = 0.0
    device: str = "cpu"
    half_dtype: str = ""
    half: str = ""
    optimizer: str = ""
    parts: list[Part] = Field(default_factory=list)
    operations: list[Operation] = Field(default_factory=list)
    layers: list[Layer] = Field(default_factory=list)
    products: list[Product] = Field(default_factory=list)
    syncs: list[Sync] = Field(default_factory=list)
    repeated: list[Repeated] = Field(default_factory=list)
    memory: Memory | None = None
    limits: Limits | None = None
    rank_seconds: list[Finite] = Field(default_factory=list, description="of a step of each rank, if there are several")
    graph_breaks: dict[str, int] | None = None
    fp32_seconds: Finite = Field(0.0, description="of operations of the forward and backward pass in fp32, but casts")
    optimizer_operations: int = Field(0, description="in a step")
    batch_size: int | None = None
    trials: list[Trial] = Field(default_factory=list)
    reasons: list[Reason] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    failure: str = ""

    def of_phase(self, phase: str) -> float:
        """Return the seconds of a phase."""
        return sum(part.seconds for part in self.parts if part.phase == phase)

    def of_kind(self, kind: str) -> float:
        """Return the seconds of a kind of work."""
        return sum(part.seconds for part in self.parts if part.kind == kind)

    @property
    def accounted_seconds(self) -> float:
        """Seconds of all parts."""
        return sum(part.seconds for part in self.parts)


class Profile(FrozenRecord):
    """Profiles of some arms, the reference first."""

    reference: str
    headline: list[str]
    arms: list[ArmProfile]
    subject: str = ""
    device: str = ""
    notes: list[str] = Field(default_factory=list)
