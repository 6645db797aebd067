"""The configuration of a run: one model, spelled as a TOML file, as `SANDLOT_*` variables, or as flags.

Flags win over variables (`SANDLOT_SAMPLING__TEMPERATURE=0.7`), variables over the file. Unknown keys are errors.
Nothing is read at import.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from sandlot.errors import ConfigError

if TYPE_CHECKING:
    from sandlot.sandbox import Limits
    from sandlot.tasks import GradingOptions

PREFIX = "SANDLOT_"
_NOT_SETTINGS = frozenset({"CACHE", "ADMIN_KEY"})

Names = Annotated[
    tuple[str, ...], NoDecode, BeforeValidator(lambda v: tuple(v.split(",")) if isinstance(v, str) else v)
]
"""Several names; one string holds them with commas between."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SamplingConfig(_Section):
    """How the policy samples. `max_tokens` bounds one turn."""

    temperature: float = Field(1.0, gt=0, le=10)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    max_tokens: int | None = Field(None, gt=0)
    seed: int | None = None


class ChatConfig(_Section):
    """How messages become prompts and answers are read; see docs/models.md.

    `family` is a model family, `auto` (the one that writes what the checkpoint's template writes, else the template) or
    `template` (never a family). `thinking` keeps sampled thoughts in the conversation, or leaves them out where the
    template does. `parser` reads answers in place of the format's own; `template` is a file in place of the
    checkpoint's; `variables` are what the template is given besides the conversation.
    """

    family: str = "auto"
    thinking: Literal["keep", "template"] = "keep"
    parser: str | None = None
    template: Path | None = None
    variables: dict[str, Any] = {}


class EpisodeLimits(_Section):
    """What one episode may use; None takes the task's own. `wall_clock` in seconds, `context` in tokens."""

    turns: int | None = Field(None, gt=0)
    tokens: int | None = Field(None, gt=0)
    wall_clock: float | None = Field(None, gt=0)
    context: int | None = Field(None, gt=0)


class SandboxLimits(_Section):
    """Bounds of each sandbox: bytes, processes, cores."""

    memory: int = Field(4 << 30, gt=0)
    processes: int = Field(512, gt=0)
    cpu: float | None = Field(None, gt=0)
    disk: int = Field(8 << 30, gt=0)

    def over(self, limits: Limits) -> Limits:
        """The limits of a sandbox, with these in their place."""
        return dataclasses.replace(limits, **self.model_dump())


class GradingConfig(_Section):
    """How results become a reward, for every task; None takes the task's own. See docs/tasks.md."""

    credit: Literal["all", "fraction"] | None = None
    reruns: int | None = Field(None, ge=0, le=10)
    weights: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] | None = None
    timeout: float | None = Field(None, gt=0, allow_inf_nan=False)
    countercheck: bool | None = None

    @field_validator("weights")
    @classmethod
    def _something_counts(cls, weights: dict[str, float] | None) -> dict[str, float] | None:
        if weights and not sum(weights.values()) > 0:
            raise ValueError("the weights must not all be 0")
        return weights

    def over(self, options: GradingOptions) -> GradingOptions:
        """A task's own options, with what is set here in their place."""
        return dataclasses.replace(options, **self.model_dump(exclude_none=True))


class RunConfig(BaseSettings):
    """A run: which tasks, which agents, which policy, how often, where to.

    `engine` is `embedded`, `scripted`, or the URL of a server that speaks `engine_kind`'s token-in/token-out protocol
    (several, with commas between, are replicas of one model); `model` the checkpoint directory whose tokenizer and chat
    template render the prompts (None: the embedded model).
    `sandbox_options` are what the backend named by `sandbox` is made with; see docs/sandboxes.md.
    `attempts` is the size of a group; `concurrency` the episodes at once (0: chosen by the machine). An episode lost
    to infrastructure is repeated up to `retries` times; the run stops when more than `max_infra_share` of the episodes
    ended so.
    """

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        nested_model_default_partial_update=True,
    )

    tasks: str = "bundled"
    harness: Names = ("pi",)
    sandbox: str = "local"
    sandbox_options: dict[str, Any] = {}
    engine: str = "embedded"
    engine_kind: Literal["vllm", "sglang"] = "vllm"
    model: Path | None = None
    served_model: str | None = None
    attempts: int = Field(1, gt=0, le=4096)
    concurrency: int = Field(0, ge=0)
    only: Names = ()
    retries: int = Field(1, ge=0)
    max_infra_share: float = Field(0.5, gt=0, le=1)
    sampling: SamplingConfig = SamplingConfig()
    chat: ChatConfig = ChatConfig()
    limits: EpisodeLimits = EpisodeLimits()
    sandbox_limits: SandboxLimits = SandboxLimits()
    grading: GradingConfig = GradingConfig()


def load_config(file: Path | None = None, flags: dict[str, Any] | None = None) -> RunConfig:
    """Merge file, variables and flags (None values are no flags). Raises `ConfigError` naming the key."""
    known = {name.upper() for name in RunConfig.model_fields}
    for name in os.environ:
        setting = name.removeprefix(PREFIX).partition("__")[0]
        if name.startswith(PREFIX) and setting not in known | _NOT_SETTINGS and not setting.startswith("TEST_"):
            raise ConfigError(f"the variable {name} is no setting; settings are {', '.join(sorted(known))}")
    if file is not None and not file.is_file():
        raise ConfigError(f"there is no configuration file {file}")

    class Sources(RunConfig):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, file)

    try:
        return RunConfig.model_construct(**dict(Sources(**_without_none(flags or {}))))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is no valid TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            beside = ", ".join(_settings_beside(first["loc"]))
            raise ConfigError(f"there is no setting {key!r}; there are: {beside}") from error
        raise ConfigError(f"setting {key!r}: {first['msg'].lower()} (got {first['input']!r})") from error
    except SettingsError as error:
        raise ConfigError(f"{error}: {error.__cause__}") from error


def _settings_beside(where: Sequence[int | str]) -> list[str]:
    """The names of the section in which `where` stands."""
    section: Any = RunConfig
    for part in where[:-1]:
        section = section.model_fields[part].annotation
    return list(section.model_fields)


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for key, value in values.items():
        if isinstance(value, dict):
            value = _without_none(value) or None
        if value is not None:
            kept[key] = value
    return kept
