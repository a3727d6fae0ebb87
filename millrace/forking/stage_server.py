"""The fork server of `millrace.forking.stages`: imports packages once, and forks stages that are ready to work.

`python -m millrace.forking.stage_server`

    supervisor ──modules to import──────────────────────► fork server
               ──module, arguments, variables, log, pipes─►   │ fork ─► stage: as if `python -m MODULE ARGUMENTS`

See `millrace.forking.server` for how a stage becomes the supervisor's child. A user's code, such as a reward or an
environment, is never imported here: its import may start threads or use the device. Each stage imports it.
"""

import gc
import importlib
import os
import runpy
import sys

import pyarrow
from setproctitle import getproctitle, setproctitle

from millrace.forking.server import Order, control_socket, num_threads, read_recipe, reply, serve
from storage import failpoints
from storage.failpoints import failpoint


def main() -> None:
    """Imports the modules of the recipe, replies with the number of its threads, then forks stages on command."""
    failpoints.arm("fork_server")
    # It looks for the title's place now, in front of an environment that a stage changes later.
    getproctitle()
    control = control_socket()
    failpoint("fork_server.importing")
    # Nothing that is imported becomes garbage: looking for some would take a seventh of the time.
    gc.disable()
    for module in read_recipe(control)["modules"]:
        importlib.import_module(module)
    # Arrow imports pandas, if there is one, for the first list that it takes: once, and not in each stage.
    pyarrow.array([0])
    gc.enable()
    threads = num_threads()
    failpoint("fork_server.loaded")
    reply(control, {"threads": threads})
    if threads > 1:
        # The client starts its stages in another way, and ends this process.
        control.recv(1)
        return
    order = serve(control, adopted=True)
    if order is not None:
        _run_order(order)


def _run_order(order: Order) -> None:
    """Runs the stage that was ordered in this process. Ends it as the stage would."""
    os.close(order.birth)
    for descriptor, standard in zip(order.descriptors, (0, 1, 2), strict=True):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    module, arguments, threads = order.values["module"], order.values["arguments"], order.values["threads"]
    # Before CUDA starts, which reads its variables then.
    os.environ.update(order.values["environment"])
    # For processes that the stage starts. OpenMP itself has read it already.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    setproctitle(" ".join([sys.executable, "-m", module, *arguments]))
    sys.argv = [module, *arguments]
    # It runs again, as the main module. Everything it imports is loaded.
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
