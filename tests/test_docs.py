"""Claims about the documentation site, most of them made by a real browser: Debian's chromium, driven by playwright.

Where there is none they are skipped, with a word; TINY_RLVR_NEEDS_BROWSER=1 (as in .ci/run) makes that a failure. Screenshots for a person to look at are in runs/screenshots."""
import html.parser, importlib, inspect, json, os, re, shutil, subprocess, sys, threading
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urldefrag, urljoin
import numpy as np, pandas as pd, pytest, yaml
from tiny_rlvr import docs
from tiny_rlvr.exact_eval import pass_at_k
from tiny_rlvr.runs import TABLES, provenance, write_parquet
from tiny_rlvr.tasks import TARGET, Problem, eval_set

ROOT = Path(__file__).parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync".split()
SEEDS, N = 3, 60
SLOW = 60_000 # ms: a loaded machine is slow, and a page that never comes is a failure all the same


def made_up_results(folder):
    "Tables of made-up numbers, with 507+397 among the problems: killed by a dropped carry in seed 1."
    rng = np.random.default_rng(0)
    problems = [Problem.parse("507+397="), *eval_set(TARGET, N - 1, seed=0)]
    before = rng.beta(.5, 3, N)
    p = np.vstack([before, np.clip(before * rng.uniform(.5, 4, (SEEDS, N)), 0, .98)])
    p[:, 0] = .3, .8, 1e-6, .7
    p[:, 1] = 1e-5, .2, .1, .3 # revived
    wrong = [str(int(problems[0].answer) - 100), *[str(int(q.answer) + 1) for q in problems[1:]]]
    p_correct = pd.DataFrame([dict(prompt=q.prompt, answer=q.answer, seed=s - 1, p=p[s, i]) for s in range(SEEDS + 1) for i, q in enumerate(problems)])
    completions = pd.DataFrame([dict(seed=s - 1, prompt=q.prompt, completion=c, p=x, finished=True, remainder=.1) for s in range(SEEDS + 1) for i, q in enumerate(problems)
                                for c, x in ((q.answer, p[s, i]), (wrong[i], .9 * (1 - p[s, i])))])
    for name, columns in TABLES.items():
        df = dict(x1_p_correct=p_correct, x1_completions=completions).get(name, pd.DataFrame({c: [0] for c in columns}))
        write_parquet(df, folder/f"{name}.parquet", provenance(dict(preset="mini")))
    a, b = (x.ravel() for x in np.meshgrid(np.arange(100, 1000), np.arange(100, 1000)))
    for seed, name, q in (-1, "base", .04), (0, "0", .6): write_parquet(pd.DataFrame(dict(seed=seed, a=a, b=b, p=np.where((a == 507) & (b == 398), q, .1))), folder/f"x1_census_{name}.parquet", provenance(dict(preset="mini")))
    return SimpleNamespace(p=p, prompts=[q.prompt.removesuffix("=") for q in problems])


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    "The site, built without quarto in a copy of the repository in which x1_explore ran on made-up results; and its server."
    tree = tmp_path_factory.mktemp("docs")/"repo"
    for folder in ["nbs", "tiny_rlvr", "config", "figures"]: shutil.copytree(ROOT/folder, tree/folder, ignore=shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__"))
    for name in ["settings.ini", "setup.py", "pyproject.toml", "README.md", "LICENSE", "Makefile"]: shutil.copy(ROOT/name, tree)
    for file in ["benchmarks", "results"]:
        if (ROOT/file).is_dir(): (tree/file).symlink_to(ROOT/file)
    path = os.pathsep.join(d for d in os.environ["PATH"].split(os.pathsep) if not (Path(d)/"quarto").exists())
    env = os.environ | dict(PYTHONPATH=str(tree), PATH=path, OMP_NUM_THREADS="1")
    made_up = made_up_results(tree/"runs/made_up/results")
    script = """
import sys
from tiny_rlvr.workflow import execute, publish_notebook
nb = "nbs/experiments/x1_explore.ipynb"
assert execute(nb, "runs/made_up/x1_explore.ipynb", dict(preset="mini", results_dir="runs/made_up/results", figures_dir="figures/mini", n_answers=1))
publish_notebook(nb, "runs/made_up/x1_explore.ipynb")
"""
    for command in [["-c", script], ["-m", "tiny_rlvr.docs", "build"]]:
        done = subprocess.run([sys.executable, *command], cwd=tree, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    server = docs.server(tree/"_docs")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield SimpleNamespace(folder=tree/"_docs", url=f"http://127.0.0.1:{server.server_port}/", pages=sorted(p.relative_to(tree/"_docs").as_posix() for p in (tree/"_docs").rglob("*.html")),
                          said=done.stdout, made_up=made_up)
    server.shutdown()


# What needs no browser: the files

class Parsed(html.parser.HTMLParser):
    "The ids, links, pictures and other requests of a page."
    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.pictures, self.asks = set(), [], [], []
        self.feed(text)
    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        if "id" in a: self.ids.add(a["id"])
        if tag == "a" and a.get("href"): self.links.append(a["href"])
        if tag == "img": self.pictures.append(a)
        if tag in ("link", "script", "img") and (url := a.get("src") or a.get("href")): self.asks.append(url)


@pytest.fixture(scope="session")
def parsed(site): return {page: Parsed((site.folder/page).read_text()) for page in site.pages}


def test_every_notebook_is_in_the_sidebar_once_and_has_a_page(site):
    def paths(x): return [x] if isinstance(x, str) else [p for e in x for p in paths(e)] if isinstance(x, list) else paths(x.get("contents", [])) if isinstance(x, dict) else []
    listed = paths(yaml.safe_load((ROOT/"nbs/sidebar.yml").read_text())["website"]["sidebar"]["contents"])
    notebooks = {p.relative_to(ROOT/"nbs").as_posix() for p in (ROOT/"nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts}
    assert sorted(listed) == sorted(notebooks)
    assert {p for p in site.pages if not p.startswith("figures/")} == {re.sub(r"^\d+[a-z0-9]*_", "", n).replace(".ipynb", ".html") for n in notebooks}


def test_no_internal_link_or_anchor_is_broken(site, parsed):
    broken = []
    for page, p in parsed.items():
        for link in [*p.links, *p.asks]:
            if re.match(r"[a-z]+:", link): continue
            target, anchor = urldefrag(urljoin("/" + page, link))
            target = unquote(target).lstrip("/") or "index.html"
            if not (site.folder/target).exists(): broken.append((page, link))
            elif anchor and target in parsed and unquote(anchor) not in parsed[target].ids and not target.endswith("explore.html"): broken.append((page, link))
    assert not broken


def test_no_link_goes_to_the_site_in_the_world(parsed):
    assert not [(page, link) for page, p in parsed.items() for link in p.links if "tiny-rlvr.github.io" in link]


def test_every_public_name_has_signature_help_and_source(site):
    wanted = {p.stem for p in (ROOT/"tiny_rlvr").glob("[a-z]*.py")}
    for module in wanted:
        m, text = importlib.import_module(f"tiny_rlvr.{module}"), (site.folder/f"{module}.html").read_text()
        for name in getattr(m, "__all__", []):
            thing = getattr(m, name)
            if getattr(thing, "__module__", None) != m.__name__ or not (inspect.isfunction(thing) or inspect.isclass(thing)): continue
            start = text.find(f'id="{name.lower()}"')
            if not re.search(rf"^(def|class) {name}\b", (ROOT/f"tiny_rlvr/{module}.py").read_text(), re.M): # assigned: its source is shown
                assert name in text
                continue
            assert start >= 0, f"{module}.{name} is not documented"
            part = text[start:start + 20_000]
            assert thing.__doc__, f"{module}.{name} has no help"
            assert f"{name}</span>" in part[part.find("<pre"):part.find("</pre>")], f"{module}.{name} has no signature"
            assert re.search(rf"tiny_rlvr/{module}\.py#L\d+", text[max(0, start - 2000):start + 2000]), f"{module}.{name} has no link to its source"
        assert "<summary>Source</summary>" in text, f"{module} shows no source"


def test_names_in_backticks_link(parsed):
    assert any(link.endswith("exact_eval.html#pass_at_k") for link in parsed["start_here.html"].links)
    assert "../churn.html#killed" in parsed["experiments/x1_explore.html"].links


def test_each_line_of_the_glossary_says_where_it_is_computed(site):
    items = re.findall(r"<li><strong>.*?</li>", (site.folder/"glossary.html").read_text(), re.S)
    assert len(items) > 40
    assert not [i for i in items if not re.search(r'href="(?!https?:)[^"]+\.html', i)]


def test_every_picture_has_alternative_text(parsed):
    bare = [(page, a.get("src", "")[:60]) for page, p in parsed.items() for a in p.pictures if not (a.get("alt") or "").strip()]
    assert not bare


def test_the_site_is_small_and_told(site):
    assert re.search(r"\d+ pages, \d+ MB, \d+ s", site.said)
    assert sum(p.stat().st_size for p in site.folder.rglob("*") if p.is_file()) < 60e6


# What a browser says

@pytest.fixture(scope="session")
def browser():
    if CHROMIUM is None:
        message = "no chromium here (Debian: apt-get install chromium): the site is not looked at"
        if os.environ.get("TINY_RLVR_NEEDS_BROWSER"): pytest.fail(message)
        pytest.skip(message)
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS) # with a new profile, which goes with it
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, site):
    "Open pages in tabs that write down what goes wrong."
    contexts = []
    def open(path, width=1280, scheme="light"):
        context = browser.new_context(viewport=dict(width=width, height=900), color_scheme=scheme, reduced_motion="reduce") # colours are read while nothing moves
        context.set_default_timeout(SLOW)
        contexts.append(context)
        page = context.new_page()
        page.errors, page.elsewhere = [], []
        page.on("console", lambda m: page.errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: page.errors.append(str(e)))
        page.on("request", lambda r: page.elsewhere.append(r.url) if not r.url.startswith((site.url, "data:", "blob:", "file:")) else None)
        page.goto(site.url + path)
        if "explore.html" in path and path.startswith("figures"): page.wait_for_function("window.explore && window.explore.ready")
        return page
    yield open
    for c in contexts: c.close()


def test_every_page_loads_without_an_error_or_a_request_elsewhere_and_fits_a_phone(site, visit):
    page, wrong = visit(site.pages[0], width=390), []
    maths = 0
    for path in site.pages:
        page.errors.clear(); page.elsewhere.clear()
        page.goto(site.url + path)
        page.wait_for_load_state("load")
        seen = page.evaluate("""() => ({wide: document.documentElement.scrollWidth, katex: document.querySelectorAll('.katex').length, bad: document.querySelectorAll('.katex-error').length,
            raw: [...document.querySelectorAll('.math')].filter(e => !e.querySelector('.katex')).length})""")
        maths += seen["katex"]
        if page.errors or page.elsewhere or seen["wide"] > 390 or seen["bad"] or seen["raw"]: wrong.append((path, page.errors[:], page.elsewhere[:], seen))
    assert not wrong
    assert maths > 20


def test_search_for_pass_at_k_finds_its_page(visit):
    for width in (1280, 390):
        page = visit("index.html", width)
        if not page.locator(".smalldocs-search input:visible").count(): page.locator(".navbar-toggler").click()
        box = page.locator(".smalldocs-search input:visible").first
        box.fill("pass_at_k")
        results = page.locator(".smalldocs-search-results.show a.search-result")
        results.first.wait_for(state="visible")
        hrefs = results.evaluate_all("links => links.map(a => a.getAttribute('href'))")
        assert any("exact_eval.html" in h for h in hrefs[:3]), hrefs
        spot = results.first.bounding_box() # on top of everything else, where a finger would touch it
        assert page.evaluate("([x, y]) => !!document.elementFromPoint(x, y)?.closest('a.search-result')", [spot["x"] + 20, spot["y"] + 10])
        results.first.click()
        page.wait_for_url("**/*.html*")


CONTRAST = """() => {
  const pixel = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true}); // any colour that CSS can say
  const rgb = s => { pixel.clearRect(0, 0, 1, 1); pixel.fillStyle = s; pixel.fillRect(0, 0, 1, 1); const [r, g, b, a] = pixel.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255] };
  const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3]));
  const lum = c => { const f = v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; return .2126 * f(c[0]) + .7152 * f(c[1]) + .0722 * f(c[2]) };
  const ground = e => { const stack = []; for (; e; e = e.parentElement) { const b = rgb(getComputedStyle(e).backgroundColor); stack.push(b); if (b[3] === 1) break } let c = [255, 255, 255]; for (const b of stack.reverse()) c = over(b, c); return c };
  const bad = new Map();
  for (const w = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT); w.nextNode();) {
    const e = w.currentNode.parentElement, s = getComputedStyle(e), r = e.getBoundingClientRect();
    if (!w.currentNode.data.trim() || !r.width || s.visibility === "hidden" || s.opacity === "0" || e.closest("script, style, svg, [aria-hidden=true], .katex-mathml, option, :disabled")) continue;
    const g = ground(e), t = over(rgb(s.color), g), a = lum(t), b = lum(g), ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    const large = parseFloat(s.fontSize) >= 24 || (parseFloat(s.fontSize) >= 18.66 && +s.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5) - .01) bad.set(e.tagName + "." + e.className + " " + s.color + " on " + g.map(Math.round), ratio.toFixed(2) + " " + w.currentNode.data.trim().slice(0, 40));
  }
  return [...bad];
}"""
LOOKED_AT = ["index.html", "start_here.html", "exact_eval.html", "tasks.html", "experiments/x1_churn.html", "glossary.html", "figures/mini/explore.html"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground_as_wcag_aa_asks(visit, scheme):
    bad = {path: found for path in LOOKED_AT if (found := visit(path, scheme=scheme).evaluate(CONTRAST))}
    assert not bad


def test_keyboard_focus_is_seen(visit):
    for path in ["index.html", "figures/mini/explore.html"]:
        page = visit(path)
        unseen = []
        for _ in range(14):
            page.keyboard.press("Tab")
            seen = page.evaluate("""() => { let e = document.activeElement; while (e.shadowRoot?.activeElement) e = e.shadowRoot.activeElement; const s = getComputedStyle(e); return [e.tagName, e.className, e === document.body || (s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) > 0) || s.boxShadow !== 'none'] }""")
            if not seen[2]: unseen.append(seen)
        assert not unseen


# The interactive page

EXPLORE = "figures/mini/explore.html"


def at(page, i):
    "Where problem `i` is drawn, in pixels of the window."
    return page.evaluate("""i => { const m = n => Bokeh.documents.map(d => d.get_model_by_name(n)).find(x => x), s = m("points").data, j = [...s.i].indexOf(i);
        const v = Bokeh.index.get_by_id(m("scatter").id), frame = v.frame ?? v.frame_view, box = v.el.getBoundingClientRect();
        return [box.x + frame.x_scale.compute(s.x[j]), box.y + frame.y_scale.compute(s.y[j])] }""", i)


def test_a_reader_gets_from_home_to_what_happened_to_a_problem_in_four_clicks(visit):
    page = visit("index.html")
    page.get_by_role("link", name="Explore", exact=True).first.click()                  # 1
    page.get_by_role("link", name="Open the page").click()                              # 2
    page.wait_for_function("window.explore && window.explore.ready")
    page.get_by_label("Find a problem").click()                                         # 3
    page.keyboard.type("507+397")
    page.get_by_role("button", name="Find").click()                                     # 4
    text = page.locator("#problem").inner_text()
    assert "507+397 = 904" in text and "killed in 1 of 3 seeds" in text and "dropped carry" in text and "before 0.300" in text
    assert not page.errors and not page.elsewhere


def test_pointing_at_a_dot_shows_the_problem_and_p_in_every_seed(visit, site):
    page = visit(EXPLORE)
    page.locator("#status").select_option("revived") # one dot alone
    page.locator("#h-scatter").scroll_into_view_if_needed()
    x, y = at(page, 1)
    page.mouse.move(x - 3, y - 3); page.mouse.move(x, y, steps=4)
    page.locator("#tip").wait_for(state="visible")
    tip = page.locator("#tip").inner_text()
    assert site.made_up.prompts[1] in tip and "revived in 3 of 3 seeds" in tip
    assert all(f"{p:.3f}" in tip for p in site.made_up.p[1:, 1])
    page.mouse.click(x, y)
    page.wait_for_function("window.explore.chosen === 1")
    assert site.made_up.prompts[1] in page.locator("#h-problem").inner_text()
    page.mouse.move(5, 5)
    page.locator("#tip").wait_for(state="hidden")


def test_filters_keep_the_problems_they_say(visit, site):
    page = visit(EXPLORE)
    p, prompts = site.made_up.p, site.made_up.prompts
    def shown(): return page.evaluate("window.explore.shown")
    assert shown() == list(range(N))
    page.locator("#status").select_option("killed")
    assert shown() == [i for i in range(N) if p[0, i] > .01 and (p[1:, i] < 1e-4).any()] and 0 in shown()
    page.locator("#status").select_option("")
    for wanted in "0123":
        page.locator("#carries").select_option(wanted)
        columns = [[int(a) % 10**c + int(b) % 10**c >= 10**c for c in (1, 2, 3)] for a, b in (q.split("+") for q in prompts)]
        assert shown() == [i for i in range(N) if sum(columns[i]) == int(wanted)]
    page.locator("#carries").select_option("")
    page.locator("#zeros").select_option("answer")
    assert shown() == [i for i in range(N) if "0" in str(sum(map(int, prompts[i].split("+"))))]
    assert f"{len(shown())} of {N} problems shown" in page.locator("#count").inner_text()


def test_the_slider_gives_pass_at_k_of_the_shown_problems(visit, site):
    page = visit(EXPLORE)
    def says(): return page.locator("#atk").inner_text()
    before = says()
    page.locator("#k").focus()
    for _ in range(24): page.keyboard.press("ArrowRight")
    assert page.locator("#kvalue").inner_text() == "64" and says() != before
    p = site.made_up.p.astype(np.float32)
    assert f"{pass_at_k(p[0], 64).mean():.1%} before, {pass_at_k(p[1:], 64).mean():.1%} after" in says()
    page.locator("#zeros").select_option("answer")
    shown = page.evaluate("window.explore.shown")
    assert f"{pass_at_k(p[0, shown], 64).mean():.1%} before" in says()


def test_a_problem_that_was_not_drawn_has_its_census_and_leads_to_its_neighbours(visit):
    page = visit(EXPLORE)
    page.get_by_label("Find a problem").fill("507+398")
    page.keyboard.press("Enter")
    text = page.locator("#found").inner_text()
    assert "not one of the 60 problems" in text
    said = re.search(r"507\+398 = 905: p before about ([\d.]+), after in seed 0 about ([\d.]+), as the census", text)
    assert abs(float(said[1]) - .04) < .003 and abs(float(said[2]) - .6) < .02
    page.locator("#found button").first.click()
    assert "507+397 = 904" in page.locator("#h-problem").inner_text()
    page.get_by_label("Find a problem").fill("seven and five")
    page.keyboard.press("Enter")
    assert "is no problem" in page.locator("#found").inner_text()


def test_the_page_works_as_a_file_of_its_own(browser, site, tmp_path):
    file = shutil.copy(site.folder/EXPLORE, tmp_path)
    page, asked = browser.new_page(), []
    page.set_default_timeout(SLOW)
    page.on("request", lambda r: asked.append(r.url))
    page.goto(f"file://{file}#507+397")
    page.wait_for_function("window.explore && window.explore.ready")
    assert page.locator("#h-problem").inner_text() == "507+397 = 904"
    assert [u for u in asked if not u.startswith(("file:", "data:", "blob:"))] == []
    page.close()


@pytest.mark.parametrize("file", sorted((ROOT/"figures").rglob("explore.html")), ids=lambda p: p.parent.name)
def test_a_shipped_page_to_explore_is_small(file): assert 1e6 < file.stat().st_size < 6e6


def test_the_shipped_page_tells_what_happened_to_any_sum(browser):
    p = [float(df.query("a == 507 and b == 397").p.iloc[0]) for name in ("base", "0") for df in [pd.read_parquet(ROOT/f"results/x1_census_{name}.parquet")]]
    page = browser.new_page()
    page.set_default_timeout(SLOW)
    page.goto(f"file://{ROOT/'figures/explore.html'}")
    page.wait_for_function("window.explore && window.explore.ready")
    page.get_by_label("Find a problem").fill("507+397")
    page.keyboard.press("Enter")
    said = re.search(r"507\+397 = 904: p before about ([\d.e-]+), after in seed 0 about ([\d.e-]+), as the census", page.locator("#found").inner_text())
    for of_page, exact in zip(map(float, said.groups()), p): assert abs(np.log(of_page / (1 - of_page)) - np.log(exact / (1 - exact))) < .15
    page.close()


def test_screenshots_for_a_person_to_look_at(visit, site):
    folder = ROOT/"runs/screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    for width in (1280, 390):
        for scheme in ("light", "dark"):
            page = visit("index.html", width, scheme)
            for path in ["index.html", "start_here.html", "exact_eval.html", "experiments/x1_churn.html", EXPLORE]:
                page.goto(site.url + path)
                if path == EXPLORE: page.wait_for_function("window.explore && window.explore.ready")
                file = folder/f"{Path(path).stem}_{width}_{scheme}.png"
                page.screenshot(path=file, full_page="explore" in path)
                assert file.stat().st_size > 10_000
