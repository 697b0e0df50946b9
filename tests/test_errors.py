"Claims about the kinds of wrong sums, against a second adder and by counting."
import itertools
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, strategies as hs

from tiny_rlvr.errors import ERRORS, NOT_LISTED, carry_slips, chance_shares, error_type, mass_by_error, mass_changes, with_error_types
from tiny_rlvr.tasks import GRID, Problem, verify

three = hs.integers(100, 999)
texts = hs.text("0123456789;=+ ", max_size=8)


def adder(a, b, wrong):
    "Column addition of two 3-digit numbers in which the carries out of the columns in `wrong` are flipped; the carries that were due there."
    carry, out, due = 0, "", []
    for i in range(3):
        s = a // 10**i % 10 + b // 10**i % 10 + carry
        due.append(s > 9)
        out, carry = str(s % 10) + out, (s > 9) ^ (i in wrong)
    return ("1" if carry else "") + out, [due[i] for i in wrong]


@given(three, three)
def test_carry_slips_are_what_an_adder_with_flipped_carries_gives(a, b):
    dropped, added = set(), set()
    for wrong in itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in (1, 2, 3)):
        text, due = adder(a, b, wrong)
        if all(due): dropped.add(text)
        if not any(due): added.add(text)
    assert carry_slips(Problem.make("+", a, b)) == (dropped, added)


@given(three, three)
def test_without_carries_none_can_be_dropped(a, b):
    q = Problem.make("+", a, b)
    carries = any(a // 10**i % 10 + b // 10**i % 10 > 9 for i in range(3))
    assert bool(carry_slips(q)[0]) == carries


@given(texts, three, three, hs.booleans())
def test_every_completion_has_one_kind_and_only_accepted_ones_are_called_right(completion, a, b, finished):
    q = Problem.make("+", a, b)
    kind = error_type(completion, q, finished)
    assert kind in ERRORS
    assert (kind in ERRORS[:2]) == verify(completion, q.answer)
    assert (kind == "right") == (finished and completion == q.answer)


@given(three, three, hs.integers(1, 999))
def test_off_by_means_what_it_says(a, b, n):
    q = Problem.make("+", a, b)
    for sign in (-1, 1):
        kind = error_type(str(int(q.answer) + sign*n), q)
        if kind.startswith("off by"): assert n == {"off by one": 1, "off by ten": 10, "off by a hundred": 100}[kind]


@given(three, three)
def test_addition_knows_no_order(a, b):
    for wrong in ("111", "1000", "833"): assert error_type(wrong, Problem.make("+", a, b)) == error_type(wrong, Problem.make("+", b, a))


def test_all_operations_have_kinds():
    for task in GRID:
        q = task.sample(1, np.random.default_rng(0))[0]
        assert error_type(q.answer, q) == "right" and error_type("", q) == "not a number"
        if task.op != "+": assert carry_slips(q) == (set(), set())


def test_chance_shares_count_every_wrong_number_of_the_length_once():
    q = Problem.parse("4+3=")
    by_hand = pd.Series([error_type(str(n), q) for n in range(10) if n != 7]).value_counts()/9
    assert chance_shares([q])[by_hand.index].to_dict() == pytest.approx(by_hand.to_dict())


def listed(rows): return pd.DataFrame(rows, columns=["seed", "prompt", "completion", "p", "finished", "remainder"])


def test_mass_of_all_kinds_sums_to_one_whatever_is_listed():
    rng = np.random.default_rng(0)
    rows = []
    for seed in (-1, 0, 1):
        for prompt in ("387+456=", "100+200="):
            p = rng.dirichlet(np.ones(6))
            rows += [(seed, prompt, c, x, True, p[-1]) for c, x in zip(("843", "833", "300", "", "12;"), p)]
    mass = mass_by_error(with_error_types(listed(rows)))
    assert mass.shape == (6, len(ERRORS) + 1) and list(mass)[-1] == NOT_LISTED
    np.testing.assert_allclose(mass.sum(axis=1), 1, atol=1e-9)


def test_changes_sum_to_the_change_of_what_is_listed():
    rows = listed([(-1, "387+456=", "843", .6, True, .1), (-1, "387+456=", "833", .3, True, .1), (0, "387+456=", "843", .9, True, .1), (1, "387+456=", "733", .5, True, .5)])
    moved = mass_changes(rows).set_index("completion")
    assert moved.after.to_dict() == pytest.approx({"843": .45, "833": 0, "733": .25})
    assert moved.change.sum() == pytest.approx((.9 + .5)/2 - .9)
    assert mass_changes(rows, [0]).set_index("completion").after["843"] == pytest.approx(.9)
    with pytest.raises(ValueError, match="wanted"): mass_changes(rows, [7])


def test_the_same_text_unfinished_is_another_completion():
    rows = with_error_types(listed([(-1, "387+456=", "843", .5, True, 0.), (-1, "387+456=", "843", .2, False, 0.)]))
    assert rows.error.tolist() == ["right", "right digits, more text"]
