"""Rewrite a configuration's sizes to tiny ones, by field name, value and the relations between fields.

No architecture is known here: a name such as `num_key_value_heads` says what a number is, and the original values
say how numbers belong together (heads x head size = width, sections that add up to the number of layers, ...).
Whether the result builds is not decided here but in `shrinking`, which tries it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

VOCAB = 256
MAX_KINDS = 12  # layers kept at most, however many kinds a model mixes
STATE_EXPANSION = r"(\w+_)?expand"
META = {"transformers_version", "architectures", "model_type", "id2label", "label2id", "_name_or_path", "dtype"}

LAYERS = re.compile(
    r"((num_|n_)?(hidden_|decoder_|encoder_)?(layers?|blocks)|num_(en|de)coder_layers|.*layers_per_stack)"
)
HEAD_DIMS = re.compile(r".*(head_dim|d_head|headdim|dim_head|kv_channels|attention_head_size|rope_dim|head_size)")
WIDTHS = re.compile(
    r"(.*_)?(hidden_size|d_model|n_embd|emb_dim|embedding_dim|embedding_size|embed_dim|proj_dim|lru_width|d_ssm|(in|out)(put)?_(size|dim))(_global|_local)?"
)
TOKENS = re.compile(r".*(token_ids?|token_index|_idx|_index|tokens)|[a-z]+_id")
KEY_HEADS = re.compile(r".*(key_value_heads|kv_heads|key_heads|query_groups|kv_n_heads)(_per_layer)?")
HEADS = re.compile(r".*(n_heads?|num_heads|attention_heads|value_heads|(n|num)_\w+_heads)(_per_layer)?")

# The first full match wins. The number is a ceiling, never a floor.
CEILINGS: tuple[tuple[str, int], ...] = (
    (r".*vocab(_size)?(_base|_per_layer_input)?", VOCAB),
    (r"hidden_size_per_layer_input|ple_embed_dim|.*latent_size", 16),
    (r".*(experts_per_tok(en)?|topk|top_k|moe_k|top_k_experts)", 2),
    (r".*shared_experts?", 1),
    (r"(?!.*(size|dim)).*(num_experts|routed_experts|local_experts|expert_num)", 4),
    (r"topk_group", 1),
    (r"n_group|num_expert_group|o_groups|.*n_?groups", 2),
    (r".*(moe|expert).*(intermediate|hidden|ffn).*(size|dim)", 32),
    (r".*(intermediate|ffn|feed_forward|inner|dff|dim_ff|d_ff).*", 128),
    (r".*(window|window_size|window_len|local_attention|attention_chunk_size)(_size)?", 8),
    (r".*(_rank|lowrank|d_rel|d_state|state_size)", 16),
    (r"index_topk|index_topk_blocks|indexer_budget|rotary_dim", 8),
    (r"(\w+_)?chunk_size|(index_)?block_size|.*chunk_length|rel_extent", 16),
    (r".*(position_embeddings|n_positions|n_ctx|max_seq_len|context_length|model_max_length|max_.*_positions)", 2048),
    (r".*(dense_replace|num_dense_layers|layer_start_index|_layer_offset|max_window_layers)", 1),
    (r".*(_layer_period|_every_n_layers|_layer_interval|layer_group_size|sliding_window_pattern|layer_step)", 2),
    (r"split_ngram_parts|num_centroids|.*num_buckets|prompt_length", 32),
)
# What a field left at None means when a model cannot be built without it.
FILLS: tuple[tuple[str, int], ...] = (
    (r".*(num_experts|routed_experts|local_experts)", 4),
    (r".*(experts_per_tok(en)?|topk|top_k_experts|n_group|compress_ratio)", 2),
    (r"topk_group|.*shared_experts", 1),
    (r"indexer_kv_heads", 1),
    (r"indexer_budget|\w+_qkv", 8),
)


@dataclass(frozen=True)
class Size:
    """How far to shrink: `heads` heads of `head_dim`, and which liberties to take with the original fields."""

    heads: int = 4
    head_dim: int = 16
    repeat: bool = False  # keep every kind of layer twice
    fill: bool = False  # give a value to fields that are None
    towers: bool = True  # shrink configurations other than the text model's too

    @property
    def width(self) -> int:
        """Hidden size of the text model."""
        return self.heads * self.head_dim


def rewrite(config: PreTrainedConfig, size: Size, text_width: int | None = None) -> PreTrainedConfig:
    """A new configuration of the same class with every size made tiny; raises what its class raises when invalid.

    `text_width` is the original width of the text model that a nested tower feeds.
    """
    # Values as the object holds them: `to_dict` may convert some back to the form that a checkpoint stores.
    fields = {k: vars(config).get(k, v) for k, v in config.to_dict().items() if k not in META}
    children = {k: v for k, v in fields.items() if isinstance(v, PreTrainedConfig)}
    text = config.get_text_config(decoder=True)
    width = text_width or vars(text).get("hidden_size")
    for name, child in children.items():
        fields[name] = rewrite(child, size, width) if size.towers or child is text else child
    sizes = _Sizes(fields, config.attribute_map, size, width)
    out = {name: sizes.value(name, value) for name, value in fields.items()}
    if size.fill:
        out = {name: sizes.filled(name, value, out) for name, value in out.items()}
    return type(config)(**sizes.repaired(out))


def is_count(value: Any) -> bool:
    """Whether `value` is a positive integer and not a flag."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class _Sizes:
    """The original dimensions of one configuration, and the tiny value of each of its fields."""

    def __init__(self, fields: dict[str, Any], aliases: dict[str, str], size: Size, text_width: int | None) -> None:
        self.fields, self.aliases, self.size, self.text_width = fields, aliases, size, text_width
        self.vocab = min(VOCAB, self._count("vocab_size") or VOCAB)
        self.width = self._count("hidden_size", "d_model", "n_embd")
        self.heads = self._count("num_attention_heads", "n_heads", "num_heads")
        own_head_dim = [fields.get(k) for k in ("qk_nope_head_dim", "head_dim", "attention_head_size", "d_head")]
        shared = self.width // self.heads if self.width and self.heads else 64
        self.head_dim = int(next((v for v in own_head_dim if is_count(v)), None) or shared)
        self.layers = self._count("num_hidden_layers", "num_layers", "n_layers") or 0
        self.sections = self._sections()
        self.kept = self._kept_layers()
        self.moved_tokens: dict[int, int] = {}

    def _count(self, *names: str) -> int | None:
        found = (self.fields.get(self.aliases.get(name, name), self.fields.get(name)) for name in names)
        return next((v for v in found if is_count(v)), None)

    def _sections(self) -> dict[str, int]:
        """Counts such as n_input_layers that together make up all layers, in their order."""
        parts = {k: v for k, v in self.fields.items() if re.fullmatch(r"(n|num)_\w+_layers", k) and is_count(v)}
        parts = {k: v for k, v in parts.items() if v < self.layers}
        return parts if len(parts) > 1 and sum(parts.values()) == self.layers else {}

    def _is_layer_indices(self, value: Any) -> bool:
        return (
            isinstance(value, (list, tuple))
            and len(value) > 1
            and all(isinstance(e, int) and not isinstance(e, bool) for e in value)
            and list(value) == sorted(set(value))
            and value[-1] < self.layers
        )

    def _kept_layers(self) -> list[int]:
        """The first layer of each kind; a kind is everything that the fields say about a layer."""
        lists = [v for v in self.fields.values() if isinstance(v, (list, tuple))]
        columns: list[Any] = [v for v in lists if len(v) == self.layers and not self._is_layer_indices(v)]
        columns += [[i in v for i in range(self.layers)] for v in lists if self._is_layer_indices(v)]
        overrides = {int(k): v for k, v in (self.fields.get("per_layer_config") or {}).items()}
        columns.append([overrides.get(i) for i in range(self.layers)])
        columns.append([name for name, count in self.sections.items() for _ in range(count)] or [None] * self.layers)
        first: dict[str, int] = {}
        for i in range(self.layers):
            first.setdefault(repr([column[i] for column in columns]), i)
        kept = sorted(first.values())[:MAX_KINDS]
        if len(kept) < 2:
            cycles = [len(set(v)) for v in lists if self._is_cycle(v)]
            kept = list(range(min(max([2, *cycles]), self.layers or 2)))
        shares = any(re.fullmatch(r"num_kv_shared\w*", k) and is_count(v) for k, v in self.fields.items())
        # A layer that reuses another's keys needs one of the same kind before it.
        return kept * 2 if shares or self.size.repeat else kept

    def _is_cycle(self, value: Any) -> bool:
        """A short list of kinds that a model repeats over its layers."""
        words = isinstance(value, (list, tuple)) and all(isinstance(e, str) for e in value)
        return words and len(set(value)) > 1 and len(value) < self.layers

    def value(self, name: str, value: Any, scope: dict[str, Any] | None = None) -> Any:
        """The tiny value of field `name`; `scope` holds its neighbours when they are not this configuration's."""
        if is_count(value):
            return self._number(name, value, self.fields if scope is None else scope)
        if isinstance(value, (list, tuple)):
            return self._sequence(name, list(value))
        if isinstance(value, dict):
            if value and all(str(k).isdigit() for k in value):
                by_layer = {int(k): self.value(name, v) for k, v in value.items()}
                return {i: by_layer[layer] for i, layer in enumerate(self.kept) if layer in by_layer}
            return {k: self.value(k, v, value) for k, v in value.items()}
        return value

    def _number(self, name: str, value: int, scope: dict[str, Any]) -> int:
        size = self.size
        if TOKENS.fullmatch(name):
            return self._token(value)
        if name in self.sections:
            starts = list(self.sections)
            begin = sum(self.sections[k] for k in starts[: starts.index(name)])
            return sum(begin <= layer < begin + value for layer in self.kept)
        if re.fullmatch(r"num_kv_shared\w*", name):
            return len(self.kept) // 2
        if LAYERS.fullmatch(name):
            return len(self.kept)
        if HEAD_DIMS.fullmatch(name):
            return min(value, max(8, round(value / self.head_dim * size.head_dim / 8) * 8))
        if name == "query_pre_attn_scalar":
            return size.head_dim
        for pattern, ceiling in CEILINGS:
            if re.fullmatch(pattern, name):
                return min(value, ceiling)
        if WIDTHS.fullmatch(name):
            base = self.text_width if value == self.text_width else self.width
            return min(value, max(16, round(value / (base or value) * size.width / 8) * 8))
        if KEY_HEADS.fullmatch(name):
            queries = name.replace("key_value", "attention").replace("key_heads", "value_heads")
            full = scope.get(queries, self.heads)
            return min(value, size.heads if value == full else size.heads // 2)
        return min(value, size.heads) if HEADS.fullmatch(name) else value

    def _token(self, token: int) -> int:
        if token < self.vocab:
            return token
        return self.moved_tokens.setdefault(token, self.vocab - 2 - len(self.moved_tokens))

    def _sequence(self, name: str, items: list[Any]) -> list[Any]:
        if self._is_layer_indices(items):
            return [i for i, layer in enumerate(self.kept) if layer in items]
        if items and len(items) == self.layers:
            return [self.value(name, items[i]) for i in self.kept]
        if items and all(isinstance(e, list) and len(e) == 2 and is_count(e[1]) for e in items):
            return [[kinds, max(1, -(-len(self.kept) // len(kinds)))] for kinds, _ in items]  # [[kinds, repeats]]
        rotated = self.size.head_dim / self.head_dim
        if name.endswith("section") and all(is_count(e) for e in items):
            total = max(len(items), int(sum(items) * rotated))
            parts = [max(1, int(e / sum(items) * total)) for e in items]
            return [parts[0] + total - sum(parts), *parts[1:]]
        if name in ("long_factor", "short_factor"):
            return items[: int(len(items) * rotated)]
        if self._is_cycle(items):
            return list(dict.fromkeys(items))
        if self.width and all(is_count(e) for e in items) and sum(items) == self.width:
            return [e * self.size.width // self.width for e in items]
        return [self.value(name, e) for e in items]

    def filled(self, name: str, value: Any, out: dict[str, Any]) -> Any:
        """A plausible value for a field that was left empty; any other field as it is."""
        if name == "rope_parameters" and not value:
            rope = {"rope_type": "default", "rope_theta": 10000.0}
            return {kind: rope for kind in set(out.get("layer_types") or ())} or rope
        if name == "layer_types" and value and set(value) == {"linear_attention"}:
            return [*value[:-1], "full_attention"]  # a cache without an attention layer does not know its length
        if value is not None:
            return value
        if name == "layer_types":
            return ["full_attention"] * len(self.kept)
        if name.startswith("default_") and isinstance(choices := out.get(name.removeprefix("default_") + "s"), list):
            return choices[0]
        if name.endswith("layer_indices"):
            return [len(self.kept) - 1]
        if number := next((number for pattern, number in FILLS if re.fullmatch(pattern, name)), None):
            return number
        if HEAD_DIMS.fullmatch(name):
            return self.size.head_dim
        return self.size.heads if KEY_HEADS.fullmatch(name) or HEADS.fullmatch(name) else None

    def repaired(self, out: dict[str, Any]) -> dict[str, Any]:
        """Restore products that held between the original fields and that shrinking one by one has broken."""
        if "is_decoder" in out:
            out["is_decoder"] = True  # a causal language model is one, whatever the default
        per_unit = next((k for k, v in out.items() if k.endswith("layers_per_stack") and is_count(v)), None)
        total = self.aliases.get("num_hidden_layers", "num_hidden_layers")
        if per_unit and is_count(out.get(total)):
            out[total] *= self.layers // self.fields[per_unit]
        expand = next((v for k, v in self.fields.items() if re.fullmatch(STATE_EXPANSION, k)), None)
        if not expand or not self.width:
            return out
        inner = {self.width * expand: self.size.width * expand}
        inner |= {v: out[k] for k, v in self.fields.items() if k.endswith("d_ssm") and is_count(v)}
        for heads in (k for k, v in self.fields.items() if HEADS.fullmatch(k) and is_count(v)):
            for dim in (k for k, v in self.fields.items() if HEAD_DIMS.fullmatch(k) and is_count(v)):
                if (new := inner.get(self.fields[heads] * self.fields[dim])) and "attention" not in heads + dim:
                    out[dim] = int(new) // out[heads]
        return out
