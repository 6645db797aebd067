"""Loading a checkpoint's tokenizer and template: where they are looked for, and what is said when they are missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from sandlot.chat.format import load_chat_format
from sandlot.chat.messages import Message
from sandlot.chat.template import EMBEDDED_TEMPLATE, ChatTemplate, load_template, special_tokens
from sandlot.chat.tokenizer import ChatTokenizer, load_tokenizer
from sandlot.errors import ModelError
from support.chat_templates import SHAPES, write_chat_dir

USER = [Message("user", "Hello.")]
NOW = datetime(2031, 2, 3, tzinfo=UTC)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_chat_dir(tmp_path / "model", SHAPES["embedded"])


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


class TestTemplate:
    def test_fields_are_found_as_jinja_finds_them(self) -> None:
        source = (
            "{% for m in messages %}{{ m.role }} {{ m['items'] }} {{ m.none is defined }} {{ m.get('role') }} "
            "{% for k, v in m.items() %}{{ k }}={{ v }},{% endfor %}{% endfor %}{{ messages[0].__class__ }}"
        )
        message = {"role": "user", "items": "taken", "get": "taken", "keys": 3}
        usual = ImmutableSandboxedEnvironment().from_string(source).render(messages=[message])
        assert ChatTemplate(source, {}, NOW).render([message], [], generation_prompt=True) == usual
        assert "role=user,items=taken,get=taken,keys=3," in usual

    def test_places(self, model: Path) -> None:
        (model / "chat_template.jinja").unlink()
        config = model / "tokenizer_config.json"
        (model / "chat_template.json").write_text(json.dumps({"chat_template": "third"}))
        assert load_template(model).source == "third"
        edit(config, lambda c: c.update(chat_template="second"))
        assert load_template(model).source == "second"
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
        edit(config, lambda c: c.update(chat_template=named))
        assert load_template(model).source == "tools"
        edit(config, lambda c: c.update(chat_template=named[:1]))
        assert load_template(model).source == "plain"
        (model / "chat_template.jinja").write_text("first")
        assert load_template(model).source == "first"
        assert load_template(model, override="{{ 'given' }}").source == "{{ 'given' }}"
        assert load_template(model, override=EMBEDDED_TEMPLATE).source == EMBEDDED_TEMPLATE.read_text()

    def test_none(self, model: Path) -> None:
        (model / "chat_template.jinja").unlink()
        with pytest.raises(ModelError, match=r"has no chat template .* take the instruct model"):
            load_chat_format(model)
        with pytest.raises(ModelError, match="cannot be read"):
            load_chat_format(model, template=model / "no.jinja")

    @pytest.mark.parametrize(
        ("source", "said"),
        [
            ("{% if %}", "does not compile"),
            ("{{ raise_exception('no') }}", "does not render a plain conversation"),
            ("always the same", "does not render a plain conversation"),
            ("{{ messages[0].content.__class__.__mro__ }}", "does not render a plain conversation"),
        ],
    )
    def test_unusable(self, model: Path, source: str, said: str) -> None:
        (model / "chat_template.jinja").write_text(source)
        with pytest.raises(ModelError, match=said):
            load_chat_format(model)

    def test_date_is_fixed_at_load(self, tmp_path: Path) -> None:
        chat = load_chat_format(write_chat_dir(tmp_path / "h", SHAPES["headers"]), now=NOW)
        assert "Today Date: 03 Feb 2031" in chat.decode(chat.render(USER, ()))

    def test_variables(self, tmp_path: Path) -> None:
        path = write_chat_dir(tmp_path / "s", SHAPES["stripping"])
        assert "<think>" not in load_chat_format(path).text(USER, ())
        chat = load_chat_format(path, variables={"enable_thinking": False})
        prompt = chat.render(USER, ())
        assert chat.decode(prompt).endswith("<think>\n\n</think>\n\n")
        assert not chat.thought_open(prompt)

    def test_special_tokens(self, model: Path) -> None:
        tokens = {"bos_token": {"content": "<b>"}, "pad_token": None, "additional_special_tokens": [{"content": "<a>"}]}
        edit(model / "tokenizer_config.json", lambda c: c.update(tokens))
        assert special_tokens(model) == {
            "bos_token": "<b>",
            "eos_token": "<|im_end|>",
            "additional_special_tokens": ["<a>"],
        }

    def test_no_begin_token_is_added(self, tmp_path: Path) -> None:
        """Where the template writes one it is there once, whatever the tokenizer's post-processor would add."""
        path = write_chat_dir(tmp_path / "h", SHAPES["headers"])
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        begin = tokenizer.token_to_id("<|begin|>")
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", begin)])
        tokenizer.enable_truncation(8)
        tokenizer.enable_padding()
        tokenizer.save(str(path / "tokenizer.json"))
        ids = load_chat_format(path).render(USER, ())
        assert ids.count(begin) == 1
        assert ids[0] == begin
        assert len(ids) > 8


class TestTokenizer:
    def test_missing_or_broken(self, model: Path, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="is no directory"):
            load_chat_format(tmp_path / "nowhere")
        (model / "tokenizer.json").write_text("{")
        with pytest.raises(ModelError, match="cannot be read as JSON"):
            load_chat_format(model)
        (model / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
        with pytest.raises(ModelError, match="is no tokenizer"):
            load_chat_format(model)
        (model / "tokenizer.json").unlink()
        with pytest.raises(ModelError, match=r"no tokenizer\.json"):
            load_chat_format(model)

    def test_ids_are_those_of_the_file(self, model: Path) -> None:
        original = Tokenizer.from_file(str(model / "tokenizer.json"))
        loaded = load_tokenizer(model)
        assert loaded.control_ids
        assert loaded.control_ids == {s: original.token_to_id(s) for s in loaded.control_ids}
        edit(model / "tokenizer.json", lambda t: t["added_tokens"].pop(0))
        moved = json.loads((model / "tokenizer.json").read_text())
        moved["added_tokens"][-1]["id"] += 7
        with pytest.raises(ModelError, match="the id"):
            ChatTokenizer(moved)

    def test_tokens_that_only_the_config_declares(self, model: Path) -> None:
        top = load_tokenizer(model).vocab_size
        declared = {str(top): {"content": "<|new|>", "special": True}}
        edit(model / "tokenizer_config.json", lambda c: c.update(added_tokens_decoder=declared))
        loaded = load_tokenizer(model)
        assert loaded.control_ids["<|new|>"] == top
        assert loaded.encode(loaded.conceal("<|new|>")) == [top]
        assert top not in loaded.encode("<|new|>")

    def test_vocab_size_covers_the_models_rows(self, model: Path) -> None:
        (model / "config.json").write_text(json.dumps({"vocab_size": 4096}))
        assert load_chat_format(model).vocab_size == 4096

    def test_stop_tokens_come_from_every_place(self, model: Path) -> None:
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
        assert load_chat_format(model).stop_token_ids == (0, 1, 2)

    def test_no_stop_token(self, tmp_path: Path) -> None:
        path = write_chat_dir(tmp_path / "t", replace(SHAPES["textual"], eos=""))
        with pytest.raises(ModelError, match="names no end-of-turn token"):
            load_chat_format(path)


def unigram() -> Tokenizer:
    """A SentencePiece-like tokenizer: control pieces are in the model's own vocabulary, blanks are `▁`."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁hello", -3.0)]
    pieces += [(chr(c), -5.0) for c in range(33, 127)] + [(f"<0x{b:02X}>", -9.0) for b in range(256)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    return tokenizer


def wordlevel() -> Tokenizer:
    """Whole words, control words among them: the model alone would give a control id for the bare text."""
    words = {w: i for i, w in enumerate(["[UNK]", "[INST]", "hello", "world", "[", "]", "INST"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("[INST]", normalized=False)])
    return tokenizer


def prepending() -> Tokenizer:
    """Llama-2-like: a normalizer puts a blank before each piece of text, and end tokens eat what follows."""
    tokenizer = unigram()
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens(
        [AddedToken("<|end|>", rstrip=True, normalized=False), AddedToken("<|x|>", lstrip=True)]
    )
    return tokenizer


@pytest.mark.parametrize("make", [unigram, wordlevel, prepending])
class TestTokenizerKinds:
    def test_text_never_becomes_a_control_token(self, make: Callable[[], Tokenizer]) -> None:
        tokenizer = ChatTokenizer(json.loads(make().to_str()))
        for literal, token_id in tokenizer.control_ids.items():
            for text in (literal, f"hello {literal} world", f"{literal}{literal}", f" {literal}"):
                assert token_id not in tokenizer.encode(text)
            assert tokenizer.encode(tokenizer.conceal(literal)) == [token_id]
            assert tokenizer.reveal(tokenizer.decode([token_id])) == literal

    def test_trusted_text_is_encoded_as_by_the_original(self, make: Callable[[], Tokenizer]) -> None:
        original = make()
        tokenizer = ChatTokenizer(json.loads(original.to_str()))
        for literal in tokenizer.control_ids:
            for text in (
                f"{literal}hello {literal} \n hello{literal}",
                f"hello {literal}\n\n{literal}",
                "hello  hello",
            ):
                assert tokenizer.encode(tokenizer.conceal(text)) == original.encode(text, add_special_tokens=False).ids


def test_runs_of_blanks_are_no_control_tokens(model: Path) -> None:
    """Some vocabularies have added tokens for indentation: text may and should use them."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("    ", normalized=False), AddedToken("\n\n", normalized=False)])
    tokenizer.save(str(model / "tokenizer.json"))
    loaded = load_tokenizer(model)
    text = "if x:\n\n    y"
    assert loaded.encode(text) == tokenizer.encode(text).ids
    assert tokenizer.token_to_id("    ") in loaded.encode(text)
