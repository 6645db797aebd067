"""Kinds of chat templates that released models have beside the usual shapes, in a few lines each."""

from __future__ import annotations

from support.chat_templates import HEADERS, SHAPES, STRIPPING, Shape

CHATML = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
SIMPLE = r"""
{%- for t in tools or [] %}{{- t | tojson }}{{- '\n' }}{% endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{- '<tool_call>' ~ (c.function | tojson) ~ '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""

# Nothing closes a message: the model stops at the token that opens the user's or the tool's.
OPENING = r"""
{%- for t in tools or [] %}{{- '<|system|>' ~ (t | tojson) }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '<|observation|>\n' + m.content }}
{%- else %}{{- '<|' + m.role + '|>\n' + m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}
{{- '\n<tool_call>' + c.function.name }}
{%- for k, v in c.function.arguments | items %}
{{- '\n<arg_key>' + k + '</arg_key>\n<arg_value>' + v + '</arg_value>' }}{% endfor %}
{{- '\n</tool_call>' }}
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}
"""
OPENING_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")

KINDS: dict[str, Shape] = {
    "opening": Shape(OPENING, OPENING_TOKENS, "", "<|endoftext|>", stops=("<|user|>", "<|observation|>")),
    # Since the last question every turn has a thought, if an empty one; before it none has.
    "late thoughts": Shape(STRIPPING.replace(" and (loop.last or thought)", ""), CHATML, "", "<|im_end|>"),
    # Arguments are joined to strings, and the end token is written where no answer is wanted.
    "text arguments": Shape(
        SIMPLE.replace("(c.function | tojson)", "'{\"name\": \"' + c.function.name + '\", \"arguments\": ' + "
        "c.function.arguments + '}'").replace("{% endif %}\n", "{% else %}{{- eos_token }}{% endif %}\n"),
        (*CHATML, "<|end|>"), "", "<|end|>",
    ),
    # System messages are gathered at the top.
    "gathered": Shape(
        "{%- for m in messages if m.role == 'system' %}{{- m.content + '\\n' }}{% endfor %}"
        + SIMPLE.replace("for m in messages", "for m in messages if m.role != 'system'"), CHATML, "", "<|im_end|>",
    ),
    # An assistant message that is the last one is held back.
    "held back": Shape(
        "{%- if messages[-1].role == 'assistant' %}{%- set messages = messages[:-1] %}{% endif %}" + SIMPLE,
        CHATML, "", "<|im_end|>",
    ),
    # The generation prompt, with an empty thought, is always there.
    "always prompted": Shape(
        SIMPLE.partition("{%- if add")[0] + "{{- '<|im_start|>assistant\\n<think></think>' }}",
        CHATML, "", "<|im_end|>",
    ),
    "moving tools": SHAPES["moving tools"],
    "headers": Shape(HEADERS, SHAPES["headers"].tokens, "<|begin|>", "<|eot_id|>"),
}  # fmt: skip
