"""Tool calls as popular models write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sandlot.chat.messages import Tool


def tool(name: str, **properties: object) -> Tool:
    return Tool(name, "", {"type": "object", "properties": properties})


TOOLS = (
    tool("Bash", command={"type": "string"}, timeout={"type": "integer"}),
    tool("Write", path={"type": "string"}, content={"type": "string"}),
    Tool("LS"),
)

Calls = Sequence[tuple[str, dict[str, object]]]


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def glm(calls: Calls, gap: str = "\n") -> str:
    def one(name: str, arguments: dict[str, object]) -> str:
        pairs = [
            f"<arg_key>{k}</arg_key>{gap}<arg_value>{v if isinstance(v, str) else dumps(v)}</arg_value>"
            for k, v in arguments.items()
        ]
        return "<tool_call>" + gap.join([name, *pairs]) + gap + "</tool_call>"

    return "\n".join(one(*c) for c in calls)


def minimax(calls: Calls) -> str:
    def one(name: str, arguments: dict[str, object]) -> str:
        lines = [
            f'<parameter name="{k}">{v if isinstance(v, str) else dumps(v)}</parameter>' for k, v in arguments.items()
        ]
        return "\n".join([f'<invoke name="{name}">', *lines, "</invoke>"])

    return "<minimax:tool_call>\n" + "\n".join(one(*c) for c in calls) + "\n</minimax:tool_call>"


def kimi(calls: Calls) -> str:
    body = "".join(
        f"<|tool_call_begin|>functions.{n}:{k}<|tool_call_argument_begin|>{dumps(a)}<|tool_call_end|>"
        for k, (n, a) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"


def deepseek(calls: Calls) -> str:
    body = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{dumps(a)}\n```<｜tool▁call▁end｜>" for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def deepseek31(calls: Calls) -> str:
    body = "".join(f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumps(a)}<｜tool▁call▁end｜>" for n, a in calls)
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def dsml(calls: Calls, section: str = "tool_calls") -> str:
    def value(name: str, given: object) -> str:
        string = str(isinstance(given, str)).lower()
        text = given if isinstance(given, str) else dumps(given)
        return f'<｜DSML｜parameter name="{name}" string="{string}">{text}</｜DSML｜parameter>\n'

    invoked = "".join(
        f'<｜DSML｜invoke name="{n}">\n{"".join(value(*i) for i in a.items())}</｜DSML｜invoke>\n' for n, a in calls
    )
    return f"<｜DSML｜{section}>\n{invoked}</｜DSML｜{section}>"


def mistral(calls: Calls) -> str:
    return "[TOOL_CALLS]" + dumps([{"name": n, "arguments": a, "id": f"abcdefgh{k}"} for k, (n, a) in enumerate(calls)])


def json_list(calls: Calls, opening: str = "<TOOLCALL>", closing: str = "</TOOLCALL>") -> str:
    return opening + dumps([{"name": n, "arguments": a} for n, a in calls]) + closing


def json_lines(calls: Calls) -> str:
    return "\n".join(["<tool_calls>", *(dumps({"name": n, "arguments": a}) for n, a in calls), "</tool_calls>"])


def mistral_named(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{dumps(a)}" for n, a in calls)


def llama(calls: Calls) -> str:
    return "; ".join(dumps({"name": n, "parameters": a}) for n, a in calls)


def llama_tagged(calls: Calls) -> str:
    return "<|python_tag|>" + llama(calls)


TOKENS = [
    *("<|tool_call>", "<tool_call|>", '<|"|>', "]<]minimax[>[", "<|open|>", "<|close|>", "<|sep|>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<|START_ACTION|>", "<|END_ACTION|>"),
    *("<|tools_prefix|>", "<|tools_suffix|>"),
]
"""What is a token in every vocabulary whose model writes it: found where it was sampled, not where it is spelled."""
SAMPLED = {literal: f"\U00100000{chr(0x100001 + k)}\U0010fffd" for k, literal in enumerate(TOKENS)}


def conceal(text: str) -> str:
    for literal, mark in SAMPLED.items():
        text = text.replace(literal, mark)
    return text


def reveal(text: str) -> str:
    for literal, mark in SAMPLED.items():
        text = text.replace(mark, literal)
    return text


def cohere(calls: Calls) -> str:
    items = [
        f'    {{"tool_call_id": "{k}", "tool_name": {dumps(n)}, "parameters": {dumps(a)}}}'
        for k, (n, a) in enumerate(calls)
    ]
    return conceal("<|START_ACTION|>") + "[\n" + ",\n".join(items) + "\n]" + conceal("<|END_ACTION|>")


def apertus(calls: Calls) -> str:
    return conceal("<|tools_prefix|>") + dumps([{n: a} for n, a in calls]) + conceal("<|tools_suffix|>")


def python(calls: Calls, opening: str = "<|tool_call_start|>[", closing: str = "]<|tool_call_end|>") -> str:
    called = [f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls]
    return conceal(opening) + ("\n" if opening.endswith("\n") else ", ").join(called) + conceal(closing)


def gemma(calls: Calls) -> str:
    def value(given: object) -> str:
        if isinstance(given, dict):
            return "{" + ",".join(f"{k}:{value(v)}" for k, v in given.items()) + "}"
        if isinstance(given, list):
            return "[" + ",".join(map(value, given)) + "]"
        quote = SAMPLED['<|"|>']
        return f"{quote}{given}{quote}" if isinstance(given, str) else dumps(given)

    return "".join(f"{SAMPLED['<|tool_call>']}call:{n}{value(a)}{SAMPLED['<tool_call|>']}" for n, a in calls)


def xtml(calls: Calls) -> str:
    def tagged(tag: str, inner: str, attributes: str = "") -> str:
        opening, closing, end = (SAMPLED[t] for t in ("<|open|>", "<|close|>", "<|sep|>"))
        return f"{opening}{tag}{attributes}{end}{inner}{closing}{tag}{end}"

    def argument(key: str, given: object) -> str:
        kind = "string" if isinstance(given, str) else "object" if isinstance(given, dict) else "number"
        return tagged("argument", given if isinstance(given, str) else dumps(given), f' key="{key}" type="{kind}"')

    called = (
        tagged("call", "".join(argument(*i) for i in a.items()), f' tool="{n}" index="{k}"')
        for k, (n, a) in enumerate(calls, 1)
    )
    return tagged("tools", "".join(called))


def elements(calls: Calls) -> str:
    mark = SAMPLED["]<]minimax[>["]

    def inside(given: object) -> str:
        if isinstance(given, dict):
            return "".join(f"{mark}<{k}>{inside(v)}{mark}</{k}>" for k, v in given.items())
        if isinstance(given, list):
            return "".join(f"{mark}<item>{inside(v)}{mark}</item>" for v in given)
        return given if isinstance(given, str) else dumps(given)

    called = "".join(f'{mark}<invoke name="{n}">{inside(a)}{mark}</invoke>\n' for n, a in calls)
    return f"{mark}<tool_call>\n{called}{mark}</tool_call>"


@dataclass(frozen=True)
class Writer:
    form: str
    write: Callable[[Calls], str]
    text_before: bool = True


WRITERS = {
    "glm-4.5": Writer("glm", glm),
    "glm-4.7": Writer("glm", lambda calls: glm(calls, "")),
    "minimax": Writer("minimax", minimax),
    "kimi": Writer("kimi", kimi),
    "deepseek v3": Writer("deepseek", deepseek),
    "deepseek v3.1": Writer("deepseek", deepseek31),
    "deepseek v3.2": Writer("dsml", lambda calls: dsml(calls, "function_calls")),
    "deepseek v4": Writer("dsml", dsml),
    "mistral": Writer("mistral", mistral),
    "mistral named": Writer("mistral", mistral_named),
    "json list": Writer("json", json_list),
    "json list, open": Writer("json", lambda calls: json_list(calls, "<|tool_call|>", "")),
    "json lines": Writer("json", json_lines),
    "cohere": Writer("json", cohere),
    "apertus": Writer("json", apertus),
    "python": Writer("python", python),
    "python lines": Writer("python", lambda calls: python(calls, "<function_calls>\n", "\n</function_calls>")),
    "gemma": Writer("gemma", gemma),
    "xtml": Writer("xtml", xtml),
    "minimax-m3": Writer("minimax-m3", elements),
    "llama": Writer("llama", llama, text_before=False),
    "llama tagged": Writer("llama", llama_tagged),
}
