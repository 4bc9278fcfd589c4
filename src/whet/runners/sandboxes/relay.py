"""Program that runs a command in a network of its own, with the gateway at 127.0.0.1.

`python3 relay.py SOCKET PORT COMMAND...` listens on the port of loopback, passes connections on to
the socket, which leads to the gateway outside, and exits as the command does. It imports nothing
but the standard library: in a container there is nothing else.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading


def main() -> int:
    """Serve the port, run the command, and return its exit code."""
    path, port, command = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    listener = socket.create_server(("127.0.0.1", port))
    threading.Thread(target=_accept, args=(listener, path), daemon=True).start()
    code = subprocess.call(command)
    if code < 0:  # the same signal, so that the caller sees it
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _accept(listener: socket.socket, path: str) -> None:
    while True:
        client, _ = listener.accept()
        threading.Thread(target=_connect, args=(client, path), daemon=True).start()


def _connect(client: socket.socket, path: str) -> None:
    with contextlib.suppress(OSError), client, socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        back = threading.Thread(target=_copy, args=(server, client), daemon=True)
        back.start()
        _copy(client, server)
        back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(65536):
            target.sendall(chunk)
        target.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    sys.exit(main())
