"""What arms declare: types that follow from options in every backend alike, and their words."""

import pytest

from ampcompare.backends.arm import Arm
from ampcompare.backends.roles import BATCH_NORM, LossScale, Roles


def roles_of(text: str) -> Roles:
    roles = Arm.parse(text).roles
    assert roles is not None
    return roles


@pytest.mark.parametrize(
    ("arm", "roles"),
    [
        ("fp32", Roles()),
        ("fp32:tf32", Roles(products="tf32")),
        ("apex:O1", Roles(products="fp16", lists="O1", loss_scale=LossScale(65536.0, 2000, highest=2.0**24))),
        ("native:bf16", Roles(products="bf16", lists="autocast")),
        ("native:bf16,state=bf16", Roles(products="bf16", lists="autocast", state="bf16")),
        ("half:bf16", Roles("bf16", gradients="bf16", step="bf16", state="bf16", reduction="bf16")),
        (
            "half:bf16,state=bf16",
            Roles("bf16", gradients="bf16", step="fp32", state="bf16", reduction="bf16"),
        ),
        (
            "half:bf16,masters=fp32,grads=fp32,reduce=fp32,keep_fp32=head",
            Roles("bf16", masters="fp32", kept=("head",)),
        ),
        ("fsdp:bf16,reduce=bf16", Roles(products="bf16", reduction="bf16", kept=(BATCH_NORM,))),
        ("horovod:compression=fp16", Roles(reduction="fp16")),
    ],
)
def test_what_an_arm_declares(arm: str, roles: Roles) -> None:
    assert roles_of(arm) == roles


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("apex:O5", "half:bf16,bn_fp32,masters=fp32"),
        ("apex:O3", "half"),
        ("apex:O3", "apex:O2,masters=none,keep_batchnorm_fp32=false,loss_scale=1"),
        ("apex:O2,masters=none", "apex:O2,master_weights=false"),
        ("fabric:bf16-true", "half:bf16"),
        ("accelerate:fp16", "native:fp16"),
        ("actnn:bits=4,over=half:bf16+kahan", "half:bf16,kahan"),
    ],
)
def test_one_declaration_is_reached_in_several_ways(one: str, other: str) -> None:
    assert roles_of(one) == roles_of(other)


@pytest.mark.parametrize(
    "option", ["state=bf16", "grads=fp32", "reduce=fp32", "rounding=stochastic", "kahan"]
)
def test_an_option_means_the_same_in_each_backend(option: str) -> None:
    """What an option changes of bf16 weights in `half`, it changes of those under autocast."""
    masters = ",masters=fp32" if option.startswith("grads") else ""
    changed = []
    for plain in (f"half:bf16,bn_fp32{masters}", f"native:bf16,weights=bf16{masters}"):
        before, after = roles_of(plain), roles_of(f"{plain},{option}")
        assert before != after
        changed.append({name: value for name, value in vars(after).items() if value != getattr(before, name)})
    assert changed[0] == changed[1]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("half:bf16,reduce=bf16", "half:bf16", True),
        ("native:bf16,state=fp32", "native:bf16", True),
        ("apex:O2,keep_batchnorm_fp32=true", "apex:O2", True),
        ("half:bf16,state=bf16", "half:bf16", False),
        ("apex:O2,engine=compat", "apex:O2", False),
        ("apex:O3", "half", False),
        ("actnn:bits=2", "actnn:bits=4", False),
        ("script", "script", False),
    ],
)
def test_two_names_of_one_arm(one: str, other: str, same: bool) -> None:
    """Arms of one backend whose options change no type are one arm; another engine or backend is another arm."""
    assert Arm.parse(one).declares_same_types(Arm.parse(other)) is same
