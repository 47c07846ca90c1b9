import pytest

from models.tokenizer import Vocabulary, WordTokenizer

VOCABULARY = Vocabulary(outputs=("go", "stop"), inputs=("red", "green", ":", "light"))


def test_what_a_policy_can_say_has_the_first_ids():
    tokenizer = WordTokenizer(VOCABULARY)
    assert tokenizer.encode("go stop") == [0, 1]
    assert tokenizer.decode([0, 1]) == "go stop"


def test_words_and_signs_are_split_and_the_unknown_is_marked():
    tokenizer = WordTokenizer(VOCABULARY)
    ids = tokenizer.encode("LIGHT: Red\n!? green")
    assert tokenizer.decode(ids) == "light : red <unk> <unk> green"


def test_the_digest_changes_with_any_word_and_its_place():
    swapped = Vocabulary(outputs=("stop", "go"), inputs=VOCABULARY.inputs)
    assert WordTokenizer(VOCABULARY).sha256 == VOCABULARY.sha256 != swapped.sha256


def test_a_word_given_twice_is_refused():
    with pytest.raises(ValueError, match="names a word twice"):
        WordTokenizer(Vocabulary(outputs=("go",), inputs=("go",)))


@pytest.mark.parametrize("wrong", [-1, 8])
def test_ids_outside_the_vocabulary_are_refused(wrong):
    with pytest.raises(ValueError, match="outside the vocabulary of 8 words"):
        WordTokenizer(VOCABULARY).decode([0, wrong])
