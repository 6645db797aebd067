"""A checkpoint's tokenizer in which control tokens can be asked for, but never spelled.

Every control token (an added token that is not just whitespace) is renamed, in a private copy of the vocabulary,
to an alias that nobody outside this process can know. Text is therefore encoded as text whatever it spells, by
any tokenizer model, and joins with its neighbours as the original tokenizer would have it; where the template
writes a control token the alias is put in its place. Decoding gives aliases too, so a parser can tell a sampled
control token from text that looks like one.
"""

from __future__ import annotations

import json
import re
import secrets
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sandlot.chat.literals import Guard, Literals
from sandlot.chat.segments import Segments
from sandlot.errors import ModelError
from sandlot.ids import Piece, PromptIds


class ChatTokenizer:
    """Encodes text, and text with control tokens in alias form. Thread-safe; encoding frees the interpreter lock."""

    def __init__(self, spec: dict[str, Any], model_vocab_size: int = 0) -> None:
        aliases = _aliases(spec)
        self._tokenizer = Tokenizer.from_str(json.dumps(_renamed(spec, aliases)))
        self.control_ids: dict[str, int] = {}
        for literal, alias in aliases.items():
            if (token_id := self._tokenizer.token_to_id(alias)) is None:
                raise ModelError(f"tokenizer.json names the token {literal!r} but gives it no id; export it anew")
            self.control_ids[literal] = token_id
        self._alias_of = aliases
        self._literal_of = {alias: literal for literal, alias in aliases.items()}
        self.literals = Literals(aliases)
        nonce = next(iter(self._literal_of), "(?!)..")[:-2]
        self._any_alias = re.compile(f"{nonce}.\U0010fffd")
        self._nonce = nonce
        self._segments = Segments(self._encode_all)
        self._control_pieces = {literal: Piece([token_id]) for literal, token_id in self.control_ids.items()}
        self._after_nonce = {alias[-2:]: self._control_pieces[literal] for literal, alias in aliases.items()}
        self._splits = self._control_tokens_part_text(spec)
        self._check_ids(spec)
        top = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.vocab_size = max(top, model_vocab_size)

    def _check_ids(self, spec: dict[str, Any]) -> None:
        for token in spec.get("added_tokens") or ():
            literal, wanted = token["content"], token.get("id")
            if literal in self.control_ids and wanted is not None and wanted != self.control_ids[literal]:
                raise ModelError(
                    f"tokenizer.json gives {literal!r} the id {wanted}, but loading it gives "
                    f"{self.control_ids[literal]}; export the tokenizer anew with save_pretrained"
                )

    def vocabulary(self) -> dict[str, int]:
        """Tokens of the model, as it spells them, with their ids; without added tokens."""
        return self._tokenizer.get_vocab(with_added_tokens=False)

    def alias(self, literal: str) -> str:
        """The string that stands for a control token; the literal itself where the vocabulary has no such token."""
        return self._alias_of.get(literal, literal)

    def conceal(self, text: str) -> str:
        """Trusted text with its control strings, longest first, replaced by their aliases."""
        return self.literals.longest.sub(lambda m: self._alias_of[m.group()], text)

    def reveal(self, text: str) -> str:
        """Text with aliases replaced by the control strings they stand for."""
        return self._any_alias.sub(lambda m: self._literal_of.get(m.group(), m.group()), text)

    def controls_in(self, text: str) -> list[str]:
        """The aliases in a text, in order."""
        return [m.group() for m in self._any_alias.finditer(text)]

    def encode(self, text: str) -> list[int]:
        """Ids of text in which only aliases are control tokens. No begin or end token is added."""
        if not self._splits:
            return list(self._encode_all([text])[0])
        first, *others = text.split(self._nonce)
        pieces = self._pieces([first, *(other[2:] for other in others)], [self._after_nonce[o[:2]] for o in others])
        ids = array("i")
        for piece in pieces:
            ids.extend(piece.ids)
        return ids.tolist()

    def prompt(self, text: str, guard: Guard) -> PromptIds:
        """Ids of trusted text with its control strings as they are spelled, but for those that the guard has cut.

        The same as `encode(guard.clean(conceal(text)))`, without putting the text of a whole prompt together anew.
        """
        if not self._splits:
            return PromptIds.of(self.encode(guard.clean(self.conceal(text))))
        stretches, controls = self.literals.split(text)
        if guard.marker:
            stretches = [guard.clean(stretch) for stretch in stretches]
        return PromptIds.joined(self._pieces(stretches, [self._control_pieces[literal] for literal in controls]))

    def _pieces(self, stretches: list[str], controls: list[Piece]) -> list[Piece]:
        """Stretches of text and the control tokens between them."""
        pieces = [_NOTHING] * (len(stretches) + len(controls))
        pieces[::2] = self._segments.pieces(stretches)
        pieces[1::2] = controls
        return pieces

    def _encode_all(self, texts: list[str]) -> list[Sequence[int]]:
        try:
            encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):  # a lone surrogate, which JSON can carry and UTF-8 cannot
            texts = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
            encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [each.ids for each in encoded]

    def _control_tokens_part_text(self, spec: dict[str, Any]) -> bool:
        """Whether text on either side of a control token is encoded as if it stood alone, found out by trying."""
        tokens = [t for t in spec.get("added_tokens") or () if t["content"] in self._alias_of]
        if not tokens or any(t.get(flag) for t in tokens for flag in ("lstrip", "rstrip")):
            return False
        for literal in list(self._alias_of)[:8]:
            alias, token_id = self._alias_of[literal], self.control_ids[literal]
            for left, right in _SIDES:
                whole, before, after = self._encode_all([f"{left}{alias}{right}", left, right])
                if list(whole) != [*before, token_id, *after]:
                    return False
        return True

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens as aliases; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def load_tokenizer(model_dir: Path) -> ChatTokenizer:
    """Read `tokenizer.json` (and tokens that only `tokenizer_config.json` declares) of a checkpoint directory."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{model_dir} has no tokenizer.json; save the fast tokenizer there with "
            f"AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    spec = read_json(path)
    declared = spec.setdefault("added_tokens", [])
    known = {t["content"] for t in declared}
    extra = read_json(model_dir / "tokenizer_config.json").get("added_tokens_decoder") or {}
    for token_id, token in sorted(extra.items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            flags = {flag: token.get(flag, False) for flag in _FLAGS}
            declared.append({"id": int(token_id), **flags, "content": token["content"]})
    config = read_json(model_dir / "config.json")
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size") or 0
    try:
        return ChatTokenizer(spec, size)
    except ModelError:
        raise
    except Exception as e:  # the tokenizers library raises bare Exception
        raise ModelError(f"{path} is no tokenizer that the tokenizers library can load ({e}); export it anew") from e


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise ModelError(f"{path} cannot be read as JSON ({e}); download or save the model again") from e
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object; download or save the model again")
    return value


_SIDES = (("", "word"), ("word", ""), ("word ", " word"), ("a\n", "\n\nb"), ("1", "2"), ("  ", "x  "), ("é", "日本"))
"""What stands before and after a control token to find out whether it parts them."""

_NOTHING = Piece(())

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def is_control(literal: str) -> bool:
    """Whether an added token is markup. Runs of blanks and single characters are ordinary text in some vocabularies."""
    return len(literal) > 1 and not literal.isspace()


def _aliases(spec: dict[str, Any]) -> dict[str, str]:
    literals = [t["content"] for t in spec.get("added_tokens") or () if is_control(t["content"])]
    # Plane 16 is private use and in no model's vocabulary; 8 random characters of it cannot be guessed.
    nonce = "".join(chr(0x100000 + secrets.randbelow(0xFFF0)) for _ in range(8))
    return {s: f"{nonce}{chr(0x100000 + i)}\U0010fffd" for i, s in enumerate(dict.fromkeys(literals))}


def _renamed(spec: dict[str, Any], aliases: dict[str, str]) -> dict[str, Any]:
    """The tokenizer with aliases for control strings, and without truncation, padding and post-processing."""
    model = dict(spec["model"])
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {aliases.get(piece, piece): token_id for piece, token_id in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[aliases.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in aliases:
        model["unk_token"] = aliases[model["unk_token"]]
    # An alias is matched on the raw text, whatever stands beside it: what it stands for was told apart before.
    as_written = {"normalized": False, "single_word": False}
    added = [
        {**t, "content": aliases[t["content"]], **as_written} if t["content"] in aliases else t
        for t in spec.get("added_tokens") or ()
    ]
    return {**spec, "model": model, "added_tokens": added, "truncation": None, "padding": None, "post_processor": None}
