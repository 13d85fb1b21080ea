"""Result dtypes of expressions under O1, as recorded from Apex 25.05."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampcompare.apex import amp

GOLDEN = Path(__file__).parents[1] / "golden" / "o1-casts.json"
ROWS: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))["rows"]
CODES = {torch.float16: "h", torch.float32: "f", torch.float64: "d", torch.int64: "l", torch.bool: "?"}
DTYPES = {"f": torch.float32, "h": torch.float16}


def iadd(a: Any, b: Any) -> Any:
    a += b
    return a


def imul(a: Any, b: Any) -> Any:
    a *= b
    return a


def ipow(a: Any) -> Any:
    a **= 2
    return a


def environment(expression: str, device: str) -> dict[str, Any]:
    modules = {
        "nn_linear": lambda: nn.Linear(4, 4),
        "nn_lstm": lambda: nn.LSTM(4, 4),
        "nn_gru": lambda: nn.GRU(4, 4),
        "nn_rnn": lambda: nn.RNN(4, 4),
        "nn_lstmcell": lambda: nn.LSTMCell(4, 4),
        "nn_grucell": lambda: nn.GRUCell(4, 4),
        "nn_rnncell": lambda: nn.RNNCell(4, 4),
        "nn_ln": lambda: nn.LayerNorm(4),
        "nn_bn": lambda: nn.BatchNorm1d(4),
        "nn_mha": lambda: nn.MultiheadAttention(4, 2),
    }
    names: dict[str, Any] = {"torch": torch, "F": F, "idx": torch.tensor([0, 1, 2, 3], device=device)}
    names.update(iadd=iadd, imul=imul, ipow=ipow)
    for word in re.findall(r"\b(w\d+|nn_\w+)\b", expression):
        sizes = [] if word in modules else [int(c) for c in word[1:]]
        names[word] = (
            modules[word]().to(device) if word in modules else nn.Parameter(torch.ones(sizes, device=device))
        )
    return names


def outcome(row: dict[str, Any], dtypes: str, device: str = "cpu") -> str:
    """Return the dtype code of the row's result for inputs of these dtypes, or `!` and the exception's name."""
    names = environment(row["expr"], device)
    for k, ((name, shape), dtype) in enumerate(zip(row["inputs"].items(), dtypes, strict=True)):
        values = 0.9 * torch.sin(1.7 * torch.arange(math.prod(shape), dtype=torch.float64) + k)
        names[name] = values.to(DTYPES[dtype]).reshape(shape).to(device)
    try:
        with torch.no_grad():
            return CODES[eval(row["expr"], names).dtype]
    except Exception as error:
        return f"!{type(error).__name__}"


def initialize_o1(strict: bool = False) -> None:
    model = nn.Linear(2, 2)
    amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0, strict=strict
    )


def test_there_are_98_rows() -> None:
    assert len(ROWS) == 98


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_casts(row: dict[str, Any]) -> None:
    """An expression under O1 gives the dtype, or the exception, that it gave under the real Apex, strict or not.

    After the session is closed it gives what it gives without amp.
    """
    dtypes = [combination for combination, code in row["without_amp"].items() if code != "!unsupported"]
    before = [outcome(row, combination) for combination in dtypes]
    for strict in (False, True):
        initialize_o1(strict)
        for combination, expected in row["O1"].items():
            if expected != "!unsupported":
                assert outcome(row, combination) == expected, (strict, combination)
        amp._amp_state.close()
        assert [outcome(row, combination) for combination in dtypes] == before
