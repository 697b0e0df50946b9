"Claims about what is shipped: results/ is whole, agrees with itself and with the frozen policy, and the figures show it."
import json
import re

import matplotlib
matplotlib.use("Agg")
import numpy as np
import pandas as pd
import pytest

from tiny_rlvr.exact_eval import answer_logprob
from tiny_rlvr.grpo import GRPOConfig, train
from tiny_rlvr.model import load_tensors
from tiny_rlvr.plots import capability_figure, terrain_figure
from tiny_rlvr.runs import BASE, SUBSTRATE, TABLES, load_results, load_substrate, read_parquet, read_provenance, repo_root
from tiny_rlvr.tasks import EVERYDAY, TARGET, eval_set
from tiny_rlvr.workflow import DEMYSTIFY, load_preset

RESULTS, FIGURES = repo_root()/"results", repo_root()/"figures"
SEEDS = range(BASE, load_preset("paper")["n_seeds"])


@pytest.fixture(scope="module")
def shipped(): return load_results(RESULTS, completions=True)

@pytest.fixture(scope="module")
def settings(): return json.loads(read_provenance(RESULTS/"x1_training_log.parquet")["parameters"])

@pytest.fixture(scope="module")
def p(shipped):
    problems = shipped.x1_p_correct[shipped.x1_p_correct.seed == BASE].prompt
    return shipped.x1_p_correct.pivot(index="seed", columns="prompt", values="p")[problems]  # [seeds, problems], the base first

def named(ax, gid): return [a for a in ax.get_children() if a.get_gid() == gid]


def test_every_table_has_the_base_and_every_seed_once(shipped, p, settings):
    problems = eval_set(TARGET, settings["n_eval"], settings["eval_seed"])
    assert shipped.preset == "paper"
    assert list(p.index) == list(SEEDS) and p.notna().all(axis=None)
    assert [(q.prompt, q.answer) for q in problems] == list(shipped.x1_p_correct[shipped.x1_p_correct.seed == BASE][["prompt", "answer"]].itertuples(index=False, name=None))
    assert len(shipped.x1_p_correct) == len(problems)*len(SEEDS)
    assert set(map(tuple, shipped.x1_training_log[["seed", "update"]].to_numpy())) == {(s, u) for s in SEEDS if s != BASE for u in range(settings["updates"])}
    assert set(map(tuple, shipped.x1_retention[["seed", "task"]].to_numpy())) == {(s, t.name) for s in SEEDS for t in EVERYDAY}
    assert (shipped.terrain.groupby("seed").size() == 24).all() and list(shipped.terrain.seed.unique()) == list(SEEDS)
    assert len(shipped.x1_exact) == len(problems)*len(SEEDS)

def test_every_table_says_where_it_comes_from():
    origins = {name: read_provenance(RESULTS/f"{name}.parquet") for name in TABLES} | {SUBSTRATE: load_tensors(RESULTS/SUBSTRATE)[1]}
    for name, o in origins.items():
        assert len(o["commit"]) == 40 and o["preset"] == "paper", name  # a commit, and no uncommitted change
        assert json.loads(o["versions"])["torch"] and json.loads(o["parameters"]), name
    assert len({o["parameters"] for name, o in origins.items() if name != SUBSTRATE}) == 1

def test_the_substrate_is_small_enough_to_commit():
    assert (RESULTS/SUBSTRATE).stat().st_size <= 40e6

def test_p_of_the_base_is_the_substrate_s(shipped):
    some = shipped.x1_p_correct[shipped.x1_p_correct.seed == BASE].iloc[::40]
    assert len(some) == 50
    again = np.exp(answer_logprob(load_substrate(RESULTS), some.prompt, some.answer))
    assert np.abs(again - some.p).max() < 1e-5

@pytest.mark.parametrize("seed, name", [(BASE, "base"), (0, "0")])
def test_the_census_has_every_sum_once_and_agrees_with_those_that_were_drawn(shipped, seed, name):
    df = pd.read_parquet(RESULTS/f"x1_census_{name}.parquet")
    assert len(df) == len(df.drop_duplicates(["a", "b"])) == TARGET.n_problems and set(df.seed) == {seed}
    drawn = shipped.x1_p_correct[shipped.x1_p_correct.seed == seed]
    again = df.set_index(df.a.astype(str) + "+" + df.b.astype(str) + "=").p[drawn.prompt]
    assert np.abs(again.to_numpy() - drawn.p.to_numpy()).max() < 1e-5
    assert read_provenance(RESULTS/f"x1_census_{name}.parquet")["preset"] == "paper"

def test_the_figures_csv_is_pass_at_k_of_the_shipped_p(p):
    csv = pd.read_csv(FIGURES/"figure1_capability.csv", index_col="k")
    for k, row in csv.iterrows():
        by_policy = (1 - (1 - p)**k).mean(axis=1)  # the naive form, good enough at these p
        assert row.base == pytest.approx(by_policy[BASE], abs=1e-9) and row["after RL"] == pytest.approx(by_policy.drop(BASE).mean(), abs=1e-9)
        assert row.low <= row["after RL"] <= row.high

def test_figure_1_draws_every_seed_and_every_problem(p):
    before, after, ks = p.loc[BASE].to_numpy(), p.drop(BASE).to_numpy(), 2**np.arange(11)
    left, right = capability_figure(before, after, ks).axes[:2]
    lines = named(left, "seed")
    assert len(lines) == len(after)
    for line, q in zip(lines, after): assert np.allclose(line.get_ydata(), [(1 - (1 - q)**k).mean() for k in ks])
    dots = np.concatenate([a.get_xydata() for gid in ("problems", "killed", "revived") for a in named(right, gid)])
    given = np.c_[np.maximum(before, 1e-8), np.maximum(after, 1e-8).mean(0)]
    assert np.allclose(dots[np.lexsort(dots.T)], given[np.lexsort(given.T)], rtol=1e-9)

def test_figure_2_writes_the_mean_change_into_every_cell(shipped):
    t = shipped.terrain
    wide = t.pivot(index=["op", "a_digits", "b_digits"], columns="seed", values="greedy")
    delta = wide.drop(columns=BASE).mean(axis=1) - wide[BASE]
    drawn = [x.get_text().replace("\u2212", "-").replace("+", "") for x in terrain_figure(t, (TARGET.op, TARGET.a_digits, TARGET.b_digits)).axes[0].texts]
    values = [float(x) for x in drawn if x.replace(".", "").replace("-", "").isdigit()]
    assert len(values) == 24 and sorted(values) == pytest.approx(sorted(100*delta), abs=.501)  # written in points

def test_killed_and_revived_are_counted_as_the_post_defines_them(p):
    csv = pd.read_csv(FIGURES/"post_vs_here.csv", dtype=str).set_index("number")
    base, tuned = p.loc[BASE], p.drop(BASE)
    killed = ((base > .01) & (tuned < .0001))
    revived = ((base < .0001) & (tuned > .01))
    for name, value in {"killed, share of problems": killed.mean(axis=None), "revived, share of problems": revived.mean(axis=None), "killed by a seed, problems, about": killed.sum(axis=1).mean(),
                        "distinct problems killed": killed.any().sum(), "problems alive before RL": (base > .01).sum(), "problems dead before RL": (base < .0001).sum()}.items():
        assert float(csv.here[name].replace(",", "")) == pytest.approx(value, rel=6e-3), name  # three digits are written

def test_listed_completions_and_their_remainder_are_all_there_is(shipped, p):
    c = shipped.x1_completions
    total = c.groupby(["seed", "prompt"]).agg(listed=("p", "sum"), remainder=("remainder", "first"))
    assert np.allclose(total.listed + total.remainder, 1, atol=1e-4)
    answers = shipped.x1_p_correct.merge(c[c.finished], left_on=["seed", "prompt", "answer"], right_on=["seed", "prompt", "completion"], suffixes=("", "_listed"))
    assert len(answers) > .9*(shipped.x1_p_correct.p > .01).sum()
    assert np.abs(answers.p - answers.p_listed).max() < 1e-4

def test_post_vs_here_has_every_published_number():
    def leaves(tree): return sum(map(leaves, tree.values()), []) if isinstance(tree, dict) else [tree]
    post = json.loads((repo_root()/"nbs/experiments/post_values.json").read_text())
    post.pop("source")
    csv = pd.read_csv(FIGURES/"post_vs_here.csv")
    published = sorted(map(float, leaves(post)))
    assert np.allclose(sorted(csv.post.astype(str).str.replace(",", "").astype(float)), published, rtol=6e-3)
    assert csv.here.notna().all() and csv.verdict.notna().all()
    assert csv.why[csv.verdict.isin(["higher", "lower", "differs"])].notna().all()

def test_a_seed_run_again_takes_the_same_first_steps(shipped, settings):
    "Rounding differs between machines and may tip a sampled token, so the tolerances are those of one completion in 64."
    keys = GRPOConfig.__dataclass_fields__
    cfg = GRPOConfig(**{k: v for k, v in settings.items() if k in keys and k != "updates"}, updates=5)
    again = train(load_substrate(RESULTS), cfg, TARGET, seed=3)
    log = shipped.x1_training_log
    first = log[log.seed == 3].sort_values("update").head(5).reset_index(drop=True)
    n = cfg.problems_per_update*cfg.group_size
    assert np.abs(again.reward_mean - first.reward_mean).max() <= 1.01/n
    assert np.abs(again.entropy - first.entropy).max() < .02
    assert np.abs(again.completion_length - first.completion_length).max() <= 2.01/n

# results/mini: the experiments of `make demystify`.

@pytest.mark.parametrize("name", DEMYSTIFY)
def test_a_demystify_table_holds_ten_seeds_of_a_commit_and_columns_that_the_readme_names(name):
    df, origin = (read(RESULTS/f"mini/{name}.parquet") for read in (read_parquet, read_provenance))
    assert len(origin["commit"]) == 40 and origin["preset"] == "mini"
    assert set(df.seed) - {BASE} == set(range(json.loads(origin["parameters"])["arm_seeds"])) and len(set(df.seed) - {BASE}) >= 10
    section = (RESULTS/"README.md").read_text().split("## mini/")[1]
    told = section.split("**")[0] + re.search(rf"\*\*{name}\.parquet\*\*: .*", section)[0]
    assert [c for c in df if f"`{c}`" not in told and not re.fullmatch("mass [1-5] milestones", c)] == []

def test_every_size_and_start_of_d4_has_every_seed_and_both_rewards():
    df = read_parquet(RESULTS/"mini/d4_scale.parquet")
    scaled = df[df.rule == "by width"]
    assert df["size"].nunique() >= 4 and df.n_params.min() < 2e5 and df.n_params.max() > 2e6
    assert (scaled.groupby(["size", "base", "reward"]).seed.nunique() == df.seed.nunique()).all() and len(scaled.drop_duplicates(["size", "base", "reward"])) == df["size"].nunique()*4*2
    width = df["size"].str.split("x").str[1].astype(int)
    assert np.ptp((df.lr*width)[df.rule == "by width"]) < 1e-9 and df.lr[df.rule == "same"].nunique() == 1
    assert np.ptp(scaled[scaled.base == "SFT+"].p_start) < 1e-3  # scale at equal coverage

def test_the_entropy_bounds_of_d5_are_narrow_and_in_order():
    df = read_parquet(RESULTS/"mini/d5_entropy_lens.parquet")
    width = df.entropy_high - df.entropy_low
    last = df[df.stage == "pretraining"].groupby("panel").tail(1).set_index("panel")
    assert (width > -1e-9).all() and (width < .05).all() and (df.open <= 1).all()
    way = df[df.on_way & (df.seed != BASE) & (df.panel == "target")]
    assert (way.p > last.p["target"]).all() and (way.p <= way.goal*1.01).all()
