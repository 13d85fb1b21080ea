"""The fields that records are made of: frozen models, and numbers that strict JSON may hold as text."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

__all__ = ["Count", "Finite", "FrozenRecord", "Number", "Share", "to_float"]

NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _number(value: Any) -> Any:
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


# A float that strict JSON may hold as a string.
Number = Annotated[float, BeforeValidator(_number)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Finite = Annotated[float, Field(ge=0, lt=1e12)]


def to_float(value: Any) -> float:
    """Return a number read from the output of `dump_json`."""
    return float(_number(value))


class FrozenRecord(BaseModel):
    """Data of a record; unknown fields of a newer version are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=(), populate_by_name=True)
