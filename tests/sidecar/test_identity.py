"""Who we are and whom we talk to: every documented source of credentials, TLS, anonymous access."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sidecar.process.exits import Exit
from tests.kit.harness import fill
from tests.kit.processes import job, penstock, write_job
from tests.kit.stub import S3Stub, Seen

EXPIRES = "2099-01-01T00:00:00Z"


class _Metadata(BaseHTTPRequestHandler):
    """The container and instance credential services, as their documentation has them."""

    def _answer(self, body: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_PUT(self) -> None:  # the session token of IMDSv2
        self._answer("imds-token")

    def do_GET(self) -> None:
        credentials = {"SecretAccessKey": "s", "Token": "TOK", "Expiration": EXPIRES, "Code": "Success"}
        if self.path == "/container":
            self._answer(json.dumps(credentials | {"AccessKeyId": "AKIDCONTAINER"}))
        elif self.path.endswith("/security-credentials/"):
            self._answer("my-role")
        elif self.path.endswith("/security-credentials/my-role"):
            assert self.headers["x-aws-ec2-metadata-token"] == "imds-token"
            self._answer(json.dumps(credentials | {"AccessKeyId": "AKIDINSTANCE"}))
        else:
            self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Metadata) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, stub: S3Stub) -> S3Stub:
    """The stub, and no credentials in the environment."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    fill(stub, [100], prefix="b/train/")
    return stub


def cat(stub: S3Stub, *options: str) -> Seen:
    done = penstock("cat", "s3://b/train/", "--endpoint-url", stub.url, "--path-style", *options, text=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == stub.objects["b/train/0000"]
    return stub.seen[-1]


def test_container_credentials(nobody: S3Stub, metadata: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{metadata}/container")
    seen = cat(nobody)
    assert "Credential=AKIDCONTAINER/" in (seen.authorization or "")
    assert seen.token == "TOK"


def test_instance_credentials(nobody: S3Stub, metadata: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata)
    assert "Credential=AKIDINSTANCE/" in (cat(nobody).authorization or "")


def test_profiles_and_their_region(nobody: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    (tmp_path / "config").write_text("[profile me]\nregion = eu-west-3\n")
    (tmp_path / "credentials").write_text("[me]\naws_access_key_id = AKIDME\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    authorization = cat(nobody, "--profile", "me").authorization or ""
    assert "Credential=AKIDME/" in authorization
    assert "/eu-west-3/s3/" in authorization
    assert "/us-east-2/s3/" in (cat(nobody, "--profile", "me", "--region", "us-east-2").authorization or "")
    monkeypatch.setenv("AWS_PROFILE", "me")
    assert "/eu-west-3/s3/" in (cat(nobody).authorization or "")


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"])
@pytest.mark.parametrize("by_botocore", [False, True])
def test_a_key_with_a_line_end_is_refused_at_once(
    stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, by_botocore: bool
) -> None:
    """A Kubernetes secret from `echo key | base64` has one."""
    fill(stub, [100], prefix="b/train/")
    monkeypatch.setenv(name, "of-a-secret-file\n")
    if by_botocore:
        (tmp_path / "config").write_text("[default]\nretry_mode = standard\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    done = penstock("cat", "s3://b/train/", "--endpoint-url", stub.url, "--path-style")
    assert done.returncode == Exit.DENIED
    assert f"{name} begins or ends with a space or a line end" in done.stderr
    assert "of-a-secret-file" not in done.stderr
    assert not stub.seen


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN"])
def test_a_key_beyond_ascii_is_refused(stub: S3Stub, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fill(stub, [100], prefix="b/train/")
    monkeypatch.setenv(name, "clé")
    done = penstock("cat", "s3://b/train/", "--endpoint-url", stub.url, "--path-style")
    assert done.returncode == Exit.DENIED
    assert "a letter beyond ASCII" in done.stderr


KEYS = '"Version": 1, "AccessKeyId": "AK", "SecretAccessKey": "SK"'


@pytest.mark.parametrize(
    "printed",
    ["hello", "null", f'{{{KEYS}, "Expiration": "soon"}}', f'{{{KEYS}, "Expiration": 5}}', None],
    ids=["no JSON", "null", "no date", "number", "absent"],
)
def test_a_source_of_credentials_that_breaks_is_named(
    nobody: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str | None
) -> None:
    """Neither the endpoint nor a response of S3 is at fault."""
    fill(nobody, [100], prefix="b/train/")
    process = tmp_path / "process"
    if printed is not None:
        process.write_text(f"#!/bin/sh\necho '{printed}'\n")
        process.chmod(0o755)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {process}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    done = penstock("cat", "s3://b/train/", "--endpoint-url", nobody.url, "--path-style")
    assert done.returncode == Exit.DENIED
    assert "no usable credentials (" in done.stderr
    assert "their source, which is custom-process" in done.stderr


def test_a_renewal_that_fails_has_no_traceback(
    nobody: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """botocore logs it as a warning, with one."""
    fill(nobody, [100], prefix="b/train/")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/x")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "absent"))
    done = penstock(
        "cat", "s3://b/train/", "--endpoint-url", nobody.url, "--path-style", "--give-up-after", "1"
    )
    assert done.returncode == Exit.DENIED
    assert "which is assume-role-with-web-identity" in done.stderr
    assert "Traceback" not in done.stderr


def test_anonymous_requests_are_not_signed(nobody: S3Stub) -> None:
    assert cat(nobody, "--anonymous").authorization is None


def test_the_job_file_names_them_too(nobody: S3Stub, tmp_path: Path) -> None:
    document = job(nobody.url, tmp_path / "ml", "b/train/")
    document["Penstock"]["Endpoint"]["Anonymous"] = True
    assert penstock("plan", "-c", write_job(tmp_path / "j.yaml", document)).returncode == 0


@pytest.fixture
def tls_stub(tls_stub: S3Stub) -> S3Stub:
    """`tls_stub` with an object."""
    fill(tls_stub, [3_000_000], prefix="b/train/")
    return tls_stub


def test_tls_with_a_private_authority(tls_stub: S3Stub, tmp_path: Path) -> None:
    cat(tls_stub, "--ca-bundle", str(tmp_path / "ca.pem"))


@pytest.mark.parametrize("name", ["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"])
@pytest.mark.parametrize("by_botocore", [False, True])
def test_the_environment_names_certificates(
    tls_stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, by_botocore: bool
) -> None:
    monkeypatch.setenv(name, str(tmp_path / "ca.pem"))
    if by_botocore:
        (tmp_path / "config").write_text("[default]\nretry_mode = standard\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    cat(tls_stub)


def test_an_unknown_certificate_is_refused(tls_stub: S3Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REQUESTS_CA_BUNDLE")  # botocore's own certificates
    done = penstock("cat", "s3://b/train/", "--endpoint-url", tls_stub.url, "--path-style")
    assert done.returncode == 5
    assert "--ca-bundle" in done.stderr


def test_a_ca_bundle_that_is_not_there(tls_stub: S3Stub, tmp_path: Path) -> None:
    options = ("--endpoint-url", tls_stub.url, "--path-style", "--ca-bundle", str(tmp_path / "none.pem"))
    done = penstock("cat", "s3://b/train/", *options)
    assert done.returncode == 2, done.stderr
    assert "none.pem" in done.stderr
