"""Checks PodMonitor, PrometheusRule, JobSet, TrainingRuntime and TrainJob against their definitions:

    python -m scripts.check_extensions CRD.yaml...

The operators publish the definitions (`kubectl get crd NAME -o yaml` prints them too); this repository has no
copies. A key that a definition does not have is an error. tests/operate/test_kubernetes.py checks the Jobs
and pods within against Kubernetes' own schemas.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.operate.manifests import SOURCES, documents


def strict(schema: Any) -> Any:
    """Return a definition's schema without permission for other keys."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(inner) for key, inner in schema.items()}
    if "properties" in found and not found.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    if found.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
    return found


def definitions(paths: list[str]) -> dict[tuple[str, str], Any]:
    """Return the schemas of all definitions in these files, by (apiVersion, kind)."""
    found = {}
    for path in paths:
        for document in yaml.safe_load_all(Path(path).read_text(encoding="utf-8")):
            spec = document["spec"]
            for version in spec["versions"]:
                schema = strict(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return found


def main(paths: list[str]) -> int:
    schemas, checked, wrong = definitions(paths), 0, 0
    for source in SOURCES:
        for document in documents(source):
            schema = schemas.get((document["apiVersion"], document["kind"]))
            if schema is None:
                continue
            checked += 1
            for error in jsonschema.Draft7Validator(schema).iter_errors(document):
                wrong += 1
                print(f"{source}: {document['kind']}: {error.json_path}: {error.message[:200]}")
    print(f"{checked} objects checked against {len(schemas)} definitions, {wrong} errors")
    return 1 if wrong or not checked else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
