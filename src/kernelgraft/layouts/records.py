"""What a set of kernels says: which modules, by which kernel of which package, and what was loaded for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn

Fusion = Literal["chain", "parallel", "residual"]
"""How the parts of a fusion stand in the data flow.

chain     the output of each part is the only input of the next
parallel  the parts read the same input; the fused module stands in for the first, and the others take their share
residual  the first part is a norm that reads the sum of a residual and a branch
"""
FUSIONS: tuple[Fusion, ...] = ("chain", "parallel", "residual")


@dataclass(frozen=True)
class Part:
    """One module of a key: its class name (exact, or a regex searched in it) and the pattern of its path.

    `path` is dotted from the root of the model; `*` stands for exactly one segment. None is any path.
    """

    class_name: str
    path: str | None = None

    def __str__(self) -> str:
        return f"`{self.class_name}`" if self.path is None else f"`{self.class_name}` at `{self.path}`"


@dataclass(frozen=True)
class Source:
    """Where a package is: a repository of the Hub, a folder, or a repository object of `kernels`.

    One of `repo`, `folder` and `repository` is the place. `repository` is only set for an object that does not say
    where its package is: its own `load()` then gives the class. `version` is a branch `v<int>`; `revision` a tag,
    branch or commit; at most one of the two is given.
    """

    repo: str | None = None
    folder: Path | None = None
    version: int | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    repository: Any = None

    def __str__(self) -> str:
        if self.folder is not None:
            return str(self.folder)
        pin = f"@{self.revision}" if self.revision else f"@v{self.version}" if self.version is not None else ""
        return f"{self.repo or type(self.repository).__name__}{pin}"


@dataclass(frozen=True)
class Entry:
    """One pair of a KernelSet: which modules (a class name, a function that they call, a fusion) take which kernel.

    `device` is the type of device that the pair is meant for ("cuda"); None is any.
    """

    key: str | tuple[Part, ...]
    source: Source
    kernel_name: str
    device: str | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the key: one without a path for a string."""
        return (Part(self.key),) if isinstance(self.key, str) else self.key

    @property
    def is_fusion(self) -> bool:
        """Whether the key is a tuple: the Layout is then built from the children, not from their arguments."""
        return not isinstance(self.key, str)

    def __str__(self) -> str:
        return f"{' + '.join(str(part) for part in self.parts)} → `{self.source}:{self.kernel_name}`"


@dataclass(frozen=True)
class LoadedKernel:
    """An Entry with the classes of its package.

    `kernel` has the forward; `layout` (None: the kernel takes the parameters as they are) has the parameters and
    `rules`, its `conversion_mapping`. `location` is the variant folder that was imported, `commit` the snapshot it came
    from, `licence` what its metadata.json says.
    """

    entry: Entry
    kernel: type[nn.Module]
    layout: type[nn.Module] | None = None
    rules: tuple[Any, ...] = ()
    location: Path | None = None
    commit: str | None = None
    licence: str | None = None

    @property
    def name(self) -> str:
        """The kernel's class name."""
        return self.entry.kernel_name

    @property
    def fusion(self) -> Fusion:
        """What the Layout declares beside its parameters as `fusion`; "chain" if it declares nothing."""
        declared: Fusion = getattr(self.layout, "fusion", "chain")
        return declared

    @property
    def has_backward(self) -> bool:
        """Whether gradients flow through the kernel's forward, as it declares; True if it declares nothing."""
        return bool(getattr(self.kernel, "has_backward", True))

    @property
    def can_torch_compile(self) -> bool:
        """Whether torch.compile can trace the kernel's forward, as it declares; False if it declares nothing."""
        return bool(getattr(self.kernel, "can_torch_compile", False))


@dataclass(frozen=True)
class FunctionUse:
    """A Python function that the methods of a module call.

    `name` is the function's own, `registered` the one by which transformers knows a kernel for it (None: it knows
    none), `where` the pairs of a method and the global variable that holds the function there.
    """

    name: str
    registered: str | None
    where: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Place:
    """One replacement in one model: the children `names` of the module at path `parent` ("" is the root).

    A string key has one name; a fusion has one for each part, in the order of the parts. With `function` the module
    stays, and only that function is replaced in its methods.
    """

    kernel: LoadedKernel
    parent: str
    names: tuple[str, ...] = field(default=())
    function: FunctionUse | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The full dotted paths of the children."""
        return tuple(f"{self.parent}.{name}" if self.parent else name for name in self.names)
