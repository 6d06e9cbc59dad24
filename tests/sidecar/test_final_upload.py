"""`OutputDataConfig`: model and output data are in S3 when `exec` ends, or kept and named."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.kit.archives import members
from tests.kit.processes import PENSTOCK, job, penstock, penstock_with, uploader_of, write_job
from tests.kit.stub import Answer, S3Stub

MODEL = "b/out/my-job/output/model.tar.gz"
DATA = "b/out/my-job/output/output.tar.gz"
OWN = {"x-amz-meta-penstock-job": "my-job", "x-amz-meta-penstock-host": "algo-1"}
TRAIN = (
    'cat "$SM_INPUT_DIR/data/in_0" >"$SM_MODEL_DIR/weights" && mkdir "$SM_MODEL_DIR/vocabulary" && '
    'echo words >"$SM_MODEL_DIR/vocabulary/ümläut" && echo note >"$SM_OUTPUT_DATA_DIR/note"'
)
HELD = {"weights": b"bytes", "vocabulary/ümläut": b"words\n"}


def job_file(stub: S3Stub, tmp_path: Path, base: Path | None = None, **keys: Any) -> str:
    stub.objects["b/in/object"] = b"bytes"
    penstock = keys.pop("Penstock", {})
    output = {"S3OutputPath": "s3://b/out/"} | keys.pop("output", {})
    document = job(stub.url, base, "b/in/", **({"GiveUpAfter": 60} | penstock))
    return write_job(
        tmp_path / "job.yaml",
        document | {"TrainingJobName": "my-job", "OutputDataConfig": output} | keys,
    )


def execute(path: str, script: str = TRAIN) -> tuple[int, list[dict[str, Any]]]:
    env = {**os.environ, "TMPDIR": os.path.dirname(path)}
    done = penstock("exec", "-c", path, "--", "sh", "-c", script, env=env)
    return done.returncode, [json.loads(each) for each in done.stderr.splitlines() if each.startswith("{")]


def lines_of(events: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [each for each in events if each["event"] == event]


def test_the_model_is_where_the_job_file_says_when_exec_ends(stub: S3Stub, tmp_path: Path) -> None:
    code, events = execute(job_file(stub, tmp_path))
    assert code == 0, events
    assert members(stub.objects[MODEL]) == HELD
    assert members(stub.objects[DATA]) == {"note": b"note\n"}
    assert stub.puts.metadata[MODEL].items() >= OWN.items()
    assert not lines_of(events, "kept on this machine, because it is not in S3")
    assert not stub.puts.uploads


def test_a_second_run_of_the_job_replaces_its_own_model(stub: S3Stub, tmp_path: Path) -> None:
    path = job_file(stub, tmp_path)
    assert execute(path)[0] == 0
    code, events = execute(path, TRAIN.replace("words", "others"))
    assert code == 0, events
    assert members(stub.objects[MODEL])["vocabulary/ümläut"] == b"others\n"


@pytest.mark.parametrize("compression", ["GZIP", "NONE"])
@pytest.mark.parametrize("by", ["no run", "other-job"])
def test_another_model_is_refused_before_the_training(
    stub: S3Stub, tmp_path: Path, compression: str, by: str
) -> None:
    key = MODEL if compression == "GZIP" else "b/out/my-job/output/model/weights"
    stub.objects[key] = b"live"
    stub.puts.metadata[key] = {} if by == "no run" else OWN | {"x-amz-meta-penstock-job": by}
    path = job_file(stub, tmp_path, output={"CompressionType": compression})
    code, events = execute(path, f"touch {tmp_path}/trained")
    assert (code, stub.objects[key], (tmp_path / "trained").exists()) == (2, b"live", False)
    assert f"s3://{key} exists" in events[-1]["error"]
    assert by in events[-1]["error"]
    assert "Penstock.Output.Replace" in events[-1]["error"]
    path = job_file(
        stub, tmp_path, output={"CompressionType": compression}, Penstock={"Output": {"Replace": True}}
    )
    code, events = execute(path)
    assert code == 0, events
    assert stub.objects[key] != b"live"


def test_a_server_without_etags_is_an_error_before_the_training(stub: S3Stub, tmp_path: Path) -> None:
    async def bare(_: Answer) -> web.Response:
        return web.Response()

    stub.objects[DATA] = b"of an earlier run"
    stub.script_head(bare, key=DATA)
    code, events = execute(job_file(stub, tmp_path))
    assert (code, events[-1]["error"]) == (5, f"the response to HEAD has no ETag: s3://{DATA}")


def test_a_model_that_comes_meanwhile_stays_and_ours_is_beside_it(stub: S3Stub, tmp_path: Path) -> None:
    path = job_file(stub, tmp_path)

    def other() -> None:
        stub.objects[MODEL] = b"other"

    stub.puts.before.extend([lambda: None, other])
    code, events = execute(path)
    assert (code, stub.objects[MODEL]) == (9, b"other")
    (aside,) = [key for key in stub.objects if re.fullmatch(r"b/out/my-job/output/\w+Z/model.tar.gz", key)]
    assert members(stub.objects[aside]) == HELD
    (left,) = lines_of(events, "not uploaded")
    assert left["name"] == "model"
    assert aside in left["reason"]


def test_a_trainer_that_fails_leaves_its_output_but_no_model(stub: S3Stub, tmp_path: Path) -> None:
    script = f'{TRAIN} && printf "%01100d" 0 >"$SM_OUTPUT_DIR/failure"; exit 3'
    code, events = execute(job_file(stub, tmp_path), script)
    assert (code, MODEL in stub.objects, DATA in stub.objects) == (3, False, True)
    (ended,) = lines_of(events, "the trainer has ended")
    assert (ended["code"], ended["reason"]) == (3, "0" * 1024)
    (kept,) = lines_of(events, "kept on this machine, because it is not in S3")
    assert Path(kept["path"], "weights").read_bytes() == b"bytes"
    assert kept["do"] == f"penstock upload --endpoint-url {stub.url} {kept['path']} s3://BUCKET/PREFIX"


def test_an_empty_model_is_no_object(stub: S3Stub, tmp_path: Path) -> None:
    code, events = execute(job_file(stub, tmp_path), "true")
    assert (code, MODEL in stub.objects, DATA in stub.objects) == (0, False, False)
    assert lines_of(events, "the model directory is empty; no object")


def test_files_as_they_are(stub: S3Stub, tmp_path: Path) -> None:
    path = job_file(stub, tmp_path, output={"CompressionType": "NONE"})
    for _ in range(2):
        code, events = execute(path)
        assert code == 0, events
    below = "b/out/my-job/output/model/"
    found = {key.removeprefix(below): data for key, data in stub.objects.items() if key.startswith(below)}
    assert found == HELD


def test_one_clash_of_many_files_is_named_and_the_others_are_there(stub: S3Stub, tmp_path: Path) -> None:
    path = job_file(stub, tmp_path, output={"CompressionType": "NONE"})
    clash = "b/out/my-job/output/model/vocabulary/ümläut"

    def other() -> None:
        stub.objects[clash] = b"other"

    stub.puts.before.append(other)
    code, events = execute(path)
    assert (code, stub.objects[clash]) == (9, b"other")
    assert stub.objects["b/out/my-job/output/model/weights"] == b"bytes"
    assert [each["name"] for each in lines_of(events, "not uploaded")] == ["vocabulary/ümläut"]


@pytest.mark.parametrize("option", ["job file", "ignored"])
def test_a_job_that_may_only_read(stub: S3Stub, tmp_path: Path, option: str) -> None:
    stub.puts.refused.append((403, "AccessDenied"))
    settings = {"Output": "ignore"} if option == "ignored" else {}
    code, events = execute(job_file(stub, tmp_path, Penstock=settings), f"touch {tmp_path}/trained; {TRAIN}")
    if option == "ignored":
        assert (code, MODEL in stub.objects) == (0, False), events
        kept = lines_of(events, "kept on this machine, because it is not in S3")
        assert [Path(each["path"]).name for each in kept] == ["model", "data"]
        return
    assert (code, (tmp_path / "trained").exists()) == (3, False)
    assert "s3:PutObject" in events[-1]["error"]
    assert "Penstock.Output: ignore" in events[-1]["error"]


def test_storage_that_is_away_at_the_end_keeps_the_model(stub: S3Stub, tmp_path: Path) -> None:
    base = tmp_path / "ml"
    path = job_file(stub, tmp_path, base, Penstock={"GiveUpAfter": 3})
    script = f"{TRAIN}; touch {tmp_path}/trained"
    refuse(stub, tmp_path / "trained")
    code, events = execute(path, script)
    assert code == 9
    assert {each["name"] for each in lines_of(events, "not uploaded")} == {"model", "output/data"}
    assert {each["path"] for each in lines_of(events, "kept on this machine, because it is not in S3")} == {
        str(base / "model"),
        str(base / "output" / "data"),
    }
    assert (base / "model" / "weights").read_bytes() == b"bytes"


def refuse(stub: S3Stub, once: Path) -> None:
    """Let the stub answer every write with 503 once a file is there."""
    right = stub.puts.spoil

    def spoil(operation: str, request: Any, response: Any) -> Any:
        from tests.kit.puts import error

        if not once.exists():
            return right(operation, request, response)
        stub.objects.pop("{bucket}/{key}".format_map(request.match_info), None)  # nor was it carried out
        return error(503, "SlowDown")

    stub.puts.spoil = spoil


@pytest.mark.parametrize(("host", "name"), [(0, ""), (1, "algo-2/")])
def test_each_host_has_a_place(stub: S3Stub, tmp_path: Path, host: int, name: str) -> None:
    path = job_file(stub, tmp_path, ResourceConfig={"InstanceCount": 2})
    done = penstock(
        *("exec", "-c", path, "--host-index", str(host), "--host-count", "2", "--"),
        *("sh", "-c", TRAIN),
    )
    assert done.returncode == 0, done.stderr
    assert f"b/out/my-job/output/{name}model.tar.gz" in stub.objects


def test_the_uploader_s_death_costs_no_model(stub: S3Stub, tmp_path: Path) -> None:
    kill = f"""import os, signal, sys
sys.path.insert(0, {os.getcwd()!r})
from tests.kit.processes import uploader_of
os.kill(uploader_of(os.getppid()), signal.SIGKILL)
"""
    (tmp_path / "kill.py").write_text(kill)
    script = f"{TRAIN}; exec {sys.executable} {tmp_path}/kill.py"
    code, events = execute(job_file(stub, tmp_path), script)
    assert code == 0, events
    assert lines_of(events, "the uploader has died; it is started again")
    assert members(stub.objects[MODEL]) == HELD


def test_an_uploader_that_dies_again_and_again_is_9(stub: S3Stub, tmp_path: Path) -> None:
    base, trained = tmp_path / "ml", tmp_path / "trained"
    command = [*PENSTOCK, "exec", "-c", job_file(stub, tmp_path, base), "--", "sh", "-c"]
    deaths = []
    with subprocess.Popen([*command, f"{TRAIN}; touch {trained}"], stderr=subprocess.PIPE) as process:

        def spoil(_operation: str, _request: Any, response: Any) -> Any:
            if trained.exists() and (uploader := uploader_of(process.pid)) is not None:
                deaths.append(uploader)
                os.kill(uploader, signal.SIGKILL)
            return response

        stub.puts.spoil = spoil
        text = process.communicate()[1].decode()
    assert (process.returncode, len(set(deaths))) == (9, 3), text
    assert "the uploader died 3 times" in text
    assert f"penstock upload --endpoint-url {stub.url} {base}/model" in text


def test_a_second_signal_ends_the_upload_and_keeps_the_model(stub: S3Stub, tmp_path: Path) -> None:
    base = tmp_path / "ml"
    path = job_file(stub, tmp_path, base, Penstock={"GiveUpAfter": 300})
    refuse(stub, tmp_path / "trained")
    command = [*penstock_with("sidecar.process.logs.LOGGED_EVERY = 60.0"), "exec", "-c", path]
    process = subprocess.Popen(
        [*command, "--", "sh", "-c", f"{TRAIN}; touch {tmp_path}/trained"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        event = json.loads(line) if line.startswith("{") else {}
        if event.get("event") == "waiting for storage":
            process.send_signal(signal.SIGTERM)
        if event.get("event") == "signal, when the upload has ended":
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 130
    assert str(base / "model") in rest
    assert os.listdir(base / "model")


CHECKPOINTS: dict[str, Any] = {"CheckpointConfig": {"S3Uri": "s3://b/checkpoints"}}


@pytest.mark.parametrize("folder", ["b/checkpoints/", "whole-bucket/"])
def test_checkpoints_are_in_s3_when_exec_ends(stub: S3Stub, tmp_path: Path, folder: str) -> None:
    base = tmp_path / "ml"
    stub.objects[f"{folder}step-0/restored"] = b""
    script = (
        f"cd {base}/checkpoints && mkdir step-1 && echo a >step-1/weights && exec 3>events && echo b >&3 && "
        f"echo c >step-1/trainer_state.json; exit 3"
    )
    path = job_file(stub, tmp_path, base, CheckpointConfig={"S3Uri": f"s3://{folder.rstrip('/')}"})
    code, events = execute(path, script)
    assert code == 3, events
    found = {key.removeprefix(folder) for key in stub.objects if key.startswith(folder)}
    assert found == {"step-0/restored", "step-1/weights", "step-1/trainer_state.json", "events"}
    assert not lines_of(events, "uploads cannot be noted")
    made = [key.removeprefix(folder) for kind, key, _ in stub.puts.seen if kind == "PutObject"]
    assert made.index("step-1/weights") < made.index("step-1/trainer_state.json")


def test_what_is_in_s3_for_one_job_is_not_for_another(stub: S3Stub, tmp_path: Path) -> None:
    base = tmp_path / "ml"
    for folder in ("checkpoints", "others"):
        keys = {"CheckpointConfig": {"S3Uri": f"s3://b/{folder}"}}
        code, events = execute(
            job_file(stub, tmp_path, base, **keys), f"echo a >>{base}/checkpoints/{folder}"
        )
        assert code == 0, events
    assert {"b/others/checkpoints", "b/others/others"} <= stub.objects.keys()


def test_checkpoints_that_may_not_be_written_are_an_error_before_the_training(
    stub: S3Stub, tmp_path: Path
) -> None:
    stub.puts.refused.append((403, "AccessDenied"))
    path = job_file(stub, tmp_path, Penstock={"Output": "ignore"}, **CHECKPOINTS)
    code, events = execute(path, f"touch {tmp_path}/trained")
    assert (code, (tmp_path / "trained").exists()) == (3, False)
    assert "Penstock.Checkpoints: ignore" in events[-1]["error"]


def test_a_trainer_in_penstock_finish_ends_as_one_without_it(stub: S3Stub, tmp_path: Path) -> None:
    base = tmp_path / "ml"
    finish = f"{base}/input/config/penstock-finish"
    code, events = execute(job_file(stub, tmp_path, base), f"{finish} -- sh -c '{TRAIN}; exit 0'")
    assert (code, members(stub.objects[MODEL])) == (0, HELD), events


KEPT = "kept on this machine, because it is not in S3"


@pytest.mark.parametrize("made", ["file", "link"])
def test_what_is_in_place_of_the_model_is_kept(stub: S3Stub, tmp_path: Path, made: str) -> None:
    link = "" if made == "file" else 'mv "$1" "$1.own" && ln -s "$1.own" "$1" && '
    script = f'set -- "$SM_MODEL_DIR"; rmdir "$1" && echo weights >"$1" && {link}true'
    code, events = execute(job_file(stub, tmp_path), script)
    assert (code, MODEL in stub.objects) == (9, False)
    (kept,) = lines_of(events, KEPT)
    assert os.path.lexists(kept["path"])


def test_files_outside_the_base_directory_stay_there(stub: S3Stub, tmp_path: Path) -> None:
    (tmp_path / "own" / "data").mkdir(parents=True)
    (tmp_path / "own" / "data" / "note").write_bytes(b"note")
    code, events = execute(
        job_file(stub, tmp_path), f'rm -r "$SM_OUTPUT_DIR" && ln -s {tmp_path}/own "$SM_OUTPUT_DIR"'
    )
    assert (code, DATA in stub.objects) == (9, False)
    assert [each["path"] for each in lines_of(events, KEPT)] == [f"{tmp_path}/own/data"]
    assert (tmp_path / "own" / "data" / "note").read_bytes() == b"note"


@pytest.mark.parametrize("place", ["temporary", "own"])
@pytest.mark.parametrize("uploaded", [True, False], ids=["whole", "name"])
def test_checkpoints_that_are_not_in_s3_are_kept(
    stub: S3Stub, tmp_path: Path, place: str, *, uploaded: bool
) -> None:
    local = {"LocalPath": str(tmp_path / "states")} if place == "own" else {}
    path = job_file(stub, tmp_path, CheckpointConfig={"S3Uri": "s3://b/states", **local})
    where = '"$SM_MODEL_DIR/../checkpoints"' if place == "temporary" else str(tmp_path / "states")
    name = "step-1" if uploaded else r"$(printf '\377')"
    code, events = execute(path, f'{TRAIN} && cd {where} && echo 1 >"{name}"')
    assert code == (0 if uploaded else 9), events
    kept = [each["path"] for each in lines_of(events, KEPT)]
    assert len(kept) == (0 if uploaded else 1)
    for each in kept:
        assert b"\xff" in os.listdir(os.fsencode(each))
        assert not local or each == local["LocalPath"]
