"""The forward pass of a Llama-family decoder over a flat batch of sequence pieces, in float32 numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sandlot.engine.embedded.config import ModelConfig, read_config
from sandlot.engine.embedded.kv import Ids, KvBuffer
from sandlot.engine.embedded.tensors import read_checkpoint
from sandlot.errors import ModelError

Array = NDArray[np.float32]

_SCORES = 1 << 20
"""Attention scores computed at once, so that they stay in the processor's cache and memory stays flat."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`ids` that continue the sequence in `kv`: one token when decoding, many when reading a prompt."""

    kv: KvBuffer
    ids: Ids


@dataclass(frozen=True, slots=True)
class _Layer:
    norm1: Array
    qkv: Array
    qkv_bias: Array | None
    q_norm: Array | None
    k_norm: Array | None
    out: Array
    norm2: Array
    gate_up: Array
    down: Array


class LlamaModel:
    """Weights and forward pass. One thread at a time; the threads inside belong to BLAS."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Array]) -> None:
        self.config = config
        try:
            self._load(tensors)
        except KeyError as e:
            raise ModelError(f"the checkpoint lacks the tensor {e}: copy or download it again") from e

    @classmethod
    def from_directory(cls, directory: Path) -> LlamaModel:
        return cls(read_config(directory), read_checkpoint(directory))

    def _load(self, tensors: Mapping[str, Array]) -> None:
        c = self.config
        self._embed = tensors["model.embed_tokens.weight"]
        self._head = self._embed if c.tied else tensors["lm_head.weight"]
        self._norm = tensors["model.norm.weight"]
        if self._embed.shape != (c.vocab_size, c.hidden):
            raise ModelError(
                f"config.json says a vocabulary of {c.vocab_size} × {c.hidden}, the weights have {self._embed.shape}"
            )

        # Small batches multiply two to three times faster by a contiguous [in, out] matrix.
        def matrix(*names: str) -> Array:
            return np.ascontiguousarray(np.concatenate([tensors[n + ".weight"] for n in names]).T)

        self._layers: list[_Layer] = []
        for i in range(c.layers):
            p = f"model.layers.{i}."
            q, k, v = (f"{p}self_attn.{x}_proj" for x in "qkv")
            bias = q + ".bias" in tensors
            self._layers.append(
                _Layer(
                    norm1=tensors[p + "input_layernorm.weight"],
                    qkv=matrix(q, k, v),
                    qkv_bias=np.concatenate([tensors[n + ".bias"] for n in (q, k, v)]) if bias else None,
                    q_norm=tensors.get(p + "self_attn.q_norm.weight"),
                    k_norm=tensors.get(p + "self_attn.k_norm.weight"),
                    out=matrix(p + "self_attn.o_proj"),
                    norm2=tensors[p + "post_attention_layernorm.weight"],
                    gate_up=matrix(p + "mlp.gate_proj", p + "mlp.up_proj"),
                    down=matrix(p + "mlp.down_proj"),
                )
            )

    def forward(self, pieces: Sequence[Piece]) -> Array:
        """Append each piece to its sequence and return the final hidden states of all tokens, `[tokens, hidden]`."""
        c = self.config
        rows: list[tuple[KvBuffer, slice, int]] = []
        at = 0
        for piece in pieces:
            start = piece.kv.append_ids(piece.ids)
            rows.append((piece.kv, slice(at, at + len(piece.ids)), start))
            at += len(piece.ids)
        positions = np.concatenate([np.arange(start, kv.length) for kv, _, start in rows])
        angles = positions.astype(np.float32)[:, None, None] * c.inv_freq
        cos, sin = np.cos(angles), np.sin(angles)
        n_q, n_kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        x = self._embed[np.concatenate([p.ids for p in pieces])]
        for i, layer in enumerate(self._layers):
            qkv = _rms_norm(x, layer.norm1, c.norm_eps) @ layer.qkv
            if layer.qkv_bias is not None:
                qkv += layer.qkv_bias
            q = qkv[:, :n_q].reshape(at, c.heads, c.head_dim)
            k = qkv[:, n_q : n_q + n_kv].reshape(at, c.kv_heads, c.head_dim)
            v = qkv[:, n_q + n_kv :].reshape(at, c.kv_heads, c.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = _rms_norm(q, layer.q_norm, c.norm_eps), _rms_norm(k, layer.k_norm, c.norm_eps)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            q *= c.head_dim**-0.5
            mixed = np.empty((at, n_q), np.float32)
            for kv, part, start in rows:
                keys, values = kv.data[i]
                keys[:, start : kv.length] = k[part].transpose(1, 0, 2)
                values[:, start : kv.length] = v[part].transpose(1, 0, 2)
                _attend(q[part], keys[:, : kv.length], values[:, : kv.length], start, mixed[part])
            x += mixed @ layer.out
            gate_up = _rms_norm(x, layer.norm2, c.norm_eps) @ layer.gate_up
            half = gate_up.shape[1] // 2
            gate, up = gate_up[:, :half], gate_up[:, half:]
            x += (_silu(gate) * up) @ layer.down
        return _rms_norm(x, self._norm, c.norm_eps)

    def logits(self, hidden: Array) -> Array:
        """`[tokens, vocabulary]` for rows of hidden states."""
        return np.ascontiguousarray((self._head @ hidden.T).T)


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    square = np.einsum("...i,...i->...", x, x) / np.float32(x.shape[-1])
    result: Array = x / np.sqrt(square + np.float32(eps))[..., None]
    result *= weight
    return result


def _silu(x: Array) -> Array:
    # Saturating at -80 keeps exp finite; silu is 0 there in float32 either way.
    e: Array = np.exp(-np.maximum(x, np.float32(-80.0)))
    e += np.float32(1.0)
    result: Array = x / e
    return result


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding, the two halves of each head being the pair's two coordinates."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    out = np.empty(x.shape, np.float32)
    np.multiply(a, cos, out=out[..., :half])
    out[..., :half] -= b * sin
    np.multiply(b, cos, out=out[..., half:])
    out[..., half:] += a * sin
    return out


def _attend(q: Array, keys: Array, values: Array, start: int, out: NDArray[Any]) -> None:
    """Causal attention of queries at `start …` over all keys so far; grouped heads share their keys.

    `q` is [tokens, heads, head_dim], `keys` and `values` are [kv_heads, length, head_dim], `out` is [tokens, width].
    """
    tokens, heads, dim = q.shape
    kv_heads, length, _ = keys.shape
    group = heads // kv_heads
    step = max(1, min(tokens, _SCORES // (heads * length)))
    for at in range(0, tokens, step):
        n = min(step, tokens - at)
        seen = start + at + n
        block = q[at : at + n].reshape(n, kv_heads, group, dim).transpose(1, 2, 0, 3).reshape(kv_heads, group * n, dim)
        scores = _scores(block, keys[:, :seen])
        if n > 1:
            future = np.triu(np.full((n, n), -np.inf, np.float32), 1)
            scores.reshape(kv_heads, group, n, seen)[..., seen - n :] += future
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        mixed = scores @ values[:, :seen]
        mixed /= scores.sum(axis=-1, keepdims=True)
        out[at : at + n] = mixed.reshape(kv_heads, group, n, dim).transpose(2, 0, 1, 3).reshape(n, heads * dim)


def _scores(block: Array, keys: Array) -> Array:
    """`block @ keys.T` per head; few rows go four times faster from the other side, where BLAS packs no keys."""
    if block.shape[1] >= 128:
        return block @ keys.transpose(0, 2, 1)
    return np.ascontiguousarray((keys @ block.transpose(0, 2, 1)).transpose(0, 2, 1))
