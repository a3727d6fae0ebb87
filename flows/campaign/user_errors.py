"""A user's mistake as the end of a flow run: its sentence is the message of the state Failed, without a traceback."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar
from uuid import UUID

from prefect import get_run_logger, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import Abort
from prefect.states import Failed

from configs.errors import UserError
from storage.errors import StorageError

P = ParamSpec("P")
R = TypeVar("R")


class _Ended(Abort):
    """`state`: the final state, which the server has; Prefect's engine logs it."""

    def __init__(self, state: State) -> None:
        super().__init__(state.message)
        self.state = state


def fails_with_one_line(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a flow's function: a user's or a store's error ends a flow run of a deployment as Failed, in one line.

    Prefect logs the traceback of each error that a flow raises, and of a Failed state that it returns, but not of
    Abort, which says that the flow run has its final state. Without a deployment the caller gets the error.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (UserError, StorageError) as error:
            if not runtime.deployment.id:
                raise
            get_run_logger().error("%s", error)
            state: State = Failed(message=str(error))
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(UUID(runtime.flow_run.id), state)
            raise _Ended(state) from error

    return run
