"""Write what is made from the code (``make docs``): tables of keys, of what leaves a client, of methods and tasks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import TypeAdapter

from fedloom.algorithms.base import available, find_algorithm
from fedloom.algorithms.catalogue import PROTECTIONS, method_entries
from fedloom.algorithms.local_sgd import RateSchedule
from fedloom.cli.completion import KEYS
from fedloom.cluster.settings import ClusterSettings
from fedloom.engine.disclosure import DisclosedTensor, answers, measures, moment_tensors
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.experiment import json_schema
from fedloom.experiment.editor_schema import editor_schema
from fedloom.experiment.search_space import Choices, Range, SearchSpace
from fedloom.experiment.validation_errors import Schema
from fedloom.kubeflow.pods import PodSettings, TaskPod
from fedloom.tasks.names import TaskName

PAGE = Path(__file__).parent / "experiment-keys.md"
KEYS_PAGES = PAGE.parent / "keys"
"""A page of each section of an experiment file, and in ``algorithm`` one of each family of methods."""
SITE = PAGE.parents[1] / "mkdocs.yml"
"""The site's navigation, which divides the methods into families."""
SCHEMA = Path(__file__).parent / "experiment.schema.json"
CLUSTER_PAGE = Path(__file__).parent / "cluster-keys.md"
LEAVING_PAGE = Path(__file__).parent / "what-leaves-a-client.md"
METHODS_PAGE = Path(__file__).parent / "algorithms" / "README.md"
PRIVACY_PAGE = Path(__file__).parent / "privacy.md"
SEARCH_PAGE = Path(__file__).parent / "search.md"
KUBEFLOW_PAGE = Path(__file__).parent / "kubeflow.md"

DEEPEST = 5
"""Levels of keys that are completed."""

SUMMED_WITH = {"drfa": {"replace": False, "gamma": 0}}
"""Settings with which a method's answers can be summed, where they cannot by default."""

MAPPINGS = {
    "data": ("source", "source.text", "own.inputs.NAME", "own.targets"),
    "federation": ("secure_aggregation", "privacy", "privacy.adaptive_clip"),
}
"""Optional mappings in a section that have a table each."""

HEAD = """\
# Keys of an experiment file

Find the page of a section, and the keys at the top level. Made from the code by `make docs`; the guide is
[experiment.md](experiment.md).
"""

CLUSTER_HEAD = """\
# Settings of a federation on Kubernetes

Made from the code by `make docs`; the guide is [cluster.md](cluster.md).
"""


def branches(node: Schema, root: Schema, value: Any = None) -> list[Schema]:
    """Resolve references and unions; if a ``name`` or ``scheme`` in the value selects a branch, return only it."""
    found = list(_branches(node, root))
    picked = [b for b in found if isinstance(value, dict) and _selects(b, value)]
    return picked or found


def describe(node: Schema, root: Schema) -> str:
    """Describe the values that a node of a schema allows, such as ``an integer of at least 1``."""
    return _alternatives(_describe(branch, root) for branch in _branches(node, root))


def _alternatives(descriptions: Iterable[str]) -> str:
    different = list(dict.fromkeys(descriptions))
    return (", or " if any("," in description for description in different) else " or ").join(different)


def _selects(branch: Schema, value: Mapping[str, Any]) -> bool:
    properties: Mapping[str, Schema] = branch.get("properties", {})
    return any("const" in node and value.get(key) == node["const"] for key, node in properties.items())


def _branches(node: Schema, root: Schema) -> Iterator[Schema]:
    if "$ref" in node:
        yield from _branches(root["$defs"][node["$ref"].rpartition("/")[2]], root)
    elif "anyOf" in node or "oneOf" in node:
        for branch in node.get("anyOf", node.get("oneOf", ())):
            yield from _branches(branch, root)
    else:
        yield node


def _describe(node: Schema, root: Schema) -> str:
    if "const" in node:
        return str(node["const"])
    if "enum" in node:
        return ", ".join(str(choice) for choice in node["enum"])
    return _describe_type(node, root)


def _describe_type(node: Schema, root: Schema) -> str:
    match node.get("type"):
        case "integer":
            return f"an integer{_bounds(node)}"
        case "number":
            return f"a number{_bounds(node)}"
        case "boolean":
            return "true or false"
        case "null":
            return "null"
        case "array":
            return f"a list{_lengths(node)} of {describe(node.get('items', {}), root)}"
        case "object":
            return "a mapping"
        case "string":
            return f"text matching {node['pattern']}" if "pattern" in node else "text"
    return "any value"


def _bounds(node: Schema) -> str:
    low, high = node.get("minimum"), node.get("maximum")
    above, below = node.get("exclusiveMinimum"), node.get("exclusiveMaximum")
    first = f"at least {low}" if low is not None else f"above {above}" if above is not None else ""
    last = f"at most {high}" if high is not None else f"below {below}" if below is not None else ""
    both = " and ".join(part for part in (first, last) if part)
    return f", {both}" if both else ""


def _lengths(node: Schema) -> str:
    low, high = node.get("minItems"), node.get("maxItems")
    if low is None and high is None:
        return ""
    if low == high:
        return f" ({low} items)"
    return f" ({low or 0} or more items)" if high is None else f" ({low or 0} to {high} items)"


def keys_pages() -> dict[str, str]:
    """Return the pages of keys by file name: the top level with links, and pages of sections and of methods."""
    schema = json_schema()
    pages: dict[str, str] = {}
    families: dict[str, str] = {}
    for name, node in schema["properties"].items():
        nested = [branch for branch in branches(node, schema) if "properties" in branch]
        meaning = node.get("description") or next((one["description"] for one in nested), "")
        parts = [
            f"# Keys of `{name}`\n\n{meaning} Made from the code by `make docs`; all sections: "
            "[keys of an experiment file](../experiment-keys.md).\n"
        ]
        if name == "algorithm":
            families = _families_pages({branch["properties"]["name"]["const"]: branch for branch in nested}, schema)
            parts += ["## Methods\n", *_contents("family", families, KEYS_PAGES), ""]
        for branch in nested if name != "algorithm" else ():
            title = f"`{name}` with `own`" if "own" in branch["properties"] else _title(name, branch)
            parts += _section(title, branch, schema)
        for path in MAPPINGS.get(name, ()):
            parts += _section(f"`{name}.{path}`", _at(node, path, schema), schema)
        if name == "data":
            for scheme in branches(nested[0]["properties"]["partition"], schema):
                parts += _section(_title("data.partition", scheme), scheme, schema)
        if name == "algorithm":
            schedules = TypeAdapter(RateSchedule).json_schema()
            for one in branches(schedules, schedules):
                parts += _section(_title("schedule", one), one, schedules)
        if nested:
            pages[f"keys/{name}.md"] = "\n".join(parts)
    top = _section("Top level", schema, schema, depth=1)
    start = [HEAD, "## Sections\n", *_contents("section", pages, PAGE.parent), "", *top]
    return {PAGE.name: "\n".join(start), **pages, **families}


def _families_pages(nodes: Mapping[str, Schema], schema: Schema) -> dict[str, str]:
    """Return a page of keys for each family of methods, by file name."""
    navigation = yaml.safe_load(SITE.read_text(encoding="utf-8").partition("\nnav:\n")[2])
    (methods,) = (entry["Methods"] for entry in navigation if "Methods" in entry)
    pages: dict[str, str] = {}
    for title, listed in (item for entry in methods for item in entry.items() if isinstance(item[1], list)):
        parts = [
            f"# {title}: keys of `algorithm`\n\nMade from the code by `make docs`; all methods: "
            "[keys of `algorithm`](../algorithm.md).\n"
        ]
        for name in (name for page in listed for name in available() if _page_of(name) == page):
            heading, *rows = _section(_title("algorithm", nodes[name]), nodes[name], schema)
            parts += [heading, f"Its steps: [{name}](../../{_page_of(name)}).\n", *rows]
        pages[f"keys/algorithm/{_anchor(title)}.md"] = "\n".join(parts)
    return pages


def _page_of(name: str) -> str:
    """Return the page of a method, whose name is the method's, or that of its module."""
    named = f"algorithms/{name}.md"
    of_module = f"algorithms/{type(find_algorithm(name)).__module__.rpartition('.')[2]}.md"
    return named if (PAGE.parent / named).exists() else of_module


def _contents(kind: str, pages: Mapping[str, str], folder: Path) -> Iterator[str]:
    """Yield the table of contents of pages in ``folder`` or below: a row for each, with links to its headings."""
    yield f"| {kind} | keys |"
    yield "|---|---|"
    for path, text in pages.items():
        link, head = (PAGE.parent / path).relative_to(folder), text.partition("\n")[0]
        name = head.removeprefix("# Keys of ").removeprefix("# ").removesuffix(": keys of `algorithm`")
        titles = re.findall("^## (.*)$", text, re.MULTILINE)
        links = (f"[{_short(title)}]({link}#{_anchor(title)})" for title in titles)
        yield f"| [{name}]({link}) | {', '.join(links)} |"


def _short(title: str) -> str:
    """Return a heading as a link names it: ``fedavg`` of "`algorithm` with `name: fedavg`"."""
    return title.rpartition(": ")[2].strip("`") if ": " in title else title.replace("`", "")


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _at(node: Schema, path: str, schema: Schema) -> Schema:
    """Return the mapping at a dotted path; NAME stands for any key."""
    for key in path.split("."):
        inner = [branch for branch in branches(node, schema) if isinstance(branch.get("additionalProperties"), dict)]
        found = [inner[0]["additionalProperties"]] if key == "NAME" else []
        found += [b["properties"][key] for b in branches(node, schema) if key in b.get("properties", {})]
        node = found[0]
    return next(branch for branch in branches(node, schema) if "properties" in branch)


def cluster_page() -> str:
    """Return the page of the cluster settings: one table."""
    schema = ClusterSettings.model_json_schema()
    return "\n".join([CLUSTER_HEAD, *_section("All keys", schema, schema)])


def leaving_page(text: str) -> str:
    """Return the page of what leaves a client, its tables regenerated."""
    methods: dict[tuple[DisclosedTensor, ...], list[str]] = {}
    for name in available():
        methods.setdefault(tuple(answers(find_algorithm(name))), []).append(name)
    made = {
        "moments": "\n".join(_leaving_table(moment_tensors())),
        "summed moments": "\n".join(_leaving_table(moment_tensors(only_summed=True))),
        "answers": "\n\n".join(
            "\n".join([f"**{', '.join(names)}**" + ("" if told else ": nothing"), *_leaving_table(told)])
            for told, names in sorted(methods.items(), key=lambda item: (-len(item[1]), item[1]))
        ),
        "metrics": "\n".join(_leaving_table(measures(2, EvaluationPlan.of_classes(10)), letters={10: "C"}, first="P")),
        "sums": "\n".join(_sums_table()),
        "summed metrics": "\n".join(_leaving_table(_summed_moments(), first="P")),
    }
    return _filled(text, made)


def _sums_table() -> Iterator[str]:
    """Yield a table of what is only summed under secure aggregation, by method."""
    methods: dict[tuple[str, str, str], list[str]] = {}
    for name in available():
        method, changed = find_algorithm(name), SUMMED_WITH.get(name, {})
        settings = method.settings(**changed)
        if method.sums_suffice(settings) is not None:
            continue
        told, plain = answers(method, sums=method.sums(settings)), answers(method)
        kept = {(one.message, one.field) for one in told}
        row = (
            _fields(one for one in told if one.only_summed),
            _fields(one for one in told if not one.only_summed),
            _fields(one for one in plain if (one.message, one.field) not in kept),
        )
        conditions = ", ".join(f"{key}: {json.dumps(value)}" for key, value in changed.items())
        methods.setdefault(row, []).append(f"{name} (`{conditions}`)" if conditions else name)
    yield "| methods | visible only in sums | visible individually | not sent |"
    yield "|---|---|---|---|"
    for row, names in sorted(methods.items(), key=lambda item: (-len(item[1]), item[1])):
        yield f"| {' | '.join((', '.join(names), *row))} |"


def _summed_moments() -> Sequence[DisclosedTensor]:
    """Return the moments of an evaluation in sums, by letters."""
    (moments,) = (one for one in measures(2, EvaluationPlan.of_classes(10), only_summed=True) if one.field == "moments")
    return [replace(moments, shape=("P", "R", "2 + M", 3))]


def _fields(tensors: Iterable[DisclosedTensor]) -> str:
    return ", ".join(f"`{one.message}.{one.field}`" for one in tensors) or "nothing"


def search_page(text: str) -> str:
    """Return the page of searches, its tables of keys regenerated."""
    schema = SearchSpace.model_json_schema()
    rows = ["| key | allowed | default | meaning |", "|---|---|---|---|", *_rows(schema, schema, 1)]
    for kind in (Range, Choices):
        of_kind = kind.model_json_schema()
        rows += _rows(of_kind, of_kind, 1, "parameters.KEY.")
    return _filled(text, {"space": "\n".join(rows)})


def kubeflow_page(text: str) -> str:
    """Return the page of Kubeflow, its table of the keys of tasks' pods regenerated."""
    schema, of_task = PodSettings.model_json_schema(), TaskPod.model_json_schema()
    rows = ["| key | allowed | default | meaning |", "|---|---|---|---|", *_rows(schema, schema, 1)]
    rows += _rows(of_task, of_task, 1, "tasks.NAME.")
    return _filled(text, {"pods": "\n".join(rows)})


def privacy_page(text: str) -> str:
    """Return the page of privacy, its table of methods regenerated."""
    return _filled(text, {"methods": "\n".join(_privacy_table())})


def _privacy_table() -> Iterator[str]:
    """Yield a table of the methods, and the reasons of those that a protection excludes."""
    yield f"| method | {' | '.join(PROTECTIONS)} |"
    yield "|---" * (len(PROTECTIONS) + 1) + "|"
    for entry in method_entries():
        reasons = [entry.without.get(protection) for protection in PROTECTIONS]
        cells = ["yes" if why is None else f"no: {_as_reason(why)}" for why in reasons]
        if reasons[0]:
            cells[1] = "no, for the same reason"
        yield f"| `{entry.name}` | {' | '.join(cells)} |"


def methods_page(text: str) -> str:
    """Return the page of methods, its table of tasks regenerated."""
    tasks = get_args(TaskName)
    rows = [f"| method | {' | '.join(t.replace('_', ' ') for t in tasks)} | the model must have | reason if not |"]
    rows.append("|---" * (len(tasks) + 3) + "|")
    for entry in method_entries():
        cells = ["yes" if task in entry.tasks else "" for task in tasks]
        rows.append(f"| `{entry.name}` | {' | '.join(cells)} | {', '.join(entry.needs)} | {entry.restriction} |")
    return _filled(text, {"tasks": "\n".join(rows), "privacy of examples": "\n".join(_examples())})


def _examples() -> Iterator[str]:
    """Yield a table of the methods that protect single examples, and the reasons of the others."""
    yield "| method | protects examples | reason if not |"
    yield "|---|---|---|"
    for entry in method_entries():
        why = entry.without.get("privacy of examples", "")
        yield f"| `{entry.name}` | {'' if why else 'yes'} | {why} |"


def _as_reason(why: str) -> str:
    """Return a reason, a sentence or the end of one whose subject is the method, as it stands behind a colon."""
    return f"{why[0].lower()}{why[1:]}".rstrip(".") if why[0].isupper() else f"the method {why}"


def _filled(text: str, made: Mapping[str, str]) -> str:
    """Return a page with its marked parts regenerated."""
    for name, tables in made.items():
        begin = f"<!-- {name}: made by make docs -->\n"
        text = re.sub(f"{begin}.*?<!-- end -->", lambda _, b=begin, t=tables: f"{b}{t}\n<!-- end -->", text, flags=re.S)  # type: ignore[misc]
    return text


def _leaving_table(
    told: Sequence[DisclosedTensor], letters: Mapping[int, str] | None = None, first: str | None = None
) -> list[str]:
    if not told:
        return []
    rows = []
    for one in told:
        shape = [(letters or {}).get(size, str(size)) if isinstance(size, int) else size for size in one.shape]
        if first is not None:
            shape[0] = first
        rows.append(f"| `{one.message}.{one.field}` | {one.quantity} | [{', '.join(shape)}] |")
    return ["", "| tensor | quantity | shape |", "|---|---|---|", *rows]


def _title(key: str, branch: Schema) -> str:
    picks = [f"`{name}: {branch['properties'][name]['const']}`" for name in _picks(branch)]
    return f"`{key}` with {picks[0]}" if picks else f"`{key}`"


def _picks(branch: Schema) -> list[str]:
    """The key that picks a branch; other keys may have one allowed value, too."""
    return [name for name in ("name", "scheme", "kind") if "const" in branch["properties"].get(name, {})]


def _section(title: str, node: Schema, schema: Schema, depth: int = 9) -> list[str]:
    rows = list(_rows(node, schema, depth))
    if not rows:
        return [f"## {title}\n\nNo other keys.\n"]
    return [f"## {title}\n", "| key | allowed | default | meaning |", "|---|---|---|---|", *rows, ""]


def _rows(
    node: Schema, schema: Schema, depth: int, prefix: str = "", defaults: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Yield the rows of a section; those of sections inside it follow with dotted keys, up to a depth."""
    for key, child in node["properties"].items():
        if key in _picks(node):
            continue  # it is in the title
        default = (defaults or {}).get(key, child.get("default"))
        inner = branches(child, schema)
        if len(inner) == 1 and "properties" in inner[0] and depth > 1:
            yield from _rows(inner[0], schema, depth - 1, f"{prefix}{key}.", default)
            continue
        meaning = child.get("description") or inner[0].get("description", "")
        cells = f"`{prefix}{key}`", describe(child, schema), _default(node, key, default), meaning
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def completed_keys() -> str:
    """Return the keys for completion by a shell, with their descriptions and names to choose from, as JSON."""
    schema = json_schema()
    found: dict[str, tuple[str, list[str]]] = {}
    _add_keys(schema, schema, "", found)
    lines = (f"{json.dumps(key)}: {json.dumps(about, ensure_ascii=False)}" for key, about in sorted(found.items()))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _add_keys(node: Schema, schema: Schema, prefix: str, found: dict[str, tuple[str, list[str]]]) -> None:
    for key, child in node.get("properties", {}).items():
        inner = branches(child, schema)
        names = [
            name for branch in inner for name in branch.get("enum", [branch["const"]] if "const" in branch else [])
        ]
        about = child.get("description") or inner[0].get("description", "")
        before = found.setdefault(f"{prefix}{key}", (about.partition("\n")[0], []))
        before[1].extend(name for name in names if isinstance(name, str) and name not in before[1])
        for branch in inner if prefix.count(".") < DEEPEST else ():
            _add_keys(branch, schema, f"{prefix}{key}.", found)


def _default(node: Schema, key: str, value: Any) -> str:
    if key in node.get("required", ()):
        return "required"
    return (
        "all defaults"
        if isinstance(value, dict) and "additionalProperties" not in node["properties"][key]
        else f"`{json.dumps(value, ensure_ascii=False)}`"
    )


if __name__ == "__main__":
    (KEYS_PAGES / "algorithm").mkdir(parents=True, exist_ok=True)
    for path, text in keys_pages().items():
        (PAGE.parent / path).write_text(text, encoding="utf-8")
    KEYS.write_text(completed_keys(), encoding="utf-8")
    SCHEMA.write_text(f"{json.dumps(editor_schema(), ensure_ascii=False)}\n", encoding="utf-8")
    CLUSTER_PAGE.write_text(cluster_page(), encoding="utf-8")
    LEAVING_PAGE.write_text(leaving_page(LEAVING_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    METHODS_PAGE.write_text(methods_page(METHODS_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    PRIVACY_PAGE.write_text(privacy_page(PRIVACY_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    KUBEFLOW_PAGE.write_text(kubeflow_page(KUBEFLOW_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    SEARCH_PAGE.write_text(search_page(SEARCH_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
