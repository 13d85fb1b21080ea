"""Validate a user's settings, with a one-line message for each error."""

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from ampcompare.base.errors import ConfigError, close_matches

Model = TypeVar("Model", bound=BaseModel)
MAX_FAULTS = 10
MAX_NAMES = 15


def build_validated_model(
    model: type[Model], values: Mapping[str, Any], origins: Mapping[str, str] | None = None
) -> Model:
    """Build `model` from `values`; one line of error names each bad field, the value seen and what it takes.

    Args:
        origins: where the value of a path came from, such as a flag or a file.

    Raises:
        ConfigError: a value does not fit its field.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        faults = error.errors()
        said = [_explain_fault(model, fault, origins or {}) for fault in faults[:MAX_FAULTS]]
        more = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
        raise ConfigError("; ".join([*said, *more])) from None


def _explain_fault(model: type[BaseModel], fault: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        path = ".".join("N" if isinstance(part, int) else part for part in fault["loc"])
        return f"there is no setting {where!r} ({suggestion_text(path, list(setting_paths(model)))})"
    inside = [path[len(where) + 1 :] for path in setting_paths(model) if path.startswith(f"{where}.")]
    if fault["type"] == "model_type" and inside:
        more = [f"and {len(inside) - MAX_NAMES} more"] if len(inside) > MAX_NAMES else []
        text = f"it is a group of settings, {', '.join([*inside[:MAX_NAMES], *more])}"
    else:
        text = _reword_pydantic_message(fault["msg"])
    origin = f" from {origins[where]}" if where in origins else ""
    shown = "" if isinstance(fault["input"], dict) else f" (seen: {reprlib.repr(fault['input'])}{origin})"
    return f"{where}: {text}{shown}" if where else text


def _reword_pydantic_message(message: str) -> str:
    """Return a message of pydantic in the words of the others: "must be at least 1"."""
    text = (
        message.removeprefix("Value error, ").replace("Input should be", "must be").replace("a valid ", "a ")
    )
    text = text.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    return (
        text.replace("an integer", "a whole number")
        .replace("a integer", "a whole number")
        .partition(", unable")[0]
    )


def setting_paths(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Yield the path of every setting, such as `recipe.optimizer.lr`."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from setting_paths(field.annotation, f"{above}{name}.")
            continue
        yield above + name
        for item in get_args(field.annotation):
            # a list of groups: N stands for the index in it
            if isinstance(item, type) and issubclass(item, BaseModel):
                yield from setting_paths(item, f"{above}{name}.N.")


def paths_and_values(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value with its path, such as `recipe.optimizer.lr`; an empty mapping is a value.

    Args:
        values: a tree of mappings, as a model of settings dumps it.
        prefix: put before each path, with its dot at the end; "" for none.
    """
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from paths_and_values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def suggestion_text(where: str, known_paths: list[str]) -> str:
    """Return what `where` was probably meant to be: a similar name in its group, or the same name elsewhere."""
    group, dot, name = where.rpartition(".")
    beside = list(
        dict.fromkeys(
            path[len(group + dot) :].split(".")[0] for path in known_paths if path.startswith(group)
        )
    )
    close = [group + dot + match for match in close_matches(name, beside)]
    close = close or [path for path in known_paths if f".{path}".endswith(f".{where}")]
    close = (
        close
        or [f"{path.partition(f'.{where}.')[0]}.{where}" for path in known_paths if f".{where}." in path][:1]
    )
    close = close or [path for path in known_paths if path.rpartition(".")[2] == name]
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"known in {group} are {', '.join(beside)}" if group else f"known are {', '.join(beside)}"
