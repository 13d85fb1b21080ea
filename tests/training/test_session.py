"""Whole runs: assembly, evaluation, divergence, emulated half, and updates that every arm drops."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from ampcompare.results.records.evaluation import pack_right_samples
from ampcompare.results.records.step import StepRecord
from ampcompare.settings.config import RunConfig
from ampcompare.tasks.classification import Classification
from ampcompare.tasks.data import SampleOptions
from ampcompare.tasks.in_memory import make_memory_data
from ampcompare.training.evaluate import evaluate_models
from ampcompare.training.loop import Loop
from ampcompare.training.meters import HostClock, PeakMemory
from ampcompare.training.parallel.replication import SingleProcess
from ampcompare.training.policies import SkippingPrecision
from ampcompare.training.precision.base import make_precision
from ampcompare.training.precision.cpu_half import EmulatedHalf, choose_cpu_half_mode_and_context
from ampcompare.training.run_summary import RunMetrics
from tests.training.sessions import CPU, make_session, play


def config(arm: str = "fp32", **options: Any) -> RunConfig:
    """A run of a few steps on the digits."""
    recipe = {"data": {"train_size": 192, "val_size": 64}, "model": {"arch": "convnet", "args": {"width": 8}}}
    recipe |= {"epochs": 2, "batch_size": 32, **options.pop("recipe", {})}
    return RunConfig.model_validate({"arm": arm, "recipe": recipe, **options})


class Identity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("arm", ["apex:O2,engine=compat", "native:fp16", "half"])
def test_arms_of_a_seed_start_from_equal_weights_and_batches(arm: str) -> None:
    """The first loss of every arm is that of fp32 up to rounding; with another seed it is not."""
    first = play(config(recipe={"max_steps": 1}))[0][0].loss
    assert play(config(arm, recipe={"max_steps": 1}))[0][0].loss == pytest.approx(first, rel=5e-3)
    assert play(config(arm, recipe={"max_steps": 1, "seed": 1}))[0][0].loss != pytest.approx(first, rel=5e-3)


def test_max_steps_ends_in_the_middle_of_an_epoch_and_evaluates() -> None:
    """A bound on updates cuts the epoch short; the evaluation still comes."""
    steps, epochs, _ = play(config(recipe={"epochs": 5, "max_steps": 8}))
    assert len(steps) == 8
    assert [epoch.epoch for epoch in epochs] == [0, 1]


@pytest.mark.slow
def test_adam_in_half_diverges_and_master_weights_do_not() -> None:
    """Adam's eps of 1e-8 is 0 in fp16, so a second moment that underflowed divides by zero; fp32 masters keep it.

    Where that was asked for, a diverged run goes on to its end.
    """
    adam = {"optimizer": {"name": "adam", "lr": 1e-3}}
    steps, epochs, made = play(config("half", recipe=adam, drain_every=4))
    assert made.divergence.reason == "non-finite weights"
    assert made.divergence.diverged_step is not None
    assert made.divergence.diverged_step < 4 <= len(steps) < 12
    assert epochs == []
    assert play(config("apex:O2,engine=compat", recipe=adam))[2].divergence.diverged_step is None
    steps, epochs, made = play(config("half", recipe=adam, on_nan="continue"))
    assert (len(steps), len(epochs)) == (12, 2)
    assert made.divergence.diverged_step is not None


def seven_classes() -> Classification:
    """Return a task of seven classes, whose data are not used."""
    part = (torch.zeros(7, 7), torch.arange(7))
    return Classification(
        make_memory_data(
            "seven", part, part, SampleOptions(0), num_classes=7, moved_share=0.0, background=0.0
        )
    )


def test_evaluation_counts_every_sample_once() -> None:
    """Counts over uneven batches equal those over the whole set at once."""

    logits = torch.eye(7).repeat(3, 1)
    labels = torch.arange(21) % 7
    labels[:4] = (labels[:4] + 1) % 7
    batches = list(zip(logits.split(4), labels.split(4), strict=True))
    result = evaluate_models(seven_classes(), [Identity()], make_precision("fp32"), batches, CPU)
    assert (result.samples, result.counts["top-1"]) == (21, 17)
    assert result.values["top-1"] == 17 / 21
    assert result.chance == max(labels.bincount()) / 21 == 4 / 21
    assert result.counts["top-5"] == int((logits.topk(5, dim=1).indices == labels[:, None]).any(dim=1).sum())
    assert result.loss == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-6)


def test_evaluation_knows_which_images_were_right() -> None:
    """The bits are those of the images by index, whatever the batches, and the labels are hashed in that order."""
    logits, labels = torch.eye(7).repeat(3, 1), torch.arange(21) % 7
    labels[[0, 5, 20]] = 3
    batches = list(zip(logits.split(4), labels.split(4), strict=True))
    result = evaluate_models(
        seven_classes(), [Identity()], make_precision("fp32"), batches, CPU, indices=range(21)
    )
    expected = (logits.argmax(1) == labels).numpy()
    assert expected.sum() == 18
    assert result.per_sample == pack_right_samples(expected, labels.numpy())


@pytest.mark.parametrize("count", [20, 22])
def test_evaluation_of_another_number_of_samples_has_no_images(count: int) -> None:
    """Padded or missing samples leave it open which image is which: there are counts and no bits."""
    logits, labels = torch.eye(7).repeat(4, 1)[:count], (torch.arange(28) % 7)[:count]
    result = evaluate_models(
        seven_classes(), [Identity()], make_precision("fp32"), [(logits, labels)], CPU, indices=range(21)
    )
    assert (result.samples, result.counts["top-1"], result.per_sample) == (count, count, None)


def test_evaluation_leaves_the_mode_as_it_was() -> None:
    """Batch norm is back in training mode afterwards, and its statistics did not move."""
    made = make_session(config())
    model = made.assembly.models[0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    task = made.assembly.task
    evaluate_models(task, [model], made.precision, task.data.val_batches(32, device=CPU), CPU)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("layer", [nn.Linear(8, 8), nn.Conv2d(8, 8, 3)], ids=["linear", "convolution"])
def test_emulated_half_rounds_once(layer: nn.Module) -> None:
    """Under the mode a half layer gives the fp32 result of its half inputs, rounded once, forward and backward."""
    torch.manual_seed(0)
    x = torch.randn(4, 8, 8, 8)
    layer = layer.half()
    inputs = x.half().requires_grad_()
    with EmulatedHalf():
        out = layer(inputs)
        out.sum().backward()
    wide = type(layer)(8, 8, *([3] if isinstance(layer, nn.Conv2d) else []))
    wide.load_state_dict({name: value.float() for name, value in layer.state_dict().items()})
    exact = x.half().float().requires_grad_()
    expected = wide(exact)
    expected.sum().backward()
    assert out.dtype is torch.float16
    assert torch.equal(out, expected.half())
    assert inputs.grad is not None
    assert torch.equal(inputs.grad, exact.grad.half())  # type: ignore[union-attr]


def test_emulated_half_overflows_to_infinity() -> None:
    """A product beyond 65504 is infinite, as it is on a GPU."""
    x = torch.full((2, 2), 300.0, dtype=torch.float16)
    with EmulatedHalf():
        assert torch.isinf(x @ x).all()


def test_how_half_is_computed_is_named() -> None:
    """The record says emulated or native, and an arm in fp32 says nothing."""
    assert choose_cpu_half_mode_and_context("auto", None, CPU)[0] is None
    assert choose_cpu_half_mode_and_context("native", torch.float16, CPU)[0] == "fp16 native"
    assert choose_cpu_half_mode_and_context("emulated", torch.float16, CPU)[0] == "fp16 emulated"
    assert choose_cpu_half_mode_and_context("auto", torch.float16, CPU)[0] == "fp16 emulated"
    assert choose_cpu_half_mode_and_context("native", torch.bfloat16, CPU)[0] == "bf16 native"
    assert choose_cpu_half_mode_and_context("emulated", torch.bfloat16, CPU)[0] == "bf16 emulated"
    assert (
        choose_cpu_half_mode_and_context("emulated", torch.float16, torch.device("cuda"))[0] == "fp16 native"
    )


@pytest.mark.parametrize(("has_instructions", "how"), [(True, "bf16 native"), (False, "bf16 emulated")])
def test_bf16_is_emulated_where_the_cpu_has_no_instructions(
    monkeypatch: pytest.MonkeyPatch, has_instructions: bool, how: str
) -> None:
    """By default bf16 runs natively only where that is fast; a product under emulation is rounded once."""
    monkeypatch.setattr(
        "ampcompare.training.precision.cpu_half.has_bf16_instructions", lambda: has_instructions
    )
    named, context = choose_cpu_half_mode_and_context("auto", torch.bfloat16, CPU)
    assert named == how
    torch.manual_seed(0)
    a, b = torch.randn(2, 9, 9, dtype=torch.bfloat16)
    with context:
        product = a @ b
    if not has_instructions:
        assert torch.equal(product, (a.float() @ b.float()).bfloat16())


@pytest.mark.integration
@pytest.mark.parametrize("arm", ["apex:O2,engine=compat"])
def test_the_average_is_evaluated_beside_the_weights(arm: str) -> None:
    """Every epoch has a second result, training has the bits that it has without, and the summary has the last."""
    steps, epochs, made = play(config(arm, recipe={"ema_decay": 0.8}))
    plain_steps, plain_epochs, _ = play(config(arm))
    assert [step.loss for step in steps] == [step.loss for step in plain_steps]
    assert [(e.counts, e.loss) for e in epochs] == [(e.counts, e.loss) for e in plain_epochs]
    assert [epoch.ema_value for epoch in plain_epochs] == [None, None]
    assert all(epoch.ema_loss is not None and epoch.ema_loss != epoch.loss for epoch in epochs)
    tally = RunMetrics(0, 32, epochs=epochs)
    summary = tally.summary_of_run(made.divergence, PeakMemory(0, None), 1.0)
    assert epochs[-1].ema_values is not None
    assert summary.ema_metric_final == epochs[-1].ema_counts["top-1"] / 64
    assert summary.ema_metric_best == max(epoch.ema_value for epoch in epochs if epoch.ema_value is not None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_recurrent_layers_are_emulated(dtype: torch.dtype) -> None:
    """An LSTM trains under autocast on a CPU whose oneDNN lacks it in 16 bits, close to fp32."""
    layer, x = nn.LSTM(4, 8), torch.randn(3, 2, 4)
    layer(x)[0].sum().backward()
    weight = layer.weight_hh_l0
    assert weight.grad is not None
    exact = weight.grad.clone()
    layer.zero_grad()
    with EmulatedHalf(), torch.autocast("cpu", dtype=dtype):
        out = layer(x)[0]
    with EmulatedHalf():
        out.float().sum().backward()
    assert out.dtype is dtype
    torch.testing.assert_close(weight.grad, exact, rtol=0.1, atol=0.02)


ARMS = [
    "fp32",
    "apex:O1,engine=compat",
    "apex:O2,engine=compat",
    "apex:O2,loss_scale=128,engine=compat",
    "apex:O3,engine=compat",
    "native:fp16",
    "half:bn_fp32",
    "half:loss_scale=128",
    "half:masters=fp32,dynamic",
]
GOOD = torch.linspace(-1, 1, 24).reshape(6, 4)
BAD = torch.cat([GOOD[:5], torch.full((1, 4), float("inf"))])


def loss_of(models: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return models[0](batch[0]).float().square().mean()  # type: ignore[no-any-return]


def train(arm: str, batches: list[Tensor], **options: Any) -> tuple[list[StepRecord], list[Tensor], Any]:
    """Train with dropping; return records, all tensors of the model in fp32, and the backend inside."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    precision = make_precision(arm)
    (model,), optimizers = precision.prepare([model], [Adam(model.parameters(), lr=0.01, eps=1e-3)])  # type: ignore[assignment]
    skipping = SkippingPrecision(precision, [model])
    loop = Loop([model], optimizers, skipping, SingleProcess(), loss_of, HostClock(), **options)
    records = list(itertools.chain.from_iterable(loop.run([(batch,) for batch in batches], epoch=0)))
    return records, [tensor.detach().float() for tensor in (*model.parameters(), *model.buffers())], precision


@pytest.mark.parametrize(
    ("arm", "options"),
    [
        *((arm, {}) for arm in ARMS),
        *((arm, options) for arm in ARMS[:3] for options in ({"accumulation": 2}, {"clip_norm": 0.5})),
    ],
)
def test_a_bad_batch_leaves_no_trace(arm: str, options: dict[str, Any]) -> None:
    """Weights, optimizer state and running statistics go on as they do without the batch; the record says skipped."""
    records, tensors, precision = train(arm, [GOOD, BAD, GOOD.flip(0), GOOD], **options)
    plain, expected, _ = train(arm, [GOOD, GOOD.flip(0), GOOD], **options)
    assert [record.applied for record in records] == [(True,), (False,), (True,), (True,)]
    assert all(tensor.isfinite().all() for tensor in tensors)
    for tensor, other in zip(tensors, expected, strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-3, atol=1e-3)
    # nothing moved by the overflow: then to the last bit
    if precision.loss_scales() == plain[-1].loss_scales:
        assert all(torch.equal(tensor, other) for tensor, other in zip(tensors, expected, strict=True))


def test_another_ranks_bad_loss_drops_the_update_here() -> None:
    """An update is dropped where any process of the run saw a non-finite loss."""
    model = nn.Linear(4, 2)
    precision = make_precision("fp32")
    (model,), (optimizer,) = precision.prepare([model], [Adam(model.parameters())])  # type: ignore[assignment]
    asked: list[bool] = []

    def any_rank(flag: bool) -> bool:
        asked.append(flag)
        return True

    skipping = SkippingPrecision(precision, [model], any_rank)
    before = model.weight.detach().clone()
    with skipping.scale_loss(model(GOOD).square().mean(), [optimizer]) as loss:
        loss.backward()
    assert skipping.step(optimizer).applied == (False,)
    assert asked == [False]
    assert torch.equal(model.weight, before)
