"""`amp.initialize`: options, shapes, what it does to models and optimizers, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampcompare.apex as apex
from ampcompare.apex import amp
from ampcompare.base.errors import AmpCompareError

LEVELS = ("O0", "O1", "O2", "O3")


def make(bn: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = (
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)) if bn else nn.Linear(4, 2)
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def start(level: str = "O2", **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = make(bn=True)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return model, optimizer


@pytest.mark.parametrize("level", LEVELS)
def test_return_shapes_and_identity(level: str) -> None:
    options: dict[str, Any] = {"opt_level": level, "verbosity": 0}
    model, _ = make()
    assert amp.initialize(model, **options) is model
    model, optimizer = make()
    assert amp.initialize(model, optimizer, **options) == (model, optimizer)
    models, optimizers = [make()[0], make()[0]], [make()[1]]
    got_models, got_optimizers = amp.initialize(models, optimizers, **options)
    assert got_models is models
    assert got_optimizers is optimizers
    model, _ = make()
    assert amp.initialize(model, [], **options) == (model, [])
    models = [make()[0]]
    assert amp.initialize(models, **options) is models


@pytest.mark.parametrize("level", LEVELS)
def test_disabled_returns_everything_untouched(level: str) -> None:
    """`enabled=False` checks and changes nothing, and scale_loss then yields the very loss."""
    assert amp.initialize("model", opt_level=level, enabled=False, verbosity=0) == "model"
    assert amp.initialize(1, (2,), opt_level="no level", enabled=False, verbosity=0) == (1, (2,))
    loss = torch.ones((), dtype=torch.float16)
    with amp.scale_loss(loss, None) as scaled:
        assert scaled is loss


PROPERTIES = {
    "O0": (torch.float32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (torch.float16, False, True, True, "dynamic"),
    "O3": (torch.float16, False, False, False, 1.0),
    "O4": (None, True, None, None, 1.0),
    "O5": (torch.bfloat16, False, True, True, 1.0),
}


@pytest.mark.parametrize("level", PROPERTIES)
def test_defaults_of_the_levels(level: str) -> None:
    """Each level sets the properties of Apex's table, O4 and O5 those of ROCm's `apex/amp/frontend.py`."""
    start(level)
    got = amp._amp_state.opt_properties
    names = (
        "cast_model_type",
        "patch_torch_functions",
        "keep_batchnorm_fp32",
        "master_weights",
        "loss_scale",
    )
    assert tuple(getattr(got, name) for name in names) == PROPERTIES[level]
    assert got.enabled is True
    assert got.opt_level == level


# None: legal everywhere; otherwise the levels that refuse it.
OVERRIDES = [
    ({"cast_model_type": torch.float16}, {"O1"}),
    ({"cast_model_type": torch.float32}, set()),
    ({"cast_model_type": False}, set()),
    ({"patch_torch_functions": True}, {"O0", "O2", "O3"}),
    ({"patch_torch_functions": False}, set()),
    ({"keep_batchnorm_fp32": True}, {"O1"}),
    ({"keep_batchnorm_fp32": False}, {"O1"}),
    ({"keep_batchnorm_fp32": "True"}, {"O1"}),
    ({"keep_batchnorm_fp32": "False"}, {"O1"}),
    ({"master_weights": True}, {"O1"}),
    ({"master_weights": False}, {"O1"}),
    ({"loss_scale": 128}, set()),
    ({"loss_scale": "128.0"}, set()),
    ({"loss_scale": "dynamic"}, set()),
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "override, refused",
    OVERRIDES,
    ids=lambda value: str(sorted(value)) if isinstance(value, set) else str(value),
)
def test_override_legality(level: str, override: dict[str, Any], refused: set[str]) -> None:
    """Each level takes and refuses the overrides of Apex's table; `hard_override` turns a refusal into a print."""
    if level not in refused:
        start(level, **override)
        return
    with pytest.raises(RuntimeError) as caught:
        start(level, **override)
    assert isinstance(caught.value, AmpCompareError)
    amp._amp_state.hard_override = True
    start(level, **override)


@pytest.mark.parametrize("level", ["01", "o1", None, "O6", 1])
def test_unknown_levels_are_refused(level: Any) -> None:
    """A level that is not one of four strings is a RuntimeError that speaks of the letter O."""
    model, optimizer = make()
    with pytest.raises(RuntimeError, match="letter O"):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)


@pytest.mark.parametrize("options, error", [
    ({"keep_batchnorm_fp32": "true"}, AssertionError),
    ({"keep_batchnorm_fp32": 1}, AssertionError),
    ({"loss_scale": "Dynamic"}, ValueError),
    ({"max_loss_scale": None}, TypeError),
])  # fmt: skip
def test_bad_values(options: dict[str, Any], error: type[Exception]) -> None:
    """Values that Apex does not parse raise its exceptions."""
    with pytest.raises(error):
        start("O2", **options)


def test_bad_models_and_optimizers() -> None:
    """Tuples, strings and wrapped or half models are refused with Apex's exception types."""
    model, optimizer = make()
    for arguments in [((model,), optimizer), (model, (optimizer,)), ("model", optimizer), (model, 3)]:
        with pytest.raises(TypeError):
            amp.initialize(*arguments, opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError, match="AFTER"):
        amp.initialize(nn.DataParallel(model), optimizer, opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError, match=r"\.half\(\)"):
        amp.initialize(nn.Linear(2, 2).half(), opt_level="O2", verbosity=0)
    amp._amp_state.allow_incoming_model_not_fp32 = True
    amp.initialize(nn.Linear(2, 2).half(), opt_level="O2", verbosity=0)
    FP16_Optimizer = type("FP16_Optimizer", (), {})
    with pytest.raises(RuntimeError, match="FP16_Optimizer"):
        amp.initialize(model, [FP16_Optimizer()], opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError, match="FP16_Optimizer"):
        amp.initialize(model, FP16_Optimizer(), opt_level="O2", verbosity=0)


def test_apex_parallel_wrapper_is_refused_unless_strict() -> None:
    """A model inside Apex's own DDP is refused; Apex, and strict mode, let it pass (deviation 1)."""
    wrapper = type("DistributedDataParallel", (nn.Module,), {})
    with pytest.raises(RuntimeError, match="AFTER"):
        amp.initialize(wrapper(), opt_level="O0", verbosity=0)
    amp.initialize(wrapper(), opt_level="O0", verbosity=0, strict=True)


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_is_prepared_once(level: str) -> None:
    """A second initialize of one optimizer, or a clash with one of amp's names, is a RuntimeError."""
    model, optimizer = start(level)
    with pytest.raises(RuntimeError, match="before"):
        amp.initialize(nn.Linear(2, 2), optimizer, opt_level=level, verbosity=0)
    model, optimizer = make()
    optimizer._amp_lazy_init = None  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="_amp_lazy_init"):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)


def test_a_refused_call_leaves_the_session_alone() -> None:
    """After an error the options of the earlier session are still in force."""
    start("O2")
    before = amp._amp_state.opt_properties
    with pytest.raises(RuntimeError):
        start("O1", master_weights=True)
    assert amp._amp_state.opt_properties is before


def test_deprecation_warnings() -> None:
    """initialize and the decorators emit DeprecatedFeatureWarning, a FutureWarning; the rest does not."""
    assert issubclass(apex.DeprecatedFeatureWarning, FutureWarning)
    model, optimizer = make()
    with pytest.warns(apex.DeprecatedFeatureWarning):
        amp.initialize(model, optimizer, enabled=False, verbosity=0)
    for decorate in (amp.half_function, amp.float_function, amp.promote_function):
        with pytest.warns(apex.DeprecatedFeatureWarning):
            decorate(torch.relu)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.register_half_function(torch, "relu")
        amp.init()


def test_banner(capsys: pytest.CaptureFixture[str]) -> None:
    """The options are printed in Apex's words, and not at all at verbosity 0."""
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=128)
    out = capsys.readouterr().out.splitlines()
    assert (
        out[0]
        == "Selected optimization level O2:  FP16 training with FP32 batchnorm and FP32 master weights."
    )
    assert "Defaults for this optimization level are:" in out
    assert "Processing user overrides (additional kwargs that are not None)..." in out
    after = out.index("After processing overrides, optimization options are:")
    assert out[after + 1 :] == [
        "enabled                : True",
        "opt_level              : O2",
        "cast_model_type        : torch.float16",
        "patch_torch_functions  : False",
        "keep_batchnorm_fp32    : True",
        "master_weights         : True",
        "loss_scale             : 128.0",
    ]
    start("O2")
    assert capsys.readouterr().out == ""


def test_casting_of_a_model() -> None:
    """O2 keeps affine batch norms fp32 and casts the rest; O3 casts all; parameters stay the same objects."""
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), nn.LayerNorm(4)
    )
    model.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
    model.register_buffer("wide", torch.zeros(1, dtype=torch.float64))
    identities = [id(p) for p in model.parameters()]
    other = copy.deepcopy(model)
    amp.initialize(model, opt_level="O2", verbosity=0)
    half, full = torch.float16, torch.float32
    assert [model[0].weight.dtype, model[1].weight.dtype, model[1].running_mean.dtype] == [half, full, full]
    assert [model[2].running_mean.dtype, model[3].weight.dtype] == [half, half]
    assert [model.steps.dtype, model.wide.dtype] == [torch.int64, half]
    assert [id(p) for p in model.parameters()] == identities
    amp.initialize(other, opt_level="O3", verbosity=0)
    assert other[1].weight.dtype == other[1].running_mean.dtype == half


def test_state_dict_with_extra_state() -> None:
    """A module with extra state that is not a tensor can be saved (Apex raises)."""

    class Counting(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"seen": 3}

        def set_extra_state(self, state: Any) -> None:
            assert state == {"seen": 3}

    model = Counting(2, 2)
    amp.initialize(model, opt_level="O3", verbosity=0)
    state = model.state_dict()
    assert state["_extra_state"] == {"seen": 3}
    model.load_state_dict(state)


Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass(frozen=True)
class Sample:
    """A dataclass as an input; its last field is one that Apex's rules would not survive."""

    x: Any
    rest: Any
    late: Any = dataclasses.field(init=False, repr=False)


@dataclasses.dataclass
class Output(UserDict[str, Any]):
    """Like the outputs of transformers: its entries are its attributes too."""

    x: Any = None

    def __post_init__(self) -> None:
        super().__init__(x=self.x)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value


class Words:
    """An iterable that cannot be made from a list."""

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])


class Echo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = args, kwargs
        return kwargs.get("give", args[0] if args else None)


class Batch:
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype

    def to(self, dtype: torch.dtype) -> Batch:
        return Batch(dtype)


def test_inputs_and_outputs_are_cast() -> None:
    """Tensors are cast wherever they hide, by Apex's rules; outputs come back as fp32."""
    np = pytest.importorskip("numpy")
    model = Echo()
    amp.initialize(model, opt_level="O2", verbosity=0)
    x, i, array = torch.ones(2), torch.ones(2, dtype=torch.int64), np.ones(2)
    half = torch.float16
    model([x, i], (x,), "text", array, None, 2.5, Batch(), {"k": x}, key=x, size=torch.Size([2]))
    args, kwargs = model.seen
    assert [args[0][0].dtype, args[0][1].dtype, args[1][0].dtype] == [half, torch.int64, half]
    assert type(args[0]) is list
    assert args[2:6] == ("text", array, None, 2.5)
    assert args[6].dtype == half
    assert args[7]["k"].dtype == kwargs["key"].dtype == half
    assert kwargs["size"] == torch.Size([2])
    out = model(give=OrderedDict(y=x.half(), z=(x.half(), i)))
    assert type(out) is dict
    assert [out["y"].dtype, out["z"][0].dtype, out["z"][1].dtype] == [
        torch.float32,
        torch.float32,
        torch.int64,
    ]
    assert model(x).dtype == torch.float32


def test_named_tuples_ranges_and_iterators() -> None:
    """Named tuples, ranges and iterators go through a cast model (Apex raises TypeError)."""
    model = Echo()
    amp.initialize(model, opt_level="O2", verbosity=0)
    x = torch.ones(2)
    model(Pair(x, 1), range(3), (v for v in [x, x]))
    args, _ = model.seen
    assert type(args[0]) is Pair
    assert args[0].a.dtype == torch.float16
    assert args[1] == range(3)
    assert [v.dtype for v in args[2]] == [torch.float16] * 2


def test_dataclasses_are_cast_wherever_they_hide() -> None:
    """In containers and in each other, in copies; what has no floating tensor is passed as it is; strict as in Apex."""
    model = Echo()
    amp.initialize(model, opt_level="O2", verbosity=0)
    x, words = torch.ones(2), Words()
    sample, settings = Sample(x, [Sample({"k": (x,)}, words)]), Sample(1, words)
    given = model([sample], (sample, settings), {"k": sample}, Sample, key=sample, give=sample)
    args, kwargs = model.seen
    for seen in (args[0][0], args[1][0], args[2]["k"], kwargs["key"]):
        assert type(seen) is Sample
        assert (seen.x.dtype, seen.rest[0].x["k"][0].dtype) == (torch.float16, torch.float16)
        assert seen.rest[0].rest is words
    assert args[1][1] is settings
    assert args[3] is Sample
    assert (sample.x.dtype, sample.rest[0].x["k"][0].dtype) == (torch.float32, torch.float32)
    assert given.x.dtype == torch.float16  # outputs that are no tensors stay as they are
    model(Output([sample]))
    (output,), _ = model.seen
    assert output.x is output["x"]
    assert (type(output), output.x[0].x.dtype) == (Output, torch.float16)
    amp._amp_state.strict = True
    model([sample])
    assert model.seen[0][0][0] is sample


@pytest.mark.parametrize("level", LEVELS)
def test_cast_model_outputs(level: str) -> None:
    """`cast_model_outputs` decides the dtype of outputs at every level."""
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level=level, cast_model_outputs=torch.float64, verbosity=0)
    assert model(torch.ones(3, 4)).dtype == torch.float64


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_copies_run_their_own_weights(level: str) -> None:
    """Deep copies, pickled copies and DataParallel replicas of a cast model use their own parameters (deviation 26)."""
    model, _ = make()
    amp.initialize(model, opt_level=level, verbosity=0)
    x = torch.ones(3, 4)
    before = model(x)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model._replicate_for_data_parallel()]
    copies.append(copy.deepcopy(copies[0]))
    for twin in copies:
        if twin is not copies[2]:
            with torch.no_grad():
                for param in twin.parameters():
                    param.zero_()
            assert torch.equal(twin(x), torch.zeros(3, 2))
            assert twin(x).dtype == torch.float32
        else:
            twin.weight, twin.bias = torch.zeros_like(model.weight), torch.zeros_like(model.bias)
            assert torch.equal(twin(x), torch.zeros(3, 2))
    assert torch.equal(model(x), before)


def test_signature_of_a_cast_model() -> None:
    """Tools that inspect `model.forward` see the model's own signature."""
    import inspect

    model = nn.Linear(2, 2)
    amp.initialize(model, opt_level="O2", verbosity=0)
    assert list(inspect.signature(model.forward).parameters) == ["input"]


def test_o0_after_o1_computes_in_float() -> None:
    """A model prepared for O0 while O1's patches are in force runs without them (deviation 16)."""
    start("O1")
    model = nn.Linear(4, 2)
    amp.initialize(model, opt_level="O0", verbosity=0)
    x = torch.full((1, 4), 1.0001)
    assert torch.equal(model(x), torch._C._nn.linear(x, model.weight, model.bias))
    assert F.linear(x, model.weight).dtype == torch.float16


def test_optimizer_state_takes_the_dtype_of_its_parameters() -> None:
    """O3 casts momentum to half; O2 keeps it in fp32 for the masters, unless strict (deviation 5)."""
    for level, strict, expected in [
        ("O3", False, torch.float16),
        ("O2", False, torch.float32),
        ("O2", True, torch.float16),
    ]:
        model, optimizer = make()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, strict=strict)
        assert optimizer.state[model.weight]["momentum_buffer"].dtype == expected


def test_group_dicts_stay_the_same_objects() -> None:
    """A group fetched before initialize stays the optimizer's group (deviation 27); strict replaces it."""
    for strict in (False, True):
        model, optimizer = make()
        group = optimizer.param_groups[0]
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0, strict=strict)
        optimizer.zero_grad()
        assert (optimizer.param_groups[0] is group) is not strict


def test_second_initialize_tells_of_lost_scales(capsys: pytest.CaptureFixture[str]) -> None:
    """When a second call replaces scalers that have moved, it says so."""
    start("O2")
    amp._amp_state.loss_scalers[0]._loss_scale = 8.0
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O2")
    assert "are reset" in capsys.readouterr().out


def test_strict_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`AMPCOMPARE_APEX_STRICT=1` turns strict mode on where the argument is not given."""
    start("O2")
    assert amp._amp_state.strict is False
    monkeypatch.setenv("AMPCOMPARE_APEX_STRICT", "1")
    start("O2")
    assert amp._amp_state.strict is True
    start("O2", strict=False)
    assert amp._amp_state.strict is False
