"""What there is to choose from, and which run directories there are: the command `list`.

No function imports a library to find out, and none needs torch.
"""

from pathlib import Path

from ampcompare.base.errors import ConfigError
from ampcompare.experiment.choices import ChoiceAvailability, list_choices
from ampcompare.experiment.run_directory import DEFAULT_FOLDER, RunBrief, find_run_directories_newest_first


def list_arms() -> list[ChoiceAvailability]:
    """Return the backends that an arm can name, those of other packages too."""
    return list_choices()["arms"]


def list_tasks() -> list[ChoiceAvailability]:
    """Return the tasks: what a model is trained for, and on which data."""
    return list_choices()["tasks"]


def list_models() -> list[ChoiceAvailability]:
    """Return the models, with the forms that name those of torchvision, timm and Transformers."""
    return list_choices()["models"]


def list_data() -> list[ChoiceAvailability]:
    """Return the data sets."""
    return list_choices()["data"]


def list_optimizers() -> list[ChoiceAvailability]:
    """Return the optimizers."""
    return list_choices()["optimizers"]


def list_launchers() -> list[ChoiceAvailability]:
    """Return the ways in which the processes of a cell are started."""
    return list_choices()["launchers"]


def list_recipes() -> list[ChoiceAvailability]:
    """Return the named recipes."""
    return list_choices()["recipes"]


def list_guards() -> list[ChoiceAvailability]:
    """Return the mistakes in the use of mixed precision that `exec` watches for."""
    return list_choices()["guards"]


def list_runs(folder: str | Path | None = None) -> list[RunBrief]:
    """Return the run directories in a folder, the newest first: arms, seeds, finished cells and headline of each.

    Args:
        folder: by default `runs`, which need not exist.

    Raises:
        ConfigError: there is no such folder.
    """
    root = DEFAULT_FOLDER if folder is None else Path(folder)
    if not root.is_dir():
        if folder is None:
            return []
        raise ConfigError(f"there is no folder {root}; name one that holds run directories")
    return [run.brief() for run in find_run_directories_newest_first(root)]
