"""Whether an address is of this machine alone."""

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether nobody else can reach the host, and nothing goes over a network."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
