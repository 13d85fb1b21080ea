"""What no file of an ordinary training may name: words decide here, since they only ever speak against a rewrite."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampcompare.source.migrate.read.cast_lists import HALF_UNDER_BOTH
from ampcompare.source.migrate.read.early_names import find_early_bindings_of_torch
from ampcompare.source.migrate.read.finding import UnsureRewrite
from ampcompare.source.migrate.read.networks import network_classes
from ampcompare.source.project import MAX_MODULES
from ampcompare.source.syntax import (
    DefinitionNode,
    FunctionNode,
    dotted_name,
    elements,
    last_name,
    last_part,
    walk,
)

if TYPE_CHECKING:
    from ampcompare.source.migrate.core.context import ApexCore
    from ampcompare.source.module import Module

# Packages that hold no networks and take no part in a backward pass or a step.
PACKAGES = frozenset(sys.stdlib_module_names) | {
    "PIL", "albumentations", "apex", "colorama", "cv2", "easydict", "h5py", "imageio", "joblib", "librosa", "lmdb",
    "matplotlib", "nltk", "numpy", "packaging", "pandas", "prettytable", "psutil", "pycocotools", "pytest", "requests",
    "scipy", "seaborn", "setuptools", "six", "skimage", "sklearn", "soundfile", "tabulate", "tensorboard",
    "tensorboardX", "tensorboard_logger", "termcolor", "torch", "torchvision", "tqdm", "visdom", "wandb", "yacs",
    "yaml",
}  # fmt: skip
# Names that decide on a type, compute outside of what casts, copy a model, or see gradients.
FORBIDDEN = frozenset({
    "half", "HalfTensor", "float16", "bfloat16", "BFloat16Tensor", "double", "DoubleTensor", "set_default_dtype",
    "set_default_tensor_type", "Function", "autocast", "GradScaler", "is_autocast_enabled", "custom_fwd", "custom_bwd",
    "addmm_", "addmv_", "addr_", "addbmm_", "baddbmm_", "exp_", "log_", "pow_", "reciprocal_", "rsqrt_", "cumsum_",
    "affine_grid", "grid_sample", "BCELoss", "binary_cross_entropy", "spectral_norm", "weight_norm", "parametrize",
    "parametrizations", "data_ptr", "as_strided", "cpp_extension", "jit", "fx", "vmap", "functional_call", "hub",
    "grad", "autograd", "float64", "hook", "register_hook", "register_forward_hook", "register_forward_pre_hook",
    "register_backward_hook", "register_full_backward_hook", "register_full_backward_pre_hook",
    "register_post_accumulate_grad_hook", "DataParallel", "DataParallelWithCallback", "replicate", "parallel_apply",
    "Thread", "ThreadPoolExecutor", "swa_utils", "AveragedModel", "LBFGS", "Reducer", "LARC", "FP16_Optimizer",
    "std", "var", "std_mean", "var_mean", "acos_", "asin_", "cosh_", "erfinv_", "expm1_", "log10_", "log2_", "sinh_",
    "tan_", "cumprod_", "renorm_", "import_module", "importlib", "__import__", "__getattr__", "setattr", "no_sync",
    "Stream", "CUDAGraph", "graph", "inference_mode", "default_collate", "collate_fn",
})  # fmt: skip
# Of torch, what a network may name: O1 and autocast compute these in equal types, or differ by roundings that have a
# note.
LAYERS = frozenset({
    "Module", "Sequential", "ModuleList", "ModuleDict", "Identity", "Linear", "Conv1d",
    "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "BatchNorm1d", "BatchNorm2d",
    "BatchNorm3d", "SyncBatchNorm", "LayerNorm", "GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d",
    "ReLU", "ReLU6", "LeakyReLU", "ELU", "SELU", "GELU", "SiLU", "Hardswish", "Hardsigmoid", "Sigmoid", "Tanh",
    "Softmax", "LogSoftmax", "Dropout", "Dropout2d", "Dropout3d", "AlphaDropout", "MaxPool1d", "MaxPool2d", "MaxPool3d",
    "AvgPool1d", "AvgPool2d", "AvgPool3d", "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d", "AdaptiveMaxPool2d", "Flatten", "Embedding", "ZeroPad2d", "ReflectionPad2d", "PixelShuffle",
    "CrossEntropyLoss", "MSELoss", "L1Loss", "SmoothL1Loss", "BCEWithLogitsLoss", "NLLLoss",
})  # fmt: skip
FUNCTIONS = frozenset({
    "relu", "relu_", "relu6", "leaky_relu", "elu", "sigmoid", "tanh", "gelu", "silu", "softmax", "log_softmax",
    "dropout", "dropout2d", "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "pad", "linear", "conv1d", "conv2d", "conv3d",
    "conv_transpose2d", "layer_norm", "group_norm", "batch_norm", "cross_entropy", "mse_loss", "l1_loss",
    "smooth_l1_loss", "binary_cross_entropy_with_logits", "nll_loss", "one_hot", "embedding", "pixel_shuffle",
    "cat", "stack", "flatten", "exp", "log", "sqrt", "abs", "add", "mul", "sub", "div", "matmul", "bmm", "mm", "sum",
    "mean", "max", "min", "clamp", "where", "split", "chunk", "transpose", "squeeze", "unsqueeze", "reshape", "topk",
    "sort", "argmax", "argmin", "gather", "numel", "is_tensor", "eq", "ne", "gt", "ge", "lt", "le", "logical_and",
    "logical_or", "logical_not",
})  # fmt: skip
# New tensors, as a script makes them for its model.
MAKERS = frozenset(
    f"torch.{each}" for each in ("arange", "empty", "full", "ones", "rand", "randint", "randn", "zeros")
)
# Of `torch` itself these are other functions, which O1 does not list.
OF_FUNCTIONAL = frozenset({
    "torch.layer_norm", "torch.group_norm", "torch.softmax", "torch.log_softmax",
    "torch.binary_cross_entropy_with_logits",
})  # fmt: skip
TYPES = frozenset({
    "Tensor", "FloatTensor", "LongTensor", "BoolTensor", "float", "float32", "long", "int64", "int", "int32", "bool",
    "uint8", "Size", "device", "nn", "init", "functional", "dtype",
})  # fmt: skip
FP64 = re.compile(r"^(?:[\w.]*DoubleTensor|[\w.]*float64|double)$")
EMA = re.compile(r"(?:^|_)ema(?:$|_)|^EMA|EMA$|Ema(?:[A-Z]|$)|moving_average|MovingAverage|momentum_update")
# What holds the layers and functions of the list; others hold functions of the same names, such as `torch.special`.
OWNERS = re.compile(r"torch(?:\.nn(?:\.functional|\.parameter|\.modules(?:\.\w+)?)?|\.cuda)?")
# Calls of builtins that run code which no import names.
RUN_CODE = frozenset({"exec", "eval", "compile", "globals", "locals"})
COPIES = re.compile(
    r"model|net|module|encoder|decoder|generator|discriminator|teacher|student", re.IGNORECASE
)
# Of tensors, all that a network may call: it keeps their dimensions, or says which it takes away.
METHODS = frozenset({
    "view", "view_as", "reshape", "flatten", "permute", "transpose", "t", "contiguous", "size", "dim", "numel",
    "squeeze", "unsqueeze", "chunk", "split", "expand", "expand_as", "repeat", "float", "clone", "mean", "sum", "max",
    "min", "relu", "sigmoid", "tanh", "exp", "log", "sqrt", "abs", "clamp", "masked_fill", "topk", "argmax", "eq",
    "gather", "argsort",
})  # fmt: skip
# Of tensors, lists, dicts, text and networks, what else may stand behind a point in a network.
SHOWN_OR_HELD = frozenset(
    {"shape", "device", "training", "append", "items", "values", "keys", "format", "join"}
)
# Of a network: what its base class has, other than layers.
OF_BASE_CLASS = re.compile(
    r"^_|weight|bias|running|param|buffer|state|^(?:named_)?(?:modules|children)$|^(?:apply|get_submodule|forward)$"
)
BUILTINS = frozenset({
    "range", "len", "zip", "enumerate", "isinstance", "int", "float", "print", "list", "tuple", "reversed", "super",
    "getattr", "str", "dict", "ValueError", "NotImplementedError", "RuntimeError", "AssertionError", "max", "min",
    "sum",
})  # fmt: skip
BASES = frozenset({"torch.nn.Module", "torch.nn.Sequential"})
PRODUCTS = HALF_UNDER_BOTH | {
    "prelu", "conv_tbc", "__matmul__", "__rmatmul__", "__imatmul__", "multi_head_attention_forward",
}  # fmt: skip
# Of torchvision: networks, data and what is done with images that compute no products, and make no fp64.
OF_TORCHVISION = frozenset({
    *(f"datasets.{each}" for each in ("CIFAR10", "CIFAR100", "FashionMNIST", "ImageFolder", "ImageNet", "MNIST")),
    *(f"transforms.{each}" for each in (
        "CenterCrop", "Compose", "Normalize", "RandomCrop", "RandomHorizontalFlip", "RandomResizedCrop", "Resize",
        "ToTensor",
    )),
    *(f"models.resnet{each}" for each in (18, 34, 50, 101, 152)),
    *(f"models.vgg{each}" for each in (11, 13, 16, 19, "11_bn", "13_bn", "16_bn", "19_bn")),
})  # fmt: skip
COUNTS = re.compile("epoch|iter|step|best")  # of the entries of a checkpoint
# Of data sets, what makes no other images than these.
OF_DATA = frozenset({"root", "train", "split", "transform", "download"})
# Of operators that torch leaves in the types they get, and that refuse a mix of them.
INTO = frozenset({
    "index_add_", "index_copy_", "index_put_", "scatter_", "scatter_add_", "masked_scatter_", "index_add", "scatter",
    "scatter_add", "scatter_reduce", "index_put", "index_copy", "masked_scatter", "bucketize", "searchsorted",
})  # fmt: skip

FROM_ARRAYS = frozenset({"torch.from_numpy", "torch.as_tensor", "torch.tensor"})
NO_NETWORKS = ("torch.nn.utils.", "torch.nn.parallel.")

NAMED = "{0} names {1}, which a rewrite cannot be proven right with"
COPIED = "{0} copies {1}, which may be a network of its own"
PACKAGE = "{0} imports {1}, and what it does with networks or gradients is not read"
RUNS = "{0} runs code that no import names, by {1}"
MANY = "it runs with more files than are read"
IN_NETWORK = "{0} has {1} in a network, which is not on the list of what O1 and autocast compute alike"
WIDE = "{0} has {1}, which may be of fp64, as numpy makes it: O1 casts such inputs, autocast leaves them"
HIDES = "{0} has a base or a decorator in the network {1} by which a name in it may be code that is not read there"
PRODUCT = "{0} names {1}, a product, outside of `forward` and of blocks of autocast, and O1 casts products everywhere"
UNLISTED_DATA = "{0} names {1}, which is not on the list of what makes no fp64 and computes no products"
UNLISTED = "{0} names {1}, which is not on the list of what O1 and autocast compute alike"
EARLY = "{0} binds {1} before amp.initialize, or may do so: O1 does not cast it under this name then, and autocast does"
ASKS = "{0} asks for Apex by a text"


def refuse_forbidden_words(core: ApexCore) -> None:
    """Refuse a training with a word that is not allowed, in any file that runs with it.

    Raises:
        UnsureRewrite: there is one.
    """
    for refusal in refusals_of_words(core):
        raise refusal


def refusals_of_words(core: ApexCore) -> Iterator[UnsureRewrite]:
    """Yield a refusal for each word that is not allowed, where a file that runs with the training first has it."""
    others = [each for _, each in core.around.other_modules_of_program(core.module)]
    first, seen = core.sites.initializes[0].call, set[tuple[str, ...]]()
    if len(others) + 1 >= MAX_MODULES:
        yield UnsureRewrite(first, MANY)
    for module in (core.module, *others):
        for node, message in _forbidden_nodes_of(core, module):
            if message in seen:
                continue
            seen.add(message)
            where = (
                "this line"
                if module is core.module
                else f"line {_line_of_node(node)} of {core.index.relative_path_of(module)}"
            )
            yield UnsureRewrite(
                node if module is core.module else first, message[0].format(where, *message[1:])
            )


def networks_store_into_tensors(core: ApexCore) -> bool:
    """Return whether a network of the program writes into items of tensors, which must be of equal types then."""
    others = core.around.other_modules_of_program(core.module)
    for module in (core.module, *(each for _, each in others)):
        for network in network_classes(module):
            for node in walk(network):
                if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                    return True
                if isinstance(node, ast.Attribute) and node.attr in INTO:
                    return True
    return False


def _line_of_node(node: ast.AST) -> int:
    return getattr(node, "lineno", 1)


def _forbidden_nodes_of(core: ApexCore, module: Module) -> Iterator[tuple[ast.AST, tuple[str, ...]]]:
    """Yield the nodes of a module that are not allowed, each with the message and its words."""
    project = core.around.project_of(core.module)
    path = project.path_of(module)
    for statement, _, full in module.imports:
        package = full.partition(".")[0]
        is_own = not package or (
            path is not None and project.find_file_and_name_of_definition(path, full) is not None
        )
        if not is_own and package not in PACKAGES:
            yield statement, (PACKAGE, package)
        if last_part(full) in FORBIDDEN and full.startswith(("torch", "apex")):
            yield statement, (NAMED, full)
    for node, name in find_early_bindings_of_torch(module).items():
        yield node, (EARLY, name)
    for node in module.nodes:
        if isinstance(node, ast.Call):
            yield from _forbidden_nodes_in_call(module, node)
        elif isinstance(node, ast.Constant) and node.value == "apex":
            yield node, (ASKS,)
        elif isinstance(node, ast.Constant) and FP64.search(str(node.value)):
            yield node, (NAMED, str(node.value))
        elif (name := _name_in_node(node)) and _is_forbidden_name(module, node, name):
            yield node, (NAMED, name)
        elif (full := _torchvision_name(module, node)) and full not in OF_TORCHVISION:
            yield node, (UNLISTED_DATA, f"torchvision.{full}")
        elif name == "__getitem__" and not isinstance(node, ast.Attribute):
            yield node, (WIDE, "a data set of its own")
        elif (full := unlisted_torch_name(module, node)).startswith("torch.nn.") and not full.startswith(
            NO_NETWORKS
        ):
            yield node, (UNLISTED, full)
    yield from _nodes_unfit_for_networks(core, module)


def _nodes_unfit_for_networks(core: ApexCore, module: Module) -> Iterator[tuple[ast.AST, tuple[str, ...]]]:
    """Yield what no network may have, and products that stand elsewhere, each with the message and its words."""
    networks = list(network_classes(module))
    for network in networks:
        for node in _unread_bases_and_decorators(core, module, network):
            yield node, (HIDES, network.name)
    for part in (*networks, *_functions_given_as_values(module)):
        for node in walk(part):
            if found := name_unfit_for_network(module, node):
                yield node, (IN_NETWORK, found)
    forwards = [one for each in networks for one in each.body if getattr(one, "name", "") == "forward"]
    inside = {id(node) for each in forwards for node in walk(each)}
    for node in module.nodes:
        if id(node) not in inside and (found := _product_named_in_node(node)):
            if module is not core.module or not core.has_autocast(node):
                yield node, (PRODUCT, found)


def _unread_bases_and_decorators(core: ApexCore, module: Module, network: ast.ClassDef) -> Iterator[ast.AST]:
    """Yield the bases of a network that are none of torch or the project, and decorators of its methods."""
    for base in network.bases:
        if module.resolve(base) in BASES:
            continue
        classes = core.index.classes_of_expression(base, module.scope_of[base])
        if not classes or not all(each.node in set[object](network_classes(each.module)) for each in classes):
            yield base
    for each in network.body:
        yield from getattr(each, "decorator_list", [])


def _functions_given_as_values(module: Module) -> Iterator[ast.AST]:
    """Yield the lambdas of a module, and its functions that it names without calling them: a layer may call these."""
    named = {
        last_name(node)
        for node in module.nodes
        if isinstance(node, (ast.Name, ast.Attribute))
        and isinstance(node.ctx, ast.Load)
        and not _is_called(module, node)
    }
    for node in module.nodes:
        if isinstance(node, ast.Lambda) or (isinstance(node, FunctionNode) and node.name in named):
            yield node


def _product_named_in_node(node: ast.AST) -> str:
    """Return a product that a node computes or names; "" for any other."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return "@" if isinstance(node.op, ast.MatMult) else ""
    name = node.value if isinstance(node, ast.Constant) else _name_in_node(node)
    return name if isinstance(name, str) and name in PRODUCTS else ""


def _name_in_node(node: ast.AST) -> str:
    """Return the name that a node uses or gives; "" if it does neither."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        return last_name(node)
    if isinstance(node, ast.arg):
        return node.arg
    return node.name if isinstance(node, DefinitionNode) else ""


def _forbidden_nodes_in_call(module: Module, call: ast.Call) -> Iterator[tuple[ast.AST, tuple[str, ...]]]:
    name, full = last_name(call.func), module.resolve(call.func) or ""
    if (isinstance(call.func, ast.Name) and name in RUN_CODE) or full == "torch.compile":
        yield call, (RUNS, name)
    if name in ("deepcopy", "copy") and call.args and COPIES.search(dotted_name(call.args[0]) or ""):
        yield call, (COPIED, ast.unparse(call.args[0]))
    if full.startswith("torch.") and any(each.arg == "out" for each in call.keywords):
        yield call, (NAMED, "out=")
    is_cast = getattr(module.parent(call), "attr", "") in ("float", "long") or any(
        each.arg == "dtype" for each in call.keywords
    )
    if full in FROM_ARRAYS and not is_cast and call.args and not _consists_of_literals(call.args[0]):
        yield call, (WIDE, ast.unparse(call.func))
    if full == "torch.load" and not _is_loaded_state(module, call):
        yield call, (WIDE, "a file of tensors")
    if full == "torch.utils.data.DataLoader" and not _loads_images_or_tensors(module, call):
        yield call, (WIDE, "a DataLoader of other data than torchvision's")


def _torchvision_name(module: Module, node: ast.AST) -> str:
    """Return the name of something in torchvision, without that; "" for a module of it and for anything else."""
    if not isinstance(node, (ast.Name, ast.Attribute)) or isinstance(module.parent(node), ast.Attribute):
        return ""
    package, _, name = (module.resolve(node, follow=False) or "").partition(".")
    return name if package == "torchvision" else ""


def _consists_of_literals(value: ast.expr) -> bool:
    return all(isinstance(each, (ast.Constant, ast.List, ast.Tuple, ast.UnaryOp)) for each in walk(value))


def _is_loaded_state(module: Module, call: ast.Call) -> bool:
    """Return whether what a call loads goes into `load_state_dict`, or is a count that stands in a checkpoint."""
    statement = module.statement_around(call)
    if (
        isinstance(statement, ast.Assign)
        and statement.value is call
        and isinstance(statement.targets[0], ast.Name)
    ):
        name, scope = statement.targets[0].id, module.scope_of[call]
        uses = [
            each
            for each in module.nodes
            if isinstance(each, ast.Name) and each.id == name and module.scope_of[each] is scope
        ]
        return all(isinstance(each.ctx, ast.Store) or _is_state_or_count(module, each) for each in uses)
    return _is_state_or_count(module, call)


def _is_state_or_count(module: Module, node: ast.expr) -> bool:
    around = module.parent(node)
    if isinstance(around, ast.Subscript) and around.value is node:
        if isinstance(around.slice, ast.Constant) and COUNTS.search(str(around.slice.value)):
            return True
        around = module.parent(around)
    return isinstance(around, ast.Call) and last_name(around.func) == "load_state_dict"


def _loads_images_or_tensors(module: Module, call: ast.Call) -> bool:
    """Return whether a DataLoader gets a data set of torchvision, or tensors."""
    given = (
        call.args[0]
        if call.args
        else next((each.value for each in call.keywords if each.arg == "dataset"), None)
    )
    values = (
        [given]
        if isinstance(given, ast.Call)
        else module.values_of(dotted_name(given) or "", module.scope_of[call])
    )
    return bool(values) and all(_is_data_set_of_images_or_tensors(module, each) for each in values or [])


def _is_data_set_of_images_or_tensors(module: Module, value: ast.expr) -> bool:
    """Return whether a value is a data set of tensors, or of torchvision with no code of its own but its transforms."""
    full = module.resolve(value.func) or "" if isinstance(value, ast.Call) else ""
    if not isinstance(value, ast.Call) or full == "torch.utils.data.TensorDataset":
        return bool(full)
    is_plain = len(value.args) <= 2 and all(each.arg in OF_DATA for each in value.keywords)
    transforms = [each.value for each in value.keywords if each.arg == "transform"]
    if full.endswith("ImageFolder"):
        transforms += value.args[1:]
    is_listed = full.removeprefix("torchvision.") in OF_TORCHVISION
    return is_plain and is_listed and all(_is_listed_transform(module, each) for each in transforms)


def _is_listed_transform(module: Module, value: ast.expr) -> bool:
    """Return whether a value is a transform of the list, or consists of such."""
    if isinstance(value, ast.Name):
        values = module.values_of(value.id, module.scope_of[value])
        return bool(values) and all(_is_listed_transform(module, each) for each in values or [])
    full = module.resolve(value.func) or "" if isinstance(value, ast.Call) else ""
    if not isinstance(value, ast.Call) or not full.startswith("torchvision.transforms."):
        return False
    parts = [one for each in value.args for one in elements(each)] if full.endswith(".Compose") else []
    is_listed = full.removeprefix("torchvision.") in OF_TORCHVISION
    return is_listed and all(_is_listed_transform(module, each) for each in parts)


def name_unfit_for_network(module: Module, node: ast.AST) -> str:
    """Return a name that no network may have, nor a function under autocast; "" for all that is on the lists.

    The lists leave out whatever makes a tensor of fp32 that no layer returns: weights, buffers, new tensors, numbers.
    """
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return ""
    if found := unlisted_torch_name(module, node):
        return found
    name, scope = last_name(node), module.scope_of[node]
    if makes_fp32_number(module, node) or (isinstance(node, ast.Name) and name == "vars"):
        return name
    runs_later = isinstance(scope.node, FunctionNode) and scope.node.name != "__init__"
    if not runs_later and not isinstance(scope.node, ast.Lambda):
        return ""  # it runs before amp.initialize
    if isinstance(module.parent(node), ast.Attribute) and module.resolve(node, follow=False) is not None:
        return ""  # the module of a function
    is_unfit = _is_unfit_attribute if isinstance(node, ast.Attribute) else _is_unfit_variable
    return name if is_unfit(module, node) else ""


def _is_unfit_attribute(module: Module, node: ast.AST) -> bool:
    """Return whether an attribute is none of those that a network may read or call as it runs."""
    assert isinstance(node, ast.Attribute)
    full = module.resolve(node, follow=False)
    if full is not None:
        return full.partition(".")[0] in PACKAGES - {"torch", "math"} or not _is_called_or_type(
            module, node, full
        )
    owner: ast.expr = node.value
    while isinstance(owner, (ast.Attribute, ast.Subscript)):
        owner = owner.value
    if isinstance(owner, ast.Name) and owner.id == "self":  # layers, numbers, methods
        return isinstance(node.ctx, ast.Store) or OF_BASE_CLASS.search(node.attr) is not None
    if isinstance(owner, ast.Call) and dotted_name(owner.func) == "super":
        return False
    return node.attr not in SHOWN_OR_HELD and not (node.attr in METHODS and _is_called(module, node))


def _is_unfit_variable(module: Module, node: ast.AST) -> bool:
    """Return whether a name is a function that is not called, a text by which one is taken, or a tensor of the file."""
    assert isinstance(node, ast.Name)
    call = module.parent(node)
    if node.id == "getattr":
        return not (
            isinstance(call, ast.Call)
            and call.args
            and dotted_name(call.args[0]) == "self"
            and not any(
                OF_BASE_CLASS.search(str(each.value)) for each in walk(call) if isinstance(each, ast.Constant)
            )
        )
    full = module.resolve(node, follow=False)
    if full is not None:
        return full.partition(".")[0] in PACKAGES - {"torch", "math"} or not _is_called_or_type(
            module, node, full
        )
    inner = [each for each in module.scope_of[node].lookup_scopes() if each is not module.top]
    is_own = any(node.id in each.parameters or node.id in each.values for each in inner)
    if is_own or not isinstance(node.ctx, ast.Load):
        return False
    values = module.top.values.get(node.id)
    if values is not None:
        return not all(map(_consists_of_literals, values))
    return hasattr(builtins, node.id) and node.id not in BUILTINS


def _is_called_or_type(module: Module, node: ast.AST, full_name: str) -> bool:
    return full_name == "math.pi" or last_part(full_name) in TYPES or _is_called(module, node)


def _is_called(module: Module, node: ast.AST) -> bool:
    return getattr(module.parent(node), "func", None) is node


def makes_fp32_number(module: Module, node: ast.AST) -> bool:
    """Return whether a node names what reduces a tensor to one number of fp32, or makes one.

    O1 makes fp32 of what such a number is added to or multiplied with; torch keeps the type of the other tensor. The
    list refuses such a name wherever it stands in a network; `ScalarTensorFinder` finds where such a number meets
    a tensor.
    """
    call = module.parent(node)
    if last_name(node) in ("ones", "zeros", "full", "rand", "randn", "empty") and isinstance(call, ast.Call):
        shape = call.args[0] if call.args and call.func is node else None
        return isinstance(shape, (ast.List, ast.Tuple)) and not shape.elts
    if (
        last_name(node) not in ("sum", "norm", "prod", "mean", "max", "min")
        or not isinstance(call, ast.Call)
        or call.func is not node
    ):
        return False
    is_function = (module.resolve(node) or "").startswith("torch.")
    return len(call.args) <= is_function and not call.keywords


def unlisted_torch_name(module: Module, node: ast.AST) -> str:
    """Return the full name of something of torch that is not on the list of layers and functions; else ""."""
    if not isinstance(node, (ast.Name, ast.Attribute)) or isinstance(module.parent(node), ast.Attribute):
        return ""
    full = module.resolve(node, follow=False) or ""
    owner = full.rpartition(".")[0]
    is_listed = last_part(full) in LAYERS | FUNCTIONS | TYPES and full not in OF_FUNCTIONAL
    is_listed = is_listed and OWNERS.fullmatch(owner) is not None
    is_listed = is_listed or full.startswith("torch.nn.init.")
    return full if full.startswith("torch.") and not is_listed else ""


def _is_forbidden_name(module: Module, node: ast.AST, name: str) -> bool:
    if EMA.search(name):
        return True
    if name not in FORBIDDEN or not isinstance(node, (ast.Name, ast.Attribute)):
        return False
    full = module.resolve(node, follow=False) or ""
    if isinstance(node, ast.Name):  # a variable of such a name is none of torch's
        return full.startswith(("torch", "apex")) or name in ("__import__", "setattr")
    if name in ("graph", "hook", "fx", "double", "hub", "jit", "std", "var", "float16"):
        return not full or full.startswith("torch")
    return True
