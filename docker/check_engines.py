"""Hold the real Apex against ampcompare's engine: same weights, same batches, O1 and O2, three updates.

The second update overflows. Dtypes, loss scales, skipped updates and the state of amp must be equal, losses and weights
within a tolerance. Each engine and level has a process of its own, because O1 patches torch for the life of one. Where
the real Apex or a GPU is missing, the engine is only held against what Apex is known to do, and against the losses
that are stored here; the output says so. The build of an image runs it so, hence a built image has been seen to train.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

LEVELS = ("O1", "O2")
TOLERANCE = 1e-3
SECONDS = 600
# What Apex does in these three updates: the second overflows, is skipped, and halves the scale.
EXPECTED = {"applied": [True, False, True], "loss_scales": [65536.0, 32768.0, 32768.0]}
# of both levels on a CPU, with torch 2.13; the second batch holds an infinity
LOSSES = [1.52978, math.nan, 1.44522]
WEIGHTS = {"O1": {"torch.float32"}, "O2": {"torch.float16", "torch.float32"}}
CLOSE = ("losses", "weights")


def measure(engine: str, level: str, device: str) -> dict[str, Any]:
    """Train three updates in this process and return what happened.

    Args:
        engine: "nvidia" or "compat".
        level: opt level.
        device: torch device to train on.

    Returns:
        `losses` (fp32, per update), `weights` (the final ones, flat, in fp32), and what must be equal: `dtypes` by
        name, `loss_scales`, `applied`, `state` of amp.

    Raises:
        BackendUnavailable: the engine cannot run here.
    """
    import torch
    from torch import nn

    from ampcompare.training.precision.apex import make_apex

    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    ).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(3, 16, 3, 8, 8)
    inputs[1, 0, 0, 0, 0] = math.inf
    labels = torch.randint(4, (3, 16)).to(device)
    precision = make_apex(engine=engine, opt_level=level, device=device)
    (model,), (optimizer,) = precision.prepare([model], [optimizer])
    losses, scales, applied, dtypes = [], [], [], {}
    for batch, label in zip(inputs.to(device), labels, strict=True):
        output = model(batch)
        loss = nn.functional.cross_entropy(output.float(), label)
        precision.backward(loss, [optimizer])
        outcome = precision.step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(outcome.loss_scales[0])
        applied.append(outcome.applied[0])
        dtypes["output"] = str(output.dtype)
    dtypes |= {name: str(weight.dtype) for name, weight in model.named_parameters()}
    dtypes |= {name: str(buffer.dtype) for name, buffer in model.named_buffers()}
    masters = precision.unscale(optimizer)
    dtypes |= {f"master {index}": str(master.dtype) for index, master in enumerate(masters)}
    return {
        "dtypes": dtypes,
        "loss_scales": scales,
        "applied": applied,
        "state": precision.state_dict(),
        "losses": losses,
        "weights": torch.cat([master.detach().float().flatten() for master in masters]).tolist(),
    }


def differences(reference: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Say where two measurements differ: at all, or in `losses` and `weights` by more than the tolerance."""
    found = [
        f"{name}: {reference[name]} against {other[name]}"
        for name in reference
        if name not in CLOSE and reference[name] != other[name]
    ]
    for name in CLOSE:
        if len(reference[name]) != len(other[name]):
            found.append(f"{name}: {len(reference[name])} numbers against {len(other[name])}")
        elif (worst := gap(reference[name], other[name])) > TOLERANCE:
            found.append(f"{name} differ by {worst:.3g}, and {TOLERANCE:g} is allowed")
    return found


def gap(left: list[float], right: list[float]) -> float:
    """Return the largest difference, relative above 1; infinite where only one of two numbers is finite."""
    worst = 0.0
    for one, two in zip(left, right, strict=True):
        if math.isfinite(one) and math.isfinite(two):
            worst = max(worst, abs(one - two) / max(1.0, abs(one)))
        elif str(one) != str(two):
            return math.inf
    return worst


def surprises(level: str, measured: dict[str, Any]) -> list[str]:
    """Say where a measurement is not what Apex is known to do."""
    found = [
        f"{name}: {measured[name]}, expected {value}"
        for name, value in EXPECTED.items()
        if measured[name] != value
    ]
    if (worst := gap(LOSSES, measured["losses"])) > TOLERANCE:
        found.append(
            f"losses: {measured['losses']}, expected {LOSSES} within {TOLERANCE:g}; {worst:.3g} apart"
        )
    kinds = {dtype for name, dtype in measured["dtypes"].items() if name.endswith(("weight", "bias"))}
    if kinds != WEIGHTS[level]:
        found.append(f"dtypes of the weights: {sorted(kinds)}, expected {sorted(WEIGHTS[level])}")
    if not all(map(math.isfinite, measured["weights"])):
        found.append("weights are not finite after a skipped update")
    return found


def in_child(engine: str, level: str, device: str) -> dict[str, Any] | str:
    """Measure in a process of its own; return the reason where that fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        command = [sys.executable, __file__, "--device", device, "--measure", engine, level, str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return f"no answer in {SECONDS} s"
        if done.returncode == 0:
            measured: dict[str, Any] = json.loads(file.read_text())
            return measured
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def compare(device: str) -> tuple[list[str], bool, bool]:
    """Run all levels; return the lines to show, whether all was right, and whether the real Apex took part in all."""
    lines, right, real = [], True, True
    for level in LEVELS:
        ours, theirs = (in_child(engine, level, device) for engine in ("compat", "nvidia"))
        if isinstance(ours, str):
            lines.append(f"{level} FAILED: the engine of ampcompare did not run: {ours}")
            right = False
            continue
        wrong = [f"compat: {text}" for text in surprises(level, ours)]
        if isinstance(theirs, str):
            real = False
        else:
            wrong += [f"nvidia: {text}" for text in surprises(level, theirs)] + differences(theirs, ours)
        if wrong:
            right = False
            lines += [f"{level} FAILED: {text}" for text in wrong]
        elif isinstance(theirs, str):
            lines.append(f"{level} ok: compat alone, as the real Apex cannot run here ({theirs})")
        else:
            worst = ", ".join(f"{gap(theirs[name], ours[name]):.3g} in {name}" for name in CLOSE)
            lines.append(f"{level} ok: nvidia and compat agree: largest difference {worst}")
    return lines, right, real


@click.command()
@click.option("--device", help="Torch device.  [default: cuda where there is one, else cpu]")
@click.option("--strict", is_flag=True, help="End with exit code 4 where the real Apex took no part.")
@click.option("--measure", "task", type=(str, str, click.Path()), hidden=True, help="ENGINE LEVEL FILE.")
def main(device: str | None, strict: bool, task: tuple[str, str, str] | None) -> None:
    """Hold the real Apex against ampcompare's engine: three updates each under O1 and O2.

    Exit codes: 0 all is right; 1 something differs; 4 with --strict, the real Apex could not take part.
    """
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    if task is not None:
        engine, level, file = task
        Path(file).write_text(json.dumps(measure(engine, level, device)))
        return
    lines, right, real = compare(device)
    click.echo("\n".join([f"device: {device}", *lines]))
    if not right:
        sys.exit(1)
    if not real:
        click.echo("check_engines: nothing was compared with the real Apex", err=True)
        sys.exit(4 if strict else 0)


if __name__ == "__main__":
    main()
