"""A script that holds 16-bit weights trains under an arm as the same script with those weights in fp32, bit for bit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy

from ampcompare.base.errors import PreparationError, UnsupportedCombination
from ampcompare.base.tensors.tree import map_tensors_in_tree
from tests.script.behind.test_stand_in import RecordedSteps
from tests.script.small_script import batch, network
from tests.script.trainings import has_bits

pytestmark = pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")
ARMS = ["fp32", "native:bf16", "native:fp16", "O1", "O2", "half:bf16,masters=fp32", "half:bf16,kahan"]


def trained(model: nn.Module, dtype: torch.dtype, steps: int = 4, **options: Any) -> list[Tensor]:
    """Train, with inputs that the script casts, and return the weights."""
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=0.01, **options)
    for step in range(steps):
        x, y = batch(step)
        loss = cross_entropy(model(x.to(torch.bfloat16).to(dtype)).float(), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return [value.detach().clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("arm", ARMS)
def test_lifted_weights_train_as_fp32_ones(behind: Any, arm: str) -> None:
    """Batch norm with its statistics too; the record says which type was lifted, and on which line."""
    behind(arm)
    expected = trained(network().bfloat16().float(), torch.float32)
    behind.end()
    rows = RecordedSteps()
    behind(arm, rows)
    assert all(map(has_bits, trained(network().bfloat16(), torch.bfloat16), expected))
    (note,) = (note for note in rows.notes if "lifted" in note)
    assert note.startswith("weights lifted from bfloat16 (")
    assert "test_lifted_weights.py:" in note


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_what_a_script_makes_in_its_default_type_is_noted(behind: Any, default: torch.dtype) -> None:
    """An arm lifts weights, not a schedule that the script makes."""
    rows = RecordedSteps()
    behind("fp32", rows)
    model = network().bfloat16()
    torch.set_default_dtype(default)
    try:
        torch.optim.SGD(model.parameters(), lr=0.1)
        torch.optim.SGD(model.parameters(), lr=0.1)
    finally:
        torch.set_default_dtype(torch.float32)
    said = [note for note in rows.notes if "the default type of the script is bfloat16" in note]
    assert len(said) == (default is torch.bfloat16)


def test_the_script_stays_as_written(behind: Any) -> None:
    behind("script")
    assert {value.dtype for value in trained(network().bfloat16(), torch.bfloat16)} == {
        torch.bfloat16,
        torch.int64,
    }


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank update."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, dtype=base.weight.dtype)
        self.up = nn.Linear(2, base.out_features, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("arm", ARMS)
def test_adapters_over_a_frozen_base_train(behind: Any, arm: str) -> None:
    """Frozen weights keep their type, or follow an arm that casts the model; no module gets tensors of two types."""
    behind(arm)
    model = (
        nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
        .bfloat16()
        .requires_grad_(False)
    )
    model[0], model[3] = Adapted(model[0]), Adapted(model[3])  # type: ignore[arg-type]
    before = [param.detach().float() for param in model.parameters()]
    trained(model, torch.bfloat16)
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new.detach().float()) is not new.requires_grad
    if arm in ("fp32", "native:bf16"):
        assert {param.dtype for param in model.parameters() if not param.requires_grad} == {torch.bfloat16}
        assert {param.dtype for param in model.parameters() if param.requires_grad} == {torch.float32}


def test_what_is_thawed_later_is_lifted(behind: Any) -> None:
    behind("fp32")
    model = network().bfloat16()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for is_frozen in (True, False):
        model[0].requires_grad_(not is_frozen)
        optimizer.zero_grad()
        model(batch(0)[0].bfloat16()).sum().backward()
        optimizer.step()
        assert model[0].weight.dtype is (torch.bfloat16 if is_frozen else torch.float32)


def test_weights_that_are_cast_after_the_optimizer_was_made_are_lifted(behind: Any) -> None:
    """And so are those of a later group; a state that the optimizer has from the start is fp32."""
    behind("fp32")
    one, other = nn.Linear(6, 6), nn.Linear(6, 3).bfloat16()
    early = torch.optim.Adagrad(one.parameters(), lr=0.1)  # torch 2.6 makes no state for a later group
    late = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    one.half()
    late.add_param_group({"params": list(other.parameters())})
    other(one(batch(0)[0].half())).sum().backward()
    early.step()
    late.step()
    assert {param.dtype for param in (*one.parameters(), *other.parameters())} == {torch.float32}
    assert {state["sum"].dtype for state in early.state.values()} == {torch.float32}


def test_gradients_may_have_a_type_of_their_own(behind: Any) -> None:
    """`grad_dtype` of torch 2.13."""
    behind("fp32")
    model = nn.Linear(6, 3).bfloat16()
    if not hasattr(model.weight, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    model.weight.grad_dtype = torch.bfloat16
    trained(model, torch.bfloat16)
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is torch.float32


@pytest.mark.parametrize("arm", ["half:bf16", "native:bf16,weights=bf16"])
def test_an_arm_decides_in_which_type_gradients_are_accumulated(behind: Any, arm: str) -> None:
    behind(arm)
    model = nn.Linear(6, 3).bfloat16()
    if not hasattr(model.weight, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    model.weight.grad_dtype = torch.float32
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert optimizer.param_groups
    cross_entropy(model(batch(0)[0]).float(), batch(0)[1]).backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is torch.bfloat16


@pytest.mark.parametrize("arm", ["fp32", "native:bf16"])
def test_what_the_script_casts_outside_of_modules_is_explained(behind: Any, arm: str) -> None:
    stand_in = behind(arm)
    model = nn.Linear(6, 3).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = batch(0)[0].bfloat16()
    model(x)
    with pytest.raises(RuntimeError) as raised:
        nn.functional.linear(x, model.weight)
    assert "casts tensors to bfloat16 itself" in str(stand_in.find_refusal_of_error(raised.value))
    del optimizer


@pytest.mark.parametrize("arm", ["fp32", "native:bf16", "O2", "half:bf16"])
def test_a_step_with_masters_of_the_script_is_refused(behind: Any, arm: str) -> None:
    """It moves gradients and weights by itself: one master for each weight, or one for all."""
    behind(arm)
    model = network().half()
    optimizer = torch.optim.SGD(
        [torch.cat([param.detach().float().flatten() for param in model.parameters()])], lr=0.1
    )
    assert optimizer.param_groups
    with pytest.raises(
        UnsupportedCombination, match=r"test_lifted_weights\.py:\d+: .*fp32 masters of its own"
    ):
        model(batch(0)[0].half())


def of_2018() -> Any:
    from apex.contrib.optimizers.fp16_optimizer import FP16_Optimizer

    return FP16_Optimizer


def of_fp16_utils() -> Any:
    from apex.fp16_utils import FP16_Optimizer

    return FP16_Optimizer


@pytest.mark.parametrize("kind", [of_2018, of_fp16_utils])
@pytest.mark.parametrize("arm", ["fp32", "native:bf16", "O2"])
def test_a_script_with_fp16_optimizer_trains_as_one_without(
    behind: Any, arm: str, kind: Callable[[], Any]
) -> None:
    """Its loss scale and masters are the arm's to decide, and each step is recorded once, with the loss as it is."""
    behind(arm)
    expected = trained(network().half().float(), torch.float32)
    behind.end()
    rows = RecordedSteps()
    behind(arm, rows)
    model = network().half()
    optimizer = kind()(torch.optim.AdamW(model.parameters(), lr=0.01), dynamic_loss_scale=True)
    for step in range(4):
        x, y = batch(step)
        optimizer.zero_grad()
        optimizer.backward(cross_entropy(model(x.bfloat16()).float(), y))
        if hasattr(optimizer, "clip_master_grads"):
            optimizer.clip_master_grads(0.1)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    assert all(map(has_bits, [value.detach() for value in model.state_dict().values()], expected))
    if arm == "fp32":
        assert rows.steps == 4
        assert all(0.1 < loss < 10 for loss in rows.losses)


def test_a_mapping_keeps_its_type() -> None:
    """As the outputs of transformers, which half arms cast."""

    class Output(dict[str, Tensor]):
        def __getattr__(self, name: str) -> Tensor:
            return self[name]

    output = map_tensors_in_tree(
        Output(loss=torch.ones(1, dtype=torch.float16)), lambda tensor: tensor.float()
    )
    assert output.loss.dtype is torch.float32


@pytest.mark.parametrize("arm", ["fp32", "native:bf16", "O2", "half:bf16"])
@pytest.mark.parametrize("is_list", [False, True])
def test_an_average_that_was_copied_before_follows(behind: Any, arm: str, is_list: bool) -> None:
    """It keeps the type in which the script has copied it."""
    behind(arm)
    model = network().bfloat16()
    average = copy.deepcopy(model).requires_grad_(False)
    first = [param.clone() for param in average.parameters()]
    trained(model, torch.bfloat16)
    with torch.no_grad():
        if is_list:
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.5)
        else:
            for mean, param in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(param, 0.5)
    assert {mean.dtype for mean in average.parameters()} == {torch.bfloat16}
    assert not all(map(torch.equal, average.parameters(), first))


@pytest.mark.parametrize("arm", ["fp32", "native:bf16"])
def test_a_module_that_no_optimizer_trains_gets_inputs_of_its_type(behind: Any, arm: str) -> None:
    behind(arm)
    model, head = network().bfloat16(), nn.Linear(3, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = head(model(batch(0)[0].bfloat16())).float().square().mean()
    loss.backward()
    optimizer.step()
    assert (head.weight.dtype, next(model.parameters()).dtype) == (torch.bfloat16, torch.float32)


def test_a_frozen_norm_between_lifted_layers_gets_its_type(behind: Any) -> None:
    """Autocast leaves a norm alone, which takes no two types."""
    behind("native:bf16")
    model = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3)).bfloat16()
    model[1].requires_grad_(False)
    trained(model, torch.float32)
    assert [layer.weight.dtype for layer in model] == [torch.float32, torch.bfloat16, torch.float32]


@pytest.mark.slow
def test_a_compiled_model_gets_inputs_of_its_type(behind: Any) -> None:
    behind("fp32")
    model: Any = torch.compile(network().bfloat16(), backend="eager")
    trained(model, torch.bfloat16)
    assert {param.dtype for param in model.parameters()} == {torch.float32}


class Attention(nn.Module):
    """A trained query on a frozen value, whose product takes no two types."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.query, self.value = (
            nn.Linear(6, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 4).requires_grad_(False),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        query = self.query(x)
        return nn.functional.scaled_dot_product_attention(query, query, self.value(x))


def test_what_a_frozen_module_makes_has_the_type_of_what_it_got(behind: Any) -> None:
    behind("fp32")
    model = Attention().bfloat16()
    trained(model, torch.bfloat16)
    assert (model.value.weight.dtype, model.query.weight.dtype) == (torch.bfloat16, torch.float32)


def test_a_communication_hook_is_not_lost(behind: Any) -> None:
    """It belongs to a wrapper that is made again, since its buckets have the type of the weights."""
    behind("fp32")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(network().bfloat16())
        model.register_comm_hook(None, allreduce_hook)
        with pytest.raises(PreparationError, match="communication hook"):
            torch.optim.SGD(model.parameters(), lr=0.1)
    finally:
        torch.distributed.destroy_process_group()


def test_masters_of_apex_for_sparse_gradients_are_refused(behind: Any) -> None:
    """Their gradients are dense, as those of Apex."""
    stand_in = behind("O2")
    model = nn.Embedding(4, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    model(torch.arange(4)).square().mean().backward()
    with pytest.raises(RuntimeError, match="dense gradients") as caught:
        optimizer.step()
    assert "half:masters=fp32" in str(stand_in.find_refusal_of_error(caught.value))
