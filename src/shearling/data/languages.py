"""Languages of multilingual models (NLLB, M2M100, mBART): codes of the tokenizer, first token of the decoder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shearling.engine.decoder import set_start
from shearling.errors import DataError

_CODE = re.compile(r"[a-z]{2}_[A-Z]{2}|[a-z]{3}_[A-Z][a-z]{3}")  # mBART, NLLB


@dataclass(frozen=True)
class Languages:
    """Codes of the tokenizer, such as `eng_Latn`."""

    source: str
    target: str


def languages_of(
    tokenizer: Any, model: Any, source: str, target: str | None, *, same: bool = False
) -> Languages | None:
    """The languages of sources and targets; None if the tokenizer has none to choose from.

    In this order: the names of the columns, the tokenizer's own settings, the first token that the model is made to
    generate. Without any, a target language is asked for: these tokenizers would take the source's.

    same  whether targets are in the language of the sources unless something else is known (summaries)
    """
    if not (hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang")):
        return None
    known = _codes(tokenizer)
    read = _matching(known, source) or tokenizer.src_lang
    found = _matching(known, target or "") or tokenizer.tgt_lang or _forced(tokenizer, model, known)
    if not found and not same:
        here = f"the columns {source!r} and {target!r} do not" if target else f"the column {source!r} does not"
        raise DataError(
            f"This {type(tokenizer).__name__} knows {len(known)} languages, and {here} say which to translate to. Name "
            f"the columns by its codes ({', '.join(known[:2])}, ...), or save the tokenizer with the languages: "
            "AutoTokenizer.from_pretrained(MODEL, src_lang=..., tgt_lang=...).save_pretrained(MODEL)."
        )
    return Languages(read, found or read)


@contextmanager
def spoken(tokenizer: Any, model: Any, languages: Languages | None) -> Iterator[None]:
    """Make the tokenizer write these languages, and the model begin what it generates as targets begin."""
    if languages is None:
        yield
        return
    before = tokenizer.src_lang, tokenizer.tgt_lang
    try:
        tokenizer.src_lang, tokenizer.tgt_lang = languages.source, languages.target
        if model is not None:
            set_start(model, _start(tokenizer, languages.target))
        yield
    finally:
        tokenizer.src_lang, tokenizer.tgt_lang = before


def _start(tokenizer: Any, language: str) -> dict[str, int]:
    """Options of generation: NLLB begins its targets with the language, mBART ends them with it and begins after it."""
    code = _number(tokenizer, language)
    first, *_, last = tokenizer(text_target="a")["input_ids"]
    return {"forced_bos_token_id": code} if first == code else {"decoder_start_token_id": code} if last == code else {}


def _codes(tokenizer: Any) -> list[str]:
    """The languages that the tokenizer knows."""
    for name in ("lang_code_to_token", "lang_code_to_id"):  # M2M100; mBART-50
        if isinstance(found := getattr(tokenizer, name, None), dict):
            return list(found)
    return [str(token) for token in tokenizer.all_special_tokens if _CODE.fullmatch(str(token))]


def _matching(codes: list[str], name: str) -> str:
    """The code that a column is named by: `de_DE` for `de_DE` or `de`, if only one fits."""
    if name in codes:
        return name
    near = [code for code in codes if code.partition("_")[0] == name]
    return near[0] if len(near) == 1 else ""


def _number(tokenizer: Any, code: str) -> int:
    if hasattr(tokenizer, "get_lang_id"):  # M2M100
        return int(tokenizer.get_lang_id(code))
    return int(tokenizer.convert_tokens_to_ids(code))


def _forced(tokenizer: Any, model: Any, codes: list[str]) -> str:
    """The language that the model's own settings begin with."""
    settings = getattr(model, "generation_config", None)
    for name in ("forced_bos_token_id", "decoder_start_token_id"):
        token = getattr(settings, name, None)
        for code in codes if token is not None else ():
            if _number(tokenizer, code) == token:
                return code
    return ""
