"""The admin port against who should not ask, or asks badly: other names, other origins, no token, no end."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sidecar.admin.access import CLIENT_WITHIN, MOST_CONNECTIONS, AccessPolicy
from tests.kit.browser import browser
from tests.kit.harness import MORE_THAN_A_FIFO, fill
from tests.kit.pipes import read_all
from tests.kit.processes import Sidecar, job, penstock, penstock_with, sidecar, write_job
from tests.kit.stub import S3Stub, fails

PROBE_WITHIN = 5.0
"""Seconds: on an idle machine the slowest of 120 probes took 0.9 s, with 1,000 clients."""
CLIENTS = 600
LATE = 0.5
"""Seconds from a probe's connection to its request, as on a busy machine."""
TOKEN = "0123456789abcdef"
OPEN, CLOSED = ("/livez", "/readyz"), ("/", "/status", "/events", "/metrics", "/limits")


SOON = 3.0
"""Seconds in place of `CLIENT_WITHIN`, for tests that wait until a client's time is over."""
HURRIED = penstock_with(*(f"sidecar.admin.{name}.CLIENT_WITHIN = {SOON}" for name in ("access", "server")))


@contextlib.contextmanager
def serving(stub: S3Stub, tmp_path: Path, prefix: Sequence[str] = (), **admin: str) -> Iterator[Sidecar]:
    """A running sidecar's, with a token."""
    (tmp_path / "token").write_text(TOKEN)
    section = {"Port": 0, "TokenFile": str(tmp_path / "token")} | admin
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/", Admin=section))
    with sidecar(path, prefix=prefix) as running:
        running.wait_for("ready")
        yield running
        assert running.end() == 0


def ask(
    running: Sidecar, path: str = "/status", method: str = "GET", body: bytes | None = None, **headers: str
) -> Any:
    """The status and headers of an answer; `headers` with `_` for `-`, over what a client would send."""
    address = running.url.removeprefix("http://")
    connection = http.client.HTTPConnection(address)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.putrequest(method, path, skip_host="Host" in named)
        for name, value in (named | ({"Content-Length": str(len(body))} if body is not None else {})).items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.headers
    finally:
        connection.close()


def basic(password: str) -> str:
    return f"Basic {base64.b64encode(f'me:{password}'.encode()).decode()}"


def test_another_name_is_not_answered(stub: S3Stub, tmp_path: Path) -> None:
    """By DNS a page of evil.example may point here; and what a browser would say of itself is refused too."""
    fill(stub, [10], prefix="b/train/")
    with serving(stub, tmp_path) as running:
        port = running.url.rpartition(":")[2]
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "",
        ):
            for path in (*OPEN, *CLOSED):
                assert ask(running, path, Host=host)[0] == 421, (host, path)
        for host in ("127.0.0.1", f"localhost:{port}", "[::1]:80"):
            assert ask(running, Host=host)[0] == 200
        status, headers = ask(running, "/")
        assert status == 200
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert (
            "unsafe-inline"
            not in headers["Content-Security-Policy"].partition("script-src")[2].partition(";")[0]
        )
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert "Server" not in headers


def test_pages_of_other_origins_are_refused(stub: S3Stub, tmp_path: Path) -> None:
    """Even with the token, which a browser may have been given: simple and preflighted requests alike."""
    fill(stub, [10], prefix="b/train/")
    with serving(stub, tmp_path) as running:
        own = {"Authorization": f"Bearer {TOKEN}", "Content_Type": "application/json"}
        body = b'{"requests_in_flight": 3}'
        for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "https://localhost"):
            assert ask(running, Origin=origin)[0] == 403
            assert ask(running, "/events", Origin=origin)[0] == 403
            for method in ("PATCH", "POST", "OPTIONS"):
                status, headers = ask(running, "/limits", method, body, Origin=origin, **own)
                assert status == 403
                assert not [name for name in headers if name.lower().startswith("access-control")]
        assert running.status()["limits"]["requests_in_flight_adapt"] is True
        assert ask(running, "/limits", "PATCH", body, Origin=running.url, **own)[0] == 200
        assert running.status()["limits"]["requests_in_flight"] == 3


def test_what_needs_the_token(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [10], prefix="b/train/")
    with serving(stub, tmp_path, Protect="all") as running:
        for path in CLOSED:
            for given in (
                None,
                "Bearer",
                f"Bearer {TOKEN}x",
                f"Bearer {TOKEN[:-1]}",
                TOKEN,
                basic("no"),
                "Basic %",
                "Bearer \xff",
            ):
                headers: dict[str, Any] = {} if given is None else {"Authorization": given}
                status, answer = ask(running, path, **headers)
                assert status == 401, (path, given)
                assert answer["WWW-Authenticate"].startswith("Basic ")
            assert ask(running, path, Authorization=f"Bearer {TOKEN}")[0] == 200
            assert ask(running, path, Authorization=basic(TOKEN))[0] == 200
        for path in OPEN:
            assert ask(running, path)[0] == 200
        assert penstock("probe", "--url", running.url).returncode == 0
        refused = penstock("top", "--once", "--url", running.url)
        assert (refused.returncode, "this is not the token" in refused.stderr) == (2, True)
        shown = penstock("top", "--once", "--url", running.url, "--token-file", str(tmp_path / "token"))
        assert (shown.returncode, "train" in shown.stdout) == (0, True)


def test_elsewhere_than_on_loopback_names_are_the_operator_s() -> None:
    for host in ("0.0.0.0", "10.0.0.1", "::", "penstock"):
        guard = AccessPolicy(host, token=None, protect_all=False)
        assert guard.check(method="GET", path="/", headers={"host": "penstock.ns.svc:9781"}) is None
    for host in ("127.0.0.1", "::1", "localhost", "127.3.2.1"):
        guard = AccessPolicy(host, token=None, protect_all=False)
        refusal = guard.check(method="GET", path="/", headers={"host": "penstock.ns.svc"})
        assert refusal is not None
        assert refusal.status == 421


def silent(address: tuple[str, int], text: bytes) -> socket.socket:
    made = socket.create_connection(address)
    made.sendall(text)
    return made


@pytest.mark.timeout(120)
def test_dawdlers_do_no_harm_to_streaming(stub: S3Stub, tmp_path: Path) -> None:
    """Half heads, half bodies, nothing at all, and too much: an epoch passes by them, the port comes back."""
    truth = fill(stub, [MORE_THAN_A_FIFO], prefix="b/train/")
    with serving(stub, tmp_path, HURRIED) as running:
        host, _, port = running.url.removeprefix("http://").partition(":")
        address = host, int(port)
        fds = f"/proc/{running.process.pid}/fd"  # root's: the process has credentials in memory
        descriptors = len(os.listdir(fds)) if os.access(fds, os.R_OK) else None
        patch = (
            f"PATCH /limits HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\n"
            "Content-Length: 99\r\n\r\n{"
        )
        many = [
            silent(address, text)
            for text in (b"", b"GET / HTTP/1.1\r\nX-A:", patch.encode())
            for _ in range(40)
        ]
        got: list[bytes] = []
        reader = threading.Thread(target=lambda: got.append(read_all(tmp_path / "ml/input/data/train_0")))
        reader.start()
        running.wait_for("epoch complete")
        reader.join()
        assert got == [truth]
        if descriptors is not None:
            assert len(os.listdir(fds)) <= descriptors + MOST_CONNECTIONS + 64
        for each in many:
            with contextlib.suppress(ConnectionResetError):
                while each.recv(65536):
                    pass
            each.close()
        for stated in (
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * 100_000 + b"\r\n",
        ):
            with contextlib.suppress(ConnectionError), silent(address, stated) as each:
                assert b" 400 " in each.recv(64)
        big = b'{"bandwidth":' + b" " * 100_000 + b"1}"
        assert ask(running, "/limits", "PATCH", big, Authorization=f"Bearer {TOKEN}")[0] == 413
        deep = b"[" * 15_000
        assert ask(running, "/limits", "PATCH", deep, Authorization=f"Bearer {TOKEN}")[0] == 400
        assert ask(running)[0] == 200
        assert not [event for event in running.events if "exception" in event]  # nobody fills the log


@pytest.mark.timeout(120)
def test_clients_that_hold_every_connection_keep_no_probe_out(stub: S3Stub, tmp_path: Path) -> None:
    """Silent, slow, idle and unread ones, which come again: a probe is answered, and its client may stay."""
    fill(stub, [10], prefix="b/train/")
    with serving(stub, tmp_path) as running:
        address = running.url.removeprefix("http://")
        command = [sys.executable, "-m", "tests.kit.dawdlers", address, "--clients", str(CLIENTS)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as attack:
            assert attack.stdout is not None
            assert attack.stdout.readline() == "connected\n"
            for number in range(16):
                probe = http.client.HTTPConnection(address, timeout=PROBE_WITHIN)
                with contextlib.closing(probe):
                    probe.connect()
                    if not number % 8:
                        time.sleep(LATE)
                    probe.request("GET", "/livez")
                    assert probe.getresponse().status == 200
            output, _ = attack.communicate()
        assert int(output.split()[2]) > CLIENTS - MOST_CONNECTIONS, output  # the attack went on
        assert ask(running, "/metrics")[0] == 200


@pytest.mark.timeout(120)
def test_every_request_of_a_connection_has_its_time(stub: S3Stub, tmp_path: Path) -> None:
    """A kept connection is closed as one is that has sent nothing, and 15 s are the most."""
    fill(stub, [10], prefix="b/train/")
    assert CLIENT_WITHIN <= 15
    with serving(stub, tmp_path, HURRIED) as running, contextlib.ExitStack() as stack:
        host, _, port = running.url.removeprefix("http://").partition(":")
        connections = []
        for first in (b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n", b""):
            for after in (b"", b"GET / HTTP/1.1\r\nX-A:"):
                connection = stack.enter_context(silent((host, int(port)), first))
                if first:
                    assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
                connection.sendall(after)
                connection.settimeout(SOON + PROBE_WITHIN)
                connections.append(connection)
        for connection in connections:
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(65536):
                    pass


def test_a_body_that_cannot_be_read_is_the_client_s_mistake(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [10], prefix="b/train/")
    with serving(stub, tmp_path) as running:
        token = {"Authorization": f"Bearer {TOKEN}"}
        for body, headers in (
            (b"no such encoding", {"Content-Encoding": "deflate"}),
            (b"no such encoding", {"Content-Encoding": "gzip"}),
            ('{"bandwidth": 1}'.encode("utf-16"), {}),
            (b'{"bandwidth": %s}' % (b"9" * 400), {}),
        ):
            assert ask(running, "/limits", "PATCH", body, **token, **headers)[0] == 400
            ask(running, "/livez", "POST", body, **headers)  # nobody reads that body, and it needs no token
        named = {"Content-Type": "application/json; charset=nonsense"}
        assert ask(running, "/limits", "PATCH", b"{}", **token, **named)[0] == 200  # JSON is UTF-8
        assert ask(running, "/metrics")[0] == 200
        assert not [event for event in running.events if "exception" in event]


def test_head_is_answered_by_headers_alone(stub: S3Stub, tmp_path: Path) -> None:
    """The events, which have no end, too."""
    fill(stub, [10], prefix="b/train/")
    with serving(stub, tmp_path) as running:
        host, _, port = running.url.removeprefix("http://").partition(":")
        for path in (*OPEN, *CLOSED):
            request = f"HEAD {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
            with silent((host, int(port)), request.encode()) as connection:
                answer = b"".join(iter(lambda: connection.recv(65536), b""))
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert answer.endswith(b"\r\n\r\n")


KEY = (
    "b/train/<img src=x onerror=document.title='owned'>"
    "\"'><script>document.title='owned'</script>&amp;\n\x1b[31m"
)


@pytest.mark.e2e
def test_a_key_is_no_markup_on_the_page(stub: S3Stub, tmp_path: Path) -> None:
    """A failed epoch's error names the key: on the page it is text."""
    stub.objects[KEY] = b"text"
    stub.script(*[fails(403, "AccessDenied")] * 5)
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    with sidecar(path) as running, browser() as chromium:
        running.wait_for("ready")
        with open(tmp_path / "ml/input/data/train_0", "rb", buffering=0):
            running.wait_for("epoch failed")
            page = chromium.new_page()
            complaints = []
            page.on("console", lambda message: complaints.append(message.text))
            page.goto(running.url)
            page.wait_for_selector('[data-bottleneck][data-kind="failed"]')
            assert "onerror" in page.locator("[data-bottleneck]").text_content()
            assert page.title() == "Failed: train · Penstock"
            assert page.evaluate("document.querySelectorAll('img, main script').length") == 0
            assert [each for each in complaints if "Content Security Policy" in each] == []
            # What the policy is for: a script that had got in would not run.
            page.evaluate(
                "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=1\">')"
            )
            page.evaluate("""
                const got = document.createElement('script');
                document.body.append(Object.assign(got, {text: 'document.title=2'}));
            """)
            page.wait_for_function("performance.now() > 0")
            assert page.title() == "Failed: train · Penstock"
            page.close()
            assert json.loads(running.get("/status")[1])["channels"]["train"]["errors"]
        assert running.end() == 3
