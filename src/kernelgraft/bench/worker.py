"""The process that runs one model: `python -m kernelgraft.bench.worker`, one JSON line in, one JSON line out.

It does nothing between two commands, so that the other process has the machine. Commands are objects with `do`:
`start`, `generate`, `logits`, `counters`, `proof`, `coverage`; an answer with `error` holds the class's name and a
message of one line. Everything that libraries print goes to stderr. The baseline's process does not import
`kernelgraft.patch` before its last measured run.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from kernelgraft import machine
from kernelgraft.bench.proof import attention_functions, prove
from kernelgraft.bench.result import PatchCalls
from kernelgraft.errors import KernelgraftError, UsageError
from kernelgraft.identity import model_card
from kernelgraft.models import Loaded, load, pad_id, prompt_ids
from kernelgraft.models.prompts import vocabulary_size
from kernelgraft.records import Graft
from kernelgraft.store import Inventory

LARGEST_RUN = 1 << 28
"""Logits kept in memory while tokens are forced: batch x steps x vocabulary."""
LARGEST_FILE = 1 << 26
"""Logits handed over: sequences x steps x vocabulary."""


class Stamps(StoppingCriteria):
    """Never stops; notes the time after each new token. `generate` calls it once a token, after the token is chosen.

    On a GPU it waits for the device first; `generate` does so itself right after, to see whether it is done.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self.times: list[float] = []
        self._cuda = device.type == "cuda"
        self._no = torch.zeros(batch, dtype=torch.bool, device=device)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> Any:
        """One more token."""
        if self._cuda:
            torch.cuda.synchronize(self._no.device)
        self.times.append(machine.clock())
        return self._no


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
    """One model with one setting, and the graft on it if there is one."""

    def __init__(self, order: dict[str, Any]) -> None:
        if order["threads"]:
            torch.set_num_threads(order["threads"])
        self._registered = attention_functions()
        began = machine.clock()
        dtype = getattr(torch, order["dtype"]) if order["dtype"] else None
        self.loaded: Loaded = load(
            order["spec"],
            dtype=dtype,
            device=order["device"],
            seed=order["seed"],
            trust_remote_code=order["trust_remote_code"],
        )
        self.model: Any = self.loaded.model
        self.card = model_card(self.model, order["spec"])
        self.applied: Any = None
        if order["graft"]:
            from kernelgraft.patch import apply

            self.applied = apply(read_graft(order["graft"]), self.model)
        self.load_s = machine.clock() - began
        self.cache: str = order["cache"]
        self.new_tokens: int = order["new_tokens"]
        self.ids = prompt_ids(self.loaded, order["prompt"]).repeat(order["batch"], 1)
        self._pad = pad_id(self.loaded)
        # Stored settings (sampling, suppressed tokens, an end-of-text token) would make runs differ in length.
        self.model.generation_config = GenerationConfig()

    def _config(self, new_tokens: int, keep_logits: bool) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            cache_implementation="static" if self.cache == "static" else None,
            disable_compile=True,
            pad_token_id=self._pad,
            output_logits=keep_logits,
            return_dict_in_generate=keep_logits,
        )

    def _generate(self, new_tokens: int, *, keep_logits: bool = False, **options: Any) -> Any:
        with torch.no_grad():
            return self.model.generate(
                self.ids,
                attention_mask=torch.ones_like(self.ids),
                generation_config=self._config(new_tokens, keep_logits),
                **options,
            )

    def start(self) -> dict[str, Any]:
        """What was loaded."""
        return {
            "model": self.card.model_dump(mode="json"),
            "machine": machine.read().model_dump(mode="json"),
            "prompt_tokens": self.ids.shape[1],
            "threads": torch.get_num_threads(),
            "load_s": self.load_s,
        }

    def generate(self) -> dict[str, Any]:
        """One run: seconds from its start to each token, the tokens [batch, new tokens], and the peak memory."""
        cuda = self.ids.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.ids.device)
            torch.cuda.synchronize(self.ids.device)
        stamps = Stamps(len(self.ids), self.ids.device)
        began = machine.clock()
        try:
            out = self._generate(self.new_tokens, stopping_criteria=StoppingCriteriaList([stamps]))
        except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
            if self.cache != "static":
                raise
            reason = " ".join(str(error).split())
            raise UsageError(f"`{self.card.name}` cannot generate with a static cache: {reason}") from error
        peak = torch.cuda.max_memory_allocated(self.ids.device) if cuda else machine.peak_memory_bytes()
        return {
            "stamps_s": [t - began for t in stamps.times],
            "tokens": out[:, self.ids.shape[1] :].tolist(),
            "peak_memory_bytes": peak,
        }

    def logits(self, order: dict[str, Any]) -> dict[str, Any]:
        """Feed `tokens` one by one and write the raw logits, float32 [sequences, steps, vocab], to `file`."""
        tokens = torch.tensor(order["tokens"], dtype=torch.int64, device=self.ids.device)
        vocabulary = vocabulary_size(self.loaded)
        steps = min(max(LARGEST_RUN // (len(tokens) * vocabulary), 1), tokens.shape[1])
        rows = min(max(LARGEST_FILE // (steps * vocabulary), 1), len(tokens))
        out = self._generate(
            steps,
            logits_processor=LogitsProcessorList([Forced(tokens, self.ids.shape[1])]),
            keep_logits=True,
        )
        logits = torch.stack([step[:rows].float().cpu() for step in out.logits], dim=1)
        save_file({"logits": logits}, order["file"])
        return {"shape": list(logits.shape)}

    def counters(self) -> dict[str, Any]:
        """Calls through each accepted patch so far, and the patches that do nothing."""
        keep = PatchCalls.model_fields.keys()
        rows = [{name: value for name, value in row.items() if name in keep} for row in self.applied.report()]
        return {"calls": rows, "unreached": self.applied.unreached()}

    def proof(self) -> dict[str, Any]:
        """What stands in the place of the model's own code."""
        return prove(self.model, self._registered).model_dump(mode="json")

    def coverage(self, order: dict[str, Any]) -> dict[str, Any]:
        """Where the time of a short run goes, for the sites of a graft; the model is left as it was."""
        from kernelgraft.bench.coverage import measure

        graft = read_graft(order["graft"])
        new_tokens = min(self.new_tokens, order["new_tokens"])
        found = measure(self.model, graft, lambda: self._generate(new_tokens), new_tokens)
        return {"coverage": found.model_dump(mode="json")}


def read_graft(folder: str) -> Graft:
    """The graft in a folder."""
    return Inventory(Path(folder)).load_record("graft", Graft)


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
    }
    if order["do"] in plain:
        return session, plain[order["do"]]()
    return session, {"logits": session.logits, "coverage": session.coverage}[order["do"]](order)


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
