"""Supervised training: `whet sft` on dialogues, `whet dpo` on pairs, both also from a run."""
