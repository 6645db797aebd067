"""Tool calls in the Llama 3 form: the reply is itself a JSON object with a name and parameters, or several with `;`."""

from __future__ import annotations

import re

from sandlot.chat.json_calls import guess, object_end, parse_object, read_object, written_name
from sandlot.chat.markup import Found, Reading, found, skip_blanks

MARKER = "<|python_tag|>"
_CALL = re.compile(r'\{\s*"(?:name|type|function)"\s*:')
_BETWEEN = re.compile(r"\s*;\s*(?=\{)")


class LlamaForm:
    """`{"name": …, "parameters": {…}}` at the start of a reply, with or without `<|python_tag|>` before it.

    JSON that does not look like a call is an answer in JSON, and stays text.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._tag = reading.mark(MARKER)

    def next_call(self, text: str, at: int) -> int:
        """The reply's first object, one that follows a call, or a marker anywhere."""
        start = skip_blanks(text, at)
        if _CALL.match(text, start) and self._is_call(text, start):
            return start
        return text.find(self._tag, at)

    def read(self, text: str, at: int) -> list[Found]:
        """The call that begins at `at`, with the `;` that parts it from the next."""
        body = at + len(self._tag) if text.startswith(self._tag, at) else at
        start = skip_blanks(text, body)
        reveal = self._reading.reveal
        if not text.startswith("{", start):  # code for an interpreter that the agent does not have
            following = text.find(self._tag, body)
            end = len(text) if following < 0 else following
            raw = reveal(text[body:end])
            return [found(end, "", raw, raw, "missing_name" if raw.strip() else "unclosed")]
        end, cut = object_end(text, start, self._reading.truncated)
        if end < 0:
            raw = reveal(text[body:])
            if cut or self._reading.truncated:
                return [found(len(text), written_name(raw), raw, raw, "unclosed")]
            return [guess(raw.strip(), len(text), raw)]
        read = read_object(_named(reveal(text[start:end])), end, reveal(text[body:end]))
        between = _BETWEEN.match(text, end)
        return [Found(between.end(), read.call, read.ambiguous, read.shown) if between else read]

    def _is_call(self, text: str, start: int) -> bool:
        end, cut = object_end(text, start, self._reading.truncated)
        source = text[start:end] if end >= 0 else text[start:]
        if end < 0:
            return cut or self._reading.truncated or written_name(source) in self._reading.tools
        value = parse_object(_named(self._reading.reveal(source)))
        if value is None:
            return written_name(source) in self._reading.tools
        takes = isinstance(value.get("parameters", value.get("arguments")), dict | str)
        alone = skip_blanks(text, end) == len(text)
        return isinstance(value.get("name"), str) and takes and (alone or value["name"] in self._reading.tools)


def _named(source: str) -> str:
    """Some fine-tunes write the name under `function`."""
    value = parse_object(source)
    if value is not None and "name" not in value and isinstance(value.get("function"), str):
        return source.replace('"function"', '"name"', 1)
    return source
