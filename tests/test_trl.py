"""Claims about agreement with TRL: on the same rollouts and rewards, its GRPOTrainer and this library have the same advantages, loss and gradients.

The trainer's own code runs from rewards to loss; only its sampling is replaced, by TRL's hook for that."""
import os, sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
import numpy as np, pytest, torch
pytest.importorskip("trl", reason="TRL isn't installed: pip install -c constraints.txt -e '.[bench]'")
sys.path.insert(0, str(Path(__file__).parent.parent/"benchmarks"))
from referee import in_our_names
from tiny_rlvr.grpo import Batch, GRPOConfig, accumulate, completion_logprobs, group_advantages, grpo_loss, has_signal, k3, token_weights
from tiny_rlvr.model import to_hf
from tiny_rlvr.rewards import correct, score
from tiny_rlvr.rollout import rollout
from tiny_rlvr.tasks import Task
from tiny_rlvr.vocab import BOS, TOKENS, decode, encode
from trl_side import tokenizer, trainer

GROUPS, SIZE, T, TEMPERATURE = 10, 4, 3, 1.2
LOSSES = {"grpo": "sequence", "bnpo": "token", "dapo": "token", "dr_grpo": "constant"}     # TRL's name: our normaliser
each_loss = pytest.mark.parametrize("loss_type", LOSSES)


def dense(completion, problem): return .1 * len(completion) + sum(a == b for a, b in zip(completion, problem.answer)) / 3


def moved(model, seed, by=.15):
    "A copy of a policy some way off, so that ratios aren't 1; float64, with weights that float32 holds."
    gen, model = torch.Generator().manual_seed(seed), deepcopy(model)
    with torch.no_grad():
        for p in model.parameters(): p += by * p.std().nan_to_num() * torch.randn(p.shape, generator=gen)
    return model.double().requires_grad_(True)


def story(trained, loss_type="dapo", reward=correct, **settings):
    "One batch of rollouts, seen by both."
    policy, reference = moved(trained, 1), moved(trained, 2)
    problems = Task("+", 1, 1).sample(GROUPS, np.random.default_rng(5), distinct=True)
    r = rollout(trained, [p.prompt for p in problems], SIZE, np.random.default_rng(0), temperature=TEMPERATURE, max_new_tokens=T)
    rewards = score(r.completions, np.repeat(problems, SIZE), reward).reshape(GROUPS, SIZE)
    assert 0 < has_signal(rewards).mean() < 1 and len(set(r.lengths.tolist())) > 1 and not r.finished.all()  # or the claims say little
    rows, prompts = [t[:n] for t, n in zip(r.tokens.tolist(), r.lengths)], np.repeat(r.prompts, SIZE)
    def ours_for_theirs(prompts, trainer): return dict(prompt_ids=[[BOS, *encode(p)] for p in prompts], completion_ids=rows, logprobs=[lp[:len(t)].tolist() for lp, t in zip(r.logprobs, rows)])
    cut = settings.pop("gradient_accumulation_steps", 1)
    theirs = trainer(to_hf(policy).double().train(), problems, reward, ours_for_theirs, loss_type=loss_type, num_generations=SIZE, max_completion_length=T, temperature=TEMPERATURE,
                     per_device_train_batch_size=GROUPS*SIZE//cut, gradient_accumulation_steps=cut, **settings)
    theirs.current_gradient_accumulation_steps = cut                                       # set by its training loop
    inputs = theirs._generate_and_score_completions([dict(prompt=p.prompt, problem=i) for i, p in enumerate(problems) for _ in range(SIZE)])
    batch = Batch(prompts, r, rewards, torch.from_numpy(group_advantages(rewards).flatten()), token_weights(r.mask, LOSSES[loss_type]))
    with torch.no_grad(): batch.ref_logprobs = completion_logprobs(reference, prompts, r.tokens, r.mask, TEMPERATURE)
    return SimpleNamespace(policy=policy, batch=batch, theirs=theirs, inputs=inputs, length=inputs["completion_ids"].shape[1])


def same_gradients(s):
    "Of each parameter, to a millionth of the largest of all."
    theirs = in_our_names(s.theirs.model, lambda p: p.grad)
    largest = max(g.abs().max().item() for g in theirs.values())
    assert largest > 1e-3
    for name, p in s.policy.named_parameters(): torch.testing.assert_close(p.grad, theirs[name], rtol=1e-5, atol=1e-6*largest, msg=lambda m: f"{name}: {m}")


def test_the_tokenizer_is_the_alphabet():
    t = tokenizer()
    for text in "387+456=", "9/3=3; ", "0 1": assert t(text)["input_ids"] == [BOS, *encode(text)] and t.decode(encode(text)) == text == decode(encode(text))
    assert t.convert_ids_to_tokens(range(len(TOKENS))) == TOKENS
    assert t.batch_decode([[*encode("12"), t.eos_token_id]], skip_special_tokens=True) == ["12"]


@pytest.mark.parametrize("reward", [correct, dense])
def test_trl_gives_the_same_masks_rewards_and_advantages(trained, reward):
    s = story(trained, reward=reward)
    n, r = s.length, s.batch.rollouts
    assert torch.equal(s.inputs["completion_ids"], r.tokens[:, :n]) and torch.equal(s.inputs["completion_mask"].bool(), r.mask[:, :n]) and not r.mask[:, n:].any()
    assert s.inputs["num_items_in_batch"] == r.mask.sum()
    theirs = s.inputs["advantages"].double()
    torch.testing.assert_close(theirs, s.batch.advantages, rtol=1e-5, atol=1e-6 if reward is correct else 1e-3)  # float32 there, where a dense group without signal gets rounding/eps
    assert (s.batch.advantages[~np.repeat(has_signal(s.batch.rewards), SIZE)] == 0).all()


@each_loss
@pytest.mark.parametrize("kl_weight", [0., .04])
@pytest.mark.parametrize("clip", [(.2, .2), (.05, .28)])
def test_trl_gives_the_same_loss_and_gradients_off_policy(trained, loss_type, kl_weight, clip):
    s = story(trained, loss_type, epsilon=clip[0], epsilon_high=clip[1], use_bias_correction_kl=False)
    s.theirs.beta = kl_weight                   # after it is built: it would look for a reference model by name
    n, r = s.length, s.batch.rollouts
    s.inputs |= dict(old_per_token_logps=r.logprobs[:, :n], ref_per_token_logps=s.batch.ref_logprobs[:, :n], advantages=s.batch.advantages)
    theirs = s.theirs.compute_loss(s.theirs.model, s.inputs)
    theirs.backward()
    logprobs = completion_logprobs(s.policy, s.batch.prompts, r.tokens, r.mask, TEMPERATURE)
    ours, stats = grpo_loss(logprobs, r.logprobs, s.batch.advantages, s.batch.weights, s.batch.ref_logprobs, kl_weight, *clip)
    ours.backward()
    assert stats["clip_fraction"] > .01 and abs(theirs.item()) > 1e-4
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    same_gradients(s)
    metrics = {k: v[-1] for k, v in s.theirs._metrics["train"].items()}
    assert stats["clip_fraction"] == pytest.approx(metrics["clip_ratio/region_mean"], abs=1e-6)
    if kl_weight: assert k3(logprobs, s.batch.ref_logprobs)[r.mask].mean().item() == pytest.approx(metrics["kl"], rel=1e-5)


@each_loss
def test_trl_gives_the_gradients_of_our_backward_pass_though_that_leaves_groups_out(trained, loss_type):
    s = story(trained, loss_type)
    del s.inputs["sampling_per_token_logps"]
    s.theirs.compute_loss(s.theirs.model, s.inputs).backward()       # on-policy: its ratio is 1 by construction
    r = s.batch.rollouts
    with torch.no_grad(): r.logprobs = completion_logprobs(s.policy, s.batch.prompts, r.tokens, r.mask, TEMPERATURE)
    accumulate(s.policy, s.batch, GRPOConfig(normaliser=LOSSES[loss_type], temperature=TEMPERATURE, micro_groups=2))
    same_gradients(s)


def test_dapo_is_ours_however_trl_cuts_the_batch(trained):
    s = story(trained, "dapo", gradient_accumulation_steps=2)
    r, half = s.batch.rollouts, GROUPS*SIZE//2
    for rows in slice(half), slice(half, None):
        part = {k: v if k == "num_items_in_batch" else v[rows] for k, v in s.inputs.items()} | dict(old_per_token_logps=r.logprobs[rows, :s.length])
        s.theirs.compute_loss(s.theirs.model, part).backward()
    accumulate(s.policy, s.batch, GRPOConfig(temperature=TEMPERATURE, micro_groups=4))
    same_gradients(s)
