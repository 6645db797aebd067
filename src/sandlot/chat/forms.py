"""The forms in which models write tool calls, and which one a checkpoint uses."""

from __future__ import annotations

from collections.abc import Callable, Container

from sandlot.chat.deepseek_calls import MARKER as DEEPSEEK
from sandlot.chat.deepseek_calls import DeepSeekForm
from sandlot.chat.dsml_calls import MARKER as DSML
from sandlot.chat.dsml_calls import DsmlForm
from sandlot.chat.element_calls import MARKER as ELEMENT
from sandlot.chat.element_calls import ElementForm
from sandlot.chat.gemma_calls import MARKER as GEMMA
from sandlot.chat.gemma_calls import GemmaForm
from sandlot.chat.glm_calls import MARKER as GLM
from sandlot.chat.glm_calls import GlmForm
from sandlot.chat.json_lists import PAIRS as JSON_PAIRS
from sandlot.chat.json_lists import JsonForm
from sandlot.chat.kimi_calls import MARKER as KIMI
from sandlot.chat.kimi_calls import KimiForm
from sandlot.chat.llama_calls import MARKER as LLAMA
from sandlot.chat.llama_calls import LlamaForm
from sandlot.chat.markup import CALL_PAIRS, Form, Reading
from sandlot.chat.minimax_calls import MARKER as MINIMAX
from sandlot.chat.minimax_calls import MiniMaxForm
from sandlot.chat.mistral_calls import MARKER as MISTRAL
from sandlot.chat.mistral_calls import MistralForm
from sandlot.chat.python_calls import PAIRS as PYTHON_PAIRS
from sandlot.chat.python_calls import PythonForm
from sandlot.chat.tagged_calls import TaggedForm
from sandlot.chat.xtml_calls import MARKER as XTML
from sandlot.chat.xtml_calls import XtmlForm

FORMS: dict[str, Callable[[Reading], Form]] = {
    "tagged": TaggedForm,
    "glm": GlmForm,
    "minimax": MiniMaxForm,
    "kimi": KimiForm,
    "deepseek": DeepSeekForm,
    "dsml": DsmlForm,
    "gemma": GemmaForm,
    "json": JsonForm,
    "python": PythonForm,
    "mistral": MistralForm,
    "llama": LlamaForm,
    "xtml": XtmlForm,
    "minimax-m3": ElementForm,
}
"""Every form by its name; `tagged` reads JSON and XML between `<tool_call>` markers."""

# GLM calls stand between the tagged form's markers, so its own marker is looked for first. Llama's marker is in the
# vocabulary of every fine-tune of it, whatever form that was taught, so it is looked for last.
_MARKERS = (
    ("glm", GLM),
    ("minimax", MINIMAX),
    ("kimi", KIMI),
    ("dsml", DSML),
    ("deepseek", DEEPSEEK),
    ("gemma", GEMMA),
    ("xtml", XTML),
    ("minimax-m3", ELEMENT),
    *(("json", opening) for opening, _ in JSON_PAIRS),
    *(("python", opening) for opening, _ in PYTHON_PAIRS),
    *(("tagged", opening) for opening, _ in CALL_PAIRS),
    ("mistral", MISTRAL),
    ("llama", LLAMA),
)


def detect_form(template: str, vocabulary: Container[str]) -> str:
    """The form whose marker the template writes, else the one whose marker the vocabulary has, else `tagged`."""
    for place in (template, vocabulary):
        for name, marker in _MARKERS:
            if marker in place:
                return name
    return "tagged"


def form_of(reading: Reading) -> Form:
    """The form of a reply's markup."""
    return FORMS[reading.markup.form](reading)
