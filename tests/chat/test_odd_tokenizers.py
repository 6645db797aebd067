"""Tokenizers that normalize, put blanks in front, fall back to bytes, or whose tokens eat the blanks beside them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from sandlot.chat.format import TemplateFormat, load_chat_format
from sandlot.chat.messages import Message
from sandlot.chat.probe import TOOLS
from support.chat_templates import SHAPES, write_chat_dir
from support.said import TEXTS, said

Spec = dict[str, Any]


def flagged(**flags: bool) -> Callable[[Spec], Spec]:
    return lambda spec: {**spec, "added_tokens": [{**token, **flags} for token in spec["added_tokens"]]}


def normalized(normalizer: Any) -> Callable[[Spec], Spec]:
    return lambda spec: {**spec, "normalizer": json.loads(normalizer.__getstate__())}


def pieces(scheme: str) -> Callable[[Spec], Spec]:
    """A vocabulary of few pieces and all bytes; the blank in front is a pre-tokenizer's, or a normalizer's."""
    letters = [chr(code) for code in range(33, 127)]
    vocab = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256)), ("▁", -3.0), ("▁▁", -4.0)]
    vocab += [*((letter, -8.0) for letter in letters), *((f"▁{letter}", -7.5) for letter in letters), ("▁user", -5.0)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    if scheme == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made: Spec = json.loads(tokenizer.to_str())

    def change(spec: Spec) -> Spec:
        added = [{**token, "id": len(vocab) + k} for k, token in enumerate(spec["added_tokens"])]
        return {**made, "added_tokens": added}

    return change


KINDS: dict[str, Callable[[Spec], Spec]] = {
    "compatible letters": normalized(normalizers.NFKC()),
    "small letters": normalized(normalizers.Lowercase()),
    "stripped": normalized(normalizers.Strip()),
    "eats before": flagged(lstrip=True),
    "eats after": flagged(rstrip=True),
    "normalized tokens": flagged(normalized=True),
    "whole words": flagged(single_word=True),
    "blank in front": lambda spec: {**spec, "pre_tokenizer": {**spec["pre_tokenizer"], "add_prefix_space": True}},
    "pieces, first": pieces("first"),
    "pieces, always": pieces("always"),
    "pieces, never": pieces("never"),
    "pieces, normalizer": pieces("normalizer"),
    "pieces that eat after": lambda spec: flagged(rstrip=True)(pieces("first")(spec)),
}


def loaded(directory: Path, shape: str, change: Callable[[Spec], Spec]) -> TemplateFormat:
    path = write_chat_dir(directory, SHAPES[shape])
    spec = json.loads((path / "tokenizer.json").read_text())
    (path / "tokenizer.json").write_text(json.dumps(change(spec)))
    chat = load_chat_format(path)
    assert isinstance(chat, TemplateFormat)
    return chat


@pytest.mark.parametrize("shape", ["embedded", "headers", "paired"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_contract_holds(tmp_path: Path, kind: str, shape: str) -> None:
    """Texts become no control tokens, pieces are the whole, and what is new is what a full render ends with."""
    chat, chance = loaded(tmp_path / "m", shape, KINDS[kind]), random.Random(kind)
    control = set(chat.tokenizer.control_ids.values())
    assert chat.can_extend
    for _ in range(12):
        base = [Message("user", chance.choice(TEXTS))]
        for k in range(chance.randint(0, 2)):
            base += said(chance, k, thinks=False)
        turn, *new = said(chance, 9, thinks=False)
        messages = [*base, turn, *new]
        full = list(chat.render(messages, TOOLS))
        text = chat.text(messages, TOOLS)
        assert full == chat.encode(text)
        assert [chat.tokenizer.alias(chat.decode([i])) for i in full if i in control] == chat.tokenizer.controls_in(
            text
        )
        tail = chat.extend(chat.stop_token_ids[:1], [c.name for c in turn.tool_calls], new, TOOLS)
        assert tail is not None
        assert full[-len(tail) :] == tail
