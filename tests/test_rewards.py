"Claims about the rewards: each is its formula, on any completion, and tells GRPO only what it should."
import numpy as np, pytest
from copy import deepcopy
from hypothesis import given, strategies as st
from tiny_rlvr.grpo import GRPOConfig, train
from tiny_rlvr.rewards import EXPONENTIAL, LINEAR, REWARDS, dense, loops, milestones, near_miss, process, random_reward, score, sparse
from tiny_rlvr.tasks import Phrase, Problem, Task, verify

completions = st.text("0123456789+-*/=; ", max_size=12)
numbers = st.integers(0, 1998)


def problem(n): return Problem("387+456=", str(n), "+", 387, 456)


def slow_distance(y, t):
    "Wagner and Fischer's table, a row at a time."
    row = list(range(len(t) + 1))
    for i, a in enumerate(y, 1):
        new = [i]
        for j, b in enumerate(t, 1): new.append(min(row[j] + 1, new[-1] + 1, row[j-1] + (a != b)))
        row = new
    return row[-1]


def slow_process(y, answer, finished, weights):
    "The rule of `process`, written out for numbers."
    runs = [r for r in "".join(c if c in "0123456789" else " " for c in y).split()]
    last = runs[-1] if runs else ""
    if last == answer: r = 1.
    elif last and abs(int(last) - int(answer)) in (10, 100, 1000, 10**4, 10**5, 10**6, 10**7, 10**8, 10**9, 10**10, 10**11): r = .6
    else:
        right = 0
        while right < min(len(last), len(answer)) and last[-1-right] == answer[-1-right]: right += 1
        r = sum(w for k, w in enumerate(weights, 1) if right/len(answer) >= k/len(weights) - 1e-12)
    looping = len(y) > len(answer) and any(len(y) >= 3*n and y[-n:] == y[-2*n:-n] == y[-3*n:-2*n] for n in range(1, len(y) + 1))
    return max(0., r - .3*looping - .5*(not finished))


@given(completions, numbers)
def test_dense_is_one_minus_distance_over_the_longer_length(y, n):
    t = str(n)
    assert dense(y, problem(n)) == pytest.approx(1 - slow_distance(y, t)/max(len(y), len(t)))


@given(completions, numbers, st.booleans(), st.sampled_from([EXPONENTIAL, LINEAR]))
def test_process_is_overrides_milestones_and_penalties_bounded_at_zero(y, n, finished, weights):
    assert process(weights)(y, problem(n), finished=finished) == pytest.approx(slow_process(y, str(n), finished, weights))


@given(numbers, numbers, st.sampled_from([EXPONENTIAL, LINEAR]))
def test_process_of_wrong_plain_numbers_stops_short_of_the_right_one(m, n, weights):
    r = process(weights)(str(m), problem(n))
    assert r == 1 if m == n else r <= .6 + 1e-12


@given(completions, numbers, st.integers(1, 20))
def test_sparse_pays_for_the_target_alone_and_never_more_for_more(y, n, limit):
    f = sparse(limit)
    assert 0 <= f(y, problem(n)) <= 1 and (f(y, problem(n)) == 0 or str(n) in y)
    assert f(str(n), problem(n)) == 1
    assert f(str(n) + y, problem(n)) == pytest.approx(max(0, 1 - len(y)/limit))


def test_the_two_curves_pay_the_same_in_all_and_differ_in_shape():
    steps = ["999", "993", "943"] # 0, 1 and 2 of 3 digits from the units up: 0, 1 and 3 milestones
    assert [milestones(s, "843") for s in ["999", "993", "243"]] == [0, 1, 3]
    early, late = (process(w)("993", problem(843)) for w in (EXPONENTIAL, LINEAR))
    assert (early, late) == (.05, .12) and sum(EXPONENTIAL) == pytest.approx(sum(LINEAR)) == pytest.approx(.6)
    assert process()(steps[2], problem(843)) == .6 # a carry too many


def test_farming_is_paid_less_than_answering():
    for name in ("sparse", "dense", "process", "process_linear"):
        right = score(["843"], [problem(843)], name)[0]
        for hack in ("843843843", "0123456789", "=;=;=;=;", "", "333", "8433333", "84"): assert score([hack], [problem(843)], name, [len(hack) < 8])[0] < right, (name, hack)


def test_a_missing_terminator_is_told_to_those_that_ask():
    r = score(["843"]*2, [problem(843)]*2, process(), [True, False])
    assert r.tolist() == [1, .5]
    assert score(["843"]*2, [problem(843)]*2, "correct", [True, False]).tolist() == [1, 1]


def test_grpo_tells_the_reward_whether_a_completion_ended(untrained):
    seen = []
    def spy(completion, problem, finished): seen.append((completion, finished)); return float(finished)
    log = train(deepcopy(untrained).requires_grad_(True), GRPOConfig(updates=2, problems_per_update=4, max_new_tokens=3), Task("+", 1, 1), spy)
    assert len(seen) == 2*4*8 and all(type(f) is bool for _, f in seen)
    assert all(f for c, f in seen if len(c) < 3) # a special token counts more than one character
    assert log.reward_mean.mean() == pytest.approx(np.mean([f for _, f in seen]))


def test_random_rewards_are_uniform_repeatable_and_apart_from_the_rest(trained):
    p, f, g = problem(843), random_reward(3), random_reward(3)
    a = np.array([f("843", p) for _ in range(2000)])
    assert (a == [g("", p) for _ in range(2000)]).all()                  # the completion doesn't matter
    assert abs(np.histogram(a, 10, (0, 1))[0] - 200).max() < 4.5*(2000*.1*.9)**.5
    assert not np.isin(a, [random_reward(4)("843", p) for _ in range(2000)]).any()
    def run(): return train(deepcopy(trained).requires_grad_(True), GRPOConfig(updates=2, problems_per_update=4), Task("+", 1, 1), random_reward(7), seed=7)
    x, y = run(), run()
    assert (x.reward_mean == y.reward_mean).all() and (x.grad_norm == y.grad_norm).all()


def test_a_phrase_goes_where_a_task_goes(trained):
    phrase, texts = Phrase(";", "1;1"), []
    def spy(completion, problem): texts.append(completion); return dense(completion, problem)
    train(deepcopy(trained).requires_grad_(True), GRPOConfig(updates=1, problems_per_update=1, max_new_tokens=5), phrase, spy)
    assert len(texts) == 8
    assert not verify("1;1", phrase.target)      # the arithmetic verifier reads the last number alone
    assert set(REWARDS) >= {"correct", "sparse", "dense", "process", "process_linear"}


def test_loops_and_near_misses_by_hand():
    assert [loops(y, "1234") for y in ("111", "1111", "11111", "12121212", "121212123")] == [False, False, True, True, False]
    assert [near_miss(y, "1234") for y in ("1224", "1134", "234", "2234", "1235", "1034", "")] == [True, True, True, True, False, False, False]
