"""Runs docker-compose.yml without Docker: `python -m scripts.check_compose [--epochs N]`, as root.

    depends_on order ── a service ── own mounts, one network for all ── setpriv ── the image's very command

Penstock's services run in the root file systems that scripts/check-images left, as docker-compose.yml states:
read-only, with its user, tmpfs, volumes and environment, without capabilities; the trainer without network.
SeaweedFS and Prometheus are programs of this machine (`weed` beside this interpreter, Debian's `prometheus`)
with the arguments in docker-compose.yml. Grafana has no Debian package; tests/operate/test_compose.py checks
its provisioning.

Everything runs in a new network and process namespace, so the script uses no port of the machine, and all
processes end with it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.operate.containers import COMPOSE, SERVICES, STAGES
from tests.operate.promql import ROOT

IMAGES = Path(os.environ.get("CHECK_IMAGES", "/var/tmp/penstock-images"))  # noqa: S108 - root's own
FOREIGN = {"seaweedfs": "weed", "prometheus": "prometheus"}
"""Programs of this machine that replace the images of other projects, by service."""
ABSENT = {"grafana"}
NOBODY = "65534:65534"


class Failed(Exception):
    """A service did not meet a condition of docker-compose.yml."""


@dataclass
class Service:
    """One service of docker-compose.yml: its root file system and its options."""

    name: str
    scratch: Path
    epochs: int | None
    process: subprocess.Popen[bytes] = field(init=False)
    configured: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.configured = SERVICES[self.name]

    @property
    def ours(self) -> bool:
        return self.name not in FOREIGN

    def command(self) -> list[str]:
        """Return entry point and arguments, as a container engine combines them."""
        own = list(self.configured.get("command", ()))
        if not self.ours:
            return [f"/usr/local/bin/{FOREIGN[self.name]}", *own]
        if self.name == "trainer" and self.epochs is not None:
            own = [f"--epochs={self.epochs}" if word.startswith("--epochs=") else word for word in own]
        stage = STAGES[self.configured["build"]["target"]]
        default = json.loads(stage.last("CMD")) if stage.last("CMD") else []
        return [*json.loads(stage.last("ENTRYPOINT")), *(own or default)]

    def environment(self) -> dict[str, str]:
        found = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent"}
        declared: dict[str, str] = self.configured.get("environment", {})
        if self.ours:
            for word in shlex.split(STAGES["runtime"].last("ENV") or ""):
                name, _, value = word.partition("=")
                found[name] = value.replace("$PATH", found["PATH"])
        return found | declared

    def enter(self, command: list[str]) -> list[str]:
        """Return the command line that runs `command` in this service's container."""
        root = IMAGES / (f"root-{self.configured['build']['target']}" if self.ours else "base")
        # Mount points are made in a layer above the image.
        layers = f"lowerdir={root},upperdir={self.layer('up')},workdir={self.layer('work')}"
        mounts = [
            "set -e",
            "mount --make-rprivate /",
            "m=$(mktemp -d)",
            f"mount -t overlay overlay -o {layers} $m",
            "mount --bind /dev $m/dev",
            "mount -t proc proc $m/proc",
        ]
        binds = [(f"{self.scratch}/hosts", "/etc/hosts", "ro")]
        for volume in self.configured.get("volumes", ()):
            source, target, *mode = volume.split(":")
            path = (ROOT / source).resolve() if source.startswith(".") else self.scratch / f"volume-{source}"
            binds.append((str(path), target, *(mode or ["rw"])))
        if not self.ours:
            program = shutil.which(
                FOREIGN[self.name], path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            )
            if program is None:
                raise Failed(f"{FOREIGN[self.name]} is not installed")
            binds.append((program, f"/usr/local/bin/{FOREIGN[self.name]}", "ro"))
        for source, target, mode in binds:
            make = "mkdir -p" if os.path.isdir(source) else "mkdir -p $m$(dirname {0}); touch"
            mounts += [
                f"{make.format(target)} $m{target}",
                f"mount --bind {source} $m{target}",
                f"mount -o remount,bind,{mode} $m{target}",
            ]
        mounts += [
            f"mkdir -p $m{path}; mount -t tmpfs tmpfs $m{path}" for path in self.configured.get("tmpfs", ())
        ]
        if self.name == "prometheus":
            mounts += ["mkdir -p $m/prometheus; mount -t tmpfs tmpfs $m/prometheus; chmod 1777 $m/prometheus"]
        if self.configured.get("read_only"):
            mounts += ["mount -o remount,ro,bind $m"]
        user, group = self.configured.get("user", NOBODY).split(":")
        confined = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs"]
        confined += ["--inh-caps=-all", "--bounding-set=-all"]
        directory = (STAGES[self.configured["build"]["target"]].last("WORKDIR") or "/") if self.ours else "/"
        variables = [f"{name}={value}" for name, value in self.environment().items()]
        words = ["env", "-i", f"--chdir={directory}", *variables, *confined, *command]
        script = "\n".join([*mounts, f"exec chroot $m {shlex.join(words)}"])
        alone = ["--net"] if self.configured.get("network_mode") == "none" else []
        return ["unshare", "--mount", *alone, "sh", "-c", script]

    def layer(self, name: str) -> Path:
        path = self.scratch / f"{self.name}-{name}-{time.monotonic_ns()}"
        path.mkdir()
        return path

    def start(self) -> None:
        print(f"{self.name}: {shlex.join(self.command())}", flush=True)
        log = (self.scratch / f"{self.name}.log").open("wb")
        with log:
            self.process = subprocess.Popen(self.enter(self.command()), stdout=log, stderr=log)

    def wait(self, within: float) -> int:
        code = self.process.wait(within)
        print(f"{self.name}: ended with {code}", flush=True)
        return code

    def healthy(self) -> bool:
        if self.ours and "healthcheck" in self.configured:
            check = self.configured["healthcheck"]["test"][1:]
            return subprocess.run(self.enter(check), capture_output=True, check=False).returncode == 0
        if self.ours:
            text = STAGES[self.configured["build"]["target"]].last("HEALTHCHECK") or ""
            check = json.loads(text.split("CMD", 1)[1])
            return subprocess.run(self.enter(check), capture_output=True, check=False).returncode == 0
        # The image's wget is missing here, so this requests its addresses.
        return all(
            answers(url) for url in re.findall(r"http://\S+", self.configured["healthcheck"]["test"][1])
        )


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - http, from the file
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def until(condition: Any, *, within: float, what: str) -> None:
    """Poll `condition` once a second, as a container engine does. Raises Failed after `within` seconds."""
    end = time.monotonic() + within
    while not condition():
        if time.monotonic() > end:
            raise Failed(f"{what} within {within:.0f} s")
        time.sleep(1)


def in_order() -> list[str]:
    """Return the names of the services, each after the services on which it depends."""
    found: list[str] = []

    def visit(name: str) -> None:
        for other in SERVICES[name].get("depends_on", ()):
            visit(other)
        if name not in found and name not in ABSENT:
            found.append(name)

    # Prometheus depends on no service and should scrape from the start.
    for name in sorted(SERVICES, key=lambda name: name != "prometheus"):
        visit(name)
    return found


def query(text: str) -> float:
    url = f"http://127.0.0.1:9090/api/v1/query?query={urllib.parse.quote(text)}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        result = json.load(answer)["data"]["result"]
    return sum(float(each["value"][1]) for each in result) if result else float("nan")


def compose(scratch: Path, epochs: int | None) -> None:
    """Run all services in order. Raises Failed."""
    names = " ".join(SERVICES)
    (scratch / "hosts").write_text(f"127.0.0.1 localhost {names}\n")
    for volume in COMPOSE["volumes"]:
        path = scratch / f"volume-{volume}"
        path.mkdir(mode=0o750)
        os.chown(path, 65534, 65534)
    running: dict[str, Service] = {}
    for name in in_order():
        needs = SERVICES[name].get("depends_on", {})
        conditions = needs if isinstance(needs, dict) else {}  # a list needs the start only
        for other, need in conditions.items():
            match need["condition"]:
                case "service_healthy":
                    until(running[other].healthy, within=120, what=f"{other} is not healthy")
                    print(f"{other}: healthy", flush=True)
                case "service_completed_successfully":
                    if running[other].wait(300):
                        raise Failed(f"{other} failed")
        running[name] = Service(name, scratch, epochs)
        running[name].start()
    if running["trainer"].wait(1500):
        raise Failed("the trainer failed")
    print((scratch / "volume-ml/output/data/result.json").read_text())
    delivered = 'sum(penstock_fifo_written_bytes_total{job="penstock"})'
    until(lambda: query(delivered) > 0, within=20, what="Prometheus has no byte counted")
    print(f"prometheus: up {query('up'):.0f}, {query(delivered) / 1e9:.2f} GB delivered", flush=True)
    serving = running["sidecar"]
    serving.process.send_signal(signal.SIGTERM)
    if serving.wait(float(SERVICES["sidecar"]["stop_grace_period"].rstrip("s"))):
        raise Failed("the sidecar did not end as it should")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.check_compose", description=__doc__)
    parser.add_argument("--epochs", type=int, help="of the trainer, instead of the file's")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.inside:
        apart = ["unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
        again = [sys.executable, "-m", "scripts.check_compose", *sys.argv[1:], "--inside"]
        return subprocess.run([*apart, *again], check=False, cwd=ROOT).returncode
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.TemporaryDirectory(prefix="check-compose-", dir=IMAGES) as name:
        try:
            compose(Path(name), arguments.epochs)
        except (Failed, subprocess.TimeoutExpired) as error:
            for log in sorted(Path(name).glob("*.log")):
                print(f"--- {log.stem}\n{log.read_text()[-2000:]}", file=sys.stderr)
            print(f"check_compose: {error}", file=sys.stderr)
            return 1
    print("check_compose: every service ran as the file says")
    return 0


if __name__ == "__main__":
    sys.exit(main())
