"""SQL of the store, one file a subject; shared by SQLite and PostgreSQL."""
