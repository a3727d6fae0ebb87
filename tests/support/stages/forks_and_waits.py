"""A controller: forks a fake stage, writes its process id, and waits to be killed.

`python -m support.stages.forks_and_waits`
"""

import os
import time
from pathlib import Path

from support.stages import fake_stage

from millrace.forking.stages import StageForkServer


def main() -> None:
    server = StageForkServer()
    with Path(os.devnull).open("ab") as log:
        process = server.start(fake_stage.__name__, ["lifeline"], log, 1, print)
    print(process.pid, flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    main()
