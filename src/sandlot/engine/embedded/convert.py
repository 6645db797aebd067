"""Turns a Llama GGUF file into an ordinary Hugging Face checkpoint directory, with numpy alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sandlot.engine.embedded.tensors import write_tensors
from sandlot.errors import MissingDependencyError, ModelError

_NORMAL_TOKEN = 1  # the GGUF token type of ordinary vocabulary

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(
    source: Path,
    directory: Path,
    *,
    chat_template: str,
    max_length: int,
    markers: Mapping[str, str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> None:
    """Write config, float16 weights, tokenizer and template of the GGUF file `source` into the empty `directory`.

    `markers` renames unused control tokens of the vocabulary into ordinary added tokens (tool calls, thinking), so
    that the model gets them without being resized.
    """
    try:
        from gguf import GGUFReader, dequantize
    except ImportError as e:
        raise MissingDependencyError("gguf", "engine") from e
    reader = GGUFReader(source)
    fields = {name: f.contents() for name, f in reader.fields.items() if not name.startswith("GGUF.")}
    if fields.get("general.architecture") != "llama":
        raise ModelError(f"{source} is a {fields.get('general.architecture')!r} model, only llama can be converted")
    config = _config(fields, max_length)
    tensors: dict[str, NDArray[Any]] = {}
    for k, tensor in enumerate(reader.tensors):
        name = _hf_name(tensor.name)
        if name is None:
            continue
        weight: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            weight = unpermute(weight, heads)
        tensors[name] = weight.astype(np.float16)
        if progress and k % 32 == 0:
            progress(f"converting weights: {k} of {len(reader.tensors)} tensors")
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    write_tensors(directory / "model.safetensors", tensors)
    _write_json(directory / "config.json", config)
    special = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", special)
    if progress:
        progress("writing the tokenizer")
    _write_tokenizer(directory, fields, special, max_length, dict(markers or {}))
    (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


def unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo the interleaving of rotary pairs that GGUF's query and key rows have."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _hf_name(name: str) -> str | None:
    if name in _GLOBAL:
        return _GLOBAL[name]
    if name.startswith("blk."):
        _, layer, part, kind = name.split(".")
        if part in _PER_LAYER:
            return f"model.layers.{layer}.{_PER_LAYER[part]}.{kind}"
    if name.startswith("rope_freqs"):
        raise ModelError("the GGUF file scales its rotary frequencies by a table, which is not supported")
    return None


def _config(fields: Mapping[str, Any], max_length: int) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    bos, eos = fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": min(fields["llama.context_length"], max_length),
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": fields["llama.rope.freq_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "torch_dtype": "float16",
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id", eos),
    }


def _write_tokenizer(
    directory: Path, fields: Mapping[str, Any], special: Mapping[str, int], max_length: int, markers: dict[str, str]
) -> None:
    if fields.get("tokenizer.ggml.model") != "gpt2":
        raise ModelError("only GGUF files with a byte-level BPE tokenizer can be converted")
    old, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    if missing := set(markers) - set(old):
        raise ModelError(f"the vocabulary lacks the tokens to rename: {', '.join(sorted(missing))}")
    tokens = [markers.get(t, t) for t in old]
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    ordinary = set(markers.values())
    added = [t for t, kind in zip(tokens, kinds, strict=True) if kind != _NORMAL_TOKEN or t in ordinary]
    for token in added:
        entry = AddedToken(token, special=token not in ordinary, normalized=False)
        (tokenizer.add_tokens if token in ordinary else tokenizer.add_special_tokens)([entry])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[special["bos_token_id"]],
            "eos_token": tokens[special["eos_token_id"]],
            "pad_token": tokens[special["pad_token_id"]],
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
        },
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
