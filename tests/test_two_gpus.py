"""A graft on two GPUs: layers spread over both in one process, and each layer split over two processes (NCCL)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made import generate, logits, make_graft
from parallel_samples import Ranks
from two_gpus_samples import FAMILIES, prompt, relative

import kernelgraft
from kernelgraft import machine, models
from kernelgraft.models.randomising import make_decisive, randomise
from kernelgraft.patch import find_applied
from kernelgraft.records import Graft, Solution
from kernelgraft.suppliers import select
from kernelgraft.suppliers.base import Refusal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

GPUS = ("cuda:0", "cuda:1")
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 512}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256}
SEED = 4
HOOKED = {"rms_norm", "rope", "gated_mlp", "attention"}
"""No residual addition with its norm: accelerate's hook on the norm has to run, and the norm's own kernel serves."""
PATIENCE_S = 75
ERROR = 0.03
"""Of bfloat16 logits, relative, after six layers whose sums are rounded in other places."""
MARGIN = 0.04
"""Of a token over the next, as a share of the largest logit: several times what rounding moves."""


@dataclasses.dataclass(frozen=True)
class Original:
    """A saved model, and what it says on one GPU."""

    folder: Path
    logits: torch.Tensor
    tokens: torch.Tensor
    clear: list[int]
    """Per row: how many tokens come before the first one that had a close rival."""

    def agrees(self, tokens: torch.Tensor) -> bool:
        rows = zip(tokens.cpu(), self.tokens, self.clear, strict=True)
        return all(torch.equal(found[:n], wanted[:n]) for found, wanted, n in rows)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("original")
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, pad_token_id=0, eos_token_id=None))
    model = model.to(torch.bfloat16).eval()
    randomise(model, SEED)
    make_decisive(model, SEED)
    model.save_pretrained(folder)
    # The one in hand has its rope's frequencies in bfloat16.
    model = models.load(str(folder), device=GPUS[0]).model
    ids = prompt(GPUS[0])
    tokens, wanted = generate(model, ids), logits(model, ids).cpu()
    best = logits(model, tokens[:, :-1])[:, ids.shape[1] - 1 :].float().topk(2).values
    close = (best[..., 0] - best[..., 1] < MARGIN * wanted.abs().max()).cpu()
    close = torch.cat([close, torch.ones(len(ids), 1, dtype=torch.bool)], dim=1)
    clear = (close.int().argmax(dim=1) + ids.shape[1]).tolist()
    assert min(clear) > ids.shape[1] + 1, "tokens that any rounding could change prove nothing: take another SEED"
    torch.save(wanted, folder / "logits.pt")
    return Original(folder, wanted, tokens.cpu(), clear)


@pytest.fixture(scope="module")
def ranks(original: Original) -> Iterator[Ranks]:
    """Started before the tests of one process, which take place meanwhile."""
    ranks = Ranks(Path(__file__).with_name("two_gpus_samples.py"), original.folder)
    yield ranks
    ranks.end()


@pytest.fixture(scope="module")
def spread(original: Original, ranks: Ranks) -> tuple[Any, Graft]:
    """The model over both GPUs, and a graft of our kernels for it."""
    from transformers import AutoModelForCausalLM

    pytest.importorskip("accelerate")
    model = AutoModelForCausalLM.from_pretrained(original.folder, dtype=torch.bfloat16, device_map="auto").eval()
    return model, by_hand(models.wrap(model, name="spread"))


def by_hand(loaded: models.Loaded) -> Graft:
    """The first of our cuTile Solutions at every recognised compute that has one; nothing is judged."""
    graft, supplier, card = make_graft(loaded), select(["kernelgraft"])[0], machine.read()
    found: dict[str, Solution] = {}
    for name, definition in graft.definitions.items():
        offered = supplier.candidates(definition, card)
        tiles = [] if isinstance(offered, Refusal) else [s for s in offered if s.spec.language == "cuda-tile"]
        if tiles:
            found[name] = tiles[0]
    patches = []
    for patch in graft.patches:
        seats = [s for s in patch.seats if s.definition in found]
        mine = tuple(s.model_copy(update={"solution": found[s.definition].name}) for s in seats)
        if mine:
            patches.append(patch.model_copy(update={"seats": mine}))
    solutions = {s.name: s for s in found.values()}
    return graft.model_copy(update={"patches": tuple(patches), "solutions": solutions})


def test_the_map_spreads_the_layers(original: Original, spread: tuple[Any, Graft]) -> None:
    model, graft = spread
    assert {str(p.device) for p in model.model.layers.parameters()} == set(GPUS)
    assert {p.family for p in graft.patches} >= HOOKED
    assert original.agrees(generate(model, prompt(GPUS[0])))


@pytest.mark.parametrize("current", [0, 1])
def test_kernels_serve_layers_on_both_gpus(current: int, original: Original, spread: tuple[Any, Graft]) -> None:
    model, graft = spread
    ids, served = prompt(GPUS[0]), Counter[tuple[str, str]]()
    families = {s.name: graft.definitions[s.definition].meta.family for s in graft.solutions.values()}

    def watch(kernel: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            result = kernel(*inputs)
            first = result[0] if isinstance(result, tuple) else result
            assert first.device == inputs[0].device, name
            served[families[name], str(first.device)] += 1
            return result

        return run

    before, tokens = logits(model, ids), generate(model, ids)
    with torch.cuda.device(current):
        with kernelgraft.apply(graft, model, check_reach=True) as applied, applied.wrapped(watch):
            found, during = logits(model, ids), generate(model, ids)
            reasons = {reason for row in applied.report() for reason in row["fallbacks"]}
        assert torch.cuda.current_device() == current
    print(f"current device {current}: calls {dict(sorted(served.items()))}, fallbacks {reasons}")
    print(f"error {relative(found, before.cpu()):.1e} of the spread model's, {relative(found, original.logits):.1e}")
    assert relative(found, before.cpu()) < ERROR
    assert relative(found, original.logits) < ERROR
    assert original.agrees(during)
    for family in HOOKED:
        for device in GPUS:
            assert served[family, device], f"{family} on {device}"
    assert {device for _, device in served} == set(GPUS)
    assert not any("device" in reason for reason in reasons)
    assert find_applied(model) is None
    assert torch.equal(logits(model, ids), before)
    assert torch.equal(generate(model, ids), tokens)


def test_two_processes_integrate_their_parts_and_use_them(original: Original, ranks: Ranks) -> None:
    first, second = found = ranks.found(PATIENCE_S)
    print(*({k: r[k] for k in ("device", "backend", "error", "served", "rejected")} for r in found), sep="\n")
    assert (first["device"], second["device"]) == GPUS
    assert first["hash"] == second["hash"]
    for rank in found:
        assert "nccl" in rank["backend"]
        assert rank["split"] == "tp=2"
        assert rank["rejected"] == []
        assert rank["untouched"]
        assert rank["reverted"]
        assert rank["error"] < ERROR
        assert rank["before"] == rank["after"]
        assert original.agrees(torch.tensor(rank["before"]))
        assert original.agrees(torch.tensor(rank["during"]))
        assert set(rank["served"]) == set(FAMILIES)
        for family, (kernels, _, instances) in rank["served"].items():
            assert kernels >= 6 * instances, family
