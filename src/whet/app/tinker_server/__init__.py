"""Server for the `tinker` client: trains and samples one model over Tinker's API."""
