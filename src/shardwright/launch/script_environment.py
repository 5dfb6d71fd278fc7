"""What a training script of the original reads about its job: command-line arguments and SM_* variables. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.launch.command import FRAMEWORK_VARIABLE
from shardwright.launch.distribution import Distribution

MODEL_PARALLEL_ARGUMENT = "mp_parameters"


@dataclass(frozen=True)
class JobFolders:
    """Where a job keeps its things; the original's names below /opt/ml, here below one folder of the job's own."""

    root: Path

    @property
    def code(self) -> Path:
        """The copy of `source_dir` that runs, the scripts' working folder."""
        return self.root / "code"

    @property
    def model(self) -> Path:
        """What the script saves here becomes model.tar.gz."""
        return self.root / "model"

    @property
    def output(self) -> Path:
        """Archives, logs, and the script's own `failure` file."""
        return self.root / "output"

    @property
    def data(self) -> Path:
        """What the script saves here becomes output.tar.gz."""
        return self.output / "data"


def script_arguments(hyperparameters: Mapping[str, object], distribution: Distribution) -> list[str]:
    """Return hyperparameters as arguments: sorted, `--name value`, a single letter with one dash.

    Model parallel parameters come as `--mp_parameters key=value,...` among them, as scripts expect.
    """
    words: list[str] = []
    for name, value in sorted(_with_parameters(hyperparameters, distribution).items()):
        words.append(f"--{name}" if len(name) > 1 else f"-{name}")
        if isinstance(value, Mapping):
            words.append(",".join(f"{key}={inner}" for key, inner in sorted(value.items())))
        else:
            words.append(str(value))
    return words


def script_variables(
    *,
    job_name: str,
    entry_point: str,
    hyperparameters: Mapping[str, object],
    channels: Mapping[str, Path],
    distribution: Distribution,
    hosts: Sequence[str],
    current_host: str,
    folders: JobFolders,
    num_gpus: int,
    num_cpus: int,
    instance_type: str,
) -> dict[str, str]:
    """Return the variables of all workers of one host."""
    hyperparameters = _with_parameters(hyperparameters, distribution)
    framework: dict[str, object] = {}
    if distribution.mpi_enabled:
        framework["sagemaker_mpi_enabled"] = True
        framework["sagemaker_mpi_custom_mpi_options"] = distribution.mpi_options
        if distribution.processes_per_host is not None:
            framework["sagemaker_mpi_num_of_processes_per_host"] = distribution.processes_per_host
    input_folder = folders.root / "input"
    values: dict[str, object] = {
        "TRAINING_JOB_NAME": job_name,
        "SM_MODULE_NAME": Path(entry_point).stem,
        "SM_MODULE_DIR": str(folders.code),
        "SM_USER_ENTRY_POINT": entry_point,
        "SM_USER_ARGS": script_arguments(hyperparameters, Distribution()),
        "SM_FRAMEWORK_MODULE": "shardwright.estimator",
        FRAMEWORK_VARIABLE: framework,
        "SM_HPS": hyperparameters,
        "SM_CHANNELS": sorted(channels),
        "SM_MODEL_DIR": str(folders.model),
        "SM_OUTPUT_DIR": str(folders.output),
        "SM_OUTPUT_DATA_DIR": str(folders.data),
        "SM_OUTPUT_INTERMEDIATE_DIR": str(folders.output / "intermediate"),
        "SM_INPUT_DIR": str(input_folder),
        "SM_INPUT_CONFIG_DIR": str(input_folder / "config"),
        "SM_INPUT_DATA_CONFIG": {name: {"TrainingInputMode": "File"} for name in sorted(channels)},
        "SM_HOSTS": list(hosts),
        "SM_CURRENT_HOST": current_host,
        "SM_RESOURCE_CONFIG": {"current_host": current_host, "hosts": list(hosts), "network_interface_name": "lo"},
        "SM_NETWORK_INTERFACE_NAME": "lo",
        "SM_CURRENT_INSTANCE_TYPE": instance_type,
        "SM_NUM_GPUS": num_gpus,
        "SM_NUM_CPUS": num_cpus,
        "SM_LOG_LEVEL": 20,
        **{f"SM_CHANNEL_{name.upper()}": str(folder) for name, folder in channels.items()},
        **{f"SM_HP_{name.upper()}": value for name, value in hyperparameters.items()},
    }
    variables = {name: _text(value) for name, value in values.items()}
    lower = {
        name.removeprefix("SM_").lower(): value
        for name, value in values.items()
        if not name.startswith(("SM_HP_", "SM_CHANNEL_"))
    }
    lower["hyperparameters"] = lower.pop("hps")
    lower["channel_input_dirs"] = {name: str(folder) for name, folder in channels.items()}
    lower["job_name"] = job_name
    variables["SM_TRAINING_ENV"] = _text(lower)
    # An -x NAME without a value passes the caller's on; workers inherit all of that anyway.
    return variables | {name: value for name, value in distribution.environment.items() if value is not None}


def _with_parameters(hyperparameters: Mapping[str, object], distribution: Distribution) -> dict[str, object]:
    if distribution.parameters is None:
        return dict(hyperparameters)
    parameters = {
        "partitions" if key == "pipeline_parallel_degree" else key: value
        for key, value in distribution.parameters.items()
    }
    return {**hyperparameters, MODEL_PARALLEL_ARGUMENT: parameters}


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))
