"""Clocks, memory and schedules."""

from __future__ import annotations

import gc
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ampcompare.records.evaluation import EpochResult
from ampcompare.records.per_sample import pack_right
from ampcompare.records.run import StepRecord
from ampcompare.settings.recipe import ScheduleConfig
from ampcompare.training.metrics.clock import PeakMemory, make_clock, make_memory_meter
from ampcompare.training.metrics.run_summary import RunMetrics
from ampcompare.training.policies.divergence import DivergenceDetector
from ampcompare.training.schedule import make_schedule


def test_host_clock_measures_what_passes() -> None:
    """The time between two marks covers what lies between them."""
    clock = make_clock(torch.device("cpu"))
    start = clock.mark()
    time.sleep(0.02)
    assert 0.02 <= clock.seconds(start, clock.mark()) < 5


@pytest.mark.requires(cuda=1)
def test_cuda_clock_measures_the_device() -> None:
    """Events see the time of kernels that the host did not wait for."""
    clock = make_clock(torch.device("cuda"))
    x = torch.randn(2048, 2048, device="cuda")
    start = clock.mark()
    for _ in range(50):
        x = x @ x / 2048
    assert clock.seconds(start, clock.mark()) > 0


class Event:
    """A CUDA event at a time that the test says."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def synchronize(self) -> None:
        """Wait for nothing."""

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.seconds - self.seconds)


def test_a_wait_behind_which_the_gpu_computes_is_none() -> None:
    """On a GPU the wait for data is the time between two steps on the device; after a drain, that of the host."""
    clock = make_clock(torch.device("cuda", 0))
    assert clock.idle_seconds(5.0, Event(1.0), Event(1.25)) == pytest.approx(0.25)
    assert clock.idle_seconds(5.0, None, Event(1.25)) == 5.0
    assert make_clock(torch.device("cpu")).idle_seconds(5.0, 1.0, 1.25) == 5.0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak can be reset on Linux only")
def test_resident_meter_sees_a_passing_allocation() -> None:
    """Memory that was taken and given back again counts in the peak, and memory from before does not."""
    gc.collect()  # what other tests have left would be freed meanwhile
    before = torch.ones(16 * 2**20)
    peaks = []
    for _ in range(3):  # the kernel may take other pages of this process back at the same time
        meter = make_memory_meter(torch.device("cpu"))
        block = torch.ones(64 * 2**20)
        del block
        peaks.append(meter.peak().used)
    assert 250 * 2**20 < max(peaks) < 400 * 2**20
    assert before[0] == 1


@pytest.mark.parametrize("name", ["constant", "step", "cosine"])
def test_warm_up_is_linear(name: str) -> None:
    """The rate reaches its base at the end of the warm-up, and no step trains at rate 0."""
    config = ScheduleConfig(name=name, warmup_epochs=2, step_epochs=100)  # type: ignore[arg-type]
    factor = make_schedule(config, steps_per_epoch=5, total_steps=100)
    assert factor is not None
    assert [factor(step) for step in range(10)] == [(step + 1) / 10 for step in range(10)]
    assert factor(10) == 1.0


def test_constant_without_warm_up_needs_no_function() -> None:
    """Nothing is set at any step."""
    assert make_schedule(ScheduleConfig(name="constant", warmup_epochs=0), steps_per_epoch=5, total_steps=10) is None


def test_step_schedule_drops_by_epochs() -> None:
    """Gamma multiplies once per `step_epochs`."""
    config = ScheduleConfig(name="step", warmup_epochs=0, step_epochs=2, gamma=0.5)
    factor = make_schedule(config, steps_per_epoch=3, total_steps=100)
    assert factor is not None
    assert [factor(step) for step in (0, 5, 6, 11, 12)] == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_cosine_matches_torch() -> None:
    """The curve is that of torch's own scheduler."""
    config = ScheduleConfig(name="cosine", warmup_epochs=0)
    factor = make_schedule(config, steps_per_epoch=4, total_steps=20)
    assert factor is not None
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    for step in range(20):
        assert factor(step) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("name", ["constant", "step", "cosine"])
def test_the_function_is_one_for_lambda_lr(name: str) -> None:
    """torch's LambdaLR with the function as it is gives every group the rates that the loop sets."""
    config = ScheduleConfig.model_validate({"name": name, "warmup_epochs": 2, "step_epochs": 3})
    factor = make_schedule(config, steps_per_epoch=4, total_steps=40)
    assert factor is not None
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:], "lr": 0.3}], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for step in range(40):
        assert [group["lr"] for group in optimizer.param_groups] == [0.1 * factor(step), 0.3 * factor(step)]
        optimizer.step()
        scheduler.step()


def record(step: int, seconds: float, applied: bool = True, scale: float = 8.0) -> StepRecord:
    """One step."""
    return StepRecord(step, 0, 1.0, (scale,), (scale,), (applied,), None, seconds, 0.001)


def evaluation(epoch: int, correct: int, **further: Any) -> EpochResult:
    """An evaluation of ten samples, of which nine have the class among the best five guesses."""
    counts = {"top-1": correct, "top-5": 9}
    values = {name: count / 10 for name, count in counts.items()}
    times = {"train_seconds": 3.0, "eval_seconds": 1.0}
    return EpochResult(epoch=epoch, samples=10, counts=counts, values=values, loss=0.5, **times, **further)


def test_tally_leaves_warm_up_out_of_times_but_counts_its_skips() -> None:
    """Times come from steps after the warm-up; skipped steps are counted from the first."""
    tally = RunMetrics(warmup_steps=2, batch_size=32)
    tally.add_steps([record(0, 9.0, applied=False), record(1, 9.0)])
    tally.add_steps([record(step, 0.1 * step, scale=4.0) for step in range(2, 7)])
    tally.add_epoch(evaluation(0, 7))
    summary = tally.summary(DivergenceDetector(3, []), PeakMemory(100, None), 12.0)
    assert (summary.num_steps, summary.skipped_steps, summary.final_loss_scale) == (7, 1, 4.0)
    assert summary.step_seconds_median == pytest.approx(0.4)
    assert summary.samples_per_second == pytest.approx(80)
    assert (summary.metric_final, summary.others_final, summary.epoch_seconds) == (0.7, {"top-5": 0.9}, 3.0)


def test_tally_of_a_diverged_run_claims_no_final_accuracy() -> None:
    """Accuracy of weights that are NaN is not a result; the best epoch before stays."""
    tally = RunMetrics(warmup_steps=0, batch_size=1)
    tally.add_epoch(evaluation(0, 7))
    watch = DivergenceDetector(3, [])
    watch.diverged_step, watch.reason = 4, "non-finite weights"
    summary = tally.summary(watch, PeakMemory(1, 2), 1.0)
    assert (summary.metric_final, summary.metric_best, summary.diverged_step) == (None, 0.7, 4)


def test_only_the_last_evaluation_keeps_its_images() -> None:
    """Per-image results of earlier epochs are dropped, and those of the last survive a checkpoint."""
    tally = RunMetrics(warmup_steps=0, batch_size=1)
    kept = [pack_right(np.arange(10) < count, np.arange(10)) for count in (5, 7)]
    for epoch, images in enumerate(kept):
        tally.add_epoch(evaluation(epoch, 5 + 2 * epoch, per_sample=images))
    restored = RunMetrics(warmup_steps=0, batch_size=1)
    restored.load_state_dict(tally.state_dict())
    for each in (tally, restored):
        assert [epoch.per_sample for epoch in each.epochs] == [None, kept[1]]


def test_equal_losses_have_equal_digests() -> None:
    """The digest changes with the last bit of one loss."""
    a, b, c = (RunMetrics(0, 1) for _ in range(3))
    a.add_steps([record(0, 1.0)])
    b.add_steps([record(0, 2.0)])
    c.add_steps([record(0, 1.0)._replace(loss=1.0 + 2**-52)])
    digests = [t.summary(DivergenceDetector(1, []), PeakMemory(0, None), 1.0).losses_sha256 for t in (a, b, c)]
    assert digests[0] == digests[1] != digests[2]


def test_an_accelerator_is_timed_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks are torch's events, read once the second is reached; their times are in milliseconds."""
    now = iter((2.0, 5.0))

    class Event:
        def __init__(self, device: torch.device, enable_timing: bool) -> None:
            assert (device.type, enable_timing) == ("xpu", True)

        def record(self) -> None:
            self.at = next(now)

        def synchronize(self) -> None:
            self.is_reached = True

        def elapsed_time(self, other: Event) -> float:
            assert other.is_reached
            return other.at - self.at

    monkeypatch.setattr(torch, "Event", Event)
    clock = make_clock(torch.device("xpu", 0))
    start, end = clock.mark(), clock.mark()
    assert clock.seconds(start, end) == 0.003
    assert (clock.idle_seconds(7.0, None, start), clock.idle_seconds(7.0, start, end)) == (7.0, 0.003)


def test_the_memory_of_an_accelerator_is_what_torch_counts_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """XPU has peaks, from the creation of the meter; of Metal's memory torch knows what it holds now."""
    reset: list[torch.device] = []
    xpu = SimpleNamespace(
        reset_peak_memory_stats=reset.append, max_memory_allocated=lambda _: 3, max_memory_reserved=lambda _: 4
    )
    monkeypatch.setattr(torch, "xpu", xpu)
    monkeypatch.setattr(torch, "mps", SimpleNamespace(driver_allocated_memory=lambda: 5))
    peak = make_memory_meter(torch.device("xpu", 0)).peak()
    assert (peak.used, peak.reserved, reset) == (3, 4, [torch.device("xpu", 0)])
    peak = make_memory_meter(torch.device("mps", 0)).peak()
    assert (peak.used, peak.reserved) == (5, None)
