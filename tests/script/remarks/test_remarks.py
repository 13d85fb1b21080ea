"""What rounding takes from a script by its own lines: sums, decays, running statistics and weights that were cast."""

import copy
import functools
import io
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from ampcompare.base.environment.variables import CELL_FOLDER
from ampcompare.script.recording.recorder import RecordedSteps, Recorder

# of the training loop, given the loss and the number of the step
Line = Callable[[nn.Module, Tensor, int], Any]


def _remarks(
    behind: Any, line: Line, *, model: nn.Module, arm: str = "script", steps: int = 24, optimizer: Any = SGD
) -> list[str]:
    """Return the remarks on a training."""
    torch.manual_seed(0)
    recorder = Recorder(None, {})
    recorded: list[dict[str, Any]] = []
    recorder.call_after_each_row(recorded.append)
    behind(arm, RecordedSteps(recorder))
    stepped = optimizer(model.parameters(), 0.01)
    for step in range(steps):
        dtype = next(model.parameters()).dtype
        loss: Tensor = (model(torch.randn(16, 8).to(dtype)).float() - 1).square().mean()
        loss.backward()
        stepped.step()
        stepped.zero_grad()
        line(model, loss.detach(), step)
    recorder.close(0, None)
    return [row["text"] for row in recorded if row["kind"] == "remark"]


def _linear(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Linear(8, 4).to(dtype)


ONE = torch.ones(())


@pytest.mark.parametrize(("dtype", "is_lost"), [(torch.bfloat16, True), (torch.float32, False)])
@pytest.mark.parametrize("inference", [False, True])
def test_a_sum_that_stands_still_is_named(
    behind: Any, dtype: torch.dtype, is_lost: bool, inference: bool
) -> None:
    with torch.inference_mode(inference):
        total = torch.zeros((), dtype=dtype)

    def add(model: nn.Module, loss: Tensor, step: int) -> None:
        nonlocal total
        with torch.inference_mode(inference):
            total += ONE

    found = _remarks(behind, add, model=_linear(), steps=448)
    share = ["a sum in bf16 loses by rounding 20 % of what 320 additions gave to it"]
    assert [text.partition(";")[0] for text in found] == share * is_lost
    assert float(total) == (256 if is_lost else 448)
    assert all("test_remarks.py:" in text for text in found)


@pytest.mark.parametrize(
    ("compare", "is_named"),
    [
        (lambda scores, right: scores > right, True),
        (lambda scores, right: right.le(scores), True),
        (lambda scores, right: scores.float() > right.float(), False),
        (lambda scores, right: scores.relu() > torch.zeros_like(right), False),
        (lambda scores, right: scores[:, :9] > right, False),
    ],
)
@pytest.mark.parametrize("with_gradients", [False, True])
def test_equal_scores_of_an_evaluation_are_named(
    behind: Any, compare: Callable[[Tensor, Tensor], Tensor], is_named: bool, with_gradients: bool
) -> None:
    """Where many numbers are compared with few, as for the rank of the right one, and not zeros of a ReLU."""
    scores = torch.linspace(0.9, 1, 4000).bfloat16()[None].repeat(2, 1)

    @torch.no_grad()
    def compare_rounded() -> None:
        compare(scores.float(), scores[:, 3000:3001].float())

    def evaluate(model: nn.Module, loss: Tensor, step: int) -> None:
        with torch.set_grad_enabled(with_gradients):
            compare(scores, scores[:, 3000:3001])

    found = _remarks(behind, evaluate, model=_linear(), steps=3)
    under_arm = _remarks(behind, lambda *_: compare_rounded(), model=_linear(), steps=3, arm="native:bf16")
    assert len(under_arm) == 1 or not is_named  # fp32 numbers that were rounded
    said = ["of the bf16 numbers that an evaluation compares"]
    assert [text[: len(said[0])] for text in found] == said * (is_named and not with_gradients)


@pytest.mark.parametrize(
    ("offset", "dtype", "is_named"),
    [(20.0, torch.bfloat16, True), (20.0, torch.float32, False), (0.5, torch.bfloat16, False)],
)
@pytest.mark.parametrize("with_gradients", [False, True])
def test_sums_of_an_evaluation_that_cancel_are_named(
    behind: Any, offset: float, dtype: torch.dtype, is_named: bool, with_gradients: bool
) -> None:
    """As the variance of numbers around 20, whose mean square is 401; of numbers around 0.5 enough is left."""
    numbers = (offset + torch.linspace(-1.7, 1.7, 512)).to(dtype)
    counts = torch.tensor(200.0, dtype=torch.bfloat16), torch.tensor(199.0, dtype=torch.bfloat16)

    def evaluate(model: nn.Module, loss: Tensor, step: int) -> None:
        with torch.set_grad_enabled(with_gradients):
            counts[0] - counts[1]
            (numbers * numbers).sum() / 512 - (numbers.sum() / 512) ** 2

    found = _remarks(behind, evaluate, model=_linear(), steps=3)
    said = "an evaluation subtracts bf16 numbers of which hardly a digit is left, "
    assert [text[: len(said)] for text in found] == [said] * (is_named and not with_gradients)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("by_zero", [False, True])
@pytest.mark.parametrize(("length", "is_lost"), [(320, True), (200, False)])
def test_a_sum_that_is_made_again_goes_on(
    behind: Any, length: int, is_lost: bool, by_zero: bool, keeps: bool
) -> None:
    """As in each epoch: anew or set to 0, whether or not the one before is kept."""
    total, kept = torch.zeros((), dtype=torch.bfloat16), []

    def add(model: nn.Module, loss: Tensor, step: int) -> None:
        nonlocal total
        if step % length == 0:
            if by_zero:
                total.zero_()
            else:
                kept.extend([total] * keeps)
                total = torch.zeros((), dtype=torch.bfloat16)
        total += ONE

    found = _remarks(behind, add, model=_linear(), steps=672)
    assert len(found) == is_lost
    assert not is_lost or found[0].startswith("a sum in bf16 loses by rounding ")


@pytest.mark.parametrize(("additions", "is_lost"), [(300, True), (260, False)])
def test_what_the_last_additions_lose_is_seen(behind: Any, additions: int, is_lost: bool) -> None:
    """A sum of 300 ones ends at 256, where none of the first 256 is lost; of 260 four are."""
    total = torch.zeros((), dtype=torch.bfloat16)

    def add(model: nn.Module, loss: Tensor, step: int) -> None:
        nonlocal total
        total += ONE

    found = _remarks(behind, add, model=_linear(), steps=additions)
    assert len(found) == is_lost
    assert not is_lost or found[0].startswith(
        "a sum in bf16 loses by rounding 15 % of what 300 additions gave to it"
    )


def test_a_sum_that_begins_late_is_seen(behind: Any) -> None:
    """Behind the steps in which all calls are watched."""
    total = torch.zeros((), dtype=torch.bfloat16)

    def add(model: nn.Module, loss: Tensor, step: int) -> None:
        nonlocal total
        if step >= 50:
            total += ONE

    (text,) = _remarks(behind, add, model=_linear(), steps=400)
    assert text.startswith("a sum in bf16 loses by rounding ")


@pytest.mark.parametrize("kind", ["function", "partial", "object"])
def test_a_sum_in_a_closure_is_seen(behind: Any, kind: str) -> None:
    """As all that a step of Lightning computes; what the optimizer itself adds is none of the script's."""
    recorder = Recorder(None, {})
    recorded: list[dict[str, Any]] = []
    recorder.call_after_each_row(recorded.append)
    behind("script", RecordedSteps(recorder))
    model, count = _linear(), torch.zeros((), dtype=torch.bfloat16)
    optimizer = SGD(model.parameters(), 0.01)

    def closure() -> Tensor:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        return loss

    class Closure:
        def __call__(self) -> Tensor:
            return closure()

    for _ in range(320):
        optimizer.step(
            {"function": closure, "partial": functools.partial(closure), "object": Closure()}[kind]
        )
    recorder.close(0, None)
    (text,) = [row["text"] for row in recorded if row["kind"] == "remark"]
    assert text.startswith("a sum in bf16 loses by rounding 20 % of what 320 additions gave to it")


def test_an_average_of_few_elements_is_no_sum(behind: Any) -> None:
    """Its factor lies between two additions; an average that does not stand still has no remark at all."""
    average = torch.full((4,), 1.0, dtype=torch.bfloat16)
    found = _remarks(
        behind, lambda *_: average.mul_(0.98).add_(torch.full((4,), 1e-4)), model=_linear(), steps=200
    )
    assert found == []


@pytest.mark.parametrize(
    "given", [True, 1, torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.int64)]
)
def test_a_sum_may_get_anything(behind: Any, given: Any) -> None:
    """Numbers and masks, also where 16 bits are the default type, and without gradients."""
    total = torch.zeros(2, dtype=torch.float16)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert _remarks(behind, lambda *_: total.add_(given), model=_linear(torch.bfloat16)) == []
    finally:
        torch.set_default_dtype(torch.float32)
    assert total.tolist() == [24, 24]


def test_a_sum_of_zeros_is_none(behind: Any) -> None:
    """It stands still as there is nothing to add."""
    total = torch.ones((), dtype=torch.bfloat16)
    assert _remarks(behind, lambda *_: total.add_(torch.zeros_like(total)), model=_linear(), steps=80) == []


@pytest.mark.parametrize(
    ("dtype", "decay", "is_lost"),
    [
        (torch.bfloat16, 0.999, True),
        (torch.bfloat16, 0.99, False),
        (torch.float16, 0.999, False),
        (torch.float16, 0.9999, True),
        (torch.float32, 0.9999, False),
    ],
)
def test_a_decay_that_does_nothing_is_named(
    behind: Any, dtype: torch.dtype, decay: float, is_lost: bool
) -> None:
    """As that of a codebook, whose counts grow by what is added and never fall."""
    counts = torch.linspace(1, 2, 64).to(dtype)
    before = counts.clone()
    found = _remarks(behind, lambda *_: counts.mul_(decay), model=_linear())
    assert [text.partition(":")[0] for text in found] == [f"a decay in {_name(dtype)} does nothing"] * is_lost
    assert torch.equal(counts, before) == is_lost


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")


@pytest.mark.parametrize(
    ("arm", "dtype", "decay", "is_lost"),
    [
        ("script", torch.bfloat16, 0.01, True),
        ("script", torch.bfloat16, 1.0, False),  # 0.01 of a weight at this rate
        ("script", torch.float32, 0.01, False),
        ("half:bf16,masters=fp32", torch.float32, 0.01, False),
    ],
)
def test_a_weight_decay_that_does_nothing_is_named(
    behind: Any, arm: str, dtype: torch.dtype, decay: float, is_lost: bool
) -> None:
    def adamw(params: Any, rate: float) -> AdamW:
        return AdamW(params, rate, weight_decay=decay)

    found = _remarks(behind, lambda *_: None, model=_linear(dtype), arm=arm, optimizer=adamw)
    assert [text.partition(" at ")[0] for text in found] == [
        "the weight decay of AdamW does nothing"
    ] * is_lost
    assert all("test_remarks.py:" in text for text in found)


def test_a_sum_leaves_others_their_watch(behind: Any) -> None:
    """All additions are looked at from the second one to a sum on, and those to an average are still seen."""
    total, average = torch.zeros((), dtype=torch.bfloat16), torch.ones(4, 8, dtype=torch.bfloat16)

    def add(model: nn.Module, loss: Tensor, step: int) -> None:
        total.add_(loss)
        average.add_(model.weight.detach(), alpha=1e-6)  # type: ignore[arg-type]

    found = _remarks(behind, add, model=_linear(torch.bfloat16))
    assert [text.partition(":")[0] for text in found] == ["an average in bf16 stands still"]


@pytest.mark.parametrize(
    ("dtype", "momentum", "is_lost"),
    [(torch.bfloat16, 0.001, True), (torch.bfloat16, 0.1, False), (torch.float32, 0.001, False)],
)
def test_running_statistics_that_stand_still_are_named(
    behind: Any, dtype: torch.dtype, momentum: float, is_lost: bool
) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, momentum=momentum)).to(dtype)
    found = _remarks(behind, lambda *_: None, model=model)
    assert len(found) == is_lost
    assert not is_lost or found[0].startswith(
        "running statistics in bf16 stand still in 1 layers (BatchNorm1d"
    )


def _evaluate(model: nn.Module, loss: Tensor, step: int) -> None:
    model.bfloat16()
    model(torch.ones(2, 8).bfloat16())
    model.float()


def _evaluate_copy(model: nn.Module, loss: Tensor, step: int) -> None:
    copy.deepcopy(model).bfloat16()(torch.ones(2, 8).bfloat16())


def _evaluate_and_restore(model: nn.Module, loss: Tensor, step: int) -> None:
    saved = copy.deepcopy(model.state_dict())
    _evaluate(model, loss, step)
    model.load_state_dict(saved)


@pytest.mark.parametrize("arm", ["script", "native:bf16"])
@pytest.mark.parametrize(
    ("line", "is_rounded"), [(_evaluate, True), (_evaluate_copy, False), (_evaluate_and_restore, False)]
)
def test_weights_that_were_cast_and_back_are_named(
    behind: Any, arm: str, line: Line, is_rounded: bool
) -> None:
    found = _remarks(behind, line, model=_linear(), arm=arm)
    assert len(found) == is_rounded
    assert not is_rounded or found[0].startswith("fp32 weights were cast to bf16 between two steps and back")


@pytest.mark.parametrize("is_cell", [False, True])
def test_a_remark_is_printed_where_no_table_will(is_cell: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_cell:
        monkeypatch.setenv(CELL_FOLDER, "cell")
    else:
        monkeypatch.delenv(CELL_FOLDER, raising=False)
    with redirect_stderr(io.StringIO()) as printed:
        RecordedSteps(Recorder(None, {})).add_rounding_remark(f"a remark of a cell: {is_cell}")
    assert ("a remark" in printed.getvalue()) != is_cell


class _Table(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.body = nn.Linear(8, 4)
        self.table: Tensor = nn.Buffer(torch.ones(size))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.body(x) * self.table[time.long()][:, None]


def _train_by_time(time: Tensor, size: int = 4096) -> None:
    model = _Table(size)
    optimizer = SGD(model.parameters(), 0.01)
    for _ in range(2):
        model(torch.randn(2, 8), time=time).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("arm", "time", "change"),
    [
        ("half:bf16,masters=fp32", torch.tensor([3.0, 999.0]), "999 becomes 1000"),
        ("apex:O5", torch.tensor([3.0, 257.0]), "257 becomes 256"),
        ("apex:O2", torch.tensor([3.0, 2049.0]), "2049 becomes 2048"),
        ("apex:O2", torch.tensor([3.0, 999.0]), ""),
        ("native:bf16", torch.tensor([3.0, 999.0]), ""),
        ("half:bf16,masters=fp32", torch.tensor([3, 999]), ""),
        ("half:bf16,masters=fp32", torch.tensor([3.5, 999.0]), ""),
    ],
)
def test_whole_numbers_that_an_arm_rounds_are_named(behind: Any, arm: str, time: Tensor, change: str) -> None:
    """Those that the type has, integers, and other numbers are not."""
    recorder = Recorder(None, {})
    recorded: list[dict[str, Any]] = []
    recorder.call_after_each_row(recorded.append)
    behind(arm, RecordedSteps(recorder))
    _train_by_time(time)
    found = [row["text"] for row in recorded if row["kind"] == "remark" and "rounds" in row["text"]]
    assert len(found) == bool(change)
    assert not change or f"the whole numbers of time of _Table: {change}; pass them as integers" in found[0]


class _Labelled(nn.Module):
    """Gets its labels in the last column of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 5000)

    def forward(self, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.body(batch[:, :3]).float(), batch[:, 3].long())


@pytest.mark.parametrize(("label", "change"), [(4998.0, "4998 becomes 4992"), (4992.0, "")])
def test_a_column_of_whole_numbers_that_an_arm_rounds_is_named(
    behind: Any, label: float, change: str
) -> None:
    """As labels that travel with the features; what stands in the other columns is not whole."""
    recorder = Recorder(None, {})
    recorded: list[dict[str, Any]] = []
    recorder.call_after_each_row(recorded.append)
    behind("half:bf16", RecordedSteps(recorder))
    model = _Labelled()
    optimizer = SGD(model.parameters(), 0.01)
    for _ in range(2):
        model(torch.cat([torch.randn(4, 3), torch.full((4, 1), label)], 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [row["text"] for row in recorded if row["kind"] == "remark"]
    whole = [text for text in found if "whole numbers" in text]
    assert len(whole) == bool(change)
    said = f"the whole numbers of column 3 of batch of _Labelled: {change}; pass them, apart from the others"
    assert not change or said in whole[0]


def test_an_index_out_of_bounds_has_its_reason(behind: Any) -> None:
    """A table of 1,000 rows has none for the timestep that 999 becomes; under another arm torch's words stay."""
    stand_in = behind("half:bf16,masters=fp32")
    with pytest.raises(IndexError) as raised:
        _train_by_time(torch.tensor([3.0, 999.0]), 1000)
    explained = str(stand_in.find_refusal_of_error(raised.value))
    assert (
        "rounds the whole numbers of time of _Table: 999 becomes 1000 (IndexError: index 1000 is out of"
        in explained
    )
    assert "native:bf16" in explained
    assert behind("half:bf16,masters=fp32").find_refusal_of_error(raised.value) is None


def test_a_cast_of_the_script_to_the_other_16_bits_is_named(behind: Any) -> None:
    """As of an evaluation in bf16 under an arm that has cast the model to fp16."""
    stand_in = behind("apex:O2")
    model = _linear()
    optimizer = SGD(model.parameters(), 0.01)
    model(torch.randn(2, 8)).float().sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError) as raised:
        model.bfloat16()(torch.ones(2, 8).bfloat16())
    explained = str(stand_in.find_refusal_of_error(raised.value))
    assert "the arm casts the model to fp16 and the script casts tensors itself to bf16" in explained


class _Packed(nn.Module):
    """Gets three features and one more number in one tensor, and returns its loss."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        self.body = nn.Linear(
            4 if use in ("feature", "decoded") else 3, 5008 if use in ("label", "code") else 1
        )
        self.back = nn.Linear(1, 4)

    def forward(self, batch: Tensor) -> Tensor:
        last = batch[:, 3]
        out = self.body(batch if self.use in ("feature", "decoded") else batch[:, :3]).float()
        if self.use == "feature":
            return nn.functional.mse_loss(out[:, 0], batch[:, 0].float())
        if self.use == "decoded":  # an autoencoder of features that are whole numbers
            return (self.back(out.to(batch.dtype)).float() - batch.float()).square().mean()
        if self.use == "label":
            return nn.functional.cross_entropy(out, last.long())
        if self.use == "code":
            return out.gather(1, last.float().unsqueeze(1).to(torch.int64)).mean()
        if self.use == "target":
            return nn.functional.mse_loss(out[:, 0], last.float() / 1000)
        if self.use == "residual":
            return (out[:, 0] - last.float().view(last.shape)).square().mean()
        return (out[:, 0] * (last == 4990)).mean()  # a mask: 4990 is 4992 in bf16


def _recorded_rows_of_packed(behind: Any, use: str, number: float, arm: str) -> list[dict[str, Any]]:
    recorder = Recorder(None, {})
    recorded: list[dict[str, Any]] = []
    recorder.call_after_each_row(recorded.append)
    behind(arm, RecordedSteps(recorder))
    model = _Packed(use)
    optimizer = SGD(model.parameters(), 1e-9)
    for _ in range(2):
        features = torch.full((4, 3), 2.0) if use == "decoded" else torch.randn(4, 3)
        model(torch.cat([features, torch.full((4, 1), number)], 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return recorded


@pytest.mark.parametrize("arm", ["half:bf16", "apex:O2"])
@pytest.mark.parametrize("use", ["label", "code", "target", "residual", "mask"])
def test_labels_and_codes_that_an_arm_rounds_are_told_from_features(behind: Any, use: str, arm: str) -> None:
    """They are others then, so that the arm trains something else; a number that the type holds is none."""
    rows = _recorded_rows_of_packed(behind, use, 4999.0, arm)
    found = [row["text"] for row in rows if row["kind"] == "rounded_codes"]
    if use == "mask" and arm == "apex:O2":  # neither is it equal in fp16
        assert found == []
        return
    read = 4992 if arm == "half:bf16" else 5000
    (text,) = found
    after = f"{read / 1000:.6g}" if use == "target" else f"{read}"
    assert text.startswith(f"{arm} trains on other labels or codes than the script gives it: ")
    assert f"becomes {after} (" in text
    assert "test_remarks.py:" in text
    assert [row["text"] for row in rows if row["kind"] == "remark" and row["text"] == text] == [text]


@pytest.mark.parametrize(
    ("use", "number"), [("feature", 4999.0), ("decoded", 4999.0), ("label", 4992.0), ("target", 256.0)]
)
def test_features_that_an_arm_rounds_are_no_codes(behind: Any, use: str, number: float) -> None:
    """They lose digits as every number does, also where a model has to give them back."""
    rows = _recorded_rows_of_packed(behind, use, number, "half:bf16")
    assert [row for row in rows if row["kind"] == "rounded_codes"] == []
    assert any("whole numbers" in row.get("text", "") for row in rows) == (number == 4999)


def test_a_compiled_model_is_one_graph_with_the_watch(behind: Any) -> None:
    """That its inputs are rounded is said all the same."""
    recorder = Recorder(None, {})
    recorded: list[dict[str, Any]] = []
    recorder.call_after_each_row(recorded.append)
    behind("half:bf16", RecordedSteps(recorder))
    model = _Packed("target")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = SGD(model.parameters(), 1e-9)
    for _ in range(2):
        compiled(torch.cat([torch.randn(4, 3), torch.full((4, 1), 4999.0)], 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert any("rounds the whole numbers" in row.get("text", "") for row in recorded)
