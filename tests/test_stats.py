"Claims about intervals, overlaps and tests: by hand, against slow versions, and by simulation."
from itertools import combinations
from math import comb

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, strategies as hs
from hypothesis.extra.numpy import arrays
from scipy import stats as st

from tiny_rlvr.stats import (NullTest, binomial_table, bootstrap_ci, fdr, in_noise_floors, jaccard, jaccard_expected, jaccard_permutation_test, jaccard_uniform_null,
                             mean_pairwise_jaccard, minimum_detectable_effect, noise_floor, p_bins)

rng = np.random.default_rng

def test_noise_floor_uses_ddof_one():
    nf = noise_floor([1., 3.])
    assert nf.sigma == pytest.approx(2**.5) and nf.relative == pytest.approx(2**.5/2)
    assert in_noise_floors(-2**.5, nf.sigma) == pytest.approx(-1)

def test_equal_seeds_give_equal_intervals_and_others_dont():
    x = rng(0).normal(size=(30, 4))
    a, b, c = (np.stack(bootstrap_ci(x, rng=rng(s))) for s in (1, 1, 2))
    assert (a == b).all() and (a != c).any()

def test_the_interval_does_not_depend_on_the_size_of_batches():
    x = rng(0).normal(size=30)
    wide = np.repeat(x[:, None], 3000, 1) # so wide that it's done in many batches
    low, high = bootstrap_ci(wide, rng=rng(1), n_resamples=200)
    one = bootstrap_ci(x, rng=rng(1), n_resamples=200)
    assert np.allclose(low, one[0]) and np.allclose(high, one[1])

def test_the_global_generator_is_never_used():
    x = rng(0).normal(size=10)
    np.random.seed(0); a = bootstrap_ci(x, rng=rng(1)); np.random.seed(1); b = bootstrap_ci(x, rng=rng(1))
    assert a == b

def test_whole_seeds_are_resampled():
    x = rng(0).normal(size=12)
    low, high = bootstrap_ci(np.stack([x, -x], 1), rng=rng(3))
    assert low[0] == pytest.approx(-high[1]) and high[0] == pytest.approx(-low[1])

def test_the_interval_covers_the_truth_about_95_times_in_100_at_thirty_seeds_and_less_at_five():
    def covers(n):
        r = rng(n)
        x = r.normal(.65, .034, size=(n, 4000))
        low, high = bootstrap_ci(x, rng=r, n_resamples=999)
        return np.mean((low <= .65) & (.65 <= high))
    assert .92 < covers(30) < .96
    assert .78 < covers(5) < .90

def test_minimum_detectable_effect_is_the_textbooks():
    assert minimum_detectable_effect(1, 64, arms=2) == pytest.approx(.5, abs=2e-3) # 64 an arm for d = 0.5
    assert minimum_detectable_effect(1, 34) == pytest.approx(.5, abs=6e-3)         # 34 for one sample
    assert minimum_detectable_effect(3, 10) == pytest.approx(3*minimum_detectable_effect(1, 10))

def test_the_detectable_effect_is_detected_as_often_as_asked():
    d = minimum_detectable_effect(2., 6, power=.9, alpha=.01, arms=2)
    r = rng(0)
    p = st.ttest_ind(r.normal(d, 2, (6, 20_000)), r.normal(0, 2, (6, 20_000))).pvalue
    assert np.mean(p < .01) == pytest.approx(.9, abs=.01)

sets_of = arrays(np.bool_, hs.tuples(hs.integers(2, 6), hs.integers(1, 9)))

@given(sets_of)
def test_the_matrix_product_agrees_with_the_loop_over_pairs(sets):
    slow = np.mean([jaccard(a, b) for a, b in combinations(sets, 2)])
    assert mean_pairwise_jaccard(sets) == pytest.approx(slow, abs=1e-6)

def test_empty_sets_share_nothing():
    assert jaccard(np.zeros(3, bool), np.zeros(3, bool)) == 0
    assert mean_pairwise_jaccard(np.zeros((3, 4), bool)) == 0

@pytest.mark.parametrize("a, b, n", [(1, 1, 4), (2, 3, 6), (3, 3, 5), (0, 2, 4), (4, 4, 4)])
def test_expected_jaccard_equals_enumeration(a, b, n):
    total = sum(len(x & y)/max(1, len(x | y)) for x in map(set, combinations(range(n), a)) for y in map(set, combinations(range(n), b)))
    assert jaccard_expected(a, b, n) == pytest.approx(total/comb(n, a)/comb(n, b))

def test_the_posts_null_of_about_five_from_1750_is_found():
    assert .0011 < jaccard_expected(4, 4, 1750) < .0013 + 5e-5 < jaccard_expected(5, 5, 1750) < .0017
    assert round(.00235*2000/(2*1750), 4) == .0013 # ratio of expectations, at the least that rounds to the post's 0.24%

def test_the_simulated_uniform_null_agrees_with_the_closed_form():
    sets = np.zeros((12, 60), bool); sets[:, :5] = True
    t = jaccard_uniform_null(sets, np.ones(60, bool), rng=rng(0), n_perm=4000)
    assert t.observed == 1 and t.pvalue == 1/4001
    assert t.null_mean == pytest.approx(jaccard_expected(5, 5, 60), abs=4*t.null.std()/4000**.5)

def test_permutations_stay_within_strata_and_the_pool():
    # every stratum is full or empty: shuffling inside changes nothing
    strata = np.repeat([0, 1, 2], 4)
    eligible = np.arange(12) < 8
    sets = np.tile(strata == 0, (5, 1))
    t = jaccard_permutation_test(sets, eligible, strata, rng=rng(0), n_perm=50)
    assert (t.null == 1).all() and t.pvalue == 1

def test_pvalues_are_uniform_on_null_data():
    r, strata = rng(1), np.repeat([0, 1], 50)
    def p():
        sets = r.random((8, 100)) < np.where(strata == 0, .5, .2)
        return jaccard_permutation_test(sets, np.ones(100, bool), strata, rng=r, n_perm=199).pvalue
    ps = np.array([p() for _ in range(1000)])
    assert st.kstest(ps, "uniform").pvalue > .01
    assert .03 < np.mean(ps <= .05) < .07

def test_with_few_deaths_the_pvalue_errs_on_the_safe_side():
    r = rng(2)
    def p():
        sets = r.random((6, 200)) < .01
        return jaccard_uniform_null(sets, np.ones(200, bool), rng=r, n_perm=99).pvalue
    assert np.mean([p() <= .05 for _ in range(200)]) < .09

def test_the_uniform_null_flatters_where_kills_come_from_low_p_and_bins_dont():
    r = rng(3)
    p = 10**r.uniform(-2, 0, 1750)
    sets = r.random((20, 1750)) < .0004/p
    everyone = np.ones(1750, bool)
    assert jaccard_uniform_null(sets, everyone, rng=r, n_perm=499).pvalue < .01
    assert jaccard_permutation_test(sets, everyone, p_bins(p, 20), rng=r, n_perm=499).pvalue > .05

def test_equal_seeds_give_equal_null_distributions():
    sets = rng(0).random((5, 40)) < .2
    a, b = (jaccard_permutation_test(sets, np.ones(40, bool), np.arange(40)//10, rng=rng(7), n_perm=30).null for _ in range(2))
    assert (a == b).all()

def test_no_pvalue_is_zero():
    assert NullTest(1., np.zeros(99)).pvalue == .01

@given(arrays(np.float64, hs.integers(1, 40), elements=hs.floats(0, 1)), hs.integers(1, 8))
def test_bins_rise_with_p_and_equal_p_shares_one(p, n):
    b = p_bins(p, n)
    order = np.argsort(p)
    assert (np.diff(b[order]) >= 0).all() and b.min() == 0 and b.max() < n
    assert all(len(set(b[p == v])) == 1 for v in p)

def test_bins_are_of_equal_size_without_ties_and_minus_one_outside_the_pool():
    p, pool = rng(0).random(100), np.arange(100) < 80
    b = p_bins(p, 8, pool)
    assert (b[~pool] == -1).all() and (np.bincount(b[pool]) == 10).all()

def test_fdr_by_hand():
    assert fdr([.04, .01, .02]) == pytest.approx([.04, .03, .03])

def test_the_posts_feature_table_is_significant_row_by_row_and_as_a_family():
    t = binomial_table(pd.DataFrame(dict(victims=[14, 17, 7], n_victims=20, pool_share=[.28, .42, .15])))
    assert (t.p_value < .05).all() and (t.q_value < .05).all() and (t.q_value >= t.p_value).all() and (t.n_tests == 3).all()

def test_binomial_p_by_hand_and_untested_rows_leave_the_family():
    t = binomial_table(pd.DataFrame(dict(victims=[3, 0], n_victims=[3, 0], pool_share=[.5, .5])))
    assert t.p_value[0] == pytest.approx(2/8) and np.isnan(t.p_value[1]) and t.q_value[0] == t.p_value[0] and (t.n_tests == 1).all()

sets2 = np.eye(3, dtype=bool)
@pytest.mark.parametrize("call, says", [
    (lambda: noise_floor([1.]), "2 seeds"),
    (lambda: noise_floor([1., np.inf]), "finite"),
    (lambda: in_noise_floors(1, 0), "above 0"),
    (lambda: bootstrap_ci([1., 2.], rng=1), "Generator"),
    (lambda: bootstrap_ci([1., 2.], level=95, rng=rng(0)), "got 95"),
    (lambda: minimum_detectable_effect(1, 1), "n_seeds"),
    (lambda: jaccard(np.ones(2, bool), np.ones(3, bool)), r"\(2,\) and bool \(3,\)"),
    (lambda: jaccard_uniform_null(sets2, np.zeros(3, bool), rng=rng(0)), "not eligible"),
    (lambda: jaccard_permutation_test(sets2, np.ones(3, bool), [0, 1], rng=rng(0)), r"got \(2,\)"),
    (lambda: jaccard_permutation_test(sets2, np.ones(3, bool), [0, 0, 0], rng=rng(0), n_perm=0), "got 0"),
    (lambda: jaccard_expected(4, 1, 3), "n=3"),
    (lambda: p_bins([np.nan], 2), "nan"),
    (lambda: fdr([.1, 2.]), "2.0"),
    (lambda: binomial_table(pd.DataFrame(dict(victims=[1]))), "n_victims"),
])
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says): call()
