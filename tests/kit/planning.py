"""Plans of one prefix or one manifest, as the sidecar makes them of a channel without further settings."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from streamer.plan import Arrangement, Entries, Plan, S3Uri
from streamer.s3.client.session import Clients
from streamer.s3.manifests.manifest import Manifest
from streamer.s3.manifests.object_finder import ObjectClients
from streamer.s3.pages.listing import listed_runs
from streamer.s3.pages.object_get import ControlClient
from streamer.s3.pages.object_info import ObjectInspector
from streamer.s3.pages.pages import PageSource, open_pages
from streamer.s3.pages.prefix_pages import PrefixPages
from streamer.s3.pages.sources import Sources
from streamer.s3.pages.validation import PlanMemory


def alone(clients: Clients) -> Clients:
    """These clients; aiobotocore's send all requests."""
    return replace(clients, by_aiobotocore=True)


async def plan_prefix(
    pages: PageSource | Clients, uri: S3Uri, arrangement: Arrangement | None = None, **options: Any
) -> Plan:
    """Plan the objects below `uri`, listed by `pages` or those of the clients. `options`: of `Sources`."""
    if isinstance(pages, Clients):
        with open_pages(pages) as opened:
            return await plan_prefix(opened, uri, arrangement, **options)
    return await Sources(pages, [uri], arrangement, **options).plan()


async def list_prefix(
    pages: PageSource, uri: S3Uri, arrangement: Arrangement | None = None, **options: Any
) -> Entries:
    """Return the objects below `uri`, whatever the order of the listing. `options`: of `Sources`."""
    return (await plan_prefix(pages, uri, arrangement, **options)).entries


def runs_below(
    pages: PageSource, uri: S3Uri, *, memory: PlanMemory | None = None, in_turn: bool = False, **options: Any
) -> AsyncGenerator[Entries, None]:
    """Return `listed_runs` below `uri`. `options`: of `PrefixPages`."""
    below = PrefixPages(pages, uri, Arrangement(), **options)
    return listed_runs(below, memory or PlanMemory(), in_turn=in_turn)


async def plan_manifest(
    clients: Clients, uri: S3Uri, arrangement: Arrangement | None = None, **options: Any
) -> Plan:
    """Plan a `ManifestFile`. `clients`, `options`: of `Manifest`."""
    return await Manifest(clients, uri, arrangement or Arrangement(), **_found(clients, options)).plan()


async def plan_augmented(
    clients: Clients,
    uri: S3Uri,
    attributes: Sequence[str],
    arrangement: Arrangement | None = None,
    **options: Any,
) -> Plan:
    """Plan an `AugmentedManifestFile`. `clients`, `options`: of `Manifest`."""
    found = _found(clients, options)
    return await Manifest(clients, uri, arrangement or Arrangement(), attributes, **found).plan()


def _found(clients: Clients, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a manifest whose objects HEADs by aiobotocore find, unless they name another way."""
    inspector = ObjectInspector(ControlClient(alone(clients)), give_up_after=0)
    return {"object_clients": ObjectClients(inspector)} | options
