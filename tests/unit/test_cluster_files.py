"""The files that start a job on Kubernetes, Slurm and by ssh: the manifest keeps KubeRay's schema, the scripts run with
stand-ins for the programs of a cluster."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = ROOT / "containers"
SCHEMA = json.loads((Path(__file__).parent / "kuberay_rayjob.json").read_text())
STAND_IN = """#!{python}
import json, os, sys, time
from pathlib import Path

name, words = Path(sys.argv[0]).name, sys.argv[1:]
text = "" if name == "mopd" or sys.stdin.isatty() or "-ls" not in words else sys.stdin.read()
entry = {{"name": name, "words": words, "token": os.environ.get("RAY_AUTH_TOKEN", ""),
          "secret": os.environ.get("AWS_SECRET_ACCESS_KEY", "")}}
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps(entry) + "\\n")
if name == "mopd":  # not before every node was started
    until = time.monotonic() + 60
    calls = Path(os.environ["CALLS"])
    while '"name": "ray", "words": ["start", "--block"' not in calls.read_text() and time.monotonic() < until:
        time.sleep(0.05)
if name == "ray" and words[0] == "health-check":
    sys.exit('"words": ["start", "--head"' not in Path(os.environ["CALLS"]).read_text())
if name == "scontrol":
    print("first\\nsecond\\nthird")
if name == "srun":
    command = next(index for index, word in enumerate(words) if not word.startswith("-"))
    os.execvp(words[command], words[command:])
if name == "ssh":
    os.environ.pop("RAY_AUTH_TOKEN")
    os.environ.pop("AWS_SECRET_ACCESS_KEY")
    import subprocess
    sys.exit(subprocess.run(["bash", "-s"], input=text, text=True, timeout=60).returncode)
"""
"""A program that notes how it was called; srun and ssh run what they are told on this machine."""


def manifest() -> dict[str, Any]:
    (document,) = yaml.safe_load_all((FILES / "kuberay.yaml").read_text())
    return dict(document)


def containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The containers of a manifest, the head first."""
    cluster = document["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


def run_script(name: str, folder: Path, *arguments: str, **variables: str) -> list[dict[str, Any]]:
    """Run a script with stand-ins on the PATH. Returns the calls of these."""
    programs = folder / "programs"
    programs.mkdir()
    for stand_in in ("scontrol", "srun", "ssh", "ray", "mopd"):
        (programs / stand_in).write_text(STAND_IN.format(python=sys.executable))
        (programs / stand_in).chmod(0o755)
    (programs / "python").symlink_to(sys.executable)
    calls = folder / "calls.jsonl"
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(calls), "AWS_SECRET_ACCESS_KEY": "sesame 'x' \"y\"",
        "HOME": str(folder), **variables,
    }  # fmt: skip
    command = ["bash", str(FILES / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in calls.read_text().splitlines()]


def test_the_manifest_keeps_the_schema_of_kuberay() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(manifest(), SCHEMA)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "entryPoint"), "mopd"),
        (("spec", "backoffLimit"), "three"),
        (("spec", "rayClusterSpec", "headGroupSpec"), None),
        (("spec", "rayClusterSpec", "authOptions", "mode"), "password"),
        (("spec", "rayClusterSpec", "workerGroupSpecs", 0, "groupName"), None),
        (("spec", "rayClusterSpec", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
    ],
)
def test_a_wrong_manifest_is_noticed(path: tuple[str | int, ...], value: object) -> None:
    wrong = copy.deepcopy(manifest())
    *parents, last = path
    level: Any = wrong
    for name in parents:
        level = level[name]
    if value is None:
        del level[last]
    else:
        level[last] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMA)


def test_the_manifest_says_what_the_page_promises() -> None:
    document = manifest()
    cluster = document["spec"]["rayClusterSpec"]
    pinned = re.search(r"^ray==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert cluster["rayVersion"] == pinned[1], "that of the image"
    assert cluster["authOptions"]["mode"] == "token"
    head, *workers = containers(document)
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    for container in (head, *workers):
        assert {"secretRef": {"name": "mopd-s3"}} in container["envFrom"]
        assert "/work" in [mount["mountPath"] for mount in container["volumeMounts"]]
        assert container["image"] == head["image"]
    words = shlex.split(document["spec"]["entrypoint"])
    assert words[:2] == ["mopd", "run"]
    assert 'work="/work"' in words
    assert words[2].startswith(next(m["mountPath"] for m in head["volumeMounts"] if m["name"] == "jobs"))
    for file in ("Containerfile.cpu", "Containerfile.cuda"):
        assert re.search(r'"\.\[[a-z0-9,]*\bray\b[a-z0-9,]*\]"', (FILES / file).read_text()), "images have Ray"


def test_a_slurm_job_starts_a_head_that_trains_and_workers_on_the_other_nodes(tmp_path: Path) -> None:
    calls = run_script(
        "slurm.sh", tmp_path, "job.toml", "s3://bucket/math", "--set", "scale.engines=16",
        SLURM_JOB_NODELIST="node[1-3]", SLURM_NNODES="3", SLURM_JOB_ID="42", TMPDIR="/scratch",
    )  # fmt: skip
    starts = [call["words"] for call in calls if call["name"] == "ray" and call["words"][0] == "start"]
    assert ["--head" in words for words in starts] == [True, False]
    assert {"--num-cpus=0", "--num-gpus=0"} <= set(starts[0])
    assert "--address=first:6379" in starts[1]
    runs = [call["words"] for call in calls if call["name"] == "srun"]
    assert "--nodelist=first" in runs[0]
    assert {"--exclude=first", "--nodes=2"} <= set(runs[1])
    (mopd,) = [call for call in calls if call["name"] == "mopd"]
    assert mopd["words"] == [
        "run", "job.toml", "--store", "s3://bucket/math", "--ray", "first:6379",
        "--set", 'work="/scratch/mopd-42"', "--set", "scale.engines=16",
    ]  # fmt: skip
    assert len({call["token"] for call in calls if call["name"] in ("ray", "mopd")} - {""}) == 1
    assert not any(mopd["token"] in " ".join(call["words"]) for call in calls)


def test_a_job_over_ssh_starts_every_host_without_a_secret_in_an_argument(tmp_path: Path) -> None:
    calls = run_script(
        "ssh.sh", tmp_path, "job.toml", "s3://bucket/math", "10.0.0.1", "second", "third", "--",
        "--set", "scale.engines=16",
    )  # fmt: skip
    assert [call["words"] for call in calls if call["name"] == "ssh"] == [
        [host, "bash", "-ls"] for host in ("second", "third", "second", "third")
    ]
    verbs = [call["words"] for call in calls if call["name"] == "ray"]
    assert [words[0] for words in verbs] == ["start", "start", "start", "stop", "stop", "stop"]
    assert {"--head", "--node-ip-address=10.0.0.1", "--num-cpus=0", "--num-gpus=0"} <= set(verbs[0])
    assert verbs[1] == verbs[2] == ["start", "--address=10.0.0.1:6379"]
    (mopd,) = [call for call in calls if call["name"] == "mopd"]
    assert mopd["words"] == [
        "run", "job.toml", "--store", "s3://bucket/math", "--ray", "10.0.0.1:6379", "--set", "scale.engines=16",
    ]  # fmt: skip
    for call in calls:
        if call["name"] in ("ray", "mopd"):
            assert (call["token"], call["secret"]) == (mopd["token"], "sesame 'x' \"y\"")
        assert not any(secret in " ".join(call["words"]) for secret in (mopd["token"], "sesame"))
