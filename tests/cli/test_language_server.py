"""The language server as an editor speaks with it: it says what `lint` finds, and edits as `--fix` and `migrate` do."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pygls")

from ampcompare.api.migration import lint_paths, migrate_script

# A character outside of the basic plane, which editors count as two, stands before what is found.
SCRIPT = """\
import torch
scaler = torch.cuda.amp.GradScaler()
name = "\N{ROCKET}"; other = torch.cuda.amp.GradScaler()
"""
LEGACY = """\
import torch
from apex import amp

model = torch.nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for batch in [torch.ones(1, 4).cuda()] * 3:
    loss = model(batch).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


class Editor:
    """The client of a server, which waits for each answer."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._number = 0
        self.notifications: list[dict[str, Any]] = []

    def notify(self, method: str, **params: Any) -> None:
        self._write({"jsonrpc": "2.0", "method": method, "params": params})

    def ask(self, method: str, **params: Any) -> Any:
        self._number += 1
        self._write({"jsonrpc": "2.0", "id": self._number, "method": method, "params": params})
        while (message := self._read()).get("id") != self._number:
            self.notifications.append(message)
        return message["result"]

    def diagnostics(self, uri: str) -> list[dict[str, Any]]:
        """What the server says of a file next."""
        while True:
            message = self.notifications.pop(0) if self.notifications else self._read()
            if message.get("method") == "textDocument/publishDiagnostics" and message["params"]["uri"] == uri:
                found: list[dict[str, Any]] = message["params"]["diagnostics"]
                return found

    def _write(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        assert self._process.stdin is not None
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        length = 0
        while line := self._process.stdout.readline().strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        message: dict[str, Any] = json.loads(self._process.stdout.read(length))
        return message


@pytest.fixture
def editor(tmp_path: Path) -> Iterator[Editor]:
    command = [sys.executable, "-m", "ampcompare", "lsp", "--torch-version", "2.9"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path) as process:
        one = Editor(process)
        can = one.ask("initialize", processId=None, rootUri=tmp_path.as_uri(), capabilities={})[
            "capabilities"
        ]
        assert can["codeActionProvider"]["codeActionKinds"][0] == "quickfix"
        one.notify("initialized")
        yield one
        one.ask("shutdown")
        one.notify("exit")
        assert process.wait(timeout=30) == 0


def _open(editor: Editor, path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    item = {"uri": path.as_uri(), "languageId": "python", "version": 1, "text": text}
    editor.notify("textDocument/didOpen", textDocument=item)
    return path.as_uri()


def _actions(editor: Editor, uri: str, lines: tuple[int, int], only: str) -> list[dict[str, Any]]:
    start, end = ({"line": line, "character": 0} for line in lines)
    found: list[dict[str, Any]] = editor.ask(
        "textDocument/codeAction",
        textDocument={"uri": uri},
        range={"start": start, "end": end},
        context={"diagnostics": [], "only": [only]},
    )
    return found


def _apply(text: str, action: dict[str, Any], uri: str) -> str:
    """The text after an action, whose columns count as UTF-16 does."""
    lines = [line.encode("utf-16-le") for line in text.splitlines(keepends=True)]

    def offset(place: dict[str, int]) -> int:
        return sum(map(len, lines[: place["line"]])) + 2 * place["character"]

    data = b"".join(lines)
    for edit in reversed(action["edit"]["changes"][uri]):
        start, end = offset(edit["range"]["start"]), offset(edit["range"]["end"])
        data = data[:start] + edit["newText"].encode("utf-16-le") + data[end:]
    return data.decode("utf-16-le")


def test_an_editor_sees_what_lint_finds_and_applies_its_fixes(editor: Editor, tmp_path: Path) -> None:
    """Also after each change, by the settings of the project, and nothing of half a line."""
    uri = _open(editor, tmp_path / "train.py", SCRIPT)
    shown = editor.diagnostics(uri)
    found = lint_paths(tmp_path / "train.py", torch_version="2.9").findings
    assert [(one["code"], one["range"]["start"]["line"] + 1) for one in shown] == [
        (one.code, one.place.line) for one in found
    ]
    assert len(shown) == 2
    last = SCRIPT.splitlines()[2]
    start = shown[1]["range"]["start"]["character"]
    assert last.encode("utf-16-le")[2 * start :].decode("utf-16-le").startswith("torch.cuda.amp.GradScaler()")
    (fix,) = _actions(editor, uri, (2, 2), "quickfix")
    assert _apply(SCRIPT, fix, uri).splitlines()[1:] == [
        "scaler = torch.cuda.amp.GradScaler()",
        'name = "\N{ROCKET}"; other = torch.amp.GradScaler("cuda")',
    ]
    (everything,) = _actions(editor, uri, (0, 0), "source.fixAll")
    lint_paths(tmp_path / "train.py", torch_version="2.9", fix=True)
    assert _apply(SCRIPT, everything, uri) == (tmp_path / "train.py").read_text(encoding="utf-8")

    def change(text: str) -> list[dict[str, Any]]:
        versioned = {"uri": uri, "version": 2}
        editor.notify("textDocument/didChange", textDocument=versioned, contentChanges=[{"text": text}])
        return editor.diagnostics(uri)

    assert change(SCRIPT + "if (") == []
    assert len(change(SCRIPT)) == 2
    (tmp_path / "pyproject.toml").write_text('[tool.ampcompare.lint]\nignore = ["AMP3"]\n')
    assert change(SCRIPT) == []


def test_an_editor_rewrites_a_saved_script(editor: Editor, tmp_path: Path) -> None:
    """As `migrate` does; not while what is shown differs from the file, since other files of a project count too."""
    path = tmp_path / "legacy.py"
    uri = _open(editor, path, LEGACY)
    (action,) = _actions(editor, uri, (0, 0), "refactor")
    assert action["title"].startswith("Rewrite Apex for torch.amp")
    migration = migrate_script(path, how="rewrite").migration
    assert migration is not None
    assert _apply(LEGACY, action, uri) == migration.text != LEGACY
    path.write_text("import os\n" + LEGACY)
    assert _actions(editor, uri, (0, 0), "refactor") == []
