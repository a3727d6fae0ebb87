"""Which stages share a host."""

from configs.schema import RunConfig
from millrace.places import Place, places


def placed(**placement: dict[str, object]) -> list[Place]:
    return places(
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


def test_the_trainer_and_sync_weights_share_a_place_and_every_replica_has_one_of_its_own() -> None:
    found = [[(seat.stage, seat.replica, seat.threads) for seat in place.seats] for place in placed()]
    assert found == [
        [("train", 0, 4), ("sync_weights", 0, 1)],
        [("generate", 0, 3)],
        [("generate", 1, 3)],
        [("score", 0, 1)],
        [("score", 1, 1)],
    ]


def test_a_place_is_named_after_its_first_stage_and_writes_its_sign_of_life_under_a_name_that_no_stage_has() -> None:
    assert [place.name for place in placed()] == ["train-0", "generate-0", "generate-1", "score-0", "score-1"]
    assert [(place.sign_of_life, place.number) for place in placed()][:3] == [
        ("place-train", 0),
        ("place-generate", 0),
        ("place-generate", 1),
    ]


def test_what_has_no_work_pool_stays_with_the_controller() -> None:
    found = placed(generate={"work_pool": "inference", "job_variables": {"gpus": 1}})
    assert [place.work_pool for place in found] == [None, "inference", "inference", None, None]
    assert found[1].job_variables == {"gpus": 1}


def test_a_place_survives_the_way_through_json() -> None:
    for place in placed(train={"work_pool": "training"}):
        assert Place.model_validate_json(place.model_dump_json()) == place
