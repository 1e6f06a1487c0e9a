"""What a step must read and compute, against closed forms, torch's own counter and real routing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kernelgraft.bench import roofline
from kernelgraft.bench.counting import Counter, pairs, tensor_bytes
from kernelgraft.bench.result import Figure, Run, Side
from kernelgraft.bench.roofline import Limits, Work, against, limits, work
from kernelgraft.errors import KernelgraftError
from kernelgraft.models import configuration, load, resolve
from kernelgraft.models.shrinking import quiet

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
EMBEDDING = 1000 * 64
LAYER = 64 * (4 + 2 + 2) * 16 + 64 * 64 + 3 * 64 * 160  # q, k and v, o, gate and up and down


def meta(name: str, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> PreTrainedModel:
    with quiet(), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes), dtype=dtype)
    return model.eval()


def real(name: str, **sizes: Any) -> PreTrainedModel:
    with quiet():
        torch.default_generator.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes))
    return model.eval()


def weight_bytes(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


# --- weights, cache and products of a plain model


@pytest.mark.parametrize("tied", [False, True])
def test_a_decode_step_reads_each_weight_once_and_the_cache(tied: bool) -> None:
    model = meta("llama", **SIZES, tie_word_embeddings=tied)
    for batch, prompt, new in ((1, 32, 1), (3, 100, 21)):
        found = work(model, "decode", batch, prompt, new)
        context = prompt + (new - 1) // 2 + 1  # with the token of the step itself
        rows = batch * 64 * 2
        cache = 3 * 2 * batch * context * 2 * 16 * 2
        # Without a tie the embedding is another matrix, of which only rows are read.
        weights = weight_bytes(model) - (0 if tied else EMBEDDING * 2)
        assert found.bytes_per_step == pytest.approx(weights + rows + cache, rel=2e-3)  # and the rotary frequencies
        products = 2 * batch * (3 * LAYER + EMBEDDING)
        attention = 3 * batch * 4 * context * 2 * (16 + 16)
        assert found.flops_per_step == pytest.approx(products + attention, rel=2e-3)
        assert found.tokens == batch and found.regime == "decode"


def test_a_prefill_reads_weights_once_and_attends_to_half_of_the_pairs() -> None:
    model = meta("llama", **SIZES, tie_word_embeddings=False)
    batch, prompt = 2, 300
    found = work(model, "prefill", batch, prompt, 7)
    assert found.bytes_per_step == pytest.approx(
        weight_bytes(model) - EMBEDDING * 2 + min(batch * prompt, 1000) * 64 * 2, rel=2e-3
    )
    products = 2 * batch * (prompt * 3 * LAYER + EMBEDDING)  # logits of the last token only, as generate does
    attention = 3 * batch * 4 * (prompt * (prompt + 1) // 2) * 2 * 32
    assert found.flops_per_step == pytest.approx(products + attention, rel=1e-3)
    assert found.tokens == batch * prompt


def test_a_window_bounds_what_is_read_and_computed() -> None:
    sizes = {**SIZES, "sliding_window": 50}
    model = meta("mistral", **sizes)
    short, long = (work(model, "decode", 1, prompt, 1) for prompt in (100, 1000))
    assert short.bytes_per_step == long.bytes_per_step and short.flops_per_step == long.flops_per_step
    whole = work(meta("mistral", **{**sizes, "sliding_window": None}), "decode", 1, 1000, 1)
    assert whole.bytes_per_step - long.bytes_per_step == pytest.approx(3 * 2 * (1001 - 49) * 2 * 16 * 2, rel=1e-3)
    prefill = work(model, "prefill", 1, 200, 1).flops_per_step
    without = work(meta("mistral", **{**sizes, "sliding_window": None}), "prefill", 1, 200, 1).flops_per_step
    hidden = 150 * 151 // 2  # pairs beyond the window
    assert without - prefill == 3 * 4 * hidden * 2 * 32


@pytest.mark.parametrize("causal", [True, False])
def test_pairs_are_those_of_the_mask(causal: bool) -> None:
    for queries in (1, 2, 5, 9):
        for keys in range(queries, 12):
            for window in (None, 1, 3, 8, 20):
                place = torch.arange(keys - queries, keys)[:, None]
                other = torch.arange(keys)[None]
                mask = (other <= place) if causal else torch.ones(queries, keys, dtype=torch.bool)
                if window is not None:
                    mask &= place - other < window
                    if not causal:
                        continue
                assert pairs(queries, keys, window, causal) == int(mask.sum()), (queries, keys, window)
    assert pairs(4, 10, 3, False) == 12


@torch.no_grad()
def test_flops_are_those_of_torchs_counter_but_for_the_masked_pairs() -> None:
    model = real("llama", **SIZES, attn_implementation="eager")  # on a CPU its counter knows no fused attention
    ids = torch.arange(40)[None]
    with quiet(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, logits_to_keep=1)
    masked = 3 * 4 * (40 * 40 - 40 * 41 // 2) * 2 * 32
    ours = work(model, "prefill", 1, 40, 1).flops_per_step
    assert counter.get_total_flops() == ours + masked


# --- experts


def experts(batch: int, regime: str = "decode", **changes: Any) -> tuple[Work, PreTrainedModel, int]:
    sizes = {**SIZES, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96, **changes}
    model = meta("qwen3_moe", **sizes)
    one = sum(p[0].numel() * 2 for p in model.model.layers[0].mlp.experts.parameters())
    return work(model, regime, batch, 64, 1), model, one  # type: ignore[arg-type]


def test_one_token_reads_exactly_the_experts_that_it_chooses() -> None:
    found, model, one = experts(1)
    cache = 3 * 2 * 65 * 2 * 16 * 2
    weights = weight_bytes(model) - EMBEDDING * 2 + 64 * 2
    assert found.bytes_per_step == pytest.approx(weights - 3 * 12 * one + cache, rel=2e-3)


def test_a_batch_reads_the_expected_number_of_distinct_experts() -> None:
    one_token, _, one = experts(1)
    for batch in (2, 5, 200):
        found, _, _ = experts(batch)
        distinct = 16 * (1 - (12 / 16) ** batch)
        cache = 3 * 2 * (batch - 1) * 65 * 2 * 16 * 2
        rows = (batch - 1) * 64 * 2
        assert found.bytes_per_step - one_token.bytes_per_step == pytest.approx(
            3 * (distinct - 4) * one + cache + rows, rel=1e-3
        )
        assert found.flops_per_step == pytest.approx(batch * one_token.flops_per_step, rel=1e-4)


def test_products_of_experts_count_for_each_choice() -> None:
    four, _, one = experts(1)
    eight, _, _ = experts(1, num_experts_per_tok=8)
    assert eight.flops_per_step - four.flops_per_step == 3 * 4 * one  # two a weight, each of two bytes
    assert eight.bytes_per_step - four.bytes_per_step == pytest.approx(3 * 4 * one, rel=1e-6)


def test_where_values_decide_the_model_itself_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {**SIZES, "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    # Loops over the experts that are hit.
    model = real("qwen3_moe", **sizes, experts_implementation="eager", attn_implementation="eager")
    on_meta = work(model, "decode", 1, 20, 1)
    monkeypatch.setattr(type(model), "set_experts_implementation", lambda self, name: None)
    hits: list[set[int]] = []

    def chosen(module: Any, args: Any, output: Any) -> None:
        index = next(o for o in output if not o.is_floating_point())
        hits.append(set(index.flatten().tolist()))

    hooks = [layer.mlp.gate.register_forward_hook(chosen) for layer in model.model.layers]
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with torch.device("meta"):
        twin = type(model)._from_config(model.config)
    with pytest.raises(Exception, match=r"(?i)meta"):
        twin(torch.zeros(1, 4, dtype=torch.int64, device="meta"))
    found = work(model, "decode", 1, 20, 1)
    assert found.flops_per_step == on_meta.flops_per_step
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    for hook in hooks:
        hook.remove()
    one = sum(p[0].numel() * 4 for p in model.model.layers[0].mlp.experts.parameters())
    read = sum(len(layer) for layer in hits[-3:])
    weights = weight_bytes(model) - EMBEDDING * 4 + 64 * 4 - 3 * 16 * one
    cache = 3 * 2 * 21 * 2 * 16 * 4
    assert read == 6
    assert found.bytes_per_step == pytest.approx(weights + read * one + cache, rel=2e-3)


# --- any architecture


@pytest.mark.parametrize(
    "name", ["gpt2", "bloom", "falcon", "gemma3_text", "deepseek_v3", "gpt_oss", "mamba2", "qwen3_next", "rwkv"]
)
def test_any_architecture_is_counted(name: str) -> None:
    config = configuration(resolve(f"config:{name}"))
    with quiet(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).eval()
    total = weight_bytes(model)
    decode, prefill = work(model, "decode", 1, 8, 2), work(model, "prefill", 1, 8, 2)
    assert 0.25 * total < decode.bytes_per_step < 1.5 * total
    assert 0 < prefill.bytes_per_step <= total * 1.1
    assert decode.flops_per_step > 2 * 0.2 * sum(p.numel() for p in model.parameters())
    assert decode.flops_per_step < prefill.flops_per_step < 30 * decode.flops_per_step


def test_states_of_linear_attention_are_part_of_the_cache() -> None:
    config = configuration(resolve("config:qwen3_next"))
    with quiet(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    one, four = (work(model, "decode", batch, 8, 1).bytes_per_step for batch in (1, 4))
    heads, keys, values = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    linear = config.layer_types.count("linear_attention")
    assert four - one > 3 * linear * heads * keys * values * 2


def test_a_patched_model_is_counted_as_its_original() -> None:
    loaded = load("config:llama")
    plain = work(loaded.model, "decode", 1, 8, 1)
    layer = loaded.model.model.layers[0].mlp
    layer.forward = lambda x: x  # what a patch does to an instance
    assert work(loaded.model, "decode", 1, 8, 1) == plain


def test_what_cannot_be_counted_says_so_in_one_line() -> None:
    class Odd(torch.nn.Module):
        config = None

        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def get_input_embeddings(self) -> Any:
            return SimpleNamespace(weight=torch.zeros(4, 2))

        def forward(self, input_ids: torch.Tensor) -> None:
            raise ValueError("no such\nthing. More")

    with pytest.raises(KernelgraftError, match=r"`Odd` reads and computes cannot be counted: ValueError") as caught:
        work(Odd(), "prefill", 1, 4, 1)
    assert "\n" not in str(caught.value)


def test_tensors_of_an_object_count_once() -> None:
    data = torch.zeros(10, 4)
    inner = SimpleNamespace(keys=data, again=data[:5], states={0: torch.zeros(3), 1: None})
    inner.itself = inner
    assert sum(tensor_bytes(SimpleNamespace(layers=[inner, inner])).values()) == 160 + 12


# --- against the machine


def side(ttft_ms: float, rate: float | None) -> Side:
    run = Run(ttft_ms=ttft_ms, decode_ms=(1.0,), tokens_per_s=1.0, peak_memory_bytes=1)
    decode = None if rate is None else Figure(mean=rate)
    return Side(
        runs=(run,),
        tokens_per_s=Figure(mean=1.0),
        ttft_ms=Figure(mean=ttft_ms),
        decode_tokens_per_s=decode,
        peak_memory_bytes=1,
        load_s=0.0,
        warmup_s=0.0,
    )


def test_the_longer_of_both_times_is_the_limit() -> None:
    machine = Limits(bandwidth_gb_s=1000.0, tflops=10.0)
    memory = against(Work("decode", 4, 2e9, 1e9), machine, side(50.0, 500.0))
    assert memory is not None and memory.limit_ms == pytest.approx(2.0)
    assert memory.limit_tokens_per_s == pytest.approx(2000.0) and memory.percent == pytest.approx(25.0)
    compute = against(Work("prefill", 4096, 2e9, 1e12), machine, side(400.0, None))
    assert compute is not None and compute.limit_ms == pytest.approx(100.0)
    assert compute.limit_tokens_per_s == pytest.approx(40960.0) and compute.percent == pytest.approx(25.0)
    assert against(Work("decode", 1, 1.0, 1.0), machine, side(1.0, None)) is None
    direct = against(Work("decode", 1, 2e9, 1.0), machine, 4)
    assert direct is not None and direct.percent == pytest.approx(50.0)


def test_limits_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(roofline.STREAM_BYTES, "cpu", 1 << 22)
    monkeypatch.setitem(roofline.EDGES, "cpu", (64,))
    limits.cache_clear()
    found = limits(torch.device("cpu"), torch.float32)
    assert 0.01 < found.bandwidth_gb_s < 10_000 and 0 < found.tflops < 100
    assert limits(torch.device("cpu"), torch.float32) is found


class _Reader(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(8, 4))


def read_by(use: Any) -> float:
    model = _Reader()
    with torch.no_grad(), Counter(model) as counter:
        use(model.table, counter)
    return counter.bytes_read


def test_each_place_of_a_weight_counts_once() -> None:
    ones = torch.ones(4, 2)
    assert read_by(lambda table, _: (table @ ones, table @ ones, table.t().contiguous())) == 128
    assert read_by(lambda table, _: (table[:3] @ ones, table[:3] @ ones)) == 48
    assert read_by(lambda table, _: (table[:3] @ ones, table[3:5] @ ones)) == 80
    assert (
        read_by(lambda table, _: (table[:7] @ ones, table[1:] @ ones, table[2:] @ ones)) == 128
    )  # never more than all
    assert read_by(lambda table, _: table.view(4, 8).expand(2, 4, 8)) == 0  # a view reads nothing
    assert read_by(lambda table, _: torch.nn.functional.embedding(torch.tensor([1, 1, 5]), table)) == 48
    assert read_by(lambda table, _: table[torch.arange(100) % 8]) == 128


def test_nothing_counts_in_a_pause() -> None:
    def use(table: torch.Tensor, counter: Counter) -> None:
        with counter.pause():
            table @ torch.ones(4, 2)
            counter.read(table)
        assert counter.flops == 0

    assert read_by(use) == 0
    assert read_by(lambda table, counter: counter.read(table)) == 128
