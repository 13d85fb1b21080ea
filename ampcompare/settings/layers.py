"""Merge settings from flags, environment, files and recipes, and record where each value came from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ampcompare.base.errors import ConfigError
from ampcompare.base.files.read import FileFault, parse_yaml
from ampcompare.settings.config import RunConfig
from ampcompare.settings.validation import build_validated_model, paths_and_values

# A value in a higher layer invalidates values in lower layers that determine the same quantity in another way.
MUTUALLY_EXCLUSIVE = {
    "recipe.optimizer.lr": ("recipe.optimizer.lr_base",),
    "recipe.optimizer.lr_base": ("recipe.optimizer.lr",),
    "recipe.batch_size": ("recipe.global_batch_size",),
    "recipe.global_batch_size": ("recipe.batch_size",),
}
FOLLOWS = {  # the values from which a value that was not given is derived
    "recipe.optimizer.lr": "recipe.optimizer.lr_base",
    "recipe.batch_size": "recipe.global_batch_size",
    "parallel.kind": "processes",
}
# Arguments of one network, or optimizer, mean nothing to another.
ARGUMENTS = {"recipe.model.arch": "recipe.model.args", "recipe.optimizer.name": "recipe.optimizer.args"}


@dataclass(frozen=True)
class Layer:
    """Settings from one source: nested by groups, with names of single values by their paths if the source has them."""

    origin: str
    values: Mapping[str, Any]
    origins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ResolvedSettings:
    """The merged settings, where the value of every path came from, and the paths that a source gave."""

    config: RunConfig
    origins: dict[str, str]
    given: dict[str, str]


def resolve_settings(layers: Sequence[Layer]) -> ResolvedSettings:
    """Join layers, each winning over those before it."""
    values: dict[str, Any] = {}
    given: dict[str, str] = {}
    for layer in layers:
        new = dict(paths_and_values(layer.values))
        for name, arguments in ARGUMENTS.items():
            if new.get(name, _value_at_path(values, name)) != _value_at_path(values, name):
                _drop_paths(values, given, [path for path in given if path.startswith(arguments)])
        rivals = [rival for path in new for rival in MUTUALLY_EXCLUSIVE.get(path, ())]
        _drop_paths(values, given, [rival for rival in rivals if rival not in new])
        for path, value in new.items():
            if value == {} and isinstance(_value_at_path(values, path), Mapping):
                continue  # an empty group in a file removes nothing
            set_value_at_path(values, path, value)
            given[path] = layer.origins.get(path, layer.origin)
    config = build_validated_model(RunConfig, values, given)
    return ResolvedSettings(config, _origin_by_path(config, given), given)


def parse_path_and_value(text: str, flag: str) -> tuple[str, Any]:
    """Read NAME=VALUE, where the value is YAML.

    Args:
        text: what was given.
        flag: with which it was given, such as `--set`, for the error.

    Raises:
        ConfigError: there is no `=`, no name, or the value is no YAML.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"{flag} {text!r} is not NAME=VALUE")
    try:
        return name, parse_yaml(value)
    except FileFault as fault:
        raise ConfigError(f"{flag} {text!r}: {fault}") from None


def set_value_at_path(values: dict[str, Any], path: str, value: Any) -> None:
    """Set a value in nested mappings.

    Args:
        values: is changed; mappings on the way are made if they are missing.
        path: such as `recipe.optimizer.lr`.
        value: replaces what is there.

    Raises:
        ConfigError: a part of the path is a value already.
    """
    *parents, name = path.split(".")
    node = values
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{path} cannot be set: {parent} is {node!r}, not a group of settings")
    node[name] = value


def _value_at_path(values: Mapping[str, Any], path: str) -> Any:
    node: Any = values
    for part in path.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _drop_paths(values: dict[str, Any], origins: dict[str, str], paths: Sequence[str]) -> None:
    for path in paths:
        if origins.pop(path, None) is None:
            continue
        *parents, name = path.split(".")
        node = values
        for parent in parents:
            node = node[parent]
        del node[name]


def _origin_by_path(config: RunConfig, given: Mapping[str, str]) -> dict[str, str]:
    """Return where the value at each path came from; a value that was not given is a default, or follows from another
    value."""
    origins = {}
    for path, _ in paths_and_values(config.model_dump(mode="json")):
        source = FOLLOWS.get(path, "")
        if path in given:
            origins[path] = given[path]
        elif source in given:
            origins[path] = f"follows from {source}"
        else:
            origins[path] = "default"
    return origins
