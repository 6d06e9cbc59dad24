"""Runs a command as root in a User-mode Linux guest.

The machine's root directory is the guest's, read-only; /run (TMPDIR is in it) and /dev/shm are fresh. The
guest's init is a shell script that mounts these, loads the modules of netem and veth, turns on the cgroup
controllers, runs the command with its output on the guest's console, and halts the guest.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

KERNEL = "linux.uml"
MODULES = ("sch_netem", "veth")
EXIT = re.compile(r"guest: exit (\d+)")

_INIT = """#!/bin/bash
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/run LANG=C.UTF-8
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev 2>/dev/null
mkdir -p /dev/shm; ln -sfn /proc/self/fd /dev/fd
for d in /run /dev/shm; do mount -t tmpfs -o mode=1777 tmp $d; done
mkdir -m 1777 /run/tmp; export TMPDIR=/run/tmp
ip link set lo up
for m in {modules}; do
  f=$(find /usr/lib/uml/modules/$(uname -r) -name $m.ko | head -1)
  # Debian's insmod refuses modules of a kernel that it does not know; finit_module(2) is call 313.
  [ -z "$f" ] || {python} -c 'import ctypes, os, sys
ctypes.CDLL(None).syscall(313, os.open(sys.argv[1], 0), b"", 0)' "$f"
done
mkdir -p /run/cgroup; mount -t cgroup2 none /run/cgroup
echo '+memory +cpu +pids' > /run/cgroup/cgroup.subtree_control
cd {directory}; {environment} {command}; echo "guest: exit $?"
{python} -c 'import ctypes; ctypes.CDLL(None).reboot(0x4321fedc)'
"""


class NoGuest(RuntimeError):
    """The guest cannot be started, and what to install."""


def guest(
    command: Sequence[str],
    *,
    directory: str,
    memory: str = "2G",
    environment: Mapping[str, str] | None = None,
    timeout: float = 600.0,
) -> Iterator[str]:
    """Boot a guest, run `command` in `directory`, and yield its lines of output; the last is `guest: exit N`.

    `memory`: of the guest, as the kernel's `mem=`. After `timeout` seconds the guest is killed.
    Raises NoGuest if the kernel is not installed.
    """
    if shutil.which(KERNEL) is None:
        raise NoGuest(f"{KERNEL} is not installed: apt-get install user-mode-linux iproute2")
    with tempfile.TemporaryDirectory() as place:
        init = Path(place, "init")
        variables = [f"{name}={value}" for name, value in (environment or {}).items()]
        init.write_text(
            _INIT.format(
                modules=" ".join(MODULES),
                python="/usr/bin/python3",
                directory=shlex.quote(directory),
                environment=shlex.join(["env", *variables]),
                command=shlex.join(command),
            )
        )
        init.chmod(0o755)
        process = subprocess.Popen(
            [
                "timeout", "--foreground", "--signal=KILL", str(timeout), KERNEL,
                f"mem={memory}", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", "quiet",
                "con=null", "con0=fd:0,fd:1", f"uml_dir={place}", f"init={init}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,
            env=os.environ | {"TMPDIR": "/dev/shm"},
        )  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield line.rstrip("\r\n")
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # the guest's threads are processes of this group
            process.wait()
            process.stdout.close()
