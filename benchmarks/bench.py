"""Measure this library against the machine's limits, the naive versions beside it and TRL; write timings.parquet, which nbs/benchmarks.ipynb draws.

    python benchmarks/bench.py                    everything, 2 threads, float32
    python benchmarks/bench.py grpo memory        some parts; their rows in timings.parquet are replaced

Both sides of a ratio are timed in turn, in one process. A quiet machine is the reader's business: `disturbance` in the table says how much processor time others took."""
import argparse, contextlib, itertools, os, platform, re, resource, shutil, subprocess, sys, tempfile, time
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))
os.environ.setdefault("TINY_RLVR_PROGRESS", "")  # no progress bars

import numpy as np
import pandas as pd
import torch
import naive
from tiny_rlvr.exact_eval import answer_logprob
from tiny_rlvr.grpo import GRPOConfig, train
from tiny_rlvr.model import GPT, GPTConfig, fast_float32, load_checkpoint, save_checkpoint, to_hf
from tiny_rlvr.pretrain import PretrainConfig, clip_gradients, optimizer_for, pack, packed_loss, pretrain, tokens_of
from tiny_rlvr.rollout import generate
from tiny_rlvr.runs import provenance, write_parquet
from tiny_rlvr.tasks import GRID, TARGET, eval_set, mixture, streams, training_batch
from tiny_rlvr.terrain import measure_task, terrain_map

TIMINGS = HERE/"timings.parquet"
POLICY = "runs/bench/policy.safetensors"
CFG = GPTConfig()
BLOCK_PARAMS = 12*CFG.n_layer*CFG.d_model**2  # in the blocks' matrices: a token costs twice as many FLOP forward, six times as many forward and backward
SHAPES = [(CFG.d_model, 3*CFG.d_model), (CFG.d_model, CFG.d_model), (CFG.d_model, CFG.d_ff), (CFG.d_ff, CFG.d_model)]  # (in, out) of a block's four matrices


# ---- tools

def row(measure, side, repeat=0, **numbers): return dict(measure=measure, side=side, repeat=repeat, **numbers)


def timed(f):
    "Seconds that f() takes."
    start = time.perf_counter()
    f()
    return time.perf_counter()-start


class Laps:
    "Seconds since the last lap, with the time of other things taken out."
    def __init__(self): self.restart()
    def restart(self): self.start = time.perf_counter()
    def lap(self): return time.perf_counter()-self.start


@contextlib.contextmanager
def products_by(backend: str):
    """'onednn' or 'mkl' for float32 matrix products.

    PyTorch hands float32 products to MKL, which runs at half speed on AMD's processors; to oneDNN only together with the permission to round to bf16.
    oneDNN makes use of that on processors with AMX alone: `machine` reports the error, which must be float32's."""
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = dict(onednn="bf16", mkl="none")[backend]
    try: yield
    finally: torch.backends.mkldnn.matmul.fp32_precision = before


def limits(products):
    "The same products by each backend, and by the one that the library's code gets: rows' numbers by side."
    def seconds(backend):
        with products_by(backend): return timed(products)
    work = dict(flop=products.flop, bytes=products.bytes, tokens=products.n)
    return {f"limit of {name}": dict(seconds=seconds(backend), **work) for name, backend in dict(MKL="mkl", oneDNN="onednn").items()}


def matmul_bytes(n, k, m): return 4*(n*k + k*m + n*m)


class MatrixProducts:
    "All matrix products of the blocks for `n` tokens and nothing else, into memory that is there already: the limit of a job that has to do them."
    def __init__(self, n: int, backward: bool = True):
        self.n, self.backward = n, backward
        self.flop = (6 if backward else 2)*n*BLOCK_PARAMS
        self.parts = [SimpleNamespace(x=torch.randn(n, i), w=torch.randn(o, i), y=torch.randn(n, o), dx=torch.empty(n, i), dw=torch.empty(o, i)) for i, o in SHAPES]
        self.bytes = CFG.n_layer*sum(matmul_bytes(n, i, o)*(3 if backward else 1) for i, o in SHAPES)

    @torch.no_grad()
    def __call__(self):
        for _ in range(CFG.n_layer):
            for p in self.parts: torch.mm(p.x, p.w.t(), out=p.y)
            if self.backward:
                for p in self.parts:
                    torch.mm(p.y, p.w, out=p.dx)
                    torch.mm(p.y.t(), p.x, out=p.dw)


class Tokens:
    "Counts the tokens that go through a model, those with a gradient apart, and the calls."
    def __init__(self, model):
        self.reset()
        model.register_forward_pre_hook(self.see)
    def reset(self): self.forward = self.trained = self.calls = 0
    def see(self, model, args):
        self.calls += 1
        if torch.is_grad_enabled(): self.trained += args[0].numel()
        else: self.forward += args[0].numel()


def signal_in_half(completion: str, problem) -> float:
    "A reward that about one completion in twelve gets, so that about half of the groups of eight have signal, as in the post: the number is divisible by 12."
    return float(completion.isdigit() and int(completion) % 12 == 0)


def policy() -> GPT:
    "A policy of the paper's size whose completions have the target's lengths: trained on the target alone for 80 updates, and kept for the next time."
    path = ROOT/POLICY
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        model, log = pretrain(CFG, PretrainConfig(steps=80, lr=1e-3, warmup=10, batch_size=128), mix={TARGET: 1.})
        print(f"trained a policy for the benchmark: loss {log.loss.iloc[-1]:.2f} nats")
        save_checkpoint(model, path)
    return load_checkpoint(path)


# ---- pieces: each gives rows for the table

def machine(repeats):
    "The roofline's two limits, and the rate of single products at several batch sizes."
    rows, big = [], 2048
    a, b, c = (torch.randn(big, big) for _ in range(3))
    x, y = torch.randn(2**26), torch.empty(2**26)
    products = {n: [(torch.randn(n, i), torch.randn(o, i), torch.empty(n, o)) for i, o in SHAPES] for n in (1, 8, 64, 200, 500, 1000, 2300, 4096)}
    for repeat in range(-1, repeats):
        new = [row("machine", "copy", repeat, seconds=timed(lambda: y.copy_(x)), bytes=8*len(x))]
        for backend in "mkl", "onednn":
            with products_by(backend): new.append(row("machine", f"largest product, {backend}", repeat, seconds=timed(lambda: torch.mm(a, b, out=c)), flop=2*big**3, bytes=matmul_bytes(big, big, big)))
        for n, backend in itertools.product(products, ("mkl", "onednn")):
            times = 1 + 2000//n
            with products_by(backend):
                seconds = timed(lambda: [torch.mm(x, w.t(), out=y) for _ in range(times) for x, w, y in products[n]])
            error = max(((y - x.double()@w.double().t()).abs().max()/y.abs().max()).item() for x, w, y in products[n]) if repeat == 0 else float("nan")
            new.append(row("machine", f"products of {n} tokens, {backend}", repeat, seconds=seconds, flop=times*2*n*12*CFG.d_model**2, bytes=times*sum(matmul_bytes(n, i, o) for i, o in SHAPES), tokens=n, value=error))
        if repeat >= 0: rows += new
    return rows


def pretraining(repeats):
    "The real loop, data and packing included; the limit and the naive step run between its updates."
    rows, laps, n = [], Laps(), 256
    rng, plain = streams(0, "data").data, GPT(CFG)
    opt = naive.optimizer_for(plain, 3e-4)
    kept = {}
    def others(step, model):
        seconds = laps.lap()
        problems = training_batch(rng, mixture(0.01), n)  # the same stream as the loop's own
        tokens = sum(len(tokens_of(p))-1 for p in problems)
        limit = kept.setdefault(0, MatrixProducts(tokens))
        work = dict(flop=6*tokens*BLOCK_PARAMS, tokens=tokens)
        side = limits(limit) | {"naive": dict(seconds=timed(lambda: naive.pretrain_step(plain, opt, problems)), **work)}
        if step >= 2:
            rows.append(row("pretraining step", "ours", step, seconds=seconds, bytes=limit.bytes, **work))
            rows.extend(row("pretraining step", k, step, **v) for k, v in side.items())
        laps.restart()
    pretrain(CFG, PretrainConfig(steps=repeats+2, warmup=2, batch_size=n), on_step=others)
    return rows


def exact(repeats):
    "Exact p of 2000 problems; the limit has a batch's token count."
    model, problems = policy().requires_grad_(False), eval_set(TARGET, 2000, 10000)
    prompts, answers = [p.prompt for p in problems], [p.answer for p in problems]
    tokens, few = sum(len(tokens_of(p))-1 for p in problems), problems[:100]
    limit, rows = MatrixProducts(1024, backward=False), []
    for repeat in range(-1, repeats):
        new = {k: v | {q: v[q]*tokens/limit.n for q in ("seconds", "flop", "bytes", "tokens")} for k, v in limits(limit).items()}
        new |= {"ours": dict(seconds=timed(lambda: answer_logprob(model, prompts, answers))), "naive": dict(seconds=timed(lambda: naive.exact_p(model, few))*len(problems)/len(few))}
        if repeat >= 0: rows += [row("exact p", k, repeat, **dict(flop=2*tokens*BLOCK_PARAMS, bytes=limit.bytes*tokens/limit.n, tokens=tokens) | v) for k, v in new.items()]
    return rows


def grpo(repeats, block=6):
    "Blocks of updates from the same policy on the same prompts: ours (with the naive update between), then TRL's. The first update of each block is a warm-up."
    base, rows = policy(), []
    for b in range(-(-repeats//(block-1))):
        for new in (our_updates(base, b, block), trl_updates(base, b, block), trl_updates(base, b, block, "TRL with oneDNN", "onednn", "eager")): rows += [r for r in new if r["repeat"] % block]
    return rows


def update_problems(seed, updates): # what `train` draws with this seed
    rng = streams(seed, "pretraining", "problems", "noise").problems
    return [TARGET.sample(8, rng, distinct=True) for _ in range(updates)]


def our_updates(base, seed, block, naive_too=True, **settings):
    rows, laps, model, plain = [], Laps(), deepcopy(base), deepcopy(base)
    reference, opt, problems, total = deepcopy(base).requires_grad_(False), naive.optimizer_for(plain, 1e-5), update_problems(seed, block), []
    of_reference, of_policy = Tokens(reference), Tokens(model)
    counts = []
    def others(update, _):
        total.append(laps.lap())
        counts.append((of_policy.forward, of_policy.trained, of_reference.forward, of_policy.calls))
        if naive_too: rows.append(row("GRPO update", "naive", seed*block+update, seconds=timed(lambda: naive.grpo_update(plain, opt, problems[update], signal_in_half))))
        of_policy.reset(), of_reference.reset()
        laps.restart()
    log = train(model, GRPOConfig(updates=block, **settings), TARGET, signal_in_half, seed, reference, others)
    for i, (seconds, (forward, trained, referred, calls)) in enumerate(zip(total, counts)):
        repeat, l = seed*block+i, log.iloc[i]
        rows.append(row("GRPO update", "ours", repeat, seconds=seconds, flop=(2*(forward+referred)+6*trained)*BLOCK_PARAMS, tokens=forward+referred+trained))
        rows.append(row("GRPO update", "rollout", repeat, seconds=l.seconds_rollout, flop=2*(forward+referred)*BLOCK_PARAMS, bytes=4*BLOCK_PARAMS*calls, tokens=forward+referred))
        rows.append(row("GRPO update", "backward", repeat, seconds=l.seconds_backward, flop=6*trained*BLOCK_PARAMS, bytes=3*4*BLOCK_PARAMS, tokens=trained))
        rows.append(row("GRPO update", "optimizer", repeat, seconds=l.seconds_optimizer, flop=15*model.n_params, bytes=32*model.n_params))  # norm, then AdamW: reads 4+16 bytes a weight, writes 12
        rows.append(row("GRPO update", "groups with signal", repeat, value=1-l.zero_signal_fraction))
        rows.append(row("GRPO update", "completion length", repeat, value=l.completion_length))
    return rows


def trl_updates(base, seed, block, side="TRL", backend="mkl", attention="sdpa"):
    """TRL's time from one update's end to the next's, its own sampling taken apart.

    Its defaults are PyTorch's: products by MKL, fused attention. oneDNN makes products faster and fused attention slower, so that it goes with eager attention: the second try."""
    from transformers import TrainerCallback
    from trl_side import trainer
    rows, laps, spent = [], Laps(), []
    hf = to_hf(base).train()
    hf.set_attn_implementation(attention)
    t = trainer(hf, [p for ps in update_problems(seed, block) for p in ps], signal_in_half, max_steps=block, num_generations=8, max_completion_length=8,
                per_device_train_batch_size=64, learning_rate=1e-5, lr_scheduler_type="constant", seed=seed)
    generate = t._generate_single_turn
    def watched(*args, **kwargs):
        start = time.perf_counter()
        out = generate(*args, **kwargs)
        spent.append(time.perf_counter()-start)
        return out
    t._generate_single_turn = watched
    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            update = state.global_step-1
            rows.append(row("GRPO update", side, seed*block+update, seconds=laps.lap()))
            rows.append(row("GRPO update", f"{side}: sampling", seed*block+update, seconds=spent[-1]))
            laps.restart()
    t.add_callback(Clock())
    with products_by(backend):
        laps.restart()
        t.train()
    assert len(spent) == block and torch.get_num_threads() == THREADS
    return rows


def terrain(repeats, few=16):
    "The map at its full size; and, with fewer problems, beside the naive one."
    model, rows = policy().requires_grad_(False), []
    tokens = Tokens(model)
    for repeat in range(max(1, repeats//4)):
        tokens.reset()
        seconds = timed(lambda: terrain_map(model, 256, 10000))
        rows.append(row("terrain map", "ours", repeat, seconds=seconds, flop=2*tokens.forward*BLOCK_PARAMS, tokens=tokens.forward, bytes=4*BLOCK_PARAMS*tokens.calls))
        rows.append(row(f"terrain map of {few}", "ours", repeat, seconds=timed(lambda: [measure_task(model, t, few, 0) for t in GRID])))
        rows.append(row(f"terrain map of {few}", "naive", repeat, seconds=timed(lambda: [naive.terrain_cell(model, eval_set(t, few, 0)) for t in GRID])))
    return rows


def papermill(repeats):
    "An empty notebook, from the command line, and as the workflow runs one."
    import nbformat
    with tempfile.TemporaryDirectory() as folder:
        nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x = 1", metadata=dict(tags=["parameters"]))])
        out, empty = f"{folder}/out.ipynb", f"{folder}/empty.ipynb"
        nbformat.write(nb, empty)
        ways = {"papermill": ["-m", "papermill", "-k", "python3", "--no-progress-bar", empty, out], "workflow": ["-m", "tiny_rlvr.workflow", "run", "-o", out, empty]}
        def run(way): subprocess.run([sys.executable, *ways[way]], check=True, capture_output=True, cwd=ROOT)
        return [row("an empty notebook", way, repeat, seconds=timed(lambda: run(way))) for repeat in range(max(1, repeats//2)) for way in ways]


# What operators are called in a profile. Not listed: the rest of PyTorch's.
OPERATORS = {
    "the blocks' products": ["aten::mm", "aten::addmm"],
    "attention": ["aten::bmm", "aten::_softmax", "aten::_softmax_backward_data"],
    "GELU": ["aten::gelu", "aten::gelu_backward"],
    "LayerNorm": ["aten::native_layer_norm", "aten::native_layer_norm_backward"],
    "optimizer": ["aten::_fused_adamw_", "aten::linalg_vector_norm", "Optimizer.step#AdamW.step"],
}


class Profile:
    "Profiles a loop from the end of step `first` to the end of step `last`; give it as the loop's callback."
    def __init__(self, first, last): self.first, self.last, self.profiler = first, last, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    def __call__(self, step, model):
        if step == self.first: self.begin(model)
        if step == self.last: self.end()
    def begin(self, model):
        self.tokens = Tokens(model)
        self.profiler.start()
        self.start = time.perf_counter()
    def end(self):
        self.seconds = time.perf_counter()-self.start
        self.profiler.stop()
    def rows(self, job, steps, useful):
        "Seconds a step of each kind of operator, and of what is outside of them all; useful and done FLOP of the blocks' products, and the limit's."
        spent = {e.key: e.self_cpu_time_total/1e6 for e in self.profiler.key_averages()}
        parts = {kind: sum(spent.pop(name, 0.) for name in names) for kind, names in OPERATORS.items()}
        parts |= {"other operators": sum(spent.values())}
        parts |= {"outside operators": self.seconds-sum(parts.values()), "wall": self.seconds}
        done = (2*self.tokens.forward + 6*self.tokens.trained)*BLOCK_PARAMS
        best = max(v["flop"]/v["seconds"] for _ in range(3) for v in limits(MatrixProducts(1024)).values())
        new = [row(f"profile of {job}", part, seconds=s/steps) for part, s in parts.items()]
        return new + [row(f"profile of {job}", "done", flop=done/steps), row(f"profile of {job}", "useful", flop=useful/steps), row(f"profile of {job}", "limit", flop=best, seconds=1.)]


def profile(repeats):
    "Where the time of a pretraining step, a GRPO update and an exact p goes, by kind of operator. The profiler itself slows small operators."
    rng, n = streams(0, "data").data, 6
    batches = [training_batch(rng, mixture(0.01), 256) for _ in range(n)]
    p = Profile(1, n-1)
    pretrain(CFG, PretrainConfig(steps=n, warmup=1), on_step=p)
    rows = p.rows("pretraining step", n-2, 6*BLOCK_PARAMS*sum(len(tokens_of(q))-1 for b in batches[2:] for q in b))
    base, n = policy(), 22
    p = Profile(1, n-1)
    train(deepcopy(base), GRPOConfig(updates=n, kl_groups=0), TARGET, signal_in_half, 0, on_update=p)
    rows += p.rows("GRPO update", n-2, (2*p.tokens.forward + 6*p.tokens.trained)*BLOCK_PARAMS)
    base.requires_grad_(False)
    problems = eval_set(TARGET, 2000, 10000)
    asked = [q.prompt for q in problems], [q.answer for q in problems]
    answer_logprob(base, *(x[:100] for x in asked))
    p = Profile(None, None)
    p.begin(base)
    answer_logprob(base, *asked)
    p.end()
    return rows + p.rows("exact p", 1, 2*BLOCK_PARAMS*sum(len(tokens_of(q))-1 for q in problems))


# ---- ideas that were weighed

def ideas(repeats):
    "Things that could be faster, each beside what the library does, in turn."
    return [*pretraining_ideas(repeats), *rollout_ideas(repeats), *side_by_side(max(1, repeats//5))]


def pretraining_ideas(repeats):
    "torch.compile (its compile time is the row `compilation`), and bf16 where autocast allows it."
    rng = streams(0, "data").data
    batches = [pack([tokens_of(p) for p in training_batch(rng, mixture(0.01), 256)]) for _ in range(repeats+2)]
    def stepper(call, model, bf16=False):
        opt = optimizer_for(model, 3e-4)
        def step(b):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16): loss = packed_loss(call, b)
            opt.zero_grad()
            loss.backward()
            clip_gradients(model, 1.)
            opt.step()
        return step
    models = [GPT(CFG) for _ in range(3)]
    steps = {"ours": stepper(models[0], models[0]), "torch.compile": stepper(torch.compile(models[1], dynamic=True), models[1]), "bf16 autocast": stepper(models[2], models[2], True)}
    first = {side: sum(timed(lambda: step(b)) for b in batches[:2]) for side, step in steps.items()}
    rows = [row("idea: pretraining step", side, i, seconds=timed(lambda: step(b))) for i, b in enumerate(batches[2:]) for side, step in steps.items()]
    return rows + [row("idea: pretraining step", "compilation", seconds=first["torch.compile"]-first["ours"])]


def rollout_ideas(repeats):
    "inference_mode instead of no_grad; no KL to the base, which TRL doesn't measure either."
    base, prompts, noise = policy().requires_grad_(False), [p.prompt for p in update_problems(0, 1)[0]], np.random.default_rng(0).random((64, 8))
    def sample(): generate(base, prompts, 8, noise)
    def inference():
        with torch.inference_mode(): sample()
    sample(), inference()
    rows = [row("idea: rollout", side, i, seconds=timed(f)) for i in range(3*repeats) for side, f in {"ours": sample, "inference_mode": inference}.items()]
    for i in range(max(1, repeats//5)):
        for side, groups in {"ours": 1, "without KL": 0}.items():
            rows += [r | dict(side=side, measure="idea: GRPO update") for r in our_updates(policy(), i, 6, naive_too=False, kl_groups=groups) if r["side"] == "ours" and r["repeat"] % 6]
    return rows


def one_of_two(side):
    "Median seconds of an update, warm."
    base, n = policy(), 12
    if side == "ours": new = our_updates(base, 0, n, naive_too=False)
    elif side == "TRL": new = trl_updates(base, 0, n)
    else:
        opt, problems = naive.optimizer_for(base, 1e-5), update_problems(0, n)
        new = [row("", side, i, seconds=timed(lambda: naive.grpo_update(base, opt, problems[i], signal_in_half))) for i in range(n)]
    return float(np.median([r["seconds"] for r in new if r["side"] == side and r["repeat"] >= 2]))


def side_by_side(repeats):
    "One seed with all threads, and as many seeds as threads with one each, as the workflow runs them: seconds of an update of each."
    rows = []
    for repeat, side in itertools.product(range(repeats), ("ours", "naive", "TRL")):
        for n, threads in (1, THREADS), (THREADS, 1):
            command = [sys.executable, __file__, "--one-of-two", side, "--threads", str(threads)]
            running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(n)]
            done = [p.communicate() for p in running]
            if any(p.returncode for p in running): raise RuntimeError(done[0][1][-2000:])
            rows += [row("seeds side by side", f"{side}, {'one' if n == 1 else 'side by side'}", repeat, seconds=float(out.split()[-1])) for out, _ in done]
    return rows


JOBS = dict(
    pretraining=lambda: pretrain(CFG, PretrainConfig(steps=3, warmup=1)),
    grpo=lambda: train(policy(), GRPOConfig(updates=5), TARGET, signal_in_half),
    exact_p=lambda: exact_job(2000),
    terrain=lambda: terrain_map(policy(), 256, 10000),
    TRL=lambda: trl_updates(policy(), 0, 4),
)


def exact_job(n):
    problems = eval_set(TARGET, n, 10000)
    answer_logprob(policy(), [p.prompt for p in problems], [p.answer for p in problems])


def peak_memory():
    "Bytes. The kernel's own record starts anew with a program, ru_maxrss takes over the parent's."
    if Path("/proc/self/status").exists(): return 1024*int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss*(1 if sys.platform == "darwin" else 1024)


def memory(repeats):
    "Peak resident memory of each job in a process of its own."
    policy()
    return [row("peak memory", job, peak_bytes=int(subprocess.run([sys.executable, __file__, "--job", job, "--threads", str(THREADS)], check=True, capture_output=True, text=True).stdout.split()[-1])) for job in JOBS]


def seed_of_x1(repeats, *more):
    "The notebook of one seed as the workflow runs it, at the paper preset and from the shipped substrate: where its wall time goes."
    from tiny_rlvr.runs import read_parquet
    import nbformat
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT/"results/substrate.safetensors", folder)
        command = [sys.executable, "-m", "tiny_rlvr.workflow", "run", "nbs/experiments/x1_run.ipynb", "-o", f"{folder}/out.ipynb", "-p", "results_dir", folder, "-p", "run_dir", folder, "-p", "seed", "0", *more]
        environment = os.environ | dict(OMP_NUM_THREADS=str(THREADS))
        del environment["TINY_RLVR_PROGRESS"]
        wall = timed(lambda: subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env=environment))
        cells = [c for c in nbformat.read(f"{folder}/out.ipynb", 4).cells if c.cell_type == "code"]
        evaluation = sum(c.metadata.papermill.duration for c in cells if "import" not in c.source and any(f in c.source for f in ("answer_logprob(", "greedy_accuracy(", "terrain_map(", "answer_tree(")))
        inside = next(c for c in cells if c.source.startswith("clock.sum()")).outputs[0]["data"]["text/plain"]
        seconds = dict(zip(inside.split("\n")[0].split(), map(float, inside.split("\n")[1].split()[1:])))
    parts = seconds | {"evaluation": evaluation, "wall": wall}
    return [row("a seed of x1", k, seconds=v) for k, v in parts.items()]


PARTS = dict(machine=machine, pretraining=pretraining, exact=exact, grpo=grpo, terrain=terrain, papermill=papermill, memory=memory, seed=seed_of_x1, profile=profile, ideas=ideas)


def others_share():
    "A clock of the processor time that other processes took, as a share of the machine."
    def now():
        total = [int(x) for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        mine = sum(getattr(resource.getrusage(who), f) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN) for f in ("ru_utime", "ru_stime"))
        return (sum(total)-total[3]-total[4])/os.sysconf("SC_CLK_TCK"), mine, time.perf_counter()*os.cpu_count()
    start = now()
    def share():
        busy, mine, all_ = (b-a for a, b in zip(start, now()))
        return max(0., (busy-mine)/all_)
    return share


def main():
    global THREADS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count()))
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)  # what `memory` starts
    parser.add_argument("--one-of-two", choices=["ours", "naive", "TRL"], help=argparse.SUPPRESS)  # what `side_by_side` starts
    args = parser.parse_args()
    THREADS = args.threads
    torch.set_num_threads(THREADS)
    fast_float32()
    if args.job:
        JOBS[args.job]()
        return print(peak_memory())
    if args.one_of_two: return print(one_of_two(args.one_of_two))
    table = pd.read_parquet(TIMINGS) if TIMINGS.exists() else pd.DataFrame()
    for part in args.parts or PARTS:
        share = others_share() if Path("/proc/stat").exists() else lambda: float("nan")
        new, start = pd.DataFrame(PARTS[part](args.repeats)), time.perf_counter()
        new = new.assign(part=part, disturbance=share())
        print(f"{part}: others took {share():.0%} of the processors\n{new.drop(columns=['repeat','part','disturbance']).groupby(['measure','side'], sort=False).median()}\n", flush=True)
        table = pd.concat([table[table.part != part] if len(table) else table, new], ignore_index=True)
        write_parquet(table, TIMINGS, provenance(dict(threads=THREADS, repeats=args.repeats, processor=processor()), "cpu"))


def processor() -> str:
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else None
    return f"{found[1] if found else platform.processor()}, {torch.backends.cpu.get_cpu_capability()}"


if __name__ == "__main__": main()
