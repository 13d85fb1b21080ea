"""The notebooks of examples/ as pages of the site, with their stored outputs.

mkdocs calls the functions that begin with `on_`. `python docs/hooks/notebooks.py` runs the notebooks in a kernel and
stores their outputs; it needs the extra `notebook`, and takes a minute.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "examples" / "notebooks"
PLACE = re.compile(r'<div class="notebook-output" data-output="(\d+)"></div>')
SECONDS = 600


def notebooks() -> list[Path]:
    """Return the notebooks, sorted."""
    return sorted(FOLDER.glob("*.ipynb"))


def on_files(files: Any, *, config: Any) -> Any:
    """Add a page for each notebook."""
    from mkdocs.structure.files import File

    for path in notebooks():
        files.append(
            File.generated(config, f"notebooks/{path.stem}.md", content=markdown_of(read(path), path.name))
        )
    return files


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Put the outputs of a notebook into its page, where Markdown would have taken their HTML apart."""
    path = FOLDER / f"{Path(page.file.src_uri).stem}.ipynb"
    if not page.file.src_uri.startswith("notebooks/") or not path.is_file():
        return html
    outputs = outputs_of(read(path))
    return PLACE.sub(lambda match: outputs[int(match[1])], html)


def read(path: Path) -> dict[str, Any]:
    """Return a notebook."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def markdown_of(notebook: dict[str, Any], name: str) -> str:
    """Return the page: text, code, and a mark for each output."""
    parts = []
    count = 0
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for _ in cell.get("outputs", ()):
            parts.append(f'<div class="notebook-output" data-output="{count}"></div>')
            count += 1
    parts.insert(1, f"The notebook is `examples/notebooks/{name}`; its outputs are from a CPU.")
    return "\n\n".join(parts) + "\n"


def outputs_of(notebook: dict[str, Any]) -> list[str]:
    """Return the outputs of all cells as HTML, in order."""
    return [_html(output) for cell in notebook["cells"] for output in cell.get("outputs", ())]


def _html(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "text/html" in data:
        return "".join(data["text/html"])
    text = "".join(data.get("text/plain", output.get("text", "")))
    return f"<pre><code>{escape(text)}</code></pre>"


def run(path: Path) -> dict[str, Any]:
    """Return a notebook with the outputs of a run in a new kernel, in a folder that has the examples next to it."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(
            ROOT / "examples", Path(folder, "examples"), ignore=shutil.ignore_patterns("runs", "*.ipynb")
        )
        here = Path(folder, "examples", path.parent.name)
        here.mkdir(exist_ok=True)
        NotebookClient(
            notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(here)}}
        ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
    found: dict[str, Any] = notebook
    return found


if __name__ == "__main__":
    import nbformat

    chosen = [path for path in notebooks() if path.stem in sys.argv[1:] or not sys.argv[1:]]
    for path in chosen:
        nbformat.write(nbformat.from_dict(run(path)), path)
