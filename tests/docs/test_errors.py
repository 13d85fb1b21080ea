"""The pages under the words of an error: found by them, with commands that exist, and true where Python says them."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from ampcompare.cli.group import cli
from tests.modules import ROOT, module_at

FOLDER = ROOT / "docs" / "errors"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "index.md")
TITLES = {path.name: path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for path in PAGES}
# More words that lead to a page, as they stand in an error.
WORDS = {
    "No module named 'apex.parallel'": "no-module-named-apex-amp.md",
    "No module named 'apex.fp16_utils'": "no-module-named-apex-amp.md",
    "apex.optimizers.FusedAdam requires cuda extensions": "no-module-named-amp-c.md",
    "fused_layer_norm_cuda": "fused-layer-norm-cuda.md",
    "UnencryptedCookieSessionFactoryConfig": "unencrypted-cookie-session.md",
    "APEX is not installed, please refer to": "using-fp16-with-apex.md",
    "You have asked for Apex AMP but apex is not installed": "using-fp16-with-apex.md",
    "Apex must be installed to use FusedLayerNorm": "fused-layer-norm-cuda.md",
    "Please install apex to use distributed and fp16 training": "please-install-apex.md",
    "No module named 'apex.contrib.multihead_attn'": "apex-contrib-or-transformer.md",
}
# What is on the path, what is run, and the page whose title the error has.
RAISED = {
    "cannot-import-name-amp.md": ({"apex/__init__.py": ""}, "from apex import amp"),
    "no-module-named-apex.md": ({}, "from apex import amp"),
    "no-module-named-apex-amp.md": ({"apex/__init__.py": ""}, "import apex.amp"),
    "module-apex-has-no-attribute-amp.md": ({"apex/__init__.py": ""}, "import apex; apex.amp.initialize"),
    "no-module-named-amp-c.md": ({}, "import amp_C"),
    "fused-layer-norm-cuda.md": ({}, "import fused_layer_norm_cuda"),
    "apex-contrib-or-transformer.md": ({"apex/__init__.py": ""}, "import apex.transformer"),
}
# The search of the site: lunr.js with the weights of its theme, and of docs/hooks/pages.py.
SEARCH = """
const lunr = require(process.argv[2])
const {docs, queries, separator} = JSON.parse(require('fs').readFileSync(0))
lunr.tokenizer.separator = lunr.QueryLexer.termSeparator = new RegExp(separator)
const index = lunr(function () {
  this.ref('place'); this.field('title', {boost: 1000}); this.field('text', {boost: 1})
  docs.forEach(doc => this.add(doc, {boost: doc.boost}))
})
console.log(JSON.stringify(queries.map(query => index.search(query).slice(0, 3).map(found => found.ref))))
"""


def _documents() -> list[dict[str, Any]]:
    """Every page, and each of its sections, as the site's index has them."""
    boosts = module_at("docs/hooks/pages.py").BOOSTS
    found = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = path.relative_to(ROOT / "docs").as_posix()
        boost = next((boost for prefix, boost in boosts if name.startswith(prefix)), 1.0)
        title, *sections = re.split(r"^#+ ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        for number, text in enumerate((title, *sections)):
            head, _, rest = text.partition("\n")
            found.append({"place": f"{name}#{number}", "title": head, "text": rest[:20_000], "boost": boost})
    return found


def test_each_page_is_found_by_its_words() -> None:
    """The first result for a message is its page."""
    node, lunr = shutil.which("node"), pytest.importorskip("mkdocs").__path__[0]
    if node is None:
        pytest.skip("there is no node")
    library = Path(lunr) / "contrib" / "search" / "templates" / "search" / "lunr.js"
    wanted = {**{title: name for name, title in TITLES.items()}, **WORDS}
    queries = [re.sub(r"[:^~+*-]", " ", query) for query in wanted]
    separator = re.search(r"separator: '(.*)' #", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))[
        1
    ].replace("''", "'")
    request = json.dumps({"docs": _documents(), "queries": queries, "separator": separator})
    done = subprocess.run(
        [node, "-e", SEARCH, "search", str(library)],
        input=request,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for (query, name), results in zip(wanted.items(), json.loads(done.stdout), strict=True):
        assert results[0].startswith(f"errors/{name}"), (query, results)


@pytest.mark.parametrize("name", RAISED)
def test_python_says_what_the_title_says(name: str, tmp_path: Path) -> None:
    packages, statement = RAISED[name]
    for file, text in packages.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    done = subprocess.run(
        [sys.executable, "-S", "-c", statement], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert TITLES[name] in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("page", [*PAGES, FOLDER / "index.md"], ids=lambda page: page.name)
def test_commands_are_understood(page: Path) -> None:
    """Every page leads to `doctor`, and all commands on it exist, with their options."""
    lines = [
        line.partition("  #")[0].strip()
        for block in re.findall(r"```\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for line in block.splitlines()
    ]
    assert any(line.startswith("ampcompare doctor") for line in lines)
    for line in lines:
        program, name, *words = shlex.split(line)
        if program == "ampcompare":
            command = cli.get_command(click.Context(cli), name)
            assert command is not None, line
            command.make_context(name, words, resilient_parsing=False)
        else:
            assert line == "pip uninstall -y apex"


def test_the_index_names_every_page() -> None:
    text = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert all(f"[{title}]({name})" in text for name, title in TITLES.items())
