"""The settings of a run: what is checked when they are built, and how each mistake is named."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from pydantic import BaseModel

from ampcompare.base.errors import ConfigError
from ampcompare.settings.config import NON_NUMERIC_SETTINGS, RunConfig, settings_digest
from ampcompare.settings.recipe import OptimizerConfig, Recipe
from ampcompare.settings.validation import build_validated_model


def _nested(place: str, value: Any) -> dict[str, Any]:
    for name in reversed(place.split(".")):
        value = {name: value}
    return value  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("recipe.epochs", 0, "recipe.epochs: must be at least 1 (seen: 0)"),
        ("recipe.optimizer.lr", float("nan"), "recipe.optimizer.lr: must be a finite number (seen: nan)"),
        (
            "recipe.optimizer.name",
            "sdg",
            "recipe.optimizer.name: there is no optimizer 'sdg': did you mean 'sgd'? known are sgd, adam, adamw, ",
        ),
        (
            "device",
            "gpu",
            "device: device 'gpu' is unknown; use auto, cpu, cuda, mps, xpu, or one with an index such "
            "as cuda:1 (seen: 'gpu')",
        ),
        ("device", "cuda:x", "device 'cuda:x' is unknown"),
        ("arm", "apex:02", "write O2"),
        (
            "eval_precision",
            "fp32,int8",
            "no precision 'int8' to evaluate in; choose from fp32, bf16, fp16, float64, ",
        ),
        ("on_nan", "ignore", "known are stop, continue, skip, rollback, fallback:ARM (seen: 'ignore')"),
        ("recipe.optimizer", 3, "recipe.optimizer: it is a group of settings, name, lr, momentum"),
        ("recipe.data.name", ["x" * 9999], "recipe.data.name: must be a string (seen: ['xxx"),
    ],
)
def test_a_bad_value_is_named_and_shown(place: str, value: Any, message: str) -> None:
    """A value out of range is refused in one short line with its place, what was seen, and what is taken."""
    with pytest.raises(ConfigError) as caught:
        build_validated_model(RunConfig, _nested(place, value))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_batch_that_cannot_be_cut() -> None:
    """Micro-batches are equal, so their number must divide the batch."""
    with pytest.raises(ConfigError, match="batch size 10 cannot be cut into 4 equal micro-batches"):
        build_validated_model(Recipe, {"batch_size": 10, "grad_accum_steps": 4})


@pytest.mark.parametrize("values", [{"momentum": 0.0}, {"name": "adam"}])
def test_nesterov_needs_momentum(values: dict[str, Any]) -> None:
    """Nesterov without momentum, or with another optimizer, is refused as torch would refuse it later."""
    with pytest.raises(ConfigError, match="nesterov needs an optimizer such as sgd, with a momentum above 0"):
        build_validated_model(OptimizerConfig, {"nesterov": True, **values})


def test_the_arm_is_canonical() -> None:
    """Two ways to write an arm give equal configurations, and so one cell."""
    one, other = RunConfig(arm="native"), RunConfig(arm="native:float16")
    assert one == other
    assert one.digest() == other.digest()


OTHER_VALUES: dict[str, Any] = {
    "recipe.data.name": "mnist", "recipe.data.dir": "there", "recipe.model.arch": "mlp",
    "recipe.model.args": {"width": 3}, "recipe.optimizer.name": "adam", "recipe.optimizer.args": {"dampening": 0.1},
    "recipe.optimizer.momentum": 0.5, "recipe.optimizer.betas": (0.8, 0.9),
    "recipe.optimizer.groups": [{"match": "head.*", "lr_factor": 10}], "recipe.optimizer.layer_lr": "larc",
    "recipe.optimizer.implementation": "fused", "recipe.optimizer.lr_rule": "sqrt", "recipe.schedule.name": "step",
    "recipe.label_smoothing": 0.5, "recipe.ema_decay": 0.5, "recipe.target": 90, "recipe.task": "module:factory",
    "script": {"name": "train.py"},
    "stack": {"name": "old", "command": ["python"]}, "eval_precision": "bf16", "recipe.tta": "flips",
    "recipe.compile": "inductor",
    "pin_memory": False, "arm": "half", "device": "cpu", "cpu_half": "native", "on_nan": "continue", "tf32": "off",
    "guards": "off", "autocast_lists": "cpu", "first_weights": "twin", "allow_writes": ("out",),
    "parallel.kind": "ddp", "parallel.sync_bn": "apex", "parallel.backend": "gloo", "launcher": "spawn",
    "saving.format": "sharded", "saving.weights_format": "safetensors", "saving.resume": "auto",
}  # fmt: skip
# Settings that need a kind of replicas, with one that takes them.
KINDS = {
    "parallel.sync_bn": "ddp", "parallel.bucket_cap_mb": "ddp", "parallel.delay_allreduce": "apex-ddp",
    "parallel.find_unused_parameters": "ddp",
}  # fmt: skip


def _changes(model: BaseModel, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting with a value other than its default."""
    for name in type(model).model_fields:
        value, place = getattr(model, name), above + name
        if isinstance(value, BaseModel):
            yield from _changes(value, f"{place}.")
        elif place in OTHER_VALUES:
            yield place, OTHER_VALUES[place]
        elif isinstance(value, bool):
            yield place, not value
        else:
            yield place, 2 if value is None else 2 * value + 2


CHANGES = dict(_changes(RunConfig()))


@cache
def _name_of_kind(kind: str) -> str:
    """Return the name of the cell that has every default, but for the kind of its parallelism."""
    return build_validated_model(RunConfig, _nested("parallel.kind", kind) if kind else {}).digest()


@pytest.mark.parametrize("place", CHANGES)
def test_any_setting_makes_another_cell(place: str) -> None:
    """The name changes with each setting that has an effect, so that no record is taken for another's."""
    values = _nested(place, CHANGES[place])
    if place in KINDS:
        values.setdefault("parallel", {})["kind"] = KINDS[place]
    changed = build_validated_model(RunConfig, values).digest() != _name_of_kind(KINDS.get(place, ""))
    assert changed != (place.partition(".")[0] in NON_NUMERIC_SETTINGS)


def test_the_name_of_a_cell_is_stable() -> None:
    """The same settings, written out or left at their defaults, name the same cell."""
    assert RunConfig().digest() == RunConfig.model_validate(RunConfig().model_dump(mode="json")).digest()
    assert len(RunConfig().digest()) == 12
    assert RunConfig().digest() == "4df56dc61c50", "records of the first version are no longer found"


def test_precisions_to_evaluate_in_have_one_name() -> None:
    """Text with synonyms gives canonical names in order, which a record holds; none leave the name of the cell."""
    config = build_validated_model(RunConfig, {"eval_precision": "half,bfloat16,,double,autocast:float16"})
    assert config.eval_precision == ("fp16", "bf16", "float64", "autocast:fp16")
    assert build_validated_model(RunConfig, config.model_dump(mode="json")) == config
    assert (
        build_validated_model(RunConfig, {"eval_precision": ""}).digest()
        == RunConfig().digest()
        != config.digest()
    )


def test_an_older_name_of_a_setting_names_the_same_cell() -> None:
    """A file that calls the target by its older name is read, and its cell keeps its digest."""
    old = RunConfig.model_validate({"recipe": {"target_top1": 97.0, "early_stop": 2}})
    assert old.recipe.target == 97.0
    assert old.digest() == "d604d8175495"


def _with(processes: int, **recipe: Any) -> dict[str, Any]:
    return {"processes": processes, "recipe": recipe}


def test_several_processes_share_gradients() -> None:
    """Several processes train by ddp unless told otherwise, and not as replicas that know nothing of each other."""
    assert build_validated_model(RunConfig, {"processes": 2}).parallel.kind == "ddp"
    assert (
        build_validated_model(RunConfig, {"processes": 2, "parallel": {"kind": "apex-ddp"}}).parallel.kind
        == "apex-ddp"
    )
    assert build_validated_model(RunConfig, {}).parallel.kind == "none"
    for kind in ("none", "dp"):
        with pytest.raises(ConfigError, match=f"2 processes with parallel kind {kind} would not share"):
            build_validated_model(RunConfig, {"processes": 2, "parallel": {"kind": kind}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sync_bn": "apex"}, "sync_bn is for kind ddp and apex-ddp, but the kind is none"),
        ({"kind": "dp", "bucket_cap_mb": 1}, "bucket_cap_mb is for kind ddp and apex-ddp"),
        ({"kind": "ddp", "delay_allreduce": True}, "delay_allreduce is for kind apex-ddp"),
        ({"kind": "apex-ddp", "find_unused_parameters": True}, "find_unused_parameters is for kind ddp"),
        ({"kind": "apex-ddp", "delay_allreduce": True, "bucket_cap_mb": 1}, "so bucket_cap_mb has no effect"),
    ],
)
def test_options_of_another_kind(values: dict[str, Any], message: str) -> None:
    """An option that the kind of replicas does not take is refused."""
    with pytest.raises(ConfigError, match=message):
        build_validated_model(RunConfig, {"parallel": values})


def test_the_total_batch() -> None:
    """The total batch gives that of each process; both may stand together where they agree, as in a record."""
    config = build_validated_model(RunConfig, _with(4, global_batch_size=32))
    assert (config.recipe.batch_size, config.samples_per_update) == (8, 32)
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config
    with pytest.raises(ConfigError, match="a total batch of 33 cannot be split over 4 processes"):
        build_validated_model(RunConfig, _with(4, global_batch_size=33))
    with pytest.raises(ConfigError, match="is 8 for each, but batch_size is 16; give only one of them"):
        build_validated_model(RunConfig, _with(4, global_batch_size=32, batch_size=16))


@pytest.mark.parametrize(("rule", "lr"), [("linear", 0.2), ("sqrt", 0.1 * 2**0.5)])
def test_the_learning_rate_follows_the_total_batch(rule: str, lr: float) -> None:
    """The rate at a base batch gives that of the total batch, by the rule; both may stand together in a record."""
    optimizer = {"lr_base": 0.1, "lr_base_batch": 64, "lr_rule": rule}
    config = build_validated_model(RunConfig, _with(2, batch_size=64, optimizer=optimizer))
    assert config.recipe.optimizer.lr == pytest.approx(lr)
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config
    with pytest.raises(
        ConfigError,
        match=r"lr_base 0.1 gives lr .* for a total batch of 128, but lr is 3; give only "
        r"one",
    ):
        build_validated_model(RunConfig, _with(2, batch_size=64, optimizer={**optimizer, "lr": 3}))


def test_an_arm_in_shards_is_its_own_kind() -> None:
    """Whatever the number of processes; another kind is refused."""
    for processes in (1, 2):
        config = build_validated_model(RunConfig, {"arm": "fsdp:bf16", "processes": processes})
        assert (config.arm, config.parallel.kind) == ("fsdp:bf16", "fsdp")
    with pytest.raises(
        ConfigError, match="fsdp:bf16 uses parallel kind fsdp, but the kind given is ddp; leave the kind"
    ):
        build_validated_model(RunConfig, {"arm": "fsdp:bf16", "parallel": {"kind": "ddp"}})


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("apex:O2", "Apex keeps masters .* fsdp is the successor of O2"),
        ("half", "sharded fp16 weights have neither masters nor a loss scale; use fsdp:fp16"),
        ("half:bf16,masters=fp32", "master_weights needs whole weights"),
        ("native:bf16,weights=bf16", "its optimizer steps its own tensors"),
        ("fp8", "its backend does not support sharded weights"),
    ],
)
def test_arms_that_need_whole_weights(arm: str, message: str) -> None:
    """Arms that hold or check whole tensors are refused with the reason."""
    with pytest.raises(ConfigError, match=f"cannot be combined with parallel kind fsdp: .*{message}"):
        build_validated_model(RunConfig, {"arm": arm, "parallel": {"kind": "fsdp"}})


@pytest.mark.parametrize(
    "values",
    [
        {"recipe": {"ema_decay": 0.9}},
        {"recipe": {"compile": "eager"}},
        {"recipe": {"optimizer": {"layer_lr": "lars"}}},
        {"recipe": {"optimizer": {"skip_on_device": True}}},
        {"on_nan": "rollback"},
    ],
)
def test_settings_that_need_whole_weights(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="whole weights, but fsdp shards them"):
        build_validated_model(RunConfig, {**values, "parallel": {"kind": "fsdp"}})


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (
            {"arm": "apex:O2"},
            "apex:O2 does not run on xpu: Apex, and the engine that reproduces it, support",
        ),
        (
            {"arm": "fp8:rowwise"},
            "fp8:rowwise does not run on xpu: its backend supports CPUs and CUDA GPUs only",
        ),
        ({"arm": "fp32:tf32"}, "does not run on xpu: TF32 exists on NVIDIA GPUs only"),
        (
            {"arm": "native:bf16", "processes": 2},
            "2 processes share their gradients on a CPU or on GPUs of CUDA only",
        ),
        (
            {"arm": "native:bf16", "parallel": {"kind": "fsdp"}},
            "parallel kind fsdp works on a CPU or on GPUs of CUDA",
        ),
        (
            {"recipe": {"optimizer": {"skip_on_device": True}}},
            "skip_on_device skips steps on a CPU or on GPUs of CUDA",
        ),
    ],
)
def test_what_needs_more_than_torch_is_refused_on_another_accelerator(
    values: dict[str, Any], why: str
) -> None:
    """Each refusal says which part of the settings is at home elsewhere."""
    with pytest.raises((ConfigError, ValueError)) as caught:
        RunConfig.model_validate({"device": "xpu:1", **values})
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("place", "hint"),
    [
        ("recipe.epohcs", "did you mean 'recipe.epochs'?"),
        ("recipee.epochs", "there is no setting 'recipee' (did you mean 'recipe'?)"),
        ("epochs", "did you mean 'recipe.epochs'?"),
        ("optimizer.lr", "there is no setting 'optimizer' (did you mean 'recipe.optimizer'?)"),
        ("recipe.optimizer.learning_rate", "known in recipe.optimizer are name, lr, momentum"),
        ("qqq", "known are recipe, arm, processes"),
    ],
)
def test_an_unknown_setting_gives_the_nearest(place: str, hint: str) -> None:
    """A mistyped or misplaced key is an error that names the setting that was meant, or those that there are."""
    group, _, name = place.rpartition(".")
    values: dict[str, Any] = {name: 3}
    for above in filter(None, reversed(group.split("."))):
        values = {above: values}
    with pytest.raises(ConfigError) as caught:
        build_validated_model(RunConfig, values)
    assert "there is no setting" in str(caught.value)
    assert hint in str(caught.value)


def test_all_mistakes_are_told_at_once() -> None:
    """Two mistakes are two parts of one message."""
    with pytest.raises(ConfigError) as caught:
        build_validated_model(RunConfig, {"recipe": {"epochs": 0}, "devcie": "cpu"})
    assert "recipe.epochs" in str(caught.value)
    assert "'devcie'" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "former"),
    [
        ({"arm": "native:fp16"}, "cpu"),
        ({"arm": "native:fp16", "device": "cuda"}, "cuda"),
        ({"arm": "accelerate:fp16", "device": "cpu"}, "cpu"),
        ({"arm": "apex:O1"}, "cuda"),
        ({"arm": "fp32"}, "cuda"),
        ({"arm": "fp32", "eval_precision": "autocast:bf16"}, "cpu"),
        ({"arm": "script", "script": {"name": "train.py"}}, "cpu"),
        ({"arm": "apex:O2", "script": {"name": "train.py"}}, "cuda"),
    ],
)
def test_a_digest_changes_where_autocast_casts_otherwise_than_before(
    values: dict[str, Any], former: str
) -> None:
    """Settings from before `autocast_lists` are those with the lists that acted then."""
    older = RunConfig.model_validate(values).model_dump(mode="json")
    del older["autocast_lists"]
    digests = {
        lists: RunConfig.model_validate({**values, "autocast_lists": lists}).digest()
        for lists in ("cuda", "cpu")
    }
    assert digests["cuda"] != digests["cpu"]
    assert digests[former] == settings_digest(older)
