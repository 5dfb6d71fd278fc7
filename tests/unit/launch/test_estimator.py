"""What the estimator makes of its arguments, without running anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.errors import ConfigError, UsageError
from shardwright.estimator import PyTorch
from shardwright.launch.distribution import Distribution, read_distribution
from shardwright.launch.local_job import report_of
from shardwright.launch.script_environment import JobFolders, script_arguments, script_variables

MODEL_PARALLEL = {"enabled": True, "parameters": {"partitions": 2, "microbatches": 4, "ddp": True}}


def _distribution(parallel: object = MODEL_PARALLEL, **mpi: object) -> dict[str, object]:
    return {"smdistributed": {"modelparallel": parallel}, "mpi": {"enabled": True, **mpi}}


def test_both_option_dicts_are_read() -> None:
    options = "-x A=1 -x HOME --mca btl_vader_single_copy_mechanism none --oversubscribe -verbose --tag-output"
    assert read_distribution(_distribution(processes_per_host=8, custom_mpi_options=options)) == Distribution(
        parameters={"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": True},
        processes_per_host=8,
        mpi_enabled=True,
        mpi_options=options,
        tag_output=True,
        environment={"A": "1", "HOME": None},
        without_effect=("--mca btl_vader_single_copy_mechanism none", "--oversubscribe", "-verbose"),
    )


@pytest.mark.parametrize(
    ("distribution", "words"),
    [
        ({"torch_distributed": {"enabled": True}}, "torch_distributed.*smdistributed, mpi"),
        ({"smdistributed": {"dataparallel": {"enabled": True}}}, "dataparallel.*modelparallel"),
        (_distribution({"enabled": True, "params": {}}), "params.*enabled, parameters"),
        (_distribution({"enabled": "yes"}), r"\['enabled'\] is 'yes'"),
        (_distribution({"enabled": True, "parameters": {"partition": 2}}), "partition.*partitions"),
        (_distribution({"enabled": True, "parameters": {"microbatches": 0}}), "'microbatches' is 0"),
        (_distribution(processes=8), "processes.*processes_per_host"),
        (_distribution(processes_per_host="8"), r"\['processes_per_host'\] is '8'"),
        (_distribution(custom_mpi_options="--hostfile h"), "'--hostfile', which means nothing here"),
        (_distribution(custom_mpi_options="--mca a"), "'--mca'"),
        ({"smdistributed": {"modelparallel": MODEL_PARALLEL}}, r"\['mpi'\] is not enabled"),
    ],
)
def test_what_can_not_be_carried_out_is_refused_by_name(distribution: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_distribution(distribution)


def test_hyperparameters_become_arguments() -> None:
    values = {"lr": 1e-3, "n": 3, "fp16": True, "checkpoint-dir": "/a b"}
    assert script_arguments(values, read_distribution(_distribution())) == [
        *("--checkpoint-dir", "/a b", "--fp16", "True", "--lr", "0.001"),
        *("--mp_parameters", "ddp=True,microbatches=4,partitions=2", "-n", "3"),
    ]
    assert script_arguments({"lr": 1}, Distribution()) == ["--lr", "1"]


def test_variables_tell_what_scripts_look_for() -> None:
    variables = script_variables(
        job_name="job",
        entry_point="train.py",
        hyperparameters={"epochs": 3, "name": "x y"},
        channels={"train": Path("/data")},
        distribution=read_distribution(_distribution(processes_per_host=2, custom_mpi_options="-x A=1")),
        hosts=["algo-1", "algo-2"],
        current_host="algo-2",
        folders=JobFolders(Path("/jobs/job")),
        num_gpus=0,
        num_cpus=2,
        instance_type="local",
    )
    assert json.loads(variables["SM_HP_MP_PARAMETERS"]) == MODEL_PARALLEL["parameters"]
    framework = json.loads(variables["SM_FRAMEWORK_PARAMS"])
    assert framework["sagemaker_mpi_enabled"] is True
    assert framework["sagemaker_mpi_num_of_processes_per_host"] == 2
    assert json.loads(variables["SM_HPS"])["epochs"] == 3
    assert json.loads(variables["SM_TRAINING_ENV"])["hyperparameters"]["epochs"] == 3
    expected = {
        "SM_HP_EPOCHS": "3",
        "SM_HP_NAME": "x y",
        "SM_CHANNELS": '["train"]',
        "SM_CHANNEL_TRAIN": "/data",
        "SM_MODEL_DIR": "/jobs/job/model",
        "SM_OUTPUT_DATA_DIR": "/jobs/job/output/data",
        "SM_HOSTS": '["algo-1","algo-2"]',
        "SM_CURRENT_HOST": "algo-2",
        "SM_NUM_GPUS": "0",
        "SM_USER_ENTRY_POINT": "train.py",
        "A": "1",
    }
    assert {name: variables[name] for name in expected} == expected


def test_the_constructor_refuses_what_can_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for options, words in [
        ({"entry_point": "other.py"}, "no script 'other.py'"),
        ({"entry_point": "train.sh"}, "expected a Python file"),
        ({"git_config": {"repo": "r"}}, "can't carry out git_config"),
        ({"instance_count": 0}, "instance_count is 0"),
        ({"output_path": "s3://bucket/jobs"}, "output_path is 's3://bucket/jobs'"),
        ({"checkpoint_s3_uri": "file:///c"}, "without checkpoint_local_path"),
        ({"distribution": _distribution(processes_per_host=3)}, "3 processes"),
    ]:
        with pytest.raises(ConfigError, match=words):
            PyTorch(**{"entry_point": "train.py", "role": "r", **options})
    said: list[object] = []
    monkeypatch.setattr("shardwright.log.once", lambda logger, level, text, *values: said.append(text % values))
    distribution = _distribution(custom_mpi_options="--oversubscribe")
    estimator = PyTorch("train.py", role="r", instance_type="ml.p4d.24xlarge", tags=None, distribution=distribution)
    named = ("instance_type", "role", "--oversubscribe")
    assert said == [f"estimator: {name} has no effect on this machine" for name in named]
    with pytest.raises(ConfigError, match=r"inputs\['train'\] is 's3://b/c'"):
        estimator.fit({"train": "s3://b/c"})
    with pytest.raises(UsageError, match="no model yet"):
        _ = estimator.model_data


def test_the_report_is_found_in_a_log() -> None:
    log = "step 1\nshardwright run: 2 processes\nshardwright run: rank 1 failed first: exit code 1\n\nTraceback\n"
    assert report_of(log) == "rank 1 failed first: exit code 1\n\nTraceback\n"
    assert report_of("a\nb") == "a\nb"
