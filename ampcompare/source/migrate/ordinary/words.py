"""What no file of an ordinary training may name: words decide here, since they only ever decide for the adapter."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampcompare.source.migrate.read.early_names import find_early_bindings_of_torch
from ampcompare.source.migrate.read.finding import UnsureRewrite
from ampcompare.source.migrate.read.networks import network_classes
from ampcompare.source.project import MAX_MODULES
from ampcompare.source.syntax import DefinitionNode, dotted_name, last_name, last_part, walk

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
    "grad", "autograd", "hook", "register_hook", "register_forward_hook", "register_forward_pre_hook",
    "register_backward_hook", "register_full_backward_hook", "register_full_backward_pre_hook",
    "register_post_accumulate_grad_hook", "DataParallel", "DataParallelWithCallback", "replicate", "parallel_apply",
    "Thread", "ThreadPoolExecutor", "swa_utils", "AveragedModel", "LBFGS", "Reducer", "LARC", "FP16_Optimizer",
    "std", "var", "std_mean", "var_mean", "acos_", "asin_", "cosh_", "erfinv_", "expm1_", "log10_", "log2_", "sinh_",
    "tan_", "cumprod_", "renorm_", "import_module", "importlib", "__import__", "__getattr__", "setattr", "no_sync",
    "Stream", "CUDAGraph", "graph", "inference_mode",
})  # fmt: skip
# Of torch, what a network may name: O1 and autocast compute these in equal types, or differ by roundings that have a
# note.
LAYERS = frozenset({
    "Module", "Sequential", "ModuleList", "ModuleDict", "Parameter", "ParameterList", "Identity", "Linear", "Conv1d",
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
    "sort", "argmax", "argmin", "gather", "numel", "is_tensor", "eye", "tril", "triu", "zeros", "ones", "zeros_like",
    "ones_like", "full", "full_like", "empty", "arange", "linspace", "rand", "randn", "randint", "randperm",
    "eq", "ne", "gt", "ge", "lt", "le", "logical_and", "logical_or", "logical_not",
})  # fmt: skip
# Of `torch` itself these are other functions, which O1 does not list.
OF_FUNCTIONAL = frozenset({
    "torch.layer_norm", "torch.group_norm", "torch.softmax", "torch.log_softmax",
    "torch.binary_cross_entropy_with_logits",
})  # fmt: skip
TYPES = frozenset({
    "Tensor", "FloatTensor", "LongTensor", "BoolTensor", "float", "float32", "long", "int64", "int", "int32", "bool",
    "uint8", "Size", "device", "nn", "init", "functional", "dtype",
})  # fmt: skip
EMA = re.compile(r"(?:^|_)ema(?:$|_)|^EMA|EMA$|Ema(?:[A-Z]|$)|moving_average|MovingAverage|momentum_update")
# What holds the layers and functions of the list; others hold functions of the same names, such as `torch.special`.
OWNERS = re.compile(r"torch(?:\.nn(?:\.functional|\.parameter|\.modules(?:\.\w+)?)?|\.cuda)?")
# Calls of builtins that run code which no import names.
RUN_CODE = frozenset({"exec", "eval", "compile", "globals", "locals"})
COPIES = re.compile(
    r"model|net|module|encoder|decoder|generator|discriminator|teacher|student", re.IGNORECASE
)
# In a network: what leaves the GPU, or computes without gradients; and what autocast computes in another type than O1,
# which lists other names: found by calls of all methods of tensors.
IN_NETWORKS = frozenset({
    "arccos", "arcsin", "arccos_", "arcsin_", "arctan2", "atan2_", "addcdiv_", "addcmul_", "corrcoef", "cov", "eq_",
    "ge_", "gt_", "inner", "ldexp", "ldexp_", "le_", "lt_", "matrix_exp", "matrix_power", "mvlgamma", "mvlgamma_",
    "ne_", "pinverse", "square", "sum_to_size",
    "__getattribute__", "__dict__", "vars",
    "cpu", "numpy", "tolist", "no_grad", "enable_grad", "set_grad_enabled", "inference_mode", "checkpoint",
    "from_numpy",
})  # fmt: skip
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
UNLISTED = "{0} names {1}, which is not on the list of what O1 and autocast compute alike"
EARLY = "{0} binds {1} before amp.initialize, or may do so: O1 does not cast it under this name then, and autocast does"
ASKS = "{0} asks for Apex by a text"


def refuse_forbidden_words(core: ApexCore) -> None:
    """Refuse a training with a word that is not allowed, in any file that runs with it.

    Raises:
        UnsureRewrite: there is one.
    """
    others = [each for _, each in core.around.other_modules_of_program(core.module)]
    first = core.sites.initializes[0].call
    if len(others) + 1 >= MAX_MODULES:
        raise UnsureRewrite(first, MANY)
    for module in (core.module, *others):
        for node, message in _forbidden_nodes_of(core, module):
            where = (
                "this line"
                if module is core.module
                else f"line {_line_of_node(node)} of {core.index.relative_path_of(module)}"
            )
            raise UnsureRewrite(
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
        elif (name := _name_in_node(node)) and _is_forbidden_name(module, node, name):
            yield node, (NAMED, name)
        elif name == "__getitem__" and not isinstance(node, ast.Attribute):
            yield node, (WIDE, "a data set of its own")
        elif (full := unlisted_torch_name(module, node)).startswith("torch.nn.") and not full.startswith(
            NO_NETWORKS
        ):
            yield node, (UNLISTED, full)
    for network in network_classes(module):
        for node in walk(network):
            if found := name_unfit_for_network(module, node):
                yield node, (IN_NETWORK, found)


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
    if full == "torch.utils.data.DataLoader" and not _loads_images_or_tensors(module, call):
        yield call, (WIDE, "a DataLoader of other data than torchvision's")


def _consists_of_literals(value: ast.expr) -> bool:
    return all(isinstance(each, (ast.Constant, ast.List, ast.Tuple, ast.UnaryOp)) for each in walk(value))


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
    made = [module.resolve(each.func) or "" if isinstance(each, ast.Call) else "" for each in values or []]
    return bool(made) and all(
        each.startswith("torchvision.datasets.") or each == "torch.utils.data.TensorDataset" for each in made
    )


def name_unfit_for_network(module: Module, node: ast.AST) -> str:
    """Return a name that no network may have: one that leaves it, or one of torch that is not on the list; else ""."""
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return ""
    full = module.resolve(node, follow=False) or ""
    if (
        last_name(node) in IN_NETWORKS
        or makes_fp32_number(module, node)
        or _gets_unknown_attribute(module, node)
    ):
        return last_name(node)
    if full.startswith("operator.") or full == "functools.reduce":
        return full
    return unlisted_torch_name(module, node)


def _gets_unknown_attribute(module: Module, node: ast.AST) -> bool:
    """Return whether a node is `getattr` for an attribute of something else than the network itself."""
    call = module.parent(node)
    if not (isinstance(node, ast.Name) and node.id == "getattr"):
        return False
    return not (isinstance(call, ast.Call) and call.args and dotted_name(call.args[0]) == "self")


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
        last_name(node) not in ("sum", "norm", "prod")
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
