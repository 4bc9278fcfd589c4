"""Servers in threads of their own: the ports that they can listen on."""

import pytest

from whet.errors import ConfigError
from whet.io.server import listen


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_no_machine_has_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match=f"invalid port {port}: expected 0 to 65535"):
        listen("127.0.0.1", port, "--port")
