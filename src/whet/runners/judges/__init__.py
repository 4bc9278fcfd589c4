"""Judges: models that score answers by a rubric, or rank the answers of a group.

`judge.py` asks the model and combines its votes, `prompts.py` writes the prompts and parses the
replies, `cache.py` keeps replies by content, `group_ranking.py` ranks the groups of a step.
"""
