"""Show what happened in attempts: dev runs, trees, exactness reports."""
