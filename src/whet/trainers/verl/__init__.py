"""verl as the training engine: its config, its rows, its extension points. Nothing else imports it.

Imported in the environment that has verl alone; `settings` is the module that needs none of it.
"""
