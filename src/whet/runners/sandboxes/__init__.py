"""Sandboxes: commands of attempts, each in a folder of its own and with limits.

`sandbox.py` has the protocol and the names, `local.py` plain processes and bubblewrap,
`containers.py` docker and podman, `control_groups.py` the limits of the kernel. `limit_launcher.py`
and `relay.py` are small programs that run on the other side.
"""
