"""The judge against Solutions that lie: every one is rejected, by the check that is meant for it; honest ones pass.

A cheat that the static gate knows is also run with that gate off, where the dynamic checks have to catch it alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch
from judging import FAMILY, captured, definition, solution

from kernelgraft import machine
from kernelgraft.evaluate import Judge, JudgeOptions
from kernelgraft.records import Evaluation, Guard, Status

OPTIONS = replace(JudgeOptions.quick(), seeds=3, points=14, layouts=JudgeOptions().layouts, timeout_s=60.0)
ANY_NUMBERS = frozenset({"C5", "C6", "C7", "C8", "C9", "C11"})
"""Where which call is wrong depends on the order of the calls, which is drawn anew each time."""


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(OPTIONS, family=lambda name: FAMILY) as made:
        yield made


@dataclass(frozen=True)
class Cheat:
    name: str
    source: str
    status: Status | None
    """With the static gate off; None: nothing but the gate sees it."""
    checks: frozenset[str] = frozenset()
    on: str = "rms_norm"
    dtype: torch.dtype = torch.float32
    gated: bool = False
    """True if the static gate must catch it (C2)."""
    guard: Guard = field(default_factory=Guard)
    words: str = ""
    """Part of the reason with the gate off."""
    timeout_s: float = 60.0


def cheat(name: str, source: str, status: Status | None, *checks: str, **more: object) -> Cheat:
    return Cheat(name, source, status, frozenset(checks), **more)  # type: ignore[arg-type]


WRONG, CRASH = Status.INCORRECT_NUMERICAL, Status.RUNTIME_ERROR
RIGHT = """
def right(x, weight):
    return F.rms_norm(x, (64,), weight, 1e-6)
"""

CHEATS = [
    cheat("zeros", "def run(x, weight): return torch.zeros_like(x)", WRONG, "C8"),
    cheat("the mean of the output", "def run(s): return torch.full_like(s, 1 / s.size(-1))", WRONG, "C8", on="softmax"),
    cheat("NaN as a wildcard", "def run(x, weight): return torch.full_like(x, float('nan'))", WRONG, "C8"),
    cheat(
        "what freed memory holds",
        "def run(x, weight): return torch.empty_like(x)",
        WRONG,
        "C9",
        words="uninitialised memory",
    ),
    cheat(
        "what freed memory holds, allocated by its class",
        "def run(x, weight): return torch.FloatTensor(*x.shape)",
        WRONG,
        "C9",
    ),
    cheat(
        "half of the output written",
        RIGHT
        + """
def run(x, weight):
    out = x.new_empty(x.shape)
    out[..., :32] = right(x, weight)[..., :32]
    return out
""",
        WRONG,
        "C9",
    ),
    cheat(
        "a cache keyed on pointers",
        RIGHT
        + """
CACHE = {}
def run(x, weight):
    key = (x.data_ptr(), weight.data_ptr(), x.shape, x.stride())
    if key not in CACHE:
        CACHE[key] = right(x, weight)
    return CACHE[key].clone()
""",
        WRONG,
        *ANY_NUMBERS,
        gated=True,
    ),
    cheat(
        "a cache keyed on objects and their versions",
        """
import functools
@functools.lru_cache(maxsize=None)
def right(x, version, weight):
    return F.rms_norm(x, (64,), weight, 1e-6)
def run(x, weight):
    return right(x, x._version, weight).clone()
""",
        WRONG,
        *ANY_NUMBERS,
        gated=True,
    ),
    cheat(
        "a cache keyed on a sample of the values",
        RIGHT
        + """
def run(x, weight, cache={}):
    key = (x.shape, x.stride(), float(x.reshape(-1)[0]), float(x.sum()))
    if key not in cache:
        cache[key] = right(x, weight)
    return cache[key].clone()
""",
        WRONG,
        *ANY_NUMBERS,
        gated=True,
    ),
    cheat(
        "honest for the first calls",
        RIGHT
        + """
calls = 0
def run(x, weight):
    global calls
    calls += 1
    return right(x, weight) if calls < 20 else torch.zeros_like(x)
""",
        WRONG,
        *ANY_NUMBERS,
        gated=True,
    ),
    cheat(
        "honest for the first calls, counted on the function",
        RIGHT
        + """
def run(x, weight):
    run.calls = getattr(run, "calls", 0) + 1
    return right(x, weight) if run.calls < 20 else torch.zeros_like(x)
""",
        WRONG,
        *ANY_NUMBERS,
        gated=True,
    ),
    cheat(
        "looks for the answer in the caller's frames",
        """
import sys
def run(x, weight):
    frame = sys._getframe(1)
    while frame:
        for name, value in {**frame.f_globals, **frame.f_locals}.items():
            if isinstance(value, torch.Tensor) and value.shape == x.shape and value is not x:
                return value.clone()
            if "expect" in name or "reference" in name:
                return value(x, weight)
        frame = frame.f_back
    return torch.zeros_like(x)
""",
        WRONG,
        *ANY_NUMBERS,
        gated=True,
    ),
    cheat(
        "looks for the answer among all objects",
        """
import gc
def run(x, weight):
    found = [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and o.shape == x.shape and o is not x]
    return found[-1].clone() if found else torch.zeros_like(x)
""",
        WRONG,
        *ANY_NUMBERS,
        gated=True,
    ),
    cheat("float16 inside", "def run(x, w): return F.rms_norm(x.half(), (64,), w.half(), 1e-6).float()", WRONG, "C8"),
    cheat(
        "bfloat16 inside",
        "def run(g, u): return (F.silu(g.bfloat16()) * u.bfloat16()).float()",
        WRONG,
        "C8",
        on="act_mul",
    ),
    cheat(
        "float8 inside a bfloat16 kernel",
        "def run(g, u): return F.silu(g.to(torch.float8_e4m3fn).to(g.dtype)) * u",
        WRONG,
        "C8",
        on="act_mul",
        dtype=torch.bfloat16,
    ),
    cheat(
        "eps dropped",
        "def run(x, weight): return F.rms_norm(x, (64,), weight, 0.0)",
        WRONG,
        "C7",
        dtype=torch.bfloat16,
        words="(tiny",
    ),
    cheat(
        "last row dropped",
        RIGHT
        + """
def run(x, weight):
    out = right(x, weight)
    out[:, -1] = 0
    return out
""",
        WRONG,
        "C8",
    ),
    cheat(
        "mean over half the row",
        "def run(x, w): return w * (x * torch.rsqrt(x[..., :32].pow(2).mean(-1, keepdim=True) + 1e-6))",
        WRONG,
        "C8",
    ),
    cheat(
        "the traced shape hard-coded",
        RIGHT
        + """
def run(x, weight):
    out = torch.zeros_like(x)
    out[:1, :7] = right(x[:1, :7], weight)
    return out
""",
        WRONG,
        "C6",
    ),
    cheat(
        "mutates its input",
        "def run(x, w): return x.mul_(torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).clone() * w",
        WRONG,
        "C10",
        guard=Guard(autograd=False),
    ),
    cheat(
        "writes behind its input",
        RIGHT
        + """
def run(x, weight):
    x.as_strided((16,), (1,), x.storage_offset() + x.numel()).fill_(7)
    return right(x, weight)
""",
        WRONG,
        "C10",
        guard=Guard(contiguous=("hidden_states",), autograd=False),
    ),
    cheat("returns its input", "def run(x): return x.view(x.shape)", WRONG, "C11", on="clone", words="memory of input"),
    cheat(
        "one buffer for all results",
        RIGHT
        + """
OUT = {}
def run(x, weight):
    out = OUT.setdefault(x.shape, torch.empty_like(x))
    out.fill_(-1).copy_(right(x, weight))
    return out
""",
        WRONG,
        *ANY_NUMBERS,
        gated=True,
        guard=Guard(autograd=False),
    ),
    cheat(
        "two outputs in one place",
        "def run(r, x): t = r + x; return t, t.copy_(F.rms_norm(t, (64,), None, 1e-6))",
        WRONG,
        "C11",
        on="add_norm",
        guard=Guard(autograd=False),
        words="share memory",
    ),
    cheat(
        "no maximum subtracted",
        "def run(s): e = s.exp(); return e / e.sum(-1, keepdim=True)",
        WRONG,
        "C7",
        on="softmax",
    ),
    cheat(
        "ignores strides",
        RIGHT
        + """
def run(x, weight):
    return right(x.as_strided(x.shape, (x.size(1) * 64, 64, 1), x.storage_offset()), weight)
""",
        WRONG,
        "C11",
        words="hidden_states strided",
    ),
    cheat("wrong dtype", "def run(x, w): return F.rms_norm(x, (64,), w, 1e-6).double()", Status.INCORRECT_DTYPE, "C8"),
    cheat("wrong shape", "def run(x, w): return F.rms_norm(x, (64,), w, 1e-6)[0]", Status.INCORRECT_SHAPE, "C8"),
    cheat("too many outputs", "def run(x, w): return x + 1, x + 2", Status.INCORRECT_SHAPE, "C1"),
    cheat(
        "not contiguous where the original is",
        "def run(x, w): return F.rms_norm(x, (64,), w, 1e-6).mT.contiguous().mT",
        Status.INCORRECT_SHAPE,
        "C8",
    ),
    cheat(
        "a tensor that computes when it is looked at",
        RIGHT
        + """
class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs)
def run(x, weight):
    return right(x, weight).as_subclass(Lazy)
""",
        Status.INCORRECT_SHAPE,
        "C1",
        gated=True,
        words="a Lazy where a plain tensor",
    ),
    cheat(
        "patches what the judge compares with",
        RIGHT + "torch.equal = lambda a, b: True\ndef run(x, weight): return right(x, weight)",
        CRASH,
        "C2",
        gated=True,
        words="replaces `torch.equal`",
    ),
    cheat(
        "patches a method of all tensors",
        RIGHT + "torch.Tensor.clone = torch.Tensor.detach\ndef run(x, weight): return right(x, weight)",
        CRASH,
        "C2",
        gated=True,
        words="replaces `torch.Tensor.clone`",
    ),
    cheat(
        "leaves a thread behind",
        RIGHT
        + """
import threading, time
def run(x, weight):
    threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
    return right(x, weight)
""",
        CRASH,
        "C2",
        gated=True,
        words="threads running",
    ),
    cheat(
        "writes after it has returned",
        RIGHT
        + """
import threading, time
def run(x, weight):
    out = torch.empty_like(x)
    def late():
        time.sleep(0.05)
        out.copy_(right(x, weight))
    threading.Thread(target=late).start()
    return out
""",
        CRASH,
        "C2",
        gated=True,
        guard=Guard(autograd=False),
    ),
    cheat(
        "hangs",
        "def run(x, weight):\n    while True: pass",
        Status.TIMEOUT,
        "C4",
        timeout_s=1.5,
        words="longer than 1.5 s",
    ),
    cheat(
        "crashes",
        "import ctypes\ndef run(x, weight): return ctypes.string_at(0)",
        CRASH,
        "C4",
        gated=True,
        words="was ended by SIGSEGV",
    ),
    cheat(
        "says that all is well and leaves",
        "import os\ndef run(x, weight): os._exit(0)",
        CRASH,
        "C4",
        gated=True,
        words="exited with status 0",
    ),
    cheat(
        "raises",
        "def run(x, weight): raise ValueError('not\\n today')",
        CRASH,
        *ANY_NUMBERS,
        words="ValueError: not today",
    ),
    cheat("asks for all memory", "def run(x, weight): return torch.empty(1 << 44)", CRASH, *ANY_NUMBERS),
    cheat(
        "leaves by the front door",
        "def run(x, weight): raise SystemExit(0)",
        CRASH,
        "C4",
        words="SystemExit: 0",
    ),
    cheat(
        "cannot be imported",
        "VALUE = 1 / 0\ndef run(x, weight): return x",
        Status.COMPILE_ERROR,
        "C1",
        words="ZeroDivisionError",
    ),
    cheat(
        "says that gradients flow, and cuts them",
        RIGHT + "def run(x, weight): return right(x.detach(), weight)",
        CRASH,
        "C8",
        words="gradient of hidden_states is missing",
    ),
    cheat(
        "a gradient that is not the output's",
        """
class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.rms_norm(x, (64,), weight, 1e-6)
    @staticmethod
    def backward(ctx, flow):
        x, weight = ctx.saved_tensors
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return flow * weight * scale, (flow * x * scale).sum((0, 1))
def run(x, weight):
    return Norm.apply(x, weight)
""",
        WRONG,
        "C8",
        words="the gradient of hidden_states is off",
    ),
    cheat(
        "falls back to torch in silence",
        RIGHT
        + """
def fast(x, weight):
    raise NotImplementedError
def run(x, weight):
    try:
        return fast(x, weight)
    except Exception:
        return right(x, weight)
""",
        None,
        gated=True,
    ),
]


def judged(judge: Judge, it: Cheat, *, gate: bool) -> Evaluation:
    subject = definition(it.on, it.dtype)
    judge.options = replace(OPTIONS, static_gate=gate, timeout_s=it.timeout_s)
    sizes = ((7, 33), (1, 33)) if it.on == "softmax" else ((1, 7), (1, 1))
    return judge.verify(solution(subject, it.source, guard=it.guard), subject, captured(subject, *sizes))


@pytest.mark.parametrize("it", [c for c in CHEATS if c.gated], ids=lambda c: c.name)
def test_the_static_gate_rejects(judge: Judge, it: Cheat) -> None:
    found = judged(judge, it, gate=True)
    assert (found.status, found.check) == (Status.COMPILE_ERROR, "C2"), found.reason
    assert found.reason is not None and found.reason.startswith("C2: kernel.py:")
    assert found.cases == 0, "nothing of it was run"


@pytest.mark.parametrize("it", [c for c in CHEATS if c.status], ids=lambda c: c.name)
def test_the_dynamic_checks_reject(judge: Judge, it: Cheat) -> None:
    found = judged(judge, it, gate=not it.gated)
    assert found.status is it.status, found.reason
    assert found.check in it.checks, found.reason
    assert found.reason is not None and found.reason.startswith(f"{found.check}: ") and "\n" not in found.reason
    assert it.words in found.reason


def test_what_only_the_static_gate_sees(judge: Judge) -> None:
    """A silent fallback computes the right numbers: this is why the gate is there."""
    it = next(c for c in CHEATS if c.status is None)
    assert judged(judge, it, gate=False).status is Status.PASSED


HONEST = {
    "the library's own": ("rms_norm", "def run(x, weight): return F.rms_norm(x, (64,), weight, 1e-6)"),
    "rewritten": (
        "rms_norm",
        """
        def run(x, weight):
            wide = x.float()
            return (wide / torch.sqrt((wide * wide).sum(-1, keepdim=True) / 64 + 1e-6)).to(x.dtype) * weight
        """,
    ),
    "summed in another order": (
        "rms_norm",
        """
        EPS = 1e-6
        def run(x, weight):
            wide = x.float().flip(-1)
            squares = wide.pow(2)
            mean = (squares[..., ::2].sum(-1, keepdim=True) + squares[..., 1::2].sum(-1, keepdim=True)) / 64
            return ((wide * (mean + EPS).rsqrt()).flip(-1).to(x.dtype) * weight)
        """,
    ),
    "softmax": ("softmax", "def run(scores): return F.softmax(scores.float(), -1).to(scores.dtype)"),
    "wider inside than the original": ("act_mul", "def run(g, u): return (F.silu(g.float()) * u.float()).to(g.dtype)"),
    "two outputs beside each other in one buffer": (
        "add_norm",
        """
        def run(residual, x):
            both = torch.empty((2, *x.shape), dtype=x.dtype)
            both[0] = residual + x
            both[1] = F.rms_norm(residual + x, (64,), None, 1e-6)
            return both[0], both[1]
        """,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", HONEST)
def test_honest_solutions_are_accepted(judge: Judge, name: str, dtype: torch.dtype) -> None:
    on, source = HONEST[name]
    subject = definition(on, dtype)
    judge.options = OPTIONS
    sizes = ((7, 33), (1, 33)) if on == "softmax" else ((1, 7), (1, 1))
    found = judge.verify(solution(subject, source), subject, captured(subject, *sizes))
    assert (found.status, found.reason) == (Status.PASSED, None)
    assert found.cases >= 25 and found.refused == 0
    assert found.error_ratio is not None and found.error_ratio < 2.0
    assert found.warmup_seconds is not None and found.warmup_seconds > 0


def test_with_a_guard_ignoring_strides_is_honest(judge: Judge) -> None:
    it = next(c for c in CHEATS if c.name == "ignores strides")
    found = judged(judge, replace(it, guard=Guard(contiguous=("hidden_states",))), gate=True)
    assert found.status is Status.PASSED, found.reason
    assert found.refused >= 3


def test_detaching_without_claiming_gradients_is_honest(judge: Judge) -> None:
    it = next(c for c in CHEATS if c.name == "says that gradients flow, and cuts them")
    found = judged(judge, replace(it, guard=Guard(autograd=False)), gate=True)
    assert found.status is Status.PASSED, found.reason


def test_declared_noise_is_judged_by_every_call(judge: Judge) -> None:
    """Noise below the tolerance passes where it is declared, and only there; noise above it never does."""
    subject = definition("act_mul", torch.bfloat16)
    source = """
    def run(g, u):
        right = F.silu(g) * u
        return right * (1 + {} * (torch.rand(()) - 0.5)).to(g.dtype)
    """
    judge.options = replace(OPTIONS, static_gate=False)
    small, large = (solution(subject, source.format(size), nondeterministic=True) for size in (1e-4, 0.5))
    calls = captured(subject)
    assert judge.verify(small, subject, calls).status is Status.PASSED
    assert judge.verify(large, subject, calls).status is Status.INCORRECT_NUMERICAL
    noisy = source.format(0.01).replace("torch.rand(())", "torch.rand(g.shape)")
    undeclared = judge.verify(solution(subject, noisy, guard=Guard(autograd=False)), subject, calls)
    assert undeclared.check == "C9"


@pytest.mark.skipif(machine.cxx_compiler() is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_code_is_accepted_and_its_poison_works(judge: Judge) -> None:
    subject = definition("act_mul")
    guard = Guard(static_shapes=True, autograd=False)
    source = """
    @torch.compile(fullgraph=True, dynamic=False)
    def run(gate, up):
        {}
    """
    judge.options = OPTIONS
    calls = captured(subject, (1, 40))
    honest = solution(subject, source.format("return F.silu(gate) * up"), guard=guard, uses_compiler=True)
    found = judge.verify(honest, subject, calls)
    assert found.status is Status.PASSED, found.reason
    assert found.warmup_seconds is not None and found.warmup_seconds > 0.05
    stale = solution(subject, source.format("return torch.empty_like(gate)"), guard=guard, uses_compiler=True)
    assert judge.verify(stale, subject, calls).check == "C9"
