"Claims about the alphabet."
import numpy as np, pytest
from hypothesis import assume, given, strategies as st
from tiny_rlvr.vocab import BOS, CHARS, EOS, PAD, TOKENS, VOCAB_SIZE, decode, encode


def test_the_alphabet_is_the_posts():
    assert "".join(TOKENS[3:]) == CHARS == "0123456789+-*/=; "
    assert VOCAB_SIZE == len(TOKENS) == len(set(TOKENS)) == 20
    assert (PAD, BOS, EOS) == (0, 1, 2) and TOKENS[:3] == ["<pad>", "<bos>", "<eos>"]


@given(st.text(alphabet=CHARS))
def test_text_survives_the_round_trip_one_id_for_each_character(text):
    ids = encode(text)
    assert len(ids) == len(text) and all(3 <= i < 20 for i in ids)
    assert decode(ids) == text


@given(st.lists(st.integers(0, VOCAB_SIZE - 1)))
def test_different_ids_never_read_the_same(ids):
    # no token's spelling contains another's start, so a scan from the left recovers the ids
    text, back = decode(ids), []
    while text:
        i = next(i for i, t in enumerate(TOKENS) if text.startswith(t))
        back.append(i)
        text = text[len(TOKENS[i]):]
    assert back == ids


@given(st.text())
def test_an_unknown_character_is_named_with_its_position(text):
    unknown = [(i, c) for i, c in enumerate(text) if c not in CHARS]
    assume(unknown)
    pos, char = unknown[0]
    with pytest.raises(ValueError) as e: encode(text)
    assert repr(char) in str(e.value) and f"position {pos} " in str(e.value)


@pytest.mark.parametrize("ids, named", [([20], "id 20 at position 0"), ([3, -1], "id -1 at position 1"), (np.array([1, 2, 99]), "id 99 at position 2")])
def test_an_unknown_id_is_named_with_its_position(ids, named):
    with pytest.raises(ValueError, match=named): decode(ids)
