"""Peak memory of a step against the arithmetic of bytes per parameter, and the largest batch that fits.

The arithmetic is that of `ampcompare explain`: weights, gradients, masters and the optimizer's tensors. A network with
many parameters and a batch of one or two leaves little else; what is left is held against a share of it.
"""

from typing import Any

from benchmarks.gpu.context import Context
from benchmarks.gpu.device import make_device
from benchmarks.gpu.loops import build_step
from benchmarks.gpu.models import Model, make_model, make_optimizer
from benchmarks.gpu.report import Report

ARMS = (
    "fp32",
    "apex:O0",
    "apex:O1",
    "apex:O2",
    "apex:O3",
    "native:fp16",
    "native:bf16",
    "half",
    "half:masters=fp32",
)
HALF_ACTIVATIONS = ("half", "apex:O3", "apex:O2", "native:fp16")
REHEARSED = ("fp32", "apex:O2", "half")
# bytes that the largest batch is looked for in, on the GPU and in a rehearsal
LIMIT = {False: 16 << 30, True: 1 << 19}
MOST = {False: 4096, True: 64}
# tokens of the one sentence: activations stay below the gradients that come to be while they are freed
LENGTH = 64
# Around the arithmetic a peak may lie so far away: workspaces of products.
TOLERANCE = 0.05


def run(context: Context, report: Report) -> None:
    """Measure each arm in a process of its own."""
    small = context.rehearse
    peaks: dict[str, Any] = {}
    arms = REHEARSED if small else ARMS
    for arm in arms:
        found = context.in_child(peak, arm, context.device, small)
        peaks[arm] = found
        seen = found["measured_bytes_per_parameter"]
        low, high = found["least_bytes_per_parameter"], found["most_bytes_per_parameter"]
        # The network of a rehearsal is so small that everything else outweighs its parameters.
        held = seen >= low if small else low <= seen <= high
        wanted = f"at least {low:.1f}" if small else f"{low:.1f} to {high:.1f}"
        report.check(f"{arm}: {wanted} bytes per parameter", held, f"{seen:.1f}")
    batches = {arm: context.in_child(largest_batch, arm, context.device, small) for arm in arms}
    for arm in arms:
        report.check(f"{arm}: some batch fits", batches[arm] > 0, str(batches[arm]))
    # In a rehearsal masters outweigh activations.
    for arm in () if small else HALF_ACTIVATIONS:
        ours, fp32 = batches[arm], batches["fp32"]
        report.check(
            f"{arm}: a batch at least as large as that of fp32", ours >= fp32, f"{ours} against {fp32}"
        )
    report.figures |= {"peaks": peaks, "largest_batch": batches, "batch_limit_bytes": LIMIT[small]}
    agree = "are not below" if small else "agree with"
    report.says = (
        f"peaks of {len(arms)} arms {agree} their bytes per parameter; largest batch of ResNet-50 in "
        f"{LIMIT[small] / 2**30:.3g} GiB: {', '.join(f'{arm} {batch}' for arm, batch in batches.items())}"
    )


def peak(arm: str, device_kind: str, small: bool) -> dict[str, float]:
    """Return the peak of three steps of the transformer, and what the parameters alone come to, in bytes."""
    from ampcompare import Arm
    from ampcompare.diagnosis.explain import OPTIMIZER_TENSORS, bytes_per_parameter

    per_parameter = bytes_per_parameter(Arm.parse(arm))
    if per_parameter is None:
        raise RuntimeError(f"nothing is known of the bytes of {arm}")
    counted = 0

    def train() -> None:
        nonlocal counted
        model, tokens, classes = make_model("transformer", device_kind, small=small, batch=1)
        counted = sum(param.numel() for param in model.parameters())
        _train(arm, (model, tokens[:, :LENGTH], classes[:LENGTH]), "transformer", device_kind)

    found = make_device(device_kind).peak_bytes(train)
    total = per_parameter.total(OPTIMIZER_TENSORS["adam"])
    return {
        "peak_bytes": found,
        "bytes_per_parameter": total,
        "measured_bytes_per_parameter": found / counted,
        # Casts of the forward pass are gone when the optimizer runs, which needs one more tensor of its state for a
        # moment.
        "least_bytes_per_parameter": (total - per_parameter.cast) * (1 - TOLERANCE),
        "most_bytes_per_parameter": (total + per_parameter.state) * (1 + TOLERANCE),
        "parameters": counted,
    }


def largest_batch(arm: str, device_kind: str, small: bool) -> int:
    """Return the largest batch of ResNet-50 that trains within the limit, by doubling and then halving the gap."""
    device = make_device(device_kind)

    def fits(batch: int) -> bool:
        def train() -> None:
            _train(
                arm, make_model("resnet50", device_kind, small=small, batch=batch), "resnet50", device_kind
            )

        return device.fits(train, LIMIT[small])

    good, bad = 0, 1
    while bad <= MOST[small] and fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > max(1, good // 16):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def _train(arm: str, made: Model, model_name: str, device: str) -> None:
    """Train three steps in one call, so that nothing is left at its end, and end the session that patches torch."""
    from ampcompare.apex.amp import _amp_state

    step = build_step(f"arm {arm}", made, make_optimizer(model_name), device, None).step
    try:
        for _ in range(3):
            step()
    finally:
        _amp_state.close()
