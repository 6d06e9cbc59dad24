"""Entry point of the `penstock` command, also where only the readers are installed."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say what is missing to have one."""
    try:
        from sidecar import cli
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"penstock: {error.name} is not installed; the readers need no command, "
            "the sidecar does: pip install 'penstock[sidecar]'\n"
        )
        sys.exit(2)
    cli.main()


if __name__ == "__main__":
    main()
