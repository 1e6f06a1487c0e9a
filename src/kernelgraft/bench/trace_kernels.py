"""What made a GPU kernel: cuTile, Triton, cuBLAS, cuDNN, FlashAttention, torch.

cuTile's kernels carry their whole signature in their name, which `demangle_kernel_name` reads, and Triton's are those
that this process compiled. No word in a name (rope, moe, matmul) makes a kernel one of theirs. For the libraries, the
name's own scheme decides (namespace, generator's prefix), then the operator that launched it.
"""

from __future__ import annotations

import functools
import gc
import re
import sys
from collections.abc import Collection, Sequence

LANGUAGES = ("cutile", "triton", "cublas", "cudnn", "flash", "torch", "memory", "other")
LIBRARIES = ("cublas", "cudnn", "flash")

_INDUCTOR = re.compile(r"triton_(poi|per|red|tem|for|mm|bmm|unk|split)_")
"""How torch's compiler names the Triton kernels that it writes."""
_RETURNED = re.compile(r"(static )?(void|std::enable_if<.*?>::type) ")
_CHIP = r"(sm\d+|volta|turing|ampere|ada|hopper|blackwell|maxwell)_\w*"
_SCHEMES = {
    "flash": re.compile(r"(pytorch_)?flash(_attn)?\w*::|flash_(fwd|bwd)_|cutlass::device_kernel<flash"),
    "cudnn": re.compile(rf"cudnn|{_CHIP}cudnn"),
    "torch": re.compile(r"(at|c10|at_cuda_detail|cub|thrust|torch)::|fmha_cutlass"),
    "cublas": re.compile(
        r"nvjet_|cutlass|cublas(Lt)?\w*::|(internal::)?gemvx::|gemv(2[NT]|NSP)\w*_kernel|gemm(SN_|k1_|_kernel\d)|"
        rf"splitKreduce_kernel|dot_kernel<|reduce_1Block_kernel<|{_CHIP}(gemm|xmma)"
    ),
}
_BY_OPERATOR = {
    "cudnn": re.compile(r"aten::(_?cudnn|_scaled_dot_product_cudnn)"),
    "flash": re.compile(r"aten::(_flash|_scaled_dot_product_flash)"),
    "cublas": re.compile(r"aten::(mm|bmm|addmm|baddbmm|addmv|mv|dot|_scaled_mm|_grouped_mm|_addmm_activation)(_out)?$"),
}


def cutile_function(name: str) -> str | None:
    """The Python name of the cuTile kernel that a symbol stands for; None if it is no cuTile kernel's symbol."""
    return _cutile_function(name) if "_K" in name else None


@functools.lru_cache(maxsize=4096)
def _cutile_function(name: str) -> str | None:
    try:
        from cuda.tile.compilation import demangle_kernel_name
    except ImportError:  # then no kernel of it can have run
        return None
    try:
        return str(demangle_kernel_name(name)[0]) or None
    except ValueError as error:
        # It read the name up to a class that it would have to import.
        return name[: name.rfind("_K")] or None if "refusing to demangle" in str(error) else None


def triton_names() -> frozenset[str]:
    """Symbols of all Triton kernels that this process has compiled or loaded."""
    compiler = sys.modules.get("triton.compiler.compiler")
    compiled = getattr(compiler, "CompiledKernel", None)
    if compiled is None:
        return frozenset()
    return frozenset(found.name for found in gc.get_objects() if type(found) is compiled)


def language(name: str, triton: Collection[str] = (), operators: Sequence[str] = ()) -> str:
    """One of LANGUAGES for a kernel, by its name and by the operators that launched it, outermost first."""
    if cutile_function(name) is not None:
        return "cutile"
    if name in triton or _INDUCTOR.match(name):
        return "triton"
    plain = _RETURNED.sub("", name, count=1) if _RETURNED.match(name) else name
    for schemes, texts in ((_SCHEMES, (plain,)), (_BY_OPERATOR, operators)):
        for found, scheme in schemes.items():
            if any(scheme.match(text) for text in texts):
                return found
    if any(operator.startswith("aten::") for operator in operators) or "at::native::" in name or "c10::" in name:
        return "torch"  # types of torch stand in its kernels' arguments
    return "other"


@functools.lru_cache(maxsize=4096)
def label(name: str) -> str:
    """A kernel's name as a table shows it: without return type, template arguments, parameters and signature."""
    function = cutile_function(name)
    if function is not None:
        return function
    kept, depth = [], 0
    for character in _RETURNED.sub("", name, count=1).replace("(anonymous namespace)::", ""):
        depth += character in "<("
        if not depth:
            kept.append(character)
        depth -= character in ">)" and depth > 0
    return "".join(kept).strip() or name
