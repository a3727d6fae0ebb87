"""A campaign's metrics reach the configured trackers, and are whole at its end."""

from pathlib import Path

import pytest
from support.stored_run.run import Shape, make_run

from configs.operation import MirrorConfig
from flows.campaign.mirror import mirrored
from millrace.runs.record import end_attempt
from storage import layout
from storage.stores.factory import open_store


@pytest.mark.slow
def test_a_run_is_copied_to_its_end_and_the_log_says_how_much(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "mine"))
    make_run(store, "mine", Shape(steps=3))
    with mirrored(MirrorConfig(tensorboard=str(tmp_path / "boards")), store):
        end_attempt(store, 0, "finished")
    assert list((tmp_path / "boards" / "mine").glob("events.out.*"))
    log = bytes(store.get(layout.log_file("mirror", 0))).decode()
    assert "Traceback" not in log
    assert "new points" in log


def test_without_trackers_nothing_is_started(tmp_path: Path) -> None:
    with mirrored(MirrorConfig(), open_store(str(tmp_path))):
        assert not (tmp_path / layout.LOGS).exists()
