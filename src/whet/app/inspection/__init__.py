"""Show what happened in attempts: dry runs, trees, exactness reports."""
