"""The model of a session as clients ask for it, in the shapes of all protocols at once: each reads what it knows."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any


def model_entry(name: str, created: int, max_context: int) -> dict[str, Any]:
    """One model; `created` in unix seconds, `max_context` in tokens."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "sandlot",
        "max_model_len": max_context,
        "type": "model",
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "display_name": name,
        "max_input_tokens": max_context,
        "name": f"models/{name}",
        "displayName": name,
        "inputTokenLimit": max_context,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }


def model_list(entry: dict[str, Any]) -> dict[str, Any]:
    """A list of one model."""
    page = {"has_more": False, "first_id": entry["id"], "last_id": entry["id"]}
    return {"object": "list", "data": [entry], **page, "models": [entry]}
