"""Multilingual translation models read and write the languages that the columns name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from families import FAIRSEQ_40
from shearling.data import Rows, encode
from shearling.data.languages import languages_of
from shearling.engine.decoder import start_of, write
from shearling.errors import DataError

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def nllb() -> Any:
    words = ["<s>", "<pad>", "</s>", "<unk>", "▁", *LETTERS]
    return transformers.NllbTokenizer(vocab={word: n for n, word in enumerate(words)}, merges=[], model_max_length=40)


def mbart() -> Any:
    codes = ["ar_AR", "de_DE", "en_XX"]
    words = ["<s>", "<pad>", "</s>", "<unk>", "▁", *LETTERS, *codes, "<mask>"]
    return transformers.MBartTokenizer(vocab=[(word, -1.0) for word in words], model_max_length=40)


def model_for(tokenizer: Any, cls: str, **more: Any) -> Any:
    sizes = FAIRSEQ_40 | {"vocab_size": len(tokenizer), "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2} | more
    found = getattr(transformers, cls)
    torch.manual_seed(0)
    return found(found.config_class(**sizes)).eval()


def batch_of(tokenizer: Any, model: Any, rows: list[dict[str, Any]], **options: Any) -> Any:
    rows_ = Rows.from_records(rows)
    return encode(rows_, tokenizer, "seq2seq", model_config=model.config, model=model, batch_size=4, **options)[0]


def words_of(tokenizer: Any, ids: torch.Tensor) -> list[str]:
    return list(tokenizer.convert_ids_to_tokens(ids[ids >= 0].tolist()))


def test_nllb_begins_its_targets_with_the_language_of_their_column() -> None:
    tokenizer = nllb()
    model = model_for(tokenizer, "M2M100ForConditionalGeneration")
    batch = batch_of(tokenizer, model, [{"eng_Latn": "a cat", "deu_Latn": "katze"}])
    assert words_of(tokenizer, batch["input_ids"][0])[0] == "eng_Latn"
    assert words_of(tokenizer, batch["decoder_input_ids"][0])[:2] == ["</s>", "deu_Latn"]
    assert words_of(tokenizer, batch["labels"][0])[0] == "deu_Latn"
    assert (tokenizer.src_lang, tokenizer.tgt_lang) == ("eng_Latn", None), "the tokenizer is left as it was"
    written = write(model, {"input_ids": batch["input_ids"]}, 4)
    assert words_of(tokenizer, written[0])[:2] == ["</s>", "deu_Latn"]
    assert model.generation_config.forced_bos_token_id is None


def test_mbart_begins_after_the_language_and_columns_may_leave_the_country_out() -> None:
    tokenizer = mbart()
    model = model_for(tokenizer, "MBartForConditionalGeneration", decoder_start_token_id=None)
    batch = batch_of(tokenizer, model, [{"translation": {"en": "a cat", "de": "katze"}}])
    assert words_of(tokenizer, batch["input_ids"][0])[-1] == "en_XX"
    assert words_of(tokenizer, batch["decoder_input_ids"][0])[0] == "de_DE"
    assert start_of(model) == {"decoder_start_token_id": tokenizer.convert_tokens_to_ids("de_DE")}
    assert words_of(tokenizer, write(model, {"input_ids": batch["input_ids"]}, 4)[0])[0] == "de_DE"


def test_a_language_that_nothing_tells_is_asked_for() -> None:
    tokenizer, rows = nllb(), [{"source": "a cat", "target": "katze"}]
    model = model_for(tokenizer, "M2M100ForConditionalGeneration")
    with pytest.raises(DataError, match=r"NllbTokenizer knows 202 languages.*'source' and 'target' do not say"):
        batch_of(tokenizer, model, rows)
    with pytest.raises(DataError, match="the column 'eng_Latn' does not say"):
        batch_of(tokenizer, model, [{"eng_Latn": "a cat"}], labels="ignore")
    model.generation_config.forced_bos_token_id = tokenizer.convert_tokens_to_ids("deu_Latn")
    assert words_of(tokenizer, batch_of(tokenizer, model, rows)["labels"][0])[0] == "deu_Latn"
    tokenizer.tgt_lang = "fra_Latn"
    assert words_of(tokenizer, batch_of(tokenizer, model, rows)["labels"][0])[0] == "fra_Latn"


def test_summaries_stay_in_the_language_of_the_text() -> None:
    tokenizer = mbart()
    found = languages_of(tokenizer, None, "text", "summary", same=True)
    assert found is not None
    assert found.source == found.target == "en_XX"
    assert languages_of(transformers.PreTrainedTokenizerFast, None, "text", "summary") is None
