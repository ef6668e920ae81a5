"""The demo's texts from Python's documentation: the first sentence of a paragraph is the query for its rest."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from shearling.errors import InputError

HELD_OUT = 256  # paragraphs to search through
LEAST_WORDS = 12  # of a passage


@dataclass(frozen=True)
class Texts:
    """Sentences for the sample, and a retrieval task without them: passages[i] is relevant to queries[i]."""

    sample: list[str]
    queries: list[str]
    passages: list[str]


def texts(*, samples: int, seed: int) -> Texts:
    """Hold out some paragraphs, and draw the sample from the sentences of the others."""
    paragraphs = read_paragraphs()
    openings: dict[str, str] = {}  # first sentence by the rest; paragraphs may be repeated
    for first, *rest in paragraphs:
        if is_prose(first) and len(" ".join(rest).split()) >= LEAST_WORDS and any(map(is_prose, rest)):
            openings.setdefault(" ".join(rest), first)
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(len(openings))[: min(HELD_OUT, 3 * len(openings) // 4)]
    pairs = [list(openings.items())[i] for i in sorted(chosen.tolist())]
    asked = {first for _, first in pairs}
    searched = {sentence for p in paragraphs if p[0] in asked for sentence in p}
    free = list(dict.fromkeys(s for p in paragraphs for s in p if s not in searched and is_prose(s)))
    if not 0 < samples <= len(free):
        raise InputError(f"{samples} samples were asked for; the text has {len(free)} to give.")
    sample = [free[i] for i in rng.permutation(len(free))[:samples]]
    return Texts(sample, [first for _, first in pairs], [rest for rest, _ in pairs])


def read_paragraphs() -> list[list[str]]:
    """The paragraphs of `pydoc_data.topics`, split into sentences, in a fixed order."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise InputError("This Python comes without pydoc_data, the text the demo reads; use another build.") from None
    found = []
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            plain = re.sub(r"\*+(\S(?:[^*]*\S)?)\*+", r"\1", " ".join(paragraph.split())).lstrip("*-# ")
            found.append(re.split(r"(?<=[.?!])\s+(?=[A-Z\"“(])", plain))
    return found


def is_prose(text: str) -> bool:
    """Whether this is an English sentence, not code or grammar."""
    letters = sum(c.isalpha() or c == " " for c in text)
    return (
        6 <= len(text.split()) <= 60
        and text[0].isupper()
        and text[-1] in ".?!"
        and letters >= 0.85 * len(text)
        and not any(mark in text for mark in ("::=", ">>>", "****", "====", "| "))
    )
