"""Who gets a signal that reaches `penstock exec`: the trainer, its workers, what it leaves."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.harness import fill
from tests.kit.processes import PENSTOCK, job, penstock_with, write_job
from tests.kit.stub import S3Stub
from tests.kit.terminal import terminal

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
TRAINER = """
import os, signal, sys

# Saves a checkpoint with the help of two forked workers, as a DataLoader has them, at the first signal.
pipes, pids = [(os.pipe(), os.pipe()) for _ in range(2)], []
wakeup = os.pipe()
os.set_blocking(wakeup[1], False)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
for (request, send), (receive, reply) in pipes:
    pids.append(os.fork())
    if not pids[-1]:
        if INTERACTIVE:  # workers of an interactive program leave Ctrl-C and a hang-up to their parent
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.write(reply, b"here")
        while os.read(request, 1) == b"r":
            os.write(reply, b"half")
        os._exit(0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, lambda *_: None)
for _, (receive, _) in pipes:
    assert os.read(receive, 4) == b"here"
signal.set_wakeup_fd(wakeup[1])
print("started", flush=True)
caught = os.read(wakeup[0], 1)[0]
# A signal to all would have ended them by now: it is sent to the processes one after the other.
for (_, send), (receive, _) in pipes:
    os.write(send, b"r")
    assert os.read(receive, 4) == b"half"
for (_, send), _ in pipes:
    os.write(send, b"q")
assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
os.set_blocking(wakeup[0], False)
try:
    more = os.read(wakeup[0], 9)
except BlockingIOError:
    more = b""
print("saved at", signal.Signals(caught).name, "and", len(more), "more", flush=True)
open(sys.argv[1], "w").write(f"{signal.Signals(caught).name} {len(more)}")
sys.exit(3)
"""


@pytest.fixture
def path(stub: S3Stub, tmp_path: Path) -> str:
    fill(stub, [2_500_000], prefix="b/train/")
    return write_job(tmp_path / "j.yaml", job(stub.url, tmp_path / "ml", "b/train/"))


def trainer(tmp_path: Path, *, interactive: bool) -> list[str]:
    code = f"INTERACTIVE = {interactive}\n{TRAINER}"
    return [sys.executable, "-c", code, str(tmp_path / "checkpoint")]


def signalled(command: list[str], number: signal.Signals) -> tuple[int, str, str]:
    """Send the signal when the trainer has said that it started; return code, output and errors."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(number)
        output, errors = process.communicate()
    assert first == "started\n", errors
    return process.returncode, output, errors


@pytest.mark.parametrize("number", SIGNALS)
def test_workers_live_while_the_trainer_saves(path: str, tmp_path: Path, number: signal.Signals) -> None:
    command = [*PENSTOCK, "exec", "-c", path, "--", *trainer(tmp_path, interactive=False)]
    code, output, errors = signalled(command, number)
    assert (code, output) == (3, f"saved at {number.name} and 0 more\n"), errors
    assert (tmp_path / "checkpoint").read_text() == f"{number.name} 0"


@pytest.mark.parametrize(("keys", "number"), [("\x03", signal.SIGINT), ("", signal.SIGTERM)])
def test_in_a_terminal_each_process_gets_one_signal(
    path: str, tmp_path: Path, keys: str, number: signal.Signals
) -> None:
    """Ctrl-C reaches the trainer by the terminal, and not once more by the sidecar."""
    command = [*PENSTOCK, "exec", "-c", path, "--", *trainer(tmp_path, interactive=True)]
    with terminal(command, columns=200, rows=50) as window:
        window.wait_for(lambda screen: "started" in screen.text)
        if keys:
            window.press(keys)
        else:
            window.process.send_signal(number)
        assert window.end() == 3, window.screen.text
    assert (tmp_path / "checkpoint").read_text() == f"{number.name} 0"


LEADER = """
import os, signal, subprocess, sys
# Does not end with the shell: the kernel sends SIGHUP to the foreground once more when the leader ends.
signal.signal(signal.SIGHUP, lambda *_: shell.send_signal(signal.SIGHUP))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
shell = subprocess.Popen(sys.argv[1:], preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, []))
os.close(1)
os.closerange(3, 1 << 16)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
while True:
    signal.pause()
"""


only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a namespace of processes")
NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
"""Prefix of a command that is process 1, as in a container."""


@pytest.mark.parametrize("leader", ["shell", "penstock", pytest.param("process 1", marks=only_root)])
def test_a_terminal_that_hangs_up_is_one_signal(path: str, tmp_path: Path, leader: str) -> None:
    """The kernel sends SIGHUP to the session's leader alone, and a shell sends it to all of its jobs."""
    ours, theirs = os.openpty()
    (done, ended), errors = os.pipe(), tmp_path / "errors"
    command = [*PENSTOCK, "exec", "-c", path, "--", *trainer(tmp_path, interactive=True)]
    if leader == "shell":
        script = f"set -m; {shlex.join(command)}; exit $?"
        command = [sys.executable, "-c", LEADER, "bash", "--norc", "-i", "-c", script]
    before = NAMESPACE if leader == "process 1" else []
    with errors.open("wb") as file:
        # Standard output is a pipe, because a terminal that has hung up takes no text.
        process = subprocess.Popen(
            [*before, "setsid", "--ctty", *command], stdin=theirs, stdout=ended, stderr=file, pass_fds=[ended]
        )
    os.close(theirs)
    os.close(ended)
    with open(done, "rb") as output:
        assert output.readline() == b"started\n"
        os.close(ours)
        rest = output.read()
    if leader == "shell":
        process.kill()
    process.wait()
    assert rest == b"saved at SIGHUP and 0 more\n", errors.read_text()
    assert (tmp_path / "checkpoint").read_text() == "SIGHUP 0"


ORPHAN = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("started", flush=True)
if sys.argv[1] == "saves":
    signal.sigwait([signal.SIGTERM])
    print("saved", flush=True)
else:
    fifo = open(os.environ["SM_CHANNEL_TRAIN"] + "_0", "rb", buffering=0)
    while signal.SIGTERM not in signal.sigpending():
        signal.sigtimedwait([], 0.01)
    print(len(fifo.read(5)), flush=True)
    while fifo.read(1 << 16) or signal.pause():
        pass
    print("took the end for the data's", flush=True)
"""


@pytest.mark.parametrize("end", ["saves", "stays"])
def test_what_the_trainer_leaves_is_ended_before_the_fifos(path: str, tmp_path: Path, end: str) -> None:
    """A shell as the trainer ends at SIGTERM at once; its program gets the signal then, and a grace."""
    penstock = penstock_with(f"sidecar.commands.execute.GRACE = {0.5 if end == 'stays' else 60}")
    (tmp_path / "orphan.py").write_text(ORPHAN)
    script = f"{sys.executable} {tmp_path}/orphan.py {end}; true"
    command = [*penstock, "exec", "-c", path, "--", "sh", "-c", script]
    code, output, errors = signalled(command, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM, errors
    assert output == ("saved\n" if end == "saves" else "5\n")


ZOMBIE = """
import os, signal, sys
done, end = os.pipe()
if not (parent := os.fork()):
    if not (child := os.fork()):
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    os.setpgid(0, 0)
    os.closerange(0, 99)  # standard output, and the end of the pipe
    signal.pause()
os.close(end)
os.read(done, 1)
open(sys.argv[1], "w").write(str(parent))
print("started", flush=True)
signal.pause()
"""


def test_a_zombie_of_another_parent_is_not_waited_for(path: str, tmp_path: Path) -> None:
    """Its parent is of another process group, and a signal to this one does not make it read the code."""
    (tmp_path / "zombie.py").write_text(ZOMBIE)
    penstock = penstock_with("sidecar.commands.execute.GRACE = 60")
    command = [*penstock, "exec", "-c", path, "--", sys.executable]
    code, _, errors = signalled(
        [*command, str(tmp_path / "zombie.py"), str(tmp_path / "parent")], signal.SIGTERM
    )
    os.kill(int((tmp_path / "parent").read_text()), signal.SIGKILL)
    assert code == 128 + signal.SIGTERM, errors


DESERTING = """
import os, select, signal, sys

ends, pid = os.pipe(), os.pipe()
if not os.fork():  # a helper that ends before its own child
    if not os.fork():
        os.write(pid[1], b"%d" % os.getpid())
        os.read(ends[0], 1)
    os._exit(0)
orphan = int(os.read(pid[0], 9))
os.wait()
handle = os.pidfd_open(orphan)
os.write(ends[1], b"e")
select.select([handle], [], [])
while os.path.exists(f"/proc/{orphan}"):
    pass
print("reaped", os.getppid(), flush=True)
os.kill(os.getpid(), signal.SIGTERM) if sys.argv[1] == "killed" else signal.pause()
"""
"""A trainer that leaves an orphan, and waits until nothing of it is left."""


@only_root
@pytest.mark.parametrize("end", ["killed", "signalled"])
def test_process_1_of_a_container_reaps_and_forwards(path: str, end: str) -> None:
    command = [*NAMESPACE, *PENSTOCK, "exec", "-c", path, sys.executable, "-c", DESERTING, end]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "reaped 2\n"
            if end == "signalled":
                (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                os.kill(int(first), signal.SIGTERM)
            _, errors = process.communicate()
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM, errors
