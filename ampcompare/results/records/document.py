"""The fields of records, and records as files: strict JSON with a schema number and, for that of a cell, a checksum.

Non-finite numbers are written as the strings "nan", "inf" and "-inf", since JSON has none.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ampcompare.backends.arm import label_in_present_spelling
from ampcompare.base.errors import RecordError
from ampcompare.base.files.read import FileFault, parse_json, read_text

SCHEMA = 2  # 1: results were top-1 and top-5, by these names
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _decode_non_finite_number(value: Any) -> Any:
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


# A float that strict JSON may hold as a string.
Number = Annotated[float, BeforeValidator(_decode_non_finite_number)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Finite = Annotated[float, Field(ge=0, lt=1e12)]


def parse_json_number(value: Any) -> float:
    """Return a number read from the output of `dump_json`."""
    return float(_decode_non_finite_number(value))


class FrozenRecord(BaseModel):
    """Data of a record; unknown fields of a newer version are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=(), populate_by_name=True)


Stored = TypeVar("Stored", bound=FrozenRecord)
ArmLabel = Annotated[str, AfterValidator(label_in_present_spelling)]  # of a row, or of a cell as LABEL@SEED
# what is read has the fields of this version
SchemaNumber = Annotated[int, AfterValidator(lambda read: SCHEMA)]


def _strict_json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return "nan"
        return "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(key): _strict_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict_json_value(item) for item in value]
    return value


def dump_json(value: Any, *, indent: int | None = 1) -> str:
    """Return strict JSON of a record, a step or plain data.

    Args:
        value: a pydantic model, a named tuple, or what JSON has; a number that is not finite becomes a text or null.
        indent: spaces for each level; None for one line.
    """
    if isinstance(value, BaseModel):
        value = value.model_dump(by_alias=True)
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):  # a step
        value = value._asdict()
    # Escapes beyond ASCII, so that a name in a record can neither steer a terminal nor fail to be written.
    return json.dumps(_strict_json_value(value), indent=indent, allow_nan=False)


def record_checksum(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 over what JSON holds of a record, without the field of the checksum itself."""
    rest = {name: value for name, value in values.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def json_with_checksum(record: FrozenRecord) -> str:
    """Return the JSON of a record with a checksum, by which a later edit of its file is noticed."""
    values = _strict_json_value(record.model_dump(by_alias=True))
    return dump_json({**values, "checksum": record_checksum(values)})


def read_validated_json(path: Path, model: type[Stored], what: str) -> Stored:
    """Read a JSON file as an object of a pydantic class, which messages call `what`."""
    return read_validated_and_plain_json(path, model, what)[0]


def read_validated_and_plain_json(
    path: Path, model: type[Stored], what: str
) -> tuple[Stored, dict[str, Any]]:
    """Read a file that holds one record, and return its plain content as well.

    Args:
        path: of the file.
        model: what it holds.
        what: what to call that in messages, such as "run record".

    Raises:
        RecordError: no such file, not JSON, another schema, or a field that is missing or wrong.
    """
    try:
        text = read_text(path)
    except FileFault as fault:
        raise RecordError(f"cannot read {what} {path}: {fault}") from None
    try:
        data = parse_json(text)
    except FileFault as fault:
        raise RecordError(f"{path} is not a {what}: {fault}") from None
    if not isinstance(data, dict) or not isinstance(data.get("schema"), int):
        raise RecordError(f"{path} is not a {what}: it has no schema number")
    newest = model.model_fields["schema_number"].default
    if data["schema"] > newest:
        raise RecordError(
            f"{path} has schema {data['schema']}, written by a newer ampcompare, and this one reads up to {newest}; "
            "upgrade ampcompare"
        )
    try:
        return model.model_validate(data), data
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if "error" in first.get("ctx", {}):  # of a check that an older version may not have made
            raise RecordError(f"{path}: this version refuses its {where}: {first['ctx']['error']}") from None
        raise RecordError(f"{path} is not a {what}: {where}: {first['msg']}") from None
