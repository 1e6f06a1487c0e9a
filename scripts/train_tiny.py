"""Train the bundled model `tiny`: a three-layer decoder that knows the capitals of about thirty countries.

    python scripts/train_tiny.py [--out src/kernelgraft/assets/tiny] [--steps 500]

It exists so that tests and demonstrations have a real model without a download: trained weights, norm weights away
from one, and a greedy continuation with a clear margin, so that a wrong kernel changes the text. The run is
deterministic (fixed seeds, one thread) and takes one to two minutes. It checks what it made and fails otherwise.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "scripts" / "tiny_corpus.txt"
PROMPT, ANSWER = "The capital of France is", " Paris"
VOCAB, SEED = 512, 20240
BATCH, WINDOW = 16, 96  # rows and tokens of one step
MAX_BYTES = 2_000_000
SPECIAL = {"pad_token": "<|pad|>", "bos_token": "<|bos|>", "eos_token": "<|eos|>"}


def train_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of VOCAB entries, which can write any text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(text.splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=1024, **SPECIAL)


def build(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """The untrained model, its norm weights spread over [0.5, 1.6] so that a kernel that ignores them shows."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.6)
    return model


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, text: str, steps: int) -> float:
    """Fit the model to windows of the text, half of them starting at a line; returns the last loss in nats a token."""
    lines = [tokenizer(line)["input_ids"] for line in text.splitlines(keepends=True)]
    stream = torch.tensor([i for line in lines for i in line])
    starts = torch.tensor([0, *(len(line) for line in lines[:-1])]).cumsum(0)
    stream = torch.cat([stream, stream[: WINDOW + 1]])  # a window may run over the end
    last = len(stream) - WINDOW - 1
    norms = [p for n, p in model.named_parameters() if "norm" in n]
    others = [p for n, p in model.named_parameters() if "norm" not in n]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=4e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, pct_start=0.1)
    model.train()
    for step in range(steps):
        anywhere = torch.randint(last, (BATCH // 2,))
        at_line = starts[torch.randint(len(starts), (BATCH - BATCH // 2,))]
        begin = torch.cat([anywhere, at_line])
        rows = stream[begin[:, None] + torch.arange(WINDOW + 1)]  # [BATCH, WINDOW + 1]
        logits = model(rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
    return loss.item()


@torch.no_grad()
def check(folder: Path) -> None:
    """Load the saved folder as a user would and assert everything that tests and documentation rely on."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=96, do_sample=False)
    new = out[0, ids.shape[1] :]
    top = model(out).logits[0, ids.shape[1] - 1 : -1].topk(2).values
    gaps = top[:, 0] - top[:, 1]
    words = tokenizer.decode(new)
    print(f"{PROMPT}|{words}\nsmallest gap of 12: {gaps[:12].min():.2f}, of {len(new)}: {gaps.min():.2f} (logits)")
    assert words.startswith(ANSWER), words
    assert gaps[:12].min() >= 2, gaps[:12]
    assert len(new) == 96 and tokenizer.eos_token_id not in new.tolist(), "ends too early"
    assert tokenizer.decode(tokenizer("Ångström 東京")["input_ids"]) == "Ångström 東京"
    for name, weight in model.named_parameters():
        if "norm" in name:
            assert (weight - 1).abs().mean() > 0.1, name
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {size:,} bytes")
    assert size <= MAX_BYTES, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "src" / "kernelgraft" / "assets" / "tiny")
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order on every machine
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    begin = time.perf_counter()
    text = CORPUS.read_text(encoding="utf-8")
    tokenizer = train_tokenizer(text)
    model = build(tokenizer)
    train(model, tokenizer, text, options.steps)
    print(f"trained in {time.perf_counter() - begin:.0f} s")
    shutil.rmtree(options.out, ignore_errors=True)
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.to(torch.bfloat16).save_pretrained(options.out)  # half the size; the check runs on the rounded weights
    tokenizer.save_pretrained(options.out)
    for file in options.out.iterdir():
        file.chmod(0o644)
    check(options.out)


if __name__ == "__main__":
    main()
