"""A recipe: all that must be equal for two arms to be compared, as frozen data with JSON Schema for editors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ampcompare.base.errors import ConfigError
from ampcompare.base.files.read import check_json_compatible
from ampcompare.settings.optimizers import canonical_optimizer_name

DEFAULT_TASK = "classification"
# of a task from elsewhere, which chooses both itself
OWN = {"data": {"name": "task"}, "model": {"arch": "task"}}
DEFAULTS: dict[str, dict[str, Any]] = {
    DEFAULT_TASK: {},
    "lm": {
        "data": {"name": "grammar"},
        "model": {"arch": "gpt"},
        "optimizer": {"name": "adamw", "lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1},
        "epochs": 5,
        "batch_size": 32,
        "clip_grad": 1.0,
    },
    "segmentation": {
        "data": {"name": "shapes"},
        "model": {"arch": "unet"},
        "optimizer": {"name": "adamw", "lr": 5e-3},
        "epochs": 12,
        "batch_size": 32,
    },
    "detection": {
        "data": {"name": "shapes"},
        "model": {"arch": "centernet"},
        "optimizer": {"name": "adamw", "lr": 5e-3},
        "epochs": 20,
        "batch_size": 32,
    },
    "gan": {
        "data": {"name": "gaussians"},
        "model": {"arch": "mlp"},
        "optimizer": {"name": "adam", "lr": 2e-3, "betas": (0.5, 0.99), "weight_decay": 0.0},
        "epochs": 48,
        "batch_size": 128,
    },
    "regression": {
        "data": {"name": "diabetes"},
        "model": {"arch": "mlp"},
        "optimizer": {"name": "adamw", "lr": 3e-3, "weight_decay": 0.1},
        "epochs": 30,
        "batch_size": 32,
    },
}
# A given value invalidates a default that determines the same quantity in another way.
RIVALS = {("optimizer", "lr"): ("optimizer", "lr_base"), ("batch_size",): ("global_batch_size",)}
OLDER_TARGET = "target_top1"  # what `target` was called where top-1 was the only metric
# Arguments that an optimizer takes from settings alone.
OWN_SETTINGS = {
    "params": "groups",
    "lr": "lr",
    "weight_decay": "weight_decay",
    "foreach": "implementation",
    "fused": "implementation",
}


def with_task_defaults(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe with the defaults of its task for those that are not given."""
    task = recipe.get("task", DEFAULT_TASK)
    filled = copy.deepcopy(dict(recipe))
    if not isinstance(task, str):
        return filled
    _fill_defaults(filled, DEFAULTS.get(task, OWN), recipe, ())
    return filled


def _fill_defaults(
    values: dict[str, Any],
    defaults: Mapping[str, Any],
    given_settings: Mapping[str, Any],
    path: tuple[str, ...],
) -> None:
    for name, default in defaults.items():
        here = (*path, name)
        if isinstance(default, Mapping):
            group = values.get(name, {})
            if hasattr(group, "model_fields_set"):
                group = {field: getattr(group, field) for field in group.model_fields_set}
            # What belongs to the task's own optimizer or network means nothing to another one.
            kind = next((field for field in ("name", "arch") if field in default), "")
            is_other = isinstance(group, Mapping) and group.get(kind, default.get(kind)) != default.get(kind)
            if isinstance(group, Mapping) and not is_other:
                values[name] = dict(group)
                _fill_defaults(values[name], default, given_settings, here)
        elif name not in values and not _is_path_given(given_settings, RIVALS.get(here, ())):
            values[name] = default


def _is_path_given(values: Any, path: tuple[str, ...]) -> bool:
    for name in path:
        values = values.get(name) if isinstance(values, Mapping) else getattr(values, name, None)
    return bool(path) and values is not None


PositiveInt = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class FrozenSettings(BaseModel):
    """Frozen settings that refuse unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class DataConfig(FrozenSettings):
    """Which samples are used for training, and how they are preprocessed."""

    name: str = Field(
        "digits",
        description="digits, synthetic, mnist, fashion-mnist, cifar10, cifar100, imagefolder[:PATH], hf:PATH_OR_NAME "
        "or module:factory",
    )
    dir: str | None = Field(None, description="folder of downloaded sets, or of imagefolder without a path")
    download: bool = Field(False, description="fetch a torchvision set that is not in the folder")
    image_size: PositiveInt | None = Field(
        None, description="height and width in pixels that images are resized to"
    )
    train_size: PositiveInt | None = Field(None, description="limit the number of training samples")
    val_size: PositiveInt | None = Field(None, description="limit the number of validation samples")
    sequence_length: PositiveInt | None = Field(None, description="tokens per text sample")
    augment: bool = Field(True, description="random shifts, crops and flips, as each set defines them")


class ModelConfig(FrozenSettings):
    """Which network is trained."""

    arch: str = Field(
        "convnet", description="convnet, mlp, transformer, any torchvision classifier, or module:factory"
    )
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the network")

    @field_validator("args")
    @classmethod
    def _require_plain_args(cls, args: dict[str, Any]) -> dict[str, Any]:
        check_json_compatible(args)
        return args


class GroupConfig(FrozenSettings):
    """Parameters with a learning rate or weight decay of their own."""

    match: str = Field(
        description="pattern of parameter names, such as head.* or *.weight; the first that fits counts"
    )
    lr_factor: Positive = Field(1.0, description="factor on the learning rate")
    weight_decay: NonNegative | None = Field(None, description="in place of the optimizer's")


class OptimizerConfig(FrozenSettings):
    """Which optimizer updates the weights."""

    name: str = Field(
        "sgd",
        description="sgd, adam, adamw, fused_adam, ... (see `list optimizers`), torch.optim.CLASS or module:Class",
    )
    lr: Positive = Field(0.05, description="base learning rate")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.9, description="momentum, where the optimizer has one"
    )
    nesterov: bool = Field(False, description="Nesterov momentum, where the optimizer has it")
    weight_decay: NonNegative = Field(1e-4, description="weight decay of parameters without their own")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: NonNegative = Field(1e-8, description="term in the denominator of adam, adamw and their relatives")
    norm_weight_decay: NonNegative | None = Field(None, description="weight decay of normalization layers")
    bias_weight_decay: NonNegative | None = Field(
        None, description="weight decay of biases outside normalization layers"
    )
    groups: tuple[GroupConfig, ...] = Field(
        (), description="list of match, lr_factor and weight_decay, in order"
    )
    layer_lr: Literal["none", "larc", "lars"] = Field(
        "none",
        description="layer-wise learning rates by the norms of weight and gradient; larc: at most the base rate",
    )
    trust_coefficient: Positive = Field(0.02, description="trust coefficient of LARC and LARS")
    implementation: Literal["default", "for-loop", "foreach", "fused"] = Field(
        "default",
        description="how the optimizer steps: for-loop: tensor by tensor, foreach: lists of tensors, fused: one kernel,"
        " default: torch chooses",
    )
    skip_on_device: bool = Field(
        False,
        description="skip an overflowed step on the GPU, so that a dynamic loss scale does not wait for the host",
    )
    lr_base: Positive | None = Field(
        None, description="learning rate at the base batch size; it is scaled to the total batch size"
    )
    lr_base_batch: PositiveInt = Field(
        256, description="base batch size: the total batch size that the base learning rate is for"
    )
    lr_rule: Literal["linear", "sqrt"] = Field(
        "linear", description="how the learning rate scales with the total batch size"
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="further arguments of the optimizer, such as {amsgrad: true}"
    )

    @field_validator("name")
    @classmethod
    def _make_name_canonical(cls, name: str) -> str:
        try:
            return canonical_optimizer_name(name)
        except ConfigError as error:
            raise ValueError(str(error)) from None

    @field_validator("args")
    @classmethod
    def _refuse_args_with_own_setting(cls, args: dict[str, Any]) -> dict[str, Any]:
        check_json_compatible(args)
        for name in args:
            if (setting := OWN_SETTINGS.get(name)) is not None:
                raise ValueError(f"{name} is a setting of its own; give it as recipe.optimizer.{setting}")
        return args

    @model_validator(mode="after")
    def _require_momentum_for_nesterov(self) -> OptimizerConfig:
        if self.nesterov and (self.name in ("adam", "adamw") or self.momentum == 0):
            raise ValueError("nesterov needs an optimizer such as sgd, with a momentum above 0")
        return self

    @model_validator(mode="after")
    def _check_layer_rates(self) -> OptimizerConfig:
        if self.layer_lr != "none" and self.name in ("fused_lamb", "fused_novograd"):
            raise ValueError(
                f"layer_lr {self.layer_lr} adapts rates by layer, but {self.name} already does; use another optimizer"
            )
        if self.implementation == "fused" and self.layer_lr != "none":
            raise ValueError(
                f"layer_lr {self.layer_lr} adapts unscaled gradients, but a fused step unscales them itself; use "
                f"implementation foreach"
            )
        if self.skip_on_device and self.layer_lr != "none":
            raise ValueError(
                f"layer_lr {self.layer_lr} runs on the host at each step that is taken, so the host must know which "
                f"are; leave out skip_on_device"
            )
        return self


class ScheduleConfig(FrozenSettings):
    """How the learning rate moves; a pure function of the step, so that a skipped step shifts no arm."""

    name: Literal["constant", "step", "cosine"] = Field(
        "cosine", description="shape of the learning rate after the warm-up"
    )
    warmup_epochs: NonNegative = Field(1.0, description="epochs of linear warm-up")
    step_epochs: PositiveInt = Field(30, description="step schedule: epochs between two drops")
    gamma: Positive = Field(0.1, description="step schedule: factor of a drop")


class Recipe(FrozenSettings):
    """All that must be equal for two runs to be compared fairly."""

    task: str = Field(
        DEFAULT_TASK,
        min_length=1,
        description="what is trained: classification, lm, segmentation, detection, gan, regression or module:factory",
    )
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    epochs: PositiveInt = Field(5, description="passes over the training set")
    max_steps: PositiveInt | None = Field(
        None, description="stop after this many updates, regardless of epochs"
    )
    batch_size: PositiveInt = Field(64, description="samples in one update of each process")
    global_batch_size: PositiveInt | None = Field(
        None, description="samples in one update of all processes together"
    )
    grad_accum_steps: PositiveInt = Field(1, description="micro-batches in one update")
    clip_grad: Positive | None = Field(None, description="largest norm of the unscaled gradients")
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of the target that is spread over all classes"
    )
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="decay of an EMA of the weights, which is also evaluated"
    )
    channels_last: bool = Field(False, description="memory format of models and images")
    cudnn_benchmark: bool = Field(
        False,
        description="let cuDNN time its convolution kernels at each new shape and keep the fastest; on a GPU",
    )
    compile: Literal["none", "eager", "aot_eager", "inductor"] = Field(
        "none", description="torch.compile backend for training; evaluation is never compiled"
    )
    cuda_graph: bool = Field(
        False,
        description="capture the whole step as one CUDA graph and replay it; needs a GPU and a fused optimizer",
    )
    tta: Literal["none", "flips", "shifts"] = Field(
        "none", description="test-time augmentation: average the logits over additional views of an image"
    )
    checkpoint_activations: bool = Field(
        False, description="recompute activations of blocks in the backward pass instead of keeping them"
    )
    early_stop: PositiveInt | None = Field(
        None, description="stop after this many epochs without a better metric"
    )
    target: Annotated[float, Field(allow_inf_nan=False)] | None = Field(
        None, description="stop when the metric reaches this value, such as 97 for a top-1 of 97 %"
    )
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0

    @model_validator(mode="before")
    @classmethod
    def _fill_in_task_defaults(cls, values: Any) -> Any:
        """Accept older names of settings, and fill in defaults of the task."""
        if not isinstance(values, Mapping):
            return values
        values = dict(values)
        if OLDER_TARGET in values:
            values.setdefault("target", values.pop(OLDER_TARGET))
        return with_task_defaults(values)

    @model_validator(mode="after")
    def _require_equal_microbatches(self) -> Recipe:
        if self.batch_size % self.grad_accum_steps:
            raise ValueError(
                f"batch size {self.batch_size} cannot be cut into {self.grad_accum_steps} equal micro-batches"
            )
        return self

    @model_validator(mode="after")
    def _require_unscaled_gradients_if_read(self) -> Recipe:
        # FusedSGD then steps with scaled gradients at levels with master weights.
        if self.optimizer.args.get("materialize_master_grads", True) is False:
            reader = "clip_grad" if self.clip_grad is not None else f"layer_lr {self.optimizer.layer_lr}"
            if reader != "layer_lr none":
                raise ValueError(
                    f"{reader} reads unscaled gradients, but optimizer.args.materialize_master_grads false leaves "
                    f"none; leave one of them out"
                )
        return self
