"""The model families, and which of them a checkpoint may be."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """One family of the `renderers` library.

    `form` is the form of calls that our own parser reads (empty: the library's parser does), `xml` whether calls are
    taught as `<function=…>`, `marker` a token that no vocabulary of the family lacks. `encodes_itself`: the family's
    encoder is not given our tokenizer for text, and keeps text and control tokens apart by itself. `closing`: the token
    that ends an answer in a history, where that is none at which the model stops.
    """

    name: str
    form: str = ""
    xml: bool = False
    marker: str = ""
    encodes_itself: bool = False
    closing: str = ""


FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family("qwen3", "tagged", marker="<|im_start|>"),
        Family("prime-qwen3", "tagged", xml=True, marker="<|im_start|>"),
        Family("qwen3.5", "tagged", xml=True, marker="<|im_start|>"),
        Family("qwen3.6", "tagged", xml=True, marker="<|im_start|>"),
        Family("qwen3.8", "tagged", xml=True, marker="<|im_start|>"),
        Family("nemotron-3", "tagged", xml=True, marker="<|im_start|>"),
        Family("nemotron-3-ultra", "tagged", xml=True, marker="<|im_start|>"),
        Family("nemotron-3.5", "tagged", xml=True, marker="<|im_start|>"),
        Family("glm-4.5", "glm", marker="<arg_key>"),
        Family("glm-5", "glm", marker="<arg_key>"),
        Family("glm-5.1", "glm", marker="<arg_key>"),
        Family("glm-5.3", "glm", marker="<arg_key>"),
        Family("minimax-m2", "minimax", marker="<minimax:tool_call>"),
        Family("deepseek-v3", "deepseek", marker="<｜tool▁call▁begin｜>"),
        Family("deepseek-r1", "deepseek", marker="<｜tool▁call▁begin｜>"),
        Family("kimi-k2", "kimi", marker="<|tool_call_argument_begin|>"),
        Family("kimi-k2.5", "kimi", marker="<|tool_call_argument_begin|>"),
        Family("llama-3", "llama", marker="<|python_tag|>"),
        Family("deepseek-v4", "dsml", marker="｜DSML｜"),
        Family("gemma4", "gemma", marker="<|tool_call>"),
        Family("hy3"),
        Family("gpt-oss", marker="<|channel|>", encodes_itself=True, closing="<|end|>"),
    )
}
"""Families with a form of their own; the library may know more, which can be named and are read by its own parsers."""

_BY_TYPE: Mapping[str, tuple[str, ...]] = {
    "qwen3": ("qwen3", "prime-qwen3"),
    "qwen3_moe": ("qwen3",),
    "qwen3_next": ("qwen3",),
    "qwen3_5": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_5_moe": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "nemotron_h": ("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
    "glm4_moe": ("glm-4.5", "glm-5"),
    "glm4_moe_lite": ("glm-5",),
    "glm_moe_dsa": ("glm-5", "glm-5.1", "glm-5.3"),
    "minimax_m2": ("minimax-m2",),
    "minimax": ("minimax-m2",),
    "deepseek_v3": ("deepseek-v3", "deepseek-r1", "kimi-k2"),
    "deepseek_v4": ("deepseek-v4",),
    "kimi_k2": ("kimi-k2",),
    "kimi_k25": ("kimi-k2.5",),
    "llama": ("llama-3",),
    "gemma4": ("gemma4",),
    "hy_v3": ("hy3",),
    "gpt_oss": ("gpt-oss",),
}


def candidates(config: Mapping[str, Any], vocabulary: Container[str]) -> list[Family]:
    """The families that a checkpoint may be, by `model_type` and architecture in its config and by its vocabulary.

    Which of them it is, its own chat template says: only one that writes the same is taken.
    """
    kind = str(config.get("model_type") or "").lower()
    if kind.endswith("_text") or not kind:
        kind = kind.removesuffix("_text")
    names = list(_BY_TYPE.get(kind, ()))
    for architecture in config.get("architectures") or ():
        plain = str(architecture).partition("For")[0].lower()
        names += next((n for t, n in _BY_TYPE.items() if t.replace("_", "") == plain), ())
    return [f for n in dict.fromkeys(names) if (f := FAMILIES[n]).marker in vocabulary or not f.marker]
