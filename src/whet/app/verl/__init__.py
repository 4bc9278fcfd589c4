"""Runs that verl trains: its process, the gateway in front of its servers, and the runners."""
