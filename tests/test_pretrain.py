"Claims about packing, the training loop, and runs that are killed."
import errno, math, os, signal, subprocess, sys
import numpy as np, pandas as pd, pytest, torch
from hypothesis import given, strategies as st
from referee import ids_of, in_our_names
from conftest import MIX
from tiny_rlvr.model import GPT, GPTConfig, to_hf
from tiny_rlvr.pretrain import PretrainConfig, fill_rows, lr_at, pack, packed_loss, pretrain, tokens_of
from tiny_rlvr.tasks import GRID, Problem, eval_set, mixture, streams, training_batch

TINY = GPTConfig(n_layer=1, n_head=2, d_model=32, d_ff=64, max_seq_len=24)
CFG = PretrainConfig(steps=24, batch_size=16, lr=3e-3, warmup=4, row_width=24, seed=7)


def same_weights(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(a[k].numpy().tobytes() == b[k].numpy().tobytes() for k in a)


@pytest.fixture(scope="module")
def uninterrupted(): return pretrain(TINY, CFG, mix=MIX)


# ---- packing

def test_what_is_learnt_is_bos_prompt_answer_eos():
    assert tokens_of(Problem.parse("45+38=")) == [1, *ids_of("45+38=83"), 2]


@given(st.lists(st.integers(1, 24), max_size=60))
def test_every_sequence_lies_in_one_row_and_no_row_overflows(lengths):
    rows = fill_rows(lengths, 24)
    assert sorted(i for r in rows for i in r) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in r) <= 24 for r in rows)
    full = sum(sorted((sum(lengths[i] for i in r) for r in rows))[:2])
    assert len(rows) < 2 or full > 24, "two rows would have fitted into one"


def sequential_loss(model, sequences):
    "Mean over all tokens of the batch, a sequence at a time, by Hugging Face's model."
    total, n = 0., 0
    for s in sequences:
        logp = model(torch.tensor([s[:-1]])).logits[0].log_softmax(-1)
        for t, target in enumerate(s[1:]): total, n = total - logp[t, target], n + 1
    return total / n


@pytest.mark.parametrize("width", [16, 24, 61])
def test_packing_changes_neither_loss_nor_gradients(width):
    model = GPT(TINY, seed=1)
    for p in model.parameters(): p.data.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * .2)
    hf, model = to_hf(model).double(), model.double()
    sequences = [tokens_of(p) for t in GRID for p in eval_set(t, 2, seed=4)]
    batch = pack(sequences, width)
    assert batch.n_tokens == sum(len(s) - 1 for s in sequences)
    packed, plain = packed_loss(model, batch), sequential_loss(hf, sequences)
    assert packed.item() == pytest.approx(plain.item(), rel=1e-12)
    packed.backward()
    plain.backward()
    theirs = in_our_names(hf, lambda p: p.grad)
    for name, p in model.named_parameters(): torch.testing.assert_close(p.grad, theirs.pop(name), rtol=1e-9, atol=1e-13)
    assert not theirs


# ---- training

def test_the_loss_falls_and_the_log_says_what_was_done(uninterrupted):
    _, log = uninterrupted
    assert log.step.tolist() == list(range(CFG.steps)) and list(log.columns) == ["step", "loss", "lr", "grad_norm"]
    assert abs(log.loss[0] - math.log(20)) < .3 and log.loss[CFG.steps-1] < .75 * log.loss[0]
    assert log.lr.tolist() == [lr_at(CFG, s) for s in range(CFG.steps)]


def test_the_learning_rate_warms_up_in_a_line_and_ends_at_its_last_value():
    cfg = PretrainConfig(steps=50, lr=.5, warmup=10, final_lr=.2)
    lrs = np.array([lr_at(cfg, s) for s in range(50)])
    np.testing.assert_allclose(lrs[:10], .05 * np.arange(1, 11))
    assert lrs.argmax() in (9, 10) and (np.diff(lrs[10:]) < 0).all() and lrs[49] == pytest.approx(.1)


def test_training_is_adamw_on_the_mean_loss_of_each_batch():
    "Hugging Face's model, a sequence at a time, plain AdamW and plain clipping: the same weights."
    cfg = PretrainConfig(steps=6, batch_size=8, lr=3e-3, warmup=2, row_width=24, seed=7, grad_clip=.7)
    model, log = pretrain(TINY, cfg, mix=MIX)
    hf = to_hf(GPT(TINY, cfg.seed))
    decayed = [[p for p in hf.parameters() if (p.dim() > 1) == d] for d in (True, False)]
    opt = torch.optim.AdamW([dict(params=decayed[0], weight_decay=.1), dict(params=decayed[1], weight_decay=0)], lr=1, betas=(.9, .95), fused=False, foreach=False)
    rng, losses = streams(cfg.seed, "data").data, []
    for step in range(cfg.steps):
        loss = sequential_loss(hf, [tokens_of(p) for p in training_batch(rng, MIX, cfg.batch_size)])
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(hf.parameters(), cfg.grad_clip)
        for g in opt.param_groups: g["lr"] = lr_at(cfg, step)
        opt.step()
        losses.append(loss.item())
    assert (log.grad_norm > cfg.grad_clip).any()
    np.testing.assert_allclose(log.loss, losses, rtol=1e-5)
    ids = torch.randint(0, 20, (2, 24), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(ids), hf(ids).logits, rtol=0, atol=2e-3)   # Adam blows up the rounding of gradients that are zero


def test_equal_seeds_give_equal_bytes_and_others_dont(uninterrupted):
    assert same_weights(pretrain(TINY, CFG, mix=MIX)[0], uninterrupted[0])
    assert not same_weights(pretrain(TINY, PretrainConfig(**vars(CFG) | dict(seed=8)), mix=MIX)[0], uninterrupted[0])


# ---- interruptions

def test_a_run_that_is_stopped_and_taken_up_is_the_run_that_never_stopped(uninterrupted, tmp_path):
    path = tmp_path/"resume.safetensors"
    for stop in 5, 11, 12, None: model, log = pretrain(TINY, CFG, path, checkpoint_every=4, mix=MIX, stop_at=stop)
    assert same_weights(model, uninterrupted[0])
    pd.testing.assert_frame_equal(log, uninterrupted[1], check_exact=True)


def test_a_finished_run_is_taken_up_without_a_step(uninterrupted, tmp_path):
    path, steps = tmp_path/"resume.safetensors", []
    pretrain(TINY, CFG, path, mix=MIX)
    model, log = pretrain(TINY, CFG, path, mix=MIX, on_step=lambda *a: steps.append(a))
    assert not steps and same_weights(model, uninterrupted[0])
    pd.testing.assert_frame_equal(log, uninterrupted[1], check_exact=True)


KILLED = """
import os, signal, sys, torch
sys.path.insert(0, {tests!r})
torch.set_num_threads(1)
from test_pretrain import CFG, MIX, TINY, pretrain
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
replace, writes = os.replace, []
def killed_while_writing(a, b):
    writes.append(b)
    die() if len(writes) == 3 else replace(a, b)
if {where!r} == "writing": os.replace = killed_while_writing
pretrain(TINY, CFG, {path!r}, checkpoint_every=5, mix=MIX, on_step=lambda step, _: die() if {where!r} == "computing" and step == 12 else None)
"""

@pytest.mark.parametrize("where, kept", [("computing", 10), ("writing", 10)])
def test_a_run_killed_at_any_moment_goes_on_as_if_nothing_had_happened(uninterrupted, tmp_path, where, kept):
    path, redone = tmp_path/"resume.safetensors", []
    code = KILLED.format(tests=os.path.dirname(__file__), where=where, path=str(path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert path.exists()
    model, log = pretrain(TINY, CFG, path, checkpoint_every=5, mix=MIX, on_step=lambda step, _: redone.append(step))
    assert redone == list(range(kept, CFG.steps))
    assert same_weights(model, uninterrupted[0])
    pd.testing.assert_frame_equal(log, uninterrupted[1], check_exact=True)


@pytest.mark.parametrize("checkpoint_every", [4, 5])
def test_a_run_that_a_callback_ended_ends_there_again_when_it_is_taken_up(tmp_path, checkpoint_every):
    "Killed after the last step and before its caller wrote the result: the second run must not train on."
    path, twice = tmp_path/"resume.safetensors", []
    for _ in range(2): twice.append(pretrain(TINY, CFG, path, checkpoint_every, mix=MIX, on_step=lambda step, _: step == 11))
    assert [len(log) for _, log in twice] == [12, 12]
    assert same_weights(twice[0][0], twice[1][0])


def test_the_target_s_share_changes_when_it_is_said_to(tmp_path):
    "By hand: batches of one mixture up to the change and of the other from it on, out of one stream; across it, a run is taken up as ever."
    from dataclasses import replace
    cfg = replace(CFG, steps=6, target_share=.05, late_from=3, late_share=.9)
    model, log = pretrain(TINY, cfg)
    rng, seen = streams(cfg.seed, 'data').data, []
    for step in range(6):
        batch = training_batch(rng, mixture(.05 if step < 3 else .9), cfg.batch_size)
        seen.append(pack([tokens_of(p) for p in batch], cfg.row_width).n_tokens)
        if step == 0: assert log.loss[0] == pytest.approx(packed_loss(GPT(TINY, cfg.seed), pack([tokens_of(p) for p in batch], cfg.row_width)).item(), rel=1e-6)
    state = tmp_path/"state.safetensors"
    pretrain(TINY, cfg, checkpoint=state, stop_at=2)
    again, log_again = pretrain(TINY, cfg, checkpoint=state)
    assert same_weights(model, again) and log_again.equals(log)
    plain, plain_log = pretrain(TINY, replace(cfg, late_from=None, late_share=None))
    assert (log.loss[:3] == plain_log.loss[:3]).all() and (log.loss[3:] != plain_log.loss[3:]).all()
    assert min(seen[3:]) > max(seen[:3]) # the target's strings are longer: more tokens in as many examples


@pytest.mark.parametrize("wrong", [dict(late_from=3), dict(late_share=.1), dict(late_from=0, late_share=.1), dict(late_from=3, late_share=1.5)])
def test_half_a_change_of_share_is_refused(wrong):
    with pytest.raises(ValueError, match="late_"): PretrainConfig(**wrong)

def test_a_change_of_share_and_a_mixture_of_ones_own_dont_go_together():
    with pytest.raises(ValueError, match="late_share"): pretrain(TINY, PretrainConfig(steps=4, warmup=1, late_from=2, late_share=.1), mix=MIX)


@pytest.mark.parametrize("keep", [0, 4, 300, .5, -1])
def test_a_truncated_resume_checkpoint_is_refused_with_its_name(tmp_path, keep):
    path = tmp_path/"resume.safetensors"
    pretrain(TINY, CFG, path, mix=MIX, stop_at=1)
    size = path.stat().st_size
    os.truncate(path, size - 1 if keep == -1 else int(size * keep) if isinstance(keep, float) else keep)
    with pytest.raises(ValueError, match="truncated") as e: pretrain(TINY, CFG, path, mix=MIX)
    assert str(path) in str(e.value)


def test_a_resume_checkpoint_of_other_settings_is_refused(tmp_path):
    path = tmp_path/"resume.safetensors"
    pretrain(TINY, CFG, path, mix=MIX, stop_at=1)
    for model_cfg, cfg, mix in ((GPTConfig(**vars(TINY) | dict(d_ff=32)), CFG, MIX), (TINY, PretrainConfig(**vars(CFG) | dict(lr=1e-3)), MIX), (TINY, CFG, None)):
        with pytest.raises(ValueError, match="made with other settings") as e: pretrain(model_cfg, cfg, path, mix=mix)
        assert str(path) in str(e.value)


def test_a_full_disk_stops_the_run_and_leaves_the_last_checkpoint_and_no_other_file(uninterrupted, tmp_path, monkeypatch):
    path = tmp_path/"resume.safetensors"
    pretrain(TINY, CFG, path, mix=MIX, stop_at=6)
    before = path.read_bytes()
    def full(*_, **__): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for broken in "tiny_rlvr.model.save_file", "os.replace":
        with monkeypatch.context() as m:
            m.setattr(broken, full)
            with pytest.raises(OSError, match="No space left"): pretrain(TINY, CFG, path, checkpoint_every=3, mix=MIX)
        assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [path.name]
    assert same_weights(pretrain(TINY, CFG, path, mix=MIX)[0], uninterrupted[0])


def test_a_loss_that_stops_being_finite_stops_the_run_and_keeps_the_last_checkpoint(uninterrupted, tmp_path):
    path = tmp_path/"resume.safetensors"
    def poison(step, model):
        if step == 9: model.ln.weight.data[0] = math.nan
    with pytest.raises(FloatingPointError, match=r"step 10: loss nan.*resume\.safetensors.*lr \(now 0\.003\)"):
        pretrain(TINY, CFG, path, checkpoint_every=4, mix=MIX, on_step=poison)
    redone = []
    model, _ = pretrain(TINY, CFG, path, mix=MIX, on_step=lambda step, _: redone.append(step))
    assert redone[0] == 8 and same_weights(model, uninterrupted[0])
