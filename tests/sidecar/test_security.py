"""Secrets that are planted by every way in, and looked for at every way out; dumps; no privileges."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from sidecar.config.mistakes import explain
from sidecar.config.settings import EndpointConfig
from sidecar.process.logs import configure, log
from streamer.secrets import redact, remember
from tests.kit.harness import fill
from tests.kit.pipes import read_all
from tests.kit.processes import PENSTOCK, job, penstock, sidecar, write_job
from tests.kit.stub import Answer, S3Stub
from tests.kit.terminal import terminal
from tests.kit.users import NOBODY, root, two_users

KEY_ID, SECRET, TOKEN = (
    "AKIAPLANTED000000001",
    "PLANTED/secret+key=40/characters&long",
    "PLANTED-session-token//==",
)
CUSTOMER_KEY = b"PLANTED-SSE-C-key-of-32-bytes-!!"
ADMIN, WRONG_ADMIN = "PLANTED-admin-token-01", "PLANTED-other-token-02"
PROXY, CONTAINER = "PLANTED-proxy-password", "PLANTED-container-token"
WEB_IDENTITY = "eyJhbGciOiJub25lIn0.eyJQTEFOVEVEIjoxfQ.PLANTEDsignature"
MADE = {
    "AccessKeyId": "AKIAPLANTED000000002",
    "SecretAccessKey": "PLANTED-by-a-process",
    "SessionToken": "PLANTEDtoo",
}
PLANTED = [
    "PLANTED",
    *(base64.b64encode(each).decode()[:16] for each in (CUSTOMER_KEY, SECRET.encode())),
]

pytestmark = pytest.mark.timeout(120)


def found_in(text: str) -> list[str]:
    return [each for each in PLANTED if each in text]


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Every way in that one process may have at once; returns the files of SSE-C key and admin token."""
    assert len(CUSTOMER_KEY) == 32
    for name, value in {
        "AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": TOKEN,
        "AWS_CONTAINER_AUTHORIZATION_TOKEN": CONTAINER, "https_proxy": f"http://me:{PROXY}@127.0.0.1:9",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    for name, content in {
        "key": CUSTOMER_KEY,
        "token": ADMIN.encode(),
        "wrong": WRONG_ADMIN.encode(),
    }.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def document(stub: S3Stub, place: Path, **options: Any) -> dict[str, Any]:
    """A job that takes all of `planted`."""
    found = job(
        stub.url, place / "ml", "b/train/", Admin={"Port": 0, "TokenFile": str(place / "token")}, **options
    )
    found["Penstock"]["Endpoint"]["SseCustomerKeyFile"] = str(place / "key")
    return found


async def echo(answer: Answer) -> web.Response:
    """Refuse, and repeat the request in the answer, as servers under debugging do."""
    customer, security = "x-amz-server-side-encryption-customer-key", "X-Amz-Security-Token"
    reported = {name: answer.request.headers.get(name) for name in (security, customer, "Authorization")}
    stated = "\n".join(f"{name}: {value}" for name, value in reported.items())
    stated = f"http://me:PLANTED-2@h/?X-Amz-Signature=PLANTED0123 {stated}"[:500]  # no more is taken of any
    body = f"<Error><Code>Odd</Code><Message>{escape(stated)}</Message></Error>"
    return web.Response(status=403, text=body, content_type="application/xml")


@contextlib.contextmanager
def echoing() -> Iterator[str]:
    """An HTTP server that refuses everything, repeating head and body; for STS and container endpoints."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            stated = f"{self.headers} {self.rfile.read(int(self.headers.get('Content-Length', 0))).decode()}"
            stated = f"<Error><Code>Odd</Code><Message>{escape(stated)}</Message></Error>"
            data = f"<ErrorResponse>{stated}</ErrorResponse>"
            self.send_response(400)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data.encode())

        do_POST = do_GET  # noqa: N815 - as the base class has it

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def processes() -> str:
    """Command lines of all processes of the machine."""
    stated = ""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
            stated += file.read()
    return stated


def files(folder: Path) -> str:
    """What is in every regular file below, and its name."""
    stated = ""
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            stated += str(path) + (path.read_text(errors="replace") if path.is_file() else "")
    return stated


async def right(answer: Answer) -> web.Response:
    return web.Response(status=206, body=answer.body, headers=answer.headers)


def test_planted_secrets_are_nowhere(stub: S3Stub, planted: Path) -> None:
    """A sidecar with a keeper: while it runs, when an epoch fails by what a server repeats, and after."""
    fill(stub, [100], prefix="b/train/")
    stub.script(right, *[echo] * 40)  # epoch 0 is one request
    path = write_job(planted / "job.yaml", document(stub, planted))
    with sidecar(path, "--log-level", "debug", "--keeper", "auto", cold=True) as running:
        running.wait_for("ready")
        assert read_all(planted / "ml/input/data/train_0")
        running.wait_for("epoch complete")
        assert stub.seen[0].token == TOKEN
        assert stub.seen[0].amz["x-amz-server-side-encryption-customer-key"]
        with open(planted / "ml/input/data/train_1", "rb", buffering=0):
            stated = running.wait_for("epoch failed")["error"]
            assert "X-Amz-Security-Token: ***" in stated, "the answer that repeats secrets is not told at all"
            stated += "".join(
                running.get(page)[1] for page in ("/", "/status", "/metrics", "/readyz", "/livez", "/limits")
            )
            with urllib.request.urlopen(running.url + "/events") as events:
                stated += events.readline().decode()
            shown = [
                penstock("top", "--once", "--url", running.url),
                penstock(
                    "set", "--url", running.url, "--token-file", f"{planted}/wrong", "requests_in_flight=3"
                ),
                penstock(
                    "set", "--url", running.url, "--token-file", f"{planted}/token", "requests_in_flight=3"
                ),
                penstock("probe", "--url", running.url),
            ]
            stated += processes() + files(planted / "ml")
            assert running.end() == 3
    assert [each.returncode for each in shown] == [0, 2, 0, 1]
    stated += (
        str(running.events) + "".join(each.stdout + each.stderr for each in shown) + files(planted / "ml")
    )
    assert found_in(stated) == []


CRASH = """
import os, sys, click
def crash(*_, **__):
    secret = "PLANTED-in-a-variable"
    raise RuntimeError(f"no {os.environ['AWS_SECRET_ACCESS_KEY']}")
click.echo = crash
sys.argv = ["penstock", *sys.argv[1:]]
from sidecar.__main__ import main
main()
"""


def test_no_command_shows_a_secret_whatever_fails(
    stub: S3Stub, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with what it says, and the exit code that shows that it failed as it should."""
    stub.objects["b/train/0"] = b"text" * 25
    path = write_job(planted / "job.yaml", document(stub, planted))
    down = document(stub, planted)
    down["Penstock"]["Endpoint"]["Url"] = "http://127.0.0.1:9"
    down["Penstock"]["GiveUpAfter"] = 0.1
    down["Penstock"]["BaseDirectory"] = str(planted / "elsewhere")  # two doctors in one would meet
    no_endpoint = write_job(planted / "down.yaml", down)
    cat = (
        "cat",
        "s3://b/train/",
        "--endpoint-url",
        stub.url,
        "--path-style",
        "--sse-customer-key-file",
        str(planted / "key"),
    )
    copy = 'cat "$SAGEMAKER_BASE_DIR/input/data/train_0" | wc -c'
    crash = [sys.executable, "-c", CRASH, "plan", "-c", path]
    commands = {
        "doctor": (0, [*PENSTOCK, "doctor", "-c", path]),
        "plan": (0, [*PENSTOCK, "plan", "-c", path, "--json"]),
        "cat": (0, [*PENSTOCK, *cat]),
        "endpoint down": (5, [*PENSTOCK, "plan", "-c", no_endpoint]),
        "doctor, endpoint down": (5, [*PENSTOCK, "doctor", "-c", no_endpoint, "--json"]),
        "an internal error": (1, crash),
    }
    with ThreadPoolExecutor(4) as threads:  # where the endpoint is down, they wait
        done = dict(
            zip(commands, threads.map(run, [command for _, command in commands.values()]), strict=True)
        )
        # After doctor, which makes and removes the same directories.
        commands["exec"] = (0, [*PENSTOCK, "exec", "-c", path, "--log-level", "warning", "sh", "-c", copy])
        done["exec"] = run(commands["exec"][1])
        stub.script(*[echo] * 20)
        commands |= {
            "cat, denied": (3, [*PENSTOCK, *cat]),
            "doctor, denied": (3, [*PENSTOCK, "doctor", "-c", path]),
        }
        for name in ("cat, denied", "doctor, denied"):
            done[name] = run(commands[name][1])
    for name, ended in done.items():
        assert ended.returncode == commands[name][0], (name, ended.stderr)
        assert found_in(ended.stdout + ended.stderr) == [], name
    assert "Traceback" in done["an internal error"].stderr
    assert "RuntimeError: no ***" in done["an internal error"].stderr
    assert "X-Amz-Security-Token: ***" in done["cat, denied"].stderr


def run(command: list[str]) -> subprocess.CompletedProcess[Any] | subprocess.CompletedProcess[str]:
    if command[: len(PENSTOCK)] == PENSTOCK:
        return penstock(*command[len(PENSTOCK) :])
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_no_source_of_credentials_tells_them(
    stub: S3Stub, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process, good and failing; a container's endpoint and an STS that repeat what they were sent."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    fill(stub, [100], prefix="b/train/")
    stub.script(*[echo] * 20)
    cat = ("cat", "s3://b/train/", "--endpoint-url", stub.url, "--path-style")
    (planted / "made").write_text(json.dumps({"Version": 1} | MADE))
    config = planted / "config"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    config.write_text(f"[default]\ncredential_process = cat {planted / 'made'}\n")
    ended = [penstock(*cat)]
    assert stub.seen[-1].token == MADE["SessionToken"]
    config.write_text(f"[default]\ncredential_process = sh -c 'cat {planted / 'made'} >&2; exit 1'\n")
    ended.append(penstock(*cat, "--give-up-after", "1"))
    config.write_text("")
    (planted / "identity").write_text(WEB_IDENTITY)
    with echoing() as url:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/creds")
        ended.append(penstock(*cat))
        monkeypatch.delenv("AWS_CONTAINER_CREDENTIALS_FULL_URI")
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/r")
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(planted / "identity"))
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        ended.append(penstock(*cat))
    for each in ended:
        assert each.returncode in (3, 5), each.stderr
        assert each.stderr.splitlines()[-1].startswith("penstock: ")
        assert found_in(each.stdout + each.stderr) == []


def test_a_url_with_secrets_is_refused_unseen() -> None:
    for url in (
        "http://me:PLANTED@h", "https://PLANTED@h", "https://h/?X-Amz-Signature=PLANTED",
        "PLANTED", "https://h#PLANTED",
    ):  # fmt: skip
        with pytest.raises(ValidationError) as caught:
            EndpointConfig.model_validate({"Url": url})
        stated = explain(caught.value, EndpointConfig)
        assert found_in(stated) == []
        assert "must be http:// or https://, a host" in stated
    ended = penstock("cat", "https://h/k?X-Amz-Security-Token=PLANTED%2F&X-Amz-Signature=PLANTED")
    assert (ended.returncode, found_in(ended.stderr)) == (2, [])
    assert "X-Amz-Signature=***" in ended.stderr


def test_a_traceback_for_people_shows_no_variables(capsys: pytest.CaptureFixture[str]) -> None:
    """Other libraries log from level warning on."""
    remember(SECRET)
    try:
        configure(level="debug", json_lines=False)
        for name in ("botocore", "aiobotocore.endpoint", "urllib3.connectionpool", "aiohttp.client"):
            logging.getLogger(name).debug("PLANTED %s", name)
            logging.getLogger(name).warning("key %s", SECRET)
        try:
            fail("PLANTED-local")
        except RuntimeError:
            log.exception("event\nforged \x1b[2J", key="a\nforged\x1b[2J", secret=SECRET)
    finally:
        logging.getLogger().handlers = []
        logging.captureWarnings(capture=False)
    stated = capsys.readouterr().err
    assert "RuntimeError: 13 ***" in stated
    assert stated.count("key ***") == 4
    assert r"event\nforged \x1b[2J" in stated
    assert "\nforged" not in stated
    assert "\x1b" not in stated
    assert found_in(stated.replace('fail("PLANTED-local")', "")) == []


def fail(local: str) -> None:
    raise RuntimeError(f"{len(local)} {SECRET}")


READ = 'exec cat "$SAGEMAKER_BASE_DIR/input/data/train_0"'


def test_on_a_terminal_too(stub: S3Stub, planted: Path) -> None:
    """`exec` at debug under a pseudo-terminal, where lines are for people."""
    fill(stub, [100], prefix="b/train/")
    stub.script(echo)
    path = write_job(planted / "job.yaml", document(stub, planted))
    command = [*PENSTOCK, "exec", "-c", path, "--log-level", "debug", "sh", "-c", READ]
    with terminal(command, columns=300, rows=50) as window:
        window.wait_for(lambda screen: "epoch failed" in screen.written)
        window.process.terminate()  # and with it the reader, to which nothing more comes
        window.end()
        stated = window.screen.written
    assert "\x1b[" in stated, "this was not taken for a terminal"
    assert found_in(stated) == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Bearer abc.def", "Authorization: ***"),
        ('{"SecretAccessKey": "abcd/efgh", "Version": 1}', '{"SecretAccessKey": "***", "Version": 1}'),
        ("aws_secret_access_key = abcd", "aws_secret_access_key = ***"),
        ("https://u:p@h/x", "https://***@h/x"),
        ("<SessionToken>abcd</SessionToken>", "<SessionToken>***</SessionToken>"),
        ("?a=1&X-Amz-Signature=ffff&b=2", "?a=1&X-Amz-Signature=***&b=2"),
        (
            "the signature is refused; check the secret key, the region",
            "the signature is refused; check the secret key, the region",
        ),
        ("s3://b/k (offset 3, attempt 1)", "s3://b/k (offset 3, attempt 1)"),
    ],
)
def test_what_is_blanked_by_its_shape(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(json.dumps(text)) == json.dumps(shown)


def test_no_core_dump_of_the_sidecar(stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor of what it becomes by SIGUSR2; the trainer of `exec` dumps as it would without us."""
    fill(stub, [10], prefix="b/train/")
    monkeypatch.chdir(tmp_path)
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    dumpable = (
        "import ctypes, resource as r; "
        "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), *r.getrlimit(r.RLIMIT_CORE))"  # PR_GET_DUMPABLE
    )
    bare = subprocess.run([sys.executable, "-c", dumpable], capture_output=True, text=True, check=True)
    under = penstock("exec", "-c", path, sys.executable, "-c", dumpable)
    assert under.stdout == bare.stdout == "1 {} {}\n".format(*resource.getrlimit(resource.RLIMIT_CORE))
    dumping = ("sh", "-c", 'ulimit -c unlimited; exec "$@"', "sh")
    if not dumps([*dumping, sys.executable, "-c", "import os; os.abort()"]):
        pytest.skip("nothing dumps core here: the hard limit of core files, or core_pattern, forbids it")
    for restarts in (0, 1):
        with sidecar(path, prefix=dumping) as running:
            running.wait_for("ready")
            if restarts:
                running.process.send_signal(signal.SIGUSR2)
                running.wait_for("ready", times=2)
            os.kill(running.process.pid, signal.SIGSEGV)
            running.wait()
        assert running.process.returncode == -signal.SIGSEGV
        assert not list(tmp_path.glob("core*"))


def dumps(command: list[Any]) -> bool:
    """Whether the kernel says that it has written a core of this program."""
    pid = os.posix_spawnp(
        command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
    )
    dumped = os.WCOREDUMP(os.waitpid(pid, 0)[1])
    for core in Path().glob("core*"):
        core.unlink()
    return dumped


def test_the_keeper_carries_no_environment(stub: S3Stub, planted: Path) -> None:
    fill(stub, [10], prefix="b/train/")
    with sidecar(write_job(planted / "job.yaml", document(stub, planted)), "--keeper", "auto") as running:
        pid = running.wait_for("keeper")["pid"]
        with open(f"/proc/{pid}/environ") as file:
            assert not {each.partition("=")[0] for each in file.read().split("\0")} - {
                "",
                "LANG",
                "LD_LIBRARY_PATH",
            }
        running.wait_for("ready")
        assert running.end() == 0


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory of nobody's, outside of those that only root may enter."""
    place = Path(tempfile.mkdtemp(prefix="penstock-"))
    os.chown(place, NOBODY, NOBODY)
    yield place
    shutil.rmtree(place)


LEAST = (
    "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups",
    "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs",
)  # fmt: skip
READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro / && shift && exec "$@"'


def unprivileged(place: Path) -> list[str]:
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", READ_ONLY, "sh", str(place), *LEAST]


@root
def test_root_owns_the_memory_of_the_sidecar(stub: S3Stub, tmp_path: Path) -> None:
    """proc(5): the files of a process belong to its user and group unless it forbids dumps."""
    fill(stub, [10], prefix="b/train/")
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    prefix = ("setpriv", f"--regid={NOBODY}", "--clear-groups")
    with sidecar(path, "--keeper", "auto", prefix=prefix) as running:
        keeper = running.wait_for("keeper")["pid"]
        running.wait_for("ready")
        groups = [Path(f"/proc/{pid}/environ").stat().st_gid for pid in (running.process.pid, keeper)]
        assert groups == [0, NOBODY]


@two_users
def test_an_epoch_without_privileges(stub: S3Stub, open_place: Path) -> None:
    """No root, no capability, no new privileges, and nothing but the base directory can be written."""
    if subprocess.run([*unprivileged(open_place), "true"], check=False, capture_output=True).returncode:
        pytest.skip("this container may not make a mount namespace")
    truth = fill(stub, [3_000_000, 1], prefix="b/train/")
    path = write_job(open_place / "job.yaml", job(stub.url, open_place / "ml", "b/train/"))
    with sidecar(path, "--keeper", "auto", prefix=unprivileged(open_place)) as running:
        running.wait_for("ready")
        with open(f"/proc/{running.process.pid}/status") as file:
            status = dict(line.split(":\t", 1) for line in file.read().splitlines() if ":\t" in line)
        assert set(status["Uid"].split()) == {str(NOBODY)}
        assert {status[f"Cap{each}"].strip("0") for each in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {""}
        assert status["NoNewPrivs"] == "1"
        with open(f"/proc/{running.process.pid}/mountinfo") as file:
            root = next(line.split() for line in file if line.split()[4] == "/")
        assert "ro" in root[5].split(",")
        for epoch in range(2):
            assert read_all(open_place / f"ml/input/data/train_{epoch}") == truth
        assert not any(event.get("event") == "directory exposed" for event in running.events)
        spied = subprocess.run(
            [*LEAST, "cat", f"/proc/{running.process.pid}/environ"], check=False, capture_output=True
        )
        assert b"Permission denied" in spied.stderr, "another process of the same user reads its environment"
        running.wait_for("epoch complete", epoch=1)
        assert running.end() == 0
