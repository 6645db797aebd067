"""What really happened in each recorded session: which earlier request's answer each request goes on from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scenario:
    """`continues[i]` is the request whose answer request i follows; None begins a conversation."""

    story: str
    continues: tuple[int | None, ...]


def _chain(length: int, story: str = "one conversation") -> Scenario:
    return Scenario(story, (None, *range(length - 1)))


_RESUMED = "one conversation, resumed by a second process"
_ODD = "broken, unknown and empty calls"
_NUDGE = f"{_ODD}; the client drops a reply of thoughts only and asks again from the turn before"

SCENARIOS: dict[tuple[str, str], Scenario] = {
    ("aider", "chat"): Scenario("rewrites its whole prompt for every request", (None,) * 5),
    ("claude-agent-sdk", "default"): _chain(4),
    ("claude-code", "bare"): _chain(4),
    ("claude-code", "clean-env"): _chain(4),
    ("claude-code", "clean-env-stress"): Scenario(_NUDGE, (None, 0, 1, 2, 3, 4, 5, 5)),
    ("claude-code", "compaction"): Scenario(
        "a compaction asks from the turn before the last; a new conversation goes on from the summary",
        (None, 0, 0, None, 3),
    ),
    ("claude-code", "context-error"): Scenario(
        "a refused request, two compactions of a truncated history, a new conversation", (None, 0, None, None, None)
    ),
    ("claude-code", "default-model"): _chain(5, _RESUMED),
    ("claude-code", "http400-retries"): Scenario("refused every time", (None,) * 4),
    ("claude-code", "max-tokens"): _chain(3, "one conversation with a reply cut at the token limit"),
    ("claude-code", "sonnet-4-5"): _chain(5, _RESUMED),
    ("claude-code", "stress"): Scenario(_NUDGE, (None, 0, 1, 2, 3, 4, 5, 5)),
    ("claude-code", "subagent-async"): Scenario("an agent and its sub-agent, interleaved", (None, 0, None, 1)),
    ("claude-code", "subagent-nested"): Scenario(
        "an agent, its sub-agent and the sub-agent of that one", (None, None, None, 1, 0)
    ),
    ("claude-code", "unknown-model"): _chain(5, _RESUMED),
    ("cline", "chat"): _chain(4),
    ("cline", "stress"): _chain(5, _ODD),
    ("codex", "compaction"): Scenario(
        "a compaction without tools, then a new conversation from the summary", (None, 0, None, None)
    ),
    ("codex", "gpt-5.5"): _chain(8, _RESUMED),
    ("codex", "parallel-and-odd-blocks"): _chain(4, "parallel calls, text after a call"),
    ("codex", "stream-cut-mid-call"): Scenario(
        "a cut stream: the client keeps the text and not the call, and asks again", (None, 0, 0)
    ),
    ("codex", "subagent"): Scenario("an agent and the sub-agent it found by tool search", (None, 0, 1, None, 2)),
    ("codex", "unknown-model"): _chain(4),
    ("gemini-cli", "auto-model"): Scenario("a routing request, then one conversation", (None, None, 1, 2)),
    ("gemini-cli", "pinned-model"): Scenario(
        "one conversation; the resuming process writes its file tree anew", (None, 0, 1, 2, None, 4, 5, 6)
    ),
    ("gemini-cli", "stress"): Scenario(_NUDGE, (None, 0, 1, 2, 3, 4, 5, 5)),
    ("kilo", "chat"): _chain(8, _RESUMED),
    ("kilo", "stress"): _chain(7, _ODD),
    ("mini-swe-agent", "anthropic"): _chain(4),
    ("mini-swe-agent", "chat"): _chain(4),
    ("mini-swe-agent", "gemini"): _chain(4),
    ("opencode", "anthropic"): _chain(8, _RESUMED),
    ("opencode", "chat"): Scenario("a title request, then one conversation", (None, None, 1, 2, 3)),
    ("opencode", "compaction"): Scenario(
        "a compaction of the flattened conversation, then a new one from the summary", (None, 0, None, None)
    ),
    ("opencode", "gemini"): _chain(8, _RESUMED),
    ("opencode", "responses"): _chain(8, _RESUMED),
    ("opencode", "stress-chat"): _chain(7, _ODD),
    ("opencode", "subagent"): Scenario("an agent and its sub-agent", (None, None, 1, 0)),
    ("pi", "anthropic"): _chain(8, _RESUMED),
    ("pi", "chat"): _chain(8, _RESUMED),
    ("pi", "gemini"): _chain(8, _RESUMED),
    ("pi", "responses"): _chain(8, _RESUMED),
    ("pi", "stress-chat"): _chain(7, _ODD),
    ("qwen-code", "anthropic"): _chain(4),
    ("qwen-code", "chat"): Scenario(
        "one conversation; the resuming process writes its system prompt anew", (None, 0, 1, 2, None, 4, 5, 6)
    ),
    ("qwen-code", "gemini"): _chain(4),
    ("qwen-code", "responses"): _chain(4),
}
