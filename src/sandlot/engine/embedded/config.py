"""What a checkpoint's `config.json` says, reduced to what the numpy forward pass needs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sandlot.errors import ModelError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""All one network: Qwen2 adds biases to q, k and v, Qwen3 a norm to each head of q and k."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of one decoder. `inv_freq` are the rotary frequencies, scaling applied, [head_dim / 2]."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    tied: bool
    eos_token_ids: tuple[int, ...]
    inv_freq: NDArray[np.float32]

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * 4


def read_config(directory: Path) -> ModelConfig:
    """Read `config.json` and `generation_config.json`; `ModelError` for what this engine does not compute."""
    raw = _read_json(directory / "config.json")
    names = raw.get("architectures") or ["none named"]
    if names[0] not in ARCHITECTURES:
        raise ModelError(
            f"{directory} is a {names[0]}, the embedded engine runs {', '.join(ARCHITECTURES)}: "
            "serve it with vLLM and give --engine URL"
        )
    if raw.get("sliding_window") and raw.get("use_sliding_window", True):
        raise ModelError(f"{directory} uses sliding-window attention: serve it with vLLM and give --engine URL")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(
            f"{directory} uses the activation {raw['hidden_act']!r}: serve it with vLLM, give --engine URL"
        )
    try:
        heads = raw["num_attention_heads"]
        head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
        generation = directory / "generation_config.json"
        eos = (_read_json(generation) if generation.exists() else {}).get("eos_token_id", raw.get("eos_token_id"))
        return ModelConfig(
            vocab_size=raw["vocab_size"],
            hidden=raw["hidden_size"],
            layers=raw["num_hidden_layers"],
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            max_context=raw["max_position_embeddings"],
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            tied=raw.get("tie_word_embeddings", False),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            inv_freq=_inv_freq(raw, head_dim, directory),
        )
    except KeyError as e:
        raise ModelError(f"{directory / 'config.json'} lacks {e}: give a complete Hugging Face checkpoint") from e


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: give a Hugging Face checkpoint directory") from None
    except ValueError as e:
        raise ModelError(f"{path} is not valid JSON ({e})") from e
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def _inv_freq(raw: Mapping[str, Any], head_dim: int, directory: Path) -> NDArray[np.float32]:
    """Rotary frequencies; older files say `rope_theta` and `rope_scaling`, newer ones `rope_parameters`."""
    rope: dict[str, Any] = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = rope.get("rope_theta") or raw.get("rope_theta") or 10000.0
    freq = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "linear":
        freq = freq / rope["factor"]
    elif kind == "llama3":
        low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
        old = rope["original_max_position_embeddings"]
        wavelength = 2 * math.pi / freq
        smooth = np.clip((old / wavelength - low) / (high - low), 0.0, 1.0)
        freq = (1 - smooth) * freq / factor + smooth * freq
    elif kind != "default":
        raise ModelError(f"{directory} uses rope type {kind!r}: serve it with vLLM and give --engine URL")
    return freq.astype(np.float32)
