"""Chat formats of known model families, rendered by the `renderers` library behind our own contract.

The library writes what a family's template writes without running it, and knows how a sampled turn goes on. What it
does not promise is added here: control strings in untrusted text stay text; every continuation is checked to begin
with what it continues, and a turn that the library declines is continued from a stand-in for it, since only the end of
a turn decides what follows; replies are read by our own parser wherever it knows the family's form of calls, so that a
model is read alike with and without the library.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from importlib import import_module
from typing import Any

from sandlot.chat.family_names import FAMILIES, Family
from sandlot.chat.family_replies import read_parsed
from sandlot.chat.harmony import vocabulary_at_hand
from sandlot.chat.literals import Guard
from sandlot.chat.markers import markup_of
from sandlot.chat.messages import Message, Reply, Tool
from sandlot.chat.native_ids import answer_with_sampled_ids, with_native_ids
from sandlot.chat.probe import find_traits
from sandlot.chat.replies import ReplyReader, unreadable
from sandlot.chat.roles import Traits, conform, template_messages, untrusted_texts
from sandlot.chat.template import TemplateError
from sandlot.chat.tokenizer import ChatTokenizer
from sandlot.errors import MissingDependencyError, ModelError

log = logging.getLogger("sandlot.chat")

_USER = Message("user", "Go on.")


@dataclass(frozen=True)
class _Pass:
    """One call into the library: the guard of its conversation, and whether the library may decode."""

    guard: Guard
    decodes: bool


_pass: ContextVar[_Pass | None] = ContextVar("pass", default=None)


class FamilyFormat:
    """A `ChatFormat` over one of the library's renderers. Pure and thread-safe after loading."""

    def __init__(
        self, name: str, tokenizer: ChatTokenizer, family: Family, renderer: Any, stops: Sequence[int]
    ) -> None:
        self.name = name
        self.family = family
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.renderer = renderer
        self.stop_token_ids = tuple(dict.fromkeys([*renderer.get_stop_token_ids(), *stops]))
        self.markup = replace(markup_of(tokenizer, "", family.form), xml=family.xml)
        self.replies = ReplyReader(tokenizer, self.markup, self.stop_token_ids)
        self.traits = Traits(native_ids=family.form == "kimi")
        self.traits = find_traits(
            f"{name} (as family {family.name})",
            lambda messages, tools: self.decode(self._render(messages, tools)),
            native_ids=self.traits.native_ids,
        )
        self.can_extend = False
        self.forgets_at: frozenset[str] = frozenset()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Ids of the whole prompt, ending with the generation prompt."""
        shown = with_native_ids(messages) if self.traits.native_ids else messages
        return self._render(conform(shown, self.traits), tools)

    def extend(
        self,
        last_output: Sequence[int],
        call_names: Sequence[str],
        new: Sequence[Message],
        tools: Sequence[Tool],
    ) -> list[int] | None:
        """Ids that follow a sampled turn; None where the library declines, or thoughts are to be left out."""
        if any(m.role in self.forgets_at for m in new):
            return None
        new = conform(new, self.traits, head=False)
        if self.traits.native_ids:
            new = answer_with_sampled_ids(new, self.decode(last_output))
        closed = list(last_output[-1:]) if last_output and last_output[-1] in self.stop_token_ids else []
        for output in (list(last_output), *([*answer, *closed] for answer in self.stand_ins)):
            with suppress(TemplateError):
                if (ids := self._bridge(output, new)) is not None:
                    return ids
        return None

    def parse(
        self, output_ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[Tool], *, truncated: bool
    ) -> Reply:
        """Take a sampled answer apart: by our own parser where it knows the family's form, else by the library's."""
        if self.family.form:
            return self.replies.read(output_ids, prompt_ids, tools, truncated=truncated)
        functions = [t.as_function() for t in tools]
        try:
            parsed = self.renderer.parse_response(list(output_ids), tools=functions, prompt_ids=list(prompt_ids))
        except Exception as e:  # the library fails on what it does not expect, such as nesting without end
            log.warning("%s: the family %s cannot read an answer (%s)", self.name, self.family.name, e)
            return unreadable(self.decode(self.replies.without_stop(output_ids)), truncated=truncated)
        return read_parsed(parsed, tools, truncated=truncated)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; special-token strings in it stay text."""
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self.tokenizer.reveal(self.tokenizer.decode(ids))

    @cached_property
    def _opening(self) -> list[int]:
        """A short prompt in place of the real one: of a prompt only its end matters to what follows a turn."""
        return self._render([_USER], ())

    @cached_property
    def stand_ins(self) -> list[list[int]]:
        """Sampled answers without calls whose thought is closed, in whichever way the family has it."""
        opening, closing = self.markup.think_open, self.markup.think_close
        opened = self.replies.thought_open(self._opening)
        texts = [f"{closing}Done."] if opened else ["Done.", f"{opening}{closing}Done."]
        return [self.tokenizer.encode(text) for text in texts]

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        with self._guarded(messages, tools, decodes=False) as (shown, functions), _refusals():
            ids: list[int] = self.renderer.render_ids(shown, tools=functions, add_generation_prompt=True)
        return ids

    def _bridge(self, output: list[int], new: Sequence[Message]) -> list[int] | None:
        """What the library puts after `output`; None where it declines, or does not leave what it continues alone.

        It is not given the tools: it would not notice others, and a session that offers others is another branch.
        """
        before = [*self._opening, *output]
        with self._guarded(new, ()) as (shown, _), _refusals():
            result = self.renderer.bridge_to_next_turn(list(self._opening), list(output), shown)
        if result is None or list(result.token_ids[: len(before)]) != before:
            return None
        return list(result.token_ids[len(before) :])

    @contextmanager
    def _guarded(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, decodes: bool = True
    ) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
        """The conversation as the library takes it, its control strings cut until `FamilyTokenizer` has seen them."""
        functions = [t.as_function() for t in tools]
        if self.family.encodes_itself:
            guard = Guard(self.tokenizer.literals, ())
        else:
            guard = Guard(self.tokenizer.literals, untrusted_texts(messages, functions))
        shown = template_messages(messages, guard, native_ids=self.traits.native_ids, all_names=False)
        token = _pass.set(_Pass(guard, decodes))
        try:
            yield shown, guard.value(functions) or None
        finally:
            _pass.reset(token)


class FamilyTokenizer:
    """What the library asks of a tokenizer, over ours: the strings that it writes itself may be control tokens."""

    def __init__(self, tokenizer: ChatTokenizer, name: str) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = name
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = None

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        """Ids of text in which control strings are control tokens, but for those that the guard has cut."""
        concealed, current = self._tokenizer.conceal(text), _pass.get()
        return self._tokenizer.encode(current.guard.clean(concealed) if current else concealed)

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        """Text of ids, control tokens as they are spelled.

        Not while a prompt is written: some renderers then only look for which token came from where, which nobody asks
        for here, and which takes quadratic time where the guard has cut the text.
        """
        if (current := _pass.get()) is not None and not current.decodes:
            raise NotImplementedError
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.reveal(self._tokenizer.decode(ids))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Id of a control token, None where there is none; a list for a list."""
        if isinstance(tokens, str):
            return self._tokenizer.control_ids.get(tokens)
        return [self._tokenizer.control_ids.get(t) for t in tokens]


@contextmanager
def _refusals() -> Iterator[None]:
    """The library refuses conversations with whatever error comes; for us they are all the same."""
    try:
        yield
    except Exception as e:
        raise TemplateError(f"the model's family does not take this conversation: {e}") from e


def family_formats(
    name: str,
    tokenizer: ChatTokenizer,
    family: str,
    stops: Sequence[int],
    *,
    variables: Mapping[str, Any],
    now: datetime,
    form: str = "",
) -> Iterator[FamilyFormat]:
    """The formats that a family can have for this checkpoint: where the caller leaves thinking open, on and off.

    `MissingDependencyError` without the library, `ModelError` where the vocabulary lacks the family's tokens.
    """
    create, config_from_name = _module("renderers").create_renderer, _module("renderers.configs").config_from_name
    known = FAMILIES.get(family) or Family(family)
    known = replace(known, form=form or known.form)
    base = config_from_name(family)
    fields = set(type(base).model_fields) if base else set()
    settings = {k: v for k, v in variables.items() if k in fields}
    if "date_string" in fields:
        settings.setdefault("date_string", now.strftime("%d %b %Y"))
    if "conversation_start_date" in fields:
        settings.setdefault("conversation_start_date", now.strftime("%Y-%m-%d"))
    settings["thinking_retention"] = "all"  # what is forgotten, and when, is decided by `forgets_at`
    switch = next((f for f in ("enable_thinking", "thinking") if f in fields and f not in settings), "")
    failed: Exception | None = None
    made = False
    for value in (None, True, False) if switch else (None,):
        try:
            config = type(base)(**settings, **({} if value is None else {switch: value}))
            with vocabulary_at_hand(tokenizer.vocabulary()) if known.encodes_itself else nullcontext():
                renderer = create(FamilyTokenizer(tokenizer, name), config)
            chat = FamilyFormat(name, tokenizer, known, renderer, stops)
        except Exception as e:  # a missing token is an AssertionError there, a missing vocabulary file whatever it is
            failed = e
            continue
        made = True
        yield chat
    if not made:
        raise ModelError(f"{name} cannot be used as a model of the family {family!r} ({failed}); give another family")


def library_families() -> list[str]:
    """The families that the installed library knows."""
    base = _module("renderers.base")
    base._populate_registry()
    return sorted(name for name in base.RENDERER_REGISTRY if name != "default")


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as e:
        raise MissingDependencyError("renderers", "families") from e
