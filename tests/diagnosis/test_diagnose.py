"""Diagnoses of loops: planted faults are named and cured, healthy networks are left alone."""

import linecache
import math
import re
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompare
from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ConfigError
from ampcompare.diagnosis import remedies
from ampcompare.diagnosis.findings import find_first_faults_by_kind
from ampcompare.diagnosis.loops import LoopConditions
from ampcompare.diagnosis.operation_watch import uniform_numbers_off_ends
from ampcompare.diagnosis.remedies import CodeSite, CureCandidate, cure_from_candidate, search_for_cure
from ampcompare.diagnosis.watched_loop import observe_loop
from ampcompare.results.records.diagnosis import Diagnosis, Fault, OperationPlace
from tests.diagnosis.faults import NETWORKS, is_found
from tests.diagnosis.loops import loop_of, sgd

PLANTED = (
    "cube, O2",
    "mask value -1e9, half",
    "exp in a loss of fp16",
    "cube by products, native",
    "small eps in Adam",
    "lost updates",
    "tiny gradients at a fixed scale",
    "running mean in bf16",
)
HEALTHY = ("layer norm, apex:O1", "batch norm, apex:O2", "two layers of LSTM, bf16")


BY_NAME = {network.name: network for network in NETWORKS}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named_and_cured(name: str) -> None:
    """The cure that is proposed is the planted place alone, and the first line names it."""
    network = BY_NAME[name]
    found = ampcompare.diagnose(network.loop, arm=network.arm, device="cpu")
    assert is_found(network, found)
    cure = found.cure
    changed = (cure.keeps or [cure.option])[0]
    assert {"master_weights=True": "masters=fp32"}.get(changed, changed) in found.verdict
    assert cure.code


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_network_needs_no_cure(name: str) -> None:
    """There is neither a fault nor a cure, though a scale may have settled."""
    found = ampcompare.diagnose(BY_NAME[name].loop, arm=BY_NAME[name].arm, device="cpu")
    assert (found.faults, found.cure, found.trials) == ([], None, [])
    assert "no fault" in found.verdict


def _two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def _size(model: Any, step: int) -> torch.Tensor:
    return model(torch.randn(6, 4)).float().square().mean()


_linear_loop = loop_of(_two_layers, _size, steps=4)


class Matched(nn.Module):
    """Takes for each point the smallest box around it, as detectors do: `1e8 - area` is infinite in fp16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        boxes = torch.tensor([[0.1, 0.3], [0.2, 0.9]], dtype=x.dtype)
        points = torch.linspace(0, 1, 8, dtype=x.dtype)
        inside = (points[:, None] > boxes[:, 0]) & (points[:, None] < boxes[:, 1])
        areas = boxes[:, 1] - boxes[:, 0]
        best, index = (inside.to(torch.float32) * (1e8 - areas)).max(dim=1)
        index[best < 1e-5] = -1
        low, high = boxes[index.clip(min=0)].unbind(1)
        centered = torch.sqrt((points - low) * (high - points))[index >= 0]
        return x * centered.mean()


def test_an_overflow_that_decides_an_index_is_named() -> None:
    """The root of a negative number is NaN in fp32 too, but only because the matching was spoiled in fp16."""

    loop = loop_of(lambda: nn.Sequential(OrderedDict(body=nn.Linear(4, 4), match=Matched())), _size)
    found = ampcompare.diagnose(loop, arm="apex:O2", steps=3, device="cpu")
    (fault,) = found.faults
    assert fault.kind == "overflow"
    assert (fault.place.module, fault.place.operation) == ("match", "rsub")
    assert "decides an index or a mask, by which match sqrt fails" in fault.text
    assert fault.reason == "1e+08 is beyond the largest number of fp16"
    assert found.cure.keeps == ["match"]
    assert ampcompare.diagnose(loop, arm="fp32", steps=3, device="cpu").faults == []


class Survival(nn.Module):
    """Takes the logarithm of 1 - p, where a limit keeps p below 1: not in 16 bits, which round it to 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = torch.sigmoid(x + 12)
        return torch.log1p(-p.clamp(1e-6, 1 - 1e-6))


@pytest.mark.parametrize(("arm", "half"), [("apex:O3", "fp16"), ("half:bf16", "bf16")])
def test_a_limit_that_16_bits_round_to_one_is_the_reason(arm: str, half: str) -> None:
    loop = loop_of(lambda: nn.Sequential(OrderedDict(body=nn.Linear(4, 4), survival=Survival())), _size)
    found = ampcompare.diagnose(loop, arm=arm, steps=2, device="cpu")
    fault = found.faults[0]
    assert (fault.kind, fault.place.operation) == ("overflow", "log1p")
    assert fault.reason == f"0.999999 in clamp is 1 in {half}"
    assert found.cure is not None
    assert found.cure.keeps == ["survival"]
    assert ampcompare.diagnose(loop, arm="fp32", steps=2, device="cpu").faults == []


class Noisy(nn.Module):
    """Multiplies by a function of random numbers that has no value at an end of their range."""

    def __init__(self, draw: str) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        like = torch.empty(1000, len(x), dtype=x.dtype)
        if self.draw == "uniform":
            return x * (1 / like.uniform_()).sqrt().mean(0)[:, None]
        if self.draw == "symmetric":
            return x * torch.atanh(like.uniform_(-1, 1)).mean(0)[:, None]
        return x * torch.log(torch.rand_like(like)).mean(0)[:, None]


@pytest.mark.parametrize(
    ("draw", "operation"), [("uniform", "reciprocal"), ("symmetric", "atanh"), ("rand_like", "log")]
)
def test_numbers_drawn_in_16_bits_are_the_reason(draw: str, operation: str) -> None:
    """Some in a thousand of them are zero or an end of their range: what fails by that does not fail in fp32."""
    loop = loop_of(lambda: nn.Sequential(OrderedDict(body=nn.Linear(4, 4), noise=Noisy(draw))), _size)
    found = ampcompare.diagnose(loop, arm="half:bf16", steps=2, device="cpu")
    fault = found.faults[0]
    assert (fault.kind, fault.place.operation, fault.place.module) == ("overflow", operation, "noise")
    if draw != "symmetric":
        said = f"% of the random numbers that {draw} draws in bf16 are zero, of which fp32 draws hardly any"
        assert fault.reason.endswith(said)
    assert found.cure is not None
    assert found.cure.keeps == ["noise"]
    assert ampcompare.diagnose(loop, arm="fp32", steps=2, device="cpu").faults == []


@pytest.mark.parametrize("ends", [(), (-1.0,), (0.25, 2.0)])
def test_only_random_numbers_at_an_end_are_moved(ends: tuple[float, ...]) -> None:
    """torch leaves defaults at the end of the arguments out."""
    low, high = (*ends, *(0.0, 1.0)[len(ends) :])
    drawn = torch.tensor([low, low / 2 + high / 2 + 0.125, high]).bfloat16()
    wide = uniform_numbers_off_ends((drawn, *ends), drawn, torch.float32)
    part = (high - low) / 512
    assert wide.tolist() == pytest.approx([low + part, low / 2 + high / 2 + 0.125, high - part], abs=1e-6)


def test_zeros_that_are_asked_for_are_not_moved() -> None:
    """Of a range without width the wide run has zeros too."""

    class Zeros(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / torch.empty_like(x).uniform_(0, 0)

    loop = loop_of(lambda: nn.Sequential(nn.Linear(4, 4), Zeros()), _size)
    found = ampcompare.diagnose(loop, arm="half:bf16", steps=2, device="cpu")
    assert found.faults[0].kind == "not precision"


def test_a_parameter_of_no_module_has_a_name() -> None:
    """As a prompt for a frozen model: the message says which tensor it is."""

    def loop(precision: Any) -> None:
        torch.manual_seed(0)
        prompt = (torch.randn(3, 4) / 100).half().requires_grad_()
        model = nn.Linear(4, 2).half().requires_grad_(False)
        (model,), (optimizer,) = precision.prepare([model], [torch.optim.Adam([prompt], foreach=False)])
        while True:
            loss = model(prompt).float().square().mean() * 1e-4
            precision.backward(loss, [optimizer])
            precision.step(optimizer)
            optimizer.zero_grad()

    fault = ampcompare.diagnose(loop, arm="fp32", steps=2, device="cpu").faults[0]
    assert "elements of a tensor of 3 x 4 outside of modules non-finite" in fault.text


@pytest.mark.parametrize("rewards", [[12.0, 12.0], [1.0, 2.0]])
def test_gradients_that_are_all_zero_are_said(rewards: list[float]) -> None:
    """As of a policy whose rewards are equal in 16 bits: no operation that is watched is wrong."""

    def loop(precision: Any) -> None:
        torch.manual_seed(0)
        (model,), (optimizer,) = precision.prepare(
            [model := nn.Linear(4, 1)], [torch.optim.SGD(model.parameters(), lr=0.1)]
        )
        while True:
            advantage = torch.tensor(rewards)[:, None] - sum(rewards) / 2
            loss = (model(torch.randn(2, 4)).float() * advantage).mean()
            precision.backward(loss, [optimizer])
            precision.step(optimizer)
            optimizer.zero_grad()

    found = ampcompare.diagnose(loop, arm="half:bf16,masters=fp32", steps=2, device="cpu")
    assert "no fault in 2 steps" in found.verdict
    assert ("all gradients are zero" in found.verdict) == (rewards[0] == rewards[1])


def test_a_gradient_of_a_tensor_of_no_module_that_is_not_finite_is_of_the_backward_pass() -> None:
    """As that of a temperature by which masked scores are divided; nothing between the pass and the step made it."""

    def loop(precision: Any) -> None:
        torch.manual_seed(0)
        temperature = torch.tensor(0.5, requires_grad=True)
        model = nn.Linear(4, 4)
        (model,), (optimizer,) = precision.prepare(
            [model], [torch.optim.SGD([*model.parameters(), temperature], lr=0.1)]
        )
        while True:
            scores = model(torch.randn(2, 4)).float()
            masked = scores.masked_fill(torch.arange(4) == 3, float("-inf"))
            loss = nn.functional.cross_entropy(masked / temperature, torch.zeros(2, dtype=torch.long))
            precision.backward(loss, [optimizer])
            precision.step(optimizer)
            optimizer.zero_grad()

    fault = ampcompare.diagnose(loop, arm="half:bf16", steps=1, device="cpu").faults[0]
    assert (fault.kind, fault.place.phase) == ("not precision", "backward")
    assert "the optimizer gets" not in fault.text


class Rotary(nn.Module):
    """Takes cosines of large positions: autocast rounds the product that makes the angles, which cosines amplify."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = 20000.0 + 3 * torch.arange(6.0)
        angles = positions[:, None] @ (10000.0 ** -torch.linspace(0, 0.5, 4))[None]
        return self.inner(x) * torch.cat((angles, angles), -1).cos()


def test_a_product_whose_rounding_a_cosine_amplifies_is_the_place() -> None:
    """The cosine makes no error itself: in fp32 it is as wrong."""
    loop = loop_of(
        lambda: nn.Sequential(OrderedDict(angles=Rotary())), lambda m, step: m(torch.randn(6, 8)).sum()
    )
    found = ampcompare.diagnose(loop, arm="native:bf16", steps=2, device="cpu")
    fault = found.faults[0]
    assert (fault.kind, fault.place.module, fault.place.operation) == ("rounding", "angles", "mm")
    assert re.search(
        r"angles mm rounds its result by 0\.\d+ % of its size, which angles cos amplifies", fault.text
    )
    assert re.search(r"differs from fp32 by \d+ % of its size", fault.text)
    assert found.cure is not None
    (line,) = found.cure.keeps
    file, _, number = line.rpartition(":")
    assert linecache.getline(file, int(number)).strip().startswith("angles = positions[:, None] @")


class Timed(nn.Module):
    """Adds sines of timesteps to what it computes; a part of them turns slowly, so that gradients are less wrong."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.inner, self.times, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time = (self.scale * torch.linspace(0.9, 1.0, len(x))).to(x.dtype)
        angles = time[:, None] * torch.exp(-torch.arange(8) / 2)
        return self.inner(x) + self.times(angles.sin().to(x.dtype))


@pytest.mark.parametrize(("scale", "is_fault"), [(1000.0, True), (50.0, False)])
def test_a_cast_of_timesteps_that_a_sine_amplifies_is_the_place(scale: float, is_fault: bool) -> None:
    """The cast is named, on its own line, although no gradient is wrong by nine tenths; smaller ones are no fault."""
    loop = loop_of(
        lambda: nn.Sequential(OrderedDict(net=Timed(scale))), lambda m, step: _size_of(m(torch.randn(16, 8)))
    )
    found = ampcompare.diagnose(loop, arm="half:bf16", steps=2, device="cpu")
    rounding = [fault for fault in found.faults if fault.kind == "rounding"]
    assert bool(rounding) == is_fault
    if is_fault:
        place = rounding[0].place
        assert (place.module, place.operation) == ("net", "_to_copy")
        assert re.search(
            r"rounds its result by 0\.\d+ % of its size, which net sin amplifies", rounding[0].text
        )
        number = place.where.rpartition(":")[2]
        assert "time = (self.scale" in linecache.getline(__file__, int(number))


class Placed(nn.Module):
    """Adds rows of a table by places that are counted in the type of its input, as positions of unmasked tokens are."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.table, self.way = nn.Linear(8, 8), nn.Embedding(400, 8), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        if self.way == "counted":
            places = torch.cumsum(torch.ones_like(h[:, 0]), 0)
        elif self.way == "grid":
            grid = torch.linspace(0, 1, len(h), dtype=h.dtype)
            places = (grid * 400).round()
        else:
            places = torch.cumsum(torch.ones_like(h[:, 0], dtype=torch.float32), 0)
        return h + self.table(places.long() - 1 if self.way != "grid" else places.long().clamp(0, 399))


@pytest.mark.parametrize(
    ("way", "place", "arm"),
    [
        ("counted", "net cumsum", "half:bf16,masters=fp32"),
        ("grid", "net linspace", "half:bf16,masters=fp32"),
        ("in fp32", "", "half:bf16,masters=fp32"),
        ("counted", "", "half:masters=fp32"),
    ],
)
def test_indices_that_rounding_makes_others_are_a_fault(way: str, place: str, arm: str) -> None:
    """The place that rounds is named, with the share; fp16 holds whole numbers up to 2048."""
    loop = loop_of(
        lambda: nn.Sequential(OrderedDict(net=Placed(way))),
        lambda m, step: _size_of(m(torch.randn(400, 8))) * 1e-2,
    )
    found = ampcompare.diagnose(loop, arm=arm, steps=2, device="cpu")
    rounding = [fault for fault in found.faults if fault.kind == "rounding"]
    assert bool(rounding) == bool(place)
    if place:
        said = re.match(
            rf"{place} rounds what becomes indices: (\d+) % of those of net.table embedding are",
            rounding[0].text,
        )
        assert said is not None
        if way == "counted":
            assert int(said[1]) == 18  # of 400 the odd ones above 256: 72
        assert found.cure is not None, found.verdict
        assert found.cure.keeps == [rounding[0].place.where]  # the line in fp32, also what it makes by dtype=
        assert "autocast" not in found.cure.code


class Counted(nn.Module):
    """Reads a number that it has counted in the type of its input, and takes rows by it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.table, self.way = nn.Linear(8, 8), nn.Embedding(500, 8), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        places = torch.cumsum(
            torch.ones_like(h[:, 0], dtype=torch.float32 if self.way == "fp32" else None), 0
        )
        if self.way == "unique":
            last = len(torch.unique(places))
        else:
            last = int((places[-1].long() if self.way == "long" else places[-1]).item())
        return h + self.table.weight[last - 1]


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("item", "reads them: 300 for 301 in fp32"),
        ("long", "reads them: 100 % of the numbers behind it are others in fp32"),
        ("unique", "reads them: 278 different numbers for 301 in fp32"),
        ("fp32", ""),
    ],
)
def test_a_whole_number_that_python_reads_is_noted(way: str, said: str) -> None:
    """What is done with it cannot be followed, so that it is no fault with a cure."""
    loop = loop_of(
        lambda: nn.Sequential(OrderedDict(net=Counted(way))), lambda m, step: _size_of(m(torch.randn(301, 8)))
    )
    found = ampcompare.diagnose(loop, arm="half:bf16,masters=fp32", steps=1, cures=False, device="cpu")
    notes = [note for note in found.notes if "rounds whole numbers" in note]
    assert len(notes) == bool(said)
    assert not said or ("net cumsum" in notes[0] and said in notes[0])


def _code_of_cure(arm: str) -> list[str]:
    loop = loop_of(
        lambda: nn.Sequential(OrderedDict(angles=Rotary())), lambda m, step: m(torch.randn(6, 8)).sum()
    )
    found = ampcompare.diagnose(loop, arm=arm, steps=1, device="cpu")
    assert found.cure is not None
    return found.cure.code.splitlines()


@pytest.mark.parametrize(
    ("arm", "block"),
    [
        ("native:bf16", 'with torch.autocast("cpu", enabled=False):'),
        ("apex:O4", "with amp.disable_casts():  # of apex"),
    ],
)
def test_the_code_of_a_cure_switches_off_what_casts(arm: str, block: str) -> None:
    """A block of autocast has no effect on Apex's lists."""
    lines = _code_of_cure(arm)
    assert block in lines
    assert lines[lines.index(block) + 1].startswith("    angles = positions[:, None] @")


def test_the_code_of_a_cure_opens_no_block_where_the_model_is_cast() -> None:
    """There autocast is off anyway: what acts is `.float()`, and fp32 in place of the type that the line asks for."""
    loop = loop_of(
        lambda: nn.Sequential(OrderedDict(net=Timed(1000.0))), lambda m, step: _size_of(m(torch.randn(16, 8)))
    )
    arm = Arm.parse("half:bf16")
    found = ampcompare.diagnose(loop, arm=str(arm), steps=1, device="cpu", cures=False)
    line = found.faults[0].place.where
    code = cure_from_candidate(arm, CureCandidate(lines=(line,)), (), CodeSite("cpu")).code.splitlines()
    assert code[0].startswith(
        f"# {line}, with .float() on its 16-bit inputs and fp32 in place of its 16-bit type; "
    )
    assert code[1].startswith("time = (self.scale")
    assert len(code) == 2
    kept = cure_from_candidate(arm, CureCandidate(modules=("net",)), (), CodeSite("cpu")).code
    assert (
        kept == "# as an arm: half:bf16,keep_fp32=net\nmodel.net.float()  # and cast its inputs with .float()"
    )


class Recast(nn.Module):
    """Casts an fp32 result of autocast back to fp16, which it is too large for."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.way = nn.Linear(4, 4), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        if self.way == "at once":
            return torch.pow(h.abs() + 60.0, 3).to(h.dtype) * 1e-5
        cube = torch.pow(h.abs() + 60.0, 3)
        cube = cube.type_as(h)
        return cube * 1e-5


@pytest.mark.parametrize(
    ("way", "code"),
    [
        ("at once", "return torch.pow(h.abs() + 60.0, 3).float() * 1e-5"),
        ("later", "cube = cube.float()"),
    ],
)
@pytest.mark.parametrize("arm", ["native:fp16", "apex:O1"])
def test_the_code_of_a_cure_has_no_cast_that_undoes_it(arm: str, way: str, code: str) -> None:
    """The line of the cast is named; one that only casts needs no block, and no registration of functions."""
    loop = loop_of(
        lambda: nn.Sequential(OrderedDict(net=Recast(way))), lambda m, step: _size_of(m(torch.randn(4, 4)))
    )
    found = ampcompare.diagnose(loop, arm=arm, steps=1, device="cpu", cures=False)
    (fault,) = found.faults
    assert (fault.kind, fault.place.operation) == ("overflow", "_to_copy")
    source = linecache.getline("tests/diagnosis/test_diagnose.py", int(fault.place.where.rpartition(":")[2]))
    assert (".type_as(h)" if way == "later" else ".to(h.dtype)") in source
    change = CureCandidate(lines=(fault.place.where,))
    lines = cure_from_candidate(Arm.parse(arm), change, (), CodeSite("cpu")).code.splitlines()
    assert lines[-1].strip() == code
    assert len(lines) == (2 if way == "later" else 3)
    seen = observe_loop(loop, Arm.parse(arm), LoopConditions(steps=1), change.lines)
    assert find_first_faults_by_kind(seen) == []


def _size_of(result: torch.Tensor) -> torch.Tensor:
    return result.float().square().mean()


class Padded(nn.Module):
    """Adds the least number of a type to scores that are below zero: all -inf in fp16, and rows of NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        scores = self.inner(x) - 40.0
        mask = torch.zeros_like(scores).masked_fill(~keep[:, None], torch.finfo(scores.dtype).min)
        return self.outer(torch.softmax(scores + mask, -1))


class Steep(torch.autograd.Function):
    """Multiplies gradients by a factor, and divides by it again in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return (gradient * ctx.factor).float().div(ctx.factor).to(gradient.dtype), None


@pytest.mark.parametrize("period", [2, 3])
def test_values_in_rows_that_the_loss_leaves_out_are_named(period: int) -> None:
    """They break the gradients of some batches whatever the scale, which is no scale that settles."""

    def loss_of(model: Any, step: int) -> torch.Tensor:
        keep = torch.tensor([step % period != period - 1, True, True])
        return model(torch.randn(3, 4), keep)[keep].float().square().mean()

    loop = loop_of(Padded, loss_of, steps=12)
    found = ampcompare.diagnose(loop, arm="native:fp16", steps=9, device="cpu")
    fault = found.faults[0]
    assert (fault.kind, fault.place.operation, fault.place.phase) == ("gradient overflow", "add", "forward")
    assert fault.step == period - 1
    assert "which the loss does not show, and breaks gradients whatever the loss scale" in fault.text
    assert "no fault" not in found.verdict
    assert not {"underflow", "rounding"} & {one.kind for one in found.faults}


@pytest.mark.parametrize(("bad", "falls"), [((2, 3, 5, 6, 8), True), ((0, 1), False)])
def test_a_scale_that_falls_through_a_run_has_a_cause(bad: tuple[int, ...], falls: bool) -> None:
    """A batch whose backward pass overflows at any usual scale is named; a scale that settles first is no fault."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def loss_of(model: Any, step: int) -> torch.Tensor:
        hidden = Steep.apply(model[0](torch.randn(3, 4)), 1e6 if step in bad else 1.0)
        return model[1](hidden).float().square().mean()

    loop = loop_of(make, loss_of, optimizer=lambda params: sgd(params, 0.01), steps=10)
    found = ampcompare.diagnose(loop, arm="native:fp16,init_scale=1024", steps=10, device="cpu", cures=False)
    assert found.skipped == len(bad)
    if not falls:
        assert found.faults == []
        return
    (fault,) = found.faults
    assert (fault.kind, fault.place.phase) == ("gradient overflow", "backward")
    assert "at loss scale 128, which has fallen from 1024" in fault.text


@pytest.mark.parametrize(
    ("arm", "lost"),
    [("half:bf16", 50), ("half", None), ("half:bf16,masters=fp32", None), ("native:bf16", None)],
)
def test_weights_of_16_bits_without_masters_are_named(arm: str, lost: int | None) -> None:
    """Of two weights whose gradient is 4, an update of a quarter of an ulp leaves 1 as it is, and moves 2**-4.

    Of what fp16 moves rounding loses nothing, of which nothing is said.
    """

    def make() -> nn.Module:
        model = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1.0, 2.0**-4]]))
        return model

    loop = loop_of(
        make,
        lambda model, _: model(torch.full((1, 2), 4.0)).sum(),
        optimizer=lambda params: sgd(params, 2.0**-11),
    )
    found = ampcompare.diagnose(loop, arm=arm, steps=1, device="cpu", cures=False)
    dtype = "bf16" if "bf16" in arm else "fp16"
    text = f"the optimizer steps {dtype} weights without fp32 masters: rounding loses {lost} % of the updates"
    assert found.notes == ([] if lost is None else [text])


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    """Two layers under O2, three steps."""
    return ampcompare.diagnose(_linear_loop, arm="apex:O2,loss_scale=8", steps=3, device="cpu")


def test_sums_over_bins_are_element_counts(diagnosis: Diagnosis) -> None:
    """At each place every element is in one bin, a zero or not finite, and a module's results have the right number."""
    for report in [*diagnosis.places, *diagnosis.weights, *diagnosis.gradients]:
        values = report.range
        assert sum(values.exponents.values()) + values.zeros + values.nonfinite == values.elements
    first = next(one for one in diagnosis.places if (one.place.module, one.place.operation) == ("0", "addmm"))
    assert (first.calls, first.range.elements) == (3, 3 * 6 * 8)
    assert {report.place.name: report.range.elements for report in diagnosis.weights}["0 weight"] == 3 * 8 * 4


def test_places_have_modules_lines_and_passes(diagnosis: Diagnosis) -> None:
    """Operations of both passes belong to the module and the line that called it."""
    seen = {(one.place.module, one.place.phase) for one in diagnosis.places}
    assert {("0", "forward"), ("0", "backward"), ("1", "backward"), ("2", "forward")} <= seen
    files = {one.place.where.rpartition(":")[0] for one in diagnosis.places if one.place.module}
    assert files == {"tests/diagnosis/test_diagnose.py"}


def test_errors_are_those_of_fp16(diagnosis: Diagnosis) -> None:
    """A product makes less than one unit in the last place, and results stay near those of fp32."""
    products = [one for one in diagnosis.places if one.place.operation == "addmm"]
    assert products
    for one in products:
        assert one.dtypes == ["fp16"]
        assert 0 < (one.made or 0) < 2.0**-10
        assert 0 < (one.error or 0) < 0.01


def test_the_loss_scale_has_headroom(diagnosis: Diagnosis) -> None:
    """The own scale is known, gradients fit under a larger one, and shares fall as the scale grows."""
    room = diagnosis.headroom
    assert room.own_scale == 8
    assert (room.largest_scale or 0) > 128
    assert room.lost["1"] >= room.lost["128"] >= room.lost["65536"]


def test_watching_changes_no_weight() -> None:
    """A watched run ends with the weights of the same loop under the bare arm."""
    ends = []

    def keep(model: Any, step: int) -> torch.Tensor:
        ends[len(ends) - (step > 0) :] = [model]
        return _size(model, step)

    loop = loop_of(lambda: nn.Linear(4, 2), keep, steps=3)
    arm = ampcompare.Arm.parse("half:masters=fp32,dynamic")
    observe_loop(loop, arm, LoopConditions(steps=9))
    torch.manual_seed(0)
    loop(ampcompare.make_precision(arm))
    watched, bare = ends
    assert all(torch.equal(a, b) for a, b in zip(watched.parameters(), bare.parameters(), strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"reference": "fp32"}, "reference is 'fp32'; choose one of float32, float64, none"),
        ({"recipe.compile": "eager"}, "leave it out"),
        ({"processes": 2}, "one process"),
    ],
)
def test_what_cannot_be_diagnosed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ampcompare.diagnose(**options)


def test_a_loop_without_steps() -> None:
    with pytest.raises(ConfigError, match="no step was watched"):
        ampcompare.diagnose(lambda precision: None, arm="half", device="cpu")


@pytest.mark.parametrize(
    ("arm", "library"), [("accelerate:fp16", "accelerate"), ("fabric:bf16-true", "lightning_fabric")]
)
def test_modules_and_updates_of_libraries(arm: str, library: str) -> None:
    """What a library wraps around models and optimizers is not in their names, and their steps are seen."""
    pytest.importorskip(library)
    found = ampcompare.diagnose(_linear_loop, arm=arm, steps=2, reference="none", cures=False, device="cpu")
    assert {"0", "2"} <= set(found.modules)
    assert {update.parameter for update in found.updates} == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_checkpointed_block_has_its_places_in_both_passes() -> None:
    network = BY_NAME["checkpointed blocks, half"]
    found = ampcompare.diagnose(network.loop, arm=network.arm, steps=2, cures=False, device="cpu")
    passes = {one.place.phase for one in found.places if one.place.module == "blocks.0.0"}
    assert passes == {"forward", "backward"}


def _clip_in_own_type(model: nn.Module) -> None:
    """Clip as scripts do by hand: the squares of the gradients add up in their own type."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    norm = torch.stack([grad.pow(2).sum() for grad in grads]).sum().sqrt()
    for grad in grads:
        grad.mul_((1 / (norm + 1e-6)).clamp(max=1.0))


@pytest.mark.parametrize("is_broken", [False, True])
def test_gradients_that_change_behind_the_backward_pass_are_named(is_broken: bool) -> None:
    """A norm that overflows in fp16 makes them all zero, and a finite loss stands still; a NaN spreads."""
    models: list[nn.Module] = []

    def loss(model: Any, step: int) -> torch.Tensor:
        return (model(torch.ones(4, 16)).float() - 300).square().mean()

    def make() -> nn.Module:
        models.append(nn.Linear(16, 4))
        return models[-1]

    def clip(*_: Any) -> None:
        if is_broken:
            models[-1].weight.grad.fill_(torch.nan)  # type: ignore[union-attr]
        else:
            _clip_in_own_type(models[-1])

    found = ampcompare.diagnose(
        loop_of(make, loss, after_backward=clip), arm="half:fp16", device="cpu", steps=4
    )
    (fault,) = found.faults
    assert fault.kind == "update"
    assert ("64 elements that are not finite" if is_broken else "gradients that are all zero") in fault.text
    assert ("which fp16 cannot hold" in fault.text) != is_broken


def test_sums_whose_terms_cancel_are_no_fault() -> None:
    """A bias in front of a batch norm has a gradient of zero, and a policy's loss is zero at its own policy."""

    def norm_of(model: Any, step: int) -> torch.Tensor:
        return model(0.3 * torch.randn(64, 8) + 1).float().logsumexp(-1).mean()

    def policy_of(model: Any, step: int) -> torch.Tensor:
        chosen = model(torch.randn(64, 8)).log_softmax(-1)[:, 0].float()
        gain = torch.randn(64)
        ratio = (chosen - chosen.detach() + torch.linspace(-1, 1, 64) / 512).exp()
        return -(ratio * (gain - gain.mean())).mean()

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))

    for loss in (norm_of, policy_of):
        torch.manual_seed(0)
        found = ampcompare.diagnose(loop_of(make, loss), arm="half:bf16,masters=fp32", device="cpu", steps=4)
        assert found.faults == []


@pytest.mark.parametrize(
    ("last", "alone", "lines"),
    [((), True, ("a.py:9",)), (("a.py:9",), True, ("a.py:1", "a.py:2")), (("a.py:9",), False, ("a.py:9",))],
)
def test_a_line_that_calls_the_model_is_tested_where_nothing_else_helps(
    last: tuple[str, ...], alone: bool, lines: tuple[str, ...]
) -> None:
    """There the arm casts the inputs, which no words of the line change; what rounds behind it is the better place."""

    def fault_at(line: str) -> Fault:
        place = OperationPlace(module="", operation="sum", where=line, phase="forward")
        return Fault(kind="overflow", place=place, step=0, text="it overflows", near=[("", "a.py:9")])

    def run(_arm: Arm, kept: Any) -> remedies.TestedCandidate:
        if "a.py:9" in kept or (alone and set(kept) >= {"a.py:1", "a.py:2"}):
            return remedies.TestedCandidate([])
        return remedies.TestedCandidate([fault_at("a.py:2" if "a.py:1" in kept else "a.py:1")])

    found = search_for_cure(Arm.parse("half"), [fault_at("a.py:1")], None, run, [], last_lines=last)
    assert found.change is not None
    assert found.change.lines == lines


@pytest.mark.parametrize(
    ("sizes", "nearest"),
    [
        ([400.0, 3.0, 2.0], "least is left of the fault with a.py:1, a.py:9 in fp32: it differs 2.0"),
        ([400.0, 200.0, 90.0], ""),
        ([math.inf, math.inf, math.inf], ""),
        ([math.inf, math.inf, 2.0], "with a.py:1, a.py:9 in fp32: it differs 2.0"),
        ([400.0, 3.0, 0.0], "it differs 3.0"),
    ],
)
def test_what_leaves_least_of_a_fault_is_named_where_nothing_cures_it(
    sizes: list[float], nearest: str
) -> None:
    """If that is a tenth at most, at the same place: what a fault elsewhere takes is no part of this one."""

    def fault_of(size: float, line: str = "a.py:1") -> Fault:
        place = OperationPlace(module="", operation="sum", where=line, phase="forward")
        text = f"it differs {size}"
        return Fault(kind="rounding", place=place, step=0, text=text, near=[("", "a.py:9")], severity=size)

    def run(_arm: Arm, kept: Any) -> remedies.TestedCandidate:
        size = sizes[min(len(kept), 2)]
        return remedies.TestedCandidate([fault_of(size) if size else fault_of(9.0, "b.py:3")])

    found = search_for_cure(Arm.parse("half:bf16,masters=fp32"), [fault_of(sizes[0])], None, run, [])
    assert found.change is None
    assert (nearest in found.nearest) if nearest else found.nearest == ""


class Scheduled(nn.Module):
    """Reads a table of a diffusion schedule: a buffer that an arm casts, or one in fp32 that it makes at each call."""

    def __init__(self, *, is_buffer: bool) -> None:
        super().__init__()
        self.is_buffer = is_buffer
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(5e-4, 0.04, 64), 0))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        table = self.kept if self.is_buffer else torch.cumprod(1 - torch.linspace(5e-4, 0.04, 64), 0)
        kept = table[torch.arange(16)][:, None]
        return (self.layer(x).float() / (1 - kept).sqrt()).square().mean()


class Denoiser(nn.Module):
    """Reads the table of a part that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule, self.layer = nn.Module(), nn.Linear(8, 8)
        self.schedule.register_buffer("kept", torch.cumprod(1 - torch.linspace(5e-4, 0.04, 64), 0))

    def forward(self, x: Tensor) -> Tensor:
        kept = self.schedule.kept[torch.arange(16)][:, None]
        return (self.layer(x).float() / (1 - kept).sqrt()).square().mean()


def test_the_module_of_a_buffer_that_the_arm_casts_is_a_cure() -> None:
    """No line brings back what the cast has rounded, nor does the model in fp32 cost as little."""
    loop = loop_of(Denoiser, lambda m, step: m(torch.randn(16, 8)))
    found = ampcompare.diagnose(loop, arm="half:bf16,masters=fp32", steps=1, device="cpu")
    assert found.faults[0].reason.startswith("the arm casts the buffer schedule.kept to bf16, and ")
    assert found.cure is not None
    assert found.cure.keeps == ["schedule"]


@pytest.mark.parametrize("is_buffer", [True, False])
def test_a_buffer_that_the_arm_casts_is_the_reason(is_buffer: bool) -> None:
    """Of 0.9995 bf16 makes 1; the same table in fp32 has no fault."""
    loop = loop_of(lambda: Scheduled(is_buffer=is_buffer), lambda m, step: m(torch.randn(16, 8)))
    found = ampcompare.diagnose(loop, arm="half:bf16", steps=1, device="cpu", cures=False)
    reasons = [fault.reason for fault in found.faults if fault.kind != "lost updates"]
    if is_buffer:
        assert reasons[0].startswith("the arm casts the buffer kept to bf16, and ")
    else:
        assert not reasons
