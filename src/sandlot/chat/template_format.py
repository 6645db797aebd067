"""The chat format of any checkpoint with a Jinja template: full and delta rendering, and parsing.

Delta rendering renders a short synthetic conversation (a user, an assistant with a sentinel text and calls of the
right names, then the new messages) and keeps what stands after the close of the sentinel's turn. Nothing that was
sampled is in it. `self_check` proves at load, on probe conversations, that this equals full renders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from sandlot.chat.forms import detect_form
from sandlot.chat.markup import CALL_PAIR, THINK_PAIRS, Markup
from sandlot.chat.messages import Message, Reply, Tool, ToolCall
from sandlot.chat.native_ids import answer_with_sampled_ids, with_native_ids
from sandlot.chat.rendering import render_prompt, render_text
from sandlot.chat.replies import ReplyReader
from sandlot.chat.roles import Traits, conform, untrusted_texts
from sandlot.chat.template import ChatTemplate, TemplateError
from sandlot.chat.tokenizer import ChatTokenizer
from sandlot.chat.xml_calls import FUNCTION
from sandlot.errors import ModelError
from sandlot.ids import PromptIds

_USER = Message("user", "Go on.")


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
        self.vocab_size = tokenizer.vocab_size
        self.markup = markup_of(tokenizer, template.source, form)
        self._turn_close = lru_cache(maxsize=64)(self._find_turn_close)
        closes = [ids[0] for n in (0, 1) if len(ids := self._close_ids(n)) == 1]
        self.stop_token_ids = tuple(dict.fromkeys([*stops, *closes]))
        self.replies = ReplyReader(tokenizer, self.markup, self.stop_token_ids)
        if not self.stop_token_ids:
            raise ModelError(
                f"{name} names no end-of-turn token; set eos_token_id in its generation_config.json, "
                f"or else nothing would end a turn but the token limit"
            )
        self.can_extend = False
        self.tail_needs_tools = True
        self.forgets_at: frozenset[str] = frozenset()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> PromptIds:
        """Ids of the whole prompt, ending with the generation prompt."""
        return render_prompt(self.tokenizer, self.template, self.traits, self._native(messages), tools)

    def extend(
        self,
        last_output: Sequence[int],
        call_names: Sequence[str],
        new: Sequence[Message],
        tools: Sequence[Tool],
    ) -> list[int] | None:
        """Ids that follow a sampled turn: its close where the sample lacks a stop token, `new`, the generation prompt.

        Results without a `tool_name` take the names in `call_names` in order. None where a message in `new` makes the
        template leave out earlier thoughts, and that is wanted (`forgets_at`).
        """
        if any(m.role in self.forgets_at for m in new):
            return None
        new = _named(conform(new, self.traits, head=False), call_names)
        if self.traits.native_ids:
            new = answer_with_sampled_ids(new, self.decode(last_output))
        ids = self.tokenizer.encode(self._tail(call_names, new, tools if self.tail_needs_tools else ()))
        closed = bool(last_output) and last_output[-1] in self.stop_token_ids
        return ids[1:] if closed else ids

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

    def _native(self, messages: Sequence[Message]) -> Sequence[Message]:
        return with_native_ids(messages) if self.traits.native_ids else messages

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool], generation_prompt: bool = True) -> str:
        return render_text(self.tokenizer, self.template, self.traits, messages, tools, generation_prompt)

    def _tail(self, call_names: Sequence[str], new: Sequence[Message], tools: Sequence[Tool]) -> str:
        """What a template writes from the close of a turn on, close included."""
        failed: TemplateError | None = None
        for calls in _pairings(call_names, new):
            try:
                return self._render_tail(calls, new, tools)
            except TemplateError as e:
                failed = failed or e
        raise failed or TemplateError("the model's chat template cannot be continued")

    def _render_tail(self, calls: tuple[ToolCall, ...], new: Sequence[Message], tools: Sequence[Tool]) -> str:
        close, count = self._turn_close(len(calls))
        sentinel = _unused(new, tools)
        text = self._text([_USER, _turn(sentinel, calls), *new], tools)
        at = text.rfind(sentinel)
        if at < 0 or not close:
            raise TemplateError(f"the chat template of {self.name} has no token that closes a turn; render in full")
        at += len(sentinel) - len(close)
        for _ in range(count):
            at = text.find(close, at + len(close))
            if at < 0:
                raise TemplateError(f"the chat template of {self.name} closes a turn differently here; render in full")
        return text[at:]

    def _find_turn_close(self, n_calls: int) -> tuple[str, int]:
        """The control token that closes a turn with this many calls, as alias, and its how-manieth after the text."""
        sentinel = _unused((), ())
        calls = tuple(ToolCall("probe", {}, f"c{k}") for k in range(n_calls))
        try:
            text = self._text([_USER, _turn(sentinel, calls)], (), generation_prompt=False)
        except TemplateError:
            return ("", 0) if n_calls == 0 else self._turn_close(0)
        rest = text[text.rfind(sentinel) + len(sentinel) :] if sentinel in text else ""
        control = self.tokenizer.controls_in(rest)
        if not control or control[-1] == self.markup.call_close:  # nothing but the call itself is closed
            return "", 0
        return control[-1], control.count(control[-1])

    def _close_ids(self, n_calls: int) -> list[int]:
        close, _ = self._turn_close(n_calls)
        return self.tokenizer.encode(close) if close else []


def _turn(sentinel: str, calls: tuple[ToolCall, ...]) -> Message:
    # Some templates leave out the text of a turn with calls: the last call carries the sentinel too.
    if calls:
        calls = (*calls[:-1], replace(calls[-1], arguments={"text": sentinel}))
    return Message("assistant", sentinel, tool_calls=calls)


def _named(new: Sequence[Message], call_names: Sequence[str]) -> list[Message]:
    """`new` with a name in each of its leading tool results."""
    named = list(new)
    for k, message in enumerate(named):
        if message.role != "tool":
            break
        if not message.tool_name and k < len(call_names):
            named[k] = replace(message, tool_name=call_names[k])
    return named


def _pairings(call_names: Sequence[str], new: Sequence[Message]) -> list[tuple[ToolCall, ...]]:
    """Calls for the synthetic turn, the likeliest first: all of the turn's, those that are answered, one, none."""
    answered = []
    for k, message in enumerate(new):
        if message.role != "tool":
            break
        answered.append(ToolCall(message.tool_name or "tool", {}, message.tool_call_id or f"c{k}"))
    open_names = list(call_names)
    for call in answered:
        if call.name in open_names:
            open_names.remove(call.name)
        elif open_names:
            open_names.pop()
    waiting = [ToolCall(name, {}, f"open{k}") for k, name in enumerate(open_names)]
    return [(*answered, *waiting), tuple(answered), tuple(answered[:1]), ()]


def _unused(new: Sequence[Message], tools: Sequence[Tool]) -> str:
    texts = untrusted_texts(new, [t.as_function() for t in tools])
    k = 0
    while any(f"Turn{k}Ends" in t for t in texts):
        k += 1
    return f"Turn{k}Ends"


def markup_of(tokenizer: ChatTokenizer, template: str, form: str = "") -> Markup:
    """The markers that a template writes and a vocabulary has; `form` decides where they leave the form open."""
    known = tokenizer.control_ids
    think = next((p for p in THINK_PAIRS if p[0] in known or p[0] in template), THINK_PAIRS[0])
    alias = tokenizer.alias
    return Markup(
        think_open=alias(think[0]),
        think_close=alias(think[1]),
        call_open=alias(CALL_PAIR[0]),
        call_close=alias(CALL_PAIR[1]),
        calls_are_tokens=CALL_PAIR[0] in known and CALL_PAIR[1] in known,
        xml=FUNCTION in template,
        form=form or detect_form(template, known),
        alias=alias,
    )
