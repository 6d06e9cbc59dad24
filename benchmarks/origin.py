"""The origin: an nginx that serves a data set as an S3 server does.

It has three servers over the same files, each on a free port:

    fast    plain HTTP, sendfile, no limits
    paced   like S3: 25 ms to the first byte (`echo_sleep`, then an internal redirect, so that the static
            handler still supports ranges, ETags and conditions), 90 MiB/s per connection
    tls     as `fast`, over TLS 1.2/1.3

The response to `GET /<bucket>` is the bucket's static listing, whatever the query. nginx does not check
signatures; clients sign nevertheless. nginx runs in the foreground as a child process, with all its files in
one directory, as any user. Each worker has its own listening sockets (`reuseport`), which spreads every
client's connections over the cores in much the same way.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.dataset import DataSet

ECHO_MODULE = "/usr/lib/nginx/modules/ngx_http_echo_module.so"
FIRST_BYTE_SECONDS = 0.025
CONNECTION_RATE = "90m"
SERVERS = ("fast", "paced", "tls")


class OriginFailed(Exception):
    """nginx did not start, or ended early."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A running origin: the URL of each server, and the CA that signed its certificate."""

    urls: dict[str, str]
    ca_bundle: str


def nginx_path() -> str | None:
    """Return the path of nginx, or None. Also looks in Debian's directory, which is not on a user's PATH."""
    return shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def missing() -> str | None:
    """Return why no origin can run on this machine; None if it can."""
    if nginx_path() is None:
        return "nginx is not installed (scripts/install-system-tools brings it)"
    if not os.path.exists(ECHO_MODULE):
        return f"nginx's echo module is missing at {ECHO_MODULE} (scripts/install-system-tools brings it)"
    return None


def config(directory: str, data: str, *, address: str, ports: Sequence[int], workers: int) -> str:
    """Return the text of nginx.conf. `data`: see `DataSet.root`; all other files are in `directory`.

    `directory` must contain `cert.pem` and `key.pem`.
    """
    listing = f"""
    root {data}/objects;
    location ~ ^/(?<bucket>[a-z0-9-]+)/?$ {{
      root {data}/lists;
      default_type application/xml;
      try_files /$bucket.xml =404;
    }}"""
    plain = "location / { }"
    paced = f"""location / {{ echo_sleep {FIRST_BYTE_SECONDS}; echo_exec @object; }}
    location @object {{ limit_rate {CONNECTION_RATE}; }}"""
    fast_port, paced_port, tls_port = ports
    temporary = "\n".join(
        f"  {kind}_temp_path {directory}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"""\
load_module {ECHO_MODULE};
daemon off;
{"user root;" if os.geteuid() == 0 else ""}
worker_processes {workers};
pid {directory}/nginx.pid;
error_log {directory}/error.log warn;
events {{ worker_connections 4096; }}
http {{
{temporary}
  access_log off;
  default_type application/octet-stream;
  sendfile on;
  sendfile_max_chunk 1m;
  tcp_nopush on;
  keepalive_requests 10000000;
  keepalive_timeout 1h;
  open_file_cache max=20000 inactive=1h;
  open_file_cache_valid 1h;
  output_buffers 2 512k;
  ssl_certificate {directory}/cert.pem;
  ssl_certificate_key {directory}/key.pem;
  ssl_session_cache shared:tls:1m;
  server {{
    listen {address}:{fast_port} reuseport;{listing}
    {plain}
  }}
  server {{
    listen {address}:{paced_port} reuseport;{listing}
    {paced}
  }}
  server {{
    listen {address}:{tls_port} ssl reuseport;{listing}
    {plain}
  }}
}}
"""


def write_certificate(directory: str, address: str) -> str:
    """Write a certificate for `address` by a new CA; return the path of the CA's certificate."""
    import trustme

    authority = trustme.CA()
    issued = authority.issue_cert(address)
    issued.private_key_pem.write_to_path(os.path.join(directory, "key.pem"))
    with open(os.path.join(directory, "cert.pem"), "wb") as file:
        file.writelines(blob.bytes() for blob in issued.cert_chain_pems)
    bundle = os.path.join(directory, "ca.pem")
    authority.cert_pem.write_to_path(bundle)
    return bundle


@contextlib.contextmanager
def running_origin(
    data: DataSet, directory: str, *, address: str = "127.0.0.1", prefix: Sequence[str] = ()
) -> Iterator[Origin]:
    """Serve `data` on `address` until the end of the block; nginx's own files go to `directory`.

    `prefix`: words before the command, such as `ip netns exec NAME`. Raises OriginFailed.
    """
    os.makedirs(directory)
    bundle = write_certificate(directory, address)
    path = os.path.join(directory, "nginx.conf")
    listen = os.path.join(os.path.dirname(os.path.abspath(__file__)), "listen.py")
    workers = len(os.sched_getaffinity(0))
    process = subprocess.Popen(
        [*prefix, sys.executable, "-I", "-S", listen, address, str(len(SERVERS)), str(workers), path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("no pipes")
        line = process.stdout.readline()
        if not line:
            raise OriginFailed(f"no listening sockets: {process.communicate()[1].strip()}")
        ports = json.loads(line)
        text = config(directory, data.root, address=address, ports=ports, workers=workers)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        check_config(path, prefix=prefix)
        process.stdin.write("go\n")
        process.stdin.close()
        urls = {
            name: f"{'https' if name == 'tls' else 'http'}://{address}:{port}"
            for name, port in zip(SERVERS, ports, strict=True)
        }
        yield Origin(urls, bundle)
        if process.poll() is not None:
            raise OriginFailed(f"nginx ended with exit code {process.returncode}: {_errors(directory)}")
    finally:
        process.terminate()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def check_config(path: str, *, prefix: Sequence[str] = ()) -> None:
    """Run `nginx -t`. Raises OriginFailed with nginx's output."""
    done = subprocess.run(
        [*prefix, nginx_path() or "nginx", "-t", "-q", "-c", path],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise OriginFailed(f"nginx refuses its configuration: {done.stderr.strip()}")


def _errors(directory: str) -> str:
    with contextlib.suppress(OSError), open(os.path.join(directory, "error.log"), encoding="utf-8") as file:
        return file.read()[-2000:].strip()
    return "no error log"
