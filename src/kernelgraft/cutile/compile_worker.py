"""The child process of `compiling`: one request a line on stdin, one answer a line on stdout.

It imports and calls what it is told to, with launches recorded, and compiles what was launched. It may crash or hang:
its parent sees to that.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile.compilation import export_kernel

from kernelgraft import machine
from kernelgraft.cutile.cubin import resources
from kernelgraft.cutile.recording import Launch, recording
from kernelgraft.cutile.signatures import launch_signature

LONGEST_MESSAGE = 600
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""What differs between processes in how an object is shown."""
_recorded: dict[str, list[Launch]] = {}


def record(entry: str, arguments: list[Any]) -> list[Launch]:
    """What calling `package.module:function` with these arguments launches; remembered."""
    key = json.dumps([entry, arguments])
    if key not in _recorded:
        module, _, name = entry.partition(":")
        function = getattr(importlib.import_module(module), name)
        with recording() as launches:
            function(*arguments)
        _recorded[key] = launches
    return _recorded[key]


def described(launch: Launch) -> dict[str, Any]:
    """What tells one compilation from another, as JSON values."""
    function = launch.kernel._pyfunc
    cells = [ADDRESS.sub("", repr(cell.cell_contents)) for cell in function.__closure__ or ()]
    hints = {name: value for name, value in vars(launch.kernel._compiler_options).items() if value is not None}
    found = {
        "kernel": f"{function.__module__}.{function.__qualname__}",
        "symbol": launch_signature(launch.kernel, launch.args).symbol,
        "hints": {name: value if isinstance(value, int) else repr(value) for name, value in hints.items()},
    }
    key = hashlib.sha256(json.dumps([found, cells], sort_keys=True).encode()).hexdigest()
    return found | {"grid": launch.grid, "key": key}


def compile_launch(launch: Launch, architecture: str) -> dict[str, Any]:
    """Compile the kernel of a launch: status, message, seconds and what it takes."""
    signature = launch_signature(launch.kernel, launch.args)
    cubin = io.BytesIO()
    started = machine.clock()
    status, message = "compiled", None
    try:
        export_kernel(launch.kernel, [signature], cubin, gpu_code=architecture, output_format="cubin")
    except ct.TileCompilerTimeoutError as error:
        status, message = "timeout", _short(error.message)
    except ct.TileCompilerExecutionError as error:
        # The message is `Return code <number>` and what the compiler said.
        first, _, said = error.message.partition("\n")
        number = int(first.split()[-1])
        status = "crashed" if number < 0 else "failed"
        ended = f"was ended by {_signal(-number)}" if number < 0 else f"exit status {number}"
        message = f"tileiras: {_short(f'{ended}: {said}' if said.strip() else ended)}"
    except ct.TileError as error:
        place = "" if error.loc.is_unknown() else f"{Path(str(error.loc.filename)).name}:{error.loc.line}: "
        status, message = "refused", f"{place}{type(error).__name__}: {_short(error.message)}"
    except Exception as error:
        # An error of the front end's own (an assertion, a missing case) is as much a result as one of the compiler.
        status, message = "refused", f"{type(error).__name__}: {_short(str(error))}"
    answer: dict[str, Any] = {"status": status, "message": message, "seconds": machine.clock() - started}
    if status == "compiled":
        content = cubin.getvalue()
        answer |= {"cubin_bytes": len(content), **vars(resources(content, str(signature.symbol)))}
    return answer


def _signal(number: int) -> str:
    return signal.Signals(number).name if number in {int(s) for s in signal.Signals} else f"signal {number}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_MESSAGE else line[:LONGEST_MESSAGE] + "…"


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request: what a call launches, or what became of compiling one of its launches."""
    try:
        launches = record(request["entry"], request["arguments"])
    except Exception as error:
        # Whatever a call raises is its result.
        return {"error": f"{type(error).__name__}: {_short(str(error))}"}
    if "architecture" not in request:
        return {"launches": [described(launch) for launch in launches]}
    index = request["launch"]
    if index >= len(launches) or described(launches[index])["key"] != request["key"]:
        return {"status": "failed", "message": "the call launches something else when it is repeated"}
    return compile_launch(launches[index], request["architecture"])


def main() -> None:
    """Answer until stdin closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    torch.set_num_threads(1)
    scratch = Path(sys.argv[1])

    def say(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    say({"ready": True})
    for line in sys.stdin:
        say(answer(json.loads(line)))
        for left in scratch.iterdir():
            left.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
