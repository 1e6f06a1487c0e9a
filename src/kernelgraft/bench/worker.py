"""The process that runs one contender: `python -m kernelgraft.bench.worker`, one JSON line in, one JSON line out.

It does nothing between two commands, so that the other processes have the machine. Commands are objects with `do`:
`start`, then `configure`, then `generate`, `logits`, `counters`, `proof`, `coverage`, `work`, `limits`, `trace`,
`float32`; an answer with `error` holds the class's name and a message of one line. Everything that libraries print goes
to stderr. The original's process does not import `kernelgraft.patch` before its last measured run.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, TextIO

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.configuration_utils import CompileConfig

from kernelgraft import machine
from kernelgraft.bench.contenders import Ready, prepare, read_graft
from kernelgraft.bench.proof import attention_functions, prove
from kernelgraft.bench.result import PatchCalls
from kernelgraft.errors import KernelgraftError, UsageError
from kernelgraft.identity import model_card
from kernelgraft.models import pad_id
from kernelgraft.models.prompts import long_prompt, prompt_ids, vocabulary_size

LARGEST_RUN = 1 << 28
"""Logits kept in memory while tokens are forced: batch x steps x vocabulary."""
LARGEST_FILE = 1 << 24
"""Logits handed over: sequences x steps x vocabulary."""
LARGEST_NEEDED = 1 << 26
"""The same, of sequences that differ somewhere."""
TRACED_STEPS = 8
"""Decode steps in a trace."""


class Stamps(StoppingCriteria):
    """Never stops; notes when each new token was there. `generate` calls it once a token, after the token is chosen.

    On a GPU it leaves an event in the stream, so that the host is not held up by being watched.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._no = torch.zeros(batch, dtype=torch.bool, device=device)
        self._marks: list[Any] = [self._mark()]

    def _mark(self) -> Any:
        if not self._cuda:
            return machine.clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._no.device))
        return event

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> Any:
        """One more token."""
        self._marks.append(self._mark())
        return self._no

    def seconds(self) -> list[float]:
        """From the making of this object to each token, s."""
        first, *rest = self._marks
        if not self._cuda:
            return [mark - first for mark in rest]
        torch.cuda.synchronize(self._no.device)
        return [first.elapsed_time(mark) / 1e3 for mark in rest]


class Forced(LogitsProcessor):
    """Makes the given tokens, int64 [batch, steps], the only possible ones, one step after another."""

    def __init__(self, tokens: torch.Tensor, prompt_tokens: int) -> None:
        self._tokens = tokens
        self._prompt_tokens = prompt_tokens

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        """Scores [batch, vocab] with all but the wanted token at -inf."""
        step = input_ids.shape[1] - self._prompt_tokens
        return torch.full_like(scores, float("-inf")).scatter_(1, self._tokens[:, step : step + 1], 0.0)


class Session:
    """One contender's model, and the setting that it runs with just now."""

    ids: torch.Tensor
    """int64 [batch, prompt tokens]."""
    cache: str
    new_tokens: int

    def __init__(self, order: dict[str, Any]) -> None:
        if order["threads"]:
            torch.set_num_threads(order["threads"])
        self._registered = attention_functions()
        began = machine.clock()
        self.ready: Ready = prepare(order["contender"], order)
        self.loaded = self.ready.loaded
        self.model: Any = self.loaded.model
        self.card = model_card(self.model, order["spec"])
        self.load_s = machine.clock() - began
        self._prompt: str = order["prompt"]
        self._seed: int = order["seed"]
        self._pad = pad_id(self.loaded)
        self._setting: dict[str, Any] = {}
        self._compile = CompileConfig()
        self._compile._compile_all_devices = True  # on a CPU it would not compile
        # Stored settings (sampling, suppressed tokens, an end-of-text token) would make runs differ in length.
        self.model.generation_config = GenerationConfig()

    def start(self) -> dict[str, Any]:
        """What was loaded."""
        return {
            "model": self.card.model_dump(mode="json"),
            "machine": machine.read().model_dump(mode="json"),
            "threads": torch.get_num_threads(),
            "load_s": self.load_s,
            "weights": _fingerprint(self.model),
        }

    def configure(self, order: dict[str, Any]) -> dict[str, Any]:
        """Another setting: `batch`, `prompt_tokens` (None: the prompt alone), `new_tokens`, `cache`.

        What was compiled for another one is forgotten, so that sizes do not become variable.
        """
        if order == self._setting:
            return {"prompt_tokens": self.ids.shape[1]}
        self._setting = order
        self.cache = "static" if self.ready.compiled else order["cache"]
        self.new_tokens = order["new_tokens"]
        batch, length = order["batch"], order["prompt_tokens"]
        if length is None:
            self.ids = prompt_ids(self.loaded, self._prompt).repeat(batch, 1)
        else:
            self.ids = long_prompt(self.loaded, self._prompt, batch, length, self._seed)
        for kept in ("_cache", "_previous_max_cache_length", "_compiled_call"):  # of another size
            self.model.__dict__.pop(kept, None)
        if self.ready.compiled:
            torch.compiler.reset()
        gc.collect()
        if self.ids.device.type == "cuda":
            torch.cuda.empty_cache()
        return {"prompt_tokens": self.ids.shape[1]}

    def _config(self, new_tokens: int, **changes: Any) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            cache_implementation="static" if self.cache == "static" else None,
            disable_compile=not self.ready.compiled,
            compile_config=self._compile if self.ready.compiled else None,
            pad_token_id=self._pad,
            **changes,
        )

    def _generate(self, config: GenerationConfig, **options: Any) -> Any:
        with torch.no_grad():
            return self.model.generate(
                self.ids, attention_mask=torch.ones_like(self.ids), generation_config=config, **options
            )

    def generate(self) -> dict[str, Any]:
        """One run: seconds from its start to each token, the tokens [batch, new tokens], the peak memory, CPU time."""
        cuda = self.ids.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.ids.device)
            torch.cuda.synchronize(self.ids.device)
        stamps = Stamps(len(self.ids), self.ids.device)
        began = machine.thread_cpu_clock()
        try:
            out = self._generate(self._config(self.new_tokens), stopping_criteria=StoppingCriteriaList([stamps]))
        except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
            if self.cache != "static":
                raise
            reason = " ".join(str(error).split())
            raise UsageError(f"`{self.card.name}` cannot generate with a static cache: {reason}") from error
        spent = machine.thread_cpu_clock() - began
        peak = torch.cuda.max_memory_allocated(self.ids.device) if cuda else machine.peak_memory_bytes()
        return {
            "stamps_s": stamps.seconds(),
            "tokens": out[:, self.ids.shape[1] :].tolist(),
            "peak_memory_bytes": peak,
            "host_s": spent,
        }

    def logits(self, order: dict[str, Any]) -> dict[str, Any]:
        """Feed `tokens` one by one and write the raw logits, float32 [sequences, steps, vocab], to `file`.

        `rows`: sequences of the batch in the order in which they are wanted, the first `needed` more than others; as
        many as fit are written.
        """
        tokens = torch.tensor(order["tokens"], dtype=torch.int64, device=self.ids.device)
        vocabulary = vocabulary_size(self.loaded)
        steps = min(max(LARGEST_RUN // (len(tokens) * vocabulary), 1), tokens.shape[1], order["steps"] or sys.maxsize)
        each = steps * vocabulary
        room = max(LARGEST_FILE // each, min(order["needed"], LARGEST_NEEDED // each), 1)
        rows = order["rows"][:room]
        out = self._generate(
            self._config(steps, output_logits=True, return_dict_in_generate=True),
            logits_processor=LogitsProcessorList([Forced(tokens, self.ids.shape[1])]),
        )
        logits = torch.stack([step[rows].float().cpu() for step in out.logits], dim=1)
        save_file({"logits": logits}, order["file"])
        return {"shape": list(logits.shape), "rows": rows}

    def counters(self) -> dict[str, Any]:
        """Calls through each accepted patch so far, and the patches that do nothing."""
        keep = PatchCalls.model_fields.keys()
        rows = [{name: value for name, value in row.items() if name in keep} for row in self.ready.applied.report()]
        return {"calls": rows, "unreached": self.ready.applied.unreached()}

    def proof(self) -> dict[str, Any]:
        """What stands in the place of the model's own code."""
        proof = prove(self.model, self._registered)
        return {"proof": proof.model_dump(mode="json"), "evidence": self.ready.evidence()}

    def coverage(self, order: dict[str, Any]) -> dict[str, Any]:
        """Where the time of a short run goes, for the sites of a graft; the model is left as it was."""
        from kernelgraft.bench.coverage import measure

        graft = read_graft(order["graft"])
        new_tokens = min(self.new_tokens, order["new_tokens"])
        found = measure(self.model, graft, lambda: self._generate(self._config(new_tokens)), new_tokens)
        return {"coverage": found.model_dump(mode="json")}

    def work(self, order: dict[str, Any]) -> dict[str, Any]:
        """What one step of a regime must read and compute, and what the device reaches."""
        from dataclasses import asdict

        from kernelgraft.bench import roofline

        batch, length = self.ids.shape
        needed = roofline.work(self.model, order["regime"], batch, length, self.new_tokens)
        reached = roofline.limits(self.ids.device, self.loaded.dtype)
        return {"work": asdict(needed), "limits": asdict(reached)}

    def trace(self, order: dict[str, Any]) -> dict[str, Any]:
        """Where the GPU's time goes in a regime; the model is left as it was."""
        from kernelgraft.bench.trace import measure

        decode = order["regime"] == "decode"
        graft = read_graft(order["graft"]) if order["graft"] else None
        # A compiled contender needs the length of cache that it was warmed with.
        steps = 1 + TRACED_STEPS if decode and not self.ready.compiled else self.new_tokens if decode else 1
        config = self._config(steps)
        found = measure(
            self.model,
            lambda: self._generate(config),
            regime=order["regime"],
            tokens=TRACED_STEPS if decode else self.ids.shape[1],
            graft=graft,
            applied=self.ready.applied,
        )
        return {"trace": found.model_dump(mode="json")}

    def float32(self) -> dict[str, Any]:
        """Turn the model's weights into float32, for good, if there is room for them."""
        if self.loaded.dtype == torch.float32:
            return {"made": False}
        more = sum(p.numel() * max(4 - p.element_size(), 0) for p in self.model.parameters())
        free = machine.free_memory_bytes(self.ids.device)
        made = free is not None and more * 1.2 < free
        if made:
            self.model.float()
        return {"made": made}


def _fingerprint(model: Any) -> str:
    """Of some of the numbers of every parameter: equal for two models with equal weights."""
    parts = [value.detach().flatten()[:8].float() for _, value in sorted(model.named_parameters())]
    return hashlib.sha256(torch.cat(parts).cpu().numpy().tobytes()).hexdigest()


def answer(session: Session | None, order: dict[str, Any]) -> tuple[Session, dict[str, Any]]:
    """Carry out one command."""
    if order["do"] == "start":
        session = Session(order)
        return session, session.start()
    assert session is not None, "the first command is `start`"
    plain: dict[str, Callable[[], dict[str, Any]]] = {
        "generate": session.generate,
        "counters": session.counters,
        "proof": session.proof,
        "float32": session.float32,
    }
    if order["do"] in plain:
        return session, plain[order["do"]]()
    told: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "configure": session.configure,
        "logits": session.logits,
        "coverage": session.coverage,
        "work": session.work,
        "trace": session.trace,
    }
    return session, told[order["do"]](order)


def serve(commands: TextIO, answers: TextIO) -> None:
    """Answer each line until there is none; an error ends nothing, it is an answer."""
    session: Session | None = None
    for line in commands:
        try:
            session, said = answer(session, json.loads(line))
        except KernelgraftError as error:
            said = {"error": type(error).__name__, "message": str(error)}
        except Exception as error:  # whatever a model's code raises is for the other process to tell
            traceback.print_exc()
            message = " ".join(str(error).split())[:300]
            said = {"error": type(error).__name__, "message": message}
        print(json.dumps(said), file=answers, flush=True)


def main() -> None:
    """Serve on stdin and stdout; what others print to stdout goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
