"""Ways to execute an agent: in process, process pool, command, HTTP service."""
