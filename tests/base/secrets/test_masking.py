"""Secrets in arguments, texts and streams: what is hidden, what is not, and how it comes back."""

import html
import json
from pathlib import Path

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.base.secrets.masking import (
    StreamMasker,
    hide_secrets_in_words,
    is_secret_name,
    mask_secrets,
    note_secret_names,
    reveal_secrets,
)
from ampcompare.settings.config import RunConfig
from ampcompare.settings.script import script_config


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--token", "abc1"], ["--token", "$TOKEN"]),
        (["--hf-token=abc"], ["--hf-token=$HF_TOKEN"]),
        (["--password", "123"], ["--password", "$PASSWORD"]),
        (["wandb.api_key=abcdef"], ["wandb.api_key=$WANDB_API_KEY"]),
        (["--apiKey", "abcdef"], ["--apiKey", "$APIKEY"]),
        (["hf_abcdefghijk123"], ["$SECRET"]),
        (["--x", "sk-proj-abcdefgh12345"], ["--x", "$SECRET"]),
        (["--data", "s3://me:pa55@host/d"], ["--data", "s3://$CREDENTIALS@host/d"]),
        (["https://h/d?lr=1&access_token=abcd"], ["https://h/d?lr=1&access_token=$ACCESS_TOKEN"]),
        (['{"api_key": "abcdef", "lr": 1}'], ['{"api_key": "$API_KEY", "lr": 1}']),
        (["Authorization: Bearer abcdefgh"], ["Authorization: Bearer $BEARER"]),
        (["--key", "a1b2c3d4e5f6a7b8c9"], ["--key", "$KEY"]),
        (["--token", "a1", "--token", "b2"], ["--token", "$TOKEN", "--token", "$TOKEN_2"]),
    ],
)
def test_secrets_are_hidden_and_come_back(words: list[str], shown: list[str]) -> None:
    """Each by its name or its form; the process that has seen them gets them again."""
    assert hide_secrets_in_words(words) == shown
    assert reveal_secrets(shown) == words


@pytest.mark.parametrize(
    "words",
    [
        ["--tokenizer", "bert-base"],
        ["--num-tokens", "512"],
        ["--max_tokens=4096"],
        ["--pad-token", "pad"],
        ["--mask_token", "[MASK]"],
        ["--token", "5"],
        ["--use-token", "--lr", "0.1"],
        ["--key-dim", "64"],
        ["--sort-key", "loss"],
        ["--password-file", "/run/pw"],
        ["--secret-size", "12"],
        ["--model", "sk-learn-linear-model"],
        ["hf_transformers"],
        ["--url", "https://host:8080/x"],
        ["--lr=0.1"],
    ],
)
def test_what_changes_results_is_not_hidden(words: list[str]) -> None:
    """Two values of such an argument are two comparisons."""
    assert hide_secrets_in_words(words) == words


def test_names_can_be_added() -> None:
    """Patterns hold for arguments with dashes and for variables alike."""
    assert not is_secret_name("--pin-code")
    note_secret_names(["--pin*", "MY_?"])
    assert is_secret_name("--pin-code")
    assert is_secret_name("my_x")
    assert hide_secrets_in_words(["--pin-code", "77"]) == ["--pin-code", "$PIN_CODE"]


def test_every_form_of_a_known_secret_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As JSON, HTML and a shell write it; those of the environment too; ordinary words stay in files."""
    value = 'a"b<c>\u00e9&d1'
    hide_secrets_in_words(["--token", value, "--password", "fp32"])
    monkeypatch.setenv("MY_SERVICE_TOKEN", "env-secret-1")
    text = f"{value} {json.dumps(value)} {html.escape(value)} env-secret-1"
    assert mask_secrets(text) == '$TOKEN "$TOKEN" $TOKEN $MY_SERVICE_TOKEN'
    assert mask_secrets("arm fp32") == "arm fp32"
    assert mask_secrets("the password is fp32", of_script=True) == "the password is $PASSWORD"


def test_a_stream_is_masked_across_its_blocks() -> None:
    """However it is cut, nothing else is lost, and bytes that are no text stay as they are."""
    hide_secrets_in_words(["--token", "hunter2x"])
    data = b"\xff start hunter2x hunt hunter2xhunter2 end hunter"
    expected = b"\xff start $TOKEN hunt $TOKENhunter2 end hunter"
    for size in (1, 3, 7, 100):
        stream = StreamMasker()
        parts = [stream.mask_what_is_complete(data[at : at + size]) for at in range(0, len(data), size)]
        assert b"".join([*parts, stream.masked_rest()]) == expected


def test_what_a_script_has_read_itself_is_masked_by_its_form() -> None:
    """A token or a URL with credentials that the command line does not have, however its output is cut."""
    token = "hf_Abcdefgh1234"
    data = f"GET https://bob:pw12@example.com/x xhf_1 {token}\nhttps://example.com/a:b hf_xxx {token}, done {token}"
    expected = data.replace("bob:pw12", "$CREDENTIALS").replace(token, "$SECRET")
    for size in (1, 3, 7, 200):
        stream = StreamMasker()
        parts = [
            stream.mask_what_is_complete(data[at : at + size].encode()) for at in range(0, len(data), size)
        ]
        assert b"".join([*parts, stream.masked_rest()]).decode() == expected
    assert mask_secrets(f"cannot read {data}", of_script=True) == f"cannot read {expected}"
    assert mask_secrets(data) == data  # a file of ampcompare's own, such as a page


def test_a_pasted_placeholder_needs_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read from the environment, and refused where that has none."""
    monkeypatch.delenv("HUB_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=r"\$HUB_TOKEN stands for a secret that is not stored"):
        reveal_secrets(hide_secrets_in_words(["--hub-token", "$HUB_TOKEN"]))
    monkeypatch.setenv("HUB_TOKEN", "abcdef")
    assert reveal_secrets(hide_secrets_in_words(["--hub-token", "$HUB_TOKEN"])) == ["--hub-token", "abcdef"]
    assert reveal_secrets(["--out", "$HOME/x"]) == ["--out", "$HOME/x"]


def test_another_secret_is_the_same_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells need not run again; with another learning rate they do."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    def digest(*words: str) -> str:
        return RunConfig(script=script_config(["train.py", *words], mask=["pin"])).digest()

    one = digest("--token", "hunter22", "--pin=pin-9876")
    assert one == digest("--token", "other222", "--pin=pin-0000")
    assert one != digest("--token", "hunter22", "--pin=pin-9876", "--lr=1")
