"""`python -m tests.guest`: plays each scene in a guest of its own; exits 1 if anything broke."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.guest.boot import NoGuest, guest
from tests.guest.scenes import SCENES

ROOT = Path(__file__).parents[2]
AWS = {
    "AWS_ACCESS_KEY_ID": "AKIDTEST",
    "AWS_SECRET_ACCESS_KEY": "not-a-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def play(scene: str, timeout: float) -> bool:
    """Run one scene over all transports in a guest of its own; whether nothing broke."""
    whole, lines = False, []
    command = [sys.executable, "-m", "tests.guest.scenes", scene]
    for line in guest(command, directory=str(ROOT), memory="3G", environment=AWS, timeout=timeout):
        lines.append(line)
        if line.startswith("{"):
            report = json.loads(line)
            print(f"{report.pop('scene'):<12} {report.pop('transport'):<15} {report}", flush=True)
        whole = whole or line == "guest: exit 0"
    if not whole:
        print(f"{scene}: the guest did not end by itself:", *lines[-20:], sep="\n  ", flush=True)
    return whole and not any("BROKEN" in line for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.guest", description=__doc__)
    parser.add_argument(
        "scenes", nargs="*", metavar="SCENE", help=f"one of {', '.join(SCENES)}; all".replace("%", "%%")
    )
    parser.add_argument("--timeout", type=float, default=1500.0, help="seconds for one guest")
    chosen = parser.parse_args()
    if unknown := set(chosen.scenes) - set(SCENES):
        parser.error(f"no such scene: {', '.join(sorted(unknown))}")
    try:
        broken = [name for name in chosen.scenes or SCENES if not play(name, chosen.timeout)]
    except NoGuest as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(broken)} of {len(chosen.scenes or SCENES)} scenes broken", *broken)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
