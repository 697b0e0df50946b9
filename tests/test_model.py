"Claims about the model and its files; Hugging Face's GPT-2 is the referee."
import errno, json, os, resource
from copy import deepcopy
import numpy as np, pytest, torch
from safetensors.torch import save_file
from referee import BOS, EOS, PAD, hf_answer_logprob, ids_of, text_of
from tiny_rlvr.exact_eval import answer_logprob
from tiny_rlvr.model import GPT, GPTConfig, load_checkpoint, save_checkpoint, to_hf
from tiny_rlvr.rollout import greedy
from tiny_rlvr.tasks import GRID, Task, eval_set

PAPER = GPTConfig()


@pytest.fixture(scope="module")
def paper_sized():
    "The paper's sizes; weights spread until the next character is anything from near certain to hopeless."
    model = GPT(PAPER, seed=5).requires_grad_(False)
    for name, p in model.named_parameters():
        if p.dim() == 1: p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * .1)   # no bias stays zero
    model.head.weight.mul_(10)
    return model


def grid_problems(n): return [p for t in GRID for p in eval_set(t, n, seed=11)]


def same_as_hugging_face(model, problems):
    prompts, answers = [p.prompt for p in problems], [p.answer for p in problems]
    return answer_logprob(model, prompts, answers), hf_answer_logprob(to_hf(model), prompts, answers)


def test_hugging_face_gives_the_same_logits(trained, untrained, paper_sized):
    for model in trained, untrained, paper_sized:
        ids = torch.randint(0, 20, (4, model.cfg.max_seq_len), generator=torch.Generator().manual_seed(0))
        ours, theirs = model(ids), to_hf(model)(ids).logits.detach()
        assert ours.dtype == torch.float32 and ours.std() > .5
        assert (ours - theirs).abs().max() < 1e-5 * ours.abs().max()


def test_hugging_face_gives_the_same_p_to_1e_6(trained):
    ours, theirs = same_as_hugging_face(trained, Task("+", 1, 1).all() + eval_set(Task("+", 2, 1), 60, 0))
    p, q = np.exp(ours), np.exp(theirs)
    assert p.min() < .05 < .5 < p.max()
    assert np.abs(p - q).max() < 1e-6 and np.abs(ours - theirs).max() < 2e-5


def test_hugging_face_gives_the_same_p_at_the_papers_size(paper_sized):
    ours, theirs = same_as_hugging_face(paper_sized, grid_problems(2))
    assert np.ptp(ours) > 10
    assert np.abs(np.exp(ours) - np.exp(theirs)).max() < 1e-6 and np.abs(ours - theirs).max() < 1e-4


def test_in_float64_nothing_but_rounding_is_left_between_the_two(paper_sized):
    problems = grid_problems(1)
    prompts, answers = [p.prompt for p in problems], [p.answer for p in problems]
    ours, theirs = answer_logprob(deepcopy(paper_sized).double(), prompts, answers), hf_answer_logprob(to_hf(paper_sized).double(), prompts, answers)
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def test_hugging_faces_greedy_generation_is_our_greedy(trained, untrained):
    prompts = [p.prompt for t in GRID for p in eval_set(t, 3, seed=2)]
    for model in trained, untrained:
        hf, theirs = to_hf(model), []
        for prompt in prompts:
            ids = torch.tensor([[BOS] + ids_of(prompt)])
            out = hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, eos_token_id=EOS, pad_token_id=PAD)[0, ids.shape[1]:].tolist()
            theirs.append(text_of(out[:out.index(EOS)] if EOS in out else out))
        assert greedy(model, prompts) == theirs
        assert len(set(theirs)) > 5


def test_later_tokens_change_nothing_before_them(trained):
    ids = torch.randint(0, 20, (1, 20), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[0, 12:] = (other[0, 12:] + 1) % 20
    a, b = trained(ids)[0], trained(other)[0]
    assert torch.allclose(a[:12], b[:12], atol=1e-5) and not torch.allclose(a[12], b[12], atol=1e-2)


def test_equal_seeds_give_equal_weights_and_others_dont():
    cfg = GPTConfig(1, 2, 16, 32, 16)
    a, b, c = (GPT(cfg, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not any(torch.equal(a[k], c[k]) for k in a if a[k].dim() > 1)


# ---- files

def files_in(folder): return sorted(p.name for p in folder.iterdir())


def test_a_checkpoint_gives_back_every_bit_of_weights_and_sizes(trained, tmp_path):
    save_checkpoint(trained, tmp_path/"deep"/"m.safetensors", commit="abc")
    back = load_checkpoint(tmp_path/"deep"/"m.safetensors")
    assert back.cfg == trained.cfg
    assert all(torch.equal(v, back.state_dict()[k]) for k, v in trained.state_dict().items())


def test_equal_models_with_equal_metadata_make_equal_files(trained, tmp_path):
    for i in range(8): save_checkpoint(trained, tmp_path/str(i), commit="abc", preset="nano", device="cpu", python="3.11")
    assert len({p.read_bytes() for p in tmp_path.iterdir()}) == 1


def test_a_float64_model_keeps_its_bits_on_the_way_to_hugging_face(trained):
    model = deepcopy(trained).double()
    model.head.weight.mul_(1 + 1e-10)
    assert torch.equal(to_hf(model).lm_head.weight, model.head.weight)


def full_disk(*_, **__): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("broken", ["tiny_rlvr.model.save_file", "os.replace"])
def test_a_full_disk_leaves_the_old_checkpoint_and_no_other_file(trained, untrained, tmp_path, monkeypatch, broken):
    path = tmp_path/"m.safetensors"
    save_checkpoint(trained, path)
    before = path.read_bytes()
    monkeypatch.setattr(broken, full_disk)
    with pytest.raises(OSError, match="No space left"): save_checkpoint(untrained, path)
    monkeypatch.undo()
    assert path.read_bytes() == before and files_in(tmp_path) == ["m.safetensors"]


def test_a_disk_that_is_full_after_a_few_kilobytes_leaves_the_old_checkpoint_and_no_other_file(trained, untrained, tmp_path):
    "No stand-in: the kernel refuses to let any file grow beyond 20 kB."
    path = tmp_path/"m.safetensors"
    save_checkpoint(trained, path)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    assert len(before) > 50_000
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        with pytest.raises(Exception) as e: save_checkpoint(untrained, path)
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "too large" in str(e.value)
    assert path.read_bytes() == before and files_in(tmp_path) == ["m.safetensors"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_checkpoint_has_the_mode_of_any_new_file(untrained, tmp_path, umask):
    before = os.umask(umask)
    try:
        (tmp_path/"any").touch()
        for _ in range(2): save_checkpoint(untrained, tmp_path/"m.safetensors") # a new one, and in an old one's place
    finally: os.umask(before)
    assert (tmp_path/"m.safetensors").stat().st_mode == (tmp_path/"any").stat().st_mode


@pytest.mark.parametrize("keep", [0, 5, 8, 200, .5, -1])
def test_a_truncated_checkpoint_is_refused_with_its_name(trained, tmp_path, keep):
    path = tmp_path/"m.safetensors"
    save_checkpoint(trained, path)
    size = path.stat().st_size
    os.truncate(path, size - 1 if keep == -1 else int(size * keep) if isinstance(keep, float) else keep)
    with pytest.raises(ValueError, match="truncated") as e: load_checkpoint(path)
    assert str(path) in str(e.value)


def test_no_pickle_is_ever_read(trained, tmp_path):
    class Bomb:
        def __reduce__(self): return os.mkdir, (str(tmp_path/"unpickled"),)
    torch.save({"a": Bomb()}, tmp_path/"m.safetensors")
    with pytest.raises(ValueError, match="m.safetensors"): load_checkpoint(tmp_path/"m.safetensors")
    assert not (tmp_path/"unpickled").exists()


def test_weights_that_dont_fit_the_configuration_are_named(trained, tmp_path):
    path = tmp_path/"m.safetensors"
    config = {k: getattr(trained.cfg, k) for k in ("n_layer", "n_head", "d_model", "d_ff", "max_seq_len", "vocab_size")}
    save_file(dict(trained.state_dict()), path, metadata=dict(config=json.dumps(config | dict(n_layer=3))))
    with pytest.raises(ValueError, match=r"blocks\.2\..* is None") as e: load_checkpoint(path)
    assert str(path) in str(e.value)
    save_file({k: v for k, v in trained.state_dict().items() if k != "ln.bias"}, path, metadata=dict(config=json.dumps(config)))
    with pytest.raises(ValueError, match=r"ln\.bias should be \(32,\) and is None"): load_checkpoint(path)
