"""What is fuzzed: every parser of bytes that somebody else wrote, each with inputs that it takes.

A target takes any bytes and returns, or raises one of the errors that it may (`Target.ends`). Anything else
(a KeyError, a RecursionError, a MemoryError, a hang) is a finding. Parsers that work piece by piece get their
input in pieces, whose sizes follow from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import io
import json
import os
import socket
import struct
import tempfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from botocore.handlers import decode_list_object_v2
from botocore.loaders import create_loader
from botocore.model import ServiceModel
from botocore.parsers import create_parser

from sidecar.config.hosts import identify
from sidecar.config.job import load_job
from sidecar.config.settings import read_token
from sidecar.job.environment import resource_config
from sidecar.job.layout import Layout, platform_resource_config
from sidecar.job.resume import parse_saved
from streamer.aio import FairPoller
from streamer.errors import BadAnswer, ErrorContext, PenstockError
from streamer.formats import recordio, tfrecord
from streamer.formats.borders import BadRecord
from streamer.formats.lines import LineReader
from streamer.formats.record_format import RecordFormat
from streamer.formats.record_index import Damaged, IndexedObject, RecordIndex, block, header
from streamer.formats.recordio import RecordIOReader
from streamer.formats.tar import TarReader, sample
from streamer.formats.tfrecord import TFRecordReader
from streamer.formats.transform import BadContent, JoinTar, Transform
from streamer.inflate import Inflater
from streamer.plan import ObjectRef, Part, S3Uri, Segment, parse_address, parse_object_uri
from streamer.readers.core.config import channels_in, check_channel
from streamer.readers.core.position import ReaderPosition
from streamer.readers.core.state import EpochState
from streamer.relay.deliver.lookahead import not_inflatable
from streamer.relay.staging.buffers import BufferPool, BufferStage
from streamer.relay.statistics import ChannelCounters
from streamer.s3.client.documents import checked_document
from streamer.s3.client.faults import map_errors
from streamer.s3.http.body import HttpBody
from streamer.s3.http.client import Response
from streamer.s3.http.connection import Connection
from streamer.s3.http.pool import ConnectionPool
from streamer.s3.http.response import ResponseHeader
from streamer.s3.manifests.lines import RowScanner
from streamer.s3.manifests.text import ArrayScanner, Gunzip
from streamer.s3.pages.page_parser import Page, parse_by_expression, parse_by_tree
from streamer.s3.pages.pages import PageSource, page_by_aiobotocore
from streamer.s3.pages.sources import Sources
from streamer.s3.range_gets import error_of
from streamer.s3.ranges import check_header
from streamer.trailer import Trailer, parse_trailer
from tests.kit.index import IndexBytes
from tests.kit.pieces import Pieces

MOST = 16 * 1024
"""Bytes of an input."""
PIECES = (1, 7, 64, 1 << 20)
WHERE = ErrorContext("b", "k", 0, 1)
REF = ObjectRef("b", "k", 100, "e")


@dataclass(frozen=True)
class Target:
    """A parser; `ends`: what it may raise beside errors of ours; `seeds`: what it takes."""

    parse: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    ends: tuple[type[BaseException], ...] = ()

    def run(self, data: bytes) -> None:
        """Raises whatever the parser must not raise."""
        expected: tuple[type[BaseException], ...] = (PenstockError, *self.ends)
        with contextlib.suppress(*expected):
            self.parse(data[:MOST])


def pieces(data: bytes) -> Iterator[bytes]:
    """Cut as the first byte says, which stays with them."""
    size = PIECES[data[0] % len(PIECES)] if data else 1
    return (data[at : at + size] for at in range(0, len(data), size))


def scanned(scanner: Any, data: bytes) -> None:
    gunzip = Gunzip("s3://b/manifest")
    for piece in pieces(data):
        for text in gunzip.feed(piece):
            list(scanner.feed(text, last=False))
    list(scanner.feed(gunzip.finish(), last=True))


def manifest(data: bytes) -> None:
    scanned(ArrayScanner("s3://b/manifest"), data)


def augmented(data: bytes) -> None:
    scanned(RowScanner("s3://b/manifest", ["source-ref", "label"]), data)


def records(kind: Any, **options: Any) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        size = PIECES[data[0] % len(PIECES)] if data else 1
        reader = kind(Pieces(data, iter(lambda: size, 0)), block_bytes=64, **options)
        for record in reader:
            if kind is TarReader:
                sample(record)

    return read


def joined(kind: Callable[[], Transform]) -> Callable[[bytes], None]:
    """An object among others; what leaves is never more than what came."""

    def join(data: bytes) -> None:
        joiner = kind()
        joiner.begin()
        left = sum(len(piece) for fed in pieces(data) for piece in joiner.feed(fed))
        if left > len(data):
            raise AssertionError("bytes that nobody fed")
        joiner.end()

    return join


def borders(kind: str) -> Callable[[bytes], None]:
    """Records are inside of the object, in order, and the same however it is cut into blocks."""

    def scan(data: bytes) -> None:
        record_format = RecordFormat.parse(kind)
        scanner, whole = record_format.scanner(), record_format.scanner()
        with contextlib.suppress(BadRecord):
            whole.feed(data)
        for piece in pieces(data):
            scanner.feed(piece)
        end = scanner.finish()
        offsets = list(scanner.offsets)
        if offsets != list(whole.offsets) or offsets != sorted(set(offsets)) or end > len(data):
            raise AssertionError(offsets)

    return scan


def index_file(data: bytes) -> None:
    """What is read is written again as the same index."""
    index = RecordIndex(IndexBytes(data))
    again = RecordIndex(IndexBytes(header(index.format) + block(index)))
    if index.end > len(data) or list(again) != list(index):
        raise AssertionError(list(index))


INDEX_HEADER = header(RecordFormat.parse("TFRecord"))
ROWS = [IndexedObject(number, 9, 100, 2, 100, array("Q", [0, 70])) for number in (1, 2, 1)]


def inflated(data: bytes) -> None:
    inflater = Inflater(functools.partial(not_inflatable, REF))
    for piece in pieces(data):
        inflater.feed(piece)
        for _ in range(64):  # what inflates to more is not looked at to its end
            if not inflater.pieces(64 * 1024):
                break
        else:
            return
    inflater.finish()


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def answer(data: bytes) -> None:
    """A response as a connection brings it, judged and, if it is right, its body taken."""

    async def read() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setblocking(False)
            theirs.send(data)
            theirs.close()
            ours.setblocking(False)
            part = Part.of(0, 0, [Segment(REF, 0, 100)])
            stage = BufferStage(part, BufferPool(), on_change=lambda: None, counters=ChannelCounters())
            poller = FairPoller()
            poller.open()
            connection = Connection(ours, poller)
            pool = ConnectionPool("", 0, poller)
            response = Response(connection, pool, WHERE, within=4, stall_timeout=4)
            try:
                await response.receive_header()
                header = response.header
                if header.status in (200, 206) and header.content_length is not None:
                    right_range(header)
                    body = HttpBody(
                        connection, header.content_length, WHERE, stall_timeout=4, give_back=None
                    )  # fmt: skip
                    stage.attach(body)
                    try:
                        await body.taken()
                    finally:
                        stage.detach(body)
                        body.close()
                elif header.status >= 400:
                    raise error_of(header, await response.error_body(), WHERE)
            finally:
                response.end(reuse=False)
                connection.close()
                poller.close()

    loop().run_until_complete(read())


def right_range(header: ResponseHeader) -> None:
    check_header(
        REF, 0, 100, WHERE, status=header.status, content_length=header.content_length, fields=header.fields
    )


def content_range(data: bytes) -> None:
    text = data.decode("latin-1")
    right_range(ResponseHeader(206, {"content-range": text, "content-length": text}))


def refusal(data: bytes) -> None:
    status, _, body = data.partition(b"\n")
    code = int(status) if status.isdigit() and len(status) < 4 else 400
    raise error_of(ResponseHeader(code, {"retry-after": status.decode("latin-1")}), body, WHERE)


@functools.cache
def s3_parser() -> tuple[Any, Any]:
    model = ServiceModel(create_loader().load_service_model("s3", "service-2"), "s3")
    return create_parser("rest-xml"), model.operation_model("ListObjectsV2").output_shape


class Answers:
    """Stands for botocore's client: every page is this one."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def send(self, _operation: str, context: ErrorContext, **_: str) -> Any:
        parser, shape = s3_parser()
        with map_errors(context):
            page = parser.parse({"status_code": 200, "headers": {}, "body": self._body}, shape)
            decode_list_object_v2(page, {"encoding_type_auto_set": True})
        return page


class Pages(PageSource):
    """Pages that aiobotocore's parser makes of one answer."""

    def __init__(self, body: bytes) -> None:
        self.ends_are_certain = False
        self._client: Any = Answers(body)

    async def page(
        self, bucket: str, prefix: str, *, token: str | None = None, start_after: str = ""
    ) -> Page:
        return await page_by_aiobotocore(
            self._client,
            bucket,
            {"prefix": prefix, "continuation-token": token or "", "start-after": start_after},
        )

    async def stat(self, bucket: str, key: str) -> ObjectRef:
        return ObjectRef(bucket, key, 0, "e")


def listing(data: bytes) -> None:
    async def read() -> None:
        await Sources(Pages(data), [S3Uri("b", "")]).plan()

    loop().run_until_complete(read())


def same_page(data: bytes) -> None:
    """The regular expression, the tree and aiobotocore read the same, or do not take the page."""
    document = checked_document(data)
    try:
        by_expression = parse_by_expression(document, WHERE)
    except BadAnswer:
        by_expression = Page(token="refused")
    try:
        by_tree = parse_by_tree(document, WHERE)
    except BadAnswer:
        by_tree = Page(token="refused")
    assert by_expression in (None, by_tree)
    if by_expression is not None and by_tree.token != "refused":
        with contextlib.suppress(PenstockError):
            assert loop().run_until_complete(Pages(document).page("b", "k")) == by_tree


@functools.cache
def place() -> str:
    """A directory in memory, for what is read from files."""
    return tempfile.mkdtemp(prefix="penstock-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)


def from_file(name: str, read: Callable[[str], object]) -> Callable[[bytes], None]:
    """`read`: from the directory that the file lies in."""

    def parse(data: bytes) -> None:
        path = os.path.join(place(), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
        read(place())

    return parse


def identities(base: str) -> None:
    document = platform_resource_config(Layout(base))
    resource_config(identify(job(), environment={}, document=document))


def from_environment(data: bytes) -> None:
    names = ("TF_CONFIG", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "JOB_COMPLETION_INDEX")
    text = data.decode("utf-8", "replace")
    identify(job(), environment=dict(zip(names, text.split("\0"), strict=False)))


@functools.cache
def job() -> Any:
    path = os.path.join(place(), "fixed.yaml")
    with open(path, "w") as file:
        file.write(JOB)
    return load_job(path)


def channels(base: str) -> None:
    channels_in(base)
    check_channel("train", base)


def saved(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    parse_saved(text)


def place_of(data: bytes) -> None:
    """A reader's `load_state_dict`, of JSON that somebody kept."""
    try:
        state = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(state, dict):
        ReaderPosition.of(state, "train")


def uris(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    for parse in (parse_address, parse_object_uri):
        try:
            parse(text)
        except PenstockError:
            continue


JOB = """
InputDataConfig:
  - ChannelName: train
    DataSource: {S3DataSource: {S3DataType: S3Prefix, S3Uri: "s3://b/train/"}}
Penstock:
  MemoryBudget: 64MiB
  Endpoint: {Url: "http://127.0.0.1:1", PathStyle: true}
  Admin: {Port: 0}
"""
HEAD = (
    b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-99/100\r\nContent-Length: 100\r\n"
    b'ETag: "e"\r\nx-amz-request-id: R\r\n\r\n'
)
PAGE = (
    b"<ListBucketResult><EncodingType>url</EncodingType><IsTruncated>true</IsTruncated>"
    b"<NextContinuationToken>t</NextContinuationToken><Contents><Key>a%20b</Key>"
    b"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;e&quot;</ETag><Size>1</Size>"
    b"<Owner><ID>i</ID></Owner><StorageClass>STANDARD</StorageClass></Contents></ListBucketResult>"
)
PAGE_OF_TWO_SHAPES = PAGE.replace(
    b"</ListBucketResult>",
    b"<Contents><Key>b</Key><Owner><ID>Key</ID></Owner><Size>2</Size><ETag>W/e</ETag></Contents></ListBucketResult>",
)
PAGE_WITH_FOLDERS = PAGE.replace(
    b"</ListBucketResult>", b"<CommonPrefixes><Prefix>p/</Prefix></CommonPrefixes></ListBucketResult>"
)
RESOURCES = {
    "current_host": "algo-1", "current_instance_type": "ml", "current_group_name": "g", "hosts": ["algo-1"],
    "instance_groups": [{"instance_group_name": "g", "instance_type": "ml", "hosts": ["algo-1"]}],
    "network_interface_name": "eth0",
}  # fmt: skip
STATE = {"format": 1, "channel": "train", "epoch": 1, "offset": 2, "skip": 0, "records": 1, "digest": "d"}
TRAILER = Trailer(channel="train", epoch=0, state="complete", bytes_total=5, bytes_delivered=5, error="e")
TF_CONFIG = {"cluster": {"chief": ["a"], "worker": ["b"]}, "task": {"type": "worker", "index": 0}}


def tar() -> bytes:
    import tarfile

    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("a.txt", "a.cls", "b" * 120 + ".txt"):
            entry = tarfile.TarInfo(name)
            entry.size = 3
            archive.addfile(entry, io.BytesIO(b"abc"))
    return made.getvalue()[:8192]


def message(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2, len(data)]) + data


VALUES = message(
    2, message(2, message(1, struct.pack("<2f", 1, 2)) + message(2, b"\0\1") + message(3, b"\2"))
)

TARGETS: dict[str, Target] = {
    "manifest": Target(
        manifest,
        (
            b'[{"prefix": "s3://b/p/"}, "a", "b?versionId=1"]',
            gzip.compress(b'[{"prefix": "s3://b/"}, "k"]', mtime=0),
        ),
    ),
    "augmented": Target(
        augmented,
        (
            b'{"source-ref": "s3://b/k", "label": {"a": [1, 2.5e3, null]}}\n',
            b'{"label": "x", "source-ref": "s3://b/\\u00e9"}',
        ),
    ),
    "recordio": Target(records(RecordIOReader), (recordio.encode(b"hello"), recordio.encode(b"") * 3)),
    "recordio-rejoined": Target(
        records(RecordIOReader, rejoin_magic=True),
        (bytes.fromhex("0a23d7ce04000020414243440a23d7ce0200006045460000"),),
    ),
    "tfrecord": Target(records(TFRecordReader), (tfrecord.encode(b"hello"), tfrecord.encode(b"") * 2)),
    "tfrecord-skipping": Target(
        records(TFRecordReader, max_corrupted_records_to_skip=2), (tfrecord.encode(b"hello"),)
    ),
    "lines": Target(records(LineReader), (b"a\nb\n", b"a\r\nb")),
    "tar": Target(records(TarReader), (tar(),)),
    "borders-tfrecord": Target(borders("TFRecord"), (tfrecord.encode(b"hello") * 2,), (BadRecord,)),
    "borders-recordio": Target(
        borders("RecordIO"),
        (recordio.encode(b"hello") * 2, bytes.fromhex("0a23d7ce04000020414243440a23d7ce0200006045460000")),
        (BadRecord,),
    ),
    "borders-lines": Target(borders("lines"), (b"a\nb\n", b"\n\na"), (BadRecord,)),
    "borders-tar": Target(borders("tar"), (tar(),), (BadRecord,)),
    "record-index": Target(
        index_file, (INDEX_HEADER + block(ROWS[:2]) + block(ROWS[2:]), INDEX_HEADER), (Damaged,)
    ),
    "join-tar": Target(joined(JoinTar), (tar(),), (BadContent,)),
    "inflate": Target(
        inflated, (gzip.compress(b"hello", mtime=0) * 2, bytes.fromhex("28b52ffd2005290000") + b"hello")
    ),
    "content-range": Target(content_range, (b"bytes 0-99/100", b"100")),
    "answer": Target(
        answer,
        (
            HEAD + b"x" * 100,
            b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\nRetry-After: 1\r\n\r\nabcde",
            b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD,
        ),
    ),
    "refusal": Target(
        refusal, (b"403\n<Error><Code>AccessDenied</Code><Message>no</Message></Error>", b"1e9\n")
    ),
    "listing": Target(listing, (PAGE, b"<ListBucketResult/>")),
    "page": Target(
        same_page,
        (PAGE, b"<ListBucketResult/>", PAGE_OF_TWO_SHAPES, PAGE_WITH_FOLDERS),
    ),
    "config": Target(
        from_file("job.yaml", lambda base: load_job(os.path.join(base, "job.yaml"))),
        (JOB.encode(), b'{"InputDataConfig": []}', b"{a: &a [1], b: *a, ? [1] : 2}"),
    ),
    "trailer": Target(
        parse_trailer,
        (
            json.dumps(
                {"channel": "c", "epoch": 0, "state": "open", "bytes_total": None, "format": 1}
            ).encode(),
            json.dumps({k: getattr(TRAILER, k) for k in TRAILER.__slots__}).encode(),
        ),
        (ValueError,),
    ),
    "resume": Target(saved, (json.dumps(STATE).encode(), json.dumps([STATE, STATE]).encode())),
    "reader-state": Target(place_of, (json.dumps(STATE).encode(),), (ValueError,)),
    "resourceconfig": Target(
        from_file("input/config/resourceconfig.json", identities), (json.dumps(RESOURCES).encode(),)
    ),
    "environment": Target(
        from_environment, (json.dumps(TF_CONFIG).encode(), b"\x001\x002\x001", b"\x001\x00999999999999")
    ),
    "inputdataconfig": Target(
        from_file("inputdataconfig.json", channels), (b'{"train": {"TrainingInputMode": "Pipe"}}',)
    ),
    "epoch-state": Target(
        from_file(".train-pipe_mode-state", lambda base: EpochState(base, "train").take()), (b"3", b" 12\n")
    ),
    "admin-token": Target(
        from_file("token", lambda base: read_token(os.path.join(base, "token"))), (b"0123456789abcdef\n",)
    ),
    "uri": Target(uris, (b"s3://b/k?versionId=x", b"https://b.s3.eu-west-1.amazonaws.com/k%20k")),
}
