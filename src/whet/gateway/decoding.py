"""Ids to text, by a table where every id stands for bytes of its own.

Most vocabularies are such: the text of ids is then the text of their bytes, one behind the other.
A tokenizer copies each of them several times to say the same.
"""

from collections.abc import Callable, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(0x100) if byte not in _PRINTABLE)
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + place): byte for place, byte in enumerate(_OTHERS)
}
"""How vocabularies of bytes write each of them."""


def decoder_of(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """Gives the text of ids as the tokenizer would, special tokens as they are written."""
    if isinstance(tokenizer.decoder, ByteLevel):
        bytes_of = _Table(tokenizer).__getitem__
        return lambda ids: b"".join(map(bytes_of, ids)).decode(errors="replace")
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


class _Table(dict[int, bytes]):
    """The bytes of ids that were met."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, id: int) -> bytes:
        text = self._tokenizer.id_to_token(id) or ""  # one that it does not know says nothing
        if _BYTES.keys() >= set(text):
            known = bytes([_BYTES[character] for character in text])
        else:  # an added token is written as it is
            known = text.encode()
        if text:
            self[id] = known
        return known
