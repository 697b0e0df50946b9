"Claims about advantages, the loss and the training loop; plain loops in NumPy and Hugging Face's model are the referees."
from copy import deepcopy
from dataclasses import replace
import math
import numpy as np, pytest, torch
from hypothesis import given, strategies as st
from referee import BOS, hf_logp, ids_of, in_our_names, naive_rollout, numpy_advantages, numpy_grpo_loss, text_of
from tiny_rlvr.grpo import (GRPOConfig, NORMALISERS, Batch, accumulate, completion_logprobs, group_advantages, grpo_loss, has_signal, k3, make_batch,
                            token_weights, train)
from tiny_rlvr.model import to_hf
from tiny_rlvr.rewards import correct
from tiny_rlvr.rollout import rollout
from tiny_rlvr.tasks import Task, streams, verify

TASK = Task("+", 1, 1)
STREAMS = "pretraining", "problems", "noise"     # of a seed; the first is pretraining's
LENGTHS = st.lists(st.integers(1, 5), min_size=2, max_size=6)


def dense(completion, problem):
    "A reward in thirds and tenths, which no binary fraction is."
    return .1 * len(completion) + sum(a == b for a, b in zip(completion, problem.answer)) / 3


# ---- advantages

def test_one_success_in_eight_is_worth_2_47_or_2_65():
    one = [[0, 0, 0, 1, 0, 0, 0, 0]]
    assert group_advantages(one)[0, 3] == pytest.approx(math.sqrt(49 / 8), rel=1e-3) and round(group_advantages(one, eps=0)[0, 3], 2) == 2.47
    assert round(group_advantages(one, ddof=0, eps=0)[0, 3], 2) == 2.65 and round(group_advantages(one, ddof=0)[0, 3], 2) == 2.64
    assert group_advantages(one, eps=0)[0, 0] == pytest.approx(-1 / math.sqrt(8))
    assert group_advantages(one, "none")[0].tolist() == [-.125] * 3 + [.875] + [-.125] * 4


@pytest.mark.parametrize("reward", [0., 1., .1, 1/3, .7, 2/7, 1e-9, 1e9 / 7, -.3])
@pytest.mark.parametrize("size", [2, 3, 5, 6, 7, 8, 49])
def test_equal_rewards_have_exactly_no_advantage_whatever_their_mean_rounds_to(reward, size):
    rewards = np.full((2, size), reward)
    rewards[1, 0] += 1
    for scale in "std", "none":
        a = group_advantages(rewards, scale)
        assert (a[0] == 0).all() and (a[1] != 0).all()
    assert has_signal(rewards).tolist() == [False, True]


@given(st.integers(2, 9), st.integers(1, 5), st.sampled_from(["std", "none"]), st.sampled_from([0, 1]), st.integers(0, 2**32 - 1))
def test_advantages_are_those_of_a_loop_over_groups(size, groups, scale, ddof, seed):
    rng = np.random.default_rng(seed)
    rewards = rng.choice([0., 1., .1, 1/3], (groups, size))
    a = group_advantages(rewards, scale, ddof)
    assert a.dtype == np.float64 and a.shape == rewards.shape
    np.testing.assert_allclose(a, numpy_advantages(rewards.tolist(), scale, ddof), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(a.sum(1), 0, atol=1e-9)


# ---- loss

def random_tokens(rng, lengths, T=5):
    "Log-probabilities [n, T] of the policy, the one that sampled and the reference, and advantages [n]; ratios on both sides of both clips."
    n = len(lengths)
    logp = -rng.exponential(1.5, (n, T))
    return logp, logp + rng.normal(0, .4, (n, T)), logp + rng.normal(0, .5, (n, T)), rng.normal(0, 1.5, n)


def library_loss(logp, old, advantages, lengths, normaliser, ref=None, grad=False, **kw):
    t = torch.tensor(logp, requires_grad=grad)
    mask = torch.arange(t.shape[1]) < torch.tensor(lengths)[:, None]
    loss, stats = grpo_loss(t, torch.tensor(old), torch.tensor(advantages), token_weights(mask, normaliser), None if ref is None else torch.tensor(ref), **kw)
    if not grad: return loss.item()
    loss.backward()
    return loss.item(), t.grad.numpy(), stats


def test_the_loss_of_a_group_done_by_hand():
    "Two completions, of two tokens and one, in three positions; ratios 1.5, 1 and 0.5."
    logp, old = np.log([[.3, .5, 1], [.2, 1, 1]]), np.log([[.2, .5, 1], [.4, 1, 1]])
    for normaliser, shares in dict(token=(1/3, 1/3, 1/3), sequence=(1/4, 1/4, 1/2), constant=(1/6, 1/6, 1/6)).items():
        # A > 0: 1.5 is cut to 1.2; A < 0: 0.5 is raised to 0.8
        assert library_loss(logp, old, [2., -1.], [2, 1], normaliser) == pytest.approx(-(shares[0] * 1.2 * 2 + shares[1] * 2 - shares[2] * .8))
        # the other way round nothing is cut
        assert library_loss(logp, old, [-2., 1.], [2, 1], normaliser) == pytest.approx(-(-shares[0] * 1.5 * 2 - shares[1] * 2 + shares[2] * .5))
        # clip-higher lets the winner go on to 1.4
        assert library_loss(logp, old, [2., -1.], [2, 1], normaliser, clip_high=.4) == pytest.approx(-(shares[0] * 1.4 * 2 + shares[1] * 2 - shares[2] * .8))
        # KL to a reference that gave each token half of what the policy gives it: 1/2 - ln(1/2) - 1
        kl = .5 + math.log(2) - 1
        with_kl = library_loss(logp, old, [2., -1.], [2, 1], normaliser, ref=logp - math.log(2), kl_weight=.3)
        assert with_kl - library_loss(logp, old, [2., -1.], [2, 1], normaliser) == pytest.approx(.3 * kl * sum(shares))


@given(LENGTHS, st.sampled_from(NORMALISERS), st.sampled_from([(.2, .2), (.1, .4), (.5, .05), (1., 3.)]), st.sampled_from([0., .04, 2.]), st.integers(0, 2**32 - 1))
def test_the_loss_is_the_papers_formula(lengths, normaliser, clip, kl_weight, seed):
    logp, old, ref, a = random_tokens(np.random.default_rng(seed), lengths)
    kw = dict(ref=ref, kl_weight=kl_weight, clip_low=clip[0], clip_high=clip[1])
    assert library_loss(logp, old, a, lengths, normaliser, **kw) == pytest.approx(numpy_grpo_loss(logp, old, a, lengths, normaliser, **kw), rel=1e-11, abs=1e-13)


@given(LENGTHS, st.sampled_from(NORMALISERS), st.sampled_from([(.2, .2), (.1, .4), (.5, .05)]), st.sampled_from([0., .5]), st.integers(0, 2**32 - 1))
def test_the_gradient_is_the_papers_formulas_by_finite_differences(lengths, normaliser, clip, kl_weight, seed):
    logp, old, ref, a = random_tokens(np.random.default_rng(seed), lengths)
    kw = dict(ref=ref, kl_weight=kl_weight, clip_low=clip[0], clip_high=clip[1])
    _, grad, stats = library_loss(logp, old, a, lengths, normaliser, grad=True, **kw)
    h, ratios, cut = 1e-6, [], []
    for i, t in np.ndindex(logp.shape):
        ratio = np.exp(logp[i, t] - old[i, t])
        if t < lengths[i]:
            ratios.append(ratio)
            cut.append(a[i] > 0 and ratio > 1 + clip[1] or a[i] < 0 and ratio < 1 - clip[0])
        if min(abs(ratio - 1 + clip[0]), abs(ratio - 1 - clip[1])) < 1e-4: continue    # the corner has no derivative
        up, down = logp.copy(), logp.copy()
        up[i, t] += h
        down[i, t] -= h
        slope = (numpy_grpo_loss(up, old, a, lengths, normaliser, **kw) - numpy_grpo_loss(down, old, a, lengths, normaliser, **kw)) / (2 * h)
        assert grad[i, t] == pytest.approx(slope, rel=1e-5, abs=1e-7)
        if t >= lengths[i]: assert grad[i, t] == 0
    assert stats["ratio_mean"] == pytest.approx(np.mean(ratios)) and stats["clip_fraction"] == pytest.approx(np.mean(cut))


def test_at_ratio_one_the_gradient_is_the_policy_gradient():
    logp = np.log(np.random.default_rng(0).random((4, 5)))
    a, lengths = np.array([1., -2., 0., .5]), [1, 5, 3, 2]
    loss, grad, stats = library_loss(logp, logp.copy(), a, lengths, "constant", grad=True)
    np.testing.assert_allclose(grad, -np.where(np.arange(5) < np.array(lengths)[:, None], a[:, None], 0) / 20)
    assert stats == dict(ratio_mean=1, clip_fraction=0)


def test_k3_is_an_unbiased_estimate_of_kl():
    rng = np.random.default_rng(0)
    p, q = torch.from_numpy(rng.dirichlet(np.ones(20))), torch.from_numpy(rng.dirichlet(np.ones(20)))
    assert (p * k3(p.log(), q.log())).sum().item() == pytest.approx((p * (p / q).log()).sum().item()) and (k3(p.log(), q.log()) >= 0).all()


# ---- from the policy to its gradient

@pytest.fixture(scope="module")
def policy(trained): return deepcopy(trained).double()


@pytest.fixture(scope="module")
def hf_policy(trained): return to_hf(trained).double()


def learner(policy): return deepcopy(policy).requires_grad_(True)


def gradients(model, batch, cfg, rows=None):
    for p in model.parameters(): p.grad = None
    stats = accumulate(model, batch, cfg, rows)
    return {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()}, stats


def a_batch(policy, cfg, seed=0, reward=correct): return make_batch(policy, policy, cfg, TASK, reward, streams(seed, *STREAMS))


def assert_close(a, b, rtol=1e-8, atol=1e-12):
    assert a.keys() == b.keys()
    for k in a: torch.testing.assert_close(a[k], b[k], rtol=rtol, atol=atol, msg=lambda m, k=k: f"{k}: {m}")


@pytest.mark.parametrize("temperature", [1., .5])
def test_the_log_probability_of_a_completion_is_that_of_a_whole_forward_pass(policy, hf_policy, temperature):
    prompts = ["4+3=", "98+7=", "4+3=", "4+3=7", ""]
    r = rollout(policy, prompts, 5, np.random.default_rng(0), temperature)
    per_row = [p for p in prompts for _ in range(5)]
    ours = completion_logprobs(policy, per_row, r.tokens, r.mask, temperature)
    for i, (prompt, tokens) in enumerate(zip(per_row, r.tokens.tolist())):
        n, start = int(r.mask[i].sum()), len(prompt)
        lp = hf_logp(hf_policy, [[BOS] + ids_of(prompt) + tokens[:n]], temperature)[0]
        np.testing.assert_allclose(ours[i, :n].detach(), [lp[start + t, tokens[t]].item() for t in range(n)], rtol=1e-9)
        assert (ours[i, n:] == 0).all()
    np.testing.assert_allclose(ours.detach(), r.logprobs, atol=1e-11)      # on-policy: the ratio is 1


@pytest.mark.parametrize("normaliser", NORMALISERS)
@pytest.mark.parametrize("kl_weight", [0., .3])
def test_micro_batches_add_up_to_the_batch(policy, normaliser, kl_weight):
    cfg = GRPOConfig(problems_per_update=6, group_size=4, normaliser=normaliser, kl_weight=kl_weight, clip_low=.05, clip_high=.1)
    batch, model = a_batch(policy, cfg, reward=dense), learner(policy)
    with torch.no_grad(): model.head.weight.mul_(1.1)         # off-policy
    whole, stats = gradients(model, batch, cfg)
    assert 0 < stats["clip_fraction"] < 1 and stats["ratio_mean"] != 1
    for groups in 1, 2, 5:
        parts, part_stats = gradients(model, batch, replace(cfg, micro_groups=groups))
        assert_close(parts, whole)
        assert part_stats == pytest.approx(stats)


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_groups_without_signal_change_no_gradient_and_cost_no_pass(policy, normaliser):
    cfg = GRPOConfig(problems_per_update=10, group_size=3, normaliser=normaliser)
    batch, model, rows_seen = a_batch(policy, cfg), learner(policy), []
    signal = has_signal(batch.rewards)
    assert 2 < signal.sum() < len(signal) # both kinds are there
    model.register_forward_hook(lambda *_: rows_seen.append(1))
    fast, _ = gradients(model, batch, replace(cfg, micro_groups=1))
    assert len(rows_seen) == signal.sum()
    full, _ = gradients(model, batch, cfg, rows=np.arange(30))
    assert_close(fast, full)
    assert max(g.abs().max() for g in fast.values()) > 1e-6


def test_a_batch_without_any_signal_has_no_gradient(policy):
    cfg = GRPOConfig(problems_per_update=4, group_size=4)
    grads, stats = gradients(learner(policy), a_batch(policy, cfg, reward=lambda c, p: 1/3), cfg)
    assert all((g == 0).all() for g in grads.values()) and stats == dict(ratio_mean=1, clip_fraction=0)


def test_a_batch_is_what_its_seed_says(policy, hf_policy):
    cfg = GRPOConfig(problems_per_update=5, group_size=4, temperature=1.3)
    b, rngs = a_batch(policy, cfg, seed=3), streams(3, *STREAMS)
    problems = TASK.sample(5, rngs.problems, distinct=True)
    tokens, _, _ = naive_rollout(hf_policy, [p.prompt for p in problems], 4, rngs.noise.random((20, 8)), 1.3)
    assert [t[m].tolist() for t, m in zip(b.rollouts.tokens, b.rollouts.mask)] == tokens
    rewards = [[float(verify(text_of([t for t in tokens[4*i+j] if t != 2]), p.answer)) for j in range(4)] for i, p in enumerate(problems)]
    assert b.rewards.tolist() == rewards and 0 < np.sum(rewards) < 20
    assert list(b.prompts) == [p.prompt for p in problems for _ in range(4)]


# ---- the training loop

def obvious_training(hf, cfg, seed, reward):
    """GRPO as one would write it first: each completion is a padded row of its own, every row has a gradient, AdamW and clipping are PyTorch's plain ones.

    `hf` is changed in place. Returns the log's columns that can be told from outside."""
    base, rngs = deepcopy(hf), streams(seed, *STREAMS)
    decayed = [[p for p in hf.parameters() if (p.dim() > 1) == d] for d in (True, False)]
    opt = torch.optim.AdamW([dict(params=decayed[0], weight_decay=cfg.weight_decay), dict(params=decayed[1], weight_decay=0)], lr=cfg.lr, betas=cfg.betas, fused=False, foreach=False)
    snapshots, log = [deepcopy(hf)], []       # the policy before each update

    def batch(sampler):
        problems = TASK.sample(cfg.problems_per_update, rngs.problems, distinct=True)
        u = rngs.noise.random((cfg.problems_per_update * cfg.group_size, cfg.max_new_tokens))
        tokens, old, entropies = naive_rollout(sampler, [p.prompt for p in problems], cfg.group_size, u, cfg.temperature)
        rewards = [[reward(text_of([t for t in tokens[i * cfg.group_size + j] if t != 2]), p) for j in range(cfg.group_size)] for i, p in enumerate(problems)]
        return [p.prompt for p in problems for _ in range(cfg.group_size)], tokens, old, entropies, rewards

    for update in range(cfg.updates):
        prompts, tokens, old, entropies, rewards = batch(snapshots[max(0, update - cfg.staleness)])
        advantages = [a for group in numpy_advantages(rewards, cfg.advantage_scale) for a in group]
        rows = [[BOS] + ids_of(p) + t for p, t in zip(prompts, tokens)]
        def logprobs(model):
            logp = hf_logp(model, rows, cfg.temperature)
            return [[logp[i, len(p) + t, token] for t, token in enumerate(tokens[i])] for i, p in enumerate(prompts)]
        with torch.no_grad(): ref = logprobs(base)
        for _ in range(cfg.inner_epochs):
            logp, loss, ratios, cut = logprobs(hf), 0., [], []
            for i, token_logps in enumerate(logp):
                share = dict(sequence=1 / (len(rows) * len(tokens[i])), token=1 / sum(map(len, tokens)), constant=1 / (len(rows) * cfg.max_new_tokens))[cfg.normaliser]
                for t, lp in enumerate(token_logps):
                    ratio = (lp - old[i][t]).exp()
                    gain = torch.min(ratio * advantages[i], ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * advantages[i])
                    d = ref[i][t] - lp
                    loss = loss - share * (gain - cfg.kl_weight * (d.exp() - d - 1))
                    ratios.append(ratio.item())
                    cut.append(gain.item() < ratio.item() * advantages[i] - 1e-12)
            opt.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(hf.parameters(), cfg.grad_clip).item()
            opt.step()
        snapshots.append(deepcopy(hf))
        log.append(dict(update=update, reward_mean=np.mean(rewards), zero_signal_fraction=np.mean([len(set(g)) == 1 for g in rewards]), grad_norm=norm,
                        entropy=np.mean([e for es in entropies for e in es]), completion_length=np.mean([len(t) for t in tokens]), ratios=ratios, cut=cut))
    return log


BASIC = GRPOConfig(updates=3, problems_per_update=4, group_size=4, lr=1e-3, max_new_tokens=4)
VARIANTS = {
    "token": {}, "sequence": dict(normaliser="sequence"), "constant": dict(normaliser="constant"), "no advantage scale": dict(advantage_scale="none"),
    "two inner epochs and narrow clips": dict(inner_epochs=2, lr=3e-3, clip_low=.01, clip_high=.02),
    "kl": dict(kl_weight=.5, inner_epochs=2), "staleness 1": dict(staleness=1, updates=4), "staleness 2 and two epochs": dict(staleness=2, updates=4, inner_epochs=2, clip_low=.02, clip_high=.05),
    "temperature": dict(temperature=1.4), "weight decay and tight gradient clip": dict(weight_decay=.1, grad_clip=.05, betas=(.8, .95)),
    "micro-batches": dict(micro_groups=1, normaliser="sequence"), "everything": dict(inner_epochs=2, kl_weight=.1, staleness=1, temperature=.8, normaliser="sequence", advantage_scale="none", clip_high=.05, micro_groups=3, weight_decay=.01),
}

@pytest.mark.parametrize("name, reward", [(v, correct) for v in VARIANTS] + [("token", dense), ("everything", dense)])
def test_training_gives_the_weights_of_the_obvious_implementation(policy, hf_policy, name, reward):
    cfg, model, hf = replace(BASIC, **VARIANTS[name]), learner(policy), deepcopy(hf_policy)
    log, expected = train(model, cfg, TASK, reward, seed=5), obvious_training(hf, cfg, 5, reward)
    assert_close(dict(model.named_parameters()), in_our_names(hf), rtol=1e-8, atol=1e-9)
    moved = max((p - q).abs().max().item() for p, q in zip(model.parameters(), policy.parameters()))
    assert moved > cfg.lr, "nothing was learnt"
    for column in "update", "reward_mean", "zero_signal_fraction", "grad_norm", "entropy", "completion_length":
        np.testing.assert_allclose(log[column], [row[column] for row in expected], rtol=1e-6, err_msg=column)
    if cfg.inner_epochs == 1 and not cfg.staleness:
        np.testing.assert_allclose(log.ratio_mean, 1, rtol=1e-9)
        assert (log.clip_fraction == 0).all()
    if cfg.kl_weight:      # then every token is trained on
        np.testing.assert_allclose(log.ratio_mean, [np.mean(row["ratios"]) for row in expected], rtol=1e-6)
        np.testing.assert_allclose(log.clip_fraction, [np.mean(row["cut"]) for row in expected], atol=1e-9)
    if "clips" in name: assert (log.clip_fraction > 0).any()


def test_in_float32_training_learns_and_logs(trained):
    model = deepcopy(trained).requires_grad_(True)
    log = train(model, GRPOConfig(updates=30, lr=3e-4, max_new_tokens=4), TASK, lambda c, p: float(c.startswith("1")), seed=1)
    assert log.reward_mean.tail(5).mean() > log.reward_mean.head(5).mean() + .3
    assert log["update"].tolist() == list(range(30)) and log.notna().all(axis=None)
    assert log.kl[0] == pytest.approx(0, abs=1e-6) and log.kl.tail(5).mean() > .1      # to the base, of the policy that sampled
    assert log.entropy.tail(5).mean() < log.entropy.head(5).mean()


def test_equal_seeds_give_equal_bytes_and_others_dont(trained):
    def weights(seed):
        model = deepcopy(trained).requires_grad_(True)
        train(model, replace(BASIC, kl_weight=.1), TASK, seed=seed)
        return b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    a = weights(1)
    assert a == weights(1) and a != weights(2)


def test_the_callback_sees_the_policy_after_each_update_and_the_reference_stays(trained):
    model, reference, seen = deepcopy(trained).requires_grad_(True), deepcopy(trained), []
    before = deepcopy(reference.state_dict())
    train(model, BASIC, TASK, seed=2, reference=reference, on_update=lambda u, m: seen.append((u, m.head.weight.detach().clone())))
    assert [u for u, _ in seen] == [0, 1, 2]
    assert not torch.equal(seen[0][1], seen[1][1]) and torch.equal(seen[2][1], model.head.weight)
    assert all(torch.equal(v, before[k]) for k, v in reference.state_dict().items())


def test_a_policy_that_breaks_stops_the_run_with_the_learning_rate(trained):
    model = deepcopy(trained).requires_grad_(True)
    def poison(update, model):
        if update == 1: model.ln.weight.data[0] = math.nan
    with pytest.raises(FloatingPointError, match=r"update 2.*lr \(now 0\.001\)"): train(model, BASIC, TASK, seed=3, on_update=poison)
