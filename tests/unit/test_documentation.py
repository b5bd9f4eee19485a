"""Links of pages have targets, generated pages are current, and the site is complete without external requests."""

from __future__ import annotations

import ast
import importlib
import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedloom
from fedloom.errors import ExitCode

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FOLDERS = ("", "docs/**/", "charts/**/", "components/**/", "pipelines/**/", "tests/**/")
PAGES = sorted(page for folder in FOLDERS for page in ROOT.glob(f"{folder}*.md"))
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)|^\[[^]]+\]:\s*(\S+)", re.MULTILINE)
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2", re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the ids of a page's headings, as code hosts and the site generate them."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        count = sum(1 for one in found if one == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", one))
        found.add(f"{slug}-{count}" if count else slug)
    return found


def broken(page: Path) -> Iterator[str]:
    for first, second in LINK.findall(re.sub(r"`[^`\n]*`", "", prose(page))):
        link = first or second
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or ROOT not in (target, *target.parents):
            yield f"{link}: nothing there"
        elif anchor and (target.suffix != ".md" or anchor not in anchors(target)):
            yield f"{link}: no such heading"


def test_every_link_of_a_page_has_a_target() -> None:
    assert {page: links for page in PAGES if (links := list(broken(page)))} == {}


def test_a_broken_link_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`: three\n[a](gone.md) [b](#one-two-three) [c](#four) ![d](../outside.svg)\n```\n[e](gone.md)\n```\n"
    )
    assert [line.split(":")[0] for line in broken(page)] == ["gone.md", "#four", "../outside.svg"]


def test_generated_pages_are_up_to_date() -> None:
    made = runpy.run_path(str(DOCS / "generate_reference.py"))
    for page, make in (("cli.md", "cli_page"), ("api.md", "api_page")):
        assert (DOCS / page).read_text(encoding="utf-8") == made[make](), "make docs"


def test_python_names_on_the_pages_exist() -> None:
    """Each block is complete Python, and its imports from FedLoom and every ``fedloom.name`` exist."""
    missing, looked = [], 0
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            if page.name == "api.md":  # signatures, generated from the code
                continue
            for node in ast.walk(ast.parse(block.replace("await ", ""), str(page))):
                named: list[tuple[str, str]] = []
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedloom":
                    named = [(node.module or "", alias.name) for alias in node.names]
                elif (
                    isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fedloom"
                ):
                    named = [("fedloom", node.attr)]
                looked += len(named)
                for module, name in named:
                    if not hasattr(importlib.import_module(module), name) and not find_spec(f"{module}.{name}"):
                        missing.append(f"{page.relative_to(ROOT)}: {module}.{name}")
    assert looked > 20
    assert missing == []


@pytest.fixture(scope="module")
def notebooks() -> dict[str, Any]:
    """Return the functions that write the tutorials' notebooks."""
    return runpy.run_path(str(DOCS / "generate_notebooks.py"))


def prints(source: str) -> bool:
    """Return whether a cell prints, or ends with a value that is not the result of a call for its effect."""
    tree = [node for node in ast.parse(source).body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    calls = [node.func for top in tree for node in ast.walk(top) if isinstance(node, ast.Call)]
    is_value = isinstance(tree[-1], ast.Expr) and not isinstance(tree[-1].value, ast.Call)
    return is_value or any(isinstance(call, ast.Name) and call.id == "print" for call in calls)


def test_the_notebooks_match_their_pages(notebooks: dict[str, Any]) -> None:
    for name in notebooks["PAGES"]:
        page, text = ((DOCS / "tutorials" / f"{name}.{end}").read_text(encoding="utf-8") for end in ("md", "ipynb"))
        outputs = notebooks["outputs_of"](json.loads(text))
        assert text == notebooks["as_text"](notebooks["notebook"](page, outputs)), "make docs"
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        assert [cell["source"] for cell in cells if "".join(cell["source"]) not in outputs] == [], "make notebooks"
        silent = [source for source, found in outputs.items() if not found and not source.startswith("%%")]
        assert [source for source in silent if prints(source)] == [], "make notebooks"
        assert not re.search(r"/tmp/|/home/|/root/|0x[0-9a-f]{8}", json.dumps(list(outputs.values())))
        assert len(text) < 200_000


def test_results_on_the_pages_are_those_of_the_notebooks(notebooks: dict[str, Any]) -> None:
    compared = 0
    for name in notebooks["PAGES"]:
        page, text = ((DOCS / "tutorials" / f"{name}.{end}").read_text(encoding="utf-8") for end in ("md", "ipynb"))
        outputs = notebooks["outputs_of"](json.loads(text))
        for block in notebooks["BLOCK"].finditer(page):
            if result := re.match(r"\n```\n(.*?)^```$", page[block.end() :], re.DOTALL | re.MULTILINE):
                lines = (line for output in outputs[block[2].strip("\n")] for line in output.get("text", ()))
                assert result[1] == "".join(lines), "copy the notebook's output"
                compared += 1
    assert compared >= 4


@pytest.mark.parametrize("page", ["how-to.md", "troubleshooting.md"])
def test_keys_options_and_codes_in_the_guides_exist(page: str) -> None:
    text = prose(DOCS / page)
    keys = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "keys").rglob("*.md"))
    options = (DOCS / "cli.md").read_text(encoding="utf-8")
    sections = "data|algorithm|federation|evaluation|runtime"
    named = set(re.findall(rf"(?:`|--set |--grid )(?:{sections})\.([\w.]+)[`=]", text))
    assert named
    assert {key for key in named if f"| `{key}` |" not in keys and f"| `{key}." not in keys} == set()
    found = set(re.findall(r"(?<![\w-])--[a-z-]+", text))
    assert {option for option in found if not re.search(rf"{option}(?![\w-])", options)} == set()
    codes = {int(code) for code in re.findall(r"(?:exit|ends with) (\d+)", text)}
    assert codes <= {1, *ExitCode}


def test_tests_named_on_pages_exist() -> None:
    named = {
        (path, name)
        for page in DOCS.rglob("*.md")
        for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?[`\[]", page.read_text(encoding="utf-8"))
    }
    assert ("tests/e2e/test_federation_on_cluster.py", "test_a_launcher_adopts_the_federation_of_a_killed_one") in named
    for path in sorted({path for path, _ in named}):
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert {name for other, name in named if other == path and name} <= there, path


MOST_ENTRIES = 12
"""Entries of a section of the site's navigation, which fit on a screen."""
WANTED = {
    "own csv": "data.html",
    "secure aggregation two hospitals": "tutorials/first-federation.html",
    "resume": "federation.html",
    "openfl": "coming-from.html",
    "pip install wheel": "install.html",
}
"""Pages that must be among the first three that the site's search finds, by query."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with the built site, whose warnings are errors."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        from mkdocs.commands.build import build
        from mkdocs.config import load_config

        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
        yield folder


@pytest.mark.exhaustive
@pytest.mark.group("site")
def test_the_site_is_complete_and_makes_no_external_requests(site: Path) -> None:
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    assert len(pages) > len(list(DOCS.rglob("*.md")))
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)")
    assert {url for text in pages.values() for url in loads.findall(text)} == set()


def sections(nav: Any) -> Iterator[list[Any]]:
    """Yield the entries of each section of the navigation, the sections themselves included."""
    if isinstance(nav, list):
        yield nav
        for entry in nav:
            if isinstance(entry, dict):
                yield from sections(*entry.values())


def test_a_section_of_the_navigation_fits_on_a_screen() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    found = list(sections(yaml.safe_load(text[text.index("\nnav:\n") :])["nav"]))
    assert len(found) > 10
    assert [entries for entries in found if len(entries) > MOST_ENTRIES] == []


@pytest.mark.exhaustive
@pytest.mark.group("site")
def test_each_page_leads_to_the_next_and_shows_the_version(site: Path) -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"[\w/.-]+\.md", text[text.index("\nnav:\n") :])
    assert len(named) > 100
    for i, name in enumerate(named):
        path = re.sub(r"(^|/)README\.md$", r"\1index.md", name).removesuffix(".md") + ".html"
        page = (site / path).read_text(encoding="utf-8")
        links = {way for way in ("prev", "next") if f'class="md-footer__link md-footer__link--{way}"' in page}
        assert links == {way for way, there in (("prev", i > 0), ("next", i + 1 < len(named))) if there}, name
        assert f"FedLoom {fedloom.__version__}" in page, name


@pytest.mark.exhaustive
@pytest.mark.group("site")
def test_the_search_finds_the_pages_that_a_user_wants(site: Path) -> None:
    """The site's own engine is asked: the theme's worker for the browser, run by node."""
    if shutil.which("node") is None:
        pytest.skip("there is no node, which runs the site's search")
    (worker,) = (site / "assets" / "javascripts" / "workers").glob("search.*.min.js")
    command = ["node", Path(__file__).parent / "search_site.js", worker, site / "search" / "search_index.json"]
    done = subprocess.run([*command, *WANTED], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = {query: [place.partition("#")[0] for place in places] for query, places in json.loads(done.stdout).items()}
    assert {query: found[query][:3] for query, page in WANTED.items() if page not in found[query][:3]} == {}
