"""What the training container finds: config files, environment, locks (contract §2)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.config.hosts import Hosts, identify
from sidecar.config.job import Job
from sidecar.job.environment import resource_config, trainer_environment, write_config_files
from sidecar.job.layout import (
    Layout,
    platform_resource_config,
)
from sidecar.job.reader_state import set_reader_state
from streamer.errors import ConfigError, SinkError
from streamer.trailer import Trailer, write_trailer
from tests.kit.users import NOBODY, root

SOURCE = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://b/p"}}
JOB = Job.model_validate(
    {
        "TrainingJobName": "my-job",
        "HyperParameters": {"lr": "0.1", "name": "x", "none": "null", "list": "[1, 2]"},
        "Environment": {"MINE": "1", "SM_NUM_CPUS": "99"},
        "InputDataConfig": [
            {"ChannelName": "train-a", "ContentType": "application/x-recordio", "DataSource": SOURCE},
            {"ChannelName": "eval", "DataSource": SOURCE},
        ],
    }
)
ONE = Hosts(0, ("algo-1",))


def test_environment_is_the_toolkit_s() -> None:
    found = trainer_environment(Layout("/opt/ml"), JOB, ONE)
    assert found["SM_CHANNELS"] == '["eval","train-a"]'
    assert found["SM_CHANNEL_TRAIN-A"] == "/opt/ml/input/data/train-a"
    assert found["SM_HPS"] == '{"list":[1,2],"lr":0.1,"name":"x","none":null}'
    assert (found["SM_HP_LR"], found["SM_HP_NAME"], found["SM_HP_NONE"]) == ("0.1", "x", "")
    assert found["SM_HOSTS"] == '["algo-1"]'
    assert found["SM_CURRENT_HOST"] == "algo-1"
    assert found["SM_MODEL_DIR"] == "/opt/ml/model"
    assert found["TRAINING_JOB_NAME"] == "my-job"
    assert (found["MINE"], found["SM_NUM_CPUS"]) == ("1", "99"), "the request's own variables win"
    assert json.loads(found["SM_INPUT_DATA_CONFIG"])["eval"]["TrainingInputMode"] == "Pipe"


def test_files_are_byte_for_byte_what_the_platform_prints(tmp_path: Path) -> None:
    """resourceconfig.json against the print of a real job (contract §2.2); nothing for a null ContentType."""
    layout = Layout(str(tmp_path))
    layout.create()
    job = JOB.model_validate(
        {
            "HyperParameters": {"num_round": "128", "eta": "0.001"},
            "ResourceConfig": {"InstanceType": "ml.c5.xlarge", "InstanceCount": 1},
            "InputDataConfig": [
                {
                    "ChannelName": "train",
                    "ContentType": "text/csv",
                    "DataSource": SOURCE,
                    "InputMode": "File",
                },
                {"ChannelName": "eval", "DataSource": SOURCE},
            ],
        }
    )
    write_config_files(layout, job, identify(job, environment={}))
    config = tmp_path / "input" / "config"
    written = {f"{name}.json" for name in ("hyperparameters", "inputdataconfig", "resourceconfig")}
    assert set(os.listdir(config)) == written | {".resourceconfig.json.penstock", "penstock.env"}
    assert (config / "resourceconfig.json").read_bytes() == (
        b'{"current_host":"algo-1","current_instance_type":"ml.c5.xlarge",'
        b'"current_group_name":"homogeneousCluster","hosts":["algo-1"],"instance_groups":'
        b'[{"instance_group_name":"homogeneousCluster","instance_type":"ml.c5.xlarge","hosts":["algo-1"]}],'
        b'"network_interface_name":"eth0"}'
    )
    assert (config / "hyperparameters.json").read_bytes() == b'{"num_round":"128","eta":"0.001"}'
    assert (config / "inputdataconfig.json").read_bytes() == (
        b'{"train":{"ContentType":"text/csv","TrainingInputMode":"File",'
        b'"S3DistributionType":"FullyReplicated","RecordWrapperType":"None"},'
        b'"eval":{"TrainingInputMode":"Pipe","S3DistributionType":"FullyReplicated","RecordWrapperType":"None"}}'
    )


def test_readers_get_the_format_of_a_channel_s_records(tmp_path: Path) -> None:
    """Every rank FIFO has it; a channel without `Records` has SageMaker's keys alone."""
    layout = Layout(str(tmp_path))
    layout.create()
    extras = {"Records": {"Format": "fixed:8"}, "Ranks": {"Count": 2, "GlobalBatch": 2}}
    channels = [
        {"ChannelName": "train", "DataSource": SOURCE, "Penstock": extras},
        {"ChannelName": "eval", "DataSource": SOURCE, "Penstock": {"Records": {"Format": "LINES"}}},
        {"ChannelName": "other", "DataSource": SOURCE},
    ]
    job = Job.model_validate({"InputDataConfig": channels})
    write_config_files(layout, job, identify(job, environment={}))
    document = json.loads((tmp_path / "input" / "config" / "inputdataconfig.json").read_bytes())
    formats = {name: entry.pop("RecordFormat", None) for name, entry in document.items()}
    assert formats == {"train-0": "fixed:8", "train-1": "fixed:8", "eval": "lines", "other": None}
    assert {frozenset(entry) for entry in document.values()} == {
        frozenset({"TrainingInputMode", "S3DistributionType", "RecordWrapperType"})
    }


def test_our_own_file_is_no_evidence_and_the_platform_s_is_kept(tmp_path: Path) -> None:
    layout = Layout(str(tmp_path))
    layout.create()
    path = tmp_path / "input" / "config" / "resourceconfig.json"
    assert platform_resource_config(layout) is None
    write_config_files(layout, JOB, identify(JOB, flags=(1, 2), environment={}))
    assert json.loads(path.read_text())["current_host"] == "algo-2"
    assert platform_resource_config(layout) is None
    theirs = '{"current_host": "b", "hosts": ["a", "b"], "topology": {}}'
    path.write_text(theirs)
    found = identify(JOB, environment={}, document=platform_resource_config(layout))
    assert (found.index, found.current) == (1, "b")
    write_config_files(layout, JOB, found)
    assert path.read_text() == theirs
    assert trainer_environment(layout, JOB, found)["SM_HOSTS"] == '["a","b"]'
    path.write_text("[")
    with pytest.raises(ConfigError, match="not JSON"):
        platform_resource_config(layout)


def test_a_cluster_of_two_groups() -> None:
    groups = [
        {"InstanceGroupName": "gpu", "InstanceType": "ml.g5.xlarge", "InstanceCount": 2},
        {"InstanceGroupName": "cpu", "InstanceType": "ml.c5.xlarge", "InstanceCount": 1},
    ]
    job = JOB.model_validate(
        {
            "ResourceConfig": {"InstanceGroups": groups},
            "InputDataConfig": [{"ChannelName": "train", "DataSource": SOURCE}],
        }
    )
    hosts = identify(job, flags=(2, None), environment={})
    assert resource_config(hosts) == {
        "current_host": "algo-3",
        "current_instance_type": "ml.c5.xlarge",
        "current_group_name": "cpu",
        "hosts": ["algo-1", "algo-2", "algo-3"],
        "instance_groups": [
            {"instance_group_name": "gpu", "instance_type": "ml.g5.xlarge", "hosts": ["algo-1", "algo-2"]},
            {"instance_group_name": "cpu", "instance_type": "ml.c5.xlarge", "hosts": ["algo-3"]},
        ],
        "network_interface_name": "eth0",
    }
    found = trainer_environment(Layout("/opt/ml"), job, hosts)
    assert found["SM_IS_HETERO"] == "true"
    assert found["SM_CURRENT_INSTANCE_GROUP"] == "cpu"
    assert found["SM_CURRENT_INSTANCE_GROUP_HOSTS"] == '["algo-3"]'
    assert found["SM_INSTANCE_GROUPS"] == '["gpu","cpu"]'


def test_the_toolkit_s_own_hyperparameters_are_not_the_script_s() -> None:
    job = JOB.model_copy(
        update={
            "hyper_parameters": {
                "lr": "0.1",
                "e": "2",
                "flag": "true",
                "sagemaker_program": '"train.py"',
                "sagemaker_mpi_enabled": "true",
                "_tuning_objective_metric": "loss",
            }
        }
    )
    found = trainer_environment(Layout("/opt/ml"), job, ONE)
    assert found["SM_HPS"] == '{"e":2,"flag":true,"lr":0.1}'
    assert found["SM_USER_ARGS"] == '["-e","2","--flag","True","--lr","0.1"]'
    assert (found["SM_USER_ENTRY_POINT"], found["SM_MODULE_NAME"]) == ("train.py", "train")
    assert found["SM_FRAMEWORK_PARAMS"] == '{"sagemaker_mpi_enabled":true}'
    assert found["SM_DISTRIBUTION_INSTANCE_GROUPS"] == '["homogeneousCluster"]'
    everything = json.loads(found["SM_TRAINING_ENV"])
    assert everything["hyperparameters"] == {"e": 2, "flag": True, "lr": 0.1}
    assert everything["channel_input_dirs"]["eval"] == "/opt/ml/input/data/eval"
    assert (everything["job_name"], everything["is_master"]) == ("my-job", True)
    assert everything["resource_config"] == json.loads(found["SM_RESOURCE_CONFIG"])


def test_the_environment_file_is_shell(tmp_path: Path) -> None:
    layout = Layout(str(tmp_path))
    layout.create()
    job = JOB.model_copy(update={"hyper_parameters": {"text": "it's $HOME\n`x`"}})
    write_config_files(layout, job, ONE)
    done = subprocess.run(
        ["sh", "-c", '. "$1"; env -0', "sh", os.path.join(layout.config, "penstock.env")],
        capture_output=True, text=True, check=True, env={},
    )  # fmt: skip
    found = dict(line.split("=", 1) for line in done.stdout.split("\0") if line)
    due = trainer_environment(layout, job, ONE)
    assert found["SM_HP_TEXT"] == "it's $HOME\n`x`"
    assert {name: due[name] for name in found.keys() & due.keys()} == {
        name: found[name] for name in found.keys() & due.keys()
    }
    missing = due.keys() - found.keys()
    assert missing == {"MINE", "SM_CHANNEL_TRAIN-A", "SM_NUM_CPUS", "SM_NUM_GPUS", "SM_TRAINING_ENV"}


def test_one_sidecar_per_directory(tmp_path: Path) -> None:
    layout = Layout(str(tmp_path))
    layout.create()
    with layout.locked(), pytest.raises(SinkError, match="another sidecar serves"), layout.locked():
        pass
    with layout.locked():
        pass


def test_a_lock_that_was_removed_under_a_sidecar_is_not_taken_again(tmp_path: Path) -> None:
    """Two sidecars would write into one FIFO, and both would publish a proof."""
    layout = Layout(str(tmp_path))
    layout.create()
    first = Trailer(channel="train", epoch=0, state="open", bytes_total=10)
    with layout.locked():
        write_trailer(layout.data, first)
        os.unlink(os.path.join(layout.data, ".penstock.lock"))
        with (
            pytest.raises(SinkError, match="end that sidecar if it runs, then remove .train_0"),
            layout.locked(),
        ):
            pass
    write_trailer(layout.data, replace(first, state="complete", bytes_delivered=10))
    with layout.locked():  # of an epoch that has ended
        pass


def test_a_lock_that_is_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    layout = Layout(str(tmp_path))
    layout.create()
    (tmp_path / "victim").write_text("kept")
    os.symlink(tmp_path / "victim", os.path.join(layout.data, ".penstock.lock"))
    with pytest.raises(SinkError), layout.locked():
        pass
    assert (tmp_path / "victim").read_text() == "kept"


def test_directories_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SinkError, match="Penstock.BaseDirectory"):
        Layout(str(tmp_path / "file")).create()


def test_readers_of_an_earlier_run_start_again_at_epoch_0(tmp_path: Path) -> None:
    state = tmp_path / "pipe_state" / ".eval-pipe_mode-state"
    state.parent.mkdir()
    state.write_text("7")
    other = tmp_path / "pipe_state" / ".other-pipe_mode-state"
    other.write_text("3")
    set_reader_state(Layout(str(tmp_path)), {"train": 2, "eval": 0})
    assert not state.exists()
    assert other.exists()
    assert (tmp_path / "pipe_state" / ".train-pipe_mode-state").read_text() == "2"


def test_readers_of_rank_fifos_start_again_at_epoch_0_too(tmp_path: Path) -> None:
    states = [tmp_path / "pipe_state" / f".{name}-pipe_mode-state" for name in ("eval-0", "eval-1", "eval-2")]
    states[0].parent.mkdir()
    for state in states:
        state.write_text("7")
    set_reader_state(Layout(str(tmp_path)), dict.fromkeys(("eval-0", "eval-1"), 0))
    assert [state.exists() for state in states] == [False, False, True]


@root
def test_counters_that_another_user_has_made_are_set_aside() -> None:
    """A trainer that was root has made the directory; the sidecar's user may write the base directory."""
    with tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o777)
        made = Path(base, "pipe_state")
        made.mkdir()
        (made / ".train-pipe_mode-state").write_text("7")
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                for _ in range(2):
                    set_reader_state(Layout(base), {"train": 0, "eval": 2}, fifo_mode=0o644)
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert [path.name for path in made.iterdir()] == [".eval-pipe_mode-state"]
        assert (made.stat().st_uid, made.stat().st_mode & 0o777) == (NOBODY, 0o777)
        (aside,) = Path(base).glob(".pipe_state.*")
        assert (aside / ".train-pipe_mode-state").read_text() == "7"
