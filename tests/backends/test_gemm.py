"""The text of an arm of `gemm`: its formats by product, and options that would change nothing."""

import pytest

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "canonical", "formats"),
    [
        ("gemm", "gemm:mxfp8", ["mxfp8, scale rceil"] * 3),
        ("gemm:mxfp4,scale=even", "gemm:mxfp4,scale=even", ["mxfp4, scale even"] * 3),
        (
            "gemm:nvfp4,tiles,rht,sr",
            "gemm:nvfp4,sr,rht,tiles",
            ["nvfp4, scale te, tiles", "nvfp4, scale te, sr, tiles", "nvfp4, scale te, sr, rht"],
        ),
        ("gemm:bf16,fprop=nvfp4", "gemm:bf16,fprop=nvfp4", ["nvfp4, scale te", "bf16", "bf16"]),
        ("gemm:nvfp4,wgrad=bf16", "gemm:nvfp4,wgrad=bf16", ["nvfp4, scale te"] * 2 + ["bf16"]),
        (
            "gemm:tensorwise",
            "gemm:fp8_tensorwise",
            ["fp8_tensorwise, scale fp32"] + ["fp8_tensorwise, scale fp32, grads_as=e5m2"] * 2,
        ),
        (
            "gemm:fp8-tensorwise,grads_as=e4m3",
            "gemm:fp8_tensorwise,grads_as=e4m3",
            ["fp8_tensorwise, scale fp32"] * 3,
        ),
        ("gemm:rowwise", "gemm:fp8_rowwise", ["fp8_rowwise, scale pow2"] * 3),
        ("gemm:blockwise,scale=pow2", "gemm:fp8_blockwise,scale=pow2", ["fp8_blockwise, scale pow2"] * 3),
        (
            "gemm:mxfp8,grads_as=e5m2",
            "gemm:mxfp8,grads_as=e5m2",
            ["mxfp8, scale rceil"] + ["mxfp8, scale rceil, grads_as=e5m2"] * 2,
        ),
        (
            "gemm:mxfp8,fprop=mxfp4,scale=even",
            "gemm:mxfp8,fprop=mxfp4,scale=even",
            ["mxfp4, scale even", "mxfp8, scale even", "mxfp8, scale even"],
        ),
        ("fp8:mxfp8", "gemm:mxfp8", ["mxfp8, scale rceil"] * 3),
        ("fp8:over=half:bf16,MXFP8,align=1", "gemm:mxfp8,over=half:bf16", ["mxfp8, scale rceil"] * 3),
    ],
)
def test_an_arm_declares_the_format_of_each_product(text: str, canonical: str, formats: list[str]) -> None:
    arm = Arm.parse(text)
    assert str(arm) == canonical
    assert Arm.parse(canonical) == arm
    assert arm.roles is not None
    assert list(map(str, arm.roles.linear_formats.values())) == formats


def test_other_roles_are_those_of_the_arm_underneath() -> None:
    """Bytes per parameter too: rounded operands last for a product."""
    arm, inner = Arm.parse("gemm:nvfp4,over=half:bf16+masters=fp32"), Arm.parse("half:bf16,masters=fp32")
    assert arm.roles is not None
    assert inner.roles is not None
    assert arm.roles.bytes_per_parameter == inner.roles.bytes_per_parameter
    assert (arm.roles.half, arm.roles.masters) == ("bf16", "fp32")
    assert str(arm.roles).startswith(str(inner.roles))
    assert not arm.declares_same_types(Arm.parse("gemm:nvfp4,keep=none,over=half:bf16+masters=fp32"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gemm:mxfp6", "format=mxfp6 cannot be used: expected one of bf16, fp8_tensorwise"),
        ("gemm:nvfp4,scale=even", "not a way to make a scale of these formats: nvfp4 has te, torchao"),
        ("gemm:bf16,scale=even", "not a way to make a scale of these formats: bf16 has none"),
        ("gemm:bf16,fprop=nvfp4,sr", "sr changes nothing here: it needs dgrad or wgrad in a format"),
        ("gemm:nvfp4,wgrad=bf16,rht", "rht changes nothing here: it needs wgrad in a format"),
        ("gemm:fp8_rowwise,tiles", "tiles changes nothing here"),
        ("gemm:fp8_blockwise,tiles", "tiles changes nothing here"),
        (
            "gemm:nvfp4,grads_as=e5m2",
            "grads_as=e5m2 changes nothing here: it needs dgrad or wgrad in a format of 8",
        ),
        ("gemm:nvfp4,fprop=nvfp4", "fprop=nvfp4 is what nvfp4 means already"),
        ("gemm:mxfp8,over=fp16", "over=native:fp16 is not a bf16 arm of native or half"),
        (
            "gemm:mxfp8,over=fp8",
            "over=fp8 cannot be used: expected an arm that does not itself wrap another one",
        ),
        (
            "gemm:nvfp4,rht,engine=torchao",
            "torchao multiplies in mxfp8 alone, without switches, not in nvfp4, rht",
        ),
        ("gemm:mxfp8,wgrad=bf16,engine=torchao", "not in bf16; leave these out"),
        ("gemm:mxfp8,engine=cuda", "expected one of emulation, torchao"),
        ("gemm:mxfp8,keep=", "keep= cannot be used"),
    ],
)
def test_what_changes_nothing_or_is_not_there_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Arm.parse(text)
