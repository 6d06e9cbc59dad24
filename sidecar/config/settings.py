"""The `Penstock` section of a job file: settings that SageMaker does not have."""

from __future__ import annotations

import os
import re
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictStr,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_pascal

from sidecar.config.endpoint import BARE_URL, REGION, check_together, check_url, resolved
from sidecar.config.model import Model, Size
from sidecar.config.outputs import CheckpointExtras, OutputExtras, UploadConfig
from streamer.errors import ConfigError
from streamer.file_reads import read_file
from streamer.s3.client.endpoint import STALL_TIMEOUT, Endpoint, IfMatch
from streamer.secrets import remember
from streamer.units import KIB, MIB


def _octal(value: object) -> object:
    if isinstance(value, str) and re.fullmatch(r"0?[0-7]{3}", value):
        return int(value, 8)
    raise ValueError('write the mode as a quoted octal number, such as "0640"')


YEAR = 365 * 86400.0
Seconds = Annotated[float, Field(le=YEAR, allow_inf_nan=False)]
"""Duration in seconds, at most a year: event loops and sockets refuse longer ones."""
Text = Annotated[StrictStr, Field(min_length=1)]


class EndpointConfig(Model):
    """The S3 endpoint. Keys that are left out come from the environment, as with every AWS client."""

    url: (
        Annotated[
            StrictStr, AfterValidator(check_url), WithJsonSchema({"type": "string", "pattern": BARE_URL})
        ]
        | None
    ) = None
    region: Annotated[StrictStr, Field(pattern=REGION)] | None = None
    path_style: bool | None = None
    """Whether the bucket is in the path or in the host name. None: see `Endpoint`."""
    anonymous: bool = False
    ca_bundle: Text | None = None
    if_match: IfMatch = "send"
    """Whether GETs name the listed ETag in If-Match. `omit`: for servers that refuse the header; the ETag of
    every response is compared in both cases; Last-Modified where the server lists no ETags."""
    requester_pays: bool = False
    """Agree to pay for what is read from a Requester Pays bucket."""
    sse_customer_key_file: Text | None = None
    """A file with the 32 bytes, raw or in base64, that all objects were encrypted with (SSE-C)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_together(self.model_dump(), to_pascal)
        return self

    def resolved(self) -> Endpoint:
        """Return the endpoint, with the SSE-C key read from its file. Raises ConfigError."""
        return resolved(self.model_dump())

    @property
    def probably_tls(self) -> bool:
        """Whether requests use TLS, unless a profile of the user has another URL of the endpoint."""
        url = self.url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        return not url.startswith("http:")


def _host(value: str) -> str:
    """Refuse an invalid host, also an empty one, which would mean every address of the machine."""
    if not re.fullmatch(r"[A-Za-z0-9._:%-]{1,253}", value) or ".." in value:
        raise ValueError(f"{value!r} is no address or host name; write 127.0.0.1, or 0.0.0.0 for all")
    return value


class AdminConfig(Model):
    """The HTTP server for metrics, probes and status. By default it listens on loopback only."""

    host: Annotated[StrictStr, AfterValidator(_host)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Unset: 9781, or under `penstock exec` any free port. 0 takes any free one, which the log names."""
    token_file: Text | None = None
    """A file with the token that `penstock set` must give. Unset: limits cannot be changed while it runs."""
    protect: Literal["limits", "all"] = "limits"
    """Requests that need the token: changes of limits, or everything but `/livez` and `/readyz`."""

    @model_validator(mode="after")
    def _has_token(self) -> Self:
        if self.protect == "all" and self.token_file is None:
            raise ValueError("Protect: all needs a TokenFile; name one, or remove Protect")
        return self

    def token(self) -> str | None:
        """Read the token from its file; None if there is no file. Raises ConfigError."""
        return None if self.token_file is None else read_token(self.token_file)


def read_token(path: str) -> str:
    """Read the admin token in a file: one line of at least 16 characters. Raises ConfigError."""
    try:
        token = read_file(path, 1024, again=True).decode("ascii").strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read the admin token in {path}: {error.strerror}; correct the path, or make the file "
            "with `openssl rand -hex 16`"
        ) from error
    except UnicodeDecodeError:
        token = ""
    if not re.fullmatch(r"[!-~]{16,}", token):
        raise ConfigError(
            f"{path} must hold an admin token: 16 or more characters of ASCII without spaces; "
            "make one with `openssl rand -hex 16`"
        )
    remember(token)
    return token


class PenstockConfig(Model):
    """The `Penstock` section of a job: settings that SageMaker does not have."""

    base_directory: Annotated[StrictStr, Field(pattern=r"^/")] | None = None
    """Directory with `input/data`, where the FIFOs are. Unset: `/opt/ml`; under `penstock exec`, a temporary
    directory."""
    memory_budget: Size | None = None
    """Memory of what is requested and not yet delivered, of all channels together. Unset: a quarter of the
    memory of the container or machine, between 64 and 512 MiB, and less where the limit leaves less."""
    transport: Literal["auto", "aiobotocore", "buffered", "splice"] = "auto"
    """How bodies are fetched. `auto`: the first of `splice`, `buffered` and `aiobotocore` that is
    possible."""
    part_size: Size | None = None
    """Bytes of one request. Unset: adapts between 1 and 16 MiB."""
    requests_in_flight: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Requests in flight, over all channels. Unset: adapts, up to 256."""
    epochs: Annotated[int, Field(ge=1)] | None = None
    """Epochs of every channel, after which nothing is fetched or offered. Unset: as many as are read."""
    give_up_after: Annotated[Seconds, Field(gt=0)] = 300.0
    """Seconds without a byte of progress before a channel fails."""
    stall_timeout: Annotated[Seconds, Field(ge=1)] = STALL_TIMEOUT
    """Seconds without a byte before a request counts as stalled, and is sent again on another connection."""
    hedge_budget: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of all bytes that may be fetched twice where the reader waits for a slow connection; 0: never."""
    drain_for: Annotated[Seconds, Field(ge=0)] = 20.0
    """Seconds that SIGTERM lets running epochs finish; Kubernetes kills after 30 by default."""
    fifo_mode: Annotated[
        int, BeforeValidator(_octal), WithJsonSchema({"type": "string", "pattern": "^0?[0-7]{3}$"})
    ] = 0o640
    shard_by: Literal["objects", "bytes"] = "objects"
    """What ShardedByS3Key makes equal between hosts, and Ranks between the FIFOs of a channel; SageMaker's
    own rule is `objects`."""
    bandwidth: Annotated[Size, Field(gt=0)] | None = None
    """Bytes per second into all FIFOs together. Unset: no limit. Those of one channel: its own section."""
    output: OutputExtras = OutputExtras()
    checkpoints: CheckpointExtras = CheckpointExtras()
    upload: UploadConfig = UploadConfig()
    endpoint: EndpointConfig = EndpointConfig()
    admin: AdminConfig = AdminConfig()

    @property
    def longest_silence(self) -> float:
        """Most seconds of a request without a byte: the lower of both limits."""
        return min(self.stall_timeout, self.give_up_after)

    @model_validator(mode="after")
    def _sane_part(self) -> Self:
        if self.part_size is not None and not 64 * KIB <= self.part_size <= 512 * MIB:
            raise ValueError("PartSize must be between 64KiB and 512MiB")
        return self
