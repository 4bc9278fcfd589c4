"""Demo agents and tasks, written as a user would write them."""
