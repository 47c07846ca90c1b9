"""A word tokenizer for domains with a small, closed vocabulary.

Real outputs of tools are split into words and signs; what the vocabulary lacks becomes `<unk>`. The words that a
policy can say come first, so that they are the ids below `num_outputs` (see `models.transformer`).
"""

import hashlib
import re
from collections.abc import Sequence

import msgspec
from msgspec import Struct

BEGIN, UNKNOWN = "<begin>", "<unk>"
_WORD = re.compile(r"[a-z0-9_-]+|[^\sa-z0-9_-]")


class Vocabulary(Struct, frozen=True, kw_only=True):
    """Words of a domain; their position is their id."""

    outputs: tuple[str, ...]
    """What the policy can say, in one token each."""
    inputs: tuple[str, ...]
    """What it can read beyond that."""

    @property
    def words(self) -> tuple[str, ...]:
        """Every word, `outputs` first, then the two special ones."""
        return (*self.outputs, BEGIN, UNKNOWN, *self.inputs)

    @property
    def sha256(self) -> str:
        """Hex digest: the `tokenizer_sha256` of trajectories."""
        return hashlib.sha256(msgspec.json.encode(self.words)).hexdigest()


class WordTokenizer:
    """Text ↔ token ids over a `Vocabulary`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._words = vocabulary.words
        self._ids = {word: index for index, word in enumerate(self._words)}
        if len(self._ids) != len(self._words):
            raise ValueError("the vocabulary names a word twice; every word needs one id")
        self.begin_id = self._ids[BEGIN]
        self.unknown_id = self._ids[UNKNOWN]

    @property
    def sha256(self) -> str:
        """Hex digest of the vocabulary."""
        return self.vocabulary.sha256

    def encode(self, text: str) -> list[int]:
        """Ids of the words of a text, lower-cased; unknown ones as `<unk>`."""
        return [self._ids.get(word, self.unknown_id) for word in _WORD.findall(text.lower())]

    def decode(self, ids: Sequence[int]) -> str:
        """Words of the ids, joined by blanks.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        outside = [index for index in ids if not 0 <= index < len(self._words)]
        if outside:
            raise ValueError(f"token ids {outside[:5]} are outside the vocabulary of {len(self._words)} words")
        return " ".join(self._words[index] for index in ids)
