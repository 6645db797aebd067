"""What was said in an episode, in the terminal and for machines."""

from __future__ import annotations

from typing import Any

from rich.rule import Rule

from sandlot.cli.common import answer
from sandlot.rollout.dialogue import Exchange
from sandlot.terminal import literal

_SHOWN = 4000
"""Characters of one message that are shown; the middle of a longer one is left out."""
_COLOURS = {"system": "magenta", "user": "blue", "tool": "cyan", "assistant": "green", "context": "dim"}


def exchange_row(exchange: Exchange) -> dict[str, Any]:
    """One turn as JSON: `heard` is null where only the rendered text (`shown`) is known."""
    heard = exchange.heard
    return {
        "turn": exchange.turn.id,
        "branch": exchange.turn.branch,
        "fork": exchange.turn.fork,
        "heard": None if heard is None else [{"role": m.role, "text": m.text} for m in heard],
        "shown": exchange.shown,
        "said": {
            "reasoning": exchange.said.reasoning,
            "text": exchange.said.text,
            "calls": [{"name": c.name, "arguments": c.arguments, "status": c.status} for c in exchange.said.calls],
        },
    }


def show_exchange(exchange: Exchange) -> None:
    """One turn: what was new in its prompt, then the answer."""
    turn, said = exchange.turn, exchange.said
    fork = f"  [yellow]fork: {literal(turn.fork)}[/]" if turn.fork else ""
    answer.print(Rule(f"[dim]{turn.id[:8]}[/]  {literal(turn.branch)}{fork}", align="left", style="dim"))
    for message in exchange.heard or ():
        _show(message.role, message.text)
    if exchange.heard is None and exchange.shown:
        _show("context", exchange.shown)
    if said.reasoning:
        _show("assistant", said.reasoning, "thinks")
    if said.text:
        _show("assistant", said.text)
    for call in said.calls:
        _show("assistant", call.raw, f"calls {literal(call.name)}")


def _show(role: str, text: str, what: str = "") -> None:
    if len(text) > _SHOWN:
        half = _SHOWN // 2
        text = f"{text[:half]}\n… {len(text) - _SHOWN:,} characters …\n{text[-half:]}"
    title = f"[{_COLOURS[role]}]{' '.join(filter(None, (role, what)))}[/]"
    answer.print(f"{title}  {literal(text)}", highlight=False, soft_wrap=not answer.is_terminal)
