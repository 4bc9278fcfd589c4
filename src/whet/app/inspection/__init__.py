"""Show what runs recorded and what templates allow: lists, trees, reports; dev runs and chat."""
