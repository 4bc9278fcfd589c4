"""Model weights: a Hugging Face model in this process, or a model at a Tinker service."""
