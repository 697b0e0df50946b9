"Claims about what a user installs."
import configparser, importlib.metadata, subprocess, sys, zipfile
from pathlib import Path
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
SETTINGS = configparser.ConfigParser(delimiters=["="])
SETTINGS.read(ROOT/"settings.ini")


def closure(requirements):
    "The distributions that these requirements bring, themselves among them."
    todo, seen = list(map(Requirement, requirements)), set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})): continue
        try: more = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError: continue # another platform's
        seen.add(name)
        todo += map(Requirement, more)
    return seen


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    "The built wheel, unpacked."
    folder = tmp_path_factory.mktemp("wheel")
    source = folder/"source" # setuptools leaves a build folder where it builds
    subprocess.run(["cp", "-r", *[str(ROOT/f) for f in ["settings.ini", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "tiny_rlvr"]], str(source.mkdir() or source)], check=True)
    isolation = [] if sys.version_info >= (3, 12) else ["--no-build-isolation"] # up to 3.11 a virtual environment holds setuptools
    built = subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *isolation, "-w", folder, source], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    path, = folder.glob("*.whl")
    with zipfile.ZipFile(path) as z: z.extractall(folder/"site")
    return folder/"site"


def test_the_wheel_holds_every_module_and_the_licence(wheel):
    assert {p.name for p in (wheel/"tiny_rlvr").glob("*.py")} == {p.name for p in (ROOT/"tiny_rlvr").glob("*.py")}
    assert list(wheel.rglob("LICENSE"))
    assert not {p.name for p in wheel.iterdir()} - {"tiny_rlvr", f"tiny_rlvr-{SETTINGS['DEFAULT']['version']}.dist-info"}


def test_the_wheel_asks_for_what_settings_say(wheel):
    metadata = (next(wheel.glob("*.dist-info"))/"METADATA").read_text()
    asked = {canonicalize_name(Requirement(line.removeprefix("Requires-Dist: ")).name) for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line}
    assert asked == {canonicalize_name(Requirement(r).name) for r in SETTINGS["DEFAULT"]["requirements"].split()}
    assert f"Version: {SETTINGS['DEFAULT']['version']}" in metadata and "Requires-Python: >=3.11" in metadata


def test_the_wheel_works_without_the_workflow_and_development_packages(wheel, tmp_path):
    allowed = closure(SETTINGS["DEFAULT"]["requirements"].split()) | {"tiny-rlvr", "setuptools"}
    forbidden = {top for top, names in importlib.metadata.packages_distributions().items() if not {canonicalize_name(n) for n in names} & allowed}
    assert {"papermill", "snakemake", "yaml", "IPython", "nbdev", "transformers", "pytest", "hypothesis"} - {"yaml"} <= forbidden
    script = f"""
import sys, pkgutil, importlib
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {sorted(forbidden)!r}: raise ModuleNotFoundError(f"{{name}} is not installed", name=name)
sys.meta_path.insert(0, Forbid())
sys.path.insert(0, {str(wheel)!r})
import tiny_rlvr
assert tiny_rlvr.__file__.startswith({str(wheel)!r}), tiny_rlvr.__file__
for m in pkgutil.iter_modules(tiny_rlvr.__path__): importlib.import_module("tiny_rlvr." + m.name)
from tiny_rlvr.model import GPT, GPTConfig
from tiny_rlvr.exact_eval import answer_logprob
print(len(answer_logprob(GPT(GPTConfig(n_layer=1, n_head=2, d_model=16, d_ff=32), seed=0), ["387+456="], ["843"])))
from tiny_rlvr.workflow import load_preset, execute
try: execute({str(ROOT/'nbs/experiments/x1_run.ipynb')!r}, {str(tmp_path/'out.ipynb')!r})
except ImportError as e: print(e)
"""
    done = subprocess.run([sys.executable, "-I", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1", "papermill is needed to run notebooks: pip install 'tiny-rlvr[workflow]'"]
