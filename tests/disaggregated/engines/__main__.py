"""One fake engine as a process: `python -m tests.disaggregated.engines fastdeploy prefill`.

It takes two free ports, for requests and for caches, and prints them in one line when it listens on both. It ends when
its standard input does: no engine outlives the process that started it.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from typing import TYPE_CHECKING, cast

import uvicorn

from tests.chaos.worker import Connection
from tests.disaggregated.engines.dialects import DIALECTS, HOST, Place
from tests.disaggregated.engines.engine import Engine

if TYPE_CHECKING:
    from tests.disaggregated.engines.job import Role


def main(dialect: str, role: Role) -> None:
    """Serve until standard input ends."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    listeners = [_listener(), _listener()]
    me = Place(role, *(listener.getsockname()[1] for listener in listeners))
    app = Engine(DIALECTS[dialect](me), me)
    # With `proxy_headers`, uvicorn takes the router's client for its own, and no connection would be found to reset.
    config = uvicorn.Config(
        app, http=Connection, proxy_headers=False, ws="none", lifespan="off", loop="asyncio", log_level="critical"
    )
    sys.stdout.write(f"{me.port} {me.connector_port}\n")  # connections wait in the backlog until uvicorn takes them
    sys.stdout.flush()
    uvicorn.Server(config).run(sockets=listeners)


def _listener() -> socket.socket:
    # asyncio sets TCP_NODELAY only where the protocol is named; Nagle's algorithm costs 40 ms for each answer.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.bind((HOST, 0))
    sock.listen(128)
    return sock


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], cast("Role", sys.argv[2]))
