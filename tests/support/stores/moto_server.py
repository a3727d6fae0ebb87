"""moto's imitation of S3: a thread of the test process. Quick to start, but it believes every key and secret."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from moto.server import ThreadedMotoServer
from support.stores.s3_server import S3Server


@contextmanager
def running_moto() -> Iterator[S3Server]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield S3Server(endpoint=f"http://{host}:{port}", key="any-key", secret="any-secret")
    finally:
        server.stop()
