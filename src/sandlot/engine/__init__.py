"""Token ids → token ids: one client per engine family, and the embedded engines."""

from sandlot.engine.base import Engine, EngineInfo, Generation, SamplingParams, VersionSpan, checked
from sandlot.registry import Registry

ENGINES = Registry(
    "sandlot.engines",
    {"vllm": "sandlot.engine.vllm:VllmEngine", "sglang": "sandlot.engine.sglang:SglangEngine"},
)

__all__ = ["ENGINES", "Engine", "EngineInfo", "Generation", "SamplingParams", "VersionSpan", "checked"]
