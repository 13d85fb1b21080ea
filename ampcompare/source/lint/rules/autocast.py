"""Rules about autocast: where it is entered, for which device, and what runs under it."""

import ast
from collections.abc import Iterator

from ampcompare.source.amp_names import AUTOCASTS
from ampcompare.source.branches import conditions_contradict, conditions_of_test
from ampcompare.source.edits import Edit
from ampcompare.source.lint.read.module import (
    Finding,
    LintModule,
    Mistake,
    dotted_text_of,
    events_after,
    events_before,
    register_rule,
    text_of_literal,
)
from ampcompare.source.lint.read.outside_autocast import edits_moving_outside_autocast
from ampcompare.source.lint.read.update_events import EventKind, TrainingEvent, WithBlock
from ampcompare.source.syntax import FunctionNode, argument, is_literal


@register_rule(
    Mistake(
        "AMP221",
        "backward-in-autocast",
        "`backward()` inside the autocast block",
        "the operations of the backward pass are cast a second time; PyTorch advises against it",
        "leave the autocast block after the loss: `backward()` uses the dtypes of the forward pass",
        """
with torch.autocast("cuda"):
    loss = model(batch)
    loss.backward()  # AMP221  # wrong
    with torch.autocast("cuda", enabled=False):  # right
        penalty.backward()  # right
loss.backward()  # right
""",
    ),
    needs=("autocast", "backward"),
)
def backward_in_autocast(module: LintModule) -> Iterator[Finding]:
    """Backward passes inside an autocast block."""
    if not module.enters_autocast:
        return
    for _, _, event in module.events(EventKind.BACKWARD):
        block = event.active_autocast_block()
        if block is not None and _may_autocast_be_on(block, event):
            shown = f"the autocast block begins in line {block.node.lineno}"
            yield module.make_finding("AMP221", event.call, shown)
        elif not any(one.kind == "autocast" for one in event.contexts):
            decorator = _decorating_autocast(module, event.call)
            if decorator is not None and _may_enabled_argument_be_true(decorator, event):
                shown = f"autocast decorates the function, in line {decorator.lineno}"
                yield module.make_finding("AMP221", event.call, shown)


def _may_autocast_be_on(block: WithBlock, event: TrainingEvent) -> bool:
    """Return whether the argument `enabled` of an autocast can be true under the conditions of an event."""
    return block.call is None or _may_enabled_argument_be_true(block.call, event)


def _may_enabled_argument_be_true(call: ast.Call, event: TrainingEvent) -> bool:
    """Return whether the argument `enabled` of an autocast may be true under the conditions of an event."""
    enabled = argument(call, "enabled")
    return enabled is None or not conditions_contradict(conditions_of_test(enabled, True), event.facts)


@register_rule(
    Mistake(
        "AMP237",
        "training-loop-in-autocast",
        "one autocast block lies around the whole training loop, `optimizer.step()` included",
        "autocast keeps its 16-bit copies of the weights until the outermost block ends: later forward passes "
        "do not see the updates, so the loss hardly falls",
        "enter autocast in each round, around the forward pass and the loss alone",
        """
with torch.autocast("cuda", dtype=torch.bfloat16):  # wrong
    for batch in loader:  # wrong
        optimizer.zero_grad()  # wrong
for batch in loader:  # right
    optimizer.zero_grad()  # right
    with torch.autocast("cuda", dtype=torch.bfloat16):  # right
        loss = model(batch)
        loss.backward()  # wrong
        optimizer.step()  # AMP237  # wrong
    loss.backward()  # right
    optimizer.step()  # right
""",
    ),
    needs=("autocast", "backward", "step"),
)
def loop_in_autocast(module: LintModule) -> Iterator[Finding]:
    """Steps of a loop that runs inside of one autocast block, whose copies of the weights grow old."""
    if not module.enters_autocast:
        return
    for trace, _, event in module.events(EventKind.STEP, EventKind.SCALER_STEP):
        if not event.loops or all(
            one.loops != event.loops for one in events_before(trace, event, EventKind.BACKWARD)
        ):
            continue
        line = _line_of_autocast_around_loop(event) or _line_of_decorating_autocast(module, event)
        if line and not module.code_mentions_pattern(r"clear_autocast_cache"):
            shown = f"the copies of the weights that the autocast of line {line} made are not updated by this step"
            yield module.make_finding("AMP237", event.call, shown)


def _line_of_autocast_around_loop(event: TrainingEvent) -> int:
    """Return the line of an autocast block that is on and lies around the loop of an event; 0 if none does."""
    for block in event.contexts:
        if (
            block.kind != "autocast"
            or not block.enabled
            or not _may_autocast_be_on(block, event)
            or not _caches_casts(block.call)
        ):
            continue
        # The loop stands in the block, or in a function that is called there.
        inside = any(node is event.loops[-1] for node in ast.walk(block.node))
        if inside or not any(node is block.node for node in ast.walk(event.loops[-1])):
            return block.node.lineno
    return 0


def _line_of_decorating_autocast(module: LintModule, event: TrainingEvent) -> int:
    """Return the line of an autocast that decorates the function with the loop of an event; 0 if none does."""
    found = _decorating_autocast(module, event.loops[-1])
    return 0 if found is None or not _caches_casts(found) else found.lineno


def _decorating_autocast(module: LintModule, node: ast.AST) -> ast.Call | None:
    """Return the autocast, not switched off, that decorates the function around a node; None without one."""
    function = module.function_around(node)
    for one in function.decorator_list if function is not None else ():
        full = module.resolve(one.func) if isinstance(one, ast.Call) else None
        if isinstance(one, ast.Call) and full in AUTOCASTS:
            enabled = argument(one, "enabled", 0 if full == "torch.cuda.amp.autocast" else None)
            return None if is_literal(enabled, False) else one
    return None


def _caches_casts(call: ast.Call | None) -> bool:
    return call is None or argument(call, "cache_enabled") is None


@register_rule(
    Mistake(
        "AMP222",
        "autocast-not-entered",
        "autocast is called without `with`, or used in `with` without being called",
        "the former changes nothing: all operations stay in fp32; the latter is an error",
        'write `with torch.autocast("cuda"):` around the forward pass',
        """
torch.autocast("cuda")  # AMP222  # wrong
loss = model(batch)  # wrong
context = torch.autocast("cuda")  # right
with context:  # right
    loss = model(batch)  # right
""",
    ),
    needs=("autocast",),
)
def autocast_entered_wrongly(module: LintModule) -> Iterator[Finding]:
    """Autocast that no `with` enters, and autocast that `with` enters or that decorates without a call."""
    for call in module.calls_of_functions(*AUTOCASTS):
        if isinstance(module.parents[call], ast.Expr):
            yield module.make_finding("AMP222", call, "this autocast is not entered")
    for node in module.nodes:
        uncalled: list[ast.expr] = []
        if isinstance(node, ast.withitem):
            uncalled = [node.context_expr]
        elif isinstance(node, FunctionNode):
            uncalled = node.decorator_list
        for one in uncalled:
            if isinstance(one, (ast.Name, ast.Attribute)) and module.resolve(one) in AUTOCASTS:
                yield module.make_finding("AMP222", one, f"`{dotted_text_of(one)}` is not called")


@register_rule(
    Mistake(
        "AMP229",
        "autocast-device",
        "`torch.autocast` is called without a device type, or with a device such as `cuda:0` instead",
        "it raises a TypeError, a ValueError or a RuntimeError",
        'write `torch.autocast("cuda")`, or `torch.autocast(device.type)`',
        """
with torch.autocast("cuda:0"):  # AMP229  # wrong
device = torch.device("cuda:0")  # right
with torch.autocast(device.type):  # right
    loss = model(batch)
""",
        fixable=True,
    ),
    needs=("autocast",),
)
def wrong_device_of_autocast(module: LintModule) -> Iterator[Finding]:
    """`torch.autocast` without a device type, or with something else than the type of a device."""
    for call in module.calls_of_functions("torch.autocast", "torch.amp.autocast"):
        if module.has_alternative_bindings(call.func) or any(one.arg is None for one in call.keywords):
            continue
        if any(isinstance(argument, ast.Starred) for argument in call.args):
            continue
        device = argument(call, "device_type", 0)
        edits: tuple[Edit, ...] = ()
        if device is None:
            yield module.make_finding("AMP229", call, "autocast has no device type")
        elif ":" in (text_of_literal(device) or ""):
            source = module.source(device)
            if source.count(":") == 1 and source[0] in "'\"":
                edits = module.replacement_edits(device, source.partition(":")[0] + source[-1])
            yield module.make_finding("AMP229", call, f"{source} is a device, not a device type", edits)
        elif _is_torch_device(module, device):
            edits = (
                module.replacement_edits(device, f"{dotted_text_of(device)}.type")
                if dotted_text_of(device)
                else ()
            )
            yield module.make_finding(
                "AMP229", call, f"`{module.source(device)}` is a device, not a device type", edits
            )


def _is_torch_device(module: LintModule, node: ast.expr) -> bool:
    """Return whether an expression is surely a `torch.device`."""
    scope = module.scope_of[node]
    values = [node] if isinstance(node, ast.Call) else module.values_of(dotted_text_of(node), scope) or []
    return bool(values) and all(
        isinstance(value, ast.Call) and module.resolve(value.func, scope) == "torch.device"
        for value in values
    )


@register_rule(
    Mistake(
        "AMP230",
        "bce-in-autocast",
        "`binary_cross_entropy` or `BCELoss` of probabilities runs under autocast of a GPU",
        "it raises a RuntimeError: the backward pass would overflow in fp16",
        "leave the sigmoid out, and use `binary_cross_entropy_with_logits` or `BCEWithLogitsLoss`",
        """
criterion = torch.nn.BCELoss()
with torch.autocast("cuda"):
    loss = criterion(model(batch), target)  # AMP230  # wrong
    output = model(batch)  # right
    with torch.autocast("cuda", enabled=False):  # right
        loss = criterion(output.float(), target)  # right
""",
        fixable=True,
    ),
    needs=("binary_cross_entropy|BCELoss", "autocast"),
)
def binary_cross_entropy_in_autocast(module: LintModule) -> Iterator[Finding]:
    """`binary_cross_entropy` of probabilities under autocast of a GPU."""
    if not module.enters_autocast:
        return
    losses: dict[ast.stmt, set[ast.Call]] = {}
    for _, _, event in module.events(EventKind.CROSS_ENTROPY):
        losses.setdefault(event.statement, set()).add(event.call)
    for _, _, event in module.events(EventKind.CROSS_ENTROPY):
        block = event.active_autocast_block()
        if block is None or block.call is None:
            continue
        if _may_autocast_be_on(block, event) and _is_autocast_of_cuda(module, block.call):
            edits = edits_moving_outside_autocast(
                module, event.statement, losses[event.statement], block.call
            )
            yield module.make_finding(
                "AMP230", event.call, f"the autocast block begins in line {block.node.lineno}", edits
            )


SCALES = r"(?i)scaler|loss_?scale|accelerat|deepspeed|fabric|lightning|\bapex\b|bfloat16|bf16"


def _is_autocast_of_cuda(module: LintModule, call: ast.Call) -> bool:
    """Return whether an autocast is surely one of CUDA."""
    if module.resolve(call.func) == "torch.cuda.amp.autocast":
        return True
    return text_of_literal(argument(call, "device_type", 0)) == "cuda"


@register_rule(
    Mistake(
        "AMP232",
        "fp16-without-scaler",
        "a model is trained under fp16 autocast, but the module never scales the loss",
        "gradients below 2**-24 become 0: layers with small gradients stop learning",
        "scale the loss by a GradScaler, or write `dtype=torch.bfloat16`",
        """
with torch.autocast("cuda", dtype=torch.float16):
    loss = model(batch)
loss.backward()  # AMP232  # wrong
optimizer.step()  # wrong
scaler.scale(loss).backward()  # right
scaler.step(optimizer)  # right
scaler.update()  # right
""",
        guard="autocast-without-dtype",
    ),
    needs=("autocast", "backward", "step"),
)
def fp16_without_scaler(module: LintModule) -> Iterator[Finding]:
    """Training under fp16 autocast, in a module without any loss scaling."""
    if not module.enters_autocast:
        return
    for trace, _, event in module.events(EventKind.BACKWARD):
        steps = events_after(trace, event, EventKind.STEP) if "(" not in event.subject else []
        if steps and _is_loss_computed_in_fp16(module, event) and not module.code_mentions_pattern(SCALES):
            yield module.make_finding(
                "AMP232", event.call, f"`{event.subject_name}` comes from fp16 autocast"
            )


def _is_loss_computed_in_fp16(module: LintModule, event: TrainingEvent) -> bool:
    """Return whether a loss is assigned under fp16 autocast."""
    values = module.values_of(event.subject_name, event.scope) or []
    return len(values) == 1 and is_in_fp16_block(module, values[0])


def is_in_fp16_block(module: LintModule, node: ast.AST) -> bool:
    """Return whether the innermost autocast around a node is surely on, of CUDA, and of fp16."""
    for outer in module.ancestors_up_to_function(node):
        for item in outer.items if isinstance(outer, ast.With) else ():
            call = item.context_expr
            if isinstance(call, ast.Call) and module.resolve(call.func) in AUTOCASTS:
                return is_fp16_autocast(module, call)
    return False


def is_fp16_autocast(module: LintModule, call: ast.Call) -> bool:
    """Return whether an autocast is surely on, of CUDA, and of fp16."""
    dtype = argument(call, "dtype", 1)
    half = dtype is None or module.resolve(dtype) in ("torch.float16", "torch.half")
    of_cuda_alone = module.resolve(call.func) == "torch.cuda.amp.autocast"
    return (
        half
        and argument(call, "enabled", 0 if of_cuda_alone else 2) is None
        and _is_autocast_of_cuda(module, call)
    )
