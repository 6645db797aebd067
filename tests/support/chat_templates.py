"""Chat templates after the shapes that released models have, in our own words, and directories to load them from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken

from sandlot.chat.format import TemplateFormat
from sandlot.chat.messages import Message, Tool
from support.toy_model import chat_template, train_tokenizer

# ChatML with grouped tool results; thoughts before the last real question are left out, and the last turn always
# gets a thought block, even an empty one.
STRIPPING = r"""
{%- macro call(c) %}{{- '<tool_call>\n{"name": "' ~ c.name ~ '", "arguments": ' }}
{%- if c.arguments is string %}{{- c.arguments }}{% else %}{{- c.arguments | tojson }}{% endif %}
{{- '}\n</tool_call>' }}{%- endmacro %}
{%- if tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{% endif %}
{{- '# Tools\n\n<tools>' }}
{%- for tool in tools %}{{- '\n' ~ (tool | tojson) }}{% endfor %}
{{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(open=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
{%- set index = messages | length - 1 - loop.index0 %}
{%- if ns.open and message.role == 'user' and not message.content.startswith('<tool_response>') %}
{%- set ns.open = false %}{%- set ns.last = index %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}{%- set thought = message.reasoning_content or '' %}
{%- if not thought and '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{- content }}{%- endif %}
{%- for c in message.tool_calls or [] %}
{%- if content or not loop.first %}{{- '\n' }}{% endif %}{{- call(c.function) }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""

# ChatML whose generation prompt opens a thought; calls in the XML form.
XML = r"""
{%- if messages[0].role == 'system' or tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}{% endif %}
{%- if tools %}{{- '\n\n# Tools\n' }}{% for t in tools %}{{- '\n' ~ (t | tojson) }}{% endfor %}
{{- '\n<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>' }}{% endif %}
{{- '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- if not loop.first %}{{- raise_exception('a system message must come first') }}{% endif %}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}
{%- if message.reasoning_content %}{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}
{%- generation %}{{- message.content }}{% endgeneration %}
{%- for c in message.tool_calls or [] %}
{{- '\n<tool_call>\n<function=' + c.function.name + '>\n' }}
{%- for key, value in c.function.arguments | items %}
{{- '<parameter=' + key + '>\n' }}{{- value if value is string else value | tojson }}{{- '\n</parameter>\n' }}
{%- endfor %}{{- '</function>\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
{%- else %}{{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{% endif %}
"""

# Headers, a begin token, a date, tools in the system turn, one call a turn, the text of a turn with calls left out.
HEADERS = r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + strftime_now('%d %b %Y') + '\n\n' }}
{%- for t in tools or [] %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{% endfor %}
{{- system + '<|eot_id|>' }}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{- message.content | tojson }}{{- '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{% endif %}
{%- set c = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + c.name + '", "parameters": ' }}
{{- c.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""

# Brackets; strict alternation; results are paired with calls by ids of nine characters; the end token closes a turn.
PAIRED = r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}
{%- set messages = messages[1:] %}{% endif %}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- set ns = namespace(open=[], last='') %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if ns.last == 'user' or ns.last == 'tool' %}{{- raise_exception('roles must alternate') }}{% endif %}
{%- if ns.open %}{{- raise_exception('a call has no result') }}{% endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'assistant' %}
{{- message.content }}
{%- if message.tool_calls %}
{%- set ns.open = message.tool_calls | map(attribute='id') | list %}
{%- for c in message.tool_calls %}
{%- if c.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{% endif %}
{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' }}{{- c.function.arguments | tojson }}
{%- endfor %}
{%- endif %}
{{- eos_token }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id not in ns.open %}{{- raise_exception('a result answers no call') }}{% endif %}
{%- set ns.open = ns.open | reject('equalto', message.tool_call_id) | list %}
{{- '[TOOL_RESULTS]' + message.name + ' ' + message.content + '[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('unknown role ' + message.role) }}
{%- endif %}
{%- set ns.last = message.role %}
{%- endfor %}
"""

# The list of tools stands before the last question, so it moves with each one: only results can be gone on from.
MOVING_TOOLS = r"""
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if loop.index0 == ns.last and tools %}{{- '<|im_start|>tools\n' ~ (tools | tojson) ~ '<|im_end|>\n' }}{% endif %}
{{- '<|im_start|>' + m.role + '\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{- '<tool_call>' ~ (c.function | tojson) ~ '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""

# Old results are shortened once something follows.
SHORTENING = r"""
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{{- m.content[:20] ~ '[...]' if m.role == 'tool' and loop.index0 < messages | length - 3 else m.content }}
{%- for c in m.tool_calls or [] %}{{- '<tool_call>' ~ (c.function | tojson) ~ '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""

# No system role, no tool role, no tools, strict alternation.
PLAIN = r"""
{{- bos_token }}
{%- for m in messages %}
{%- if m.role not in ('user', 'assistant') %}{{- raise_exception(m.role ~ ' is not supported') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}
"""

# Nothing but text closes a turn.
TEXTUAL = r"""
{%- for m in messages %}{{- m.role + ': ' + m.content }}
{%- for c in m.tool_calls or [] %}{{- c.function | tojson }}{% endfor %}{{- '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- 'assistant:' }}{% endif %}
"""


@dataclass(frozen=True)
class Shape:
    """A template with the tokens its vocabulary has and whether it can be continued turn by turn.

    `stops` are tokens besides `eos` at which the model stops.
    """

    template: str
    tokens: tuple[str, ...]
    bos: str
    eos: str
    can_extend: bool = True
    stops: tuple[str, ...] = ()


_CHATML = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>")
_HEADERS = ("<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_BRACKETS = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
)
_TURNS = ("<bos>", "<start_of_turn>", "<end_of_turn>")

SHAPES: dict[str, Shape] = {
    "embedded": Shape(chat_template(), _CHATML, "", "<|im_end|>"),
    "stripping": Shape(STRIPPING, _CHATML, "", "<|im_end|>"),
    "xml": Shape(XML, _CHATML, "", "<|im_end|>"),
    "headers": Shape(HEADERS, _HEADERS, "<|begin|>", "<|eot_id|>"),
    "paired": Shape(PAIRED, _BRACKETS, "<s>", "</s>"),
    "moving tools": Shape(MOVING_TOOLS, _CHATML, "", "<|im_end|>"),
    "shortening": Shape(SHORTENING, _CHATML, "", "<|im_end|>", can_extend=False),
    "plain": Shape(PLAIN, _TURNS, "<bos>", "<end_of_turn>"),
    "textual": Shape(TEXTUAL, ("<eos>",), "", "<eos>", can_extend=False),
}


def write_chat_dir(directory: Path, shape: Shape) -> Path:
    """What a checkpoint directory holds besides weights: tokenizer, template, and the end token."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    known = set(tokenizer.get_vocab(with_added_tokens=True))
    special = [t for t in shape.tokens if t not in known]
    tokenizer.add_tokens([AddedToken(t, special=t.startswith("<|"), normalized=False) for t in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": shape.eos}
    if shape.bos:
        config["bos_token"] = shape.bos
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    stops = [tokenizer.token_to_id(t) for t in shape.stops]
    if stops:
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(shape.template, encoding="utf-8")
    return directory


def split_turn(chat: TemplateFormat, base: Sequence[Message], turn: Message, tools: Sequence[Tool]) -> list[int]:
    """What the model would have to sample for `turn`, as the template writes it: without the header, with the close."""
    head = chat.tokenizer.encode(chat.text(base, tools, generation_prompt=False))
    ids = chat.tokenizer.encode(chat.text([*base, turn], tools, generation_prompt=False))
    assert ids[: len(head)] == head
    header = chat.render(base, tools)[len(head) :]
    ids = ids[len(head) :]
    if ids[: len(header)] == header:
        ids = ids[len(header) :]
    while ids[-1] not in chat.stop_token_ids:
        ids.pop()
    return ids
