"""What can't be done is refused: each row is a bad parameter or a bad file, with the error's type and a piece of its message.

The piece holds the offending value (or the file's name), so that the message can be acted on."""
import json, math
from types import SimpleNamespace
import numpy as np, pandas as pd, pytest, torch
from safetensors.torch import save_file
from conftest import SMALL
from tiny_rlvr.churn import before_after, concentration, feature_table, killed, status
from tiny_rlvr.exact_eval import answer_logprob, capability_curve, greedy_accuracy, pass_at_k, pass_at_k_estimate
from tiny_rlvr.grpo import GRPOConfig, group_advantages, grpo_loss, token_weights, train
from tiny_rlvr.model import GPT, GPTConfig, KVCache, load_checkpoint, save_checkpoint
from tiny_rlvr.pretrain import PretrainConfig, fill_rows, pretrain
from tiny_rlvr.rewards import score
from tiny_rlvr.rollout import generate, greedy, rollout
from tiny_rlvr.params import at_least, check_params, list_of, one_of, positive
from tiny_rlvr.runs import load_results, load_substrate, read_parquet, write_parquet
from tiny_rlvr.stats import bootstrap_ci, jaccard, jaccard_permutation_test, noise_floor, p_bins
from tiny_rlvr.tasks import TARGET, Problem, Task, eval_set, mixture, streams, training_batch
from tiny_rlvr.vocab import decode, encode

nan, inf = math.nan, math.inf
TASK = Task("+", 1, 1)
THREE = TASK.all()[:3]


def rng(): return np.random.default_rng(0)


@pytest.fixture(scope="module")
def x(tmp_path_factory):
    "A small model, and a folder of files, most of which are damaged."
    folder, model = tmp_path_factory.mktemp("files"), GPT(SMALL).requires_grad_(False)
    def weights(name, **metadata): save_file(model.state_dict(), folder/name, metadata=metadata or None)
    good = {k: getattr(SMALL, k) for k in SMALL.__dataclass_fields__}
    save_checkpoint(model, folder/"good.safetensors", commit="abc")
    whole = (folder/"good.safetensors").read_bytes()
    (folder/"cut.safetensors").write_bytes(whole[:len(whole) // 2])
    (folder/"text.safetensors").write_text("not a model")
    (folder/"empty.safetensors").touch()
    weights("bare.safetensors")
    weights("wider.safetensors", config=json.dumps(good | dict(d_model=64)))
    weights("deeper.safetensors", config=json.dumps(good | dict(n_layer=5)))
    weights("heads.safetensors", config=json.dumps(good | dict(n_head=5)))
    weights("dropout.safetensors", config=json.dumps(good | dict(dropout=.1)))
    weights("json.safetensors", config="{")
    (folder/"results").mkdir()
    (folder/"results/terrain.parquet").write_text("no table")
    pd.DataFrame(dict(seed=[0], task=["+(1,1)"])).to_parquet(folder/"results/x1_retention.parquet")
    return SimpleNamespace(model=model, at=lambda name: folder/name)


def pretrain_one(**kw): return pretrain(SMALL, PretrainConfig(**dict(steps=1, warmup=0, batch_size=4) | kw))


def p_table(**kw): return pd.DataFrame(dict(prompt=["1+1=", "1+1="], answer=["2", "2"], seed=[-1, 0], p=[.5, .5]) | kw)


BAD = [
    # what is asked for, the call, exception, piece of the message
    ("a letter", lambda x: encode("4x3="), ValueError, "'x' at position 1"),
    ("a special token as text", lambda x: encode("<eos>"), ValueError, "'<' at position 0"),
    ("a token id", lambda x: decode([3, 20]), ValueError, "id 20 at position 1"),

    ("an operation", lambda x: Task("^", 1, 1), ValueError, "'^'"),
    ("a width", lambda x: Task("+", 4, 1), ValueError, "a_digits must be 1, 2 or 3 (got 4)"),
    ("a cell without problems", lambda x: Task("-", 1, 3), ValueError, "-(1,3) has no problem"),
    ("a fraction as the answer", lambda x: Problem.make("/", 7, 2), ValueError, "7/2 is not an integer"),
    ("a negative answer", lambda x: Problem.parse("3-5="), ValueError, "3-5 is negative"),
    ("a leading zero", lambda x: Problem.parse("03+5="), ValueError, "'03+5='"),
    ("a share of 1", lambda x: mixture(1.), ValueError, "target_share must lie strictly between 0 and 1 (got 1.0)"),
    ("shares that sum to a half", lambda x: training_batch(rng(), {TASK: .5}, 3), ValueError, "got {'+(1,1)': 0.5}"),
    ("an evaluation set of nothing", lambda x: eval_set(TARGET, 0, 0), ValueError, "n must be at least 1 (got 0)"),
    ("a negative seed", lambda x: streams(-1, "a"), ValueError, "seed must be at least 0 (got -1)"),

    ("heads that don't divide the width", lambda x: GPTConfig(n_head=3), ValueError, "n_head must divide d_model (got n_head=3, d_model=320)"),
    ("half a layer", lambda x: GPTConfig(n_layer=.5), ValueError, "n_layer must be a whole number of at least 1 (got 0.5)"),
    ("a width as text", lambda x: GPTConfig(d_model="320"), ValueError, "d_model must be a whole number of at least 1 (got '320'"),
    ("no position", lambda x: GPTConfig(max_seq_len=0), ValueError, "max_seq_len must be a whole number of at least 1 (got 0)"),
    ("a sequence that is too long", lambda x: x.model(torch.zeros(1, 33, dtype=torch.long)), ValueError, "33 tokens is longer than max_seq_len=32"),
    ("a cached prefix without a mask", lambda x: [x.model(torch.zeros(1, 2, dtype=torch.long), cache=c) for c in [KVCache()] * 2], ValueError, "need a mask"),
    ("a checkpoint that isn't there", lambda x: load_checkpoint(x.at("none.safetensors")), FileNotFoundError, "none.safetensors"),
    ("a folder as a checkpoint", lambda x: load_checkpoint(x.at("results")), FileNotFoundError, "results"),
    ("a checkpoint cut in half", lambda x: load_checkpoint(x.at("cut.safetensors")), ValueError, "cut.safetensors is truncated"),
    ("an empty checkpoint", lambda x: load_checkpoint(x.at("empty.safetensors")), ValueError, "(0 bytes)"),
    ("a text as a checkpoint", lambda x: load_checkpoint(x.at("text.safetensors")), ValueError, "text.safetensors is truncated or isn't a safetensors file (11 bytes)"),
    ("weights without a configuration", lambda x: load_checkpoint(x.at("bare.safetensors")), ValueError, "bare.safetensors has no model configuration"),
    ("weights of another width", lambda x: load_checkpoint(x.at("wider.safetensors")), ValueError, "blocks.0.attn.proj.bias should be (64,) and is (32,)"),
    ("weights of fewer layers", lambda x: load_checkpoint(x.at("deeper.safetensors")), ValueError, "blocks.2.attn.proj.bias should be (32,) and is None"),
    ("a checkpoint of impossible heads", lambda x: load_checkpoint(x.at("heads.safetensors")), ValueError, "n_head=5, d_model=32"),

    ("no step", lambda x: PretrainConfig(steps=0), ValueError, "steps must be a whole number of at least 1 (got 0)"),
    ("an empty batch", lambda x: PretrainConfig(batch_size=0), ValueError, "batch_size must be a whole number of at least 1 (got 0)"),
    ("a learning rate of nan", lambda x: PretrainConfig(lr=nan), ValueError, "lr must be a number above 0 (got nan)"),
    ("a warm-up longer than the run", lambda x: PretrainConfig(steps=50, warmup=60), ValueError, "warmup must lie between 0 and steps=50 (got 60)"),
    ("a last learning rate above the peak", lambda x: PretrainConfig(final_lr=1.5), ValueError, "0 to 1 (got 1.5)"),
    ("a sequence longer than a row", lambda x: fill_rows([3, 9], 8), ValueError, "9 tokens doesn't fit into rows of 8"),
    ("rows shorter than an example", lambda x: pretrain_one(row_width=3), ValueError, "into rows of 3"),
    ("a target's share of 2", lambda x: pretrain_one(target_share=2.), ValueError, "(got 2.0)"),
    ("moments that don't decay", lambda x: pretrain_one(betas=(1.5, .9)), ValueError, "1.5"),
    ("a text to go on from", lambda x: pretrain(SMALL, PretrainConfig(), x.at("text.safetensors")), ValueError, "text.safetensors"),

    ("a group of none", lambda x: rollout(x.model, ["1+1="], 0, rng()), ValueError, "group_size must be a whole number of at least 1 (got 0)"),
    ("a completion of no token", lambda x: greedy(x.model, ["1+1="], 0), ValueError, "max_new_tokens must be a whole number of at least 1 (got 0)"),
    ("a temperature of 0", lambda x: rollout(x.model, ["1+1="], 2, rng(), 0), ValueError, ("temperature must be a number above 0", "(got 0")),
    ("a temperature of nan", lambda x: rollout(x.model, ["1+1="], 2, rng(), nan), ValueError, ("temperature must be a number above 0", "(got nan")),
    ("a letter in a prompt", lambda x: greedy(x.model, ["1+1=", "1+a="]), ValueError, "'a' at position 2 of '1+a='"),
    ("a tree of no rollout", lambda x: generate(x.model, ["1+1="], chunk=0), ValueError, "chunk must be a whole number of at least 1 (got 0)"),
    ("noise for other prompts", lambda x: generate(x.model, ["1+1="], 2, np.zeros((3, 8))), ValueError, "uniforms must have shape (2, 8) (got (3, 8))"),
    ("a prompt that leaves no room", lambda x: greedy(x.model, ["1" * 32]), ValueError, "33 tokens is longer than max_seq_len=32"),

    ("an unknown reward", lambda x: score(["2"], THREE[:1], "corect"), ValueError, "unknown reward 'corect'"),
    ("a reward of nan", lambda x: score(["2"], THREE[:1], lambda c, p: nan), ValueError, "gave nan for completion '2' of '0+0='"),
    ("a reward of nothing", lambda x: score(["2"], THREE[:1], lambda c, p: None), ValueError, "gave None"),
    ("a completion too few", lambda x: score(["2", "3"], THREE), ValueError, "2 completions for 3 problems"),

    ("a group of one", lambda x: group_advantages([[1.], [0.]]), ValueError, "group_size must be at least 2 (got 1)"),
    ("rewards without groups", lambda x: group_advantages([1., 0.]), ValueError, "(got (2,))"),
    ("an unknown scale", lambda x: group_advantages([[1., 0.]], "variance"), ValueError, "(got 'variance')"),
    ("an unknown normaliser", lambda x: token_weights(torch.ones(2, 2).bool(), "mean"), ValueError, "(got 'mean')"),
    *((f"GRPO with {k} {v!r}", lambda x, k=k, v=v: GRPOConfig(**{k: v}), ValueError, (k, f"(got {v!r}")) for k, v in [
        ("updates", -1), ("problems_per_update", 0), ("group_size", 1), ("lr", 0.), ("lr", nan), ("grad_clip", -1.), ("advantage_scale", None), ("normaliser", "mean"), ("kl_weight", -.1),
        ("clip_low", 1.5), ("clip_low", 0.), ("clip_high", 0.), ("inner_epochs", 0), ("staleness", -1), ("temperature", 0.), ("max_new_tokens", 0), ("micro_groups", 0), ("kl_groups", -1)]),
    ("more problems than the task has", lambda x: train(x.model, GRPOConfig(problems_per_update=101), TASK), ValueError, "+(1,1) has only 100 different problems (asked for 101)"),
    ("training on an unknown reward", lambda x: train(x.model, GRPOConfig(), TASK, "corect"), ValueError, "'corect'"),
    ("a training seed of -1", lambda x: train(x.model, GRPOConfig(), TASK, seed=-1), ValueError, "seed must be at least 0 (got -1)"),

    ("an answer too many", lambda x: answer_logprob(x.model, ["1+1="], ["2", "3"]), ValueError, "got 1 prompts and 2 answers"),
    ("a letter in an answer", lambda x: answer_logprob(x.model, ["1+1="], ["2o"]), ValueError, "'o' at position 1 of '2o'"),
    ("an answer that is too long", lambda x: answer_logprob(x.model, ["1+1="], ["2" * 40]), ValueError, "longer than max_seq_len=32"),
    ("a probability above 1", lambda x: pass_at_k([.5, 1.5], 2), ValueError, "p must lie in [0, 1] (got 1.5)"),
    ("a probability of nan", lambda x: capability_curve([.5, nan]), ValueError, "p must lie in [0, 1] (got nan)"),
    ("no try", lambda x: capability_curve([.5], [4, 0]), ValueError, "k must be at least 1 (got 0"),
    ("more tries than samples", lambda x: pass_at_k_estimate(8, 1, 16), ValueError, "(n=8, k=16)"),
    ("more successes than samples", lambda x: pass_at_k_estimate(8, 9, 4), ValueError, "between 0 and n=8 (got 9"),
    ("the accuracy on nothing", lambda x: greedy_accuracy(x.model, []), ValueError, "at least one problem"),

    ("thresholds the wrong way round", lambda x: status([.5], alive=.1, dead=.2), ValueError, "dead=0.2, alive=0.1"),
    ("other problems after than before", lambda x: killed([.5, .5], [[.1, .1, .1]]), ValueError, "(2,) and (1, 3)"),
    ("a log-probability as a probability", lambda x: killed([.5, -2.], [.1, .1]), ValueError, "p_before[1] is -2.0"),
    ("a table without the base", lambda x: before_after(p_table(seed=[1, 0])), ValueError, "no rows with seed -1"),
    ("a seed measured twice", lambda x: before_after(pd.concat([p_table(), p_table()])), ValueError, "prompt '1+1=' appears twice for seed"),
    ("counts as sets", lambda x: concentration(np.ones((2, 3))), ValueError, "(got float64, shape (2, 3))"),
    ("a feature that isn't there", lambda x: feature_table(pd.DataFrame(dict(a=[True])), np.ones((1, 1), bool), np.ones(1, bool), ["b"]), ValueError, "no feature column 'b'"),

    ("the spread of one seed", lambda x: noise_floor([.5]), ValueError, "at least 2 seeds"),
    ("an interval of level 95", lambda x: bootstrap_ci([.1, .2], level=95, rng=rng()), ValueError, "level must lie between 0 and 1 (got 95)"),
    ("a seed as a generator", lambda x: bootstrap_ci([.1, .2], rng=0), ValueError, "got int"),
    ("sets of different lengths", lambda x: jaccard(np.ones(2, bool), np.ones(3, bool)), ValueError, "bool (2,) and bool (3,)"),
    ("a victim outside the pool", lambda x: jaccard_permutation_test(np.eye(2, dtype=bool), np.array([True, False]), np.zeros(2, int), rng=rng()), ValueError, "the first at index 1"),
    ("no bin", lambda x: p_bins([.5], 0), ValueError, "n_bins must be at least 1 (got 0)"),

    ("a parameter that isn't set", lambda x: check_params({}, seed=at_least(0)), ValueError, "seed is not set"),
    ("a number as a text", lambda x: check_params(dict(lr="3e-4"), lr=positive), ValueError, "lr must be a number above 0 (got '3e-4'"),
    ("True as a number", lambda x: check_params(dict(updates=True), updates=at_least(1)), ValueError, "(got True)"),
    ("an unknown choice", lambda x: check_params(dict(scale="var"), scale=one_of("std", "none")), ValueError, "one of 'std', 'none' (got 'var'"),
    ("a list as a text", lambda x: check_params(dict(ks="[1,2]"), ks=list_of(at_least(1))), ValueError, "got '[1,2]'"),
    ("results that aren't there", lambda x: load_results(x.at("nowhere")), FileNotFoundError, "nowhere"),
    ("a substrate that isn't there", lambda x: load_substrate(x.at("results")), FileNotFoundError, "substrate.safetensors"),
    ("a damaged table", lambda x: read_parquet(x.at("results/terrain.parquet")), ValueError, "terrain.parquet is not a whole Parquet file"),
    ("a table without a column", lambda x: read_parquet(x.at("results/x1_retention.parquet")), ValueError, "column greedy is missing"),
    ("writing a table without its columns", lambda x: write_parquet(pd.DataFrame(dict(seed=[0])), x.at("terrain.parquet"), {}), ValueError, "terrain.parquet: column op"),

    ("a negative group", lambda x: rollout(x.model, ["1+1="], -1, rng()), ValueError, "group_size must be a whole number of at least 1 (got -1)"),
    ("half a rollout", lambda x: rollout(x.model, ["1+1="], 1.5, rng()), ValueError, "1.5"),
    ("a negative limit", lambda x: rollout(x.model, ["1+1="], 1, rng(), max_new_tokens=-1), ValueError, "max_new_tokens must be a whole number of at least 1 (got -1)"),
    ("one prompt as a text", lambda x: greedy(x.model, "1+1="), (ValueError, TypeError), "'1+1='"),
    ("noise above 1", lambda x: generate(x.model, ["1+1="], 1, np.full((1, 8), 1.5)), ValueError, "1.5"),
    ("exact p at temperature 0", lambda x: answer_logprob(x.model, ["1+1="], ["2"], 0.), ValueError, ("temperature must be a number above 0", "(got 0.0")),
    ("exact p at temperature -1", lambda x: answer_logprob(x.model, ["1+1="], ["2"], -1.), ValueError, ("temperature must be a number above 0", "(got -1.0")),
    ("one prompt and its answer as texts", lambda x: answer_logprob(x.model, "1+1=", "2000"), (ValueError, TypeError), "'1+1='"),
    ("an estimate of pass@0", lambda x: pass_at_k_estimate(8, 1, 0), ValueError, "k must be at least 1 (got 0"),
    ("a curve over no problem", lambda x: capability_curve([]), ValueError, "(0,)"),
    ("a checkpoint never written", lambda x: pretrain(SMALL, PretrainConfig(steps=1, warmup=0, batch_size=4), x.at("new"), checkpoint_every=0), ValueError, "checkpoint_every must be a whole number of at least 1 (got 0)"),
    ("a stop after the end", lambda x: pretrain(SMALL, PretrainConfig(steps=2, warmup=0, batch_size=4), stop_at=5), ValueError, "stop_at"),
    ("a substrate to go on from", lambda x: pretrain(SMALL, PretrainConfig(), x.at("good.safetensors")), ValueError, "good.safetensors"),
    ("a pretraining seed of -1", lambda x: pretrain_one(seed=-1), ValueError, "(got -1)"),
    ("a model's seed of -1", lambda x: GPT(SMALL, -1), ValueError, "(got -1)"),
    ("a negative weight decay", lambda x: pretrain_one(weight_decay=-1.), ValueError, "(got -1.0)"),
    ("steps as a text", lambda x: PretrainConfig(steps="100"), ValueError, "steps must be a whole number of at least 1 (got '100'"),
    ("an infinite learning rate", lambda x: PretrainConfig(lr=inf), ValueError, "(got inf)"),
    ("a configuration with a field too many", lambda x: load_checkpoint(x.at("dropout.safetensors")), ValueError, "dropout.safetensors"),
    ("a configuration that isn't JSON", lambda x: load_checkpoint(x.at("json.safetensors")), ValueError, "json.safetensors"),
    ("rewards with a nan", lambda x: group_advantages([[1., nan]]), ValueError, "nan"),
    ("a KL without a reference", lambda x: grpo_loss(*(torch.zeros(s) for s in [(1, 1), (1, 1), 1, (1, 1)]), kl_weight=.1), ValueError, "kl_weight"),
    *((f"GRPO with {k} {v!r}", lambda x, k=k, v=v: GRPOConfig(**{k: v}), ValueError, (k, f"(got {v!r}")) for k, v in [
        ("group_size", 8.), ("group_size", "8"), ("lr", "1e-5"), ("lr", inf), ("kl_weight", nan), ("weight_decay", nan), ("staleness", .5), ("betas", (1., 2.))]),
]


def refused(x, call, exception, said):
    with pytest.raises(exception) as e: call(x)
    for piece in [said] if isinstance(said, str) else said: assert piece in str(e.value)


@pytest.mark.parametrize("call, exception, said", [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_input_is_refused_with_the_value_or_the_file(x, call, exception, said): refused(x, call, exception, said)


def test_the_table_is_long_and_no_row_is_there_twice():
    assert len({row[0] for row in BAD}) == len(BAD) >= 20
