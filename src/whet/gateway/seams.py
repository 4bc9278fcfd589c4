"""Where text may be cut so that its parts, encoded one by one, give the ids of the whole.

A tokenizer first looks for its added tokens in the text as it is; what stands between them is
encoded piece by piece, each by itself. So a place where such a token stands whatever is written
around it is a seam: text before it may be left out. A part must begin with its token, though, since
some tokenizers treat the very beginning of a text in their own way.
"""

import re
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer


class Seams:
    """The seams of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self._texts = [token.content for token in self._added.values()]
        self._firm: dict[int, bool] = {}

    def find(self, text: str) -> Sequence[int]:
        """Where in a text a token begins that is one whatever stands around the text."""
        if self._tokenizer.truncation is not None or self._tokenizer.padding is not None:
            return ()
        ids = set(self._tokenizer.encode(text, add_special_tokens=False).ids)
        texts = [self._added[id].content for id in ids if id in self._added and self._is_firm(id)]
        if not texts:
            return ()
        return [match.start() for match in re.finditer("|".join(map(re.escape, texts)), text)]

    def _is_firm(self, id: int) -> bool:
        if id not in self._firm:
            self._firm[id] = _is_plain(self._added[id]) and not self._may_be_covered(id)
        return self._firm[id]

    def _may_be_covered(self, id: int) -> bool:
        """Whether an added token might begin before this one and reach into it, or go on after."""
        mine = self._added[id].content
        if any(text != mine and text.startswith(mine) for text in self._texts):
            return True
        near = (text for text in self._texts if mine[0] in text[1:])
        ends = (text[at:] for text in near for at in range(1, len(text)))
        return any(mine.startswith(end) or end.startswith(mine) for end in ends)


def _is_plain(token: AddedToken) -> bool:
    """Whether a token is found in any text as it is, and takes nothing of what stands beside it."""
    # Beside a letter, a token of whole words might be none.
    edges = token.content[:1], token.content[-1:]
    letters = any(not edge or edge.isspace() or re.match(r"\w", edge) for edge in edges)
    return not (token.normalized or token.lstrip or token.rstrip or token.single_word or letters)
