"""The gateway: the endpoint agents talk to, which records the exact tokens of every call."""
