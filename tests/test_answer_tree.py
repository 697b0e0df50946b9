"Claims about the answer tree: brute force over all sequences, teacher forcing and sampling are the referees."
from copy import deepcopy
from itertools import product
import numpy as np, pandas as pd, pytest, torch
from hypothesis import given, settings, strategies as st
from scipy.stats import chisquare
from referee import BOS, EOS, hf_logp, ids_of, text_of
from tiny_rlvr.answer_tree import Forest, PathCache, accepted, answer_tree, frontier, heaviest, top_wrong
from tiny_rlvr.exact_eval import answer_logprob
from tiny_rlvr.model import GPT, GPTConfig, to_hf
from tiny_rlvr.rollout import rollout
from tiny_rlvr.tasks import Problem, Task, eval_set, verify

MIXED = "4+3= 9+8= 7-7= 60+7= 10+1= 31+8=".split()                   # prompts of two lengths
ANSWERS = [Problem.parse(p).answer for p in MIXED]
BOUNDS = "past_limit length entropy".split()


@pytest.fixture(scope="module")
def toy():
    "One layer, float64 throughout, so that nothing but the method can make a difference."
    model = GPT(GPTConfig(1, 2, 8, 16, max_seq_len=16), seed=5).double().requires_grad_(False)
    for p in model.parameters():
        if p.dim() > 1: p.mul_(40)
    return model


@pytest.fixture(scope="module")
def tree(trained): return answer_tree(trained, MIXED)


def brute_force(model, prompt, T, temperature=1.):
    "Every completion of at most T tokens -> (p, mean entropy), by running all 20**(T-1) prefixes whole through the model."
    start, levels = [BOS] + ids_of(prompt), []
    for t in range(T):
        rows = torch.tensor(list(product(range(20), repeat=t)), dtype=torch.long).reshape(20**t, t)
        rows = torch.cat([torch.tensor(start).expand(len(rows), -1), rows], 1)
        logp = torch.cat([(model(r)[:, -1].double() / temperature).log_softmax(-1) for r in rows.split(1000)])
        levels.append(logp.reshape(*[20] * t, 20).numpy())
    out = {}
    for n in range(1, T + 1):
        for tokens in product(range(20), repeat=n):
            if EOS in tokens[:-1] or (n < T and tokens[-1] != EOS): continue
            lps = [levels[i][tokens[:i]] for i in range(n)]
            H = [-(np.exp(lp) * lp).sum() for lp in lps]
            out[tokens] = np.exp(sum(lp[t] for lp, t in zip(lps, tokens))), np.mean(H)
    return out


def key(tokens): return text_of([t for t in tokens if t != EOS]), tokens[-1] == EOS


def truths(exact, answer):
    "What the tree's quantities truly are, from all completions."
    return dict(accepted=sum(v[0] for t, v in exact.items() if verify(key(t)[0], answer)), past_limit=sum(v[0] for t, v in exact.items() if t[-1] != EOS),
                length=sum(v[0] * len(t) for t, v in exact.items()), entropy=sum(p * h for p, h in exact.values()))


@pytest.fixture(scope="module")
def four(toy):
    "All 137,561 completions of at most four tokens of one prompt, and what follows from them."
    exact = brute_force(toy, "9+8=", 4)
    return exact, truths(exact, "7")


def bounds(t, answer): return {k: (t.problems[f"{k}_low"][0], t.problems[f"{k}_high"][0]) for k in BOUNDS} | {"accepted": tuple(accepted(t, [answer]).iloc[0])}


@pytest.mark.parametrize("prompt, T, temperature", [("9+8=", 4, 1.), ("4+3=", 3, 1.), ("12-7=", 3, .6), ("=", 3, 2.5), ("=", 1, 1.)])
def test_with_no_tolerance_the_tree_is_every_completion_by_brute_force(toy, four, prompt, T, temperature):
    exact = four[0] if T == 4 else brute_force(toy, prompt, T, temperature)
    assert sum(v[0] for v in exact.values()) == pytest.approx(1, abs=1e-9)
    named = {key(t): v for t, v in exact.items()}
    t = answer_tree(toy, [prompt], 0, temperature, T, max_nodes=10_000)
    c = t.completions
    assert len(c) == len(named) == sum(19**n for n in range(T)) + 19**T and set(zip(c.completion, c.finished)) == set(named)
    for column, i in (("p", 0), ("entropy", 1)): np.testing.assert_allclose(c[column], [named[k][i] for k in zip(c.completion, c.finished)], rtol=0, atol=1e-9)
    assert t.problems.open[0] == 0 and t.problems.nodes[0] == sum(19**n for n in range(T))
    for name, x in truths(exact, "7").items(): assert bounds(t, "7")[name] == pytest.approx((x, x), abs=1e-9)


def test_bounds_hold_the_truth_at_every_tolerance_and_shrink_with_it(toy, four):
    exact, truth = four
    named, last = {key(t): v for t, v in exact.items()}, None
    for tol in .9, .5, .2, .1, .05, .02, .01, 1e-3, 1e-4, 1e-6:
        t = answer_tree(toy, ["9+8="], tol, max_new_tokens=4, max_nodes=10_000)
        c, row = t.completions, t.problems.iloc[0]
        np.testing.assert_allclose(c.p, [named[k][0] for k in zip(c.completion, c.finished)], rtol=0, atol=1e-9)
        assert row.open <= tol and row.open + c.p.sum() == pytest.approx(1, abs=1e-12)
        missing = set(named) - set(zip(c.completion, c.finished))
        assert all(named[k][0] <= row.likeliest_open + 1e-12 for k in missing)
        assert sum(named[k][0] for k in missing) == pytest.approx(row.open, abs=1e-9)
        now = bounds(t, "7")
        for name, (low, high) in now.items():
            assert low - 1e-12 <= truth[name] <= high + 1e-12, (tol, name)
            if last: assert last[name][0] - 1e-12 <= low and high <= last[name][1] + 1e-12, (tol, name)
            assert high - low <= row.open * dict(length=4, entropy=np.log(20)).get(name, 1) + 1e-12
        last = now
    assert all(high - low < 1e-5 for low, high in last.values())


@pytest.mark.parametrize("temperature", [1., .5, 1.8])
def test_the_tree_agrees_with_teacher_forcing_on_every_completion(trained, temperature):
    c = answer_tree(trained, MIXED, 3e-2, temperature).completions
    plain = c[c.finished & ~c.completion.str.contains("<")]
    assert len(plain) > 50 and plain.problem.nunique() == len(MIXED)
    forced = answer_logprob(trained, [MIXED[i] for i in plain.problem], list(plain.completion), temperature)
    np.testing.assert_allclose(plain.p, np.exp(forced), rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.log(plain.p), forced, rtol=0, atol=1e-4)


def test_the_tree_agrees_with_another_library_at_any_length_of_prompt(trained, tree):
    hf = to_hf(trained)
    for i, prompt in enumerate(MIXED):
        for r in tree.completions[tree.completions.problem == i].head(8).itertuples():
            if "<" in r.completion: continue
            tokens = ids_of(r.completion) + [EOS] * r.finished
            with torch.no_grad(): lp = hf_logp(hf, [[BOS] + ids_of(prompt) + tokens])[0].numpy()[len(prompt):-1]
            assert r.p == pytest.approx(np.exp(sum(x[t] for x, t in zip(lp, tokens))), abs=1e-6)
            assert r.entropy == pytest.approx(np.mean(-(np.exp(lp) * lp).sum(1)), abs=1e-5) and r.length == len(tokens)


@pytest.mark.parametrize("temperature, T", [(1., 8), (1.5, 3)])
def test_the_tree_agrees_with_100_000_samples_within_their_error(trained, temperature, T):
    n, prompt, answer = 100_000, "60+7=", "67"
    t = answer_tree(trained, [prompt], 1e-3, temperature, T)
    c, row = t.completions, t.problems.iloc[0]
    r = rollout(trained, [prompt], n, np.random.default_rng(23), temperature, T)
    seen = pd.Series(list(zip(r.completions, r.finished.tolist()))).value_counts()
    big = c[c.p * n >= 20]
    assert len(big) > 25
    observed = np.array([seen.get(k, 0) for k in zip(big.completion, big.finished)])
    assert chisquare([*observed, n - observed.sum()], [*(big.p * n), n * (1 - big.p.sum())]).pvalue > 1e-3
    def within(x, low, high): assert low - 4 * np.std(x) / n**.5 <= np.mean(x) <= high + 4 * np.std(x) / n**.5
    within((r.entropy.sum(1) / r.lengths).numpy(), row.entropy_low, row.entropy_high)
    within(r.lengths.double().numpy(), row.length_low, row.length_high)
    within((~r.finished).double().numpy(), row.past_limit_low, row.past_limit_high)
    within(np.array([verify(x, answer) for x in r.completions], float), *accepted(t, [answer]).iloc[0])


@pytest.mark.parametrize("chunk", [1, 2, 5, 1000])
def test_neither_the_chunk_nor_the_company_nor_the_order_of_prompts_changes_a_tree(trained, tree, chunk):
    order = np.random.default_rng(chunk).permutation(len(MIXED))
    other = answer_tree(trained, [MIXED[i] for i in order], chunk=chunk)
    for new, i in enumerate(order):
        a, b = (t.completions[t.completions.problem == j].set_index(["completion", "finished"]) for t, j in ((tree, i), (other, new)))
        assert abs(len(a) - len(b)) <= 2                                   # rounding may move a node across the threshold
        both = a.index.intersection(b.index)
        np.testing.assert_allclose(a.loc[both].p, b.loc[both].p, rtol=0, atol=1e-6)
        x, y = tree.problems.iloc[i], other.problems.iloc[new]
        assert x.prompt == y.prompt and abs(x.nodes - y.nodes) <= 2
        for name in ["open"] + [f"{k}_{end}" for k in BOUNDS for end in ("low", "high")]: assert x[name] == pytest.approx(y[name], abs=2e-4)


def test_the_batch_of_a_forward_pass_changes_nothing(trained):
    a, b = Forest(trained, MIXED), Forest(trained, MIXED)
    for _ in range(3):
        wave = [frontier(o[0], 1e-2, 200) for o in a.open]
        a.expand(wave); b.expand(wave, batch=7)
        for x, y in zip(a.open, b.open):
            np.testing.assert_allclose(x[0], y[0], atol=1e-7)
            assert (x[1] == y[1]).all() and (x[2] == y[2]).all()


@given(st.integers(0, 10**6), st.sampled_from([.5, .1, .03]))
@settings(max_examples=25)
def test_waves_expand_exactly_what_best_first_would(seed, tol):
    "On random trees without a model: children take random shares of their parent."
    def shares(node): return np.random.default_rng([seed, *node]).dirichlet([.2, .2, .2, .6])      # the last one ends
    def grow(choose):
        open_, expanded = {(): 1.}, []
        while sum(open_.values()) > tol:
            nodes, p = list(open_), np.array(list(open_.values()))
            for i in choose(p):
                expanded.append(nodes[i])
                for k, s in enumerate(shares(nodes[i])[:3]): open_[*nodes[i], k] = p[i] * s
                del open_[nodes[i]]
        return set(expanded)
    assert grow(lambda p: frontier(p, tol, 10**9)) == grow(lambda p: [p.argmax()])


def test_the_frontier_leaves_what_the_tolerance_allows_and_no_more():
    p = np.array([.5, .01, .3, .02, .17])
    for tol, room, chosen in (.03, 9, [0, 2, 4]), (.0299, 9, [0, 2, 3, 4]), (.03, 2, [0, 2]), (.03, 0, []), (2, 9, []), (0, 9, [0, 1, 2, 3, 4]):
        assert sorted(frontier(p, tol, room)) == chosen
    assert len(frontier(np.zeros(0), 0, 9)) == 0 and frontier(np.array([0, 1e-300]), 0, 9).tolist() == [1]


def test_a_node_budget_is_kept_and_what_stays_open_is_said(toy, four):
    _, truth = four
    last = 1
    for budget in 1, 2, 10, 50, 200, 1000:
        t = answer_tree(toy, ["9+8="], 1e-9, max_new_tokens=4, max_nodes=budget)
        row = t.problems.iloc[0]
        assert row.nodes == budget and 1e-9 < row.open <= last + 1e-12
        assert row.open + t.completions.p.sum() == pytest.approx(1, abs=1e-12)
        for name, (low, high) in bounds(t, "7").items(): assert low - 1e-12 <= truth[name] <= high + 1e-12
        last = row.open


@pytest.mark.parametrize("tol", [.2, .05, .01])
def test_a_budget_goes_to_likely_nodes(toy, tol):
    "Whatever the tolerance, twice the nodes that best-first needs leave no more open than it does."
    needed = answer_tree(toy, ["9+8="], tol, max_new_tokens=4).problems.nodes[0]
    assert answer_tree(toy, ["9+8="], 0, max_new_tokens=4, max_nodes=2 * needed).problems.open[0] <= tol


def test_damaged_weights_are_an_error_and_get_no_certificate(trained):
    broken = deepcopy(trained)
    broken.head.weight[3, 0] = np.nan
    with pytest.raises(ValueError, match="logits aren't finite"): answer_tree(broken, MIXED)


def test_an_impossible_token_has_no_probability_and_breaks_nothing(trained):
    never = deepcopy(trained)
    hook = never.head.register_forward_hook(lambda m, i, o: o.index_fill(-1, torch.tensor([0, 1]), -torch.inf))
    t = answer_tree(never, MIXED, 1e-3)
    assert np.isfinite(t.problems.select_dtypes("number")).all(axis=None) and (t.problems.open <= 1e-3).all()
    assert t.completions[t.completions.completion.str.contains("<")].p.sum() == 0
    hook.remove()


def test_a_policy_that_never_stops_is_all_past_the_limit(trained):
    mute = deepcopy(trained)
    mute.head.register_forward_hook(lambda m, i, o: (o * 20).index_fill(-1, torch.tensor([EOS]), -torch.inf))
    t = answer_tree(mute, MIXED, 1e-3, max_new_tokens=5)
    assert t.completions.p[t.completions.finished].sum() == 0
    assert (t.problems.past_limit_low >= 1 - 1e-3).all() and (t.problems.past_limit_high <= 1 + 1e-9).all() and (t.problems.length_high <= 5 + 1e-9).all()


def test_unfinished_completions_are_judged_as_rollouts_are(trained):
    "With a limit of one token `7` is cut off before <eos>, and the verifier takes it all the same."
    t = answer_tree(trained, ["4+3="], 0, max_new_tokens=1)
    c = t.completions.set_index("completion")
    assert len(c) == 20 and not c.finished["7"] and c.finished[""] and t.problems.open[0] == 0
    assert accepted(t, ["7"]).low[0] == pytest.approx(c.p["7"], abs=1e-12)
    r = rollout(trained, ["4+3="], 20_000, np.random.default_rng(0), max_new_tokens=1)
    assert np.mean([verify(x, "7") for x in r.completions]) == pytest.approx(c.p["7"], abs=.015)


def test_the_verifier_accepts_at_least_the_answer_and_what_it_rejects_is_the_rest(trained, tree):
    reward, p = accepted(tree, ANSWERS), np.exp(answer_logprob(trained, MIXED, ANSWERS))
    assert (reward.high >= p - 1e-6).all() and (reward.low >= p - 1e-3 - 1e-6).all() and (reward.high - reward.low <= 1e-3 + 1e-12).all()
    wrong = top_wrong(tree, ANSWERS, 10**6)
    assert not any(verify(c, a) for c, a in zip(wrong.completion, wrong.answer)) and (wrong.prompt == np.array(MIXED)[wrong.problem]).all()
    np.testing.assert_allclose(wrong.groupby("problem").p.sum() + reward.low + tree.problems.open, 1, atol=1e-12)
    top = top_wrong(tree, ANSWERS, 2)
    assert len(top) == 12 and (top.groupby("problem").p.max() == wrong.groupby("problem").p.max()).all()
    everything = accepted(tree, ANSWERS, accept=lambda completion, answer: True)
    np.testing.assert_allclose(everything, np.c_[1 - tree.problems.open, np.ones(6)], atol=1e-12)


@pytest.mark.parametrize("mass", [.5, .99, .999])
def test_the_heaviest_completions_hold_their_mass_and_say_what_is_missing(tree, mass):
    h = heaviest(tree, mass)
    g = h.groupby("prompt", sort=False)
    assert list(h.columns) == ["prompt", "completion", "p", "finished", "remainder"] and set(h.prompt) == set(MIXED) and h.remainder.groupby(h.prompt).nunique().eq(1).all()
    np.testing.assert_allclose(g.p.sum() + g.remainder.first(), 1, atol=1e-12)
    assert (g.p.sum() >= mass - 1e-12).all() and (g.p.sum() - g.p.last() < mass).all(), "not the fewest"


def test_bad_input_is_named(trained, tree):
    for kwargs, message in ((dict(tol=1.), r"tol .* \(got 1.0\)"), (dict(tol=-1e-3), r"\(got -0.001\)"), (dict(tol=np.nan), r"\(got nan\)"), (dict(temperature=0), r"temperature must be a number above 0 \(got 0\)"),
                            (dict(temperature=np.inf), "got inf"), (dict(max_new_tokens=0), r"max_new_tokens must be a whole number of at least 1 \(got 0\)"), (dict(max_nodes=0), "max_nodes"), (dict(chunk=0), "chunk"),
                            (dict(max_new_tokens=28), "max_new_tokens can be at most 27 at max_seq_len=32")):
        with pytest.raises(ValueError, match=message): answer_tree(trained, MIXED, **kwargs)
    with pytest.raises(ValueError, match=r"did you mean \['4\+3='\]"): answer_tree(trained, "4+3=")
    with pytest.raises(ValueError, match="unknown character 'x'"): answer_tree(trained, ["4x3="])
    for f in accepted, top_wrong:
        with pytest.raises(ValueError, match="got 5 answers and 6 problems"): f(tree, ANSWERS[:5])
    for mass in 0, 1, 1.5:
        with pytest.raises(ValueError, match="mass is a probability"): heaviest(tree, mass)


def test_nothing_lighter_than_the_least_is_kept_and_nothing_as_heavy_is_missing(tree):
    assert tree.problems.likeliest_open.max() < 1e-3
    h, c = heaviest(tree, least=1e-3), tree.completions
    assert len(h) == (c.p >= 1e-3).sum() and h.p.min() >= 1e-3
    np.testing.assert_allclose(h.groupby("prompt").p.sum() + h.groupby("prompt").remainder.first(), 1, atol=1e-12)


def test_a_mass_that_a_tree_doesnt_have_is_listed_as_far_as_it_is_known(tree):
    h = heaviest(tree, 1 - 1e-6)
    assert len(h) == len(tree.completions)
    np.testing.assert_allclose(h.groupby("prompt", sort=False).remainder.first(), tree.problems.open, atol=1e-12)


def test_the_longest_completion_that_fits_the_model_is_computed(trained):
    t = answer_tree(trained, ["60+7="], 1e-2, max_new_tokens=27)
    assert t.problems.open[0] <= 1e-2


def test_no_prompts_and_twin_prompts(trained):
    none = answer_tree(trained, [])
    assert len(none.completions) == len(none.problems) == none.n_nodes == len(accepted(none, [])) == len(heaviest(none)) == len(top_wrong(none, [])) == 0
    twins = answer_tree(trained, ["4+3="] * 2, 1e-2)
    a, b = (twins.completions[twins.completions.problem == i].reset_index(drop=True) for i in (0, 1))
    assert len(a) == len(b) and a.completion.head(5).equals(b.completion.head(5))
    assert twins.completions.p.dtype == np.float64 and twins.completions.finished.dtype == bool


def test_the_cache_grows_without_losing_a_key():
    cache, rng = PathCache(), torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 3, 2, 4, 5, generator=rng)                       # 3 rows, 2 heads, 4 tokens, head_dim 5
    assert len(cache) == 0 and cache.append(0, k, v)[0] is k and len(cache) == 12
    for step in range(4):
        new = torch.randn(2, 3, 2, 1, 5, generator=rng)
        at = len(cache)
        cache.paths = torch.tensor([[0, 1, at], [4, 5, at + 1], [8, 3, at + 2]])
        ks, vs = cache.append(0, *new)
        assert ks.shape == (3, 2, 3, 5) and torch.equal(ks[:, :, 2:], new[0]) and torch.equal(vs[:, :, 2:], new[1])
        assert torch.equal(ks[0, :, :2], k[0, :, :2]) and torch.equal(ks[2, :, 0], k[2, :, 0]) and torch.equal(vs[2, :, 1], v[0, :, 3])
