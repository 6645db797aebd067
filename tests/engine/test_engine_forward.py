"""The numpy forward pass against a slow, plain one in float64, and against transformers where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sandlot.engine.embedded.kv import KvBuffer
from sandlot.engine.embedded.model import LlamaModel, Piece
from sandlot.engine.embedded.tensors import read_checkpoint, read_tensors, write_tensors
from sandlot.errors import ModelError
from support.toy_model import make_toy_model

VOCAB, HIDDEN, LAYERS, HEAD_DIM, INTER = 97, 48, 3, 16, 80

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "grouped heads, wider than the model": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "own output head": {"tie_word_embeddings": False},
    "llama3 rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "rope parameters of newer files": {"rope_theta": None, "rope_parameters": {"rope_theta": 5e4}},
    "linear rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 1},
}


def make(directory: Path, variant: str) -> Path:
    """A random checkpoint of the variant."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **VARIANTS[variant],
    }
    config = {k: v for k, v in config.items() if v is not None}
    (directory / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(7)
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    qwen2, qwen3 = (config["model_type"] == m for m in ("qwen2", "qwen3"))

    def r(*shape: int, scale: float = 0.2, mean: float = 0.0) -> np.ndarray:
        return (mean + scale * rng.standard_normal(shape)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": r(VOCAB, HIDDEN), "model.norm.weight": r(HIDDEN, mean=1)}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = r(VOCAB, HIDDEN)
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        tensors[p + "input_layernorm.weight"] = r(HIDDEN, mean=1)
        tensors[p + "post_attention_layernorm.weight"] = r(HIDDEN, mean=1)
        for name, rows in (("q", heads), ("k", kv), ("v", kv)):
            tensors[f"{p}self_attn.{name}_proj.weight"] = r(rows * HEAD_DIM, HIDDEN)
            if qwen2:
                tensors[f"{p}self_attn.{name}_proj.bias"] = r(rows * HEAD_DIM)
        if qwen3:
            tensors[p + "self_attn.q_norm.weight"] = r(HEAD_DIM, mean=1)
            tensors[p + "self_attn.k_norm.weight"] = r(HEAD_DIM, mean=1)
        tensors[p + "self_attn.o_proj.weight"] = r(HIDDEN, heads * HEAD_DIM)
        tensors[p + "mlp.gate_proj.weight"] = r(INTER, HIDDEN)
        tensors[p + "mlp.up_proj.weight"] = r(INTER, HIDDEN)
        tensors[p + "mlp.down_proj.weight"] = r(HIDDEN, INTER)
    write_tensors(directory / "model.safetensors", tensors)
    return directory


def plain_logits(directory: Path, ids: list[int]) -> np.ndarray:
    """Logits of every position in float64, one head and one position at a time, without any cache."""
    c = json.loads((directory / "config.json").read_text())
    w = {k: v.astype(np.float64) for k, v in read_checkpoint(directory).items()}
    heads, kv, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    scaling = c.get("rope_scaling") or {}
    theta = (c.get("rope_parameters") or {}).get("rope_theta") or c.get("rope_theta")
    freqs = []
    for k in range(d // 2):
        f = theta ** (-2 * k / d)
        if scaling.get("type") == "linear":
            f /= scaling["factor"]
        if scaling.get("rope_type") == "llama3":
            wave, old = 2 * np.pi / f, scaling["original_max_position_embeddings"]
            low, high = old / scaling["low_freq_factor"], old / scaling["high_freq_factor"]
            if wave > low:
                f /= scaling["factor"]
            elif wave > high:
                s = (old / wave - scaling["low_freq_factor"]) / (
                    scaling["high_freq_factor"] - scaling["low_freq_factor"]
                )
                f = (1 - s) * f / scaling["factor"] + s * f
        freqs.append(f)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + c["rms_norm_eps"]) * weight

    def turn(x: np.ndarray, position: int) -> np.ndarray:
        out = x.copy()
        for k, f in enumerate(freqs):
            a, b, t = x[k], x[k + d // 2], position * f
            out[k], out[k + d // 2] = a * np.cos(t) - b * np.sin(t), b * np.cos(t) + a * np.sin(t)
        return out

    xs = [w["model.embed_tokens.weight"][i].copy() for i in ids]
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        per_head: dict[str, list[list[np.ndarray]]] = {"q": [], "k": [], "v": []}
        for position, x in enumerate(xs):
            h = norm(x, w[p + "input_layernorm.weight"])
            for name, n in (("q", heads), ("k", kv), ("v", kv)):
                y = w[f"{p}self_attn.{name}_proj.weight"] @ h + w.get(f"{p}self_attn.{name}_proj.bias", 0)
                rows = [y[j * d : (j + 1) * d] for j in range(n)]
                if name != "v":
                    if f"{p}self_attn.{name}_norm.weight" in w:
                        rows = [norm(row, w[f"{p}self_attn.{name}_norm.weight"]) for row in rows]
                    rows = [turn(row, position) for row in rows]
                per_head[name].append(rows)
        for position in range(len(xs)):
            mixed = []
            for head in range(heads):
                group = head // (heads // kv)
                scores = np.array(
                    [per_head["q"][position][head] @ per_head["k"][t][group] for t in range(position + 1)]
                )
                weights = np.exp(scores / np.sqrt(d) - (scores / np.sqrt(d)).max())
                weights /= weights.sum()
                mixed.append(sum(a * per_head["v"][t][group] for t, a in enumerate(weights)))
            x = xs[position] + w[p + "self_attn.o_proj.weight"] @ np.concatenate(mixed)
            h = norm(x, w[p + "post_attention_layernorm.weight"])
            gate = w[p + "mlp.gate_proj.weight"] @ h
            xs[position] = x + w[p + "mlp.down_proj.weight"] @ (
                gate / (1 + np.exp(-gate)) * (w[p + "mlp.up_proj.weight"] @ h)
            )
    head_weight = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return np.array([head_weight @ norm(x, w["model.norm.weight"]) for x in xs])


def all_logits(model: LlamaModel, ids: list[int], cuts: list[int]) -> np.ndarray:
    """Logits of every position, the ids given in pieces that end at `cuts`."""
    kv = KvBuffer(model.config, 8)
    parts = np.split(np.array(ids, np.int32), cuts)
    return np.concatenate([model.logits(model.forward([Piece(kv, part)])) for part in parts])


IDS = [int(i) for i in np.random.default_rng(3).integers(3, VOCAB, 40)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_forward_pass_equals_the_plain_one(tmp_path: Path, variant: str) -> None:
    directory = make(tmp_path, variant)
    expected = plain_logits(directory, IDS)
    model = LlamaModel.from_directory(directory)
    for cuts in ([], [7, 8, 30], list(range(20, 40))):
        np.testing.assert_allclose(all_logits(model, IDS, cuts), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_forward_pass_equals_transformers(tmp_path: Path, variant: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory = make(tmp_path, variant)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([IDS])).logits[0].numpy()
    np.testing.assert_allclose(all_logits(LlamaModel.from_directory(directory), IDS, [13]), expected, atol=2e-4)


def test_a_batch_gives_each_sequence_what_it_gets_alone(tmp_path: Path) -> None:
    model = LlamaModel.from_directory(make_toy_model(tmp_path))
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 600, n).astype(np.int32) for n in (1, 5, 300, 40)]
    alone = [model.logits(model.forward([Piece(KvBuffer(model.config, 8), p)]))[-1] for p in prompts]
    hidden = model.forward([Piece(KvBuffer(model.config, 8), p) for p in prompts])
    together = model.logits(hidden[np.cumsum([len(p) for p in prompts]) - 1])
    np.testing.assert_allclose(together, alone, atol=1e-4)


def test_long_prompts_are_read_in_blocks_with_the_same_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LlamaModel.from_directory(make_toy_model(tmp_path))
    ids = [int(i) for i in np.random.default_rng(1).integers(3, 600, 500)]
    expected = all_logits(model, ids, [])
    monkeypatch.setattr("sandlot.engine.embedded.model._SCORES", 4096)
    np.testing.assert_allclose(all_logits(model, ids, [100]), expected, atol=1e-4)


def test_safetensors_are_those_of_the_library(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.standard_normal((3, 4)).astype(np.float32),
        "b": rng.standard_normal(5).astype(np.float16),
        "c": rng.standard_normal((1, 2, 3)),
        "empty": np.zeros((0, 4), np.float32),
    }
    write_tensors(tmp_path / "ours", tensors)
    library.save_file(tensors, str(tmp_path / "theirs"))
    for name, theirs in library.load_file(str(tmp_path / "ours")).items():
        np.testing.assert_array_equal(theirs, tensors[name])
    for name, ours in read_tensors(tmp_path / "theirs").items():
        np.testing.assert_array_equal(ours, tensors[name].astype(np.float32))


def test_bfloat16_is_read_exactly(tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0xC000, 0x4049, 0x0000, 0x7F80], np.uint16)  # 1, -2, 3.140625, 0, inf
    header = json.dumps({"x": {"dtype": "BF16", "shape": [5], "data_offsets": [0, 10]}}).encode()
    (tmp_path / "f").write_bytes(len(header).to_bytes(8, "little") + header + bits.tobytes())
    np.testing.assert_array_equal(read_tensors(tmp_path / "f")["x"], [1, -2, 3.140625, 0, np.inf])


def test_shards_are_read_together(tmp_path: Path) -> None:
    whole = make_toy_model(tmp_path)
    tensors = read_checkpoint(whole)
    names = list(tensors)
    for shard, part in (("one.safetensors", names[::2]), ("two.safetensors", names[1::2])):
        write_tensors(whole / shard, {n: tensors[n] for n in part})
    index = {n: "one.safetensors" if k % 2 == 0 else "two.safetensors" for k, n in enumerate(names)}
    (whole / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (whole / "model.safetensors").unlink()
    again = read_checkpoint(whole)
    assert all(np.array_equal(again[n], tensors[n]) for n in names)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM.*--engine URL"),
        ({"architectures": None}, "none named"),
        ({"sliding_window": 128}, "sliding-window"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "yarn"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"vocab_size": 5}, "vocabulary"),
        ({"num_hidden_layers": 3}, "layers.2"),
    ],
)
def test_a_model_that_cannot_run_is_refused_with_the_reason(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    directory = make_toy_model(tmp_path)
    config = {**json.loads((directory / "config.json").read_text()), **change}
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with pytest.raises(ModelError, match=says):
        LlamaModel.from_directory(directory)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        LlamaModel.from_directory(tmp_path)
    directory = make_toy_model(tmp_path)
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"\xff" * 100):
        weights.write_bytes(damaged)
        with pytest.raises(ModelError, match="not a readable safetensors file"):
            LlamaModel.from_directory(directory)
    weights.unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        LlamaModel.from_directory(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        LlamaModel.from_directory(directory)
