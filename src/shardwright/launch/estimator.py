"""An estimator in the original's style, for this machine: the same arguments, the same view for the script."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright import log
from shardwright.config.parse import read
from shardwright.errors import ConfigError, UsageError
from shardwright.launch import command, ports
from shardwright.launch.devices import count_accelerators
from shardwright.launch.distribution import read_distribution
from shardwright.launch.local_job import Host, TrainingJob
from shardwright.launch.process import usable_cores
from shardwright.launch.script_environment import JobFolders, script_arguments, script_variables

_log = log.get_logger(__name__)

# Arguments of the original that choose or describe a machine, an account or a service.
WITHOUT_EFFECT = frozenset(
    {
        *("role", "instance_type", "framework_version", "py_version", "image_uri", "volume_size", "volume_kms_key"),
        *("max_run", "max_wait", "use_spot_instances", "max_retry_attempts", "keep_alive_period_in_seconds"),
        *("input_mode", "output_kms_key", "code_location", "sagemaker_session", "tags", "subnets"),
        *("security_group_ids", "encrypt_inter_container_traffic", "enable_network_isolation"),
        *("metric_definitions", "enable_sagemaker_metrics", "rules", "debugger_hook_config", "profiler_config"),
        *("disable_profiler", "tensorboard_output_config", "compiler_config", "container_log_level"),
    }
)
_NOT_COPIED = shutil.ignore_patterns(".git", "__pycache__", ".venv", ".mypy_cache", ".pytest_cache")


class PyTorch:
    """A training job, described as for the original's cloud, that runs on this machine.

    Calls: the constructor checks everything; `fit`, as often as wanted, each a job of its own.
    """

    def __init__(
        self,
        entry_point: str,
        *,
        source_dir: str | None = None,
        dependencies: Sequence[str] = (),
        hyperparameters: Mapping[str, object] | None = None,
        distribution: Mapping[str, object] | None = None,
        instance_count: int = 1,
        environment: Mapping[str, str] | None = None,
        checkpoint_local_path: str | None = None,
        checkpoint_s3_uri: str | None = None,
        output_path: str | None = None,
        base_job_name: str | None = None,
        disable_output_compression: bool = False,
        emulate_cuda: bool = False,
        max_restarts: int = 0,
        **others: Any,
    ) -> None:
        """entry_point: the script, relative to `source_dir` if that is given.

        source_dir, dependencies: copied into the job's folder, where the script runs.
        hyperparameters: become arguments of the script; see `script_arguments`.
        distribution: {"smdistributed": {"modelparallel": {"enabled", "parameters"}}, "mpi": {"enabled",
            "processes_per_host", "custom_mpi_options"}}.
        instance_count: hosts; each is a launcher of its own on this machine.
        checkpoint_local_path: made if it isn't there. checkpoint_s3_uri: a folder (file://) whose content is
            copied there before the job and back after it.
        output_path: folder of all jobs, file:// or plain; `training-jobs` if not given.
        emulate_cuda, max_restarts: as for `shardwright run`.
        others: further arguments of the original; those that mean nothing on one machine are named once in
            the log.
        Raises: ConfigError naming an argument or a key that can't be carried out here.
        """
        unknown = sorted(set(others) - WITHOUT_EFFECT)
        if unknown:
            raise ConfigError(
                f"the estimator can't carry out {', '.join(unknown)} on this machine",
                remedy=f"leave it out; of the original's arguments without effect here it accepts: "
                f"{', '.join(sorted(WITHOUT_EFFECT))}",
            )
        if not isinstance(instance_count, int) or instance_count < 1:
            raise ConfigError(f"instance_count is {instance_count!r}, expected a whole number, 1 or more")
        self.distribution = read_distribution(distribution)
        self.instance_count = instance_count
        self.entry_point = entry_point
        self.source_dir = None if source_dir is None else local_path(source_dir, "source_dir")
        self.dependencies = [local_path(path, "dependencies") for path in dependencies]
        self.environment = dict(environment or {})
        self.output_path = local_path(output_path or "training-jobs", "output_path").absolute()
        self.base_job_name = base_job_name
        self.checkpoint_local_path = _optional_path(checkpoint_local_path, "checkpoint_local_path")
        self.checkpoint_copy = _optional_path(checkpoint_s3_uri, "checkpoint_s3_uri")
        self.latest_training_job: TrainingJob | None = None
        self._hyperparameters = dict(hyperparameters or {})
        self._instance_type = str(others.get("instance_type", "local"))
        self._compress = not disable_output_compression
        self._emulate_cuda = emulate_cuda
        self._max_restarts = max_restarts
        self._check_script()
        if self.checkpoint_copy is not None and self.checkpoint_local_path is None:
            raise ConfigError("checkpoint_s3_uri is given without checkpoint_local_path, the folder that scripts use")
        self._settle(1)
        given = sorted(name for name in others if others[name] is not None)
        for option in (*given, *self.distribution.without_effect):
            log.once(_log, logging.WARNING, "estimator: %s has no effect on this machine", option)

    def hyperparameters(self) -> dict[str, object]:
        """Return what the script gets as arguments, model parallel parameters not included."""
        return dict(self._hyperparameters)

    def set_hyperparameters(self, **values: object) -> None:
        """Change or add hyperparameters of the jobs to come."""
        self._hyperparameters.update(values)

    def fit(
        self,
        inputs: str | Mapping[str, str] | None = None,
        wait: bool = True,
        logs: bool | str | Sequence[str] = True,
        job_name: str | None = None,
        experiment_config: object = None,
    ) -> None:
        """Run the script on the data.

        inputs: a folder (file:// or plain) for the channel "training", or a dict of channels to folders.
        wait: return when the job has ended; else `latest_training_job.wait()` does.
        logs: show what the workers print; anything that isn't False or "None" counts as yes. It is in the
            job's output folder in any case.
        job_name: a new folder below `output_path`; made from the script's name and the time if not given.
        Raises: JobFailedError with the report on the rank that failed first; ConfigError before anything
            starts.
        """
        if experiment_config is not None:
            log.once(_log, logging.WARNING, "estimator: %s has no effect on this machine", "experiment_config")
        channels = _channels(inputs)
        name = job_name or self._new_name()
        folders = JobFolders(self.output_path / name)
        if folders.root.exists():
            raise ConfigError(f"there is a job {name!r} in {self.output_path} already", remedy="another job_name")
        for folder in (folders.model, folders.data, folders.output / "intermediate", folders.root / "input/config"):
            folder.mkdir(parents=True)
        self._copy_code(folders)
        copy_back = self._fetch_checkpoints()
        with ports.reserve(None) as reserved:
            port = ports.port_of(reserved)
        self.latest_training_job = TrainingJob(
            name,
            [self._host(index, name, channels, folders, port) for index in range(self.instance_count)],
            folders,
            show_logs=logs is not False and logs != "None",
            compress=self._compress,
            copy_back=copy_back,
        )
        if wait:
            self.latest_training_job.wait()

    @property
    def model_data(self) -> str:
        """The latest job's model.tar.gz (a folder with `disable_output_compression`), as a file:// address.

        Raises: UsageError if no job has ended yet.
        """
        job = self.latest_training_job
        if job is None or job.model_data is None:
            raise UsageError("there is no model yet", remedy="call fit() and wait for its end")
        return job.model_data.as_uri()

    # ----------------------------------------------------------------------------------------------------

    def _check_script(self) -> None:
        if Path(self.entry_point).suffix != ".py":
            raise ConfigError(f"entry_point is {self.entry_point!r}, expected a Python file")
        if self.source_dir is not None and not self.source_dir.is_dir():
            raise ConfigError(f"source_dir {str(self.source_dir)!r} is not a folder")
        path = Path(self.entry_point) if self.source_dir is None else self.source_dir / self.entry_point
        if not path.is_file():
            raise ConfigError(f"there is no script {str(path)!r}", remedy="entry_point is relative to source_dir")
        if (path.parent / "requirements.txt").is_file():
            log.once(_log, logging.WARNING, "estimator: %s is not installed", path.parent / "requirements.txt")

    def _settle(self, port: int) -> command.LaunchSettings:
        parameters = self.distribution.parameters or {}
        one = 1 if self.distribution.parameters is None else None
        return command.settle(
            Path(self.entry_point).name if self.source_dir is None else self.entry_point,
            script_arguments(self._hyperparameters, self.distribution),
            nproc=self.distribution.processes_per_host or one,
            nnodes=self.instance_count,
            master_addr="127.0.0.1",
            master_port=port,
            config=read(parameters, "distribution").values,
            tag_output=self.distribution.tag_output,
            emulate_cuda=self._emulate_cuda,
            max_restarts=self._max_restarts,
        )

    def _host(
        self, index: int, name: str, channels: Mapping[str, Path], folders: JobFolders, port: int
    ) -> Host:
        settings = self._settle(port)
        num_gpus = count_accelerators(os.environ)
        hosts = [f"algo-{number}" for number in range(1, self.instance_count + 1)]
        variables = script_variables(
            job_name=name,
            entry_point=settings.script,
            hyperparameters=self._hyperparameters,
            channels=channels,
            distribution=self.distribution,
            hosts=hosts,
            current_host=hosts[index],
            folders=folders,
            num_gpus=settings.nproc if self._emulate_cuda and num_gpus == 0 else num_gpus,
            num_cpus=usable_cores(),
            instance_type=self._instance_type,
        )
        launcher = ["-c", "from shardwright.cli.main import main; main()", "run", f"--nproc={settings.nproc}"]
        launcher += [f"--nnodes={settings.nnodes}", f"--node-rank={index}"]
        launcher += ["--master-addr=127.0.0.1", f"--master-port={port}", f"--max-restarts={settings.max_restarts}"]
        launcher += ["--tag-output"] * settings.tag_output + ["--emulate-cuda"] * settings.emulate_cuda
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("SM_")}
        environment = {**inherited, **self.environment, **variables}
        path = [*(entry for entry in sys.path if entry), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(folders.code), *path]))
        return Host(hosts[index], [sys.executable, *launcher, settings.script, *settings.script_args], environment)

    def _copy_code(self, folders: JobFolders) -> None:
        if self.source_dir is not None:
            shutil.copytree(self.source_dir, folders.code, ignore=_NOT_COPIED)
        else:
            folders.code.mkdir()
            shutil.copy2(self.entry_point, folders.code)
        for path in self.dependencies:
            if path.is_dir():
                shutil.copytree(path, folders.code / path.name, ignore=_NOT_COPIED)
            else:
                shutil.copy2(path, folders.code)

    def _fetch_checkpoints(self) -> tuple[Path, Path] | None:
        if self.checkpoint_local_path is None:
            return None
        self.checkpoint_local_path.mkdir(parents=True, exist_ok=True)
        if self.checkpoint_copy is None:
            return None
        if self.checkpoint_copy.is_dir():
            shutil.copytree(self.checkpoint_copy, self.checkpoint_local_path, dirs_exist_ok=True)
        return self.checkpoint_local_path, self.checkpoint_copy

    def _new_name(self) -> str:
        base = self.base_job_name or Path(self.entry_point).stem
        stamp = f"{time.strftime('%Y-%m-%d-%H-%M-%S')}-{time.time_ns() // 1_000_000 % 1000:03d}"
        return f"{base}-{stamp}"


def local_path(address: str, name: str) -> Path:
    """Return the path that a plain or file:// address names.

    Raises: ConfigError for addresses of other machines.
    """
    scheme, separator, rest = str(address).partition("://")
    if not separator:
        return Path(address)
    if scheme != "file":
        raise ConfigError(
            f"{name} is {address!r}, expected a folder of this machine", remedy="a path, or file:///its/path"
        )
    return Path(rest)


def _optional_path(address: str | None, name: str) -> Path | None:
    return None if address is None else local_path(address, name).absolute()


def _channels(inputs: str | Mapping[str, str] | None) -> dict[str, Path]:
    given = {"training": inputs} if isinstance(inputs, (str, Path)) else dict(inputs or {})
    found = {}
    for name, address in given.items():
        if not isinstance(address, (str, Path)):
            raise ConfigError(f"inputs[{name!r}] is {address!r}, expected the address of a folder")
        path = local_path(str(address), f"inputs[{name!r}]").absolute()
        if not path.exists():
            raise ConfigError(f"inputs[{name!r}]: there is no {str(path)!r}")
        found[name] = path
    return found
