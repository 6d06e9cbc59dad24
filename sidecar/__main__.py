"""Entry point of the `penstock` command. It names a package that is not installed."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or name the package that is missing."""
    try:
        from sidecar import cli
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"penstock: {error.name} is not installed. "
            "Install penstock-sidecar again, with all that it depends on\n"
        )
        sys.exit(2)
    cli.main()


if __name__ == "__main__":
    main()
