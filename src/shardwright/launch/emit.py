"""The same job for another starter: a Slurm batch script, a Kubernetes manifest, or plain commands. Pure."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Literal, get_args

from shardwright.errors import ConfigError
from shardwright.launch.command import DEFAULT_MULTI_NODE_PORT, LaunchSettings, torchrun_equivalent

Form = Literal["slurm", "kubernetes", "command"]
_SPARE_S = 30  # beyond the workers' grace, before a cluster kills

SLURM = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nnodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
{gpus}#SBATCH --signal=TERM@{notice_s}
#SBATCH --output={name}-%j.log

# One launcher on each node; which node it is on, and where node 0 is, it reads from Slurm's variables.
srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 {command}
"""

KUBERNETES = """\
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    job-name: {name}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
  completions: {nnodes}
  parallelism: {nnodes}
  backoffLimit: 0
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never
      terminationGracePeriodSeconds: {notice_s}
      containers:
        - name: train
          image: {image}
          command: {command}
{gpus}          volumeMounts:
            - name: shm
              mountPath: /dev/shm
      volumes:
        - name: shm
          emptyDir:
            medium: Memory
"""


def emit(form: str, settings: LaunchSettings, *, image: str | None, inherited: Mapping[str, str], num_cores: int) -> str:
    """Return the file for a cluster, or the commands, that start this job.

    image: the container image, for kubernetes; it must hold the script and this library.
    inherited, num_cores: of the host that a plain command is for.
    Raises: ConfigError for an unknown form, or one that needs what is not given.
    """
    if form == "slurm":
        return _slurm(settings)
    if form == "kubernetes":
        return _kubernetes(settings, image)
    if form == "command":
        nodes = [replace(settings, node_rank=node) for node in range(settings.nnodes)]
        return "".join(torchrun_equivalent(node, inherited, num_cores) + "\n" for node in nodes)
    raise ConfigError(f"--emit is {form!r}, expected one of: {', '.join(get_args(Form))}")


def own_command(settings: LaunchSettings, *placement: str) -> list[str]:
    """Return the `shardwright run` command of these settings.

    placement: options that say which node it is on, where that isn't found out by itself.
    """
    words = ["shardwright", "run", f"--nproc={settings.nproc}"]
    if settings.nnodes > 1:
        words += [f"--nnodes={settings.nnodes}", f"--master-port={settings.master_port or DEFAULT_MULTI_NODE_PORT}"]
        words += placement
    for key, value in settings.config.items():
        words += ["-o", f"{key}={json.dumps(value)}"]
    words += [f"--grace-s={settings.grace_s:g}"]
    if settings.max_restarts:
        words += [f"--max-restarts={settings.max_restarts}"]
    if settings.log_dir is not None:
        words += [f"--log-dir={settings.log_dir}"]
    words += ["--tag-output"] * settings.tag_output + ["--emulate-cuda"] * settings.emulate_cuda
    words += ["-m"] * settings.module
    return [*words, settings.script, *settings.script_args]


def _slurm(settings: LaunchSettings) -> str:
    gpus = f"#SBATCH --gpus-per-node={settings.nproc}\n"
    return SLURM.format(
        name=_name(settings),
        nnodes=settings.nnodes,
        gpus="" if settings.emulate_cuda else gpus,
        notice_s=round(settings.grace_s) + _SPARE_S,
        command=shlex.join(own_command(settings)),
    )


def _kubernetes(settings: LaunchSettings, image: str | None) -> str:
    if not image:
        raise ConfigError(
            "--emit kubernetes needs a container image", remedy="--image NAME, one that holds the script and Shardwright"
        )
    name = _name(settings)
    # Kubernetes puts values for $(NAME) into commands; $$ stands for $.
    command = [word.replace("$(", "$$(") for word in own_command(settings, "<place>")]
    if settings.nnodes > 1:
        at = command.index("<place>")
        # An indexed job gives each pod its number, and the name NAME-NUMBER.SUBDOMAIN.
        command[at : at + 1] = ["--node-rank=$(JOB_COMPLETION_INDEX)", f"--master-addr={name}-0.{name}"]
    gpus = f"          resources:\n            limits:\n              nvidia.com/gpu: {settings.nproc}\n"
    return KUBERNETES.format(
        name=name,
        nnodes=settings.nnodes,
        image=json.dumps(image),
        command=json.dumps(command),
        gpus="" if settings.emulate_cuda else gpus,
        notice_s=round(settings.grace_s) + _SPARE_S,
    )


def _name(settings: LaunchSettings) -> str:
    """Return a name made from the script's that every cluster allows: a DNS label that starts with a letter."""
    plain = settings.script.rpartition(".")[2] if settings.module else PurePath(settings.script).stem
    label = re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")[:40].rstrip("-")
    return label if label[:1].isalpha() else f"job-{label}".rstrip("-")
