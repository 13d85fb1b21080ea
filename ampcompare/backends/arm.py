"""The text of an arm, `backend[:option[,option...]]`, parsed, checked and written back in one spelling.

Needs neither torch nor pydantic, so that a mistyped arm is refused before anything heavy is imported.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ampcompare.backends.catalog import BUILT_IN, described_backends, find_spec, third_party_backends
from ampcompare.backends.options import DTYPE_NAMES, mark_inner_arm_option, parse_flag
from ampcompare.backends.roles import Roles
from ampcompare.backends.spec import BackendSpec
from ampcompare.base.errors import ConfigError, close_matches

SHORTHANDS = {word: arm for spec in BUILT_IN.values() for word, arm in spec.shorthands.items()}
LEVEL = re.compile(r"[Oo0][0-9]")  # also 02 and O4, so that the message is about the level
UNTYPED = (
    "engine",
    "cast_model_outputs",
    "output",
    "bits",
    "group",
    "scaling",
    "align",
    "passes",
    "keep",
)  # not in `Roles`
HEAD_END = re.compile("[:,]")
ARM_OF_LABEL = re.compile("(?P<arm>[^ @]+:[^ @]+)(?P<rest>.*)", re.DOTALL)


def _parse_third_party_value(text: str) -> Any:
    """Read a value of a third-party backend, whose options this package does not know."""
    for read in (int, float, parse_flag):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _value_text(value: Any) -> str:
    """Return a parsed value as the text of an arm has it: 128.0 as 128, float16 as fp16, True as true."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    return DTYPE_NAMES.get(value, value) if isinstance(value, str) else str(value)


def _near_name_hint(backend: str) -> str:
    """Return what an unknown name was probably meant to be, as a question; "" if nothing is near."""
    known = described_backends()
    if arm := backend_or_arm_named(backend):
        return f"did you mean the arm {arm!r}? "
    if backend.partition(":")[0] in known and ":" in backend:
        return f"with its options it is an arm: --arm {shlex.quote(backend)}; "
    name, parted, rest = re.sub(r"[-_/ ]", ":", backend, count=1).partition(":")
    if parted and rest and name in known:
        return f"did you mean '{name}:{rest}'? "
    close = close_matches(backend.lower(), [*known, *SHORTHANDS])
    if not close:
        return ""
    return f"did you mean {close[0].upper() if LEVEL.fullmatch(close[0]) else close[0]!r}? "


def _parse_inner_arm(text: str) -> str:
    """Read an arm inside an arm: its options are joined by `+`, since a comma would end it."""
    if not text.strip():
        raise ValueError("expected an arm, with its options joined by +")
    inner = Arm.parse(text.replace("+", ","))
    if (inner.spec.parsers or {}).get("over") is mark_inner_arm_option:
        raise ValueError("expected an arm that does not itself wrap another one")
    return str(inner).replace(",", "+")


def _options_without_aliases(spec: BackendSpec, option_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with those that an alias stands for, such as `masters=fp32` of `half`, under their own names."""
    options = {}
    for name, value in option_values.items():
        alias = spec.aliases.get(f"{name}={value}".lower())
        name, _, value = alias.partition("=") if alias is not None else (name, "", value)
        options[name] = value
    return options


def _unknown_option_message(backend: str, spec: BackendSpec, name: str, given: Mapping[str, Any]) -> str:
    """Return the message for an option that the parsers do not know, though a value of it may be an alias."""
    aliased = [alias.partition("=")[2] for alias in spec.aliases if alias.startswith(f"{name}=")]
    if aliased:
        return f"arm {backend}: {name}={given[name]!s} cannot be used: expected one of {', '.join(sorted(aliased))}"
    parsers = spec.parsers or {}
    close = close_matches(name, [*parsers, *SHORTHANDS, *described_backends()])
    hint = f"did you mean {close[0]!r}? " if close else ""
    if any(read is mark_inner_arm_option for read in parsers.values()):
        hint += "options of the arm underneath are joined by +, as in over=half:bf16+kahan; "
    return (
        f"backend {backend!r} has no option {name!r}: {hint}its options are: {', '.join(parsers) or 'none'}"
    )


def _is_positional_value(spec: BackendSpec, word: str) -> bool:
    """Return whether a word can be the value of the option that may be written without its name."""
    try:
        return bool(spec.parsers and spec.positional and (spec.parsers[spec.positional](word), True))
    except ValueError:
        return False


@dataclass(frozen=True)
class Arm:
    """One backend with its options. `str(arm)` is what people write and read: equal arms have equal texts.

    Attributes:
        backend: its name in `ampcompare.backends.catalog`.
        options: parsed values by name; only what differs from the backend's own defaults.
    """

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Read `backend[:option[,option...]]`, such as `apex:O2,loss_scale=128`, or a shorthand such as `bf16` or `o2`.

        Raises:
            ConfigError: unknown backend or option, a value that the option does not take, or several arms.
        """
        arms, _ = arms_and_ambiguous_word(text)
        if len(arms) > 1:
            raise ConfigError(
                f"{text!r} names {len(arms)} arms, {' and '.join(arms)}, but one arm is expected here"
            )
        backend, rest = _backend_and_options_text(text)
        words = [word.strip() for word in rest.split(",") if word.strip()] if rest else []
        spec = find_spec(backend)
        aliases, positional = (spec.aliases, spec.positional) if spec else ({}, None)
        texts: dict[str, str] = {}
        given: dict[str, str] = {}
        for number, written in enumerate(words):
            word = aliases.get(written.lower(), written)
            name, equals, value = word.partition("=")
            if not equals:
                known = name in ((spec.parsers if spec else None) or {})
                if (
                    positional is not None
                    and not known
                    and (number == 0 or (spec and _is_positional_value(spec, word)))
                ):
                    name, value = positional, word
                else:
                    value = "true"
            if name in texts:
                raise ConfigError(
                    f"arm {text!r} gives {name} twice, by {given[name]} and {written}; give it once"
                )
            texts[name], given[name] = value, written
        return cls.make(backend, **texts)

    @classmethod
    def make(cls, backend: str, **options: Any) -> Arm:
        """Build an arm from a backend's name, in any case, and keyword options.

        Args:
            backend: its name, or the short name of an arm.
            options: by their names, as text or as values; None stands for not given.

        Raises:
            ConfigError: there is no such backend or option, or a value that it does not take.
        """
        given = {name: value for name, value in options.items() if value is not None}
        name = backend_or_arm_named(backend)
        backend = name if name is not None and ":" not in name else backend
        spec = find_spec(backend)
        if spec is None:
            known = ", ".join([*described_backends(), *third_party_backends()])
            raise ConfigError(
                f"unknown backend {backend!r}: {_near_name_hint(backend)}known backends are {known}"
            )
        if spec.parsers is None:
            read_options = {}
            for name, value in sorted(given.items()):
                read_options[name] = _parse_third_party_value(value) if isinstance(value, str) else value
            return cls(backend, read_options)
        if other := spec.stands_for({option: str(value) for option, value in given.items()}):
            return cls.parse(other)
        parsed: dict[str, Any] = dict(spec.written)
        if spec.positional is not None and spec.default is not None:
            parsed[spec.positional] = spec.parsers[spec.positional](spec.default)
        for name, value in _options_without_aliases(spec, given).items():
            if name not in spec.parsers:
                raise ConfigError(_unknown_option_message(backend, spec, name, given))
            read = _parse_inner_arm if spec.parsers[name] is mark_inner_arm_option else spec.parsers[name]
            try:
                parsed[name] = read(str(value))
            except ValueError as error:
                raise ConfigError(f"arm {backend}: {name}={value!s} cannot be used: {error}") from None
        parsed = {k: v for k, v in parsed.items() if k not in spec.implied or v != spec.implied[k]}
        if wrong := spec.check(parsed):
            raise ConfigError(f"arm {backend}: {wrong}")
        order = {name: place for place, name in enumerate(spec.parsers)}
        return cls(backend, dict(sorted(parsed.items(), key=lambda item: order[item[0]])))

    @property
    def spec(self) -> BackendSpec:
        """The description of its backend."""
        spec = find_spec(self.backend)
        assert spec is not None, self.backend  # checked when the arm was built
        return spec

    @property
    def is_third_party(self) -> bool:
        """Whether its backend is that of another package."""
        return self.backend not in BUILT_IN

    @property
    def is_as_written(self) -> bool:
        """Whether it trains a script exactly as it is written, and can train nothing else."""
        return self.spec.in_script is not None and self.spec.in_script.is_as_written

    @property
    def keep_fp32(self) -> str:
        """The patterns of modules that its option of this name keeps in fp32, joined by `|`; "" for none."""
        return str(self.options.get("keep_fp32", ""))

    @property
    def half(self) -> str:
        """The 16-bit type that it computes in, "fp16" or "bf16"; "" if it computes in fp32, or if that is not known."""
        return "" if self.roles is None else self.roles.half

    @property
    def skips_overflows(self) -> bool:
        """Whether its loss scale moves, so that an overflow skips a step."""
        scale = None if self.roles is None else self.roles.loss_scale
        return scale is not None and not scale.is_static

    @property
    def underlying_arm(self) -> Arm | None:
        """The arm that a library is asked to act as, else the one that this arm runs on; None without any.

        What a library really runs on a device is a matter of the ledger.
        """
        text = self.spec.runs(self.options)
        return Arm.parse(text) if text else self.inner

    @property
    def roles(self) -> Roles | None:
        """In which type each part of a step is held or computed, as the arm declares it; None if that is not known."""
        own = self.spec.roles(self.options)
        inner = None if own is not None or self.underlying_arm is None else self.underlying_arm.roles
        return own if inner is None else self.spec.wraps(self.options, inner)

    def declares_same_types(self, other: Arm) -> bool:
        """Return whether another arm of the backend holds and computes every part of a step in the same types."""

        def options_besides_ignored(arm: Arm) -> dict[str, Any]:
            return {name: value for name, value in arm.options.items() if name in UNTYPED}

        return (
            self.backend == other.backend
            and self.roles == other.roles is not None
            and options_besides_ignored(self) == options_besides_ignored(other)
        )

    @property
    def inner(self) -> Arm | None:
        """The arm that this one runs on, such as the one under packed activations; None if there is none."""
        text = self.spec.inner(self.options)
        return Arm.parse(text) if text else None

    @property
    def option_texts(self) -> dict[str, str]:
        """Its options by name, each as people write it, such as `bf16` for the dtype of `half`."""
        spellings = self.spec.spellings
        words = {name: self._option_word_with_name(name, value) for name, value in self.options.items()}
        return {name: spellings.get(word, word) for name, word in words.items()}

    @property
    def digest_text(self) -> str:
        """The text that digests are made of: options under their full names, which no later spelling changes."""
        return _arm_text_of_words(
            self.backend,
            {name: self._option_word_for_digest(name, value) for name, value in self.options.items()},
        )

    def _option_word_with_name(self, name: str, value: Any) -> str:
        if name == self.spec.positional:
            return _value_text(value)
        return name if value is True else f"{name}={_value_text(value)}"

    def _option_word_for_digest(self, name: str, value: Any) -> str:
        if (self.spec.parsers or {}).get(name) is mark_inner_arm_option:
            value = Arm.parse(value.replace("+", ",")).digest_text.replace(",", "+")
        return self._option_word_with_name(name, value)

    def with_options(self, **changes: Any) -> Arm:
        """Return the arm with other values of some options; one that becomes `None` is left out.

        Raises:
            ConfigError: the backend has no such option, or does not take the value with the others.
        """
        return Arm.make(self.backend, **{**self.options, **changes})

    def without_option(self, option: str) -> Arm | None:
        """Return the arm without one of its options; None if the others need it."""
        with contextlib.suppress(ConfigError):
            return self.with_options(**{option: None})
        return None

    def __str__(self) -> str:
        return _arm_text_of_words(self.backend, self.option_texts)

    def __hash__(self) -> int:
        return hash(str(self))


def _arm_text_of_words(backend: str, words: Mapping[str, str]) -> str:
    return f"{backend}:{','.join(words.values())}" if words else backend


def parse_arms(texts: Iterable[str]) -> list[Arm]:
    """Read arms, each text being one or a list such as `fp32,bf16,apex:O2,loss_scale=128`.

    Raises:
        ConfigError: a text is no arm, or can be read as an option and as an arm.
    """
    arms: list[Arm] = []
    for text in texts:
        parts, ambiguous = arms_and_ambiguous_word(text)
        if ambiguous:
            own = Arm.parse(ambiguous)
            raise ConfigError(
                f"arms {text!r}: {ambiguous!r} can be an option of the arm before it, or the arm {str(own)!r}; "
                f"write {str(own)!r} for the arm, or the option as NAME=VALUE"
            )
        arms += map(Arm.parse, parts or ("",))
    return arms


def find_text_naming_same_arm(wanted: str | None, texts: Sequence[str]) -> str | None:
    """Return the text that names the same arm as `wanted`, as `O2` names apex:O2.

    Args:
        wanted: an arm as a user types it; None if none is wanted.
        texts: to choose from; those that are no arms are only compared as texts.

    Returns:
        One of `texts`, or `wanted` itself if none names its arm.
    """
    if wanted is None or wanted in texts:
        return wanted
    try:
        arm = Arm.parse(wanted)
    except ConfigError:
        return wanted
    for text in texts:
        with contextlib.suppress(ConfigError):
            if Arm.parse(text) == arm:
                return text
    return wanted


@functools.lru_cache(maxsize=1000)
def label_in_present_spelling(label: str) -> str:
    """Return the label of a row as it is written now: older files name an arm by its `key`.

    Args:
        label: `ARM[@STACK] [NAME=VALUE ...][@SEED]`, or any other text, which is returned as it is.
    """
    parts = ARM_OF_LABEL.match(label)
    if parts is None:
        return label
    with contextlib.suppress(ConfigError):
        arm = Arm.parse(parts["arm"])
        return str(arm) + parts["rest"] if arm.digest_text == parts["arm"] else label
    return label


def backend_or_arm_named(head: str) -> str | None:
    """Return the backend, or the arm, that a word in any case names; None if it names none."""
    lowered = head.lower()
    if lowered in BUILT_IN:
        return lowered
    others = third_party_backends()
    if head in others:
        return head
    if lowered in SHORTHANDS:
        return SHORTHANDS[lowered]
    if LEVEL.fullmatch(head):
        return f"apex:{head}"
    return next((name for name in others if name.lower() == lowered), None)


def _backend_and_options_text(text: str) -> tuple[str, str]:
    """Return the backend of one arm and its options, with a shorthand written out: `O2` gives apex and O2.

    An unknown backend is returned as it is written.
    """
    text = text.strip()
    end = HEAD_END.search(text)
    head, rest = (text, "") if end is None else (text[: end.start()], text[end.end() :])
    backend, _, option = (backend_or_arm_named(head.strip()) or head).partition(":")
    return backend, ",".join(filter(None, [option, rest]))


def arms_and_ambiguous_word(text: str) -> tuple[list[str], str]:
    """Split `fp32,bf16,apex:O2,loss_scale=128` into its arms: a word begins one unless it is an option of the last.

    After `half` a word such as `bf16` begins an arm. After `half:bn_fp32` it is an option, and ambiguous.

    Returns:
        The text of each arm, and the first word that is ambiguous; "" for none.
    """
    arms: list[list[str]] = []
    ambiguous = ""
    for word in filter(None, (word.strip() for word in text.split(","))):
        if not arms:
            arms.append([word])
            continue
        is_arm = _may_be_arm(word)
        is_option = _is_option_of_arm(word, arms[-1][0])
        has_options = len(arms[-1]) > 1 or ":" in arms[-1][0]
        if is_arm and not (is_option and has_options):
            arms.append([word])
        else:
            arms[-1].append(word)
            ambiguous = ambiguous or (word if is_arm else "")
    return [",".join(words) for words in arms], ambiguous


def _may_be_arm(word: str) -> bool:
    """Return whether a word is one by its form, `NAME:...`, or because it names one."""
    head, colon, _ = word.partition(":")
    return "=" not in head and (bool(colon) or backend_or_arm_named(head) is not None)


def _is_option_of_arm(word: str, arm: str) -> bool:
    """Return whether the backend of an arm takes a word as an option."""
    spec = find_spec(_backend_and_options_text(arm)[0])
    head, colon, _ = word.partition(":")
    if "=" in head or colon or spec is None:
        return "=" in head
    return spec.parsers is None or word in spec.parsers or word.lower() in spec.aliases
