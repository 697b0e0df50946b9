"Claims about sampling and greedy decoding; the referee computes every sequence again for every token, with Hugging Face's model."
from copy import deepcopy
import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from scipy.stats import chisquare
from referee import BOS, EOS, PAD, hf_logp, ids_of, naive_rollout, text_of
from tiny_rlvr.model import GPT, GPTConfig, to_hf
from tiny_rlvr.rollout import generate, greedy, inverse_cdf, rollout
from tiny_rlvr.tasks import GRID, eval_set, verify

MIXED = ["4+3=", "387+456=", "12*3", "4+3=", "", "7-7=", "100/100=", "4+3=7", "4+3=70", "9"]   # lengths 0 to 8; a duplicate; the last but two continue the first


def assert_same(r, expected, atol):
    tokens, logprobs, entropies = expected
    for i, want in enumerate(tokens):
        n = len(want)
        assert r.tokens[i, :n].tolist() == want and r.mask[i].tolist() == [True] * n + [False] * (r.mask.shape[1] - n)
        np.testing.assert_allclose(r.logprobs[i, :n], logprobs[i], atol=atol)
        np.testing.assert_allclose(r.entropy[i, :n], entropies[i], atol=atol)
        assert (r.tokens[i, n:] == PAD).all() and (r.logprobs[i, n:] == 0).all() and (r.entropy[i, n:] == 0).all()
        assert r.finished[i] == (want[-1] == EOS) and r.lengths[i] == n
        assert r.completions[i] == text_of(want[:-1] if want[-1] == EOS else want)


def identical(a, b):
    return a.completions == b.completions and all(torch.equal(getattr(a, k), getattr(b, k)) for k in ("tokens", "logprobs", "entropy", "mask", "finished"))


@pytest.mark.parametrize("temperature", [1., .6, 1.7])
def test_rollouts_are_those_of_recomputing_everything(trained, untrained, temperature):
    for model in trained, untrained:
        r = rollout(model, MIXED, 6, np.random.default_rng(1), temperature)
        u = np.random.default_rng(1).random((len(MIXED) * 6, 8))
        assert_same(r, naive_rollout(to_hf(model), MIXED, 6, u, temperature), atol=2e-5)
        assert r.tokens.dtype == torch.int64 and r.logprobs.dtype == r.entropy.dtype == torch.float64 and r.mask.dtype == torch.bool
        assert len(set(r.completions)) > 10


def test_greedy_is_the_likeliest_token_at_each_step(trained, untrained):
    for model in trained, untrained:
        hf, expected = to_hf(model), []
        for prompt in MIXED:
            row = [BOS] + ids_of(prompt)
            for _ in range(8):
                row.append(int(hf_logp(hf, [row])[0, -1].argmax()))
                if row[-1] == EOS: break
            expected.append(text_of([t for t in row[1 + len(prompt):] if t != EOS]))
        assert greedy(model, MIXED) == expected


@pytest.mark.parametrize("T", [1, 2, 5])
def test_no_completion_is_longer_than_its_limit_and_a_longer_limit_only_goes_on(trained, T):
    u = np.random.default_rng(2).random((40, 8))
    short, long = generate(trained, MIXED, 4, u[:, :T], max_new_tokens=T), generate(trained, MIXED, 4, u)
    assert short.tokens.shape == (40, T) and torch.equal(short.tokens, long.tokens[:, :T])
    torch.testing.assert_close(short.logprobs, long.logprobs[:, :T], rtol=0, atol=1e-5)
    assert (short.mask.sum(1) >= 1).all()
    assert torch.equal(short.finished, (short.tokens == EOS).any(1))


@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
def test_the_chunk_changes_nothing(trained, chunk):
    u = np.random.default_rng(3).random((len(MIXED) * 3, 8))
    a, b = generate(trained, MIXED, 3, u), generate(trained, MIXED, 3, u, chunk=chunk)
    assert a.completions == b.completions and torch.equal(a.tokens, b.tokens) and torch.equal(a.mask, b.mask)
    torch.testing.assert_close(a.logprobs, b.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(a.entropy, b.entropy, rtol=0, atol=1e-5)


def test_what_else_is_in_the_batch_changes_no_rollout(trained):
    u = np.random.default_rng(4).random((len(MIXED) * 2, 8))
    together = generate(trained, MIXED, 2, u)
    for i, prompt in enumerate(MIXED):
        alone = generate(trained, [prompt], 2, u[2*i:2*i+2])
        assert alone.completions == together.completions[2*i:2*i+2]
        torch.testing.assert_close(alone.logprobs, together.logprobs[2*i:2*i+2], rtol=0, atol=1e-5)


def test_a_group_is_its_prompts_rows_one_after_the_other(trained):
    prompts = [p.prompt for p in eval_set(GRID[0], 12, 0)]
    r = rollout(trained, prompts, 16, np.random.default_rng(5))
    right = np.array([verify(c, str(eval(prompts[i // 16][:-1]))) for i, c in enumerate(r.completions)])
    wrong_order = np.array([verify(c, str(eval(prompts[i % 12][:-1]))) for i, c in enumerate(r.completions)])
    assert right.mean() > 2 * wrong_order.mean() and right.mean() > .25


def test_duplicates_of_a_prompt_are_sampled_apart_from_each_other(trained):
    r = rollout(trained, ["4+3="] * 2, 8, np.random.default_rng(6))
    assert r.completions[:8] != r.completions[8:] and len(r.completions) == 16
    u = np.random.default_rng(6).random((16, 8))
    assert identical(generate(trained, ["4+3="] * 2, 8, u), generate(trained, ["4+3="], 16, u))


def test_equal_seeds_give_equal_rollouts_and_others_dont(trained):
    a, b, c = (rollout(trained, MIXED, 4, np.random.default_rng(seed)) for seed in (7, 7, 8))
    assert identical(a, b) and a.completions != c.completions


def test_two_policies_get_the_same_noise(trained, untrained):
    "After a rollout the generator stands at the same place, whatever was generated; and a policy changed a little says almost the same."
    ahead = []
    for model in trained, untrained:
        rng = np.random.default_rng(9)
        rollout(model, MIXED, 4, rng)
        ahead.append(rng.random())
    rng = np.random.default_rng(9)
    rng.random((len(MIXED) * 4, 8))
    assert ahead == [rng.random()] * 2
    nudged = deepcopy(trained)
    nudged.head.weight.mul_(1.001)
    a, b = (rollout(m, MIXED, 20, np.random.default_rng(9)) for m in (trained, nudged))
    assert np.mean([x == y for x, y in zip(a.completions, b.completions)]) > .97


@given(st.lists(st.lists(st.sampled_from("0123456789+-*/=; "), max_size=5).map("".join), min_size=1, max_size=6), st.integers(1, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=15)
def test_any_prompts_at_all_give_the_rollouts_of_recomputing_everything(untrained, prompts, group_size, seed):
    r = rollout(untrained, prompts, group_size, np.random.default_rng(seed), max_new_tokens=4)
    assert_same(r, naive_rollout(to_hf(untrained), prompts, group_size, np.random.default_rng(seed).random((len(prompts) * group_size, 4))), atol=2e-5)


def test_special_tokens_in_a_completion_are_visible(trained):
    "Near-infinite temperature makes every token as likely as the others, so the noise chooses: token i for u in [i/20, (i+1)/20)."
    chosen = [ids_of("8") + [PAD] + ids_of("4") + [EOS], [BOS] + ids_of("84") + [EOS], [PAD] * 4, [EOS, 5, 5, 5]]
    u = (np.array(chosen) + .5) / 20
    r = generate(trained, ["4+4="], 4, u, temperature=1e9, max_new_tokens=4)
    assert r.completions == ["8<pad>4", "<bos>84", "<pad><pad><pad><pad>", ""]
    assert r.finished.tolist() == [True, True, False, True] and r.lengths.tolist() == [4, 4, 4, 1]
    assert not verify(r.completions[0], "84") and verify(r.completions[1], "84")
    np.testing.assert_allclose(r.entropy[r.mask], np.log(20), rtol=1e-9)


def test_a_sequence_too_long_for_the_model_is_a_clear_error_and_the_longest_that_fits_is_none():
    model = GPT(GPTConfig(1, 2, 16, 32, max_seq_len=12)).requires_grad_(False)
    forever = (np.full((1, 8), 5) + .5) / 20     # never <eos>
    with pytest.raises(ValueError, match="sequence of 13 tokens is longer than max_seq_len=12"): generate(model, ["1234="], 1, forever, 1e9)
    assert generate(model, ["123="], 1, forever, 1e9).completions == ["2" * 8]
    with pytest.raises(ValueError, match="sequence of 13 tokens is longer than max_seq_len=12"): greedy(model, ["123456+12345="[:12]])


def test_no_prompt_gives_no_completion(trained):
    assert greedy(trained, []) == [] and rollout(trained, [], 4, np.random.default_rng(0)).completions == []


def test_mean_entropy_is_the_mean_over_rollouts_of_the_mean_over_positions(trained):
    r = rollout(trained, MIXED, 5, np.random.default_rng(0))
    assert r.mean_entropy == pytest.approx(np.mean([np.mean([e for e, m in zip(es, ms) if m]) for es, ms in zip(r.entropy.tolist(), r.mask.tolist())]))


def test_inverse_cdf_draws_each_token_by_its_probability():
    p = torch.tensor([.2, 0, .5, .3, 0]).double()
    u = torch.from_numpy(np.random.default_rng(0).random(20_000))
    drawn = np.bincount(inverse_cdf(p.expand(len(u), 5), u), minlength=5)
    assert drawn[1] == drawn[4] == 0
    assert chisquare(drawn[[0, 2, 3]], 20_000 * np.array([.2, .5, .3])).pvalue > 1e-3


@pytest.mark.parametrize("u, token", [(0., 2), (np.nextafter(.25, 0), 2), (.25, 4), (np.nextafter(1., 0), 4)])
def test_inverse_cdf_never_draws_an_impossible_token(u, token):
    p = torch.tensor([[0, 0, .25, 0, .75, 0]]).double()
    assert inverse_cdf(p, torch.tensor([u]).double()).item() == token
