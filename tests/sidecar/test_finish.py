"""`penstock-finish`: the trainer's code, or 9 without the proof that all is in S3, whatever ends when."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import versions
from sidecar.job.finish import LONGEST, finish_requests, parse_request
from sidecar.job.layout import Layout
from sidecar.process.exits import Exit
from streamer import finish
from streamer.errors import SinkError
from tests.kit.children import output_of
from tests.kit.patience import Patience
from tests.kit.pod import Pod, StubSidecar, stub_sidecar
from tests.kit.terminal import terminal
from tests.kit.users import NOBODY, root

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2]
PAUSES = """
import signal, sys
caught = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: caught.append(signal.Signals(number).name))
print("started", flush=True)
while not caught:
    signal.pause()
print(*caught, flush=True)
sys.exit(int(sys.argv[1]))
"""
"""A trainer that ends at a signal, with the code of its argument."""


def program(base: Path) -> str:
    return str(base / "input/config/penstock-finish")


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def started(base: Path, *command: str, **options: Any) -> subprocess.Popen[str]:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.Popen([program(base), "--", *command], **options)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code, and what was written to standard error."""
    _, errors = process.communicate()
    return process.returncode, errors


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "ml"


@pytest.fixture
def serving(base: Path) -> Iterator[StubSidecar]:
    with stub_sidecar(base) as sidecar:
        yield sidecar


# The trainer's end


@pytest.mark.parametrize(("code", "result", "end"), [(0, 0, 0), (3, 0, 3), (0, 9, 9), (3, 9, 3)])
def test_the_code_is_the_trainers_or_9_in_place_of_0(
    serving: StubSidecar, base: Path, code: int, result: int, end: int
) -> None:
    running = started(base, *python(f"import sys; sys.exit({code})"))
    assert serving.line() == ["request", code, ""]
    assert running.poll() is None
    serving.uploaded(result, "s3://b/run/output/model.tar.gz is there")
    done, errors = ended(running)
    assert done == end
    first, last = errors.splitlines()
    assert first.startswith(f"penstock-finish: the trainer ended with {code}; waiting until the sidecar")
    assert last == "penstock-finish: s3://b/run/output/model.tar.gz is there"


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (b"Exception: no GPU\nline 2\n", "Exception: no GPU\nline 2\n"),
        ("ü€😀".encode() * 5000, ("ü€😀" * 5000)[:1024]),
        (b"\x00\x1b[31m\xff" * 600, ("\x00\x1b[31m\ufffd" * 600)[:1024]),
        (None, ""),
    ],
)
def test_the_reason_of_a_failure_is_passed_on(
    serving: StubSidecar, base: Path, written: bytes | None, reason: str
) -> None:
    if written is None:
        os.mkfifo(base / "output/failure")  # its open would wait for a writer
    else:
        (base / "output/failure").write_bytes(written)
    running = started(base, *python("import os; os.kill(os.getpid(), 9)"))
    assert serving.line() == ["request", 137, reason]
    serving.uploaded(0)
    assert ended(running)[0] == 137


def test_a_success_has_no_reason(serving: StubSidecar, base: Path) -> None:
    """The file may be that of a trainer before."""
    (base / "output/failure").write_text("of the last run")
    running = started(base, "true")
    assert serving.line() == ["request", 0, ""]
    serving.uploaded(0)
    assert ended(running)[0] == 0


def test_the_trainer_gets_its_arguments_and_streams_and_no_signal_settings(
    serving: StubSidecar, base: Path
) -> None:
    code = (
        "import signal, sys, os; print(sys.argv[1:], sys.stdin.read(), os.environ['SM_X'],"
        "signal.pthread_sigmask(signal.SIG_BLOCK, []), os.getsid(0) == os.getpid(),"
        "len(os.listdir('/proc/self/fd')))"
    )
    running = started(base, *python(code, "--", "a b"), stdin=subprocess.PIPE, env=os.environ | {"SM_X": "x"})
    serving.uploaded(0)
    assert running.communicate("given")[0] == "['--', 'a b'] given x set() True 4\n"
    running = started(base, "grep", "SigIgn", "/proc/self/status")
    serving.uploaded(0)
    inherited = 1 << signal.SIGQUIT - 1 if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN else 0
    ignored = int(running.communicate()[0].split()[1], 16)
    assert ignored & ~(inherited | 3 << 31) == 0, "but for two of the C library's own"


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [(["/no/such/program"], 127, "No such file"), (["/etc/passwd"], 126, "Permission denied")],
)
def test_a_command_that_cannot_run(
    serving: StubSidecar, base: Path, command: list[str], code: int, words: str
) -> None:
    running = started(base, *command)
    assert serving.line() == ["request", code, ""]
    serving.uploaded(0)
    done, errors = ended(running)
    assert done == code
    assert f"cannot run {command[0]}: {words}" in errors


@pytest.mark.parametrize("arguments", [[], ["--"]])
def test_a_command_is_needed(base: Path, arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, finish.__file__, *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("penstock-finish: usage: penstock-finish [--] COMMAND [ARGUMENT]")


# Signals


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_reaches_the_trainer_once(serving: StubSidecar, base: Path, number: signal.Signals) -> None:
    running = started(base, *python(PAUSES, "5"))
    assert output_of(running).readline() == "started\n"
    running.send_signal(number)
    assert serving.line() == ["request", 5, ""]
    assert output_of(running).readline() == f"{number.name}\n"
    serving.uploaded(0)
    assert ended(running)[0] == 5


def test_a_signal_that_ends_the_trainer_is_its_code(serving: StubSidecar, base: Path) -> None:
    running = started(base, *python("import signal; print('started', flush=True); signal.pause()"))
    assert output_of(running).readline() == "started\n"
    running.terminate()
    assert serving.line() == ["request", 143, ""]
    serving.uploaded(0)
    assert ended(running)[0] == 143


def test_the_first_signal_does_not_end_the_wait_and_the_second_does(serving: StubSidecar, base: Path) -> None:
    for second in (False, True):
        running = started(base, "true")
        assert serving.line()[0] == "request"
        assert running.stderr is not None
        assert "waiting" in running.stderr.readline()
        running.terminate()
        assert "SIGTERM: still waiting for the upload" in running.stderr.readline()
        if second:
            running.send_signal(signal.SIGHUP)
            assert ended(running) == (9, "penstock-finish: SIGHUP: not waiting for the upload\n")
        else:
            serving.uploaded(0)
            assert ended(running) == (0, "")


def test_nohup_is_respected(serving: StubSidecar, base: Path) -> None:
    running = subprocess.Popen(
        ["nohup", program(base), *python(PAUSES.replace("signal.SIGHUP, ", ""), "0")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert output_of(running).readline() == "started\n"
    running.send_signal(signal.SIGHUP)
    running.send_signal(signal.SIGUSR1)
    assert serving.line() == ["request", 0, ""]
    running.send_signal(signal.SIGHUP)
    running.send_signal(signal.SIGHUP)
    serving.uploaded(0)
    output, errors = running.communicate()
    assert (running.returncode, output) == (0, "SIGUSR1\n")
    assert "SIGHUP" not in errors


def test_in_a_terminal_ctrl_c_is_one_signal(serving: StubSidecar, base: Path) -> None:
    with terminal([program(base), *python(PAUSES, "6")], columns=150, rows=20) as window:
        window.wait_for(lambda screen: "started" in screen.text)
        window.press("\x03")
        assert serving.line() == ["request", 6, ""]
        window.wait_for(lambda screen: "waiting" in screen.text)
        serving.uploaded(0)
        assert window.end() == 6, window.screen.text
        assert window.screen.text.count("SIGINT") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a namespace of processes")
def test_process_1_forwards_signals_and_leaves_no_zombie(serving: StubSidecar, base: Path) -> None:
    """A process whose parent has ended becomes a child of process 1, which waits for it in every phase."""
    gate, ours = os.pipe()
    code = (
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(7))\n"
        "if not (child := os.fork()):\n"
        f"    os.fork() or os.read({gate}, 1)\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print('started', flush=True)\n"
        "signal.pause()\n"
    )
    namespace = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    running = subprocess.Popen(
        [*namespace, program(base), "--", *python(code)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=[gate],
    )  # fmt: skip
    os.close(gate)
    assert output_of(running).readline() == "started\n"
    (first,) = children(running.pid)
    assert len(children(first)) == 2
    os.kill(first, signal.SIGTERM)
    assert serving.line() == ["request", 7, ""]
    os.close(ours)
    patience = Patience(30)
    while len(children(first)) > 1 and not patience.exhausted():
        os.sched_yield()
    serving.uploaded(0)
    done, errors = ended(running)
    assert (done, patience.exhausted()) == (7, False), errors


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# Without a proof


def test_without_a_sidecar_the_trainer_is_not_started(serving: StubSidecar, base: Path) -> None:
    serving.process.terminate()
    serving.uploaded(0)
    serving.process.wait()
    for _ in range(2):
        done, errors = ended(started(base, *python("print('trained')")))
        assert done == 9
        assert errors == (
            f"penstock-finish: the trainer is not started: no sidecar serves {base}/input/data: start "
            "`penstock run` with this base directory, mount its volume here, or set SAGEMAKER_BASE_DIR\n"
        )
        (base / "input/data/.penstock.finish").unlink(missing_ok=True)


def test_a_sidecar_that_is_killed_is_no_proof(serving: StubSidecar, base: Path) -> None:
    running = started(base, "true")
    assert serving.line()[0] == "request"
    serving.process.kill()
    done, errors = ended(running)
    assert done == 9
    assert errors.endswith(
        "nothing proves that its results are in S3: "
        "the sidecar ended before it had replied; its log says why\n"
    )
    # Its FIFOs are still there, and no process reads them.
    done, errors = ended(started(base, "true"))
    assert (done, "no sidecar serves" in errors) == (9, True)


def test_a_sidecar_that_is_killed_while_the_trainer_runs(base: Path) -> None:
    with stub_sidecar(base) as first:
        running = started(base, *python(PAUSES, "0"))
        assert output_of(running).readline() == "started\n"
        first.process.kill()
        first.process.wait()
    running.terminate()
    done, errors = ended(running)
    assert (done, "no sidecar serves" in errors) == (9, True)


def test_the_next_sidecar_replies(base: Path) -> None:
    """A killed sidecar that the kubelet has started again, while the trainer ran."""
    with stub_sidecar(base):
        running = started(base, *python(PAUSES, "4"))
        assert output_of(running).readline() == "started\n"
    with stub_sidecar(base) as second:
        running.terminate()
        assert second.line() == ["request", 4, ""]
        second.uploaded(0)
        assert ended(running)[0] == 4


def test_two_trainers_at_once_get_their_own_replies(serving: StubSidecar, base: Path) -> None:
    codes = [11, 12, 13]
    running = {code: started(base, *python(f"import sys; sys.exit({code})")) for code in codes}
    for _ in codes:
        kind, code, _ = serving.line()
        assert kind == "request"
        serving.uploaded(9 if code == 12 else 0, f"of {code}")
        done, errors = ended(running.pop(code))
        assert done == code
        assert errors.endswith(f"of {code}\n")


def test_the_reply_to_a_requester_that_was_killed_is_not_the_next_ones(
    serving: StubSidecar, base: Path
) -> None:
    """Also if as many are killed as fill the FIFO."""
    for _ in range(3):
        killed = started(base, "true")
        assert serving.line()[0] == "request"
        killed.kill()
        ended(killed)
        serving.uploaded(0, "x" * 3000)
    running = started(base, *python("import sys; sys.exit(8)"))
    assert serving.line() == ["request", 8, ""]
    serving.uploaded(9, "of 8")
    done, errors = ended(running)
    assert (done, errors.splitlines()[1:]) == (8, ["penstock-finish: of 8"])


def test_a_text_of_any_length_fits_into_a_reply(serving: StubSidecar, base: Path) -> None:
    for text in ("😀" * 5000, "\x01" * 5000):
        running = started(base, "true", encoding="utf-8")
        assert serving.line()[0] == "request"
        serving.uploaded(9, text)
        done, errors = ended(running)
        assert done == 9
        assert errors.splitlines()[1] == f"penstock-finish: {text[:600]}"


@pytest.mark.parametrize("before", [b'{"id": "x", "co', b"\n\n[1]\nnonsense\n", b"\xff" * 3 * LONGEST])
def test_what_is_no_request_does_not_delay_the_next(serving: StubSidecar, base: Path, before: bytes) -> None:
    """A requester that was killed may have left half a line."""
    with open(base / "input/data/.penstock.finish", "wb", buffering=0) as fifo:
        fifo.write(before)
    running = started(base, "true")
    assert serving.line() == ["request", 0, ""]
    serving.uploaded(0)
    assert ended(running)[0] == 0


@pytest.mark.parametrize("uploads", [True, False])
async def test_the_sidecars_ends_on_each_loop(tmp_path: Path, *, uploads: bool) -> None:
    """With a reply; or cancelled during the upload, and the end of the block tells the requester."""
    layout, requested = Layout(str(tmp_path / "ml")), asyncio.Event()
    layout.create()

    async def upload(code: int, reason: str) -> tuple[int, str]:
        assert (code, reason) == (0, "")
        requested.set()
        if not uploads:
            await asyncio.Event().wait()
        return 0, "uploaded"

    with finish_requests(layout, fifo_mode=0o640) as requests:
        serving = asyncio.ensure_future(requests.serve(upload))
        running = await asyncio.create_subprocess_exec(
            program(tmp_path / "ml"), "true", stderr=subprocess.PIPE
        )
        await requested.wait()
        if uploads:
            await running.wait()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
    _, errors = await running.communicate()
    assert running.returncode == (0 if uploads else 9)
    assert (b"uploaded\n" if uploads else b"before it had replied") in errors


# SIGKILL at a system call


def killing(call: str) -> list[str]:
    """Options of strace: SIGKILL at the first invocation of a system call, or at the number given."""
    name, _, number = call.partition(" ")
    return ["-o", "/dev/null", "-e", f"inject={name}:signal=SIGKILL:when={number or 1}"]


@pytest.mark.parametrize("call", ["epoll_wait", "read", "epoll_ctl", "write", "read 3", "epoll_ctl 2"])
def test_a_sidecar_killed_at_a_system_call(serving: StubSidecar, base: Path, call: str) -> None:
    """From the request's arrival to the wait for the next: exit code 0 only with the reply."""
    command = ["strace", "-p", str(serving.process.pid), *killing(call)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracing:
        assert tracing.stderr is not None
        assert "attached" in tracing.stderr.readline()
        running = started(base, "true")
        if serving.line():
            with contextlib.suppress(BrokenPipeError):
                serving.uploaded(0, "uploaded")
        done, errors = ended(running)
        assert serving.process.wait() == -signal.SIGKILL
    assert (done, errors.endswith(" uploaded\n")) in {(9, False), (0, True)}


@pytest.mark.parametrize("call", ["flock", "write 2", "poll"])
def test_a_requester_killed_at_a_system_call(serving: StubSidecar, base: Path, call: str) -> None:
    """Before, in and after its request; the next one gets its own reply."""
    killed = subprocess.run(["strace", *killing(call), program(base), "--", "true"], check=False)
    assert killed.returncode == -signal.SIGKILL
    running = started(base, *python("import sys; sys.exit(8)"))
    while serving.line()[1] != 8:
        serving.uploaded(0, "of the one that was killed")
    serving.uploaded(9, "of 8")
    done, errors = ended(running)
    assert (done, errors.splitlines()[1:]) == (8, ["penstock-finish: of 8"])


# Names, users, images


def test_the_base_directory_is_that_of_the_file_or_of_the_environment(
    serving: StubSidecar, base: Path, tmp_path: Path
) -> None:
    os.symlink(base, tmp_path / "mounted")
    installed = [sys.executable, finish.__file__]
    for command, place in (
        ([str(tmp_path / "mounted/input/config/penstock-finish")], "/elsewhere"),
        ([sys.executable, "penstock-finish"], ""),
        (installed, str(base)),
    ):
        running = subprocess.Popen(
            [*command, "true"],
            stderr=subprocess.PIPE,
            text=True,
            cwd=base / "input/config",
            env=os.environ | {"SAGEMAKER_BASE_DIR": place},
        )
        assert serving.line() == ["request", 0, ""]
        serving.uploaded(0)
        assert ended(running)[0] == 0


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_who_reads_the_fifos_may_request(tmp_path: Path, mode: int) -> None:
    layout = Layout(str(tmp_path / "ml"))
    layout.create()
    data = tmp_path / "ml/input/data"
    (data / ".penstock.finish").write_text("of somebody else")
    before = os.umask(0o077)
    try:
        with finish_requests(layout, fifo_mode=mode):
            modes = {name: stat.S_IMODE(os.stat(data / name).st_mode) for name in os.listdir(data)}
            assert modes == {
                ".penstock.finish": mode | (mode & 0o044) >> 1,
                ".penstock.finished": mode,
            }
            assert stat.S_ISFIFO(os.stat(data / ".penstock.finish").st_mode)
    finally:
        os.umask(before)
    assert os.listdir(data) == []


def test_a_name_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    layout = Layout(str(tmp_path / "ml"))
    layout.create()
    os.mkdir(tmp_path / "ml/input/data/.penstock.finished")
    with (
        pytest.raises(
            SinkError, match=r"cannot make .*/input/data/\.penstock\.finished: Is a directory; remove it"
        ),
        finish_requests(layout, fifo_mode=0o640),
    ):
        pass


@root
@pytest.mark.parametrize(("mode", "code"), [(0o640, 9), (0o644, 0)])
def test_a_trainer_of_another_user(tmp_path: Path, mode: int, code: int) -> None:
    for directory in (tmp_path, *tmp_path.parents):
        if directory.name.startswith(("pytest-", "popen-", "test_")):
            directory.chmod(0o755)
    base = tmp_path / "ml"
    with stub_sidecar(base, mode) as serving:
        system = {"PATH": "/usr/bin:/bin"}  # a Python that other users may run
        running = started(base, "true", user=NOBODY, group=NOBODY, extra_groups=[], env=system, cwd="/")
        if code:
            done, errors = ended(running)
            assert errors == (
                f"penstock-finish: the trainer is not started: {base}/input/data/.penstock.finish: "
                "Permission denied: run this as the sidecar's user, or set Penstock.FifoMode\n"
            )
        else:
            assert serving.line() == ["request", 0, ""]
            serving.uploaded(0)
            done, _ = ended(running)
        assert done == code


def test_it_runs_on_every_python_of_this_machine(serving: StubSidecar, base: Path) -> None:
    """Without site-packages, from 3.8 on."""
    found = [each for minor in range(8, 20) if (each := versions.interpreter((3, minor)))]
    assert found
    for interpreter in found:
        running = subprocess.Popen(
            [interpreter, "-I", "-S", "-W", "error", program(base), "--", "sh", "-c", "exit 5"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert serving.line() == ["request", 5, ""]
        serving.uploaded(0)
        done, errors = ended(running)
        assert (done, len(errors.splitlines())) == (5, 1), interpreter


def test_it_is_one_file_for_old_pythons() -> None:
    """Where no old Python is at hand: only the grammar and the library of Python 3.8."""
    tree = ast.parse(Path(finish.__file__).read_text(), feature_version=(3, 8))
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for name in (a.name for a in node.names)
    }
    assert [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)] == ["__future__"]
    assert imported <= sys.stdlib_module_names
    newer = {"waitstatus_to_exitcode", "pidfd_open", "removeprefix", "removesuffix"}
    assert not newer & {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert finish.NOT_UPLOADED == Exit.NOT_UPLOADED


@given(st.binary(max_size=200) | st.just(b"null"))
def test_any_line_is_a_request_or_none(line: bytes) -> None:
    assert parse_request(line) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-300, 300) | st.floats() | st.text(max_size=70),
    lambda inner: st.lists(inner, max_size=2),
)


@given(JSON, JSON, JSON)
def test_a_request_has_the_types_that_are_used(identity: object, code: object, reason: object) -> None:
    request = parse_request(json.dumps({"id": identity, "code": code, "reason": reason}).encode())
    valid = isinstance(identity, str) and isinstance(reason, str) and type(code) is int
    if valid and 0 <= code < 256 and len(str(identity)) <= 64:  # type: ignore[operator]  # it is an int
        assert request == (identity, code, reason)
    else:
        assert request is None


# The pod's order


def test_a_pod_whose_trainer_ends(serving: StubSidecar, base: Path) -> None:
    """The upload is over when the kubelet ends the sidecar."""
    with Pod(serving.process, [program(base), "--", "true"], grace=60) as pod:
        assert serving.line() == ["request", 0, ""]
        serving.uploaded(0)
        assert pod.completed() == (0, 0)


def test_a_pod_that_is_deleted(serving: StubSidecar, base: Path) -> None:
    """The trainer saves at SIGTERM and ends with 0; all of the grace period is left to the upload."""
    with Pod(serving.process, [program(base), "--", *python(PAUSES, "0")], grace=60) as pod:
        assert output_of(pod.trainer).readline() == "started\n"
        serving.uploaded(0)
        assert pod.deleted() == (0, 0)
    assert serving.line() == ["request", 0, ""]


def test_a_pod_that_is_deleted_and_whose_upload_is_too_slow(serving: StubSidecar, base: Path) -> None:
    """Both are killed when the grace period is over, and nobody takes that for an uploaded model."""
    with Pod(serving.process, [program(base), "--", *python(PAUSES, "0")], grace=3) as pod:
        assert output_of(pod.trainer).readline() == "started\n"
        assert pod.deleted() == (-signal.SIGKILL, -signal.SIGKILL)


def test_a_pod_without_penstock_finish(serving: StubSidecar) -> None:
    """The upload begins at SIGTERM; what is not done in the grace period is lost."""
    with Pod(serving.process, ["true"], grace=60) as pod:
        serving.uploaded(0)
        assert pod.completed() == (0, 0)
    assert serving.line() == ["stopping"]
