"Claims about the whole workflow, at the nano preset: one story of a run that is killed, fails, ends, and is edited, told in a copy of the repository."
import fcntl, json, os, re, shutil, subprocess, sys, time
from pathlib import Path
from types import SimpleNamespace
import psutil, pytest
from tiny_rlvr.runs import SUBSTRATE, TABLES, read_parquet, read_provenance
from tiny_rlvr.workflow import DEMYSTIFY, OPTIONAL, load_preset, preset_params

ROOT = Path(__file__).parent.parent
RUN = "runs/nano"
EXPERIMENTS = sorted(p.stem for p in (ROOT/"nbs/experiments").glob("*.ipynb") if p.stem not in OPTIONAL)
ANALYSES = [e for e in EXPERIMENTS if e not in ("x0_pretrain", "x1_run")]
NANO = load_preset("nano")
SEEDS = range(-1, NANO["n_seeds"])
pytestmark = pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a folder that nobody can write to, to make a seed fail")


def start(tree, *command):
    "A command in the copy, which imports the copy's library."
    env = {k: v for k, v in os.environ.items() if k not in ("TINY_RLVR_PROGRESS", "OMP_NUM_THREADS")} | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(command, cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    text, _ = process.communicate(timeout=400)
    return SimpleNamespace(rc=process.returncode, text=text)


def reproduce(tree, *args): return start(tree, sys.executable, "-m", "tiny_rlvr.workflow", "reproduce", "--preset", "nano", "--", "--cores", "2", *args)


def is_locked(run):
    with open(run/".lock") as lock:
        try: fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError: return True
    return False


def planned(tree):
    "What a dry run would run: a list of jobs, each the name of its notebook (x1_run once a seed), and collect."
    text = finish(reproduce(tree, "--dry-run", "--quiet", "host")).text
    if "Nothing to be done" in text: return []
    assert "This was a dry-run" in text, text
    return sorted(re.findall(r"^ +log: .*/notebooks/(\w+?)(?:_-?\d+)?\.ipynb", text, re.M) + ["collect"] * len(re.findall(r"^rule collect:", text, re.M)))


def files(folder): return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    tree = tmp_path_factory.mktemp("workflow")/"repo"
    for folder in ["config", "profiles", "tiny_rlvr", "nbs"]: shutil.copytree(ROOT/folder, tree/folder, ignore=shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__"))
    for name in ["settings.ini", "Snakefile", "constraints.txt"]: shutil.copy(ROOT/name, tree)
    s = SimpleNamespace(tree=tree, run=tree/RUN)

    process = reproduce(tree) # pretraining is killed after its first checkpoint
    while not (s.run/"pretrain_state.safetensors").is_file():
        assert process.poll() is None, finish(process).text
        time.sleep(.1)
    s.locked = is_locked(s.run)
    job, = [p for p in psutil.Process(process.pid).children(recursive=True) if "tiny_rlvr.workflow" in p.cmdline()]
    job.kill()
    s.killed = finish(process)
    s.after_kill = {p.name for p in (s.run/"results").iterdir()} if (s.run/"results").is_dir() else set()

    (s.run/"seeds").mkdir() # seed 1 has nowhere to write
    (s.run/"seeds/1").symlink_to("/sys/kernel")
    s.failed = finish(reproduce(tree))
    s.after_failure = {seed: files(s.run/"seeds"/str(seed)) for seed in (-1, 0)}
    s.times = {p: p.stat().st_mtime_ns for seed in (-1, 0) for p in (s.run/"seeds"/str(seed)).iterdir()}

    (s.run/"seeds/1").unlink()
    s.planned = planned(tree)
    s.finished = finish(reproduce(tree))
    s.again = finish(reproduce(tree))
    return s


def test_a_killed_job_says_how_far_it_was_and_leaves_no_result(story):
    assert story.killed.rc != 0
    assert re.search(r"STOPPED x0_pretrain\n  it was killed or interrupted; its last line was: .*\d+/\d+ \d+%", story.killed.text), story.killed.text
    assert SUBSTRATE not in story.after_kill


def test_two_runs_of_a_preset_do_not_get_into_each_others_way(story):
    assert story.locked and not is_locked(story.run)
    with open(story.run/".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = finish(reproduce(story.tree))
    assert second.rc == 2 and f"preset nano is being run already, in {story.run}" in second.text


def test_the_next_run_goes_on_from_the_checkpoint(story):
    assert "x0_pretrain: done" in story.failed.text, story.failed.text
    first = int(re.search(rf"x0_pretrain: .* (\d+)/{NANO['pretrain_steps']} ", story.failed.text)[1])
    assert first >= NANO["checkpoint_every"]


def test_a_failing_seed_does_not_stop_the_others(story):
    assert story.failed.rc != 0
    for seed in (-1, 0): assert set(story.after_failure[seed]) == {f"{t}.parquet" for t in TABLES}


def test_the_message_of_a_failing_seed_names_seed_notebook_and_cause(story):
    end = story.failed.text[story.failed.text.rindex("FAILED"):]
    assert end.startswith("FAILED x1_run seed 1\n")
    assert "nbs/experiments/x1_run.ipynb" in end
    assert re.search(r"cell      In \[\d+\], which starts with: ", end)
    assert "cause     PermissionError" in end or "cause     OSError" in end or "cause     FileNotFoundError" in end
    assert f"{RUN}/notebooks/x1_run_1.ipynb" in end and "the same command again runs only what is missing" in end
    assert "Traceback" not in story.failed.text


def test_only_what_is_missing_is_run_again(story):
    assert story.planned == sorted(["x1_run", "collect", *ANALYSES])
    assert story.finished.rc == 0, story.finished.text
    assert {p: p.stat().st_mtime_ns for p in story.times} == story.times


def test_it_says_how_far_it_is_and_where_everything_is(story):
    assert re.search(rf"x0_pretrain: .* \d+/{NANO['pretrain_steps']} \d+% \d+:\d\d left", story.killed.text + story.failed.text)
    assert "x1_run seed 1: done" in story.finished.text
    for folder in ["figures", "results", "notebooks"]: assert f" {RUN}/{folder}\n" in story.finished.text


def test_every_table_holds_the_base_and_every_seed_and_says_where_it_comes_from(story):
    for name in TABLES:
        df, origin = read_parquet(story.run/f"results/{name}.parquet"), read_provenance(story.run/f"results/{name}.parquet")
        assert sorted(set(df.seed)) == [s for s in SEEDS if s >= 0 or name != "x1_training_log"]
        assert origin["preset"] == "nano" and origin["commit"]
        assert preset_params(ROOT/"nbs/experiments/x1_run.ipynb", "nano").items() <= json.loads(origin["parameters"]).items()
    assert len(read_parquet(story.run/"results/x1_p_correct.parquet")) == NANO["n_eval"] * len(SEEDS)


def test_what_a_run_records_of_its_answer_trees_agrees_with_exact_p(story):
    p, listed, exact = (read_parquet(story.run/f"results/{t}.parquet") for t in ("x1_p_correct", "x1_completions", "x1_exact"))
    by = listed.groupby(["seed", "prompt"])
    assert (by.p.sum() + by.remainder.first() - 1).abs().max() < 1e-5 and listed.p.min() >= 1e-4
    right = listed[listed.finished].merge(p, left_on=["seed", "prompt", "completion"], right_on=["seed", "prompt", "answer"])
    assert len(right) and (right.p_x - right.p_y).abs().max() < 1e-5
    both = exact.merge(p, on=["seed", "prompt"])
    assert len(both) == len(p) and (both.accepted_high > both.p - 1e-5).all()
    for q in ("entropy", "length", "past_limit", "accepted"): assert (exact[f"{q}_low"] <= exact[f"{q}_high"] + 1e-12).all()


def test_every_analysis_ran_and_drew(story):
    assert {p.stem for p in (story.run/"notebooks").glob("*.ipynb")} == {e for e in EXPERIMENTS if e != "x1_run"} | {f"x1_run_{seed}" for seed in SEEDS}
    assert not list((story.run/"notebooks").glob("*.status"))
    figures = {p.name for p in (story.run/"figures").iterdir() if p.stat().st_size > 0}
    pictures = {f.removesuffix(".png") for f in figures if f.endswith(".png")}
    assert pictures and pictures == {f.removesuffix(".svg") for f in figures if f.endswith(".svg")}


def test_a_second_run_does_nothing(story): assert story.again.rc == 0 and "Nothing to be done" in story.again.text


def test_the_same_seed_twice_gives_identical_files(story):
    elsewhere = story.tree/"runs/elsewhere"
    command = [sys.executable, "-m", "tiny_rlvr.workflow", "run", "nbs/experiments/x1_run.ipynb", "-o", "runs/elsewhere/x1_run.ipynb", "--preset", "nano",
               "-p", "results_dir", f"{RUN}/results", "-p", "run_dir", "runs/elsewhere", "-p", "seed", "0"]
    done = finish(start(story.tree, "env", "OMP_NUM_THREADS=1", *command))
    assert done.rc == 0, done.text
    assert files(elsewhere/"seeds/0") == story.after_failure[0]


def test_a_killed_and_resumed_pretraining_gives_the_same_file_as_one_that_ran_through(story):
    command = [sys.executable, "-m", "tiny_rlvr.workflow", "run", "nbs/experiments/x0_pretrain.ipynb", "-o", "runs/elsewhere/x0_pretrain.ipynb", "--preset", "nano",
               "-p", "results_dir", "runs/elsewhere/results", "-p", "run_dir", "runs/elsewhere"]
    done = finish(start(story.tree, "env", "OMP_NUM_THREADS=2", "OMP_WAIT_POLICY=PASSIVE", *command))
    assert done.rc == 0, done.text
    assert files(story.tree/"runs/elsewhere/results")[SUBSTRATE] == files(story.run/"results")[SUBSTRATE]


# From here on the copy is edited, and put back.

@pytest.fixture
def edited(story):
    "Edit files of the copy; afterwards they are as they were, but with new times."
    before = {}
    def edit(name, change):
        path = story.tree/name
        before.setdefault(path, path.read_text())
        path.write_text(change(path.read_text()))
        assert path.read_text() != before[path]
        return story.tree
    yield edit
    for path, text in before.items(): path.write_text(text)


def change_cell(kind, add):
    "Change the last cell of a kind."
    def change(text):
        nb = json.loads(text)
        cell = [c for c in nb["cells"] if c["cell_type"] == kind][-1]
        cell["source"] = add("".join(cell["source"]))
        return json.dumps(nb, indent=1)
    return change


def test_a_prose_edit_reruns_nothing(edited):
    for name in EXPERIMENTS:
        edited(f"nbs/experiments/{name}.ipynb", change_cell("markdown", lambda source: source + " And more."))
        edited(f"nbs/experiments/{name}.ipynb", change_cell("code", lambda source: source + " # a comment"))
    edited("tiny_rlvr/vocab.py", lambda text: text + "\n# a comment\n")
    tree = edited("tiny_rlvr/workflow.py", lambda text: text + "\nRUNNER = 1\n") # no notebook imports it
    assert planned(tree) == []


def test_published_outputs_rerun_nothing(story):
    done = finish(start(story.tree, sys.executable, "-m", "tiny_rlvr.workflow", "publish", "--preset", "nano"))
    assert done.rc == 0, done.text
    for name in EXPERIMENTS:
        cells = json.loads((story.tree/f"nbs/experiments/{name}.ipynb").read_text())["cells"]
        assert sum(bool(c.get("outputs")) for c in cells) > 0 and not any("injected-parameters" in c["metadata"].get("tags", []) for c in cells)
    assert planned(story.tree) == []


def test_an_edit_of_one_run_reruns_the_runs_and_what_follows(edited):
    tree = edited("nbs/experiments/x1_run.ipynb", change_cell("code", lambda source: source + "\n1 + 1"))
    assert planned(tree) == sorted(["x1_run"] * len(SEEDS) + ["collect", *ANALYSES])


def test_an_edit_of_an_analysis_reruns_it_alone(edited):
    tree = edited("nbs/experiments/x1_signal.ipynb", change_cell("code", lambda source: source + "\n1 + 1"))
    assert planned(tree) == ["x1_signal"]


def test_an_edit_of_the_plots_draws_again_and_trains_nothing(edited):
    tree = edited("tiny_rlvr/plots.py", lambda text: text + "\nNEW = 1\n")
    jobs = planned(tree)
    assert {"x1_analysis", "x1_terrain"} <= set(jobs) <= set(ANALYSES)


def test_an_edit_of_the_lowest_module_reruns_everything(edited):
    tree = edited("tiny_rlvr/vocab.py", lambda text: text + "\nNEW = 1\n")
    assert planned(tree) == sorted(["x0_pretrain"] + ["x1_run"] * len(SEEDS) + ["collect", *ANALYSES])


def test_another_parameter_reruns_what_has_it(edited):
    tree = edited("config/nano.yaml", lambda text: re.sub(r"^updates: .*", "updates: 7", text, flags=re.M))
    assert planned(tree) == sorted(["x1_run"] * len(SEEDS) + ["collect", *ANALYSES])


def test_one_more_seed_runs_one_more_seed(edited):
    tree = edited("config/nano.yaml", lambda text: re.sub(r"^n_seeds: .*", f"n_seeds: {NANO['n_seeds'] + 1}", text, flags=re.M))
    assert planned(tree) == sorted(["x1_run", "collect", *ANALYSES])


def test_a_mistake_in_what_is_asked_is_told_before_anything_runs(story):
    for args, message in [(["run", "nbs/experiments/x1_run.ipynb", "-o", "x.ipynb", "--preset", "huge"], "preset must be one of mini, nano, paper (got 'huge')"),
                          (["run", "nbs/experiments/x1_run.ipynb", "-o", "x.ipynb", "-p", "sed", "3"], "has no parameter 'sed'"),
                          (["run", "nbs/experiments/absent.ipynb", "-o", "x.ipynb"], "absent.ipynb"),
                          (["collect", RUN, "elsewhere", "--n-seeds", "9"], "seeds/2/x1_p_correct.parquet is missing: `make reproduce PRESET=nano` makes it")]:
        done = finish(start(story.tree, sys.executable, "-m", "tiny_rlvr.workflow", *args))
        assert done.rc == 2 and message in done.text and "Traceback" not in done.text, done.text


# `make demystify`, on the same substrate.

@pytest.fixture(scope="module")
def demystified(story):
    story.demystified = finish(reproduce(story.tree, "demystify"))
    return story


def test_each_question_gets_a_table_of_every_seed_and_figures_and_ends_with_claims(demystified):
    assert demystified.demystified.rc == 0, demystified.demystified.text
    figures = {p.name for p in (demystified.run/"figures").iterdir()}
    for name in DEMYSTIFY:
        df, origin = (read(demystified.run/f"results/{name}.parquet") for read in (read_parquet, read_provenance))
        assert set(df.seed) - {-1} == set(range(NANO["arm_seeds"])) and origin["preset"] == "nano"
        assert any(f.startswith(name[:3]) and f.endswith(".svg") for f in figures) and f"{name[:2]}_claims.csv" in figures
        cells = json.loads((demystified.run/f"notebooks/{name}.ipynb").read_text())["cells"]
        assert any("does it hold?" in "".join(o.get("data", {}).get("text/markdown", "")) for c in cells for o in c.get("outputs", []))


def test_a_seed_that_is_there_is_used_again_and_gives_the_same_when_it_is_not(demystified):
    folder = demystified.run/"d1_coverage"
    before, kept = {seed: read_parquet(folder/f"{seed}.parquet") for seed in (0, 1)}, (folder/"0.parquet").stat().st_mtime_ns
    (folder/"1.parquet").unlink(); (demystified.run/"done/d1_coverage").unlink()
    done = finish(reproduce(demystified.tree, "demystify"))
    assert done.rc == 0 and re.findall(r"^(\w+): started", done.text, re.M) == ["d1_coverage"], done.text
    assert (folder/"0.parquet").stat().st_mtime_ns == kept
    assert read_parquet(folder/"1.parquet").equals(before[1]) and not before[0].p.equals(before[1].p)


def test_a_better_picture_trains_no_seed_again(demystified, edited):
    seeds = {p: p.stat().st_mtime_ns for p in (demystified.run/"d1_coverage").iterdir()}
    edited("tiny_rlvr/plots.py", lambda text: text + "\nNEW = 1\n")
    done = finish(reproduce(demystified.tree, f"{RUN}/done/d1_coverage"))
    assert done.rc == 0 and "d1_coverage: done" in done.text, done.text
    assert {p: p.stat().st_mtime_ns for p in seeds} == seeds
