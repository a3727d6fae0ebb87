"""Which stages share a host."""

from configs.schema import RunConfig
from tasks.jobs import Job, jobs


def placed(**placement: dict[str, object]) -> list[Job]:
    return jobs(
        RunConfig.model_validate(
            {
                "generation": {"replicas": 2, "threads": 3},
                "scoring": {"replicas": 2},
                "training": {"max_steps": 1, "threads": 4},
                "weights": {"transport": "store"},
                "placement": placement,
            }
        )
    )


def test_the_trainer_and_sync_weights_share_a_job_and_every_replica_has_one_of_its_own() -> None:
    found = [[(process.stage, process.replica, process.threads) for process in job.processes] for job in placed()]
    assert found == [
        [("train", 0, 4), ("sync_weights", 0, 1)],
        [("generate", 0, 3)],
        [("generate", 1, 3)],
        [("score", 0, 1)],
        [("score", 1, 1)],
        [("evaluate", 0, 4)],
    ]


def test_a_job_is_named_after_its_first_stage_and_its_status_record_has_a_name_that_no_stage_has() -> None:
    assert [job.name for job in placed()] == ["train-0", "generate-0", "generate-1", "score-0", "score-1", "evaluate-0"]
    assert [(job.status_record, job.number) for job in placed()][:3] == [
        ("place-train", 0),
        ("place-generate", 0),
        ("place-generate", 1),
    ]


def test_what_has_no_work_pool_stays_with_the_controller() -> None:
    found = placed(generate={"work_pool": "inference", "job_variables": {"gpus": 1}})
    assert [job.work_pool for job in found] == [None, "inference", "inference", None, None, None]
    assert found[1].job_variables == {"gpus": 1}


def test_a_trainer_over_several_hosts_has_a_job_per_host_and_ends_with_its_first() -> None:
    config = RunConfig.model_validate(
        {
            "training": {"max_steps": 1, "parallel": {"data": 4}},
            "weights": {"transport": "store"},
            "placement": {"train": {"work_pool": "training", "hosts": 2, "network": "10.0.0.0/24"}},
        }
    )
    found = {job.name: job for job in jobs(config)}
    assert [process.stage for process in found["train-0"].processes] == ["train", "sync_weights"]
    assert [(process.stage, process.replica) for process in found["train-1"].processes] == [("train", 1)]
    assert (found["train-1"].status_record, found["train-1"].number) == ("place-train", 1)
    assert [name for name, job in found.items() if job.may_end_first] == ["train-1", "evaluate-0"]
