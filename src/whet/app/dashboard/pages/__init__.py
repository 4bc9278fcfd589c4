"""The answers of the dashboard's API, one module for each kind of page."""
