"Claims about the repository: what is written in two places says the same in both."
import ast, configparser, json, re, shutil, subprocess, sys
from pathlib import Path
import pytest, yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tiny_rlvr.params import check_params
from tiny_rlvr.workflow import DEMYSTIFY, analyses, imported, load_preset, notebook_params, readme_text

ROOT = Path(__file__).parent.parent
LIBRARY = sorted((ROOT/"nbs").glob("*.ipynb"))
EXPERIMENTS = sorted((ROOT/"nbs/experiments").glob("*.ipynb"))
PRESETS = sorted((ROOT/"config").glob("*.yaml"))
SETTINGS = configparser.ConfigParser(delimiters=["="])
SETTINGS.read(ROOT/"settings.ini")
each_experiment = pytest.mark.parametrize("notebook", EXPERIMENTS, ids=lambda p: p.stem)
each_preset = pytest.mark.parametrize("preset", [p.stem for p in PRESETS])


def code_cells(notebook): return ["".join(c["source"]) for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]


def module_of(notebook):
    found = re.findall(r"^#\| *default_exp (\w+)", "\n".join(code_cells(notebook)), re.M)
    return found[0] if found else None


MODULES = {module_of(nb): nb for nb in LIBRARY if module_of(nb)}


def imports(module): return imported(ast.parse((ROOT/"tiny_rlvr"/f"{module}.py").read_text()))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    "A copy of the repository, cleaned and exported afresh."
    tree = tmp_path_factory.mktemp("export")/"repo"
    tree.mkdir()
    for name in ["settings.ini", "setup.py", "pyproject.toml", "README.md", "LICENSE"]: shutil.copy(ROOT/name, tree)
    shutil.copytree(ROOT/"nbs", tree/"nbs", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    for command in ["nbdev_clean", "nbdev_export"]:
        done = subprocess.run([Path(sys.executable).parent/command], cwd=tree, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return tree


def test_the_library_is_what_the_notebooks_export(exported):
    def sources(root): return {p.name: p.read_text() for p in (root/"tiny_rlvr").glob("*.py")}
    fresh, committed = sources(exported), sources(ROOT)
    assert sorted(committed) == sorted(fresh), "a module without its notebook, or the other way round: run nbdev_export"
    for name in fresh: assert committed[name] == fresh[name], f"tiny_rlvr/{name} differs from its notebook: run nbdev_export"


def test_the_notebooks_are_clean(exported):
    for nb in [*LIBRARY, *EXPERIMENTS]:
        assert nb.read_bytes() == (exported/nb.relative_to(ROOT)).read_bytes(), f"{nb.relative_to(ROOT)}: run nbdev_clean"


def test_a_module_imports_only_from_lower_numbers():
    number = {module: int(nb.name[:2]) for module, nb in MODULES.items()}
    wrong = [(m, i) for m in MODULES for i in imports(m) if not (number[i] < number[m])]
    assert not wrong


def test_plots_draws_without_a_model():
    todo, seen = ["plots"], set()
    while todo:
        module = todo.pop()
        if module not in seen: todo += imports(module)
        seen.add(module)
    assert not seen & {"model", "pretrain", "rollout", "grpo", "exact_eval"}


def test_the_readme_is_what_the_index_says():
    assert (ROOT/"README.md").read_text() == readme_text(ROOT/"nbs/index.ipynb"), "run make readme"


def test_what_the_readme_links_to_exists():
    links = re.findall(r"(?:\]\(|src=\")([^)\"#]+)", (ROOT/"README.md").read_text())
    missing = [link for link in links if "://" not in link and not (ROOT/link).exists()]
    assert not missing


def rules_of(notebook):
    "Name -> rule of the notebook's check_params call: its cells are run up to there."
    namespace, found = {}, {}
    for cell in code_cells(notebook):
        tree = ast.parse(cell)
        calls = any(isinstance(n, ast.Call) and getattr(n.func, "id", "") == "check_params" for n in ast.walk(tree))
        if calls: namespace["check_params"] = lambda values, **rules: found.update(rules)
        exec(compile(tree, str(notebook), "exec"), namespace)
        if calls: return found
    raise AssertionError(f"{notebook.stem} has no cell with check_params")


@each_experiment
def test_every_parameter_is_used_and_checked(notebook):
    trees = [ast.parse(c) for c in code_cells(notebook)]
    used = {n.id for t in trees for n in ast.walk(t) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    params, rules = notebook_params(notebook), rules_of(notebook)
    assert set(params) - used == set(), "parameters that nothing uses"
    assert set(rules) == set(params), "parameters that check_params doesn't know, or the other way round"
    check_params(params, **rules)
    for name, value in params.items(): # as papermill hands on what it can't read
        with pytest.raises(ValueError, match=f"^{name} must be .*got"): check_params({**params, name: "" if isinstance(value, str) else str(value)}, **rules)


@each_experiment
def test_an_experiment_exports_nothing_and_is_part_of_the_workflow(notebook):
    assert not any(line.startswith(("#| export", "#|export", "#| default_exp")) for c in code_cells(notebook) for line in c.splitlines())
    assert notebook in analyses() or notebook.stem in DEMYSTIFY or f'notebook("{notebook.stem}")' in (ROOT/"Snakefile").read_text()


@each_preset
def test_every_name_in_a_preset_is_a_parameter_of_its_kind(preset):
    defaults = {"n_seeds": 30} # the Snakefile's own
    for nb in EXPERIMENTS:
        for name, value in notebook_params(nb).items():
            defaults.setdefault(name, value)
    for name, value in load_preset(preset).items():
        assert name in defaults, f"{name} is no notebook's parameter"
        if defaults[name] is not None:
            kinds = (int, float) if isinstance(defaults[name], float) else type(defaults[name])
            assert isinstance(value, kinds) and isinstance(value, bool) == isinstance(defaults[name], bool), f"{name}: {value!r} in place of {defaults[name]!r}"


@each_preset
def test_a_preset_sets_no_name_twice(preset):
    keys = re.findall(r"^(\w+):", (ROOT/"config"/f"{preset}.yaml").read_text(), re.M)
    assert len(keys) == len(set(keys))


def test_a_parameter_has_one_default_in_all_notebooks():
    seen = {}
    for nb in EXPERIMENTS:
        for name, value in notebook_params(nb).items():
            first = seen.setdefault(name, (value, nb.stem))
            assert first[0] == value, f"{name} is {value!r} in {nb.stem}, but {first[0]!r} in {first[1]}"


def test_every_requirement_has_a_pin_inside_its_range():
    pins = dict(line.split("==") for line in (ROOT/"constraints.txt").read_text().splitlines() if "==" in line)
    pins = {canonicalize_name(k): v for k, v in pins.items()}
    for key in ["requirements", "workflow_requirements", "dev_requirements", "bench_requirements"]:
        for requirement in map(Requirement, SETTINGS["DEFAULT"][key].split()):
            pin = pins.get(canonicalize_name(requirement.name))
            assert pin and pin in requirement.specifier, f"{requirement} is pinned to {pin}"


def test_the_conda_environment_writes_no_version_twice():
    dependencies = yaml.safe_load((ROOT/"environment.yml").read_text())["dependencies"]
    assert [d for d in dependencies if isinstance(d, str)] == ["python=3.11", "pip", "quarto"]
    assert dependencies[-1]["pip"] == ["--constraint constraints.txt", "--editable .[dev]"]
