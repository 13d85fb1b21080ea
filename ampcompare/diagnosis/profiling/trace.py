"""One step by phase and kind of work, read from a trace of torch.profiler. Needs no torch.

A trace is the list of events that `export_chrome_trace` writes. Every instant of a step belongs to exactly one part: on
a CPU to the innermost operation that runs, or to the host where none does; on a GPU to the kernel that runs, or, in a
gap, to what the host does meanwhile. So the parts add up to the step.
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ampcompare.results.records.profile import PHASES, Phase, WorkKind

__all__ = [
    "MODULE",
    "PHASE",
    "STEP",
    "Account",
    "Event",
    "LayerTime",
    "OperationTime",
    "is_half",
    "kind_of",
    "merged_trace",
    "read_trace",
]

STEP = "ampcompare:step"
PHASE = "ampcompare:phase:"
MODULE = "ampcompare:module:"
BACKWARD = "autograd::engine::evaluate_function: "
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
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
_SYNC_CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "hipStreamSynchronize")
CASTS = ("_to_copy", "to", "float", "half", "bfloat16", "type_as", "_autocast_to_full_precision")
COMMUNICATION = re.compile(r"^(c10d::|gloo:|nccl:|_c10d_functional|record_param_comms|.*(all_?reduce|all_?gather))")
VIEWS = re.compile(
    r"^(view|reshape|t|transpose|permute|expand|as_strided|detach|slice|select|unsqueeze|squeeze|alias)$"
)
STRIDE = 1_000_000  # between the process numbers of two arms


@dataclass
class Event:
    """An event of the host, with those inside it; times in microseconds."""

    name: str
    start: float
    end: float
    args: Mapping[str, Any]
    category: str = "cpu_op"
    inside: list[Event] = field(default_factory=list)

    @property
    def sequence(self) -> int | None:
        """Number that the forward and the backward operation of a node share."""
        return self.args.get("Sequence number")


@dataclass
class OperationTime:
    """Calls and seconds of an operation, in all steps."""

    calls: int = 0
    seconds: float = 0.0


@dataclass
class LayerTime:
    """Seconds of the operations of a module, in all steps."""

    seconds: float = 0.0
    fp32_seconds: float = 0.0
    cast_seconds: float = 0.0


@dataclass
class Account:
    """What a trace says about its steps; seconds and calls are sums over all of them.

    Attributes:
        waits: seconds in which the host waited for the device, by the call.
    """

    steps: int = 0
    seconds: float = 0.0
    parts: dict[Key, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[Key, int] = field(default_factory=lambda: defaultdict(int))
    operations: dict[tuple[str, Phase, WorkKind, str], OperationTime] = field(
        default_factory=lambda: defaultdict(OperationTime)
    )
    layers: dict[str, LayerTime] = field(default_factory=lambda: defaultdict(LayerTime))
    communication: float = 0.0
    exposed: float = 0.0
    collectives: int = 0
    waits: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    is_gpu: bool = False

    def add(self, key: Key, name: str, dtype: str, module: str, microseconds: float, *, calls: int = 1) -> None:
        """Add the own time of an operation or kernel."""
        seconds = microseconds * MICROSECOND
        self.parts[key] += seconds
        self.calls[key] += calls
        one = self.operations[name, key[0], key[1], dtype]
        one.calls += calls
        one.seconds += seconds
        if key[0] in ("forward", "backward"):
            layer = self.layers[module]
            layer.seconds += seconds
            if key[1] == "cast":
                layer.cast_seconds += seconds
            elif dtype == "fp32":
                layer.fp32_seconds += seconds


def read_trace(events: Iterable[Mapping[str, Any]]) -> Account:
    """Return the account of all steps in a trace.

    Args:
        events: of the trace; steps, phases and modules are ranges with the names above.
    """
    known = [event for event in events if event.get("ph") == "X" and "dur" in event]
    marks = sorted(
        (event for event in known if event["name"] == STEP and event.get("cat") == "user_annotation"),
        key=lambda event: float(event["ts"]),
    )
    account = Account(steps=len(marks))
    if not marks:
        return account
    thread = (marks[0]["pid"], marks[0]["tid"])
    steps = [(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in marks]
    host = _nest_events(_host_events(known, thread))
    modules = _modules_of_nodes(host)
    collectives = _merge_spans(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in known
        if kind_of_collective(event) and _within(float(event["ts"]), steps)
    )
    account.collectives = sum(1 for event in known if kind_of_collective(event) and _within(float(event["ts"]), steps))
    kernels = [event for event in known if event.get("cat") in DEVICE_WORK]
    if kernels:
        _account_of_device(account, known, kernels, host, steps, modules)
    else:
        _account_of_host(account, host, steps, modules, collectives)
    return account


def kind_of_collective(event: Mapping[str, Any]) -> bool:
    """Return whether an event spans a collective of gloo, which runs on a thread of its own."""
    return str(event["name"]).startswith("gloo:")


def _within(time: float, spans: Sequence[Span]) -> bool:
    at = bisect.bisect_right(spans, (time, float("inf"))) - 1
    return at >= 0 and time < spans[at][1]


def _host_events(known: Sequence[Mapping[str, Any]], thread: tuple[Any, Any]) -> list[Event]:
    return [
        Event(
            str(event["name"]),
            float(event["ts"]),
            float(event["ts"]) + float(event["dur"]),
            event.get("args", {}),
            str(event.get("cat")),
        )
        for event in known
        if event.get("cat") in ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
        and (event["pid"], event["tid"]) == thread
        and not kind_of_collective(event)  # it begins on the thread that asks for it, and ends on another
    ]


def _nest_events(events: list[Event]) -> list[Event]:
    """Return the outermost events of a thread, with those inside them."""
    events.sort(key=lambda event: (event.start, -event.end))
    roots: list[Event] = []
    open_: list[Event] = []
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


def _modules_of_nodes(roots: Sequence[Event]) -> dict[int, str]:
    """Return the module whose forward pass made each node of autograd, by sequence number."""
    found: dict[int, str] = {}

    def visit(event: Event, module: str) -> None:
        if event.name.startswith(BACKWARD):
            return
        if event.name.startswith(MODULE):
            module = event.name.removeprefix(MODULE)
        elif event.sequence is not None:
            found[event.sequence] = module
        for one in event.inside:
            visit(one, module)

    for root in roots:
        visit(root, "")
    return found


@dataclass(frozen=True)
class _Place:
    """Where the walk through the events of the host is."""

    phase: Phase = "other"
    module: str = ""
    emulated: bool = False

    def inside(self, event: Event, modules: Mapping[int, str]) -> _Place:
        name = event.name
        phase, module, emulated = self.phase, self.module, self.emulated
        if name.startswith(PHASE):
            given = name.removeprefix(PHASE)
            phase = given if given in PHASES else "other"
        elif name.startswith(MODULE):
            module = name.removeprefix(MODULE)
        elif name.startswith(BACKWARD):
            module = modules.get(event.sequence, "") if event.sequence is not None else ""
        elif _is_emulated(event):
            emulated = True
        return _Place(phase, module, emulated)


def _is_emulated(event: Event) -> bool:
    """Return whether an event is a product of 16-bit inputs that computes an fp32 product inside."""
    if kind_of(event.name) != "product" or not is_half(_type_of(event.args.get("Input type", ()))):
        return False
    inner = list(_calls_of(event))
    return any(kind_of(one.name) == "cast" for one in inner) and any(
        kind_of(one.name) == "product" and _type_of(one.args.get("Input type", ())) == "fp32" for one in inner
    )


def _calls_of(event: Event) -> Iterator[Event]:
    """Yield the operations that an operation calls, also those of a dispatch mode around it."""
    for one in event.inside:
        if one.name == MODE:
            yield from _calls_of(one)
        else:
            yield one


def _account_of_host(
    account: Account,
    roots: Sequence[Event],
    steps: Sequence[Span],
    modules: Mapping[int, str],
    collectives: Sequence[Span],
) -> None:
    """Add the own time of every event of the host inside the steps."""

    def visit(event: Event, place: _Place, product: str) -> None:
        here = place.inside(event, modules)
        own = (event.end - event.start) - sum(one.end - one.start for one in event.inside)
        is_range = event.category != "cpu_op" or event.name.startswith(BACKWARD)
        dtype = _type_of(event.args.get("Input type", ()))
        kind: WorkKind
        if here.emulated:
            if not place.emulated:
                product = dtype
            is_product = kind_of(event.name) == "product" and dtype != product
            kind, dtype = ("product" if is_product else "emulation"), product
        else:
            kind = "emulation" if event.name == MODE else "host" if is_range else kind_of(event.name)
        account.add(
            (here.phase, kind),
            "outside of operations" if kind == "host" else event.name,
            "" if kind == "host" else dtype,
            here.module,
            max(0.0, own),
            calls=0 if is_range else 1,
        )
        if is_range and collectives:
            free = _without([(event.start, event.end)], [(one.start, one.end) for one in event.inside])
            exposed = sum(_overlap(span, collectives) for span in free)
            key = here.phase
            account.parts[key, "host"] -= exposed * MICROSECOND
            account.parts[key, "communication"] += exposed * MICROSECOND
            account.exposed += exposed * MICROSECOND
        for one in event.inside:
            visit(one, here, product)

    for root in roots:
        if root.name == STEP:
            account.seconds += (root.end - root.start) * MICROSECOND
            visit(root, _Place(), "")
    account.communication = sum(end - start for start, end in collectives) * MICROSECOND
    account.calls.update({key: 0 for key in account.parts if key[1] == "host"})


@dataclass(frozen=True)
class _Launch:
    """Where the host launched a kernel."""

    place: _Place
    operation: str
    dtype: str


def _account_of_device(
    account: Account,
    known: Sequence[Mapping[str, Any]],
    kernels: Sequence[Mapping[str, Any]],
    roots: Sequence[Event],
    steps: Sequence[Span],
    modules: Mapping[int, str],
) -> None:
    """Add the time of every kernel, and the gaps between them."""
    account.is_gpu = True
    launches: dict[int, _Launch] = {}
    idle_phases: list[tuple[float, float, Phase]] = []
    waits: list[tuple[Span, str]] = []

    def visit(event: Event, place: _Place, operation: Event | None, *, in_step: bool) -> None:
        here = place.inside(event, modules)
        if event.category in ("cuda_runtime", "cuda_driver"):
            correlation = event.args.get("correlation")
            if correlation is not None:
                name = operation.name if operation is not None else ""
                dtype = _type_of(operation.args.get("Input type", ())) if operation is not None else ""
                launches[int(correlation)] = _Launch(here, name, dtype)
            if event.name in _SYNC_CALLS and in_step:
                waits.append(((event.start, event.end), operation.name if operation is not None else event.name))
        elif event.category == "cpu_op" and not event.name.startswith(BACKWARD):
            operation = event
        if event.name.startswith(PHASE):
            idle_phases.append((event.start, event.end, here.phase))
        for one in event.inside:
            visit(one, here, operation, in_step=in_step or event.name == STEP)

    for root in roots:
        visit(root, _Place(), None, in_step=root.name == STEP)
    # The autograd engine launches from a thread of its own, whose events are matched the same way.
    main = steps[0]
    others = {(event["pid"], event["tid"]) for event in known if event.get("cat") == "cpu_op"}
    first = next(event for event in known if event["name"] == STEP)
    for thread in others - {(first["pid"], first["tid"])}:
        for root in _nest_events(_host_events(known, thread)):
            if root.end > main[0]:
                visit(root, _Place("backward"), None, in_step=True)
    begin = steps[0][0]
    work = sorted((event for event in kernels if float(event["ts"]) >= begin), key=lambda event: float(event["ts"]))
    last = max((float(event["ts"]) + float(event["dur"]) for event in work), default=steps[-1][1])
    end = max(steps[-1][1], last)
    account.seconds = (end - begin) * MICROSECOND
    idle_phases.sort()
    spans = [(float(event["ts"]), float(event["ts"]) + float(event["dur"]), event) for event in work]
    compute = _merge_spans((start, stop) for start, stop, event in spans if not _is_collective(event))
    wire = _merge_spans((start, stop) for start, stop, event in spans if _is_collective(event))
    account.communication = sum(stop - start for start, stop in wire) * MICROSECOND
    account.exposed = sum(stop - start for start, stop in _without(wire, compute)) * MICROSECOND
    account.collectives = sum(1 for event in work if _is_collective(event))
    reached = begin
    # Computation first: a collective counts only where nothing is computed.
    for start, stop, event in spans:
        if _is_collective(event):
            continue
        launch = launches.get(int(event.get("args", {}).get("correlation", -1)), _Launch(_Place(), "", ""))
        kind = _kind_of_kernel(str(event["name"]), launch.operation)
        own = max(0.0, stop - max(start, reached))
        account.add((launch.place.phase, kind), launch.operation or str(event["name"]), launch.dtype,
                    launch.place.module, own)  # fmt: skip
        reached = max(reached, stop)
    for start, stop in _without(wire, compute):
        account.parts["backward", "communication"] += (stop - start) * MICROSECOND
    for start, stop in _without([(begin, end)], _merge_spans([*compute, *wire])):
        _add_gap(account, start, stop, idle_phases)
    for span, name in waits:
        account.waits[name] += (span[1] - span[0]) * MICROSECOND


def _is_collective(event: Mapping[str, Any]) -> bool:
    return _kind_of_kernel(str(event["name"]), "") == "communication"


def _add_gap(account: Account, start: float, end: float, phases: Sequence[tuple[float, float, Phase]]) -> None:
    """Add a gap in which the device is idle to the phases that the host is in meanwhile."""
    left = end - start
    for begin, stop, phase in phases:
        shared = min(end, stop) - max(start, begin)
        if shared > 0:
            account.parts[phase, "host"] += shared * MICROSECOND
            left -= shared
    account.parts["other", "host"] += max(0.0, left) * MICROSECOND


def _merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Return the union of spans, in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _without(spans: Sequence[Span], removed: Sequence[Span]) -> Iterator[Span]:
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


def _overlap(span: Span, others: Sequence[Span]) -> float:
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in others)


def _type_of(names: Sequence[object]) -> str:
    """Return the floating-point type of the inputs of an operation in a trace, the narrowest first; "" if none."""
    found = {_TYPES[name] for name in names if isinstance(name, str) and name in _TYPES}
    return next((name for name in ("fp8", "fp16", "bf16", "fp32", "fp64") if name in found), "")


def is_half(dtype: str) -> bool:
    """Return whether a type has 16 bits or fewer."""
    return dtype in ("fp16", "bf16", "fp8")


def kind_of(name: str) -> WorkKind:
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


def _kind_of_kernel(kernel: str, operation: str) -> WorkKind:
    """Return the kind of a kernel on a GPU, from its name and the operation that launched it."""
    text = kernel.lower()
    if "nccl" in text or "rccl" in text:
        return "communication"
    if any(word in text for word in ("gemm", "cutlass", "cudnn::cnn", "winograd", "implicit_conv", "fmha", "flash")):
        return "product"
    kind = kind_of(operation) if operation else "other"
    return "pointwise" if kind == "sync" else kind


def merged_trace(traces: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the events of some traces in one, each with an arm's name on its processes.

    Args:
        traces: name of the arm, and its trace; those without a step are left out.
    """
    merged: list[dict[str, Any]] = []
    for place, (name, trace) in enumerate(traces):
        events = trace.get("traceEvents", [])
        starts = [float(event["ts"]) for event in events if event.get("name") == STEP and event.get("ph") == "X"]
        if not starts:
            continue
        begin = min(starts)
        numbers: dict[Any, int] = {}
        for event in events:
            if event.get("ph") == "M" and event.get("name") in ("process_name", "process_labels", "process_sort_index"):
                continue
            number = numbers.setdefault(event.get("pid"), place * STRIDE + len(numbers))
            moved = {**event, "pid": number}
            if "ts" in event:
                moved["ts"] = float(event["ts"]) - begin
            if "id" in event:  # arrows between host and device would join two arms
                moved["id"] = f"{place}:{event['id']}"
            merged.append(moved)
        for old, number in numbers.items():
            what = f"GPU {old}" if isinstance(old, int) and old < 64 else f"{old}"
            for kind, args in (
                ("process_name", {"name": f"{name}"}),
                ("process_labels", {"labels": what}),
                ("process_sort_index", {"sort_index": number}),
            ):
                merged.append({"ph": "M", "name": kind, "pid": number, "tid": 0, "args": args})
    return {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": merged}
