"""`penstock manifest`: both of SageMaker's formats, read back by a job of our own, and every refusal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from streamer.formats import recordio
from tests.kit.processes import PENSTOCK, job, penstock, write_job
from tests.kit.stub import S3Stub

PAGE = Path(__file__).parent.parent.parent / "docs/how-to/manifests.md"
ODD = 'b/images/dög, \u2028\u0085 "x" 100%?/ä\n+&\\.jpg'
IMAGES = {
    "b/images/cat/0.jpg": b"miaow",
    "b/images/cat/1.jpg": b"purr",
    "b/images/dog/0.jpg": b"woof",
    ODD: b"?",
}
LABEL = ("--label", "class=([^/]+)/[^/]+$")
SOURCE: dict[str, dict[str, Any]] = {
    "ManifestFile": {},
    "AugmentedManifestFile": {"AttributeNames": ["source-ref", "class"]},
}


@pytest.fixture(autouse=True)
def images(stub: S3Stub) -> None:
    stub.objects |= IMAGES


def manifest(
    stub: S3Stub, *arguments: str, code: int = 0, endpoint: bool = True
) -> subprocess.CompletedProcess[str]:
    options = ["--endpoint-url", stub.url, "--path-style"] if endpoint else []
    done = penstock("manifest", *arguments, *options)
    assert done.returncode == code, done.stderr
    return done


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.split("\n")[:-1]]


def job_of(stub: S3Stub, tmp_path: Path, text: str, kind: str, **channel: Any) -> str:
    """A job file whose channel `m` has this manifest."""
    stub.objects["b/lists/m"] = text.encode()
    document = job(stub.url, tmp_path / "ml", "b/lists/m")
    document["InputDataConfig"][0] |= channel
    document["InputDataConfig"][0]["DataSource"]["S3DataSource"] |= {"S3DataType": kind} | SOURCE[kind]
    return write_job(tmp_path / "job.yaml", document)


def test_a_manifest_file_is_byte_for_byte_what_sagemaker_reads(stub: S3Stub) -> None:
    done = manifest(stub, "s3://b/images/", "--include", "[0-9].jpg")
    assert done.stdout == '[\n{"prefix": "s3://b/images/"},\n"cat/0.jpg",\n"cat/1.jpg",\n"dog/0.jpg"\n]\n'
    assert done.stderr == "3 objects; S3DataType: ManifestFile\n"


def test_an_augmented_manifest_is_byte_for_byte_what_sagemaker_reads(stub: S3Stub) -> None:
    done = manifest(stub, "s3://b/images/cat/", "s3://b/images/dog/0.jpg", *LABEL)
    assert done.stdout == (
        '{"source-ref": "s3://b/images/cat/0.jpg", "class": "cat"}\n'
        '{"source-ref": "s3://b/images/cat/1.jpg", "class": "cat"}\n'
        '{"source-ref": "s3://b/images/dog/0.jpg", "class": "dog"}\n'
    )
    assert done.stderr == (
        "3 objects; S3DataType: AugmentedManifestFile, AttributeNames: [source-ref, class]; "
        "2 labels of class\n"
    )


@pytest.mark.parametrize("kind", SOURCE)
def test_a_job_streams_what_the_manifest_names(stub: S3Stub, tmp_path: Path, kind: str) -> None:
    """Keys with every odd character too."""
    augmented = kind == "AugmentedManifestFile"
    done = manifest(stub, "s3://b/images/", *(LABEL if augmented else ()))
    assert done.stdout.isascii()
    path = job_of(stub, tmp_path, done.stdout, kind, RecordWrapperType="RecordIO")
    streamed = penstock("exec", "-c", path, "sh", "-c", "cat $SM_CHANNEL_M'_0'", text=False)
    assert streamed.returncode == 0, streamed.stderr
    due = b""
    for key in sorted(IMAGES):
        due += recordio.encode(IMAGES[key])
        due += recordio.encode(key.split("/")[-2].encode()) if augmented else b""
    assert streamed.stdout == due


def test_a_folder_marker_is_no_object(stub: S3Stub) -> None:
    stub.objects["b/images/dog/"] = b""
    done = manifest(stub, "s3://b/images/dog/")
    assert json.loads(done.stdout) == [{"prefix": "s3://b/images/dog/"}, "0.jpg"]


def test_the_prefix_ends_at_the_last_slash_that_all_uris_share(stub: S3Stub) -> None:
    done = manifest(stub, "s3://b/images/ca", "s3://b/images/dog/0.jpg")
    assert json.loads(done.stdout) == [{"prefix": "s3://b/images/"}, "cat/0.jpg", "cat/1.jpg", "dog/0.jpg"]
    stub.objects["b/top"] = b"x"
    done = manifest(stub, "s3://b/to", "s3://b/images/dog/")
    assert json.loads(done.stdout) == [{"prefix": "s3://b/"}, "top", "images/dog/0.jpg"]


def test_several_labels_of_one_key(stub: S3Stub) -> None:
    done = manifest(stub, "s3://b/images/cat/", *LABEL, "--label", r"number=(\d)(?:\.jpg)$", "--json")
    assert lines(done.stdout)[1] == {
        "source-ref": "s3://b/images/cat/1.jpg", "class": "cat", "number": "1",
    }  # fmt: skip
    assert json.loads(done.stderr)["labels"] == {"class": 1, "number": 2}


def test_objects_without_a_label_are_an_error_or_left_out(stub: S3Stub) -> None:
    stub.objects |= {"b/images/readme.txt": b"x", "b/images/zoo.txt": b"x"}
    narrow = ["s3://b/images/", "--exclude", "*+*", "--label", "class=images/([^/]*)/"]
    done = manifest(stub, *narrow, code=2)
    assert done.stdout == ""
    assert (
        "2 of 5 objects have no label: in the key of s3://b/images/readme.txt nothing matches "
        "--label class=images/([^/]*)/; correct it, or leave such objects out with" in done.stderr
    )
    done = manifest(stub, *narrow, "--skip-unmatched")
    assert [line["class"] for line in lines(done.stdout)] == ["cat", "cat", "dog"]
    assert done.stderr.endswith("2 labels of class; 2 objects without a label left out\n")
    done = manifest(stub, "s3://b/images/", "--label", "class=(lion)", "--skip-unmatched", code=2)
    assert "6 of 6 objects have no label" in done.stderr
    assert done.stderr.endswith("--label class=(lion); correct it\n")


def test_labels_are_numbered_as_the_page_shows(stub: S3Stub, tmp_path: Path) -> None:
    """Training and validation data agree on the numbers; a label without one is an error."""
    (script,) = re.findall(r"^```sh\n(jq .*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for name, prefix in (("train", "s3://b/images/"), ("val", "s3://b/images/dog/")):
        manifest(stub, prefix, *LABEL, "--exclude", "*+*", "--to", str(tmp_path / f"{name}.manifest"))
    subprocess.run(["sh", "-ec", script], cwd=tmp_path, check=True)
    assert json.loads((tmp_path / "ids.json").read_text()) == {"cat": 0, "dog": 1}
    numbered = [lines((tmp_path / f"{name}-numbered.manifest").read_text()) for name in ("train", "val")]
    assert [[line["class"] for line in each] for each in numbered] == [[0, 0, 1], [1]]
    assert numbered[1][0]["source-ref"] == "s3://b/images/dog/0.jpg"
    (tmp_path / "ids.json").write_text('{"cat": 0}')
    done = subprocess.run(
        ["sh", "-ec", script.splitlines()[-1]], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    assert (done.returncode, "no number for dog" in done.stderr) == (5, True)


def test_a_list_of_keys_needs_no_request(stub: S3Stub, tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_bytes("dog/0.jpg\r\n\ncat/ä.jpg\ndog/0.jpg".encode())
    done = manifest(stub, "s3://b/images/", "--keys", str(keys), endpoint=False)
    assert json.loads(done.stdout) == [{"prefix": "s3://b/images/"}, "dog/0.jpg", "cat/ä.jpg", "dog/0.jpg"]
    done = manifest(
        stub, "s3://b/images/", "--keys", str(keys), "--include", "/dog/*", *LABEL, endpoint=False
    )
    assert [line["class"] for line in lines(done.stdout)] == ["dog", "dog"]
    keys.write_text("s3://b/images/cat/0.jpg?versionId=7\ns3://c/cat/1.jpg\n")
    done = manifest(stub, "--keys", str(keys), *LABEL, endpoint=False)
    assert lines(done.stdout) == [
        {"source-ref": "s3://b/images/cat/0.jpg?versionId=7", "class": "cat"},
        {"source-ref": "s3://c/cat/1.jpg", "class": "cat"},
    ]
    assert stub.seen == []
    done = manifest(stub, "--keys", str(keys), endpoint=False, code=2)
    assert "the buckets b and c cannot be in one ManifestFile" in done.stderr


def test_two_manifests_divide_the_objects(stub: S3Stub, tmp_path: Path) -> None:
    """With labels too: an augmented manifest takes no Split in the job file."""
    keys = tmp_path / "keys.txt"
    keys.write_text("".join(f"cat/{number}\n" for number in range(100)))
    listed = ["s3://b/images/", "--keys", str(keys), "--label", "class=(cat)"]
    train, held_out = (
        manifest(stub, *listed, "--split", split, endpoint=False).stdout for split in ("0-3/5", "4/5")
    )
    assert 60 < len(lines(train)) < 95
    whole = manifest(stub, *listed, endpoint=False).stdout
    assert sorted((train + held_out).splitlines()) == sorted(whole.splitlines())


def test_a_list_from_standard_input() -> None:
    done = penstock("manifest", "s3://b", "--keys", "-", "-q", input="k/0\nk/1\n")
    assert (json.loads(done.stdout), done.stderr) == ([{"prefix": "s3://b/"}, "k/0", "k/1"], "")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "no objects are named: write an S3URI, or --keys FILE"),
        (("s3://b/none/",), 4, "no object matches"),
        (("s3://none/x",), 4, "no such bucket"),
        (("b/images",), 2, "write s3://BUCKET/PREFIX"),
        (("s3://b/images/", "--include", "*.png"), 4, "leave out every object"),
        (("s3://b/images/", "--include", "["), 2, "a [ has no ]"),
        (("s3://b/images/", "--label", "class"), 2, "write NAME=REGEX, such as 'class="),
        (("s3://b/images/", "--label", "class=("), 2, "is no regular expression of Python: missing )"),
        (("s3://b/images/", "--label", "class=a"), 2, "has 0 groups; put one pair of parentheses"),
        (("s3://b/images/", "--label", "class=(a)(b)"), 2, "has 2 groups"),
        (("s3://b/images/", "--label", "mask-ref=(a)"), 2, "ends in -ref"),
        (("s3://b/images/", "--label", "$x=(a)"), 2, "cannot be the name of an attribute"),
        (("s3://b/images/", "--label", "a=(a)", "--label", "a=(b)"), 2, "--label names an attribute twice"),
        (("s3://b/images/", "--skip-unmatched"), 2, "--skip-unmatched needs --label"),
        (("s3://b/images/", "--to", "f", "--keys", "no/../f"), 2, "the same file, f"),
        (
            ("s3://b/images/", "--to", "/no/such/folder/m"),
            7,
            "cannot write the manifest, /no/such/folder/m: No",
        ),
        (("s3://b/images/", "--to", "/dev/null"), 7, "it is no file"),
        (("s3://b/images/", "--keys", "/no/such/file"), 2, "sends no request: leave out --endpoint-url"),
    ],
)
def test_refusals(stub: S3Stub, arguments: tuple[str, ...], code: int, words: str) -> None:
    done = manifest(stub, *arguments, code=code)
    assert words in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (None, 7, "cannot read the list of keys"),
        (b"", 2, "names no object; write one key on each line"),
        (b"a\n\xff\n", 2, "line 2 is no UTF-8"),
        (b"cat/0.jpg\n", 2, "line 1: 'cat/0.jpg' is not an S3 URI"),
        (b"s3://b/x\ns3://b\n", 2, "line 2: 's3://b' names no object"),
        pytest.param(
            ("s3://b/x\ns3://b/" + "ä" * 513).encode(),
            2,
            "line 2: a key of 1026 bytes, and a key of S3 has at most 1024; write one key on each line",
            id="a long key",
        ),
        pytest.param(b"x" * 3_000_000, 2, "line 1: a line of 3000000 bytes, and a key", id="a long line"),
        pytest.param(b"s3://b/k?versionId=" + b"v" * 5000, 2, "a line of 5019 bytes", id="a long version"),
    ],
)
def test_refusals_of_a_list(tmp_path: Path, content: bytes | None, code: int, words: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    done = penstock("manifest", "--keys", str(path))
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr
    assert len(done.stderr) < 1000


def test_a_key_of_1024_bytes_is_taken(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ä" * 510)
    done = penstock("manifest", "s3://b/key/", "--keys", str(keys))
    assert json.loads(done.stdout) == [{"prefix": "s3://b/key/"}, "ä" * 510]


def test_a_key_that_a_manifest_cannot_name_is_refused(stub: S3Stub) -> None:
    stub.objects["b/images/x?versionId=1"] = b"x"
    done = manifest(stub, "s3://b/images/", code=2)
    assert "s3://b/images/x?versionId=1 ends as a version id does" in done.stderr
    manifest(stub, "s3://b/images/", "--exclude", "x*")


def test_a_file_is_replaced_when_all_is_known(stub: S3Stub, tmp_path: Path) -> None:
    target, link = tmp_path / "m", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    stub.refused_keys["AKIDTEST"] = "AccessDenied"
    assert "AccessDenied" in manifest(stub, "s3://b/images/", "--to", str(link), code=3).stderr
    assert target.read_text() == "before"
    stub.refused_keys.clear()
    assert manifest(stub, "s3://b/images/dog/", "--to", str(link)).stdout == ""
    assert json.loads(target.read_text()) == [{"prefix": "s3://b/images/dog/"}, "0.jpg"]
    assert sorted(os.listdir(tmp_path)) == ["link", "m"]


def test_ctrl_c_leaves_nothing(stub: S3Stub, tmp_path: Path) -> None:
    stub.allow_pages(0)
    command = [*PENSTOCK, "manifest", "s3://b/images/", "--to", str(tmp_path / "m")]
    with subprocess.Popen(
        [*command, "--endpoint-url", stub.url, "--path-style"], stderr=subprocess.PIPE, text=True
    ) as process:
        while not stub.listings:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.communicate()[1].strip() == ""
    stub.allow_pages()
    assert process.returncode == 130
    assert os.listdir(tmp_path) == []


def test_an_unreachable_endpoint_ends_after_its_time() -> None:
    done = penstock(
        "manifest",
        "s3://b/",
        "--endpoint-url",
        "http://127.0.0.1:1",
        "--path-style",
        "--give-up-after",
        "0.2",
    )
    assert done.returncode == 5
    assert "gave up after 0 s without a listing" in done.stderr


def test_a_reader_that_leaves_ends_it_as_a_shell_expects(stub: S3Stub) -> None:
    stub.objects |= {f"b/many/{number:06}": b"x" for number in range(20_000)}
    command = f"{' '.join(PENSTOCK)} manifest s3://b/many/ --endpoint-url {stub.url} --path-style | head -c 5"
    script = f"{command} | wc -c; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["5", "141"], "")
