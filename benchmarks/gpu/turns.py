"""Loops side by side on one device: a process each, one block of steps in turn, so that drift hits all alike."""

import random
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.gpu.context import Context, end_process, start
from benchmarks.gpu.device import make_device
from benchmarks.gpu.loops import build

WARM_UP_SECONDS = 0.5
READY_SECONDS = 120.0


def take_turns(
    context: Context, names: Sequence[str], model: str, *, seconds: float, block: float
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]], dict[str, str]]:
    """Let loops take turns until the time is over, two rounds at least.

    Args:
        names: loops; one that is named twice, with a ` again` at its end, is measured twice.
        block: about how many seconds a turn of a loop lasts.

    Returns:
        Seconds of a step by loop and round; what the profiler saw in one step; why the others are missing.
    """
    surroundings = (model, context.device, context.rehearse, context.apex_src)
    loops = {name: start(_serve, name.removesuffix(" again"), *surroundings, talks=True) for name in names}
    missing: dict[str, str] = {}
    facts: dict[str, dict[str, float]] = {}
    try:
        for name, (pipe, _) in loops.items():
            answer = _receive(pipe, context.seconds_left(READY_SECONDS))
            if isinstance(answer, str):
                missing[name] = answer
        ready = [name for name in names if name not in missing]
        # One after the other: the compilers and tuners of two that warm up at once would disturb each other.
        for name in ready:
            loops[name][0].send(("warm", WARM_UP_SECONDS if not context.rehearse else 0.0))
            answer = _receive(loops[name][0], context.seconds_left(READY_SECONDS))
            if isinstance(answer, str):
                missing[name] = answer
            else:
                facts[name] = answer
        ready = [name for name in ready if name in facts]
        times = _rounds(context, loops, ready, facts, seconds, block)
    finally:
        for pipe, process in loops.values():
            pipe.close()
            end_process(process)
    return times, facts, missing


def _rounds(
    context: Context, loops: Any, ready: list[str], facts: Any, seconds: float, block: float
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ready}
    shuffler = random.Random(0)
    end = time.monotonic() + context.seconds_left(seconds)
    order = list(ready)
    while min(map(len, times.values()), default=2) < 2 or time.monotonic() < end:
        shuffler.shuffle(order)
        for name in order:
            steps = max(1, round(block / facts[name]["step_seconds"]))
            loops[name][0].send(("run", steps))
            answer = _receive(loops[name][0], context.seconds_left(60.0))
            if isinstance(answer, str):
                raise RuntimeError(f"{name} stopped: {answer}")
            times[name].append(answer["step_seconds"])
    return times


def ratio(times: dict[str, list[float]], name: str, base: str) -> float:
    """Return the median over rounds of a loop's time by another's of the same round."""
    return statistics.median(one / other for one, other in zip(times[name], times[base], strict=True))


def _receive(pipe: Connection, seconds: float) -> dict[str, float] | str:
    """Return what a loop answers, or as text why it cannot."""
    try:
        if not pipe.poll(seconds):
            return "no answer in time"
        answer = pipe.recv()
    except (EOFError, ConnectionError):
        return "its process ended"
    if isinstance(answer, tuple):
        return str(answer[1])  # `start` reports what was raised
    return answer  # type: ignore[no-any-return]


def _serve(
    pipe: Connection, name: str, model: str, device_kind: str, small: bool, apex_src: Path | None
) -> None:
    """Be one loop, until the pipe is closed."""
    device = make_device(device_kind)
    loop = build(name, model, device_kind, small=small, apex_src=apex_src)
    pipe.send({})
    while True:
        try:
            what, amount = pipe.recv()
        except EOFError:
            return
        if what == "run":
            blocks = max(1, int(amount) // loop.steps)
            pipe.send({"step_seconds": device.seconds(loop.step, blocks) / loop.steps})
            continue
        end = time.perf_counter() + amount
        device.seconds(loop.step, 3)
        while time.perf_counter() < end:
            device.seconds(loop.step, 1)
        found = device.trace(loop.step)
        found = {key: value if key.endswith("share") else value / loop.steps for key, value in found.items()}
        pipe.send({**found, "step_seconds": device.seconds(loop.step, 2) / loop.steps})
