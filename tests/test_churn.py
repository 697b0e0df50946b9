"Claims about killed and revived problems, on cases small enough to check by hand and on random ones."
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, strategies as hs
from hypothesis.extra.numpy import arrays

from tiny_rlvr.churn import (ALIVE, DEAD, before_after, check_p, concentration, feature_table, held_out_rates, kill_counts, killed, matched_shares, revived, status, tails_by_seed, tails_table,
                             threshold_table)

probabilities = lambda *shape: arrays(np.float64, shape, elements=hs.floats(0, 1))

def test_thresholds_are_the_posts():
    assert (ALIVE, DEAD) == (.01, .0001)

def test_a_problem_at_a_threshold_is_neither_alive_nor_dead():
    assert list(status([ALIVE, DEAD])) == ["between", "between"]
    assert list(status([np.nextafter(ALIVE, 1), np.nextafter(DEAD, 0)])) == ["alive", "dead"]
    assert not killed([ALIVE], [0.]).any() and not killed([.5], [DEAD]).any() and not revived([DEAD], [.5]).any()

def test_status_sorts_dead_before_between_before_alive():
    s = status([.5, 1e-3, 0.])
    assert s.ordered and list(s.sort_values()) == ["dead", "between", "alive"]

@given(probabilities(6), probabilities(3, 6))
def test_killed_and_revived_agree_with_status(before, after):
    b, a = np.asarray(status(before)), np.stack([np.asarray(status(r)) for r in after])
    assert (killed(before, after) == ((b == "alive") & (a == "dead"))).all()
    assert (revived(before, after) == ((b == "dead") & (a == "alive"))).all()

@given(probabilities(6), probabilities(6))
def test_reversing_time_swaps_killed_and_revived(before, after):
    assert (killed(before, after) == revived(after, before)).all()

def test_nothing_changes_when_the_policy_doesnt():
    p = np.array([0., 1e-5, 1e-3, .5, 1.])
    assert not killed(p, p).any() and not revived(p, p).any()

def test_tails_table_by_hand():
    before = np.array([.5, .5, 1e-6, 1e-6, 1e-3])
    after = np.array([[1e-6, .5, .5, 1e-6, 1e-3], [1e-6, 1e-6, 1e-6, 1e-6, 1e-3]])
    by_seed, t = tails_by_seed(before, after), tails_table(before, after)
    assert by_seed.killed.tolist() == [1, 2] and by_seed.revived.tolist() == [1, 0] and by_seed.dead_after.tolist() == [2, 4]
    assert t.fraction.to_dict() == pytest.approx(dict(revived=.1, killed=.3, dead_before=.4, dead_after=.6))
    assert t.count_sd["killed"] == pytest.approx(np.std([1, 2], ddof=1))

@given(probabilities(8), probabilities(4, 8))
def test_the_dead_zone_grows_by_those_who_enter_less_those_who_leave(before, after):
    t = tails_by_seed(before, after)
    enter = ((before >= DEAD) & (after < DEAD)).sum(1)
    leave = ((before < DEAD) & (after >= DEAD)).sum(1)
    assert (t.dead_after - t.dead_before == enter - leave).all() and (t.killed <= enter).all() and (t.revived <= leave).all()

def test_concentration_by_hand():
    sets = np.zeros((30, 5), bool)
    sets[:, 0] = True; sets[:10, 1] = True; sets[:9, 2] = True
    assert concentration(sets) == dict(seeds=30, per_seed=pytest.approx(49/30), distinct=3, third=10, in_a_third=2, in_all=1, most=30)
    assert kill_counts(sets).tolist() == [30, 10, 9, 0, 0]
    assert concentration(sets[:5])["third"] == 2 # a third of five, rounded up

def test_feature_shares_count_problems_once_and_deaths_each_time():
    sets = np.array([[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]], bool)
    t = feature_table(pd.DataFrame(dict(f=[True, False, False, False])), sets, np.ones(4, bool)).iloc[0]
    assert (t.victim_share, t.death_share, t.pool_share) == (1/2, 3/4, 1/4)
    assert (t.ratio, t.death_ratio) == (2, 3)

def test_a_pool_without_the_feature_has_no_ratio():
    t = feature_table(pd.DataFrame(dict(f=[False, False])), np.array([[True, False]]), np.ones(2, bool)).iloc[0]
    assert t.pool_share == 0 and np.isnan(t.ratio)

def test_before_after_undoes_any_order_of_the_rows():
    rng = np.random.default_rng(0)
    p = rng.random((4, 7))
    df = pd.DataFrame([(f"{q}+0=", str(q), s-1, p[s, q]) for s in range(4) for q in range(7)], columns=["prompt", "answer", "seed", "p"])
    ba = before_after(pd.concat([df[df.seed == -1], df[df.seed >= 0].sample(frac=1, random_state=0)]))
    assert (ba.p_before == p[0]).all() and (ba.p_after == p[1:]).all() and ba.seeds == [0, 1, 2]
    assert ba.problems.answer.tolist() == [str(q) for q in range(7)]

@pytest.mark.parametrize("call, says", [
    (lambda: status([np.nan]), "nan"),
    (lambda: status([1.5]), "1.5"),
    (lambda: killed([.1, .2], [.1]), r"shapes \(2,\) and \(1,\)"),
    (lambda: killed([.1, -.2], [.1, .2]), r"p_before\[1\] is -0.2"),
    (lambda: tails_table([.1], [.1]), r"2 axes \(got shape \(1,\)\)"),
    (lambda: concentration(np.ones((2, 2))), "float64"),
    (lambda: concentration(np.ones(3, bool)), r"shape \(3,\)"),
    (lambda: check_p([]), "empty"),
])
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says): call()

@given(probabilities(8), probabilities(3, 8))
def test_threshold_table_counts_what_killed_and_revived_say(before, after):
    for r in threshold_table(before, after).itertuples():
        k, v = killed(before, after, r.alive, r.dead), revived(before, after, r.alive, r.dead)
        assert r.dead < r.alive and r.killed*3 == pytest.approx(k.sum()) and r.revived*3 == pytest.approx(v.sum())
        assert (r.killed_distinct, r.revived_distinct) == (k.any(0).sum(), v.any(0).sum())

@given(probabilities(8), probabilities(3, 8))
def test_wider_gaps_between_thresholds_never_kill_more(before, after):
    t = threshold_table(before, after)
    assert (t.groupby("alive").killed.diff().dropna() >= 0).all() and (t.groupby("dead").killed.diff().dropna() <= 0).all()

@given(arrays(bool, (5, 12)))
def test_a_held_out_seed_is_judged_by_the_others_alone(sets):
    held = held_out_rates(sets, np.ones(12, bool))
    for s, r in enumerate(held.itertuples()):
        others = np.delete(sets, s, 0).any(0)
        assert (r.chosen, r.hit) == (others.sum(), (others & sets[s]).sum())

def test_held_out_rates_of_independent_seeds_are_the_pools_and_of_equal_seeds_one():
    rng = np.random.default_rng(0)
    free = held_out_rates(rng.random((20, 5000)) < .02, np.ones(5000, bool))
    assert abs(free.rate.mean() - free.pool_rate.mean()) < .002
    assert (held_out_rates(np.tile(rng.random(5000) < .02, (20, 1)), np.ones(5000, bool)).rate == 1).all()

def test_matched_shares_remove_what_the_strata_explain_and_leave_the_rest():
    rng = np.random.default_rng(0)
    strata = rng.integers(0, 4, 20_000)
    features = pd.DataFrame(dict(hard=rng.random(20_000) < strata/4, other=rng.random(20_000) < .3))
    everyone = np.ones(20_000, bool)
    by_stratum = (rng.random((1, 20_000)) < strata/40) # victims come from high strata, whatever the feature
    share = matched_shares(features, by_stratum, everyone, strata)
    assert abs(share.hard - features.hard[by_stratum[0]].mean()) < .03 < features.hard[by_stratum[0]].mean() - features.hard.mean()
    assert abs(share.other - .3) < .02
