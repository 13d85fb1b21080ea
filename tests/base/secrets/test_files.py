"""Secrets that stand in the files of a script: where they are looked for, and what is one."""

from pathlib import Path

import pytest

from ampcompare.base.secrets.files import note_secrets_in_files
from ampcompare.base.secrets.masking import mask_secrets


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("own.yaml", "db:\n  password: swordfish1  # of the team\n"),
        ("own.json", '{"tracker": {"apiKey": "swordfish1"}}'),
        ("own.toml", "access_token = 'swordfish1'"),
        ("own.ini", "[db]\npasswd = swordfish1\n"),
        ("own.py", "client = connect(password='swordfish1')\n"),
        (".env", "export WANDB_API_KEY=swordfish1\n"),
        ("conf/db/base.yaml", "secret: swordfish1\n"),
        ("train.py", "API_KEY = 'swordfish1'\n"),
    ],
)
def test_it_is_masked(file: str, text: str, tmp_path: Path) -> None:
    """In files that the command line names, and in those beside the script."""
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    named = [f"--config={path}"] if file.startswith("own") else []
    note_secrets_in_files(tmp_path / "train.py", ["--lr", "0.1", *named])
    assert "swordfish1" not in mask_secrets("it said swordfish1")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("own.yaml", "pad_token: ordinary-1\nlr: ordinary-1\ntoken: ${oc.env:TOKEN}\n"),
        ("own.py", "token = tokenizer.encode(text)\nordinary = 'ordinary-1'\n"),
        ("own.txt", "password: ordinary-1\n"),
        ("data/other.yaml", "password: ordinary-1\n"),
    ],
)
def test_it_is_no_secret(file: str, text: str, tmp_path: Path) -> None:
    """By its name, as it is no literal, or as the file holds no settings of the script."""
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    note_secrets_in_files(tmp_path / "train.py", [str(path)] if file.startswith("own") else [])
    said = "ordinary-1 and tokenizer.encode(text) and oc.env:TOKEN"
    assert mask_secrets(said) == said
