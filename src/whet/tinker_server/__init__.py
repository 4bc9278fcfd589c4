"""A server that speaks the wire of the `tinker` client, whoever trains and samples behind it."""
