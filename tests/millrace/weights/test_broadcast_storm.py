"""A long storm of kills and stops over a broadcast between real processes."""

import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.stages.failpoints import Failpoints, go_on
from support.weights.broadcasting import digest_of, generator, sync_weights

DEADLINE = 3.0
ROUNDS = 60


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(2))
def test_a_storm_of_kills_and_stops_leaves_no_torn_version_and_all_recover(seed: int, tmp_path: Path) -> None:
    chance, none, generators = random.Random(seed), Failpoints(tmp_path / "fired"), 3
    happened: list[str] = []
    with ExitStack() as stack:
        children = {
            g: stack.enter_context(generator(tmp_path, g, none, deadline_seconds=DEADLINE)) for g in range(generators)
        }
        sync = stack.enter_context(sync_weights(tmp_path, generators, none, deadline_seconds=DEADLINE))
        for version in range(1, ROUNDS + 1):
            event, g = (
                chance.choice(["kill", "stop", "stop", "continue", "sync", "nothing"]),
                chance.randrange(generators),
            )
            happened.append(f"{version}: {event} {g}")
            # Its answer is read later: so the fault meets the push.
            sync.tell(f"offer {version}")
            time.sleep(chance.random() * 0.02)
            match event:
                case "kill":
                    children[g].process.kill()
                    children[g] = stack.enter_context(generator(tmp_path, g, none, deadline_seconds=DEADLINE))
                case "stop":
                    children[g].process.send_signal(signal.SIGSTOP)
                case "continue":
                    for child in children.values():
                        go_on(child.process)
                case "sync":
                    sync.process.kill()
                    sync = stack.enter_context(sync_weights(tmp_path, generators, none, deadline_seconds=DEADLINE))
            if event != "sync":
                sync.line()
        for child in children.values():
            go_on(child.process)
        newest = ROUNDS + 1
        # Should one of them never come back, this is where the test hangs, and pytest ends it.
        print(f"seed {seed}: {happened}")
        assert sync.ask(f"deliver {newest}") == {"missing": []}
        for g, child in children.items():
            for line in child.read_until(newest):
                assert line.get("digest") == digest_of(line["version"]), (
                    f"seed {seed}, generator {g}: {line} {happened}"
                )
    assert {"kill", "stop", "sync"} <= {entry.split()[1] for entry in happened}, f"seed {seed}"
