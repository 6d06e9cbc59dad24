"""States of a broken network, as a user meets them: what is said has the cause and the remedy.

`penstock cat` of one object stands before each. It ends at once with its exit code, or it says at once for
what it waits, and goes on until `--give-up-after`. With PENSTOCK_STATES=FILE each state adds a line there:
its name, what was said, after how many seconds, and the exit code, if the command ended.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field

import pytest

from scripts.texts import REMEDY, explained
from tests.kit.raw import answer, raw_server
from tests.kit.stub import S3Stub
from tests.kit.warm import warm

TABLE = os.environ.get("PENSTOCK_STATES")
HTML = b"<html><body>Please log in</body></html>"
DEAD = "http://127.0.0.1:1"


def error(status: int, code: str, message: str = "", **headers: str) -> bytes:
    """An error of S3."""
    text = f"<Error><Code>{code}</Code><Message>{message}</Message><RequestId>R1</RequestId></Error>"
    return answer(status, text.encode(), **headers)


@dataclass(frozen=True)
class State:
    """What a server sends for every request, or the URL and the variables in its place."""

    name: str
    words: str
    code: int | None = None
    """Exit code; None: the command waits."""
    reply: bytes = b""
    url: str = ""
    variables: dict[str, str] = field(default_factory=dict)


NOT_S3 = (
    "see to the proxy, the firewall or the load balancer in front of the endpoint, or correct --endpoint-url"
)
CLOSED = "the connection was closed before a response"

STATES = [
    # The way
    State("nothing listens", "check that the endpoint is up, and --endpoint-url", url=DEAD),
    State("no such host", "check that the endpoint is up, and --endpoint-url", url="http://no-host.invalid"),
    State("a proxy that is down", f"cannot connect to the proxy {DEAD} (HTTP_PROXY)", url="http://s3.test",
          variables={"HTTP_PROXY": DEAD}),
    State("TLS where none is", "write http:// in --endpoint-url", 5, url="https@URL@"),
    State("no TLS where some is", CLOSED, url="@TLS-AS-HTTP@"),
    State("a certificate of nobody's", "--ca-bundle must have the certificate", 5, url="@TLS@"),
    State("the connection closes before a response", CLOSED),
    State("no HTTP", CLOSED, reply=b"SSH-2.0-OpenSSH_9.2\r\n"),
    State("half a header", CLOSED, reply=b"HTTP/1.1 200 OK\r\nContent-Le"),
    State("half a listing", "the response broke off after 18 bytes of its body",
          reply=answer(200, b"<ListBucketResult>", Content_Length="500")),
    # Who answers
    State("a login page", NOT_S3, 5,
          answer(200, HTML, Content_Type="text/html")),
    State("a proxy that denies", NOT_S3, 5, answer(403, HTML, Via="1.1 squid", Server="squid")),
    State("a proxy that wants a login", NOT_S3, 5, answer(407, HTML, Proxy_Authenticate="Basic")),
    State("a gateway without a server", NOT_S3, reply=answer(502, HTML, Server="nginx")),
    State("a gateway that timed out", NOT_S3, reply=answer(504, HTML)),
    State("a web server", NOT_S3, 5, answer(404, HTML)),
    State("a server of JSON", "the listing is invalid (not well-formed", 5, answer(200, b'{"a": 1}')),
    State("a server without this method", NOT_S3, 5, answer(405, HTML)),
    State("a gateway with keys of its own", "check the keys and the gateway in front", 3, answer(401, b"")),
    State("a redirect to elsewhere", "correct S3URI or --endpoint-url", 2,
          answer(307, b"", Location="@URL@/b?list-type=2")),
    State("another region", "the bucket is in region eu-west-3; set AWS_REGION=eu-west-3", 2,
          error(301, "PermanentRedirect", x_amz_bucket_region="eu-west-3"),
          variables={"AWS_REGION": "us-east-1"}),
    State("a profile that is not there", "correct AWS_PROFILE, or the file", 2, answer(500, b""),
          variables={"AWS_PROFILE": "absent"}),
    State("a region that cannot be", "correct --endpoint-url and AWS_DEFAULT_REGION", 2, answer(500, b""),
          variables={"AWS_DEFAULT_REGION": "eu central"}),
    # What S3 says
    State("overload", "Please reduce your request rate (S3 responded 503 SlowDown)",
          reply=error(503, "SlowDown", "Please reduce your request rate.")),
    State("too many requests", "too many requests (S3 responded 429)", reply=answer(429, b"")),
    State("an error of the server's own", "(S3 responded 500 InternalError)",
          reply=error(500, "InternalError")),
    State("access denied", "with an explicit deny in a VPC endpoint policy (S3 responded 403", 3,
          error(403, "AccessDenied", "with an explicit deny in a VPC endpoint policy")),
    State("an unknown key", "temporary keys need AWS_SESSION_TOKEN", 3, error(403, "InvalidAccessKeyId")),
    State("a wrong secret", "check the secret key, the region", 3, error(403, "SignatureDoesNotMatch")),
    State("an expired token", "renew the credentials", 3, error(400, "ExpiredToken")),
    State("a clock that is off", "this machine's clock is off by too much; set the time",
          reply=error(403, "RequestTimeTooSkewed")),
    State("no such bucket", "check S3URI; on an S3-compatible server try --path-style", 4,
          error(404, "NoSuchBucket")),
    State("an account with unpaid bills", "a bill may be unpaid", 3, error(403, "AccountProblem")),
    State("not implemented", "the endpoint does not support this request", 5, error(501, "NotImplemented")),
]  # fmt: skip


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
def test_what_is_said_has_cause_and_remedy(stub: S3Stub, tls_stub: S3Stub, state: State) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.upper().endswith("_PROXY")}
    with raw_server(lambda _: state.reply.replace(b"@URL@", server.url.encode())) as server:
        url = state.url.replace("@URL@", stub.url[4:]).replace("@TLS@", tls_stub.url)
        url = url.replace("@TLS-AS-HTTP@", tls_stub.url.replace("https", "http")) or server.url
        arguments = "cat", "s3://b/k", "--path-style", "--endpoint-url", url
        began, lines = time.monotonic(), []
        read_end, write_end = os.pipe()
        with open(os.devnull, "r+b") as nothing, open(read_end, encoding="utf-8") as errors:
            null = nothing.fileno()
            process = warm().start(
                *arguments, stdin=null, stdout=null, stderr=write_end, env=environment | state.variables
            )
            os.close(write_end)
            for line in errors:
                lines.append(line)
                if state.words in line:
                    break
            seconds = time.monotonic() - began
            if state.code is None:
                process.kill()
            errors.read()
        process.wait()
    assert state.words in lines[-1], lines
    if TABLE:
        with open(TABLE, "a", encoding="utf-8") as file:
            file.write(f"| {state.name} | {lines[-1].strip()} | {seconds:.1f} | {state.code or '-'} |\n")
    assert process.returncode == (-9 if state.code is None else state.code)
    rows = [re.escape(row).replace("…", ".*") for row, _ in explained()]
    assert REMEDY.search(lines[-1]) or any(re.search(row, lines[-1]) for row in rows)
