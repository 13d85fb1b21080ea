"""The names of data sets and models, and whether each can be used on this machine; needs no torch.

What files alone cannot decide passes; the process that builds the model and reads the data checks it.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ampcompare.base.environment.packages import entry_points
from ampcompare.base.errors import AmpCompareError, BackendUnavailable, ConfigError, suggestion_text
from ampcompare.results.records.metric import TOP1, TOP5, Metric
from ampcompare.settings.recipe import DEFAULT_TASK, DataConfig, Recipe
from ampcompare.tasks.factory import check_module_of_path

CLASSIFICATION = (TOP1, TOP5)

MEAN_IOU = Metric(name="mean IoU", unit="%", factor=100.0, margin=1.0)
PIXEL_ACCURACY = Metric(name="pixel accuracy", unit="%", factor=100.0, margin=0.5, over_samples="mean")
SEGMENTATION = (MEAN_IOU, PIXEL_ACCURACY)

AP50 = Metric(name="AP50", unit="%", factor=100.0, margin=2.0)
AP75 = Metric(name="AP75", unit="%", factor=100.0, margin=2.0)
DETECTION = (AP50, AP75)

DISTANCE = Metric(name="total variation", better="lower", unit="%", factor=100.0, margin=5.0)
GAN = (DISTANCE,)

BITS_PER_BYTE = Metric(name="bits per byte", better="lower", decimals=3, margin=0.02, over_samples="mean")
# A difference of 0.02 bits is this log ratio of perplexities.
PERPLEXITY = Metric(
    name="perplexity", better="lower", decimals=3, difference="log ratio", margin=0.02 * math.log(2)
)
LANGUAGE_MODELING = (BITS_PER_BYTE, PERPLEXITY)

RMSE = Metric(name="RMSE", better="lower", decimals=3, difference="ratio", margin=0.02)
REGRESSION = (RMSE,)


DEFAULT_DATA_DIR = "data"
# A function under torchvision's decorator, which may give it another name; further decorators may stand between.
_REGISTERED = re.compile(
    r"""^@register_model\((?:name=)?(?:["'](\w+)["'])?\)\n(?:(?!def ).*\n)*?def (\w+)\(""", flags=re.MULTILINE
)

DATA_SETS = {
    "digits": "1,797 handwritten digits, 8x8, 10 classes, bundled with scikit-learn",
    "synthetic": "patterns in noise, 32x32 in color, 10 classes, generated",
    "mnist": "70,000 handwritten digits, 28x28, 10 classes",
    "fashion-mnist": "70,000 pieces of clothing, 28x28, 10 classes",
    "cifar10": "60,000 photographs, 32x32 in color, 10 classes",
    "cifar100": "60,000 photographs, 32x32 in color, 100 classes",
    "imagefolder:PATH": "your images, in PATH/train/CLASS and PATH/val/CLASS",
    "hf:PATH_OR_NAME": "images and classes of a data set of Hugging Face, from a folder or the hub",
    "module:factory": "your function that returns (train, val) or (train, val, num_classes)",
}

BUILTIN_MODELS = {
    "convnet": "convolutions with batch norm, pooled; 66 thousand parameters at its default width",
    "mlp": "fully connected layers",
    "transformer": "pre-norm self-attention over patches or rows",
}

TEXTS = {
    "grammar": "160 kB of sentences of a made-up language, generated",
    "sentences": "the same, one sentence per sample: variable lengths, padded and masked",
    "text:PATH": "your file, cut into windows",
    "lines:PATH": "your file, one line per sample, padded and masked",
    "hf:PATH_OR_NAME": "texts of a data set of Hugging Face, a row per line, cut into windows",
    "module:factory": "your function that returns two texts, for training and validation",
}
# Models by the names of a library, written PREFIX:NAME: its module, its package, an example, and what they are.
MODEL_LIBRARIES = {
    "timm": ("timm", "timm", "timm:resnet50", "image classifiers of timm"),
    "hf": (
        "transformers",
        "transformers",
        "hf:gpt2",
        "causal language models of Transformers, without weights",
    ),
}
TASK_GROUP = "ampcompare.tasks"
_MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
# The folder below --data-dir, and the files in it that torchvision needs.
TORCHVISION_FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "mnist": ("MNIST/raw", _MNIST_FILES),
    "fashion-mnist": ("FashionMNIST/raw", _MNIST_FILES),
    "cifar10": (
        "cifar-10-batches-py",
        (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch", "batches.meta"),
    ),
    "cifar100": ("cifar-100-python", ("train", "test", "meta")),
}


@dataclass(frozen=True)
class TaskSpec:
    """A task that ships."""

    summary: str
    implementation: str  # `module:function`, which is called with the recipe
    metrics: Sequence[Metric]  # verdicts are about the first
    data_sets: Mapping[str, str]  # that `--data` takes, with their descriptions
    models: Mapping[str, str]  # that `--arch` takes; `module:factory` besides
    uses: frozenset[str]  # settings of data, labels and evaluation
    libraries: tuple[str, ...] = ()  # prefixes of `MODEL_LIBRARIES` that `--arch` takes too
    torchvision: str | None = None  # kind of torchvision's models that `--arch` takes too


TASKS = {
    "classification": TaskSpec(
        "classes of images or vectors; top-1",
        "ampcompare.tasks.classification:classification",
        CLASSIFICATION,
        DATA_SETS,
        BUILTIN_MODELS,
        frozenset(
            {"dir", "download", "image_size", "train_size", "val_size", "augment", "label_smoothing", "tta"}
        ),
        libraries=("timm",),
        torchvision="classification",
    ),
    "segmentation": TaskSpec(
        "a class for each pixel; mean IoU",
        "ampcompare.tasks.segmentation:segmentation",
        SEGMENTATION,
        {"shapes": "discs, squares and triangles in noise, 24x24, 4 classes, generated"},
        {"unet": "a small U-Net; 30 thousand parameters at its default width"},
        frozenset({"image_size", "train_size", "val_size", "label_smoothing"}),
        torchvision="segmentation",
    ),
    "detection": TaskSpec(
        "a box and a class for each object; AP50",
        "ampcompare.tasks.detection:detection",
        DETECTION,
        {"shapes": "discs, squares and triangles in noise, 32x32, with boxes, generated"},
        {
            "centernet": "a small U-Net that maps centers and sides; 30 thousand parameters at its default width"
        },
        frozenset({"image_size", "train_size", "val_size"}),
        torchvision="detection",
    ),
    "gan": TaskSpec(
        "a generator and a discriminator, two losses and optimizers; total variation",
        "ampcompare.tasks.gan:gan",
        GAN,
        {"gaussians": "points of eight normal distributions around a circle, generated"},
        {"mlp": "generator and discriminator of fully connected layers"},
        frozenset({"train_size", "val_size"}),
    ),
    "lm": TaskSpec(
        "the next byte of a text; bits per byte",
        "ampcompare.tasks.lm:lm",
        LANGUAGE_MODELING,
        TEXTS,
        {"gpt": "a causal transformer; 133 thousand parameters at its default width"},
        frozenset({"sequence_length", "train_size", "val_size", "label_smoothing"}),
        libraries=("hf",),
    ),
    "regression": TaskSpec(
        "a number for each row of a table; RMSE",
        "ampcompare.tasks.regression:regression",
        REGRESSION,
        {
            "diabetes": "442 patients, 10 measurements, and the progression of their disease; bundled with "
            "scikit-learn",
            "module:factory": "your function that returns ((samples, targets), (samples, targets))",
        },
        {"mlp": BUILTIN_MODELS["mlp"]},
        frozenset({"train_size", "val_size"}),
    ),
}


def task_path_and_is_bundled(name: str) -> tuple[str, bool]:
    """Return where a task is implemented, as `module:factory`, and whether it ships with this package."""
    if name in TASKS:
        return TASKS[name].implementation, True
    if ":" in name:
        return name, False
    registered = {entry.name: entry.value for entry in entry_points(group=TASK_GROUP)}
    if name not in registered:
        known = [*TASKS, *registered]
        raise ConfigError(
            f"there is no task {name!r}; {suggestion_text(name, known)}; your own is module:factory"
        )
    return registered[name], False


def list_tasks() -> list[tuple[str, bool, str]]:
    """Return (name, available, reason) of each task."""
    others = [
        (entry.name, True, f"of another package: {entry.value}") for entry in entry_points(group=TASK_GROUP)
    ]
    own = ("module:factory", True, "your function or class that takes a recipe and returns a Task")
    return [*((name, True, spec.summary) for name, spec in TASKS.items()), *others, own]


def list_data(data_dir: str | Path | None = None) -> list[tuple[str, bool, str]]:
    """Return (name, available, reason) of each data set; downloaded ones are in `data_dir`, or the folder `data`."""
    rows = []
    for name, description in DATA_SETS.items():
        reason = _missing_package(name) or why_files_missing(name, Path(data_dir or DEFAULT_DATA_DIR))
        rows.append((name, not reason, f"{description}; {reason}" if reason else description))
    return [*rows, *_rows_for_tasks_but_default(lambda spec: spec.data_sets)]


def list_models() -> list[tuple[str, bool, str]]:
    """Return (name, available, reason) of each model, those of torchvision in one row."""
    installed = find_spec("torchvision") is not None
    return [
        *((name, True, description) for name, description in BUILTIN_MODELS.items()),
        *_rows_for_tasks_but_default(lambda spec: spec.models),
        (
            "any torchvision classifier",
            installed,
            "by its name, as resnet18 or vit_b_16"
            if installed
            else "torchvision is not installed: pip install torchvision",
        ),
        *_rows_of_libraries(),
        ("module:factory", True, "your function that returns a torch.nn.Module"),
    ]


def _rows_for_tasks_but_default(
    names: Callable[[TaskSpec], Mapping[str, str]],
) -> list[tuple[str, bool, str]]:
    """Return rows of what tasks other than the default have, each with the option that chooses its task."""
    return [
        (name, True, f"{description}; --task {task}")
        for task, spec in TASKS.items()
        if task != DEFAULT_TASK
        for name, description in names(spec).items()
    ]


def _rows_of_libraries() -> Iterator[tuple[str, bool, str]]:
    """Yield a row for the models of each library."""
    for task, spec in TASKS.items():
        for prefix in spec.libraries:
            module, package, example, what = MODEL_LIBRARIES[prefix]
            remedy = (
                ""
                if find_spec(module) is not None
                else f"; {package} is not installed: pip install {package}"
            )
            chosen = "" if task == DEFAULT_TASK else f"; --task {task}"
            yield f"{prefix}:NAME", not remedy, f"{what}, as {example}{chosen}{remedy}"


def torchvision_model_kinds(folder: Path | None = None) -> dict[str, str] | None:
    """Return the models of torchvision by its source alone; None if it is not installed or not readable.

    The kind of each is classification, or the name of the folder: segmentation, detection, video and others.
    """
    if folder is None:
        spec = find_spec("torchvision")
        locations = list(spec.submodule_search_locations or []) if spec is not None else []
        if not locations:
            return None
        folder = Path(locations[0])
    models: dict[str, str] = {}
    for path in sorted((folder / "models").rglob("*.py")):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None
        for given, function in _REGISTERED.findall(text):
            kind = path.parent.name
            models[given or function] = "classification" if kind == "models" else kind
    return models or None


def missing_torchvision_files(name: str, data_dir: Path) -> list[str]:
    """Return which files of a torchvision set are not in their folder below `data_dir`."""
    folder, files = TORCHVISION_FILES[name]
    return [file for file in files if not (data_dir / folder / file).is_file()]


def why_files_missing(name: str, data_dir: Path) -> str:
    """Return where the files of a torchvision set are not, and what to pass; "" where they are or none are needed."""
    if name not in TORCHVISION_FILES or not missing_torchvision_files(name, data_dir):
        return ""
    return f"not in {data_dir / TORCHVISION_FILES[name][0]}: pass --download, or --data-dir with the folder that has it"


def _missing_package(name: str) -> str:
    """Return which package a data set needs and does not find; "" if none."""
    needs: dict[str, str] = {}
    if name == "digits":
        needs |= {"sklearn": "scikit-learn"}
    if name.startswith("hf:"):
        needs |= {"datasets": "datasets"}
    if name.startswith(("imagefolder:", "hf:")) or name in TORCHVISION_FILES:
        needs |= {"torchvision": "torchvision", "PIL": "Pillow"}
    missing = next((package for module, package in needs.items() if find_spec(module) is None), "")
    return f"{missing} is not installed: pip install {missing.lower()}" if missing else ""


def check_task_of_recipe(recipe: Recipe) -> None:
    """Check that there are task, model and data set of these names, and that the task uses all settings given."""
    _, ships = task_path_and_is_bundled(recipe.task)
    if not ships:
        return
    _refuse_unused_settings(recipe)
    check_model(recipe.model.arch, recipe.task)
    check_data(recipe.data.name, recipe.task)


def _refuse_unused_settings(recipe: Recipe) -> None:
    """Check that no setting of data, labels or evaluation is given that the task ignores."""
    uses = TASKS[recipe.task].uses
    for name, field in DataConfig.model_fields.items():
        if name not in ("name", *uses) and getattr(recipe.data, name) != field.default:
            raise ConfigError(
                f"the task {recipe.task} does not use the setting recipe.data.{name}; leave it out"
            )
    for name in ("label_smoothing", "tta"):
        if name not in uses and getattr(recipe, name) != Recipe.model_fields[name].default:
            raise ConfigError(f"the task {recipe.task} does not use the setting recipe.{name}; leave it out")


def check_model(arch: str, task: str = DEFAULT_TASK) -> None:
    spec = TASKS[task]
    prefix, colon, name = arch.partition(":")
    if prefix in MODEL_LIBRARIES and colon:
        _, _, example, what = MODEL_LIBRARIES[prefix]
        if prefix not in spec.libraries:
            tasks = " or ".join(other for other, its in TASKS.items() if prefix in its.libraries)
            raise ConfigError(
                f"--arch {prefix}:{name}: these are {what}, for --task {tasks}; the task is {task}"
            )
        if not name:
            raise ConfigError(f"--arch {prefix}: names no model; write it as {example}")
    elif colon:
        check_module_of_path(arch)
    if colon or arch in spec.models:
        return
    own = [*spec.models, *(MODEL_LIBRARIES[prefix][2] for prefix in spec.libraries)]
    if spec.torchvision is None:
        raise ConfigError(f"the task {task} has no model {arch!r}; {suggestion_text(arch, own)}")
    known = torchvision_model_kinds()
    if known is None or known.get(arch) == spec.torchvision:
        return
    suggestion = suggestion_text(
        arch, [*own, *(name for name, kind in known.items() if kind == spec.torchvision)]
    )
    if arch in known:
        raise ConfigError(
            f"{arch} is a torchvision model for {known[arch]}, not for {spec.torchvision}; {suggestion}"
        )
    raise ConfigError(f"there is no model {arch!r}; {suggestion}")


def check_data(name: str, task: str = DEFAULT_TASK) -> None:
    known = TASKS[task].data_sets
    kind, _, path = name.partition(":")
    is_known = name in known or (path and (f"{kind}:PATH" in known or "module:factory" in known))
    if not is_known and not (task == DEFAULT_TASK and kind == "imagefolder"):
        what = "there is" if task == DEFAULT_TASK else f"the task {task} has"
        raise ConfigError(f"{what} no data set {name!r}; {suggestion_text(name, known)}")
    kinds = {other.partition(":")[0] for other in known if other != "module:factory"}
    if path and kind not in (*kinds, "imagefolder"):
        check_module_of_path(name)


@contextmanager
def explain_missing_package(purpose: str, package: str) -> Iterator[None]:
    """Turn a failed import in the block into an error that says what to install."""
    try:
        yield
    except ImportError as error:
        raise BackendUnavailable(
            f"{purpose} {package}, which cannot be imported ({error}): pip install {package.lower()}"
        ) from error


@contextmanager
def translate_errors(
    what: str,
    remedy: str,
    *,
    errors: tuple[type[Exception], ...] = (Exception,),
    fault: type[AmpCompareError] = ConfigError,
) -> Iterator[None]:
    """Turn an error of another library in the block into one line: what cannot be done, the error, and the remedy."""
    try:
        yield
    except AmpCompareError:
        raise
    except errors as error:
        text = " ".join(str(error).split())
        raise fault(f"{what} ({type(error).__name__}: {text}); {remedy}") from error
