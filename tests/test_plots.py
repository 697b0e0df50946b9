"Claims about the figures: what is drawn is what was given, byte for byte the same each time, and legible without colour."
import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from tiny_rlvr import plots
from tiny_rlvr.plots import (C, base_terrain_figure, capability_figure, churn_figure, coverage_figure, curves_figure, feature_figure, group_size_figure, learning_curves, lens_figure, loss_curve, mass_figure, outcome_figure, sampling_figure, save, signal_figure, terrain_deltas, terrain_figure,
                             threshold_figure, tree_figure, uniform_death_counts)
from tiny_rlvr.churn import killed, threshold_table

ks = 2**np.arange(11)

def p_data(n=60, seeds=4, seed=0):
    r = np.random.default_rng(seed)
    before, after = 10**r.uniform(-3, 0, n), 10**r.uniform(-3, 0, (seeds, n))
    before[:2], after[:, :2] = .1, 1e-6        # two killed in every seed
    before[2], after[0, 2] = 1e-6, .5          # one revived in one seed
    return before, after

def terrain_data(seeds=4):
    r = np.random.default_rng(0)
    cells = [(o, a, b) for o in "+-*/" for a, b in [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)]]
    rows = [(s, *c, *r.uniform(.2, .4, 4)) for s in range(-1, seeds) for c in cells]
    return pd.DataFrame(rows, columns=["seed", "op", "a_digits", "b_digits", "greedy", "p_correct", "pass64", "entropy"])

def log_data(seeds=3, updates=60):
    r = np.random.default_rng(0)
    return pd.DataFrame([(s, u, *r.random(4)) for s in range(seeds) for u in range(updates)], columns=["seed", "update", "zero_signal_fraction", "reward_mean", "entropy", "grad_norm"])

def named(ax, gid): return [a for a in ax.get_children() if a.get_gid() == gid]
def texts(ax): return [t.get_text() for t in ax.texts]
def churn_sets():
    sets = np.zeros((6, 40), bool); sets[:, 7] = True; sets[:3, 9] = True; sets[0, 11] = True
    return sets
feature_data = pd.DataFrame(dict(feature=["has_zero", "carry"], victim_share=[.7, .35], pool_share=[.28, .15], ratio=[2.5, 2.3], q_value=[.0001, .02]))

mass_data = pd.DataFrame([(g, e, b, a) for g in ("killed, 3 problems", "all, 60 problems") for e, b, a in [("right", .2, .7), ("off by ten", .5, .25), ("rare", .001, .002), ("other", .299, .048)]], columns=["group", "error", "before", "after"])
tree_data = pd.DataFrame([("843", .3, True), ("833", .5, True), ("84", .1, False), ("12", .1, True)], columns=["completion", "p", "finished"])
group_data = pd.DataFrame([(s, g, .5 + .4/g + .01*s) for s in (-1, 0, 1) for g in (2, 8, 64)], columns=["seed", "group_size", "expected"])
sampling_data = ks, np.linspace(.1, .9, 11), {n: np.where(ks <= n, np.linspace(.1, .9, 11) + np.random.default_rng(n).normal(0, .02, (5, 1)), np.nan) for n in (16, 1024)}

arm_data = pd.DataFrame([(s, r, "one", u, .1 + .8*u/9 - .05*s) for s in range(3) for r in ("sparse", "dense") for u in range(10 - s)], columns=["seed", "reward", "panel", "update", "p"])
outcome_data = pd.DataFrame([(s, g, a, .1*s + .3*(a == "dense")) for s in range(4) for g in ("small", "large") for a in ("sparse", "dense")], columns=["seed", "group", "arm", "value"])
coverage_data = pd.DataFrame([(s, r, p, .9 if p > .01 else p, 20. + s if p > .01 else np.nan) for s in range(3) for r in ("sparse", "dense") for p in (1e-4, .1)], columns=["seed", "reward", "p_start", "p_end", "take_off"])
wait_data = pd.DataFrame(dict(p_start=[1e-4, .1], wait=[1250., 1.76], had_signal=[.1, 1.]))
lens_data = pd.DataFrame([(panel, stage, s, p, 1 - p) for panel in ("target", "everyday") for stage, s, p in [("pretraining", -1, .05), ("pretraining", -1, .1), ("RL", 0, .2), ("RL", 1, .21)]], columns=["panel", "stage", "seed", "p", "entropy"])

FIGURES = dict(
    curves=lambda: curves_figure(arm_data, "p", "exact p", log=["one"]), outcome=lambda: outcome_figure(outcome_data, "final p", start=.2), coverage=lambda: coverage_figure(coverage_data, wait_data, 100), lens=lambda: lens_figure(lens_data),
    mass=lambda: mass_figure(mass_data), tree=lambda: tree_figure(tree_data, tree_data, "387+456=", "843"), group_size=lambda: group_size_figure(group_data),
    threshold=lambda: threshold_figure(threshold_table(*p_data())), sampling=lambda: sampling_figure(*sampling_data),
    capability=lambda: capability_figure(*p_data()), terrain=lambda: terrain_figure(terrain_data()), base_terrain=lambda: base_terrain_figure(terrain_data()),
    signal=lambda: signal_figure(log_data(), pd.DataFrame(dict(update=[0, 60], expected=[.4, .5]))), learning=lambda: learning_curves(log_data()),
    loss=lambda: loss_curve(pd.DataFrame(dict(step=range(100), loss=np.linspace(3, 1, 100)))), churn=lambda: churn_figure(churn_sets(), 30), feature=lambda: feature_figure(feature_data))

def test_capability_curves_are_the_exact_pass_at_k():
    before, after = p_data()
    left = capability_figure(before, after, ks).axes[0]
    curve = lambda p: [np.mean(1-(1-p)**k) for k in ks]
    assert np.allclose(named(left, "base")[0].get_ydata(), curve(before)) and (named(left, "base")[0].get_xdata() == ks).all()
    assert len(named(left, "seed")) == 4
    for line, p in zip(named(left, "seed"), after): assert np.allclose(line.get_ydata(), curve(p))
    assert np.allclose(named(left, "mean")[0].get_ydata(), np.mean([curve(p) for p in after], 0))
    assert f"{100*curve(before)[0]:.1f}%" in texts(left) and f"{100*curve(before)[-1]:.1f}%" in texts(left)

def test_capability_curves_agree_with_exact_eval():
    exact_eval = pytest.importorskip("tiny_rlvr.exact_eval")
    p = np.r_[p_data()[0], 0., 1., 1e-12]
    assert np.allclose(plots._pass_at_k(p, ks), exact_eval.capability_curve(p, ks), rtol=1e-12)

def test_every_problem_is_one_mark_and_killed_and_revived_are_marked_apart():
    before, after = p_data()
    right = capability_figure(before, after).axes[1]
    killed, revived, rest = (named(right, g)[0] for g in ("killed", "revived", "problems"))
    assert (len(killed.get_xdata()), len(revived.get_xdata()), len(rest.get_xdata())) == (2, 1, 57)
    assert np.allclose(rest.get_xdata(), before[3:]) and np.allclose(rest.get_ydata(), after[:, 3:].mean(0))
    assert len({killed.get_marker(), revived.get_marker(), rest.get_marker()}) == 3
    assert any("killed" in t and t.endswith(": 2") for t in texts(right)) and any("revived" in t and t.endswith(": 1") for t in texts(right))

def test_the_geometric_mean_is_drawn_and_named_when_asked_for():
    before, after = p_data()
    right = capability_figure(before, after, mean="geometric").axes[1]
    assert np.allclose(named(right, "problems")[0].get_ydata(), np.exp(np.log(after[:, 3:]).mean(0)))
    assert "geometric" in right.get_ylabel()

def test_p_of_zero_is_drawn_at_the_floor_that_the_axis_names():
    right = capability_figure(np.array([0., .5]), np.array([[0., .5], [0., .6]])).axes[1]
    assert named(right, "problems")[0].get_xdata().min() == 1e-8 and "1e-8" in right.get_xlabel()

def test_terrain_shows_the_mean_change_in_points_and_nats():
    t = terrain_data()
    greedy, entropy = terrain_figure(t).axes[:2]
    mean = lambda c: (t[t.seed >= 0].groupby(["op", "a_digits", "b_digits"])[c].mean() - t[t.seed == -1].set_index(["op", "a_digits", "b_digits"])[c])
    for ax, column, scale in [(greedy, "greedy", 100), (entropy, "entropy", 1)]:
        grid, m = ax.images[0].get_array(), mean(column)
        assert grid.shape == (4, 6) and grid[0, 5] == pytest.approx(scale*m["+", 3, 3]) and grid[3, 0] == pytest.approx(scale*m["/", 1, 1])
        assert ax.images[0].norm.vmin == -ax.images[0].norm.vmax
    box = named(greedy, "target")[0]
    assert box.get_x() + box.get_width()/2 == pytest.approx(5) and box.get_y() + box.get_height()/2 == pytest.approx(0)

def test_terrain_does_not_depend_on_the_order_of_rows_within_seeds():
    t = terrain_data()
    mixed = pd.concat([t[t.seed == -1], t[t.seed >= 0].sample(frac=1, random_state=1)])
    assert np.allclose(terrain_deltas(t, "entropy").delta, terrain_deltas(mixed, "entropy").delta)

def test_cells_that_dont_differ_from_the_base_are_rarely_marked():
    r = np.random.default_rng(0)
    base = terrain_data(0)
    marked = 0
    for _ in range(40):
        t = pd.concat([base] + [base.assign(seed=s, entropy=base.entropy + r.normal(0, .01, len(base))) for s in range(5)])
        marked += terrain_deltas(t, "entropy").clear.any()
    assert marked/40 < .15 # a whole map of 24 nulls is free of marks in about 95 of 100 experiments

def test_a_dot_stands_in_just_the_clear_cells():
    t = terrain_data()
    t.loc[(t.seed >= 0) & (t.op == "/") & (t.a_digits == 2) & (t.b_digits == 2), "entropy"] = [5.0, 5.1, 4.9, 5.05]
    ax, d = terrain_figure(t).axes[1], terrain_deltas(t, "entropy")
    assert len(named(ax, "dot")) == d.clear.sum() >= 1
    assert any(line.get_xdata()[0] == 2 and 3 < line.get_ydata()[0] < 3.5 for line in named(ax, "dot"))

def test_one_seed_alone_marks_nothing():
    assert not terrain_deltas(terrain_data(1), "entropy").clear.any()

def test_base_terrain_draws_the_bases_four_maps():
    t = terrain_data()
    axes = base_terrain_figure(t).axes
    base = t[t.seed == -1]
    for ax, column, scale in zip(axes, ["greedy", "p_correct", "pass64", "entropy"], [100, 100, 100, 1]):
        assert np.allclose(ax.images[0].get_array().ravel(), scale*base[column])

def test_signal_ends_are_the_means_of_the_first_and_last_window():
    log = log_data()
    ax = signal_figure(log, window=20).axes[0]
    mean = named(ax, "mean")[0].get_ydata()
    assert mean[0] == pytest.approx(log[log["update"] < 20].zero_signal_fraction.mean()) and mean[-1] == pytest.approx(log[log["update"] >= 40].zero_signal_fraction.mean())
    assert len(named(ax, "seed")) == 3 and "20" in ax.get_xlabel()

def test_signal_shows_what_is_expected_where_it_is_expected():
    e = pd.DataFrame(dict(update=[0, 60, 60], seed=[-1, 0, 1], expected=[.4, .5, .7]))
    line = named(signal_figure(log_data(), e).axes[0], "expected")[0]
    assert line.get_xdata().tolist() == [0, 60] and np.allclose(line.get_ydata(), [.4, .6])

def test_learning_curves_draw_every_seed_of_every_column():
    log = log_data()
    axes = learning_curves(log, {"entropy": "entropy (nats)"}, window=1).axes
    lines = named(axes[0], "seed")
    assert len(lines) == 3
    for s, line in enumerate(lines): assert np.allclose(line.get_ydata(), log[log.seed == s].entropy)

def test_a_column_that_was_never_measured_gets_no_panel():
    fig = learning_curves(log_data().assign(kl=np.nan))
    assert "KL" not in " ".join(ax.get_title(loc="left") for ax in fig.axes)

def test_loss_curve_draws_every_step_and_names_the_last_mean():
    loss = np.linspace(3, 1, 100)
    ax = loss_curve(pd.DataFrame(dict(step=range(100), loss=loss)), window=10).axes[0]
    assert np.allclose(named(ax, "loss")[0].get_ydata(), loss)
    smooth = named(ax, "smooth")[0]
    assert np.allclose(smooth.get_ydata(), np.interp(smooth.get_xdata()-.5, range(100), loss)) # a straight line is its own centred mean, up to the half step of an even window
    assert f"{loss[-10:].mean():.3f}" in texts(ax)[0]

def test_churn_bars_are_the_counts_and_the_null_is_poisson_binomial():
    left, right = churn_figure(churn_sets(), 30, [f"q{i}" for i in range(40)]).axes
    assert [b.get_width() for b in left.patches] == [6, 3, 1]
    assert [t.get_text() for t in left.get_yticklabels()] == ["q7", "q9", "q11"]
    assert [b.get_height() for b in right.patches] == [1, 0, 1, 0, 0, 1]
    null = named(right, "null")[0].get_ydata()
    sim, r = np.zeros(7), np.random.default_rng(0)
    for _ in range(3000):
        c = sum((r.permuted(np.arange(30)) < m).astype(int) for m in churn_sets().sum(1))
        sim += np.bincount(c, minlength=7)
    assert np.allclose(null[:3], sim[1:4]/3000, rtol=.1)
    assert uniform_death_counts(churn_sets(), 30).sum() == pytest.approx(30)

def test_feature_bars_are_the_shares():
    ax = feature_figure(feature_data).axes[0]
    assert [b.get_width() for b in ax.patches] == [.7, .35, .28, .15]
    assert any("2.5×" in t and "q<0.001" in t for t in texts(ax))

@pytest.mark.parametrize("name", FIGURES)
def test_drawing_twice_gives_the_same_bytes(name, tmp_path):
    a, b = ([p.read_bytes() for p in save(FIGURES[name](), tmp_path/str(i)/name)] for i in range(2))
    assert a == b and b"<svg" in a[1] and b"dc:date" not in a[1]

@pytest.mark.parametrize("name", FIGURES)
def test_no_figure_stays_open_or_depends_on_the_callers_settings(name, tmp_path):
    a = [p.read_bytes() for p in save(FIGURES[name](), tmp_path/"a")]
    with plt.rc_context({"font.size": 30, "lines.linewidth": 9, "axes.grid": False, "xtick.labelsize": 3}): b = [p.read_bytes() for p in save(FIGURES[name](), tmp_path/"b")]
    assert not plt.get_fignums() and a == b

@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_cut_off_at_the_edge(name, tmp_path):
    png = np.asarray(Image.open(save(FIGURES[name](), tmp_path/name)[0]).convert("L"))
    assert all((edge > 250).all() for edge in (png[0], png[-1], png[:, 0], png[:, -1])), "ink on the outermost row or column of pixels"

@pytest.mark.parametrize("name", FIGURES)
def test_text_is_set_in_at_least_eight_pixels_at_the_width_of_a_phone(name):
    fig = FIGURES[name]()
    sizes = [t.get_fontsize() for t in fig.findobj(plt.Text) if t.get_text().strip() and t.get_visible()]
    assert min(sizes)/72/fig.get_figwidth()*390 >= 8

def srgb(c): 
    v = np.array(matplotlib.colors.to_rgb(c))
    return np.where(v <= .04045, v/12.92, ((v+.055)/1.055)**2.4)

def lab(linear):
    xyz = np.array([[.4124, .3576, .1805], [.2126, .7152, .0722], [.0193, .1192, .9505]]) @ np.clip(linear, 0, 1) / [.9505, 1, 1.089]
    f = np.where(xyz > .008856, np.cbrt(xyz), 7.787*xyz + 16/116)
    return np.array([116*f[1]-16, 500*(f[0]-f[1]), 200*(f[1]-f[2])])

# Machado, Oliveira and Fernandes 2009, full severity
BLIND = dict(none=np.eye(3),
    protan=np.array([[.152286, 1.052583, -.204868], [.114503, .786281, .099216], [-.003882, -.048116, 1.051998]]),
    deutan=np.array([[.367322, .860646, -.227968], [.280085, .672501, .047413], [-.011820, .042940, .968881]]),
    tritan=np.array([[1.255528, -.076749, -.178779], [-.078411, .930809, .147602], [.004733, .691367, .303900]]))

@pytest.mark.parametrize("kind", BLIND)
@pytest.mark.parametrize("a, b", [("base", "rl"), ("killed", "revived"), ("rl", "killed"), ("killed", "neutral")])
def test_colours_that_meet_in_a_figure_stay_apart_for_colour_blind_readers(kind, a, b):
    assert np.linalg.norm(lab(BLIND[kind] @ srgb(C[a])) - lab(BLIND[kind] @ srgb(C[b]))) > 20

@pytest.mark.parametrize("a, b", [("base", "rl"), ("killed", "revived"), ("rl", "killed"), ("killed", "neutral")])
def test_colours_that_meet_in_a_figure_stay_apart_in_greyscale(a, b):
    assert abs(lab(srgb(C[a]))[0] - lab(srgb(C[b]))[0]) > 25

@pytest.mark.parametrize("call, says", [
    (lambda: capability_figure([.1, np.nan], [[.1, .1]]), "nan"),
    (lambda: capability_figure([.1], [[.1, .1]]), r"shapes \(1,\) and \(1, 2\)"),
    (lambda: capability_figure([.1], [[.1]], [2, 1]), "increasing"),
    (lambda: terrain_figure(terrain_data().drop(columns="entropy")), "entropy"),
    (lambda: terrain_figure(terrain_data(), ("+", 4, 4)), r"\+\(4,4\)"),
    (lambda: signal_figure(log_data(), window=0), "got 0"),
    (lambda: learning_curves(log_data()[["seed", "update"]]), "none of"),
    (lambda: loss_curve(pd.DataFrame(dict(step=[1, 1], loss=[1., 2.]))), "appears twice"),
    (lambda: churn_figure(churn_sets(), 0), "got 0"),
    (lambda: churn_figure(churn_sets()*1., 30), "float64"),
    (lambda: save(plt.Figure(), "x.svg"), "suffix"),
])
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says): call()

def test_mass_is_drawn_before_and_after_for_each_kind_that_matters():
    fig = mass_figure(mass_data)
    assert [t.get_text() for t in fig.axes[0].get_yticklabels()] == ["right", "off by ten", "other"]
    for ax in fig.axes:
        assert [a.get_xdata()[0] for a in named(ax, "before")] == [.2, .5, .299] and [a.get_xdata()[0] for a in named(ax, "after")] == [.7, .25, .048]
        assert len({a.get_marker() for a in named(ax, "before") + named(ax, "after")}) == 2 # told apart without colour

def test_a_trees_blocks_are_as_high_as_probability():
    left, right = tree_figure(tree_data, tree_data.assign(p=[0., 1., 0., 0.]), "387+456=", "843").axes
    column = lambda ax, depth: sorted(round(b.get_height(), 9) for b in ax.patches if b.get_x() == depth)
    assert column(left, 0) == [.1, .9] and column(left, 1) == [.1, .4, .5] # 12; 84.. 83..
    assert column(right, 0) == [1.] and sum(b.get_height() for b in named(left, "right")) == pytest.approx(.9 + .4 + .3 + .3)
    assert left.get_title(loc="left").endswith("p = 0.3") and right.get_title(loc="left").endswith("p = 0")

def test_group_sizes_show_the_base_every_seed_and_their_mean():
    ax = group_size_figure(group_data).axes[0]
    assert len(named(ax, "seed")) == 2
    assert np.allclose(named(ax, "base")[0].get_ydata(), group_data[group_data.seed == -1].expected)
    assert np.allclose(named(ax, "after RL, 2 seeds")[0].get_ydata(), group_data[group_data.seed >= 0].groupby("group_size").expected.mean())

def test_the_posts_thresholds_are_boxed_and_their_count_is_right():
    before, after = p_data()
    ax = threshold_figure(threshold_table(before, after)).axes[0]
    box, = named(ax, "post")
    x, y = round(box.get_x() + .5), round(box.get_y() + .5)
    assert (ax.get_xticklabels()[x].get_text(), ax.get_yticklabels()[y].get_text()) == ("0.0001", "0.01")
    count, = [t.get_text() for t in ax.texts if t.get_position() == (x, y)]
    assert float(count) == pytest.approx(killed(before, after).sum(1).mean(), abs=.05)

def test_every_sampled_curve_is_drawn_up_to_its_number_of_samples():
    left, right = sampling_figure(*sampling_data).axes
    for ax, n in ((left, 16), (right, 1024)):
        assert len(named(ax, "estimate")) == 5 and f"n = {n}" in ax.get_title(loc="left")
        for line in named(ax, "estimate"): assert np.isnan(line.get_ydata()).sum() == (ks > n).sum()
        assert np.allclose(named(ax, "exact")[0].get_ydata(), sampling_data[1])

def test_curves_show_every_seed_and_the_mean_of_each_arm():
    ax = curves_figure(arm_data, "p", "exact p").axes[0]
    assert len(named(ax, "seed")) == 6
    wide = arm_data[arm_data.reward == "dense"].pivot(index="update", columns="seed", values="p").ffill() # one that ended early counts on
    assert np.allclose(named(ax, "mean dense")[0].get_ydata(), wide.mean(axis=1))
    geometric = curves_figure(arm_data, "p", "exact p", log=["one"]).axes[0]
    assert geometric.get_yscale() == "log" and np.allclose(named(geometric, "mean dense")[0].get_ydata(), np.exp(np.log(wide).mean(axis=1)))

def test_outcomes_show_every_seed_and_means():
    ax = outcome_figure(outcome_data, "final p", start={"small": .2}).axes[0]
    assert sorted(np.concatenate([l.get_ydata() for l in named(ax, "seed")])) == sorted(outcome_data.value)
    assert [l.get_ydata()[0] for l in named(ax, "mean dense")] == pytest.approx([.45, .45]) and len(named(ax, "start")) == 1

def test_coverage_counts_those_that_never_took_off():
    top, low = coverage_figure(coverage_data, wait_data, 100).axes
    assert [t.get_text() for t in low.texts].count("3") == 2 # of each reward, from 1e-4
    assert np.isfinite(np.concatenate([l.get_ydata() for l in named(low, "seed")])).sum() == 6
