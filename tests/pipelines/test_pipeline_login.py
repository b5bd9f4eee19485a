"""`fedloom pipeline` against a multi-user Kubeflow: expiring tokens, sessions, gateways and profiles."""

from __future__ import annotations

import json
import logging
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_schemas
import pytest
import yaml
from facts import mentions, tells
from kfp_api import Fault, KubeflowApi, serving
from kfp_login import Gateway, Page, jwt
from run_processes import EXPERIMENT
from typer.testing import CliRunner, Result

from fedloom.cli.main import app
from fedloom.errors import ExperimentError, FedloomError, RefusedError, StorageError
from fedloom.kubeflow import authentication
from fedloom.kubeflow import submit as submitting
from fedloom.kubeflow.api import Kubeflow
from fedloom.kubeflow.authentication import Credential, api_credential, expiry_of
from fedloom.kubeflow.settings import KubeflowSettings

pytestmark = pytest.mark.xdist_group("components")
PROFILE = "team-a"


@pytest.fixture
def api() -> Iterator[KubeflowApi]:
    with serving(KubeflowApi(namespaces=(PROFILE,))) as one:
        yield one


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(submitting.wait_for_run, "__kwdefaults__", {"poll_s": 0.005})
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("KF_PIPELINES_ENDPOINT", "FEDLOOM_KUBEFLOW_TOKEN", "FEDLOOM_KUBEFLOW_COOKIE", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def submit(api: KubeflowApi, tmp_path: Path) -> Callable[..., Result]:
    """Run `fedloom pipeline submit` in this process, with these settings of the installation."""
    experiment, place = tmp_path / "experiment.yaml", tmp_path / "kubeflow.yaml"
    experiment.write_text(yaml.safe_dump(EXPERIMENT))

    def run(*arguments: str, **settings: Any) -> Result:
        place.write_text(yaml.safe_dump({"host": api.host, "namespace": PROFILE, **settings}))
        command = ["pipeline", "submit", "personalized_federation", str(experiment), "--backend", "local"]
        return CliRunner().invoke(app, [*command, "--kubeflow", str(place), *arguments])

    return run


@pytest.fixture
def issuer(tmp_path: Path) -> Callable[..., str]:
    """Return a command that prints one token after the other, and records their number in the file `issued`."""

    def of(tokens: list[str]) -> str:
        (tmp_path / "tokens.json").write_text(json.dumps(tokens))
        (tmp_path / "issued").write_text("0")
        script = tmp_path / "issue.py"
        script.write_text(
            "import json, pathlib\n"
            f"folder = pathlib.Path({str(tmp_path)!r})\n"
            "number = int((folder / 'issued').read_text())\n"
            "(folder / 'issued').write_text(str(number + 1))\n"
            "print(json.loads((folder / 'tokens.json').read_text())[number])\n"
        )
        return shlex.join([sys.executable, "-S", str(script)])

    return of


def failed(result: Result, kind: type[FedloomError]) -> str:
    """Return the message of a command that failed with an error of a class."""
    assert isinstance(result.exception, kind), (result.output, result.exception)
    return str(result.exception)


def client(api: KubeflowApi, **login: Any) -> Kubeflow:
    return Kubeflow(api.host, PROFILE, api_credential(**login))


@pytest.mark.slow
def test_a_long_wait_outlives_its_tokens(
    api: KubeflowApi, submit: Callable[..., Result], issuer: Callable[..., str], tmp_path: Path
) -> None:
    """Each token is accepted for only five requests: the API rejects it before it appears to expire."""
    tokens = [jwt(number) for number in range(40)]
    api.tokens = dict.fromkeys(tokens, 5)
    api.script = [("RUNNING", [])] * 20 + [("SUCCEEDED", [("plan", "SUCCEEDED", "")])]
    result = submit("--wait", token_command=issuer(tokens))
    assert result.exit_code == 0, result.output
    assert int((tmp_path / "issued").read_text()) >= 5
    assert api.counts() == (1, 1, 1, 1)  # no request was carried out twice
    assert not mentions(result.output, tokens[0][-40:])


def test_an_expiring_token_is_replaced_before_it_is_rejected(
    api: KubeflowApi, issuer: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    tokens = [jwt(0, exp=now + 600), jwt(1, exp=now + 1200)]
    api.tokens = dict.fromkeys(tokens, 100)
    kubeflow = client(api, token_command=issuer(tokens))
    kubeflow.pipeline("x")
    kubeflow.pipeline("x")
    assert (tmp_path / "issued").read_text() == "1"  # kept
    monkeypatch.setattr(authentication.time, "time", lambda: now + 600 - authentication.SPARE_S + 1)
    kubeflow.pipeline("x")
    assert (tmp_path / "issued").read_text() == "2"
    assert api.tokens[tokens[1]] == 99


def test_a_temporarily_failing_command_keeps_a_valid_token(caplog: pytest.LogCaptureFixture) -> None:
    soon = jwt(lasts_s=30)
    answers: list[str | None] = [soon, None, None]

    def read() -> str:
        if (answer := answers.pop(0)) is None:
            raise RefusedError("the cluster does not respond")
        return answer

    credential = Credential(read, kept=True)
    with caplog.at_level(logging.WARNING, "fedloom.kubeflow"):
        assert credential.value == soon
    assert mentions(caplog.text, "the cluster does not respond")
    with pytest.raises(StorageError):
        credential.renew()  # it was rejected: another is needed


def test_waiting_tolerates_a_temporarily_failing_command(
    api: KubeflowApi, submit: Callable[..., Result], issuer: Callable[..., str], tmp_path: Path
) -> None:
    first, second = jwt(1), jwt(2)
    api.tokens = {first: 12, second: 100}
    api.script = [("RUNNING", [])] * 9 + [("SUCCEEDED", [("plan", "SUCCEEDED", "")])]
    result = submit("--wait", token_command=issuer([first, "", "", second]))
    assert result.exit_code == 0, (result.output, result.exception)
    assert (tmp_path / "issued").read_text() == "4"


def test_examples_on_the_page_are_valid() -> None:
    """Check the file of an installation, and the object that gives pods a token, as a pod has it."""
    page = (Path(__file__).parents[2] / "docs" / "kubeflow.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    (settings,) = [block for block in blocks if "token_command" in block]
    found = KubeflowSettings.model_validate(settings, strict=True)
    assert found.store.keys == {"AWS_ACCESS_KEY_ID": "accesskey", "AWS_SECRET_ACCESS_KEY": "secretkey"}
    (default,) = [block["spec"] for block in blocks if block.get("kind") == "PodDefault"]
    container = {"name": "c", "image": "i:1", "env": default["env"], "volumeMounts": default["volumeMounts"]}
    spec = {"containers": [container], "volumes": default["volumes"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec}
    kubernetes_schemas.check(pod)
    assert set(default) - {"desc", "selector"} == {"env", "volumeMounts", "volumes"}
    ((source,),) = ([*volume["projected"]["sources"]] for volume in default["volumes"])
    assert source["serviceAccountToken"]["audience"] == authentication.AUDIENCE
    path = f"{container['volumeMounts'][0]['mountPath']}/{source['serviceAccountToken']['path']}"
    assert path == default["env"][0]["value"] == authentication.TOKEN_FILE


def test_a_rejected_projected_token_is_read_again(
    api: KubeflowApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet replaces the file after we read it and before the API checks the token."""
    file, old, new = tmp_path / "token", jwt(0), jwt(1)

    class Late(Gateway):
        def answer(self, *arguments: Any, **named: Any) -> Page | None:
            file.write_text(new)
            return super().answer(*arguments, **named)

    file.write_text(old)
    api.tokens, api.gateway = {new: 10}, Late()
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(file))
    kubeflow = client(api, in_cluster=True)
    assert kubeflow.pipeline("x") is None
    assert api.asked == ["GET /pipelines", "GET /pipelines"]
    assert api.tokens == {new: 9}


def test_kfps_client_accepts_our_credentials(api: KubeflowApi, issuer: Callable[..., str]) -> None:
    import kfp

    tokens = [jwt(number) for number in range(3)]
    api.tokens = dict.fromkeys(tokens, 50)
    credential = api_credential(token_command=issuer(tokens))
    found = kfp.Client(host=api.host, namespace=PROFILE, credentials=credential)
    assert found.list_experiments(namespace=PROFILE).experiments == []
    assert 0 < api.tokens[tokens[0]] < 50


@pytest.mark.parametrize("gateway", [None, Gateway(), Gateway(redirects=True)])
def test_a_request_without_a_login_explains_how_to_log_in(
    api: KubeflowApi, submit: Callable[..., Result], gateway: Gateway | None
) -> None:
    api.gateway, api.token = gateway, "known"
    output = failed(submit(), RefusedError)
    assert tells(output, "token_command", "kubectl create token", PROFILE, "--audience=pipelines.kubeflow.org")
    assert tells(output, "cookie", "oauth2_proxy_kubeflow")
    assert api.counts() == (0, 0, 0, 0)


@pytest.mark.parametrize("gateway", [None, Gateway()])
def test_a_rejected_token_is_described_without_its_text(
    api: KubeflowApi, submit: Callable[..., Result], gateway: Gateway | None
) -> None:
    ended = jwt(lasts_s=-60.0, aud=["https://kubernetes.default.svc"])
    api.gateway, api.tokens = gateway, {jwt(): 10}
    output = failed(submit(token=ended), RefusedError)
    assert tells(output, "system:serviceaccount:team-a:default-editor", "https://kubernetes.default.svc", "expired at")
    assert tells(output, "kubectl create token")
    assert not any(part in output for part in ended.split("."))


def test_a_token_command_is_rerun_only_once(
    api: KubeflowApi, submit: Callable[..., Result], issuer: Callable[..., str], tmp_path: Path
) -> None:
    api.tokens = {jwt(9): 10}
    assert tells(failed(submit(token_command=issuer([jwt(n) for n in range(9)])), RefusedError), "not accepted")
    assert (tmp_path / "issued").read_text() == "2"


def test_a_gateway_without_service_account_support(api: KubeflowApi, submit: Callable[..., Result]) -> None:
    api.gateway, api.tokens = Gateway(trusts_accounts=False), {jwt(): 10}
    assert tells(failed(submit(token=jwt()), RefusedError), "m2m-dex-only", "cookie", "port-forward")


def test_a_session_behind_oauth2_proxy(api: KubeflowApi, submit: Callable[..., Result], tmp_path: Path) -> None:
    api.gateway = Gateway(session="c2VjcmV0=|1700000000|signature=")
    file = tmp_path / "cookie"
    file.write_text(f"oauth2_proxy_kubeflow={api.gateway.session}\n")
    result = submit(cookie=f"@{file}")
    assert result.exit_code == 0, result.output
    assert f"{api.host}/#/runs/details/" in result.output  # the interface is also behind the gateway
    assert api.gateway.session not in result.output
    output = failed(submit(cookie="oauth2_proxy_kubeflow=of-yesterday"), RefusedError)
    assert tells(output, "cookie", "oauth2_proxy_kubeflow")
    assert "of-yesterday" not in output


@pytest.mark.parametrize("redirects", [False, True])
def test_a_session_that_expires_while_waiting(
    api: KubeflowApi, submit: Callable[..., Result], tmp_path: Path, redirects: bool
) -> None:
    """A new cookie in the file continues the wait; otherwise only the run continues, and the command says so."""
    api.gateway = Gateway(session="first", redirects=redirects)
    file = tmp_path / "cookie"
    file.write_text("oauth2_proxy_kubeflow=first")
    kubeflow = client(api, cookie=f"@{file}")
    kubeflow.pipeline("x")
    api.gateway.session = "second"
    with pytest.raises(RefusedError):
        kubeflow.pipeline("x")
    file.write_text("oauth2_proxy_kubeflow=second")
    kubeflow.pipeline("x")
    assert api.gateway.cookies[-1] == "oauth2_proxy_kubeflow=second"


def test_a_login_page_with_status_200_is_not_taken_for_a_run(api: KubeflowApi) -> None:
    kubeflow = client(api, token="known")
    api.login_page = True
    with pytest.raises(RefusedError):
        kubeflow.run("00000000-0000-0000-0000-000000000000")


def test_a_moved_installation_is_reported(api: KubeflowApi, submit: Callable[..., Result]) -> None:
    moved = "https://kubeflow.example/pipeline/apis/v2beta1/healthz"
    api.faults = [Fault("GET /healthz", status=301, location=moved)]
    assert tells(failed(submit(), ExperimentError), "https://kubeflow.example/pipeline;")


def test_missing_rights_are_named(api: KubeflowApi, submit: Callable[..., Result]) -> None:
    output = failed(submit(namespace="team-b"), RefusedError)
    assert tells(output, "system:serviceaccount:team-a:default-editor", "list pipelines", "team-b", "kubeflow-edit")


def test_a_run_of_another_profile(api: KubeflowApi, submit: Callable[..., Result], tmp_path: Path) -> None:
    assert submit().exit_code == 0
    (run,) = api.runs
    next(iter(api.experiments.values()))["namespace"] = "team-b"
    for command, right in (("wait", "get runs"), ("stop", "get runs")):
        place = str(tmp_path / "kubeflow.yaml")
        result = CliRunner().invoke(app, ["pipeline", command, run, "--kubeflow", place])
        assert tells(failed(result, RefusedError), right, "team-b")


@pytest.mark.parametrize(
    ("settings", "kind", "facts"),
    [
        ({"token": "x", "token_command": "y"}, ExperimentError, ("token", "token_command")),
        ({"cookie": "a=b", "in_cluster": True}, ExperimentError, ("cookie", "in_cluster")),
        ({"token_command": "kubectl 'create"}, ExperimentError, ("token_command",)),
        ({"token_command": "   "}, ExperimentError, ("token_command",)),
        ({"token_command": "no-such-program-here --x"}, RefusedError, ("token_command", "no-such-program-here")),
        ({"token_command": f"{sys.executable} -S -c 'import sys; sys.exit(\"no such account\")'"}, RefusedError,
         ("token_command", "no such account")),
        ({"token_command": f"{sys.executable} -S -c 'print()'"}, RefusedError, ("token_command",)),
        ({"token_command": f"{sys.executable} -S -c 'print(1); print(2)'"}, RefusedError, ("token_command",)),
        ({"token": "@/no/such/file"}, RefusedError, ("/no/such/file",)),
        ({"cookie": "secret-without-a-name"}, RefusedError, ("cookie", "oauth2_proxy_kubeflow")),
        ({"cookie": "a=b\nHost: c"}, RefusedError, ("cookie",)),
    ],
)  # fmt: skip
def test_invalid_logins(
    api: KubeflowApi,
    submit: Callable[..., Result],
    settings: dict[str, Any],
    kind: type[FedloomError],
    facts: tuple[str, ...],
) -> None:
    output = failed(submit(**settings), kind)
    assert tells(output, *facts)
    assert "secret-without-a-name" not in output
    assert api.asked == []


def test_a_token_command_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "COMMAND_S", 0.2)
    with pytest.raises(RefusedError):
        api_credential(token_command=shlex.join([sys.executable, "-S", "-c", "import time; time.sleep(60)"]))


def test_the_content_of_binary_files_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes("geheim-ü".encode("latin-1"))
    with pytest.raises(RefusedError) as refused:
        api_credential(f"@{tmp_path / 'token'}")
    assert "geheim" not in f"{refused.value}{refused.value.__cause__}"


def test_a_login_file_takes_precedence_over_the_environment(tmp_path: Path) -> None:
    environment = {"FEDLOOM_KUBEFLOW_TOKEN": "t", "FEDLOOM_KUBEFLOW_COOKIE": "a=b", "KF_PIPELINES_ENDPOINT": "http://x"}
    file = tmp_path / "kubeflow.yaml"
    file.write_text("token_command: kubectl create token default-editor\n")
    found = KubeflowSettings.of(str(file), environment)
    assert (found.host, found.token, found.cookie) == ("http://x", None, None)
    del environment["FEDLOOM_KUBEFLOW_TOKEN"]
    assert KubeflowSettings.of(None, environment).cookie == "a=b"
    assert "a=b" not in repr(KubeflowSettings.of(None, environment))


@pytest.mark.parametrize(
    ("token", "ends"),
    [
        (jwt(exp=1_900_000_000), 1_900_000_000.0),
        ("opaque", None),
        ("a.b.c", None),
        (jwt(exp="soon"), None),
        (jwt(exp=1e300), None),
        ("..".join("ab"), None),
    ],
)
def test_expiry_of_a_token(token: str, ends: float | None) -> None:
    assert expiry_of(token) == ends


def test_secrets_are_in_no_command_line_log_or_parameter(
    api: KubeflowApi,
    submit: Callable[..., Result],
    issuer: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    token = jwt()
    api.tokens = {token: 100}
    started: list[Any] = []
    run = subprocess.run

    def recorded(command: Any, *arguments: Any, **named: Any) -> Any:
        started.append(command)
        return run(command, *arguments, **named)

    monkeypatch.setattr(authentication.subprocess, "run", recorded)
    with caplog.at_level(logging.DEBUG):
        result = submit(token_command=issuer([token]))
    assert result.exit_code == 0, result.output
    everywhere = json.dumps([started, api.runs, api.versions, api.pipelines, api.experiments], default=str)
    assert started
    for text in (everywhere, caplog.text, result.output):
        assert token.rpartition(".")[0] not in text
