"""Other methods that prune language models without retraining, each written from its paper.

Every method is a function (subject, share) -> pruned model. `share` is the part of the layers' parameters that stays.
What a method measures is measured once per subject and serves every share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rivals.flap import flap
from rivals.layers import replaceme, shortgpt
from rivals.magnitude import magnitude
from rivals.slicegpt import slicegpt
from rivals.subject import Subject
from rivals.taylor import taylor
from rivals.wanda import wanda

Rival = Callable[[Subject, float], Any]
RIVALS: dict[str, Rival] = {
    "magnitude": magnitude,
    "wanda-sp": wanda,
    "flap": flap,
    "taylor": taylor,
    "shortgpt": shortgpt,
    "replaceme": replaceme,
    "slicegpt": slicegpt,
}

__all__ = ["RIVALS", "Rival", "Subject"]
