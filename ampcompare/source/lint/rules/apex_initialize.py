"""Rules about `amp.initialize` and what must come before or after it."""

import ast
from collections.abc import Callable, Iterator

from ampcompare.source.lint.read.module import (
    Finding,
    LintModule,
    Mistake,
    Trace,
    dotted_text_of,
    events_before,
    events_between,
    register_rule,
    text_of_literal,
)
from ampcompare.source.lint.read.update_events import EventKind, TrainingEvent, name_in_source
from ampcompare.source.syntax import argument

GPU_WORDS = ("cuda", "device", "gpu", "rank")
TYPOS = {f"{wrong}{level}": f"O{level}" for wrong in ("0", "o") for level in range(4)}
TORCH_DDP_ARGUMENTS = {
    "device_ids", "output_device", "dim", "broadcast_buffers", "find_unused_parameters", "bucket_cap_mb",
    "process_group", "gradient_as_bucket_view", "static_graph",
}  # fmt: skip


def _models_of_initialize(event: TrainingEvent) -> set[str]:
    """Return the names of the models of an `amp.initialize`."""
    first = argument(event.call, "models", 0)
    if isinstance(first, (ast.List, ast.Tuple)):
        return {dotted_text_of(element) for element in first.elts} - {""}
    return {event.subject} - {""}


def _changes_object_in_place(event: TrainingEvent) -> bool:
    """Return whether a call changes an object in place: it stands alone, or is bound to the object again."""
    if isinstance(event.statement, ast.Expr):
        return event.statement.value is event.call
    if isinstance(event.statement, ast.Assign) and event.statement.value is event.call:
        return [dotted_text_of(target) for target in event.statement.targets] == [
            dotted_text_of(event.receiver)
        ]
    return False


@register_rule(
    Mistake(
        "AMP101",
        "initialize-after-wrapping",
        "`amp.initialize` is passed a model that is already wrapped in DistributedDataParallel or DataParallel",
        "the wrapper has recorded the parameters and dtypes that the model had before",
        "call `amp.initialize` first, then wrap the model that it returns",
        """
from apex import amp
from torch.nn.parallel import DistributedDataParallel as DDP

model, optimizer = amp.initialize(model, optimizer)  # right
model = DDP(model)
model, optimizer = amp.initialize(model, optimizer)  # AMP101  # wrong
""",
    ),
    Mistake(
        "AMP102",
        "initialize-twice",
        "`amp.initialize` is called again while the model of an earlier call is still trained",
        "the second call discards the loss scales of the first, and sets one opt level for both",
        "pass all models and optimizers to one call, as lists, with `num_losses` and `loss_id`",
        """
net_g, opt_g = amp.initialize(net_g, opt_g, opt_level="O1")  # wrong
net_d, opt_d = amp.initialize(net_d, opt_d, opt_level="O1")  # AMP102  # wrong
if args.opt_level == "O1":  # right
    net, opt = amp.initialize(net, opt, opt_level="O1")  # right
else:  # right
    net, opt = amp.initialize(net, opt, opt_level=args.opt_level, loss_scale=128.0)  # right
""",
    ),
    Mistake(
        "AMP111",
        "half-after-initialize",
        "`.half()` on a model that went through `amp.initialize`, and training continues",
        "weights that the opt level keeps in fp32 are rounded, and small updates are lost from then on",
        "delete `.half()`: the opt level casts the model; to export fp16 weights, cast a copy",
        """
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
model.half()  # AMP111  # wrong
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
model.half()  # right
""",
    ),
    Mistake(
        "AMP112",
        "half-before-initialize",
        "`.half()` on a model before `amp.initialize`",
        "Apex refuses models that are not in fp32",
        "delete `.half()`: the opt level casts the model",
        """
model.half()  # AMP112  # wrong
images = images.half()  # right
model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
""",
    ),
    Mistake(
        "AMP113",
        "initialize-before-cuda",
        "a model is moved to the GPU after `amp.initialize`",
        "Apex refuses such models; master weights may stay on the CPU",
        "call `.cuda()` or `.to(device)` before the optimizer is built and before `amp.initialize`",
        """
model.cuda()  # right
model, optimizer = amp.initialize(model, optimizer)
model.cuda()  # AMP113  # wrong
criterion.cuda()  # right
""",
    ),
    Mistake(
        "AMP114",
        "sync-batch-norm-late",
        "batch norm is replaced by a synchronized one after `amp.initialize`",
        "`keep_batchnorm_fp32` has no effect on the new layers",
        "convert the model before `amp.initialize`",
        """
import apex
from apex import amp

model = apex.parallel.convert_syncbn_model(model)  # right
model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
model = apex.parallel.convert_syncbn_model(model)  # AMP114  # wrong
""",
    ),
    Mistake(
        "AMP121",
        "optimizer-after-initialize",
        "an optimizer that `amp.initialize` has patched is replaced by a new one",
        "the new one has no loss scaler and no master weights: `scale_loss` ends with an AttributeError",
        "build the optimizer before `amp.initialize`, or change `optimizer.param_groups`",
        """
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # right
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # AMP121  # wrong
other = torch.optim.SGD(head.parameters(), lr=0.01)  # right
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
""",
    ),
    needs=("apex", "initialize"),
)
def misordered_calls_around_initialize(module: LintModule) -> Iterator[Finding]:
    """What comes before `amp.initialize` and should come after it, or the reverse."""
    for trace, index, event in module.events(EventKind.INITIALIZE):
        models = _models_of_initialize(event)
        after = [other for other in trace[index + 1 :] if other.may_share_run_with(event)]
        for other in events_before(trace, event, EventKind.WRAP, EventKind.HALF):
            # a second call of it
            again = other.scope is event.scope and other.call.lineno > event.call.lineno
            again = again or _wraps_unreturned_local_of_callee(other, event)
            if other.kind is EventKind.WRAP and other.target and other.target in models and not again:
                shown = f"`{name_in_source(other.target)}` was wrapped in line {other.call.lineno}"
                yield module.make_finding("AMP101", event.call, shown)
            elif other.kind is EventKind.HALF and other.subject in models and _changes_object_in_place(other):
                if other.facts.keys() - event.facts.keys() and event.facts.keys() - other.facts.keys():
                    continue  # two options, of which one may exclude the other
                yield module.make_finding(
                    "AMP112", other.call, f"`{other.subject_name}` is cast before `amp.initialize`"
                )
        for other in after:
            follow = FOLLOWING.get(other.kind)
            if follow is not None:
                yield from follow(module, trace, event, other, models)
        yield from _rebuilt_optimizer_findings(module, event, after)


def _wraps_unreturned_local_of_callee(wrap: TrainingEvent, event: TrainingEvent) -> bool:
    """Return whether a model is wrapped under a local name of another function, which does not return it."""
    if wrap.scope in event.scope.lookup_scopes() or not isinstance(wrap.statement, ast.Assign):
        return False
    target = wrap.statement.targets[0]
    return isinstance(target, ast.Name) and not _is_object_returned(target.id, wrap)


def _rebuilt_optimizer_findings(
    module: LintModule, event: TrainingEvent, later_events: list[TrainingEvent]
) -> Iterator[Finding]:
    """Yield the optimizers that replace one that `amp.initialize` has patched."""
    optimizer = dotted_text_of(argument(event.call, "optimizers", 1) or event.call)
    if not optimizer or any(other.kind is EventKind.INITIALIZE for other in later_events):
        return
    for index, other in enumerate(later_events):
        if (
            other.kind is EventKind.NEW_OPTIMIZER
            and other.scope is event.scope
            and other.subject_name == optimizer
        ):
            scaled = [
                one
                for one in later_events[index:]
                if one.kind is EventKind.SCALE_LOSS and one.may_share_run_with(other)
            ]
            if any(one.target == other.subject for one in scaled) or _is_object_returned(optimizer, other):
                shown = f"`{optimizer}` went through `amp.initialize` in line {event.call.lineno}"
                yield module.make_finding("AMP121", other.call, shown)


def _is_object_returned(name: str, event: TrainingEvent) -> bool:
    """Return whether the function around an event returns an object, maybe with others."""
    for node in ast.walk(event.scope.node):
        if isinstance(node, ast.Return) and node.value is not None:
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            if name in map(dotted_text_of, values):
                return True
    return False


def _reinitialize_findings(
    module: LintModule, trace: Trace, event: TrainingEvent, other: TrainingEvent, models: set[str]
) -> Iterator[Finding]:
    if other.call is event.call or other.scope is not event.scope:
        return
    # A training after another one, such as that of the next fold, is right; so is a model without optimizer.
    if argument(event.call, "optimizers", 1) is None and event.call.args:
        return
    if not events_between(
        trace, event, other, EventKind.BACKWARD, EventKind.STEP
    ) and models != _models_of_initialize(other):
        yield module.make_finding(
            "AMP102", other.call, f"`amp.initialize` was called in line {event.call.lineno}"
        )


def _late_cast_findings(
    module: LintModule, trace: Trace, event: TrainingEvent, other: TrainingEvent, models: set[str]
) -> Iterator[Finding]:
    if other.subject not in models or not _changes_object_in_place(other):
        return
    trains = [last for last in trace[trace.index(other) :] if last.kind is EventKind.SCALE_LOSS]
    if any(last.may_share_run_with(other) for last in trains):
        yield module.make_finding(
            "AMP111", other.call, f"`{other.subject_name}` is cast after `amp.initialize`"
        )


def _late_move_findings(
    module: LintModule, trace: Trace, event: TrainingEvent, other: TrainingEvent, models: set[str]
) -> Iterator[Finding]:
    if other.subject not in models or not _changes_object_in_place(other) or not _is_move_to_gpu(other):
        return
    moved = [one for one in trace[: trace.index(event)] if one.kind is EventKind.CUDA]
    trained = events_between(trace, event, other, EventKind.BACKWARD, EventKind.STEP, EventKind.LOAD)
    if not trained and not any(one.subject == other.subject for one in moved):
        yield module.make_finding(
            "AMP113", other.call, f"`{other.subject_name}` is moved after `amp.initialize`"
        )


def _late_syncbn_conversion_findings(
    module: LintModule, trace: Trace, event: TrainingEvent, other: TrainingEvent, models: set[str]
) -> Iterator[Finding]:
    """Yield the conversions to synchronized batch norm that come after `amp.initialize`."""
    if other.subject in models:
        yield module.make_finding(
            "AMP114", other.call, f"`{other.subject_name}` went through `amp.initialize` before"
        )


# What an event behind an `amp.initialize` with some models may be wrong about, by its kind.
FOLLOWING: dict[
    EventKind, Callable[[LintModule, Trace, TrainingEvent, TrainingEvent, set[str]], Iterator[Finding]]
] = {
    EventKind.INITIALIZE: _reinitialize_findings,
    EventKind.HALF: _late_cast_findings,
    EventKind.CUDA: _late_move_findings,
    EventKind.SYNC_BATCH_NORM: _late_syncbn_conversion_findings,
}


def _is_move_to_gpu(event: TrainingEvent) -> bool:
    assert isinstance(event.call.func, ast.Attribute)
    if event.call.func.attr == "cuda":
        return True
    return bool(event.call.args) and any(
        word in ast.unparse(event.call.args[0]).lower() for word in GPU_WORDS
    )


@register_rule(
    Mistake(
        "AMP123",
        "sync-batch-norm-after-optimizer",
        "Apex's `convert_syncbn_model` runs after the optimizer was built",
        "it gives each batch norm new weights, and the optimizer holds the old ones: the new ones are never trained",
        "convert the model before the optimizer is built; torch's `convert_sync_batchnorm` keeps the weights",
        """
import torch
from apex import amp
from apex.parallel import convert_syncbn_model

other = torch.optim.SGD(head.parameters(), lr=0.1)  # right
model = convert_syncbn_model(model)  # right
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = convert_syncbn_model(model)  # AMP123  # wrong
model, optimizer = amp.initialize(model, optimizer)
""",
    ),
    needs=("apex", "convert_syncbn_model"),
)
def syncbn_conversion_after_optimizer(module: LintModule) -> Iterator[Finding]:
    """Synchronized batch norm that replaces weights which an optimizer has."""
    for trace, index, event in module.events(EventKind.SYNC_BATCH_NORM):
        if not event.subject:
            continue
        rebuilt = {other.subject for other in trace[index:] if other.kind is EventKind.NEW_OPTIMIZER}
        for other in trace[:index]:
            if (
                other.kind is not EventKind.NEW_OPTIMIZER
                or not other.may_share_run_with(event)
                or other.subject in rebuilt
            ):
                continue
            if any(name == event.subject or name.startswith(f"{event.subject}.") for name in other.sources):
                shown = f"the optimizer of line {other.call.lineno} holds the weights that this replaces"
                yield module.make_finding("AMP123", event.call, shown)
                break


@register_rule(
    Mistake(
        "AMP124",
        "apex-state-loaded-early",
        "`amp.load_state_dict` runs before `amp.initialize`",
        "it raises an AttributeError; where another `amp.initialize` ran before, the loaded loss scales are lost",
        "call `amp.initialize` first, then `amp.load_state_dict`",
        """
model, optimizer = amp.initialize(model, optimizer)  # right
amp.load_state_dict(checkpoint["amp"])  # AMP124
model, optimizer = amp.initialize(model, optimizer)  # wrong
""",
    ),
    needs=("apex", "initialize", "load_state_dict"),
)
def amp_state_loaded_before_initialize(module: LintModule) -> Iterator[Finding]:
    """The state of Apex, loaded before `amp.initialize` makes the loss scales."""
    for trace, index, event in module.events(EventKind.INITIALIZE):
        known = {id(other.call) for other in trace[:index] if other.kind is EventKind.INITIALIZE}
        for other in trace[:index]:
            if (
                other.kind is not EventKind.LOAD
                or id(event.call) in known
                or not other.may_share_run_with(event)
            ):
                continue
            if module.resolve(other.call.func, other.scope) != "apex.amp.load_state_dict":
                continue
            if not events_between(trace, other, event, EventKind.SCALE_LOSS, EventKind.STEP):
                shown = f"`amp.initialize` in line {event.call.lineno} makes new loss scales"
                yield module.make_finding("AMP124", other.call, shown)


@register_rule(
    Mistake(
        "AMP108",
        "opt-level-typo",
        'the opt level is written with a zero or a small letter, such as "01"',
        "Apex ends with an error: the levels begin with the letter O",
        'write "O1"',
        """
model, optimizer = amp.initialize(model, optimizer, opt_level="01")  # AMP108  # wrong
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")  # right
date = parse(day="01")  # right
""",
        fixable=True,
    ),
    needs=("apex|amp", "level", "level 01"),
)
def opt_level_typo(module: LintModule) -> Iterator[Finding]:
    """Opt levels written with a zero, as an argument, a value, or the default of an option."""
    if not module.code_mentions_pattern(r"\bapex\b|\bamp\b"):
        return
    for call in module.calls:
        values = [
            one.value for one in call.keywords if one.arg in ("opt_level", "fp16_opt_level", "amp_opt_level")
        ]
        flags = " ".join(filter(None, map(text_of_literal, call.args)))
        if dotted_text_of(call.func).endswith("add_argument") and "opt" in flags and "level" in flags:
            values += [one.value for one in call.keywords if one.arg == "default"]
        for value in values:
            yield from _opt_level_typo_findings(module, value)
    for scope in module.scopes:
        for name, assigned in scope.values.items():
            if name.endswith("opt_level"):
                for value in assigned:
                    yield from _opt_level_typo_findings(module, value)


def _opt_level_typo_findings(module: LintModule, value: ast.expr) -> Iterator[Finding]:
    right = TYPOS.get(text_of_literal(value) or "")
    if right is not None:
        source = module.source(value)
        edits = module.replacement_edits(value, f"{source[0]}{right}{source[-1]}") if len(source) == 4 else ()
        yield module.make_finding(
            "AMP108", value, f"{source} is not an opt level; Apex knows {right!r}", edits
        )


@register_rule(
    Mistake(
        "AMP109",
        "initialize-misbound",
        "the result of `amp.initialize` is bound to the wrong names",
        "the model is a tuple, or the names are swapped; at best it works because Apex changes objects in place",
        "write `model, optimizer = amp.initialize(model, optimizer, ...)`",
        """
model = amp.initialize(model, optimizer, opt_level="O1")  # AMP109  # wrong
model = amp.initialize(model, opt_level="O1")  # right
""",
        fixable=True,
    ),
    needs=("apex", "initialize"),
)
def misbound_result_of_initialize(module: LintModule) -> Iterator[Finding]:
    """What the result of `amp.initialize` is bound to."""
    for call in module.calls_of_functions("apex.amp.initialize"):
        named = [
            dotted_text_of(argument(call, "models", 0) or call),
            dotted_text_of(argument(call, "optimizers", 1) or call),
        ]
        statement = module.parents[call]
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and all(named):
            target = statement.targets[0]
            bound = [
                dotted_text_of(one) for one in (target.elts if isinstance(target, ast.Tuple) else [target])
            ]
            if bound == named[:1] or bound == named[::-1] or _misnames_optimizer(module, call, named, bound):
                right, shown = ", ".join(named), ", ".join(bound)
                edits = module.replacement_edits(target, right)
                yield module.make_finding(
                    "AMP109", call, f"`{right}` are returned, but bound to `{shown}`", edits
                )


def _misnames_optimizer(
    module: LintModule, call: ast.Call, given_names: list[str], bound_names: list[str]
) -> bool:
    """Return whether the optimizer that comes back takes the name of something else, and is used by its old one."""
    if (
        len(bound_names) != 2
        or bound_names[0] != given_names[0]
        or bound_names[1] == given_names[1]
        or not bound_names[1]
    ):
        return False
    scope = module.scope_of[call]
    values = module.values_of(bound_names[1], scope) or []
    used = {dotted_text_of(one.func) for one in module.calls}
    others = [value for value in values if not isinstance(value, ast.Starred)]
    return bool(others) and f"{given_names[1]}.step" in used and f"{bound_names[1]}.step" not in used


@register_rule(
    Mistake(
        "AMP115",
        "sync-batch-norm-result",
        "the result of `convert_syncbn_model` is discarded, or unpacked into two names",
        "a model that is itself a batch norm is not replaced; unpacking fails",
        "write `model = convert_syncbn_model(model)`",
        """
from apex.parallel import convert_syncbn_model

convert_syncbn_model(model)  # AMP115  # wrong
model = convert_syncbn_model(model)  # right
""",
        fixable=True,
    ),
    needs=("apex", "convert_syncbn_model"),
)
def misbound_syncbn_conversion(module: LintModule) -> Iterator[Finding]:
    """What the result of Apex's `convert_syncbn_model` is bound to."""
    for call in module.calls_of_functions("apex.parallel.convert_syncbn_model"):
        statement, model = module.parents[call], dotted_text_of(argument(call, "module", 0) or call.func)
        if isinstance(statement, ast.Expr):
            edits = (
                module.insertion_edits(module.start_of(statement), f"{model} = ")
                if call.args and model
                else ()
            )
            yield module.make_finding("AMP115", call, "the converted model is discarded", edits)
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Tuple):
            count = len(statement.targets[0].elts)
            yield module.make_finding(
                "AMP115", call, f"one model is returned, but unpacked into {count} names"
            )


@register_rule(
    Mistake(
        "AMP116",
        "ddp-arguments",
        "Apex's DistributedDataParallel is called with arguments of PyTorch's",
        "it takes `delay_allreduce`, `message_size` and others, and ends with a TypeError",
        "use `torch.nn.parallel.DistributedDataParallel`, or leave these arguments out",
        """
from apex.parallel import DistributedDataParallel as DDP  # wrong
from torch.nn.parallel import DistributedDataParallel as DDP  # right

model = DDP(model, device_ids=[rank])  # AMP116
""",
    ),
    needs=("apex", "DistributedDataParallel"),
)
def torch_arguments_of_apex_ddp(module: LintModule) -> Iterator[Finding]:
    """Arguments of torch's DistributedDataParallel for Apex's."""
    for call in module.calls_of_functions("apex.parallel.DistributedDataParallel"):
        wrong = [one.arg for one in call.keywords if one.arg in TORCH_DDP_ARGUMENTS]
        if wrong and not module.has_alternative_bindings(call.func):
            yield module.make_finding(
                "AMP116", call, f"Apex's DistributedDataParallel has no argument `{wrong[0]}`"
            )


@register_rule(
    Mistake(
        "AMP127",
        "initialize-without-scale-loss",
        "`amp.initialize` prepares model and optimizer, and the loss is never scaled",
        "gradients below 2**-24 become 0 in fp16: layers with small gradients stop learning",
        "write `with amp.scale_loss(loss, optimizer) as scaled_loss:` around `scaled_loss.backward()`",
        """
from apex import amp

model, optimizer = amp.initialize(model, optimizer, opt_level="O1")  # AMP127
for batch in loader:
    optimizer.zero_grad()
    loss = model(batch)
    loss.backward()  # wrong
    with amp.scale_loss(loss, optimizer) as scaled_loss:  # right
        scaled_loss.backward()  # right
    optimizer.step()
""",
    ),
    needs=("apex", "initialize"),
)
def unscaled_training_after_initialize(module: LintModule) -> Iterator[Finding]:
    """A plain backward pass and step of what `amp.initialize` got."""
    prepared = list(module.events(EventKind.INITIALIZE))
    if not prepared or module.code_mentions_pattern(
        r"scale_loss|GradScaler|[Ss]caler\b|FP16_Optimizer|backward_by_|deepspeed"
    ):
        return
    for trace, index, event in prepared:
        optimizers, enabled = argument(event.call, "optimizers", 1), argument(event.call, "enabled")
        level, scale = argument(event.call, "opt_level"), argument(event.call, "loss_scale")
        if optimizers is None or (enabled is not None and value_of_literal(enabled) is False):
            continue
        if text_of_literal(level) in ("O0", "O3") or (
            scale is not None and value_of_literal(scale) in (1, 1.0, "1.0", "1")
        ):
            continue
        if _trains_without_scaling(module, trace[index + 1 :], event, dotted_text_of(optimizers)):
            yield module.make_finding("AMP127", event.call, "the loss of what this prepares is not scaled")


@register_rule(
    Mistake(
        "AMP128",
        "fused-adam-max-grad-norm",
        "`FusedAdam` of Apex is called with `max_grad_norm`",
        "it has no such argument since 2019: a TypeError, where it once clipped",
        "clip `amp.master_params(optimizer)` before the step",
        """
from apex.optimizers import FusedAdam, FusedLAMB

optimizer = FusedAdam(model.parameters(), lr=1e-3, max_grad_norm=1.0)  # AMP128  # wrong
optimizer = FusedLAMB(model.parameters(), lr=1e-3, max_grad_norm=1.0)  # right
""",
    ),
    needs=("apex", "max_grad_norm"),
)
def max_grad_norm_of_fused_adam(module: LintModule) -> Iterator[Finding]:
    """`max_grad_norm`, an argument that `FusedAdam` does not have."""
    for call in module.calls_of_functions("apex.optimizers.FusedAdam"):
        if argument(call, "max_grad_norm") is not None:
            yield module.make_finding("AMP128", call, "FusedAdam has no argument `max_grad_norm`")


def value_of_literal(node: ast.expr) -> object:
    """Return the value of a literal; None for any other expression."""
    return node.value if isinstance(node, ast.Constant) else None


def _trains_without_scaling(
    module: LintModule, later_events: Trace, event: TrainingEvent, optimizer: str
) -> bool:
    """Return whether a plain backward pass and a step of an optimizer follow, where it surely is initialized."""
    tail = optimizer.rpartition(".")[2]
    later = [one for one in later_events if one.may_share_run_with(event)]
    if event.scope.owner is not None:  # other methods of the object train
        traces = [trace for trace in module.traces if trace and trace[0].scope.owner is event.scope.owner]
        later += [one for trace in traces for one in trace if one.may_share_run_with(event)]
    if any(one.kind in (EventKind.FOREIGN_BACKWARD, EventKind.OPAQUE) for one in later):
        return False
    passes = [one for one in later if one.kind is EventKind.BACKWARD and not one.scaler]
    steps = [
        one for one in later if one.kind is EventKind.STEP and one.subject_name.rpartition(".")[2] == tail
    ]
    return any(one.may_share_run_with(step) and one.loops == step.loops for one in passes for step in steps)
