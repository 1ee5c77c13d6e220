"""The Secret of a cluster on Kubernetes: made once, left alone when it is there, and never given to a false server."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pdserve.base.errors import PdserveError, SetupError
from pdserve.cli.cluster_secrets.contents import new_secrets
from pdserve.cli.cluster_secrets.kubernetes import ApiServer, api_server
from pdserve.cli.secrets import main
from router_svc.clients.access import Access
from tests.support.certificates import Authority
from tests.support.kubernetes import PATH, FakeKubernetes, running_kubernetes, write_account

FILES = {"cluster-secret": b"one secret\n", "peer.pem": b"a certificate"}
OTHERS = {"cluster-secret": b"another", "peer.pem": b"another"}


def encoded(files: dict[str, bytes]) -> dict[str, str]:
    return {key: base64.b64encode(value).decode() for key, value in files.items()}


def no_key() -> None:
    """Shows nothing: these files have no API key."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("kubernetes") / "ca")


@pytest.fixture
def kubernetes(authority: Authority) -> Iterator[FakeKubernetes]:
    with running_kubernetes(authority) as found:
        yield found


@pytest.fixture
def account(tmp_path: Path, authority: Authority) -> Path:
    return write_account(tmp_path, authority)


@pytest.fixture
def server(kubernetes: FakeKubernetes, account: Path, monkeypatch: pytest.MonkeyPatch) -> ApiServer:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(kubernetes.port))
    return replace(api_server(account), pause_s=0)


def test_a_secret_is_made_with_the_token_of_the_pod(server: ApiServer, kubernetes: FakeKubernetes) -> None:
    assert server.create_secret("pdserve-secrets", FILES, no_key) is True
    assert kubernetes.secrets == {"pdserve-secrets": encoded(FILES)}
    [(_, looked_up, _, _), (method, path, headers, body)] = kubernetes.requests
    assert looked_up == f"{PATH}/pdserve-secrets"
    assert (method, path, headers["Authorization"]) == ("POST", PATH, "Bearer the-token")
    assert (body["apiVersion"], body["kind"], body["type"]) == ("v1", "Secret", "Opaque")


def test_a_secret_that_exists_is_left_alone(server: ApiServer, kubernetes: FakeKubernetes) -> None:
    """Fails if the Secret is replaced when it exists: every restart of the Job would end the cluster."""
    kubernetes.secrets["pdserve-secrets"] = encoded(OTHERS)
    assert server.create_secret("pdserve-secrets", FILES, no_key) is False
    assert kubernetes.secrets == {"pdserve-secrets": encoded(OTHERS)}
    assert {method for method, *_ in kubernetes.requests} == {"GET"}


def test_a_secret_that_lacks_keys_is_an_error_with_their_names(server: ApiServer, kubernetes: FakeKubernetes) -> None:
    kubernetes.secrets["pdserve-secrets"] = {"peer.pem": "YW5vdGhlcg=="}
    with pytest.raises(SetupError, match=r"exists, but has no cluster-secret\. Add"):
        server.create_secret("pdserve-secrets", FILES, no_key)


def test_a_secret_whose_answer_was_lost_is_known_as_the_own_one(server: ApiServer, kubernetes: FakeKubernetes) -> None:
    """Fails if 409 alone means that the Secret is another's: its key would be printed nowhere."""

    def lose_the_next_answer() -> None:
        kubernetes.loses_an_answer = True

    assert server.create_secret("pdserve-secrets", FILES, lose_the_next_answer) is True
    assert [method for method, *_ in kubernetes.requests] == ["GET", "POST", "POST", "GET"]


def test_the_key_is_shown_before_anything_has_it(server: ApiServer, kubernetes: FakeKubernetes) -> None:
    """Fails if the key is shown afterwards: a Job that ends in between makes a cluster that no key opens."""

    def end() -> None:
        assert kubernetes.secrets == {}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        server.create_secret("pdserve-secrets", FILES, end)
    assert kubernetes.secrets == {}


def test_a_secret_that_another_made_at_the_same_time_is_said(
    server: ApiServer,
    kubernetes: FakeKubernetes,
    account: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = kubernetes.answer

    def answer_late(method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        if method == "POST":
            kubernetes.secrets[body["metadata"]["name"]] = dict.fromkeys(body["data"], "b3RoZXI=")
        return answer(method, path, body)

    monkeypatch.setattr(kubernetes, "answer", answer_late)
    assert main(["--kubernetes-secret", "pdserve-secrets", "--service-account", str(account)]) == 0
    assert "The key above is not in it" in capsys.readouterr().err


def test_an_overloaded_server_gets_another_attempt(server: ApiServer, kubernetes: FakeKubernetes) -> None:
    kubernetes.refusals = [503, 429]
    assert server.create_secret("pdserve-secrets", FILES, no_key) is True
    kubernetes.refusals = [503] * 9
    with pytest.raises(PdserveError, match="does not answer GET"):
        server.create_secret("another", FILES, no_key)


def test_a_missing_right_is_an_error_with_the_servers_words(server: ApiServer, kubernetes: FakeKubernetes) -> None:
    kubernetes.refusals = [403]
    with pytest.raises(
        SetupError, match=r"403: secrets is forbidden: User cannot create.*Role pdserve-secrets"
    ) as error:
        server.create_secret("pdserve-secrets", FILES, no_key)
    assert not any(value in str(error.value) for value in encoded(FILES).values())
    assert len(kubernetes.requests) == 1


def test_a_namespace_that_is_not_there_is_an_error(server: ApiServer, kubernetes: FakeKubernetes) -> None:
    kubernetes.refusals = [404, 404]
    with pytest.raises(PdserveError, match="did not make the Secret pdserve-secrets: 404"):
        server.create_secret("pdserve-secrets", FILES, no_key)


def test_neither_token_nor_secrets_go_to_a_server_of_another_authority(
    server: ApiServer, kubernetes: FakeKubernetes, tmp_path: Path
) -> None:
    """Fails with a context that verifies nothing."""
    stranger = Authority(tmp_path / "stranger")
    context = ssl.create_default_context(cafile=str(stranger.certificate))
    with pytest.raises(PdserveError, match="certificate verify failed"):
        replace(server, context=context).create_secret("pdserve-secrets", FILES, no_key)
    assert kubernetes.requests == []


def test_outside_of_a_pod_files_are_the_way(account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SetupError, match="--to DIR"):
        api_server(account)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    (account / "token").unlink()
    with pytest.raises(SetupError, match="automountServiceAccountToken"):
        api_server(account)


def test_the_command_shows_the_first_key_once_and_puts_it_nowhere(
    server: ApiServer, kubernetes: FakeKubernetes, account: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--kubernetes-secret", "pdserve-secrets", "--service-account", str(account)]
    assert main(arguments) == 0
    key = capsys.readouterr().out.split()[-1]
    stored = {name: dict(data) for name, data in kubernetes.secrets.items()}
    assert main(arguments) == 0
    assert capsys.readouterr().out == ""
    assert kubernetes.secrets == stored
    assert stored.keys() == {"pdserve-secrets", "pdserve-secrets-state"}
    assert stored["pdserve-secrets-state"].keys() == {"state-password"}
    values = {name: base64.b64decode(value) for data in stored.values() for name, value in data.items()}
    assert "state-password" not in stored["pdserve-secrets"]
    assert values.keys() == {name for group in new_secrets(datetime.now(UTC)) for name in group.files}
    assert not any(key.encode() in value for value in values.values())
    (account / "api-keys.toml").write_bytes(values["api-keys.toml"])
    assert Access(path=account / "api-keys.toml").client([key], "").is_admin


def test_a_cluster_of_an_earlier_version_gets_the_secret_that_it_lacks_and_keeps_its_own(
    server: ApiServer, kubernetes: FakeKubernetes, account: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the Secret that is there has to have the password: the Job would fail, and routers wait for good."""
    arguments = ["--kubernetes-secret", "pdserve-secrets", "--service-account", str(account)]
    assert main(arguments) == 0
    earlier = dict(kubernetes.secrets["pdserve-secrets"])
    del kubernetes.secrets["pdserve-secrets-state"]
    capsys.readouterr()
    assert main(arguments) == 0
    assert capsys.readouterr().out == ""
    assert kubernetes.secrets.keys() == {"pdserve-secrets", "pdserve-secrets-state"}
    assert kubernetes.secrets["pdserve-secrets"] == earlier


def test_a_secret_that_lacks_keys_keeps_no_pod_from_another_one(
    server: ApiServer, kubernetes: FakeKubernetes, account: Path
) -> None:
    kubernetes.secrets["pdserve-secrets"] = {"cluster-secret": "b3RoZXI="}
    with pytest.raises(SetupError, match="Secret pdserve-secrets in the namespace ns exists, but has no api-keys"):
        main(["--kubernetes-secret", "pdserve-secrets", "--service-account", str(account)])
    assert "pdserve-secrets-state" in kubernetes.secrets


@pytest.mark.parametrize("arguments", [[], ["--to", "x", "--kubernetes-secret", "y"]])
def test_one_destination_has_to_be_named(arguments: list[str]) -> None:
    with pytest.raises(SetupError, match="either --to DIR or --kubernetes-secret NAME"):
        main(arguments)
