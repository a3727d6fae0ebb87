"""The jobs of a campaign: which stages share a host."""

from configs.schema import RunConfig
from tasks.jobs import Job, jobs


def placed(**placement: dict[str, object]) -> list[Job]:
    return jobs(
        RunConfig.model_validate(
            {
                "generation": {"replicas": 2, "threads": 3},
                "scoring": {"replicas": 2},
                "training": {"max_steps": 1, "threads": 4, "parallel": {"data": 4}},
                "weights": {"transport": "store"},
                "placement": placement,
            }
        )
    )


def test_each_replica_has_a_job_and_the_trainer_shares_its_own_with_sync_weights() -> None:
    processes = [[(process.stage, process.replica, process.threads) for process in job.processes] for job in placed()]
    assert processes == [
        [("train", 0, 4), ("sync_weights", 0, 1)],
        [("generate", 0, 3)],
        [("generate", 1, 3)],
        [("score", 0, 1)],
        [("score", 1, 1)],
        [("evaluate", 0, 4)],
    ]
    names = ["train-0", "generate-0", "generate-1", "score-0", "score-1", "evaluate-0"]
    assert [job.name for job in placed()] == names
    assert [(job.status_record, job.number) for job in placed()][1:3] == [("place-generate", 0), ("place-generate", 1)]


def test_a_stage_without_a_work_pool_stays_with_the_controller() -> None:
    jobs = placed(generate={"work_pool": "inference", "job_variables": {"gpus": 1}})
    assert [job.work_pool for job in jobs] == [None, "inference", "inference", None, None, None]
    assert jobs[1].job_variables == {"gpus": 1}


def test_a_trainer_over_several_hosts_has_a_job_per_host_and_ends_with_its_first() -> None:
    train = {"work_pool": "training", "hosts": 2, "network": "10.0.0.0/24"}
    by_name = {job.name: job for job in placed(train=train)}
    assert [process.stage for process in by_name["train-0"].processes] == ["train", "sync_weights"]
    assert [(process.stage, process.replica) for process in by_name["train-1"].processes] == [("train", 1)]
    assert [name for name, job in by_name.items() if job.may_end_first] == ["train-1", "evaluate-0"]
