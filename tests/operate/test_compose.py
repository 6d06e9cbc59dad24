"""The compose file: valid, and its services fit each other, the images and the job file."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib import metadata
from pathlib import PurePosixPath
from typing import Any

import pytest
import yaml
from packaging.utils import canonicalize_name

from examples.demo.dataset import channels
from sidecar.config.job import load_job
from streamer.finish import PROGRAM
from tests.operate.containers import COMPOSE, OURS, SCRIPTS, SERVICES, STAGES, closure, installed, mounts, run
from tests.operate.promql import DASHBOARDS, ROOT


def test_compose_file_is_valid() -> None:
    ran = run(
        os.path.join(SCRIPTS, "check-jsonschema"),
        "--builtin-schema",
        "vendor.compose-spec",
        "docker-compose.yml",
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_mounted_file_exists() -> None:
    for name in SERVICES:
        for source, target in mounts(name):
            assert target.startswith("/")
            if source.startswith("."):
                assert (ROOT / source).exists(), f"{name}: {source}"
            else:
                assert source in COMPOSE["volumes"], f"{name}: {source}"


def test_services_start_in_an_order_that_can_be_met() -> None:
    for name, service in SERVICES.items():
        wanted = service.get("depends_on", {})
        for other in wanted:
            assert other in SERVICES
            condition = wanted[other]["condition"] if isinstance(wanted, dict) else "service_started"
            if condition == "service_healthy":
                target = SERVICES[other].get("build", {}).get("target")
                checked = "healthcheck" in SERVICES[other] or (target and STAGES[target].last("HEALTHCHECK"))
                assert checked, f"{name} waits for the health of {other}, which nothing checks"
    assert SERVICES["sidecar"]["depends_on"]["seed"] == {"condition": "service_completed_successfully"}
    assert SERVICES["trainer"]["depends_on"]["sidecar"] == {"condition": "service_healthy"}


def test_only_storage_seed_and_sidecar_know_the_credentials() -> None:
    def knows(service: Any) -> bool:
        return any(name.startswith(("AWS_", "S3_")) for name in service.get("environment", ()))

    assert {name for name, service in SERVICES.items() if knows(service)} == {"seaweedfs", "seed", "sidecar"}
    assert SERVICES["trainer"]["network_mode"] == "none"
    assert "environment" not in SERVICES["trainer"]
    keys = {
        tuple(SERVICES[name]["environment"][f"AWS_{key}"] for key in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
        for name in ("seaweedfs", "seed", "sidecar")
    }
    assert len(keys) == 1


@pytest.mark.parametrize("name", OURS)
def test_our_services_are_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_ports_are_published_on_the_loopback_interface_only() -> None:
    published = {port for service in SERVICES.values() for port in service.get("ports", ())}
    assert "127.0.0.1:3000:3000" in published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_job_file_is_one_that_the_sidecar_takes_and_that_fits_the_services() -> None:
    source, target = mounts("sidecar")[1]
    assert target == json.loads(STAGES["sidecar"].last("CMD"))[-1]
    job = load_job(ROOT / source)
    endpoint = job.penstock.endpoint
    assert endpoint.url == f"http://seaweedfs:{_flags('seaweedfs')['s3.port']}"
    assert endpoint.url == _flags("seed")["endpoint-url"]
    bucket = SERVICES["seaweedfs"]["environment"]["S3_BUCKET"]
    assert bucket == _flags("seed")["bucket"]
    sources = {one.channel_name: one.source.uri for one in job.input_data_config}
    assert {name: (uri.bucket, uri.key) for name, uri in sources.items()} == {
        "train": (bucket, "train/"),
        "eval": (bucket, "eval/"),
    }
    seed = _flags("seed")
    made = channels(megabytes=float(seed["megabytes"]), objects=int(seed["objects"]), seed=int(seed["seed"]))
    records = {f"{channel.name}-records": str(channel.records) for channel in made}
    assert job.hyper_parameters == {"classes": "10", **records}
    assert {channel.name: PurePosixPath(channel.key(0)).parent.name for channel in made} == {
        "train": "train",
        "eval": "eval",
    }
    # Another container scrapes it, and another one reads: not the loopback interface, and the volume's base.
    assert job.penstock.admin.host == "0.0.0.0"
    assert SERVICES["sidecar"]["ports"] == [f"127.0.0.1:{job.penstock.admin.port}:{job.penstock.admin.port}"]
    base = job.penstock.base_directory or "/opt/ml"
    assert ("ml", base) in mounts("sidecar")
    assert ("ml", base) in mounts("trainer")
    assert _flags("trainer")["base-directory"] == base
    assert _flags("trainer")["result"].startswith(f"{base}/")
    assert SERVICES["trainer"]["entrypoint"] == [
        f"{base}/input/config/{PROGRAM}",
        "--",
        *json.loads(STAGES["trainer"].last("ENTRYPOINT")),
    ]
    assert float(SERVICES["sidecar"]["stop_grace_period"].rstrip("s")) > job.penstock.drain_for


def _flags(service: str) -> dict[Any, Any]:
    """The options of a service's command, as `-name=value` or `--name=value`."""
    found = (re.fullmatch(r"--?([\w.-]+)=(.*)", each) for each in SERVICES[service]["command"])
    return {match[1]: match[2] for match in found if match}


def test_prometheus_scrapes_the_sidecar_and_grafana_asks_prometheus() -> None:
    job = load_job(ROOT / "deploy/compose/job.yaml")
    where = {target: source for source, target in mounts("prometheus")}
    target, source = next(iter(where.items()))
    assert f"--config.file={target}" in SERVICES["prometheus"]["command"]
    config = yaml.safe_load((ROOT / source).read_text(encoding="utf-8"))
    (rules,) = config["rule_files"]
    mounted = where[os.path.join(os.path.dirname(target), rules)]
    assert (ROOT / mounted).samefile(ROOT / os.path.dirname(source) / rules)
    (scrape,) = config["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": [f"sidecar:{job.penstock.admin.port}"]}]
    where = {target: source for source, target in mounts("grafana")}
    datasources = ROOT / where["/etc/grafana/provisioning/datasources"]
    (datasource,) = [
        one for file in datasources.iterdir() for one in yaml.safe_load(file.read_text())["datasources"]
    ]
    assert datasource["url"] == "http://prometheus:9090"
    providers = ROOT / where["/etc/grafana/provisioning/dashboards"]
    (provider,) = [
        one for file in providers.iterdir() for one in yaml.safe_load(file.read_text())["providers"]
    ]
    assert (provider["type"], provider["allowUiUpdates"]) == ("file", False)
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert os.path.dirname(home) == provider["options"]["path"]
    assert json.loads((ROOT / where[home]).read_text(encoding="utf-8"))["uid"] == "penstock-overview"
    shown = {
        json.loads((ROOT / source).read_text(encoding="utf-8"))["uid"]
        for target, source in where.items()
        if os.path.dirname(target) == provider["options"]["path"]
    }
    assert shown == set(DASHBOARDS)


# Runs a module, refusing the packages named by the first argument as if they were not installed.
_WITHOUT = """
import runpy, sys
class Refuse:
    absent = set(sys.argv.pop(1).split(","))
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("name", ["seed", "trainer"])
def test_demo_program_starts_in_its_image_and_takes_the_options_that_compose_gives(name: str) -> None:
    interpreter, how, module = json.loads(STAGES[name].last("ENTRYPOINT"))
    assert (interpreter, how) == ("python", "-m")
    there = closure(installed(name))
    owners = metadata.packages_distributions().items()
    absent = {top for top, names in owners if there.isdisjoint(canonicalize_name(one) for one in names)}
    assert "pytest" in absent
    assert "numpy" not in absent
    ran = run(sys.executable, "-c", _WITHOUT, ",".join(sorted(absent)), module, "--help")
    assert ran.returncode == 0, ran.stderr
    for option in _flags(name):
        assert f"--{option}" in ran.stdout
