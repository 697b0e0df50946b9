"Claims about tasks, problems, evaluation sets, features and the verifier, by arithmetic that shares no code with the library."
from fractions import Fraction
from itertools import product
import numpy as np, pandas as pd, pytest
from hypothesis import example, given, settings, strategies as st
from scipy.stats import chisquare
from tiny_rlvr.tasks import (EVERYDAY, GRID, OPS, TARGET, WIDTHS, Problem, Task, eval_set, features, mixture, streams,
                             torch_seed, training_batch, verify)
from tiny_rlvr.vocab import encode

ALL_TASKS = [Task(op, a, b) for op, a, b in product(OPS, (1, 2, 3), (1, 2, 3)) if not (op == "-" and a < b or (op, a, b) == ("/", 2, 3))]   # those have no problem
SMALL_TASKS = [t for t in ALL_TASKS if t.n_problems <= 10_000 and t.name != "/(3,3)"]   # (the notebook lists that one by brute force)
tasks, seeds = st.sampled_from(ALL_TASKS), st.integers(0, 2**32 - 1)
by_name = dict(argvalues=ALL_TASKS, ids=lambda t: t.name)


def exact(prompt):
    "(op, first operand, second operand, value) of a prompt, read character by character; the value is a fraction."
    assert prompt[-1] == "="
    (at,) = [i for i, c in enumerate(prompt) if c in OPS]
    x, op, y = prompt[:at], prompt[at], prompt[at+1:-1]
    assert all(c in "0123456789" for c in x + y)
    a, b = Fraction(x), Fraction(y)
    return op, x, y, {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b}[op]()


def assert_right(p, task):
    op, x, y, value = exact(p.prompt)
    assert op == p.op == task.op and p.task == task
    assert x == str(p.a) and y == str(p.b), "an operand has leading zeros"
    assert len(x) == task.a_digits and len(y) == task.b_digits
    assert value.denominator == 1 and value >= 0
    assert p.answer == str(value.numerator)
    encode(p.prompt + p.answer)


def brute_force(task):
    "The prompts of every pair of operands that will do, in no particular order."
    numbers = [[str(n) for n in range(10**d) if len(str(n)) == d] for d in (task.a_digits, task.b_digits)]
    for x, y in product(*numbers):
        if task.op == "/" and y == "0": continue
        value = exact(f"{x}{task.op}{y}=")[-1]
        if value >= 0 and value.denominator == 1: yield f"{x}{task.op}{y}="


# ---- problems and tasks

@given(tasks, seeds, st.integers(0, 40))
def test_every_sampled_answer_is_right_and_every_width_exact(task, seed, n):
    problems = task.sample(n, np.random.default_rng(seed))
    assert len(problems) == n
    for p in problems: assert_right(p, task)


@pytest.mark.parametrize("task", SMALL_TASKS, ids=lambda t: t.name)
def test_all_lists_every_problem_that_brute_force_finds_once(task):
    problems = task.all()
    assert len(problems) == task.n_problems == len(set(problems))
    assert {p.prompt for p in problems} == set(brute_force(task))
    for p in problems: assert_right(p, task)


@pytest.mark.parametrize("task", **by_name)
def test_the_count_is_known_in_advance_and_the_numbering_has_no_repeats(task):
    a, b = task.unrank(np.arange(task.n_problems))
    assert a.dtype == b.dtype == np.int64 and a.shape == b.shape == (task.n_problems,)
    assert len(np.unique(a * 1000 + b)) == task.n_problems
    lo = {1: 0, 2: 10, 3: 100}
    assert lo[task.a_digits] <= a.min() and a.max() < 10**task.a_digits
    assert lo[task.b_digits] <= b.min() and b.max() < 10**task.b_digits
    na, nb = (10 if d == 1 else 9 * 10**(d-1) for d in (task.a_digits, task.b_digits))
    if task.op in "+*": assert task.n_problems == na * nb
    if task.op == "-": assert task.n_problems == (na * (na + 1) // 2 if na == nb else na * nb)


@given(tasks, seeds)
def test_rank_undoes_unrank(task, seed):
    i = np.random.default_rng(seed).integers(task.n_problems, size=20)
    problems = [Problem.make(task.op, int(a), int(b)) for a, b in zip(*task.unrank(i))]
    assert (task.rank(problems) == i).all()


@pytest.mark.parametrize("task", SMALL_TASKS, ids=lambda t: t.name)
def test_samples_come_from_the_list(task):
    assert set(task.sample(500, np.random.default_rng(0))) <= set(task.all())


@pytest.mark.parametrize("name", ["+(1,1)", "-(2,1)", "-(2,2)", "*(2,1)", "/(1,1)", "/(2,1)", "/(3,2)", "/(3,3)"])
def test_samples_are_uniform_over_the_problems(name):
    task = Task.parse(name)
    drawn = task.rank(task.sample(20 * task.n_problems, np.random.default_rng(7)))
    assert chisquare(np.bincount(drawn, minlength=task.n_problems)).pvalue > 1e-3


@given(tasks, seeds, st.integers(0, 100))
def test_distinct_samples_repeat_nothing(task, seed, n):
    n = min(n, task.n_problems)
    problems = task.sample(n, np.random.default_rng(seed), distinct=True)
    assert len(set(problems)) == len(problems) == n and all(p in task for p in problems)


def test_distinct_samples_are_uniform_too():
    task, rng = Task("-", 1, 1), np.random.default_rng(5)
    drawn = np.concatenate([task.rank(task.sample(8, rng, distinct=True)) for _ in range(1000)])
    assert chisquare(np.bincount(drawn, minlength=task.n_problems)).pvalue > 1e-3


def test_samples_of_the_target_are_uniform_in_every_digit():
    problems = TARGET.sample(40_000, np.random.default_rng(3))
    for operand, place in product("ab", range(3)):
        digit = np.array([int(str(getattr(p, operand))[place]) for p in problems])
        counts = np.bincount(digit, minlength=10)[1 if place == 0 else 0:]
        assert chisquare(counts).pvalue > 1e-3, (operand, place)


@given(tasks, seeds)
def test_equal_generators_draw_equal_problems(task, seed):
    assert task.sample(9, np.random.default_rng(seed)) == task.sample(9, np.random.default_rng(seed))


@given(tasks, seeds)
def test_a_problem_can_be_read_back_from_its_prompt(task, seed):
    (p,) = task.sample(1, np.random.default_rng(seed))
    assert Problem.parse(p.prompt) == p == Problem.make(p.op, p.a, p.b) and p.task == Task.parse(task.name)


@given(st.text(alphabet="0123456789+-*/= ;x²٣", max_size=9))
def test_a_prompt_is_read_back_as_itself_or_refused(text):
    try: p = Problem.parse(text)
    except ValueError as e: assert any(c in str(e) for c in (text, repr(text), text.rstrip("=")))
    else:
        assert p.prompt == text
        assert exact(text)[-1] == int(p.answer)


def test_the_grid_and_the_everyday_tasks_are_the_posts():
    assert WIDTHS == [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)]
    assert [t.name for t in GRID] == [f"{op}({a},{b})" for op in "+-*/" for a, b in WIDTHS] and len(set(GRID)) == 24
    posts = "4+3=7 45+38=83 123+4=127 45-38=7 45*3=135 84/4=21".split()
    for task, text in zip(EVERYDAY, posts, strict=True):
        p = Problem.parse(text[:text.index("=") + 1])
        assert (p.task, p.prompt + p.answer) == (task, text)
    assert TARGET == Task("+", 3, 3) and TARGET not in EVERYDAY


# ---- mixture and batches

@given(st.floats(1e-6, 1 - 1e-6))
def test_the_mixture_sums_to_one_and_the_rest_share_equally(share):
    mix = mixture(share)
    assert list(mix) == [*EVERYDAY, TARGET] and mix[TARGET] == share
    assert abs(sum(mix.values()) - 1) < 1e-12 and len({mix[t] for t in EVERYDAY}) == 1


def test_batches_follow_the_mixture_in_every_place():
    rng, mix = np.random.default_rng(0), mixture(0.1)
    tasks_ = np.array([[list(mix).index(p.task) for p in training_batch(rng, mix, 5)] for _ in range(3000)])
    for place in range(5):
        counts = np.bincount(tasks_[:, place], minlength=7)
        assert chisquare(counts, 3000 * np.array(list(mix.values()))).pvalue > 1e-3, place
    # neighbours in a batch are independent: the second place doesn't depend on the first
    both = np.histogram2d(tasks_[:, 0], tasks_[:, 1], bins=[range(8)] * 2)[0]
    expected = 3000 * np.outer(*[list(mix.values())] * 2)
    assert chisquare(both.ravel(), expected.ravel()).pvalue > 1e-3


@given(seeds, st.integers(0, 60))
def test_a_batch_has_its_size_and_right_answers_and_is_fixed_by_its_generator(seed, n):
    batch = training_batch(np.random.default_rng(seed), mixture(), n)
    assert len(batch) == n and batch == training_batch(np.random.default_rng(seed), mixture(), n)
    for p in batch:
        assert p.task in mixture()
        assert_right(p, p.task)


# ---- evaluation sets

@settings(max_examples=50)
@given(tasks, st.integers(1, 300), seeds)
def test_an_evaluation_set_has_no_duplicates_and_is_fixed_by_its_seed(task, n, seed):
    problems = eval_set(task, n, seed)
    assert len(problems) == len(set(problems)) == min(n, task.n_problems)
    np.random.seed(0)  # the global state has no say
    assert problems == eval_set(task, n, seed)
    for p in problems: assert_right(p, task)


@pytest.mark.parametrize("task", SMALL_TASKS, ids=lambda t: t.name)
def test_a_set_as_large_as_its_cell_is_the_cell_whatever_the_seed(task):
    assert eval_set(task, task.n_problems, 0) == eval_set(task, 10**6, 1) == task.all()


def test_another_seed_is_another_set_and_another_task_other_operands():
    one, two = (set(eval_set(TARGET, 2000, seed)) for seed in (0, 1))
    assert len(one & two) < 30      # about 2000 * 2000 / 810000 = 5 by chance
    times = {(p.a, p.b) for p in eval_set(Task("*", 3, 3), 2000, 0)}
    assert len({(p.a, p.b) for p in one} & times) < 30


@settings(max_examples=50)
@given(tasks, seeds, st.integers(1, 150), st.integers(0, 60))
def test_excluded_problems_are_never_drawn(task, seed, n, m):
    exclude = task.sample(m, np.random.default_rng(seed)) + [Problem.parse("1000+1=")]   # one of no task, too
    left = task.n_problems - len({p for p in exclude if p.prompt != "1000+1="})
    if left == 0 or left < n < task.n_problems:
        with pytest.raises(ValueError, match="exclude leaves"): eval_set(task, n, seed, exclude)
        return
    problems = eval_set(task, n, seed, exclude)
    assert not set(problems) & set(exclude)
    assert len(set(problems)) == len(problems) == min(n, left)
    if n >= task.n_problems: assert problems == [p for p in task.all() if p not in exclude]


# ---- streams

@given(seeds)
def test_streams_are_fixed_by_seed_and_place_and_survive_a_newcomer(seed):
    two, three = streams(seed, "a", "b"), streams(seed, "a", "b", "c")
    assert [two.a.random(), two.b.random()] == [three["a"].random(), three["b"].random()]


def test_streams_of_neighbouring_seeds_share_no_draw():
    first = [g.integers(2**63) for seed in range(200) for g in streams(seed, "a", "b", "c").values()]
    assert len(set(first)) == 600
    assert all(0 <= torch_seed(g) < 2**63 for g in streams(0, *"abcdefgh").values())


# ---- features

# worked on paper: carry (for - borrow) out of units, tens, hundreds; zeros in the answer
COLUMNS = [("387+456=", 1, 1, 0, 0), ("123+456=", 0, 0, 0, 0), ("999+999=", 1, 1, 1, 0), ("999+1=", 1, 1, 1, 3), ("505+505=", 1, 0, 1, 2),
           ("450+460=", 0, 1, 0, 1), ("555+445=", 1, 1, 1, 3), ("600+500=", 0, 0, 1, 2), ("9+9=", 1, 0, 0, 0), ("5+5=", 1, 0, 0, 1), ("0+0=", 0, 0, 0, 1), ("95+5=", 1, 1, 0, 2),
           ("45-38=", 1, 0, 0, 0), ("500-1=", 1, 1, 0, 0), ("100-99=", 1, 1, 0, 0), ("919-828=", 0, 1, 0, 0), ("777-777=", 0, 0, 0, 1), ("45*3=", 0, 0, 0, 0), ("99*99=", 0, 0, 0, 1), ("84/4=", 0, 0, 0, 0)]

@pytest.mark.parametrize("prompt, units, tens, hundreds, zeros", COLUMNS)
def test_carries_and_zeros_are_those_worked_on_paper(prompt, units, tens, hundreds, zeros):
    (f,) = features([Problem.parse(prompt)]).to_dict("records")
    assert [f["carry_units"], f["carry_tens"], f["carry_hundreds"]] == [units, tens, hundreds]
    assert f["n_carries"] == units + tens + hundreds and f["carry_all"] == (units + tens + hundreds == 3)
    assert f["carry_chain"] == max(map(len, f"{units}{tens}{hundreds}".split("0")))
    assert (f["answer_zeros"], f["answer_has_zero"], f["answer_len"]) == (zeros, zeros > 0, len(f["answer"]))


@settings(max_examples=30)
@given(st.lists(st.sampled_from(ALL_TASKS), max_size=8), seeds)
def test_features_of_a_mixed_list_are_those_of_each_alone(ts, seed):
    rng = np.random.default_rng(seed)
    problems = [t.sample(1, rng)[0] for t in ts]
    together = features(problems)
    assert list(together.prompt) == [p.prompt for p in problems]
    for i, p in enumerate(problems): pd.testing.assert_frame_equal(together.iloc[[i]].reset_index(drop=True), features([p]))


@given(st.sampled_from([t for t in ALL_TASKS if t.op in "+-"]), seeds)
def test_the_last_carry_is_the_longer_answer_and_nothing_is_borrowed_from_outside(task, seed):
    f = features(task.sample(30, np.random.default_rng(seed)))
    wide = max(task.a_digits, task.b_digits)
    out = f[f"carry_{['units', 'tens', 'hundreds'][wide - 1]}"]
    assert (out == ((f.answer_len > wide) if task.op == "+" else False)).all()


# ---- the verifier

def posts_rule(completion, answer):
    "The last run of digits, read backwards one character at a time."
    i = len(completion) - 1
    while i >= 0 and completion[i] not in "0123456789": i -= 1
    run = ""
    while i >= 0 and completion[i] in "0123456789":
        run = completion[i] + run
        i -= 1
    return run != "" and run == answer

nasty = st.text(alphabet="0123456789+-*/=; \n\t.٣４²五<>", max_size=12)
answers = st.one_of(st.integers(0, 1998).map(str), st.sampled_from(["", "0", "00", "007"]))

@settings(max_examples=300)
@given(st.one_of(nasty, st.text(max_size=8)), st.one_of(nasty, st.just("")), answers)
@example("", "", "")
@example("843", "٣", "843")
@example("8", "\n43", "843")
def test_the_verifier_accepts_exactly_what_the_posts_rule_says(before, after, answer):
    for completion in (before, before + answer, answer + after, before + answer + after, f"{before};{answer}={after}"):
        assert verify(completion, answer) is posts_rule(completion, answer), completion


@pytest.mark.parametrize("completion, accepted", [
    ("843", True), ("0843", False), ("843 ", True), (" 843", True), ("+843", True), ("-843", True), ("=843", True), ("843=", True), ("843;", True), ("12;843", True), ("843;12", False), ("843.", True), ("843.0", False),
    ("8 43", False), ("8\n43", False), ("843\n", True), ("8431", False), ("43", False), ("", False), (" ", False), ("=;", False), ("٨٤٣", False), ("８４３", False), ("²", False), ("843²", True), ("٣843", True), ("<eos>", False), ("843<eos>7", False)])
def test_the_verifier_on_strings_judged_by_hand(completion, accepted):
    assert verify(completion, "843") is accepted


@given(tasks, seeds)
def test_the_right_answer_is_accepted_and_its_neighbours_are_not(task, seed):
    (p,) = task.sample(1, np.random.default_rng(seed))
    assert verify(p.answer, p.answer) and verify(p.prompt + p.answer, p.answer)
    for wrong in (str(int(p.answer) + 1), p.answer + "0", "0" + p.answer, p.answer[:-1], f"{p.answer};{p.answer}1"): assert not verify(wrong, p.answer)


# ---- what can't be asked for

@pytest.mark.parametrize("call, said", [
    (lambda: Task("^", 1, 1), "unknown operation '^': one of +, -, *, /"),
    (lambda: Task("+", 0, 1), "a_digits must be 1, 2 or 3 (got 0)"),
    (lambda: Task("+", 1, 4), "b_digits must be 1, 2 or 3 (got 4)"),
    (lambda: Task("-", 1, 3), "-(1,3) has no problem"),
    (lambda: Task("/", 2, 3), "/(2,3) has no problem: the first operand needs at least as many digits as the second"),
    (lambda: Task.parse("+3,3"), "cannot read '+3,3' as a task: it should look like '+(3,3)'"),
    (lambda: Problem.parse("007+1="), "cannot read '007+1='"),
    (lambda: Problem.make("/", 4, 0), "4/0 is not an integer"),
    (lambda: Problem.make("-", 4, 5), "4-5 is negative"),
    (lambda: TARGET.sample(-1, np.random.default_rng(0)), "n must be at least 0 (got -1)"),
    (lambda: TARGET.sample("8", np.random.default_rng(0)), "n must be an integer (got '8')"),
    (lambda: Task("/", 1, 1).sample(33, np.random.default_rng(0), distinct=True), "/(1,1) has only 32 different problems (asked for 33)"),
    (lambda: TARGET.unrank([810_000]), "+(3,3) has problems 0 to 809999 (got number 810000)"),
    (lambda: TARGET.rank([Problem.parse("1+1=")]), "'1+1=' is no problem of +(3,3)"),
    (lambda: mixture(0.0), "target_share must lie strictly between 0 and 1 (got 0.0)"),
    (lambda: mixture(1.5), "got 1.5"),
    (lambda: mixture(target=EVERYDAY[2]), "target +(3,1) is an everyday task already"),
    (lambda: training_batch(np.random.default_rng(0), {TARGET: 2.0}, 8), "sum to 1 (got {'+(3,3)': 2.0})"),
    (lambda: eval_set(TARGET, 0, 0), "n must be at least 1 (got 0)"),
    (lambda: eval_set(TARGET, 5, 0.5), "seed must be an integer (got 0.5)"),
    (lambda: eval_set(Task("+", 1, 1), 60, 0, exclude=Task("+", 1, 1).all()[:50]), "cannot take n = 60 problems of +(1,1): exclude leaves 50 of its 100"),
    (lambda: streams(-1, "a"), "seed must be at least 0 (got -1)"),
    (lambda: streams(0, "a", "a"), "['a'] more than once"),
])
def test_bad_input_is_refused_with_the_value_and_what_is_right(call, said):
    with pytest.raises(ValueError) as e: call()
    assert said in str(e.value)
