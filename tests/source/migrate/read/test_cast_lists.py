"""The lists of what O1 and autocast cast, against the engine's lists and torch's own kernels of autocast."""

from ampcompare.apex.amp.lists import functional_overrides, torch_overrides
from ampcompare.source.migrate.read.cast_lists import (
    CAST_BY_AUTOCAST,
    HALF_UNDER_AUTOCAST,
    HALF_UNDER_BOTH,
    LOSSES_UNDER_AUTOCAST,
    WIDE_LAYERS,
    WIDE_UNDER_AUTOCAST,
    WIDE_UNDER_O1_ALONE,
)

HALF_OF_O1 = {*functional_overrides.FP16_FUNCS, *torch_overrides.FP16_FUNCS}
WIDE_OF_O1 = {*functional_overrides.FP32_FUNCS, *torch_overrides.FP32_FUNCS}


def test_the_lists_agree_with_those_of_the_engine() -> None:
    assert HALF_UNDER_BOTH <= HALF_OF_O1
    # Apex 25.05 lists `prelu` of torch, and scripts call that of torch.nn.functional
    assert {"conv_tbc", "prelu"} == HALF_OF_O1 - HALF_UNDER_BOTH
    assert LOSSES_UNDER_AUTOCAST <= WIDE_OF_O1
    assert WIDE_UNDER_O1_ALONE <= WIDE_OF_O1
    rest = WIDE_OF_O1 - LOSSES_UNDER_AUTOCAST - WIDE_UNDER_AUTOCAST - WIDE_UNDER_O1_ALONE
    assert rest == {"ctc_loss", "multilabel_soft_margin_loss", "renorm"}


def test_no_function_is_in_two_lists() -> None:
    parts = (HALF_UNDER_AUTOCAST, WIDE_UNDER_AUTOCAST, LOSSES_UNDER_AUTOCAST, WIDE_UNDER_O1_ALONE)
    assert sum(map(len, parts)) == len(frozenset().union(*parts))
    assert len(CAST_BY_AUTOCAST) == sum(map(len, parts[:3])) + 1
    assert {*WIDE_LAYERS.values()} <= WIDE_UNDER_AUTOCAST
