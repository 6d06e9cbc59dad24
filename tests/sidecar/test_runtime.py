"""What the training container finds: config files, environment, locks (contract §2)."""

from __future__ import annotations

import json
import os

import pytest

from sidecar.config import Job
from sidecar.runtime import Layout, reset_reader_state, trainer_environment, write_config_files
from streamer.errors import SinkError

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


def test_config_files(tmp_path):
    layout = Layout(str(tmp_path))
    layout.create()
    write_config_files(layout, JOB)
    config = tmp_path / "input" / "config"
    assert json.loads((config / "inputdataconfig.json").read_text()) == {
        "train-a": {
            "ContentType": "application/x-recordio",
            "TrainingInputMode": "Pipe",
            "S3DistributionType": "FullyReplicated",
            "RecordWrapperType": "None",
        },
        "eval": {
            "TrainingInputMode": "Pipe",
            "S3DistributionType": "FullyReplicated",
            "RecordWrapperType": "None",
        },
    }
    assert json.loads((config / "resourceconfig.json").read_text())["hosts"] == ["algo-1"]
    assert json.loads((config / "hyperparameters.json").read_text())["lr"] == "0.1"
    assert sorted(os.listdir(config)) == [
        "hyperparameters.json",
        "inputdataconfig.json",
        "resourceconfig.json",
    ]


def test_environment_is_the_toolkit_s():
    found = trainer_environment(Layout("/opt/ml"), JOB)
    assert found["SM_CHANNELS"] == '["eval","train-a"]'
    assert found["SM_CHANNEL_TRAIN-A"] == "/opt/ml/input/data/train-a"
    assert found["SM_HPS"] == '{"list":[1,2],"lr":0.1,"name":"x","none":null}'
    assert (found["SM_HP_LR"], found["SM_HP_NAME"], found["SM_HP_NONE"]) == ("0.1", "x", "")
    assert found["SM_HOSTS"] == '["algo-1"]'
    assert found["SM_CURRENT_HOST"] == "algo-1"
    assert found["SM_MODEL_DIR"] == "/opt/ml/model"
    assert found["TRAINING_JOB_NAME"] == "my-job"
    assert json.loads(found["SM_INPUT_DATA_CONFIG"])["eval"]["TrainingInputMode"] == "Pipe"


def test_the_request_s_environment_wins():
    found = trainer_environment(Layout("/opt/ml"), JOB)
    assert (found["MINE"], found["SM_NUM_CPUS"]) == ("1", "99")


def test_one_sidecar_per_directory(tmp_path):
    layout = Layout(str(tmp_path))
    layout.create()
    with layout.locked(), pytest.raises(SinkError, match="another penstock serves"), layout.locked():
        pass
    with layout.locked():
        pass


def test_a_lock_that_is_a_symbolic_link_is_refused(tmp_path):
    layout = Layout(str(tmp_path))
    layout.create()
    (tmp_path / "victim").write_text("kept")
    os.symlink(tmp_path / "victim", os.path.join(layout.data, ".penstock.lock"))
    with pytest.raises(SinkError), layout.locked():
        pass
    assert (tmp_path / "victim").read_text() == "kept"


def test_directories_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SinkError, match="Penstock.BaseDirectory"):
        Layout(str(tmp_path / "file")).create()


def test_readers_of_an_earlier_run_start_again_at_epoch_0(tmp_path):
    state = tmp_path / "pipe_state" / ".eval-pipe_mode-state"
    state.parent.mkdir()
    state.write_text("7")
    other = tmp_path / "pipe_state" / ".other-pipe_mode-state"
    other.write_text("3")
    reset_reader_state(Layout(str(tmp_path)), JOB)
    assert not state.exists()
    assert other.exists()
