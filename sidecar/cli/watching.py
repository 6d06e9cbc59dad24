"""Commands that ask a running sidecar: `probe`, `top`, `set`."""

from __future__ import annotations

import contextlib
import sys

import click

from sidecar.cli.help import Command
from sidecar.cli.options import print_json, url_option


@click.command(
    cls=Command,
    examples=["penstock probe", "until penstock probe --quiet; do sleep 0.2; done"],
    page="docs/reference/metrics.md",
)
@url_option
@click.option("-q", "--quiet", is_flag=True, help="Print nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON: ready, why.")
def probe(url: str, *, quiet: bool, as_json: bool) -> None:
    """Ask a running sidecar whether it is ready: exit code 0 if it is, 1 if not, with the reason."""
    from sidecar.admin.probe import why_not_ready

    why = why_not_ready(url)
    if as_json:
        print_json({"ready": not why, "why": why})
    elif not quiet:
        click.echo(f"not ready: {why}" if why else "ready", err=bool(why))
    sys.exit(1 if why else 0)


@click.command(
    cls=Command,
    examples=["penstock top", "penstock top --once --url http://127.0.0.1:9782"],
    page="docs/reference/metrics.md#the-status-page",
)
@url_option
@click.option("--once", is_flag=True, help="Print one frame and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures of one frame as JSON and exit.")
@click.option(
    "--token-file", metavar="FILE", help="The file that Penstock.Admin.TokenFile names, if Protect is all."
)
def top(url: str, *, once: bool, as_json: bool, token_file: str | None) -> None:
    """Show a running sidecar live: bottleneck, speed and progress of each channel. Press Ctrl-C to quit."""
    from sidecar.admin.remote import events
    from sidecar.admin.top import watch
    from sidecar.config.settings import read_token

    shown = events(url, None if token_file is None else read_token(token_file))
    if as_json:
        print_json(next(shown))
        return
    with contextlib.suppress(KeyboardInterrupt):
        watch(shown, once=once)


@click.command(
    "set",
    cls=Command,
    examples=[
        "penstock set --token-file token bandwidth=200MB train.bandwidth=none requests_in_flight=auto",
    ],
    page="docs/reference/metrics.md#limits-that-may-change",
)
@url_option
@click.option(
    "--token-file", required=True, metavar="FILE", help="The file that Penstock.Admin.TokenFile names."
)
@click.option("--json", "as_json", is_flag=True, help="Print all limits as JSON.")
@click.argument("limits", nargs=-1, required=True, metavar="LIMIT=VALUE...")
def change(url: str, *, token_file: str, as_json: bool, limits: tuple[str, ...]) -> None:
    """Change limits of a running sidecar.

    A LIMIT is bandwidth, CHANNEL.bandwidth, requests_in_flight or memory_budget; the VALUE none or auto lifts
    a limit.
    """
    from sidecar.admin import remote
    from sidecar.config.settings import read_token

    changed = remote.change(url, remote.parse_limits(limits), read_token(token_file))
    if as_json:
        print_json(changed)
    else:
        click.echo("\n".join(remote.describe_limits(changed)))
