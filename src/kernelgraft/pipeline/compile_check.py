"""What is compiled ahead of time: the examples of our kernels, and the cuTile Solutions stored in a folder."""

from __future__ import annotations

from collections.abc import Sequence

from kernelgraft.cutile import compiling
from kernelgraft.cutile.compiling import Call, CompileCheck
from kernelgraft.errors import UsageError
from kernelgraft.pipeline.progress import Progress, silent
from kernelgraft.store import Inventory

RECORD = "compile"


def compile_check(
    store: Inventory | None = None,
    *,
    architectures: Sequence[str] = compiling.ARCHITECTURES,
    only: Sequence[str] | None = None,
    progress: Progress = silent,
) -> CompileCheck:
    """Compile every cuTile kernel for the architectures; needs the compiler, no GPU.

    With a store, also its Solutions in cuTile's language, called as its workloads were; the result is kept in it.
    `only`: words, one of which a call's name has to contain. MissingExtraError without cuda-tile and its compiler.
    """
    compiling.compiler()
    calls = [*example_calls(), *(solution_calls(store) if store is not None else ())]
    if only is not None:
        calls = [call for call in calls if any(word in call.name for word in only)]
        if not calls:
            raise UsageError(f"no call's name contains `{'` or `'.join(only)}`: `rms_norm`, say, chooses a kernel")
    found = compiling.check(calls, architectures, progress=progress)
    if store is not None:
        store.save_record(RECORD, found)
    return found


def example_calls() -> list[Call]:
    """The examples of our kernels, with the defaults and, for its architecture, with what each shipped table seats."""
    from kernelgraft.cutile.tuning import shipped
    from kernelgraft.kernels.examples import examples

    entry = "kernelgraft.kernels.examples:run"
    listed = [(m, index, f"{m}: {e.name}") for m, found in examples().items() for index, e in enumerate(found)]
    calls = [Call(name, entry, (module, index)) for module, index, name in listed]
    for gpu in shipped():
        for module, index, name in listed:
            arguments = (module, index, gpu.slug)
            calls.append(Call(f"{name}, {gpu.slug}", f"{entry}_tuned", arguments, (gpu.compute_capability,)))
    return calls


def solution_calls(store: Inventory) -> list[Call]:
    """Calls of the stored cuTile Solutions: each captured shape that they serve once, or a small and a larger one."""
    from kernelgraft.suppliers.rehearsal import rehearsals

    entry, folder = "kernelgraft.suppliers.rehearsal:rehearse", str(store.root.resolve())
    definitions = store.definitions()
    calls = []
    for name, solution in store.solutions().items():
        definition = definitions.get(solution.definition)
        if solution.spec.language == "cuda-tile" and definition is not None:
            listed = rehearsals(store, solution, definition)
            calls += [Call(f"{name}: {which}", entry, (folder, name, which)) for which in listed]
    return calls
