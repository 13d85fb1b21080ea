"""What a profile leaves behind: one step of each arm by phase and kind of work, its memory, its limits, and reasons."""

from typing import Literal

from pydantic import Field

from ampcompare.results.records.document import Count, Finite, FrozenRecord
from ampcompare.results.records.evaluation import emulated_type

Phase = Literal["data", "forward", "backward", "unscale", "optimizer", "other"]
WorkKind = Literal[
    "product",
    "normalization",
    "pointwise",
    "cast",
    "copy",
    "communication",
    "emulation",
    "sync",
    "other",
    "host",
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


class StepPart(FrozenRecord):
    """A part of a step; all parts add up to it."""

    phase: Phase
    kind: WorkKind
    seconds: Finite


class Operation(FrozenRecord):
    """An operation or kernel of a step, summed over its calls, without the operations that it calls."""

    name: str
    phase: Phase
    kind: WorkKind
    dtype: str
    seconds: Finite


class ModuleTime(FrozenRecord):
    """A module with its forward and backward pass, without the modules inside it."""

    module: str
    seconds: Finite
    fp32_seconds: Finite = Field(0.0, description="of operations that compute in fp32")


class UnalignedProduct(FrozenRecord):
    """A matrix product or convolution of a module whose sizes are no multiples of what tensor cores take."""

    module: str
    operation: str
    dtype: str
    sizes: list[str] = Field(description='those that miss, such as "in 30"')
    share: float = Field(description="of the FLOPs of the forward pass")


class HostRead(FrozenRecord):
    """A place where the host reads a value of the device, and so waits for it."""

    where: str = Field(description="file:line; empty if no line of the user's code is on the way")
    what: str
    calls: float = Field(description="in a step that has any")
    seconds: Finite = Field(0.0, description="that the host waited in a step")
    steps: Count = Field(1, description="watched steps that have any")
    watched: Count = Field(1, description="steps that were watched")


class RepeatedCast(FrozenRecord):
    """A tensor that is cast to the same type again and again in one step."""

    where: str
    module: str
    casts: int
    bytes: int


class HeldMemory(FrozenRecord):
    """Bytes of a kind at the peak of memory."""

    kind: str
    dtype: str
    bytes: int


class MemoryAtPeak(FrozenRecord):
    """What holds memory at the peak of a step."""

    measured_bytes: int = Field(description="the peak, from the allocator")
    held: list[HeldMemory]
    rest_bytes: int = Field(description="not counted; negative by what the allocator did not count")
    layers: list[HeldMemory] = Field(
        [], description="activations kept for the backward pass by module, the largest first"
    )
    kept_twice_bytes: int = Field(
        0, description="activations in one type and again in another, the smaller of both"
    )
    kept_twice: list[HeldMemory] = Field([])
    reserved_bytes: int | None = Field(None, description="held by the caching allocator of a GPU")


class DeviceUtilization(FrozenRecord):
    """How near a step is to what the device can do; peaks are per second, in the type `peak_dtype`."""

    flops: Finite = Field(0.0, description="of a step, as torch.utils.flop_counter counts them")
    bytes: Finite = Field(0.0, description="that all operations read and write, if none stays in a cache")
    cast_bytes: Finite = 0.0
    peak_flops: float | None = None
    peak_dtype: str = "fp32"
    peak_bytes: float | None = None
    source: str = ""

    @property
    def flops_per_byte(self) -> float | None:
        """FLOPs for each byte."""
        return self.flops / self.bytes if self.bytes else None

    def utilization(self, seconds: float) -> float | None:
        """Return the share of the peak that a step of some seconds reaches: MFU."""
        return self.flops / seconds / self.peak_flops if self.peak_flops and seconds else None


class TimedChange(FrozenRecord):
    """A change that was trained, in the same process and in turns with the arm as it is."""

    change: str = Field(description="the setting, as on the command line")
    before_seconds: float
    seconds: float = Field(
        description="of a step, or of the work of one step of the arm if the batch differs"
    )
    failure: str = ""

    @property
    def saved_share(self) -> float:
        """Share of the step that the change saves; negative if it costs time."""
        return 1 - self.seconds / self.before_seconds if self.before_seconds else 0.0


class ReasonForLittleGain(FrozenRecord):
    """Why an arm is not faster or not smaller."""

    kind: ReasonKind
    text: str
    share: float = Field(description="of the step, or of the peak of memory, that it explains")
    gain: str = Field("", description="what removing it saves, in words")
    tested: bool = Field(False, description="whether the gain was measured by training with the change")
    on_gpu: bool = Field(False, description="whether it is counted here, but of effect on a GPU only")
    evidence: list[str] = Field([], description="lines with places and figures")


class ArmProfile(FrozenRecord):
    """One step of an arm, the mean of a few steady ones."""

    arm: str
    seconds: Finite = Field(0.0, description="of a step without a profiler; the parts are scaled to it")
    device: str = "cpu"
    half_dtype: str = ""
    half: str = Field("", description='how 16-bit types are computed on a CPU, such as "bf16 emulated"')
    optimizer: str = ""
    parts: list[StepPart] = Field([])
    operations: list[Operation] = Field([])
    layers: list[ModuleTime] = Field([])
    products: list[UnalignedProduct] = Field([])
    syncs: list[HostRead] = Field([])
    repeated: list[RepeatedCast] = Field([])
    memory: MemoryAtPeak | None = None
    limits: DeviceUtilization | None = None
    rank_seconds: list[Finite] = Field(
        default_factory=list, description="of a step of each rank, if there are several"
    )
    graph_breaks: dict[str, int] | None = Field(
        None, description="of torch.compile by reason, where it compiled"
    )
    fp32_seconds: Finite = Field(
        0.0, description="of operations of the forward and backward pass in fp32, but casts"
    )
    optimizer_operations: int = Field(0, description="in a step")
    batch_size: int | None = None
    trials: list[TimedChange] = Field([])
    reasons: list[ReasonForLittleGain] = Field([])
    notes: list[str] = Field([])
    failure: str = Field("", description="why the arm has no profile")

    @property
    def emulated_dtype(self) -> str:
        """16-bit type that was computed in fp32 and rounded, so that times are no measure; "" for none."""
        return emulated_type(self.half)

    def phase_seconds(self, phase: str) -> float:
        """Return the seconds of a phase."""
        return sum(part.seconds for part in self.parts if part.phase == phase)

    def seconds_of_kind(self, kind: str) -> float:
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
    notes: list[str] = Field([])
