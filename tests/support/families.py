"""Checkpoint directories with the vocabulary of known model families, for chat formats that need no weights."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken

from support.toy_model import train_tokenizer

_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
_QWEN = (*_CHATML, "<tool_response>", "</tool_response>", "<|vision_start|>", "<|vision_end|>")
_GLM = (
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<tool_response>", "</tool_response>"),
)
_KIMI = (
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
_DEEPSEEK = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
_LLAMA = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|eom_id|>", "<|python_tag|>"),
)
_MINIMAX = ("]~!b[", "]~b]", "[e~[", "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>")

FAMILY_TOKENS: dict[str, tuple[str, ...]] = {
    "qwen3": _QWEN,
    "qwen3.5": (*_QWEN, "<|image_pad|>", "<|video_pad|>"),
    "glm-4.5": _GLM,
    "glm-5": _GLM,
    "kimi-k2": _KIMI,
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
    "llama-3": _LLAMA,
    "minimax-m2": _MINIMAX,
}
"""The control tokens of each family, as its renderer asks for them."""

OTHER_TOKENS: dict[str, tuple[str, ...]] = {
    "deepseek-v4": (
        *("<think>", "</think>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        *("<｜latest_reminder｜>", "｜DSML｜", "<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>"),
        *("<｜title｜>", "<｜read_url｜>"),
    ),
    "gemma4": (
        *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
        *("<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>", "<|think|>"),
        *("<|image>", "<|image|>", "<image|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
    ),
    "hy3": tuple(
        f"<{name}:opensource{end}"
        for names, end in (
            (("｜hy_begin_of_sentence", "｜hy_eos", "｜hy_User", "｜hy_Assistant", "｜reasoning_mode"), "｜>"),
            (("think", "/think", "tool_calls", "/tool_calls", "tool_call", "/tool_call", "tool_sep"), ">"),
            (("arg_key", "/arg_key", "arg_value", "/arg_value", "tool_responses", "/tool_responses"), ">"),
            (("tool_response", "/tool_response"), ">"),
        )
        for name in names
    ),
}
"""Families whose answers only the library reads, or that are continued after some turns only."""

KIMI_TEMPLATE = r"""
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' }}
{{- tools | tojson(separators=(',', ':'), sort_keys=true) }}{{- '<|im_end|>' }}{% endif %}
{%- for message in messages %}
{%- if loop.first and message.role != 'system' %}
{{- '<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>\n' }}
{%- endif %}
{%- if message.role == 'tool' %}
{{- '<|im_system|>' ~ message.name ~ '<|im_middle|>## Return of ' ~ message.tool_call_id ~ '\n' ~ message.content }}
{%- else %}
{{- '<|im_' ~ message.role ~ '|>' ~ message.role ~ '<|im_middle|>' ~ message.content }}
{%- endif %}
{%- for c in message.tool_calls or [] %}
{%- if loop.first %}{{- '<|tool_calls_section_begin|>' }}{% endif %}
{{- '<|tool_call_begin|>' ~ c.id ~ '<|tool_call_argument_begin|>' ~ (c.function.arguments | tojson) }}
{{- '<|tool_call_end|>' }}
{%- if loop.last %}{{- '<|tool_calls_section_end|>' }}{% endif %}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}
"""
"""Writes what the Kimi K2 family writes."""


def write_family_dir(directory: Path, family: str, *, model_type: str = "", template: str = "") -> Path:
    """A checkpoint directory of a family: its tokens in a toy vocabulary, and a template where one is given."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    known = set(tokenizer.get_vocab(with_added_tokens=True))
    new = [t for t in (FAMILY_TOKENS | OTHER_TOKENS)[family] if t not in known]
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in new])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    if template:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory
