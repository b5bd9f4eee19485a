"""The page of `fedloom ui`, by HTTP: what it shows, what it refuses, and bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest
from facts import tells
from run_processes import ended, fedloom, started, until
from ui_support import ROUNDS, asked, copied, shown, trained

from fedloom.reporting.report import report_page
from fedloom.runs.folder import RunFolder
from fedloom.runs.listing import list_runs
from fedloom.security.access import Access
from fedloom.security.tokens import add_token, revoke_tokens

pytestmark = pytest.mark.group("ui")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("ui"))


@pytest.fixture(scope="module")
def port(runs: Path) -> Iterator[int]:
    with shown(runs) as number:
        yield number


def rows(page: str) -> dict[str, str]:
    """Return the rows of the list of runs by name, with their tags."""
    return {unescape(name): row for name, row in re.findall(r'<tr data-key="(.*?)">(.*?)</tr>', page, re.DOTALL)}


def words(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


# ---- what it shows


def test_the_list_has_the_values_of_fedloom_runs(runs: Path, port: int) -> None:
    page = asked(port, "/")
    found = rows(page.text)
    assert set(found) == {"avg", "ditto", "sub/private"}
    for entry in list_runs(runs):
        name = str(Path(entry.path).relative_to(runs))
        text = words(found[name])
        assert tells(text, "finished", entry.method or "", "vowel", f"{ROUNDS}/{ROUNDS}", entry.score(entry.seen)), text
        assert entry.score(entry.validation) in text
        assert entry.private == (name == "sub/private")
        assert f"/run/{name}" in found[name]
    private = RunFolder(runs / "sub" / "private").json("summary.json")["training_privacy"]["epsilon"]
    (listed,) = [entry for entry in list_runs(runs) if entry.private]
    assert listed.epsilon == pytest.approx(private)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("ditto", ["ditto"]),
        ("VOWEL fedavg", ["avg", "sub/private"]),
        ("seed:1 avg", ["avg", "sub/private"]),
        ("nothing", [""]),
    ],
)
def test_the_list_is_filtered(port: int, query: str, expected: list[str]) -> None:
    assert sorted(rows(asked(port, f"/?{urlencode({'q': query})}").text)) == expected


def test_the_list_is_sorted_by_any_column_in_both_orders(runs: Path, port: int) -> None:
    by_seen = [str(Path(e.path).relative_to(runs)) for e in sorted(list_runs(runs), key=lambda entry: entry.seen or 0)]
    page = asked(port, "/?sort=seen").text
    assert list(rows(page)) == by_seen
    assert 'aria-sort="ascending"' in page
    assert list(rows(asked(port, "/?sort=-seen").text)) == by_seen[::-1]
    assert set(rows(asked(port, "/?sort=%F0%9F%92%A5").text)) == set(by_seen)  # an unknown column is ignored


def test_a_run_has_the_sections_of_its_report_and_what_left_its_clients(runs: Path, port: int) -> None:
    page = asked(port, "/run/sub/private").text
    run = RunFolder(runs / "sub" / "private")
    for section in report_page(run, ("Results", "Privacy", "Settings")).sections:
        body = page.partition(f'id="{section.anchor}"')[2].partition("</section>")[0]
        for part in section.parts:
            for table in part.tables:
                assert all(
                    cell.text in words(body) for _, lines in table.blocks for line in lines for cell in line.cells
                )
            assert part.text in words(body)
    cohorts = [each for line in run.objects("journal.jsonl") for each in line["conversations"]]
    answered = sum(len(each["clients"]) - len(each["lost"]) for each in cohorts)
    left = words(page.partition('id="section-what-has-left-the-clients"')[2].partition("</section>")[0])
    expected = ("Update.delta_theta model_update [s] each answer", f"answers in training {answered}, of")
    assert all(each in left for each in expected), left
    assert "evaluated 15 clients" in page.partition('id="section-log"')[2]
    assert '<a href="/report/sub/private">' in page


@pytest.mark.slow
def test_a_report_has_every_section_with_an_anchor(runs: Path, port: int) -> None:
    page = asked(port, "/report/avg").text
    for section in report_page(RunFolder(runs / "avg")).sections:
        assert f'<section id="{section.anchor}">' in page
        assert f'<a href="#{section.anchor}">' in page
    assert len(set(re.findall(r' id="([^"]+)"', page))) == len(re.findall(r' id="([^"]+)"', page))


def test_a_client_has_its_rounds_and_its_results_in_every_run_of_its_partition(runs: Path, port: int) -> None:
    run = RunFolder(runs / "avg")
    asked_in = [
        line["round"] for line in run.objects("journal.jsonl") if "client-0004" in line["conversations"][0]["clients"]
    ]
    page = asked(port, "/client/avg?id=client-0004").text
    rounds = words(page.partition('id="section-rounds"')[2])
    assert f"asked {len(asked_in)} time" in rounds
    assert all(f"{number} answered done" in rounds for number in asked_in)
    methods = words(page.partition('id="section-methods"')[2].partition("</section>")[0])
    for name in ("avg", "ditto", "sub/private"):
        (row,) = [row for row in RunFolder(runs / name).clients() if row["id"] == "client-0004"]
        assert f"{100 * float(row['personal_accuracy_unmasked']):.1f}" in methods
        assert f'href="/client/{name}?id=client-0004"' in page


@pytest.mark.slow
def test_a_comparison_has_the_parts_of_fedloom_compare(runs: Path, port: int, tmp_path: Path) -> None:
    fedloom("compare", runs / "avg", runs / "ditto", "--out", tmp_path / "out")
    written = (tmp_path / "out" / "compare.html").read_text().partition("<main>")[2]
    page = asked(port, "/compare?run=avg&run=ditto").text
    sections = re.findall(r"<section .*?</section>", written, re.DOTALL)
    assert len(sections) > 4
    assert all(section in page for section in sections)


def test_an_unchanged_page_is_not_sent_again(port: int) -> None:
    first = asked(port, "/")
    again = asked(port, "/", If_None_Match=first.headers["etag"])
    assert (again.status, again.text) == (304, "")


# ---- damage


@pytest.mark.slow
def test_a_damaged_run_is_named_with_its_fault_and_the_rest_is_shown(runs: Path, tmp_path: Path) -> None:
    folder = copied(runs, tmp_path)
    (folder / "ditto" / "experiment.yaml").write_bytes(b"\xff\x00{")
    (folder / "avg" / "clients.csv").write_text("id,seen\nx")
    with shown(folder) as port:
        found = rows(asked(port, "/").text)
        assert tells(words(found["ditto"]), "damaged", "experiment.yaml")
        assert "finished" in found["sub/private"]
        assert asked(port, "/run/ditto").status == 200
        assert tells(words(asked(port, "/report/avg").text), "Left out", "clients.csv", "Settings")
        mixed = asked(port, "/compare?run=ditto&run=sub/private")
        assert mixed.status == 200
        assert "ditto is left out: it is damaged." in words(mixed.text)
        alone = asked(port, "/compare?run=ditto")
        assert alone.status == 422
        assert "it is damaged" in words(alone.text)


def test_runs_that_come_grow_and_go_are_noticed(runs: Path, tmp_path: Path) -> None:
    folder = copied(runs, tmp_path)
    with shown(folder) as port:
        before = rows(asked(port, "/").text)["ditto"]
        run = RunFolder(folder / "ditto")
        run.line_file("metrics.jsonl").cut(run.last_evaluations(2, ROUNDS)[0]["round"] and _end_of_second_last(run))
        (folder / "ditto" / "summary.json").unlink()
        (folder / "ditto" / "digests.json").unlink()
        (folder / "avg").rename(folder / "moved")
        after = rows(asked(port, "/").text)
        assert set(after) == {"moved", "ditto", "sub/private"}
        assert before != after["ditto"]
        assert asked(port, "/run/avg").status == 404
        with run.held():
            assert "running" in rows(asked(port, "/").text)["ditto"]
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        folder.rmdir()
        assert "does not exist any more" in asked(port, "/").text


def _end_of_second_last(run: RunFolder) -> int:
    return [line.end for line in run.placed("metrics.jsonl")][-2]


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a?b#c%2F..&d", "\"'> x", "ü \u202e", "x\ny"])
def test_names_of_runs_are_text_on_every_page(runs: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / name.replace("/", "∕")).symlink_to("nowhere")
    folder = copied(runs, tmp_path)
    (folder / "avg").rename(folder / name.replace("/", "∕"))
    name = name.replace("/", "∕")
    with shown(folder) as port:
        page = asked(port, "/").text
        shown_name = "".join(character if character.isprintable() else "\ufffd" for character in name)
        (target,) = re.findall(r'href="(/run/[^"]*)"', rows(page)[shown_name])
        for path in (unescape(target), unescape(target).replace("/run/", "/client/") + "?id=client-0001"):
            answer = asked(port, path)
            assert answer.status == 200, path
            assert "<script>alert" not in answer.text
        assert "<script>alert" not in page


def test_bytes_that_are_no_text_in_a_name_do_not_break_the_list(runs: Path, tmp_path: Path) -> None:
    folder = copied(runs, tmp_path)
    (folder / "avg").rename(folder / os.fsdecode(b"bad-\xff-name"))
    with shown(folder) as port:
        found = rows(asked(port, "/").text)
        (name,) = set(found) - {"ditto", "sub/private"}
        assert asked(port, f"/run/{quote(name)}").status == 200


# ---- what it refuses


@pytest.mark.parametrize(
    "path",
    [
        "/run/../../etc/passwd", "/run/%2e%2e/%2e%2e/etc/passwd", "/run/avg/../../x", "/run//etc/passwd",
        "/run/nothing", "/report/avg/experiment.yaml", "/client/avg?id=nobody", "/static/../server.py",
        "/static/%2e%2e/server.py", "/x", "/federation", "/compare", "/run/sub", "/client/nothing?id=client-0001",
    ],
)  # fmt: skip
def test_other_addresses_show_nothing(port: int, path: str) -> None:
    answer = asked(port, path)
    assert answer.status == 404
    assert "root:" not in answer.text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_only_reading_is_allowed(port: int, method: str) -> None:
    answer = asked(port, "/", method)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")
    assert asked(port, "/", "HEAD").status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7740", "127.0.0.1.evil.example", "[::1", "x/static/", "x/healthz?"]
)
def test_another_name_of_this_machine_is_refused_without_a_token(port: int, host: str) -> None:
    answer = asked(port, "/", host=host)
    assert answer.status == 421
    assert "avg" not in answer.text
    assert asked(port, "/healthz", host=host).text == "ok"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:7740"])
def test_this_machine_is_admitted_by_its_own_names(port: int, host: str) -> None:
    assert asked(port, "/", host=host).status == 200


def test_every_answer_keeps_the_browser_from_other_hosts(port: int) -> None:
    for path in ("/", "/run/avg", "/nothing", "/static/site.js", "/static/site.css"):
        answer = asked(port, path)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self'; style-src 'self' 'unsafe-inline';")
        assert "script-src" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert not re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", answer.text)
        assert not re.search(r"<script(?! src=\"/static/site.js\" defer)", answer.text)


def test_a_token_opens_the_page_until_it_is_revoked(runs: Path, tmp_path: Path) -> None:
    tokens, identities = tmp_path / "tokens.json", tmp_path / "identities.yaml"
    token, worker = (add_token(tokens, name)[0].get_secret_value() for name in ("anna", "bo"))
    roles = '{name: anna, token: anna, roles: [watch]}, {name: bo, token: bo, roles: [worker], clients: ["*"]}'
    identities.write_text(f"version: 1\nidentities: [{roles}]\n")
    with shown(runs, Access(tokens, identities)) as port:
        first = asked(port, "/run/avg?x=1", host="runs.example")
        assert (first.status, first.headers["www-authenticate"]) == (401, "Bearer")
        assert 'value="/run/avg?x=1"' in first.text
        assert "vowel" not in first.text
        assert asked(port, "/", Authorization=f"Bearer {token}").status == 200
        for wrong in (worker, token[:-1] + ("a" if token[-1] != "a" else "b"), "", "x" * 40, "ü"):
            assert asked(port, "/", Authorization=f"Bearer {quote(wrong)}").status == 401
            refused = asked(port, "/login", "POST", urlencode({"token": wrong, "next": "/"}))
            assert refused.status == 401
            assert "set-cookie" not in refused.headers
            assert not wrong or wrong not in refused.text
        entered = asked(port, "/login", "POST", urlencode({"token": token, "next": "/run/avg"}))
        assert (entered.status, entered.headers["location"]) == (303, "/run/avg")
        cookie = entered.headers["set-cookie"]
        assert tells(cookie, "HttpOnly", "SameSite=strict")
        assert token not in cookie
        session = cookie.partition(";")[0]
        assert asked(port, "/", Cookie=session).status == 200
        assert asked(port, "/", Cookie=session[:-1]).status == 401
        revoke_tokens(tokens, "anna")
        assert asked(port, "/", Cookie=session).status == 401
        assert asked(port, "/", Authorization=f"Bearer {token}").status == 401


@pytest.mark.parametrize("target", ["//evil.example/", "/\\evil.example", "https://evil.example", ""])
def test_a_login_leads_to_no_other_site(runs: Path, tmp_path: Path, target: str) -> None:
    token = add_token(tmp_path / "tokens.json", "anna")[0].get_secret_value()
    with shown(runs, Access(tmp_path / "tokens.json")) as port:
        entered = asked(port, "/login", "POST", urlencode({"token": token, "next": target}))
        assert (entered.status, entered.headers["location"]) == (303, "/")
        assert asked(port, "/login", "POST", "x" * 10_000).status == 413


# ---- the command


def test_the_command_serves_until_it_is_stopped(runs: Path) -> None:
    with started("ui", runs, "--listen", "127.0.0.1:0") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
        assert match is not None, line
        until(lambda: asked(int(match[1]), "/healthz").status == 200, "the page is served")
        assert "ditto" in asked(int(match[1]), "/").text
        process.send_signal(signal.SIGTERM)
        ended(process, 0)


def test_a_missing_folder_a_file_and_a_port_in_use_are_refused(runs: Path, tmp_path: Path) -> None:
    assert tells(fedloom("ui", tmp_path / "none", code=3), "none", "does not exist")
    (tmp_path / "file").touch()
    assert tells(fedloom("ui", tmp_path / "file", code=3), "file", "is a file")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert tells(fedloom("ui", runs, "--listen", address, code=2), "--listen", address, "taken")
    assert tells(fedloom("ui", runs, "--listen", "nonsense", code=2), "--listen", "HOST:PORT", "nonsense")


def test_other_machines_need_a_token_and_consent_to_plaintext(runs: Path, tmp_path: Path) -> None:
    everywhere = ("ui", runs, "--listen", "0.0.0.0:0")
    assert tells(fedloom(*everywhere, code=2), "--listen", "0.0.0.0", "without a token", "tokens.json")
    assert tells(fedloom(*everywhere, "--insecure", code=2), "without a token")
    add_token(tmp_path / "tokens.json", "anna")
    credentials = ("--credentials", tmp_path)
    assert tells(fedloom(*everywhere, *credentials, code=2), "--listen", "plaintext", "--insecure")
    with started(*everywhere, *credentials, "--insecure") as process:
        assert process.stdout is not None
        match = re.search(r":(\d+)/", process.stdout.readline())
        assert match is not None
        assert asked(int(match[1]), "/", host="anything").status == 401


def test_a_damaged_token_file_is_refused(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text(json.dumps({"version": 1}))
    assert tells(fedloom("ui", runs, "--credentials", tmp_path, code=2), "tokens.json")
