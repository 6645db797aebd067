"""Loading the chat format of a checkpoint: its family's where it has one, else that of its own chat template."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from sandlot.chat.base import ChatFormat
from sandlot.chat.families import FamilyFormat, family_formats, library_families
from sandlot.chat.family_check import continuation, difference, spoof
from sandlot.chat.family_names import candidates
from sandlot.chat.forgetting import forgets_at
from sandlot.chat.forms import FORMS
from sandlot.chat.markers import markup_of, think_pair
from sandlot.chat.messages import Message
from sandlot.chat.named_templates import ByTools, template_for_tools
from sandlot.chat.probe import find_traits, self_check
from sandlot.chat.reading_check import check_reading, unread_call
from sandlot.chat.rendering import Rendering
from sandlot.chat.roles import Traits
from sandlot.chat.template import ChatTemplate, load_template, special_tokens
from sandlot.chat.template_format import TemplateFormat
from sandlot.chat.tokenizer import ChatTokenizer, load_tokenizer, read_json
from sandlot.chat.vllm_parsers import VllmParsed
from sandlot.errors import ConfigError, MissingDependencyError, ModelError
from sandlot.registry import Registry

__all__ = ["CHAT_FORMATS", "TemplateFormat", "Thinking", "load_chat_format"]

log = logging.getLogger("sandlot.chat")

Thinking = Literal["keep", "template"]
"""`keep`: a conversation goes on with the thoughts that were sampled in it. `template`: they are left out where the
checkpoint's template leaves them out, so that the conversation starts anew there."""

CHAT_FORMATS = Registry("sandlot.chat_formats", {})
"""Families that other packages offer: `(model_dir, *, thinking, variables, now) -> ChatFormat`."""


def load_chat_format(
    model_dir: str | Path,
    *,
    template: str | Path | None = None,
    variables: Mapping[str, Any] | None = None,
    now: datetime | None = None,
    thinking: Thinking = "keep",
    family: str | None = None,
    parser: str | None = None,
) -> ChatFormat:
    """The chat format of a checkpoint directory.

    `template` replaces the checkpoint's own (a path, or template source); `variables` are further values for it, such
    as `{"enable_thinking": True}`; `now` is the date templates may print, by default that of loading. `family` names a
    model family that renders instead of the template; `auto` takes the one that writes exactly what the template
    writes, if there is one. `parser` reads replies: a form of `sandlot.chat.forms`, or `vllm:NAME` for a parser of an
    installed vLLM (`vllm:NAME+REASONING` with one for thoughts).
    `ModelError` where there is no tokenizer or no template, or the family does not fit.
    """
    directory = Path(model_dir)
    if not directory.is_dir():
        raise ModelError(f"{directory} is no directory; give a checkpoint directory with tokenizer.json in it")
    form, vllm = _parser(parser)
    when = now or datetime.now().astimezone()
    chat: ChatFormat | None = None
    if family is not None and family != "auto" and family in CHAT_FORMATS.names():
        chat = CHAT_FORMATS.get(family)(directory, thinking=thinking, variables=dict(variables or {}), now=when)
    else:
        checkpoint = _Checkpoint(directory, template, dict(variables or {}), when, thinking, form)
        if family == "auto":
            chat = checkpoint.detected() or checkpoint.by_template()
        else:
            chat = checkpoint.by_family(family) if family else checkpoint.by_template()
    shows_calls = isinstance(chat, TemplateFormat | FamilyFormat) and chat.traits.calls
    if vllm:
        chat = VllmParsed(chat, directory, vllm)
    if shows_calls:
        check_reading(chat)
    return chat


def _parser(name: str | None) -> tuple[str, str]:
    """(a form of ours, a parser of vLLM's)."""
    if name is None:
        return "", ""
    if name.startswith("vllm:"):
        return "", name.removeprefix("vllm:")
    if name not in FORMS:
        raise ConfigError(f"no parser called {name!r}; there are: {', '.join(FORMS)}, and vllm:NAME where vLLM is")
    return name, ""


class _Checkpoint:
    """A checkpoint directory, and the formats that can be made of it."""

    def __init__(
        self,
        directory: Path,
        template: str | Path | None,
        variables: Mapping[str, Any],
        now: datetime,
        thinking: Thinking,
        form: str,
    ) -> None:
        self.directory, self.template, self.variables = directory, template, variables
        self.now, self.thinking, self.form = now, thinking, form
        self.name = directory.resolve().name
        self.tokenizer = load_tokenizer(directory)
        self.stops = _stop_ids(directory, self.tokenizer)
        self._own: TemplateFormat | None = None

    def by_template(self) -> TemplateFormat:
        """The format of the checkpoint's template, checked against itself."""
        chat = self._template_format()
        self_check(chat)
        if self.thinking == "template":
            chat.forgets_at = forgets_at(chat.text, thinks=_thinks(chat, chat.template.source))
        return chat

    def _template_format(self) -> TemplateFormat:
        if self._own is not None:
            return self._own
        compiled = self._compiled()
        form = markup_of(self.tokenizer, compiled.source, self.form).form
        rendering = Rendering(self.tokenizer, compiled, Traits(), self.tokenizer.literals)
        traits = find_traits(self.name, rendering.text, native_ids=form == "kimi")
        self._own = TemplateFormat(self.name, self.tokenizer, compiled, traits, self.stops, form)
        return self._own

    def _compiled(self) -> ChatTemplate:
        with_tools, without = template_for_tools(self.directory) if self.template is None else ("", "")
        if not with_tools:
            return load_template(self.directory, override=self.template, variables=self.variables, now=self.now)
        given = {**special_tokens(self.directory), **self.variables}
        return ByTools(*(ChatTemplate(source, given, self.now) for source in (with_tools, without)))

    def by_family(self, family: str) -> FamilyFormat:
        """The format of a family that was asked for; where the checkpoint's template differs, that is told."""
        known = library_families()
        if family not in known:
            raise ConfigError(f"no family called {family!r}; there are: {', '.join([*CHAT_FORMATS.names(), *known])}")
        own = self._own_or_none()
        chosen, wrong = None, ""
        for chat in self._formats(family):
            wrong_here = difference(chat, own) if own is not None else ""
            if chosen is None or not wrong_here:
                chosen, wrong = chat, wrong_here
            if not wrong_here:
                break
        if chosen is None:  # `_formats` raises before
            raise ModelError(f"{self.name} cannot be used as a model of the family {family!r}")
        if wrong:
            log.warning("%s: the family %s is not what its chat template is: %s", self.name, family, wrong)
        if spoofed := spoof(chosen):
            raise ModelError(f"the family {family!r} is not safe for {self.name}: {spoofed}; use its chat template")
        self._prove(chosen)
        return chosen

    def detected(self) -> FamilyFormat | None:
        """The family's format that writes what the template writes, and goes on where it should; None without one."""
        families = candidates(read_json(self.directory / "config.json"), self.tokenizer.control_ids)
        if not families:
            return None
        own = self._own_or_none()
        for family in families:
            try:
                if not (family.form or self.form):
                    if own is None or not own.traits.calls or unread_call(own):
                        return self.by_family(family.name)  # nothing else reads its answers
                    continue
                for chat in self._formats(family.name):
                    if (own is None or not difference(chat, own)) and not spoof(chat) and self._better(chat, own):
                        log.info("%s: rendered as a model of the family %s", self.name, family.name)
                        return self._prove(chat)
            except MissingDependencyError as e:
                if own is None or not self.by_template().can_extend:
                    log.warning("%s may be a model of the family %s, but %s", self.name, family.name, e)
                return None
            except ModelError as e:
                level = logging.DEBUG if family.form else logging.WARNING
                log.log(level, "%s: %s", self.name, e)
        return None

    def _formats(self, family: str) -> Iterator[FamilyFormat]:
        return family_formats(
            self.name,
            self.tokenizer,
            family,
            self.stops,
            variables=self.variables,
            now=self.now,
            form=self.form,
        )

    def _better(self, chat: FamilyFormat, own: TemplateFormat | None) -> bool:
        """Whether a family continues every turn, or at least some where the template continues none."""
        found = continuation(chat)
        return not found.wrong and (not found.declined or own is None or not self.by_template().can_extend)

    def _prove(self, chat: FamilyFormat) -> FamilyFormat:
        """Set `can_extend`, and warn with the cost where it is False; set what `thinking = template` forgets."""
        found = continuation(chat)
        chat.can_extend = not found.wrong
        if found.wrong or found.declined:
            log.warning(
                "%s: the family %s cannot be continued %s: such a request is rendered in full, and where that differs "
                "from what was sampled a turn starts a new branch",
                self.name,
                chat.family.name,
                f"at all ({found.wrong})" if found.wrong else f"after some turns ({'; '.join(found.declined)})",
            )
        if self.thinking == "template":
            shown = lambda messages, tools: chat.decode(chat.render(messages, tools))  # noqa: E731
            chat.forgets_at = forgets_at(shown, thinks=_thinks(chat, ""))
        return chat

    def _own_or_none(self) -> TemplateFormat | None:
        try:
            return self._template_format()
        except ModelError as e:
            log.debug("%s is not checked against a chat template: %s", self.name, e)
            return None


def _thinks(chat: TemplateFormat | FamilyFormat, template: str) -> bool:
    """Whether the model has thoughts: markers of them, or a channel for them that its family encodes itself."""
    if think_pair(template, chat.tokenizer.control_ids):
        return True
    if isinstance(chat, TemplateFormat):
        return False
    return chat.family.encodes_itself or chat.replies.thought_open(chat.render([Message("user", "Hello.")], ()))


def _stop_ids(directory: Path, tokenizer: ChatTokenizer) -> list[int]:
    """End-of-sequence tokens that the checkpoint names, in its three places."""
    ids: list[int] = []
    for file in ("generation_config.json", "config.json"):
        value = read_json(directory / file).get("eos_token_id")
        ids += [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]
    token = read_json(directory / "tokenizer_config.json").get("eos_token")
    literal = token.get("content") if isinstance(token, dict) else token
    if literal in tokenizer.control_ids:
        ids.append(tokenizer.control_ids[literal])
    return ids
