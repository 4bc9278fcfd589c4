"""The store over HTTP: one table of remote methods, its server and its client."""
