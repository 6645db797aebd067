"""A tiny but whole chat model, made in a second: trained byte-level BPE, ChatML tokens, random Llama, our template."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from sandlot.engine.embedded.tensors import write_tensors

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKER_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
MAX_CONTEXT = 131_072
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 64, 2, 2, 1, 32, 128

_CORPUS = """\
You are a coding agent. You are an expert coding assistant working in a repository. Fix the bug and run the tests.
system user assistant tool function name arguments command description parameters properties required type string
{"name": "bash", "arguments": {"command": "ls -la && cat README.md"}} {"name": "edit", "arguments": {"path": "a.py"}}
{"type": "function", "function": {"name": "read", "description": "Read a file", "parameters": {"type": "object"}}}
def add(a: int, b: int) -> int: return a + b
class Parser: def __init__(self, text): self.text = text
import os, sys, re, json; from pathlib import Path; for line in open(path): print(line.strip())
if __name__ == "__main__": main() else: raise ValueError("wrong value") try: except: finally: assert True
hello hello hello world the quick brown fox jumps over the lazy dog; let me look at the files first, then I will
sed -i 's/old/new/' src/module.py; git status; git diff; python -m pytest -q tests/test_module.py; grep -rn pattern .
The test fails because the function returns the wrong result. Now the tests pass. Done. I think that this is right.
"""


def train_tokenizer(vocab_size: int = 640) -> Tokenizer:
    """A byte-level BPE tokenizer over a fixed corpus; every byte is in it, so any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKER_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS.splitlines(keepends=True), trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKER_TOKENS])
    return tokenizer


def chat_template() -> str:
    """The embedded model's own template."""
    return (files("sandlot.chat") / "templates" / "embedded.jinja").read_text(encoding="utf-8")


def make_toy_model(
    directory: Path, *, seed: int = 0, max_context: int = MAX_CONTEXT, template: str | None = None
) -> Path:
    """Write a Hugging Face checkpoint into `directory` (made if absent) and return it. Same arguments, same model."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    vocab = tokenizer.get_vocab_size(with_added_tokens=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    template = chat_template() if template is None else template
    end, start, pad = (tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|im_start|>", "<|endoftext|>"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_context,
        },
    )
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    ids = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": pad}
    _write_json(directory / "generation_config.json", ids)
    _write_json(
        directory / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "max_position_embeddings": max_context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "vocab_size": vocab,
            **ids,
        },
    )
    rng = np.random.default_rng(seed)

    def normal(*shape: int, std: float = 0.15) -> np.ndarray:
        return (rng.standard_normal(shape) * std).astype(np.float32)

    tensors = {"model.embed_tokens.weight": normal(vocab, HIDDEN)}
    for layer in range(LAYERS):
        p = f"model.layers.{layer}."
        tensors |= {
            p + "input_layernorm.weight": 1 + normal(HIDDEN, std=0.05),
            p + "self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM),
            p + "post_attention_layernorm.weight": 1 + normal(HIDDEN, std=0.05),
            p + "mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN),
            p + "mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN),
            p + "mlp.down_proj.weight": normal(HIDDEN, INTERMEDIATE),
        }
    tensors["model.norm.weight"] = 1 + normal(HIDDEN, std=0.05)
    write_tensors(directory / "model.safetensors", tensors)
    return directory


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
