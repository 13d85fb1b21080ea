"""Keep secrets out of files: find them among arguments and in the environment, and put a placeholder in their place.

A secret is the value of an argument or variable whose name says so, or a text with the form of a token or of a URL with
credentials. Its value stays in the memory of this process; what is written has a placeholder such as `$TOKEN`.
"""

import fnmatch
import functools
import html
import json
import os
import re
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence

from ampcompare.base.environment.variables import MASK
from ampcompare.base.errors import ConfigError

MIN_WORD = 4  # characters of a value that is looked for as a word in the output of a script
MIN_LITERAL = 8  # anywhere, and in all other files; a shorter one may be an ordinary word
MAX_HELD = 2**16  # bytes of a line that has not ended
ALWAYS = (
    *("password", "passwd", "passphrase", "secret", "secrets"),
    *("apikey", "credential", "credentials", "bearer"),
    *("webhook", "authorization"),
)
KEYS = (
    *("api", "access", "secret", "private", "auth", "account"),
    *("license", "encryption", "signing", "ssh", "wandb"),
    *("openai", "hf", "huggingface", "comet", "neptune"),
    *("aws", "azure", "gcp", "google", "anthropic", "github"),
    *("gitlab", "deploy", "storage", "service", "master"),
    *("session", "subscription", "admin", "root", "clearml"),
    *("mlflow", "kaggle"),
)
# A token of text gives no access.
TEXT = (
    *("pad", "mask", "unk", "cls", "sep", "bos", "eos", "special"),
    *("start", "end", "image", "class", "prefix", "stop"),
    *("blank", "space", "per", "num", "max", "min", "n"),
    *("first", "last", "new", "next", "text", "input", "output"),
    *("word", "sub", "virtual", "prompt", "learnable", "register"),
    *("mean", "pos", "position", "drop", "query", "patch"),
    *("empty", "forced", "decoder", "encoder", "begin", "separator"),
)
# `password_file` is no password.
NOT_THE_SECRET = (
    *("file", "path", "dir", "folder", "env", "name", "var"),
    *("length", "len", "policy", "type", "dim", "size"),
    *("prompt", "required"),
)
ORDINARY = re.compile(r"(?i)[-+]?\d{1,4}(\.\d*)?|true|false|none|null|yes|no|on|off|\[\w+\]|<[/|]?\w+[|]?>")
PLACEHOLDER = re.compile(r"\$[A-Z][A-Z0-9_]*")
NAME = r"[A-Za-z_][\w.-]*"
FLAG = re.compile(rf"[-+]*({NAME})")
TOKENS = re.compile(
    r"(?<![\w-])(?:hf_(?:(?=[a-z]*[0-9A-Z])[A-Za-z0-9]{8,}|[A-Za-z0-9]{20,})|sk-(?=[A-Za-z_-]*\d)[\w-]{12,}"
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{12,}"
    r"|AIza[\w-]{30,}|nvapi-[\w-]{16,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,})"
)
CREDENTIALS = re.compile(r"(?<=://)([^/\s@:]*:[^/\s@]+|[^/\s@:]{20,})(?=@)")
BEARER = re.compile(r"(?i)(?:bearer|basic|token)\s+(\S{6,})")
PAIRS = re.compile(rf"(?<![\w.-])(?P<name>{NAME})(?P<is>=|[\"']\s*:\s*[\"']?)(?P<value>[^\s,;&\"']+)")

_names: list[str] = []
_values: dict[str, str] = {}  # placeholder by value
_placeholders: dict[str, str] = {}  # value by placeholder


def note_secret_names(patterns: Iterable[str]) -> None:
    """Take arguments and variables of these names for secrets too; `*` and `?` stand for any characters."""
    _names.extend(pattern.lstrip("-").lower().replace("-", "_") for pattern in patterns if pattern)


def value_of_secret_names_variable() -> str:
    """Return the value of the variable by which a process that this one starts knows these names."""
    given = os.environ.get(MASK, "").split(",")
    return ",".join(dict.fromkeys(filter(None, [*given, *_names])))


def is_secret_name(name: str) -> bool:
    """Return whether the name of an argument or variable, such as `--hf-token` or `WANDB_API_KEY`, is of a secret."""
    words = [word for word in re.split(r"[^a-z0-9]+", _snake_case_name(name)) if word]
    if _does_match_users_secret_patterns(name):
        return True
    if not words or words[-1] in NOT_THE_SECRET:
        return False
    before = words[-2] if len(words) > 1 else ""
    if words[-1] in ("token", "tokens"):
        return before not in TEXT and words[-1] == "token"
    return any(word in ALWAYS for word in words) or (words[-1] == "key" and before in KEYS)


def _snake_case_name(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-+")).lower().replace("-", "_")


def _does_match_users_secret_patterns(name: str) -> bool:
    patterns = value_of_secret_names_variable().lower().replace("-", "_").split(",")
    return any(fnmatch.fnmatchcase(_snake_case_name(name), pattern) for pattern in patterns if pattern)


def _is_secret(name: str, value: str) -> bool:
    if not value or PLACEHOLDER.fullmatch(value):
        return False
    if is_secret_name(name):
        return (
            not ORDINARY.fullmatch(value)
            or "passw" in name.lower()
            or _does_match_users_secret_patterns(name)
        )
    is_key = _snake_case_name(name).rpartition("_")[2] == "key"
    return is_key and re.fullmatch(r"(?=.*\d)(?=.*[A-Za-z])[\w+/=-]{16,}", value) is not None


def note_value_if_secret(name: str, value: str) -> None:
    """Take a value for a secret, from now on, if its name or its form says that it is one."""
    if _is_secret(name, value) or TOKENS.fullmatch(value):
        _values.setdefault(
            value,
            "$" + (re.sub(r"[^A-Z0-9]+", "_", _snake_case_name(name).upper()).strip("_") or "SECRET"),
        )


def hide_secrets_in_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with a placeholder for each secret, and keep the values in memory."""
    shown: list[str] = []
    used: dict[str, str] = {}
    flag = ""
    for word in words:
        found = FLAG.fullmatch(word) if word.startswith("-") else None
        if flag and found is None and _is_secret(flag, word):
            shown.append(_placeholder_for(flag, word, used))
        else:
            shown.append(_hide_secret_inside_word(word, flag, used))
        flag = found[1] if found else ""
    return shown


def _hide_secret_inside_word(word: str, flag: str, used_placeholders: dict[str, str]) -> str:
    whole = re.fullmatch(rf"(?s)([-+]*({NAME})=)(.+)", word)
    if whole and _is_secret(whole[2], whole[3]):
        return whole[1] + _placeholder_for(whole[2], whole[3], used_placeholders)

    def hide_value_of_pair(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        return (
            f"{name}{match['is']}{_placeholder_for(name, value, used_placeholders)}"
            if _is_secret(name, value)
            else match[0]
        )

    word = PAIRS.sub(hide_value_of_pair, word)
    word = CREDENTIALS.sub(lambda match: _placeholder_for("credentials", match[0], used_placeholders), word)
    name = flag if is_secret_name(flag) else "secret"
    word = TOKENS.sub(lambda match: _placeholder_for(name, match[0], used_placeholders), word)

    def hide_bearer_token(match: re.Match[str]) -> str:
        token = match[1]
        return (
            match[0]
            if "$" in token
            else match[0].replace(token, _placeholder_for("bearer", token, used_placeholders))
        )

    return BEARER.sub(hide_bearer_token, word)


def _placeholder_for(name: str, value: str, used_placeholders: dict[str, str]) -> str:
    """Return the placeholder of a secret: that of its name, with a number where a command has several."""
    if value in used_placeholders:
        return used_placeholders[value]
    base = "$" + (re.sub(r"[^A-Z0-9]+", "_", name.lstrip("-").upper()).strip("_") or "SECRET")
    placeholder, number = base, 1
    while placeholder in used_placeholders.values():
        number += 1
        placeholder = f"{base}_{number}"
    used_placeholders[value] = placeholder
    _values.setdefault(value, placeholder)
    _placeholders[placeholder] = value
    return placeholder


def reveal_secrets(words: Sequence[str]) -> list[str]:
    """Return the words of a command line as they were given.

    Raises:
        ConfigError: a placeholder has no value, such as one of a command that was pasted.
    """
    known = sorted(_placeholders, key=len, reverse=True)
    real: list[str] = []
    flag = ""
    for word in words:
        for placeholder in known:
            word = word.replace(placeholder, _placeholders[placeholder])
        name, _, value = word.partition("=") if word.startswith("-") and "=" in word else (flag, "", word)
        if PLACEHOLDER.fullmatch(value) and is_secret_name(name):
            given = os.environ.get(value[1:])
            if given is None:
                raise ConfigError(
                    f"{value} stands for a secret that is not stored; give its value after {name}, or set "
                    f"{value[1:]} in the environment"
                )
            _values.setdefault(given, value)
            word = word.replace(value, given)
        real.append(word)
        flag = word if word.startswith("-") else ""
    return real


def secrets_by_placeholder() -> dict[str, str]:
    """Return what `note_secrets_by_placeholder` needs in another process."""
    return dict(_placeholders)


def note_secrets_by_placeholder(placeholders: Mapping[str, str]) -> None:
    """Know the secrets of the process that called `secrets_by_placeholder`."""
    for placeholder, value in placeholders.items():
        _placeholders[placeholder] = value
        _values.setdefault(value, placeholder)


def mask_secrets(text: str, *, of_script: bool = False) -> str:
    """Return a text with a placeholder for each known secret in it.

    Args:
        text: of any length, such as a line of a log.
        of_script: what a script has said, in which short values are looked for too, and what has the form of a secret.
    """
    known = {**_secrets_in_environment(tuple(os.environ.items()), tuple(_names)), **_values}
    for value, placeholder in sorted(known.items(), key=lambda item: -len(item[0])):
        for form in _written_forms_of_value(value):
            if len(value) >= MIN_LITERAL:
                text = text.replace(form, placeholder)
            elif of_script and len(value) >= MIN_WORD:
                text = placeholder.join(re.split(rf"(?<!\w){re.escape(form)}(?!\w)", text))
    if of_script:  # what it has read itself
        text = CREDENTIALS.sub(lambda match: match[0] if "$" in match[0] else "$CREDENTIALS", text)
        text = TOKENS.sub("$SECRET", text)
    return text


@functools.lru_cache(maxsize=1)
def _secrets_in_environment(
    environment: tuple[tuple[str, str], ...], _patterns: tuple[str, ...]
) -> dict[str, str]:
    known: dict[str, str] = {}
    for name, value in environment:
        is_one = is_secret_name(name) and len(value) >= MIN_LITERAL and _is_secret(name, value)
        if is_one or TOKENS.fullmatch(value):
            known.setdefault(value, f"${name}")
        for part in CREDENTIALS.findall(value):
            known.setdefault(part, "$CREDENTIALS")
    return known


def _written_forms_of_value(value: str) -> Iterable[str]:
    """Return how a value appears in files of several formats."""
    in_json = (json.dumps(value, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False))
    return dict.fromkeys([value, *in_json, html.escape(value), urllib.parse.quote(value, safe="")])


class StreamMasker:
    """Masks a stream of bytes that comes in blocks, by whole lines: a secret may lie across two blocks."""

    def __init__(self) -> None:
        self._rest = b""

    def mask_what_is_complete(self, block: bytes) -> bytes:
        """Return what can be written now."""
        data = self._rest + block
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - end > MAX_HELD:
            end = len(data)
        self._rest = data[end:]
        return _mask_secrets_in_bytes(data[:end])

    def masked_rest(self) -> bytes:
        """Return what was held back."""
        rest, self._rest = self._rest, b""
        return _mask_secrets_in_bytes(rest)


def _mask_secrets_in_bytes(data: bytes) -> bytes:
    return mask_secrets(data.decode("utf-8", errors="surrogateescape"), of_script=True).encode(
        "utf-8", "surrogateescape"
    )
