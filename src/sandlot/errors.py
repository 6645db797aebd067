"""The failure kinds an episode can carry, and the errors the rooms raise.

A failure kind is data: it travels with the episode and decides whether its samples may be trained.
It is never turned into a reward of 0.
"""

from __future__ import annotations

from enum import StrEnum


class FailureKind(StrEnum):
    """Why an episode did not end the ordinary way.

    The first four are the policy's own doing and can be trained; the others say nothing about the policy,
    so they stay outside baseline and denominator and are queued again within a cap.
    """

    AGENT_ERROR = "agent_error"
    AGENT_TIMEOUT = "agent_timeout"
    BUDGET = "budget"
    CONTEXT_OVERFLOW = "context_overflow"
    INFRA_ERROR = "infra_error"
    GRADER_ERROR = "grader_error"
    ABORTED = "aborted"

    @property
    def trainable(self) -> bool:
        """Whether the failure is the policy's doing."""
        return self in _TRAINABLE


_TRAINABLE = frozenset(
    {FailureKind.AGENT_ERROR, FailureKind.AGENT_TIMEOUT, FailureKind.BUDGET, FailureKind.CONTEXT_OVERFLOW}
)


class SandlotError(Exception):
    """Base of every error raised on purpose. Its text names the cause and the cure in one sentence.

    `kind` is the failure kind an episode gets when this error ends it.
    """

    kind: FailureKind = FailureKind.INFRA_ERROR


class ConfigError(SandlotError):
    """A setting, file or argument of the user is wrong."""


class MissingDependencyError(SandlotError):
    """An optional dependency is not installed; the text names the extra."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: pip install 'sandlot[{extra}]'")


class TaskError(SandlotError):
    """A task or a dataset row cannot be used; the text names the row and the field."""


class ModelError(SandlotError):
    """A model directory cannot be used (no tokenizer, no chat template, unknown architecture)."""


class EngineError(SandlotError):
    """The engine did not give a usable answer. `retryable` says whether the same call may succeed later, `retry_after`
    in how many seconds the engine wants it again."""

    def __init__(self, message: str, *, retryable: bool = True, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.retry_after = retry_after


class EngineEvidenceError(EngineError):
    """The engine answered, but ids, logprobs or finish reason do not prove what was sampled."""


class ContextOverflowError(SandlotError):
    """A prompt leaves no room to sample. `prompt_tokens` and `limit` are counts of tokens."""

    kind = FailureKind.CONTEXT_OVERFLOW

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(f"prompt is too long: {prompt_tokens} tokens > {limit} maximum")
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class SandboxError(SandlotError):
    """A sandbox could not be made or used. `retryable` says whether a fresh one may work."""

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class SandboxUnavailableError(SandboxError):
    """This machine cannot run the backend at all, or the backend lacks a requested capability."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


class SandboxLostError(SandboxError):
    """The sandbox died or was killed while it was needed."""


class CaptureError(SandlotError):
    """The agent left what cannot be turned into a patch: no work directory, say, or too much."""

    kind = FailureKind.AGENT_ERROR


class GradingError(SandlotError):
    """Grading did not come to a verdict. The episode stays ungraded."""

    kind = FailureKind.GRADER_ERROR


class JournalError(SandlotError):
    """A journal is damaged somewhere else than at its torn tail."""


class AuditError(SandlotError):
    """Samples do not prove what they claim; the text counts and names the violations."""
