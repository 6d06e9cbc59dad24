"""SageMaker's own documents as job files, and our lists of keys against the API's public model."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import yaml

from sidecar.config.job import Job, load_job
from sidecar.config.outputs import CheckpointConfig, OutputDataConfig
from sidecar.config.request import (
    AlgorithmSpecification,
    ChannelConfig,
    InstanceGroup,
    ResourceConfig,
    ShuffleConfig,
)
from sidecar.config.sources import DataSource, S3DataSource

REQUEST = {
    "TrainingJobName": "ranker-2024-05-01-10-00-00-123",
    "HyperParameters": {"sagemaker_program": '"train.py"', "epochs": "3"},
    "AlgorithmSpecification": {
        "TrainingImage": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/ranker:1",
        "TrainingInputMode": "Pipe",
        "EnableSageMakerMetricsTimeSeries": True,
        "MetricDefinitions": [{"Name": "loss", "Regex": "loss=([0-9.]+)"}],
    },
    "RoleArn": "arn:aws:iam::123456789012:role/training",
    "InputDataConfig": [
        {
            "ChannelName": "train",
            "DataSource": {
                "S3DataSource": {
                    "S3DataType": "S3Prefix",
                    "S3Uri": "s3://my-bucket/train/",
                    "S3DataDistributionType": "FullyReplicated",
                    "AttributeNames": [],
                    "InstanceGroupNames": [],
                }
            },
            "ContentType": "application/x-recordio",
            "CompressionType": "None",
            "RecordWrapperType": "None",
            "InputMode": "Pipe",
        },
        {
            "ChannelName": "vocabulary",
            "DataSource": {
                "S3DataSource": {
                    "S3DataType": "S3Prefix",
                    "S3Uri": "s3://my-bucket/vocabulary/",
                    "S3DataDistributionType": "FullyReplicated",
                }
            },
            "InputMode": "File",
        },
    ],
    "OutputDataConfig": {"S3OutputPath": "s3://my-bucket/out", "KmsKeyId": ""},
    "ResourceConfig": {
        "InstanceType": "ml.p4d.24xlarge",
        "InstanceCount": 1,
        "VolumeSizeInGB": 100,
        "KeepAlivePeriodInSeconds": 600,
    },
    "VpcConfig": {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1"]},
    "StoppingCondition": {"MaxRuntimeInSeconds": 86400},
    "Tags": [{"Key": "team", "Value": "search"}],
    "EnableNetworkIsolation": False,
    "EnableInterContainerTrafficEncryption": False,
    "EnableManagedSpotTraining": False,
    "CheckpointConfig": {"S3Uri": "s3://my-bucket/checkpoints", "LocalPath": "/opt/ml/checkpoints"},
    "DebugHookConfig": {"S3OutputPath": "s3://my-bucket/debug", "CollectionConfigurations": []},
    "ProfilerConfig": {"S3OutputPath": "s3://my-bucket/profile", "DisableProfiler": False},
    "Environment": {"NCCL_DEBUG": "INFO"},
    "RetryStrategy": {"MaximumRetryAttempts": 2},
}

DESCRIBED = copy.deepcopy(REQUEST) | {
    "TrainingJobArn": "arn:aws:sagemaker:eu-west-1:123456789012:training-job/ranker-2024-05-01-10-00-00-123",
    "ModelArtifacts": {"S3ModelArtifacts": "s3://my-bucket/out/ranker/output/model.tar.gz"},
    "TrainingJobStatus": "Completed",
    "SecondaryStatus": "Completed",
    "CreationTime": "2024-05-01T12:00:00.123000+02:00",
    "TrainingStartTime": "2024-05-01T12:03:00.123000+02:00",
    "TrainingEndTime": "2024-05-01T13:00:00.123000+02:00",
    "LastModifiedTime": "2024-05-01T13:00:00.123000+02:00",
    "SecondaryStatusTransitions": [
        {
            "Status": "Starting",
            "StartTime": "2024-05-01T12:00:00.123000+02:00",
            "EndTime": "2024-05-01T12:01:00.123000+02:00",
            "StatusMessage": "Preparing the instances for training",
        }
    ],
    "FinalMetricDataList": [{"MetricName": "loss", "Value": 0.1, "Timestamp": 1714561200.0}],
    "TrainingTimeInSeconds": 3420,
    "BillableTimeInSeconds": 3420,
    "ProfilingStatus": "Enabled",
    "WarmPoolStatus": {"Status": "Available", "ResourceRetainedBillableTimeInSeconds": 10},
}


@pytest.mark.parametrize("dump", [json.dumps, yaml.safe_dump], ids=["json", "yaml"])
@pytest.mark.parametrize("document", [REQUEST, DESCRIBED], ids=["request", "described"])
def test_a_whole_training_job_is_a_job_file(
    tmp_path: Path, document: dict[str, object], dump: Callable[..., str]
) -> None:
    (tmp_path / "job").write_text(dump(document))
    job = load_job(tmp_path / "job")
    assert [channel.channel_name for channel in job.channels("Pipe")] == ["train"]
    assert [channel.channel_name for channel in job.channels("File")] == ["vocabulary"]
    assert job.resource_config.instance_type == "ml.p4d.24xlarge"
    assert job.training_job_arn == document.get("TrainingJobArn")
    assert job.output is not None
    assert str(job.output.target("model", job.training_job_name, None)) == (
        "s3://my-bucket/out/ranker-2024-05-01-10-00-00-123/output/model.tar.gz"
    )
    assert job.checkpoints is not None
    assert str(job.checkpoints.uri) == "s3://my-bucket/checkpoints/"


@pytest.fixture(scope="module")
def api() -> Any:
    return botocore.session.Session().get_service_model("sagemaker")


@pytest.mark.parametrize(
    ("model", "shapes", "ours"),
    [
        (Job, ["CreateTrainingJobRequest", "DescribeTrainingJobResponse"], {"Penstock", "ResponseMetadata"}),
        (AlgorithmSpecification, ["AlgorithmSpecification"], set()),
        (ResourceConfig, ["ResourceConfig"], set()),
        (InstanceGroup, ["InstanceGroup"], set()),
        (ChannelConfig, ["Channel"], {"Penstock"}),
        (DataSource, ["DataSource"], set()),
        (S3DataSource, ["S3DataSource"], set()),
        (ShuffleConfig, ["ShuffleConfig"], set()),
        (OutputDataConfig, ["OutputDataConfig"], set()),
        (CheckpointConfig, ["CheckpointConfig"], set()),
    ],
)
def test_every_key_of_the_api_is_carried_out_or_on_the_list(
    api: Any, model: Any, shapes: list[str], ours: set[str]
) -> None:
    fields = {field.alias for field in model.model_fields.values()}
    assert not fields & model.ignored
    theirs = {key for shape in shapes for key in api.shape_for(shape).members}
    assert fields | model.ignored == theirs | ours
