"""Readers that know nothing of Penstock, as programs: each reads as its original does (contract §7).

Run as `python foreign.py READER DATA_DIRECTORY EPOCHS CHANNEL...`; prints one JSON list, an entry per
epoch. Standard library alone, but for pandas. Where an original polls or sleeps, so does its copy here.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import select
import struct
import subprocess
import sys
import time
from typing import Any

MAGIC = 0xCED7230A


def mlio(directory: str, epochs: int, channel: str) -> list[list[object]]:
    """awslabs/ml-io, sagemaker_pipe_input_stream.cc: digest, opens that failed, longest wait in seconds."""
    reported = []
    for epoch in range(epochs):
        path, failed, longest = f"{directory}/{channel}_{epoch}", 0, 0.0
        for attempt in range(3):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                break
            except FileNotFoundError:
                if attempt == 2:
                    raise
                failed += 1
                time.sleep(1)

        def ready(fd: int = fd, epoch: int = epoch) -> float:
            started = time.monotonic()
            if not select.select([fd], [], [], 60)[0]:
                raise SystemExit(f"FIFO {epoch} of the SageMaker pipe channel timed out.")
            return time.monotonic() - started

        digest = hashlib.sha256()
        longest = max(longest, ready())
        while True:
            try:
                data = os.read(fd, 1 << 16)
            except OSError as error:
                if error.errno != errno.EAGAIN:
                    raise
                os.sched_yield()
                longest = max(longest, ready())
                continue
            if not data:
                break
            digest.update(data)
        os.close(fd)
        reported.append([digest.hexdigest(), failed, longest])
    return reported


def xgboost(directory: str, epochs: int, channel: str) -> list[Any]:
    """sagemaker-xgboost-container: a channel is there if its FIFO 0 is, else it is taken for absent."""
    if not os.path.exists(f"{directory}/{channel}_0"):
        return ["absent"]
    with open(f"{directory}/../config/inputdataconfig.json") as file:
        config = json.load(file)[channel]
    assert config["TrainingInputMode"] == "Pipe"
    assert {"S3DistributionType", "RecordWrapperType"} <= config.keys()
    return [digest for digest, _, _ in mlio(directory, 1, channel)]


def own_algorithm(directory: str, epochs: int, channel: str) -> list[str]:
    """pipe_bring_your_own/train.py: poll, read unbuffered into 16 MiB."""
    reported, buffer = [], bytearray(16 << 20)
    for epoch in range(epochs):
        path = f"{directory}/{channel}_{epoch}"
        while not os.path.exists(path):
            time.sleep(0.1)
        digest = hashlib.sha256()
        with open(path, "rb", buffering=0) as fifo:
            while count := fifo.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
        reported.append(digest.hexdigest())
    return reported


def lowest(directory: str, epochs: int, channel: str) -> list[list[str]]:
    """mvsusp/pipe-mode-example: in every epoch the first name of the directory, by sorting."""
    reported = []
    for _ in range(epochs):
        while not (names := [name for name in os.listdir(directory) if name.startswith(f"{channel}_")]):
            time.sleep(0.1)
        name = min(names)
        with open(f"{directory}/{name}", "rb") as fifo:
            reported.append([name, hashlib.sha256(fifo.read()).hexdigest()])
    return reported


def read_csv(directory: str, epochs: int, channel: str) -> list[list[int]]:
    """pandas on the path itself: rows, and the sum of each column."""
    import pandas as pd

    reported = []
    for epoch in range(epochs):
        frame = pd.read_csv(f"{directory}/{channel}_{epoch}", header=None)
        reported.append([len(frame), *(int(total) for total in frame.sum())])
    return reported


def csv_chunks(directory: str, epochs: int, channel: str) -> list[list[int]]:
    """pandas in chunks of the path itself: rows, and the sum of each column."""
    import pandas as pd

    reported = []
    for epoch in range(epochs):
        sums = [0, 0, 0]
        for frame in pd.read_csv(f"{directory}/{channel}_{epoch}", header=None, chunksize=7000):
            found = [len(frame), *(int(total) for total in frame.sum())]
            sums = [a + b for a, b in zip(sums, found, strict=True)]
        reported.append(sums)
    return reported


def cat(directory: str, epochs: int, channel: str) -> list[str]:
    """cat(1), and the digest of what it copies."""
    reported = []
    for epoch in range(epochs):
        command = ["cat", f"{directory}/{channel}_{epoch}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as copying:
            assert copying.stdout is not None
            reported.append(hashlib.sha256(copying.stdout.read()).hexdigest())
        assert copying.returncode == 0
    return reported


def zipped(directory: str, epochs: int, first: Any, second: Any) -> list[list[str]]:
    """Two channels read together, 100 bytes of one for 20,000 of the other."""
    reported = []
    for epoch in range(epochs):
        digests = hashlib.sha256(), hashlib.sha256()
        with (
            open(f"{directory}/{first}_{epoch}", "rb") as few,
            open(f"{directory}/{second}_{epoch}", "rb") as many,
        ):
            while True:
                pair = few.read(100), many.read(20_000)
                if not all(pair):
                    assert not any(pair)
                    break
                for digest, data in zip(digests, pair, strict=True):
                    digest.update(data)
        reported.append([digest.hexdigest() for digest in digests])
    return reported


def dmlc(directory: str, epochs: int, channel: str) -> list[list[str]]:
    """dmlc-core, recordio.cc: parts are joined with the magic between them; a cut is fatal."""
    reported = []
    for epoch in range(epochs):
        records = []
        with open(f"{directory}/{channel}_{epoch}", "rb") as fifo:
            record = b""
            while head := fifo.read(8):
                magic, lrec = struct.unpack("<II", head)
                assert magic == MAGIC
                flag, length = lrec >> 29, lrec & (1 << 29) - 1
                padded = fifo.read((length + 3) & ~3)
                assert len(padded) == (length + 3) & ~3
                record += padded[:length]
                if flag in (0, 3):
                    records.append(hashlib.sha256(record).hexdigest())
                    record = b""
                else:
                    record += struct.pack("<I", MAGIC)
        reported.append(records)
    return reported


def incumbent_tfrecord(directory: str, epochs: int, channel: str) -> list[list[str]]:
    """sagemaker-tensorflow, TFRecordReader.cpp: both checksums."""
    reported = []
    for epoch in range(epochs):
        records = []
        with open(f"{directory}/{channel}_{epoch}", "rb") as fifo:
            while head := fifo.read(12):
                length, crc = struct.unpack("<QI", head.ljust(12, b"?"))
                if crc != masked(head[:8]):
                    raise ValueError("CRC check on header failed.")
                data, stored = fifo.read(length), fifo.read(4)
                if struct.pack("<I", masked(data)) != stored:
                    raise ValueError("CRC check on data failed.")
                records.append(hashlib.sha256(data).hexdigest())
        reported.append(records)
    return reported


def masked(data: bytes) -> Any:
    """TFRecord's masked CRC-32C."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


if __name__ == "__main__":
    name, context, count, *channels = sys.argv[1:]
    print(json.dumps(globals()[name](context, int(count), *channels)))
