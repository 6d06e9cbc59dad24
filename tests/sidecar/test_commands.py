"""`penstock exec`, `cat`, `plan` as processes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from sidecar.cli import cli
from sidecar.cli.help import SHELLS, Command, completion, summary
from sidecar.process import wording
from sidecar.process.exits import Exit
from tests.kit.harness import fill
from tests.kit.processes import PENSTOCK, job, leftovers, penstock, penstock_with, write_job
from tests.kit.stub import S3Stub, cut_after, fails
from tests.kit.terminal import terminal

SIZES = [2_500_000, 0, 70_000]


def run_exec(path: str, *command: str, **options: Any) -> subprocess.CompletedProcess[Any]:
    return penstock("exec", "-c", path, "--", *command, **options)


def test_exec_runs_the_trainer_beside_the_channels(stub: S3Stub, tmp_path: Path) -> None:
    """Channels up before the child starts, its variables set, its exit code ours, nothing left."""
    truth = fill(stub, SIZES, prefix="b/train/")
    script = (
        "import os, sys, json, hashlib\n"
        "base = os.environ['SAGEMAKER_BASE_DIR']\n"
        "assert json.loads(os.environ['SM_CHANNELS']) == ['train']\n"
        "path = os.environ['SM_CHANNEL_TRAIN']\n"
        "for epoch in range(2):\n"
        "    print(hashlib.sha256(open(f'{path}_{epoch}', 'rb').read()).hexdigest())\n"
        "print(base)\n"
        "sys.exit(7)\n"
    )
    done = run_exec(
        write_job(tmp_path / "j.yaml", job(stub.url, None, "b/train/")), sys.executable, "-c", script
    )

    *digests, base = done.stdout.split()
    assert digests == [hashlib.sha256(truth).hexdigest()] * 2
    assert done.returncode == 7
    assert not Path(base).exists()


def test_exec_in_a_given_directory_leaves_no_fifo_and_no_trailer(stub: S3Stub, tmp_path: Path) -> None:
    """And it names the channel that the trainer has not read, if that ended well."""
    fill(stub, SIZES, prefix="b/train/")
    fill(stub, [10], prefix="b/eval/")
    path = write_job(tmp_path / "j.yaml", job(stub.url, tmp_path / "ml", "b/train/", "b/eval/"))
    for code in (0, 3):
        done = run_exec(path, "sh", "-c", f"cat $SM_CHANNEL_TRAIN''_0 | wc -c; exit {code}")
        assert (done.stdout.strip(), done.returncode) == ("2570000", code)
        assert leftovers(tmp_path / "ml") == []
        unread = [
            event["channels"] for event in map(json.loads, done.stderr.splitlines()) if "channels" in event
        ]
        assert unread == ([["eval"]] if code == 0 else [])


def test_exec_forwards_signals_and_reports_a_killed_child(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, SIZES, prefix="b/train/")
    path = write_job(tmp_path / "j.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    child = (
        "import signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "print('started', flush=True)\n"
        "print('caught', signal.sigwait([signal.SIGTERM]).name, flush=True)\n"
        "sys.exit(3)\n"
    )
    process = subprocess.Popen(
        [*PENSTOCK, "exec", "-c", path, "--", sys.executable, "-c", child],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "caught SIGTERM\n"
    assert process.returncode == 3
    assert run_exec(path, "sh", "-c", "kill -9 $$").returncode == 128 + 9


def test_ctrl_c_while_the_commands_are_imported_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt\n")
    done = penstock("--version", env=os.environ | {"PYTHONPATH": str(tmp_path)}, cwd=os.getcwd())
    assert (done.returncode, done.stderr) == (Exit.INTERRUPTED, "")


def test_exec_looks_for_its_command_where_the_job_s_environment_says(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, SIZES, prefix="b/train/")
    (tmp_path / "bin").mkdir()
    trainer = tmp_path / "bin/my trainer"
    trainer.write_text("#!/bin/sh\nexit 9\n")
    trainer.chmod(0o755)
    document = job(stub.url, None, "b/train/") | {"Environment": {"PATH": str(trainer.parent)}}
    path = write_job(tmp_path / "j.yaml", document)
    assert run_exec(path, trainer.name).returncode == 9
    stub.listings.clear()
    done = run_exec(path, "sh")
    assert (done.returncode, "sh" in done.stderr) == (127, True)
    assert not stub.listings, "a typing error is not told after an hour of downloads"


def test_exec_passes_options_of_the_trainer_on_and_needs_no_separator(stub: S3Stub, tmp_path: Path) -> None:
    """The first word that is no option of ours begins the trainer's command."""
    fill(stub, SIZES, prefix="b/train/")
    path = write_job(tmp_path / "j.yaml", job(stub.url, None, "b/train/"))
    assert run_exec(path, "echo", "-c", "--help", "--", "x").stdout == "-c --help -- x\n"
    assert penstock("exec", "-c", path, "sh", "-c", "echo $1", "x", "y").stdout == "y\n"


def test_exec_leaves_no_grandchild_that_takes_our_end_for_the_data_s(stub: S3Stub, tmp_path: Path) -> None:
    """Ending only the shell would let its `cat | wc` see an end of file, and print a wrong count."""
    fill(stub, SIZES, prefix="b/train/")
    stub.script(*[fails(403, "AccessDenied")] * 9, key="b/train/0002")  # the next epoch asks, too
    path = write_job(tmp_path / "j.yaml", job(stub.url, None, "b/train/"))
    script = f"cat ${{SM_CHANNEL_TRAIN}}_0 | wc -c > {tmp_path}/count; true"
    command = [*penstock_with("sidecar.commands.execute.GRACE = 0.2"), "exec", "-c", path, "sh", "-c", script]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 3
    assert (tmp_path / "count").read_text() == ""


def cat(stub: S3Stub, *uris: str, **options: Any) -> subprocess.CompletedProcess[Any]:
    return penstock("cat", *uris, "--endpoint-url", stub.url, "--path-style", **{"text": False} | options)


def test_cat_streams_prefixes_and_objects_in_the_order_given(stub: S3Stub) -> None:
    data = fill(stub, SIZES, prefix="b/data/")
    other = fill(stub, [100], prefix="c/x", seed=3)
    done = cat(stub, "s3://c/x0000", "s3://b/data/")
    assert done.stdout == other + data
    assert b"4 objects, 2570100 bytes" in done.stderr


def test_cat_of_an_exact_key_is_that_object(stub: S3Stub) -> None:
    fill(stub, [10], prefix="b/k")
    stub.objects["b/k0000x"] = b"longer name"
    assert cat(stub, "s3://b/k0000").stdout == stub.objects["b/k0000"]
    assert cat(stub, "s3://b/k000").stdout == stub.objects["b/k0000"] + b"longer name"


def test_cat_of_a_folder_with_a_marker_is_its_objects(stub: S3Stub) -> None:
    """The console of S3 makes an empty object `folder/`, which is no data; one with bytes is an object."""
    data = fill(stub, [10, 20], prefix="b/data/")
    stub.objects |= {"b/data/": b"", "b/bare/": b"", "b/data/sub/": b"no marker"}
    assert cat(stub, "s3://b/data/").stdout == data + b"no marker"
    assert cat(stub, "s3://b/data/sub/").stdout == b"no marker"
    done = cat(stub, "s3://b/bare/")
    assert (done.returncode, b"no object matches" in done.stderr) == (4, True), done.stderr


def test_cat_of_several_tars_warns_and_its_examples_join_them(stub: S3Stub, tmp_path: Path) -> None:
    """`tar -t` lists the members of the first one and succeeds, so nothing else says that data is missing."""
    for name in "ab":
        path = tmp_path / name
        path.write_text(name)
        packed = subprocess.run(["tar", "-c", "-C", tmp_path, name], capture_output=True, check=True)
        stub.objects[f"b/two/{name}.TAR"] = stub.objects[f"b/text/{name}.txt"] = packed.stdout
    cases = {"two/": 1, "two/ --join tar": 0, "two/a": 0, "text/": 0, "two/ --include '*a.*'": 0}
    for uri, warnings in cases.items():
        command = (
            f"set -o pipefail; {shlex.join(PENSTOCK)} cat s3://b/{uri} --endpoint-url {stub.url} --path-style"
        )
        for program in ("tar -t", "head -c 1"):  # the reader may leave at the first end mark
            done = subprocess.run(
                ["bash", "-c", f"{command} | {program}"], capture_output=True, text=True, check=False
            )
            warned = done.stderr.count("objects carry end marks")
            assert warned == warnings, (uri, program, done.stderr)
            if warned:
                assert "--join tar" in done.stderr
            elif uri == "two/ --join tar" and program == "tar -t":
                assert (done.stdout.split(), done.returncode) == (["a", "b"], 0)
    assert "cat s3://bucket/prefix/ --join tar | tar -t" in penstock("cat", "--help").stdout


def test_cat_into_a_file_and_a_pipe_under_faults(stub: S3Stub, tmp_path: Path) -> None:
    data = fill(stub, [6_000_000], prefix="b/data/")
    stub.script(cut_after(500_000), fails(503, "SlowDown"), fails(500, "InternalError"))
    with open(tmp_path / "out", "wb") as out:
        done = cat(stub, "s3://b/data/", "-q", "--part-size", "1MiB", capture_output=False, stdout=out)
    assert done.returncode == 0
    assert (tmp_path / "out").read_bytes() == data
    stub.script(cut_after(500_000), fails(503, "SlowDown"))
    assert cat(stub, "s3://b/data/", "-q").stdout == data


def test_cat_whose_reader_leaves_ends_as_cat_does(stub: S3Stub) -> None:
    fill(stub, [30_000_000], prefix="b/data/")
    command = f"{' '.join(PENSTOCK)} cat s3://b/data/ --endpoint-url {stub.url} --path-style | head -c 5"
    script = f"{command} | wc -c; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["5", "141"]
    assert done.stderr == ""


def test_cat_does_not_make_the_shell_s_pipe_non_blocking(stub: S3Stub) -> None:
    """Others may hold the same open file; only our own view of it is changed."""
    fill(stub, [100], prefix="b/data/")
    read_end, write_end = os.pipe()
    try:
        cat(stub, "s3://b/data/", capture_output=False, stdout=write_end, stderr=subprocess.DEVNULL)
        assert os.get_blocking(write_end)
    finally:
        os.close(read_end)
        os.close(write_end)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["s3://b/none/"], 4, "no object matches"),
        (["s3://none/x"], 4, "no such bucket"),
        (["b/data"], 2, "write s3://BUCKET/PREFIX"),
        (["s3://b/data/", "--memory-budget", "1MiB"], 2, "--part-size"),
        (["s3://b/data/", "--memory-budget", "much"], 2, "is not a size"),
        (["s3://b/data/", "--anonymous", "--profile", "x"], 2, "contradict"),
        (["s3://b/data/", "--anonymous", "--requester-pays"], 2, "--requester-pays contradict"),
        (["s3://b/data/", "--profile", "nobody"], 2, "nobody"),
        (["s3://b/data/", "--profile", ""], 2, "--profile must not be empty"),
        (["s3://b/data/", "--region", "a b"], 2, "--region 'a b' is not allowed; use lower-case"),
        (
            ["s3://b/data/", "--ca-bundle", "ca"],
            2,
            "--ca-bundle has no meaning for an http:// --endpoint-url",
        ),
        (["s3://b/data/", "--no-such-option"], 2, "No such option"),
    ],
)
def test_cat_mistakes(stub: S3Stub, arguments: list[str], code: int, words: str) -> None:
    fill(stub, [100], prefix="b/data/")
    done = cat(stub, *arguments)
    assert done.returncode == code
    assert words in done.stderr.decode()
    assert b"Traceback" not in done.stderr
    assert done.stdout == b""


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://name:secret-word@h", "--endpoint-url must be http:// or https://, a host"),
        ("http://h:0", "--endpoint-url the port must be a number"),
    ],
)
def test_cat_refuses_an_endpoint_without_showing_it(url: str, words: str) -> None:
    done = penstock("cat", "s3://b/data/", "--endpoint-url", url)
    assert done.returncode == 2
    assert words in done.stderr
    assert url not in done.stderr


def test_cat_writes_text_to_a_terminal_and_refuses_anything_else(stub: S3Stub) -> None:
    stub.objects |= {
        "b/text": "naïve\n".encode() * 10_000,
        "b/binary": bytes(range(256)),
        "b/escape": b"\x1b[31m",
    }
    options = ["--endpoint-url", stub.url, "--path-style"]
    with terminal([*PENSTOCK, "cat", "s3://b/text", *options], columns=200, rows=4) as window:
        assert window.end() == 0
        assert window.screen.written.count("naïve\r\n") == 10_000
    for key in ("binary", "escape"):
        with terminal([*PENSTOCK, "cat", f"s3://b/{key}", *options], columns=200, rows=4) as window:
            assert window.end() == 2
            assert window.screen.text.startswith("penstock: standard output is a terminal")
            assert "| COMMAND" in window.screen.text
            assert "\x1b" not in window.screen.written
    figures = json.loads(penstock("cat", "s3://b/binary", *options, "--json", text=False).stderr)
    assert (figures["objects"], figures["bytes"]) == (1, 256)


def test_plan_shows_what_would_be_streamed(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, SIZES, prefix="b/train/")
    path = write_job(tmp_path / "j.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    shown = penstock("plan", "-c", path).stdout
    found = json.loads(penstock("plan", "-c", path, "--json").stdout)["channels"]["train"]
    assert (found["objects"], found["bytes"], found["parts"]) == (3, 2_570_000, 4)
    assert found["digest"] in shown
    assert [key for _, key, _, _ in found["keys"]] == ["train/0000", "train/0001", "train/0002"]
    assert not (tmp_path / "ml").exists()


def test_a_prefix_is_a_plain_string(stub: S3Stub, tmp_path: Path) -> None:
    """No folder is meant: what merely begins alike is streamed too (contract §3.1)."""
    stub.objects |= {"b/train/1": b"a", "b/train-old/x": b"b", "b/eval/train/1": b"c"}
    path = write_job(tmp_path / "j.yaml", job(stub.url, tmp_path / "ml", "b/train"))
    found = json.loads(penstock("plan", "-c", path, "--json").stdout)["channels"]["train"]
    assert [key for _, key, _, _ in found["keys"]] == ["train-old/x", "train/1"]


def test_bare_and_quoted_etags_make_one_plan(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, SIZES, prefix="b/train/")
    path = write_job(tmp_path / "j.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    quoted = penstock("plan", "-c", path).stdout
    stub.bare_listing_etags = True
    assert penstock("plan", "-c", path).stdout == quoted


@pytest.mark.parametrize(
    ("files", "options", "words"),
    [
        (1024, {}, "splice: plain HTTP to pipes"),
        (1024, {"MemoryBudget": "1MiB", "PartSize": "64KiB"}, "raise MemoryBudget"),
        (1024, {"Transport": "aiobotocore"}, "aiobotocore: asked for"),
    ],
)
def test_plan_says_which_transport_and_why(
    stub: S3Stub, tmp_path: Path, files: int, options: dict[str, str], words: str
) -> None:
    fill(stub, SIZES, prefix="b/train/")
    path = write_job(tmp_path / "j.yaml", job(stub.url, tmp_path / "ml", "b/train/", **options))
    limited = ["bash", "-c", f'ulimit -n {files}; exec "$@"', "-", *PENSTOCK, "plan", "-c", path]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert words in done.stdout + done.stderr


def test_a_transport_that_cannot_be_is_an_error(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [10], prefix="b/data/")
    with open(tmp_path / "out", "wb") as out:
        done = cat(stub, "s3://b/data/", "--transport", "splice", capture_output=False, stdout=out, stderr=-1)
    assert done.returncode == 2
    assert b"the output is not a pipe" in done.stderr


VALID = """\
InputDataConfig:
- ChannelName: train
  DataSource: {S3DataSource: {S3DataType: S3Prefix, S3Uri: "s3://b/train/"}}
- ChannelName: TRAIN
  InputMode: File
  DataSource: {S3DataSource: {S3DataType: S3Prefix, S3Uri: "s3://b/train/"}}
"""


def test_check_says_whether_a_job_file_is_valid_and_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no endpoint at all, and no credentials."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    path = tmp_path / "job.yaml"
    path.write_text(VALID)
    done = penstock("check", "-c", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    warning, line = done.stdout.splitlines()
    assert warning.startswith(f"{path}: warning: channels whose names differ only in case")
    assert line == f"{path}: no mistakes; channels: train (Pipe), TRAIN (File)"
    document = json.loads(penstock("check", "-c", str(path), "--json").stdout)
    assert (document["valid"], document["channels"]) == (True, {"train": "Pipe", "TRAIN": "File"})

    path.write_text(VALID + "Penstock:\n  memory_budget: 1GiB\n")
    done = penstock("check", "-c", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[1].startswith(f"{path}:8: Penstock.memory_budget: ")
    done = penstock("check", "-c", str(path), "--json")
    assert (done.returncode, done.stderr) == (2, "")
    (mistake,) = json.loads(done.stdout)["mistakes"]
    assert (mistake["line"], mistake["key"]) == (8, "Penstock.memory_budget")
    assert "did you mean MemoryBudget?" in mistake["message"]
    done = penstock("check", "-c", str(tmp_path / "none.yaml"), "--json")
    assert "No such file" in json.loads(done.stdout)["mistakes"][0]["message"]


def test_the_job_file_is_that_of_the_option_or_the_variable_or_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {}
    for name in ("penstock", "variable", "option"):
        names[name] = tmp_path / f"{name}.yaml"
        names[name].write_text(VALID.replace("train", name))
    monkeypatch.chdir(tmp_path)
    assert "channels: penstock (Pipe)" in penstock("check").stdout
    monkeypatch.setenv("PENSTOCK_CONFIG", str(names["variable"]))
    assert "channels: variable (Pipe)" in penstock("check").stdout
    assert "channels: option (Pipe)" in penstock("check", "-c", str(names["option"])).stdout
    monkeypatch.setenv("PENSTOCK_CONFIG", "")
    names["penstock"].unlink()
    for command in ("run", "plan", "doctor", "check"):
        done = penstock(command)
        assert done.returncode == 2
        assert "write -c FILE, set PENSTOCK_CONFIG, or name the file penstock.yaml" in done.stderr


def test_version_and_help() -> None:
    assert penstock("--version").stdout.startswith("penstock, version ")
    shown = penstock("--help").stdout
    assert "…" not in shown
    assert "..." not in shown.replace("[ARGS]...", "")
    for name, command in cli.commands.items():
        assert summary(command).endswith("."), "a whole sentence"
        assert summary(command) in " ".join(shown.split())
        with cli.make_context("penstock", [name, "--help"], resilient_parsing=True) as context:
            assert "\nExamples:\n" in command.get_help(context)
        for option in command.params:
            assert not isinstance(option, click.Option) or option.help, (command.name, option.name)
    for code in Exit:
        assert f"\n  {int(code)} " in shown
    assert "PENSTOCK_CONFIG" in shown
    assert "NO_COLOR" in shown


@pytest.mark.parametrize("command", list(cli.commands))
def test_the_examples_of_the_help_are_understood(command: str) -> None:
    shown = cli.commands[command]
    assert isinstance(shown, Command)
    for line in shown.examples:
        words = shlex.split(re.split(r" [|>] |; ", line.removeprefix("until "))[0])
        assert words[:2] == ["penstock", command]
        with cli.make_context("penstock", words[1:], resilient_parsing=True) as context:
            name, found, rest = cli.resolve_command(context, words[1:])
            assert found is not None
            found.make_context(name, rest, parent=context).close()


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_and_options(shell: str) -> None:
    """By the line of the help; what the shell then asks is asked here as it does."""
    done = penstock(env={**os.environ, "_PENSTOCK_COMPLETE": f"{shell}_source"})
    assert f"_PENSTOCK_COMPLETE={shell}_complete" in done.stdout
    asked = {
        "_PENSTOCK_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": "penstock doctor --j",
        "COMP_CWORD": "2",
    }
    assert (
        "--json"
        in penstock(env={**os.environ, **asked, **({"COMP_CWORD": "--j"} if shell == "fish" else {})}).stdout
    )


def test_the_line_of_the_help_is_one_that_bash_takes(tmp_path: Path) -> None:
    (tmp_path / "penstock").write_text(f'#!/bin/sh\nexec {shlex.join(PENSTOCK)} "$@"\n')
    (tmp_path / "penstock").chmod(0o755)
    script = f"{completion('bash')}\ncomplete -p penstock"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(" penstock\n")


def test_a_job_file_without_its_option_is_named(tmp_path: Path) -> None:
    for command in (["run"], ["plan"], ["check"], ["exec"]):
        done = penstock(*command, "job.yaml", *["true"] * ("exec" in command))
        assert done.returncode == 2
        assert "the job file is an option: write -c job.yaml" in done.stderr


def test_a_misspelled_option_is_named_and_not_the_job_file() -> None:
    done = penstock("plan", "--confg", "job.yaml")
    assert done.returncode == 2
    assert "No such option '--confg'" in done.stderr
    assert "--config" in done.stderr.replace("--confg", "")
    assert "the job file is an option" not in done.stderr
    done = penstock("exec", "-c", "absent.yaml", "job.yaml", "true")
    assert "absent.yaml" in done.stderr


@pytest.mark.parametrize("variable", [False, True])
def test_an_error_names_what_the_user_has_written(tmp_path: Path, variable: bool) -> None:
    """An option, a variable or a key of the job file, each with the same endpoint, which is down."""
    url, environment = (
        "http://127.0.0.1:1",
        {name: os.environ[name] for name in os.environ if "AWS" not in name},
    )
    environment |= {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "us-east-1"}
    if variable:
        environment["AWS_ENDPOINT_URL"] = url
    given = [] if variable else ["--endpoint-url", url]
    done = penstock("cat", "s3://b/k", *given, "--give-up-after", "0.1", env=environment)
    assert done.returncode == 5
    name = "AWS_ENDPOINT_URL" if variable else "--endpoint-url"
    assert f"and {name} or AWS_REGION right" in done.stderr
    assert "Endpoint.Url" not in done.stderr
    document = job(url, tmp_path / "ml", "b/train/", GiveUpAfter=0.1)
    if variable:
        del document["Penstock"]["Endpoint"]["Url"]
    done = penstock("run", "-c", write_job(tmp_path / "job.yaml", document), env=environment)
    name = "AWS_ENDPOINT_URL" if variable else "Penstock.Endpoint.Url"
    assert f"and {name} or AWS_REGION right" in done.stderr


@pytest.mark.parametrize("services", [False, True])
def test_an_error_names_the_setting_of_a_profile(tmp_path: Path, services: bool) -> None:
    url = "endpoint_url = http://127.0.0.1:1"
    own = f"services = s\n[services s]\ns3 =\n  {url}" if services else url
    (tmp_path / "config").write_text(f"[profile lab]\nregion = us-east-1\n{own}\n")
    environment = {name: os.environ[name] for name in os.environ if "AWS" not in name}
    environment |= {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_PROFILE": "lab"}
    environment["AWS_CONFIG_FILE"] = str(tmp_path / "config")
    document = job("", tmp_path / "ml", "b/train/", GiveUpAfter=0.1)
    del document["Penstock"]["Endpoint"]
    for command in (["cat", "s3://b/k"], ["run", "-c", write_job(tmp_path / "job.yaml", document)]):
        done = penstock(*command, *["--give-up-after", "0.1"] * ("cat" in command), env=environment)
        assert "check that the endpoint is up, and endpoint_url of profile lab or" in done.stderr


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("try Endpoint.PathStyle: true; MemoryBudget", "try --path-style; --memory-budget"),
        ("set Penstock.Endpoint.IfMatch: omit", "set --if-match omit"),
        ("set Penstock.Endpoint.Region: eu-west-3, and", "set AWS_REGION=eu-west-3, and"),
        ("set Penstock.Endpoint.PathStyle: false, which", "set --no-path-style, which"),
        ("check S3Uri: Other.Url", "check S3URI: Other.Url"),
    ],
)
def test_keys_are_spelled_as_the_user_knows_them(
    monkeypatch: pytest.MonkeyPatch, text: str, own: str
) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    options = ("PathStyle", "--path-style"), ("IfMatch", "--if-match"), ("Region", "--region")
    keys = {f"Endpoint.{key}": option for key, option in options}
    wording.settings_came_from((), {"S3Uri": "S3URI", "MemoryBudget": "--memory-budget"} | keys)
    try:
        assert wording.spelled(text) == own
    finally:
        wording.settings_came_from(wording.VARIABLES)
    assert wording.spelled(text) == text
