"""Hugging Face Accelerate, and the `Trainer` of transformers, which trains by it and logs its own figures.

Its forward pass is a `torch.autocast` block, and its scaler a `GradScaler`, so the arm acts there. Only its optimizer
keeps the `step` that the wrapped one had when it was prepared, and puts that back around each step. `accelerate launch`
of one process sets variables of the environment and starts Python; the script runs in this process instead.
"""

import os
import sys
from typing import Any

from ampcompare.base.patches import Subscriptions
from ampcompare.script.invocation.target import Target, forget_shadowed_modules
from ampcompare.script.recording.metrics import log_numbers
from ampcompare.script.trainers.arm import Follow, TrainerContext

FULL_EVALUATIONS = ("bf16_full_eval", "fp16_full_eval")
PLUGINS = {
    "DEEPSPEED": ("DeepSpeed", "leave DeepSpeed out of the configuration"),
    "FSDP": ("Accelerate's FSDP plugin", "leave FSDP out of the configuration"),
    "MEGATRON_LM": ("Megatron-LM", "leave it out of the configuration"),
    "TP": ("tensor parallelism", "leave it out of the configuration"),
}


def _follow_accelerated_optimizer(name: str, context: TrainerContext, events: Subscriptions) -> None:
    module: Any = sys.modules[name]

    def step(original: Any, wrapper: Any, closure: Any = None) -> Any:
        """Know the step of an arm that has prepared the optimizer since Accelerate wrapped it.

        A fused step is called at an overflow too, so that Accelerate takes it for done, and steps the scheduler: under
        all arms, as learning rates would differ else.
        """
        inner = wrapper.optimizer
        if wrapper.scaler is not None and inner.step is not wrapper._optimizer_original_step_method:
            wrapper._optimizer_original_step_method = inner.step
            wrapper._optimizer_patched_step_method = module.patch_optimizer_step(wrapper, inner.step)
        result = original(wrapper) if closure is None else original(wrapper, closure)
        if getattr(inner, "_step_supports_amp_scaling", False):
            wrapper._is_overflow = False
        return result

    events.wrap(module.AcceleratedOptimizer, "step", step)


def _check_accelerator_and_follow_log(name: str, context: TrainerContext, events: Subscriptions) -> None:
    module: Any = sys.modules[name]

    def init(original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> None:
        original(accelerator, *args, **kwargs)
        kind = str(getattr(accelerator.distributed_type, "name", accelerator.distributed_type))
        if kind in PLUGINS:
            context.refuse_unless_script(*PLUGINS[kind])
        precision = accelerator.state.mixed_precision
        if precision == "fp8":
            context.refuse_unless_script('mixed_precision="fp8"', 'take mixed_precision="bf16"')
        if precision != "no":
            context.note_replaced_setting(f'mixed_precision="{precision}" of Accelerate')

    def log(original: Any, accelerator: Any, values: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        log_numbers(values, "accelerator.log")
        return original(accelerator, values, *args, **kwargs)

    events.wrap(module.Accelerator, "__init__", init)
    events.wrap(module.Accelerator, "log", log)


def _follow_trainer_logs(name: str, context: TrainerContext, events: Subscriptions) -> None:
    module: Any = sys.modules[name]

    def log(original: Any, trainer: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        log_numbers(logs, "Trainer.log")
        return original(trainer, logs, *args, **kwargs)

    def evaluate(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        for flag in FULL_EVALUATIONS:
            if getattr(trainer.args, flag, False) and not getattr(trainer, "is_in_train", False):
                kind = flag.partition("_")[0]
                context.note_departure(
                    f"{flag} of transformers casts the weights to {kind} for an evaluation behind the training, under "
                    "every arm: the metric is that of rounded weights"
                )
        return original(trainer, *args, **kwargs)

    events.wrap(module.Trainer, "log", log)
    if hasattr(module.Trainer, "evaluation_loop"):
        events.wrap(module.Trainer, "evaluation_loop", evaluate)


def _follow_accelerate_launch(name: str, context: TrainerContext, events: Subscriptions) -> None:
    def prepare(original: Any, args: Any) -> tuple[list[str], dict[str, str]]:
        command, environment = original(args)
        if command[0] == sys.executable:  # otherwise by mpirun, or no Python
            os.environ.update(environment)
            is_module = command[1] == "-m"
            _run_as_main(Target(command[1 + is_module], command[2 + is_module :], is_module=is_module))
            command = [sys.executable, "-c", ""]  # which is all that is left to start
        return command, environment

    events.wrap(sys.modules[name], "prepare_simple_launcher_cmd_env", prepare)


def _run_as_main(target: Target) -> None:
    """Run a script to its end as `__main__` of this process."""
    target.set_sys_path_and_argv()
    forget_shadowed_modules()
    code, main = target.load_code_and_main()
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


MODULES: dict[str, Follow] = {
    "accelerate.optimizer": _follow_accelerated_optimizer,
    "accelerate.accelerator": _check_accelerator_and_follow_log,
    "accelerate.utils.launch": _follow_accelerate_launch,
    "transformers.trainer": _follow_trainer_logs,
}
