"""Judge every kernel of the supplier `kernelgraft` in bfloat16, float16 and float32, and print one line for each.

    python scripts/judge_kernels.py [--device cpu|cuda] [--jobs N] [--budget SECONDS] [--only TEXT ...] [--thorough]
                                    [--list] [--json FILE]

The Definitions are hand-made (by `tests/peer_definitions.py` of this checkout): odd widths and head sizes, every option
of the kernels. What matters most comes first; what the budget leaves over is listed. On the CPU the interpreter runs
the kernels, on smaller sizes. On a GPU the judge runs its own few cases under the interpreter first, as it always does;
`--no-interpreter` leaves them out, for more Definitions in the same time. `--only` keeps the lines that hold one of the
texts (a line is named `kernel: definition, dtype`).

Exit status: 0; 1 if a kernel was rejected or its judge's process ended; 2 if nothing was found right.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from kernelgraft import machine
from kernelgraft.evaluate import Captured, Judge, JudgeOptions
from kernelgraft.families import cross_entropy, qk_norm_rope, sampling
from kernelgraft.families.reference import define
from kernelgraft.pipeline.verifying import CORES_LEFT
from kernelgraft.records import Definition, Status
from kernelgraft.suppliers.base import Refusal
from kernelgraft.suppliers.ours import CATALOGUE, OwnSupplier

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
made: Any = importlib.import_module("peer_definitions")

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
GRACE_S = 5.0
"""How long judges that are told to stop may take."""

RIGHT, WRONG, REFUSED, LEFT = "right", "REJECTED", "refused", "left"
AFTER = {"cast": "after_weight", "offset": 1, "offset_dtype": "float32"}
Sizes = list[dict[str, int]]


@dataclass(frozen=True)
class Subject:
    """One kernel on one Definition."""

    kernel: str
    what: str
    dtype: str
    make: Callable[[], Definition]
    sizes: Sizes
    """Of the calls that stand for a model's: the first is a prefill."""

    @property
    def label(self) -> str:
        """`kernel: definition, dtype`."""
        return f"{self.kernel}: {self.what}, {self.dtype}"


@dataclass
class Line:
    """What came of a Subject."""

    kernel: str
    definition: str
    dtype: str
    verdict: str = LEFT
    reason: str | None = None
    seconds: float | None = None
    cases: int | None = None
    refused_cases: int | None = None
    """Of the cases: what the guard does not let through."""
    error_ratio: float | None = None
    first_call_seconds: float | None = None
    gradients: bool | None = None


def linear(outputs: int, width: int, dtype: torch.dtype, *, bias: bool) -> Definition:
    """`x @ weight.T + bias` of [batch_size, seq_len, width]."""
    rows = ("batch_size", "seq_len")
    arguments = "hidden_states, weight" + ", bias" * bias
    inputs: dict[str, Any] = {
        "hidden_states": ((*rows, "in_features"), dtype),
        "weight": (("out_features", "in_features"), dtype),
    }
    if bias:
        inputs["bias"] = (("out_features",), dtype)
    return define(
        name="linear_d",
        op_type="gemm",
        family="linear",
        semantics={"bias": bias},
        axes={"batch_size": None, "seq_len": None, "in_features": width, "out_features": outputs},
        inputs=inputs,
        outputs={"output": ((*rows, "out_features"), dtype)},
        body=f"def run({arguments}):\n    return torch.nn.functional.linear({arguments})",
        site=made.SITE,
        description="a product",
        reference_error=0.0,
    )


def subjects(*, small: bool) -> list[Subject]:
    """All there are, the most important first; `small`: of sizes that the interpreter has done in seconds."""
    ranked: list[tuple[int, Subject]] = []

    def size(full: int, little: int) -> int:
        return little if small else full

    def add(
        rank: int, kernel: str, what: str, dtypes: str, make: Callable[[torch.dtype], Definition], sizes: Sizes
    ) -> None:
        """A kernel's twin in Triton is judged on the same; where it is not the point, a little later."""
        for name, late in ((kernel, 0), (f"{kernel}_triton", min(rank, 1))):
            for dtype in dtypes.split() if name in CATALOGUE else ():
                made_so = functools.partial(make, DTYPES[dtype])
                ranked.append((rank + late, Subject(name, what, dtype, made_so, sizes)))

    every = "bf16 f16 f32"
    rows = [{"batch_size": 2, "seq_len": size(150, 3)}, {"batch_size": 3, "seq_len": 1}]
    turns = [
        {"batch_size": 2, "seq_len": size(65, 5), "table_batch": 1},
        {"batch_size": 2, "seq_len": 1, "table_batch": 2},
    ]
    long = [{"batch_size": 2, "q_len": n, "kv_len": n, "mask_batch": 2} for n in (size(257, 19), 3)]
    one = [{"batch_size": 2, "q_len": 1, "kv_len": size(777, 40), "mask_batch": 2}] * 2
    few = [{"batch_size": 2, "q_len": 3, "kv_len": size(300, 21), "mask_batch": 2}, *one[:1]]
    many = [{"batch_size": 2, "q_len": size(150, 19), "kv_len": size(210, 23), "mask_batch": 2}, long[1]]
    single = [{"batch_size": 1, "seq_len": 1}, {"batch_size": 7, "seq_len": 1}]

    # 0: each kernel in each dtype, of an odd size.
    odd = size(1153, 97)
    for kernel, calls in (("attention_prefill", long), ("attention_decode", one)):
        add(0, kernel, "heads of 80, 14 over 2", every, lambda d: made.attention(80, d, **heads(14, 2)), calls)
    odds = size(1031, 75), size(1003, 131)
    add(0, "linear_decode", f"{odds[1]} to {odds[0]}, bias", every, lambda d: linear(*odds, d, bias=True), single)
    words = size(4003, 203)
    add(
        0,
        "cross_entropy",
        f"{words} words of {size(520, 40)}",
        every,
        lambda d: cross_entropy.definition_for(hidden_size=size(520, 40), vocab_size=words, dtype=d),
        [{"tokens": size(130, 6)}, {"tokens": 1}],
    )
    add(
        0,
        "qk_norm_rope",
        "heads of 80, 7 over 1",
        every,
        lambda d: qk_norm_rope.definition_for(num_heads=7, num_kv_heads=1, head_dim=80, dtype=d),
        turns,
    )
    add(0, "rope", "heads of 80, 7 over 1", every, lambda d: made.rope(80, d, heads=7, kv_heads=1), turns)
    add(
        0,
        "sample_top_k",
        f"50 of {size(50257, 257)} words, top-p, heat",
        every,
        lambda d: sampling.definition_for(vocab_size=size(50257, 257), dtype=d, k=50, temperature=0.7, top_p=0.9),
        [{"rows": 3}, {"rows": 1}],
    )
    add(
        0,
        "argmax",
        f"{size(50257, 1257)} words",
        every,
        lambda d: sampling.definition_for(vocab_size=size(50257, 1257), dtype=d),
        [{"rows": 3}, {"rows": 1}],
    )
    add(0, "rms_norm", f"width {odd}", every, lambda d: made.rms_norm(odd, d), rows)
    add(0, "layer_norm", f"width {odd}", every, lambda d: made.layer_norm(odd, d), rows)
    add(0, "add_rms_norm", f"width {odd}", every, lambda d: made.residual_norm(odd, d), rows)
    add(0, "add_layer_norm", f"width {odd}", every, lambda d: made.residual_norm(odd, d, family="layer_norm"), rows)
    add(0, "act_and_mul", f"silu, width {odd}", every, lambda d: made.gated("silu", odd, d), rows)

    # 1: what models have: their sizes and the options of the kernels, each in a dtype.
    masked = {
        "left padding, heads of 96": (96, {**heads(8, 8), "masked": True}),
        "window, softcap, float mask": (
            size(128, 64),
            {**heads(8, 4), "masked": True, "mask": "float", "sliding_window": 7, "softcap": 30.0},
        ),
        "sinks": (64, {**heads(size(64, 16), size(8, 2)), "sinks": True}),
        "heads of 256, one key head": (size(256, 128), heads(4, 1)),
        "heads of 64 to 40": (64, {**heads(4, 2), "value_dim": 40}),
        "not causal, masks of heads": (32, {**heads(6, 3), "masked": True, "causal": False, "mask_heads": 6}),
    }
    kinds = ("bf16", "f16", "bf16", "f16", "f32", "bf16")
    for rank, (kind, (what, (channels, options))) in enumerate(zip(kinds, masked.items(), strict=True)):
        for kernel, plain, padded in (("attention_prefill", long, many), ("attention_decode", one, few)):
            calls = padded if "masked" in options else plain
            add(1 + rank // 3, kernel, what, kind, lambda d, c=channels, o=options: made.attention(c, d, **o), calls)  # type: ignore[misc]
    shape, flat = (size(2048, 64), size(4096, 256)), (size(6, 5), size(8200, 520))
    add(1, "linear_decode", f"{shape[1]} to {shape[0]}", "bf16", lambda d: linear(*shape, d, bias=False), single)
    add(2, "linear_decode", f"{flat[1]} to {flat[0]}", "f16", lambda d: linear(*flat, d, bias=False), single)
    width = size(4096, 256)
    add(1, "rms_norm", f"width {width}", "bf16", lambda d: made.rms_norm(width, d), rows)
    add(1, "rms_norm", "one plus the weight, width 96", "f16", lambda d: made.rms_norm(96, d, **AFTER), rows)
    add(
        1,
        "rms_norm",
        "weight in float32",
        "bf16",
        lambda d: made.rms_norm(size(640, 64), d, weight=torch.float32, cast="weight_dtype"),
        rows,
    )
    add(
        2,
        "rms_norm",
        "no weight, by division",
        "f32 f16",
        lambda d: made.rms_norm(size(1000, 72), d, cast="after_weight", with_weight=False, inverse="division"),
        rows,
    )
    rounded = {"cast": "before_weight", "offset": 1, "offset_dtype": "weight"}
    add(
        2,
        "rms_norm",
        "one plus the weight, rounded",
        "bf16",
        lambda d: made.rms_norm(size(768, 80), d, **rounded),
        rows,
    )
    add(1, "layer_norm", "width 768", "bf16", lambda d: made.layer_norm(size(768, 96), d), rows)
    bare = {"with_weight": False, "with_bias": False}
    add(1, "layer_norm", "no weight", "f32", lambda d: made.layer_norm(size(1600, 72), d, **bare), rows)
    plus = {"form": "functional_plain", "offset": 1, "offset_dtype": "weight"}
    add(1, "layer_norm", "one plus the weight", "f16", lambda d: made.layer_norm(size(1024, 64), d, **plus), rows)
    add(2, "layer_norm", "no bias", "bf16", lambda d: made.layer_norm(size(2050, 50), d, with_bias=False), rows)
    post = {**AFTER, "order": "post"}
    wide = size(2304, 144)
    add(1, "add_rms_norm", f"after the norm, width {wide}", "bf16", lambda d: made.residual_norm(wide, d, **post), rows)
    add(1, "add_rms_norm", f"width {width}", "f16", lambda d: made.residual_norm(width, d), rows)
    mixed = {"residual": torch.float32}
    add(2, "add_rms_norm", "residual in float32", "bf16", lambda d: made.residual_norm(size(640, 64), d, **mixed), rows)
    layer = {"family": "layer_norm", "order": "post"}
    add(1, "add_layer_norm", "after the norm", "bf16", lambda d: made.residual_norm(size(768, 96), d, **layer), rows)
    half = size(2048, 128)
    for rank, activation, kind, options in (
        (1, "silu", "bf16", {"packed": "gate_first"}),
        (1, "gelu_tanh", "bf16", {}),
        (1, "gelu", "f16", {"packed": "up_first"}),
        (1, "silu", "bf16", {"packed": "interleaved_gate_first", "clamp": "before", "limit": 7.0}),
        (2, "relu2", "f32", {}),
        (2, "silu", "f16", {"upcast": True}),
        (2, "quick_gelu", "f32", {"packed": "interleaved_up_first"}),
        (3, "mish", "bf16", {}),
        (3, "softplus", "f16", {}),
        (3, "elu", "f32", {}),
    ):
        what = ", ".join([activation, *(str(v) for v in options.values() if v is not True), f"width {half}"])
        add(rank, "act_and_mul", what, kind, lambda d, a=activation, o=options: made.gated(a, half, d, **o), rows)  # type: ignore[misc]
    for rank, what, kind, channels, options in (
        (1, "heads of 96", "bf16", 96, {"heads": 32, "kv_heads": 32}),
        (1, "92 of 128 turn", "f16", 128, {"rotary": 92}),
        (1, "heads of 64, tables in float32", "bf16", 64, {"tables": torch.float32, "heads": 16, "kv_heads": 8}),
        (1, "length before heads", "f32", 128, {"leading": (0, 1), "heads": 14}),
        (2, "neighbours, half a table", "bf16", 64, {"pairs": ("interleaved", "interleaved"), "table": "half"}),
        (2, "complex table", "f16", 64, {"pairs": ("interleaved", "interleaved"), "table": "complex"}),
        (2, "the last 24 of 40, in float32", "bf16", 40, {"rotary": 24, "placement": "last", "compute": "float32"}),
        (3, "backward, without k", "f32", 80, {"direction": "backward", "with_k": False}),
    ):
        add(rank, "rope", what, kind, lambda d, c=channels, o=options: made.rope(c, d, **o), turns)  # type: ignore[misc]
    add(
        1,
        "qk_norm_rope",
        "heads of 128, 32 over 8",
        "bf16",
        lambda d: qk_norm_rope.definition_for(num_heads=size(32, 8), num_kv_heads=size(8, 2), head_dim=128, dtype=d),
        turns,
    )
    last = {"rotary_dim": 12, "placement": "last", "pairs_in": "interleaved", "table": "half"}
    add(
        2,
        "qk_norm_rope",
        "the last 12 of 24, one plus the weight",
        "f16",
        lambda d: qk_norm_rope.definition_for(
            num_heads=3, num_kv_heads=1, head_dim=24, dtype=d, eps=1e-5, norm=AFTER, rope=last
        ),
        turns,
    )
    add(
        1,
        "argmax",
        f"{size(128256, 4100)} words",
        "bf16",
        lambda d: sampling.definition_for(vocab_size=size(128256, 4100), dtype=d),
        [{"rows": 3}, {"rows": 1}],
    )
    add(
        1,
        "sample_top_k",
        "softcap, more than there are",
        "bf16",
        lambda d: sampling.definition_for(vocab_size=40, dtype=d, k=50, softcap=5.0),
        [{"rows": 3}, {"rows": 1}],
    )
    add(
        1,
        "cross_entropy",
        "each token's, softcap, scale",
        "bf16",
        lambda d: cross_entropy.definition_for(
            hidden_size=size(256, 32),
            vocab_size=size(2000, 70),
            dtype=d,
            reduction="none",
            softcap=5.0,
            scale=0.5,
            ignore_index=3,
        ),
        [{"tokens": size(70, 5)}, {"tokens": 2}],
    )
    add(
        2,
        "cross_entropy",
        "sum",
        "f16",
        lambda d: cross_entropy.definition_for(
            hidden_size=size(256, 32), vocab_size=size(2000, 70), dtype=d, reduction="sum"
        ),
        [{"tokens": size(70, 5)}, {"tokens": 2}],
    )
    return [subject for _, subject in sorted(ranked, key=lambda pair: pair[0])]


def heads(queries: int, keys: int) -> dict[str, Any]:
    """Keywords of `made.attention`."""
    return {"num_heads": queries, "num_kv_heads": keys}


def options_for(device: str, *, thorough: bool, interpret_first: bool = True) -> JudgeOptions:
    """How much is judged: on the CPU, where the interpreter takes a hundred times as long, fewer cases."""
    if thorough:
        return JudgeOptions(interpret_first=interpret_first)
    quick = replace(JudgeOptions.quick(), timeout_s=120.0, interpret_first=interpret_first)
    few = {"seeds": 1, "captured": 2, "points": 4, "laid_out": "together"}
    return quick if device == "cuda" else replace(quick, **few)  # type: ignore[arg-type]


def judged(subject: Subject, judge: Judge, device: str) -> Line:
    """The verdict of one judge, in this process."""
    line = Line(subject.kernel, subject.what, subject.dtype)
    plain = subject.make()
    # Hand-made Definitions of a family share a name.
    definition = plain.model_copy(update={"name": f"{plain.name}_{plain.meta.fingerprint[:8]}"})
    supplier, card = OwnSupplier(interpret=device == "cpu"), machine.read()
    (row,) = [row for row in supplier.catalogue(card) if row.name == f"kernelgraft_{subject.kernel}"]
    found = supplier.candidates(definition, card)
    if row.unavailable is not None or isinstance(found, Refusal):
        line.verdict = REFUSED
        line.reason = row.unavailable or getattr(found, "reason", None)
        return line
    solution = next((s for s in found if s.name == f"{row.name}_{definition.name}"), None)
    if solution is None:
        line.verdict, line.reason = REFUSED, "it does not serve this variant"
        return line
    calls: Sequence[Captured] = made.captured(definition, subject.sizes, device)
    verdict = judge.verify(solution, definition, calls)
    line.verdict = RIGHT if verdict.status is Status.PASSED else WRONG
    line.reason, line.cases, line.refused_cases = verdict.reason, verdict.cases, verdict.refused
    line.first_call_seconds, line.error_ratio = verdict.warmup_seconds, verdict.error_ratio
    line.gradients = solution.meta.guard.autograd
    return line


def work(
    connection: Connection, others: Sequence[Connection], known: Sequence[Subject], device: str, options: JudgeOptions
) -> None:
    """In a process of its own: judges what it is given, by number, until it is given None or ended.

    `others` are ends of other judges' pipes, which the fork has brought along.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for other in others:
        other.close()
    with Judge(options) as judge, contextlib.suppress(EOFError):
        while (index := connection.recv()) is not None:
            began = machine.clock()
            try:
                line = judged(known[index], judge, device)
            except Exception as error:
                subject = known[index]
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                line = Line(subject.kernel, subject.what, subject.dtype, WRONG, reason)
            line.seconds = round(machine.clock() - began, 2)
            connection.send(line)


def judge_all(
    chosen: Sequence[Subject], *, device: str, jobs: int, budget_s: float, options: JudgeOptions
) -> Iterator[Line]:
    """Lines as they come, then those of what is left when the time is over."""
    ends = time.perf_counter() + budget_s
    context = multiprocessing.get_context("fork")
    at: dict[Connection, int | None] = {}
    processes = {}
    for _ in range(min(jobs, len(chosen)) if budget_s > 0 else 0):
        here, there = context.Pipe()
        process = context.Process(target=work, args=(there, [*at, here], chosen, device, options))
        process.daemon = True
        process.start()
        there.close()
        at[here], processes[here] = None, process
    waiting = list(range(len(chosen)))[::-1]
    try:
        for connection in list(at):
            at[connection] = _given(connection, waiting)
        while any(index is not None for index in at.values()) and (rest := ends - time.perf_counter()) > 0:
            ready = wait([c for c, index in at.items() if index is not None], timeout=min(rest, 600.0))
            for connection, index in [(c, i) for c, i in at.items() if i is not None and c in ready]:
                try:
                    line = connection.recv()
                except EOFError:
                    subject, process = chosen[index], processes[connection]
                    process.join()
                    reason = f"the judge's own process ended with {process.exitcode}"
                    line = Line(subject.kernel, subject.what, subject.dtype, WRONG, reason)
                    at[connection] = None
                else:
                    at[connection] = _given(connection, waiting)
                yield line
    finally:
        for connection, process in processes.items():
            if at[connection] is not None:
                process.terminate()
        for process in processes.values():
            process.join(GRACE_S)
            process.kill()
    running = [index for index in at.values() if index is not None]
    for index in [*running, *reversed(waiting)]:
        subject = chosen[index]
        reason = "begun when the time was over" if index in running else "not begun"
        yield Line(subject.kernel, subject.what, subject.dtype, LEFT, reason)


def _given(connection: Connection, waiting: list[int]) -> int | None:
    """The number that a judge gets next; None: it ends."""
    index = waiting.pop() if waiting else None
    connection.send(index)
    return index


def said(line: Line) -> str:
    """One line of the table."""
    seconds = "" if line.seconds is None else f"{line.seconds:6.1f} s"
    subject = f"{line.kernel}: {line.definition}, {line.dtype}"
    return f"{line.verdict:<9}{seconds:<9} {subject:<62} {line.reason or ''}".rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, help="judges at a time; as many as the machine has room for")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only lines that hold one of these")
    parser.add_argument("--thorough", action="store_true", help="all cases of the judge instead of few")
    parser.add_argument("--no-interpreter", action="store_true", help="on a GPU: nothing under the interpreter first")
    parser.add_argument("--list", action="store_true", help="print what would be judged")
    parser.add_argument("--json", type=Path, metavar="FILE")
    chosen = parser.parse_args(arguments)
    began = time.perf_counter()
    # The judges' processes are forked: torch must not ask the driver about GPUs before.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    torch.set_num_threads(1)
    small = chosen.device == "cpu"
    known = [s for s in subjects(small=small) if not chosen.only or any(text in s.label for text in chosen.only)]
    if chosen.list:
        print("\n".join(s.label for s in known))
        return 0
    if known:
        known[0].make()  # loads what fingerprints need, once for all processes
    options = options_for(chosen.device, thorough=chosen.thorough, interpret_first=not chosen.no_interpreter)
    # Not through `machine.read`, which asks the driver: the judges' processes are forked from here.
    jobs = chosen.jobs or max(1, (os.cpu_count() or 1) - (CORES_LEFT if chosen.device == "cuda" else 0))
    budget_s = chosen.budget - (time.perf_counter() - began)
    lines = []
    for line in judge_all(known, device=chosen.device, jobs=jobs, budget_s=budget_s, options=options):
        lines.append(line)
        print(said(line), flush=True)
    seconds = time.perf_counter() - began
    counts = {verdict: sum(line.verdict == verdict for line in lines) for verdict in (RIGHT, WRONG, REFUSED, LEFT)}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()), f"in {seconds:.0f} s, {jobs} at a time")
    if chosen.json:
        order = {(s.kernel, s.what, s.dtype): n for n, s in enumerate(known)}
        lines.sort(key=lambda line: order[line.kernel, line.definition, line.dtype])
        result = {
            "machine": machine.read().model_dump(mode="json"),
            "time": machine.timestamp(),
            "device": chosen.device,
            "jobs": jobs,
            "seconds": round(seconds, 1),
            "options": asdict(options),
            "counts": counts,
            "lines": [asdict(line) for line in lines],
        }
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")
    if counts[WRONG]:
        return 1
    return 0 if counts[RIGHT] else 2


if __name__ == "__main__":
    sys.exit(main())
