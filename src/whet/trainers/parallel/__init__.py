"""Training in several processes of one machine: copies of the model, or its shards."""
