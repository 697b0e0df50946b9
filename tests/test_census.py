"Claims about the census: it equals teacher forcing, it can be killed, and it needs little memory."
import json, os, signal, subprocess, sys, time
from pathlib import Path
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from referee import hf_forced_logprob
from tiny_rlvr.census import census, fingerprint, price
from tiny_rlvr.model import GPT, save_checkpoint, to_hf
from tiny_rlvr.tasks import TARGET, Problem, Task

TASK = Task("+", 2, 2)


def forced(model, problems): return hf_forced_logprob(to_hf(model), [q.prompt for q in problems], [q.answer for q in problems])


def test_every_problem_is_there_once_with_the_p_of_teacher_forcing(untrained, tmp_path):
    df = pd.read_parquet(census(untrained, tmp_path/"c.parquet", 3, TASK, part=1000))
    assert len(df.drop_duplicates(["a", "b"])) == len(df) == TASK.n_problems and set(df.seed) == {3}
    problems = [Problem.make("+", int(a), int(b)) for a, b in zip(df.a, df.b)]
    np.testing.assert_allclose(df.p, np.exp(forced(untrained, problems)), rtol=1e-3, atol=1e-12)


def test_sizes_of_parts_do_not_matter(untrained, tmp_path):
    a, b = (pd.read_parquet(census(untrained, tmp_path/f"{part}.parquet", 0, TASK, part=part)) for part in (8100, 777))
    pd.testing.assert_frame_equal(a, b, rtol=1e-4)


def test_provenance_is_in_the_file(untrained, tmp_path):
    path = census(untrained, tmp_path/"c.parquet", 0, Task("+", 1, 1), dict(commit="abc"))
    assert pq.read_schema(path).metadata[b"commit"] == b"abc"


def test_a_killed_process_goes_on_where_it_was(untrained, tmp_path):
    save_checkpoint(untrained, tmp_path/"policy.safetensors")
    code = f"""
import torch; torch.set_num_threads(1)
from tiny_rlvr.census import census
from tiny_rlvr.model import load_checkpoint
from tiny_rlvr.tasks import Task
census(load_checkpoint({str(tmp_path/'policy.safetensors')!r}), {str(tmp_path/'c.parquet')!r}, 0, Task("+", 3, 2), part=2000)
"""
    parts = tmp_path/".c.parquet.parts"
    process = subprocess.Popen([sys.executable, "-c", code])
    while len(list(parts.glob("[0-9]*"))) < 2:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(.01)
    process.send_signal(signal.SIGKILL); process.wait()
    done = {p.name: p.stat().st_mtime_ns for p in sorted(parts.glob("[0-9]*.parquet"))[:-1]} # all but the one that was perhaps being written
    assert not (tmp_path/"c.parquet").exists()
    seen = {}
    from unittest.mock import patch
    import tiny_rlvr.census as module
    join = module._join
    def look(files, *args): seen.update({p.name: p.stat().st_mtime_ns for p in files}); return join(files, *args)
    with patch.object(module, "_join", look): census(untrained, tmp_path/"c.parquet", 0, Task("+", 3, 2), part=2000)
    assert done.items() <= seen.items() and len(seen) == 41
    assert len(pd.read_parquet(tmp_path/"c.parquet")) == 81_000 and not parts.exists()


def test_another_policys_parts_are_not_taken(untrained, tmp_path):
    from unittest.mock import patch
    with patch("tiny_rlvr.census._join", side_effect=OSError("disk full")), pytest.raises(OSError): census(untrained, tmp_path/"c.parquet", 0, TASK, part=4050)
    other = GPT(untrained.cfg, seed=9)
    df = pd.read_parquet(census(other, tmp_path/"c.parquet", 0, TASK, part=4050))
    problems = [Problem.make("+", int(a), int(b)) for a, b in zip(df.a[:50], df.b[:50])]
    np.testing.assert_allclose(df.p[:50], np.exp(forced(other, problems)), rtol=1e-3)


def test_a_fingerprint_tells_weights_apart_and_nothing_else(untrained):
    copy = GPT(untrained.cfg); copy.load_state_dict(untrained.state_dict())
    assert fingerprint(copy) == fingerprint(untrained)
    with torch.no_grad(): copy.head.weight[0, 0] += 1e-3
    assert fingerprint(copy) != fingerprint(untrained)


def test_the_price_counts_all_problems(untrained):
    cost = price(untrained, TARGET, 300)
    assert cost["problems"] == 810_000 and cost["seconds"] > 0 and 2 < cost["times_fewer"] < 3
    with pytest.raises(ValueError, match="n must be"): price(untrained, TARGET, 0)


def test_a_finished_census_is_kept_for_its_policy_alone(untrained, tmp_path):
    path = census(untrained, tmp_path/"c.parquet", 0, Task("+", 1, 1))
    before = path.stat().st_mtime_ns
    assert census(untrained, path, 0, Task("+", 1, 1)).stat().st_mtime_ns == before
    assert census(GPT(untrained.cfg, seed=9), path, 0, Task("+", 1, 1)).stat().st_mtime_ns != before
