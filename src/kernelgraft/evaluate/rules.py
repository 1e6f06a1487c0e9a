"""The lists that the static gate (`static`) goes by, in one place."""

from __future__ import annotations

import ast

IMPORTS = frozenset(
    {
        "torch",
        "torch.autograd",
        "torch.nn",
        "torch.nn.attention",
        "torch.nn.attention.bias",
        "torch.nn.attention.flex_attention",
        "torch.nn.functional",
        "triton",
        "math",
        "typing",
        "functools",
        "collections.abc",
        "__future__",
    }
)
PACKAGES = ("triton.language", "cuda.tile", "tilegym", "liger_kernel", "flashinfer", "kernelgraft.kernels")
"""Packages that may be imported with everything below them: languages, and suppliers' kernels."""
ROOTS = frozenset({"torch", "triton", "cuda", "math", "typing", "functools", "tilegym", "liger_kernel", "flashinfer"})
"""First parts of the paths that imports lead to."""

KERNEL_LANGUAGES = frozenset({"triton", "cuda-tile", "tilelang", "cuda", "cpp"})
"""A Solution in one of these computes in kernels; torch only allocates, views and casts."""
TORCH_SUPPLIERS = frozenset({"torch", "inductor"})

DENIED_MODULES = frozenset(
    {"gc", "sys", "inspect", "ctypes", "os", "threading", "subprocess", "importlib", "builtins", "signal", "socket"}
)
"""Not even through another module (`torch.sys`)."""
DENIED_TORCH = frozenset(
    {
        # files, processes, and the machinery under tensors
        *("load", "save", "hub", "package", "jit", "utils", "overrides", "multiprocessing", "distributed", "futures"),
        *("serialization", "storage", "library", "fx", "export", "profiler", "classes", "from_file", "frombuffer"),
        # settings of the whole process
        *("set_default_dtype", "set_default_device", "set_default_tensor_type", "set_num_threads", "set_grad_enabled"),
        *("set_float32_matmul_precision", "set_deterministic_debug_mode", "use_deterministic_algorithms"),
        *("set_flush_denormal", "set_num_interop_threads", "set_anomaly_enabled", "set_autocast_enabled"),
        # random numbers: a generator is state that every call can advance
        *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "normal"),
        *("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state", "random", "default_generator"),
        *("Generator", "multinomial", "poisson"),
    }
)
ALLOWED_CUDA = frozenset({"current_stream", "current_device", "device", "get_device_properties", "is_available"})
"""Of `torch.cuda`: what a launch needs. No streams of its own, no events, no graphs."""
DENIED_TORCH_NN = frozenset({"Module", "Parameter", "Buffer", "modules", "parallel", "utils", "init", "parameter"})

DENIED_NAMES = frozenset(
    {
        *("exec", "eval", "compile", "open", "input", "globals", "locals", "vars", "setattr", "delattr", "breakpoint"),
        *("memoryview", "id", "hash", "dir", "help", "exit", "quit"),
    }
)
DENIED_ATTRIBUTES = frozenset(
    {
        # the values of a tensor, or where it lies, as Python objects
        *("item", "tolist", "numpy", "data_ptr", "storage", "untyped_storage", "cpu", "is_set_to"),
        # changes to a tensor that outlive the call
        *("set_", "resize_", "resize_as_", "share_memory_", "register_hook", "record_stream", "requires_grad_", "data"),
        *("register_post_accumulate_grad_hook", "keywords"),
    }
)

DEVICE_PREFIXES = ("triton.", "cuda.tile.")
"""Decorators that make a function run on the device."""
DECORATORS = frozenset(
    {
        *("staticmethod", "classmethod", "property", "typing.overload", "functools.wraps"),
        *("torch.no_grad", "torch.inference_mode", "torch.compile", "torch.compiler.disable"),
        *("torch.autograd.function.once_differentiable",),
    }
)
CACHES = frozenset({"functools.lru_cache", "functools.cache"})
CACHE_KEYS = frozenset({"int", "float", "bool", "str", "torch.dtype", "torch.device", "int | None", "float | None"})
"""Annotations of parameters that a function may be cached on."""
CONTAINERS = frozenset({"list", "dict", "set", "bytearray", "torch.empty", "torch.zeros", "torch.ones", "torch.tensor"})
CONSTANT_CALLS = frozenset(
    {
        *("torch.compile", "torch.finfo", "torch.iinfo", "torch.device", "functools.partial", "typing.TypeVar"),
        *("float", "int", "bool", "str", "tuple", "frozenset", "range", "min", "max", "len", "round", "abs"),
    }
)
CONSTANT_CALL_PREFIXES = ("math.", "triton.", "cuda.tile.")
FUNCTION = "torch.autograd.Function"
BASES = frozenset({FUNCTION, "typing.NamedTuple"})
DUNDER_METHODS = frozenset({"__init__", "__call__"})

HOST_TORCH = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "empty_permuted", "no_grad", "enable_grad", "inference_mode"),
        *("is_grad_enabled", "finfo", "iinfo", "Size", "Tensor", "broadcast_shapes", "device", "dtype", "contiguous"),
        *(
            "strided",
            "contiguous_format",
            "preserve_format",
            "reshape",
            "is_tensor",
            "is_floating_point",
            "promote_types",
        ),
        *("autograd", "compiler", "cuda", "nn", "ops"),
    }
)
"""What a Solution in a kernel language may use of torch besides dtypes: allocation, shape, dtype, view."""
COMPUTE_METHODS = frozenset(
    {
        *("sum", "mean", "matmul", "mm", "bmm", "addmm", "softmax", "log_softmax", "exp", "exp2", "log", "pow", "sqrt"),
        *("rsqrt", "square", "mul", "add", "sub", "div", "mul_", "add_", "sub_", "div_", "copy_", "sigmoid", "tanh"),
        *("silu", "gelu", "relu", "norm", "var", "std", "einsum", "cumsum", "amax", "amin", "argmax", "where", "clamp"),
        *("masked_fill", "masked_fill_", "baddbmm", "prod", "neg", "abs", "reciprocal", "sort", "topk", "repeat"),
    }
)

FLOAT_BITS = {
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "float8e4nv": 8,
    "float8e5": 8,
    "float4_e2m1": 4,
}
"""Floating dtypes by every name that torch, Triton and cuTile give them."""
DTYPE_METHODS = {"half": "float16"}

TRY: tuple[type[ast.AST], ...] = (ast.Try, ast.TryStar)
DISPLAYS: tuple[type[ast.AST], ...] = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


def importable(module: str) -> bool:
    """True if a Solution may import this module."""
    return module in IMPORTS or any(module == p or module.startswith(p + ".") for p in PACKAGES)


def denied_path(path: str) -> str | None:
    """Why a dotted path that begins at an import may not be used; None if it may."""
    parts = path.split(".")
    if hidden := next((p for p in parts if p in DENIED_MODULES), None):
        return f"reaches `{hidden}` through `{path}`"
    if parts[0] != "torch" or len(parts) < 2:
        return None
    if parts[1] in DENIED_TORCH:
        return f"uses `{path}`"
    if parts[1] == "cuda" and len(parts) > 2 and parts[2] not in ALLOWED_CUDA:
        return f"uses `{path}`"
    if parts[1] == "nn" and len(parts) > 2 and parts[2] in DENIED_TORCH_NN:
        return f"uses `{path}`"
    if parts[1] == "backends" and len(parts) > 2:
        return f"uses `{path}`"
    return None


def on_host(path: str) -> bool:
    """True if this torch path only allocates, views, or names a dtype."""
    parts = path.split(".")
    if parts[1] in ("nn", "ops") and len(parts) > 2:
        return parts[1] == "ops" and parts[2] not in ("aten", "prims")
    return parts[1] in HOST_TORCH or parts[1] in FLOAT_BITS or parts[1].rstrip("0123456789") in ("int", "uint", "bool")
