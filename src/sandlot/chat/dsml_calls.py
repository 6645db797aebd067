"""Tool calls in the form of DeepSeek V3.2 and V4: MiniMax's tags behind a token, with whether a value is a string."""

from __future__ import annotations

from sandlot.chat.markup import Reading
from sandlot.chat.minimax_calls import InvokeForm

MARKER = "｜DSML｜"


class DsmlForm(InvokeForm):
    """`<｜DSML｜invoke name="…">` and `<｜DSML｜parameter name="…" string="true">` in a section of calls."""

    def __init__(self, reading: Reading) -> None:
        self._token = reading.mark(MARKER)
        super().__init__(reading, *self._section("tool_calls"), self._token, alone=True)

    def next_call(self, text: str, at: int) -> int:
        """Where the next call begins, its section's marker included: V3.2 has another one than V4."""
        if at == 0:
            sections = [self._section("tool_calls"), self._section("function_calls")]
            first = min(sections, key=lambda section: text.find(section[0]) % (len(text) + 1))
            self.section_open, self.section_close = first
        return super().next_call(text, at)

    def _section(self, name: str) -> tuple[str, str]:
        return f"<{self._token}{name}>", f"</{self._token}{name}>"
