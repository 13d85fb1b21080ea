"""Lightning and Lightning Fabric: their precision plugins, under both names of each package.

| the plugin | what an arm makes of it |
|---|---|
| `32-true` | nothing |
| `16-mixed`, `bf16-mixed` | autocast and GradScaler follow the arm, and inputs that it casts get the arm's type |
| `16-true`, `bf16-true` | it casts nothing: weights and inputs stay in fp32, and the arm acts on them |
| `64-true`, and those of other libraries | refused |
"""

import contextlib
import functools
import sys
from typing import Any

from ampcompare.base.patches import Subscriptions
from ampcompare.base.tensors.tree import cast_floating_tensors
from ampcompare.script.recording.metrics import log_numbers
from ampcompare.script.trainers.arm import Follow, TrainerContext

# Plugins and strategies by module, with what each is and what to take instead.
MIXED = 'take precision="16-mixed" or "bf16-mixed"'
FOREIGN = {
    "plugins.precision.deepspeed": ("DeepSpeedPrecision", 'strategy="deepspeed"', 'take strategy="ddp"'),
    "plugins.precision.fsdp": ("FSDPPrecision", 'strategy="fsdp"', 'take strategy="ddp"'),
    "plugins.precision.transformer_engine": (
        "TransformerEnginePrecision",
        "the plugin of TransformerEngine",
        MIXED,
    ),
    "plugins.precision.bitsandbytes": ("BitsandbytesPrecision", "the plugin of bitsandbytes", MIXED),
    "plugins.precision.xla": ("XLAPrecision", "the plugin of XLA", MIXED),
    "plugins.precision.double": ("DoublePrecision", 'precision="64-true"', MIXED),
}
FABRIC, TRAINER = ("lightning.fabric", "lightning_fabric"), ("lightning.pytorch", "pytorch_lightning")
LOGGERS = {"TensorBoardLogger", "WandbLogger", "MLFlowLogger"}  # of libraries that are watched by themselves


def _note_mixed_precision_replaced(name: str, context: TrainerContext, events: Subscriptions) -> None:
    plugin: Any = sys.modules[name].MixedPrecision

    def init(original: Any, self: Any, precision: Any, *args: Any, **kwargs: Any) -> None:
        original(self, precision, *args, **kwargs)
        context.note_replaced_setting(f'precision="{precision}" of Lightning')

    def convert_input(original: Any, self: Any, data: Any) -> Any:
        """Cast inputs to the type that the arm computes in, if autocast is what computes in it."""
        if context.is_script:
            return original(self, data)
        return data if context.half is None else cast_floating_tensors(data, context.half)

    events.wrap(plugin, "__init__", init)
    if "convert_input" in vars(plugin):  # that of Fabric
        events.wrap(plugin, "convert_input", convert_input)


def _note_half_precision_replaced(name: str, context: TrainerContext, events: Subscriptions) -> None:
    plugin: Any = sys.modules[name].HalfPrecision

    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        context.note_replaced_setting(
            f'precision="{self.precision}" of Lightning, whose weights stay in fp32 until the arm casts them'
        )

    def leave(original: Any, self: Any, value: Any) -> Any:
        return original(self, value) if context.is_script else value

    def plain_context(original: Any, self: Any) -> Any:
        return original(self) if context.is_script else contextlib.nullcontext()

    events.wrap(plugin, "__init__", init)
    for method in ("convert_module", "convert_input"):
        events.wrap(plugin, method, leave)
    for method in ("tensor_init_context", "module_init_context", "forward_context"):
        events.wrap(plugin, method, plain_context)


def _refuse_foreign_precision(
    plugin_setting_and_advice: tuple[str, str, str], name: str, context: TrainerContext, events: Subscriptions
) -> None:
    plugin, setting, advice = plugin_setting_and_advice

    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        context.refuse_unless_script(f"{setting} of Lightning", advice)
        original(self, *args, **kwargs)

    events.wrap(getattr(sys.modules[name], plugin), "__init__", init)


def _follow_forward_redirection(name: str, context: TrainerContext, events: Subscriptions) -> None:
    redirection: Any = sys.modules[name]._ForwardRedirection

    def call(
        original: Any, self: Any, wrapper: Any, module: Any, method: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Let `training_step` under DDP be what it is on one device: what it calls are the forward passes."""
        with context.through(wrapper, module):
            return original(self, wrapper, module, method, *args, **kwargs)

    events.wrap(redirection, "__call__", call)


def _follow_frozen_toggles(name: str, context: TrainerContext, events: Subscriptions) -> None:
    def untoggle(original: Any, module: Any, optimizer: Any) -> None:
        """Thaw weights in whose place an optimizer has got master weights since they were frozen."""
        for param, needs in module._param_requires_grad_state.items():
            param.requires_grad = needs
        original(module, optimizer)

    events.wrap(sys.modules[name].LightningModule, "untoggle_optimizer", untoggle)


def _follow_lightning_logs(name: str, context: TrainerContext, events: Subscriptions) -> None:
    connector: Any = sys.modules[name]._LoggerConnector

    def log_metrics(original: Any, self: Any, metrics: dict[str, Any], step: int | None = None) -> None:
        if not LOGGERS & {type(one).__name__ for one in self.trainer.loggers}:
            log_numbers(metrics, "LightningModule.log")
        original(self, metrics, step)

    events.wrap(connector, "log_metrics", log_metrics)


def _followers_by_module() -> dict[str, Follow]:
    found: dict[str, Follow] = {}
    for package in (*FABRIC, *TRAINER):
        found[f"{package}.plugins.precision.amp"] = _note_mixed_precision_replaced
        found[f"{package}.plugins.precision.half"] = _note_half_precision_replaced
        for module, what in FOREIGN.items():
            found[f"{package}.{module}"] = functools.partial(_refuse_foreign_precision, what)
    for package in TRAINER:
        found[f"{package}.strategies.strategy"] = _follow_forward_redirection
        found[f"{package}.core.module"] = _follow_frozen_toggles
        found[f"{package}.trainer.connectors.logger_connector.logger_connector"] = _follow_lightning_logs
    return found


MODULES = _followers_by_module()
