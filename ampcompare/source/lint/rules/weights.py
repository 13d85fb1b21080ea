"""Rules about weights that are stored in 16 bits."""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from ampcompare.source.lint.read.module import (
    Finding,
    LintModule,
    Mistake,
    Trace,
    register_rule,
    text_of_literal,
)
from ampcompare.source.lint.read.update_events import EventKind, TrainingEvent, name_in_source
from ampcompare.source.syntax import argument

TYPES = {
    **dict.fromkeys(("torch.float16", "torch.half", "float16", "fp16"), "fp16"),
    **dict.fromkeys(("torch.bfloat16", "bfloat16", "bf16"), "bf16"),
    **dict.fromkeys(("torch.float32", "torch.float", "float32", "torch.float64", "torch.double"), "fp32"),
}
OF_METHODS = {"half": "fp16", "bfloat16": "bf16", "float": "fp32", "double": "fp32"}
# The part of a weight below which each update is rounded away.
LOST = {"fp16": "1/4096", "bf16": "1/512"}
# Values of `precision` with which Lightning casts weights.
OF_LIGHTNING = {"16-true": "fp16", "bf16-true": "bf16"}
LIGHTNING = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
# Words of optimizers and libraries that keep fp32 copies, and of training only other weights than these.
KEEPS_MASTERS = (
    r"(?i)master|FP16_Optimizer|deepspeed|"
    r"fully_?shard|fsdp|MixedPrecision|kahan|stochastic_?round|amp\.initialize"
)
TRAINS_OTHERS = r"(?i)\bpeft\b|lora|add_adapter|\.requires_grad\b"


class ModelCast(NamedTuple):
    """A model that gets a type."""

    event: TrainingEvent
    name: str
    kind: str


def _model_casts_in_trace(module: LintModule, trace: Trace) -> list[ModelCast]:
    """Return what gets a type in a trace: by a method, or where a library builds it."""
    found = []
    for event in trace:
        if event.kind not in (EventKind.HALF, EventKind.CAST, EventKind.CUDA):
            continue
        kind = _type_written_in_call(module, event)
        alone = isinstance(event.statement, ast.Expr) and "(" not in event.subject
        for name in {event.target, event.subject if alone or event.target == event.subject else ""} - {""}:
            if kind:
                found.append(ModelCast(event, name, kind))
    return found


def _type_written_in_call(module: LintModule, event: TrainingEvent) -> str:
    """Return the type that a call gives to a model or new weights; empty where it is not written there."""
    call = event.call
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if method in OF_METHODS:
        return OF_METHODS[method]
    values = [argument(call, "dtype"), argument(call, "torch_dtype")]
    if not method.startswith("from_"):
        values += call.args
    for value in values:
        if method == "from_pretrained" and text_of_literal(value) == "auto":
            return "auto"  # of the checkpoint
        if value is not None:
            kind = TYPES.get(text_of_literal(value) or module.resolve(value, event.scope) or "")
            if kind:
                return kind
    return ""


@register_rule(
    Mistake(
        "AMP224",
        "half-with-scaler",
        "the weights of a model are fp16, and it is trained with a GradScaler",
        "`unscale_` refuses fp16 gradients: the first step ends with a ValueError",
        "keep the weights in fp32: autocast casts where it is safe",
        """
model.half()  # AMP224  # wrong
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in loader:
    batch = batch.half()  # right
    scaler.scale(model(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
    ),
    needs=("caler|mixed_precision", "half|float16|fp16", "parameters"),
)
def fp16_weights_with_scaler(module: LintModule) -> Iterator[Finding]:
    """A model whose weights are fp16 before it is trained with a scaler."""
    if module.code_mentions_pattern(TRAINS_OTHERS):
        return
    for trace in module.traces:
        for cast in _model_casts_in_trace(module, trace):
            event, name = cast.event, name_in_source(cast.name)
            if cast.kind != "fp16" or module.code_mentions_pattern(rf"\b{re.escape(name)}\.float\(\)"):
                continue
            if module.is_under_if(event.call) and any(
                argument(call, "enabled") for call in module.calls_making_scalers
            ):
                continue  # the scaler may be off where the model is cast
            later = [other for other in trace[trace.index(event) + 1 :] if other.may_share_run_with(event)]
            kinds = {other.kind for other in later}
            trains = EventKind.SCALER_STEP in kinds or (
                EventKind.FOREIGN_BACKWARD in kinds and _accelerates_in_fp16(module)
            )
            # Optimizers of other packages may keep master weights, and take fp16 gradients.
            unscaled = any(
                other.kind is EventKind.UNSCALE for other in later
            ) or module.code_mentions_pattern(r"\boptim\.[A-Z]\w+\(")
            if (
                trains
                and unscaled
                and _mentions_parameters_of(module, name)
                and not _are_optimizers_of_other_models(module, cast)
            ):
                yield module.make_finding(
                    "AMP224", event.call, f"`{name}` is trained with a GradScaler below"
                )


def _mentions_parameters_of(module: LintModule, name: str) -> bool:
    return module.code_mentions_pattern(rf"\b{re.escape(name)}\.(?:named_)?parameters\(\)")


def _are_optimizers_of_other_models(module: LintModule, cast: ModelCast) -> bool:
    """Return whether all optimizers are built on the parameters of other models, as next to an average or a teacher.

    Not of one that is made from this model, and may hold it.
    """
    made = [event for _, _, event in module.events(EventKind.NEW_OPTIMIZER)]
    sources = {source.removesuffix(".parameters()") for event in made for source in event.sources}
    own = re.escape(name_in_source(cast.name))
    return (
        all(event.sources for event in made)
        and bool(sources)
        and all(
            _mentions_parameters_of(module, name_in_source(source))
            and not _optimizer_holds_model(cast.name, source)
            and not module.code_mentions_pattern(
                rf"\b{re.escape(name_in_source(source))} *=[^=\n].*\b{own}\b"
            )
            for source in sources
        )
    )


def _accelerates_in_fp16(module: LintModule) -> bool:
    """Return whether an Accelerator of fp16 is built, which has a GradScaler."""
    return any(text_of_literal(argument(call, "mixed_precision")) == "fp16" for call in module.calls)


@register_rule(
    Mistake(
        "AMP239",
        "weights-in-16-bits",
        "an optimizer of torch steps weights that are stored in 16 bits, without fp32 master weights",
        "updates that are small against a weight are rounded away, and the moments of Adam are 16-bit too: in fp16 its "
        "`eps` of 1e-8 is 0",
        "keep the weights in fp32 and let autocast cast, or take an optimizer with fp32 master weights, with Kahan "
        "summation or with stochastic rounding",
        """
model = Net().to(torch.bfloat16)  # wrong
teacher = Net().to(torch.bfloat16)  # right
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)  # AMP239
for batch in loader:
    model(batch).backward()  # wrong
    distance(model(batch), teacher(batch)).backward()  # right
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    needs=("half|float16|fp16|bf16|dtype='auto'|16-true", "optim", "step|16-true"),
)
def weights_in_16_bits(module: LintModule) -> Iterator[Finding]:
    """Optimizers of torch over the parameters of a model that is in 16 bits where they are built."""
    of_lightning = list(_lightning_casts(module))
    if not (of_lightning or any(True for _ in module.events(EventKind.NEW_OPTIMIZER))):
        return
    if module.code_mentions_pattern(KEEPS_MASTERS) or module.code_mentions_pattern(TRAINS_OTHERS):
        return
    yield from _half_weight_findings(module)
    for maker, kind in of_lightning:
        yield from _lightning_cast_findings(module, maker, kind)


def _half_weight_findings(module: LintModule) -> Iterator[Finding]:
    """Yield the optimizers of torch that are built on weights in 16 bits, and step."""
    for trace in module.traces:
        casts = _model_casts_in_trace(module, trace)
        for index, event in enumerate(trace):
            if event.kind is not EventKind.NEW_OPTIMIZER:
                continue
            if not (module.resolve(event.call.func, event.scope) or "").startswith("torch.optim."):
                continue
            above = [
                one for one in casts if one.event in trace[:index] and one.event.may_share_run_with(event)
            ]
            casts_of_weights = [
                one for one in above if any(_optimizer_holds_model(one.name, name) for name in event.sources)
            ]
            cast = casts_of_weights[-1] if casts_of_weights else None
            if cast is not None and cast.kind != "fp32" and _does_optimizer_of_cast_step(module, event, cast):
                what = (
                    "has the type of its checkpoint, mostly bf16,"
                    if cast.kind == "auto"
                    else f"is {cast.kind}"
                )
                shown = f"`{name_in_source(cast.name)}` {what} since line {cast.event.call.lineno}"
                yield module.make_finding("AMP239", event.call, shown + _lost_updates_text(cast.kind))


def _lightning_cast_findings(module: LintModule, maker: str, dtype: str) -> Iterator[Finding]:
    """Yield the optimizers of torch whose weights a Trainer or a Fabric casts."""
    for call, name in module.resolved_calls:
        place = module.scope_of[call].node
        is_asked = maker.endswith("Fabric") or getattr(place, "name", "") == "configure_optimizers"
        if is_asked and re.fullmatch(r"torch\.optim\.[A-Z]\w+", name) and call.args:
            what = f"{maker.rpartition('.')[2]} of Lightning casts the weights to {dtype}"
            yield module.make_finding("AMP239", call, what + _lost_updates_text(dtype))


def _lost_updates_text(dtype: str) -> str:
    return f": updates below {LOST.get(dtype, LOST['bf16'])} of a weight are lost"


def _lightning_casts(module: LintModule) -> Iterator[tuple[str, str]]:
    """Yield each Trainer and Fabric that casts weights: its full name, and the type."""
    for call, name in module.resolved_calls:
        kind = OF_LIGHTNING.get(text_of_literal(argument(call, "precision")) or "")
        if kind and name.startswith(LIGHTNING) and name.endswith((".Trainer", ".Fabric")):
            yield name, kind


def _optimizer_holds_model(name: str, source: str) -> bool:
    """Return whether a model is what an optimizer is made from, or holds it."""
    return source == name or source.startswith(f"{name}.")


def _does_optimizer_of_cast_step(module: LintModule, new_optimizer: TrainingEvent, cast: ModelCast) -> bool:
    """Return whether an optimizer steps; by a scaler in bf16 alone, as a scaler refuses fp16 gradients."""
    if cast.kind == "fp16" and _accelerates_in_fp16(module):
        return False
    for trace in module.traces:
        if new_optimizer not in trace and not new_optimizer.subject.startswith("self."):
            continue
        for event in trace:
            steps = event.kind is EventKind.STEP and event.subject == new_optimizer.subject
            scaled = (
                event.kind is EventKind.SCALER_STEP
                and event.target == new_optimizer.subject
                and cast.kind == "bf16"
            )
            if (steps or scaled) and event.may_share_run_with(cast.event):
                return True
    return False
