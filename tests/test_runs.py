"Claims about files and bad input: every mistake is told in words that name it and what would be right."
import json, os, resource, subprocess, sys
from pathlib import Path
import numpy as np, pandas as pd, pytest
from tiny_rlvr import runs, workflow
from tiny_rlvr.model import GPT, GPTConfig, save_checkpoint
from tiny_rlvr.params import at_least, check_params, flag, list_of, one_of, positive, share, text
from tiny_rlvr.runs import TABLES, load_results, load_substrate, provenance, read_parquet, read_provenance, seed_dir, write_parquet

ROOT = Path(__file__).parent.parent
ORIGIN = provenance(dict(preset="nano", seed=0, lr=1e-5))


def table(name, rows=3, seed=0): return pd.DataFrame({c: [seed if c == "seed" else 0] * rows for c in TABLES[name]})


BAD_PARAMETERS = [
    # value, rule, what the message says after "x must be "
    (1, at_least(2), "a whole number of at least 2 (got 1)"),
    (2.0, at_least(1), "a whole number of at least 1 (got 2.0)"),
    (True, at_least(0), "a whole number of at least 0 (got True)"),
    ("8", at_least(1), "a whole number of at least 1 (got '8': a text; write it without quotes)"),
    (0, positive, "a number above 0 (got 0)"),
    (-1e-5, positive, "a number above 0 (got -1e-05)"),
    (float("nan"), positive, "a number above 0 (got nan)"),
    (float("inf"), positive, "a number above 0 (got inf)"),
    (None, positive, "a number above 0 (got None)"),
    ("3e-4", positive, "a number above 0 (got '3e-4': a text; in YAML a number with an exponent needs its point, 3.0e-04)"),
    ("fast", positive, "a number above 0 (got 'fast': a text)"),
    (1.5, share, "a number from 0 to 1 (got 1.5)"),
    ("true", flag, "True or False (got 'true': a text; write True after -p, true in YAML)"),
    (1, flag, "True or False (got 1)"),
    ("null", at_least(1), "a whole number of at least 1 (got 'null': a text; write None after -p, null in YAML)"),
    ("[1,2]", list_of(at_least(1)), "a list, each item a whole number of at least 1 (got '[1,2]': a text; papermill reads lists only from YAML, -y 'name: [1,2]' or a file)"),
    ([1, 0], list_of(at_least(1)), "a list, each item a whole number of at least 1 (got [1, 0])"),
    ("median", one_of("std", "none"), "one of 'std', 'none' (got 'median': a text)"),
    ("", text, "a text that is not empty (got '': a text)"),
    (7, text, "a text that is not empty (got 7)"),
]


@pytest.mark.parametrize("value, rule, message", BAD_PARAMETERS, ids=lambda x: repr(x)[:20])
def test_a_bad_parameter_is_named_with_its_value_and_what_is_right(value, rule, message):
    with pytest.raises(ValueError) as e: check_params(dict(x=value), x=rule)
    assert str(e.value) == f"x must be {message}"


def truncated(path, keep=.5):
    data = path.read_bytes()
    path.write_bytes(data[:int(len(data) * keep)])
    return path


def notebook(path, cells):
    path.write_text(json.dumps(dict(cells=[dict(cell_type="code", metadata=dict(tags=tags), source=source, outputs=[]) for source, tags in cells])))
    return path


def preset(tmp_path, monkeypatch, source):
    (tmp_path/"config").mkdir()
    (tmp_path/"config/mine.yaml").write_text(source)
    monkeypatch.setattr(workflow, "resolve", lambda p: tmp_path/p)
    return workflow.load_preset("mine")


BAD_FILES = [
    # what is done in a folder, the error, and what its message says
    (lambda d, m: read_parquet(d/"terrain.parquet"), FileNotFoundError, "terrain.parquet is missing: `make reproduce`"),
    (lambda d, m: read_parquet("runs/nano/results/absent.parquet"), FileNotFoundError, "`make reproduce PRESET=nano` makes it"),
    (lambda d, m: read_parquet(truncated(write_parquet(table("terrain"), d/"terrain.parquet", ORIGIN))), ValueError, "terrain.parquet is not a whole Parquet file"),
    (lambda d, m: read_parquet(truncated(write_parquet(table("terrain"), d/"terrain.parquet", ORIGIN), 0)), ValueError, "delete it"),
    (lambda d, m: read_provenance(truncated(write_parquet(table("terrain"), d/"terrain.parquet", ORIGIN))), ValueError, "is not a whole Parquet file"),
    (lambda d, m: read_parquet(write_parquet(table("terrain").drop(columns="op"), d/"other.parquet", ORIGIN).rename(d/"terrain.parquet")), ValueError, "column op is missing (it has seed, a_digits"),
    (lambda d, m: write_parquet(table("x1_retention").drop(columns=["task", "greedy"]), d/"x1_retention.parquet", ORIGIN), ValueError, "column task, greedy is missing"),
    (lambda d, m: load_results(d), FileNotFoundError, "x1_p_correct.parquet is missing"),
    (lambda d, m: load_substrate(d), FileNotFoundError, "substrate.safetensors is missing"),
    (lambda d, m: load_substrate(truncated(small_substrate(d)).parent), ValueError, "substrate.safetensors is truncated"),
    (lambda d, m: workflow.load_preset("huge"), ValueError, "preset must be one of mini, nano, paper (got 'huge')"),
    (lambda d, m: preset(d, m, "x1:\n  updates: 3"), ValueError, "mine.yaml must be flat"),
    (lambda d, m: preset(d, m, "- 3"), ValueError, "mine.yaml must be flat"),
    (lambda d, m: workflow.notebook_params(notebook(d/"n.ipynb", [("a = 1", [])])), ValueError, "must have one cell tagged parameters (it has 0)"),
    (lambda d, m: workflow.notebook_params(notebook(d/"n.ipynb", [("a = 1", ["parameters"]), ("b = 1", ["parameters"])])), ValueError, "must have one cell tagged parameters (it has 2)"),
    (lambda d, m: workflow.notebook_params(notebook(d/"n.ipynb", [("a = f(1)", ["parameters"])])), ValueError, "only names set to literals (got 'a = f(1)')"),
    (lambda d, m: workflow.execute(notebook(d/"n.ipynb", [("a = 1", ["parameters"])]), d/"out.ipynb", dict(b=1)), ValueError, "has no parameter 'b' (it has a)"),
    (lambda d, m: workflow.collect(d, d, n_seeds=1), FileNotFoundError, "seeds/-1/x1_p_correct.parquet is missing"),
    (lambda d, m: runs.repo_root(d), FileNotFoundError, "is not inside a tiny-rlvr repository"),
]


def small_substrate(folder):
    save_checkpoint(GPT(GPTConfig(n_layer=1, n_head=2, d_model=16, d_ff=32), seed=0), folder/"substrate.safetensors")
    return folder/"substrate.safetensors"


@pytest.mark.parametrize("act, error, message", BAD_FILES, ids=[m for _, _, m in BAD_FILES])
def test_a_bad_file_is_named_with_the_way_out(act, error, message, tmp_path, monkeypatch):
    with pytest.raises(error) as e: act(tmp_path, monkeypatch)
    assert message in str(e.value)


def test_provenance_is_equal_for_equal_settings_and_names_no_folder():
    params = dict(preset="mini", seed=3, run_dir="/home/somebody/runs", results_dir="/home/somebody/results")
    assert provenance(params) == provenance({**params, "run_dir": "elsewhere"})
    said = json.dumps(provenance(params))
    assert "somebody" not in said
    assert set(provenance(params)) == {"commit", "preset", "parameters", "versions", "device", "python"}


def test_a_table_comes_back_as_it_was_with_its_types(tmp_path):
    df = pd.DataFrame(dict(prompt=["387+456=", "1+1="], answer=["843", "2"], seed=np.array([-1, 3]), p=np.array([1e-300, np.nextafter(1, 0)])))
    write_parquet(df, tmp_path/"x1_p_correct.parquet", ORIGIN)
    pd.testing.assert_frame_equal(read_parquet(tmp_path/"x1_p_correct.parquet"), df, check_exact=True)
    assert read_provenance(tmp_path/"x1_p_correct.parquet") == ORIGIN


def test_a_disk_that_is_full_after_a_few_kilobytes_leaves_the_old_table(tmp_path):
    path = write_parquet(table("terrain"), tmp_path/"terrain.parquet", ORIGIN)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        with pytest.raises(OSError, match="too large"): write_parquet(table("terrain").assign(entropy=[os.urandom(50_000), b"", b""]), path, ORIGIN)
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["terrain.parquet"]


def test_a_writer_that_is_killed_leaves_the_old_table(tmp_path):
    path = write_parquet(table("terrain"), tmp_path/"terrain.parquet", ORIGIN)
    before = path.read_bytes()
    script = f"""
import os, signal, pandas as pd, tiny_rlvr.runs as r
os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL) # written, but not yet in its place
r.write_parquet(pd.DataFrame({{c: [1] for c in r.TABLES["terrain"]}}), {str(path)!r}, {{}})
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT)
    assert done.returncode == -9 and path.read_bytes() == before


def test_collecting_twice_gives_the_same_bytes(tmp_path):
    for seed in (-1, 0, 1):
        for name in TABLES:
            rows = 0 if (seed, name) == (-1, "x1_training_log") else 3
            write_parquet(table(name, rows, seed), seed_dir(tmp_path, seed)/f"{name}.parquet", provenance(dict(preset="nano", seed=seed)))
    both = []
    for folder in ("a", "b"):
        workflow.collect(tmp_path, tmp_path/folder, n_seeds=2)
        both.append({p.name: p.read_bytes() for p in (tmp_path/folder).iterdir()})
    assert both[0] == both[1] and len(both[0]) == len(TABLES)
    assert load_results(tmp_path/"a").preset == "nano"


def test_the_hash_of_every_experiment_follows_its_code_and_not_its_prose(tmp_path):
    for nb in sorted((ROOT/"nbs/experiments").glob("*.ipynb")):
        content = json.loads(nb.read_text())
        for cell in content["cells"]:
            if cell["cell_type"] == "markdown": cell["source"] = "Other prose."
            else: cell.update(source="".join(cell["source"]) + "\n# a comment", outputs=[])
        (tmp_path/nb.name).write_text(json.dumps(content))
        assert workflow.code_hash(tmp_path/nb.name, ROOT) == workflow.code_hash(nb, ROOT)
        content["cells"].append(dict(cell_type="code", metadata={}, source="1 + 1", outputs=[]))
        (tmp_path/nb.name).write_text(json.dumps(content))
        assert workflow.code_hash(tmp_path/nb.name, ROOT) != workflow.code_hash(nb, ROOT)
