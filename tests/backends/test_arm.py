"""The grammar of arms: what it takes and refuses, short ways to write one, several in a text, the canonical text."""

from importlib.metadata import EntryPoint

import pytest

from ampcompare.backends.arm import (
    Arm,
    backend_or_arm_named,
    find_text_naming_same_arm,
    label_in_present_spelling,
    parse_arms,
)
from ampcompare.base.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("apex", "apex:O1"),
        ("apex:O1,loss_scale=128.0", "apex:O1,loss_scale=128"),
        ("apex:loss_scale=dynamic", "apex:O1,loss_scale=dynamic"),
        ("apex:O2,keep_batchnorm_fp32=False,engine=auto", "apex:O2,keep_batchnorm_fp32=false"),
        ("apex:O3,keep_batchnorm_fp32", "apex:O3,keep_batchnorm_fp32"),
        ("apex:O2,cast_model_outputs=float", "apex:O2,cast_model_outputs=fp32"),
        ("native:float16,init_scale=1024", "native:fp16,init_scale=1024"),
        ("half:bn_fp32=no,dtype=float16", "half"),
        ("accelerate", "accelerate:no"),
        ("half:master_weights,dynamic", "half:masters=fp32,dynamic"),
        ("half:dynamic,growth_interval=5,master_weights=no", "half:dynamic,growth_interval=5"),
        ("half:bf16,masters=fp32", "half:bf16,masters=fp32"),
        ("half:weights=bf16,masters=none", "half:bf16"),
        ("half:bf16,rounding=stochastic,state=float32", "half:bf16,state=fp32,rounding=stochastic"),
        ("half:bf16,kahan,rounding=nearest", "half:bf16,kahan"),
        (
            "native:bf16,weights=bf16,masters=fp32,grads=fp32",
            "native:bf16,weights=bf16,masters=fp32,grads=fp32",
        ),
        ("native:weights=fp32,masters=none", "native:fp16"),
        ("half:keep_fp32=lm_head|*.norm|lm_head", "half:keep_fp32=*.norm|lm_head"),
        ("actnn:over=half:keep_fp32=*.norm+bf16", "actnn:bits=2,over=half:bf16+keep_fp32=*.norm"),
        ("fp32:tf32=off", "fp32"),
        ("mmengine", "mmengine:fp32"),
        ("horovod:compression=none,passes=1", "horovod"),
        ("actnn:group=256,over=fp32,bits=4", "actnn:bits=4"),
        ("actnn:over=apex:loss_scale=128+opt_level=O2", "actnn:bits=2,over=apex:O2+loss_scale=128"),
        ("FP8:rowwise,over=bf16,align=16", "fp8:rowwise"),
        ("fp8:over=half:bf16", "fp8:tensorwise,over=half:bf16"),
        ("apex:O2,min_loss_scale=1,max_loss_scale=8,engine=compat",) * 2,
        ("native:fp16,init_scale=4,growth_factor=3,backoff_factor=0.25,growth_interval=5",) * 2,
        ("fsdp:fp16,reduce=bf16,output=bf16,keep_fp32=a,init_scale=8,growth_interval=5",) * 2,
    ],
)
def test_canonical_text(text: str, canonical: str) -> None:
    """Every way to write an arm becomes one text, which reads as the same arm."""
    arm = Arm.parse(text)
    again = Arm.parse(canonical)
    assert str(arm) == str(again) == canonical
    assert (again, hash(again)) == (arm, hash(arm))
    words = [f"{name}={value}" for name, value in arm.options.items()]
    assert str(Arm.parse(f" {arm.backend}:{' , '.join(reversed(words))} ")) == canonical


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("natve:fp16", "unknown backend 'natve': did you mean 'native'?"),
        ("", "unknown backend ''.*known backends are fp32, apex, native, half"),
        ("O6", "opt_level=O6 cannot be used: expected one of O0, O1, O2, O3, O4, O5"),
        ("02,loss_scale=8", "letter O, not with a zero: write O2"),
        ("bf61", "unknown backend 'bf61': did you mean 'bf16'?"),
        ("fp32,bf16", "'fp32,bf16' names 2 arms, fp32 and bf16, but one arm is expected here"),
        ("apex:O2,loss_scael=1", "no option 'loss_scael': did you mean 'loss_scale'?"),
        ("fp32:loss_scale=1", "'fp32' has no option 'loss_scale'.*: tf32"),
        ("apex:O5,engine=nvidia", "O5 is a level of ROCm's Apex"),
        ("apex:O2,O3", "names 2 arms, apex:O2 and O3"),
        ("apex:O1,O2=1", "no option 'O2'"),
        ("apex:O2,loss_scale=0", "loss_scale=0 cannot be used: expected dynamic or a finite number above 0"),
        ("apex:O2,engine=cuda", "expected one of auto, nvidia, compat"),
        ("apex:O2,keep_batchnorm_fp32=maybe", "expected true or false"),
        ("native:fp8", "dtype=fp8 cannot be used: expected float16"),
        ("native:fp16,growth_interval=0", "whole number of at least 1"),
        ("fp8:align=3.5", "align=3.5 cannot be used: expected a whole number of at least 1"),
        ("half:dynamic,init_scale=much", "init_scale=much cannot be used: expected a finite number above 0"),
        (
            "native:bf16,init_scale=128",
            "init_scale belongs to a loss scale, which bf16 does not use; take native:fp16",
        ),
        ("apex:O1,min_loss_scale=8,max_loss_scale=4", "min_loss_scale=8 is above max_loss_scale=4"),
        ("apex:O2,loss_scale=128,min_loss_scale=1", "min_loss_scale belongs to a dynamic loss scale"),
        ("apex:O1,masters=fp32", "the weights are fp32 under O1, so masters=fp32 changes nothing"),
        (
            "apex:O0,keep_batchnorm_fp32=true",
            "batch norm is fp32 under O0, so keep_batchnorm_fp32 changes nothing",
        ),
        ("half:masters=fp16", "masters=fp16 cannot be used: expected one of fp32, none"),
        ("half:masters=fp32,masters=none", "gives master_weights twice, by masters=fp32 and masters=none"),
        ("fp8:rowwise,tensorwise", "gives scaling twice, by rowwise and tensorwise"),
        ("fp8:over=", "over= cannot be used: expected an arm, with its options joined by"),
        (
            "fp8:over=half:bf16,kahan",
            r"has no option 'kahan': options of the arm underneath are joined by \+",
        ),
        ("half:loss_scale=8,init_scale=4", "init_scale belongs to a dynamic loss scale"),
        ("half:bf16,masters=fp32,kahan", "masters lose none"),
        ("half:bf16,grads=fp32", "add masters=fp32"),
        ("half:rounding=stochastic", "is for bf16; write half:bf16,rounding=stochastic"),
        ("half:bf16,rounding=stochastic,kahan", "both keep small updates"),
        ("native:fp16,weights=bf16", "write native:bf16,weights=bf16"),
        ("native:weights=fp16", "GradScaler does not unscale fp16 gradients"),
        ("half:keep_fp32=a;b", "keep_fp32=a;b cannot be used: expected names or types of modules"),
        ("apex:O0,keep_fp32=a", "O0 already keeps every module in fp32"),
        ("apex:O2,loss_scale=1,loss_scale=2", "gives loss_scale twice"),
        ("accelerate:fp8", "mixed_precision=fp8 cannot be used: expected one of no, fp16, bf16"),
        ("actnn:bits=3", "bits=3 cannot be used: expected 2, 4 or 8"),
        ("actnn:group=10", "expected a multiple of 4 of at least 8"),
        ("actnn:over=actnn", "expected an arm that does not itself wrap another one"),
        ("fp8:blockwise", "expected one of tensorwise, rowwise, mxfp8"),
        ("fp8:over=fp16", "over=native:fp16 is not a bf16 arm of native or half"),
    ],
)
def test_refused(text: str, message: str) -> None:
    """What cannot be used is refused in one line that names the part and what it takes."""
    with pytest.raises(ConfigError, match=message) as caught:
        Arm.parse(text)
    assert "\n" not in str(caught.value)


def test_backend_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registered backend is known, its options are read as numbers and flags where they look so."""
    entry = EntryPoint("theirs", "their.module:Class", "ampcompare.precisions")
    monkeypatch.setattr(
        "ampcompare.backends.catalog.entry_points", lambda group: [entry] if group == entry.group else []
    )
    arm = Arm.parse("theirs:rate=0.5,steps=3,fast,mode=soft")
    assert dict(arm.options) == {"fast": True, "mode": "soft", "rate": 0.5, "steps": 3}
    assert str(arm) == "theirs:fast,mode=soft,rate=0.5,steps=3"
    assert Arm.parse(str(arm)) == arm
    with pytest.raises(
        ConfigError, match=r"known backends are fp32, apex, .*, actnn, fp8, gemm, fsdp, script, theirs"
    ):
        Arm.parse("ours")


SPELLINGS = {
    "fp32": ["FP32", "float32"],
    "apex:O0": ["o0", "Apex:O0"],
    "apex:O1": ["apex", "APEX:O1", "apex:opt_level=o1", "O1"],
    "apex:O2": ["O2", "apex:o2"],
    "apex:O5": ["O5", "o5"],
    "native:fp16": ["fp16", "AMP", "float16", "native", "native:FP16", "amp:fp16"],
    "native:bf16": ["BF16", "bfloat16", "amp:bf16", "bf16-mixed"],
    "half:bn_fp32": ["HALF:bn_fp32"],
    "half:bf16": ["half:BF16", "half:dtype=bfloat16", "bf16-true"],
    "apex:O2,loss_scale=128": ["o2:loss_scale=128", "Apex:O2,loss_scale=128.0"],
    "fp32:tf32": ["fp32,tf32"],
}
KEYS = {
    "half:bf16,masters=fp32": "half:dtype=bf16,master_weights",
    "half:masters=fp32,dynamic,init_scale=8": "half:master_weights,loss_scale=dynamic,init_scale=8",
    "fsdp:bf16,reduce=bf16": "fsdp:param=bf16,reduce=bf16",
    "fp8:rowwise,over=half:bf16+masters=fp32": "fp8:rowwise,over=half:dtype=bf16+master_weights",
    "native:bf16": "native:bf16",
}
CASES = [(text, arm) for arm, texts in SPELLINGS.items() for text in texts]


@pytest.mark.parametrize(("text", "arm"), CASES)
def test_every_spelling_is_the_canonical_arm(text: str, arm: str) -> None:
    assert str(Arm.parse(text)) == arm
    assert Arm.parse(text) == Arm.parse(arm)


@pytest.mark.parametrize(("text", "key"), KEYS.items())
def test_the_key_stays_what_older_files_have(text: str, key: str) -> None:
    """Digests are made of the key; a label of an older file that has it is read as it is written now."""
    assert Arm.parse(text).digest_text == key
    assert str(Arm.parse(key)) == text
    assert label_in_present_spelling(f"{key}@old lr=0.1@3") == f"{text}@old lr=0.1@3"


@pytest.mark.parametrize(
    "label", ["fp16", "my half:dtype=bf16", "half:bf16,dtype=bf16", "a:b", "half:dtype=bf17", ""]
)
def test_other_labels_stay_as_they_are(label: str) -> None:
    assert label_in_present_spelling(label) == label


@pytest.mark.parametrize(
    ("texts", "arms"),
    [
        (["fp32,bf16,O2"], ["fp32", "native:bf16", "apex:O2"]),
        (["half,bf16"], ["half", "native:bf16"]),
        (["half:bf16,fp32"], ["half:bf16", "fp32"]),
        (["half:bn_fp32,dtype=bf16,bf16"], None),
        (["half:bn_fp32,native:bf16"], ["half:bn_fp32", "native:bf16"]),
        (["fp32", "O1, O2 ,"], ["fp32", "apex:O1", "apex:O2"]),
        (
            ["actnn:bits=2,over=apex:O2+loss_scale=128,fp32"],
            ["actnn:bits=2,over=apex:O2+loss_scale=128", "fp32"],
        ),
    ],
)
def test_lists(texts: list[str], arms: list[str] | None) -> None:
    """A word is an arm unless it is an option of the arm before it; where it could be both, that is an error."""
    if arms is None:
        with pytest.raises(
            ConfigError, match="'bf16' can be an option of the arm before it, or the arm 'native:bf16'"
        ):
            parse_arms(texts)
        return
    assert [str(arm) for arm in parse_arms(texts)] == arms


def test_a_backend_in_python() -> None:
    """`Arm.make` takes the backend in any case, and names the arm where a shorthand is given as a backend."""
    assert Arm.make("Apex", opt_level="o2") == Arm.parse("apex:O2")
    assert Arm.make("amp", dtype="bf16") == Arm.parse("bf16")
    with pytest.raises(ConfigError, match="did you mean the arm 'native:bf16'"):
        Arm.make("bf16")
    assert backend_or_arm_named("nothing") is None


def test_the_arm_of_a_table() -> None:
    """A reference is found under another spelling; what is no arm stays as it is."""
    assert find_text_naming_same_arm("O2", ["baseline", "apex:O2"]) == "apex:O2"
    assert find_text_naming_same_arm("apex:O2", ["o2", "fp32"]) == "o2"
    assert find_text_naming_same_arm("Baseline", ["baseline"]) == "Baseline"
    assert find_text_naming_same_arm("bf16", ["fp32"]) == "bf16"
    assert find_text_naming_same_arm(None, ["fp32"]) is None
