"""The store over HTTP: one table of endpoints, a server of it and a client to it."""
