"""Environments by name: tasks, loop, reward and splits that another package defines.

`environment.py` has the protocol and the names, `hosted_agent.py` makes an ordinary agent of one,
in this Python or in another, `completion.py` asks the model. The other modules are one package
each.
"""
