"""From rows to batches: draw a sample, tokenise, label, pad and stack."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shearling.data.batches import Batches
from shearling.data.encoder import EncoderOptions, make_encoder
from shearling.data.lm import make_blocks
from shearling.data.rows import Rows
from shearling.data.tasks import Task
from shearling.errors import InputError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase
    from typing_extensions import Unpack

_log = logging.getLogger(__name__)


def encode(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    task: Task | str,
    *,
    model_config: PretrainedConfig,
    max_length: int | None = None,
    batch_size: int = 32,
    samples: int | None = None,
    bucket: bool = True,
    **options: Unpack[EncoderOptions],
) -> Batches:
    """Draw `samples` examples without replacement and turn them into batches for the model's forward.

    An example is one model input: a text, a pair, a window of a long context, or a block of text.
    """
    if samples is not None and samples < 1:
        raise InputError(f"{samples} samples were asked for; ask for at least 1")
    encoder = make_encoder(tokenizer, task, model_config, max_length=max_length, **options)
    rng, given = np.random.default_rng(encoder.seed), 0
    if encoder.task.kind == "lm" and samples is not None:
        rows = rows.select(rng.permutation(len(rows)))
        examples = make_blocks(encoder, rows, samples)
    else:
        drawn = _draw(rng, len(rows), samples)
        examples = encoder.tokenize(rows.select(drawn))
        given = len(rows) if len(examples) == len(drawn) else 0  # a row may give several windows
        examples = examples.select(_draw(rng, len(examples), samples))
    if samples is not None and len(examples) < samples:
        _log.info(
            "%s gives %d examples, fewer than the %d asked for; all are used", rows.source, len(examples), samples
        )
    batches = encoder.batches(examples, batch_size, bucket=bucket)
    batches.given = given
    return batches


def _draw(rng: np.random.Generator, count: int, samples: int | None) -> NDArray[np.int64]:
    if samples is None or samples >= count:
        return np.arange(count)
    return np.sort(rng.choice(count, size=samples, replace=False))
