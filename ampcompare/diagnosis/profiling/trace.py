"""One step by phase and kind of work, read from a trace of torch.profiler. Needs no torch.

A trace is the list of events that `export_chrome_trace` writes. Every instant of a step belongs to exactly one part: on
a CPU to the innermost operation that runs, or to the host where none does; on a GPU to the kernel that runs, or, in a
gap, to what the host does meanwhile. So the parts add up to the step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ampcompare.base.tensors.type_names import HALF_NAMES, narrowest_of_type_names
from ampcompare.results.records.profile import PHASES, Phase, WorkKind

STEP = "ampcompare:step"
PHASE = "ampcompare:phase:"
MODULE = "ampcompare:module:"
BACKWARD = "autograd::engine::evaluate_function: "
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_WORK = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
MICROSECOND = 1e-6
ROUNDING = 1.0  # of times in a trace, microseconds
MODE = "PythonDispatchMode"
Key = tuple[Phase, WorkKind]
Span = tuple[float, float]
_TYPES = {  # as a trace writes them
    "float": "fp32",
    "double": "fp64",
    "c10::Half": "fp16",
    "c10::BFloat16": "bf16",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
}
PRODUCTS = re.compile(
    r"^(mm|bmm|addmm|baddbmm|addbmm|mv|addmv|dot|_?convolution|.*_conv\w*|conv\w*|.*convolution\w*|linear|matmul|"
    r"_scaled_mm|_scaled_dot_product\w*|.*flash_attention\w*|.*efficient_attention\w*|einsum|_addmm_activation|"
    r"mkldnn_linear\w*|lstm\w*|gru\w*|mkldnn_rnn\w*)$"
)
NORMS = re.compile(r".*(norm|softmax)(?!.*foreach).*")
COPIES = re.compile(
    r"^(copy_?|clone|contiguous|fill_|zero_|zeros\w*|ones\w*|full\w*|empty\w*|cat|stack|_foreach_zero_|"
    r"_foreach_copy_|resize\w*|pin_memory|_pin_memory|new_\w+|index_select|gather|_pad\w*|constant_pad_nd)$"
)
SYNCS = ("item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "_assert_async")
_SYNC_CALLS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "hipStreamSynchronize",
)
CASTS = ("_to_copy", "to", "float", "half", "bfloat16", "type_as", "_autocast_to_full_precision")
COMMUNICATION = re.compile(
    r"^(c10d::|gloo:|nccl:|_c10d_functional|record_param_comms|.*(all_?reduce|all_?gather))"
)
VIEWS = re.compile(
    r"^(view|reshape|t|transpose|permute|expand|as_strided|detach|slice|select|unsqueeze|squeeze|alias)$"
)
STRIDE = 1_000_000  # between the process numbers of two arms


@dataclass
class TraceEvent:
    """An event of the host or a device, with those inside it; times in microseconds."""

    name: str
    start: float
    end: float
    args: Mapping[str, Any]
    category: str = "cpu_op"
    thread: tuple[Any, Any] = (0, 0)
    inside: list[TraceEvent] = field(default_factory=list)

    @property
    def node_sequence_number(self) -> int | None:
        """Number that the forward and the backward operation of a node share."""
        return self.args.get("Sequence number")

    @property
    def narrowest_input_type(self) -> str:
        """The floating-point type of its inputs, the narrowest first; "" if none."""
        names = self.args.get("Input type", ())
        found = {_TYPES[name] for name in names if isinstance(name, str) and name in _TYPES}
        return narrowest_of_type_names(found)


@dataclass
class TraceTotals:
    """What a trace says about its steps; seconds are sums over all of them."""

    steps: int = 0
    seconds: float = 0.0
    parts: dict[Key, float] = field(default_factory=lambda: defaultdict(float))
    operations: dict[tuple[str, Phase, WorkKind, str], float] = field(
        default_factory=lambda: defaultdict(float)
    )
    layers: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    fp32_layers: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waits: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    is_gpu: bool = False

    def add_seconds_of(
        self, phase: Phase, kind: WorkKind, name: str, dtype: str, module: str, microseconds: float
    ) -> None:
        seconds = microseconds * MICROSECOND
        self.parts[phase, kind] += seconds
        self.operations[name, phase, kind, dtype] += seconds
        if phase in ("forward", "backward"):
            self.layers[module] += seconds
            if dtype == "fp32" and kind != "cast":
                self.fp32_layers[module] += seconds


def totals_of_trace(events: Iterable[Mapping[str, Any]]) -> TraceTotals:
    known = [_trace_event_from(event) for event in events if event.get("ph") == "X" and "dur" in event]
    marks = [event for event in known if event.name == STEP and event.category == "user_annotation"]
    account = TraceTotals(steps=len(marks))
    if not marks:
        return account
    steps = sorted((event.start, event.end) for event in marks)
    host = _outermost_events_with_nested(_host_events_of_thread(known, marks[0].thread))
    modules = _modules_by_node(host)
    if any(event.category in DEVICE_WORK for event in known):
        _add_kernel_times(account, known, host, steps, modules, marks[0].thread)
    else:
        spans = [(one.start, one.end) for one in known if _is_gloo_collective(one)]
        in_steps = [span for span in spans if any(begin <= span[0] < end for begin, end in steps)]
        _add_own_times_of_host(account, host, modules, _merged_spans(in_steps))
    return account


def _trace_event_from(event: Mapping[str, Any]) -> TraceEvent:
    start = float(event["ts"])
    thread = event["pid"], event["tid"]
    name, category = str(event["name"]), str(event.get("cat"))
    return TraceEvent(name, start, start + float(event["dur"]), event.get("args", {}), category, thread)


def _is_gloo_collective(event: TraceEvent) -> bool:
    """Return whether an event spans a collective, which begins on the thread that asks for it and ends on another."""
    return event.name.startswith("gloo:")


def _host_events_of_thread(events: Iterable[TraceEvent], thread: tuple[Any, Any]) -> list[TraceEvent]:
    work = [one for one in events if one.category in HOST_WORK and one.thread == thread]
    return [one for one in work if not _is_gloo_collective(one)]


def _outermost_events_with_nested(events: list[TraceEvent]) -> list[TraceEvent]:
    """Return the outermost events of a thread, with those inside them."""
    events.sort(key=lambda event: (event.start, -event.end))
    roots: list[TraceEvent] = []
    open_: list[TraceEvent] = []
    for event in events:
        while open_ and open_[-1].end <= event.start:
            open_.pop()
        while open_ and event.end > open_[-1].end + ROUNDING:
            open_.pop().end = event.start  # a range that was opened inside an event and closed after it
        if open_:
            event.end = min(event.end, open_[-1].end)
        (open_[-1].inside if open_ else roots).append(event)
        open_.append(event)
    return roots


def _modules_by_node(roots: Sequence[TraceEvent]) -> dict[int, str]:
    """Return the module whose forward pass made each node of autograd, by sequence number."""
    found: dict[int, str] = {}

    def visit(event: TraceEvent, module: str) -> None:
        if event.name.startswith(BACKWARD):
            return
        if event.name.startswith(MODULE):
            module = event.name.removeprefix(MODULE)
        elif event.node_sequence_number is not None:
            found[event.node_sequence_number] = module
        for one in event.inside:
            visit(one, module)

    for root in roots:
        visit(root, "")
    return found


@dataclass(frozen=True)
class _PhaseAndModule:
    """Where the walk through the events of the host is."""

    phase: Phase = "other"
    module: str = ""
    emulated: bool = False

    def for_inside_of(self, event: TraceEvent, modules: Mapping[int, str]) -> _PhaseAndModule:
        name = event.name
        phase = self.phase
        module = self.module
        emulated = self.emulated
        if name.startswith(PHASE):
            given = name.removeprefix(PHASE)
            phase = given if given in PHASES else "other"
        elif name.startswith(MODULE):
            module = name.removeprefix(MODULE)
        elif name.startswith(BACKWARD):
            module = (
                modules.get(event.node_sequence_number, "") if event.node_sequence_number is not None else ""
            )
        elif _is_emulated_product(event):
            emulated = True
        return _PhaseAndModule(phase, module, emulated)


def _is_emulated_product(event: TraceEvent) -> bool:
    """Return whether an event is a product of 16-bit inputs that computes an fp32 product inside."""
    if work_kind_of_operation(event.name) != "product" or not has_at_most_16_bits(event.narrowest_input_type):
        return False
    inner = [
        (work_kind_of_operation(one.name), one.narrowest_input_type) for one in _operations_called_by(event)
    ]
    return ("product", "fp32") in inner and any(kind == "cast" for kind, _ in inner)


def _operations_called_by(event: TraceEvent) -> Iterator[TraceEvent]:
    """Yield the operations that an operation calls, also those of a dispatch mode around it."""
    for one in event.inside:
        if one.name == MODE:
            yield from _operations_called_by(one)
        else:
            yield one


def _add_own_times_of_host(
    account: TraceTotals, roots: Sequence[TraceEvent], modules: Mapping[int, str], collectives: Sequence[Span]
) -> None:
    """Add the own time of every event of the host inside the steps."""

    def visit(event: TraceEvent, place: _PhaseAndModule, product: str) -> None:
        here = place.for_inside_of(event, modules)
        own = (event.end - event.start) - sum(one.end - one.start for one in event.inside)
        is_range = event.category != "cpu_op" or event.name.startswith(BACKWARD)
        name, dtype = event.name, event.narrowest_input_type
        kind: WorkKind
        if here.emulated:
            if not place.emulated:
                product = dtype
            is_product = work_kind_of_operation(name) == "product" and dtype != product
            kind, dtype = ("product" if is_product else "emulation"), product
        elif is_range and name != MODE:
            kind = "host"
            name = "outside of operations"
            dtype = ""
        else:
            kind = "emulation" if name == MODE else work_kind_of_operation(name)
        account.add_seconds_of(here.phase, kind, name, dtype, here.module, max(0.0, own))
        if is_range and collectives:
            free = _span_parts_outside_others(
                [(event.start, event.end)], [(one.start, one.end) for one in event.inside]
            )
            exposed = sum(_seconds_of_overlap(span, collectives) for span in free) * MICROSECOND
            account.parts[here.phase, "host"] -= exposed
            account.parts[here.phase, "communication"] += exposed
        for one in event.inside:
            visit(one, here, product)

    for root in roots:
        if root.name == STEP:
            account.seconds += (root.end - root.start) * MICROSECOND
            visit(root, _PhaseAndModule(), "")


def _add_kernel_times(
    account: TraceTotals,
    events: Sequence[TraceEvent],
    roots: Sequence[TraceEvent],
    steps: Sequence[Span],
    modules: Mapping[int, str],
    thread: tuple[Any, Any],
) -> None:
    """Add the time of every kernel, and the gaps between them."""
    account.is_gpu = True
    begin = steps[0][0]
    host = _HostSide(account, modules)
    for root in roots:
        host.visit(root, _PhaseAndModule(), in_step=root.name == STEP)
    # The autograd engine launches from a thread of its own, whose events are matched the same way.
    for other in {event.thread for event in events if event.category == "cpu_op"} - {thread}:
        for root in _outermost_events_with_nested(_host_events_of_thread(events, other)):
            if root.end > begin:
                host.visit(root, _PhaseAndModule("backward"), in_step=True)

    work = sorted(
        (event for event in events if event.category in DEVICE_WORK and event.start >= begin),
        key=lambda event: event.start,
    )
    collectives = [event for event in work if _work_kind_of_kernel(event.name, "") == "communication"]
    kernels = [event for event in work if _work_kind_of_kernel(event.name, "") != "communication"]
    end = max([steps[-1][1], *(event.end for event in work)])
    account.seconds = (end - begin) * MICROSECOND
    compute, wire = (_merged_spans((one.start, one.end) for one in which) for which in (kernels, collectives))
    # a collective counts only where nothing is computed
    for start, stop in _span_parts_outside_others(wire, compute):
        account.parts["backward", "communication"] += (stop - start) * MICROSECOND
    _add_kernels_in_order(account, kernels, host.launches, begin)
    idle_phases = sorted(host.phases)
    for start, stop in _span_parts_outside_others([(begin, end)], _merged_spans([*compute, *wire])):
        _add_idle_gap(account, start, stop, idle_phases)


_Launch = tuple[_PhaseAndModule, str, str]  # where, by which operation, and its narrowest type


class _HostSide:
    """What the host did: its launches and phases; its waits for the device are added to the totals.

    Attributes:
        launches: place, operation and type, by the number that the kernel has too.
        phases: start and end in microseconds, and which.
    """

    def __init__(self, account: TraceTotals, modules: Mapping[int, str]) -> None:
        self._account, self._modules = account, modules
        self.launches: dict[int, _Launch] = {}
        self.phases: list[tuple[float, float, Phase]] = []

    def visit(
        self,
        event: TraceEvent,
        place: _PhaseAndModule,
        operation: tuple[str, str] = ("", ""),
        *,
        in_step: bool,
    ) -> None:
        """Read an event and those inside of it.

        Args:
            place: where the event is.
            operation: the innermost of torch around it, and its narrowest type.
            in_step: whether it is in a step that is counted.
        """
        here = place.for_inside_of(event, self._modules)
        if event.category in ("cuda_runtime", "cuda_driver"):
            if "correlation" in event.args:
                self.launches[int(event.args["correlation"])] = here, *operation
            if event.name in _SYNC_CALLS and in_step:
                self._account.waits[operation[0] or event.name] += (event.end - event.start) * MICROSECOND
        elif event.category == "cpu_op" and not event.name.startswith(BACKWARD):
            operation = event.name, event.narrowest_input_type
        if event.name.startswith(PHASE):
            self.phases.append((event.start, event.end, here.phase))
        for one in event.inside:
            self.visit(one, here, operation, in_step=in_step or event.name == STEP)


def _add_kernels_in_order(
    account: TraceTotals, kernels: Sequence[TraceEvent], launches: Mapping[int, _Launch], begin: float
) -> None:
    """Add the time of each kernel in which none before it ran, from a moment on."""
    reached = begin
    for event in kernels:
        number = int(event.args.get("correlation", -1))
        place, operation, dtype = launches.get(number, (_PhaseAndModule(), "", ""))
        kind = _work_kind_of_kernel(event.name, operation)
        own = max(0.0, event.end - max(event.start, reached))
        account.add_seconds_of(place.phase, kind, operation or event.name, dtype, place.module, own)
        reached = max(reached, event.end)


def _add_idle_gap(
    account: TraceTotals, start: float, end: float, phases: Sequence[tuple[float, float, Phase]]
) -> None:
    """Add a gap in which the device is idle to the phases that the host is in meanwhile."""
    left = end - start
    for begin, stop, phase in phases:
        shared = min(end, stop) - max(start, begin)
        if shared > 0:
            account.parts[phase, "host"] += shared * MICROSECOND
            left -= shared
    account.parts["other", "host"] += max(0.0, left) * MICROSECOND


def _merged_spans(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _span_parts_outside_others(spans: Sequence[Span], removed: Sequence[Span]) -> Iterator[Span]:
    """Yield the parts of disjoint spans that lie in none of some others, which are in order."""
    for start, end in spans:
        at = start
        for begin, stop in removed:
            if stop <= at:
                continue
            if begin >= end:
                break
            if begin > at:
                yield at, begin
            at = max(at, stop)
        if at < end:
            yield at, end


def _seconds_of_overlap(span: Span, other_spans: Sequence[Span]) -> float:
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in other_spans)


def has_at_most_16_bits(dtype: str) -> bool:
    """Return whether a type has 16 bits or fewer."""
    return dtype in (*HALF_NAMES, "fp8")


def work_kind_of_operation(name: str) -> WorkKind:
    """Return the kind of an operation such as aten::addmm or gloo:all_reduce."""
    if COMMUNICATION.match(name):
        return "communication"
    bare = name.rpartition("::")[2].removesuffix("_backward").removesuffix("_forward")
    if bare in CASTS:
        return "cast"
    if bare in SYNCS:
        return "sync"
    if PRODUCTS.match(bare):
        return "product"
    if NORMS.match(bare) and not bare.startswith(("_foreach_norm", "linalg")):
        return "normalization"
    if COPIES.match(bare):
        return "copy"
    if VIEWS.match(bare):
        return "other"
    return "pointwise" if name.startswith(("aten::", "torch::")) else "other"


def _work_kind_of_kernel(kernel: str, operation: str) -> WorkKind:
    """Return the kind of a kernel on a GPU, from its name and the operation that launched it."""
    text = kernel.lower()
    if "nccl" in text or "rccl" in text:
        return "communication"
    if any(
        word in text
        for word in ("gemm", "cutlass", "cudnn::cnn", "winograd", "implicit_conv", "fmha", "flash")
    ):
        return "product"
    kind = work_kind_of_operation(operation) if operation else "other"
    return "pointwise" if kind == "sync" else kind


def trace_of_all_arms(traces: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the events of some arms' traces in one, each with the arm's name; one without a step is left out."""
    merged: list[dict[str, Any]] = []
    for place, (name, trace) in enumerate(traces):
        events = trace.get("traceEvents", [])
        starts = [
            float(event["ts"]) for event in events if event.get("name") == STEP and event.get("ph") == "X"
        ]
        if not starts:
            continue
        begin = min(starts)
        numbers: dict[Any, int] = {}
        for event in events:
            if event.get("ph") == "M" and event.get("name") in (
                "process_name",
                "process_labels",
                "process_sort_index",
            ):
                continue
            moved = {**event, "pid": numbers.setdefault(event.get("pid"), place * STRIDE + len(numbers))}
            if "ts" in event:
                moved["ts"] = float(event["ts"]) - begin
            if "id" in event:  # arrows between host and device would join two arms
                moved["id"] = f"{place}:{event['id']}"
            merged.append(moved)
        for old, number in numbers.items():
            label = f"GPU {old}" if isinstance(old, int) and old < 64 else f"{old}"
            for kind, args in (("process_name", {"name": name}), ("process_labels", {"labels": label})):
                merged.append({"ph": "M", "name": kind, "pid": number, "tid": 0, "args": args})
    return {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": merged}
