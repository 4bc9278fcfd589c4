"""Wire formats: each translates its requests to the canonical form, and calls back to replies."""
