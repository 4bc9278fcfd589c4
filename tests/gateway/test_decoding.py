"""Ids to text by a table: the same text that the tokenizer gives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.pre_tokenizers import ByteLevel

from whet.gateway.decoding import decoder_of
from whet.gateway.template import ChatTemplate
from whet.policies.catalogue import TINY

ADDED = ("<|odd|>", "<\uff5cend\u2581of\uff5c>", "caf\u00e9", "\u0120both\u2581", "two words")


def with_added_tokens() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ADDED[1:]])
    tokenizer.add_special_tokens([AddedToken(ADDED[0], special=True)])
    return tokenizer


BYTES = with_added_tokens()
WORDS = with_added_tokens()
WORDS.decoder = decoders.Sequence([decoders.Replace("\u0120", " "), decoders.Fuse()])

SINGLE = [id for c in ByteLevel.alphabet() if (id := BYTES.token_to_id(c)) is not None]
"""The ids of single bytes, which are seldom a text in any order."""
PLAIN = Tokenizer.from_file(str(TINY / "tokenizer.json"))
TEMPLATE = ChatTemplate(TINY)
UNKNOWN = 3
IDS = st.integers(0, BYTES.get_vocab_size() + UNKNOWN)


@given(st.lists(IDS, max_size=40))
@pytest.mark.parametrize("tokenizer", [BYTES, WORDS], ids=["bytes", "words"])
def test_ids_read_as_the_tokenizer_reads_them(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert decoder_of(tokenizer)(ids) == tokenizer.decode(ids, skip_special_tokens=False)


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    ids = BYTES.encode(text, add_special_tokens=False).ids
    assert decoder_of(BYTES)(ids) == BYTES.decode(ids, skip_special_tokens=False) == text


@given(st.lists(st.sampled_from(SINGLE), max_size=12))
def test_half_characters_are_told_alike(ids: list[int]) -> None:
    assert decoder_of(BYTES)(ids) == BYTES.decode(ids, skip_special_tokens=False)


@given(st.lists(IDS, max_size=40))
def test_special_tokens_are_left_out_as_the_tokenizer_leaves_them(ids: list[int]) -> None:
    assert TEMPLATE.decode(ids) == PLAIN.decode(ids, skip_special_tokens=True)
