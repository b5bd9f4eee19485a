"""Hooks of the site (mkdocs.yml): pages link to files outside docs/, which belong to the site as well."""

from __future__ import annotations

import json
import os
import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = runpy.run_path(str(ROOT / "docs" / "generate_notebooks.py"))
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
"""An inline link with a path: what is before the path, the path, and what follows it."""


def on_config(config: Any) -> Any:
    """Name the version beside the site's name, on every page."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.site_name = f"{config.site_name} {project['version']}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add README.md, the first page, and every file outside docs/ that a page links to."""
    todo = [f"docs/{page.src_uri}" for page in files.documentation_pages()] + ["README.md"]
    done = set(todo)
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
    while todo:
        for target in _outside(todo.pop()):
            if target not in done:
                done.add(target)
                files.append(File.generated(config, _place(target), abs_src_path=str(ROOT / target)))
                if target.endswith(".md"):
                    todo.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Make links between docs/ and the rest of the repository lead to where the site has the files; show results."""
    uri = page.file.src_uri
    notebook = ROOT / "docs" / uri.replace(".md", ".ipynb")
    if notebook.exists() and uri.endswith(".md"):
        markdown = _with_results(markdown, notebook)
    source = (
        "README.md" if uri == "index.md" else uri.removeprefix("repository/") if _is_outside(uri) else f"docs/{uri}"
    )

    def moved(link: re.Match[str]) -> str:
        target = _target(source, link[2])
        if target is None:
            return link[0]
        return f"{link[1]}{os.path.relpath(_place(target), PurePosixPath(uri).parent)}{link[3]}"

    return LINK.sub(moved, markdown)


def _with_results(markdown: str, notebook: Path) -> str:
    """Return a tutorial with the outputs of its notebook's cells below them, if it does not show them itself.

    Links to the notebook download it.
    """
    outputs = NOTEBOOKS["outputs_of"](json.loads(notebook.read_text(encoding="utf-8")))

    def shown(block: re.Match[str]) -> str:
        is_shown = block[1] or markdown[block.end() :].startswith("\n```\n")
        results = [] if is_shown else map(_result, outputs[block[2].strip("\n")])
        return "\n".join([block[0], *results])

    download = f'({notebook.name}){{ download="{notebook.name}" }}'
    return NOTEBOOKS["BLOCK"].sub(shown, markdown).replace(f"({notebook.name})", download)


def _result(output: dict[str, Any]) -> str:
    """Return an output as Markdown: a figure, a table or text."""
    data = output.get("data", {})
    if "image/png" in data:
        return f'<p><img alt="figure" src="data:image/png;base64,{"".join(data["image/png"].split())}"></p>\n'
    if table := re.search("<table.*</table>", "".join(data.get("text/html", ())), re.DOTALL):
        return f"<div>{''.join(line.strip() for line in table[0].splitlines())}</div>\n"
    text = "".join(output.get("text") or data["text/plain"]).rstrip("\n")
    return f"```text\n{text}\n```\n"


def _is_outside(uri: str) -> bool:
    return uri.startswith("repository/")


def _target(source: str, link: str) -> str | None:
    """The path in the repository of what a link leads to (of a folder, its README.md); None of other links."""
    if "://" in link or link.startswith("mailto:"):
        return None
    path = (ROOT / source).parent / link
    path = path / "README.md" if path.is_dir() else path
    return os.path.relpath(path, ROOT) if path.exists() else None


def _outside(source: str) -> Iterator[str]:
    for link in LINK.finditer((ROOT / source).read_text(encoding="utf-8")):
        target = _target(source, link[2])
        if target is not None and target != "README.md" and not target.startswith("docs/"):
            yield target


def _place(target: str) -> str:
    """Return a repository file's place on the site; files that are not pages are shown as text."""
    if target == "README.md":
        return "index.md"
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"repository/{target}" + ("" if target.endswith(".md") else ".txt")
