"""The names of precisions to evaluate in, and the settings that hold them."""

from typing import Any

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.settings.config import EVAL_PRECISIONS, RunConfig, parse_eval_precisions
from ampcompare.settings.validation import validate


def test_names_are_read_from_text_and_lists() -> None:
    """Synonyms become the canonical name, and each precision stands once, in the order given."""
    assert parse_eval_precisions("fp16, bfloat16,half,,double,autocast:float16") == (
        "fp16", "bf16", "float64", "autocast:fp16",
    )  # fmt: skip
    assert parse_eval_precisions(EVAL_PRECISIONS) == EVAL_PRECISIONS


@pytest.mark.parametrize("name", ["int8", "autocast:fp32", "autocast:", "autocast:float64", "fp-16"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"to evaluate in; choose from fp32, bf16, fp16, float64, autocast:bf16"):
        parse_eval_precisions(f"fp32,{name}")


def test_a_setting_takes_text_and_names_another_cell() -> None:
    """Settings hold the names in order; a cell without any keeps the digest of earlier versions."""
    config = validate(RunConfig, {"eval_precision": "half,bf16"})
    assert config.eval_precision == ("fp16", "bf16")
    assert validate(RunConfig, config.model_dump(mode="json")) == config
    assert validate(RunConfig, {"eval_precision": ""}).digest() == RunConfig().digest() != config.digest()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"eval_precision": "int8"}, "no precision 'int8' to evaluate in"),
        ({"eval_precision": [1]}, "eval_precision"),
        ({"eval_precision": "bf16", "script": {"name": "train.py"}}, "a script evaluates its own"),
    ],
)
def test_settings_that_cannot_be_used_are_named(values: dict[str, Any], message: str) -> None:
    """A bad name, a list of something else, and a script end in one line."""
    with pytest.raises(ConfigError, match=message):
        validate(RunConfig, values)
