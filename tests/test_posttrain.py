"Claims about SFT, DPO and stopping: losses against other implementations, goals against exact p."
import math
from copy import deepcopy
import numpy as np, pytest, torch
from referee import BOS, EOS, hf_answer_logprob, hf_logp, ids_of
from tiny_rlvr.exact_eval import answer_logprob
from tiny_rlvr.grpo import GRPOConfig, train
from tiny_rlvr.model import to_hf
from tiny_rlvr.posttrain import DPOConfig, SFTConfig, StopAt, dpo, dpo_loss, preference_pairs, sequence_logprob, sft, target_p, unlikelihood_loss
from tiny_rlvr.tasks import Phrase, Problem, Task, verify
from tiny_rlvr.vocab import encode

ADD, SUB = Task("+", 1, 1), Task("-", 1, 1)
PHRASE = Phrase(";", "12;3")
FAST = SFTConfig(lr=1e-3, n_target=8, n_everyday=24)


def loose(model): return deepcopy(model).requires_grad_(True)


def test_target_p_is_the_mean_probability_that_hugging_face_gives(trained):
    problems = ADD.all()[:12]
    theirs = hf_answer_logprob(to_hf(trained), [p.prompt for p in problems], [p.answer for p in problems])
    assert target_p(trained, problems) == pytest.approx(np.exp(theirs).mean(), rel=1e-5)


@pytest.mark.parametrize("goals", [(1e-6, .0035, .288, .01), (.428, 1e-7)])
def test_sft_reaches_any_probability_closely_and_in_both_directions(trained, goals):
    model = loose(trained)
    for goal in goals:
        log = sft(model, goal, PHRASE, cfg=FAST, everyday=[ADD, SUB])
        p = math.exp(answer_logprob(model, [PHRASE.prompt], [PHRASE.target])[0])
        assert abs(p/goal - 1) <= FAST.rel_tol*1.01 and log.p.iloc[-1] == pytest.approx(p)


def test_sft_down_leaves_the_rehearsed_task_where_it_was(trained):
    model, before = loose(trained), target_p(trained, SUB.all())
    sft(model, .01, ADD, ADD.all(), SFTConfig(lr=5e-4, settle=100), everyday=[SUB])
    assert target_p(model, ADD.all()) == pytest.approx(.01, rel=2e-3) and target_p(model, SUB.all()) > before - .05


def test_equal_seeds_give_equal_policies(trained):
    a, b, c = (loose(trained) for _ in range(3))
    for model, seed in ((a, 1), (b, 1), (c, 2)): sft(model, .001, PHRASE, cfg=FAST, seed=seed, everyday=[ADD])
    def same(x, y): return all(torch.equal(p, q) for p, q in zip(x.parameters(), y.parameters()))
    assert same(a, b) and not same(a, c)


def test_going_back_stays_on_the_last_step(trained):
    "The weights at the end lie between those before and after the step that went past."
    model, seen = loose(trained), []
    stop = StopAt(model, .05, PHRASE.all())
    def watch(step, m): before = stop.before; after = {k: v.clone() for k, v in m.state_dict().items()}; done = stop(step, m); seen.append((before, after)); return done
    goal_log = train_until(model, watch)
    before, after = seen[-1]
    assert goal_log and stop.reached and len(stop.p) == len(seen)
    for k, v in model.state_dict().items():
        assert (v >= torch.minimum(before[k], after[k]) - 1e-6).all() and (v <= torch.maximum(before[k], after[k]) + 1e-6).all()


def train_until(model, on_step):
    "A hand-made SFT loop on the phrase."
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.tensor([[BOS, *encode(PHRASE.prompt + PHRASE.target), EOS]])
    for step in range(500):
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(ids[:, :-1])[0, 1:], ids[0, 2:]).backward()
        opt.step()
        if on_step(step, model): return True
    return False


def test_stop_at_ends_grpo_on_the_goal(trained):
    model = loose(trained)
    goal = 1.05*target_p(model, ADD.all())
    stop = StopAt(model, goal, ADD.all())
    log = train(model, GRPOConfig(updates=150, lr=3e-4, problems_per_update=64), ADD, on_update=stop)
    assert len(log) < 150 and target_p(model, ADD.all()) == pytest.approx(goal, rel=1.1e-3)


def test_a_goal_out_of_reach_is_an_error_that_says_how_far_it_came(trained):
    with pytest.raises(ValueError, match=r"SFT did not bring p from .* to 0.9 in 3 steps \(it ended at"): sft(loose(trained), .9, PHRASE, cfg=SFTConfig(lr=1e-6, max_steps=3), everyday=[ADD])
    with pytest.raises(ValueError, match="goal must be a number between 0 and 1"): StopAt(trained, 1., ADD.all())


def test_unlikelihood_is_the_formula_on_hugging_faces_probabilities(trained):
    problems, hf, terms = ADD.all()[:9], to_hf(trained), []
    for p in problems:
        row = [BOS, *ids_of(p.prompt + p.answer)]
        logp = hf_logp(hf, [row])[0].detach().numpy()
        terms += [-math.log1p(-math.exp(logp[i-1, row[i]])) for i in range(1 + len(p.prompt), len(row))]
    assert unlikelihood_loss(trained, problems).item() == pytest.approx(np.mean(terms), rel=1e-4)


def test_sequence_logprob_counts_eos_only_where_it_came(trained):
    hf, prompts = to_hf(trained), ["3+4=", "9+9="]
    rows = [[*encode("7"), EOS], encode("181")]
    with torch.no_grad(): ours = sequence_logprob(trained, prompts, rows).numpy()
    for prompt, row, mine in zip(prompts, rows, ours):
        whole = [BOS, *ids_of(prompt), *row]
        logp = hf_logp(hf, [whole])[0].detach().numpy()
        assert mine == pytest.approx(sum(logp[i-1, whole[i]] for i in range(len(whole) - len(row), len(whole))), rel=1e-5)


def numpy_dpo(c, r, rc, rr, beta): return np.mean([np.log1p(np.exp(-beta*((a - x) - (b - y)))) for a, b, x, y in zip(c, r, rc, rr)])


@pytest.mark.parametrize("beta", [.05, 1.])
def test_dpo_loss_and_its_gradient_are_the_formula(beta):
    rng = np.random.default_rng(0)
    c, r, rc, rr = rng.normal(-4, 2, (4, 7))
    t = [torch.tensor(x, requires_grad=True) for x in (c, r, rc, rr)]
    loss = dpo_loss(*t, beta)
    loss.backward()
    assert loss.item() == pytest.approx(numpy_dpo(c, r, rc, rr, beta))
    weight = 1/(1 + np.exp(beta*((c - rc) - (r - rr)))) # eq. 7's gradient: how wrong the implicit reward is
    np.testing.assert_allclose(t[0].grad, -beta*weight/7); np.testing.assert_allclose(t[1].grad, beta*weight/7)


def test_preference_pairs_prefer_right_to_wrong(trained):
    problems = ADD.sample(30, np.random.default_rng(1))
    pairs = preference_pairs(trained, problems, np.random.default_rng(0), tries=6)
    assert 0 < len(pairs) <= 30
    for row in pairs.itertuples():
        assert Problem.parse(row.prompt).answer == row.chosen and not verify(row.rejected, row.chosen)
        assert row.chosen_tokens == [*encode(row.chosen), EOS]
    assert preference_pairs(trained, PHRASE.all(), np.random.default_rng(0), tries=4).rejected[0] != PHRASE.target


class Few:
    "Eight problems, again and again."
    def sample(self, n, rng, distinct=False): return [ADD.all()[i] for i in range(3, 83, 10)]


def test_dpo_starts_at_ln_2_and_widens_the_margins_of_what_it_sees(trained):
    model = loose(trained)
    log = dpo(model, .99, Few(), Few().sample(8, None), DPOConfig(lr=3e-4, beta=1., max_steps=40), strict=False)
    assert log.loss[0] == pytest.approx(math.log(2), abs=1e-6) and log.loss[-10:].mean() < log.loss[:10].mean() - .1
