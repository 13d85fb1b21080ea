"""What an arm declares next to what its ledger shows: where the two differ, the run is not one of that arm."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace

from ampcompare.backends.arm import Arm
from ampcompare.backends.roles import BATCH_NORM, FP16_MAX, LossScale, Roles
from ampcompare.base.tensors.type_names import HALF_NAMES
from ampcompare.results.records.ledger import Ledger
from ampcompare.results.records.run import RunRecord
from ampcompare.results.records.verdict import Verdict

FLOATS = (*HALF_NAMES, "fp32")
NOTICEABLE = 0.5  # per cent
PARTS = (
    *("weights", "masters", "forward products", "backward products"),
    *("gradients", "accumulated gradients", "reduction"),
    *("fprop", "dgrad", "wgrad"),
    *("state", "rounding", "loss scale", "update lost", "largest gradient", "zero denominators"),
)
FIGURES = PARTS[-3:]  # that no arm declares
PLURAL = PARTS[:6]
# Fields of `Roles` that a training may not need, with the part that says why.
OF_UPDATES = {
    "masters": "",
    "gradients": "accumulated gradients",
    "step": "",
    "state": "state",
    "reduction": "reduction",
}


@dataclass(frozen=True)
class RoleComparison:
    """One part of a step, as it was declared and as it ran; the remark says why nothing was seen, or who set it.

    Attributes:
        differs: it is not as declared.
        departs: it is not as declared by what the arm leaves alone, such as frozen weights; that is no fault.
    """

    name: str
    declared: str
    observed: str
    differs: bool = False
    remark: str = ""
    departs: bool = False

    @property
    def position_in_step(self) -> int:
        """Where the part stands in a step."""
        return PARTS.index(self.name)

    @property
    def difference_text(self) -> str:
        """The difference in words, such as `state is fp32, bf16 was asked`."""
        name = "products" if self.name.endswith("products") else self.name
        return f"{name} {'are' if self.name in PLURAL else 'is'} {self.observed}, {self.declared} was asked"


def why_not_as_declared(records: Iterable[RunRecord]) -> str:
    """Return in what a run is not as its arm declares; "" if all that was seen of all runs is, or nothing was seen."""
    for record in records:
        if record.fell_back is not None:
            arm, step = next(iter(record.fell_back.diverged.items()))
            return f"{arm} diverged at step {step}, and {record.fell_back.arm} trained instead"
        roles = record.config.parsed_arm.roles
        if roles is None or record.ledger is None:
            continue
        parts = [role.difference_text for role in role_comparisons(roles, record.ledger) if role.differs]
        if parts:
            return "; ".join(dict.fromkeys(parts))
    return ""


def roles_and_changes_by_update_option(arm: Arm) -> dict[str, tuple[Roles, set[str]]]:
    """Return each option of updates alone, with what the arm without it declares and which fields it changes.

    Args:
        arm: whose options change the types of weights, masters or state in a step, or nothing of that kind.

    Returns:
        By the option as the arm spells it, such as "masters=fp32": the roles without it, and the names of the fields of
        `Roles` that differ. Empty for an arm without such an option.
    """
    found = {}
    for name, word in arm.option_texts.items():
        bare = arm.without_option(name)
        if arm.roles is not None and bare is not None and bare.roles is not None:
            less = bare.roles
            declared = [one.name for one in fields(Roles) if one.compare]
            changed = {name for name in declared if getattr(arm.roles, name) != getattr(less, name)}
            if changed and changed <= OF_UPDATES.keys():
                found[word] = less, changed
    return found


def ineffective_option_sentences(arm: Arm, ledger: Ledger) -> list[str]:
    """Return a sentence for each option about updates that has had no effect on a training.

    Args:
        arm: under which it trained.
        ledger: the types that really ran.
    """
    sentences = []
    if not ledger.groups or _are_all_steps_skipped(ledger):
        return []
    for word, (less, changed) in roles_and_changes_by_update_option(arm).items():
        found = role_comparisons(arm.roles, ledger)
        strict = replace(less, asks_state=True)  # what runs without the option is what it declares
        if not any(role.differs for role in (*found, *role_comparisons(strict, ledger))):
            remarks = {role.name: role.remark for role in found if not role.observed}
            part = OF_UPDATES[next(iter(changed))] if len(changed) == 1 else ""
            sentences.append(
                f"{word} has no effect on this training: {remarks.get(part) or 'every weight is fp32'}"
            )
    return sentences


def sentences_on_types_not_of_arm(roles: Roles | None, ledger: Ledger) -> list[str]:
    """Return in words what a training computes or keeps by itself in other types than the arm, and what hid them."""
    found = {role.name: role for role in role_comparisons(roles, ledger)}
    notes = []
    for name, part in (("forward products", ledger.forward), ("backward products", ledger.backward)):
        if roles is not None and name in found and found[name].departs:
            own = ", ".join(
                f"{_share_percent_text(100 * part[one])} %" + f" of {name} in {one}"
                for one in _undeclared_16bit_types(roles, part)
            )
            notes.append(f"{own}: frozen weights")
    if roles is not None and found["state"].departs:
        notes.append(f"the optimizer keeps its state in {found['state'].observed}")
    if ledger.unseen:
        notes.append(f"products not seen: {ledger.unseen}")
    return notes


def not_as_declared_verdict(records: Iterable[RunRecord]) -> Verdict:
    """Return the verdict on an arm that did not run as it declares; an empty one if it did."""
    return Verdict.because("not as declared", why_not_as_declared(records))


def role_comparisons(roles: Roles | None, ledger: Ledger) -> list[RoleComparison]:
    """Return each part of a step, those that differ first; a script as it is written has no declared roles."""
    if roles is None:
        parts: list[RoleComparison] = []
        for name, text, remark in _ledger_table_rows(ledger, roles):
            is_skipped = name in ("state", "rounding") and _are_all_steps_skipped(ledger)
            if text or is_skipped or "not seen" in remark:
                parts.append(RoleComparison(name, "", text, remark=remark))
        return parts
    observed = {name: (text, remark) for name, text, remark in _ledger_table_rows(ledger, roles)}
    if without := _steps_without_declared_products(roles, ledger):
        text, remark = observed["forward products"]
        observed["forward products"] = f"{text} (none in {roles.operand_type} in step {without[0]})", remark
    departing = _parts_of_other_types_than_declared(roles, ledger)
    rows = []
    for name, (declared, agrees) in _declared_types_and_agreement_by_part(roles, ledger).items():
        text, remark = observed[name]
        shown = text or ("none" if name in ("masters", "loss scale", *roles.linear_formats) else "")
        departs = agrees and name in departing
        if name == "state" and departs:
            remark = f"the optimizer's own; {remark}"
        rows.append(RoleComparison(name, declared, shown, not agrees, remark, departs))
    rows += [
        RoleComparison(name, "", text, remark=remark)
        for name in FIGURES
        for text, remark in [observed[name]]
        if text
    ]
    return sorted(rows, key=lambda role: not role.differs)


def _declared_types_and_agreement_by_part(roles: Roles, ledger: Ledger) -> dict[str, tuple[str, bool]]:
    """Return of each part what is declared, and whether what was seen agrees."""
    kept = _types_allowed_beside_declared(roles)
    held = set(ledger.types_of_groups("weights"))
    has_masters = bool(roles.masters) and (bool(held & set(HALF_NAMES)) or not kept)
    in_forward = _has_products_in_declared_type(
        roles, ledger.forward, ledger
    ) and not _steps_without_declared_products(roles, ledger)
    state_fits = _fits_declared_type(roles.state, ledger.types_of_groups("state"), kept)
    return {
        "weights": (
            roles.weights,
            _fits_declared_type(roles.weights, ledger.types_of_groups("weights"), kept),
        ),
        "masters": (
            roles.masters or "none",
            bool(ledger.types_of_groups("masters")) == has_masters or not held,
        ),
        "forward products": (roles.operand_type, in_forward),
        "backward products": (
            roles.operand_type,
            _has_products_in_declared_type(roles, ledger.backward, ledger),
        ),
        "gradients": (roles.step, _fits_declared_type(roles.step, ledger.types_of_groups("gradients"), kept)),
        "accumulated gradients": (
            roles.gradients,
            _fits_declared_type(roles.gradients, ledger.accumulated, kept),
        ),
        "reduction": (roles.reduction, _fits_declared_type(roles.reduction, ledger.reduced, kept)),
        "state": (roles.state, not roles.asks_state or state_fits),
        "rounding": (roles.update, ledger.update in ("", roles.update)),
        "loss scale": (
            _declared_scale_text(roles.loss_scale),
            (roles.loss_scale is None) == (_last_loss_scale(ledger, roles) is None) or not ledger.backward,
        ),
        **{
            name: (str(form), _are_linears_in_declared_format(name, str(form), ledger))
            for name, form in roles.linear_formats.items()
        },
    }


def _parts_of_other_types_than_declared(roles: Roles, ledger: Ledger) -> set[str]:
    """Return the parts that are of other types than declared, be it by what the arm leaves alone."""
    departs = {
        "forward products": bool(_undeclared_16bit_types(roles, ledger.forward)),
        "backward products": bool(_undeclared_16bit_types(roles, ledger.backward)),
        "state": not _fits_declared_type(
            roles.state, ledger.types_of_groups("state"), _types_allowed_beside_declared(roles)
        ),
    }
    return {name for name, is_other in departs.items() if is_other}


def _types_allowed_beside_declared(roles: Roles) -> tuple[str, ...]:
    return ("fp32",) if roles.kept else ()


def _ledger_table_rows(ledger: Ledger, roles: Roles | None) -> list[tuple[str, str, str]]:
    """Return (part, types that were seen, remark) of each part; a remark says who set them, or why none were seen."""
    by = ledger.by
    scale = _last_loss_scale(ledger, roles)
    skipped = "every step was skipped" if _are_all_steps_skipped(ledger) else ""
    no_state = "" if ledger.types_of_groups("state") else skipped or "the optimizer keeps none"
    one_pass = "" if ledger.accumulated else "one backward pass a step"
    one_rank = "" if ledger.reduced else "one process, or no reduction was seen"
    emulated = f"{ledger.emulated} emulated" if ledger.emulated else ""
    others = "; ".join(f"{name}: {', '.join(found)}" for name, found in ledger.elsewhere.items())
    frozen = (
        f"frozen weights are {observed_types_text(ledger.frozen)}"
        if set(HALF_NAMES) & ledger.frozen.keys()
        else ""
    )
    unseen = f"not seen: {ledger.unseen}" if ledger.unseen else ""
    setter = by.get("products", "")
    if setter.startswith("autocast") and ledger.forward and not {*HALF_NAMES, "fp8"} & ledger.forward.keys():
        setter += ", which has cast none"  # that of another thread, say
    products = ", ".join(filter(None, [setter, emulated, others, frozen, unseen]))
    return [
        ("weights", observed_types_text(ledger.types_of_groups("weights")), by.get("weights", "")),
        ("masters", observed_types_text(ledger.types_of_groups("masters")), by.get("masters", "")),
        ("forward products", observed_types_text(ledger.forward), products),
        (
            "backward products",
            observed_types_text(ledger.backward),
            unseen or _text_of_backward_only_16bit_types(ledger),
        ),
        ("gradients", observed_types_text(ledger.types_of_groups("gradients")), ""),
        ("accumulated gradients", observed_types_text(ledger.accumulated), one_pass),
        ("reduction", observed_types_text(ledger.reduced), one_rank),
        *_roles_formats_and_rounding_of_linear_products(ledger),
        ("state", observed_types_text(ledger.types_of_groups("state")), no_state or by.get("state", "")),
        ("rounding", ledger.update, "" if ledger.update else skipped),
        ("loss scale", *(("", "") if scale is None else (f"{scale:g}", by.get("loss scale", "")))),
        ("update lost", "" if ledger.lost is None else f"{_share_percent_text(100 * ledger.lost)} %", ""),
        ("largest gradient", *_largest_gradient_and_why_too_large(ledger)),
        (
            "zero denominators",
            f"{_share_percent_text(100 * zero)} %" if (zero := ledger.zero_denominators) else "",
            "",
        ),
    ]


def _text_of_backward_only_16bit_types(ledger: Ledger) -> str:
    """Return which 16-bit types only the backward pass has; "" for none."""
    backward = [name for name in HALF_NAMES if name in ledger.backward] if ledger.forward else []
    alone = [name for name in backward if name not in ledger.forward]
    why = "in the backward pass alone, as where a function computes again under autocast without its dtype"
    return f"{' and '.join(alone)} {why}" if alone else ""


def _are_linears_in_declared_format(role: str, declared_format: str, ledger: Ledger) -> bool:
    """Return whether linear layers multiplied in the declared format, but those in bf16, and no gradient got lost."""
    if not ledger.forward or ledger.unseen:
        return True
    found = {one.format for one in ledger.linear if one.role == role}
    if any(name.endswith(f" {role}") for name in ledger.lost_gradients) or not found <= {
        declared_format,
        "bf16",
    }:
        return False
    if declared_format in found:
        return True
    # No layer but those that are kept may have this gradient: the first one's input needs none.
    in_bf16 = {name for one in ledger.linear if one.role == role for name in one.layers}
    acts = any(one.format != "bf16" for one in ledger.linear)
    return role != "fprop" and acts and in_bf16 <= set(ledger.linear_in_bf16)


def _roles_formats_and_rounding_of_linear_products(ledger: Ledger) -> list[tuple[str, str, str]]:
    """Return (role, formats with their shares, what rounding did) of the products of linear layers."""
    parts = []
    for role in ("fprop", "dgrad", "wgrad"):
        found = [one for one in ledger.linear if one.role == role]
        lost = [name.removesuffix(f" {role}") for name in ledger.lost_gradients if name.endswith(f" {role}")]
        text = observed_types_text({one.format: one.share for one in found})
        if lost:
            text = f"{text}; all 0, where bf16 is not, in {', '.join(lost[:3])}"
        remarks = []
        for one in found:
            if one.error is not None:
                shares = (one.cut_off or 0, one.zeroed or 0, one.scales_at_end or 0, one.error)
                cut_off, zeroed, at_end, error = (_share_percent_text(100 * share) for share in shares)
                remarks.append(
                    f"{cut_off} % cut off, {zeroed} % became 0, {at_end} % of scales at an end, error {error} %"
                )
        parts.append((role, text, "; ".join(remarks)))
    return parts


def _largest_gradient_and_why_too_large(ledger: Ledger) -> tuple[str, str]:
    """Return the largest gradient times the loss scale where one is held in fp16, and whether it is beyond that."""
    if ledger.largest_gradient is None or "fp16" not in {
        *ledger.backward,
        *ledger.types_of_groups("gradients"),
    }:
        return "", ""
    scale = ledger.loss_scale or 1.0
    size = ledger.largest_gradient * scale
    return f"{size:.3g}", "" if size <= FP16_MAX else f"beyond {FP16_MAX:g}, the largest number of fp16"


def observed_types_text(types: Mapping[str, float]) -> str:
    """Return types with their shares, the largest first: `bf16`, or `bf16 98 %, fp32 2 %`."""
    if len(types) < 2:
        return next(iter(types), "")
    shown = sorted(types.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {_share_percent_text(100 * share)} %" for name, share in shown)


def _share_percent_text(value: float) -> str:
    if 0 < value < NOTICEABLE:
        return "<1"
    if 100 - NOTICEABLE < value < 100:
        return ">99"
    return f"{value:.0f}"


def _fits_declared_type(declared_type: str, types: Mapping[str, float], kept_types: Collection[str]) -> bool:
    """Return whether what was seen is of the declared type, or fp32 in what is kept; nothing seen fits.

    Other types than those of arms are of a model in fp64, or of an optimizer with a state of its own form.
    """
    found = {name for name in types if name in FLOATS}
    return not found or (
        found <= {declared_type, *kept_types} and (declared_type in found or bool(kept_types))
    )


def _has_products_in_declared_type(roles: Roles, types: Mapping[str, float], ledger: Ledger) -> bool:
    """Return whether products ran in the declared type.

    Sensitive or kept parts may run in a wider one, and frozen weights, which keep their type where an arm does not cast
    them, in their own.
    """
    found = {name for name in types if name in (*FLOATS, "fp8")}
    if not found or roles.operand_type == "tf32":  # a switch of the device
        return True
    if roles.operand_type == "fp8":
        return "fp8" in found or ledger.emulated == "fp8"  # an emulation multiplies in fp32
    if roles.operand_type == "fp32":
        return found <= {"fp32", *ledger.frozen}
    return found <= {roles.operand_type, "fp32", *ledger.frozen} and (
        roles.operand_type in found or _has_kept_modules_besides_norms(roles)
    )


def _undeclared_16bit_types(roles: Roles, types: Mapping[str, float]) -> list[str]:
    """Return the 16-bit types of products that are not the declared one."""
    if roles.operand_type not in FLOATS:
        return []
    return [name for name in HALF_NAMES if name in types and name != roles.operand_type]


def _are_all_steps_skipped(ledger: Ledger) -> bool:
    return 0 < len(ledger.steps) <= ledger.skipped


def _has_kept_modules_besides_norms(roles: Roles) -> bool:
    return bool(set(roles.kept) - {BATCH_NORM})


def _steps_without_declared_products(roles: Roles | None, ledger: Ledger) -> list[int]:
    """Return the steps whose forward pass had products, but none in the declared type, while others had some."""
    if roles is None or roles.operand_type not in HALF_NAMES or _has_kept_modules_besides_norms(roles):
        return []
    narrow = set(ledger.forward_steps.get(roles.operand_type, ()))
    everything = {step for steps in ledger.forward_steps.values() for step in steps}
    return sorted(everything - narrow) if narrow else []


def _last_loss_scale(ledger: Ledger, roles: Roles | None) -> float | None:
    """Return the last loss scale; None for a loss that was not scaled, or by 1 where no arm lets the scale move."""
    moves = roles is not None and roles.loss_scale is not None and roles.loss_scale.interval is not None
    return None if ledger.loss_scale == 1.0 and not moves else ledger.loss_scale


def _declared_scale_text(scale: LossScale | None) -> str:
    if scale is None:
        return "none"
    return f"{scale.first:g}" if scale.is_static else "dynamic"
