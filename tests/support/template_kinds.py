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

# Results stand in the turn that called, opened by a token at which the model stops; the text of the turn comes after.
RESULTS_WITHIN = r"""
{%- for t in tools or [] %}{{- t | tojson }}{{- '\n' }}{% endfor %}
{%- set ns = namespace(within=false) %}
{%- for m in messages %}
{%- if m.role != 'tool' %}{%- set ns.within = false %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- for c in m.tool_calls or [] %}{{- '<tool_call>' ~ (c.function | tojson) ~ '</tool_call>' }}{% endfor %}
{%- if m.tool_calls %}{%- set ns.within = true %}
{%- set run = namespace(open=true, results=[]) %}
{%- for r in messages[loop.index:] %}
{%- set run.open = run.open and r.role == 'tool' %}
{%- if run.open %}{%- set run.results = run.results + [r.content] %}{% endif %}
{%- endfor %}
{%- for r in run.results %}{{- '<|result|>' + r + '<|end_result|>' }}{% else %}{{- '<|result|>' }}{% endfor %}
{%- endif %}
{{- m.content }}
{%- if m.content or not m.tool_calls or (run.results and loop.index + run.results | length < messages | length) %}
{{- '<|im_end|>\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.within %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""

# Everything stands between tags whose brackets are tokens: thought, text and calls of an answer, too.
TAGS = r"""
{%- macro tag(name, inner, more='') %}
{{- '<|open|>' ~ name ~ more ~ '<|sep|>' ~ inner ~ '<|close|>' ~ name ~ '<|sep|>' }}
{%- endmacro %}
{%- for t in tools or [] %}{{- t | tojson }}{{- '\n' }}{% endfor %}
{%- for m in messages %}
{%- set ns = namespace(inner=m.content, calls='') %}
{%- if m.role == 'assistant' %}
{%- set ns.inner = tag('think', m.reasoning_content or '') ~ tag('response', m.content) %}
{%- for c in m.tool_calls or [] %}
{%- set given = namespace(text='') %}
{%- for k, v in c.function.arguments | items %}
{%- set given.text = given.text ~ tag('argument', v, ' key="' ~ k ~ '" type="string"') %}
{%- endfor %}
{%- set ns.calls = ns.calls ~ tag('call', given.text, ' tool="' ~ c.function.name ~ '" index="' ~ loop.index ~ '"') %}
{%- endfor %}
{%- if ns.calls %}{%- set ns.inner = ns.inner ~ tag('tools', ns.calls) %}{% endif %}
{%- endif %}
{{- tag('message', ns.inner, ' role="' ~ m.role ~ '"') ~ '<|end_of_msg|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>' }}{% endif %}
"""

# The calls of a conversation are numbered, and results bear their numbers.
NUMBERED = r"""
{%- for t in tools or [] %}{{- t | tojson }}{{- '\n' }}{% endfor %}
{%- set ns = namespace(ids=[]) %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'tool' %}
{%- for id in ns.ids %}{%- if id == m.tool_call_id %}{{- '#' ~ loop.index0 ~ ' ' }}{% endif %}{% endfor %}
{%- endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<|START_ACTION|>[{"tool_call_id": "' ~ ns.ids | length ~ '", "tool_name": "' ~ c.function.name }}
{{- '", "parameters": ' ~ (c.function.arguments | tojson) ~ '}]<|END_ACTION|>' }}
{%- set ns.ids = ns.ids + [c.id] %}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""

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
    # A line break before the close, but not in the last message: calls have a close of their own.
    "late close": Shape(
        SIMPLE.replace("<tool_call>' ~ (c.function | tojson) ~ '</tool_call>", "<TOOLCALL>[' ~ (c.function | tojson) "
        "~ ']</TOOLCALL>").replace("{{- '<|im_end|>", "{%- if m.role == 'assistant' and not loop.last %}{{- '\\n' }}"
        "{% endif %}\n{{- '<|im_end|>"),
        ("<|im_start|>", "<|im_end|>", "<TOOLCALL>", "</TOOLCALL>"), "", "<|im_end|>",
    ),
    "results within": Shape(
        RESULTS_WITHIN, (*CHATML, "<|result|>", "<|end_result|>"), "", "<|im_end|>", stops=("<|result|>",)
    ),
    "tags of tokens": Shape(
        TAGS, ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"), "", "<|end_of_msg|>"
    ),
    # A word in any system or user message turns thoughts off for all that follows, and is left out.
    "switches": Shape(
        "{%- set ns = namespace(on=true) %}{%- for m in messages if m.role in ('system', 'user') %}"
        "{%- if '/no_think' in m.content %}{%- set ns.on = false %}"
        "{%- elif '/think' in m.content %}{%- set ns.on = true %}{% endif %}{%- endfor %}"
        + SIMPLE.replace("m.content", "m.content.replace('/think', '').replace('/no_think', '')")
        .replace("assistant\\n'", "assistant\\n' + ('<think>' if ns.on else '<think></think>')"),
        CHATML, "", "<|im_end|>",
    ),
    # Of several calls the first is shown, and nothing said of the others.
    "first call": Shape(SIMPLE.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"), CHATML, "", "<|im_end|>"),
    # An answer that says nothing is refused, as are users in a row.
    "no empty answers": Shape(
        "{%- for m in messages if m.role != 'system' %}"
        "{%- set twice = loop.previtem and loop.previtem.role == m.role %}"
        "{%- if (m.role == 'user' and twice) or (m.role == 'assistant' and not (m.content or m.tool_calls)) %}"
        "{{- raise_exception('nothing said') }}{% endif %}{%- endfor %}" + SIMPLE,
        CHATML, "", "<|im_end|>",
    ),
    # A result bears the number of its call within the turn.
    "numbered results": Shape(
        "{%- set ns = namespace(calls=[]) %}" + SIMPLE.replace("+ m.content }}", "}}"
        "{%- if m.tool_calls %}{%- set ns.calls = m.tool_calls %}{% endif %}{%- for c in ns.calls %}"
        "{%- if m.role == 'tool' and c.id == m.tool_call_id %}{{- '#' ~ loop.index ~ ' ' }}{% endif %}{% endfor %}"
        "{{- m.content }}"),
        CHATML, "", "<|im_end|>",
    ),
    "numbered calls": Shape(
        NUMBERED, ("<|im_start|>", "<|im_end|>", "<|START_ACTION|>", "<|END_ACTION|>"), "", "<|im_end|>"
    ),
    "moving tools": SHAPES["moving tools"],
    "headers": Shape(HEADERS, SHAPES["headers"].tokens, "<|begin|>", "<|eot_id|>"),
}  # fmt: skip
