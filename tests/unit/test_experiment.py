"""The experiment file: valid files, errors, and the part shared with workers."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from facts import mentions, refusing, tells
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

import fedloom
from fedloom.algorithms.base import available, find_algorithm
from fedloom.algorithms.fedavg import FedAvgSettings
from fedloom.errors import ExitCode, ExperimentError, RefusedError
from fedloom.experiment import Runtime, from_shared_json, json_schema, load_experiment
from fedloom.experiment.sections import AlgorithmChoice, _dump_algorithm
from fedloom.experiment.validation_errors import MOST_SHOWN

GOOD = """\
name: quickstart
data:
  dataset: fashion-mnist
  partition: {scheme: classes, clients: 100, classes_per_client: 2}
model: {name: mlp, hidden: [10]}
algorithm: {name: fedavg}
federation: {rounds: 400, deadline_s: 6e2}
"""

DOCS = Path(__file__).parents[2] / "docs"
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "experiment.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(path: Path, *overrides: str, key: str | None = None) -> str:
    """Return the message for an experiment that cannot run; with ``key``, only that key is wrong."""
    with pytest.raises(ExperimentError) as caught:
        load_experiment(path, overrides)
    assert caught.value.exit_code is ExitCode.EXPERIMENT
    message = str(caught.value)
    assert len(message.splitlines()) <= 24, "more than a screen"
    if key is not None:
        assert caught.value.key == key
        assert f"{key}: " in message
    return message


def test_defaults_are_filled_in(write: Write) -> None:
    experiment = load_experiment(write(GOOD))
    assert (experiment.seed, experiment.data.held_out_fraction, experiment.data.seen) == (1, 0.1, 90)
    assert (experiment.federation.clients_per_round, experiment.federation.deadline_s) == (5, 600.0)
    assert (experiment.model.name, experiment.algorithm.name) == ("mlp", "fedavg")
    assert experiment.runtime == Runtime()


@pytest.mark.parametrize("algorithm", available())
def test_resolved_yaml_reads_back_as_the_same_experiment(write: Write, algorithm: str) -> None:
    rounds = "federation.rounds=0" if algorithm == "local" else "federation.rounds=3"
    model = ["model={name: vgg, channels: [3], norm: batch}"] if algorithm == "fedbn" else []
    keys = ", local_parameters: ['*bias']" if algorithm == "fedsa-lora" else ""
    changes = [f"algorithm={{name: {algorithm}{keys}}}", rounds, "storage=here", "data.root=there", *model]
    experiment = load_experiment(write(GOOD), changes)
    again = load_experiment(write(experiment.resolved_yaml()))
    assert again == experiment
    assert again.resolved_yaml() == experiment.resolved_yaml()
    assert yaml.safe_load(experiment.resolved_yaml()) == experiment.model_dump(mode="json"), "other readers agree"


@settings(max_examples=25)
@given(name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True), fraction=st.floats(0, 0.9))
def test_names_and_numbers_round_trip(tmp_path_factory: pytest.TempPathFactory, name: str, fraction: float) -> None:
    path = tmp_path_factory.mktemp("experiment") / "e.yaml"
    path.write_text(GOOD)
    experiment = load_experiment(
        path, [f"name={json.dumps(name)}", f"data.held_out_fraction={fraction!r}", "federation.rounds=0"]
    )
    path.write_text(experiment.resolved_yaml())
    assert (experiment.name, experiment.data.held_out_fraction) == (name, fraction)
    assert load_experiment(path) == experiment


def test_shared_json_omits_machine_specific_settings(write: Write) -> None:
    one = load_experiment(write(GOOD), ["runtime.workers=0", "data.root=/here", "storage=/runs"])
    two = load_experiment(write(GOOD), ["runtime.threads=2", "data.root=/there"])
    assert one.shared_json() == two.shared_json()
    assert not {"runtime", "storage"} & set(json.loads(one.shared_json()))
    completed = from_shared_json(one.shared_json(), root="/there", runtime=Runtime(threads=2))
    assert completed == two


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"data": 3}', '{"data": {}}', '{"data": {"dataset": "mnist"}}'])
def test_invalid_shared_json_is_rejected(text: str) -> None:
    with pytest.raises(ExperimentError, match="aggregator"):
        from_shared_json(text)


@pytest.mark.parametrize("section", ["", "federation", "algorithm", "algorithm.local", "data.partition"])
def test_a_key_of_a_newer_release_ends_the_worker_with_its_name(write: Write, section: str) -> None:
    shared = json.loads(load_experiment(write(GOOD)).shared_json())
    place = shared
    for key in filter(None, section.split(".")):
        place = place[key]
    place["newer_key"] = 3
    with refusing(RefusedError, f"{section}.newer_key".strip("."), fedloom.__version__, "upgrade") as refused:
        from_shared_json(json.dumps(shared))
    assert refused.value.exit_code == 4


def test_a_new_key_is_shared_only_if_it_has_another_value() -> None:
    """Members of the release before, which do not know the key, can take part if it is at its default."""

    class Newer(FedAvgSettings):
        newer: int = Field(default=3, exclude_if=lambda value: value == 3, description="a key of a newer release")

    choices = [AlgorithmChoice(name="fedavg", settings=Newer(newer=value)) for value in (3, 4)]
    default, other = (_dump_algorithm(choice) for choice in choices)
    assert "newer" not in default
    assert other == {**default, "newer": 4}


def test_keys_that_the_release_before_does_not_know_are_shared_only_if_they_are_set() -> None:
    """Compare with the keys of release 0.1.0, by section; a section that it lacks is a choice that it lacks."""
    recorded = json.loads((Path(__file__).parents[1] / "fixtures" / "shared_keys.json").read_text())
    json_schema()  # imports every section
    classes, found = [BaseModel], {}
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        if cls.__module__.startswith("fedloom.") and cls.__name__ in recorded:
            found[cls.__name__] = cls
    assert len(found) > 90
    for name, cls in found.items():
        for key in set(cls.model_fields) - set(recorded[name].split()) - {"runtime", "storage", "tracking"}:
            assert cls.model_fields[key].exclude_if is not None, (
                f"{name}.{key} is a new key, which members of the release before do not know. Give it "
                "Field(exclude_if=lambda value: value == DEFAULT), so that they can take part where it is not set"
            )


def test_overrides_replace_values_and_whole_mappings(write: Write) -> None:
    changes = ["data.partition={scheme: iid, clients: 20}", "federation.rounds=7", "model={name: logistic}"]
    experiment = load_experiment(write(GOOD), [*changes, "runtime.workers=0"])
    assert (experiment.data.partition.scheme, experiment.data.partition.clients) == ("iid", 20)
    assert (experiment.federation.rounds, experiment.model.name, experiment.runtime.workers) == (7, "logistic", 0)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("federation.rounds", ["KEY=VALUE"]),
        ("=3", ["KEY=VALUE"]),
        ("federation..rounds=3", ["KEY=VALUE"]),
        ("name.first=3", ["name", '"quickstart"']),
        ("seed=[1", ["YAML"]),
        ("seed={a: 1, a: 2}", ["seed"]),
        ("seed.x=1", ["seed: ", '{"x": 1}']),
        ("federation.round=3", ["federation.round: ", "rounds?"]),
    ],
)
def test_bad_overrides(write: Write, override: str, expected: list[str]) -> None:
    assert tells(refusal(write(GOOD), override), *expected)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("name", "no way", "A-Za-z0-9"),
        ("name", "../up", "A-Za-z0-9"),
        ("seed", "-1", "0"),
        ("seed", "true", "integer"),
        ("seed", '"3"', "integer"),
        ("data.dataset", "fashion-mnst", ["fashion-mnist?", "cifar10, cifar100, fashion-mnist, "]),
        ("data.held_out_fraction", "1", "1"),
        ("data.held_out_fraction", '"1e-3"', "number"),
        ("data.validation_fraction", ".nan", "finite"),
        ("data.partition.clients", "0", "1"),
        ("data.partition.scheme", "dirihlet", ["dirichlet?", "classes, dirichlet, dominant, "]),
        ("data.partition.classes_per_client", "11", ["11", "10"]),
        ("data.partition.shares", "[0.5, 0.4]", ["sum", "0.9", "1"]),
        ("data.root", "s3://bucket", "folder"),
        ("model.name", "lenett", ["lenet?", "lenet, resnet20, "]),
        ("algorithm.name", "pefl", ["pefll?", "fedavg"]),
        ("algorithm.name", "[1]", "fedavg"),
        ("federation.rounds", "400.5", "integer"),
        ("federation.deadline_s", "0", "0"),
        ("federation.deadline_s", ".inf", "finite"),
        ("federation.clients_per_round", "91", "90"),
        ("federation.min_replies", "6", ["clients_per_round", "5"]),
        ("evaluation.every", "0", "1"),
        ("evaluation.label_mask", "1", "boolean"),
        ("runtime.device", "tpu", ["cpu", "cuda"]),
        ("runtime.clients_at_once", "0", "1"),
        ("storage", "gs://bucket", "s3://BUCKET/PREFIX"),
        ("storage", "s3:/bucket/runs", "s3://BUCKET/PREFIX"),
        ("storage", "s3://My_Bucket/runs", "lower-case letters"),
        ("storage", "s3://bucket/a/../b", "empty parts"),
    ],
)
def test_invalid_values_name_the_allowed_ones(write: Write, key: str, value: str, allowed: str | list[str]) -> None:
    message = refusal(write(GOOD), f"{key}={value}", key=key)
    assert tells(message, f"{key}: ", *([allowed] if isinstance(allowed, str) else allowed))


@pytest.mark.parametrize("key", ["data", "data.partition", "model", "algorithm", "federation"])
@pytest.mark.parametrize("value", ["null", "3", "[1]", "text", "true"])
def test_a_section_that_is_not_a_mapping(write: Write, key: str, value: str) -> None:
    message = refusal(write(GOOD), f"{key}={value}", key=key)
    assert mentions(message, json.dumps(yaml.safe_load(value)), "mapping")


@pytest.mark.parametrize(
    "key",
    ["name", "data", "data.dataset", "data.partition", "data.partition.scheme", "data.partition.clients", "model",
     "model.name", "algorithm", "algorithm.name", "federation", "federation.rounds"],
)  # fmt: skip
def test_a_missing_key_is_named(write: Write, key: str) -> None:
    value = yaml.safe_load(GOOD)
    *parents, last = key.split(".")
    section = value
    for step in parents:
        section = section[step]
    del section[last]
    assert "missing" in refusal(write(yaml.safe_dump(value)), key=key)


def test_all_errors_are_reported_at_once_with_their_lines(write: Write) -> None:
    text = GOOD.replace("name: quickstart", "name: quickstart\nsede: 2").replace("rounds: 400", "rounds: -1")
    text = text.replace("name: fedavg", "name: fedavg, epocs: 1").replace("clients: 100", "clients: ten")
    message = refusal(write(text))
    assert message.startswith(str(write(text)))
    assert "4 errors" in message
    assert tells(message, "line 2, sede: ", "seed?")
    assert tells(message, "line 5, data.partition.clients: ", '"ten"')
    assert "line 7, algorithm.epocs: " in message
    assert tells(message, "line 8, federation.rounds: ", "-1")


def test_a_key_of_another_section_gets_a_hint(write: Write) -> None:
    assert "federation.rounds?" in refusal(write(f"{GOOD}rounds: 3\n"))


def test_many_errors_fit_on_one_screen(write: Write) -> None:
    message = refusal(write(GOOD + "".join(f"key{i}: {'x' * 1000}\n" for i in range(100))))
    assert "100 errors" in message
    assert f"... and {100 - MOST_SHOWN} more" in message


def test_changing_the_method_explains_how_to_replace_its_keys(write: Write) -> None:
    path = write(GOOD)
    more = ["algorithm.personalize_steps=3", "federation.rounds=0"]
    path.write_text(load_experiment(path, more).resolved_yaml())
    hint = "'algorithm={name: local}'"
    with pytest.raises(ExperimentError, match=r"line \d+, algorithm\.personalize_steps: ") as refused:
        load_experiment(path, ["algorithm.name=local"])
    assert hint in str(refused.value.hint)
    load_experiment(path, ["algorithm={name: local}"])
    with pytest.raises(ExperimentError) as refused:
        load_experiment(path, ["algorithm={name: local, nothing: 1}"])
    assert (refused.value.key, refused.value.hint) == ("algorithm.nothing", None)


def test_a_method_without_rounds_and_labels(write: Write) -> None:
    message = refusal(write(GOOD), "algorithm={name: local}")
    assert tells(message, "federation.rounds: ", "0", "local", "400")
    small = ["algorithm={name: local}", "federation.rounds=0", "data.partition.clients=2", "data.held_out_fraction=0.5"]
    assert load_experiment(write(GOOD), small).data.seen == 1, "a cohort is of no matter without rounds"


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        (["model={name: lstm}"], ["lstm", "tokens", "pixels"]),
        (["model={name: vgg}"], ["vgg: "]),
        (["data.dataset=vowel", "model={name: lenet}"], ["lenet", "pixels", "features"]),
        (
            [
                "data={dataset: gaussian, partition: {scheme: means, clients: 10, dimension: 3}}",
                "model={name: quadratic, curvature: [1.0, 2.0]}",
                "algorithm={name: wga}",
            ],
            ["curvature", "2", "3 features"],
        ),
    ],
)
def test_a_model_that_does_not_fit_the_data(write: Write, keys: list[str], found: list[str]) -> None:
    message = refusal(write(GOOD), *keys, "federation.min_replies=7")
    assert "2 errors" in message
    assert "federation.min_replies: " in message
    assert tells(message, "model.name: ", *found)


def test_a_model_that_does_not_fit_is_named_with_its_line(write: Write) -> None:
    text = GOOD.replace("{name: mlp, hidden: [10]}", "\n  name: quadratic")
    assert tells(refusal(write(text)), "line 6, model.name: quadratic", "features")
    whole = refusal(write(text.replace("fashion-mnist", "gaussian")))
    assert "model.name" not in whole  # the kind of data that it must fit is not known yet


@pytest.mark.parametrize(
    ("method", "model", "found"),
    [
        *(
            (method, "{name: logistic}", [f"line 5, model.name: {method}", "one layer"])
            for method in ("fedrep", "fedper", "fedbabu", "lg-fedavg", "fedrod", "pfedgp")
        ),
        ("pfnm", "{name: lenet}", ["line 5, model.name: pfnm", "mlp"]),
        ("pfnm", "{name: mlp, hidden: [701]}", ["algorithm.cap: ", "701", "700"]),
    ],
)
def test_a_model_that_the_method_cannot_train_is_rejected_before_data_are_loaded(
    write: Write, method: str, model: str, found: list[str]
) -> None:
    text = GOOD.replace("{name: mlp, hidden: [10]}", model)
    assert tells(refusal(write(text), f"algorithm={{name: {method}}}"), "1 error", *found)


def test_a_model_for_estimating_means(write: Write) -> None:
    data = "data={dataset: gaussian, partition: {scheme: means, clients: 10, dimension: 2}}"
    model = "model={name: quadratic, curvature: [1.0, 2.0]}"
    assert load_experiment(write(GOOD), [data, model, "algorithm={name: wga}"]).data.seen == 9


def test_label_mask_needs_a_method_that_uses_labels(write: Write) -> None:
    message = refusal(write(GOOD), "algorithm={name: pefll, embedding: {labels: false}}", "evaluation.label_mask=true")
    assert tells(message, "evaluation.label_mask: ", "false", "pefll", "true")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["mapping", "null"]),
        ("- 1\n- 2\n", ["mapping", "[1, 2]"]),
        ("name: [1\n", ["YAML", "line 2, column 1"]),
        ("name: x\n\tseed: 1\n", ["YAML", "line 2, column 1"]),
        ("a: &a [*a]\n", ["alias"]),
        ("? !!timestamp 2024-01-01\n: x\n", ["keys", "str"]),
        ("seed: " + "9" * 5000, ["4300 digits"]),
        ("a: !!python/object/apply:os.system ['true']\n", ["YAML", "line 1"]),
        ("name: x\nseed: 1\nname: y\n", ["line 1, name: ", "line 3"]),
        ("data:\n  root: x\n  root: y\n", ["line 2, data.root: ", "line 3"]),
        ("name: x\n---\nname: y\n", ["YAML", "line 2"]),
    ],
)
def test_files_that_are_not_experiments(write: Write, text: str, expected: list[str]) -> None:
    assert tells(refusal(write(text)), *expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[" * 10_000, ["50"]),
        ("{a: " * 10_000, ["50"]),
        ("a: " + "[" * 5_000 + "]" * 5_000, ["50"]),
        ("".join(f"k{i}: &k{i} [{'x' if i == 0 else f'*k{i - 1}'}]\n" for i in range(5_000)), ["50"]),
        ("k0: &k0 x\n" + "".join(f"k{i}: &k{i} [{f'*k{i - 1}, ' * 9}]\n" for i in range(1, 30)), ["100,000"]),
        ("#" * 2**20 + "\n", ["1,048,577", "1,048,576"]),
    ],
    ids=["lists", "mappings", "closed", "chain", "laughs", "long"],
)  # fmt: skip
def test_yaml_bombs_are_rejected(write: Write, text: str, expected: list[str]) -> None:
    assert tells(refusal(write(text)), *expected)
    assert tells(refusal(write(GOOD), f"model={text}"), *expected)


def test_aliases_and_merges_are_read(write: Write) -> None:
    text = GOOD.replace("{name: mlp, hidden: [10]}", "&m {name: mlp, hidden: [10]}")
    e = load_experiment(
        write(f"{text}evaluation: &e {{every: 7}}\nruntime: {{workers: 0, threads: 1}}\n"), ["model.hidden=[5]"]
    )
    assert (e.model.hidden, e.evaluation.every) == ([5], 7)
    merged = GOOD.replace("{rounds: 400,", "{<<: {rounds: 1, attempts: 2}, rounds: 400,")
    found = load_experiment(write(merged)).federation
    assert (found.rounds, found.attempts) == (400, 2)


def test_unreadable_files(tmp_path: Path) -> None:
    assert "no such file or directory" in refusal(tmp_path / "absent.yaml")
    assert "is a directory" in refusal(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("name: é".encode("latin-1"))
    assert "not a UTF-8 text file (byte 6)" in refusal(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("scalar", "value"),
    [("1e-3", 1e-3), ("1E5", 1e5), (".5", 0.5), ("1.", 1.0), ("-3", -3), ("no", "no"), ("on", "on"), ("10:00", "10:00"),
     ("012", "012"), ("2024-01-01", "2024-01-01"), ("1_000", "1_000"), ("true", True), ("~", None)],
)  # fmt: skip
def test_scalars_are_parsed_by_yaml_1_2(write: Write, scalar: str, value: object) -> None:
    message = refusal(write(GOOD), f"surprise=[{scalar}]", f"model=[{scalar}]")
    assert tells(message, "model: ", json.dumps([value]))


def test_schema_describes_every_key() -> None:
    schema = json_schema()
    for where, node in keys(schema):
        if "const" in node:
            continue  # the key that selects a scheme, model or method
        described = [node, *branches(schema, node)]
        assert any(part.get("description") for part in described), f"{where} has no description"
    names = {branch["properties"]["name"]["const"] for branch in branches(schema, schema["properties"]["algorithm"])}
    assert names == set(available())


@pytest.fixture(scope="module")
def generated() -> dict[str, Any]:
    """Return the functions that write pages from the code."""
    return runpy.run_path(str(DOCS / "generate_keys.py"))


def page_made_by(make: Callable[[str], str], name: str) -> str:
    """Return a page, of which a function has written a part."""
    page = (DOCS / name).read_text(encoding="utf-8")
    assert make(page) == page, "make docs"
    return page


def test_the_page_of_keys_is_up_to_date(generated: dict[str, Any]) -> None:
    made = generated["keys_pages"]()
    assert made == {path: (DOCS / path).read_text(encoding="utf-8") for path in made}, "make docs"
    pages = {str(page.relative_to(DOCS)) for page in (DOCS / "keys").rglob("*") if page.is_file()}
    assert pages | {"experiment-keys.md"} == set(made)
    titles = re.findall("^## `algorithm` with (.*)$", "\n".join(made.values()), re.MULTILINE)
    assert sorted(titles) == [f"`name: {name}`" for name in available()]  # each in one family
    guide = (DOCS / "experiment.md").read_text(encoding="utf-8")
    for section in json_schema()["properties"]:
        assert f"`{section}`" in guide


def test_the_page_of_what_leaves_a_client_is_up_to_date(generated: dict[str, Any]) -> None:
    page = page_made_by(made := generated["leaving_page"], "what-leaves-a-client.md")
    assert made(page.replace("Update.delta_theta", "Update.theta")) == page
    assert all(name in page for name in available())


def test_the_page_of_privacy_lists_each_methods_support(generated: dict[str, Any]) -> None:
    page = page_made_by(generated["privacy_page"], "privacy.md")
    rows = {row.split("|")[1].strip("` "): row.split("|")[2].strip() for row in page.splitlines() if row[:3] == "| `"}
    for name in available():
        method = find_algorithm(name)
        assert (rows[name] == "yes") is (method.sums_suffice(method.settings()) is None)


def test_the_page_of_methods_lists_their_tasks(generated: dict[str, Any]) -> None:
    page = page_made_by(made := generated["methods_page"], "algorithms/README.md")
    assert made(page.replace("| `pfedgp` | yes |", "| `pfedgp` | |")) == page
    tasks = page.partition("<!-- end -->")[0]
    rows = {row.split("|")[1].strip("` "): row for row in tasks.splitlines() if row.startswith("| `")}
    assert all(rows[name].count("| yes ") == len(find_algorithm(name).tasks) for name in available())


def test_the_guides_example_is_valid(write: Write) -> None:
    guide = (DOCS / "experiment.md").read_text(encoding="utf-8")
    examples = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    assert examples
    for example in examples:
        load_experiment(write(example))


def keys(
    schema: Mapping[str, Any], node: Mapping[str, Any] | None = None, path: str = ""
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every key of a schema with its node."""
    for branch in branches(schema, schema if node is None else node):
        for key, child in branch.get("properties", {}).items():
            yield f"{path}{key}", child
            yield from keys(schema, child, f"{path}{key}.")


def branches(schema: Mapping[str, Any], node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if "$ref" in node:
        yield from branches(schema, schema["$defs"][node["$ref"].rpartition("/")[2]])
    for branch in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from branches(schema, branch)
    if "properties" in node:
        yield node
