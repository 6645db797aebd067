"""The chat format of any checkpoint with a Jinja template: full and delta rendering, and parsing.

Delta rendering renders a short synthetic conversation (a user, an assistant with a sentinel text and calls of the
right names, then the new messages) and keeps what stands after the close of the sentinel's turn. Nothing that was
sampled is in it. `self_check` proves at load, on probe conversations, that this equals full renders.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

from sandlot.chat.literals import Literals
from sandlot.chat.markers import markup_of
from sandlot.chat.markup import skip_blanks
from sandlot.chat.messages import Message, Reply, Tool, ToolCall
from sandlot.chat.native_ids import answer_with_sampled_ids, calls_before, with_native_ids
from sandlot.chat.rendering import Rendering
from sandlot.chat.replies import ReplyReader
from sandlot.chat.roles import Traits, conform
from sandlot.chat.synthetic import named, pairings, synthetic_turn, unused
from sandlot.chat.template import ChatTemplate, TemplateError
from sandlot.chat.tokenizer import ChatTokenizer
from sandlot.errors import ModelError
from sandlot.ids import PromptIds

_USER = Message("user", "Go on.")
_HALF_AN_ALIAS = re.compile("[\U00100000-\U0010fffc]+$")


class TemplateFormat:
    """A `ChatFormat` over a tokenizer and a chat template. Pure and thread-safe after loading."""

    def __init__(
        self,
        name: str,
        tokenizer: ChatTokenizer,
        template: ChatTemplate,
        traits: Traits,
        stops: Sequence[int],
        form: str = "",
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.template = template
        self.traits = traits
        literals = tokenizer.literals
        self._kept = Literals([*literals.all, *traits.switches]) if traits.switches else literals
        self.vocab_size = tokenizer.vocab_size
        self.markup = markup_of(tokenizer, template.source, form)
        if self.markup.xml:
            self.markup = replace(self.markup, padded=self._pads_values())
        opening, closing = re.escape(self.markup.think_open), re.escape(self.markup.think_close)
        self._thoughts = re.compile(rf"(?s){opening}.*?{closing}\s*")
        self._stops = frozenset(stops)
        self.text_after_results = self._shows_text_after_results()
        self._always_prompts = self._text([_USER], ()) == self._text([_USER], (), generation_prompt=False)
        self._turn_close = lru_cache(maxsize=64)(self._find_turn_close)
        closes = [ids[0] for n in (0, 1) if len(ids := self._close_ids(n)) == 1]
        self._closes = frozenset(closes)
        self.stop_token_ids = tuple(dict.fromkeys([*stops, *closes]))
        self.replies = ReplyReader(tokenizer, self.markup, self.stop_token_ids)
        if not self.stop_token_ids:
            raise ModelError(
                f"{name} names no end-of-turn token; set eos_token_id in its generation_config.json, "
                f"or else nothing would end a turn but the token limit"
            )
        self.can_extend = False
        self.tail_needs_tools = True
        self.numbers_calls = False
        self.forgets_at: frozenset[str] = frozenset()
        self.declines_at: frozenset[str] = frozenset()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> PromptIds:
        """Ids of the whole prompt, ending with the generation prompt."""
        return self._rendering.prompt(self._native(messages), tools)

    def extend(
        self,
        last_output: Sequence[int],
        call_names: Sequence[str],
        new: Sequence[Message],
        tools: Sequence[Tool],
    ) -> list[int] | None:
        """Ids that follow a sampled turn: its close where the sample lacks a stop token, `new`, the generation prompt.

        Results without a `tool_name` take the names in `call_names` in order. None where a message in `new` makes the
        template leave out earlier thoughts, and that is wanted (`forgets_at`), or rewrite what came before it
        (`declines_at`); and where only the opening of the next message closes a turn, and the model has sampled that
        of another.
        """
        if any(m.role in self.forgets_at or m.role in self.declines_at for m in new):
            return None
        new = named(conform(new, self.traits, head=False), call_names)
        if self.traits.native_ids:
            new = answer_with_sampled_ids(new, self.decode(last_output))
        before = calls_before(self.decode(last_output)) if self.numbers_calls else 0
        text, opens = self._tail(call_names, new, tools if self.tail_needs_tools else (), before)
        ids = self.tokenizer.encode(text)
        if not last_output or last_output[-1] not in self.stop_token_ids:
            return ids
        if opens and last_output[-1] != ids[0]:  # the model has opened another message than the one that comes
            return None
        # Where a call is closed by another token than a text, what closes the one does not close the other.
        return ids if ids[0] in self._closes and last_output[-1] in self._closes - {ids[0]} else ids[1:]

    def parse(
        self, output_ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[Tool], *, truncated: bool
    ) -> Reply:
        """Take a sampled answer apart; see `sandlot.chat.parse` for what is trimmed and kept."""
        return self.replies.read(output_ids, prompt_ids, tools, truncated=truncated)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; special-token strings in it stay text."""
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self.tokenizer.reveal(self.tokenizer.decode(ids))

    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, generation_prompt: bool = True) -> str:
        """The rendered conversation, with aliases where the template wrote control tokens."""
        return self._text(self._native(messages), tools, generation_prompt)

    def thought_open(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the generation prompt opens a thought and leaves it open."""
        return self.replies.thought_open(prompt_ids)

    @property
    def _rendering(self) -> Rendering:
        return Rendering(self.tokenizer, self.template, self.traits, self._kept)

    def _native(self, messages: Sequence[Message]) -> Sequence[Message]:
        return with_native_ids(messages) if self.traits.native_ids else messages

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool], generation_prompt: bool = True) -> str:
        return self._rendering.text(messages, tools, generation_prompt=generation_prompt)

    def without_thoughts(self, text: str) -> str:
        """A rendered text without the thoughts in it."""
        return self._thoughts.sub("", text)

    def _turn(self, sentinel: str, calls: tuple[ToolCall, ...]) -> Message:
        return synthetic_turn(sentinel, calls, shows_text=not self.text_after_results)

    def _shows_text_after_results(self) -> bool:
        """Whether the text of a turn with calls is moved behind their results, where no model has written it."""
        sentinel, result = unused((), ()), "What came back."
        turn = Message("assistant", sentinel, tool_calls=(ToolCall("probe", {}, "c0"),))
        try:
            text = self._text([_USER, turn, Message("tool", result, tool_call_id="c0", tool_name="probe"), _USER], ())
        except TemplateError:
            return False
        return 0 <= text.find(result) < text.find(sentinel)

    def _tail(
        self, call_names: Sequence[str], new: Sequence[Message], tools: Sequence[Tool], before: int
    ) -> tuple[str, bool]:
        """What a template writes from the close of a turn on, close included, and whether that opens what follows."""
        failed: TemplateError | None = None
        for calls in pairings(call_names, new):
            try:
                return self._render_tail(calls, new, tools, before)
            except TemplateError as e:
                failed = failed or e
        raise failed or TemplateError("the model's chat template cannot be continued")

    def _render_tail(
        self, calls: tuple[ToolCall, ...], new: Sequence[Message], tools: Sequence[Tool], before: int
    ) -> tuple[str, bool]:
        close, count, body = self._turn_close(len(calls))
        sentinel = unused(new, tools)
        earlier = tuple(ToolCall("probe", {}, f"before{k}") for k in range(before))
        head = [_USER, Message("assistant", tool_calls=earlier)] if earlier else []
        text = self._text([*head, _USER, self._turn(sentinel, calls), *new], tools)
        at = text.rfind(sentinel)
        if at < 0:
            raise TemplateError(f"the chat template of {self.name} does not show a turn; render in full")
        at += len(sentinel)
        if not close:
            return text[self._opening(text, at, body) :], True
        at -= len(close)
        for _ in range(count):
            at = text.find(close, at + len(close))
            if at < 0:
                raise TemplateError(f"the chat template of {self.name} closes a turn differently here; render in full")
        return text[at:], False

    def _opening(self, text: str, at: int, body: str) -> int:
        """Where the message after a turn begins with a token at which the model stops, `body` being the turn's end."""
        start = skip_blanks(text, at + len(body))
        first = next(iter(self.tokenizer.controls_in(text[start : start + 64])), "")
        next_is_it = bool(first) and text.startswith(body, at) and text.startswith(first, start)
        if next_is_it and self._id_of(first) in self.stop_token_ids:
            return start
        cure = "render in full"
        if next_is_it:
            literal = self.tokenizer.reveal(first)
            cure = f"if the model stops at {literal}, name that in eos_token_id of its generation_config.json"
        raise TemplateError(f"the chat template of {self.name} has no token that closes a turn; {cure}")

    def _pads_values(self) -> bool:
        """Whether values of the XML form stand on lines of their own."""
        sentinel, call = unused((), ()), ToolCall("probe", {}, "c0")
        try:
            text = self._text([_USER, synthetic_turn(sentinel, (call,))], (), generation_prompt=False)
        except TemplateError:
            return True
        return f">{sentinel}<" not in text

    def _find_turn_close(self, n_calls: int) -> tuple[str, int, str]:
        """The control token that closes a turn with this many calls, as alias, its how-manieth after the text, and
        all that follows the text in the turn. No token where the turn only ends."""
        sentinel = unused((), ())
        calls = tuple(ToolCall("probe", {}, f"c{k}") for k in range(n_calls))
        turn = [_USER, self._turn(sentinel, calls)]
        try:
            rest = _after(self._text(turn, (), generation_prompt=False), sentinel)
        except TemplateError:
            return ("", 0, "") if n_calls == 0 else self._turn_close(0)
        results = [Message("tool", "", tool_call_id=c.id, tool_name=c.name) for c in calls]
        answered = ""
        with suppress(TemplateError):  # the end of a text may be marked otherwise than that of a turn
            answered = _after(self._text([*turn, *(results or [_USER])], ()), sentinel)
            shared = _common(rest, answered)
            rest = shared if self.tokenizer.controls_in(shared) else rest
        control = self.tokenizer.controls_in(rest)
        if self._always_prompts:  # what comes last may be the generation prompt
            control = [c for c in control if self._id_of(c) in self._stops] or control
        if not control or control[-1] == self.markup.call_close:  # nothing but the call itself is closed
            return "", 0, rest.rstrip()
        return *(self._stop_behind(control, answered) or (control[-1], control.count(control[-1]))), rest

    def _stop_behind(self, control: Sequence[str], answered: str) -> tuple[str, int] | None:
        """The token that a checkpoint names as an end, where what closes the last call has only blanks before it."""
        if self._id_of(control[-1]) in self._stops:
            return None
        at = 0
        for _ in range(control.count(control[-1])):
            at = answered.find(control[-1], at) + len(control[-1])
        at = skip_blanks(answered, at)
        following = next(iter(self.tokenizer.controls_in(answered[at : at + 64])), "")
        if not following or not answered.startswith(following, at) or self._id_of(following) not in self._stops:
            return None
        return following, answered[:at].count(following) + 1

    def _id_of(self, alias: str) -> int:
        return self.tokenizer.control_ids[self.tokenizer.reveal(alias)]

    def _close_ids(self, n_calls: int) -> list[int]:
        close = self._turn_close(n_calls)[0]
        return self.tokenizer.encode(close) if close else []


def _after(text: str, sentinel: str) -> str:
    at = text.rfind(sentinel)
    return text[at + len(sentinel) :] if at >= 0 else ""


def _common(a: str, b: str) -> str:
    """What two rendered texts both begin with, without half of an alias at its end."""
    end = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return _HALF_AN_ALIAS.sub("", a[:end])
